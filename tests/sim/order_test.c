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

        GR_MUST(cuCtxSynchronize());
        GR_MUST(late_fill(first, x, 1, 1, 50));
        GR_MUST(fill(second, x, 2, 1));
        found = word(x);
        if (found != (waits ? 2 : 1)) {
                fprintf(stderr, "%s: %u\n", what, found);
                gr_check_failures++;
        }
}

static void test_streams(void)
{
        CUstream a, b, n, m;

        GR_MUST(cuStreamCreate(&a, CU_STREAM_DEFAULT));
        GR_MUST(cuStreamCreate(&b, CU_STREAM_DEFAULT));
        GR_MUST(cuStreamCreate(&n, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuStreamCreateWithPriority(&m, CU_STREAM_NON_BLOCKING, -1));
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
        GR_MUST(cuStreamDestroy(a));
        GR_CHECK_EQ(cuStreamDestroy(a), CUDA_ERROR_INVALID_HANDLE);
        GR_MUST(cuStreamDestroy(b));
        GR_MUST(cuStreamDestroy(n));
        GR_MUST(cuStreamDestroy(m));
}

/* The work of a destroyed stream goes on, and still belongs to the context. */
static void test_destroyed_stream(void)
{
        CUstream s;
        CUevent e;
        double t = now_ms();

        GR_MUST(cuEventCreate(&e, 0));
        GR_MUST(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        GR_MUST(late_fill(s, x, 5, 1, 400));
        GR_MUST(cuStreamDestroy(s));
        GR_CHECK(now_ms() - t < 380);
        GR_MUST(cuCtxRecordEvent(ctx, e));
        GR_CHECK_EQ(cuEventQuery(e), CUDA_ERROR_NOT_READY);
        GR_MUST(cuEventSynchronize(e));
        GR_CHECK(now_ms() - t >= 399);
        GR_CHECK_EQ(word(x), 5);
        GR_MUST(cuEventDestroy(e));
}

static void test_events(void)
{
        CUstream a, b;
        CUevent e, f;
        float ms = 0;

        GR_MUST(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuEventCreate(&e, 0));
        GR_MUST(cuEventCreate(&f, 0));
        GR_MUST(cuEventQuery(e)); /* never recorded */
        GR_CHECK_EQ(cuEventElapsedTime(&ms, e, f), CUDA_ERROR_INVALID_HANDLE);
        GR_MUST(cuEventRecord(e, a));
        GR_MUST(late_fill(a, x, 1, 1, 50));
        GR_MUST(cuEventRecord(f, a));
        GR_CHECK_EQ(cuEventQuery(f), CUDA_ERROR_NOT_READY);
        GR_CHECK_EQ(cuEventElapsedTime(&ms, e, f), CUDA_ERROR_NOT_READY);
        GR_MUST(cuStreamWaitEvent(b, f, 0));
        GR_MUST(fill(b, x, 2, 1));
        GR_MUST(cuStreamSynchronize(b));
        GR_MUST(cuEventQuery(f));
        GR_MUST(cuEventElapsedTime(&ms, e, f));
        GR_CHECK(ms >= 49);
        GR_CHECK_EQ(word(x), 2);
        GR_MUST(cuEventDestroy(e));
        GR_CHECK_EQ(cuEventQuery(e), CUDA_ERROR_INVALID_HANDLE);
        GR_MUST(cuEventDestroy(f));
        GR_MUST(cuStreamDestroy(a));
        GR_MUST(cuStreamDestroy(b));
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

        GR_MUST(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuLaunchHostFunc(s, host_function, &called));
        GR_CHECK_EQ(cuStreamQuery(s), CUDA_ERROR_NOT_READY);
        GR_MUST(cuStreamSynchronize(s));
        GR_CHECK_EQ(atomic_load(&called), 1);
        GR_CHECK_EQ(inside, CUDA_ERROR_NOT_PERMITTED);
        GR_MUST(cuStreamDestroy(s));
}

static void test_wait_value(void)
{
        CUstream a, b;

        GR_MUST(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuMemsetD32(x, 0, 2));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuStreamWaitValue32(a, x, 3, CU_STREAM_WAIT_VALUE_GEQ));
        GR_MUST(fill(a, x + 4, 8, 1));
        usleep(20000);
        GR_CHECK_EQ(cuStreamQuery(a), CUDA_ERROR_NOT_READY);
        GR_MUST(cuStreamWriteValue32(b, x, 4, 0));
        GR_MUST(cuStreamSynchronize(a));
        GR_CHECK_EQ(word(x + 4), 8);
        GR_MUST(cuStreamDestroy(a));
        GR_MUST(cuStreamDestroy(b));
}

/* Many streams and joins at once, and long chains of barriers: the work graph must neither lose work nor recurse. */
static void test_many(void)
{
        CUstream s[40];
        CUevent e;
        double t = now_ms();

        GR_MUST(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
        for (int i = 0; i < 40; i++) {
                GR_MUST(cuStreamCreate(&s[i], CU_STREAM_NON_BLOCKING));
                GR_MUST(spin(s[i], 50));
        }
        for (int i = 0; i < 20000; i++) {
                GR_MUST(cuCtxRecordEvent(ctx, e));
                GR_MUST(cuCtxWaitEvent(ctx, e));
        }
        GR_MUST(cuMemsetD32(x, 0, 1));
        for (int i = 0; i < 2000; i++)
                GR_MUST(fill(s[i % 40], x, (uint32_t)i, 1));
        GR_MUST(fill(NULL, x, 77, 1));
        for (int i = 0; i < 40; i++)
                GR_MUST(cuStreamDestroy(s[i]));
        GR_MUST(cuCtxSynchronize());
        GR_CHECK(now_ms() - t < 40 * 50); /* the kernels ran side by side */
        GR_MUST(cuEventDestroy(e));
}

static void test_peers(void)
{
        unsigned long before = misuses();
        CUcontext other;
        CUdeviceptr p;

        GR_MUST(cuDevicePrimaryCtxRetain(&other, 1));
        GR_MUST(cuCtxPushCurrent(other));
        GR_MUST(cuMemAlloc(&p, 4096));
        GR_MUST(cuCtxPopCurrent(NULL));
        GR_MUST(fill(NULL, p, 3, 1024));
        GR_MUST(cuCtxSynchronize());
        GR_CHECK_EQ(misuses(), before + 1);
        GR_MUST(cuCtxEnablePeerAccess(other, 0));
        GR_CHECK_EQ(cuCtxEnablePeerAccess(other, 0), CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
        GR_MUST(fill(NULL, p, 3, 1024));
        GR_CHECK_EQ(word(p), 3);
        GR_CHECK_EQ(misuses(), before + 1);

        /* A record on the peer's context fences its kernel for a wait in ours. */
        GR_MUST(cuCtxPushCurrent(other));
        GR_MUST(cuCtxEnablePeerAccess(ctx, 0));
        GR_MUST(late_fill(CU_STREAM_PER_THREAD, x, 1, 1, 50));
        {
                CUevent e;

                GR_MUST(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
                GR_MUST(cuCtxPopCurrent(NULL));
                GR_CHECK_EQ(cuCtxRecordEvent(ctx, e), CUDA_ERROR_INVALID_HANDLE);
                GR_MUST(cuCtxRecordEvent(other, e));
                GR_MUST(cuCtxWaitEvent(ctx, e));
                GR_MUST(fill(NULL, x, 2, 1));
                GR_CHECK_EQ(word(x), 2);
                GR_MUST(cuEventDestroy(e));
        }
        GR_MUST(cuCtxDisablePeerAccess(other));
        GR_MUST(cuDevicePrimaryCtxRelease(1));
}

int main(void)
{
        ctx = start();
        GR_MUST(cuMemAlloc(&x, 4096));
        test_streams();
        test_destroyed_stream();
        test_events();
        test_host_function();
        test_wait_value();
        test_many();
        GR_CHECK_EQ(misuses(), 0);
        test_peers();
        return GR_CHECK_RESULT();
}
