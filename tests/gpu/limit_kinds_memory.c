/* Ways to get memory, each with its own to give it back, and the pools that some of them use. */
#include "limit_kinds_memory.h"

#include <stdlib.h>

struct gt gt;
CUstream stream;
CUmemoryPool explicit_pool, newer_pools[3];

CUresult get_device(size_t bytes, uint64_t *ret)
{
        CUdeviceptr p = 0;
        CUresult result = cuMemAlloc(&p, bytes);

        *ret = p;
        return result;
}

CUresult put_device(size_t bytes, uint64_t handle)
{
        (void)bytes;
        return cuMemFree(handle);
}

/* Of many widths, as the library asks the driver for the pitch of each once; all of them have this one. */
static CUresult get_pitched(size_t bytes, uint64_t *ret)
{
        static _Atomic unsigned calls;
        CUdeviceptr p = 0;
        size_t pitch;
        CUresult result = cuMemAllocPitch(&p, &pitch, 4096 - calls++ % 512, bytes / 4096, 4);

        *ret = p;
        return result;
}

CUresult get_async(size_t bytes, uint64_t *ret)
{
        CUdeviceptr p = 0;
        CUresult result = cuMemAllocAsync(&p, bytes, stream);

        *ret = p;
        return result;
}

CUresult put_async(size_t bytes, uint64_t handle)
{
        (void)bytes;
        return cuMemFreeAsync(handle, stream);
}

static CUresult get_from(CUmemoryPool pool, size_t bytes, uint64_t *ret)
{
        CUdeviceptr p = 0;
        CUresult result = cuMemAllocFromPoolAsync(&p, bytes, pool, stream);

        *ret = p;
        return result;
}

static CUresult get_from_pool(size_t bytes, uint64_t *ret)
{
        return get_from(explicit_pool, bytes, ret);
}

static CUresult get_managed_pool(size_t bytes, uint64_t *ret)
{
        return get_from(newer_pools[0], bytes, ret);
}

static CUresult get_placeless_pool(size_t bytes, uint64_t *ret)
{
        return get_from(newer_pools[1], bytes, ret);
}

CUresult get_host_pool(size_t bytes, uint64_t *ret)
{
        return get_from(newer_pools[2], bytes, ret);
}

CUresult get_created(size_t bytes, uint64_t *ret)
{
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device}};
        CUmemGenericAllocationHandle handle = 0;
        CUresult result = cuMemCreate(&handle, bytes, &prop, 0);

        *ret = handle;
        return result;
}

CUresult put_created(size_t bytes, uint64_t handle)
{
        (void)bytes;
        return cuMemRelease(handle);
}

/* Mapped, and the handle released at once, as caching allocators do: the mapping alone keeps it alive. */
CUresult get_mapped(size_t bytes, uint64_t *ret)
{
        CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device},
                                  .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        uint64_t handle;
        CUdeviceptr p = 0;
        CUresult result = get_created(bytes, &handle);

        if (result != CUDA_SUCCESS)
                return result;
        GR_MUST(cuMemAddressReserve(&p, bytes, 0, 0, 0));
        GR_MUST(cuMemMap(p, bytes, 0, handle, 0));
        GR_MUST(cuMemRelease(handle));
        GR_MUST(cuMemSetAccess(p, bytes, &access, 1));
        *ret = p;
        return CUDA_SUCCESS;
}

CUresult put_mapped(size_t bytes, uint64_t handle)
{
        CUresult result = cuMemUnmap(handle, bytes);

        return result == CUDA_SUCCESS ? cuMemAddressFree(handle, bytes) : result;
}

CUresult get_managed(size_t bytes, uint64_t *ret)
{
        CUdeviceptr p = 0;
        CUresult result = cuMemAllocManaged(&p, bytes, CU_MEM_ATTACH_GLOBAL);

        *ret = p;
        return result;
}

static CUresult get_array(size_t bytes, uint64_t *ret)
{
        CUDA_ARRAY_DESCRIPTOR shape = {
                .Width = 1024, .Height = bytes / 4096, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
        CUarray array = NULL;
        CUresult result = cuArrayCreate(&array, &shape);

        *ret = (uint64_t)(uintptr_t)array;
        return result;
}

static CUresult put_array(size_t bytes, uint64_t handle)
{
        (void)bytes;
        return cuArrayDestroy((CUarray)(uintptr_t)handle);
}

static CUresult get_array3d(size_t bytes, uint64_t *ret)
{
        CUDA_ARRAY3D_DESCRIPTOR shape = {
                .Width = 256, .Height = 256, .Depth = bytes / 262144, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
        CUarray array = NULL;
        CUresult result = cuArray3DCreate(&array, &shape);

        *ret = (uint64_t)(uintptr_t)array;
        return result;
}

/* Three quarters of it in the first level, the rest below. */
static CUresult get_mipmapped(size_t bytes, uint64_t *ret)
{
        CUDA_ARRAY3D_DESCRIPTOR shape = {
                .Width = 4096, .Height = bytes / 16384 / 4 * 3, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
        CUmipmappedArray array = NULL;
        CUresult result = cuMipmappedArrayCreate(&array, &shape, 8);

        *ret = (uint64_t)(uintptr_t)array;
        return result;
}

static CUresult put_mipmapped(size_t bytes, uint64_t handle)
{
        (void)bytes;
        return cuMipmappedArrayDestroy((CUmipmappedArray)(uintptr_t)handle);
}

CUresult get_host(size_t bytes, uint64_t *ret)
{
        void *p = NULL;
        CUresult result = cuMemAllocHost(&p, bytes);

        *ret = (uint64_t)(uintptr_t)p;
        return result;
}

static CUresult get_host_flags(size_t bytes, uint64_t *ret)
{
        void *p = NULL;
        CUresult result = cuMemHostAlloc(&p, bytes, CU_MEMHOSTALLOC_PORTABLE);

        *ret = (uint64_t)(uintptr_t)p;
        return result;
}

CUresult put_host(size_t bytes, uint64_t handle)
{
        (void)bytes;
        return cuMemFreeHost((void *)(uintptr_t)handle);
}

static CUresult get_registered(size_t bytes, uint64_t *ret)
{
        void *p = aligned_alloc(4096, bytes);
        CUresult result = p ? cuMemHostRegister(p, bytes, 0) : CUDA_ERROR_UNKNOWN;

        if (result != CUDA_SUCCESS)
                free(p);
        *ret = (uint64_t)(uintptr_t)p;
        return result;
}

static CUresult put_registered(size_t bytes, uint64_t handle)
{
        CUresult result = cuMemHostUnregister((void *)(uintptr_t)handle);

        (void)bytes;
        free((void *)(uintptr_t)handle);
        return result;
}

const struct memory_kind memory_kinds[] = {
        {"cuMemAlloc", get_device, put_device, false, false},
        {"cuMemAllocPitch", get_pitched, put_device, false, false},
        {"cuMemAllocAsync, freed in order", get_async, put_async, false, false},
        {"cuMemAllocAsync, freed by cuMemFree", get_async, put_device, false, false},
        {"cuMemAllocFromPoolAsync", get_from_pool, put_async, false, false},
        {"cuMemAllocFromPoolAsync, freed by cuMemFree", get_from_pool, put_device, false, false},
        {"cuMemCreate", get_created, put_created, false, false},
        {"cuMemCreate, mapped and released", get_mapped, put_mapped, false, false},
        {"cuMemAllocManaged", get_managed, put_device, true, false},
        {"cuArrayCreate", get_array, put_array, false, false},
        {"cuArray3DCreate", get_array3d, put_array, false, false},
        {"cuMipmappedArrayCreate", get_mipmapped, put_mipmapped, false, false},
        {"cuMemAllocHost", get_host, put_host, false, true},
        {"cuMemHostAlloc", get_host_flags, put_host, false, true},
        {"cuMemHostRegister", get_registered, put_registered, false, true},
        {"managed memory of a default pool", get_managed_pool, put_async, true, false},
        {"managed memory of a pool without a place", get_placeless_pool, put_async, true, false},
        {"host memory of a default pool", get_host_pool, put_async, false, true},
};
_Static_assert(sizeof(memory_kinds) / sizeof(memory_kinds[0]) == MEMORY_KINDS, "the header has their number");

int kind_count = MEMORY_KINDS; /* that the driver has */

bool find_newer_pools(void)
{
        static const CUmemAllocationType managed = (CUmemAllocationType)2; /* of CUDA 13 */
        typedef CUresult CUDAAPI get_pool(CUmemoryPool *, CUmemLocation *, CUmemAllocationType);
        get_pool *get = (get_pool *)gt_lookup("cuMemGetDefaultMemPool");
        CUmemLocation here = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device};
        CUmemLocation host = {.type = CU_MEM_LOCATION_TYPE_HOST};
        CUmemPoolProps placeless = {.allocType = managed};

        return get && get(&newer_pools[0], &here, managed) == CUDA_SUCCESS &&
               cuMemPoolCreate(&newer_pools[1], &placeless) == CUDA_SUCCESS &&
               get(&newer_pools[2], &host, CU_MEM_ALLOCATION_TYPE_PINNED) == CUDA_SUCCESS;
}
