/*
 * Each thread has some graphs and executables and some other blocks, and does random things with them. A graph is a
 * chain of steps: allocate, fill with the step's own value, copy a word of that to the graph's results, free. What it
 * becomes, clones, executables or nodes of other graphs, uses the same memory, and has the same results. So a thread
 * launches all of them on one stream. Where graphs share memory all threads launch on the same one, and what a launch
 * leaves in memory of its graph is looked at before the next one.
 */
#include "graphs_random.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum { THINGS = 12, STEPS = 24, KEPT = 4, OPEN = 4, BLOCKS = 8, STREAMS = 4, REMEMBERED = 512 };
enum { MOST_THREADS = 16, LATE_US = 20 };
enum count { CAPTURES, UPDATES, LAUNCHES, OTHERS, REFUSED, WITHIN, AFTER, WRONG, COUNTS };

/* Memory of which some words at one place are written and checked. */
struct block {
        CUdeviceptr p, at, result; /* result: in a capture, where a word of it is copied to */
        uint64_t words;
        uint32_t value;
        CUstream stream; /* of the fill */
};

/* What was captured. */
struct part {
        unsigned users, steps;
        uint64_t plan;       /* the same plan gives a graph of the same shape */
        uint32_t tag;        /* step I has the value tag + I */
        bool launched;       /* so there are results */
        CUdeviceptr results; /* a word for each step */
        CUdeviceptr seen[STEPS];
        struct block kept[KEPT]; /* not freed in the capture; p is 0 where freed by now */
};

/* A graph or an executable; part is NULL where there is neither. */
struct thing {
        CUgraph graph;
        CUgraphExec exec;
        struct part *part;
};

struct worker {
        CUstream own, side; /* for captures: own is where they begin, side is what some fork to */
        CUstream launches;  /* for graphs */
        CUevent event;
        CUdeviceptr mismatches;
        uint64_t random, counts[COUNTS];
        struct thing things[THINGS];
        struct block blocks[BLOCKS];
        CUdeviceptr remembered[REMEMBERED]; /* memory of graphs */
        bool capturing;
        pthread_t thread;
};

static const struct gt *gt;
static bool relaxed, in_turn;
static pthread_mutex_t launching = PTHREAD_MUTEX_INITIALIZER;
static double until_us;
static size_t total;
static CUstream streams[STREAMS];
static atomic_uint next_tag = 1;
/* A turn's. Held exclusively by one with a global capture, which calls of other threads would break. */
static pthread_rwlock_t turns = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;

static uint64_t below(uint64_t *random, uint64_t limit)
{
        return gt_random(random) % limit;
}

/* Whether there was memory for a call, which may fail for no other reason. */
#define served(w, call) served_or_not(w, call, #call)
static bool served_or_not(struct worker *w, CUresult result, const char *call)
{
        if (result != CUDA_ERROR_OUT_OF_MEMORY && result != CUDA_SUCCESS)
                gt_die("%s returned %d", call, (int)result);
        w->counts[REFUSED] += result != CUDA_SUCCESS;
        return result == CUDA_SUCCESS;
}

/* One of a few sizes, so that what is freed serves others. */
static bool allocate(struct worker *w, struct block *ret, uint32_t value, CUstream stream)
{
        static const size_t sizes[] = {4 * KIB, 4 * KIB, 60 * KIB, 300 * KIB, MIB, 3 * MIB, 9 * MIB, 40 * MIB};
        size_t bytes = sizes[below(&w->random, sizeof sizes / sizeof sizes[0])], touched;
        CUdeviceptr p;

        bytes -= below(&w->random, bytes / 16) / 4 * 4;
        touched = bytes < 64 * KIB ? bytes : 64 * KIB;
        if (!served(w, cuMemAlloc(&p, bytes)))
                return false;
        *ret = (struct block){p, p + below(&w->random, (bytes - touched) / 4 + 1) * 4, 0, touched / 4, value, stream};
        return true;
}

/* Counts on the device what is not right, without waiting. */
static void look_at(struct worker *w, const struct block *b, CUstream stream)
{
        if (b->p)
                GR_MUST(gt_count_diff(gt, stream, b->at, b->value, b->words, w->mismatches));
}

static void look_at_kept(struct worker *w, const struct part *part, bool wanted)
{
        for (int i = 0; wanted && i < KEPT; i++)
                look_at(w, &part->kept[i], w->launches);
}

static void free_block(struct block *b)
{
        if (b->p)
                GR_MUST(cuMemFree(b->p));
        b->p = 0;
}

/* Something with other memory. In a capture it only frees, as what is allocated there is for the graph. */
static void other_turns(struct worker *w, uint64_t most)
{
        for (uint64_t i = below(&w->random, most + 1); i > 0; i--) {
                struct block *b = &w->blocks[below(&w->random, BLOCKS)];
                struct part *part = w->things[below(&w->random, THINGS)].part;

                if (part && below(&w->random, 16) == 0)
                        free_block(&part->kept[below(&w->random, KEPT)]);
                if (b->p) {
                        look_at(w, b, b->stream);
                        free_block(b);
                } else if (!w->capturing &&
                           allocate(w, b, atomic_fetch_add(&next_tag, 1), streams[below(&w->random, STREAMS)])) {
                        GR_MUST(gt_late_fill(gt, b->stream, b->at, b->value, b->words, below(&w->random, LATE_US)));
                        w->counts[OTHERS]++;
                        for (int k = 0; k < REMEMBERED; k++)
                                w->counts[AFTER] += w->remembered[k] == b->p;
                }
        }
}

/* Waits for the launches, and compares what they have left with what they should. */
static void check(struct worker *w, struct part *part)
{
        uint32_t words[STEPS];

        if (!part->launched)
                return;
        look_at_kept(w, part, !in_turn);
        GR_MUST(cuMemcpyDtoHAsync(words, part->results, sizeof words, w->launches));
        GR_MUST(cuStreamSynchronize(w->launches));
        for (unsigned i = 0; i < part->steps; i++)
                if (words[i] != part->tag + i && w->counts[WRONG]++ == 0)
                        printf("step %u of %u: %u instead of %u\n", i, part->steps, words[i], part->tag + i);
}

static void leave(struct worker *w, struct part *part)
{
        other_turns(w, 6); /* its launches may still be running */
        if (--part->users > 0)
                return;
        check(w, part);
        for (int i = 0; i < KEPT; i++)
                free_block(&part->kept[i]);
        GR_MUST(cuMemFree(part->results));
        free(part);
}

static void destroy(struct worker *w, struct thing *thing)
{
        if (thing->graph)
                GR_MUST(cuGraphDestroy(thing->graph));
        if (thing->exec)
                GR_MUST(cuGraphExecDestroy(thing->exec));
        leave(w, thing->part);
        *thing = (struct thing){.part = NULL};
}

static void follow(struct worker *w, CUstream follower, CUstream stream)
{
        GR_MUST(cuEventRecord(w->event, stream));
        GR_MUST(cuStreamWaitEvent(follower, w->event, 0));
}

/* The rest of a step. What the side stream did before it joined comes before later work of the own one. */
static void end_step(struct worker *w, struct part *part, struct block *b, bool forked, bool keep)
{
        if (!b->p)
                return;
        GR_MUST(gt_copy(gt, forked ? b->stream : w->own, b->result, b->at, 1));
        for (int i = 0; keep && b->p && i < KEPT; i++)
                if (!part->kept[i].p) {
                        part->kept[i] = *b;
                        b->p = 0;
                }
        free_block(b);
}

/* Up to OPEN steps are going on at a time. */
static void capture_steps(struct worker *w, struct part *part)
{
        struct block open[OPEN] = {{.p = 0}};
        uint64_t plan = part->plan, steps = 1 + below(&plan, STEPS);
        bool forked = false;

        for (unsigned i = 0; i < steps; i++) {
                struct block *b = &open[below(&plan, OPEN)];
                bool turn = below(&plan, 16) == 0, keep = below(&plan, 8) == 0;
                bool aside = below(&plan, 2) == 0, again = false;

                if (turn) {
                        follow(w, forked ? w->own : w->side, forked ? w->side : w->own);
                        forked = !forked;
                }
                end_step(w, part, b, forked, keep);
                if (!allocate(w, b, part->tag + i, forked && aside ? w->side : w->own))
                        break;
                for (unsigned k = 0; k < i; k++)
                        again |= part->seen[k] == b->p;
                w->counts[WITHIN] += again;
                w->remembered[below(&w->random, REMEMBERED)] = part->seen[i] = b->p;
                part->steps++;
                b->result = part->results + i * 4;
                GR_MUST(gt_late_fill(gt, b->stream, b->at, b->value, b->words, below(&w->random, LATE_US)));
                if (below(&w->random, 8) == 0)
                        other_turns(w, 3);
        }
        for (int i = 0; i < OPEN; i++)
                end_step(w, part, &open[i], forked, i == 0);
        if (forked)
                follow(w, w->own, w->side);
}

static void capture(struct worker *w, struct thing *thing, uint64_t plan, CUstreamCaptureMode mode)
{
        struct part *part = calloc(1, sizeof *part);

        if (!part)
                gt_die("no host memory");
        *part = (struct part){.users = 1, .plan = plan, .tag = atomic_fetch_add(&next_tag, STEPS)};
        if (!served(w, cuMemAlloc(&part->results, STEPS * 4))) {
                free(part);
                return;
        }
        GR_MUST(cuStreamBeginCapture(w->own, relaxed ? CU_STREAM_CAPTURE_MODE_RELAXED : mode));
        w->capturing = true;
        capture_steps(w, part);
        w->capturing = false;
        GR_MUST(cuStreamEndCapture(w->own, &thing->graph));
        thing->part = part;
        w->counts[CAPTURES]++;
}

static void launch(struct worker *w, const struct thing *thing)
{
        pthread_mutex_lock(&launching);
        GR_MUST(cuMemsetD32Async(thing->part->results, 0, STEPS, w->launches));
        thing->part->launched = served(w, cuGraphLaunch(thing->exec, w->launches));
        look_at_kept(w, thing->part, in_turn && thing->part->launched);
        pthread_mutex_unlock(&launching);
        w->counts[LAUNCHES] += thing->part->launched;
}

/* The executable does from now on what a newer capture of the same plan says, unless that got less memory. */
static void update(struct worker *w, struct thing *exec)
{
        struct part *before = exec->part;
        struct thing newer = {.part = NULL};
        CUgraphExecUpdateResultInfo info;
        CUresult result;

        capture(w, &newer, before->plan, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        if (!newer.part)
                return;
        result = cuGraphExecUpdate(exec->exec, newer.graph, &info);
        if (result == CUDA_SUCCESS) {
                exec->part = newer.part;
                newer.part->users++;
                leave(w, before);
                w->counts[UPDATES]++;
        } else if (result != CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE) {
                GR_MUST(result);
        }
        destroy(w, &newer);
}

/* Makes something of the graph, or destroys it. */
static void use_graph(struct worker *w, struct thing *thing)
{
        struct thing *to = &w->things[below(&w->random, THINGS)], made = {.part = thing->part};
        uint64_t what = below(&w->random, 8);
        CUgraphNode first, second;

        if (to->part) {
                if (what == 0)
                        destroy(w, thing);
                return;
        }
        if (what == 1) {
                GR_MUST(cuGraphClone(&made.graph, thing->graph));
        } else if (what == 2) {
                GR_MUST(cuGraphCreate(&made.graph, 0));
                GR_MUST(cuGraphAddChildGraphNode(&first, made.graph, NULL, 0, thing->graph));
                GR_MUST(cuGraphAddChildGraphNode(&second, made.graph, &first, 1, thing->graph));
        } else if (!served(w, cuGraphInstantiate(&made.exec, thing->graph, 0))) {
                return;
        }
        thing->part->users++;
        *to = made;
}

static void turn(struct worker *w)
{
        struct thing *thing = &w->things[below(&w->random, THINGS)];
        uint64_t what = below(&w->random, 8);
        bool global = !thing->part && what == 0;
        CUdeviceptr p;

        global ? pthread_rwlock_wrlock(&turns) : pthread_rwlock_rdlock(&turns);
        if (!thing->part)
                capture(w, thing, gt_random(&w->random),
                        global ? CU_STREAM_CAPTURE_MODE_GLOBAL : CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        else if (thing->graph)
                use_graph(w, thing);
        else if (what == 0)
                check(w, thing->part);
        else if (what == 1)
                update(w, thing);
        else
                launch(w, thing);
        if (thing->exec && what == 2)
                destroy(w, thing); /* its launch is still running */
        other_turns(w, 8);
        /* So large that cached memory goes back to the driver. */
        if (!relaxed && below(&w->random, 64) == 0 &&
            served(w, cuMemAlloc(&p, total / 4 + below(&w->random, total / 2))))
                GR_MUST(cuMemFree(p));
        if (below(&w->random, 16) == 0)
                GR_MUST(cuStreamSynchronize(streams[below(&w->random, STREAMS)]));
        pthread_rwlock_unlock(&turns);
}

static void *work(void *worker)
{
        struct worker *w = worker;

        gt_attach(gt);
        while (gt_now_us() < until_us)
                turn(w);
        pthread_rwlock_rdlock(&turns);
        for (int i = 0; i < THINGS; i++)
                if (w->things[i].part)
                        destroy(w, &w->things[i]);
        for (int i = 0; i < BLOCKS; i++)
                look_at(w, &w->blocks[i], w->blocks[i].stream);
        pthread_rwlock_unlock(&turns);
        return NULL;
}

uint64_t graphs_random(const struct gt *the_gt, double seconds, unsigned seed, int threads, bool is_relaxed,
                       bool one_at_a_time)
{
        static struct worker workers[MOST_THREADS];
        uint64_t counts[COUNTS] = {0};
        size_t available;
        uint32_t changed;

        if (threads < 1 || threads > MOST_THREADS)
                gt_die("threads from 1 to %d", MOST_THREADS);
        printf("seed %u, %d threads, %.1f s\n", seed, threads, seconds);
        gt = the_gt;
        relaxed = is_relaxed;
        in_turn = one_at_a_time;
        until_us = gt_now_us() + seconds * 1e6;
        GR_MUST(cuMemGetInfo(&available, &total));
        for (int i = 0; i < STREAMS; i++)
                streams[i] = gt_stream();
        for (int i = 0; i < threads; i++) {
                workers[i].own = gt_stream();
                workers[i].side = gt_stream();
                workers[i].launches = one_at_a_time ? streams[0] : workers[i].own;
                workers[i].random = (seed + UINT64_C(1)) * 0x9e3779b97f4a7c15u + (uint64_t)i * 7919 + 1;
                GR_MUST(cuEventCreate(&workers[i].event, CU_EVENT_DISABLE_TIMING));
                GR_MUST(cuMemAlloc(&workers[i].mismatches, 4));
                GR_MUST(cuMemsetD32(workers[i].mismatches, 0, 1));
        }
        GR_MUST(cuCtxSynchronize());
        for (int i = 0; i < threads; i++)
                if (pthread_create(&workers[i].thread, NULL, work, &workers[i]))
                        gt_die("no thread");
        for (int i = 0; i < threads; i++)
                pthread_join(workers[i].thread, NULL);
        GR_MUST(cuCtxSynchronize());
        for (int i = 0; i < threads; i++) {
                GR_MUST(cuMemcpyDtoH(&changed, workers[i].mismatches, 4));
                counts[WRONG] += changed;
                for (int k = 0; k < COUNTS; k++)
                        counts[k] += workers[i].counts[k];
        }
        printf("%lu captures, %lu updates, %lu launches, %lu other blocks, %lu refused; memory served again %lu times "
               "within its capture, %lu times after its graph; %lu words wrong\n",
               counts[CAPTURES], counts[UPDATES], counts[LAUNCHES], counts[OTHERS], counts[REFUSED], counts[WITHIN],
               counts[AFTER], counts[WRONG]);
        return counts[WRONG];
}
