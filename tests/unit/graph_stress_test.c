/*
 * Threads that capture, trim, free what others have allocated, and let graphs go, at random. Memory that a graph was
 * given goes to nobody else while the graph is there, unless graphs share it; and all of it comes back.
 *
 *   graph_stress_test [SEED]
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "account/budget.h"
#include "alloc/graph_hold.h"
#include "check.h"
#include "core.h"
#include "fence/fence.h"
#include "reclaim/trim.h"
#include "segment/segments_trim.h"
#include "segments_gpu.h"

enum { THREADS = 3, BLOCKS = 40, PASSED = 16, TURNS = 4000, HOLDS = 4096, PAGE = 4096 };

/* For each page of addresses the newest graph that was given it; 0: none. */
#define PAGES ((size_t)1 << 29)
static _Atomic uint16_t *owners;
static atomic_bool alive[HOLDS];
static atomic_uint holds_made, misplaced;
static bool shared;

static pthread_mutex_t passed_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t passed[PASSED]; /* blocks on their way to another thread */

struct worker {
        pthread_t thread;
        struct gr_graph_hold *hold;
        unsigned number; /* of the hold */
        uint64_t random, blocks[BLOCKS];
};

static uint64_t below(struct worker *w, uint64_t limit)
{
        return gpu_random(&w->random) % limit;
}

/* The graph of this number, or none (0), has been given the block. */
static void given(uint64_t ptr, unsigned number)
{
        struct gr_block_info info;

        if (shared || gr_ledger_find(core.ledger, ptr, &info))
                return;
        for (size_t page = (ptr - SG_BASE) / PAGE; page <= (ptr + info.capacity_bytes - 1 - SG_BASE) / PAGE; page++) {
                unsigned owner = number ? atomic_exchange(&owners[page], number) : atomic_load(&owners[page]);

                misplaced += owner != number && alive[owner];
        }
}

static void begin_graph(struct worker *w)
{
        w->number = ++holds_made;
        if (w->number >= HOLDS)
                abort();
        alive[w->number] = true;
        w->hold = gr_graph_hold_new(&core, shared ? context : NULL);
}

static void end_graph(struct worker *w)
{
        if (shared)
                gr_pool_end_capture(w->hold, below(w, 2));
        alive[w->number] = false;
        gr_graph_hold_release(w->hold);
}

static void allocate(struct worker *w, uint64_t *block)
{
        static const size_t sizes[] = {4 * KIB, 60 * KIB, 300 * KIB, 512 * KIB, MIB, 3 * MIB, 9 * MIB, 17 * MIB};
        size_t bytes = sizes[below(w, sizeof(sizes) / sizeof(sizes[0]))];

        bytes += below(w, bytes / PAGE) / 2 * PAGE;
        if (below(w, 4) == 0) {
                *block = gpu_take(bytes);
                if (*block)
                        given(*block, 0);
        } else if (gr_pool_alloc_in_hold(w->hold, context, true, bytes, block)) {
                sg_own(*block, bytes);
                given(*block, w->number);
        } else {
                *block = gpu_take(bytes);
                if (*block)
                        gr_graph_hold_add(w->hold, *block);
                if (*block)
                        given(*block, w->number);
        }
}

static void pass_on(struct worker *w, uint64_t *block)
{
        uint64_t *place = &passed[below(w, PASSED)], other;

        pthread_mutex_lock(&passed_lock);
        other = *place;
        *place = *block;
        *block = other;
        pthread_mutex_unlock(&passed_lock);
}

static void turn(struct worker *w)
{
        uint64_t *block = &w->blocks[below(w, BLOCKS)];

        switch (below(w, 128)) {
        case 0:
                end_graph(w);
                begin_graph(w);
                break;
        case 1:
                gr_pool_collect(&core);
                break;
        case 2:
                gr_segments_trim(context, below(w, 64 * MIB));
                break;
        case 3:
                gr_trim(context, below(w, 256 * MIB));
                break;
        case 4:
                gr_fence_close(context->fence);
                gr_fence_poll(context->fence);
                break;
        case 5:
                if (*block)
                        gr_ledger_set_sync(core.ledger, *block, true);
                break;
        case 6 ... 12:
                pass_on(w, block);
                break;
        default:
                if (!*block) {
                        allocate(w, block);
                } else {
                        GR_CHECK_EQ(sg_free(&core, *block), 0);
                        *block = 0;
                }
        }
}

static void *work(void *worker)
{
        struct worker *w = worker;

        begin_graph(w);
        for (unsigned i = 0; i < TURNS; i++)
                turn(w);
        for (unsigned i = 0; i < BLOCKS; i++)
                if (w->blocks[i])
                        GR_CHECK_EQ(sg_free(&core, w->blocks[i]), 0);
        end_graph(w);
        return NULL;
}

static void test(enum gr_pool_kind pool, enum gr_reuse reuse, uint64_t seed)
{
        struct worker workers[THREADS] = {{0}};

        gpu_begin(pool, reuse);
        core.config.graph_arena = shared ? GR_GRAPH_SHARED : GR_GRAPH_PRIVATE;
        holds_made = 0;
        for (unsigned i = 0; i < THREADS; i++) {
                workers[i].random = seed * THREADS + i + 1;
                pthread_create(&workers[i].thread, NULL, work, &workers[i]);
        }
        for (unsigned i = 0; i < THREADS; i++)
                pthread_join(workers[i].thread, NULL);
        for (unsigned i = 0; i < PASSED; i++) {
                if (passed[i])
                        GR_CHECK_EQ(sg_free(&core, passed[i]), 0);
                passed[i] = 0;
        }
        gr_pool_collect(&core);
        GR_CHECK_EQ(misplaced, 0);
        GR_CHECK(!core.holds);
        gpu_settle();
        GR_CHECK_EQ(gpu_device()->graph_bytes, 0);
        GR_CHECK_EQ(gr_budget_live(gpu_device()), 0);
        gpu_end();
        madvise((void *)owners, PAGES * sizeof(*owners), MADV_DONTNEED);
}

int main(int argc, char **argv)
{
        static const enum gr_pool_kind pools[] = {GR_POOL_BINS, GR_POOL_SPLIT, GR_POOL_AUTO};
        static const enum gr_reuse reuses[] = {GR_REUSE_AUTO, GR_REUSE_POLL, GR_REUSE_SYNC, GR_REUSE_BARRIER};
        uint64_t seed = argc > 1 ? strtoul(argv[1], NULL, 10) : 1;

        owners = mmap(NULL, PAGES * sizeof(*owners), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        GR_CHECK((void *)owners != MAP_FAILED);
        for (unsigned i = 0; (void *)owners != MAP_FAILED && i < 12; i++) {
                gpu_mapping = i % 2;
                shared = i / 6;
                test(pools[i % 3], reuses[(i + seed) % 4], seed * 100 + i);
        }
        return GR_CHECK_RESULT();
}
