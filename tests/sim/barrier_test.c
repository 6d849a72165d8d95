/*
 * cuCtxRecordEvent and cuCtxWaitEvent on one context are a complete barrier: a kernel writes 1 late, then every kind of
 * access writes 2. Without the barrier it overtakes the kernel and 1 survives, with it 2 does.
 */
#include "simtest.h"

#include <pthread.h>
#include <stdlib.h>

#define WORDS    ((size_t)1 << 14)
#define FAR_WORD ((CUdeviceptr)(WORDS - 1) * 4)
#define LATE_MS  200 /* test machines stand still for tens of ms now and then */

static CUcontext ctx;
static CUdeviceptr x, y;
static CUstream late, other, blocking;
static uint32_t *pinned, *pageable;
static CUgraphExec graph;

static void kernel_legacy(void)
{
        GR_MUST(fill(NULL, x, 2, WORDS));
}
static void kernel_non_blocking(void)
{
        GR_MUST(fill(other, x, 2, WORDS));
}
static void kernel_blocking(void)
{
        GR_MUST(fill(blocking, x, 2, WORDS));
}
static void kernel_per_thread(void)
{
        GR_MUST(fill(CU_STREAM_PER_THREAD, x, 2, WORDS));
}
static void kernel_new_stream(void)
{
        CUstream s;

        GR_MUST(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        GR_MUST(fill(s, x, 2, WORDS));
        GR_MUST(cuStreamDestroy(s));
}
static void *in_thread(void *unused)
{
        (void)unused;
        GR_MUST(cuCtxSetCurrent(ctx));
        GR_MUST(fill(CU_STREAM_PER_THREAD, x, 2, WORDS));
        return NULL;
}
static void kernel_other_thread(void)
{
        pthread_t t;

        pthread_create(&t, NULL, in_thread, NULL);
        pthread_join(t, NULL);
}
static void graph_launch(void)
{
        GR_MUST(cuGraphLaunch(graph, other));
}
static void htod_pageable(void)
{
        GR_MUST(cuMemcpyHtoD(x, pageable, WORDS * 4));
}
static void htod_pinned(void)
{
        GR_MUST(cuMemcpyHtoD(x, pinned, WORDS * 4));
}
static void htod_async_pageable(void)
{
        GR_MUST(cuMemcpyHtoDAsync(x, pageable, WORDS * 4, other));
}
static void htod_async_pinned(void)
{
        GR_MUST(cuMemcpyHtoDAsync(x, pinned, WORDS * 4, other));
}
static void dtod(void)
{
        GR_MUST(cuMemcpyDtoD(x, y, WORDS * 4));
}
static void dtod_async(void)
{
        GR_MUST(cuMemcpyDtoDAsync(x, y, WORDS * 4, other));
}
static void unified(void)
{
        GR_MUST(cuMemcpy(x, y, WORDS * 4));
}
static void unified_async(void)
{
        GR_MUST(cuMemcpyAsync(x, y, WORDS * 4, other));
}
static void peer_async(void)
{
        GR_MUST(cuMemcpyPeerAsync(x, ctx, y, ctx, WORDS * 4, other));
}
static void copy_2d(void)
{
        CUDA_MEMCPY2D c = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                           .srcDevice = y,
                           .srcPitch = 256,
                           .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                           .dstDevice = x,
                           .dstPitch = 256,
                           .WidthInBytes = 256,
                           .Height = WORDS / 64};

        GR_MUST(cuMemcpy2DAsync(&c, other));
}
static void memset_sync(void)
{
        GR_MUST(cuMemsetD32(x, 2, WORDS));
}
static void memset_async(void)
{
        GR_MUST(cuMemsetD32Async(x, 2, WORDS, other));
}
static void memset_2d(void)
{
        GR_MUST(cuMemsetD2D32Async(x, 256, 2, 64, WORDS / 64, other));
}
static void write_value(void)
{
        GR_MUST(cuStreamWriteValue32(other, x, 2, 0));
        GR_MUST(cuStreamWriteValue32(other, x + FAR_WORD, 2, 0));
}
static void stream_ordered(void)
{
        CUdeviceptr t;

        GR_MUST(cuMemAllocAsync(&t, WORDS * 4, other));
        GR_MUST(cuMemsetD32Async(t, 2, WORDS, other));
        GR_MUST(cuMemcpyDtoDAsync(x, t, WORDS * 4, other));
        GR_MUST(cuMemFreeAsync(t, other));
}

static const struct {
        const char *name;
        void (*run)(void);
} accesses[] = {
        {"kernel, legacy stream", kernel_legacy},
        {"kernel, non-blocking stream", kernel_non_blocking},
        {"kernel, blocking stream", kernel_blocking},
        {"kernel, per-thread stream", kernel_per_thread},
        {"kernel, new stream", kernel_new_stream},
        {"kernel, another thread", kernel_other_thread},
        {"graph launch", graph_launch},
        {"HtoD pageable", htod_pageable},
        {"HtoD pinned", htod_pinned},
        {"HtoD async pageable", htod_async_pageable},
        {"HtoD async pinned", htod_async_pinned},
        {"DtoD", dtod},
        {"DtoD async", dtod_async},
        {"unified copy", unified},
        {"unified copy async", unified_async},
        {"peer copy async", peer_async},
        {"2D copy async", copy_2d},
        {"memset", memset_sync},
        {"memset async", memset_async},
        {"2D memset async", memset_2d},
        {"write value", write_value},
        {"stream-ordered memory", stream_ordered},
};

static void prepare(void)
{
        CUgraph g;

        GR_MUST(cuMemAlloc(&x, WORDS * 4));
        GR_MUST(cuMemAlloc(&y, WORDS * 4));
        GR_MUST(cuMemsetD32(y, 2, WORDS));
        GR_MUST(cuStreamCreate(&late, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
        GR_MUST(cuMemAllocHost((void **)&pinned, WORDS * 4));
        pageable = malloc(WORDS * 4);
        for (size_t i = 0; i < WORDS; i++)
                pinned[i] = pageable[i] = 2;
        GR_MUST(cuStreamBeginCapture(other, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(fill(other, x, 2, WORDS));
        GR_MUST(cuStreamEndCapture(other, &g));
        GR_MUST(cuGraphInstantiate(&graph, g, 0));
        GR_MUST(cuGraphDestroy(g));
}

static void test_access(size_t i, bool barrier)
{
        uint32_t want = barrier ? 2 : 1, first, last;
        CUevent e;

        GR_MUST(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
        GR_MUST(cuMemsetD32(x, 0, WORDS));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(late_fill(late, x, 1, WORDS, LATE_MS));
        if (barrier) {
                double t = now_ms();

                GR_MUST(cuCtxRecordEvent(ctx, e));
                GR_MUST(cuCtxWaitEvent(ctx, e));
                GR_CHECK(now_ms() - t < LATE_MS / 2); /* the host goes on */
                GR_CHECK_EQ(cuEventQuery(e), CUDA_ERROR_NOT_READY);
        }
        accesses[i].run();
        first = word(x);
        last = word(x + FAR_WORD);
        if (first != want || last != want) {
                fprintf(stderr, "%s %s barrier: %u and %u\n", accesses[i].name, barrier ? "with" : "without", first,
                        last);
                gr_check_failures++;
        }
        if (barrier)
                GR_MUST(cuEventQuery(e));
        GR_MUST(cuEventDestroy(e));
}

int main(void)
{
        ctx = start();
        prepare();
        for (size_t i = 0; i < sizeof accesses / sizeof *accesses; i++) {
                test_access(i, false);
                test_access(i, true);
        }
        GR_CHECK_EQ(misuses(), 0);
        free(pageable);
        return GR_CHECK_RESULT();
}
