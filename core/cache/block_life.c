#include "cache/block_life.h"

#include <assert.h>
#include <errno.h>

#include <utlist.h>

#include "account/budget.h"
#include "base/attributes.h"
#include "base/size_class.h"
#include "cache/arena.h"
#include "cache/ledger.h"
#include "context/context.h"
#include "fence/fence.h"

/* Quiesces the arenas of context instead of those of *quiesced. Both contexts may be NULL. */
static void quiesce_arenas(struct gr_context **quiesced, struct gr_context *context)
{
        assert(!context || context != *quiesced); /* the ledger asks for each once, or this would not end */
        if (*quiesced)
                gr_arenas_resume(*quiesced);
        if (context)
                gr_arenas_quiesce(context);
        *quiesced = context;
}

GR_HOT_CODE int gr_block_add(struct gr_core *core, struct gr_block *block, struct gr_block **ret_stale)
{
        struct gr_context *quiesced = NULL, *wanted = NULL;
        int rc;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        while ((rc = gr_ledger_add(core->ledger, block, &wanted, ret_stale)) == -EAGAIN)
                quiesce_arenas(&quiesced, wanted);
        quiesce_arenas(&quiesced, NULL);
        return rc;
}

struct gr_block *gr_block_forget(struct gr_core *core, uint64_t ptr)
{
        struct gr_context *quiesced = NULL, *wanted = NULL;
        struct gr_block *stale;

        gr_lock_rank_assert_free_from(GR_RANK_ARENA);
        while (gr_ledger_forget(core->ledger, ptr, &wanted, &stale) == -EAGAIN)
                quiesce_arenas(&quiesced, wanted);
        quiesce_arenas(&quiesced, NULL);
        return stale;
}

void gr_block_restore(struct gr_core *core, struct gr_block *block)
{
        struct gr_block *stale;

        atomic_store(&block->state, GR_BLOCK_LIVE);
        if (gr_block_add(core, block, &stale))
                gr_block_delete(block);
        gr_block_delete(stale);
}

void gr_block_uncharge(struct gr_block *block)
{
        if (block->flags & GR_BLOCK_RANGE)
                return; /* its segment is charged, and released as a whole */
        if (block->flags & GR_BLOCK_HOST)
                gr_budget_uncharge(block->context->core->host, GR_MEMORY_HOST,
                                   gr_pinned_footprint(block->capacity_bytes));
        else if (block->flags & GR_BLOCK_SPILLED)
                gr_budget_add(&block->context->device->spilled_bytes, -block->capacity_bytes);
        else
                gr_budget_uncharge_block(block->context->device, block->ptr, block->capacity_bytes);
}

void gr_block_uncharge_and_delete(struct gr_block *block)
{
        gr_block_uncharge(block);
        gr_block_delete(block);
}

uint64_t gr_blocks_collect(struct gr_context *context)
{
        struct gr_fence *fence = context->fence;
        struct gr_block *block, *left = NULL;
        uint64_t bytes = 0;

        gr_arena_lock(context->first_arena);
        while ((block = context->freed_in_order) &&
               (gr_fence_idle(fence, block->freed_epoch) || gr_fence_is_broken(fence))) {
                DL_DELETE(context->freed_in_order, block);
                DL_APPEND(left, block);
        }
        gr_arena_unlock(context->first_arena);
        while ((block = left)) {
                DL_DELETE(left, block);
                gr_budget_uncache(context->device, gr_footprint_bytes(block->capacity_bytes));
                bytes += gr_budget_uncharge_block(context->device, block->ptr, block->capacity_bytes);
                gr_block_delete(block);
        }
        return bytes;
}

void gr_block_keep_charged(struct gr_block *block)
{
        struct gr_context *context = block->context;

        gr_lock_rank_assert_free_from(GR_RANK_GATE);
        assert(!gr_block_is_live(block));
        assert(!(block->flags & (GR_BLOCK_RANGE | GR_BLOCK_HOST | GR_BLOCK_SPILLED))); /* an allocation of the driver */
        if (!gr_budget_limited(context->device)) {
                gr_budget_uncharge_block(context->device, block->ptr, block->capacity_bytes);
                gr_block_delete(block);
                return;
        }
        gr_budget_cache(context->device, gr_footprint_bytes(block->capacity_bytes));
        gr_arena_lock(context->first_arena);
        block->freed_epoch = gr_fence_note_freed(context->fence, block->capacity_bytes);
        assert(!context->freed_in_order ||
               context->freed_in_order->prev->freed_epoch <= block->freed_epoch); /* oldest first */
        DL_APPEND(context->freed_in_order, block);
        gr_arena_unlock(context->first_arena);
        gr_fence_close(context->fence);
        gr_fence_poll(context->fence);
        gr_blocks_collect(context);
}

void gr_blocks_context_gone(struct gr_context *context)
{
        struct gr_block *block;

        gr_arena_lock(context->first_arena);
        while ((block = context->freed_in_order)) {
                DL_DELETE(context->freed_in_order, block);
                gr_budget_uncache(context->device, gr_footprint_bytes(block->capacity_bytes));
                gr_budget_uncharge_block(context->device, block->ptr, block->capacity_bytes);
                gr_block_delete(block);
        }
        gr_arena_unlock(context->first_arena);
}
