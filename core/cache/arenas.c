#include "cache/arenas.h"

#include <assert.h>

#include <utlist.h>

#include "account/budget.h"
#include "base/arith.h"
#include "base/lock.h"
#include "base/size_class.h"
#include "cache/arena.h"
#include "cache/block.h"
#include "context/context.h"

uint64_t gr_arenas_cached(struct gr_context *context)
{
        uint64_t bytes = 0;

        for (struct gr_arena *arena = context->first_arena; arena; arena = gr_arena_next(arena, context->first_arena))
                bytes += atomic_load_explicit(&arena->cached.bytes, memory_order_relaxed);
        return bytes;
}

uint64_t gr_arenas_fastbins(struct gr_context *context)
{
        uint64_t bytes = 0;

        for (struct gr_arena *arena = context->first_arena; arena; arena = gr_arena_next(arena, context->first_arena))
                bytes += gr_fastbins_bytes(&arena->fastbins);
        return bytes;
}

uint64_t gr_arenas_small_bytes(struct gr_context *context)
{
        uint64_t bytes = 0;

        for (struct gr_arena *arena = context->first_arena; arena; arena = gr_arena_next(arena, context->first_arena))
                for (unsigned class = 0; class < GR_CLASS_SMALL; class ++)
                        bytes += (uint64_t)gr_bin_count(&arena->bins[class]) * gr_class_bytes(class);
        return bytes;
}

bool gr_arenas_class_empty(struct gr_context *context, unsigned class)
{
        for (struct gr_arena *arena = context->first_arena; arena; arena = gr_arena_next(arena, context->first_arena))
                if (gr_bin_count(&arena->bins[class]) > 0)
                        return false;
        return true;
}

static void count_arena(struct gr_arena *arena, struct gr_cache_counts *counts)
{
        gr_arena_lock(arena);
        gr_fastbins_count(&arena->fastbins, &counts->hits, &counts->frees, &counts->blocks);
        for (size_t class = 0; class < GR_CLASS_COUNT; class ++) {
                counts->hits += arena->bins[class].hits;
                counts->frees += arena->bins[class].frees;
                counts->blocks += gr_bin_count(&arena->bins[class]);
        }
        gr_arena_unlock(arena);
}

void gr_arenas_count(struct gr_context *context, struct gr_cache_counts *counts)
{
        for (struct gr_arena *arena = context->first_arena; arena; arena = gr_arena_next(arena, context->first_arena))
                count_arena(arena, counts);
}

void gr_arenas_returned(struct gr_context *context, uint64_t bytes)
{
        uint64_t counted = atomic_load(&context->preallocated_bytes);

        while (counted > 0 &&
               !atomic_compare_exchange_weak(&context->preallocated_bytes, &counted, counted - gr_min(counted, bytes)))
                ;
        gr_budget_add(&context->device->preallocated_bytes, -gr_min(counted, bytes));
}

static void forget_blocks(struct gr_arena *arena)
{
        struct gr_device *device = arena->context->device;

        gr_arena_lock(arena);
        for (size_t class = 0; class < GR_CLASS_COUNT; class ++) {
                struct gr_bin *bin = &arena->bins[class];
                struct gr_block *block, *tmp;
                uint32_t count = gr_bin_count(bin);

                DL_FOREACH_SAFE (bin->blocks, block, tmp) {
                        assert(count > 0 && block->class == class && block->context == arena->context);
                        assert(!gr_block_is_live(block));
                        count--;
                        gr_cached_add(&arena->cached, -(int64_t)gr_footprint_bytes(block->capacity_bytes));
                        gr_budget_uncharge_block(device, block->ptr, block->capacity_bytes);
                        gr_block_delete(block);
                }
                assert(count == 0);
                bin->blocks = NULL;
                atomic_store(&bin->count, 0);
                bin->low_water = 0;
                bin->fences = 0;
                bin->cooldown = 0;
        }
        /* The keeper counts the blocks in its bins, and these are empty */
        assert(atomic_load(&arena->cached.bytes) == 0);
        assert(gr_fastbins_bytes(&arena->fastbins) == 0); /* their segments have gone before */
        gr_budget_pass_grant(device, &arena->cached, NULL, UINT64_MAX);
        gr_arena_unlock(arena);
}

void gr_arenas_context_gone(struct gr_context *context)
{
        assert(atomic_load(&context->arenas_quiesced) > 0);
        for (struct gr_arena *arena = context->first_arena; arena; arena = gr_arena_next(arena, context->first_arena))
                forget_blocks(arena);
        gr_arenas_returned(context, UINT64_MAX);
}
