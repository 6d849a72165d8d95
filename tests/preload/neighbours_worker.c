/*
 * Workers of neighbours.c: processes that use CUDA as they are told, or at random; and what the one that started them
 * sees of them from outside, in the region and on the card.
 */
#include "neighbours_worker.h"

#include "base/lock.h"
#include "check.h"

#include "gpureclaim.h"
#include "system/platform.h"

#include <cuda.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define BLOCKS_MOST 64

char folder[64];
_Atomic unsigned *longest_ms;

void fail(const char *what, long long found)
{
        fprintf(stderr, "neighbours: %s (%lld)\n", what, found);
        exit(1);
}

double now_ms(void)
{
        return (double)gr_platform_now_ns() / 1e6;
}

void pause_ms(unsigned ms)
{
        usleep(ms * 1000);
}

/*
 * In the worker: 'a' SIZE allocates MiB, 'f' frees everything, 'l' the last, 'o' DEVICE is used from then on, 'x' ends;
 * further ones with obey. Without orders, random ones from seed.
 */
static CUdeviceptr blocks[BLOCKS_MOST];
static size_t block_bytes[BLOCKS_MOST];
static int block_count;
static bool no_threads; /* the library can make none, as at the limit of a container */

/* Stands before the C library's for all libraries of the process, of which the simulated device needs its threads. */
__attribute__((visibility("default"))) int pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                                                          void *(*run)(void *), void *arg)
{
        static __typeof__(pthread_create) *real;
        Dl_info caller;

        if (!real)
                *(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
        if (no_threads && dladdr(__builtin_return_address(0), &caller) && strstr(caller.dli_fname, "libgpureclaim"))
                return EAGAIN;
        return real(thread, attributes, run, arg);
}

#define GIVE_PAUSE_NS 500000 /* of the library, while it waits for memory that it is to give */

static _Atomic unsigned most_pauses;     /* of one thread */
static _Thread_local bool ends_in_pause; /* this thread is told to end when the library pauses */

__attribute__((visibility("default"))) int nanosleep(const struct timespec *wanted, struct timespec *left)
{
        static __typeof__(nanosleep) *real;
        static _Thread_local unsigned pauses;
        Dl_info caller;

        if (!real)
                *(void **)&real = dlsym(RTLD_NEXT, "nanosleep");
        if (ends_in_pause)
                pthread_cancel(pthread_self());
        if (wanted->tv_sec == 0 && wanted->tv_nsec == GIVE_PAUSE_NS && dladdr(__builtin_return_address(0), &caller) &&
            strstr(caller.dli_fname, "libgpureclaim") && ++pauses > atomic_load(&most_pauses))
                atomic_store(&most_pauses, pauses);
        return real(wanted, left);
}

static _Thread_local bool charge_is_held; /* this thread's next one goes on only when it is told something */
static int orders_in, replies_out;

/* By then the charge is counted for the process, but not yet for the group. */
__attribute__((visibility("default"))) int pthread_mutex_lock(pthread_mutex_t *mutex)
{
        static __typeof__(pthread_mutex_lock) *real;
        struct reply reply = {0};
        unsigned order[2];
        Dl_info caller;

        if (!real)
                *(void **)&real = dlsym(RTLD_NEXT, "pthread_mutex_lock");
        if (charge_is_held && dladdr(__builtin_return_address(0), &caller) &&
            strstr(caller.dli_fname, "libgpureclaim") && ((struct gr_lock *)mutex)->rank == GR_RANK_REGION) {
                charge_is_held = false;
                if (write(replies_out, &reply, sizeof(reply)) != sizeof(reply) ||
                    read(orders_in, order, sizeof(order)) != sizeof(order))
                        exit(1);
        }
        return real(mutex);
}

static int worker_open(int device)
{
        CUcontext context;

        if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, device) || cuCtxSetCurrent(context))
                fail("no device", device);
        return 0;
}

/* Another context, which ends at once. */
static int worker_context(void)
{
        CUcontext context;
        int result = (int)cuCtxCreate(&context, NULL, 0, 0);

        return result ? result : (int)cuCtxDestroy(context);
}

static void *context_until_pause(void *arg)
{
        ends_in_pause = true;
        *(int *)arg = worker_context();
        ends_in_pause = false;
        return NULL;
}

/* Another context in a thread that is told to end while it waits for room. */
static int worker_context_ends(void)
{
        int result = 0;
        pthread_t thread;

        if (pthread_create(&thread, NULL, context_until_pause, &result) || pthread_join(thread, NULL))
                return -1;
        return result;
}

static int worker_alloc(size_t mib)
{
        CUdeviceptr ptr;
        int result;

        if (block_count == BLOCKS_MOST)
                return -1;
        result = (int)cuMemAlloc(&ptr, mib * MIB);
        if (result == 0) {
                block_bytes[block_count] = mib * MIB;
                blocks[block_count++] = ptr;
                if (cuMemsetD8(ptr + mib * MIB - 1, 1, 1) || cuCtxSynchronize())
                        fail("memory that cannot be used", (long long)mib);
        }
        return result;
}

/* Blocks that are too small for a segment; they are kept. */
static int worker_alloc_small(size_t mib)
{
        CUdeviceptr ptr;
        int result = 0;

        for (size_t at = 0; at < mib * MIB && result == 0; at += MIB / 32)
                result = (int)cuMemAlloc(&ptr, MIB / 32);
        return result;
}

/* As much passes through a pool of the driver, which keeps it. */
static int worker_fill_pool(size_t mib)
{
        cuuint64_t all = UINT64_MAX;
        CUmemoryPool pool;
        CUdeviceptr ptr;

        if (cuDeviceGetDefaultMemPool(&pool, 0) ||
            cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all) ||
            cuMemAllocAsync(&ptr, mib * MIB, NULL) || cuMemFreeAsync(ptr, NULL))
                return -1;
        return (int)cuCtxSynchronize();
}

static int worker_free_last(void)
{
        return block_count > 0 ? (int)cuMemFree(blocks[--block_count]) : -1;
}

static int worker_free_all(void)
{
        while (block_count > 0)
                if (cuMemFree(blocks[--block_count]))
                        fail("a free failed", block_count);
        return 0;
}

/* Fills all blocks with the value, or, with compare, looks whether they still have it: -2 if not. Some of each MiB. */
static int worker_touch(unsigned value, bool compare)
{
        unsigned char copy[4096];
        int result = 0;

        for (int i = 0; i < block_count; i++)
                for (size_t at = 0; at < block_bytes[i] && result == 0; at += MIB) {
                        result = compare ? (int)cuMemcpyDtoH(copy, blocks[i] + at, sizeof(copy))
                                         : (int)cuMemsetD8(blocks[i] + at, (unsigned char)value, sizeof(copy));
                        for (size_t j = 0; compare && result == 0 && j < sizeof(copy); j++)
                                result = copy[j] == value ? 0 : -2;
                }
        return result ? result : (int)cuCtxSynchronize();
}

/* Works for so long, without a pause in which it could be idle for the library. */
static int worker_run(unsigned ms)
{
        double end_ms = now_ms() + ms;
        CUdeviceptr ptr;
        int result = (int)cuMemAlloc(&ptr, MIB);

        while (result == 0 && now_ms() < end_ms) {
                result = (int)cuMemsetD8Async(ptr, 1, 4096, NULL);
                if (result == 0)
                        result = (int)cuCtxSynchronize();
        }
        return result ? result : (int)cuMemFree(ptr);
}

static unsigned hook_ms; /* what the hook takes */

static int free_all_hook(void *arg, int device, uint64_t want_bytes)
{
        (void)arg;
        (void)device;
        (void)want_bytes;
        pause_ms(hook_ms);
        return worker_free_all();
}

static int look_hook(void *arg, int device, uint64_t want_bytes)
{
        (void)arg;
        (void)device;
        (void)want_bytes;
        worker_open(0);
        return (int)cuCtxSynchronize();
}

/* From now on all is idle: whoever needs it may have it, ms after asking; or, with look_hook, nothing. */
static int worker_register(int (*hook)(void *, int, uint64_t), unsigned ms)
{
        struct gpureclaim_reclaimable mine = {
                .struct_bytes = sizeof(mine), .name = "many", .purge = hook, .limit_ms = CALL_MS};
        gpureclaim_register_function *call;
        uint64_t id;

        hook_ms = ms;
        *(void **)&call = dlsym(RTLD_DEFAULT, "gpureclaim_register");
        return call ? call(&mine, &id) : -1;
}

static int worker_fork(void)
{
        pid_t child = fork();
        int status;

        if (child == 0) {
                CUdeviceptr ptr;

                _exit(cuMemAlloc(&ptr, MIB) == CUDA_SUCCESS); /* the driver refuses a child */
        }
        waitpid(child, &status, 0);
        return status;
}

/* Mapped memory, which needs no context; it is kept. */
static int worker_create(size_t mib)
{
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
        CUmemGenericAllocationHandle handle;
        int result = (int)cuInit(0);

        return result ? result : (int)cuMemCreate(&handle, mib * MIB, &prop, 0);
}

/* Whether any file can be opened from now on; the card's has been. */
static int worker_files(bool any)
{
        struct rlimit limit;
        int rc = (int)cuInit(0);

        if (rc || getrlimit(RLIMIT_NOFILE, &limit))
                return -1;
        limit.rlim_cur = any ? limit.rlim_max : 0;
        return setrlimit(RLIMIT_NOFILE, &limit);
}

static void obey(int in, int out)
{
        struct reply reply;
        unsigned order[2];
        bool open = false;

        orders_in = in;
        replies_out = out;
        while (read(in, order, sizeof(order)) == sizeof(order)) {
                double begin = now_ms();
                size_t free_bytes, total_bytes;

                if (!open && !strchr("dmnpx", (int)order[0])) {
                        worker_open(0);
                        open = true;
                }
                switch (order[0]) {
                case 'd':
                        charge_is_held = true;
                        reply.result = 0;
                        break;
                case 'm':
                        reply.result = worker_create(order[1]);
                        break;
                case 'n':
                        reply.result = worker_files(order[1]);
                        break;
                case 'p':
                        no_threads = !order[1];
                        reply.result = 0;
                        break;
                case 'e':
                        reply.result = order[1] ? worker_context_ends() : worker_context();
                        break;
                case 'o':
                        reply.result = worker_open((int)order[1]);
                        break;
                case 'a':
                        reply.result = worker_alloc(order[1]);
                        break;
                case 'b':
                        reply.result = worker_alloc_small(order[1]);
                        break;
                case 'f':
                        reply.result = worker_free_all();
                        break;
                case 'l':
                        reply.result = worker_free_last();
                        break;
                case 'w':
                        reply.result = worker_touch(order[1], false);
                        break;
                case 'c':
                        reply.result = worker_touch(order[1], true);
                        break;
                case 's':
                        reply.result = (int)atomic_load(&most_pauses);
                        break;
                case 'h':
                        reply.result = worker_register(free_all_hook, order[1]);
                        break;
                case 'i':
                        reply.result = worker_register(look_hook, 0);
                        break;
                case 'r':
                        reply.result = worker_run(order[1]);
                        break;
                case 'k':
                        reply.result = worker_fork();
                        break;
                case 'q':
                        reply.result = worker_fill_pool(order[1]);
                        break;
                case 'g':
                        reply.result = cuMemGetInfo(&free_bytes, &total_bytes) ? -1 : (int)(total_bytes / MIB);
                        break;
                case 't':
                        reply.result = cuDeviceTotalMem(&total_bytes, 0) ? -1 : (int)(total_bytes / MIB);
                        break;
                default:
                        exit(0);
                }
                reply.ms = now_ms() - begin;
                if (write(out, &reply, sizeof(reply)) != sizeof(reply))
                        exit(1);
        }
        exit(0);
}

/* Never the same twice, always within bounds; every call in time. */
static void roam(unsigned seed, int out)
{
        int steps = (int)(seed % 400) + 20;

        worker_open(0);
        for (int i = 0; i < steps; i++) {
                double begin = now_ms(), ms;

                if (rand_r(&seed) % 3 || block_count == BLOCKS_MOST) {
                        int result = worker_alloc(1 + (size_t)rand_r(&seed) % 200);

                        if (result != 0 && result != CUDA_ERROR_OUT_OF_MEMORY)
                                fail("an allocation failed", result);
                        if (result != 0)
                                worker_free_all();
                } else {
                        worker_free_all();
                }
                ms = now_ms() - begin;
                if (ms > *longest_ms)
                        *longest_ms = (unsigned)ms;
                if (ms > CALL_MS && write(out, &(struct reply){-1, ms}, sizeof(struct reply)) < 0)
                        exit(1);
                if (rand_r(&seed) % 8 == 0)
                        pause_ms((unsigned)rand_r(&seed) % 20);
        }
        exit(0);
}

static void write_line(const char *path, const char *format, unsigned number)
{
        int fd = open(path, O_WRONLY | O_CLOEXEC);

        if (fd >= 0) {
                dprintf(fd, format, number);
                close(fd);
        }
}

/* This process waits for a child, which goes on in namespaces of its own, as the first one in a container does. */
static void enter_container(void)
{
        unsigned user = geteuid(), group = getegid();
        int status;
        pid_t pid;

        if (unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID))
                _exit(SKIPPED);
        write_line("/proc/self/setgroups", "deny", 0);
        write_line("/proc/self/uid_map", "0 %u 1", user);
        write_line("/proc/self/gid_map", "0 %u 1", group);
        pid = fork();
        if (pid) {
                waitpid(pid, &status, 0);
                _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
        }
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (mount("proc", "/proc", "proc", 0, NULL))
                _exit(SKIPPED);
}

struct worker start(unsigned seed)
{
        return start_in(seed, false);
}

struct worker start_in(unsigned seed, bool container)
{
        int to[2], from[2];
        struct worker worker;

        if (pipe2(to, O_CLOEXEC) || pipe2(from, O_CLOEXEC))
                fail("no pipe", errno);
        worker.pid = fork();
        if (worker.pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                close(to[1]);
                close(from[0]);
                if (container)
                        enter_container();
                if (seed)
                        roam(seed, from[1]);
                obey(to[0], from[1]);
        }
        close(to[0]);
        close(from[1]);
        worker.to = to[1];
        worker.from = from[0];
        return worker;
}

void tell(struct worker *worker, char order, unsigned argument)
{
        unsigned words[2] = {(unsigned)order, argument};

        if (write(worker->to, words, sizeof(words)) != sizeof(words))
                fail("a worker is gone", errno);
}

struct reply hear(struct worker *worker)
{
        struct pollfd ready = {.fd = worker->from, .events = POLLIN};
        struct reply reply = {0};

        if (poll(&ready, 1, 2 * CALL_MS) != 1 || read(worker->from, &reply, sizeof(reply)) != sizeof(reply))
                fail("a worker does not answer", worker->pid);
        return reply;
}

struct reply ask(struct worker *worker, char order, unsigned argument)
{
        tell(worker, order, argument);
        return hear(worker);
}

/* All its threads stand still: the signal alone may leave one that runs the time for an answer. */
void stop(struct worker *worker)
{
        int status;

        kill(worker->pid, SIGSTOP);
        if (waitpid(worker->pid, &status, WUNTRACED) != worker->pid || !WIFSTOPPED(status))
                fail("a worker cannot be stopped", status);
}

void end(struct worker *worker, int with)
{
        int status;

        if (with)
                kill(worker->pid, with);
        else
                tell(worker, 'x', 0);
        waitpid(worker->pid, &status, 0);
        if (!with && (!WIFEXITED(status) || WEXITSTATUS(status)))
                fail("a worker ended badly", status);
        close(worker->to);
        close(worker->from);
}

const char *region_path(void)
{
        static char path[80];

        snprintf(path, sizeof(path), "%s/region", folder);
        return path;
}

bool has_segment(struct worker *worker)
{
        char path[32], line[512];
        bool found = false;
        FILE *maps;

        snprintf(path, sizeof(path), "/proc/%d/maps", worker->pid);
        maps = fopen(path, "re");
        if (!maps)
                fail("no maps", errno);
        while (!found && fgets(line, sizeof(line), maps))
                found = strstr(line, "/SYSV") != NULL;
        fclose(maps);
        return found;
}

/* The region of the one card; false where there is none. */
bool open_region(struct gr_region *region)
{
        char group[GR_GROUP_NAME_BYTES], uuid[37];
        struct gr_identity self;
        struct dirent *entry;
        bool found = false;
        DIR *list;

        list = opendir(region_path());
        if (!list || gr_platform_identity(&self))
                return false;
        while (!found && (entry = readdir(list)))
                found = gr_region_parse_file_name(entry->d_name, group, uuid) == 0 &&
                        gr_region_open(region, &gr_platform_ops, &self, region_path(), entry->d_name, false) == 0;
        closedir(list);
        return found;
}

unsigned members(struct gr_region *region, bool sweep)
{
        unsigned count = 0;

        if (sweep)
                gr_region_sweep(region);
        for (unsigned i = 0; i < GR_REGION_SLOTS; i++)
                count += atomic_load(&region->map->owners[i]) != 0;
        return count;
}

/* What is really taken from the card: the simulated one's own accounts, nine words per process. */
uint64_t card_used_bytes(void)
{
        static uint64_t *words;
        uint64_t pages = 0;

        if (!words) {
                int fd = open(getenv("GRSIM_SHARED"), O_RDONLY | O_CLOEXEC);

                words = mmap(NULL, 1024 * 72, PROT_READ, MAP_SHARED, fd, 0);
                close(fd);
                if (words == MAP_FAILED)
                        fail("no card", errno);
        }
        for (int i = 0; i < 1024; i++)
                if (__atomic_load_n(&words[9 * i], __ATOMIC_RELAXED))
                        pages += __atomic_load_n(&words[9 * i + 1], __ATOMIC_RELAXED);
        return pages * 2 * MIB;
}

bool file_gone(void)
{
        static struct gr_region region;
        bool open = open_region(&region);

        if (open)
                gr_region_close(&region);
        return !open;
}

/* What all members say that they gave back for others. */

void empty_file(void)
{
        static struct gr_region region;
        char path[GR_REGION_PATH_BYTES + GR_REGION_FILE_BYTES + 1];

        if (!open_region(&region))
                fail("no region", 0);
        snprintf(path, sizeof(path), "%s/%s", region.dir, region.file);
        if (truncate(path, 0))
                fail("the file cannot be emptied", errno);
        gr_region_close(&region);
}

void await_members(struct gr_region *region, unsigned count)
{
        double begin = now_ms();

        for (;;) {
                bool met = open_region(region);

                if (met && members(region, true) == count)
                        return;
                if (met)
                        gr_region_close(region);
                if (now_ms() - begin > 2 * CALL_MS)
                        fail("they do not meet", count);
                pause_ms(10);
        }
}

uint64_t given_mib(void)
{
        static struct gr_region region;
        struct gr_member member;
        uint64_t bytes = 0;

        if (!open_region(&region))
                fail("no region", 0);
        for (unsigned i = 0; i < GR_REGION_SLOTS; i++)
                if (gr_region_read(&region, i, &member) == 0)
                        bytes += member.given_bytes;
        gr_region_close(&region);
        return bytes / MIB;
}
