/*
 * The statistics: counters, and a summary as text and JSON. base/counters.def is the only list of the counters,
 * account/figures.def the only list of a device's figures. The ladder counts for each of its rungs.
 */
#ifndef GR_STATS_H
#define GR_STATS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "base/counters.h"
#include "base/json.h"

#define GR_STATS_SCHEMA 1 /* of the JSON; grows when a field changes its meaning or goes */

struct gr_core;

/*
 * Writes the summary, in memory units for people, or as one JSON object with raw bytes. May be called while other
 * threads work: each figure is right by itself, their sum need not be. The figures of the whole device are those last
 * seen. Makes no call of the driver, and takes locks of core/: none may be held.
 */
void gr_stats_text(struct gr_core *core, gr_sink *sink, void *arg);
void gr_stats_json(struct gr_core *core, const char *version, gr_sink *sink, void *arg);

#endif
