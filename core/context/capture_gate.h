/*
 * The capture gate, one for the process. A record or wait while a stream of the context captures destroys the capture.
 * So records and waits hold the shared side of the gate, and the driver's begin of a capture holds the exclusive side.
 */
#ifndef GR_CAPTURE_GATE_H
#define GR_CAPTURE_GATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/lock.h"

/* Keeps captures and fences apart, in the whole process: a capture forbids calls in all threads and contexts. */
struct gr_gate {
        pthread_rwlock_t lock;        /* rank GR_RANK_GATE; shared: record, wait, sync; exclusive: a capture begins */
        _Atomic int captures;         /* open, or about to begin */
        _Atomic int awaited;          /* threads that wait for open captures to end: no capture begins meanwhile */
        _Atomic unsigned times, vain; /* how often captures went from 0 to 1; times at the last vain wait */
};

/* The gate must consist of zero bytes. */
void gr_gate_init(struct gr_gate *gate);
void gr_gate_destroy(struct gr_gate *gate);

/* Whether a capture is open, or about to begin. May change at once, but for callers inside the gate. */
static inline bool gr_gate_is_open(struct gr_gate *gate)
{
        return atomic_load(&gate->captures) > 0;
}

/* Holds new captures off until gr_gate_leave, for a record, wait or sync. False: one is open, and nothing is held. */
bool gr_gate_enter(struct gr_gate *gate);
void gr_gate_leave(struct gr_gate *gate);

/* Asserts that the caller is inside the gate, on either side. Does nothing in release builds. */
static inline void gr_assert_gate_entered(const struct gr_gate *gate)
{
        gr_lock_assert_held(GR_RANK_GATE, gate);
}

/* Called around the driver's begin of a capture, to keep records and waits out. began: the driver has begun it. */
void gr_gate_begin_enter(struct gr_gate *gate);
void gr_gate_begin_leave(struct gr_gate *gate, bool began);

/* A capture is over. */
void gr_gate_end(struct gr_gate *gate);

/*
 * Called around a bounded wait for the open captures to end. New ones are held off meanwhile: if threads capture in
 * turn, there would always be an open one.
 */
void gr_gate_await_begin(struct gr_gate *gate);
void gr_gate_await_end(struct gr_gate *gate);

/*
 * Notes that a wait for the open captures ended in vain: some were still open. gr_gate_is_vain: whether that has
 * happened since captures was last 0.
 */
void gr_gate_note_vain(struct gr_gate *gate);
bool gr_gate_is_vain(struct gr_gate *gate);

#endif
