#include "core.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/pool.h"
#include "base/keep_errno.h"
#include "base/thread.h"
#include "cache/arenas.h"
#include "cache/block_life.h"

#define VISIT_LOOK_NS UINT64_C(20000)

/* A context and its parts. */
struct context_parts {
        struct gr_context context; /* first, so that a pointer to it is one to the whole */
        struct gr_fence fence;
        struct gr_segments segments;
        struct gr_arena first_arena;
        struct gr_spilled spilled;
        struct gr_decay decay;
};

void gr_core_init(struct gr_core *core, struct gr_parts *parts, const struct gr_driver *driver,
                  const struct gr_config *config)
{
        assert(driver && driver->mem_alloc && driver->mem_free && driver->now_ns && driver->sleep_ns);
        memset(core, 0, sizeof(*core));
        memset(parts, 0, sizeof(*parts));
        core->driver = driver;
        core->config = *config;
        core->ledger = &parts->ledger;
        core->accounted = &parts->accounted;
        core->devices = parts->devices;
        core->host = &parts->host;
        core->pinned = &parts->pinned;
        core->process_fence = &parts->process_fence;
        core->registry = &parts->registry;
        core->proactive = &parts->proactive;
        gr_ledger_init(core->ledger);
        gr_accounted_init(core->accounted);
        core->collect = gr_pool_collect;
        core->collect_blind = gr_pool_collect_blind;
        gr_gate_init(&core->gate);
        gr_reclaimables_init(core->registry);
        gr_lock_init(&core->contexts_lock, GR_RANK_CONTEXTS);
        gr_lock_init(&core->holds_lock, GR_RANK_GRAPH_HOLDS);
        for (int i = 0; i < GR_DEVICES_MAX; i++)
                gr_budget_init(&core->devices[i], i);
        gr_budget_init(core->host, -1);
        gr_pinned_init(core);
}

/* A context of device without a handle, in no list; NULL: out of memory. */
static struct gr_context *context_new(struct gr_core *core, int device)
{
        struct context_parts *parts = gr_metadata_alloc(sizeof(*parts));
        struct gr_context *context;

        assert(device >= 0 && device < GR_DEVICES_MAX);
        gr_assert_locked(&core->contexts_lock);
        if (!parts)
                return NULL;
        context = &parts->context;
        context->core = core;
        context->device = &core->devices[device];
        context->ordinal = device;
        context->fence = &parts->fence;
        context->segments = &parts->segments;
        context->first_arena = &parts->first_arena;
        context->spilled = &parts->spilled;
        context->decay = &parts->decay;
        gr_fence_init(context->fence, core, context->device, context);
        gr_lock_init(&context->spilled->lock, GR_RANK_SPILLED);
        gr_arena_init(context->first_arena, context, 0);
        atomic_init(&context->arenas[0], context->first_arena);
        atomic_init(&context->arena_count, 1);
        gr_segments_init(context);
        return context;
}

static void context_destroy(struct gr_context *context)
{
        for (unsigned i = 1; i < GR_SHARDS; i++)
                gr_metadata_free(gr_arena_at(context, i), sizeof(struct gr_arena));
        gr_lock_destroy(&context->spilled->lock);
        gr_segments_destroy(context);
        gr_fence_destroy(context->fence);
        gr_metadata_free(context, sizeof(struct context_parts));
}

void gr_core_destroy(struct gr_core *core)
{
        struct gr_context *context, *next;

        for (context = core->contexts; context; context = next) {
                next = context->next;
                context_destroy(context);
        }
        for (int i = 0; i < GR_DEVICES_MAX; i++)
                gr_budget_destroy(&core->devices[i]);
        gr_budget_destroy(core->host);
        gr_pinned_destroy(core);
        gr_graph_holds_destroy(core);
        gr_ledger_destroy(core->ledger);
        gr_accounted_destroy(core->accounted);
        gr_gate_destroy(&core->gate);
        gr_reclaimables_destroy(core->registry);
        gr_lock_destroy(&core->contexts_lock);
        gr_thread.hit_arena = NULL; /* it may point to an arena of this core */
        gr_thread.bypass_until_ns = 0;
}

static bool reach_each_other(struct gr_context *other, void *arg)
{
        struct gr_context *context = arg;

        if (other != context) {
                gr_fence_add_accessor(context->fence, other);
                gr_fence_add_accessor(other->fence, context);
        }
        return true;
}

struct gr_context *gr_core_context_add(struct gr_core *core, void *handle, int device)
{
        struct gr_context *context, *dead = NULL;
        bool added = false, alone = true, far = false;

        gr_lock(&core->contexts_lock);
        context = gr_context_find_locked(core, handle);
        if (context)
                goto out;
        for (context = core->contexts; context; context = context->next) {
                alone &= !context->alive;
                far |= context->alive && context->device->ordinal != device;
                if (!dead && !context->alive && context->device->ordinal == device)
                        dead = context;
        }
        assert(!dead || !dead->joining);
        context = dead; /* empty since it has gone */
        if (dead)
                gr_fence_reset(dead->fence); /* a late free may have closed an epoch since, or failed to */
        if (!context) {
                context = context_new(core, device);
                if (!context)
                        goto out;
                context->next = core->contexts;
                core->contexts = context;
        }
        context->handle = handle;
        gr_segments_begin(context);
        context->alive = context->joining = true;
        added = true;
out:
        gr_unlock(&core->contexts_lock);
        if (added) {
                if (far)
                        atomic_store(&core->several_devices, true);
                if (!alone) { /* work of one runs beside work of another */
                        gr_core_end_order(core);
                        gr_fence_end_order(context->fence);
                }
                gr_context_each(core, device, reach_each_other, context);
                gr_pinned_join(context);
                gr_lock(&core->contexts_lock);
                context->joining = false;
                gr_unlock(&core->contexts_lock);
        }
        return context;
}

struct reach {
        struct gr_context *by;
        uint64_t devices;
};

static bool reach(struct gr_context *context, void *arg)
{
        const struct reach *reach = arg;

        if (context->device != reach->by->device && (reach->devices & GR_DEVICE_BIT(context->ordinal)))
                gr_fence_add_accessor(context->fence, reach->by);
        return true;
}

void gr_core_reach(struct gr_core *core, uint64_t devices, struct gr_context *by)
{
        if (devices & ~GR_DEVICE_BIT(by->ordinal))
                gr_context_each(core, -1, reach, &(struct reach){by, devices});
}

void gr_core_note_graph(struct gr_core *core, uint64_t devices)
{
        atomic_fetch_or(&core->graph_devices, devices);
}

static bool end_order(struct gr_context *context, void *arg)
{
        (void)arg;
        gr_fence_end_order(context->fence);
        return true;
}

void gr_core_end_order(struct gr_core *core)
{
        GR_KEEP_ERRNO;

        if (atomic_load(&core->order_over))
                return;
        gr_context_each(core, -1, end_order, NULL);
        /* After all have ended: who reads that it is over need not wait for another thread that ends it */
        atomic_store(&core->order_over, true);
        gr_context_each(core, -1, end_order, NULL); /* contexts that were added meanwhile */
}

void gr_core_note_overlap(struct gr_core *core)
{
        gr_core_end_order(core);
        atomic_store(&core->streams_overlap, true);
}

static bool close_before_wait(struct gr_context *context, void *arg)
{
        (void)arg;
        gr_fence_close_before_wait(context->fence);
        return true;
}

static bool close_before_capture(struct gr_context *context, void *arg)
{
        (void)arg;
        gr_fence_close_before_capture(context->fence);
        return true;
}

void gr_core_will_wait(struct gr_core *core)
{
        gr_core_end_order(core); /* the barrier for that must not come behind such work */
        atomic_store(&core->waits_for_others, true);
        while (atomic_load(&core->barriers_being_laid) > 0) /* also where another thread waits for them */
                core->driver->sleep_ns(VISIT_LOOK_NS);
        gr_context_each(core, -1, close_before_wait, NULL);
}

void gr_core_stream_will_wait(struct gr_core *core)
{
        atomic_fetch_add(&core->waits_begun, 1);
        gr_core_will_wait(core);
}

void gr_core_stream_waits(struct gr_core *core)
{
        uint64_t before = atomic_fetch_add(&core->waits_given, 1);

        assert(before < atomic_load(&core->waits_begun)); /* gr_core_stream_will_wait comes first */
        (void)before;
}

void gr_core_will_capture(struct gr_core *core)
{
        gr_core_end_order(core); /* while a capture is open, no barrier can be laid */
        gr_context_each(core, -1, close_before_capture, NULL);
        gr_fence_close_before_capture(core->process_fence);
}

/*
 * Removes gone from the fences of all other contexts. Those that are about to end are included, as they may stay. Does
 * not call the driver.
 */
static void forget_everywhere(struct gr_context *gone)
{
        struct gr_core *core = gone->core;
        struct gr_context *context;

        gr_lock(&core->contexts_lock);
        context = core->contexts;
        gr_unlock(&core->contexts_lock);
        for (; context; context = context->next) /* the list only grows, at its head */
                if (context != gone)
                        gr_fence_forget(context->fence, gone);
}

static bool is_alone(struct gr_context *context)
{
        bool alone = true;

        gr_lock(&context->core->contexts_lock);
        for (struct gr_context *other = context->core->contexts; other; other = other->next)
                alone &= other == context || !other->alive;
        gr_unlock(&context->core->contexts_lock);
        return alone;
}

void gr_core_context_stays(struct gr_context *context)
{
        bool ending;

        gr_lock(&context->core->contexts_lock);
        if (context->ending > 0)
                atomic_fetch_sub(&context->ending, 1);
        ending = context->ending > 0;
        gr_unlock(&context->core->contexts_lock);
        if (ending)
                return;
        gr_context_each(context->core, context->device->ordinal, reach_each_other, context);
        gr_core_reach(context->core, GR_ALL_DEVICES, context);
        gr_pinned_join(context);
}

void gr_core_context_ending(struct gr_context *context)
{
        gr_fence_end_order(context->fence); /* it may stay, and nobody who ends the order visits it meanwhile */
        gr_context_close_visits(context);
        /*
         * Its work may use blocks of the other contexts, also those that they free before it is destroyed, and no fence
         * will cover it any more.
         */
        if (!is_alone(context))
                gr_fence_wait_work(context->fence);
        forget_everywhere(context);
        gr_pinned_ending(context);
}

/* A live block ends with its context, without a free of the program: a trace would have it for ever. */
static void block_gone(struct gr_block *block)
{
        if (!(block->flags & GR_BLOCK_HOST))
                gr_trace_add(GR_ENTRY_FREE, GR_ENTRY_NO_DEVICE, 0, block->ptr, 0);
        gr_block_uncharge_and_delete(block);
}

void gr_core_context_gone(struct gr_context *context)
{
        struct gr_core *core = context->core;

        gr_context_close_visits(context);
        forget_everywhere(context);
        gr_arenas_quiesce(context);
        gr_fence_reset(context->fence);
        gr_segments_context_gone(context);
        gr_ledger_context_gone(core->ledger, context, block_gone);
        gr_arenas_context_gone(context);
        gr_graph_holds_context_gone(context);
        gr_blocks_context_gone(context);
        gr_arenas_resume(context);
        gr_spill_context_gone(context);
        gr_pinned_context_gone(context);
        gr_lock(&core->contexts_lock);
        context->alive = false; /* from now on the structure may be used for another context */
        atomic_fetch_add(&context->number, 1);
        atomic_store(&context->ending, 0);
        gr_unlock(&core->contexts_lock);
}
