#include "reclaim/reclaimable.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/driver.h"
#include "base/lock.h"
#include "base/log.h"
#include "context/context.h"

#define PAUSE_FIRST_NS UINT64_C(20000)
#define PAUSE_MOST_NS  UINT64_C(1000000)

static _Thread_local __attribute__((tls_model("initial-exec"))) bool inside;

bool gr_reclaimable_inside(void)
{
        return inside;
}

void gr_reclaimables_init(struct gr_registry *registry)
{
        memset(registry, 0, sizeof(*registry));
        gr_lock_init(&registry->lock, GR_RANK_RECLAIMABLES);
}

void gr_reclaimables_destroy(struct gr_registry *registry)
{
        gr_lock_destroy(&registry->lock);
}

int gr_reclaimable_register(struct gr_core *core, struct gr_reclaimable *reclaimable)
{
        struct gr_registry *registry = core->registry;
        struct gr_reclaimable_slot *room = NULL;
        int rc = -ENOSPC;

        gr_lock(&registry->lock);
        for (int i = 0; i < GR_RECLAIMABLES_MAX; i++) {
                struct gr_reclaimable_slot *slot = &registry->slots[i];

                if (slot->entry == reclaimable) {
                        rc = -EEXIST;
                        goto out;
                }
                if (!slot->entry && !slot->running && !room)
                        room = slot;
        }
        if (room) {
                room->core = core;
                room->entry = reclaimable;
                snprintf(room->name, sizeof(room->name), "%s", reclaimable->name ? reclaimable->name : "unnamed");
                room->failures = 0;
                room->left_out_until_ns = 0;
                rc = 0;
        }
out:
        gr_unlock(&registry->lock);
        return rc;
}

/*
 * Waits until run number `run` of the slot has ended. False: deadline_ns came first. Registry lock held, but released
 * meanwhile.
 */
GR_NOT_CHECKED static bool wait_for_run(struct gr_core *core, struct gr_reclaimable_slot *slot, uint64_t run,
                                        uint64_t deadline_ns)
{
        const struct gr_driver *driver = core->driver;
        uint64_t pause_ns = PAUSE_FIRST_NS;

        gr_assert_locked(&core->registry->lock);
        assert(slot->runs >= run);
        while (slot->running && slot->runs == run) {
                if (driver->now_ns() >= deadline_ns)
                        return false;
                gr_unlock(&core->registry->lock);
                driver->sleep_ns(pause_ns);
                if (pause_ns < PAUSE_MOST_NS)
                        pause_ns *= 2;
                gr_lock(&core->registry->lock);
        }
        return true;
}

int gr_reclaimable_unregister(struct gr_core *core, struct gr_reclaimable *reclaimable)
{
        struct gr_registry *registry = core->registry;
        int rc = -ENOENT;

        gr_lock(&registry->lock);
        for (int i = 0; i < GR_RECLAIMABLES_MAX; i++) {
                struct gr_reclaimable_slot *slot = &registry->slots[i];

                if (slot->entry != reclaimable)
                        continue;
                slot->entry = NULL; /* not called again from here on */
                rc = 0;
                if (slot->running && !(slot->started && pthread_equal(slot->runner, pthread_self())) &&
                    !wait_for_run(core, slot, slot->runs, core->driver->now_ns() + GR_RECLAIMABLE_LEAVE_NS))
                        rc = -EBUSY;
                break;
        }
        gr_unlock(&registry->lock);
        return rc;
}

/* Counts and logs the end of a run, a failure where rc is not 0. Registry lock held; the slot has an entry. */
static void note_run(struct gr_core *core, struct gr_reclaimable_slot *slot, int rc)
{
        enum gr_log_level level = rc == -ETIMEDOUT && slot->entry->needs_lock ? GR_LOG_DEBUG : GR_LOG_WARN;

        gr_assert_locked(&core->registry->lock);
        assert(slot->failures < GR_RECLAIMABLE_PATIENCE); /* with so many it is left out, and the count begins at 0 */
        if (!rc) {
                slot->failures = 0;
                return;
        }
        gr_log(level, "reclaimable %s: %s %s%s", slot->name, slot->is_drop ? "drop" : "purge",
               rc == -ETIMEDOUT ? "did not return in time" : "failed: ", rc == -ETIMEDOUT ? "" : strerror(-rc));
        if (++slot->failures < GR_RECLAIMABLE_PATIENCE)
                return;
        slot->failures = 0;
        slot->left_out_until_ns = core->driver->now_ns() + GR_RECLAIMABLE_LEFT_OUT_NS;
        gr_log(level, "reclaimable %s: left out for a minute", slot->name);
}

/* One run, on the caller's thread or a worker. The slot belongs to this run until running is false again. */
static void run_slot(void *arg)
{
        struct gr_reclaimable_slot *slot = arg;
        struct gr_registry *registry = slot->core->registry;
        bool wanted;
        int rc = 0;

        gr_lock(&registry->lock);
        assert(slot->running && !slot->started); /* one run at a time */
        slot->runner = pthread_self();
        slot->started = true;
        wanted = slot->entry != NULL; /* NULL: it was unregistered before this run began */
        gr_unlock(&registry->lock);
        if (wanted) {
                inside = true;
                rc = slot->function(slot->arg, slot->device, slot->want_bytes);
                inside = false;
        }
        gr_lock(&registry->lock);
        assert(slot->running && pthread_equal(slot->runner, pthread_self()));
        slot->rc = rc;
        if (slot->late && slot->entry)
                gr_log(GR_LOG_INFO, "reclaimable %s: returned too late", slot->name);
        else if (slot->entry)
                note_run(slot->core, slot, rc);
        slot->runs++;
        slot->running = false;
        gr_unlock(&registry->lock);
}

/* Runs the slot's reclaimable, or waits for its run. Registry lock held, but released meanwhile. */
GR_NOT_CHECKED static void call_slot(struct gr_core *core, struct gr_reclaimable_slot *slot, bool drop, int device,
                                     uint64_t want_bytes, uint64_t patience_ns)
{
        struct gr_registry *registry = core->registry;
        struct gr_reclaimable *entry = slot->entry;
        uint64_t limit_ns = entry->limit_ns ? entry->limit_ns : GR_RECLAIMABLE_LIMIT_NS;
        uint64_t run = slot->runs, now_ns = core->driver->now_ns();
        bool on_worker = entry->on_worker && registry->call_worker, posted = true;

        gr_assert_locked(&core->registry->lock);
        assert(entry && (drop ? entry->drop : entry->purge));
        if (entry->needs_lock && slot->failures > 0)
                limit_ns /= GR_RECLAIMABLE_LATE_SHARE;
        if (patience_ns && patience_ns < limit_ns)
                limit_ns = patience_ns;
        if (slot->running) {
                /*
                 * What the other thread's run frees serves this request, too. A run that is late already is not waited
                 * for.
                 */
                if (!slot->late)
                        wait_for_run(core, slot, run, now_ns + limit_ns);
                return;
        }
        slot->running = true;
        slot->started = slot->late = false;
        slot->is_drop = drop;
        slot->function = drop ? entry->drop : entry->purge;
        slot->arg = entry->arg;
        slot->device = device;
        slot->want_bytes = want_bytes;
        gr_unlock(&registry->lock);
        if (on_worker)
                posted = registry->call_worker(run_slot, slot);
        else
                run_slot(slot);
        gr_lock(&registry->lock);
        if (!on_worker)
                return;
        if (!posted) { /* no worker: it does not run this time */
                assert(slot->running && !slot->started);
                slot->runs++;
                slot->running = false;
        } else if (!wait_for_run(core, slot, run, now_ns + limit_ns) && !patience_ns) {
                slot->late = true;
                if (slot->entry)
                        note_run(core, slot, -ETIMEDOUT);
        }
}

void gr_reclaimables_run(struct gr_core *core, enum gr_rung rung, int device, uint64_t want_bytes, uint64_t patience_ns)
{
        bool drop = rung == GR_RUNG_DROP;
        struct gr_registry *registry = core->registry;

        assert(drop || rung == GR_RUNG_PURGE);
        if (inside)
                return;
        gr_lock(&registry->lock);
        for (int i = 0; i < GR_RECLAIMABLES_MAX; i++) {
                struct gr_reclaimable_slot *slot = &registry->slots[i];

                if (!slot->entry || !(drop ? slot->entry->drop : slot->entry->purge) ||
                    slot->left_out_until_ns > core->driver->now_ns())
                        continue;
                call_slot(core, slot, drop, device, want_bytes, patience_ns);
        }
        gr_unlock(&registry->lock);
}
