/*
 * The cache of pinned host memory against a scripted GPU: what is handed out again, when, to whom, and when it goes
 * back.
 */
#include <errno.h>
#include <pthread.h>
#include <unistd.h>

#include "cache/block_life.h"
#include "pinned_gpu.h"
#include "short_of_memory.h"

#define THREADS 6
#define STEPS   4000

static void test_reuse(void)
{
        struct gr_block_info before, info;
        uint64_t a, b;

        begin(&sg_driver, &plain);
        a = get(one, 64 * MIB, KIND);
        GR_CHECK(gr_pinned_free(&core, a) == 0);
        GR_CHECK(gr_pinned_free(&core, a) == -EALREADY);
        GR_CHECK(frees == 0 && gr_budget_cached(core.host) == 64 * MIB);
        GR_CHECK(gr_ledger_find(core.ledger, a, &before) == 0);
        GR_CHECK(get(one, 64 * MIB, KIND) == a);
        GR_CHECK(gr_ledger_find(core.ledger, a, &info) == 0);
        GR_CHECK(info.live && info.generation != before.generation); /* the program's BUFFER_ID is another */
        GR_CHECK(allocs == 1 && sg_counter(&core, GR_COUNTER_pinned_hits) == 1);
        GR_CHECK(gr_budget_cached(core.host) == 0);

        /* Neither another kind nor another context may have it, nor a request that leaves much of it unused. */
        GR_CHECK(gr_pinned_free(&core, a) == 0);
        b = get(one, 64 * MIB, KIND + 1);
        GR_CHECK(b != a);
        GR_CHECK(get(two, 64 * MIB, KIND) != a);
        GR_CHECK(get(one, 50 * MIB, KIND) != a);
        GR_CHECK(get(one, 60 * MIB, KIND) == a);

        /* The one freed last first, and one that fits exactly before a larger one. */
        a = get(one, 8 * MIB, KIND);
        b = get(one, 8 * MIB + 4096, KIND);
        GR_CHECK(gr_pinned_free(&core, a) == 0);
        GR_CHECK(gr_pinned_free(&core, b) == 0);
        GR_CHECK(get(one, 8 * MIB, KIND) == a);
        GR_CHECK(get(one, 8 * MIB, KIND) == b);
        a = get(one, 32 * MIB, KIND);
        b = get(one, 32 * MIB, KIND);
        GR_CHECK(gr_pinned_free(&core, a) == 0);
        GR_CHECK(gr_pinned_free(&core, b) == 0);
        GR_CHECK(get(one, 30 * MIB, KIND) == b);
        GR_CHECK(get(one, 30 * MIB, KIND) == a);
        a = get(one, 8 * MIB - 8192, KIND);
        b = get(one, 8 * MIB - 4096, KIND);
        GR_CHECK(gr_class_of(8 * MIB - 8192) == gr_class_of(8 * MIB - 4096));
        GR_CHECK(gr_pinned_free(&core, a) == 0);
        GR_CHECK(gr_pinned_free(&core, b) == 0);
        GR_CHECK(get(one, 8 * MIB - 8192, KIND) == a);
        GR_CHECK(get(one, 8 * MIB - 8192, KIND) == b);
        GR_CHECK(gr_pinned_alloc(one, GR_BLOCK_MAX_BYTES + 1, KIND, allocate, one->handle, &a) == -E2BIG);
        GR_CHECK(gr_pinned_free(&core, get(one, GR_BLOCK_MAX_BYTES, KIND)) == 0);
        end();
}

static void test_small(void)
{
        uint64_t a;

        begin(&sg_driver, &plain);
        a = get(one, 1, KIND);
        GR_CHECK(gr_pinned_free(&core, a) == 0);
        GR_CHECK(gr_budget_cached(core.host) == 4096);
        GR_CHECK(get(one, 512, KIND) == a);
        GR_CHECK(gr_pinned_free(&core, a) == 0);
        GR_CHECK(get(one, 513, KIND) != a);
        end();
}

/* The processor writes at once: no barrier will do, and the work of every context counts. */
static void test_late_work(void)
{
        for (int i = 0; i < 2; i++) {
                uint64_t a, b;

                begin(&sg_driver, &plain);
                a = get(one, MIB, KIND);
                use(i ? two : one, a, 5 * SG_MS);
                GR_CHECK(gr_pinned_free(&core, a) == 0);
                b = get(one, MIB, KIND);
                GR_CHECK(b != a);
                GR_CHECK(sg_calls(SG_CONTEXT_WAIT) == 0 && sg_calls(SG_CONTEXT_SYNC) == 0);
                /* Work that comes after the free delays nothing. */
                use(i ? one : two, b, 50 * SG_MS);
                sg_advance(6 * SG_MS);
                GR_CHECK(get(one, MIB, KIND) == a);
                end();
        }
}

static void test_capture(void)
{
        uint64_t a, b;

        begin(&sg_driver, &plain);
        a = get(one, MIB, KIND);
        b = get(one, MIB, KIND);
        GR_CHECK(gr_pinned_free(&core, b) == 0);
        GR_CHECK(get(one, MIB, KIND) == b);
        GR_CHECK(gr_pinned_free(&core, b) == 0);
        gr_gate_begin_enter(&core.gate);
        sg_capture(1);
        gr_gate_begin_leave(&core.gate, true);
        use(one, a, 5 * SG_MS);
        GR_CHECK(gr_pinned_free(&core, a) == 0);
        sg_advance(10 * SG_MS);
        GR_CHECK(get(one, MIB, KIND) == b); /* marked before */
        GR_CHECK(get(one, MIB, KIND) != a); /* no event says that it is idle */
        GR_CHECK(gr_pinned_reclaim(&core, UINT64_MAX) == 0);
        sg_capture(-1);
        gr_gate_end(&core.gate);
        GR_CHECK(get(one, MIB, KIND) == a);
        end();
}

static void test_waits_at_free(void)
{
        static const struct gr_config sync = {.reuse = GR_REUSE_SYNC, .pool = GR_POOL_BINS};

        for (int i = 0; i < 2; i++) {
                uint64_t a, before_ns;

                begin(i ? &sg_old_driver : &sg_driver, i ? &plain : &sync);
                a = get(one, MIB, KIND);
                use(two, a, 5 * SG_MS);
                before_ns = sg_driver.now_ns();
                GR_CHECK(gr_pinned_free(&core, a) == 0);
                GR_CHECK(sg_driver.now_ns() >= before_ns + 5 * SG_MS);
                GR_CHECK(sg_calls(SG_CONTEXT_RECORD) <= 2); /* the wait's own, at most, in both contexts */
                GR_CHECK(get(one, MIB, KIND) == a);
                end();
        }
}

static void test_most(void)
{
        uint64_t a, b, c;

        begin(&sg_driver, &plain);
        gr_budget_set_limit(core.host, GR_LIMIT_THRESHOLD, 3 * MIB);
        a = get(one, 2 * MIB, KIND);
        b = get(one, 2 * MIB, KIND);
        c = get(one, 4 * MIB, KIND);
        GR_CHECK(gr_pinned_free(&core, a) == 0 && frees == 0);
        GR_CHECK(gr_pinned_free(&core, b) == 0 && frees == 1);
        GR_CHECK(gr_pinned_free(&core, c) == 0 && frees == 2);
        GR_CHECK(atomic_load(&core.host->reserved_bytes) == 2 * MIB && gr_budget_cached(core.host) == 2 * MIB);
        end();
}

static int attempt_registering(void *arg)
{
        (void)arg;
        return 0;
}

static void test_limit(void)
{
        uint64_t a, b, c = 0;

        begin(&sg_driver, &plain);
        gr_budget_set_limit(core.host, GR_LIMIT_HARD, 10 * MIB);
        a = get(one, 4 * MIB, KIND);
        b = get(one, 4 * MIB, KIND);
        GR_CHECK(gr_pinned_free(&core, a) == 0);
        sg_advance(1);
        GR_CHECK(gr_pinned_free(&core, b) == 0);
        /* As much goes as has to, the oldest first. */
        c = get(one, 6 * MIB, KIND);
        GR_CHECK(frees == 1 && get(one, 4 * MIB, KIND) == b);
        GR_CHECK(try_alloc(one, 4 * MIB, KIND, &a) == -EDQUOT);
        /* Registered memory finds room as well; the host waits for the work, as the driver's free would have. */
        use(one, c, 5 * SG_MS);
        GR_CHECK(gr_pinned_free(&core, c) == 0);
        GR_CHECK(gr_charge_accounted(&core, core.host, NULL, GR_MEMORY_HOST, 5 * MIB, attempt_registering, NULL) == 0);
        GR_CHECK(frees == 2);
        gr_budget_uncharge(core.host, GR_MEMORY_HOST, 5 * MIB);
        end();

        /* The host itself is full. */
        begin(&sg_driver, &plain);
        room_bytes = 10 * MIB;
        a = get(one, 8 * MIB, KIND);
        GR_CHECK(gr_pinned_free(&core, a) == 0);
        GR_CHECK(get(two, 8 * MIB, KIND) != 0);
        GR_CHECK(try_alloc(one, 8 * MIB, KIND, &a) == -ENOMEM);
        GR_CHECK(atomic_load(&core.host->reserved_bytes) == 8 * MIB);
        end();
}

/* A limit that is full of what was freed during a capture: no event says that it is idle, but the host can wait. */
static void test_limit_in_capture(void)
{
        uint64_t a, b;

        begin(&sg_driver, &plain);
        gr_budget_set_limit(core.host, GR_LIMIT_HARD, 10 * MIB);
        a = get(one, 4 * MIB, KIND);
        b = get(one, 4 * MIB, KIND);
        gr_gate_begin_enter(&core.gate);
        sg_capture(1);
        gr_gate_begin_leave(&core.gate, true);
        use(two, a, 5 * SG_MS);
        GR_CHECK(gr_pinned_free(&core, a) == 0 && gr_pinned_free(&core, b) == 0);
        GR_CHECK(get(one, 8 * MIB, KIND) != 0);
        GR_CHECK(frees == 2);
        GR_CHECK(try_alloc(one, 4 * MIB, KIND, &a) == -EDQUOT);
        sg_capture(-1);
        gr_gate_end(&core.gate);
        end();
}

static _Atomic unsigned attempts;

static int attempt_counted(void *arg)
{
        (void)arg;
        attempts++;
        return 0;
}

static void *retry(void *arg)
{
        GR_CHECK_EQ(gr_pinned_retry(&core, MIB, attempt_counted, NULL, -ENOMEM), 0);
        return arg;
}

/* Who tries again does so alone: others would take what he has had given back. */
static void test_retry_alone(void)
{
        pthread_t thread;

        begin(&sg_driver, &plain);
        attempts = 0;
        gr_lock(&core.pinned->unpin_lock);
        pthread_create(&thread, NULL, retry, NULL);
        for (int n = 0; n < 20 && !attempts; n++)
                usleep(1000);
        GR_CHECK_EQ(attempts, 0);
        gr_unlock(&core.pinned->unpin_lock);
        pthread_join(thread, NULL);
        GR_CHECK_EQ(attempts, 1);
        end();
}

static void test_ladder(void)
{
        for (int i = 0; i < 2; i++) {
                begin(&sg_driver, &plain);
                core.devices[0].integrated = i;
                GR_CHECK(gr_pinned_free(&core, get(one, MIB, KIND)) == 0);
                GR_CHECK(gr_rung_run(one, GR_RUNG_TRIM, 1) == (i ? MIB : 0));
                GR_CHECK(frees == (unsigned)i);
                GR_CHECK(gr_rung_run(one, GR_RUNG_SYNC, 1) == 0);
                GR_CHECK(frees == 1 && gr_budget_cached(core.host) == 0);
                end();
        }
}

/* A context takes its memory along, live and cached; what others allocated stays, and is fenced without it. */
static void test_contexts(void)
{
        uint64_t a, b;

        begin(&sg_driver, &plain);
        a = get(one, MIB, KIND);
        b = get(two, MIB, KIND);
        GR_CHECK(get(one, 2 * MIB, KIND) != 0);
        use(one, b, 5 * SG_MS);
        GR_CHECK(gr_pinned_free(&core, a) == 0);
        GR_CHECK(gr_pinned_free(&core, b) == 0);
        gr_core_context_ending(one);
        sg_context_destroy(handles[0]);
        gr_core_context_gone(one);
        GR_CHECK(atomic_load(&core.host->reserved_bytes) == MIB && gr_budget_cached(core.host) == MIB);
        GR_CHECK(gr_pinned_free(&core, a) == -ENOENT);
        GR_CHECK(get(two, MIB, KIND) == b);
        /* One that comes later counts from its beginning. */
        handles[0] = sg_context_new(0);
        one = gr_core_context_add(&core, handles[0], 0);
        use(one, b, 5 * SG_MS);
        GR_CHECK(gr_pinned_free(&core, b) == 0);
        GR_CHECK(get(two, MIB, KIND) != b);
        sg_advance(6 * SG_MS);
        /* Gone without a word before it, as at the release of a primary context. */
        GR_CHECK(gr_pinned_free(&core, get(one, MIB, KIND)) == 0);
        sg_context_destroy(handles[0]);
        gr_core_context_gone(one);
        GR_CHECK(get(two, MIB, KIND) == b);
        GR_CHECK(atomic_load(&core.host->reserved_bytes) == 2 * MIB);
        end();
}

/* Work of a context that ends uses what another one has, which frees it before the end: it has been waited for. */
static void test_ending(void)
{
        uint64_t a;

        begin(&sg_driver, &plain);
        a = get(two, MIB, KIND);
        use(one, a, 5 * SG_MS);
        gr_core_context_ending(one);
        sg_context_destroy(handles[0]); /* its last words have been said: the free must not touch it */
        GR_CHECK(gr_pinned_free(&core, a) == 0);
        GR_CHECK(get(two, MIB, KIND) == a); /* which counts misuse */
        gr_core_context_gone(one);
        end();
}

/* What goes to the driver leaves nothing behind: its structure serves the next block. */
static void test_structures(void)
{
        void *first, *then;

        begin(&sg_driver, &plain);
        gr_budget_set_limit(core.host, GR_LIMIT_THRESHOLD, 0);
        GR_CHECK(gr_pinned_free(&core, get(one, MIB, KIND)) == 0 && frees == 1);
        first = gr_block_new();
        gr_block_delete(first);
        for (int i = 0; i < 3; i++)
                GR_CHECK(gr_pinned_free(&core, get(one, MIB, KIND)) == 0);
        then = gr_block_new();
        gr_block_delete(then);
        GR_CHECK(!GR_METADATA_IN_CHUNKS || then == first); /* otherwise whoever looks for leaks says so */
        end();
}

/* Memory that the ledger has no room for goes back, and is charged no more. */
static void test_no_ledger(void)
{
        struct gr_block *block;
        uint64_t ptr;

        begin(&sg_driver, &plain);
        block = gr_block_new();
        memory_runs_out(sizeof(struct gr_address_slot));
        GR_CHECK(gr_pinned_alloc(one, MIB, KIND, allocate, one->handle, &ptr) == -ENOMEM && allocs == 0);
        gr_block_delete(block); /* the one structure that there is */
        GR_CHECK(gr_pinned_alloc(one, MIB, KIND, allocate, one->handle, &ptr) == -ENOMEM);
        memory_is_back();
        GR_CHECK(allocs == frees && (frees == 1 || !GR_METADATA_IN_CHUNKS)); /* else there is no structure either */
        GR_CHECK(core.host->reserved_bytes == 0);
        end();
}

static void test_other_memory(void)
{
        uint64_t a, device;

        begin(&sg_driver, &plain);
        a = get(one, MIB, KIND);
        GR_CHECK(sg_alloc(one, MIB, &device) == 0);
        GR_CHECK(gr_pinned_free(&core, device) == -ENOENT);
        GR_CHECK(gr_pool_free(&core, a) == -ENOENT);
        GR_CHECK(gr_ledger_mark_exported(core.ledger, a) == 0);
        GR_CHECK(gr_pinned_free(&core, a) == 0);
        GR_CHECK(frees == 1 && atomic_load(&core.host->reserved_bytes) == 0);
        GR_CHECK(sg_free(&core, device) == 0);
        end();
}

static void end_one(void)
{
        gr_ledger_context_gone(core.ledger, one, gr_block_uncharge_and_delete);
}

static int group_reserve(void *arg, uint64_t bytes)
{
        (void)arg, (void)bytes;
        return 0;
}

static void group_adjust(void *arg, int64_t bytes)
{
        (void)arg, (void)bytes;
        end_one();
}

/* Another thread ends the context meanwhile: whoever frees has nothing left to do, whoever allocates tries again. */
static void test_gone_meanwhile(void)
{
        static const struct gr_config sync = {.reuse = GR_REUSE_SYNC, .pool = GR_POOL_BINS};
        static const struct gr_group group = {
                .limit_bytes = GR_UNLIMITED, .reserve = group_reserve, .adjust = group_adjust};
        struct gr_block_info info;
        uint64_t a, b;

        begin(&sg_driver, &sync);
        a = get(one, MIB, KIND);
        sg_fail(SG_CONTEXT_RECORD, 1, 1, gr_driver_error(999));
        sg_before[SG_CONTEXT_RECORD] = end_one;
        GR_CHECK(gr_pinned_free(&core, a) == 0 && frees == 0);
        sg_before[SG_CONTEXT_RECORD] = NULL;
        GR_CHECK(gr_ledger_find(core.ledger, a, &info) == -ENOENT);
        GR_CHECK(core.host->reserved_bytes == 0);
        end();

        begin(&sg_driver, &plain);
        a = get(two, MIB, KIND);
        find(a)->ptr = 0; /* freed behind the library's back; it learns that when the address comes again */
        next_ptr = a;
        atomic_store(&core.host->group, &group);
        b = get(one, MIB, KIND);
        atomic_store(&core.host->group, NULL);
        GR_CHECK(b != a && gr_ledger_find(core.ledger, b, &info) == 0);
        GR_CHECK(core.host->reserved_bytes == MIB);
        end();
}

/* More contexts than a fence covers, and a fence that fails: nothing is cached any more. */
static void test_no_fence(void)
{
        uint64_t a;

        begin(&sg_driver, &plain);
        for (int i = 0; i < GR_ACCESSORS_MAX; i++)
                GR_CHECK(gr_core_context_add(&core, sg_context_new(2), 2) != NULL);
        a = get(one, MIB, KIND);
        GR_CHECK(gr_pinned_free(&core, a) == 0 && frees == 1);
        end();

        begin(&sg_driver, &plain);
        a = get(one, MIB, KIND);
        sg_fail(SG_CONTEXT_RECORD, 1, 1, gr_driver_error(999));
        GR_CHECK(gr_pinned_free(&core, a) == 0 && frees == 0);
        GR_CHECK(get(one, MIB, KIND) != a);
        a = get(one, MIB, KIND);
        GR_CHECK(gr_pinned_free(&core, a) == 0 && frees == 1);
        end();
}

#ifndef GR_TEST_NO_FENCE
static struct gr_pinned_bin *filled_bin(unsigned class)
{
        for (unsigned i = 0; i < 1u << GR_PINNED_SORTS_LOG2; i++)
                if (core.pinned->bins[class][i].usable || core.pinned->bins[class][i].waiting)
                        return &core.pinned->bins[class][i];
        return NULL;
}

/*
 * An allocation looks at few of those that are cached: at none that waits, and of those that are ready at the latest. A
 * walk that goes on ends in memory that cannot be read.
 */
static void test_short_looks(void)
{
        enum { MANY = 300 };
        size_t bytes = MIB + 4096, more = 2 * MIB - 4096; /* of one class, and one does not serve the other */
        struct gr_block *before, *after, *last;
        struct gr_pinned_bin *bin;
        uint64_t ptrs[MANY], a;

        begin(&sg_driver, &plain);
        gr_budget_set_limit(core.host, GR_LIMIT_THRESHOLD, GR_UNLIMITED);
        for (int i = 0; i < MANY; i++)
                ptrs[i] = get(one, bytes, KIND);
        use(one, ptrs[0], SG_MS);
        for (int i = 0; i < MANY; i++)
                GR_CHECK_EQ(gr_pinned_free(&core, ptrs[i]), 0);
        bin = filled_bin(gr_class_of(bytes));
        GR_CHECK(bin && bin->waiting && !bin->usable);
        last = bin->waiting->next;
        before = last->prev;
        after = last->next;
        last->prev = last->next = gr_check_wall();
        a = get(one, bytes, KIND);
        GR_CHECK_EQ(allocs, MANY + 1);
        last->prev = before;
        last->next = after;

        sg_advance(SG_MS);
        last = bin->waiting; /* an allocation finds few of those that are ready by now, as others wait for it */
        for (int i = 0; i < MANY / 2; i++)
                last = last->next;
        after = last->next;
        last->next = gr_check_wall();
        GR_CHECK_EQ(gr_pinned_free(&core, get(one, bytes, KIND)), 0);
        last->next = after;
        for (int i = 0; i < MANY / 32; i++) /* a few become ready with each look */
                GR_CHECK_EQ(gr_pinned_free(&core, get(one, bytes, KIND)), 0);
        GR_CHECK_EQ(allocs, MANY + 1);
        GR_CHECK(bin->usable);
        last = bin->usable->prev;
        for (int i = 0; i < MANY / 2; i++)
                last = last->prev;
        before = last->prev;
        last->prev = gr_check_wall();
        GR_CHECK_EQ(gr_pinned_free(&core, get(one, more, KIND)), 0);
        GR_CHECK_EQ(allocs, MANY + 2);
        last->prev = before;
        last = bin->usable->prev->prev; /* beside the one that fits exactly */
        before = last->prev;
        last->prev = gr_check_wall();
        GR_CHECK_EQ(gr_pinned_free(&core, get(one, bytes, KIND)), 0);
        GR_CHECK_EQ(allocs, MANY + 2);
        last->prev = before;

        /* Those of another kind or context lie elsewhere, or among them, and stay. */
        GR_CHECK(get(one, bytes, KIND + 1) > ptrs[MANY - 1]);
        GR_CHECK(get(two, bytes, KIND) > ptrs[MANY - 1]);
        GR_CHECK_EQ(allocs, MANY + 4);
        GR_CHECK_EQ(gr_pinned_free(&core, a), 0);
        GR_CHECK(gr_pinned_reclaim(&core, UINT64_MAX) > 0);
        GR_CHECK_EQ(gr_budget_cached(core.host), 0);
        end();
}
#endif

struct worker {
        pthread_t thread;
        uint64_t seed;
};

static unsigned draw(struct worker *worker, unsigned below)
{
        worker->seed = worker->seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        return (unsigned)(worker->seed >> 33) % below;
}

static void *allocate_and_free(void *arg)
{
        struct worker *worker = arg;
        uint64_t held[8];
        unsigned count = 0;

        for (int i = 0; i < STEPS || count > 0; i++) {
                unsigned what = draw(worker, 100);

                if (i < STEPS && what < 45 && count < 8) {
                        size_t bytes = (size_t)(1 + draw(worker, 6)) * 300000;
                        int rc = try_alloc(draw(worker, 2) ? one : two, bytes, draw(worker, 2), &held[count]);

                        GR_CHECK(rc == 0 || rc == -EDQUOT);
                        if (rc == 0)
                                use(draw(worker, 2) ? one : two, held[count++], draw(worker, 50) * 1000);
                } else if (what < 90 && count > 0) {
                        GR_CHECK(gr_pinned_free(&core, held[--count]) == 0);
                } else if (what < 93) {
                        gr_pinned_reclaim(&core, MIB);
                } else {
                        sg_advance(draw(worker, 40) * 1000);
                }
        }
        return NULL;
}

/* One thread, as the helper is. */
static void *decay(void *arg)
{
        struct worker *worker = arg;

        for (int i = 0; i < STEPS / 10; i++) {
                gr_decay_run(&core, sg_driver.now_ns());
                sg_advance(draw(worker, 40) * 1000);
        }
        return NULL;
}

static void test_threads(void)
{
        static const struct gr_config config = {.reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS, .decay_ns = 200 * SG_MS};
        struct worker workers[THREADS];

        begin(&sg_driver, &config);
        gr_budget_set_limit(core.host, GR_LIMIT_HARD, 40 * MIB);
        gr_budget_set_limit(core.host, GR_LIMIT_THRESHOLD, 16 * MIB);
        for (unsigned i = 0; i < THREADS; i++) {
                workers[i].seed = i + 1;
                pthread_create(&workers[i].thread, NULL, i ? allocate_and_free : decay, &workers[i]);
        }
        for (unsigned i = 0; i < THREADS; i++)
                pthread_join(workers[i].thread, NULL);
        GR_CHECK(sg_counter(&core, GR_COUNTER_pinned_hits) > 0);
        GR_CHECK(atomic_load(&core.host->reserved_bytes) == gr_budget_cached(core.host));
        sg_advance(1000 * SG_MS);
        gr_pinned_reclaim(&core, UINT64_MAX);
        GR_CHECK(atomic_load(&core.host->reserved_bytes) == 0 && used_bytes == 0);
        end();
}

int main(void)
{
        test_reuse();
        test_small();
        test_late_work();
        test_capture();
        test_waits_at_free();
        test_most();
        test_limit();
        test_limit_in_capture();
        test_retry_alone();
        test_ladder();
        test_contexts();
        test_ending();
        test_structures();
        test_no_ledger();
        test_other_memory();
        test_gone_meanwhile();
        test_no_fence();
#ifndef GR_TEST_NO_FENCE /* where all is ready at once, and so looked at */
        test_short_looks();
#endif
        test_threads();
        return GR_CHECK_RESULT();
}
