/*
 * Threads that are told to end by pthread_cancel: in the midst of their calls, in the first one, and in exit. (In each
 * call of the driver, one after the other: cancelled_calls.c.)
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
