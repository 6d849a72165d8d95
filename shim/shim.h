/*
 * What the parts of the shim share. The shim stands between a program and the CUDA driver.
 *
 *   driver/   the driver's own functions (real.c), core/'s table of them (operations.c), driver overhead (overhead.c),
 *             NVML (nvml.c)
 *   process/  options (environment.c), workers and other threads (workers.c), the trace (trace.c), other processes on
 *             the card (neighbour.c, platform.c), the public functions (api.c), and what sets all of it up: the
 *             background thread, fork and exit (process.c)
 *   hooks/    turns calls into requests to core/: memory.c, query.c, context.c, device.c, stream.c (with captures.c),
 *             submit.c, sync.c; runtime.c for functions of the shared runtime; stream_ordered.c, vmm.c, ipc.c,
 *             managed.c, array.c, graph.c, module.c and pinned_host.c for memory that the pool of device memory does
 *             not serve; nvml_views.c for NVML's answers
 *   lookup/   answers the program's look-ups of driver functions with hooks (lookup.c, dlsym.S, hooks.def)
 *
 * The order in meson.build says who may call whom.
 *
 * Every hook keeps errno, and returns what the driver would have returned. Before gr_shim_ready returns true, and after
 * fork, hooks only call the real function.
 */
#ifndef GR_SHIM_H
#define GR_SHIM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define __CUDA_API_VERSION_INTERNAL /* every version of each function under its exported name */
#include <cuda.h>

#include "core.h"
#include "driver/dlsym.h"
#include "keep_errno.h"
#include "pool.h"

#if CUDA_VERSION < 13000 /* newer than the oldest toolkit that can build this */
CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext ctx);
CUresult CUDAAPI cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type);
CUresult CUDAAPI cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type);
#endif

#define GR_EXPORT   __attribute__((visibility("default")))
#define GR_HOT_DATA __attribute__((section("gr_hot"))) /* read by each call: together in one cache line */

/*
 * A pointer that is no allocation: the driver answers for it as for one that was freed (docs/measurements.md,
 * no-pointer).
 */
#define GR_NO_POINTER ((CUdeviceptr)0x1000)

/* Declared in cudaGL.h and cudaVDPAU.h, which need headers of OpenGL and VDPAU. */
CUresult CUDAAPI cuGLCtxCreate(CUcontext *context, unsigned int flags, CUdevice dev);
CUresult CUDAAPI cuGLCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice dev);
CUresult CUDAAPI cuVDPAUCtxCreate(CUcontext *context, unsigned int flags, CUdevice dev, uint32_t vdp_device,
                                  void *vdp_get_proc_address);
CUresult CUDAAPI cuVDPAUCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice dev, uint32_t vdp_device,
                                     void *vdp_get_proc_address);

/* The driver's own functions; those of GR_CALL may be NULL. Written once, before gr_shim_ready. */
struct gr_real {
#define GR_HOOK(symbol) __typeof__(symbol) *symbol;
#define GR_CALL(symbol) __typeof__(symbol) *symbol;
#define GR_NEED(symbol) __typeof__(symbol) *symbol;
#include "lookup/hooks.def"
#undef GR_HOOK
#undef GR_CALL
#undef GR_NEED
};

extern struct gr_real gr_real GR_HIDDEN;

enum gr_shim_state {
        GR_SHIM_UNRESOLVED, /* no driver found yet */
        GR_SHIM_READY,
        GR_SHIM_ENDING, /* ready, but the process exits: the driver may shut down at any moment */
        GR_SHIM_OFF,    /* hooks only call the real function: a needed symbol is missing, the driver has shut down, or
                           this is a child after fork */
};

extern _Atomic int gr_shim_state GR_HIDDEN;
extern struct gr_core gr_core GR_HIDDEN;

/*
 * What is set up once gr_real is filled, by the first call of any hook. It lies above all hooks, so the file that has it
 * registers it: GR_SET_UP_BY puts its address into a section of its own. The linker does so, not a constructor, because
 * hooks may be called before any constructor. set_up is called once, under the lock of gr_shim_resolve; in_child in a
 * child after fork, also where nothing was set up.
 */
struct gr_set_up {
        void (*set_up)(void), (*in_child)(void);
};

extern const struct gr_set_up __start_gr_set_up GR_HIDDEN;
#define GR_SET_UP_BY(set_up, in_child)                                                                                 \
        static const struct gr_set_up gr_set_up_by __attribute__((used, section("gr_set_up"))) = {set_up, in_child}

/*
 * Unresolved: looks for the driver in this process and, once it is loaded, for its functions. Ending: checks whether the
 * driver still answers. Returns whether hooks may do their work. Any thread; keeps errno.
 */
bool gr_shim_resolve(void);

/*
 * Called with the result of a driver's function that gives the program memory at *dptr: tells the pool (gr_pool_given)
 * where it is CUDA_SUCCESS. Returns result.
 */
CUresult gr_given(CUresult result, const CUdeviceptr *dptr);

/* The device's UUID, in bytes and as text without a prefix; either may be NULL. False: the driver does not tell it. */
#define GR_UUID_TEXT_BYTES 37
bool gr_device_uuid(CUdevice device, CUuuid *ret, char *ret_text);

/* Whether hooks may do their work. */
static inline bool gr_shim_ready(void)
{
        int state = atomic_load_explicit(&gr_shim_state, memory_order_acquire);

        return __builtin_expect(state == GR_SHIM_READY, 1) || (state != GR_SHIM_OFF && gr_shim_resolve());
}

/*
 * Calls the driver's own function. The first call of the process looks for the driver. CUDA_ERROR_NOT_FOUND where the
 * function does not exist: there is no driver, or it is too old.
 */
#define GR_REAL(symbol, ...) (gr_shim_ready(), gr_real.symbol ? gr_real.symbol(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND)

/* environment.c */
extern struct gr_options gr_options;

/* Reads the options, at the first call only. Called before the first warning, so that warnings obey them. */
void gr_process_options(void);

/* api.c: the core is set up, and reclaimables that were registered before are registered with it. */
void gr_public_init(void);

/* neighbour.c */

/* Once, before anything is charged to the device, with total_bytes known. Later charges count for the group. */
void gr_neighbour_begin(struct gr_device *device);

/* The device is about to be used: joins the group's region, at the first call only. Where that fails, works alone. */
void gr_neighbour_join(CUdevice dev);

/* Whether the device's region has been joined. */
bool gr_neighbour_joined(const struct gr_device *device);

/* Called where memory is taken from the driver: starts, now and then, the threads that could not be started before. */
void gr_neighbour_retry(void);

/* At the end of the process: waits briefly for the threads that serve neighbours, and leaves the regions. */
void gr_neighbour_leave(void);

/* In a child after fork: the regions that were joined are the parent's. */
void gr_neighbour_forget(void);

/* How many threads serve neighbours. */
unsigned gr_neighbour_threads(void);

/* In a thread that serves neighbours: shows the process that asked that work goes on. No effect in other threads. */
void gr_neighbour_beat(void);

/* For gr_core.ask_neighbours. */
uint64_t gr_neighbour_ask(struct gr_core *core, struct gr_device *device, uint64_t want_bytes);

/*
 * What the group has reserved on the card with this UUID (text without a prefix), for a process that is no member. 0
 * where that is not known.
 */
uint64_t gr_neighbour_sum(const char *uuid);

/* For gr_core.wait_for_neighbours. */
void gr_neighbour_wait(struct gr_device *device, int64_t bytes);

/* operations.c */
extern struct gr_driver gr_driver;

/*
 * Held across every call that maps or unmaps memory, or releases it, the program's too. Two threads that remove two
 * mappings of one handle at a time, or a mapping and the handle, corrupt the driver's own heap (docs/measurements.md,
 * unmap-race). The program's are other handles, but whether the driver keeps those apart is not known. Also guards the
 * tables of vmm.c.
 */
extern struct gr_lock gr_mappings GR_HIDDEN;

/* What is told of the driver's calls. */
struct gr_driver_told {
        void (*taking)(void);   /* memory is about to be taken */
        void (*taken)(void);    /* an allocation was served; its context is current */
        void (*going_on)(void); /* the thread has not stopped: within long work, after each call */
};

/* Fills gr_driver with what gr_real has, but for the pools of the driver. told must live as long as the process. */
void gr_driver_init(const struct gr_driver_told *told);

/* The context has ended, and with it this library's stream in it. */
void gr_driver_forget(CUcontext context);

/* The driver's result as 0 or -errno for core/, and back. */
int gr_errno(CUresult result);
CUresult gr_result_of(int rc);

static inline CUresult gr_result(int rc)
{
        return __builtin_expect(rc == 0, 1) ? CUDA_SUCCESS : gr_result_of(rc);
}

/* Until the mode is restored, the calling thread neither disturbs captures nor is refused because of them. */
CUstreamCaptureMode gr_capture_relax(void);
void gr_capture_restore(CUstreamCaptureMode mode);

/* context.c */

/* As gr_current_context, but always asks the driver which context is current. */
struct gr_context *gr_context_ask(void);

/*
 * Grows when a context ends or is no longer the only one: after that, no thread trusts the context that it remembers.
 * Never 0.
 */
extern _Atomic uint64_t gr_context_generation GR_HIDDEN;

/* The calling thread's current context; NULL where there is none or it cannot be managed. */
static inline struct gr_context *gr_current_context(void)
{
        return __builtin_expect(gr_thread.sure == atomic_load_explicit(&gr_context_generation, memory_order_acquire), 1)
                       ? gr_thread.context
                       : gr_context_ask();
}

/* The context of a handle, which need not be current; NULL where the library does not know it yet. */
struct gr_context *gr_context_known(CUcontext handle);

/* The same. An unknown context is made current for a moment and added; NULL if the driver refuses that. */
struct gr_context *gr_context_visit(CUcontext handle);

/*
 * As gr_current_context, where the runtime of this bit has served the thread since the context became current and no
 * device was chosen; else NULL.
 */
static inline struct gr_context *gr_runtime_context(unsigned runtime)
{
        struct gr_context *context = gr_current_context();

        return __builtin_expect(gr_thread.runtimes & runtime, runtime) ? context : NULL;
}

/* The runtime of this bit has served the thread; a device was chosen, so that no runtime counts any more. */
void gr_runtime_used(unsigned runtime);
void gr_runtime_unsure(void);

/* trace.c */

/*
 * Opens and empties the file that an option names for a report. Non-blocking, because a FIFO without a reader must not
 * stop the program. -1: failed, and the log has said why.
 */
int gr_report_open(const char *option, const char *path);

extern _Atomic bool gr_trace_on GR_HIDDEN;

/* Opens the file that GPURECLAIM_TRACE names, if any; once, in the process that uses CUDA. */
void gr_trace_init(void);
void gr_trace_end(void);

/* Called where gr_trace_on is set. A free is noted before it happens, because its address may be reused at once. */
void gr_trace_alloc(CUdeviceptr ptr, size_t bytes);
void gr_trace_free(CUdeviceptr ptr);

static inline bool gr_tracing(void)
{
        return __builtin_expect(atomic_load_explicit(&gr_trace_on, memory_order_relaxed), 0);
}

/* memory.c */

/*
 * gr_memory_alloc gives the program a block of the pool, gr_memory_free takes one back; the trace is told. 0 or -errno;
 * errno is kept. bytes: from 1 to GR_BLOCK_MAX_BYTES. -ENOENT from a free: not a block of the pool. Where the free
 * fails, the block is unchanged.
 *
 * The inline functions are the fast path; the slow path is in memory.c, and goes on from what the fast path has done:
 * ptr is what gr_arena_alloc returned, 0 for nothing. The context of a slow free is the one that gr_arena_free
 * returned, with its output should_close; NULL where it did not take the block back.
 */
int gr_memory_alloc_slow(struct gr_context *context, uint64_t ptr, size_t bytes, CUdeviceptr *ret_ptr);
int gr_memory_free_slow(struct gr_context *context, CUdeviceptr ptr, bool should_close);

static inline int gr_memory_alloc(struct gr_context *context, size_t bytes, CUdeviceptr *ret_ptr)
{
        uint64_t ptr = gr_arena_alloc(context, bytes); /* does not touch errno; the slow path may */

        if (__builtin_expect(!ptr || gr_tracing(), 0))
                return gr_memory_alloc_slow(context, ptr, bytes, ret_ptr);
        *ret_ptr = ptr;
        return 0;
}

static inline int gr_memory_free(CUdeviceptr ptr)
{
        struct gr_context *context = NULL;
        bool should_close = false;

        if (__builtin_expect(!gr_tracing(), 1))
                context = gr_arena_free(&gr_core, ptr, &should_close);
        if (__builtin_expect(!context || should_close || gr_pool_wants_wake(context), 0))
                return gr_memory_free_slow(context, ptr, should_close);
        return 0;
}

/* -errno: the pool has refused the request that the runtime is about to pass to the driver in this thread; 0: no. */
extern _Thread_local __attribute__((tls_model("initial-exec"))) int gr_runtime_refused;

/* runtime.c */

/* A tool observes the calls of the runtime: from this call on, none bypasses the runtime. by names it in the log. */
void gr_runtime_watched(const char *by);

/* device.c */

/* note_use is called whenever a device is about to be used. Once, at the start. */
void gr_device_init(void (*note_use)(void));

/* The device's budget, with its limits set; NULL for an ordinal that cannot be. */
struct gr_device *gr_device_get(CUdevice device);

/* The same, before anything is charged there: marks the process as in use and joins the region. */
struct gr_device *gr_device_use(CUdevice device);

/* stream_ordered.c */

/* Corrects the charge for the driver's own pools and graph memory of the device. Does not wait for the GPU. */
void gr_async_refresh(struct gr_device *device);

/* The same after trimming all pools: the default one and the program's. A context of device is current. */
void gr_async_trim(struct gr_device *device);

/* The same for pools of host memory. */
void gr_async_trim_host(void);

/*
 * cuMemFree of memory that is neither the pool's nor managed. The driver counts memory of a stream-ordered pool that
 * was freed so as used for ever (docs/measurements.md, pool-free-by-cumemfree); this library counts it as idle.
 */
CUresult gr_async_free(CUdeviceptr ptr);

/*
 * A free in stream order that has begun. Only stream_ordered.c uses the fields. The structure belongs to the caller and
 * must live until gr_async_free_end.
 */
struct gr_async_free {
        struct gr_async_free *prev, *next;
        CUdeviceptr ptr;
        uint64_t orphan_bytes; /* size, where its pool was destroyed before the driver freed it; else 0 */
        uint64_t found_bytes;  /* the same while its pool is being destroyed */
        int device, found_device;
        bool noted; /* in the list of those that have begun */
};

/*
 * Called before and after the driver's cuMemFreeAsync, outside of captures, of memory that is not this library's.
 * Memory that outlived its pool stays charged until then, also where the pool is destroyed between the two calls.
 */
void gr_async_free_begin(struct gr_async_free *free, CUdeviceptr ptr);
void gr_async_free_end(struct gr_async_free *free, CUresult result);

/*
 * Whether the stream is being captured, or cannot be asked because another one is. Costs nothing while there is no
 * capture. null_is_own: the caller is a function whose stream 0 is the thread's own. For cuStreamIsCapturing 0 is the
 * legacy stream, which cannot be asked while any blocking stream is captured.
 */
bool gr_async_captured(CUstream stream, bool null_is_own);

/*
 * A graph is about to reserve memory. Charges need_bytes less the idle graph memory, and stores that in
 * *ret_reserved_bytes. may_have_it: the graph had its memory before a trim, which may have left it; then all reserved
 * graph memory is deducted, not only the idle part. -EDQUOT: the limit; nothing is charged. After a success the caller
 * must call settle, also where the launch fails: it corrects the charge to what the driver has reserved.
 */
int gr_async_graph_reserve(struct gr_device *device, uint64_t need_bytes, bool may_have_it,
                           uint64_t *ret_reserved_bytes);
void gr_async_graph_settle(struct gr_device *device, uint64_t reserved_bytes);

/* Some graph may allocate: graphs that are instantiated later are searched for allocations. */
void gr_graph_memory_seen(void);

bool gr_graph_memory(void);  /* whether any graph may have allocated */
void gr_graph_trimmed(void); /* idle graph memory was returned to the driver */

/* How often that happened, by the program or the library, plus 1. */
extern _Atomic uint64_t gr_graph_trims GR_HIDDEN;

/* graph.c */

/* A node of the type is about to be added to some graph: stream.c must know of those that wait for the host. */
void gr_graph_node_seen(CUgraphNodeType type);

/* Called before and after the launch of a graph, which may have such a node. */
bool gr_graph_will_wait(void);
CUresult gr_graph_waits(bool told, CUresult result);

/* overhead.c */

/* How old the figure of driver overhead may be where it is read beside another call of the driver. */
#define GR_OVERHEAD_AGE_NS UINT64_C(100000000)

/* Whether the limit counts what the driver takes by itself. */
static inline bool gr_overhead_counted(void)
{
        return gr_options.limit_includes == GR_INCLUDES_PROCESS;
}

/*
 * Measures driver overhead, unless that was done less than most_age_ns ago: into device->driver_bytes and, where the
 * limit counts it, into the charge. Takes locks of its own and asks NVML, so the caller must hold no lock of core/ that
 * ranks above the ladder's. Keeps errno.
 */
void gr_overhead_look(struct gr_device *device, uint64_t most_age_ns);

/* nvml_views.c */

/* This library's function in place of the one of NVML with this name; NULL: there is none. */
void *gr_nvml_hook(const char *name);

/* The hook of function, where it is one of NVML's and the program is to be told its share; else function. */
void *gr_nvml_swap(void *function);

/* submit.c */

/* The calling thread is about to submit work to the stream. null_is_own: as for gr_async_captured. */
void gr_submits(CUstream stream, bool null_is_own);

/* ipc.c */

/* Memory is shared with other processes or interfaces from this call on: kernels may wait for what those write. */
void gr_memory_shared(void);

/* Marks a descriptor for memory of this process, before the program gets it, so that an import can recognise it. */
void gr_export_mark(int fd);

/* Whether such a descriptor, or a copy of it, stands for memory of this process. */
bool gr_export_is_own(int fd);

/* managed.c */

/* cuMemFree of memory that is no block of the pool. */
CUresult gr_free_accounted(CUdeviceptr ptr);

/* query.c */

/* Describes the block of the pool that ptr lies in; *ret_base is its first byte. 0; -ENOENT: there is none. */
int gr_block_at(CUdeviceptr ptr, CUdeviceptr *ret_base, struct gr_block_info *ret_info);

/* The pointer to ask the driver about: GR_NO_POINTER where ptr lies in cached memory, else ptr. */
CUdeviceptr gr_unless_cached(CUdeviceptr ptr);

#endif
