#!/usr/bin/env python3
"""PyTorch, CuPy, Numba and JAX in one process, handing memory to each other through DLPack and the array interface."""

import os

from common import bits, check, find_cupy, numba_with_gpu, torch_with_gpu

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
torch = torch_with_gpu()
cupy = find_cupy()
cuda = numba_with_gpu()
try:
    import jax
    import jax.numpy as jnp

    jax.devices("gpu")
except (ImportError, RuntimeError):
    jax = None


@cuda.jit
def increment(p):
    i = cuda.grid(1)
    if i < p.size:
        p[i] += 1


results = []
for n in (1, 10_000, 1_000_000):
    a = torch.arange(n, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    b = cupy.from_dlpack(a)
    b *= 2
    cupy.cuda.Device().synchronize()
    increment[(n + 127) // 128, 128](cuda.as_cuda_array(b))
    cuda.synchronize()
    check(f"three packages, one memory, {n}", torch.equal(a, torch.arange(n, dtype=torch.int32, device="cuda") * 2 + 1))
    # The owner goes first; the others keep the memory alive.
    view = torch.from_dlpack(b + 5)
    del b
    check(f"memory outlives its owner, {n}", torch.equal(view, a + 5))
    if jax:
        torch.cuda.synchronize()
        c = jnp.from_dlpack(view) * 3
        back = torch.from_dlpack(c)
        torch.cuda.synchronize()
        check(f"JAX and back, {n}", torch.equal(back, (a + 5) * 3))
        del back, c
    results.append(view.clone())
print("JAX", "took part" if jax else "is missing")
print("bits", bits(*results))
