#!/usr/bin/env python3
"""Numba's own memory manager: kernels, shared memory, streams, pinned, mapped and managed arrays, late frees."""

from common import bits, check, numba_with_gpu

cuda = numba_with_gpu()
import numpy  # noqa: E402
from numba import int32  # noqa: E402


@cuda.jit
def scale_add(x, y, out, factor):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i] * factor + y[i]


@cuda.jit
def block_sums(x, out):
    shared = cuda.shared.array(256, int32)
    i = cuda.grid(1)
    lane = cuda.threadIdx.x
    shared[lane] = x[i] if i < x.size else 0
    cuda.syncthreads()
    step = 128
    while step > 0:
        if lane < step:
            shared[lane] += shared[lane + step]
        cuda.syncthreads()
        step //= 2
    if lane == 0:
        out[cuda.blockIdx.x] = shared[0]


random = numpy.random.default_rng(3)
results = []
for n in (10, 1000, 65_537, 2_000_000):
    x = random.integers(0, 1000, n).astype(numpy.int32)
    y = random.integers(0, 1000, n).astype(numpy.int32)
    blocks = (n + 255) // 256
    out = cuda.device_array(n, numpy.int32)
    scale_add[blocks, 256](cuda.to_device(x), cuda.to_device(y), out, 5)
    host = out.copy_to_host()
    check(f"scale and add {n}", numpy.array_equal(host, x * 5 + y))
    sums = cuda.device_array(blocks, numpy.int32)
    block_sums[blocks, 256](out, sums)
    check(f"block sums {n}", int(sums.copy_to_host().sum()) == int(host.sum(dtype=numpy.int64)))
    results += [host, sums.copy_to_host()]

streams = [cuda.stream() for _ in range(4)]
pinned = [cuda.pinned_array(100_000, numpy.int32) for _ in streams]
outputs = []
for turn in range(20):
    stream, host = streams[turn % 4], pinned[turn % 4]
    stream.synchronize()
    host[:] = turn
    on_card = cuda.to_device(host, stream=stream)
    out = cuda.device_array(100_000, numpy.int32, stream=stream)
    scale_add[391, 256, stream](on_card, on_card, out, 2)
    # The inputs die while the stream may still be at work.
    del on_card
    outputs.append((turn, out))
for stream in streams:
    stream.synchronize()
check("late frees on streams", all((out.copy_to_host() == 3 * turn).all() for turn, out in outputs))

mapped = cuda.mapped_array(4096, numpy.int32)
mapped[:] = 4
managed = cuda.managed_array(4096, numpy.int32)
managed[:] = 9
scale_add[16, 256](mapped, mapped, managed, 6)
cuda.synchronize()
check("mapped and managed", bool((numpy.asarray(managed) == 28).all()))
print("bits", bits(*results))
