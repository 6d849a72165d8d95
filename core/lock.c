#include "lock.h"

#ifdef GR_LOCK_CHECKS
#include <assert.h>

static _Thread_local unsigned held; /* bit r: a lock of rank r */

void gr_rank_enter(enum gr_rank rank)
{
        assert(!(held >> rank)); /* a lock of this or a higher rank is held already */
        held |= 1u << rank;
}

void gr_rank_leave(enum gr_rank rank)
{
        held &= ~(1u << rank);
}
#else
typedef int gr_lock_checks_off; /* a translation unit must not be empty */
#endif
