/* What segments give back to the driver. Calls the driver; no lock is held. */
#ifndef GR_SPLIT_TRIM_H
#define GR_SPLIT_TRIM_H

#include <stdbool.h>
#include <stdint.h>

struct gr_context;

/* Gives idle free segments back, without waiting, until want_bytes are. Returns the bytes that the device got back. */
uint64_t gr_split_trim(struct gr_context *context, uint64_t want_bytes);

/* The same for decay: no more than most_bytes, and a batch. Returns the bytes that left the cache. */
uint64_t gr_split_release(struct gr_context *context, uint64_t most_bytes);

/* What no request needed since the last call, of what could go back. */
uint64_t gr_split_unneeded(struct gr_context *context);

/* Freed blocks in fastbins count as free ranges from now on: what lies beside them can go back, too. */
void gr_split_settle(struct gr_context *context);

/* Whether nothing could go back. */
bool gr_split_empty(struct gr_context *context);

#endif
