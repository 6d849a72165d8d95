/* Calls the driver past whoever stands in for it, as what is opened with RTLD_DEEPBIND does. */
#include <cuda.h>

__attribute__((visibility("default"))) int behind_free(CUdeviceptr ptr);
__attribute__((visibility("default"))) int behind_free_host(void *ptr);

int behind_free(CUdeviceptr ptr)
{
        return (int)cuMemFree(ptr);
}

int behind_free_host(void *ptr)
{
        return (int)cuMemFreeHost(ptr);
}
