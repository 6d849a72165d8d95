/* How an expandable segment grows: the place for a request, and the memory that it lacks. */
#ifndef GR_EXPANDABLE_GROW_H
#define GR_EXPANDABLE_GROW_H

#include <stdbool.h>
#include <stddef.h>

struct gr_block;
struct gr_context;

/*
 * A block of bytes, a multiple of GR_SPLIT_UNIT_BYTES, behind which memory is mapped where there is none; in the ledger
 * as CACHED. What is mapped beyond it is free. -ENOSPC: there is no expandable segment, or no addresses are left in it,
 * and nothing has happened. -EDQUOT, -ENOMEM, or the driver's error: what was mapped until then is cached. Calls the
 * driver; no lock held.
 */
int gr_expandable_grow(struct gr_context *context, size_t bytes, struct gr_block **ret_block);

/*
 * Whether memory may be mapped for all of a large request before anything else is tried, as GR_POOL_AUTO does to save
 * time: that leaves the footprint below its bound by what was live of late, and well below any limit. The split's lock
 * is held.
 */
bool gr_expandable_may_grow(struct gr_context *context, size_t bytes);

#endif
