/*
 * Memory that is freed behind a kernel serves again at once, as long as all work is in the order of submission. The
 * first work that is not must come after that kernel all the same: else the kernel would write to memory that is in
 * use again. Once the program has waited for all work it need come after nothing, as a later kernel may wait for it.
 * Under the library only.
 *
 *   order [WAY]     all ways to leave the order, and to wait, each in a process of its own; or this one
 *
 * One line per way; exit status 1 when one failed.
 */
#include "gputest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BYTES     (64 * MIB)
#define WORDS     (BYTES / 4)
#define FEW_BYTES (4 * MIB) /* their epoch stays open */
enum { LATE_US = 200000, LONG_US = 10000000, OLD = 1, NEW = 2 };

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

/* The driver refuses the wait (GRSIM_FAULT), so the stream still has something to come after. */
static void failed_wait(CUdeviceptr p)
{
        if (!getenv("GRSIM_FAULT")) {
                printf("-      no wait fails here\n");
                exit(EXIT_SUCCESS);
        }
        GR_CHECK_EQ(cuCtxSynchronize(), CUDA_ERROR_NOT_READY);
        GR_MUST(gt_fill(&gt, gt_stream(), p, NEW, FEW_BYTES / 4));
}

static CUresult wait_for_stream(void)
{
        return cuStreamSynchronize(NULL);
}

static CUresult wait_for_legacy_stream(void)
{
        return cuStreamSynchronize(CU_STREAM_LEGACY);
}

static const struct way {
        const char *name;
        void (*fill)(CUdeviceptr p);
        CUresult (*wait)(void);
} ways[] = {
        {"the default stream", default_stream, NULL},
        {"a stream", made_stream, NULL},
        {"a stream of cuBLAS", cublas_stream, NULL},
        {"another context", other_context, NULL},
        {"a green context", green_context, NULL},
        {"a wait that fails", failed_wait, NULL},
        {"a wait for the context", NULL, cuCtxSynchronize},
        {"a wait for the default stream", NULL, wait_for_stream},
        {"a wait for the legacy stream", NULL, wait_for_legacy_stream},
};
enum { WAYS = sizeof ways / sizeof *ways };

static const char *name_of(size_t way)
{
        return ways[way].name;
}

static void await_and_copy(CUdeviceptr word, uint32_t value)
{
        GR_MUST(gt_await(&gt, NULL, word, value, LONG_US));
        GR_MUST(gt_copy(&gt, NULL, word + 4, word, 1));
}

/* A block is handed out ahead of its fence. After the wait nothing uses it that a stream would have to wait for. */
static void try_wait(const struct way *way)
{
        CUdeviceptr word, before, after;

        GR_MUST(cuMemAlloc(&word, 8));
        GR_MUST(gt_fill(&gt, NULL, word, OLD, 2));
        await_and_copy(word, OLD); /* the driver may load a kernel at its first launch, and wait for the GPU then */
        GR_MUST(cuMemAlloc(&before, FEW_BYTES));
        GR_MUST(gt_fill(&gt, NULL, before, OLD, 1));
        GR_MUST(cuMemFree(before));
        GR_MUST(cuMemAlloc(&after, FEW_BYTES));
        GR_CHECK_EQ(after, before);
        GR_MUST(way->wait());
        await_and_copy(word, NEW);
        GR_MUST(gt_fill(&gt, gt_stream(), word, NEW, 1));
        GR_MUST(cuCtxSynchronize());
        gt_check(gt_wrong_words(word + 4, 4, NEW) == 0, way->name, "a later kernel saw what the stream wrote");
        GR_MUST(cuMemFree(after));
        GR_MUST(cuMemFree(word));
}

static void try_fill(const struct way *way)
{
        size_t bytes = way->fill == failed_wait ? FEW_BYTES : BYTES, words = bytes / 4;
        CUdeviceptr before, after;

        GR_MUST(cuMemAlloc(&source, BYTES));
        GR_MUST(gt_fill(&gt, NULL, source, NEW, WORDS));
        GR_MUST(cuMemAlloc(&before, bytes));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(gt_late_fill(&gt, NULL, before, OLD, words, LATE_US));
        GR_MUST(cuMemFree(before));
        GR_MUST(cuMemAlloc(&after, bytes));
        GR_CHECK_EQ(after, before);
        way->fill(after);
        GR_MUST(cuCtxSynchronize());
        gt_check(gt_wrong_words(after, bytes, NEW) == 0, way->name, "%u words of three are wrong",
                 gt_wrong_words(after, bytes, NEW));
        GR_MUST(cuMemFree(after));
        GR_MUST(cuMemFree(source));
}

static int try_way(size_t i)
{
        gt_open(&gt);
        if (ways[i].wait)
                try_wait(&ways[i]);
        else
                try_fill(&ways[i]);
        gt_close(&gt);
        return GR_CHECK_RESULT();
}

int main(int argc, char **argv)
{
        return gt_ways(argc, argv, WAYS, name_of, try_way);
}
