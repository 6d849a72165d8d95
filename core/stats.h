/*
 * The statistics: counters, and a summary as text and JSON. stats.def is the only list of the counters and
 * account/figures.def that of a device's figures; the ladder counts for each of its levels.
 */
#ifndef GR_STATS_H
#define GR_STATS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "base/json.h"
#include "reclaim/ladder_levels.h"

#define GR_STATS_SCHEMA 1 /* of the JSON; grows when a field changes its meaning or goes */

struct gr_core;

enum gr_stat {
#define GR_STAT(name, ...) GR_STAT_##name,
#include "stats.def"
#undef GR_STAT
        GR_STAT_COUNT
};

/* What one rung of the ladder gave. */
struct gr_level_stats {
        _Atomic uint64_t tries;
        _Atomic uint64_t bytes;
        _Atomic uint64_t ns;
};

struct gr_stats {
        _Atomic uint64_t counters[GR_STAT_COUNT];
        struct gr_level_stats levels[GR_LEVEL_COUNT];
};

/*
 * Writes the summary, in memory units for people, or as one JSON object with raw bytes. May be called while other
 * threads work: each figure is right by itself, their sum need not be. Calls no driver: card figures are those last
 * seen.
 */
void gr_stats_text(struct gr_core *core, gr_sink *sink, void *arg);
void gr_stats_json(struct gr_core *core, const char *version, gr_sink *sink, void *arg);

#endif
