#include "hooks/segment_import.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <utlist.h>

#include "base/no_cancel.h"
#include "device/device.h"
#include "driver/mapped_memory.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "hooks/segment_export.h"
#include "system/messages.h"
#include "system/platform.h"

#define TRIES    2 /* of what may fail for lack of memory or of descriptors */
#define PAUSE_NS UINT64_C(10000000)
#define OPEN_NS  UINT64_C(10000000000) /* longest wait for the exporter's answer, and for each piece */

/* The state of an entry. While it is being opened or closed, only the thread that does so may change it. */
enum opening_state { OPENING, OPEN, CLOSING };

struct opening {
        struct opening *prev, *next;
        struct gr_segment_handle handle;
        struct gr_segment_import import;
        CUdeviceptr at;   /* where the first piece begins, or the allocation */
        size_t all_bytes; /* of all pieces; 0: it is an allocation, opened by the driver */
        unsigned count;   /* how often it is open */
        enum opening_state state;
        bool ended; /* the context has been destroyed meanwhile */
};

static struct gr_lock table_lock = GR_LOCK_INIT(GR_RANK_IMPORTS);
static pthread_cond_t state_changed = PTHREAD_COND_INITIALIZER; /* of an opening */
static struct opening *openings GR_GUARDED_BY(table_lock);
static _Atomic size_t opening_count;

bool gr_segment_import_made(const CUipcMemHandle *handle)
{
        return memcmp(handle, &(uint64_t){GR_SEGMENT_MAGIC}, sizeof(uint64_t)) == 0;
}

/* The ordinal of the device with this UUID; -1: not seen here. */
static int device_with_uuid(const unsigned char uuid[16])
{
        CUuuid seen;
        int count = 0;

        if (!gr_real.cuDeviceGetUuid_v2 || !gr_real.cuDeviceGetCount ||
            gr_real.cuDeviceGetCount(&count) != CUDA_SUCCESS)
                return -1;
        for (int i = 0; i < count; i++)
                if (gr_real.cuDeviceGetUuid_v2(&seen, i) == CUDA_SUCCESS && memcmp(&seen, uuid, sizeof(seen)) == 0)
                        return i;
        return -1;
}

/* Maps the memory of a descriptor, which has this many bytes, at the address `at`. */
static CUresult map_piece(CUdeviceptr at, size_t bytes, int fd)
{
        CUmemGenericAllocationHandle memory;
        CUresult result;

        gr_lock(&gr_mappings);
        result = gr_real.cuMemImportFromShareableHandle(&memory, (void *)(intptr_t)fd,
                                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        if (result == CUDA_SUCCESS) {
                result = gr_real.cuMemMap(at, bytes, 0, memory, 0);
                gr_real.cuMemRelease(memory); /* the mapping keeps it */
        }
        gr_unlock(&gr_mappings);
        return result;
}

/*
 * Unmaps mapped_bytes at `at`, and gives the addresses back, all_bytes from there on. adopted: gr_mapped_adopt has
 * succeeded for them.
 */
static CUresult unmap_opening(CUdeviceptr at, size_t mapped_bytes, size_t all_bytes, bool adopted)
{
        CUresult result = CUDA_SUCCESS;

        gr_lock(&gr_mappings);
        for (int tries = 0; mapped_bytes > 0 && tries < TRIES; tries++) {
                result = gr_real.cuMemUnmap(at, mapped_bytes);
                if (result == CUDA_SUCCESS)
                        break;
        }
        if (result == CUDA_SUCCESS && adopted)
                gr_mapped_disown(at);
        if (result == CUDA_SUCCESS)
                gr_real.cuMemAddressFree(at, all_bytes);
        gr_unlock(&gr_mappings);
        return result;
}

/*
 * Receives all pieces and maps them side by side at `at`. *ret_mapped_bytes, written on failure, too: how much was
 * mapped.
 */
static CUresult map_all(int exporter, CUdeviceptr at, size_t all_bytes, size_t *ret_mapped_bytes)
{
        CUresult result = CUDA_SUCCESS;
        size_t mapped = 0;

        while (mapped < all_bytes && result == CUDA_SUCCESS) {
                uint64_t bytes;
                int fd;

                result = CUDA_ERROR_MAP_FAILED;
                if (!gr_message_receive(exporter, &bytes, sizeof(bytes), &fd, gr_platform_now_ns() + OPEN_NS))
                        break;
                if (bytes > 0 && bytes % GR_PAGE_BYTES == 0 && bytes <= all_bytes - mapped)
                        result = map_piece(at + mapped, bytes, fd);
                gr_message_end(fd);
                if (result == CUDA_SUCCESS)
                        mapped += bytes;
        }
        *ret_mapped_bytes = mapped;
        return result;
}

/*
 * Receives and maps all pieces, at new addresses. dev can use them then, and so can all other devices of the process
 * that can reach them.
 */
static CUresult map_for(int exporter, CUdevice dev, struct opening *opening)
{
        size_t mapped = 0;
        CUresult result = gr_real.cuMemAddressReserve(&opening->at, opening->all_bytes, GR_PAGE_BYTES, 0, 0);

        if (result != CUDA_SUCCESS)
                return result;
        result = map_all(exporter, opening->at, opening->all_bytes, &mapped);
        if (result == CUDA_SUCCESS) {
                gr_lock(&gr_mappings);
                result = gr_mapped_adopt(opening->at, opening->all_bytes, dev, NULL);
                gr_unlock(&gr_mappings);
        }
        if (result != CUDA_SUCCESS)
                unmap_opening(opening->at, mapped, opening->all_bytes, false);
        return result;
}

/*
 * Asks the exporter at the other end of the socket for the memory of opening->handle, opens it for the device dev, and
 * writes in opening what it is. *ret_again, on failure: whether another try may succeed.
 */
static CUresult take_memory(int exporter, CUdevice dev, struct opening *opening, uint64_t deadline_ns, bool *ret_again)
{
        struct gr_segment_import *import = &opening->import;
        struct gr_segment_reply reply;
        CUresult result;

        *ret_again = true;
        if (!gr_message_is_trusted(exporter, true))
                return CUDA_ERROR_INVALID_VALUE;
        if (!gr_message_send(exporter, &opening->handle, sizeof(opening->handle), -1, deadline_ns) ||
            !gr_message_receive(exporter, &reply, sizeof(reply), NULL, deadline_ns))
                return CUDA_ERROR_MAP_FAILED;
        if (!reply.good) {
                *ret_again = false;
                return CUDA_ERROR_INVALID_VALUE;
        }
        if (reply.all_bytes && (reply.all_bytes % GR_PAGE_BYTES || reply.offset_bytes >= reply.all_bytes ||
                                opening->handle.bytes > reply.all_bytes - reply.offset_bytes))
                return CUDA_ERROR_MAP_FAILED;
        opening->all_bytes = reply.all_bytes;
        import->ordinal = device_with_uuid(reply.device);
        result = reply.all_bytes ? map_for(exporter, dev, opening)
                                 : gr_real.cuIpcOpenMemHandle_v2(&opening->at, reply.driver,
                                                                 CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        import->base = opening->at + reply.offset_bytes;
        import->bytes = opening->handle.bytes;
        return result;
}

/* Connects to the exporter that the handle names, and takes the memory from it. */
static CUresult fetch_memory(CUdevice dev, struct opening *opening, uint64_t deadline_ns, bool *ret_again)
{
        struct sockaddr_un address;
        socklen_t length = gr_message_address(opening->handle.service, &address);
        CUresult result = CUDA_ERROR_MAP_FAILED;
        int exporter = gr_message_begin(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)), rc;

        *ret_again = true;
        if (exporter < 0)
                return result;
        while ((rc = connect(exporter, (struct sockaddr *)&address, length)) != 0 &&
               (errno == EINTR || errno == EAGAIN) && gr_platform_now_ns() < deadline_ns)
                gr_driver.sleep_ns(PAUSE_NS); /* the exporter has no room for another connection yet */
        if (rc == 0) {
                result = take_memory(exporter, dev, opening, deadline_ns, ret_again);
        } else if (errno == ECONNREFUSED) {
                *ret_again = false;
                result = CUDA_ERROR_INVALID_VALUE;
        }
        gr_message_end(exporter);
        return result;
}

/* Lock held. The entry of a handle, in any context; NULL: there is none. */
GR_HELD(table_lock) static struct opening *find_opening(const struct gr_segment_handle *handle)
{
        struct opening *opening;

        gr_assert_locked(&table_lock);
        DL_FOREACH (openings, opening)
                if (memcmp(&opening->handle, handle, sizeof(*handle)) == 0)
                        return opening;
        return NULL;
}

void gr_segment_import_count(struct gr_device *device, CUcontext context, uint64_t key, uint64_t bytes)
{
        bytes = (bytes + GR_PAGE_BYTES - 1) & ~(uint64_t)(GR_PAGE_BYTES - 1);
        gr_budget_force(device, GR_MEMORY_IMPORTED, bytes);
        /* Where there is no host memory for the entry, the figures lack it. No limit depends on that. */
        (void)gr_accounted_add(gr_core.accounted, device, GR_MEMORY_IMPORTED, key, context, bytes);
}

/* Gives back the memory of an entry, after all work of its context: the driver does not wait when it unmaps. */
static CUresult close_memory(const struct opening *opening)
{
        struct gr_context *context = gr_context_find(&gr_core, opening->import.context);
        int rc = 0;

        if (!opening->all_bytes)
                return gr_real.cuIpcCloseMemHandle(opening->at);
        if (context)
                rc = gr_fence_wait_work(context->fence);
        return rc ? gr_result_of(rc) : unmap_opening(opening->at, opening->all_bytes, opening->all_bytes, true);
}

/* Lock held. Takes an entry off the list, and wakes the threads that wait for it. */
GR_HELD(table_lock) static void leave_table(struct opening *opening)
{
        gr_assert_locked(&table_lock);
        DL_DELETE(openings, opening);
        atomic_fetch_sub(&opening_count, 1);
        pthread_cond_broadcast(&state_changed);
}

/*
 * A new entry for a handle, which this thread must now open. NULL: it is open already, counted once more and described
 * in *ret_import; or *ret_result is an error.
 */
static struct opening *begin_opening(CUcontext context, const struct gr_segment_handle *handle,
                                     struct gr_segment_import *ret_import, CUresult *ret_result)
{
        struct opening *opening;

        *ret_result = CUDA_SUCCESS;
        gr_lock(&table_lock);
        while ((opening = find_opening(handle)) && opening->state != OPEN)
                pthread_cond_wait(&state_changed, &table_lock.mutex);
        if (opening && opening->import.context != context) {
                *ret_result = CUDA_ERROR_INVALID_HANDLE; /* as the driver does */
                opening = NULL;
        } else if (opening) {
                opening->count++;
                *ret_import = opening->import;
                opening = NULL;
        } else if ((opening = calloc(1, sizeof(*opening)))) {
                opening->handle = *handle;
                opening->import.context = context;
                DL_APPEND(openings, opening);
                atomic_fetch_add(&opening_count, 1);
        } else {
                *ret_result = CUDA_ERROR_OUT_OF_MEMORY;
        }
        gr_unlock(&table_lock);
        return opening;
}

/* Opens the memory of a new entry. On failure the entry is freed. */
static CUresult finish_opening(CUdevice dev, struct opening *opening)
{
        uint64_t deadline_ns = gr_platform_now_ns() + OPEN_NS;
        CUresult result = CUDA_ERROR_MAP_FAILED;
        struct gr_device *device;
        bool again = true, ended;

        for (int tries = 0; result != CUDA_SUCCESS && again && tries < TRIES; tries++)
                result = fetch_memory(dev, opening, deadline_ns, &again);
        if (result == CUDA_SUCCESS) {
                device = opening->import.ordinal >= 0 ? gr_device_get(opening->import.ordinal) : NULL;
                gr_segment_import_count(device ? device : gr_device_get(dev), opening->import.context,
                                        opening->import.base, opening->import.bytes);
        }
        gr_lock(&table_lock);
        ended = opening->ended;
        if (result == CUDA_SUCCESS && !ended) {
                opening->count = 1;
                opening->state = OPEN;
                pthread_cond_broadcast(&state_changed);
        } else {
                leave_table(opening);
        }
        gr_unlock(&table_lock);
        if (result == CUDA_SUCCESS && !ended)
                return result;
        if (result == CUDA_SUCCESS) {
                gr_accounted_free_end(
                        gr_core.accounted,
                        gr_accounted_free_begin(gr_core.accounted, GR_MEMORY_IMPORTED, opening->import.base), true);
                if (opening->all_bytes)
                        unmap_opening(opening->at, opening->all_bytes, opening->all_bytes, true);
                else
                        gr_real.cuIpcCloseMemHandle(opening->at);
                result = CUDA_ERROR_CONTEXT_IS_DESTROYED;
        }
        free(opening);
        return result;
}

CUresult gr_segment_import_open(CUcontext context, CUdevice dev, const CUipcMemHandle *handle, CUdeviceptr *ret_ptr)
{
        struct gr_segment_import import;
        struct opening *opening;
        struct gr_segment_handle wanted;
        CUresult result;
        GR_NO_CANCEL;

        assert(gr_segment_import_made(handle));
        memcpy(&wanted, handle, sizeof(wanted));
        if (gr_segment_export_is_own(&wanted))
                return CUDA_ERROR_INVALID_CONTEXT;
        if (!gr_driver.mem_reserve || !gr_real.cuIpcOpenMemHandle_v2)
                return CUDA_ERROR_INVALID_VALUE;
        opening = begin_opening(context, &wanted, &import, &result);
        if (opening) {
                result = finish_opening(dev, opening);
                if (result == CUDA_SUCCESS)
                        import = opening->import;
        }
        if (result == CUDA_SUCCESS)
                *ret_ptr = import.base;
        return result;
}

int gr_segment_import_find(CUdeviceptr ptr, struct gr_segment_import *ret_import)
{
        struct opening *opening;
        int rc = -ENOENT;

        if (atomic_load_explicit(&opening_count, memory_order_relaxed) == 0)
                return rc;
        gr_lock(&table_lock);
        DL_FOREACH (openings, opening)
                if (opening->state != OPENING && ptr - opening->import.base < opening->import.bytes) {
                        *ret_import = opening->import;
                        rc = 0;
                        break;
                }
        gr_unlock(&table_lock);
        return rc;
}

/*
 * Closes the memory of an entry in state CLOSING, which this thread has set, and frees the entry. On failure it is open
 * again, unless its context has ended.
 */
static CUresult finish_closing(struct opening *opening)
{
        struct gr_accounted *entry =
                gr_accounted_free_begin(gr_core.accounted, GR_MEMORY_IMPORTED, opening->import.base);
        CUresult result = close_memory(opening);
        bool gone;

        gr_accounted_free_end(gr_core.accounted, entry, result == CUDA_SUCCESS);
        gr_lock(&table_lock);
        gone = result == CUDA_SUCCESS || opening->ended;
        if (gone) {
                leave_table(opening);
        } else {
                opening->state = OPEN;
                pthread_cond_broadcast(&state_changed);
        }
        gr_unlock(&table_lock);
        if (!gone)
                return result;
        if (result != CUDA_SUCCESS && opening->all_bytes)
                result = unmap_opening(opening->at, opening->all_bytes, opening->all_bytes, true);
        free(opening);
        return result;
}

int gr_segment_import_close(CUdeviceptr base, CUresult *ret_result)
{
        struct opening *opening;
        bool last = false;
        GR_NO_CANCEL;

        if (atomic_load_explicit(&opening_count, memory_order_relaxed) == 0)
                return -ENOENT;
        gr_lock(&table_lock);
        DL_FOREACH (openings, opening)
                if (opening->state == OPEN && opening->import.base == base)
                        break;
        if (opening) {
                last = opening->count == 1;
                opening->count -= !last;
                opening->state = last ? CLOSING : OPEN;
        }
        gr_unlock(&table_lock);
        if (opening)
                *ret_result = last ? finish_closing(opening) : CUDA_SUCCESS;
        return opening ? 0 : -ENOENT;
}

void gr_segment_import_context_gone(CUcontext context)
{
        struct opening *opening, *tmp, *ended = NULL;
        GR_NO_CANCEL;

        if (atomic_load(&opening_count) == 0)
                return;
        gr_lock(&table_lock);
        DL_FOREACH_SAFE (openings, opening, tmp)
                if (opening->import.context == context) {
                        opening->ended = true; /* a thread that is opening or closing it now cleans up */
                        if (opening->state == OPEN) {
                                leave_table(opening);
                                DL_APPEND(ended, opening);
                        }
                }
        gr_unlock(&table_lock);
        DL_FOREACH_SAFE (ended, opening, tmp) {
                if (opening->all_bytes)
                        unmap_opening(opening->at, opening->all_bytes, opening->all_bytes, true);
                free(opening);
        }
}
