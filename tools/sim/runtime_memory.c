/* The runtime's allocations: each makes the corresponding call of the driver. */
#include "runtime.h"

#include <stdatomic.h>
#include <string.h>

#include "grsim.h"

static atomic_ulong calls; /* of cudaMalloc and cudaFree */

__attribute__((visibility("default"))) unsigned long grSimRuntimeCount(void)
{
        return atomic_load(&calls);
}

cudaError_t cudaMalloc(void **p, size_t bytes)
{
        CUdeviceptr dptr;
        cudaError_t rc = rt_enter();

        atomic_fetch_add(&calls, 1);
        if (rc != cudaSuccess)
                return rc;
        if (!p)
                return rt_failed(cudaErrorInvalidValue);
        /* For 0 bytes the runtime succeeds with NULL; the driver would refuse. */
        if (!bytes) {
                *p = NULL;
                return cudaSuccess;
        }
        rc = rt_result(rt_driver.cuMemAlloc(&dptr, bytes));
        *p = rc == cudaSuccess ? (void *)(uintptr_t)dptr : NULL;
        return rc;
}

cudaError_t cudaFree(void *p)
{
        cudaError_t rc = rt_enter();

        atomic_fetch_add(&calls, 1);
        return rc != cudaSuccess || !p ? rc : rt_result(rt_driver.cuMemFree(RT_DPTR(p)));
}

cudaError_t cudaMallocPitch(void **p, size_t *pitch, size_t width, size_t height)
{
        CUdeviceptr dptr;
        cudaError_t rc = rt_enter();

        if (rc != cudaSuccess)
                return rc;
        if (!p || !pitch)
                return rt_failed(cudaErrorInvalidValue);
        if (!width || !height) {
                *p = NULL;
                *pitch = 0;
                return cudaSuccess;
        }
        rc = rt_result(rt_driver.cuMemAllocPitch(&dptr, pitch, width, height, 4));
        if (rc == cudaSuccess)
                *p = (void *)(uintptr_t)dptr;
        return rc;
}

cudaError_t cudaMalloc3D(struct cudaPitchedPtr *p, struct cudaExtent extent)
{
        cudaError_t rc;

        if (!p)
                return rt_failed(cudaErrorInvalidValue);
        rc = cudaMallocPitch(&p->ptr, &p->pitch, extent.width, extent.height * extent.depth);
        if (rc == cudaSuccess) {
                p->xsize = extent.width;
                p->ysize = extent.height;
        }
        return rc;
}

cudaError_t cudaMallocManaged(void **p, size_t bytes, unsigned flags)
{
        CUdeviceptr dptr;
        cudaError_t rc = rt_enter();

        if (rc != cudaSuccess)
                return rc;
        if (!p)
                return rt_failed(cudaErrorInvalidValue);
        rc = rt_result(rt_driver.cuMemAllocManaged(&dptr, bytes, flags));
        if (rc == cudaSuccess)
                *p = (void *)(uintptr_t)dptr;
        return rc;
}

cudaError_t cudaMallocHost(void **p, size_t bytes)
{
        return cudaHostAlloc(p, bytes, cudaHostAllocDefault);
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags)
{
        RT(cuMemHostAlloc(p, bytes, flags));
}

cudaError_t cudaFreeHost(void *p)
{
        RT(cuMemFreeHost(p));
}

cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags)
{
        RT(cuMemHostRegister(p, bytes, flags));
}

cudaError_t cudaHostUnregister(void *p)
{
        RT(cuMemHostUnregister(p));
}

cudaError_t cudaHostGetDevicePointer(void **dptr, void *p, unsigned flags)
{
        RT(cuMemHostGetDevicePointer((CUdeviceptr *)dptr, p, flags));
}

cudaError_t cudaHostGetFlags(unsigned *flags, void *p)
{
        RT(cuMemHostGetFlags(flags, p));
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
        RT(cuMemGetInfo(free_bytes, total));
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p)
{
        unsigned type = 0, managed = 0;
        int device = 0;
        CUdeviceptr dptr = 0;
        void *host = NULL;
        CUpointer_attribute which[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                       CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
                                       CU_POINTER_ATTRIBUTE_HOST_POINTER};
        void *values[] = {&type, &managed, &device, &dptr, &host};
        cudaError_t rc = rt_enter();

        if (rc != cudaSuccess)
                return rc;
        if (!out)
                return rt_failed(cudaErrorInvalidValue);
        rc = rt_result(rt_driver.cuPointerGetAttributes(5, which, values, RT_DPTR(p)));
        if (rc != cudaSuccess)
                return rc;
        memset(out, 0, sizeof *out);
        out->type = managed                      ? cudaMemoryTypeManaged
                    : type == CU_MEMORYTYPE_HOST ? cudaMemoryTypeHost
                    : type                       ? cudaMemoryTypeDevice
                                                 : cudaMemoryTypeUnregistered;
        out->device = device;
        out->devicePointer = (void *)(uintptr_t)dptr;
        out->hostPointer = out->type == cudaMemoryTypeUnregistered ? (void *)(uintptr_t)p : host;
        return cudaSuccess;
}

RT_PTSZ(cudaMallocAsync, (void **p, size_t bytes, cudaStream_t stream), (p, bytes, stream))
{
        RT(cuMemAllocAsync((CUdeviceptr *)p, bytes, stream));
}

RT_PTSZ(cudaMallocFromPoolAsync, (void **p, size_t bytes, cudaMemPool_t pool, cudaStream_t stream),
        (p, bytes, pool, stream))
{
        RT(cuMemAllocFromPoolAsync((CUdeviceptr *)p, bytes, pool, stream));
}

RT_PTSZ(cudaFreeAsync, (void *p, cudaStream_t stream), (p, stream))
{
        RT(cuMemFreeAsync(RT_DPTR(p), stream));
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *props)
{
        RT(cuMemPoolCreate(pool, (const CUmemPoolProps *)props));
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool)
{
        RT(cuMemPoolDestroy(pool));
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep)
{
        RT(cuMemPoolTrimTo(pool, keep));
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value)
{
        RT(cuMemPoolGetAttribute(pool, (CUmemPool_attribute)attribute, value));
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value)
{
        RT(cuMemPoolSetAttribute(pool, (CUmemPool_attribute)attribute, value));
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *map, size_t count)
{
        RT(cuMemPoolSetAccess(pool, (const CUmemAccessDesc *)map, count));
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device)
{
        RT_EARLY(cuDeviceGetDefaultMemPool(pool, device));
}

cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *pool, int device)
{
        RT_EARLY(cuDeviceGetMemPool(pool, device));
}

cudaError_t cudaDeviceSetMemPool(int device, cudaMemPool_t pool)
{
        RT_EARLY(cuDeviceSetMemPool(device, pool));
}

cudaError_t cudaDeviceGraphMemTrim(int device)
{
        RT_EARLY(cuDeviceGraphMemTrim(device));
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *p)
{
        RT(cuIpcGetMemHandle((CUipcMemHandle *)handle, RT_DPTR(p)));
}

cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t handle, unsigned flags)
{
        CUipcMemHandle same;

        memcpy(&same, &handle, sizeof same);
        RT(cuIpcOpenMemHandle((CUdeviceptr *)p, same, flags));
}

cudaError_t cudaIpcCloseMemHandle(void *p)
{
        RT(cuIpcCloseMemHandle(RT_DPTR(p)));
}

cudaError_t cudaMemAdvise(const void *p, size_t bytes, enum cudaMemoryAdvise advice, struct cudaMemLocation location)
{
        CUmemLocation same;

        memcpy(&same, &location, sizeof same);
        RT(cuMemAdvise(RT_DPTR(p), bytes, (CUmem_advise)advice, same));
}

RT_PTSZ(cudaMemPrefetchAsync,
        (const void *p, size_t bytes, struct cudaMemLocation location, unsigned flags, cudaStream_t stream),
        (p, bytes, location, flags, stream))
{
        CUmemLocation same;

        memcpy(&same, &location, sizeof same);
        RT(cuMemPrefetchAsync(RT_DPTR(p), bytes, same, flags, stream));
}
