/*
 * Memory that the pool does not serve, but that counts: charged before the driver is asked, refused at the limit after
 * the ladder ran, and remembered by the handle or address that its free will name.
 *
 * Bytes are what the driver takes, as far as the caller can tell. Functions return 0 or -errno; the driver's own errors
 * travel through. Any thread may call them, holding no lock of core/.
 */
#ifndef GR_ACCOUNTED_H
#define GR_ACCOUNTED_H

#include <stdint.h>

#include "account/memory_kind.h"
#include "base/hash.h"
#include "base/lock.h"

struct gr_context;
struct gr_core;
struct gr_device;

/* One allocation. Constant while it is in the ledger; outside it belongs to whoever took it. */
struct gr_accounted {
        UT_hash_handle hh; /* guarded by the ledger's lock */
        struct {
                uint64_t handle; /* or address */
                uint64_t kind;
        } key;
        struct gr_device *device;
        void *owner; /* handle of the context with which the driver frees it; NULL: none */
        uint64_t bytes;
};

struct gr_accounted_ledger {
        struct gr_lock lock; /* guards what follows */
        struct gr_accounted *entries;
};

void gr_accounted_init(struct gr_accounted_ledger *ledger);

/* Frees the entries. No other thread may use it. */
void gr_accounted_destroy(struct gr_accounted_ledger *ledger);

void gr_accounted_uncharge(struct gr_device *device, enum gr_memory_kind kind, uint64_t bytes);

/*
 * Remembers what gr_accounted_charge charged. Without memory for the entry the charge stays for good: too much is
 * counted, never too little. An entry already there is stale, and uncharged.
 */
void gr_accounted_add(struct gr_core *core, struct gr_device *device, enum gr_memory_kind kind, uint64_t handle,
                      void *owner, uint64_t bytes);

/* Before the driver frees it: takes the entry out, still charged. NULL: not known. */
struct gr_accounted *gr_accounted_take(struct gr_core *core, enum gr_memory_kind kind, uint64_t handle);

/* Afterwards: freed, or, where the driver refused, back in the ledger. entry may be NULL. */
void gr_accounted_settle(struct gr_core *core, struct gr_accounted *entry, int freed);

/* The driver has destroyed this context and all that it owned. */
void gr_accounted_drop_owner(struct gr_core *core, void *owner);

#endif
