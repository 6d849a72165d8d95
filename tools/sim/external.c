/*
 * External memory: any file that can be mapped stands for memory of another interface. As with a real driver an import
 * takes over the descriptor, and a mapping is freed with cuMemFree.
 */
#include "sim.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC_EXTERNAL 0x6578746du
#define DMABUF_FD      9 /* CU_EXTERNAL_MEMORY_HANDLE_TYPE_DMABUF_FD, of newer toolkits */

struct CUextMemory_st {
        uint32_t magic;
        int file;
        uint64_t bytes;
        CUexternalMemory next;
};

static CUexternalMemory dead; /* kept, so that stale handles stay readable. Guarded by sim_lock() */

SIM_API cuImportExternalMemory(CUexternalMemory *ret_external, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *descriptor)
{
        CUexternalMemory external;
        struct stat status;
        CUcontext ctx;
        CUresult rc;

        SIM_ENTER(cuImportExternalMemory);
        if (!ret_external || !descriptor || !descriptor->size)
                return CUDA_ERROR_INVALID_VALUE;
        if (descriptor->type != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD && (int)descriptor->type != DMABUF_FD)
                return CUDA_ERROR_INVALID_VALUE;
        if (fstat(descriptor->handle.fd, &status) != 0 || (uint64_t)status.st_size < descriptor->size)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_current(&ctx);
        external = dead;
        if (rc == CUDA_SUCCESS && external)
                dead = external->next;
        else if (rc == CUDA_SUCCESS)
                external = calloc(1, sizeof *external);
        if (rc == CUDA_SUCCESS && !external)
                rc = CUDA_ERROR_OUT_OF_MEMORY;
        if (rc == CUDA_SUCCESS) {
                *external = (struct CUextMemory_st){
                        .magic = MAGIC_EXTERNAL, .file = descriptor->handle.fd, .bytes = descriptor->size};
                *ret_external = external;
        }
        sim_unlock();
        return rc;
}

SIM_API cuExternalMemoryGetMappedBuffer(CUdeviceptr *dptr, CUexternalMemory external,
                                        const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *descriptor)
{
        CUresult rc = CUDA_ERROR_INVALID_VALUE;
        CUcontext ctx;
        void *at;

        SIM_ENTER(cuExternalMemoryGetMappedBuffer);
        if (!dptr || !descriptor || descriptor->flags || !descriptor->size)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        if (!external || external->magic != MAGIC_EXTERNAL)
                rc = CUDA_ERROR_INVALID_HANDLE;
        else if (descriptor->offset <= external->bytes && descriptor->size <= external->bytes - descriptor->offset)
                rc = sim_current(&ctx);
        if (rc == CUDA_SUCCESS) {
                at = sim_map(descriptor->size, PROT_READ | PROT_WRITE, MAP_SHARED, external->file,
                             (off_t)descriptor->offset);
                if (at == MAP_FAILED) {
                        rc = CUDA_ERROR_INVALID_VALUE;
                } else if (!sim_range_add(SIM_ALLOC_EXTERNAL, (uintptr_t)at, descriptor->size, ctx, ctx->device, 0)) {
                        munmap(at, descriptor->size);
                        rc = CUDA_ERROR_OUT_OF_MEMORY;
                } else {
                        *dptr = (uintptr_t)at;
                }
        }
        sim_unlock();
        return rc;
}

/* Mappings stay until they are freed. */
SIM_API cuDestroyExternalMemory(CUexternalMemory external)
{
        CUresult rc = CUDA_ERROR_INVALID_HANDLE;

        SIM_ENTER(cuDestroyExternalMemory);
        sim_lock();
        if (external && external->magic == MAGIC_EXTERNAL) {
                close(external->file);
                external->magic = 0;
                external->next = dead;
                dead = external;
                rc = CUDA_SUCCESS;
        }
        sim_unlock();
        return rc;
}
