#include "driver/sleep.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

#include "account/budget.h"
#include "base/arith.h"
#include "base/log.h"
#include "base/no_cancel.h"
#include "driver/deep_sleep.h"
#include "driver/mapped_memory.h"
#include "driver/movers.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "fence/fence.h"
#include "fence/fence_wait.h"
#include "reclaim/reclaimable.h"
#include "reclaim/rung.h"
#include "system/environment.h"
#include "system/host_memory.h"
#include "system/run_command.h"

#define IDLE_NS       UINT64_C(80000000)   /* longest wait for the GPU while the gate is open */
#define SHUT_NS       UINT64_C(10000000)   /* longest wait for it while the gate is shut */
#define SHUT_LOOKS    10000                /* how often to look whether a call is inside */
#define TURN_END_NS   UINT64_C(1000000000) /* longest wait for calls and the GPU at the end of a turn */
#define PAUSE_NS      UINT64_C(2000000)    /* between the first two tries to have it; it doubles up to the most */
#define PAUSE_MOST_NS UINT64_C(50000000)
#define PASS          (UINT64_C(1) << 32) /* what a call that passes the gate adds; below it those inside are counted */

GR_HOT_DATA _Atomic bool gr_sleep_on;
static _Atomic bool shut, ending;
static _Atomic bool waking;           /* a call that came to the gate has the lock, or is about to give it back */
static _Atomic unsigned waiting;      /* threads at the gate while it is shut */
static _Atomic bool deep;             /* the driver has a checkpoint of the process, or is about to; shut is set, too */
static struct gr_sharded beside;      /* calls inside that only a deep sleep keeps out */
static struct gr_sharded calls;       /* how many have passed it, in PASS each, and how many of them are inside */
static struct gr_sleep_config config; /* constant once set up */
static _Atomic bool yielding;         /* the turn is over, so a sleep that has begun goes on though calls wait for it */
static _Thread_local unsigned inside; /* how many calls of this thread count as inside */
static _Thread_local bool working; /* this thread puts the process to sleep or wakes it: it does not wait for itself */

/* What the last look at the gate found. */
static struct {
        uint64_t passes;   /* calls that had passed it */
        uint64_t since_ns; /* since when the process has been idle; 0: it is not */
        uint64_t vain;     /* a bit for each device of which all that can has left since then */
} rest GR_GUARDED_BY(gr_sleep_lock);

static _Atomic uint64_t turn_since_ns; /* when it began */
/* Whether it was said, in this sleep, that the memory could not be had again. */
static bool told GR_GUARDED_BY(gr_sleep_lock);
/* After memory of the device has left, when the next one may begin, and when also if others still wait. */
static uint64_t turn_back_ns GR_GUARDED_BY(gr_sleep_lock), turn_latest_ns GR_GUARDED_BY(gr_sleep_lock);

/* Whether a sleep that has begun should stop: a call waits at the gate, or the process or a context ends. */
static bool is_wanted(void)
{
        return (atomic_load(&waiting) > 0 && !atomic_load(&yielding)) || atomic_load(&ending) ||
               gr_context_one_ends(&gr_core);
}

void gr_sleep_init(const struct gr_sleep_config *how)
{
        config = *how;
        gr_movers_init(config.folder, is_wanted);
        gr_run_command_find();
        gr_sleep_begin_turn();
        atomic_store(&gr_sleep_on, true);
}

void gr_sleep_begin_turn(void)
{
        atomic_store(&turn_since_ns, gr_driver.now_ns());
}

void gr_sleep_end(void)
{
        atomic_store(&ending, true);
        /* The driver must not end in the middle of a checkpoint. */
        if (atomic_load(&deep) && !working) {
                gr_lock(&gr_sleep_lock);
                gr_unlock(&gr_sleep_lock);
        }
}

bool gr_sleep_is_asleep(void)
{
        return atomic_load(&shut);
}

/* What is to be moved on a device. */
struct outcome {
        uint64_t moved_bytes;
        uint64_t until_ns; /* how long a wake waits for room */
        CUresult result;
        bool visited;
};

/* Begins to move all memory of the device that is asleep, or awake. */
static struct gr_memory **begin_moves(int device, bool asleep, uint64_t most_bytes, size_t *ret_count)
{
        uint64_t *ptrs, bytes = 0;
        size_t listed = gr_mapped_list(device, asleep, &ptrs), count = 0;
        struct gr_memory **memories = ptrs ? malloc((listed + 1) * sizeof(struct gr_memory *)) : NULL;

        for (size_t i = 0; memories && i < listed; i++) {
                struct gr_memory *memory = gr_mapped_begin_move(ptrs[i], asleep);

                if (memory && memory->bytes > most_bytes - bytes) {
                        gr_mapped_end_move(memory);
                } else if (memory) {
                        bytes += memory->bytes;
                        memories[count++] = memory;
                }
        }
        free(ptrs);
        *ret_count = count;
        return memories;
}

static void end_moves(struct gr_memory **memories, size_t count)
{
        for (size_t i = 0; i < count; i++)
                gr_mapped_end_move(memories[i]);
        free(memories);
}

/* How much more host memory may be taken, but for what the movers will. */
GR_HELD(gr_sleep_lock) static uint64_t room_on_host(void)
{
        uint64_t asleep = gr_mapped_host_bytes(), left = gr_host_begin_taking();

        gr_assert_locked(&gr_sleep_lock);
        return gr_min(config.host_bytes > asleep ? config.host_bytes - asleep : 0,
                      left - gr_min(left, gr_movers_pinned_bytes()));
}

GR_NOT_CHECKED static bool move_memory_out(struct gr_context *context, void *arg)
{
        struct outcome *outcome = arg;
        struct gr_memory **memories;
        uint64_t room_bytes;
        size_t count;

        gr_assert_locked(&gr_sleep_lock);
        gr_rung_run(context, GR_RUNG_TRIM, UINT64_MAX);
        room_bytes = room_on_host();
        memories = begin_moves(context->ordinal, false, config.folder ? UINT64_MAX : room_bytes, &count);
        outcome->moved_bytes = gr_movers_move(context, true, memories, count, room_bytes, &outcome->result);
        end_moves(memories, count);
        return false;
}

/* Has all of it created again, or none. */
static CUresult create_memories(struct gr_memory **memories, size_t count)
{
        CUresult result = CUDA_SUCCESS;
        size_t i;

        for (i = 0; i < count && result == CUDA_SUCCESS; i++)
                result = gr_mapped_create_again(memories[i]);
        if (result != CUDA_SUCCESS)
                while (i-- > 0)
                        gr_mapped_give_up(memories[i], false);
        return result;
}

/* How much must come back before the memory of the context's device can return. */
static uint64_t missing_bytes(struct gr_context *context)
{
        const struct gr_group *group = atomic_load(&context->device->group);
        uint64_t need = atomic_load(&context->device->asleep_bytes), have, total;

        if (gr_driver.mem_info(context->handle, &have, &total))
                have = 0;
        if (group)
                have = gr_min(have, group->room(group->arg));
        return have < need ? need - have : need;
}

/*
 * Brings back the memory of one device: all of it is taken first, as processes that each had a part would wait for each
 * other. While the device is full, own cached memory and neighbours give some, and idle ones may fall asleep.
 */
GR_NOT_CHECKED static bool bring_memory_back(struct gr_context *context, void *arg)
{
        uint64_t pause_ns = PAUSE_NS;
        struct outcome *outcome = arg;
        int64_t waits_for = 0;

        gr_assert_locked(&gr_sleep_lock);
        outcome->visited = true;
        for (int tries = 0;; tries++) {
                size_t count;
                struct gr_memory **memories = begin_moves(context->ordinal, true, UINT64_MAX, &count);

                outcome->result = memories ? create_memories(memories, count) : CUDA_ERROR_OUT_OF_MEMORY;
                if (outcome->result == CUDA_SUCCESS) {
                        outcome->moved_bytes += gr_movers_move(context, false, memories, count, 0, &outcome->result);
                        for (size_t i = 0; i < count; i++)
                                if (memories[i]->host && memories[i]->handle)
                                        gr_mapped_give_up(memories[i], false);
                }
                end_moves(memories, count);
                /* Twice in any case: the driver may have failed only this once. */
                if (outcome->result == CUDA_SUCCESS || atomic_load(&ending) ||
                    (tries > 0 &&
                     (outcome->result != CUDA_ERROR_OUT_OF_MEMORY || gr_driver.now_ns() >= outcome->until_ns)))
                        break;
                gr_rung_run(context, GR_RUNG_TRIM, UINT64_MAX);
                if (gr_core.ask_neighbours) {
                        uint64_t missing = missing_bytes(context);

                        gr_core.ask_neighbours(&gr_core, context->device, missing);
                        /* From now on as an allocation that waits: each answer costs a neighbour work. */
                        if (!waits_for)
                                gr_core.wait_for_neighbours(context->device, waits_for = (int64_t)missing);
                }
                gr_driver.sleep_ns(pause_ns);
                pause_ns = gr_min(2 * pause_ns, PAUSE_MOST_NS);
        }
        if (waits_for)
                gr_core.wait_for_neighbours(context->device, -waits_for);
        return false;
}

/*
 * Brings all memory back. While all contexts of a device are about to end, none can be used to copy. So this waits
 * until they have ended, with their memory, or turn out to stay. *ret_missing: neither came in time, and their memory
 * is still asleep.
 */
GR_HELD(gr_sleep_lock) static CUresult bring_back(uint64_t until_ns, bool *ret_missing)
{
        uint64_t begin_ns = gr_driver.now_ns(), bytes = 0, device_ns;

        gr_assert_locked(&gr_sleep_lock);
        for (int i = 0; i < GR_DEVICES_MAX; i++) {
                struct outcome outcome = {.until_ns = until_ns};

                device_ns = gr_driver.now_ns();
                while (atomic_load(&gr_core.devices[i].asleep_bytes) > 0) {
                        gr_context_each(&gr_core, i, bring_memory_back, &outcome);
                        if (outcome.visited)
                                break;
                        if (gr_driver.now_ns() >= until_ns || atomic_load(&ending)) {
                                *ret_missing = true;
                                break;
                        }
                        gr_driver.sleep_ns(PAUSE_NS);
                }
                if (outcome.result != CUDA_SUCCESS) {
                        if (!told)
                                gr_log(GR_LOG_WARN,
                                       "device %d: the memory that is asleep could not be had again (error %d)", i,
                                       (int)outcome.result);
                        told = true;
                        return outcome.result;
                }
                if (outcome.moved_bytes > 0)
                        atomic_store(&gr_core.devices[i].last_wake_ns, gr_driver.now_ns() - device_ns);
                bytes += outcome.moved_bytes;
        }
        told = false;
        gr_log(GR_LOG_INFO, "awake: %" PRIu64 " MiB came back in %" PRIu64 " ms", bytes >> 20,
               (gr_driver.now_ns() - begin_ns) / 1000000);
        return CUDA_SUCCESS;
}

/* How many others come first, on all devices. */
static unsigned let_first(enum gr_let_first what)
{
        unsigned count = 0;

        for (int i = 0; i < GR_DEVICES_MAX && gr_core.let_first; i++)
                count += gr_core.let_first(&gr_core.devices[i], what);
        return count;
}

/* After its turn the process leaves the GPU to others for as long, and until all that waited for it have had theirs. */
GR_HELD(gr_sleep_lock) static void await_turn(void)
{
        uint64_t now_ns;

        gr_assert_locked(&gr_sleep_lock);
        while (((now_ns = gr_driver.now_ns()) < turn_back_ns ||
                (now_ns < turn_latest_ns && let_first(GR_LET_FIRST_LOOK))) &&
               !atomic_load(&ending))
                gr_driver.sleep_ns(now_ns < turn_back_ns ? gr_min(PAUSE_MOST_NS, turn_back_ns - now_ns)
                                                         : PAUSE_MOST_NS);
        let_first(GR_LET_FIRST_END);
}

static bool has_asleep(void)
{
        for (int i = 0; i < GR_DEVICES_MAX; i++)
                if (atomic_load(&gr_core.devices[i].asleep_bytes) > 0)
                        return true;
        return false;
}

/* Ends a deep sleep. What fell asleep before it stays so. */
GR_HELD(gr_sleep_lock) static CUresult end_deep(uint64_t until_ns)
{
        uint64_t begin_ns = gr_driver.now_ns();
        CUresult result;

        gr_assert_locked(&gr_sleep_lock);
        if (!atomic_load(&deep))
                return CUDA_SUCCESS;
        result = gr_deep_end(until_ns, &ending);
        if (result == CUDA_SUCCESS) {
                atomic_store(&deep, false);
                if (!has_asleep())
                        atomic_store(&shut, false);
                gr_log(GR_LOG_INFO, "awake: the process is back on its devices after %" PRIu64 " ms",
                       (gr_driver.now_ns() - begin_ns) / 1000000);
        }
        return result;
}

/*
 * The gate is shut: wakes the process. If all contexts of a device are about to end for too long, their memory cannot
 * come back: then the gate stays shut, but this call is counted as inside, in *part, and goes on. part NULL: only a
 * deep sleep keeps the call out, and only that ends.
 */
static void wait_at_gate(struct gr_pass *pass, _Atomic uint64_t *part)
{
        /* Of all at the gate, which wait for the lock one after the other. */
        uint64_t until_ns = gr_driver.now_ns() + (part ? config.turn_ns : 0) + config.wait_ns;
        CUstreamCaptureMode mode;
        bool missing = false;
        GR_KEEP_ERRNO;
        GR_NO_CANCEL;

        atomic_fetch_add(&waiting, 1);
        gr_lock(&gr_sleep_lock);
        atomic_store(&waking, true);
        atomic_fetch_sub(&waiting, 1);
        working = true;
        if (!part) {
                pass->result = end_deep(until_ns);
        } else if (atomic_load(&shut)) {
                if (until_ns < turn_latest_ns + config.wait_ns)
                        until_ns = turn_latest_ns + config.wait_ns;
                await_turn();
                mode = gr_operations_relax_captures();
                pass->result = end_deep(until_ns);
                if (pass->result == CUDA_SUCCESS)
                        pass->result = bring_back(until_ns, &missing);
                gr_operations_restore_captures(mode);
                if (pass->result == CUDA_SUCCESS && missing) {
                        atomic_fetch_add(part, PASS + 1);
                        pass->inside = part;
                } else if (pass->result == CUDA_SUCCESS) {
                        rest.since_ns = rest.vain = turn_back_ns = turn_latest_ns = 0;
                        gr_sleep_begin_turn();
                        atomic_store(&shut, false);
                }
        }
        working = false;
        atomic_store(&waking, false);
        gr_unlock(&gr_sleep_lock);
}

struct gr_pass gr_sleep_enter(void)
{
        struct gr_pass pass = {.result = CUDA_SUCCESS};

        while (!working && !pass.inside && pass.result == CUDA_SUCCESS && gr_shim_ready()) {
                _Atomic uint64_t *part = &calls.shards[gr_shard()].part;

                /* What a neighbour has a reclaimable do is no work of the program, which stays idle. */
                atomic_fetch_add(part, gr_reclaimable_inside() ? 1 : PASS + 1);
                if (!atomic_load(&shut)) {
                        pass.inside = part;
                        break;
                }
                atomic_fetch_sub(part, 1);
                wait_at_gate(&pass, part);
        }
        if (pass.inside) {
                pass.cancel_state = gr_cancel_disable();
                inside++;
        }
        return pass;
}

struct gr_pass gr_sleep_enter_deep(void)
{
        struct gr_pass pass = {.result = CUDA_SUCCESS, .beside = true};

        while (!working && !pass.inside && pass.result == CUDA_SUCCESS && gr_shim_ready()) {
                _Atomic uint64_t *part = &beside.shards[gr_shard()].part;

                atomic_fetch_add(part, 1);
                if (!atomic_load(&deep)) {
                        pass.inside = part;
                        break;
                }
                atomic_fetch_sub(part, 1);
                wait_at_gate(&pass, NULL);
        }
        if (pass.inside)
                pass.cancel_state = gr_cancel_disable();
        return pass;
}

struct gr_pass gr_sleep_enter_own(void)
{
        struct gr_pass pass = {.result = CUDA_SUCCESS, .beside = true};
        _Atomic uint64_t *part = &beside.shards[gr_shard()].part;

        atomic_fetch_add(part, 1);
        if (atomic_load(&deep) || !gr_deep_is_running()) {
                atomic_fetch_sub(part, 1);
        } else {
                pass.inside = part;
                pass.cancel_state = gr_cancel_disable();
        }
        return pass;
}

CUresult gr_sleep_never_deeply(enum gr_deep_reason reason)
{
        gr_deep_never(reason);
        GR_PASS_DEEP; /* a sleep that begins after this looks for the reason once nobody is inside */
        return CUDA_SUCCESS;
}

void gr_sleep_leave(struct gr_pass *pass)
{
        if (!pass->beside)
                inside--;
        atomic_fetch_sub_explicit(pass->inside, 1, memory_order_release);
        gr_cancel_restore(&pass->cancel_state);
}

bool gr_sleep_pause(uint64_t ns)
{
        _Atomic uint64_t *part = &calls.shards[gr_shard()].part;
        struct gr_pass again;

        if (!config.turn_ns || inside != 1) {
                gr_driver.sleep_ns(ns);
                return true;
        }
        atomic_fetch_sub(part, 1);
        gr_driver.sleep_ns(ns);
        again = gr_sleep_enter();
        if (again.inside) {
                inside--; /* it is the same call */
                gr_cancel_restore(&again.cancel_state);
        } else {
                atomic_fetch_add(part, 1); /* what gr_sleep_leave takes back */
        }
        return again.inside;
}

/* Whether no call is inside. *ret_passes: how many have passed the gate. */
static bool nobody_inside(uint64_t *ret_passes)
{
        bool nobody = true;

        *ret_passes = 0;
        for (int i = 0; i < GR_SHARDS; i++) {
                uint64_t part = atomic_load(&calls.shards[i].part);

                nobody &= part % PASS == 0;
                *ret_passes += part / PASS;
        }
        return nobody;
}

/* Shuts the gate. False: a call is inside, and the gate is as it was. */
static bool shut_gate(void)
{
        bool was_shut = atomic_exchange(&shut, true);
        uint64_t passes;

        for (unsigned n = 1; n <= SHUT_LOOKS; n++) {
                if (nobody_inside(&passes))
                        return true;
                gr_lock_pause(n);
        }
        atomic_store(&shut, was_shut);
        return false;
}

struct idle {
        uint64_t until_ns;
        bool idle;
};

static bool is_context_idle(struct gr_context *context, void *arg)
{
        struct idle *idle = arg;

        idle->idle = !gr_fence_is_broken(context->fence) && gr_fence_sync_by(context->fence, idle->until_ns) == 0;
        return idle->idle;
}

/* Whether all work of all contexts finishes within most_ns. Not while a capture is open or a context ends. */
static bool is_idle(uint64_t most_ns)
{
        struct idle idle = {.until_ns = gr_driver.now_ns() + most_ns, .idle = true};

        if (gr_gate_is_open(&gr_core.gate)) /* a capture is open */
                return false;
        gr_context_each(&gr_core, -1, is_context_idle, &idle);
        return idle.idle && !gr_context_one_ends(&gr_core);
}

static bool may_sleep(void)
{
        return gr_sleep_is_on() && !atomic_load(&deep) && !is_wanted() && gr_driver.context_record &&
               gr_deep_is_running();
}

/* Whether it may, and its GPU work ends within a moment. */
static bool may_sleep_at_once(void)
{
        GR_OWN_CALLS;

        return gr_own_calls && may_sleep() && is_idle(IDLE_NS);
}

/* Looks at the gate. Whether no call has passed it since the last look, or is inside. */
GR_HELD(gr_sleep_lock) static bool is_quiet(void)
{
        uint64_t passes;
        bool quiet = nobody_inside(&passes) && passes == rest.passes;

        gr_assert_locked(&gr_sleep_lock);
        if (!quiet) {
                rest.passes = passes;
                rest.since_ns = rest.vain = 0;
        }
        return quiet;
}

/* Since when the process has been idle; 0: it is not, or all that can leave the device has left. */
GR_HELD(gr_sleep_lock) static uint64_t idle_since(int device)
{
        gr_assert_locked(&gr_sleep_lock);
        if (!is_quiet())
                return 0;
        if (!rest.since_ns && is_idle(0))
                rest.since_ns = gr_driver.now_ns();
        return rest.vain >> device & 1 ? 0 : rest.since_ns;
}

/* From when on the process may be put to sleep while it works. */
GR_HELD(gr_sleep_lock) static uint64_t turn_end_ns(void)
{
        gr_assert_locked(&gr_sleep_lock);
        return config.turn_ns && !atomic_load(&shut) ? atomic_load(&turn_since_ns) + config.turn_ns : UINT64_MAX;
}

uint64_t gr_sleep_offer(int device)
{
        uint64_t since_ns, from_ns;

        assert(device >= 0 && device < GR_DEVICES_MAX);
        if (!may_sleep())
                return 0;
        if (!gr_trylock(&gr_sleep_lock))
                return atomic_load(&waking) ? 0 : GR_SLEEP_UNKNOWN;
        since_ns = atomic_load(&deep) ? 0 : idle_since(device);
        from_ns = gr_min(since_ns ? since_ns + GR_SLEEP_IDLE_NS : UINT64_MAX, turn_end_ns());
        gr_unlock(&gr_sleep_lock);
        return from_ns == UINT64_MAX ? 0 : from_ns;
}

/* Whether the device's memory may leave after so long. */
GR_HELD(gr_sleep_lock) static bool is_time(int device, uint64_t idle_ns)
{
        uint64_t since_ns = idle_ns ? idle_since(device) : 0;

        gr_assert_locked(&gr_sleep_lock);
        return !idle_ns || (since_ns && gr_driver.now_ns() - since_ns >= idle_ns);
}

/* Shuts the gate for a process that is idle. */
GR_HELD(gr_sleep_lock) static bool shut_idle(uint64_t idle_ns)
{
        gr_assert_locked(&gr_sleep_lock);
        return shut_gate() && (is_quiet() || !idle_ns) && is_idle(SHUT_NS);
}

/* Shuts it for one that works. */
static bool shut_working(void)
{
        uint64_t until_ns = gr_driver.now_ns() + TURN_END_NS, passes;

        atomic_store(&shut, true);
        while (!nobody_inside(&passes) || !is_idle(SHUT_NS)) {
                if (gr_driver.now_ns() >= until_ns || atomic_load(&ending))
                        return false;
                gr_operations_callbacks->going_on();
                gr_driver.sleep_ns(PAUSE_NS);
        }
        return true;
}

/* Whether there is memory that can leave the device. */
static bool may_leave(int device)
{
        uint64_t *ptrs;
        size_t count = gr_mapped_list(device, false, &ptrs);

        free(ptrs);
        return count > 0;
}

/* Memory of the device has left: so does that of other devices for which others wait, as they come first. */
GR_HELD(gr_sleep_lock) static void end_turn(int device)
{
        unsigned ahead = let_first(GR_LET_FIRST_BEGIN);
        struct outcome outcome = {0};

        gr_assert_locked(&gr_sleep_lock);
        for (int i = 0; i < GR_DEVICES_MAX && gr_core.let_first; i++)
                if (i != device && gr_core.let_first(&gr_core.devices[i], GR_LET_FIRST_LOOK)) {
                        gr_context_each(&gr_core, i, move_memory_out, &outcome);
                        rest.vain |= UINT64_C(1) << i;
                }
        turn_back_ns = gr_driver.now_ns() + config.turn_ns;
        turn_latest_ns = turn_back_ns + 2 * ahead * config.turn_ns; /* two each, as a turn takes longer */
}

/* Puts the memory to sleep if the process has been idle for so long; with yields, also if its turn is over. */
GR_HELD(gr_sleep_lock) static uint64_t leave(int device, uint64_t idle_ns, bool yields)
{
        struct outcome outcome = {0};
        bool was_shut = atomic_load(&shut), idle = is_time(device, idle_ns);

        gr_assert_locked(&gr_sleep_lock);
        yields &= !idle && gr_driver.now_ns() >= turn_end_ns() && may_leave(device);
        if (!idle && !yields)
                return 0;
        atomic_store(&yielding, yields);
        if (yields ? shut_working() : shut_idle(idle_ns)) {
                gr_context_each(&gr_core, device, move_memory_out, &outcome);
                rest.vain |= UINT64_C(1) << device; /* the other devices' memory may leave as before */
        } else {
                rest.since_ns = 0;
        }
        if (yields && outcome.moved_bytes > 0)
                end_turn(device);
        else if (yields)
                gr_sleep_begin_turn();
        atomic_store(&yielding, false);
        if (!was_shut && outcome.moved_bytes == 0)
                atomic_store(&shut, false);
        return outcome.moved_bytes;
}

/* Locks gr_sleep_lock while memory of another device leaves. False: a call has come to the gate. */
GR_NOT_CHECKED static bool lock_to_sleep(void)
{
        while (!gr_trylock(&gr_sleep_lock)) {
                if (atomic_load(&waking) || is_wanted())
                        return false;
                gr_operations_callbacks->going_on();
                gr_driver.sleep_ns(PAUSE_NS);
        }
        return true;
}

GR_NOT_CHECKED static uint64_t begin_sleep(int device, uint64_t idle_ns, bool yields)
{
        uint64_t begin_ns = gr_driver.now_ns(), took_ns, bytes;

        if (!(idle_ns ? may_sleep() : may_sleep_at_once()) || !lock_to_sleep())
                return 0;
        working = true;
        bytes = atomic_load(&deep) ? 0 : leave(device, idle_ns, yields);
        working = false;
        gr_unlock(&gr_sleep_lock);
        if (bytes > 0) {
                took_ns = gr_driver.now_ns() - begin_ns;
                atomic_store(&gr_core.devices[device].last_sleep_ns, took_ns);
                gr_log(GR_LOG_INFO, "device %d: %" PRIu64 " MiB fell asleep in %" PRIu64 " ms", device, bytes >> 20,
                       took_ns / 1000000);
        }
        return bytes;
}

uint64_t gr_sleep_begin(int device, uint64_t idle_ns)
{
        return begin_sleep(device, idle_ns, false);
}

uint64_t gr_sleep_yield(int device)
{
        return begin_sleep(device, GR_SLEEP_IDLE_NS, true);
}

/* The gate is shut, and what can leave has left: has the driver take the rest away. 0, or why it did not. */
GR_HELD(gr_sleep_lock) static uint64_t go_deep(void)
{
        uint64_t reason = GR_DEEP_IS_BUSY, sum = 1;

        gr_assert_locked(&gr_sleep_lock);
        atomic_store(&deep, true);
        for (unsigned n = 1; n <= SHUT_LOOKS && sum > 0 && !is_wanted(); n++) {
                sum = 0;
                for (int i = 0; i < GR_SHARDS; i++)
                        sum += atomic_load(&beside.shards[i].part);
                gr_lock_pause(n);
        }
        if (sum == 0 && !is_wanted())
                reason = gr_deep_begin(room_on_host(), is_wanted);
        if (reason)
                atomic_store(&deep, false);
        return reason;
}

GR_NOT_CHECKED uint64_t gr_sleep_deeply(void)
{
        uint64_t begin_ns = gr_driver.now_ns(), took_ns, reason = GR_DEEP_IS_BUSY;
        struct outcome outcome = {0};
        bool was_shut;

        if (!gr_sleep_is_on())
                return GR_DEEP_IS_OFF;
        if (atomic_load(&deep))
                return 0;
        if (!may_sleep_at_once() || !lock_to_sleep())
                return GR_DEEP_IS_BUSY;
        working = true;
        was_shut = atomic_load(&shut);
        if (atomic_load(&deep)) {
                reason = 0;
        } else if (shut_idle(0)) {
                for (int i = 0; i < GR_DEVICES_MAX; i++) {
                        gr_context_each(&gr_core, i, move_memory_out, &outcome);
                        gr_driver.refresh_pools(i); /* a limit may be set in the sleep, where they cannot be asked */
                }
                reason = go_deep();
        }
        if (reason && !was_shut && !has_asleep())
                atomic_store(&shut, false);
        took_ns = gr_driver.now_ns() - begin_ns;
        for (int i = 0; i < GR_DEVICES_MAX; i++)
                if (!reason && atomic_load(&gr_core.devices[i].deep_bytes) > 0)
                        atomic_store(&gr_core.devices[i].last_sleep_ns, took_ns);
        working = false;
        gr_unlock(&gr_sleep_lock);
        if (reason)
                gr_log(GR_LOG_DEBUG, "no deep sleep (%" PRIu64 ")", reason);
        else
                gr_log(GR_LOG_INFO, "deeply asleep, after %" PRIu64 " ms", took_ns / 1000000);
        return reason;
}
