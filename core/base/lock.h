/*
 * The locks of core/ and shim/ and their order: a thread may take a lock only while all locks it holds have a lower
 * rank. Builds with GR_LOCK_CHECKS assert that, and that functions which ask for a lock are called with that very lock
 * held (gr_assert_locked); release builds pay nothing for it. No lock is held across a call of the driver except where
 * a header says so, and none across fork: in the child all calls go to the driver (shim/process/process.c).
 *
 * GR_GUARDED_BY says which lock guards a variable, where both are static, and GR_HELD which lock a function is called
 * with. Clang checks both in shim/, and in all files that each lock taken is released (the test "locks held").
 */
#ifndef GR_LOCK_H
#define GR_LOCK_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#ifdef __clang__
#define GR_LOCK_ATTRIBUTE(attribute) __attribute__((attribute))
#else
#define GR_LOCK_ATTRIBUTE(attribute)
#endif
#define GR_GUARDED_BY(lock) GR_LOCK_ATTRIBUTE(guarded_by(lock)) /* behind a variable's name */
/* Stands before a function; behind its declaration where a parameter says which lock it is. */
#define GR_HELD(lock) GR_LOCK_ATTRIBUTE(requires_capability(lock))
/*
 * Before a function that clang cannot check: it locks under a condition, or releases its caller's lock for a while, or
 * a comment at it says why.
 */
#define GR_NOT_CHECKED GR_LOCK_ATTRIBUTE(no_thread_safety_analysis)

enum gr_rank {
        GR_RANK_RESOLVE,       /* shim/driver: the driver is being found, or the process ends */
        GR_RANK_API,           /* shim/process: what the program registered */
        GR_RANK_PRIMARY,       /* one device's primary context begins or ends; recursive, held across the driver */
        GR_RANK_IPC,           /* shim/hooks: the thread that answers other processes; held while it is started */
        GR_RANK_SLEEP,         /* the process goes to sleep or wakes; held across calls of the driver */
        GR_RANK_LADDER,        /* one device's climbers; held across calls of the driver */
        GR_RANK_CONTEXTS,      /* the list of contexts */
        GR_RANK_RECLAIMABLES,  /* the registry of reclaimables */
        GR_RANK_UNPIN,         /* pinned memory goes back; held across the driver's free and attempts to allocate */
        GR_RANK_BACKGROUND,    /* the background thread's orders */
        GR_RANK_NEIGHBOUR,     /* requests between processes */
        GR_RANK_OVERHEAD,      /* driver overhead; held across NVML */
        GR_RANK_POOLS,         /* the program's stream-ordered pools */
        GR_RANK_POOL_FREES,    /* what the program freed in these pools */
        GR_RANK_GRAPH_MEMORY,  /* what the program's graphs have reserved; held across calls of the driver */
        GR_RANK_CONTEXT_NAMES, /* which context a handle means; held across calls of the driver */
        GR_RANK_GREENS,        /* the program's green contexts */
        GR_RANK_DEVICES,       /* which devices are set up; held across calls of the driver */
        GR_RANK_GRAPHS,        /* the program's graphs */
        GR_RANK_PITCHES,       /* the pitches that the driver chose */
        GR_RANK_GATE,          /* captures against fences; held across record and wait */
        GR_RANK_CAPTURING,     /* streams that capture */
        GR_RANK_GRAPH_HOLDS,   /* the table of graph holds */
        GR_RANK_FENCE,         /* one context's epochs; held across record, wait and query */
        GR_RANK_EVENTS,        /* one context's idle events */
        GR_RANK_SPILLED,       /* one context's freed blocks of host memory */
        GR_RANK_SEGMENTS,      /* one context's segments */
        GR_RANK_PINNED,        /* cached pinned memory */
        GR_RANK_MAPPINGS,      /* memory is mapped or unmapped; held across those calls */
        GR_RANK_IMPORTS,       /* which memory of other processes is open */
        GR_RANK_ARENA,         /* one shard's bins of a context */
        GR_RANK_SLABS,         /* one device's slabs of small blocks */
        GR_RANK_LEDGER,        /* one shard of the ledger */
        GR_RANK_ACCOUNTED,     /* the ledger of what the pool does not serve */
        GR_RANK_REGION,        /* one device's account in the region; held across looks at other processes */
        GR_RANK_STREAMS,       /* the library's own streams; held while the driver makes them */
        GR_RANK_NVML,          /* loading NVML */
        GR_RANK_NVML_VIEWS,    /* the functions of NVML that the program would find without the library */
        GR_RANK_DEBUG,         /* the blocks that the debug aids watch */
        GR_RANK_TRACE,         /* the trace's file grows; held across write */
        GR_RANK_ORIGINS,       /* stacks are added to the file of origins */
        GR_RANK_ORIGINS_FILE,  /* a part of its blocks; also where it grows, held across fallocate */
        GR_RANK_WORKERS,       /* calls for worker threads */
        GR_RANK_THREADS,       /* the library's threads */
        GR_RANK_METADATA,      /* the pool's own structures; adding to them may take memory from the C library */
};

struct GR_LOCK_ATTRIBUTE(capability("lock")) gr_lock {
        pthread_mutex_t mutex;
        enum gr_rank rank;
};

#define GR_LOCK_INIT(rank_)                                                                                            \
        {                                                                                                              \
                PTHREAD_MUTEX_INITIALIZER, rank_                                                                       \
        } /* of a static lock, which is never destroyed */

#ifdef GR_LOCK_CHECKS
void gr_lock_rank_enter(enum gr_rank rank, const void *lock);
void gr_lock_rank_leave(enum gr_rank rank, const void *lock);

/* Asserts that the calling thread holds this lock, which has this rank. */
void gr_lock_assert_held(enum gr_rank rank, const void *lock);

/* Asserts that the calling thread holds a lock of this rank: where the caller's lock is not at hand. */
void gr_lock_rank_assert_held(enum gr_rank rank);

/*
 * Asserts that the calling thread holds no lock of this rank or a higher one: for functions that may take one, or call
 * the driver.
 */
void gr_lock_rank_assert_free_from(enum gr_rank rank);
#else
static inline void gr_lock_rank_enter(enum gr_rank rank, const void *lock)
{
        (void)rank;
        (void)lock;
}
static inline void gr_lock_rank_leave(enum gr_rank rank, const void *lock)
{
        (void)rank;
        (void)lock;
}
static inline void gr_lock_assert_held(enum gr_rank rank, const void *lock)
{
        (void)rank;
        (void)lock;
}
static inline void gr_lock_rank_assert_held(enum gr_rank rank)
{
        (void)rank;
}
static inline void gr_lock_rank_assert_free_from(enum gr_rank rank)
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

static inline void gr_lock(struct gr_lock *lock) GR_LOCK_ATTRIBUTE(acquire_capability(*lock));
static inline bool gr_trylock(struct gr_lock *lock) GR_LOCK_ATTRIBUTE(try_acquire_capability(true, *lock));
static inline void gr_unlock(struct gr_lock *lock) GR_LOCK_ATTRIBUTE(release_capability(*lock));

GR_NOT_CHECKED static inline void gr_lock(struct gr_lock *lock)
{
        gr_lock_rank_enter(lock->rank, lock);
        pthread_mutex_lock(&lock->mutex);
}

/* False: another thread has it. */
GR_NOT_CHECKED static inline bool gr_trylock(struct gr_lock *lock)
{
        if (pthread_mutex_trylock(&lock->mutex))
                return false;
        gr_lock_rank_enter(lock->rank, lock);
        return true;
}

GR_NOT_CHECKED static inline void gr_unlock(struct gr_lock *lock)
{
        pthread_mutex_unlock(&lock->mutex);
        gr_lock_rank_leave(lock->rank, lock);
}

/* For functions that are called with the lock held; nothing in release builds. */
static inline void gr_assert_locked(const struct gr_lock *lock)
{
        gr_lock_assert_held(lock->rank, lock);
}

/*
 * The back-off of a loop that waits for another thread's store; n counts the turns of the loop. The first turns spin,
 * later ones yield the processor, and the rest sleep. Keeps errno; no cancellation point.
 */
void gr_lock_pause(unsigned n);

/*
 * A lock for a few loads and stores on the fast path, with little contention: one atomic exchange, half of what a mutex
 * costs. Never held across a call that may block. Zero bytes are a lock that no thread holds.
 */
struct gr_spin {
        _Atomic int taken;
};

void gr_spin_wait(struct gr_spin *spin);

static inline void gr_spin_lock(struct gr_spin *spin, enum gr_rank rank)
{
        gr_lock_rank_enter(rank, spin);
        if (__builtin_expect(atomic_exchange_explicit(&spin->taken, 1, memory_order_acquire), 0))
                gr_spin_wait(spin);
}

static inline void gr_spin_unlock(struct gr_spin *spin, enum gr_rank rank)
{
        atomic_store_explicit(&spin->taken, 0, memory_order_release);
        gr_lock_rank_leave(rank, spin);
}

static inline void gr_assert_spin_locked(const struct gr_spin *spin, enum gr_rank rank)
{
        gr_lock_assert_held(rank, spin);
}

#endif
