/*
 * What not every toolkit declares that can build this library (12.5 and later). In newer ones cuda.h has it: in that of
 * CUDA 12.8 checkpoints, in that of 13.0 the next three. The others are as NVIDIA's pages on the driver's interface of
 * CUDA 13.3 and 13.4 describe them. An older driver may lack any of them.
 */
#ifndef GR_NEWER_H
#define GR_NEWER_H

#include <cuda.h>

#if CUDA_VERSION < 12080
typedef enum {
        CU_PROCESS_STATE_RUNNING,
        CU_PROCESS_STATE_LOCKED,
        CU_PROCESS_STATE_CHECKPOINTED,
        CU_PROCESS_STATE_FAILED
} CUprocessState;
typedef struct {
        unsigned int timeoutMs, reserved0;
        cuuint64_t reserved1[7];
} CUcheckpointLockArgs;
typedef struct {
        cuuint64_t reserved[8];
} CUcheckpointCheckpointArgs, CUcheckpointRestoreArgs, CUcheckpointUnlockArgs;
CUresult CUDAAPI cuCheckpointProcessGetRestoreThreadId(int pid, int *tid);
CUresult CUDAAPI cuCheckpointProcessGetState(int pid, CUprocessState *state);
CUresult CUDAAPI cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args);
CUresult CUDAAPI cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args);
CUresult CUDAAPI cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args);
CUresult CUDAAPI cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args);
#endif

#if CUDA_VERSION < 13000
CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext ctx);
CUresult CUDAAPI cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type);
CUresult CUDAAPI cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type);
#endif

/* Functions with a stream: the second one is for programs with per-thread default streams. */
#define GR_NEWER_PTSZ(symbol, ...)                                                                                     \
        CUresult CUDAAPI symbol(__VA_ARGS__);                                                                          \
        CUresult CUDAAPI symbol##_ptsz(__VA_ARGS__)

#if CUDA_VERSION < 13020
typedef struct CUstreamCigCaptureParams_st CUstreamCigCaptureParams;
GR_NEWER_PTSZ(cuStreamBeginCaptureToCig, CUstream stream, CUstreamCigCaptureParams *parameters);
GR_NEWER_PTSZ(cuStreamEndCaptureToCig, CUstream stream);
GR_NEWER_PTSZ(cuLaunchHostFunc_v2, CUstream stream, CUhostFn function, void *arg, unsigned int mode);
GR_NEWER_PTSZ(cuMemcpyWithAttributesAsync, CUdeviceptr to, CUdeviceptr from, size_t bytes,
              CUmemcpyAttributes *attributes, CUstream stream);
GR_NEWER_PTSZ(cuMemcpy3DWithAttributesAsync, CUDA_MEMCPY3D_BATCH_OP *copy, unsigned long long flags, CUstream stream);
#endif

#if CUDA_VERSION < 13030
typedef void *CUgraphRecaptureCallback;
GR_NEWER_PTSZ(cuStreamBeginRecaptureToGraph, CUstream stream, CUstreamCaptureMode mode, CUgraph graph,
              CUgraphRecaptureCallback callback, void *arg);
#endif

#if CUDA_VERSION < 13040
CUresult CUDAAPI cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                   const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *params);
CUresult CUDAAPI cuGraphNodeSetParams_v2(CUgraphNode node, CUgraphNodeParams *params);
#endif

#endif
