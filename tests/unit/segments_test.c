/*
 * Segments that are cut and merged, against a GPU that is only a clock and notices what is handed out or given back too
 * early.
 *
 *   segments_test [mapped]     without mapped memory, or with it
 */
#include "segment/segments_serve.h"

#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>

#include "alloc/pool.h"
#include "base/log.h"
#include "cache/arenas.h"
#include "check.h"
#include "core.h"
#include "reclaim/trim.h"
#include "segment/segments.h"
#include "segment/segments_trim.h"
#include "segments_gpu.h"

static void test_cut_and_merge(void)
{
        uint64_t a, b, c, d, small;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(12 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 12 * MIB);
        gpu_give(a, 12 * MIB);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 12 * MIB);
        GR_CHECK_EQ(gpu_take(12 * MIB), a); /* behind a barrier */
        gpu_give(a, 12 * MIB);
        /* Cut where the piece is large enough, and the rest serves too. */
        GR_CHECK_EQ(gpu_take(11 * MIB), a);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, MIB);
        gpu_give(a, 11 * MIB);
        context->segments->slack.credit_ns = 1; /* twice as large is worth it */
        context->segments->slack.credit_at_ns = sg_now_ns();
        b = gpu_take(9 * MIB - 704 * KIB);
        GR_CHECK_EQ(b, a);
        c = gpu_take(3 * MIB + 1); /* in whole pages of the host */
        GR_CHECK_EQ(c, a + 9 * MIB - 704 * KIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 12 * MIB);
        /* Small ones have a segment of their own. */
        small = gpu_take(65 * KIB);
        d = gpu_take(70 * KIB + 1);
        GR_CHECK_EQ(d, small + 65 * KIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 14 * MIB);
        GR_CHECK_EQ(gr_budget_live(gpu_device()), 9 * MIB - 704 * KIB + 3 * MIB + GR_HOST_PAGE_BYTES + 135 * KIB + 512);
        /* Whatever the order of frees, one range is left. */
        gpu_give(c, 3 * MIB + GR_HOST_PAGE_BYTES);
        gpu_give(b, 9 * MIB - 704 * KIB);
        GR_CHECK_EQ(gpu_take(12 * MIB), a);
        gpu_give(small, 65 * KIB);
        gpu_give(d, 70 * KIB + 1);
        gpu_give(a, 12 * MIB);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 14 * MIB);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 0);
        gpu_end();
}

/* The smallest requests have blocks of their own, in bins. */
static void test_least(void)
{
        struct gr_block_info info;
        uint64_t a, b, c;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(GR_SEGMENTS_LEAST_BYTES);
        b = gpu_take(GR_SEGMENTS_LEAST_BYTES + 1);
        GR_CHECK(gr_ledger_find(core.ledger, a, &info) == 0 && !info.is_range);
        GR_CHECK(gr_ledger_find(core.ledger, b, &info) == 0 && info.is_range);
        c = core.counters.counts[GR_COUNTER_driver_allocs];
        gpu_give(a, GR_SEGMENTS_LEAST_BYTES);
        GR_CHECK_EQ(gpu_take(GR_SEGMENTS_LEAST_BYTES), a); /* behind a barrier */
        gpu_give(a, GR_SEGMENTS_LEAST_BYTES);
        gpu_sync();
        gr_fence_close(context->fence);
        gr_fence_poll(context->fence);
        GR_CHECK(gr_arena_alloc(context, GR_SEGMENTS_LEAST_BYTES) == a);
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_driver_allocs], c);
        gpu_give(b, GR_SEGMENTS_LEAST_BYTES + 1);
        GR_CHECK_EQ(gr_pool_free(&core, a), 0);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        a = gpu_take(1000); /* though much is free in segments */
        GR_CHECK(gr_ledger_find(core.ledger, a, &info) == 0 && !info.is_range);
        gpu_give(a, 1000);
        gpu_settle();
        /* Where there is nothing else they take what is left of a page. */
        gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, 2 * MIB);
        b = gpu_take(GR_SEGMENTS_LEAST_BYTES + 1);
        a = gpu_take(1000);
        GR_CHECK(gr_ledger_find(core.ledger, a, &info) == 0 && info.is_range);
        gpu_give(a, 1000);
        gpu_give(b, GR_SEGMENTS_LEAST_BYTES + 1);
        gpu_settle();
        /* Without cheap barriers bins would take fresh memory again and again. */
        gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, GR_UNLIMITED);
        atomic_store(&core.streams_overlap, true);
        c = core.counters.counts[GR_COUNTER_driver_allocs];
        for (int i = 0; i < 100; i++) {
                a = gpu_take(1000);
                gpu_give(a, 1000);
        }
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_driver_allocs], c + 1);
        gpu_settle();
        gpu_end();
}

/* A busy class of theirs gets preallocated blocks, as many as bins would give it, but no more than a page of them. */
static void test_least_spares(void)
{
        uint64_t a;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        for (int i = 0; i < 20000; i++) {
                a = gpu_take(1000);
                gpu_give(a, 1000);
        }
        GR_CHECK(core.counters.counts[GR_COUNTER_preallocated] > 32 &&
                 core.counters.counts[GR_COUNTER_preallocated] <= 128);
        GR_CHECK(gpu_device()->reserved_bytes <= 2 * MIB);
        gpu_settle();
        gpu_end();
}

/*
 * What the bins keep of small blocks makes room for large ones; not while a barrier stands before work that still runs,
 * behind which the driver would take it back only then.
 */
static void test_least_make_room(bool behind_barrier)
{
        enum { COUNT = 8000 };
        static uint64_t small[COUNT];
        uint64_t large, other;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        for (int i = 0; i < COUNT; i++)
                small[i] = gpu_take(GR_SEGMENTS_LEAST_BYTES);
        for (int i = 0; i < COUNT; i++)
                gpu_give(small[i], GR_SEGMENTS_LEAST_BYTES);
        gr_fence_close(context->fence);
        gpu_sync();
        gr_fence_poll(context->fence);
        if (behind_barrier) {
                other = gpu_take(MIB);
                gpu_give(other, MIB);
                GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
                context->segments->slack.credit_ns = -1; /* it may not wait for that work */
                context->segments->slack.credit_at_ns = sg_now_ns();
        }
        large = gpu_take(120 * MIB);
        if (behind_barrier) {
                GR_CHECK(gr_arenas_cached(context) >= 120 * MIB);
                gpu_sync();
                gr_fence_poll(context->fence);
                other = gpu_take(2 * MIB);
                gpu_give(other, 2 * MIB);
        }
        GR_CHECK(gr_arenas_cached(context) < 24 * MIB);
        GR_CHECK(gpu_device()->reserved_bytes <= 145 * MIB);
        if (!behind_barrier)
                GR_CHECK(gpu_device()->peak_reserved_bytes <= 145 * MIB);
        gpu_give(large, 120 * MIB);
        gpu_settle();
        gpu_end();
}

/* A larger segment is not opened for a small piece; it goes back, so that the footprint stays near what is live. */
static void test_growth(void)
{
        uint64_t a, pieces[20];

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(400 * MIB);
        gpu_give(a, 400 * MIB);
        gpu_sync();
        for (int i = 0; i < 20; i++) {
                pieces[i] = gpu_take(20 * MIB);
                gpu_sync();
        }
        GR_CHECK(gpu_device()->peak_reserved_bytes <= 420 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 400 * MIB);
        for (int i = 0; i < 20; i++)
                gpu_give(pieces[i], 20 * MIB);
        gpu_end();
}

/* What lives in segments keeps little more than itself from the driver, whatever lay there before. */
static void test_held(void)
{
        enum { COUNT = 10 };
        uint64_t large[COUNT], live[COUNT], a;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        for (int i = 0; i < COUNT; i++)
                large[i] = gpu_take(38 * MIB);
        for (int i = 0; i < COUNT; i++)
                gpu_give(large[i], 38 * MIB);
        gpu_sync();
        for (int i = 0; i < COUNT; i++)
                large[i] = gpu_take(36 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, COUNT * 38 * MIB);
        for (int i = 0; i < COUNT; i++)
                live[i] = gpu_take(3 * MIB / 2); /* beside each there would be room for one */
        for (int i = 0; i < COUNT; i++)
                gpu_give(large[i], 36 * MIB);
        /* Nor is one opened where so much time was spent that any fit is worth it. */
        context->segments->slack.credit_ns = INT64_MIN / 2;
        context->segments->slack.credit_at_ns = sg_now_ns();
        a = gpu_take(7 * MIB);
        gpu_sync();
        gr_fence_close(context->fence);
        gr_fence_poll(context->fence);
        gr_trim(context, UINT64_MAX / 2);
        GR_CHECK(gpu_device()->reserved_bytes <= (COUNT * 6 + 28) * MIB);
        gpu_give(a, 7 * MIB);
        for (int i = 0; i < COUNT; i++)
                gpu_give(live[i], 3 * MIB / 2);
        gpu_settle();
        gpu_end();
}

/* Where the driver has nothing more, what is free beside a block of any size serves. */
static void test_held_at_last(void)
{
        uint64_t a, b, c;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(38 * MIB);
        gpu_give(a, 38 * MIB);
        gpu_sync();
        a = gpu_take(36 * MIB);
        gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, 40 * MIB);
        b = gpu_take(3 * MIB / 2);
        GR_CHECK(b != 0 && b != a + 36 * MIB);
        c = gpu_take(3 * MIB / 2);
        GR_CHECK_EQ(c, a + 36 * MIB);
        GR_CHECK_EQ(gpu_take(3 * MIB / 2), 0);
        gpu_give(c, 3 * MIB / 2);
        gpu_give(b, 3 * MIB / 2);
        gpu_give(a, 36 * MIB);
        gpu_settle();
        gpu_end();
}

static void test_fence(void)
{
        uint64_t a, b, c;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_POLL);
        a = gpu_take(4 * MIB);
        b = gpu_take(4 * MIB);
        gpu_give(a, 4 * MIB);
        c = gpu_take(4 * MIB);
        GR_CHECK(c != a); /* its work is not done */
        gpu_sync();
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        GR_CHECK_EQ(gpu_take(4 * MIB), a);
        gpu_give(a, 4 * MIB);
        gpu_give(b, 4 * MIB);
        gpu_give(c, 4 * MIB);
        gr_fence_close(context->fence);
        gr_fence_poll(context->fence);
        GR_CHECK_EQ(gr_trim(context, UINT64_MAX / 2), 0); /* usable or not: nothing is idle */
        gpu_sync();
        gr_fence_poll(context->fence);
        GR_CHECK_EQ(gr_trim(context, 3 * MIB), 4 * MIB);
        GR_CHECK_EQ(gr_trim(context, UINT64_MAX / 2), 8 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 0);
        gpu_end();
}

/* Whether a barrier would give a request something: each range that waits is asked, not the last one alone. */
static void test_would_help(void)
{
        uint64_t a, small;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        atomic_store(&core.streams_overlap, true); /* nothing is free ahead of its fence */
        a = gpu_take(12 * MIB);
        small = gpu_take(65 * KIB);
        GR_CHECK(!gr_segments_would_help(context, 12 * MIB));
        gpu_give(a, 12 * MIB);
        gpu_give(small, 65 * KIB);
        GR_CHECK(gr_segments_would_help(context, 12 * MIB));
        GR_CHECK(gr_segments_would_help(context, 65 * KIB));
        GR_CHECK(!gr_segments_would_help(context, 13 * MIB));
        gpu_settle();
        gpu_end();
}

/* Also what waits in a segment that is far too large, but used. */
static void test_would_help_used(void)
{
        uint64_t a, b, c;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(20 * MIB);
        gpu_give(a, 20 * MIB);
        context->segments->slack.credit_ns = 1; /* twice as large is worth it */
        context->segments->slack.credit_at_ns = sg_now_ns();
        b = gpu_take(12 * MIB);
        c = gpu_take(7 * MIB);
        GR_CHECK(b == a && c == a + 12 * MIB);
        atomic_store(&core.streams_overlap, true);
        gpu_give(c, 7 * MIB);
        context->segments->slack.credit_ns = 20 * SG_MS;
        GR_CHECK(gr_segments_would_help(context, 7 * MIB));
        gpu_give(b, 12 * MIB);
        gpu_settle();
        gpu_end();
}

/* A free segment that is too large for a request serves it only where the footprint would pass its bound. */
static void test_bad_fit(bool room)
{
        size_t bytes = (room ? 10 : 40) * MIB, request_bytes = (room ? 7 : 30) * MIB;
        uint64_t a, b;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(bytes);
        gpu_give(a, bytes);
        b = gpu_take(request_bytes);
        GR_CHECK_EQ(b != a, room);
        gpu_give(b, request_bytes);
        gpu_settle();
        gpu_end();
}

/* As long as the footprint is below what was live once, it grows; a barrier would cost the streams their overlap. */
static void test_below_peak(void)
{
        uint64_t stays, waits, goes;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        atomic_store(&core.streams_overlap, true);
        stays = gpu_take(64 * MIB);
        waits = gpu_take(8 * MIB);
        goes = gpu_take(40 * MIB);
        gpu_give(goes, 40 * MIB);
        gpu_sync();
        gr_fence_sync(context->fence);
        GR_CHECK(gr_trim(context, UINT64_MAX / 2) >= 40 * MIB);
        gpu_give(waits, 8 * MIB);
        goes = gpu_take(12 * MIB);
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], 0);
        gpu_give(goes, 12 * MIB);
        gpu_give(stays, 64 * MIB);
        gpu_settle();
        gpu_end();
}

/* Above it, what waits is made usable instead, and serves the request. */
static void test_at_peak(void)
{
        uint64_t stays, waits;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        atomic_store(&core.streams_overlap, true);
        stays = gpu_take(64 * MIB);
        waits = gpu_take(40 * MIB);
        gpu_give(waits, 40 * MIB);
        GR_CHECK_EQ(gpu_take(40 * MIB), waits);
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], 1);
        GR_CHECK(gpu_device()->peak_reserved_bytes < 120 * MIB);
        gpu_give(waits, 40 * MIB);
        gpu_give(stays, 64 * MIB);
        gpu_settle();
        gpu_end();
}

/* No more segments go back than are asked for. */
static void test_trim_some(void)
{
        uint64_t ptrs[4];

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        for (int i = 0; i < 4; i++)
                ptrs[i] = gpu_take(40 * MIB);
        for (int i = 0; i < 4; i++)
                gpu_give(ptrs[i], 40 * MIB);
        gpu_sync();
        gr_fence_sync(context->fence);
        GR_CHECK(gr_segments_trim(context, 60 * MIB) < 160 * MIB);
        gpu_settle();
        gpu_end();
}

/* What is freed at several times is one range again before any of it has passed, and one barrier readies it. */
static void test_ahead(void)
{
        uint64_t barriers, allocs, ranges, a, b, c;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        /* Small ones wait: there is room for them elsewhere. */
        b = gpu_take(100 * KIB);
        gpu_give(b, 100 * KIB);
        GR_CHECK_EQ(context->segments->waiting_bytes, 100 * KIB);
        c = gpu_take(100 * KIB);
        GR_CHECK(c != b);
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], 0);
        gpu_give(c, 100 * KIB);
        a = gpu_take(12 * MIB);
        gpu_give(a, 12 * MIB);
        GR_CHECK_EQ(gpu_take(11 * MIB - 704 * KIB), a);
        b = gpu_take(MIB + 512);
        barriers = core.counters.counts[GR_COUNTER_barriers];
        ranges = context->segments->free_count;
        gpu_give(a, 11 * MIB - 704 * KIB);
        gr_fence_close(context->fence);
        gpu_give(b, MIB + 512);
        GR_CHECK_EQ(context->segments->free_count, ranges); /* one with what was left between them and the end */
        GR_CHECK_EQ(gpu_take(12 * MIB), a);
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], barriers + 1);
        gpu_give(a, 12 * MIB);
        if (context->segments->expandable[0]) { /* it is part of a larger one, too */
                GR_CHECK_EQ(gpu_take(14 * MIB), a);
                GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], barriers + 2);
                gpu_give(a, 14 * MIB);
        }
        barriers = core.counters.counts[GR_COUNTER_barriers];
        /* During a capture no barrier can be laid, and with several streams it would cost their overlap. */
        gpu_capture(true);
        c = gpu_take(12 * MIB);
        GR_CHECK(c < a || c >= a + 12 * MIB);
        gpu_capture(false);
        gpu_give(c, 12 * MIB);
        atomic_store(&core.streams_overlap, true);
        b = gpu_take(30 * MIB);
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], barriers);
        gpu_sync();
        allocs = core.counters.counts[GR_COUNTER_driver_allocs];
        c = gpu_take(12 * MIB);
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_driver_allocs], allocs);
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], barriers);
        gpu_give(b, 30 * MIB);
        gpu_give(c, 12 * MIB);
        gpu_settle();
        gpu_end();
}

static void test_misuse(void)
{
        struct gr_segments_place place;
        struct gr_context *other;
        uint64_t a, b, c;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(100 * 1024);
        b = gpu_take(100 * 1024);
        GR_CHECK_EQ(gr_pool_free(&core, a + 512), -EALREADY);
        GR_CHECK_EQ(gr_pool_free(&core, SG_BASE - 512), -ENOENT);
        gpu_give(a, 100 * 1024);
        GR_CHECK_EQ(gr_pool_free(&core, a), -EALREADY); /* and not the driver's free of the whole segment */
        GR_CHECK_EQ(gr_segments_find(&core, b + 1000, &place), 0);
        GR_CHECK_EQ(place.base_ptr, b);
        GR_CHECK(place.live);
        GR_CHECK_EQ(gr_segments_find(&core, a + 1000, &place), 0);
        GR_CHECK(!place.live);
        /* Nobody's, or addresses of ours without memory. */
        GR_CHECK(gr_segments_find(&core, a + GR_PAGE_BYTES, &place) == -ENOENT || !place.live);
        GR_CHECK_EQ(gr_segments_find(&core, a - 1, &place), -ENOENT);
        /* Whichever context it is of. */
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK_EQ(gr_pool_alloc(other, 100 * 1024, &c), 0);
        GR_CHECK_EQ(gr_segments_find(&core, c + 1000, &place), 0);
        GR_CHECK_EQ(place.base_ptr, c);
        GR_CHECK_EQ(gr_segments_find(&core, b + 1000, &place), 0);
        GR_CHECK_EQ(place.base_ptr, b);
        gpu_end();
}

static void test_exported(void)
{
        uint64_t a, b;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        a = gpu_take(512 * 1024);
        b = gpu_take(512 * 1024);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        gpu_give(a, 512 * 1024);
        GR_CHECK(gpu_take(512 * 1024) != a);
        gpu_give(b + 512 * 1024, 512 * 1024);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, GR_PAGE_BYTES);
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_driver_frees], 0);
        gpu_give(b, 512 * 1024); /* the last of the segment: all of it goes, exported block included */
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_driver_frees], core.driver->mem_reserve ? 0 : 1);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 0);
        gpu_end();
}

/* Its own segment is the driver's to take back; where it does not, the program is told so. */
static void test_exported_not_freed(void)
{
        uint64_t ptr;

        if (gpu_mapping)
                return;
        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        ptr = gpu_take(4 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, ptr), 0);
        gpu_refuse(SG_MEM_FREE, true);
        GR_CHECK_EQ(sg_free(&core, ptr), -ENOMEM);
        gpu_refuse(SG_MEM_FREE, false);
        gpu_end();
}

static void test_drop(void)
{
        struct gr_context *first;
        uint64_t a, b;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        first = context;
        a = gpu_take(3 * MIB);
        b = gpu_take(1000);
        gpu_take(5 * MIB);
        gpu_give(a, 3 * MIB);
        gpu_forget();
        gr_core_context_gone(first);
        GR_CHECK_EQ(sg_handles(), 0);
        GR_CHECK_EQ(sg_reserved(), 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 0);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 0);
        GR_CHECK_EQ(gr_pool_free(&core, b), -ENOENT);
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK(context == first); /* used again, and it works */
        a = gpu_take(3 * MIB);
        GR_CHECK(a != 0);
        gpu_give(a, 3 * MIB);
        gpu_end();
}

/* What does not fit is refused at once: what the request itself gave back is nothing to wait for. */
static void test_refused(void)
{
        uint64_t a, b, begin_ns;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, 100 * MIB);
        a = gpu_take(60 * MIB);
        b = gpu_take(30 * MIB);
        gpu_give(b, 30 * MIB);
        begin_ns = sg_now_ns();
        GR_CHECK_EQ(gpu_take(45 * MIB), 0);
        GR_CHECK(sg_now_ns() - begin_ns < 100 * UINT64_C(1000000));
        gpu_give(a, 60 * MIB);
        gpu_settle();
        gpu_end();
}

static void test_decay(enum gr_pool_kind pool)
{
        struct gr_config config = {.pool = pool, .reuse = GR_REUSE_AUTO, .decay_ns = UINT64_C(1000000000)};
        uint64_t a, kept;

        gpu_begin(pool, GR_REUSE_AUTO);
        core.config = config;
        atomic_store(&context->segments_active, true);
        a = gpu_take(60 * MIB);
        kept = gpu_take(3 * MIB);
        gpu_give(gpu_take(5000), 5000);
        gpu_give(a, 60 * MIB);
        for (int i = 0; i < 14; i++) {
                gr_decay_run(&core, sg_now_ns());
                sg_driver.sleep_ns(config.decay_ns / 10);
        }
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 4 * MIB);
        gpu_give(kept, 3 * MIB);
        gpu_settle();
        gpu_end();
}

/* What the C library has given is given back in the end, each time the same. */
static void test_left(void)
{
        size_t last = 0, bytes = 0;
        uint64_t a, small;

        for (int i = 0; i < 12; i++) { /* the first ones fill what malloc keeps itself */
                struct mallinfo2 info;

                gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
                a = gpu_take(3 * MIB);
                small = gpu_take(100 * KIB);
                gpu_give(a, 3 * MIB);
                gpu_give(small, 100 * KIB);
                gpu_settle();
                gpu_end();
                info = mallinfo2();
                last = bytes;
                bytes = info.uordblks + info.hblkhd;
        }
        GR_CHECK_EQ(bytes, last);
}

static void test_all(void)
{
        test_least();
        test_least_spares();
        test_least_make_room(false);
        test_least_make_room(true);
        test_fence();
        test_would_help();
        test_ahead();
        test_below_peak();
        test_at_peak();
        test_trim_some();
        test_misuse();
        test_exported();
        test_exported_not_freed();
        test_drop();
        test_decay(GR_POOL_SPLIT);
        test_decay(GR_POOL_AUTO); /* from fastbins, too */
        test_refused();
}

/* What was freed is free, once the GPU is done. */
static void make_free(uint64_t ptr, size_t bytes)
{
        gpu_give(ptr, bytes);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        gr_lock(&context->segments->lock);
        gr_segments_free_usable(context);
        gr_unlock(&context->segments->lock);
}

/* What was needed between two looks was not unneeded, though it is free again at both. */
static void test_low_water(void)
{
        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        make_free(gpu_take(40 * MIB), 40 * MIB);
        gr_segments_trim_unneeded(context);
        GR_CHECK_EQ(context->segments->surplus_bytes, 40 * MIB);
        GR_CHECK_EQ(gr_segments_trim_unneeded(context), 40 * MIB);
        make_free(gpu_take(40 * MIB), 40 * MIB);
        GR_CHECK_EQ(context->segments->surplus_bytes, 40 * MIB);
        GR_CHECK_EQ(gr_segments_trim_unneeded(context), 0);
        gpu_settle();
        gpu_end();
}

static void *take_freed(void *ret_ptr)
{
        *(uint64_t *)ret_ptr = gpu_take(8 * MIB);
        sem_post(&gpu_inside); /* in case that no barrier was laid */
        return NULL;
}

/* The range that a thread lays a barrier for becomes part of another one meanwhile, or does not: it is found again. */
static void test_changes_behind_barrier(bool changes)
{
        uint64_t before, freed, taken = 0;
        pthread_t thread;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        before = gpu_take(8 * MIB);
        freed = gpu_take(8 * MIB);
        GR_CHECK_EQ(freed, before + 8 * MIB);
        gpu_give(freed, 8 * MIB);
        sem_init(&gpu_inside, 0, 0);
        sem_init(&gpu_go_on, 0, 0);
        sg_before[SG_CONTEXT_WAIT] = gpu_stop;
        pthread_create(&thread, NULL, take_freed, &taken);
        sem_wait(&gpu_inside);
        if (changes)
                gpu_give(before, 8 * MIB);
        sem_post(&gpu_go_on);
        pthread_join(thread, NULL);
        GR_CHECK(changes ? taken != 0 : taken == freed);
        gpu_give(taken, 8 * MIB);
        if (!changes)
                gpu_give(before, 8 * MIB);
        gpu_settle();
        gpu_end();
        sem_destroy(&gpu_inside);
        sem_destroy(&gpu_go_on);
}

int main(int argc, char **argv)
{
        const bool mapped = argc == 2 && !strcmp(argv[1], "mapped");

        gpu_mapping = mapped;
        gr_log_set_level(GR_LOG_SILENT); /* the limit is met on purpose */
        if (!mapped) {
                test_cut_and_merge();
                test_growth();
                test_would_help_used();
                test_bad_fit(true);
                test_bad_fit(false);
                test_held();
                test_held_at_last();
                test_low_water();
        }
        if (mapped) {
                test_changes_behind_barrier(false);
                test_changes_behind_barrier(true);
        }
        test_left();
        test_all();
        return GR_CHECK_RESULT();
}
