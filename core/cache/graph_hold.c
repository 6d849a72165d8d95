#include "cache/graph_hold.h"

#include <assert.h>
#include <stdlib.h>

#include <utlist.h>

#include "account/budget.h"
#include "base/size_class.h"
#include "cache/block.h"
#include "cache/ledger.h"
#include "context/context.h"

#define LOOK         256 /* parked blocks that a request looks at */
#define LARGER_SHARE 8   /* one that serves it is larger by at most an eighth, and one unit */

/* Counts a block as parked (1), or not (-1). */
static void count(const struct gr_block *block, int sign)
{
        gr_budget_add(&block->context->device->graph_bytes, (uint64_t)sign * block->capacity_bytes);
}

struct gr_graph_hold *gr_graph_hold_new(struct gr_core *core, bool shared)
{
        struct gr_graph_hold *hold = calloc(1, sizeof(*hold));

        if (!hold)
                return NULL;
        hold->core = core;
        hold->shared = shared;
        if (shared)
                atomic_fetch_add(&core->graph_users, 1);
        atomic_init(&hold->users, 1);
        gr_lock(&core->holds_lock);
        if (++core->holds_made == 0)
                core->holds_made = 1; /* 0 is none */
        hold->number = core->holds_made;
        LL_PREPEND(core->holds, hold);
        gr_unlock(&core->holds_lock);
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
        struct gr_core *core = hold->core; /* the hold may be freed at once */
        bool shared = hold->shared;
        unsigned before = atomic_fetch_sub(&hold->users, 1);

        assert(before > 0);
        if (before > 1)
                return;
        if (shared)
                atomic_fetch_sub(&core->graph_users, 1);
        atomic_store(&core->holds_over, true);
}

bool gr_graph_hold_park(struct gr_core *core, struct gr_block *block)
{
        struct gr_graph_hold *hold;

        assert(!gr_block_is_live(block) && !gr_block_has_home(block));
        if (block->hold == 0)
                return false;
        gr_lock(&core->holds_lock);
        LL_SEARCH_SCALAR(core->holds, hold, number, block->hold);
        if (hold && atomic_load(&hold->users) > 0 && !(hold->shared && hold->ended && block->flags & GR_BLOCK_GRAPH)) {
                block->next = hold->parked;
                hold->parked = block;
                count(block, 1);
        } else {
                block->hold = 0;
                hold = NULL;
        }
        gr_unlock(&core->holds_lock);
        return hold;
}

struct gr_block *gr_graph_hold_take(struct gr_graph_hold *hold, struct gr_context *context, size_t bytes)
{
        struct gr_core *core = hold->core;
        struct gr_block **at, *block;
        size_t most = bytes + bytes / LARGER_SHARE + GR_SPLIT_UNIT_BYTES;

        gr_lock(&core->holds_lock);
        at = &hold->parked;
        for (unsigned looked_at = 0; (block = *at); at = &block->next) {
                if (block->context == context && !(block->flags & ~GR_BLOCK_SPLIT) && block->capacity_bytes >= bytes &&
                    block->capacity_bytes <= most)
                        break;
                if (++looked_at == LOOK) {
                        block = NULL;
                        break;
                }
        }
        if (block) {
                *at = block->next;
                count(block, -1);
        }
        gr_unlock(&core->holds_lock);
        return block;
}

struct gr_block *gr_graph_hold_unpark(struct gr_graph_hold *hold, bool ends)
{
        struct gr_block *all = NULL, *block, **at;

        gr_lock(&hold->core->holds_lock);
        hold->ended |= ends;
        for (at = &hold->parked; (block = *at);) {
                if (!(block->flags & GR_BLOCK_GRAPH)) {
                        at = &block->next;
                        continue;
                }
                *at = block->next;
                count(block, -1);
                block->hold = 0;
                LL_PREPEND(all, block);
        }
        gr_unlock(&hold->core->holds_lock);
        return all;
}

bool gr_graph_holds_are_over(struct gr_core *core)
{
        return atomic_load_explicit(&core->holds_over, memory_order_relaxed);
}

bool gr_graph_holds_begin(struct gr_core *core)
{
        return gr_graph_holds_are_over(core) && atomic_exchange(&core->holds_over, false);
}

struct gr_block *gr_graph_holds_collect(struct gr_core *core, struct gr_context *context)
{
        struct gr_block *all = NULL, *block, **at;
        struct gr_graph_hold *hold, *tmp;

        gr_lock(&core->holds_lock);
        LL_FOREACH_SAFE (core->holds, hold, tmp) {
                if (atomic_load(&hold->users) > 0)
                        continue;
                for (at = &hold->parked; (block = *at);) {
                        if (context ? block->context != context : gr_block_state(block) != GR_BLOCK_GONE) {
                                at = &block->next;
                                continue;
                        }
                        *at = block->next;
                        block->next = all;
                        block->hold = 0;
                        all = block;
                        count(block, -1);
                }
                if (context)
                        continue;
                if (hold->parked) { /* of a context that is about to end, or to begin: another try is needed */
                        atomic_store(&core->holds_over, true);
                } else {
                        LL_DELETE(core->holds, hold);
                        free(hold);
                }
        }
        gr_unlock(&core->holds_lock);
        return all;
}

void gr_graph_holds_drop(struct gr_context *context)
{
        struct gr_core *core = context->core;
        struct gr_block *gone = NULL, *block, **at;
        struct gr_graph_hold *hold;

        gr_lock(&core->holds_lock);
        LL_FOREACH (core->holds, hold) {
                for (at = &hold->parked; (block = *at);) {
                        if (block->context != context) {
                                at = &block->next;
                                continue;
                        }
                        *at = block->next;
                        block->next = gone;
                        gone = block;
                        count(block, -1);
                }
        }
        gr_unlock(&core->holds_lock);
        while ((block = gone)) {
                gone = block->next;
                assert(gr_block_state(block) == GR_BLOCK_GONE);
                gr_block_drop(block);
        }
}

void gr_graph_holds_destroy(struct gr_core *core)
{
        struct gr_graph_hold *hold, *tmp;

        LL_FOREACH_SAFE (core->holds, hold, tmp)
                free(hold); /* what is parked there is in the ledger */
        core->holds = NULL;
        gr_lock_destroy(&core->holds_lock);
}
