#include "safety_access.h"
#include "newer.h"

#include <string.h>

/* The pieces that a row of partial writes touches. */
enum { PIECE = 64 * 1024 };

/* The calling thread's context is the scene's; these functions go elsewhere for a moment. */
static CUresult enter(CUcontext ctx)
{
        return ctx ? cuCtxPushCurrent(ctx) : CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult leave(CUresult result)
{
        CUcontext ctx;

        GR_MUST(cuCtxPopCurrent(&ctx));
        return result;
}

/* The second call, made only if the first went well; a function would leave their order to the compiler. */
#define THEN(result, call) ((result) == CUDA_SUCCESS ? (call) : (result))

/* Kernels. */

static CUresult kernel(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        return gt_fill(&s->gt, stream, p, tag, bytes / 4);
}

static CUresult joined_kernels(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        CUevent event;
        CUresult result;
        size_t half = bytes / 2;

        GR_MUST(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        result = gt_fill(&s->gt, stream, p, tag, half / 4);
        if (result == CUDA_SUCCESS)
                result = cuEventRecord(event, stream);
        if (result == CUDA_SUCCESS)
                result = cuStreamWaitEvent(s->second, event, 0);
        if (result == CUDA_SUCCESS)
                result = gt_fill(&s->gt, s->second, p + half, tag, (bytes - half) / 4);
        GR_MUST(cuEventDestroy(event));
        return result;
}

static CUresult launch_ex(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag,
                          bool programmatic)
{
        __typeof__(&cuLaunchKernelEx) launch = GT_OPTIONAL(cuLaunchKernelEx);
        uint64_t words = bytes / 4;
        void *args[] = {&p, &tag, &words};
        CUlaunchAttribute attribute = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION};
        CUlaunchConfig config = {.gridDimX = GT_GRID,
                                 .gridDimY = 1,
                                 .gridDimZ = 1,
                                 .blockDimX = GT_BLOCK,
                                 .blockDimY = 1,
                                 .blockDimZ = 1,
                                 .hStream = stream,
                                 .attrs = &attribute,
                                 .numAttrs = programmatic};

        attribute.value.programmaticStreamSerializationAllowed = 1;
        return launch ? launch(&config, s->gt.fill, args, NULL) : CUDA_ERROR_NOT_FOUND;
}

static CUresult kernel_ex(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        return launch_ex(s, stream, p, bytes, tag, false);
}

/* May begin before the kernel in front of it on the stream has ended. */
static CUresult kernel_programmatic(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        return launch_ex(s, stream, p, bytes, tag, true);
}

static CUresult kernel_cooperative(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        __typeof__(&cuLaunchCooperativeKernel) launch = GT_OPTIONAL(cuLaunchCooperativeKernel);
        uint64_t words = bytes / 4;
        void *args[] = {&p, &tag, &words};

        if (!launch)
                return CUDA_ERROR_NOT_FOUND;
        return launch(s->gt.fill, GT_GRID, 1, 1, GT_BLOCK, 1, 1, 0, stream, args);
}

static void CUDA_CB nothing(void *unused)
{
        (void)unused;
}

static CUresult host_function_then_kernel(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes,
                                          uint32_t tag)
{
        CUresult result = cuLaunchHostFunc(stream, nothing, NULL);

        return THEN(result, kernel(s, stream, p, bytes, tag));
}

/* Graphs. */

static CUresult memset_async(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag);
static CUresult d_to_d_async(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag);
static CUresult h_to_d_async_pinned(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag);

/* Captures one operation and launches what was captured. */
static CUresult graph_of(access_fn write, const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes,
                         uint32_t tag)
{
        CUgraph graph = NULL;
        CUgraphExec exec;
        CUresult result = cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        CUresult end;

        if (result != CUDA_SUCCESS)
                return result;
        result = write(s, stream, p, bytes, tag);
        end = cuStreamEndCapture(stream, &graph);
        result = THEN(result, end);
        if (result == CUDA_SUCCESS)
                result = cuGraphInstantiate(&exec, graph, 0);
        if (result == CUDA_SUCCESS) {
                result = cuGraphLaunch(exec, stream);
                /* A launched graph lives on until it is done. */
                GR_MUST(cuGraphExecDestroy(exec));
        }
        if (graph)
                GR_MUST(cuGraphDestroy(graph));
        return result;
}

static CUresult graph_kernel(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        return graph_of(kernel, s, stream, p, bytes, tag);
}

static CUresult graph_memset(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        return graph_of(memset_async, s, stream, p, bytes, tag);
}

static CUresult graph_copy(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        return graph_of(d_to_d_async, s, stream, p, bytes, tag);
}

static CUresult graph_host_copy(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        return graph_of(h_to_d_async_pinned, s, stream, p, bytes, tag);
}

/* Only where the block came back at the address that the graph knows; else there is nothing to learn. */
static CUresult graph_captured_before(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        (void)bytes;
        if (tag != LATER || !s->ready_graph || s->ready_at != p)
                return CUDA_ERROR_NOT_SUPPORTED;
        return cuGraphLaunch(s->ready_graph, stream);
}

/* Copies from the host. */

static CUresult h_to_d_4_bytes(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        CUresult result = cuMemcpyHtoD(p, s->pageable[tag], 4);

        (void)stream;
        return THEN(result, cuMemcpyHtoD(p + bytes - 4, s->pageable[tag], 4));
}

/* In steps of 64 KiB, the size up to which the driver may put the data into the command stream itself. */
static CUresult h_to_d_64_kib(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        CUresult result = CUDA_SUCCESS;

        (void)stream;
        for (size_t at = 0; at < bytes && result == CUDA_SUCCESS; at += PIECE)
                result = cuMemcpyHtoD(p + at, s->pageable[tag], bytes - at < PIECE ? bytes - at : PIECE);
        return result;
}

static CUresult h_to_d_pageable(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        (void)stream;
        return cuMemcpyHtoD(p, s->pageable[tag], bytes);
}

static CUresult h_to_d_pinned(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        (void)stream;
        return cuMemcpyHtoD(p, s->pinned[tag], bytes);
}

static CUresult h_to_d_async_4_bytes(CUstream stream, CUdeviceptr p, size_t bytes, const void *source)
{
        CUresult result = cuMemcpyHtoDAsync(p, source, 4, stream);

        return THEN(result, cuMemcpyHtoDAsync(p + bytes - 4, source, 4, stream));
}

static CUresult h_to_d_async_4_bytes_pinned(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes,
                                            uint32_t tag)
{
        return h_to_d_async_4_bytes(stream, p, bytes, s->pinned[tag]);
}

static CUresult h_to_d_async_4_bytes_pageable(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes,
                                              uint32_t tag)
{
        return h_to_d_async_4_bytes(stream, p, bytes, s->pageable[tag]);
}

static CUresult h_to_d_async_pinned(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        return cuMemcpyHtoDAsync(p, s->pinned[tag], bytes, stream);
}

static CUresult h_to_d_async_pageable(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        return cuMemcpyHtoDAsync(p, s->pageable[tag], bytes, stream);
}

/* Copies on the device. */

static CUresult d_to_d(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        (void)stream;
        return cuMemcpyDtoD(p, s->source[tag], bytes);
}

static CUresult d_to_d_async(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        return cuMemcpyDtoDAsync(p, s->source[tag], bytes, stream);
}

static CUresult unified(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        (void)stream;
        return cuMemcpy(p, s->source[tag], bytes);
}

static CUresult unified_async(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        return cuMemcpyAsync(p, s->source[tag], bytes, stream);
}

/* Rows of 1 KiB, both sides dense. */
static CUDA_MEMCPY2D as_2d(const struct scene *s, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        return (CUDA_MEMCPY2D){.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                               .srcDevice = s->source[tag],
                               .srcPitch = 1024,
                               .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                               .dstDevice = p,
                               .dstPitch = 1024,
                               .WidthInBytes = 1024,
                               .Height = bytes / 1024};
}

static CUresult copy_2d(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        CUDA_MEMCPY2D copy = as_2d(s, p, bytes, tag);

        (void)stream;
        return cuMemcpy2D(&copy);
}

static CUresult copy_2d_unaligned(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        __typeof__(&cuMemcpy2DUnaligned) unaligned = GT_OPTIONAL(cuMemcpy2DUnaligned);
        CUDA_MEMCPY2D copy = as_2d(s, p, bytes, tag);

        (void)stream;
        return unaligned ? unaligned(&copy) : CUDA_ERROR_NOT_FOUND;
}

static CUresult copy_2d_async(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        CUDA_MEMCPY2D copy = as_2d(s, p, bytes, tag);

        return cuMemcpy2DAsync(&copy, stream);
}

static CUresult copy_2d_async_host(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        CUDA_MEMCPY2D copy = as_2d(s, p, bytes, tag);

        copy.srcMemoryType = CU_MEMORYTYPE_HOST;
        copy.srcHost = s->pinned[tag];
        return cuMemcpy2DAsync(&copy, stream);
}

static CUDA_MEMCPY3D as_3d(const struct scene *s, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        return (CUDA_MEMCPY3D){.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                               .srcDevice = s->source[tag],
                               .srcPitch = 512,
                               .srcHeight = 4,
                               .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                               .dstDevice = p,
                               .dstPitch = 512,
                               .dstHeight = 4,
                               .WidthInBytes = 512,
                               .Height = 4,
                               .Depth = bytes / 2048};
}

static CUresult copy_3d(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        __typeof__(&cuMemcpy3D) call = GT_OPTIONAL(cuMemcpy3D);
        CUDA_MEMCPY3D copy = as_3d(s, p, bytes, tag);

        (void)stream;
        return call ? call(&copy) : CUDA_ERROR_NOT_FOUND;
}

static CUresult copy_3d_async(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        __typeof__(&cuMemcpy3DAsync) call = GT_OPTIONAL(cuMemcpy3DAsync);
        CUDA_MEMCPY3D copy = as_3d(s, p, bytes, tag);

        return call ? call(&copy, stream) : CUDA_ERROR_NOT_FOUND;
}

static CUresult copy_batch(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        __typeof__(&cuMemcpyBatchAsync) call = GT_OPTIONAL(cuMemcpyBatchAsync);
        size_t half = bytes / 2, sizes[] = {half, bytes - half}, attribute_of = 0;
        CUdeviceptr to[] = {p, p + half}, from[] = {s->source[tag], s->source[tag] + half};
        CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};

        return call ? call(to, from, sizes, 2, &attributes, &attribute_of, 1, stream) : CUDA_ERROR_NOT_FOUND;
}

static CUresult copy_with_attributes(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        __typeof__(&cuMemcpyWithAttributesAsync) call =
                (__typeof__(call))gt_lookup_of("cuMemcpyWithAttributesAsync", 13020);
        CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};

        return call ? call(p, s->source[tag], bytes, &attributes, stream) : CUDA_ERROR_NOT_FOUND;
}

static CUresult copy_3d_with_attributes(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes,
                                        uint32_t tag)
{
        __typeof__(&cuMemcpy3DWithAttributesAsync) call =
                (__typeof__(call))gt_lookup_of("cuMemcpy3DWithAttributesAsync", 13020);
        CUDA_MEMCPY3D_BATCH_OP copy = {
                .src = {.type = CU_MEMCPY_OPERAND_TYPE_POINTER, .op.ptr = {s->source[tag], 512, 4, {0}}},
                .dst = {.type = CU_MEMCPY_OPERAND_TYPE_POINTER, .op.ptr = {p, 512, 4, {0}}},
                .extent = {512, 4, bytes / 2048},
                .srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        };

        return call ? call(&copy, 0, stream) : CUDA_ERROR_NOT_FOUND;
}

static CUresult copy_of_stream_ordered(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes,
                                       uint32_t tag)
{
        CUdeviceptr between;
        CUresult result = cuMemAllocAsync(&between, bytes, stream);

        if (result == CUDA_ERROR_OUT_OF_MEMORY) /* a limit that leaves no room for a second block */
                return CUDA_ERROR_NOT_SUPPORTED;
        if (result != CUDA_SUCCESS)
                return result;
        result = cuMemcpyHtoDAsync(between, s->pinned[tag], bytes, stream);
        result = THEN(result, cuMemcpyDtoDAsync(p, between, bytes, stream));
        GR_MUST(cuMemFreeAsync(between, stream));
        return result;
}

static CUresult array_to_d(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        __typeof__(&cuArrayCreate) create = GT_OPTIONAL(cuArrayCreate);
        __typeof__(&cuArrayDestroy) destroy = GT_OPTIONAL(cuArrayDestroy);
        __typeof__(&cuMemcpyHtoA) fill = GT_OPTIONAL(cuMemcpyHtoA);
        __typeof__(&cuMemcpyAtoD) copy = GT_OPTIONAL(cuMemcpyAtoD);
        CUDA_ARRAY_DESCRIPTOR shape = {.Width = 1024, .Format = CU_AD_FORMAT_UNSIGNED_INT32, .NumChannels = 1};
        CUarray array;
        CUresult result;

        (void)stream;
        if (!create || !destroy || !fill || !copy)
                return CUDA_ERROR_NOT_FOUND;
        result = create(&array, &shape);
        if (result != CUDA_SUCCESS)
                return result;
        result = fill(array, 0, s->pageable[tag], 4096);
        for (size_t at = 0; at < bytes && result == CUDA_SUCCESS; at += 4096)
                result = copy(p + at, array, 0, 4096);
        GR_MUST(destroy(array));
        return result;
}

/* Fills. */

static CUresult memset_d8(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        (void)s, (void)stream;
        return cuMemsetD8(p, (unsigned char)tag, bytes);
}

static CUresult memset_d16(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        (void)s, (void)stream;
        return cuMemsetD16(p, (unsigned short)tag, bytes / 2);
}

static CUresult memset_d32(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        (void)s, (void)stream;
        return cuMemsetD32(p, tag, bytes / 4);
}

static CUresult memset_d8_async(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        (void)s;
        return cuMemsetD8Async(p, (unsigned char)tag, bytes, stream);
}

static CUresult memset_d16_async(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        (void)s;
        return cuMemsetD16Async(p, (unsigned short)tag, bytes / 2, stream);
}

static CUresult memset_async(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        (void)s;
        return cuMemsetD32Async(p, tag, bytes / 4, stream);
}

static CUresult memset_2d_d8(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        (void)s, (void)stream;
        return cuMemsetD2D8(p, 1024, (unsigned char)tag, 1024, bytes / 1024);
}

static CUresult memset_2d_d16(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        (void)s, (void)stream;
        return cuMemsetD2D16(p, 1024, (unsigned short)tag, 512, bytes / 1024);
}

static CUresult memset_2d_d32(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        (void)s, (void)stream;
        return cuMemsetD2D32(p, 1024, tag, 256, bytes / 1024);
}

static CUresult memset_2d_async(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        (void)s;
        return cuMemsetD2D32Async(p, 1024, tag, 256, bytes / 1024, stream);
}

/* Stream memory operations. */

static CUresult write_value(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        CUresult result = cuStreamWriteValue32(stream, p, tag, 0);

        (void)s;
        return THEN(result, cuStreamWriteValue32(stream, p + bytes - 4, tag, 0));
}

static CUresult batch_mem_op(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        __typeof__(&cuStreamBatchMemOp) call = GT_OPTIONAL(cuStreamBatchMemOp);
        CUstreamBatchMemOpParams operations[2];

        (void)s;
        memset(operations, 0, sizeof operations);
        for (int i = 0; i < 2; i++) {
                operations[i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
                operations[i].writeValue.address = i ? p + bytes - 4 : p;
                operations[i].writeValue.value = tag;
        }
        return call ? call(stream, 2, operations, 0) : CUDA_ERROR_NOT_FOUND;
}

/* With a green context current, which has a default stream of its own. */

static CUresult green_kernel(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        CUresult result = enter(s->green.ctx);

        if (result != CUDA_SUCCESS)
                return result;
        result = leave(kernel(s, stream, p, bytes, tag));
        /* The kernels were loaded with the primary context current: a driver may hold to that. */
        return result == CUDA_ERROR_INVALID_HANDLE || result == CUDA_ERROR_INVALID_CONTEXT ? CUDA_ERROR_NOT_SUPPORTED
                                                                                           : result;
}

static CUresult green_copy(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        CUresult result = enter(s->green.ctx);

        return result == CUDA_SUCCESS ? leave(cuMemcpyDtoDAsync(p, s->source[tag], bytes, stream)) : result;
}

static CUresult green_default_copy(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        CUresult result = enter(s->green.ctx);

        (void)stream;
        if (result != CUDA_SUCCESS)
                return result;
        result = cuMemcpyDtoDAsync(p, s->source[tag], bytes, NULL);
        return leave(THEN(result, cuStreamSynchronize(NULL)));
}

/* From outside the block's context: another context of the device, another device. */

static CUresult peer_copy_same_device(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        return cuMemcpyPeerAsync(p, s->gt.ctx, s->source[tag], s->gt.ctx, bytes, stream);
}

static CUresult other_context(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        CUresult result = enter(s->other_ctx);

        (void)stream;
        if (result != CUDA_SUCCESS)
                return result;
        result = cuMemcpyDtoDAsync(p, s->source[tag], bytes, s->other_stream);
        return leave(THEN(result, cuStreamSynchronize(s->other_stream)));
}

static CUresult peer_copy(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        CUresult result = enter(s->peer_ctx);

        (void)stream;
        if (result != CUDA_SUCCESS)
                return result;
        result = cuMemcpyPeerAsync(p, s->gt.ctx, s->peer_source[tag], s->peer_ctx, bytes, s->peer_stream);
        return leave(THEN(result, cuStreamSynchronize(s->peer_stream)));
}

static CUresult peer_kernel(const struct scene *s, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag)
{
        struct gt there = s->gt;
        CUresult result = enter(s->peer_ctx);

        (void)stream;
        if (result != CUDA_SUCCESS)
                return result;
        there.fill = s->peer_fill;
        result = gt_fill(&there, s->peer_stream, p, tag, bytes / 4);
        return leave(THEN(result, cuStreamSynchronize(s->peer_stream)));
}

const struct access accesses[] = {
        {"kernel, legacy stream", kernel, LEGACY, .bytes_per = 4},
        {"kernel, per-thread stream", kernel, PER_THREAD, .bytes_per = 4},
        {"kernel, non-blocking stream", kernel, NON_BLOCKING, .bytes_per = 4},
        {"kernel, blocking stream", kernel, BLOCKING, .bytes_per = 4},
        {"kernel, new stream", kernel, FRESH, .bytes_per = 4},
        {"kernel, urgent stream", kernel, URGENT, .bytes_per = 4},
        {"kernel, green context", kernel, GREEN, .bytes_per = 4},
        {"kernel, green context current", green_kernel, GREEN, .bytes_per = 4},
        {"DtoDAsync, green context", d_to_d_async, GREEN, .bytes_per = 4},
        {"DtoDAsync, green context current", green_copy, GREEN, .bytes_per = 4},
        {"DtoDAsync, a green context's default stream", green_default_copy, NO_STREAM, .bytes_per = 4,
         .later_only = true},
        {"kernel, same stream", kernel, SAME, .bytes_per = 4, .later_only = true},
        {"kernel, other thread", kernel, PER_THREAD, .other_thread = true, .bytes_per = 4},
        {"kernels joined by an event", joined_kernels, JOINED, .bytes_per = 4},
        {"kernel, cuLaunchKernelEx", kernel_ex, NON_BLOCKING, .bytes_per = 4},
        {"kernel, programmatic", kernel_programmatic, NON_BLOCKING, .bytes_per = 4},
        {"kernel, programmatic, same stream", kernel_programmatic, SAME, .bytes_per = 4, .later_only = true},
        {"kernel, cooperative", kernel_cooperative, NON_BLOCKING, .bytes_per = 4},
        {"kernel after a host function", host_function_then_kernel, NON_BLOCKING, .bytes_per = 4},
        {"graph, kernel", graph_kernel, NON_BLOCKING, .bytes_per = 4},
        {"graph, memset", graph_memset, NON_BLOCKING, .bytes_per = 4},
        {"graph, copy", graph_copy, NON_BLOCKING, .bytes_per = 4},
        {"graph, copy from host", graph_host_copy, NON_BLOCKING, .bytes_per = 4},
        {"graph captured before", graph_captured_before, NON_BLOCKING, .bytes_per = 4, .later_only = true},
        {"HtoD 4 B pageable", h_to_d_4_bytes, NO_STREAM, .ends_only = true, .bytes_per = 4},
        {"HtoD 64 KiB pageable", h_to_d_64_kib, NO_STREAM, .bytes_per = 4},
        {"HtoD pageable", h_to_d_pageable, NO_STREAM, .bytes_per = 4},
        {"HtoD pinned", h_to_d_pinned, NO_STREAM, .bytes_per = 4},
        {"HtoDAsync 4 B pinned", h_to_d_async_4_bytes_pinned, NON_BLOCKING, .ends_only = true, .bytes_per = 4},
        {"HtoDAsync 4 B pageable", h_to_d_async_4_bytes_pageable, NON_BLOCKING, .ends_only = true, .bytes_per = 4,
         .later_only = true},
        {"HtoDAsync pinned", h_to_d_async_pinned, NON_BLOCKING, .bytes_per = 4},
        {"HtoDAsync pageable", h_to_d_async_pageable, NON_BLOCKING, .bytes_per = 4, .later_only = true},
        {"DtoD", d_to_d, NO_STREAM, .bytes_per = 4},
        {"DtoDAsync", d_to_d_async, NON_BLOCKING, .bytes_per = 4},
        {"DtoDAsync, legacy stream", d_to_d_async, LEGACY, .bytes_per = 4},
        {"cuMemcpy", unified, NO_STREAM, .bytes_per = 4},
        {"cuMemcpyAsync", unified_async, NON_BLOCKING, .bytes_per = 4},
        {"cuMemcpy2D", copy_2d, NO_STREAM, .bytes_per = 4},
        {"cuMemcpy2DUnaligned", copy_2d_unaligned, NO_STREAM, .bytes_per = 4},
        {"cuMemcpy2DAsync", copy_2d_async, NON_BLOCKING, .bytes_per = 4},
        {"cuMemcpy2DAsync from host", copy_2d_async_host, NON_BLOCKING, .bytes_per = 4},
        {"cuMemcpy3D", copy_3d, NO_STREAM, .bytes_per = 4},
        {"cuMemcpy3DAsync", copy_3d_async, NON_BLOCKING, .bytes_per = 4},
        {"cuMemcpyBatchAsync", copy_batch, NON_BLOCKING, .bytes_per = 4},
        {"cuMemcpyWithAttributesAsync", copy_with_attributes, NON_BLOCKING, .bytes_per = 4},
        {"cuMemcpy3DWithAttributesAsync", copy_3d_with_attributes, NON_BLOCKING, .bytes_per = 4},
        {"copy of a stream-ordered block", copy_of_stream_ordered, NON_BLOCKING, .bytes_per = 4},
        {"cuMemcpyAtoD", array_to_d, NO_STREAM, .bytes_per = 4},
        {"cuMemsetD8", memset_d8, NO_STREAM, .bytes_per = 1},
        {"cuMemsetD16", memset_d16, NO_STREAM, .bytes_per = 2},
        {"cuMemsetD32", memset_d32, NO_STREAM, .bytes_per = 4},
        {"cuMemsetD8Async", memset_d8_async, NON_BLOCKING, .bytes_per = 1},
        {"cuMemsetD16Async", memset_d16_async, NON_BLOCKING, .bytes_per = 2},
        {"cuMemsetD32Async", memset_async, NON_BLOCKING, .bytes_per = 4},
        {"cuMemsetD2D8", memset_2d_d8, NO_STREAM, .bytes_per = 1},
        {"cuMemsetD2D16", memset_2d_d16, NO_STREAM, .bytes_per = 2},
        {"cuMemsetD2D32", memset_2d_d32, NO_STREAM, .bytes_per = 4},
        {"cuMemsetD2D32Async", memset_2d_async, NON_BLOCKING, .bytes_per = 4},
        {"cuStreamWriteValue32", write_value, NON_BLOCKING, .ends_only = true, .bytes_per = 4},
        {"cuStreamBatchMemOp", batch_mem_op, NON_BLOCKING, .ends_only = true, .bytes_per = 4},
        {"cuMemcpyPeerAsync, same device", peer_copy_same_device, NON_BLOCKING, .bytes_per = 4},
        {"copy, other context", other_context, NO_STREAM, .bytes_per = 4},
        {"copy, peer device", peer_copy, NO_STREAM, .bytes_per = 4},
        {"kernel, peer device", peer_kernel, NO_STREAM, .bytes_per = 4},
};
const size_t access_count = sizeof accesses / sizeof accesses[0];
