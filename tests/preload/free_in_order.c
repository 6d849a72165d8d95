/*
 * Memory that was exported is freed in the order of a stream that waits for what the program does next: the free must
 * not wait for the stream, and the memory is free once the stream is done.
 */
#include <semaphore.h>
#include <stdio.h>
#include <time.h>

#include <cuda.h>

#include "check.h"

#define BYTES ((size_t)128 << 20)

static sem_t go_on;

static void await(void *arg)
{
        struct timespec deadline;

        (void)arg;
        clock_gettime(CLOCK_REALTIME, &deadline);
        deadline.tv_sec += 5;
        printf("the stream went on: %d\n", sem_timedwait(&go_on, &deadline) == 0);
}

static size_t available_bytes(void)
{
        size_t available, total;

        GR_MUST(cuMemGetInfo(&available, &total));
        return available;
}

int main(void)
{
        CUipcMemHandle handle;
        CUcontext context;
        CUstream stream;
        CUdeviceptr p;
        size_t before;

        sem_init(&go_on, 0, 0);
        GR_MUST(cuInit(0));
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
        GR_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        before = available_bytes();
        GR_MUST(cuMemAlloc(&p, BYTES));
        GR_MUST(cuIpcGetMemHandle(&handle, p));
        GR_MUST(cuLaunchHostFunc(stream, await, NULL));
        GR_MUST(cuMemsetD8Async(p, 1, BYTES, stream));
        GR_MUST(cuMemFreeAsync(p, stream));
        sem_post(&go_on);
        GR_MUST(cuStreamSynchronize(stream));
        printf("missing: %zu MiB\n", (before - available_bytes()) >> 20);
        return GR_CHECK_RESULT();
}
