/*
 * Shards: structures that every thread uses often are kept in GR_SHARDS parts. Each thread is given one of them at its
 * first use, in turn. With up to GR_SHARDS threads none waits for another thread, or for a cache line that another
 * thread writes. Which shard a thread has is part of its state (base/thread.h).
 */
#ifndef GR_SHARD_H
#define GR_SHARD_H

#include <stdatomic.h>
#include <stdint.h>

#include "base/attributes.h"
#include "base/thread.h"

#define GR_SHARDS 16

/* How many threads have been given a shard. While below GR_SHARDS, the shards from this index on are unused. */
extern _Atomic unsigned gr_shard_threads GR_HIDDEN;

/* Gives the calling thread the next shard in turn, and returns it. Called by gr_shard at the thread's first use. */
unsigned gr_shard_assign(void);

/* The calling thread's shard, below GR_SHARDS. */
static inline unsigned gr_shard(void)
{
        unsigned shard = gr_thread.shard;

        return __builtin_expect(shard != 0, 1) ? shard - 1 : gr_shard_assign();
}

/* A counter that is often changed, by all threads, and seldom read. Zero bytes are a count of 0. */
struct gr_sharded {
        struct {
                _Atomic uint64_t part; /* of the sum, modulo 2^64 */
        } __attribute__((aligned(GR_LINE_BYTES))) shards[GR_SHARDS];
};

static inline void gr_sharded_add(struct gr_sharded *sharded, uint64_t n)
{
        atomic_fetch_add_explicit(&sharded->shards[gr_shard()].part, n, memory_order_relaxed);
}

static inline void gr_sharded_sub(struct gr_sharded *sharded, uint64_t n)
{
        atomic_fetch_sub_explicit(&sharded->shards[gr_shard()].part, n, memory_order_relaxed);
}

/* The parts are read one after the other: while other threads change them, the sum may be too high or too low. */
static inline uint64_t gr_sharded_sum(const struct gr_sharded *sharded)
{
        unsigned threads = atomic_load_explicit(&gr_shard_threads, memory_order_relaxed);
        uint64_t sum = 0;

        /* The rest is zero: reading it would cost cache lines. */
        for (unsigned i = 0; i < GR_SHARDS && i < threads; i++)
                sum += atomic_load_explicit(&sharded->shards[i].part, memory_order_relaxed);
        return sum;
}

#endif
