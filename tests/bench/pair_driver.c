/*
 * Costs through the driver API, as a program linked with -lcuda sees them. With --first it says how
 * long the first calls of a process take.
 */
#include "bench.h"
#include "gputest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct gt gt;
static CUstream streams[BENCH_STREAMS + 1]; /* the first is the default stream */

/* A thread makes only streams of its own, or nobody else is there. */
static CUstream stream_of(int stream)
{
        if (stream > 0 && !streams[stream])
                streams[stream] = gt_stream();
        return streams[stream];
}

static int attach(void)
{
        gt_attach(&gt);
        return 0;
}

static int alloc(void **ret, size_t bytes, int stream)
{
        CUdeviceptr p = 0;
        CUresult result = cuMemAlloc(&p, bytes);

        (void)stream;
        *ret = (void *)(uintptr_t)p;
        return (int)result;
}

static int release(void *p, int stream)
{
        (void)stream;
        return (int)cuMemFree((CUdeviceptr)(uintptr_t)p);
}

static int alloc_async(void **ret, size_t bytes, int stream)
{
        CUdeviceptr p = 0;
        CUresult result = cuMemAllocAsync(&p, bytes, stream_of(stream));

        *ret = (void *)(uintptr_t)p;
        return (int)result;
}

static int release_async(void *p, int stream)
{
        return (int)cuMemFreeAsync((CUdeviceptr)(uintptr_t)p, stream_of(stream));
}

static int alloc_pinned(void **ret, size_t bytes)
{
        return (int)cuMemHostAlloc(ret, bytes, 0);
}

static int release_pinned(void *p)
{
        return (int)cuMemFreeHost(p);
}

/* The same shape as pair.cu: one block of one warp. */
static int work(int stream, void *p, unsigned us)
{
        CUdeviceptr at = (CUdeviceptr)(uintptr_t)p;
        uint32_t value = 1;
        uint64_t words = 32, ns = us * UINT64_C(1000);
        void *args[] = {&at, &value, &words, &ns};

        return (int)cuLaunchKernel(us ? gt.late_fill : gt.fill, 1, 1, 1, 32, 1, 1, 0, stream_of(stream), args, NULL);
}

static int synchronize(void)
{
        return (int)cuCtxSynchronize();
}

/* The pool at its best: it gives nothing back. */
static void keep_all(void)
{
        cuuint64_t all = UINT64_MAX;
        CUmemoryPool pool;

        GR_MUST(cuDeviceGetDefaultMemPool(&pool, gt.device));
        GR_MUST(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all));
}

enum { FIRST_BLOCKS = 500 };

#define FIRST_BYTES (3 * MIB / 2)

/* What no cache can serve: the start of a process, and its first allocations of many blocks. */
static int first(void)
{
        double begin = bench_now_us(), initialised, made, allocated, freed;
        CUresult result = cuInit(0);
        CUdeviceptr p, blocks[FIRST_BLOCKS];
        CUcontext context;

        initialised = bench_now_us();
        if (result != CUDA_SUCCESS) {
                fprintf(stderr, "skipped: no CUDA device (%s)\n", gt_result_name(result));
                return GT_SKIPPED;
        }
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
        made = bench_now_us();
        GR_MUST(cuMemAlloc(&p, MIB));
        allocated = bench_now_us();
        GR_MUST(cuMemFree(p));
        freed = bench_now_us();
        printf("init_us %.1f\ncontext_us %.1f\nalloc_us %.1f\nfree_us %.1f\n", initialised - begin, made - initialised,
               allocated - made, freed - allocated);
        begin = bench_now_us();
        for (int i = 0; i < FIRST_BLOCKS; i++)
                GR_MUST(cuMemAlloc(&blocks[i], FIRST_BYTES));
        allocated = bench_now_us();
        for (int i = 0; i < FIRST_BLOCKS; i++)
                GR_MUST(cuMemFree(blocks[i]));
        freed = bench_now_us();
        printf("allocs_us %.1f\nfrees_us %.1f\n", allocated - begin, freed - allocated);
        GR_MUST(cuDevicePrimaryCtxRelease(0));
        return 0;
}

int main(int argc, char **argv)
{
        struct bench_ops ops = {attach, alloc, release, alloc_pinned, release_pinned, work, synchronize};
        struct bench_settings settings;

        if (argc == 2 && !strcmp(argv[1], "--first"))
                return first();
        settings = bench_arguments(argc, argv);
        gt_open(&gt);
        if (settings.async) {
                ops.alloc = alloc_async;
                ops.release = release_async;
                keep_all();
        }
        bench_run(&settings, &ops);
        gt_close(&gt);
        return 0;
}
