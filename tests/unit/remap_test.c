/*
 * Remap, on the scripted GPU with mapped memory: what moves to where a request needs it, and how long its old addresses
 * stay.
 */
#include "segment/remap.h"

#include <utlist.h>

#include "base/log.h"
#include "reclaim/trim.h"
#include "segments_gpu.h"

/* Free memory whose last work has not passed serves elsewhere at once, at new addresses, and nothing is waited for. */
static void test_moves(bool possible)
{
        uint64_t a, b, c, d;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        gpu_refuse(SG_MEM_REMAP, !possible);
        gpu_told = 0;
        context->segments->slack.credit_at_ns = sg_now_ns(); /* no time for waits */
        context->segments->slack.credit_ns = -1;
        a = gpu_take(100 * MIB);
        b = gpu_take(2 * MIB);
        gpu_give(a, 100 * MIB);
        c = gpu_take(120 * MIB); /* too large for the gap; its memory moves there, and some is new */
        GR_CHECK(c > b);
        if (possible) {
                GR_CHECK(sg_calls(SG_MEM_REMAP) >= 10);
                GR_CHECK_EQ(core.counters.counts[GR_COUNTER_remapped_bytes], 100 * MIB);
                GR_CHECK(gpu_device()->peak_reserved_bytes <= 140 * MIB);
        }
        GR_CHECK_EQ(gpu_told, possible ? 0 : 1);
        GR_CHECK_EQ(gpu_progress().done_ns, 0);
        d = gpu_take(40 * MIB); /* not at the old addresses, which work may still use */
        GR_CHECK(!possible || d > c);
        gpu_give(c, 120 * MIB);
        gpu_give(d, 40 * MIB);
        gpu_sync();
        gr_fence_close(context->fence);
        gr_fence_poll(context->fence);
        c = gpu_take(200 * MIB); /* now they are free */
        gpu_give(c, 200 * MIB);
        gpu_give(b, 2 * MIB);
        gpu_settle();
        GR_CHECK(!context->segments->stale_pages);
        gr_segments_context_gone(context); /* no address is unmapped twice */
        GR_CHECK_EQ(sg_reserved(), 0);
        gpu_end();
}

/* An extent moves for the same price whatever its size: large ones first, though small ones lie in smaller ranges. */
static void test_large_moves(int small_count, bool hole)
{
        uint64_t all, large[2], small[8], kept[10], block, bytes = (hole ? 44 : 42) * MIB, remapped_bytes;
        unsigned remaps;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        all = gpu_take(280 * MIB);
        for (int i = 0; i < 10; i++) {
                uint64_t *p = i < 2 ? &large[i] : &small[i - 2];

                *p = gpu_take(i < 2 ? 24 * MIB : 2 * MIB);
                kept[i] = gpu_take(2 * MIB);
        }
        if (hole) { /* behind the first of the small ones, whose end is no page of an extent then */
                gpu_give(kept[2], 2 * MIB);
                GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
                GR_CHECK_EQ(gr_trim(context, UINT64_MAX / 2), 2 * MIB);
        }
        for (int i = 0; i < 2; i++)
                gpu_give(large[i], 24 * MIB);
        for (int i = 0; i < small_count; i++)
                gpu_give(small[i], 2 * MIB);
        gpu_give(all, 280 * MIB);
        GR_CHECK_EQ(gpu_take(278 * MIB), all); /* what it leaves is part of an extent, and cannot move */
        remaps = sg_calls(SG_MEM_REMAP);
        remapped_bytes = core.counters.counts[GR_COUNTER_remapped_bytes];
        block = gpu_take(bytes);
        remapped_bytes = core.counters.counts[GR_COUNTER_remapped_bytes] - remapped_bytes;
        GR_CHECK_EQ(remapped_bytes, small_count ? bytes : 40 * MIB);
        GR_CHECK_EQ(sg_calls(SG_MEM_REMAP) - remaps, small_count ? 11 : 10); /* of 42 MiB the last hole has one page */
        gpu_give(block, bytes);
        for (int i = small_count; i < 8; i++)
                gpu_give(small[i], 2 * MIB);
        for (int i = 0; i < 10; i++)
                if (!hole || i != 2)
                        gpu_give(kept[i], 2 * MIB);
        gpu_give(all, 278 * MIB);
        gpu_settle();
        gpu_end();
}

/*
 * An old address goes as soon as the memory is idle at its new one, also behind others that are still at work: where it
 * stayed, memory that has gone back would be on the card without being charged.
 */
static void test_old_addresses(void)
{
        struct gr_segments *segments;
        struct gr_block *stale;
        unsigned count = 0;
        uint64_t a, b, c;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        segments = context->segments;
        segments->slack.credit_at_ns = sg_now_ns(); /* no time for waits */
        segments->slack.credit_ns = -1;
        a = gpu_take(100 * MIB);
        b = gpu_take(2 * MIB);
        gpu_give(a, 100 * MIB);
        c = gpu_take(120 * MIB);
        DL_COUNT(segments->stale_pages, stale, count);
        GR_CHECK(count >= 2); /* else this tests nothing */
        gpu_give(c, 120 * MIB);
        gpu_give(b, 2 * MIB);
        gpu_sync();
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        gr_lock(&segments->lock);
        stale = segments->stale_pages;
        if (stale) {
                uint64_t epoch = stale->freed_epoch;

                stale->freed_epoch = UINT64_MAX; /* of work that goes on and on */
                gr_remap_collect(context);
                DL_COUNT(segments->stale_pages, stale, count);
                GR_CHECK_EQ(count, 1);
                segments->stale_pages->freed_epoch = epoch;
                gr_remap_collect(context);
                GR_CHECK(!segments->stale_pages);
        }
        gr_unlock(&segments->lock);
        gpu_end();
}

/* And where it has not gone by the end of the context, it goes then. */
static void test_old_addresses_end(void)
{
        uint64_t given;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        context->segments->slack.credit_at_ns = sg_now_ns(); /* no time for waits */
        context->segments->slack.credit_ns = -1;
        given = gpu_take(100 * MIB);
        gpu_take(2 * MIB);
        gpu_give(given, 100 * MIB);
        gpu_take(120 * MIB);
        GR_CHECK(context->segments->stale_pages); /* else this tests nothing */
        gr_core_context_ending(context);
        gpu_forget();
        gr_core_context_gone(context);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        GR_CHECK_EQ(sg_reserved(), 0);
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        gpu_end();
}

/* The program has at all of the memory that moved, which it shared: with it the old addresses go, or it stays on the
 * card without being charged. */
static void test_old_addresses_shared(void)
{
        uint64_t a, b, c;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        context->segments->slack.credit_at_ns = sg_now_ns(); /* no time for waits */
        context->segments->slack.credit_ns = -1;
        a = gpu_take(100 * MIB);
        b = gpu_take(2 * MIB);
        gpu_give(a, 100 * MIB);
        c = gpu_take(120 * MIB);
        GR_CHECK(context->segments->stale_pages); /* else this tests nothing */
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, c), 0);
        gpu_give(c, 120 * MIB);
        GR_CHECK(!context->segments->stale_pages);
        GR_CHECK_EQ(sg_used_bytes(0), gpu_device()->reserved_bytes);
        gpu_give(b, 2 * MIB);
        gpu_settle();
        gpu_end();
}

int main(void)
{
        gpu_mapping = true;
        gr_log_set_level(GR_LOG_INFO);
        gr_log_set_sink(gpu_count_line, NULL);
        test_moves(true);
        test_moves(false);
        test_old_addresses();
        test_old_addresses_shared();
        test_old_addresses_end();
        /* Last: what they touch is cleared for every test after them. */
        test_large_moves(8, false);
        test_large_moves(0, false);
        test_large_moves(1, true);
        return GR_CHECK_RESULT();
}
