/*
 * The life of a process with CUDA in it: fork, exec, threads, signals and the ways to end. `process MODE` does one of
 * them; what it prints and its exit status must be the same natively and under the library (process_test.sh).
 */
#include "process.h"

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

#define MARK 1234 /* an errno that nobody sets */

extern char **environ;

static char *self, plain_mode[] = "plain";

void open_device(void)
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

void work(void)
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

CUcontext current_context;

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
        GR_MUST(chdir(".."));
        printf("worked\n");
        return 0;
}

static int own_file;

static void tell_own_file(void)
{
        printf("%ld bytes in its file\n", (long)lseek(own_file, 0, SEEK_END));
}

/* As daemons do, it closes what it did not open itself; its own file then has one of those numbers, to the end. */
static int closes_all(void)
{
        char path[] = "/tmp/gr-process-XXXXXX";

        atexit(tell_own_file); /* before CUDA was touched, so after the library's own handler */
        open_device();
        work();
        for (int fd = 3; fd < 256; fd++)
                close(fd);
        own_file = mkstemp(path);
        GR_MUST(own_file < 0 || unlink(path) || write(own_file, "data", 4) != 4);
        for (int i = 0; i < 500; i++)
                work();
        tell_own_file();
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

/* Threads allocate and free until the process ends. */
static void begin_busy(void)
{
        pthread_t threads[4];
        struct timespec pause = {.tv_nsec = 20000000};

        open_device();
        start_busy(threads, 4);
        nanosleep(&pause, NULL);
}

static int exit_busy(void)
{
        begin_busy();
        exit(5);
}

static int end_at_once_busy(void)
{
        begin_busy();
        _exit(6);
}

static int crash_busy(void)
{
        begin_busy();
        raise(SIGSEGV);
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

/* Works and then waits to be killed; the output is as that of plain. */
__attribute__((noreturn)) static int waits(void)
{
        plain();
        fflush(stdout);
        for (;;)
                pause();
}

/* The same, and never stops to work. */
__attribute__((noreturn)) static int works(void)
{
        plain();
        fflush(stdout);
        for (;;) {
                GR_MUST(cuMemFree(block()));
                usleep(1000);
        }
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
                {"waits", waits},
                {"works", works},
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
