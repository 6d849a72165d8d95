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
cudaStream_t streams[BENCH_STREAMS + 1]; /* the first is the default stream */
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

/* A thread makes only streams of its own, or nobody else is there. */
static int stream_of(cudaStream_t *ret, int stream)
{
        if (stream > 0 && !streams[stream]) {
                int error = cudaStreamCreateWithFlags(&streams[stream], cudaStreamNonBlocking);

                if (error)
                        return error;
        }
        *ret = streams[stream];
        return 0;
}

static int attach(void)
{
        return cudaSetDevice(0);
}

static int alloc(void **ret, size_t bytes, int)
{
        return cudaMalloc(ret, bytes);
}

static int release(void *p, int)
{
        return cudaFree(p);
}

static int alloc_async(void **ret, size_t bytes, int stream)
{
        cudaStream_t on;
        int error = stream_of(&on, stream);

        return error ? error : (int)cudaMallocAsync(ret, bytes, on);
}

static int release_async(void *p, int stream)
{
        return cudaFreeAsync(p, streams[stream]);
}

static int alloc_pinned(void **ret, size_t bytes)
{
        return cudaMallocHost(ret, bytes);
}

static int release_pinned(void *p)
{
        return cudaFreeHost(p);
}

static int work(int stream, void *p, unsigned us)
{
        cudaStream_t on;
        int error = stream_of(&on, stream);

        if (error)
                return error;
        if (us)
                gr_late_fill<<<1, THREADS, 0, on>>>((uint32_t *)p, 1, THREADS, us * UINT64_C(1000));
        else
                gr_fill<<<1, THREADS, 0, on>>>((uint32_t *)p, 1, THREADS);
        return cudaGetLastError();
}

static int synchronize(void)
{
        return cudaDeviceSynchronize();
}

/* The pool at its best: it gives nothing back. */
static int keep_all(void)
{
        uint64_t all = UINT64_MAX;
        cudaMemPool_t pool;
        int error = cudaDeviceGetDefaultMemPool(&pool, 0);

        return error ? error : (int)cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all);
}

int main(int argc, char **argv)
{
        bench_settings settings = bench_arguments(argc, argv);
        bench_ops ops = {attach, alloc, release, alloc_pinned, release_pinned, work, synchronize};
        int devices = 0, error = cudaGetDeviceCount(&devices);

        if (error || devices == 0) {
                fprintf(stderr, "skipped: no CUDA device (%s)\n", cudaGetErrorName((cudaError_t)error));
                return SKIPPED;
        }
        if (settings.async) {
                ops.alloc = alloc_async;
                ops.release = release_async;
                error = keep_all();
                if (error) {
                        fprintf(stderr, "no pool of the driver: %s\n", cudaGetErrorName((cudaError_t)error));
                        return 1;
                }
        }
        bench_run(&settings, &ops);
        return 0;
}
