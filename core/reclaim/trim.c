#include "reclaim/trim.h"

#include <errno.h>

#include "account/budget.h"
#include "base/arith.h"
#include "base/size_class.h"
#include "cache/arenas.h"
#include "cache/bins_trim.h"
#include "context/context.h"
#include "fence/fence.h"
#include "fence/fence_wait.h"
#include "host/spill.h"
#include "segment/segments_state.h"
#include "segment/segments_trim.h"

uint64_t gr_trim(struct gr_context *context, uint64_t want_bytes)
{
        uint64_t back = gr_bins_trim(context, want_bytes);

        if (back >= want_bytes)
                return back;
        gr_budget_returns_begin(context->device);
        want_bytes = gr_segments_trim(context, want_bytes - back);
        if (want_bytes > 0)
                gr_arenas_returned(context, UINT64_MAX);
        gr_budget_returns_end(context->device, want_bytes);
        return back + want_bytes;
}

bool gr_trim_has_none(struct gr_context *context)
{
        for (unsigned class = 0; class < GR_CLASS_COUNT; class ++)
                if (!gr_arenas_class_empty(context, class))
                        return false;
        return gr_segments_trim_has_none(context);
}

static bool maintain_one(struct gr_context *context, void *arg)
{
        bool *waiting = arg;
        uint64_t excess = gr_budget_excess(context->device);

        *waiting |= gr_spill_collect(context);
        if (excess == 0 || gr_fence_is_broken(context->fence))
                return true;
        /*
         * Blocks freed during a capture wait until it ends. gr_fence_sync could wait during a capture, but then no
         * thread can launch, not even work that the GPU waits for. So only a request that needs the memory does that.
         */
        if (gr_fence_close(context->fence) == -ENOTSUP)
                gr_fence_sync(context->fence); /* an older driver: only this thread waits */
        gr_fence_poll(context->fence);
        gr_segments_trim_merge_fastbins(context); /* what fastbins keep from the driver is excess, too */
        gr_trim(context, gr_budget_excess(context->device));
        if (gr_budget_excess(context->device) > 0 && gr_fence_waiting(context->fence))
                *waiting = true;
        return true;
}

bool gr_trim_excess(struct gr_core *core)
{
        bool waiting = false;

        gr_context_each(core, -1, maintain_one, &waiting);
        return waiting;
}
