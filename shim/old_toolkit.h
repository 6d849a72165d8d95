/* What is newer than the oldest toolkit that can build this project (12.5). After cuda.h. */
#ifndef GR_OLD_TOOLKIT_H
#define GR_OLD_TOOLKIT_H

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

#endif
