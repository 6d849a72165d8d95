/* Captures that nobody ends: they go with their stream, their thread, or their context. */
#include "contexts.h"

#include "check.h"

#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

/* What programs call that are built for per-thread default streams. */
CUresult CUDAAPI cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode);

#define ROUNDS        40
#define TRIES         10
#define MANY_CAPTURES 300

/* How many different addresses that many allocations get, each freed before the next. */
static int addresses(void)
{
        CUdeviceptr seen[ROUNDS];
        int count = 0;

        for (int i = 0; i < ROUNDS; i++) {
                CUdeviceptr ptr;
                int at = 0;

                GR_MUST(cuMemAlloc(&ptr, BLOCK));
                GR_MUST(cuMemFree(ptr));
                GR_MUST(cuCtxSynchronize());
                while (at < count && seen[at] != ptr)
                        at++;
                seen[at] = ptr;
                count += at == count;
        }
        return count;
}

/*
 * Whether what is freed comes back to the next who asks: while fences are held off, each would get a new address. So it
 * is for a moment, too, where another thread returns it to the driver and is late.
 */
static void reuses(const char *after)
{
        bool again = false;

        for (int tries = 0; !again && tries < TRIES; tries++) {
                if (tries > 0)
                        usleep(20000);
                again = addresses() < ROUNDS / 2;
        }
        printf("after %s memory is used again: %d\n", after, again);
}

static CUstream begin_capture(void)
{
        CUstream stream;

        GR_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        return stream;
}

static void *leave_capture_of_null(void *context)
{
        GR_MUST(cuCtxSetCurrent(context));
        GR_MUST(cuStreamBeginCapture_v2_ptsz(NULL, CU_STREAM_CAPTURE_MODE_RELAXED));
        return NULL;
}

static void *leave_capture(void *context)
{
        GR_MUST(cuCtxSetCurrent(context));
        GR_MUST(cuStreamBeginCapture(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_RELAXED));
        return NULL;
}

/* The thread's own stream is another one in each context. */
static void *leave_two_captures(void *contexts)
{
        for (int i = 0; i < 2; i++)
                leave_capture(((CUcontext *)contexts)[i]);
        return NULL;
}

/* Leaves the second context current. */
static CUstream begin_capture_of(CUcontext owner, CUcontext current)
{
        CUstream stream;

        GR_MUST(cuCtxSetCurrent(owner));
        GR_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuCtxSetCurrent(current));
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        return stream;
}

/* Memory comes and goes beside a capture that must go on. */
static void leave_alone(void)
{
        for (int i = 0; i < 3; i++) {
                CUdeviceptr ptr;

                GR_MUST(cuMemAlloc(&ptr, 16 * MIB));
                GR_MUST(cuMemFree(ptr));
        }
}

void contexts_captures(void)
{
        CUcontext primary, other;
        pthread_t thread;
        CUstream stream;
        CUgraph graph;

        GR_MUST(cuDevicePrimaryCtxRetain(&primary, 0));
        GR_MUST(cuCtxSetCurrent(primary));
        /* The process's first one. */
        other = create();
        stream = begin_capture_of(primary, other);
        GR_MUST(cuCtxDestroy(other));
        GR_MUST(cuCtxSetCurrent(NULL));
        printf("the end of a capture without a context: %d\n", cuStreamEndCapture(CU_STREAM_PER_THREAD, &graph));
        GR_MUST(cuCtxSetCurrent(primary));
        leave_alone();
        printf("the end of a capture that another context's end left alone: %d\n", cuStreamEndCapture(stream, &graph));
        GR_MUST(cuGraphDestroy(graph));
        GR_MUST(cuStreamDestroy(stream));
        GR_MUST(cuStreamDestroy(begin_capture()));
        reuses("a stream that captured");
        GR_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuStreamBeginCapture_v2_ptsz(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuStreamDestroy(stream));
        reuses("a stream that captured by a function of per-thread streams");
        for (int i = 0; i < 3; i++) {
                GR_MUST(pthread_create(&thread, NULL, i % 2 ? leave_capture_of_null : leave_capture, primary));
                GR_MUST(pthread_join(thread, NULL));
        }
        reuses("threads that captured");
        other = create();
        GR_MUST(pthread_create(&thread, NULL, leave_two_captures, (CUcontext[]){primary, other}));
        GR_MUST(pthread_join(thread, NULL));
        GR_MUST(cuCtxSetCurrent(primary));
        reuses("a thread that captured in two contexts");
        leave_capture(other);
        leave_capture(primary);
        GR_MUST(cuStreamEndCapture(CU_STREAM_PER_THREAD, &graph));
        GR_MUST(cuGraphDestroy(graph));
        printf("the end of no capture: %d\n", cuStreamEndCapture(CU_STREAM_PER_THREAD, &graph));
        leave_alone();
        GR_MUST(cuCtxSetCurrent(other));
        printf("the end of the other one's: %d\n", cuStreamEndCapture(CU_STREAM_PER_THREAD, &graph));
        GR_MUST(cuGraphDestroy(graph));
        leave_capture(other);
        leave_capture(primary);
        GR_MUST(cuStreamEndCapture(CU_STREAM_PER_THREAD, &graph));
        GR_MUST(cuGraphDestroy(graph));
        GR_MUST(cuCtxDestroy(other));
        reuses("a context with a capture, another one's ended");
        /* A stream's context need not be the current one. */
        other = create();
        begin_capture_of(other, primary);
        GR_MUST(cuCtxDestroy(other));
        reuses("another context with a capture");
        other = create();
        for (int i = 0; i < MANY_CAPTURES; i++)
                begin_capture();
        GR_MUST(cuCtxDestroy(other));
        GR_MUST(cuCtxSetCurrent(primary));
        reuses("a context with many captures");
        begin_capture();
        GR_MUST(cuDevicePrimaryCtxReset(0));
        GR_MUST(cuDevicePrimaryCtxRetain(&primary, 0));
        GR_MUST(cuCtxSetCurrent(primary));
        reuses("a reset with a capture");
        begin_capture();
        release_all(cuDevicePrimaryCtxRelease); /* a reset leaves it retained as often as it was */
        GR_MUST(cuDevicePrimaryCtxRetain(&primary, 0));
        GR_MUST(cuCtxSetCurrent(primary));
        reuses("the last release with a capture");
        GR_MUST(cuDevicePrimaryCtxRelease(0));
}

static void not_ours(void *value)
{
        printf("a thread's data: %d\n", value != NULL);
}

/* A key that was not made is another one's. */
void contexts_keys(void)
{
        static char set_here;
        CUcontext context = create();
        pthread_key_t key;
        pthread_t thread;

        while (pthread_key_create(&key, not_ours) == 0)
                GR_CHECK_EQ(pthread_setspecific(key, &set_here), 0);
        GR_CHECK_EQ(pthread_key_delete(key), 0); /* for the simulated driver, which comes first */
        GR_MUST(pthread_create(&thread, NULL, leave_capture, context));
        GR_MUST(pthread_join(thread, NULL));
        GR_MUST(cuCtxDestroy(context));
        printf("all keys are taken\n");
}
