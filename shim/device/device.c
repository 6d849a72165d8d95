/* Devices: the limits that the options set for each, read when the device is first used. */
#include "device/device.h"

#include <assert.h>
#include <pthread.h>

#include "base/log.h"
#include "base/no_cancel.h"
#include "device/neighbour.h"
#include "driver/real.h"
#include "system/environment.h"

static struct gr_lock lock = GR_LOCK_INIT(GR_RANK_DEVICES); /* the driver is asked under it */
static uint64_t configured GR_GUARDED_BY(lock);             /* bit d: device d has its limits */

static void (*in_use)(void);

void gr_device_init(void (*note_use)(void))
{
        in_use = note_use;
}

static uint64_t limit_bytes(enum gr_option_id id, CUdevice dev, uint64_t total_bytes)
{
        uint64_t bytes = gr_options_resolve(&gr_options, id, dev, total_bytes, gr_log_warn, NULL);

        return bytes == GR_SIZE_NONE ? GR_UNLIMITED : bytes;
}

/* The limit on spilled memory. A percentage is one of the device's memory, but the limit may be above that size. */
static uint64_t spill_limit(CUdevice dev, uint64_t total_bytes)
{
        const struct gr_size *size = gr_size_list_get(&gr_options.spill, dev);

        if (size->is_percent)
                return (uint64_t)((double)total_bytes * size->percent / 100);
        return size->bytes == GR_SIZE_NONE ? 0 : size->bytes;
}

/* Names each limit that is for a device which is not there, and so limits nothing. */
static void check_devices(void)
{
        int count;

        for (enum gr_option_id id = 0; id < GR_OPTION_COUNT; id++) {
                const struct gr_size_list *list = gr_option_value(&gr_options, id);

                if (gr_option_table[id].kind != GR_KIND_SIZES || !list->device_mask || !gr_real.cuDeviceGetCount ||
                    gr_real.cuDeviceGetCount(&count) != CUDA_SUCCESS)
                        continue;
                for (int dev = count; dev < GR_SIZE_DEVICES_MAX; dev++)
                        if (list->device_mask >> dev & 1)
                                gr_log(GR_LOG_WARN, "%s: there is no device %d, as the process sees %d",
                                       gr_option_table[id].env, dev, count);
        }
}

struct gr_device *gr_device_get(CUdevice dev)
{
        struct gr_device *device;
        size_t total_bytes;
        int integrated = 0;
        GR_NO_CANCEL;

        if (dev < 0 || dev >= GR_DEVICES_MAX)
                return NULL;
        device = &gr_core.devices[dev];
        gr_lock(&lock);
        if (!(configured >> dev & 1) && gr_real.cuDeviceTotalMem_v2) {
                if (gr_real.cuDeviceTotalMem_v2(&total_bytes, dev) != CUDA_SUCCESS) {
                        gr_unlock(&lock);
                        return NULL; /* its limits depend on its size: asked again at the next call */
                }
                if (!configured)
                        check_devices();
                gr_budget_set_limit(device, GR_LIMIT_HARD, limit_bytes(GR_OPTION_HARD_LIMIT, dev, total_bytes));
                gr_budget_set_limit(device, GR_LIMIT_SOFT, limit_bytes(GR_OPTION_SOFT_LIMIT, dev, total_bytes));
                gr_budget_set_limit(device, GR_LIMIT_THRESHOLD,
                                    limit_bytes(GR_OPTION_RELEASE_THRESHOLD, dev, total_bytes));
                atomic_store(&device->spill_bytes, spill_limit(dev, total_bytes));
                atomic_store(&device->total_bytes, total_bytes);
                device->integrated = gr_real.cuDeviceGetAttribute &&
                                     gr_real.cuDeviceGetAttribute(&integrated, CU_DEVICE_ATTRIBUTE_INTEGRATED, dev) ==
                                             CUDA_SUCCESS &&
                                     integrated;
                gr_neighbour_begin(device);
                configured |= UINT64_C(1) << dev;
        }
        gr_unlock(&lock);
        return device;
}

struct gr_device *gr_device_use(CUdevice dev)
{
        struct gr_device *device = gr_device_get(dev);

        assert(in_use); /* gr_device_init came before */
        if (device) {
                in_use();
                gr_neighbour_join(dev);
        }
        return device;
}
