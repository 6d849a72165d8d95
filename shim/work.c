/*
 * What the program gives its streams to do: whether all of it goes to one stream, so that a barrier holds up nothing
 * that would have run. A stream that is only created does nothing; cuBLASLt, for one, makes such a stream in programs
 * that do all their work in the default one. It is noted before the driver has it: a barrier that is laid next is one
 * of many streams. And for good: who works on several streams, though their context is gone, does so again.
 *
 * Every kernel passes here: one comparison, no lock, and no call of the driver. It is a matter of speed and of kernels
 * that wait for each other, never of whether memory is safe. So left out is what hardly comes alone: records of events,
 * allocations in stream order, and calls without a stream, which all but a few wait for their end. The begin of a
 * capture is no work, and what goes into it comes through here.
 */
#include "shim.h"

/* Default streams by numbers: the legacy ones of all contexts are one, each thread's own ones have another. */
enum { NONE, SEVERAL, CREATED, LEGACY, FIRST_THREAD };

static _Atomic uint64_t only = NONE; /* the stream that all work has gone to; SEVERAL: for good */
static _Atomic uint64_t next_thread = FIRST_THREAD;

/* What a launch looks at. */
static struct {
        _Atomic bool settled;     /* there is nothing to note any more */
        _Atomic(CUstream) legacy; /* a handle of the legacy stream, where that is the only one; else no stream's */
} hot __attribute__((aligned(GR_LINE_BYTES))) = {.legacy = (CUstream)UINTPTR_MAX};
static _Thread_local __attribute__((tls_model("initial-exec"))) uint64_t own; /* 0: none yet */

void gr_streams_overlap(void)
{
        atomic_store(&gr_core.overlaps, true);
        atomic_store_explicit(&only, SEVERAL, memory_order_relaxed);
        atomic_store_explicit(&hot.settled, true, memory_order_relaxed);
}

/* A thread that begins where one has ended has its memory, yet a stream of its own: so not by address. */
static uint64_t number_of(CUstream stream)
{
        if (stream == CU_STREAM_LEGACY)
                return LEGACY;
        if (stream != CU_STREAM_PER_THREAD)
                return CREATED;
        if (__builtin_expect(!own, 0))
                own = atomic_fetch_add_explicit(&next_thread, 1, memory_order_relaxed);
        return own;
}

void gr_stream_works(CUstream stream, bool null_is_per_thread)
{
        uint64_t seen = atomic_load_explicit(&only, memory_order_relaxed), number;

        if (!stream)
                stream = null_is_per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
        number = number_of(stream);
        if (__builtin_expect(seen == number || seen == SEVERAL, 1) || !gr_shim_ready())
                return;
        if (number != CREATED && seen == NONE &&
            (atomic_compare_exchange_strong(&only, &seen, number) || seen == number)) {
                if (number == LEGACY)
                        atomic_store_explicit(&hot.legacy, NULL, memory_order_relaxed);
                return;
        }
        gr_streams_overlap();
}

/* Whether there is something to note. */
static inline bool is_news(CUstream stream, bool null_is_per_thread)
{
        return !atomic_load_explicit(&hot.settled, memory_order_relaxed) &&
               (null_is_per_thread || stream != atomic_load_explicit(&hot.legacy, memory_order_relaxed));
}

/*
 * Work for a stream, and the same by the function for which NULL is the thread's own. What there is nothing to say of
 * goes on with a jump: between a program's own work each cache line of ours counts.
 */
#define WORK_FOR(symbol, its_stream, null_is_per_thread, parameters, ...)                                              \
        static __attribute__((noinline)) CUresult symbol##_news parameters                                             \
        {                                                                                                              \
                gr_stream_works(its_stream, null_is_per_thread);                                                       \
                return GR_REAL(symbol, __VA_ARGS__);                                                                   \
        }                                                                                                              \
        GR_EXPORT CUresult CUDAAPI symbol parameters                                                                   \
        {                                                                                                              \
                if (__builtin_expect(is_news(its_stream, null_is_per_thread) || !gr_real.symbol, 0))                   \
                        return symbol##_news(__VA_ARGS__);                                                             \
                return gr_real.symbol(__VA_ARGS__);                                                                    \
        }
#define WORK_ON(symbol, its_stream, parameters, ...)                                                                   \
        WORK_FOR(symbol, its_stream, false, parameters, __VA_ARGS__)                                                   \
        WORK_FOR(symbol##_ptsz, its_stream, true, parameters, __VA_ARGS__)
#define WORK(symbol, parameters, ...) WORK_ON(symbol, stream, parameters, __VA_ARGS__)

WORK(cuLaunchKernel,
     (CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,
      unsigned int block_y, unsigned int block_z, unsigned int shared_bytes, CUstream stream, void **parameters,
      void **extra),
     function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, parameters, extra)
WORK(cuLaunchCooperativeKernel,
     (CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,
      unsigned int block_y, unsigned int block_z, unsigned int shared_bytes, CUstream stream, void **parameters),
     function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, parameters)

WORK_ON(cuLaunchKernelEx, config ? config->hStream : NULL,
        (const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra), config, function,
        parameters, extra)

GR_EXPORT CUresult CUDAAPI cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream)
{
        gr_stream_works(stream, false);
        return GR_REAL(cuLaunchGridAsync, function, width, height, stream);
}

/* Several at once, each to another stream. */
GR_EXPORT CUresult CUDAAPI cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launches, unsigned int count,
                                                                unsigned int flags)
{
        if (gr_shim_ready())
                gr_streams_overlap();
        return GR_REAL(cuLaunchCooperativeKernelMultiDevice, launches, count, flags);
}

WORK(cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), to, from, bytes, stream)
WORK(cuMemcpyPeerAsync,
     (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes, CUstream stream),
     to, to_context, from, from_context, bytes, stream)
WORK(cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream), to, from, bytes, stream)
WORK(cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t bytes, CUstream stream), to, from, bytes, stream)
WORK(cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), to, from, bytes, stream)
WORK(cuMemcpyHtoAAsync_v2, (CUarray to, size_t at, const void *from, size_t bytes, CUstream stream), to, at, from,
     bytes, stream)
WORK(cuMemcpyAtoHAsync_v2, (void *to, CUarray from, size_t at, size_t bytes, CUstream stream), to, from, at, bytes,
     stream)
WORK(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *copy, CUstream stream), copy, stream)
WORK(cuMemcpy3DAsync_v2, (const CUDA_MEMCPY3D *copy, CUstream stream), copy, stream)
WORK(cuMemcpy3DPeerAsync, (const CUDA_MEMCPY3D_PEER *copy, CUstream stream), copy, stream)
WORK(cuMemcpyBatchAsync,
     (CUdeviceptr * to, CUdeviceptr *from, size_t *bytes, size_t count, CUmemcpyAttributes *attributes, size_t *firsts,
      size_t attribute_count, size_t *failed, CUstream stream),
     to, from, bytes, count, attributes, firsts, attribute_count, failed, stream)
WORK(cuMemcpyBatchAsync_v2,
     (CUdeviceptr * to, CUdeviceptr *from, size_t *bytes, size_t count, CUmemcpyAttributes *attributes, size_t *firsts,
      size_t attribute_count, CUstream stream),
     to, from, bytes, count, attributes, firsts, attribute_count, stream)

WORK(cuMemsetD8Async, (CUdeviceptr to, unsigned char value, size_t count, CUstream stream), to, value, count, stream)
WORK(cuMemsetD16Async, (CUdeviceptr to, unsigned short value, size_t count, CUstream stream), to, value, count, stream)
WORK(cuMemsetD32Async, (CUdeviceptr to, unsigned int value, size_t count, CUstream stream), to, value, count, stream)
WORK(cuMemsetD2D8Async,
     (CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height, CUstream stream), to, pitch,
     value, width, height, stream)
WORK(cuMemsetD2D16Async,
     (CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height, CUstream stream), to, pitch,
     value, width, height, stream)
WORK(cuMemsetD2D32Async,
     (CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height, CUstream stream), to, pitch, value,
     width, height, stream)

WORK(cuMemPrefetchAsync, (CUdeviceptr ptr, size_t bytes, CUdevice to, CUstream stream), ptr, bytes, to, stream)
WORK(cuMemPrefetchAsync_v2, (CUdeviceptr ptr, size_t bytes, CUmemLocation to, unsigned int flags, CUstream stream), ptr,
     bytes, to, flags, stream)

WORK(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned int flags), stream, event, flags)
WORK(cuStreamWriteValue32, (CUstream stream, CUdeviceptr word, cuuint32_t value, unsigned int flags), stream, word,
     value, flags)
WORK(cuStreamWriteValue32_v2, (CUstream stream, CUdeviceptr word, cuuint32_t value, unsigned int flags), stream, word,
     value, flags)
WORK(cuStreamWriteValue64, (CUstream stream, CUdeviceptr word, cuuint64_t value, unsigned int flags), stream, word,
     value, flags)
WORK(cuStreamWriteValue64_v2, (CUstream stream, CUdeviceptr word, cuuint64_t value, unsigned int flags), stream, word,
     value, flags)
