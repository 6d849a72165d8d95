/* The runtime's streams, events, captures and graphs, which are those of the driver under other names. */
#include "runtime.h"

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
        RT(cuStreamCreate(stream, CU_STREAM_DEFAULT));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
        RT(cuStreamCreate(stream, flags));
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
        RT(cuStreamCreateWithPriority(stream, flags, priority));
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
        RT(cuStreamDestroy(stream));
}

RT_PTSZ(cudaStreamQuery, (cudaStream_t stream), (stream))
{
        RT(cuStreamQuery(stream));
}

RT_PTSZ(cudaStreamSynchronize, (cudaStream_t stream), (stream))
{
        RT(cuStreamSynchronize(stream));
}

RT_PTSZ(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned flags), (stream, event, flags))
{
        RT(cuStreamWaitEvent(stream, event, flags));
}

RT_PTSZ(cudaStreamGetFlags, (cudaStream_t stream, unsigned *flags), (stream, flags))
{
        RT(cuStreamGetFlags(stream, flags));
}

RT_PTSZ(cudaStreamGetPriority, (cudaStream_t stream, int *priority), (stream, priority))
{
        RT(cuStreamGetPriority(stream, priority));
}

RT_PTSZ(cudaStreamGetId, (cudaStream_t stream, unsigned long long *id), (stream, id))
{
        RT(cuStreamGetId(stream, id));
}

RT_PTSZ(cudaStreamAddCallback, (cudaStream_t stream, cudaStreamCallback_t callback, void *arg, unsigned flags),
        (stream, callback, arg, flags))
{
        /* The cast is safe: both types have the same calling convention, and the error codes are the same numbers. */
        RT(cuStreamAddCallback(stream, (CUstreamCallback)(void *)callback, arg, flags));
}

RT_PTSZ(cudaLaunchHostFunc, (cudaStream_t stream, cudaHostFn_t fn, void *arg), (stream, fn, arg))
{
        RT(cuLaunchHostFunc(stream, fn, arg));
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
        RT(cuEventCreate(event, CU_EVENT_DEFAULT));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
        RT(cuEventCreate(event, flags));
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
        RT(cuEventDestroy(event));
}

RT_PTSZ(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), (event, stream))
{
        RT(cuEventRecord(event, stream));
}

RT_PTSZ(cudaEventRecordWithFlags, (cudaEvent_t event, cudaStream_t stream, unsigned flags), (event, stream, flags))
{
        RT(cuEventRecordWithFlags(event, stream, flags));
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
        RT(cuEventQuery(event));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
        RT(cuEventSynchronize(event));
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t first, cudaEvent_t last)
{
        RT(cuEventElapsedTime(ms, first, last));
}

RT_PTSZ(cudaStreamBeginCapture, (cudaStream_t stream, enum cudaStreamCaptureMode mode), (stream, mode))
{
        RT(cuStreamBeginCapture(stream, (CUstreamCaptureMode)mode));
}

RT_PTSZ(cudaStreamEndCapture, (cudaStream_t stream, cudaGraph_t *graph), (stream, graph))
{
        RT(cuStreamEndCapture(stream, graph));
}

RT_PTSZ(cudaStreamIsCapturing, (cudaStream_t stream, enum cudaStreamCaptureStatus *status), (stream, status))
{
        RT(cuStreamIsCapturing(stream, (CUstreamCaptureStatus *)status));
}

RT_PTSZ(cudaStreamGetCaptureInfo,
        (cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
         const cudaGraphNode_t **after, const cudaGraphEdgeData **data, size_t *n),
        (stream, status, id, graph, after, data, n))
{
        RT(cuStreamGetCaptureInfo(stream, (CUstreamCaptureStatus *)status, (cuuint64_t *)id, graph, after,
                                  (const CUgraphEdgeData **)data, n));
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
        RT_EARLY(cuThreadExchangeStreamCaptureMode((CUstreamCaptureMode *)mode));
}

cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned flags)
{
        RT(cuGraphCreate(graph, flags));
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
        RT(cuGraphDestroy(graph));
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
        RT(cuGraphGetNodes(graph, nodes, count));
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
        RT(cuGraphInstantiateWithFlags(exec, graph, flags));
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
        RT(cuGraphInstantiateWithFlags(exec, graph, flags));
}

RT_PTSZ(cudaGraphUpload, (cudaGraphExec_t exec, cudaStream_t stream), (exec, stream))
{
        RT(cuGraphUpload(exec, stream));
}

RT_PTSZ(cudaGraphLaunch, (cudaGraphExec_t exec, cudaStream_t stream), (exec, stream))
{
        RT(cuGraphLaunch(exec, stream));
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
        RT(cuGraphExecDestroy(exec));
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *ptr, cudaHostFn_t destroy, unsigned refs,
                                 unsigned flags)
{
        RT(cuUserObjectCreate(object, ptr, destroy, refs, flags));
}

cudaError_t cudaUserObjectRetain(cudaUserObject_t object, unsigned count)
{
        RT(cuUserObjectRetain(object, count));
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count)
{
        RT(cuUserObjectRelease(object, count));
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count, unsigned flags)
{
        RT(cuGraphRetainUserObject(graph, object, count, flags));
}

cudaError_t cudaGraphReleaseUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count)
{
        RT(cuGraphReleaseUserObject(graph, object, count));
}

cudaError_t cudaGraphClone(cudaGraph_t *copy, cudaGraph_t graph)
{
        RT(cuGraphClone(copy, graph));
}

cudaError_t cudaGraphAddChildGraphNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *after,
                                       size_t n_after, cudaGraph_t child)
{
        RT(cuGraphAddChildGraphNode(node, graph, after, n_after, child));
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph, cudaGraphExecUpdateResultInfo *info)
{
        /* The cast is safe: the structures are the same, and so are the numbers of the results. */
        RT(cuGraphExecUpdate(exec, graph, (CUgraphExecUpdateResultInfo *)(void *)info));
}
