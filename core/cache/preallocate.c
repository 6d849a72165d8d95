#include "cache/preallocate.h"

#include <utlist.h>

#include "core.h"

#define CLASS_BYTES  (UINT64_C(64) << 20) /* preallocated blocks of one class, or ... */
#define CLASS_PART   4                    /* ... this part of those of all classes, whichever is more */
#define CLASS_BLOCKS 128 /* in any case: a pair bears 4 of a fence's 500 ns, 10 of 1,300 behind kernels */
#define SPLIT_BLOCKS 16  /* where split saves memory, and few threads gain by more */
#define CARD_PART                                                                                                      \
        256 /* preallocated blocks of all classes: never above this part of the card, or of the limit, ...             \
             */
#define LIVE_PART       32 /* ... or this part of live memory, or, ... */
#define MANY_THREADS    5
#define THREAD_BYTES    (UINT64_C(128) << 20) /* ... for each of many threads, so much, ... */
#define THREADS_PART    64                    /* ... up to this part of the card: whichever is most */
#define COOLDOWN_FENCES 64 /* until a class that got no more asks again, as all threads pay for that */
#define LEFT_EPOCHS     4  /* a bin that nothing was freed into for so many is nobody's at the moment */

static unsigned threads_of(struct gr_context *context)
{
        return atomic_load_explicit(&context->arena_count, memory_order_relaxed);
}

static uint32_t class_blocks(struct gr_context *context)
{
        return gr_split_active(context) && threads_of(context) < MANY_THREADS ? SPLIT_BLOCKS : CLASS_BLOCKS;
}

/* What preallocated blocks may take in all, and those of one class of one thread. */
static void bounds(struct gr_context *context, uint64_t *ret_total_bytes, uint64_t *ret_class_bytes)
{
        struct gr_device *device = context->device;
        uint64_t card = gr_min(atomic_load(&device->hard_bytes), atomic_load(&device->total_bytes));
        uint64_t threads = threads_of(context);
        uint64_t total = gr_max(gr_budget_held(device) / LIVE_PART, card / CARD_PART);

        if (threads >= MANY_THREADS)
                total = gr_max(total, gr_min(threads * THREAD_BYTES, card / THREADS_PART));
        *ret_total_bytes = total;
        *ret_class_bytes = gr_max(total / CLASS_PART, CLASS_BYTES);
        if (threads >= MANY_THREADS) /* the first must not have what the last will need */
                *ret_class_bytes = gr_min(*ret_class_bytes, total / threads);
}

/* From the bins of others to the calling thread's. */
static size_t move(struct gr_context *context, struct gr_arena *own, unsigned class, size_t count)
{
        uint64_t usable = gr_fence_usable_epoch(&context->fence);
        size_t moved = 0;

        if (usable <= LEFT_EPOCHS || class >= GR_CLASS_EXACT)
                return 0;
        for (unsigned i = 1; i < GR_SHARDS && moved < count; i++) {
                struct gr_arena *arena = gr_arena_at(context, (own->shard + i) % GR_SHARDS);

                if (arena)
                        moved += gr_arena_move(arena, own, class, count - moved, usable - LEFT_EPOCHS);
        }
        return moved;
}

/* So many bytes more, have blocks of which the bin has: whether that stays within what all preallocated blocks, and
 * these, may take. *ret_own: they are held back by what these may take. */
static bool charge(struct gr_context *context, uint64_t block_bytes, uint32_t have, bool *ret_own)
{
        struct gr_device *device = context->device;
        uint64_t total_bytes, class_bytes;

        bounds(context, &total_bytes, &class_bytes);
        *ret_own = have >= class_bytes / block_bytes;
        if (*ret_own || gr_budget_excess(device) > 0 ||
            atomic_load(&device->preallocated_bytes) + block_bytes > total_bytes)
                return false;
        atomic_fetch_add(&device->preallocated_bytes, block_bytes);
        atomic_fetch_add(&context->preallocated_bytes, block_bytes);
        gr_count(context->core, GR_STAT_preallocated, 1);
        return true;
}

bool gr_preallocate_wanted(struct gr_context *context, size_t bytes)
{
        struct gr_arena *arena = gr_arena_own(context);
        unsigned class = gr_class_of(bytes);
        struct gr_bin *bin = &arena->bins[class];
        bool alone = threads_of(context) == 1, asks, earned, own = true;
        uint32_t have, most = class_blocks(context);

        gr_arena_lock(arena);
        have = gr_bin_count(bin);
        asks = have < most && bin->cooldown == 0;
        earned = asks && gr_is_small(bytes) && have < bin->fences;
        if (bin->cooldown > 0)
                bin->cooldown--;
        if (!asks)
                bin->fences++;
        gr_arena_unlock(arena);
        if (!asks || (!alone && move(context, arena, class, most - have) > 0))
                return false;
        if (earned && charge(context, gr_class_block_bytes(bytes), have, &own))
                return true;
        gr_arena_lock(arena);
        if (own) /* what others use up is no reason to be owed more */
                bin->fences++;
        if (earned && !alone)
                bin->cooldown = COOLDOWN_FENCES;
        gr_arena_unlock(arena);
        return false;
}

void gr_preallocate_returned(struct gr_context *context, uint64_t bytes)
{
        uint64_t held = atomic_load(&context->preallocated_bytes);

        while (held > 0 &&
               !atomic_compare_exchange_weak(&context->preallocated_bytes, &held, held - gr_min(held, bytes)))
                ;
        atomic_fetch_sub(&context->device->preallocated_bytes, gr_min(held, bytes));
}
