/*
 * Mapped memory (VMM). It is charged when it is created, to the device or the host, as its properties say, whatever
 * context is current. It stays charged as long as the program has a handle of it that it has not released, or a mapping
 * of it.
 *
 * Imported memory is counted (GR_MEMORY_IMPORTED) but never refused: it belongs to the account of the exporter. It is
 * counted at its first mapping, as only a mapping tells how large it is. Memory of this process that is imported again
 * under another handle is in its account already; by a fabric handle it cannot be recognised, and counts as another
 * process's. Memory is not counted while only a descriptor that the program has exported, or a sparse array, keeps it
 * alive.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "base/hash.h"
#include "base/no_cancel.h"
#include "device/device.h"
#include "driver/mapped_memory.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/context.h"
#include "hooks/ipc.h"
#include "hooks/query.h"
#include "hooks/segment_import.h"

struct memory {
        UT_hash_handle hh;
        /* Key; in the table while refs > 0. Imports of one memory may have the same handle, and have an entry each. */
        CUmemGenericAllocationHandle handle;
        struct gr_device *device;
        enum gr_memory_kind kind;
        uint64_t bytes; /* 0 for imported memory until it is mapped */
        /*
         * Of memory of this process that it has imported again: the entry that is charged for it, which this one keeps
         * alive as a mapping does. NULL until the first mapping, and where no such entry was found.
         */
        struct memory *of;
        bool exported;   /* the program has a descriptor of it */
        bool own_import; /* imported by a descriptor of this process's own */
        unsigned refs;   /* calls of cuMemRelease that the program still has to make */
        unsigned maps;   /* mappings, and entries whose `of` this one is */
};

struct mapping {
        UT_hash_handle hh;
        CUdeviceptr base; /* key */
        size_t bytes;
        struct memory *memory;
};

struct request {
        CUmemGenericAllocationHandle handle;
        size_t bytes;
        const CUmemAllocationProp *prop;
        unsigned long long flags;
};

static struct memory *memories GR_GUARDED_BY(gr_mappings);
static struct mapping *mappings GR_GUARDED_BY(gr_mappings);

static int create_memory(void *arg)
{
        struct request *request = arg;

        return gr_errno_of(gr_real.cuMemCreate(&request->handle, request->bytes, request->prop, request->flags));
}

/* Lock held. */
GR_HELD(gr_mappings) static struct memory *find_memory(CUmemGenericAllocationHandle handle)
{
        struct memory *memory;

        gr_assert_locked(&gr_mappings);
        HASH_FIND(hh, memories, &handle, sizeof(handle), memory);
        return memory;
}

/* Lock held. False: out of memory. */
GR_HELD(gr_mappings) static bool enter_table(struct memory *memory)
{
        gr_assert_locked(&gr_mappings);
        assert(!find_memory(memory->handle)); /* a handle has one entry */
        HASH_ADD(hh, memories, handle, sizeof(memory->handle), memory);
        return memory->hh.tbl != NULL;
}

/* Lock held. */
GR_HELD(gr_mappings) static void forget_unused(struct memory *memory)
{
        gr_assert_locked(&gr_mappings);
        if (memory->refs > 0 || memory->maps > 0)
                return;
        if (memory->of) {
                assert(memory->of->maps > 0 && !memory->of->of);
                memory->of->maps--;
                forget_unused(memory->of); /* that entry has no `of` itself, so this recursion is one level deep */
        } else {
                gr_budget_uncharge(memory->device, memory->kind, memory->bytes);
        }
        free(memory);
}

/* Whether the imported memory can be this memory of the process, by device and size. */
static bool may_be(const struct memory *import, const struct memory *memory, size_t bytes)
{
        return memory->exported && memory->device == import->device && memory->bytes == bytes;
}

/*
 * Lock held. Counts imported memory at its first mapping, which tells how large it is. Where the memory is this
 * process's own, the import is tied to the entry that is charged for it. That cannot be told among several exports of
 * one size, but any of them will do, as only their sum counts. Where all of them were released, the memory is charged
 * anew.
 */
GR_HELD(gr_mappings) static void import_mapped(struct memory *import, size_t bytes)
{
        struct memory *memory = NULL, *tmp, *found = NULL;

        gr_assert_locked(&gr_mappings);
        if (import->bytes || import->of || (!import->own_import && import->kind != GR_MEMORY_IMPORTED))
                return;
        if (import->own_import) {
                HASH_ITER (hh, memories, memory, tmp)
                        if (!found && may_be(import, memory, bytes))
                                found = memory;
                for (struct mapping *at = mappings; at && !found; at = at->hh.next)
                        if (may_be(import, at->memory, bytes))
                                found = at->memory;
        }
        if (found) {
                assert(found != import && !found->of);
                import->of = found;
                found->maps++;
        } else {
                gr_budget_force(import->device, import->kind, bytes);
                import->bytes = bytes;
                import->exported = import->own_import; /* the same descriptor may be imported again */
        }
}

GR_EXPORT CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                                       const CUmemAllocationProp *prop, unsigned long long flags)
{
        GR_PASS_DEEP;
        struct request request = {.bytes = bytes, .prop = prop, .flags = flags};
        enum gr_memory_kind kind = GR_MEMORY_MAPPED;
        struct gr_device *device = NULL;
        struct memory *memory, *stale;
        GR_KEEP_ERRNO;
        int rc;
        GR_NO_CANCEL;

        if (!gr_shim_ready() || !handle || !prop || bytes == 0)
                return GR_REAL(cuMemCreate, handle, bytes, prop, flags);
        switch (prop->location.type) {
        case CU_MEM_LOCATION_TYPE_DEVICE:
                device = gr_device_use(prop->location.id);
                break;
        case CU_MEM_LOCATION_TYPE_HOST:
        case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
                device = gr_core.host;
                kind = GR_MEMORY_HOST;
                break;
        default:
                break;
        }
        /* Arguments that the driver refuses must get the driver's error code, also at the limit. */
        if (!device || !gr_real.cuMemCreate || flags || bytes % GR_PAGE_BYTES ||
            prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
                return GR_REAL(cuMemCreate, handle, bytes, prop, flags);
        memory = calloc(1, sizeof(*memory));
        rc = memory ? gr_charge_accounted(&gr_core, device, gr_context_current(), kind, bytes, create_memory, &request)
                    : -ENOMEM;
        if (rc) {
                free(memory);
                return gr_result(rc);
        }
        *memory = (struct memory){.handle = request.handle, .device = device, .kind = kind, .bytes = bytes, .refs = 1};
        gr_lock(&gr_mappings);
        stale = find_memory(memory->handle); /* released by a call that no hook has seen */
        if (stale) {
                HASH_DEL(memories, stale);
                stale->refs = 0;
                forget_unused(stale);
        }
        if (enter_table(memory)) {
                *handle = request.handle;
        } else { /* no entry for it: its release would not be noticed */
                gr_real.cuMemRelease(request.handle);
                gr_budget_uncharge(device, kind, bytes);
                free(memory);
                rc = -ENOMEM;
        }
        gr_unlock(&gr_mappings);
        return gr_result(rc);
}

GR_EXPORT CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle)
{
        GR_PASS_DEEP;
        struct memory *memory;
        CUresult result;
        GR_NO_CANCEL;

        if (!gr_shim_ready())
                return GR_REAL(cuMemRelease, handle);
        gr_lock(&gr_mappings);
        result = GR_REAL(cuMemRelease, handle);
        GR_KEEP_ERRNO;
        memory = result == CUDA_SUCCESS ? find_memory(handle) : NULL;
        if (memory) {
                assert(memory->refs > 0); /* as it is in the table */
                if (--memory->refs == 0)
                        HASH_DEL(memories, memory);
                forget_unused(memory);
        }
        gr_unlock(&gr_mappings);
        return result;
}

/* Lock held. */
GR_HELD(gr_mappings) static void remove_mapping(struct mapping *mapping)
{
        gr_assert_locked(&gr_mappings);
        assert(mapping->memory->maps > 0);
        HASH_DEL(mappings, mapping);
        mapping->memory->maps--;
        forget_unused(mapping->memory);
        free(mapping);
}

/* Lock held. Enters what the driver has mapped at base. False: out of memory. */
GR_HELD(gr_mappings) static bool enter_mapping(struct memory *memory, CUdeviceptr base, size_t bytes)
{
        struct mapping *mapping = calloc(1, sizeof(*mapping)), *stale;

        gr_assert_locked(&gr_mappings);
        if (!mapping)
                return false;
        HASH_FIND(hh, mappings, &base, sizeof(base), stale);
        *mapping = (struct mapping){.base = base, .bytes = bytes, .memory = memory};
        HASH_ADD(hh, mappings, base, sizeof(mapping->base), mapping);
        if (!mapping->hh.tbl) {
                free(mapping);
                return false;
        }
        memory->maps++;
        if (stale)
                remove_mapping(stale);
        import_mapped(memory, bytes);
        return true;
}

/*
 * Whether ptr is in memory that is mapped for the library: a segment of this process, or a block of another one's. The
 * program has it from cuMemAlloc, whose memory the calls for mapped memory refuse with CUDA_ERROR_INVALID_VALUE; and
 * what is mapped there serves other blocks, too.
 */
static bool is_of_segment(CUdeviceptr ptr)
{
        struct gr_segment_import import;
        struct gr_segments_place place;

        return gr_segments_find(&gr_core, ptr, &place) == 0 || gr_segment_import_find(ptr, &import) == 0;
}

GR_EXPORT CUresult CUDAAPI cuMemMap(CUdeviceptr base, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                                    unsigned long long flags)
{
        GR_PASS_DEEP;
        struct memory *memory;
        CUresult result;
        GR_NO_CANCEL;

        if (!gr_shim_ready())
                return GR_REAL(cuMemMap, base, bytes, offset, handle, flags);
        /* The driver would map it where nothing of the segment is mapped now. */
        if (gr_real.cuMemMap && is_of_segment(base))
                return CUDA_ERROR_INVALID_VALUE;
        gr_lock(&gr_mappings);
        result = GR_REAL(cuMemMap, base, bytes, offset, handle, flags);
        GR_KEEP_ERRNO;
        memory = result == CUDA_SUCCESS ? find_memory(handle) : NULL;
        if (memory && !enter_mapping(memory, base, bytes)) { /* no entry for it: its unmapping would not be noticed */
                gr_real.cuMemUnmap(base, bytes);
                result = CUDA_ERROR_OUT_OF_MEMORY;
        }
        gr_unlock(&gr_mappings);
        return gr_real_given(result, &base);
}

/* Lock held. The driver has unmapped the range. */
GR_HELD(gr_mappings) static void range_unmapped(CUdeviceptr base, size_t bytes)
{
        struct mapping *mapping, *tmp;
        CUdeviceptr at = base;

        gr_assert_locked(&gr_mappings);
        /* The driver unmaps whole mappings only, so the next one begins where the last one ends. */
        while (at - base < bytes) {
                HASH_FIND(hh, mappings, &at, sizeof(at), mapping);
                if (!mapping)
                        break;
                at += mapping->bytes;
                remove_mapping(mapping);
        }
        if (at - base >= bytes)
                return;
        /* The range has a hole, or a mapping that is not in the table: search all mappings. */
        HASH_ITER (hh, mappings, mapping, tmp)
                if (mapping->base - base < bytes)
                        remove_mapping(mapping);
}

GR_EXPORT CUresult CUDAAPI cuMemUnmap(CUdeviceptr base, size_t bytes)
{
        GR_PASS_DEEP;
        CUresult result;
        GR_NO_CANCEL;

        if (!gr_shim_ready())
                return GR_REAL(cuMemUnmap, base, bytes);
        /* For a range past the end of all addresses the driver says success if anything is mapped, as a segment is. */
        if (gr_real.cuMemUnmap && (is_of_segment(base) || base + bytes < base))
                return CUDA_ERROR_INVALID_VALUE;
        gr_lock(&gr_mappings);
        result = GR_REAL(cuMemUnmap, base, bytes);
        GR_KEEP_ERRNO;
        if (result == CUDA_SUCCESS)
                range_unmapped(base, bytes);
        gr_unlock(&gr_mappings);
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMemAddressFree(CUdeviceptr base, size_t bytes)
{
        GR_PASS_DEEP;

        if (gr_shim_ready() && gr_real.cuMemAddressFree && is_of_segment(base))
                return CUDA_ERROR_INVALID_VALUE;
        return GR_REAL(cuMemAddressFree, base, bytes);
}

GR_EXPORT CUresult CUDAAPI cuMemSetAccess(CUdeviceptr base, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
        GR_PASS_DEEP;

        if (gr_shim_ready() && gr_real.cuMemSetAccess && is_of_segment(base))
                return CUDA_ERROR_INVALID_VALUE;
        return GR_REAL(cuMemSetAccess, base, bytes, access, count);
}

/* Of memory from cuMemAlloc the driver says that nobody may access it. */
GR_EXPORT CUresult CUDAAPI cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr)
{
        GR_PASS_GATE;
        CUresult result = GR_REAL(cuMemGetAccess, flags, location, gr_query_unless_cached(ptr));

        if (result == CUDA_SUCCESS && gr_shim_ready() && is_of_segment(ptr))
                *flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
        GR_PASS_DEEP;
        CUdeviceptr at = (CUdeviceptr)(uintptr_t)address;
        CUmemGenericAllocationHandle retained;
        struct memory *memory;
        CUresult result;
        GR_NO_CANCEL;

        if (gr_shim_ready() && is_of_segment(at))
                return CUDA_ERROR_INVALID_VALUE;
        if (!gr_shim_ready() || !handle)
                return GR_REAL(cuMemRetainAllocationHandle, handle, address);
        gr_lock(&gr_mappings);
        result = GR_REAL(cuMemRetainAllocationHandle, &retained, address);
        GR_KEEP_ERRNO;
        memory = result == CUDA_SUCCESS ? find_memory(retained) : NULL;
        if (memory) {
                memory->refs++;
        } else if (result == CUDA_SUCCESS) {
                /* Its handle was released, and only mappings keep it alive: now it has a handle again. */
                for (struct mapping *mapping = mappings; mapping && !memory; mapping = mapping->hh.next)
                        if (at - mapping->base < mapping->bytes)
                                memory = mapping->memory;
                if (memory && memory->refs == 0) {
                        memory->handle = retained;
                        memory->refs = enter_table(memory);
                        if (!memory->refs) { /* no entry for it: its release would not be noticed */
                                gr_real.cuMemRelease(retained);
                                result = CUDA_ERROR_OUT_OF_MEMORY;
                        }
                }
        }
        if (result == CUDA_SUCCESS)
                *handle = retained;
        gr_unlock(&gr_mappings);
        return result;
}

/*
 * A new entry for imported memory, not in the table; NULL: the memory is not on a device, or the host has no memory for
 * the entry.
 */
static struct memory *new_import(CUmemGenericAllocationHandle handle, void *os_handle, CUmemAllocationHandleType type)
{
        CUmemAllocationProp prop;
        struct gr_device *device;
        struct memory *memory;

        if (!gr_real.cuMemGetAllocationPropertiesFromHandle ||
            gr_real.cuMemGetAllocationPropertiesFromHandle(&prop, handle) != CUDA_SUCCESS ||
            prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
                return NULL;
        device = gr_device_get(prop.location.id);
        memory = device ? calloc(1, sizeof(*memory)) : NULL;
        if (!memory)
                return NULL;
        *memory = (struct memory){.handle = handle, .device = device, .kind = GR_MEMORY_IMPORTED, .refs = 1};
        memory->own_import =
                type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && gr_ipc_is_own((int)(intptr_t)os_handle);
        if (memory->own_import)
                memory->kind = GR_MEMORY_MAPPED;
        return memory;
}

/*
 * Each import gets an entry of its own, also under a handle that is in the table already, and each release removes one.
 */
GR_EXPORT CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle,
                                                          CUmemAllocationHandleType type)
{
        GR_PASS_DEEP;
        struct memory *fresh;
        GR_KEEP_ERRNO;
        CUresult result;
        GR_NO_CANCEL;

        result = GR_REAL(cuMemImportFromShareableHandle, handle, os_handle, type);
        if (result != CUDA_SUCCESS || !gr_shim_ready())
                return result;
        gr_ipc_begin_sharing();
        fresh = new_import(*handle, os_handle, type);
        gr_lock(&gr_mappings);
        if (fresh && enter_table(fresh))
                fresh = NULL;
        gr_unlock(&gr_mappings);
        free(fresh);
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                                        CUmemAllocationHandleType type, unsigned long long flags)
{
        GR_PASS_DEEP;
        GR_NO_CANCEL;
        CUresult result = GR_REAL(cuMemExportToShareableHandle, shareable, handle, type, flags);
        struct memory *memory;
        bool own;

        if (result != CUDA_SUCCESS || !gr_shim_ready())
                return result;
        gr_ipc_begin_sharing();
        if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
                return result;
        gr_lock(&gr_mappings);
        memory = find_memory(handle);
        own = memory && memory->kind != GR_MEMORY_IMPORTED;
        if (own)
                memory->exported = true;
        gr_unlock(&gr_mappings);
        if (own)
                gr_ipc_mark(*(int *)shareable);
        return result;
}
