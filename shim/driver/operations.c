/*
 * The real driver as core/ sees it (struct gr_driver). Only functions of the driver are called, never the runtime: a
 * framework must not find an error in the runtime that this library caused. Recording, waiting for and querying an
 * event, cuMemFree and cuMemFreeAsync need no current context; creating events and streams, cuMemGetInfo and
 * cuCtxSynchronize do (docs/measurements.md, current-context).
 */
#include "driver/operations.h"

#include <assert.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "account/budget.h"
#include "base/hash.h"
#include "base/no_cancel.h"
#include "driver/real.h"

#define DRAIN_BYTES    4096
#define READY_TRIES    100
#define READY_PAUSE_NS UINT64_C(1000000)

/* This library's stream in a context, for memory that is returned: non-blocking, so it delays no other stream. */
struct release_stream {
        UT_hash_handle hh;
        CUcontext context; /* key */
        CUstream stream;
};

static struct gr_lock streams_lock = GR_LOCK_INIT(GR_RANK_STREAMS);
static struct release_stream *streams GR_GUARDED_BY(streams_lock);

struct gr_driver gr_driver;
static const struct gr_operations_callbacks *callbacks;

/* Whether the driver refused a call because of a capture. */
static bool because_of_capture(CUresult result)
{
        return result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && result <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
}

int gr_errno_of(CUresult result)
{
        switch (result) {
        case CUDA_SUCCESS:
                return 0;
        case CUDA_ERROR_OUT_OF_MEMORY:
                return -ENOMEM;
        case CUDA_ERROR_NOT_READY:
                return -EAGAIN;
        default:
                return gr_driver_error((int)result);
        }
}

/* As gr_errno_of, for calls that may be repeated later: -EBUSY where the driver refuses because of a capture. */
static int to_errno_or_busy(CUresult result)
{
        return because_of_capture(result) ? -EBUSY : gr_errno_of(result);
}

CUresult gr_result_of(int rc)
{
        assert(rc < 0);
        switch (rc) {
        case -ENOMEM:
        case -EDQUOT:
                return CUDA_ERROR_OUT_OF_MEMORY;
        case -EALREADY: /* the driver's answer to a pointer that is freed twice */
                return CUDA_ERROR_INVALID_VALUE;
        default:
                return gr_driver_code(rc) ? (CUresult)gr_driver_code(rc) : CUDA_ERROR_UNKNOWN;
        }
}

#define UNKNOWN_MODE ((CUstreamCaptureMode)-1)

/* Tried twice, because the call may answer with the error of an earlier one (cuda.h). False: nothing has changed. */
static bool exchange_mode(CUstreamCaptureMode *mode)
{
        __typeof__(cuThreadExchangeStreamCaptureMode) *exchange = gr_real.cuThreadExchangeStreamCaptureMode;

        return exchange && (exchange(mode) == CUDA_SUCCESS || exchange(mode) == CUDA_SUCCESS);
}

CUstreamCaptureMode gr_operations_relax_captures(void)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;

        return exchange_mode(&mode) ? mode : UNKNOWN_MODE;
}

void gr_operations_restore_captures(CUstreamCaptureMode mode)
{
        if (mode != UNKNOWN_MODE)
                exchange_mode(&mode);
}

CUstreamCaptureMode gr_operations_capture_mode(void)
{
        CUstreamCaptureMode mode = gr_operations_relax_captures();

        gr_operations_restore_captures(mode);
        return mode == UNKNOWN_MODE ? CU_STREAM_CAPTURE_MODE_GLOBAL : mode;
}

bool gr_operations_allow_in_captures(CUstreamCaptureMode *ret_mode)
{
        bool open = gr_gate_is_open(&gr_core.gate);

        if (!open || gr_core.config.pool == GR_POOL_NONE)
                return false;
        *ret_mode = gr_operations_relax_captures();
        return true;
}

/*
 * While the driver still finishes work of its own, it may answer NOT_READY to a call that it accepts a moment later
 * (seen with cuMemSetAccess). So such a call is repeated, READY_TRIES times at most. False: repeat it.
 */
static bool is_final(CUresult result, unsigned *tries)
{
        if (result != CUDA_ERROR_NOT_READY || ++*tries > READY_TRIES)
                return true;
        gr_driver.sleep_ns(READY_PAUSE_NS);
        return false;
}

#define ONCE_READY(result, call)                                                                                       \
        do {                                                                                                           \
                unsigned tries = 0;                                                                                    \
                                                                                                                       \
                do                                                                                                     \
                        (result) = (call);                                                                             \
                while (!is_final((result), &tries));                                                                   \
        } while (0)

/* As gr_errno_of, for allocations: NOT_READY is -ENOMEM, which makes the ladder try again. */
static int to_errno_of_memory(CUresult result)
{
        return result == CUDA_ERROR_NOT_READY ? -ENOMEM : gr_errno_of(result);
}

/* Makes context current; false where that fails, and then pop_context must not be called. */
static bool push_context(void *context)
{
        return gr_real.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
}

static void pop_context(void)
{
        CUcontext context;

        gr_real.cuCtxPopCurrent_v2(&context);
}

static int driver_mem_alloc(void *context, size_t bytes, uint64_t *ret_ptr)
{
        CUstreamCaptureMode mode;
        CUdeviceptr ptr;
        CUresult result;
        bool relaxed;
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA); /* during the call others would spin on a bin's lock */
        assert(bytes > 0);
        callbacks->taking();
        relaxed = gr_operations_allow_in_captures(&mode);
        ONCE_READY(result, gr_real.cuMemAlloc_v2(&ptr, bytes));
        if (relaxed)
                gr_operations_restore_captures(mode);
        (void)context; /* current already, or the current one is a green context with the same memory */
        if (result == CUDA_SUCCESS) {
                *ret_ptr = ptr;
                callbacks->taken();
        }
        return to_errno_of_memory(result);
}

static int driver_mem_free(uint64_t ptr)
{
        CUstreamCaptureMode mode;
        CUresult result;
        bool relaxed;
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        assert(ptr != 0);
        relaxed = gr_operations_allow_in_captures(&mode);
        result = gr_real.cuMemFree_v2(ptr);
        if (relaxed)
                gr_operations_restore_captures(mode);
        callbacks->going_on();
        return gr_errno_of(result);
}

/* The stream for returning memory of context, made at its first use. NULL: it could not be made. */
static CUstream release_stream(void *context)
{
        struct release_stream *entry;
        CUstream stream = NULL;

        assert(context);
        gr_lock(&streams_lock);
        HASH_FIND_PTR(streams, &context, entry);
        if (entry) {
                stream = entry->stream;
        } else if (push_context(context)) {
                entry = calloc(1, sizeof(*entry));
                if (entry && gr_real.cuStreamCreate(&entry->stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS) {
                        entry->context = context;
                        HASH_ADD_PTR(streams, context, entry);
                        stream = entry->stream;
                        if (!entry->hh.tbl) /* used for this call only, then leaked */
                                free(entry);
                } else {
                        free(entry);
                }
                pop_context();
        }
        gr_unlock(&streams_lock);
        return stream;
}

CUstream gr_operations_stream(CUcontext context)
{
        return release_stream(context);
}

void gr_operations_context_gone(CUcontext context)
{
        struct release_stream *entry;

        gr_lock(&streams_lock);
        HASH_FIND_PTR(streams, &context, entry);
        if (entry) {
                HASH_DEL(streams, entry);
                free(entry);
        }
        gr_unlock(&streams_lock);
}

/*
 * cuMemFreeAsync also accepts memory of cuMemAlloc. On a stream of this library it waits for no other stream, and once
 * that stream is synchronised the driver has the memory (docs/measurements.md, release-beside-kernel).
 */
static int driver_mem_release(void *context, const uint64_t *ptrs, size_t count, size_t *ret_done)
{
        CUstreamCaptureMode mode;
        CUresult result = CUDA_SUCCESS;
        CUstream stream;
        size_t done = 0;
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        assert(count > 0);
        *ret_done = 0;
        if (!gr_real.cuMemFreeAsync)
                return -ENOTSUP;
        mode = gr_operations_relax_captures();
        stream = release_stream(context);
        if (!stream) {
                gr_operations_restore_captures(mode);
                return -ENOTSUP;
        }
        while (done < count && result == CUDA_SUCCESS) {
                result = gr_real.cuMemFreeAsync(ptrs[done], stream);
                done += result == CUDA_SUCCESS;
                callbacks->going_on();
        }
        /*
         * The driver has the memory only once the host has waited for the frees, and no later call waits for them by
         * itself. Twice: the first may only report an earlier error.
         */
        if (done > 0 && gr_real.cuStreamSynchronize(stream) != CUDA_SUCCESS)
                gr_real.cuStreamSynchronize(stream);
        gr_operations_restore_captures(mode);
        assert(done <= count);
        *ret_done = done;
        return gr_errno_of(result);
}

/* gr_operations_fill (to is NULL) and gr_operations_read. */
static int fill_or_read(CUcontext context, uint64_t ptr, unsigned char byte, void *to, size_t bytes)
{
        CUstreamCaptureMode mode;
        CUresult result;
        CUstream stream;
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        if (!gr_real.cuMemsetD8Async || !gr_real.cuMemcpyDtoHAsync_v2)
                return -ENOTSUP;
        mode = gr_operations_relax_captures();
        stream = release_stream(context);
        result = CUDA_ERROR_INVALID_CONTEXT;
        if (stream && push_context(context)) {
                result = to ? gr_real.cuMemcpyDtoHAsync_v2(to, ptr, bytes, stream)
                            : gr_real.cuMemsetD8Async(ptr, byte, bytes, stream);
                if (result == CUDA_SUCCESS)
                        result = gr_real.cuStreamSynchronize(stream);
                pop_context();
        }
        gr_operations_restore_captures(mode);
        callbacks->going_on();
        return gr_errno_of(result);
}

int gr_operations_fill(CUcontext context, uint64_t ptr, unsigned char byte, size_t bytes)
{
        return fill_or_read(context, ptr, byte, NULL, bytes);
}

int gr_operations_read(CUcontext context, uint64_t ptr, void *to, size_t bytes)
{
        assert(to);
        return fill_or_read(context, ptr, 0, to, bytes);
}

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
        if (gr_real.cuDeviceGetCount(&devices) != CUDA_SUCCESS || !push_context(context))
                return -ENOTSUP;
        result = gr_real.cuCtxGetDevice(&dev);
        pop_context();
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
        ONCE_READY(result, gr_real.cuMemSetAccess(ptr, bytes, access, count));
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
CUresult gr_operations_adopt(uint64_t ptr, size_t bytes, int device, struct gr_memory *memory)
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

GR_HELD(gr_mappings) void gr_operations_disown(uint64_t ptr)
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

/* Lock held. Maps memory at ptr and enters it by gr_operations_adopt. On failure nothing is mapped. */
GR_HELD(gr_mappings) static CUresult map_at(uint64_t ptr, size_t bytes, struct gr_memory *memory)
{
        CUresult result;

        gr_assert_locked(&gr_mappings);
        ONCE_READY(result, gr_real.cuMemMap(ptr, bytes, 0, memory->handle, 0));
        if (result == CUDA_SUCCESS) {
                result = gr_operations_adopt(ptr, bytes, memory->device, memory);
                if (result != CUDA_SUCCESS)
                        gr_real.cuMemUnmap(ptr, bytes);
        }
        return result;
}

static CUresult create(struct gr_memory *memory)
{
        CUmemAllocationProp prop = mapped_prop(memory->device);
        CUresult result;

        ONCE_READY(result, gr_real.cuMemCreate(&memory->handle, memory->bytes, &prop, 0));
        return result;
}

/* Lock held. The driver takes the memory back once it is mapped nowhere. */
GR_HELD(gr_mappings) static void release(struct gr_memory *memory)
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
        atomic_fetch_sub(&gr_core.devices[memory->device].asleep_bytes, memory->bytes);
}

/* Lock held. Unmaps what map_at has mapped; released: core/ gives the memory up. */
GR_HELD(gr_mappings) static CUresult unmap_at(uint64_t ptr, size_t bytes, bool released)
{
        struct gr_memory *memory = mapping_at(ptr)->memory;
        CUresult result = CUDA_SUCCESS;

        gr_assert_locked(&gr_mappings);
        if (!memory->host) {
                ONCE_READY(result, gr_real.cuMemUnmap(ptr, bytes));
                if (result != CUDA_SUCCESS)
                        return result;
        } else {
                drop_host(memory);
                adjust_group(memory, 1); /* core/ uncharges it now, as any other */
        }
        if (released) {
                release(memory);
                memory->released = true;
        }
        gr_operations_disown(ptr);
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
        callbacks->taking();
        if (!memory) {
                memory = calloc(1, sizeof(*memory));
                if (!memory)
                        return -ENOMEM;
                memory->bytes = bytes;
                memory->device = device;
                result = create(memory);
        }
        if (result == CUDA_SUCCESS) {
                gr_lock(&gr_mappings);
                result = map_at(ptr, bytes, memory);
                if (result != CUDA_SUCCESS && !*handle)
                        release(memory);
                gr_unlock(&gr_mappings);
        }
        if (result != CUDA_SUCCESS && !*handle) {
                free(memory);
        } else if (result == CUDA_SUCCESS && !*handle) {
                *handle = (uint64_t)(uintptr_t)memory;
                callbacks->taken();
        }
        return to_errno_of_memory(result);
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
        bool entered = context && push_context(context);
        CUresult result;

        assert(bytes > 0 && bytes % GR_PAGE_BYTES == 0 && ptr % GR_PAGE_BYTES == 0); /* whole pages */
        gr_lock(&gr_mappings);
        await_move(ptr);
        result = unmap_at(ptr, bytes, handle != 0);
        gr_unlock(&gr_mappings);
        if (entered)
                pop_context();
        gr_operations_restore_captures(mode);
        callbacks->going_on();
        return gr_errno_of(result);
}

void gr_operations_stay(uint64_t ptr, size_t bytes)
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

size_t gr_operations_list(int device, bool asleep, uint64_t **ret_ptrs)
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

struct gr_memory *gr_operations_begin_move(uint64_t ptr, bool asleep)
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

void gr_operations_end_move(struct gr_memory *memory)
{
        gr_lock(&gr_mappings);
        assert(memory->moving);
        memory->moving = false;
        gr_unlock(&gr_mappings);
}

void gr_operations_going_on(void)
{
        callbacks->going_on();
}

CUresult gr_operations_leave(struct gr_memory *memory, void *host)
{
        CUresult result;

        gr_lock(&gr_mappings);
        assert(memory->moving && !memory->host);
        ONCE_READY(result, gr_real.cuMemUnmap(memory->ptr, memory->bytes));
        if (result == CUDA_SUCCESS) {
                release(memory);
                memory->host = host;
                atomic_fetch_add(&gr_core.devices[memory->device].asleep_bytes, memory->bytes);
                adjust_group(memory, -1);
        }
        gr_unlock(&gr_mappings);
        return result;
}

CUresult gr_operations_create_again(struct gr_memory *memory)
{
        const struct gr_group *group = atomic_load(&gr_core.devices[memory->device].group);
        CUresult result;

        assert(memory->moving && memory->host && !memory->handle);
        if (group && group->reserve(group->arg, memory->bytes))
                return CUDA_ERROR_OUT_OF_MEMORY;
        result = create(memory);
        if (result != CUDA_SUCCESS) {
                memory->handle = 0;
                adjust_group(memory, -1);
        }
        return result;
}

CUresult gr_operations_map_again(struct gr_memory *memory)
{
        CUresult result;

        gr_lock(&gr_mappings);
        assert(memory->moving && memory->host && memory->handle);
        ONCE_READY(result, gr_real.cuMemMap(memory->ptr, memory->bytes, 0, memory->handle, 0));
        if (result == CUDA_SUCCESS) {
                result = give_access(memory->ptr, memory->bytes, memory->device);
                if (result != CUDA_SUCCESS)
                        gr_real.cuMemUnmap(memory->ptr, memory->bytes);
        }
        gr_unlock(&gr_mappings);
        return result;
}

void gr_operations_give_up(struct gr_memory *memory, bool mapped)
{
        gr_lock(&gr_mappings);
        assert(memory->moving && memory->host);
        if (mapped)
                gr_real.cuMemUnmap(memory->ptr, memory->bytes);
        if (memory->handle)
                adjust_group(memory, -1);
        release(memory);
        gr_unlock(&gr_mappings);
}

void gr_operations_arrived(struct gr_memory *memory)
{
        gr_lock(&gr_mappings);
        assert(memory->moving && memory->handle);
        drop_host(memory);
        gr_unlock(&gr_mappings);
}

void gr_operations_use_device(int device)
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

GR_HELD(gr_mappings) CUresult gr_operations_export(uint64_t ptr, struct gr_piece *ret_piece, int *ret_fd)
{
        const struct mapping *mapping = mapping_around(ptr);

        if (!mapping || !mapping->memory || !mapping->memory->handle)
                return CUDA_ERROR_NOT_FOUND;
        *ret_piece = mapping->piece;
        return ret_fd ? gr_real.cuMemExportToShareableHandle(ret_fd, mapping->memory->handle,
                                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
                      : CUDA_SUCCESS;
}

static int driver_mem_info(void *context, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes)
{
        size_t free_bytes, total_bytes;
        CUresult result;
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        if (!push_context(context))
                return gr_driver_error(CUDA_ERROR_INVALID_CONTEXT);
        result = gr_real.cuMemGetInfo_v2(&free_bytes, &total_bytes);
        pop_context();
        if (result == CUDA_SUCCESS) {
                *ret_free_bytes = free_bytes;
                *ret_total_bytes = total_bytes;
        }
        return gr_errno_of(result);
}

static int driver_event_create(void *context, void **ret_event)
{
        CUevent event;
        CUresult result;
        GR_NO_CANCEL;

        if (!push_context(context))
                return gr_driver_error(CUDA_ERROR_INVALID_CONTEXT);
        result = gr_real.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
        pop_context();
        if (result == CUDA_SUCCESS)
                *ret_event = event;
        return gr_errno_of(result);
}

static void driver_event_destroy(void *context, void *event)
{
        GR_NO_CANCEL;

        (void)context;
        gr_real.cuEventDestroy_v2(event);
}

static int driver_event_query(void *event)
{
        GR_NO_CANCEL;
        CUstreamCaptureMode mode = gr_operations_relax_captures();
        CUresult result = gr_real.cuEventQuery(event);

        gr_operations_restore_captures(mode);
        return gr_errno_of(result);
}

static int driver_context_record(void *context, void *event)
{
        GR_NO_CANCEL;

        gr_assert_gate_entered(&gr_core.gate); /* or the record could destroy a capture that has just begun */
        return to_errno_or_busy(gr_real.cuCtxRecordEvent(context, event));
}

static int driver_context_wait(void *context, void *event)
{
        GR_NO_CANCEL;

        gr_assert_gate_entered(&gr_core.gate);
        return to_errno_or_busy(gr_real.cuCtxWaitEvent(context, event));
}

static int driver_context_sync(void *context)
{
        CUstreamCaptureMode mode;
        CUresult result;
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        if (!push_context(context))
                return gr_driver_error(CUDA_ERROR_INVALID_CONTEXT);
        mode = gr_operations_relax_captures(); /* a capture in another context must not make this fail */
        result = gr_real.cuCtxSynchronize();
        gr_operations_restore_captures(mode);
        pop_context();
        return to_errno_or_busy(result);
}

/*
 * Drains the context: before it frees pinned memory, the driver waits for every running kernel, whatever is being
 * captured. The page is one of the host, because device memory may be exhausted.
 */
static int driver_context_drain(void *context)
{
        CUstreamCaptureMode mode;
        CUresult result;
        void *page;
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        if (!push_context(context))
                return gr_driver_error(CUDA_ERROR_INVALID_CONTEXT);
        mode = gr_operations_relax_captures();
        result = gr_real.cuMemHostAlloc(&page, DRAIN_BYTES, 0);
        if (result == CUDA_SUCCESS)
                result = gr_real.cuMemFreeHost(page);
        gr_operations_restore_captures(mode);
        pop_context();
        return gr_errno_of(result);
}

/*
 * The memory is known to every context. With unified addressing, which every 64-bit driver has, host and device use one
 * address for it; where they do not, this fails.
 */
static int driver_host_alloc(void *context, size_t bytes, uint64_t *ret_ptr)
{
        CUstreamCaptureMode mode;
        CUdeviceptr ptr = 0;
        CUresult result;
        void *host;
        GR_NO_CANCEL;

        (void)context;
        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        assert(bytes > 0);
        if (!gr_real.cuMemHostAlloc || !gr_real.cuMemHostGetDevicePointer_v2 || !gr_real.cuMemFreeHost)
                return -ENOTSUP;
        mode = gr_operations_relax_captures();
        result = gr_real.cuMemHostAlloc(&host, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
        if (result == CUDA_SUCCESS &&
            (gr_real.cuMemHostGetDevicePointer_v2(&ptr, host, 0) != CUDA_SUCCESS || ptr != (CUdeviceptr)host)) {
                gr_real.cuMemFreeHost(host);
                result = CUDA_ERROR_NOT_SUPPORTED;
        }
        gr_operations_restore_captures(mode);
        if (result == CUDA_SUCCESS)
                *ret_ptr = ptr;
        return gr_errno_of(result);
}

static int driver_host_free(void *context, uint64_t ptr)
{
        CUstreamCaptureMode mode;
        CUresult result;
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        assert(ptr != 0);
        if (!push_context(context))
                return gr_driver_error(CUDA_ERROR_INVALID_CONTEXT);
        mode = gr_operations_relax_captures();
        result = gr_real.cuMemFreeHost((void *)(uintptr_t)ptr);
        gr_operations_restore_captures(mode);
        pop_context();
        return gr_errno_of(result);
}

static void driver_malloc_trim(void)
{
#ifdef __GLIBC__
        malloc_trim(0);
#endif
}

static uint64_t driver_now_ns(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void driver_sleep_ns(uint64_t ns)
{
        struct timespec pause = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA); /* threads that spin on a bin's lock would wait too long */
        callbacks->going_on();
        nanosleep(&pause, NULL);
}

void gr_operations_init(const struct gr_operations_callbacks *who)
{
        bool fences = gr_real.cuCtxRecordEvent && gr_real.cuCtxWaitEvent;
        bool mapped = gr_real.cuMemCreate && gr_real.cuMemRelease && gr_real.cuMemMap && gr_real.cuMemUnmap &&
                      gr_real.cuMemSetAccess && gr_real.cuMemAddressReserve && gr_real.cuMemAddressFree &&
                      gr_real.cuMemGetAllocationGranularity && gr_real.cuMemExportToShareableHandle &&
                      gr_real.cuMemImportFromShareableHandle && gr_real.cuDeviceGetCount &&
                      gr_real.cuDeviceGetAttribute;

        assert(who && who->taking && who->taken && who->going_on);
        callbacks = who;
        gr_driver = (struct gr_driver){
                .mem_alloc = driver_mem_alloc,
                .mem_free = driver_mem_free,
                .mem_release = driver_mem_release,
                .mem_reserve = mapped ? driver_mem_reserve : NULL,
                .mem_unreserve = driver_mem_unreserve,
                .mem_map = driver_mem_map,
                .mem_unmap = driver_mem_unmap,
                .mem_info = driver_mem_info,
                .event_create = driver_event_create,
                .event_destroy = driver_event_destroy,
                .event_query = driver_event_query,
                .context_record = fences ? driver_context_record : NULL,
                .context_wait = fences ? driver_context_wait : NULL,
                .context_sync = driver_context_sync,
                .context_drain =
                        gr_real.cuMemHostAlloc && gr_real.cuMemFreeHost && gr_real.cuThreadExchangeStreamCaptureMode
                                ? driver_context_drain
                                : NULL,
                .host_alloc = driver_host_alloc,
                .host_free = driver_host_free,
                .malloc_trim = driver_malloc_trim,
                .now_ns = driver_now_ns,
                .sleep_ns = driver_sleep_ns,
        };
}
