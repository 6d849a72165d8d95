/*
 * The heaps of pool kind `split`: large pieces of addresses, one for large blocks and one for small ones, of which any
 * pages can have memory behind them. A request that nothing free fits gets new memory only behind the pages that its
 * place lacks; free pages anywhere can be mapped there instead, also while work that used them is still to run, and
 * idle ones can go back by themselves. So the footprint is what is live, the rest of pages partly in use, and what has
 * just been freed.
 *
 * A heap is a segment whose ranges may also be holes. Memory is mapped in extents, one handle of the driver each: it
 * cannot be mapped or unmapped in part, so an extent goes back only when no byte of it is in use and the last work that
 * may touch it has passed. An extent is one page, and more only where much is held: each costs as much as an allocation
 * of the driver's (H200, November 2026: create 10 us, map 1, access 21, unmap 15, release 11, hardly more for 512 MiB;
 * in a training program, beside its kernels, map and access 55 together and unmap 50; for each handle, also where one
 * call is for many side by side). None of it waits for running kernels or holds up launches.
 *
 * GR_POOL_AUTO saves such calls: where a large request lacks less than 32 MiB, so much is mapped at once, an extent for
 * each hole, unless the footprint would pass its bound (slack.h) or come near a limit. What is not needed yet is free
 * for the requests to come, but an extent still goes back, or moves, only as a whole.
 *
 * Memory of the heap belongs to the process, not to the context: when the context ends, gr_expandable_close returns it.
 */
#ifndef GR_EXPANDABLE_H
#define GR_EXPANDABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "segment/range.h"

struct gr_context;

/* The addresses for a heap, as one hole; another thread may be faster. -ENOSPC: there is none. No lock held. */
int gr_expandable_open(struct gr_context *context, bool small);

/*
 * Returns the extents inside a busy range, which alone knows them now; fresh: only those that nothing has used since
 * they were mapped. Returns their bytes. Calls the driver; no lock held.
 */
uint64_t gr_expandable_unmap(struct gr_context *context, struct gr_range *range, bool fresh);

/*
 * Gives idle extents back without waiting: those in the smallest free ranges first, until want_bytes are, and none that
 * would take it beyond most_bytes. Returns the bytes that the device got back. Calls the driver; no lock held.
 */
uint64_t gr_expandable_trim(struct gr_context *context, uint64_t want_bytes, uint64_t most_bytes);

/*
 * The program frees range, which must not be reused (its state is BUSY, and it counts as used): waits for the context
 * as the driver would and returns the extents that it covers, and those at its ends of which nothing else is used; what
 * remains of it is STUCK, and still counts as used. Calls the driver; no lock held.
 */
void gr_expandable_discard(struct gr_context *context, struct gr_range *range);

/*
 * Whether a range that was freed, from ptr to last, was the last in use in an extent part of which must not be reused,
 * so that it can go back. The split's lock is held.
 */
bool gr_expandable_ends_stuck(const struct gr_segment *heap, uint64_t ptr, uint64_t last);

/*
 * Such a range has been freed: waits for the context as the driver would, and returns the extents at
 * its two ends. The caller has counted itself into busy, and is counted out. Calls the driver; no lock held.
 */
void gr_expandable_unstick(struct gr_context *context, struct gr_segment *heap, uint64_t ptr, uint64_t last);

/* Returns all memory and addresses of a heap that no split knows any more, and whose context may have gone. */
void gr_expandable_close(struct gr_context *context, struct gr_segment *heap);

#endif
