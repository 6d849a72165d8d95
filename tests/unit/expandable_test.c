/*
 * Expandable segments, which split has where memory can be mapped, on a scripted GPU that is only a clock and notices
 * memory that is handed out, given back or unmapped too early.
 */
#include "segment/split.h"

#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <utlist.h>

#include "alloc/pool.h"
#include "base/log.h"
#include "base/metadata.h"
#include "check.h"
#include "core.h"
#include "reclaim/trim.h"
#include "segment/expandable.h"
#include "segment/expandable_grow.h"
#include "segment/extent.h"
#include "segment/range.h"
#include "segment/remap.h"
#include "segment/slack.h"
#include "short_of_memory.h"
#include "split_gpu.h"

static unsigned told; /* lines of the log, from INFO on */

static void count_line(const char *line, size_t line_bytes, void *arg)
{
        (void)line, (void)line_bytes, (void)arg;
        told++;
}

/* Where the driver has no addresses to map memory behind, or does not say for how much, it is told once, and segments
 * serve instead. */
static void test_no_expandable(bool known)
{
        uint64_t a, small;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        gpu_refuse(SG_MEM_RESERVE, known);
        gpu_refuse(SG_MEM_INFO, !known);
        told = 0;
        a = gpu_take(5 * MIB);
        small = gpu_take(100 * KIB);
        gpu_refuse(SG_MEM_INFO, false);
        GR_CHECK_EQ(sg_reserved(), 0);
        GR_CHECK(a && a < SG_VBASE && small && small < SG_VBASE);
        GR_CHECK(!context->split->expandable[0] && !context->split->expandable[1]);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 8 * MIB);
        GR_CHECK_EQ(told, 1);
        gpu_give(a, 5 * MIB);
        gpu_give(small, 100 * KIB);
        gpu_settle();
        gpu_end();
}

#ifdef __SANITIZE_THREAD__ /* which ends the program where the system has no memory left */
#define MEMORY_ENDS_PROGRAM true
#else
#define MEMORY_ENDS_PROGRAM false
#endif

/*
 * Without memory for what is noted of a segment, as far as left pieces of it go, a request is refused, or is served in
 * another way.
 */
static void test_no_memory(bool mapping)
{
        enum { PIECES = 8 };

        for (int left = 0; left < PIECES; left++) {
                int status = -1;
                pid_t pid;

                gpu_mapping = mapping;
                gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
                pid = fork();
                if (pid == 0) {
                        struct rlimit most = {0};
                        void *pieces[PIECES], *gpus[2 * PIECES]; /* every other one is for the scripted GPU */
                        uint64_t ptr;

                        for (int i = 0; i < PIECES; i++)
                                pieces[i] = gr_metadata_alloc(sizeof(struct gr_segment));
                        for (int i = 0; i < 2 * PIECES; i++)
                                gpus[i] = malloc(768);
                        setrlimit(RLIMIT_AS, &most);
                        for (size_t bytes = 1 << 16; bytes >= 16; bytes /= 2)
                                while (gr_metadata_alloc(bytes) || malloc(bytes))
                                        ;
                        for (int i = 0; i < left; i++)
                                gr_metadata_free(pieces[i], sizeof(struct gr_segment));
                        for (int i = 0; i < 2 * PIECES; i += 2)
                                free(gpus[i]);
                        _exit(sg_alloc(context, 5 * MIB, &ptr) == 0 ? 0 : 1);
                }
                GR_CHECK_EQ(waitpid(pid, &status, 0), pid);
                GR_CHECK(WIFEXITED(status));
                gpu_end();
        }
        gpu_mapping = true;
}

/* What a gap lacks is mapped, and only that; memory that nobody needs goes elsewhere before there is more, or back
 * where the driver is known to map none twice. */
static void test_expandable(bool moves)
{
        uint64_t a, b, c, d;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        atomic_store(&context->split->moves_refused, !moves);
        a = gpu_take(40 * MIB);
        b = gpu_take(10 * MIB);
        GR_CHECK(a >= SG_VBASE);
        GR_CHECK_EQ(b, a + 40 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 50 * MIB);
        gpu_give(a, 40 * MIB);
        gpu_sync();
        c = gpu_take(48 * MIB); /* too large for the gap */
        GR_CHECK(c > b);
        GR_CHECK(gpu_device()->peak_reserved_bytes <= 76 * MIB);
        GR_CHECK(gpu_device()->reserved_bytes <= 76 * MIB);
        gpu_give(b, 10 * MIB);
        gpu_sync();
        gr_fence_close(context->fence);
        gr_fence_poll(context->fence);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 0);
        /* In the middle of what is free a part stays mapped, and the place is used with the rest mapped again. */
        d = gpu_take(50 * MIB);
        GR_CHECK_EQ(d, a);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 98 * MIB);
        gpu_give(c, 48 * MIB);
        gpu_give(d, 50 * MIB);
        GR_CHECK(moves || sg_calls(SG_MEM_REMAP) == 0);
        GR_CHECK_EQ(context->split->moves_refused, !moves);
        gpu_settle();
        gpu_end();
}

/* How much memory may be held beside what is live before some is moved; more of it where moves took too much time. */
static void test_bound(int64_t credit_ns, uint64_t least_bytes, uint64_t most_bytes)
{
        uint64_t a, b, c;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(40 * MIB);
        b = gpu_take(400 * MIB);
        gpu_give(a, 40 * MIB);
        context->split->credit_ns = credit_ns;
        context->split->credit_at_ns = sg_now_ns();
        c = gpu_take(60 * MIB); /* of 460 live */
        GR_CHECK(gpu_device()->reserved_bytes >= least_bytes);
        GR_CHECK(gpu_device()->reserved_bytes <= most_bytes);
        gpu_give(b, 400 * MIB);
        gpu_give(c, 60 * MIB);
        gpu_settle();
        gpu_end();
}

/* The time that may be spent on better fits is earned by waiting, up to a bound: nobody saves up for a long wait. */
static void test_credit(void)
{
        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        context->split->credit_at_ns = sg_now_ns();
        context->split->credit_ns = -5 * (int64_t)SG_MS;
        sg_advance(32 * 7 * SG_MS);
        gr_lock(&context->split->lock);
        gr_slack_worth_opening(context, MIB);
        GR_CHECK(context->split->credit_ns >= 2 * (int64_t)SG_MS);
        GR_CHECK(context->split->credit_ns < 3 * (int64_t)SG_MS);
        sg_advance(3600000 * SG_MS);
        GR_CHECK_EQ(gr_slack_worth_opening(context, 32 * MIB), 36 * MIB);
        GR_CHECK_EQ(context->split->credit_ns, 20 * SG_MS);
        gr_unlock(&context->split->lock);
        gpu_end();
}

/* A free passes the bins' recent blocks by where split most likely has the block; a block of theirs there is freed all
 * the same. */
static void test_hint(void)
{
        uint64_t a, b;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        a = gpu_take(4 * MIB);
        b = gpu_take(32 * KIB);
        GR_CHECK(gr_pool_kind_in_expandable(&core, a) && gr_pool_kind_in_expandable(&core, b) &&
                 !gr_pool_kind_in_expandable(&core, SG_BASE));
        gpu_give(a, 4 * MIB);
        gpu_give(b, 32 * KIB);
        gpu_settle();
        gpu_end();

        gpu_begin(GR_POOL_BINS, GR_REUSE_BARRIER);
        a = gpu_take(4 * MIB);
        GR_CHECK(!gr_pool_kind_in_expandable(&core, a));
        gpu_give(a, 4 * MIB);
        GR_CHECK_EQ(gpu_take(4 * MIB), a);
        core.expandable_ptrs[0] = core.expandable_ptrs[1] = a;
        core.expandable_pages = 2;
        gpu_give(a, 4 * MIB);
        GR_CHECK_EQ(gr_pool_free(&core, a), -EALREADY);
        GR_CHECK_EQ(gpu_take(4 * MIB), a);
        core.expandable_pages = 0;
        gpu_give(a, 4 * MIB);
        gpu_settle();
        gpu_end();
}

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
        atomic_store(&context->split_active, true);
        if (limited)
                atomic_store(&gpu_device()->hard_bytes, all);
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
        GR_CHECK(core.counters.counts[GR_COUNTER_released_bytes] - before <= missing + in_vain + 600 * MIB);
        gpu_capture(false);
        gpu_give(large, large_bytes);
        for (int i = 0; i < BLOCKS; i++)
                gpu_give(beside[i], 4 * MIB);
        gpu_settle();
        gpu_end();
}

/* What lives at the front of the segment while memory may be mapped ahead. */
static uint64_t begin_ahead(enum gr_pool_kind pool, uint64_t live_bytes)
{
        uint64_t ptr;

        gpu_begin(pool, GR_REUSE_AUTO);
        ptr = gpu_take(live_bytes);
        atomic_store(&context->split->ahead_refused, false);
        return ptr;
}

/* One call maps what the next requests need, too: a 32nd of what there is. */
static void test_ahead(enum gr_pool_kind pool, uint64_t live_bytes, bool ahead)
{
        uint64_t rest = begin_ahead(pool, live_bytes), a, b, small;
        const _Atomic uint64_t *allocs = &core.counters.counts[GR_COUNTER_driver_allocs];
        uint64_t before = *allocs;

        a = gpu_take(6 * MIB);
        GR_CHECK_EQ(a, rest + live_bytes);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, live_bytes + (ahead ? 32 : 6) * MIB);
        GR_CHECK_EQ(*allocs == before + 1, ahead);
        b = gpu_take(10 * MIB);
        GR_CHECK_EQ(b, a + 6 * MIB);
        GR_CHECK_EQ(*allocs == before + 1, ahead);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), (ahead ? 16 : 0) * MIB);
        GR_CHECK_EQ(gr_budget_live(gpu_device()), live_bytes + 16 * MIB);
        small = gpu_take(MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, live_bytes + (ahead ? 34 : 18) * MIB);
        gpu_give(small, MIB);
        gpu_give(b, 10 * MIB);
        gpu_give(a, 6 * MIB);
        gpu_give(rest, live_bytes);
        gpu_settle();
        gpu_end();
}

/*
 * Not where the footprint would pass its bound by what was live of late: what a program needed before decay looked twice
 * is no reason to hold as much again.
 */
static void test_ahead_late(int looks)
{
        enum { PIECES = 15 };
        uint64_t rest = begin_ahead(GR_POOL_SPLIT, 1024 * MIB), live, ptr, free_ones[PIECES], kept[PIECES], before;

        gpu_give(rest, 1024 * MIB);
        gpu_sync();
        gr_fence_sync(context->fence);
        GR_CHECK_EQ(gr_trim(context, UINT64_MAX / 2), 1024 * MIB);
        atomic_store(&context->split->ahead_refused, true);
        live = gpu_take(512 * MIB);
        for (int i = 0; i < PIECES; i++) {
                free_ones[i] = gpu_take(4 * MIB);
                kept[i] = gpu_take(2 * MIB);
        }
        for (int i = 0; i < PIECES; i++)
                gpu_give(free_ones[i], 4 * MIB);
        for (int i = 0; i < looks; i++)
                gr_split_trim_unneeded(context);
        atomic_store(&context->split->ahead_refused, false);
        before = gpu_device()->reserved_bytes;
        GR_CHECK_EQ(before, (512 + 6 * PIECES) * MIB);
        ptr = gpu_take(6 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes - before, (looks < 2 ? 18 : 6) * MIB);
        gpu_give(ptr, 6 * MIB);
        for (int i = 0; i < PIECES; i++)
                gpu_give(kept[i], 2 * MIB);
        gpu_give(live, 512 * MIB);
        gpu_settle();
        gpu_end();
}

/* Memory is mapped ahead where limits leave room for it and for an eighth of what is charged. Elsewhere they are not
 * asked for it. */
static void test_ahead_limits(uint64_t hard_bytes, uint64_t soft_bytes, uint64_t threshold_bytes, bool ahead)
{
        uint64_t rest = begin_ahead(GR_POOL_AUTO, 400 * MIB), a;

        atomic_store(&gpu_device()->hard_bytes, hard_bytes);
        atomic_store(&gpu_device()->soft_bytes, soft_bytes);
        atomic_store(&gpu_device()->threshold_bytes, threshold_bytes);
        a = gpu_take(6 * MIB);
        GR_CHECK_EQ(a, rest + 400 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, (ahead ? 412 : 406) * MIB);
        GR_CHECK_EQ(gr_budget_excess(gpu_device()), 0);
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_limit_hits], 0);
        gpu_give(a, 6 * MIB);
        gpu_give(rest, 400 * MIB);
        gpu_settle();
        gpu_end();
}

/* Where the driver has less than that, the request gets what it needs, without the ladder; and so do those after it. */
static void test_ahead_refused(void)
{
        uint64_t rest = begin_ahead(GR_POOL_AUTO, 400 * MIB), a, b;

        sg_fail(SG_MEM_MAP, 1, 1, -ENOMEM);
        a = gpu_take(6 * MIB);
        GR_CHECK_EQ(a, rest + 400 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 406 * MIB);
        b = gpu_take(6 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 412 * MIB);
        for (int rung = 0; rung < GR_RUNG_COUNT; rung++)
                GR_CHECK_EQ(core.counters.rungs[rung].tries, 0);
        gpu_give(a, 6 * MIB);
        gpu_give(b, 6 * MIB);
        gpu_give(rest, 400 * MIB);
        gpu_settle();
        gpu_end();
}

/* The same where it is refused half-way: what came already is part of what the request gets. */
static void test_ahead_halfway(void)
{
        uint64_t rest = begin_ahead(GR_POOL_AUTO, 600 * MIB), a, b, c;

        atomic_store(&context->split->ahead_refused, true);
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
        atomic_store(&context->split->ahead_refused, false);
        sg_fail(SG_MEM_MAP, 2, 1, -ENOMEM);
        GR_CHECK_EQ(gpu_take(22 * MIB), a); /* between two holes is what was freed */
        GR_CHECK(!sg_planned(SG_MEM_MAP));
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 622 * MIB);
        GR_CHECK_EQ(gr_budget_live(gpu_device()), 622 * MIB);
        GR_CHECK_EQ(context->split->surplus_bytes, 0);
        gpu_give(a, 22 * MIB);
        gpu_give(rest, 600 * MIB);
        gpu_settle();
        gpu_end();
}

/* A block begins with a page where that opens no more of them, and elsewhere where it opens fewer. */
static void test_fit(void)
{
        uint64_t a, b, c, d;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        a = gpu_take(24 * MIB);
        b = gpu_take(2 * MIB);
        gpu_give(a, 24 * MIB);
        c = gpu_take(3 * MIB);
        GR_CHECK_EQ(c, a);
        d = gpu_take(4 * MIB);
        GR_CHECK_EQ(d, a + 4 * MIB);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, MIB);
        gpu_give(d, 4 * MIB);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        d = gpu_take(9 * MIB); /* with the rest of a page in front it takes four more, alone five */
        GR_CHECK_EQ(d, a + 3 * MIB);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 0);
        gpu_give(d, 9 * MIB);
        gpu_give(c, 3 * MIB);
        gpu_give(b, 2 * MIB);
        gpu_settle();
        gpu_end();
}

/*
 * Of two places that are as good the one is taken that needs no barrier, but not one that is much too large: both so
 * large that a barrier is worth while.
 */
static void test_ready(enum gr_pool_kind pool, size_t bytes, size_t ready_bytes, bool taken)
{
        uint64_t ready, ahead, between, last, ptr;

        gpu_begin(pool, GR_REUSE_AUTO);
        atomic_store(&context->split_active, true);
        ahead = gpu_take(bytes);
        between = gpu_take(3 * MIB);
        ready = gpu_take(ready_bytes);
        last = gpu_take(3 * MIB);
        gpu_give(ready, ready_bytes);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        gpu_give(ahead, bytes);
        gr_split_trim_unneeded(context); /* auto: no fastbins */
        ptr = gpu_take(bytes);
        GR_CHECK_EQ(ptr >= ready && ptr < ready + ready_bytes, taken);
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], taken ? 1 : 2);
        gpu_give(ptr, bytes);
        gpu_give(between, 3 * MIB);
        gpu_give(last, 3 * MIB);
        gpu_settle();
        gpu_end();
}

/* Of many free ranges the smallest that suffices is found, whatever order they came in. */
static void test_best(void)
{
        enum { COUNT = 97, FIRST = 200 << 10, STEP = 1 << 10, BETWEEN = 65 << 10 };
        uint64_t ranges[COUNT], kept[COUNT];
        size_t sizes[COUNT];

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        for (int i = 0; i < COUNT; i++) {
                sizes[i] = (size_t)FIRST + (size_t)i * STEP;
                ranges[i] = gpu_take(sizes[i]);
                kept[i] = gpu_take(BETWEEN);
        }
        for (int i = 0; i < COUNT; i++)
                gpu_give(ranges[i * 31 % COUNT], sizes[i * 31 % COUNT]);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        for (int i = 0; i < COUNT; i++) {
                int n = i * 57 % COUNT;

                sizes[n] -= i % 2 ? 512 : 0;
                GR_CHECK_EQ(gpu_take(sizes[n]), ranges[n]);
        }
        for (int i = 0; i < COUNT; i++) {
                gpu_give(ranges[i], sizes[i]);
                gpu_give(kept[i], BETWEEN);
        }
        gpu_settle();
        gpu_end();
}

/* Small blocks lie apart, and what they leave serves large ones before more is taken from the driver; the other way,
 * too. */
static void test_small_and_large(void)
{
        uint64_t small[60], large;
        unsigned remaps;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        large = gpu_take(40 * MIB);
        for (int i = 0; i < 60; i++) {
                small[i] = gpu_take(MIB);
                GR_CHECK(small[i] < context->split->expandable[0]->ptr ||
                         small[i] >= context->split->expandable[0]->ptr + context->split->expandable[0]->bytes);
        }
        for (int i = 0; i < 60; i++)
                gpu_give(small[i], MIB);
        gpu_give(large, 40 * MIB);
        large = gpu_take(90 * MIB);
        GR_CHECK(sg_calls(SG_MEM_REMAP) > 0);
        GR_CHECK(gpu_device()->peak_reserved_bytes <= 120 * MIB);
        gpu_give(large, 90 * MIB);
        remaps = sg_calls(SG_MEM_REMAP);
        for (int i = 0; i < 60; i++)
                small[i] = gpu_take(MIB - 512);
        GR_CHECK(sg_calls(SG_MEM_REMAP) > remaps);
        GR_CHECK(gpu_device()->peak_reserved_bytes <= 120 * MIB);
        for (int i = 0; i < 60; i++)
                gpu_give(small[i], MIB - 512);
        gpu_settle();
        gpu_end();
}

/* Every address says which block it lies in, whatever has been cut and merged there. */
static void test_find(void)
{
        enum { COUNT = 300 };
        uint64_t ptrs[COUNT], seed = 3;
        size_t sizes[COUNT];

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        for (int i = 0; i < COUNT; i++)
                ptrs[i] = 0;
        for (int step = 0; step < 4000; step++) {
                size_t i = gpu_random(&seed) % COUNT;
                struct gr_split_place place;

                if (ptrs[i]) {
                        GR_CHECK_EQ(gr_split_find(&core, ptrs[i] + gpu_random(&seed) % sizes[i], &place), 0);
                        GR_CHECK(place.live && place.base_ptr == ptrs[i]);
                        gpu_give(ptrs[i], sizes[i]);
                        GR_CHECK(gr_split_find(&core, ptrs[i], &place) == 0 && !place.live);
                        ptrs[i] = 0;
                } else {
                        sizes[i] = GR_SPLIT_LEAST_BYTES + 1 + gpu_random(&seed) % (step % 8 ? 300 * KIB : 5 * MIB);
                        ptrs[i] = gpu_take(sizes[i]);
                        GR_CHECK(ptrs[i] != 0);
                }
        }
        for (int i = 0; i < COUNT; i++)
                if (ptrs[i])
                        gpu_give(ptrs[i], sizes[i]);
        gpu_settle();
        gpu_end();
}

/* Free memory whose last work has not passed serves elsewhere at once, under new addresses, and nothing is waited for.
 */
static void test_moves(bool possible)
{
        uint64_t a, b, c, d;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        gpu_refuse(SG_MEM_REMAP, !possible);
        told = 0;
        context->split->credit_at_ns = sg_now_ns(); /* no time for waits */
        context->split->credit_ns = -1;
        a = gpu_take(100 * MIB);
        b = gpu_take(2 * MIB);
        gpu_give(a, 100 * MIB);
        c = gpu_take(120 * MIB); /* too large for the gap; its memory moves there, and some is new */
        GR_CHECK(c > b);
        if (possible) {
                GR_CHECK(sg_calls(SG_MEM_REMAP) >= 16);
                GR_CHECK_EQ(core.counters.counts[GR_COUNTER_moved_bytes], sg_calls(SG_MEM_REMAP) * GR_PAGE_BYTES);
                GR_CHECK(gpu_device()->peak_reserved_bytes <= 140 * MIB);
        }
        GR_CHECK_EQ(told, possible ? 0 : 1);
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
        GR_CHECK(!context->split->stale_pages);
        gr_split_drop(context); /* no address is unmapped twice */
        GR_CHECK_EQ(sg_reserved(), 0);
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
                context->split->credit_at_ns = sg_now_ns(); /* no time for waits */
                context->split->credit_ns = -1;
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
        segment = context->split->expandable[false];
        last = segment->holes;
        for (int i = 1; i < PASSED; i++)
                last = last->next;
        after = last->next;
        last->next = gr_check_wall();
        end = segment->end;
        GR_CHECK(end && !end->after && end->state == GR_RANGE_HOLE);
        gr_lock(&context->split->lock);
        gr_extent_hole_leave(end);
        gr_extent_hole_enter(end); /* as the last of them */
        gr_unlock(&context->split->lock);
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
        gr_lock(&context->split->lock);
        end = segment->end;
        gr_extent_hole_leave(end);
        end->state = GR_RANGE_BUSY; /* as by a thread at work there */
        GR_CHECK(segment->end == NULL);
        gr_unlock(&context->split->lock);
        gpu_give(ptrs[1], 2 * MIB);
        gpu_sync();
        gr_fence_close(context->fence);
        gr_fence_poll(context->fence);
        gr_trim(context, UINT64_MAX / 2); /* a hole of 6 MiB, behind all others */
        a = gpu_take(4 * MIB);
        GR_CHECK_EQ(a, ptrs[0]);
        gr_lock(&context->split->lock);
        gr_extent_hole_enter(end);
        gr_unlock(&context->split->lock);
        gpu_give(a, 4 * MIB);
        for (int i = 3; i < MANY - 3; i += 2)
                gpu_give(ptrs[i], 2 * MIB);
        gpu_settle();
        gpu_end();
}

static _Atomic bool passing, over;

/* An epoch passes, again and again. */
static void *pass(void *arg)
{
        struct gr_fence *fence = context->fence;
        uint64_t usable = atomic_load(&fence->usable_epoch);

        (void)arg;
        while (!atomic_load(&over)) {
                atomic_store(&fence->usable_epoch, usable + 1);
                atomic_store(&passing, true);
                atomic_store(&fence->usable_epoch, usable);
        }
        return NULL;
}

/*
 * The free range before a hole becomes usable just while a place for a request is sought that begins before both: a
 * block there would be shorter than the request.
 */
static void test_usable_meanwhile(void)
{
        uint64_t before, freed, hole, behind;
        pthread_t thread;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        before = gpu_take(8 * MIB);
        freed = gpu_take(2 * MIB);
        hole = gpu_take(2 * MIB);
        behind = gpu_take(2 * MIB);
        gpu_give(hole, 2 * MIB);
        gpu_sync();
        gr_fence_sync(context->fence);
        gr_trim(context, UINT64_MAX / 2);
        gpu_give(freed, 2 * MIB);
        atomic_store(&over, false);
        GR_CHECK_EQ(pthread_create(&thread, NULL, pass, NULL), 0);
        while (!atomic_load(&passing))
                ;
        for (int i = 0; i < 20000; i++) {
                struct gr_block *block = NULL;
                bool much = false;

                GR_CHECK_EQ(gr_expandable_grow(context, 6 * MIB, &block), 0);
                if (!block || block->capacity_bytes < 6 * MIB || block->ptr < behind + 2 * MIB) {
                        GR_CHECK(!"a block that is as large as the request");
                        break;
                }
                GR_CHECK_EQ(gr_split_put(block, 0, false, &much), 0);
                GR_CHECK_EQ(gr_expandable_trim(context, 6 * MIB, UINT64_MAX), 6 * MIB);
        }
        atomic_store(&over, true);
        pthread_join(thread, NULL);
        gpu_give(before, 8 * MIB);
        gpu_give(behind, 2 * MIB);
        gpu_settle();
        gpu_end();
}

/* An extent goes back by itself; one that a block touches does not. */
static void test_trim(void)
{
        uint64_t a, b, c, d;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(7 * MIB);
        b = gpu_take(3 * MIB);
        gpu_give(a, 7 * MIB);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, MIB);
        gr_fence_close(context->fence);
        GR_CHECK_EQ(gr_trim(context, UINT64_MAX / 2), 0); /* its work is not done */
        gpu_sync();
        gr_fence_poll(context->fence);
        GR_CHECK_EQ(gr_trim(context, 2 * MIB), 2 * MIB); /* no more than that */
        GR_CHECK_EQ(gr_trim(context, UINT64_MAX / 2), 4 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 4 * MIB);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), MIB);
        gpu_give(b, 3 * MIB);
        gpu_settle();

        /* One whose work is not done keeps none beside it, and nobody takes it for one of them. */
        a = gpu_take(2 * MIB);
        b = gpu_take(2 * MIB);
        c = gpu_take(2 * MIB);
        d = gpu_take(2 * MIB);
        gpu_give(a, 2 * MIB);
        gpu_give(c, 2 * MIB);
        gpu_sync();
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        gpu_give(b, 2 * MIB);
        gr_fence_close(context->fence);
        GR_CHECK_EQ(context->split->free_count, 1);
        GR_CHECK_EQ(gr_trim(context, UINT64_MAX / 2), 4 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 4 * MIB);
        gpu_give(d, 2 * MIB);
        gpu_settle();
        gpu_end();
}

/* Exported memory is not reused; of it goes back what no other block shares, the rest with the last that does. */
static void test_exported(bool captured)
{
        uint64_t a, b, c;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        a = gpu_take(7 * MIB);
        b = gpu_take(3 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        if (captured)
                gpu_capture(true);
        gpu_give(a, 7 * MIB);
        if (captured)
                gpu_capture(false);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 4 * MIB);
        c = gpu_take(2 * MIB);
        GR_CHECK(c < a || c >= a + 6 * MIB);
        gpu_give(c, 2 * MIB);
        GR_CHECK_EQ(gr_budget_live(gpu_device()), 4 * MIB);
        gpu_give(b, 3 * MIB);
        GR_CHECK_EQ(gr_budget_live(gpu_device()), 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 4 * MIB);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 4 * MIB);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 0);
        gpu_end();
}

static sem_t inside, go_on;
static uint64_t given;

/* Once, in the thread that gives back. */
static void stop(void)
{
        memset(sg_before, 0, sizeof(sg_before));
        sem_post(&inside);
        sem_wait(&go_on);
}

static void *give_last(void *arg)
{
        gpu_give(given, 3 * MIB);
        return arg;
}

/* However much of it is never to be handed out again in the course of time. */
static void test_exported_often(void)
{
        enum { TIMES = 600 };
        const size_t bytes = 32 * MIB;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        gpu_give(gpu_take(bytes), bytes);
        GR_CHECK(TIMES * bytes > context->split->expandable[false]->bytes);
        for (int i = 0; i < TIMES; i++) {
                uint64_t ptr = gpu_take(bytes);

                GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, ptr), 0);
                gpu_give(ptr, bytes);
        }
        gpu_settle();
        gpu_end();
}

/* What must not be reused goes back with the last block beside it: not while another thread is at work there. */
static void test_exported_alone(bool at_unmap)
{
        struct gr_split *split;
        pthread_t thread;
        uint64_t a;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        split = context->split;
        a = gpu_take(7 * MIB);
        given = gpu_take(3 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        gpu_give(a, 7 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 4 * MIB);
        sem_init(&inside, 0, 0);
        sem_init(&go_on, 0, 0);
        if (at_unmap)
                sg_before[SG_MEM_UNMAP] = stop;
        else
                sg_before[SG_CONTEXT_RECORD] = stop;
        pthread_create(&thread, NULL, give_last, NULL);
        sem_wait(&inside);
        gr_lock(&split->lock);
        GR_CHECK_EQ(split->busy, 1);
        sem_post(&go_on);
        for (int n = 0; n < 20 && split->busy && (at_unmap || gpu_device()->reserved_bytes == 4 * MIB); n++)
                usleep(1000);
        GR_CHECK_EQ(split->busy, 1);
        GR_CHECK(at_unmap || gpu_device()->reserved_bytes == 4 * MIB);
        gr_unlock(&split->lock);
        pthread_join(thread, NULL);
        GR_CHECK_EQ(split->busy, 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 2 * MIB);
        gpu_end();
}

struct deed {
        void *(*run)(void *);
        unsigned before;    /* the call of the driver's that it stops before; SG_CALLS: none */
        bool (*held)(void); /* whether it has changed nothing since */
};

/* What a thread does in a call of the driver's is followed by nothing as long as another one is at the split. */
static void check_held(const struct deed *deed, void *arg)
{
        pthread_t thread;

        sem_init(&inside, 0, 0);
        sem_init(&go_on, 0, 0);
        if (deed->before < SG_CALLS) {
                sg_before[deed->before] = stop;
                pthread_create(&thread, NULL, deed->run, arg);
                sem_wait(&inside);
        }
        gr_lock(&context->split->lock);
        GR_CHECK(deed->held());
        if (deed->before == SG_CALLS)
                pthread_create(&thread, NULL, deed->run, arg);
        sem_post(&go_on);
        for (int n = 0; n < 20 && deed->held(); n++)
                usleep(500);
        GR_CHECK(deed->held());
        gr_unlock(&context->split->lock);
        pthread_join(thread, NULL);
        GR_CHECK(!deed->held());
        sem_destroy(&inside);
        sem_destroy(&go_on);
}

static struct gr_block *grown;
static int grow_rc;

static void *grow(void *arg)
{
        grow_rc = gr_expandable_grow(context, 4 * MIB, &grown);
        return arg;
}

static bool none_open(void)
{
        return !context->split->expandable[false];
}

static bool is_busy(void)
{
        return context->split->busy == 1 && context->split->refused_bytes == 0;
}

static bool no_more(void)
{
        return gpu_device()->reserved_bytes == 2 * MIB;
}

/* An expandable segment is opened, a request maps what it lacks, or is refused it. */
static void test_grow_held(const struct deed *deed, bool fails)
{
        uint64_t first = 0;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        if (deed->held != none_open)
                first = gpu_take(2 * MIB);
        sg_fail(SG_MEM_MAP, fails, 1, -ENOMEM);
        grown = NULL;
        check_held(deed, NULL);
        GR_CHECK_EQ(grow_rc, fails ? -ENOMEM : 0);
        GR_CHECK_EQ(context->split->refused_bytes, fails ? 4 * MIB : 0);
        if (grown && gr_ledger_hand_out(grown, 4 * MIB))
                GR_CHECK_EQ(gr_pool_free(&core, grown->ptr), 0);
        if (first)
                gpu_give(first, 2 * MIB);
        gpu_settle();
        gpu_end();
}

static void *give_shared(void *arg)
{
        gpu_give(*(uint64_t *)arg, 8 * MIB);
        return NULL;
}

static bool is_at_work(void)
{
        return context->split->expandable[false]->first->state == GR_RANGE_BUSY;
}

static void *take_moved(void *arg)
{
        *(uint64_t *)arg = gpu_take(120 * MIB);
        return NULL;
}

static bool no_ghosts(void)
{
        return !context->split->stale_pages;
}

static void *drop(void *arg)
{
        gr_split_drop(context);
        return arg;
}

static bool is_whole(void)
{
        return context->split->segment_count == 1 && context->split->segments[0]->first->state == GR_RANGE_USED;
}

static _Atomic bool asked;

static void *would_help(void *arg)
{
        asked = !gr_split_would_help(context, 3 * MIB);
        return arg;
}

static void *is_empty(void *arg)
{
        asked = gr_split_trim_has_none(context);
        return arg;
}

static void *unneeded(void *arg)
{
        asked = gr_split_trim_unneeded(context) == 0;
        return arg;
}

static void *look_up(void *arg)
{
        struct gr_split_place place;

        asked = gr_split_find(&core, *(uint64_t *)arg, &place) == 0;
        return NULL;
}

static void *put(void *arg)
{
        gpu_give(*(uint64_t *)arg, 3 * MIB);
        asked = true;
        return NULL;
}

static bool is_unasked(void)
{
        return !asked;
}

static void *take_segment(void *arg)
{
        *(uint64_t *)arg = gpu_take(4 * MIB);
        return NULL;
}

static bool no_segment(void)
{
        return context->split->segment_count == 0;
}

static void test_held(void)
{
        uint64_t a, b, c;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(3 * MIB); /* of two pages */
        for (int i = 0; i < 5; i++) {
                void *(*const deeds[])(void *) = {would_help, is_empty, unneeded, look_up, put};

                asked = false;
                check_held(&(struct deed){deeds[i], SG_CALLS, is_unasked}, &a);
        }
        gpu_settle();
        gpu_end();

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        gpu_refuse(SG_MEM_RESERVE, true);
        check_held(&(struct deed){take_segment, SG_MEM_ALLOC, no_segment}, &a);
        gpu_give(a, 4 * MIB);
        gpu_settle();
        gpu_end();

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        gpu_take(3 * MIB);
        gpu_forget();
        check_held(&(struct deed){drop, SG_CALLS, is_whole}, NULL);
        gpu_end();

        test_grow_held(&(struct deed){grow, SG_MEM_RESERVE, none_open}, false);
        test_grow_held(&(struct deed){grow, SG_MEM_MAP, is_busy}, false);
        test_grow_held(&(struct deed){grow, SG_MEM_INFO, is_busy}, true);
        test_grow_held(&(struct deed){grow, SG_CLOCK, no_more}, false); /* asks what was refused */

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        a = gpu_take(8 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        check_held(&(struct deed){give_shared, SG_MEM_UNMAP, is_at_work}, &a);
        gpu_settle();
        gpu_end();

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        context->split->credit_at_ns = sg_now_ns(); /* no time for waits */
        context->split->credit_ns = -1;
        a = gpu_take(100 * MIB);
        b = gpu_take(2 * MIB);
        gpu_give(a, 100 * MIB);
        check_held(&(struct deed){take_moved, SG_MEM_MAP, no_ghosts}, &c);
        gpu_give(b, 2 * MIB);
        gpu_give(c, 120 * MIB);
        gpu_settle();
        gpu_end();
}

/* Much is held, so extents have two pages, and blocks lie across their ends: none of those goes back. */
static void test_large_extents(void)
{
        uint64_t a, b;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(480 * MIB);
        gpu_give(a, 480 * MIB);
        GR_CHECK_EQ(gpu_take(6 * MIB), a);
        b = gpu_take(4 * MIB);
        GR_CHECK_EQ(b, a + 6 * MIB);
        gpu_give(a, 6 * MIB);
        gpu_sync();
        gr_fence_close(context->fence);
        gr_fence_poll(context->fence);
        gr_trim(context, UINT64_MAX / 2);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 8 * MIB);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 4 * MIB);
        gpu_give(b, 4 * MIB);
        gpu_settle();
        gpu_end();
}

/* An extent moves for the same price whatever its size: the large ones first, though small ones lie in smaller ranges.
 */
static void test_large_moves(int small_count, bool hole)
{
        uint64_t all, large[2], small[8], kept[10], block, bytes = (hole ? 44 : 42) * MIB, moved_bytes;
        unsigned remaps;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        all = gpu_take(400 * MIB);
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
        gpu_give(all, 400 * MIB);
        GR_CHECK_EQ(gpu_take(398 * MIB), all); /* what it leaves is half of an extent, and cannot move */
        remaps = sg_calls(SG_MEM_REMAP);
        moved_bytes = core.counters.counts[GR_COUNTER_moved_bytes];
        block = gpu_take(bytes);
        moved_bytes = core.counters.counts[GR_COUNTER_moved_bytes] - moved_bytes;
        GR_CHECK_EQ(moved_bytes, small_count ? bytes : 40 * MIB);
        GR_CHECK_EQ(sg_calls(SG_MEM_REMAP) - remaps, small_count ? 11 : 10); /* of 42 MiB the last hole has one page */
        gpu_give(block, bytes);
        for (int i = small_count; i < 8; i++)
                gpu_give(small[i], 2 * MIB);
        for (int i = 0; i < 10; i++)
                if (!hole || i != 2)
                        gpu_give(kept[i], 2 * MIB);
        gpu_give(all, 398 * MIB);
        gpu_settle();
        gpu_end();
}

/*
 * An old address goes as soon as the memory is idle at its new one, also behind others that are still at work: where it
 * stayed, memory that has gone back would be on the card without being charged.
 */
static void test_old_addresses(void)
{
        struct gr_split *split;
        struct gr_block *stale;
        unsigned count = 0;
        uint64_t a, b, c;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        split = context->split;
        split->credit_at_ns = sg_now_ns(); /* no time for waits */
        split->credit_ns = -1;
        a = gpu_take(100 * MIB);
        b = gpu_take(2 * MIB);
        gpu_give(a, 100 * MIB);
        c = gpu_take(120 * MIB);
        DL_COUNT(split->stale_pages, stale, count);
        GR_CHECK(count >= 2); /* else this tests nothing */
        gpu_give(c, 120 * MIB);
        gpu_give(b, 2 * MIB);
        gpu_sync();
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        gr_lock(&split->lock);
        stale = split->stale_pages;
        if (stale) {
                uint64_t epoch = stale->freed_epoch;

                stale->freed_epoch = UINT64_MAX; /* of work that goes on and on */
                gr_remap_reap(context);
                DL_COUNT(split->stale_pages, stale, count);
                GR_CHECK_EQ(count, 1);
                split->stale_pages->freed_epoch = epoch;
                gr_remap_reap(context);
                GR_CHECK(!split->stale_pages);
        }
        gr_unlock(&split->lock);
        gpu_end();
}

/* And where it has not gone by the end of the context, it goes then. */
static void test_old_addresses_end(void)
{
        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        context->split->credit_at_ns = sg_now_ns(); /* no time for waits */
        context->split->credit_ns = -1;
        given = gpu_take(100 * MIB);
        gpu_take(2 * MIB);
        gpu_give(given, 100 * MIB);
        gpu_take(120 * MIB);
        GR_CHECK(context->split->stale_pages); /* else this tests nothing */
        gr_core_context_ending(context);
        gpu_forget();
        gr_core_context_drop(context);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        GR_CHECK_EQ(sg_reserved(), 0);
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        gpu_end();
}

static void open_first(void)
{
        memset(sg_before, 0, sizeof(sg_before));
        GR_CHECK_EQ(gr_expandable_open(context, false), 0);
}

/* Of two threads that open a segment at once the second one gives its addresses back. */
static void test_opened_twice(void)
{
        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        sg_before[SG_MEM_RESERVE] = open_first;
        GR_CHECK_EQ(gr_expandable_open(context, false), 0);
        GR_CHECK_EQ(sg_reserved(), 1);
        GR_CHECK_EQ(context->split->segment_count, 1);
        gpu_settle();
        gpu_end();
}

/* Bytes that the C library has handed out, where it tells. */
static size_t handed_out(void)
{
        struct mallinfo2 info = mallinfo2();

        return info.uordblks + info.hblkhd;
}

/* Where there is no structure for the range of a new segment, nothing of the segment is left. */
static void test_not_opened(void)
{
        struct gr_segment *segment;
        size_t before;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        segment = gr_metadata_alloc(sizeof(*segment));
        memory_runs_out(GR_LINE_BYTES);
        gr_metadata_free(segment, sizeof(*segment)); /* the one structure that there is */
        before = handed_out();
        GR_CHECK_EQ(gr_expandable_open(context, false), -ENOSPC);
        GR_CHECK_EQ(handed_out(), before);
        GR_CHECK(!GR_METADATA_IN_CHUNKS || gr_metadata_alloc(sizeof(*segment)) == segment);
        gr_metadata_free(GR_METADATA_IN_CHUNKS ? segment : NULL, sizeof(*segment));
        GR_CHECK_EQ(sg_reserved(), 0);
        memory_is_back();
        gpu_settle();
        gpu_end();
}

/* Where nothing says when the work on it ends, what must not be reused keeps its memory. */
static void test_not_quiet(void)
{
        static const enum sg_op waits[] = {SG_CONTEXT_RECORD, SG_CONTEXT_SYNC, SG_CONTEXT_DRAIN};
        uint64_t a;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(6 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        for (int i = 0; i < 3; i++)
                gpu_refuse(waits[i], true);
        gpu_give(a, 6 * MIB);
        for (int i = 0; i < 3; i++)
                gpu_refuse(waits[i], false);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 6 * MIB);
        gpu_end();
}

/* The program has at all of the memory that moved, which it shared: with it the old addresses go, or it stays on the
 * card without being charged. */
static void test_old_addresses_shared(void)
{
        uint64_t a, b, c;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        context->split->credit_at_ns = sg_now_ns(); /* no time for waits */
        context->split->credit_ns = -1;
        a = gpu_take(100 * MIB);
        b = gpu_take(2 * MIB);
        gpu_give(a, 100 * MIB);
        c = gpu_take(120 * MIB);
        GR_CHECK(context->split->stale_pages); /* else this tests nothing */
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, c), 0);
        gpu_give(c, 120 * MIB);
        GR_CHECK(!context->split->stale_pages);
        GR_CHECK_EQ(sg_used_bytes(0), gpu_device()->reserved_bytes);
        gpu_give(b, 2 * MIB);
        gpu_settle();
        gpu_end();
}

/* The driver does not take back what nobody uses any more and must not be reused: then the accounts are right as well,
 * and a free beside it waits for nothing. */
static void test_stuck_refused(bool again)
{
        uint64_t a, b, charged;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(7 * MIB);
        b = gpu_take(2 * MIB);
        GR_CHECK_EQ(b, a + 7 * MIB); /* the last MiB of its second page is free */
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        gpu_give(a, 7 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 4 * MIB);
        gpu_refuse(SG_MEM_UNMAP, true);
        gpu_give(b, 2 * MIB);
        gpu_refuse(SG_MEM_UNMAP, false);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 4 * MIB);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 0); /* nothing of the page can be handed out */
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 2 * MIB);
        gpu_take(2 * MIB);
        gpu_take(6 * MIB); /* at the end */
        GR_CHECK_EQ(gpu_take(6 * MIB), a);
        GR_CHECK_EQ(gpu_progress().done_ns, gpu_progress().submitted_ns);
        charged = gpu_device()->reserved_bytes;
        if (again)
                GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        gpu_give(a, 6 * MIB); /* up to that page */
        GR_CHECK_EQ(gpu_device()->reserved_bytes, again ? charged - 6 * MIB : charged);
        GR_CHECK_EQ(gpu_progress().done_ns == gpu_progress().submitted_ns, again);
        gr_core_context_ending(context);
        gpu_forget();
        gr_core_context_drop(context);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 0);
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        gpu_end();
}

/* More than an expandable segment has addresses for is the driver's to refuse. */
static void test_no_addresses(void)
{
        uint64_t a;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(4 * MIB);
        GR_CHECK_EQ(gpu_take(5 * GPU_PAGES * GR_PAGE_BYTES), 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 4 * MIB);
        gpu_give(a, 4 * MIB);
        gpu_settle();
        gpu_end();
}

/* What a context leaves behind is not lost: its blocks' structures serve others. */
static void test_structures(void)
{
        enum { MANY = 200, SOME = 20 };
        static struct gr_block *blocks[MANY];
        struct gr_block *next[SOME];
        struct gr_range *range;
        unsigned count = 0, again = 0;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        for (int i = 0; i < MANY; i++)
                gpu_take(2 * MIB);
        for (range = context->split->expandable[false]->first; range && count < MANY; range = range->after)
                blocks[count++] = &range->block;
        gr_core_context_ending(context);
        gpu_forget();
        gr_core_context_drop(context);
        for (unsigned i = 0; i < SOME; i++) { /* not all are those of blocks */
                next[i] = gr_block_new();
                for (unsigned k = 0; k < count; k++)
                        again += blocks[k] == next[i];
        }
        GR_CHECK(again > 0 || !GR_METADATA_IN_CHUNKS); /* else the sanitizer tells what is lost */
        for (unsigned i = 0; i < SOME; i++)
                gr_block_free(next[i]);
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        gpu_end();
}

/* Where the driver takes no memory back at a context's end, its addresses stay as well, and what it holds is charged. */
static void test_refused_end(void)
{
        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        gpu_take(3 * MIB);
        gr_core_context_ending(context);
        gpu_forget();
        gpu_refuse(SG_MEM_UNMAP, true);
        gr_core_context_drop(context);
        gpu_refuse(SG_MEM_UNMAP, false);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 4 * MIB);
        GR_CHECK_EQ(sg_reserved(), 1);
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        gpu_end();
}

/* What must not be reused shares its last page with a block: its account goes with the context. */
static void test_stuck_end(void)
{
        uint64_t a;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(3 * MIB);
        gpu_take(64 * MIB + 512);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        gpu_give(a, 3 * MIB);
        gr_core_context_ending(context);
        gpu_forget();
        gr_core_context_drop(context);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 0);
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        gpu_end();
}

int main(void)
{
        gpu_mapping = true;
        gr_log_set_level(GR_LOG_INFO);
        gr_log_set_sink(count_line, NULL);
        test_no_expandable(true);
        test_no_expandable(false);
        if (!MEMORY_ENDS_PROGRAM) {
                test_no_memory(true);
                test_no_memory(false);
        }
        test_expandable(true);
        test_expandable(false);
        test_reserve_fails();
        for (int auto_too = 0; auto_too < 2; auto_too++) {
                enum gr_pool_kind pool = auto_too ? GR_POOL_AUTO : GR_POOL_SPLIT;

                test_mapped_in_vain(pool, false);
                test_mapped_in_vain(pool, true);
        }
        test_fit();
        test_best();
        for (int pool = GR_POOL_SPLIT; pool <= GR_POOL_AUTO; pool++) {
                test_ready((enum gr_pool_kind)pool, 5 * MIB, 5 * MIB, true);
                test_ready((enum gr_pool_kind)pool, 5 * MIB, 11 * MIB, false);
        }
        test_ready(GR_POOL_SPLIT, 1536 * KIB, 1536 * KIB, true); /* opens no page */
        test_small_and_large();
        test_find();
        test_moves(true);
        test_moves(false);
        test_behind(false);
        test_behind(true);
        test_many_holes();
        test_usable_meanwhile();
        test_trim();
        test_exported(false);
        test_exported(true);
        test_exported_often();
        test_exported_alone(false);
        test_exported_alone(true);
        test_held();
        test_old_addresses();
        test_old_addresses_shared();
        test_old_addresses_end();
        test_opened_twice();
        test_not_opened();
        test_not_quiet();
        test_no_addresses();
        test_structures();
        test_stuck_refused(false);
        test_stuck_refused(true);
        test_stuck_end();
        test_refused_end();
        /* Last: what they touch is cleared for every test after them. */
        test_bound(10000000, 460 * MIB, 488 * MIB);
        test_bound(-1000000000, 500 * MIB, 517 * MIB);
        test_credit();
        test_hint();
        test_ahead(GR_POOL_AUTO, 1024 * MIB, true);
        test_ahead(GR_POOL_AUTO, 62 * MIB, false);
        test_ahead(GR_POOL_SPLIT, 1024 * MIB, true);
        test_ahead_limits(462 * MIB, GR_UNLIMITED, GR_UNLIMITED, true);
        test_ahead_limits(462 * MIB - 1, GR_UNLIMITED, GR_UNLIMITED, false);
        test_ahead_limits(410 * MIB, GR_UNLIMITED, GR_UNLIMITED, false);
        test_ahead_limits(GR_UNLIMITED, 462 * MIB, GR_UNLIMITED, true);
        test_ahead_limits(GR_UNLIMITED, 462 * MIB - 1, GR_UNLIMITED, false);
        test_ahead_limits(GR_UNLIMITED, GR_UNLIMITED, 62 * MIB, true);
        test_ahead_limits(GR_UNLIMITED, GR_UNLIMITED, 62 * MIB - 1, false);
        test_ahead_refused();
        test_ahead_halfway();
        for (int looks = 0; looks < 3; looks++)
                test_ahead_late(looks);
        test_large_extents();
        test_large_moves(8, false);
        test_large_moves(0, false);
        test_large_moves(1, true);
        return GR_CHECK_RESULT();
}
