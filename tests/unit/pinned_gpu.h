/*
 * What the tests of the cache of pinned host memory share: two contexts on the scripted GPU, and host memory that knows
 * until when work uses each block, and counts what is handed out or freed too early. For one file of a test.
 */
#ifndef GR_TEST_PINNED_GPU_H
#define GR_TEST_PINNED_GPU_H

#include <errno.h>
#include <pthread.h>

#include "alloc/pool.h"
#include "check.h"
#include "core.h"
#include "scripted.h"

#define BLOCKS 4096
#define KIND   1u

struct host {
        uint64_t ptr;
        size_t bytes;
        void *context;
        uint64_t busy_ns; /* until then work uses it */
};

static struct gr_core core;
static struct gr_parts parts;
static struct gr_driver driver; /* the scripted one, with host memory */
static struct gr_context *one, *two;
static void *handles[2];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static struct host hosts[BLOCKS];
static unsigned allocs, frees, trims, misuses;
static uint64_t next_ptr, room_bytes, used_bytes;
static uint64_t ends[2]; /* of each context's work */

static inline struct host *find(uint64_t ptr)
{
        for (unsigned i = 0; i < BLOCKS; i++)
                if (hosts[i].ptr == ptr)
                        return &hosts[i];
        return NULL;
}

static inline int allocate(void *arg, size_t bytes, uint64_t *ret_ptr)
{
        struct host *host;
        int rc = -ENOMEM;

        pthread_mutex_lock(&lock);
        host = find(0);
        if (host && used_bytes + bytes <= room_bytes) {
                *host = (struct host){.ptr = next_ptr, .bytes = bytes, .context = arg};
                next_ptr += (bytes + 4095) / 4096 * 4096;
                used_bytes += bytes;
                allocs++;
                *ret_ptr = host->ptr;
                rc = 0;
        }
        pthread_mutex_unlock(&lock);
        return rc;
}

/* As the driver: waits until nothing uses it. */
static inline int host_free(void *handle, uint64_t ptr)
{
        uint64_t now_ns = sg_driver.now_ns();
        struct host *host;

        pthread_mutex_lock(&lock);
        host = find(ptr);
        misuses += !host || host->context != handle;
        if (host) {
                if (host->busy_ns > now_ns)
                        sg_advance(host->busy_ns - now_ns);
                used_bytes -= host->bytes;
                host->ptr = 0;
        }
        frees++;
        pthread_mutex_unlock(&lock);
        return 0;
}

static inline void count_trim(void)
{
        trims++;
}

static inline void begin(const struct gr_driver *base, const struct gr_config *config)
{
        sg_reset(64 * MIB);
        driver = *base;
        driver.host_free = host_free;
        driver.malloc_trim = count_trim;
        for (unsigned i = 0; i < BLOCKS; i++)
                hosts[i].ptr = 0;
        ends[0] = ends[1] = 0;
        allocs = frees = trims = misuses = 0;
        next_ptr = UINT64_C(1) << 44;
        used_bytes = 0;
        room_bytes = UINT64_MAX;
        gr_core_init(&core, &parts, &driver, config);
        gr_budget_set_limit(core.host, GR_LIMIT_THRESHOLD, 256 * MIB);
        for (int i = 0; i < 2; i++)
                handles[i] = sg_context_new(i); /* of two cards, which do not see each other */
        one = gr_core_context_add(&core, handles[0], 0);
        two = gr_core_context_add(&core, handles[1], 1);
}

static inline void end(void)
{
        GR_CHECK(misuses == 0);
        GR_CHECK(sg_misuses() == 0);
        gr_core_destroy(&core);
}

static inline int try_alloc(struct gr_context *context, size_t bytes, unsigned kind, uint64_t *ret_ptr)
{
        int rc = gr_pinned_alloc(context, bytes, kind, allocate, context->handle, ret_ptr);
        struct host *host;

        if (rc)
                return rc;
        pthread_mutex_lock(&lock);
        host = find(*ret_ptr);
        misuses += !host || host->bytes < bytes || host->busy_ns > sg_driver.now_ns();
        pthread_mutex_unlock(&lock);
        return 0;
}

static inline uint64_t get(struct gr_context *context, size_t bytes, unsigned kind)
{
        uint64_t ptr = 0;

        GR_CHECK(try_alloc(context, bytes, kind, &ptr) == 0);
        return ptr;
}

/* Work of this length in context that uses ptr; one stream for each context, so that its end is known here. */
static inline void use(struct gr_context *context, uint64_t ptr, uint64_t ns)
{
        unsigned i = context == two;
        uint64_t now_ns;
        struct host *host;

        pthread_mutex_lock(&lock);
        now_ns = sg_driver.now_ns();
        if (ends[i] < now_ns)
                ends[i] = now_ns;
        ends[i] += ns;
        sg_work(context->handle, 0, 0, ns);
        host = find(ptr);
        misuses += !host;
        if (host && host->busy_ns < ends[i])
                host->busy_ns = ends[i];
        pthread_mutex_unlock(&lock);
}

static const struct gr_config plain = {.reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS};

#endif
