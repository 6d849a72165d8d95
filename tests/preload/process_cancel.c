/*
 * Threads that are told to end by pthread_cancel: in the midst of their calls, in the first one, in one of each kind,
 * and in exit.
 */
#include "process.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* A thread that was told to end goes on to where it lets itself be ended, and leaves no lock behind. */
static _Atomic int cancel_ready, cancel_worked;

static void *cancelled(void *arg)
{
        struct timespec pause = {.tv_nsec = 1000000};

        (void)arg;
        GR_MUST(cuCtxSetCurrent(current_context));
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
        cancel_ready = 1;
        while (cancel_ready != 2)
                nanosleep(&pause, NULL);
        pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
        for (int i = 0; i < 100; i++)
                work();
        cancel_worked = 1;
        pthread_testcancel();
        return NULL;
}

int cancel(void)
{
        struct timespec pause = {.tv_nsec = 1000000};
        pthread_t thread;
        int state;

        open_device();
        GR_MUST(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state));
        printf("the first thread can be cancelled: %d\n", state == PTHREAD_CANCEL_ENABLE);
        GR_MUST(cuCtxGetCurrent(&current_context));
        GR_MUST(pthread_create(&thread, NULL, cancelled, NULL));
        while (!cancel_ready)
                nanosleep(&pause, NULL);
        GR_MUST(pthread_cancel(thread));
        cancel_ready = 2;
        GR_MUST(pthread_join(thread, NULL));
        printf("ended inside a call: %d\n", !cancel_worked);
        work();
        printf("then worked\n");
        return 0;
}

/* The same in one that makes the process's first use of CUDA. */
static void *cancelled_first(void *arg)
{
        (void)arg;
        pthread_cancel(pthread_self());
        open_device();
        work();
        cancel_worked = 1;
        pthread_testcancel();
        return NULL;
}

int cancel_first(void)
{
        pthread_t thread;

        GR_MUST(pthread_create(&thread, NULL, cancelled_first, NULL));
        GR_MUST(pthread_join(thread, NULL));
        printf("ended inside a call: %d\n", !cancel_worked);
        fflush(stdout);
        open_device();
        work();
        printf("then worked\n");
        return 0;
}

#define MAPPED_BYTES ((size_t)2 << 20)

static struct {
        CUmemAllocationProp prop;
        CUmemGenericAllocationHandle handle, again;
        CUdeviceptr base;
} mapped = {{.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}}};

static CUresult map(void)
{
        return cuMemMap(mapped.base, MAPPED_BYTES, 0, mapped.handle, 0);
}

static CUresult retain(void)
{
        return cuMemRetainAllocationHandle(&mapped.again, (void *)(uintptr_t)mapped.base);
}

static CUresult release_again(void)
{
        return cuMemRelease(mapped.again);
}

static CUresult unmap(void)
{
        return cuMemUnmap(mapped.base, MAPPED_BYTES);
}

#define BLOCK_BYTES ((size_t)5 << 20)

static CUdeviceptr block;
static void *pinned;
static CUmemoryPool pool;

static CUresult alloc(void)
{
        return cuMemAlloc(&block, BLOCK_BYTES);
}

static CUresult release(void)
{
        return cuMemFree(block);
}

/* Climbs the ladder. */
static CUresult alloc_too_much(void)
{
        CUdeviceptr large;

        return cuMemAlloc(&large, (size_t)1 << 50) == CUDA_ERROR_OUT_OF_MEMORY ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

static CUresult alloc_pinned(void)
{
        return cuMemAllocHost(&pinned, BLOCK_BYTES);
}

static CUresult release_pinned(void)
{
        return cuMemFreeHost(pinned);
}

static CUresult ask_free(void)
{
        size_t free_bytes, total_bytes;

        return cuMemGetInfo(&free_bytes, &total_bytes);
}

static CUresult retain_primary(void)
{
        CUcontext context;

        return cuDevicePrimaryCtxRetain(&context, 0);
}

static CUresult release_primary(void)
{
        return cuDevicePrimaryCtxRelease(0);
}

static CUresult make_pool(void)
{
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};

        return cuMemPoolCreate(&pool, &props);
}

static CUresult alloc_in_order(void)
{
        return cuMemAllocFromPoolAsync(&block, BLOCK_BYTES, pool, NULL);
}

static CUresult release_in_order(void)
{
        return cuMemFreeAsync(block, NULL);
}

static CUresult end_pool(void)
{
        return cuMemPoolDestroy(pool);
}

static CUresult trim_graphs(void)
{
        return cuDeviceGraphMemTrim(0);
}

/* In their order; each undoes one before it, or is undone. Allocations come twice: behind a free, and without one. */
static CUresult (*const calls[])(void) = {
        map,
        retain,
        release_again,
        unmap,
        alloc,
        release,
        alloc,
        release,
        alloc,
        release,
        alloc_too_much,
        alloc_pinned,
        release_pinned,
        alloc_pinned,
        release_pinned,
        ask_free,
        retain_primary,
        release_primary,
        make_pool,
        alloc_in_order,
        release_in_order,
        end_pool,
        trim_graphs,
};
#define CALLS (sizeof(calls) / sizeof(*calls))

static _Atomic bool call_worked;

static void *cancelled_call(void *arg)
{
        GR_MUST(cuCtxSetCurrent(current_context));
        pthread_cancel(pthread_self());
        call_worked = calls[*(size_t *)arg]() == CUDA_SUCCESS;
        pthread_testcancel();
        return NULL;
}

/* Each in a thread that has been told to end; what that one did not do is done here, and needs the same lock. */
int cancel_calls(void)
{
        open_device();
        GR_MUST(cuCtxGetCurrent(&current_context));
        GR_MUST(cuMemAddressReserve(&mapped.base, MAPPED_BYTES, 0, 0, 0));
        GR_MUST(cuMemCreate(&mapped.handle, MAPPED_BYTES, &mapped.prop, 0));
        for (size_t i = 0; i < CALLS; i++) {
                pthread_t thread;

                call_worked = false;
                GR_MUST(pthread_create(&thread, NULL, cancelled_call, &i));
                GR_MUST(pthread_join(thread, NULL));
                if (!call_worked)
                        GR_MUST(calls[i]());
        }
        GR_MUST(cuMemRelease(mapped.handle));
        work();
        printf("called all, then worked\n");
        return 0;
}

/* And one that ends the process. */
static void *cancelled_last(void *arg)
{
        (void)arg;
        open_device();
        work();
        pthread_cancel(pthread_self());
        exit(5);
}

int cancel_last(void)
{
        pthread_t thread;

        GR_MUST(pthread_create(&thread, NULL, cancelled_last, NULL));
        pthread_join(thread, NULL);
        printf("ended inside exit\n");
        return 0;
}
