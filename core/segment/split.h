/*
 * The pool kind `split`: segments from the driver, cut into ranges of any multiple of 512 B. For programs whose sizes
 * keep changing, where blocks kept by size would pile up.
 *
 * A range is used, waiting (freed, its epoch not known to be usable) or free. Waiting ranges stand in a queue in the
 * order they were freed; once its epoch is usable a range leaves the queue, merges with free neighbours, and enters a
 * list by size, from which the fit is taken that opens the fewest free pages. Only free ranges merge, and the merged
 * one carries the later epoch: both were usable, so it is; and whoever asks whether it is idle asks for the work of
 * both. So memory is never held back by a neighbour that was freed later, and ranges of one epoch meet as soon as it is
 * usable.
 *
 * Where a barrier costs no more than its call, large ranges are free at once, ahead of their fence, and whoever hands
 * one out lays the barrier first: one readies all that was freed until then. So each request is weighed against all
 * that is free, as by an allocator that knows its stream (a recorded training program then moved a sixth as much memory
 * to stay within the same footprint; November 2026). A small request finds room nearly always, so that a barrier for
 * it would only cost.
 *
 * Where the driver maps memory, the segments are two heaps of it (expandable.h), whose pages come, go and move one by
 * one. Where it does not, they are allocations of the driver, which go back only as a whole: a request that nothing
 * fits gets one of its own size, and none serves a request of less than a quarter of it, as the smallest block in it
 * keeps all of it; unless the driver has no memory left. Requests up to 1 MiB are kept apart, in a heap or in segments
 * of one page, so that they do not hold back what large ones leave. The smallest are left to the bins, where barriers
 * are cheap: they serve them in a fraction of the time, in recorded PyTorch programs a sixth to two thirds of all
 * requests, of 1 MiB in all.
 *
 * A rule keeps the footprint near the peak of live memory: before it is lifted further, free pages are moved to where
 * they are needed, and idle memory goes back. That costs calls of the driver, and a fixed share of the time is what
 * they may cost: the more was spent lately, the more footprint is accepted.
 *
 * GR_POOL_AUTO is for programs that bins are fast enough for, and too large: there a quarter above the peak is
 * accepted, so that memory is mapped in larger pieces than a request needs (expandable.h), large ranges that go ahead
 * of their fence wait in fastbins (fastbin.h) until that much is held (by the peak of late) and a request fits nowhere
 * else, and the smallest place that suffices is taken, whatever pages it opens.
 *
 * Every used range is a block in the ledger. Free ones are not; gr_split_find knows them.
 */
#ifndef GR_SPLIT_H
#define GR_SPLIT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/lock.h"
#include "cache/ledger.h"

struct gr_cache_counts;
struct gr_context;
struct gr_core;
struct gr_range;
struct gr_segment;

#define GR_SPLIT_UNIT_BYTES ((size_t)512) /* sizes and addresses of ranges are multiples of it */

/* Free ranges by size, sixteen classes per doubling, each in order of size and address as far as that is soon found. */
#define GR_FREE_CLASSES 640
struct gr_free_lists {
        struct gr_block *blocks[GR_FREE_CLASSES];
        uint64_t filled[GR_FREE_CLASSES / 64]; /* a bit for each class: it has some */
};

/* In segments for small requests; in those in use for large ones; and whole free segments for those. */
enum { GR_FREE_SMALL, GR_FREE_LARGE, GR_FREE_WHOLE, GR_FREE_KINDS };

struct gr_split {
        /* The driver does not map memory twice. */
        _Atomic bool moves_refused __attribute__((aligned(GR_LINE_BYTES)));
        _Atomic bool heap_refused;      /* the driver has no addresses for one, or memory was short */
        _Atomic bool ahead_refused;     /* the driver had no memory to map, so that it is short: none is mapped ahead */
        _Atomic uint64_t waiting_bytes; /* of ranges in the queue */
        _Atomic uint64_t ahead_epoch;   /* the latest of ranges that became free ahead of their fence */
        _Atomic uint64_t wasted_bytes;  /* auto: fresh memory taken while much was cached */
        _Atomic uint64_t
                unwanted_bytes; /* auto: of what bins hold from before the move, to go back by gr_core_maintain */

        struct gr_lock lock; /* guards what follows; first what each request touches, close together */
        unsigned kept_count;
        _Atomic bool stuck;     /* some range was: from then on each is merged as it is freed, and none is quick; also
                                   read without the lock */
        struct gr_range *kept;  /* structures of ranges that are no more, by after: those to come need no other lock */
        struct gr_block *queue; /* waiting ranges, oldest first */
        uint64_t hits, frees;   /* requests served without the driver; ranges freed */
        uint64_t free_count;    /* free and waiting ranges */
        uint64_t open_bytes;    /* freed since an epoch was closed for it */
        uint64_t close_bytes;   /* of it, at which one is closed again */
        uint64_t surplus_bytes; /* what could go back once it is idle: free segments, free extents of heaps */
        uint64_t surplus_low_bytes; /* least of it since decay last looked: what nobody needed */
        struct gr_free_lists free[GR_FREE_KINDS];
        struct gr_segment **segments; /* by address */
        size_t segment_count, segment_room;
        struct gr_segment *heaps[2];  /* for large requests and for small ones, among the segments; NULL: none yet, or
                                         not to be had */
        struct gr_block *stale_pages; /* of the heaps, in the order they came to be */
        unsigned busy;                /* threads in calls of the driver for a heap */
        int64_t credit_ns;            /* time that may be spent on better fits */
        uint64_t credit_at_ns;        /* when it was last added to; 0: never */
        uint64_t waited_ns;           /* for work that was about to end */
        uint64_t told_bytes;          /* the footprint that was last logged */
        /* Of the heaps: how much the driver last had too little memory for, 0 for none; what it had; and when. */
        uint64_t refused_bytes, refused_free_bytes, refused_ns;
};

/* What gr_split_find says of an address. */
struct gr_split_place {
        uint64_t base_ptr; /* of the range */
        bool live;         /* a used range: the ledger knows it by base_ptr */
};

void gr_split_init(struct gr_context *context);

/* Frees the structures, except those of used ranges, which the ledger owns. */
void gr_split_destroy(struct gr_context *context);

/* The context has gone and its memory with it: forgets all segments; used ranges leave the ledger. */
void gr_split_drop(struct gr_context *context);

/*
 * Requests up to here may be left to the bins (gr_split_serves), for GR_POOL_AUTO somewhat larger ones: by recorded
 * traces that spares it a tenth to three fifths of the cuts, and takes no more memory (November 2026).
 */
#define GR_SPLIT_LEAST_BYTES      ((size_t)16 << 10)
#define GR_SPLIT_LEAST_AUTO_BYTES ((size_t)128 << 10)

/*
 * A cached block for the request, in the ledger as CACHED; NULL: none is usable, or, where not lax, none that is worth
 * cutting a large free segment for.
 */
struct gr_block *gr_split_take(struct gr_context *context, size_t bytes, bool lax);

/*
 * The same in a segment of any size, which the block then keeps from the driver: where all else was tried. opens: also
 * in a free one.
 */
struct gr_block *gr_split_take_any(struct gr_context *context, size_t bytes, bool opens);

/* Whether freed ranges wait for their fence. */
bool gr_split_waiting(struct gr_context *context);

/* Whether one of the ranges that wait, by itself, would serve the request: worth a barrier that costs overlap. */
bool gr_split_would_help(struct gr_context *context, size_t bytes);

/* A block of a new segment, as gr_split_take. -EDQUOT, -ENOMEM, or the driver's error. Calls the driver. */
int gr_split_grow(struct gr_context *context, size_t bytes, struct gr_block **ret_block);

/*
 * Takes back a block that the program freed (claimed in the ledger; the caller's until now). epoch: from
 * gr_fence_freed, or GR_SPLIT_NEVER where its memory must not be reused. by_driver: where its segment is free now, it
 * goes back to the driver at once, which may block. *ret_should_close: so much was freed that the epoch should be closed. 0, or
 * the driver's error: then the segment is lost, still charged.
 */
#define GR_SPLIT_NEVER UINT64_MAX
int gr_split_put(struct gr_block *block, uint64_t epoch, bool by_driver, bool *ret_should_close);

/* Adds what the segments served and took back, and the free ranges. No lock from GR_RANK_SPLIT up is held. */
void gr_split_count(struct gr_context *context, struct gr_cache_counts *counts);

/* The range that ptr lies in, in any context; -ENOENT where ptr is in no segment. */
int gr_split_find(struct gr_core *core, uint64_t ptr, struct gr_split_place *ret_place);

/*
 * Before fresh memory is taken in a context of bins: GR_POOL_AUTO moves new requests to split once much more than they
 * need lies in bins that do not fit. What the bins hold goes back as it is in the way.
 */
void gr_split_consider(struct gr_context *context, size_t bytes);

/* The program shares allocations as wholes (legacy IPC): new requests get allocations of their own from now on. */
void gr_split_bar(struct gr_core *core);

#endif
