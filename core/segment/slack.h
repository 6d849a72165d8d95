/*
 * How much memory pool kind `split` may take beyond what is live, and the time that it may spend on staying below: a
 * share of what live memory ever needed, and of all time. Better fits, moves and waits are paid for with that time;
 * where too much of it was spent lately, more footprint is the lesser evil.
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
 * Whether the footprint may grow by growth_bytes for a request without passing what live memory ever needed, and a
 * share of it that depends on the time left to spend. With GR_POOL_AUTO, what bins hold from before the move is asked
 * back (core->wake) when the footprint is half the way there.
 */
bool gr_slack_has_room(struct gr_context *context, size_t request_bytes, uint64_t growth_bytes);

/* Whether it would pass that, however little time is left. */
bool gr_slack_is_exceeded(struct gr_context *context, size_t request_bytes, uint64_t growth_bytes);

/*
 * The same by what live memory needed of late, where nothing decays ever: for growth that is not needed, so that a
 * program that once needed more does not come to hold that again after decay has given it back.
 */
bool gr_slack_is_exceeded_recently(struct gr_context *context, size_t request_bytes, uint64_t growth_bytes);

/* So much time was spent on a better fit. */
void gr_slack_spend(struct gr_context *context, uint64_t spent_ns);

/*
 * Where there is no room, gives idle memory back, and waits a little, as time allows, for what is about to be idle.
 * What bins hold is left alone while a barrier stands before work that still runs: the driver would have this thread
 * wait. False: there still is none. Calls the driver.
 */
bool gr_slack_make_room(struct gr_context *context, size_t request_bytes, uint64_t growth_bytes);

/*
 * How large a free segment may be to be cut for this request. A small piece in a large segment keeps all of it from
 * going back, so a free one is rather returned and one that fits taken, as long as the time that this costs is
 * affordable: the more of it was spent lately, the worse a fit is accepted. The split's lock is held.
 */
uint64_t gr_slack_worth_opening(struct gr_context *context, size_t bytes);

#endif
