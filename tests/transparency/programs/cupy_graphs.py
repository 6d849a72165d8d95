#!/usr/bin/env python3
"""CuPy: graphs captured from a stream and replayed, raw kernels and modules, textures, FFT and linear algebra."""

from common import bits, check, find_cupy

cupy = find_cupy()
import numpy

code = """
extern "C" __global__ void twice(int *p, int n)
{
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n)
                p[i] *= 2;
}
extern "C" __global__ void plus(int *p, const int *q, int n)
{
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n)
                p[i] += q[i];
}
"""
module = cupy.RawModule(code=code)
twice, plus = module.get_function("twice"), module.get_function("plus")
n = 100_000
shape = ((n + 255) // 256,), (256,)
p, q = cupy.ones(n, cupy.int32), cupy.arange(n, dtype=cupy.int32)
twice(*shape, (p, n))
plus(*shape, (p, q, n))
cupy.cuda.Device().synchronize()
p.fill(1)
stream = cupy.cuda.Stream(non_blocking=True)
cupy.cuda.Device().synchronize()
with stream:
    stream.begin_capture()
    for _ in range(3):
        twice(*shape, (p, n))
        plus(*shape, (p, q, n))
    graph = stream.end_capture()
wanted = numpy.ones(n, numpy.int32)
results = []
for turn in range(4):
    # Memory comes and goes between replays.
    cupy.full(n, -1, cupy.int32)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    for _ in range(3):
        wanted = wanted * 2 + numpy.arange(n, dtype=numpy.int32)
    check(f"replay {turn}", numpy.array_equal(cupy.asnumpy(p), wanted))
    results.append(p.copy())
del graph

a = cupy.random.RandomState(5).normal(size=(300, 300))
check("solve", bool(cupy.allclose(a @ cupy.linalg.solve(a, cupy.ones(300)), 1, atol=1e-6)))
u, s, v = cupy.linalg.svd(a)
check("svd", bool(cupy.allclose((u * s) @ v, a, atol=1e-8)))
for size in (1000, 1 << 18, 99_991):
    x = cupy.random.RandomState(size).normal(size=size)
    check(f"fft {size}", bool(cupy.allclose(cupy.fft.ifft(cupy.fft.fft(x)).real, x, atol=1e-9)))

form = cupy.cuda.texture.ChannelFormatDescriptor(32, 0, 0, 0, cupy.cuda.runtime.cudaChannelFormatKindFloat)
array = cupy.cuda.texture.CUDAarray(form, 64, 32)
pixels = numpy.arange(64 * 32, dtype=numpy.float32).reshape(32, 64)
array.copy_from(pixels)
back = numpy.zeros_like(pixels)
array.copy_to(back)
check("array there and back", numpy.array_equal(pixels, back))
print("random numbers", bits(cupy.random.RandomState(9).randint(0, 1000, 5000)))
print("bits", bits(*results))
