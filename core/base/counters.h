/*
 * The counters of the library, and what each rung of the ladder gave. counters.def is their only list.
 */
#ifndef GR_COUNTERS_H
#define GR_COUNTERS_H

#include <stdatomic.h>
#include <stdint.h>

#include "base/json.h"
#include "base/ladder_rungs.h"

enum gr_counter {
#define GR_COUNTER(name, ...) GR_COUNTER_##name,
#include "base/counters.def"
#undef GR_COUNTER
        GR_COUNTER_COUNT
};

/* What one rung of the ladder gave. */
struct gr_rung_counters {
        _Atomic uint64_t tries;
        _Atomic uint64_t bytes;
        _Atomic uint64_t ns;
};

struct gr_counters {
        _Atomic uint64_t counts[GR_COUNTER_COUNT];
        struct gr_rung_counters rungs[GR_RUNG_COUNT];
};

/* The words of the rungs. */
extern const char *const gr_rung_words[GR_RUNG_COUNT];

/* Writes those that are not 0 for people, a line each; or all of them as members of an open JSON object. */
void gr_counters_text(const struct gr_counters *counters, gr_sink *sink, void *arg);
void gr_counters_json(const struct gr_counters *counters, struct gr_json *json);

#endif
