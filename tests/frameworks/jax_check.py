#!/usr/bin/env python3
"""JAX under the allocator that XLA_PYTHON_CLIENT_ALLOCATOR names: results are held against NumPy and printed as a
checksum. The platform allocator asks the driver for every buffer, the default one reserves most of the GPU at once.
"""

import os
import zlib

from gpu_use import find_jax

os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
jax = find_jax()
import jax.numpy as jnp  # noqa: E402
import numpy  # noqa: E402


@jax.jit
def work(a):
    """Integers only: exact on any hardware."""
    ordered = jnp.sort(a)
    return jnp.cumsum(ordered) + jnp.flip(ordered)


@jax.jit
def product(m):
    return m @ m


checksum = 0
random = numpy.random.default_rng(11)
for i in range(40):
    n = 1000 * (1 + i % 5)
    host = random.integers(0, 1000, n).astype(numpy.int32)
    result = numpy.asarray(work(jnp.asarray(host)))
    ordered = numpy.sort(host)
    if not numpy.array_equal(result, numpy.cumsum(ordered, dtype=numpy.int32) + ordered[::-1]):
        raise SystemExit(f"FAILED round {i}: JAX and NumPy differ")
    checksum = zlib.crc32(result.tobytes(), checksum)
for n in (64, 300, 1024):
    m = random.integers(0, 3, (n, n)).astype(numpy.float32)
    result = numpy.asarray(product(jnp.asarray(m)))
    if not numpy.array_equal(result, m @ m):
        raise SystemExit(f"FAILED product of {n}: JAX and NumPy differ")
    checksum = zlib.crc32(result.tobytes(), checksum)
print(f"{os.environ['XLA_PYTHON_CLIENT_ALLOCATOR']} allocator {checksum:08x}")
