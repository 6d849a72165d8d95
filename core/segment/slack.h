/*
 * Slack: how much memory a segment pool may hold beyond the live memory, and how much time it may spend to stay below
 * that. The first is a share of the peak of live memory, the second a share of all time. Better fits, moves and waits
 * cost such time. The more was overspent, the more the footprint may grow: where memory fits badly, as with several
 * streams, that is better than a slow program.
 *
 * No lock is held, unless a comment says otherwise.
 */
#ifndef GR_SLACK_H
#define GR_SLACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gr_context;

/*
 * Whether the footprint may grow by growth_bytes for a request of request_bytes. It may reach the peak of live memory
 * plus a share of it: a 16th as long as there is time to spend on better fits, up to a half after too much was spent.
 */
bool gr_slack_has_room(struct gr_context *context, size_t request_bytes, uint64_t growth_bytes);

/* Whether the growth would exceed the bound with the least share, a 16th, whatever time was spent. */
bool gr_slack_is_exceeded(struct gr_context *context, size_t request_bytes, uint64_t growth_bytes);

/*
 * As gr_slack_is_exceeded, but with the recent peak of live memory (gr_budget_recent_peak), for growth that the request
 * could do without. With the peak since the beginning, a program that once needed more would reserve as much again
 * after that was returned. Before decay or proactive reclaim has looked for the first time, both peaks are the same.
 */
bool gr_slack_is_exceeded_recently(struct gr_context *context, size_t request_bytes, uint64_t growth_bytes);

/*
 * Whether the graph segments may grow by growth_bytes for a request of request_bytes before memory moves. What is
 * parked for graphs elsewhere on the device counts as free here, so where there is any, memory moves earlier. The
 * segments' lock is held.
 */
bool gr_slack_has_room_for_graph(struct gr_context *context, size_t request_bytes, uint64_t growth_bytes);

/*
 * How much may be mapped in graph segments at once for a request that lacks less. 0: only what it lacks. The segments'
 * lock is held.
 */
uint64_t gr_slack_ahead_for_graph(struct gr_context *context, size_t request_bytes);

/* Notes that spent_ns were spent on a better fit. */
void gr_slack_spend(struct gr_context *context, uint64_t spent_ns);

/*
 * Where there is no room, returns idle memory to the driver and waits a little, as time allows, for memory that is
 * about to be idle. Blocks in bins are not returned while a barrier waits for running work, as the driver would let
 * this thread wait for that, too. False: there is still no room. Calls the driver.
 */
bool gr_slack_make_room(struct gr_context *context, size_t request_bytes, uint64_t growth_bytes);

/*
 * The largest free segment, in bytes, that may be cut for this request. A small range in a large segment keeps all of
 * it from being returned, so it is better to return the segment and take one that fits. That costs time: the more was
 * spent recently, the larger the segment may be. The segments' lock is held.
 */
uint64_t gr_slack_worth_opening(struct gr_context *context, size_t bytes);

#endif
