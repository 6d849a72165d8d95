/* The process: options at the first CUDA call, the helper thread, fork, and the end. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "log.h"
#include "shim.h"

#define HELPER_GATHER_NS UINT64_C(500000)   /* frees come in crowds: wait for the rest of them */
#define HELPER_MOST_NS   UINT64_C(20000000) /* longest pause between looks at fences that have not passed */
#define HELPER_STOP_NS   200000000          /* longest that the end of the process waits for the helper */

extern char **environ;

struct gr_core gr_core;
struct gr_options gr_options;

static _Atomic bool in_use;
static pid_t owner; /* the process that set up the core; its children after fork do not speak for it */

/* The helper: gives back what the cache holds beyond its limits, so that no thread of the program has to. */
static struct {
        pthread_mutex_t lock; /* guards what follows */
        pthread_cond_t changed;
        pthread_t thread;
        bool running, stop, stopped;
        _Atomic bool wanted; /* set without the lock */
} helper = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static const char *read_environment(const char *name)
{
        return getenv(name);
}

static void warn(const char *message, void *arg)
{
        (void)arg;
        gr_log_set_level(gr_options.log); /* final before the first warning */
        gr_log(GR_LOG_WARN, "%s", message);
}

static void *helper_main(void *arg)
{
        (void)arg;
        gr_capture_relax();
        pthread_mutex_lock(&helper.lock);
        while (!helper.stop) {
                uint64_t pause_ns = HELPER_GATHER_NS;
                bool waiting = true;

                if (!atomic_load(&helper.wanted)) {
                        pthread_cond_wait(&helper.changed, &helper.lock);
                        continue;
                }
                pthread_mutex_unlock(&helper.lock);
                while (waiting && gr_shim_ready()) {
                        gr_driver.sleep_ns(pause_ns);
                        atomic_store(&helper.wanted, false);
                        waiting = gr_core_maintain(&gr_core);
                        if (pause_ns < HELPER_MOST_NS)
                                pause_ns *= 2;
                        pthread_mutex_lock(&helper.lock);
                        waiting &= !helper.stop;
                        pthread_mutex_unlock(&helper.lock);
                }
                pthread_mutex_lock(&helper.lock);
        }
        helper.stopped = true;
        pthread_cond_broadcast(&helper.changed);
        pthread_mutex_unlock(&helper.lock);
        return NULL;
}

/* The helper must not take signals that the program waits for. */
static void helper_start_locked(void)
{
        sigset_t all, before;
        pthread_attr_t attributes;

        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        helper.running = pthread_create(&helper.thread, &attributes, helper_main, NULL) == 0;
        pthread_attr_destroy(&attributes);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void wake(struct gr_core *core)
{
        (void)core;
        if (atomic_load_explicit(&helper.wanted, memory_order_relaxed) || atomic_exchange(&helper.wanted, true))
                return;
        pthread_mutex_lock(&helper.lock);
        if (!helper.running && !helper.stop)
                helper_start_locked();
        pthread_cond_signal(&helper.changed);
        pthread_mutex_unlock(&helper.lock);
}

static void helper_stop(void)
{
        struct timespec until;

        pthread_mutex_lock(&helper.lock);
        helper.stop = true;
        pthread_cond_broadcast(&helper.changed);
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += HELPER_STOP_NS;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        while (helper.running && !helper.stopped)
                if (pthread_cond_timedwait(&helper.changed, &helper.lock, &until) == ETIMEDOUT)
                        break;
        pthread_mutex_unlock(&helper.lock);
}

/* A child after fork has neither our helper nor, by CUDA's rules, a driver to speak to: it goes without us. */
static void in_child(void)
{
        if (atomic_load(&in_use))
                atomic_store(&gr_shim_state, GR_SHIM_OFF);
}

static void write_all(const char *text, size_t length, void *arg)
{
        int fd = *(int *)arg;

        while (length > 0) {
                ssize_t written = write(fd, text, length);

                if (written < 0 && errno == EINTR)
                        continue;
                if (written <= 0)
                        return;
                text += written;
                length -= (size_t)written;
        }
}

static bool refresh_card(struct gr_context *context, void *arg)
{
        uint64_t free_bytes, total_bytes;

        (void)arg;
        if (gr_driver.mem_info(context->handle, &free_bytes, &total_bytes) == 0) {
                atomic_store(&context->device->card_free_bytes, free_bytes);
                atomic_store(&context->device->total_bytes, total_bytes);
                gr_async_refresh(context->device);
        }
        return true;
}

static void write_stats(void)
{
        char path[GR_PATH_BYTES];
        int fd = STDERR_FILENO;

        gr_core_each_context(&gr_core, -1, refresh_card, NULL);
        if (gr_options.stats) {
                char line[64];
                int length = snprintf(line, sizeof(line), "gpureclaim: summary of process %d\n", (int)getpid());

                write_all(line, (size_t)length, &fd);
                gr_stats_text(&gr_core, write_all, &fd);
        }
        if (!gr_options.stats_file.text[0] ||
            gr_path_expand(gr_options.stats_file.text, getpid(), path, sizeof(path)) != 0)
                return;
        fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        if (fd < 0) {
                gr_log(GR_LOG_WARN, "GPURECLAIM_STATS_FILE: cannot write %s: %s", path, strerror(errno));
                return;
        }
        gr_stats_json(&gr_core, GR_VERSION, write_all, &fd);
        close(fd);
}

/* Registered after the driver's own handlers, so it runs before them, while the driver still answers. */
static void at_exit(void)
{
        if (getpid() != owner || !gr_shim_ready())
                return;
        helper_stop();
        if (gr_options.stats || gr_options.stats_file.text[0])
                write_stats();
}

void gr_process_options(void)
{
        gr_options_load(&gr_options, read_environment, environ, warn, NULL);
        gr_log_set_level(gr_options.log);
}

void gr_process_init(void)
{
        struct gr_config config;
        uint64_t host_bytes;

        config = (struct gr_config){.reuse = gr_options.reuse, .pool = gr_options.pool};
        gr_core_init(&gr_core, &gr_driver, &config);
        gr_core.wake = wake;
        host_bytes = gr_size_resolve(&gr_options.host_limit, -1,
                                     (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE), NULL);
        atomic_store(&gr_core.host.hard_bytes, host_bytes == GR_SIZE_NONE ? GR_UNLIMITED : host_bytes);
        owner = getpid();
        pthread_atfork(NULL, NULL, in_child);
}

void gr_process_in_use(void)
{
        if (!atomic_exchange(&in_use, true)) {
                owner = getpid();
                atexit(at_exit);
        }
}
