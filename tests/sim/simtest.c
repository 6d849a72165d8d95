#include "simtest.h"

#include "grsim.h"

#include <stdlib.h>
#include <time.h>

double now_ms(void)
{
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

CUcontext start(void)
{
        CUcontext ctx;

        if (cuInit(0) || cuDevicePrimaryCtxRetain(&ctx, 0) || cuCtxSetCurrent(ctx)) {
                fprintf(stderr, "the simulated device does not start\n");
                exit(1);
        }
        return ctx;
}

CUfunction kernel(const char *name)
{
        CUmodule module;
        CUfunction function = NULL;

        GR_MUST(cuModuleLoadData(&module, "any image"));
        GR_MUST(cuModuleGetFunction(&function, module, name));
        return function;
}

CUresult spin(CUstream stream, unsigned ms)
{
        uint64_t ns = (uint64_t)ms * 1000000u;
        void *args[] = {&ns};

        return cuLaunchKernel(kernel("gr_spin"), 1, 1, 1, 1, 1, 1, 0, stream, args, NULL);
}

CUresult fill(CUstream stream, CUdeviceptr p, uint32_t value, uint64_t n)
{
        void *args[] = {&p, &value, &n};

        return cuLaunchKernel(kernel("gr_fill"), 1, 1, 1, 32, 1, 1, 0, stream, args, NULL);
}

CUresult late_fill(CUstream stream, CUdeviceptr p, uint32_t value, uint64_t n, unsigned ms)
{
        uint64_t ns = (uint64_t)ms * 1000000u;
        void *args[] = {&p, &value, &n, &ns};

        return cuLaunchKernel(kernel("gr_late_fill"), 1, 1, 1, 32, 1, 1, 0, stream, args, NULL);
}

uint32_t word(CUdeviceptr p)
{
        uint32_t value = 0;

        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuMemcpyDtoH(&value, p, sizeof value));
        return value;
}

unsigned long misuses(void)
{
        return grSimMisuseCount();
}
