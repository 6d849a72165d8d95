/*
 * The captures that are open. While there is one, the library must not record the events of its fences. What is
 * allocated in a capture is kept for the capture's graph (core/alloc/graph_hold.h).
 */
#ifndef GR_CAPTURES_H
#define GR_CAPTURES_H

#include "driver/real.h"
#include "shim.h"

/*
 * An open capture. It ends by cuStreamEndCapture, or with its stream, its context or, on a per-thread stream, its
 * thread (docs/measurements.md, capture-end).
 */
struct gr_capture {
        const void *stream; /* gr_capture_identity of its stream */
        CUcontext context;  /* the stream's; for a stream of a green context the one that owns its memory */
        CUcontext current;  /* for a per-thread stream, of which a thread has one in each context; else NULL */
        uint64_t number;    /* in the order in which captures began, from 1 */
        /* By these two gr_captures_hold finds the capture that an allocation belongs to. */
        const void *thread; /* which began it, by its gr_capture_own_stream; NULL: the thread has ended */
        CUstreamCaptureMode mode;
        bool forked;                 /* work on several streams may use what it was given (gr_capture_may_fork) */
        bool unordered;              /* its later work may run beside its earlier work: nodes are set by hand */
        struct gr_graph_hold *hold;  /* of what it was given; the list of captures is a user; NULL: nothing yet */
        struct gr_graph_hold *joint; /* the same, of what this or another capture was given (ensure_joint_hold) */
};

/* Which stream a function of the driver means by stream 0. One with _ptsz at its end means the thread's own. */
enum gr_null_stream { GR_NULL_LEGACY, GR_NULL_PER_THREAD };

/*
 * What stands for the stream in struct gr_capture: its handle or, as a per-thread stream has the same handle in all
 * threads, an address in its thread's memory.
 */
const void *gr_capture_identity(CUstream stream, enum gr_null_stream null_stream);

/* gr_capture_identity of the calling thread's per-thread stream. */
const void *gr_capture_own_stream(void);

/*
 * Whether the stream is being captured, or the driver cannot be asked because another stream is: it cannot be asked
 * about the legacy stream while any blocking stream is captured. Costs nothing while there is no capture.
 */
bool gr_capture_on(CUstream stream, enum gr_null_stream null_stream);

/*
 * The number of the capture on the stream, 0 if there is none. Must be called before the driver ends the capture:
 * afterwards a new stream may have the same handle, and a capture of its own. current: as in struct gr_capture; NULL:
 * any.
 */
uint64_t gr_capture_number(const void *stream, CUcontext current);

/*
 * The capture with this number, if any, has become graph, which the program does not know yet: graph and all that is
 * made of it use what the capture was given. Must be called before gr_capture_over.
 */
void gr_capture_became(uint64_t number, CUgraph graph);

/*
 * Whether any graph, or anything made of one, still has a user object of this library, by which the driver tells it
 * that the graph has gone. Any thread.
 */
bool gr_captures_have_objects(void);

/*
 * Captures have ended: the one with this number (0: none) and all of this context (NULL: none). Takes them off the
 * list, and off the users of their holds.
 */
void gr_capture_over(uint64_t number, CUcontext context);

/* The context has gone, and with it the captures on its streams. */
void gr_captures_context_gone(CUcontext context);

/*
 * gr_gate_begin_enter and gr_gate_begin_leave for a capture of the program's. Before a graph is captured again, the
 * driver lets go of its user objects. What is over thereby is looked at when the gate has been left.
 */
void gr_captures_begin_enter(void);
void gr_captures_begin_leave(bool began);

/*
 * Makes room for one more capture on the list. The gate's exclusive side is held, so no other thread takes the room.
 * False: out of memory.
 */
bool gr_captures_have_room(void);

/* Adds a capture that the driver has begun, after gr_captures_have_room; the gate is still held. */
void gr_capture_began(const struct gr_capture *capture);

/*
 * The block of context at ptr was just allocated for the program, which does not know it yet. If the driver would have
 * refused that because of an open capture, its graph may use it from now on: it gets a hold, whose users are this
 * capture and, as long as it exists, what is made of its graph. Where there are several such captures, all of them and
 * their graphs are its users. Does nothing where there is no such capture.
 */
void gr_captures_hold(struct gr_context *context, uint64_t ptr);

/*
 * As gr_pool_alloc_in_hold, for an allocation that gr_captures_hold would give a hold. False: no block of its capture
 * can serve again, or the thread has no part in the capture.
 */
bool gr_captures_alloc_in_hold(struct gr_context *context, size_t bytes, uint64_t *ret_ptr);

/* How work gets into a capture that may run beside the work of the capture's stream. */
enum gr_fork {
        GR_FORK_BY_EVENT, /* an event: the work follows what was captured before it */
        GR_FORK_BY_HAND,  /* the program itself, by hand: the work need not follow anything */
};

/*
 * The slow path of gr_capture_may_fork, for the captures on the stream (as in struct gr_capture; NULL: all captures).
 * Returns whether a block may already have served twice in one of these captures.
 */
bool gr_capture_forks(const void *stream, enum gr_fork fork);

/* Whether the driver refuses the calling thread an allocation because of open captures. */
bool gr_captures_refuse(void);

/* Whether a capture is open, so that gr_captures_hold must be called. */
static inline bool gr_captures_are_open(void)
{
        return __builtin_expect(gr_gate_is_open(&gr_core.gate), 0);
}

/*
 * Called before the program records an event on the stream, or learns the graph under construction. In a capture
 * another stream may wait for that event, and nodes may be added by hand; such work may run beside the stream's work. A
 * new owner of a block would no longer wait for the old one. So from here on no block serves twice in that capture.
 */
static inline void gr_capture_may_fork(CUstream stream, enum gr_null_stream null_stream, enum gr_fork fork)
{
        if (gr_captures_are_open())
                gr_capture_forks(gr_capture_identity(stream, null_stream), fork);
}

/*
 * Called before the calling thread submits work to the stream, while a capture is open. Work that is not captured may
 * use what a capture was given, and still run when its graph is launched. So from then on no memory serves twice in
 * that capture. If the stream is captured, the thread has a part in that capture from now on.
 */
void gr_captures_note_work(CUstream stream, enum gr_null_stream null_stream);

#endif
