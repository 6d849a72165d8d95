/*
 * The functions of gpureclaim.h. A program may register reclaimables before the driver is loaded: they are kept here
 * until the core is set up.
 */

#include "process/api.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "account/figures.h"
#include "device/device.h"
#include "device/overhead.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "gpureclaim.h"
#include "system/workers.h"

/* NVML's figure is reused up to this age, because programs may ask often and NVML is slow. */
#define STATUS_AGE_NS UINT64_C(1000000000)

#define LEAVING UINT64_MAX /* id of a slot that is being unregistered: neither free nor found by a program's id */

struct registered {
        uint64_t id; /* 0: free slot */
        char name[GR_RECLAIMABLE_NAME];
        struct gpureclaim_reclaimable hooks;
        struct gr_reclaimable entry;
};

static struct gr_lock lock = GR_LOCK_INIT(GR_RANK_API);
static struct registered table[GR_RECLAIMABLES_MAX] GR_GUARDED_BY(lock);
static uint64_t last_id GR_GUARDED_BY(lock);
static bool core_ready GR_GUARDED_BY(lock);
static _Atomic bool forgotten; /* no hook is called any more */

/* Turns the result of a purge or drop of the program, which may be errno or -errno, into 0 or -errno. */
static int negative_errno(int rc)
{
        return rc > 0 ? -rc : rc;
}

static int call_purge(void *arg, int device, uint64_t want_bytes)
{
        const struct gpureclaim_reclaimable *hooks = arg;

        return negative_errno(hooks->purge(hooks->arg, device, want_bytes));
}

static int call_drop(void *arg, int device, uint64_t want_bytes)
{
        const struct gpureclaim_reclaimable *hooks = arg;

        return negative_errno(hooks->drop(hooks->arg, device, want_bytes));
}

static void prepare_thread(void)
{
        if (gr_shim_ready())
                gr_operations_relax_captures();
}

void gr_api_init(void)
{
        gr_worker_init(prepare_thread);
        gr_core.registry->call_worker = gr_worker_call;
        gr_lock(&lock);
        assert(!core_ready);
        core_ready = true;
        for (int i = 0; i < GR_RECLAIMABLES_MAX; i++)
                if (table[i].id)
                        gr_reclaimable_register(&gr_core, &table[i].entry);
        gr_unlock(&lock);
}

void gr_api_forget(void)
{
        atomic_store(&forgotten, true);
}

/*
 * Lock held. id 0 finds a free slot. A hook that has unregistered itself from that slot may still run; the registry
 * keeps its own slot for that hook until it returns.
 */
GR_HELD(lock) static struct registered *find_registered(uint64_t id)
{
        gr_assert_locked(&lock);
        for (int i = 0; i < GR_RECLAIMABLES_MAX; i++)
                if (table[i].id == id)
                        return &table[i];
        return NULL;
}

GR_EXPORT int gpureclaim_register(const struct gpureclaim_reclaimable *reclaimable, uint64_t *ret_id)
{
        struct registered *slot;
        GR_KEEP_ERRNO;
        int rc = 0;

        if (!reclaimable || !ret_id || reclaimable->struct_bytes < sizeof(*reclaimable) ||
            (!reclaimable->purge && !reclaimable->drop))
                return -EINVAL;
        gr_shim_ready();
        gr_lock(&lock);
        slot = find_registered(0);
        if (!slot) {
                rc = -ENOSPC;
        } else {
                slot->hooks = *reclaimable;
                snprintf(slot->name, sizeof(slot->name), "%s", reclaimable->name ? reclaimable->name : "unnamed");
                slot->entry = (struct gr_reclaimable){
                        .name = slot->name,
                        .purge = reclaimable->purge ? call_purge : NULL,
                        .drop = reclaimable->drop ? call_drop : NULL,
                        .arg = &slot->hooks,
                        .limit_ns = (uint64_t)reclaimable->limit_ms * 1000000,
                        .on_worker = true,
                        .needs_lock = reclaimable->needs_lock,
                };
                if (core_ready)
                        rc = gr_reclaimable_register(&gr_core, &slot->entry);
                if (!rc)
                        *ret_id = slot->id = ++last_id;
        }
        gr_unlock(&lock);
        return rc;
}

GR_EXPORT int gpureclaim_unregister(uint64_t id)
{
        struct registered *slot;
        GR_KEEP_ERRNO;
        int rc = 0;
        bool ready;

        if (atomic_load(&forgotten))
                return 0;
        gr_lock(&lock);
        slot = id && id != LEAVING ? find_registered(id) : NULL;
        if (slot)
                slot->id = LEAVING;
        ready = core_ready;
        gr_unlock(&lock);
        if (!slot)
                return -ENOENT;
        if (ready)
                rc = gr_reclaimable_unregister(&gr_core, &slot->entry);
        gr_lock(&lock);
        assert(slot->id == LEAVING); /* no other thread has taken the slot meanwhile */
        /* Where a hook still runs, the slot is never used again. */
        if (rc != -EBUSY)
                slot->id = 0;
        gr_unlock(&lock);
        return rc;
}

static bool first_one(struct gr_context *context, void *arg)
{
        *(struct gr_context **)arg = context;
        return false;
}

/*
 * Some known context on device, or NULL. It may end at any time, so only a visitor (gr_context_each) may ask the
 * driver about it.
 */
static struct gr_context *context_on(int device)
{
        struct gr_context *context = NULL;

        if (gr_shim_ready() && device >= 0 && device < GR_DEVICES_MAX)
                gr_context_each(&gr_core, device, first_one, &context);
        return context;
}

GR_EXPORT int64_t gpureclaim_reclaim(int device, const char *rung, uint64_t want_bytes)
{
        enum gr_rung last = GR_RUNG_PURGE;
        struct gr_context *context;
        uint64_t back = 0;
        GR_KEEP_ERRNO;
        GR_OWN_CALLS;

        while (rung && last <= GR_RUNG_DROP && strcmp(gr_rung_words[last], rung) != 0)
                last++;
        if (!rung || last > GR_RUNG_DROP)
                return -EINVAL;
        context = context_on(device);
        if (!context)
                return -ENODEV;
        if (!gr_own_calls) /* a deep sleep: nothing is left to give */
                return 0;
        if (!want_bytes)
                want_bytes = UINT64_MAX;
        for (enum gr_rung each = GR_RUNG_PURGE; each <= last && back < want_bytes; each++) {
                /*
                 * Reclaimables run outside of a visit: they do not ask the driver, and may wait for a thread that ends
                 * the context, which would wait for the visitor. What they free goes into the cache, and is counted by
                 * the next rung, which returns it.
                 */
                if (each == GR_RUNG_PURGE || each == GR_RUNG_DROP)
                        gr_rung_run(context, each, want_bytes - back);
                if (each == GR_RUNG_DROP)
                        back += gr_rung_run_on(&gr_core, device, GR_RUNG_SYNC, want_bytes - back);
                else if (each != GR_RUNG_PURGE)
                        back += gr_rung_run_on(&gr_core, device, each, want_bytes - back);
        }
        return back < INT64_MAX ? (int64_t)back : INT64_MAX;
}

GR_EXPORT int gpureclaim_set_limit(int device, uint64_t hard_limit_bytes)
{
        struct gr_device *of;
        GR_KEEP_ERRNO;
        GR_OWN_CALLS;

        if (hard_limit_bytes < (uint64_t)gr_option_table[GR_OPTION_HARD_LIMIT].min)
                return -EINVAL;
        of = gr_shim_ready() ? gr_device_get(device) : NULL;
        if (!of)
                return -ENODEV;
        gr_budget_set_limit(of, GR_LIMIT_HARD, hard_limit_bytes);
        if (gr_own_calls)
                gr_driver.refresh_pools(device); /* without a limit they grow uncounted */
        gr_trace_add(GR_ENTRY_LIMIT, device, 0, 0, hard_limit_bytes);
        gr_log(GR_LOG_INFO, "device %d: hard limit changed by the program", device);
        if (gr_core.wake)
                gr_core.wake(&gr_core); /* this thread may be in the midst of a capture */
        return 0;
}

#define PUBLIC                            +1
#define INTERNAL                          +0
#define GR_FIGURE(name, kind, where, ...) where
#define GR_FIGURE_NUMBER(name, ...)       +1
#define GR_FIGURE_TIME(...)
enum {
        PUBLIC_FIGURES = 0
#include "account/figures.def"
};
#undef GR_FIGURE_TIME
#undef GR_FIGURE_NUMBER
#undef GR_FIGURE
#undef INTERNAL
#undef PUBLIC
_Static_assert(sizeof(struct gpureclaim_status) == sizeof(size_t) + PUBLIC_FIGURES * sizeof(uint64_t),
               "a figure is in the list and not in the structure, or the other way round");

static bool ask_device(struct gr_context *context, void *arg)
{
        struct gpureclaim_status *status = arg;
        uint64_t free_bytes, total_bytes;

        if (gr_driver.mem_info(context->handle, &free_bytes, &total_bytes) == 0)
                status->device_free_bytes = free_bytes;
        return false;
}

GR_EXPORT int gpureclaim_status(int device, struct gpureclaim_status *ret_status)
{
        struct gpureclaim_status status = {0};
        uint64_t figures[GR_FIGURE_COUNT];
        struct gr_context *context;
        struct gr_device *of;
        GR_KEEP_ERRNO;
        GR_OWN_CALLS;

        if (!ret_status || ret_status->struct_bytes < offsetof(struct gpureclaim_status, peak_live_bytes) ||
            device < 0 || device >= GR_DEVICES_MAX)
                return -EINVAL;
        context = context_on(device);
        if (!context)
                return -ENODEV;
        of = context->device;
        status.struct_bytes = ret_status->struct_bytes < sizeof(status) ? ret_status->struct_bytes : sizeof(status);
        if (gr_own_calls && status.struct_bytes > offsetof(struct gpureclaim_status, driver_bytes))
                gr_overhead_look(of, STATUS_AGE_NS);
        gr_figures_of_device(of, figures);
        /* Each public figure of the list is a field, and each field is one of them. */
#define PUBLIC(name) status.name##_bytes = figures[GR_FIGURE_##name];
#define INTERNAL(name)
#define GR_FIGURE(name, kind, where, ...) where(name)
#define GR_FIGURE_NUMBER(name, ...)       status.name = figures[GR_FIGURE_##name];
#define GR_FIGURE_TIME(...)
#include "account/figures.def"
#undef GR_FIGURE_TIME
#undef GR_FIGURE_NUMBER
#undef GR_FIGURE
#undef INTERNAL
#undef PUBLIC
        if (gr_own_calls)
                gr_context_each(&gr_core, device, ask_device, &status);
        memcpy(ret_status, &status, status.struct_bytes);
        return 0;
}
