/*
 * Shards: structures that every thread uses often are kept in GR_SHARDS parts. Each thread is given one of them at its
 * first use, in turn. With up to GR_SHARDS threads none waits for another thread, or for a cache line that another
 * thread writes.
 */
#ifndef GR_SHARD_H
#define GR_SHARD_H

#include <stdatomic.h>
#include <stdint.h>

#include "base/attributes.h"

#define GR_SHARDS 16

struct gr_arena;
struct gr_context;

/* What a hit reads of its thread, a cache line of it. All zero before its first use. */
struct gr_thread {
        unsigned shard;             /* its own + 1 */
        unsigned runtimes;          /* bits of those that have served it in context; the shim's, as the next four */
        void *handle;               /* that it found current last */
        uint64_t generation;        /* of handles, at that time; 0: none */
        struct gr_context *context; /* of handle */
        uint64_t sure;              /* the generation in which it is current still, unless the thread changes that */
        struct gr_arena *used;      /* where it last had a hit: a free looks there first. arena.c's */
        uint64_t bypass_until_ns; /* until then its frees go to the driver, or until it is served again; 0: they do not.
                                     pool.c's */
} __attribute__((aligned(GR_LINE_BYTES)));

_Static_assert(sizeof(struct gr_thread) == GR_LINE_BYTES, "a hit reads one cache line of its thread");

/* The library is there from the start, hence initial-exec. */
extern _Thread_local struct gr_thread gr_thread __attribute__((tls_model("initial-exec"))) GR_HIDDEN;

/* Threads that have had one, whose shards are the first. */
extern _Atomic unsigned gr_shard_threads GR_HIDDEN;

unsigned gr_shard_assign(void);

/* The calling thread's shard, below GR_SHARDS. */
static inline unsigned gr_shard(void)
{
        unsigned shard = gr_thread.shard;

        return __builtin_expect(shard != 0, 1) ? shard - 1 : gr_shard_assign();
}

/* A count that all threads change and few ask for. Zero bytes are a count of 0. */
struct gr_counter {
        struct {
                _Atomic uint64_t part; /* of the sum, modulo 2^64 */
        } __attribute__((aligned(GR_LINE_BYTES))) shards[GR_SHARDS];
};

static inline void gr_counter_add(struct gr_counter *counter, uint64_t n)
{
        atomic_fetch_add_explicit(&counter->shards[gr_shard()].part, n, memory_order_relaxed);
}

static inline void gr_counter_sub(struct gr_counter *counter, uint64_t n)
{
        atomic_fetch_sub_explicit(&counter->shards[gr_shard()].part, n, memory_order_relaxed);
}

/* While others change it, the sum of the parts as they were read one after the other; may then be off either way. */
static inline uint64_t gr_counter_sum(const struct gr_counter *counter)
{
        unsigned threads = atomic_load_explicit(&gr_shard_threads, memory_order_relaxed);
        uint64_t sum = 0;

        for (unsigned i = 0; i < GR_SHARDS && i < threads; i++) /* the others are zero, and a cache line each */
                sum += atomic_load_explicit(&counter->shards[i].part, memory_order_relaxed);
        return sum;
}

#endif
