/*
 * Costs through the driver API, as a program linked with -lcuda sees them. With --demo it is the workload of
 * scripts/run: cost and footprint of a program that peaks and then needs little.
 */
#include "bench.h"
#include "gputest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct gt gt;
static CUstream streams[BENCH_STREAMS];

static int alloc(void **ret, size_t bytes)
{
        CUdeviceptr p = 0;
        CUresult result = cuMemAlloc(&p, bytes);

        *ret = (void *)(uintptr_t)p;
        return (int)result;
}

static int release(void *p)
{
        return (int)cuMemFree((CUdeviceptr)(uintptr_t)p);
}

static int alloc_async(void **ret, size_t bytes)
{
        CUdeviceptr p = 0;
        CUresult result = cuMemAllocAsync(&p, bytes, streams[0]);

        *ret = (void *)(uintptr_t)p;
        return (int)result;
}

static int release_async(void *p)
{
        return (int)cuMemFreeAsync((CUdeviceptr)(uintptr_t)p, streams[0]);
}

/* The same shape as pair.cu: one block of one warp. */
static int work(int stream, void *p, unsigned us)
{
        CUdeviceptr at = (CUdeviceptr)(uintptr_t)p;
        uint32_t value = 1;
        uint64_t words = 32, ns = us * UINT64_C(1000);
        void *args[] = {&at, &value, &words, &ns};

        return (int)cuLaunchKernel(us ? gt.late_fill : gt.fill, 1, 1, 1, 32, 1, 1, 0, streams[stream], args, NULL);
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
        return ((double)bytes - (double)gt.context_bytes) / (double)GT_MIB;
}

enum { DEMO_BLOCKS = 96, DEMO_LOOPS = 4000, DEMO_KEEP = 4 };

/* N rounds of malloc, 10 us kernel, free on two streams: us per round. */
static double demo_loop(int n)
{
        double begin = gt_now_us();

        for (int i = 0; i < n; i++) {
                CUdeviceptr p;

                GT_MUST(cuMemAlloc(&p, GT_MIB + (size_t)(i % 7) * 64 * GT_KIB));
                GT_MUST((CUresult)work(i % 2, (void *)(uintptr_t)p, 10));
                GT_MUST(cuMemFree(p));
        }
        GT_MUST(cuCtxSynchronize());
        return (gt_now_us() - begin) / n;
}

static double demo_pair(int n)
{
        double begin = gt_now_us();

        for (int i = 0; i < n; i++) {
                CUdeviceptr p;

                GT_MUST(cuMemAlloc(&p, GT_MIB));
                GT_MUST(cuMemFree(p));
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

        GT_MUST(cuMemGetInfo(&available, &total));
        budget = (available / 4 < 16 * GT_GIB ? available / 4 : 16 * GT_GIB) / DEMO_BLOCKS;
        demo_pair(100);
        pair = demo_pair(n);
        demo_loop(100);
        loop = demo_loop(n);
        for (int i = 0; i < DEMO_BLOCKS; i++) {
                size_t bytes = 1 + gt_random(&seed) % (2 * budget);

                GT_MUST(cuMemAlloc(&blocks[i], bytes));
                GT_MUST(gt_fill(&gt, streams[i % BENCH_STREAMS], blocks[i], 1, bytes / 4 < 1024 ? bytes / 4 : 1024));
                asked += bytes;
                kept += i < DEMO_KEEP ? bytes : 0;
        }
        printf("pair_us %.3f\n", pair);
        printf("loop_us %.3f\n", loop);
        printf("peak_asked_mib %.1f\n", (double)asked / (double)GT_MIB);
        printf("peak_mib %.1f\n", footprint_mib());
        for (int i = DEMO_KEEP; i < DEMO_BLOCKS; i++)
                GT_MUST(cuMemFree(blocks[i]));
        /* The program goes on with little: this is when memory it no longer needs ought to be back with the card. */
        for (int i = 0; i < 10; i++) {
                demo_loop(20);
                gt_sleep_us(20000);
        }
        printf("after_asked_mib %.1f\n", (double)kept / (double)GT_MIB);
        printf("after_mib %.1f\n", footprint_mib());
        for (int i = 0; i < DEMO_KEEP; i++)
                GT_MUST(cuMemFree(blocks[i]));
}

int main(int argc, char **argv)
{
        static const struct bench_ops ops = {alloc, release, alloc_async, release_async, work, synchronize};
        bool is_demo = argc == 2 && !strcmp(argv[1], "--demo");
        struct bench_settings settings = {.program = "pair_driver"};

        if (!is_demo)
                settings = bench_arguments(argc, argv);
        gt_open(&gt);
        for (int i = 0; i < BENCH_STREAMS; i++)
                streams[i] = gt_stream();
        if (is_demo)
                demo();
        else
                bench_run(&settings, &ops);
        gt_close(&gt);
        return 0;
}
