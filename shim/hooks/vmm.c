/*
 * Mapped memory (VMM): charged when created, by the location in its properties, never by the current context. It lives
 * as long as anything holds it: each handle that the program has to release, and each mapping.
 *
 * Imported handles are not charged: their memory belongs to the exporter's account. What of them is mapped is told, as
 * only a mapping says how large the memory is; the process's own, come back under another handle, is in its account
 * already. (What comes by a fabric handle counts as another's.) Not covered: memory kept alive only by a descriptor of
 * the program's own export or by a sparse array.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "base/hash.h"
#include "shim.h"

struct memory {
        UT_hash_handle hh;
        CUmemGenericAllocationHandle handle; /* key; in the table while refs > 0 */
        struct gr_device *device;
        enum gr_memory_kind kind;
        uint64_t bytes;    /* of IMPORTED 0 until mapped */
        struct memory *of; /* own memory imported again: what is charged for it, once found; counts among its maps */
        bool exported, own_import;
        unsigned refs; /* releases that the program owes */
        unsigned maps;
        unsigned releasing; /* threads that are giving back a handle, and look here again afterwards */
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

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows; no call of the driver under it */
static struct memory *memories;
static struct mapping *mappings;

static int create(void *arg)
{
        struct request *request = arg;

        return gr_errno(gr_real.cuMemCreate(&request->handle, request->bytes, request->prop, request->flags));
}

/* Lock held. */
static struct memory *find(CUmemGenericAllocationHandle handle)
{
        struct memory *memory;

        HASH_FIND(hh, memories, &handle, sizeof(handle), memory);
        return memory;
}

/* Lock held. False: out of memory. */
static bool enter_table(struct memory *memory)
{
        HASH_ADD(hh, memories, handle, sizeof(memory->handle), memory);
        return memory->hh.tbl != NULL;
}

/* Lock held. */
static void drop_if_unused(struct memory *memory)
{
        if (memory->refs > 0 || memory->maps > 0 || memory->releasing > 0)
                return;
        if (memory->of) {
                memory->of->maps--;
                drop_if_unused(memory->of); /* charged itself, so this goes no deeper */
        } else {
                gr_accounted_uncharge(memory->device, memory->kind, memory->bytes);
        }
        free(memory);
}

static bool may_be(const struct memory *import, const struct memory *memory, size_t bytes)
{
        return memory->exported && memory->device == import->device && memory->bytes == bytes;
}

/*
 * Lock held. A mapping says at last how large imported memory is. The process's own holds on to what is charged for it:
 * of several of one size any will do, as their sum is what counts. Where all that was released, it is charged anew.
 */
static void import_mapped(struct memory *import, size_t bytes)
{
        struct memory *memory = NULL, *tmp, *found = NULL;

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
                import->of = found;
                found->maps++;
        } else {
                gr_budget_force(import->device, import->kind, bytes);
                import->bytes = bytes;
                import->exported = import->own_import; /* others may come from the same descriptor */
        }
}

GR_EXPORT CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                                       const CUmemAllocationProp *prop, unsigned long long flags)
{
        struct request request = {.bytes = bytes, .prop = prop, .flags = flags};
        enum gr_memory_kind kind = GR_MEMORY_MAPPED;
        struct gr_device *device = NULL;
        struct gr_context *context;
        struct memory *memory, *stale;
        int saved_errno = errno, rc;

        if (!gr_shim_ready() || !handle || !prop || bytes == 0)
                return GR_REAL(cuMemCreate, handle, bytes, prop, flags);
        switch (prop->location.type) {
        case CU_MEM_LOCATION_TYPE_DEVICE:
                device = gr_device_use(prop->location.id);
                break;
        case CU_MEM_LOCATION_TYPE_HOST:
        case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
                device = &gr_core.host;
                kind = GR_MEMORY_HOST;
                break;
        default:
                break;
        }
        /* What the driver refuses for its arguments it refuses with its own code, also at the limit. */
        if (!device || !gr_real.cuMemCreate || flags || bytes % GR_PAGE_BYTES ||
            prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
                return GR_REAL(cuMemCreate, handle, bytes, prop, flags);
        context = gr_current_context();
        if (context && context->device != device)
                context = NULL;
        rc = gr_accounted_charge(&gr_core, device, context, kind, bytes, create, &request);
        if (rc)
                goto out;
        *handle = request.handle;
        memory = calloc(1, sizeof(*memory));
        if (!memory) { /* nobody would find it when it is released: not counted */
                gr_accounted_uncharge(device, kind, bytes);
                goto out;
        }
        *memory = (struct memory){.handle = request.handle, .device = device, .kind = kind, .bytes = bytes, .refs = 1};
        pthread_mutex_lock(&lock);
        stale = find(memory->handle); /* released behind our back */
        if (stale) {
                HASH_DEL(memories, stale);
                stale->refs = 0;
                drop_if_unused(stale);
        }
        if (!enter_table(memory)) {
                gr_accounted_uncharge(device, kind, bytes);
                free(memory);
        }
        pthread_mutex_unlock(&lock);
out:
        errno = saved_errno;
        return gr_result(rc);
}

GR_EXPORT CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle)
{
        struct memory *memory;
        CUresult result;
        int saved_errno;

        if (!gr_shim_ready())
                return GR_REAL(cuMemRelease, handle);
        /* Off the table first: afterwards another thread may get the same handle. */
        pthread_mutex_lock(&lock);
        memory = find(handle);
        if (memory) {
                memory->releasing++;
                if (--memory->refs == 0)
                        HASH_DEL(memories, memory);
        }
        pthread_mutex_unlock(&lock);
        result = GR_REAL(cuMemRelease, handle);
        if (!memory)
                return result;
        saved_errno = errno;
        pthread_mutex_lock(&lock);
        memory->releasing--;
        if (result != CUDA_SUCCESS && ++memory->refs == 1)
                enter_table(memory);
        drop_if_unused(memory);
        pthread_mutex_unlock(&lock);
        errno = saved_errno;
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMemMap(CUdeviceptr base, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                                    unsigned long long flags)
{
        struct mapping *mapping, *stale;
        struct memory *memory;
        CUresult result;
        int saved_errno;

        gr_shim_ready();
        result = gr_given(GR_REAL(cuMemMap, base, bytes, offset, handle, flags), &base);
        if (result != CUDA_SUCCESS || !gr_shim_ready())
                return result;
        saved_errno = errno;
        pthread_mutex_lock(&lock);
        memory = find(handle);
        mapping = memory ? calloc(1, sizeof(*mapping)) : NULL;
        if (mapping) {
                HASH_FIND(hh, mappings, &base, sizeof(base), stale);
                if (stale) {
                        HASH_DEL(mappings, stale);
                        stale->memory->maps--;
                        drop_if_unused(stale->memory);
                        free(stale);
                }
                *mapping = (struct mapping){.base = base, .bytes = bytes, .memory = memory};
                HASH_ADD(hh, mappings, base, sizeof(mapping->base), mapping);
        }
        if (memory && (!mapping || !mapping->hh.tbl))
                free(mapping); /* uncharged when released, a little early */
        else if (mapping)
                memory->maps++;
        if (memory)
                import_mapped(memory, bytes);
        pthread_mutex_unlock(&lock);
        errno = saved_errno;
        return result;
}

/* Lock held. Takes the mappings in the range off the table, as a list; with put_back, into it again. */
static struct mapping *take_mappings(CUdeviceptr base, size_t bytes)
{
        struct mapping *taken = NULL, *mapping, *tmp;
        CUdeviceptr at = base;

        /* The driver wants whole mappings, so one follows the other. */
        while (at - base < bytes) {
                HASH_FIND(hh, mappings, &at, sizeof(at), mapping);
                if (!mapping)
                        break;
                at += mapping->bytes;
                HASH_DEL(mappings, mapping);
                mapping->hh.next = taken;
                taken = mapping;
        }
        if (at - base >= bytes)
                return taken;
        /* A mapping of imported memory, or a hole: look at all of them. */
        HASH_ITER (hh, mappings, mapping, tmp) {
                if (mapping->base - base >= bytes)
                        continue;
                HASH_DEL(mappings, mapping);
                mapping->hh.next = taken;
                taken = mapping;
        }
        return taken;
}

GR_EXPORT CUresult CUDAAPI cuMemUnmap(CUdeviceptr base, size_t bytes)
{
        struct mapping *taken, *next;
        CUresult result;
        int saved_errno;

        if (!gr_shim_ready())
                return GR_REAL(cuMemUnmap, base, bytes);
        pthread_mutex_lock(&lock);
        taken = take_mappings(base, bytes);
        pthread_mutex_unlock(&lock);
        result = GR_REAL(cuMemUnmap, base, bytes);
        saved_errno = errno;
        pthread_mutex_lock(&lock);
        for (; taken; taken = next) {
                next = taken->hh.next;
                if (result == CUDA_SUCCESS) {
                        taken->memory->maps--;
                        drop_if_unused(taken->memory);
                        free(taken);
                } else {
                        HASH_ADD(hh, mappings, base, sizeof(taken->base), taken);
                }
        }
        pthread_mutex_unlock(&lock);
        errno = saved_errno;
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
        CUdeviceptr at = (CUdeviceptr)(uintptr_t)address;
        struct memory *memory;
        CUresult result;
        int saved_errno;

        /* Memory from cuMemAlloc has no handle, and ours is to look the same. */
        if (gr_shim_ready() && gr_split_find(&gr_core, at, &(struct gr_split_place){0}) == 0)
                return CUDA_ERROR_INVALID_VALUE;
        result = GR_REAL(cuMemRetainAllocationHandle, handle, address);
        if (result != CUDA_SUCCESS || !gr_shim_ready())
                return result;
        saved_errno = errno;
        pthread_mutex_lock(&lock);
        memory = find(*handle);
        if (memory) {
                memory->refs++;
        } else {
                /* Released already and alive by its mappings only: it has a handle again. */
                for (struct mapping *mapping = mappings; mapping && !memory; mapping = mapping->hh.next)
                        if (at - mapping->base < mapping->bytes)
                                memory = mapping->memory;
                if (memory && memory->refs == 0) {
                        memory->handle = *handle;
                        memory->refs = 1;
                        enter_table(memory);
                }
        }
        pthread_mutex_unlock(&lock);
        errno = saved_errno;
        return result;
}

/* What to enter for memory under a handle that we do not know; a device's only. */
static struct memory *imported(CUmemGenericAllocationHandle handle, void *os_handle, CUmemAllocationHandleType type)
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
                type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && gr_export_is_own((int)(intptr_t)os_handle);
        if (memory->own_import)
                memory->kind = GR_MEMORY_MAPPED;
        return memory;
}

/* Our own may come back as the handle it has. */
GR_EXPORT CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle,
                                                          CUmemAllocationHandleType type)
{
        struct memory *memory, *fresh;
        int saved_errno = errno;
        CUresult result;

        gr_shim_ready();
        result = GR_REAL(cuMemImportFromShareableHandle, handle, os_handle, type);
        if (result != CUDA_SUCCESS || !gr_shim_ready())
                return result;
        gr_memory_shared();
        fresh = imported(*handle, os_handle, type);
        pthread_mutex_lock(&lock);
        memory = find(*handle);
        if (memory)
                memory->refs++;
        else if (fresh && enter_table(fresh))
                fresh = NULL;
        pthread_mutex_unlock(&lock);
        free(fresh);
        errno = saved_errno;
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                                        CUmemAllocationHandleType type, unsigned long long flags)
{
        CUresult result = GR_REAL(cuMemExportToShareableHandle, shareable, handle, type, flags);
        struct memory *memory;
        bool own;

        if (result != CUDA_SUCCESS || !gr_shim_ready())
                return result;
        gr_memory_shared();
        if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
                return result;
        pthread_mutex_lock(&lock);
        memory = find(handle);
        own = memory && memory->kind != GR_MEMORY_IMPORTED;
        if (own)
                memory->exported = true;
        pthread_mutex_unlock(&lock);
        if (own)
                gr_export_mark(*(int *)shareable);
        return result;
}
