/*
 * Memory and events that processes share.
 *
 * Imported memory is that of other processes or interfaces which this process opens by legacy IPC, pools, or external
 * memory. Opening it takes nothing from the device, and it is in the account of its exporter. So it is counted as
 * GR_MEMORY_IMPORTED only, and no request is refused because of it. It is no block of the pool: the driver answers all
 * questions about its addresses, and frees it. Mapping it takes no memory; the hooks for that only tell the pool the
 * address.
 *
 * Memory that this process exported as a descriptor and imports again is in its account already. Such a descriptor is
 * marked when it is made: this process becomes its owner for signals (F_SETOWN). The mark belongs to the open file, so
 * copies have it too. In another process it names this one, so there the memory counts as imported. No signal is sent,
 * because the program has not asked for any (O_ASYNC).
 *
 * A program can see the mark. The ways that leave no mark are worse:
 * - An inode number does not tell descriptors of one device node apart.
 * - A copy of the descriptor to compare with (kcmp) keeps the memory alive after the program has released it, and
 *   disturbs programs that close or count all descriptors. It must be closed with the memory, so that a later import
 *   would escape the limit. Containers may forbid kcmp.
 * - A watch (epoll) calls into the driver's file, does not work with every kind of file, and needs an open descriptor
 *   as well.
 */
#include "hooks/ipc.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "base/no_cancel.h"
#include "device/device.h"
#include "driver/deep_sleep.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/context.h"
#include "hooks/segment_import.h"

void gr_ipc_begin_sharing(void)
{
        gr_core_will_wait(&gr_core);
        gr_deep_never(GR_DEEP_IS_SHARED);
}

void gr_ipc_mark(int fd)
{
        GR_KEEP_ERRNO;

        assert(fd >= 0);
        (void)fcntl(fd, F_SETOWN, getpid()); /* failed: it counts as another process's when it is imported */
}

bool gr_ipc_is_own(int fd)
{
        GR_KEEP_ERRNO;
        bool own = fcntl(fd, F_GETOWN) == getpid();

        return own;
}

static void note_opened(struct gr_context *context, struct gr_device *device, uint64_t handle, uint64_t bytes)
{
        assert(context && device && device != gr_core.host);
        gr_ipc_begin_sharing();
        gr_segment_import_count(device, context->handle, handle, bytes);
}

GR_EXPORT CUresult CUDAAPI cuImportExternalMemory(CUexternalMemory *external,
                                                  const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *descriptor)
{
        GR_PASS_DEEP;
        struct gr_context *context;
        GR_KEEP_ERRNO;
        bool own = false;
        CUresult result;
        GR_NO_CANCEL; /* or what the driver has opened would not be counted */

        /* Checked before the import: the driver takes the descriptor over, and may close it. */
        if (gr_shim_ready() && descriptor &&
            (descriptor->type == CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD ||
             (int)descriptor->type == 9 /* CU_EXTERNAL_MEMORY_HANDLE_TYPE_DMABUF_FD, of newer toolkits */))
                own = gr_ipc_is_own(descriptor->handle.fd);
        result = GR_REAL(cuImportExternalMemory, external, descriptor);
        if (result == CUDA_SUCCESS)
                gr_deep_never(GR_DEEP_IS_SHARED);
        if (result == CUDA_SUCCESS && gr_shim_ready() && !own) {
                context = gr_context_current();
                if (context)
                        note_opened(context, context->device, (uint64_t)(uintptr_t)*external, descriptor->size);
        }
        return result;
}

GR_EXPORT CUresult CUDAAPI cuDestroyExternalMemory(CUexternalMemory external)
{
        GR_PASS_DEEP;
        struct gr_accounted *entry = NULL;
        CUresult result;
        GR_NO_CANCEL;

        if (gr_shim_ready() && external)
                entry = gr_accounted_free_begin(gr_core.accounted, GR_MEMORY_IMPORTED, (uint64_t)(uintptr_t)external);
        result = GR_REAL(cuDestroyExternalMemory, external);
        gr_accounted_free_end(gr_core.accounted, entry, result == CUDA_SUCCESS);
        return result;
}

/* Counts memory that was opened by an IPC handle. The address may be counted already: a context opens memory once. */
static void opened_ipc(CUdeviceptr ptr)
{
        struct gr_context *context = gr_context_current();
        struct gr_device *device;
        size_t bytes = 0;
        int ordinal = 0;

        if (!context || !gr_real.cuMemGetAddressRange_v2 ||
            gr_real.cuMemGetAddressRange_v2(NULL, &bytes, ptr) != CUDA_SUCCESS)
                return;
        /* Memory of a peer device counts on that device. */
        device = gr_real.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ptr) == CUDA_SUCCESS
                         ? gr_device_get(ordinal)
                         : NULL;
        note_opened(context, device ? device : context->device, ptr, bytes);
}

/*
 * Opens a handle that this library made. As the driver does, it requires CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS and ignores
 * other flags.
 */
static CUresult open_segment(CUdeviceptr *dptr, const CUipcMemHandle *handle, unsigned int flags)
{
        struct gr_context *context = gr_context_current();

        if (!dptr || !(flags & CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS))
                return CUDA_ERROR_INVALID_VALUE;
        if (!context)
                return CUDA_ERROR_INVALID_CONTEXT;
        gr_ipc_begin_sharing();
        return gr_real_given(gr_segment_import_open(context->handle, context->ordinal, handle, dptr), dptr);
}

static CUresult open_ipc(CUdeviceptr *dptr, CUipcMemHandle handle, unsigned int flags,
                         __typeof__(cuIpcOpenMemHandle_v2) *real)
{
        GR_KEEP_ERRNO;
        CUresult result;
        GR_NO_CANCEL; /* as in cuImportExternalMemory */

        if (!real)
                return CUDA_ERROR_NOT_FOUND;
        if (gr_shim_ready() && gr_segment_import_made(&handle))
                return open_segment(dptr, &handle, flags);
        result = gr_real_given(real(dptr, handle, flags), dptr);
        if (result == CUDA_SUCCESS && gr_shim_ready()) {
                gr_deep_never(GR_DEEP_IS_SHARED);
                opened_ipc(*dptr);
        }
        return result;
}

GR_EXPORT CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr *dptr, CUipcMemHandle handle, unsigned int flags)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return open_ipc(dptr, handle, flags, gr_real.cuIpcOpenMemHandle);
}

GR_EXPORT CUresult CUDAAPI cuIpcOpenMemHandle_v2(CUdeviceptr *dptr, CUipcMemHandle handle, unsigned int flags)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return open_ipc(dptr, handle, flags, gr_real.cuIpcOpenMemHandle_v2);
}

/* The driver's number of the memory that is open at ptr, new at each opening; 0: there is none. */
static unsigned long long buffer_at(CUdeviceptr ptr)
{
        unsigned long long id;

        return gr_real.cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, ptr) == CUDA_SUCCESS ? id : 0;
}

/*
 * The driver counts how often memory was opened: opened twice, it is still open after the first close. It refuses an
 * address inside of the memory.
 */
GR_EXPORT CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr dptr)
{
        GR_PASS_DEEP;
        struct gr_accounted *entry = NULL;
        unsigned long long before = 0;
        GR_KEEP_ERRNO;
        CUresult result;
        GR_NO_CANCEL;

        if (gr_shim_ready() && gr_segment_import_close(dptr, &result) == 0)
                return result;
        if (gr_shim_ready())
                entry = gr_accounted_free_begin(gr_core.accounted, GR_MEMORY_IMPORTED, dptr);
        if (entry)
                before = buffer_at(dptr);
        result = GR_REAL(cuIpcCloseMemHandle, dptr);
        if (entry)
                gr_accounted_free_end(gr_core.accounted, entry,
                                      result == CUDA_SUCCESS && (before == 0 || buffer_at(dptr) != before));
        return result;
}

/* A stream that waits for an event which processes share may wait for another process. */
#define SHARED_EVENT(symbol, parameters, ...)                                                                          \
        GR_EXPORT CUresult CUDAAPI symbol parameters                                                                   \
        {                                                                                                              \
                GR_PASS_DEEP;                                                                                          \
                GR_KEEP_ERRNO;                                                                                         \
                GR_NO_CANCEL;                                                                                          \
                CUresult result = GR_REAL(symbol, __VA_ARGS__);                                                        \
                                                                                                                       \
                if (result == CUDA_SUCCESS && gr_shim_ready())                                                         \
                        gr_ipc_begin_sharing();                                                                        \
                return result;                                                                                         \
        }
SHARED_EVENT(cuIpcGetEventHandle, (CUipcEventHandle * handle, CUevent event), handle, event)
SHARED_EVENT(cuIpcOpenEventHandle, (CUevent * event, CUipcEventHandle handle), event, handle)

/* Memory of a pool can be shared only once the pool itself is, so hooks for export and import of the pool suffice. */
GR_EXPORT CUresult CUDAAPI cuMemPoolExportToShareableHandle(void *shareable, CUmemoryPool pool,
                                                            CUmemAllocationHandleType type, unsigned long long flags)
{
        GR_PASS_DEEP;
        GR_NO_CANCEL;
        CUresult result = GR_REAL(cuMemPoolExportToShareableHandle, shareable, pool, type, flags);

        if (result == CUDA_SUCCESS && gr_shim_ready())
                gr_ipc_begin_sharing();
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *shareable,
                                                              CUmemAllocationHandleType type, unsigned long long flags)
{
        GR_PASS_DEEP;
        GR_NO_CANCEL;
        CUresult result = GR_REAL(cuMemPoolImportFromShareableHandle, pool, shareable, type, flags);

        if (result == CUDA_SUCCESS && gr_shim_ready())
                gr_ipc_begin_sharing();
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMemPoolImportPointer(CUdeviceptr *ptr, CUmemoryPool pool, CUmemPoolPtrExportData *data)
{
        GR_PASS_DEEP;
        return gr_real_given(GR_REAL(cuMemPoolImportPointer, ptr, pool, data), ptr);
}

GR_EXPORT CUresult CUDAAPI cuExternalMemoryGetMappedBuffer(CUdeviceptr *ptr, CUexternalMemory external,
                                                           const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *descriptor)
{
        GR_PASS_DEEP;
        return gr_real_given(GR_REAL(cuExternalMemoryGetMappedBuffer, ptr, external, descriptor), ptr);
}
