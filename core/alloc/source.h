/*
 * Where the pool's blocks come from: the cache, or the driver. After each rung the ladder tries a request again with
 * these functions.
 *
 * Functions return 0 or -errno, and leave ret_ outputs untouched on failure; errors of the driver (gr_driver_error) are
 * returned as they are. Any thread may call them, without a lock of core/.
 */
#ifndef GR_SOURCE_H
#define GR_SOURCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gr_arena;
struct gr_block;
struct gr_context;

/* Takes fresh memory by a call of the driver that also chooses the size (pitched memory). */
typedef int gr_source_allocate(void *arg, uint64_t *ret_ptr, size_t *ret_bytes);

/* A request for a block, and what is decided or found out only once for it, however often it is tried. */
struct gr_source_request {
        struct gr_context *context;
        size_t bytes;
        gr_source_allocate *allocate; /* makes fresh memory, and then no cached block serves; NULL: none */
        void *arg;
        struct gr_arena *arena; /* the calling thread's own */
        unsigned class;         /* of bytes */
        bool by_segments;       /* segments serve it; else the bins, or allocate */
        bool exact;             /* the driver is asked for bytes, not for all of its class */
        bool optional;          /* less would do: the ladder ends early, and reports nothing */
        bool class_waits;       /* bins have blocks of its class; set by gr_source_take where it finds none usable */
};

/* 0 < bytes <= GR_BLOCK_MAX_BYTES. */
struct gr_source_request gr_source_request(struct gr_context *context, size_t bytes, gr_source_allocate *allocate,
                                           void *arg);

/*
 * Takes the usable cached block that serves a request best; the caller owns it. NULL: there is none.
 * gr_source_take_larger looks at larger classes, too.
 */
struct gr_block *gr_source_take(struct gr_source_request *request);
struct gr_block *gr_source_take_larger(struct gr_source_request *request);

/*
 * Takes fresh memory for a block, charges it and adds it to the ledger; the caller owns the CACHED block. -EDQUOT,
 * -ENOMEM, or the driver's error.
 */
int gr_source_fresh(const struct gr_source_request *request, struct gr_block **ret_block);

/* As gr_source_fresh, but never from segments: by request->allocate, or by the driver's plain allocation. */
int gr_source_fresh_plain(const struct gr_source_request *request, struct gr_block **ret_block);

#endif
