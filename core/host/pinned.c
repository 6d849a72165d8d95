#include "host/pinned.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include <utlist.h>

#include "account/budget.h"
#include "base/address_table.h"
#include "base/counters.h"
#include "base/lock.h"
#include "base/no_cancel.h"
#include "base/size_class.h"
#include "cache/block_life.h"
#include "cache/ledger.h"
#include "context/context.h"
#include "fence/fence.h"
#include "fence/fence_wait.h"

#define SLACK_PART 8                     /* above 1 MiB a block may be larger than the request by 1/8 of its size */
#define LOOKS_MOST 64                    /* most blocks of a bin that are looked at, as the lock is held */
#define LOOK_NS    UINT64_C(50000)       /* between looks at a GPU that has work */
#define PACE_NS    UINT64_C(1000000)     /* between two blocks returned by decay, so that other threads can launch */
#define BURST_NS   UINT64_C(100000000)   /* decay returns blocks for so long at a time; the rest at its next step */
#define WAIT_NS    UINT64_C(60000000000) /* longest wait for the GPU; the driver's own free waits for ever */

enum { BINS = GR_CLASS_COUNT << GR_PINNED_SORTS_LOG2 };

/* The block is the first field, so that gr_block_delete of it frees the whole. */
struct pinned {
        struct gr_block block;
        uint64_t freed_ns; /* this and usable are guarded by the lock while in a bin */
        bool usable;       /* it is in the list `usable` of its bin, else in `waiting` */
};

_Static_assert(offsetof(struct pinned, block) == 0, "one can be had from the other");
_Static_assert(sizeof(struct pinned) <= GR_BLOCK_ROOM, "it is freed as a block");

void gr_pinned_init(struct gr_core *core)
{
        gr_fence_init(core->process_fence, core, core->host, NULL);
        gr_lock_init(&core->pinned->unpin_lock, GR_RANK_UNPIN);
        gr_lock_init(&core->pinned->lock, GR_RANK_PINNED);
}

void gr_pinned_destroy(struct gr_core *core)
{
        gr_fence_destroy(core->process_fence);
        gr_lock_destroy(&core->pinned->unpin_lock);
        gr_lock_destroy(&core->pinned->lock);
}

static bool fence_is_broken(struct gr_core *core)
{
        return gr_fence_is_broken(core->process_fence);
}

static struct gr_pinned_bin *bin_of(struct gr_core *core, unsigned class, struct gr_context *context, unsigned kind)
{
        uint64_t hash = gr_address_hash((uint64_t)(uintptr_t)context ^ (uint64_t)kind << 32);

        return &core->pinned->bins[class][hash >> (64 - GR_PINNED_SORTS_LOG2)];
}

static struct gr_pinned_bin *bin_with(struct gr_core *core, const struct gr_block *block)
{
        return bin_of(core, block->class, block->context, block->kind);
}

#define EACH_BIN(core, bin)                                                                                            \
        for (struct gr_pinned_bin *bin = (core)->pinned->bins[0], *end_ = bin + BINS; bin < end_; bin++)

/* Puts a freed block into its bin, as one that waits for its fence. Lock held. */
static void put_waiting(struct gr_core *core, struct pinned *own)
{
        gr_assert_locked(&core->pinned->lock);
        assert(own->block.flags & GR_BLOCK_HOST && !gr_block_has_home(&own->block));
        assert(!gr_block_is_live(&own->block)); /* claimed */
        gr_budget_cache(core->host, gr_pinned_footprint(own->block.capacity_bytes));
        own->usable = false;
        DL_APPEND(bin_with(core, &own->block)->waiting, &own->block);
}

/* Takes a block out of its bin. Lock held. */
static void take_out_of_bin(struct gr_core *core, struct pinned *own)
{
        struct gr_pinned_bin *bin = bin_with(core, &own->block);

        gr_assert_locked(&core->pinned->lock);
        assert(own->usable ? bin->usable != NULL : bin->waiting != NULL);
        assert(!gr_block_is_live(&own->block));
        if (own->usable)
                DL_DELETE(bin->usable, &own->block);
        else
                DL_DELETE(bin->waiting, &own->block);
        gr_budget_uncache(core->host, gr_pinned_footprint(own->block.capacity_bytes));
}

/* Moves blocks whose fence has passed to the list `usable`, a limited number as other threads wait. Lock held. */
static void move_to_usable(struct gr_core *core, struct gr_pinned_bin *bin)
{
        struct gr_block *block = bin->waiting;

        gr_assert_locked(&core->pinned->lock);
        /* No barrier is laid on this fence, so usable means idle. */
        for (unsigned n = 0; n < LOOKS_MOST && block && gr_fence_usable(core->process_fence, block->freed_epoch); n++) {
                assert(!((struct pinned *)block)->usable);
                DL_DELETE(bin->waiting, block);
                ((struct pinned *)block)->usable = true;
                DL_APPEND(bin->usable, block);
                block = bin->waiting;
        }
}

/*
 * Takes the smallest block that serves the request, and of several the one freed last, so that blocks that are not
 * needed grow old and decay. Looks at the newest LOOKS_MOST of each bin only. NULL: none. *ret_waiting: a bin that was
 * looked into has blocks that wait for their fence.
 */
static struct pinned *take_usable(struct gr_context *context, size_t bytes, unsigned kind, bool *ret_waiting)
{
        struct gr_core *core = context->core;
        unsigned class = gr_class_of(bytes), last = class;
        size_t capacity = gr_pinned_capacity(bytes), at_most = capacity;
        struct pinned *best = NULL;

        *ret_waiting = false;
        if (!gr_is_small(bytes)) {
                at_most = gr_pinned_footprint(bytes + bytes / SLACK_PART);
                last = gr_class_of(at_most < GR_BLOCK_MAX_BYTES ? at_most : GR_BLOCK_MAX_BYTES);
        }
        gr_lock(&core->pinned->lock);
        for (; class <= last && !(best && best->block.capacity_bytes == capacity); class ++) {
                struct gr_pinned_bin *bin = bin_of(core, class, context, kind);
                struct gr_block *block;

                move_to_usable(core, bin);
                *ret_waiting |= bin->waiting != NULL;
                block = bin->usable ? bin->usable->prev : NULL;
                for (unsigned n = 0; n < LOOKS_MOST && block; n++) {
                        if (block->context == context && block->kind == kind && block->capacity_bytes >= bytes &&
                            block->capacity_bytes <= at_most &&
                            (!best || block->capacity_bytes < best->block.capacity_bytes))
                                best = (struct pinned *)block;
                        if (best && best->block.capacity_bytes == capacity)
                                break;
                        block = block == bin->usable ? NULL : block->prev;
                }
        }
        if (best)
                take_out_of_bin(core, best);
        gr_unlock(&core->pinned->lock);
        return best;
}

/* Finds out which epochs have passed. */
static void look_at_epochs(struct gr_core *core)
{
        struct gr_fence *fence = core->process_fence;

        /*
         * Each free closes its epoch, except during captures, so mostly there is nothing to close and no lock to take.
         */
        if (gr_fence_is_open(fence))
                gr_fence_close(core->process_fence);
        gr_fence_poll(core->process_fence);
}

struct gr_block *gr_pinned_take(struct gr_context *context, size_t bytes, unsigned kind)
{
        struct gr_core *core = context->core;
        struct pinned *own;
        bool waiting;

        if (fence_is_broken(core))
                return NULL;
        own = take_usable(context, bytes, kind, &waiting);
        if (!own && waiting) {
                look_at_epochs(core);
                own = take_usable(context, bytes, kind, &waiting);
        }
        return own ? &own->block : NULL;
}

/*
 * Waits until the GPU has done all work submitted by now. False: some is not done by deadline_ns, or no event could be
 * recorded, as during a capture.
 */
static bool gpu_has_no_work(struct gr_core *core, uint64_t deadline_ns)
{
        struct gr_fence *fence = core->process_fence;
        uint64_t epoch = gr_fence_note_freed(fence, 1); /* 1 byte: an epoch with no freed bytes is not closed */
        int rc = gr_fence_close(core->process_fence);

        while (!rc) {
                rc = gr_fence_poll(core->process_fence);
                if (gr_fence_idle(fence, epoch))
                        return true;
                if (core->driver->now_ns() >= deadline_ns)
                        break;
                core->driver->sleep_ns(LOOK_NS);
        }
        return false;
}

/*
 * Frees the block by the driver's own free, which waits for running kernels. On failure the program still has the
 * block.
 */
static int unpin_by_driver(struct gr_core *core, struct gr_block *block)
{
        bool there = gr_ledger_remove(core->ledger, block); /* first, as another thread may soon get this address */
        int rc = there ? core->driver->host_free(block->context->handle, block->ptr) : 0;

        if (!rc) {
                gr_block_uncharge(block);
                gr_block_delete(block);
                return 0;
        }
        gr_block_restore(core, block);
        return rc;
}

int gr_pinned_free(struct gr_core *core, uint64_t ptr)
{
        struct gr_fence *fence = core->process_fence;
        struct gr_pinned *pinned = core->pinned;
        struct gr_block_info info;
        struct gr_block *block;
        uint64_t footprint, most;
        bool room;
        int rc;

        if (gr_ledger_find(core->ledger, ptr, &info) != 0 || !info.host)
                return -ENOENT;
        rc = gr_block_claim(core, ptr, &block);
        if (rc)
                return rc;
        footprint = gr_pinned_footprint(block->capacity_bytes);
        most = atomic_load_explicit(&core->host->threshold_bytes, memory_order_relaxed);
        if (block->flags & GR_BLOCK_EXPORTED || footprint > most || fence_is_broken(core) || gr_fence_overflow(fence))
                return unpin_by_driver(core, block);
        /*
         * The free waits for the GPU, as the driver's own free does, if the options ask for that, or if the driver is
         * too old to record an event for a whole context.
         */
        rc = core->config.reuse == GR_REUSE_SYNC || !core->driver->context_record ? gr_fence_sync(core->process_fence)
                                                                                  : -EBUSY;
        if (rc && rc != -EBUSY)
                return unpin_by_driver(core, block);
        /* After a sync no work uses the block; epoch 0 has always passed. */
        block->freed_epoch = rc ? gr_fence_note_freed(fence, block->capacity_bytes) : 0;
        ((struct pinned *)block)->freed_ns = core->driver->now_ns();
        gr_lock(&pinned->lock);
        room = gr_budget_cached(core->host) + footprint <= most;
        if (room)
                put_waiting(core, (struct pinned *)block);
        gr_unlock(&pinned->lock);
        if (!room)
                /* As slow as without the cache; room comes when what fills the cache decays */
                return unpin_by_driver(core, block);
        /* Closed at once: work that starts before that delays the block, and a miss costs as much as 1,000 records. */
        if (rc)
                gr_fence_close(core->process_fence);
        if (core->wake && core->config.decay_ns && !atomic_load(&core->decay_armed))
                core->wake(core);
        return 0;
}

/*
 * Returns the first idle block of the list that belongs to context (NULL: any), if it was freed before oldest (NULL:
 * any) and not after before_ns; else oldest. Lock held.
 */
static struct pinned *oldest_idle(struct gr_core *core, struct gr_block *list, struct gr_context *context,
                                  uint64_t before_ns, struct pinned *oldest)
{
        struct gr_block *block;

        gr_assert_locked(&core->pinned->lock);
        DL_FOREACH (list, block) {
                struct pinned *own = (struct pinned *)block;

                if (own->freed_ns > before_ns || (oldest && own->freed_ns >= oldest->freed_ns) ||
                    !gr_fence_idle(core->process_fence, block->freed_epoch))
                        break; /* those behind it were freed later */
                if (!context || block->context == context)
                        return own;
        }
        return oldest;
}

/*
 * Takes out the idle block of context (NULL: of any) that was freed first, if that was not after before_ns. NULL: there
 * is none.
 */
static struct pinned *take_oldest(struct gr_core *core, struct gr_context *context, uint64_t before_ns)
{
        struct pinned *oldest = NULL;

        gr_lock(&core->pinned->lock);
        EACH_BIN(core, bin)
        {
                oldest = oldest_idle(core, bin->usable, context, before_ns, oldest);
                oldest = oldest_idle(core, bin->waiting, context, before_ns, oldest);
        }
        if (oldest)
                take_out_of_bin(core, oldest);
        gr_unlock(&core->pinned->lock);
        return oldest;
}

/*
 * Returns idle blocks to the driver, the oldest first, until they are want_bytes. The driver's free of each waits for
 * running kernels, and no thread can launch meanwhile; with only_quiet it stops as soon as the GPU has work. context
 * and before_ns as in take_oldest. unpin_lock held.
 */
static uint64_t unpin_blocks(struct gr_core *core, struct gr_context *context, uint64_t before_ns, uint64_t want_bytes,
                             bool only_quiet)
{
        uint64_t back_bytes = 0;
        struct pinned *own;

        gr_assert_locked(&core->pinned->unpin_lock);
        while (back_bytes < want_bytes && (!only_quiet || gpu_has_no_work(core, 0)) &&
               (own = take_oldest(core, context, before_ns))) {
                struct gr_block *block = &own->block;

                /* What the driver refuses to take back stays charged: it still holds the memory. */
                if (!gr_ledger_remove(core->ledger, block) ||
                    core->driver->host_free(block->context->handle, block->ptr) == 0) {
                        back_bytes += gr_pinned_footprint(block->capacity_bytes);
                        gr_block_uncharge(block);
                }
                gr_block_delete(own);
        }
        gr_count(core, GR_COUNTER_pinned_returned_bytes, back_bytes);
        return back_bytes;
}

/*
 * Returns cached blocks to the driver so that a request of bytes fits. Returns the bytes. waited: the host has waited
 * for the GPU, and what was freed before that is idle. unpin_lock held.
 */
static uint64_t return_cached(struct gr_core *core, uint64_t bytes, bool waited)
{
        uint64_t room = gr_budget_room(core->host);

        gr_assert_locked(&core->pinned->unpin_lock);
        if (bytes > room)
                bytes -= room;
        if (gr_budget_cached(core->host) == 0 ||
            (!waited && core->driver->context_record && !gpu_has_no_work(core, core->driver->now_ns() + WAIT_NS)))
                return 0;
        return unpin_blocks(core, NULL, UINT64_MAX, bytes, false);
}

/* Holds unpin_lock: else two threads could each take a part of the returned bytes, and both would fail. */
static int retry_locked(struct gr_core *core, uint64_t bytes, int (*attempt)(void *arg), void *arg, bool waited)
{
        int rc;

        gr_lock(&core->pinned->unpin_lock);
        do {
                rc = attempt(arg);
        } while (gr_is_out_of_memory(rc) && return_cached(core, bytes, waited) > 0);
        gr_unlock(&core->pinned->unpin_lock);
        return rc;
}

int gr_pinned_retry(struct gr_core *core, uint64_t bytes, int (*attempt)(void *arg), void *arg, int rc)
{
        GR_NO_CANCEL; /* attempt is called with unpin_lock held */

        if (core->driver->trim_host_pools) {
                core->driver->trim_host_pools();
                rc = attempt(arg);
        }
        if (!gr_is_out_of_memory(rc) || atomic_load(&core->host->threshold_bytes) == 0)
                return rc;
        rc = retry_locked(core, bytes, attempt, arg, false);
        /* Where no event can be recorded, as during a capture, the host waits for the GPU by itself. */
        if (gr_is_out_of_memory(rc) && gr_budget_cached(core->host) > 0 &&
            gr_fence_close(core->process_fence) == -EBUSY &&
            gr_fence_sync_by(core->process_fence, core->driver->now_ns() + WAIT_NS) == 0)
                rc = retry_locked(core, bytes, attempt, arg, true);
        return rc;
}

uint64_t gr_pinned_reclaim(struct gr_core *core, uint64_t want_bytes)
{
        uint64_t back_bytes;

        if (want_bytes == 0 || gr_budget_cached(core->host) == 0)
                return 0;
        gr_lock(&core->pinned->unpin_lock);
        back_bytes = unpin_blocks(core, NULL, UINT64_MAX, want_bytes, true);
        gr_unlock(&core->pinned->unpin_lock);
        return back_bytes;
}

/* When the oldest block was freed; 0: none is cached. */
static uint64_t oldest_ns(struct gr_core *core)
{
        uint64_t ns = 0;

        gr_lock(&core->pinned->lock);
        EACH_BIN(core, bin)
        {
                struct pinned *own = (struct pinned *)(bin->usable ? bin->usable : bin->waiting);

                if (own && (!ns || own->freed_ns < ns))
                        ns = own->freed_ns;
        }
        gr_unlock(&core->pinned->lock);
        return ns;
}

uint64_t gr_pinned_decay(struct gr_core *core, uint64_t now_ns, uint64_t step_ns)
{
        uint64_t decay_ns = core->config.decay_ns, due_ns, soon_ns = now_ns + step_ns;

        if (gr_budget_cached(core->host) == 0)
                return 0;
        if (oldest_ns(core) + decay_ns <= now_ns) {
                uint64_t back_bytes;

                do {
                        gr_lock(&core->pinned->unpin_lock);
                        back_bytes = unpin_blocks(core, NULL, now_ns - decay_ns, 1, true);
                        gr_unlock(&core->pinned->unpin_lock);
                        core->driver->sleep_ns(PACE_NS);
                } while (back_bytes > 0 && core->driver->now_ns() < now_ns + BURST_NS);
        }
        due_ns = oldest_ns(core);
        if (!due_ns)
                return 0;
        due_ns += decay_ns;
        return due_ns > soon_ns ? due_ns : soon_ns;
}

void gr_pinned_join(struct gr_context *context)
{
        gr_fence_add_accessor(context->core->process_fence, context);
}

void gr_pinned_ending(struct gr_context *context)
{
        struct gr_core *core = context->core;

        gr_lock(&core->pinned->unpin_lock);
        if (gr_budget_cached(core->host) > 0)
                unpin_blocks(core, context, UINT64_MAX, UINT64_MAX, true);
        gr_fence_forget(core->process_fence, context);
        gr_unlock(&core->pinned->unpin_lock);
}

/* Uncharges and frees the blocks of context in list. Lock held. */
static void forget_of(struct gr_core *core, struct gr_block *list, struct gr_context *context)
{
        struct gr_block *block, *tmp;

        gr_assert_locked(&core->pinned->lock);
        DL_FOREACH_SAFE (list, block, tmp) {
                if (block->context != context)
                        continue;
                take_out_of_bin(core, (struct pinned *)block);
                gr_block_uncharge(block);
                gr_block_delete(block);
        }
}

void gr_pinned_context_gone(struct gr_context *context)
{
        struct gr_core *core = context->core;

        gr_fence_forget(core->process_fence, context);
        gr_lock(&core->pinned->lock);
        EACH_BIN(core, bin)
        {
                forget_of(core, bin->usable, context);
                forget_of(core, bin->waiting, context);
        }
        gr_unlock(&core->pinned->lock);
}
