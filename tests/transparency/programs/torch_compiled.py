#!/usr/bin/env python3
"""torch.compile in the mode of the first argument (reduce-overhead uses CUDA graphs): inference and training."""

import sys

from common import check, torch_with_gpu

torch = torch_with_gpu()
mode = sys.argv[1] if len(sys.argv) > 1 else "reduce-overhead"


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


torch.manual_seed(1)
model = torch.nn.Sequential(*[Block(128) for _ in range(3)]).cuda()
compiled = torch.compile(model, mode=mode)
x = torch.randn(64, 128, device="cuda")
with torch.no_grad():
    wanted = model(x)
    for _ in range(6):
        got = compiled(x).clone()
check("inference", torch.allclose(got, wanted, rtol=1e-3, atol=1e-3))
print(f"inference sum {got.double().abs().mean().item():.4f}")

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for i in range(25):
    torch.compiler.cudagraph_mark_step_begin()
    loss = ((compiled(x) - 1.0) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
check("training", losses[-1] < losses[0])
print("losses", " ".join(f"{value:.3f}" for value in losses[::6]))
