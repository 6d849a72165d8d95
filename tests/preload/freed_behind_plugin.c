/* Calls the driver past whoever stands in for it, as what is opened with RTLD_DEEPBIND does. */
#include <cuda.h>

__attribute__((visibility("default"))) int behind_free(CUdeviceptr ptr);
__attribute__((visibility("default"))) int behind_free_host(void *ptr);
__attribute__((visibility("default"))) int behind_green(CUgreenCtx *green, CUcontext *context);
__attribute__((visibility("default"))) int behind_green_end(CUgreenCtx green);

int behind_free(CUdeviceptr ptr)
{
        return (int)cuMemFree(ptr);
}

int behind_free_host(void *ptr)
{
        return (int)cuMemFreeHost(ptr);
}

/* A green context of device 0, and its handle to be current. */
int behind_green(CUgreenCtx *green, CUcontext *context)
{
        CUdevResourceDesc description;
        CUdevResource all, part;
        unsigned groups = 1;
        CUresult rc = cuDeviceGetDevResource(0, &all, CU_DEV_RESOURCE_TYPE_SM);

        if (rc == CUDA_SUCCESS)
                rc = cuDevSmResourceSplitByCount(&part, &groups, &all, NULL, 0, 16);
        if (rc == CUDA_SUCCESS)
                rc = cuDevResourceGenerateDesc(&description, &part, 1);
        if (rc == CUDA_SUCCESS)
                rc = cuGreenCtxCreate(green, description, 0, CU_GREEN_CTX_DEFAULT_STREAM);
        if (rc == CUDA_SUCCESS)
                rc = cuCtxFromGreenCtx(context, *green);
        return (int)rc;
}

int behind_green_end(CUgreenCtx green)
{
        return (int)cuGreenCtxDestroy(green);
}
