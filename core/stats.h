/*
 * Counters, and the summary of them as text and JSON. One list (stats.def) names them all; the figures of memory come
 * from the devices, those of the ladder from its levels.
 */
#ifndef GR_STATS_H
#define GR_STATS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "reclaim/ladder_levels.h"

#define GR_STATS_SCHEMA 1 /* of the JSON; grows when a field changes its meaning or goes */

struct gr_core;

enum gr_stat {
#define GR_STAT(name, text) GR_STAT_##name,
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

/* Takes a piece of text, not NUL-terminated. */
typedef void gr_stats_write(const char *text, size_t length, void *arg);

/*
 * Writes the summary, in memory units for people, or as one JSON object with raw bytes. May be called while other
 * threads work: each figure is right by itself, their sum need not be. Calls no driver: card figures are those last
 * seen.
 */
void gr_stats_text(struct gr_core *core, gr_stats_write *write, void *arg);
void gr_stats_json(struct gr_core *core, const char *version, gr_stats_write *write, void *arg);

#endif
