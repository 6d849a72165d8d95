/* The process: options at the first CUDA call, the background thread, fork, and exit. */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/json.h"
#include "base/log.h"
#include "base/no_cancel.h"
#include "device/device.h"
#include "device/neighbour.h"
#include "device/overhead.h"
#include "driver/mapped_memory.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/context.h"
#include "hooks/segment_export.h"
#include "hooks/stream_ordered.h"
#include "notes/note.h"
#include "process/api.h"
#include "reclaim/trim.h"
#include "system/environment.h"
#include "system/mapped_file.h"
#include "system/messages.h"
#include "system/platform.h"
#include "system/workers.h"

#define BACKGROUND_GATHER_NS UINT64_C(500000)      /* pause before a look: frees come in bursts */
#define BACKGROUND_MOST_NS   UINT64_C(20000000)    /* longest pause between looks at fences that have not passed */
#define WAKE_NS              UINT64_C(10000000000) /* longest wait of a process that wakes for memory */
#define TURN_WAIT_NS         UINT64_C(60000000000) /* the shortest, also of an allocation, with GPURECLAIM_TURN */
#define TURN_WAITS           10                    /* and in turns */
#define BACKGROUND_LOOK_NS   UINT64_C(400000000)   /* longest sleep, as a process left alone ends only after it */
#define BACKGROUND_RETRY_NS  UINT64_C(100000000)   /* pause after a thread could not be made */
#define BACKGROUND_STOP_NS   UINT64_C(200000000)   /* longest wait of the exit for the library's threads */
#define STATS_NS             UINT64_C(1000000000)  /* between two looks whether the file of statistics is current */

static struct gr_parts parts; /* gr_core's */

static _Atomic bool in_use;
static pid_t owner;               /* the process that set up the core; a child after fork writes no reports for it */
static struct gr_path stats_path; /* of GPURECLAIM_STATS_FILE; "": none is wanted, or its name is too long */
static _Atomic bool keeps_stats;  /* the file is kept current; set after the path */

/* The background thread returns what the cache holds beyond its limits, so that no thread of the program has to. */
static struct gr_lock background_lock = GR_LOCK_INIT(GR_RANK_BACKGROUND);
static struct {
        pthread_cond_t changed; /* on the monotonic clock */
        bool running, stop;
} background GR_GUARDED_BY(background_lock);
static _Atomic bool background_wanted;
static _Atomic uint64_t background_retry_ns; /* when to try again, where the thread could not be made; else 0 */

/* The statistics as JSON, to be freed. NULL: there is no room. */
static char *stats_text(size_t *ret_length)
{
        char *text = NULL;
        FILE *file = open_memstream(&text, ret_length);

        if (!file)
                return NULL;
        gr_stats_json(&gr_core, GR_VERSION, gr_sink_file, file);
        if (fclose(file) == 0)
                return text;
        free(text);
        return NULL;
}

/*
 * Writes the file of statistics beside its name and then gives it the name, so that a reader finds a whole one at any
 * time, and what a process that is killed leaves is whole, too. By one write, as the program may close all descriptors
 * meanwhile. 0 or -errno; -EEXIST: what has the name is not to be replaced, such as a link or a file of another user.
 */
static int replace_stats(const char *text, size_t length)
{
        const char *path = stats_path.text;
        char beside[GR_PATH_BYTES + 32];
        struct stat old;
        bool exists = lstat(path, &old) == 0;
        int fd, rc;

        if (exists && (!S_ISREG(old.st_mode) || old.st_uid != geteuid() || old.st_nlink > 1))
                return -EEXIST;
        snprintf(beside, sizeof(beside), "%s.%d.new", path, (int)getpid());
        unlink(beside); /* of a process that was killed */
        fd = gr_message_begin(open(beside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
        if (fd < 0)
                return -errno;
        rc = gr_log_write(fd, text, length, GR_WRITE_WAIT_MS);
        if (!rc && ((exists && fchmod(fd, old.st_mode & 0777) != 0) || rename(beside, path) != 0))
                rc = -errno;
        if (rc)
                unlink(beside);
        gr_message_end(fd);
        return rc;
}

/*
 * Brings the file of statistics up to date, for the case that the process is killed, and does not ask the driver for
 * that. A file that cannot be written is told of at exit. Called by one thread.
 */
static void keep_stats(void)
{
        static char *written;
        static size_t written_length;
        size_t length;
        char *text = stats_text(&length);

        if (text && (!written || length != written_length || memcmp(text, written, length) != 0) &&
            replace_stats(text, length) == 0) {
                free(written);
                written = text;
                written_length = length;
        } else {
                free(text);
        }
}

/* Up to an eighth of a step of decay, at random, so that processes that began together do not wake together. */
static uint64_t decay_jitter_ns(void)
{
        static uint64_t state;

        if (!state)
                state = gr_driver.now_ns() ^ (uint64_t)getpid() << 32;
        state = state * UINT64_C(6364136223846793005) + 1442695040888963407;
        return gr_decay_step_ns(&gr_core) / 8 * (state >> 48) >> 16;
}

/* Shortens a sleep, of which 0 is one without end, so that it ends at this time; 0: at none. */
static void end_sleep_at(uint64_t *sleep_ns, uint64_t at_ns, uint64_t now_ns)
{
        if (at_ns && (!*sleep_ns || at_ns < now_ns + *sleep_ns))
                *sleep_ns = at_ns > now_ns ? at_ns - now_ns : 1;
}

/* A look of the background thread. False: it must leave the driver alone for now. */
static bool look_once(uint64_t *decay_ns, uint64_t *pause_ns)
{
        bool waiting = false;
        uint64_t now_ns;
        GR_OWN_CALLS;

        if (!gr_own_calls)
                return false;
        if (atomic_load(&background_wanted)) {
                gr_driver.sleep_ns(BACKGROUND_GATHER_NS);
                atomic_store(&background_wanted, false);
                if (!*decay_ns)
                        *decay_ns = gr_driver.now_ns();
                *pause_ns = BACKGROUND_GATHER_NS;
        }
        if (gr_shim_ready())
                gr_pool_collect(&gr_core);
        if (gr_shim_ready() && *pause_ns)
                waiting = gr_trim_excess(&gr_core);
        if (!waiting)
                *pause_ns = 0;
        else if (*pause_ns < BACKGROUND_MOST_NS)
                *pause_ns *= 2;
        now_ns = gr_driver.now_ns();
        if (gr_shim_ready() && *decay_ns && now_ns >= *decay_ns) {
                *decay_ns = gr_decay_run(&gr_core, now_ns);
                if (*decay_ns)
                        *decay_ns += decay_jitter_ns();
        }
        return true;
}

/*
 * The background thread. Ends where nothing is cached beyond a limit, nothing decays, and no statistics are kept;
 * wake_background starts it again.
 */
static void *background_main(void *arg)
{
        uint64_t decay_ns = 0, pause_ns = 0; /* time of the next decay; pause before the next look at fences; 0: none */
        uint64_t stats_ns = 1;               /* time of the next statistics, if they are kept */
        bool held = false;                   /* the driver is to be left alone */

        (void)arg;
        gr_operations_relax_captures();
        gr_lock(&background_lock);
        while (!background.stop) {
                bool wanted = atomic_load(&background_wanted);
                uint64_t now_ns = gr_driver.now_ns(), sleep_ns = pause_ns;
                struct timespec until;

                end_sleep_at(&sleep_ns, decay_ns, now_ns);
                end_sleep_at(&sleep_ns, atomic_load(&keeps_stats) ? stats_ns : 0, now_ns);
                if (sleep_ns > BACKGROUND_LOOK_NS)
                        sleep_ns = BACKGROUND_LOOK_NS;
                if (held || (!wanted && sleep_ns)) {
                        until = gr_platform_time_in(CLOCK_MONOTONIC, held ? BACKGROUND_LOOK_NS : sleep_ns);
                        pthread_cond_timedwait(&background.changed, &background_lock.mutex, &until);
                } else if (!wanted) {
                        break;
                }
                if (background.stop || gr_platform_left_alone(gr_workers_running()))
                        break;
                gr_unlock(&background_lock);
                held = !look_once(&decay_ns, &pause_ns);
                now_ns = gr_driver.now_ns();
                if (gr_shim_ready() && atomic_load(&keeps_stats) && now_ns >= stats_ns) {
                        keep_stats();
                        stats_ns = now_ns + STATS_NS;
                }
                gr_lock(&background_lock);
        }
        assert(background.running);
        background.running = false;
        pthread_cond_broadcast(&background.changed);
        gr_unlock(&background_lock);
        return NULL;
}

/* For gr_core.wake. */
static void wake_background(struct gr_core *core)
{
        uint64_t retry_ns = atomic_load_explicit(&background_retry_ns, memory_order_relaxed);

        (void)core;
        if (retry_ns) {
                if (gr_driver.now_ns() < retry_ns)
                        return;
        } else if (atomic_load_explicit(&background_wanted, memory_order_relaxed) ||
                   atomic_exchange(&background_wanted, true)) {
                return;
        }
        gr_lock(&background_lock);
        retry_ns = 0;
        if (!background.running && !background.stop) {
                background.running = gr_workers_start_thread(background_main, NULL);
                if (!background.running) /* no memory, or too many threads: tried again later */
                        retry_ns = gr_driver.now_ns() + BACKGROUND_RETRY_NS;
        }
        atomic_store_explicit(&background_retry_ns, retry_ns, memory_order_relaxed);
        pthread_cond_signal(&background.changed);
        gr_unlock(&background_lock);
}

static void background_stop(void)
{
        struct timespec until;

        gr_lock(&background_lock);
        background.stop = true;
        pthread_cond_broadcast(&background.changed);
        until = gr_platform_time_in(CLOCK_MONOTONIC, BACKGROUND_STOP_NS);
        while (background.running)
                if (pthread_cond_timedwait(&background.changed, &background_lock.mutex, &until) == ETIMEDOUT)
                        break;
        gr_unlock(&background_lock);
}

/* Functions that operations.c calls around calls of the driver, and the driver's operations on its own pools. */

/* Measures driver overhead: kernels launched since the last look may have taken memory for code and local memory. */
static void look_beside(void)
{
        struct gr_context *current = gr_overhead_counted() ? gr_context_current() : NULL;

        if (current)
                gr_overhead_look(current->device, GR_OVERHEAD_AGE_NS);
}

static const struct gr_operations_callbacks callbacks = {
        .taking = gr_neighbour_retry, .taken = look_beside, .going_on = gr_neighbour_beat};

static void refresh_pools(int device)
{
        assert(device >= 0 && device < GR_DEVICES_MAX);
        gr_stream_ordered_refresh(&gr_core.devices[device]);
}

static void trim_pools(void *context, int device)
{
        CUcontext left;
        GR_NO_CANCEL; /* the caller visits the context, and may hold a lock */

        assert(context && device >= 0 && device < GR_DEVICES_MAX);
        if (gr_real.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS)
                return;
        gr_stream_ordered_trim(&gr_core.devices[device]);
        gr_real.cuCtxPopCurrent_v2(&left);
        /* The trim may also have freed code and stacks. The figure falls only at the second look (overhead.c). */
        for (int i = 0; i < 2 && gr_overhead_counted(); i++)
                gr_overhead_look(&gr_core.devices[device], 0);
}

/* A child after fork has no background thread and, by CUDA's rules, no usable driver: the library is off there. */
static void in_child(void)
{
        if (atomic_load(&in_use)) {
                atomic_store(&gr_shim_state, GR_SHIM_OFF);
                gr_api_forget();
        }
        gr_neighbour_forget();
        gr_segment_export_forget();
}

/* A report. After the first error nothing more is written. */
struct report {
        int fd, error; /* 0 or -errno */
};

static void write_part(const char *text, size_t length, void *arg)
{
        struct report *report = arg;

        if (!report->error)
                report->error = gr_log_write(report->fd, text, length, GR_WRITE_WAIT_MS);
}

static bool refresh_for_report(struct gr_context *context, void *arg)
{
        uint64_t free_bytes, total_bytes;

        (void)arg;
        if (gr_driver.mem_info(context->handle, &free_bytes, &total_bytes) == 0) {
                atomic_store(&context->device->free_bytes, free_bytes);
                atomic_store(&context->device->total_bytes, total_bytes);
                gr_stream_ordered_refresh(context->device);
                gr_overhead_look(context->device, GR_OVERHEAD_AGE_NS);
        }
        return true;
}

/*
 * Opens and empties the file of GPURECLAIM_STATS_FILE. Non-blocking, because a FIFO without a reader must not stop the
 * program. The descriptor never has the number of a standard stream, because the program's output would go to the
 * file. -1: failed, and the log has said why.
 */
static int open_report(const char *path)
{
        int fd = gr_message_off_streams(
                open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0666));

        if (fd < 0)
                gr_log(GR_LOG_WARN, "GPURECLAIM_STATS_FILE: cannot write %s: %s", path,
                       errno == ENXIO ? "no process reads from it" : strerror(errno));
        return fd;
}

/* In a deep sleep the figures are those of before. */
static void refresh_all(void)
{
        GR_OWN_CALLS;

        if (gr_own_calls)
                gr_context_each(&gr_core, -1, refresh_for_report, NULL);
}

static void write_stats(void)
{
        struct report report = {.fd = STDERR_FILENO};
        size_t length;
        char *text;
        int rc;

        refresh_all();
        if (gr_options.stats) {
                char line[64];

                length = (size_t)snprintf(line, sizeof(line), "gpureclaim: summary of process %d\n", (int)getpid());
                write_part(line, length, &report);
                gr_stats_text(&gr_core, write_part, &report);
        }
        if (!stats_path.text[0])
                return;
        text = stats_text(&length);
        rc = text ? replace_stats(text, length) : -ENOMEM;
        free(text);
        if (rc == 0)
                return;
        /* No file can be made beside it, or it is none: a device, say, or a link. */
        report.fd = open_report(stats_path.text);
        if (report.fd < 0)
                return;
        report.error = 0;
        gr_stats_json(&gr_core, GR_VERSION, write_part, &report);
        if (report.error)
                gr_log(GR_LOG_WARN, "GPURECLAIM_STATS_FILE: writing %s failed: %s", stats_path.text,
                       strerror(-report.error));
        close(report.fd);
}

/* Registered after the driver's own exit handlers, so it runs before them, while the driver still answers. */
static void at_exit(void)
{
        int ready = GR_SHIM_READY;
        GR_NO_CANCEL; /* or the process would not exit */

        if (getpid() != owner || !gr_shim_ready())
                return;
        gr_sleep_end();
        gr_worker_stop(BACKGROUND_STOP_NS);
        background_stop();
        gr_neighbour_leave();
        gr_segment_export_stop();
        gr_workers_join_threads(BACKGROUND_STOP_NS);
        gr_note_ending();
        if (gr_options.stats || gr_options.stats_file.text[0])
                write_stats();
        gr_note_end();
        atomic_compare_exchange_strong(&gr_shim_state, &ready, GR_SHIM_ENDING);
}

/* Called when a device is about to be used: the first call opens the files of notes/ and registers at_exit. */
static void note_use(void)
{
        GR_NO_CANCEL; /* no other thread would do the rest */

        if (!atomic_exchange(&in_use, true)) {
                owner = getpid();
                gr_note_init();
                if (gr_options_expand_path(gr_options.stats_file.text, owner, 1, stats_path.text,
                                           sizeof(stats_path.text)) == 0)
                        gr_environment_make_absolute(&stats_path);
                atexit(at_exit);
                /* Under a name that is not absolute there would be one in each folder that the program goes to. */
                atomic_store(&keeps_stats, stats_path.text[0] == '/');
                if (atomic_load(&keeps_stats))
                        wake_background(&gr_core);
        }
}

/* GPURECLAIM_TURN; 0: off. */
static uint64_t turn_ns(void)
{
        return gr_option_word(&gr_option_table[GR_OPTION_TURN], gr_options.turn) ? 0 : gr_options.turn;
}

/* GPURECLAIM_WAIT; where that is not set, the usual time, or one in which several others have had their turns. */
static uint64_t wait_ns(uint64_t usual_ns)
{
        if (gr_options.source[GR_OPTION_WAIT] != GR_FROM_DEFAULT)
                return gr_options.wait;
        return turn_ns() ? gr_max(TURN_WAIT_NS, TURN_WAITS * gr_min(turn_ns(), INT64_MAX / 4 / TURN_WAITS)) : usual_ns;
}

/* Whether GPURECLAIM_SLEEP_DIR names a folder that can be used, which is made absolute. */
static bool is_for_sleep(struct gr_path *folder)
{
        int rc = folder->text[0] ? gr_mapped_file_on_disk(folder) : 0;

        if (rc < 0)
                gr_log(GR_LOG_WARN, "GPURECLAIM_SLEEP_DIR: %s: %s; not used", folder->text, strerror(-rc));
        else if (rc == 0 && folder->text[0])
                gr_log(GR_LOG_WARN, "GPURECLAIM_SLEEP_DIR: %s: its files are in memory; not used", folder->text);
        return rc > 0;
}

/*
 * The debug aids look at freed memory by themselves, so with them it has to be there. What puts the process to sleep is
 * the thread that serves neighbours.
 */
static void allow_sleep(uint64_t memory_bytes)
{
        static struct gr_path folder;
        uint64_t host_bytes = gr_size_resolve(&gr_options.sleep_host, -1, memory_bytes, NULL);
        struct gr_sleep_config config = {.host_bytes = host_bytes == GR_SIZE_NONE ? UINT64_MAX : host_bytes,
                                         .turn_ns = turn_ns(),
                                         .wait_ns = wait_ns(WAKE_NS)};

        if (gr_options.sleep == GR_SLEEP_OFF && gr_options.source[GR_OPTION_SLEEP] != GR_FROM_DEFAULT && config.turn_ns)
                gr_log(GR_LOG_WARN, "GPURECLAIM_TURN: not with GPURECLAIM_SLEEP=off");
        if (gr_options.sleep == GR_SLEEP_OFF &&
            (gr_options.source[GR_OPTION_SLEEP] != GR_FROM_DEFAULT || !config.turn_ns))
                return;
        if (gr_options.fill != GR_BYTE_NONE || gr_options.guard ||
            gr_options.source[GR_OPTION_QUARANTINE] != GR_FROM_DEFAULT)
                gr_log(GR_LOG_WARN, "GPURECLAIM_SLEEP: not with GPURECLAIM_FILL, GUARD or QUARANTINE");
        else if (!gr_options.neighbour)
                gr_log(GR_LOG_WARN, "GPURECLAIM_SLEEP: not with GPURECLAIM_NEIGHBOUR=0, as no thread is there for it");
        else {
                folder = gr_options.sleep_dir;
                if (is_for_sleep(&folder))
                        config.folder = &folder;
                gr_sleep_init(&config);
        }
}

/* Sets up the core; called once, when the driver's functions are known (GR_SET_UP_BY). */
static void set_up(void)
{
        struct gr_config config;
        pthread_condattr_t monotonic;
        uint64_t memory_bytes, host_bytes;

        pthread_condattr_init(&monotonic);
        pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
        pthread_cond_init(&background.changed, &monotonic);
        pthread_condattr_destroy(&monotonic);
        config = (struct gr_config){.reuse = gr_options.reuse,
                                    .pool = gr_options.pool,
                                    .graph_arena = gr_options.graph_arena,
                                    .decay_ns = gr_options.decay,
                                    .wait_ns = wait_ns(0),
                                    .in_order = true,
                                    .wait_for_others_only = gr_options.source[GR_OPTION_WAIT] == GR_FROM_DEFAULT,
                                    .proactive = gr_options.proactive,
                                    .malloc_trim = gr_options.malloc_trim};
        if (config.graph_arena == GR_GRAPH_SHARED && config.pool != GR_POOL_AUTO && config.pool != GR_POOL_SPLIT) {
                gr_log(GR_LOG_WARN,
                       "GPURECLAIM_GRAPH_ARENA=shared needs GPURECLAIM_POOL=auto or split: private instead");
                config.graph_arena = GR_GRAPH_PRIVATE;
        }
        gr_operations_init(&callbacks);
        gr_mapped_init();
        gr_driver.refresh_pools = refresh_pools;
        gr_driver.trim_pools = trim_pools;
        gr_driver.trim_host_pools = gr_stream_ordered_trim_host;
        gr_device_init(note_use);
        gr_core_init(&gr_core, &parts, &gr_driver, &config);
        gr_core.wake = wake_background;
        memory_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
        host_bytes = gr_size_resolve(&gr_options.pinned_limit, -1, memory_bytes, NULL);
        gr_budget_set_limit(gr_core.host, GR_LIMIT_HARD, host_bytes == GR_SIZE_NONE ? GR_UNLIMITED : host_bytes);
        host_bytes = gr_size_resolve(&gr_options.pinned_cache, -1, memory_bytes, NULL);
        if (gr_options.pool == GR_POOL_NONE)
                host_bytes = 0;
        gr_budget_set_limit(gr_core.host, GR_LIMIT_THRESHOLD, host_bytes == GR_SIZE_NONE ? GR_UNLIMITED : host_bytes);
        gr_api_init();
        allow_sleep(memory_bytes);
        if (gr_options.neighbour) {
                gr_core.ask_neighbours = gr_neighbour_ask;
                gr_core.wait_for_neighbours = gr_neighbour_wait;
                gr_core.may_give = gr_neighbour_may_give;
                gr_core.let_first = gr_neighbour_let_first;
                gr_core.pause = gr_sleep_pause;
                gr_core.served = gr_sleep_begin_turn;
        }
        owner = getpid();
        gr_log(GR_LOG_INFO, "active: version %s, pool kind %s", GR_VERSION, gr_options_pool_words[gr_options.pool]);
}

GR_SET_UP_BY(set_up, in_child);
