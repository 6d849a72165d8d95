/*
 * What the process has of one device: accounts, limits and peaks, as budget.h explains them. The host has one, too, for
 * pinned memory (core->host).
 */
#ifndef GR_DEVICE_H
#define GR_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "account/memory_kind.h"
#include "base/lock.h"
#include "base/shard.h"

struct gr_cached;
struct gr_group;
struct gr_slab;

struct gr_device {
        /* Every free reads the fields from here to threshold_bytes: they share the first cache line. */
        int ordinal;
        _Atomic uint64_t total_bytes; /* its memory; 0 until known */
        _Atomic uint64_t free_bytes;  /* as last seen; 0: never */

        _Atomic uint64_t hard_bytes, soft_bytes, threshold_bytes; /* the limits: gr_budget_set_limit */

        _Atomic uint64_t reserved_bytes; /* the charge: live, cached, and the unused rest of slabs */
        _Atomic uint64_t asked_bytes;    /* charged, or about to be, for calls that the driver has not answered yet */

        /* All cached memory, by footprint: cached_bytes + what the keepers have cached <= reserved_bytes. */
        struct gr_sharded cached_bytes;    /* of blocks that no keeper counts */
        struct gr_cached *_Atomic keepers; /* the list only grows */

        /*
         * Grants (budget.h) hold while granted_bytes <= threshold_bytes == granted_for_bytes, and grants_ended is
         * false.
         */
        _Atomic uint64_t granted_bytes; /* of all keepers */
        _Atomic uint64_t granted_for_bytes;
        _Atomic bool grants_ended;

        _Atomic uint64_t kind_bytes[GR_MEMORY_KIND_COUNT]; /* memory that the pool did not serve, charged or not */
        _Atomic uint64_t idle_bytes;   /* unused memory in the driver's own pools, as last seen; <= reserved_bytes */
        _Atomic uint64_t driver_bytes; /* what the driver took for itself, as last seen; GR_UNLIMITED: not known */
        _Atomic uint64_t preallocated_bytes; /* taken by contexts to save fences, and not given back yet */
        _Atomic uint64_t stranded_bytes;     /* cached, but in extents or segments in use, so that it cannot go back */
        _Atomic uint64_t peak_reserved_bytes;
        _Atomic uint64_t peak_live_bytes;
        _Atomic uint64_t recent_peak_bytes[2]; /* of live memory: [0] since gr_budget_rotate_peak, [1] before that */

        bool integrated;                /* the device uses the host's memory; constant once blocks exist */
        _Atomic uint64_t spill_bytes;   /* most host memory that may serve allocations in place of device memory */
        _Atomic uint64_t spilled_bytes; /* how much of it is in use now */
        _Atomic uint64_t asleep_bytes;  /* charged, but in the host's memory now (shim/driver/sleep.h) */
        _Atomic uint64_t deep_bytes;    /* what else the process had there before a deep sleep; 0: it is in none */
        _Atomic uint64_t graph_bytes;   /* freed, but parked for graphs (alloc/graph_hold.h) */
        _Atomic uint64_t executables;   /* executable graphs that the program made and did not destroy */
        /* How long the last sleep and the last wake took; 0: there was none yet. */
        _Atomic uint64_t last_sleep_ns, last_wake_ns;
        /* At least what the driver took while it made executables; part of its overhead. GR_UNLIMITED: not known. */
        _Atomic uint64_t executable_bytes;
        _Atomic uint64_t spill_begun, spill_ended; /* how many frees of spilled blocks have begun, and ended */

        /* NULL: no group. Constant once set, which happens before the first charge. */
        const struct gr_group *_Atomic group;

        /*
         * How often a thread began to give memory back to the driver (gr_budget_returns_begin), how often one ended,
         * and how often memory really went back. Between begin and end memory is in no cache, but still charged.
         */
        _Atomic uint64_t returns_begun, returns_ended, returns_effective;

        /* One climb at a time: else a climber could take the memory that another one has just got back for itself. */
        struct gr_lock ladder_lock;

        struct gr_lock slabs_lock; /* guards what follows */
        struct gr_slab *slabs;     /* by page number */
        uint64_t slab_count;
        /*
         * Bytes of slabs that no block takes; also read without the lock. Below zero, modulo 2^64, for the moment
         * between the driver's new use of a freed block's memory and the count of that free: gr_budget_slab_rest.
         */
        _Atomic uint64_t slab_rest_bytes;
};

#endif
