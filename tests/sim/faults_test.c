/* The knobs. Run with the environment that meson.build sets for this test. */
#include "simtest.h"

#include "grsim.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static CUcontext ctx;

static void *allocate(void *p)
{
        GR_MUST(cuCtxSetCurrent(ctx));
        GR_MUST(cuMemAlloc(p, 16));
        return NULL;
}

/* Where the system has no addresses for the devices there are none, until it has. */
static void test_no_addresses(void)
{
        struct rlimit before, none;

        GR_CHECK_EQ(getrlimit(RLIMIT_AS, &before), 0);
        none = before;
        none.rlim_cur = 64 << 10;
        GR_CHECK_EQ(cuInit(1), CUDA_ERROR_INVALID_VALUE); /* the environment is read */
        GR_CHECK_EQ(setrlimit(RLIMIT_AS, &none), 0);
        for (int i = 0; i < 2 && gr_check_addresses_limited(); i++)
                GR_CHECK_EQ(cuInit(0), CUDA_ERROR_OUT_OF_MEMORY);
        GR_CHECK_EQ(setrlimit(RLIMIT_AS, &before), 0);
        GR_CHECK_EQ(cuDeviceGetCount(&(int){0}), CUDA_ERROR_NOT_INITIALIZED);
}

int main(void)
{
        CUdriverProcAddressQueryResult status;
        CUdeviceptr p[4];
        pthread_t thread;
        size_t free_bytes, total;
        CUevent e;
        double t;
        void *f;
        int n, child;

        test_no_addresses();
        ctx = start();
        GR_MUST(cuDeviceGetCount(&n));
        GR_CHECK_EQ(n, 2);
        GR_MUST(cuMemGetInfo(&free_bytes, &total));
        GR_CHECK_EQ(total, 64 * MIB);

        /* cuMemAlloc_v2:3=2 and cuMemFree_v2:2+=999, whichever thread calls */
        GR_MUST(cuMemAlloc(&p[0], 16));
        GR_CHECK_EQ(pthread_create(&thread, NULL, allocate, &p[1]), 0);
        pthread_join(thread, NULL);
        GR_CHECK_EQ(cuMemAlloc(&p[2], 16), CUDA_ERROR_OUT_OF_MEMORY);
        GR_MUST(cuMemAlloc(&p[2], 16));
        GR_MUST(cuMemFree(p[0]));
        GR_CHECK_EQ(cuMemFree(p[1]), 999);
        GR_CHECK_EQ(cuMemFree(p[1]), 999);
        GR_CHECK_EQ(grSimCallCount("cuMemAlloc_v2"), 4);
        GR_CHECK_EQ(grSimCallCount("cuNothing"), 0);

        /* cuCtxRecordEvent:*=700 and cuCtxWaitEvent missing */
        GR_MUST(cuEventCreate(&e, 0));
        GR_CHECK_EQ(cuCtxRecordEvent(ctx, e), 700);
        GR_CHECK_EQ(cuCtxRecordEvent(ctx, e), 700);
        GR_MUST(cuGetProcAddress("cuCtxWaitEvent", &f, 13000, 0, &status));
        GR_CHECK(!f && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
        GR_CHECK_EQ(cuCtxWaitEvent(ctx, e), CUDA_ERROR_NOT_FOUND);

        /* cuEventQuery=3ms */
        t = now_ms();
        GR_MUST(cuEventQuery(e));
        GR_CHECK(now_ms() - t >= 3);

        /* A forked child has no device. */
        child = fork();
        if (child == 0)
                _exit(cuMemAlloc(&p[3], 16) == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1);
        GR_CHECK_EQ(waitpid(child, &n, 0), child);
        GR_CHECK_EQ(n, 0);
        return GR_CHECK_RESULT();
}
