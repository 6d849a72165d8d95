/*
 * The locks of core/ and their order: a thread may take a lock only while all locks it holds have a lower rank. Builds
 * with GR_LOCK_CHECKS assert that; release builds pay nothing for it. No lock is held across a call of the driver
 * except where a header says so, and none across fork: the child passes everything through (shim/process.c).
 */
#ifndef GR_LOCK_H
#define GR_LOCK_H

#include <pthread.h>

enum gr_rank {
        GR_RANK_LADDER,   /* one device's climbers; held across calls of the driver */
        GR_RANK_CONTEXTS, /* the list of contexts */
        GR_RANK_HOOKS,    /* the registry of reclaimables */
        GR_RANK_GATE,     /* captures against fences; held across record and wait */
        GR_RANK_FENCE,    /* one context's epochs; held across record, wait and query */
        GR_RANK_EVENTS,   /* one context's spare events */
        GR_RANK_BIN,      /* one bin's blocks */
        GR_RANK_SLABS,    /* one device's slabs of small blocks */
        GR_RANK_LEDGER,   /* one shard of the ledger */
};

struct gr_lock {
        pthread_mutex_t mutex;
        enum gr_rank rank;
};

#ifdef GR_LOCK_CHECKS
void gr_rank_enter(enum gr_rank rank);
void gr_rank_leave(enum gr_rank rank);
#else
static inline void gr_rank_enter(enum gr_rank rank)
{
        (void)rank;
}
static inline void gr_rank_leave(enum gr_rank rank)
{
        (void)rank;
}
#endif

static inline void gr_lock_init(struct gr_lock *lock, enum gr_rank rank)
{
        pthread_mutex_init(&lock->mutex, NULL);
        lock->rank = rank;
}

static inline void gr_lock_destroy(struct gr_lock *lock)
{
        pthread_mutex_destroy(&lock->mutex);
}

static inline void gr_lock(struct gr_lock *lock)
{
        gr_rank_enter(lock->rank);
        pthread_mutex_lock(&lock->mutex);
}

static inline void gr_unlock(struct gr_lock *lock)
{
        pthread_mutex_unlock(&lock->mutex);
        gr_rank_leave(lock->rank);
}

#endif
