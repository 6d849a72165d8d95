/*
 * Threads that are told to end by pthread_cancel: in the midst of their calls, in the first one, in one for mapped
 * memory, and in exit.
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

/* In their order; each undoes one before it, or is undone. */
static CUresult (*const mapped_calls[])(void) = {map, retain, release_again, unmap};
#define MAPPED_CALLS (sizeof(mapped_calls) / sizeof(*mapped_calls))

static _Atomic bool call_worked;

static void *cancelled_mapped(void *arg)
{
        pthread_cancel(pthread_self());
        call_worked = mapped_calls[*(size_t *)arg]() == CUDA_SUCCESS;
        pthread_testcancel();
        return NULL;
}

/* Each in a thread that has been told to end; what that one did not do is done here, and needs the same lock. */
int cancel_mapped(void)
{
        open_device();
        GR_MUST(cuMemAddressReserve(&mapped.base, MAPPED_BYTES, 0, 0, 0));
        GR_MUST(cuMemCreate(&mapped.handle, MAPPED_BYTES, &mapped.prop, 0));
        for (size_t i = 0; i < MAPPED_CALLS; i++) {
                pthread_t thread;

                call_worked = false;
                GR_MUST(pthread_create(&thread, NULL, cancelled_mapped, &i));
                GR_MUST(pthread_join(thread, NULL));
                if (!call_worked)
                        GR_MUST(mapped_calls[i]());
        }
        GR_MUST(cuMemRelease(mapped.handle));
        work();
        printf("mapped and unmapped, then worked\n");
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
