/*
 * The simulated device: what its files share.
 *
 * Locks: sim_lock() guards contexts, streams, events, captures, graphs, pools and the work graph. sim_memory_lock()
 * guards the allocation tables and the bytes of device memory; it is taken inside sim_lock() or alone, never the other
 * way round, and workers hold it only while they access one chunk. The memory of handles is never unmapped, so the
 * magic of a stale one can always be read.
 */
#ifndef GR_SIM_H
#define GR_SIM_H

/* Declares every version of every entry point, the per-thread ones too, under its exported name. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include "newer.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define SIM_MAX_DEVICES       8
#define SIM_PAGE_BYTES        ((size_t)2 << 20)
#define SIM_SMALL_BYTES       ((size_t)1 << 20) /* allocations up to this size share a page */
#define SIM_UNIT_BYTES        ((size_t)512)
#define SIM_DRIVER            13050
#define SIM_RECAPTURE_FAILURE ((CUresult)918) /* CUDA_ERROR_GRAPH_RECAPTURE_FAILURE, from CUDA 13.3 on */
#define SIM_RESIDENT_THREADS  2048            /* at a time, on the one multiprocessor of a device */

#define SIM_API __attribute__((visibility("default"))) CUresult

/* Declared in cudaGL.h, which needs OpenGL's headers. */
SIM_API cuGLCtxCreate_v2(CUcontext *ctx, unsigned flags, CUdevice device);

SIM_API cuSimNewest(void); /* no driver's; exports.def */

enum sim_symbol {
#define SIM_EXPORT(name, version, symbol)                        SIM_ID_##symbol,
#define SIM_EXPORT_PT(name, version, pt_version, symbol, suffix) SIM_ID_##symbol, SIM_ID_##symbol##suffix,
#include "exports.def"
#undef SIM_EXPORT
#undef SIM_EXPORT_PT
        SIM_SYMBOLS
};

/* ---- lookup.c, settings.c, faults.c ---- */

struct sim_entry {
        const char *name;   /* as asked of cuGetProcAddress */
        const char *symbol; /* as exported */
        int version;
        bool per_thread;
        void *function;
};

extern const struct sim_entry sim_entries[SIM_SYMBOLS];

/*
 * The first step of every entry point: counts, traces and delays the call, and applies the faults. Returns the error
 * that the call must return, or CUDA_SUCCESS. Before cuInit all calls without `early` fail.
 */
CUresult sim_enter(enum sim_symbol symbol, bool early);
void sim_leave(const enum sim_symbol *symbol); /* the last step of every entry point */

#define SIM_ENTER_AS(symbol, early)                                                                                    \
        __attribute__((cleanup(sim_leave))) const enum sim_symbol entered_ = SIM_ID_##symbol;                          \
        do {                                                                                                           \
                CUresult enter_ = sim_enter(entered_, early);                                                          \
                if (enter_ != CUDA_SUCCESS)                                                                            \
                        return enter_;                                                                                 \
        } while (0)
#define SIM_ENTER(symbol) SIM_ENTER_AS(symbol, false)

/*
 * An entry point and its per-thread twin: they differ in what stream 0 means. Followed by the common body. With _ptsz
 * the stream is a parameter and must be called `stream`; with _ptds there is none, and the body gets one as an
 * additional last parameter.
 */
#define SIM_UNPACK(...) __VA_ARGS__
#define SIM_PTSZ(symbol, params, args)                                                                                 \
        static CUresult symbol##_on params;                                                                            \
        SIM_API symbol params                                                                                          \
        {                                                                                                              \
                SIM_ENTER(symbol);                                                                                     \
                return symbol##_on args;                                                                               \
        }                                                                                                              \
        SIM_API symbol##_ptsz params                                                                                   \
        {                                                                                                              \
                SIM_ENTER(symbol##_ptsz);                                                                              \
                if (!stream)                                                                                           \
                        stream = CU_STREAM_PER_THREAD;                                                                 \
                return symbol##_on args;                                                                               \
        }                                                                                                              \
        static CUresult symbol##_on params
#define SIM_PTDS(symbol, params, args)                                                                                 \
        static CUresult symbol##_on(SIM_UNPACK params, CUstream stream);                                               \
        SIM_API symbol params                                                                                          \
        {                                                                                                              \
                SIM_ENTER(symbol);                                                                                     \
                return symbol##_on(SIM_UNPACK args, CU_STREAM_LEGACY);                                                 \
        }                                                                                                              \
        SIM_API symbol##_ptds params                                                                                   \
        {                                                                                                              \
                SIM_ENTER(symbol##_ptds);                                                                              \
                return symbol##_on(SIM_UNPACK args, CU_STREAM_PER_THREAD);                                             \
        }                                                                                                              \
        static CUresult symbol##_on(SIM_UNPACK params, CUstream stream)

/* The configuration from the environment, read at the first call. */
struct sim_config {
        int devices;
        int physical[SIM_MAX_DEVICES];                        /* which GPU a device is: CUDA_VISIBLE_DEVICES */
        size_t memory_bytes;                                  /* per device, a multiple of SIM_PAGE_BYTES */
        size_t context_bytes, module_bytes, executable_bytes; /* what a context, a module, an executable graph take */
        size_t pitch_bytes;                                   /* of pitched memory: a row takes a multiple; not 0 */
        bool rdma;                                            /* the devices are capable of GPUDirect RDMA */
        bool lacks[CU_DEVICE_ATTRIBUTE_MAX];                  /* attributes that are 0 */
        const char *shared;                                   /* file of a GPU shared with other processes, or NULL */
};
const struct sim_config *sim_config(void);
void sim_complain(const char *variable, const char *value);
/* Calls read_word for each word of the variable, which commas separate; complains of a word if that returns false. */
void sim_read_list(const char *variable, bool (*read_word)(char *));
void sim_read_faults(void);                /* faults.c: reads what it needs, from sim_config */
bool sim_symbol_missing(const char *name); /* GRSIM_MISSING names it */
bool sim_setup(void);                      /* device.c: builds the devices, from cuInit; false: no addresses */
/* checkpoint.c: the outermost call of a thread waits while the process is locked. Returns the error that it gets. */
CUresult sim_checkpoint_enter(enum sim_symbol symbol);
void sim_checkpoint_leave(void);
extern _Thread_local bool sim_in_callback; /* a host function runs on this thread: it may not call the driver */
void sim_misuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- engine.c: work, its order, and the threads that do it ---- */

enum sim_op_kind {
        SIM_OP_JOIN, /* runs nothing; orders other nodes */
        SIM_OP_KERNEL,
        SIM_OP_COPY,
        SIM_OP_FILL,
        SIM_OP_WRITE_VALUE,
        SIM_OP_WAIT_VALUE,
        SIM_OP_HOST,
        SIM_OP_CALLBACK,
        SIM_OP_FREE,
        SIM_OP_GRAPH_ALLOC, /* runs nothing: the memory of a graph is counted at its launch */
        SIM_OP_GRAPH_FREE,
        SIM_OP_GRAPH_END, /* of a launch that keeps user objects */
};

struct sim_alloc;
struct sim_kernel;
#define SIM_KERNEL_ARGS 5

/* References of user objects, as graphs own them. Guarded by sim_lock(). */
struct sim_hold {
        CUuserObject object;
        size_t count;
};
struct sim_holds {
        struct sim_hold *hold;
        size_t count;
};

/* One piece of work, by value, so that a graph can run it again. */
struct sim_op {
        enum sim_op_kind kind;
        CUcontext ctx;
        union {
                struct {
                        const struct sim_kernel *kernel;
                        uint64_t arg[SIM_KERNEL_ARGS];
                        bool programmatic; /* it may begin before the kernel in front ends; here it never does */
                } launch;
                struct {
                        uintptr_t dst, src;
                        size_t width, height, depth; /* bytes, rows, slices */
                        size_t dst_pitch, src_pitch; /* bytes from row to row */
                        size_t dst_slice, src_slice; /* bytes from slice to slice */
                        void *staged;                /* owned copy of pageable source memory, or NULL */
                } copy;
                struct {
                        uintptr_t dst;
                        size_t width, height, pitch; /* width in elements, pitch in bytes */
                        unsigned element;            /* bytes: 1, 2 or 4 */
                        uint32_t value;
                } fill;
                struct {
                        uintptr_t addr;
                        uint64_t value;
                        unsigned bytes; /* 4 or 8 */
                        unsigned flags;
                        bool of_event; /* a shared one's, which is host memory */
                } value;
                struct {
                        CUhostFn fn;
                        CUstreamCallback callback;
                        CUstream stream;
                        void *arg;
                } host;
                struct sim_alloc *victim;
                struct {
                        uintptr_t base;
                        size_t bytes;
                        int device;
                } memory;
                struct sim_holds holds; /* GRAPH_END */
        } u;
};

/* A node of the work graph: done when its predecessors are done and its operation has run. Guarded by sim_lock(). */
struct sim_node {
        int refs;
        unsigned pending; /* predecessors not yet done, plus one until started */
        bool done;
        uint64_t done_ns;
        struct sim_node **dependents;
        size_t n_dependents, room;
        struct sim_node *next; /* in the ready queue, or the list of nodes being finished */
        struct sim_op op;
};

void sim_lock(void);
void sim_unlock(void);
uint64_t sim_now_ns(void);

/* All of these: sim_lock() held. A node starts with one reference, the caller's. */
struct sim_node *sim_node_new(const struct sim_op *op); /* NULL op: a join */
void sim_node_after(struct sim_node *node,
                    struct sim_node *predecessor); /* before sim_node_start; NULL predecessor: nothing */
void sim_node_start(struct sim_node *node);
struct sim_node *sim_node_get(struct sim_node *node);
void sim_node_put(struct sim_node *node);
void sim_node_wait(struct sim_node *node); /* releases the lock while it waits */
/* Stores node in *slot, with its reference; the reference of the former node is dropped. */
void sim_node_replace(struct sim_node **slot, struct sim_node *node);

void sim_op_run(const struct sim_op *op);         /* ops.c: no lock held */
void sim_op_drop(struct sim_op *op);              /* ops.c: frees what the operation owns, after its last run */
const char *sim_op_name(const struct sim_op *op); /* ops.c: for a report of misuse */

/* ---- context.c ---- */

#define SIM_MAGIC_CONTEXT 0x63747873u
#define SIM_MAGIC_STREAM  0x73747273u
#define SIM_MAGIC_EVENT   0x65767473u

struct sim_capture;

/* A set of captured graph nodes, by index: the predecessors of the next captured operation. */
struct sim_frontier {
        size_t *index;
        size_t count;
};

struct CUctx_st {
        uint32_t magic;
        int device;
        bool primary, live, ending;         /* ending: its end waits for its work */
        bool cig;                           /* made for captures for a graphics interface */
        unsigned flags, api_version, peers; /* peers: bit per device whose memory kernels may touch */
        unsigned long long id;
        int retained,
                greens;     /* retained: of a primary context the retains, greens among them; of others the attaches */
        CUcontext green_of; /* of a green context: the primary one, whose memory and kernels it uses */
        CUstream streams, legacy;
        struct sim_node *barrier;             /* all work submitted later comes after this */
        struct sim_node *orphans[2];          /* work of destroyed streams: blocking, non-blocking */
        size_t executables, executables_high; /* executable graphs now, and for how many it has memory */
        size_t stack_bytes;                   /* of a thread, as the program set it; 0: as at the start */
        CUcontext next;
};

struct CUstream_st {
        uint32_t magic;
        CUcontext ctx, green; /* green: the green context that it belongs to, or NULL */
        unsigned flags;
        int priority;
        unsigned long long id;
        struct sim_node *last;
        unsigned waiting; /* threads, in cuStreamSynchronize */
        struct sim_capture *capture;
        struct sim_frontier frontier;
        CUstream next;        /* in ctx->streams, or the free list */
        CUstream thread_next; /* per-thread streams of one thread */
};

/* What the processes that share an event know of it, in a file that both have mapped. */
struct sim_shared_event {
        _Atomic uint64_t recorded; /* how often */
        uint64_t passed;           /* the last of these that has passed; accessed by operations */
};

struct CUevent_st {
        uint32_t magic;
        struct sim_shared_event
                *shared; /* NULL: no other process knows it; stays mapped, as operations may come late */
        int file;        /* of shared; -1: another process's */
        CUcontext ctx;
        unsigned flags;
        struct sim_node *node;         /* NULL until recorded */
        unsigned long long stream;     /* the id of the one that it was last recorded in; 0: in a context */
        unsigned long long capture_id; /* of the capture it was last recorded in, or 0 */
        struct sim_frontier frontier;
        CUevent next;
};

/* The thread's context; if a green one is current its primary one, with the green one in *ret_green. Lock held. */
CUresult sim_current_green(CUcontext *ret_ctx, CUcontext *ret_green);
CUresult sim_current(CUcontext *ret_ctx);
CUresult sim_context_check(CUcontext ctx);
static inline CUcontext sim_context_owner(CUcontext ctx)
{
        return ctx->green_of ? ctx->green_of : ctx;
}
/* Called when a green context is made and destroyed. No lock held. */
CUresult sim_primary_retain(CUdevice device, CUcontext *ret_ctx);
CUresult sim_primary_release(CUdevice device);
CUresult sim_context_given(CUcontext given, CUcontext *ret_ctx); /* NULL stands for the thread's own; lock held */
CUcontext sim_contexts(void);                                    /* head of the list of live contexts; lock held */
/*
 * A started join of all work of ctx so far; of a green one: of its streams. The caller owns the reference. Lock held.
 */
struct sim_node *sim_context_join(CUcontext ctx);
CUresult sim_device_check(CUdevice device);

/* ---- stream.c ---- */

CUresult sim_stream_resolve(CUstream handle,
                            CUstream *ret_stream); /* 0, legacy and per-thread handles too; lock held */
CUstream sim_stream_make(CUcontext ctx, unsigned flags, int priority);
void sim_stream_retire(CUstream stream);      /* unlinks; its work goes on as an orphan of the context; lock held */
void sim_event_forget_context(CUcontext ctx); /* event.c */
/* What op, which writes a value or waits for one, needs to note that a record of the shared event has passed. */
void sim_shared_event_value(CUevent event, uint64_t record, struct sim_op *op);
/* A node, not yet started, with all predecessors that new work on stream must have. NULL op: a join. Lock held. */
struct sim_node *sim_stream_node(CUstream stream, const struct sim_op *op);
/*
 * Gives op to the stream, or to the capture the stream is in; takes over what op owns, also on failure.
 * When ret_node is given and the operation was submitted it gets a reference, else NULL. Lock held.
 */
CUresult sim_stream_push(CUstream stream, struct sim_op *op, struct sim_node **ret_node);
/* A whole entry point: finds context and stream, submits op and, with wait, waits for it. No lock held. */
CUresult sim_submit(CUstream handle, struct sim_op *op, bool wait);

/* ---- heap.c: device addresses; all but the `_locked` take the memory lock themselves ---- */

void sim_memory_lock(void);
void sim_memory_unlock(void);

enum sim_alloc_kind {
        SIM_ALLOC_DEVICE,
        SIM_ALLOC_POOL,
        SIM_ALLOC_MANAGED,
        SIM_ALLOC_HOST,
        SIM_ALLOC_REGISTERED,
        SIM_ALLOC_MAPPED,
        SIM_ALLOC_GRAPH,
        SIM_ALLOC_IMPORTED,
        SIM_ALLOC_EXTERNAL
};

struct sim_alloc {
        uintptr_t base;
        size_t bytes;     /* as asked for */
        size_t footprint; /* as taken: a multiple of 512 B in a shared page, else whole pages */
        enum sim_alloc_kind kind;
        int device;
        CUcontext ctx;
        CUmemoryPool pool;
        unsigned flags;
        unsigned long long buffer_id;
        bool freeing; /* the program has freed it in stream order, and the free has not run. Guarded by sim_lock() */
        bool idle;    /* in a pool's cache: touching it is misuse. Guarded by the memory lock */
        _Atomic unsigned access; /* mapped memory: a bit for each device that may use it */
        bool sync_memops;
        int file;               /* of exported memory, plus 1; closed with the allocation. Guarded by the memory lock */
        struct sim_alloc *next; /* in the list of ranges outside the device heaps, without mapped memory */
        /* Pools' memory only, guarded by sim_lock(). */
        struct sim_alloc *next_cached;
        struct sim_node *freed;       /* the free in its stream; reuse comes after it */
        unsigned long long freed_in;  /* that stream, ... */
        unsigned long long freed_ctx; /* ... and its context, by their ids; 0: the free waited */
        bool waited;                  /* the host has waited for that stream or its context since: it may go back */
        unsigned reuses;              /* how many of its frees have not run yet although it has been handed out again */
};

struct CUmemPoolHandle_st {
        uint32_t magic;
        int device;
        bool destroyed, shareable, imported;
        bool host;               /* its memory is host memory; managed memory is, too, in the simulation */
        struct sim_alloc *cache; /* freed memory, newest first */
        cuuint64_t threshold, used, used_high, most;
        int reuse[3]; /* reuse policies: stored and reported, without effect */
        /* Guarded by the memory lock. */
        size_t reserved, reserved_high;
        CUmemoryPool next;
};

bool sim_heap_setup(const struct sim_config *config);
/* NULL when the device has no room. owner: the pool that pays, or NULL. */
struct sim_alloc *sim_heap_alloc(int device, size_t bytes, CUmemoryPool owner);
void sim_heap_free(struct sim_alloc *alloc);
struct sim_alloc *sim_find(uintptr_t address); /* the allocation that contains it, or NULL */
struct sim_alloc *sim_find_locked(uintptr_t address);
/* Whether address lies in the range of a device or in one that the program reserved; allocated or not. */
bool sim_is_device_address(uintptr_t address);
bool sim_is_device_address_locked(uintptr_t address);
size_t sim_heap_free_bytes(int device);
void sim_heap_free_context(CUcontext ctx);      /* every cuMemAlloc of it, at the context's end */
bool sim_heap_charge(int device, size_t bytes); /* memory that lives elsewhere, in whole pages; false: no room */
void sim_heap_uncharge(int device, size_t bytes);
/* All devices' memory is free until it is taken again; its content stays. False: there is no room for all of it. */
void sim_heap_give_all(void);
bool sim_heap_take_all(void);
bool sim_heap_has(enum sim_alloc_kind kind); /* outside of the devices, and not mapped */
void sim_heap_set_idle(struct sim_alloc *alloc, bool idle);
/*
 * mmap and munmap for memory outside the devices' addresses, aligned to a page of the device. If possible the addresses
 * that were freed last are used again, so that tests soon see an old address with another kind of memory.
 */
void *sim_map(size_t bytes, int prot, int flags, int file, off_t offset);
void sim_unmap(void *at, size_t bytes);
/* Ranges of host memory the device may touch; the caller owns the memory behind them. NULL when out of host memory. */
struct sim_alloc *sim_range_add(enum sim_alloc_kind kind, uintptr_t base, size_t bytes, CUcontext ctx, int device,
                                unsigned flags);
void sim_range_remove(struct sim_alloc *alloc);

/* ---- vmm.c ---- */

bool sim_vmm_has_imports(void); /* handles of other memory */
void sim_vmm_begin(void);       /* once, before the other functions there: a driver has its files open, too */

/* ---- ipc.c ---- */

/* Moves memory to a file of its own, for others to map; whole pages. False: no file. Memory lock held. */
bool sim_move_to_file_locked(struct sim_alloc *alloc);
/* A new file in memory, whose number is none of the standard streams', which the program may have closed; -1: none. */
int sim_memory_file(const char *name);
void sim_ipc_close_context(
        CUcontext ctx); /* it ends, and is idle: closes what legacy IPC has opened in it; lock held */
void sim_ipc_free(struct sim_alloc *alloc); /* cuMemFree of an imported pool's memory, context idle; lock held */

/* ---- array.c ---- */

void sim_arrays_forget_context(CUcontext ctx); /* at the context's end; lock held */

/* ---- shared.c: one GPU for several processes; without sim_shared_setup nothing is shared ---- */

void sim_shared_setup(const char *path);
bool sim_shared_take(int device, size_t pages, size_t limit); /* false: the GPU is full */
void sim_shared_give(int device, size_t pages);
size_t sim_shared_free(int device, size_t limit, size_t own_free); /* pages */
/* What the process of account i uses; *ret_pid 0: there is none. False: no more accounts, or nothing is shared. */
bool sim_shared_process(int device, unsigned i, unsigned *ret_pid, size_t *ret_pages);
uint64_t sim_shared_gpu(const char *path); /* identifies the GPU: by its file, or with NULL by this process */

/* ---- vmm.c ---- */

bool sim_is_reserved_locked(uintptr_t address); /* memory lock or sim_lock() held */
/* What is mapped at a reserved address, or NULL; likewise. */
struct sim_alloc *sim_find_mapped_locked(uintptr_t address);

/* ---- touch.c ---- */

/*
 * The only ways in which an operation accesses memory. Each checks chunk by chunk that the memory is allocated at that
 * moment; if not, it reports misuse once and returns false. `host_ok`: addresses unknown to the device count as the
 * program's own memory (for copies), else as misuse (for kernels).
 */
struct sim_access {
        const struct sim_op *op;
        bool host_ok;
};
bool sim_touch_fill(const struct sim_access *access, uintptr_t dst, size_t count, unsigned element, uint32_t value);
bool sim_touch_copy(const struct sim_access *access, uintptr_t dst, uintptr_t src, size_t bytes);
bool sim_touch_count_diff(const struct sim_access *access, uintptr_t src, uint32_t value, uint64_t count,
                          uint64_t *ret_differing);
bool sim_touch_add(const struct sim_access *access, uintptr_t dst, uint32_t add);
bool sim_touch_load(const struct sim_access *access, uintptr_t src, unsigned bytes, uint64_t *ret_value);
bool sim_touch_store(const struct sim_access *access, uintptr_t dst, unsigned bytes, uint64_t value);

/* ---- pool.c ---- */

void sim_pool_setup(const struct sim_config *config);
bool sim_is_pool(CUmemoryPool pool);        /* lock held */
CUmemoryPool sim_pool_imported(int device); /* another process's, that nothing is allocated from; NULL: no memory */
/*
 * The host has waited for the stream with this id, or, where it is 0, for all work of ctx, or, where that is NULL, for
 * something else. Memory freed in their order may go back to the device, and what is above a pool's threshold does. The
 * driver asks for such a wait (docs/measurements.md, stream-ordered-return). Lock held.
 */
void sim_pool_synchronized(CUcontext ctx, unsigned long long stream);
void sim_pool_reached_free(struct sim_alloc *alloc); /* the stream reached the free of a pool's memory; lock held */
void sim_pool_free(struct sim_alloc *alloc);         /* cuMemFree of a pool's memory, context idle; lock held */

/* ---- capture.c ---- */

/*
 * For a call that captures forbid: invalidates the captures concerned, and returns the error or CUDA_SUCCESS. Lock
 * held.
 */
CUresult sim_capture_unsafe(void);
CUresult sim_capture_in_context(CUcontext ctx);  /* the same for calls that concern all streams of ctx */
CUresult sim_capture_in_stream(CUstream stream); /* the same for calls that wait for or ask about one stream */
CUresult sim_capture_legacy(CUcontext ctx);      /* the legacy stream is used: blocking streams may not be capturing */
CUresult sim_capture_push(CUstream stream, const struct sim_op *op);
CUresult sim_capture_graph(CUstream stream, CUgraph child); /* a graph launched into the capture */
CUresult sim_capture_record(CUstream stream, CUevent event);
CUresult sim_capture_wait(CUstream stream, CUevent event); /* also when only the event is captured */
bool sim_capture_live(unsigned long long capture_id);
CUresult sim_capture_ask(const struct CUevent_st *event); /* an event is asked whether it has passed; lock held */
void sim_capture_stream_gone(CUstream stream);
void sim_frontier_clear(struct sim_frontier *frontier);
/* The nodes, which must be graph's. ret_frontier is the caller's to clear, also on failure. */
CUresult sim_frontier_of(CUgraph graph, const CUgraphNode *nodes, size_t count, struct sim_frontier *ret_frontier);

CUresult sim_capture_memory(CUstream stream, struct sim_op *op);

/* ---- userobject.c ---- */

/* Copies from's references into holds. False when out of host memory; then some may have been copied. Lock held. */
bool sim_holds_add(struct sim_holds *holds, const struct sim_holds *from);
void sim_holds_drop(struct sim_holds *holds); /* lock held */
/* The objects without references, not to be named again; with the lock held. Their destructors: without it. */
CUuserObject sim_objects_doomed(void);
void sim_objects_end(CUuserObject all);

/* ---- graph.c ---- */

struct CUgraphNode_st {
        CUgraph graph;
        size_t index;   /* in the graph's list of nodes, which is sorted by dependencies */
        size_t created; /* how many nodes were created before */
        struct sim_op op;
        CUgraph child; /* a node that is a graph; NULL: it is none */
        size_t *after;
        size_t n_after;
};
struct CUgraph_st {
        uint32_t magic;
        CUgraphNode *nodes;
        size_t count;
        struct sim_holds holds;
};
CUgraph sim_graph_new(void);
bool sim_is_graph(CUgraph graph); /* lock held */
/* Appends; takes over op and copies the frontier. NULL when out of host memory. */
CUgraphNode sim_graph_add(CUgraph graph, const struct sim_op *op, const struct sim_frontier *after);
void sim_graph_free(CUgraph graph);
/*
 * Appends all of child behind `after`. Returns the last node added, NULL when out of host memory; ret_all, the caller's
 * to clear, names the nodes that came from child. The graph gets references of child's user objects, too.
 */
CUgraphNode sim_graph_add_graph(CUgraph graph, CUgraph child, const struct sim_frontier *after,
                                struct sim_frontier *ret_all);
/* Adds a node that allocates or frees; for an allocation, op gets the address. */
CUresult sim_graph_add_memory(CUgraph graph, struct sim_op *op, const struct sim_frontier *after,
                              CUgraphNode *ret_node);
/* Whether base is memory of a graph, and this graph has no node yet that frees it. */
bool sim_graph_may_free(CUgraph graph, uintptr_t base);
bool sim_graph_joined(CUgraph graph, const struct sim_frontier *frontier); /* does everything lead to the frontier? */

/* ---- graph_exec.c ---- */
void sim_graph_forget_context(CUcontext ctx); /* what it kept for executable graphs goes back */

/* ---- kernels.c ---- */
void sim_kernel_run(const struct sim_op *op);
const char *sim_kernel_name(const struct sim_kernel *kernel);

#endif
