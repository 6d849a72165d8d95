/*
 * The life of a process with CUDA in it: fork, exec, threads, signals and the ways to end. `process MODE` does one of
 * them; what it prints and its exit status must be the same natively and under the library (process_test.sh).
 */
#include <cuda.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

#define BLOCK ((size_t)3 << 20)
#define MARK  1234 /* an errno that nobody sets */

extern char **environ;

static char *self, plain_mode[] = "plain";

static void open_device(void)
{
        CUcontext context;

        GR_MUST(cuInit(0));
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
}

static CUdeviceptr block(void)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemAlloc(&ptr, BLOCK));
        return ptr;
}

static void *pinned(void)
{
        void *p;

        GR_MUST(cuMemHostAlloc(&p, BLOCK, 0));
        return p;
}

/* Some traffic, so that there is a pool with blocks in it. */
static void work(void)
{
        for (int i = 0; i < 20; i++) {
                CUdeviceptr a = block(), b = block();

                GR_MUST(cuMemFreeHost(pinned()));
                GR_MUST(cuMemFree(a));
                GR_MUST(cuMemFree(b));
        }
}

/* How the child ended, in one line. */
static void wait_for(pid_t child)
{
        int status = 0;

        GR_MUST(waitpid(child, &status, 0) == child ? 0 : errno);
        printf("child: exit %d, signal %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1,
               WIFSIGNALED(status) ? WTERMSIG(status) : 0);
        fflush(stdout);
}

static int fork_with_cuda(void)
{
        CUdeviceptr kept, ptr = 0;
        size_t free_bytes, total_bytes;
        void *host;
        pid_t child;

        open_device();
        kept = block();
        host = pinned();
        work();
        child = fork();
        if (child == 0) {
                printf("in the child: free %d", (int)cuMemFree(kept));
                printf(", alloc %d", (int)cuMemAlloc(&ptr, BLOCK));
                printf(", info %d", (int)cuMemGetInfo(&free_bytes, &total_bytes));
                printf(", free pinned %d\n", (int)cuMemFreeHost(host));
                exit(3); /* with all handlers, the parent's as well */
        }
        wait_for(child);
        work();
        printf("then in the parent: %d\n", (int)cuMemFree(kept));
        return 0;
}

/* A child that no handler of fork has seen, and that ends as its parent would. */
static int fork_raw(void)
{
        pid_t child;

        open_device();
        work();
        child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
        if (child == 0)
                exit(3);
        wait_for(child);
        work();
        printf("then worked\n");
        return 0;
}

/* Many children while other threads allocate: a lock held over fork would stop one of them. */
static _Atomic int busy_stop;

static void *busy(void *arg)
{
        CUcontext context = *(CUcontext *)arg;

        GR_MUST(cuCtxSetCurrent(context));
        while (!busy_stop) {
                CUdeviceptr ptr;
                void *host;

                /* The driver may be going away under us. */
                if (cuMemAlloc(&ptr, BLOCK) == CUDA_SUCCESS)
                        cuMemFree(ptr);
                if (cuMemHostAlloc(&host, BLOCK, 0) == CUDA_SUCCESS)
                        cuMemFreeHost(host);
        }
        return NULL;
}

static CUcontext current_context;

static void start_busy(pthread_t *threads, int count)
{
        GR_MUST(cuCtxGetCurrent(&current_context));
        for (int i = 0; i < count; i++)
                GR_MUST(pthread_create(&threads[i], NULL, busy, &current_context));
}

static int fork_busy(void)
{
        pthread_t threads[3];
        CUdeviceptr kept;

        open_device();
        kept = block();
        start_busy(threads, 3);
        for (int i = 0; i < 20; i++) {
                pid_t child = fork();

                if (child == 0) {
                        CUdeviceptr ptr;

                        alarm(5); /* the sign of a hang */
                        cuMemFree(kept);
                        exit(cuMemAlloc(&ptr, BLOCK) == CUDA_SUCCESS);
                }
                wait_for(child);
        }
        busy_stop = 1;
        for (int i = 0; i < 3; i++)
                pthread_join(threads[i], NULL);
        return (int)cuMemFree(kept);
}

static int only_child(void)
{
        pid_t child = fork();

        if (child == 0) {
                open_device();
                work();
                exit(4);
        }
        wait_for(child);
        return 0;
}

/* Threads of the library that have begun and not ended, and those that ended in a mode in which they disturb captures. */
static _Atomic int library_threads, strict_threads;

struct begun {
        void *(*run)(void *arg);
        void *arg;
};

static void *run_counted(void *arg)
{
        CUresult (*exchange)(CUstreamCaptureMode * mode);
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        struct begun begun = *(struct begun *)arg;
        void *result;

        free(arg);
        result = begun.run(begun.arg);
        /* Not linked with: old drivers lack it. */
        *(void **)&exchange = dlsym(RTLD_DEFAULT, "cuThreadExchangeStreamCaptureMode");
        if (exchange && exchange(&mode) == CUDA_SUCCESS && mode != CU_STREAM_CAPTURE_MODE_RELAXED)
                strict_threads++;
        usleep(10000); /* whoever is to wait for its end, and not for its last words only, is noticed */
        library_threads--;
        return result;
}

/* Stands before the C library's for all libraries of the process. */
__attribute__((visibility("default"))) int pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                                                          void *(*run)(void *arg), void *arg)
{
        static __typeof__(pthread_create) *real;
        struct begun *begun;
        Dl_info caller;
        int rc;

        if (!real)
                *(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
        if (!dladdr(__builtin_return_address(0), &caller) || !strstr(caller.dli_fname, "libgpureclaim"))
                return real(thread, attributes, run, arg);
        begun = malloc(sizeof(*begun));
        if (!begun)
                return EAGAIN;
        *begun = (struct begun){run, arg};
        library_threads++;
        rc = real(thread, attributes, run_counted, begun);
        if (rc) {
                library_threads--;
                free(begun);
        }
        return rc;
}

static void end_by_threads(void)
{
        _exit(library_threads > 0 ? 1 : strict_threads > 0 ? 2 : 0);
}

/*
 * When the driver's own handlers of exit run, the library's threads have ended. It waits for them for a while only, so
 * a busy machine has three tries.
 */
static int threads_end(void)
{
        bool alone = false, strict = false;

        for (int i = 0; i < 3; i++) {
                pid_t child = fork();
                int status = 0;

                if (child == 0) {
                        atexit(end_by_threads); /* before CUDA was touched, so after the library's own handler */
                        open_device();
                        work();
                        exit(0);
                }
                GR_MUST(waitpid(child, &status, 0) == child && WIFEXITED(status) ? 0 : status);
                alone |= WEXITSTATUS(status) != 1;
                strict |= WEXITSTATUS(status) == 2;
        }
        printf("left alone in the end: %d, with captures undisturbed: %d\n", alone, !strict);
        return 0;
}

static bool fork_in_driver;
static int forks_in_driver;

/* Stands before the C library's for the driver, which maps memory by it. */
__attribute__((visibility("default"))) void *mmap(void *at, size_t bytes, int protection, int flags, int file,
                                                  off_t offset)
{
        static __typeof__(mmap) *real;
        Dl_info caller;

        if (!real)
                *(void **)&real = dlsym(RTLD_NEXT, "mmap");
        if (fork_in_driver && dladdr(__builtin_return_address(0), &caller) && strstr(caller.dli_fname, "libcuda")) {
                pid_t child = fork();

                if (child == 0)
                        _exit(0);
                forks_in_driver += waitpid(child, NULL, 0) == child;
        }
        return real(at, bytes, protection, flags, file, offset);
}

/* The driver forks by itself, whatever its caller has locked: natively it does so to load its module. */
static int driver_forks(void)
{
        open_device();
        fork_in_driver = true;
        work();
        fork_in_driver = false;
        printf("it forked: %d\n", forks_in_driver > 0);
        return 0;
}

/* The parent only looks a function up, which leaves CUDA to its children; each is a process of its own. */
static int looked_up(void)
{
        void *driver = dlopen("libcuda.so.1", RTLD_NOW);

        GR_MUST(!driver || !dlsym(driver, "cuMemAlloc_v2"));
        for (int i = 0; i < 2; i++) {
                pid_t child = fork();

                if (child == 0) {
                        open_device();
                        work();
                        exit(4);
                }
                wait_for(child);
        }
        return 0;
}

/* To another folder between the first look-up and the first use. */
static int moved(void)
{
        void *driver = dlopen("libcuda.so.1", RTLD_NOW);

        GR_MUST(!driver || !dlsym(driver, "cuMemAlloc_v2"));
        GR_MUST(chdir("elsewhere"));
        open_device();
        work();
        printf("worked\n");
        return 0;
}

static int own_file;

static void tell_own_file(void)
{
        printf("%ld bytes in its file\n", (long)lseek(own_file, 0, SEEK_END));
}

/* As daemons do, it closes what it did not open itself; its own file then has one of those numbers, to the end. */
static int close_all(int works)
{
        char path[] = "/tmp/gr-process-XXXXXX";

        atexit(tell_own_file); /* before CUDA was touched, so after the library's own handler */
        open_device();
        work();
        for (int fd = 3; fd < 256; fd++)
                close(fd);
        own_file = mkstemp(path);
        GR_MUST(own_file < 0 || unlink(path) || write(own_file, "data", 4) != 4);
        for (int i = 0; i < works; i++)
                work();
        tell_own_file();
        return 0;
}

/* A trace is written before the end. */
static int closes_all(void)
{
        return close_all(100);
}

/* A trace is written at the end. */
static int closes_last(void)
{
        return close_all(0);
}

/* A thread that was told to end goes on to where it lets itself be ended, and leaves no lock behind. */
static _Atomic int cancel_ready, cancel_worked;

static void *cancelled(void *arg)
{
        struct timespec pause = {.tv_nsec = 1000000};

        (void)arg;
        GR_MUST(cuCtxSetCurrent(current_context));
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
        cancel_ready = 1;
        while (cancel_ready != 2)
                nanosleep(&pause, NULL);
        pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
        for (int i = 0; i < 100; i++)
                work();
        cancel_worked = 1;
        pthread_testcancel();
        return NULL;
}

static int cancel(void)
{
        struct timespec pause = {.tv_nsec = 1000000};
        pthread_t thread;
        int state;

        open_device();
        GR_MUST(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state));
        printf("the first thread can be cancelled: %d\n", state == PTHREAD_CANCEL_ENABLE);
        GR_MUST(cuCtxGetCurrent(&current_context));
        GR_MUST(pthread_create(&thread, NULL, cancelled, NULL));
        while (!cancel_ready)
                nanosleep(&pause, NULL);
        GR_MUST(pthread_cancel(thread));
        cancel_ready = 2;
        GR_MUST(pthread_join(thread, NULL));
        printf("ended inside a call: %d\n", !cancel_worked);
        work();
        printf("then worked\n");
        return 0;
}

/* The same in one that makes the process's first use of CUDA. */
static void *cancelled_first(void *arg)
{
        (void)arg;
        pthread_cancel(pthread_self());
        open_device();
        work();
        cancel_worked = 1;
        pthread_testcancel();
        return NULL;
}

static int cancel_first(void)
{
        pthread_t thread;

        GR_MUST(pthread_create(&thread, NULL, cancelled_first, NULL));
        GR_MUST(pthread_join(thread, NULL));
        printf("ended inside a call: %d\n", !cancel_worked);
        fflush(stdout);
        open_device();
        work();
        printf("then worked\n");
        return 0;
}

/* And one that ends the process. */
static void *cancelled_last(void *arg)
{
        (void)arg;
        open_device();
        work();
        pthread_cancel(pthread_self());
        exit(5);
}

static int cancel_last(void)
{
        pthread_t thread;

        GR_MUST(pthread_create(&thread, NULL, cancelled_last, NULL));
        pthread_join(thread, NULL);
        printf("ended inside exit\n");
        return 0;
}

/* For a moment no thread can be made, as at the limit of a container; what needed one then happens later. */
static int no_thread(void)
{
        struct timespec pause = {.tv_nsec = 300000000};
        struct rlimit before, none;
        CUdeviceptr ptrs[16];

        open_device();
        work();
        GR_MUST(getrlimit(RLIMIT_AS, &before));
        for (int round = 0; round < 2; round++) {
                for (int i = 0; i < 16; i++)
                        GR_MUST(cuMemAlloc(&ptrs[i], 2 * BLOCK));
                none = before;
                none.rlim_cur = 0;
                if (round == 0)
                        GR_MUST(setrlimit(RLIMIT_AS, &none));
                for (int i = 0; i < 16; i++)
                        GR_MUST(cuMemFree(ptrs[i]));
                GR_MUST(setrlimit(RLIMIT_AS, &before));
                nanosleep(&pause, NULL);
        }
        printf("worked\n");
        return 0;
}

static int spawn(void)
{
        char *arguments[] = {self, plain_mode, NULL};
        pid_t child;

        open_device();
        work();
        GR_MUST(posix_spawn(&child, self, NULL, NULL, arguments, environ));
        wait_for(child);
        child = vfork();
        if (child == 0) {
                execv(self, arguments);
                _exit(98);
        }
        wait_for(child);
        work();
        return 0;
}

/* A program that preloads something itself: its child is none of ours, unless it says so. */
static int own_preload(void)
{
        char *arguments[] = {self, plain_mode, NULL}, *libraries = getenv("LD_LIBRARY_PATH");
        char preload[] = "LD_PRELOAD=libpthread.so.0", *environment[] = {preload, NULL, NULL};
        pid_t child;

        if (libraries && asprintf(&environment[1], "LD_LIBRARY_PATH=%s", libraries) < 0)
                return 97;
        open_device();
        work();
        GR_MUST(posix_spawn(&child, self, NULL, NULL, arguments, environment));
        wait_for(child);
        free(environment[1]);
        work();
        return 0;
}

/* As plugins come and go: the driver opened once more and closed again between calls, and asked by name each time. */
static int reopened(void)
{
        CUresult (*alloc)(CUdeviceptr *, size_t), (*release)(CUdeviceptr);
        CUdeviceptr kept, ptr;

        open_device();
        kept = block();
        for (int i = 0; i < 20; i++) {
                void *handle = dlopen("libcuda.so.1", i % 2 ? RTLD_NOW | RTLD_LOCAL : RTLD_LAZY | RTLD_GLOBAL);
                void *found = handle ? dlsym(handle, "cuMemAlloc_v2") : NULL;

                GR_MUST(!found);
                memcpy(&alloc, &found, sizeof(alloc));
                found = dlsym(handle, "cuMemFree_v2");
                GR_MUST(!found);
                memcpy(&release, &found, sizeof(release));
                GR_MUST(alloc(&ptr, BLOCK));
                GR_MUST(dlclose(handle));
                /* What was found stays good: the program itself has the driver open. */
                GR_MUST((i % 3 ? release(ptr) : cuMemFree(ptr)));
        }
        printf("then: %d\n", (int)cuMemFree(kept));
        return 0;
}

static int exec(void)
{
        char *arguments[] = {self, plain_mode, NULL};

        open_device();
        work();
        execv(self, arguments);
        return 98;
}

static int exit_busy(void)
{
        pthread_t threads[4];
        struct timespec pause = {.tv_nsec = 20000000};

        open_device();
        start_busy(threads, 4);
        nanosleep(&pause, NULL);
        exit(5);
}

static int end_at_once_busy(void)
{
        pthread_t threads[4];
        struct timespec pause = {.tv_nsec = 20000000};

        open_device();
        start_busy(threads, 4);
        nanosleep(&pause, NULL);
        _exit(6);
}

static int crash_busy(void)
{
        pthread_t threads[4];
        struct timespec pause = {.tv_nsec = 20000000};

        open_device();
        start_busy(threads, 4);
        nanosleep(&pause, NULL);
        raise(SIGSEGV);
        return 0;
}

static void *outlive(void *arg)
{
        struct timespec pause = {.tv_nsec = 50000000};

        (void)arg;
        nanosleep(&pause, NULL);
        GR_MUST(cuCtxSetCurrent(current_context));
        work();
        printf("the last thread is done\n");
        return NULL;
}

static int main_thread_ends(void)
{
        pthread_t thread;

        open_device();
        work();
        GR_MUST(cuCtxGetCurrent(&current_context));
        GR_MUST(pthread_create(&thread, NULL, outlive, NULL));
        pthread_exit(NULL);
}

/* Threads that allocate and end, many times: what they leave behind must not add up to anything. */
static void *short_life(void *arg)
{
        GR_MUST(cuCtxSetCurrent(*(CUcontext *)arg));
        work();
        return NULL;
}

static int count_in(const char *folder)
{
        DIR *entries = opendir(folder);
        int count = 0;

        while (entries && readdir(entries))
                count++;
        if (entries)
                closedir(entries);
        return count;
}

/* The least of several looks: a thread of ours that begins opens a file for a moment. */
static int count_lasting(const char *folder)
{
        int least = count_in(folder);

        for (int i = 0; i < 50; i++) {
                int count = count_in(folder);

                least = count < least ? count : least;
                usleep(1000);
        }
        return least;
}

static int leaks(void)
{
        CUcontext context;
        int fds, tasks;

        open_device();
        work();
        GR_MUST(cuCtxGetCurrent(&context));
        fds = count_lasting("/proc/self/fd");
        tasks = count_in("/proc/self/task");
        for (int i = 0; i < 50; i++) {
                pthread_t thread;

                GR_MUST(pthread_create(&thread, NULL, short_life, &context));
                pthread_join(thread, NULL);
        }
        /* A thread that was joined may still be among the tasks for a moment. */
        for (int i = 0; i < 1000 && count_in("/proc/self/task") > tasks; i++)
                usleep(1000);
        /* One thread more than natively is there from the first free on: the helper; and one for the neighbours. */
        printf("files %d, then %d more; threads: %d more\n", fds, count_lasting("/proc/self/fd") - fds,
               count_in("/proc/self/task") - tasks);
        return 0;
}

/* A signal that every thread of the program blocks, as those do that use sigwait, must not end up with one of ours. */
static int signals(void)
{
        struct timespec limit = {.tv_sec = 5};
        sigset_t set;
        int got;

        sigemptyset(&set);
        sigaddset(&set, SIGUSR1);
        sigaddset(&set, SIGTERM);
        /* The device's own threads have the mask of the thread that started them. */
        pthread_sigmask(SIG_BLOCK, &set, NULL);
        open_device();
        pthread_sigmask(SIG_UNBLOCK, &set, NULL);
        work(); /* our helper starts here, with limits in the environment */
        pthread_sigmask(SIG_BLOCK, &set, NULL);
        for (int i = 0; i < 20; i++) {
                GR_MUST(kill(getpid(), SIGUSR1));
                got = sigtimedwait(&set, NULL, &limit);
                if (got != SIGUSR1)
                        return 7;
        }
        printf("every signal came to the one who waited\n");
        return 0;
}

/* What /proc says of a thread: the blocked signals, 0 where it is gone. */
static unsigned long long blocked_in(const char *tid)
{
        unsigned long long blocked = 0;
        char path[300], line[256];
        FILE *status;

        snprintf(path, sizeof(path), "/proc/self/task/%s/status", tid);
        status = fopen(path, "r");
        while (status && fgets(line, sizeof(line), status))
                if (sscanf(line, "SigBlk: %llx", &blocked) == 1)
                        break;
        if (status)
                fclose(status);
        return blocked;
}

/* The library's thread blocks all but those that nobody can and the two that the C library keeps. */
static int helper_mask(void)
{
        /* But for what cannot be blocked, what the C library keeps for itself, and a thread's own faults. */
        const unsigned long long faults = 1ull << (SIGSEGV - 1) | 1ull << (SIGBUS - 1) | 1ull << (SIGFPE - 1) |
                                          1ull << (SIGILL - 1) | 1ull << (SIGTRAP - 1) | 1ull << (SIGSYS - 1);
        const unsigned long long all = ~(1ull << (SIGKILL - 1) | 1ull << (SIGSTOP - 1) | 3ull << 31 | faults);
        struct timespec pause = {.tv_nsec = 20000000};
        int before_work, others = 0, open_ones = 0, deaf_ones = 0;
        sigset_t before, after;
        struct dirent *entry;
        DIR *tasks;

        open_device();
        before_work = count_in("/proc/self/task");
        pthread_sigmask(SIG_SETMASK, NULL, &before);
        work();
        nanosleep(&pause, NULL);
        pthread_sigmask(SIG_SETMASK, NULL, &after);
        printf("the caller's mask is kept: %d\n", memcmp(&before, &after, sizeof(before)) == 0);

        tasks = opendir("/proc/self/task");
        while (tasks && (entry = readdir(tasks))) {
                if (entry->d_name[0] == '.' || atoi(entry->d_name) == getpid())
                        continue;
                others++;
                if ((blocked_in(entry->d_name) & all) != all)
                        open_ones++;
                if ((blocked_in(entry->d_name) & faults) != 0)
                        deaf_ones++;
        }
        if (tasks)
                closedir(tasks);
        if (dlsym(RTLD_DEFAULT, "gpureclaim_version") && count_in("/proc/self/task") == before_work) {
                printf("no thread of the library's, among %d\n", others);
                return 8;
        }
        printf("threads that take signals: %d, that take no faults: %d\n", open_ones, deaf_ones);
        return 0;
}

/* How many threads there are after up to five seconds in which their number went to or from what it was. */
static int tasks_unlike(int before, int unlike)
{
        int tasks = count_in("/proc/self/task");

        for (int i = 0; i < 5000 && (tasks == before) == unlike; i++) {
                if (unlike)
                        work();
                usleep(1000);
                tasks = count_in("/proc/self/task");
        }
        return tasks;
}

/* The library's thread goes when nothing is left for it, every time, and comes again when there is. */
static int helper_ends(void)
{
        int tasks;

        open_device();
        /* The device's own threads stay, and those that give memory back. The helper has a second to go. */
        for (int i = 0; i < 300; i++) {
                work();
                usleep(1000);
        }
        tasks = count_in("/proc/self/task");
        for (int i = 0; i < 20; i++) {
                int lasting = count_lasting("/proc/self/task");

                tasks = lasting < tasks ? lasting : tasks;
        }
        for (int i = 0; i < 3; i++) {
                if (dlsym(RTLD_DEFAULT, "gpureclaim_version") && tasks_unlike(tasks, 1) == tasks)
                        return 8;
                printf("threads that stay: %d\n", tasks_unlike(tasks, 0) - tasks);
        }
        return 0;
}

#define KEEPS(call)                                                                                                    \
        do {                                                                                                           \
                int keeps_result;                                                                                      \
                                                                                                                       \
                errno = MARK;                                                                                          \
                keeps_result = (int)(call);                                                                            \
                printf("%s: %d, errno %s\n", #call, keeps_result, errno == MARK ? "kept" : "changed");                 \
        } while (0)

static int keeps_errno(void)
{
        CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
        size_t range = 0, size, total;
        unsigned int flags;
        int ordinal;
        void *values[] = {&range, &ordinal};
        CUcontext context, second;
        CUdeviceptr ptr, other;
        CUstream stream;
        CUgraph graph;
        void *found;

        KEEPS(dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") != NULL);
        KEEPS(cuInit(0));
        KEEPS(cuGetProcAddress("cuMemAlloc", &found, 12000, 0, NULL));
        KEEPS(cuDeviceTotalMem(&total, 0));
        KEEPS(cuDevicePrimaryCtxRetain(&context, 0));
        KEEPS(cuCtxSetCurrent(context));
        KEEPS(cuMemGetInfo(&size, &total));
        KEEPS(cuMemAlloc(&ptr, BLOCK));
        KEEPS(cuMemFree(ptr));
        KEEPS(cuMemAlloc(&ptr, BLOCK));
        KEEPS(cuMemFree(ptr + 512));
        KEEPS(cuMemFree(12345));
        KEEPS(cuMemFree(0));
        KEEPS(cuMemAlloc(&other, 0));
        KEEPS(cuMemAlloc(&other, (size_t)1 << 50));
        KEEPS(cuMemAllocPitch(&other, &size, 1000, 100, 4));
        KEEPS(cuMemFree(other));
        KEEPS(cuMemAllocPitch(&other, &size, 1000, 100, 4));
        KEEPS(cuMemGetAddressRange(&other, &size, ptr + 1));
        KEEPS(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ptr));
        KEEPS(cuPointerGetAttributes(2, attributes, values, ptr));
        KEEPS(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        KEEPS(cuMemFreeAsync(ptr, stream));
        KEEPS(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        KEEPS(cuMemAlloc(&ptr, BLOCK));
        KEEPS(cuMemFree(ptr));
        KEEPS(cuStreamEndCapture(stream, &graph));
        KEEPS(cuStreamDestroy(stream));
        KEEPS(cuCtxCreate(&second, NULL, 0, 0));
        KEEPS(cuMemAlloc(&ptr, BLOCK));
        KEEPS(cuCtxDestroy(second));
        KEEPS(cuMemHostAlloc(&found, BLOCK, 0));
        KEEPS(cuMemFreeHost(found));
        KEEPS(cuMemHostAlloc(&found, BLOCK, 0));
        KEEPS(cuMemHostGetFlags(&flags, found));
        KEEPS(cuMemHostGetDevicePointer(&ptr, found, 0));
        KEEPS(cuMemFreeHost(found));
        KEEPS(cuMemFreeHost(found));
        KEEPS(cuMemHostAlloc(&found, (size_t)1 << 46, 0));
        KEEPS(cuDevicePrimaryCtxReset(0));
        KEEPS(cuDevicePrimaryCtxRelease(0));
        return 0;
}

static int plain(void)
{
        bool closed = fcntl(STDIN_FILENO, F_GETFD) < 0;

        open_device();
        work();
        for (int i = 0; closed && fcntl(STDIN_FILENO, F_GETFD) >= 0; i++) {
                if (i == 5000) {
                        printf("standard input is open now\n");
                        break;
                }
                usleep(1000); /* a thread of the library may have a file open for a moment */
        }
        printf("worked\n");
        return 0;
}

/* Of a stream-ordered pool twice more than GPURECLAIM_HARD_LIMIT=64MiB lets the program have, then some. */
static int ordered(void)
{
        CUdeviceptr ptr;

        open_device();
        work();
        for (int i = 0; i < 6; i++)
                if (cuMemAllocAsync(&ptr, (size_t)(i < 2 ? 128 : 1) << 20, NULL) == CUDA_SUCCESS)
                        GR_MUST(cuMemFreeAsync(ptr, NULL));
        GR_MUST(cuStreamSynchronize(NULL)); /* what the pool kept goes back, and the library is not told */
        printf("worked\n");
        return 0;
}

static int two_cards(void)
{
        CUcontext context;

        GR_MUST(cuInit(0));
        for (CUdevice device = 0; device < 2; device++) {
                GR_MUST(cuDevicePrimaryCtxRetain(&context, device));
                GR_MUST(cuCtxSetCurrent(context));
                work();
        }
        printf("worked\n");
        return 0;
}

/* What is freed again, or was never allocated, is refused. */
static int freed_twice(void)
{
        CUdeviceptr ptr;

        open_device();
        ptr = block();
        GR_MUST(cuMemFree(ptr));
        printf("freed again: %d\n", (int)cuMemFree(ptr));
        printf("no memory: %d\n", (int)cuMemFree(ptr + 1));
        return 0;
}

static int end_at_once(void)
{
        plain();
        fflush(stdout);
        _exit(6);
}

static int by_abort(void)
{
        plain();
        fflush(stdout);
        abort();
}

static int by_signal(void)
{
        plain();
        fflush(stdout);
        raise(SIGTERM);
        return 0;
}

static CUdeviceptr kept_until_exit;

static void free_at_exit(void)
{
        printf("free in a handler of exit: %d\n", (int)cuMemFree(kept_until_exit));
}

/* As destructors of global objects do it: registered before CUDA was touched, so run after the library's own. */
static int free_late(void)
{
        atexit(free_at_exit);
        open_device();
        kept_until_exit = block();
        work();
        return 0;
}

int main(int argc, char **argv)
{
        static const struct {
                const char *name;
                int (*run)(void);
        } modes[] = {
                {"plain", plain},
                {"ordered", ordered},
                {"two-cards", two_cards},
                {"freed-twice", freed_twice},
                {"fork", fork_with_cuda},
                {"fork-raw", fork_raw},
                {"fork-busy", fork_busy},
                {"only-child", only_child},
                {"driver-forks", driver_forks},
                {"threads-end", threads_end},
                {"looked-up", looked_up},
                {"moved", moved},
                {"closes-all", closes_all},
                {"closes-last", closes_last},
                {"cancel", cancel},
                {"cancel-first", cancel_first},
                {"cancel-last", cancel_last},
                {"no-thread", no_thread},
                {"spawn", spawn},
                {"exec", exec},
                {"own-preload", own_preload},
                {"dlopen", reopened},
                {"exit-busy", exit_busy},
                {"_exit-busy", end_at_once_busy},
                {"crash-busy", crash_busy},
                {"main-thread-ends", main_thread_ends},
                {"leaks", leaks},
                {"signals", signals},
                {"helper-mask", helper_mask},
                {"helper-ends", helper_ends},
                {"errno", keeps_errno},
                {"_exit", end_at_once},
                {"abort", by_abort},
                {"sigterm", by_signal},
                {"free-late", free_late},
        };

        self = argv[0];
        setvbuf(stdout, NULL, _IOLBF, 0);
        for (size_t i = 0; argc == 2 && i < sizeof(modes) / sizeof(modes[0]); i++)
                if (strcmp(argv[1], modes[i].name) == 0)
                        return modes[i].run();
        fprintf(stderr, "usage: process MODE\n");
        return 2;
}
