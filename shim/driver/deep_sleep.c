#include "driver/deep_sleep.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/log.h"
#include "base/size.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "system/environment.h"
#include "system/messages.h"
#include "system/run_command.h"

#define LOCK_MS       500u              /* longest wait for calls that have passed no gate */
#define PAUSE_NS      UINT64_C(2000000) /* between the first two looks for room; it doubles up to the most */
#define PAUSE_MOST_NS UINT64_C(500000000)
#define SPARE_BYTES   (UINT64_C(256) << 20)
#define CONTEXT_BYTES (UINT64_C(64) << 20)  /* less than any context takes */
#define UNLOCKS       3                     /* tries */
#define LOOK_NS       UINT64_C(10000000000) /* longest wait for another process that looks at the devices */

static _Atomic int never; /* enum gr_deep_reason */
/*
 * The devices that the process used when it was last to sleep deeply, a bit each, and for each of them its UUID and the
 * free memory with which a restore will not fail.
 */
static uint64_t devices;
static char uuids[GR_DEVICES_MAX][GR_UUID_TEXT_BYTES];
static uint64_t room_bytes[GR_DEVICES_MAX];
static int look_error; /* of the last look, or 0 */
/* Whether it was said in this deep sleep that the process cannot come back, and that a restore failed. */
static bool told, told_lost;

/* What another process sees of a device. */
struct look {
        uint64_t free, held; /* by this process; 0: not known */
};

void gr_deep_never(enum gr_deep_reason reason)
{
        atomic_store(&never, (int)reason);
}

static bool has_checkpoints(void)
{
        return gr_real.cuCheckpointProcessGetState && gr_real.cuCheckpointProcessLock &&
               gr_real.cuCheckpointProcessCheckpoint && gr_real.cuCheckpointProcessRestore &&
               gr_real.cuCheckpointProcessUnlock;
}

static CUprocessState process_state(CUprocessState if_unknown)
{
        CUprocessState state = if_unknown;

        if (gr_real.cuCheckpointProcessGetState)
                gr_real.cuCheckpointProcessGetState(getpid(), &state);
        return state;
}

bool gr_deep_is_running(void)
{
        return process_state(CU_PROCESS_STATE_RUNNING) == CU_PROCESS_STATE_RUNNING;
}

static CUresult unlock(void)
{
        CUcheckpointUnlockArgs args = {0};
        CUresult result = CUDA_ERROR_UNKNOWN;

        for (int i = 0; i < UNLOCKS && result != CUDA_SUCCESS; i++)
                result = gr_real.cuCheckpointProcessUnlock(getpid(), &args);
        return result;
}

static void go_on(void)
{
        gr_operations_callbacks->going_on();
}

/*
 * Has another process look at the devices, as NVML does not return in one that is checkpointed. False: it did not
 * answer, and look_error says why.
 */
static bool look(struct look ret[GR_DEVICES_MAX])
{
        char words[16 + GR_DEVICES_MAX * GR_UUID_TEXT_BYTES], said[GR_DEVICES_MAX * 2 * 21 + 1], *at = said, *end;
        const char *arguments[] = {"gpureclaim", "status", "--room", words, NULL};
        size_t length = (size_t)snprintf(words, sizeof(words), "%d", (int)getpid());

        for (int i = 0; i < GR_DEVICES_MAX; i++)
                if (devices >> i & 1)
                        length += (size_t)snprintf(words + length, sizeof(words) - length, ",%s", uuids[i]);
        look_error = -gr_run_command(arguments, said, sizeof(said), LOOK_NS, go_on);
        for (int i = 0; i < GR_DEVICES_MAX && !look_error; i++) {
                if (!(devices >> i & 1))
                        continue;
                ret[i].free = strtoull(at, &end, 10);
                ret[i].held = strtoull(end, &at, 10);
                if (at == end)
                        look_error = ENODATA;
        }
        return !look_error;
}

static bool note_device(struct gr_context *context, void *arg)
{
        *(uint64_t *)arg |= UINT64_C(1) << context->ordinal;
        return true;
}

/* Finds the devices that the process uses. False: none, or one that the driver does not name. */
static bool find_devices(void)
{
        devices = 0;
        gr_context_each(&gr_core, -1, note_device, &devices);
        for (int i = 0; i < GR_DEVICES_MAX; i++)
                if (devices >> i & 1 && !gr_real_uuid(i, NULL, uuids[i]))
                        return false;
        return devices != 0;
}

/*
 * How much of the device the process has. False: not known, as NVML does not list it, or another one of the same number
 * in another namespace; then it is what the library knows of.
 */
static bool find_held(int i, const struct look *now, uint64_t *ret_bytes)
{
        struct gr_device *device = &gr_core.devices[i];
        uint64_t reserved = atomic_load(&device->reserved_bytes), asleep = atomic_load(&device->asleep_bytes);

        *ret_bytes = reserved > asleep ? reserved - asleep : 0;
        if (now->held < gr_max(*ret_bytes, CONTEXT_BYTES))
                return false;
        *ret_bytes = now->held;
        return true;
}

static uint64_t checkpoint(void)
{
        CUcheckpointLockArgs lock_args = {.timeoutMs = LOCK_MS};
        CUcheckpointCheckpointArgs args = {0};
        CUresult result = gr_real.cuCheckpointProcessLock(getpid(), &lock_args);

        if (result != CUDA_SUCCESS)
                return GR_DEEP_AT_LOCK + result;
        result = gr_real.cuCheckpointProcessCheckpoint(getpid(), &args);
        /* Where it cannot be unlocked, gr_deep_end tries again. */
        return result == CUDA_SUCCESS || process_state(CU_PROCESS_STATE_LOCKED) == CU_PROCESS_STATE_CHECKPOINTED ||
                               unlock() != CUDA_SUCCESS
                       ? 0
                       : GR_DEEP_AT_CHECKPOINT + result;
}

uint64_t gr_deep_begin(uint64_t host_bytes, bool (*is_wanted)(void))
{
        struct look before[GR_DEVICES_MAX], after[GR_DEVICES_MAX] = {{0}};
        uint64_t held[GR_DEVICES_MAX] = {0}, sum = 0, known = 0, reason;

        if (atomic_load(&never))
                return (uint64_t)atomic_load(&never);
        if (!has_checkpoints())
                return GR_DEEP_IS_OLD;
        if (!gr_run_command_is_there())
                return GR_DEEP_IS_ALONE;
        if (!gr_deep_is_running())
                return GR_DEEP_IS_LOCKED;
        gr_run_command_keep();
        if (!find_devices() || !look(before))
                return GR_DEEP_IS_BLIND;
        for (int i = 0; i < GR_DEVICES_MAX; i++)
                if (devices >> i & 1) {
                        known |= (uint64_t)find_held(i, &before[i], &held[i]) << i;
                        sum += held[i];
                }
        if (sum > host_bytes)
                return GR_DEEP_IS_LARGE;
        if (is_wanted()) /* by now: the look takes a while */
                return GR_DEEP_IS_BUSY;
        gr_operations_callbacks->going_on();
        reason = checkpoint();
        gr_operations_callbacks->going_on();
        told = told_lost = false;
        if (!reason)
                look(after);
        for (int i = 0; i < GR_DEVICES_MAX && !reason; i++) {
                if (!(devices >> i & 1))
                        continue;
                if (!(known >> i & 1)) /* what has become free is the process's, or others have just given it back */
                        held[i] = gr_max(held[i], after[i].free > before[i].free ? after[i].free - before[i].free : 1);
                room_bytes[i] = held[i] + held[i] / 4 + SPARE_BYTES;
                /* But not more than there was when it left. */
                room_bytes[i] = gr_min(room_bytes[i], gr_max(held[i], after[i].free));
                atomic_store(&gr_core.devices[i].deep_bytes, held[i]);
                atomic_store(&gr_core.devices[i].free_bytes, after[i].free);
        }
        return reason;
}

/* A device that has no room for the restore now, and how much is missing; -1: all have. */
static int full_device(uint64_t *ret_missing)
{
        struct look now[GR_DEVICES_MAX] = {{0}};

        look(now);
        for (int i = 0; i < GR_DEVICES_MAX; i++)
                if (devices >> i & 1 && now[i].free < room_bytes[i]) {
                        *ret_missing = room_bytes[i] - now[i].free;
                        return i;
                }
        return -1;
}

/*
 * Processes that restore themselves at the same time would count on the same room. So one at a time does, by a lock of
 * the folder of regions, which goes with the process. -1: there is no folder.
 */
static int open_folder(void)
{
        char by_default[GR_REGION_PATH_BYTES];
        const char *dir = gr_options.region_dir.text;

        if (!dir[0])
                dir = gr_region_default_dir(true, by_default, sizeof(by_default)) == 0 ? by_default : "";
        return gr_message_begin(open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

static void unlock_folder(int folder)
{
        if (folder >= 0)
                flock(folder, LOCK_UN); /* a child by clone may have the descriptor, too */
}

/* Why the process has not come back: once in each deep sleep, as the program may ask for it again and again. */
static void say_why_not(int device, uint64_t missing)
{
        char text[GR_SIZE_TEXT_BYTES];

        if (told)
                return;
        told = true;
        if (look_error)
                gr_log(GR_LOG_WARN, "deep sleep: cannot wake: gpureclaim status --room gives no answer (%s)",
                       strerror(look_error));
        else if (device < 0)
                gr_log(GR_LOG_WARN, "deep sleep: cannot wake: others wake all the time");
        else
                gr_log(GR_LOG_WARN, "deep sleep: cannot wake: device %d has no room; %s are missing", device,
                       gr_size_format(missing, text, sizeof(text)));
}

/* Waits for the lock and for room. False: there was none in time, and the lock is not held. */
static bool await_room(int folder, uint64_t until_ns, const _Atomic bool *stop)
{
        uint64_t pause_ns = PAUSE_NS, missing = 0, now_ns;
        int64_t waits_for[GR_DEVICES_MAX] = {0};
        bool found = false;
        int device = -1;

        while (!found) {
                bool locked = folder < 0 || flock(folder, LOCK_EX | LOCK_NB) == 0;

                device = locked ? full_device(&missing) : -1;
                found = locked && device < 0;
                if (locked && !found)
                        unlock_folder(folder);
                if (found || gr_driver.now_ns() >= until_ns || atomic_load(stop))
                        break;
                if (device >= 0 && gr_core.ask_neighbours) {
                        gr_core.ask_neighbours(&gr_core, &gr_core.devices[device], missing);
                        /* From now on as an allocation that waits: each answer costs a neighbour work. */
                        if (!waits_for[device])
                                gr_core.wait_for_neighbours(&gr_core.devices[device],
                                                            waits_for[device] = (int64_t)missing);
                }
                now_ns = gr_driver.now_ns();
                gr_driver.sleep_ns(gr_min(pause_ns, until_ns > now_ns ? until_ns - now_ns : 0));
                pause_ns = gr_min(2 * pause_ns, PAUSE_MOST_NS);
        }
        for (int i = 0; i < GR_DEVICES_MAX; i++)
                if (waits_for[i])
                        gr_core.wait_for_neighbours(&gr_core.devices[i], -waits_for[i]);
        if (!found)
                say_why_not(device, missing);
        return found;
}

/* Has the driver restore the process once there is room. */
static CUresult restore(uint64_t until_ns, const _Atomic bool *stop)
{
        CUcheckpointRestoreArgs args = {0};
        int folder = open_folder();
        CUresult result = CUDA_ERROR_OUT_OF_MEMORY;

        if (await_room(folder, until_ns, stop)) {
                result = gr_real.cuCheckpointProcessRestore(getpid(), &args);
                unlock_folder(folder);
                if (result != CUDA_SUCCESS && !told_lost)
                        gr_log(GR_LOG_WARN, "deep sleep: the driver could not restore the process (error %d)",
                               (int)result);
                told_lost = result != CUDA_SUCCESS;
        }
        if (folder >= 0)
                gr_message_end(folder);
        return result;
}

CUresult gr_deep_end(uint64_t until_ns, const _Atomic bool *stop)
{
        CUresult result = CUDA_SUCCESS;

        /* Something else may have restored it meanwhile. */
        if (process_state(CU_PROCESS_STATE_CHECKPOINTED) == CU_PROCESS_STATE_CHECKPOINTED)
                result = restore(until_ns, stop);
        if (result == CUDA_SUCCESS && process_state(CU_PROCESS_STATE_LOCKED) == CU_PROCESS_STATE_LOCKED)
                result = unlock();
        for (int i = 0; i < GR_DEVICES_MAX && result == CUDA_SUCCESS; i++)
                atomic_store(&gr_core.devices[i].deep_bytes, 0);
        return result;
}
