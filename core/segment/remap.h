/*
 * Free memory of the heaps of pool kind `split` that moves to where a request lacks some: its handle is mapped a second
 * time there. What is submitted from then on runs after the work that may still use it under its old addresses, so
 * nothing is waited for; those addresses, which are stale then, are unmapped once that work has passed.
 */
#ifndef GR_REMAP_H
#define GR_REMAP_H

#include <stdint.h>

#include "segment/range.h"

struct gr_context;

/* Fills holes of a busy range, hole_bytes in all, with free memory from elsewhere. Returns how much is left to map.
 * Calls the driver; no lock held. */
uint64_t gr_remap_fill(struct gr_context *context, struct gr_range *range, uint64_t hole_bytes);

/* Stale addresses become holes once nothing can use them. The split's lock is held, but not while the driver is called.
 */
void gr_remap_reap(struct gr_context *context);

#endif
