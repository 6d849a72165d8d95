/*
 * Threads that allocate and free at random, their own blocks and each other's, for about a second while others begin
 * and end captures, run the maintenance, let idle memory decay, and create and destroy contexts: no misuse, and in the
 * end all figures agree. GR_TEST_SEED changes the program, GR_TEST_MS its length.
 *
 *   threads_test [segments]     pool kind bins; or auto with mapped memory, where no context comes and goes
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "alloc/pool.h"
#include "base/log.h"
#include "check.h"
#include "core.h"
#include "reclaim/trim.h"
#include "scripted.h"

#define THREADS  8
#define HELD_MAX 8
#define MAIL_MAX 64
#define DECAY_NS (2 * SG_MS)

struct plan {
        const char *name;
        enum gr_reuse reuse;
        bool overlaps;
        uint64_t hard_bytes;
        uint64_t threshold_bytes;
        bool many; /* in the middle more contexts turn up than fences cover */
};

static const struct plan plans[] = {
        {"auto", GR_REUSE_AUTO, true, GR_UNLIMITED, GR_UNLIMITED, false},
        {"barrier, limit, threshold", GR_REUSE_BARRIER, false, 400 * MIB, 64 * MIB, false},
        {"poll, limit", GR_REUSE_POLL, true, 300 * MIB, GR_UNLIMITED, false},
        {"sync", GR_REUSE_SYNC, true, GR_UNLIMITED, 32 * MIB, false},
        {"auto, many contexts", GR_REUSE_AUTO, false, GR_UNLIMITED, GR_UNLIMITED, true},
};

static bool segments;
static struct gr_core core;
static struct gr_parts parts;
static struct gr_context *contexts[2];
static _Atomic bool stop, over;
static _Atomic uint64_t allocs, frees, wrong;

/* Blocks that one thread has allocated and another frees. */
static pthread_mutex_t mail_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t mail[MAIL_MAX];
static unsigned mail_count;

/* False: there is no room. */
static bool post(uint64_t ptr)
{
        bool room;

        pthread_mutex_lock(&mail_lock);
        room = mail_count < MAIL_MAX;
        if (room)
                mail[mail_count++] = ptr;
        pthread_mutex_unlock(&mail_lock);
        return room;
}

/* 0: there is none. */
static uint64_t receive(void)
{
        uint64_t ptr;

        pthread_mutex_lock(&mail_lock);
        ptr = mail_count > 0 ? mail[--mail_count] : 0;
        pthread_mutex_unlock(&mail_lock);
        return ptr;
}

struct worker {
        pthread_t thread;
        uint64_t seed;
        unsigned id;
        const struct plan *plan;
};

static unsigned draw(struct worker *worker, unsigned below)
{
        worker->seed = worker->seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        return (unsigned)(worker->seed >> 33) % below;
}

static size_t draw_size(struct worker *worker)
{
        static const size_t sizes[] = {512,       4096,    100000,  200000,  300032,  300544,
                                       700 << 10, 1 << 20, 3 << 20, 8 << 20, 34 << 20};

        return sizes[draw(worker, sizeof(sizes) / sizeof(sizes[0]))];
}

/* A context that ends is waited for whoever captures elsewhere, which the scripted GPU does not tell apart. */
static pthread_mutex_t end_lock = PTHREAD_MUTEX_INITIALIZER;

static void capture(struct worker *worker)
{
        pthread_mutex_lock(&end_lock);
        gr_gate_begin_enter(&core.gate);
        sg_capture(1);
        gr_gate_begin_leave(&core.gate, true);
        sg_advance(draw(worker, 100000));
        sg_capture(-1);
        gr_gate_end(&core.gate);
        pthread_mutex_unlock(&end_lock);
}

static void free_one(uint64_t ptr)
{
        if (sg_free(&core, ptr))
                wrong++;
        else
                frees++;
}

static void *work(void *arg)
{
        struct worker *worker = arg;
        uint64_t ptrs[HELD_MAX];
        uint64_t hard_bytes = atomic_load(&core.devices[0].hard_bytes), used_bytes;
        unsigned count = 0;

        while (!stop || count > 0) {
                unsigned kind = draw(worker, 100);
                struct gr_context *context = contexts[draw(worker, 2)];

                if (!stop && kind < 50 && count < HELD_MAX) {
                        int rc = sg_alloc(context, draw_size(worker), &ptrs[count]);

                        if (rc == 0) {
                                allocs++;
                                sg_work(context->handle, draw(worker, SG_STREAMS), ptrs[count++],
                                        draw(worker, 200) * 1000);
                        } else if (rc != -ENOMEM && rc != -EDQUOT) {
                                wrong++;
                        }
                } else if (kind < 87 && count > 0) {
                        unsigned i = draw(worker, count);

                        if (kind >= 60 || stop || !post(ptrs[i]))
                                free_one(ptrs[i]);
                        ptrs[i] = ptrs[--count];
                } else if (kind < 96) {
                        uint64_t ptr = receive();

                        if (ptr)
                                free_one(ptr);
                } else if (kind < 98 && worker->id < 2) {
                        capture(worker);
                } else if (kind < 99) {
                        gr_trim_excess(&core);
                } else {
                        sg_advance(draw(worker, 50000));
                }
                /* A slab that the driver opens unasked is held for a moment, by each thread at most one. */
                used_bytes = sg_used_bytes(0);
                if (used_bytes > hard_bytes && used_bytes - hard_bytes > THREADS * GR_PAGE_BYTES)
                        over = true;
                if (atomic_load(&core.devices[0].reserved_bytes) > hard_bytes)
                        over = true;
        }
        return NULL;
}

/* Contexts that come, work and go, on a device of their own. */
static void *come_and_go(void *arg)
{
        struct worker *worker = arg;

        for (int round = 0; round < 200 && !stop; round++) {
                struct gr_context *context;
                uint64_t ptrs[16];

                if (segments && !worker->plan->many)
                        break;
                if (worker->plan->many && round > 1 && round < 2 + GR_ACCESSORS_MAX)
                        gr_core_context_add(&core, sg_context_new(0), 0);
                if (segments)
                        continue;
                context = gr_core_context_add(&core, sg_context_new(1), 1);
                for (int i = 0; i < 16; i++)
                        if (sg_alloc(context, draw_size(worker), &ptrs[i]))
                                wrong++;
                        else
                                allocs++;
                for (int i = 0; i < 16; i += 2)
                        free_one(ptrs[i]);
                gr_fence_close(context->fence);
                pthread_mutex_lock(&end_lock);
                gr_core_context_ending(context); /* who gives its memory back at this moment is waited for */
                pthread_mutex_unlock(&end_lock);
                sg_context_destroy(context->handle);
                gr_core_context_gone(context);
        }
        return NULL;
}

/* What the library's own thread does, without a rest: it visits each context, and looks into all bins. */
static void *help(void *arg)
{
        (void)arg;
        while (!stop) {
                gr_decay_run(&core, sg_driver.now_ns());
                gr_trim_excess(&core);
                sg_advance(DECAY_NS / 16);
        }
        return NULL;
}

static char json[65536];
static size_t json_bytes;

static void keep(const char *text, size_t length, void *arg)
{
        (void)arg;
        if (json_bytes + length < sizeof(json)) {
                memcpy(json + json_bytes, text, length);
                json_bytes += length;
        }
}

static uint64_t figure(const char *name)
{
        char key[64];
        const char *found;

        memset(json, 0, sizeof(json));
        json_bytes = 0;
        gr_stats_json(&core, "", keep, NULL);
        snprintf(key, sizeof(key), "\"%s\":", name);
        found = strstr(json, key);
        GR_CHECK(found != NULL);
        return found ? strtoull(found + strlen(key), NULL, 10) : 0;
}

static void run(const struct plan *plan, uint64_t seed, long ms)
{
        struct worker workers[THREADS + 2];
        struct timespec pause = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};

        sg_reset(2048 * MIB);
        if (segments)
                sg_by_hand(2000);
        else
                sg_set_tick(500);
        gr_core_init(&core, &parts, segments ? &sg_mapping_driver : &sg_driver,
                     &(struct gr_config){.reuse = plan->reuse,
                                         .pool = segments ? GR_POOL_AUTO : GR_POOL_BINS,
                                         .decay_ns = DECAY_NS});
        gr_budget_set_limit(&core.devices[0], GR_LIMIT_HARD, plan->hard_bytes);
        gr_budget_set_limit(&core.devices[0], GR_LIMIT_THRESHOLD, plan->threshold_bytes);
        atomic_store(&core.streams_overlap, plan->overlaps);
        for (int i = 0; i < 2; i++)
                contexts[i] = gr_core_context_add(&core, sg_context_new(0), 0);
        stop = over = false;
        allocs = frees = 0;
        for (unsigned i = 0; i < THREADS + 2; i++) {
                workers[i] = (struct worker){.id = i, .seed = seed * 1000 + i, .plan = plan};
                pthread_create(&workers[i].thread, NULL,
                               i < THREADS    ? work
                               : i == THREADS ? come_and_go
                                              : help,
                               &workers[i]);
        }
        nanosleep(&pause, NULL);
        /* On a machine with much else to do the helper may not have had its turn yet. */
        for (int i = 0; i < 30000 && !plan->many && figure("released_blocks") == 0; i++)
                nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        stop = true;
        for (unsigned i = 0; i < THREADS + 2; i++)
                pthread_join(workers[i].thread, NULL);
        for (uint64_t ptr = receive(); ptr; ptr = receive())
                free_one(ptr);

        printf("%s: %" PRIu64 " allocations, %" PRIu64 " from the cache\n", plan->name, allocs, figure("hits"));
        GR_CHECK(allocs > 100);
        GR_CHECK(figure("hits") > 0);
        /* Idle memory has decayed beside them; where there are too many contexts all goes to the driver at once. */
        GR_CHECK(plan->many || figure("released_blocks") > 0);
        GR_CHECK(!over);
        GR_CHECK_EQ(wrong, 0);
        GR_CHECK_EQ(sg_misuses(), 0);
        GR_CHECK_EQ(atomic_load(&contexts[0]->fence->broken), 0);

        /* Each allocation came from the cache or the driver; each free went to one of them. */
        if (plan->hard_bytes == GR_UNLIMITED) /* else memory that the driver gave may go back unused, and is counted */
                GR_CHECK_EQ(allocs, figure("hits") + figure("fresh_allocs"));
        /* Not segments, whose extents are what the driver allocates. */
        if (!segments)
                GR_CHECK_EQ(frees, figure("frees") + figure("driver_frees"));
        for (int i = 0; i < 2; i++) {
                GR_CHECK_EQ(atomic_load(&core.devices[i].reserved_bytes), sg_used_bytes(i));
                GR_CHECK(sg_cached_bytes(&core.devices[i]) <= atomic_load(&core.devices[i].reserved_bytes));
                GR_CHECK(atomic_load(&core.devices[i].peak_reserved_bytes) <= core.devices[i].hard_bytes);
        }

        /* And all of it can be had back. */
        for (int i = 0; i < 2; i++) {
                GR_CHECK_EQ(gr_fence_sync(contexts[i]->fence), 0);
                gr_trim(contexts[i], UINT64_MAX);
        }
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        GR_CHECK_EQ(atomic_load(&core.devices[0].reserved_bytes), 0);
        GR_CHECK_EQ(sg_cached_bytes(&core.devices[0]), 0);
        GR_CHECK_EQ(core.devices[0].slab_count, 0);
        GR_CHECK_EQ(sg_misuses(), 0);
        gr_core_destroy(&core);
}

int main(int argc, char **argv)
{
        const char *seed_text = getenv("GR_TEST_SEED"), *ms_text = getenv("GR_TEST_MS");
        uint64_t seed = seed_text ? strtoull(seed_text, NULL, 10) : 1;
        long ms = ms_text ? atol(ms_text) : 1000;
        unsigned count = sizeof(plans) / sizeof(plans[0]);

        segments = argc == 2 && !strcmp(argv[1], "segments");
        printf("seed %" PRIu64 ", %ld ms\n", seed, ms);
        gr_log_set_level(GR_LOG_SILENT);
        for (unsigned i = 0; i < count; i++)
                run(&plans[i], seed, ms / (long)count);
        return GR_CHECK_RESULT();
}
