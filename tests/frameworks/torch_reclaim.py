#!/usr/bin/env python3
"""gpureclaim.torch() with a real PyTorch: each thing it registers gives memory back, another user of the process gets
it, and training goes on with the same losses, bit for bit.

    GPURECLAIM_HARD_LIMIT=6GiB LD_PRELOAD=... PYTHONPATH=tools/python torch_reclaim.py

Exit status 1 when a check failed.
"""

import ctypes
import gc
import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from gpu_use import find_torch

import gpureclaim

torch = find_torch()
if not gpureclaim.available():
    raise SystemExit("the library is not preloaded")

MIB = 2**20
failed = 0


def check(good, what):
    global failed
    print("ok    " if good else "FAILED", what)
    failed += not good


def mib(count):
    return f"{count / MIB:.1f} MiB"


def live():
    return gpureclaim.status()["live_bytes"]


torch.manual_seed(1)
torch.use_deterministic_algorithms(True)
torch.zeros(1, device="cuda")
remove = gpureclaim.torch(limit_ms=5000)  # generous: here it is shown what is given, not how fast

# Garbage that only the collector finds.
gc.collect()
gc.disable()
allocated = torch.cuda.memory_allocated()
cycle = [torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")]
cycle.append(cycle)
del cycle
held, before = torch.cuda.memory_allocated() - allocated, live()
gpureclaim.reclaim(rung="purge")
check(held >= 300 * MIB and torch.cuda.memory_allocated() <= allocated, f"gc: {mib(held)} of garbage, given up")
check(before - live() >= 300 * MIB, f"gc: {mib(before - live())} less held from the library")
gc.enable()

# Cached blocks.
blocks = [torch.empty(50 * MIB, dtype=torch.uint8, device="cuda") for _ in range(10)]
del blocks
cached, before = torch.cuda.memory_reserved() - torch.cuda.memory_allocated(), live()
gpureclaim.reclaim(rung="purge")
left = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
check(cached >= 500 * MIB and left < 50 * MIB, f"empty_cache: {mib(cached)} cached, {mib(left)} left")
check(before - live() >= 450 * MIB, f"empty_cache: {mib(before - live())} less held from the library")

# The workspaces of cuBLAS: state, so only a drop takes them.
a = torch.randn(512, 512, device="cuda")
reference = (a @ a).clone()
gpureclaim.reclaim(rung="purge")
purged = torch.cuda.memory_allocated()
gpureclaim.reclaim(rung="drop")
dropped = torch.cuda.memory_allocated()
check(dropped < purged, f"cuBLAS workspaces: {mib(purged - dropped)} given up")
check(torch.equal(a @ a, reference), "cuBLAS: the same product afterwards")

# The plans of cuFFT.
signals = [torch.randn(64, 1000 + 17 * i, device="cuda") for i in range(8)]
spectra = [torch.fft.fft(signal) for signal in signals]
plans, before = torch.backends.cuda.cufft_plan_cache[0].size, gpureclaim.status()["device_free_bytes"]
gpureclaim.reclaim(rung="drop")
left = torch.backends.cuda.cufft_plan_cache[0].size
back = gpureclaim.status()["device_free_bytes"] - before
check(plans >= 8 and left == 0,
      f"cuFFT: {plans} plans, {left} left; with all the rest {mib(back)} more free on the GPU")
same = all(torch.equal(torch.fft.fft(signal), spectrum) for signal, spectrum in zip(signals, spectra))
check(same, "cuFFT: the same spectra afterwards")
del signals, spectra

# Somebody else in the process, who knows nothing of PyTorch, needs what PyTorch has cached and dropped.
driver = ctypes.CDLL("libcuda.so.1")
limit = gpureclaim.status()["hard_limit_bytes"]
if limit is None:
    print("-      no hard limit: the other user is left out")
else:
    need = limit * 6 // 10 // MIB * MIB
    block = torch.empty(need, dtype=torch.uint8, device="cuda")
    del block
    cycle = [torch.empty(limit // 10, dtype=torch.uint8, device="cuda")]
    cycle.append(cycle)
    del cycle
    pointer = ctypes.c_uint64()
    begin = time.perf_counter()
    rc = driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(need))
    took = 1e3 * (time.perf_counter() - begin)
    check(rc == 0, f"another user gets {mib(need)} that PyTorch had cached, in {took:.1f} ms")
    if rc == 0:
        check(driver.cuMemFree_v2(pointer) == 0, "and frees it")


def train(disturb):
    """The losses of 40 steps, with a reclaim of everything after each third one."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU(),
        torch.nn.Linear(1024, 8)
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for step in range(40):
        x = torch.randn(64 + 16 * (step % 5), 256, device="cuda")
        loss = (model(x) - torch.fft.fft(x).abs()[:, :8]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if disturb and step % 3 == 2:
            gpureclaim.reclaim(rung="drop")
    return [float.hex(loss.item()) for loss in losses]


quiet, disturbed = train(False), train(True)
check(quiet == disturbed, f"40 training steps with 13 drops in between: last loss {quiet[-1]} and {disturbed[-1]}")
remove()
before = torch.cuda.memory_reserved()
block = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
del block
gpureclaim.reclaim(rung="purge")
check(torch.cuda.memory_reserved() >= before, "taken off, it is not called any more")
raise SystemExit(1 if failed else 0)
