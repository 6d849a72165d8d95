/*
 * A library that a program of program.c loads in the midst of its work. It brings two ways to the driver along: a
 * runtime that is linked into it, as libcudart_static.a is, and the driver's own cuGetProcAddress, asked of the handle
 * that dlopen gave. Both as functions of the driver's kind.
 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT void *plug_in_resolve(const char *name);
EXPORT CUresult plug_in_alloc(CUdeviceptr *at, size_t bytes);
EXPORT CUresult plug_in_free(CUdeviceptr at);
EXPORT CUresult plug_in_alloc_async(CUdeviceptr *at, size_t bytes, CUstream stream);
EXPORT CUresult plug_in_free_async(CUdeviceptr at, CUstream stream);
EXPORT CUresult plug_in_alloc_host(void **at, size_t bytes);
EXPORT CUresult plug_in_free_host(void *at);

/* NULL: the driver has none. */
void *plug_in_resolve(const char *name)
{
        CUresult (*get)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *) = NULL;
        void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *found = NULL;

        if (driver)
                found = dlsym(driver, "cuGetProcAddress_v2");
        memcpy(&get, &found, sizeof found);
        found = NULL;
        return get && get(name, &found, CUDA_VERSION, CU_GET_PROC_ADDRESS_DEFAULT, NULL) == CUDA_SUCCESS ? found : NULL;
}

/* Errors that both have bear the same number. */
CUresult plug_in_alloc(CUdeviceptr *at, size_t bytes)
{
        return (CUresult)cudaMalloc((void **)at, bytes);
}

CUresult plug_in_free(CUdeviceptr at)
{
        return (CUresult)cudaFree((void *)at);
}

CUresult plug_in_alloc_async(CUdeviceptr *at, size_t bytes, CUstream stream)
{
        return (CUresult)cudaMallocAsync((void **)at, bytes, stream);
}

CUresult plug_in_free_async(CUdeviceptr at, CUstream stream)
{
        return (CUresult)cudaFreeAsync((void *)at, stream);
}

CUresult plug_in_alloc_host(void **at, size_t bytes)
{
        return (CUresult)cudaMallocHost(at, bytes);
}

CUresult plug_in_free_host(void *at)
{
        return (CUresult)cudaFreeHost(at);
}
