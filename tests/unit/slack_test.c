/* Slack: how much more than the live memory a segment pool holds, and how much time it spends to stay below that. */
#include "segment/slack.h"

#include "cache/arenas.h"
#include "segments_gpu.h"

/*
 * How much memory may be held beside what is live before some is moved: more of it where moves took too much time. What
 * is freed here is a little too small for the next request.
 */
static void test_bound(int64_t credit_ns, uint64_t freed_bytes, bool moved)
{
        uint64_t a, b, c, all_bytes = 400 * MIB + freed_bytes + 20 * MIB;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(freed_bytes);
        b = gpu_take(400 * MIB);
        gpu_give(a, freed_bytes);
        context->segments->slack.credit_ns = credit_ns;
        context->segments->slack.credit_at_ns = sg_now_ns();
        c = gpu_take(freed_bytes + 20 * MIB);
        GR_CHECK(gpu_device()->reserved_bytes >= all_bytes);
        GR_CHECK_EQ(gpu_device()->reserved_bytes < all_bytes + freed_bytes, moved);
        gpu_give(b, 400 * MIB);
        gpu_give(c, freed_bytes + 20 * MIB);
        gpu_settle();
        gpu_end();
}

/* The time that may be spent on better fits is earned by waiting, up to a bound: nobody saves up for a long wait. */
static void test_credit(void)
{
        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        context->segments->slack.credit_at_ns = sg_now_ns();
        context->segments->slack.credit_ns = -5 * (int64_t)SG_MS;
        sg_advance(32 * 7 * SG_MS);
        gr_lock(&context->segments->lock);
        gr_slack_worth_opening(context, MIB);
        GR_CHECK(context->segments->slack.credit_ns >= 2 * (int64_t)SG_MS);
        GR_CHECK(context->segments->slack.credit_ns < 3 * (int64_t)SG_MS);
        sg_advance(3600000 * SG_MS);
        GR_CHECK_EQ(gr_slack_worth_opening(context, 32 * MIB), 36 * MIB);
        GR_CHECK_EQ(context->segments->slack.credit_ns, 4 * SG_MS);
        gr_unlock(&context->segments->lock);
        gpu_end();
}

/*
 * A program with streams whose GPU falls behind, with sizes that keep changing: what it frees serves again behind
 * barriers instead of more memory. Where a kernel runs on there are none.
 */
static void test_behind(bool stuck)
{
        const uint64_t ms = 1000000;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        atomic_store(&core.streams_overlap, true);
        for (uint64_t i = 0; i < 40; i++) {
                uint64_t behind = i < 24 ? i / 2 : 12;

                if (!stuck && gpu_progress().submitted_ns > behind)
                        sg_gpu_reach(gpu_progress().submitted_ns - behind);
                context->segments->slack.credit_at_ns = sg_now_ns(); /* no time for waits */
                context->segments->slack.credit_ns = -1;
                gpu_give(gpu_take((20 + i % 7) * MIB), (20 + i % 7) * MIB);
                gr_fence_close(context->fence); /* its age says that nothing passes */
                sg_advance(stuck ? 60 * ms : 10 * ms);
        }
        if (stuck)
                GR_CHECK_EQ(gpu_progress().barrier_ns, 0);
        else
                GR_CHECK(gpu_device()->peak_reserved_bytes <= 60 * MIB);
        gpu_sync();
        gpu_settle();
        gpu_end();
}

/* While all work is in order no barrier is laid, and what is idle in bins can go back as soon as all work is done. */
static void test_bins_in_order(void)
{
        static uint64_t ptrs[2048];

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        atomic_store(&context->fence->order, GR_ORDER_KEPT);
        for (int i = 0; i < 2048; i++)
                ptrs[i] = gpu_take(16384);
        for (int i = 0; i < 2048; i++)
                gpu_give(ptrs[i], 16384);
        gpu_sync();
        GR_CHECK(gr_arenas_cached(context) >= 32 * MIB);
        gr_slack_make_room(context, MIB, 1024 * MIB);
        GR_CHECK(gr_arenas_cached(context) < 16 * MIB);
        gpu_settle();
        gpu_end();
}

int main(void)
{
        const int64_t ms = (int64_t)SG_MS;

        gpu_mapping = true;
        test_behind(false);
        test_behind(true);
        /* Last: what they touch is cleared for every test after them. */
        test_bound(3 * ms, 40 * MIB, true); /* a 12th more than is live */
        test_bound(-3 * ms, 40 * MIB, true);
        test_bound(-5 * ms, 40 * MIB, false);
        test_bound(-7 * ms, 80 * MIB, true); /* a sixth */
        test_bound(-9 * ms, 80 * MIB, false);
        test_bound(-11 * ms, 200 * MIB, true); /* a third */
        test_bound(-13 * ms, 200 * MIB, false);
        test_bound(-1000 * ms, 200 * MIB, false);
        test_bins_in_order();
        test_credit();
        return GR_CHECK_RESULT();
}
