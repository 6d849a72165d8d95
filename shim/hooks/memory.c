/* Allocation and free: what the pool serves. */
#include "hooks/memory.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "base/hash.h"
#include "base/no_cancel.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/captures.h"
#include "hooks/context.h"
#include "hooks/managed.h"
#include "hooks/stream_ordered.h"
#include "hooks/submit.h"
#include "notes/note.h"

#define PITCHES_MAX 4096 /* widths remembered; a program with more of them pays the driver for the rest */

/* The driver alone knows the pitch of a width; each is asked for once. */
struct pitch {
        UT_hash_handle hh;
        struct {
                uint64_t width_bytes;
                uint64_t device_and_element; /* ordinal << 32 | element size */
        } key;
        size_t pitch_bytes;
};

struct pitched_request {
        size_t width_bytes, height, pitch_bytes;
        unsigned element_bytes;
};

_Thread_local __attribute__((tls_model("initial-exec"))) int gr_memory_runtime_refused;

static struct gr_lock pitches_lock = GR_LOCK_INIT(GR_RANK_PITCHES);
static struct pitch *pitches GR_GUARDED_BY(pitches_lock);

/* Not inlined, like gr_memory_free_slow: that would make the fast path longer. */
__attribute__((noinline)) int gr_memory_alloc_slow(struct gr_context *context, size_t bytes, CUdeviceptr *ret_ptr)
{
        GR_KEEP_ERRNO;
        int rc = gr_memory_runtime_refused;
        bool captures = gr_captures_are_open(), in_hold = false;
        uint64_t ptr = 0;

        assert(context && bytes > 0 && bytes <= GR_BLOCK_MAX_BYTES && rc <= 0);
        if (rc)
                return rc;
        if (gr_notes_are_on())
                gr_note_before_alloc();
        if (captures)
                in_hold = gr_captures_alloc_in_hold(context, bytes, &ptr);
        if (!ptr && !captures && gr_notes_watch())
                rc = gr_debug_alloc(context, bytes, &ptr);
        else if (!ptr) /* with captures and notes the fast path was left out */
                rc = captures || gr_notes_are_on() ? gr_pool_alloc(context, bytes, &ptr)
                                                   : gr_pool_alloc_slow(context, bytes, &ptr);
        if (rc == 0) {
                *ret_ptr = ptr;
                if (captures && !in_hold)
                        gr_captures_hold(context, ptr);
        }
        if (gr_notes_are_on())
                gr_note_alloc(context, ptr, bytes, rc);
        return rc;
}

static inline __attribute__((always_inline)) CUresult alloc_awake(CUdeviceptr *dptr, size_t bytesize)
{
        struct gr_context *context = NULL;

        if (__builtin_expect(gr_shim_ready() && dptr && bytesize > 0 && bytesize <= GR_BLOCK_MAX_BYTES, 1))
                context = gr_context_current();
        if (__builtin_expect(!context, 0))
                return GR_REAL(cuMemAlloc_v2, dptr, bytesize);
        return gr_result(gr_memory_alloc(context, bytesize, dptr));
}

/* Apart, so that without sleep the hook keeps nothing for the end of its call. */
static __attribute__((noinline)) CUresult alloc_gated(CUdeviceptr *dptr, size_t bytesize)
{
        GR_PASS_GATE;

        return alloc_awake(dptr, bytesize);
}

GR_HOT_CODE GR_EXPORT CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
        return __builtin_expect(gr_sleep_is_on(), 0) ? alloc_gated(dptr, bytesize) : alloc_awake(dptr, bytesize);
}

/* The pitch of this width; 0: the driver has not been asked for it yet. */
static size_t pitch_known(struct pitch *wanted)
{
        struct pitch *found;
        size_t pitch_bytes;

        gr_lock(&pitches_lock);
        HASH_FIND(hh, pitches, &wanted->key, sizeof(wanted->key), found);
        pitch_bytes = found ? found->pitch_bytes : 0;
        gr_unlock(&pitches_lock);
        return pitch_bytes;
}

static void pitch_remember(const struct pitch *seen)
{
        struct pitch *found;

        gr_lock(&pitches_lock);
        HASH_FIND(hh, pitches, &seen->key, sizeof(seen->key), found);
        if (!found && HASH_COUNT(pitches) < PITCHES_MAX) {
                found = calloc(1, sizeof(*found));
                if (found) {
                        found->key = seen->key;
                        found->pitch_bytes = seen->pitch_bytes;
                        HASH_ADD(hh, pitches, key, sizeof(found->key), found);
                        if (!found->hh.tbl)
                                free(found);
                }
        }
        gr_unlock(&pitches_lock);
}

static int alloc_pitched(void *arg, uint64_t *ret_ptr, size_t *ret_bytes)
{
        struct pitched_request *request = arg;
        CUstreamCaptureMode mode;
        bool relaxed = gr_operations_allow_in_captures(&mode);
        CUdeviceptr ptr;
        int rc = gr_errno_of(gr_real.cuMemAllocPitch_v2(&ptr, &request->pitch_bytes, request->width_bytes,
                                                        request->height, request->element_bytes));

        if (relaxed)
                gr_operations_restore_captures(mode);
        if (rc)
                return rc;
        *ret_ptr = ptr;
        *ret_bytes = request->pitch_bytes * request->height;
        return 0;
}

GR_EXPORT CUresult CUDAAPI cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pitch, size_t width_bytes, size_t height,
                                              unsigned int element_bytes)
{
        GR_PASS_GATE;
        struct pitched_request request = {.width_bytes = width_bytes, .height = height, .element_bytes = element_bytes};
        struct pitch key = {.key.width_bytes = width_bytes};
        struct gr_context *context;
        size_t expected;
        uint64_t ptr;
        GR_KEEP_ERRNO;
        int rc;

        if (!gr_shim_ready() || !dptr || !pitch || width_bytes == 0 || height == 0 ||
            (element_bytes != 4 && element_bytes != 8 && element_bytes != 16) ||
            __builtin_mul_overflow(width_bytes + 511, height, &expected) || expected > GR_BLOCK_MAX_BYTES)
                return GR_REAL(cuMemAllocPitch_v2, dptr, pitch, width_bytes, height, element_bytes);
        context = gr_context_current();
        if (!context)
                return GR_REAL(cuMemAllocPitch_v2, dptr, pitch, width_bytes, height, element_bytes);
        key.key.device_and_element = (uint64_t)context->device->ordinal << 32 | element_bytes;
        key.pitch_bytes = pitch_known(&key);
        if (key.pitch_bytes) {
                rc = gr_memory_alloc(context, key.pitch_bytes * height, dptr);
        } else {
                if (gr_notes_are_on())
                        gr_note_before_alloc();
                rc = gr_pool_alloc_by(context, ((width_bytes + 511) & ~(size_t)511) * height, alloc_pitched, &request,
                                      &ptr);
                if (rc == 0) {
                        *dptr = ptr;
                        key.pitch_bytes = request.pitch_bytes;
                        pitch_remember(&key);
                        if (gr_captures_are_open())
                                gr_captures_hold(context, ptr);
                        else if (gr_notes_watch())
                                gr_debug_watch(context, ptr, request.pitch_bytes * height, 0);
                }
                if (gr_notes_are_on())
                        gr_note_alloc(context, rc ? 0 : ptr, (rc ? width_bytes : key.pitch_bytes) * height, rc);
        }
        if (rc == 0)
                *pitch = key.pitch_bytes;
        return gr_result(rc);
}

__attribute__((noinline)) int gr_memory_free_slow(CUdeviceptr ptr, struct gr_begun_free freed)
{
        GR_KEEP_ERRNO;
        int refused = freed.context ? 0 : gr_memory_runtime_refused, rc;
        bool noted = !freed.context && gr_notes_are_on();
        struct gr_note_free before = {0};

        assert(ptr && (freed.context || !freed.should_close) && refused <= 0);
        if (refused)
                return refused;
        if (noted)
                before = gr_note_before_free(ptr, false);
        if (before.is_over)
                rc = before.rc;
        else
                rc = noted && gr_pool_free_fast(&gr_core, ptr, &freed) ? 0 : gr_pool_free_slow(&gr_core, ptr, freed);
        if (noted)
                gr_note_free(ptr, before, rc);
        return rc;
}

static inline __attribute__((always_inline)) CUresult free_awake(CUdeviceptr dptr)
{
        int rc;

        if (__builtin_expect(!gr_shim_ready() || !dptr, 0))
                return GR_REAL(cuMemFree_v2, dptr);
        rc = gr_memory_free(dptr);
        return __builtin_expect(rc == -ENOENT, 0) ? gr_managed_free_accounted(dptr) : gr_result(rc);
}

static __attribute__((noinline)) CUresult free_gated(CUdeviceptr dptr)
{
        GR_PASS_GATE;

        return free_awake(dptr);
}

GR_HOT_CODE GR_EXPORT CUresult CUDAAPI cuMemFree_v2(CUdeviceptr dptr)
{
        return __builtin_expect(gr_sleep_is_on(), 0) ? free_gated(dptr) : free_awake(dptr);
}

struct free_request {
        CUstream stream;
        __typeof__(cuMemFreeAsync) *real;
};

static int give_back(void *arg, uint64_t ptr)
{
        const struct free_request *request = arg;
        GR_NO_CANCEL; /* the block is claimed */

        return gr_errno_of(request->real(ptr, request->stream));
}

/*
 * A free in stream order. A block of the pool is cached at once, as at any other free: its epoch covers all work that
 * was submitted before, on all streams of its device. Those of others that may use it are peers; but a copy need be
 * none, and the program rightly leaves it to the order of the stream that the free comes after it. While the stream
 * captures, the driver is asked instead. It refuses memory that no graph allocated, so the program still has the block.
 */
static CUresult free_async(CUdeviceptr dptr, CUstream stream, enum gr_null_stream null_stream,
                           __typeof__(cuMemFreeAsync) *real)
{
        GR_PASS_GATE;
        struct free_request request = {stream, real};
        struct gr_stream_ordered_free freed;
        struct gr_note_free before = {0};
        struct gr_block_info info;
        GR_KEEP_ERRNO;
        CUresult result;
        int rc;

        if (!real)
                return CUDA_ERROR_NOT_FOUND;
        if (!gr_shim_ready() || !dptr || gr_capture_on(stream, null_stream))
                return real(dptr, stream);
        if (gr_submit_may_be_far() && gr_ledger_find(gr_core.ledger, dptr, &info) == 0)
                gr_submit_reach(stream, dptr);
        if (gr_notes_are_on())
                before = gr_note_before_free(dptr, true);
        rc = before.is_over ? before.rc : gr_pool_free_in_order(&gr_core, dptr, give_back, &request);
        gr_note_free(dptr, before, rc);
        if (rc != -ENOENT)
                return gr_result(rc);
        GR_NO_CANCEL; /* else a thread that ends in the driver would leave `freed`, on its stack, in a list */
        gr_stream_ordered_free_begin(&freed, dptr);
        result = real(dptr, stream);
        gr_stream_ordered_free_end(&freed, result);
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr dptr, CUstream stream)
{
        gr_shim_ready();
        return free_async(dptr, stream, GR_NULL_LEGACY, gr_real.cuMemFreeAsync);
}

GR_EXPORT CUresult CUDAAPI cuMemFreeAsync_ptsz(CUdeviceptr dptr, CUstream stream)
{
        gr_shim_ready();
        return free_async(dptr, stream, GR_NULL_PER_THREAD, gr_real.cuMemFreeAsync_ptsz);
}
