/*
 * The capture gate, one for the process: a record or wait while a stream of the context captures destroys the capture.
 * So those hold the gate's shared side, and the driver's begin of a capture its exclusive side.
 */
#ifndef GR_CAPTURE_GATE_H
#define GR_CAPTURE_GATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

/* Captures against fences, for the whole process: a capture mode looks at all threads and contexts alike. */
struct gr_gate {
        pthread_rwlock_t lock;        /* rank GR_RANK_GATE; shared: record, wait, sync; exclusive: a capture begins */
        _Atomic int captures;         /* going on, or about to begin */
        _Atomic int awaited;          /* threads that wait for those going on to end: no other begins meanwhile */
        _Atomic unsigned times, vain; /* how often there came to be some; and which of these was waited for in vain */
};

void gr_gate_init(struct gr_gate *gate);
void gr_gate_destroy(struct gr_gate *gate);

/* Holds captures off until gr_gate_leave, for a record, wait or sync. False: one is going on; nothing is held. */
bool gr_gate_enter(struct gr_gate *gate);
void gr_gate_leave(struct gr_gate *gate);

/* Around the driver's begin of a capture: no record or wait runs in between. began: whether the capture is on. */
void gr_gate_begin_enter(struct gr_gate *gate);
void gr_gate_begin_leave(struct gr_gate *gate, bool began);

/* A capture is over. */
void gr_gate_end(struct gr_gate *gate);

/*
 * Around a bounded wait for the captures that go on to end. Others hold off meanwhile: where threads capture in turn,
 * one is always going on.
 */
void gr_gate_await_begin(struct gr_gate *gate);
void gr_gate_await_end(struct gr_gate *gate);

/* The captures that go on have been waited for in vain; and whether that is so, of them or those that have joined. */
void gr_gate_note_vain(struct gr_gate *gate);
bool gr_gate_is_vain(struct gr_gate *gate);

#endif
