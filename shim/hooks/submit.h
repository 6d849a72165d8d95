/* Work that a thread submits. */
#ifndef GR_SUBMIT_H
#define GR_SUBMIT_H

#include "hooks/captures.h"
#include "shim.h"

/* Whether work on the stream is the first that is not on the legacy default stream. */
static inline bool gr_submit_is_first(CUstream stream, enum gr_null_stream null_stream)
{
        return (stream ? stream != CU_STREAM_LEGACY : null_stream == GR_NULL_PER_THREAD) &&
               !atomic_load_explicit(&gr_core.streams_overlap, memory_order_acquire);
}

/*
 * The calling thread is about to submit work to the stream: notes whether streams overlap, and work in or beside a
 * capture. Where the process has contexts of several devices, returns whether the work is captured. No lock is held.
 */
bool gr_submit_begin(CUstream stream, enum gr_null_stream null_stream);

/* Whether the process has contexts of several devices, so that it matters where copies write. */
static inline bool gr_submit_may_be_far(void)
{
        return atomic_load_explicit(&gr_core.several_devices, memory_order_acquire);
}

/*
 * Work of the stream, which is not captured, is about to write at `at`, or to be the last that uses memory there. No
 * lock is held.
 */
void gr_submit_reach(CUstream stream, CUdeviceptr at);

/* A graph is about to be launched in the stream, which is not captured. No lock is held. */
void gr_submit_graph(CUstream stream);

#endif
