/*
 * Checkpoints, of the own process only: what docs/measurements.md (checkpoints) says of a driver. Calls wait while the
 * process is locked. In a checkpointed one the real driver crashes in some of them, which here is misuse.
 */
#include "sim.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER; /* the state, or nobody is inside any more */
static _Atomic int state;                                 /* a CUprocessState; changed with the lock held */
static _Atomic unsigned inside;                           /* calls that the lock has to wait for */
static bool lost;                                         /* a restore has failed; guarded by lock */
static _Thread_local bool counted;

/* Calls that return at once, whatever the state is. */
static bool is_free(enum sim_symbol symbol)
{
        switch (symbol) {
        case SIM_ID_cuCheckpointProcessGetRestoreThreadId:
        case SIM_ID_cuCheckpointProcessGetState:
        case SIM_ID_cuCheckpointProcessLock:
        case SIM_ID_cuCheckpointProcessCheckpoint:
        case SIM_ID_cuCheckpointProcessRestore:
        case SIM_ID_cuCheckpointProcessUnlock:
        case SIM_ID_cuCtxGetApiVersion:
        case SIM_ID_cuCtxGetCurrent:
        case SIM_ID_cuCtxGetDevice:
        case SIM_ID_cuCtxGetDevice_v2:
        case SIM_ID_cuCtxGetId:
        case SIM_ID_cuCtxGetStreamPriorityRange:
        case SIM_ID_cuCtxPopCurrent:
        case SIM_ID_cuCtxPopCurrent_v2:
        case SIM_ID_cuCtxPushCurrent:
        case SIM_ID_cuCtxPushCurrent_v2:
        case SIM_ID_cuCtxSetCurrent:
        case SIM_ID_cuDeviceGet:
        case SIM_ID_cuDeviceGetAttribute:
        case SIM_ID_cuDeviceGetCount:
        case SIM_ID_cuDeviceGetPCIBusId:
        case SIM_ID_cuDeviceGetUuid:
        case SIM_ID_cuDeviceGetUuid_v2:
        case SIM_ID_cuDevicePrimaryCtxGetState:
        case SIM_ID_cuDevicePrimaryCtxRetain:
        case SIM_ID_cuDriverGetVersion:
        case SIM_ID_cuFuncGetAttribute:
        case SIM_ID_cuGetErrorName:
        case SIM_ID_cuGetErrorString:
        case SIM_ID_cuGetExportTable:
        case SIM_ID_cuGetProcAddress:
        case SIM_ID_cuGetProcAddress_v2:
        case SIM_ID_cuGraphCreate:
        case SIM_ID_cuGraphGetNodes:
        case SIM_ID_cuMemAddressReserve:
        case SIM_ID_cuMemGetAllocationGranularity:
        case SIM_ID_cuPointerGetAttribute:
        case SIM_ID_cuStreamGetCtx:
        case SIM_ID_cuStreamGetCtx_ptsz:
        case SIM_ID_cuStreamGetFlags:
        case SIM_ID_cuStreamGetFlags_ptsz:
        case SIM_ID_cuStreamIsCapturing:
        case SIM_ID_cuStreamIsCapturing_ptsz:
        case SIM_ID_cuThreadExchangeStreamCaptureMode:
                return true;
        default:
                return false;
        }
}

/* What the call gets in a checkpointed process; CUDA_SUCCESS: it waits. */
static CUresult broken(enum sim_symbol symbol)
{
        switch (symbol) {
        case SIM_ID_cuCtxSynchronize:
        case SIM_ID_cuCtxSynchronize_v2:
        case SIM_ID_cuEventQuery:
        case SIM_ID_cuModuleUnload:
        case SIM_ID_cuStreamQuery:
        case SIM_ID_cuStreamQuery_ptsz:
        case SIM_ID_cuStreamSynchronize:
        case SIM_ID_cuStreamSynchronize_ptsz:
                sim_misuse("%s in a checkpointed process", sim_entries[symbol].symbol);
                return CUDA_ERROR_OPERATING_SYSTEM;
        case SIM_ID_cuDeviceGetName:
        case SIM_ID_cuMemGetInfo_v2:
                return CUDA_ERROR_OPERATING_SYSTEM;
        default:
                return CUDA_SUCCESS;
        }
}

CUresult sim_checkpoint_enter(enum sim_symbol symbol)
{
        CUresult result = CUDA_SUCCESS;

        if (is_free(symbol))
                return CUDA_SUCCESS;
        atomic_fetch_add(&inside, 1);
        counted = true;
        if (atomic_load(&state) == CU_PROCESS_STATE_RUNNING)
                return CUDA_SUCCESS;
        sim_checkpoint_leave();
        pthread_mutex_lock(&lock);
        if (atomic_load(&state) == CU_PROCESS_STATE_CHECKPOINTED)
                result = broken(symbol);
        while (atomic_load(&state) != CU_PROCESS_STATE_RUNNING && result == CUDA_SUCCESS)
                pthread_cond_wait(&changed, &lock);
        if (result == CUDA_SUCCESS) {
                atomic_fetch_add(&inside, 1);
                counted = true;
        }
        pthread_mutex_unlock(&lock);
        return result;
}

void sim_checkpoint_leave(void)
{
        if (!counted)
                return;
        counted = false;
        if (atomic_fetch_sub(&inside, 1) == 1 && atomic_load(&state) != CU_PROCESS_STATE_RUNNING) {
                pthread_mutex_lock(&lock);
                pthread_cond_broadcast(&changed);
                pthread_mutex_unlock(&lock);
        }
}

/* Lock held. */
static void set_state(CUprocessState next)
{
        atomic_store(&state, (int)next);
        pthread_cond_broadcast(&changed);
}

static CUresult lock_process(unsigned timeout_ms)
{
        struct timespec until;

        if (atomic_load(&state) != CU_PROCESS_STATE_RUNNING)
                return CUDA_ERROR_ILLEGAL_STATE;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
        until.tv_sec += timeout_ms / 1000 + until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        set_state(CU_PROCESS_STATE_LOCKED);
        while (atomic_load(&inside) > 0)
                if (!timeout_ms) {
                        pthread_cond_wait(&changed, &lock);
                } else if (pthread_cond_timedwait(&changed, &lock, &until) == ETIMEDOUT) {
                        set_state(CU_PROCESS_STATE_RUNNING);
                        return CUDA_ERROR_NOT_READY;
                }
        return CUDA_SUCCESS;
}

static CUresult checkpoint(void)
{
        if (atomic_load(&state) != CU_PROCESS_STATE_LOCKED)
                return CUDA_ERROR_ILLEGAL_STATE;
        if (sim_heap_has(SIM_ALLOC_MANAGED))
                return CUDA_ERROR_NOT_SUPPORTED;
        sim_heap_give_all();
        set_state(CU_PROCESS_STATE_CHECKPOINTED);
        return CUDA_SUCCESS;
}

/* One that has failed leaves the process lost: the driver restores it never. */
static CUresult restore(void)
{
        CUresult result = CUDA_SUCCESS;

        if (atomic_load(&state) != CU_PROCESS_STATE_CHECKPOINTED)
                return CUDA_ERROR_ILLEGAL_STATE;
        if (lost)
                return CUDA_ERROR_OPERATING_SYSTEM;
        if (sim_heap_has(SIM_ALLOC_IMPORTED))
                result = CUDA_ERROR_INVALID_VALUE;
        else if (sim_vmm_has_imports())
                result = CUDA_ERROR_NOT_SUPPORTED;
        else if (!sim_heap_take_all())
                result = CUDA_ERROR_OUT_OF_MEMORY;
        lost = result != CUDA_SUCCESS;
        if (result == CUDA_SUCCESS)
                set_state(CU_PROCESS_STATE_LOCKED);
        return result;
}

static CUresult unlock_process(void)
{
        if (atomic_load(&state) != CU_PROCESS_STATE_LOCKED)
                return CUDA_ERROR_ILLEGAL_STATE;
        set_state(CU_PROCESS_STATE_RUNNING);
        return CUDA_SUCCESS;
}

/* An entry point of that name, for the own process; step is called with the lock held. */
#define SIM_CHECKPOINT(symbol, parameter, step)                                                                        \
        SIM_API symbol(int pid, parameter)                                                                             \
        {                                                                                                              \
                CUresult result;                                                                                       \
                                                                                                                       \
                SIM_ENTER(symbol);                                                                                     \
                if (pid != getpid())                                                                                   \
                        return CUDA_ERROR_INVALID_VALUE;                                                               \
                pthread_mutex_lock(&lock);                                                                             \
                result = step;                                                                                         \
                pthread_mutex_unlock(&lock);                                                                           \
                return result;                                                                                         \
        }

SIM_CHECKPOINT(cuCheckpointProcessLock, CUcheckpointLockArgs *args, lock_process(args ? args->timeoutMs : 0))
SIM_CHECKPOINT(cuCheckpointProcessCheckpoint, CUcheckpointCheckpointArgs *args, ((void)args, checkpoint()))
SIM_CHECKPOINT(cuCheckpointProcessRestore, CUcheckpointRestoreArgs *args, ((void)args, restore()))
SIM_CHECKPOINT(cuCheckpointProcessUnlock, CUcheckpointUnlockArgs *args, ((void)args, unlock_process()))
SIM_CHECKPOINT(cuCheckpointProcessGetRestoreThreadId, int *tid,
               tid ? (*tid = (int)syscall(SYS_gettid), CUDA_SUCCESS) : CUDA_ERROR_INVALID_VALUE)

SIM_API cuCheckpointProcessGetState(int pid, CUprocessState *ret_state)
{
        SIM_ENTER(cuCheckpointProcessGetState);
        if (pid != getpid() || !ret_state)
                return CUDA_ERROR_INVALID_VALUE;
        *ret_state = (CUprocessState)atomic_load(&state);
        return CUDA_SUCCESS;
}
