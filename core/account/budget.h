/*
 * How much memory of one device the process has reserved, and its limits. Memory is charged before the driver is asked,
 * so that threads racing for the last bytes cannot pass the limit together.
 *
 * The charge is what the driver really takes. Above 1 MiB: whole 2 MiB pages. Up to 1 MiB the driver packs blocks into
 * slabs, 2 MiB each and aligned to it; it takes a slab with its first block and gives it back with its last
 * (docs/measurements.md, slabs).
 *
 * Any thread may call these functions. It may hold locks below GR_RANK_SLABS. They do not call the driver.
 */
#ifndef GR_BUDGET_H
#define GR_BUDGET_H

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "account/device.h"
#include "account/memory_kind.h"
#include "base/arith.h"
#include "base/lock.h"
#include "base/shard.h"

#define GR_UNLIMITED UINT64_MAX

/*
 * The budget that is shared with the other processes of the group. Its functions are called with locks up to
 * GR_RANK_SLABS held, and must not call back.
 */
struct gr_group {
        uint64_t limit_bytes;                      /* of all processes together; GR_UNLIMITED: none */
        int (*reserve)(void *arg, uint64_t bytes); /* 0, or -EDQUOT */
        void (*adjust)(void *arg, int64_t bytes);  /* changes the account, also beyond the limit */
        uint64_t (*room)(void *arg);               /* what reserve would grant now; GR_UNLIMITED: anything */
        uint64_t (*excess)(void *arg);             /* by how much the account is beyond the limit, after adjust */
        void *arg;
        /* Names the others that have most: "train 4711 has 2.000 GiB, ..."; "": none. No lock is held. May be NULL. */
        void (*others)(void *arg, char *ret_text, size_t text_bytes);
};

/*
 * The cached bytes of one keeper, such as an arena, which counts them under its own lock. As long as it holds no more
 * than its grant, it knows without adding up all keepers that the threshold is kept.
 */
struct gr_cached {
        _Atomic uint64_t bytes;         /* written by its keeper only, with the lock held */
        _Atomic uint64_t granted_bytes; /* the grant, part of the device's granted_bytes */
        struct gr_cached *next;         /* in the device's list; constant once there */
};

/*
 * Adds bytes to an account, such as a sum of struct gr_device, modulo 2^64: a negative number takes away what was added
 * before. Debug builds assert that the account does not fall below zero.
 */
static inline void gr_budget_add(_Atomic uint64_t *account, uint64_t bytes)
{
        uint64_t sum = atomic_fetch_add(account, bytes) + bytes;

        assert(sum <= INT64_MAX);
        (void)sum;
}

/* Adds bytes, if the sum is then at most `most`. False: it would be more, and nothing was added. */
bool gr_budget_add_up_to(_Atomic uint64_t *account, uint64_t bytes, uint64_t most);

/* Makes device one without limits that holds nothing. ordinal: -1 for the host. */
void gr_budget_init(struct gr_device *device, int ordinal);
void gr_budget_destroy(struct gr_device *device);

/*
 * Reserves room for a block of capacity_bytes. 0, with *ret_reserved_bytes to hand to commit or cancel; -EDQUOT: the
 * hard limit would be passed. A small block may get a reservation of 0 bytes: at the limit it can only be served from
 * room in a slab.
 */
int gr_budget_reserve(struct gr_device *device, size_t capacity_bytes, uint64_t *ret_reserved_bytes);

/* Gives a reservation back: the driver was not asked, or refused. */
void gr_budget_cancel(struct gr_device *device, uint64_t reserved_bytes);

/*
 * Turns the reservation into the charge of the block at ptr, which may be larger or smaller. -EDQUOT: the block takes
 * more than was reserved (the driver opened a new slab, or rounded differently), and the limit has no room for that.
 * -ENOMEM: no host memory. On failure nothing is charged, and the caller gives the block back to the driver.
 */
int gr_budget_commit(struct gr_device *device, uint64_t ptr, size_t capacity_bytes, uint64_t reserved_bytes);

/*
 * Called around giving cached memory back to the driver: begin before the first block leaves its cache, end with the
 * bytes that the driver got. Pairs may be nested.
 */
void gr_budget_returns_begin(struct gr_device *device);
void gr_budget_returns_end(struct gr_device *device, uint64_t bytes);

/* A number that changes when another thread has given memory back (gr_budget_returns_end with bytes above 0). */
uint64_t gr_budget_returns_of_others(struct gr_device *device);

/* Whether a thread is giving back at this moment. */
static inline bool gr_budget_returns_in_flight(struct gr_device *device)
{
        uint64_t ended = atomic_load(&device->returns_ended);

        return atomic_load(&device->returns_begun) != ended;
}

/*
 * Called around a charge and the driver's call that it is for. Until the driver has answered, these bytes are left out
 * of the peak, as the driver may refuse them. gr_budget_reserve calls ask; commit and cancel call answered.
 */
void gr_budget_ask(struct gr_device *device, uint64_t bytes);
void gr_budget_answered(struct gr_device *device, uint64_t bytes);

/*
 * For a reader that adds figures of the driver to figures of the caches: it calls gr_budget_returns_ended before both
 * and gr_budget_returns_begun after both. If the two are equal nothing was given back in between, and the figures
 * belong together.
 */
static inline uint64_t gr_budget_returns_ended(struct gr_device *device)
{
        return atomic_load(&device->returns_ended);
}

static inline uint64_t gr_budget_returns_begun(struct gr_device *device)
{
        return atomic_load(&device->returns_begun);
}

/* The block has gone back to the driver: uncharges it. Returns the bytes that the device got back. */
uint64_t gr_budget_uncharge_block(struct gr_device *device, uint64_t ptr, size_t capacity_bytes);

/* For memory that is no block of the pool, in bytes as the driver takes them. -EDQUOT: the hard limit. */
int gr_budget_charge(struct gr_device *device, enum gr_memory_kind kind, uint64_t bytes);
void gr_budget_uncharge(struct gr_device *device, enum gr_memory_kind kind, uint64_t bytes);

/* As gr_budget_charge, also beyond the limit: for memory that the driver has given already. */
void gr_budget_force(struct gr_device *device, enum gr_memory_kind kind, uint64_t bytes);

/* What a pool of the driver has reserved, as last seen, and the unused part of it. */
struct gr_pooled {
        uint64_t reserved_bytes, idle_bytes;
};

/*
 * The driver says what its pool has reserved now, and how much of that is idle. Corrects the charge to that, and stores
 * both figures in *pooled. So far pooled->reserved_bytes are charged, and precharged_bytes, which the caller charged
 * before a call of the driver that may have made the pool grow. False where the charge passes the limit; it is charged
 * all the same.
 */
bool gr_budget_correct(struct gr_device *device, enum gr_memory_kind kind, struct gr_pooled *pooled,
                       uint64_t precharged_bytes, uint64_t reserved_bytes, uint64_t idle_bytes);

/* A block of this footprint entered or left the cache. */
static inline void gr_budget_cache(struct gr_device *device, uint64_t reserved_bytes)
{
        gr_sharded_add(&device->cached_bytes, reserved_bytes);
}

static inline void gr_budget_uncache(struct gr_device *device, uint64_t reserved_bytes)
{
        gr_sharded_sub(&device->cached_bytes, reserved_bytes);
}

/* Adds a keeper to the device, for as long as the device lives. Zero bytes are a keeper that holds nothing. */
void gr_budget_keep(struct gr_device *device, struct gr_cached *cached);

enum gr_limit {
        GR_LIMIT_HARD,      /* no charge may pass it */
        GR_LIMIT_SOFT,      /* above it nothing is kept in the cache */
        GR_LIMIT_THRESHOLD, /* cached memory above it goes back */
};

/*
 * Sets a limit, at any time; GR_UNLIMITED: none. It holds from the next charge, or the next block that is cached. What
 * the device then has beyond it stays until the caller gives it back (gr_trim_excess) or wakes the background thread:
 * gr_budget_excess.
 */
void gr_budget_set_limit(struct gr_device *device, enum gr_limit limit, uint64_t bytes);

/* Ends all grants for good: called when memory is cached that no keeper counts. */
void gr_budget_end_grants(struct gr_device *device);

/*
 * Moves bytes of one keeper's grant to another, as blocks move between them; to == NULL: that part of the grant ends.
 */
void gr_budget_pass_grant(struct gr_device *device, struct gr_cached *from, struct gr_cached *to, uint64_t bytes);

/* Adds to what the keeper holds; negative: takes away. The keeper's lock is held. */
static inline void gr_cached_add(struct gr_cached *cached, int64_t reserved_bytes)
{
        uint64_t bytes = atomic_load_explicit(&cached->bytes, memory_order_relaxed);

        gr_lock_rank_assert_held(GR_RANK_ARENA);
        assert(bytes + (uint64_t)reserved_bytes <= INT64_MAX);
        atomic_store_explicit(&cached->bytes, bytes + (uint64_t)reserved_bytes, memory_order_relaxed);
}

/* All cached memory. Never negative, even while other threads move blocks. */
static inline uint64_t gr_budget_cached(struct gr_device *device)
{
        const struct gr_cached *keeper = atomic_load_explicit(&device->keepers, memory_order_acquire);
        uint64_t cached = gr_sharded_sum(&device->cached_bytes);

        for (; keeper; keeper = keeper->next)
                cached += atomic_load_explicit(&keeper->bytes, memory_order_relaxed);

        return cached <= INT64_MAX ? cached : 0;
}

/* The part of the cache that can go back to the driver once it is idle. */
static inline uint64_t gr_budget_returnable(struct gr_device *device)
{
        uint64_t cached = gr_budget_cached(device);
        uint64_t stranded = atomic_load_explicit(&device->stranded_bytes, memory_order_relaxed);

        return cached > stranded ? cached - stranded : 0;
}

/* What is reserved and not cached. Never negative, even while other threads move blocks. */
static inline uint64_t gr_budget_not_cached(struct gr_device *device)
{
        uint64_t reserved = atomic_load_explicit(&device->reserved_bytes, memory_order_relaxed);
        uint64_t cached = gr_budget_cached(device);

        return reserved > cached ? reserved - cached : 0;
}

/* The rest of slabs that no block takes. Never negative, even while blocks come and go. */
static inline uint64_t gr_budget_slab_rest(struct gr_device *device)
{
        uint64_t rest = atomic_load_explicit(&device->slab_rest_bytes, memory_order_relaxed);

        return rest <= INT64_MAX ? rest : 0;
}

/* The same rest, if cached blocks of cached_bytes are all that the slabs hold: it goes back with them. Else 0. */
uint64_t gr_budget_slab_rest_beside(struct gr_device *device, uint64_t cached_bytes);

/*
 * The live memory: gr_budget_not_cached less the unused rest of slabs, and less what the driver has not given yet, and
 * may refuse. Never negative either. A call of the driver that ends meanwhile is only in the first of the two values of
 * asked_bytes.
 */
static inline uint64_t gr_budget_live(struct gr_device *device)
{
        uint64_t asked = atomic_load(&device->asked_bytes), not_cached = gr_budget_not_cached(device), rest;

        rest = gr_budget_slab_rest(device) + gr_max(asked, atomic_load(&device->asked_bytes));
        return not_cached > rest ? not_cached - rest : 0;
}

/* The part of the live memory that the program has not freed: the rest is parked for graphs. */
static inline uint64_t gr_budget_live_unfreed(struct gr_device *device)
{
        uint64_t parked = atomic_load(&device->graph_bytes), live = gr_budget_live(device);

        return live > parked ? live - parked : 0;
}

/* Raises the peaks to the live memory. Called after each block from the driver, and after some from the cache. */
void gr_budget_update_peak(struct gr_device *device);

/* Begins a new window of the recent peak. The window before still counts until this is called once more. */
void gr_budget_rotate_peak(struct gr_device *device);

/* The largest live memory since the window before the present one began, in bytes. */
uint64_t gr_budget_recent_peak(struct gr_device *device);

/* What could still be charged, under the hard limit and the group's. */
uint64_t gr_budget_room(struct gr_device *device);

/* What could still be charged and cached, under threshold and soft limit, too. */
uint64_t gr_budget_cache_room(struct gr_device *device);

/*
 * By how much the charge exceeds the hard limit, or the group's limit where that is more. That happens by
 * gr_budget_force, or after a limit was lowered.
 */
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

/* Whether the process's own hard limit refuses bytes, so that memory of other processes would not help. */
bool gr_budget_own_limit(struct gr_device *device, uint64_t bytes);

/* The device's size as the program is told: at most the limits. */
uint64_t gr_budget_total(struct gr_device *device, uint64_t device_total_bytes);

/* The excess: what the cache holds beyond release threshold, soft limit or a lowered hard limit, and can give back. */
uint64_t gr_budget_excess_limited(struct gr_device *device);

/* True where there is no excess, whatever the cache holds, as no limit on the cache is set or passed. */
static inline bool gr_budget_is_free(struct gr_device *device)
{
        return __builtin_expect(atomic_load_explicit(&device->threshold_bytes, memory_order_relaxed) == GR_UNLIMITED &&
                                        atomic_load_explicit(&device->soft_bytes, memory_order_relaxed) ==
                                                GR_UNLIMITED &&
                                        atomic_load_explicit(&device->reserved_bytes, memory_order_relaxed) <=
                                                atomic_load_explicit(&device->hard_bytes, memory_order_relaxed),
                                1);
}

/* As gr_budget_excess_limited, faster where no limit on the cache is set. */
static inline uint64_t gr_budget_excess(struct gr_device *device)
{
        return gr_budget_is_free(device) ? 0 : gr_budget_excess_limited(device);
}

/*
 * Whether there is excess after keeper's cached bytes grew; NULL: cached bytes that no keeper counts grew. Each keeper
 * is granted a little more than it holds, and all grants together are at most the threshold. Only a keeper above its
 * grant adds up the others, so threads seldom read here what other threads write.
 */
bool gr_budget_grown(struct gr_device *device, struct gr_cached *keeper);

/*
 * The figures of cudaMemGetInfo: total is the device's memory, or the limit where that is less; free is what an
 * allocation could get, with the cache and the unused memory of the driver's own pools, which the ladder gives back on
 * demand. slab_bytes: the rest of slabs that would go back with cached blocks (gr_pool_slab_bytes).
 */
void gr_budget_share(struct gr_device *device, uint64_t slab_bytes, uint64_t device_free_bytes,
                     uint64_t device_total_bytes, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes);

#endif
