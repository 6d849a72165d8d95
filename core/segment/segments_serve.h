/*
 * Segments: large pieces of addresses that are cut into ranges of any multiple of 512 B. They serve the pool kinds
 * `auto`, the default, and `split`. They suit programs whose sizes keep changing: blocks kept by size would pile up.
 *
 *     pages   |   2 MiB   |   2 MiB   |   2 MiB   |   2 MiB   |   2 MiB   |
 *     extents |== mapped =|== mapped =|           |==== mapped in one ====|
 *     ranges  | used |free| waiting   |   hole    | used |   free         |
 *                      |       |           |                    |
 *                      |       |           +-- list of holes    |
 *                      |       +-- queue, by time of the free   |
 *                      +---------------------------------------+-- free lists, by size
 *
 * (An expandable segment. Where no memory can be mapped, a segment is one allocation of the driver, without holes.)
 *
 * A range is used, waiting (freed, its epoch not known to be usable) or free. Waiting ranges stand in a queue in the
 * order in which they were freed. Once its epoch is usable, a range leaves the queue, is merged with adjacent free
 * ranges, and enters the free list of its size. A request gets the range that opens the fewest free pages. Only free
 * ranges merge, and the merged range has the later epoch of the two: both were usable, and it is idle when both are. So
 * no free memory waits for the fence of an adjacent range that was freed later.
 *
 * Where a barrier is cheap, large ranges are free at once, ahead of their fence, and the thread that hands one out lays
 * the barrier first; one barrier covers all that was freed until then. So each request can choose among all free
 * memory, which means less fragmentation (docs/measurements.md, ahead-of-fence). A small request nearly always finds a
 * usable range, so for it a barrier would only be a cost.
 *
 * If the driver can map memory, each context has two expandable segments (expandable.h), whose pages are mapped,
 * returned and moved one by one. If not, segments are allocations of the driver, which go back only as a whole. Then a
 * request that fits nowhere gets a segment of its own size, and a segment serves no request of less than a quarter of
 * its size, as the smallest block in it keeps all of it; unless the driver has no memory left. Requests up to 1 MiB
 * have segments of their own, so that small blocks do not keep the memory of large ones. The smallest requests are left
 * to the bins where barriers are cheap, as these serve them faster (docs/measurements.md, small-requests).
 *
 * A rule keeps the footprint near the peak of live memory (slack.h): before the footprint grows further, free pages are
 * moved to where they are needed, and idle memory is returned. That costs calls of the driver, which may take a fixed
 * share of the time: the more was spent lately, the more footprint is accepted.
 *
 * With pool kind `auto` the bins serve more of the small requests. Freed ranges, but of large ones only a few, wait in
 * fastbins (fastbin.h) for a request of their size, so that threads do not meet at the segments' lock. Where no memory
 * can be mapped the bins serve all.
 *
 * Every used range is a block in the ledger. Free ranges are not in it; gr_segments_find finds them.
 */
#ifndef GR_SEGMENTS_SERVE_H
#define GR_SEGMENTS_SERVE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cache/ledger.h"
#include "segment/segments_state.h"

struct gr_cache_counts;
struct gr_context;
struct gr_core;
struct gr_range;
struct gr_segment;

/*
 * Any thread may call the functions below. Unless they say otherwise, no lock of a context is held. Only
 * gr_segments_grow and gr_segments_put may call the driver.
 */

/* The answer of gr_segments_find. */
struct gr_segments_place {
        uint64_t base_ptr; /* of the range */
        bool live;         /* a used range: the ledger knows it by base_ptr */
};

/* Makes context->segments, without any segment. */
void gr_segments_init(struct gr_context *context);

/* Sets whether segments serve a context that begins, perhaps in an ended one's structure. contexts_lock is held. */
void gr_segments_begin(struct gr_context *context);

/* Frees the structures, except those of used ranges, which the ledger owns. */
void gr_segments_destroy(struct gr_context *context);

/* The context has been destroyed with its memory: forgets all segments; used ranges leave the ledger. */
void gr_segments_context_gone(struct gr_context *context);

/*
 * Which segments serve a request. This does not concern expandable ones, which serve all. The last two are for when all
 * else has failed, as such a segment cannot go back as long as the block is used.
 */
enum gr_segments_from {
        GR_SEGMENTS_FROM_CLOSE, /* used ones up to four times the request, free ones by gr_slack_worth_opening */
        GR_SEGMENTS_FROM_ALL,   /* used and free ones up to four times the request */
        GR_SEGMENTS_FROM_USED,  /* used ones of any size */
        GR_SEGMENTS_FROM_ANY,
};

/* Takes a block for the request from the free ranges; it is in the ledger as CACHED. NULL: no free range serves. */
struct gr_block *gr_segments_take(struct gr_context *context, size_t bytes, enum gr_segments_from from);

/*
 * As gr_segments_take, but only from a range that is usable now, and for a request that is small, or slight beside the
 * peak of live memory; merges no fastbins. Called where a range of exactly the request's size waits in a fastbin: for
 * such a request a worse fit is better than a barrier.
 */
struct gr_block *gr_segments_take_usable(struct gr_context *context, size_t bytes);

/* Whether freed ranges wait for their fence. */
bool gr_segments_have_waiting(struct gr_context *context);

/*
 * Whether one of the waiting ranges would serve the request by itself, so that a barrier that costs overlap is worth
 * it.
 */
bool gr_segments_would_help(struct gr_context *context, size_t bytes);

/*
 * A block of a new segment, as gr_segments_take. -EDQUOT, -ENOMEM, or the driver's error, and *ret_block is untouched.
 * -ENOTSUP, with pool kind auto only: the driver gave no addresses, and the caller uses the bins instead; they serve
 * every later request, too, if the context has no expandable segment at all. Calls the driver.
 */
int gr_segments_grow(struct gr_context *context, size_t bytes, struct gr_block **ret_block);

/*
 * Takes back a block that the program freed (claimed in the ledger; the caller's until now). epoch: from
 * gr_fence_note_freed, or one of the two below. flags: enum gr_segments_put_flags. *ret_should_close: so much was freed
 * that the epoch should be closed. 0, or the driver's error: then the segment is lost, still charged.
 */
#define GR_SEGMENTS_NEVER UINT64_MAX /* its memory must not be reused */
#define GR_SEGMENTS_IDLE  0 /* all its work has finished, or is in the order of the graphs that share its memory */
enum gr_segments_put_flags {
        /* If its segment is one allocation of the driver and wholly free now, it goes back at once, which may block. */
        GR_SEGMENTS_PUT_BY_DRIVER = 1,
        /* What must not be reused goes back at once, too, which waits for the context; else it goes back later. */
        GR_SEGMENTS_PUT_WAITS = 2,
};
int gr_segments_put(struct gr_block *block, uint64_t epoch, unsigned flags, bool *ret_should_close);

/* Adds what the segments served and took back, and the free ranges. No lock from GR_RANK_SEGMENTS up is held. */
void gr_segments_count(struct gr_context *context, struct gr_cache_counts *counts);

/* The range that ptr lies in, in any context; -ENOENT where ptr is in no segment. */
int gr_segments_find(struct gr_core *core, uint64_t ptr, struct gr_segments_place *ret_place);

#endif
