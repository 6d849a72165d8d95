/*
 * Costs through the CUDA runtime. Built twice, pair_static and pair_shared, because a static runtime reaches the driver
 * by another door than a shared one that the loader can see.
 */
#include "bench.h"

#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>

namespace
{
cudaStream_t streams[BENCH_STREAMS];
enum { THREADS = 32, SKIPPED = 77 };
} // namespace

/* As in kernels.h: a simulated device knows them by these names. */
extern "C" __global__ void gr_fill(uint32_t *p, uint32_t value, uint64_t n)
{
        for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (uint64_t)blockDim.x)
                p[i] = value;
}

extern "C" __global__ void gr_late_fill(uint32_t *p, uint32_t value, uint64_t n, uint64_t ns)
{
        uint64_t begin, now;

        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
        do {
                asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        } while (now - begin < ns);
        for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (uint64_t)blockDim.x)
                p[i] = value;
}

static int alloc(void **ret, size_t bytes)
{
        return cudaMalloc(ret, bytes);
}

static int release(void *p)
{
        return cudaFree(p);
}

static int alloc_async(void **ret, size_t bytes)
{
        return cudaMallocAsync(ret, bytes, streams[0]);
}

static int release_async(void *p)
{
        return cudaFreeAsync(p, streams[0]);
}

static int work(int stream, void *p, unsigned us)
{
        if (us)
                gr_late_fill<<<1, THREADS, 0, streams[stream]>>>((uint32_t *)p, 1, THREADS, us * UINT64_C(1000));
        else
                gr_fill<<<1, THREADS, 0, streams[stream]>>>((uint32_t *)p, 1, THREADS);
        return cudaGetLastError();
}

static int synchronize(void)
{
        return cudaDeviceSynchronize();
}

int main(int argc, char **argv)
{
        bench_settings settings = bench_arguments(argc, argv);
        bench_ops ops = {alloc, release, alloc_async, release_async, work, synchronize};
        int devices = 0, error = cudaGetDeviceCount(&devices);

        if (error || devices == 0) {
                fprintf(stderr, "skipped: no CUDA device (%s)\n", cudaGetErrorName((cudaError_t)error));
                return SKIPPED;
        }
        for (int i = 0; i < BENCH_STREAMS; i++) {
                error = cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking);
                if (error) {
                        fprintf(stderr, "no stream: %s\n", cudaGetErrorName((cudaError_t)error));
                        return 1;
                }
        }
        bench_run(&settings, &ops);
        return 0;
}
