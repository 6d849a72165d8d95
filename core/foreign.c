#include "foreign.h"

#include <errno.h>
#include <stdlib.h>

#include "core.h"

/* What one try of an allocation needs. */
struct request {
        struct gr_core *core;
        struct gr_device *device;
        enum gr_family family;
        uint64_t bytes;
        gr_foreign_allocate *allocate;
        void *arg;
};

void gr_foreign_init(struct gr_foreign_ledger *ledger)
{
        gr_lock_init(&ledger->lock, GR_RANK_FOREIGN);
        ledger->entries = NULL;
}

void gr_foreign_destroy(struct gr_foreign_ledger *ledger)
{
        struct gr_foreign *entry, *tmp;

        HASH_ITER (hh, ledger->entries, entry, tmp) {
                HASH_DELETE(hh, ledger->entries, entry);
                free(entry);
        }
        gr_lock_destroy(&ledger->lock);
}

static int attempt(void *arg)
{
        struct request *request = arg;
        int rc;

        gr_budget_ask(request->device, request->bytes);
        rc = gr_budget_charge(request->device, request->family, request->bytes);
        if (!rc) {
                rc = request->allocate(request->arg);
                if (rc)
                        gr_budget_uncharge(request->device, request->family, request->bytes);
        }
        gr_budget_answered(request->device, request->bytes);
        return rc;
}

static bool found_one(struct gr_context *context, void *arg)
{
        *(struct gr_context **)arg = context;
        return false;
}

struct gr_context *gr_climber(struct gr_core *core, struct gr_device *device, struct gr_context *wanted)
{
        if (wanted && wanted->device == device)
                return wanted;
        wanted = NULL;
        if (device->ordinal >= 0)
                gr_core_each_context(core, device->ordinal, found_one, &wanted);
        return wanted;
}

int gr_foreign_charge(struct gr_core *core, struct gr_device *device, struct gr_context *context, enum gr_family family,
                      uint64_t bytes, gr_foreign_allocate *allocate, void *arg)
{
        struct request request = {core, device, family, bytes, allocate, arg};
        int rc = attempt(&request);

        if (rc == -ENOMEM || rc == -EDQUOT) {
                context = device == &core->host ? NULL : gr_climber(core, device, context);
                if (rc == -EDQUOT && !context)
                        gr_count(core, GR_STAT_limit_hits, 1);
                if (device == &core->host)
                        return gr_pinned_retry(core, bytes, attempt, &request, rc);
                if (context)
                        rc = gr_ladder_climb_for(context, bytes, attempt, &request, rc);
        }
        if (!rc)
                gr_budget_note_live(device);
        return rc;
}

void gr_foreign_uncharge(struct gr_device *device, enum gr_family family, uint64_t bytes)
{
        gr_budget_uncharge(device, family, bytes);
}

static struct gr_foreign *take_locked(struct gr_foreign_ledger *ledger, enum gr_family family, uint64_t handle)
{
        struct gr_foreign wanted = {.key = {handle, family}}, *entry;

        HASH_FIND(hh, ledger->entries, &wanted.key, sizeof(wanted.key), entry);
        if (entry)
                HASH_DELETE(hh, ledger->entries, entry);
        return entry;
}

/* Where memory has run out nobody would find the entry: it is counted no more. */
static void put(struct gr_foreign_ledger *ledger, struct gr_foreign *entry)
{
        struct gr_foreign *stale;
        bool added;

        gr_lock(&ledger->lock);
        stale = take_locked(ledger, (enum gr_family)entry->key.family, entry->key.handle);
        HASH_ADD(hh, ledger->entries, key, sizeof(entry->key), entry);
        added = entry->hh.tbl != NULL;
        gr_unlock(&ledger->lock);
        if (stale) {
                gr_budget_uncharge(stale->device, (enum gr_family)stale->key.family, stale->bytes);
                free(stale);
        }
        if (!added) {
                gr_budget_uncharge(entry->device, (enum gr_family)entry->key.family, entry->bytes);
                free(entry);
        }
}

void gr_foreign_add(struct gr_core *core, struct gr_device *device, enum gr_family family, uint64_t handle, void *owner,
                    uint64_t bytes)
{
        struct gr_foreign *entry = calloc(1, sizeof(*entry));

        if (!entry) {
                gr_budget_uncharge(device, family, bytes);
                return;
        }
        entry->key.handle = handle;
        entry->key.family = family;
        entry->device = device;
        entry->owner = owner;
        entry->bytes = bytes;
        put(&core->foreign, entry);
}

struct gr_foreign *gr_foreign_take(struct gr_core *core, enum gr_family family, uint64_t handle)
{
        struct gr_foreign *entry;

        gr_lock(&core->foreign.lock);
        entry = take_locked(&core->foreign, family, handle);
        gr_unlock(&core->foreign.lock);
        return entry;
}

void gr_foreign_settle(struct gr_core *core, struct gr_foreign *entry, int freed)
{
        int saved_errno = errno; /* the table may take memory */

        if (!entry)
                return;
        if (freed) {
                gr_budget_uncharge(entry->device, (enum gr_family)entry->key.family, entry->bytes);
                free(entry);
        } else {
                put(&core->foreign, entry);
        }
        errno = saved_errno;
}

void gr_foreign_drop_owner(struct gr_core *core, void *owner)
{
        struct gr_foreign *entry, *tmp;

        gr_lock(&core->foreign.lock);
        HASH_ITER (hh, core->foreign.entries, entry, tmp) {
                if (!owner || entry->owner != owner)
                        continue;
                HASH_DELETE(hh, core->foreign.entries, entry);
                gr_budget_uncharge(entry->device, (enum gr_family)entry->key.family, entry->bytes);
                free(entry);
        }
        gr_unlock(&core->foreign.lock);
}
