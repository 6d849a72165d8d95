#!/usr/bin/env python3
"""Times a block of 1 MiB made and dropped from Python, as JSON in the form of pair_static.

    pair_python.py torch|cupy [--no-cache]

--no-cache takes CuPy's pool out of the way; PyTorch's goes with PYTORCH_NO_CUDA_MEMORY_CACHING=1. Python's own part is
in each figure, so only figures of the same package may be compared.
"""

import json
import sys
import time

from gpu_use import find_cupy, find_torch

MIB, PAIRS, REPETITIONS = 1 << 20, 2000, 7


def torch_pairs():
    torch = find_torch()

    def run(pairs):
        for _ in range(pairs):
            torch.empty(MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()

    return run


def cupy_pairs(no_cache):
    cupy = find_cupy()
    if no_cache:
        cupy.cuda.set_allocator(None)

    def run(pairs):
        for _ in range(pairs):
            cupy.cuda.alloc(MIB)
        cupy.cuda.runtime.deviceSynchronize()

    return run


def main():
    package = sys.argv[1] if len(sys.argv) > 1 else ""
    if package not in ("torch", "cupy") or sys.argv[2:] not in ([], ["--no-cache"]):
        sys.exit(__doc__)
    run = torch_pairs() if package == "torch" else cupy_pairs(bool(sys.argv[2:]))
    run(PAIRS)
    times = []
    for _ in range(REPETITIONS):
        begin = time.perf_counter()
        run(PAIRS)
        times.append((time.perf_counter() - begin) * 1e6 / PAIRS)
    times.sort()
    figures = {"median": times[REPETITIONS // 2], "least": times[0], "most": times[-1]}
    print(json.dumps({"schema": 1, "program": package, "unit": "us", "results": {"pair 1 MiB": figures}}))


main()
