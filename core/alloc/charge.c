#include "alloc/charge.h"

#include <assert.h>
#include <errno.h>

#include "account/budget.h"
#include "account/memory_kind.h"
#include "alloc/ladder.h"
#include "base/counters.h"
#include "base/no_cancel.h"
#include "context/context.h"
#include "host/pinned.h"

#define MOST_BYTES (UINT64_C(1) << 56) /* a charge of more would overflow the sums */

/* The arguments of gr_charge_accounted, for charge_and_allocate. */
struct request {
        struct gr_core *core;
        struct gr_device *device;
        enum gr_memory_kind kind;
        uint64_t bytes;
        gr_charge_allocate *allocate;
        void *arg;
};

static int charge_and_allocate(void *arg)
{
        struct request *request = arg;
        int rc;

        if (request->bytes > MOST_BYTES) /* the driver refuses it */
                return request->allocate(request->arg);
        gr_budget_ask(request->device, request->bytes);
        rc = gr_budget_charge(request->device, request->kind, request->bytes);
        if (!rc) {
                rc = request->allocate(request->arg);
                if (rc)
                        gr_budget_uncharge(request->device, request->kind, request->bytes);
        }
        gr_budget_answered(request->device, request->bytes);
        return rc;
}

static bool found_one(struct gr_context *context, void *arg)
{
        *(struct gr_context **)arg = context;
        return false;
}

struct gr_context *gr_charge_climber(struct gr_core *core, struct gr_device *device, struct gr_context *wanted)
{
        if (wanted && wanted->device == device)
                return wanted;
        wanted = NULL;
        if (device->ordinal >= 0)
                gr_context_each(core, device->ordinal, found_one, &wanted);
        assert(!wanted || wanted->device == device);
        return wanted;
}

int gr_charge_accounted(struct gr_core *core, struct gr_device *device, struct gr_context *context,
                        enum gr_memory_kind kind, uint64_t bytes, gr_charge_allocate *allocate, void *arg)
{
        struct request request = {core, device, kind, bytes, allocate, arg};
        int rc;
        GR_NO_CANCEL; /* allocate may end the thread, with the bytes charged */

        assert(kind < GR_MEMORY_KIND_COUNT && allocate);
        assert((device == core->host) == (kind == GR_MEMORY_HOST)); /* host memory has a budget of its own */
        gr_lock_rank_assert_free_from(GR_RANK_LADDER);
        rc = charge_and_allocate(&request);
        if (gr_is_out_of_memory(rc)) {
                context = device == core->host ? NULL : gr_charge_climber(core, device, context);
                if (rc == -EDQUOT && !context)
                        gr_count(core, GR_COUNTER_limit_hits, 1);
                if (device == core->host)
                        return gr_pinned_retry(core, bytes, charge_and_allocate, &request, rc);
                if (context)
                        rc = gr_ladder_climb_for(context, bytes, charge_and_allocate, &request, rc);
        }
        if (!rc)
                gr_budget_update_peak(device);
        return rc;
}
