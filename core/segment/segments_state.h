/*
 * What the segments of a context have in common: their lists, accounts and lock. For the files of segment/, and for
 * those that give back what is free in segments.
 */
#ifndef GR_SEGMENTS_STATE_H
#define GR_SEGMENTS_STATE_H

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/attributes.h"
#include "base/lock.h"

struct gr_block;
struct gr_range;
struct gr_segment;

/*
 * Free lists: free ranges by size, sixteen lists per doubling. Each is sorted by size and address as far as a short
 * search finds the place.
 */
#define GR_FREE_CLASSES 640
struct gr_free_lists {
        struct gr_block *blocks[GR_FREE_CLASSES];
        uint64_t filled[GR_FREE_CLASSES / 64]; /* a bit for each list: it is not empty */
};

_Static_assert(GR_FREE_CLASSES % 64 == 0, "each list has a bit");

/* The expandable segments of a context, for requests above 1 MiB and up to that; and the same for graphs. */
enum gr_expandable_kind {
        GR_EXPANDABLE_LARGE,
        GR_EXPANDABLE_SMALL,
        GR_EXPANDABLE_GRAPH_LARGE,
        GR_EXPANDABLE_GRAPH_SMALL,
        GR_EXPANDABLE_KINDS,
};

static inline enum gr_expandable_kind gr_expandable_kind(bool small)
{
        return (enum gr_expandable_kind)(GR_EXPANDABLE_LARGE + small);
}

static inline enum gr_expandable_kind gr_expandable_graph_kind(bool small)
{
        return (enum gr_expandable_kind)(GR_EXPANDABLE_GRAPH_LARGE + small);
}

static inline bool gr_is_graph_kind(enum gr_expandable_kind kind)
{
        return kind == GR_EXPANDABLE_GRAPH_LARGE || kind == GR_EXPANDABLE_GRAPH_SMALL;
}

/*
 * The sets of free lists: one for each kind of expandable segment. Segments that are not expandable use those of
 * GR_EXPANDABLE_LARGE and GR_EXPANDABLE_SMALL, except large ones that are wholly free: they have a set of their own.
 */
enum { GR_FREE_WHOLE = GR_EXPANDABLE_KINDS, GR_FREE_KINDS };

/* What slack.c knows of the time spent on better fits, and of the footprint. */
struct gr_slack {
        int64_t credit_ns;     /* time that may be spent on better fits (slack.h) */
        uint64_t credit_at_ns; /* when credit_ns was last raised; 0: never */
        uint64_t waited_ns;    /* time spent waiting for work that was about to end */
        uint64_t told_bytes;   /* the footprint is logged again once it is above this */
};

/*
 * The files of segment/ that write each field are named; segments_serve.c also empties all when the context has gone.
 */
struct gr_segments {
        /* The driver refused to map memory at a second address, so nothing is moved: remap.c. */
        _Atomic bool moves_refused __attribute__((aligned(GR_LINE_BYTES)));
        _Atomic bool expandable_refused; /* no expandable segment, for lack of addresses or memory: expandable.c */
        _Atomic uint64_t refused_ns;    /* when a mapping last failed for lack of memory; 0: never: expandable_grow.c */
        _Atomic uint64_t extra_from_ns; /* before that no extra is mapped, as memory was short: expandable_grow.c */
        _Atomic uint64_t waiting_bytes; /* of ranges in the queue: segments_serve.c, segments.c */
        /* The latest epoch of ranges that became free ahead of their fence: segments_serve.c, segments.c. */
        _Atomic uint64_t ahead_epoch;

        struct gr_lock lock; /* guards what follows; the fields that each request uses come first */
        unsigned kept_count;
        struct gr_range *kept; /* unused structures for new ranges, linked by `after`, so as to take no lock: range.c */
        struct gr_block *queue; /* waiting ranges, oldest first: segments_serve.c, segments.c */
        uint64_t hits;          /* requests served without the driver: gr_segments_hit */
        uint64_t frees;         /* ranges freed: segments_serve.c */
        uint64_t free_count;    /* free and waiting ranges: range.c, segments.c, segments_serve.c */
        uint64_t changes;       /* how often the free lists changed: range.c */
        uint64_t open_bytes;    /* bytes freed since the last close of an epoch: segments_serve.c */
        uint64_t close_bytes;   /* it closes the next one when open_bytes reaches this: segments_serve.c */
        uint64_t surplus_bytes; /* the surplus: free segments and free extents, which can go back once idle */
        /* Its low water since decay last looked; both by gr_segments_surplus, segments_trim.c. */
        uint64_t surplus_low_bytes;
        struct gr_free_lists free[GR_FREE_KINDS]; /* range.c */
        struct gr_segment **by_address;           /* segments.c */
        size_t segment_count, segment_room;
        struct gr_segment *expandable[GR_EXPANDABLE_KINDS]; /* may be NULL: expandable.c */
        struct gr_block *stale_pages; /* stale ranges of the expandable segments, oldest first: remap.c */
        /* Stale ranges whose addresses graphs have recorded, until the last graph has gone: remap.c. */
        struct gr_block *stale_graph_pages;
        uint64_t graph_used_bytes; /* of used ranges in graph segments: segments.c, segments_serve.c */
        uint64_t graph_peak_bytes; /* the most of these at a time since graphs use the segments: graph_segments.c */
        uint64_t stuck_epoch;      /* the latest epoch of stuck extents that are left, 0 if none: expandable.c */
        unsigned busy;             /* threads in calls of the driver that map or unmap; each counts itself */
        struct gr_slack slack;     /* slack.c */
};

/* A range that was freed in that epoch becomes free, maybe ahead of its fence. */
static inline void gr_segments_note_ahead(struct gr_segments *segments, uint64_t epoch)
{
        gr_assert_locked(&segments->lock);
        if (epoch > atomic_load_explicit(&segments->ahead_epoch, memory_order_relaxed))
                atomic_store_explicit(&segments->ahead_epoch, epoch, memory_order_relaxed);
}

/* Adds bytes, which may be negative, to the surplus. */
static inline void gr_segments_surplus(struct gr_segments *segments, int64_t bytes)
{
        gr_assert_locked(&segments->lock);
        assert(segments->surplus_bytes + (uint64_t)bytes <= INT64_MAX);
        segments->surplus_bytes += (uint64_t)bytes;
        if (segments->surplus_bytes < segments->surplus_low_bytes)
                segments->surplus_low_bytes = segments->surplus_bytes;
}

#endif
