/* Where the memory of graphs grows: what is mapped, what moves there, and what becomes of that where it fails. */
#include <errno.h>

#include "graph_gpu.h"
#include "segment/extent.h"

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
                GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_remapped_bytes), rows[i].moved * MIB);
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
        gr_graph_hold_add(its, other);
        gpu_give(other, 100 * MIB);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 100 * MIB);
        first = take(8 * MIB);
        kept = take(8 * MIB);
        give(first, 0);
        next_graph();
        wanted = take(12 * MIB);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_remapped_bytes), 0);
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
                atomic_store(&context->segments->extra_from_ns, 0);
                if (rows[i].limit)
                        gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, rows[i].limit * MIB);
                if (rows[i].refused)
                        sg_fail(SG_MEM_MAP, 1, 1, -ENOMEM);
                ptr = take(141 * MIB);
                GR_CHECK(ptr != 0);
                GR_CHECK_EQ(gpu_device()->reserved_bytes, rows[i].reserved * MIB);
                GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_remapped_bytes), rows[i].moved * MIB);
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
        GR_CHECK(sg_counter(&core, GR_COUNTER_remapped_bytes) > 16 * GIB); /* four times the card */
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
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_remapped_bytes), 400 * MIB);
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
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_remapped_bytes), moved);
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
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_remapped_bytes), moved);
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
                kept[i] = take(60 * MIB);
        }
        give(freed[0], freed[1]);
        next_graph();
        sg_fail(SG_MEM_MAP, 2, 1, -ENOMEM); /* leaves a page that was never used */
        sg_fail(SG_MEM_UNMAP, 1, 1, -EIO);
        GR_CHECK_EQ(gr_segments_grow(context, 12 * MIB, &block), -ENOMEM);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 2 * MIB);
        sg_fail(SG_MEM_MAP, 2, 1, -ENOMEM);
        wanted = take(30 * MIB);
        GR_CHECK(wanted != 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 160 * MIB);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_remapped_bytes), 32 * MIB);
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

int main(void)
{
        gpu_mapping = true;
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
        return GR_CHECK_RESULT();
}
