/*
 * Memory that is freed behind a kernel serves again at once, as long as all work is in the order of submission. The
 * first work that is not must come after that kernel all the same: else the kernel would write to memory that is in
 * use again. Under the library only.
 *
 *   order [WAY]     all ways to leave the order, each in a process of its own; or this one
 *
 * One line per way; exit status 1 when one failed.
 */
#include "gputest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BYTES (64 * MIB)
#define WORDS (BYTES / 4)
enum { LATE_US = 200000, OLD = 1, NEW = 2 };

CUresult cublas_makes_stream(CUstream *stream, bool priority); /* of a library that is called like cuBLAS */

static struct gt gt;
static CUdeviceptr source; /* full of NEW */

static void default_stream(CUdeviceptr p)
{
        GR_MUST(gt_fill(&gt, NULL, p, NEW, WORDS));
}

static void made_stream(CUdeviceptr p)
{
        GR_MUST(gt_fill(&gt, gt_stream(), p, NEW, WORDS));
}

/* A stream of cuBLAS counts as one that gets no work, until it gets some. */
static void cublas_stream(CUdeviceptr p)
{
        CUstream stream;

        GR_MUST(cublas_makes_stream(&stream, false));
        GR_MUST(gt_fill(&gt, stream, p, NEW, WORDS));
}

static void other_context(CUdeviceptr p)
{
        CUcontext context;

#if CUDA_VERSION >= 13000
        GR_MUST(cuCtxCreate(&context, NULL, 0, gt.device));
#else
        GR_MUST(cuCtxCreate(&context, 0, gt.device));
#endif
        GR_MUST(cuMemcpyDtoD(p, source, BYTES));
        GR_MUST(cuCtxSynchronize());
        gt_attach(&gt);
}

static void green_context(CUdeviceptr p)
{
        struct gt_green part;

        if (!gt_green_open(gt.device, &part)) {
                printf("-      green contexts are not to be had here\n");
                exit(EXIT_SUCCESS);
        }
        GR_MUST(cuMemsetD32Async(p, NEW, WORDS, part.stream));
        GR_MUST(cuStreamSynchronize(part.stream));
        gt_green_close(&part);
        gt_attach(&gt);
}

static const struct way {
        const char *name;
        void (*fill)(CUdeviceptr p);
} ways[] = {
        {"the default stream", default_stream}, {"a stream", made_stream},
        {"a stream of cuBLAS", cublas_stream},  {"another context", other_context},
        {"a green context", green_context},
};
enum { WAYS = sizeof ways / sizeof *ways };

static const char *name_of(size_t way)
{
        return ways[way].name;
}

static int try_way(size_t i)
{
        const struct way *way = &ways[i];
        CUdeviceptr before, after;

        gt_open(&gt);
        GR_MUST(cuMemAlloc(&source, BYTES));
        GR_MUST(gt_fill(&gt, NULL, source, NEW, WORDS));
        GR_MUST(cuMemAlloc(&before, BYTES));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(gt_late_fill(&gt, NULL, before, OLD, WORDS, LATE_US));
        GR_MUST(cuMemFree(before));
        GR_MUST(cuMemAlloc(&after, BYTES));
        GR_CHECK_EQ(after, before);
        way->fill(after);
        GR_MUST(cuCtxSynchronize());
        gt_check(gt_wrong_words(after, BYTES, NEW) == 0, way->name, "%u words of three are wrong",
                 gt_wrong_words(after, BYTES, NEW));
        GR_MUST(cuMemFree(after));
        GR_MUST(cuMemFree(source));
        gt_close(&gt);
        return GR_CHECK_RESULT();
}

int main(int argc, char **argv)
{
        return gt_ways(argc, argv, WAYS, name_of, try_way);
}
