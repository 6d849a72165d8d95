#include "account/accounted.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "account/budget.h"
#include "account/memory_kind.h"
#include "base/hash.h"
#include "base/keep_errno.h"
#include "base/lock.h"

struct gr_accounted {
        UT_hash_handle hh;
        /* A free of it has begun. It stays in the table meanwhile, because putting it back could need memory. */
        bool taken;
        bool removed; /* out of the table, while it was taken */
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

static void uncharge_and_free(struct gr_accounted *entry)
{
        gr_budget_uncharge(entry->device, (enum gr_memory_kind)entry->key.kind, entry->bytes);
        free(entry);
}

/* Lock held. An entry that is taken is freed by its taker, in gr_accounted_free_end. */
static void remove_locked(struct gr_accounted_ledger *ledger, struct gr_accounted *entry)
{
        gr_assert_locked(&ledger->lock);
        assert(!entry->removed);
        HASH_DELETE(hh, ledger->entries, entry);
        if (entry->taken)
                entry->removed = true;
        else
                uncharge_and_free(entry);
}

static struct gr_accounted *find_entry(struct gr_accounted_ledger *ledger, enum gr_memory_kind kind, uint64_t handle)
{
        struct gr_accounted wanted = {.key = {handle, kind}}, *entry;

        gr_assert_locked(&ledger->lock);
        assert(kind < GR_MEMORY_KIND_COUNT);
        HASH_FIND(hh, ledger->entries, &wanted.key, sizeof(wanted.key), entry);
        return entry;
}

int gr_accounted_add(struct gr_accounted_ledger *ledger, struct gr_device *device, enum gr_memory_kind kind,
                     uint64_t handle, void *owner, uint64_t bytes)
{
        struct gr_accounted *entry = calloc(1, sizeof(*entry)), *stale;
        bool added = false;

        if (entry)
                *entry = (struct gr_accounted){.key = {handle, kind}, .device = device, .owner = owner, .bytes = bytes};
        gr_lock(&ledger->lock);
        stale = find_entry(ledger, kind, handle);
        if (stale)
                remove_locked(ledger, stale);
        if (entry) {
                HASH_ADD(hh, ledger->entries, key, sizeof(entry->key), entry);
                added = entry->hh.tbl != NULL;
        }
        gr_unlock(&ledger->lock);
        if (added)
                return 0;
        gr_budget_uncharge(device, kind, bytes);
        free(entry);
        return -ENOMEM;
}

struct gr_accounted *gr_accounted_free_begin(struct gr_accounted_ledger *ledger, enum gr_memory_kind kind,
                                             uint64_t handle)
{
        struct gr_accounted *entry;

        gr_lock(&ledger->lock);
        entry = find_entry(ledger, kind, handle);
        if (entry && entry->taken)
                entry = NULL;
        if (entry)
                entry->taken = true;
        gr_unlock(&ledger->lock);
        return entry;
}

void gr_accounted_free_end(struct gr_accounted_ledger *ledger, struct gr_accounted *entry, int freed)
{
        GR_KEEP_ERRNO;

        if (!entry)
                return;
        gr_lock(&ledger->lock);
        assert(entry->taken); /* by gr_accounted_free_begin, so that no other thread has freed it */
        entry->taken = false;
        if (entry->removed)
                uncharge_and_free(entry);
        else if (freed)
                remove_locked(ledger, entry);
        gr_unlock(&ledger->lock);
}

void gr_accounted_owner_gone(struct gr_accounted_ledger *ledger, void *owner)
{
        struct gr_accounted *entry, *tmp;

        gr_lock(&ledger->lock);
        HASH_ITER (hh, ledger->entries, entry, tmp)
                if (owner && entry->owner == owner)
                        remove_locked(ledger, entry);
        gr_unlock(&ledger->lock);
}
