/*
 * Memory of others that this process opens: legacy IPC, pools, and external memory of other interfaces. Opening it
 * takes nothing from the card, and its exporter answers for it: so it is told (GR_MEMORY_IMPORTED), never charged, and
 * no request is refused for it. No block of the pool, so every question about its addresses, and its free, is the
 * driver's. What maps it takes no memory, and is only looked at for the address.
 *
 * What this process exported as a descriptor and imports again is in its account already. Such a descriptor is known by
 * its owner for signals, which we set when it is made: the mark is of the open file, so it goes along with copies of
 * it, and to other processes, for whom it names another one. No signal comes of it, as nobody asks for one (O_ASYNC).
 *
 * The mark is the one thing of ours that a program could see there. What would leave none is less right. An inode tells
 * files apart only where each has its own, which descriptors of one device node lack. A copy to compare with (kcmp)
 * keeps the memory alive after the program let go of it, is in the way of programs that close or count all descriptors,
 * and must be closed with the memory, so that what comes back later would slip past the limit; containers may forbid
 * the call. A watch (epoll) calls into the driver's file, cannot be put on every kind of file, and needs a descriptor
 * that stays open as well.
 */
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "shim.h"

void gr_memory_shared(void)
{
        gr_core_will_wait(&gr_core);
}

void gr_export_mark(int fd)
{
        int saved_errno = errno;

        (void)fcntl(fd, F_SETOWN, getpid()); /* without the mark it counts as another's when it comes back */
        errno = saved_errno;
}

bool gr_export_is_own(int fd)
{
        int saved_errno = errno;
        bool own = fcntl(fd, F_GETOWN) == getpid();

        errno = saved_errno;
        return own;
}

static void opened(struct gr_context *context, struct gr_device *device, uint64_t handle, uint64_t bytes)
{
        gr_memory_shared();
        bytes = (bytes + GR_PAGE_BYTES - 1) & ~(uint64_t)(GR_PAGE_BYTES - 1);
        gr_budget_force(device, GR_MEMORY_IMPORTED, bytes);
        gr_accounted_add(&gr_core, device, GR_MEMORY_IMPORTED, handle, context->handle, bytes);
}

GR_EXPORT CUresult CUDAAPI cuImportExternalMemory(CUexternalMemory *external,
                                                  const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *descriptor)
{
        struct gr_context *context;
        int saved_errno = errno;
        bool own = false;
        CUresult result;

        /* Asked before: the driver keeps the descriptor, and may close it. */
        if (gr_shim_ready() && descriptor &&
            (descriptor->type == CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD ||
             (int)descriptor->type == 9 /* CU_EXTERNAL_MEMORY_HANDLE_TYPE_DMABUF_FD, of newer toolkits */))
                own = gr_export_is_own(descriptor->handle.fd);
        result = GR_REAL(cuImportExternalMemory, external, descriptor);
        if (result == CUDA_SUCCESS && gr_shim_ready() && !own) {
                context = gr_current_context();
                if (context)
                        opened(context, context->device, (uint64_t)(uintptr_t)*external, descriptor->size);
                errno = saved_errno;
        }
        return result;
}

GR_EXPORT CUresult CUDAAPI cuDestroyExternalMemory(CUexternalMemory external)
{
        struct gr_accounted *entry = NULL;
        CUresult result;

        if (gr_shim_ready() && external)
                entry = gr_accounted_take(&gr_core, GR_MEMORY_IMPORTED, (uint64_t)(uintptr_t)external);
        result = GR_REAL(cuDestroyExternalMemory, external);
        gr_accounted_settle(&gr_core, entry, result == CUDA_SUCCESS);
        return result;
}

/* An address that came out of an IPC handle; the same one again where the context has it open already. */
static void opened_ipc(CUdeviceptr ptr)
{
        struct gr_context *context = gr_current_context();
        struct gr_device *device;
        size_t bytes = 0;
        int ordinal = 0;

        if (!context || !gr_real.cuMemGetAddressRange_v2 ||
            gr_real.cuMemGetAddressRange_v2(NULL, &bytes, ptr) != CUDA_SUCCESS)
                return;
        /* A peer's memory counts where it lies. */
        device = gr_real.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ptr) == CUDA_SUCCESS
                         ? gr_device_get(ordinal)
                         : NULL;
        opened(context, device ? device : context->device, ptr, bytes);
}

static CUresult open_ipc(CUdeviceptr *dptr, CUipcMemHandle handle, unsigned int flags,
                         __typeof__(cuIpcOpenMemHandle_v2) *real)
{
        int saved_errno = errno;
        CUresult result;

        if (!real)
                return CUDA_ERROR_NOT_FOUND;
        result = gr_given(real(dptr, handle, flags), dptr);
        if (result == CUDA_SUCCESS && gr_shim_ready()) {
                opened_ipc(*dptr);
                errno = saved_errno;
        }
        return result;
}

GR_EXPORT CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr *dptr, CUipcMemHandle handle, unsigned int flags)
{
        gr_shim_ready();
        return open_ipc(dptr, handle, flags, gr_real.cuIpcOpenMemHandle);
}

GR_EXPORT CUresult CUDAAPI cuIpcOpenMemHandle_v2(CUdeviceptr *dptr, CUipcMemHandle handle, unsigned int flags)
{
        gr_shim_ready();
        return open_ipc(dptr, handle, flags, gr_real.cuIpcOpenMemHandle_v2);
}

/* Numbers an opening of memory; 0: nothing is open there. */
static unsigned long long buffer_at(CUdeviceptr ptr)
{
        unsigned long long id = 0;

        if (gr_real.cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, ptr) != CUDA_SUCCESS)
                return 0;
        return id;
}

/* Handles are counted by the driver: what was opened twice is still there after the first close. */
GR_EXPORT CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr dptr)
{
        struct gr_accounted *entry = NULL;
        unsigned long long before = 0;
        CUdeviceptr base = dptr;
        int saved_errno = errno;
        CUresult result;

        if (gr_shim_ready())
                entry = gr_accounted_take(&gr_core, GR_MEMORY_IMPORTED, dptr);
        /* Whether an address inside will do is the driver's to say. */
        if (gr_shim_ready() && !entry && gr_real.cuMemGetAddressRange_v2 &&
            gr_real.cuMemGetAddressRange_v2(&base, NULL, dptr) == CUDA_SUCCESS)
                entry = gr_accounted_take(&gr_core, GR_MEMORY_IMPORTED, base);
        if (entry)
                before = buffer_at(base);
        result = GR_REAL(cuIpcCloseMemHandle, dptr);
        if (entry)
                gr_accounted_settle(&gr_core, entry,
                                    result == CUDA_SUCCESS && (before == 0 || buffer_at(base) != before));
        errno = saved_errno;
        return result;
}

/* No pointer of the pool crosses before its pool did. */
GR_EXPORT CUresult CUDAAPI cuMemPoolExportToShareableHandle(void *shareable, CUmemoryPool pool,
                                                            CUmemAllocationHandleType type, unsigned long long flags)
{
        CUresult result = GR_REAL(cuMemPoolExportToShareableHandle, shareable, pool, type, flags);

        if (result == CUDA_SUCCESS && gr_shim_ready())
                gr_memory_shared();
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *shareable,
                                                              CUmemAllocationHandleType type, unsigned long long flags)
{
        CUresult result = GR_REAL(cuMemPoolImportFromShareableHandle, pool, shareable, type, flags);

        if (result == CUDA_SUCCESS && gr_shim_ready())
                gr_memory_shared();
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMemPoolImportPointer(CUdeviceptr *ptr, CUmemoryPool pool, CUmemPoolPtrExportData *data)
{
        return gr_given(GR_REAL(cuMemPoolImportPointer, ptr, pool, data), ptr);
}

GR_EXPORT CUresult CUDAAPI cuExternalMemoryGetMappedBuffer(CUdeviceptr *ptr, CUexternalMemory external,
                                                           const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *descriptor)
{
        return gr_given(GR_REAL(cuExternalMemoryGetMappedBuffer, ptr, external, descriptor), ptr);
}
