/* Requests for pinned memory: from the cache (pinned.h), or from the driver within the limits. */
#ifndef GR_PINNED_ALLOC_H
#define GR_PINNED_ALLOC_H

#include <stddef.h>
#include <stdint.h>

struct gr_context;

/*
 * Asks the driver for bytes, in the current context: 0 with *ret_ptr, -ENOMEM, or its error. May be called repeatedly.
 */
typedef int gr_pinned_allocate(void *arg, size_t bytes, uint64_t *ret_ptr);

/*
 * Allocates bytes > 0 of pinned memory for the program, from the cache or by allocate. A block serves requests of one
 * kind only. -ENOMEM; -EDQUOT: the host limit; -E2BIG: above GR_BLOCK_MAX_BYTES, ask the driver itself; or the driver's
 * error. *ret_ptr is set on success only.
 */
int gr_pinned_alloc(struct gr_context *context, size_t bytes, unsigned kind, gr_pinned_allocate *allocate, void *arg,
                    uint64_t *ret_ptr);

#endif
