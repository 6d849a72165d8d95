#include "lock.h"

#include <sched.h>

#define SPINS 100 /* before the processor is offered to others: the holder may be waiting for it */

void gr_pause(unsigned n)
{
        if (n % SPINS == 0)
                sched_yield();
#if defined(__x86_64__)
        else
                __builtin_ia32_pause();
#endif
}

void gr_spin_wait(struct gr_spin *spin)
{
        unsigned spins = 0;

        do {
                while (atomic_load_explicit(&spin->taken, memory_order_relaxed))
                        gr_pause(++spins);
        } while (atomic_exchange_explicit(&spin->taken, 1, memory_order_acquire));
}

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
#endif
