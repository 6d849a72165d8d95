/* The GPUs that processes with the library use, from the regions in shared memory. */
#ifndef GR_GPUS_H
#define GR_GPUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "driver/nvml.h"
#include "region/region.h"

/* One group of processes on one GPU. */
struct gpu {
        struct gr_region region;
        char group[GR_GROUP_NAME_BYTES];
        char user[64]; /* "": this one; else the name of the user who has the processes */
        char uuid[37];
        int index;                        /* in nvidia-smi; -1: not known */
        char model[64];                   /* "": not known */
        uint64_t total_bytes, used_bytes; /* of the GPU; 0 and 0: not known */
        uint64_t reserved_bytes;          /* of all members */
        struct gr_member *members;        /* by pid */
        size_t count;
        struct gr_nvml_use *uses; /* of all processes, from NVML; NULL: not known */
        size_t use_count;
        const struct gpu *all; /* what gpus_open has returned, which has this one in it */
        size_t all_count;
};

/* The folder of the user's regions. 0 or -errno; -ENOENT: there is none. *ret_by_default: no option names it. */
int gpus_folder(char ret_dir[GR_REGION_PATH_BYTES], bool *ret_by_default);

/* Says that command cannot read the regions in the folder, and why. */
void gpus_unread(const char *command, const char *why);

/*
 * Opens every region that the user has and reads it, after freeing the slots of processes that are gone. With all_users
 * also those of the other users, if this one is root: they are copied, and nothing of theirs is changed. 0, with GPUs
 * that have members, by UUID, group and user, for gpus_close; or -errno, with none. *ret_other: files of this user that
 * are no region of this version.
 */
int gpus_open(bool all_users, struct gpu **ret_gpus, size_t *ret_count, size_t *ret_other);

/* " of USER" where other users' processes are among these, to be put behind a group's name; else "". */
const char *gpu_of_user(const struct gpu *gpu, char ret[72]);

void gpus_close(struct gpu *gpus, size_t count);

/*
 * Reads the members again, and what is used of the GPU: from NVML or, where that is missing, from what the members
 * have last seen. ask: one of them looks at the GPU now.
 */
void gpu_read(struct gpu *gpu, bool ask);

/* The memory of the GPU that is used, and not reserved by a member of this group or another one that was opened. */
uint64_t gpu_others_bytes(const struct gpu *gpu);

/* What is known of a member: what it says of itself, but for what the region or the driver knows better. */
void member_figures(const struct gpu *gpu, const struct gr_member *member, uint64_t ret[GR_FIGURE_COUNT]);

/* Whether process pid is one of the members. */
bool gpu_has_member(const struct gpu *gpu, uint32_t pid);

/*
 * Asks a member for something and waits for it. 0, -ESRCH: it is gone; -ETIMEDOUT: it does not answer, and
 * the request is withdrawn; -EALREADY: it has begun to obey, and does not answer.
 */
int gpu_request(struct gpu *gpu, const struct gr_member *member, const struct gr_request *request,
                uint64_t *ret_given_bytes);

/* What such an error means, to be put behind the process's name. */
const char *gpu_request_failure(int rc);

/*
 * Free memory of a GPU, from NVML, so that no context is made for it. name: the GPU's number in nvidia-smi, or its
 * UUID ("GPU-...") or the beginning of that, as in CUDA_VISIBLE_DEVICES. -ENOTSUP: NVML is not there, or does not tell;
 * -ENODEV: no such GPU.
 */
int gpu_read_free(const char *name, uint64_t *ret_free_bytes, char ret_uuid[37]);

/* Seconds since the process last did something with its memory; 0 while an allocation of it waits. */
double member_idle_s(const struct gpu *gpu, const struct gr_member *member);

/* Parses a size for a GPU of total_bytes. 0, or an error of gr_size_parse. */
int size_parse(const char *text, uint64_t total_bytes, uint64_t *ret_bytes);

/* Parses a size argument of command for a member or GPU of total_bytes. False: it is no size, which it has printed. */
bool size_argument(const char *command, const char *text, uint64_t total_bytes, uint64_t *ret_bytes);

#endif
