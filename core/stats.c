#include "stats.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "account/budget.h"
#include "account/figures.h"
#include "account/memory_kind.h"
#include "base/counters.h"
#include "base/json.h"
#include "base/lock.h"
#include "base/size.h"
#include "cache/arenas.h"
#include "context/context.h"
#include "segment/segments_serve.h"

/* The figures of pinned memory, as those of a device: name in JSON, words in the text, value. */
#define PINNED_FIGURES(FIGURE)                                                                                         \
        FIGURE("host_bytes", "reserved", atomic_load(&host->reserved_bytes))                                           \
        FIGURE("host_cached_bytes", "cached", gr_budget_cached(host))                                                  \
        FIGURE("peak_host_bytes", "peak", atomic_load(&host->peak_reserved_bytes))                                     \
        FIGURE("host_limit_bytes", "limit", atomic_load(&host->hard_bytes))

/* What the cache was asked: name in JSON, words in the text, value. */
#define CACHE_COUNTS(COUNT)                                                                                            \
        COUNT("requests", "requests", counts.hits + count_of(core, GR_COUNTER_fresh_allocs))                           \
        COUNT("hits", "from the cache", counts.hits)                                                                   \
        COUNT("frees", "frees into the cache", counts.frees)

struct out {
        gr_sink *sink;
        void *arg;
};

static const char *const kind_words[] = {
#define GR_MEMORY_WORDS(id, name, words) words,
        GR_MEMORY_KINDS(GR_MEMORY_WORDS)
#undef GR_MEMORY_WORDS
};

static const char *const kind_names[] = {
#define GR_MEMORY_NAME(id, name, words) name,
        GR_MEMORY_KINDS(GR_MEMORY_NAME)
#undef GR_MEMORY_NAME
};

__attribute__((format(printf, 2, 3))) static void put_text(struct out *out, const char *format, ...)
{
        char line[512] = "";
        va_list args;

        va_start(args, format);
        vsnprintf(line, sizeof(line), format, args);
        va_end(args);
        out->sink(line, strlen(line), out->arg);
}

static void count_caches(struct gr_core *core, struct gr_cache_counts *ret)
{
        *ret = (struct gr_cache_counts){0};
        gr_lock(&core->contexts_lock);
        for (struct gr_context *context = core->contexts; context; context = context->next) {
                gr_segments_count(context, ret);
                gr_arenas_count(context, ret);
        }
        gr_unlock(&core->contexts_lock);
}

static uint64_t count_of(struct gr_core *core, enum gr_counter counter)
{
        return atomic_load(&core->counters.counts[counter]);
}

static bool device_seen(struct gr_device *device)
{
        return atomic_load(&device->peak_reserved_bytes) > 0 || atomic_load(&device->total_bytes) > 0;
}

static void put_device(struct out *out, struct gr_device *device)
{
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES];
        uint64_t figures[GR_FIGURE_COUNT], total, used;

        gr_figures_of_device(device, figures);
        total = figures[GR_FIGURE_device_total];
        used = total - figures[GR_FIGURE_device_free];
        if (total > 0 && used < total)
                put_text(out, "  device %d: all processes use %s of its %s (%.2f%%)\n", device->ordinal,
                         gr_size_format(used, a, sizeof(a)), gr_size_format(total, b, sizeof(b)),
                         100.0 * (double)used / (double)total);
        else
                put_text(out, "  device %d: use of its memory unknown\n", device->ordinal);
        /* Driver overhead that the limit includes is part of the reserved memory, so it is not shown a second time. */
        if (atomic_load(&device->kind_bytes[GR_MEMORY_DRIVER]) > 0)
                figures[GR_FIGURE_driver] = UINT64_MAX;
        gr_figures_text(figures, out->sink, out->arg);
        for (enum gr_memory_kind kind = 0; kind < GR_MEMORY_HOST; kind++)
                if (gr_memory_kind_is_charged(kind) && atomic_load(&device->kind_bytes[kind]) > 0)
                        put_text(out, "    reserved for %s: %s\n", kind_words[kind],
                                 gr_size_format(atomic_load(&device->kind_bytes[kind]), a, sizeof(a)));
}

static void put_pinned(struct out *out, struct gr_device *host)
{
        const char *between = "";
        char size[GR_SIZE_TEXT_BYTES];

        if (atomic_load(&host->peak_reserved_bytes) == 0)
                return;
        put_text(out, "  %s: ", kind_words[GR_MEMORY_HOST]);
#define PUT_FIGURE(name, words, value)                                                                                 \
        put_text(out, "%s" words " %s", between, gr_size_format(value, size, sizeof(size)));                           \
        between = ", ";
        PINNED_FIGURES(PUT_FIGURE)
#undef PUT_FIGURE
        put_text(out, "\n");
}

void gr_stats_text(struct gr_core *core, gr_sink *sink, void *arg)
{
        struct out out = {sink, arg};
        struct gr_cache_counts counts;
        const char *between = "  ";
        uint64_t requests;

        count_caches(core, &counts);
        requests = counts.hits + count_of(core, GR_COUNTER_fresh_allocs);
        for (int i = 0; i < GR_DEVICES_MAX; i++)
                if (device_seen(&core->devices[i]))
                        put_device(&out, &core->devices[i]);
        put_pinned(&out, core->host);
#define PUT_COUNT(name, words, value)                                                                                  \
        put_text(&out, "%s" words ": %" PRIu64, between, value);                                                       \
        between = ", ";
        CACHE_COUNTS(PUT_COUNT)
#undef PUT_COUNT
        put_text(&out, "; hit rate: %.1f%%\n", requests ? 100.0 * (double)counts.hits / (double)requests : 0.0);
        /* Each hit saves the allocation now, and saved a free before. */
        put_text(&out, "  driver calls saved: %" PRIu64 "\n", 2 * counts.hits);
        gr_counters_text(&core->counters, sink, arg);
}

static void write_device(struct gr_json *json, struct gr_device *device)
{
        uint64_t figures[GR_FIGURE_COUNT];

        gr_figures_of_device(device, figures);
        gr_json_object(json, NULL);
        gr_json_number(json, "device", "%d", device->ordinal);
        for (int i = 0; i < GR_FIGURE_COUNT; i++)
                gr_figure_json(json, i, figures[i]);
        gr_json_object(json, "memory_kinds");
        for (enum gr_memory_kind kind = 0; kind < GR_MEMORY_HOST; kind++)
                if (gr_memory_kind_is_charged(kind))
                        gr_json_count(json, kind_names[kind], atomic_load(&device->kind_bytes[kind]));
        gr_json_close(json);
        gr_json_close(json);
}

void gr_stats_json(struct gr_core *core, const char *version, gr_sink *sink, void *arg)
{
        struct gr_device *host = core->host;
        struct gr_cache_counts counts;
        struct gr_json json;

        count_caches(core, &counts);
        gr_json_begin(&json, sink, arg, 0);
        gr_json_object(&json, NULL);
        gr_json_number(&json, "schema", "%d", GR_STATS_SCHEMA);
        gr_json_string(&json, "version", version);
        gr_json_array(&json, "devices");
        for (int i = 0; i < GR_DEVICES_MAX; i++)
                if (device_seen(&core->devices[i]))
                        write_device(&json, &core->devices[i]);
        gr_json_close(&json);
#define WRITE_FIGURE(name, words, value) gr_json_bytes(&json, name, value);
        PINNED_FIGURES(WRITE_FIGURE)
#undef WRITE_FIGURE
#define WRITE_COUNT(name, words, value) gr_json_count(&json, name, value);
        CACHE_COUNTS(WRITE_COUNT)
#undef WRITE_COUNT
        gr_json_count(&json, "cached_blocks", counts.blocks);
        gr_counters_json(&core->counters, &json);
        gr_json_close(&json);
        gr_json_end(&json);
}
