/*
 * The hard limit against graphs that allocate: what would take more than the limit is refused before it runs, what fits
 * is never refused, and the memory of graphs that are gone makes room for others.
 *
 *   GPURECLAIM_HARD_LIMIT=1GiB LD_PRELOAD=... graphs --limit=1GiB
 *
 * One line per check; exit status 1 when one failed.
 */
#include "gputest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BYPASS_US = 300000, MOST_SPLIT = 4 }; /* after a failure the shim caches nothing for so long */

static const size_t slack_bytes = 64 * GT_MIB;

static struct gt gt;
static size_t limit;
static CUstream stream;

/* Allocations of bytes each, each freed before the next one, or all of them at the end. */
static CUgraphExec build(size_t bytes, int count, bool one_by_one)
{
        CUdeviceptr p[MOST_SPLIT];
        CUgraphExec exec;
        CUgraph graph;

        GT_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        for (int i = 0; i < count; i++) {
                GT_MUST(cuMemAllocAsync(&p[i], bytes, stream));
                GT_MUST(gt_fill(&gt, stream, p[i], 7, 1024));
                if (one_by_one)
                        GT_MUST(cuMemFreeAsync(p[i], stream));
        }
        for (int i = 0; i < count && !one_by_one; i++)
                GT_MUST(cuMemFreeAsync(p[i], stream));
        GT_MUST(cuStreamEndCapture(stream, &graph));
        GT_MUST(cuGraphInstantiate(&exec, graph, 0));
        GT_MUST(cuGraphDestroy(graph));
        return exec;
}

static void check_footprint(const char *name)
{
        size_t bytes;

        GT_MUST(cuStreamSynchronize(stream));
        if (!gt_footprint(&gt, &bytes))
                printf("-      %s: the card cannot be asked\n", name);
        else
                gt_check(bytes <= limit + gt.context_bytes + slack_bytes, name, "%.1f MiB held (%s)", gt_mib(bytes),
                         gt_footprint_source(&gt));
}

/* Another way to say it: code 2 or 0, nothing else. */
static void launch(const char *name, CUgraphExec exec, CUresult expected)
{
        CUresult result = cuGraphLaunch(exec, stream);

        gt_check(result == expected, name, "%d", (int)result);
        check_footprint(name);
}

static size_t available(void)
{
        size_t bytes, total;

        GT_MUST(cuMemGetInfo(&bytes, &total));
        return bytes;
}

static void *unused(size_t fraction_of_limit)
{
        CUdeviceptr p;

        GT_MUST(cuMemAlloc(&p, fraction_of_limit / GT_PAGE * GT_PAGE));
        return (void *)(uintptr_t)p;
}

static void give(void *p)
{
        GT_MUST(cuMemFree((CUdeviceptr)(uintptr_t)p));
}

int main(int argc, char **argv)
{
        CUgraphExec half, serial, both, other;
        CUdeviceptr p;
        size_t before;
        void *block;

        if (argc != 2 || strncmp(argv[1], "--limit=", 8) != 0 || !(limit = gt_parse_size(argv[1] + 8))) {
                fprintf(stderr, "usage: graphs --limit=SIZE\n");
                return 2;
        }
        gt_open(&gt);
        stream = gt_stream();
        before = available();

        half = build(limit / 2, 1, true);
        launch("a graph that fits", half, CUDA_SUCCESS);
        gt_check(before - available() + slack_bytes >= limit / 2, "its memory counts", "%.1f MiB free of %.1f",
                 gt_mib(available()), gt_mib(before));
        for (int i = 0; i < 10; i++)
                GT_MUST(cuGraphLaunch(half, stream));
        GT_MUST(cuStreamSynchronize(stream));

        both = build(limit / 4 * 3, 2, false);
        gt_check(cuGraphUpload(both, stream) == CUDA_ERROR_OUT_OF_MEMORY, "upload of one that does not fit", "refused");
        launch("launch of one that does not fit", both, CUDA_ERROR_OUT_OF_MEMORY);
        launch("the first one after that", half, CUDA_SUCCESS);
        gt_sleep_us(BYPASS_US);

        /* One after the other in the same memory, so it fits, and what our cache and the first graph hold makes room.
         */
        GT_MUST(cuGraphExecDestroy(half));
        GT_MUST(cuDeviceGraphMemTrim(gt.device));
        give(unused(limit / 8 * 7));
        serial = build(limit / 4 * 3, 2, true);
        launch("one after the other, with a full cache", serial, CUDA_SUCCESS);
        launch("again", serial, CUDA_SUCCESS);

        /* Beside memory that is in use there is no room; once it is freed there is. */
        GT_MUST(cuDeviceGraphMemTrim(gt.device));
        block = unused(limit / 2);
        half = build(limit / 4 * 3, 1, true);
        launch("beside memory in use", half, CUDA_ERROR_OUT_OF_MEMORY);
        give(block);
        launch("when that is freed", half, CUDA_SUCCESS);

        /* Two that fit one at a time, turn by turn in one stream: the memory of the one makes room for the other. */
        other = build(limit / 4 * 3, 1, true);
        for (int i = 0; i < 2; i++) {
                gt_check(cuGraphLaunch(half, stream) == CUDA_SUCCESS, "turn by turn, the one", "launched");
                gt_check(cuGraphLaunch(other, stream) == CUDA_SUCCESS, "turn by turn, the other", "launched");
        }
        check_footprint("turn by turn");

        GT_MUST(cuGraphExecDestroy(half));
        GT_MUST(cuGraphExecDestroy(other));
        GT_MUST(cuGraphExecDestroy(serial));
        GT_MUST(cuGraphExecDestroy(both));
        gt_check(cuMemAlloc(&p, limit / 4 * 3) == CUDA_SUCCESS, "memory of graphs that are gone",
                 "%.1f MiB got by cuMemAlloc", gt_mib(limit / 4 * 3));
        GT_MUST(cuMemFree(p));
        check_footprint("in the end");
        GT_MUST(cuStreamDestroy(stream));
        gt_close(&gt);
        printf("%s\n", gt_failed ? "graphs: failed" : "graphs: all held");
        return gt_failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
