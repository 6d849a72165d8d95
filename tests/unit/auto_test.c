/*
 * GR_POOL_AUTO: who serves a request, and when its fastbins end, against a GPU that is only a clock and notices what is
 * handed out or given back too early.
 *
 *   auto_test [mapped]     without mapped memory, or with it
 */
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "alloc/pool.h"
#include "cache/arenas.h"
#include "check.h"
#include "core.h"
#include "reclaim/trim.h"
#include "segment/segments_serve.h"
#include "segments_gpu.h"

/* Where memory can be mapped, segments serve large requests from the first one on; the bins do where it cannot. */
static void test_auto(void)
{
        struct gr_block_info info = {0};
        uint64_t ptr;

        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        ptr = gpu_take(50 * MIB);
        GR_CHECK_EQ(gr_pool_kind_has_segments(context), gpu_mapping);
        GR_CHECK_EQ(gr_ledger_find(core.ledger, ptr, &info), 0);
        GR_CHECK_EQ(info.is_range, gpu_mapping);
        gpu_give(ptr, 50 * MIB);
        gpu_settle();
        gpu_end();
}

/*
 * Where the driver has addresses for one expandable segment only, bins serve what would be in the other one. What is
 * free in the one that there is goes on serving.
 */
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
                GR_CHECK(!info.is_range);
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

/* More than segments leave them is left to bins, as it takes less time there. */
static void test_least(void)
{
        struct gr_block_info info = {0};
        uint64_t a, b;

        gpu_begin_auto();
        a = gpu_take(GR_SEGMENTS_LEAST_AUTO_BYTES);
        b = gpu_take(GR_SEGMENTS_LEAST_AUTO_BYTES + 1);
        GR_CHECK(gr_ledger_find(core.ledger, a, &info) == 0 && !info.is_range);
        GR_CHECK(gr_ledger_find(core.ledger, b, &info) == 0 && info.is_range);
        gpu_give(a, GR_SEGMENTS_LEAST_AUTO_BYTES);
        gpu_give(b, GR_SEGMENTS_LEAST_AUTO_BYTES + 1);
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
        gpu_begin_auto();
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
        gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, 102 * MIB);
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
 * Where a barrier costs streams their overlap, a range waits for its event. A loop over a small block uses the slack,
 * so that one look at the events readies many.
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
        GR_CHECK(gpu_own_fastbins()->hits >= PAIRS / 2);
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
        GR_CHECK_EQ(gpu_own_fastbins()->hits, 2);
        gpu_settle();
        gpu_end();
}

/* Those that end otherwise: by the driver, with one of their neighbours that must not be reused, with the context. */
static void test_ends(void)
{
        uint64_t a, b, c, rest;

        gpu_begin_auto();
        rest = gpu_take(80 * MIB);
        a = gpu_take(6 * MIB);
        b = gpu_take(3 * MIB);
        gr_thread.bypass_until_ns = UINT64_MAX;
        gpu_give(a, 6 * MIB);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 0);
        gr_thread.bypass_until_ns = 0;
        a = gpu_take(6 * MIB);
        gpu_give(a, 6 * MIB);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 6 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, b), 0);
        c = gpu_take(5 * MIB);
        gpu_give(b, 3 * MIB);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 0);
        gpu_give(c, 5 * MIB); /* handed out before */
        GR_CHECK_EQ(gr_arenas_fastbins(context), 0);
        GR_CHECK_EQ(context->arenas_quiesced, 0);
        a = gpu_take(6 * MIB);
        gpu_give(a, 6 * MIB);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 0);
        gpu_give(rest, 80 * MIB);
        gpu_settle();
        gpu_end();

        for (int dropped = 0; dropped < 2; dropped++) {
                gpu_begin_auto();
                gpu_take(80 * MIB);
                a = gpu_take(6 * MIB);
                gpu_give(a, 6 * MIB);
                GR_CHECK_EQ(gr_arenas_fastbins(context), 6 * MIB);
                if (dropped) {
                        gpu_forget();
                        gr_core_context_gone(context);
                        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
                        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 0);
                        GR_CHECK_EQ(gr_arenas_fastbins(context), 0);
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

                gpu_begin_auto();
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
                gr_core_context_gone(context);
                for (int i = 0; i < 3; i++)
                        pthread_join(threads[i], NULL);
                GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
                GR_CHECK_EQ(gr_budget_cached(gpu_device()), 0);
                GR_CHECK_EQ(gpu_device()->stranded_bytes, 0);
                GR_CHECK_EQ(gr_arenas_fastbins(context), 0);
                gpu_forget();
                GR_CHECK(gr_core_context_add(&core, sg_context_new(0), 0) == context);
                left[0] = gpu_take(3 * MIB);
                gpu_give(left[0], 3 * MIB);
                gpu_settle();
                gpu_end();
        }
}

/* What is done with fastbins, each by a thread that has to wait for them. */
enum deed { ADOPT, TAKE, PUT, MERGE, MERGE_RANGES, DEEDS };

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
                waiter->ptr = gr_arena_adopt(waiter->arena, waiter->block, 6 * MIB);
                break;
        case TAKE:
                waiter->block = gr_segments_take(context, 4 * MIB, GR_SEGMENTS_FROM_CLOSE);
                break;
        case PUT:
                GR_CHECK_EQ(gr_segments_put(waiter->block, gr_fence_note_freed(context->fence, 6 * MIB),
                                            GR_SEGMENTS_PUT_WAITS, &much),
                            0);
                break;
        case MERGE:
        case MERGE_RANGES:
        case DEEDS:
                gr_segments_trim_merge_fastbins(context);
                break;
        }
        atomic_store(&waiter->done, true);
        return NULL;
}

/* Fastbins, and what the fast path may take back, change under the lock that a free takes, and not beside it; they
 * are merged under the segments' as well. */
static void test_locked(void)
{
        for (enum deed deed = 0; deed < DEEDS; deed++) {
                struct waiter waiter = {.deed = deed};
                uint64_t ptr, other, count;
                struct gr_arena *arena;
                pthread_t thread;

                gpu_begin_auto();
                ptr = gpu_take(6 * MIB);
                other = gpu_take(4 * MIB);
                gpu_give(ptr, 6 * MIB);
                gpu_give(other, 4 * MIB);
                gpu_sync();
                GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
                if (deed == ADOPT || deed == PUT) {
                        waiter.block = gr_segments_take(context, 6 * MIB, GR_SEGMENTS_FROM_CLOSE);
                        GR_CHECK(waiter.block && waiter.block->ptr == ptr);
                }
                count = gpu_own_fastbins()->count;
                GR_CHECK_EQ(pthread_create(&thread, NULL, do_deed, &waiter), 0);
                while (!(arena = atomic_load(&waiter.arena)))
                        usleep(100);
                if (deed == TAKE || deed == MERGE) /* what lies there is this thread's */
                        arena = context->first_arena;
                if (deed == MERGE_RANGES)
                        gr_lock(&context->segments->lock);
                else
                        gr_arena_lock(arena);
                atomic_store(&waiter.go, true);
                for (int n = 0; n < 20 && !atomic_load(&waiter.done); n++)
                        usleep(1000);
                GR_CHECK(!atomic_load(&waiter.done));
                GR_CHECK_EQ(gpu_own_fastbins()->count, count);
                if (deed == ADOPT)
                        GR_CHECK_EQ(atomic_load(&waiter.block->state), GR_BLOCK_CACHED);
                if (deed == MERGE_RANGES)
                        gr_unlock(&context->segments->lock);
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
                case MERGE_RANGES:
                case DEEDS:
                        GR_CHECK_EQ(gr_arenas_fastbins(context), 0);
                        break;
                }
                gpu_settle();
                gpu_end();
        }
}

/*
 * Bins ask what all have only where they pass what they were granted. What segments have is granted to nobody, so each
 * who frees asks.
 */
static void test_threshold(enum gr_pool_kind pool)
{
        uint64_t blocks[5];

        gpu_begin(pool, GR_REUSE_AUTO);
        core.wake = gpu_wake;
        gr_budget_set_limit(gpu_device(), GR_LIMIT_THRESHOLD, 256 * MIB);
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
        rest = gpu_take(1024 * MIB);
        atomic_store(&context->segments->extra_from_ns, 0); /* each extent is larger than its block from here on */
        for (int i = 0; i < 4; i++)
                blocks[i] = gpu_take(i % 2 ? 2 * MIB : 30 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, (1024 + 64) * MIB);
        for (int i = 0; i < 4; i += 2) /* which do not fit into fastbins */
                gpu_give(blocks[i], 30 * MIB);
        for (int i = 1; i < 4; i += 2)
                gpu_give(blocks[i], 2 * MIB);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 4 * MIB);
        gr_budget_set_limit(gpu_device(), GR_LIMIT_THRESHOLD, 0);
        gpu_sync();
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        gr_trim_excess(&core);
        GR_CHECK_EQ(gr_budget_excess(gpu_device()), 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 1024 * MIB);
        gpu_give(rest, 1024 * MIB);
        gpu_settle();
        gpu_end();
}

/* Where decay is off, proactive reclaim learns what segments and fastbins held that no request needed. */
static void test_look(void)
{
        uint64_t a, b;

        gpu_begin_auto();
        a = gpu_take(80 * MIB);
        b = gpu_take(6 * MIB);
        gr_decay_look(context, GR_DECAY_LOOK_NS);
        gpu_give(a, 80 * MIB);
        gpu_give(b, 6 * MIB);
        GR_CHECK_EQ(gr_arenas_fastbins(context), 6 * MIB);
        gr_decay_look(context, 2 * GR_DECAY_LOOK_NS);
        gr_decay_look(context, 3 * GR_DECAY_LOOK_NS);
        GR_CHECK_EQ(context->decay->unneeded_bytes, 86 * MIB);
        gpu_settle();
        gpu_end();
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
        test_least();
        test_generation();
        test_slight();
        test_spares_barriers();
        test_spares_at_limit(GR_POOL_AUTO);
        test_spares_at_limit(GR_POOL_SPLIT);
        test_dear();
        test_sync();
        test_ends();
        test_ends_beside_frees();
        test_excess();
        test_look();
        test_locked();
        return GR_CHECK_RESULT();
}
