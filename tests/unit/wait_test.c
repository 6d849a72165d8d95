/* The rungs WAIT and SPILL, the report's holders, and proactive reclaim, against a scripted GPU. */
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <unistd.h>

#include "alloc/pool.h"
#include "base/log.h"
#include "check.h"
#include "core.h"
#include "reclaim/trim.h"
#include "scripted.h"

#define ROOM_BYTES (64 * MIB)

static struct gr_core core;
static struct gr_parts parts;
static struct gr_context *context;
static struct gr_driver driver; /* the scripted one with what a test puts on top */
static char said[8192];

/* What happens while somebody sleeps; run once, at when_ns. */
static struct {
        uint64_t when_ns;
        void (*what)(void);
} event;

static void sleep_and_see(uint64_t ns)
{
        sg_driver.sleep_ns(ns);
        if (event.what && sg_driver.now_ns() >= event.when_ns) {
                void (*what)(void) = event.what;

                event.what = NULL;
                what();
        }
}

/* Host memory, of which the scripted GPU knows nothing. */
static size_t host_bytes;
static unsigned host_blocks;

static int host_alloc(void *handle, size_t bytes, uint64_t *ret_ptr)
{
        void *ptr = aligned_alloc(512, bytes);

        (void)handle;
        if (!ptr)
                return -ENOMEM;
        host_bytes += bytes;
        host_blocks++;
        *ret_ptr = (uintptr_t)ptr;
        return 0;
}

static int host_free(void *handle, uint64_t ptr)
{
        (void)handle;
        host_blocks--;
        free((void *)(uintptr_t)ptr);
        return 0;
}

static void hear(const char *line, size_t bytes, void *arg)
{
        size_t used = strlen(said);

        (void)arg;
        if (used + bytes < sizeof(said)) {
                memcpy(said + used, line, bytes);
                said[used + bytes] = '\0';
        }
}

static void start(struct gr_config config)
{
        sg_reset(ROOM_BYTES);
        driver = sg_driver;
        driver.sleep_ns = sleep_and_see;
        driver.host_alloc = host_alloc;
        driver.host_free = host_free;
        event.what = NULL;
        host_bytes = host_blocks = 0;
        said[0] = '\0';
        config.pool = GR_POOL_BINS;
        gr_core_init(&core, &parts, &driver, &config);
        context = gr_core_context_add(&core, sg_context_new(0), 0);
}

static void finish(void)
{
        GR_CHECK_EQ(sg_misuses(), 0);
        gr_core_destroy(&core);
}

static uint64_t block;

static void free_block(void)
{
        GR_CHECK_EQ(sg_free(&core, block), 0);
}

static void neighbour_leaves(void)
{
        sg_hold(0, 0, 0);
}

static uint64_t caching_from_ns;
static int64_t waiting_bytes, most_waiting_bytes;

static uint64_t ask_caching_neighbour(struct gr_core *asker, struct gr_device *device, uint64_t want_bytes)
{
        (void)asker;
        (void)device;
        if (sg_driver.now_ns() < caching_from_ns)
                return 0;
        sg_hold(0, 0, 0);
        return want_bytes;
}

static void note_waiting(struct gr_device *device, int64_t bytes)
{
        (void)device;
        waiting_bytes += bytes;
        if (waiting_bytes > most_waiting_bytes)
                most_waiting_bytes = waiting_bytes;
}

static void test_wait(void)
{
        uint64_t begin_ns, waited_ns, ptr;

        /* A thread of our own frees: noticed at once. */
        start((struct gr_config){.wait_ns = 30000 * SG_MS});
        GR_CHECK_EQ(sg_alloc(context, ROOM_BYTES - 4 * MIB, &block), 0);
        begin_ns = sg_driver.now_ns();
        event.when_ns = begin_ns + 5000 * SG_MS;
        event.what = free_block;
        GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &ptr), 0);
        waited_ns = sg_driver.now_ns() - begin_ns;
        GR_CHECK(waited_ns >= 5000 * SG_MS && waited_ns < 5002 * SG_MS);
        GR_CHECK_EQ(core.counters.rungs[GR_RUNG_WAIT].tries, 1);
        GR_CHECK_EQ(core.counters.rungs[GR_RUNG_WAIT].bytes, 20 * MIB);
        GR_CHECK_EQ(core.counters.rungs[GR_RUNG_FAIL].tries, 0);
        finish();

        /* The same during a capture, in which no fence covers what is freed. */
        start((struct gr_config){.wait_ns = 30000 * SG_MS});
        GR_CHECK_EQ(sg_alloc(context, ROOM_BYTES - 4 * MIB, &block), 0);
        sg_work(context->handle, 0, block, 1000 * SG_MS);
        gr_gate_begin_enter(&core.gate);
        sg_capture(1);
        gr_gate_begin_leave(&core.gate, true);
        begin_ns = sg_driver.now_ns();
        event.when_ns = begin_ns + 5000 * SG_MS;
        event.what = free_block;
        GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &ptr), 0);
        waited_ns = sg_driver.now_ns() - begin_ns;
        GR_CHECK(waited_ns >= 5000 * SG_MS && waited_ns < 5002 * SG_MS);
        sg_capture(-1);
        gr_gate_end(&core.gate);
        finish();

        /* Another process gives memory back: the driver is asked, but seldom. */
        start((struct gr_config){.wait_ns = 30000 * SG_MS});
        sg_hold(0, ROOM_BYTES - 4 * MIB, 0);
        begin_ns = sg_driver.now_ns();
        event.when_ns = begin_ns + 20000 * SG_MS;
        event.what = neighbour_leaves;
        GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &ptr), 0);
        waited_ns = sg_driver.now_ns() - begin_ns;
        GR_CHECK(waited_ns >= 20000 * SG_MS && waited_ns < 20100 * SG_MS);
        GR_CHECK(sg_calls(SG_MEM_ALLOC) < 2000);
        finish();

        /* Another process frees into its cache: it is asked again, or what it has would be waited for in vain. */
        start((struct gr_config){.wait_ns = 30000 * SG_MS});
        core.ask_neighbours = ask_caching_neighbour;
        core.wait_for_neighbours = note_waiting;
        sg_hold(0, ROOM_BYTES - 4 * MIB, 0);
        caching_from_ns = sg_driver.now_ns() + 3000 * SG_MS;
        GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &ptr), 0);
        waited_ns = sg_driver.now_ns() - caching_from_ns;
        GR_CHECK(waited_ns < 100 * SG_MS);
        GR_CHECK_EQ(most_waiting_bytes, 20 * MIB);
        GR_CHECK_EQ(waiting_bytes, 0);
        finish();

        /* Nobody: an error, in bounded time, and said so. */
        start((struct gr_config){.wait_ns = 2000 * SG_MS});
        gr_log_set_level(GR_LOG_INFO);
        sg_hold(0, ROOM_BYTES, 0);
        begin_ns = sg_driver.now_ns();
        GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &ptr), -ENOMEM);
        waited_ns = sg_driver.now_ns() - begin_ns;
        GR_CHECK(waited_ns >= 2000 * SG_MS && waited_ns < 2600 * SG_MS);
        GR_CHECK(strstr(said, "waiting up to 2.000 s for 20.000 MiB"));
        GR_CHECK(strstr(said, "gave up waiting"));
        GR_CHECK_EQ(core.counters.rungs[GR_RUNG_WAIT].bytes, 0);
        finish();

        /* Longer than any clock goes is without end. */
        start((struct gr_config){.wait_ns = UINT64_MAX});
        GR_CHECK_EQ(sg_alloc(context, ROOM_BYTES - 4 * MIB, &block), 0);
        event.when_ns = sg_driver.now_ns() + 5000 * SG_MS;
        event.what = free_block;
        GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &ptr), 0);
        finish();

        /* Without the option no time is lost. */
        start((struct gr_config){0});
        sg_hold(0, ROOM_BYTES, 0);
        begin_ns = sg_driver.now_ns();
        GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &ptr), -ENOMEM);
        GR_CHECK(sg_driver.now_ns() - begin_ns < 10 * SG_MS);
        gr_log_set_level(GR_LOG_SILENT);
        finish();
}

static void test_spill(void)
{
        struct gr_block_info info;
        uint64_t ptr, other;

        start((struct gr_config){0});
        context->device->spill_bytes = 32 * MIB;
        GR_CHECK_EQ(sg_alloc(context, ROOM_BYTES - 4 * MIB, &block), 0);
        GR_CHECK_EQ(gr_pool_alloc(context, 20 * MIB, &ptr), 0);
        GR_CHECK_EQ(host_bytes, 20 * MIB);
        GR_CHECK_EQ(context->device->spilled_bytes, 20 * MIB);
        GR_CHECK_EQ(gr_budget_live(context->device), ROOM_BYTES - 4 * MIB); /* not the device's */
        GR_CHECK_EQ(gr_ledger_find(core.ledger, ptr, &info), 0);
        GR_CHECK(info.live && info.spilled);

        GR_CHECK_EQ(gr_pool_alloc(context, 20 * MIB, &other), -ENOMEM); /* more than is allowed */
        GR_CHECK_EQ(host_blocks, 1);

        /* Its free waits for the work that may use it, and nobody waits for that. */
        sg_work(context->handle, 0, 0, 10 * SG_MS);
        GR_CHECK_EQ(gr_pool_free(&core, ptr), 0);
        GR_CHECK_EQ(gr_pool_free(&core, ptr), -EALREADY);
        GR_CHECK(gr_trim_excess(&core));
        GR_CHECK_EQ(host_blocks, 1);
        sg_advance(10 * SG_MS);
        GR_CHECK(!gr_trim_excess(&core));
        GR_CHECK_EQ(host_blocks, 0);
        GR_CHECK_EQ(context->device->spilled_bytes, 0);
        GR_CHECK_EQ(gr_pool_free(&core, ptr), -ENOENT);

        /* With room again the device serves. */
        GR_CHECK_EQ(sg_free(&core, block), 0);
        GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &ptr), 0);
        GR_CHECK_EQ(host_blocks, 0);
        finish();

        /* Live and freed ones go off the accounts with their context. */
        start((struct gr_config){0});
        context->device->spill_bytes = 64 * MIB;
        sg_hold(0, ROOM_BYTES, 0);
        GR_CHECK_EQ(gr_pool_alloc(context, 20 * MIB, &ptr), 0);
        GR_CHECK_EQ(gr_pool_alloc(context, 20 * MIB, &other), 0);
        GR_CHECK_EQ(gr_pool_free(&core, other), 0);
        gr_core_context_drop(context);
        GR_CHECK_EQ(context->device->spilled_bytes, 0);
        free((void *)(uintptr_t)ptr);
        free((void *)(uintptr_t)other);
        finish();
}

/* The driver's free of host memory takes until somebody sleeps, and another thread is in it. */
static struct {
        pthread_t thread;
        sem_t inside, go_on;
} slow;

static int slow_host_free(void *handle, uint64_t ptr)
{
        sem_post(&slow.inside);
        sem_wait(&slow.go_on);
        return host_free(handle, ptr);
}

static void *maintain(void *arg)
{
        gr_trim_excess(&core);
        return arg;
}

static void let_go(void)
{
        sem_post(&slow.go_on);
        pthread_join(slow.thread, NULL);
}

/* Host memory that another thread is giving back, or whose fence has yet to pass, is no reason to refuse any. */
static void test_spill_returns(void)
{
        uint64_t ptr, begin_ns;

        for (int ends = 0; ends < 2; ends++) {
                start((struct gr_config){0});
                context->device->spill_bytes = 32 * MIB;
                sg_hold(0, ROOM_BYTES, 0);
                GR_CHECK_EQ(gr_pool_alloc(context, 20 * MIB, &ptr), 0);
                GR_CHECK_EQ(gr_pool_free(&core, ptr), 0);
                GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
                sem_init(&slow.inside, 0, 0);
                sem_init(&slow.go_on, 0, 0);
                driver.host_free = slow_host_free;
                pthread_create(&slow.thread, NULL, maintain, NULL);
                sem_wait(&slow.inside);
                event.when_ns = 0;
                event.what = ends ? let_go : NULL;
                GR_CHECK_EQ(gr_pool_alloc(context, 20 * MIB, &ptr), ends ? 0 : -ENOMEM);
                GR_CHECK(sg_driver.now_ns() < SG_FIRST_NS + 2000 * SG_MS);
                if (!ends)
                        let_go();
                driver.host_free = host_free;
                if (ends)
                        GR_CHECK_EQ(gr_pool_free(&core, ptr), 0);
                GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
                GR_CHECK(!gr_trim_excess(&core));
                GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_spills), ends ? 2 : 1);
                /* All is back: there is nothing to wait for. */
                begin_ns = sg_driver.now_ns();
                GR_CHECK_EQ(gr_pool_alloc(context, 40 * MIB, &ptr), -ENOMEM);
                GR_CHECK(sg_driver.now_ns() - begin_ns < 10 * SG_MS);
                finish();
        }

        for (int other = 0; other < 3; other++) {
                struct gr_context *owner, *asker;
                struct gr_block *spilled;

                start((struct gr_config){0});
                context->device->spill_bytes = 32 * MIB;
                sg_hold(0, ROOM_BYTES, 0);
                asker = owner = context;
                if (other)
                        *(other == 1 ? &owner : &asker) = gr_core_context_add(&core, sg_context_new(0), 0);
                GR_CHECK_EQ(gr_pool_alloc(owner, 20 * MIB, &ptr), 0);
                sg_work(owner->handle, 0, 0, 10 * SG_MS);
                GR_CHECK_EQ(gr_pool_free(&core, ptr), 0);
                GR_CHECK_EQ(gr_spill_alloc(asker, 20 * MIB, &spilled), 0);
                GR_CHECK_EQ(sg_driver.now_ns() >= SG_FIRST_NS + 10 * SG_MS, 1);
                GR_CHECK_EQ(host_blocks, 1);
                GR_CHECK_EQ(gr_ledger_hand_out(spilled, 20 * MIB), 1);
                GR_CHECK_EQ(gr_pool_free(&core, spilled->ptr), 0);
                GR_CHECK_EQ(gr_fence_sync(asker->fence), 0);
                GR_CHECK(!gr_trim_excess(&core));
                finish();
        }
}

static int no_host_memory(void *handle, size_t bytes, uint64_t *ret_ptr)
{
        (void)handle, (void)bytes, (void)ret_ptr;
        return -ENOMEM;
}

static int refused(void *arg)
{
        (void)arg;
        return -ENOMEM;
}

static uint64_t next_host_ptr;

static int host_alloc_there(void *handle, size_t bytes, uint64_t *ret_ptr)
{
        (void)handle;
        (void)bytes;
        *ret_ptr = next_host_ptr;
        return 0;
}

/* Host memory at an address that the ledger still holds: what was there went unseen, and is charged no more. */
static void test_spill_stale(void)
{
        uint64_t ptr;

        start((struct gr_config){0});
        context->device->spill_bytes = 64 * MIB;
        sg_hold(0, ROOM_BYTES, 0);
        GR_CHECK_EQ(gr_pool_alloc(context, 20 * MIB, &next_host_ptr), 0);
        driver.host_alloc = host_alloc_there;
        GR_CHECK_EQ(gr_pool_alloc(context, 24 * MIB, &ptr), 0);
        GR_CHECK_EQ(ptr, next_host_ptr);
        GR_CHECK_EQ(context->device->spilled_bytes, 24 * MIB);
        driver.host_alloc = host_alloc;
        GR_CHECK_EQ(gr_pool_free(&core, ptr), 0);
        GR_CHECK(!gr_trim_excess(&core));
        GR_CHECK_EQ(context->device->spilled_bytes, 0);
        GR_CHECK_EQ(host_blocks, 0);
        finish();
}

/* What does not come leaves all that is allowed for the next one, and other families than device memory get none. */
static void test_spill_refused(void)
{
        uint64_t ptr;

        start((struct gr_config){0});
        context->device->spill_bytes = 32 * MIB;
        sg_hold(0, ROOM_BYTES, 0);
        driver.host_alloc = no_host_memory;
        GR_CHECK_EQ(gr_pool_alloc(context, 20 * MIB, &ptr), -ENOMEM);
        GR_CHECK_EQ(context->device->spilled_bytes, 0);
        driver.host_alloc = host_alloc;
        GR_CHECK_EQ(gr_ladder_climb_for(context, 20 * MIB, refused, NULL, -ENOMEM), -ENOMEM);
        GR_CHECK_EQ(host_blocks, 0);
        GR_CHECK_EQ(context->device->spilled_bytes, 0);
        GR_CHECK_EQ(gr_pool_alloc(context, 32 * MIB, &ptr), 0);
        GR_CHECK_EQ(host_blocks, 1);

        /* Where no fence can be had the driver's free waits, which it must not for what the program may do later. */
        GR_CHECK_EQ(gr_pool_free(&core, ptr), 0);
        atomic_store(&context->fence->broken, -EIO);
        atomic_store(&core.waits_for_others, true);
        GR_CHECK(!gr_spill_collect(context));
        GR_CHECK_EQ(host_blocks, 1);
        atomic_store(&core.waits_for_others, false);
        GR_CHECK(!gr_spill_collect(context));
        GR_CHECK_EQ(host_blocks, 0);
        GR_CHECK_EQ(context->device->spilled_bytes, 0);
        atomic_store(&context->fence->broken, 0);
        finish();
}

static void *hold_freed(void *arg)
{
        gr_lock(&context->spilled->lock);
        sem_post(&slow.inside);
        sem_wait(&slow.go_on);
        gr_unlock(&context->spilled->lock);
        return arg;
}

static _Atomic bool holding;

/* Another thread is at the list of what was freed from here on. */
static int query_and_hold(void *handle)
{
        if (holding)
                return sg_driver.event_query(handle);
        pthread_create(&slow.thread, NULL, hold_freed, NULL);
        sem_wait(&slow.inside);
        atomic_store(&holding, true);
        return sg_driver.event_query(handle);
}

static _Atomic bool collected;

static void *collect(void *arg)
{
        gr_spill_collect(context);
        atomic_store(&collected, true);
        return arg;
}

/* Two threads that took one block off the list would both give it back. */
static void test_spill_in_turn(void)
{
        pthread_t thread;
        uint64_t ptr;

        start((struct gr_config){0});
        context->device->spill_bytes = 32 * MIB;
        sg_hold(0, ROOM_BYTES, 0);
        GR_CHECK_EQ(gr_pool_alloc(context, 20 * MIB, &ptr), 0);
        GR_CHECK_EQ(gr_pool_free(&core, ptr), 0);
        sem_init(&slow.inside, 0, 0);
        sem_init(&slow.go_on, 0, 0);
        atomic_store(&collected, false);
        atomic_store(&holding, false);
        driver.event_query = query_and_hold;
        pthread_create(&thread, NULL, collect, NULL);
        while (!holding && !collected)
                usleep(1000);
        for (int n = 0; n < 50 && !collected; n++)
                usleep(1000);
        GR_CHECK(!collected);
        GR_CHECK(context->spilled->blocks);
        sem_post(&slow.go_on);
        pthread_join(slow.thread, NULL);
        pthread_join(thread, NULL);
        GR_CHECK_EQ(host_blocks, 0);
        finish();
}

static void test_report(void)
{
        uint64_t ptr;

        start((struct gr_config){0});
        gr_log_set_level(GR_LOG_INFO);
        for (int i = 0; i < 3; i++)
                GR_CHECK_EQ(sg_alloc(context, 10 * MIB, &ptr), 0);
        for (int i = 0; i < 10; i++)
                GR_CHECK_EQ(sg_alloc(context, 2 * MIB, &ptr), 0);
        GR_CHECK_EQ(sg_alloc(context, 40 * MIB, &ptr), -ENOMEM);
        GR_CHECK(strstr(said, "in use: 30.000 MiB in 3 blocks of about 10.000 MiB"));
        GR_CHECK(strstr(said, "in use: 20.000 MiB in 10 blocks of about 2.000 MiB"));
        GR_CHECK(!strstr(strstr(strstr(said, "in use:") + 1, "in use:") + 1, "in use:"));
        gr_log_set_level(GR_LOG_SILENT);
        finish();
}

static struct {
        unsigned calls;
        uint64_t cost_ns;
        uint64_t ptr;   /* that it frees; 0: nothing */
        bool with_peer; /* another thread waits for the GPU meanwhile */
} purged;

static void *run_early(void *arg)
{
        gr_proactive_run(arg);
        return NULL;
}

static int purge(void *arg, int device, uint64_t want_bytes)
{
        (void)arg;
        (void)device;
        (void)want_bytes;
        purged.calls++;
        sg_advance(purged.cost_ns);
        if (purged.with_peer) {
                pthread_t peer;

                purged.with_peer = false;
                sg_advance(1000000 * SG_MS);
                GR_CHECK_EQ(pthread_create(&peer, NULL, run_early, context), 0);
                pthread_join(peer, NULL);
        }
        if (purged.ptr)
                GR_CHECK_EQ(sg_free(&core, purged.ptr), 0);
        purged.ptr = 0;
        return 0;
}

static void test_early(void)
{
        static struct gr_reclaimable reclaimable = {.name = "garbage", .purge = purge};
        uint64_t first, begin_ns, runs;

        start((struct gr_config){.proactive = true});
        memset(&purged, 0, sizeof(purged));
        purged.cost_ns = 10 * SG_MS;
        context->device->hard_bytes = 40 * MIB;
        GR_CHECK_EQ(gr_reclaimable_register(&core, &reclaimable), 0);
        GR_CHECK_EQ(sg_alloc(context, 10 * MIB, &first), 0);
        GR_CHECK(!core.memory_is_short);
        GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &purged.ptr), 0);
        GR_CHECK(core.memory_is_short);

        gr_proactive_run(context);
        GR_CHECK_EQ(purged.calls, 1);
        GR_CHECK(core.proactive->fruitful);
        GR_CHECK_EQ(gr_budget_live(context->device), 10 * MIB);

        /* One run cost 10 ms, a quarter of which the mean has: not before a fifth of the time allows it. */
        gr_proactive_run(context);
        GR_CHECK_EQ(purged.calls, 1);
        sg_advance(13 * SG_MS);
        gr_proactive_run(context);
        GR_CHECK_EQ(purged.calls, 2);

        /* In the long run it takes no more than its share, and less where it frees nothing. */
        begin_ns = sg_driver.now_ns();
        purged.calls = 0;
        for (int i = 0; i < 10000; i++) {
                sg_advance(SG_MS);
                gr_proactive_run(context);
        }
        GR_CHECK(purged.calls > 0);
        GR_CHECK((double)purged.calls * 10 * (double)SG_MS < 0.05 * (double)(sg_driver.now_ns() - begin_ns));

        /* One thread at a time. */
        purged.calls = 0;
        purged.with_peer = true;
        sg_advance(1000000 * SG_MS);
        runs = sg_counter(&core, GR_COUNTER_proactive_runs);
        gr_proactive_run(context);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_proactive_runs), runs + 1);
        GR_CHECK_EQ(purged.calls, 1);

        /* Not while a capture goes on, nor where memory is plenty. */
        purged.calls = 0;
        sg_advance(1000000 * SG_MS);
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        gr_proactive_run(context);
        gr_gate_end(&core.gate);
        GR_CHECK_EQ(purged.calls, 0);
        context->device->hard_bytes = 400 * MIB;
        gr_proactive_run(context);
        GR_CHECK_EQ(purged.calls, 0);
        GR_CHECK(!core.memory_is_short);
        finish();
}

/* How long after a run that cost a millisecond the next one is worth it. */
static void test_early_share(void)
{
        static const struct {
                unsigned live_mib, limit_mib;
                bool fruitful;
                unsigned fruitless;
                uint64_t due_us;
        } cases[] = {
                {20, 40, false, 0, 10000}, {54, 60, false, 0, 10000}, {56, 60, false, 0, 5000},
                {38, 40, false, 0, 5000},  {58, 60, false, 0, 2500},  {20, 40, true, 0, 5000},
                {58, 60, true, 0, 1250},   {20, 40, false, 1, 20000}, {20, 40, false, 6, 640000},
        };
        static struct gr_reclaimable reclaimable = {.name = "garbage", .purge = purge};
        uint64_t live;

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
                start((struct gr_config){.proactive = true});
                memset(&purged, 0, sizeof(purged));
                context->device->hard_bytes = cases[i].limit_mib * MIB;
                GR_CHECK_EQ(gr_reclaimable_register(&core, &reclaimable), 0);
                GR_CHECK_EQ(sg_alloc(context, cases[i].live_mib * MIB, &live), 0);
                GR_CHECK(core.memory_is_short); /* from half of the limit on */
                core.proactive->cost_ns = SG_MS;
                core.proactive->ended_ns = sg_driver.now_ns();
                core.proactive->fruitful = cases[i].fruitful;
                core.proactive->fruitless = cases[i].fruitless;
                sg_advance(cases[i].due_us * 990);
                gr_proactive_run(context);
                GR_CHECK_EQ(purged.calls, 0);
                sg_advance(cases[i].due_us * 20);
                gr_proactive_run(context);
                GR_CHECK_EQ(purged.calls, 1);
                GR_CHECK(!core.proactive->fruitful);                                   /* it freed nothing */
                GR_CHECK_EQ(atomic_load(&core.counters.rungs[GR_RUNG_TRIM].tries), 0); /* as nothing was cached */
                GR_CHECK_EQ(core.proactive->fruitless, cases[i].fruitless < 6 ? cases[i].fruitless + 1 : 6);

                /* Nothing of nothing is no fruit either. */
                GR_CHECK_EQ(sg_free(&core, live), 0);
                sg_advance(10000 * SG_MS);
                gr_proactive_run(context);
                GR_CHECK_EQ(purged.calls, 2);
                GR_CHECK(!core.proactive->fruitful);
                finish();
        }
}

/* What the other members of the group have. */
static uint64_t others_bytes;

static uint64_t group_bytes(void)
{
        return others_bytes + atomic_load(&context->device->reserved_bytes);
}

static int group_reserve(void *arg, uint64_t bytes)
{
        (void)arg;
        (void)bytes; /* charged already */
        return group_bytes() <= ROOM_BYTES ? 0 : -EDQUOT;
}

static void group_adjust(void *arg, int64_t bytes)
{
        (void)arg;
        (void)bytes;
}

static uint64_t group_room(void *arg)
{
        (void)arg;
        return group_bytes() < ROOM_BYTES ? ROOM_BYTES - group_bytes() : 0;
}

static uint64_t group_excess(void *arg)
{
        (void)arg;
        return group_bytes() > ROOM_BYTES ? group_bytes() - ROOM_BYTES : 0;
}

/* A limit of the process's own is far; what all members have is near the group's. */
static void test_early_in_group(void)
{
        static const struct gr_group group = {ROOM_BYTES, group_reserve, group_adjust, group_room, group_excess, NULL};
        static struct gr_reclaimable reclaimable = {.name = "garbage", .purge = purge};
        uint64_t cached;

        start((struct gr_config){.proactive = true});
        memset(&purged, 0, sizeof(purged));
        context->device->hard_bytes = 10 * ROOM_BYTES;
        context->device->group = &group;
        GR_CHECK_EQ(gr_reclaimable_register(&core, &reclaimable), 0);
        others_bytes = ROOM_BYTES / 4;
        GR_CHECK_EQ(sg_alloc(context, 8 * MIB, &cached), 0);
        GR_CHECK(!core.memory_is_short);
        others_bytes = ROOM_BYTES / 2;
        GR_CHECK_EQ(sg_alloc(context, 8 * MIB, &purged.ptr), 0);
        GR_CHECK(core.memory_is_short);
        gr_proactive_run(context);
        GR_CHECK_EQ(purged.calls, 1);
        GR_CHECK(core.proactive->fruitful);

        /* Near the limit what the process caches for nothing goes back, also where another one came near to it. */
        GR_CHECK_EQ(sg_free(&core, cached), 0);
        GR_CHECK_EQ(gr_budget_cached(context->device), 16 * MIB);
        for (int i = 0; i < 3; i++) {
                sg_advance(1000 * SG_MS);
                gr_proactive_run(context);
        }
        GR_CHECK_EQ(gr_budget_cached(context->device), 16 * MIB);
        others_bytes = ROOM_BYTES - 16 * MIB;
        for (int i = 0; i < 3; i++) {
                sg_advance(1000 * SG_MS);
                gr_proactive_run(context);
        }
        GR_CHECK(gr_budget_cached(context->device) < 16 * MIB);

        /* Plenty, once the others gave theirs back. */
        others_bytes = 0;
        gr_proactive_run(context);
        GR_CHECK(!core.memory_is_short);
        finish();
}

static int crowd(void *arg, int device, uint64_t want_bytes)
{
        (void)arg, (void)device, (void)want_bytes;
        others_bytes = 46 * MIB;
        return 0;
}

/* So much of the cache of all contexts goes back as the limit wants that is nearest then, and it was idle. */
static void test_early_trim(bool by_group)
{
        static const struct gr_group group = {ROOM_BYTES, group_reserve, group_adjust, group_room, group_excess, NULL};
        static struct gr_reclaimable reclaimable = {.name = "crowd", .purge = crowd};
        uint64_t live, cached[4];

        start((struct gr_config){.proactive = true});
        others_bytes = 0;
        context->device->hard_bytes = (by_group ? 32 : 17) * MIB;
        if (by_group) {
                context->device->group = &group;
                GR_CHECK_EQ(gr_reclaimable_register(&core, &reclaimable), 0);
        }
        GR_CHECK_EQ(sg_alloc(context, 8 * MIB, &live), 0);
        for (int i = 0; i < 4; i++)
                GR_CHECK_EQ(sg_alloc(context, 2 * MIB, &cached[i]), 0);
        for (int i = 0; i < 4; i++)
                GR_CHECK_EQ(sg_free(&core, cached[i]), 0);
        gr_core_context_add(&core, sg_context_new(0), 0); /* which has nothing */
        gr_decay_look(context, sg_driver.now_ns());
        sg_advance(1000 * SG_MS);
        gr_proactive_run(context);
        /* Of 64 MiB 62 are taken, 4.4 too much; of 17 are 16, 0.7 too much. */
        GR_CHECK_EQ(gr_budget_cached(context->device), (by_group ? 2 : 6) * MIB);
        finish();
}

int main(void)
{
        gr_log_set_sink(hear, NULL);
        gr_log_set_level(GR_LOG_SILENT);
        test_wait();
        test_spill();
        test_spill_returns();
        test_spill_stale();
        test_spill_refused();
        test_spill_in_turn();
        test_report();
        test_early();
        test_early_share();
        test_early_in_group();
        test_early_trim(true);
        test_early_trim(false);
        return GR_CHECK_RESULT();
}
