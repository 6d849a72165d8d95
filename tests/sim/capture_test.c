/* What a capture takes in, what it forbids, and what destroys it. */
#include "simtest.h"

#include "grsim.h"
#include "newer.h"

#include <pthread.h>

/* The header calls the second version by the first one's name. */
#undef cuStreamUpdateCaptureDependencies
CUresult cuStreamUpdateCaptureDependencies(CUstream stream, CUgraphNode *nodes, size_t count, unsigned flags);

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

        GR_MUST(cuStreamBeginCapture(s, mode));
        GR_MUST(fill(s, x, 2, 1));
        rc = act();
        GR_MUST(cuStreamIsCapturing(s, &status));
        if (rc != want || (status == CU_STREAM_CAPTURE_STATUS_ACTIVE) != survives) {
                fprintf(stderr, "%s, mode %d: code %d, status %d\n", what, (int)mode, (int)rc, (int)status);
                gr_check_failures++;
        }
        GR_CHECK_EQ(cuStreamEndCapture(s, &g), survives ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        GR_CHECK((g != NULL) == survives);
        if (g)
                GR_MUST(cuGraphDestroy(g));
        GR_MUST(cuStreamIsCapturing(s, &status));
        GR_CHECK_EQ(status, CU_STREAM_CAPTURE_STATUS_NONE);
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

        GR_MUST(cuThreadExchangeStreamCaptureMode(&mode));
        GR_CHECK_EQ(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
        rc = alloc_and_free();
        GR_MUST(cuThreadExchangeStreamCaptureMode(&mode));
        return rc;
}
static CUresult (*thread_act)(void);
static void *in_thread(void *rc)
{
        GR_MUST(cuCtxSetCurrent(ctx));
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

        GR_MUST(alloc_and_free());
        GR_MUST(alloc_in_thread());
        GR_CHECK_EQ(grSimCallCount("cuMemAlloc_v2"), before + 2);
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
        GR_MUST(rc);
        GR_MUST(alloc_in_thread());
        GR_CHECK_EQ(cuStreamEndCapture(s, &g), CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
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
        GR_MUST(cuStreamBeginCapture(s, relaxed));
        GR_MUST(cuEventRecord(e, s));
        GR_CHECK_EQ(cuEventQuery(e), CUDA_ERROR_CAPTURED_EVENT);
        GR_CHECK_EQ(cuStreamEndCapture(s, &g), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        GR_CHECK_EQ(cuEventQuery(e), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuEventRecord(e, s));
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

        GR_MUST(cuMemsetD32(x, 0, 4));
        GR_MUST(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(late_fill(s, x, 1, 1, 30));
        GR_MUST(cuEventRecord(e, s));
        GR_MUST(cuStreamWaitEvent(t, e, 0));
        GR_MUST(fill(t, x + 4, 2, 1));
        GR_MUST(cuMemcpyDtoDAsync(x + 8, x, 4, s));
        GR_MUST(cuEventRecord(f, t));
        GR_MUST(cuStreamWaitEvent(s, f, 0));
        GR_MUST(cuMemsetD32Async(x + 12, 4, 1, s));
        GR_MUST(cuStreamEndCapture(s, &g));
        GR_MUST(cuGraphGetNodes(g, NULL, &nodes));
        GR_CHECK_EQ(nodes, 4);
        GR_CHECK_EQ(word(x), 0);
        GR_MUST(cuGraphInstantiate(&x1, g, 0));
        GR_MUST(cuGraphDestroy(g));
        for (int i = 0; i < 2; i++) {
                GR_MUST(cuMemsetD32(x, 0, 4));
                GR_MUST(cuGraphLaunch(x1, NULL));
                GR_CHECK_EQ(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
                GR_CHECK_EQ(word(x), 1);
                GR_CHECK_EQ(word(x + 4), 2);
                GR_CHECK_EQ(word(x + 8), 1);
                GR_CHECK_EQ(word(x + 12), 4);
        }
        GR_MUST(cuGraphExecDestroy(x1));
        GR_CHECK_EQ(cuGraphLaunch(x1, NULL), CUDA_ERROR_INVALID_VALUE);
}

/* A graph is captured again: its nodes stay, with what they now do, and its user objects go. */
static void CUDA_CB object_gone(void *gone)
{
        *(bool *)gone = true;
}

static void test_again(void)
{
        const CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
        CUgraphNode before[3], after[3];
        size_t nodes = 3;
        CUuserObject object;
        bool gone = false;
        CUgraph g, same;
        CUgraphExec x1;

        GR_MUST(cuMemsetD32(x, 0, 4));
        GR_MUST(cuStreamBeginCapture(s, mode));
        GR_MUST(cuMemsetD32Async(x, 1, 1, s));
        GR_MUST(fill(s, x + 4, 1, 1));
        GR_MUST(cuStreamEndCapture(s, &g));
        GR_MUST(cuGraphGetNodes(g, before, &nodes));
        GR_MUST(cuUserObjectCreate(&object, &gone, object_gone, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
        GR_MUST(cuGraphRetainUserObject(g, object, 1, CU_GRAPH_USER_OBJECT_MOVE));

        GR_CHECK_EQ(cuStreamBeginRecaptureToGraph(s, mode, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK(!gone);
        GR_MUST(cuStreamBeginRecaptureToGraph(s, mode, g, NULL, NULL));
        GR_CHECK(gone);
        GR_MUST(cuMemsetD32Async(x, 2, 1, s));
        GR_MUST(fill(s, x + 4, 3, 1));
        GR_MUST(cuStreamEndCapture(s, &same));
        GR_CHECK(same == g);
        nodes = 3;
        GR_MUST(cuGraphGetNodes(g, after, &nodes));
        GR_CHECK(nodes == 2 && after[0] == before[0] && after[1] == before[1]);
        GR_MUST(cuGraphInstantiate(&x1, g, 0));
        GR_MUST(cuGraphLaunch(x1, s));
        GR_MUST(cuStreamSynchronize(s));
        GR_CHECK_EQ(word(x), 2);
        GR_CHECK_EQ(word(x + 4), 3);
        GR_MUST(cuGraphExecDestroy(x1));

        /* Too few nodes; then another kind of work, and too many. */
        GR_MUST(cuStreamBeginRecaptureToGraph(s, mode, g, NULL, NULL));
        GR_MUST(cuMemsetD32Async(x, 2, 1, s));
        GR_CHECK_EQ(cuStreamEndCapture(s, &same), 918);
        GR_MUST(cuStreamBeginRecaptureToGraph(s, mode, g, NULL, NULL));
        GR_CHECK_EQ(fill(s, x, 2, 1), 918);
        GR_CHECK_EQ(cuStreamEndCapture(s, &same), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        GR_MUST(cuStreamBeginRecaptureToGraph(s, mode, g, NULL, NULL));
        GR_MUST(cuMemsetD32Async(x, 2, 1, s));
        GR_MUST(fill(s, x + 4, 3, 1));
        GR_CHECK_EQ(fill(s, x + 4, 3, 1), 918);
        GR_CHECK_EQ(cuStreamEndCapture(s, &same), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        GR_MUST(cuGraphDestroy(g));
}

static void CUDA_CB no_function(void *arg)
{
        (void)arg;
}

/* Commands for a graphics interface: recorded, and run by nobody here. */
static void test_cig(void)
{
        CUctxCigParam graphics = {.sharedDataType = CIG_DATA_TYPE_NV_BLOB, .sharedData = &graphics};
        CUctxCreateParams parameters = {.cigParams = &graphics};
        CUstreamCigCaptureParams *list = (CUstreamCigCaptureParams *)&graphics;
        CUcontext made;
        CUstream own;
        CUgraph g;

        GR_CHECK_EQ(cuStreamBeginCaptureToCig(s, list), CUDA_ERROR_INVALID_CONTEXT);
        GR_MUST(cuCtxCreate_v4(&made, &parameters, 0, 0));
        GR_MUST(cuStreamCreate(&own, CU_STREAM_NON_BLOCKING));
        GR_CHECK_EQ(cuStreamEndCaptureToCig(own), CUDA_ERROR_ILLEGAL_STATE);
        GR_CHECK_EQ(cuStreamBeginCaptureToCig(own, NULL), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuStreamBeginCaptureToCig(own, list));
        GR_MUST(cuMemsetD32Async(x, 9, 1, own));
        GR_MUST(cuStreamEndCaptureToCig(own));
        GR_MUST(cuCtxSynchronize());
        GR_CHECK_EQ(word(x), 2);
        GR_MUST(cuStreamBeginCaptureToCig(own, list));
        GR_CHECK_EQ(cuLaunchHostFunc_v2(own, no_function, NULL, 0), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        GR_CHECK_EQ(cuStreamEndCapture(own, &g), CUDA_ERROR_ILLEGAL_STATE);
        GR_CHECK_EQ(cuStreamEndCaptureToCig(own), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        GR_MUST(cuCtxDestroy(made));
}

/* What the next captured work waits for; there must be `count` of it. Returns the last, or NULL. */
static CUgraphNode last_of(size_t count)
{
        CUstreamCaptureStatus status;
        const CUgraphNode *nodes = NULL;
        cuuint64_t id;
        size_t n = 99;

        GR_MUST(cuStreamGetCaptureInfo_v3(s, &status, &id, NULL, &nodes, NULL, &n));
        GR_CHECK_EQ(n, count);
        return n == count && n ? nodes[n - 1] : NULL;
}

/* What the program takes out of the dependencies need not be joined; other work must be. */
static void test_dependencies(void)
{
        const unsigned add = CU_STREAM_ADD_CAPTURE_DEPENDENCIES, set = CU_STREAM_SET_CAPTURE_DEPENDENCIES;
        CUgraphNode first, second, third, from[3], to[3];
        size_t edges = 3;
        CUgraph g, h;

        GR_CHECK_EQ(cuStreamUpdateCaptureDependencies(s, NULL, 0, set), CUDA_ERROR_ILLEGAL_STATE);
        GR_MUST(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
        GR_MUST(fill(s, x, 1, 1));
        first = last_of(1);
        GR_CHECK_EQ(cuStreamUpdateCaptureDependencies(s, NULL, 1, add), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuStreamUpdateCaptureDependencies(s, &first, 1, 2), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuStreamUpdateCaptureDependencies_v2(s, NULL, NULL, 0, add));
        GR_CHECK(last_of(1) == first);
        GR_MUST(cuStreamUpdateCaptureDependencies_v2(s, NULL, NULL, 0, set));
        last_of(0);
        GR_MUST(fill(s, x + 4, 1, 1));
        second = last_of(1);
        for (int i = 0; i < 2; i++)
                GR_MUST(cuStreamUpdateCaptureDependencies(s, &first, 1, add));
        GR_CHECK(last_of(2) == first);
        GR_MUST(fill(s, x + 8, 1, 1));
        third = last_of(1);
        GR_MUST(cuStreamUpdateCaptureDependencies(s, &second, 1, set));
        GR_CHECK(last_of(1) == second);
        GR_MUST(cuStreamEndCapture(s, &g));
        GR_MUST(cuGraphGetEdges_v2(g, from, to, NULL, &edges));
        GR_CHECK_EQ(edges, 2);
        GR_CHECK(from[0] == second && from[1] == first && to[0] == third && to[1] == third);

        GR_MUST(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
        GR_CHECK_EQ(cuStreamUpdateCaptureDependencies(s, &first, 1, add), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuEventRecord(e, s));
        GR_MUST(cuStreamWaitEvent(t, e, 0));
        GR_MUST(fill(t, x, 1, 1));
        GR_MUST(cuStreamUpdateCaptureDependencies(s, NULL, 0, set));
        GR_CHECK_EQ(cuStreamEndCapture(s, &h), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);

        GR_MUST(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
        GR_CHECK_EQ(cuStreamQuery(s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        GR_CHECK_EQ(cuStreamUpdateCaptureDependencies(s, NULL, 0, set), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        GR_CHECK_EQ(cuStreamEndCapture(s, &h), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        GR_MUST(cuGraphDestroy(g));
}

static void test_errors(void)
{
        CUstream b;
        CUgraph g;

        GR_CHECK_EQ(cuStreamBeginCapture(NULL, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        GR_CHECK_EQ(cuStreamEndCapture(s, &g), CUDA_ERROR_ILLEGAL_STATE);

        /* A fork that does not come back. */
        GR_MUST(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuEventRecord(e, s));
        GR_MUST(cuStreamWaitEvent(t, e, 0));
        GR_MUST(fill(t, x, 1, 1));
        GR_CHECK_EQ(cuStreamEndCapture(s, &g), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
        GR_MUST(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuEventRecord(e, s));
        GR_MUST(cuStreamWaitEvent(t, e, 0));
        GR_CHECK_EQ(cuStreamEndCapture(t, &g), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
        GR_CHECK_EQ(cuStreamEndCapture(s, &g), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        GR_MUST(fill(t, x, 1, 1));

        /* A wait for work outside. */
        GR_MUST(cuEventRecord(e, t));
        GR_MUST(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_CHECK_EQ(cuStreamWaitEvent(s, e, 0), CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
        GR_CHECK_EQ(fill(s, x, 1, 1), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        GR_CHECK_EQ(cuStreamEndCapture(s, &g), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

        /* The legacy stream beside a blocking one that captures. */
        GR_MUST(cuStreamCreate(&b, CU_STREAM_DEFAULT));
        GR_MUST(cuStreamBeginCapture(b, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_CHECK_EQ(fill(NULL, x, 1, 1), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        GR_CHECK_EQ(cuStreamEndCapture(b, &g), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        GR_MUST(cuStreamDestroy(b));
        GR_MUST(cuCtxSynchronize());
}

int main(void)
{
        ctx = start();
        GR_MUST(cuMemAlloc(&x, 4096));
        GR_MUST(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuStreamCreate(&t, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
        GR_MUST(cuEventCreate(&f, CU_EVENT_DISABLE_TIMING));
        test_count();
        test_forbidden();
        test_owner_ended();
        test_graph();
        test_again();
        test_cig();
        test_dependencies();
        test_errors();
        GR_CHECK_EQ(misuses(), 0);
        return GR_CHECK_RESULT();
}
