#include "cache/bins_trim.h"

#include <assert.h>

#include <utlist.h>

#include "account/budget.h"
#include "base/counters.h"
#include "base/size_class.h"
#include "cache/arena.h"
#include "cache/arenas.h"
#include "cache/block_life.h"
#include "cache/ledger.h"
#include "context/context.h"
#include "fence/fence.h"

#define RETURN_BATCH_BYTES (UINT64_C(256) << 20) /* the driver is busy for 0.3 ms with so much */
#define IDLE_BATCH_BYTES   (UINT64_C(64) << 20)  /* for decay, which has time: the driver is busy for 0.1 ms */
#define PASSED_MOST        32 /* most blocks of other sizes that are skipped in a bin, as its lock is held */

/*
 * Takes idle blocks of at_least bytes of footprint out of the bins of class, oldest first, until the sum reaches
 * want_bytes or one batch, but never exceeds most_bytes. At most room of them; returns how many. Bins of classes below
 * GR_CLASS_EXACT may be long, so it gives up there after PASSED_MOST blocks that do not fit.
 */
static size_t take_idle_blocks(struct gr_context *context, unsigned class, uint64_t at_least, uint64_t want_bytes,
                               uint64_t most_bytes, struct gr_block **blocks, size_t room)
{
        uint64_t bytes = 0;
        size_t count = 0;

        assert(class < GR_CLASS_COUNT && room <= GR_TRIM_BATCH);
        for (struct gr_arena *arena = context->first_arena; arena; arena = gr_arena_next(arena, context->first_arena)) {
                struct gr_block *block, *tmp;
                unsigned passed = 0;

                if (gr_bin_count(&arena->bins[class]) == 0)
                        continue;
                gr_arena_lock(arena);
                DL_FOREACH_SAFE (arena->bins[class].blocks, block, tmp) {
                        uint64_t footprint = gr_footprint_bytes(block->capacity_bytes);

                        if (count == room || bytes >= want_bytes || bytes >= RETURN_BATCH_BYTES)
                                break;
                        if (!gr_fence_idle(context->fence, block->freed_epoch)) {
                                if (class < GR_CLASS_EXACT)
                                        break; /* those behind it were freed later */
                                continue;
                        }
                        if (footprint < at_least || footprint > most_bytes - bytes) {
                                if (class < GR_CLASS_EXACT && ++passed > PASSED_MOST)
                                        break;
                                continue;
                        }
                        gr_arena_bin_remove(arena, &arena->bins[class], block);
                        gr_budget_cache(context->device,
                                        footprint); /* else it would count as live until it is uncharged */
                        blocks[count++] = block;
                        bytes += footprint;
                }
                gr_arena_unlock(arena);
        }
        return count;
}

uint64_t gr_bins_trim_ptrs(struct gr_context *context, const uint64_t *ptrs, const uint64_t *sizes, size_t count)
{
        struct gr_core *core = context->core;
        uint64_t bytes = 0;
        size_t done = 0;

        gr_lock_rank_assert_free_from(GR_RANK_GATE);
        if (count == 0)
                return 0;
        if (core->driver->mem_release(context->handle, ptrs, count, &done) == 0)
                done = count;
        assert(done <= count);
        gr_count(core, GR_COUNTER_released_blocks, done);
        for (size_t i = 0; i < count; i++) {
                bool back = i < done;

                if (!back && atomic_load(&context->ending) > 0) {
                        /* The driver frees it with its context, and the address may have another owner by now */
                        back = true;
                } else if (!back && core->driver->mem_free(ptrs[i]) == 0) {
                        gr_count(core, GR_COUNTER_driver_frees, 1);
                        back = true;
                }
                /* What the driver refuses to take back stays charged: it still holds the memory. */
                if (back)
                        bytes += gr_budget_uncharge_block(context->device, ptrs[i], sizes[i]);
        }
        gr_count(core, GR_COUNTER_released_bytes, bytes);
        return bytes;
}

/* Returns blocks that are in no bin to the driver, and frees them. Returns the bytes that the device got back. */
static uint64_t return_blocks(struct gr_context *context, struct gr_block **blocks, size_t count)
{
        uint64_t ptrs[GR_TRIM_BATCH] = {0}, sizes[GR_TRIM_BATCH] = {0}, bytes, cached = 0;
        size_t left = 0;

        for (size_t i = 0; i < count; i++) {
                struct gr_block *block = blocks[i];

                assert(!gr_block_is_live(block) && block->context == context);
                cached += gr_footprint_bytes(block->capacity_bytes);
                if (gr_ledger_remove(context->core->ledger, block)) {
                        ptrs[left] = block->ptr;
                        sizes[left] = block->capacity_bytes;
                        blocks[left++] = block;
                } else { /* its context has ended, and the memory with it */
                        gr_budget_uncharge_block(context->device, block->ptr, block->capacity_bytes);
                        gr_block_delete(block);
                }
        }
        bytes = gr_bins_trim_ptrs(context, ptrs, sizes, left);
        gr_budget_uncache(context->device, cached);
        for (size_t i = 0; i < left; i++)
                gr_block_delete(blocks[i]);
        return bytes;
}

uint64_t gr_bins_trim(struct gr_context *context, uint64_t want_bytes)
{
        struct gr_block *blocks[GR_TRIM_BATCH];
        uint64_t back;

        if (want_bytes == 0)
                return 0;
        gr_budget_returns_begin(context->device);
        back = gr_blocks_collect(context);
        if (back < want_bytes && want_bytes <= GR_BLOCK_MAX_BYTES / 2) {
                /* One block that suffices, unless it is far too large. */
                unsigned last = gr_class_of(2 * want_bytes);

                for (unsigned class = gr_class_of(want_bytes); class <= last; class ++)
                        if (take_idle_blocks(context, class, want_bytes, 1, UINT64_MAX, blocks, 1) > 0) {
                                back += return_blocks(context, blocks, 1);
                                break;
                        }
        }
        for (unsigned class = GR_CLASS_COUNT; class -- > 0;) {
                size_t count;

                while (back < want_bytes && (count = take_idle_blocks(context, class, 0, want_bytes - back, UINT64_MAX,
                                                                      blocks, GR_TRIM_BATCH)) > 0)
                        back += return_blocks(context, blocks, count);
        }
        if (back > 0)
                gr_arenas_returned(context, UINT64_MAX); /* they are returned now or soon */
        gr_budget_returns_end(context->device, back);
        return back;
}

uint64_t gr_bins_trim_class(struct gr_context *context, unsigned class, uint64_t most_bytes)
{
        struct gr_block *blocks[GR_TRIM_BATCH];
        uint64_t bytes = 0;
        size_t count;

        gr_budget_returns_begin(context->device);
        count = take_idle_blocks(context, class, 0, most_bytes < IDLE_BATCH_BYTES ? most_bytes : IDLE_BATCH_BYTES,
                                 most_bytes, blocks, GR_TRIM_BATCH);
        for (size_t i = 0; i < count; i++)
                bytes += gr_footprint_bytes(blocks[i]->capacity_bytes);
        if (count > 0) {
                return_blocks(context, blocks, count);
                gr_arenas_returned(context, bytes);
        }
        gr_budget_returns_end(context->device, bytes);
        return bytes;
}

/* Below GR_CLASS_EXACT all blocks of a class have one size, except a few whose size the driver chose. */
uint64_t gr_bins_trim_unneeded(struct gr_context *context, unsigned class)
{
        uint64_t bytes = 0;

        for (struct gr_arena *arena = context->first_arena; arena; arena = gr_arena_next(arena, context->first_arena)) {
                struct gr_bin *bin = &arena->bins[class];
                struct gr_block *block;
                uint32_t left;

                if (gr_bin_count(bin) == 0) /* then its low water is 0 */
                        continue;
                gr_arena_lock(arena);
                left = gr_bin_restart_low_water(bin);
                if (class < GR_CLASS_EXACT && bin->blocks)
                        bytes += left * (uint64_t)gr_footprint_bytes(bin->blocks->capacity_bytes);
                else
                        for (block = bin->blocks; block && left > 0; block = block->next, left--)
                                bytes += gr_footprint_bytes(block->capacity_bytes);
                gr_arena_unlock(arena);
        }
        return bytes;
}
