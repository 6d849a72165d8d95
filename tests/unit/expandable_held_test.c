/*
 * A thread that takes, frees, or asks about memory of an expandable segment changes and answers nothing as long as
 * another thread has the segments' lock, also when it comes back from a call of the driver's.
 */
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <unistd.h>

#include "segment/expandable_grow.h"
#include "segment/range.h"
#include "segments_gpu.h"

struct deed {
        void *(*run)(void *);
        unsigned before;    /* the call of the driver's that it stops before; SG_CALLS: none */
        bool (*held)(void); /* whether it has changed nothing since */
};

/* What a thread does in a call of the driver's is followed by nothing as long as another one has their lock. */
static void check_held(const struct deed *deed, void *arg)
{
        pthread_t thread;

        sem_init(&gpu_inside, 0, 0);
        sem_init(&gpu_go_on, 0, 0);
        if (deed->before < SG_CALLS) {
                sg_before[deed->before] = gpu_stop;
                pthread_create(&thread, NULL, deed->run, arg);
                sem_wait(&gpu_inside);
        }
        gr_lock(&context->segments->lock);
        GR_CHECK(deed->held());
        if (deed->before == SG_CALLS)
                pthread_create(&thread, NULL, deed->run, arg);
        sem_post(&gpu_go_on);
        for (int n = 0; n < 20 && deed->held(); n++)
                usleep(500);
        GR_CHECK(deed->held());
        gr_unlock(&context->segments->lock);
        pthread_join(thread, NULL);
        GR_CHECK(!deed->held());
        sem_destroy(&gpu_inside);
        sem_destroy(&gpu_go_on);
}

static struct gr_block *grown;
static int grow_rc;

static void *grow(void *arg)
{
        grow_rc = gr_expandable_grow(context, GR_EXPANDABLE_LARGE, 4 * MIB, &grown);
        return arg;
}

static bool none_open(void)
{
        return !context->segments->expandable[false];
}

static bool is_busy(void)
{
        return context->segments->busy == 1 && context->segments->refused_ns == 0;
}

/* An expandable segment is opened, a request maps what it lacks, or is refused it. */
static void test_grow_held(const struct deed *deed, bool fails)
{
        uint64_t first = 0;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        if (deed->held != none_open)
                first = gpu_take(2 * MIB);
        sg_fail(SG_MEM_MAP, fails, 1, -ENOMEM);
        grown = NULL;
        check_held(deed, NULL);
        GR_CHECK_EQ(grow_rc, fails ? -ENOMEM : 0);
        GR_CHECK_EQ(context->segments->refused_ns > 0, fails);
        if (grown && gr_ledger_hand_out(grown, 4 * MIB))
                GR_CHECK_EQ(gr_pool_free(&core, grown->ptr), 0);
        if (first)
                gpu_give(first, 2 * MIB);
        gpu_settle();
        gpu_end();
}

static void *give_shared(void *arg)
{
        gpu_give(*(uint64_t *)arg, 8 * MIB);
        return NULL;
}

static bool is_at_work(void)
{
        return context->segments->expandable[false]->first->state == GR_RANGE_BUSY;
}

static void *take_moved(void *arg)
{
        *(uint64_t *)arg = gpu_take(120 * MIB);
        return NULL;
}

static bool none_stale(void)
{
        return !context->segments->stale_pages;
}

static void *drop(void *arg)
{
        gr_segments_context_gone(context);
        return arg;
}

static bool is_whole(void)
{
        return context->segments->segment_count == 1 && context->segments->by_address[0]->first->state == GR_RANGE_USED;
}

static _Atomic bool asked;

static void *would_help(void *arg)
{
        asked = !gr_segments_would_help(context, 3 * MIB);
        return arg;
}

static void *is_empty(void *arg)
{
        asked = gr_segments_trim_has_none(context);
        return arg;
}

static void *unneeded(void *arg)
{
        asked = gr_segments_trim_unneeded(context) == 0;
        return arg;
}

static void *look_up(void *arg)
{
        struct gr_segments_place place;

        asked = gr_segments_find(&core, *(uint64_t *)arg, &place) == 0;
        return NULL;
}

static void *put(void *arg)
{
        gpu_give(*(uint64_t *)arg, 3 * MIB);
        asked = true;
        return NULL;
}

static bool is_unasked(void)
{
        return !asked;
}

static void *take_segment(void *arg)
{
        *(uint64_t *)arg = gpu_take(4 * MIB);
        return NULL;
}

static bool no_segment(void)
{
        return context->segments->segment_count == 0;
}

static void test_held(void)
{
        uint64_t a, b, c;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(3 * MIB); /* of two pages */
        for (int i = 0; i < 5; i++) {
                void *(*const deeds[])(void *) = {would_help, is_empty, unneeded, look_up, put};

                asked = false;
                check_held(&(struct deed){deeds[i], SG_CALLS, is_unasked}, &a);
        }
        gpu_settle();
        gpu_end();

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        gpu_refuse(SG_MEM_RESERVE, true);
        check_held(&(struct deed){take_segment, SG_MEM_ALLOC, no_segment}, &a);
        gpu_give(a, 4 * MIB);
        gpu_settle();
        gpu_end();

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        gpu_take(3 * MIB);
        gpu_forget();
        check_held(&(struct deed){drop, SG_CALLS, is_whole}, NULL);
        gpu_end();

        test_grow_held(&(struct deed){grow, SG_MEM_RESERVE, none_open}, false);
        test_grow_held(&(struct deed){grow, SG_MEM_MAP, is_busy}, false);
        test_grow_held(&(struct deed){grow, SG_MEM_MAP, is_busy}, true);

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        a = gpu_take(8 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        check_held(&(struct deed){give_shared, SG_MEM_UNMAP, is_at_work}, &a);
        gpu_settle();
        gpu_end();

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        context->segments->slack.credit_at_ns = sg_now_ns(); /* no time for waits */
        context->segments->slack.credit_ns = -1;
        a = gpu_take(100 * MIB);
        b = gpu_take(2 * MIB);
        gpu_give(a, 100 * MIB);
        check_held(&(struct deed){take_moved, SG_MEM_MAP, none_stale}, &c);
        gpu_give(b, 2 * MIB);
        gpu_give(c, 120 * MIB);
        gpu_settle();
        gpu_end();
}

int main(void)
{
        gpu_mapping = true;
        test_held();
        return GR_CHECK_RESULT();
}
