#include "alloc/graph_hold.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>

#include <utlist.h>

#include "account/budget.h"
#include "base/arith.h"
#include "base/hash.h"
#include "base/lock.h"
#include "base/size_class.h"
#include "cache/block.h"
#include "cache/block_life.h"
#include "cache/ledger.h"
#include "cache/pool_kind.h"
#include "context/context.h"
#include "fence/fence.h"
#include "reclaim/trim.h"
#include "segment/graph_segments.h"
#include "segment/segments_serve.h"

#define LOOK 256 /* parked blocks that a request looks at */
/*
 * A block that cannot be cut serves a request if it is larger by at most an eighth and one unit, or no larger than a
 * new block would be.
 */
#define LARGER_SHARE 8

struct gr_graph_hold {
        struct gr_core *core; /* constant, like number */
        unsigned number;      /* not 0; that of no other hold that has users */
        /*
         * Constant. NULL: memory of its own. Else it is one of the context's graph_users, by shared_number, while it
         * has users.
         */
        struct gr_context *shared_in;
        uint32_t shared_number;
        bool ended; /* its capture has ended; guarded by core->holds_lock */
        _Atomic unsigned users;
        struct gr_block *parked; /* utlist's DL; this and the next are guarded by core->holds_lock */
        UT_hash_handle hh;       /* of core->holds, by number */
};

/* Counts a block as parked (1), or not (-1). Host memory is no part of what the device has reserved. */
static void count_parked(const struct gr_block *block, int sign)
{
        if (block->flags & (GR_BLOCK_SPILLED | GR_BLOCK_HOST))
                return;
        gr_budget_add(&block->context->device->graph_bytes, (uint64_t)sign * block->capacity_bytes);
}

struct gr_graph_hold *gr_graph_hold_new(struct gr_core *core, struct gr_context *shared_in)
{
        struct gr_graph_hold *hold = calloc(1, sizeof(*hold));
        bool added;

        if (!hold)
                return NULL;
        hold->core = core;
        hold->shared_in = shared_in;
        atomic_init(&hold->users, 1);
        gr_lock(&core->holds_lock);
        if (++core->holds_made == 0)
                core->holds_made = 1; /* 0 is none */
        hold->number = core->holds_made;
        HASH_ADD(hh, core->holds, number, sizeof(hold->number), hold);
        added = hold->hh.tbl != NULL;
        gr_unlock(&core->holds_lock);
        if (!added) {
                free(hold);
                return NULL;
        }
        if (shared_in)
                hold->shared_number = gr_graph_segments_join(shared_in);
        return hold;
}

void gr_graph_hold_retain(struct gr_graph_hold *hold)
{
        unsigned before = atomic_fetch_add(&hold->users, 1);

        assert(before > 0);
        (void)before;
}

void gr_graph_hold_release(struct gr_graph_hold *hold)
{
        struct gr_core *core = hold->core; /* read first: without users, another thread may free the hold */
        struct gr_context *shared_in = hold->shared_in;
        uint32_t shared_number = hold->shared_number;
        unsigned before = atomic_fetch_sub(&hold->users, 1);

        assert(before > 0);
        if (before > 1)
                return;
        if (shared_in)
                gr_graph_segments_leave(shared_in, shared_number);
        atomic_store(&core->holds_over, true);
}

/* Notes hold as that of block, which the caller owns, and which is in no list and has no hold. */
static void enter_hold(struct gr_graph_hold *hold, struct gr_block *block)
{
        block->prev = NULL;
        atomic_store(&block->hold, hold->number);
}

void gr_graph_hold_add(struct gr_graph_hold *hold, uint64_t ptr)
{
        struct gr_block *block;

        if (gr_block_claim(hold->core, ptr, &block))
                return; /* its context has ended */
        enter_hold(hold, block);
        if (!gr_ledger_hand_out(block, atomic_load(&block->requested_bytes)))
                gr_block_uncharge_and_delete(block);
}

/* Whether a parked block may be cut and merged. Others, such as exported ones, must keep their bounds. */
static bool is_plain_range(const struct gr_block *block)
{
        return atomic_load(&block->flags) == GR_BLOCK_RANGE;
}

/* Below, the lock of holds is held unless a comment says otherwise. */

static void unlist_block(struct gr_graph_hold *hold, struct gr_block *block)
{
        gr_assert_locked(&hold->core->holds_lock);
        DL_DELETE(hold->parked, block);
        block->prev = NULL;
}

/* Takes a block out of the hold's list if it is parked there, to merge it with an adjacent one. */
static bool leaves_to_join(struct gr_block *adjacent, void *arg)
{
        struct gr_graph_hold *hold = arg;

        gr_assert_locked(&hold->core->holds_lock);
        /* Of this hold's blocks only parked ones have a prev. That of other blocks may change, and is not read. */
        if (atomic_load(&adjacent->hold) != hold->number || !adjacent->prev || !is_plain_range(adjacent))
                return false;
        unlist_block(hold, adjacent);
        return true;
}

/*
 * Whether block goes from its hold to the driver, and not into the cache. The driver gets it without a wait, so other
 * work of the program than its graphs must have passed as well: that from before it was freed.
 */
static bool goes_to_driver(const struct gr_block *block)
{
        return (block->flags & GR_BLOCK_EXPORTED || block->context->core->config.pool == GR_POOL_NONE) &&
               !(block->flags & (GR_BLOCK_RANGE | GR_BLOCK_SPILLED | GR_BLOCK_HOST));
}

static void park_block(struct gr_graph_hold *hold, struct gr_block *block)
{
        gr_assert_locked(&hold->core->holds_lock);
        count_parked(block, 1);
        if (goes_to_driver(block))
                block->freed_epoch = gr_fence_note_freed(block->context->fence, block->capacity_bytes);
        if (is_plain_range(block))
                block = gr_graph_range_join(block, leaves_to_join, hold);
        atomic_store(&block->hold, hold->number);
        DL_PREPEND(hold->parked, block);
}

/* Lock not held. */
bool gr_graph_hold_park(struct gr_core *core, struct gr_block *block)
{
        unsigned number = atomic_load(&block->hold);
        struct gr_graph_hold *hold;

        assert(!gr_block_is_live(block) && !gr_block_has_home(block));
        if (number == 0)
                return false;
        gr_lock(&core->holds_lock);
        HASH_FIND(hh, core->holds, &number, sizeof(number), hold);
        if (hold && atomic_load(&hold->users) > 0 &&
            !(hold->shared_in && hold->ended && block->flags & GR_BLOCK_GRAPH)) {
                park_block(hold, block);
        } else {
                atomic_store(&block->hold, 0);
                hold = NULL;
        }
        gr_unlock(&core->holds_lock);
        return hold;
}

/* Whether a parked block serves the request. A small request gets no part of what is for large ones. */
static bool parked_serves(struct gr_block *block, const struct gr_context *context, size_t bytes)
{
        size_t most = bytes + bytes / LARGER_SHARE + GR_SEGMENTS_UNIT_BYTES;

        gr_lock_rank_assert_held(GR_RANK_GRAPH_HOLDS);
        if (block->context != context || block->capacity_bytes < bytes)
                return false;
        if (is_plain_range(block))
                return block->capacity_bytes <= most || !gr_is_small(bytes) || gr_is_small(block->capacity_bytes) ||
                       gr_graph_range_is_small(block);
        return !block->flags && block->capacity_bytes <= gr_max(most, gr_class_block_bytes(bytes));
}

/* The smallest of the newest parked blocks that serves the request. */
static struct gr_block *best_parked(const struct gr_graph_hold *hold, const struct gr_context *context, size_t bytes)
{
        struct gr_block *block, *best = NULL;
        unsigned looked_at = 0;

        gr_assert_locked(&hold->core->holds_lock);
        DL_FOREACH (hold->parked, block) {
                if ((!best || block->capacity_bytes < best->capacity_bytes) && parked_serves(block, context, bytes))
                        best = block;
                if (++looked_at == LOOK)
                        break;
        }
        return best;
}

/* A parked block for hold's capture, which has a single stream. Lock not held. */
static struct gr_block *take_parked(struct gr_graph_hold *hold, struct gr_context *context, size_t bytes)
{
        struct gr_block *block, *rest;

        gr_lock(&hold->core->holds_lock);
        block = best_parked(hold, context, bytes);
        if (block) {
                unlist_block(hold, block);
                count_parked(block, -1);
                rest = is_plain_range(block) ? gr_graph_range_cut(block, bytes) : NULL;
                if (rest)
                        park_block(hold, rest);
        }
        gr_unlock(&hold->core->holds_lock);
        return block;
}

/*
 * Frees what was parked in a shared hold of graph segments. After a capture with a single stream it needs no fence: all
 * work that has used it runs in the order of the graphs that share the memory. ends: no more is parked. Lock not held.
 */
static void unpark_blocks(struct gr_graph_hold *hold, bool single_stream, bool ends, gr_graph_hold_free *free_block)
{
        struct gr_block *all = NULL, *block, *next;
        bool should_close;

        gr_lock(&hold->core->holds_lock);
        hold->ended |= ends;
        DL_FOREACH_SAFE (hold->parked, block, next) {
                if (!(block->flags & GR_BLOCK_GRAPH))
                        continue;
                unlist_block(hold, block);
                count_parked(block, -1);
                atomic_store(&block->hold, 0);
                LL_PREPEND(all, block);
        }
        gr_unlock(&hold->core->holds_lock);
        LL_FOREACH_SAFE (all, block, next) {
                if (single_stream && !(block->flags & GR_BLOCK_EXPORTED))
                        gr_segments_put(block, GR_SEGMENTS_IDLE, 0, &should_close);
                else
                        free_block(block);
        }
}

/* Below, no lock is held. */

/*
 * A block of the graph segments for a capture; NULL: there is no memory for it, or none can be mapped. Then the request
 * is served as any other, and climbs the ladder.
 */
static struct gr_block *take_shared(struct gr_context *context, size_t bytes)
{
        struct gr_block *block = gr_graph_segments_take(context, bytes);
        int rc = block ? 0 : gr_graph_segments_grow(context, bytes, &block);

        if (gr_is_out_of_memory(rc) && gr_trim(context, bytes) > 0)
                rc = gr_graph_segments_grow(context, bytes, &block);
        return rc ? NULL : block;
}

struct gr_block *gr_graph_hold_take(struct gr_graph_hold *hold, struct gr_context *context, bool single_stream,
                                    size_t bytes, gr_graph_hold_free *free_block)
{
        struct gr_block *block = NULL;

        if (hold->shared_in == context && gr_graph_segments_joined(context, hold->shared_number) &&
            bytes <= GR_BLOCK_MAX_BYTES && gr_pool_kind_has_segments(context) && !gr_fence_is_broken(context->fence)) {
                if (single_stream)
                        unpark_blocks(hold, single_stream, false, free_block);
                block = take_shared(context, bytes);
        }
        if (block)
                enter_hold(hold, block);
        else if (single_stream)
                block = take_parked(hold, context, bytes);
        return block;
}

void gr_graph_hold_end(struct gr_graph_hold *hold, bool single_stream, gr_graph_hold_free *free_block)
{
        if (hold->shared_in)
                unpark_blocks(hold, single_stream, true, free_block);
}

bool gr_graph_holds_are_over(struct gr_core *core)
{
        return atomic_load_explicit(&core->holds_over, memory_order_relaxed);
}

/* Not where the fence is blind: then what frees the block waits. */
static bool must_wait(const struct gr_block *block)
{
        struct gr_fence *fence = block->context->fence;

        return goes_to_driver(block) && !gr_fence_idle(fence, block->freed_epoch) && !gr_fence_is_blind(fence);
}

static void unpark_block(struct gr_graph_hold *hold, struct gr_block *block, struct gr_block **list)
{
        unlist_block(hold, block);
        count_parked(block, -1);
        atomic_store(&block->hold, 0);
        LL_PREPEND(*list, block);
}

/*
 * Takes the blocks of context that are parked in holds without users, linked by next. The caller is a visitor of the
 * context, so that it cannot end meanwhile. Leaves what must wait; *ret_waits is set if there is any.
 */
static struct gr_block *unpark_in_context(struct gr_context *context, bool *ret_waits)
{
        struct gr_core *core = context->core;
        struct gr_block *all = NULL, *block, *next;
        struct gr_graph_hold *hold, *tmp;

        gr_lock(&core->holds_lock);
        HASH_ITER (hh, core->holds, hold, tmp) {
                if (atomic_load(&hold->users) > 0)
                        continue;
                DL_FOREACH_SAFE (hold->parked, block, next) {
                        if (block->context != context)
                                continue;
                        if (must_wait(block))
                                *ret_waits = true;
                        else
                                unpark_block(hold, block, &all);
                }
        }
        gr_unlock(&core->holds_lock);
        return all;
}

/* Frees the holds without users and blocks. Returns their blocks that are GONE, of any context, linked by next. */
static struct gr_block *drop_empty_holds(struct gr_core *core)
{
        struct gr_block *gone = NULL, *block, *next;
        struct gr_graph_hold *hold, *tmp;

        gr_lock(&core->holds_lock);
        HASH_ITER (hh, core->holds, hold, tmp) {
                if (atomic_load(&hold->users) > 0)
                        continue;
                DL_FOREACH_SAFE (hold->parked, block, next)
                        if (gr_block_state(block) == GR_BLOCK_GONE)
                                unpark_block(hold, block, &gone);
                if (hold->parked) { /* they wait, or their context is about to end, or to begin: the next call tries */
                        atomic_store(&core->holds_over, true);
                } else {
                        HASH_DEL(core->holds, hold);
                        free(hold);
                }
        }
        gr_unlock(&core->holds_lock);
        return gone;
}

struct collect {
        gr_graph_hold_free *free_block;
        struct gr_context *blind; /* only this context, whose fence is blind; NULL: all others */
};

static bool collect_in(struct gr_context *context, void *arg)
{
        const struct collect *collect = arg;
        struct gr_block *all, *block, *next;
        bool waits = true;

        if (collect->blind && context != collect->blind)
                return true;
        if (!gr_graph_segments_end_use(context, collect->blind))
                atomic_store(&context->core->holds_over, true);
        /* What could be taken is freed before the driver is asked about the rest: that may break the fence. */
        for (int tries = 0; waits && tries < 2; tries++) {
                if (tries > 0) {
                        gr_fence_close_soon(context->fence);
                        gr_fence_poll(context->fence);
                }
                if (!collect->blind && gr_fence_is_blind(context->fence))
                        break;
                waits = false;
                all = unpark_in_context(context, &waits);
                LL_FOREACH_SAFE (all, block, next) {
                        if (gr_block_state(block) == GR_BLOCK_GONE)
                                gr_block_uncharge_and_delete(block);
                        else
                                collect->free_block(block);
                }
        }
        return true;
}

/*
 * The program may end a block's context at any time, so each context is visited meanwhile. Blocks of one that is about
 * to end stay parked, and go with it.
 */
void gr_graph_holds_collect(struct gr_core *core, gr_graph_hold_free *free_block)
{
        struct gr_block *all, *block, *next;

        if (!gr_graph_holds_are_over(core) || !atomic_exchange(&core->holds_over, false))
                return;
        gr_context_each(core, -1, collect_in, &(struct collect){.free_block = free_block});
        all = drop_empty_holds(core);
        LL_FOREACH_SAFE (all, block, next)
                gr_block_uncharge_and_delete(block);
}

void gr_graph_holds_collect_blind(struct gr_context *context, gr_graph_hold_free *free_block)
{
        if (gr_graph_holds_are_over(context->core))
                gr_context_each(context->core, context->device->ordinal, collect_in,
                                &(struct collect){.free_block = free_block, .blind = context});
}

void gr_graph_holds_context_gone(struct gr_context *context)
{
        struct gr_core *core = context->core;
        struct gr_block *gone = NULL, *block, *next;
        struct gr_graph_hold *hold, *tmp;

        gr_lock(&core->holds_lock);
        HASH_ITER (hh, core->holds, hold, tmp) {
                DL_FOREACH_SAFE (hold->parked, block, next) {
                        if (block->context != context)
                                continue;
                        unlist_block(hold, block);
                        count_parked(block, -1);
                        LL_PREPEND(gone, block);
                }
        }
        gr_unlock(&core->holds_lock);
        while ((block = gone)) {
                gone = block->next;
                assert(gr_block_state(block) == GR_BLOCK_GONE);
                gr_block_uncharge_and_delete(block);
        }
}

void gr_graph_holds_destroy(struct gr_core *core)
{
        struct gr_graph_hold *hold, *tmp;

        HASH_ITER (hh, core->holds, hold, tmp) {
                HASH_DEL(core->holds, hold);
                free(hold); /* the ledger frees the parked blocks */
        }
        gr_lock_destroy(&core->holds_lock);
}
