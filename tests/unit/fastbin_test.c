/* Fastbins, against a GPU that is only a clock and notices what is handed out or given back too early. */
#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "alloc/pool.h"
#include "cache/arenas.h"
#include "check.h"
#include "core.h"
#include "reclaim/trim.h"
#include "segment/segments_serve.h"
#include "segments_gpu.h"

/* What is freed serves requests of its size as it is, the oldest first, and is part of something larger only then. */
static void test_exact(void)
{
        struct gr_block_info first, again;
        struct gr_segments_place place;
        const size_t most = 9 * MIB - 704 * KIB, less = 3 * MIB + 704 * KIB;
        uint64_t charged, a, b, c, rest, hits;

        gpu_begin_auto();
        rest = gpu_take(64 * MIB);
        a = gpu_take(12 * MIB);
        gpu_give(a, 12 * MIB);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 12 * MIB);
        a = gpu_take(most); /* merged, as it fits nowhere else */
        GR_CHECK_EQ(gr_arenas_fastbins(context), 0);
        b = gpu_take(less);
        GR_CHECK_EQ(b, a + most);
        GR_CHECK_EQ(gr_ledger_find(core.ledger, a, &first), 0);
        gpu_give(b, less);
        gpu_give(a, most);
        GR_CHECK_EQ(gr_arenas_fastbins(context), most + less);
        GR_CHECK(gr_budget_cached(gpu_device()) >= most + less);
        GR_CHECK_EQ(gr_ledger_find(core.ledger, a, &again), 0);
        GR_CHECK(!again.live);
        GR_CHECK_EQ(gr_segments_find(&core, a + 1000, &place), 0);
        GR_CHECK(!place.live);
        GR_CHECK_EQ(gr_pool_free(&core, a), -EALREADY);
        GR_CHECK_EQ(gr_pool_free(&core, a + 512), -EALREADY);
        GR_CHECK(!gr_trim_has_none(context));
        GR_CHECK_EQ(gr_arena_alloc(context, less), 0); /* not usable yet */
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        hits = gpu_own_fastbins()->hits;
        GR_CHECK_EQ(gpu_take(less), b);
        GR_CHECK_EQ(gpu_take(most), a);
        GR_CHECK_EQ(gpu_own_fastbins()->hits, hits + 2);
        GR_CHECK_EQ(gr_ledger_find(core.ledger, a, &again), 0);
        GR_CHECK(again.live && again.generation != first.generation);
        c = gpu_take(5 * MIB);
        GR_CHECK_EQ(gr_ledger_find(core.ledger, c, &first), 0);
        GR_CHECK(first.generation != again.generation); /* they may be of one allocation of the driver's */
        GR_CHECK_EQ(gr_ledger_find(core.ledger, b, &again), 0);
        GR_CHECK(first.generation != again.generation);
        gpu_give(c, 5 * MIB);
        gr_segments_trim_merge_fastbins(context);
        charged = gpu_device()->reserved_bytes;
        gpu_give(a, most);
        gpu_give(b, less);
        GR_CHECK_EQ(gpu_take(12 * MIB), a);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, charged);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 0);
        gpu_give(a, 12 * MIB);
        gr_segments_trim_merge_fastbins(context);
        a = gpu_take(7 * MIB);
        b = gpu_take(7 * MIB);
        gpu_give(b, 7 * MIB);
        gpu_give(a, 7 * MIB);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 14 * MIB);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        GR_CHECK_EQ(gpu_take(7 * MIB), b); /* the one that was freed first */
        GR_CHECK_EQ(gpu_take(7 * MIB), a);
        gpu_give(a, 7 * MIB);
        gpu_give(b, 7 * MIB);
        /* All of it goes back where memory is asked for. */
        charged = gr_budget_cached(gpu_device());
        gpu_sync();
        gr_fence_sync(context->fence);
        GR_CHECK_EQ(gr_trim(context, UINT64_MAX / 2), charged);
        gpu_give(rest, 64 * MIB);
        gpu_settle();
        gpu_end();

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO); /* takes no more memory than it must */
        gpu_give(gpu_take(2 * MIB), 2 * MIB);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 0);
        gpu_end();
}

/*
 * They hold 2 MiB, or a 64th of the peak, in ranges above 1 MiB; where threads allocate beside each other one block of
 * a 16th of it. When they are full half of these leaves.
 */
static void test_room(void)
{
        const size_t least = 3 * MIB - 4 * GR_HOST_PAGE_BYTES;
        struct gr_fastbins *fastbins;
        uint64_t ptrs[24], a, b, c;
        struct gr_arena *arena;

        gpu_begin_auto();
        a = gpu_take(32 * MIB);
        b = gpu_take(40 * MIB);
        c = gpu_take(65 * MIB);
        for (size_t i = 0; i < 24; i++)
                ptrs[i] = gpu_take(least + GR_HOST_PAGE_BYTES * (i % 8));
        arena = gr_arena_own(context);
        fastbins = &arena->fastbins;
        gpu_give(a, 32 * MIB);
        GR_CHECK_EQ(gr_fastbins_large_bytes(fastbins), 32 * MIB);
        gpu_give(b, 40 * MIB);
        GR_CHECK_EQ(gr_fastbins_large_bytes(fastbins), 40 * MIB);
        GR_CHECK(gr_arena_fastbins_have_room(arena, 24 * MIB));
        GR_CHECK(!gr_arena_fastbins_have_room(arena, 24 * MIB + 1));
        gpu_give(c, 65 * MIB); /* too large in any case: the other one stays */
        GR_CHECK_EQ(gr_fastbins_large_bytes(fastbins), 40 * MIB);
        gr_segments_trim_merge_fastbins(context);
        for (int i = 0; i < 24; i++) {
                gpu_give(ptrs[i], 3 * MIB);
                GR_CHECK(gr_fastbins_large_bytes(fastbins) <= 64 * MIB);
                GR_CHECK_EQ(fastbins->count, i < 21 ? i + 1 : i - 10); /* of 21 that fit 10 stay */
        }
        /* The oldest of all sizes left: of each of the 8 sizes there are some. */
        for (size_t i = 0; i < 8; i++)
                GR_CHECK(gr_arena_fastbin_epoch(arena, least + GR_HOST_PAGE_BYTES * i) > 0);
        gr_segments_trim_merge_fastbins(context);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 0);
        atomic_store(&gpu_device()->peak_live_bytes, 32 * MIB);
        GR_CHECK(gr_arena_fastbins_have_room(arena, 2 * MIB));
        GR_CHECK(!gr_arena_fastbins_have_room(arena, 2 * MIB + 1));
        atomic_store(&context->arena_count, 2);
        atomic_store(&gpu_device()->peak_live_bytes, 4096 * MIB);
        GR_CHECK(gr_arena_fastbins_have_room(arena, 256 * MIB));
        GR_CHECK(!gr_arena_fastbins_have_room(arena, 256 * MIB + 1));
        a = gpu_take(2 * MIB);
        gpu_give(a, 2 * MIB);
        GR_CHECK(gr_arena_fastbins_have_room(arena, 30 * MIB));
        GR_CHECK(!gr_arena_fastbins_have_room(arena, 30 * MIB + 1));
        atomic_store(&context->arena_count, 1);
        gpu_settle();
        gpu_end();
}

/* A large request for which no block can be there does not wait for the arena. */
static void test_no_wait(void)
{
        struct gr_arena *arena;
        uint64_t a;

        gpu_begin_auto();
        a = gpu_take(8 * MIB);
        gpu_give(a, 8 * MIB);
        arena = gr_arena_own(context);
        GR_CHECK_EQ(gr_fastbins_large_bytes(&arena->fastbins), 8 * MIB);
        atomic_store(&arena->lock.taken, 1);
        GR_CHECK_EQ(gr_arena_alloc(context, 8 * MIB + 1), 0);
        GR_CHECK_EQ(gr_arena_fastbin_epoch(arena, 8 * MIB + 1), 0);
        atomic_store(&arena->lock.taken, 0);
        GR_CHECK(gr_arena_fastbin_epoch(arena, 8 * MIB) > 0);
        GR_CHECK_EQ(gpu_take(8 * MIB), a);
        gpu_give(a, 8 * MIB);
        gpu_settle();
        gpu_end();
}

/* A range is claimed under the lock of its home, once; without a home, or in a bin, it is not. */
static void test_claim(void)
{
        struct gr_block *block;
        uint64_t a, small;

        gpu_begin_auto();
        a = gpu_take(8 * MIB);
        small = gpu_take(4 * KIB);
        GR_CHECK(!gr_arena_claim(&core, small));
        GR_CHECK(!gr_arena_claim(&core, a + 512));
        block = gr_arena_claim(&core, a);
        GR_CHECK(block && block->ptr == a && gr_block_state(block) == GR_BLOCK_CACHED);
        GR_CHECK(!gr_arena_claim(&core, a));
        GR_CHECK_EQ(gr_pool_free(&core, a), -EALREADY);
        GR_CHECK(block && gr_ledger_hand_out(block, 8 * MIB));
        GR_CHECK(!gr_arena_claim(&core, a));
        gpu_give(a, 8 * MIB);
        gpu_give(small, 4 * KIB);
        gpu_settle();
        gpu_end();
}

/* Sizes that share a list: the later one is taken from behind the earlier one, which stays to be had. */
static void test_list_shared(void)
{
        const size_t one = 2 * MIB;
        size_t other = one + 512;
        uint64_t a, b, c, rest;

        while ((gr_address_hash(one) ^ gr_address_hash(other)) >> (64 - GR_FASTBIN_LISTS_LOG2))
                other += 512;
        gpu_begin_auto();
        rest = gpu_take(64 * MIB);
        a = gpu_take(one);
        b = gpu_take(other);
        c = gpu_take(one);
        gpu_give(a, one);
        gpu_give(b, other);
        gpu_give(c, one);
        GR_CHECK_EQ(gpu_own_fastbins()->count, 3);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        GR_CHECK_EQ(gpu_take(other), b);
        GR_CHECK_EQ(gpu_take(one), a);
        GR_CHECK_EQ(gpu_take(one), c);
        GR_CHECK_EQ(gpu_own_fastbins()->count, 0);
        gpu_give(a, one);
        gpu_give(b, other);
        gpu_give(c, one);
        gpu_give(rest, 64 * MIB);
        gpu_settle();
        gpu_end();
}

/* In a thread with an arena of its own: frees what another thread was given, and what it was given itself. */
static void *give_elsewhere(void *ptr)
{
        struct gr_arena *arena;
        uint64_t own;

        while (gr_shard() == 0)
                gr_shard_assign();
        arena = gr_arena_own(context);
        GR_CHECK(arena != context->first_arena);
        own = gpu_take(4 * MIB);
        gpu_give(*(uint64_t *)ptr, 3 * MIB);
        GR_CHECK_EQ(arena->fastbins.frees, 0); /* it went back to where it was handed out */
        gpu_give(own, 4 * MIB);
        GR_CHECK_EQ(arena->fastbins.frees, 1);
        GR_CHECK_EQ(arena->fastbins.count, 1);
        GR_CHECK_EQ(arena->fastbins.cached.bytes, 4 * MIB);
        return NULL;
}

/*
 * What a thread frees goes back to the arena that handed it out, where that thread finds it; a third one is served from
 * there by merging.
 */
static void test_threads(void)
{
        uint64_t a, b, other, small, hits, frees;
        bool much = false;
        pthread_t thread;

        gpu_begin_auto();
        a = gpu_take(3 * MIB);
        b = gpu_take(20 * MIB);
        small = gpu_take(200 * KIB);
        GR_CHECK_EQ(gr_shard(), 0);
        GR_CHECK_EQ(pthread_create(&thread, NULL, give_elsewhere, &a), 0);
        pthread_join(thread, NULL);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 7 * MIB);
        GR_CHECK_EQ(gpu_own_fastbins()->count, 1);
        GR_CHECK_EQ(gpu_own_fastbins()->frees, 1);
        GR_CHECK_EQ(gr_arena_alloc(context, 3 * MIB), 0); /* not usable yet */
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        GR_CHECK_EQ(gr_arena_alloc(context, 4 * MIB), 0); /* in the other arena */
        GR_CHECK_EQ(gpu_take(3 * MIB), a);
        GR_CHECK_EQ(gpu_own_fastbins()->hits, 1);
        other = gpu_take(4 * MIB);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 0);
        gpu_give(other, 4 * MIB);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        gr_segments_trim_merge_fastbins(context);
        hits = gpu_own_fastbins()->hits;
        frees = gpu_own_fastbins()->frees;
        gpu_give(a, 3 * MIB); /* handed out the slow path, and yet */
        GR_CHECK_EQ(gpu_own_fastbins()->frees, frees + 1);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        GR_CHECK_EQ(gr_arena_alloc(context, 3 * MIB + 512), 0);
        GR_CHECK_EQ(gpu_own_fastbins()->hits, hits);
        GR_CHECK_EQ(gpu_take(3 * MIB - 100), a);
        GR_CHECK_EQ(gpu_own_fastbins()->hits, hits + 1);
        gpu_give(a, 3 * MIB - 100);
        GR_CHECK_EQ(gpu_own_fastbins()->frees, frees + 2);
        gr_arenas_quiesce(context);
        a = gpu_take(3 * MIB);
        GR_CHECK(!gr_arena_free(&core, a, &much));
        gr_arenas_resume(context);
        GR_CHECK(!gr_arena_free(&core, a, &much));
        gpu_give(a, 3 * MIB);
        gpu_give(small, 200 * KIB);
        gpu_give(b, 20 * MIB);
        gpu_settle();
        gpu_end();
}

/*
 * Small ranges wait for their size, too, as many as are freed. Merged before a barrier they wait in the queue: nothing
 * of them is free yet, as a small request that took it would have to lay one.
 */
static void test_small(void)
{
        enum { COUNT = 40 };
        uint64_t ptrs[COUNT], rest, large, barriers, hits;
        const size_t bytes = 700 * KIB;

        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        rest = gpu_take(100 * MIB);
        for (int i = 0; i < COUNT; i++)
                ptrs[i] = gpu_take(bytes);
        for (int i = 0; i < COUNT; i++)
                gpu_give(ptrs[i], bytes);
        GR_CHECK_EQ(gr_arenas_fastbins(context), COUNT * bytes);
        GR_CHECK_EQ(gr_arena_alloc(context, bytes), 0); /* not usable yet */
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        hits = gpu_own_fastbins()->hits;
        for (int i = 0; i < COUNT; i++)
                GR_CHECK_EQ(gpu_take(bytes), ptrs[i]);
        GR_CHECK_EQ(gpu_own_fastbins()->hits, hits + COUNT);
        for (int i = 0; i < COUNT; i++)
                gpu_give(ptrs[i], bytes);
        large = gpu_take(MIB + 512 * KIB); /* merges them, as it fits nowhere */
        gpu_give(large, MIB + 512 * KIB);
        ptrs[0] = gpu_take(bytes);
        gpu_give(ptrs[0], bytes);
        GR_CHECK_EQ(gr_arenas_fastbins(context), bytes + MIB + 512 * KIB);
        GR_CHECK_EQ(gpu_own_fastbins()->large_bytes, MIB + 512 * KIB);

        gpu_give(gpu_take(40 * MIB), 40 * MIB);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        for (int i = 0; i < COUNT; i++)
                ptrs[i] = gpu_take(bytes);
        for (int i = 0; i < COUNT; i++)
                gpu_give(ptrs[i], bytes);
        gr_segments_trim_merge_fastbins(context);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 0);
        GR_CHECK_EQ(gpu_own_fastbins()->large_bytes, 0);
        GR_CHECK_EQ(atomic_load(&context->segments->waiting_bytes), COUNT * bytes);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        barriers = core.counters.counts[GR_COUNTER_barriers];
        ptrs[0] = gpu_take(MIB); /* of several of them */
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], barriers);
        GR_CHECK_EQ(atomic_load(&context->segments->waiting_bytes), 0);
        gpu_give(ptrs[0], MIB);
        gpu_give(rest, 100 * MIB);
        gpu_settle();
        gpu_end();
}

/* A block that is half of all that the program ever had waits for its size, and only one; each reuse is one barrier. */
static void test_alone(void)
{
        uint64_t barriers, a, b;

        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        a = gpu_take(64 * MIB);
        gpu_give(a, 64 * MIB);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 64 * MIB);
        barriers = core.counters.counts[GR_COUNTER_barriers];
        for (int i = 0; i < 10; i++) {
                GR_CHECK_EQ(gpu_take(64 * MIB), a);
                gpu_give(a, 64 * MIB);
        }
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], barriers + 10);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 64 * MIB);
        a = gpu_take(64 * MIB);
        b = gpu_take(64 * MIB);
        gpu_give(a, 64 * MIB);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 64 * MIB);
        gpu_give(b, 64 * MIB);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 64 * MIB); /* the second one does not fit */
        GR_CHECK_EQ(gpu_take(128 * MIB), gr_min(a, b));     /* all are merged for a request that fits nowhere else */
        GR_CHECK_EQ(gr_arenas_fastbins(context), 0);
        gpu_give(gr_min(a, b), 128 * MIB);
        gr_segments_trim_merge_fastbins(context);
        a = gpu_take(20 * MIB);
        gpu_give(a, 20 * MIB);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 0); /* less than half of the peak */
        gpu_settle();
        gpu_end();
}

/* A slight request takes what is usable before a barrier is laid for the range of its size; a larger one does not. */
static void test_slight_exact(void)
{
        const size_t slight = MIB + 512 * KIB, more = 20 * MIB;
        uint64_t barriers, usable, exact, larger, ptr;

        gpu_begin_auto();
        usable = gpu_take(40 * MIB);
        exact = gpu_take(slight);
        larger = gpu_take(more);
        ptr = gpu_take(3 * MIB); /* so that the two stay apart from what follows */
        gpu_give(usable, 40 * MIB);
        gr_segments_trim_merge_fastbins(context);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        atomic_store(&gpu_device()->peak_live_bytes, 8192 * MIB); /* room for both */
        gpu_give(exact, slight);
        gpu_give(larger, more);
        GR_CHECK_EQ(gr_arenas_fastbins(context), slight + more);
        atomic_store(&gpu_device()->peak_live_bytes, 4096 * MIB);
        barriers = core.counters.counts[GR_COUNTER_barriers];
        usable = gpu_take(slight);
        GR_CHECK(usable != exact);
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], barriers);
        GR_CHECK_EQ(gpu_take(more), larger);
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], barriers + 1);
        gpu_give(larger, more);
        gpu_give(usable, slight);
        gpu_give(ptr, 3 * MIB);
        gpu_settle();
        gpu_end();
}

/*
 * Ranges that fastbins of several sizes give up before their epochs are usable wait in the order of these: what the GPU
 * is done with is not held up by what it still uses, where no barrier can be laid behind that.
 */
static void test_waits_in_order(void)
{
        for (unsigned later_first = 0; later_first < 2; later_first++) {
                size_t early = 600 * KIB, late = early + 512;
                uint64_t a, b, rest, charged;

                while (gr_fastbin_index(late) == gr_fastbin_index(early) ||
                       (gr_fastbin_index(late) > gr_fastbin_index(early)) != (later_first > 0))
                        late += 512;
                gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
                a = gpu_take(early);
                b = gpu_take(late);
                rest = gpu_take(GR_PAGE_BYTES - early - late); /* no more room in the page */
                charged = gpu_device()->reserved_bytes;
                gpu_give(a, early);
                GR_CHECK_EQ(gr_fence_close(context->fence), 0);
                gpu_sync();
                sg_work(context->handle, 0, b, SG_MS); /* goes on for the rest of the test */
                GR_CHECK_EQ(sg_free(&core, b), 0);
                GR_CHECK_EQ(gr_arenas_fastbins(context), early + late);
                atomic_store(&core.waits_for_others, true);
                gr_segments_trim_merge_fastbins(context);
                GR_CHECK_EQ(gr_arenas_fastbins(context), 0);
                GR_CHECK_EQ(gpu_take(early), a);
                GR_CHECK_EQ(gpu_device()->reserved_bytes, charged);
                atomic_store(&core.waits_for_others, false);
                gpu_give(a, early);
                gpu_give(rest, GR_PAGE_BYTES - early - late);
                gpu_settle();
                gpu_end();
        }
}

/* What lies in a fastbin beside a block of the program cannot go back, so the program is not told that it is free. */
static void test_told(void)
{
        uint64_t a, b;

        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        a = gpu_take(MIB);
        b = gpu_take(MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 2 * MIB);
        gpu_give(a, MIB);
        GR_CHECK_EQ(gr_arenas_fastbins(context), MIB);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 0);
        gr_segments_trim_merge_and_collect(&core, gpu_device());
        GR_CHECK_EQ(gr_budget_returnable(gpu_device()), 0);
        gpu_give(b, MIB);
        gr_segments_trim_merge_and_collect(&core, gpu_device());
        GR_CHECK_EQ(gr_budget_returnable(gpu_device()), 2 * MIB);
        gpu_settle();
        gpu_end();
}

/* Where they cannot be handed out they are passed by, and what comes then merges them. */
static void test_waits(void)
{
        uint64_t barriers, a, b, rest;

        gpu_begin_auto();
        rest = gpu_take(80 * MIB);
        a = gpu_take(6 * MIB);
        gpu_give(a, 6 * MIB);
        barriers = core.counters.counts[GR_COUNTER_barriers];
        gpu_capture(true);
        b = gpu_take(6 * MIB);
        GR_CHECK(b != a);
        gpu_capture(false);
        gpu_give(b, 6 * MIB);
        a = gpu_take(8 * MIB);
        gpu_give(a, 8 * MIB);
        GR_CHECK(gr_arenas_fastbins(context) > 0);
        gr_segments_trim_unneeded(context);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 0);
        GR_CHECK(gr_segments_have_waiting(context)); /* for a barrier */
        a = gpu_take(8 * MIB);
        gpu_give(a, 8 * MIB);
        atomic_store(&core.streams_overlap, true);
        b = gpu_take(8 * MIB);
        GR_CHECK(b != a);
        GR_CHECK(core.counters.counts[GR_COUNTER_barriers] <= barriers + 2);
        gpu_give(b, 8 * MIB);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 8 * MIB);
        gr_segments_trim_merge_fastbins(context);
        GR_CHECK(context->segments->waiting_bytes >= 8 * MIB); /* no thread would lay a barrier for a part of it */
        gpu_give(rest, 80 * MIB);
        gpu_settle();
        gpu_end();
}

/* Of blocks of other sizes in its list a search passes so many, and no more: other threads wait for its lock. */
static void test_passed(void)
{
        static struct gr_fastbins fastbins;
        static struct gr_block blocks[GR_FASTBIN_LOOK + 1];
        static struct gr_spin lock;
        unsigned index = gr_fastbin_index(2 * MIB);
        size_t bytes = 2 * MIB;

        for (int i = 0; i <= GR_FASTBIN_LOOK; i++, bytes += 512) {
                while (gr_fastbin_index(bytes) != index)
                        bytes += 512;
                blocks[i].capacity_bytes = bytes;
                blocks[i].next = i < GR_FASTBIN_LOOK ? &blocks[i + 1] : NULL;
        }
        fastbins.lists[index].first = &blocks[0];
        gr_spin_lock(&lock, GR_RANK_ARENA);
        for (int i = 0; i < GR_FASTBIN_LOOK; i++)
                GR_CHECK(gr_fastbin_find(&fastbins, blocks[i].capacity_bytes) == &blocks[i]);
        GR_CHECK(!gr_fastbin_find(&fastbins, blocks[GR_FASTBIN_LOOK].capacity_bytes));
        gr_spin_unlock(&lock, GR_RANK_ARENA);
}

int main(void)
{
        gpu_mapping = true;
        test_exact();
        test_room();
        test_no_wait();
        test_claim();
        test_list_shared();
        test_passed();
        test_threads();
        test_small();
        test_alone();
        test_slight_exact();
        test_waits_in_order();
        test_told();
        test_waits();
        return GR_CHECK_RESULT();
}
