/* What a thread remembers from one call to the next: one cache line, which is all that a hit reads of it. */
#ifndef GR_THREAD_H
#define GR_THREAD_H

#include <stdint.h>

#include "base/attributes.h"

struct gr_arena;
struct gr_context;

/*
 * Zero bytes before the first use. shard belongs to shard.c, bypass_until_ns to pool.c and ladder.c, hit_arena to
 * arena.c, the others to shim/.
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

#endif
