#include "apart.h"

#include <pthread.h>
#include <signal.h>
#include <stddef.h>

#define CALLS_MAX 32 /* that wait for a thread */

struct call {
        void (*work)(void *arg);
        void *arg;
};

static struct {
        pthread_mutex_t lock; /* guards what follows */
        pthread_cond_t changed;
        struct call calls[CALLS_MAX]; /* ring, oldest at first */
        unsigned first, count;
        unsigned idle;
        bool stop;
        void (*prepare)(void);
} apart = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

void gr_apart_init(void (*prepare)(void))
{
        pthread_mutex_lock(&apart.lock);
        apart.prepare = prepare;
        pthread_mutex_unlock(&apart.lock);
}

static void *thread_main(void *arg)
{
        void (*prepare)(void);

        (void)arg;
        pthread_mutex_lock(&apart.lock);
        prepare = apart.prepare;
        pthread_mutex_unlock(&apart.lock);
        if (prepare)
                prepare();
        pthread_mutex_lock(&apart.lock);
        for (;;) {
                struct call call;

                if (apart.stop)
                        break;
                if (apart.count == 0) {
                        if (apart.idle > 0) /* one waits already */
                                break;
                        apart.idle++;
                        pthread_cond_wait(&apart.changed, &apart.lock);
                        apart.idle--;
                        continue;
                }
                call = apart.calls[apart.first];
                apart.first = (apart.first + 1) % CALLS_MAX;
                apart.count--;
                pthread_mutex_unlock(&apart.lock);
                call.work(call.arg);
                pthread_mutex_lock(&apart.lock);
        }
        pthread_mutex_unlock(&apart.lock);
        return NULL;
}

bool gr_thread_start(void *(*run)(void *arg), void *arg)
{
        sigset_t all, before;
        pthread_attr_t attributes;
        pthread_t thread;
        bool started;

        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        started = pthread_create(&thread, &attributes, run, arg) == 0;
        pthread_attr_destroy(&attributes);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        return started;
}

bool gr_apart_call(void (*work)(void *arg), void *arg)
{
        bool taken = false;

        pthread_mutex_lock(&apart.lock);
        /* A thread for every call that waits: the busy ones may never come back. */
        if (!apart.stop && apart.count < CALLS_MAX &&
            (apart.idle > apart.count || gr_thread_start(thread_main, NULL))) {
                apart.calls[(apart.first + apart.count++) % CALLS_MAX] = (struct call){work, arg};
                pthread_cond_signal(&apart.changed);
                taken = true;
        }
        pthread_mutex_unlock(&apart.lock);
        return taken;
}

void gr_apart_stop(void)
{
        pthread_mutex_lock(&apart.lock);
        apart.stop = true;
        pthread_cond_broadcast(&apart.changed);
        pthread_mutex_unlock(&apart.lock);
}
