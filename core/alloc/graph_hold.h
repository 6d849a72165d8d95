/*
 * Memory that CUDA graphs use. A capture records addresses. Each launch of its graph uses the memory there again, even
 * if the program has freed it. So what is allocated in a capture belongs to a hold. (Not in a relaxed capture: the
 * driver itself allows allocations there, and leaves it to the program to keep the memory; so does the library.) While
 * the hold has users, a freed block is parked: only the same capture may get it. The users are the capture, its graph,
 * and all that is made of the graph. When the last has gone, parked blocks are freed as any other.
 *
 * A shared hold (GPURECLAIM_GRAPH_ARENA=shared) keeps blocks of graph segments (segment/graph_segments.h) only until
 * its capture has ended. Then they are free there, for later captures.
 *
 *   gr_graph_hold_new ---- users: the capture, then its graph (shim/hooks/captures.c) ---- last gr_graph_hold_release
 *                                      a freed block is parked                             gr_graph_holds_unpark
 */
#ifndef GR_GRAPH_HOLD_H
#define GR_GRAPH_HOLD_H

#include <stdbool.h>
#include <stddef.h>

struct gr_block;
struct gr_context;
struct gr_core;

/* Valid as long as the caller is one of its users. */
struct gr_graph_hold;

/*
 * A hold with one user, the caller. shared_in: the context where its memory is shared with other graphs; NULL: its
 * memory is not shared. Returns NULL when out of memory.
 */
struct gr_graph_hold *gr_graph_hold_new(struct gr_core *core, struct gr_context *shared_in);

/* What the hold was made with. */
struct gr_core *gr_graph_hold_core(const struct gr_graph_hold *hold);
struct gr_context *gr_graph_hold_shared_in(const struct gr_graph_hold *hold);

/* One user more. */
void gr_graph_hold_retain(struct gr_graph_hold *hold);

/* One user less. Takes no lock and makes no call: a callback of the driver may call it. */
void gr_graph_hold_release(struct gr_graph_hold *hold);

/* Notes hold as that of block, for gr_graph_hold_park. The caller owns block, which is in no list and has no hold. */
void gr_graph_hold_own(struct gr_graph_hold *hold, struct gr_block *block);

/*
 * Parks a block that the program has freed and that is the caller's. True: its hold has users, and owns the block from
 * now on. False: its hold keeps it no longer, and the block is in none. No lock is held.
 */
bool gr_graph_hold_park(struct gr_core *core, struct gr_block *block);

/*
 * Takes a block of the context that is parked in hold, the smallest that serves bytes among the newest; the caller has
 * it. A range is cut to the size, and the rest stays parked: what is parked side by side is one range. Other blocks are
 * little larger than bytes, or as large as a new one would be. NULL: there is none. Only for the capture that parked
 * it: in the order of a single stream, its work on the block is done before that of the next owner.
 */
struct gr_block *gr_graph_hold_take(struct gr_graph_hold *hold, struct gr_context *context, size_t bytes);

/*
 * Takes the blocks of graph segments that are parked in a shared hold, linked by next; they have no hold any more. The
 * caller must free them. gr_graph_hold_end: the capture has ended, so no more of them are parked.
 */
struct gr_block *gr_graph_hold_unpark(struct gr_graph_hold *hold);
struct gr_block *gr_graph_hold_end(struct gr_graph_hold *hold);

/* Whether a hold has lost its last user since the last begin. gr_graph_holds_begin also resets this to false. */
bool gr_graph_holds_are_over(struct gr_core *core);
bool gr_graph_holds_begin(struct gr_core *core);

/*
 * Takes the blocks of context that are parked in holds without users, linked by next. The caller must free them, and is
 * a visitor of the context, so that it cannot end meanwhile. With context NULL: takes blocks that are GONE, of any
 * context, and frees the holds that are then empty. NULL is returned if there are no blocks. No lock is held.
 */
struct gr_block *gr_graph_holds_unpark(struct gr_core *core, struct gr_context *context);

/* The context has gone: frees the structures of its parked blocks. */
void gr_graph_holds_context_gone(struct gr_context *context);

/* Frees the structures. */
void gr_graph_holds_destroy(struct gr_core *core);

#endif
