/* N pairs of cuMemAlloc and cuMemFree and nothing else, for tools that count: pairs N [BYTES]. */
#include <cuda.h>

#include <stdlib.h>

int main(int argc, char **argv)
{
        long n = argc > 1 ? strtol(argv[1], NULL, 10) : 1000;
        size_t bytes = argc > 2 ? strtoul(argv[2], NULL, 10) : (size_t)1 << 20;
        CUdevice device;
        CUcontext context;
        CUdeviceptr p;

        if (cuInit(0) || cuDeviceGet(&device, 0) || cuDevicePrimaryCtxRetain(&context, device) ||
            cuCtxSetCurrent(context))
                return EXIT_FAILURE;
        for (long i = 0; i < n; i++)
                if (cuMemAlloc(&p, bytes) || cuMemFree(p))
                        return EXIT_FAILURE;
        return EXIT_SUCCESS;
}
