/*
 * What the tests of segments share: a core with one context on the scripted GPU, by hand, with mapped memory or
 * without. A block handed out while somebody has it, or before the work of its last owner is behind a fence, is misuse;
 * so are addresses taken away while somebody has a block there or work may still use them.
 */
#ifndef GR_TEST_SEGMENTS_GPU_H
#define GR_TEST_SEGMENTS_GPU_H

#include <semaphore.h>

#include "alloc/pool.h"
#include "scripted.h"
#include "segment/segments_serve.h"

#define GPU_PAGES   2048u /* of the card */
#define GPU_THREADS 4

extern struct gr_core core;
extern struct gr_context *context;

/* The driver maps memory behind addresses. Before gpu_begin. */
extern bool gpu_mapping;

/* Work is in order until that ends (gr_core_end_order). Before gpu_begin. */
extern bool gpu_in_order;

/*
 * A fresh GPU, core and context, where no more memory is mapped than requests need: that makes what a test expects
 * simple. Random tests set segments->extra_from_ns to 0 again. The end checks that memory was not misused since;
 * what was is said on stderr.
 */
void gpu_begin(enum gr_pool_kind pool, enum gr_reuse reuse);
void gpu_end(void);

/* GR_POOL_AUTO in a process that once had 4 GiB live: 16 MiB may lie in the fastbins of one arena. */
void gpu_begin_auto(void);
/* The fastbins of the calling thread's arena. */
struct gr_fastbins *gpu_own_fastbins(void);

/* Checks that each page that the driver gave is charged, and that nothing is left after the last trim. */
void gpu_settle(void);

/* The card of the context. */
struct gr_device *gpu_device(void);
struct sg_progress gpu_progress(void);

/* The program allocates, and uses the memory at once; 0 where it is refused. Then it frees, behind one more work. From
 * any thread. */
uint64_t gpu_take(size_t bytes);
void gpu_give(uint64_t ptr, size_t bytes);

/* A capture begins, or one ends. */
void gpu_capture(bool begins);

/* All work is done. */
void gpu_sync(void);
/* The driver ended the context: its work is done, and nobody has its memory any more. */
void gpu_forget(void);
/* Calls of op are refused from now on, or no longer. */
void gpu_refuse(enum sg_op op, bool refused);

/* For core.wake: counts. */
extern unsigned gpu_wakes;
void gpu_wake(struct gr_core *woken);

/* For the log's sink: counts the lines. */
extern unsigned gpu_told;
void gpu_count_line(const char *line, size_t line_bytes, void *arg);

/* For sg_before: once, the thread that comes there says so, and stops until it may go on. */
extern sem_t gpu_inside, gpu_go_on;
void gpu_stop(void);

/* The next of the numbers that the seed, which is not 0, leads to. */
uint64_t gpu_random(uint64_t *seed);

#endif
