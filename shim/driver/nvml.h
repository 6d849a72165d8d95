/*
 * The part of NVML, NVIDIA's management library, that this project uses: how much memory a device has in use, and how
 * much of it one process holds. NVML is loaded at the first call, which takes milliseconds because it opens the
 * driver's control devices. It is never linked, and its header is not needed. Used by the library and by the command.
 *
 * Any thread may call. Functions that fail return -errno and leave ret_ outputs untouched. -ENOTSUP: NVML is not there,
 * or does not tell; -ENODEV: no such device.
 */
#ifndef GR_NVML_H
#define GR_NVML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GR_NVML_LIBRARY "libnvidia-ml.so.1"

struct gr_nvml_memory {
        unsigned long long total, free, used; /* bytes; laid out as NVML writes it */
};

/*
 * Loads NVML at the first call. Returns whether it is there. The other functions do this themselves. A caller that must
 * not hold a lock while the loader works calls this first.
 */
bool gr_nvml_find(void);

/* Whether gr_nvml_find has looked for NVML before, so that it costs nothing now. */
bool gr_nvml_is_sought(void);

/* The device, or MIG instance, with this UUID (36 characters without a prefix). Valid as long as the process lives. */
int gr_nvml_device(const char *uuid, void **ret_device);

/*
 * The device with this index, counted as nvidia-smi does, or whose UUID with its prefix is or begins with this name.
 * ret_uuid: its UUID without a prefix, with a NUL at the end.
 */
int gr_nvml_device_named(const char *name, void **ret_device, char ret_uuid[37]);

/* The name of its model, cut to what fits into ret. -ENOTSUP as above. */
int gr_nvml_model(void *device, char *ret, size_t bytes);

/* What the whole device has in use. -ENOTSUP as above. */
int gr_nvml_memory(void *device, struct gr_nvml_memory *ret);

struct gr_nvml_use {
        uint32_t pid;
        uint64_t bytes; /* UINT64_MAX: not known */
};

/*
 * All processes with a context on device. 0 with a list that the caller frees, or NULL where there are none; -ENOTSUP;
 * -ENOMEM.
 */
int gr_nvml_processes(void *device, struct gr_nvml_use **ret_list, size_t *ret_count);

/*
 * What process pid holds on device, its contexts included. -ESRCH: not listed, because it has no context there, or
 * because it is in a pid namespace that the driver cannot see.
 */
int gr_nvml_process(void *device, uint32_t pid, uint64_t *ret_bytes);

#endif
