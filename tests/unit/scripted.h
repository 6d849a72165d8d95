/*
 * A scripted GPU for tests of core/: a struct gr_driver in plain C with a clock of its own, in which work takes as long
 * as the test says and nothing happens that the test did not ask for.
 *
 * Work goes to one of the streams of a context and occupies [start, end) of the fake time: it starts when it is
 * submitted, or where its stream ends, or where the last context_wait of its context lets it. An event has passed when
 * all work submitted to its context before the record has ended; a wait by itself delays no event, which is the least a
 * fence may rely on.
 *
 * It watches for what corrupts memory on a GPU: a block given back while work uses it or the program has it, a block
 * handed out twice, work of a new owner that overlaps work of an earlier one, a record, wait or sync during a capture,
 * events and contexts used after their end. Each such misuse is printed and counted; it ends nothing.
 *
 * By hand (sg_by_hand) the GPU has a clock of its own, on which a program's work moves and nothing else: it goes on as
 * far as a wait or the test says. The program may then have ranges of an allocation, and of memory that is mapped
 * behind addresses (sg_mapping_driver).
 *
 * There is one such GPU per process, with SG_DEVICES cards of the same size. All functions may be called from any
 * thread after sg_reset; times are nanoseconds, sizes bytes.
 */
#ifndef SG_SCRIPTED_H
#define SG_SCRIPTED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "check.h"

#include "alloc/pool.h"
#include "base/driver.h"
#include "core.h"

#define SG_DEVICES  4
#define SG_STREAMS  8
#define SG_MS       UINT64_C(1000000)
#define SG_FIRST_NS UINT64_C(1000000000) /* the clock after sg_reset */
#define SG_BASE     UINT64_C(0x7f0000000000)
#define SG_VBASE    UINT64_C(0x7f8000000000) /* addresses that memory is mapped behind */

/* The operations, each with the letter that stands for it in the log. */
#define SG_OPS(X)                                                                                                      \
        X(MEM_ALLOC, 'A')                                                                                              \
        X(MEM_FREE, 'F')                                                                                               \
        X(MEM_RELEASE, 'R')                                                                                            \
        X(MEM_INFO, 'i')                                                                                               \
        X(MEM_RESERVE, 'v')                                                                                            \
        X(MEM_MAP, 'm')                                                                                                \
        X(MEM_REMAP, 'M') /* counted beside MEM_MAP: of memory that there is */                                        \
        X(MEM_UNMAP, 'u')                                                                                              \
        X(EVENT_CREATE, 'c')                                                                                           \
        X(EVENT_DESTROY, 'd')                                                                                          \
        X(EVENT_QUERY, 'q')                                                                                            \
        X(CONTEXT_RECORD, 'r')                                                                                         \
        X(CONTEXT_WAIT, 'w')                                                                                           \
        X(CONTEXT_SYNC, 's')                                                                                           \
        X(CONTEXT_DRAIN, 'D')                                                                                          \
        X(TRIM_POOLS, 't')

enum sg_op {
#define SG_OP_ENUMERATOR(id, letter) SG_##id,
        SG_OPS(SG_OP_ENUMERATOR)
#undef SG_OP_ENUMERATOR
                SG_OP_COUNT,
        SG_CLOCK = SG_OP_COUNT, /* for sg_before alone */
        SG_CALLS
};

/* Called before the driver does so, or says the time, where it is set; none is after sg_reset. */
extern void (*sg_before[SG_CALLS])(void);

extern const struct gr_driver sg_driver;
extern const struct gr_driver sg_mapping_driver; /* with mapped memory */
extern const struct gr_driver sg_old_driver;     /* without context_record and context_wait, as before CUDA 12.5 */

/* Forgets everything, and all cards have capacity_bytes. No other thread may use the GPU. */
void sg_reset(uint64_t capacity_bytes);

/* The handle of a new context; valid, as a handle of a context that is gone, also after sg_context_destroy. */
void *sg_context_new(int device);

/* Ends the context, its work and its events, and frees its memory. */
void sg_context_destroy(void *context);

uint64_t sg_now_ns(void);
void sg_advance(uint64_t ns);

/* From now on the GPU's clock, which begins with 0, stands still but for waits, sg_gpu_reach, and lazy_ns with each
 * question for an event; each question for the time takes 1 us. */
void sg_by_hand(uint64_t lazy_ns);

/* The GPU does its work up to ns at least; UINT64_MAX: all. */
void sg_gpu_reach(uint64_t ns);

/* How far the GPU is, where the context's work ends, and up to where later work of it waits. */
struct sg_progress {
        uint64_t done_ns, submitted_ns, barrier_ns;
} sg_progress(void *context);

/* Every operation of the driver advances the clock by so much; 0 after sg_reset. */
void sg_set_tick(uint64_t ns);

/* Submits work of this length, which uses the block that begins at ptr (0: none). */
void sg_work(void *context, unsigned stream, uint64_t ptr, uint64_t ns);

/* Adds n, which may be negative, to the captures going on in the process. */
void sg_capture(int n);

/* The nth call of op from now on (1: the next), and the count - 1 after it, do nothing and answer rc. */
void sg_fail(enum sg_op op, unsigned nth, unsigned count, int rc);

/* Whether such a call is still to come. */
bool sg_planned(enum sg_op op);

/* What others and the driver's own caches hold on a card; the latter is given up by trim_pools. */
void sg_hold(int device, uint64_t others_bytes, uint64_t driver_cache_bytes);

unsigned sg_calls(enum sg_op op);

/* The letters of the operations since sg_log_clear, oldest first, at most some thousands. For one thread only. */
const char *sg_log(void);
void sg_log_clear(void);

/* Pages of the card that this process holds, in bytes. */
uint64_t sg_used_bytes(int device);

/* How many reservations of addresses there are, and handles of mapped memory. */
unsigned sg_reserved(void);
unsigned sg_handles(void);

/* Bytes of the allocation at ptr, 0 where there is none. */
size_t sg_size(uint64_t ptr);

uint64_t sg_misuses(void);

/* What the core believes of its cache, and its counters. */
uint64_t sg_cached_bytes(struct gr_device *device);
uint64_t sg_counter(struct gr_core *core, enum gr_counter counter);

/*
 * The program's side. sg_alloc is gr_pool_alloc and then owns the block; sg_free is gr_pool_free of a block it owned,
 * sg_free_in_order gr_pool_free_in_order.
 */
int sg_alloc(struct gr_context *context, size_t bytes, uint64_t *ret_ptr);
int sg_free(struct gr_core *core, uint64_t ptr);
int sg_free_in_order(struct gr_core *core, uint64_t ptr, gr_pool_give_back *give_back);

/* The ownership by itself, for blocks from elsewhere; sg_disown returns whether the program had it. */
void sg_own(uint64_t ptr, size_t bytes);
bool sg_disown(uint64_t ptr);

#endif
