/* Streams and captures: what fences need to know about streams, and when no event may be recorded. */
#include "hooks/stream.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/no_cancel.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/captures.h"
#include "hooks/context.h"
#include "hooks/query.h"

/* Describes a capture before the driver begins it: afterwards another thread may end the context. */
static struct gr_capture about_to_begin(CUstream stream, enum gr_null_stream null_stream, CUstreamCaptureMode mode)
{
        struct gr_capture capture = {.stream = gr_capture_identity(stream, null_stream), .mode = mode};
        struct gr_context *owner;
        GR_KEEP_ERRNO;

        gr_core_will_capture(&gr_core);
        if (capture.stream == gr_capture_own_stream() || !stream || !gr_real.cuStreamGetCtx ||
            gr_real.cuStreamGetCtx(stream, &capture.context) != CUDA_SUCCESS)
                gr_real.cuCtxGetCurrent(&capture.context);
        if (capture.stream == gr_capture_own_stream())
                capture.current = capture.context;
        owner = capture.context ? gr_context_known(capture.context) : NULL;
        if (owner)
                capture.context = owner->handle;
        if (capture.context)
                gr_core_note_graph(&gr_core, owner ? GR_DEVICE_BIT(owner->ordinal) : GR_ALL_DEVICES);
        return capture;
}

/* Whether a capture makes a new graph, or adds to one of the program, which may have or get other nodes. */
enum target { NEW_GRAPH, INTO_GRAPH };
#define BEGIN_CAPTURE(symbol, null_stream, target, mode, stream, ...)                                                  \
        do {                                                                                                           \
                GR_PASS_GATE;                                                                                          \
                struct gr_capture capture;                                                                             \
                CUresult result;                                                                                       \
                                                                                                                       \
                if (!gr_shim_ready())                                                                                  \
                        return GR_REAL(symbol, __VA_ARGS__);                                                           \
                GR_NO_CANCEL; /* the gate would stay shut */                                                           \
                capture = about_to_begin(stream, null_stream, mode);                                                   \
                capture.forked = capture.unordered = target == INTO_GRAPH;                                             \
                gr_captures_begin_enter();                                                                             \
                /* A capture that is not on the list would keep the gate shut for good. */                             \
                result = gr_captures_have_room() ? GR_REAL(symbol, __VA_ARGS__) : CUDA_ERROR_OUT_OF_MEMORY;            \
                if (result == CUDA_SUCCESS)                                                                            \
                        gr_capture_began(&capture);                                                                    \
                gr_captures_begin_leave(result == CUDA_SUCCESS);                                                       \
                return result;                                                                                         \
        } while (0)

GR_EXPORT CUresult CUDAAPI cuStreamBeginCapture(CUstream stream)
{
        BEGIN_CAPTURE(cuStreamBeginCapture, GR_NULL_LEGACY, NEW_GRAPH, CU_STREAM_CAPTURE_MODE_GLOBAL, stream, stream);
}

GR_EXPORT CUresult CUDAAPI cuStreamBeginCapture_ptsz(CUstream stream)
{
        BEGIN_CAPTURE(cuStreamBeginCapture_ptsz, GR_NULL_PER_THREAD, NEW_GRAPH, CU_STREAM_CAPTURE_MODE_GLOBAL, stream,
                      stream);
}

GR_EXPORT CUresult CUDAAPI cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode)
{
        BEGIN_CAPTURE(cuStreamBeginCapture_v2, GR_NULL_LEGACY, NEW_GRAPH, mode, stream, stream, mode);
}

GR_EXPORT CUresult CUDAAPI cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode)
{
        BEGIN_CAPTURE(cuStreamBeginCapture_v2_ptsz, GR_NULL_PER_THREAD, NEW_GRAPH, mode, stream, stream, mode);
}

GR_EXPORT CUresult CUDAAPI cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *dependencies,
                                                       const CUgraphEdgeData *edges, size_t count,
                                                       CUstreamCaptureMode mode)
{
        BEGIN_CAPTURE(cuStreamBeginCaptureToGraph, GR_NULL_LEGACY, INTO_GRAPH, mode, stream, stream, graph,
                      dependencies, edges, count, mode);
}

GR_EXPORT CUresult CUDAAPI cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph,
                                                            const CUgraphNode *dependencies,
                                                            const CUgraphEdgeData *edges, size_t count,
                                                            CUstreamCaptureMode mode)
{
        BEGIN_CAPTURE(cuStreamBeginCaptureToGraph_ptsz, GR_NULL_PER_THREAD, INTO_GRAPH, mode, stream, stream, graph,
                      dependencies, edges, count, mode);
}

/*
 * The nodes of the graph are captured again. The driver first lets go of the graph's user objects. So what an earlier
 * capture was given is from then on in use only by the executables that were made of the graph (captures.c).
 */
GR_EXPORT CUresult CUDAAPI cuStreamBeginRecaptureToGraph(CUstream stream, CUstreamCaptureMode mode, CUgraph graph,
                                                         CUgraphRecaptureCallback callback, void *arg)
{
        BEGIN_CAPTURE(cuStreamBeginRecaptureToGraph, GR_NULL_LEGACY, INTO_GRAPH, mode, stream, stream, mode, graph,
                      callback, arg);
}

GR_EXPORT CUresult CUDAAPI cuStreamBeginRecaptureToGraph_ptsz(CUstream stream, CUstreamCaptureMode mode, CUgraph graph,
                                                              CUgraphRecaptureCallback callback, void *arg)
{
        BEGIN_CAPTURE(cuStreamBeginRecaptureToGraph_ptsz, GR_NULL_PER_THREAD, INTO_GRAPH, mode, stream, stream, mode,
                      graph, callback, arg);
}

/* A capture into a list of commands for a graphics interface, which runs them. It is as a relaxed one. */
GR_EXPORT CUresult CUDAAPI cuStreamBeginCaptureToCig(CUstream stream, CUstreamCigCaptureParams *parameters)
{
        BEGIN_CAPTURE(cuStreamBeginCaptureToCig, GR_NULL_LEGACY, INTO_GRAPH, CU_STREAM_CAPTURE_MODE_RELAXED, stream,
                      stream, parameters);
}

GR_EXPORT CUresult CUDAAPI cuStreamBeginCaptureToCig_ptsz(CUstream stream, CUstreamCigCaptureParams *parameters)
{
        BEGIN_CAPTURE(cuStreamBeginCaptureToCig_ptsz, GR_NULL_PER_THREAD, INTO_GRAPH, CU_STREAM_CAPTURE_MODE_RELAXED,
                      stream, stream, parameters);
}

GR_EXPORT CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream)
{
        GR_PASS_DEEP;
        gr_capture_may_fork(stream, GR_NULL_LEGACY, GR_FORK_BY_EVENT);
        return GR_REAL(cuEventRecord, event, stream);
}

GR_EXPORT CUresult CUDAAPI cuEventRecord_ptsz(CUevent event, CUstream stream)
{
        GR_PASS_DEEP;
        gr_capture_may_fork(stream, GR_NULL_PER_THREAD, GR_FORK_BY_EVENT);
        return GR_REAL(cuEventRecord_ptsz, event, stream);
}

GR_EXPORT CUresult CUDAAPI cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags)
{
        GR_PASS_DEEP;
        gr_capture_may_fork(stream, GR_NULL_LEGACY, GR_FORK_BY_EVENT);
        return GR_REAL(cuEventRecordWithFlags, event, stream, flags);
}

GR_EXPORT CUresult CUDAAPI cuEventRecordWithFlags_ptsz(CUevent event, CUstream stream, unsigned int flags)
{
        GR_PASS_DEEP;
        gr_capture_may_fork(stream, GR_NULL_PER_THREAD, GR_FORK_BY_EVENT);
        return GR_REAL(cuEventRecordWithFlags_ptsz, event, stream, flags);
}

/* What a capture's next work waits for is set by hand: it may be anything. */
#define DEPENDENCIES(symbol, parameters, ...)                                                                          \
        GR_EXPORT CUresult CUDAAPI symbol parameters                                                                   \
        {                                                                                                              \
                GR_PASS_DEEP;                                                                                          \
                if (gr_captures_are_open())                                                                            \
                        gr_capture_forks(NULL, GR_FORK_BY_HAND);                                                       \
                return GR_REAL(symbol, __VA_ARGS__);                                                                   \
        }

DEPENDENCIES(cuStreamUpdateCaptureDependencies, (CUstream stream, CUgraphNode *nodes, size_t count, unsigned int flags),
             stream, nodes, count, flags)
DEPENDENCIES(cuStreamUpdateCaptureDependencies_ptsz,
             (CUstream stream, CUgraphNode *nodes, size_t count, unsigned int flags), stream, nodes, count, flags)
DEPENDENCIES(cuStreamUpdateCaptureDependencies_v2,
             (CUstream stream, CUgraphNode *nodes, const CUgraphEdgeData *edges, size_t count, unsigned int flags),
             stream, nodes, edges, count, flags)
DEPENDENCIES(cuStreamUpdateCaptureDependencies_v2_ptsz,
             (CUstream stream, CUgraphNode *nodes, const CUgraphEdgeData *edges, size_t count, unsigned int flags),
             stream, nodes, edges, count, flags)

/* With the graph under construction the program can add nodes by hand, in whatever order. */
#define CAPTURE_INFO(symbol, null_stream, parameters, ...)                                                             \
        GR_EXPORT CUresult CUDAAPI symbol parameters                                                                   \
        {                                                                                                              \
                GR_PASS_DEEP;                                                                                          \
                if (graph)                                                                                             \
                        gr_capture_may_fork(stream, null_stream, GR_FORK_BY_HAND);                                     \
                return GR_REAL(symbol, __VA_ARGS__);                                                                   \
        }

CAPTURE_INFO(cuStreamGetCaptureInfo_v2, GR_NULL_LEGACY,
             (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **nodes,
              size_t *count),
             stream, status, id, graph, nodes, count)
CAPTURE_INFO(cuStreamGetCaptureInfo_v2_ptsz, GR_NULL_PER_THREAD,
             (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **nodes,
              size_t *count),
             stream, status, id, graph, nodes, count)
CAPTURE_INFO(cuStreamGetCaptureInfo_v3, GR_NULL_LEGACY,
             (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **nodes,
              const CUgraphEdgeData **edges, size_t *count),
             stream, status, id, graph, nodes, edges, count)
CAPTURE_INFO(cuStreamGetCaptureInfo_v3_ptsz, GR_NULL_PER_THREAD,
             (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **nodes,
              const CUgraphEdgeData **edges, size_t *count),
             stream, status, id, graph, nodes, edges, count)

/* The number of the capture that an end would end; 0: none. */
static uint64_t number_to_end(CUstream stream, enum gr_null_stream null_stream)
{
        const bool own = gr_capture_identity(stream, null_stream) == gr_capture_own_stream();
        CUcontext current = NULL;

        if (own && gr_shim_ready() && gr_captures_are_open())
                gr_real.cuCtxGetCurrent(&current);
        /* Without a current context there is no per-thread stream that could be meant, and the driver ends nothing. */
        return own && !current ? 0 : gr_capture_number(gr_capture_identity(stream, null_stream), current);
}

/*
 * The driver's end has this result. A failed one may leave the capture open (wrong thread or stream) or close it (the
 * capture was invalidated).
 */
static void note_end(CUstream stream, enum gr_null_stream null_stream, uint64_t number, CUresult result)
{
        CUstreamCaptureStatus status;

        if (result == CUDA_SUCCESS || !gr_real.cuStreamIsCapturing ||
            gr_real.cuStreamIsCapturing(null_stream == GR_NULL_PER_THREAD && !stream ? CU_STREAM_PER_THREAD : stream,
                                        &status) != CUDA_SUCCESS ||
            status == CU_STREAM_CAPTURE_STATUS_NONE)
                gr_capture_over(number, NULL);
}

static CUresult end_capture(CUstream stream, CUgraph *graph, enum gr_null_stream null_stream,
                            __typeof__(cuStreamEndCapture) *real)
{
        uint64_t number;
        CUresult result;

        if (!real)
                return CUDA_ERROR_NOT_FOUND;
        GR_NO_CANCEL; /* a capture that is over must leave the list */
        number = number_to_end(stream, null_stream);
        result = real(stream, graph);
        if (!gr_shim_ready())
                return result;
        if (result == CUDA_SUCCESS && number && graph && *graph)
                gr_capture_became(number, *graph);
        note_end(stream, null_stream, number, result);
        return result;
}

GR_EXPORT CUresult CUDAAPI cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return end_capture(stream, graph, GR_NULL_LEGACY, gr_real.cuStreamEndCapture);
}

GR_EXPORT CUresult CUDAAPI cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return end_capture(stream, graph, GR_NULL_PER_THREAD, gr_real.cuStreamEndCapture_ptsz);
}

#define END_CAPTURE_TO_CIG(symbol, null_stream)                                                                        \
        GR_EXPORT CUresult CUDAAPI symbol(CUstream stream)                                                             \
        {                                                                                                              \
                GR_PASS_DEEP;                                                                                          \
                GR_NO_CANCEL; /* as in end_capture */                                                                  \
                uint64_t number = number_to_end(stream, null_stream);                                                  \
                CUresult result = GR_REAL(symbol, stream);                                                             \
                                                                                                                       \
                if (gr_shim_ready())                                                                                   \
                        note_end(stream, null_stream, number, result);                                                 \
                return result;                                                                                         \
        }
END_CAPTURE_TO_CIG(cuStreamEndCaptureToCig, GR_NULL_LEGACY)
END_CAPTURE_TO_CIG(cuStreamEndCaptureToCig_ptsz, GR_NULL_PER_THREAD)

/* A stream that is destroyed takes its capture with it (docs/measurements.md, capture-end). */
static CUresult destroy_stream(CUstream stream, __typeof__(cuStreamDestroy_v2) *real)
{
        uint64_t number;
        CUresult result;

        if (!real)
                return CUDA_ERROR_NOT_FOUND;
        GR_NO_CANCEL; /* as in end_capture */
        number = gr_capture_number(stream, NULL);
        result = real(stream);
        if (result == CUDA_SUCCESS && gr_shim_ready())
                gr_capture_over(number, NULL);
        return result;
}

GR_EXPORT CUresult CUDAAPI cuStreamDestroy(CUstream stream)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return destroy_stream(stream, gr_real.cuStreamDestroy);
}

GR_EXPORT CUresult CUDAAPI cuStreamDestroy_v2(CUstream stream)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return destroy_stream(stream, gr_real.cuStreamDestroy_v2);
}

/*
 * The heuristics of cuBLASLt create a stream that gets no work (docs/measurements.md, cublas-stream), so it does not
 * count as overlap. Work that it gets after all is noticed as that on a per-thread stream is (submit.c).
 */
static bool is_without_work(const void *creator)
{
        FILE *maps = fopen("/proc/self/maps", "re"); /* dladdr would wait for the loader, which may wait for us */
        char line[PATH_MAX];
        bool without_work = false;

        while (maps && fgets(line, sizeof(line), maps)) {
                const char *name = strrchr(line, '/');
                uintptr_t begin, end;

                if (name && sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &begin, &end) == 2 &&
                    (uintptr_t)creator >= begin && (uintptr_t)creator < end) {
                        without_work = strncmp(name, "/libcublas", strlen("/libcublas")) == 0;
                        break;
                }
        }
        if (maps)
                fclose(maps);
        return without_work;
}

/*
 * The program has a stream of its own: work may overlap, so a barrier is no longer cheap. creator: the caller's code.
 */
static void note_stream(CUresult result, const void *creator)
{
        GR_KEEP_ERRNO;

        assert(creator);
        if (result == CUDA_SUCCESS && gr_shim_ready() && !atomic_load(&gr_core.streams_overlap) &&
            !is_without_work(creator))
                gr_core_note_overlap(&gr_core);
}

GR_EXPORT CUresult CUDAAPI cuStreamCreate(CUstream *stream, unsigned int flags)
{
        GR_PASS_DEEP;
        CUresult result;
        GR_NO_CANCEL; /* that streams overlap must be noted */

        result = GR_WITH_ROOM(-1, GR_REAL(cuStreamCreate, stream, flags));
        note_stream(result, __builtin_return_address(0));
        return result;
}

GR_EXPORT CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
        GR_PASS_DEEP;
        CUresult result;
        GR_NO_CANCEL;

        result = GR_WITH_ROOM(-1, GR_REAL(cuStreamCreateWithPriority, stream, flags, priority));
        note_stream(result, __builtin_return_address(0));
        return result;
}

/* Some graph may have nodes that wait for the host or another process: launches may make streams wait. */
static _Atomic bool graphs_wait;

/*
 * Called before the driver gets work that waits, because a barrier behind that work could hang the program. True: call
 * `note_wait` with the result.
 */
static bool will_wait(void)
{
        GR_KEEP_ERRNO;

        if (!gr_shim_ready())
                return false;
        if (gr_captures_are_open())
                atomic_store(&graphs_wait, true);
        gr_core_stream_will_wait(&gr_core);
        return true;
}

/* As will_wait, for work on a stream; some of it also writes to memory. */
static bool stream_will_wait(CUstream stream, enum gr_null_stream null_stream, bool writes)
{
        if (gr_captures_are_open()) {
                gr_captures_note_work(stream, null_stream);
                if (writes && gr_capture_on(stream, null_stream))
                        gr_core_note_graph(&gr_core, GR_ALL_DEVICES); /* a list of operations may write anywhere */
        }
        return will_wait();
}

static CUresult note_wait(bool told, CUresult result)
{
        if (told)
                gr_core_stream_waits(&gr_core);
        return result;
}

#define HOST_WAIT(symbol, writes, parameters, ...)                                                                     \
        GR_EXPORT CUresult CUDAAPI symbol parameters                                                                   \
        {                                                                                                              \
                GR_PASS_GATE;                                                                                          \
                GR_NO_CANCEL; /* gr_core_stream_waits must follow */                                                   \
                bool told = stream_will_wait(stream, GR_NULL_LEGACY, writes);                                          \
                                                                                                                       \
                return note_wait(told, GR_REAL(symbol, __VA_ARGS__));                                                  \
        }                                                                                                              \
        GR_EXPORT CUresult CUDAAPI symbol##_ptsz parameters                                                            \
        {                                                                                                              \
                GR_PASS_GATE;                                                                                          \
                GR_NO_CANCEL; /* gr_core_stream_waits must follow */                                                   \
                bool told = stream_will_wait(stream, GR_NULL_PER_THREAD, writes);                                      \
                                                                                                                       \
                return note_wait(told, GR_REAL(symbol##_ptsz, __VA_ARGS__));                                           \
        }

HOST_WAIT(cuLaunchHostFunc, false, (CUstream stream, CUhostFn function, void *arg), stream, function, arg)
HOST_WAIT(cuLaunchHostFunc_v2, false, (CUstream stream, CUhostFn function, void *arg, unsigned int mode), stream,
          function, arg, mode)
HOST_WAIT(cuStreamAddCallback, false, (CUstream stream, CUstreamCallback callback, void *arg, unsigned int flags),
          stream, callback, arg, flags)
HOST_WAIT(cuStreamWaitValue32, false, (CUstream stream, CUdeviceptr word, cuuint32_t value, unsigned int flags), stream,
          gr_query_unless_cached(word), value, flags)
HOST_WAIT(cuStreamWaitValue32_v2, false, (CUstream stream, CUdeviceptr word, cuuint32_t value, unsigned int flags),
          stream, gr_query_unless_cached(word), value, flags)
HOST_WAIT(cuStreamWaitValue64, false, (CUstream stream, CUdeviceptr word, cuuint64_t value, unsigned int flags), stream,
          gr_query_unless_cached(word), value, flags)
HOST_WAIT(cuStreamWaitValue64_v2, false, (CUstream stream, CUdeviceptr word, cuuint64_t value, unsigned int flags),
          stream, gr_query_unless_cached(word), value, flags)
HOST_WAIT(cuStreamBatchMemOp, true,
          (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *operations, unsigned int flags), stream,
          count, operations, flags)
HOST_WAIT(cuStreamBatchMemOp_v2, true,
          (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *operations, unsigned int flags), stream,
          count, operations, flags)
HOST_WAIT(cuWaitExternalSemaphoresAsync, false,
          (const CUexternalSemaphore *semaphores, const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *parameters,
           unsigned int count, CUstream stream),
          semaphores, parameters, count, stream)

void gr_stream_graph_node(CUgraphNodeType type)
{
        if (type == CU_GRAPH_NODE_TYPE_HOST || type == CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT ||
            type == CU_GRAPH_NODE_TYPE_BATCH_MEM_OP) {
                atomic_store(&graphs_wait, true);
                note_wait(will_wait(), CUDA_SUCCESS);
        }
        if (type == CU_GRAPH_NODE_TYPE_KERNEL || type == CU_GRAPH_NODE_TYPE_MEMCPY ||
            type == CU_GRAPH_NODE_TYPE_MEMSET || type == CU_GRAPH_NODE_TYPE_BATCH_MEM_OP)
                gr_core_note_graph(&gr_core, GR_ALL_DEVICES); /* as gated.c does */
}

bool gr_stream_graph_begins(void)
{
        return atomic_load_explicit(&graphs_wait, memory_order_relaxed) && will_wait();
}

CUresult gr_stream_graph_began(CUresult result)
{
        return note_wait(true, result);
}

#define HOST_NODE(symbol, type, parameters)                                                                            \
        GR_EXPORT CUresult CUDAAPI symbol(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,           \
                                          size_t count, const parameters *values)                                      \
        {                                                                                                              \
                GR_PASS_DEEP;                                                                                          \
                gr_stream_graph_node(type);                                                                            \
                return GR_REAL(symbol, node, graph, dependencies, count, values);                                      \
        }

HOST_NODE(cuGraphAddHostNode, CU_GRAPH_NODE_TYPE_HOST, CUDA_HOST_NODE_PARAMS)
HOST_NODE(cuGraphAddBatchMemOpNode, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, CUDA_BATCH_MEM_OP_NODE_PARAMS)
HOST_NODE(cuGraphAddExternalSemaphoresWaitNode, CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT, CUDA_EXT_SEM_WAIT_NODE_PARAMS)
