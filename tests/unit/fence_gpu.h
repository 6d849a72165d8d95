/* What the tests of fences share: a context on the scripted GPU, and a free behind work. For one file of a test. */
#ifndef GR_TEST_FENCE_GPU_H
#define GR_TEST_FENCE_GPU_H

#include "check.h"
#include "core.h"
#include "fence/fence.h"
#include "scripted.h"

#define DRIVER_700 gr_driver_error(700)

static struct gr_core core;
static struct gr_parts parts;
static struct gr_context *context;
static struct gr_fence *fence;

static inline void start_as(const struct gr_driver *driver, enum gr_reuse reuse, bool in_order)
{
        sg_reset(64 * MIB);
        gr_core_init(&core, &parts, driver,
                     &(struct gr_config){.reuse = reuse, .pool = GR_POOL_BINS, .in_order = in_order});
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        fence = context->fence;
}

static inline void start_with(const struct gr_driver *driver)
{
        start_as(driver, GR_REUSE_AUTO, false);
}

static inline void start(void)
{
        start_with(&sg_driver);
}

static inline void finish(void)
{
        GR_CHECK_EQ(sg_misuses(), 0);
        gr_core_destroy(&core);
}

/* Work that ends in ms milliseconds, then the free of a block of 1 MiB. Returns its epoch. */
static inline uint64_t freed_after(uint64_t ms)
{
        sg_work(context->handle, 0, 0, ms * SG_MS);
        return gr_fence_note_freed(fence, MIB);
}

#endif
