/*
 * Proactive reclaim: when memory gets short, some is returned while the program waits for the GPU anyway, rather than
 * during an allocation that fails.
 *
 * How often follows the heuristic of CUDA.jl. Nothing runs below half of the limit. From there on a run is made if
 *
 *   mean cost of a run <= share * time since the last run
 *   share = 5 % * 2 (the caller is about to wait) * 2 (the last run freed more than a tenth of the live memory)
 *               * 2 (live above 0.90 of the limit) * 2 (above 0.95) / 2^min(6, runs in a row that freed nothing)
 *
 * where the mean is exponential, each factor 2 applies where its condition holds, and the divisor is this library's
 * own. A run has reclaimables give up what is idle. Above 0.90 of the limit it also returns cached blocks, but only
 * what went unused for a whole step of decay (with decay off: between two runs half a second apart), so that a program
 * that uses all its memory is not slowed down.
 *
 * The limit is the process's own, or the group's where that is fuller. All memory of the group's members then counts,
 * as live except for what this process has cached.
 */
#ifndef GR_PROACTIVE_H
#define GR_PROACTIVE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct gr_context;
struct gr_core;

struct gr_proactive {
        _Atomic bool busy;  /* a thread is in gr_proactive_run: only that thread uses what follows */
        uint64_t ended_ns;  /* end of the last run */
        double cost_ns;     /* exponential mean of a run */
        bool fruitful;      /* the last run freed more than a tenth of the live memory */
        unsigned fruitless; /* runs in a row that freed nothing */
};

/*
 * Called if core->memory_is_short, by a thread that is about to wait for the work of context. Does nothing if there is
 * enough memory, if a run would take too much of the time, while a capture is open, or inside a reclaimable. No lock is
 * held.
 */
void gr_proactive_run(struct gr_context *context);

#endif
