#include "context/context.h"

#include <assert.h>

#define VISIT_LOOK_NS UINT64_C(20000)

/* A visit that the calling thread is in. Visits may be nested; outer is the one around it. */
struct visit {
        const struct gr_context *context;
        const struct visit *outer;
};

static _Thread_local const struct visit *visits;

GR_NOT_CHECKED struct gr_context *gr_context_find_locked(struct gr_core *core, void *handle)
{
        struct gr_context *context = core->contexts;

        gr_assert_locked(&core->contexts_lock);
        while (context) {
                if (!context->alive || context->handle != handle) {
                        context = context->next;
                } else if (context->joining) {
                        gr_unlock(&core->contexts_lock);
                        core->driver->sleep_ns(VISIT_LOOK_NS);
                        gr_lock(&core->contexts_lock);
                        context = core->contexts; /* the list may have changed meanwhile: look again */
                } else {
                        break;
                }
        }
        return context;
}

void gr_count_rung(struct gr_core *core, int device, enum gr_rung rung, uint64_t begin_ns, uint64_t bytes)
{
        struct gr_rung_counters *counters = &core->counters.rungs[rung];
        uint64_t ns = core->driver->now_ns() - begin_ns;

        atomic_fetch_add(&counters->tries, 1);
        atomic_fetch_add(&counters->bytes, bytes);
        atomic_fetch_add(&counters->ns, ns);
        gr_trace_add(GR_ENTRY_RUNG, device, rung, ns, bytes);
}

struct gr_context *gr_context_find(struct gr_core *core, void *handle)
{
        struct gr_context *context;

        gr_lock(&core->contexts_lock);
        context = gr_context_find_locked(core, handle);
        gr_unlock(&core->contexts_lock);
        return context;
}

void gr_context_each(struct gr_core *core, int device, bool (*visit)(struct gr_context *context, void *arg), void *arg)
{
        struct gr_context *context;

        assert(device >= -1 && device < GR_DEVICES_MAX);
        gr_lock(&core->contexts_lock);
        context = core->contexts;
        while (context) {
                bool wanted = context->alive && context->ending == 0 && (device < 0 || context->ordinal == device),
                     more = true;

                if (wanted) {
                        struct visit this = {context, visits};

                        context->visitors++;
                        gr_unlock(&core->contexts_lock);
                        visits = &this;
                        more = visit(context, arg);
                        visits = this.outer;
                        gr_lock(&core->contexts_lock);
                        assert(context->visitors > 0 && context->alive); /* it ends only when all have left */
                        context->visitors--;
                }
                context = more ? context->next : NULL; /* the list only grows, at its head */
        }
        gr_unlock(&core->contexts_lock);
}

bool gr_context_one_ends(struct gr_core *core)
{
        bool ends = false;

        gr_lock(&core->contexts_lock);
        for (struct gr_context *context = core->contexts; context; context = context->next)
                ends |= context->alive && context->ending > 0;
        gr_unlock(&core->contexts_lock);
        return ends;
}

void gr_context_close_visits(struct gr_context *context)
{
        struct gr_core *core = context->core;
        unsigned own = 0;

        for (const struct visit *visit = visits; visit; visit = visit->outer)
                own += visit->context == context;
        gr_lock(&core->contexts_lock);
        assert(context->visitors >= own);
        atomic_fetch_add(&context->ending, 1);
        while (context->visitors > own) {
                gr_unlock(&core->contexts_lock);
                core->driver->sleep_ns(VISIT_LOOK_NS);
                gr_lock(&core->contexts_lock);
        }
        gr_unlock(&core->contexts_lock);
}
