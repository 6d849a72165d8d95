/* A graph with memory of its own: how requests of its captures get parts of what it keeps, and how parts join. */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "graph_gpu.h"

/* Of the program's, as if allocated in the capture of this hold. */
static uint64_t held(struct gr_graph_hold *its, size_t bytes)
{
        uint64_t ptr = gpu_take(bytes);

        gr_graph_hold_add(its, ptr);
        return ptr;
}

static void must_free(uint64_t ptr)
{
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
}

static void begin_private(void)
{
        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        hold = gr_graph_hold_new(&core, NULL);
}

/* A graph with memory of its own: requests get parts of a parked range, and parts that are parked side by side join. */
static void test_parts(void)
{
        uint64_t p;

        begin_private();
        p = held(hold, 16 * MIB);
        must_free(p);
        GR_CHECK(!take(17 * MIB));
        GR_CHECK(!take(MIB / 2)); /* a small one would leave a large range in pieces */
        GR_CHECK_EQ(take(12 * MIB), p);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 4 * MIB);
        GR_CHECK_EQ(take(3 * MIB), p + 12 * MIB);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 1 * MIB);
        GR_CHECK(!take(2 * MIB));
        must_free(p + 12 * MIB);
        GR_CHECK(!take(16 * MIB)); /* the part before is in use */
        must_free(p);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 16 * MIB);
        for (uint64_t at = 0; at < 12 * MIB; at += 4 * MIB)
                GR_CHECK_EQ(take(4 * MIB), p + at);
        must_free(p);
        must_free(p + 8 * MIB);
        GR_CHECK_EQ(take(3 * MIB), p); /* the smallest that serves */
        must_free(p);
        must_free(p + 4 * MIB); /* between two */
        GR_CHECK_EQ(take(8 * MIB), p);
        GR_CHECK_EQ(take(8 * MIB), p + 8 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, p + 8 * MIB), 0);
        must_free(p + 8 * MIB);
        must_free(p);
        GR_CHECK(!take(9 * MIB)); /* the second is known outside */
        last_graph_goes();
        end();
}

/* Small ones also where they have joined to one above 1 MiB: else each round of a capture would take fresh memory. */
static void test_small_parts(void)
{
        uint64_t p[3];

        begin_private();
        for (int i = 0; i < 3; i++)
                p[i] = held(hold, MIB / 2);
        for (int i = 0; i < 3; i++)
                must_free(p[i]);
        for (int i = 0; i < 3; i++)
                GR_CHECK_EQ(take(MIB / 2), p[i]);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 0);
        for (int i = 0; i < 3; i++)
                must_free(p[i]);
        GR_CHECK_EQ(take(3 * MIB / 2), p[0]);
        must_free(p[0]);
        last_graph_goes();
        end();
}

/* Large ranges stay whole pages of the host, also where a small request gets almost all of one. */
static void test_whole_pages(void)
{
        uint64_t p;

        begin_private();
        p = held(hold, MIB + GR_HOST_PAGE_BYTES);
        must_free(p);
        GR_CHECK_EQ(take(MIB - 512), p);
        GR_CHECK_EQ(gpu_device()->graph_bytes, GR_HOST_PAGE_BYTES);
        must_free(p);
        last_graph_goes();
        end();
}

/* They join neither with what is live nor with what another graph has. */
static void test_neighbours(void)
{
        struct gr_graph_hold *second;
        uint64_t p, live, s;

        begin_private();
        second = gr_graph_hold_new(&core, NULL);
        must_free(gpu_take(40 * MIB)); /* what follows is cut out of this */
        settle();
        p = held(hold, 8 * MIB);
        s = held(second, 4 * MIB);
        live = gpu_take(2 * MIB);
        GR_CHECK(s == p + 8 * MIB && live == s + 4 * MIB);
        must_free(s);
        must_free(p);
        GR_CHECK(!take(9 * MIB));
        must_free(live);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 12 * MIB);
        gr_graph_hold_release(second);
        last_graph_goes();
        settle();
        GR_CHECK_EQ(gpu_take(14 * MIB), p); /* one range again */
        must_free(p);
        end();
}

/* The context ends, while one part is parked and the other is not. */
static void test_parts_of_context(void)
{
        uint64_t p;

        begin_private();
        p = held(hold, 16 * MIB);
        must_free(p);
        GR_CHECK_EQ(take(12 * MIB), p);
        gpu_sync();
        gpu_forget();
        gr_core_context_gone(context);
        GR_CHECK(!take(4 * MIB));
        GR_CHECK_EQ(gpu_device()->graph_bytes, 0);
        last_graph_goes();
        gpu_end();
}

static atomic_bool over;

static void *take_and_free(void *seed_at)
{
        uint64_t parts[4] = {0}, *seed = seed_at;

        while (!over) {
                uint64_t *part = &parts[gpu_random(seed) % 4];

                if (*part) {
                        gr_pool_free(&core, *part);
                        *part = 0;
                } else if (!gr_pool_alloc_in_hold(hold, context, true, (1 + gpu_random(seed) % 5) * MIB, part)) {
                        *part = 0;
                }
        }
        return NULL;
}

/* The context ends while threads cut and join parts of it. AddressSanitizer sees what is touched after that. */
static void test_parts_beside_end(void)
{
        for (unsigned round = 0; round < 100; round++) {
                uint64_t seeds[] = {2 * round + 1, 2 * round + 2};
                pthread_t threads[2];

                begin_private();
                for (int i = 0; i < 3; i++)
                        must_free(held(hold, 16 * MIB));
                over = false;
                for (int i = 0; i < 2; i++)
                        pthread_create(&threads[i], NULL, take_and_free, &seeds[i]);
                usleep(round % 40 * 10);
                gpu_sync();
                gpu_forget();
                gr_core_context_gone(context);
                over = true;
                for (int i = 0; i < 2; i++)
                        pthread_join(threads[i], NULL);
                last_graph_goes();
                gpu_end();
        }
}

int main(void)
{
        test_parts();
        test_small_parts();
        test_whole_pages();
        test_parts_of_context();
        gpu_mapping = true;
        test_parts();
        test_small_parts();
        test_parts_of_context();
        test_parts_beside_end();
        test_neighbours();
        return GR_CHECK_RESULT();
}
