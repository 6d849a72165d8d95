/* How cached pinned memory goes back: after which time, which first, and by one thread at a time. */
#include <pthread.h>
#include <unistd.h>

#include "pinned_gpu.h"

static void test_decay(void)
{
        static const struct gr_config config = {
                .reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS, .decay_ns = 10000 * SG_MS, .malloc_trim = true};
        uint64_t a, b, busy, next_ns;

        begin(&sg_driver, &config);
        a = get(one, MIB, KIND);
        b = get(one, 4 * MIB, KIND);
        busy = get(two, MIB, KIND);
        GR_CHECK(gr_decay_run(&core, sg_driver.now_ns()) == 0 && trims == 0);
        GR_CHECK(gr_pinned_free(&core, a) == 0);
        sg_advance(6000 * SG_MS);
        GR_CHECK(gr_pinned_free(&core, b) == 0);
        next_ns = gr_decay_run(&core, sg_driver.now_ns());
        GR_CHECK(next_ns == SG_FIRST_NS + 10000 * SG_MS && frees == 0);
        sg_advance(next_ns - sg_driver.now_ns());
        /* Not while the GPU has work, though this block is not part of it: its free would hold up the program. */
        use(two, busy, 3000 * SG_MS);
        next_ns = gr_decay_run(&core, sg_driver.now_ns());
        GR_CHECK(frees == 0 && next_ns > sg_driver.now_ns());
        sg_advance(3001 * SG_MS);
        next_ns = gr_decay_run(&core, sg_driver.now_ns());
        GR_CHECK(frees == 1 && gr_budget_cached(core.host) == 4 * MIB && next_ns > sg_driver.now_ns());
        GR_CHECK(trims == 0);
        sg_advance(next_ns - sg_driver.now_ns() + 3000 * SG_MS);
        GR_CHECK(gr_decay_run(&core, sg_driver.now_ns()) == 0);
        GR_CHECK(frees == 2 && gr_budget_cached(core.host) == 0 && trims == 1);
        /* The program stays idle: nothing more to trim. */
        GR_CHECK(gr_decay_run(&core, sg_driver.now_ns()) == 0 && trims == 1);
        end();
}

/* They go when they are due, and not a moment later; and then no time is spent on any. */
static void test_decay_due(void)
{
        static const struct gr_config config = {
                .reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS, .decay_ns = 10000 * SG_MS};
        uint64_t next_ns, a, b;

        begin(&sg_driver, &config);
        a = get(one, MIB, KIND);
        b = get(one, MIB, KIND);
        GR_CHECK(sg_counter(&core, GR_COUNTER_pinned_allocs) == 2);
        GR_CHECK(gr_pinned_free(&core, a) == 0 && gr_pinned_free(&core, b) == 0);
        next_ns = gr_decay_run(&core, sg_driver.now_ns());
        sg_advance(next_ns - sg_driver.now_ns());
        GR_CHECK(gr_decay_run(&core, next_ns) == 0 && frees == 2);
        GR_CHECK(sg_driver.now_ns() < next_ns + 20 * SG_MS);
        GR_CHECK(sg_counter(&core, GR_COUNTER_pinned_returned_bytes) == 2 * MIB);
        end();
}

/* What was freed first goes first, whatever its size. */
static void test_oldest_first(void)
{
        for (int i = 0; i < 2; i++) {
                uint64_t blocks[3];

                begin(&sg_driver, &plain);
                for (int k = 0; k < 3; k++)
                        blocks[k] = get(one, (i ? 9 - 3 * k : 3 + 3 * k) * MIB, KIND);
                for (int k = 0; k < 3; k++) {
                        GR_CHECK(gr_pinned_free(&core, blocks[k]) == 0);
                        sg_advance(1);
                }
                for (unsigned k = 0; k < 3; k++) {
                        GR_CHECK(gr_pinned_reclaim(&core, 1) > 0);
                        GR_CHECK(!find(blocks[k]) && frees == k + 1);
                }
                end();
        }
}

/* What looks at cached blocks, each in a thread that has to wait for them. */
enum look { LOOK_ALLOC, LOOK_DECAY, LOOK_RECLAIM, LOOK_DROP, LOOKS, LOOK_DECAY_DUE, LOOK_ENDING };

static _Atomic bool looked;

static void *look(void *arg)
{
        switch (*(enum look *)arg) {
        case LOOK_ALLOC:
                GR_CHECK(get(one, MIB, KIND) && allocs == 1);
                break;
        case LOOK_DECAY:
                GR_CHECK(gr_pinned_decay(&core, sg_driver.now_ns(), gr_decay_step_ns(&core)) > 0);
                break;
        case LOOK_RECLAIM:
                GR_CHECK(gr_pinned_reclaim(&core, 1) == MIB);
                break;
        case LOOK_DROP:
        case LOOKS:
                gr_pinned_context_gone(one);
                break;
        case LOOK_DECAY_DUE:
                GR_CHECK(gr_pinned_decay(&core, SG_FIRST_NS + 10000 * SG_MS, gr_decay_step_ns(&core)) == 0);
                break;
        case LOOK_ENDING:
                gr_pinned_ending(one);
                break;
        }
        looked = true;
        return NULL;
}

/* With the lock held nothing of it happens. */
static void check_locked(enum look what, struct gr_lock *held)
{
        pthread_t thread;

        looked = false;
        gr_lock(held);
        pthread_create(&thread, NULL, look, &what);
        for (int n = 0; n < 20 && !looked; n++)
                usleep(500);
        GR_CHECK(!looked);
        GR_CHECK(gr_budget_cached(core.host) == MIB && frees == 0);
        gr_unlock(held);
        pthread_join(thread, NULL);
        GR_CHECK(gr_budget_cached(core.host) == (what == LOOK_DECAY ? MIB : 0));
}

/* Who looks at cached blocks finds none that another thread takes out meanwhile. */
static void test_looks_locked(void)
{
        static const struct gr_config config = {
                .reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS, .decay_ns = 10000 * SG_MS};

        for (enum look what = 0; what < LOOKS; what++) {
                begin(&sg_driver, &config);
                GR_CHECK(gr_pinned_free(&core, get(one, MIB, KIND)) == 0);
                if (what == LOOK_DROP)
                        gr_ledger_context_gone(core.ledger, one, NULL); /* as whoever drops it does before */
                check_locked(what, &core.pinned->lock);
                end();
        }
}

/* What goes back does so while nobody else waits for just that. */
static void test_unpin_alone(void)
{
        static const enum look looks[] = {LOOK_RECLAIM, LOOK_DECAY_DUE, LOOK_ENDING};
        static const struct gr_config config = {
                .reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS, .decay_ns = 10000 * SG_MS};

        for (int i = 0; i < 3; i++) {
                begin(&sg_driver, &config);
                GR_CHECK(gr_pinned_free(&core, get(one, MIB, KIND)) == 0);
                check_locked(looks[i], &core.pinned->unpin_lock);
                GR_CHECK(frees == 1);
                end();
        }
}

static unsigned wakes;

static void wake(struct gr_core *woken)
{
        wakes += woken == &core;
}

/* What is freed into the cache is to decay: somebody is told, unless he comes anyway. */
static void test_wakes(void)
{
        static const struct gr_config config = {.reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS, .decay_ns = 100 * SG_MS};
        uint64_t a, b;

        begin(&sg_driver, &config);
        core.wake = wake;
        wakes = 0;
        a = get(one, MIB, KIND);
        b = get(one, MIB, KIND);
        GR_CHECK_EQ(wakes, 0);
        GR_CHECK(gr_pinned_free(&core, a) == 0);
        GR_CHECK_EQ(wakes, 1);
        GR_CHECK(gr_decay_run(&core, sg_driver.now_ns()) > 0);
        GR_CHECK(gr_pinned_free(&core, b) == 0);
        GR_CHECK_EQ(wakes, 1);
        end();

        begin(&sg_driver, &plain); /* without decay nobody need come */
        core.wake = wake;
        GR_CHECK(gr_pinned_free(&core, get(one, MIB, KIND)) == 0);
        GR_CHECK_EQ(wakes, 1);
        end();
}

int main(void)
{
        test_decay();
        test_looks_locked();
        test_unpin_alone();
        test_decay_due();
        test_oldest_first();
        test_wakes();
        return GR_CHECK_RESULT();
}
