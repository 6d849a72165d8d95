/*
 * User objects on graphs: who keeps a reference, and that the destructor runs once, when the last one goes. That it has
 * run when a wait for the launch returns is true of the simulation; a driver may be later.
 */
#include "simtest.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#define MOVE CU_GRAPH_USER_OBJECT_MOVE

/* Exported, but no longer declared by every version of the header. */
CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                   const CUgraphNode **after, size_t *n);
CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t bytes);

static CUcontext ctx;
static CUdeviceptr x;
static CUstream s, t;
static CUevent e;
static atomic_int gone, denied;

static const CUstreamCaptureMode modes[] = {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                                            CU_STREAM_CAPTURE_MODE_RELAXED};

static void CUDA_CB destroy(void *arg)
{
        CUdeviceptr p;

        GR_CHECK(arg == &gone);
        denied += cuMemAlloc(&p, 64) == CUDA_ERROR_NOT_PERMITTED;
        gone++;
}

/* A new object, whose only reference is the graph's. */
static void attach(CUgraph g)
{
        CUuserObject object;

        GR_MUST(cuUserObjectCreate(&object, &gone, destroy, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
        GR_MUST(cuGraphRetainUserObject(g, object, 1, MOVE));
        gone = 0;
}

static CUgraph graph_of(CUstream stream)
{
        CUstreamCaptureStatus status;
        cuuint64_t id;
        CUgraph g = NULL, same = NULL;

        GR_MUST(cuStreamGetCaptureInfo_v2(stream, &status, &id, &g, NULL, NULL));
        GR_MUST(cuStreamGetCaptureInfo_v3(stream, &status, &id, &same, NULL, NULL, NULL));
        GR_CHECK_EQ(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
        GR_CHECK(g && g == same);
        return g;
}

/* A graph with an object attached while it was captured, and a kernel of that duration. */
static CUgraph captured(CUstreamCaptureMode mode, unsigned ms)
{
        CUgraph g, end;

        GR_MUST(cuStreamBeginCapture(s, mode));
        g = graph_of(s);
        attach(g);
        GR_MUST(spin(s, ms));
        GR_CHECK(graph_of(s) == g);
        GR_MUST(cuStreamEndCapture(s, &end));
        GR_CHECK(end == g);
        return g;
}

static CUgraphExec instance(CUgraph g)
{
        CUgraphExec exec = NULL;

        GR_MUST(cuGraphInstantiateWithFlags(&exec, g, 0));
        return exec;
}

static void test_references(void)
{
        CUuserObject object, other;
        CUgraph g;

        gone = 0;
        GR_MUST(cuUserObjectCreate(&object, &gone, destroy, 2, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
        GR_MUST(cuUserObjectRetain(object, 3));
        GR_MUST(cuUserObjectRelease(object, 4));
        GR_CHECK_EQ(gone, 0);
        GR_MUST(cuUserObjectRelease(object, 1));
        GR_CHECK_EQ(gone, 1);
        GR_CHECK_EQ(denied, 1);
        GR_CHECK_EQ(cuUserObjectRetain(object, 1), CUDA_ERROR_INVALID_VALUE);

        gone = 0;
        GR_MUST(cuGraphCreate(&g, 0));
        GR_MUST(cuUserObjectCreate(&object, &gone, destroy, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
        GR_MUST(cuUserObjectCreate(&other, &gone, destroy, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
        GR_MUST(cuGraphRetainUserObject(g, other, 1, MOVE));
        GR_MUST(cuGraphRetainUserObject(g, object, 2, 0));
        GR_MUST(cuUserObjectRelease(object, 1));
        GR_MUST(cuGraphReleaseUserObject(g, object, 1));
        GR_CHECK_EQ(gone, 0);
        GR_MUST(cuGraphReleaseUserObject(g, object, 1));
        GR_CHECK_EQ(gone, 1);
        GR_MUST(cuGraphDestroy(g));
        GR_CHECK_EQ(gone, 2);
        GR_CHECK_EQ(misuses(), 0);
}

static void test_arguments(void)
{
        const unsigned nosync = CU_USER_OBJECT_NO_DESTRUCTOR_SYNC;
        CUuserObject object;
        CUgraph g;

        GR_MUST(cuGraphCreate(&g, 0));
        GR_CHECK_EQ(cuUserObjectCreate(NULL, &gone, destroy, 1, nosync), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuUserObjectCreate(&object, &gone, NULL, 1, nosync), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuUserObjectCreate(&object, &gone, destroy, 0, nosync), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuUserObjectCreate(&object, &gone, destroy, 1, 0), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuUserObjectRetain(NULL, 1), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuUserObjectRelease(NULL, 1), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuUserObjectCreate(&object, &gone, destroy, 1, nosync));
        GR_CHECK_EQ(cuUserObjectRetain(object, 0), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuUserObjectRelease(object, 0), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuGraphRetainUserObject(NULL, object, 1, 0), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuGraphRetainUserObject(g, NULL, 1, 0), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuGraphRetainUserObject(g, object, 0, 0), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuGraphRetainUserObject(g, object, 1, 2), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuGraphReleaseUserObject(NULL, object, 1), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuGraphReleaseUserObject(g, NULL, 1), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(misuses(), 0);
        GR_MUST(cuUserObjectRelease(object, 1));
        GR_MUST(cuGraphDestroy(g));
}

/* More than there are: what a driver does then is undefined, so it is a misuse. */
static void test_misuse(void)
{
        CUuserObject object;
        CUgraph g;

        gone = 0;
        GR_MUST(cuGraphCreate(&g, 0));
        GR_MUST(cuUserObjectCreate(&object, &gone, destroy, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
        GR_CHECK_EQ(cuUserObjectRelease(object, 2), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuGraphRetainUserObject(g, object, 2, MOVE), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuGraphReleaseUserObject(g, object, 1), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(misuses(), 3);
        GR_CHECK_EQ(gone, 0);
        GR_MUST(cuUserObjectRelease(object, 1));
        GR_CHECK_EQ(gone, 1);
        GR_MUST(cuGraphDestroy(g));
        GR_CHECK_EQ(gone, 1);
}

static void test_graph(void)
{
        for (int i = 0; i < 3; i++) {
                CUgraph g = captured(modes[i], 0);

                GR_CHECK_EQ(gone, 0);
                GR_MUST(cuGraphDestroy(g));
                GR_CHECK_EQ(gone, 1);
        }
}

static CUgraphExec instantiated(CUgraph g, int how)
{
        CUDA_GRAPH_INSTANTIATE_PARAMS params = {.flags = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD, .hUploadStream = s};
        CUgraphExec exec = NULL;

        if (how == 0)
                GR_MUST(cuGraphInstantiateWithFlags(&exec, g, 0));
        else if (how == 1)
                GR_MUST(cuGraphInstantiateWithParams(&exec, g, &params));
        else
                GR_MUST(cuGraphInstantiate_v2(&exec, g, NULL, NULL, 0));
        return exec;
}

static void test_executable(void)
{
        for (int how = 0; how < 3; how++) {
                CUgraph g = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, 30);
                CUgraphExec exec = instantiated(g, how), second = instantiated(g, how);

                GR_MUST(cuGraphDestroy(g));
                GR_CHECK_EQ(gone, 0);
                GR_MUST(cuGraphExecDestroy(second));
                GR_CHECK_EQ(gone, 0);
                GR_MUST(cuGraphLaunch(exec, s));
                GR_MUST(cuStreamSynchronize(s));
                GR_CHECK_EQ(gone, 0);
                GR_MUST(cuGraphLaunch(exec, s));
                GR_MUST(cuGraphLaunch(exec, s));
                GR_MUST(cuGraphExecDestroy(exec));
                GR_CHECK_EQ(gone, 0);
                GR_MUST(cuStreamSynchronize(s));
                GR_CHECK_EQ(gone, 1);
        }
}

/* The graph keeps its reference while its executable graph comes and goes. */
static void test_executable_first(void)
{
        CUgraph g = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, 0);
        CUgraphExec exec = instance(g);

        GR_MUST(cuGraphLaunch(exec, s));
        GR_MUST(cuGraphExecDestroy(exec));
        GR_MUST(cuStreamSynchronize(s));
        GR_CHECK_EQ(gone, 0);
        GR_MUST(cuGraphDestroy(g));
        GR_CHECK_EQ(gone, 1);
}

/* A launch that is captured keeps the object with the graph of the capture. */
static void test_launch_captured(void)
{
        CUgraph g = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, 0), outer;
        CUgraphExec exec = instance(g);

        GR_MUST(cuGraphDestroy(g));
        GR_MUST(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuGraphLaunch(exec, s));
        GR_MUST(cuGraphExecDestroy(exec));
        GR_MUST(cuStreamEndCapture(s, &outer));
        GR_CHECK_EQ(gone, 0);
        GR_MUST(cuGraphDestroy(outer));
        GR_CHECK_EQ(gone, 1);
}

static void test_clone(void)
{
        CUgraph g = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, 0), copy, second;

        GR_MUST(cuGraphClone(&copy, g));
        GR_MUST(cuGraphClone(&second, copy));
        GR_MUST(cuGraphDestroy(g));
        GR_MUST(cuGraphDestroy(copy));
        GR_CHECK_EQ(gone, 0);
        GR_MUST(cuGraphDestroy(second));
        GR_CHECK_EQ(gone, 1);
}

static void test_child(void)
{
        CUgraph g = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, 0), outer, copy, child = NULL;
        CUgraphNode node;
        CUgraphExec exec;

        GR_MUST(cuGraphCreate(&outer, 0));
        GR_MUST(cuGraphAddChildGraphNode(&node, outer, NULL, 0, g));
        GR_MUST(cuGraphChildGraphNodeGetGraph(node, &child));
        GR_CHECK(child && child != g);
        GR_MUST(cuGraphDestroy(g));
        GR_MUST(cuGraphClone(&copy, outer));
        exec = instance(outer);
        GR_CHECK_EQ(gone, 0);
        GR_MUST(cuGraphDestroy(outer));
        GR_CHECK_EQ(gone, 0);
        GR_MUST(cuGraphExecDestroy(exec));
        GR_CHECK_EQ(gone, 0);
        GR_MUST(cuGraphDestroy(copy));
        GR_CHECK_EQ(gone, 1);
}

/* An update replaces the references: the old graph's go with it, the new graph's stay. */
static void test_update(void)
{
        CUgraph g = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, 0), plain;
        CUgraphExec exec = instance(g);
        CUgraphExecUpdateResultInfo info;

        GR_MUST(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
        GR_MUST(spin(s, 30));
        GR_MUST(cuStreamEndCapture(s, &plain));
        GR_MUST(cuGraphExecUpdate(exec, plain, &info));
        GR_CHECK_EQ(info.result, CU_GRAPH_EXEC_UPDATE_SUCCESS);
        GR_CHECK_EQ(gone, 0);
        GR_MUST(cuGraphDestroy(g));
        GR_CHECK_EQ(gone, 1);
        GR_MUST(cuGraphLaunch(exec, s));
        GR_MUST(cuStreamSynchronize(s));

        g = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, 30);
        GR_MUST(cuGraphExecUpdate(exec, g, NULL));
        GR_MUST(cuGraphDestroy(g));
        GR_CHECK_EQ(gone, 0);
        /* A launch from before the update keeps what it was launched with. */
        GR_MUST(cuGraphLaunch(exec, s));
        GR_MUST(cuGraphExecUpdate(exec, plain, &info));
        GR_CHECK_EQ(gone, 0);
        GR_MUST(cuStreamSynchronize(s));
        GR_CHECK_EQ(gone, 1);
        GR_MUST(cuGraphExecDestroy(exec));
        GR_MUST(cuGraphDestroy(plain));
        GR_CHECK_EQ(gone, 1);
}

/* An update that is refused changes nothing. */
static void test_update_refused(void)
{
        CUgraph g = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, 0), more, other;
        CUgraphExec exec = instance(g);
        CUgraphExecUpdateResultInfo info;
        CUgraphNode node = NULL;
        CUDA_HOST_NODE_PARAMS host = {.fn = destroy, .userData = &gone};

        GR_MUST(cuGraphDestroy(g));
        GR_MUST(cuGraphCreate(&more, 0));
        GR_MUST(cuGraphCreate(&other, 0));
        GR_MUST(cuGraphAddHostNode(&node, more, NULL, 0, &host));
        GR_MUST(cuGraphAddHostNode(&node, more, NULL, 0, &host));
        GR_MUST(cuGraphAddHostNode(&node, other, NULL, 0, &host));
        GR_CHECK_EQ(cuGraphExecUpdate(exec, more, &info), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
        GR_CHECK_EQ(info.result, CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
        GR_CHECK(!info.errorNode);
        GR_CHECK_EQ(cuGraphExecUpdate(exec, other, &info), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
        GR_CHECK_EQ(info.result, CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED);
        GR_CHECK(info.errorNode == node);
        GR_CHECK_EQ(cuGraphExecUpdate(exec, NULL, &info), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuGraphExecUpdate(NULL, other, &info), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuGraphDestroy(more));
        GR_MUST(cuGraphDestroy(other));
        GR_CHECK_EQ(gone, 0);
        GR_MUST(cuGraphLaunch(exec, s));
        GR_MUST(cuStreamSynchronize(s));
        GR_MUST(cuGraphExecDestroy(exec));
        GR_CHECK_EQ(gone, 1);
}

/* Graphs with memory are not copied (measured, driver 580). */
static void test_memory_not_copied(void)
{
        CUDA_MEM_ALLOC_NODE_PARAMS alloc = {.poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                                          .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}},
                                            .bytesize = 4096};
        CUgraph g, other, copy;
        CUgraphNode node;

        GR_MUST(cuGraphCreate(&g, 0));
        GR_MUST(cuGraphCreate(&other, 0));
        GR_MUST(cuGraphAddMemAllocNode(&node, g, NULL, 0, &alloc));
        GR_CHECK_EQ(cuGraphClone(&copy, g), CUDA_ERROR_NOT_SUPPORTED);
        GR_CHECK_EQ(cuGraphAddChildGraphNode(&node, other, NULL, 0, g), CUDA_ERROR_NOT_SUPPORTED);
        GR_CHECK_EQ(cuGraphClone(NULL, other), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuGraphClone(&copy, NULL), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuGraphAddChildGraphNode(&node, other, NULL, 0, NULL), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuGraphDestroy(g));
        GR_MUST(cuGraphDestroy(other));
}

/* None of these disturbs a capture (measured, driver 580). */
static void test_beside_capture(void)
{
        CUgraph g = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, 0), outer, copy, end;
        CUgraphExec exec = instance(g);
        CUgraphNode node;

        GR_MUST(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
        GR_MUST(cuGraphCreate(&outer, 0));
        GR_MUST(cuGraphClone(&copy, g));
        GR_MUST(cuGraphAddChildGraphNode(&node, outer, NULL, 0, g));
        GR_MUST(cuGraphExecUpdate(exec, g, NULL));
        GR_MUST(cuStreamEndCapture(s, &end));
        GR_MUST(cuGraphDestroy(end));
        GR_MUST(cuGraphDestroy(outer));
        GR_MUST(cuGraphDestroy(copy));
        GR_MUST(cuGraphDestroy(g));
        GR_CHECK_EQ(gone, 0);
        GR_MUST(cuGraphExecDestroy(exec));
        GR_CHECK_EQ(gone, 1);
}

static void test_broken(void)
{
        CUgraph g;

        /* By a call that is forbidden. */
        GR_MUST(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
        attach(graph_of(s));
        GR_CHECK_EQ(cuStreamSynchronize(s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        GR_CHECK_EQ(gone, 0);
        GR_CHECK_EQ(cuStreamEndCapture(s, &g), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        GR_CHECK_EQ(gone, 1);

        /* By a fork that does not come back. */
        GR_MUST(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
        attach(graph_of(s));
        GR_MUST(cuEventRecord(e, s));
        GR_MUST(cuStreamWaitEvent(t, e, 0));
        GR_CHECK(graph_of(t) == graph_of(s));
        GR_MUST(fill(t, x, 1, 1));
        GR_CHECK_EQ(cuStreamEndCapture(s, &g), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
        GR_CHECK_EQ(gone, 1);
}

/* The graph that a capture was given is the program's, also if the capture breaks. */
static void test_given(void)
{
        CUgraph g, end;

        GR_MUST(cuGraphCreate(&g, 0));
        GR_MUST(cuStreamBeginCaptureToGraph(s, g, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_GLOBAL));
        attach(graph_of(s));
        GR_CHECK_EQ(cuStreamSynchronize(s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        GR_CHECK_EQ(cuStreamEndCapture(s, &end), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        GR_CHECK_EQ(gone, 0);
        GR_MUST(cuGraphDestroy(g));
        GR_CHECK_EQ(gone, 1);
}

static void test_stream_destroyed(void)
{
        CUstream stream;

        GR_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        attach(graph_of(stream));
        GR_MUST(fill(stream, x, 1, 1));
        GR_CHECK_EQ(gone, 0);
        GR_MUST(cuStreamDestroy(stream));
        GR_CHECK_EQ(gone, 1);
}

/* With a second stream in the capture, made after the first one and before it: streams end in some order. */
static void test_context_destroyed(void)
{
        for (int first = 0; first < 2; first++) {
                CUstream stream[2];
                CUcontext own;
                CUevent event;

                GR_MUST(cuCtxCreate_v4(&own, NULL, 0, 0));
                GR_MUST(cuStreamCreate(&stream[0], CU_STREAM_NON_BLOCKING));
                GR_MUST(cuStreamCreate(&stream[1], CU_STREAM_NON_BLOCKING));
                GR_MUST(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
                GR_MUST(cuStreamBeginCapture(stream[first], CU_STREAM_CAPTURE_MODE_RELAXED));
                attach(graph_of(stream[first]));
                GR_MUST(cuEventRecord(event, stream[first]));
                GR_MUST(cuStreamWaitEvent(stream[!first], event, 0));
                GR_CHECK_EQ(gone, 0);
                GR_MUST(cuCtxDestroy(own));
                GR_CHECK_EQ(gone, 1);
                GR_MUST(cuCtxSetCurrent(ctx));
        }
}

static void *capture_and_end(void *how)
{
        CUstream stream = CU_STREAM_PER_THREAD;

        GR_MUST(cuCtxSetCurrent(ctx));
        GR_MUST(cuStreamBeginCapture(stream, *(CUstreamCaptureMode *)how));
        attach(graph_of(stream));
        GR_MUST(fill(stream, x, 1, 1));
        GR_CHECK_EQ(gone, 0);
        return NULL;
}

static void test_thread_ends(void)
{
        for (int i = 0; i < 3; i++) {
                CUstreamCaptureMode mode = modes[i];
                pthread_t thread;

                pthread_create(&thread, NULL, capture_and_end, &mode);
                pthread_join(thread, NULL);
                GR_CHECK_EQ(gone, 1);
        }
}

int main(void)
{
        ctx = start();
        GR_MUST(cuMemAlloc(&x, 4096));
        GR_MUST(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuStreamCreate(&t, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
        GR_MUST(spin(s, 0));
        GR_MUST(fill(s, x, 1, 1));
        GR_MUST(cuCtxSynchronize());
        test_references();
        test_arguments();
        test_graph();
        test_executable();
        test_executable_first();
        test_launch_captured();
        test_clone();
        test_child();
        test_update();
        test_update_refused();
        test_memory_not_copied();
        test_beside_capture();
        test_broken();
        test_given();
        test_stream_destroyed();
        test_context_destroyed();
        test_thread_ends();
        GR_CHECK_EQ(misuses(), 0);
        test_misuse();
        return GR_CHECK_RESULT();
}
