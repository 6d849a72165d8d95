/*
 * The real driver as core/ sees it (struct gr_driver). Only functions of the driver are called, never the runtime: a
 * framework must not find an error in the runtime that this library caused. Recording, waiting for and querying an
 * event, cuMemFree and cuMemFreeAsync need no current context; creating events and streams, cuMemGetInfo and
 * cuCtxSynchronize do (docs/measurements.md, current-context).
 */
#include "driver/operations.h"

#include <assert.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "base/hash.h"
#include "base/no_cancel.h"
#include "driver/real.h"

#define DRAIN_BYTES    4096
#define READY_TRIES    100
#define READY_PAUSE_NS UINT64_C(1000000)

/* This library's stream in a context, for memory that is returned: non-blocking, so it delays no other stream. */
struct release_stream {
        UT_hash_handle hh;
        CUcontext context; /* key */
        CUstream stream;
};

static struct gr_lock streams_lock = GR_LOCK_INIT(GR_RANK_STREAMS);
static struct release_stream *streams GR_GUARDED_BY(streams_lock);

struct gr_driver gr_driver;
const struct gr_operations_callbacks *gr_operations_callbacks;

/* Whether the driver refused a call because of a capture. */
static bool because_of_capture(CUresult result)
{
        return result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && result <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
}

int gr_errno_of(CUresult result)
{
        switch (result) {
        case CUDA_SUCCESS:
                return 0;
        case CUDA_ERROR_OUT_OF_MEMORY:
                return -ENOMEM;
        case CUDA_ERROR_NOT_READY:
                return -EAGAIN;
        default:
                return gr_driver_error((int)result);
        }
}

/* As gr_errno_of, for calls that may be repeated later: -EBUSY where the driver refuses because of a capture. */
static int to_errno_or_busy(CUresult result)
{
        return because_of_capture(result) ? -EBUSY : gr_errno_of(result);
}

CUresult gr_result_of(int rc)
{
        assert(rc < 0);
        switch (rc) {
        case -ENOMEM:
        case -EDQUOT:
                return CUDA_ERROR_OUT_OF_MEMORY;
        case -EALREADY: /* the driver's answer to a pointer that is freed twice */
                return CUDA_ERROR_INVALID_VALUE;
        default:
                return gr_driver_code(rc) ? (CUresult)gr_driver_code(rc) : CUDA_ERROR_UNKNOWN;
        }
}

#define UNKNOWN_MODE ((CUstreamCaptureMode)-1)

/* Tried twice, because the call may answer with the error of an earlier one (cuda.h). False: nothing has changed. */
static bool exchange_mode(CUstreamCaptureMode *mode)
{
        __typeof__(cuThreadExchangeStreamCaptureMode) *exchange = gr_real.cuThreadExchangeStreamCaptureMode;

        return exchange && (exchange(mode) == CUDA_SUCCESS || exchange(mode) == CUDA_SUCCESS);
}

CUstreamCaptureMode gr_operations_relax_captures(void)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;

        return exchange_mode(&mode) ? mode : UNKNOWN_MODE;
}

void gr_operations_restore_captures(CUstreamCaptureMode mode)
{
        if (mode != UNKNOWN_MODE)
                exchange_mode(&mode);
}

CUstreamCaptureMode gr_operations_capture_mode(void)
{
        CUstreamCaptureMode mode = gr_operations_relax_captures();

        gr_operations_restore_captures(mode);
        return mode == UNKNOWN_MODE ? CU_STREAM_CAPTURE_MODE_GLOBAL : mode;
}

bool gr_operations_allow_in_captures(CUstreamCaptureMode *ret_mode)
{
        bool open = gr_gate_is_open(&gr_core.gate);

        if (!open || gr_core.config.pool == GR_POOL_NONE)
                return false;
        *ret_mode = gr_operations_relax_captures();
        return true;
}

bool gr_operations_is_final(CUresult result, unsigned *tries)
{
        if (result != CUDA_ERROR_NOT_READY || ++*tries > READY_TRIES)
                return true;
        gr_driver.sleep_ns(READY_PAUSE_NS);
        return false;
}

bool gr_operations_push_context(void *context)
{
        return gr_real.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
}

void gr_operations_pop_context(void)
{
        CUcontext context;

        gr_real.cuCtxPopCurrent_v2(&context);
}

static int driver_mem_alloc(void *context, size_t bytes, uint64_t *ret_ptr)
{
        CUstreamCaptureMode mode;
        CUdeviceptr ptr;
        CUresult result;
        bool relaxed;
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA); /* during the call others would spin on a bin's lock */
        assert(bytes > 0);
        gr_operations_callbacks->taking();
        relaxed = gr_operations_allow_in_captures(&mode);
        GR_ONCE_READY(result, gr_real.cuMemAlloc_v2(&ptr, bytes));
        if (relaxed)
                gr_operations_restore_captures(mode);
        (void)context; /* current already, or the current one is a green context with the same memory */
        if (result == CUDA_SUCCESS) {
                *ret_ptr = ptr;
                gr_operations_callbacks->taken();
        }
        return gr_errno_of_memory(result);
}

static int driver_mem_free(uint64_t ptr)
{
        CUstreamCaptureMode mode;
        CUresult result;
        bool relaxed;
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        assert(ptr != 0);
        relaxed = gr_operations_allow_in_captures(&mode);
        result = gr_real.cuMemFree_v2(ptr);
        if (relaxed)
                gr_operations_restore_captures(mode);
        gr_operations_callbacks->going_on();
        return gr_errno_of(result);
}

/* The stream for returning memory of context, made at its first use. NULL: it could not be made. */
static CUstream release_stream(void *context)
{
        struct release_stream *entry;
        CUstream stream = NULL;

        assert(context);
        gr_lock(&streams_lock);
        HASH_FIND_PTR(streams, &context, entry);
        if (entry) {
                stream = entry->stream;
        } else if (gr_operations_push_context(context)) {
                entry = calloc(1, sizeof(*entry));
                if (entry && gr_real.cuStreamCreate(&entry->stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS) {
                        entry->context = context;
                        HASH_ADD_PTR(streams, context, entry);
                        stream = entry->stream;
                        if (!entry->hh.tbl) /* used for this call only, then leaked */
                                free(entry);
                } else {
                        free(entry);
                }
                gr_operations_pop_context();
        }
        gr_unlock(&streams_lock);
        return stream;
}

CUstream gr_operations_stream(CUcontext context)
{
        return release_stream(context);
}

void gr_operations_context_gone(CUcontext context)
{
        struct release_stream *entry;

        gr_lock(&streams_lock);
        HASH_FIND_PTR(streams, &context, entry);
        if (entry) {
                HASH_DEL(streams, entry);
                free(entry);
        }
        gr_unlock(&streams_lock);
}

/*
 * cuMemFreeAsync also accepts memory of cuMemAlloc. On a stream of this library it waits for no other stream, and once
 * that stream is synchronised the driver has the memory (docs/measurements.md, release-beside-kernel).
 */
static int driver_mem_release(void *context, const uint64_t *ptrs, size_t count, size_t *ret_done)
{
        CUstreamCaptureMode mode;
        CUresult result = CUDA_SUCCESS;
        CUstream stream;
        size_t done = 0;
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        assert(count > 0);
        *ret_done = 0;
        if (!gr_real.cuMemFreeAsync)
                return -ENOTSUP;
        mode = gr_operations_relax_captures();
        stream = release_stream(context);
        if (!stream) {
                gr_operations_restore_captures(mode);
                return -ENOTSUP;
        }
        while (done < count && result == CUDA_SUCCESS) {
                result = gr_real.cuMemFreeAsync(ptrs[done], stream);
                done += result == CUDA_SUCCESS;
                gr_operations_callbacks->going_on();
        }
        /*
         * The driver has the memory only once the host has waited for the frees, and no later call waits for them by
         * itself. Twice: the first may only report an earlier error.
         */
        if (done > 0 && gr_real.cuStreamSynchronize(stream) != CUDA_SUCCESS)
                gr_real.cuStreamSynchronize(stream);
        gr_operations_restore_captures(mode);
        assert(done <= count);
        *ret_done = done;
        return gr_errno_of(result);
}

/* gr_operations_fill (to is NULL) and gr_operations_read. */
static int fill_or_read(CUcontext context, uint64_t ptr, unsigned char byte, void *to, size_t bytes)
{
        CUstreamCaptureMode mode;
        CUresult result;
        CUstream stream;
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        if (!gr_real.cuMemsetD8Async || !gr_real.cuMemcpyDtoHAsync_v2)
                return -ENOTSUP;
        mode = gr_operations_relax_captures();
        stream = release_stream(context);
        result = CUDA_ERROR_INVALID_CONTEXT;
        if (stream && gr_operations_push_context(context)) {
                result = to ? gr_real.cuMemcpyDtoHAsync_v2(to, ptr, bytes, stream)
                            : gr_real.cuMemsetD8Async(ptr, byte, bytes, stream);
                if (result == CUDA_SUCCESS)
                        result = gr_real.cuStreamSynchronize(stream);
                gr_operations_pop_context();
        }
        gr_operations_restore_captures(mode);
        gr_operations_callbacks->going_on();
        return gr_errno_of(result);
}

int gr_operations_fill(CUcontext context, uint64_t ptr, unsigned char byte, size_t bytes)
{
        return fill_or_read(context, ptr, byte, NULL, bytes);
}

int gr_operations_read(CUcontext context, uint64_t ptr, void *to, size_t bytes)
{
        assert(to);
        return fill_or_read(context, ptr, 0, to, bytes);
}

static int driver_mem_info(void *context, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes)
{
        size_t free_bytes, total_bytes;
        CUresult result;
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        if (!gr_operations_push_context(context))
                return gr_driver_error(CUDA_ERROR_INVALID_CONTEXT);
        result = gr_real.cuMemGetInfo_v2(&free_bytes, &total_bytes);
        gr_operations_pop_context();
        if (result == CUDA_SUCCESS) {
                *ret_free_bytes = free_bytes;
                *ret_total_bytes = total_bytes;
        }
        return gr_errno_of(result);
}

static int driver_event_create(void *context, void **ret_event)
{
        CUevent event;
        CUresult result;
        GR_NO_CANCEL;

        if (!gr_operations_push_context(context))
                return gr_driver_error(CUDA_ERROR_INVALID_CONTEXT);
        result = gr_real.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
        gr_operations_pop_context();
        if (result == CUDA_SUCCESS)
                *ret_event = event;
        return gr_errno_of(result);
}

static void driver_event_destroy(void *context, void *event)
{
        GR_NO_CANCEL;

        (void)context;
        gr_real.cuEventDestroy_v2(event);
}

static int driver_event_query(void *event)
{
        GR_NO_CANCEL;
        CUstreamCaptureMode mode = gr_operations_relax_captures();
        CUresult result = gr_real.cuEventQuery(event);

        gr_operations_restore_captures(mode);
        return gr_errno_of(result);
}

static int driver_context_record(void *context, void *event)
{
        GR_NO_CANCEL;

        gr_assert_gate_entered(&gr_core.gate); /* or the record could destroy a capture that has just begun */
        return to_errno_or_busy(gr_real.cuCtxRecordEvent(context, event));
}

static int driver_context_wait(void *context, void *event)
{
        GR_NO_CANCEL;

        gr_assert_gate_entered(&gr_core.gate);
        return to_errno_or_busy(gr_real.cuCtxWaitEvent(context, event));
}

static int driver_context_sync(void *context)
{
        CUstreamCaptureMode mode;
        CUresult result;
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        if (!gr_operations_push_context(context))
                return gr_driver_error(CUDA_ERROR_INVALID_CONTEXT);
        mode = gr_operations_relax_captures(); /* a capture in another context must not make this fail */
        result = gr_real.cuCtxSynchronize();
        gr_operations_restore_captures(mode);
        gr_operations_pop_context();
        return to_errno_or_busy(result);
}

/*
 * Drains the context: before it frees pinned memory, the driver waits for every running kernel, whatever is being
 * captured. The page is one of the host, because device memory may be exhausted.
 */
static int driver_context_drain(void *context)
{
        CUstreamCaptureMode mode;
        CUresult result;
        void *page;
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        if (!gr_operations_push_context(context))
                return gr_driver_error(CUDA_ERROR_INVALID_CONTEXT);
        mode = gr_operations_relax_captures();
        result = gr_real.cuMemHostAlloc(&page, DRAIN_BYTES, 0);
        if (result == CUDA_SUCCESS)
                result = gr_real.cuMemFreeHost(page);
        gr_operations_restore_captures(mode);
        gr_operations_pop_context();
        return gr_errno_of(result);
}

/*
 * The memory is known to every context. With unified addressing, which every 64-bit driver has, host and device use one
 * address for it; where they do not, this fails.
 */
static int driver_host_alloc(void *context, size_t bytes, uint64_t *ret_ptr)
{
        CUstreamCaptureMode mode;
        CUdeviceptr ptr = 0;
        CUresult result;
        void *host;
        GR_NO_CANCEL;

        (void)context;
        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        assert(bytes > 0);
        if (!gr_real.cuMemHostAlloc || !gr_real.cuMemHostGetDevicePointer_v2 || !gr_real.cuMemFreeHost)
                return -ENOTSUP;
        mode = gr_operations_relax_captures();
        result = gr_real.cuMemHostAlloc(&host, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
        if (result == CUDA_SUCCESS &&
            (gr_real.cuMemHostGetDevicePointer_v2(&ptr, host, 0) != CUDA_SUCCESS || ptr != (CUdeviceptr)host)) {
                gr_real.cuMemFreeHost(host);
                result = CUDA_ERROR_NOT_SUPPORTED;
        }
        gr_operations_restore_captures(mode);
        if (result == CUDA_SUCCESS)
                *ret_ptr = ptr;
        return gr_errno_of(result);
}

static int driver_host_free(void *context, uint64_t ptr)
{
        CUstreamCaptureMode mode;
        CUresult result;
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        assert(ptr != 0);
        if (!gr_operations_push_context(context))
                return gr_driver_error(CUDA_ERROR_INVALID_CONTEXT);
        mode = gr_operations_relax_captures();
        result = gr_real.cuMemFreeHost((void *)(uintptr_t)ptr);
        gr_operations_restore_captures(mode);
        gr_operations_pop_context();
        return gr_errno_of(result);
}

static void driver_malloc_trim(void)
{
#ifdef __GLIBC__
        malloc_trim(0);
#endif
}

static uint64_t driver_now_ns(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void driver_sleep_ns(uint64_t ns)
{
        struct timespec pause = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA); /* threads that spin on a bin's lock would wait too long */
        gr_operations_callbacks->going_on();
        nanosleep(&pause, NULL);
}

void gr_operations_init(const struct gr_operations_callbacks *who)
{
        bool fences = gr_real.cuCtxRecordEvent && gr_real.cuCtxWaitEvent;

        assert(who && who->taking && who->taken && who->going_on);
        gr_operations_callbacks = who;
        gr_driver = (struct gr_driver){
                .mem_alloc = driver_mem_alloc,
                .mem_free = driver_mem_free,
                .mem_release = driver_mem_release,
                .mem_info = driver_mem_info,
                .event_create = driver_event_create,
                .event_destroy = driver_event_destroy,
                .event_query = driver_event_query,
                .context_record = fences ? driver_context_record : NULL,
                .context_wait = fences ? driver_context_wait : NULL,
                .context_sync = driver_context_sync,
                .context_drain =
                        gr_real.cuMemHostAlloc && gr_real.cuMemFreeHost && gr_real.cuThreadExchangeStreamCaptureMode
                                ? driver_context_drain
                                : NULL,
                .host_alloc = driver_host_alloc,
                .host_free = driver_host_free,
                .malloc_trim = driver_malloc_trim,
                .now_ns = driver_now_ns,
                .sleep_ns = driver_sleep_ns,
        };
}
