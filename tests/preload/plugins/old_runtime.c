/*
 * A stand-in for a shared runtime of version 12, of which it has three functions, with the manners of versions 11 and
 * before: the device that a thread has chosen becomes current with its next call only.
 */
#include <cuda.h>

#define EXPORT __attribute__((visibility("default")))

int cudaSetDevice(int device);
int cudaMalloc(void **ptr, size_t bytes);
int cudaFree(void *ptr);

static _Thread_local int chosen;

static int enter(void)
{
        CUcontext context;
        int rc = cuInit(0);

        if (!rc)
                rc = cuDevicePrimaryCtxRetain(&context, chosen);
        return rc ? rc : (int)cuCtxSetCurrent(context);
}

EXPORT int cudaSetDevice(int device)
{
        chosen = device;
        return 0;
}

EXPORT int cudaMalloc(void **ptr, size_t bytes)
{
        int rc = enter();

        return rc ? rc : (int)cuMemAlloc((CUdeviceptr *)ptr, bytes);
}

EXPORT int cudaFree(void *ptr)
{
        int rc = enter();

        return rc ? rc : (int)cuMemFree((CUdeviceptr)ptr);
}
