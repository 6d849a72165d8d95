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
 * Every launch passes one of these hooks, so they only compare the stream's handle, two flags, and the result. Copies
 * and fills without a stream are not here; on the legacy default stream they only pass the sleep gate (gated.c).
 */
#include "hooks/submit.h"

#include <errno.h>
#include <stdlib.h>

#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/captures.h"
#include "hooks/context.h"

void gr_submit_begin(CUstream stream, enum gr_null_stream null_stream)
{
        if (gr_submit_is_first(stream, null_stream) && gr_shim_ready())
                gr_core_note_overlap(&gr_core);
        if (gr_captures_are_open())
                gr_captures_note_work(stream, null_stream);
}

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

/*
 * The rare case is a function of its own, so that the hook itself calls no function but the driver's.
 */
#define SUBMISSION_BY(symbol, stream, null_stream, lacks, parameters, ...)                                             \
        static __attribute__((noinline, cold)) CUresult symbol##_first parameters                                      \
        {                                                                                                              \
                GR_PASS_GATE;                                                                                          \
                gr_submit_begin(stream, null_stream);                                                                  \
                return GR_REAL(symbol, __VA_ARGS__);                                                                   \
        }                                                                                                              \
        GR_EXPORT CUresult CUDAAPI symbol parameters                                                                   \
        {                                                                                                              \
                __typeof__(symbol) *real = __atomic_load_n(&gr_real.symbol, __ATOMIC_RELAXED);                         \
                                                                                                                       \
                if (__builtin_expect(!real || gr_submit_is_first(stream, null_stream) || gr_captures_are_open() ||     \
                                             gr_sleep_is_on(),                                                         \
                                     0))                                                                               \
                        real = symbol##_first;                                                                         \
                return GR_WITH_ROOM_WHERE(lacks, -1, real(__VA_ARGS__));                                               \
        }
#define SUBMISSION_OF(symbol, stream, lacks, parameters, ...)                                                          \
        SUBMISSION_BY(symbol, stream, GR_NULL_LEGACY, lacks, parameters, __VA_ARGS__)                                  \
        SUBMISSION_BY(symbol##_ptsz, stream, GR_NULL_PER_THREAD, lacks, parameters, __VA_ARGS__)
#define SUBMISSION(symbol, stream, parameters, ...)                                                                    \
        SUBMISSION_OF(symbol, stream, GR_IS_OUT_OF_MEMORY, parameters, __VA_ARGS__)

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

SUBMISSION(cuMemcpyAsync, stream, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), to, from, bytes,
           stream)
SUBMISSION(cuMemcpyHtoDAsync_v2, stream, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream), to, from,
           bytes, stream)
SUBMISSION(cuMemcpyDtoHAsync_v2, stream, (void *to, CUdeviceptr from, size_t bytes, CUstream stream), to, from, bytes,
           stream)
SUBMISSION(cuMemcpyDtoDAsync_v2, stream, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), to, from,
           bytes, stream)
SUBMISSION(cuMemcpyPeerAsync, stream,
           (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes,
            CUstream stream),
           to, to_context, from, from_context, bytes, stream)
SUBMISSION(cuMemcpy2DAsync_v2, stream, (const CUDA_MEMCPY2D *copy, CUstream stream), copy, stream)
SUBMISSION(cuMemcpy3DAsync_v2, stream, (const CUDA_MEMCPY3D *copy, CUstream stream), copy, stream)
SUBMISSION(cuMemcpy3DPeerAsync, stream, (const CUDA_MEMCPY3D_PEER *copy, CUstream stream), copy, stream)
SUBMISSION(cuMemcpyBatchAsync, stream,
           (CUdeviceptr * to, CUdeviceptr *from, size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
            size_t *first_of, size_t attribute_count, size_t *failed, CUstream stream),
           to, from, sizes, count, attributes, first_of, attribute_count, failed, stream)
SUBMISSION(cuMemcpyBatchAsync_v2, stream,
           (CUdeviceptr * to, CUdeviceptr *from, size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
            size_t *first_of, size_t attribute_count, CUstream stream),
           to, from, sizes, count, attributes, first_of, attribute_count, stream)
SUBMISSION(cuMemcpy3DBatchAsync, stream,
           (size_t count, CUDA_MEMCPY3D_BATCH_OP *copies, size_t *failed, unsigned long long flags, CUstream stream),
           count, copies, failed, flags, stream)
SUBMISSION(cuMemcpy3DBatchAsync_v2, stream,
           (size_t count, CUDA_MEMCPY3D_BATCH_OP *copies, unsigned long long flags, CUstream stream), count, copies,
           flags, stream)
SUBMISSION(cuMemBatchDecompressAsync, stream,
           (CUmemDecompressParams * parameters, size_t count, unsigned int flags, size_t *error_index, CUstream stream),
           parameters, count, flags, error_index, stream)
SUBMISSION(cuMemsetD8Async, stream, (CUdeviceptr to, unsigned char value, size_t count, CUstream stream), to, value,
           count, stream)
SUBMISSION(cuMemsetD16Async, stream, (CUdeviceptr to, unsigned short value, size_t count, CUstream stream), to, value,
           count, stream)
SUBMISSION(cuMemsetD32Async, stream, (CUdeviceptr to, unsigned int value, size_t count, CUstream stream), to, value,
           count, stream)
SUBMISSION(cuMemsetD2D8Async, stream,
           (CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height, CUstream stream), to, pitch,
           value, width, height, stream)
SUBMISSION(cuMemsetD2D16Async, stream,
           (CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height, CUstream stream), to,
           pitch, value, width, height, stream)
SUBMISSION(cuMemsetD2D32Async, stream,
           (CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height, CUstream stream), to, pitch,
           value, width, height, stream)
SUBMISSION(cuStreamWriteValue32, stream, (CUstream stream, CUdeviceptr to, cuuint32_t value, unsigned int flags),
           stream, to, value, flags)
SUBMISSION(cuStreamWriteValue32_v2, stream, (CUstream stream, CUdeviceptr to, cuuint32_t value, unsigned int flags),
           stream, to, value, flags)
SUBMISSION(cuStreamWriteValue64, stream, (CUstream stream, CUdeviceptr to, cuuint64_t value, unsigned int flags),
           stream, to, value, flags)
SUBMISSION(cuStreamWriteValue64_v2, stream, (CUstream stream, CUdeviceptr to, cuuint64_t value, unsigned int flags),
           stream, to, value, flags)
