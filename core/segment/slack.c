#include "segment/slack.h"

#include <assert.h>
#include <inttypes.h>

#include "account/budget.h"
#include "base/arith.h"
#include "base/driver.h"
#include "base/lock.h"
#include "base/log.h"
#include "base/size_class.h"
#include "cache/arenas.h"
#include "cache/bins_trim.h"
#include "context/context.h"
#include "fence/fence.h"
#include "segment/range.h"
#include "segment/segments_state.h"
#include "segment/segments_trim.h"

#define SLACK_SHARE       16                   /* footprint above the peak of live memory: this share of it */
#define SLACK_LEAST_BYTES (UINT64_C(16) << 20) /* at least so much: less is not worth calls of the driver */
/*
 * How much may be mapped for graphs above the most that they used at a time, before memory moves: this share of it, and
 * at least so much.
 */
#define GRAPH_SHARE       3
#define GRAPH_LEAST_BYTES (UINT64_C(16) << 20)
#define GRAPH_AHEAD_SHARE 7                 /* this share of it may be mapped before it is needed */
#define CREDIT_MOST_NS    UINT64_C(4000000) /* what can be saved up for better fits */
#define CREDIT_SHARE      32                /* 1/32 of all time may be spent on better fits */
#define CREDIT_DEBT_NS    UINT64_C(4000000) /* each time so much is overspent, the share above the peak doubles */
#define DEBT_MOST_NS      (4 * (int64_t)CREDIT_DEBT_NS) /* so that debts are soon paid */
#define SLACK_MOST_SHARE  2                             /* up to this share of the peak */
#define BINS_LEAST_BYTES  (UINT64_C(16) << 20)          /* less in bins is not worth calls of the driver either */
#define WAIT_MOST_NS      UINT64_C(5000000)             /* for work that is about to end, before the footprint grows */
#define TELL_SHARE        32 /* the footprint is logged each time it has grown by this share */

/* Adds what the time since the last call earned. The segments' lock is held. */
static void add_credit(struct gr_slack *slack, uint64_t now_ns)
{
        gr_lock_rank_assert_held(GR_RANK_SEGMENTS);
        if (slack->credit_at_ns == 0)
                slack->credit_ns = CREDIT_MOST_NS;
        else if (now_ns > slack->credit_at_ns)
                slack->credit_ns += (int64_t)((now_ns - slack->credit_at_ns) / CREDIT_SHARE);
        if (slack->credit_ns > (int64_t)CREDIT_MOST_NS)
                slack->credit_ns = CREDIT_MOST_NS;
        slack->credit_at_ns = now_ns;
}

uint64_t gr_slack_worth_opening(struct gr_context *context, size_t bytes)
{
        struct gr_slack *slack = &context->segments->slack;
        unsigned shift; /* 3 to 0 as the credit runs down: 1/8 too large, 1/4, 1/2, twice */

        gr_assert_locked(&context->segments->lock);
        add_credit(slack, context->core->driver->now_ns());
        if (slack->credit_ns <= 0)
                return UINT64_MAX;
        shift = (unsigned)((uint64_t)slack->credit_ns * 4 / (CREDIT_MOST_NS + 1));
        return gr_round_up(bytes + (bytes >> shift), GR_PAGE_BYTES);
}

static uint64_t slack_share(int64_t credit_ns)
{
        uint64_t share = SLACK_SHARE;

        for (; credit_ns < -(int64_t)CREDIT_DEBT_NS && share > SLACK_MOST_SHARE; credit_ns += (int64_t)CREDIT_DEBT_NS)
                share /= 2;
        return share;
}

/*
 * By how much the device's footprint would exceed `peak` of live memory and 1/share of it if it grew by growth_bytes
 * for a request.
 */
static uint64_t bytes_above(struct gr_device *device, uint64_t peak, size_t request_bytes, uint64_t growth_bytes,
                            uint64_t share)
{
        uint64_t reserved = atomic_load(&device->reserved_bytes), line;

        assert(request_bytes <= GR_BLOCK_MAX_BYTES && growth_bytes <= INT64_MAX); /* no sum below overflows */
        peak = gr_max(peak, gr_budget_live(device) + gr_range_bytes(request_bytes));
        line = peak + gr_max(peak / share, SLACK_LEAST_BYTES);
        return reserved + growth_bytes > line ? reserved + growth_bytes - line : 0;
}

/* As bytes_above, with the peak since the beginning and the share that the credit allows: that is the bound. */
static uint64_t above_bound(struct gr_context *context, size_t request_bytes, uint64_t growth_bytes, int64_t credit_ns)
{
        struct gr_device *device = context->device;

        return bytes_above(device, atomic_load(&device->peak_live_bytes), request_bytes, growth_bytes,
                           slack_share(credit_ns));
}

/* What is left of the credit after so much time was spent. */
static int64_t spend_credit(struct gr_context *context, uint64_t spent_ns)
{
        struct gr_slack *slack = &context->segments->slack;
        int64_t left;

        gr_lock(&context->segments->lock);
        add_credit(slack, context->core->driver->now_ns());
        slack->credit_ns -= (int64_t)spent_ns;
        if (slack->credit_ns < -DEBT_MOST_NS)
                slack->credit_ns = -DEBT_MOST_NS;
        left = slack->credit_ns;
        gr_unlock(&context->segments->lock);
        return left;
}

/*
 * Returns idle memory. Blocks in bins are returned only if it is worth the calls, and not while a barrier waits for
 * running work: the driver would make this thread wait for that work, too.
 */
static void return_idle(struct gr_context *context, uint64_t want_bytes)
{
        uint64_t gone = gr_segments_trim(context, want_bytes);

        if (gone < want_bytes && gr_arenas_cached(context) >= BINS_LEAST_BYTES &&
            gr_fence_idle(context->fence,
                          gr_min(gr_fence_usable_epoch(context->fence), gr_fence_closed_epoch(context->fence))))
                gr_bins_trim(context, want_bytes - gone);
}

static bool has_surplus(struct gr_segments *segments)
{
        bool has;

        gr_lock(&segments->lock);
        has = (segments->expandable[GR_EXPANDABLE_LARGE] || segments->expandable[GR_EXPANDABLE_SMALL]) &&
              segments->surplus_bytes > 0;
        gr_unlock(&segments->lock);
        return has;
}

/* Logs what the memory consists of when the footprint passes its bound; only after it has grown by TELL_SHARE. */
static void log_growth(struct gr_context *context, uint64_t growth_bytes, uint64_t above, uint64_t waited_ns)
{
        struct gr_segments *segments = context->segments;
        struct gr_slack *slack = &segments->slack;
        uint64_t reserved = atomic_load(&context->device->reserved_bytes), mib = UINT64_C(1) << 20;

        gr_lock(&segments->lock);
        slack->waited_ns += waited_ns;
        if (gr_log_enabled(GR_LOG_DEBUG) && above > 0 && reserved + growth_bytes > slack->told_bytes) {
                slack->told_bytes = reserved + reserved / TELL_SHARE;
                gr_log(GR_LOG_DEBUG,
                       "segments grow by %" PRIu64 " MiB, %" PRIu64 " above their bound: %" PRIu64
                       " MiB reserved, live %" PRIu64 ", its peak %" PRIu64 ", waiting %" PRIu64
                       ", wholly free %" PRIu64 ", stranded %" PRIu64 "; credit %" PRId64 " us, waited %" PRIu64
                       " us, barriers %s",
                       growth_bytes / mib, above / mib, reserved / mib, gr_budget_live(context->device) / mib,
                       atomic_load(&context->device->peak_live_bytes) / mib,
                       atomic_load(&segments->waiting_bytes) / mib, segments->surplus_bytes / mib,
                       atomic_load(&context->device->stranded_bytes) / mib, slack->credit_ns / 1000,
                       slack->waited_ns / 1000, gr_fence_barrier_is_cheap(context->fence) ? "free" : "dear");
        }
        gr_unlock(&segments->lock);
}

bool gr_slack_is_exceeded(struct gr_context *context, size_t request_bytes, uint64_t growth_bytes)
{
        return above_bound(context, request_bytes, growth_bytes, 0) > 0;
}

bool gr_slack_is_exceeded_recently(struct gr_context *context, size_t request_bytes, uint64_t growth_bytes)
{
        return bytes_above(context->device, gr_budget_recent_peak(context->device), request_bytes, growth_bytes,
                           slack_share(0)) > 0;
}

bool gr_slack_has_room(struct gr_context *context, size_t request_bytes, uint64_t growth_bytes)
{
        return above_bound(context, request_bytes, growth_bytes, 0) == 0 ||
               above_bound(context, request_bytes, growth_bytes, spend_credit(context, 0)) == 0;
}

void gr_slack_spend(struct gr_context *context, uint64_t spent_ns)
{
        spend_credit(context, spent_ns);
}

/* The most that graphs used at a time, or will with this request. The segments' lock is held. */
static uint64_t graph_peak(const struct gr_segments *segments, size_t request_bytes)
{
        gr_assert_locked(&segments->lock);
        return gr_max(segments->graph_peak_bytes, segments->graph_used_bytes + request_bytes);
}

/* What is mapped in graph segments; graphs may have other memory elsewhere. The segments' lock is held. */
static uint64_t mapped_for_graphs(const struct gr_segments *segments)
{
        uint64_t mapped_bytes = 0;

        gr_assert_locked(&segments->lock);
        for (int kind = GR_EXPANDABLE_GRAPH_LARGE; kind <= GR_EXPANDABLE_GRAPH_SMALL; kind++)
                if (segments->expandable[kind])
                        mapped_bytes += atomic_load(&segments->expandable[kind]->mapped_bytes);
        return mapped_bytes;
}

bool gr_slack_has_room_for_graph(struct gr_context *context, size_t request_bytes, uint64_t growth_bytes)
{
        uint64_t peak = graph_peak(context->segments, request_bytes);

        return mapped_for_graphs(context->segments) + growth_bytes <=
               peak + gr_max(peak / GRAPH_SHARE, GRAPH_LEAST_BYTES);
}

uint64_t gr_slack_ahead_for_graph(struct gr_context *context, size_t request_bytes)
{
        uint64_t peak = graph_peak(context->segments, request_bytes), most_bytes = peak + peak / GRAPH_AHEAD_SHARE;
        uint64_t mapped_bytes = mapped_for_graphs(context->segments);

        return mapped_bytes < most_bytes ? most_bytes - mapped_bytes : 0;
}

/*
 * Waits for the oldest submitted work. If the GPU has more to do after it, the host was only ahead of the GPU, and the
 * wait costs no credit.
 */
bool gr_slack_make_room(struct gr_context *context, size_t request_bytes, uint64_t growth_bytes)
{
        const struct gr_driver *driver = context->core->driver;
        uint64_t begin_ns = driver->now_ns(), waited_ns = 0, above;
        int64_t credit_ns;
        int rc = 0;

        if (above_bound(context, request_bytes, growth_bytes, 0) == 0)
                return true;
        credit_ns = spend_credit(context, 0);
        above = above_bound(context, request_bytes, growth_bytes, credit_ns);
        if (above > 0) {
                gr_fence_close(context->fence);
                gr_fence_poll(context->fence);
                return_idle(context, above);
                above = above_bound(context, request_bytes, growth_bytes, credit_ns);
        }
        while (above > 0 && credit_ns > 0 && rc == 0 && has_surplus(context->segments)) {
                uint64_t wait_ns = driver->now_ns();

                rc = gr_fence_wait_oldest(context->fence, begin_ns + WAIT_MOST_NS);
                waited_ns += driver->now_ns() - wait_ns;
                if (rc == 0)
                        return_idle(context, above);
                above = above_bound(context, request_bytes, growth_bytes, credit_ns);
        }
        spend_credit(context,
                     driver->now_ns() - begin_ns - (rc == 0 && gr_fence_waiting(context->fence) ? waited_ns : 0));
        log_growth(context, growth_bytes, above, waited_ns);
        return above == 0;
}
