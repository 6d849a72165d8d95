#include "alloc/ladder.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "account/budget.h"
#include "alloc/oom_report.h"
#include "alloc/source.h"
#include "base/arith.h"
#include "base/counters.h"
#include "base/driver.h"
#include "base/ladder_rungs.h"
#include "base/lock.h"
#include "base/log.h"
#include "base/no_cancel.h"
#include "base/size.h"
#include "base/size_class.h"
#include "base/thread.h"
#include "cache/block.h"
#include "cache/pool_kind.h"
#include "context/capture_gate.h"
#include "context/context.h"
#include "fence/fence.h"
#include "host/pinned.h"
#include "host/spill.h"
#include "reclaim/reclaimable.h"
#include "reclaim/rung.h"
#include "segment/segments_serve.h"

#define BYPASS_NS        UINT64_C(250000000)  /* after a failure the thread's frees go to the driver for so long */
#define RETURNS_NS       UINT64_C(1000000000) /* longest wait for what other threads give back */
#define RETURNS_PAUSE_NS UINT64_C(50000)
/* Most tries of TRIM and of SYNC: other threads may be faster to take what these return or make usable. */
#define RETURN_TRIES    16
#define NEIGHBOUR_TRIES 2 /* each may take the full deadline; the second only if the first gave something */
#define WAIT_LOOK_NS    UINT64_C(500000) /* WAIT: between looks at what this process freed */
/* WAIT: the pause between two questions to driver and neighbours; it doubles, from FIRST to MOST. */
#define WAIT_FIRST_NS UINT64_C(2000000)
#define WAIT_MOST_NS  UINT64_C(50000000)
/* gr_ladder_make_room asks for it too: the driver's call needs memory itself. */
#define MARGIN_BYTES (UINT64_C(64) << 20)

/* One failed request, and what each rung gave for it. */
struct climb {
        struct gr_context *context;
        size_t bytes;
        struct gr_source_request *request; /* for a block; NULL: attempt(arg) is called instead */
        gr_ladder_attempt *attempt;
        void *arg;
        int error;      /* -ENOMEM or -EDQUOT, the last one */
        bool met_limit; /* an error was -EDQUOT */
        bool waits;     /* other processes know that it waits */
        uint64_t given_bytes[GR_RUNG_COUNT];
        uint64_t begin_ns;
        unsigned tries[GR_RUNG_COUNT];
};

/* The bytes that the driver takes for the request. */
static uint64_t need_bytes(struct climb *climb)
{
        return gr_is_small(climb->bytes) ? GR_PAGE_BYTES : gr_footprint_bytes(climb->bytes);
}

/* How much must come back before the driver can serve the request. */
static uint64_t missing_bytes(struct climb *climb)
{
        struct gr_device *device = climb->context->device;
        uint64_t need = need_bytes(climb);
        uint64_t have = 0, total;

        if (climb->error == -EDQUOT) {
                have = gr_budget_room(device);
        } else if (climb->context->core->driver->mem_info(climb->context->handle, &have, &total)) {
                have = 0;
        }
        return have < need ? need - have : need;
}

static bool is_optional(const struct climb *climb)
{
        return climb->request && climb->request->optional;
}

/* Notes the result rc of a try, and returns it. A request counts as one limit hit, however often it is tried. */
static int note_result(struct climb *climb, int rc)
{
        if (gr_is_out_of_memory(rc))
                climb->error = rc;
        if (rc == -EDQUOT && !climb->met_limit && !is_optional(climb)) {
                climb->met_limit = true;
                gr_count(climb->context->core, GR_COUNTER_limit_hits, 1);
        }
        return rc;
}

/* Whether any block that is large enough serves the request, also a cached one. */
static bool any_block_serves(const struct climb *climb)
{
        return climb->request && !climb->request->allocate;
}

/* Another try for a block after a rung. 0, -ENOMEM or -EDQUOT, or another error of the driver. */
static int try_again(struct climb *climb, struct gr_block **ret_block)
{
        struct gr_block *block = NULL;

        if (!climb->request)
                return note_result(climb, climb->attempt(climb->arg));
        if (any_block_serves(climb) && climb->context->core->config.pool != GR_POOL_NONE)
                block = gr_source_take(climb->request);
        if (block) {
                *ret_block = block;
                return 0;
        }
        return note_result(climb, gr_source_fresh(climb->request, ret_block));
}

/* READY and FENCE: serves the request from the cache. The rung's statistics count the block's size. */
static int from_cache(struct climb *climb, enum gr_rung rung, struct gr_block **ret_block)
{
        struct gr_core *core = climb->context->core;
        uint64_t begin_ns = core->driver->now_ns();
        struct gr_block *block;

        assert(rung == GR_RUNG_READY || rung == GR_RUNG_FENCE);
        if (!any_block_serves(climb) || core->config.pool == GR_POOL_NONE)
                return climb->error;
        if (rung == GR_RUNG_FENCE) {
                /*
                 * Work of other devices, and work that waits for others, may wait for later work of the program. A
                 * barrier between the two would hang both, so none is laid.
                 */
                gr_fence_close(climb->context->fence);
                gr_fence_poll(climb->context->fence);
                if (core->config.reuse == GR_REUSE_BARRIER ||
                    (core->config.reuse != GR_REUSE_POLL && gr_fence_accessors(climb->context->fence) == 1 &&
                     !atomic_load(&core->waits_for_others)))
                        gr_fence_barrier(climb->context->fence);
        }
        block = gr_source_take_larger(climb->request);
        climb->tries[rung]++;
        gr_count_rung(core, climb->context->device->ordinal, rung, begin_ns, block ? block->capacity_bytes : 0);
        if (!block)
                return climb->error;
        assert(!gr_block_is_live(block) && block->capacity_bytes >= climb->bytes);
        climb->given_bytes[rung] += block->capacity_bytes;
        *ret_block = block;
        return 0;
}

/*
 * Takes a range from a segment meant for larger requests. Segments with live blocks are used before any thread has to
 * wait; one that is free, which could be returned as a whole, only after SYNC.
 */
static int from_larger(struct climb *climb, enum gr_rung rung, struct gr_block **ret_block)
{
        struct gr_context *context = climb->context;

        if (!any_block_serves(climb) || !gr_pool_kind_has_segments(context) || gr_fence_is_broken(context->fence))
                return climb->error;
        *ret_block = gr_segments_take(context, climb->bytes,
                                      rung == GR_RUNG_SYNC ? GR_SEGMENTS_FROM_ANY : GR_SEGMENTS_FROM_USED);
        return *ret_block ? 0 : climb->error;
}

/*
 * After a failed try: memory that other threads are returning to the driver is in no cache, and not free on the device
 * either. Waits until those returns have ended and tries again after each. ended: gr_budget_returns_of_others just
 * before the failed try.
 */
static int after_returns(struct climb *climb, uint64_t ended, struct gr_block **ret_block)
{
        const struct gr_driver *driver = climb->context->core->driver;
        struct gr_device *device = climb->context->device;
        uint64_t deadline_ns = driver->now_ns() + RETURNS_NS, now;
        int rc = climb->error;

        while (gr_is_out_of_memory(rc) && driver->now_ns() < deadline_ns) {
                bool going_on = gr_budget_returns_in_flight(device);

                now = gr_budget_returns_of_others(device);
                if (now == ended && !going_on)
                        break;
                if (now == ended) {
                        driver->sleep_ns(RETURNS_PAUSE_NS);
                        continue;
                }
                ended = now;
                rc = try_again(climb, ret_block);
        }
        return rc;
}

/* Whether another wait for the GPU may help: what is cached would suffice, and not too much time has passed. */
static bool is_worth_waiting(struct climb *climb, uint64_t begin_ns)
{
        return missing_bytes(climb) <= gr_budget_cached(climb->context->device) &&
               climb->context->core->driver->now_ns() - begin_ns < GR_SYNC_NS;
}

/*
 * Runs one rung that returns memory, and tries the request after it, with the device's ladder_lock held. Without the
 * lock two threads that both need all of the returned bytes could take a part each, and both fail. Reclaimables and
 * neighbours are asked without the lock, as they may wait for other threads.
 */
GR_NOT_CHECKED static int from_rung(struct climb *climb, enum gr_rung rung, struct gr_block **ret_block)
{
        struct gr_core *core = climb->context->core;
        bool unlocked = rung == GR_RUNG_PURGE || rung == GR_RUNG_DROP || rung == GR_RUNG_NEIGHBOUR;
        unsigned tries = rung == GR_RUNG_TRIM || rung == GR_RUNG_SYNC ? RETURN_TRIES
                         : rung == GR_RUNG_NEIGHBOUR                  ? NEIGHBOUR_TRIES
                                                                      : 1;
        uint64_t begin_ns = core->driver->now_ns(), back, ended;
        bool overtaken = false;
        int rc;

        if (!unlocked) {
                gr_lock(&climb->context->device->ladder_lock);
                rc = try_again(climb, ret_block); /* the climb before this one may have left enough */
                if (!gr_is_out_of_memory(rc))
                        goto out;
        }
        do {
                back = unlocked ? gr_rung_run(climb->context, rung, missing_bytes(climb))
                                : gr_rung_run_locked(climb->context, rung, missing_bytes(climb), &overtaken);
                climb->tries[rung]++;
                climb->given_bytes[rung] += back;
                /* What DROP freed is cached now, but TRIM and SYNC have run already. */
                if (rung == GR_RUNG_DROP && back > 0)
                        gr_rung_run(climb->context, GR_RUNG_SYNC, missing_bytes(climb));
                ended = gr_budget_returns_of_others(climb->context->device);
                rc = try_again(climb, ret_block);
        } while (gr_is_out_of_memory(rc) && (back > 0 || (overtaken && is_worth_waiting(climb, begin_ns))) &&
                 --tries > 0);
        if (!unlocked && gr_is_out_of_memory(rc))
                rc = after_returns(climb, ended, ret_block);
out:
        if (!unlocked)
                gr_unlock(&climb->context->device->ladder_lock);
        return rc;
}

/*
 * To map memory, the driver needs some for itself. Where it lacks that, its plain allocation may still succeed, so it
 * is tried before neighbours are asked; and so is one of just the size of a small request, for which a slab may have
 * room where it has none for all of the class.
 */
static int from_driver_plainly(struct climb *climb, struct gr_block **ret_block)
{
        if (!any_block_serves(climb) ||
            (climb->request->by_segments ? climb->error != -ENOMEM : !gr_is_small(climb->bytes)))
                return climb->error;
        climb->request->exact = gr_is_small(climb->bytes);
        return note_result(climb, gr_source_fresh_plain(climb->request, ret_block));
}

/* Whether the process's own limit refuses the request, so that neighbours cannot help. */
static bool meets_own_limit(struct climb *climb)
{
        return climb->error == -EDQUOT && gr_budget_own_limit(climb->context->device, need_bytes(climb));
}

/* The NEIGHBOUR rung. */
static int from_neighbours(struct climb *climb, struct gr_block **ret_block)
{
        if (!climb->context->core->ask_neighbours || meets_own_limit(climb))
                return climb->error;
        return from_rung(climb, GR_RUNG_NEIGHBOUR, ret_block);
}

static bool add_freed_bytes(struct gr_context *context, void *arg)
{
        *(uint64_t *)arg += gr_fence_freed_bytes(context->fence);
        return true;
}

/* A figure that changes whenever a thread of this process frees memory of the device. */
static uint64_t freed_so_far(struct gr_device *device, struct gr_core *core)
{
        uint64_t freed_bytes = 0;

        /* A free raises this sum; memory that goes back to the driver lowers what is reserved. */
        gr_context_each(core, device->ordinal, add_freed_bytes, &freed_bytes);
        return freed_bytes - atomic_load(&device->reserved_bytes);
}

/*
 * Whether all that other processes have would not serve the request. Such a wait is kept from them, or this process
 * might come before those that can be served (gr_region_waits_first).
 */
static bool in_vain(struct climb *climb)
{
        struct gr_core *core = climb->context->core;
        struct gr_device *device = climb->context->device;
        bool vain = core->may_give && (meets_own_limit(climb) || !core->may_give(device, missing_bytes(climb)));

        if (core->wait_for_neighbours && climb->waits == vain)
                core->wait_for_neighbours(device, vain ? -(int64_t)climb->bytes : (int64_t)climb->bytes);
        climb->waits = !vain;
        return vain;
}

/*
 * The WAIT rung: waits until memory is freed. To notice frees of this process costs nothing. For frees of other
 * processes the driver is asked, less and less often, and so are the neighbours, as what they freed may stay in their
 * caches. No lock is held between tries, so that waiting threads block no others. If all threads wait, the deadline
 * ends that. One that waits for others only ends when they have too little, but not before the memory of a process that
 * has just ended is back.
 */
static int from_wait(struct climb *climb, struct gr_block **ret_block)
{
        struct gr_core *core = climb->context->core;
        const struct gr_driver *driver = core->driver;
        struct gr_device *device = climb->context->device;
        uint64_t begin_ns = driver->now_ns(), deadline_ns = begin_ns + core->config.wait_ns;
        uint64_t pause_ns = WAIT_FIRST_NS, asked_ns = begin_ns, now_ns, seen;
        uint64_t vain_ns = UINT64_MAX;
        char bytes[GR_SIZE_TEXT_BYTES], asked[GR_SIZE_TEXT_BYTES];
        int rc = climb->error;

        if (!core->config.wait_ns || gr_reclaimable_inside() ||
            (atomic_load(&device->total_bytes) > 0 && climb->bytes > atomic_load(&device->total_bytes)) ||
            (in_vain(climb) && core->config.wait_for_others_only))
                return climb->error;
        if (deadline_ns < begin_ns)
                deadline_ns = UINT64_MAX;
        gr_log(GR_LOG_INFO, "device %d: waiting up to %.3f s for %s", device->ordinal,
               (double)core->config.wait_ns / 1e9, gr_size_format(climb->bytes, bytes, sizeof(bytes)));
        climb->tries[GR_RUNG_WAIT]++;
        seen = freed_so_far(device, core);
        do {
                uint64_t freed;
                bool others, own;

                if (!core->pause || !climb->request)
                        driver->sleep_ns(WAIT_LOOK_NS);
                else if (!core->pause(WAIT_LOOK_NS))
                        break;
                core->collect(core);
                now_ns = driver->now_ns();
                freed = freed_so_far(device, core);
                others = now_ns >= asked_ns + pause_ns || now_ns >= deadline_ns;
                own = freed != seen;
                if (!own && !others)
                        continue;
                if (!own && pause_ns < WAIT_MOST_NS)
                        pause_ns *= 2;
                seen = freed;
                asked_ns = now_ns;
                rc = from_cache(climb, GR_RUNG_FENCE, ret_block);
                /* Where no event can be recorded, as during a capture, only SYNC makes freed blocks idle. */
                if (gr_is_out_of_memory(rc))
                        rc = from_rung(climb,
                                       own && gr_fence_close(climb->context->fence) == -EBUSY ? GR_RUNG_SYNC
                                                                                              : GR_RUNG_TRIM,
                                       ret_block);
                if (!gr_is_out_of_memory(rc) || !others)
                        continue;
                if (!in_vain(climb)) {
                        vain_ns = UINT64_MAX;
                        rc = from_neighbours(climb, ret_block);
                } else if (core->config.wait_for_others_only) {
                        vain_ns = gr_min(vain_ns, now_ns + RETURNS_NS);
                }
        } while (gr_is_out_of_memory(rc) && now_ns < gr_min(deadline_ns, vain_ns));
        if (core->wait_for_neighbours && climb->waits)
                core->wait_for_neighbours(device, -(int64_t)climb->bytes);
        if (rc == 0 && core->served && climb->given_bytes[GR_RUNG_NEIGHBOUR] > 0)
                core->served();
        now_ns = driver->now_ns();
        if (rc == 0)
                climb->given_bytes[GR_RUNG_WAIT] = climb->bytes;
        gr_count_rung(core, device->ordinal, GR_RUNG_WAIT, begin_ns, climb->given_bytes[GR_RUNG_WAIT]);
        gr_log(GR_LOG_INFO, "device %d: %s %s after %.3f s", device->ordinal, rc == 0 ? "got" : "gave up waiting for",
               gr_size_format(climb->bytes, asked, sizeof(asked)), (double)(now_ns - begin_ns) / 1e9);
        return rc;
}

/* The SPILL rung. */
static int from_host(struct climb *climb, struct gr_block **ret_block)
{
        struct gr_core *core = climb->context->core;
        uint64_t begin_ns = core->driver->now_ns();
        int rc;

        if (!any_block_serves(climb) || atomic_load(&climb->context->device->spill_bytes) == 0)
                return climb->error;
        climb->tries[GR_RUNG_SPILL]++;
        rc = gr_spill_alloc(climb->context, climb->bytes, ret_block);
        gr_count_rung(core, climb->context->device->ordinal, GR_RUNG_SPILL, begin_ns, rc ? 0 : climb->bytes);
        return rc ? climb->error : 0;
}

/* One rung before FAIL, and the tries of the request that belong to it. */
static int climb_rung(struct climb *climb, enum gr_rung rung, struct gr_block **ret_block)
{
        int rc;

        switch (rung) {
        case GR_RUNG_READY:
        case GR_RUNG_FENCE:
                return from_cache(climb, rung, ret_block);
        case GR_RUNG_PURGE:
        case GR_RUNG_DRIVER:
        case GR_RUNG_DROP:
                return from_rung(climb, rung, ret_block);
        case GR_RUNG_TRIM:
        case GR_RUNG_SYNC:
                rc = from_rung(climb, rung, ret_block);
                return gr_is_out_of_memory(rc) ? from_larger(climb, rung, ret_block) : rc;
        case GR_RUNG_NEIGHBOUR:
                rc = from_driver_plainly(climb, ret_block);
                return gr_is_out_of_memory(rc) ? from_neighbours(climb, ret_block) : rc;
        case GR_RUNG_WAIT:
                return from_wait(climb, ret_block);
        case GR_RUNG_SPILL:
                return from_host(climb, ret_block);
        default:
                return climb->error;
        }
}

/* The FAIL rung: the report, and a moment in which this thread's frees bypass the cache. */
static void fail_climb(struct climb *climb)
{
        struct gr_core *core = climb->context->core;

        gr_count(core, GR_COUNTER_failures, 1);
        atomic_fetch_add(&core->counters.rungs[GR_RUNG_FAIL].tries, 1);
        gr_oom_report(&(struct gr_oom_report){.context = climb->context,
                                              .bytes = climb->bytes,
                                              .need_bytes = need_bytes(climb),
                                              .block = any_block_serves(climb),
                                              .limited = climb->error == -EDQUOT,
                                              .begin_ns = climb->begin_ns,
                                              .given_bytes = climb->given_bytes,
                                              .tries = climb->tries});
        gr_thread.bypass_until_ns = core->driver->now_ns() + BYPASS_NS;
}

/* The ladder for both kinds of request; ret_block: NULL for memory that is not a block. */
static int climb_all(struct climb *climb, struct gr_block **ret_block)
{
        struct gr_context *context = climb->context;
        struct gr_core *core = context->core;
        enum gr_rung end = is_optional(climb) ? GR_RUNG_DROP : GR_RUNG_FAIL;
        int rc = note_result(climb, climb->error);
        GR_NO_CANCEL; /* the request is tried with the device's ladder_lock held */

        gr_lock_rank_assert_free_from(GR_RANK_LADDER);
        assert(gr_is_out_of_memory(climb->error) && climb->bytes > 0);
        assert(!ret_block == !climb->request); /* only a climb for a block returns one */
        climb->begin_ns = core->driver->now_ns();
        core->collect(core); /* puts the parked memory of destroyed graphs into the cache */
        /* The figure of stream-ordered memory that counts against the limit may be out of date. */
        if (rc == -EDQUOT && core->driver->refresh_pools &&
            atomic_load(&context->device->kind_bytes[GR_MEMORY_STREAM_ORDERED]) > 0) {
                core->driver->refresh_pools(context->device->ordinal);
                rc = try_again(climb, ret_block);
        }

        for (enum gr_rung rung = GR_RUNG_READY; rung < end && gr_is_out_of_memory(rc); rung++)
                rc = climb_rung(climb, rung, ret_block);
        if (gr_is_out_of_memory(rc) && !is_optional(climb))
                fail_climb(climb);
        return rc;
}

int gr_ladder_climb(struct gr_source_request *request, int first_error, struct gr_block **ret_block)
{
        struct climb climb = {
                .context = request->context, .bytes = request->bytes, .request = request, .error = first_error};

        return climb_all(&climb, ret_block);
}

int gr_ladder_climb_for(struct gr_context *context, size_t bytes, gr_ladder_attempt *attempt, void *arg,
                        int first_error)
{
        struct climb climb = {.context = context, .bytes = bytes, .attempt = attempt, .arg = arg, .error = first_error};

        return climb_all(&climb, NULL);
}

void gr_ladder_make_room(struct gr_context *context, uint64_t bytes)
{
        static const enum gr_rung rungs[] = {GR_RUNG_PURGE, GR_RUNG_TRIM, GR_RUNG_SYNC};
        uint64_t want = bytes + MARGIN_BYTES, have, total;

        for (size_t i = 0; i < sizeof(rungs) / sizeof(rungs[0]); i++) {
                if (i > 0 && gr_budget_cached(context->device) == 0)
                        return;
                if (context->core->driver->mem_info(context->handle, &have, &total) || have >= want)
                        return;
                gr_rung_run(context, rungs[i], want - have);
        }
}
