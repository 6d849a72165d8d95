#!/usr/bin/env python3
"""Attention kernels, checkpointing, autocast with a scaler, saved and loaded state, and the profiler (CUPTI)."""

import io

from common import bits, check, torch_with_gpu

torch = torch_with_gpu()
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

torch.manual_seed(4)
q, k, v = (torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.float16) for _ in range(3))
answers = {}
for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
    with sdpa_kernel(backend):
        answers[backend.name] = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
for name, answer in answers.items():
    check(f"attention, {name.lower()}", torch.allclose(answer, answers["MATH"], atol=5e-3))

layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True).cuda()
optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
x = torch.randn(8, 50, 128, device="cuda")
losses = []
for _ in range(15):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = ((checkpoint(layer, x, use_reentrant=False) - 0.5) ** 2).mean()
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
check("training", losses[-1] < losses[0])
print("losses", " ".join(f"{value:.3f}" for value in losses[::5]))

file = io.BytesIO()
torch.save(layer.state_dict(), file)
file.seek(0)
loaded = torch.load(file, map_location="cuda", weights_only=True)
check("saved and loaded", all(torch.equal(a, loaded[name]) for name, a in layer.state_dict().items()))

from torch.profiler import ProfilerActivity, profile

a = torch.ones(1000, 1000, device="cuda")
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
    for _ in range(5):
        a = a * 1.5 + 1
    torch.cuda.synchronize()
wanted = ("aten::mul", "aten::add", "cudaLaunchKernel")
calls = {event.key: event.count for event in seen.key_averages() if event.key in wanted}
print("profiler saw", sorted(calls.items()))
print("bits", bits(a))
