/* What a capture takes in, what it forbids, and what destroys it. */
#include "simtest.h"

#include "grsim.h"

#include <pthread.h>

static CUcontext ctx;
static CUdeviceptr x;
static CUstream s, t;
static CUevent e, f;

/* Begins a capture in the mode, does `act`, which must return `want`; the capture must then be intact or not. */
static void expect_in_capture(const char *what, CUstreamCaptureMode mode, CUresult (*act)(void), CUresult want,
                              bool survives)
{
        CUstreamCaptureStatus status;
        CUgraph g = NULL;
        CUresult rc;

        OK(cuStreamBeginCapture(s, mode));
        OK(fill(s, x, 2, 1));
        rc = act();
        OK(cuStreamIsCapturing(s, &status));
        if (rc != want || (status == CU_STREAM_CAPTURE_STATUS_ACTIVE) != survives) {
                fprintf(stderr, "%s, mode %d: code %d, status %d\n", what, (int)mode, (int)rc, (int)status);
                failures++;
        }
        EXPECT(survives ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(s, &g));
        CHECK((g != NULL) == survives);
        if (g)
                OK(cuGraphDestroy(g));
        OK(cuStreamIsCapturing(s, &status));
        EXPECT(CU_STREAM_CAPTURE_STATUS_NONE, status);
}

static CUresult ctx_record(void)
{
        return cuCtxRecordEvent(ctx, e);
}
static CUresult ctx_wait(void)
{
        return cuCtxWaitEvent(ctx, e);
}
static CUresult ctx_synchronize(void)
{
        return cuCtxSynchronize();
}
static CUresult alloc_and_free(void)
{
        CUdeviceptr p;
        CUresult rc = cuMemAlloc(&p, 64);

        return rc == CUDA_SUCCESS ? cuMemFree(p) : rc;
}
static CUresult free_it(void)
{
        return cuMemFree(x);
}
static CUresult query_event(void)
{
        return cuEventQuery(e);
}
static CUresult synchronize_other(void)
{
        return cuStreamSynchronize(t);
}
static CUresult query_captured(void)
{
        return cuStreamQuery(s);
}
static CUresult relaxed_alloc(void)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        CUresult rc;

        OK(cuThreadExchangeStreamCaptureMode(&mode));
        EXPECT(CU_STREAM_CAPTURE_MODE_GLOBAL, mode);
        rc = alloc_and_free();
        OK(cuThreadExchangeStreamCaptureMode(&mode));
        return rc;
}
static CUresult (*thread_act)(void);
static void *in_thread(void *rc)
{
        OK(cuCtxSetCurrent(ctx));
        *(CUresult *)rc = thread_act();
        return NULL;
}
static CUresult alloc_in_thread(void)
{
        CUresult rc;
        pthread_t thread;

        thread_act = alloc_and_free;
        pthread_create(&thread, NULL, in_thread, &rc);
        pthread_join(thread, NULL);
        return rc;
}
/* Calls are counted by threads apart, and told together. */
static void test_count(void)
{
        unsigned long before = grSimCallCount("cuMemAlloc_v2");

        OK(alloc_and_free());
        OK(alloc_in_thread());
        EXPECT(before + 2, grSimCallCount("cuMemAlloc_v2"));
}
static CUresult begin_local(void)
{
        return cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
}
/* A thread may get the pthread_t of one that ended, and no more than that. */
static void test_owner_ended(void)
{
        CUresult rc;
        CUgraph g;
        pthread_t thread;

        thread_act = begin_local;
        pthread_create(&thread, NULL, in_thread, &rc);
        pthread_join(thread, NULL);
        OK(rc);
        OK(alloc_in_thread());
        EXPECT(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, cuStreamEndCapture(s, &g));
}
static CUresult record_in_thread(void)
{
        CUresult rc;
        pthread_t thread;

        thread_act = ctx_record;
        pthread_create(&thread, NULL, in_thread, &rc);
        pthread_join(thread, NULL);
        return rc;
}

static void test_forbidden(void)
{
        const CUstreamCaptureMode global = CU_STREAM_CAPTURE_MODE_GLOBAL, local = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                                  relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
        const CUstreamCaptureMode modes[] = {global, local, relaxed};
        CUgraph g;

        for (int i = 0; i < 3; i++) {
                expect_in_capture("context record", modes[i], ctx_record, 900, false);
                expect_in_capture("context record in another thread", modes[i], record_in_thread, 900, false);
                expect_in_capture("context wait", modes[i], ctx_wait, 900, false);
                expect_in_capture("context synchronize", modes[i], ctx_synchronize, 900, false);
                expect_in_capture("query of the stream", modes[i], query_captured, 900, false);
                expect_in_capture("alloc in relaxed thread", modes[i], relaxed_alloc, 0, true);
        }
        expect_in_capture("alloc", global, alloc_and_free, 900, false);
        expect_in_capture("alloc", local, alloc_and_free, 900, false);
        expect_in_capture("alloc", relaxed, alloc_and_free, 0, true);
        expect_in_capture("free", global, free_it, 900, false);
        expect_in_capture("free", local, free_it, 900, false);
        expect_in_capture("alloc in another thread", global, alloc_in_thread, 900, false);
        expect_in_capture("alloc in another thread", local, alloc_in_thread, 0, true);
        expect_in_capture("alloc in another thread", relaxed, alloc_in_thread, 0, true);
        OK(cuStreamBeginCapture(s, relaxed));
        OK(cuEventRecord(e, s));
        EXPECT(CUDA_ERROR_CAPTURED_EVENT, cuEventQuery(e));
        EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(s, &g));
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuEventQuery(e));
        OK(cuEventRecord(e, s));
        expect_in_capture("event query", global, query_event, 900, false);
        expect_in_capture("event query", relaxed, query_event, 0, true);
        expect_in_capture("other stream's synchronize", global, synchronize_other, 900, false);
        expect_in_capture("other stream's synchronize", relaxed, synchronize_other, 0, true);
}

/* Nothing runs while captured; the graph runs as often as it is launched, and a fork joined by events is part of it. */
static void test_graph(void)
{
        CUgraph g;
        CUgraphExec x1;
        size_t nodes = 0;

        OK(cuMemsetD32(x, 0, 4));
        OK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED));
        OK(late_fill(s, x, 1, 1, 30));
        OK(cuEventRecord(e, s));
        OK(cuStreamWaitEvent(t, e, 0));
        OK(fill(t, x + 4, 2, 1));
        OK(cuMemcpyDtoDAsync(x + 8, x, 4, s));
        OK(cuEventRecord(f, t));
        OK(cuStreamWaitEvent(s, f, 0));
        OK(cuMemsetD32Async(x + 12, 4, 1, s));
        OK(cuStreamEndCapture(s, &g));
        OK(cuGraphGetNodes(g, NULL, &nodes));
        EXPECT(4, nodes);
        EXPECT(0, word(x));
        OK(cuGraphInstantiate(&x1, g, 0));
        OK(cuGraphDestroy(g));
        for (int i = 0; i < 2; i++) {
                OK(cuMemsetD32(x, 0, 4));
                OK(cuGraphLaunch(x1, NULL));
                EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(NULL));
                EXPECT(1, word(x));
                EXPECT(2, word(x + 4));
                EXPECT(1, word(x + 8));
                EXPECT(4, word(x + 12));
        }
        OK(cuGraphExecDestroy(x1));
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuGraphLaunch(x1, NULL));
}

static void test_errors(void)
{
        CUstream b;
        CUgraph g;

        EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamBeginCapture(NULL, CU_STREAM_CAPTURE_MODE_GLOBAL));
        EXPECT(CUDA_ERROR_ILLEGAL_STATE, cuStreamEndCapture(s, &g));

        /* A fork that does not come back. */
        OK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED));
        OK(cuEventRecord(e, s));
        OK(cuStreamWaitEvent(t, e, 0));
        OK(fill(t, x, 1, 1));
        EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, cuStreamEndCapture(s, &g));
        OK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED));
        OK(cuEventRecord(e, s));
        OK(cuStreamWaitEvent(t, e, 0));
        EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, cuStreamEndCapture(t, &g));
        EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(s, &g));
        OK(fill(t, x, 1, 1));

        /* A wait for work outside. */
        OK(cuEventRecord(e, t));
        OK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED));
        EXPECT(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, cuStreamWaitEvent(s, e, 0));
        EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, fill(s, x, 1, 1));
        EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(s, &g));

        /* The legacy stream beside a blocking one that captures. */
        OK(cuStreamCreate(&b, CU_STREAM_DEFAULT));
        OK(cuStreamBeginCapture(b, CU_STREAM_CAPTURE_MODE_RELAXED));
        EXPECT(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, fill(NULL, x, 1, 1));
        EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(b, &g));
        OK(cuStreamDestroy(b));
        OK(cuCtxSynchronize());
}

int main(void)
{
        ctx = start();
        OK(cuMemAlloc(&x, 4096));
        OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        OK(cuStreamCreate(&t, CU_STREAM_NON_BLOCKING));
        OK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
        OK(cuEventCreate(&f, CU_EVENT_DISABLE_TIMING));
        test_count();
        test_forbidden();
        test_owner_ended();
        test_graph();
        test_errors();
        EXPECT(0, misuses());
        return done("capture");
}
