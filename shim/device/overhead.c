/*
 * Driver overhead: what the driver takes by itself for contexts, local memory, modules, graph executables, and
 * workspaces that libraries get by private interfaces. No call tells it, so it is computed:
 *
 *   overhead = what NVML says that this process holds - what is charged to this process, and not asleep
 *
 * Only NVML's figure of this process is used. The difference of the device's free memory before and after a call would
 * be wrong while another process works on the device, and cannot be had before the first context, which takes the most.
 * Where NVML does not list this process (another pid namespace, WSL), the figure is not known, and a limit counts
 * allocations only.
 *
 * Never measured on the fast path, because NVML takes the driver's own locks. With GPURECLAIM_LIMIT_INCLUDES=process it
 * is measured where the driver is known to take memory (contexts, modules, first launches of graphs), and now and then
 * beside allocations that go to the driver; lazily loaded code counts from the next measurement on. Otherwise it is
 * measured for reports, and around instantiations of graphs as long as that costs little.
 *
 * What executables take is what the overhead grows by while the driver makes one. Most take nothing, as the driver has
 * room for many in what it took before; so around each only the device's free memory is looked at, and NVML is asked
 * now and then (docs/measurements.md, graph-executables). Uploads and launches add nothing, and the first launch may
 * load code, which would be counted as theirs. The driver keeps the memory of destroyed executables for the next ones,
 * so a destruction takes nothing off.
 */
#include "device/overhead.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <unistd.h>

#include "base/log.h"
#include "base/no_cancel.h"
#include "driver/nvml.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "system/workers.h"

/* By how much the charge may exceed the truth: the size of arrays is computed, and pages are shared. */
#define TOLERANCE_BYTES (UINT64_C(64) << 20)

struct look {
        bool tried;
        bool warned;
        void *nvml; /* the device's handle; NULL: NVML does not know it */
        uint64_t at_ns;
        uint64_t before_bytes; /* what the previous measurement found */
};

static struct gr_lock lock = GR_LOCK_INIT(GR_RANK_OVERHEAD); /* held across NVML */
static struct look looks[GR_DEVICES_MAX] GR_GUARDED_BY(lock);
/* For executables. Apart, because looks[] also says how old driver_bytes is. */
static struct look executable_looks[GR_DEVICES_MAX] GR_GUARDED_BY(lock);
static uint64_t last_bytes[GR_DEVICES_MAX] GR_GUARDED_BY(lock); /* as the last of executable_looks found it */

static struct executables {
        _Atomic bool based; /* last_bytes is of a measurement */
        /* By how much free memory fell while executables were made since then, without what was charged. */
        _Atomic uint64_t fallen_bytes;
        _Atomic uint64_t paid_ns; /* NVML is not asked before this time */
        /* After the last one: the device's free memory, with what was charged; and when that was. 0: not known. */
        _Atomic uint64_t seen_bytes, seen_ns;
} executables[GR_DEVICES_MAX];

/*
 * What was seen after one instantiation also holds before the next one, if that comes so soon and no code was loaded
 * and no context was made meanwhile. Anything else that the driver takes meanwhile is counted as the executable's, also
 * lazily loaded code: load that before a capture.
 */
#define SEEN_NS UINT64_C(5000000)

/* Around instantiations NVML is asked for a hundredth of the time at most: after t not until 100 t are over. */
#define SHARE 100

static _Atomic bool nvml_wanted;

/* Lock held. */
GR_HELD(lock) static void *nvml_handle(struct gr_device *device, struct look *look)
{
        char text[GR_UUID_TEXT_BYTES];

        gr_assert_locked(&lock);
        if (look->tried)
                return look->nvml;
        look->tried = true;
        if (!gr_real_uuid(device->ordinal, NULL, text))
                return NULL;
        if (gr_nvml_device(text, &look->nvml) != 0)
                look->nvml = NULL;
        return look->nvml;
}

/*
 * Lock held. False: not known. Allocations are charged before the driver is asked, and uncharged after the driver has
 * them back. So one measurement may find too little, never too much: the larger of the last two counts. Managed memory
 * is charged in full, but the process holds it only where its pages are, so while there is some the figure never falls.
 */
GR_HELD(lock) static bool measure_overhead(struct gr_device *device, struct look *look, uint64_t *ret_bytes)
{
        uint64_t used, charged, managed, now = 0, last = atomic_load(&device->driver_bytes);
        void *nvml = nvml_handle(device, look);

        gr_assert_locked(&lock);
        if (!nvml)
                return false;
        gr_driver.refresh_pools(device->ordinal);
        charged = atomic_load(&device->reserved_bytes) - atomic_load(&device->kind_bytes[GR_MEMORY_DRIVER]) -
                  atomic_load(&device->asleep_bytes);
        managed = atomic_load(&device->kind_bytes[GR_MEMORY_MANAGED]);
        if (gr_nvml_process(nvml, (uint32_t)getpid(), &used) != 0)
                return false;
        if (used > charged)
                now = used - charged;
        /* Less than is charged: the figure is of a process in another namespace that has the same pid. */
        if (used + managed + TOLERANCE_BYTES < charged && last == GR_UNLIMITED)
                return false;
        *ret_bytes = now > look->before_bytes ? now : look->before_bytes;
        look->before_bytes = now;
        if (managed > 0 && last != GR_UNLIMITED && *ret_bytes < last)
                *ret_bytes = last;
        return true;
}

/* Lock held. */
GR_HELD(lock) static void count_overhead(struct gr_device *device, uint64_t bytes)
{
        uint64_t counted = atomic_load(&device->kind_bytes[GR_MEMORY_DRIVER]);

        gr_assert_locked(&lock);
        if (bytes > counted)
                gr_budget_force(device, GR_MEMORY_DRIVER, bytes - counted);
        else if (bytes < counted)
                gr_budget_uncharge(device, GR_MEMORY_DRIVER, counted - bytes);
}

/*
 * As gr_overhead_look, for executables: the smaller of the overhead's growth and the fall of free memory counts as
 * theirs. Where the overhead has shrunk, as by an unloaded module, only the fall of free memory is known. Of
 * two threads that make executables at a time, one may miss what the other's took. paid_ns: nothing is done if that has
 * changed, as another thread has just looked.
 */
static void look_for_executables(struct gr_device *device, uint64_t paid_ns)
{
        struct executables *of = &executables[device->ordinal];
        uint64_t begin_ns = gr_driver.now_ns(), bytes, taken, fallen, last;
        int i = device->ordinal;

        gr_lock_rank_assert_free_from(GR_RANK_CONTEXTS);
        gr_lock(&lock);
        if (atomic_load(&of->paid_ns) != paid_ns) {
                gr_unlock(&lock);
                return;
        }
        taken = atomic_load(&device->executable_bytes);
        fallen = atomic_exchange(&of->fallen_bytes, 0);
        if (measure_overhead(device, &executable_looks[i], &bytes)) {
                last = last_bytes[i];
                if (taken == GR_UNLIMITED)
                        taken = 0;
                if (atomic_exchange(&of->based, true))
                        taken += bytes < last ? fallen : gr_min(fallen, bytes - last);
                last_bytes[i] = bytes;
                atomic_store(&device->executable_bytes, gr_min(taken, bytes));
        } else if (taken == 0) {
                atomic_store(&device->executable_bytes, GR_UNLIMITED);
        }
        atomic_store(&of->paid_ns, begin_ns + SHARE * (gr_driver.now_ns() - begin_ns));
        gr_unlock(&lock);
}

void gr_overhead_look(struct gr_device *device, uint64_t most_age_ns)
{
        struct look *look = &looks[device->ordinal];
        GR_KEEP_ERRNO;
        bool made = false;
        uint64_t bytes;
        GR_NO_CANCEL;

        assert(device->ordinal >= 0 && device->ordinal < GR_DEVICES_MAX);
        gr_lock_rank_assert_free_from(GR_RANK_CONTEXTS);
        gr_nvml_find(); /* without the lock: it asks the loader, which may wait for a thread that wants the lock */
        gr_lock(&lock);
        if (!look->at_ns || gr_driver.now_ns() - look->at_ns >= most_age_ns) {
                if (measure_overhead(device, look, &bytes)) {
                        atomic_store(&device->driver_bytes, bytes);
                        if (gr_overhead_counted())
                                count_overhead(device, bytes);
                } else if (gr_overhead_counted() && !look->warned) {
                        look->warned = true;
                        gr_log(GR_LOG_WARN,
                               "device %d: NVML does not say what this process holds: the limit counts allocations "
                               "only",
                               device->ordinal);
                }
                look->at_ns = gr_driver.now_ns();
                made = atomic_load(&executables[device->ordinal].fallen_bytes) > 0;
        }
        gr_unlock(&lock);
        if (made)
                look_for_executables(device, atomic_load(&executables[device->ordinal].paid_ns));
}

static void find_nvml(void *arg)
{
        (void)arg;
        gr_nvml_find();
}

/* The device's free memory, with what the process has of it by its own charge. 0: not known. */
static uint64_t free_and_charged(struct gr_context *context)
{
        struct executables *of = &executables[context->device->ordinal];
        uint64_t free_bytes, total_bytes, bytes = 0;

        if (gr_driver.mem_info(context->handle, &free_bytes, &total_bytes) == 0)
                bytes = free_bytes + atomic_load(&context->device->reserved_bytes);
        atomic_store(&of->seen_bytes, bytes);
        atomic_store(&of->seen_ns, gr_driver.now_ns());
        return bytes;
}

uint64_t gr_overhead_before(struct gr_context *context)
{
        struct executables *of = &executables[context->device->ordinal];
        uint64_t bytes, seen_ns, paid_ns;

        if (!gr_nvml_is_sought()) { /* its loading may wait for a thread that waits for this one */
                if (!atomic_exchange(&nvml_wanted, true))
                        atomic_store(&nvml_wanted, gr_worker_call(find_nvml, NULL));
                return 0;
        }
        paid_ns = atomic_load(&of->paid_ns);
        if (gr_driver.now_ns() >= paid_ns)
                look_for_executables(context->device, paid_ns);
        if (!atomic_load(&of->based))
                return 0;
        seen_ns = atomic_load(&of->seen_ns); /* first, so that the bytes are not older */
        bytes = atomic_load(&of->seen_bytes);
        return bytes > 0 && gr_driver.now_ns() < seen_ns + SEEN_NS ? bytes : free_and_charged(context);
}

void gr_overhead_made(struct gr_context *context, uint64_t before_bytes)
{
        uint64_t after_bytes = free_and_charged(context);

        if (after_bytes > 0 && after_bytes < before_bytes)
                atomic_fetch_add(&executables[context->device->ordinal].fallen_bytes, before_bytes - after_bytes);
}

void gr_overhead_took_else(void)
{
        for (int i = 0; i < GR_DEVICES_MAX; i++) /* there are few, and to ask for the right one costs more */
                atomic_store(&executables[i].seen_bytes, 0);
}

void gr_overhead_context_ended(struct gr_device *device)
{
        GR_NO_CANCEL;

        gr_lock(&lock);
        if (atomic_load(&device->executable_bytes) != GR_UNLIMITED)
                atomic_store(&device->executable_bytes, 0);
        atomic_store(&executables[device->ordinal].fallen_bytes, 0);
        atomic_store(&executables[device->ordinal].based, false);
        atomic_store(&executables[device->ordinal].paid_ns, 0);
        atomic_store(&executables[device->ordinal].seen_bytes, 0);
        gr_unlock(&lock);
}
