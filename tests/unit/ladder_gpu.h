/* What the tests of the ladder share: a small card, what fills it, and how far up the ladder a request went. */
#ifndef GR_TEST_LADDER_GPU_H
#define GR_TEST_LADDER_GPU_H

#include "alloc/ladder.h"
#include "pool_gpu.h"

#define CARD     (64 * MIB)
#define TRIES(l) atomic_load(&core.counters.rungs[GR_RUNG_##l].tries)
#define BYTES(l) atomic_load(&core.counters.rungs[GR_RUNG_##l].bytes)

extern struct gr_device *device;

/* A fresh GPU, core and context, and a silent log. */
void start_with(const struct gr_driver *driver, enum gr_reuse reuse);
void start(void);

/* Checks that what the driver gave is charged, and pool_end. */
void finish(void);

/* Checks which rungs were tried: those up to and with last, and none after it. */
void check_tried_until(enum gr_rung last);

/* count blocks of bytes each, freed behind work of ns each; each in an epoch of its own. */
void cache(unsigned count, size_t bytes, uint64_t ns);

/* What a test's reclaimable holds outside the pool, and what it saw. */
struct holder {
        uint64_t holds_bytes;
        int rc;
        unsigned calls;
        unsigned trims, releases; /* by the driver before the last call */
        uint64_t seen_ns;
        uint64_t wanted_bytes;
        int device;
};

/* The hook of such a reclaimable, whose arg is a struct holder. */
int let_go(void *arg, int of_device, uint64_t want_bytes);

/* Groups that refuse each request: others have used up the limit, are 5 MiB beyond it, or left 20 MiB of it. */
extern const struct gr_group full_group, passed_group, roomy_group;

#endif
