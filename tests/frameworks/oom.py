#!/usr/bin/env python3
"""PyTorch under a limit below its need: it must raise its usual OutOfMemoryError, recover and go on.

Run with GPURECLAIM_HARD_LIMIT set to as many MiB as --limit-mib says. Exit status 1 when a check failed.
"""

import argparse
import time

from gpu_use import Gpu, find_torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--limit-mib", type=int, required=True)
args = parser.parse_args()

gpu = Gpu()
torch = find_torch()

MIB = 2**20
SLACK_MIB = 128
failed = 0


def check(good, what):
    global failed
    print("ok    " if good else "FAILED", what)
    failed += not good


torch.zeros(1, device="cuda")
(torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()
context_mib = (gpu.used() or 0) - torch.cuda.memory_reserved() / MIB

free, total = torch.cuda.mem_get_info()
check(total == args.limit_mib * MIB, f"mem_get_info total is {total / MIB:.0f} MiB")
check(free <= total, f"mem_get_info free is {free / MIB:.0f} MiB")
seen = torch.cuda.get_device_properties(0).total_memory
# The runtime's device properties do not come from the calls that the limit is told by on every version.
print(f"#      get_device_properties total_memory is {seen / MIB:.0f} MiB")

for attempt in range(3):
    held = []
    raised = None
    try:
        while len(held) * 64 < 4 * args.limit_mib:
            held.append(torch.full((16, MIB), attempt, dtype=torch.int32, device="cuda"))
            if len(held) % 8 == 0:
                gpu.used()
    except torch.cuda.OutOfMemoryError as error:
        raised = str(error).splitlines()[0]
    torch.cuda.synchronize()
    gpu.used()
    check(raised is not None, f"attempt {attempt}: OutOfMemoryError after {len(held) * 64} MiB")
    check(len(held) * 64 >= args.limit_mib - 192, f"attempt {attempt}: not before the limit was near")
    del held[-8:]  # room for the comparison itself
    intact = all(int((block != attempt).sum()) == 0 for block in held[::4])
    check(intact, f"attempt {attempt}: what was allocated before is intact")
    del held

# A search for the largest batch that fits, as many training scripts do it.
batch = 1 << 20
while batch:
    try:
        x = torch.randn(batch, 4096, device="cuda")
        y = (x @ torch.randn(4096, 4096, device="cuda")).relu().sum()
        y.item()
        break
    except torch.cuda.OutOfMemoryError:
        x = y = None
        batch //= 2
        gpu.used()
check(batch > 0, f"largest batch that fits: {batch}")
x = y = None

# Its own cache holds the memory: PyTorch gives it up, and its first retry gets through.
torch.cuda.empty_cache()
pieces = [torch.empty(90 * MIB, dtype=torch.uint8, device="cuda") for _ in range((args.limit_mib - 512) // 90)]
del pieces
before = torch.cuda.memory_stats()
begin = time.perf_counter()
try:
    large = torch.empty((args.limit_mib - 512) * MIB, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError:
    large = None
took = 1e3 * (time.perf_counter() - begin)
after = torch.cuda.memory_stats()
retries, errors = (after[key] - before[key] for key in ("num_alloc_retries", "num_ooms"))
check(large is not None, f"a block in place of PyTorch's own cache, after {took:.0f} ms")
check(retries == 1 and errors == 0, f"{retries} retry of PyTorch's, {errors} errors")
del large

torch.cuda.empty_cache()
large = torch.empty((args.limit_mib - 256) * MIB, dtype=torch.uint8, device="cuda")
check(True, "one large block after all that")
gpu.used()
del large

allowed = args.limit_mib + context_mib + SLACK_MIB
if gpu.used() is None:
    print("-      the GPU cannot be asked")
else:
    check(gpu.peak <= allowed, f"peak on the GPU {gpu.peak:.0f} MiB, allowed {allowed:.0f} MiB")
raise SystemExit(1 if failed else 0)
