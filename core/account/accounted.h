/*
 * Memory that the pool does not serve, but that counts against the limit. It is charged before the driver is asked,
 * refused at the limit if the ladder does not help, and kept in a ledger under the handle or address by which it is
 * freed.
 *
 * Bytes are what the driver takes, as far as the caller can tell. Functions return 0 or -errno, or the driver's error
 * unchanged. Any thread may call them, holding no lock of core/.
 */
#ifndef GR_ACCOUNTED_H
#define GR_ACCOUNTED_H

#include <stdint.h>

#include "account/memory_kind.h"
#include "base/lock.h"

struct gr_device;

struct gr_accounted; /* an entry: belongs to the ledger, and once taken to the caller that took it */

struct gr_accounted_ledger {
        struct gr_lock lock; /* guards what follows */
        struct gr_accounted *entries;
};

/* Makes ledger an empty one. */
void gr_accounted_init(struct gr_accounted_ledger *ledger);

/* Frees the entries. No other thread may use it. */
void gr_accounted_destroy(struct gr_accounted_ledger *ledger);

/*
 * Adds what gr_charge_accounted charged to the ledger. An entry that is already there is stale: it is uncharged and
 * replaced. -ENOMEM: no host memory for the entry. It is uncharged then, as no free could find it; the caller gives the
 * memory back and reports that it is out of memory.
 */
int gr_accounted_add(struct gr_accounted_ledger *ledger, struct gr_device *device, enum gr_memory_kind kind,
                     uint64_t handle, void *owner, uint64_t bytes);

/*
 * Takes an entry before the driver's free; it stays charged until gr_accounted_free_end. NULL: not in the ledger, or
 * another thread has taken it.
 */
struct gr_accounted *gr_accounted_free_begin(struct gr_accounted_ledger *ledger, enum gr_memory_kind kind,
                                             uint64_t handle);

/*
 * After the driver's free: uncharges entry if freed, else puts it back, as the driver refused. One that became stale or
 * lost its owner meanwhile is uncharged. entry may be NULL. Needs no memory.
 */
void gr_accounted_free_end(struct gr_accounted_ledger *ledger, struct gr_accounted *entry, int freed);

/* The driver has destroyed this context: removes and uncharges all that it owned. */
void gr_accounted_owner_gone(struct gr_accounted_ledger *ledger, void *owner);

#endif
