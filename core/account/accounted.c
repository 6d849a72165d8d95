#include "account/accounted.h"

#include <errno.h>
#include <stdlib.h>

#include "account/budget.h"
#include "account/memory_kind.h"
#include "base/hash.h"
#include "base/lock.h"

/* Constant while it is in the ledger. */
struct gr_accounted {
        UT_hash_handle hh; /* guarded by the ledger's lock */
        struct {
                uint64_t handle; /* or address */
                uint64_t kind;
        } key;
        struct gr_device *device;
        void *owner; /* handle of the context whose end frees it; NULL: none */
        uint64_t bytes;
};

void gr_accounted_init(struct gr_accounted_ledger *ledger)
{
        gr_lock_init(&ledger->lock, GR_RANK_ACCOUNTED);
        ledger->entries = NULL;
}

void gr_accounted_destroy(struct gr_accounted_ledger *ledger)
{
        struct gr_accounted *entry, *tmp;

        HASH_ITER (hh, ledger->entries, entry, tmp) {
                HASH_DELETE(hh, ledger->entries, entry);
                free(entry);
        }
        gr_lock_destroy(&ledger->lock);
}

static struct gr_accounted *take_locked(struct gr_accounted_ledger *ledger, enum gr_memory_kind kind, uint64_t handle)
{
        struct gr_accounted wanted = {.key = {handle, kind}}, *entry;

        HASH_FIND(hh, ledger->entries, &wanted.key, sizeof(wanted.key), entry);
        if (entry)
                HASH_DELETE(hh, ledger->entries, entry);
        return entry;
}

/* An entry that cannot be added for lack of memory is uncharged, as no free would find it. */
static void enter(struct gr_accounted_ledger *ledger, struct gr_accounted *entry)
{
        struct gr_accounted *stale;
        bool added;

        gr_lock(&ledger->lock);
        stale = take_locked(ledger, (enum gr_memory_kind)entry->key.kind, entry->key.handle);
        HASH_ADD(hh, ledger->entries, key, sizeof(entry->key), entry);
        added = entry->hh.tbl != NULL;
        gr_unlock(&ledger->lock);
        if (stale) {
                gr_budget_uncharge(stale->device, (enum gr_memory_kind)stale->key.kind, stale->bytes);
                free(stale);
        }
        if (!added) {
                gr_budget_uncharge(entry->device, (enum gr_memory_kind)entry->key.kind, entry->bytes);
                free(entry);
        }
}

void gr_accounted_add(struct gr_accounted_ledger *ledger, struct gr_device *device, enum gr_memory_kind kind,
                      uint64_t handle, void *owner, uint64_t bytes)
{
        struct gr_accounted *entry = calloc(1, sizeof(*entry));

        if (!entry) {
                gr_budget_uncharge(device, kind, bytes);
                return;
        }
        entry->key.handle = handle;
        entry->key.kind = kind;
        entry->device = device;
        entry->owner = owner;
        entry->bytes = bytes;
        enter(ledger, entry);
}

struct gr_accounted *gr_accounted_take(struct gr_accounted_ledger *ledger, enum gr_memory_kind kind, uint64_t handle)
{
        struct gr_accounted *entry;

        gr_lock(&ledger->lock);
        entry = take_locked(ledger, kind, handle);
        gr_unlock(&ledger->lock);
        return entry;
}

void gr_accounted_settle(struct gr_accounted_ledger *ledger, struct gr_accounted *entry, int freed)
{
        int saved_errno = errno; /* the table may take memory */

        if (!entry)
                return;
        if (freed) {
                gr_budget_uncharge(entry->device, (enum gr_memory_kind)entry->key.kind, entry->bytes);
                free(entry);
        } else {
                enter(ledger, entry);
        }
        errno = saved_errno;
}

void gr_accounted_drop_owner(struct gr_accounted_ledger *ledger, void *owner)
{
        struct gr_accounted *entry, *tmp;

        gr_lock(&ledger->lock);
        HASH_ITER (hh, ledger->entries, entry, tmp) {
                if (!owner || entry->owner != owner)
                        continue;
                HASH_DELETE(hh, ledger->entries, entry);
                gr_budget_uncharge(entry->device, (enum gr_memory_kind)entry->key.kind, entry->bytes);
                free(entry);
        }
        gr_unlock(&ledger->lock);
}
