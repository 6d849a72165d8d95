#include <ctype.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "account/figures.h"
#include "alloc/pool.h"
#include "base/metadata.h"
#include "check.h"
#include "core.h"
#include "scripted.h"
#include "stats.h"

static struct gr_core core;
static struct gr_parts parts;
static char text[65536];
static size_t length;

static void keep(const char *piece, size_t piece_bytes, void *arg)
{
        GR_CHECK(arg == &core);
        GR_CHECK(length + piece_bytes < sizeof(text));
        GR_CHECK(memchr(piece, '\0', piece_bytes) == NULL);
        memcpy(text + length, piece, piece_bytes);
        length += piece_bytes;
        text[length] = '\0';
}

static const char *text_now(void)
{
        length = 0;
        gr_stats_text(&core, keep, &core);
        return text;
}

static const char *json_now(void)
{
        length = 0;
        gr_stats_json(&core, "1.2.3", keep, &core);
        return text;
}

/* Where a JSON value that begins at p ends; NULL where it is none. Strings without escapes, integers, null. */
static const char *json_end(const char *p, unsigned depth)
{
        char close = *p == '{' ? '}' : ']';

        if (!p || depth > 8)
                return NULL;
        if (*p == '"') {
                for (p++; *p != '"'; p++)
                        if ((unsigned char)*p < ' ' || *p == '\\')
                                return NULL;
                return p + 1;
        }
        if (strncmp(p, "null", 4) == 0)
                return p + 4;
        if (isdigit((unsigned char)*p)) {
                while (isdigit((unsigned char)*p))
                        p++;
                return p;
        }
        if (*p != '{' && *p != '[')
                return NULL;
        if (p[1] == close)
                return p + 2;
        do {
                p++;
                if (close == '}') {
                        if (*p != '"')
                                return NULL;
                        p = json_end(p, depth + 1);
                        if (!p || *p++ != ':')
                                return NULL;
                }
                p = json_end(p, depth + 1);
                if (!p)
                        return NULL;
        } while (*p == ',');
        return *p == close ? p + 1 : NULL;
}

static void check_json(void)
{
        const char *json = json_now(), *end = json_end(json, 0);

        GR_CHECK(end != NULL);
        GR_CHECK_STR(end ? end : "", "\n");
        if (!end)
                fprintf(stderr, "%s\n", json);
}

/* The checker itself must know what is none. */
static void test_checker(void)
{
        static const char *const bad[] = {"{\"a\":1,}", "{\"a\":}", "[1 2]", "{a:1}", "[1,]", "{\"a\":1", "{\"a\" 1}"};

        for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
                const char *end = json_end(bad[i], 0);

                GR_CHECK(!end || *end);
        }
}

static uint64_t value_of(const char *name)
{
        char key[128];
        const char *found;

        snprintf(key, sizeof(key), "\"%s\":", name);
        found = strstr(json_now(), key);
        GR_CHECK(found != NULL);
        if (!found)
                fprintf(stderr, "  %s\n", name);
        return found ? strtoull(found + strlen(key), NULL, 10) : UINT64_MAX;
}

static void test_empty(void)
{
        char version[600];

        sg_reset(64 * MIB);
        gr_core_init(&core, &parts, &sg_driver, &(struct gr_config){.reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS});
        check_json();
        text_now();
        GR_CHECK_EQ(value_of("schema"), GR_STATS_SCHEMA);
        GR_CHECK(strstr(json_now(), "\"version\":\"1.2.3\"") != NULL);
        /* However long, nothing is cut. */
        memset(version, 'v', sizeof(version));
        version[sizeof(version) - 1] = '\0';
        length = 0;
        gr_stats_json(&core, version, keep, &core);
        GR_CHECK(strstr(text, version) != NULL);
        gr_core_destroy(&core);
}

static void test_names(void)
{
        char wanted[256], size[GR_SIZE_TEXT_BYTES];
        uint64_t n = 0;

        sg_reset(64 * MIB);
        gr_core_init(&core, &parts, &sg_driver, &(struct gr_config){.reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS});

        /* From the first one on. */
        gr_count(&core, GR_COUNTER_failures, 1);
        GR_CHECK(strstr(text_now(), ": 1\n") != NULL);
        gr_count(&core, GR_COUNTER_failures, UINT64_MAX); /* modulo 2^64: none again */

        /* Each counter a figure of its own, and the largest there is. */
        for (unsigned i = 0; i < GR_COUNTER_COUNT; i++)
                gr_count(&core, (enum gr_counter)i, 7000 + i);
        gr_count(&core, (enum gr_counter)(GR_COUNTER_COUNT - 1), UINT64_MAX - 7000 - (GR_COUNTER_COUNT - 1));
        for (unsigned i = 0; i < GR_RUNG_COUNT; i++)
                core.counters.rungs[i] = (struct gr_rung_counters){9000 + i, 8000 + i, 6000 + i};
        check_json();
#define GR_COUNTER(name, unit, words)                                                                                  \
        GR_CHECK_EQ(value_of(#name), GR_COUNTER_##name == GR_COUNTER_COUNT - 1 ? UINT64_MAX : 7000 + n);               \
        if (strcmp(#unit, "BYTES") == 0)                                                                               \
                snprintf(wanted, sizeof(wanted), "%s: %s", words,                                                      \
                         gr_size_format(value_of(#name), size, sizeof(size)));                                         \
        else                                                                                                           \
                snprintf(wanted, sizeof(wanted), "%s: %" PRIu64, words, value_of(#name));                              \
        GR_CHECK(strstr(text_now(), wanted) != NULL);                                                                  \
        n++;
#include "base/counters.def"
#undef GR_COUNTER
        GR_CHECK_EQ(n, GR_COUNTER_COUNT);
        for (unsigned i = 0; i < GR_RUNG_COUNT; i++) {
                snprintf(wanted, sizeof(wanted), "\"%s\":{\"tries\":%u,\"bytes\":%u,\"ns\":%u}", gr_rung_words[i],
                         9000 + i, 8000 + i, 6000 + i);
                GR_CHECK(strstr(json_now(), wanted) != NULL);
                snprintf(wanted, sizeof(wanted), "ladder, %s: %u times", gr_rung_words[i], 9000 + i);
                GR_CHECK(strstr(text_now(), wanted) != NULL);
        }
        gr_core_destroy(&core);
}

/* A small program, of which every figure is known. */
static void test_figures(void)
{
        struct gr_context *context;
        uint64_t a, b, c;

        sg_reset(256 * MIB);
        gr_core_init(&core, &parts, &sg_driver, &(struct gr_config){.reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS});
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        atomic_store(&core.devices[0].total_bytes, 256 * MIB);
        atomic_store(&core.devices[0].free_bytes, 192 * MIB);
        GR_CHECK(strstr(json_now(), "\"hard_limit_bytes\":null") != NULL);
        GR_CHECK_EQ(sg_alloc(context, 8 * MIB, &a), 0);
        GR_CHECK_EQ(sg_alloc(context, 8 * MIB, &b), 0);
        GR_CHECK_EQ(sg_free(&core, a), 0);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        GR_CHECK_EQ(sg_alloc(context, 8 * MIB, &c), 0); /* a again */
        GR_CHECK_EQ(sg_free(&core, b), 0);
        gr_budget_set_limit(&core.devices[0], GR_LIMIT_HARD, 128 * MIB);

        check_json();
        GR_CHECK_EQ(value_of("fresh_allocs"), 2);
        GR_CHECK_EQ(value_of("driver_allocs"), 2);
        GR_CHECK_EQ(value_of("requests"), 3);
        GR_CHECK_EQ(value_of("hits"), 1);
        GR_CHECK_EQ(value_of("frees"), 2);
        GR_CHECK_EQ(value_of("cached_blocks"), 1);
        GR_CHECK_EQ(value_of("live_bytes"), 8 * MIB);
        GR_CHECK_EQ(value_of("cached_bytes"), 8 * MIB);
        GR_CHECK_EQ(value_of("reserved_bytes"), 16 * MIB);
        GR_CHECK_EQ(value_of("peak_live_bytes"), 16 * MIB);
        GR_CHECK_EQ(value_of("peak_reserved_bytes"), 16 * MIB);
        GR_CHECK_EQ(value_of("hard_limit_bytes"), 128 * MIB);
        GR_CHECK_EQ(value_of("device_total_bytes"), 256 * MIB);
        GR_CHECK_EQ(value_of("syncs"), 1);
        text_now();
        GR_CHECK(strstr(text, "25.00%") != NULL); /* 64 of 256 MiB of the card are taken */
        GR_CHECK(strstr(text, "    memory: 8.000 MiB live, 8.000 MiB cached, 16.000 MiB reserved\n") != NULL);
        GR_CHECK(strstr(text, "    peak: 16.000 MiB reserved, 16.000 MiB live\n") != NULL);
        GR_CHECK(strstr(text, "    limits: 128.000 MiB hard limit\n") != NULL);
        GR_CHECK(strstr(text, "  requests: 3, from the cache: 1, frees into the cache: 2; hit rate: 33.3%\n") != NULL);
        GR_CHECK(strstr(json_now(), "\"host\":") == NULL); /* no device's */
        text_now();
        /* No line of what there is none of. */
        GR_CHECK(strstr(text, "ladder,") == NULL);
        GR_CHECK(strstr(text, "host memory") == NULL);
        GR_CHECK(strstr(text, "beside it") == NULL && strstr(text, "reserved for") == NULL);
        GR_CHECK(strstr(text, "device 1") == NULL);
        GR_CHECK(strstr(text, ": 0 B") == NULL && strstr(text, ": 0\n") == NULL);

        /* What the driver took by itself is told once: as last seen, or as charged where that is done. */
        atomic_store(&core.devices[0].driver_bytes, 5 * MIB);
        atomic_store(&core.devices[0].spilled_bytes, 7 * MIB);
        GR_CHECK(strstr(text_now(), "    beside it: 5.000 MiB the driver's own, 7.000 MiB in host memory\n") != NULL);
        gr_budget_force(&core.devices[0], GR_MEMORY_DRIVER, 6 * MIB);
        GR_CHECK(strstr(text_now(), "reserved for the driver's own memory: 6.000 MiB\n") != NULL);
        GR_CHECK(strstr(text, "5.000 MiB") == NULL);
        GR_CHECK(strstr(json_now(), "\"memory_kinds\":{") != NULL);
        GR_CHECK_EQ(value_of("driver"), 6 * MIB);
        gr_budget_uncharge(&core.devices[0], GR_MEMORY_DRIVER, 6 * MIB);
        atomic_store(&core.devices[0].spilled_bytes, 0);

        /* Executable graphs have a line of their own, also when only what the driver took for them is left. */
        GR_CHECK(strstr(text_now(), "executable") == NULL);
        GR_CHECK(strstr(json_now(), "\"executables\":0,\"executable_bytes\":0,") != NULL);
        atomic_store(&core.devices[0].executables, 20);
        atomic_store(&core.devices[0].executable_bytes, 48 * MIB);
        GR_CHECK(strstr(text_now(), "\n    executable graphs: 20, about 48.000 MiB the driver's own\n") != NULL);
        GR_CHECK(strstr(json_now(), "\"executables\":20,\"executable_bytes\":50331648,") != NULL);
        atomic_store(&core.devices[0].executables, 0);
        GR_CHECK(strstr(text_now(), "    executable graphs: 0, about 48.000 MiB the driver's own\n") != NULL);
        atomic_store(&core.devices[0].executable_bytes, UINT64_MAX);
        GR_CHECK(strstr(text_now(), "executable") == NULL);
        atomic_store(&core.devices[0].executables, 1);
        GR_CHECK(strstr(text_now(), "    executable graphs: 1, memory not known\n") != NULL);
        GR_CHECK(strstr(json_now(), "\"executables\":1,\"executable_bytes\":null,") != NULL);
        atomic_store(&core.devices[0].executables, 0);
        atomic_store(&core.devices[0].executable_bytes, 0);

        /* So has what graphs use of the memory that the program freed. */
        GR_CHECK(strstr(text_now(), "graph") == NULL);
        atomic_store(&core.devices[0].graph_bytes, 3 * MIB);
        GR_CHECK(strstr(text_now(), " reserved\n    freed, in use by graphs: 3.000 MiB\n    beside it: ") != NULL);
        atomic_store(&core.devices[0].graph_bytes, 0);

        GR_CHECK_EQ(gr_budget_charge(core.host, GR_MEMORY_HOST, 3 * MIB), 0);
        gr_budget_cache(core.host, MIB);
        gr_budget_set_limit(core.host, GR_LIMIT_HARD, 4 * MIB);
        GR_CHECK(strstr(text_now(), "  pinned host memory: reserved 3.000 MiB, cached 1.000 MiB, peak 3.000 MiB, "
                                    "limit 4.000 MiB\n") != NULL);
        GR_CHECK_EQ(value_of("host_bytes"), 3 * MIB);
        GR_CHECK_EQ(value_of("host_cached_bytes"), MIB);
        GR_CHECK_EQ(value_of("peak_host_bytes"), 3 * MIB);
        GR_CHECK_EQ(value_of("host_limit_bytes"), 4 * MIB);
        gr_budget_set_limit(core.host, GR_LIMIT_HARD, GR_UNLIMITED);
        GR_CHECK(strstr(json_now(), ",\"host_limit_bytes\":null,") != NULL);

        /* A second device is a second entry; what is free of it is not known. */
        atomic_store(&core.devices[5].total_bytes, MIB);
        check_json();
        GR_CHECK(strstr(text_now(), "device 5: use of its memory unknown\n") != NULL);
        GR_CHECK(strstr(text, "device 5: all processes") == NULL && strstr(text, "device 0: use of") == NULL);
        GR_CHECK(strstr(json_now(), ",{\"device\":5,") != NULL);
        GR_CHECK_EQ(sg_misuses(), 0);
        gr_core_destroy(&core);
}

/* Each figure of the list stands in the JSON under its name, with what the device has. */
static void test_list(void)
{
        struct gr_device *device;
        struct gr_group group = {.limit_bytes = 900};
        uint64_t figures[GR_FIGURE_COUNT];
        char wanted[128];

        sg_reset(64 * MIB);
        gr_core_init(&core, &parts, &sg_driver, &(struct gr_config){.reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS});
        device = &core.devices[2];
        atomic_store(&device->group, &group);
        atomic_store(&device->free_bytes, 100);
        gr_budget_set_limit(device, GR_LIMIT_HARD, 300);
        gr_budget_set_limit(device, GR_LIMIT_THRESHOLD, 400);
        gr_budget_set_limit(device, GR_LIMIT_SOFT, 500);
        atomic_store(&device->reserved_bytes, 600);
        gr_budget_cache(device, 150);
        atomic_store(&device->peak_reserved_bytes, 700);
        atomic_store(&device->peak_live_bytes, 650);
        atomic_store(&device->driver_bytes, 800);
        atomic_store(&device->idle_bytes, 70);
        atomic_store(&device->spilled_bytes, 80);
        atomic_store(&device->kind_bytes[GR_MEMORY_IMPORTED], 90);
        GR_CHECK(strstr(json_now(), "\"last_sleep_ns\":null,\"last_wake_ns\":null,") != NULL); /* there was none */
        atomic_store(&device->last_sleep_ns, 1860000000);
        atomic_store(&device->last_wake_ns, 970000000);
        gr_figures_of_device(device, figures);
        check_json();
        for (int i = 0; i < GR_FIGURE_COUNT; i++) {
                snprintf(wanted, sizeof(wanted), "\"%s\":%" PRIu64 ",", gr_figure_table[i].json, figures[i]);
                GR_CHECK(i == GR_FIGURE_device_total || strstr(json_now(), wanted) != NULL);
        }
        GR_CHECK(strstr(json_now(), "\"device_total_bytes\":null,") != NULL); /* not seen yet */
        GR_CHECK_EQ(value_of("device_free_bytes"), 100);
        GR_CHECK_EQ(value_of("hard_limit_bytes"), 300);
        GR_CHECK_EQ(value_of("release_threshold_bytes"), 400);
        GR_CHECK_EQ(value_of("soft_limit_bytes"), 500);
        GR_CHECK_EQ(value_of("reserved_bytes"), 600);
        GR_CHECK_EQ(value_of("live_bytes"), 450);
        GR_CHECK_EQ(value_of("cached_bytes"), 150);
        GR_CHECK_EQ(value_of("peak_reserved_bytes"), 700);
        GR_CHECK_EQ(value_of("peak_live_bytes"), 650);
        GR_CHECK_EQ(value_of("driver_bytes"), 800);
        GR_CHECK_EQ(value_of("driver_idle_bytes"), 70);
        GR_CHECK_EQ(value_of("spilled_bytes"), 80);
        GR_CHECK_EQ(value_of("imported_bytes"), 90);
        GR_CHECK_EQ(value_of("group_limit_bytes"), 900);
        GR_CHECK(strstr(text_now(), "    limits: 300 B hard limit, 400 B release threshold, 900 B group limit, "
                                    "500 B soft limit\n") != NULL);
        gr_budget_uncache(device, 150);
        atomic_store(&device->reserved_bytes, 0);
        atomic_store(&device->group, NULL);
        gr_core_destroy(&core);
}

/* The driver cuts small blocks from pages of its own: what it has cut of none is nobody's. */
static void test_small(void)
{
        struct gr_context *context;
        uint64_t a, b;

        sg_reset(256 * MIB);
        gr_core_init(&core, &parts, &sg_driver, &(struct gr_config){.reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS});
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK_EQ(sg_alloc(context, MIB, &a), 0);
        check_json();
        GR_CHECK_EQ(value_of("live_bytes"), MIB);
        GR_CHECK_EQ(value_of("reserved_bytes"), 2 * MIB);
        GR_CHECK_EQ(gr_pool_slab_bytes(&core, context->device), 0);
        GR_CHECK_EQ(sg_free(&core, a), 0);
        check_json();
        GR_CHECK_EQ(value_of("live_bytes"), 0);
        GR_CHECK_EQ(value_of("cached_bytes"), MIB);
        GR_CHECK_EQ(gr_pool_slab_bytes(&core, context->device), MIB);
        GR_CHECK_EQ(sg_alloc(context, 512 << 10, &b), 0);
        check_json();
        GR_CHECK_EQ(value_of("live_bytes"), 512 << 10);
        GR_CHECK_EQ(gr_pool_slab_bytes(&core, context->device), 0);
        GR_CHECK_EQ(value_of("peak_live_bytes"), MIB);
        GR_CHECK_EQ(value_of("peak_reserved_bytes"), 2 * MIB);
        GR_CHECK_EQ(sg_misuses(), 0);
        gr_core_destroy(&core);
}

static void *ask_slab_bytes(void *arg)
{
        struct gr_device *device = arg;

        return (void *)(uintptr_t)gr_pool_slab_bytes(&core, device);
}

static void *ask_hits(void *arg)
{
        (void)arg;
        return (void *)(uintptr_t)value_of("hits");
}

/* What is changed together is read together: whoever asks meanwhile waits. */
static void test_together(void)
{
        struct gr_device *device;
        struct gr_context *context;
        struct gr_arena *arena;
        pthread_t thread;
        void *found;

        sg_reset(256 * MIB);
        gr_core_init(&core, &parts, &sg_driver, &(struct gr_config){.reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS});
        device = &core.devices[0];
        for (int i = 0; i < 2; i++) {
                struct gr_lock *lock = i == 0 ? &device->slabs_lock : &core.contexts_lock;

                gr_lock(lock);
                device->slab_count = 1;
                GR_CHECK_EQ(pthread_create(&thread, NULL, ask_slab_bytes, device), 0);
                usleep(50000);
                atomic_store(&device->slab_rest_bytes, 2 * MIB);
                gr_unlock(lock);
                pthread_join(thread, &found);
                GR_CHECK_EQ((uintptr_t)found, 2 * MIB);
                atomic_store(&device->slab_rest_bytes, 0);
                device->slab_count = 0;
        }

        context = gr_core_context_add(&core, sg_context_new(0), 0);
        arena = gr_metadata_alloc(sizeof(*arena));
        gr_arena_init(arena, context, 1);
        atomic_store(&context->arenas[1], arena);
        for (int i = 0; i < 4; i++) {
                struct gr_lock *lock = i == 0 ? &context->segments->lock : i == 3 ? &core.contexts_lock : NULL;

                if (lock)
                        gr_lock(lock);
                else
                        gr_arena_lock(i == 1 ? arena : context->first_arena);
                GR_CHECK_EQ(pthread_create(&thread, NULL, ask_hits, NULL), 0);
                usleep(50000);
                ++*(lock     ? &context->segments->hits
                    : i == 1 ? &arena->bins[3].hits
                             : &context->first_arena->fastbins.hits);
                if (lock)
                        gr_unlock(lock);
                else
                        gr_arena_unlock(i == 1 ? arena : context->first_arena);
                pthread_join(thread, &found);
                GR_CHECK_EQ((uintptr_t)found, i + 1);
        }
        gr_core_destroy(&core);
}

int main(void)
{
        test_checker();
        test_empty();
        test_names();
        test_figures();
        test_list();
        test_small();
        test_together();
        return GR_CHECK_RESULT();
}
