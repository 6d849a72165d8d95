#include "base/lock.h"

#include <errno.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPINS    100 /* before the processor is offered to others: the holder may be waiting for it */
#define YIELDS   32  /* ... and then left: yielding lets nobody run who has a lower priority, as the holder may have */
#define SLEEP_NS 50000 /* which is also the least that most systems sleep for */

/* By the number of the call: the C library's own may end a thread that was cancelled, and hooks leave errno alone. */
static void sleep_briefly(void)
{
        const struct timespec while_ns = {.tv_nsec = SLEEP_NS};
        int saved_errno = errno;

        syscall(SYS_nanosleep, &while_ns, NULL);
        errno = saved_errno;
}

void gr_pause(unsigned n)
{
        if (n % SPINS == 0) {
                if (n / SPINS > YIELDS)
                        sleep_briefly();
                else
                        sched_yield();
                return;
        }
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("isb" ::: "memory"); /* yield is a no-op on most, and passes the time no more than a nop */
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

void gr_rank_assert_held(enum gr_rank rank)
{
        assert(held & 1u << rank);
}
#endif
