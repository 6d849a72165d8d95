#include "account/budget.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/size_class.h"
#include "base/trace_file.h"

_Static_assert(GR_MEMORY_KIND_COUNT == 8, "a change of them is another GR_TRACE_VERSION");

struct gr_slab {
        UT_hash_handle hh;
        uint64_t page; /* key: address / GR_PAGE_BYTES */
        uint64_t blocks;
};

static void raise_to(_Atomic uint64_t *peak, uint64_t value)
{
        uint64_t seen = atomic_load_explicit(peak, memory_order_relaxed);

        while (seen < value &&
               !atomic_compare_exchange_weak_explicit(peak, &seen, value, memory_order_relaxed, memory_order_relaxed))
                ;
}

void gr_budget_init(struct gr_device *device, int ordinal)
{
        memset(device, 0, sizeof(*device));
        device->ordinal = ordinal;
        atomic_init(&device->hard_bytes, GR_UNLIMITED);
        atomic_init(&device->soft_bytes, GR_UNLIMITED);
        atomic_init(&device->threshold_bytes, GR_UNLIMITED);
        atomic_init(&device->driver_bytes, GR_UNLIMITED);
        gr_lock_init(&device->ladder_lock, GR_RANK_LADDER);
        gr_lock_init(&device->slabs_lock, GR_RANK_SLABS);
}

void gr_budget_destroy(struct gr_device *device)
{
        struct gr_slab *slab, *tmp;

        HASH_ITER (hh, device->slabs, slab, tmp) {
                HASH_DELETE(hh, device->slabs, slab);
                free(slab);
        }
        gr_lock_destroy(&device->slabs_lock);
        gr_lock_destroy(&device->ladder_lock);
}

bool gr_budget_add_up_to(_Atomic uint64_t *account, uint64_t bytes, uint64_t most)
{
        uint64_t sum = atomic_load(account);

        assert(bytes <= INT64_MAX);
        do {
                if (sum > most || bytes > most - sum)
                        return false;
        } while (!atomic_compare_exchange_weak(account, &sum, sum + bytes));
        return true;
}

static bool charge_reserved(struct gr_device *device, uint64_t bytes)
{
        const struct gr_group *group = atomic_load(&device->group);

        if (!gr_budget_add_up_to(&device->reserved_bytes, bytes, atomic_load(&device->hard_bytes)))
                return false;
        if (group && group->reserve(group->arg, bytes) != 0) {
                gr_budget_add(&device->reserved_bytes, -bytes);
                return false;
        }
        return true;
}

static void note_reserved(struct gr_device *device)
{
        uint64_t asked = atomic_load(&device->asked_bytes), reserved = atomic_load(&device->reserved_bytes);

        /*
         * A call that ends meanwhile is only in the first value of asked_bytes, and one that begins only in the second.
         * With the larger of the two the peak counts neither.
         */
        asked = gr_max(asked, atomic_load(&device->asked_bytes));
        reserved = reserved > asked ? reserved - asked : 0;
        raise_to(&device->peak_reserved_bytes, reserved);
        gr_trace_add(GR_ENTRY_RESERVED, device->ordinal, 0, 0, reserved);
}

void gr_budget_ask(struct gr_device *device, uint64_t bytes)
{
        gr_budget_add(&device->asked_bytes, bytes);
}

void gr_budget_answered(struct gr_device *device, uint64_t bytes)
{
        gr_budget_add(&device->asked_bytes, -bytes);
        note_reserved(device);
}

/* Changes the charge, also beyond the limits. */
static void adjust_charge(struct gr_device *device, int64_t bytes)
{
        const struct gr_group *group = atomic_load(&device->group);

        gr_budget_add(&device->reserved_bytes, (uint64_t)bytes);
        if (group && bytes != 0)
                group->adjust(group->arg, bytes);
}

int gr_budget_reserve(struct gr_device *device, size_t capacity_bytes, uint64_t *ret_reserved_bytes)
{
        uint64_t bytes = gr_is_small(capacity_bytes) ? GR_PAGE_BYTES : gr_footprint_bytes(capacity_bytes);
        bool room;

        gr_budget_ask(device, bytes); /* before the charge, so that no other thread counts it in the peak */
        if (charge_reserved(device, bytes)) {
                *ret_reserved_bytes = bytes;
                return 0;
        }
        gr_budget_answered(device, bytes);
        if (!gr_is_small(capacity_bytes))
                return -EDQUOT;
        gr_lock(&device->slabs_lock);
        room = gr_budget_slab_rest(device) >= capacity_bytes;
        gr_unlock(&device->slabs_lock);
        if (!room)
                return -EDQUOT;
        *ret_reserved_bytes = 0;
        return 0;
}

void gr_budget_cancel(struct gr_device *device, uint64_t reserved_bytes)
{
        adjust_charge(device, -(int64_t)reserved_bytes);
        gr_budget_answered(device, reserved_bytes);
}

/* Adds bytes to what the device has of a kind; a negative number takes away. */
static void add_kind(struct gr_device *device, enum gr_memory_kind kind, uint64_t bytes)
{
        gr_budget_add(&device->kind_bytes[kind], bytes);
        gr_trace_add(GR_ENTRY_KIND, device->ordinal, kind, 0, atomic_load(&device->kind_bytes[kind]));
}

int gr_budget_charge(struct gr_device *device, enum gr_memory_kind kind, uint64_t bytes)
{
        if (gr_memory_kind_is_charged(kind) && !charge_reserved(device, bytes))
                return -EDQUOT;
        note_reserved(device);
        add_kind(device, kind, bytes);
        return 0;
}

void gr_budget_uncharge(struct gr_device *device, enum gr_memory_kind kind, uint64_t bytes)
{
        add_kind(device, kind, -bytes);
        if (gr_memory_kind_is_charged(kind)) {
                adjust_charge(device, -(int64_t)bytes);
                note_reserved(device);
        }
}

void gr_budget_force(struct gr_device *device, enum gr_memory_kind kind, uint64_t bytes)
{
        if (gr_memory_kind_is_charged(kind)) {
                adjust_charge(device, (int64_t)bytes);
                note_reserved(device);
        }
        add_kind(device, kind, bytes);
}

bool gr_budget_correct(struct gr_device *device, enum gr_memory_kind kind, struct gr_pooled *pooled,
                       uint64_t precharged_bytes, uint64_t reserved_bytes, uint64_t idle_bytes)
{
        uint64_t charged_bytes = pooled->reserved_bytes + precharged_bytes;
        bool within = true;

        if (reserved_bytes > charged_bytes) {
                within = gr_budget_charge(device, kind, reserved_bytes - charged_bytes) == 0;
                if (!within)
                        gr_budget_force(device, kind, reserved_bytes - charged_bytes);
        } else {
                gr_budget_uncharge(device, kind, charged_bytes - reserved_bytes);
        }
        assert(idle_bytes <= reserved_bytes);
        gr_budget_add(&device->idle_bytes, idle_bytes - pooled->idle_bytes);
        *pooled = (struct gr_pooled){.reserved_bytes = reserved_bytes, .idle_bytes = idle_bytes};
        return within;
}

static struct gr_slab *slab_find(struct gr_device *device, uint64_t page)
{
        struct gr_slab *slab;

        gr_assert_locked(&device->slabs_lock);
        HASH_FIND(hh, device->slabs, &page, sizeof(page), slab);
        return slab;
}

/* Corrects the charge of reserved_bytes to what the block takes; on failure to 0. */
static int commit_block(struct gr_device *device, uint64_t ptr, size_t capacity_bytes, uint64_t reserved_bytes)
{
        struct gr_slab *slab;
        int rc = 0;

        assert(ptr != 0 && capacity_bytes > 0);
        if (!gr_is_small(capacity_bytes)) {
                uint64_t bytes = gr_footprint_bytes(capacity_bytes);

                if (bytes > reserved_bytes && !charge_reserved(device, bytes - reserved_bytes)) {
                        adjust_charge(device, -(int64_t)reserved_bytes);
                        return -EDQUOT;
                }
                if (bytes < reserved_bytes)
                        adjust_charge(device, -(int64_t)(reserved_bytes - bytes));
                return 0;
        }
        if (reserved_bytes > GR_PAGE_BYTES) {
                adjust_charge(device, -(int64_t)(reserved_bytes - GR_PAGE_BYTES));
                reserved_bytes = GR_PAGE_BYTES;
        }
        gr_lock(&device->slabs_lock);
        slab = slab_find(device, ptr >> GR_PAGE_SHIFT);
        if (slab) {
                adjust_charge(device, -(int64_t)reserved_bytes);
        } else if (!reserved_bytes) {
                rc = -EDQUOT;
        } else {
                slab = calloc(1, sizeof(*slab));
                if (slab) {
                        slab->page = ptr >> GR_PAGE_SHIFT;
                        HASH_ADD(hh, device->slabs, page, sizeof(slab->page), slab);
                        if (!slab->hh.tbl) {
                                free(slab);
                                slab = NULL;
                        }
                }
                if (slab) {
                        device->slab_count++;
                        atomic_fetch_add(&device->slab_rest_bytes, GR_PAGE_BYTES);
                } else {
                        adjust_charge(device, -(int64_t)reserved_bytes);
                        rc = -ENOMEM;
                }
        }
        if (slab) {
                slab->blocks++;
                atomic_fetch_sub(&device->slab_rest_bytes, capacity_bytes);
        }
        gr_unlock(&device->slabs_lock);
        return rc;
}

int gr_budget_commit(struct gr_device *device, uint64_t ptr, size_t capacity_bytes, uint64_t reserved_bytes)
{
        int rc = commit_block(device, ptr, capacity_bytes, reserved_bytes);

        gr_budget_answered(device, reserved_bytes);
        return rc;
}

uint64_t gr_budget_uncharge_block(struct gr_device *device, uint64_t ptr, size_t capacity_bytes)
{
        struct gr_slab *slab;
        uint64_t bytes = gr_footprint_bytes(capacity_bytes);

        if (gr_is_small(capacity_bytes)) {
                bytes = 0;
                gr_lock(&device->slabs_lock);
                slab = slab_find(device, ptr >> GR_PAGE_SHIFT);
                if (slab) {
                        atomic_fetch_add(&device->slab_rest_bytes, capacity_bytes);
                        assert(slab->blocks > 0);
                        if (--slab->blocks == 0) {
                                HASH_DELETE(hh, device->slabs, slab);
                                free(slab);
                                device->slab_count--;
                                atomic_fetch_sub(&device->slab_rest_bytes, GR_PAGE_BYTES);
                                assert(device->slab_count > 0 || atomic_load(&device->slab_rest_bytes) == 0);
                                bytes = GR_PAGE_BYTES;
                        }
                }
                gr_unlock(&device->slabs_lock);
        }
        adjust_charge(device, -(int64_t)bytes);
        note_reserved(device);
        return bytes;
}

uint64_t gr_budget_slab_rest_beside(struct gr_device *device, uint64_t cached_bytes)
{
        uint64_t taken, rest;

        gr_lock(&device->slabs_lock);
        rest = gr_budget_slab_rest(device);
        taken = device->slab_count * GR_PAGE_BYTES - rest;
        gr_unlock(&device->slabs_lock);
        return cached_bytes == taken ? rest : 0;
}

/*
 * The calling thread's part of returns_effective. One counter for all devices is enough: a thread that compares two
 * readings of gr_budget_returns_of_others gives back nothing on another device in between.
 */
static _Thread_local __attribute__((tls_model("initial-exec"))) uint64_t own_returns;

void gr_budget_returns_begin(struct gr_device *device)
{
        atomic_fetch_add(&device->returns_begun, 1);
}

void gr_budget_returns_end(struct gr_device *device, uint64_t bytes)
{
        /* Before returns_ended: a thread that sees no return in flight must also see what it gave back. */
        if (bytes > 0) {
                own_returns++;
                atomic_fetch_add(&device->returns_effective, 1);
        }
        assert(gr_budget_returns_in_flight(device));
        atomic_fetch_add(&device->returns_ended, 1);
}

uint64_t gr_budget_returns_of_others(struct gr_device *device)
{
        return atomic_load(&device->returns_effective) - own_returns;
}

void gr_budget_keep(struct gr_device *device, struct gr_cached *cached)
{
        assert(!cached->next && atomic_load(&cached->bytes) == 0); /* not kept yet */
        cached->next = atomic_load(&device->keepers);
        while (!atomic_compare_exchange_weak(&device->keepers, &cached->next, cached))
                ;
}

void gr_budget_update_peak(struct gr_device *device)
{
        uint64_t live = gr_budget_live(device);

        raise_to(&device->peak_live_bytes, live);
        raise_to(&device->recent_peak_bytes[0], live);
        /* Charges raise this peak, too; but it must not be below the peak of live memory, which is a part of it. */
        raise_to(&device->peak_reserved_bytes, live);
}

uint64_t gr_budget_recent_peak(struct gr_device *device)
{
        return gr_max(atomic_load_explicit(&device->recent_peak_bytes[0], memory_order_relaxed),
                      atomic_load_explicit(&device->recent_peak_bytes[1], memory_order_relaxed));
}

void gr_budget_rotate_peak(struct gr_device *device)
{
        uint64_t live = gr_budget_live(device);

        atomic_store(&device->recent_peak_bytes[1], atomic_exchange(&device->recent_peak_bytes[0], live));
}

uint64_t gr_budget_room(struct gr_device *device)
{
        const struct gr_group *group = atomic_load(&device->group);
        uint64_t hard = atomic_load(&device->hard_bytes), reserved = atomic_load(&device->reserved_bytes);
        uint64_t room = hard == GR_UNLIMITED ? GR_UNLIMITED : hard > reserved ? hard - reserved : 0;

        return group ? gr_min(room, group->room(group->arg)) : room;
}

/* The most that the cache may hold under release threshold and soft limit. */
static uint64_t cache_allowed(struct gr_device *device)
{
        uint64_t allowed = atomic_load_explicit(&device->threshold_bytes, memory_order_relaxed);
        uint64_t soft = atomic_load_explicit(&device->soft_bytes, memory_order_relaxed);

        if (soft != GR_UNLIMITED) {
                uint64_t not_cached = gr_budget_not_cached(device);

                allowed = gr_min(allowed, soft > not_cached ? soft - not_cached : 0);
        }
        return allowed;
}

uint64_t gr_budget_cache_room(struct gr_device *device)
{
        uint64_t cached = gr_budget_cached(device), allowed = cache_allowed(device);

        return gr_min(gr_budget_room(device), allowed > cached ? allowed - cached : 0);
}

uint64_t gr_budget_over(struct gr_device *device)
{
        const struct gr_group *group = atomic_load(&device->group);
        uint64_t hard = atomic_load(&device->hard_bytes), reserved = atomic_load(&device->reserved_bytes);
        uint64_t over = reserved > hard ? reserved - hard : 0, excess = group ? group->excess(group->arg) : 0;

        return excess > over ? excess : over;
}

bool gr_budget_own_limit(struct gr_device *device, uint64_t bytes)
{
        uint64_t hard = atomic_load(&device->hard_bytes), reserved = atomic_load(&device->reserved_bytes);

        return reserved > hard || bytes > hard - reserved;
}

uint64_t gr_budget_total(struct gr_device *device, uint64_t device_total_bytes)
{
        const struct gr_group *group = atomic_load(&device->group);
        uint64_t total = gr_min(device_total_bytes, atomic_load(&device->hard_bytes));

        return group ? gr_min(total, group->limit_bytes) : total;
}

uint64_t gr_budget_excess_limited(struct gr_device *device)
{
        uint64_t reserved = atomic_load_explicit(&device->reserved_bytes, memory_order_relaxed);
        uint64_t hard = atomic_load_explicit(&device->hard_bytes, memory_order_relaxed);
        uint64_t cached = gr_budget_returnable(device), allowed = cache_allowed(device), over;

        over = cached > allowed ? cached - allowed : 0;
        /* The hard limit was lowered below what is charged already. */
        if (reserved > hard && reserved - hard > over)
                over = gr_min(reserved - hard, cached);
        return over;
}

#define GRANT_SHARE 256 /* a grant exceeds what its keeper holds by 1/256 of the threshold, if all grants still fit */

void gr_budget_set_limit(struct gr_device *device, enum gr_limit limit, uint64_t bytes)
{
        switch (limit) {
        case GR_LIMIT_HARD:
                atomic_store(&device->hard_bytes, bytes);
                break;
        case GR_LIMIT_SOFT:
                atomic_store(&device->soft_bytes, bytes);
                break;
        case GR_LIMIT_THRESHOLD:
                atomic_store(&device->threshold_bytes, bytes);
                /* Grants of the old threshold are void: without a threshold keepers may have grown beyond theirs. */
                atomic_store(&device->granted_for_bytes, GR_UNLIMITED);
                break;
        }
}

void gr_budget_end_grants(struct gr_device *device)
{
        atomic_store(&device->grants_ended, true);
}

void gr_budget_pass_grant(struct gr_device *device, struct gr_cached *from, struct gr_cached *to, uint64_t bytes)
{
        uint64_t granted = atomic_load(&from->granted_bytes);

        while (!atomic_compare_exchange_weak(&from->granted_bytes, &granted, granted - gr_min(granted, bytes)))
                ;
        if (to) {
                atomic_fetch_add(&to->granted_bytes, bytes);
                atomic_fetch_add(&device->granted_bytes, bytes);
        }
        atomic_fetch_sub(&device->granted_bytes, gr_min(granted, bytes));
}

/*
 * Sets the keeper's grant to what it holds + more_bytes, or to 0 if it holds nothing. False: all grants together are
 * too large.
 */
static bool set_grant(struct gr_device *device, struct gr_cached *keeper, uint64_t more_bytes, uint64_t threshold)
{
        uint64_t has = atomic_load(&keeper->bytes), bytes = has ? has + more_bytes : 0;
        uint64_t change = bytes - atomic_exchange(&keeper->granted_bytes, bytes); /* modulo 2^64 */

        return atomic_fetch_add(&device->granted_bytes, change) + change <= threshold;
}

/* Raises the keeper's grant at least to what it holds, so that no other keeper is granted those bytes. */
static void grant_more(struct gr_device *device, struct gr_cached *keeper, uint64_t threshold)
{
        uint64_t step = threshold / GRANT_SHARE, bytes = gr_sharded_sum(&device->cached_bytes);
        struct gr_cached *each;

        for (each = atomic_load(&device->keepers); each; each = each->next)
                bytes += atomic_load(&each->bytes) ? atomic_load(&each->bytes) + step : 0;
        step = bytes <= threshold ? step : 0;
        if (atomic_exchange(&device->granted_for_bytes, threshold) == threshold &&
            (set_grant(device, keeper, step, threshold) || step == 0))
                return;
        /* Set all grants anew: some are no longer needed, or were made for another threshold. */
        for (each = atomic_load(&device->keepers); each; each = each->next)
                set_grant(device, each, step, threshold);
}

bool gr_budget_grown(struct gr_device *device, struct gr_cached *keeper)
{
        uint64_t threshold = atomic_load_explicit(&device->threshold_bytes, memory_order_relaxed);
        uint64_t reserved = atomic_load_explicit(&device->reserved_bytes, memory_order_relaxed);

        if (atomic_load_explicit(&device->grants_ended, memory_order_relaxed))
                keeper = NULL;
        if (reserved <= atomic_load_explicit(&device->soft_bytes, memory_order_relaxed) &&
            reserved <= atomic_load_explicit(&device->hard_bytes, memory_order_relaxed) &&
            (threshold == GR_UNLIMITED ||
             (keeper && atomic_load_explicit(&device->granted_for_bytes, memory_order_relaxed) == threshold &&
              atomic_load_explicit(&device->granted_bytes, memory_order_relaxed) <= threshold &&
              atomic_load_explicit(&keeper->bytes, memory_order_relaxed) <=
                      atomic_load_explicit(&keeper->granted_bytes, memory_order_relaxed))))
                return false;
        if (keeper && threshold != GR_UNLIMITED)
                grant_more(device, keeper, threshold);
        return gr_budget_excess_limited(device) > 0;
}

void gr_budget_share(struct gr_device *device, uint64_t slab_bytes, uint64_t device_free_bytes,
                     uint64_t device_total_bytes, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes)
{
        uint64_t hard = atomic_load(&device->hard_bytes);
        uint64_t not_cached = gr_budget_not_cached(device);
        uint64_t idle = gr_min(atomic_load(&device->idle_bytes) + slab_bytes, not_cached);
        uint64_t kept = not_cached - idle + atomic_load(&device->stranded_bytes); /* cannot be given back */
        uint64_t total = gr_budget_total(device, device_total_bytes);
        uint64_t free_bytes = device_free_bytes + gr_budget_returnable(device) + idle;
        const struct gr_group *group = atomic_load(&device->group);

        if (hard != GR_UNLIMITED)
                free_bytes = gr_min(free_bytes, hard > kept ? hard - kept : 0);
        if (group) {
                uint64_t room = group->room(group->arg), own = gr_budget_returnable(device) + idle;

                free_bytes = gr_min(free_bytes, room < GR_UNLIMITED - own ? room + own : GR_UNLIMITED);
        }
        atomic_store(&device->free_bytes, device_free_bytes);
        *ret_free_bytes = gr_min(free_bytes, total);
        *ret_total_bytes = total;
}
