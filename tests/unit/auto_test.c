/*
 * GR_POOL_AUTO: the move from bins to split, and the fastbins of what comes then, against a GPU that is only a clock
 * and notices what is handed out or given back too early.
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

static void test_auto(void)
{
        uint64_t ptr;

        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        for (unsigned i = 1; i < 60 && !gr_pool_kind_is_split(context); i++) {
                ptr = gpu_take(i * 3 * MIB);
                gpu_give(ptr, i * 3 * MIB);
        }
        GR_CHECK(gr_pool_kind_is_split(context));
        GR_CHECK(gpu_take(50 * MIB) != 0);
        gr_split_bar(&core);
        GR_CHECK(!gr_pool_kind_is_split(context));
        gpu_end();

        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        for (unsigned i = 1; i < 200; i++) { /* what bins are good at: they stay */
                ptr = gpu_take(i % 4 * 8 * MIB + 2 * MIB);
                gpu_give(ptr, i % 4 * 8 * MIB + 2 * MIB);
        }
        GR_CHECK(!gr_pool_kind_is_split(context));
        gpu_end();
}

/* Of 800 MiB that live, or a little more, an eighth is too much to lie in bins where it does not fit. */
static void test_waste(uint64_t idle_bytes, bool moves)
{
        uint64_t live, idle, more[12];

        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        live = gpu_take(800 * MIB);
        idle = gpu_take(idle_bytes);
        gpu_give(idle, idle_bytes);
        for (unsigned i = 0; i < 12; i++)
                more[i] = gpu_take(10 * MIB);
        GR_CHECK_EQ(gr_pool_kind_is_split(context), moves);
        for (unsigned i = 0; i < 12; i++)
                gpu_give(more[i], 10 * MIB);
        gpu_give(live, 800 * MIB);
        gpu_settle();
        gpu_end();
}

/* A fresh context of GR_POOL_AUTO that has moved to split. */
static void begin_moved(void)
{
        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        atomic_store(&context->split_active, true);
}

static uint64_t quick_bytes(void)
{
        return context->fastbins->cached.bytes;
}

/* What is freed serves requests of its size as it is, the oldest first, and is part of something larger only then. */
static void test_quick(void)
{
        struct gr_block_info first, again;
        struct gr_split_place place;
        const size_t most = 9 * MIB - 700 * KIB, less = 3 * MIB + 700 * KIB;
        uint64_t barriers, charged, a, b, c, rest;

        begin_moved();
        if (core.driver->mem_reserve)
                atomic_store(&context->split->ahead_refused, true); /* they are merged before the segment grows */
        rest = gpu_take(64 * MIB);
        a = gpu_take(12 * MIB);
        gpu_give(a, 12 * MIB);
        context->split->credit_ns = 1; /* that is worth opening though it is larger, where no segment is expandable */
        context->split->credit_at_ns = sg_now_ns();
        a = gpu_take(most);
        b = gpu_take(less);
        GR_CHECK_EQ(b, a + most);
        GR_CHECK_EQ(gr_ledger_find(core.ledger, a, &first), 0);
        barriers = core.counters.counts[GR_COUNTER_barriers];
        gpu_give(b, less);
        gpu_give(a, most);
        GR_CHECK_EQ(quick_bytes(), most + less);
        GR_CHECK(gr_budget_cached(gpu_device()) >= most + less);
        GR_CHECK_EQ(gr_ledger_find(core.ledger, a, &again), 0);
        GR_CHECK(!again.live);
        GR_CHECK_EQ(gr_split_find(&core, a + 1000, &place), 0);
        GR_CHECK(!place.live);
        GR_CHECK_EQ(gr_pool_free(&core, a), -EALREADY);
        GR_CHECK_EQ(gr_pool_free(&core, a + 512), -EALREADY);
        GR_CHECK(!gr_trim_has_none(context));
        GR_CHECK_EQ(gpu_take(less), b);
        GR_CHECK_EQ(gpu_take(most), a);
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], barriers + 1);
        GR_CHECK_EQ(gr_ledger_find(core.ledger, a, &again), 0);
        GR_CHECK(again.live && again.generation > first.generation);
        c = gpu_take(5 * MIB);
        GR_CHECK_EQ(gr_ledger_find(core.ledger, c, &first), 0);
        GR_CHECK(first.generation != again.generation); /* they may be of one allocation of the driver's */
        GR_CHECK_EQ(gr_ledger_find(core.ledger, b, &again), 0);
        GR_CHECK(first.generation != again.generation);
        gpu_give(c, 5 * MIB);
        charged = gpu_device()->reserved_bytes;
        gpu_give(a, most);
        gpu_give(b, less);
        GR_CHECK_EQ(gpu_take(12 * MIB), a);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, charged);
        GR_CHECK_EQ(quick_bytes(), 0);
        gpu_give(a, 12 * MIB);
        a = gpu_take(7 * MIB);
        b = gpu_take(7 * MIB);
        gpu_give(b, 7 * MIB);
        gpu_give(a, 7 * MIB);
        GR_CHECK_EQ(gpu_take(7 * MIB), b); /* the one that was freed first */
        GR_CHECK_EQ(gpu_take(7 * MIB), a);
        gpu_give(a, 7 * MIB);
        gpu_give(b, 7 * MIB);
        GR_CHECK_EQ(quick_bytes(), 14 * MIB);
        /* All of it goes back where memory is asked for. */
        charged = gr_budget_cached(gpu_device());
        gpu_sync();
        gr_fence_sync(context->fence);
        GR_CHECK_EQ(gr_trim(context, UINT64_MAX / 2), charged);
        gpu_give(rest, 64 * MIB);
        gpu_settle();
        gpu_end();

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO); /* takes no more memory than it must */
        gpu_give(gpu_take(80 * MIB), 80 * MIB);
        gpu_give(gpu_take(6 * MIB), 6 * MIB);
        GR_CHECK_EQ(quick_bytes(), 0);
        gpu_end();
}

/* Sizes that share a list: the later one is taken from behind the earlier one, which stays to be had. */
static void test_quick_list_shared(void)
{
        const size_t one = 2 * MIB;
        size_t other = one + 512;
        uint64_t a, b, c, rest;

        while ((gr_ledger_mix(one) ^ gr_ledger_mix(other)) >> (64 - GR_FASTBIN_LISTS_LOG2))
                other += 512;
        begin_moved();
        rest = gpu_take(64 * MIB);
        a = gpu_take(one);
        b = gpu_take(other);
        c = gpu_take(one);
        gpu_give(a, one);
        gpu_give(b, other);
        gpu_give(c, one);
        GR_CHECK_EQ(context->fastbins->count, 3);
        GR_CHECK_EQ(gpu_take(other), b);
        GR_CHECK_EQ(gpu_take(one), a);
        GR_CHECK_EQ(gpu_take(one), c);
        GR_CHECK_EQ(context->fastbins->count, 0);
        gpu_give(a, one);
        gpu_give(b, other);
        gpu_give(c, one);
        gpu_give(rest, 64 * MIB);
        gpu_settle();
        gpu_end();
}

static void *give_elsewhere(void *ptr)
{
        uint64_t own = gpu_take(7 * MIB);

        gpu_give(*(uint64_t *)ptr, 6 * MIB);
        gpu_give(own, 7 * MIB);
        return NULL;
}

/* What one thread frees another is handed; both take the fast path, for all but small blocks. */
static void test_quick_threads(void)
{
        uint64_t a, b, small, hits, frees;
        bool much = false;
        pthread_t thread;

        begin_moved();
        a = gpu_take(6 * MIB);
        b = gpu_take(20 * MIB);
        small = gpu_take(200 * KIB);
        GR_CHECK(!gr_arena_free(&core, small, &much));
        hits = context->fastbins->hits;
        frees = context->fastbins->frees;
        GR_CHECK_EQ(pthread_create(&thread, NULL, give_elsewhere, &a), 0);
        pthread_join(thread, NULL);
        GR_CHECK_EQ(context->fastbins->frees, frees + 2);
        GR_CHECK_EQ(context->fastbins->count, 2);
        GR_CHECK_EQ(quick_bytes(), 13 * MIB);
        GR_CHECK_EQ(gr_arena_alloc(context, 6 * MIB), 0); /* not usable yet */
        GR_CHECK_EQ(gpu_take(6 * MIB), a);
        gpu_give(a, 6 * MIB); /* handed out the slow path, and yet */
        GR_CHECK_EQ(context->fastbins->frees, frees + 3);
        GR_CHECK_EQ(quick_bytes(), 13 * MIB);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        GR_CHECK_EQ(gr_arena_alloc(context, 6 * MIB + 512), 0);
        GR_CHECK_EQ(context->fastbins->hits, hits);
        GR_CHECK_EQ(gpu_take(6 * MIB - 100), a);
        GR_CHECK_EQ(context->fastbins->hits, hits + 1);
        GR_CHECK_EQ(context->fastbins->count, 1);
        gpu_give(a, 6 * MIB - 100);
        GR_CHECK_EQ(context->fastbins->frees, frees + 4);
        gr_arenas_quiesce(context);
        a = gpu_take(6 * MIB);
        GR_CHECK(!gr_arena_free(&core, a, &much));
        gr_arenas_resume(context);
        GR_CHECK(!gr_arena_free(&core, a, &much));
        gpu_give(a, 6 * MIB);
        gpu_give(small, 200 * KIB);
        gpu_give(b, 20 * MIB);
        gpu_settle();
        gpu_end();
}

/* What bins hold from before the move is asked back, whether segments are expandable or the driver's. */
static void test_bins_asked(void)
{
        uint64_t live, idle, more;

        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        core.wake = gpu_wake;
        live = gpu_take(100 * MIB);
        idle = gpu_take(100 * MIB);
        gpu_give(idle, 100 * MIB);
        atomic_store(&context->split_active, true);
        gpu_wakes = 0;
        more = gpu_take(45 * MIB); /* 245 of 250, and above 225 */
        GR_CHECK(gpu_wakes > 0);
        gpu_sync();
        gr_trim_excess(&core);
        GR_CHECK_EQ(gr_arenas_cached(context), 0);
        gpu_give(more, 45 * MIB);
        gpu_give(live, 100 * MIB);
        gpu_settle();
        gpu_end();
}

/* A small request takes what is usable elsewhere before a barrier is laid for a block of its size; no larger one does.
 * Where it is expandable: a segment of the driver's with room for more than two of them is too large for one.
 */
static void test_slight(void)
{
        const size_t slight = MIB + 512 * KIB, more = 3 * MIB;
        uint64_t barriers, rest, a, b, c, others[8];
        unsigned count = 0;

        begin_moved();
        rest = gpu_take(64 * MIB);
        a = gpu_take(80 * MIB);
        gpu_give(a, 80 * MIB);
        gpu_sync();
        gr_fence_sync(context->fence);
        a = gpu_take(71 * MIB); /* 9 MiB are left that need no barrier */
        barriers = core.counters.counts[GR_COUNTER_barriers];
        b = gpu_take(more);
        gpu_give(b, more);
        GR_CHECK_EQ(gpu_take(more), b);
        GR_CHECK_EQ(core.counters.counts[GR_COUNTER_barriers], barriers + 1);
        c = gpu_take(slight);
        gpu_give(c, slight);
        while (core.counters.counts[GR_COUNTER_barriers] == barriers + 1 && count < 8)
                others[count++] = gpu_take(slight);
        GR_CHECK(count > 2 && count < 8);
        GR_CHECK_EQ(others[count - 1], c);
        while (count > 0)
                gpu_give(others[--count], slight);
        gpu_give(b, more);
        gpu_give(a, 71 * MIB);
        gpu_give(rest, 64 * MIB);
        gpu_settle();
        gpu_end();
}

/* More than split leaves them is left to bins, as it takes less time there. */
static void test_least(void)
{
        struct gr_block_info info = {0};
        uint64_t a, b;

        begin_moved();
        a = gpu_take(GR_SPLIT_LEAST_AUTO_BYTES);
        b = gpu_take(GR_SPLIT_LEAST_AUTO_BYTES + 1);
        GR_CHECK(gr_ledger_find(core.ledger, a, &info) == 0 && !info.split);
        GR_CHECK(gr_ledger_find(core.ledger, b, &info) == 0 && info.split);
        gpu_give(a, GR_SPLIT_LEAST_AUTO_BYTES);
        gpu_give(b, GR_SPLIT_LEAST_AUTO_BYTES + 1);
        gpu_settle();
        gpu_end();
}

static uint32_t handouts_of(uint64_t ptr)
{
        struct gr_block_info info = {0};

        GR_CHECK_EQ(gr_ledger_find(core.ledger, ptr, &info), 0);
        return info.generation;
}

/* Whatever way a block is handed out: no other had its number. */
static void test_handouts(void)
{
        enum { TIMES = 300 };
        static uint32_t seen[3 * TIMES];
        uint64_t a, rest;
        size_t count = 0;

        begin_moved();
        rest = gpu_take(80 * MIB);
        for (unsigned i = 0; i < TIMES; i++) {
                a = gpu_take(6 * MIB); /* behind a barrier */
                seen[count++] = handouts_of(a);
                gpu_give(a, 6 * MIB);
                GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
                a = gpu_take(6 * MIB); /* the fast path */
                seen[count++] = handouts_of(a);
                gpu_give(a, 6 * MIB);
                a = gpu_take(200 * KIB);
                seen[count++] = handouts_of(a);
                gpu_give(a, 200 * KIB);
        }
        for (size_t i = 0; i < count; i++)
                for (size_t j = 0; j < i; j++)
                        if (seen[i] == seen[j])
                                GR_CHECK_EQ(seen[i], UINT32_MAX);
        gpu_give(rest, 80 * MIB);
        gpu_settle();
        gpu_end();
}

/* Where they cannot be handed out they are passed by, and what comes then merges them. */
static void test_quick_waits(void)
{
        uint64_t barriers, a, b, rest;

        begin_moved();
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
        GR_CHECK(quick_bytes() > 0);
        gr_split_trim_unneeded(context);
        GR_CHECK_EQ(quick_bytes(), 0);
        GR_CHECK(gr_split_waiting(context)); /* for a barrier */
        a = gpu_take(8 * MIB);
        gpu_give(a, 8 * MIB);
        atomic_store(&core.overlaps, true);
        b = gpu_take(8 * MIB);
        GR_CHECK(b != a);
        GR_CHECK(core.counters.counts[GR_COUNTER_barriers] <= barriers + 2);
        gpu_give(b, 8 * MIB);
        GR_CHECK(context->split->waiting_bytes > 0); /* as without fastbins */
        gpu_give(rest, 80 * MIB);
        gpu_settle();
        gpu_end();
}

/* Those that end otherwise: by the driver, with one of their neighbours that must not be reused, with the context. */
static void test_quick_ends(void)
{
        uint64_t a, b, c, rest;

        begin_moved();
        rest = gpu_take(80 * MIB);
        a = gpu_take(6 * MIB);
        b = gpu_take(3 * MIB);
        gr_thread.bypass_until_ns = UINT64_MAX;
        gpu_give(a, 6 * MIB);
        GR_CHECK_EQ(quick_bytes(), 0);
        gr_thread.bypass_until_ns = 0;
        a = gpu_take(6 * MIB);
        gpu_give(a, 6 * MIB);
        GR_CHECK_EQ(quick_bytes(), 6 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, b), 0);
        c = gpu_take(5 * MIB);
        gpu_give(b, 3 * MIB);
        GR_CHECK_EQ(quick_bytes(), 0);
        gpu_give(c, 5 * MIB); /* handed out before */
        GR_CHECK_EQ(quick_bytes(), 0);
        GR_CHECK_EQ(context->arenas_quiesced, 0);
        a = gpu_take(6 * MIB);
        gpu_give(a, 6 * MIB);
        GR_CHECK_EQ(quick_bytes(), 0);
        gpu_give(rest, 80 * MIB);
        gpu_settle();
        gpu_end();

        for (int dropped = 0; dropped < 2; dropped++) {
                begin_moved();
                gpu_take(80 * MIB);
                a = gpu_take(6 * MIB);
                gpu_give(a, 6 * MIB);
                GR_CHECK_EQ(quick_bytes(), 6 * MIB);
                if (dropped) {
                        gpu_forget();
                        gr_core_context_drop(context);
                        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
                        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 0);
                        GR_CHECK_EQ(quick_bytes(), 0);
                        GR_CHECK_EQ(gr_pool_free(&core, a), -ENOENT);
                }
                gpu_end();
        }
}

/* What is done with fastbins, each by a thread that has to wait for them. */
enum deed { ADOPT, TAKE, TAKE_SHORT, PUT, MERGE, MERGE_SPLIT, DEEDS };

struct waiter {
        enum deed deed;
        struct gr_block *block; /* out of the lists: CACHED, or what was taken */
        uint64_t ptr;           /* that was handed out */
        _Atomic bool begun, done;
};

static void *do_deed(void *arg)
{
        struct waiter *waiter = arg;
        bool much = false;

        gr_arena_own(context);
        atomic_store(&waiter->begun, true);
        switch (waiter->deed) {
        case ADOPT:
                waiter->ptr = gr_arena_adopt(waiter->block, 6 * MIB);
                break;
        case TAKE:
                waiter->block = gr_split_take(context, 4 * MIB, false);
                break;
        case TAKE_SHORT:
                waiter->ptr = gr_arena_alloc(context, 4 * MIB);
                break;
        case PUT:
                GR_CHECK_EQ(gr_split_put(waiter->block, gr_fence_freed(context->fence, 6 * MIB), false, &much), 0);
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
static void test_quick_locked(void)
{
        for (enum deed deed = 0; deed < DEEDS; deed++) {
                struct waiter waiter = {.deed = deed};
                uint64_t ptr, other, count;
                pthread_t thread;

                begin_moved();
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
                count = context->fastbins->count;
                if (deed == MERGE_SPLIT)
                        gr_lock(&context->split->lock);
                else
                        gr_arena_lock(context->first_arena);
                GR_CHECK_EQ(pthread_create(&thread, NULL, do_deed, &waiter), 0);
                while (!atomic_load(&waiter.begun))
                        usleep(1000);
                for (int n = 0; n < 20 && !atomic_load(&waiter.done); n++)
                        usleep(1000);
                GR_CHECK(!atomic_load(&waiter.done));
                GR_CHECK_EQ(context->fastbins->count, count);
                if (deed == ADOPT)
                        GR_CHECK_EQ(atomic_load(&waiter.block->state), GR_BLOCK_CACHED);
                if (deed == MERGE_SPLIT)
                        gr_unlock(&context->split->lock);
                else
                        gr_arena_unlock(context->first_arena);
                pthread_join(thread, NULL);
                switch (deed) {
                case ADOPT:
                        GR_CHECK_EQ(waiter.ptr, ptr);
                        GR_CHECK(gr_block_is_live(waiter.block));
                        GR_CHECK_EQ(gr_pool_free(&core, ptr), 0);
                        break;
                case TAKE:
                        GR_CHECK(waiter.block && waiter.block->ptr == other);
                        GR_CHECK(gr_ledger_hand_out(waiter.block, 4 * MIB));
                        GR_CHECK_EQ(gr_pool_free(&core, other), 0);
                        break;
                case TAKE_SHORT:
                        GR_CHECK_EQ(waiter.ptr, other);
                        GR_CHECK_EQ(gr_pool_free(&core, other), 0);
                        break;
                case PUT:
                        GR_CHECK_EQ(context->fastbins->count, 2);
                        break;
                case MERGE:
                case MERGE_SPLIT:
                case DEEDS:
                        GR_CHECK_EQ(context->fastbins->count, 0);
                        break;
                }
                gpu_settle();
                gpu_end();
        }
}

/* Bins ask what all have only where they pass what they were granted. What split has is granted to nobody, so each who
 * frees asks once it serves requests. */
static void test_moved_threshold(void)
{
        uint64_t bins[2], blocks[4];

        gpu_begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        core.wake = gpu_wake;
        gr_budget_set_threshold(gpu_device(), 256 * MIB);
        for (int i = 0; i < 2; i++)
                bins[i] = gpu_take(50 * MIB);
        for (int i = 0; i < 2; i++)
                gpu_give(bins[i], 50 * MIB);
        GR_CHECK(!gr_pool_wants_wake(context));
        gr_split_consider(context, 100 * MIB);
        GR_CHECK(gr_pool_kind_is_split(context));
        for (int i = 0; i < 4; i++)
                blocks[i] = gpu_take(60 * MIB);
        gpu_wakes = 0;
        for (int i = 0; i < 4; i++)
                gpu_give(blocks[i], 60 * MIB);
        GR_CHECK(gr_budget_excess(gpu_device()) > 0);
        GR_CHECK(gpu_wakes > 0);
        gpu_settle();
        gpu_end();
}

/* Of blocks of other sizes in its list a search passes so many, and no more: other threads wait for its lock. */
static void test_passed(void)
{
        static struct gr_fastbins fastbins;
        static struct gr_block blocks[GR_FASTBIN_LOOK + 1];
        struct gr_fastbin_list *list = gr_fastbin_list_of(&fastbins, 2 * MIB);
        size_t bytes = 2 * MIB;

        for (int i = 0; i <= GR_FASTBIN_LOOK; i++, bytes += 512) {
                while (gr_fastbin_list_of(&fastbins, bytes) != list)
                        bytes += 512;
                blocks[i].capacity_bytes = bytes;
                blocks[i].next = i < GR_FASTBIN_LOOK ? &blocks[i + 1] : NULL;
        }
        list->first = &blocks[0];
        for (int i = 0; i < GR_FASTBIN_LOOK; i++)
                GR_CHECK(gr_fastbin_find(&fastbins, blocks[i].capacity_bytes) == &blocks[i]);
        GR_CHECK(!gr_fastbin_find(&fastbins, blocks[GR_FASTBIN_LOOK].capacity_bytes));
}

int main(int argc, char **argv)
{
        const bool mapped = argc == 2 && !strcmp(argv[1], "mapped");

        gpu_mapping = mapped;
        test_auto();
        test_waste(130 * MIB, true);
        test_waste(90 * MIB, false);
        test_quick();
        test_quick_list_shared();
        test_passed();
        test_quick_threads();
        test_least();
        test_handouts();
        test_bins_asked();
        if (mapped)
                test_slight();
        test_quick_waits();
        test_quick_ends();
        test_quick_locked();
        test_moved_threshold();
        return GR_CHECK_RESULT();
}
