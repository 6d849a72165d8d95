#include "account/accounted.h"

#include <errno.h>
#include <stdlib.h>

#include "core.h"

/* What one try of an allocation needs. */
struct request {
        struct gr_core *core;
        struct gr_device *device;
        enum gr_memory_kind kind;
        uint64_t bytes;
        gr_accounted_allocate *allocate;
        void *arg;
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

static int attempt(void *arg)
{
        struct request *request = arg;
        int rc;

        gr_budget_ask(request->device, request->bytes);
        rc = gr_budget_charge(request->device, request->kind, request->bytes);
        if (!rc) {
                rc = request->allocate(request->arg);
                if (rc)
                        gr_budget_uncharge(request->device, request->kind, request->bytes);
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

int gr_accounted_charge(struct gr_core *core, struct gr_device *device, struct gr_context *context,
                        enum gr_memory_kind kind, uint64_t bytes, gr_accounted_allocate *allocate, void *arg)
{
        struct request request = {core, device, kind, bytes, allocate, arg};
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
                gr_budget_update_peak(device);
        return rc;
}

void gr_accounted_uncharge(struct gr_device *device, enum gr_memory_kind kind, uint64_t bytes)
{
        gr_budget_uncharge(device, kind, bytes);
}

static struct gr_accounted *take_locked(struct gr_accounted_ledger *ledger, enum gr_memory_kind kind, uint64_t handle)
{
        struct gr_accounted wanted = {.key = {handle, kind}}, *entry;

        HASH_FIND(hh, ledger->entries, &wanted.key, sizeof(wanted.key), entry);
        if (entry)
                HASH_DELETE(hh, ledger->entries, entry);
        return entry;
}

/* Where memory has run out nobody would find the entry: it is counted no more. */
static void put(struct gr_accounted_ledger *ledger, struct gr_accounted *entry)
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

void gr_accounted_add(struct gr_core *core, struct gr_device *device, enum gr_memory_kind kind, uint64_t handle,
                      void *owner, uint64_t bytes)
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
        put(&core->accounted, entry);
}

struct gr_accounted *gr_accounted_take(struct gr_core *core, enum gr_memory_kind kind, uint64_t handle)
{
        struct gr_accounted *entry;

        gr_lock(&core->accounted.lock);
        entry = take_locked(&core->accounted, kind, handle);
        gr_unlock(&core->accounted.lock);
        return entry;
}

void gr_accounted_settle(struct gr_core *core, struct gr_accounted *entry, int freed)
{
        int saved_errno = errno; /* the table may take memory */

        if (!entry)
                return;
        if (freed) {
                gr_budget_uncharge(entry->device, (enum gr_memory_kind)entry->key.kind, entry->bytes);
                free(entry);
        } else {
                put(&core->accounted, entry);
        }
        errno = saved_errno;
}

void gr_accounted_drop_owner(struct gr_core *core, void *owner)
{
        struct gr_accounted *entry, *tmp;

        gr_lock(&core->accounted.lock);
        HASH_ITER (hh, core->accounted.entries, entry, tmp) {
                if (!owner || entry->owner != owner)
                        continue;
                HASH_DELETE(hh, core->accounted.entries, entry);
                gr_budget_uncharge(entry->device, (enum gr_memory_kind)entry->key.kind, entry->bytes);
                free(entry);
        }
        gr_unlock(&core->accounted.lock);
}
