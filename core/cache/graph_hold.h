/*
 * Memory that CUDA graphs use. A capture records addresses, and each launch of its graph uses the memory there again,
 * long after the program has freed it. So what a capture was given belongs to a hold. A block that is freed while its
 * hold has users is not cached: it is parked, and no request gets it. Once the last user has gone (the capture, and
 * whatever was made of its graph) parked blocks are freed as any other. Natively the driver refuses to allocate in such
 * a capture, so a program cannot rely on less.
 *
 *   gr_graph_hold_new ---- users: the capture, then its graph (shim/hooks/captures.c) ---- last gr_graph_hold_release
 *                                      a freed block is parked                             gr_graph_holds_collect
 */
#ifndef GR_GRAPH_HOLD_H
#define GR_GRAPH_HOLD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/lock.h"

struct gr_block;
struct gr_context;
struct gr_core;

/* Valid as long as the caller is one of its users. */
struct gr_graph_hold {
        struct gr_core *core; /* constant, like number */
        unsigned number;      /* not 0; that of no other hold that has users */
        _Atomic unsigned users;
        struct gr_block *parked; /* by next; this and the list are guarded by core->holds_lock */
        struct gr_graph_hold *next;
};

/* A hold with one user, the caller. NULL: out of memory. */
struct gr_graph_hold *gr_graph_hold_new(struct gr_core *core);

/* One user more. */
void gr_graph_hold_retain(struct gr_graph_hold *hold);

/* One user less. Takes no lock and makes no call: a callback of the driver may call it. */
void gr_graph_hold_release(struct gr_graph_hold *hold);

/*
 * A block that the program has freed, and that is the caller's: true where its hold has users, which has it from now
 * on. Where it has no hold any more that is forgotten. No lock is held.
 */
bool gr_graph_hold_park(struct gr_core *core, struct gr_block *block);

/*
 * Takes a block of the context that is parked in hold, and little larger than bytes; the caller has it. NULL: there is
 * none among the newest. Only for the capture that parked it: in the order of a single stream, its work on the block is
 * done before that of the next owner.
 */
struct gr_block *gr_graph_hold_take(struct gr_graph_hold *hold, struct gr_context *context, size_t bytes);

/*
 * Whether gr_graph_holds_collect may find something; gr_graph_holds_begin says the same, and then false until it may.
 */
bool gr_graph_holds_are_over(struct gr_core *core);
bool gr_graph_holds_begin(struct gr_core *core);

/*
 * Takes the blocks of context that are parked in holds without users; they are the caller's, which visits the context:
 * so it does not end before they are freed. context NULL: blocks that are GONE, of any context, and holds in which none
 * is left are freed. Linked by next; NULL: none. No lock is held.
 */
struct gr_block *gr_graph_holds_collect(struct gr_core *core, struct gr_context *context);

/* The context has gone: frees the structures of its parked blocks. */
void gr_graph_holds_drop(struct gr_context *context);

/* Frees the structures. */
void gr_graph_holds_destroy(struct gr_core *core);

#endif
