/*
 * What the parts of the shim share. The shim stands between a program and the CUDA driver: it finds the program's
 * look-ups (lookup.c), turns calls into requests to core/ (memory.c, query.c, context.c, device.c, stream.c, submit.c,
 * sync.c; runtime.c for two functions of the shared runtime; stream_ordered.c, vmm.c, ipc.c, managed.c, array.c,
 * graph.c, module.c and pinned_host.c for what the pool does not serve; overhead.c for what the driver takes by itself;
 * nvml_views.c for NVML's answers), gives core/ the real driver (operations.c), and looks after the process: options,
 * fork, exit, helper thread (process.c), and the other processes on the card (neighbour.c, platform.c).
 *
 * Every hook keeps errno, and returns what the driver would have returned. Before gr_shim_ready says yes, and after
 * fork, hooks do nothing but call the real function.
 */
#ifndef GR_SHIM_H
#define GR_SHIM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define __CUDA_API_VERSION_INTERNAL /* every version of each function under its exported name */
#include <cuda.h>

#include "pool.h"

#if CUDA_VERSION < 13000 /* newer than the oldest toolkit we build with */
CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext ctx);
CUresult CUDAAPI cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type);
CUresult CUDAAPI cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type);
#endif

#define GR_EXPORT   __attribute__((visibility("default")))
#define GR_HOT_DATA __attribute__((section("gr_hot"))) /* what each call reads, side by side in a cache line */
#define GR_VERSION  "0.1.0"

/* A pointer that is no allocation: the driver answers for it as for one that was freed (measured, driver 580). */
#define GR_NO_POINTER ((CUdeviceptr)0x1000)

/* Of cudaGL.h and cudaVDPAU.h, which need headers of others. */
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
        GR_SHIM_UNRESOLVED, /* no driver seen yet */
        GR_SHIM_READY,
        GR_SHIM_ENDING, /* ready, while the process exits: the driver shuts down at some moment from here on */
        GR_SHIM_OFF,    /* everything passes through: a needed symbol is missing, the driver has shut down, or this is a
                           child after fork */
};

extern _Atomic int gr_shim_state GR_HIDDEN;

/*
 * lookup.c: looks for the driver in this process and, once it is there, for its functions; while the process ends,
 * whether it still answers. Returns whether hooks may do their work.
 */
bool gr_shim_resolve(void);

/* dlsym as it would be without us. */
void *gr_real_symbol(void *handle, const char *name);

/* Whether hooks may do their work. */
static inline bool gr_shim_ready(void)
{
        int state = atomic_load_explicit(&gr_shim_state, memory_order_acquire);

        return __builtin_expect(state == GR_SHIM_READY, 1) || (state != GR_SHIM_OFF && gr_shim_resolve());
}

/*
 * The driver's own function, looked for if this is the process's first call; CUDA_ERROR_NOT_FOUND where it does not
 * exist: called without a driver, or on one too old for it.
 */
#define GR_REAL(symbol, ...) (gr_shim_ready(), gr_real.symbol ? gr_real.symbol(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND)

/* process.c */
extern struct gr_core gr_core GR_HIDDEN;
extern struct gr_options gr_options;

/* Reads the options, so that warnings obey them; at the first call only. */
void gr_process_options(void);

/* Once, from gr_shim_resolve, with the driver: sets up the core. */
void gr_process_init(void);

/* A context is in use: from now on there is something to tell and to stop when the process ends. */
void gr_process_in_use(void);

/*
 * Opens what an option names for a report of ours, emptied: non-blocking, as a FIFO that nobody reads must not stop the
 * program. -1: the log has said why.
 */
int gr_report_open(const char *option, const char *path);

/* api.c: the core is there, and what was registered before joins it. */
void gr_public_init(void);

/* neighbour.c */

/* Before anything is charged to the device, once: from now on charges count for the group. total_bytes is known. */
void gr_neighbour_begin(struct gr_device *device);

/* The device is about to be used: joins the other processes on it, once. Without them the process works alone. */
void gr_neighbour_join(CUdevice dev);

/* Whether it has joined them. */
bool gr_neighbour_joined(const struct gr_device *device);

/* Now and then, where memory is taken from the driver: makes the threads that could not be made before. */
void gr_neighbour_retry(void);

/* Leaves them; waits briefly for our threads. At the end of the process. */
void gr_neighbour_leave(void);

/* In a child after fork: what was joined is the parent's. */
void gr_neighbour_forget(void);

/* How many threads serve neighbours. */
unsigned gr_neighbour_threads(void);

/* Of a thread that serves neighbours: whoever has asked sees that it is at work. Nothing on other threads. */
void gr_neighbour_beat(void);

/* For gr_core.ask_neighbours. */
uint64_t gr_neighbour_ask(struct gr_core *core, struct gr_device *device, uint64_t want_bytes);

/* What the group has taken of a card, of this UUID without a prefix; for a process that is no member. */
uint64_t gr_neighbour_sum(const char *uuid);

/* For gr_core.wait_for_neighbours. */
void gr_neighbour_wait(struct gr_device *device, int64_t bytes);

/* operations.c */
extern struct gr_driver gr_driver;

/* Fills gr_driver with what gr_real has. */
void gr_driver_init(void);

/* The context is gone, and our stream in it. */
void gr_driver_forget(CUcontext context);

/* The driver's answer as core/ wants it, and back: rc is 0 or -errno. */
int gr_errno(CUresult result);
CUresult gr_result_of(int rc);

static inline CUresult gr_result(int rc)
{
        return __builtin_expect(rc == 0, 1) ? CUDA_SUCCESS : gr_result_of(rc);
}

/* The calling thread neither disturbs captures nor is refused because of them until the mode is given back. */
CUstreamCaptureMode gr_capture_relax(void);
void gr_capture_restore(CUstreamCaptureMode mode);

/* context.c */

/* As gr_current_context; what is current the driver says. */
struct gr_context *gr_context_ask(void);

/* Moves on when a context ends or is no longer the only one: no thread trusts its last one then. Never 0. */
extern _Atomic uint64_t gr_context_generation GR_HIDDEN;

/* The pool of the calling thread's current context; NULL where there is none or it cannot be managed. */
static inline struct gr_context *gr_current_context(void)
{
        return __builtin_expect(gr_thread.sure == atomic_load_explicit(&gr_context_generation, memory_order_acquire), 1)
                       ? gr_thread.context
                       : gr_context_ask();
}

/* The pool of a context that need not be current; NULL where it is not known yet. */
struct gr_context *gr_context_known(CUcontext handle);

/* The same, made known by making it current for a moment; NULL where the driver refuses that. */
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

/* It has served the thread; a device was chosen. */
void gr_runtime_used(unsigned runtime);
void gr_runtime_unsure(void);

/* trace.c */
extern _Atomic bool gr_trace_on GR_HIDDEN;

/* Opens the file that GPURECLAIM_TRACE names, if any; once, in the process that uses CUDA. */
void gr_trace_init(void);
void gr_trace_end(void);

/* Where gr_trace_on; a free is told before it happens, as its address may be handed out at once. */
void gr_trace_alloc(CUdeviceptr ptr, size_t bytes);
void gr_trace_free(CUdeviceptr ptr);

static inline bool gr_tracing(void)
{
        return __builtin_expect(atomic_load_explicit(&gr_trace_on, memory_order_relaxed), 0);
}

/* memory.c */

/*
 * A block of the pool for the program, and one from it, told to the trace; 0 or -errno, errno is kept. bytes: more than
 * none, at most GR_BLOCK_MAX_BYTES. -ENOENT: not the pool's. What else gr_memory_free refuses is still as it was.
 * Each begins with the fast path, here, and goes on with what only the slow one does. ptr: what gr_arena_alloc had, 0
 * for nothing. The free's context: where gr_arena_free took it back, much as it said; NULL where it did not.
 */
int gr_memory_alloc_slow(struct gr_context *context, uint64_t ptr, size_t bytes, CUdeviceptr *ret_ptr);
int gr_memory_free_slow(struct gr_context *context, CUdeviceptr ptr, bool much);

static inline int gr_memory_alloc(struct gr_context *context, size_t bytes, CUdeviceptr *ret_ptr)
{
        uint64_t ptr = gr_arena_alloc(context, bytes); /* cannot touch errno, as what follows may */

        if (__builtin_expect(!ptr || gr_tracing(), 0))
                return gr_memory_alloc_slow(context, ptr, bytes, ret_ptr);
        *ret_ptr = ptr;
        return 0;
}

static inline int gr_memory_free(CUdeviceptr ptr)
{
        struct gr_context *context = NULL;
        bool much = false;

        if (__builtin_expect(!gr_tracing(), 1))
                context = gr_arena_free(&gr_core, ptr, &much);
        if (__builtin_expect(!context || much || gr_pool_wants_wake(context), 0))
                return gr_memory_free_slow(context, ptr, much);
        return 0;
}

/* After a call of the driver's that gives the program memory at *dptr where it succeeds: see gr_pool_given. Its result.
 */
CUresult gr_given(CUresult result, const CUdeviceptr *dptr);

/* runtime.c */

/* The pool's answer, -errno, to the call of the driver's that the runtime is about to make for this thread; 0: none. */
extern _Thread_local __attribute__((tls_model("initial-exec"))) int gr_runtime_refused;

/* Somebody wants to see each call of the runtime's: none passes it by from now on. by is for the log. */
void gr_runtime_watched(const char *by);

/* device.c */

/* The device's budget, with its limits set; NULL for an ordinal that cannot be. */
struct gr_device *gr_device_get(CUdevice device);

/* The same for whoever is about to have something there that counts: the process is in use and has joined the others.
 */
struct gr_device *gr_device_use(CUdevice device);

/* The device's UUID, in bytes and as text without a prefix; either may be NULL. False: the driver does not tell it. */
#define GR_UUID_TEXT_BYTES 37
bool gr_device_uuid(CUdevice device, CUuuid *ret, char *ret_text);

/* stream_ordered.c */

/* Corrects the charge for the driver's own pools and graph memory of the device, waiting for nothing. */
void gr_async_refresh(struct gr_device *device);

/* The same after trimming them all: the default one and those that the program made. A context of device is current. */
void gr_async_trim(struct gr_device *device);

/* The same for pools of host memory. */
void gr_async_trim_host(void);

/*
 * cuMemFree of what is neither the pool's nor managed memory. Where it is a stream-ordered pool's, the driver goes on
 * counting it as used for ever (H200, driver 580): it is idle to us from then on.
 */
CUresult gr_async_free(CUdeviceptr ptr);

/* A free in stream order that has begun; of stream_ordered.c, the memory is the caller's until the end. */
struct gr_async_free {
        struct gr_async_free *prev, *next;
        CUdeviceptr ptr;
        uint64_t orphan_bytes; /* of a pool that was destroyed before the driver freed it; 0: none */
        uint64_t found_bytes;  /* the same where its pool is just being destroyed */
        int device, found_device;
        bool noted; /* in the list of those that have begun */
};

/*
 * Around the driver's cuMemFreeAsync, outside of captures, of what is not the library's: memory that outlived its pool
 * is charged until here, also where the pool is destroyed in between.
 */
void gr_async_free_begin(struct gr_async_free *free, CUdeviceptr ptr);
void gr_async_free_end(struct gr_async_free *free, CUresult result);

/*
 * The stream is being captured, or cannot be asked because another one is. Costs nothing while there is no capture.
 * null_is_own: by a function whose 0 is the thread's own stream; the legacy one, which 0 is to the driver's question,
 * cannot be asked while any blocking stream is captured.
 */
bool gr_async_captured(CUstream stream, bool null_is_own);

/*
 * A graph is about to reserve memory, need_bytes where none lies idle: charges what is missing, in *ret_reserved_bytes.
 * may_have_it: it had its memory before a trim, which may have left it that: all that is reserved may be its own.
 * -EDQUOT: the limit. Afterwards, whatever came of it, settle makes the charge what the driver reserved.
 */
int gr_async_graph_reserve(struct gr_device *device, uint64_t need_bytes, bool may_have_it,
                           uint64_t *ret_reserved_bytes);
void gr_async_graph_settle(struct gr_device *device, uint64_t reserved_bytes);

/* graph.c */

/* From now on graphs are looked through for allocations; graphs' idle memory went back. */
void gr_graph_memory_seen(void);
/* A node of the type is about to be added to some graph: stream.c wants to know of those that wait for the host. */
void gr_graph_node_seen(CUgraphNodeType type);

/* Around the launch of a graph, which may have such a node. */
bool gr_graph_will_wait(void);
CUresult gr_graph_waits(bool told, CUresult result);
bool gr_graph_memory(void); /* whether any graph may have allocated */
void gr_graph_trimmed(void);

/* overhead.c */

/* How old the figure may be where it is looked at beside something else that goes to the driver. */
#define GR_OVERHEAD_AGE_NS UINT64_C(100000000)

/* Whether the limit counts what the driver takes by itself. */
static inline bool gr_overhead_counted(void)
{
        return gr_options.limit_includes == GR_INCLUDES_PROCESS;
}

/*
 * Sees what the driver took by itself, unless that was done less than most_age_ns ago: into device->driver_bytes and,
 * where it counts, the charge. Takes locks of its own and asks NVML, so never with a lock of core/ above the ladder's.
 */
void gr_overhead_look(struct gr_device *device, uint64_t most_age_ns);

/* The driver has just taken something for the current context: whether the limit holds still, or again after the
 * ladder. */
bool gr_overhead_fits(void);

/* nvml_views.c */

/* What we export under this name to stand in for NVML's; NULL: we do not. */
void *gr_nvml_hook(const char *name);

/* Our hook where function is one of NVML's own and the program is to be told its share, else function. */
void *gr_nvml_swap(void *function);

/* stream.c */

/* Work may run beside other work from now on. After gr_shim_ready. */
void gr_streams_overlap(void);

/* The driver has ended a context, and with it the captures on its streams. */
void gr_captures_end(CUcontext context);

/* submit.c */

/* The calling thread is about to submit work to the stream; null_is_own: by a function whose 0 is the thread's own. */
void gr_submits(CUstream stream, bool null_is_own);

/* ipc.c */

/* Memory is shared with others from now on: kernels may wait for what those write there. */
void gr_memory_shared(void);

/* A descriptor for memory of this process is about to be handed to the program: it can be told when it comes back. */
void gr_export_mark(int fd);

/* Whether such a descriptor, or a copy of it, stands for memory of this process. */
bool gr_export_is_own(int fd);

/* managed.c */

/* cuMemFree of what is no block of the pool. */
CUresult gr_free_accounted(CUdeviceptr ptr);

/* query.c */

/* The block of ours that ptr lies in. -ENOENT: none. *ret_base its first byte. */
int gr_block_at(CUdeviceptr ptr, CUdeviceptr *ret_base, struct gr_block_info *ret_info);

/* What to ask the driver about in place of ptr: one that is no allocation, where it is memory that we only cache. */
CUdeviceptr gr_unless_cached(CUdeviceptr ptr);

#endif
