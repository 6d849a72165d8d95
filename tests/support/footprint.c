/*
 * What the process really holds on the card. cuMemGetInfo will not do: under the shim it tells the program its share.
 * NVML is looked up at run time, so that the programs also start where there is no NVIDIA driver at all.
 */
#include "gputest.h"

#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

/* NVML's own layout; its header is not part of every toolkit. */
typedef struct nvmlDevice_st *nvml_device;
struct nvml_memory {
        unsigned long long total, free, used;
};
struct nvml_process {
        unsigned pid;
        unsigned long long used;
        unsigned gpu_instance, compute_instance;
};
enum { NVML_MAX_PROCESSES = 1024 };

static struct {
        nvml_device device; /* NULL: NVML cannot be asked */
        int (*memory)(nvml_device, struct nvml_memory *);
        int (*processes)(nvml_device, unsigned *, struct nvml_process *);
        unsigned long long used_before; /* on the whole card, before this process had a context */
} nvml;

static void look_up(void *library, const char *name, void *ret_function)
{
        void *found = dlsym(library, name);

        memcpy(ret_function, &found, sizeof found);
}

void gt_footprint_open(const struct gt *gt)
{
        int (*init)(void), (*by_pci)(const char *, nvml_device *);
        __typeof__(&cuDeviceGetPCIBusId) pci_bus_id = GT_OPTIONAL(cuDeviceGetPCIBusId);
        struct nvml_memory memory;
        nvml_device device = NULL;
        void *library;
        char bus[32];

        if (gt->simulated || !pci_bus_id || pci_bus_id(bus, sizeof bus, gt->device) != CUDA_SUCCESS)
                return;
        library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
        if (!library)
                return;
        look_up(library, "nvmlInit_v2", &init);
        look_up(library, "nvmlDeviceGetHandleByPciBusId_v2", &by_pci);
        look_up(library, "nvmlDeviceGetMemoryInfo", &nvml.memory);
        look_up(library, "nvmlDeviceGetComputeRunningProcesses_v3", &nvml.processes);
        if (!init || !by_pci || !nvml.memory || init() || by_pci(bus, &device) || nvml.memory(device, &memory))
                return;
        nvml.used_before = memory.used;
        nvml.device = device;
}

/* The process's own entry. NVML may not have one: in a container it can see other process numbers than ours. */
static bool own_entry(size_t *ret_bytes)
{
        static _Thread_local struct nvml_process list[NVML_MAX_PROCESSES];
        unsigned count = NVML_MAX_PROCESSES;

        if (!nvml.processes || nvml.processes(nvml.device, &count, list))
                return false;
        for (unsigned i = 0; i < count && i < NVML_MAX_PROCESSES; i++) {
                if (list[i].pid == (unsigned)getpid() && list[i].used != ~0ull) {
                        *ret_bytes = (size_t)list[i].used;
                        return true;
                }
        }
        return false;
}

static size_t (*simulated_bytes(void))(int)
{
        size_t (*used)(int);

        look_up(RTLD_DEFAULT, "grSimUsedBytes", &used);
        return used;
}

bool gt_footprint(const struct gt *gt, size_t *ret_bytes)
{
        struct nvml_memory memory;

        if (gt->simulated) {
                size_t (*used)(int) = simulated_bytes();

                if (!used)
                        return false;
                *ret_bytes = used(gt->device);
                return true;
        }
        if (!nvml.device)
                return false;
        if (own_entry(ret_bytes))
                return true;
        if (nvml.memory(nvml.device, &memory))
                return false;
        *ret_bytes = memory.used > nvml.used_before ? (size_t)(memory.used - nvml.used_before) : 0;
        return true;
}

bool gt_card_used(const struct gt *gt, size_t *ret_bytes)
{
        struct nvml_memory memory;

        if (gt->simulated)
                return gt_footprint(gt, ret_bytes);
        if (!nvml.device || nvml.memory(nvml.device, &memory))
                return false;
        *ret_bytes = (size_t)memory.used;
        return true;
}

bool gt_group_used(size_t *ret_bytes)
{
        static struct nvml_process list[NVML_MAX_PROCESSES];
        unsigned count = NVML_MAX_PROCESSES;
        size_t bytes = 0;
        bool listed = false;

        if (!nvml.device || !nvml.processes || nvml.processes(nvml.device, &count, list))
                return false;
        for (unsigned i = 0; i < count && i < NVML_MAX_PROCESSES; i++)
                if (list[i].used != ~0ull && getpgid((pid_t)list[i].pid) == getpgrp()) {
                        bytes += (size_t)list[i].used;
                        listed = true;
                }
        if (listed)
                *ret_bytes = bytes;
        return listed;
}

const char *gt_footprint_source(const struct gt *gt)
{
        size_t bytes;

        if (gt->simulated)
                return "simulated device";
        if (!nvml.device)
                return "unknown";
        return own_entry(&bytes) ? "NVML, this process" : "NVML, whole card since start";
}
