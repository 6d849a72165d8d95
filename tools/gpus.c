/* The processes that use each GPU: their regions in shared memory, and what NVML says of the GPU (gpus.h). */
#include "gpus.h"

#include <dirent.h>
#include <errno.h>
#include <pwd.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/log.h"
#include "base/options.h"
#include "command.h"
#include "driver/dlsym.h"
#include "driver/nvml.h"
#include "system/options_file.h"
#include "system/platform.h"

#define QUIET_NS UINT64_C(1000000000) /* longest wait without a sign of life */
#define WORK_NS  UINT64_C(5000000000) /* longest wait for a process that gives signs of life */

/* Of what other users may have written anything, so much is looked at. */
#define USERS_MOST   256
#define FILES_MOST   16 /* of each */
#define MEMBERS_MOST 64 /* of each of these */

void *gr_real_symbol(void *handle, const char *name)
{
        return dlsym(handle, name);
}

static bool ask_nvml(struct gpu *gpu)
{
        struct gr_nvml_memory memory;
        void *device;

        if (gr_nvml_device(gpu->uuid, &device) != 0 || gr_nvml_memory(device, &memory) != 0)
                return false;
        gpu->total_bytes = memory.total;
        gpu->used_bytes = memory.used;
        free(gpu->uses);
        if (gr_nvml_processes(device, &gpu->uses, &gpu->use_count) != 0) {
                gpu->uses = NULL;
                gpu->use_count = 0;
        }
        return true;
}

int gpu_read_free(const char *name, uint64_t *ret_free_bytes, char ret_uuid[37])
{
        struct gr_nvml_memory memory;
        void *device;
        int rc = gr_nvml_device_named(name, &device, ret_uuid);

        if (rc == 0)
                rc = gr_nvml_memory(device, &memory);
        if (rc == 0)
                *ret_free_bytes = memory.free;
        return rc;
}

static int by_pid(const void *left, const void *right)
{
        const struct gr_member *a = left, *b = right;

        return a->identity.pid < b->identity.pid ? -1 : a->identity.pid > b->identity.pid;
}

static int by_name(const void *left, const void *right)
{
        const struct gpu *a = left, *b = right;
        int order = strcmp(a->uuid, b->uuid);

        if (order == 0)
                order = strcmp(a->group, b->group);
        return order ? order : strcmp(a->user, b->user);
}

/*
 * Whether a slot in another user's region is of a process of that user, as far as can be seen: the user may have
 * written any number there, and an order must not seem to go to the process of that number.
 */
static bool is_real(struct gpu *gpu, const struct gr_member *member)
{
        char path[32], line[256];
        unsigned long user = (unsigned long)-1;
        FILE *file;

        for (size_t i = 0; i < gpu->count; i++)
                if (gpu->members[i].owner == member->owner ||
                    (gpu->members[i].identity.pid == member->identity.pid &&
                     gpu->members[i].identity.pid_namespace == member->identity.pid_namespace))
                        return false;
        if (gr_region_is_gone(&gpu->region, member->slot) || !member->same_namespace)
                return !member->same_namespace;
        snprintf(path, sizeof(path), "/proc/%u/status", member->identity.pid);
        file = fopen(path, "re");
        while (file && fgets(line, sizeof(line), file) && sscanf(line, "Uid: %*u %lu", &user) != 1)
                ;
        if (file)
                fclose(file);
        return user == gpu->region.user;
}

static void read_members(struct gpu *gpu)
{
        if (!gpu->members)
                gpu->members = calloc(GR_REGION_SLOTS, sizeof(*gpu->members));
        gpu->count = 0;
        gpu->reserved_bytes = 0;
        for (unsigned i = 0; gpu->members && i < GR_REGION_SLOTS && (!gpu->user[0] || gpu->count < MEMBERS_MOST); i++)
                if (gr_region_read(&gpu->region, i, &gpu->members[gpu->count]) == 0 &&
                    (!gpu->user[0] || is_real(gpu, &gpu->members[gpu->count])))
                        gpu->reserved_bytes += gpu->members[gpu->count++].reserved_bytes;
        if (gpu->members)
                qsort(gpu->members, gpu->count, sizeof(*gpu->members), by_pid);
}

/* What is used of the GPU, as a member has last seen it. */
static void take_use(struct gpu *gpu, const struct gr_member *member)
{
        uint64_t total = member->figures[GR_FIGURE_device_total];

        gpu->total_bytes = total;
        gpu->used_bytes = total - gr_min(member->figures[GR_FIGURE_device_free], total);
}

void gpu_read(struct gpu *gpu, bool ask)
{
        const struct gr_request refresh = {.orders = GR_ORDER_REFRESH};
        uint64_t newest = 0;

        if (!gpu->user[0])
                gr_region_sweep(&gpu->region);
        read_members(gpu);
        if (ask_nvml(gpu))
                return;
        /* One answer suffices: it is about the whole GPU. */
        for (size_t i = 0; ask && !gpu->user[0] && i < gpu->count; i++) {
                uint64_t given, start;
                struct gr_member *member = &gpu->members[i];

                if (member->same_namespace &&
                    gr_platform_process_state(member->identity.pid, &start) == GR_PROCESS_STOPPED)
                        continue;
                if (gpu_request(gpu, member, &refresh, &given) == 0) {
                        gr_region_read(&gpu->region, member->slot, member);
                        take_use(gpu, member);
                        return;
                }
        }
        for (size_t i = 0; !gpu->user[0] && i < gpu->count; i++)
                if (gpu->members[i].active_ns >= newest && gpu->members[i].figures[GR_FIGURE_device_free]) {
                        newest = gpu->members[i].active_ns;
                        take_use(gpu, &gpu->members[i]);
                }
}

static void gpu_close(struct gpu *gpu)
{
        gr_region_close(&gpu->region);
        free(gpu->members);
        free(gpu->uses);
}

int gpus_folder(char ret_dir[GR_REGION_PATH_BYTES], bool *ret_by_default)
{
        static struct gr_options options;

        gr_options_read(&options, NULL, NULL);
        *ret_by_default = !options.region_dir.text[0];
        if (*ret_by_default)
                return gr_region_default_dir(false, ret_dir, GR_REGION_PATH_BYTES);
        memcpy(ret_dir, options.region_dir.text, GR_REGION_PATH_BYTES);
        return 0;
}

void gpus_unread(const char *command, const char *why)
{
        char folder[GR_REGION_PATH_BYTES] = "";

        gpus_folder(folder, &(bool){0});
        gr_log_clean(folder, strlen(folder));
        complain("%s: the shared memory%s%s cannot be read: %s", command, folder[0] ? " in " : "", folder, why);
}

static void name_gpu(struct gpu *gpu)
{
        char name[16], uuid[37];
        void *device;

        gpu->index = -1;
        for (int i = 0; snprintf(name, sizeof(name), "%d", i) && gr_nvml_device_named(name, &device, uuid) == 0; i++)
                if (strcmp(uuid, gpu->uuid) == 0) {
                        gpu->index = i;
                        gr_nvml_model(device, gpu->model, sizeof(gpu->model));
                        return;
                }
}

/* What gpus_open has found so far. */
struct list {
        struct gpu *gpus;
        size_t count, other;
};

/* Adds the regions in a folder of this user. 0 or -errno; -ENOENT: there is no folder. */
static int open_folder(struct list *list, const struct gr_identity *self, const char *dir, uid_t user)
{
        const struct passwd *entry = user == geteuid() ? NULL : getpwuid(user);
        struct dirent *file;
        size_t files = 0;
        DIR *open = opendir(dir);

        if (!open)
                return -errno;
        while ((file = readdir(open)) && (user == geteuid() || files < FILES_MOST)) {
                struct gpu *gpu, *more;
                int rc;

                if (file->d_name[0] == '.')
                        continue;
                files++;
                more = realloc(list->gpus, (list->count + 1) * sizeof(*list->gpus));
                if (!more)
                        break;
                list->gpus = more;
                gpu = memset(&list->gpus[list->count], 0, sizeof(*gpu));
                rc = gr_region_parse_file_name(file->d_name, gpu->group, gpu->uuid);
                if (user == geteuid()) {
                        if (rc == 0)
                                rc = gr_region_open(&gpu->region, &gr_platform_ops, self, dir, file->d_name, false);
                        list->other += rc && rc != -ENOENT; /* -ENOENT: a region whose processes have all ended */
                } else {
                        snprintf(gpu->user, sizeof(gpu->user), "%lu", (unsigned long)user);
                        if (entry)
                                snprintf(gpu->user, sizeof(gpu->user), "%s", entry->pw_name);
                        gr_log_clean(gpu->user, strlen(gpu->user));
                        if (rc == 0)
                                rc = gr_region_open_of(&gpu->region, &gr_platform_ops, self, user, dir, file->d_name,
                                                       true);
                }
                if (rc)
                        continue;
                gpu_read(gpu, false);
                if (gpu->count > 0)
                        list->count++;
                else
                        gpu_close(gpu);
        }
        closedir(open);
        return 0;
}

/* Adds what other users have in the default folders. */
static void open_other_users(struct list *list, const struct gr_identity *self)
{
        uid_t users[USERS_MOST];
        size_t count = gr_region_users("/dev/shm", users, USERS_MOST);
        char dir[GR_REGION_PATH_BYTES];

        for (size_t i = 0; i < count; i++)
                if (gr_region_find_dir_of("/dev/shm", users[i], dir, sizeof(dir)) == 0)
                        open_folder(list, self, dir, users[i]);
}

int gpus_open(bool all_users, struct gpu **ret_gpus, size_t *ret_count, size_t *ret_other)
{
        char dir[GR_REGION_PATH_BYTES];
        struct gr_identity self;
        struct list list = {0};
        struct stat folder;
        bool by_default;
        int rc = gr_platform_identity(&self);

        *ret_gpus = NULL;
        *ret_count = *ret_other = 0;
        if (rc)
                return rc;
        all_users &= geteuid() == 0;
        rc = gpus_folder(dir, &by_default);
        if (rc == 0)
                rc = open_folder(&list, &self, dir, all_users && lstat(dir, &folder) == 0 ? folder.st_uid : geteuid());
        if (rc && rc != -ENOENT)
                return rc;
        if (all_users && by_default)
                open_other_users(&list, &self);
        if (list.count > 0)
                qsort(list.gpus, list.count, sizeof(*list.gpus), by_name);
        for (size_t i = 0; i < list.count; i++) {
                list.gpus[i].all = list.gpus;
                list.gpus[i].all_count = list.count;
                name_gpu(&list.gpus[i]);
        }
        *ret_gpus = list.gpus;
        *ret_count = list.count;
        *ret_other = list.other;
        return 0;
}

void gpus_close(struct gpu *gpus, size_t count)
{
        for (size_t i = 0; i < count; i++)
                gpu_close(&gpus[i]);
        free(gpus);
}

uint64_t gpu_others_bytes(const struct gpu *gpu)
{
        uint64_t reserved_bytes = 0;

        for (size_t i = 0; i < gpu->all_count; i++)
                if (strcmp(gpu->all[i].uuid, gpu->uuid) == 0)
                        reserved_bytes += gpu->all[i].reserved_bytes;
        return gpu->used_bytes > reserved_bytes ? gpu->used_bytes - reserved_bytes : 0;
}

/*
 * The driver overhead of a member: what the member says, or else what NVML says that the process uses, less what it has
 * reserved. UINT64_MAX: not known.
 */
static uint64_t driver_bytes(const struct gpu *gpu, const struct gr_member *member)
{
        uint64_t own = member->figures[GR_FIGURE_driver];

        /* Another process may have the same pid here as a member of another pid namespace. */
        for (size_t i = 0; own == UINT64_MAX && member->same_namespace && i < gpu->use_count; i++)
                if (gpu->uses[i].pid == member->identity.pid && gpu->uses[i].bytes != UINT64_MAX &&
                    gpu->uses[i].bytes >= member->reserved_bytes)
                        own = gpu->uses[i].bytes - member->reserved_bytes;
        return own;
}

void member_figures(const struct gpu *gpu, const struct gr_member *member, uint64_t ret[GR_FIGURE_COUNT])
{
        memcpy(ret, member->figures, sizeof(member->figures));
        for (int i = GR_SHARED_FIGURES; i < GR_FIGURE_COUNT; i++)
                ret[i] = UINT64_MAX;
        ret[GR_FIGURE_reserved] = member->reserved_bytes;
        ret[GR_FIGURE_driver] = driver_bytes(gpu, member);
}

bool gpu_has_member(const struct gpu *gpu, uint32_t pid)
{
        for (size_t i = 0; i < gpu->count; i++)
                if (gpu->members[i].same_namespace && gpu->members[i].identity.pid == pid)
                        return true;
        return false;
}

const char *gpu_of_user(const struct gpu *gpu, char ret[72])
{
        const struct passwd *own = gpu->user[0] ? NULL : getpwuid(geteuid());
        bool others = false;

        for (size_t i = 0; i < gpu->all_count; i++)
                others |= gpu->all[i].user[0] != '\0';
        ret[0] = '\0';
        if (others)
                snprintf(ret, 72, " of %s", gpu->user[0] ? gpu->user : own ? own->pw_name : "this user");
        return ret;
}

static void say_cut_short(int signal)
{
        static const char text[] = "gpureclaim: the process's user has taken its shared memory away meanwhile\n";
        ssize_t ignored = write(STDERR_FILENO, text, sizeof(text) - 1);

        (void)signal, (void)ignored;
        _exit(EXIT_FAILURE);
}

/* Has the memory itself in place of the copy, for an order to a member. 0, or -ESRCH: it has gone. */
static int open_for_order(struct gpu *gpu, const struct gr_member *member)
{
        struct gr_region *copy = malloc(sizeof(*copy));
        int rc;

        if (!copy)
                return -ENOMEM;
        memcpy(copy, &gpu->region, sizeof(*copy));
        signal(SIGBUS, say_cut_short);
        rc = gr_region_open_of(&gpu->region, copy->ops, &copy->self, copy->user, copy->dir, copy->file, false);
        if (rc == 0)
                gr_region_close(copy);
        else
                memcpy(&gpu->region, copy, sizeof(*copy));
        free(copy);
        return rc || atomic_load(&gpu->region.map->owners[member->slot]) != member->owner ? -ESRCH : 0;
}

int gpu_request(struct gpu *gpu, const struct gr_member *member, const struct gr_request *request,
                uint64_t *ret_given_bytes)
{
        uint64_t before, now = gr_platform_now_ns();
        const struct gr_patience patience = {.begin_ns = now, .quiet_ns = QUIET_NS, .deadline_ns = now + WORK_NS};
        uint32_t sequence;
        struct gr_slot *slot;

        if (gpu->region.is_copy && open_for_order(gpu, member) != 0)
                return -ESRCH;
        slot = &gpu->region.map->slots[member->slot];
        before = atomic_load(&slot->given_bytes);
        sequence = gr_region_request(&gpu->region, member->slot, request);
        if (!gr_region_await(&gpu->region, member->slot, member->owner, sequence, &patience)) {
                if (atomic_load(&gpu->region.map->owners[member->slot]) != member->owner)
                        return -ESRCH;
                return gr_region_withdraw(&gpu->region, member->slot, request) ? -ETIMEDOUT : -EALREADY;
        }
        *ret_given_bytes = atomic_load(&slot->given_bytes) - before;
        return 0;
}

const char *gpu_request_failure(int rc)
{
        if (rc == -ESRCH)
                return "it ended";
        return rc == -EALREADY ? "it has begun to obey, but does not answer (stopped or hung)"
                               : "it does not answer (stopped or hung): nothing is changed";
}

double member_idle_s(const struct gpu *gpu, const struct gr_member *member)
{
        uint64_t now = gpu->region.ops->now_ns();

        if (member->figures[GR_FIGURE_waiting] || now < member->active_ns)
                return 0;
        return (double)(now - member->active_ns) / 1e9;
}

int size_parse(const char *text, uint64_t total_bytes, uint64_t *ret_bytes)
{
        struct gr_size size;
        int rc = gr_size_parse(text, &size);

        if (rc == 0)
                *ret_bytes = size.is_percent ? (uint64_t)((double)total_bytes * size.percent / 100) : size.bytes;
        return rc;
}

bool size_argument(const char *command, const char *text, uint64_t total_bytes, uint64_t *ret_bytes)
{
        int rc = size_parse(text, total_bytes, ret_bytes);

        if (rc)
                complain("%s: %s: %s (expected a size such as 4GiB, 512MB or 50%%, or none)", command, text,
                         gr_option_reason(rc));
        return rc == 0;
}
