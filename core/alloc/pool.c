#include "alloc/pool.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <utlist.h>

#include "alloc/graph_hold.h"
#include "alloc/ladder.h"
#include "base/thread.h"
#include "base/trace_file.h"
#include "cache/arena.h"
#include "cache/arenas.h"
#include "cache/block_life.h"
#include "cache/pool_kind.h"
#include "cache/preallocate.h"
#include "fence/fence.h"
#include "fence/fence_wait.h"
#include "host/spill.h"
#include "reclaim/trim.h"
#include "segment/segments_serve.h"
#include "segment/slack.h"

#define QUARANTINE_BYTES (UINT64_C(256) << 20) /* with many streams no barrier is laid for a quarantine below this */

void gr_pool_given(struct gr_core *core, uint64_t ptr)
{
        struct gr_block *stale = gr_block_forget(core, ptr);

        if (stale)
                gr_block_uncharge_and_delete(stale);
}

/*
 * A barrier costs half a microsecond and, with several streams, their overlap. A kernel may also run until later work
 * of the program ends it; a barrier in front of that work would hang both. So with several streams no barrier is laid
 * behind an epoch that does not pass (gr_fence_barrier_is_safe).
 */

/* Where a barrier is not cheap: whether so much is quarantined that one is laid all the same. */
static bool is_barrier_worth_it(struct gr_context *context)
{
        uint64_t bound = gr_max(gr_budget_not_cached(context->device) / 4, QUARANTINE_BYTES);

        return gr_fence_quarantine_bytes(context->fence) > bound && gr_fence_barrier_is_safe(context->fence);
}

static struct gr_block *take_behind_barrier(struct gr_source_request *request)
{
        return gr_fence_barrier(request->context->fence) ? NULL : gr_source_take(request);
}

/*
 * Whether fresh memory is better than to pay for what makes freed memory usable: a barrier or, where that is dear, a
 * look at the events. In a loop of allocations and frees, one of these then readies many blocks instead of one. If it
 * returns false, it may have moved usable blocks of other arenas into the own bin.
 */
static bool prefer_fresh_block(const struct gr_source_request *request)
{
        return request->context->core->config.reuse == GR_REUSE_AUTO &&
               gr_preallocate_or_gather(request->arena, request->class);
}

/* The same for a range: only for small requests, and only while slack and limits have room for a page more. */
static bool prefer_fresh_range(const struct gr_source_request *request)
{
        struct gr_context *context = request->context;

        return context->core->config.reuse == GR_REUSE_AUTO && gr_is_small(request->bytes) &&
               gr_budget_excess(context->device) == 0 && gr_budget_room(context->device) >= GR_PAGE_BYTES &&
               !gr_slack_is_exceeded_recently(context, request->bytes, GR_PAGE_BYTES);
}

/*
 * Steps 1 to 3 of the slow path (pool.h) for bins: a block of the cache that is usable, or can be made so at once.
 * NULL: there is none, or fresh memory is better.
 */
static struct gr_block *take_cached_block(struct gr_source_request *request)
{
        struct gr_context *context = request->context;
        struct gr_block *block = NULL;
        uint64_t epoch = 0; /* of the oldest block in the own bin, which the fast path has found not usable */

        if (request->class < GR_CLASS_EXACT && gr_bin_count(&request->arena->bins[request->class]) > 0)
                epoch = gr_arena_oldest_epoch(request->arena, request->class);
        /*
         * The own bin comes before usable blocks of other arenas: one barrier makes the blocks of all arenas usable,
         * while threads that look into each other's bins wait for each other's locks.
         */
        if (epoch > 0 && !gr_fence_is_broken(context->fence) && gr_fence_barrier_is_cheap(context->fence)) {
                if (prefer_fresh_block(request))
                        return NULL;
                if (gr_fence_barrier_for(context->fence, epoch) == 0)
                        block = gr_arena_take(request->arena, request->class, request->class, request->bytes, SIZE_MAX);
                return block ? block : gr_source_take(request); /* blocks taken by others, or a capture is open */
        }
        block = gr_source_take(request);
        if (block || !request->class_waits || (epoch > 0 && prefer_fresh_block(request)))
                return block;
        if (!gr_fence_barrier_is_cheap(context->fence)) {
                gr_fence_look_for(context->fence, epoch > 0 ? epoch : UINT64_MAX);
                block = gr_source_take(request);
                if (block || !is_barrier_worth_it(context))
                        return block;
        }
        return take_behind_barrier(request);
}

/* The same for segments, where a barrier is dear: after a look at the events. */
static struct gr_block *take_range_behind_dear_barrier(struct gr_source_request *request)
{
        return is_barrier_worth_it(request->context) && gr_segments_would_help(request->context, request->bytes)
                       ? take_behind_barrier(request)
                       : NULL;
}

/*
 * The same for segments, where a range of the request's size, freed in that epoch, waits in the own fastbin.
 * gr_source_take would merge it, so that comes last.
 */
static struct gr_block *take_waiting_range(struct gr_source_request *request, uint64_t epoch)
{
        struct gr_context *context = request->context;
        struct gr_block *block = gr_segments_take_usable(context, request->bytes);

        if (block)
                return block;
        if (gr_fence_barrier_is_cheap(context->fence)) {
                if (prefer_fresh_range(request))
                        return NULL;
                if (gr_fence_barrier_for(context->fence, epoch) == 0)
                        block = gr_arena_take_fastbin(request->arena, request->bytes);
                return block ? block : gr_source_take(request);
        }
        if (gr_arenas_class_empty(context, request->class) && prefer_fresh_range(request))
                return NULL;
        gr_fence_look_for(context->fence, epoch);
        block = gr_arena_take_fastbin(request->arena, request->bytes);
        if (!block)
                block = gr_source_take(request);
        return block ? block : take_range_behind_dear_barrier(request);
}

/* The same for segments, where no such range waits. */
static struct gr_block *take_any_range(struct gr_source_request *request)
{
        struct gr_context *context = request->context;
        struct gr_block *block = gr_source_take(request);
        bool cheap;

        if (block)
                return block;
        cheap = gr_fence_barrier_is_cheap(context->fence);
        if (!request->class_waits && /* bins, from which gr_source_take takes as well, have none that waits */
            (!gr_segments_have_waiting(context) || (cheap && prefer_fresh_range(request))))
                return NULL;
        if (cheap)
                return take_behind_barrier(request);
        gr_fence_look_for(context->fence, UINT64_MAX);
        block = gr_source_take(request);
        return block ? block : take_range_behind_dear_barrier(request);
}

/*
 * For the trace: how much of what is cached could not serve the request because it waits for the GPU. Where a barrier
 * is cheap, it was laid if that helped; but a small request may have preferred fresh memory.
 */
static void trace_quarantine(const struct gr_source_request *request)
{
        struct gr_context *context = request->context;

        if (atomic_load_explicit(&gr_trace_to, memory_order_relaxed))
                gr_trace_add(GR_ENTRY_QUARANTINE, context->device->ordinal, 0, 0,
                             gr_fence_barrier_is_cheap(context->fence) && !gr_is_small(request->bytes)
                                     ? 0
                                     : gr_fence_quarantine_bytes(context->fence));
}

static struct gr_block *take_cached(struct gr_source_request *request)
{
        uint64_t epoch;

        if (!request->by_segments)
                return take_cached_block(request);
        epoch = gr_arena_fastbin_epoch(request->arena, request->bytes);
        return epoch > 0 && !gr_fence_is_broken(request->context->fence) ? take_waiting_range(request, epoch)
                                                                         : take_any_range(request);
}

/*
 * Hands the caller's block to the program, without a home. False: its context has ended meanwhile, and the block is
 * freed.
 */
static bool hand_out_by_ledger(struct gr_block *block, size_t bytes, uint64_t *ret_ptr)
{
        uint64_t ptr = block->ptr;
        uint32_t generation;

        assert(!gr_block_is_live(block) && !gr_block_has_home(block)); /* CACHED, or GONE by now */
        assert(bytes > 0 && bytes <= block->capacity_bytes);
        /* The caller owns the block: no other thread counts it. */
        generation =
                block->flags & GR_BLOCK_RANGE ? gr_arena_generation(block->context) : gr_block_next_generation(block);
        gr_block_set_generation(block, generation);
        if (!gr_ledger_hand_out(block, bytes)) {
                gr_block_uncharge_and_delete(block);
                return false;
        }
        *ret_ptr = ptr;
        return true;
}

/*
 * Hands the caller's block to the program; arena, the thread's own, is its home if it may have one. False: as
 * hand_out_by_ledger.
 */
static bool hand_out(struct gr_arena *arena, struct gr_block *block, size_t bytes, uint64_t *ret_ptr)
{
        *ret_ptr = gr_arena_adopt(arena, block, bytes);
        return *ret_ptr || hand_out_by_ledger(block, bytes, ret_ptr);
}

/* The slow path, whose steps pool.h lists. With allocate, which chooses the size, only steps 4 and 5. */
static int alloc_slow(struct gr_context *context, size_t bytes, bool optional, gr_source_allocate *allocate, void *arg,
                      uint64_t *ret_ptr)
{
        bool cached = !allocate && context->core->config.pool != GR_POOL_NONE;
        struct gr_source_request request;
        struct gr_block *block;

        assert(bytes > 0);
        if (__builtin_expect(gr_graph_holds_are_over(context->core), 0))
                gr_pool_collect(context->core);
        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        if (bytes > GR_BLOCK_MAX_BYTES)
                return -E2BIG;
        request = gr_source_request(context, bytes, allocate, arg);
        request.optional = optional;
        do {
                block = cached ? take_cached(&request) : NULL;
                if (!block) {
                        int rc;

                        if (cached)
                                trace_quarantine(&request);
                        rc = gr_source_fresh(&request, &block);
                        if (gr_is_out_of_memory(rc))
                                rc = gr_ladder_climb(&request, rc, &block);
                        if (rc)
                                return rc;
                        gr_thread.bypass_until_ns = 0;
                }
                /* Is its memory gone? Then try with another block. */
        } while (!hand_out(request.arena, block, allocate ? block->capacity_bytes : bytes, ret_ptr));
        return 0;
}

static int alloc_fast_or_slow(struct gr_context *context, size_t bytes, bool optional, uint64_t *ret_ptr)
{
        uint64_t ptr = bytes <= GR_BLOCK_MAX_BYTES ? gr_pool_alloc_fast(context, bytes) : 0;

        if (__builtin_expect(ptr == 0, 0))
                return alloc_slow(context, bytes, optional, NULL, NULL, ret_ptr);
        *ret_ptr = ptr;
        return 0;
}

int gr_pool_alloc(struct gr_context *context, size_t bytes, uint64_t *ret_ptr)
{
        return alloc_fast_or_slow(context, bytes, false, ret_ptr);
}

int gr_pool_alloc_optional(struct gr_context *context, size_t bytes, uint64_t *ret_ptr)
{
        return alloc_fast_or_slow(context, bytes, true, ret_ptr);
}

GR_HOT_CODE int gr_pool_alloc_slow(struct gr_context *context, size_t bytes, uint64_t *ret_ptr)
{
        return alloc_slow(context, bytes, false, NULL, NULL, ret_ptr);
}

int gr_pool_alloc_by(struct gr_context *context, size_t expected_bytes, gr_source_allocate *allocate, void *arg,
                     uint64_t *ret_ptr)
{
        return alloc_slow(context, expected_bytes, false, allocate, arg, ret_ptr);
}

/*
 * Whether frees of the calling thread go to the driver, after one of its allocations failed. Only that thread runs the
 * release-and-retry of its framework; frees of other threads would wait for the driver without need.
 */
static bool is_bypassed(struct gr_core *core)
{
        if (!gr_thread.bypass_until_ns)
                return false;
        if (core->driver->now_ns() < gr_thread.bypass_until_ns)
                return true;
        gr_thread.bypass_until_ns = 0;
        return false;
}

/* How a block that is not cached is returned to the driver. */
struct free_mode {
        gr_pool_give_back *give_back; /* NULL: by the driver's free, which waits for the GPU */
        void *arg;
        bool collected; /* this free was put off: the program made it earlier (gr_pool_collect) */
        bool idle;      /* no work uses the block any more */
};

/* Returns block to the driver. On failure the program still has it. */
static int free_by_driver(struct gr_core *core, struct gr_block *block, const struct free_mode *mode)
{
        bool there;
        int rc;

        assert(!gr_block_is_live(block) && !(block->flags & (GR_BLOCK_RANGE | GR_BLOCK_SPILLED | GR_BLOCK_HOST)));
        gr_lock_rank_assert_free_from(GR_RANK_ARENA); /* the driver may wait for the GPU */
        /* Out of the ledger first: as soon as the driver has it, another thread may get the same address. */
        there = gr_ledger_remove(core->ledger, block);
        rc = !there ? 0 : mode->give_back ? mode->give_back(mode->arg, block->ptr) : core->driver->mem_free(block->ptr);
        if (rc) {
                gr_block_restore(core, block);
                return rc;
        }
        if (there)
                gr_count(core, GR_COUNTER_driver_frees, 1);
        if (there && mode->give_back)
                gr_block_keep_charged(block);
        else
                gr_block_uncharge_and_delete(block);
        return 0;
}

/* Whether the cache holds more than it may, after a block was put into arena, which may be NULL. */
static bool holds_too_much(struct gr_device *device, struct gr_arena *arena)
{
        return gr_budget_grown(device, arena ? &arena->cached : NULL) ||
               (arena && gr_fastbins_have_grown(&arena->fastbins, device));
}

bool gr_pool_holds_too_much(struct gr_context *context)
{
        return holds_too_much(context->device, gr_arena_at(context, gr_shard()));
}

static void wake_if_needed(struct gr_context *context)
{
        if (gr_pool_wants_wake(context) && context->core->wake)
                context->core->wake(context->core);
}

/* Completes a free after which the block is in the cache: closes the open epoch, or wakes the background thread. */
static void complete_free(struct gr_context *context, bool should_close)
{
        /* Work that starts before the epoch is closed counts as part of it, and delays its blocks. */
        if (should_close)
                gr_fence_close_soon(context->fence);
        wake_if_needed(context);
}

/* As complete_free, where the block went into the arena of another thread. */
static void complete_elsewhere(struct gr_arena *arena, bool should_close)
{
        struct gr_context *context = arena->context;

        if (!gr_budget_is_free(context->device) && holds_too_much(context->device, arena) && context->core->wake)
                context->core->wake(context->core);
        complete_free(context, should_close);
}

/*
 * With GPURECLAIM_REUSE=sync waits for the GPU. 0: no work uses the block any more; -EBUSY: the fence tells when it is
 * idle; else the driver's error.
 */
static int wait_if_asked(struct gr_context *context, const struct free_mode *mode)
{
        bool waits = context->core->config.reuse == GR_REUSE_SYNC && !mode->collected;

        if (mode->idle)
                return 0;
        return waits ? gr_fence_sync(context->fence) : -EBUSY;
}

/*
 * The rest of gr_pool_free for a range of a segment, which can be returned only with its whole segment. With give_back
 * the host must not wait, as the GPU may wait for what it does next.
 */
static int free_range(struct gr_core *core, struct gr_block *block, const struct free_mode *mode)
{
        struct gr_context *context = block->context;
        struct gr_fence *fence = context->fence;
        bool never = block->flags & GR_BLOCK_EXPORTED || gr_fence_is_blind(fence);
        bool by_driver = never || is_bypassed(core), should_close = false;
        uint64_t epoch = GR_SEGMENTS_NEVER;
        int rc = 0;

        /* No fence covers all contexts that may use it, so this waits for them all, as the driver's free would. */
        if (gr_fence_overflow(fence))
                rc = gr_fence_wait_all(fence);
        if (rc && gr_ledger_hand_out(block, block->requested_bytes))
                return rc; /* the program still has it */
        if (!never) {
                rc = wait_if_asked(context, mode);
                if (!rc)
                        epoch = GR_SEGMENTS_IDLE;
                else if (rc == -EBUSY)
                        epoch = gr_fence_note_freed(fence, block->capacity_bytes);
                else
                        by_driver = true;
        }
        rc = gr_segments_put(block, epoch,
                             (by_driver ? GR_SEGMENTS_PUT_BY_DRIVER : 0) |
                                     (mode->give_back ? 0 : GR_SEGMENTS_PUT_WAITS),
                             &should_close);
        if (!rc && should_close)
                gr_fence_close(context->fence);
        wake_if_needed(context);
        return rc;
}

/* The rest of gr_pool_free for host memory. */
static int free_host(struct gr_core *core, struct gr_block *block)
{
        if (block->flags & GR_BLOCK_SPILLED) {
                gr_spill_free(block);
                if (core->wake)
                        core->wake(core);
                return 0;
        }
        /*
         * Pinned memory has a free of its own. The program keeps the block, and the driver, asked next, reports the
         * error.
         */
        if (!gr_ledger_hand_out(block, block->requested_bytes))
                gr_block_uncharge_and_delete(block);
        return -ENOENT;
}

/* The rest of gr_pool_free for a block that was claimed, so that this thread alone has it, and is not parked. */
GR_HOT_CODE static int free_claimed(struct gr_core *core, struct gr_block *block, const struct free_mode *mode)
{
        struct gr_context *context = block->context;
        struct gr_fence *fence = context->fence;
        bool should_close = false;
        int rc;

        if (block->flags & (GR_BLOCK_SPILLED | GR_BLOCK_HOST))
                return free_host(core, block);
        if (block->flags & GR_BLOCK_RANGE)
                return free_range(core, block, mode);
        if (block->flags & GR_BLOCK_EXPORTED || core->config.pool == GR_POOL_NONE || gr_fence_is_blind(fence) ||
            (!mode->collected && is_bypassed(core)))
                return free_by_driver(core, block, mode);

        rc = wait_if_asked(context, mode);
        if (rc && rc != -EBUSY)
                return free_by_driver(core, block, mode);
        gr_arena_put(context, block, rc == 0, &should_close);
        complete_free(context, should_close);
        return 0;
}

/* A gr_graph_hold_free that waits for the GPU, as the driver's free of the program's block would have done. */
static void free_parked_and_wait(struct gr_block *block)
{
        free_claimed(block->context->core, block, &(struct free_mode){.collected = true});
}

/* As gr_pool_free_slow, in this mode. */
GR_HOT_CODE static int free_slow(struct gr_core *core, uint64_t ptr, struct gr_begun_free freed,
                                 const struct free_mode *mode)
{
        struct gr_context *context;
        struct gr_block *block;
        struct gr_arena *home;
        bool should_close = false;
        int rc;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        if (freed.context) {
                complete_free(freed.context, freed.should_close);
                return 0;
        }
        block = gr_arena_claim(core, ptr);
        rc = block ? 0 : gr_ledger_claim(core->ledger, ptr, &block, &home);
        if (rc == -EBUSY && !mode->idle && gr_arena_free_at_home(core, home, ptr, &should_close)) {
                complete_elsewhere(home, should_close);
                return 0;
        }
        if (rc == -EBUSY)
                rc = gr_block_claim(core, ptr, &block);
        if (rc == -ENOENT && gr_segments_find(core, ptr, &(struct gr_segments_place){0}) == 0)
                return -EALREADY; /* inside a segment, which the driver must not be asked to free */
        if (rc)
                return rc;
        assert(block->ptr == ptr && !gr_block_is_live(block)); /* claimed: this thread alone has it */
        if (__builtin_expect(atomic_load_explicit(&block->hold, memory_order_relaxed) != 0, 0) &&
            gr_graph_hold_park(core, block))
                return 0;
        context = block->context;
        rc = free_claimed(core, block, mode);
        /* This free has waited for the GPU: another may do so now. */
        if (!rc && !mode->give_back && !mode->idle && gr_fence_is_blind(context->fence))
                gr_pool_collect_blind(context);
        return rc;
}

/*
 * For blocks whose last graph has gone, and that no other work uses. Where the fence has become blind just now, others
 * come here that were to go into the cache: then the driver waits.
 */
static int give_back_unused(void *arg, uint64_t ptr)
{
        struct gr_context *context = arg;
        const struct gr_driver *driver = context->core->driver;
        size_t done;

        if (!gr_fence_is_blind(context->fence) && driver->mem_release(context->handle, &ptr, 1, &done) == 0)
                return 0;
        return driver->mem_free(ptr);
}

/*
 * A gr_graph_hold_free. The program's present call must not wait for the GPU, which may wait for what the program does
 * next.
 */
static void free_parked(struct gr_block *block)
{
        struct gr_context *context = block->context;

        free_claimed(context->core, block,
                     &(struct free_mode){.give_back = give_back_unused, .arg = context, .collected = true});
}

bool gr_pool_alloc_in_hold(struct gr_graph_hold *hold, struct gr_context *context, bool single_stream, size_t bytes,
                           uint64_t *ret_ptr)
{
        struct gr_block *block = gr_graph_hold_take(hold, context, single_stream, bytes, free_parked);

        return block && hand_out_by_ledger(block, bytes, ret_ptr);
}

void gr_pool_end_capture(struct gr_graph_hold *hold, bool single_stream)
{
        gr_graph_hold_end(hold, single_stream, free_parked);
}

void gr_pool_collect(struct gr_core *core)
{
        gr_graph_holds_collect(core, free_parked);
}

void gr_pool_collect_blind(struct gr_context *context)
{
        gr_graph_holds_collect_blind(context, free_parked_and_wait);
        gr_pool_collect(context->core);
}

GR_HOT_CODE int gr_pool_free_slow(struct gr_core *core, uint64_t ptr, struct gr_begun_free freed)
{
        return free_slow(core, ptr, freed, &(struct free_mode){0});
}

int gr_pool_free(struct gr_core *core, uint64_t ptr)
{
        struct gr_begun_free freed;

        return gr_pool_free_fast(core, ptr, &freed) ? 0 : gr_pool_free_slow(core, ptr, freed);
}

int gr_pool_free_idle(struct gr_core *core, uint64_t ptr)
{
        return free_slow(core, ptr, (struct gr_begun_free){0}, &(struct free_mode){.idle = true});
}

int gr_pool_free_in_order(struct gr_core *core, uint64_t ptr, gr_pool_give_back *give_back, void *arg)
{
        struct gr_begun_free freed;

        return gr_pool_free_fast(core, ptr, &freed) ? 0
                                                    : free_slow(core, ptr, freed, &(struct free_mode){give_back, arg});
}

uint64_t gr_pool_slab_bytes(struct gr_core *core, struct gr_device *device)
{
        uint64_t cached = 0;

        gr_lock(&core->contexts_lock);
        for (struct gr_context *context = core->contexts; context; context = context->next)
                if (context->device == device)
                        cached += gr_arenas_small_bytes(context);
        gr_unlock(&core->contexts_lock);
        return gr_budget_slab_rest_beside(device, cached);
}
