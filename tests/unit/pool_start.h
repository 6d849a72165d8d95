/* What the tests of the pool share beyond pool_gpu.h: a card of 1 GiB and its accounts. For one file of a test. */
#ifndef GR_TEST_POOL_START_H
#define GR_TEST_POOL_START_H

#include "alloc/pool.h"
#include "check.h"
#include "core.h"
#include "pool_gpu.h"

static struct gr_device *device;

static inline void start_with(const struct gr_driver *driver, enum gr_reuse reuse, enum gr_pool_kind pool)
{
        pool_begin(driver, 1024 * MIB, &(struct gr_config){.reuse = reuse, .pool = pool});
        device = context->device;
}

static inline void start(enum gr_reuse reuse)
{
        start_with(&sg_driver, reuse, GR_POOL_BINS);
}

/* What the core says it holds is what the card says. */
static inline void check_accounts(void)
{
        GR_CHECK_EQ(atomic_load(&device->reserved_bytes), sg_used_bytes(0));
        GR_CHECK(sg_cached_bytes(device) <= atomic_load(&device->reserved_bytes));
}

static inline void finish(void)
{
        check_accounts();
        pool_end();
}

static inline uint64_t cached(void)
{
        return sg_cached_bytes(device);
}

/* Everything freed so far becomes idle. */
static inline void settle(void)
{
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
}

#endif
