/*
 * A library that uses CUDA in a program that does not: loaded, put to work and closed by nodriver.c. What it keeps
 * allocated outlives it, as a plugin's leak does.
 */
#include <cuda.h>
#include <stdint.h>

#define BLOCK ((size_t)3 << 20)

__attribute__((visibility("default"))) int plugin_work(void);

/* 0, or the first error; 1000 where memory does not hold what was written. */
int plugin_work(void)
{
        CUdeviceptr ptr, leaked;
        CUcontext context;
        CUresult result = cuInit(0);
        uint32_t word = 0;

        result = result ? result : cuDevicePrimaryCtxRetain(&context, 0);
        result = result ? result : cuCtxSetCurrent(context);
        result = result ? result : cuMemAlloc(&leaked, BLOCK);
        for (uint32_t i = 1; result == CUDA_SUCCESS && i < 20; i++) {
                result = cuMemAlloc(&ptr, BLOCK);
                result = result ? result : cuMemsetD32(ptr, i, BLOCK / 4);
                result = result ? result : cuMemcpyDtoH(&word, ptr + BLOCK - 4, 4);
                result = result ? result : cuMemFree(ptr);
                if (result == CUDA_SUCCESS && word != i)
                        return 1000;
        }
        return (int)result;
}
