/* Preallocated blocks: how many a class gets, whose they may be, and that threads share fences and blocks safely. */
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <unistd.h>

#include "alloc/pool.h"
#include "cache/arenas.h"
#include "cache/bins_trim.h"
#include "cache/preallocate.h"
#include "check.h"
#include "core.h"
#include "pool_gpu.h"
#include "reclaim/trim.h"
#include "scripted.h"

#define THREADS 8
#define ROUNDS  4
#define PAIRS   600

static struct gr_device *device;

static void start_with(enum gr_pool_kind pool, uint64_t card_bytes)
{
        pool_begin(&sg_driver, card_bytes, &(struct gr_config){.reuse = GR_REUSE_AUTO, .pool = pool});
        device = context->device;
        atomic_store(&device->total_bytes, card_bytes);
}

static void start(uint64_t card_bytes)
{
        start_with(GR_POOL_BINS, card_bytes);
}

/* All memory can be had back, and nothing was handed out while it was in use. */
static void finish(void)
{
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        gr_trim(context, UINT64_MAX);
        GR_CHECK_EQ(atomic_load(&device->reserved_bytes), 0);
        GR_CHECK_EQ(sg_cached_bytes(device), 0);
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        pool_end();
}

static void pairs(size_t bytes, int count)
{
        for (int i = 0; i < count; i++)
                GR_CHECK_EQ(sg_free(&core, alloc(bytes)), 0);
}

static void *leave_many(void *arg)
{
        uint64_t ptrs[32];

        (void)arg;
        for (int i = 0; i < 32; i++) {
                ptrs[i] = alloc(MIB);
                sg_work(context->handle, 0, ptrs[i], SG_MS);
        }
        for (int i = 0; i < 32; i++)
                GR_CHECK_EQ(sg_free(&core, ptrs[i]), 0);
        return NULL;
}

/* What a thread left that is gone serves another one, instead of fresh memory; not before all has passed, and until
 * then each fence earns a block. */
static void test_left(void)
{
        pthread_t thread;
        unsigned fresh;

        start(1024 * MIB);
        pairs(MIB, 4);
        GR_CHECK_EQ(pthread_create(&thread, NULL, leave_many, NULL), 0);
        pthread_join(thread, NULL);
        fresh = sg_calls(SG_MEM_ALLOC);
        GR_CHECK(fresh >= 32);
        for (int i = 0; i < 2000; i++) {
                uint64_t ptr = alloc(MIB);

                sg_work(context->handle, 0, ptr, 1000);
                GR_CHECK_EQ(sg_free(&core, ptr), 0);
        }
        GR_CHECK(sg_calls(SG_MEM_ALLOC) <= fresh + 4);
        GR_CHECK(gr_bin_count(&gr_arena_own(context)->bins[gr_class_of(MIB)]) >= 32);
        GR_CHECK(sg_counter(&core, GR_COUNTER_barriers) < 2000 / 16);
        finish();
}

/* An arena that has blocks of the class; NULL. */
static struct gr_arena *holder(unsigned class)
{
        for (unsigned i = 0; i < GR_SHARDS; i++)
                if (gr_arena_at(context, i) && gr_bin_count(&gr_arena_at(context, i)->bins[class]) > 0)
                        return gr_arena_at(context, i);
        return NULL;
}

/* Blocks that are not usable, or lie where a thread is at work, stay where they are. */
static void test_not_moved(void)
{
        struct gr_arena *own, *other;
        unsigned class = gr_class_of(MIB);
        uint64_t epoch;
        pthread_t thread;

        start(1024 * MIB);
        own = gr_arena_own(context);
        GR_CHECK_EQ(pthread_create(&thread, NULL, leave_many, NULL), 0);
        pthread_join(thread, NULL);
        other = holder(class);
        GR_CHECK(other && other != own);
        epoch = gr_arena_oldest_epoch(other, class);
        GR_CHECK(epoch > 0);
        GR_CHECK_EQ(gr_arena_oldest_epoch(own, class), 0);
        GR_CHECK_EQ(gr_arena_move(other, own, class, 64, epoch - 1), 0);
        GR_CHECK_EQ(gr_bin_count(&other->bins[class]), 32);
        GR_CHECK_EQ(gr_fence_barrier_for(context->fence, epoch), 0);
        GR_CHECK_EQ(gr_arena_move(other, own, class, 5, epoch), 5);
        GR_CHECK_EQ(gr_bin_count(&other->bins[class]), 27);
        GR_CHECK_EQ(gr_bin_count(&own->bins[class]), 5);
        GR_CHECK_EQ(sg_cached_bytes(device), 32 * MIB);
        GR_CHECK_EQ(gr_arena_move(other, own, class, 64, epoch), 27);
        GR_CHECK_EQ(sg_cached_bytes(device), 32 * MIB);
        GR_CHECK_EQ(gr_arenas_cached(context), 32 * MIB);
        finish();
}

/* So many epochs are closed, and have passed. */
static void pass_epochs(int count)
{
        for (int i = 0; i < count; i++) {
                pairs(4096, 1);
                GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        }
}

/* While all work is in order, what a thread freed of late is usable, but stays where it will look for it. */
static void test_stay_in_order(void)
{
        struct gr_arena *own, *other;
        unsigned class = gr_class_of(MIB);
        pthread_t thread;

        start(1024 * MIB);
        atomic_store(&context->fence->order, GR_ORDER_KEPT);
        own = gr_arena_own(context);
        GR_CHECK_EQ(pthread_create(&thread, NULL, leave_many, NULL), 0);
        pthread_join(thread, NULL);
        other = holder(class);
        GR_CHECK(other && other != own);
        gr_preallocate_or_gather(own, class);
        GR_CHECK_EQ(gr_bin_count(&other->bins[class]), 32);
        pass_epochs(5);
        gr_preallocate_or_gather(own, class);
        GR_CHECK_EQ(gr_bin_count(&other->bins[class]), 0);
        finish();
}

static void *leave_one(void *arg)
{
        GR_CHECK_EQ(sg_free(&core, alloc(*(size_t *)arg)), 0);
        return NULL;
}

/* The largest, of many sizes, stay where they are as well: whoever needs one looks there. */
static void test_large_stay(void)
{
        size_t bytes = 1100 * MIB;
        unsigned class = gr_class_of(bytes);
        struct gr_arena *other;
        pthread_t thread;

        start(8192 * MIB);
        GR_CHECK(class >= GR_CLASS_EXACT);
        GR_CHECK_EQ(pthread_create(&thread, NULL, leave_one, &bytes), 0);
        pthread_join(thread, NULL);
        other = holder(class);
        GR_CHECK(other && other != gr_arena_own(context));
        pass_epochs(8);
        GR_CHECK(!gr_preallocate_or_gather(gr_arena_own(context), gr_class_of(bytes)));
        GR_CHECK(holder(class) == other);
        finish();
}

/* One block more is paid for by fences, once they were more than the bin has blocks; also for one of two threads. */
static void test_earned(bool alone)
{
        size_t bytes = 4096;
        pthread_t thread;

        start(4096 * MIB);
        if (!alone) {
                GR_CHECK_EQ(pthread_create(&thread, NULL, leave_one, &bytes), 0);
                pthread_join(thread, NULL);
                pass_epochs(8);
        }
        pairs(MIB, 3);
        GR_CHECK_EQ(atomic_load(&device->preallocated_bytes), 0);
        pairs(MIB, 1);
        GR_CHECK_EQ(atomic_load(&device->preallocated_bytes), MIB);

        /* Those that it did not ask for count as well. */
        gr_arena_own(context)->bins[gr_class_of(MIB / 2)].cooldown = 3;
        pairs(MIB / 2, 4);
        GR_CHECK_EQ(atomic_load(&device->preallocated_bytes), MIB);
        GR_CHECK_EQ(gr_arena_own(context)->bins[gr_class_of(MIB / 2)].fences, 3);
        pairs(MIB / 2, 1);
        GR_CHECK_EQ(atomic_load(&device->preallocated_bytes), MIB + MIB / 2);

        /* Where there is no room for one, the looks at other bins are saved for a while. */
        atomic_fetch_add(&device->preallocated_bytes, 4096 * MIB / 256);
        pairs(MIB / 4, 4);
        GR_CHECK_EQ(gr_arena_own(context)->bins[gr_class_of(MIB / 4)].cooldown, alone ? 0 : 64);
        atomic_fetch_sub(&device->preallocated_bytes, 4096 * MIB / 256);

        /* Nor is there one where the cache is a byte too large. */
        for (int more = 0; more < 2; more++) {
                gr_arena_own(context)->bins[gr_class_of(MIB / 4)].fences = 100;
                gr_arena_own(context)->bins[gr_class_of(MIB / 4)].cooldown = 0;
                gr_budget_set_limit(device, GR_LIMIT_THRESHOLD, gr_budget_cached(device) - 1 + more);
                GR_CHECK_EQ(gr_preallocate_or_gather(gr_arena_own(context), gr_class_of(MIB / 4)), more);
        }
        finish();
}

/* Where nothing could go back those that are there still count. */
static void test_trim_in_vain(void)
{
        start(4096 * MIB);
        sg_work(context->handle, 0, 0, 3600000 * SG_MS);
        pairs(MIB, 20);
        GR_CHECK(atomic_load(&device->preallocated_bytes) > 0);
        for (uint64_t before = device->preallocated_bytes, n = 0; n < 2; n++) {
                GR_CHECK_EQ(gr_trim(context, n ? MIB : UINT64_MAX), 0);
                GR_CHECK_EQ(atomic_load(&device->preallocated_bytes), before);
        }
        finish();
}

static struct {
        sem_t there, go;
        struct gr_arena *arena;
        _Atomic bool done;
} asking;

static void *ask(void *arg)
{
        asking.arena = gr_arena_own(context);
        sem_post(&asking.there);
        sem_wait(&asking.go);
        GR_CHECK(!gr_preallocate_or_gather(gr_arena_own(context), gr_class_of(MIB)));
        atomic_store(&asking.done, true);
        return arg;
}

static bool is_done_soon(void)
{
        for (int n = 0; n < 20 && !atomic_load(&asking.done); n++)
                usleep(500);
        return atomic_load(&asking.done);
}

/* What is noted of a bin after a look at those of others is noted with its lock held, as before it. */
static void test_locked(void)
{
        struct gr_arena *own;
        pthread_t thread;

        start(1024 * MIB);
        pass_epochs(8);
        pairs(MIB, 1); /* too late to move */
        own = gr_arena_own(context);
        sem_init(&asking.there, 0, 0);
        sem_init(&asking.go, 0, 0);
        asking.done = false;
        GR_CHECK_EQ(pthread_create(&thread, NULL, ask, NULL), 0);
        sem_wait(&asking.there);
        GR_CHECK(asking.arena != own);
        atomic_store(&own->lock.taken, 1);
        sem_post(&asking.go);
        GR_CHECK(!is_done_soon()); /* at the other's bin */
        atomic_store(&asking.arena->lock.taken, 1);
        atomic_store(&own->lock.taken, 0);
        GR_CHECK(!is_done_soon());
        atomic_store(&asking.arena->lock.taken, 0);
        pthread_join(thread, NULL);
        GR_CHECK_EQ(asking.arena->bins[gr_class_of(MIB)].fences, 1);
        sem_destroy(&asking.there);
        sem_destroy(&asking.go);
        finish();
}

/* A single thread gets no more preallocated blocks than before there were others; what went back it may earn again. */
static void test_bounds(void)
{
        start(4096 * MIB);
        pairs(MIB, 3000);
        GR_CHECK(atomic_load(&device->preallocated_bytes) > 8 * MIB);
        GR_CHECK(atomic_load(&device->preallocated_bytes) <= 4096 * MIB / 256);
        GR_CHECK(atomic_load(&device->reserved_bytes) <= 4096 * MIB / 256 + 2 * MIB);
        GR_CHECK_EQ(gr_bins_trim(context, UINT64_MAX), 0); /* nothing is idle */
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        GR_CHECK_EQ(atomic_load(&device->preallocated_bytes), 4096 * MIB / 256);
        GR_CHECK(gr_bins_trim_class(context, gr_class_of(MIB), 4 * MIB) > 0);
        GR_CHECK_EQ(atomic_load(&device->preallocated_bytes), 4096 * MIB / 256 - 4 * MIB);
        pairs(MIB, 3000);
        GR_CHECK_EQ(atomic_load(&device->preallocated_bytes), 4096 * MIB / 256);
        finish();
}

/* With a context goes what its bins had: the next one may earn as much, and other contexts of the card keep theirs. */
static void test_ends(void)
{
        struct gr_context *other;
        uint64_t most = 4096 * MIB / 256;

        start(4096 * MIB);
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        for (int i = 0; i < 20; i++) { /* earns some, too */
                uint64_t ptr = 0;

                GR_CHECK_EQ(sg_alloc(other, MIB, &ptr), 0);
                GR_CHECK_EQ(sg_free(&core, ptr), 0);
        }
        for (int round = 0; round < 3; round++) {
                uint64_t before;

                pairs(MIB, 3000);
                GR_CHECK_EQ(atomic_load(&device->preallocated_bytes), most);
                before = sg_counter(&core, GR_COUNTER_barriers);
                pairs(MIB, 1000);
                GR_CHECK(sg_counter(&core, GR_COUNTER_barriers) - before <= 1000 / 8);
                sg_context_destroy(context->handle);
                gr_core_context_gone(context);
                GR_CHECK_EQ(atomic_load(&device->preallocated_bytes), atomic_load(&other->preallocated_bytes));
                context = gr_core_context_add(&core, sg_context_new(0), 0);
        }
        GR_CHECK(atomic_load(&other->preallocated_bytes) > 0);
        GR_CHECK_EQ(gr_fence_sync(other->fence), 0);
        gr_trim(other, UINT64_MAX);
        GR_CHECK_EQ(atomic_load(&device->preallocated_bytes), 0);
        finish();
}

/* Where the card has room, one fence soon comes to pay for as many allocations as a class may have blocks. */
static void test_many(void)
{
        enum { MOST = 128 };
        uint64_t before;

        start(65536 * MIB);
        pairs(65536, MOST * MOST);
        GR_CHECK_EQ(gr_bin_count(&gr_arena_own(context)->bins[gr_class_of(65536)]), MOST);
        before = sg_counter(&core, GR_COUNTER_barriers);
        pairs(65536, 100 * MOST);
        GR_CHECK(sg_counter(&core, GR_COUNTER_barriers) - before <= 101);
        GR_CHECK_EQ(gr_bin_count(&gr_arena_own(context)->bins[gr_class_of(65536)]), MOST);

        /* Or a quarter of what all may have, in bytes. */
        pairs(MIB, MOST * MOST / 2);
        GR_CHECK_EQ(gr_bin_count(&gr_arena_own(context)->bins[gr_class_of(MIB)]), 64);
        finish();
}

/* From five threads on all may have more, and each class no more than its part. */
static void test_many_threads(void)
{
        size_t bytes = 65536;

        for (int others = 3; others < 5; others++) {
                start(4096 * MIB);
                pairs(bytes, 1);
                for (int i = 0; i < others; i++) {
                        pthread_t thread;

                        GR_CHECK_EQ(pthread_create(&thread, NULL, leave_one, &bytes), 0);
                        pthread_join(thread, NULL);
                }
                GR_CHECK_EQ(atomic_load(&context->arena_count), 1 + others);
                pairs(MIB, 3000);
                GR_CHECK_EQ(gr_bin_count(&gr_arena_own(context)->bins[gr_class_of(MIB)]), others < 4 ? 17 : 12);
                finish();
        }
}

/* A barrier that another one made needless is not laid. */
static void test_barrier_for(void)
{
        uint64_t epoch;
        unsigned queries;

        start(1024 * MIB);
        pairs(MIB, 1);
        epoch = gr_arena_oldest_epoch(gr_arena_own(context), gr_class_of(MIB));
        GR_CHECK(!gr_fence_usable(context->fence, epoch));
        GR_CHECK_EQ(gr_fence_barrier_for(context->fence, epoch), 0);
        GR_CHECK(gr_fence_usable(context->fence, epoch));
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), 1);
        GR_CHECK_EQ(gr_fence_barrier_for(context->fence, epoch), 0);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), 1);

        /* The same for those who only look. */
        pairs(MIB, 1);
        epoch = gr_arena_oldest_epoch(gr_arena_own(context), gr_class_of(MIB));
        gr_fence_look_for(context->fence, epoch);
        GR_CHECK(gr_fence_usable(context->fence, epoch));
        queries = sg_calls(SG_EVENT_QUERY);
        GR_CHECK(queries > 0);
        gr_fence_look_for(context->fence, epoch);
        GR_CHECK_EQ(sg_calls(SG_EVENT_QUERY), queries);

        /* Whose turn never ends keeps nobody from a fence of his own, and from closing only for the moment. */
        pairs(MIB, 1);
        epoch = gr_arena_oldest_epoch(gr_arena_own(context), gr_class_of(MIB));
        atomic_store(&context->fence->turn_taken, true);
        gr_fence_close_soon(context->fence);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD), 2);
        GR_CHECK_EQ(gr_fence_barrier_for(context->fence, epoch), 0);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), 2);
        GR_CHECK(atomic_load(&context->fence->turn_taken));
        atomic_store(&context->fence->turn_taken, false);
        pairs(MIB, 1);
        gr_fence_close_soon(context->fence);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD), 4);
        GR_CHECK(!atomic_load(&context->fence->turn_taken));
        finish();
}

/* A large block is worth more than the fence that a spare one saves. */
static void test_large(void)
{
        start(65536 * MIB);
        pairs(MIB + 1, 3000);
        GR_CHECK_EQ(atomic_load(&device->preallocated_bytes), 0);
        GR_CHECK_EQ(atomic_load(&device->reserved_bytes), 2 * MIB);
        finish();
}

/* One thread allocates and another frees: never more than one block live, and the next request finds it. */
static struct {
        sem_t there, back;
        uint64_t ptr; /* 0: no more come */
} handover;

static void *consume(void *arg)
{
        while (gr_shard() == *(unsigned *)arg) /* the other's */
                gr_shard_assign();
        for (;;) {
                sem_wait(&handover.there);
                if (!handover.ptr)
                        return NULL;
                GR_CHECK_EQ(sg_free(&core, handover.ptr), 0);
                sem_post(&handover.back);
        }
}

static void test_handed_over(enum gr_pool_kind pool, bool overlaps, size_t bytes)
{
        unsigned shard = gr_shard();
        uint64_t ptr;
        pthread_t thread;

        start_with(pool, 16384 * MIB);
        atomic_store(&core.streams_overlap, overlaps);
        sem_init(&handover.there, 0, 0);
        sem_init(&handover.back, 0, 0);
        ptr = alloc(512);
        GR_CHECK_EQ(pthread_create(&thread, NULL, consume, &shard), 0);
        for (int i = 0; i < 1000; i++) {
                handover.ptr = alloc(bytes);
                sg_work(context->handle, 0, handover.ptr, 1000);
                sem_post(&handover.there);
                sem_wait(&handover.back);
                sg_advance(10000); /* the work has ended */
        }
        handover.ptr = 0;
        sem_post(&handover.there);
        pthread_join(thread, NULL);
        GR_CHECK(sg_calls(SG_MEM_ALLOC) <= 8);
        GR_CHECK(sg_cached_bytes(device) <= 8 * gr_round_up(bytes, 2 * MIB));
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        finish();
        sem_destroy(&handover.there);
        sem_destroy(&handover.back);
}

static _Atomic unsigned wrong; /* of the threads, which cannot say so themselves */
static _Atomic bool stop;

static void *work(void *arg)
{
        uint64_t seed = (uint64_t)(uintptr_t)arg;

        for (int i = 0; i < PAIRS; i++) {
                uint64_t ptrs[3];
                unsigned count;

                seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
                count = 1 + (seed >> 40) % 3;
                for (unsigned j = 0; j < count; j++) {
                        if (sg_alloc(context, (size_t)65536 << ((seed >> 33) + j) % 5, &ptrs[j])) {
                                wrong++;
                                return NULL;
                        }
                        sg_work(context->handle, core.streams_overlap ? (unsigned)(seed >> 45) % SG_STREAMS : 0,
                                ptrs[j], (seed >> 50) % 64 * 100);
                }
                for (unsigned j = 0; j < count; j++)
                        wrong += sg_free(&core, ptrs[j]) != 0;
        }
        return NULL;
}

/* What goes on beside them: captures, trims, waits. */
static void *disturb(void *arg)
{
        (void)arg;
        for (unsigned i = 0; !stop; i++) {
                if (i % 3 == 0) {
                        gr_gate_begin_enter(&core.gate);
                        sg_capture(1);
                        gr_gate_begin_leave(&core.gate, true);
                        sg_advance(1000);
                        sg_capture(-1);
                        gr_gate_end(&core.gate);
                } else if (i % 3 == 1) {
                        gr_fence_poll(context->fence);
                        gr_trim(context, 4 * MIB);
                } else {
                        gr_fence_sync(context->fence);
                }
                sg_advance(20000);
        }
        return NULL;
}

/* Threads that come and go, on the default stream alone or on several. */
static void test_threads(bool overlaps, bool disturbed)
{
        pthread_t threads[THREADS], other;

        start(8192 * MIB);
        sg_set_tick(300);
        atomic_store(&core.streams_overlap, overlaps);
        stop = false;
        if (disturbed)
                GR_CHECK_EQ(pthread_create(&other, NULL, disturb, NULL), 0);
        for (uintptr_t round = 0; round < ROUNDS; round++) {
                for (uintptr_t i = 0; i < THREADS; i++)
                        GR_CHECK_EQ(pthread_create(&threads[i], NULL, work, (void *)(round * THREADS + i + 1)), 0);
                for (int i = 0; i < THREADS; i++)
                        pthread_join(threads[i], NULL);
        }
        stop = true;
        if (disturbed)
                pthread_join(other, NULL);
        GR_CHECK_EQ(wrong, 0);
        GR_CHECK(atomic_load(&device->preallocated_bytes) <= 8192 * MIB / 64);
        if (!disturbed)
                GR_CHECK(sg_counter(&core, GR_COUNTER_barriers) < ROUNDS * THREADS * PAIRS);
        finish();
}

int main(void)
{
        test_left();
        test_stay_in_order();
        test_not_moved();
        test_large_stay();
        test_earned(true);
        test_earned(false);
        test_locked();
        test_trim_in_vain();
        test_bounds();
        test_ends();
        test_many();
        test_many_threads();
        test_barrier_for();
        test_large();
        for (int overlaps = 0; overlaps < 2; overlaps++)
                for (size_t bytes = 4096; bytes <= 4 * MIB; bytes *= 4) {
                        test_handed_over(GR_POOL_BINS, overlaps, bytes);
                        test_handed_over(GR_POOL_AUTO, overlaps, bytes);
                }
        test_threads(false, false);
        test_threads(false, true);
        test_threads(true, false);
        test_threads(true, true);
        return GR_CHECK_RESULT();
}
