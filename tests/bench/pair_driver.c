/*
 * Costs through the driver API, as a program linked with -lcuda sees them. With --demo it is the workload of
 * scripts/run: cost and footprint of a program that peaks and then needs little. With --first it says how long the
 * first calls of a process take.
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

static double footprint_mib(void)
{
        size_t bytes;

        if (!gt_footprint(&gt, &bytes))
                return -1;
        return ((double)bytes - (double)gt.context_bytes) / (double)MIB;
}

enum { DEMO_BLOCKS = 96, DEMO_LOOPS = 4000, DEMO_KEEP = 4, DEMO_STREAMS = 8 };

/* N rounds of malloc, 10 us kernel, free on two streams: us per round. */
static double demo_loop(int n)
{
        double begin = gt_now_us();

        for (int i = 0; i < n; i++) {
                CUdeviceptr p;

                GR_MUST(cuMemAlloc(&p, MIB + (size_t)(i % 7) * 64 * KIB));
                GR_MUST((CUresult)work(1 + i % 2, (void *)(uintptr_t)p, 10));
                GR_MUST(cuMemFree(p));
        }
        GR_MUST(cuCtxSynchronize());
        return (gt_now_us() - begin) / n;
}

static double demo_pair(int n)
{
        double begin = gt_now_us();

        for (int i = 0; i < n; i++) {
                CUdeviceptr p;

                GR_MUST(cuMemAlloc(&p, MIB));
                GR_MUST(cuMemFree(p));
        }
        return (gt_now_us() - begin) / n;
}

static void demo(void)
{
        CUdeviceptr blocks[DEMO_BLOCKS];
        uint64_t seed = 7;
        size_t available, total, budget, asked = 0, kept = 0;
        double pair, loop;
        int n = gt.simulated ? DEMO_LOOPS / 10 : DEMO_LOOPS;

        GR_MUST(cuMemGetInfo(&available, &total));
        budget = (available / 4 < 16 * GIB ? available / 4 : 16 * GIB) / DEMO_BLOCKS;
        demo_pair(100);
        pair = demo_pair(n);
        demo_loop(100);
        loop = demo_loop(n);
        for (int i = 0; i < DEMO_BLOCKS; i++) {
                size_t bytes = 1 + gt_random(&seed) % (2 * budget);

                GR_MUST(cuMemAlloc(&blocks[i], bytes));
                GR_MUST(gt_fill(&gt, stream_of(1 + i % DEMO_STREAMS), blocks[i], 1,
                                bytes / 4 < 1024 ? bytes / 4 : 1024));
                asked += bytes;
                kept += i < DEMO_KEEP ? bytes : 0;
        }
        printf("pair_us %.3f\n", pair);
        printf("loop_us %.3f\n", loop);
        printf("peak_asked_mib %.1f\n", (double)asked / (double)MIB);
        printf("peak_mib %.1f\n", footprint_mib());
        for (int i = DEMO_KEEP; i < DEMO_BLOCKS; i++)
                GR_MUST(cuMemFree(blocks[i]));
        /* The program goes on with little: this is when memory it no longer needs ought to be back with the card. */
        for (int i = 0; i < 10; i++) {
                demo_loop(20);
                gt_sleep_us(20000);
        }
        printf("after_asked_mib %.1f\n", (double)kept / (double)MIB);
        printf("after_mib %.1f\n", footprint_mib());
        for (int i = 0; i < DEMO_KEEP; i++)
                GR_MUST(cuMemFree(blocks[i]));
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
        bool is_demo = argc == 2 && !strcmp(argv[1], "--demo");
        struct bench_settings settings = {.program = "pair_driver"};

        if (argc == 2 && !strcmp(argv[1], "--first"))
                return first();
        if (!is_demo)
                settings = bench_arguments(argc, argv);
        gt_open(&gt);
        if (settings.async) {
                ops.alloc = alloc_async;
                ops.release = release_async;
                keep_all();
        }
        if (is_demo)
                demo();
        else
                bench_run(&settings, &ops);
        gt_close(&gt);
        return 0;
}
