/*
 * A GPU that is only a clock: work is a number that grows, events remember it, and a shadow of the memory knows for
 * every 512 B who has it and which work used it last. A block handed out while somebody has it, or before the work of
 * its last owner is behind a fence, is misuse; so are addresses taken away while somebody has a block there or work may
 * still use them. With mapped memory or without.
 */
#ifndef GR_TEST_SPLIT_GPU_H
#define GR_TEST_SPLIT_GPU_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "check.h"

#include "pool.h"
#include "segment/split.h"

#define GPU_UNIT     GR_SPLIT_UNIT_BYTES
#define GPU_BASE     (UINT64_C(1) << 40)
#define GPU_PAGES    2048u               /* of the card */
#define GPU_VBASE    (UINT64_C(2) << 40) /* addresses that memory is mapped behind */
#define GPU_THREADS  4
#define GPU_CONTEXT  ((void *)0x10)
#define GPU_CONTEXT2 ((void *)0x20)

/* Numbers of work start at 1. */
struct split_gpu {
        _Atomic uint32_t submitted, done; /* work up to here */
        _Atomic uint32_t covered;         /* later work waits for all work up to here */
        _Atomic uint64_t now_ns;
        _Atomic uint32_t bad;
        _Atomic int captures;   /* going on, as far as the driver is concerned */
        uint32_t lazy;          /* event_query lets so much work get done */
        size_t top;             /* pages below it were used at some time */
        uint8_t *owner;         /* of each page: 0 free, 1 first page of an allocation, 2 a later one, 3 small blocks */
        uint64_t slab_next;     /* where the next small block goes */
        _Atomic uint32_t *last; /* of each unit: GPU_LIVE, or the work that used it last */
        pthread_mutex_t lock;   /* guards owner, slab_next and what follows but vpages */
        unsigned handles, reserved, areas, moves;
        bool no_moves;
        uint8_t *refs; /* of each page: how many mappings it has, and one for its handle */
        int map_fails; /* so many calls from now on, and the next one fails; 0: none does */
        bool unmap_refused, reserve_refused, info_refused;
        struct split_gpu_vpage *vpages;
};
extern struct split_gpu gpu;

extern struct gr_core core;
extern struct gr_context *context;

/* Before all else; false without memory. mapping: the driver maps memory behind addresses. */
bool gpu_open(bool mapping);
void gpu_close(void);

/* A fresh GPU, core and context. The end checks that memory was not misused since; what was is said on stderr. */
void gpu_begin(enum gr_pool_kind pool, enum gr_reuse reuse);
void gpu_end(void);

/* Checks that each page that the driver gave is charged, and that nothing is left after the last trim. */
void gpu_settle(void);

/* The card of the context. */
struct gr_device *gpu_device(void);

/* The program allocates, and uses the memory at once; 0 where it is refused. Then it frees, behind one more work. From
 * any thread. */
uint64_t gpu_take(size_t bytes);
void gpu_give(uint64_t ptr, size_t bytes);

/* A capture begins, or one ends. */
void gpu_capture(bool begins);

/* All work is done. */
void gpu_sync(void);
void gpu_sleep(uint64_t ns);
/* The driver ended the context: its work is done, and nobody has its memory any more. */
void gpu_forget(void);
uint64_t gpu_free_bytes(void);

/* Called before the driver does so, or says the time, where it is set. */
enum gpu_call { GPU_RECORD, GPU_UNMAP, GPU_MAP, GPU_RESERVE, GPU_ALLOC, GPU_INFO, GPU_CLOCK, GPU_CALLS };
extern void (*gpu_before[GPU_CALLS])(void);

/* For core.wake: counts. */
extern unsigned gpu_wakes;
void gpu_wake(struct gr_core *woken);

/* The next of the numbers that the seed, which is not 0, leads to. */
uint64_t gpu_random(uint64_t *seed);

#endif
