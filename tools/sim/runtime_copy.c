/* The runtime's copies and fills. */
#include "runtime.h"

/*
 * The per-thread variants of the synchronous calls use the thread's own stream: they make the driver's asynchronous
 * call and wait for it.
 */
static cudaError_t copy_memory(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind)
{
        cudaError_t rc = rt_enter();

        if (rc != cudaSuccess || !bytes)
                return rc;
        switch (kind) {
        case cudaMemcpyHostToDevice:
                return rt_result(rt_driver.cuMemcpyHtoD(RT_DPTR(dst), src, bytes));
        case cudaMemcpyDeviceToHost:
                return rt_result(rt_driver.cuMemcpyDtoH(dst, RT_DPTR(src), bytes));
        case cudaMemcpyDeviceToDevice:
                return rt_result(rt_driver.cuMemcpyDtoD(RT_DPTR(dst), RT_DPTR(src), bytes));
        case cudaMemcpyHostToHost:
        case cudaMemcpyDefault:
                return rt_result(rt_driver.cuMemcpy(RT_DPTR(dst), RT_DPTR(src), bytes));
        default:
                return rt_failed(cudaErrorInvalidMemcpyDirection);
        }
}

RT_PTSZ(cudaMemcpyAsync, (void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream),
        (dst, src, bytes, kind, stream))
{
        cudaError_t rc = rt_enter();

        if (rc != cudaSuccess || !bytes)
                return rc;
        switch (kind) {
        case cudaMemcpyHostToDevice:
                return rt_result(rt_driver.cuMemcpyHtoDAsync(RT_DPTR(dst), src, bytes, stream));
        case cudaMemcpyDeviceToHost:
                return rt_result(rt_driver.cuMemcpyDtoHAsync(dst, RT_DPTR(src), bytes, stream));
        case cudaMemcpyDeviceToDevice:
                return rt_result(rt_driver.cuMemcpyDtoDAsync(RT_DPTR(dst), RT_DPTR(src), bytes, stream));
        case cudaMemcpyHostToHost:
        case cudaMemcpyDefault:
                return rt_result(rt_driver.cuMemcpyAsync(RT_DPTR(dst), RT_DPTR(src), bytes, stream));
        default:
                return rt_failed(cudaErrorInvalidMemcpyDirection);
        }
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind)
{
        return copy_memory(dst, src, bytes, kind);
}

RT_EXPORT cudaError_t cudaMemcpy_ptds(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind);
cudaError_t cudaMemcpy_ptds(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind)
{
        cudaError_t rc = cudaMemcpyAsync(dst, src, bytes, kind, cudaStreamPerThread);

        return rc != cudaSuccess ? rc : rt_result(rt_driver.cuStreamSynchronize(cudaStreamPerThread));
}

cudaError_t cudaMemcpyPeer(void *dst, int to, const void *src, int from, size_t bytes)
{
        return cudaMemcpyPeerAsync(dst, to, src, from, bytes, NULL);
}

/* The driver's call takes contexts instead of devices: the primary ones, which exist as the memory does. */
cudaError_t cudaMemcpyPeerAsync(void *dst, int to, const void *src, int from, size_t bytes, cudaStream_t stream)
{
        CUcontext to_ctx, from_ctx;
        cudaError_t rc = rt_enter();

        if (rc != cudaSuccess)
                return rc;
        if (rt_driver.cuDevicePrimaryCtxRetain(&to_ctx, to) || rt_driver.cuDevicePrimaryCtxRetain(&from_ctx, from))
                return rt_failed(cudaErrorInvalidDevice);
        return rt_result(rt_driver.cuMemcpyPeerAsync(RT_DPTR(dst), to_ctx, RT_DPTR(src), from_ctx, bytes, stream));
}

/* kind says which side is host memory; with cudaMemcpyDefault the driver decides by the address. */
static CUDA_MEMCPY2D describe_box(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                                  size_t height, enum cudaMemcpyKind kind)
{
        CUDA_MEMCPY2D c = {.srcMemoryType = CU_MEMORYTYPE_UNIFIED,
                           .srcDevice = RT_DPTR(src),
                           .srcHost = src,
                           .srcPitch = src_pitch,
                           .dstMemoryType = CU_MEMORYTYPE_UNIFIED,
                           .dstDevice = RT_DPTR(dst),
                           .dstHost = dst,
                           .dstPitch = dst_pitch,
                           .WidthInBytes = width,
                           .Height = height};

        if (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyHostToHost)
                c.srcMemoryType = CU_MEMORYTYPE_HOST;
        if (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost)
                c.dstMemoryType = CU_MEMORYTYPE_HOST;
        return c;
}

cudaError_t cudaMemcpy2D(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height,
                         enum cudaMemcpyKind kind)
{
        CUDA_MEMCPY2D c = describe_box(dst, dst_pitch, src, src_pitch, width, height, kind);

        RT(cuMemcpy2DUnaligned(&c));
}

RT_PTSZ(cudaMemcpy2DAsync,
        (void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height,
         enum cudaMemcpyKind kind, cudaStream_t stream),
        (dst, dst_pitch, src, src_pitch, width, height, kind, stream))
{
        CUDA_MEMCPY2D c = describe_box(dst, dst_pitch, src, src_pitch, width, height, kind);

        RT(cuMemcpy2DAsync(&c, stream));
}

cudaError_t cudaMemset(void *dst, int value, size_t bytes)
{
        RT(cuMemsetD8(RT_DPTR(dst), (unsigned char)value, bytes));
}

RT_EXPORT cudaError_t cudaMemset_ptds(void *dst, int value, size_t bytes);
cudaError_t cudaMemset_ptds(void *dst, int value, size_t bytes)
{
        RT(cuMemsetD8Async(RT_DPTR(dst), (unsigned char)value, bytes, cudaStreamPerThread));
}

RT_PTSZ(cudaMemsetAsync, (void *dst, int value, size_t bytes, cudaStream_t stream), (dst, value, bytes, stream))
{
        RT(cuMemsetD8Async(RT_DPTR(dst), (unsigned char)value, bytes, stream));
}

cudaError_t cudaMemset2D(void *dst, size_t pitch, int value, size_t width, size_t height)
{
        RT(cuMemsetD2D8(RT_DPTR(dst), pitch, (unsigned char)value, width, height));
}

RT_PTSZ(cudaMemset2DAsync, (void *dst, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream),
        (dst, pitch, value, width, height, stream))
{
        RT(cuMemsetD2D8Async(RT_DPTR(dst), pitch, (unsigned char)value, width, height, stream));
}

/* Variables of device code live in images, which the simulated device does not read. */
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *src, size_t bytes, size_t offset,
                               enum cudaMemcpyKind kind)
{
        (void)symbol, (void)src, (void)bytes, (void)offset, (void)kind;
        return rt_failed(cudaErrorInvalidSymbol);
}

cudaError_t cudaMemcpyFromSymbol(void *dst, const void *symbol, size_t bytes, size_t offset, enum cudaMemcpyKind kind)
{
        (void)dst, (void)symbol, (void)bytes, (void)offset, (void)kind;
        return rt_failed(cudaErrorInvalidSymbol);
}
