/* All arenas of a context: what they hold and have counted together, and their end. */
#ifndef GR_ARENAS_H
#define GR_ARENAS_H

#include <stdbool.h>
#include <stdint.h>

struct gr_context;

/* The footprint of the blocks in all bins, and the bytes in all fastbins. Takes no lock of an arena. */
uint64_t gr_arenas_cached(struct gr_context *context);
uint64_t gr_arenas_fastbins(struct gr_context *context);

/* The bytes of the blocks in all bins of classes up to 1 MiB, which lie in slabs. Takes no lock of an arena. */
uint64_t gr_arenas_small_bytes(struct gr_context *context);

/* Whether all bins of the class are empty. */
bool gr_arenas_class_empty(struct gr_context *context, unsigned class);

/* What some of a context's caches have counted since they began, and hold now. */
struct gr_cache_counts {
        uint64_t hits;   /* requests served */
        uint64_t frees;  /* blocks taken back */
        uint64_t blocks; /* cached */
};

/* Adds those of all bins and fastbins. No lock from GR_RANK_ARENA up is held. */
void gr_arenas_count(struct gr_context *context, struct gr_cache_counts *counts);

/* Called when bytes of the context's cache have gone to the driver: takes them off the count of preallocated bytes. */
void gr_arenas_returned(struct gr_context *context, uint64_t bytes);

/* The context is gone: uncharges and frees the blocks in the bins, whose memory went with it. Arenas quiesced. */
void gr_arenas_context_gone(struct gr_context *context);

#endif
