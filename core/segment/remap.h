/*
 * Remap: memory of free pages moves to addresses where a request needs it, by mapping its handle there a second time.
 * Work that is submitted later runs after the work that may still use the memory under its old addresses, so the host
 * does not wait. The old addresses are then stale, and are unmapped when that work has passed; those that graphs have
 * recorded, when the last graph has gone.
 */
#ifndef GR_REMAP_H
#define GR_REMAP_H

#include <stdbool.h>
#include <stdint.h>

#include "segment/range.h"

struct gr_context;

/*
 * Fills holes of a busy range with free memory from elsewhere until hole_bytes are filled; what moves last may exceed
 * that, if the holes are larger. from_graphs: if graphs use the range's segment, free memory of such segments may move,
 * too, and moves first; else it stays where it is. Returns how many of these bytes are still to be mapped. Calls the
 * driver; no lock held.
 */
uint64_t gr_remap_fill(struct gr_context *context, struct gr_range *range, uint64_t hole_bytes, bool from_graphs);

/* Whether so many bytes of free memory could move, those of graph segments included. The segments' lock is held. */
bool gr_remap_has(struct gr_context *context, uint64_t bytes);

/*
 * Makes stale addresses holes when no work can use them any more. The segments' lock is held, but released while the
 * driver is called.
 */
void gr_remap_collect(struct gr_context *context);

#endif
