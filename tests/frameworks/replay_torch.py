#!/usr/bin/env python3
"""Plays recorded traces through PyTorch's allocator: each allocation is a tensor of bytes.

    replay_torch.py [--idle] TRACE...

Prints for each trace what tests/bench/replay prints, and what PyTorch reserved at its peak. With
PYTORCH_NO_CUDA_MEMORY_CACHING=1 each tensor is a cudaMalloc, so that under the library the same script, with the same
cost of Python in it, shows our pools. A kernel writes to each new tensor unless --idle is given.
"""

import os
import sys
import time
from pathlib import Path

from gpu_use import Gpu, skip

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "traces"))
import traces  # noqa: E402

SAMPLES = 300  # of the footprint, which is slow to ask for
WRITTEN = 65536  # bytes of each tensor


def replay(torch, path, idle):
    operations = traces.read(path)
    peak_live = traces.peak_live(operations)
    gpu = Gpu()
    torch.empty(1 << 20, dtype=torch.uint8, device="cuda").zero_()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = gpu.used()
    torch.cuda.reset_peak_memory_stats()
    base_reserved = torch.cuda.memory_reserved()
    tensors = [None] * sum(1 for operation in operations if not operation[2])
    live = sampled = 0
    next_sample, spent, held = 0, 0.0, 0.0
    begin = time.perf_counter()
    for i, (_, _, is_free, number, size) in enumerate(operations):
        if is_free:
            tensors[number] = None
            live -= size
        else:
            tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            if not idle:
                tensor[:WRITTEN].zero_()
            tensors[number] = tensor
            live += size
        if idle:
            continue
        if i >= next_sample or live > sampled + peak_live // SAMPLES or (live == peak_live and live > sampled):
            spent += time.perf_counter() - begin
            sampled = max(sampled, live)
            next_sample = i + len(operations) // SAMPLES + 1
            now = gpu.used()
            if now is not None:
                held = max(held, now - before)
            begin = time.perf_counter()
    torch.cuda.synchronize()
    spent += time.perf_counter() - begin
    print(f"trace {Path(path).name}")
    print(f"operations {len(operations)}")
    print(f"us_per_operation {spent * 1e6 / len(operations):.3f}")
    print(f"peak_live_mib {peak_live / 2**20:.1f}")
    print(f"peak_reserved_mib {(torch.cuda.max_memory_reserved() - base_reserved) / 2**20:.1f}")
    if not idle and before is not None:
        print(f"peak_held_mib {held:.1f}")
        print(f"ratio {held * 2**20 / peak_live:.3f}")
    sys.stdout.flush()


def main():
    idle = "--idle" in sys.argv[1:]
    paths = [argument for argument in sys.argv[1:] if argument != "--idle"]
    if not paths or any(path.startswith("-") for path in paths):
        sys.exit(__doc__)
    try:
        import torch
    except ImportError:
        skip("no PyTorch")
    for path in paths:
        # Each in a process of its own, which finds an empty GPU; importing PyTorch takes longer than most traces.
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                if not torch.cuda.is_available():
                    skip("PyTorch sees no CUDA device")
                replay(torch, path, idle)
                status = 0
            except SystemExit as end:
                status = end.code
            except BaseException as error:
                print(f"replay_torch: {path}: {error!r}", file=sys.stderr)
                status = 1
            sys.stdout.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            sys.exit(status)


main()
