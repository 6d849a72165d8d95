/*
 * What the tests of the memory of graphs share: a graph of the one context, which shares its memory with those of the
 * same context, and blocks for its capture. For one source file of a test.
 */
#ifndef GR_TEST_GRAPH_GPU_H
#define GR_TEST_GRAPH_GPU_H

#include "alloc/graph_hold.h"
#include "check.h"
#include "core.h"
#include "segment/segments_trim.h"
#include "segments_gpu.h"

static struct gr_graph_hold *hold;

static inline void begin_with(enum gr_pool_kind pool, enum gr_reuse reuse)
{
        gpu_begin(pool, reuse);
        core.config.graph_arena = GR_GRAPH_SHARED;
        hold = gr_graph_hold_new(&core, context);
}

static inline void begin(void)
{
        begin_with(GR_POOL_AUTO, GR_REUSE_AUTO);
}

static inline void end(void)
{
        GR_CHECK_EQ(gpu_device()->graph_bytes, 0);
        gpu_settle();
        gpu_end();
}

static inline void last_graph_goes(void)
{
        gr_graph_hold_release(hold);
        gr_pool_collect(&core);
}

/* A block for the capture; 0: it has to come from elsewhere. */
static inline uint64_t take(size_t bytes)
{
        uint64_t ptr = 0;

        if (gr_pool_alloc_in_hold(hold, context, true, bytes, &ptr))
                sg_own(ptr, bytes);
        return ptr;
}

/* Frees blocks inside the capture, which ends then. other: 0 for none. */
static inline void give(uint64_t ptr, uint64_t other)
{
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        if (other)
                GR_CHECK_EQ(sg_free(&core, other), 0);
        gr_pool_end_capture(hold, true);
}

/* Instead of this one, so that the segments stay in graphs. */
static inline void next_graph(void)
{
        struct gr_graph_hold *next = gr_graph_hold_new(&core, context);

        gr_graph_hold_release(hold);
        hold = next;
        gr_pool_collect(&core);
}

static inline struct gr_segment *segment(bool small)
{
        return context->segments->expandable[gr_expandable_graph_kind(small)];
}

/* All work is done, and the fence knows. */
static inline void settle(void)
{
        gr_fence_close(context->fence);
        gpu_sync();
        gr_fence_poll(context->fence);
}

static inline uint64_t trim(void)
{
        return gr_segments_trim(context, UINT64_MAX);
}

#endif
