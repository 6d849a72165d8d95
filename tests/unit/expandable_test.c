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

#include "alloc/pool.h"
#include "base/log.h"
#include "base/metadata.h"
#include "check.h"
#include "core.h"
#include "reclaim/decay.h"
#include "reclaim/rung.h"
#include "reclaim/trim.h"
#include "segment/expandable.h"
#include "segment/range.h"
#include "segment/split_trim.h"
#include "short_of_memory.h"
#include "split_gpu.h"

/* Where the driver has no addresses to map memory behind, or does not say for how much, it is told once, and segments
 * serve instead. */
static void test_no_expandable(bool known)
{
        uint64_t a, small;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        gpu_refuse(SG_MEM_RESERVE, known);
        gpu_refuse(SG_MEM_INFO, !known);
        gpu_told = 0;
        a = gpu_take(5 * MIB);
        small = gpu_take(100 * KIB);
        gpu_refuse(SG_MEM_INFO, false);
        GR_CHECK_EQ(sg_reserved(), 0);
        GR_CHECK(a && a < SG_VBASE && small && small < SG_VBASE);
        GR_CHECK(!context->split->expandable[0] && !context->split->expandable[1]);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 8 * MIB);
        GR_CHECK_EQ(gpu_told, 1);
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

static uint64_t given;

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
        sem_init(&gpu_inside, 0, 0);
        sem_init(&gpu_go_on, 0, 0);
        if (at_unmap)
                sg_before[SG_MEM_UNMAP] = gpu_stop;
        else
                sg_before[SG_CONTEXT_RECORD] = gpu_stop;
        pthread_create(&thread, NULL, give_last, NULL);
        sem_wait(&gpu_inside);
        gr_lock(&split->lock);
        GR_CHECK_EQ(split->busy, 1);
        sem_post(&gpu_go_on);
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

/* The extents of a large request have two pages, and blocks lie across their ends: none of those goes back. */
static void test_large_extents(void)
{
        uint64_t a, b;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(32 * MIB);
        gpu_give(a, 32 * MIB);
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

static void open_first(void)
{
        memset(sg_before, 0, sizeof(sg_before));
        GR_CHECK_EQ(gr_expandable_open(context, GR_EXPANDABLE_LARGE), 0);
}

/* Of two threads that open a segment at once the second one gives its addresses back. */
static void test_opened_twice(void)
{
        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        sg_before[SG_MEM_RESERVE] = open_first;
        GR_CHECK_EQ(gr_expandable_open(context, GR_EXPANDABLE_LARGE), 0);
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
        GR_CHECK_EQ(gr_expandable_open(context, GR_EXPANDABLE_LARGE), -ENOSPC);
        GR_CHECK_EQ(handed_out(), before);
        GR_CHECK(!GR_METADATA_IN_CHUNKS || gr_metadata_alloc(sizeof(*segment)) == segment);
        gr_metadata_free(GR_METADATA_IN_CHUNKS ? segment : NULL, sizeof(*segment));
        GR_CHECK_EQ(sg_reserved(), 0);
        memory_is_back();
        gpu_settle();
        gpu_end();
}

/* Frees a block that must not be reused while nothing says when the work on it ends. */
static void give_unquiet(uint64_t ptr, size_t bytes)
{
        static const enum sg_op waits[] = {SG_CONTEXT_RECORD, SG_CONTEXT_SYNC, SG_CONTEXT_DRAIN};

        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, ptr), 0);
        for (int i = 0; i < 3; i++)
                gpu_refuse(waits[i], true);
        gpu_give(ptr, bytes);
        for (int i = 0; i < 3; i++)
                gpu_refuse(waits[i], false);
}

enum occasion { TRIM, DECAY, LADDER, FREE, END, OCCASIONS };

/* Then it keeps its memory, until something says that, and it goes back at the next occasion. */
static void test_not_quiet(enum occasion occasion)
{
        uint64_t a, b;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(7 * MIB);
        b = gpu_take(3 * MIB);
        give_unquiet(a, 7 * MIB);
        gr_trim(context, UINT64_MAX / 2);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 10 * MIB);
        GR_CHECK(gpu_take(7 * MIB) != a);
        if (occasion == TRIM || occasion == DECAY) {
                gpu_sync();
                gr_fence_close(context->fence);
                gr_fence_poll(context->fence);
        }
        if (occasion == TRIM)
                GR_CHECK_EQ(gr_trim(context, 2 * MIB), 6 * MIB);
        else if (occasion == DECAY)
                GR_CHECK_EQ(gr_split_trim_most(context, 2 * MIB), 0); /* it was not cached */
        else if (occasion == LADDER)
                GR_CHECK_EQ(gr_rung_run(context, GR_RUNG_SYNC, MIB), 6 * MIB);
        if (occasion == FREE)
                GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, b), 0);
        if (occasion == FREE)
                gpu_give(b, 3 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, occasion == FREE ? 8 * MIB : occasion == END ? 18 * MIB : 12 * MIB);
        if (occasion == TRIM || occasion == DECAY || occasion == LADDER) {
                gpu_give(b, 3 * MIB); /* and the page between them */
                GR_CHECK_EQ(gpu_device()->reserved_bytes, 10 * MIB);
        }
        gpu_end();
}

/* The driver fails to say so, but only once: then what must not be reused goes back at once. */
static void test_not_quiet_once(enum sg_op op)
{
        uint64_t a;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(7 * MIB);
        if (op == SG_CONTEXT_SYNC)
                sg_fail(SG_CONTEXT_RECORD, 1, 1, gr_driver_error(999));
        if (op == SG_CONTEXT_SYNC)
                GR_CHECK(gr_fence_sync(context->fence)); /* from now on there are no events */
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        sg_fail(op, 1, 1, gr_driver_error(999));
        gpu_give(a, 7 * MIB);
        GR_CHECK(!sg_planned(op));
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
        gpu_end();
}

/*
 * Where more contexts can use a block than its fence covers, all of them are waited for before its memory goes, but not
 * one of another device, which cannot. If that is refused, the program still has it.
 */
static void test_not_covered(bool refused, bool peer)
{
        static const enum sg_op waits[] = {SG_CONTEXT_SYNC, SG_CONTEXT_DRAIN};
        struct gr_context *last = NULL, *other;
        uint64_t a;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        other = gr_core_context_add(&core, sg_context_new(1), 1);
        sg_work(other->handle, 1, 0, 9000000);
        for (int i = 0; i < GR_ACCESSORS_MAX; i++)
                last = gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK(gr_fence_overflow(context->fence));
        if (peer)
                gr_fence_add_accessor(context->fence, other);
        a = gpu_take(6 * MIB);
        sg_work(last->handle, 1, a, 1000000);
        if (refused) {
                for (int i = 0; i < 2; i++)
                        gpu_refuse(waits[i], true);
                GR_CHECK_EQ(gr_pool_free(&core, a), -ENOMEM);
                for (int i = 0; i < 2; i++)
                        gpu_refuse(waits[i], false);
                GR_CHECK_EQ(gpu_device()->reserved_bytes, 6 * MIB);
        }
        GR_CHECK_EQ(sg_free(&core, a), 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
        GR_CHECK_EQ(sg_progress(other->handle).done_ns == sg_progress(other->handle).submitted_ns, peer);
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
        gr_core_context_gone(context);
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
        gr_core_context_gone(context);
        for (unsigned i = 0; i < SOME; i++) { /* not all are those of blocks */
                next[i] = gr_block_new();
                for (unsigned k = 0; k < count; k++)
                        again += blocks[k] == next[i];
        }
        GR_CHECK(again > 0 || !GR_METADATA_IN_CHUNKS); /* else the sanitizer tells what is lost */
        for (unsigned i = 0; i < SOME; i++)
                gr_block_delete(next[i]);
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
        gr_core_context_gone(context);
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
        gr_core_context_gone(context);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 0);
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        gpu_end();
}

static void *drop_segments(void *arg)
{
        gr_split_context_gone(context);
        return arg;
}

static void end_segments(void)
{
        pthread_t thread;

        sg_before[SG_CONTEXT_WAIT] = NULL;
        gpu_sync();
        pthread_create(&thread, NULL, drop_segments, NULL);
        pthread_join(thread, NULL);
}

/* The context ends while a thread lays a barrier for the free range that it has found: that is gone, then. */
static void test_end_at_barrier(void)
{
        uint64_t a;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(4 * MIB);
        gpu_give(a, 4 * MIB);
        sg_before[SG_CONTEXT_WAIT] = end_segments;
        a = gpu_take(4 * MIB);
        GR_CHECK(!sg_before[SG_CONTEXT_WAIT]);
        GR_CHECK(a && sg_reserved() == 1);
        gpu_give(a, 4 * MIB);
        gpu_settle();
        gpu_end();
}

static uint64_t exported;

static void free_exported(void)
{
        sg_before[SG_MEM_MAP] = NULL;
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, exported), 0);
        gpu_give(exported, 7 * MIB);
        gpu_refuse(SG_MEM_MAP, true);
        gpu_refuse(SG_MEM_ALLOC, true);
}

/*
 * Its last page, or its first, is part of a place that another thread maps memory for. That is refused, and later the
 * page goes back, too.
 */
static void test_exported_beside_busy(bool first)
{
        uint64_t a = 0, b;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        if (first)
                a = gpu_take(5 * MIB);
        exported = gpu_take(7 * MIB);
        if (first) {
                b = gpu_take(8 * MIB);
                gpu_give(a, 5 * MIB);
                gpu_sync();
                gr_fence_sync(context->fence);
                gr_trim(context, UINT64_MAX / 2);
                GR_CHECK_EQ(gpu_device()->reserved_bytes, 16 * MIB);
        }
        sg_before[SG_MEM_MAP] = free_exported;
        GR_CHECK_EQ(gpu_take(5 * MIB), 0);
        GR_CHECK(!sg_before[SG_MEM_MAP]);
        for (int i = 0; i < SG_OP_COUNT; i++)
                gpu_refuse((enum sg_op)i, false);
        if (first)
                gpu_give(b, 8 * MIB);
        gpu_settle();
        gpu_end();
}

static int not_asked(void *arg, uint64_t ptr)
{
        (void)arg, (void)ptr;
        return -EINVAL;
}

/*
 * Freed in stream order, it waits for nothing, and nor does what is freed beside it; both go back when the work is done.
 */
static void test_exported_in_order(bool decays)
{
        uint64_t a, b;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(7 * MIB);
        b = gpu_take(3 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        sg_work(context->handle, 0, a, 1);
        GR_CHECK_EQ(sg_free_in_order(&core, a, not_asked), 0);
        sg_work(context->handle, 0, b, 1);
        GR_CHECK_EQ(sg_free_in_order(&core, b, not_asked), 0);
        GR_CHECK(gpu_progress().done_ns < gpu_progress().submitted_ns);
        gr_split_trim_collect(context);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 10 * MIB);
        GR_CHECK(!gr_trim_has_none(context));
        gpu_sync();
        if (decays) {
                core.config.decay_ns = 1000 * SG_MS;
                for (int i = 0; i < 3; i++) {
                        gr_decay_run(&core, sg_now_ns());
                        sg_advance(gr_decay_step_ns(&core));
                }
        } else {
                gr_split_trim_merge_and_collect(&core, gpu_device()); /* as when the program asks what is free */
        }
        GR_CHECK(gpu_device()->reserved_bytes <= 2 * MIB);
        gpu_settle();
        gpu_end();
}

int main(void)
{
        gpu_mapping = true;
        gr_log_set_level(GR_LOG_INFO);
        gr_log_set_sink(gpu_count_line, NULL);
        test_no_expandable(true);
        test_no_expandable(false);
        if (!MEMORY_ENDS_PROGRAM) {
                test_no_memory(true);
                test_no_memory(false);
        }
        test_expandable(true);
        test_expandable(false);
        test_fit();
        test_best();
        for (int pool = GR_POOL_SPLIT; pool <= GR_POOL_AUTO; pool++) {
                test_ready((enum gr_pool_kind)pool, 5 * MIB, 5 * MIB, true);
                test_ready((enum gr_pool_kind)pool, 5 * MIB, 11 * MIB, false);
        }
        test_ready(GR_POOL_SPLIT, 1536 * KIB, 1536 * KIB, true); /* opens no page */
        test_small_and_large();
        test_find();
        test_trim();
        test_exported(false);
        test_exported(true);
        test_exported_often();
        test_exported_alone(false);
        test_exported_alone(true);
        test_opened_twice();
        test_not_opened();
        for (int occasion = 0; occasion < OCCASIONS; occasion++)
                test_not_quiet((enum occasion)occasion);
        test_not_quiet_once(SG_CONTEXT_RECORD);
        test_not_quiet_once(SG_CONTEXT_SYNC);
        test_not_covered(false, false);
        test_not_covered(false, true);
        test_not_covered(true, false);
        test_no_addresses();
        test_structures();
        test_stuck_refused(false);
        test_stuck_refused(true);
        test_stuck_end();
        test_end_at_barrier();
        test_exported_beside_busy(false);
        test_exported_beside_busy(true);
        test_exported_in_order(false);
        test_exported_in_order(true);
        test_refused_end();
        /* Last: what they touch is cleared for every test after them. */
        test_hint();
        test_large_extents();
        return GR_CHECK_RESULT();
}
