/*
 * Random walks through segments, alone and by threads, against a GPU that notices what is handed out or given back too
 * early.
 *
 *   segments_stress_test [mapped]     without mapped memory, or with it
 */
#include "segment/segments_serve.h"

#include <pthread.h>
#include <semaphore.h>

#include "alloc/pool.h"
#include "base/log.h"
#include "check.h"
#include "core.h"
#include "reclaim/decay.h"
#include "reclaim/trim.h"
#include "segments_gpu.h"

static size_t random_bytes(uint64_t *seed)
{
        unsigned bits = 1 + (unsigned)(gpu_random(seed) % 24);

        return 1 + (size_t)(gpu_random(seed) & ((UINT64_C(1) << bits) - 1));
}

struct walk {
        uint64_t seed;
        unsigned steps;
        bool exports;  /* now and then a block that others may know when it is freed */
        bool captures; /* ... and a capture */
        bool overlaps; /* after half of the steps work goes to several streams */
        bool passes;   /* blocks to other threads, who free them */
};

/* What one thread has left for another. */
static struct {
        pthread_mutex_t mutex;
        uint64_t ptr;
        size_t bytes;
} passed = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static void pass(uint64_t *ptr, size_t *bytes)
{
        uint64_t other;
        size_t other_bytes;

        pthread_mutex_lock(&passed.mutex);
        other = passed.ptr;
        other_bytes = passed.bytes;
        passed.ptr = *ptr;
        passed.bytes = *bytes;
        pthread_mutex_unlock(&passed.mutex);
        *ptr = other;
        *bytes = other_bytes;
}

/* The block at ptr is found by any address in it; of another one nothing is known but that to ask does no harm. */
static void look(uint64_t *seed, uint64_t ptr, size_t bytes)
{
        struct gr_segments_place place;
        uint64_t random = gpu_random(seed);

        if (gr_segments_find(&core, ptr + random % bytes, &place) == 0)
                GR_CHECK(place.live && place.base_ptr == ptr);
        gr_segments_find(&core, ptr ^ random % (64 * MIB), &place);
}

static void *walk(void *arg)
{
        enum { MOST = 64 };
        struct walk *walk = arg;
        uint64_t ptrs[MOST];
        size_t sizes[MOST], count = 0;
        bool capturing = false;

        for (unsigned i = 0; i < walk->steps; i++) {
                uint64_t dice = gpu_random(&walk->seed) % 100;

                if (walk->overlaps && i == walk->steps / 2)
                        gr_core_note_overlap(&core);
                if (count > 0)
                        look(&walk->seed, ptrs[count - 1], sizes[count - 1]);
                if (dice < 50 && count < MOST) {
                        sizes[count] = random_bytes(&walk->seed);
                        ptrs[count] = gpu_take(sizes[count]);
                        count += ptrs[count] != 0;
                } else if (dice < 96 && count > 0) {
                        size_t k = gpu_random(&walk->seed) % count;

                        if (walk->passes)
                                pass(&ptrs[k], &sizes[k]);
                        if (walk->exports && ptrs[k] && dice % 8 == 0)
                                GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, ptrs[k]), 0);
                        if (ptrs[k])
                                gpu_give(ptrs[k], sizes[k]);
                        ptrs[k] = ptrs[--count];
                        sizes[k] = sizes[count];
                } else if (dice < 97) {
                        gr_trim(context, random_bytes(&walk->seed));
                } else if (dice < 98) {
                        gr_fence_close(context->fence);
                        gr_fence_poll(context->fence);
                } else if (dice < 99 || !walk->captures) {
                        gr_trim_excess(&core);
                } else {
                        capturing = !capturing;
                        gpu_capture(capturing);
                }
        }
        if (capturing)
                gpu_capture(false);
        while (count > 0) {
                count--;
                gpu_give(ptrs[count], sizes[count]);
        }
        return NULL;
}

static void test_random(enum gr_pool_kind pool, enum gr_reuse reuse, uint64_t hard_bytes, bool overlaps)
{
        for (uint64_t seed = 1; seed <= 6; seed++) {
                struct walk one = {.seed = seed * 7919,
                                   .steps = 3000,
                                   .exports = seed % 3 == 0,
                                   .captures = seed % 3 == 1,
                                   .overlaps = seed > 4};

                gpu_in_order = !overlaps;
                gpu_begin(pool, reuse);
                gpu_in_order = false;
                atomic_store(&context->segments->extra_from_ns, seed % 2 ? 0 : UINT64_MAX);
                sg_by_hand(seed % 3 ? (uint32_t)seed : 1000);
                gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, hard_bytes);
                atomic_store(&core.streams_overlap, overlaps);
                if (seed % 2)
                        gr_budget_set_limit(gpu_device(), GR_LIMIT_THRESHOLD, 16 * MIB);
                walk(&one);
                GR_CHECK(gpu_device()->peak_reserved_bytes <= hard_bytes);
                gpu_settle();
                gpu_end();
        }
}

/* What the library's own thread does, without a rest. */
static void *help(void *arg)
{
        const _Atomic bool *stop = arg;

        while (!atomic_load(stop)) {
                gr_trim_excess(&core);
                sg_advance(200000);
                gr_decay_run(&core, sg_now_ns());
        }
        return NULL;
}

static void test_threads(enum gr_pool_kind pool, enum gr_reuse reuse, bool overlaps)
{
        struct walk walks[GPU_THREADS];
        pthread_t threads[GPU_THREADS], helper;
        _Atomic bool stop = false;

        gpu_in_order = !overlaps;
        gpu_begin(pool, reuse);
        gpu_in_order = false;
        if (pool == GR_POOL_AUTO)
                atomic_store(&context->segments_active, true);
        sg_by_hand(3);
        core.config.decay_ns = UINT64_C(1000000000);
        atomic_store(&core.streams_overlap, overlaps);
        gr_budget_set_limit(gpu_device(), GR_LIMIT_HARD, 512 * MIB);
        GR_CHECK_EQ(pthread_create(&helper, NULL, help, &stop), 0);
        for (unsigned i = 0; i < GPU_THREADS; i++) {
                walks[i] = (struct walk){.seed = 77 + i, .steps = 1500, .overlaps = !overlaps, .passes = i > 0};
                if (!overlaps)
                        walks[i].captures = i == 0;
                else
                        walks[i].exports = i % 2;
                GR_CHECK_EQ(pthread_create(&threads[i], NULL, walk, &walks[i]), 0);
        }
        for (unsigned i = 0; i < GPU_THREADS; i++)
                pthread_join(threads[i], NULL);
        atomic_store(&stop, true);
        pthread_join(helper, NULL);
        if (passed.ptr)
                gpu_give(passed.ptr, passed.bytes);
        passed.ptr = 0;
        gpu_settle();
        gpu_end();
}

/* One thread allocates and another frees: the next request finds what is free, whatever its size. */
static struct {
        sem_t there, back;
        uint64_t ptr; /* 0: no more come */
        size_t bytes;
} handover;

static void *consume(void *arg)
{
        while (gr_shard() == *(unsigned *)arg) /* the other's */
                gr_shard_assign();
        for (;;) {
                sem_wait(&handover.there);
                if (!handover.ptr)
                        return NULL;
                gpu_give(handover.ptr, handover.bytes);
                sem_post(&handover.back);
        }
}

static void test_handed_over(enum gr_pool_kind pool, bool overlaps)
{
        unsigned shard = gr_shard();
        pthread_t thread;

        gpu_begin(pool, GR_REUSE_AUTO);
        if (pool == GR_POOL_AUTO)
                atomic_store(&context->segments_active, true);
        atomic_store(&core.streams_overlap, overlaps);
        sem_init(&handover.there, 0, 0);
        sem_init(&handover.back, 0, 0);
        GR_CHECK_EQ(pthread_create(&thread, NULL, consume, &shard), 0);
        for (handover.bytes = 4 * KIB; handover.bytes <= 4 * MIB; handover.bytes *= 4)
                for (int i = 0; i < 500; i++) {
                        handover.ptr = gpu_take(handover.bytes);
                        sem_post(&handover.there);
                        sem_wait(&handover.back);
                        gpu_sync();
                }
        handover.ptr = 0;
        sem_post(&handover.there);
        pthread_join(thread, NULL);
        GR_CHECK(atomic_load(&gpu_device()->peak_reserved_bytes) <= 64 * MIB); /* auto maps up to 32 MiB at once */
        GR_CHECK(core.counters.counts[GR_COUNTER_driver_allocs] <= 32);
        gpu_settle();
        gpu_end();
        sem_destroy(&handover.there);
        sem_destroy(&handover.back);
}

int main(int argc, char **argv)
{
        gpu_mapping = argc == 2 && !strcmp(argv[1], "mapped");
        gr_log_set_level(GR_LOG_SILENT); /* the limit is met on purpose */
        for (unsigned overlaps = 0; overlaps < 2; overlaps++) {
                test_handed_over(GR_POOL_SPLIT, overlaps);
                test_handed_over(GR_POOL_AUTO, overlaps);
                test_random(GR_POOL_SPLIT, GR_REUSE_AUTO, GR_UNLIMITED, overlaps);
                test_random(GR_POOL_SPLIT, GR_REUSE_POLL, 200 * MIB, overlaps);
                test_random(GR_POOL_SPLIT, GR_REUSE_BARRIER, 100 * MIB, overlaps);
                test_random(GR_POOL_AUTO, GR_REUSE_AUTO, 300 * MIB, overlaps);
        }
        test_random(GR_POOL_SPLIT, GR_REUSE_SYNC, GR_UNLIMITED, false);
        test_threads(GR_POOL_SPLIT, GR_REUSE_AUTO, false);
        test_threads(GR_POOL_SPLIT, GR_REUSE_AUTO, true);
        test_threads(GR_POOL_SPLIT, GR_REUSE_POLL, true);
        test_threads(GR_POOL_AUTO, GR_REUSE_BARRIER, true);
        test_threads(GR_POOL_AUTO, GR_REUSE_AUTO, false);
        return GR_CHECK_RESULT();
}
