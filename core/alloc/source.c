#include "alloc/source.h"

#include <assert.h>
#include <errno.h>

#include "account/budget.h"
#include "account/pressure.h"
#include "base/arith.h"
#include "base/attributes.h"
#include "base/counters.h"
#include "base/no_cancel.h"
#include "base/size_class.h"
#include "cache/arena.h"
#include "cache/block.h"
#include "cache/block_life.h"
#include "cache/pool_kind.h"
#include "context/context.h"
#include "host/pinned.h"
#include "segment/segments_serve.h"
#include "segment/segments_trim.h"

struct gr_source_request gr_source_request(struct gr_context *context, size_t bytes, gr_source_allocate *allocate,
                                           void *arg)
{
        return (struct gr_source_request){context,
                                          bytes,
                                          allocate,
                                          arg,
                                          .arena = gr_arena_own(context),
                                          .class = gr_class_of(bytes),
                                          .by_segments = !allocate && gr_pool_kind_segments_serve(context, bytes)};
}

static __attribute__((noinline)) struct gr_block *take_from_any_bin(struct gr_source_request *request,
                                                                    bool may_be_larger)
{
        size_t bytes = request->bytes, at_most = SIZE_MAX;
        unsigned last = request->class;
        struct gr_block *block = NULL;

        if (may_be_larger && gr_is_small(bytes)) {
                at_most = bytes < 512 ? 1024 : 2 * bytes;
        } else if (may_be_larger || request->class >= GR_CLASS_EXACT) {
                /* At most an eighth larger, also when memory is short: the next request would lack the unused pages. */
                at_most = bytes + bytes / 8;
                if (at_most < gr_footprint_bytes(bytes))
                        at_most = gr_footprint_bytes(bytes);
        }
        if (at_most < SIZE_MAX)
                last = gr_class_of(gr_min(at_most, GR_BLOCK_MAX_BYTES));
        for (struct gr_arena *arena = request->arena; arena && !block; arena = gr_arena_next(arena, request->arena)) {
                request->class_waits |= gr_bin_count(&arena->bins[request->class]) > 0;
                block = gr_arena_take(arena, request->class, last, bytes, at_most);
        }
        return block;
}

GR_HOT_CODE static struct gr_block *take_from_cache(struct gr_source_request *request, bool may_be_larger)
{
        struct gr_context *context = request->context;

        request->class_waits = false;
        if (gr_fence_is_broken(context->fence))
                return NULL;
        if (request->by_segments || (may_be_larger && gr_pool_kind_has_segments(context))) {
                struct gr_block *block = gr_segments_take(
                        context, request->bytes, may_be_larger ? GR_SEGMENTS_FROM_ALL : GR_SEGMENTS_FROM_CLOSE);

                assert(!block || (block->flags & GR_BLOCK_RANGE && block->capacity_bytes >= request->bytes));
                if (block)
                        return block;
                /* The bins may still have one: from before segments served such requests, or of pitched memory. */
        }
        return take_from_any_bin(request, may_be_larger);
}

GR_HOT_CODE struct gr_block *gr_source_take(struct gr_source_request *request)
{
        return take_from_cache(request, false);
}

struct gr_block *gr_source_take_larger(struct gr_source_request *request)
{
        return take_from_cache(request, true);
}

int gr_source_fresh(const struct gr_source_request *request, struct gr_block **ret_block)
{
        if (request->by_segments) {
                int rc = gr_segments_grow(request->context, request->bytes, ret_block);

                if (rc != -ENOTSUP)
                        return rc;
        }
        return gr_source_fresh_plain(request, ret_block);
}

int gr_source_fresh_plain(const struct gr_source_request *request, struct gr_block **ret_block)
{
        struct gr_context *context = request->context;
        struct gr_core *core = context->core;
        struct gr_device *device = context->device;
        size_t bytes = request->bytes, capacity = request->allocate ? bytes
                                                  : request->exact  ? gr_round_up(bytes, GR_SEGMENTS_UNIT_BYTES)
                                                                    : gr_class_block_bytes(bytes);
        struct gr_block *block, *stale;
        uint64_t reserved, ptr;
        int rc;
        GR_NO_CANCEL; /* a thread that were cancelled in allocate would leave the bytes reserved */

        assert(bytes > 0 && bytes <= GR_BLOCK_MAX_BYTES && capacity >= bytes);
        gr_lock_rank_assert_free_from(GR_RANK_ARENA); /* the driver may wait for the GPU */
        rc = gr_budget_reserve(device, capacity, &reserved);
        if (rc)
                return rc;
        block = gr_block_new();
        if (!block) {
                gr_budget_cancel(device, reserved);
                return -ENOMEM;
        }
        rc = request->allocate ? request->allocate(request->arg, &ptr, &capacity)
                               : core->driver->mem_alloc(context->handle, capacity, &ptr);
        if (rc) {
                gr_budget_cancel(device, reserved);
                gr_block_delete(block);
                return rc;
        }
        assert(ptr != 0 && capacity > 0);
        gr_count(core, GR_COUNTER_driver_allocs, 1);
        gr_count(core, GR_COUNTER_fresh_allocs, 1);
        rc = gr_budget_commit(device, ptr, capacity, reserved);
        if (rc)
                goto give_back;
        gr_block_begin(block, context, ptr, capacity, bytes, gr_class_of_block(capacity), 0);
        rc = gr_block_add(core, block, &stale);
        if (stale)
                gr_block_uncharge_and_delete(stale);
        if (rc) {
                gr_budget_uncharge_block(device, ptr, capacity);
                goto give_back;
        }
        gr_budget_update_peak(device);
        gr_pressure_note(context);
        *ret_block = block;
        return 0;

give_back:
        if (core->driver->mem_release(context->handle, &ptr, 1, &(size_t){0}))
                core->driver->mem_free(ptr);
        gr_block_delete(block);
        return rc;
}
