/*
 * Graph segments: what is counted while graphs use them, that nothing of them goes back or is unmapped meanwhile, and
 * that all of it does afterwards.
 */
#include "segment/graph_segments.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "alloc/graph_hold.h"
#include "check.h"
#include "core.h"
#include "reclaim/trim.h"
#include "segment/extent.h"
#include "segment/range.h"
#include "segment/split_trim.h"
#include "short_of_memory.h"
#include "split_gpu.h"

static struct gr_graph_hold *hold;

static void begin_with(enum gr_pool_kind pool, enum gr_reuse reuse)
{
        gpu_begin(pool, reuse);
        core.config.graph_arena = GR_GRAPH_SHARED;
        hold = gr_graph_hold_new(&core, context);
}

static void begin(void)
{
        begin_with(GR_POOL_AUTO, GR_REUSE_AUTO);
}

static void end(void)
{
        GR_CHECK_EQ(gpu_device()->graph_bytes, 0);
        gpu_settle();
        gpu_end();
}

static void last_graph_goes(void)
{
        gr_graph_hold_release(hold);
        gr_pool_collect(&core);
}

/* A block for the capture; 0: it has to come from elsewhere. */
static uint64_t take(size_t bytes)
{
        uint64_t ptr = 0;

        if (gr_pool_alloc_in_hold(hold, context, true, bytes, &ptr))
                sg_own(ptr, bytes);
        return ptr;
}

/* Frees blocks inside the capture, which ends then. other: 0 for none. */
static void give(uint64_t ptr, uint64_t other)
{
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        if (other)
                GR_CHECK_EQ(sg_free(&core, other), 0);
        gr_pool_end_capture(hold, true);
}

/* Instead of this one, so that the segments stay in graphs. */
static void next_graph(void)
{
        struct gr_graph_hold *next = gr_graph_hold_new(&core, context);

        gr_graph_hold_release(hold);
        hold = next;
        gr_pool_collect(&core);
}

static struct gr_segment *segment(bool small)
{
        return context->split->expandable[gr_expandable_graph_kind(small)];
}

/* All work is done, and the fence knows. */
static void settle(void)
{
        gr_fence_close(context->fence);
        gpu_sync();
        gr_fence_poll(context->fence);
}

static uint64_t trim(void)
{
        return gr_split_trim(context, UINT64_MAX);
}

/* Free memory of graphs is neither live nor cached, and stays, until the last graph has gone. */
static void test_accounts(void)
{
        struct gr_device *device;
        uint64_t large, small;

        begin();
        device = gpu_device();
        large = take(10 * MIB);
        small = take(10 * KIB);
        GR_CHECK(large && small && segment(false)->in_graphs && segment(true)->in_graphs);
        GR_CHECK_EQ(device->reserved_bytes, 12 * MIB);
        GR_CHECK_EQ(gr_budget_live_unfreed(device), 10 * MIB + 10 * KIB);
        GR_CHECK_EQ(device->graph_bytes, 2 * MIB - 10 * KIB);
        GR_CHECK_EQ(gr_budget_cached(device), 0);
        give(large, small);
        GR_CHECK_EQ(device->graph_bytes, 12 * MIB);
        GR_CHECK_EQ(gr_budget_live_unfreed(device), 0);
        GR_CHECK_EQ(gr_budget_cached(device), 0);
        gpu_sync();
        GR_CHECK_EQ(trim(), 0);
        GR_CHECK(gr_split_trim_has_none(context));
        GR_CHECK_EQ(sg_used_bytes(0), 12 * MIB);

        last_graph_goes();
        GR_CHECK(!segment(false)->in_graphs && !segment(true)->in_graphs);
        GR_CHECK_EQ(device->graph_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(device), 12 * MIB);
        GR_CHECK_EQ(gr_budget_returnable(device), 12 * MIB);

        settle();
        hold = gr_graph_hold_new(&core, context); /* a graph again, with what is still there */
        GR_CHECK_EQ(take(10 * MIB), large);
        GR_CHECK_EQ(gr_budget_cached(device), 0);
        GR_CHECK_EQ(device->graph_bytes, 2 * MIB);
        last_graph_goes(); /* and the block outlives it */
        GR_CHECK_EQ(device->graph_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(device), 2 * MIB);
        GR_CHECK_EQ(gr_budget_live_unfreed(device), 10 * MIB);
        GR_CHECK_EQ(sg_free(&core, large), 0);
        end();
}

/* Ordinary requests never get memory of graphs, and a capture none of theirs. */
static void test_apart(void)
{
        uint64_t ordinary, ours;

        begin();
        ours = take(10 * MIB);
        give(ours, 0);
        ordinary = gpu_take(10 * MIB);
        GR_CHECK(ordinary != ours && gr_budget_live_unfreed(gpu_device()) == 10 * MIB);
        gpu_give(ordinary, 10 * MIB);
        gpu_sync();
        GR_CHECK_EQ(take(10 * MIB), ours);
        GR_CHECK_EQ(sg_free(&core, ours), 0);
        last_graph_goes();
        end();
}

/* Graphs share memory within a context: those of another one neither have it nor keep it. */
static void test_other_context(void)
{
        struct gr_context *other;
        struct gr_graph_hold *its;
        uint64_t ptr;

        begin();
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK(!gr_pool_alloc_in_hold(hold, other, true, 4 * MIB, &ptr));
        its = gr_graph_hold_new(&core, other);
        GR_CHECK(gr_pool_alloc_in_hold(its, other, true, 4 * MIB, &ptr));
        sg_own(ptr, 4 * MIB);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 4 * MIB);
        gr_graph_hold_release(its);
        gr_pool_collect(&core);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 4 * MIB);
        sg_context_destroy(other->handle);
        gr_core_context_gone(other);
        last_graph_goes();
        end();
}

/*
 * Where a request fits no free range, and a third more is mapped than graphs used, free pages get a second address.
 * Makes that so for half of *ret_moved. The memory of *ret_kept lies between it and the old address, which is returned.
 */
static uint64_t take_moved(uint64_t *ret_kept, uint64_t *ret_moved)
{
        uint64_t first = take(60 * MIB), second;

        *ret_kept = take(20 * MIB);
        second = take(60 * MIB);
        give(first, second);
        *ret_moved = take(120 * MIB);
        GR_CHECK_EQ(*ret_moved, second); /* and the addresses behind it */
        return first;
}

/* The first address stays mapped while graphs are there. What earlier graphs have used does not count. */
static void test_second_address(void)
{
        uint64_t kept, moved, more;

        begin();
        give(take(400 * MIB), 0);
        last_graph_goes();
        settle();
        trim();
        hold = gr_graph_hold_new(&core, context);
        take_moved(&kept, &moved);
        more = take(4 * KIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 142 * MIB);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_moved_bytes), 60 * MIB);
        GR_CHECK(context->split->stale_graph_pages);
        gpu_sync();
        trim();
        GR_CHECK(context->split->stale_graph_pages);
        GR_CHECK_EQ(sg_free(&core, moved), 0);
        GR_CHECK_EQ(sg_free(&core, kept), 0);
        GR_CHECK_EQ(sg_free(&core, more), 0);
        last_graph_goes();
        settle();
        trim();
        GR_CHECK(!context->split->stale_pages && !context->split->stale_graph_pages);
        end();
}

/*
 * Before memory moves the segment grows by 16 MiB, or by a third of the most that was ever used at a time, as old
 * addresses are in the way of later requests. Where there is no more memory, what is free moves at once.
 */
static void test_grows_first(void)
{
        static const struct {
                uint64_t freed, kept, freed_too, wanted; /* MiB; those that are freed lie before and behind the other */
                uint64_t limit;                          /* 0: none */
                bool refused;
                uint64_t moved, reserved;
        } rows[] = {
                {.freed = 8, .kept = 8, .wanted = 12, .reserved = 28},
                {.freed = 18, .kept = 8, .wanted = 20, .moved = 18, .reserved = 28},
                {.freed = 100, .kept = 200, .freed_too = 60, .wanted = 110, .reserved = 410},
                {.freed = 30, .kept = 200, .freed_too = 60, .wanted = 110, .reserved = 340},
                {.freed = 200, .kept = 60, .freed_too = 60, .wanted = 204, .moved = 144, .reserved = 320},
                {.freed = 8, .kept = 8, .wanted = 12, .limit = 27, .moved = 8, .reserved = 20},
                {.freed = 8, .kept = 8, .wanted = 12, .refused = true, .moved = 8, .reserved = 20},
        };

        for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
                uint64_t freed, kept, freed_too = 0, wanted;

                begin();
                freed = take(rows[i].freed * MIB);
                kept = take(rows[i].kept * MIB);
                if (rows[i].freed_too)
                        freed_too = take(rows[i].freed_too * MIB);
                give(freed, freed_too);
                next_graph();
                give(take(2 * MIB), 0);
                next_graph();
                if (rows[i].limit)
                        gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, rows[i].limit * MIB);
                if (rows[i].refused)
                        sg_fail(SG_MEM_MAP, 1, 1, -ENOMEM);
                wanted = take(rows[i].wanted * MIB);
                GR_CHECK_EQ(gpu_device()->reserved_bytes, rows[i].reserved * MIB);
                GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_moved_bytes), rows[i].moved * MIB);
                give(kept, wanted);
                last_graph_goes();
                end();
        }
}

/* What graphs keep elsewhere on the device, or another context's do, is none of that. */
static void test_grows_beside_others(void)
{
        uint64_t other, first, kept, wanted;
        struct gr_graph_hold *its;

        begin();
        its = gr_graph_hold_new(&core, NULL);
        other = gpu_take(100 * MIB);
        gr_pool_hold(its, other);
        gpu_give(other, 100 * MIB);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 100 * MIB);
        first = take(8 * MIB);
        kept = take(8 * MIB);
        give(first, 0);
        next_graph();
        wanted = take(12 * MIB);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_moved_bytes), 0);
        give(kept, wanted);
        gr_graph_hold_release(its);
        last_graph_goes();
        end();
}

/*
 * For a request that lacks less, a seventh more is mapped at once than graphs use: not where a limit is near, where the
 * driver refuses it, or where what is cached can move there.
 */
static void test_maps_ahead(void)
{
        static const struct {
                uint64_t limit, cached; /* MiB; 0: none */
                bool refused;
                uint64_t moved, reserved;
        } rows[] = {
                {.reserved = 160},
                {.limit = 179, .reserved = 160},
                {.limit = 177, .reserved = 142},
                {.refused = true, .reserved = 142},
                {.cached = 12, .moved = 2, .reserved = 152},
        };

        for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
                uint64_t ptr;

                begin();
                give(take(140 * MIB), 0);
                next_graph();
                if (rows[i].cached)
                        gpu_give(gpu_take(rows[i].cached * MIB), rows[i].cached * MIB);
                settle();
                atomic_store(&context->split->extra_refused, false);
                if (rows[i].limit)
                        gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, rows[i].limit * MIB);
                if (rows[i].refused)
                        sg_fail(SG_MEM_MAP, 1, 1, -ENOMEM);
                ptr = take(141 * MIB);
                GR_CHECK(ptr != 0);
                GR_CHECK_EQ(gpu_device()->reserved_bytes, rows[i].reserved * MIB);
                GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_moved_bytes), rows[i].moved * MIB);
                GR_CHECK_EQ(sg_used_bytes(0), rows[i].reserved * MIB);
                give(ptr, 0);
                next_graph();
                if (rows[i].reserved == 160) {
                        sg_fail(SG_MEM_MAP, 1, 100, -ENOMEM);
                        give(take(160 * MIB), 0);
                        sg_fail(SG_MEM_MAP, 0, 0, 0);
                        next_graph();
                }
                last_graph_goes();
                end();
        }
}

/* There are addresses for many moves, as old ones stay. What moves is not in one extent for each request. */
static void test_many_moves(void)
{
        uint64_t kept[140];
        unsigned count = 0;

        begin();
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        for (; count < 140; count++) {
                uint64_t bytes = (120 + 4 * count) * MIB, first = take(bytes), second;

                kept[count] = take(12 * MIB);
                second = take(bytes);
                if (!first || !kept[count] || !second)
                        break;
                GR_CHECK_EQ(sg_free(&core, first), 0);
                GR_CHECK_EQ(sg_free(&core, second), 0);
                give(take(2 * bytes), 0);
                next_graph();
        }
        GR_CHECK_EQ(count, 140);
        GR_CHECK(gpu_device()->reserved_bytes < 4000 * MIB);
        GR_CHECK(sg_counter(&core, GR_COUNTER_moved_bytes) > 16 * GIB); /* four times the card */
        while (count > 0)
                GR_CHECK_EQ(sg_free(&core, kept[--count]), 0);
        gr_gate_end(&core.gate);
        last_graph_goes();
        end();
}

/* Where so many addresses cannot be reserved, fewer serve. */
static void test_fewer_addresses(unsigned refused)
{
        uint64_t ptr;

        begin();
        sg_fail(SG_MEM_RESERVE, 1, refused, -ENOMEM);
        ptr = take(4 * MIB);
        GR_CHECK_EQ(ptr != 0, refused < 3);
        if (ptr) {
                GR_CHECK_EQ(segment(false)->bytes, (UINT64_C(16) >> refused) * GPU_PAGES * 2 * MIB);
                GR_CHECK_EQ(sg_free(&core, ptr), 0);
        }
        last_graph_goes();
        end();
}

/* Where there is no more memory, all that is free moves, however many moves that takes. */
static void test_moves_all(void)
{
        uint64_t pages[400], large;

        begin();
        for (int i = 0; i < 400; i++)
                pages[i] = take(2 * MIB);
        for (int i = 0; i < 400; i += 2)
                GR_CHECK_EQ(sg_free(&core, pages[i]), 0);
        gr_pool_end_capture(hold, true);
        next_graph();
        gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, 800 * MIB);
        large = take(400 * MIB);
        GR_CHECK(large != 0);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_moved_bytes), 400 * MIB);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 0);
        for (int i = 1; i < 400; i += 2)
                GR_CHECK_EQ(sg_free(&core, pages[i]), 0);
        give(large, 0);
        last_graph_goes();
        end();
}

/* Under a small limit extents are small, so that a block that stays keeps little from a large request. */
static void test_extents_under_limit(void)
{
        static const uint64_t limits[] = {256 * MIB, 2048 * MIB, 3072 * MIB}, extents[] = {2 * MIB, 4 * MIB, 6 * MIB};

        for (int i = 0; i < 3; i++) {
                uint64_t ptr;

                begin();
                atomic_store(&gpu_device()->total_bytes, 4 * GIB);
                gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, limits[i]);
                ptr = take(limits[i] / 2);
                GR_CHECK_EQ(gr_extent_bytes(gr_extent_at(segment(false), ptr)), extents[i]);
                give(ptr, 0);
                last_graph_goes();
                end();
        }
}

/*
 * Extents that are larger than what is left to fill move elsewhere, to where there is room for them; not where as much
 * is cached.
 */
static void test_moves_large_extents(bool is_cached)
{
        uint64_t first, kept, second, large, cached[512], moved = is_cached ? 6 * MIB : 24 * MIB + 6 * MIB;

        begin();
        for (int i = 0; i < 512 && is_cached; i++)
                cached[i] = gpu_take(60 * KIB); /* in bins, so that it cannot move */
        for (int i = 0; i < 512 && is_cached; i++)
                gpu_give(cached[i], 60 * KIB);
        settle();
        first = take(12 * MIB); /* two extents of 6 MiB each, like the second */
        kept = take(2 * MIB);
        second = take(12 * MIB);
        give(first, second);
        next_graph();
        gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, gpu_device()->reserved_bytes);
        large = take(20 * MIB);
        GR_CHECK(large != 0);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_moved_bytes), moved);
        if (is_cached) {
                give(large, kept);
                last_graph_goes();
                end();
                return;
        }
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 26 * MIB);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 4 * MIB);
        GR_CHECK_EQ(sg_used_bytes(0), 26 * MIB);
        first = take(4 * MIB); /* what has moved beyond what was asked for */
        GR_CHECK(first != 0);
        GR_CHECK_EQ(sg_free(&core, first), 0);
        GR_CHECK_EQ(sg_free(&core, large), 0);
        gr_pool_end_capture(hold, true);
        next_graph();
        GR_CHECK_EQ(take(26 * MIB), 0); /* more than is free */
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_moved_bytes), moved);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 24 * MIB);
        give(kept, 0);
        last_graph_goes();
        settle();
        trim();
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
        end();
}

/* What others had moves to a place that cannot be mapped, and goes back with it: as much more is to move then. */
static void test_moved_goes_back(void)
{
        uint64_t freed[2], kept[2], wanted;
        struct gr_block *block;

        begin();
        for (int i = 0; i < 2; i++) {
                freed[i] = take(20 * MIB);
                kept[i] = take(100 * MIB);
        }
        give(freed[0], freed[1]);
        next_graph();
        sg_fail(SG_MEM_MAP, 2, 1, -ENOMEM); /* leaves a page that was never used */
        sg_fail(SG_MEM_UNMAP, 1, 1, -EIO);
        GR_CHECK_EQ(gr_split_grow(context, 12 * MIB, &block), -ENOMEM);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 2 * MIB);
        sg_fail(SG_MEM_MAP, 2, 1, -ENOMEM);
        wanted = take(30 * MIB);
        GR_CHECK(wanted != 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 240 * MIB);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_moved_bytes), 32 * MIB);
        GR_CHECK_EQ(sg_free(&core, wanted), 0);
        give(kept[0], kept[1]);
        last_graph_goes();
        end();
}

/* A place of which only a part can be mapped: what is new goes back, what graphs use stays. */
static void test_fails_half_way(void)
{
        uint64_t first;

        begin();
        first = take(4 * MIB);
        give(first, 0);
        sg_fail(SG_MEM_MAP, 3, 100, -ENOMEM);
        GR_CHECK_EQ(take(200 * MIB), 0);
        sg_fail(SG_MEM_MAP, 0, 0, 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 4 * MIB);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 4 * MIB);
        GR_CHECK_EQ(sg_used_bytes(0), 4 * MIB);
        GR_CHECK_EQ(take(4 * MIB), first);
        GR_CHECK_EQ(sg_free(&core, first), 0);
        last_graph_goes();
        end();
}

static enum gr_range_state state_at(uint64_t ptr)
{
        enum gr_range_state state;

        gr_lock(&context->split->lock);
        state = gr_range_at(segment(false), ptr)->state;
        gr_unlock(&context->split->lock);
        return state;
}

/* Freed after its capture, a block waits for the fence as any other; freed inside, it need not. */
static void test_fence(void)
{
        uint64_t inside, after;

        begin();
        inside = take(6 * MIB);
        after = take(4 * MIB);
        sg_work(context->handle, 0, inside, 1000);
        sg_work(context->handle, 0, after, 1000);
        give(inside, 0);
        GR_CHECK_EQ(sg_free(&core, after), 0);
        GR_CHECK_EQ(state_at(after), GR_RANGE_WAITING);
        GR_CHECK_EQ(state_at(inside), GR_RANGE_FREE);
        next_graph();
        GR_CHECK(segment(false)->in_graphs);
        gpu_sync();
        gr_fence_close(context->fence);
        gpu_sync();
        GR_CHECK_EQ(take(10 * MIB), inside);
        GR_CHECK_EQ(sg_free(&core, inside), 0);
        last_graph_goes();
        end();
}

/* One that must not be reused goes back when the last graph has gone, and not before. */
static void test_exported(void)
{
        uint64_t ptr;

        begin();
        ptr = take(4 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, ptr), 0);
        gr_pool_end_capture(hold, true);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        gpu_sync();
        gr_split_trim_collect(context);
        GR_CHECK_EQ(sg_used_bytes(0), 4 * MIB);
        last_graph_goes();
        gr_split_trim_collect(context);
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        end();
}

/* A context that ends takes all of it along, used or free. */
static void test_context_ends(void)
{
        uint64_t ptr;

        begin();
        ptr = take(4 * MIB);
        GR_CHECK(ptr && take(6 * MIB) && take(5 * KIB));
        give(ptr, 0);
        gpu_forget();
        gr_core_context_gone(context);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 0);
        GR_CHECK_EQ(context->split->graph_used_bytes, 0); /* another context may get the structure */
        GR_CHECK_EQ(context->split->graph_peak_bytes, 0);
        gr_graph_hold_release(hold);
        gr_pool_collect(&core);
        gpu_end();
}

/* Work behind the last launch may use what graphs have left, also what the program has freed: it is behind a fence. */
static void test_work_behind_graphs(bool freed_after)
{
        uint64_t ptr;

        begin();
        gpu_give(gpu_take(10 * MIB), 10 * MIB);
        settle();
        ptr = take(6 * MIB);
        if (freed_after) {
                gr_pool_end_capture(hold, true);
                GR_CHECK_EQ(sg_free(&core, ptr), 0);
                settle();
        } else {
                give(ptr, 0);
        }
        sg_work(context->handle, 0, 0, 1000000);
        last_graph_goes();
        gr_fence_poll(context->fence);
        trim();
        GR_CHECK_EQ(gr_budget_returnable(gpu_device()), 6 * MIB);
        settle();
        GR_CHECK_EQ(trim(), 6 * MIB);
        end();
}

/* Old addresses that cannot be unmapped are lost, and nobody waits for them. */
static void test_lost_addresses(void)
{
        uint64_t first, kept, second;

        begin();
        first = take_moved(&kept, &second);
        GR_CHECK_EQ(sg_free(&core, second), 0);
        GR_CHECK_EQ(sg_free(&core, kept), 0);
        last_graph_goes();
        settle();
        sg_fail(SG_MEM_UNMAP, 1, 1, -EIO);
        trim();
        GR_CHECK_EQ(state_at(first), GR_RANGE_LOST);
        hold = gr_graph_hold_new(&core, context);
        second = take(60 * MIB);
        GR_CHECK(second != 0);
        GR_CHECK_EQ(sg_free(&core, second), 0);
        last_graph_goes();
        settle();
        end();
}

static void no_memory(void)
{
        sg_before[SG_MEM_MAP] = NULL;
        memory_runs_out(sizeof(struct gr_range));
}

/* So is a place that cannot be mapped whole, where there is no structure for the part without memory. */
static void test_lost_place(void)
{
        uint64_t first;

        begin();
        first = take(4 * MIB);
        give(first, 0);
        next_graph();
        sg_before[SG_MEM_MAP] = no_memory;
        gpu_refuse(SG_MEM_MAP, true);
        GR_CHECK_EQ(take(8 * MIB), 0);
        gpu_refuse(SG_MEM_MAP, false);
        memory_is_back();
        GR_CHECK_EQ(state_at(first), GR_RANGE_LOST);
        last_graph_goes();
        gpu_end();
}

/* Memory that was cached for others serves graphs, before fresh memory does. */
static void test_from_others(void)
{
        struct gr_device *device;
        uint64_t ordinary, ours;

        begin();
        device = gpu_device();
        ordinary = gpu_take(8 * MIB);
        gpu_give(ordinary, 8 * MIB);
        gpu_sync();
        gr_split_trim_merge_fastbins(context);
        settle();
        ours = take(8 * MIB);
        GR_CHECK_EQ(device->reserved_bytes, 8 * MIB);
        GR_CHECK_EQ(gr_budget_cached(device), 0);
        GR_CHECK_EQ(device->graph_bytes, 0);
        GR_CHECK_EQ(gr_budget_live_unfreed(device), 8 * MIB);
        GR_CHECK_EQ(context->split->surplus_bytes, 0);
        GR_CHECK_EQ(sg_free(&core, ours), 0);
        last_graph_goes();
        end();
}

/* What a capture had from elsewhere stays with its graph alone. */
static void test_from_elsewhere(void)
{
        uint64_t ours, ordinary;

        begin();
        ordinary = gpu_take(4 * MIB);
        gr_pool_hold(hold, ordinary);
        ours = take(6 * MIB);
        gpu_give(ordinary, 4 * MIB);
        give(ours, 0);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 10 * MIB);
        GR_CHECK_EQ(take(8 * MIB), ours);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 4 * MIB);
        GR_CHECK_EQ(sg_free(&core, ours), 0);
        last_graph_goes();
        end();
}

/* What waits for the fence keeps its turn, so that nothing waits longer than it has to. */
static void test_turns(void)
{
        uint64_t ordinary, ours;

        begin_with(GR_POOL_SPLIT, GR_REUSE_POLL);
        ordinary = gpu_take(4 * MIB);
        ours = take(6 * MIB);
        gr_pool_end_capture(hold, true);
        sg_work(context->handle, 0, ours, 1000);
        GR_CHECK_EQ(sg_free(&core, ours), 0);
        gpu_give(ordinary, 4 * MIB);
        gr_fence_close(context->fence);
        last_graph_goes(); /* ours waits for a later epoch now */
        gpu_sync();
        gr_fence_poll(context->fence);
        sg_work(context->handle, 0, 0, 1000000);
        GR_CHECK_EQ(gpu_take(4 * MIB), ordinary);
        gr_fence_close(context->fence);
        gpu_give(ordinary, 4 * MIB);
        gpu_sync();
        hold = gr_graph_hold_new(&core, context);
        GR_CHECK_EQ(take(6 * MIB), ours);
        GR_CHECK_EQ(sg_free(&core, ours), 0);
        last_graph_goes();
        end();
}

static _Atomic bool done;

static void *trim_aside(void *arg)
{
        trim();
        return arg;
}

static void *take_aside(void *bytes)
{
        *(uint64_t *)bytes = take(*(uint64_t *)bytes);
        done = true;
        return NULL;
}

static void *collect_aside(void *arg)
{
        gr_pool_collect(&core);
        done = true;
        return arg;
}

/* Does the deed beside a thread that unmaps memory: it has to wait. renewed: meanwhile there is a graph again. */
static void beside_trim(void *(*deed)(void *), void *arg, bool renewed)
{
        pthread_t trimming, waiting;

        sem_init(&gpu_inside, 0, 0);
        sem_init(&gpu_go_on, 0, 0);
        sg_before[SG_MEM_UNMAP] = gpu_stop;
        done = false;
        pthread_create(&trimming, NULL, trim_aside, NULL);
        sem_wait(&gpu_inside);
        pthread_create(&waiting, NULL, deed, arg);
        usleep(20000);
        GR_CHECK(!done);
        if (renewed)
                hold = gr_graph_hold_new(&core, context);
        sem_post(&gpu_go_on);
        pthread_join(trimming, NULL);
        pthread_join(waiting, NULL);
        GR_CHECK(done);
        sem_destroy(&gpu_inside);
        sem_destroy(&gpu_go_on);
}

/* A graph begins while a thread gives free memory back. other_bytes: 0 for no other memory of graphs. */
static void test_begins_beside_trim(uint64_t bytes, uint64_t other_bytes)
{
        uint64_t ptr = bytes;

        begin();
        give(take(bytes), other_bytes ? take(other_bytes) : 0);
        last_graph_goes();
        settle();
        hold = gr_graph_hold_new(&core, context);
        beside_trim(take_aside, &ptr, false);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        last_graph_goes();
        end();
}

/* The last graph goes while a thread unmaps old addresses, of graphs that were there before. */
static void test_ends_beside_trim(bool renewed)
{
        uint64_t kept, second;

        begin();
        take_moved(&kept, &second);
        GR_CHECK_EQ(sg_free(&core, second), 0);
        last_graph_goes();
        hold = gr_graph_hold_new(&core, context);
        second = take(2 * MIB);
        settle();
        gr_graph_hold_release(hold);
        beside_trim(collect_aside, NULL, renewed);
        GR_CHECK_EQ(segment(false)->in_graphs, renewed);
        GR_CHECK_EQ(sg_free(&core, second), 0);
        GR_CHECK_EQ(sg_free(&core, kept), 0);
        if (renewed)
                last_graph_goes();
        end();
}

/* Of the program's, as if allocated in the capture of this hold. */
static uint64_t held(struct gr_graph_hold *its, size_t bytes)
{
        uint64_t ptr = gpu_take(bytes);

        gr_pool_hold(its, ptr);
        return ptr;
}

static void must_free(uint64_t ptr)
{
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
}

static void begin_private(void)
{
        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        hold = gr_graph_hold_new(&core, NULL);
}

/* A graph with memory of its own: requests get parts of a parked range, and parts that are parked side by side join. */
static void test_parts(void)
{
        uint64_t p;

        begin_private();
        p = held(hold, 16 * MIB);
        must_free(p);
        GR_CHECK(!take(17 * MIB));
        GR_CHECK(!take(MIB / 2)); /* a small one would leave a large range in pieces */
        GR_CHECK_EQ(take(12 * MIB), p);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 4 * MIB);
        GR_CHECK_EQ(take(3 * MIB), p + 12 * MIB);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 1 * MIB);
        GR_CHECK(!take(2 * MIB));
        must_free(p + 12 * MIB);
        GR_CHECK(!take(16 * MIB)); /* the part before is in use */
        must_free(p);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 16 * MIB);
        for (uint64_t at = 0; at < 12 * MIB; at += 4 * MIB)
                GR_CHECK_EQ(take(4 * MIB), p + at);
        must_free(p);
        must_free(p + 8 * MIB);
        GR_CHECK_EQ(take(3 * MIB), p); /* the smallest that serves */
        must_free(p);
        must_free(p + 4 * MIB); /* between two */
        GR_CHECK_EQ(take(8 * MIB), p);
        GR_CHECK_EQ(take(8 * MIB), p + 8 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, p + 8 * MIB), 0);
        must_free(p + 8 * MIB);
        must_free(p);
        GR_CHECK(!take(9 * MIB)); /* the second is known outside */
        last_graph_goes();
        end();
}

/* Small ones also where they have joined to one above 1 MiB: else each round of a capture would take fresh memory. */
static void test_small_parts(void)
{
        uint64_t p[3];

        begin_private();
        for (int i = 0; i < 3; i++)
                p[i] = held(hold, MIB / 2);
        for (int i = 0; i < 3; i++)
                must_free(p[i]);
        for (int i = 0; i < 3; i++)
                GR_CHECK_EQ(take(MIB / 2), p[i]);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 0);
        for (int i = 0; i < 3; i++)
                must_free(p[i]);
        GR_CHECK_EQ(take(3 * MIB / 2), p[0]);
        must_free(p[0]);
        last_graph_goes();
        end();
}

/* They join neither with what is live nor with what another graph has. */
static void test_neighbours(void)
{
        struct gr_graph_hold *second;
        uint64_t p, live, s;

        begin_private();
        second = gr_graph_hold_new(&core, NULL);
        must_free(gpu_take(40 * MIB)); /* what follows is cut out of this */
        settle();
        p = held(hold, 8 * MIB);
        s = held(second, 4 * MIB);
        live = gpu_take(2 * MIB);
        GR_CHECK(s == p + 8 * MIB && live == s + 4 * MIB);
        must_free(s);
        must_free(p);
        GR_CHECK(!take(9 * MIB));
        must_free(live);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 12 * MIB);
        gr_graph_hold_release(second);
        last_graph_goes();
        settle();
        GR_CHECK_EQ(gpu_take(14 * MIB), p); /* one range again */
        must_free(p);
        end();
}

/* The context ends, while one part is parked and the other is not. */
static void test_parts_of_context(void)
{
        uint64_t p;

        begin_private();
        p = held(hold, 16 * MIB);
        must_free(p);
        GR_CHECK_EQ(take(12 * MIB), p);
        gpu_sync();
        gpu_forget();
        gr_core_context_gone(context);
        GR_CHECK(!take(4 * MIB));
        GR_CHECK_EQ(gpu_device()->graph_bytes, 0);
        last_graph_goes();
        gpu_end();
}

static atomic_bool over;

static void *take_and_free(void *seed_at)
{
        uint64_t parts[4] = {0}, *seed = seed_at;

        while (!over) {
                uint64_t *part = &parts[gpu_random(seed) % 4];

                if (*part) {
                        gr_pool_free(&core, *part);
                        *part = 0;
                } else if (!gr_pool_alloc_in_hold(hold, context, true, (1 + gpu_random(seed) % 5) * MIB, part)) {
                        *part = 0;
                }
        }
        return NULL;
}

/* The context ends while threads cut and join parts of it. AddressSanitizer sees what is touched after that. */
static void test_parts_beside_end(void)
{
        for (unsigned round = 0; round < 100; round++) {
                uint64_t seeds[] = {2 * round + 1, 2 * round + 2};
                pthread_t threads[2];

                begin_private();
                for (int i = 0; i < 3; i++)
                        must_free(held(hold, 16 * MIB));
                over = false;
                for (int i = 0; i < 2; i++)
                        pthread_create(&threads[i], NULL, take_and_free, &seeds[i]);
                usleep(round % 40 * 10);
                gpu_sync();
                gpu_forget();
                gr_core_context_gone(context);
                over = true;
                for (int i = 0; i < 2; i++)
                        pthread_join(threads[i], NULL);
                last_graph_goes();
                gpu_end();
        }
}

int main(void)
{
        test_parts();
        test_small_parts();
        test_parts_of_context();
        gpu_mapping = true;
        test_parts();
        test_small_parts();
        test_parts_of_context();
        test_parts_beside_end();
        test_neighbours();
        test_accounts();
        test_apart();
        test_other_context();
        test_second_address();
        test_grows_first();
        test_grows_beside_others();
        test_maps_ahead();
        test_many_moves();
        test_fewer_addresses(0);
        test_fewer_addresses(2);
        test_fewer_addresses(3);
        test_moves_all();
        test_extents_under_limit();
        test_moves_large_extents(false);
        test_moves_large_extents(true);
        test_moved_goes_back();
        test_fails_half_way();
        test_fence();
        test_exported();
        test_context_ends();
        test_work_behind_graphs(false);
        test_work_behind_graphs(true);
        test_lost_addresses();
        test_lost_place();
        test_from_others();
        test_from_elsewhere();
        test_turns();
        test_begins_beside_trim(6 * MIB, 0);
        test_begins_beside_trim(10 * KIB, 0);
        test_begins_beside_trim(10 * KIB, 6 * MIB);
        test_ends_beside_trim(false);
        test_ends_beside_trim(true);
        return GR_CHECK_RESULT();
}
