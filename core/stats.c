#include "stats.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/size.h"
#include "core.h"

struct out {
        gr_stats_write *write;
        void *arg;
};

/* What the bins and segments of all contexts counted. */
struct bin_totals {
        uint64_t hits, frees, cached_blocks;
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

__attribute__((format(printf, 2, 3))) static void put(struct out *out, const char *format, ...)
{
        char line[512];
        va_list args;
        int length;

        va_start(args, format);
        length = vsnprintf(line, sizeof(line), format, args);
        va_end(args);
        if (length > 0)
                out->write(line, (size_t)length < sizeof(line) ? (size_t)length : sizeof(line) - 1, out->arg);
}

static void sum_bins(struct gr_core *core, struct bin_totals *ret)
{
        *ret = (struct bin_totals){0};
        gr_lock(&core->contexts_lock);
        for (struct gr_context *context = core->contexts; context; context = context->next) {
                struct gr_split *split = &context->split;

                gr_lock(&split->lock);
                ret->hits += split->hits;
                ret->frees += split->frees;
                ret->cached_blocks += split->free_count;
                gr_unlock(&split->lock);
                gr_arena_lock(&context->first_arena);
                ret->hits += context->fastbins.hits;
                ret->frees += context->fastbins.frees;
                ret->cached_blocks += context->fastbins.count;
                gr_arena_unlock(&context->first_arena);
                for (unsigned i = 0; i < GR_SHARDS; i++) {
                        struct gr_arena *arena = gr_arena_at(context, i);

                        if (!arena)
                                continue;
                        gr_spin_lock(&arena->lock, GR_RANK_ARENA);
                        for (size_t class = 0; class < GR_CLASS_COUNT; class ++) {
                                ret->hits += arena->bins[class].hits;
                                ret->frees += arena->bins[class].frees;
                                ret->cached_blocks += arena->bins[class].count;
                        }
                        gr_spin_unlock(&arena->lock, GR_RANK_ARENA);
                }
        }
        gr_unlock(&core->contexts_lock);
}

static uint64_t counter(struct gr_core *core, enum gr_stat stat)
{
        return atomic_load(&core->stats.counters[stat]);
}

static bool device_seen(struct gr_device *device)
{
        return atomic_load(&device->peak_reserved_bytes) > 0 || atomic_load(&device->total_bytes) > 0;
}

void gr_stats_text(struct gr_core *core, gr_stats_write *write, void *arg)
{
        static const struct {
                enum gr_stat stat;
                const char *name, *text;
        } rows[] = {
#define GR_STAT(name, words) {GR_STAT_##name, #name, words},
#include "stats.def"
#undef GR_STAT
        };
        struct out out = {write, arg};
        struct bin_totals bins;
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES], c[GR_SIZE_TEXT_BYTES], d[GR_SIZE_TEXT_BYTES];
        uint64_t requests;

        sum_bins(core, &bins);
        for (int i = 0; i < GR_DEVICES_MAX; i++) {
                struct gr_device *device = &core->devices[i];
                uint64_t total = atomic_load(&device->total_bytes), hard = atomic_load(&device->hard_bytes);
                uint64_t card_free = atomic_load(&device->card_free_bytes), own = atomic_load(&device->driver_bytes);

                if (!device_seen(device))
                        continue;
                if (total > 0 && card_free > 0)
                        put(&out, "  device %d: effective use of the card %.2f%% (%s of %s)\n", i,
                            100.0 * (double)(total - card_free) / (double)total,
                            gr_size_format(total - card_free, a, sizeof(a)), gr_size_format(total, b, sizeof(b)));
                else
                        put(&out, "  device %d: use of the card unknown\n", i);
                put(&out, "    memory: %s live, %s cached, hard limit %s\n",
                    gr_size_format(gr_budget_live(device), a, sizeof(a)),
                    gr_size_format(gr_budget_cached(device), b, sizeof(b)), gr_size_format(hard, c, sizeof(c)));
                for (int f = 0; f < GR_MEMORY_KIND_COUNT; f++)
                        if (atomic_load(&device->kind_bytes[f]) > 0)
                                put(&out, "    %s it %s: %s\n",
                                    gr_memory_kind_is_charged((enum gr_memory_kind)f) ? "of" : "beside", kind_words[f],
                                    gr_size_format(atomic_load(&device->kind_bytes[f]), a, sizeof(a)));
                if (own != GR_UNLIMITED && atomic_load(&device->kind_bytes[GR_MEMORY_DRIVER]) == 0)
                        put(&out, "    beside it %s: %s\n", kind_words[GR_MEMORY_DRIVER],
                            gr_size_format(own, a, sizeof(a)));
                if (atomic_load(&device->spilled_bytes) > 0)
                        put(&out, "    in host memory: %s\n",
                            gr_size_format(atomic_load(&device->spilled_bytes), a, sizeof(a)));
                put(&out, "    peak: %s live, %s reserved\n",
                    gr_size_format(atomic_load(&device->peak_live_bytes), a, sizeof(a)),
                    gr_size_format(atomic_load(&device->peak_reserved_bytes), b, sizeof(b)));
        }
        if (atomic_load(&core->host.peak_reserved_bytes) > 0)
                put(&out, "  %s: %s, of it %s cached, peak %s, limit %s\n", kind_words[GR_MEMORY_HOST],
                    gr_size_format(atomic_load(&core->host.reserved_bytes), a, sizeof(a)),
                    gr_size_format(gr_budget_cached(&core->host), d, sizeof(d)),
                    gr_size_format(atomic_load(&core->host.peak_reserved_bytes), b, sizeof(b)),
                    gr_size_format(atomic_load(&core->host.hard_bytes), c, sizeof(c)));
        requests = bins.hits + counter(core, GR_STAT_driver_allocs);
        put(&out,
            "  requests: %" PRIu64 ", of them %" PRIu64 " from the cache (%.1f%%); frees into the cache: %" PRIu64 "\n",
            requests, bins.hits, requests ? 100.0 * (double)bins.hits / (double)requests : 0.0, bins.frees);
        put(&out, "  driver calls saved: %" PRIu64 "\n",
            2 * bins.hits); /* each hit saves the allocation now and saved a free before */
        for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
                if (counter(core, rows[i].stat) > 0 && strstr(rows[i].name, "_bytes") != NULL)
                        put(&out, "  %s: %s\n", rows[i].text,
                            gr_size_format(counter(core, rows[i].stat), a, sizeof(a)));
                else if (counter(core, rows[i].stat) > 0)
                        put(&out, "  %s: %" PRIu64 "\n", rows[i].text, counter(core, rows[i].stat));
        for (int i = 0; i < GR_LEVEL_COUNT; i++) {
                struct gr_level_stats *level = &core->stats.levels[i];

                if (atomic_load(&level->tries) > 0)
                        put(&out, "  ladder, %s: %" PRIu64 " times, %s in %.3f ms\n", gr_level_words[i],
                            atomic_load(&level->tries), gr_size_format(atomic_load(&level->bytes), a, sizeof(a)),
                            (double)atomic_load(&level->ns) / 1e6);
        }
}

static void put_limit(struct out *out, const char *name, uint64_t bytes)
{
        if (bytes == GR_UNLIMITED)
                put(out, ",\"%s\":null", name);
        else
                put(out, ",\"%s\":%" PRIu64, name, bytes);
}

void gr_stats_json(struct gr_core *core, const char *version, gr_stats_write *write, void *arg)
{
        struct out out = {write, arg};
        struct bin_totals bins;
        const char *comma = "";

        sum_bins(core, &bins);
        put(&out, "{\"schema\":%d,\"version\":\"%s\",\"devices\":[", GR_STATS_SCHEMA, version);
        for (int i = 0; i < GR_DEVICES_MAX; i++) {
                struct gr_device *device = &core->devices[i];

                if (!device_seen(device))
                        continue;
                put(&out, "%s{\"device\":%d,\"card_total_bytes\":%" PRIu64 ",\"card_free_bytes\":%" PRIu64, comma, i,
                    atomic_load(&device->total_bytes), atomic_load(&device->card_free_bytes));
                put_limit(&out, "hard_limit_bytes", atomic_load(&device->hard_bytes));
                put_limit(&out, "driver_bytes", atomic_load(&device->driver_bytes));
                put(&out,
                    ",\"live_bytes\":%" PRIu64 ",\"cached_bytes\":%" PRIu64 ",\"reserved_bytes\":%" PRIu64
                    ",\"peak_live_bytes\":%" PRIu64 ",\"peak_reserved_bytes\":%" PRIu64 ",\"spilled_bytes\":%" PRIu64
                    ",\"driver_idle_bytes\":%" PRIu64 ",\"families\":{",
                    gr_budget_live(device), gr_budget_cached(device), atomic_load(&device->reserved_bytes),
                    atomic_load(&device->peak_live_bytes), atomic_load(&device->peak_reserved_bytes),
                    atomic_load(&device->spilled_bytes), atomic_load(&device->idle_bytes));
                for (int f = 0; f < GR_MEMORY_HOST; f++)
                        put(&out, "%s\"%s\":%" PRIu64, f ? "," : "", kind_names[f],
                            atomic_load(&device->kind_bytes[f]));
                put(&out, "}}");
                comma = ",";
        }
        put(&out, "],\"%s_bytes\":%" PRIu64 ",\"%s_cached_bytes\":%" PRIu64 ",\"peak_%s_bytes\":%" PRIu64,
            kind_names[GR_MEMORY_HOST], atomic_load(&core->host.reserved_bytes), kind_names[GR_MEMORY_HOST],
            gr_budget_cached(&core->host), kind_names[GR_MEMORY_HOST], atomic_load(&core->host.peak_reserved_bytes));
        put(&out, ",\"hits\":%" PRIu64 ",\"frees\":%" PRIu64 ",\"cached_blocks\":%" PRIu64, bins.hits, bins.frees,
            bins.cached_blocks);
#define GR_STAT(name, text) put(&out, ",\"" #name "\":%" PRIu64, counter(core, GR_STAT_##name));
#include "stats.def"
#undef GR_STAT
        put(&out, ",\"ladder\":{");
        comma = "";
        for (int i = 0; i < GR_LEVEL_COUNT; i++) {
                struct gr_level_stats *level = &core->stats.levels[i];

                put(&out, "%s\"%s\":{\"tries\":%" PRIu64 ",\"bytes\":%" PRIu64 ",\"ns\":%" PRIu64 "}", comma,
                    gr_level_words[i], atomic_load(&level->tries), atomic_load(&level->bytes), atomic_load(&level->ns));
                comma = ",";
        }
        put(&out, "}}\n");
}
