/* Calls the driver past whoever stands in for it, as what is opened with RTLD_DEEPBIND does. */
#include <cuda.h>

__attribute__((visibility("default"))) int behind_free(CUdeviceptr ptr);
__attribute__((visibility("default"))) int behind_free_host(void *ptr);
__attribute__((visibility("default"))) int behind_release_handle(CUmemGenericAllocationHandle handle);
__attribute__((visibility("default"))) int behind_destroy_exec(CUgraphExec exec);
__attribute__((visibility("default"))) int behind_green(CUgreenCtx *green, CUcontext *context, int device);
__attribute__((visibility("default"))) int behind_green_end(CUgreenCtx green);
__attribute__((visibility("default"))) int behind_create(CUcontext *context, int device);
__attribute__((visibility("default"))) int behind_end(CUcontext context);
__attribute__((visibility("default"))) int behind_release(int device);
__attribute__((visibility("default"))) int behind_current(CUcontext context);
__attribute__((visibility("default"))) int behind_stream(CUstream *stream);
__attribute__((visibility("default"))) int behind_peer_access(CUcontext peer);

int behind_free(CUdeviceptr ptr)
{
        return (int)cuMemFree(ptr);
}

int behind_free_host(void *ptr)
{
        return (int)cuMemFreeHost(ptr);
}

int behind_release_handle(CUmemGenericAllocationHandle handle)
{
        return (int)cuMemRelease(handle);
}

int behind_destroy_exec(CUgraphExec exec)
{
        return (int)cuGraphExecDestroy(exec);
}

/* A green context of the device, and its handle to be current. */
int behind_green(CUgreenCtx *green, CUcontext *context, int device)
{
        CUdevResourceDesc description;
        CUdevResource all, part;
        unsigned groups = 1;
        CUresult rc = cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM);

        if (rc == CUDA_SUCCESS)
                rc = cuDevSmResourceSplitByCount(&part, &groups, &all, NULL, 0, 16);
        if (rc == CUDA_SUCCESS)
                rc = cuDevResourceGenerateDesc(&description, &part, 1);
        if (rc == CUDA_SUCCESS)
                rc = cuGreenCtxCreate(green, description, device, CU_GREEN_CTX_DEFAULT_STREAM);
        if (rc == CUDA_SUCCESS)
                rc = cuCtxFromGreenCtx(context, *green);
        return (int)rc;
}

int behind_green_end(CUgreenCtx green)
{
        return (int)cuGreenCtxDestroy(green);
}

/* Current nowhere. */
int behind_create(CUcontext *context, int device)
{
        CUresult rc = cuCtxCreate(context, NULL, 0, device);

        return rc == CUDA_SUCCESS ? (int)cuCtxPopCurrent(NULL) : (int)rc;
}

int behind_end(CUcontext context)
{
        return (int)cuCtxDestroy(context);
}

int behind_release(int device)
{
        return (int)cuDevicePrimaryCtxRelease(device);
}

int behind_current(CUcontext context)
{
        return (int)cuCtxSetCurrent(context);
}

int behind_stream(CUstream *stream)
{
        return (int)cuStreamCreate(stream, CU_STREAM_NON_BLOCKING);
}

int behind_peer_access(CUcontext peer)
{
        return (int)cuCtxEnablePeerAccess(peer, 0);
}
