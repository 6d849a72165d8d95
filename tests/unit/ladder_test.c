#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "alloc/ladder.h"
#include "alloc/pool.h"
#include "base/log.h"
#include "check.h"
#include "core.h"
#include "pool_gpu.h"
#include "reclaim/trim.h"
#include "scripted.h"

#define CARD     (64 * MIB)
#define WITHIN   GR_LOG_INFO /* where reports of a full card are to be seen */
#define TRIES(l) atomic_load(&core.counters.rungs[GR_RUNG_##l].tries)
#define BYTES(l) atomic_load(&core.counters.rungs[GR_RUNG_##l].bytes)

static struct gr_device *device;

static void start_with(const struct gr_driver *driver, enum gr_reuse reuse)
{
        pool_begin(driver, CARD, &(struct gr_config){.reuse = reuse, .pool = GR_POOL_BINS});
        device = context->device;
        gr_log_set_level(GR_LOG_SILENT);
}

static void start(void)
{
        start_with(&sg_driver, GR_REUSE_AUTO);
}

static void finish(void)
{
        GR_CHECK_EQ(atomic_load(&device->reserved_bytes), sg_used_bytes(0));
        pool_end();
}

/* Which rungs were tried: those up to and with last, and none after it. */
static void check_tried_until(enum gr_rung last)
{
        for (enum gr_rung rung = GR_RUNG_READY; rung < GR_RUNG_COUNT; rung++) {
                bool tried = atomic_load(&core.counters.rungs[rung].tries) > 0;
                bool wanted = rung <= last && (rung < GR_RUNG_NEIGHBOUR || rung == GR_RUNG_FAIL);

                if (tried != wanted)
                        fprintf(stderr, "  rung %s\n", gr_rung_words[rung]);
                GR_CHECK_EQ(tried, wanted);
        }
}

/* count blocks of bytes each, freed behind work of ns each; each in an epoch of its own. */
static void cache(unsigned count, size_t bytes, uint64_t ns)
{
        uint64_t ptrs[32];

        for (unsigned i = 0; i < count; i++)
                ptrs[i] = alloc(bytes);
        for (unsigned i = 0; i < count; i++) {
                if (ns)
                        sg_work(context->handle, 0, ptrs[i], ns);
                free_ok(ptrs[i]);
                gr_fence_close(context->fence);
        }
}

static void test_ready(void)
{
        uint64_t beside, large, ptr;

        start();
        beside = alloc(10 * MIB);
        large = alloc(30 * MIB);
        free_ok(large);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        sg_log_clear();
        ptr = alloc(28 * MIB); /* too small for it by the rules of every day */
        GR_CHECK_EQ(ptr, large);
        check_tried_until(GR_RUNG_READY);
        GR_CHECK_EQ(BYTES(READY), 30 * MIB);
        GR_CHECK(strpbrk(sg_log(), "RFtsrw") == NULL);
        free_ok(ptr);
        free_ok(beside);
        finish();
}

static void test_fence(void)
{
        uint64_t beside, large, ptr;

        start();
        beside = alloc(10 * MIB);
        large = alloc(30 * MIB);
        sg_work(context->handle, 0, large, 10 * SG_MS);
        free_ok(large);
        ptr = alloc(28 * MIB);
        GR_CHECK_EQ(ptr, large);
        check_tried_until(GR_RUNG_FENCE);
        GR_CHECK_EQ(sg_driver.now_ns(), SG_FIRST_NS); /* the GPU is ordered, the host does not wait */
        sg_work(context->handle, 1, ptr, SG_MS);
        free_ok(ptr);
        free_ok(beside);
        finish();

        /* Without barriers: once the epoch has passed. */
        start_with(&sg_driver, GR_REUSE_POLL);
        beside = alloc(10 * MIB);
        large = alloc(30 * MIB);
        sg_work(context->handle, 0, large, 10 * SG_MS);
        free_ok(large);
        sg_advance(10 * SG_MS);
        GR_CHECK_EQ(alloc(28 * MIB), large);
        check_tried_until(GR_RUNG_FENCE);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), 0);
        free_ok(large);
        free_ok(beside);
        finish();
}

/* A block that is much larger goes back rather than to a program that asked for less: others want the rest. */
static void test_much_larger(void)
{
        uint64_t ptrs[8];

        for (int busy = 0; busy < 2; busy++) {
                start();
                for (int i = 0; i < 5; i++)
                        ptrs[i] = alloc(12 * MIB);
                for (int i = 0; i < 5; i++) {
                        if (busy)
                                sg_work(context->handle, 0, ptrs[i], 10 * SG_MS);
                        free_ok(ptrs[i]);
                }
                for (int i = 0; i < 8; i++)
                        ptrs[i] = alloc(8 * MIB);
                for (int i = 0; i < 8; i++)
                        free_ok(ptrs[i]);
                finish();
        }
}

/* What a test's reclaimable holds outside the pool, and what it saw. */
struct holder {
        uint64_t holds_bytes;
        int rc;
        unsigned calls;
        unsigned trims, releases; /* by the driver before the last call */
        uint64_t seen_ns;
        uint64_t wanted_bytes;
        int device;
};

static int let_go(void *arg, int of_device, uint64_t want_bytes)
{
        struct holder *holder = arg;

        holder->calls++;
        holder->trims = sg_calls(SG_TRIM_POOLS);
        holder->releases = sg_calls(SG_MEM_RELEASE);
        holder->seen_ns = sg_driver.now_ns();
        holder->wanted_bytes = want_bytes;
        holder->device = of_device;
        if (!holder->rc && holder->holds_bytes) {
                sg_hold(0, 0, 0);
                holder->holds_bytes = 0;
        }
        return holder->rc;
}

static void test_purge_and_drop(void)
{
        for (int drop = 0; drop < 2; drop++) {
                struct holder holder = {.holds_bytes = 40 * MIB};
                struct gr_reclaimable reclaimable = {.name = "holder", .arg = &holder};

                start();
                *(drop ? &reclaimable.drop : &reclaimable.purge) = let_go;
                GR_CHECK_EQ(gr_reclaimable_register(&core, &reclaimable), 0);
                sg_hold(0, 40 * MIB, 0);
                alloc(40 * MIB);
                check_tried_until(drop ? GR_RUNG_DROP : GR_RUNG_PURGE);
                GR_CHECK_EQ(holder.calls, 1);
                GR_CHECK_EQ(holder.device, 0);
                GR_CHECK_EQ(holder.wanted_bytes, 16 * MIB); /* 24 are free */
                GR_CHECK_EQ(sg_calls(SG_TRIM_POOLS), drop ? 1 : 0);
                GR_CHECK_EQ(gr_reclaimable_unregister(&core, &reclaimable), 0);
                finish();
        }
}

static uint64_t to_give;

static int give_ready(void *arg, int of_device, uint64_t want_bytes)
{
        (void)arg, (void)of_device, (void)want_bytes;
        if (to_give)
                free_ok(to_give);
        to_give = 0;
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        return 0;
}

/* What a rung brought into the cache, and is ready there, is handed out, without the driver. */
static void test_purged_block(void)
{
        struct gr_reclaimable reclaimable = {.name = "holder", .purge = give_ready};
        uint64_t given;

        start();
        GR_CHECK_EQ(gr_reclaimable_register(&core, &reclaimable), 0);
        given = to_give = alloc(40 * MIB);
        GR_CHECK_EQ(alloc(40 * MIB), given);
        check_tried_until(GR_RUNG_PURGE);
        GR_CHECK_EQ(sg_calls(SG_MEM_RELEASE) + sg_calls(SG_MEM_FREE), 0);
        GR_CHECK_EQ(gr_reclaimable_unregister(&core, &reclaimable), 0);
        finish();
}

static void test_trim(void)
{
        start();
        cache(15, 4 * MIB, 0);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        sg_log_clear();
        alloc(34 * MIB); /* 4 are free, 30 are missing: 8 blocks */
        check_tried_until(GR_RUNG_TRIM);
        GR_CHECK_EQ(BYTES(TRIM), 32 * MIB);
        GR_CHECK_EQ(sg_cached_bytes(device), 28 * MIB);
        GR_CHECK(strchr(sg_log(), 'F') == NULL);
        GR_CHECK_EQ(sg_driver.now_ns(), SG_FIRST_NS);
        finish();

        /* The card is shared: another context's cache serves, too, after the own. */
        start();
        cache(5, 4 * MIB, 0);
        {
                struct gr_context *own = context;

                context = gr_core_context_add(&core, sg_context_new(0), 0);
                cache(10, 4 * MIB, 0);
                context = own;
        }
        alloc(34 * MIB);
        check_tried_until(GR_RUNG_TRIM);
        GR_CHECK_EQ(sg_cached_bytes(device), 28 * MIB);
        finish();

        /* But not that of another device. */
        start();
        {
                struct gr_context *own = context, *far = gr_core_context_add(&core, sg_context_new(1), 1);

                context = far;
                cache(10, 4 * MIB, 0);
                GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
                context = own;
        }
        GR_CHECK_EQ(gr_rung_run(context, GR_RUNG_TRIM, 8 * MIB), 0);
        GR_CHECK_EQ(sg_used_bytes(1), 40 * MIB);
        finish();

        /* What is above a threshold goes back with an older driver, too, which is waited for. */
        start_with(&sg_old_driver, GR_REUSE_POLL);
        cache(3, 4 * MIB, 10 * SG_MS);
        gr_budget_set_threshold(device, 4 * MIB);
        GR_CHECK(!gr_trim_excess(&core));
        GR_CHECK_EQ(sg_cached_bytes(device), 4 * MIB);
        finish();
}

static void test_driver(void)
{
        start();
        sg_hold(0, 0, 40 * MIB);
        alloc(40 * MIB);
        check_tried_until(GR_RUNG_DRIVER);
        GR_CHECK_EQ(BYTES(DRIVER), 40 * MIB);
        finish();

        /* Also where the driver does not say how much is free: then nothing is told of it. */
        for (unsigned nth = 1; nth <= 3; nth++) {
                start();
                sg_hold(0, 0, 40 * MIB);
                sg_fail(SG_MEM_INFO, nth, 8, -EIO);
                alloc(40 * MIB);
                GR_CHECK_EQ(BYTES(DRIVER), 0);
                finish();
        }
}

static void test_sync(void)
{
        uint64_t waited_ns;

        start();
        cache(15, 4 * MIB, 10 * SG_MS); /* the i-th is idle after i * 10 ms */
        alloc(34 * MIB);
        check_tried_until(GR_RUNG_SYNC);
        waited_ns = sg_driver.now_ns() - SG_FIRST_NS;
        GR_CHECK(waited_ns >= 80 * SG_MS); /* eight of them were enough... */
        GR_CHECK(waited_ns < 95 * SG_MS);  /* ...and it waited for no more */
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_SYNC), 0);
        GR_CHECK_EQ(sg_calls(SG_MEM_FREE), 0);
        GR_CHECK_EQ(sg_cached_bytes(device), 28 * MIB);
        finish();

        /* Without fences the context as a whole is waited for. */
        start_with(&sg_old_driver, GR_REUSE_POLL);
        cache(15, 4 * MIB, 10 * SG_MS);
        alloc(34 * MIB);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_SYNC), 1);
        finish();

        /* That may fail once. */
        start_with(&sg_old_driver, GR_REUSE_POLL);
        cache(15, 4 * MIB, 10 * SG_MS);
        sg_fail(SG_CONTEXT_SYNC, 1, 1, gr_driver_error(1));
        alloc(34 * MIB);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_SYNC), 2);
        finish();

        /* Work that does not end: a failure in the end, not a hang. */
        start();
        cache(15, 4 * MIB, UINT64_C(3600) * 1000 * SG_MS);
        {
                uint64_t ptr;

                GR_CHECK_EQ(sg_alloc(context, 34 * MIB, &ptr), -ENOMEM);
        }
        check_tried_until(GR_RUNG_FAIL);
        GR_CHECK(sg_driver.now_ns() < SG_FIRST_NS + 70000 * SG_MS); /* one wait, of a minute */
        finish();
}

/*
 * The device's own work is waited for as the driver's free would, however many contexts the device has; work of another
 * device may wait for what the program does later, so that wait is short.
 */
static void test_sync_contexts(unsigned own, bool peer)
{
        uint64_t blocks[14], ptr = 0;

        start();
        for (unsigned i = 0; i < own; i++)
                gr_core_context_add(&core, sg_context_new(0), 0);
        if (peer)
                gr_fence_add_accessor(context->fence, gr_core_context_add(&core, sg_context_new(1), 1));
        for (unsigned i = 0; i < 14; i++)
                blocks[i] = alloc(4 * MIB);
        for (unsigned i = 0; i < 14; i++)
                sg_work(context->handle, 0, blocks[i], i == 0 ? 3000 * SG_MS : SG_MS);
        for (unsigned i = 0; i < 14; i++)
                free_ok(blocks[i]);
        GR_CHECK_EQ(sg_alloc(context, 32 * MIB, &ptr), peer ? -ENOMEM : 0);
        GR_CHECK(peer == (sg_driver.now_ns() - SG_FIRST_NS < 3000 * SG_MS));
        finish();
}

/* Another thread that keeps the GPU busy, and frees, whenever the host sleeps. */
static unsigned work_share; /* of the time that the host sleeps; above 1 the GPU falls behind */

static void sleep_at_work(uint64_t ns)
{
        static bool inside; /* it may have to wait itself */
        uint64_t block = 0;

        sg_driver.sleep_ns(ns);
        if (inside)
                return;
        inside = true;
        if (sg_alloc(context, MIB, &block) == 0) {
                sg_work(context->handle, 1, block, work_share * ns);
                free_ok(block);
                gr_fence_close(context->fence);
        }
        inside = false;
}

/* What others free while the host waits for the GPU is not waited for without end. */
static void test_sync_at_work(bool peers, unsigned share)
{
        struct gr_driver driver = sg_driver;
        uint64_t ptr;

        driver.sleep_ns = sleep_at_work;
        work_share = share;
        start_with(&driver, GR_REUSE_AUTO);
        if (peers)
                gr_core_context_add(&core, sg_context_new(0), 0);
        cache(4, 4 * MIB, 5 * SG_MS);
        GR_CHECK_EQ(sg_alloc(context, CARD + MIB, &ptr), -ENOMEM);
        check_tried_until(GR_RUNG_FAIL);
        GR_CHECK(sg_driver.now_ns() < SG_FIRST_NS + 500 * SG_MS);
        finish();
}

static void test_sync_by_at_work(void)
{
        struct gr_driver driver = sg_driver;

        driver.sleep_ns = sleep_at_work;
        work_share = 1;
        start_with(&driver, GR_REUSE_AUTO);
        cache(4, 4 * MIB, 5 * SG_MS);
        GR_CHECK_EQ(gr_fence_sync_by(context->fence, sg_driver.now_ns() + 60000 * SG_MS), 0);
        GR_CHECK(sg_driver.now_ns() < SG_FIRST_NS + 500 * SG_MS);
        finish();
}

/*
 * What the driver frees in the order of a stream comes back once the driver has waited: where any is held, and the work
 * ends in time, which is a second where work may wait for what the program does later.
 */
static void test_in_order(void)
{
        static const struct {
                bool held, graph, waits_for_others;
                uint64_t work_ms;
                unsigned syncs;
        } cases[] = {{.held = true, .syncs = 1},
                     {.held = true, .graph = true, .syncs = 1},
                     {.held = true, .work_ms = 3000, .syncs = 1},
                     {.held = true, .waits_for_others = true, .syncs = 1},
                     {.held = true, .waits_for_others = true, .work_ms = 500, .syncs = 1},
                     {.held = true, .waits_for_others = true, .work_ms = 3600000},
                     {.held = false}};
        uint64_t ptr;

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
                enum gr_memory_kind kind = cases[i].graph ? GR_MEMORY_GRAPH : GR_MEMORY_STREAM_ORDERED;

                start();
                if (cases[i].held)
                        gr_budget_force(device, kind, MIB);
                if (cases[i].work_ms)
                        sg_work(context->handle, 0, 0, cases[i].work_ms * SG_MS);
                atomic_store(&core.waits_for_others, cases[i].waits_for_others);
                GR_CHECK_EQ(sg_alloc(context, 65 * MIB, &ptr), -ENOMEM);
                GR_CHECK_EQ(sg_calls(SG_CONTEXT_SYNC), cases[i].syncs);
                GR_CHECK_EQ(sg_calls(SG_TRIM_POOLS), 1 + cases[i].held);
                GR_CHECK(sg_driver.now_ns() - SG_FIRST_NS < (cases[i].waits_for_others ? 2000 : 4000) * SG_MS);
                if (cases[i].held)
                        gr_budget_uncharge(device, kind, MIB);
                finish();
        }
}

/* All rungs run, in their order, and each sees what those before it left. */
static void test_order(void)
{
        struct holder purged = {0}, dropped = {0};
        struct gr_reclaimable first = {.name = "first", .purge = let_go, .arg = &purged};
        struct gr_reclaimable second = {.name = "second", .drop = let_go, .arg = &dropped};
        uint64_t ptr = 42, busy;

        start();
        gr_reclaimable_register(&core, &first);
        gr_reclaimable_register(&core, &second);
        cache(4, 4 * MIB, 0);
        busy = alloc(8 * MIB);
        sg_work(context->handle, 0, busy, 50 * SG_MS);
        free_ok(busy);
        GR_CHECK_EQ(sg_alloc(context, 65 * MIB, &ptr), -ENOMEM); /* more than the card */
        GR_CHECK_EQ(ptr, 42);
        check_tried_until(GR_RUNG_FAIL);
        GR_CHECK_EQ(purged.calls, 1);
        GR_CHECK_EQ(purged.releases + purged.trims, 0); /* before TRIM and DRIVER */
        GR_CHECK_EQ(dropped.calls, 1);
        GR_CHECK(dropped.releases > 0);
        GR_CHECK_EQ(dropped.trims, 1);
        GR_CHECK(dropped.seen_ns >= SG_FIRST_NS + 50 * SG_MS); /* after SYNC */
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        GR_CHECK_EQ(TRIES(FAIL), 1);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_failures), 1);
        for (enum gr_rung rung = GR_RUNG_NEIGHBOUR; rung <= GR_RUNG_SPILL; rung++)
                GR_CHECK_EQ(gr_rung_run(context, rung, MIB), 0);
        finish();
}

static void *register_one(void *reclaimable)
{
        return (void *)(intptr_t)gr_reclaimable_register(&core, reclaimable);
}

static void test_registry(void)
{
        pthread_t thread;
        void *rc;
        static struct gr_reclaimable many[GR_RECLAIMABLES_MAX + 1];

        start();
        GR_CHECK_EQ(gr_reclaimable_unregister(&core, &many[0]), -ENOENT);
        for (int i = 0; i < GR_RECLAIMABLES_MAX; i++)
                GR_CHECK_EQ(gr_reclaimable_register(&core, &many[i]), 0);
        GR_CHECK_EQ(gr_reclaimable_register(&core, &many[3]), -EEXIST);
        GR_CHECK_EQ(gr_reclaimable_register(&core, &many[GR_RECLAIMABLES_MAX]), -ENOSPC);
        GR_CHECK_EQ(gr_reclaimable_unregister(&core, &many[3]), 0);
        GR_CHECK_EQ(gr_reclaimable_register(&core, &many[GR_RECLAIMABLES_MAX]), 0);

        /* Not beside another thread that looks at the slots. */
        GR_CHECK_EQ(gr_reclaimable_unregister(&core, &many[4]), 0);
        gr_lock(&core.registry->lock);
        GR_CHECK_EQ(pthread_create(&thread, NULL, register_one, &many[4]), 0);
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
        GR_CHECK(!core.registry->slots[4].entry);
        gr_unlock(&core.registry->lock);
        pthread_join(thread, &rc);
        GR_CHECK(!rc && core.registry->slots[4].entry == &many[4]);
        finish();
}

static struct gr_reclaimable_slot *posted;

static void (*posted_work)(void *arg);

static bool post(void (*work)(void *arg), void *arg)
{
        posted_work = work;
        posted = arg;
        return true;
}

/* The run ends, and at once another thread has the next one begin. */
static void sleep_and_follow(uint64_t ns)
{
        sg_driver.sleep_ns(ns);
        posted->runs++;
}

/* One run is waited for, not those that follow it. */
static void test_one_run(void)
{
        static struct gr_reclaimable busy = {.name = "busy", .purge = let_go, .apart = true};
        static struct gr_driver driver;

        driver = sg_driver;
        driver.sleep_ns = sleep_and_follow;
        start_with(&driver, GR_REUSE_AUTO);
        core.registry->apart = post;
        GR_CHECK_EQ(gr_reclaimable_register(&core, &busy), 0);
        gr_reclaimables_run(&core, false, 0, MIB, 0);
        GR_CHECK(sg_driver.now_ns() < SG_FIRST_NS + SG_MS);
        posted->running = false;
        GR_CHECK_EQ(gr_reclaimable_unregister(&core, &busy), 0);
        finish();
}

static sem_t asleep, awake;
static pthread_t beside;
static unsigned beside_sleeps;

static void *run_beside(void *arg)
{
        gr_reclaimables_run(&core, false, 0, MIB, 0);
        return arg;
}

static void sleep_until_again(uint64_t ns)
{
        sg_driver.sleep_ns(ns);
        if (++beside_sleeps == 1) {
                sem_post(&asleep);
                sem_wait(&awake);
        }
}

/* No worker can be started: at first while another thread comes to wait, then while it wakes. */
static bool refuse_worker(void (*work)(void *arg), void *arg)
{
        (void)work, (void)arg;
        if (beside_sleeps == 0) {
                GR_CHECK_EQ(pthread_create(&beside, NULL, run_beside, NULL), 0);
                sem_wait(&asleep);
        } else {
                sem_post(&awake);
                pthread_join(beside, NULL);
        }
        return false;
}

/* A run that could not begin is waited for no longer, even where the next one has begun. */
static void test_no_run(void)
{
        static struct gr_reclaimable idle = {.name = "idle", .purge = let_go, .apart = true};
        static struct gr_driver driver;

        driver = sg_driver;
        driver.sleep_ns = sleep_until_again;
        start_with(&driver, GR_REUSE_AUTO);
        core.registry->apart = refuse_worker;
        sem_init(&asleep, 0, 0);
        sem_init(&awake, 0, 0);
        beside_sleeps = 0;
        GR_CHECK_EQ(gr_reclaimable_register(&core, &idle), 0);
        gr_reclaimables_run(&core, false, 0, MIB, 0);
        gr_reclaimables_run(&core, false, 0, MIB, 0);
        GR_CHECK_EQ(beside_sleeps, 1);
        GR_CHECK_EQ(gr_reclaimable_unregister(&core, &idle), 0);
        sem_destroy(&asleep);
        sem_destroy(&awake);
        finish();
}

static struct gr_reclaimable quitter = {.name = "quitter", .purge = let_go, .apart = true};
static unsigned sleeps;

/* It leaves before the thread comes to run it, and that comes while it is waited for. */
static void sleep_and_leave(uint64_t ns)
{
        sg_driver.sleep_ns(ns);
        if (++sleeps == 1)
                GR_CHECK_EQ(gr_reclaimable_unregister(&core, &quitter), 0);
        else if (sleeps == 2)
                posted_work(posted);
}

static void test_left_before(void)
{
        static struct gr_driver driver;
        struct holder holder = {0};

        driver = sg_driver;
        driver.sleep_ns = sleep_and_leave;
        start_with(&driver, GR_REUSE_AUTO);
        core.registry->apart = post;
        sleeps = 0;
        quitter.arg = &holder;
        GR_CHECK_EQ(gr_reclaimable_register(&core, &quitter), 0);
        gr_reclaimables_run(&core, false, 0, MIB, 0);
        GR_CHECK(sleeps >= 2);
        GR_CHECK_EQ(holder.calls, 0);
        finish();
}

static void test_failing_hooks(void)
{
        struct holder bad = {.rc = -EIO}, good = {0};
        struct gr_reclaimable first = {.name = "bad", .purge = let_go, .arg = &bad};
        struct gr_reclaimable second = {.name = "good", .purge = let_go, .arg = &good};
        uint64_t until_ns;

        start();
        gr_reclaimable_register(&core, &first);
        gr_reclaimable_register(&core, &second);
        gr_rung_run(context, GR_RUNG_PURGE, MIB);
        gr_rung_run(context, GR_RUNG_PURGE, MIB);
        bad.rc = 0; /* not three in a row */
        gr_rung_run(context, GR_RUNG_PURGE, MIB);
        bad.rc = -EIO;
        GR_CHECK_EQ(bad.calls, 3);
        for (int i = 0; i < 3; i++)
                gr_rung_run(context, GR_RUNG_PURGE, MIB);
        until_ns = sg_now_ns() + GR_RECLAIMABLE_LEFT_OUT_NS;
        for (int i = 0; i < 7; i++)
                gr_rung_run(context, GR_RUNG_PURGE, MIB);
        sg_advance(until_ns - 1 - sg_now_ns());
        gr_rung_run(context, GR_RUNG_PURGE, MIB);
        GR_CHECK_EQ(bad.calls, 6); /* left out after three */
        GR_CHECK_EQ(good.calls, 14);
        sg_advance(1);
        for (int i = 0; i < 4; i++)
                gr_rung_run(context, GR_RUNG_PURGE, MIB);
        GR_CHECK_EQ(bad.calls, 9); /* once more */
        GR_CHECK_EQ(gr_reclaimable_unregister(&core, &first), 0);
        GR_CHECK_EQ(gr_reclaimable_register(&core, &first), 0); /* a new chance */
        gr_rung_run(context, GR_RUNG_PURGE, MIB);
        GR_CHECK_EQ(bad.calls, 10);
        finish();
}

static struct {
        uint64_t ptr;
        size_t bytes; /* that it allocates; 0: none */
        unsigned depth, deepest, calls;
        int rc;
} reentrant;

/* Frees, allocates and reclaims from inside. It stops by itself where the ladder would call it without end. */
static int come_again(void *arg, int of_device, uint64_t want_bytes)
{
        uint64_t ptr;

        (void)arg;
        (void)of_device;
        reentrant.calls++;
        if (++reentrant.depth > reentrant.deepest)
                reentrant.deepest = reentrant.depth;
        if (reentrant.depth < 50 && reentrant.calls < 1000) {
                if (reentrant.ptr) {
                        ptr = reentrant.ptr;
                        reentrant.ptr = 0;
                        free_ok(ptr);
                }
                gr_rung_run(context, GR_RUNG_TRIM, want_bytes);
                if (reentrant.bytes) {
                        reentrant.rc = sg_alloc(context, reentrant.bytes, &ptr);
                        if (!reentrant.rc)
                                free_ok(ptr);
                }
        }
        reentrant.depth--;
        return 0;
}

static void test_reentrant_hook(void)
{
        struct gr_reclaimable reclaimable = {.name = "reentrant", .purge = come_again, .drop = come_again};
        uint64_t ptr;

        start();
        memset(&reentrant, 0, sizeof(reentrant));
        reentrant.ptr = alloc(40 * MIB);
        reentrant.bytes = 4096;
        GR_CHECK_EQ(gr_reclaimable_register(&core, &reclaimable), 0);
        alloc(40 * MIB);
        GR_CHECK_EQ(TRIES(PURGE), 1);
        GR_CHECK_EQ(TRIES(DRIVER), 0); /* what the hook gave back served */
        GR_CHECK_EQ(reentrant.rc, 0);
        finish();

        /* What it asks for cannot be had: it fails, and the climb goes on and ends. */
        start();
        memset(&reentrant, 0, sizeof(reentrant));
        reentrant.bytes = 65 * MIB;
        GR_CHECK_EQ(gr_reclaimable_register(&core, &reclaimable), 0);
        GR_CHECK_EQ(sg_alloc(context, 66 * MIB, &ptr), -ENOMEM);
        GR_CHECK_EQ(reentrant.rc, -ENOMEM);
        GR_CHECK(reentrant.deepest < 5);
        GR_CHECK(reentrant.calls < 50);
        finish();
}

static void test_capture(void)
{
        uint64_t ptr;

        start();
        cache(15, 4 * MIB, 10 * SG_MS);
        sg_capture(1);
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        free_ok(alloc(MIB)); /* in an epoch that cannot be closed */
        sg_log_clear();
        GR_CHECK_EQ(sg_alloc(context, 65 * MIB, &ptr), -ENOMEM);
        GR_CHECK(strpbrk(sg_log(), "rws") == NULL);
        GR_CHECK_EQ(atomic_load(&context->fence->broken), 0);
        sg_capture(-1);
        gr_gate_end(&core.gate);
        finish();
}

/* The card is full of what was freed during a capture, which no fence will ever cover while that goes on. */
static void test_capture_waits(const struct gr_driver *driver)
{
        struct gr_context *other;
        uint64_t ptr;

        start_with(driver, GR_REUSE_AUTO);
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        sg_capture(1);
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        for (int i = 0; i < 2; i++) {
                uint64_t blocks[4];

                for (int n = 0; n < 4; n++) {
                        blocks[n] = alloc(16 * MIB - (uint64_t)i * 4 * MIB);
                        sg_work(context->handle, 0, blocks[n], 2 * SG_MS);
                        sg_work(other->handle, 0, 0, 3 * SG_MS);
                }
                for (int n = 0; n < 4; n++)
                        free_ok(blocks[n]);
        }
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_DRAIN), 2); /* one wait for both contexts readied all that was freed */
        ptr = alloc(CARD);
        free_ok(ptr);
        GR_CHECK_EQ(atomic_load(&context->fence->broken), 0);
        GR_CHECK_EQ(TRIES(FAIL), 0);
        sg_capture(-1);
        gr_gate_end(&core.gate);
        finish();
}

/*
 * The same where work may wait for what the program does later: not behind a kernel that does not end, but behind one
 * that only takes long. of_other: another context's memory is what could go back; in_other: the kernel is of another.
 */
static void test_capture_stuck(uint64_t ms, bool ends, bool of_other, bool in_other)
{
        struct gr_context *other, *owner, *busy;
        uint64_t blocks[3], ptr = 0;

        start();
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        owner = of_other ? other : context;
        busy = in_other ? other : context;
        atomic_store(&core.waits_for_others, true);
        for (int i = 0; i < 3; i++)
                GR_CHECK_EQ(sg_alloc(i < 2 ? busy : owner, i < 2 ? 1000 : 32 * MIB, &blocks[i]), 0);
        sg_work(busy->handle, 0, blocks[0], ms * SG_MS);
        free_ok(blocks[0]); /* which gives nothing back by itself */
        gr_fence_close(busy->fence);
        sg_capture(1);
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        free_ok(blocks[2]);
        GR_CHECK_EQ(sg_alloc(context, 48 * MIB, &ptr), ends ? 0 : -ENOMEM);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_DRAIN), ends ? 2 : 0); /* both can reach it */
        GR_CHECK(sg_driver.now_ns() < SG_FIRST_NS + 10000 * SG_MS);
        sg_capture(-1);
        gr_gate_end(&core.gate);
        finish();
}

static void begin_capture(void)
{
        gr_core_will_capture(&core);
        gr_gate_begin_enter(&core.gate);
        sg_capture(1);
        gr_gate_begin_leave(&core.gate, true);
}

static void end_capture(void)
{
        sg_capture(-1);
        gr_gate_end(&core.gate);
}

static void wait_for_others(uint64_t ms)
{
        gr_core_stream_will_wait(&core);
        sg_work(context->handle, 1, 0, ms * SG_MS);
        gr_core_stream_waits(&core);
}

/* What is freed before work that waits for the program, or before a capture, is not fenced behind that. */
static void test_freed_before(bool waits, bool captures)
{
        uint64_t ptr;

        start();
        atomic_store(&core.streams_overlap, true);
        ptr = alloc(20 * MIB);
        sg_work(context->handle, 0, ptr, 2 * SG_MS);
        free_ok(ptr);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD), 0);
        if (captures)
                begin_capture();
        if (waits)
                wait_for_others(3600000);
        else
                sg_work(context->handle, 1, 0, UINT64_C(3600000) * SG_MS);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD), 1);
        ptr = alloc(50 * MIB);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_DRAIN), 0);
        GR_CHECK(sg_driver.now_ns() < SG_FIRST_NS + 1000 * SG_MS);
        if (waits) /* nothing was freed since */
                wait_for_others(1);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD), 1);
        if (captures)
                end_capture();
        finish();
}

/*
 * What is freed in a capture is waited for without end only where streams are known to wait for the program no more:
 * an event came behind the last wait, before the capture, and has passed.
 */
static void test_capture_and_waits(uint64_t before_ms, bool inside, bool ends)
{
        uint64_t ptr, block;

        start();
        wait_for_others(before_ms);
        begin_capture();
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD), 2); /* pinned memory has fences of its own */
        block = alloc(32 * MIB);
        free_ok(block);
        if (inside)
                wait_for_others(2);
        GR_CHECK_EQ(sg_alloc(context, 48 * MIB, &ptr), ends ? 0 : -ENOMEM);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_DRAIN), ends);
        GR_CHECK(sg_driver.now_ns() < SG_FIRST_NS + 3000 * SG_MS);
        end_capture();

        /* The next one is behind all that, once more. */
        if (!ends && before_ms < 1000) {
                sg_advance(1000 * SG_MS); /* in which the thread's frees went to the driver */
                begin_capture();
                ptr = alloc(48 * MIB);
                end_capture();
        }
        finish();
}

/* There a capture that may end soon is waited for; one that was waited for in vain is not, but the next one. */
static void test_capture_long(void)
{
        enum { ROUNDS = 10 };
        uint64_t waited_ns[2];

        start();
        atomic_store(&core.waits_for_others, true);
        for (int i = 0; i < 2; i++) {
                uint64_t begin_ns = sg_driver.now_ns();

                sg_capture(1);
                gr_gate_begin_enter(&core.gate);
                gr_gate_begin_leave(&core.gate, true);
                for (int n = 0; n < ROUNDS; n++) {
                        uint64_t ptr = alloc((n % 2 ? 40 : 48) * MIB);

                        sg_work(context->handle, 0, ptr, SG_MS);
                        free_ok(ptr);
                }
                waited_ns[i] = sg_driver.now_ns() - begin_ns;
                sg_capture(-1);
                gr_gate_end(&core.gate);
        }
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_DRAIN), 2 * ROUNDS - 1);
        for (int i = 0; i < 2; i++) {
                GR_CHECK(waited_ns[i] > 50 * SG_MS);
                GR_CHECK(waited_ns[i] < 150 * SG_MS);
        }
        finish();
}

static _Atomic unsigned captures_begun;
static _Atomic bool captures_stop;

/* Ends its capture when the other thread has begun the next one, or does not come to it. */
static void *capture_in_turn(void *arg)
{
        (void)arg;
        while (!atomic_load(&captures_stop)) {
                unsigned mine;

                gr_gate_begin_enter(&core.gate);
                gr_gate_begin_leave(&core.gate, true);
                mine = atomic_fetch_add(&captures_begun, 1) + 1;
                for (int i = 0; i < 20 && atomic_load(&captures_begun) == mine && !atomic_load(&captures_stop); i++)
                        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
                gr_gate_end(&core.gate);
        }
        return NULL;
}

static void sleep_for_all(uint64_t ns)
{
        sg_advance(ns);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

/* Where threads capture in turn, and one is always capturing, new ones hold off for whoever is out of memory. */
static void test_captures_in_turn(void)
{
        struct gr_driver driver = sg_driver;
        pthread_t threads[2];
        uint64_t ptr = 0;

        driver.sleep_ns = sleep_for_all;
        start_with(&driver, GR_REUSE_AUTO);
        gr_core_stream_will_wait(&core); /* somewhere, and for long */
        ptr = alloc(40 * MIB);
        for (int i = 0; i < 2; i++)
                GR_CHECK_EQ(pthread_create(&threads[i], NULL, capture_in_turn, NULL), 0);
        while (atomic_load(&captures_begun) < 4)
                sched_yield();
        free_ok(ptr);
        GR_CHECK_EQ(sg_alloc(context, 48 * MIB, &ptr), 0);
        atomic_store(&captures_stop, true);
        for (int i = 0; i < 2; i++)
                pthread_join(threads[i], NULL);
        finish();
}

static struct gr_context *polled; /* by another thread, while memory of it goes back */

static int polled_release(void *handle, const uint64_t *ptrs, size_t count, size_t *ret_done)
{
        if (polled) {
                sg_advance(10 * SG_MS);
                GR_CHECK_EQ(gr_fence_poll(polled->fence), 0);
                polled = NULL;
        }
        return sg_driver.mem_release(handle, ptrs, count, ret_done);
}

/* What another thread has seen to have passed goes back as well, where nothing is left to wait for. */
static void test_sync_polled(void)
{
        struct gr_driver driver = sg_driver;
        struct gr_context *other;
        uint64_t blocks[3], ptr = 0;

        driver.mem_release = polled_release;
        start_with(&driver, GR_REUSE_AUTO);
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        for (int i = 0; i < 3; i++)
                GR_CHECK_EQ(sg_alloc(other, i < 2 ? 1000 : 32 * MIB, &blocks[i]), 0);
        for (int i = 1; i < 3; i++) {
                sg_work(other->handle, 0, blocks[i], 2 * SG_MS);
                free_ok(blocks[i]); /* the first gives nothing back by itself */
                gr_fence_close(other->fence);
        }
        polled = other;
        GR_CHECK_EQ(sg_alloc(context, 48 * MIB, &ptr), 0);
        GR_CHECK(!polled);
        finish();
}

static unsigned asked;

static uint64_t ask(struct gr_core *asker, struct gr_device *of, uint64_t want_bytes)
{
        (void)asker, (void)of, (void)want_bytes;
        asked++;
        return 0;
}

/* A group whose limit others have used up. */
static int refuse(void *arg, uint64_t bytes)
{
        (void)arg, (void)bytes;
        return -EDQUOT;
}

static void adjust(void *arg, int64_t bytes)
{
        (void)arg, (void)bytes;
}

static uint64_t none(void *arg)
{
        (void)arg;
        return 0;
}

static const struct gr_group full_group = {
        .limit_bytes = MIB, .reserve = refuse, .adjust = adjust, .room = none, .excess = none};

/* Other processes can help where the card or the group's limit is what refuses, not where it is the process's own. */
static void test_asks_neighbours(void)
{
        static const struct {
                uint64_t hard_bytes;
                size_t bytes;
                const struct gr_group *group;
                int error;
                bool helps;
        } cases[] = {
                {GR_UNLIMITED, 65 * MIB, NULL, -ENOMEM, true},
                {32 * MIB, 33 * MIB, NULL, -EDQUOT, false},
                {80 * MIB, 65 * MIB, NULL, -ENOMEM, true},
                {80 * MIB, 33 * MIB, &full_group, -EDQUOT, true},
        };
        uint64_t ptr;

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
                start();
                core.ask_neighbours = ask;
                atomic_store(&device->hard_bytes, cases[i].hard_bytes);
                atomic_store(&device->group, cases[i].group);
                asked = 0;
                GR_CHECK_EQ(sg_alloc(context, cases[i].bytes, &ptr), cases[i].error);
                GR_CHECK_EQ(asked > 0, cases[i].helps);
                GR_CHECK_EQ(TRIES(NEIGHBOUR) > 0, cases[i].helps);
                finish();
        }
}

static unsigned reports;
static char all_lines[16384];

static void take_line(const char *line, size_t line_bytes, void *arg)
{
        size_t used = strlen(all_lines);

        GR_CHECK(arg == &reports);
        if (used + line_bytes < sizeof(all_lines))
                memcpy(all_lines + used, line, line_bytes);
        if (memmem(line, line_bytes, "no room for", 11))
                reports++;
}

static void test_report(void)
{
        uint64_t ptr;

        start();
        gr_log_set_sink(take_line, &reports);
        gr_log_set_level(WITHIN);
        cache(3, 4 * MIB, 0);
        GR_CHECK_EQ(sg_alloc(context, 65 * MIB, &ptr), -ENOMEM);
        GR_CHECK_EQ(reports, 1);
        GR_CHECK(strstr(all_lines, "65.000 MiB") != NULL);           /* what was asked for */
        GR_CHECK(strstr(all_lines, "trim gave 12.000 MiB") != NULL); /* and what a rung gave */
        GR_CHECK(strstr(all_lines, "neighbour gave") == NULL);       /* that was tried */
        for (int i = 0; i < 20; i++)
                GR_CHECK_EQ(sg_alloc(context, 65 * MIB, &ptr), -ENOMEM);
        GR_CHECK(reports < 15);
        reports = 0;
        memset(all_lines, 0, sizeof(all_lines));
        sg_advance(3600 * 1000 * SG_MS);
        GR_CHECK_EQ(sg_alloc(context, 65 * MIB, &ptr), -ENOMEM);
        GR_CHECK_EQ(reports, 1);
        GR_CHECK(strstr(all_lines, " more ") != NULL); /* how many went unsaid */

        /* By default a full card is the program's own affair; a limit is ours to explain. */
        gr_log_set_level(GR_LOG_WARN);
        sg_advance(3600 * 1000 * SG_MS);
        GR_CHECK_EQ(sg_alloc(context, 65 * MIB, &ptr), -ENOMEM);
        GR_CHECK_EQ(reports, 1);
        atomic_store(&device->hard_bytes, 8 * MIB);
        GR_CHECK_EQ(sg_alloc(context, 10 * MIB, &ptr), -EDQUOT);
        GR_CHECK_EQ(reports, 2);
        GR_CHECK(strstr(all_lines, "8.000 MiB") != NULL);
        gr_log_set_level(GR_LOG_SILENT);
        gr_log_set_sink(NULL, NULL);
        finish();
}

static void test_hard_limit(void)
{
        uint64_t ptrs[4], ptr = 42;

        start();
        atomic_store(&device->hard_bytes, 32 * MIB);
        for (int i = 0; i < 4; i++)
                ptrs[i] = alloc(8 * MIB); /* exactly full */
        GR_CHECK_EQ(sg_alloc(context, 1, &ptr), -EDQUOT);
        GR_CHECK_EQ(sg_alloc(context, 2 * MIB, &ptr), -EDQUOT);
        GR_CHECK_EQ(ptr, 42);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_limit_hits), 2); /* one for each request, however often it was tried */
        GR_CHECK_EQ(sg_used_bytes(0), 32 * MIB);
        sg_advance(1000 * SG_MS);
        free_ok(ptrs[0]);
        alloc(3 * MIB); /* what is cached makes room: 4 of 8 */
        alloc(2 * MIB);
        alloc(2 * MIB);
        GR_CHECK_EQ(sg_alloc(context, 1, &ptr), -EDQUOT);

        /* A cache behind running work makes room as well. */
        sg_advance(1000 * SG_MS);
        sg_work(context->handle, 0, ptrs[1], 20 * SG_MS);
        free_ok(ptrs[1]);
        alloc(4096);
        GR_CHECK(atomic_load(&device->peak_reserved_bytes) <= 32 * MIB);
        finish();
}

static int (*attempt_next)(void);

static int attempt(void *arg)
{
        (void)arg;
        return attempt_next();
}

static int refused_by_limit(void)
{
        return gr_budget_charge(device, GR_MEMORY_MANAGED, 8 * MIB);
}

static int refused_by_card(void)
{
        uint64_t free_bytes = 0, total;

        sg_driver.mem_info(context->handle, &free_bytes, &total);
        return free_bytes < 8 * MIB ? -ENOMEM : 0;
}

/* As much is given back as lacks by whoever refused last: the limit, or the card. */
static void test_what_lacks(bool by_limit)
{
        start();
        cache(7, 4 * MIB, 0);
        gr_fence_poll(context->fence);
        if (by_limit)
                atomic_store(&device->hard_bytes, 32 * MIB);
        else
                sg_hold(0, 32 * MIB, 0);
        attempt_next = by_limit ? refused_by_limit : refused_by_card;
        GR_CHECK_EQ(gr_ladder_climb_for(context, 8 * MIB, attempt, NULL, by_limit ? -ENOMEM : -EDQUOT), 0);
        GR_CHECK_EQ(sg_cached_bytes(device), 24 * MIB);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_limit_hits), 1);
        if (by_limit)
                gr_budget_uncharge(device, GR_MEMORY_MANAGED, 8 * MIB);
        finish();
}

/* A request that the pool does not serve takes no block of the driver's on the way. */
static void test_no_block(void)
{
        pool_begin(&sg_driver, CARD, &(struct gr_config){.reuse = GR_REUSE_AUTO, .pool = GR_POOL_SPLIT});
        device = context->device;
        GR_CHECK(gr_pool_kind_split_serves(context, 8 * MIB));
        sg_hold(0, CARD - 4 * MIB, 0);
        attempt_next = refused_by_card;
        GR_CHECK_EQ(gr_ladder_climb_for(context, 8 * MIB, attempt, NULL, -ENOMEM), -ENOMEM);
        GR_CHECK_EQ(sg_calls(SG_MEM_ALLOC), 0);
        finish();
}

/* Another error of the driver on the way up is the answer. */
static void test_other_error(void)
{
        uint64_t ptr;

        start();
        alloc(40 * MIB);
        sg_fail(SG_MEM_ALLOC, 2, 1, gr_driver_error(700));
        GR_CHECK_EQ(sg_alloc(context, 40 * MIB, &ptr), gr_driver_error(700));
        GR_CHECK_EQ(TRIES(FAIL), 0);
        finish();
}

/* A driver that takes its time to take memory back: until somebody else sleeps. */
static struct gr_driver slow_driver;
static _Atomic bool taking, slept;

static int slow_release(void *handle, const uint64_t *ptrs, size_t count, size_t *ret_done)
{
        atomic_store(&taking, true);
        while (!atomic_load(&slept))
                sched_yield();
        return sg_driver.mem_release(handle, ptrs, count, ret_done);
}

static void slow_sleep(uint64_t ns)
{
        atomic_store(&slept, true);
        sched_yield();
        sg_driver.sleep_ns(ns / 1000); /* of the clock, which counts by itself: the other thread needs real time */
}

static void *trim(void *arg)
{
        (void)arg;
        GR_CHECK_EQ(gr_trim(context, MIB), 20 * MIB);
        return NULL;
}

/* What another thread has taken out of the cache, and the driver not had yet, is waited for. */
static void test_returning(void)
{
        pthread_t thread;
        uint64_t ptr;

        slow_driver = sg_driver;
        slow_driver.mem_release = slow_release;
        slow_driver.sleep_ns = slow_sleep;
        start_with(&slow_driver, GR_REUSE_AUTO);
        atomic_store(&device->hard_bytes, 32 * MIB);
        cache(1, 20 * MIB, 0);
        gr_fence_poll(context->fence);
        atomic_store(&taking, false);
        atomic_store(&slept, false);
        if (pthread_create(&thread, NULL, trim, NULL))
                abort();
        while (!atomic_load(&taking))
                sched_yield();
        GR_CHECK_EQ(sg_alloc(context, 24 * MIB, &ptr), 0);
        atomic_store(&slept, true);
        pthread_join(thread, NULL);
        GR_CHECK_EQ(TRIES(FAIL), 0);
        GR_CHECK_EQ(atomic_load(&device->releases_begun), atomic_load(&device->releases_ended));
        finish();
}

static _Atomic int queue; /* 1: somebody waits for the GPU, 2: and another thread was served, 3: or was not in time */

static void *climb_beside(void *arg)
{
        uint64_t ptr;

        (void)arg;
        sg_fail(SG_MEM_ALLOC, 1, 2, -ENOMEM); /* at first, and after PURGE; what it needs is there */
        GR_CHECK_EQ(sg_alloc(context, 10 * MIB, &ptr), 0);
        atomic_store(&queue, 2);
        return NULL;
}

/* The clock stands still while the GPU waits for what the other thread submits once it has its memory. */
static void waiting_sleep(uint64_t ns)
{
        static pthread_t thread;
        int none = 0;

        if (atomic_compare_exchange_strong(&queue, &none, 1)) {
                if (pthread_create(&thread, NULL, climb_beside, NULL))
                        abort();
                for (int i = 0; i < 2000 && atomic_load(&queue) == 1; i++)
                        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
                GR_CHECK_EQ(atomic_load(&queue), 2);
                pthread_detach(thread);
        }
        sg_advance(ns);
}

/* Whoever waits for the GPU is in nobody's way: another thread that needs a rung gets it meanwhile. */
static void test_waits_alone(void)
{
        struct gr_driver driver = sg_driver;
        uint64_t busy, ptr;

        driver.sleep_ns = waiting_sleep;
        start_with(&driver, GR_REUSE_AUTO);
        atomic_store(&core.streams_overlap, true);
        busy = alloc(40 * MIB);
        sg_work(context->handle, 0, busy, 50 * SG_MS);
        free_ok(busy);
        atomic_store(&queue, 0);
        GR_CHECK_EQ(sg_alloc(context, 50 * MIB, &ptr), 0);
        GR_CHECK_EQ(atomic_load(&queue), 2);
        finish();
}

enum { OVERTAKERS = 15 };

static struct {
        uint64_t ptrs[OVERTAKERS];
        unsigned rounds, begun;
        pthread_t threads[8];
        _Atomic bool holding;
} overtaker;

/* Takes and frees again what a wait has readied, before the climber who waited has its lock back. */
static void *overtake(void *arg)
{
        uint64_t idle = atomic_load(&context->fence->idle_epoch);

        gr_lock(&device->ladder_lock);
        atomic_store(&overtaker.holding, true);
        while (atomic_load(&context->fence->idle_epoch) == idle)
                sched_yield();
        for (unsigned i = 0; i < OVERTAKERS; i++)
                overtaker.ptrs[i] = alloc(4 * MIB);
        for (unsigned i = 0; i < OVERTAKERS; i++)
                free_ok(overtaker.ptrs[i]);
        gr_unlock(&device->ladder_lock);
        return arg;
}

static int overtaken_drain(void *handle)
{
        if (overtaker.rounds > 0) {
                overtaker.rounds--;
                atomic_store(&overtaker.holding, false);
                if (pthread_create(&overtaker.threads[overtaker.begun++], NULL, overtake, NULL))
                        abort();
                while (!atomic_load(&overtaker.holding))
                        sched_yield();
        }
        return sg_driver.context_drain(handle);
}

/* Beside a capture only a wait readies what is freed: that others reuse it first is no reason to fail. */
static void test_overtaken(unsigned rounds)
{
        struct gr_driver driver = sg_driver;
        uint64_t ptr;

        driver.context_drain = overtaken_drain;
        start_with(&driver, GR_REUSE_AUTO);
        sg_capture(1);
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        for (unsigned i = 0; i < OVERTAKERS; i++)
                overtaker.ptrs[i] = alloc(4 * MIB);
        for (unsigned i = 0; i < OVERTAKERS; i++)
                free_ok(overtaker.ptrs[i]);
        overtaker.rounds = rounds;
        overtaker.begun = 0;
        GR_CHECK_EQ(sg_alloc(context, 16 * MIB, &ptr), 0);
        GR_CHECK_EQ(overtaker.rounds, 0);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_DRAIN), rounds + 1);
        while (overtaker.begun > 0)
                pthread_join(overtaker.threads[--overtaker.begun], NULL);
        sg_capture(-1);
        gr_gate_end(&core.gate);
        finish();
}

static void *trim_all(void *arg)
{
        (void)arg;
        gr_trim(context, UINT64_MAX / 2);
        return NULL;
}

/* Only what another thread has really given back is a reason to try again. */
static void test_others_returns(void)
{
        uint64_t seen;

        start();
        for (int cached = 0; cached < 2; cached++) {
                pthread_t thread;

                if (cached)
                        cache(1, 20 * MIB, 0);
                gr_fence_poll(context->fence);
                seen = gr_budget_releases_of_others(device);
                if (pthread_create(&thread, NULL, trim_all, NULL))
                        abort();
                pthread_join(thread, NULL);
                GR_CHECK_EQ(gr_budget_releases_of_others(device) != seen, cached);
                GR_CHECK(!gr_budget_releases_in_flight(device));
        }
        cache(1, 20 * MIB, 0);
        gr_fence_poll(context->fence);
        seen = gr_budget_releases_of_others(device);
        GR_CHECK(gr_trim(context, UINT64_MAX / 2) > 0);
        GR_CHECK_EQ(gr_budget_releases_of_others(device), seen);
        finish();
}

int main(void)
{
        test_ready();
        test_returning();
        test_waits_alone();
        test_overtaken(0);
        test_overtaken(1);
        test_overtaken(8);
        test_others_returns();
        test_fence();
        test_much_larger();
        test_purge_and_drop();
        test_purged_block();
        test_trim();
        test_driver();
        test_sync();
        test_sync_polled();
        test_sync_contexts(0, false);
        test_sync_contexts(1, false);
        test_sync_contexts(GR_ACCESSORS_MAX - 1, false);
        test_sync_contexts(GR_ACCESSORS_MAX, false);
        test_sync_contexts(0, true);
        test_sync_contexts(1, true);
        for (unsigned share = 1; share <= 3; share += 2) {
                test_sync_at_work(false, share);
                test_sync_at_work(true, share);
        }
        test_sync_by_at_work();
        test_asks_neighbours();
        test_in_order();
        test_order();
        test_registry();
        test_one_run();
        test_no_run();
        test_left_before();
        test_failing_hooks();
        test_reentrant_hook();
        test_capture();
        test_capture_waits(&sg_driver);
        test_capture_waits(&sg_old_driver);
        for (int i = 0; i < 4; i++) {
                test_capture_stuck(2, true, i & 1, i & 2);
                test_capture_stuck(200, true, i & 1, i & 2);
                test_capture_stuck(3600000, false, i & 1, i & 2);
        }
        test_freed_before(true, false);
        test_freed_before(false, true);
        test_freed_before(true, true);
        test_capture_and_waits(2, false, true);
        test_capture_and_waits(200, false, true);
        test_capture_and_waits(3600000, false, false);
        test_capture_and_waits(2, true, false);
        test_capture_long();
        test_captures_in_turn();
        test_report();
        test_hard_limit();
        test_what_lacks(true);
        test_what_lacks(false);
        test_no_block();
        test_other_error();
        return GR_CHECK_RESULT();
}
