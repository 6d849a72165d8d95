#!/usr/bin/env python3
"""Trains a small transformer on random sequences of changing length and prints what it cost.

With --deterministic the losses are printed as exact hex floats: two runs on the same machine must print the same ones,
whatever allocates their memory. Set PYTORCH_NO_CUDA_MEMORY_CACHING=1 to take PyTorch's own cache out of the way.
"""

import argparse
import os
import random
import time

from gpu_use import Gpu, find_torch
from turns import Turns, add_options

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--deterministic", action="store_true")
parser.add_argument("--footprint", action="store_true", help="print what is held on the GPU, over time")
add_options(parser)
args = parser.parse_args()

if args.deterministic:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

gpu = Gpu()
torch = find_torch()

torch.manual_seed(1234)
random.seed(1234)
if args.deterministic:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    for choose in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):
        getattr(torch.backends.cuda, choose)(False)

WIDTH, BATCH, LENGTHS = 512, 16, (64, 96, 128, 160, 200, 256)
layer = torch.nn.TransformerEncoderLayer(WIDTH, nhead=8, dim_feedforward=4 * WIDTH, batch_first=True)
model = torch.nn.TransformerEncoder(layer, num_layers=6).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)


def step(length):
    x = torch.randn(BATCH, length, WIDTH, device="cuda")
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


if args.footprint:
    seen = []
    with gpu.watched(seen):
        for _ in range(args.steps):
            step(random.choice(LENGTHS))
        torch.cuda.synchronize()
    for seconds, mib in seen:
        print(f"footprint {seconds:.4f} {mib:.0f}")
    raise SystemExit

for _ in range(10):
    step(128)
torch.cuda.synchronize()
gpu.used()

if args.turns:
    Turns(torch.cuda.synchronize, args.times).take(lambda: step(random.choice(LENGTHS)), args.steps)
    raise SystemExit

losses = []
begin = time.perf_counter()
for i in range(args.steps):
    loss = step(random.choice(LENGTHS))
    if i % 10 == 9:
        losses.append(loss.detach())
        gpu.used()
torch.cuda.synchronize()
seconds = time.perf_counter() - begin
with gpu.watched():
    for length in LENGTHS * 2:
        step(length)
    torch.cuda.synchronize()

for i, loss in enumerate(losses):
    value = loss.item()
    print(f"loss {10 * i + 10} {float.hex(value) if args.deterministic else format(value, '.6f')}")
print(f"# seconds {seconds:.3f}")
print(f"# peak_mib {gpu.peak:.0f}")
print(f"# allocated_peak_mib {torch.cuda.max_memory_allocated() / 2**20:.0f}")
