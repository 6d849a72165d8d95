#include "safety_soak.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum { LIVE = 8, MOST_STREAMS = 64, MOST_THREADS = 64, LONGEST_SPIN_US = 200 };

/* A block whose first words hold TAG once the work on STREAM is done. */
struct slot {
        CUdeviceptr p;
        size_t bytes;
        uint64_t words;
        uint32_t tag;
        CUstream stream;
};

struct worker {
        const struct gt *gt;
        const struct soak *settings;
        const CUstream *streams; /* shared by all workers */
        CUstream capturing;      /* this worker's own: nobody else may use a stream in capture */
        CUevent event;
        CUdeviceptr mismatches; /* one word on the device */
        uint64_t random;
        double until_us;
        uint64_t blocks, refused, wrongly_refused, graphs;
        size_t total; /* memory that the program may have */
};

static atomic_uint next_tag = 1;
/* What all workers hold, in the driver's pages. */
static atomic_size_t live;

static uint64_t below(struct worker *w, uint64_t limit)
{
        return gt_random(&w->random) % limit;
}

static CUstream some_stream(struct worker *w)
{
        return w->streams[below(w, (uint64_t)w->settings->streams)];
}

/* Small, middling and large blocks, every size class in turn. */
static size_t some_size(struct worker *w)
{
        switch (below(w, 8)) {
        case 0:
        case 1:
        case 2:
                return 4 + below(w, 64 * KIB);
        case 3:
        case 4:
                return 4 + below(w, MIB);
        case 5:
        case 6:
                return MIB + below(w, 8 * MIB);
        default:
                return 8 * MIB + below(w, 56 * MIB);
        }
}

/*
 * A graph that fills the block, captured while the other workers allocate and free. It is launched on the worker's own
 * stream, and the slot's waits for it: several threads that launch graphs into the same streams lose the streams' order
 * on driver 580 (seen on an H200 without any allocation or free going on; one thread, or kernels alone, keep it).
 */
static void fill_by_graph(struct worker *w, const struct slot *slot)
{
        CUgraph graph;
        CUgraphExec exec;

        GR_MUST(cuStreamBeginCapture(w->capturing, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(gt_fill(w->gt, w->capturing, slot->p, slot->tag, slot->words));
        GR_MUST(cuStreamEndCapture(w->capturing, &graph));
        GR_MUST(cuGraphInstantiate(&exec, graph, 0));
        GR_MUST(cuGraphLaunch(exec, w->capturing));
        GR_MUST(cuEventRecord(w->event, w->capturing));
        GR_MUST(cuStreamWaitEvent(slot->stream, w->event, 0));
        GR_MUST(cuGraphExecDestroy(exec));
        GR_MUST(cuGraphDestroy(graph));
        w->graphs++;
}

static void begin(struct worker *w, struct slot *slot)
{
        size_t bytes = some_size(w), others = atomic_fetch_add(&live, gt_pages(bytes));
        CUresult result = cuMemAlloc(&slot->p, bytes);

        if (result == CUDA_ERROR_OUT_OF_MEMORY) {
                slot->p = 0;
                w->refused++;
                /* Whatever a cache holds is no reason: a quarter of the total is more than size classes waste. */
                w->wrongly_refused += others + gt_pages(bytes) <= w->total / 4 * 3;
                atomic_fetch_sub(&live, gt_pages(bytes));
                return;
        }
        GR_MUST(result);
        slot->bytes = bytes;
        slot->words = (bytes < w->settings->touched ? bytes : w->settings->touched) / 4;
        slot->tag = atomic_fetch_add(&next_tag, 1);
        slot->stream = some_stream(w);
        switch (below(w, 16)) {
        case 0:
                fill_by_graph(w, slot);
                break;
        case 1:
        case 2:
        case 3:
                GR_MUST(cuMemsetD32Async(slot->p, slot->tag, slot->words, slot->stream));
                break;
        case 4:
        case 5:
        case 6:
        case 7:
                GR_MUST(gt_late_fill(w->gt, slot->stream, slot->p, slot->tag, slot->words, below(w, LONGEST_SPIN_US)));
                break;
        default:
                GR_MUST(gt_fill(w->gt, slot->stream, slot->p, slot->tag, slot->words));
        }
        w->blocks++;
}

/* Checks the block, now and then on another stream that waits for the first, and frees it without waiting. */
static void finish(struct worker *w, struct slot *slot)
{
        CUstream stream = slot->stream;

        if (below(w, 4) == 0) {
                stream = some_stream(w);
                GR_MUST(cuEventRecord(w->event, slot->stream));
                GR_MUST(cuStreamWaitEvent(stream, w->event, 0));
        }
        GR_MUST(gt_count_diff(w->gt, stream, slot->p, slot->tag, slot->words, w->mismatches));
        GR_MUST(cuMemFree(slot->p));
        atomic_fetch_sub(&live, gt_pages(slot->bytes));
        slot->p = 0;
}

static void *work(void *argument)
{
        struct worker *w = argument;
        struct slot slots[LIVE] = {{.p = 0}};

        gt_attach(w->gt);
        for (uint64_t i = 0; gt_now_us() < w->until_us; i++) {
                struct slot *slot = &slots[below(w, LIVE)];

                if (slot->p)
                        finish(w, slot);
                else
                        begin(w, slot);
                /* Bounds the work that is outstanding; the device should be busy, not buried. */
                if (i % 32 == 31)
                        GR_MUST(cuStreamSynchronize(some_stream(w)));
        }
        for (int i = 0; i < LIVE; i++)
                if (slots[i].p)
                        finish(w, &slots[i]);
        return NULL;
}

bool soak_run(const struct gt *gt, const struct soak *settings)
{
        CUstream streams[MOST_STREAMS];
        pthread_t threads[MOST_THREADS];
        struct worker workers[MOST_THREADS];
        uint64_t blocks = 0, refused = 0, wrongly_refused = 0, graphs = 0, changed = 0;
        size_t available, total;
        double until_us = gt_now_us() + settings->seconds * 1e6;

        if (settings->threads < 1 || settings->threads > MOST_THREADS || settings->streams < 1 ||
            settings->streams > MOST_STREAMS)
                gt_die("threads from 1 to %d, streams from 1 to %d", MOST_THREADS, MOST_STREAMS);
        GR_MUST(cuMemGetInfo(&available, &total));
        for (int i = 0; i < settings->streams; i++)
                streams[i] = gt_stream();
        for (int i = 0; i < settings->threads; i++) {
                struct worker *w = &workers[i];

                *w = (struct worker){.gt = gt,
                                     .settings = settings,
                                     .streams = streams,
                                     .capturing = gt_stream(),
                                     .random = (settings->seed + 1) * 0x9e3779b97f4a7c15u + (uint64_t)i * 7919 + 1,
                                     .until_us = until_us,
                                     .total = total};
                GR_MUST(cuEventCreate(&w->event, CU_EVENT_DISABLE_TIMING));
                GR_MUST(cuMemAlloc(&w->mismatches, 4));
                GR_MUST(cuMemsetD32(w->mismatches, 0, 1));
        }
        GR_MUST(cuCtxSynchronize());
        for (int i = 0; i < settings->threads; i++)
                if (pthread_create(&threads[i], NULL, work, &workers[i]))
                        gt_die("no thread");
        for (int i = 0; i < settings->threads; i++)
                pthread_join(threads[i], NULL);
        GR_MUST(cuCtxSynchronize());
        for (int i = 0; i < settings->threads; i++) {
                uint32_t count;

                GR_MUST(cuMemcpyDtoH(&count, workers[i].mismatches, 4));
                GR_MUST(cuMemFree(workers[i].mismatches));
                changed += count;
                blocks += workers[i].blocks;
                refused += workers[i].refused;
                wrongly_refused += workers[i].wrongly_refused;
                graphs += workers[i].graphs;
        }
        printf("soak: seed %llu, %d threads, %d streams, %.1f s: %llu blocks, %llu graphs, %llu refused, %llu of them "
               "with room to spare, %llu words changed under their owner\n",
               (unsigned long long)settings->seed, settings->threads, settings->streams, settings->seconds,
               (unsigned long long)blocks, (unsigned long long)graphs, (unsigned long long)refused,
               (unsigned long long)wrongly_refused, (unsigned long long)changed);
        return changed == 0 && (wrongly_refused == 0 || settings->may_refuse) && blocks > 0;
}
