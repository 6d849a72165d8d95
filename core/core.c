#include "core.h"

#include <stdlib.h>
#include <string.h>

#include "pool.h"

#define VISIT_LOOK_NS UINT64_C(20000)
#define VISIT_MOST_NS UINT64_C(1000000000) /* a context that ends waits no longer for its visitors */

void gr_core_init(struct gr_core *core, const struct gr_driver *driver, const struct gr_config *config)
{
        memset(core, 0, sizeof(*core));
        core->driver = driver;
        core->config = *config;
        gr_ledger_init(&core->ledger);
        gr_foreign_init(&core->foreign);
        gr_gate_init(&core->gate);
        gr_registry_init(&core->registry);
        gr_lock_init(&core->contexts_lock, GR_RANK_CONTEXTS);
        for (int i = 0; i < GR_DEVICES_MAX; i++)
                gr_budget_init(&core->devices[i], i);
        gr_budget_init(&core->host, -1);
        gr_pinned_init(core);
}

static void context_init(struct gr_context *context, struct gr_core *core, int device)
{
        context->core = core;
        context->device = &core->devices[device];
        gr_fence_init(context);
        gr_lock_init(&context->spilled.lock, GR_RANK_SPILLED);
        gr_arena_init(&context->first_arena, context, 0);
        atomic_init(&context->arenas[0], &context->first_arena);
        atomic_init(&context->arena_count, 1);
        gr_split_init(context);
        gr_budget_keep(context->device, &context->quick.cached);
}

static void context_fini(struct gr_context *context)
{
        for (unsigned i = 1; i < GR_SHARDS; i++)
                gr_metadata_free(gr_arena_at(context, i), sizeof(struct gr_arena));
        gr_lock_destroy(&context->spilled.lock);
        gr_split_destroy(context);
        gr_fence_destroy(context);
}

void gr_core_destroy(struct gr_core *core)
{
        struct gr_context *context, *next;

        for (context = core->contexts; context; context = next) {
                next = context->next;
                context_fini(context);
                gr_metadata_free(context, sizeof(*context));
        }
        for (int i = 0; i < GR_DEVICES_MAX; i++)
                gr_budget_destroy(&core->devices[i]);
        gr_budget_destroy(&core->host);
        gr_pinned_destroy(core);
        gr_ledger_destroy(&core->ledger);
        gr_foreign_destroy(&core->foreign);
        gr_gate_destroy(&core->gate);
        gr_registry_destroy(&core->registry);
        gr_lock_destroy(&core->contexts_lock);
        gr_thread.used = NULL; /* an arena of this core's */
        gr_thread.bypass_until_ns = 0;
}

static struct gr_context *find_locked(struct gr_core *core, void *handle)
{
        for (struct gr_context *context = core->contexts; context; context = context->next)
                if (context->alive && context->handle == handle)
                        return context;
        return NULL;
}

struct gr_context *gr_context_find(struct gr_core *core, void *handle)
{
        struct gr_context *context;

        gr_lock(&core->contexts_lock);
        context = find_locked(core, handle);
        gr_unlock(&core->contexts_lock);
        return context;
}

static bool reach_each_other(struct gr_context *other, void *arg)
{
        struct gr_context *context = arg;

        if (other != context) {
                gr_fence_add_reach(context, other);
                gr_fence_add_reach(other, context);
        }
        return true;
}

struct gr_context *gr_context_add(struct gr_core *core, void *handle, int device)
{
        struct gr_context *context, *dead = NULL;
        bool added = false;

        gr_lock(&core->contexts_lock);
        context = find_locked(core, handle);
        if (context)
                goto out;
        for (context = core->contexts; context && !dead; context = context->next)
                if (!context->alive && context->device->ordinal == device)
                        dead = context;
        context = dead; /* empty since it was dropped */
        if (!context) {
                context = gr_metadata_alloc(sizeof(*context));
                if (!context)
                        goto out;
                context_init(context, core, device);
                context->next = core->contexts;
                core->contexts = context;
        }
        context->handle = handle;
        context->alive = true;
        added = true;
out:
        gr_unlock(&core->contexts_lock);
        if (added) {
                gr_core_each_context(core, device, reach_each_other, context);
                gr_pinned_join(context);
        }
        return context;
}

void gr_core_each_context(struct gr_core *core, int device, bool (*visit)(struct gr_context *context, void *arg),
                          void *arg)
{
        struct gr_context *context;

        gr_lock(&core->contexts_lock);
        context = core->contexts;
        while (context) {
                bool wanted = context->alive && !context->ending && (device < 0 || context->device->ordinal == device),
                     more = true;

                if (wanted) {
                        context->visitors++;
                        gr_unlock(&core->contexts_lock);
                        more = visit(context, arg);
                        gr_lock(&core->contexts_lock);
                        context->visitors--;
                }
                context = more ? context->next : NULL; /* the list only grows, at its head */
        }
        gr_unlock(&core->contexts_lock);
}

static bool forget_in(struct gr_context *context, void *arg)
{
        gr_fence_forget(context, arg);
        return true;
}

static bool forget_after_sync(struct gr_context *context, void *arg)
{
        struct gr_context *ending = arg;

        if (context != ending) {
                context->core->driver->context_sync(ending->handle);
                gr_fence_forget(context, ending);
        }
        return true;
}

/* Keeps visitors out and waits for those inside; for a bounded time, as one may wait for the thread that calls this. */
static void see_off(struct gr_context *context)
{
        struct gr_core *core = context->core;
        const struct gr_driver *driver = core->driver;
        uint64_t until_ns = driver->now_ns() + VISIT_MOST_NS;

        gr_lock(&core->contexts_lock);
        context->ending = true;
        while (context->visitors > 0 && driver->now_ns() < until_ns) {
                gr_unlock(&core->contexts_lock);
                driver->sleep_ns(VISIT_LOOK_NS);
                gr_lock(&core->contexts_lock);
        }
        gr_unlock(&core->contexts_lock);
}

void gr_context_stays(struct gr_context *context)
{
        gr_lock(&context->core->contexts_lock);
        context->ending = false;
        gr_unlock(&context->core->contexts_lock);
        gr_core_each_context(context->core, context->device->ordinal, reach_each_other, context);
        gr_pinned_join(context);
}

void gr_context_ending(struct gr_context *context)
{
        see_off(context);
        gr_core_each_context(context->core, -1, forget_after_sync, context);
        gr_pinned_ending(context);
}

void gr_context_drop(struct gr_context *context)
{
        struct gr_core *core = context->core;

        see_off(context);
        gr_core_each_context(core, -1, forget_in, context);
        gr_arenas_shut(context);
        gr_fence_reset(context);
        gr_split_drop(context);
        gr_ledger_drop_context(&core->ledger, context, gr_block_drop);
        gr_arenas_drop(context);
        gr_arenas_open(context);
        gr_spill_drop(context);
        gr_pinned_drop(context);
        gr_lock(&core->contexts_lock);
        context->alive = context->ending = false; /* from now on it may serve for another context */
        gr_unlock(&core->contexts_lock);
}
