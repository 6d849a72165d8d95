/* Copies and fills: every variant becomes one operation on a stream. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

/* Pageable sources up to this size are staged during the call, as by the driver; for larger ones the call waits. */
#define STAGE_BYTES ((size_t)64 << 10)

/* Whether address is ordinary host memory: not the device's, not pinned, not managed. */
static bool is_pageable(uintptr_t address)
{
        return !sim_is_device_address(address) && !sim_find(address);
}

/* Whether a copy in the current context may use this address: mapped memory must have been given to its device. */
static bool has_access(uintptr_t address)
{
        struct sim_alloc *alloc = sim_find(address);
        CUcontext ctx;
        bool may;

        if (!alloc || alloc->kind != SIM_ALLOC_MAPPED)
                return true;
        sim_lock();
        may = sim_current(&ctx) != CUDA_SUCCESS || (alloc->access >> ctx->device & 1);
        sim_unlock();
        return may;
}

/* peers: the call names both contexts, and so can copy all their memory. */
static CUresult copy_box(struct sim_op *op, CUstream stream, bool wait, bool peers)
{
        if (op->u.copy.width == 0 || op->u.copy.height == 0 || op->u.copy.depth == 0)
                return CUDA_SUCCESS;
        if (!op->u.copy.dst || !op->u.copy.src ||
            (!peers && !(has_access(op->u.copy.dst) && has_access(op->u.copy.src))))
                return CUDA_ERROR_INVALID_VALUE;
        return sim_submit(stream, op, wait);
}

static bool is_capturing(CUstream handle)
{
        bool capturing;
        CUstream s;

        sim_lock();
        capturing = sim_stream_resolve(handle, &s) == CUDA_SUCCESS && s->capture;
        sim_unlock();
        return capturing;
}

static CUresult copy_by(bool peers, uintptr_t dst, uintptr_t src, size_t bytes, CUstream stream, bool async)
{
        struct sim_op op = {.kind = SIM_OP_COPY,
                            .u.copy = {.dst = dst, .src = src, .width = bytes, .height = 1, .depth = 1}};
        bool wait = !async;

        if (async && bytes && dst && src && !is_capturing(stream)) {
                if (is_pageable(src) && bytes <= STAGE_BYTES) {
                        op.u.copy.staged = malloc(bytes);
                        if (!op.u.copy.staged)
                                return CUDA_ERROR_OUT_OF_MEMORY;
                        memcpy(op.u.copy.staged, (const void *)src, bytes);
                        op.u.copy.src = (uintptr_t)op.u.copy.staged;
                } else if (is_pageable(src)) {
                        wait = true;
                }
                wait = wait || is_pageable(dst);
        }
        return copy_box(&op, stream, wait, peers);
}

static CUresult copy_memory(uintptr_t dst, uintptr_t src, size_t bytes, CUstream stream, bool async)
{
        return copy_by(false, dst, src, bytes, stream, async);
}

SIM_PTDS(cuMemcpy, (CUdeviceptr dst, CUdeviceptr src, size_t bytes), (dst, src, bytes))
{
        return copy_memory(dst, src, bytes, stream, false);
}

SIM_PTDS(cuMemcpyHtoD_v2, (CUdeviceptr dst, const void *src, size_t bytes), (dst, src, bytes))
{
        return copy_memory(dst, (uintptr_t)src, bytes, stream, false);
}

SIM_PTDS(cuMemcpyDtoH_v2, (void *dst, CUdeviceptr src, size_t bytes), (dst, src, bytes))
{
        return copy_memory((uintptr_t)dst, src, bytes, stream, false);
}

/* Within device memory even the synchronous call returns before the copy is done. */
SIM_PTDS(cuMemcpyDtoD_v2, (CUdeviceptr dst, CUdeviceptr src, size_t bytes), (dst, src, bytes))
{
        return copy_memory(dst, src, bytes, stream, true);
}

SIM_PTDS(cuMemcpyPeer, (CUdeviceptr dst, CUcontext to, CUdeviceptr src, CUcontext from, size_t bytes),
         (dst, to, src, from, bytes))
{
        if (!to || !from)
                return CUDA_ERROR_INVALID_CONTEXT;
        return copy_by(true, dst, src, bytes, stream, true);
}

SIM_PTSZ(cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream), (dst, src, bytes, stream))
{
        return copy_memory(dst, src, bytes, stream, true);
}

SIM_PTSZ(cuMemcpyWithAttributesAsync,
         (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUmemcpyAttributes *attributes, CUstream stream),
         (dst, src, bytes, attributes, stream))
{
        return attributes ? copy_memory(dst, src, bytes, stream, true) : CUDA_ERROR_INVALID_VALUE;
}

SIM_PTSZ(cuMemcpyHtoDAsync_v2, (CUdeviceptr dst, const void *src, size_t bytes, CUstream stream),
         (dst, src, bytes, stream))
{
        return copy_memory(dst, (uintptr_t)src, bytes, stream, true);
}

SIM_PTSZ(cuMemcpyDtoHAsync_v2, (void *dst, CUdeviceptr src, size_t bytes, CUstream stream), (dst, src, bytes, stream))
{
        return copy_memory((uintptr_t)dst, src, bytes, stream, true);
}

SIM_PTSZ(cuMemcpyDtoDAsync_v2, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream),
         (dst, src, bytes, stream))
{
        return copy_memory(dst, src, bytes, stream, true);
}

SIM_PTSZ(cuMemcpyPeerAsync,
         (CUdeviceptr dst, CUcontext to, CUdeviceptr src, CUcontext from, size_t bytes, CUstream stream),
         (dst, to, src, from, bytes, stream))
{
        if (!to || !from)
                return CUDA_ERROR_INVALID_CONTEXT;
        return copy_by(true, dst, src, bytes, stream, true);
}

/* The start of one side of a 2D or 3D copy; 0 for an array, which is not simulated. */
static uintptr_t side_start(CUmemorytype type, const void *host, CUdeviceptr device, size_t offset)
{
        switch (type) {
        case CU_MEMORYTYPE_HOST:
                return (uintptr_t)host + offset;
        case CU_MEMORYTYPE_DEVICE:
        case CU_MEMORYTYPE_UNIFIED:
                return (uintptr_t)device + offset;
        default:
                return 0;
        }
}

static CUresult copy_2d(const CUDA_MEMCPY2D *c, CUstream stream, bool async)
{
        struct sim_op op = {.kind = SIM_OP_COPY};
        size_t src_pitch, dst_pitch;

        if (!c)
                return CUDA_ERROR_INVALID_VALUE;
        if (c->srcMemoryType == CU_MEMORYTYPE_ARRAY || c->dstMemoryType == CU_MEMORYTYPE_ARRAY)
                return CUDA_ERROR_NOT_SUPPORTED;
        src_pitch = c->srcPitch ? c->srcPitch : c->WidthInBytes + c->srcXInBytes;
        dst_pitch = c->dstPitch ? c->dstPitch : c->WidthInBytes + c->dstXInBytes;
        if (src_pitch < c->srcXInBytes + c->WidthInBytes || dst_pitch < c->dstXInBytes + c->WidthInBytes)
                return CUDA_ERROR_INVALID_VALUE;
        op.u.copy.src = side_start(c->srcMemoryType, c->srcHost, c->srcDevice, c->srcY * src_pitch + c->srcXInBytes);
        op.u.copy.dst = side_start(c->dstMemoryType, c->dstHost, c->dstDevice, c->dstY * dst_pitch + c->dstXInBytes);
        op.u.copy.src_pitch = src_pitch;
        op.u.copy.dst_pitch = dst_pitch;
        op.u.copy.width = c->WidthInBytes;
        op.u.copy.height = c->Height;
        op.u.copy.depth = 1;
        return copy_box(&op, stream,
                        !is_capturing(stream) && (!async || is_pageable(op.u.copy.src) || is_pageable(op.u.copy.dst)),
                        false);
}

SIM_PTDS(cuMemcpy2D_v2, (const CUDA_MEMCPY2D *c), (c))
{
        return copy_2d(c, stream, false);
}

SIM_PTDS(cuMemcpy2DUnaligned_v2, (const CUDA_MEMCPY2D *c), (c))
{
        return copy_2d(c, stream, false);
}

SIM_PTSZ(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *c, CUstream stream), (c, stream))
{
        return copy_2d(c, stream, true);
}

static CUresult copy_3d(const CUDA_MEMCPY3D *c, CUstream stream, bool async)
{
        struct sim_op op = {.kind = SIM_OP_COPY};

        if (!c)
                return CUDA_ERROR_INVALID_VALUE;
        if (c->srcMemoryType == CU_MEMORYTYPE_ARRAY || c->dstMemoryType == CU_MEMORYTYPE_ARRAY)
                return CUDA_ERROR_NOT_SUPPORTED;
        op.u.copy.src_pitch = c->srcPitch ? c->srcPitch : c->WidthInBytes + c->srcXInBytes;
        op.u.copy.dst_pitch = c->dstPitch ? c->dstPitch : c->WidthInBytes + c->dstXInBytes;
        op.u.copy.src_slice = op.u.copy.src_pitch * (c->srcHeight ? c->srcHeight : c->Height + c->srcY);
        op.u.copy.dst_slice = op.u.copy.dst_pitch * (c->dstHeight ? c->dstHeight : c->Height + c->dstY);
        op.u.copy.src = side_start(c->srcMemoryType, c->srcHost, c->srcDevice,
                                   c->srcZ * op.u.copy.src_slice + c->srcY * op.u.copy.src_pitch + c->srcXInBytes);
        op.u.copy.dst = side_start(c->dstMemoryType, c->dstHost, c->dstDevice,
                                   c->dstZ * op.u.copy.dst_slice + c->dstY * op.u.copy.dst_pitch + c->dstXInBytes);
        op.u.copy.width = c->WidthInBytes;
        op.u.copy.height = c->Height;
        op.u.copy.depth = c->Depth;
        return copy_box(&op, stream,
                        !is_capturing(stream) && (!async || is_pageable(op.u.copy.src) || is_pageable(op.u.copy.dst)),
                        false);
}

SIM_PTDS(cuMemcpy3D_v2, (const CUDA_MEMCPY3D *c), (c))
{
        return copy_3d(c, stream, false);
}

SIM_PTSZ(cuMemcpy3DAsync_v2, (const CUDA_MEMCPY3D *c, CUstream stream), (c, stream))
{
        return copy_3d(c, stream, true);
}

SIM_PTSZ(cuMemcpy3DWithAttributesAsync, (CUDA_MEMCPY3D_BATCH_OP * c, unsigned long long flags, CUstream stream),
         (c, flags, stream))
{
        CUDA_MEMCPY3D plain = {.srcMemoryType = CU_MEMORYTYPE_UNIFIED, .dstMemoryType = CU_MEMORYTYPE_UNIFIED};

        if (!c || flags)
                return CUDA_ERROR_INVALID_VALUE;
        if (c->src.type != CU_MEMCPY_OPERAND_TYPE_POINTER || c->dst.type != CU_MEMCPY_OPERAND_TYPE_POINTER)
                return CUDA_ERROR_NOT_SUPPORTED;
        plain.srcDevice = c->src.op.ptr.ptr;
        plain.srcPitch = c->src.op.ptr.rowLength;
        plain.srcHeight = c->src.op.ptr.layerHeight;
        plain.dstDevice = c->dst.op.ptr.ptr;
        plain.dstPitch = c->dst.op.ptr.rowLength;
        plain.dstHeight = c->dst.op.ptr.layerHeight;
        plain.WidthInBytes = c->extent.width;
        plain.Height = c->extent.height;
        plain.Depth = c->extent.depth;
        return copy_3d(&plain, stream, true);
}

/* Fills of device memory return before they are done, even the synchronous ones. */
static CUresult fill_memory(CUdeviceptr dst, size_t pitch, uint32_t value, unsigned element, size_t width,
                            size_t height, CUstream stream)
{
        struct sim_op op = {.kind = SIM_OP_FILL,
                            .u.fill = {.dst = dst,
                                       .pitch = pitch,
                                       .width = width,
                                       .height = height,
                                       .element = element,
                                       .value = value}};

        if (width == 0 || height == 0)
                return CUDA_SUCCESS;
        if (!dst || dst % element || (height > 1 && pitch < width * element))
                return CUDA_ERROR_INVALID_VALUE;
        return sim_submit(stream, &op, false);
}

#define FILL_API(symbol, type)                                                                                         \
        SIM_PTDS(symbol, (CUdeviceptr dst, type value, size_t n), (dst, value, n))                                     \
        {                                                                                                              \
                return fill_memory(dst, 0, value, sizeof value, n, 1, stream);                                         \
        }
#define FILL_ASYNC_API(symbol, type)                                                                                   \
        SIM_PTSZ(symbol, (CUdeviceptr dst, type value, size_t n, CUstream stream), (dst, value, n, stream))            \
        {                                                                                                              \
                return fill_memory(dst, 0, value, sizeof value, n, 1, stream);                                         \
        }
#define FILL_2D_API(symbol, type)                                                                                      \
        SIM_PTDS(symbol, (CUdeviceptr dst, size_t pitch, type value, size_t width, size_t height),                     \
                 (dst, pitch, value, width, height))                                                                   \
        {                                                                                                              \
                return fill_memory(dst, pitch, value, sizeof value, width, height, stream);                            \
        }
#define FILL_2D_ASYNC_API(symbol, type)                                                                                \
        SIM_PTSZ(symbol, (CUdeviceptr dst, size_t pitch, type value, size_t width, size_t height, CUstream stream),    \
                 (dst, pitch, value, width, height, stream))                                                           \
        {                                                                                                              \
                return fill_memory(dst, pitch, value, sizeof value, width, height, stream);                            \
        }

FILL_API(cuMemsetD8_v2, unsigned char)
FILL_API(cuMemsetD16_v2, unsigned short)
FILL_API(cuMemsetD32_v2, unsigned)
FILL_ASYNC_API(cuMemsetD8Async, unsigned char)
FILL_ASYNC_API(cuMemsetD16Async, unsigned short)
FILL_ASYNC_API(cuMemsetD32Async, unsigned)
FILL_2D_API(cuMemsetD2D8_v2, unsigned char)
FILL_2D_API(cuMemsetD2D16_v2, unsigned short)
FILL_2D_API(cuMemsetD2D32_v2, unsigned)
FILL_2D_ASYNC_API(cuMemsetD2D8Async, unsigned char)
FILL_2D_ASYNC_API(cuMemsetD2D16Async, unsigned short)
FILL_2D_ASYNC_API(cuMemsetD2D32Async, unsigned)
