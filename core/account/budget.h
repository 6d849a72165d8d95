/*
 * What one device's memory holds for this process, and how much it may: charged before the driver is asked, so that
 * threads racing for the last bytes cannot pass the limit together.
 *
 * The charge is what the driver really takes. Above 1 MiB: whole 2 MiB pages. Up to 1 MiB the driver packs blocks into
 * slabs, 2 MiB each and aligned to it, takes a slab with its first block and gives it back with its last (measured on
 * an H200, driver 580: 2,000 blocks of random sizes held exactly as many slabs as their addresses name).
 */
#ifndef GR_BUDGET_H
#define GR_BUDGET_H

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "account/memory_kind.h"
#include "base/lock.h"
#include "base/shard.h"

#define GR_UNLIMITED UINT64_MAX

struct gr_slab;

/* Room that is shared with other processes. Called with locks up to GR_RANK_SLABS held; must not call back. */
struct gr_group {
        uint64_t limit_bytes;                      /* of all together; GR_UNLIMITED: none */
        int (*reserve)(void *arg, uint64_t bytes); /* 0, or -EDQUOT */
        void (*adjust)(void *arg, int64_t bytes);  /* without asking: given back, or found out later */
        uint64_t (*room)(void *arg);               /* what reserve would grant now; GR_UNLIMITED: anything */
        uint64_t (*excess)(void *arg);             /* how much all have beyond the limit: adjust does not ask */
        void *arg;
};

/* Cached bytes that somebody keeps under a lock of its own. */
struct gr_cached {
        _Atomic uint64_t bytes;         /* written by its keeper only, with the lock held */
        _Atomic uint64_t granted_bytes; /* up to here nobody need look what the others have; of the device's */
        struct gr_cached *next;         /* on the device; constant once there */
};

struct gr_device {
        /* What every free reads is in the first cache line. */
        int ordinal;
        _Atomic uint64_t total_bytes;     /* of the card; 0 until known */
        _Atomic uint64_t card_free_bytes; /* as last seen; 0: never */

        _Atomic uint64_t hard_bytes;      /* charged never exceeds it */
        _Atomic uint64_t soft_bytes;      /* above it nothing is kept in the cache */
        _Atomic uint64_t threshold_bytes; /* cached memory above it goes back */

        _Atomic uint64_t reserved_bytes; /* taken from the driver: live, cached, and slabs' unused rest */
        _Atomic uint64_t asked_bytes;    /* of it, or soon: the driver has yet to say whether it gives them */

        struct gr_counter cached_bytes;             /* footprint of the cached blocks; <= reserved_bytes with ... */
        struct gr_cached *_Atomic cached_elsewhere; /* ... these, which only become more */
        _Atomic uint64_t granted_bytes;             /* to all of these; beyond the threshold no grant holds, ... */
        _Atomic uint64_t granted_for_bytes;         /* ... nor under another one than this */
        _Atomic bool grants_ended;                  /* ... nor at all */
        _Atomic uint64_t
                kind_bytes[GR_MEMORY_KIND_COUNT]; /* what the pool did not serve: of the charge, or beside it */
        _Atomic uint64_t idle_bytes;   /* in the driver's own pools, used by nobody; as last seen; <= reserved_bytes */
        _Atomic uint64_t driver_bytes; /* what the driver took by itself, as last seen; GR_UNLIMITED: not known */
        _Atomic uint64_t preallocated_bytes; /* that contexts took fresh to save fences, and did not give back */
        _Atomic uint64_t stranded_bytes;     /* of cached_bytes, what lies in segments in use and cannot go back */
        _Atomic uint64_t peak_reserved_bytes;
        _Atomic uint64_t peak_live_bytes;
        _Atomic uint64_t recent_peak_bytes[2]; /* since decay last looked at split, and from the look before to it */

        bool integrated;                /* host memory and the device's are one; constant once blocks exist */
        _Atomic uint64_t spill_bytes;   /* most host memory handed out for want of the device's */
        _Atomic uint64_t spilled_bytes; /* that the process has now */
        _Atomic uint64_t spill_begun, spill_ended; /* blocks of it that began to go back, and that have */

        /* NULL: no group. Constant once set, which happens before the first charge. */
        const struct gr_group *_Atomic group;

        /*
         * How often memory began to be given back to the driver, and how often that ended (gr_releases_begin and end):
         * what lies between is not to be found in any cache, and charged still. How often something had been.
         */
        _Atomic uint64_t releases_begun, releases_ended, returns_done;

        struct gr_lock ladder_lock; /* one thread at a time gives memory back and takes it, or they take each other's */

        struct gr_lock slabs_lock; /* guards what follows */
        struct gr_slab *slabs;     /* by page number */
        uint64_t slab_count;
        _Atomic uint64_t slab_rest_bytes; /* of slabs, in no block; also read without the lock */
};

/*
 * Adds bytes, modulo 2^64, to an account that only ever loses what was added to it before: checked builds assert that
 * it does not pass below zero.
 */
static inline void gr_account_add(_Atomic uint64_t *account, uint64_t bytes)
{
        uint64_t sum = atomic_fetch_add(account, bytes) + bytes;

        assert(sum <= INT64_MAX);
        (void)sum;
}

void gr_budget_init(struct gr_device *device, int ordinal);
void gr_budget_destroy(struct gr_device *device);

/*
 * Reserves room for a block of capacity_bytes. 0, with *ret_reserved_bytes to hand to commit or cancel; -EDQUOT: the
 * hard limit would be passed. A small block may get a reservation of 0 bytes where only the room in slabs is left.
 */
int gr_budget_reserve(struct gr_device *device, size_t capacity_bytes, uint64_t *ret_reserved_bytes);

void gr_budget_cancel(struct gr_device *device, uint64_t reserved_bytes);

/*
 * Turns the reservation into the charge of the block at ptr, also where it came out at another size than reserved.
 * -EDQUOT: it takes more than was reserved (the driver opened a new slab, or rounded differently), and the limit has no
 * room for that; then the block must go back to the driver, and nothing is charged.
 */
int gr_budget_commit(struct gr_device *device, uint64_t ptr, size_t capacity_bytes, uint64_t reserved_bytes);

/* Around giving cached memory back to the driver, so many bytes, from before anything is taken out of a cache. May be
 * nested. */
void gr_releases_begin(struct gr_device *device);
void gr_releases_end(struct gr_device *device, uint64_t bytes);

/* A figure that moves whenever another thread ends and has given something back, and only then. */
uint64_t gr_releases_of_others(struct gr_device *device);

/* Whether a thread is giving back at this moment. */
static inline bool gr_releases_in_flight(struct gr_device *device)
{
        uint64_t ended = atomic_load(&device->releases_ended);

        return atomic_load(&device->releases_begun) != ended;
}

/* Around a charge and the driver's call that it is for: until it is answered no peak counts so much, as the driver may
 * refuse it. Reserve begins with the first and commit and cancel end with the second. */
void gr_budget_ask(struct gr_device *device, uint64_t bytes);
void gr_budget_answered(struct gr_device *device, uint64_t bytes);

/*
 * For who puts figures of the driver and of the caches together: both hold of the same moment where all that had begun
 * at the end had ended before the begin.
 */
static inline uint64_t gr_releases_ended(struct gr_device *device)
{
        return atomic_load(&device->releases_ended);
}

static inline uint64_t gr_releases_begun(struct gr_device *device)
{
        return atomic_load(&device->releases_begun);
}

/* The block is no longer the process's. Returns the bytes that the device got back. */
uint64_t gr_budget_release(struct gr_device *device, uint64_t ptr, size_t capacity_bytes);

/* The same for what is not a block of the pool, in bytes as the driver takes them. -EDQUOT: the hard limit. */
int gr_budget_charge(struct gr_device *device, enum gr_memory_kind kind, uint64_t bytes);
void gr_budget_uncharge(struct gr_device *device, enum gr_memory_kind kind, uint64_t bytes);

/* As charge, for what the driver has taken already: also beyond the limit. */
void gr_budget_force(struct gr_device *device, enum gr_memory_kind kind, uint64_t bytes);

/* A block of this footprint entered or left the cache. */
static inline void gr_budget_cache(struct gr_device *device, uint64_t reserved_bytes)
{
        gr_counter_add(&device->cached_bytes, reserved_bytes);
}

static inline void gr_budget_uncache(struct gr_device *device, uint64_t reserved_bytes)
{
        gr_counter_sub(&device->cached_bytes, reserved_bytes);
}

/* From now on the device counts what cached says, until the device goes. Zero bytes are an account of nothing. */
void gr_budget_keep(struct gr_device *device, struct gr_cached *cached);

/* Cached memory above so much goes back from now on; GR_UNLIMITED: none. */
void gr_budget_set_threshold(struct gr_device *device, uint64_t bytes);

/* No grant holds from now on: memory is cached that no keeper has, too. */
void gr_budget_end_grants(struct gr_device *device);

/* So many bytes go from one keeper to another, NULL: nowhere; their grants with them. */
void gr_budget_pass_grant(struct gr_device *device, struct gr_cached *from, struct gr_cached *to, uint64_t bytes);

/* As gr_budget_cache and, with a negative number, uncache, for the keeper; its lock is held. */
static inline void gr_cached_add(struct gr_cached *cached, int64_t reserved_bytes)
{
        uint64_t bytes = atomic_load_explicit(&cached->bytes, memory_order_relaxed);

        atomic_store_explicit(&cached->bytes, bytes + (uint64_t)reserved_bytes, memory_order_relaxed);
}

/* Never negative, also while other threads move blocks. */
static inline uint64_t gr_budget_cached(struct gr_device *device)
{
        const struct gr_cached *apart = atomic_load_explicit(&device->cached_elsewhere, memory_order_acquire);
        uint64_t cached = gr_counter_sum(&device->cached_bytes);

        for (; apart; apart = apart->next)
                cached += atomic_load_explicit(&apart->bytes, memory_order_relaxed);

        return cached <= INT64_MAX ? cached : 0;
}

/* What of the cache can go back to the driver, once it is idle. */
static inline uint64_t gr_budget_returnable(struct gr_device *device)
{
        uint64_t cached = gr_budget_cached(device);
        uint64_t pinned = atomic_load_explicit(&device->stranded_bytes, memory_order_relaxed);

        return cached > pinned ? cached - pinned : 0;
}

/* Charged and not cached; never negative, also while other threads move blocks. */
static inline uint64_t gr_budget_held(struct gr_device *device)
{
        uint64_t charged = atomic_load_explicit(&device->reserved_bytes, memory_order_relaxed);
        uint64_t cached = gr_budget_cached(device);

        return charged > cached ? charged - cached : 0;
}

/* What of it the program has, so without the rest of slabs that no block takes. Likewise. */
static inline uint64_t gr_budget_live(struct gr_device *device)
{
        uint64_t rest = atomic_load_explicit(&device->slab_rest_bytes, memory_order_relaxed);
        uint64_t held = gr_budget_held(device);

        return held > rest ? held - rest : 0;
}

/* Raises the peaks of live memory: after each block from the driver, and now and then after one from the cache. */
void gr_budget_update_peak(struct gr_device *device);

/* The peak of late begins anew; what it was counts until this is called once more. */
void gr_budget_rotate_peak(struct gr_device *device);

uint64_t gr_budget_recent_peak(struct gr_device *device);

/* What could still be charged, under the hard limit and the group's. */
uint64_t gr_budget_room(struct gr_device *device);

/* What could still be charged and cached, under threshold and soft limit, too. */
uint64_t gr_budget_cache_room(struct gr_device *device);

/* What is charged beyond the hard limit or the group's, whichever is passed by more: charges that were not asked for,
 * or a limit that came down. */
uint64_t gr_budget_over(struct gr_device *device);

/* What the group of the process may have together; GR_UNLIMITED: no group, or no limit. */
static inline uint64_t gr_budget_group_limit(struct gr_device *device)
{
        const struct gr_group *group = atomic_load_explicit(&device->group, memory_order_acquire);

        return group ? group->limit_bytes : GR_UNLIMITED;
}

/* Whether any limit holds, the process's own or the group's. */
static inline bool gr_budget_limited(struct gr_device *device)
{
        return atomic_load_explicit(&device->hard_bytes, memory_order_relaxed) != GR_UNLIMITED ||
               gr_budget_group_limit(device) != GR_UNLIMITED;
}

/* Whether the process's own hard limit refuses bytes, so that nobody else could help. */
bool gr_budget_own_limit(struct gr_device *device, uint64_t bytes);

/* The card's size as the program sees it: not more than the limits allow. */
uint64_t gr_budget_total(struct gr_device *device, uint64_t card_total_bytes);

/* How much the cache holds, and can give back, beyond what threshold, soft limit and a hard limit lowered meanwhile
 * allow. */
uint64_t gr_budget_excess_limited(struct gr_device *device);

/* Whether there can be no excess, whatever the cache holds. */
static inline bool gr_budget_is_free(struct gr_device *device)
{
        return __builtin_expect(atomic_load_explicit(&device->threshold_bytes, memory_order_relaxed) == GR_UNLIMITED &&
                                        atomic_load_explicit(&device->soft_bytes, memory_order_relaxed) ==
                                                GR_UNLIMITED &&
                                        atomic_load_explicit(&device->reserved_bytes, memory_order_relaxed) <=
                                                atomic_load_explicit(&device->hard_bytes, memory_order_relaxed),
                                1);
}

static inline uint64_t gr_budget_excess(struct gr_device *device)
{
        return gr_budget_is_free(device) ? 0 : gr_budget_excess_limited(device);
}

/*
 * The same question after what a keeper has grew, put so that threads do not read what the others write: each keeper is
 * granted a little more than it has, all of them no more than the threshold, and asks only beyond that. NULL: it was no
 * keeper's.
 */
bool gr_budget_grown(struct gr_device *device, struct gr_cached *keeper);

/*
 * What the program is told: the smaller of card and limit, and of it what an allocation could get, counting the cache
 * and what the driver's own pools hold for nobody, which the ladder gives up when it is needed. slab_bytes: the rest of
 * slabs that would go back with what is cached (gr_pool_slab_bytes).
 */
void gr_budget_share(struct gr_device *device, uint64_t slab_bytes, uint64_t card_free_bytes, uint64_t card_total_bytes,
                     uint64_t *ret_free_bytes, uint64_t *ret_total_bytes);

#endif
