#!/usr/bin/env python3
"""CuPy with its pool and without: results are held against NumPy and printed as a checksum."""

import zlib

from gpu_use import find_cupy

cupy = find_cupy()
import numpy  # noqa: E402

add_one = cupy.RawKernel(
    'extern "C" __global__ void add_one(int *p, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x;'
    " if (i < n) p[i] += 1; }",
    "add_one",
)


def work():
    """Integer and exactly representable results only, so that the checksum is the same on every run."""
    checksum = 0
    random = numpy.random.default_rng(5)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    for i in range(60):
        n = int(random.integers(1, 400_000))
        host = random.integers(0, 1000, n).astype(numpy.int32)
        with streams[i % 4]:
            a = cupy.asarray(host)
            add_one(((n + 255) // 256,), (256,), (a, n))
            ordered = cupy.sort(a)
            total = cupy.cumsum(ordered.astype(cupy.int64))
            result = cupy.asnumpy(total)
        expected = numpy.cumsum(numpy.sort(host + 1).astype(numpy.int64))
        if not numpy.array_equal(result, expected):
            raise SystemExit(f"FAILED round {i}: CuPy and NumPy differ")
        checksum = zlib.crc32(result.tobytes(), checksum)
    m = cupy.arange(512 * 512, dtype=cupy.float64).reshape(512, 512) % 7
    product = cupy.asnumpy(m @ m)
    if not numpy.array_equal(product, cupy.asnumpy(m) @ cupy.asnumpy(m)):
        raise SystemExit("FAILED matrix product: CuPy and NumPy differ")
    return zlib.crc32(product.tobytes(), checksum)


print(f"own pool {work():08x}")
cupy.get_default_memory_pool().free_all_blocks()
cupy.cuda.set_allocator(None)
print(f"no pool {work():08x}")
