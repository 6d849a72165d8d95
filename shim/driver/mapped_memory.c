/*
 * Mapped memory for core/: which handle of the driver is mapped where, which devices may use it, and what of it is in
 * host memory while the process sleeps.
 */
#include "driver/mapped_memory.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "account/budget.h"
#include "base/hash.h"
#include "base/no_cancel.h"
#include "driver/real.h"

static CUmemAllocationProp mapped_prop(int device)
{
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
        int capable = 0;

        /* All memory of cuMemAlloc is capable of RDMA where the device is, so this must be, too. */
        if (gr_real.cuDeviceGetAttribute(&capable, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
                                         device) == CUDA_SUCCESS &&
            capable)
                prop.allocFlags.gpuDirectRDMACapable = 1;
        return prop;
}

/*
 * Whether each device that the process sees can access memory of dev, and dev theirs. A context of another device can
 * copy all memory of cuMemAlloc. Mapped memory it can copy, other than by cuMemcpyPeer, only if its device was given
 * access (docs/measurements.md, mapped-peers). So each device that the process uses gets access to all that is mapped
 * for core/, and nothing is mapped for core/ where the process sees a device that cannot have it. Imports are mapped
 * nevertheless.
 */
static bool all_can_access(CUdevice dev, int devices)
{
        for (int i = 0; i < devices; i++) {
                int there = 0, back = 0;

                if (i != dev &&
                    (!gr_real.cuDeviceCanAccessPeer || gr_real.cuDeviceCanAccessPeer(&there, i, dev) != CUDA_SUCCESS ||
                     !there || gr_real.cuDeviceCanAccessPeer(&back, dev, i) != CUDA_SUCCESS || !back))
                        return false;
        }
        return true;
}

static int driver_mem_reserve(void *context, size_t bytes, uint64_t *ret_ptr)
{
        CUmemAllocationProp prop;
        size_t granularity = 0;
        int devices = 0, mappable = 0, shareable = 0;
        CUdeviceptr ptr;
        CUdevice dev;
        CUresult result;
        GR_NO_CANCEL;

        assert(bytes > 0 && bytes % GR_PAGE_BYTES == 0);
        if (gr_real.cuDeviceGetCount(&devices) != CUDA_SUCCESS || !gr_operations_push_context(context))
                return -ENOTSUP;
        result = gr_real.cuCtxGetDevice(&dev);
        gr_operations_pop_context();
        if (result != CUDA_SUCCESS ||
            gr_real.cuDeviceGetAttribute(&mappable, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, dev) !=
                    CUDA_SUCCESS ||
            gr_real.cuDeviceGetAttribute(&shareable, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                                         dev) != CUDA_SUCCESS ||
            !mappable || !shareable || !all_can_access(dev, devices))
                return -ENOTSUP;
        prop = mapped_prop(dev);
        if (gr_real.cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM) !=
                    CUDA_SUCCESS ||
            granularity > GR_PAGE_BYTES)
                return -ENOTSUP;
        result = gr_real.cuMemAddressReserve(&ptr, bytes, GR_PAGE_BYTES, 0, 0);
        if (result == CUDA_SUCCESS)
                *ret_ptr = ptr;
        return gr_errno_of(result);
}

static void driver_mem_unreserve(uint64_t ptr, size_t bytes)
{
        GR_NO_CANCEL;

        assert(ptr != 0 && bytes % GR_PAGE_BYTES == 0);
        gr_real.cuMemAddressFree(ptr, bytes);
}

struct gr_lock gr_mappings = GR_LOCK_INIT(GR_RANK_MAPPINGS);

/* What one driver_mem_map has mapped, or all pieces of one import. */
struct mapping {
        UT_hash_handle hh;
        struct gr_piece piece;    /* its ptr is the key */
        struct gr_memory *memory; /* NULL: of an import */
};
static struct mapping *mappings GR_GUARDED_BY(gr_mappings);
static uint64_t mapped_count GR_GUARDED_BY(gr_mappings);
static _Atomic uint64_t host_bytes;   /* of content in host memory, and not in files; changed with the lock held */
static _Atomic uint64_t used_devices; /* a bit for each that has, or had, a context; changed with the lock held */
static size_t largest_bytes GR_GUARDED_BY(gr_mappings); /* of all mappings ever */

/* Lock held. */
GR_HELD(gr_mappings) static struct mapping *mapping_at(uint64_t ptr)
{
        struct mapping *mapping;

        gr_assert_locked(&gr_mappings);
        HASH_FIND(hh, mappings, &ptr, sizeof(ptr), mapping);
        return mapping;
}

/* Lock held. The mapping that ptr lies in; NULL: none. */
GR_HELD(gr_mappings) static struct mapping *mapping_around(uint64_t ptr)
{
        uint64_t at = ptr & ~(uint64_t)(GR_PAGE_BYTES - 1);
        struct mapping *mapping = mapping_at(at);

        while (!mapping && at > 0 && ptr - at < largest_bytes) {
                at -= GR_PAGE_BYTES;
                mapping = mapping_at(at);
        }
        return mapping && ptr - at < mapping->piece.bytes ? mapping : NULL;
}

/* Lock held. Lets devices read and write what is mapped at ptr. */
GR_HELD(gr_mappings) static CUresult set_access(uint64_t ptr, size_t bytes, const int *devices, size_t count)
{
        CUmemAccessDesc access[GR_DEVICES_MAX];
        CUresult result;

        gr_assert_locked(&gr_mappings);
        assert(count <= GR_DEVICES_MAX);
        for (size_t i = 0; i < count; i++)
                access[i] = (CUmemAccessDesc){.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = devices[i]},
                                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        GR_ONCE_READY(result, gr_real.cuMemSetAccess(ptr, bytes, access, count));
        return result;
}

/*
 * Lock held. Lets the device read and write what is mapped at ptr, and also those other devices in use that can reach
 * it.
 */
GR_HELD(gr_mappings) static CUresult give_access(uint64_t ptr, size_t bytes, int device)
{
        uint64_t used = atomic_load(&used_devices);
        int devices[GR_DEVICES_MAX] = {device};
        size_t count = 1;
        CUresult result;

        gr_assert_locked(&gr_mappings);
        for (int i = 0; i < GR_DEVICES_MAX; i++)
                if (i != device && used >> i & 1)
                        devices[count++] = i;
        result = set_access(ptr, bytes, devices, count);
        if (result == CUDA_SUCCESS || count == 1)
                return result;
        result = set_access(ptr, bytes, devices, 1);
        for (size_t i = 1; i < count && result == CUDA_SUCCESS; i++)
                (void)set_access(ptr, bytes, &devices[i], 1);
        return result;
}

GR_HELD(gr_mappings)
CUresult gr_mapped_adopt(uint64_t ptr, size_t bytes, int device, struct gr_memory *memory)
{
        struct mapping *mapping = calloc(1, sizeof(*mapping));
        CUresult result;

        gr_assert_locked(&gr_mappings);
        if (!mapping)
                return CUDA_ERROR_OUT_OF_MEMORY;
        result = give_access(ptr, bytes, device);
        if (result == CUDA_SUCCESS) {
                largest_bytes = bytes > largest_bytes ? bytes : largest_bytes;
                *mapping = (struct mapping){.piece = {ptr, bytes, ++mapped_count}, .memory = memory};
                HASH_ADD(hh, mappings, piece.ptr, sizeof(ptr), mapping);
                if (mapping->hh.tbl) {
                        if (memory) {
                                memory->ptr = ptr;
                                memory->mapped++;
                        }
                        return CUDA_SUCCESS;
                }
                result = CUDA_ERROR_OUT_OF_MEMORY;
        }
        free(mapping);
        return result;
}

/* Lock held. Frees the structure once neither core/ nor a mapping has the memory. */
GR_HELD(gr_mappings) static void forget_if_unused(struct gr_memory *memory)
{
        gr_assert_locked(&gr_mappings);
        if (memory->released && memory->mapped == 0)
                free(memory);
}

GR_HELD(gr_mappings) void gr_mapped_disown(uint64_t ptr)
{
        struct mapping *mapping = mapping_at(ptr);
        struct gr_memory *memory;

        assert(mapping);
        memory = mapping->memory;
        HASH_DEL(mappings, mapping);
        free(mapping);
        if (!memory)
                return;
        if (memory->ptr == ptr)
                memory->ptr = 0;
        memory->mapped--;
        forget_if_unused(memory);
}

/* Lock held. Maps memory at ptr and enters it by gr_mapped_adopt. On failure nothing is mapped. */
GR_HELD(gr_mappings) static CUresult map_at(uint64_t ptr, size_t bytes, struct gr_memory *memory)
{
        CUresult result;

        gr_assert_locked(&gr_mappings);
        GR_ONCE_READY(result, gr_real.cuMemMap(ptr, bytes, 0, memory->handle, 0));
        if (result == CUDA_SUCCESS) {
                result = gr_mapped_adopt(ptr, bytes, memory->device, memory);
                if (result != CUDA_SUCCESS)
                        gr_real.cuMemUnmap(ptr, bytes);
        }
        return result;
}

static CUresult create_memory(struct gr_memory *memory)
{
        CUmemAllocationProp prop = mapped_prop(memory->device);
        CUresult result;

        GR_ONCE_READY(result, gr_real.cuMemCreate(&memory->handle, memory->bytes, &prop, 0));
        return result;
}

/* Lock held. The driver takes the memory back once it is mapped nowhere. */
GR_HELD(gr_mappings) static void release_memory(struct gr_memory *memory)
{
        gr_assert_locked(&gr_mappings);
        if (memory->handle)
                gr_real.cuMemRelease(memory->handle);
        memory->handle = 0;
}

static void adjust_group(const struct gr_memory *memory, int sign)
{
        const struct gr_group *group = atomic_load(&gr_core.devices[memory->device].group);

        if (group)
                group->adjust(group->arg, sign * (int64_t)memory->bytes);
}

/* Lock held. The content of memory is on the device again, or nobody needs it any more. */
GR_HELD(gr_mappings) static void drop_host(struct gr_memory *memory)
{
        gr_assert_locked(&gr_mappings);
        munmap(memory->host, memory->bytes);
        memory->host = NULL;
        if (!memory->in_file)
                atomic_fetch_sub(&host_bytes, memory->bytes);
        atomic_fetch_sub(&gr_core.devices[memory->device].asleep_bytes, memory->bytes);
}

/* Lock held. Unmaps what map_at has mapped; released: core/ gives the memory up. */
GR_HELD(gr_mappings) static CUresult unmap_at(uint64_t ptr, size_t bytes, bool released)
{
        struct gr_memory *memory = mapping_at(ptr)->memory;
        CUresult result = CUDA_SUCCESS;

        gr_assert_locked(&gr_mappings);
        if (!memory->host) {
                GR_ONCE_READY(result, gr_real.cuMemUnmap(ptr, bytes));
                if (result != CUDA_SUCCESS)
                        return result;
        } else {
                drop_host(memory);
                adjust_group(memory, 1); /* core/ uncharges it now, as any other */
        }
        if (released) {
                release_memory(memory);
                memory->released = true;
        }
        gr_mapped_disown(ptr);
        return CUDA_SUCCESS;
}

static int driver_mem_map(void *context, int device, uint64_t ptr, size_t bytes, uint64_t *handle)
{
        GR_NO_CANCEL;
        struct gr_memory *memory = (struct gr_memory *)(uintptr_t)*handle;
        CUresult result = CUDA_SUCCESS;

        (void)context;
        gr_lock_rank_assert_free_from(GR_RANK_MAPPINGS);
        assert(bytes > 0 && bytes % GR_PAGE_BYTES == 0 && ptr % GR_PAGE_BYTES == 0); /* whole pages */
        gr_operations_callbacks->taking();
        if (!memory) {
                memory = calloc(1, sizeof(*memory));
                if (!memory)
                        return -ENOMEM;
                memory->bytes = bytes;
                memory->device = device;
                result = create_memory(memory);
        }
        if (result == CUDA_SUCCESS) {
                gr_lock(&gr_mappings);
                result = map_at(ptr, bytes, memory);
                if (result != CUDA_SUCCESS && !*handle)
                        release_memory(memory);
                gr_unlock(&gr_mappings);
        }
        if (result != CUDA_SUCCESS && !*handle) {
                free(memory);
        } else if (result == CUDA_SUCCESS && !*handle) {
                *handle = (uint64_t)(uintptr_t)memory;
                gr_operations_callbacks->taken();
        }
        return gr_errno_of_memory(result);
}

/* Lock held; it is released while another thread moves the memory to the host or back. */
GR_NOT_CHECKED static void await_move(uint64_t ptr)
{
        struct mapping *mapping = mapping_at(ptr);

        gr_assert_locked(&gr_mappings);
        for (unsigned n = 1; mapping && mapping->memory && mapping->memory->moving; n++) {
                gr_unlock(&gr_mappings);
                gr_lock_pause(n);
                gr_lock(&gr_mappings);
                mapping = mapping_at(ptr);
        }
}

static int driver_mem_unmap(void *context, uint64_t ptr, size_t bytes, uint64_t handle)
{
        GR_NO_CANCEL;
        CUstreamCaptureMode mode = gr_operations_relax_captures();
        bool entered = context && gr_operations_push_context(context);
        CUresult result;

        assert(bytes > 0 && bytes % GR_PAGE_BYTES == 0 && ptr % GR_PAGE_BYTES == 0); /* whole pages */
        gr_lock(&gr_mappings);
        await_move(ptr);
        result = unmap_at(ptr, bytes, handle != 0);
        gr_unlock(&gr_mappings);
        if (entered)
                gr_operations_pop_context();
        gr_operations_restore_captures(mode);
        gr_operations_callbacks->going_on();
        return gr_errno_of(result);
}

void gr_mapped_stay(uint64_t ptr, size_t bytes)
{
        GR_NO_CANCEL;

        gr_lock(&gr_mappings);
        for (uint64_t at = ptr; at < ptr + bytes;) {
                struct mapping *mapping = mapping_around(at);

                if (mapping && mapping->memory)
                        mapping->memory->stays = true;
                at = mapping ? mapping->piece.ptr + mapping->piece.bytes : at + GR_PAGE_BYTES;
        }
        gr_unlock(&gr_mappings);
}

size_t gr_mapped_list(int device, bool asleep, uint64_t **ret_ptrs)
{
        struct mapping *mapping, *tmp;
        size_t count = 0;
        GR_NO_CANCEL;

        gr_lock(&gr_mappings);
        *ret_ptrs = malloc((HASH_COUNT(mappings) + 1) * sizeof(**ret_ptrs));
        HASH_ITER (hh, mappings, mapping, tmp)
                if (*ret_ptrs && mapping->memory && mapping->memory->device == device &&
                    (mapping->memory->host != NULL) == asleep)
                        (*ret_ptrs)[count++] = mapping->piece.ptr;
        gr_unlock(&gr_mappings);
        return count;
}

struct gr_memory *gr_mapped_begin_move(uint64_t ptr, bool asleep)
{
        struct mapping *mapping;
        struct gr_memory *memory;

        gr_lock(&gr_mappings);
        mapping = mapping_at(ptr);
        memory = mapping ? mapping->memory : NULL;
        if (memory && (memory->moving || (memory->host != NULL) != asleep ||
                       (!asleep && (memory->stays || !memory->handle || memory->mapped != 1 || memory->ptr != ptr))))
                memory = NULL;
        if (memory)
                memory->moving = true;
        gr_unlock(&gr_mappings);
        return memory;
}

void gr_mapped_end_move(struct gr_memory *memory)
{
        gr_lock(&gr_mappings);
        assert(memory->moving);
        memory->moving = false;
        gr_unlock(&gr_mappings);
}

uint64_t gr_mapped_host_bytes(void)
{
        return atomic_load(&host_bytes);
}

CUresult gr_mapped_leave(struct gr_memory *memory, void *host, bool in_file)
{
        CUresult result;

        gr_lock(&gr_mappings);
        assert(memory->moving && !memory->host);
        GR_ONCE_READY(result, gr_real.cuMemUnmap(memory->ptr, memory->bytes));
        if (result == CUDA_SUCCESS) {
                release_memory(memory);
                memory->host = host;
                memory->in_file = in_file;
                if (!in_file)
                        atomic_fetch_add(&host_bytes, memory->bytes);
                atomic_fetch_add(&gr_core.devices[memory->device].asleep_bytes, memory->bytes);
                adjust_group(memory, -1);
        }
        gr_unlock(&gr_mappings);
        return result;
}

CUresult gr_mapped_create_again(struct gr_memory *memory)
{
        const struct gr_group *group = atomic_load(&gr_core.devices[memory->device].group);
        CUresult result;

        assert(memory->moving && memory->host && !memory->handle);
        if (group && group->reserve(group->arg, memory->bytes))
                return CUDA_ERROR_OUT_OF_MEMORY;
        result = create_memory(memory);
        if (result != CUDA_SUCCESS) {
                memory->handle = 0;
                adjust_group(memory, -1);
        }
        return result;
}

CUresult gr_mapped_map_again(struct gr_memory *memory)
{
        CUresult result;

        gr_lock(&gr_mappings);
        assert(memory->moving && memory->host && memory->handle);
        GR_ONCE_READY(result, gr_real.cuMemMap(memory->ptr, memory->bytes, 0, memory->handle, 0));
        if (result == CUDA_SUCCESS) {
                result = give_access(memory->ptr, memory->bytes, memory->device);
                if (result != CUDA_SUCCESS)
                        gr_real.cuMemUnmap(memory->ptr, memory->bytes);
        }
        gr_unlock(&gr_mappings);
        return result;
}

void gr_mapped_give_up(struct gr_memory *memory, bool mapped)
{
        gr_lock(&gr_mappings);
        assert(memory->moving && memory->host);
        if (mapped)
                gr_real.cuMemUnmap(memory->ptr, memory->bytes);
        if (memory->handle)
                adjust_group(memory, -1);
        release_memory(memory);
        gr_unlock(&gr_mappings);
}

void gr_mapped_arrived(struct gr_memory *memory)
{
        gr_lock(&gr_mappings);
        assert(memory->moving && memory->handle);
        drop_host(memory);
        gr_unlock(&gr_mappings);
}

void gr_mapped_use_device(int device)
{
        static _Atomic uint64_t served; /* a bit for each device that has access to all mapped memory */
        struct mapping *mapping, *tmp;
        bool all = true;
        GR_NO_CANCEL;

        assert(device >= 0 && device < GR_DEVICES_MAX);
        if (atomic_load(&served) >> device & 1)
                return;
        gr_lock(&gr_mappings);
        atomic_fetch_or(&used_devices, UINT64_C(1) << device);
        if (!(atomic_load(&served) >> device & 1)) {
                HASH_ITER (hh, mappings, mapping, tmp) {
                        bool asleep = mapping->memory && mapping->memory->host;

                        /*
                         * Tried twice: without access, copies by that device would fail. What fails here is tried
                         * again by the device's next context. What is asleep gets access when it is mapped again; it
                         * may be mapped already while it moves.
                         */
                        if (!(asleep && !mapping->memory->moving) &&
                            set_access(mapping->piece.ptr, mapping->piece.bytes, &device, 1) != CUDA_SUCCESS &&
                            set_access(mapping->piece.ptr, mapping->piece.bytes, &device, 1) != CUDA_SUCCESS && !asleep)
                                all = false;
                }
                if (all)
                        atomic_fetch_or(&served, UINT64_C(1) << device);
        }
        gr_unlock(&gr_mappings);
}

GR_HELD(gr_mappings) CUresult gr_mapped_export(uint64_t ptr, struct gr_piece *ret_piece, int *ret_fd)
{
        const struct mapping *mapping = mapping_around(ptr);

        if (!mapping || !mapping->memory || !mapping->memory->handle)
                return CUDA_ERROR_NOT_FOUND;
        *ret_piece = mapping->piece;
        return ret_fd ? gr_real.cuMemExportToShareableHandle(ret_fd, mapping->memory->handle,
                                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
                      : CUDA_SUCCESS;
}

void gr_mapped_init(void)
{
        if (!gr_real.cuMemCreate || !gr_real.cuMemRelease || !gr_real.cuMemMap || !gr_real.cuMemUnmap ||
            !gr_real.cuMemSetAccess || !gr_real.cuMemAddressReserve || !gr_real.cuMemAddressFree ||
            !gr_real.cuMemGetAllocationGranularity || !gr_real.cuMemExportToShareableHandle ||
            !gr_real.cuMemImportFromShareableHandle || !gr_real.cuDeviceGetCount || !gr_real.cuDeviceGetAttribute)
                return;
        gr_driver.mem_reserve = driver_mem_reserve;
        gr_driver.mem_unreserve = driver_mem_unreserve;
        gr_driver.mem_map = driver_mem_map;
        gr_driver.mem_unmap = driver_mem_unmap;
}
