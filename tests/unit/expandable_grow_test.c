/*
 * How an expandable segment grows, on the scripted GPU with mapped memory: where a request goes, what is mapped for it
 * and how much extra, for the next ones, and what comes of it where the driver or a limit refuses.
 */
#include <errno.h>

#include "reclaim/trim.h"
#include "segment/expandable.h"
#include "segment/extent.h"
#include "segment/range.h"
#include "segments_gpu.h"

/* Partly mapped when the driver has no more: what came is cached, what was free stays usable, nothing is lost. */
static void test_reserve_fails(void)
{
        uint64_t a, b;

        for (int fails = 1; fails < 60; fails++) {
                gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
                a = gpu_take(6 * MIB);
                b = gpu_take(6 * MIB);
                gpu_give(a, 6 * MIB);
                gpu_sync();
                sg_fail(SG_MEM_MAP, fails, 1, -ENOMEM);
                a = gpu_take(24 * MIB);
                GR_CHECK(a != 0); /* the ladder tries again */
                GR_CHECK_EQ(gr_budget_live(gpu_device()), 30 * MIB);
                gpu_give(a, 24 * MIB);
                gpu_give(b, 6 * MIB);
                gpu_settle();
                gpu_end();
        }
}

static int beside_rc;

static void reserve_beside(void)
{
        uint64_t reserved_bytes;

        sg_before[SG_MEM_MAP] = NULL;
        GR_CHECK_EQ(gr_budget_live(gpu_device()), 0); /* nor is it live or cached before the driver has given it */
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 0);
        beside_rc = gr_budget_reserve(gpu_device(), 2 * MIB, &reserved_bytes);
        if (!beside_rc)
                gr_budget_cancel(gpu_device(), reserved_bytes);
}

/* What a request needs is all reserved before any of it is mapped: another one cannot take a part of it. */
static void test_reserve_at_once(void)
{
        uint64_t a;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, 24 * MIB);
        sg_before[SG_MEM_MAP] = reserve_beside;
        beside_rc = 0;
        a = gpu_take(24 * MIB);
        GR_CHECK(a != 0);
        GR_CHECK(sg_calls(SG_MEM_MAP) > 1);
        GR_CHECK_EQ(beside_rc, -EDQUOT);
        gpu_give(a, 24 * MIB);
        gpu_settle();
        gpu_end();
}

static int refuse_late(void *arg, uint64_t bytes)
{
        (void)arg;
        if (bytes < 100 * MIB)
                return 0;
        gr_budget_update_peak(gpu_device()); /* as another thread does at any time */
        return -EDQUOT;
}

static void adjust_nothing(void *arg, int64_t bytes)
{
        (void)arg;
        (void)bytes;
}

static uint64_t room_for_all(void *arg)
{
        (void)arg;
        return GR_UNLIMITED;
}

static uint64_t no_excess(void *arg)
{
        (void)arg;
        return 0;
}

/* What a limit refuses was never live, also while the limit is asked. */
static void test_refused_not_live(void)
{
        static const struct gr_group group = {.limit_bytes = 99 * MIB,
                                              .reserve = refuse_late,
                                              .adjust = adjust_nothing,
                                              .room = room_for_all,
                                              .excess = no_excess};
        uint64_t a, refused;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        atomic_store(&gpu_device()->group, &group);
        a = gpu_take(8 * MIB);
        GR_CHECK_EQ(sg_alloc(context, 1000 * MIB, &refused), -EDQUOT);
        GR_CHECK_EQ(atomic_load(&gpu_device()->peak_live_bytes), 8 * MIB);
        atomic_store(&gpu_device()->group, NULL);
        gpu_give(a, 8 * MIB);
        gpu_settle();
        gpu_end();
}

/* A large request is mapped in few calls, also the first one of a program. */
static void test_few_extents(void)
{
        uint64_t a;

        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        a = gpu_take(1024 * MIB);
        GR_CHECK(a != 0);
        GR_CHECK_EQ(sg_calls(SG_MEM_MAP), 32);
        gpu_give(a, 1024 * MIB);
        gpu_settle();
        gpu_end();
}

/*
 * A large request while what is cached waits for a capture: what the driver has for a part of it is mapped in vain
 * once, not again at each rung, and is not given back as if it were cached. Nothing is where a limit says so before.
 */
static void test_mapped_in_vain(enum gr_pool_kind pool, bool limited)
{
        enum { BLOCKS = 4 };
        uint64_t block_bytes = (limited ? 256 : 512) * MIB, ours = BLOCKS * (block_bytes + 4 * MIB);
        uint64_t all = limited ? 3200 * MIB : GPU_PAGES * GR_PAGE_BYTES, large_bytes = all - 1000 * MIB;
        uint64_t blocks[BLOCKS], beside[BLOCKS], before, large, missing, in_vain;

        gpu_begin(pool, GR_REUSE_AUTO);
        atomic_store(&context->segments_active, true);
        if (limited)
                gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, all);
        for (int i = 0; i < BLOCKS; i++) {
                blocks[i] = gpu_take(block_bytes);
                beside[i] = gpu_take(4 * MIB);
        }
        gpu_capture(true);
        for (int i = 0; i < BLOCKS; i++)
                gpu_give(blocks[i], block_bytes);
        before = core.counters.counts[GR_COUNTER_released_bytes];
        missing = large_bytes - (all - ours);
        in_vain = limited ? 0 : all - ours;
        large = gpu_take(large_bytes);
        GR_CHECK(large != 0);
        GR_CHECK(core.counters.counts[GR_COUNTER_released_bytes] - before >= missing);
        /* And what the bound asks back that growth keeps to. */
        GR_CHECK(core.counters.counts[GR_COUNTER_released_bytes] - before <= missing + in_vain + 900 * MIB);
        gpu_capture(false);
        gpu_give(large, large_bytes);
        for (int i = 0; i < BLOCKS; i++)
                gpu_give(beside[i], 4 * MIB);
        gpu_settle();
        gpu_end();
}

/* On a full device a request that is smaller than the last refused one maps nothing in vain either, for a while. */
static void test_full_device(void)
{
        uint64_t all_bytes = GPU_PAGES * GR_PAGE_BYTES, a, refused;
        unsigned calls;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(all_bytes - 64 * MIB);
        GR_CHECK_EQ(sg_alloc(context, 512 * MIB, &refused), -ENOMEM);
        calls = sg_calls(SG_MEM_MAP);
        GR_CHECK_EQ(sg_alloc(context, 80 * MIB, &refused), -ENOMEM);
        GR_CHECK_EQ(sg_calls(SG_MEM_MAP), calls);
        sg_advance(1000 * SG_MS);
        GR_CHECK_EQ(sg_alloc(context, 80 * MIB, &refused), -ENOMEM);
        GR_CHECK(sg_calls(SG_MEM_MAP) > calls);
        gpu_give(a, all_bytes - 64 * MIB);
        gpu_settle();
        gpu_end();
}

/* What lives at the front of the segment while extra memory may be mapped. */
static uint64_t begin_extra(enum gr_pool_kind pool, uint64_t live_bytes)
{
        uint64_t ptr;

        gpu_begin(pool, GR_REUSE_AUTO);
        ptr = gpu_take(live_bytes);
        atomic_store(&context->segments->extra_from_ns, 0);
        return ptr;
}

/* One call maps what the next requests need, too: a 32nd of what there is. */
static void test_extra(enum gr_pool_kind pool, uint64_t live_bytes, bool extra)
{
        uint64_t rest = begin_extra(pool, live_bytes), a, b, small;
        const _Atomic uint64_t *allocs = &core.counters.counts[GR_COUNTER_driver_allocs];
        uint64_t before = *allocs;

        a = gpu_take(6 * MIB);
        GR_CHECK_EQ(a, rest + live_bytes);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, live_bytes + (extra ? 32 : 6) * MIB);
        GR_CHECK_EQ(*allocs == before + 1, extra);
        b = gpu_take(10 * MIB);
        GR_CHECK_EQ(b, a + 6 * MIB);
        GR_CHECK_EQ(*allocs == before + 1, extra);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), (extra ? 16 : 0) * MIB);
        GR_CHECK_EQ(gr_budget_live(gpu_device()), live_bytes + 16 * MIB);
        small = gpu_take(MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, live_bytes + (extra ? 34 : 18) * MIB);
        gpu_give(small, MIB);
        gpu_give(b, 10 * MIB);
        gpu_give(a, 6 * MIB);
        gpu_give(rest, live_bytes);
        gpu_settle();
        gpu_end();
}

/*
 * Not where the footprint would pass its bound by what was live of late: what a program needed before decay looked
 * twice is no reason to hold as much again.
 */
static void test_extra_late(int looks)
{
        enum { PIECES = 15 };
        uint64_t rest = begin_extra(GR_POOL_SPLIT, 1024 * MIB), live, ptr, free_ones[PIECES], kept[PIECES], before;

        gpu_give(rest, 1024 * MIB);
        gpu_sync();
        gr_fence_sync(context->fence);
        GR_CHECK_EQ(gr_trim(context, UINT64_MAX / 2), 1024 * MIB);
        atomic_store(&context->segments->extra_from_ns, UINT64_MAX);
        live = gpu_take(512 * MIB);
        for (int i = 0; i < PIECES; i++) {
                free_ones[i] = gpu_take(4 * MIB);
                kept[i] = gpu_take(2 * MIB);
        }
        for (int i = 0; i < PIECES; i++)
                gpu_give(free_ones[i], 4 * MIB);
        for (int i = 0; i < looks; i++)
                gr_segments_trim_unneeded(context);
        atomic_store(&context->segments->extra_from_ns, 0);
        before = gpu_device()->reserved_bytes;
        GR_CHECK_EQ(before, (512 + 6 * PIECES) * MIB);
        ptr = gpu_take(6 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes - before, (looks < 2 ? 32 : 6) * MIB);
        gpu_give(ptr, 6 * MIB);
        for (int i = 0; i < PIECES; i++)
                gpu_give(kept[i], 2 * MIB);
        gpu_give(live, 512 * MIB);
        gpu_settle();
        gpu_end();
}

/*
 * Extra memory is mapped where limits on the cache leave room for it and for an eighth of what is reserved, and the
 * hard limit is eight times that. Elsewhere they are not asked for it. Near the hard limit extents are pages.
 */
static void test_extra_limits(uint64_t hard_bytes, uint64_t soft_bytes, uint64_t threshold_bytes, uint64_t more_bytes,
                              unsigned extents)
{
        uint64_t rest = begin_extra(GR_POOL_AUTO, 400 * MIB), a;
        uint64_t before = core.counters.counts[GR_COUNTER_driver_allocs];

        gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, hard_bytes);
        gr_budget_set_limit(gpu_device(), GR_LIMIT_SOFT, soft_bytes);
        gr_budget_set_limit(gpu_device(), GR_LIMIT_THRESHOLD, threshold_bytes);
        a = gpu_take(6 * MIB);
        GR_CHECK_EQ(a, rest + 400 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 400 * MIB + more_bytes);
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_driver_allocs] - before, extents);
        GR_CHECK_EQ(gr_budget_excess(gpu_device()), 0);
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_limit_hits], 0);
        gpu_give(a, 6 * MIB);
        gpu_give(rest, 400 * MIB);
        gpu_settle();
        gpu_end();
}

/* Near the hard limit a request opens no extent of more than half its size. */
static void test_large_extents(void)
{
        uint64_t rest, large, a, b;

        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        rest = gpu_take(768 * MIB);
        large = gpu_take(32 * MIB); /* in extents of 10 MiB */
        gpu_give(large, 32 * MIB);
        gpu_sync();
        gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, 1024 * MIB);
        a = gpu_take(3 * MIB);
        GR_CHECK(a >= large + 32 * MIB && a < large + 64 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 804 * MIB);
        b = gpu_take(20 * MIB);
        GR_CHECK(b >= large && b < large + 32 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 804 * MIB);
        gpu_give(b, 20 * MIB);
        gpu_give(a, 3 * MIB);
        gpu_give(rest, 768 * MIB);
        gpu_settle();
        gpu_end();
}

static void captures(bool begin)
{
        if (begin) {
                gr_gate_begin_enter(&core.gate);
                gr_gate_begin_leave(&core.gate, true);
        } else {
                gr_gate_end(&core.gate);
        }
}

/*
 * An extent is a 12th of its request, rounded up to whole pages, and at most 16 MiB. While a stream is captured, fewer
 * and larger extents serve a request, as they stay: 512 for the whole card.
 */
static void test_extents(uint64_t bytes, bool captured, unsigned extents)
{
        uint64_t a;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        atomic_store(&gpu_device()->total_bytes, 4 * GIB);
        if (captured)
                captures(true);
        a = gpu_take(bytes);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_driver_allocs), extents);
        if (captured)
                captures(false);
        gpu_give(a, bytes);
        gpu_settle();
        gpu_end();
}

/* When the graph has gone, a small block does not keep all that a request of it had. */
static void test_small_in_captured(void)
{
        uint64_t captured, next, small, large;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, 4 * GIB);
        captures(true);
        captured = gpu_take(240 * MIB);
        next = gpu_take(2 * MIB);
        captures(false);
        gpu_give(captured, 240 * MIB);
        gpu_sync();
        small = gpu_take(2 * MIB);
        GR_CHECK_EQ(small, captured);
        gpu_sync();
        large = gpu_take(4000 * MIB);
        GR_CHECK(large != 0);
        gpu_give(small, 2 * MIB);
        gpu_give(next, 2 * MIB);
        if (large)
                gpu_give(large, 4000 * MIB);
        gpu_settle();
        gpu_end();
}

/* And the same request has them again as they are, also where extents are to stay small. */
static void test_captured_again(void)
{
        uint64_t kept, a;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, 4 * GIB);
        kept = gpu_take(1000 * MIB);
        for (int i = 0; i < 3; i++) {
                unsigned calls = sg_calls(SG_MEM_MAP);

                captures(true);
                a = gpu_take(14 * MIB);
                GR_CHECK_EQ(sg_calls(SG_MEM_MAP) - calls, i == 0 ? 3 : 0); /* of 6 MiB, 6 and 2 */
                captures(false);
                gpu_give(a, 14 * MIB);
                gpu_sync();
                gr_fence_close(context->fence);
                gpu_sync();
                gr_fence_poll(context->fence);
        }
        gpu_give(kept, 1000 * MIB);
        gpu_settle();
        gpu_end();
}

/* Not to lengthen a hole before or behind it either. */
static void test_large_beside_hole(void)
{
        uint64_t rest, large, a;

        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        rest = gpu_take(512 * MIB);
        large = gpu_take(48 * MIB); /* in extents of 6 MiB */
        gpu_give(large, 48 * MIB);
        GR_CHECK_EQ(gpu_take(42 * MIB), large);
        gpu_sync();
        gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, 1024 * MIB);
        a = gpu_take(8 * MIB);
        GR_CHECK_EQ(a, large + 48 * MIB);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 0);
        gpu_give(a, 8 * MIB);
        gpu_give(large, 42 * MIB);
        gpu_give(rest, 512 * MIB);
        gpu_settle();
        gpu_end();
}

/*
 * Where the driver has less than that, the request gets what it needs, without the ladder, and so do those after it:
 * for a while, as memory may have come back since.
 */
static void test_extra_refused(void)
{
        uint64_t rest = begin_extra(GR_POOL_AUTO, 400 * MIB), a, b, c;

        sg_fail(SG_MEM_MAP, 1, 1, -ENOMEM);
        a = gpu_take(6 * MIB);
        GR_CHECK_EQ(a, rest + 400 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 406 * MIB);
        b = gpu_take(6 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 412 * MIB);
        for (int rung = 0; rung < GR_RUNG_COUNT; rung++)
                GR_CHECK_EQ(core.counters.rungs[rung].tries, 0);
        sg_advance(UINT64_C(10000000000));
        c = gpu_take(6 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, (412 + 24) * MIB);
        gpu_give(a, 6 * MIB);
        gpu_give(b, 6 * MIB);
        gpu_give(c, 6 * MIB);
        gpu_give(rest, 400 * MIB);
        gpu_settle();
        gpu_end();
}

/* The same where it is refused half-way: what came already is part of what the request gets. */
static void test_extra_halfway(void)
{
        uint64_t rest = begin_extra(GR_POOL_AUTO, 600 * MIB), a, b, c;

        atomic_store(&context->segments->extra_from_ns, UINT64_MAX);
        a = gpu_take(4 * MIB);
        b = gpu_take(2 * MIB);
        gpu_give(a, 4 * MIB);
        gpu_sync();
        gr_fence_sync(context->fence);
        GR_CHECK_EQ(gr_trim(context, UINT64_MAX / 2), 4 * MIB);
        c = gpu_take(6 * MIB);
        GR_CHECK_EQ(c, b + 2 * MIB);
        gpu_give(b, 2 * MIB);
        gpu_give(c, 6 * MIB);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 608 * MIB);
        atomic_store(&context->segments->extra_from_ns, 0);
        sg_fail(SG_MEM_MAP, 2, 1, -ENOMEM);
        GR_CHECK_EQ(gpu_take(22 * MIB), a); /* between two holes is what was freed */
        GR_CHECK(!sg_planned(SG_MEM_MAP));
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 622 * MIB);
        GR_CHECK_EQ(gr_budget_live(gpu_device()), 622 * MIB);
        GR_CHECK_EQ(context->segments->surplus_bytes, 0);
        gpu_give(a, 22 * MIB);
        gpu_give(rest, 600 * MIB);
        gpu_settle();
        gpu_end();
}

/*
 * With many holes a request looks at few of them and goes to the end of the segment, or on where that is full. A walk
 * that goes on ends in memory that cannot be read.
 */
static void test_many_holes(void)
{
        enum { MANY = 800, PASSED = 300 };
        static uint64_t ptrs[MANY];
        struct gr_block *last, *after;
        struct gr_segment *segment;
        struct gr_range *end;
        uint64_t a, b;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        for (int i = 0; i < MANY; i++)
                ptrs[i] = gpu_take(2 * MIB);
        for (int i = 0; i < MANY; i += 2)
                gpu_give(ptrs[i], 2 * MIB);
        gpu_sync();
        gr_fence_close(context->fence);
        gr_fence_poll(context->fence);
        gr_trim(context, UINT64_MAX / 2);
        segment = context->segments->expandable[false];
        last = segment->holes;
        for (int i = 1; i < PASSED; i++)
                last = last->next;
        after = last->next;
        last->next = gr_check_wall();
        end = segment->end;
        GR_CHECK(end && !end->after && end->state == GR_RANGE_HOLE);
        gr_lock(&context->segments->lock);
        gr_extent_hole_leave(end);
        gr_extent_hole_enter(end); /* as the last of them */
        gr_unlock(&context->segments->lock);
        a = gpu_take(4 * MIB); /* none of the holes is as large */
        GR_CHECK_EQ(a, ptrs[MANY - 1] + 2 * MIB);
        b = gpu_take(2 * MIB);
        GR_CHECK(b < ptrs[MANY - 1]);
        last->next = after;
        gpu_give(a, 4 * MIB);
        gpu_give(b, 2 * MIB);

        /* Where nothing is left at the end, the one that fits may be the last. */
        gpu_give(ptrs[MANY - 1], 2 * MIB);
        gpu_give(ptrs[MANY - 3], 2 * MIB);
        gpu_sync();
        gr_fence_close(context->fence);
        gr_fence_poll(context->fence);
        gr_trim(context, UINT64_MAX / 2);
        GR_CHECK(segment->end && segment->end->block.ptr == ptrs[MANY - 5] + 2 * MIB);
        gr_lock(&context->segments->lock);
        end = segment->end;
        gr_extent_hole_leave(end);
        end->state = GR_RANGE_BUSY; /* as by a thread at work there */
        GR_CHECK(segment->end == NULL);
        gr_unlock(&context->segments->lock);
        gpu_give(ptrs[1], 2 * MIB);
        gpu_sync();
        gr_fence_close(context->fence);
        gr_fence_poll(context->fence);
        gr_trim(context, UINT64_MAX / 2); /* a hole of 6 MiB, behind all others */
        a = gpu_take(4 * MIB);
        GR_CHECK_EQ(a, ptrs[0]);
        gr_lock(&context->segments->lock);
        gr_extent_hole_enter(end);
        gr_unlock(&context->segments->lock);
        gpu_give(a, 4 * MIB);
        for (int i = 3; i < MANY - 3; i += 2)
                gpu_give(ptrs[i], 2 * MIB);
        gpu_settle();
        gpu_end();
}

int main(void)
{
        gpu_mapping = true;
        test_reserve_fails();
        test_reserve_at_once();
        test_few_extents();
        test_refused_not_live();
        for (int auto_too = 0; auto_too < 2; auto_too++) {
                enum gr_pool_kind pool = auto_too ? GR_POOL_AUTO : GR_POOL_SPLIT;

                test_mapped_in_vain(pool, false);
                test_mapped_in_vain(pool, true);
        }
        test_full_device();
        test_many_holes();
        test_extra(GR_POOL_AUTO, 1024 * MIB, true);
        test_extra(GR_POOL_AUTO, 62 * MIB, false);
        test_extra(GR_POOL_SPLIT, 1024 * MIB, true);
        test_extra_limits(8 * 406 * MIB, GR_UNLIMITED, GR_UNLIMITED, 24 * MIB, 1);
        test_extra_limits(8 * 406 * MIB - 1, GR_UNLIMITED, GR_UNLIMITED, 6 * MIB, 3);
        test_extra_limits(410 * MIB, GR_UNLIMITED, GR_UNLIMITED, 6 * MIB, 3);
        test_extra_limits(GR_UNLIMITED, 474 * MIB, GR_UNLIMITED, 24 * MIB, 1);
        test_extra_limits(GR_UNLIMITED, 474 * MIB - 1, GR_UNLIMITED, 12 * MIB, 1);
        test_extra_limits(GR_UNLIMITED, 462 * MIB - 1, GR_UNLIMITED, 6 * MIB, 1);
        test_extra_limits(GR_UNLIMITED, GR_UNLIMITED, 74 * MIB, 24 * MIB, 1);
        test_extra_limits(GR_UNLIMITED, GR_UNLIMITED, 74 * MIB - 1, 12 * MIB, 1);
        test_extra_limits(GR_UNLIMITED, GR_UNLIMITED, 62 * MIB - 1, 6 * MIB, 1);
        test_large_extents();
        test_large_beside_hole();
        test_extents(24 * MIB, false, 12);        /* of 2 MiB */
        test_extents(24 * MIB + KIB, false, 7);   /* of 4 MiB */
        test_extents(240 * MIB + KIB, false, 16); /* of 16 MiB */
        test_extents(24 * MIB + KIB, true, 3);    /* of 12 MiB */
        test_small_in_captured();
        test_captured_again();
        test_extra_refused();
        test_extra_halfway();
        for (int looks = 0; looks < 3; looks++)
                test_extra_late(looks);
        return GR_CHECK_RESULT();
}
