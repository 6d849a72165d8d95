#include "system/workers.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <time.h>

#include "base/lock.h"
#include "system/platform.h"

#define CALLS_MAX   32  /* calls that wait for a thread */
#define THREADS_MAX 128 /* threads of gr_workers_start_thread */

struct call {
        void (*work)(void *arg);
        void *arg;
};

static struct gr_lock workers_lock = GR_LOCK_INIT(GR_RANK_WORKERS);
static struct {
        pthread_cond_t changed, stopped;
        struct call calls[CALLS_MAX]; /* ring; the oldest call is calls[first] */
        unsigned first, count;
        unsigned idle, threads;
        bool stop;
        void (*prepare)(void);
} workers GR_GUARDED_BY(workers_lock) = {.changed = PTHREAD_COND_INITIALIZER, .stopped = PTHREAD_COND_INITIALIZER};

static struct gr_lock threads_lock = GR_LOCK_INIT(GR_RANK_THREADS);
static struct {
        pthread_t list[THREADS_MAX];
        unsigned count;
} threads GR_GUARDED_BY(threads_lock);
static _Atomic unsigned started_running; /* how many of these threads have not ended */

void gr_worker_init(void (*prepare)(void))
{
        gr_lock(&workers_lock);
        assert(workers.threads == 0); /* workers that run already would miss it */
        workers.prepare = prepare;
        gr_unlock(&workers_lock);
}

static void *thread_main(void *arg)
{
        void (*prepare)(void);

        (void)arg;
        gr_lock(&workers_lock);
        prepare = workers.prepare;
        gr_unlock(&workers_lock);
        if (prepare)
                prepare();
        gr_lock(&workers_lock);
        for (;;) {
                struct call call;

                assert(workers.idle < workers.threads && workers.count <= CALLS_MAX); /* this thread is not idle */
                if (workers.stop || workers.count == 0) {
                        workers.idle++;
                        if (workers.stop)
                                pthread_cond_signal(&workers.stopped);
                        pthread_cond_wait(&workers.changed, &workers_lock.mutex);
                        workers.idle--;
                        continue;
                }
                call = workers.calls[workers.first];
                workers.first = (workers.first + 1) % CALLS_MAX;
                workers.count--;
                gr_unlock(&workers_lock);
                call.work(call.arg);
                gr_lock(&workers_lock);
        }
        return NULL;
}

/*
 * Blocks all signals but those of faults: a fault in a hook or in the driver must be handled by the thread that causes
 * it.
 */
static void block_signals(sigset_t *ret_before)
{
        static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
        sigset_t mask;

        sigfillset(&mask);
        for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++)
                sigdelset(&mask, faults[i]);
        pthread_sigmask(SIG_SETMASK, &mask, ret_before);
}

static bool start_thread(pthread_t *ret_thread, void *(*run)(void *arg), void *arg)
{
        sigset_t before;
        bool started;

        block_signals(&before);
        started = pthread_create(ret_thread, NULL, run, arg) == 0;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        return started;
}

/* What a thread of gr_workers_start_thread is to run. */
struct order {
        void *(*run)(void *arg);
        void *arg;
};

static void *run_order(void *arg)
{
        struct order order = *(struct order *)arg;

        free(arg);
        order.run(order.arg);
        atomic_fetch_sub(&started_running, 1);
        return NULL;
}

bool gr_workers_start_thread(void *(*run)(void *arg), void *arg)
{
        struct order *order = malloc(sizeof(*order));
        bool started;

        if (!order)
                return false;
        *order = (struct order){run, arg};
        gr_lock(&threads_lock);
        for (unsigned i = 0; i < threads.count;)
                if (pthread_tryjoin_np(threads.list[i], NULL) == 0)
                        threads.list[i] = threads.list[--threads.count];
                else
                        i++;
        assert(threads.count <= THREADS_MAX);
        atomic_fetch_add(&started_running, 1);
        started = threads.count < THREADS_MAX && start_thread(&threads.list[threads.count], run_order, order);
        threads.count += started;
        gr_unlock(&threads_lock);
        if (!started) {
                atomic_fetch_sub(&started_running, 1);
                free(order);
        }
        return started;
}

void gr_workers_join_threads(uint64_t most_ns)
{
        struct timespec until = gr_platform_time_in(CLOCK_REALTIME, most_ns);

        gr_lock(&threads_lock);
        while (threads.count > 0) /* the calling thread may be one of them: joining itself fails at once */
                pthread_timedjoin_np(threads.list[--threads.count], NULL, &until);
        gr_unlock(&threads_lock);
}

/* Lock held. */
GR_HELD(workers_lock) static bool one_more(void)
{
        pthread_t thread;

        gr_assert_locked(&workers_lock);
        if (!start_thread(&thread, thread_main, NULL))
                return false;
        pthread_detach(thread);
        workers.threads++;
        return true;
}

bool gr_worker_call(void (*work)(void *arg), void *arg)
{
        bool taken = false;

        assert(work);
        gr_lock(&workers_lock);
        /* There must be an idle thread for each waiting call, because busy threads may never return. */
        if (!workers.stop && workers.count < CALLS_MAX && (workers.idle > workers.count || one_more())) {
                workers.calls[(workers.first + workers.count++) % CALLS_MAX] = (struct call){work, arg};
                pthread_cond_signal(&workers.changed);
                taken = true;
        }
        gr_unlock(&workers_lock);
        return taken;
}

unsigned gr_workers_running(void)
{
        unsigned count;

        gr_lock(&workers_lock);
        count = workers.threads;
        gr_unlock(&workers_lock);
        return count + atomic_load(&started_running);
}

void gr_worker_stop(uint64_t most_ns)
{
        struct timespec until = gr_platform_time_in(CLOCK_REALTIME, most_ns);

        gr_lock(&workers_lock);
        workers.stop = true;
        while (workers.idle < workers.threads)
                if (pthread_cond_timedwait(&workers.stopped, &workers_lock.mutex, &until) == ETIMEDOUT)
                        break;
        gr_unlock(&workers_lock);
}
