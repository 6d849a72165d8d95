/* Which streams wait for which, events, callbacks, and a device with peers. */
#include "simtest.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

static CUcontext ctx;
static CUdeviceptr x;

/* A late write of 1 on the first stream, then 2 on the second: 2 survives only if the second waits. */
static void expect_order(const char *what, CUstream first, CUstream second, bool waits)
{
        uint32_t found;

        OK(cuCtxSynchronize());
        OK(late_fill(first, x, 1, 1, 50));
        OK(fill(second, x, 2, 1));
        found = word(x);
        if (found != (waits ? 2 : 1)) {
                fprintf(stderr, "%s: %u\n", what, found);
                failures++;
        }
}

static void test_streams(void)
{
        CUstream a, b, n, m;

        OK(cuStreamCreate(&a, CU_STREAM_DEFAULT));
        OK(cuStreamCreate(&b, CU_STREAM_DEFAULT));
        OK(cuStreamCreate(&n, CU_STREAM_NON_BLOCKING));
        OK(cuStreamCreateWithPriority(&m, CU_STREAM_NON_BLOCKING, -1));
        expect_order("one stream", a, a, true);
        expect_order("two blocking streams", a, b, false);
        expect_order("blocking, then legacy", a, NULL, true);
        expect_order("legacy by name, then blocking", CU_STREAM_LEGACY, b, true);
        expect_order("legacy, then non-blocking", NULL, n, false);
        expect_order("non-blocking, then legacy", n, NULL, false);
        expect_order("two non-blocking streams", n, m, false);
        expect_order("per-thread, then legacy", CU_STREAM_PER_THREAD, NULL, true);
        expect_order("legacy, then per-thread", NULL, CU_STREAM_PER_THREAD, true);
        expect_order("per-thread, then blocking", CU_STREAM_PER_THREAD, a, false);
        OK(cuStreamDestroy(a));
        EXPECT(CUDA_ERROR_INVALID_HANDLE, cuStreamDestroy(a));
        OK(cuStreamDestroy(b));
        OK(cuStreamDestroy(n));
        OK(cuStreamDestroy(m));
}

/* The work of a destroyed stream goes on, and still belongs to the context. */
static void test_destroyed_stream(void)
{
        CUstream s;
        CUevent e;
        double t = now_ms();

        OK(cuEventCreate(&e, 0));
        OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        OK(late_fill(s, x, 5, 1, 400));
        OK(cuStreamDestroy(s));
        CHECK(now_ms() - t < 380);
        OK(cuCtxRecordEvent(ctx, e));
        EXPECT(CUDA_ERROR_NOT_READY, cuEventQuery(e));
        OK(cuEventSynchronize(e));
        CHECK(now_ms() - t >= 399);
        EXPECT(5, word(x));
        OK(cuEventDestroy(e));
}

static void test_events(void)
{
        CUstream a, b;
        CUevent e, f;
        float ms = 0;

        OK(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
        OK(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
        OK(cuEventCreate(&e, 0));
        OK(cuEventCreate(&f, 0));
        OK(cuEventQuery(e)); /* never recorded */
        EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&ms, e, f));
        OK(cuEventRecord(e, a));
        OK(late_fill(a, x, 1, 1, 50));
        OK(cuEventRecord(f, a));
        EXPECT(CUDA_ERROR_NOT_READY, cuEventQuery(f));
        EXPECT(CUDA_ERROR_NOT_READY, cuEventElapsedTime(&ms, e, f));
        OK(cuStreamWaitEvent(b, f, 0));
        OK(fill(b, x, 2, 1));
        OK(cuStreamSynchronize(b));
        OK(cuEventQuery(f));
        OK(cuEventElapsedTime(&ms, e, f));
        CHECK(ms >= 49);
        EXPECT(2, word(x));
        OK(cuEventDestroy(e));
        EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventQuery(e));
        OK(cuEventDestroy(f));
        OK(cuStreamDestroy(a));
        OK(cuStreamDestroy(b));
}

static atomic_int called;
static CUresult inside;

static void host_function(void *arg)
{
        CUdeviceptr p;

        inside = cuMemAlloc(&p, 16);
        usleep(20000);
        atomic_store((atomic_int *)arg, 1);
}

static void test_host_function(void)
{
        CUstream s;

        OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        OK(cuLaunchHostFunc(s, host_function, &called));
        EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(s));
        OK(cuStreamSynchronize(s));
        EXPECT(1, atomic_load(&called));
        EXPECT(CUDA_ERROR_NOT_PERMITTED, inside);
        OK(cuStreamDestroy(s));
}

static void test_wait_value(void)
{
        CUstream a, b;

        OK(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
        OK(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
        OK(cuMemsetD32(x, 0, 2));
        OK(cuCtxSynchronize());
        OK(cuStreamWaitValue32(a, x, 3, CU_STREAM_WAIT_VALUE_GEQ));
        OK(fill(a, x + 4, 8, 1));
        usleep(20000);
        EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(a));
        OK(cuStreamWriteValue32(b, x, 4, 0));
        OK(cuStreamSynchronize(a));
        EXPECT(8, word(x + 4));
        OK(cuStreamDestroy(a));
        OK(cuStreamDestroy(b));
}

/* Many streams and joins at once, and long chains of barriers: the work graph must neither lose work nor recurse. */
static void test_many(void)
{
        CUstream s[40];
        CUevent e;
        double t = now_ms();

        OK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
        for (int i = 0; i < 40; i++) {
                OK(cuStreamCreate(&s[i], CU_STREAM_NON_BLOCKING));
                OK(spin(s[i], 50));
        }
        for (int i = 0; i < 20000; i++) {
                OK(cuCtxRecordEvent(ctx, e));
                OK(cuCtxWaitEvent(ctx, e));
        }
        OK(cuMemsetD32(x, 0, 1));
        for (int i = 0; i < 2000; i++)
                OK(fill(s[i % 40], x, (uint32_t)i, 1));
        OK(fill(NULL, x, 77, 1));
        for (int i = 0; i < 40; i++)
                OK(cuStreamDestroy(s[i]));
        OK(cuCtxSynchronize());
        CHECK(now_ms() - t < 40 * 50); /* the kernels ran side by side */
        OK(cuEventDestroy(e));
}

static void test_peers(void)
{
        unsigned long before = misuses();
        CUcontext other;
        CUdeviceptr p;

        OK(cuDevicePrimaryCtxRetain(&other, 1));
        OK(cuCtxPushCurrent(other));
        OK(cuMemAlloc(&p, 4096));
        OK(cuCtxPopCurrent(NULL));
        OK(fill(NULL, p, 3, 1024));
        OK(cuCtxSynchronize());
        EXPECT(before + 1, misuses());
        OK(cuCtxEnablePeerAccess(other, 0));
        EXPECT(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, cuCtxEnablePeerAccess(other, 0));
        OK(fill(NULL, p, 3, 1024));
        EXPECT(3, word(p));
        EXPECT(before + 1, misuses());

        /* A record on the peer's context fences its kernel for a wait in ours. */
        OK(cuCtxPushCurrent(other));
        OK(cuCtxEnablePeerAccess(ctx, 0));
        OK(late_fill(CU_STREAM_PER_THREAD, x, 1, 1, 50));
        {
                CUevent e;

                OK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
                OK(cuCtxPopCurrent(NULL));
                EXPECT(CUDA_ERROR_INVALID_HANDLE, cuCtxRecordEvent(ctx, e));
                OK(cuCtxRecordEvent(other, e));
                OK(cuCtxWaitEvent(ctx, e));
                OK(fill(NULL, x, 2, 1));
                EXPECT(2, word(x));
                OK(cuEventDestroy(e));
        }
        OK(cuCtxDisablePeerAccess(other));
        OK(cuDevicePrimaryCtxRelease(1));
}

int main(void)
{
        ctx = start();
        OK(cuMemAlloc(&x, 4096));
        test_streams();
        test_destroyed_stream();
        test_events();
        test_host_function();
        test_wait_value();
        test_many();
        EXPECT(0, misuses());
        test_peers();
        return done("order");
}
