#include "cache/block.h"

#include <utlist.h>

#include "account/budget.h"
#include "base/size_class.h"
#include "cache/arena.h"
#include "cache/ledger.h"
#include "context.h"
#include "fence/fence.h"

void gr_block_uncharge(struct gr_block *block)
{
        if (block->flags & GR_BLOCK_SPLIT)
                return; /* its segment is charged, and released as a whole */
        if (block->flags & GR_BLOCK_HOST)
                gr_budget_uncharge(block->context->core->host, GR_MEMORY_HOST,
                                   gr_pinned_footprint(block->capacity_bytes));
        else if (block->flags & GR_BLOCK_SPILLED)
                atomic_fetch_sub(&block->context->device->spilled_bytes, block->capacity_bytes);
        else
                gr_budget_release(block->context->device, block->ptr, block->capacity_bytes);
}

void gr_block_drop(struct gr_block *block)
{
        gr_block_uncharge(block);
        gr_block_free(block);
}

uint64_t gr_blocks_left(struct gr_context *context)
{
        struct gr_fence *fence = context->fence;
        struct gr_block *block, *left = NULL;
        uint64_t bytes = 0;

        gr_arena_lock(context->first_arena);
        while ((block = context->leaving) &&
               (gr_fence_idle(fence, block->freed_epoch) || atomic_load(&fence->broken))) {
                DL_DELETE(context->leaving, block);
                DL_APPEND(left, block);
        }
        gr_arena_unlock(context->first_arena);
        while ((block = left)) {
                DL_DELETE(left, block);
                gr_budget_uncache(context->device, gr_footprint_bytes(block->capacity_bytes));
                bytes += gr_budget_release(context->device, block->ptr, block->capacity_bytes);
                gr_block_free(block);
        }
        return bytes;
}

void gr_block_leave(struct gr_block *block)
{
        struct gr_context *context = block->context;

        if (!gr_budget_limited(context->device)) {
                gr_budget_release(context->device, block->ptr, block->capacity_bytes);
                gr_block_free(block);
                return;
        }
        gr_budget_cache(context->device, gr_footprint_bytes(block->capacity_bytes));
        gr_arena_lock(context->first_arena);
        block->freed_epoch = gr_fence_freed(context->fence, block->capacity_bytes);
        DL_APPEND(context->leaving, block);
        gr_arena_unlock(context->first_arena);
        gr_fence_close(context->fence);
        gr_fence_poll(context->fence);
        gr_blocks_left(context);
}

void gr_blocks_drop_leaving(struct gr_context *context)
{
        struct gr_block *block;

        gr_arena_lock(context->first_arena);
        while ((block = context->leaving)) {
                DL_DELETE(context->leaving, block);
                gr_budget_uncache(context->device, gr_footprint_bytes(block->capacity_bytes));
                gr_budget_release(context->device, block->ptr, block->capacity_bytes);
                gr_block_free(block);
        }
        gr_arena_unlock(context->first_arena);
}
