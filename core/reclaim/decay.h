/*
 * Decay: cached memory that goes unused returns to the driver.
 *
 * What is unused is read off the bins. The least that a bin held since the last step is what no request needed in that
 * time, however its blocks took turns; the least over the last j steps is what went unneeded for all of them. So the
 * recent demand stays cached, and nothing on the path of an allocation or a free takes the time. What went unused for
 * a part x of the decay time has gone, as a whole, by smoothstep(x): nothing leaves suddenly, and after the decay time
 * nothing is left. Only idle blocks go, by the stall-free path, the longest unused and largest first.
 *
 * One thread at a time (the helper; where decay is off, the one in proactive reclaim) may call the functions below.
 */
#ifndef GR_DECAY_H
#define GR_DECAY_H

#include <stdint.h>

#include "base/size_class.h"

struct gr_context;
struct gr_core;

#define GR_DECAY_KINDS       (GR_CLASS_COUNT + 1) /* the bins, and what pool kind split could give back */
#define GR_DECAY_STEPS       20
#define GR_DECAY_STEP_MIN_NS UINT64_C(100000000) /* steps are never closer */
#define GR_DECAY_LOOK_NS     UINT64_C(500000000) /* between looks of proactive reclaim where decay is off */

struct gr_decay {
        uint64_t stepped_ns; /* when the last step was; 0: nothing was cached then */
        double due_bytes;    /* by the curve, but no block was small enough yet */
        /* Of each bin, the footprint that went unused for the last j + 1 steps; falls with j. */
        uint64_t unused_bytes[GR_DECAY_KINDS][GR_DECAY_STEPS];
        /* All of [0], as last seen, for other threads. */
        _Atomic uint64_t idle_bytes;
};

/* The part gone after the part x of the decay time, both 0 to 1. */
double gr_decay_curve(double x);

/* How far steps are apart, 0 where decay is off. */
uint64_t gr_decay_step_ns(const struct gr_core *core);

/*
 * Brings idle_bytes up to date where decay is off: what went unneeded between two looks. One that comes too soon after
 * the last changes nothing.
 */
void gr_decay_look(struct gr_context *context, uint64_t now_ns);

/*
 * Takes the steps that are due at now_ns in all contexts. Returns when the next is due; 0 where nothing is cached, and
 * then core->decay_armed is false, and core->wake is called again when something is.
 */
uint64_t gr_core_decay(struct gr_core *core, uint64_t now_ns);

#endif
