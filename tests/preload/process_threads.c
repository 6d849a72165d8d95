/* Threads of a process, the program's and the library's: how they end, which signals they take, what they leave. */
#include "process.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Threads of the library that have begun and not ended, and those that ended in a mode that disturbs captures. */
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
int threads_end(void)
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

int main_thread_ends(void)
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

int leaks(void)
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
int signals(void)
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
int helper_mask(void)
{
        /* But for what cannot be blocked, what the C library keeps for itself, and a thread's own faults. */
        const unsigned long long faults = 1ull << (SIGSEGV - 1) | 1ull << (SIGBUS - 1) | 1ull << (SIGFPE - 1) |
                                          1ull << (SIGILL - 1) | 1ull << (SIGTRAP - 1) | 1ull << (SIGSYS - 1);
        const unsigned long long all = ~(1ull << (SIGKILL - 1) | 1ull << (SIGSTOP - 1) | 3ull << 31 | faults);
        int before_work, others, open_ones, deaf_ones, looks = 0;
        sigset_t before, after;
        struct dirent *entry;
        DIR *tasks;

        open_device();
        before_work = count_in("/proc/self/task");
        pthread_sigmask(SIG_SETMASK, NULL, &before);
        work();
        pthread_sigmask(SIG_SETMASK, NULL, &after);
        printf("the caller's mask is kept: %d\n", memcmp(&before, &after, sizeof(before)) == 0);

        /* Until a thread runs, the C library has it block all signals: so for up to five seconds. */
        do {
                others = open_ones = deaf_ones = 0;
                usleep(20000);
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
        } while ((open_ones || deaf_ones) && looks++ < 250);
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
int helper_ends(void)
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
