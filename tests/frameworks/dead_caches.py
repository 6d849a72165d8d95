#!/usr/bin/env python3
"""A model just too large by what dead caches hold: PyTorch, CuPy, JAX and a stream-ordered pool in one process each
fill a cache and drop all of it, PyTorch the largest; then a model in CuPy needs more than what is left without
PyTorch's.

    dead_caches.py [--gpu-gib N]     N: pretend that the GPU is that small, by holding the rest

Natively it ends with an error: "model: refused", as CuPy empties its own cache and the driver takes its pools back, but
nobody asks PyTorch. Under the library the model gets its memory: "model: served".
CuPy's pool is registered by hand, as a program would do it; JAX runs on cuMemAllocAsync (its other allocator has no
call that gives memory back). Frameworks that are missing are left out. Lines "# name value" tell what each cache held.
Exit status 1 when memory did not hold what was written or a framework did not go on.
"""

import argparse
import ctypes
import os
import time

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "cuda_async"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

from gpu_use import Gpu, find_torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--gpu-gib", type=float)
args = parser.parse_args()

gpu = Gpu()
torch = find_torch()
try:
    import gpureclaim

    helped = gpureclaim.available()
except ImportError:
    helped = False
try:
    import cupy
except ImportError:
    cupy = None
try:
    import jax
    import jax.numpy as jnp

    jax.devices("gpu")
except (ImportError, RuntimeError) as error:
    print("#  no JAX:", type(error).__name__)
    jax = None

MIB = 2**20
driver = ctypes.CDLL("libcuda.so.1")
failed = 0


def check(good, what):
    global failed
    print("ok    " if good else "FAILED", what)
    failed += not good


def free_bytes():
    return torch.cuda.mem_get_info()[0]


# Everybody's context, kernels and first allocations, before anything is measured.
torch.ones(1024, device="cuda").sum().item()
if cupy:
    cupy.ones(1024).sum().get()
if jax:
    jax.block_until_ready(jnp.ones(1024, dtype=jnp.uint8).sum())
ballast = None
if args.gpu_gib and free_bytes() > args.gpu_gib * 2**30:
    ballast = ctypes.c_uint64()
    rest = (free_bytes() - int(args.gpu_gib * 2**30)) // (2 * MIB) * 2 * MIB
    if driver.cuMemAlloc_v2(ctypes.byref(ballast), ctypes.c_size_t(rest)):
        raise SystemExit("the ballast was refused")
whole = free_bytes()
part = whole // 6 // (64 * MIB) * 64 * MIB  # what each cache gets


def held(name, fill):
    before = gpu.used()
    fill()
    torch.cuda.synchronize()
    if before is not None:
        print(f"# {name}_mib {gpu.used() - before:.0f}")


def fill_torch():
    blocks = [torch.full((64 * MIB,), 1, dtype=torch.uint8, device="cuda") for _ in range(2 * part // (64 * MIB))]
    del blocks


def fill_cupy():
    blocks = [cupy.full(64 * MIB, 1, dtype=cupy.uint8) for _ in range(part // (64 * MIB))]
    cupy.cuda.Device().synchronize()
    del blocks


def fill_jax():
    blocks = [jnp.full(64 * MIB, 1, dtype=jnp.uint8) for _ in range(part // (64 * MIB))]
    jax.block_until_ready(blocks)
    for block in blocks:
        block.delete()


def fill_pool():
    """The device's default pool with a threshold that keeps everything, as frameworks set it."""
    pool, keep = ctypes.c_void_p(), ctypes.c_uint64(2**64 - 1)
    if driver.cuDeviceGetDefaultMemPool(ctypes.byref(pool), 0):
        return
    driver.cuMemPoolSetAttribute(pool, 4, ctypes.byref(keep))  # CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    pointers = []
    for _ in range(part // (64 * MIB)):
        pointer = ctypes.c_uint64()
        if driver.cuMemAllocAsync(ctypes.byref(pointer), ctypes.c_size_t(64 * MIB), None):
            break
        pointers.append(pointer)
    for pointer in pointers:
        driver.cuMemFreeAsync(pointer, None)


dead = 1
held("torch", fill_torch)
if cupy:
    held("cupy", fill_cupy)
    dead += 1
    if helped:
        gpureclaim.on_reclaim(cupy.get_default_memory_pool().free_all_blocks, name="cupy")
if jax:
    held("jax", fill_jax)
    dead += 1
held("pool", fill_pool)
dead += 1
if helped:
    gpureclaim.torch()

# The others' caches go by themselves; of PyTorch's, two parts, one must come back before this fits.
need = (whole - part) // (2 * MIB) * 2 * MIB
print(f"# free_mib {whole / MIB:.0f}\n# need_mib {need / MIB:.0f}\n# caches {dead}")


def make_model():
    """Its address, or None; and whoever keeps it."""
    if cupy:
        try:
            array = cupy.empty(need, dtype=cupy.uint8)
            return array.data.ptr, array
        except cupy.cuda.memory.OutOfMemoryError:
            return None, None
    pointer = ctypes.c_uint64()
    if driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(need)):
        return None, None
    return pointer.value, pointer


begin = time.perf_counter()
address, model = make_model()
print(f"# seconds {time.perf_counter() - begin:.3f}")
print("model:", "served" if address else "refused")
if address:
    host = (ctypes.c_uint8 * 2)()
    good = driver.cuMemsetD8_v2(ctypes.c_uint64(address), ctypes.c_ubyte(5), ctypes.c_size_t(need)) == 0
    for at, offset in enumerate((0, need - 1)):
        good &= driver.cuMemcpyDtoH_v2(ctypes.byref(host, at), ctypes.c_uint64(address + offset),
                                       ctypes.c_size_t(1)) == 0
    check(good and list(host) == [5, 5], "the model's memory holds what was written")
    if cupy:
        del model
        cupy.get_default_memory_pool().free_all_blocks()
    else:
        driver.cuMemFree_v2(model)
check(torch.ones(1000, device="cuda").sum().item() == 1000, "PyTorch goes on")
if cupy:
    check(int(cupy.arange(1000).sum()) == 499500, "CuPy goes on")
if jax:
    check(int(jnp.arange(1000).sum()) == 499500, "JAX goes on")
raise SystemExit(1 if failed else 0)
