/* Queries about an address (cuPointerGetAttribute and others). */
#include "sim.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

/* The allocation at an address, or NULL, also if a stream is about to free it. Memory lock held. */
static struct sim_alloc *known_at(CUdeviceptr dptr)
{
        struct sim_alloc *alloc = sim_find_locked(dptr);

        return alloc && !alloc->idle && !alloc->freeing ? alloc : NULL;
}

SIM_API cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr dptr)
{
        struct sim_alloc *alloc;
        CUcontext ctx;
        CUresult rc;

        SIM_ENTER(cuMemGetAddressRange_v2);
        sim_lock();
        rc = sim_current(&ctx);
        sim_unlock();
        if (rc != CUDA_SUCCESS)
                return rc;
        rc = CUDA_ERROR_NOT_FOUND;
        sim_memory_lock();
        alloc = known_at(dptr);
        if (alloc) {
                if (base)
                        *base = alloc->base;
                if (bytes)
                        *bytes = alloc->bytes;
                rc = CUDA_SUCCESS;
        }
        sim_memory_unlock();
        return rc;
}

/* Writes the answer for alloc; NULL: that for a pointer that the driver does not know. Memory lock held. */
static CUresult answer_attribute(void *out, CUpointer_attribute attribute, const struct sim_alloc *alloc,
                                 CUdeviceptr dptr)
{
        bool host = alloc && (alloc->kind == SIM_ALLOC_HOST || alloc->kind == SIM_ALLOC_REGISTERED);
        bool managed = alloc && alloc->kind == SIM_ALLOC_MANAGED;

        switch (attribute) {
        case CU_POINTER_ATTRIBUTE_CONTEXT:
                *(CUcontext *)out = alloc && alloc->kind != SIM_ALLOC_POOL ? alloc->ctx : NULL;
                break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
                *(unsigned *)out = !alloc ? 0 : host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
                break;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
                *(CUdeviceptr *)out = alloc ? dptr : 0;
                break;
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
                *(void **)out = host || managed ? (void *)(uintptr_t)dptr : NULL;
                return host || managed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
        case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
                *(unsigned *)out = alloc && alloc->sync_memops;
                break;
        case CU_POINTER_ATTRIBUTE_BUFFER_ID:
                *(unsigned long long *)out = alloc ? alloc->buffer_id : 0;
                break;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
                *(unsigned *)out = managed;
                break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
                *(int *)out = alloc ? alloc->device : -2;
                break;
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
                *(unsigned *)out = alloc && alloc->kind == SIM_ALLOC_DEVICE;
                break;
        case CU_POINTER_ATTRIBUTE_P2P_TOKENS:
                *(CUDA_POINTER_ATTRIBUTE_P2P_TOKENS *)out = (CUDA_POINTER_ATTRIBUTE_P2P_TOKENS){0};
                if (!alloc || (alloc->kind != SIM_ALLOC_DEVICE && alloc->kind != SIM_ALLOC_MAPPED))
                        return CUDA_ERROR_INVALID_VALUE;
                ((CUDA_POINTER_ATTRIBUTE_P2P_TOKENS *)out)->p2pToken = alloc->buffer_id;
                break;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
                *(CUdeviceptr *)out = alloc ? alloc->base : 0;
                break;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
                *(size_t *)out = alloc ? alloc->bytes : 0;
                break;
        case CU_POINTER_ATTRIBUTE_MAPPED:
                *(unsigned *)out = alloc != NULL;
                break;
        case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
                *(unsigned long long *)out = 0;
                break;
        case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
                *(unsigned *)out =
                        alloc && (alloc->kind == SIM_ALLOC_DEVICE ? sim_config()->rdma
                                                                  : alloc->kind == SIM_ALLOC_MAPPED && alloc->flags);
                break;
        case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
                *(unsigned *)out = alloc ? CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE : 0;
                break;
        case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
                *(CUmemoryPool *)out = alloc ? alloc->pool : NULL;
                break;
        default:
                return attribute < CU_POINTER_ATTRIBUTE_CONTEXT ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_SUPPORTED;
        }
        return CUDA_SUCCESS;
}

SIM_API cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr dptr)
{
        struct sim_alloc *alloc;
        CUresult rc = CUDA_ERROR_INVALID_VALUE;

        SIM_ENTER(cuPointerGetAttribute);
        if (!out)
                return CUDA_ERROR_INVALID_VALUE;
        sim_memory_lock();
        alloc = known_at(dptr);
        if (alloc)
                rc = answer_attribute(out, attribute, alloc, dptr);
        sim_memory_unlock();
        return rc;
}

SIM_API cuPointerGetAttributes(unsigned n, CUpointer_attribute *attributes, void **out, CUdeviceptr dptr)
{
        struct sim_alloc *alloc;
        CUresult rc = CUDA_SUCCESS;

        SIM_ENTER(cuPointerGetAttributes);
        if (!n || !attributes || !out)
                return CUDA_ERROR_INVALID_VALUE;
        sim_memory_lock();
        alloc = known_at(dptr);
        for (unsigned i = 0; i < n && rc == CUDA_SUCCESS; i++) {
                rc = answer_attribute(out[i], attributes[i], alloc, dptr);
                if (!alloc && attributes[i] == CU_POINTER_ATTRIBUTE_HOST_POINTER) /* it may be host memory */
                        *(CUdeviceptr *)out[i] = dptr;
                /* In a query for several attributes, one that the pointer does not have is 0 and no error. */
                if (rc == CUDA_ERROR_INVALID_VALUE)
                        rc = CUDA_SUCCESS;
        }
        sim_memory_unlock();
        return rc;
}

SIM_API cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr dptr)
{
        struct sim_alloc *alloc;
        CUresult rc = CUDA_ERROR_INVALID_VALUE;

        SIM_ENTER(cuPointerSetAttribute);
        if (!value)
                return CUDA_ERROR_INVALID_VALUE;
        sim_memory_lock();
        alloc = known_at(dptr);
        if (alloc && alloc->kind == SIM_ALLOC_MAPPED) {
                rc = CUDA_ERROR_NOT_SUPPORTED; /* whatever the attribute */
        } else if (alloc && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) {
                alloc->sync_memops = *(const unsigned *)value != 0;
                rc = CUDA_SUCCESS;
        }
        sim_memory_unlock();
        return rc;
}

/* Whether all of it is mapped memory, in whatever pieces. Memory lock held. */
static bool is_mapped_locked(CUdeviceptr dptr, size_t bytes)
{
        struct sim_alloc *alloc;

        for (CUdeviceptr at = dptr; at < dptr + bytes; at = alloc->base + alloc->bytes) {
                alloc = sim_find_locked(at);
                if (!alloc || alloc->idle || alloc->kind != SIM_ALLOC_MAPPED)
                        return false;
        }
        return true;
}

/* The descriptor for mapped memory stands for nothing; no code here could use it. */
SIM_API cuMemGetHandleForAddressRange(void *handle, CUdeviceptr dptr, size_t bytes, CUmemRangeHandleType type,
                                      unsigned long long flags)
{
        struct sim_alloc *alloc;
        CUresult rc = CUDA_SUCCESS;
        int file = -1;

        SIM_ENTER(cuMemGetHandleForAddressRange);
        if (!handle || type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || !bytes || (dptr | bytes) % (size_t)getpagesize())
                return CUDA_ERROR_INVALID_VALUE;
        if (flags)
                return CUDA_ERROR_NOT_SUPPORTED;
        sim_memory_lock();
        alloc = sim_find_locked(dptr);
        if (is_mapped_locked(dptr, bytes))
                rc = (file = memfd_create("simulated dma-buf", MFD_CLOEXEC)) < 0 ? CUDA_ERROR_OUT_OF_MEMORY
                                                                                 : CUDA_SUCCESS;
        else if (!alloc || alloc->idle || bytes > alloc->bytes - (dptr - alloc->base))
                rc = CUDA_ERROR_INVALID_VALUE;
        /* The file holds a whole allocation, so a part of one, or one in a shared page, cannot be exported. */
        else if (alloc->kind != SIM_ALLOC_DEVICE || alloc->footprint % SIM_PAGE_BYTES || dptr != alloc->base)
                rc = CUDA_ERROR_NOT_SUPPORTED;
        else if (!sim_move_to_file_locked(alloc) || (file = fcntl(alloc->file - 1, F_DUPFD_CLOEXEC, 0)) < 0)
                rc = CUDA_ERROR_OUT_OF_MEMORY;
        sim_memory_unlock();
        if (rc == CUDA_SUCCESS)
                *(int *)handle = file;
        return rc;
}
