#include "driver/nvml.h"

#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/keep_errno.h"
#include "base/lock.h"
#include "driver/dlsym.h"

#define INSUFFICIENT_SIZE 7 /* NVML_ERROR_INSUFFICIENT_SIZE */
#define PROCESSES         64
#define TRIES             4 /* processes may start between two questions */

/* As the second and third version of the call write it; the first version has no instances. */
struct process {
        unsigned pid;
        unsigned long long used;
        unsigned gpu_instance, compute_instance;
};

struct nvml {
        bool found;
        int (*by_uuid)(const char *uuid, void **ret_device);
        int (*by_index)(unsigned index, void **ret_device);
        int (*uuid)(void *device, char *ret, unsigned length);
        int (*model)(void *device, char *ret, unsigned length);
        int (*memory)(void *device, struct gr_nvml_memory *ret);
        int (*processes)(void *device, unsigned *count, struct process *ret);
};

static struct nvml nvml; /* constant once sought is true */
static _Atomic bool sought;

static void load_nvml(struct nvml *ret)
{
        void *library = dlopen(GR_NVML_LIBRARY, RTLD_NOW | RTLD_LOCAL);
        int (*init)(void);

        if (!library) {
                dlerror(); /* clears it: the error is not the program's */
                return;
        }
        *(void **)&init = gr_real_symbol(library, "nvmlInit_v2");
        *(void **)&ret->by_uuid = gr_real_symbol(library, "nvmlDeviceGetHandleByUUID");
        *(void **)&ret->by_index = gr_real_symbol(library, "nvmlDeviceGetHandleByIndex_v2");
        *(void **)&ret->uuid = gr_real_symbol(library, "nvmlDeviceGetUUID");
        *(void **)&ret->model = gr_real_symbol(library, "nvmlDeviceGetName");
        *(void **)&ret->memory = gr_real_symbol(library, "nvmlDeviceGetMemoryInfo");
        *(void **)&ret->processes = gr_real_symbol(library, "nvmlDeviceGetComputeRunningProcesses_v3");
        if (!ret->processes)
                *(void **)&ret->processes = gr_real_symbol(library, "nvmlDeviceGetComputeRunningProcesses_v2");
        dlerror();
        ret->found = init && ret->by_uuid && ret->by_index && ret->uuid && ret->memory && init() == 0;
}

static struct gr_lock lock = GR_LOCK_INIT(GR_RANK_NVML);

/* Lock held. Keeps what the first thread found, as other threads may read it from then on. */
GR_HELD(lock) static void keep_first(const struct nvml *found)
{
        gr_assert_locked(&lock);
        if (!atomic_load(&sought))
                nvml = *found;
        atomic_store_explicit(&sought, true, memory_order_release);
}

bool gr_nvml_is_sought(void)
{
        return atomic_load_explicit(&sought, memory_order_acquire);
}

bool gr_nvml_find(void)
{
        GR_KEEP_ERRNO;
        struct nvml found = {0};

        if (!atomic_load_explicit(&sought, memory_order_acquire)) {
                /* Without the lock: a thread in a constructor holds the loader's lock, and may wait for this lock. */
                load_nvml(&found);
                gr_lock(&lock);
                keep_first(&found);
                gr_unlock(&lock);
        }
        return nvml.found;
}

int gr_nvml_device(const char *uuid, void **ret_device)
{
        static const char *const kinds[] = {"GPU-", "MIG-"};
        char text[64];

        assert(uuid && ret_device);
        if (!gr_nvml_find())
                return -ENOTSUP;
        for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
                snprintf(text, sizeof(text), "%s%s", kinds[i], uuid);
                if (nvml.by_uuid(text, ret_device) == 0)
                        return 0;
        }
        return -ENODEV;
}

/* name: an index, a UUID, or the beginning of a UUID, as in CUDA_VISIBLE_DEVICES. */
static bool find_named(const char *name, void **ret_device)
{
        char text[96], *end;
        unsigned long index = strtoul(name, &end, 10);

        if (name[0] >= '0' && name[0] <= '9' && !*end)
                return index < UINT_MAX && nvml.by_index((unsigned)index, ret_device) == 0;
        if (nvml.by_uuid(name, ret_device) == 0)
                return true;
        for (unsigned i = 0; name[0] && nvml.by_index(i, ret_device) == 0; i++)
                if (nvml.uuid(*ret_device, text, sizeof(text)) == 0 && strncmp(text, name, strlen(name)) == 0)
                        return true;
        return false;
}

int gr_nvml_device_named(const char *name, void **ret_device, char ret_uuid[37])
{
        char text[96] = "";
        void *device;

        if (!gr_nvml_find())
                return -ENOTSUP;
        if (!find_named(name, &device) || nvml.uuid(device, text, sizeof(text)) != 0 || strlen(text) < 40)
                return -ENODEV;
        memcpy(ret_uuid, text + 4, 36); /* after "GPU-" */
        ret_uuid[36] = '\0';
        *ret_device = device;
        return 0;
}

int gr_nvml_model(void *device, char *ret, size_t bytes)
{
        char text[96];

        if (!gr_nvml_find() || !nvml.model || nvml.model(device, text, sizeof(text)) != 0)
                return -ENOTSUP;
        snprintf(ret, bytes, "%.*s", (int)sizeof(text), text);
        return 0;
}

int gr_nvml_memory(void *device, struct gr_nvml_memory *ret)
{
        struct gr_nvml_memory memory;

        if (!gr_nvml_find() || nvml.memory(device, &memory) != 0)
                return -ENOTSUP;
        *ret = memory;
        return 0;
}

/*
 * 0 with *ret_count processes in *ret_list. *ret_list is `few`, with room for PROCESSES, or else a longer list that the
 * caller frees. -ENOTSUP, -ENOMEM.
 */
static int list_processes(void *device, struct process *few, struct process **ret_list, unsigned *ret_count)
{
        struct process *list = few;
        unsigned room = PROCESSES, count = PROCESSES;
        int result;

        if (!gr_nvml_find() || !nvml.processes)
                return -ENOTSUP;
        result = nvml.processes(device, &count, list);
        for (int i = 0; result == INSUFFICIENT_SIZE && i < TRIES; i++) {
                room = count = 2 * (count > room ? count : room);
                if (list != few)
                        free(list);
                list = calloc(room, sizeof(*list));
                if (!list)
                        return -ENOMEM;
                result = nvml.processes(device, &count, list);
        }
        if (result != 0) {
                if (list != few)
                        free(list);
                return -ENOTSUP;
        }
        assert(list && room >= PROCESSES);
        *ret_list = list;
        *ret_count = count < room ? count : room;
        return 0;
}

int gr_nvml_processes(void *device, struct gr_nvml_use **ret_list, size_t *ret_count)
{
        struct process few[PROCESSES], *list;
        struct gr_nvml_use *uses = NULL;
        unsigned count;
        int rc = list_processes(device, few, &list, &count);

        if (rc)
                return rc;
        if (count > 0) {
                uses = calloc(count, sizeof(*uses));
                rc = uses ? 0 : -ENOMEM;
        }
        for (unsigned i = 0; uses && i < count; i++)
                uses[i] = (struct gr_nvml_use){list[i].pid, list[i].used == ~0ull ? UINT64_MAX : list[i].used};
        if (list != few)
                free(list);
        if (rc == 0) {
                *ret_list = uses;
                *ret_count = count;
        }
        return rc;
}

int gr_nvml_process(void *device, uint32_t pid, uint64_t *ret_bytes)
{
        struct process few[PROCESSES], *list;
        unsigned count;
        int rc = list_processes(device, few, &list, &count);

        if (rc)
                return rc;
        rc = -ESRCH;
        for (unsigned i = 0; i < count; i++)
                if (list[i].pid == pid && list[i].used != ~0ull) { /* all ones: not known */
                        *ret_bytes = list[i].used;
                        rc = 0;
                        break;
                }
        if (list != few)
                free(list);
        return rc;
}
