/*
 * What gpureclaim report finds in a trace. report.c reads the trace and fills struct report. Below it are the functions
 * of the files that use all of it.
 */
#ifndef GR_TOOL_REPORT_H
#define GR_TOOL_REPORT_H

#include <limits.h>

#include "origins.h"
#include "trace.h"

#define SNAPSHOTS_MOST 100
#define POINTS_MOST    2000 /* of one GPU, however long the trace is */
#define ADVICE_MOST    5
#define ADVICE_BYTES   640

/* Live blocks of one size. */
struct group {
        uint64_t bytes; /* of one block */
        uint64_t count;
        uint64_t oldest_ns; /* when the first of them was allocated */
};

/* What is live after some operation. */
struct moment {
        size_t operations;
        uint64_t at_ns, bytes, count;
        struct group *groups; /* the largest sum first; the caller frees them */
        size_t group_count;
};

/* The memory of one GPU over time. at: ns, or the number of the operation where the trace has no times. */
struct timeline {
        struct point {
                uint64_t at, live_bytes, cached_bytes, other_bytes; /* other: what the pool does not serve */
                uint64_t quarantine_bytes, fragmented_bytes;        /* of the cached ones */
                uint64_t number;                                    /* of the change, in the order in which they came */
        } points[POINTS_MOST];
        size_t count;
        uint64_t mean_cached_bytes; /* over the time */
        struct point worst;         /* where most was fragmented, as soon as it was */
};

struct report {
        struct gr_trace trace;
        uint64_t end_ns, allocations, allocated_bytes;
        uint64_t half_ns, tenth_ns; /* half of the freed blocks lived at most half_ns, a tenth at least tenth_ns */
        bool timed;
        struct moment peak, end;
        struct {
                uint64_t blocks, bytes;
        } sizes[64];                /* of all allocations: [i]: sizes from 2^i to below 2^(i + 1) */
        bool at_is_ns;              /* in the timelines */
        uint64_t last_at;           /* the end of the timelines */
        struct timeline *timelines; /* GR_TRACE_DEVICES; NULL: not asked for */
        bool has_origins;
        char origins_path[PATH_MAX];
        struct origins origins; /* of what was live at the end */
        /* A time at which it is known which origins had what was live. Only where the trace has stacks. */
        struct snapshot {
                uint64_t at; /* as in the timelines */
                struct origins origins;
        } * snapshots;
        size_t snapshot_count;
        const struct snapshot *peak_snapshot; /* NULL: there is none */
};

/* The time of operation i, in the unit of the timelines. */
static inline uint64_t operation_at(const struct report *report, size_t i)
{
        return report->at_is_ns ? report->trace.ops[i].time_ns : i + 1;
}

/* Operations and events in one order, after so many of both: whether the next is an event. There is one. */
static inline bool event_is_next(const struct gr_trace *trace, size_t ops, size_t events)
{
        return ops == trace->count ||
               (events < trace->event_count && trace->events[events].time_ns <= trace->ops[ops].time_ns);
}

/* Fills the timelines. 0 or -ENOMEM. */
int draw_timelines(struct report *report);

/* Finds the snapshots, once the origins have been read. 0 or -ENOMEM. */
int take_snapshots(struct report *report);

/* What the peak of live memory would have been without the blocks of this origin; 0: out of memory. */
uint64_t peak_without(const struct report *report, const struct origin *origin);

/* Sentences that say what to do, the most urgent first. Returns how many. */
size_t advise(const struct report *report, char texts[ADVICE_MOST][ADVICE_BYTES]);

/* Prints one HTML page that shows all of it and needs nothing else. */
void write_page(const char *path, const struct report *report);

/* Prints the trace as gpureclaim report --perfetto and --pytorch do. */
void write_perfetto(const struct gr_trace *trace);
void write_pytorch(const struct report *report);

#endif
