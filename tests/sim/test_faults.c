/* The knobs. Run with the environment that meson.build sets for this test. */
#include "simtest.h"

#include "grsim.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static CUcontext ctx;

static void *allocate(void *p)
{
        OK(cuCtxSetCurrent(ctx));
        OK(cuMemAlloc(p, 16));
        return NULL;
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

        ctx = start();
        OK(cuDeviceGetCount(&n));
        EXPECT(2, n);
        OK(cuMemGetInfo(&free_bytes, &total));
        EXPECT(64 * MIB, total);

        /* cuMemAlloc_v2:3=2 and cuMemFree_v2:2+=999, whichever thread calls */
        OK(cuMemAlloc(&p[0], 16));
        EXPECT(0, pthread_create(&thread, NULL, allocate, &p[1]));
        pthread_join(thread, NULL);
        EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&p[2], 16));
        OK(cuMemAlloc(&p[2], 16));
        OK(cuMemFree(p[0]));
        EXPECT(999, cuMemFree(p[1]));
        EXPECT(999, cuMemFree(p[1]));
        EXPECT(4, grSimCallCount("cuMemAlloc_v2"));
        EXPECT(0, grSimCallCount("cuNothing"));

        /* cuCtxRecordEvent:*=700 and cuCtxWaitEvent missing */
        OK(cuEventCreate(&e, 0));
        EXPECT(700, cuCtxRecordEvent(ctx, e));
        EXPECT(700, cuCtxRecordEvent(ctx, e));
        OK(cuGetProcAddress("cuCtxWaitEvent", &f, 13000, 0, &status));
        CHECK(!f && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
        EXPECT(CUDA_ERROR_NOT_FOUND, cuCtxWaitEvent(ctx, e));

        /* cuEventQuery=3ms */
        t = now_ms();
        OK(cuEventQuery(e));
        CHECK(now_ms() - t >= 3);

        /* A forked child has no device. */
        child = fork();
        if (child == 0)
                _exit(cuMemAlloc(&p[3], 16) == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1);
        EXPECT(child, waitpid(child, &n, 0));
        EXPECT(0, n);
        return done("faults");
}
