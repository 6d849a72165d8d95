/*
 * Memory that CUDA graphs use. A capture records addresses. Each launch of its graph uses the memory there again, even
 * if the program has freed it. So what is allocated in a capture belongs to a hold. (Not in a relaxed capture: the
 * driver itself allows allocations there, and leaves it to the program to keep the memory; so does the library.) While
 * the hold has users, a freed block is parked: only the same capture may get it. The users are the capture, its graph,
 * and all that is made of the graph. When the last has gone, parked blocks are freed as any other. One that then goes
 * to the driver waits until the work from before its free has passed. Where no fence can say that (gr_fence_is_blind),
 * it waits for a free of the program in its context, or for the rung SYNC, which both wait for the GPU.
 *
 * A shared hold (GPURECLAIM_GRAPH_ARENA=shared) keeps blocks of graph segments (segment/graph_segments.h) only until
 * its capture has ended. Then they are free there, for later captures.
 *
 *   gr_graph_hold_new ---- users: the capture, then its graph (shim/hooks/captures.c) ---- last gr_graph_hold_release
 *                                      a freed block is parked                             gr_graph_holds_collect
 */
#ifndef GR_GRAPH_HOLD_H
#define GR_GRAPH_HOLD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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

/* One user more. */
void gr_graph_hold_retain(struct gr_graph_hold *hold);

/* One user less. Takes no lock and makes no call: a callback of the driver may call it. */
void gr_graph_hold_release(struct gr_graph_hold *hold);

/*
 * Puts the live block at ptr, which the program does not know yet, into hold, of which the caller is a user: when the
 * program frees it, it is parked as long as hold has users. It has no home, so its free takes the slow path, which
 * looks for the hold. No lock is held.
 */
void gr_graph_hold_add(struct gr_graph_hold *hold, uint64_t ptr);

/*
 * Parks a block that the program has freed and that is the caller's. True: its hold has users, and owns the block from
 * now on. False: its hold keeps it no longer, and the block is in none. No lock is held.
 */
bool gr_graph_hold_park(struct gr_core *core, struct gr_block *block);

/* Frees a block that was parked and is in no hold any more, and is the caller's. Called without a lock. */
typedef void gr_graph_hold_free(struct gr_block *block);

/*
 * A block of the context for hold's capture, of which the caller is a user; it belongs to hold, and is the caller's.
 * NULL: there is none. single_stream: the capture has only one stream, so that it may get what it has freed itself: in
 * the order of that stream its work on a block is done before that of the next owner. No lock is held.
 *
 * With a shared hold the block is one of the graph segments. Else it is parked in hold: the smallest that serves bytes
 * among the newest. A range is cut to the size, and the rest stays parked: what is parked side by side is one range.
 * Other blocks are little larger than bytes, or as large as a new one would be.
 */
struct gr_block *gr_graph_hold_take(struct gr_graph_hold *hold, struct gr_context *context, bool single_stream,
                                    size_t bytes, gr_graph_hold_free *free_block);

/*
 * The capture of hold has ended, and the caller is still a user. With a shared hold, what the capture freed of graph
 * segments serves later captures from now on. single_stream as above. No lock is held.
 */
void gr_graph_hold_end(struct gr_graph_hold *hold, bool single_stream, gr_graph_hold_free *free_block);

/* Whether a hold has lost its last user since the last gr_graph_holds_collect. */
bool gr_graph_holds_are_over(struct gr_core *core);

/*
 * Frees what was parked for holds that have no users any more. Does not wait for the GPU: what has to wait for work is
 * left for a later call, and what no fence covers for the next function. No lock is held.
 */
void gr_graph_holds_collect(struct gr_core *core, gr_graph_hold_free *free_block);

/* As gr_graph_holds_collect, for this context, whose fence is blind. Waits for the GPU, and so must free_block. */
void gr_graph_holds_collect_blind(struct gr_context *context, gr_graph_hold_free *free_block);

/* The context has gone: frees the structures of its parked blocks. */
void gr_graph_holds_context_gone(struct gr_context *context);

/* Frees the structures. */
void gr_graph_holds_destroy(struct gr_core *core);

#endif
