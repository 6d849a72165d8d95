/* Contexts: finds the pool of the current context, and cleans up when a context ends. */
#include "hooks/context.h"

#include <assert.h>
#include <pthread.h>

#include "alloc/oom_report.h"
#include "base/arith.h"
#include "base/log.h"
#include "base/no_cancel.h"
#include "device/device.h"
#include "device/overhead.h"
#include "driver/deep_sleep.h"
#include "driver/mapped_memory.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/captures.h"
#include "hooks/green_table.h"
#include "hooks/segment_import.h"
#include "notes/note.h"
#include "reclaim/reclaimable.h"
#include "reclaim/rung.h"

#define ENDED_LOOK_NS    10000
#define NEIGHBOURS_BYTES (UINT64_C(1) << 30) /* asked for where the amount is not known: more than a context takes */
#define ROOM_FIRST_NS    UINT64_C(20000000)  /* between two tries of a call that waits for room */
#define ROOM_MOST_NS     UINT64_C(500000000) /* the same, later */
#define ALIASES_MAX      256 /* of green contexts that no hook saw being made: another context owns their memory */

struct alias {
        CUcontext handle, owner;
};

GR_HOT_DATA _Atomic uint64_t gr_contexts_version = 1;

/*
 * The process has had more than one context. Before that, a thread that once had the only context current, and has not
 * changed it since, still has it current. Afterwards each call asks the driver, as the current context may change by
 * calls that have no hook.
 */
static _Atomic bool several;
static struct gr_context *_Atomic only;

static struct gr_lock lock = GR_LOCK_INIT(GR_RANK_CONTEXT_NAMES);
static struct alias aliases[ALIASES_MAX] GR_GUARDED_BY(lock);
static unsigned alias_count GR_GUARDED_BY(lock);
/* Primary contexts and their retains, by the program and its green contexts, as far as hooks saw them. */
static CUcontext primaries[GR_DEVICES_MAX] GR_GUARDED_BY(lock);
static unsigned retained[GR_DEVICES_MAX] GR_GUARDED_BY(lock);

struct gr_lock gr_primary_locks[GR_DEVICES_MAX] = {
        [0 ... GR_DEVICES_MAX - 1] = {PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP, GR_RANK_PRIMARY}};

static CUcontext primary_of(CUdevice dev) GR_HELD(gr_primary_locks[dev]);
static void primary_retained(CUdevice dev, CUcontext primary) GR_HELD(gr_primary_locks[dev]);
static bool still_active(CUdevice dev) GR_HELD(gr_primary_locks[dev]);

static CUcontext primary_of(CUdevice dev)
{
        CUcontext primary = NULL;
        unsigned int flags;
        int active = 0;

        gr_assert_locked(&gr_primary_locks[dev]);
        if (!gr_real.cuDevicePrimaryCtxGetState || !gr_real.cuDevicePrimaryCtxRetain ||
            !gr_real.cuDevicePrimaryCtxRelease_v2 ||
            gr_real.cuDevicePrimaryCtxGetState(dev, &flags, &active) != CUDA_SUCCESS || !active)
                return NULL;
        /* The context is active, so retaining and releasing it only tells its handle. */
        if (gr_real.cuDevicePrimaryCtxRetain(&primary, dev) != CUDA_SUCCESS)
                return NULL;
        /* Tried twice: a retain without release would keep the context alive for good. */
        if (gr_real.cuDevicePrimaryCtxRelease_v2(dev) != CUDA_SUCCESS)
                gr_real.cuDevicePrimaryCtxRelease_v2(dev);
        return primary;
}

/*
 * The context that owns memory allocated while handle is current; for a green context that is the primary one. NULL:
 * the driver does not tell. A green context taken for an owner would break the fences of other contexts when it ends.
 * Lock held.
 */
GR_HELD(lock) static CUcontext owner_of(CUcontext handle, CUdevice dev)
{
        CUcontext owner = handle;
        CUdeviceptr probe;

        gr_assert_locked(&lock);
        assert(handle && dev >= 0 && dev < GR_DEVICES_MAX);
        if (primaries[dev] == handle)
                return handle;
        /* No hook saw it created: a green context, or one from before the driver was found. */
        if (gr_real.cuMemAlloc_v2(&probe, 512) != CUDA_SUCCESS)
                return NULL;
        if (gr_real.cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, probe) != CUDA_SUCCESS)
                owner = NULL;
        gr_driver.mem_release(handle, &(uint64_t){probe}, 1, &(size_t){0});
        if (owner != handle)
                gr_operations_context_gone(handle); /* its stream is not needed again */
        return owner;
}

/* Lock held. The context that owns the memory of handle, where it is known to be another one; else NULL. */
GR_HELD(lock) static CUcontext alias_of(CUcontext handle)
{
        CUdevice green = gr_green_device_of(handle);

        gr_assert_locked(&lock);
        assert(alias_count <= ALIASES_MAX);
        if (green >= 0)
                return primaries[green];
        for (unsigned i = 0; i < alias_count; i++)
                if (aliases[i].handle == handle)
                        return aliases[i].owner;
        return NULL;
}

struct gr_context *gr_context_known(CUcontext handle)
{
        CUcontext owner;

        gr_lock(&lock);
        owner = alias_of(handle);
        gr_unlock(&lock);
        return gr_context_find(&gr_core, owner ? owner : handle);
}

/* Adds the context to the core. Where it is not the only one, no thread trusts what it remembers any more. */
static struct gr_context *add_context(CUcontext handle, CUdevice dev)
{
        struct gr_context *context = gr_core_context_add(&gr_core, handle, dev), *first = NULL;

        gr_mapped_use_device(dev);
        if (!context || (!atomic_compare_exchange_strong(&only, &first, context) && first != context)) {
                atomic_store(&several, true);
                atomic_fetch_add(&gr_contexts_version, 1);
        }
        return context;
}

/* The slow path: the current context is not the one that this thread used last. */
static struct gr_context *look_up_context(CUcontext handle)
{
        struct gr_context *context = gr_context_find(&gr_core, handle);
        CUstreamCaptureMode mode;
        CUcontext owner;
        CUdevice dev;
        GR_NO_CANCEL;

        if (context)
                return context;
        if (gr_real.cuCtxGetDevice(&dev) != CUDA_SUCCESS || !gr_device_get(dev))
                return NULL;
        mode = gr_operations_relax_captures();
        gr_lock(&gr_primary_locks[dev]);
        gr_lock(&lock);
        if (!primaries[dev])
                primaries[dev] = primary_of(dev);
        owner = alias_of(handle);
        if (!owner) {
                owner = owner_of(handle, dev);
                if (owner && owner != handle && alias_count < ALIASES_MAX)
                        aliases[alias_count++] = (struct alias){handle, owner};
        }
        gr_unlock(&lock);
        gr_operations_restore_captures(mode);
        if (owner) {
                gr_device_use(dev);
                context = add_context(owner, dev);
        }
        gr_unlock(&gr_primary_locks[dev]);
        if (context && gr_overhead_counted())
                gr_overhead_look(context->device, 0);
        return context;
}

struct gr_context *gr_context_ask(void)
{
        uint64_t now = atomic_load_explicit(&gr_contexts_version, memory_order_acquire);
        CUcontext handle = NULL;

        gr_thread.current_version = 0;
        if (gr_real.cuCtxGetCurrent(&handle) != CUDA_SUCCESS || !handle)
                return NULL;
        if (gr_thread.handle != handle || gr_thread.looked_up_version != now) {
                GR_KEEP_ERRNO;
                gr_thread.context = look_up_context(handle);
                gr_thread.handle = handle;
                gr_thread.runtimes = 0;
                gr_thread.looked_up_version = gr_thread.context ? now : 0;
        }
        if (gr_thread.context && !atomic_load_explicit(&several, memory_order_acquire))
                gr_thread.current_version = now;
        return gr_thread.context;
}

void gr_context_runtime_used(unsigned runtime)
{
        if (gr_context_current())
                gr_thread.runtimes |= runtime;
}

void gr_context_runtime_unsure(void)
{
        gr_thread.runtimes = 0;
}

struct gr_context *gr_context_visit(CUcontext handle)
{
        struct gr_context *context;

        if (gr_real.cuCtxPushCurrent_v2(handle) != CUDA_SUCCESS)
                return NULL;
        context = gr_context_ask();
        gr_real.cuCtxPopCurrent_v2(&handle);
        gr_thread.current_version = 0;
        return context;
}

/* The current context changes, or may have changed. */
GR_EXPORT CUresult CUDAAPI cuCtxSetCurrent(CUcontext ctx)
{
        if (ctx != gr_thread.handle)
                gr_thread.current_version = 0;
        return GR_REAL(cuCtxSetCurrent, ctx);
}

GR_EXPORT CUresult CUDAAPI cuCtxPushCurrent(CUcontext ctx)
{
        gr_thread.current_version = 0;
        return GR_REAL(cuCtxPushCurrent, ctx);
}

GR_EXPORT CUresult CUDAAPI cuCtxPushCurrent_v2(CUcontext ctx)
{
        gr_thread.current_version = 0;
        return GR_REAL(cuCtxPushCurrent_v2, ctx);
}

GR_EXPORT CUresult CUDAAPI cuCtxPopCurrent(CUcontext *context)
{
        gr_thread.current_version = 0;
        return GR_REAL(cuCtxPopCurrent, context);
}

GR_EXPORT CUresult CUDAAPI cuCtxPopCurrent_v2(CUcontext *context)
{
        gr_thread.current_version = 0;
        return GR_REAL(cuCtxPopCurrent_v2, context);
}

/* The driver has destroyed a context, and with it all its memory, streams and events. */
static void context_ended(CUcontext handle)
{
        struct gr_context *context = gr_context_find(&gr_core, handle);

        gr_lock_rank_assert_free_from(GR_RANK_LADDER); /* waits for visitors, which may take any lock from there on */
        atomic_fetch_add(&gr_contexts_version, 1);
        gr_captures_context_gone(handle);
        gr_operations_context_gone(handle);
        gr_segment_import_context_gone(handle);
        gr_accounted_owner_gone(gr_core.accounted, handle);
        gr_lock(&lock);
        for (unsigned i = 0; i < alias_count;)
                if (aliases[i].handle == handle || aliases[i].owner == handle)
                        aliases[i] = aliases[--alias_count];
                else
                        i++;
        for (int i = 0; i < GR_DEVICES_MAX; i++)
                if (primaries[i] == handle)
                        primaries[i] = NULL;
        gr_unlock(&lock);
        if (context) {
                gr_overhead_context_ended(context->device);
                gr_core_context_gone(context);
                gr_note_context_gone(context);
        }
}

/*
 * A new context has this handle, so an older one with the same handle has been destroyed. The thread that destroyed it
 * is about to clean up; this waits for that. If no thread is, the old one ended without the library's knowledge.
 */
static void is_new(CUcontext handle)
{
        struct gr_context *context;

        while ((context = gr_context_find(&gr_core, handle)))
                if (atomic_load(&context->ending))
                        gr_driver.sleep_ns(ENDED_LOOK_NS);
                else
                        context_ended(handle);
}

/*
 * The program has this context: adds it to the core, even before it allocates. Copies of one context may access memory
 * of another one on the same device, so the fences of each must cover all. made: the driver has just made it.
 */
static CUresult note_context(CUresult result, CUcontext *context, CUdevice dev, bool made)
{
        GR_KEEP_ERRNO;

        gr_thread.current_version = 0;
        if (result == CUDA_SUCCESS && gr_shim_ready() && gr_device_use(dev)) {
                if (made)
                        is_new(*context);
                gr_overhead_took_else();
                add_context(*context, dev);
                if (gr_overhead_counted())
                        gr_overhead_look(&gr_core.devices[dev], 0);
        }
        return result;
}

/* Without a context there is none to run the rung on, as where the first one finds a full device. */
static uint64_t ask_neighbours(int device)
{
        struct gr_device *used = gr_device_use(device);
        uint64_t want_bytes = NEIGHBOURS_BYTES;

        if (!used || !gr_core.ask_neighbours || gr_reclaimable_inside())
                return 0;
        /* None falls asleep for more than all have. */
        while (want_bytes > 1 && gr_core.may_give && !gr_core.may_give(used, want_bytes))
                want_bytes /= 2;
        return gr_core.ask_neighbours(&gr_core, used, want_bytes);
}

/* The one that is meant, or with -1 that of the current context; -1: there is none. */
static int device_or_current(int device)
{
        struct gr_context *context = device < 0 && gr_shim_ready() ? gr_context_current() : NULL;

        if (context)
                device = context->ordinal;
        return device < GR_DEVICES_MAX && gr_shim_ready() ? device : -1;
}

bool gr_context_make_room(int device, unsigned *tries)
{
        static const enum gr_rung rungs[] = {GR_RUNG_TRIM, GR_RUNG_SYNC, GR_RUNG_NEIGHBOUR};
        uint64_t back_bytes = 0;
        GR_KEEP_ERRNO;
        GR_NO_CANCEL;

        device = device_or_current(device);
        if (device < 0)
                return false;
        while (*tries < sizeof(rungs) / sizeof(rungs[0]) && back_bytes == 0) {
                enum gr_rung rung = rungs[(*tries)++];

                back_bytes = rung == GR_RUNG_NEIGHBOUR ? ask_neighbours(device)
                                                       : gr_rung_run_on(&gr_core, device, rung, UINT64_MAX);
        }
        return back_bytes > 0;
}

bool gr_context_note_failure(CUresult result, const char *call)
{
        static _Atomic bool told;
        struct gr_context *context = NULL;
        CUcontext handle;
        GR_KEEP_ERRNO;
        GR_NO_CANCEL;

        /* The context is not looked up: the caller may hold the lock of another device's primary context. */
        if (gr_error_is_of_kernel((int)result) && !told && gr_shim_ready() &&
            gr_real.cuCtxGetCurrent(&handle) == CUDA_SUCCESS && handle)
                context = gr_context_known(handle);
        if (context && !atomic_exchange(&told, true))
                gr_kernel_report(context, (int)result, call);
        return false;
}

bool gr_context_wait_for_room(int device, struct gr_room_wait *wait)
{
        uint64_t now_ns = gr_driver.now_ns(), wait_ns = gr_core.config.wait_ns;
        struct gr_device *used;
        GR_KEEP_ERRNO;
        GR_NO_CANCEL;

        device = device_or_current(device);
        used = device < 0 ? NULL : gr_device_use(device);
        if (!used || !wait_ns || gr_reclaimable_inside() ||
            (gr_core.config.wait_for_others_only && gr_core.may_give && !gr_core.may_give(used, 1)))
                return false;
        gr_lock_rank_assert_free_from(GR_RANK_PRIMARY); /* others may have to end a context meanwhile */
        if (!wait->device) {
                wait->device = used;
                wait->begin_ns = now_ns;
                if (gr_core.wait_for_neighbours)
                        gr_core.wait_for_neighbours(used, NEIGHBOURS_BYTES);
                gr_log(GR_LOG_INFO, "device %d: waiting up to %.3f s for room for what the driver needs itself", device,
                       (double)wait_ns / 1e9);
        }
        if (now_ns - wait->begin_ns >= wait_ns)
                return false;
        gr_driver.sleep_ns(gr_min(gr_max((now_ns - wait->begin_ns) / 8, ROOM_FIRST_NS), ROOM_MOST_NS));
        return true;
}

void gr_context_end_wait(const struct gr_room_wait *wait, bool success)
{
        if (gr_core.wait_for_neighbours)
                gr_core.wait_for_neighbours(wait->device, -(int64_t)NEIGHBOURS_BYTES);
        if (success && gr_core.served)
                gr_core.served();
}

/*
 * Whether a limit takes more memory than the current device has, so that no wait helps. The stacks of all threads that
 * the device can run at once are memory.
 */
static bool is_beyond_device(CUlimit limit, size_t value)
{
        int device, processors = 1, threads = 1;
        uint64_t total_bytes, bytes;
        GR_KEEP_ERRNO;
        GR_NO_CANCEL;

        device = device_or_current(-1);
        total_bytes = device < 0 ? 0 : atomic_load(&gr_core.devices[device].total_bytes);
        if (total_bytes > 0 && limit == CU_LIMIT_STACK_SIZE && gr_real.cuDeviceGetAttribute) {
                gr_real.cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
                gr_real.cuDeviceGetAttribute(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device);
        }
        return total_bytes > 0 &&
               (__builtin_mul_overflow(value, (uint64_t)processors * (unsigned)threads, &bytes) || bytes > total_bytes);
}

GR_EXPORT CUresult CUDAAPI cuCtxSetLimit(CUlimit limit, size_t value)
{
        GR_PASS_DEEP;
        CUresult result = GR_REAL(cuCtxSetLimit, limit, value);

        if (GR_IS_OUT_OF_MEMORY(result) && !is_beyond_device(limit, value))
                result = GR_WITH_ROOM(-1, GR_REAL(cuCtxSetLimit, limit, value));
        if (result == CUDA_SUCCESS)
                gr_overhead_took_else();
        else
                gr_context_note_failure(result, __func__);
        return result;
}

static CUresult note_created(CUresult result, CUcontext *context, CUdevice dev)
{
        return note_context(result, context, dev, true);
}

GR_EXPORT CUresult CUDAAPI cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice dev)
{
        GR_PASS_DEEP;
        return note_created(GR_WITH_ROOM(dev, GR_REAL(cuCtxCreate, context, flags, dev)), context, dev);
}

GR_EXPORT CUresult CUDAAPI cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice dev)
{
        GR_PASS_DEEP;
        return note_created(GR_WITH_ROOM(dev, GR_REAL(cuCtxCreate_v2, context, flags, dev)), context, dev);
}

GR_EXPORT CUresult CUDAAPI cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *params, int count,
                                          unsigned int flags, CUdevice dev)
{
        GR_PASS_DEEP;
        return note_created(GR_WITH_ROOM(dev, GR_REAL(cuCtxCreate_v3, context, params, count, flags, dev)), context,
                            dev);
}

GR_EXPORT CUresult CUDAAPI cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *params, unsigned int flags,
                                          CUdevice dev)
{
        GR_PASS_DEEP;
        return note_created(GR_WITH_ROOM(dev, GR_REAL(cuCtxCreate_v4, context, params, flags, dev)), context, dev);
}

GR_EXPORT CUresult CUDAAPI cuGLCtxCreate(CUcontext *context, unsigned int flags, CUdevice dev)
{
        GR_PASS_DEEP;
        gr_deep_never(GR_DEEP_IS_SHARED);
        return note_created(GR_WITH_ROOM(dev, GR_REAL(cuGLCtxCreate, context, flags, dev)), context, dev);
}

GR_EXPORT CUresult CUDAAPI cuGLCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice dev)
{
        GR_PASS_DEEP;
        gr_deep_never(GR_DEEP_IS_SHARED);
        return note_created(GR_WITH_ROOM(dev, GR_REAL(cuGLCtxCreate_v2, context, flags, dev)), context, dev);
}

GR_EXPORT CUresult CUDAAPI cuVDPAUCtxCreate(CUcontext *context, unsigned int flags, CUdevice dev, uint32_t vdp_device,
                                            void *vdp_get_proc_address)
{
        GR_PASS_DEEP;
        gr_deep_never(GR_DEEP_IS_SHARED);
        return note_created(
                GR_WITH_ROOM(dev, GR_REAL(cuVDPAUCtxCreate, context, flags, dev, vdp_device, vdp_get_proc_address)),
                context, dev);
}

GR_EXPORT CUresult CUDAAPI cuVDPAUCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice dev,
                                               uint32_t vdp_device, void *vdp_get_proc_address)
{
        GR_PASS_DEEP;
        gr_deep_never(GR_DEEP_IS_SHARED);
        return note_created(
                GR_WITH_ROOM(dev, GR_REAL(cuVDPAUCtxCreate_v2, context, flags, dev, vdp_device, vdp_get_proc_address)),
                context, dev);
}

static void primary_retained(CUdevice dev, CUcontext primary)
{
        gr_assert_locked(&gr_primary_locks[dev]);
        gr_lock(&lock);
        primaries[dev] = primary;
        retained[dev]++;
        gr_unlock(&lock);
}

GR_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice dev)
{
        GR_PASS_DEEP;
        CUresult result;
        GR_NO_CANCEL;

        if (!gr_shim_ready() || dev < 0 || dev >= GR_DEVICES_MAX)
                return GR_REAL(cuDevicePrimaryCtxRetain, context, dev);
        return GR_WAIT_FOR_ROOM(dev, ({
                                        gr_lock(&gr_primary_locks[dev]);
                                        result = GR_WITH_ROOM_NOW(dev, GR_REAL(cuDevicePrimaryCtxRetain, context, dev));
                                        if (result == CUDA_SUCCESS)
                                                primary_retained(dev, *context);
                                        note_context(result, context, dev, false);
                                        gr_unlock(&gr_primary_locks[dev]);
                                        result;
                                }));
}

/*
 * Called before the driver destroys a context. From here on no fence of another context covers its work. If the driver
 * does not destroy it, context_stays() undoes that.
 */
static void context_ending(CUcontext handle)
{
        struct gr_context *context = gr_context_find(&gr_core, handle);

        gr_lock_rank_assert_free_from(GR_RANK_LADDER);
        if (context) {
                gr_note_context_ending(context);
                gr_core_context_ending(context);
        }
}

/* The driver did not destroy the context: fences cover it again. */
static void context_stays(CUcontext handle)
{
        struct gr_context *context = gr_context_find(&gr_core, handle);

        if (context)
                gr_core_context_stays(context);
}

/* 0: unknown. */
static unsigned long long id_of(CUcontext ctx)
{
        unsigned long long id;

        return gr_real.cuCtxGetId && gr_real.cuCtxGetId(ctx, &id) == CUDA_SUCCESS ? id : 0;
}

/*
 * Whether a context still exists. The driver recognises handles of destroyed contexts (docs/measurements.md,
 * context-end); a different id means that the handle belongs to a new context.
 */
static bool is_alive(CUcontext ctx, unsigned long long id)
{
        unsigned int version;

        return gr_real.cuCtxGetApiVersion && gr_real.cuCtxGetApiVersion(ctx, &version) == CUDA_SUCCESS &&
               id_of(ctx) == id;
}

/* counted: the call only takes back one attach, and the context ends with the last one. */
static CUresult destroy_context(CUcontext ctx, __typeof__(cuCtxDestroy_v2) *real, bool counted)
{
        GR_KEEP_ERRNO;
        unsigned long long id = id_of(ctx);
        CUresult result;
        GR_NO_CANCEL; /* a context that is about to end must end or stay */

        if (!real)
                return CUDA_ERROR_NOT_FOUND;
        if (gr_shim_ready())
                context_ending(ctx);
        result = real(ctx);
        gr_thread.current_version = 0;
        if (result == CUDA_SUCCESS && gr_shim_ready() && !(counted && is_alive(ctx, id)))
                context_ended(ctx);
        else if (gr_shim_ready())
                context_stays(ctx);
        return result;
}

GR_EXPORT CUresult CUDAAPI cuCtxDestroy(CUcontext ctx)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return destroy_context(ctx, gr_real.cuCtxDestroy, false);
}

GR_EXPORT CUresult CUDAAPI cuCtxDestroy_v2(CUcontext ctx)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return destroy_context(ctx, gr_real.cuCtxDestroy_v2, false);
}

GR_EXPORT CUresult CUDAAPI cuCtxDetach(CUcontext ctx)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return destroy_context(ctx, gr_real.cuCtxDetach, true);
}

/* Whether a release left the primary context as it was. */
static bool still_active(CUdevice dev)
{
        unsigned int flags;
        int active = 1;

        gr_assert_locked(&gr_primary_locks[dev]);
        if (!gr_real.cuDevicePrimaryCtxGetState)
                return true;
        /* A wrong answer could hand out memory of a destroyed context, so a failed call is repeated once. */
        for (int i = 0; i < 2; i++)
                if (gr_real.cuDevicePrimaryCtxGetState(dev, &flags, &active) == CUDA_SUCCESS)
                        break;
        return active;
}

/*
 * The last release ends the context. Only the driver knows the count, so it counts as the last one if the hooks have
 * seen no more than one retain.
 */
struct gr_release gr_context_before_release(CUdevice dev, bool reset)
{
        struct gr_release release = {.reset = reset};

        gr_assert_locked(&gr_primary_locks[dev]);
        gr_lock(&lock);
        release.primary = primaries[dev];
        release.ends = reset || retained[dev] <= 1;
        gr_unlock(&lock);
        if (release.primary && release.ends)
                context_ending(release.primary);
        return release;
}

void gr_context_after_release(CUdevice dev, const struct gr_release *release, CUresult result)
{
        gr_assert_locked(&gr_primary_locks[dev]);
        if (result == CUDA_SUCCESS) {
                gr_lock(&lock);
                /*
                 * After a reset the count is unknown. With a count that is too low the library only prepares for an end
                 * that does not come.
                 */
                retained[dev] = release->reset || retained[dev] == 0 ? 0 : retained[dev] - 1;
                gr_unlock(&lock);
        }
        if (release->primary && result == CUDA_SUCCESS && (release->reset || !still_active(dev)))
                context_ended(release->primary);
        else if (release->primary && release->ends)
                context_stays(release->primary);
}

static CUresult primary_ends(CUdevice dev, __typeof__(cuDevicePrimaryCtxRelease_v2) *real, bool reset)
{
        GR_KEEP_ERRNO;
        struct gr_release release;
        CUresult result;
        GR_NO_CANCEL;

        if (!real)
                return CUDA_ERROR_NOT_FOUND;
        if (!gr_shim_ready() || dev < 0 || dev >= GR_DEVICES_MAX)
                return real(dev);
        gr_lock(&gr_primary_locks[dev]);
        release = gr_context_before_release(dev, reset);
        result = real(dev);
        gr_context_after_release(dev, &release, result);
        gr_unlock(&gr_primary_locks[dev]);
        return result;
}

GR_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice dev)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return primary_ends(dev, gr_real.cuDevicePrimaryCtxRelease, false);
}

GR_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return primary_ends(dev, gr_real.cuDevicePrimaryCtxRelease_v2, false);
}

GR_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxReset(CUdevice dev)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return primary_ends(dev, gr_real.cuDevicePrimaryCtxReset, true);
}

GR_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return primary_ends(dev, gr_real.cuDevicePrimaryCtxReset_v2, true);
}

void gr_context_green_made(CUdevice dev, bool counted)
{
        CUstreamCaptureMode mode = gr_operations_relax_captures();
        CUcontext primary = primary_of(dev);

        gr_operations_restore_captures(mode);
        gr_lock(&lock);
        retained[dev] += counted;
        if (primary)
                primaries[dev] = primary;
        gr_unlock(&lock);
        if (primary)
                note_context(CUDA_SUCCESS, &primary, dev, false);
}

void gr_context_distrust_aliases(void)
{
        gr_lock(&lock);
        alias_count = 0;
        gr_unlock(&lock);
        atomic_fetch_add(&gr_contexts_version, 1);
}

void gr_context_end_inactive(void)
{
        GR_NO_CANCEL;

        for (int i = 0; i < GR_DEVICES_MAX; i++) {
                CUcontext primary;

                gr_lock(&gr_primary_locks[i]);
                gr_lock(&lock);
                primary = primaries[i];
                gr_unlock(&lock);
                if (primary && !still_active(i))
                        context_ended(primary);
                gr_unlock(&gr_primary_locks[i]);
        }
}

/*
 * Work of the current context can now access the peer's blocks, so the peer's fences must cover it. It may have had the
 * access before: another call can enable it, as cuIpcOpenMemHandle, or a call past the library.
 */
GR_EXPORT CUresult CUDAAPI cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
        GR_PASS_DEEP;
        struct gr_context *current, *owner;
        CUresult result;
        GR_NO_CANCEL;

        result = GR_REAL(cuCtxEnablePeerAccess, peer, flags);
        if ((result != CUDA_SUCCESS && result != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) || !gr_shim_ready())
                return result;
        current = gr_context_current();
        owner = gr_context_visit(peer);
        GR_KEEP_ERRNO;
        if (current && owner) {
                gr_fence_add_accessor(owner->fence, current);
                gr_core_note_graph(&gr_core, GR_DEVICE_BIT(owner->ordinal)); /* kernels of its graphs may use it */
        }
        return result;
}
