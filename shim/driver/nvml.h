/*
 * NVIDIA's management library, as far as we ask it: what a card holds, and what of it one process holds. It is looked
 * for at the first call (which opens the driver's control devices and takes milliseconds), never linked; its header
 * need not be there. Used by the library and by the command. Any thread; functions that fail return -errno and leave
 * ret_ outputs untouched: -ENOTSUP: there is no such library, or it does not say; -ENODEV: no such card.
 */
#ifndef GR_NVML_H
#define GR_NVML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GR_NVML_LIBRARY "libnvidia-ml.so.1"

/* How its functions are looked up: dlsym, unless set before the first call to one that does not hook them. */
extern void *(*gr_nvml_dlsym)(void *library, const char *name);

struct gr_nvml_memory {
        unsigned long long total, free, used; /* bytes; the library's own layout */
};

/*
 * Looks for the library, once; whether it is there. The others do so themselves: for who must not hold a lock while the
 * loader is asked.
 */
bool gr_nvml_find(void);

/* The card, or the instance of one, of this UUID, as 36 characters without a prefix. Good for the life of the process.
 */
int gr_nvml_device(const char *uuid, void **ret_device);

/* By index, counted as nvidia-smi does, by UUID with its prefix, or by the beginning of one. ret_uuid as above, NUL
 * included. */
int gr_nvml_device_named(const char *name, void **ret_device, char ret_uuid[37]);

int gr_nvml_memory(void *device, struct gr_nvml_memory *ret);

struct gr_nvml_use {
        uint32_t pid;
        uint64_t bytes; /* UINT64_MAX: the driver does not say */
};

/*
 * All processes with a context on device. 0 with a list for free(), or NULL where there is none; -ENOTSUP; -ENOMEM.
 */
int gr_nvml_processes(void *device, struct gr_nvml_use **ret_list, size_t *ret_count);

/*
 * What process pid holds on device, its contexts included. -ESRCH: not listed, as it has no context there, or lives in
 * a pid namespace that the driver does not look into.
 */
int gr_nvml_process(void *device, uint32_t pid, uint64_t *ret_bytes);

#endif
