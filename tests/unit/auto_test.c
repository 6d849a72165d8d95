/*
 * GR_POOL_AUTO: who serves a request, and the fastbins, against a GPU that is only a clock and notices what is handed
 * out or given back too early.
 *
 *   auto_test [mapped]     without mapped memory, or with it
 */
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "alloc/pool.h"
#include "check.h"
#include "core.h"
#include "reclaim/trim.h"
#include "segment/split.h"
#include "split_gpu.h"

/* Where memory can be mapped, segments serve large requests from the first one on; the bins do where it cannot. */
static void test_auto(void)
{
        struct gr_block_info info = {0};
        uint64_t ptr;

        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        ptr = gpu_take(50 * MIB);
        GR_CHECK_EQ(gr_pool_kind_is_split(context), gpu_mapping);
        GR_CHECK_EQ(gr_ledger_find(core.ledger, ptr, &info), 0);
        GR_CHECK_EQ(info.split, gpu_mapping);
        gpu_give(ptr, 50 * MIB);
        gpu_settle();
        gpu_end();
}

/* Where the driver has addresses for one expandable segment only, bins serve what would be in the other one. What is free
 * in the one that there is goes on serving. */
static void test_one_refused(void)
{
        struct gr_block_info info = {0};
        uint64_t large, small, charged;

        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        large = gpu_take(50 * MIB);
        gpu_give(large, 50 * MIB);
        gpu_refuse(SG_MEM_RESERVE, true);
        for (int i = 0; i < 2; i++) {
                small = gpu_take(200 * KIB);
                GR_CHECK_EQ(gr_ledger_find(core.ledger, small, &info), 0);
                GR_CHECK(!info.split);
                charged = gpu_device()->reserved_bytes;
                GR_CHECK_EQ(gpu_take(50 * MIB), large);
                GR_CHECK_EQ(gpu_device()->reserved_bytes, charged);
                gpu_give(large, 50 * MIB);
                gpu_give(small, 200 * KIB);
        }
        GR_CHECK_EQ(sg_calls(SG_MEM_ALLOC), 1); /* the second small one is of a bin */
        gpu_settle();
        gpu_end();
}

/* GR_POOL_AUTO in a process that once had 4 GiB live: 16 MiB may lie in the fastbins of one arena. */
static void begin_auto(void)
{
        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        atomic_store(&gpu_device()->peak_live_bytes, 4096 * MIB);
}

static uint64_t fastbin_bytes(void)
{
        return gr_arenas_fastbins(context);
}

static struct gr_fastbins *own_fastbins(void)
{
        return &gr_arena_own(context)->fastbins;
}

/* What is freed serves requests of its size as it is, the oldest first, and is part of something larger only then. */
static void test_exact(void)
{
        struct gr_block_info first, again;
        struct gr_split_place place;
        const size_t most = 9 * MIB - 700 * KIB, less = 3 * MIB + 700 * KIB;
        uint64_t charged, a, b, c, rest, hits;

        begin_auto();
        rest = gpu_take(64 * MIB);
        a = gpu_take(12 * MIB);
        gpu_give(a, 12 * MIB);
        GR_CHECK_EQ(fastbin_bytes(), 12 * MIB);
        a = gpu_take(most); /* merged, as it fits nowhere else */
        GR_CHECK_EQ(fastbin_bytes(), 0);
        b = gpu_take(less);
        GR_CHECK_EQ(b, a + most);
        GR_CHECK_EQ(gr_ledger_find(core.ledger, a, &first), 0);
        gpu_give(b, less);
        gpu_give(a, most);
        GR_CHECK_EQ(fastbin_bytes(), most + less);
        GR_CHECK(gr_budget_cached(gpu_device()) >= most + less);
        GR_CHECK_EQ(gr_ledger_find(core.ledger, a, &again), 0);
        GR_CHECK(!again.live);
        GR_CHECK_EQ(gr_split_find(&core, a + 1000, &place), 0);
        GR_CHECK(!place.live);
        GR_CHECK_EQ(gr_pool_free(&core, a), -EALREADY);
        GR_CHECK_EQ(gr_pool_free(&core, a + 512), -EALREADY);
        GR_CHECK(!gr_trim_has_none(context));
        GR_CHECK_EQ(gr_arena_alloc(context, less), 0); /* not usable yet */
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        hits = own_fastbins()->hits;
        GR_CHECK_EQ(gpu_take(less), b);
        GR_CHECK_EQ(gpu_take(most), a);
        GR_CHECK_EQ(own_fastbins()->hits, hits + 2);
        GR_CHECK_EQ(gr_ledger_find(core.ledger, a, &again), 0);
        GR_CHECK(again.live && again.generation != first.generation);
        c = gpu_take(5 * MIB);
        GR_CHECK_EQ(gr_ledger_find(core.ledger, c, &first), 0);
        GR_CHECK(first.generation != again.generation); /* they may be of one allocation of the driver's */
        GR_CHECK_EQ(gr_ledger_find(core.ledger, b, &again), 0);
        GR_CHECK(first.generation != again.generation);
        gpu_give(c, 5 * MIB);
        gr_split_trim_settle(context);
        charged = gpu_device()->reserved_bytes;
        gpu_give(a, most);
        gpu_give(b, less);
        GR_CHECK_EQ(gpu_take(12 * MIB), a);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, charged);
        GR_CHECK_EQ(fastbin_bytes(), 0);
        gpu_give(a, 12 * MIB);
        gr_split_trim_settle(context);
        a = gpu_take(7 * MIB);
        b = gpu_take(7 * MIB);
        gpu_give(b, 7 * MIB);
        gpu_give(a, 7 * MIB);
        GR_CHECK_EQ(fastbin_bytes(), 14 * MIB);
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
        GR_CHECK_EQ(fastbin_bytes(), 0);
        gpu_end();
}

/* They hold 2 MiB, or a 256th of the peak; where threads allocate beside each other one block of a 16th of it. */
static void test_room(void)
{
        struct gr_arena *arena;
        uint64_t a, b;

        begin_auto();
        a = gpu_take(8 * MIB);
        b = gpu_take(8 * MIB + 512);
        arena = gr_arena_own(context);
        gpu_give(a, 8 * MIB);
        GR_CHECK_EQ(fastbin_bytes(), 8 * MIB);
        gpu_give(b, 8 * MIB + 512); /* too much: all of them are merged */
        GR_CHECK_EQ(fastbin_bytes(), 0);
        GR_CHECK(gr_arena_fastbins_have_room(arena, 16 * MIB));
        GR_CHECK(!gr_arena_fastbins_have_room(arena, 16 * MIB + 1));
        atomic_store(&gpu_device()->peak_live_bytes, 32 * MIB);
        GR_CHECK(gr_arena_fastbins_have_room(arena, 2 * MIB));
        GR_CHECK(!gr_arena_fastbins_have_room(arena, 2 * MIB + 1));
        atomic_store(&context->arena_count, 2);
        atomic_store(&gpu_device()->peak_live_bytes, 4096 * MIB);
        GR_CHECK(gr_arena_fastbins_have_room(arena, 256 * MIB));
        GR_CHECK(!gr_arena_fastbins_have_room(arena, 256 * MIB + 1));
        a = gpu_take(2 * MIB);
        gpu_give(a, 2 * MIB);
        GR_CHECK(gr_arena_fastbins_have_room(arena, 6 * MIB));
        GR_CHECK(!gr_arena_fastbins_have_room(arena, 6 * MIB + 1));
        atomic_store(&context->arena_count, 1);
        gpu_settle();
        gpu_end();
}

/* A range is claimed under the lock of its home, once; without a home, or in a bin, it is not. */
static void test_claim(void)
{
        struct gr_block *block;
        uint64_t a, small;

        begin_auto();
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

        while ((gr_ledger_mix(one) ^ gr_ledger_mix(other)) >> (64 - GR_FASTBIN_LISTS_LOG2))
                other += 512;
        begin_auto();
        rest = gpu_take(64 * MIB);
        a = gpu_take(one);
        b = gpu_take(other);
        c = gpu_take(one);
        gpu_give(a, one);
        gpu_give(b, other);
        gpu_give(c, one);
        GR_CHECK_EQ(own_fastbins()->count, 3);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        GR_CHECK_EQ(gpu_take(other), b);
        GR_CHECK_EQ(gpu_take(one), a);
        GR_CHECK_EQ(gpu_take(one), c);
        GR_CHECK_EQ(own_fastbins()->count, 0);
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
        GR_CHECK_EQ(arena->fastbins.frees, 0); /* the slow path: another arena remembers it */
        gpu_give(own, 4 * MIB);
        GR_CHECK_EQ(arena->fastbins.frees, 1);
        GR_CHECK_EQ(arena->fastbins.count, 2);
        GR_CHECK_EQ(arena->fastbins.cached.bytes, 7 * MIB);
        return NULL;
}

/* What a thread frees waits in its own arena; another thread is served from there by merging. */
static void test_threads(void)
{
        uint64_t a, b, small, hits, frees;
        bool much = false;
        pthread_t thread;

        begin_auto();
        a = gpu_take(3 * MIB);
        b = gpu_take(20 * MIB);
        small = gpu_take(200 * KIB);
        GR_CHECK_EQ(gr_shard(), 0);
        GR_CHECK_EQ(pthread_create(&thread, NULL, give_elsewhere, &a), 0);
        pthread_join(thread, NULL);
        GR_CHECK_EQ(fastbin_bytes(), 7 * MIB);
        GR_CHECK_EQ(own_fastbins()->count, 0);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        GR_CHECK_EQ(gr_arena_alloc(context, 3 * MIB), 0);
        GR_CHECK_EQ(gpu_take(3 * MIB), a);
        GR_CHECK_EQ(fastbin_bytes(), 0);
        hits = own_fastbins()->hits;
        frees = own_fastbins()->frees;
        gpu_give(a, 3 * MIB); /* handed out the slow path, and yet */
        GR_CHECK_EQ(own_fastbins()->frees, frees + 1);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        GR_CHECK_EQ(gr_arena_alloc(context, 3 * MIB + 512), 0);
        GR_CHECK_EQ(own_fastbins()->hits, hits);
        GR_CHECK_EQ(gpu_take(3 * MIB - 100), a);
        GR_CHECK_EQ(own_fastbins()->hits, hits + 1);
        gpu_give(a, 3 * MIB - 100);
        GR_CHECK_EQ(own_fastbins()->frees, frees + 2);
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

/* A small request takes what is usable elsewhere before a barrier is laid for a better fit; no larger one does. */
static void test_slight(void)
{
        const size_t slight = MIB + 512 * KIB, more = 2 * MIB + 512 * KIB;
        uint64_t barriers, usable, waits, between, last, ptr;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        atomic_store(&gpu_device()->peak_live_bytes, 512 * MIB);
        usable = gpu_take(20 * MIB);
        between = gpu_take(3 * MIB);
        waits = gpu_take(3 * MIB);
        last = gpu_take(3 * MIB);
        gpu_give(usable, 20 * MIB);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        gpu_give(waits, 3 * MIB);
        barriers = core.counters.counts[GR_COUNTER_barriers];
        ptr = gpu_take(slight);
        GR_CHECK(ptr >= usable && ptr < usable + 20 * MIB);
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], barriers);
        GR_CHECK_EQ(gpu_take(more) & ~(4 * MIB - 1), waits & ~(4 * MIB - 1));
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], barriers + 1);
        (void)between, (void)last;
        gpu_end();
}

/* More than split leaves them is left to bins, as it takes less time there. */
static void test_least(void)
{
        struct gr_block_info info = {0};
        uint64_t a, b;

        begin_auto();
        a = gpu_take(GR_SPLIT_LEAST_AUTO_BYTES);
        b = gpu_take(GR_SPLIT_LEAST_AUTO_BYTES + 1);
        GR_CHECK(gr_ledger_find(core.ledger, a, &info) == 0 && !info.split);
        GR_CHECK(gr_ledger_find(core.ledger, b, &info) == 0 && info.split);
        gpu_give(a, GR_SPLIT_LEAST_AUTO_BYTES);
        gpu_give(b, GR_SPLIT_LEAST_AUTO_BYTES + 1);
        gpu_settle();
        gpu_end();
}

static uint32_t generation_of(uint64_t ptr)
{
        struct gr_block_info info = {0};

        GR_CHECK_EQ(gr_ledger_find(core.ledger, ptr, &info), 0);
        return info.generation;
}

/*
 * Whatever way a block is handed out, and by whichever arena: no other had its number. Few numbers are left out, as the
 * program is told 24 bits of them.
 */
static void test_generation(void)
{
        enum { TIMES = 300 };
        static uint32_t seen[3 * TIMES];
        unsigned shards[2];
        uint64_t a, rest;
        size_t count = 0;

        shards[0] = gr_shard();
        shards[1] = gr_shard_assign();
        GR_CHECK(shards[0] != shards[1]);
        begin_auto();
        rest = gpu_take(80 * MIB);
        for (unsigned i = 0; i < TIMES; i++) {
                gr_thread.shard = shards[i % 2] + 1;
                a = gpu_take(6 * MIB); /* behind a barrier */
                seen[count++] = generation_of(a);
                gpu_give(a, 6 * MIB);
                GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
                a = gpu_take(6 * MIB); /* the fast path */
                seen[count++] = generation_of(a);
                gpu_give(a, 6 * MIB);
                a = gpu_take(200 * KIB);
                seen[count++] = generation_of(a);
                gpu_give(a, 200 * KIB);
        }
        for (size_t i = 0; i < count; i++) {
                GR_CHECK(seen[i] < 2 * count);
                for (size_t j = 0; j < i; j++)
                        if (seen[i] == seen[j])
                                GR_CHECK_EQ(seen[i], UINT32_MAX);
        }
        gr_thread.shard = shards[0] + 1;
        gpu_give(rest, 80 * MIB);
        gpu_settle();
        gpu_end();
}

/* A loop over a small block uses the slack, so that one barrier readies many; it holds no more than that. */
static void test_spares_barriers(void)
{
        enum { PAIRS = 160 };
        uint64_t barriers, rest, ptr;

        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        rest = gpu_take(100 * MIB);
        barriers = core.counters.counts[GR_COUNTER_barriers];
        for (int i = 0; i < PAIRS; i++) {
                ptr = gpu_take(MIB);
                gpu_give(ptr, MIB);
        }
        GR_CHECK(core.counters.counts[GR_COUNTER_barriers] - barriers <= PAIRS / 8);
        GR_CHECK(gpu_device()->reserved_bytes <= (100 + 16 + 2) * MIB);
        gpu_give(rest, 100 * MIB);
        gpu_settle();
        gpu_end();
}

/* Where a limit has no room for more, a barrier comes at once: the request does not count as one that met the limit. */
static void test_spares_at_limit(enum gr_pool_kind pool)
{
        enum { PAIRS = 20 };
        uint64_t barriers, rest, ptr;

        gpu_begin(pool, GR_REUSE_AUTO);
        rest = gpu_take(100 * MIB);
        atomic_store(&gpu_device()->hard_bytes, 102 * MIB);
        ptr = gpu_take(700 * KIB);
        gpu_give(ptr, 700 * KIB);
        ptr = gpu_take(MIB);
        gpu_give(ptr, MIB);
        barriers = core.counters.counts[GR_COUNTER_barriers];
        for (int i = 0; i < PAIRS; i++) {
                ptr = gpu_take(MIB);
                gpu_give(ptr, MIB);
        }
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_limit_hits], 0);
        GR_CHECK(core.counters.counts[GR_COUNTER_barriers] <= barriers + PAIRS);
        gpu_give(rest, 100 * MIB);
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
        GR_CHECK_EQ(fastbin_bytes(), COUNT * bytes);
        GR_CHECK_EQ(gr_arena_alloc(context, bytes), 0); /* not usable yet */
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        hits = own_fastbins()->hits;
        for (int i = 0; i < COUNT; i++)
                GR_CHECK_EQ(gpu_take(bytes), ptrs[i]);
        GR_CHECK_EQ(own_fastbins()->hits, hits + COUNT);
        for (int i = 0; i < COUNT; i++)
                gpu_give(ptrs[i], bytes);
        large = gpu_take(MIB + 512 * KIB); /* merges them, as it fits nowhere */
        gpu_give(large, MIB + 512 * KIB);
        ptrs[0] = gpu_take(bytes);
        gpu_give(ptrs[0], bytes);
        GR_CHECK_EQ(fastbin_bytes(), bytes + MIB + 512 * KIB);
        GR_CHECK_EQ(own_fastbins()->large_bytes, MIB + 512 * KIB);

        gpu_give(gpu_take(40 * MIB), 40 * MIB);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        for (int i = 0; i < COUNT; i++)
                ptrs[i] = gpu_take(bytes);
        for (int i = 0; i < COUNT; i++)
                gpu_give(ptrs[i], bytes);
        gr_split_trim_settle(context);
        GR_CHECK_EQ(fastbin_bytes(), 0);
        GR_CHECK_EQ(own_fastbins()->large_bytes, 0);
        GR_CHECK_EQ(atomic_load(&context->split->waiting_bytes), COUNT * bytes);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        barriers = core.counters.counts[GR_COUNTER_barriers];
        ptrs[0] = gpu_take(MIB); /* of several of them */
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], barriers);
        GR_CHECK_EQ(atomic_load(&context->split->waiting_bytes), 0);
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
        GR_CHECK_EQ(fastbin_bytes(), 64 * MIB);
        barriers = core.counters.counts[GR_COUNTER_barriers];
        for (int i = 0; i < 10; i++) {
                GR_CHECK_EQ(gpu_take(64 * MIB), a);
                gpu_give(a, 64 * MIB);
        }
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], barriers + 10);
        GR_CHECK_EQ(fastbin_bytes(), 64 * MIB);
        a = gpu_take(64 * MIB);
        b = gpu_take(64 * MIB);
        gpu_give(a, 64 * MIB);
        GR_CHECK_EQ(fastbin_bytes(), 64 * MIB);
        gpu_give(b, 64 * MIB);
        GR_CHECK_EQ(fastbin_bytes(), 0); /* the second one does not fit, so that all are merged */
        a = gpu_take(20 * MIB);
        gpu_give(a, 20 * MIB);
        GR_CHECK_EQ(fastbin_bytes(), 0); /* less than half of the peak */
        gpu_settle();
        gpu_end();
}

/* A slight request takes what is usable before a barrier is laid for the range of its size; a larger one does not. */
static void test_slight_exact(void)
{
        const size_t slight = MIB + 512 * KIB, more = 20 * MIB;
        uint64_t barriers, usable, exact, larger, ptr;

        begin_auto();
        usable = gpu_take(40 * MIB);
        exact = gpu_take(slight);
        larger = gpu_take(more);
        ptr = gpu_take(3 * MIB); /* so that the two stay apart from what follows */
        gpu_give(usable, 40 * MIB);
        gr_split_trim_settle(context);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        atomic_store(&gpu_device()->peak_live_bytes, 8192 * MIB); /* room for both */
        gpu_give(exact, slight);
        gpu_give(larger, more);
        GR_CHECK_EQ(fastbin_bytes(), slight + more);
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
                GR_CHECK_EQ(fastbin_bytes(), early + late);
                atomic_store(&core.waits_for_others, true);
                gr_split_trim_settle(context);
                GR_CHECK_EQ(fastbin_bytes(), 0);
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
        GR_CHECK_EQ(fastbin_bytes(), MIB);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 0);
        gr_split_trim_settle_all(&core, gpu_device());
        GR_CHECK_EQ(gr_budget_returnable(gpu_device()), 0);
        gpu_give(b, MIB);
        gr_split_trim_settle_all(&core, gpu_device());
        GR_CHECK_EQ(gr_budget_returnable(gpu_device()), 2 * MIB);
        gpu_settle();
        gpu_end();
}

/* Where they cannot be handed out they are passed by, and what comes then merges them. */
static void test_waits(void)
{
        uint64_t barriers, a, b, rest;

        begin_auto();
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
        GR_CHECK(fastbin_bytes() > 0);
        gr_split_trim_unneeded(context);
        GR_CHECK_EQ(fastbin_bytes(), 0);
        GR_CHECK(gr_split_waiting(context)); /* for a barrier */
        a = gpu_take(8 * MIB);
        gpu_give(a, 8 * MIB);
        atomic_store(&core.streams_overlap, true);
        b = gpu_take(8 * MIB);
        GR_CHECK(b != a);
        GR_CHECK(core.counters.counts[GR_COUNTER_barriers] <= barriers + 2);
        gpu_give(b, 8 * MIB);
        GR_CHECK_EQ(fastbin_bytes(), 8 * MIB);
        gr_split_trim_settle(context);
        GR_CHECK(context->split->waiting_bytes >= 8 * MIB); /* no thread would lay a barrier for a part of it */
        gpu_give(rest, 80 * MIB);
        gpu_settle();
        gpu_end();
}

/*
 * Where a barrier costs streams their overlap, a range waits for its event. A loop over a small block uses the slack, so
 * that one look at the events readies many.
 */
static void test_dear(void)
{
        enum { PAIRS = 160 };
        uint64_t rest, ptr, polls, barriers;

        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        rest = gpu_take(100 * MIB);
        atomic_store(&core.streams_overlap, true);
        barriers = core.counters.counts[GR_COUNTER_barriers];
        polls = core.counters.counts[GR_COUNTER_polls];
        for (int i = 0; i < PAIRS; i++) {
                ptr = gpu_take(MIB);
                gpu_give(ptr, MIB);
                gpu_sync(); /* the events are not looked at here */
        }
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], barriers);
        GR_CHECK(core.counters.counts[GR_COUNTER_polls] - polls <= PAIRS / 8);
        GR_CHECK(own_fastbins()->hits >= PAIRS / 2);
        GR_CHECK(gpu_device()->reserved_bytes <= (100 + 16 + 2) * MIB);
        gpu_give(rest, 100 * MIB);
        gpu_settle();
        gpu_end();
}

/* With GPURECLAIM_REUSE=sync each free waits for the GPU, and what it frees is ready at once. */
static void test_sync(void)
{
        uint64_t ptr = 0, syncs;

        gpu_begin(GR_POOL_AUTO, GR_REUSE_SYNC);
        for (int i = 0; i < 3; i++) {
                syncs = core.counters.counts[GR_COUNTER_syncs];
                GR_CHECK(i == 0 || gpu_take(MIB) == ptr);
                ptr = i == 0 ? gpu_take(MIB) : ptr;
                gpu_give(ptr, MIB);
                GR_CHECK_EQ(core.counters.counts[GR_COUNTER_syncs], syncs + 1);
        }
        GR_CHECK_EQ(own_fastbins()->hits, 2);
        gpu_settle();
        gpu_end();
}

/* Those that end otherwise: by the driver, with one of their neighbours that must not be reused, with the context. */
static void test_ends(void)
{
        uint64_t a, b, c, rest;

        begin_auto();
        rest = gpu_take(80 * MIB);
        a = gpu_take(6 * MIB);
        b = gpu_take(3 * MIB);
        gr_thread.bypass_until_ns = UINT64_MAX;
        gpu_give(a, 6 * MIB);
        GR_CHECK_EQ(fastbin_bytes(), 0);
        gr_thread.bypass_until_ns = 0;
        a = gpu_take(6 * MIB);
        gpu_give(a, 6 * MIB);
        GR_CHECK_EQ(fastbin_bytes(), 6 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, b), 0);
        c = gpu_take(5 * MIB);
        gpu_give(b, 3 * MIB);
        GR_CHECK_EQ(fastbin_bytes(), 0);
        gpu_give(c, 5 * MIB); /* handed out before */
        GR_CHECK_EQ(fastbin_bytes(), 0);
        GR_CHECK_EQ(context->arenas_quiesced, 0);
        a = gpu_take(6 * MIB);
        gpu_give(a, 6 * MIB);
        GR_CHECK_EQ(fastbin_bytes(), 0);
        gpu_give(rest, 80 * MIB);
        gpu_settle();
        gpu_end();

        for (int dropped = 0; dropped < 2; dropped++) {
                begin_auto();
                gpu_take(80 * MIB);
                a = gpu_take(6 * MIB);
                gpu_give(a, 6 * MIB);
                GR_CHECK_EQ(fastbin_bytes(), 6 * MIB);
                if (dropped) {
                        gpu_forget();
                        gr_core_context_drop(context);
                        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
                        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 0);
                        GR_CHECK_EQ(fastbin_bytes(), 0);
                        GR_CHECK_EQ(gr_pool_free(&core, a), -ENOENT);
                }
                gpu_end();
        }
}

static uint64_t left[64];
static _Atomic unsigned left_count;

static void *free_left(void *arg)
{
        unsigned count;

        (void)arg;
        gr_shard_assign();
        while ((count = atomic_load(&left_count)) > 0)
                if (atomic_compare_exchange_strong(&left_count, &count, count - 1))
                        gr_pool_free(&core, left[count - 1]); /* or it has gone with its context */
        return NULL;
}

/* A context ends while threads free what they had in it, into fastbins and segments: nothing of it stays on the
 * accounts, and the next context has the same structures. */
static void test_ends_beside_frees(void)
{
        for (uint64_t seed = 1; seed <= 50; seed++) {
                uint64_t random = seed * 7919;
                unsigned until = (unsigned)(gpu_random(&random) % 64);
                pthread_t threads[3];

                begin_auto();
                for (int i = 0; i < 64; i++) {
                        left[i] = gpu_take((1 + gpu_random(&random) % 8) * MIB + (uint64_t)i % 2 * 512);
                        sg_disown(left[i]);
                }
                gpu_sync();
                atomic_store(&left_count, 64);
                for (int i = 0; i < 3; i++)
                        GR_CHECK_EQ(pthread_create(&threads[i], NULL, free_left, NULL), 0);
                while (atomic_load(&left_count) > until)
                        ;
                gr_core_context_drop(context);
                for (int i = 0; i < 3; i++)
                        pthread_join(threads[i], NULL);
                GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
                GR_CHECK_EQ(gr_budget_cached(gpu_device()), 0);
                GR_CHECK_EQ(gpu_device()->stranded_bytes, 0);
                GR_CHECK_EQ(fastbin_bytes(), 0);
                gpu_forget();
                GR_CHECK(gr_core_context_add(&core, sg_context_new(0), 0) == context);
                left[0] = gpu_take(3 * MIB);
                gpu_give(left[0], 3 * MIB);
                gpu_settle();
                gpu_end();
        }
}

/* What is done with fastbins, each by a thread that has to wait for them. */
enum deed { ADOPT, TAKE, PUT, MERGE, MERGE_SPLIT, DEEDS };

struct waiter {
        enum deed deed;
        struct gr_block *block;         /* out of the lists: CACHED, or what was taken */
        uint64_t ptr;                   /* that was handed out */
        struct gr_arena *_Atomic arena; /* the thread's own */
        _Atomic bool go, done;
};

static void *do_deed(void *arg)
{
        struct waiter *waiter = arg;
        bool much = false;

        atomic_store(&waiter->arena, gr_arena_own(context));
        while (!atomic_load(&waiter->go))
                usleep(100);
        switch (waiter->deed) {
        case ADOPT:
                waiter->ptr = gr_arena_adopt(waiter->block, 6 * MIB);
                break;
        case TAKE:
                waiter->block = gr_split_take(context, 4 * MIB, false);
                break;
        case PUT:
                GR_CHECK_EQ(gr_split_put(waiter->block, gr_fence_freed(context->fence, 6 * MIB), false, true, &much),
                            0);
                break;
        case MERGE:
        case MERGE_SPLIT:
        case DEEDS:
                gr_split_trim_settle(context);
                break;
        }
        atomic_store(&waiter->done, true);
        return NULL;
}

/* Fastbins, and what the fast path may take back, change under the lock that a free takes, and not beside it; they
 * are merged under split's as well. */
static void test_locked(void)
{
        for (enum deed deed = 0; deed < DEEDS; deed++) {
                struct waiter waiter = {.deed = deed};
                uint64_t ptr, other, count;
                struct gr_arena *arena;
                pthread_t thread;

                begin_auto();
                ptr = gpu_take(6 * MIB);
                other = gpu_take(4 * MIB);
                gpu_give(ptr, 6 * MIB);
                gpu_give(other, 4 * MIB);
                gpu_sync();
                GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
                if (deed == ADOPT || deed == PUT) {
                        waiter.block = gr_split_take(context, 6 * MIB, false);
                        GR_CHECK(waiter.block && waiter.block->ptr == ptr);
                }
                count = own_fastbins()->count;
                GR_CHECK_EQ(pthread_create(&thread, NULL, do_deed, &waiter), 0);
                while (!(arena = atomic_load(&waiter.arena)))
                        usleep(100);
                if (deed == TAKE || deed == MERGE) /* what lies there is this thread's */
                        arena = context->first_arena;
                if (deed == MERGE_SPLIT)
                        gr_lock(&context->split->lock);
                else
                        gr_arena_lock(arena);
                atomic_store(&waiter.go, true);
                for (int n = 0; n < 20 && !atomic_load(&waiter.done); n++)
                        usleep(1000);
                GR_CHECK(!atomic_load(&waiter.done));
                GR_CHECK_EQ(own_fastbins()->count, count);
                if (deed == ADOPT)
                        GR_CHECK_EQ(atomic_load(&waiter.block->state), GR_BLOCK_CACHED);
                if (deed == MERGE_SPLIT)
                        gr_unlock(&context->split->lock);
                else
                        gr_arena_unlock(arena);
                pthread_join(thread, NULL);
                switch (deed) {
                case ADOPT:
                        GR_CHECK_EQ(waiter.ptr, ptr);
                        GR_CHECK(gr_block_is_live(waiter.block));
                        GR_CHECK_EQ(gr_pool_free(&core, ptr), 0);
                        break;
                case TAKE:
                        GR_CHECK(waiter.block && waiter.block->ptr - ptr <= 6 * MIB); /* of both, merged */
                        GR_CHECK(gr_ledger_hand_out(waiter.block, 4 * MIB));
                        GR_CHECK_EQ(gr_pool_free(&core, waiter.block->ptr), 0);
                        break;
                case PUT:
                        GR_CHECK_EQ(atomic_load(&waiter.arena)->fastbins.count, 1);
                        break;
                case MERGE:
                case MERGE_SPLIT:
                case DEEDS:
                        GR_CHECK_EQ(fastbin_bytes(), 0);
                        break;
                }
                gpu_settle();
                gpu_end();
        }
}

/* Bins ask what all have only where they pass what they were granted. What split has is granted to nobody, so each who
 * frees asks. */
static void test_threshold(enum gr_pool_kind pool)
{
        uint64_t blocks[5];

        gpu_begin(pool, GR_REUSE_AUTO);
        core.wake = gpu_wake;
        gr_budget_set_threshold(gpu_device(), 256 * MIB);
        for (int i = 0; i < 5; i++)
                blocks[i] = gpu_take(60 * MIB);
        for (int i = 0; i < 4; i++)
                gpu_give(blocks[i], 60 * MIB);
        GR_CHECK(!gr_pool_wants_wake(context));
        gpu_wakes = 0;
        gpu_give(blocks[4], 60 * MIB);
        GR_CHECK(gr_budget_excess(gpu_device()) > 0);
        GR_CHECK(gpu_wakes > 0);
        gpu_settle();
        gpu_end();
}

/* What is free beside blocks in fastbins goes back with them, and not only as much as they are themselves. */
static void test_excess(void)
{
        uint64_t blocks[4], rest;

        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        rest = gpu_take(2048 * MIB);
        atomic_store(&context->split->ahead_refused, false); /* each extent is larger than its block from here on */
        for (int i = 0; i < 4; i++)
                blocks[i] = gpu_take(i % 2 ? 2 * MIB : 30 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, (2048 + 64) * MIB);
        for (int i = 0; i < 4; i += 2) /* which do not fit into fastbins */
                gpu_give(blocks[i], 30 * MIB);
        for (int i = 1; i < 4; i += 2)
                gpu_give(blocks[i], 2 * MIB);
        GR_CHECK_EQ(fastbin_bytes(), 4 * MIB);
        gr_budget_set_threshold(gpu_device(), 0);
        gpu_sync();
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        gr_trim_excess(&core);
        GR_CHECK_EQ(gr_budget_excess(gpu_device()), 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 2048 * MIB);
        gpu_give(rest, 2048 * MIB);
        gpu_settle();
        gpu_end();
}

/* Where decay is off, proactive reclaim learns what segments and fastbins held that no request needed. */
static void test_look(void)
{
        uint64_t a, b;

        begin_auto();
        a = gpu_take(40 * MIB);
        b = gpu_take(6 * MIB);
        gr_decay_look(context, GR_DECAY_LOOK_NS);
        gpu_give(a, 40 * MIB);
        gpu_give(b, 6 * MIB);
        GR_CHECK_EQ(fastbin_bytes(), 6 * MIB);
        gr_decay_look(context, 2 * GR_DECAY_LOOK_NS);
        gr_decay_look(context, 3 * GR_DECAY_LOOK_NS);
        GR_CHECK_EQ(context->decay->idle_bytes, 46 * MIB);
        gpu_settle();
        gpu_end();
}

/* Of blocks of other sizes in its list a search passes so many, and no more: other threads wait for its lock. */
static void test_passed(void)
{
        static struct gr_fastbins fastbins;
        static struct gr_block blocks[GR_FASTBIN_LOOK + 1];
        unsigned index = gr_fastbin_index(2 * MIB);
        size_t bytes = 2 * MIB;

        for (int i = 0; i <= GR_FASTBIN_LOOK; i++, bytes += 512) {
                while (gr_fastbin_index(bytes) != index)
                        bytes += 512;
                blocks[i].capacity_bytes = bytes;
                blocks[i].next = i < GR_FASTBIN_LOOK ? &blocks[i + 1] : NULL;
        }
        fastbins.lists[index].first = &blocks[0];
        for (int i = 0; i < GR_FASTBIN_LOOK; i++)
                GR_CHECK(gr_fastbin_find(&fastbins, blocks[i].capacity_bytes) == &blocks[i]);
        GR_CHECK(!gr_fastbin_find(&fastbins, blocks[GR_FASTBIN_LOOK].capacity_bytes));
}

int main(int argc, char **argv)
{
        gpu_mapping = argc == 2 && !strcmp(argv[1], "mapped");
        test_auto();
        test_threshold(GR_POOL_AUTO);
        test_threshold(GR_POOL_SPLIT);
        if (!gpu_mapping)
                return GR_CHECK_RESULT();
        test_one_refused();
        test_exact();
        test_room();
        test_claim();
        test_list_shared();
        test_passed();
        test_threads();
        test_least();
        test_generation();
        test_slight();
        test_spares_barriers();
        test_spares_at_limit(GR_POOL_AUTO);
        test_spares_at_limit(GR_POOL_SPLIT);
        test_small();
        test_alone();
        test_slight_exact();
        test_dear();
        test_sync();
        test_waits_in_order();
        test_told();
        test_waits();
        test_ends();
        test_ends_beside_frees();
        test_excess();
        test_look();
        test_locked();
        return GR_CHECK_RESULT();
}
