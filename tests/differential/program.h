/*
 * What the files of the program share: its objects, what is known of them, and the verbs that use them.
 *
 * Nothing here has a lock. A line waits for earlier ones that have an object in common with its own, and one that must
 * be alone for all; what is shared beyond that is atomic, or changed by lines that are alone.
 */
#ifndef GR_TEST_PROGRAM_H
#define GR_TEST_PROGRAM_H

#include "gputest.h"

enum { SLOTS = 48, CAPTURES = 4096, ARGUMENTS = 5, DOORS = 7, RUNTIME_DOOR = 5, RESOLVED_DOOR, LEGACY = 0, OWN = 1 };

enum kind { DEVICE, MANAGED, HOST, POOLED, MAPPED, OF_GRAPH };

struct memory {
        bool live;
        enum kind kind;
        CUdeviceptr at;
        size_t bytes;
        int context, home, thread, capture;
        unsigned home_made;
        bool known;    /* what is in it */
        bool shared;   /* so that it is the driver's to free */
        unsigned made; /* after so many others */
        uint32_t value;
        CUmemGenericAllocationHandle handle;
};
struct context {
        CUcontext handle;
        CUdeviceptr different; /* counts words that were not what they should be */
        int device, attached;
        int retained; /* the primary one; a reset keeps how often */
        bool live;
};
struct stream {
        CUstream handle;
        int context, capture;
        unsigned made;
        bool live;
};
struct event {
        CUevent handle;
        int context, capture;
        bool live;
};
struct pool {
        CUmemoryPool handle;
        bool live;
};
/* What a launch writes: captured fills. */
struct fills {
        int count, memory[SLOTS];
        unsigned made[SLOTS];
        uint32_t value[SLOTS];
        bool last[SLOTS]; /* nothing else that is captured may come after it */
};
struct graph {
        CUgraph handle;
        CUgraphExec exec;
        int stream, context;
        struct fills fills;
        bool live;
};

struct capture {
        struct fills fills;
        int stream, context;
        bool open, strict;
};

extern struct memory memories[SLOTS];
extern struct context contexts[SLOTS];
extern struct stream streams[SLOTS];
extern struct event events[SLOTS];
extern struct pool pools[SLOTS];
extern struct graph graphs[SLOTS], execs[SLOTS];
extern struct capture captures[CAPTURES];

struct op;
struct verb {
        const char *name, *arguments; /* a letter for each: an object's, or i; in capitals: it may not be there */
        void (*run)(struct op *op);
        bool alone;
};
struct op {
        int line, thread;
        const struct verb *verb;
        long arg[ARGUMENTS];
        int after[ARGUMENTS + 2], n_after; /* with --race: lines to wait for */
        bool done;
};

extern struct gt gt;
extern bool race, own_frees, wide, limited; /* options of the program */
extern char *program_path;
extern int n_captures, open_captures, strict_captures; /* changed by lines that are alone */
extern _Atomic unsigned n_made;
extern _Thread_local int me; /* a number that no other thread has, nor had */
extern size_t total_bytes;
extern size_t left_bytes;         /* of contexts that ended: what pools and mapped memory hold outlives them */
extern _Atomic size_t late_bytes; /* freed in stream order; it may not have come to that yet */

/* Prints what a line got. */
void say(const struct op *op, const char *format, ...) __attribute__((format(printf, 2, 3)));
void say_code(const struct op *op, CUresult result);

/* The functions that a library takes over, by every door. */
#define DOOR_LIST(X)                                                                                                   \
        X(cuMemAlloc_v2) X(cuMemFree_v2) X(cuMemAllocAsync) X(cuMemFreeAsync) X(cuMemAllocHost_v2) X(cuMemFreeHost)
struct doors {
#define X(name) __typeof__(&(name)) name;
        DOOR_LIST(X)
#undef X
};
extern struct doors doors[DOORS];
/* The header calls these deprecated. */
extern CUresult(CUDAAPI *ctx_attach)(CUcontext *, unsigned), (CUDAAPI * ctx_detach)(CUcontext);
void open_doors(void);
/* The one that the line names, if it is open. */
long door_of(long door);

/* A stream's handle; the per-thread door calls the thread's own stream 0. */
CUstream handle_of(int s);
CUstream handle_by(int s, long door);
int capture_of(int s);
/* The context that is current in this thread, or -1. */
int current(void);
int device_of(int context);
/* Makes the context current until leave(). False, with nothing changed, where it cannot be. */
bool enter(int context);
void leave(void);
/* Around a call that natively may be made in relaxed mode only, while a capture of another mode is open. */
CUstreamCaptureMode relax(bool wanted);
void tighten(CUstreamCaptureMode mode);
/* Words of the context's memory that were not what they should be; 0 while a capture is open. */
unsigned different_in(int c);
void new_context(int c, CUcontext handle, int device);
/* What ends with it is no longer there for later lines. */
void lose_context(int c);
void lose_capture(int capture);

/* Waits for the home stream and says what the memory holds: "right", "WRONG", or "unknown" or "refused". */
const char *checked(struct memory *m);
/* Frees it by that door, whatever its kind. */
CUresult give_back(struct memory *m, long door);
/* What the other process of "lend" does. The exit status. */
int be_partner(int socket);

typedef void run_verb(struct op *op);
run_verb run_plug_in;
run_verb run_alloc, run_pitch, run_managed, run_host, run_async, run_map, run_free, run_free_async, run_fill, run_copy,
        run_check, run_range, run_share, run_info, run_most, run_lend;
run_verb run_context, run_use, run_destroy, run_attach, run_detach, run_retain, run_release, run_reset, run_sync,
        run_stream, run_stream_destroy, run_stream_sync, run_stream_query, run_spin, run_capturing, run_event,
        run_event_destroy, run_record, run_wait, run_event_sync, run_event_query, run_begin, run_end, run_mode,
        run_instantiate, run_launch, run_graph_destroy, run_exec_destroy, run_graph_trim, run_pool, run_pool_destroy,
        run_pool_trim, run_pool_keep, run_pool_used, run_pool_current;

#endif
