/*
 * Legacy IPC: memory of one process in another one. An exported allocation moves to a file in memory, which the handle
 * names and other processes map through /proc. Only allocations with pages of their own: what shares a page (1 MiB and
 * less) gets a handle that nobody can open, which a real driver does better.
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

/* What a context has open. Guarded by sim_lock(). */
struct opening {
        struct sim_alloc *range;
        struct ipc_handle words;
        CUcontext ctx;
        unsigned count;
        struct opening *next;
};
static struct opening *openings;

/* Nothing touches the memory meanwhile: operations do so under the memory lock. */
bool sim_move_to_file_locked(struct sim_alloc *alloc)
{
        int file;

        if (alloc->file)
                return true;
        file = memfd_create("simulated device", MFD_CLOEXEC);
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

SIM_API cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr dptr)
{
        struct ipc_handle words = {.pid = (uint64_t)getpid()};
        struct sim_alloc *alloc;

        SIM_ENTER(cuIpcGetMemHandle);
        if (!handle)
                return CUDA_ERROR_INVALID_VALUE;
        sim_memory_lock();
        alloc = sim_find_locked(dptr);
        if (alloc && alloc->kind == SIM_ALLOC_DEVICE) {
                words.base = alloc->base;
                words.buffer_id = alloc->buffer_id;
                words.bytes = alloc->bytes;
                words.footprint = alloc->footprint;
                if (alloc->footprint % SIM_PAGE_BYTES == 0 && sim_move_to_file_locked(alloc))
                        words.file = (uint64_t)alloc->file;
        }
        sim_memory_unlock();
        if (!words.base)
                return CUDA_ERROR_INVALID_VALUE;
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &words, sizeof words);
        return CUDA_SUCCESS;
}

/* Lock held. */
static CUresult open_first(CUcontext ctx, const struct ipc_handle *words, struct opening **ret_opening)
{
        struct opening *opening;
        struct stat status;
        char path[64];
        void *at;
        int file;

        snprintf(path, sizeof path, "/proc/%llu/fd/%llu", (unsigned long long)words->pid,
                 (unsigned long long)words->file - 1);
        file = open(path, O_RDWR | O_CLOEXEC);
        if (file < 0)
                return CUDA_ERROR_INVALID_VALUE;
        if (fstat(file, &status) != 0 || (uint64_t)status.st_size != words->footprint) {
                close(file); /* freed meanwhile */
                return CUDA_ERROR_INVALID_VALUE;
        }
        at = mmap(NULL, words->footprint, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
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

static CUresult open_handle(CUdeviceptr *dptr, const CUipcMemHandle *handle, unsigned flags)
{
        struct ipc_handle words;
        struct opening *opening;
        CUcontext ctx;
        CUresult rc;

        memcpy(&words, handle, sizeof words);
        if (!dptr || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
                return CUDA_ERROR_INVALID_VALUE;
        if (words.pid == (uint64_t)getpid())
                return CUDA_ERROR_INVALID_CONTEXT;
        if (!words.file)
                return CUDA_ERROR_NOT_SUPPORTED;
        sim_lock();
        rc = sim_current(&ctx);
        if (rc == CUDA_SUCCESS) {
                for (opening = openings; opening; opening = opening->next)
                        if (opening->ctx == ctx && memcmp(&opening->words, &words, sizeof words) == 0)
                                break;
                if (!opening)
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

SIM_API cuIpcCloseMemHandle(CUdeviceptr dptr)
{
        struct opening **at = &openings, *opening;

        SIM_ENTER(cuIpcCloseMemHandle);
        sim_lock();
        while (*at && (*at)->range->base != dptr)
                at = &(*at)->next;
        opening = *at;
        if (opening && --opening->count == 0) {
                *at = opening->next;
                sim_range_remove(opening->range);
                munmap((void *)dptr, opening->words.footprint);
                free(opening);
        }
        sim_unlock();
        return opening ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
