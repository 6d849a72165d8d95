/*
 * Proactive reclaim: where memory gets short, some is given back while the program waits for the GPU anyway, and not in
 * the middle of an allocation that fails.
 *
 * How often and how long follows CUDA.jl's heuristic: at half of the limit it begins, since the caller is about to
 * block; it may take 5 % of the time, twice that for each of: the caller is about to block, the last run freed more
 * than a tenth of what the program held, live memory is above 0.90 of the limit, above 0.95. What a run costs is an
 * exponential mean. Ours halves the share again for each run that freed nothing. Reclaimables give up what is idle;
 * of the cache only what went unused for a whole step of decay (with decay off: between two runs half a second apart)
 * goes back, and only near the limit: a program that uses all it has is not slowed down.
 *
 * The limit is the process's own, or the group's where that is fuller. Of the group's all that its members have counts,
 * as live but for what this process caches: what the others do with theirs is not asked here.
 */
#ifndef GR_PROACTIVE_H
#define GR_PROACTIVE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct gr_context;
struct gr_core;

struct gr_proactive {
        _Atomic bool pressed; /* memory may be getting short; what callers look at before anything else */
        _Atomic bool busy;    /* one thread at a time; it owns what follows */
        uint64_t ended_ns;
        double cost_ns; /* mean */
        bool fruitful;  /* the last run */
        unsigned fruitless;
};

/* After more was taken from the driver for context. What other members take is seen at the next such moment. */
void gr_proactive_note(struct gr_context *context);

/* The calling thread is about to wait for the work of context. Does nothing where memory is plenty or time is short. */
void gr_proactive_run(struct gr_context *context);

#endif
