/*
 * Memory and events of one process in another one: legacy IPC, and memory of pools. An exported allocation moves to a
 * file in memory, which the handle names and other processes map through /proc. Limits: an allocation that shares a
 * page (up to 1 MiB) gets a handle that cannot be opened, unlike on a real driver. The descriptor of a pool is a file
 * that names the device; cuMemFreeAsync refuses memory of an imported pool. Only streams wait for what the other
 * process has recorded in an event; to the host it seems to have passed.
 */
#include "sim.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct ipc_handle {
        uint64_t pid, base, buffer_id;
        uint64_t file; /* in that process, plus 1; 0 for none */
        uint64_t bytes, footprint;
};

/* One handle that a context has opened. Guarded by sim_lock(). */
struct opening {
        struct sim_alloc *range;
        struct ipc_handle words;
        CUcontext ctx;
        unsigned count;
        struct opening *next;
};
static struct opening *openings;

int sim_memory_file(const char *name)
{
        int file = memfd_create(name, MFD_CLOEXEC), moved;

        if (file < 0 || file > STDERR_FILENO)
                return file;
        moved = fcntl(file, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
        close(file);
        return moved;
}

/* No operation accesses the memory meanwhile, as each would need the memory lock. */
bool sim_move_to_file_locked(struct sim_alloc *alloc)
{
        int file;

        if (alloc->file)
                return true;
        file = sim_memory_file("simulated device");
        if (file < 0)
                return false;
        if (ftruncate(file, (off_t)alloc->footprint) != 0 ||
            pwrite(file, (const void *)alloc->base, alloc->footprint, 0) != (ssize_t)alloc->footprint ||
            mmap((void *)alloc->base, alloc->footprint, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) ==
                    MAP_FAILED) {
                close(file);
                return false;
        }
        alloc->file = file + 1;
        return true;
}

/* Fills the handle for the memory at dptr. False: there is none of this kind, or its pool cannot be exported. */
static bool words_of(CUdeviceptr dptr, enum sim_alloc_kind kind, struct ipc_handle *ret)
{
        struct ipc_handle words = {.pid = (uint64_t)getpid()};
        struct sim_alloc *alloc;

        sim_memory_lock();
        alloc = sim_find_locked(dptr);
        if (alloc && alloc->kind == kind && (!alloc->pool || alloc->pool->shareable)) {
                words.base = alloc->base;
                words.buffer_id = alloc->buffer_id;
                words.bytes = alloc->bytes;
                words.footprint = alloc->footprint;
                if (alloc->footprint % SIM_PAGE_BYTES == 0 && sim_move_to_file_locked(alloc))
                        words.file = (uint64_t)alloc->file;
        }
        sim_memory_unlock();
        *ret = words;
        return words.base != 0;
}

SIM_API cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr dptr)
{
        struct ipc_handle words;

        SIM_ENTER(cuIpcGetMemHandle);
        if (!handle || !words_of(dptr, SIM_ALLOC_DEVICE, &words))
                return CUDA_ERROR_INVALID_VALUE;
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &words, sizeof words);
        return CUDA_SUCCESS;
}

/* Finds what ctx, or (NULL) any context, opened by words, from an imported pool or (NULL) by legacy IPC. Lock held. */
static struct opening *find_opening(CUcontext ctx, CUmemoryPool pool, const struct ipc_handle *words)
{
        struct opening *opening = openings;

        while (opening && ((ctx && opening->ctx != ctx) || opening->range->pool != pool ||
                           memcmp(&opening->words, words, sizeof *words) != 0))
                opening = opening->next;
        return opening;
}

/* The other process's file, which the caller closes. -1: it is gone, or the descriptor is another file by now. */
static int open_of(const struct ipc_handle *words)
{
        struct stat status;
        char path[64];
        int file;

        snprintf(path, sizeof path, "/proc/%llu/fd/%llu", (unsigned long long)words->pid,
                 (unsigned long long)words->file - 1);
        file = open(path, O_RDWR | O_CLOEXEC);
        if (file >= 0 && (fstat(file, &status) != 0 || (uint64_t)status.st_size != words->footprint)) {
                close(file);
                file = -1;
        }
        return file;
}

/* Lock held. */
static CUresult open_first(CUcontext ctx, const struct ipc_handle *words, struct opening **ret_opening)
{
        struct opening *opening;
        void *at;
        int file;

        file = open_of(words);
        if (file < 0)
                return CUDA_ERROR_INVALID_VALUE;
        at = sim_map(words->footprint, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        opening = at == MAP_FAILED ? NULL : calloc(1, sizeof *opening);
        if (opening)
                opening->range = sim_range_add(SIM_ALLOC_IMPORTED, (uintptr_t)at, words->bytes, ctx, ctx->device, 0);
        if (!opening || !opening->range) {
                if (at != MAP_FAILED)
                        munmap(at, words->footprint);
                free(opening);
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        opening->words = *words;
        opening->ctx = ctx;
        opening->next = openings;
        openings = *ret_opening = opening;
        return CUDA_SUCCESS;
}

/* The driver asks for that one flag, and takes any others. */
static CUresult open_handle(CUdeviceptr *dptr, const CUipcMemHandle *handle, unsigned flags)
{
        struct ipc_handle words;
        struct opening *opening;
        CUcontext ctx;
        CUresult rc;

        memcpy(&words, handle, sizeof words);
        if (!dptr || !(flags & CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS))
                return CUDA_ERROR_INVALID_VALUE;
        if (words.pid == (uint64_t)getpid())
                return CUDA_ERROR_INVALID_CONTEXT;
        if (!words.file)
                return CUDA_ERROR_NOT_SUPPORTED;
        sim_lock();
        rc = sim_current(&ctx);
        if (rc == CUDA_SUCCESS) {
                opening = find_opening(NULL, NULL, &words);
                if (opening && opening->ctx != ctx)
                        rc = CUDA_ERROR_INVALID_HANDLE; /* one context of a process may have it */
                else if (!opening)
                        rc = open_first(ctx, &words, &opening);
        }
        if (rc == CUDA_SUCCESS) {
                opening->count++;
                *dptr = opening->range->base;
        }
        sim_unlock();
        return rc;
}

SIM_API cuIpcOpenMemHandle(CUdeviceptr *dptr, CUipcMemHandle handle, unsigned flags)
{
        SIM_ENTER(cuIpcOpenMemHandle);
        return open_handle(dptr, &handle, flags);
}

SIM_API cuIpcOpenMemHandle_v2(CUdeviceptr *dptr, CUipcMemHandle handle, unsigned flags)
{
        SIM_ENTER(cuIpcOpenMemHandle_v2);
        return open_handle(dptr, &handle, flags);
}

/* Lock held. */
static void drop_opening(struct opening **at)
{
        struct opening *opening = *at;
        uintptr_t base = opening->range->base;

        *at = opening->next;
        sim_range_remove(opening->range);
        sim_unmap((void *)base, opening->words.footprint);
        free(opening);
}

/* Lock held. */
static bool close_at(CUdeviceptr dptr, bool of_pool)
{
        struct opening **at = &openings;

        while (*at && ((*at)->range->base != dptr || !(*at)->range->pool == of_pool))
                at = &(*at)->next;
        if (!*at)
                return false;
        if (--(*at)->count == 0)
                drop_opening(at);
        return true;
}

void sim_ipc_close_context(CUcontext ctx)
{
        for (struct opening **at = &openings; *at;)
                if ((*at)->ctx == ctx && !(*at)->range->pool)
                        drop_opening(at);
                else
                        at = &(*at)->next;
}

SIM_API cuIpcCloseMemHandle(CUdeviceptr dptr)
{
        bool closed;

        SIM_ENTER(cuIpcCloseMemHandle);
        sim_lock();
        closed = close_at(dptr, false);
        sim_unlock();
        return closed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void sim_ipc_free(struct sim_alloc *alloc)
{
        close_at(alloc->base, true);
}

/* Maps the file of a shared event. NULL: no memory. */
static struct sim_shared_event *map_event(int file)
{
        void *at = mmap(NULL, sizeof(struct sim_shared_event), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);

        return at == MAP_FAILED ? NULL : at;
}

SIM_API cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event)
{
        struct ipc_handle words = {.pid = (uint64_t)getpid(), .footprint = sizeof(struct sim_shared_event)};
        int file;

        SIM_ENTER(cuIpcGetEventHandle);
        if (!handle)
                return CUDA_ERROR_INVALID_VALUE;
        if (!event || event->magic != SIM_MAGIC_EVENT || !(event->flags & CU_EVENT_INTERPROCESS) ||
            (event->shared && event->file < 0))
                return CUDA_ERROR_INVALID_HANDLE;
        if (!event->shared) {
                file = sim_memory_file("simulated event");
                if (file >= 0 && ftruncate(file, (off_t)words.footprint) == 0)
                        event->shared = map_event(file);
                if (!event->shared) {
                        if (file >= 0)
                                close(file);
                        return CUDA_ERROR_OUT_OF_MEMORY;
                }
                event->file = file;
        }
        words.file = (uint64_t)event->file + 1;
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &words, sizeof words);
        return CUDA_SUCCESS;
}

SIM_API cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle handle)
{
        struct sim_shared_event *shared;
        struct ipc_handle words;
        CUresult rc;
        int file;

        SIM_ENTER(cuIpcOpenEventHandle);
        memcpy(&words, &handle, sizeof words);
        if (!event || !words.file || words.footprint != sizeof *shared)
                return CUDA_ERROR_INVALID_VALUE;
        if (words.pid == (uint64_t)getpid())
                return CUDA_ERROR_INVALID_CONTEXT;
        file = open_of(&words);
        if (file < 0)
                return CUDA_ERROR_INVALID_VALUE;
        shared = map_event(file);
        close(file);
        if (!shared)
                return CUDA_ERROR_OUT_OF_MEMORY;
        rc = cuEventCreate(event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
        if (rc != CUDA_SUCCESS) {
                munmap(shared, sizeof *shared);
                return rc;
        }
        (*event)->file = -1;
        (*event)->shared = shared;
        return CUDA_SUCCESS;
}

SIM_API cuMemPoolExportToShareableHandle(void *shareable, CUmemoryPool pool, CUmemAllocationHandleType type,
                                         unsigned long long flags)
{
        int file = -1, device;
        bool may;

        SIM_ENTER(cuMemPoolExportToShareableHandle);
        sim_lock();
        may = shareable && !flags && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && sim_is_pool(pool) &&
              pool->shareable;
        device = may ? pool->device : 0;
        sim_unlock();
        if (!may)
                return CUDA_ERROR_INVALID_VALUE;
        file = memfd_create("simulated pool", MFD_CLOEXEC);
        if (file < 0 || pwrite(file, &device, sizeof device, 0) != (ssize_t)sizeof device) {
                if (file >= 0)
                        close(file);
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        *(int *)shareable = file;
        return CUDA_SUCCESS;
}

SIM_API cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *shareable, CUmemAllocationHandleType type,
                                           unsigned long long flags)
{
        struct stat status;
        int device;

        SIM_ENTER(cuMemPoolImportFromShareableHandle);
        if (!pool || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
            fstat((int)(intptr_t)shareable, &status) != 0 || status.st_size != (off_t)sizeof device ||
            pread((int)(intptr_t)shareable, &device, sizeof device, 0) != (ssize_t)sizeof device ||
            sim_device_check(device) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_VALUE;
        *pool = sim_pool_imported(device);
        return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

SIM_API cuMemPoolExportPointer(CUmemPoolPtrExportData *data, CUdeviceptr dptr)
{
        struct ipc_handle words;

        SIM_ENTER(cuMemPoolExportPointer);
        if (!data || !words_of(dptr, SIM_ALLOC_POOL, &words) || !words.file)
                return CUDA_ERROR_INVALID_VALUE;
        memset(data, 0, sizeof *data);
        memcpy(data, &words, sizeof words);
        return CUDA_SUCCESS;
}

SIM_API cuMemPoolImportPointer(CUdeviceptr *dptr, CUmemoryPool pool, CUmemPoolPtrExportData *data)
{
        struct opening *opening;
        struct ipc_handle words;
        CUcontext ctx;
        CUresult rc;

        SIM_ENTER(cuMemPoolImportPointer);
        if (!dptr || !data)
                return CUDA_ERROR_INVALID_VALUE;
        memcpy(&words, data, sizeof words);
        sim_lock();
        rc = sim_current(&ctx);
        if (rc == CUDA_SUCCESS && (!sim_is_pool(pool) || !pool->imported))
                rc = CUDA_ERROR_INVALID_VALUE;
        if (rc == CUDA_SUCCESS) {
                opening = find_opening(ctx, pool, &words);
                if (!opening)
                        rc = open_first(ctx, &words, &opening);
        }
        if (rc == CUDA_SUCCESS) {
                opening->range->pool = pool;
                opening->count++;
                *dptr = opening->range->base;
        }
        sim_unlock();
        return rc;
}
