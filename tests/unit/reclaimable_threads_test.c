/*
 * Reclaimables on threads of their own, in real time: ones that fail, hang, free, allocate, reclaim, and unregister
 * themselves, while eight threads need memory.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "alloc/pool.h"
#include "base/log.h"
#include "check.h"
#include "core.h"
#include "scripted.h"
#include "system/workers.h"

#define ROOM_BYTES (64 * MIB)
#define THREADS    8
#define ROUNDS     60

/* One for each test, and none destroyed: a thread that ran a reclaimable may be just leaving the registry's lock. */
static struct gr_core cores[6], *core;
static struct gr_parts parts[6];
static struct gr_context *context;
static struct gr_driver driver; /* the scripted one on the real clock */
static char said[1 << 16];
static pthread_mutex_t said_lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t now_ns(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void sleep_ns(uint64_t ns)
{
        struct timespec pause = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};

        nanosleep(&pause, NULL);
}

static void hear(const char *line, size_t bytes, void *arg)
{
        size_t used;

        (void)arg;
        pthread_mutex_lock(&said_lock);
        used = strlen(said);
        if (used + bytes < sizeof(said)) {
                memcpy(said + used, line, bytes);
                said[used + bytes] = '\0';
        }
        pthread_mutex_unlock(&said_lock);
}

static bool heard(const char *text)
{
        bool found;

        pthread_mutex_lock(&said_lock);
        found = strstr(said, text) != NULL;
        pthread_mutex_unlock(&said_lock);
        return found;
}

static void start(void)
{
        sg_reset(ROOM_BYTES);
        driver = sg_driver;
        driver.now_ns = now_ns;
        driver.sleep_ns = sleep_ns;
        said[0] = '\0';
        core = core ? core + 1 : cores;
        gr_core_init(core, &parts[core - cores], &driver,
                     &(struct gr_config){.reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS});
        core->registry->call_worker = gr_worker_call;
        context = gr_core_context_add(core, sg_context_new(0), 0);
}

static void finish(void)
{
        GR_CHECK_EQ(sg_misuses(), 0);
}

static _Atomic unsigned calls;
static _Atomic bool let_go, is_over;
static _Atomic uint64_t held; /* a block that a reclaimable gives up */
static pthread_t caller;
static _Atomic bool on_caller;

static int hang(void *arg, int device, uint64_t want_bytes)
{
        (void)arg;
        (void)device;
        (void)want_bytes;
        atomic_fetch_add(&calls, 1);
        while (!atomic_load(&let_go))
                sleep_ns(SG_MS);
        atomic_store(&is_over, true);
        return 0;
}

static void *let_go_soon(void *arg)
{
        sleep_ns(50 * SG_MS);
        atomic_store(&let_go, true);
        return arg;
}

static int give_up(void *arg, int device, uint64_t want_bytes)
{
        uint64_t ptr = atomic_exchange(&held, 0);

        (void)arg;
        (void)device;
        (void)want_bytes;
        if (pthread_equal(caller, pthread_self()))
                atomic_store(&on_caller, true);
        return ptr ? sg_free(core, ptr) : 0;
}

static int fail(void *arg, int device, uint64_t want_bytes)
{
        (void)arg;
        (void)device;
        (void)want_bytes;
        atomic_fetch_add(&calls, 1);
        return -EIO;
}

/* Allocates more than there is, so climbs itself: no reclaimable may be called for that. */
static int climb(void *arg, int device, uint64_t want_bytes)
{
        uint64_t ptr;

        (void)arg;
        (void)device;
        gr_rung_run(context, GR_RUNG_TRIM, want_bytes);
        gr_rung_run(context, GR_RUNG_PURGE, want_bytes);
        if (sg_alloc(context, ROOM_BYTES * 2, &ptr) == 0)
                GR_CHECK(!"memory that is not there");
        if (sg_alloc(context, 4096, &ptr) == 0)
                GR_CHECK_EQ(sg_free(core, ptr), 0);
        return 0;
}

static void test_served_by_another_thread(void)
{
        static struct gr_reclaimable giver = {.name = "giver", .purge = give_up, .on_worker = true};
        uint64_t ptr;

        start();
        caller = pthread_self();
        GR_CHECK_EQ(sg_alloc(context, 40 * MIB, &ptr), 0);
        atomic_store(&held, ptr);
        GR_CHECK_EQ(gr_reclaimable_register(core, &giver), 0);
        GR_CHECK_EQ(sg_alloc(context, 50 * MIB, &ptr), 0);
        GR_CHECK(!on_caller);
        GR_CHECK_EQ(sg_free(core, ptr), 0);

        /* DROP comes after SYNC; what it frees must go back all the same. */
        GR_CHECK_EQ(gr_reclaimable_unregister(core, &giver), 0);
        giver.purge = NULL;
        giver.drop = give_up;
        giver.on_worker = false; /* and this one runs here */
        GR_CHECK_EQ(gr_reclaimable_register(core, &giver), 0);
        GR_CHECK_EQ(sg_alloc(context, 40 * MIB, &ptr), 0);
        atomic_store(&held, ptr);
        GR_CHECK_EQ(sg_alloc(context, 60 * MIB, &ptr), 0);
        GR_CHECK(on_caller);
        GR_CHECK_EQ(gr_reclaimable_unregister(core, &giver), 0);
        finish();
}

/* One that hangs costs its limit, is named, does not keep the next from running, and is waited for in the end. */
static void test_hanging(void)
{
        static struct gr_reclaimable hanging = {
                .name = "stone", .purge = hang, .on_worker = true, .limit_ns = 50 * SG_MS};
        static struct gr_reclaimable giver = {.name = "giver", .purge = give_up, .on_worker = true};
        uint64_t ptr, begin_ns, took_ns = UINT64_MAX;

        start();
        atomic_store(&calls, 0);
        atomic_store(&let_go, false);
        GR_CHECK_EQ(sg_alloc(context, 40 * MIB, &ptr), 0);
        atomic_store(&held, ptr);
        GR_CHECK_EQ(gr_reclaimable_register(core, &hanging), 0);
        GR_CHECK_EQ(gr_reclaimable_register(core, &giver), 0);
        begin_ns = now_ns();
        GR_CHECK_EQ(sg_alloc(context, 50 * MIB, &ptr), 0);
        GR_CHECK(now_ns() - begin_ns >= 50 * SG_MS);
        GR_CHECK(now_ns() - begin_ns < 900 * SG_MS);
        GR_CHECK(heard("stone: purge did not return in time"));

        /* It still hangs: not entered again, not waited for again. A busy machine may be slow, but not each time. */
        for (int i = 0; i < 5; i++) {
                begin_ns = now_ns();
                gr_rung_run(context, GR_RUNG_PURGE, MIB);
                took_ns = gr_min(took_ns, now_ns() - begin_ns);
        }
        GR_CHECK(took_ns < 50 * SG_MS);
        GR_CHECK_EQ(calls, 1);

        atomic_store(&let_go, true);
        GR_CHECK_EQ(gr_reclaimable_unregister(core, &hanging), 0);
        GR_CHECK_EQ(gr_reclaimable_unregister(core, &giver), 0);
        gr_rung_run(context, GR_RUNG_PURGE, MIB);
        GR_CHECK_EQ(calls, 1);
        finish();
}

/*
 * Early reclaim has less patience than a failing allocation; one that is late for it alone has not failed. Who
 * unregisters it waits for its end.
 */
static void test_patience(void)
{
        static struct gr_reclaimable hanging = {
                .name = "pebble", .purge = hang, .on_worker = true, .limit_ns = 60000 * SG_MS};
        pthread_t friend;
        uint64_t begin_ns;

        start();
        atomic_store(&calls, 0);
        atomic_store(&let_go, false);
        atomic_store(&is_over, false);
        GR_CHECK_EQ(gr_reclaimable_register(core, &hanging), 0);
        begin_ns = now_ns();
        gr_reclaimables_run(core, GR_RUNG_PURGE, 0, MIB, 20 * SG_MS);
        GR_CHECK(now_ns() - begin_ns < 30000 * SG_MS);
        while (atomic_load(&calls) == 0) /* on a busy machine it begins later */
                sleep_ns(SG_MS);
        GR_CHECK(!heard("pebble"));
        GR_CHECK_EQ(pthread_create(&friend, NULL, let_go_soon, NULL), 0);
        GR_CHECK_EQ(gr_reclaimable_unregister(core, &hanging), 0);
        GR_CHECK(is_over);
        pthread_join(friend, NULL);
        finish();
}

static void *reclaim_for_others(void *arg)
{
        gr_rung_run(context, GR_RUNG_PURGE, MIB);
        return arg;
}

/* A neighbour that needs memory itself first: it asks this process, where a thread serves it. */
static uint64_t ask_back(struct gr_core *asking, struct gr_device *device, uint64_t want_bytes)
{
        pthread_t serving;

        (void)asking;
        (void)device;
        (void)want_bytes;
        atomic_fetch_add(&calls, 1);
        GR_CHECK_EQ(pthread_create(&serving, NULL, reclaim_for_others, NULL), 0);
        pthread_join(serving, NULL);
        return 0;
}

/* One that needs memory does not ask neighbours: they may wait for this very one. */
static void test_neighbour_that_asks_back(void)
{
        static struct gr_reclaimable climber = {.name = "climber", .purge = climb, .on_worker = true};
        uint64_t ptr;

        start();
        core->ask_neighbours = ask_back;
        atomic_store(&calls, 0);
        GR_CHECK_EQ(gr_reclaimable_register(core, &climber), 0);
        gr_rung_run(context, GR_RUNG_PURGE, MIB);
        GR_CHECK(!heard("climber"));
        GR_CHECK_EQ(calls, 0);
        GR_CHECK_EQ(sg_alloc(context, ROOM_BYTES * 2, &ptr), -ENOMEM);
        GR_CHECK(calls > 0); /* other threads ask, and the neighbour's request calls the reclaimable */
        GR_CHECK(!heard("climber"));
        GR_CHECK_EQ(gr_reclaimable_unregister(core, &climber), 0);
        finish();
}

static struct gr_reclaimable leaver;
static _Atomic int leave_rc;

static int leave(void *arg, int device, uint64_t want_bytes)
{
        (void)arg;
        (void)device;
        (void)want_bytes;
        atomic_fetch_add(&calls, 1);
        atomic_store(&leave_rc, gr_reclaimable_unregister(core, &leaver));
        return 0;
}

static void test_leaving(void)
{
        leaver = (struct gr_reclaimable){.name = "leaver", .purge = leave, .on_worker = true};
        start();
        atomic_store(&calls, 0);
        GR_CHECK_EQ(gr_reclaimable_register(core, &leaver), 0);
        gr_rung_run(context, GR_RUNG_PURGE, MIB);
        gr_rung_run(context, GR_RUNG_PURGE, MIB);
        GR_CHECK_EQ(calls, 1);
        GR_CHECK_EQ(leave_rc, 0);
        GR_CHECK_EQ(gr_reclaimable_unregister(core, &leaver), -ENOENT);
        GR_CHECK_EQ(gr_reclaimable_register(core, &leaver), 0);
        GR_CHECK_EQ(gr_reclaimable_unregister(core, &leaver), 0);
        finish();
}

/* Each thread registers and unregisters one of its own, whose hook sees whether it runs when it must not. */
struct guest {
        struct gr_reclaimable entry;
        _Atomic bool registered;
        _Atomic unsigned inside, wrong;
};

static int visit(void *arg, int device, uint64_t want_bytes)
{
        struct guest *guest = arg;

        (void)device;
        (void)want_bytes;
        if (!atomic_load(&guest->registered) || atomic_fetch_add(&guest->inside, 1) != 0)
                atomic_fetch_add(&guest->wrong, 1);
        sleep_ns(20000);
        if (!atomic_load(&guest->registered)) /* unregister must not have returned */
                atomic_fetch_add(&guest->wrong, 1);
        atomic_store(&guest->inside, 0);
        return 0;
}

static void *worker(void *arg)
{
        uint64_t seed = (uint64_t)(uintptr_t)arg * 2654435761u + 1;
        struct guest guest = {.entry = {.name = "guest", .purge = visit, .on_worker = true}};

        guest.entry.arg = &guest;
        for (int round = 0; round < ROUNDS; round++) {
                uint64_t ptrs[3];
                bool have[3];

                atomic_store(&guest.registered, true);
                if (gr_reclaimable_register(core, &guest.entry))
                        atomic_fetch_add(&guest.wrong, 1);
                for (int i = 0; i < 3; i++) {
                        seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
                        have[i] = sg_alloc(context, (1 + (seed >> 33) % 12) * MIB, &ptrs[i]) == 0;
                }
                for (int i = 0; i < 3; i++)
                        if (have[i] && sg_free(core, ptrs[i]))
                                atomic_fetch_add(&guest.wrong, 1);
                if (gr_reclaimable_unregister(core, &guest.entry))
                        atomic_fetch_add(&guest.wrong, 1);
                atomic_store(&guest.registered, false);
        }
        return (void *)(uintptr_t)guest.wrong;
}

static void test_under_load(void)
{
        static struct gr_reclaimable stone = {
                .name = "stone", .purge = hang, .on_worker = true, .limit_ns = 20 * SG_MS};
        static struct gr_reclaimable broken = {.name = "broken", .purge = fail, .drop = fail, .on_worker = true};
        static struct gr_reclaimable climber = {.name = "climber", .purge = climb, .drop = climb, .on_worker = true};
        pthread_t threads[THREADS];
        void *wrong;

        start();
        atomic_store(&let_go, false);
        GR_CHECK_EQ(gr_reclaimable_register(core, &stone), 0);
        GR_CHECK_EQ(gr_reclaimable_register(core, &broken), 0);
        GR_CHECK_EQ(gr_reclaimable_register(core, &climber), 0);
        leaver = (struct gr_reclaimable){.name = "leaver", .purge = leave, .on_worker = true};
        GR_CHECK_EQ(gr_reclaimable_register(core, &leaver), 0);
        for (size_t i = 0; i < THREADS; i++)
                pthread_create(&threads[i], NULL, worker, (void *)(i + 1));
        for (int i = 0; i < THREADS; i++) {
                pthread_join(threads[i], &wrong);
                GR_CHECK_EQ((uintptr_t)wrong, 0);
        }
        /* However the threads fell in with each other: by now the broken one has failed often enough. */
        for (int i = 0; i < 3; i++)
                gr_rung_run(context, GR_RUNG_PURGE, MIB);
        atomic_store(&let_go, true);
        GR_CHECK_EQ(gr_reclaimable_unregister(core, &stone), 0);
        GR_CHECK_EQ(gr_reclaimable_unregister(core, &broken), 0);
        GR_CHECK_EQ(gr_reclaimable_unregister(core, &climber), 0);
        GR_CHECK_EQ(gr_reclaimable_unregister(core, &leaver), -ENOENT);
        GR_CHECK(heard("stone: purge did not return in time"));
        GR_CHECK(heard("broken: left out for a minute"));
        GR_CHECK(!heard("climber"));

        /* Nothing is lost: all of it goes back. */
        gr_rung_run(context, GR_RUNG_SYNC, UINT64_MAX);
        GR_CHECK_EQ(gr_budget_live(context->device), 0);
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        finish();
}

/* More memory than there is for the stack of each new thread: none can begin. */
static void without_threads(bool without)
{
        static size_t before;
        pthread_attr_t attributes;

        GR_CHECK_EQ(pthread_getattr_default_np(&attributes), 0);
        if (without)
                pthread_attr_getstacksize(&attributes, &before);
        pthread_attr_setstacksize(&attributes, without ? (size_t)1 << 60 : before);
        GR_CHECK_EQ(pthread_setattr_default_np(&attributes), 0);
        pthread_attr_destroy(&attributes);
}

static void count_call(void *arg)
{
        atomic_fetch_add((_Atomic unsigned *)arg, 1);
}

/* Each call is made once, whatever others wait with it; and none is taken that no thread will ever make. */
static void test_calls(void)
{
        enum { CALLS = 8, TIMES = 50 };
        _Atomic unsigned made[CALLS] = {0};

        without_threads(true);
        GR_CHECK(!gr_worker_call(count_call, &made[0]));
        GR_CHECK_EQ(gr_workers_running(), 0);
        without_threads(false);
        for (unsigned time = 1; time <= TIMES; time++) {
                for (int i = 0; i < CALLS; i++)
                        while (!gr_worker_call(count_call, &made[i])) /* many may wait already */
                                sleep_ns(SG_MS);
                for (int i = 0; i < CALLS; i++) {
                        for (int wait = 0; wait < 10000 && atomic_load(&made[i]) < time; wait++)
                                sleep_ns(SG_MS);
                        GR_CHECK_EQ(atomic_load(&made[i]), time);
                        if (GR_CHECK_RESULT())
                                return;
                }
        }
}

static _Atomic bool may_end;
static _Atomic unsigned ended;

/* Goes on for a while after the others, which have nothing to do. */
static void *run_longer(void *arg)
{
        while (!atomic_load(&may_end))
                sleep_ns(SG_MS);
        if (arg)
                sleep_ns(300 * SG_MS);
        atomic_fetch_add(&ended, 1);
        return NULL;
}

static _Atomic bool short_of_memory;

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);

/* In place of malloc, by the linker. */
void *__wrap_malloc(size_t bytes)
{
        return atomic_load(&short_of_memory) ? NULL : __real_malloc(bytes);
}

/* Each thread is waited for at the end, and one that has ended makes room for another. */
static void test_threads(void)
{
        enum { MOST = 128 };
        unsigned more = 0, running = gr_workers_running();

        atomic_store(&short_of_memory, true);
        GR_CHECK(!gr_workers_start_thread(run_longer, NULL));
        atomic_store(&short_of_memory, false);
        GR_CHECK_EQ(gr_workers_running(), running);
        GR_CHECK(gr_workers_start_thread(run_longer, &may_end));
        for (int i = 1; i < MOST; i++)
                GR_CHECK(gr_workers_start_thread(run_longer, NULL));
        GR_CHECK(!gr_workers_start_thread(run_longer, NULL));
        atomic_store(&may_end, true);
        for (int wait = 0; wait < 10000 && more < MOST - 1; wait++) {
                more += gr_workers_start_thread(run_longer, NULL);
                if (atomic_load(&ended) < MOST - 1)
                        sleep_ns(SG_MS);
        }
        GR_CHECK_EQ(more, MOST - 1);
        gr_workers_join_threads(10000 * SG_MS);
        GR_CHECK_EQ(atomic_load(&ended), MOST + more);
}

static _Atomic unsigned prepared;

static void prepare(void)
{
        atomic_fetch_add(&prepared, 1);
}

static void run_until_let_go(void *arg)
{
        (void)hang(arg, 0, 0);
}

/* A call that runs is waited for until the time is over, or else until it ends; and none begins after that. */
static void test_stop(void)
{
        pthread_t friend;

        atomic_store(&calls, 0);
        atomic_store(&let_go, false);
        atomic_store(&is_over, false);
        GR_CHECK(gr_worker_call(run_until_let_go, NULL));
        while (atomic_load(&calls) == 0)
                sleep_ns(SG_MS);
        gr_worker_stop(SG_MS);
        GR_CHECK(!is_over);
        GR_CHECK_EQ(pthread_create(&friend, NULL, let_go_soon, NULL), 0);
        gr_worker_stop(3600 * 1000 * SG_MS); /* the whole hour, if nobody said that the call has ended */
        GR_CHECK(is_over);
        pthread_join(friend, NULL);
        GR_CHECK(!gr_worker_call(run_until_let_go, NULL));
}

int main(void)
{
        gr_log_set_sink(hear, NULL);
        gr_log_set_level(GR_LOG_WARN);
        gr_worker_init(prepare);
        test_calls();
        test_threads();
        test_served_by_another_thread();
        test_hanging();
        test_patience();
        test_neighbour_that_asks_back();
        test_leaving();
        test_under_load();
        test_stop();
        GR_CHECK_EQ(prepared, gr_workers_running());
        return GR_CHECK_RESULT();
}
