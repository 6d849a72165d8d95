/*
 * The work graph. Every operation is a node; a stream, event or barrier only keeps the node that was added to it last.
 * A node becomes ready when all its predecessors are done, and any worker may run it. There are as many workers as
 * nodes can run at the same time.
 */
#include "sim.h"

#include <signal.h>
#include <stdlib.h>
#include <time.h>

#define MAX_WORKERS 256

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ready_cond = PTHREAD_COND_INITIALIZER, done_cond = PTHREAD_COND_INITIALIZER;
/* Guarded by lock. */
static struct sim_node *ready_head, **ready_tail = &ready_head;
static unsigned n_ready, n_workers, n_idle, n_waiting;

void sim_lock(void)
{
        pthread_mutex_lock(&lock);
}

/* Destructors of user objects run here, as they may wait for a thread that is about to call the driver. */
void sim_unlock(void)
{
        CUuserObject doomed = sim_objects_doomed();

        pthread_mutex_unlock(&lock);
        if (doomed)
                sim_objects_end(doomed);
}

uint64_t sim_now_ns(void)
{
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

struct sim_node *sim_node_new(const struct sim_op *op)
{
        struct sim_node *node = calloc(1, sizeof *node);

        /* A simulated device without host memory cannot report that in a way that a real one would. */
        if (!node)
                abort();
        node->refs = 1;
        node->pending = 1;
        if (op)
                node->op = *op;
        return node;
}

struct sim_node *sim_node_get(struct sim_node *node)
{
        if (node)
                node->refs++;
        return node;
}

void sim_node_put(struct sim_node *node)
{
        if (!node || --node->refs)
                return;
        sim_op_drop(&node->op);
        free(node->dependents);
        free(node);
}

void sim_node_replace(struct sim_node **slot, struct sim_node *node)
{
        sim_node_put(*slot);
        *slot = node;
}

void sim_node_after(struct sim_node *node, struct sim_node *predecessor)
{
        if (!predecessor || predecessor->done)
                return;
        if (predecessor->n_dependents == predecessor->room) {
                size_t room = predecessor->room ? 2 * predecessor->room : 4;
                struct sim_node **more = realloc(predecessor->dependents, room * sizeof *more);

                if (!more)
                        abort();
                predecessor->dependents = more;
                predecessor->room = room;
        }
        predecessor->dependents[predecessor->n_dependents++] = sim_node_get(node);
        node->pending++;
}

static void *run_nodes(void *unused);

static void start_worker(void)
{
        static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
        sigset_t all, old;
        pthread_t thread;

        /* Workers block all signals, so that the program's threads get them. */
        sigfillset(&all);
        for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++)
                sigdelset(&all, faults[i]);
        pthread_sigmask(SIG_SETMASK, &all, &old);
        if (pthread_create(&thread, NULL, run_nodes, NULL) == 0) {
                pthread_detach(thread);
                n_workers++;
        }
        pthread_sigmask(SIG_SETMASK, &old, NULL);
}

static void make_ready(struct sim_node *node)
{
        node->next = NULL;
        *ready_tail = sim_node_get(node);
        ready_tail = &node->next;
        n_ready++;
        if (n_ready > n_idle && n_workers < MAX_WORKERS)
                start_worker();
        pthread_cond_signal(&ready_cond);
}

/*
 * Marks first done, and every join that becomes ready by that; other ready nodes go to the workers. Takes over one
 * reference. A loop, not a recursion, as chains of joins get long.
 */
static void finish_nodes(struct sim_node *first)
{
        struct sim_node *todo = first;

        first->next = NULL;
        while (todo) {
                struct sim_node *node = todo;

                todo = node->next;
                node->done = true;
                node->done_ns = sim_now_ns();
                for (size_t i = 0; i < node->n_dependents; i++) {
                        struct sim_node *next = node->dependents[i];

                        if (--next->pending) {
                                sim_node_put(next);
                        } else if (next->op.kind == SIM_OP_JOIN) {
                                next->next = todo;
                                todo = next;
                        } else {
                                make_ready(next);
                                sim_node_put(next);
                        }
                }
                node->n_dependents = 0;
                sim_node_put(node);
        }
        if (n_waiting)
                pthread_cond_broadcast(&done_cond);
}

void sim_node_start(struct sim_node *node)
{
        if (--node->pending)
                return;
        if (node->op.kind == SIM_OP_JOIN)
                finish_nodes(sim_node_get(node));
        else
                make_ready(node);
}

static void *run_nodes(void *unused)
{
        (void)unused;
        sim_lock();
        for (;;) {
                struct sim_node *node;

                while (!ready_head) {
                        n_idle++;
                        pthread_cond_wait(&ready_cond, &lock);
                        n_idle--;
                }
                node = ready_head;
                ready_head = node->next;
                if (!ready_head)
                        ready_tail = &ready_head;
                n_ready--;
                sim_unlock();
                sim_op_run(&node->op);
                sim_lock();
                finish_nodes(node);
        }
        return NULL;
}

void sim_node_wait(struct sim_node *node)
{
        sim_node_get(node);
        n_waiting++;
        while (!node->done)
                pthread_cond_wait(&done_cond, &lock);
        n_waiting--;
        sim_node_put(node);
}
