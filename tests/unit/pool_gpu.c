#include "pool_gpu.h"

struct gr_core core;
static struct gr_parts parts;
struct gr_context *context;
struct pool_event event;

void pool_begin(const struct gr_driver *driver, uint64_t card_bytes, const struct gr_config *config)
{
        sg_reset(card_bytes);
        event.what = NULL;
        gr_core_init(&core, &parts, driver, config);
        context = gr_core_context_add(&core, sg_context_new(0), 0);
}

void pool_end(void)
{
        GR_CHECK_EQ(sg_misuses(), 0);
        gr_core_destroy(&core);
}

uint64_t alloc(size_t bytes)
{
        uint64_t ptr = 0;

        GR_CHECK_EQ(sg_alloc(context, bytes, &ptr), 0);
        return ptr;
}

void free_ok(uint64_t ptr)
{
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
}

void sleep_and_see(uint64_t ns)
{
        sg_driver.sleep_ns(ns);
        if (event.what && sg_driver.now_ns() >= event.when_ns) {
                void (*what)(void) = event.what;

                event.what = NULL;
                what();
        }
}
