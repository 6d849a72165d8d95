/*
 * What the driver takes by itself: contexts, local memory, modules, graph executables, workspaces that libraries get on
 * private ways. Nobody announces it, so it is what NVML says this process holds, less what we have charged for it.
 *
 * Only NVML's figure of this very process is used. Differences of the card's free memory around a call would need
 * nobody else to be at work on the card, and cannot be had before the first context, which takes the most. Where NVML
 * does not list us (another pid namespace, WSL) the figure is not known, and a limit counts allocations only.
 *
 * Never on a hot path: the look takes the driver's own locks. With GPURECLAIM_LIMIT_INCLUDES=process it is taken where
 * the driver is known to take something (contexts, modules, first launches of graphs), and now and then beside
 * allocations that go to the driver; lazily loaded code counts from the next of these on. Else only for reports.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <unistd.h>

#include "base/log.h"
#include "driver/nvml.h"
#include "shim.h"

/* What our charge may be above the truth in: arrays are computed, and pages shared. */
#define SLACK_BYTES (UINT64_C(64) << 20)

struct look {
        bool tried;
        bool warned;
        void *nvml; /* the card's handle; NULL: NVML does not know it */
        uint64_t at_ns;
        uint64_t before_bytes; /* what the look before found */
};

static struct look looks[GR_DEVICES_MAX];                /* guarded by lock */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* held across NVML; taken before stream_ordered.c's */

/* Lock held. */
static void *card(struct gr_device *device, struct look *look)
{
        char text[GR_UUID_TEXT_BYTES];

        if (look->tried)
                return look->nvml;
        look->tried = true;
        if (!gr_device_uuid(device->ordinal, NULL, text))
                return NULL;
        if (gr_nvml_device(text, &look->nvml) != 0)
                look->nvml = NULL;
        return look->nvml;
}

/*
 * Lock held. False: not known. Allocations are charged before the driver is asked and uncharged after it has them back,
 * so one look may find too little, never too much: the larger of two counts. Managed memory is charged in full, but
 * held only where its pages are, so beside it the figure does not fall.
 */
static bool measure(struct gr_device *device, struct look *look, uint64_t *ret_bytes)
{
        uint64_t used, charged, managed, now = 0, last = atomic_load(&device->driver_bytes);
        void *nvml = card(device, look);

        if (!nvml)
                return false;
        gr_async_refresh(device);
        charged = atomic_load(&device->reserved_bytes) - atomic_load(&device->kind_bytes[GR_MEMORY_DRIVER]);
        managed = atomic_load(&device->kind_bytes[GR_MEMORY_MANAGED]);
        if (gr_nvml_process(nvml, (uint32_t)getpid(), &used) != 0)
                return false;
        if (used > charged)
                now = used - charged;
        /* Of a process that happens to have our number in another namespace: it holds less than we know of. */
        if (used + managed + SLACK_BYTES < charged && last == GR_UNLIMITED)
                return false;
        *ret_bytes = now > look->before_bytes ? now : look->before_bytes;
        look->before_bytes = now;
        if (managed > 0 && last != GR_UNLIMITED && *ret_bytes < last)
                *ret_bytes = last;
        return true;
}

/* Lock held. */
static void count(struct gr_device *device, uint64_t bytes)
{
        uint64_t counted = atomic_load(&device->kind_bytes[GR_MEMORY_DRIVER]);

        if (bytes > counted)
                gr_budget_force(device, GR_MEMORY_DRIVER, bytes - counted);
        else if (bytes < counted)
                gr_budget_uncharge(device, GR_MEMORY_DRIVER, counted - bytes);
}

void gr_overhead_look(struct gr_device *device, uint64_t most_age_ns)
{
        struct look *look = &looks[device->ordinal];
        int saved_errno = errno;
        uint64_t bytes;

        gr_nvml_find(); /* not with the lock: it asks the loader, which may wait for a thread that wants the lock */
        pthread_mutex_lock(&lock);
        if (!look->at_ns || gr_driver.now_ns() - look->at_ns >= most_age_ns) {
                if (measure(device, look, &bytes)) {
                        atomic_store(&device->driver_bytes, bytes);
                        if (gr_overhead_counted())
                                count(device, bytes);
                } else if (gr_overhead_counted() && !look->warned) {
                        look->warned = true;
                        gr_log(GR_LOG_WARN,
                               "device %d: NVML does not say what this process holds: the limit counts allocations "
                               "only",
                               device->ordinal);
                }
                look->at_ns = gr_driver.now_ns();
        }
        pthread_mutex_unlock(&lock);
        errno = saved_errno;
}

static int within_limit(void *arg)
{
        struct gr_device *device = arg;

        gr_overhead_look(device, 0);
        return gr_budget_over(device) > 0 ? -EDQUOT : 0;
}

bool gr_overhead_fits(void)
{
        struct gr_context *context;
        int saved_errno = errno, rc;
        uint64_t over;

        if (!gr_overhead_counted() || !gr_shim_ready())
                return true;
        context = gr_current_context();
        if (!context)
                return true;
        rc = within_limit(context->device);
        if (rc) {
                over = gr_budget_over(context->device);
                rc = gr_ladder_climb_for(context, over <= GR_BLOCK_MAX_BYTES ? over : GR_PAGE_BYTES, within_limit,
                                         context->device, rc);
        }
        errno = saved_errno;
        return rc == 0;
}
