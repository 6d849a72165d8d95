/*
 * Decay: cached memory that nothing needs is returned to the driver over time.
 *
 * The low water of a bin since the last step is what no request needed in that time, whichever of its blocks were in
 * use. The minimum over the last j steps is what no request needed in all of them. So what recent requests needed stays
 * cached, and no allocation or free has to read the clock.
 *
 * Of the memory that went unused for a part x of the decay time, the part smoothstep(x) has been returned: no step
 * returns much at once, and after the decay time nothing is left. Only idle blocks are returned, without a wait for the
 * GPU: the longest unused first, and of those the largest.
 *
 * Only one thread at a time may call the functions below: the background thread or, where decay is off, the thread in
 * proactive reclaim. It holds no lock of core/.
 */
#ifndef GR_DECAY_H
#define GR_DECAY_H

#include <stdint.h>

#include "base/size_class.h"

struct gr_context;
struct gr_core;

#define GR_DECAY_SEGMENTS    GR_CLASS_COUNT /* stands for the segments, where a size class stands for its bins */
#define GR_DECAY_KINDS       (GR_DECAY_SEGMENTS + 1)
#define GR_DECAY_STEPS       20
#define GR_DECAY_STEP_MIN_NS UINT64_C(100000000) /* least time between two steps */
/* Where decay is off: least time between two calls of gr_decay_look that do something */
#define GR_DECAY_LOOK_NS UINT64_C(500000000)

struct gr_decay {
        uint64_t stepped_ns; /* when the last step was; 0: nothing was cached then */
        double due_bytes;    /* due by the curve but not returned yet, as no idle block was that small */
        /*
         * unused_bytes[kind][j]: the footprint of a size class, or of GR_DECAY_SEGMENTS, that went unused for the last
         * j + 1 steps; falls or stays as j grows.
         */
        uint64_t unused_bytes[GR_DECAY_KINDS][GR_DECAY_STEPS];
        /* The sum of unused_bytes[kind][0] at the last step, for other threads. */
        _Atomic uint64_t unneeded_bytes;
};

/* The part that has been returned after the part x of the decay time, both from 0 to 1: smoothstep. */
double gr_decay_curve(double x);

/* Nanoseconds between two steps; 0: decay is off. */
uint64_t gr_decay_step_ns(const struct gr_core *core);

/*
 * Where decay is off, sets unneeded_bytes to what no request needed since the last look. Changes nothing less than
 * GR_DECAY_LOOK_NS after the last look.
 */
void gr_decay_look(struct gr_context *context, uint64_t now_ns);

/*
 * Takes the steps that are due at now_ns in all contexts. Returns when the next is due. 0: nothing is cached, or decay
 * is off; core->decay_armed is then false, so that the next block that is cached calls core->wake.
 */
uint64_t gr_decay_run(struct gr_core *core, uint64_t now_ns);

#endif
