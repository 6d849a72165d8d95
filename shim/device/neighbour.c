/*
 * The other processes on the device. For each device that this process uses, one thread publishes what the process has,
 * and serves the requests of neighbours: to return memory, to change a limit. It is a thread of its own because it has
 * to answer within the deadline of the asking process, whatever else this process does.
 */
#include "device/neighbour.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/log.h"
#include "base/no_cancel.h"
#include "base/size.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "reclaim/trim.h"
#include "system/environment.h"
#include "system/platform.h"
#include "system/workers.h"

#define PUBLISH_NS    UINT64_C(50000000)  /* pause between looks while something changes */
#define QUIET_NS      UINT64_C(400000000) /* longest pause while nothing changes */
#define GIVE_NS       UINT64_C(80000000)  /* longest that a neighbour's request waits for the GPU */
#define GIVE_PAUSE_NS UINT64_C(500000)
#define STOP_NS       200000000            /* the longest that the exit waits for the threads */
#define RETRY_NS      UINT64_C(1000000000) /* pause after a region could not be opened, or a thread be made */
#define OTHERS_NAMED  3                    /* in the explanation of a failed allocation */
#define JOIN_TRIES    4                    /* the file may be removed between opening and joining */

struct member {
        struct gr_device *device; /* NULL: nothing is charged yet, or this device counts for no group */
        struct gr_group group;
        uint64_t group_limit;
        char file[GR_REGION_FILE_BYTES]; /* empty until the device is known */
        _Atomic bool tried, running, stop;
        struct gr_lock account_lock; /* rank GR_RANK_REGION; held by each charge and wait, and while region changes */
        uint64_t alone_bytes;        /* charged while there was no region; guarded by account_lock */
        /* NULL: the process works alone. A former region is never freed: another thread may still read it. */
        struct gr_region *_Atomic region;
};

static struct member members[GR_DEVICES_MAX];
static _Thread_local struct member *serving; /* set in a thread that serves a device */
static _Thread_local unsigned waiting;       /* > 0: this thread's allocation waits for neighbours, and asks again */

static struct gr_lock all_lock = GR_LOCK_INIT(GR_RANK_NEIGHBOUR);
static struct {
        pthread_cond_t changed;
        unsigned threads;
} all GR_GUARDED_BY(all_lock) = {.changed = PTHREAD_COND_INITIALIZER};
static _Atomic uint64_t retry_ns; /* when to try again, where a thread could not be made; else 0 */

/* Account lock held. The region that charges go to until the lock is released; NULL: none. */
static struct gr_region *charged_region(struct member *member)
{
        gr_assert_locked(&member->account_lock);
        return atomic_load(&member->region);
}

/* Account lock held. */
static void count_in_region(struct member *member, uint64_t bytes)
{
        struct gr_region *region = charged_region(member);

        if (region)
                gr_region_adjust(region, (int64_t)bytes);
        else
                member->alone_bytes += bytes;
}

/* What all members have reserved; without a region, what this process has. */
static uint64_t group_sum(struct member *member)
{
        struct gr_region *region = atomic_load(&member->region);

        return region ? gr_region_sum(region, false) : atomic_load(&member->device->reserved_bytes);
}

static int group_reserve(void *arg, uint64_t bytes)
{
        struct member *member = arg;
        struct gr_region *region;
        int rc;

        gr_lock(&member->account_lock);
        region = charged_region(member);
        rc = region ? gr_region_reserve(region, bytes, member->group_limit) : -ENOTCONN;
        /* Without membership the limit holds for this process alone. The bytes are in reserved_bytes already. */
        if (rc == -ENOTCONN) {
                rc = atomic_load(&member->device->reserved_bytes) <= member->group_limit ? 0 : -EDQUOT;
                if (rc == 0)
                        count_in_region(member, bytes);
        }
        gr_unlock(&member->account_lock);
        return rc;
}

static void group_adjust(void *arg, int64_t bytes)
{
        struct member *member = arg;

        gr_lock(&member->account_lock);
        count_in_region(member, (uint64_t)bytes);
        gr_unlock(&member->account_lock);
}

static uint64_t group_room(void *arg)
{
        struct member *member = arg;
        uint64_t sum;

        if (member->group_limit == GR_UNLIMITED)
                return GR_UNLIMITED;
        sum = group_sum(member);
        return member->group_limit > sum ? member->group_limit - sum : 0;
}

static uint64_t group_excess(void *arg)
{
        struct member *member = arg;
        uint64_t sum;

        if (member->group_limit == GR_UNLIMITED)
                return 0;
        sum = group_sum(member);
        return sum > member->group_limit ? sum - member->group_limit : 0;
}

static void group_others(void *arg, char *ret_text, size_t text_bytes)
{
        struct member *member = arg;
        struct gr_region *region = atomic_load(&member->region);
        struct gr_member top[OTHERS_NAMED] = {0}, other;
        char size[GR_SIZE_TEXT_BYTES], pid[16];
        size_t used = 0;

        ret_text[0] = '\0';
        for (unsigned slot = 0; region && slot < GR_REGION_SLOTS; slot++) {
                if ((int)slot == atomic_load(&region->slot) || gr_region_read(region, slot, &other) != 0)
                        continue;
                for (int i = 0; i < OTHERS_NAMED; i++)
                        if (other.reserved_bytes > top[i].reserved_bytes) {
                                struct gr_member less = top[i];

                                top[i] = other;
                                other = less;
                        }
        }
        for (int i = 0; i < OTHERS_NAMED && top[i].reserved_bytes > 0 && used < text_bytes; i++) {
                snprintf(pid, sizeof(pid), "%u", top[i].identity.pid);
                used += (size_t)snprintf(ret_text + used, text_bytes - used, "%s%s %s has %s", i > 0 ? ", " : "",
                                         top[i].name, pid, gr_size_format(top[i].reserved_bytes, size, sizeof(size)));
        }
}

static int region_dir(bool create, char dir[GR_REGION_PATH_BYTES])
{
        if (!gr_options.region_dir.text[0])
                return gr_region_default_dir(create, dir, GR_REGION_PATH_BYTES);
        memcpy(dir, gr_options.region_dir.text, GR_REGION_PATH_BYTES);
        return 0;
}

static int name_file(struct member *member)
{
        CUuuid uuid;

        if (member->file[0])
                return 0;
        if (!gr_real_uuid(member->device->ordinal, &uuid, NULL))
                return -ENODEV;
        return gr_region_file_name(gr_options.group.text, (const uint8_t *)uuid.bytes, member->file,
                                   sizeof(member->file));
}

/* Opens a region and joins it. NULL: failed, -errno in *ret_rc. */
static struct gr_region *open_region(struct member *member, int *ret_rc)
{
        char dir[GR_REGION_PATH_BYTES];
        struct gr_identity self;
        struct gr_region *region;
        int rc = name_file(member);

        if (rc == 0)
                rc = gr_platform_identity(&self);
        if (rc == 0)
                rc = region_dir(true, dir);
        region = rc ? NULL : calloc(1, sizeof(*region));
        if (!region) {
                *ret_rc = rc ? rc : -ENOMEM;
                return NULL;
        }
        for (int i = 0; i < JOIN_TRIES; i++) {
                rc = gr_region_open(region, &gr_platform_ops, &self, dir, member->file, true);
                if (rc)
                        break;
                rc = gr_region_join(region, program_invocation_short_name, (uint32_t)gr_options.share);
                if (rc == 0)
                        return region;
                gr_region_close(region);
        }
        free(region);
        *ret_rc = rc;
        return NULL;
}

struct give {
        uint64_t want_bytes, back_bytes;
        enum gr_rung rung;
        bool waiting;
};

/* One context suffices: a rung covers the whole device. */
static bool give_from(struct gr_context *context, void *arg)
{
        struct give *give = arg;
        struct gr_device *device = context->device;
        uint64_t before = atomic_load(&device->reserved_bytes), after, bytes;

        assert(give->back_bytes < give->want_bytes); /* run_rung has checked it */
        bytes = gr_rung_run(context, give->rung, give->want_bytes - give->back_bytes);

        /* What reclaimables free into the cache is counted by the rung that returns it. */
        if (give->rung == GR_RUNG_PURGE || give->rung == GR_RUNG_DROP) {
                after = atomic_load(&device->reserved_bytes);
                bytes = before > after ? before - after : 0;
        }
        give->back_bytes += bytes;
        return false;
}

static bool look_for_waiting(struct gr_context *context, void *arg)
{
        struct give *give = arg;

        give->waiting |= gr_fence_waiting(context->fence);
        return !give->waiting;
}

static void run_rung(struct member *member, struct give *give, enum gr_rung rung)
{
        if (give->back_bytes >= give->want_bytes)
                return;
        give->rung = rung;
        gr_context_each(&gr_core, member->device->ordinal, give_from, give);
}

/*
 * Gives memory back for a neighbour's request: idle memory at once, then what becomes idle within GIVE_NS, then what
 * the driver's own pools keep unused. No thread of the program waits meanwhile. Returns how many bytes.
 */
static uint64_t give_to_neighbour(struct member *member, const struct gr_request *request)
{
        struct give give = {.want_bytes = request->want_bytes};
        uint64_t until_ns;
        GR_OWN_CALLS;

        if (!gr_own_calls) /* nothing of it can leave now */
                return 0;
        run_rung(member, &give, GR_RUNG_TRIM);
        if (gr_sleep_is_asleep()) /* what the program would free first has to come back */
                return give.back_bytes;
        run_rung(member, &give, GR_RUNG_PURGE);
        run_rung(member, &give, GR_RUNG_TRIM); /* returns what the purges have freed */
        for (enum gr_rung rung = GR_RUNG_DRIVER; rung <= GR_RUNG_DROP && rung <= request->rung; rung++)
                run_rung(member, &give, rung);
        /* The time begins here, so that memory freed by a slow purge or drop still has time to become idle. */
        until_ns = gr_driver.now_ns() + GIVE_NS;
        while (give.back_bytes < give.want_bytes && gr_budget_cached(member->device) > 0 &&
               gr_driver.now_ns() < until_ns && !atomic_load(&member->stop)) {
                give.waiting = false;
                gr_context_each(&gr_core, member->device->ordinal, look_for_waiting, &give);
                run_rung(member, &give, GR_RUNG_TRIM);
                if (!give.waiting)
                        break;
                gr_driver.sleep_ns(GIVE_PAUSE_NS);
        }
        if (request->rung < GR_RUNG_DRIVER) /* the last means, as it takes all that the driver keeps for the program */
                run_rung(member, &give, GR_RUNG_DRIVER);
        return give.back_bytes;
}

static bool refresh_device(struct gr_context *context, void *arg)
{
        uint64_t free_bytes, total_bytes;

        (void)arg;
        if (gr_driver.mem_info(context->handle, &free_bytes, &total_bytes) != 0)
                return true;
        atomic_store(&context->device->free_bytes, free_bytes);
        return false;
}

static void obey_request(struct member *member, const struct gr_request *request)
{
        struct gr_device *device = member->device;
        GR_OWN_CALLS;

        if (request->orders & GR_ORDER_LIMIT && request->new_limit > 0) {
                gr_budget_set_limit(device, GR_LIMIT_HARD, request->new_limit);
                if (gr_own_calls)
                        gr_driver.refresh_pools(device->ordinal); /* without a limit they grow uncounted */
                gr_trace_add(GR_ENTRY_LIMIT, device->ordinal, 0, 0, request->new_limit);
                gr_log(GR_LOG_INFO, "device %d: hard limit changed by another process", device->ordinal);
        }
        if (request->orders & GR_ORDER_THRESHOLD) {
                gr_budget_set_limit(device, GR_LIMIT_THRESHOLD, request->new_threshold);
                gr_trace_add(GR_ENTRY_LIMIT, device->ordinal, 1, 0, request->new_threshold);
                gr_log(GR_LOG_INFO, "device %d: release threshold changed by another process", device->ordinal);
        }
        /* What still waits for its fence is left to the background thread. */
        if (request->orders & (GR_ORDER_LIMIT | GR_ORDER_THRESHOLD) && (!gr_own_calls || gr_trim_excess(&gr_core)))
                gr_core.wake(&gr_core);
}

/* Shows the others what the process has on the device, and from when on they may put it to sleep. */
static void publish(struct member *member, struct gr_region *region, bool changed)
{
        uint64_t figures[GR_FIGURE_COUNT], from_ns = gr_sleep_offer(member->device->ordinal);

        gr_figures_of_device(member->device, figures);
        if (from_ns != GR_SLEEP_UNKNOWN)
                gr_region_offer_sleep(region, from_ns);
        gr_region_publish(region, figures, changed);
}

static void refresh(struct member *member)
{
        GR_OWN_CALLS;

        if (gr_own_calls)
                gr_context_each(&gr_core, member->device->ordinal, refresh_device, NULL);
}

static void serve_one(struct member *member, struct gr_region *region)
{
        struct gr_request request;
        uint64_t given = 0;

        if (!gr_region_take(region, &request))
                return;
        obey_request(member, &request);
        if (request.orders & GR_ORDER_SLEEP_DEEP)
                gr_region_refuse_deep(region, gr_sleep_deeply());
        else if (request.orders & GR_ORDER_SLEEP)
                given = gr_sleep_begin(member->device->ordinal, 0);
        else if (request.orders & GR_ORDER_SLEEP_OFFER && !gr_region_waits_first(region))
                given = gr_sleep_yield(member->device->ordinal);
        if (given == 0 && request.want_bytes > 0) /* another process may ask for that at the same time */
                given = give_to_neighbour(member, &request);
        if (request.orders & GR_ORDER_REFRESH)
                refresh(member);
        publish(member, region, false);
        gr_region_answer(region, &request, given);
}

/*
 * Joins a new region. Called again where the file was removed, where another process took the slot because this one was
 * stopped for long, or where there was no free slot. NULL: failed, -errno in *ret_rc.
 */
static struct gr_region *join_region(struct member *member, int *ret_rc)
{
        struct gr_region *region = open_region(member, ret_rc), *old;

        if (!region)
                return NULL;
        gr_lock(&member->account_lock);
        old = charged_region(member);
        assert(region != old);
        /* Not the device's reserved_bytes: a charge that is in progress may be in it, but not yet in the group. */
        if (old)
                gr_region_carry(region, old);
        else
                gr_region_adjust(region, (int64_t)member->alone_bytes);
        atomic_store(&member->region, region);
        gr_unlock(&member->account_lock);
        return region;
}

static bool add_fence_freed(struct gr_context *context, void *arg)
{
        *(uint64_t *)arg += gr_fence_freed_bytes(context->fence);
        return true;
}

/* A number that changes whenever the program allocates or frees, but not when the cache returns memory. */
static uint64_t sum_activity(struct member *member)
{
        uint64_t sum = gr_budget_live(member->device) + atomic_load(&member->device->peak_reserved_bytes);

        gr_context_each(&gr_core, member->device->ordinal, add_fence_freed, &sum);
        return sum;
}

/* GPURECLAIM_SLEEP with a time: puts the process to sleep when it has been idle for that long. */
static void sleep_in_time(struct member *member)
{
        if (!gr_option_word(&gr_option_table[GR_OPTION_SLEEP], gr_options.sleep))
                gr_sleep_begin(member->device->ordinal, gr_options.sleep);
}

/* Whether the library's own threads are all that is left of the process. */
static bool left_alone(void)
{
        return gr_platform_left_alone(gr_workers_running());
}

/* Tries to join until it succeeds, as the cause of a failure may go away. NULL: this thread is to end. */
static struct gr_region *join_late(struct member *member)
{
        struct gr_region *region = atomic_load(&member->region);
        struct timespec until;
        int rc;

        while (!region && !atomic_load(&member->stop) && !left_alone()) {
                region = join_region(member, &rc);
                if (region) {
                        gr_log(GR_LOG_INFO, "device %d: other processes are seen from now on", member->device->ordinal);
                        break;
                }
                sleep_in_time(member);
                until = gr_platform_time_in(CLOCK_REALTIME, RETRY_NS);
                gr_lock(&all_lock);
                if (!atomic_load(&member->stop))
                        pthread_cond_timedwait(&all.changed, &all_lock.mutex, &until);
                gr_unlock(&all_lock);
        }
        return region;
}

/* The thread of one device. */
static void *serve_neighbours(void *arg)
{
        struct member *member = arg;
        struct gr_region *region, *again;
        uint64_t before = 0, now, pause_ns = PUBLISH_NS;
        int rc;

        gr_operations_relax_captures();
        region = join_late(member);
        if (region)
                serving = member;
        while (region && !atomic_load(&member->stop)) {
                uint32_t seen = gr_region_seen(region);
                bool changed;

                serve_one(member, region);
                sleep_in_time(member);
                now = sum_activity(member);
                changed = now != before;
                before = now;
                publish(member, region, changed);
                gr_region_look_after_next(region);
                pause_ns = changed || gr_region_awaited(region) ? PUBLISH_NS
                           : pause_ns * 2 < QUIET_NS            ? pause_ns * 2
                                                                : QUIET_NS;
                if (!changed && left_alone())
                        break;
                if (!gr_region_member(region)) {
                        again = join_region(member, &rc);
                        region = again ? again : region;
                        seen = gr_region_seen(region);
                }
                if (!atomic_load(&member->stop))
                        gr_region_wait(region, seen, pause_ns);
        }
        gr_lock(&all_lock);
        assert(all.threads > 0 && atomic_load(&member->running));
        all.threads--;
        atomic_store(&member->running, false);
        pthread_cond_broadcast(&all.changed);
        gr_unlock(&all_lock);
        return NULL;
}

void gr_neighbour_beat(void)
{
        uint64_t figures[GR_FIGURE_COUNT];

        if (!serving)
                return;
        gr_figures_of_device(serving->device, figures);
        gr_region_publish(atomic_load(&serving->region), figures, false);
}

/* all_lock held. */
GR_HELD(all_lock) static void start_thread(struct member *member)
{
        gr_assert_locked(&all_lock);
        assert(member->device && !atomic_load(&member->running)); /* one thread for each device */
        atomic_store(&member->running, true);
        if (gr_workers_start_thread(serve_neighbours, member)) {
                all.threads++;
        } else {
                atomic_store(&member->running, false);
                atomic_store(&retry_ns, gr_driver.now_ns() + RETRY_NS);
        }
}

void gr_neighbour_retry(void)
{
        uint64_t at_ns = atomic_load_explicit(&retry_ns, memory_order_relaxed);

        if (!at_ns || gr_driver.now_ns() < at_ns || !gr_trylock(&all_lock))
                return;
        atomic_store(&retry_ns, 0);
        for (int i = 0; i < GR_DEVICES_MAX; i++)
                if (atomic_load(&members[i].tried) && members[i].device && gr_options.neighbour &&
                    !atomic_load(&members[i].running) && !atomic_load(&members[i].stop))
                        start_thread(&members[i]);
        gr_unlock(&all_lock);
}

/* A group's limit still holds for a process that works alone: it must not have more than all may have together. */
static void say_alone(struct member *member, const char *why)
{
        bool named = gr_options.region_dir.text[0] && gr_options.neighbour;
        char folder[256];

        if (named) {
                snprintf(folder, sizeof(folder), "GPURECLAIM_REGION_DIR=%.180s: %s", gr_options.region_dir.text, why);
                why = folder;
        }
        if (member->group_limit == GR_UNLIMITED)
                gr_log(named ? GR_LOG_WARN : GR_LOG_INFO, "device %d: other processes cannot be seen (%s)",
                       member->device->ordinal, why);
        else
                gr_log(GR_LOG_WARN,
                       "device %d: other processes cannot be seen (%s); the group's limit holds for this one alone",
                       member->device->ordinal, why);
}

GR_HELD(all_lock) static void join_locked(struct member *member)
{
        int rc = 0;

        gr_assert_locked(&all_lock);
        if (!member->device)
                return;
        if (!gr_options.neighbour) {
                say_alone(member, "GPURECLAIM_NEIGHBOUR=0");
                return;
        }
        if (!join_region(member, &rc))
                say_alone(member, rc == -ENODEV   ? "the driver does not tell the device's UUID"
                                  : rc == -EUSERS ? "too many processes of the group use the GPU"
                                                  : strerror(-rc));
        start_thread(member);
}

void gr_neighbour_begin(struct gr_device *device)
{
        struct member *member = &members[device->ordinal];

        assert(device->ordinal >= 0 && device->ordinal < GR_DEVICES_MAX && !member->device);
        member->group_limit = gr_options_resolve(&gr_options, GR_OPTION_GROUP_LIMIT, device->ordinal,
                                                 atomic_load(&device->total_bytes), gr_log_warn, NULL);
        if (!gr_options.neighbour && member->group_limit == GR_UNLIMITED)
                return;
        gr_lock_init(&member->account_lock, GR_RANK_REGION);
        member->device = device;
        member->group = (struct gr_group){member->group_limit, group_reserve, group_adjust, group_room,
                                          group_excess,        member,        group_others};
        atomic_store(&device->group, &member->group);
}

bool gr_neighbour_joined(const struct gr_device *device)
{
        return atomic_load(&members[device->ordinal].region) != NULL;
}

/* Allocated from the heap: NVML is also called by threads with a small stack. */
struct look {
        char dir[GR_REGION_PATH_BYTES];
        struct gr_region region;
};

uint64_t gr_neighbour_sum(const char *uuid)
{
        struct look *look = calloc(1, sizeof(*look));
        char file[GR_REGION_FILE_BYTES];
        struct gr_identity self;
        uint8_t bytes[16];
        uint64_t sum = 0;
        size_t known = 0;
        GR_NO_CANCEL; /* the file of the region would stay open */

        while (known < sizeof(bytes)) {
                uuid += *uuid == '-';
                if (sscanf(uuid, "%2hhx", &bytes[known]) != 1)
                        break;
                uuid += 2;
                known++;
        }
        if (!look || known < sizeof(bytes) || !gr_options.neighbour) {
                free(look);
                return 0;
        }
        /* Where there is no region, there is no member, and so nothing is reserved. */
        if (region_dir(false, look->dir) == 0 && gr_platform_identity(&self) == 0 &&
            gr_region_file_name(gr_options.group.text, bytes, file, sizeof(file)) == 0 &&
            gr_region_open(&look->region, &gr_platform_ops, &self, look->dir, file, false) == 0) {
                gr_region_sweep(&look->region);
                sum = gr_region_sum(&look->region, false);
                gr_region_close(&look->region);
        }
        free(look);
        return sum;
}

void gr_neighbour_join(CUdevice dev)
{
        struct member *member;
        GR_NO_CANCEL;

        assert(dev >= 0 && dev < GR_DEVICES_MAX);
        if (atomic_load(&members[dev].tried))
                return;
        member = &members[dev];
        gr_lock(&all_lock);
        if (!atomic_load(&member->tried)) {
                uint64_t begin_ns = gr_platform_now_ns(), begin_thread_ns = gr_platform_thread_ns();

                join_locked(member);
                atomic_store(&member->tried, true);
                gr_log(GR_LOG_DEBUG, "joined the others in %" PRIu64 " us, %" PRIu64 " us of the processor",
                       (gr_platform_now_ns() - begin_ns) / 1000, (gr_platform_thread_ns() - begin_thread_ns) / 1000);
        }
        gr_unlock(&all_lock);
}

uint64_t gr_neighbour_ask(struct gr_core *core, struct gr_device *device, uint64_t want_bytes)
{
        struct gr_region *region;

        (void)core;
        assert(device->ordinal >= 0 && device->ordinal < GR_DEVICES_MAX);
        region = atomic_load(&members[device->ordinal].region);
        return region ? gr_region_ask(region, want_bytes, gr_options.neighbour_wait, waiting > 0) : 0;
}

void gr_neighbour_wait(struct gr_device *device, int64_t bytes)
{
        struct member *member = &members[device->ordinal];
        struct gr_region *region;

        assert(device->ordinal >= 0 && device->ordinal < GR_DEVICES_MAX);
        assert(bytes > 0 || (bytes < 0 && waiting > 0)); /* calls come in pairs */
        if (bytes > 0)
                waiting++;
        else
                waiting--;
        if (!atomic_load(&member->region))
                return;
        gr_lock(&member->account_lock);
        region = charged_region(member);
        if (region)
                gr_region_waiting(region, bytes);
        gr_unlock(&member->account_lock);
}

bool gr_neighbour_may_give(struct gr_device *device, uint64_t bytes)
{
        struct gr_region *region = atomic_load(&members[device->ordinal].region);

        return region && gr_region_sum(region, true) >= bytes;
}

unsigned gr_neighbour_let_first(struct gr_device *device, enum gr_let_first what)
{
        struct member *member = &members[device->ordinal];
        struct gr_region *region;
        unsigned count = 0;

        if (!atomic_load(&member->region))
                return 0;
        gr_lock(&member->account_lock);
        region = charged_region(member);
        if (region && what == GR_LET_FIRST_BEGIN)
                gr_region_let_first(region);
        else if (region && what == GR_LET_FIRST_END)
                gr_region_return(region);
        if (region)
                count = gr_region_is_let_first(region);
        gr_unlock(&member->account_lock);
        return count;
}

void gr_neighbour_leave(void)
{
        struct timespec until = gr_platform_time_in(CLOCK_REALTIME, STOP_NS);
        unsigned self = serving != NULL;

        for (int i = 0; i < GR_DEVICES_MAX; i++) {
                struct gr_region *region = atomic_load(&members[i].region);

                atomic_store(&members[i].stop, true);
                if (region)
                        gr_region_wake_self(region);
        }
        gr_lock(&all_lock);
        pthread_cond_broadcast(&all.changed);
        while (all.threads > self)
                if (pthread_cond_timedwait(&all.changed, &all_lock.mutex, &until) == ETIMEDOUT)
                        break;
        gr_unlock(&all_lock);
        for (int i = 0; i < GR_DEVICES_MAX; i++) {
                struct gr_region *region = atomic_load(&members[i].region);

                /* A slot whose thread did not stop is left to neighbours, which will see that this process is gone. */
                if (!region || (atomic_load(&members[i].running) && !self))
                        continue;
                /* From here on the group's limit holds for this process alone. */
                atomic_store(&members[i].region, NULL);
                gr_region_leave(region);
        }
}

void gr_neighbour_forget(void)
{
        for (int i = 0; i < GR_DEVICES_MAX; i++) {
                atomic_store(&members[i].region, NULL);
                if (members[i].device)
                        atomic_store(&members[i].device->group, NULL);
        }
}
