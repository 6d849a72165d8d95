/*
 * The counters of the library, and what each rung of the ladder gave. counters.def is their only list.
 */
#ifndef GR_COUNTERS_H
#define GR_COUNTERS_H

#include <stdatomic.h>
#include <stdint.h>

#include "base/ladder_levels.h"

enum gr_stat {
#define GR_STAT(name, ...) GR_STAT_##name,
#include "base/counters.def"
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

#endif
