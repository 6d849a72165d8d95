/* Reclaimables, with fake time: who is in the registry, how a run is waited for, and hooks that fail or come again. */
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <time.h>

#include "ladder_gpu.h"

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
        static struct gr_reclaimable busy = {.name = "busy", .purge = let_go, .on_worker = true};
        static struct gr_driver driver;

        driver = sg_driver;
        driver.sleep_ns = sleep_and_follow;
        start_with(&driver, GR_REUSE_AUTO);
        core.registry->call_worker = post;
        GR_CHECK_EQ(gr_reclaimable_register(&core, &busy), 0);
        gr_reclaimables_run(&core, GR_RUNG_PURGE, 0, MIB, 0);
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
        gr_reclaimables_run(&core, GR_RUNG_PURGE, 0, MIB, 0);
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
        static struct gr_reclaimable idle = {.name = "idle", .purge = let_go, .on_worker = true};
        static struct gr_driver driver;

        driver = sg_driver;
        driver.sleep_ns = sleep_until_again;
        start_with(&driver, GR_REUSE_AUTO);
        core.registry->call_worker = refuse_worker;
        sem_init(&asleep, 0, 0);
        sem_init(&awake, 0, 0);
        beside_sleeps = 0;
        GR_CHECK_EQ(gr_reclaimable_register(&core, &idle), 0);
        gr_reclaimables_run(&core, GR_RUNG_PURGE, 0, MIB, 0);
        gr_reclaimables_run(&core, GR_RUNG_PURGE, 0, MIB, 0);
        GR_CHECK_EQ(beside_sleeps, 1);
        GR_CHECK_EQ(gr_reclaimable_unregister(&core, &idle), 0);
        sem_destroy(&asleep);
        sem_destroy(&awake);
        finish();
}

static struct gr_reclaimable quitter = {.name = "quitter", .purge = let_go, .on_worker = true};
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
        core.registry->call_worker = post;
        sleeps = 0;
        quitter.arg = &holder;
        GR_CHECK_EQ(gr_reclaimable_register(&core, &quitter), 0);
        gr_reclaimables_run(&core, GR_RUNG_PURGE, 0, MIB, 0);
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

static unsigned warnings;

static void count_warning(const char *line, size_t bytes, void *arg)
{
        (void)line, (void)bytes, (void)arg;
        warnings++;
}

static bool runs_in_time;

static void sleep_and_run(uint64_t ns)
{
        sg_driver.sleep_ns(ns);
        if (runs_in_time && posted->running)
                posted_work(posted);
}

/* How long a purge is waited for. One that is not back in time is back before the next. */
static uint64_t waited_ns(bool in_time)
{
        uint64_t begin_ns = sg_now_ns(), waited;

        runs_in_time = in_time;
        gr_reclaimables_run(&core, GR_RUNG_PURGE, 0, MIB, 0);
        waited = sg_now_ns() - begin_ns;
        if (posted->running)
                posted_work(posted);
        return waited;
}

/*
 * What needs a lock that the allocating thread may hold is late whenever it does. Only the first time costs the whole
 * limit, and nobody is warned. After it was in time, it has all of its time again.
 */
static void test_needs_lock(bool needs_lock)
{
        struct holder holder = {0};
        struct gr_reclaimable framework = {.name = "framework",
                                           .purge = let_go,
                                           .arg = &holder,
                                           .limit_ns = 100 * SG_MS,
                                           .on_worker = true,
                                           .needs_lock = needs_lock};
        static struct gr_driver driver;
        unsigned calls;

        driver = sg_driver;
        driver.sleep_ns = sleep_and_run;
        start_with(&driver, GR_REUSE_AUTO);
        gr_log_set_level(GR_LOG_WARN);
        gr_log_set_sink(count_warning, NULL);
        warnings = 0;
        core.registry->call_worker = post;
        GR_CHECK_EQ(gr_reclaimable_register(&core, &framework), 0);
        GR_CHECK(waited_ns(false) >= 100 * SG_MS);
        GR_CHECK_EQ(waited_ns(false) < 20 * SG_MS, needs_lock);
        GR_CHECK(waited_ns(true) < SG_MS);
        GR_CHECK(waited_ns(false) >= 100 * SG_MS);
        GR_CHECK_EQ(waited_ns(false) < 20 * SG_MS, needs_lock);
        GR_CHECK_EQ(waited_ns(false) < 20 * SG_MS, needs_lock);
        calls = holder.calls;
        GR_CHECK_EQ(waited_ns(false), 0);
        GR_CHECK_EQ(holder.calls, calls); /* left out */
        GR_CHECK_EQ(warnings, needs_lock ? 0 : 6);
        holder.rc = -EIO;
        sg_advance(GR_RECLAIMABLE_LEFT_OUT_NS);
        waited_ns(true);
        GR_CHECK_EQ(warnings, needs_lock ? 1 : 7); /* an error is one for all */
        GR_CHECK_EQ(gr_reclaimable_unregister(&core, &framework), 0);
        gr_log_set_sink(NULL, NULL);
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

int main(void)
{
        test_registry();
        test_one_run();
        test_no_run();
        test_left_before();
        test_failing_hooks();
        test_needs_lock(true);
        test_needs_lock(false);
        test_reentrant_hook();
        return GR_CHECK_RESULT();
}
