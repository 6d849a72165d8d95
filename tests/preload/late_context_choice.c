/* With old_runtime.c for a runtime: a block is on the device that was chosen for it, natively and under the library. */
#include <cuda.h>
#include <stdio.h>

int cudaSetDevice(int device);
int cudaMalloc(void **ptr, size_t bytes);
int cudaFree(void *ptr);

int main(void)
{
        for (int i = 0; i < 6; i++) {
                void *ptr = NULL;
                int device = -1, result;

                result = cudaSetDevice(i % 2);
                for (int j = 0; j < 3; j++) {
                        result = result ? result : cudaMalloc(&ptr, 3 << 20);
                        if (!result)
                                result = (int)cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                                                    (CUdeviceptr)ptr);
                        result = result ? result : cudaFree(ptr);
                        printf("device %d: result %d, the block is on %d\n", i % 2, result, device);
                }
        }
        return 0;
}
