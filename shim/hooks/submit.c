/*
 * The first work that is not on the legacy default stream. A stream that the program makes is noticed before (stream.c)
 * unless it counts as one without work; but no call creates the per-thread streams (nvcc's --default-stream per-thread,
 * and the handle CU_STREAM_PER_THREAD). So these are noticed at the first work on them, a copy or fill included: even
 * that may wait for work that another thread submits later to its own stream.
 *
 * Work beside a capture is noticed here, too (gr_captures_note_work).
 *
 * A launch may take memory: for code that is loaded at its first use, for the local memory of its threads, and for the
 * heap that kernels allocate from. Where the driver has none left, it gets what is cached.
 *
 * A copy by another device can write to memory without peer access. Its context does not wait for the barriers of that
 * memory until it is known to write there. A graph can have work of several devices, which waits for what the stream of
 * its launch waits for. So a launch counts as such a copy, to all devices that graphs work on or write to.
 *
 * Every launch passes one of these hooks, so they only compare the stream's handle, two flags, and the result.
 */
#include "hooks/submit.h"

#include <errno.h>
#include <stdlib.h>

#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/captures.h"
#include "hooks/context.h"

/*
 * Whether a launch failed for lack of memory. "Out of resources" means that the heap has no room, or that a block needs
 * more of a multiprocessor than there is. In the first case the driver reckons that a block fits.
 */
static __attribute__((noinline, cold)) bool launch_lacks_memory(CUresult result, CUfunction function, unsigned threads,
                                                                size_t shared_bytes)
{
        int blocks = 0;

        if (result != CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)
                return result == CUDA_ERROR_OUT_OF_MEMORY;
        return gr_real.cuOccupancyMaxActiveBlocksPerMultiprocessor &&
               gr_real.cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, (int)threads, shared_bytes) ==
                       CUDA_SUCCESS &&
               blocks > 0;
}
#define LAUNCH_LACKS_MEMORY(result) launch_lacks_memory(result, function, block_x *block_y *block_z, shared_bytes)
#define LAUNCH_EX_LACKS_MEMORY(result)                                                                                 \
        (config && launch_lacks_memory(result, function, config->blockDimX * config->blockDimY * config->blockDimZ,    \
                                       config->sharedMemBytes))

/* The context in which work of the stream runs; NULL where there is none or it cannot be managed. */
static struct gr_context *context_of(CUstream stream)
{
        CUcontext handle;

        if (!stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD || !gr_real.cuStreamGetCtx ||
            gr_real.cuStreamGetCtx(stream, &handle) != CUDA_SUCCESS)
                return gr_context_current();
        return gr_context_visit(handle);
}

bool gr_submit_begin(CUstream stream, enum gr_null_stream null_stream)
{
        const struct gr_context *by;
        GR_KEEP_ERRNO;
        GR_NO_CANCEL;

        if (gr_submit_is_first(stream, null_stream) && gr_shim_ready())
                gr_core_note_overlap(&gr_core);
        if (!gr_captures_are_open())
                return false;
        gr_captures_note_work(stream, null_stream);
        if (!gr_submit_may_be_far() || !gr_capture_on(stream, null_stream))
                return false;
        by = context_of(stream);
        gr_core_note_graph(&gr_core, by ? GR_DEVICE_BIT(by->ordinal) : GR_ALL_DEVICES);
        return true;
}

/*
 * Work of the stream is about to write at `to`. Where that is memory of another device and its context is no peer, the
 * fences of that device do not cover it yet. Only writes matter: what the program reads there it has written before,
 * behind the fence. Work that is captured writes when its graph is launched.
 */
static __attribute__((noinline, cold)) void write_at(CUstream stream, bool captured, CUdeviceptr to)
{
        CUmemorytype type = 0;
        int device = -1;
        void *answers[] = {&type, &device};
        CUpointer_attribute which[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
        struct gr_context *by;
        GR_KEEP_ERRNO;
        GR_NO_CANCEL;

        if (!to || !gr_shim_ready() || !gr_real.cuPointerGetAttributes ||
            gr_real.cuPointerGetAttributes(2, which, answers, to) != CUDA_SUCCESS || type != CU_MEMORYTYPE_DEVICE ||
            device < 0 || device >= GR_DEVICES_MAX)
                return;
        by = captured ? NULL : context_of(stream);
        if (captured)
                gr_core_note_graph(&gr_core, GR_DEVICE_BIT(device));
        else if (by)
                gr_core_reach(&gr_core, GR_DEVICE_BIT(device), by);
}

void gr_submit_reach(CUstream stream, CUdeviceptr at)
{
        write_at(stream, false, at);
}

void gr_submit_graph(CUstream stream)
{
        uint64_t devices = atomic_load(&gr_core.graph_devices);
        struct gr_context *by;
        GR_KEEP_ERRNO;
        GR_NO_CANCEL;

        by = devices && gr_shim_ready() ? context_of(stream) : NULL;
        if (by)
                gr_core_reach(&gr_core, devices, by);
}

/* Where the copy that a structure of the driver describes writes; 0: not to linear memory of a device. */
#define WRITTEN_BY(copy)                                                                                               \
        ((copy) && ((copy)->dstMemoryType == CU_MEMORYTYPE_DEVICE || (copy)->dstMemoryType == CU_MEMORYTYPE_UNIFIED)   \
                 ? (copy)->dstDevice                                                                                   \
                 : 0)

static void write_each(CUstream stream, bool captured, const CUdeviceptr *to, size_t count)
{
        for (size_t i = 0; to && i < count; i++)
                write_at(stream, captured, to[i]);
}

static void copy_each(CUstream stream, bool captured, const CUDA_MEMCPY3D_BATCH_OP *copies, size_t count)
{
        for (size_t i = 0; copies && i < count; i++)
                if (copies[i].dst.type == CU_MEMCPY_OPERAND_TYPE_POINTER)
                        write_at(stream, captured, copies[i].dst.op.ptr.ptr);
}

static void decompress_each(CUstream stream, bool captured, const CUmemDecompressParams *parameters, size_t count)
{
        for (size_t i = 0; parameters && i < count; i++)
                write_at(stream, captured, (CUdeviceptr)(uintptr_t)parameters[i].dst);
}

/*
 * The rare case is a function of its own, so that the hook itself calls no function but the driver's. far: whether
 * written has to be done before; it may use `captured`.
 */
#define SUBMISSION_BY(symbol, stream, null_stream, lacks, far, written, parameters, ...)                               \
        static __attribute__((noinline, cold)) CUresult symbol##_first parameters                                      \
        {                                                                                                              \
                GR_PASS_GATE;                                                                                          \
                const bool captured = gr_submit_begin(stream, null_stream);                                            \
                                                                                                                       \
                (void)captured;                                                                                        \
                if (far)                                                                                               \
                        written;                                                                                       \
                return GR_REAL(symbol, __VA_ARGS__);                                                                   \
        }                                                                                                              \
        GR_EXPORT CUresult CUDAAPI symbol parameters                                                                   \
        {                                                                                                              \
                __typeof__(symbol) *real = __atomic_load_n(&gr_real.symbol, __ATOMIC_RELAXED);                         \
                                                                                                                       \
                if (__builtin_expect(!real || gr_submit_is_first(stream, null_stream) || gr_captures_are_open() ||     \
                                             gr_sleep_is_on() || (far),                                                \
                                     0))                                                                               \
                        real = symbol##_first;                                                                         \
                return GR_WITH_ROOM_WHERE(lacks, -1, real(__VA_ARGS__));                                               \
        }
#define SUBMISSION_OF(symbol, stream, lacks, parameters, ...)                                                          \
        SUBMISSION_BY(symbol, stream, GR_NULL_LEGACY, lacks, false, (void)0, parameters, __VA_ARGS__)                  \
        SUBMISSION_BY(symbol##_ptsz, stream, GR_NULL_PER_THREAD, lacks, false, (void)0, parameters, __VA_ARGS__)
#define SUBMISSION(symbol, stream, parameters, ...)                                                                    \
        SUBMISSION_OF(symbol, stream, GR_IS_OUT_OF_MEMORY, parameters, __VA_ARGS__)
/* Work that writes, and where. */
#define WRITE(symbol, stream, written, parameters, ...)                                                                \
        SUBMISSION_BY(symbol, stream, GR_NULL_LEGACY, GR_IS_OUT_OF_MEMORY, gr_submit_may_be_far(), written,            \
                      parameters, __VA_ARGS__)                                                                         \
        SUBMISSION_BY(symbol##_ptsz, stream, GR_NULL_PER_THREAD, GR_IS_OUT_OF_MEMORY, gr_submit_may_be_far(), written, \
                      parameters, __VA_ARGS__)

SUBMISSION_OF(cuLaunchKernel, stream, LAUNCH_LACKS_MEMORY,
              (CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,
               unsigned int block_y, unsigned int block_z, unsigned int shared_bytes, CUstream stream, void **values,
               void **extra),
              function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, values, extra)
SUBMISSION_OF(cuLaunchCooperativeKernel, stream, LAUNCH_LACKS_MEMORY,
              (CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,
               unsigned int block_y, unsigned int block_z, unsigned int shared_bytes, CUstream stream, void **values),
              function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, values)

/* Whether the attributes of a launch let it run beside the launch before or after it. */
static bool may_overlap(const CUlaunchConfig *config)
{
        for (unsigned i = 0; config->attrs && i < config->numAttrs; i++)
                if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION ||
                    config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT ||
                    config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT)
                        return true;
        return false;
}

/*
 * A launch in a capture. If it may overlap, no memory serves twice in that capture from there on, as after an event. If
 * some has served twice already, the launch before may still use the memory of this one: so this one has to wait for
 * it.
 */
static CUresult launch_captured(const CUlaunchConfig *config, CUfunction function, void **values, void **extra,
                                enum gr_null_stream null_stream, __typeof__(cuLaunchKernelEx) *real)
{
        CUlaunchConfig plain = *config;
        CUlaunchAttribute *attributes = NULL;
        CUresult result;
        GR_KEEP_ERRNO;

        if (!may_overlap(config) ||
            !gr_capture_forks(gr_capture_identity(config->hStream, null_stream), GR_FORK_BY_EVENT))
                return real(config, function, values, extra);
        attributes = calloc(config->numAttrs, sizeof(*attributes));
        if (!attributes)
                return CUDA_ERROR_OUT_OF_MEMORY;
        for (unsigned i = 0; i < config->numAttrs; i++) {
                attributes[i] = config->attrs[i];
                if (attributes[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
                        attributes[i].value.programmaticStreamSerializationAllowed = 0;
        }
        plain.attrs = attributes;
        result = real(&plain, function, values, extra);
        free(attributes);
        return result;
}

/* Whether a launch is to be looked at, as its attributes may end the order of all work. */
static inline bool may_end_order(const CUlaunchConfig *config)
{
        return config && config->numAttrs > 0 && !atomic_load_explicit(&gr_core.order_over, memory_order_acquire);
}

#define LAUNCH_EX(symbol, null_stream)                                                                                 \
        static __attribute__((noinline, cold))                                                                         \
        CUresult symbol##_rare(const CUlaunchConfig *config, CUfunction function, void **values, void **extra)         \
        {                                                                                                              \
                GR_PASS_GATE;                                                                                          \
                gr_submit_begin(config ? config->hStream : NULL, null_stream);                                         \
                if (config && may_overlap(config) && gr_shim_ready())                                                  \
                        gr_core_end_order(&gr_core);                                                                   \
                return config && gr_real.symbol && gr_captures_are_open()                                              \
                               ? launch_captured(config, function, values, extra, null_stream, gr_real.symbol)         \
                               : GR_REAL(symbol, config, function, values, extra);                                     \
        }                                                                                                              \
        GR_EXPORT CUresult CUDAAPI symbol(const CUlaunchConfig *config, CUfunction function, void **values,            \
                                          void **extra)                                                                \
        {                                                                                                              \
                __typeof__(symbol) *real = __atomic_load_n(&gr_real.symbol, __ATOMIC_RELAXED);                         \
                                                                                                                       \
                if (__builtin_expect(!real || gr_captures_are_open() || gr_sleep_is_on() ||                            \
                                             gr_submit_is_first(config ? config->hStream : NULL, null_stream) ||       \
                                             may_end_order(config),                                                    \
                                     0))                                                                               \
                        real = symbol##_rare;                                                                          \
                return GR_WITH_ROOM_WHERE(LAUNCH_EX_LACKS_MEMORY, -1, real(config, function, values, extra));          \
        }
LAUNCH_EX(cuLaunchKernelEx, GR_NULL_LEGACY)
LAUNCH_EX(cuLaunchKernelEx_ptsz, GR_NULL_PER_THREAD)

WRITE(cuMemcpyAsync, stream, write_at(stream, captured, to),
      (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), to, from, bytes, stream)
WRITE(cuMemcpyHtoDAsync_v2, stream, write_at(stream, captured, to),
      (CUdeviceptr to, const void *from, size_t bytes, CUstream stream), to, from, bytes, stream)
SUBMISSION(cuMemcpyDtoHAsync_v2, stream, (void *to, CUdeviceptr from, size_t bytes, CUstream stream), to, from, bytes,
           stream)
WRITE(cuMemcpyDtoDAsync_v2, stream, write_at(stream, captured, to),
      (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), to, from, bytes, stream)
WRITE(cuMemcpyPeerAsync, stream, write_at(stream, captured, to),
      (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes, CUstream stream),
      to, to_context, from, from_context, bytes, stream)
WRITE(cuMemcpy2DAsync_v2, stream, write_at(stream, captured, WRITTEN_BY(copy)),
      (const CUDA_MEMCPY2D *copy, CUstream stream), copy, stream)
WRITE(cuMemcpy3DAsync_v2, stream, write_at(stream, captured, WRITTEN_BY(copy)),
      (const CUDA_MEMCPY3D *copy, CUstream stream), copy, stream)
WRITE(cuMemcpy3DPeerAsync, stream, write_at(stream, captured, WRITTEN_BY(copy)),
      (const CUDA_MEMCPY3D_PEER *copy, CUstream stream), copy, stream)
WRITE(cuMemcpyBatchAsync, stream, write_each(stream, captured, to, count),
      (CUdeviceptr * to, CUdeviceptr *from, size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
       size_t *first_of, size_t attribute_count, size_t *failed, CUstream stream),
      to, from, sizes, count, attributes, first_of, attribute_count, failed, stream)
WRITE(cuMemcpyBatchAsync_v2, stream, write_each(stream, captured, to, count),
      (CUdeviceptr * to, CUdeviceptr *from, size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
       size_t *first_of, size_t attribute_count, CUstream stream),
      to, from, sizes, count, attributes, first_of, attribute_count, stream)
WRITE(cuMemcpy3DBatchAsync, stream, copy_each(stream, captured, copies, count),
      (size_t count, CUDA_MEMCPY3D_BATCH_OP *copies, size_t *failed, unsigned long long flags, CUstream stream), count,
      copies, failed, flags, stream)
WRITE(cuMemcpy3DBatchAsync_v2, stream, copy_each(stream, captured, copies, count),
      (size_t count, CUDA_MEMCPY3D_BATCH_OP *copies, unsigned long long flags, CUstream stream), count, copies, flags,
      stream)
WRITE(cuMemBatchDecompressAsync, stream, decompress_each(stream, captured, parameters, count),
      (CUmemDecompressParams * parameters, size_t count, unsigned int flags, size_t *error_index, CUstream stream),
      parameters, count, flags, error_index, stream)
WRITE(cuMemsetD8Async, stream, write_at(stream, captured, to),
      (CUdeviceptr to, unsigned char value, size_t count, CUstream stream), to, value, count, stream)
WRITE(cuMemsetD16Async, stream, write_at(stream, captured, to),
      (CUdeviceptr to, unsigned short value, size_t count, CUstream stream), to, value, count, stream)
WRITE(cuMemsetD32Async, stream, write_at(stream, captured, to),
      (CUdeviceptr to, unsigned int value, size_t count, CUstream stream), to, value, count, stream)
WRITE(cuMemsetD2D8Async, stream, write_at(stream, captured, to),
      (CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height, CUstream stream), to, pitch,
      value, width, height, stream)
WRITE(cuMemsetD2D16Async, stream, write_at(stream, captured, to),
      (CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height, CUstream stream), to, pitch,
      value, width, height, stream)
WRITE(cuMemsetD2D32Async, stream, write_at(stream, captured, to),
      (CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height, CUstream stream), to, pitch,
      value, width, height, stream)
WRITE(cuStreamWriteValue32, stream, write_at(stream, captured, to),
      (CUstream stream, CUdeviceptr to, cuuint32_t value, unsigned int flags), stream, to, value, flags)
WRITE(cuStreamWriteValue32_v2, stream, write_at(stream, captured, to),
      (CUstream stream, CUdeviceptr to, cuuint32_t value, unsigned int flags), stream, to, value, flags)
WRITE(cuStreamWriteValue64, stream, write_at(stream, captured, to),
      (CUstream stream, CUdeviceptr to, cuuint64_t value, unsigned int flags), stream, to, value, flags)
WRITE(cuStreamWriteValue64_v2, stream, write_at(stream, captured, to),
      (CUstream stream, CUdeviceptr to, cuuint64_t value, unsigned int flags), stream, to, value, flags)
WRITE(cuMemcpyWithAttributesAsync, stream, write_at(stream, captured, to),
      (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUmemcpyAttributes *attributes, CUstream stream), to, from,
      bytes, attributes, stream)
WRITE(cuMemcpy3DWithAttributesAsync, stream, copy_each(stream, captured, copy, 1),
      (CUDA_MEMCPY3D_BATCH_OP * copy, unsigned long long flags, CUstream stream), copy, flags, stream)

/*
 * Copies and fills without a stream. Those on the legacy default stream of one context only pass the sleep gate, and
 * tell where they write.
 */
#define SYNCHRONOUS_BY(symbol, null_stream, written, parameters, ...)                                                  \
        GR_EXPORT CUresult CUDAAPI symbol parameters                                                                   \
        {                                                                                                              \
                GR_PASS_GATE;                                                                                          \
                if (gr_submit_is_first(NULL, null_stream) && gr_shim_ready())                                          \
                        gr_core_note_overlap(&gr_core);                                                                \
                if (gr_submit_may_be_far())                                                                            \
                        write_at(NULL, false, written);                                                                \
                return GR_REAL(symbol, __VA_ARGS__);                                                                   \
        }
#define SYNCHRONOUS(symbol, written, parameters, ...)                                                                  \
        SYNCHRONOUS_BY(symbol, GR_NULL_LEGACY, written, parameters, __VA_ARGS__)                                       \
        SYNCHRONOUS_BY(symbol##_ptds, GR_NULL_PER_THREAD, written, parameters, __VA_ARGS__)
SYNCHRONOUS(cuMemcpy, to, (CUdeviceptr to, CUdeviceptr from, size_t bytes), to, from, bytes)
SYNCHRONOUS(cuMemcpyPeer, to,
            (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes), to,
            to_context, from, from_context, bytes)
SYNCHRONOUS(cuMemcpyHtoD_v2, to, (CUdeviceptr to, const void *from, size_t bytes), to, from, bytes)
SYNCHRONOUS(cuMemcpyDtoD_v2, to, (CUdeviceptr to, CUdeviceptr from, size_t bytes), to, from, bytes)
SYNCHRONOUS(cuMemcpyAtoD_v2, to, (CUdeviceptr to, CUarray from, size_t offset, size_t bytes), to, from, offset, bytes)
SYNCHRONOUS(cuMemcpy2D_v2, WRITTEN_BY(copy), (const CUDA_MEMCPY2D *copy), copy)
SYNCHRONOUS(cuMemcpy2DUnaligned_v2, WRITTEN_BY(copy), (const CUDA_MEMCPY2D *copy), copy)
SYNCHRONOUS(cuMemcpy3D_v2, WRITTEN_BY(copy), (const CUDA_MEMCPY3D *copy), copy)
SYNCHRONOUS(cuMemcpy3DPeer, WRITTEN_BY(copy), (const CUDA_MEMCPY3D_PEER *copy), copy)
SYNCHRONOUS(cuMemsetD8_v2, to, (CUdeviceptr to, unsigned char value, size_t count), to, value, count)
SYNCHRONOUS(cuMemsetD16_v2, to, (CUdeviceptr to, unsigned short value, size_t count), to, value, count)
SYNCHRONOUS(cuMemsetD32_v2, to, (CUdeviceptr to, unsigned int value, size_t count), to, value, count)
SYNCHRONOUS(cuMemsetD2D8_v2, to, (CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height), to,
            pitch, value, width, height)
SYNCHRONOUS(cuMemsetD2D16_v2, to, (CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height), to,
            pitch, value, width, height)
SYNCHRONOUS(cuMemsetD2D32_v2, to, (CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height), to,
            pitch, value, width, height)
