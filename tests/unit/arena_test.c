/* The fast path, and everything that takes a block away from it: other threads, exports, ends of contexts. */
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <unistd.h>

#include "alloc/pool.h"
#include "cache/bins_trim.h"
#include "cache/block_life.h"
#include "check.h"
#include "core.h"
#include "scripted.h"

#define MANY   4096 /* more than an arena remembers */
#define ROUNDS 3000

static struct gr_core core;
static struct gr_parts parts;
static struct gr_context *context;
static struct gr_device *device;

static void start(void)
{
        sg_reset(1024 * MIB);
        gr_core_init(&core, &parts, &sg_driver, &(struct gr_config){.reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS});
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        device = context->device;
}

static void finish(void)
{
        GR_CHECK_EQ(atomic_load(&device->reserved_bytes), sg_used_bytes(0));
        GR_CHECK_EQ(sg_misuses(), 0);
        gr_core_destroy(&core);
}

/* How many arenas know ptr among their recent blocks. */
static unsigned homes(uint64_t ptr)
{
        unsigned count = 0;

        for (unsigned i = 0; i < GR_SHARDS; i++) {
                struct gr_arena *arena = gr_arena_at(context, i);

                for (size_t j = 0; arena && j < 1u << GR_RECENT_LOG2; j++)
                        count += arena->recent[j] && arena->recent[j]->ptr == ptr;
        }
        return count;
}

static uint64_t alloc(size_t bytes)
{
        uint64_t ptr = 0;

        GR_CHECK_EQ(sg_alloc(context, bytes, &ptr), 0);
        return ptr;
}

/* A block that went the fast path. */
static uint64_t alloc_recent(size_t bytes)
{
        uint64_t ptr = alloc(bytes);

        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        GR_CHECK_EQ(alloc(bytes), ptr);
        GR_CHECK_EQ(homes(ptr), 1);
        return ptr;
}

struct elsewhere {
        uint64_t ptr;
        size_t bytes; /* to allocate; 0: ptr is freed */
        int rc;
};

static void *elsewhere_main(void *arg)
{
        struct elsewhere *work = arg;

        work->rc = work->bytes ? sg_alloc(context, work->bytes, &work->ptr) : sg_free(&core, work->ptr);
        return NULL;
}

static int elsewhere(struct elsewhere *work)
{
        pthread_t thread;

        GR_CHECK_EQ(pthread_create(&thread, NULL, elsewhere_main, work), 0);
        pthread_join(thread, NULL);
        return work->rc;
}

static void test_pair(void)
{
        uint64_t ptr;

        start();
        ptr = alloc_recent(4096);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        GR_CHECK_EQ(homes(ptr), 0);
        GR_CHECK_EQ(sg_cached_bytes(device), 4096);
        GR_CHECK_EQ(gr_pool_free(&core, ptr), -EALREADY);
        GR_CHECK_EQ(sg_cached_bytes(device), 4096);
        finish();
}

/* Each time a block is handed out it counts as another one: the program can ask which one it has. */
static void test_handouts(void)
{
        struct gr_block_info info = {0};
        uint64_t ptr;

        start();
        ptr = alloc_recent(4096);
        for (uint32_t times = 2; times < 5; times++) {
                GR_CHECK_EQ(gr_ledger_find(core.ledger, ptr, &info), 0);
                GR_CHECK_EQ(info.generation, times);
                GR_CHECK_EQ(sg_free(&core, ptr), 0);
                GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
                GR_CHECK_EQ(alloc(4096), ptr);
        }
        finish();
}

static void test_other_thread(void)
{
        struct elsewhere work = {0};
        uint64_t ptr;

        start();
        ptr = alloc_recent(4096);
        work.ptr = ptr;
        GR_CHECK_EQ(elsewhere(&work), 0);
        GR_CHECK_EQ(homes(ptr), 0);
        GR_CHECK_EQ(gr_pool_free(&core, ptr), -EALREADY);
        GR_CHECK_EQ(sg_cached_bytes(device), 4096);

        /* Another thread gets the address, and this one frees it for it. */
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        work = (struct elsewhere){.bytes = 4096};
        GR_CHECK_EQ(elsewhere(&work), 0);
        GR_CHECK_EQ(work.ptr, ptr);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        GR_CHECK_EQ(homes(ptr), 0);
        GR_CHECK_EQ(gr_pool_free(&core, ptr), -EALREADY);
        GR_CHECK_EQ(sg_cached_bytes(device), 4096);
        finish();
}

/* More than the arena remembers: those it had to forget are freed the slow path. */
static void test_many(void)
{
        static uint64_t ptrs[MANY];
        unsigned recent = 0;

        start();
        for (int round = 0; round < 2; round++) {
                for (int i = 0; i < MANY; i++)
                        ptrs[i] = alloc(512);
                recent = 0;
                for (int i = 0; i < MANY; i++)
                        recent += homes(ptrs[i]);
                for (int i = 0; i < MANY; i++)
                        GR_CHECK_EQ(sg_free(&core, ptrs[i]), 0);
                for (int i = 0; i < MANY; i++)
                        GR_CHECK_EQ(gr_pool_free(&core, ptrs[i]), -EALREADY);
                GR_CHECK_EQ(sg_cached_bytes(device), MANY * 512);
                GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        }
        GR_CHECK(recent > 512 && recent <= 1u << GR_RECENT_LOG2);
        GR_CHECK_EQ(sg_calls(SG_MEM_ALLOC), MANY);
        finish();
}

static void test_exported(void)
{
        uint64_t ptr;

        start();
        ptr = alloc_recent(4096);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, ptr), 0);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        GR_CHECK_EQ(sg_calls(SG_MEM_FREE), 1);
        GR_CHECK_EQ(sg_cached_bytes(device), 0);
        finish();
}

/* Where freed blocks can serve nobody again, a recent one goes to the driver, too. */
static void test_unfenced(bool overflow)
{
        uint64_t ptr;

        start();
        ptr = alloc_recent(4096);
        if (overflow)
                for (int i = 0; i < GR_ACCESSORS_MAX; i++)
                        GR_CHECK(gr_core_context_add(&core, sg_context_new(0), 0) != NULL);
        else
                atomic_store(&context->fence->broken, -EIO);
        GR_CHECK_EQ(homes(ptr), 1);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        GR_CHECK_EQ(sg_calls(SG_MEM_FREE), 1);
        GR_CHECK_EQ(sg_cached_bytes(device), 0);
        finish();
}

/* While arenas are shut the fast path hands out nothing, and the longer one gives no block a home. */
static void test_shut(void)
{
        uint64_t ptr;

        start();
        ptr = alloc(4096);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        gr_arenas_quiesce(context);
        gr_arenas_quiesce(context);
        gr_arenas_resume(context); /* one that wants it so is left */
        GR_CHECK_EQ(gr_arena_alloc(context, 4096), 0);
        GR_CHECK_EQ(alloc(4096), ptr);
        GR_CHECK_EQ(homes(ptr), 0);
        gr_arenas_resume(context);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        GR_CHECK_EQ(alloc(4096), ptr);
        GR_CHECK_EQ(homes(ptr), 1);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        finish();
}

/* To forget an address that is not among the recent blocks changes nothing, whoever is in its place. */
static void test_forget_others(void)
{
        struct gr_arena *arena;
        unsigned same = 0, empty = 0;
        uint64_t ptr;

        start();
        ptr = alloc_recent(4096);
        arena = gr_arena_own(context);
        for (uint64_t other = ptr + 512; same < 3 || empty < 3; other += 512) {
                if (gr_address_hash(other) >> (64 - GR_RECENT_LOG2) == gr_address_hash(ptr) >> (64 - GR_RECENT_LOG2))
                        same++;
                else
                        empty++;
                gr_arena_forget(arena, other);
                GR_CHECK_EQ(homes(ptr), 1);
        }
        gr_arena_forget(arena, ptr);
        GR_CHECK_EQ(homes(ptr), 0);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        finish();
}

/* Empty bins are passed by without their lock, which others may hold. */
static void test_empty_bins(void)
{
        struct gr_arena *own, *other;
        struct elsewhere work = {.bytes = 4096};

        start();
        own = gr_arena_own(context);
        GR_CHECK_EQ(elsewhere(&work), 0);
        other = NULL;
        for (unsigned i = 0; i < GR_SHARDS; i++)
                if (gr_arena_at(context, i) && gr_arena_at(context, i) != own)
                        other = gr_arena_at(context, i);
        GR_CHECK(other != NULL);
        atomic_store(&other->lock.taken, 1);
        alarm(20); /* or this waits for ever */
        for (unsigned class = 0; class < GR_CLASS_COUNT; class ++) {
                if (class < GR_CLASS_EXACT)
                        GR_CHECK_EQ(gr_arena_move(other, own, class, 1, UINT64_MAX), 0);
                GR_CHECK(gr_arena_take(other, class, class, 1, SIZE_MAX) == NULL);
                GR_CHECK_EQ(gr_bins_trim_class(context, class, UINT64_MAX), 0);
                GR_CHECK_EQ(gr_bins_trim_unneeded(context, class), 0);
        }
        alarm(0);
        atomic_store(&other->lock.taken, 0);
        GR_CHECK_EQ(sg_free(&core, work.ptr), 0);
        finish();
}

/*
 * Of blocks of one size the oldest is looked at alone, whether it is usable or not: others wait for the lock meanwhile.
 * A walk that goes on ends in memory that cannot be read.
 */
static void test_first_alone(void)
{
        unsigned class = gr_class_of(4096);
        struct gr_block *first, *second, *third, *taken;
        struct gr_arena *arena;
        uint64_t ptrs[3], hits;
        bool much;

        start();
        for (int i = 0; i < 3; i++)
                ptrs[i] = alloc(4096);
        for (int i = 0; i < 3; i++)
                GR_CHECK_EQ(sg_free(&core, ptrs[i]), 0);
        arena = gr_arena_own(context);
        first = arena->bins[class].blocks;
        second = first->next;
        third = second->next;
        GR_CHECK(first->ptr == ptrs[0] && third->ptr == ptrs[2] && !third->next);
        first->next = gr_check_wall();
        GR_CHECK(gr_arena_take(arena, class, class, 4096, SIZE_MAX) == NULL);
        first->next = second;
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        second->next = gr_check_wall();
        hits = arena->hits;
        taken = gr_arena_take(arena, class, class, 4096, SIZE_MAX);
        GR_CHECK_EQ(arena->hits, hits + 1); /* so that the peak of live memory is noted */
        second->next = third;
        GR_CHECK(taken == first);
        gr_arena_put(context, taken, true, &much);
        GR_CHECK_EQ(sg_cached_bytes(device), 3 * 4096);
        finish();
}

/* What nobody needed of a bin is the least that it held, whatever it holds now. */
static void test_unneeded(void)
{
        unsigned class = gr_class_of(4096);
        uint64_t ptrs[4];

        start();
        for (int i = 0; i < 4; i++)
                ptrs[i] = alloc(4096);
        for (int i = 0; i < 4; i++)
                GR_CHECK_EQ(sg_free(&core, ptrs[i]), 0);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        GR_CHECK_EQ(gr_bins_trim_unneeded(context, class), 0);
        for (int i = 0; i < 3; i++)
                ptrs[i] = alloc(4096);
        for (int i = 0; i < 3; i++)
                GR_CHECK_EQ(sg_free(&core, ptrs[i]), 0);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        GR_CHECK_EQ(sg_free(&core, alloc(4096)), 0);
        GR_CHECK_EQ(gr_bins_trim_unneeded(context, class), 4096);
        GR_CHECK_EQ(gr_bins_trim_unneeded(context, class), 4 * 4096);

        /* Where blocks of a class have several sizes, it is those of the oldest. */
        class = gr_class_of(33 * MIB);
        GR_CHECK_EQ(class, gr_class_of(35 * MIB));
        ptrs[0] = alloc(33 * MIB);
        ptrs[1] = alloc(35 * MIB);
        for (int i = 0; i < 2; i++)
                GR_CHECK_EQ(sg_free(&core, ptrs[i]), 0);
        GR_CHECK_EQ(gr_bins_trim_unneeded(context, class), 0);
        GR_CHECK_EQ(gr_bins_trim_unneeded(context, class), (34 + 36) * MIB);
        finish();
}

/* What is done with arenas, each by a thread that has to wait for one. */
enum deed {
        ALLOC,
        ADOPT_NUMBER,
        FREE,
        PUT,
        TAKE,
        OLDEST_EPOCH,
        MOVE_FROM,
        MOVE_TO,
        FORGET,
        SHUT,
        TRIM,
        UNNEEDED,
        DEEDS
};

struct waiter {
        enum deed deed;
        sem_t there, go;
        struct gr_arena *main_arena;
        _Atomic bool done;
};

static void *do_deed(void *arg)
{
        struct waiter *waiter = arg;
        struct gr_arena *arena, *main_arena = waiter->main_arena;
        unsigned class = gr_class_of(4096);
        struct gr_block *block;
        bool much = false;
        uint64_t recent;

        recent = alloc_recent(4096);
        GR_CHECK_EQ(sg_free(&core, alloc(4096)), 0);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        arena = gr_arena_own(context);
        block = gr_arena_take(main_arena, class, class, 4096, SIZE_MAX);
        sem_post(&waiter->there);
        sem_wait(&waiter->go);
        switch (waiter->deed) {
        case ALLOC:
                GR_CHECK(gr_arena_alloc(context, 4096) != 0);
                break;
        case ADOPT_NUMBER:
                GR_CHECK(gr_arena_generation(context) != gr_arena_generation(context));
                break;
        case FREE:
                GR_CHECK(gr_arena_free(&core, recent, &much) == context);
                break;
        case PUT:
                gr_arena_put(context, block, true, &much);
                break;
        case TAKE:
                GR_CHECK(gr_arena_take(arena, class, class, 4096, SIZE_MAX) != NULL);
                break;
        case OLDEST_EPOCH:
                GR_CHECK(gr_arena_oldest_epoch(arena, class) > 0);
                break;
        case MOVE_FROM:
                GR_CHECK_EQ(gr_arena_move(arena, main_arena, class, 1, UINT64_MAX), 1);
                break;
        case MOVE_TO:
                GR_CHECK_EQ(gr_arena_move(main_arena, arena, class, 1, UINT64_MAX), 1);
                break;
        case FORGET:
                gr_arena_forget(arena, recent);
                break;
        case SHUT:
                gr_arenas_quiesce(context);
                break;
        case TRIM:
                GR_CHECK(gr_bins_trim_class(context, class, UINT64_MAX) > 0);
                break;
        case UNNEEDED:
        case DEEDS:
                gr_bins_trim_unneeded(context, class);
                break;
        }
        atomic_store(&waiter->done, true);
        return NULL;
}

/* Nobody reads or changes an arena that another thread is at. */
static void test_locked(void)
{
        for (enum deed deed = 0; deed < DEEDS; deed++) {
                struct waiter waiter = {.deed = deed};
                struct gr_arena *locked = NULL;
                uint64_t ptrs[6];
                pthread_t thread;

                start();
                for (int i = 0; i < 6; i++)
                        ptrs[i] = alloc(4096);
                for (int i = 0; i < 6; i++)
                        GR_CHECK_EQ(sg_free(&core, ptrs[i]), 0);
                GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
                waiter.main_arena = gr_arena_own(context);
                sem_init(&waiter.there, 0, 0);
                sem_init(&waiter.go, 0, 0);
                GR_CHECK_EQ(pthread_create(&thread, NULL, do_deed, &waiter), 0);
                sem_wait(&waiter.there);
                for (unsigned i = 0; i < GR_SHARDS; i++)
                        if (gr_arena_at(context, i) && gr_arena_at(context, i) != waiter.main_arena)
                                locked = gr_arena_at(context, i);
                GR_CHECK(locked != NULL);
                atomic_store(&locked->lock.taken, 1);
                sem_post(&waiter.go);
                for (int n = 0; n < 10 && !atomic_load(&waiter.done); n++)
                        usleep(500);
                GR_CHECK(!atomic_load(&waiter.done));
                atomic_store(&locked->lock.taken, 0);
                pthread_join(thread, NULL);
                sem_destroy(&waiter.there);
                sem_destroy(&waiter.go);
                gr_core_destroy(&core);
        }
}

static struct gr_block *block_new(uint64_t ptr, struct gr_context *owner)
{
        struct gr_block *block = gr_block_new();

        block->ptr = ptr;
        block->capacity_bytes = 4096;
        block->context = owner;
        block->state = GR_BLOCK_CACHED;
        return block;
}

/* The driver gives out an address that a recent block has. */
static void test_stale(void)
{
        struct gr_block *fresh, *stale = NULL, *got = NULL;
        uint64_t ptr;

        start();
        ptr = alloc_recent(4096);
        fresh = block_new(ptr, context);
        GR_CHECK_EQ(gr_block_add(&core, fresh, &stale), 0);
        GR_CHECK_EQ(homes(ptr), 0);
        GR_CHECK(stale && stale != fresh && stale->state == GR_BLOCK_GONE);
        gr_block_delete(stale);
        GR_CHECK(gr_ledger_hand_out(fresh, 1));
        GR_CHECK_EQ(gr_block_claim(&core, ptr, &got), 0);
        GR_CHECK(got == fresh);
        /* The context is as before: others go the fast path. */
        alloc_recent(8192);
        GR_CHECK_EQ(sg_misuses(), 0);
        gr_core_destroy(&core);
}

static void *forget(void *arg)
{
        GR_CHECK(gr_block_forget(&core, *(uint64_t *)arg) == NULL);
        return NULL;
}

/* While whoever has found a stale block waits for its context, the address becomes a block of another one: in the end
 * neither is kept from the fast path. */
static void test_stale_changes(void)
{
        struct gr_context *other;
        struct gr_block *first, *second, *stale;
        uint64_t ptr = UINT64_C(1) << 45;
        struct gr_arena *arena;
        pthread_t thread;

        start();
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        arena = gr_arena_own(context);
        first = block_new(ptr, context);
        second = block_new(ptr, other);
        GR_CHECK_EQ(gr_block_add(&core, first, &stale), 0);
        atomic_store(&arena->lock.taken, 1);
        GR_CHECK_EQ(pthread_create(&thread, NULL, forget, &ptr), 0);
        while (atomic_load(&context->arenas_quiesced) == 0)
                usleep(100);
        GR_CHECK_EQ(gr_ledger_make_gone(core.ledger, first), GR_BLOCK_CACHED);
        GR_CHECK_EQ(gr_block_add(&core, second, &stale), 0);
        atomic_store(&arena->lock.taken, 0);
        pthread_join(thread, NULL);
        GR_CHECK_EQ(second->state, GR_BLOCK_GONE);
        GR_CHECK_EQ(context->arenas_quiesced, 0);
        GR_CHECK_EQ(other->arenas_quiesced, 0);
        gr_block_delete(first);
        gr_block_delete(second);
        finish();
}

static void test_end_of_context(void)
{
        uint64_t live, cached;
        void *handle;

        start();
        live = alloc_recent(4096);
        cached = alloc_recent(MIB);
        GR_CHECK_EQ(sg_free(&core, cached), 0);
        handle = context->handle;
        gr_core_context_ending(context);
        sg_context_destroy(handle);
        gr_core_context_gone(context);
        GR_CHECK_EQ(homes(live), 0);
        GR_CHECK_EQ(gr_pool_free(&core, live), -ENOENT);
        GR_CHECK_EQ(gr_pool_free(&core, cached), -ENOENT);
        GR_CHECK_EQ(sg_cached_bytes(device), 0);

        /* What takes its place goes the fast path as well. */
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK_EQ(sg_free(&core, alloc_recent(4096)), 0);
        finish();
}

/* Two threads free one block at once: one of them does, and it lies in one bin. */
static struct {
        _Atomic int round;
        _Atomic int freed;
        _Atomic int done;
        _Atomic uint64_t ptr;
} race;

static void free_raced(void)
{
        if (gr_pool_free(&core, atomic_load(&race.ptr)) == 0)
                atomic_fetch_add(&race.freed, 1);
        atomic_fetch_add(&race.done, 1);
}

static void *race_main(void *arg)
{
        (void)arg;
        for (int round = 1; round <= ROUNDS; round++) {
                while (atomic_load(&race.round) < round)
                        sched_yield();
                free_raced();
        }
        return NULL;
}

static void test_race(void)
{
        pthread_t thread;
        uint64_t ptr;

        start();
        GR_CHECK_EQ(pthread_create(&thread, NULL, race_main, NULL), 0);
        for (int round = 1; round <= ROUNDS; round++) {
                GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
                GR_CHECK_EQ(gr_pool_alloc(context, 4096, &ptr), 0);
                atomic_store(&race.ptr, ptr);
                atomic_store(&race.freed, 0);
                atomic_store(&race.done, 0);
                atomic_store(&race.round, round);
                if (round % 2)
                        sched_yield();
                free_raced();
                while (atomic_load(&race.done) < 2)
                        sched_yield();
                GR_CHECK_EQ(atomic_load(&race.freed), 1);
                GR_CHECK_EQ(sg_cached_bytes(device), sg_calls(SG_MEM_ALLOC) * 4096);
        }
        pthread_join(thread, NULL);
        finish();
}

/* An epoch is closed for what was freed into it, not into those before. */
static void test_epoch_bytes(void)
{
        enum { BLOCKS = 60, FIRST = 20, SECOND = 25 }; /* of 1 MiB; an epoch is closed for 32 */
        uint64_t ptrs[BLOCKS];

        start();
        atomic_store(&device->total_bytes, 1024 * MIB);
        GR_CHECK_EQ(gr_fence_close_bytes(context->fence), 32 * MIB);
        for (int i = 0; i < BLOCKS; i++)
                ptrs[i] = alloc(MIB);
        for (int i = 0; i < FIRST; i++)
                GR_CHECK_EQ(sg_free(&core, ptrs[i]), 0);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD), 1);
        for (int i = FIRST; i < FIRST + SECOND; i++)
                GR_CHECK_EQ(sg_free(&core, ptrs[i]), 0);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD), 1);
        for (int i = FIRST + SECOND; i < BLOCKS; i++)
                GR_CHECK_EQ(sg_free(&core, ptrs[i]), 0);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD), 2);
        finish();
}

/* Whether the device counts what keeper holds. */
static bool is_kept(const struct gr_cached *keeper)
{
        const struct gr_cached *each = atomic_load(&device->keepers);

        while (each && each != keeper)
                each = each->next;
        return each;
}

/*
 * Whoever locks an arena that another thread is just making finds that the device counts what it will hold. The moment
 * in which it might not is short, so this is tried often.
 */
static void *find_made(void *arg)
{
        _Atomic unsigned *missed = arg;

        for (unsigned i = 1; i < GR_SHARDS; i++) {
                struct gr_arena *arena;

                while (!(arena = gr_arena_at(context, i)))
                        atomic_fetch_add(&device->granted_bytes, 0); /* delays who adds a keeper */
                gr_arena_lock(arena);
                *missed += !is_kept(&arena->fastbins.cached) || !is_kept(&arena->cached);
                gr_arena_unlock(arena);
        }
        return NULL;
}

static void test_made(void)
{
        const unsigned shard = gr_thread.shard;
        _Atomic unsigned missed = 0;

        for (int round = 0; round < 600; round++) {
                pthread_t thread;

                start();
                GR_CHECK_EQ(pthread_create(&thread, NULL, find_made, &missed), 0);
                for (unsigned i = 1; i < GR_SHARDS; i++) {
                        gr_thread.shard = i + 1;
                        gr_arena_own(context);
                }
                pthread_join(thread, NULL);
                finish();
        }
        gr_thread.shard = shard;
        GR_CHECK_EQ(missed, 0);
}

int main(void)
{
        test_pair();
        test_handouts();
        test_other_thread();
        test_many();
        test_epoch_bytes();
        test_exported();
        test_unfenced(false);
        test_unfenced(true);
        test_shut();
        test_forget_others();
        test_empty_bins();
        test_first_alone();
        test_unneeded();
        test_locked();
        test_stale();
        test_stale_changes();
        test_end_of_context();
        test_race();
        test_made();
        return GR_CHECK_RESULT();
}
