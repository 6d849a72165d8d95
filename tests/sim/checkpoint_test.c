/* Checkpoints of the own process: their order, what waits meanwhile, and what is lost (docs/measurements.md). */
#include "grsim.h"
#include "simtest.h"

#include "newer.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

static CUcontext ctx;
static CUstream stream;
static CUdeviceptr block;
static _Atomic int served; /* calls of other threads that have returned */

static CUprocessState state(void)
{
        CUprocessState now;

        GR_MUST(cuCheckpointProcessGetState(getpid(), &now));
        return now;
}

static CUresult lock(unsigned ms)
{
        CUcheckpointLockArgs args = {.timeoutMs = ms};

        return cuCheckpointProcessLock(getpid(), &args);
}

static CUresult checkpoint(void)
{
        return cuCheckpointProcessCheckpoint(getpid(), NULL);
}

static CUresult restore(void)
{
        return cuCheckpointProcessRestore(getpid(), NULL);
}

static CUresult unlock(void)
{
        return cuCheckpointProcessUnlock(getpid(), NULL);
}

static void test_order(void)
{
        size_t before = grSimUsedBytes(0);

        GR_CHECK_EQ(cuCheckpointProcessLock(getpid() + 1, NULL), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(checkpoint(), CUDA_ERROR_ILLEGAL_STATE);
        GR_CHECK_EQ(restore(), CUDA_ERROR_ILLEGAL_STATE);
        GR_CHECK_EQ(unlock(), CUDA_ERROR_ILLEGAL_STATE);
        GR_CHECK_EQ(lock(0), CUDA_SUCCESS);
        GR_CHECK_EQ(state(), CU_PROCESS_STATE_LOCKED);
        GR_CHECK_EQ(lock(0), CUDA_ERROR_ILLEGAL_STATE);
        GR_CHECK_EQ(restore(), CUDA_ERROR_ILLEGAL_STATE);
        GR_CHECK_EQ(checkpoint(), CUDA_SUCCESS);
        GR_CHECK_EQ(state(), CU_PROCESS_STATE_CHECKPOINTED);
        GR_CHECK_EQ(unlock(), CUDA_ERROR_ILLEGAL_STATE);
        GR_CHECK(before > 0 && grSimUsedBytes(0) == 0);
        GR_CHECK_EQ(restore(), CUDA_SUCCESS);
        GR_CHECK_EQ(state(), CU_PROCESS_STATE_LOCKED);
        GR_CHECK_EQ(unlock(), CUDA_SUCCESS);
        GR_CHECK_EQ(grSimUsedBytes(0), before);
        GR_CHECK_EQ(word(block), 5);
}

static void *ask_for_memory(void *arg)
{
        CUdeviceptr more;

        GR_MUST(cuCtxSetCurrent(ctx)); /* returns at once */
        atomic_fetch_add(&served, 1);
        GR_MUST(cuMemAlloc(&more, 4096));
        atomic_fetch_add(&served, 1);
        return arg;
}

/* The calls of other threads wait until the unlock; in a checkpointed process some break. */
static void test_calls(void)
{
        unsigned long before = misuses();
        pthread_t threads[2];

        GR_MUST(lock(0));
        pthread_create(&threads[0], NULL, ask_for_memory, NULL);
        while (atomic_load(&served) < 1)
                usleep(1000);
        GR_MUST(checkpoint());
        pthread_create(&threads[1], NULL, ask_for_memory, NULL);
        while (atomic_load(&served) < 2)
                usleep(1000);
        usleep(50000);
        GR_CHECK_EQ(atomic_load(&served), 2);
        GR_CHECK_EQ(misuses(), before);
        GR_CHECK_EQ(cuStreamQuery(stream), CUDA_ERROR_OPERATING_SYSTEM);
        GR_CHECK_EQ(misuses(), before + 1);
        GR_CHECK_EQ(cuMemGetInfo(&(size_t){0}, &(size_t){0}), CUDA_ERROR_OPERATING_SYSTEM);
        GR_MUST(restore());
        GR_CHECK_EQ(atomic_load(&served), 2);
        GR_MUST(unlock());
        for (int i = 0; i < 2; i++)
                pthread_join(threads[i], NULL);
        GR_CHECK_EQ(atomic_load(&served), 4);
}

static void *wait_for_kernel(void *arg)
{
        GR_MUST(cuCtxSetCurrent(ctx));
        atomic_store(&served, 1);
        GR_MUST(cuStreamSynchronize(stream));
        return arg;
}

/* Beside a call that goes on, the lock gives up after its time. */
static void test_busy(void)
{
        pthread_t thread;

        atomic_store(&served, 0);
        GR_MUST(spin(stream, 1000));
        pthread_create(&thread, NULL, wait_for_kernel, NULL);
        while (atomic_load(&served) < 1)
                usleep(1000);
        usleep(50000);
        GR_CHECK_EQ(lock(50), CUDA_ERROR_NOT_READY);
        GR_CHECK_EQ(state(), CU_PROCESS_STATE_RUNNING);
        pthread_join(thread, NULL);
        GR_CHECK_EQ(lock(50), CUDA_SUCCESS);
        GR_MUST(unlock());
}

/* Managed memory: refused. A restore without room, and one of imported memory: never again. */
static void test_lost(void)
{
        CUdeviceptr managed;

        GR_MUST(cuMemAllocManaged(&managed, 4096, CU_MEM_ATTACH_GLOBAL));
        GR_MUST(lock(0));
        GR_CHECK_EQ(checkpoint(), CUDA_ERROR_NOT_SUPPORTED);
        GR_CHECK_EQ(state(), CU_PROCESS_STATE_LOCKED);
        GR_MUST(unlock());
        GR_MUST(cuMemFree(managed));
        GR_MUST(lock(0));
        GR_MUST(checkpoint());
        grSimTake(0, (size_t)4 << 30);
        GR_CHECK_EQ(restore(), CUDA_ERROR_OUT_OF_MEMORY);
        GR_CHECK_EQ(restore(), CUDA_ERROR_OPERATING_SYSTEM);
        GR_CHECK_EQ(state(), CU_PROCESS_STATE_CHECKPOINTED);
}

int main(void)
{
        ctx = start();
        GR_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuMemAlloc(&block, 4 << 20));
        GR_MUST(fill(stream, block, 5, 1 << 20));
        GR_MUST(cuCtxSynchronize());
        test_order();
        test_calls();
        test_busy();
        test_lost();
        return GR_CHECK_RESULT();
}
