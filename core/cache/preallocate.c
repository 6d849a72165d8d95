#include "cache/preallocate.h"

#include <assert.h>

#include <utlist.h>

#include "account/budget.h"
#include "base/arith.h"
#include "base/counters.h"
#include "base/shard.h"
#include "base/size_class.h"
#include "cache/arena.h"
#include "cache/pool_kind.h"
#include "context/context.h"
#include "fence/fence.h"

/*
 * The most bytes of preallocated blocks:
 *
 *   total = max(live / 32, memory / 256, threads >= 5 ? min(threads * 128 MiB, memory / 64) : 0)
 *           on a device
 *   class = max(total / 4, 64 MiB), and no more than total / threads where threads >= 5
 *           in one bin, where cached blocks that were not preallocated count as well
 *
 * live: reserved less cached; memory: of the device, or the hard limit where that is less; threads: the arenas of
 * the context, one for each shard in use.
 */
#define LIVE_PART    32
#define MEMORY_PART  256
#define MANY_THREADS 5
#define THREAD_BYTES (UINT64_C(128) << 20)
#define THREADS_PART 64
#define CLASS_PART   4
#define CLASS_BYTES  (UINT64_C(64) << 20)

/* The most blocks of one bin. A fence takes 500 ns, behind kernels 1,300: 4 or 10 ns for each of 128 blocks. */
#define CLASS_BLOCKS 128
/*
 * With pool kinds that have segments, which are to save memory, and fewer than MANY_THREADS threads, a bin has as many
 * blocks as fit into a page, at least SPLIT_BLOCKS, and no more than CLASS_BLOCKS.
 */
#define SPLIT_BLOCKS 64

/*
 * A bin that got no block asks again after so many fences, because asking takes the locks of all arenas of the context.
 */
#define COOLDOWN_FENCES 64

/* A bin that no block was freed into for so many epochs is not in use: its blocks may move to another arena. */
#define LEFT_EPOCHS 4

static unsigned threads_of(struct gr_context *context)
{
        return atomic_load_explicit(&context->arena_count, memory_order_relaxed);
}

static uint32_t class_blocks(struct gr_context *context, size_t block_bytes)
{
        if (!gr_pool_kind_has_segments(context) || threads_of(context) >= MANY_THREADS)
                return CLASS_BLOCKS;
        return (uint32_t)gr_min(gr_max(GR_PAGE_BYTES / block_bytes, SPLIT_BLOCKS), CLASS_BLOCKS);
}

/* The two bounds at the top of this file. */
static void get_bounds(struct gr_context *context, uint64_t *ret_total_bytes, uint64_t *ret_class_bytes)
{
        struct gr_device *device = context->device;
        uint64_t memory = gr_min(atomic_load(&device->hard_bytes), atomic_load(&device->total_bytes));
        uint64_t threads = threads_of(context);
        uint64_t total = gr_max(gr_budget_not_cached(device) / LIVE_PART, memory / MEMORY_PART);

        assert(threads > 0 && threads <= GR_SHARDS); /* the arenas: the first is always there */

        if (threads >= MANY_THREADS)
                total = gr_max(total, gr_min(threads * THREAD_BYTES, memory / THREADS_PART));
        *ret_total_bytes = total;
        *ret_class_bytes = gr_max(total / CLASS_PART, CLASS_BYTES);
        if (threads >= MANY_THREADS) /* else the first thread takes what the last one will need */
                *ret_class_bytes = gr_min(*ret_class_bytes, total / threads);
}

/*
 * Moves up to count usable blocks to own, from bins of other arenas that are not in use (LEFT_EPOCHS). Returns how
 * many.
 */
static size_t move_unused(struct gr_arena *own, unsigned class, size_t count)
{
        uint64_t usable = gr_fence_usable_epoch(own->context->fence);
        struct gr_arena *arena = own;
        size_t moved = 0;

        if (usable <= LEFT_EPOCHS || class >= GR_CLASS_EXACT)
                return 0;
        while (moved < count && (arena = gr_arena_next(arena, own)))
                moved += gr_arena_move(arena, own, class, count - moved, usable - LEFT_EPOCHS);
        return moved;
}

/*
 * Counts a block of block_bytes as preallocated, for a bin that holds have of them. False: that would exceed a bound,
 * or the cache holds too much already; nothing is counted. *ret_bin_full: the bin has reached its own bound.
 */
static bool count_preallocated(struct gr_context *context, uint64_t block_bytes, uint32_t have, bool *ret_bin_full)
{
        struct gr_device *device = context->device;
        uint64_t total_bytes, class_bytes;

        assert(block_bytes > 0 && gr_is_small(block_bytes));
        get_bounds(context, &total_bytes, &class_bytes);
        *ret_bin_full = have >= class_bytes / block_bytes;
        if (*ret_bin_full || gr_budget_excess(device) > 0 ||
            atomic_load(&device->preallocated_bytes) + block_bytes > total_bytes)
                return false;
        atomic_fetch_add(&device->preallocated_bytes, block_bytes);
        atomic_fetch_add(&context->preallocated_bytes, block_bytes);
        gr_count(context->core, GR_COUNTER_preallocated, 1);
        return true;
}

bool gr_preallocate_or_gather(struct gr_arena *own, unsigned class)
{
        struct gr_context *context = own->context;
        struct gr_bin *bin = &own->bins[class];
        size_t block_bytes = gr_class_bytes(class);
        bool alone = threads_of(context) == 1, asks, earned, bin_full = true;
        uint32_t have, most = class_blocks(context, block_bytes);

        gr_arena_lock(own);
        have = gr_bin_count(bin);
        asks = have < most && bin->cooldown == 0;
        earned = asks && gr_is_small(block_bytes) && have < bin->fences;
        if (bin->cooldown > 0)
                bin->cooldown--;
        if (!asks)
                bin->fences++;
        gr_arena_unlock(own);
        if (!asks || (!alone && move_unused(own, class, most - have) > 0))
                return false;
        if (earned && count_preallocated(context, block_bytes, have, &bin_full))
                return true;
        gr_arena_lock(own);
        /* The bin pays for a fence now. That earns it no block if the bound of all bins has just refused it one. */
        if (bin_full)
                bin->fences++;
        if (earned && !alone)
                bin->cooldown = COOLDOWN_FENCES;
        gr_arena_unlock(own);
        return false;
}
