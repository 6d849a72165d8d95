#include "host/spill.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include <utlist.h>

#include "account/budget.h"
#include "base/counters.h"
#include "base/driver.h"
#include "base/lock.h"
#include "cache/block_life.h"
#include "cache/ledger.h"
#include "context/context.h"
#include "fence/fence.h"

#define WAIT_NS UINT64_C(1000000000) /* longest wait for freed blocks to be returned */
#define LOOK_NS UINT64_C(50000)

static bool collect_spilled(struct gr_context *context, void *arg)
{
        bool *waiting = arg;

        *waiting |= gr_spill_collect(context);
        return true;
}

/*
 * Adds bytes to the device's spilled_bytes. Where that would be more than is allowed, waits up to WAIT_NS for freed
 * blocks: until their fence has passed and they are returned. -EDQUOT: it would still be more.
 */
static int reserve_patiently(struct gr_context *context, uint64_t bytes)
{
        const struct gr_driver *driver = context->core->driver;
        struct gr_device *device = context->device;
        uint64_t deadline_ns = driver->now_ns() + WAIT_NS;

        for (;;) {
                uint64_t ended = atomic_load(&device->spill_ended);
                bool waiting = false;

                gr_context_each(context->core, device->ordinal, collect_spilled, &waiting);
                if (gr_budget_add_up_to(&device->spilled_bytes, bytes, atomic_load(&device->spill_bytes)))
                        return 0;
                if ((!waiting && atomic_load(&device->spill_begun) == ended) || driver->now_ns() >= deadline_ns)
                        return -EDQUOT;
                driver->sleep_ns(LOOK_NS);
        }
}

int gr_spill_alloc(struct gr_context *context, size_t bytes, struct gr_block **ret_block)
{
        struct gr_core *core = context->core;
        struct gr_block *block, *stale;
        uint64_t ptr;
        int rc;

        gr_lock_rank_assert_free_from(GR_RANK_LADDER + 1);
        if (!core->driver->host_alloc)
                return -ENOTSUP;
        rc = reserve_patiently(context, bytes);
        if (rc)
                return rc;
        block = gr_block_new();
        rc = block ? core->driver->host_alloc(context->handle, bytes, &ptr) : -ENOMEM;
        if (rc)
                goto cancel;
        gr_block_begin(block, context, ptr, bytes, bytes, 0, GR_BLOCK_SPILLED);
        rc = gr_block_add(core, block, &stale);
        if (stale) {
                gr_block_uncharge(stale);
                gr_block_delete(stale);
        }
        if (rc) {
                core->driver->host_free(context->handle, ptr);
                goto cancel;
        }
        gr_count(core, GR_COUNTER_spills, 1);
        *ret_block = block;
        return 0;

cancel:
        gr_budget_add(&context->device->spilled_bytes, -(uint64_t)bytes);
        gr_block_delete(block);
        return rc;
}

void gr_spill_free(struct gr_block *block)
{
        struct gr_context *context = block->context;
        struct gr_spilled *spilled = context->spilled;

        assert(block->flags & GR_BLOCK_SPILLED && !gr_block_is_live(block));
        block->freed_epoch = gr_fence_note_freed(context->fence, block->capacity_bytes);
        gr_lock(&spilled->lock);
        DL_APPEND(spilled->blocks, block);
        gr_unlock(&spilled->lock);
}

bool gr_spill_collect(struct gr_context *context)
{
        struct gr_core *core = context->core;
        struct gr_spilled *spilled = context->spilled;
        struct gr_block *block;
        bool waiting, broken = gr_fence_is_broken(context->fence);

        gr_lock(&spilled->lock);
        waiting = spilled->blocks != NULL;
        gr_unlock(&spilled->lock);
        /*
         * With a broken fence the driver's own free does the wait. It could hang where work waits for later work of the
         * program; then the blocks stay.
         */
        if (!waiting || (broken && atomic_load(&core->waits_for_others)))
                return false;
        if (!broken) {
                gr_fence_close(context->fence);
                gr_fence_poll(context->fence);
        }
        for (;;) {
                gr_lock(&spilled->lock);
                block = spilled->blocks;
                waiting = block != NULL;
                if (block && !broken && !gr_fence_idle(context->fence, block->freed_epoch))
                        block = NULL; /* the blocks behind it were freed later */
                if (block) {
                        DL_DELETE(spilled->blocks, block);
                        atomic_fetch_add(&context->device->spill_begun, 1);
                }
                gr_unlock(&spilled->lock);
                if (!block)
                        return waiting;
                gr_ledger_remove(core->ledger, block);
                core->driver->host_free(context->handle, block->ptr);
                gr_block_uncharge(block);
                gr_block_delete(block);
                atomic_fetch_add(&context->device->spill_ended, 1);
        }
}

void gr_spill_context_gone(struct gr_context *context)
{
        struct gr_spilled *spilled = context->spilled;
        struct gr_block *block, *tmp;

        gr_lock(&spilled->lock);
        DL_FOREACH_SAFE (spilled->blocks, block, tmp) {
                gr_block_uncharge(block);
                gr_block_delete(block);
        }
        spilled->blocks = NULL;
        gr_unlock(&spilled->lock);
}
