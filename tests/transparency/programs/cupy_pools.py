#!/usr/bin/env python3
"""CuPy's memory pools: the default one, its figures and its limit; the asynchronous, managed and pinned pools; none."""

from common import bits, check, find_cupy

cupy = find_cupy()
import numpy


def work(seed):
    random = numpy.random.default_rng(seed)
    results = []
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    for i in range(30):
        host = random.integers(0, 1000, int(random.integers(1, 500_000))).astype(numpy.int32)
        with streams[i % 3] as stream:
            a = cupy.asarray(host)
            total = cupy.cumsum(cupy.sort(a * 2 + 1).astype(cupy.int64))
            stream.synchronize()
            got = cupy.asnumpy(total)
        if not numpy.array_equal(got, numpy.cumsum(numpy.sort(host * 2 + 1).astype(numpy.int64))):
            check(f"round {i}", False)
        results.append(got)
    return bits(*results)


pool = cupy.get_default_memory_pool()
print("default pool", work(1))
a = cupy.zeros(1000, cupy.uint8)
b = cupy.zeros((3 << 20) + 5, cupy.uint8)
print("used", pool.used_bytes(), "at least held", pool.total_bytes() >= pool.used_bytes())
del a, b
pool.free_all_blocks()
print("after free_all_blocks", pool.used_bytes(), pool.total_bytes(), pool.n_free_blocks())
pool.set_limit(size=64 << 20)
kept = cupy.zeros(40 << 20, cupy.uint8)
try:
    cupy.zeros(40 << 20, cupy.uint8)
    check("the pool's limit", False)
except cupy.cuda.memory.OutOfMemoryError as error:
    print("the pool's limit:", error)
pool.set_limit(size=0)
del kept
try:
    cupy.cuda.alloc(1 << 46)
    check("too much is refused", False)
except cupy.cuda.memory.OutOfMemoryError:
    check("too much is refused", True)

other = cupy.cuda.MemoryPool()
with cupy.cuda.using_allocator(other.malloc):
    print("another pool", work(2))
print("its blocks are free", other.used_bytes() == 0)
other.free_all_blocks()
try:
    asynchronous = cupy.cuda.MemoryAsyncPool()
    with cupy.cuda.using_allocator(asynchronous.malloc):
        print("asynchronous pool", work(3))
except RuntimeError as error:
    print("asynchronous pool:", error)
managed = cupy.cuda.MemoryPool(cupy.cuda.malloc_managed)
with cupy.cuda.using_allocator(managed.malloc):
    print("managed pool", work(4))
managed.free_all_blocks()
with cupy.cuda.using_allocator(None):
    print("no pool", work(5))

pinned = cupy.get_default_pinned_memory_pool()
memory = cupy.cuda.alloc_pinned_memory(1 << 20)
host = numpy.frombuffer(memory, numpy.int32, (1 << 20) // 4)
host[:] = 7
on_card = cupy.empty(host.size, cupy.int32)
on_card.set(host)
check("pinned", int(on_card.sum()) == 7 * host.size)
del host, memory
pinned.free_all_blocks()
print("pinned blocks left", pinned.n_free_blocks())

block = cupy.cuda.alloc(12345)
check("memory object", block.mem.size >= 12345)
with cupy.cuda.Device(0):
    free, total = cupy.cuda.Device(0).mem_info
print("total", total, "free within it", 0 < free <= total)
