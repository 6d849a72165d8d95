/*
 * Shards: structures that every thread uses often are kept in GR_SHARDS parts. Each thread is given one of them at its
 * first use, in turn. With up to GR_SHARDS threads none waits for another thread, or for a cache line that another
 * thread writes. Which shard a thread has is part of what it remembers from one call to the next, struct gr_thread.
 */
#ifndef GR_SHARD_H
#define GR_SHARD_H

#include <stdatomic.h>
#include <stdint.h>

#include "base/attributes.h"

#define GR_SHARDS 16

struct gr_arena;
struct gr_context;

/*
 * The state of one thread: one cache line, which is all that a hit reads of it. Zero bytes before the first use. shard
 * belongs to shard.c, bypass_until_ns to pool.c, hit_arena to arena.c, the others to shim/.
 */
struct gr_thread {
        unsigned shard;             /* index of its shard + 1; 0: none yet */
        unsigned runtimes;          /* bit r: runtime r has served this thread in context */
        void *handle;               /* the context that was current when last looked up */
        uint64_t looked_up_version; /* gr_contexts_version at that look-up; 0: none yet */
        struct gr_context *context; /* of handle */
        uint64_t current_version;   /* while gr_contexts_version is this, handle is current; 0: ask the driver */
        struct gr_arena *hit_arena; /* arena of its last hit, where a free looks first */
        uint64_t bypass_until_ns;   /* until then, or until served again, its frees go to the driver; 0: to the cache */
} __attribute__((aligned(GR_LINE_BYTES)));

_Static_assert(sizeof(struct gr_thread) == GR_LINE_BYTES, "a hit reads one cache line of its thread");

/* initial-exec is the cheapest access. It is allowed because a preloaded library is loaded when the program starts. */
extern _Thread_local struct gr_thread gr_thread __attribute__((tls_model("initial-exec"))) GR_HIDDEN;

/* How many threads have been given a shard. While below GR_SHARDS, the shards from this index on are unused. */
extern _Atomic unsigned gr_shard_threads GR_HIDDEN;

/* Gives the calling thread a shard, in turn, and returns it. For gr_shard, at the thread's first use. */
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
