/*
 * Preallocated blocks: where every block of a busy class waits for its fence, one more block may be cheaper than one
 * more fence, as a fence then pays for as many allocations as its thread has blocks. Each fence earns one; they are
 * held within a share of the card for each thread, and cached memory like any other: decay and the ladder give them
 * back.
 *
 * A block of 1 MiB takes the driver as long as 27 fences, a small one as long as two (35 and 2 us beside 1.3, between
 * kernels on an H200, November 2026), so what a loop pays most is to take them, 4.5 ms for all. Earned by one fence
 * each it has them after 8,000 pairs and pays 0.01 us in each from then on; by four fences each, after 33,000. By then
 * both have cost the same; a loop that ends after 1,000 to 8,000 pairs of 1 MiB pays 1 to 2 ms more than by four.
 *
 * There are none above 1 MiB: to write such a block takes the GPU longer than the fence, and to go round among many
 * takes it out of the GPU's cache (PyTorch training on an H200, November 2026: a tenth less memory without, and no more
 * time).
 */
#ifndef GR_PREALLOCATE_H
#define GR_PREALLOCATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gr_context;

/*
 * The calling thread's bin has blocks for the request, none of them usable. True: rather than pay for a fence take one
 * more from the driver, which is counted as preallocated. False: pay; or, where other threads have usable blocks that
 * they left alone for some fences, those are in the bin now, as many as a busy class may have: what threads did that
 * are gone, or now do something else, need not come from the driver again. No lock from GR_RANK_ARENA up is held.
 */
bool gr_preallocate_wanted(struct gr_context *context, size_t bytes);

/* Cached memory of the context is there no more: so much of what preallocated blocks may take has to be earned anew. */
void gr_preallocate_returned(struct gr_context *context, uint64_t bytes);

#endif
