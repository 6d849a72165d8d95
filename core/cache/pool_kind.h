/*
 * Which part of the pool a request or an address is for: the bins (arena.h), or the segments of pool kinds `split` and
 * `auto` (segment/segments_serve.h).
 */
#ifndef GR_POOL_KIND_H
#define GR_POOL_KIND_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/size_class.h"
#include "context/context.h"
#include "fence/fence.h"

/*
 * Bins serve requests up to GR_SEGMENTS_LEAST_BYTES, with GR_POOL_AUTO up to GR_SEGMENTS_LEAST_AUTO_BYTES
 * (docs/measurements.md, small-requests). From GR_SEGMENTS_MANY_ARENAS on, so many threads allocate that they would
 * wait for each other at the segments' lock: then bins serve requests up to 1 MiB, which takes more memory.
 */
#define GR_SEGMENTS_LEAST_BYTES      ((size_t)16 << 10)
#define GR_SEGMENTS_LEAST_AUTO_BYTES ((size_t)64 << 10)
#define GR_SEGMENTS_MANY_ARENAS      4

/*
 * Whether ptr lies in one of the newest expandable segments, so that it is most likely a range and not a block of a
 * bin.
 */
static inline bool gr_pool_kind_in_expandable(struct gr_core *core, uint64_t ptr)
{
        uint64_t bytes = (uint64_t)atomic_load_explicit(&core->expandable_pages, memory_order_relaxed) << GR_PAGE_SHIFT;

        return __builtin_expect(bytes > 0, 0) &&
               (ptr - atomic_load_explicit(&core->expandable_ptrs[0], memory_order_relaxed) < bytes ||
                ptr - atomic_load_explicit(&core->expandable_ptrs[1], memory_order_relaxed) < bytes);
}

/* Whether the context's segments serve new requests: with pool kinds `split` and `auto`, if any could be set up. */
static inline bool gr_pool_kind_has_segments(struct gr_context *context)
{
        return __builtin_expect(atomic_load_explicit(&context->segments_active, memory_order_relaxed), 0);
}

/*
 * Whether segments, and not a bin, serve a request of so many bytes. Bins serve only where barriers are cheap:
 * elsewhere they would take fresh memory while freed blocks wait, with many calls of the driver for small ones. But if
 * many threads allocate, the bins serve all small requests (GR_SEGMENTS_MANY_ARENAS).
 */
static inline bool gr_pool_kind_segments_serve(struct gr_context *context, size_t bytes)
{
        size_t least;

        if (!gr_pool_kind_has_segments(context))
                return false;
        least = atomic_load_explicit(&context->segments_least_bytes, memory_order_relaxed);
        return bytes > least || (least < GR_SMALL_MAX_BYTES && !gr_fence_barrier_is_cheap(context->fence));
}

#endif
