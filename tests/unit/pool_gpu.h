/*
 * What the tests of the pool and of the ladder share: a core with one context on the scripted GPU, whose clock the test
 * moves.
 */
#ifndef GR_TEST_POOL_GPU_H
#define GR_TEST_POOL_GPU_H

#include "scripted.h"

extern struct gr_core core;
extern struct gr_context *context;

/* A fresh GPU, core and context. The end checks that memory was not misused since. */
void pool_begin(const struct gr_driver *driver, uint64_t card_bytes, const struct gr_config *config);
void pool_end(void);

/* Allocates in the context, or frees, and checks that it succeeds. */
uint64_t alloc(size_t bytes);
void free_ok(uint64_t ptr);

/* For the sleep_ns of a driver: what happens while somebody sleeps; run once, at when_ns. */
struct pool_event {
        uint64_t when_ns;
        void (*what)(void);
};
extern struct pool_event event;
void sleep_and_see(uint64_t ns);

#endif
