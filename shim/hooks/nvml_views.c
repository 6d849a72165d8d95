/*
 * The memory figures of NVML, NVIDIA's management library, which nvidia-smi and monitors use. With GPURECLAIM_NVML=1,
 * and if a limit holds, they show the program its share, as cuMemGetInfo does. Off by default: NVML is also used to
 * check limits, and its list of processes would contradict the share.
 *
 * NVML's own function is called first, so that errors, versions and NULL are as without this library. A process that
 * uses NVML but has not initialised CUDA must not be made to do so; then the share comes from the options, and what the
 * group has reserved comes from the region. This file never loads NVML, but keeps it loaded once it is found.
 */
#include "hooks/nvml_views.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"
#include "device/neighbour.h"
#include "device/overhead.h"
#include "driver/dlsym.h"
#include "driver/nvml.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/nvml_gate.h"
#include "hooks/stream_ordered.h"
#include "system/environment.h"

#define FUNCTION_NOT_FOUND 13 /* NVML_ERROR_FUNCTION_NOT_FOUND */
#define UUID_TEXT          96
#define UUID_PREFIX        4 /* "GPU-" or "MIG-" */

struct memory_v2 {
        unsigned version;
        unsigned long long total, reserved, free, used;
};

GR_EXPORT int nvmlDeviceGetMemoryInfo(void *nvml_device, struct gr_nvml_memory *memory);
GR_EXPORT int nvmlDeviceGetMemoryInfo_v2(void *nvml_device, struct memory_v2 *memory);

/*
 * NVML's functions; constant once found is true. Old libraries lack some: those are NULL, and dlsym finds no hooks for
 * them.
 */
static struct {
        _Atomic bool found;
        __typeof__(nvmlDeviceGetMemoryInfo) *nvmlDeviceGetMemoryInfo;
        __typeof__(nvmlDeviceGetMemoryInfo_v2) *nvmlDeviceGetMemoryInfo_v2;
        int (*uuid)(void *nvml_device, char *ret, unsigned length);
        int (*index)(void *nvml_device, unsigned *ret);
} real;

static const struct {
        const char *name;
        void *hook;
        void **real;
} hooks[] = {
#define GR_HOOK(symbol)
#define GR_CALL(symbol)
#define GR_NEED(symbol)
#define GR_NVML(symbol) {#symbol, (void *)symbol, (void **)&real.symbol},
#include "driver/hooks.def"
#undef GR_HOOK
#undef GR_CALL
#undef GR_NEED
};

#define HOOKS (sizeof(hooks) / sizeof(hooks[0]))

static bool find_real(void)
{
        static struct gr_lock lock = GR_LOCK_INIT(GR_RANK_NVML_VIEWS);
        void *library, *found[HOOKS], *uuid, *index;
        GR_KEEP_ERRNO;

        if (atomic_load_explicit(&real.found, memory_order_acquire))
                return true;
        /* Without the lock: a thread in a constructor holds the loader's lock, and may wait for this lock. */
        library = dlopen(GR_NVML_LIBRARY, RTLD_LAZY | RTLD_NOLOAD);
        if (library) {
                for (size_t i = 0; i < HOOKS; i++)
                        found[i] = gr_real_symbol(library, hooks[i].name);
                uuid = gr_real_symbol(library, "nvmlDeviceGetUUID");
                index = gr_real_symbol(library, "nvmlDeviceGetIndex");
        }
        dlerror(); /* clears it: a missing function is not an error of the program */
        gr_lock(&lock);
        if (library && !atomic_load(&real.found)) {
                for (size_t i = 0; i < HOOKS; i++)
                        *hooks[i].real = found[i];
                *(void **)&real.uuid = uuid;
                *(void **)&real.index = index;
                atomic_store_explicit(&real.found, true, memory_order_release);
        }
        gr_unlock(&lock);
        return atomic_load(&real.found);
}

void *gr_nvml_views_hook(const char *name)
{
        for (size_t i = 0; i < HOOKS; i++)
                if (strcmp(name, hooks[i].name) == 0)
                        return hooks[i].hook;
        return NULL;
}

void *gr_nvml_views_swap(void *function)
{
        gr_environment_read();
        if (function && gr_options.nvml && find_real())
                for (size_t i = 0; i < HOOKS; i++)
                        if (*hooks[i].real == function)
                                return hooks[i].hook;
        return function;
}

/* The ordinal that CUDA will give the device, as far as that can be known before CUDA is initialised; -1: none. */
static int expected_ordinal(void *nvml_device, const char *uuid)
{
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        unsigned index;
        int ordinal = 0;

        if (!real.index || real.index(nvml_device, &index) != 0)
                index = UINT32_MAX;
        if (!visible)
                return (int)index; /* the caller checks that there can be such a device */
        for (; *visible; ordinal++) {
                size_t length = strcspn(visible, ",");
                char *end;

                if (*visible >= '0' && *visible <= '9') {
                        if (strtoul(visible, &end, 10) == index && end == visible + length)
                                return ordinal;
                } else if (length > 0 && strncmp(visible, uuid, length) == 0) {
                        return ordinal;
                }
                visible += length + (visible[length] == ',');
        }
        return -1;
}

/* The device's UUID and ordinal; -1: CUDA does not see it. *ret_in_use: CUDA is initialised and told the ordinal. */
static int find_ordinal(void *nvml_device, char text[UUID_TEXT], bool *ret_in_use)
{
        char own[GR_UUID_TEXT_BYTES];
        int count = 0;

        if (!real.uuid || real.uuid(nvml_device, text, UUID_TEXT) != 0 ||
            strlen(text) < UUID_PREFIX + GR_UUID_TEXT_BYTES - 1)
                return -1;
        *ret_in_use = gr_shim_ready() && gr_real.cuDeviceGetCount && gr_real.cuDeviceGetCount(&count) == CUDA_SUCCESS;
        if (!*ret_in_use)
                return expected_ordinal(nvml_device, text);
        for (int i = 0; i < count; i++)
                if (gr_real_uuid(i, NULL, own) && strcmp(own, text + UUID_PREFIX) == 0)
                        return i;
        return -1;
}

/* Called for the device's first context: refreshes the device's figures. Without a context there are none. */
static bool refresh_figures(struct gr_context *context, void *arg)
{
        struct gr_device *device = arg;

        (void)context;
        gr_stream_ordered_refresh(device);
        if (gr_overhead_counted())
                gr_overhead_look(device, GR_OVERHEAD_AGE_NS);
        return false;
}

static void at_most(unsigned long long *value, uint64_t most)
{
        if (*value > most)
                *value = most;
}

/* Replaces the device's figures by the share's. In the first version of the call, reserved is part of used. */
static void tell_share(void *nvml_device, struct gr_nvml_memory *memory, unsigned long long *reserved)
{
        unsigned long long total = memory->total, free_bytes = memory->free;
        struct gr_device *device = NULL;
        uint64_t hard, group = GR_SIZE_NONE, share_free, share_total;
        char uuid[UUID_TEXT];
        bool in_use;
        GR_OWN_CALLS;
        int ordinal = find_ordinal(nvml_device, uuid, &in_use);

        /* Where the library is off (a child after fork, a driver that is too old) the figures stay NVML's. */
        if (ordinal < 0 || ordinal >= GR_DEVICES_MAX || atomic_load(&gr_shim_state) == GR_SHIM_OFF)
                return;
        if (in_use)
                device = gr_device_get(ordinal);
        hard = device ? atomic_load(&device->hard_bytes)
                      : gr_size_resolve(&gr_options.hard_limit, ordinal, total, NULL);
        if (!device || !gr_neighbour_joined(device))
                group = gr_size_resolve(&gr_options.group_limit, ordinal, total, NULL);
        if (hard == GR_SIZE_NONE && group == GR_SIZE_NONE && (!device || !gr_budget_limited(device)))
                return;
        if (device) {
                if (gr_own_calls) {
                        gr_context_each(&gr_core, ordinal, refresh_figures, device);
                        gr_segments_trim_merge_and_collect(&gr_core, device);
                }
                gr_budget_share(device, gr_pool_slab_bytes(&gr_core, device), free_bytes, total, &share_free,
                                &share_total);
                total = share_total;
                free_bytes = share_free;
        }
        at_most(&total, hard);
        if (group != GR_SIZE_NONE) { /* this process is no member of the group yet */
                uint64_t sum = gr_neighbour_sum(uuid + UUID_PREFIX);

                at_most(&total, group);
                at_most(&free_bytes, group > sum ? group - sum : 0);
        }
        if (total < memory->total)
                *reserved = 0; /* reserved memory is not part of the share */
        at_most(&free_bytes, total - *reserved);
        *memory = (struct gr_nvml_memory){.total = total, .free = free_bytes, .used = total - *reserved - free_bytes};
}

/* As GR_PASS_DEEP (nvml_gate.h). */
#define PASS_GATE                                                                                                      \
        __attribute__((cleanup(gr_pass_end))) struct gr_pass pass = gr_pass_deep();                                    \
                                                                                                                       \
        if (pass.result != CUDA_SUCCESS)                                                                               \
        return GR_NVML_UNKNOWN

GR_EXPORT int nvmlDeviceGetMemoryInfo(void *nvml_device, struct gr_nvml_memory *memory)
{
        unsigned long long reserved = 0;
        int result;

        PASS_GATE;
        if (!find_real() || !real.nvmlDeviceGetMemoryInfo)
                return FUNCTION_NOT_FOUND;
        result = real.nvmlDeviceGetMemoryInfo(nvml_device, memory);
        GR_KEEP_ERRNO;
        gr_environment_read();
        if (result == 0 && memory && gr_options.nvml)
                tell_share(nvml_device, memory, &reserved);
        return result;
}

GR_EXPORT int nvmlDeviceGetMemoryInfo_v2(void *nvml_device, struct memory_v2 *memory)
{
        struct gr_nvml_memory share;
        int result;

        PASS_GATE;
        if (!find_real() || !real.nvmlDeviceGetMemoryInfo_v2)
                return FUNCTION_NOT_FOUND;
        result = real.nvmlDeviceGetMemoryInfo_v2(nvml_device, memory);
        GR_KEEP_ERRNO;
        gr_environment_read();
        if (result == 0 && memory && gr_options.nvml) {
                share = (struct gr_nvml_memory){memory->total, memory->free, memory->used};
                tell_share(nvml_device, &share, &memory->reserved);
                memory->total = share.total;
                memory->free = share.free;
                memory->used = share.used;
        }
        return result;
}
