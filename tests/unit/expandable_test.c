/*
 * Expandable segments, which there are where memory can be mapped, on a scripted GPU that is only a clock and notices
 * memory that is handed out, given back or unmapped too early.
 */
#include "segment/segments_serve.h"

#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "alloc/pool.h"
#include "base/log.h"
#include "base/metadata.h"
#include "check.h"
#include "core.h"
#include "reclaim/trim.h"
#include "segment/expandable.h"
#include "segment/range.h"
#include "segment/segments_trim.h"
#include "segments_gpu.h"
#include "short_of_memory.h"

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
        GR_CHECK(!context->segments->expandable[0] && !context->segments->expandable[1]);
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
                        if (!gr_check_addresses_limited())
                                _exit(1);
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
        atomic_store(&context->segments->moves_refused, !moves);
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
        GR_CHECK_EQ(context->segments->moves_refused, !moves);
        gpu_settle();
        gpu_end();
}

/*
 * A free passes the bins' recent blocks by where a segment most likely has the block; a block of theirs there is freed
 * all the same.
 */
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
        atomic_store(&context->segments_active, true);
        ahead = gpu_take(bytes);
        between = gpu_take(3 * MIB);
        ready = gpu_take(ready_bytes);
        last = gpu_take(3 * MIB);
        gpu_give(ready, ready_bytes);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        gpu_give(ahead, bytes);
        gr_segments_trim_unneeded(context); /* auto: no fastbins */
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
                GR_CHECK(small[i] < context->segments->expandable[0]->ptr ||
                         small[i] >= context->segments->expandable[0]->ptr + context->segments->expandable[0]->bytes);
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
                struct gr_segments_place place;

                if (ptrs[i]) {
                        GR_CHECK_EQ(gr_segments_find(&core, ptrs[i] + gpu_random(&seed) % sizes[i], &place), 0);
                        GR_CHECK(place.live && place.base_ptr == ptrs[i]);
                        gpu_give(ptrs[i], sizes[i]);
                        GR_CHECK(gr_segments_find(&core, ptrs[i], &place) == 0 && !place.live);
                        ptrs[i] = 0;
                } else {
                        sizes[i] = GR_SEGMENTS_LEAST_BYTES + 1 + gpu_random(&seed) % (step % 8 ? 300 * KIB : 5 * MIB);
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
        GR_CHECK_EQ(context->segments->free_count, 1);
        GR_CHECK_EQ(gr_trim(context, UINT64_MAX / 2), 4 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 4 * MIB);
        gpu_give(d, 2 * MIB);
        gpu_settle();
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
        GR_CHECK_EQ(context->segments->segment_count, 1);
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
        for (range = context->segments->expandable[false]->first; range && count < MANY; range = range->after)
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

static void *drop_segments(void *arg)
{
        gr_segments_context_gone(context);
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
        test_opened_twice();
        test_not_opened();
        test_no_addresses();
        test_structures();
        test_end_at_barrier();
        /* Last: what they touch is cleared for every test after them. */
        test_hint();
        test_large_extents();
        return GR_CHECK_RESULT();
}
