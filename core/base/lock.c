#include "base/lock.h"

#include <errno.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/keep_errno.h"

#define SPINS 100 /* turns before the first yield: the holder may need this processor */
/* yields before the first sleep: a yield does not run a thread of lower priority, and the holder may be one */
#define YIELDS   32
#define SLEEP_NS 50000 /* also the shortest sleep of most systems */

/*
 * The system call itself, because the C library's function is a cancellation point, where a cancelled thread would end,
 * and sets errno, which a hook must keep.
 */
static void sleep_briefly(void)
{
        const struct timespec while_ns = {.tv_nsec = SLEEP_NS};
        GR_KEEP_ERRNO;

        syscall(SYS_nanosleep, &while_ns, NULL);
}

void gr_lock_pause(unsigned n)
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
        __asm__ volatile("isb" ::: "memory"); /* the instruction yield takes no time on most processors */
#endif
}

void gr_spin_wait(struct gr_spin *spin)
{
        unsigned spins = 0;

        do {
                while (atomic_load_explicit(&spin->taken, memory_order_relaxed))
                        gr_lock_pause(++spins);
        } while (atomic_exchange_explicit(&spin->taken, 1, memory_order_acquire));
}

#ifdef GR_LOCK_CHECKS
#include <assert.h>
#include <stdint.h>
#include <stdio.h>

static _Thread_local uint64_t held;                                /* bit r: a lock of rank r */
static _Thread_local const void *held_locks[GR_RANK_METADATA + 1]; /* by rank, as far as held */
static _Thread_local unsigned primary_depth;                       /* how often the one recursive lock is held */

_Static_assert(GR_RANK_METADATA < 64, "a bit for each rank");

void gr_lock_rank_enter(enum gr_rank rank, const void *lock)
{
        if (rank == GR_RANK_PRIMARY && primary_depth++ > 0) {
                assert(held_locks[rank] == lock); /* not that of another device */
                return;
        }
        if (held >> rank)
                fprintf(stderr, "gpureclaim: a lock of rank %d is taken while one of rank %d is held\n", (int)rank,
                        63 - __builtin_clzll(held));
        assert(!(held >> rank)); /* enum gr_rank in lock.h has the numbers from 0 */
        held |= UINT64_C(1) << rank;
        held_locks[rank] = lock;
}

void gr_lock_rank_leave(enum gr_rank rank, const void *lock)
{
        gr_lock_assert_held(rank, lock); /* else unlocked twice, or by a thread that has not locked it */
        if (rank == GR_RANK_PRIMARY && --primary_depth > 0)
                return;
        held &= ~(UINT64_C(1) << rank);
}

void gr_lock_rank_assert_held(enum gr_rank rank)
{
        assert(held & UINT64_C(1) << rank);
}

void gr_lock_assert_held(enum gr_rank rank, const void *lock)
{
        gr_lock_rank_assert_held(rank);
        assert(held_locks[rank] == lock); /* not another one of the same rank */
}

void gr_lock_rank_assert_free_from(enum gr_rank rank)
{
        assert(!(held >> rank));
}
#endif
