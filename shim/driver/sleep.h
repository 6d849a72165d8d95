/*
 * Sleep: the live memory of an idle process leaves the device, and is back at the same addresses before it is used.
 * Only where GPURECLAIM_SLEEP asks for it.
 *
 * What can leave is memory that is mapped for core/ (pool kinds auto and split). Its content is copied to host memory,
 * the driver gets the memory back, and the addresses stay reserved. What something beside these addresses relies on
 * stays (gr_mapped_stay), and so does all else: bins, stream-ordered and managed memory, arrays, what the program
 * maps itself.
 *
 * The sleep gate stands in front of each call of the program that may submit work, or touch or ask about device memory
 * (GR_PASS_GATE). It is shut before memory leaves, and opened after all of it is back:
 *
 *   a thread at the gate             the thread that shuts it
 *   1. counts itself as inside       1. shuts the gate
 *   2. looks whether it is open      2. looks whether anybody is inside
 *
 * Both steps are sequentially consistent. So either the thread sees the gate shut, takes its count back and waits; or
 * the other one sees it inside, and opens the gate again. It never waits for those inside, as their call may take long:
 * it looks for a few milliseconds, and the order is to be repeated. Calls may be nested, as each counts for itself.
 * (When a turn is over it looks for up to a second, as a program that works always has somebody inside.)
 *
 * A sleeper shuts the gate, sees nobody inside and no GPU work pending, and copies. The first call that comes to the
 * gate wakes the process: it creates, maps and copies, and opens the gate. Both hold one lock meanwhile, at which the
 * other calls wait.
 *
 * The library's own threads do not pass the gate. What they may do to memory that is asleep is to give it up: its copy
 * is freed then.
 *
 * In a deep sleep (deep_sleep.h) the gate stands in front of nearly every call of the driver. Calls that need no memory
 * pass it only then (GR_PASS_DEEP): they are counted apart, as they neither keep the process awake nor end its idle
 * time. One of them ends the deep sleep, and the memory stays where it is. The library's own threads are counted with
 * them, and do not call the driver in a deep sleep (GR_OWN_CALLS).
 */
#ifndef GR_SLEEP_H
#define GR_SLEEP_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/attributes.h"
#include "base/no_cancel.h"
#include "region/region.h"
#include "shim.h"

/* Whether the process may sleep, so that its calls pass the gate. Set while the library is set up. */
extern _Atomic bool gr_sleep_on GR_HIDDEN;

static inline bool gr_sleep_is_on(void)
{
        return atomic_load_explicit(&gr_sleep_on, memory_order_relaxed);
}

struct gr_sleep_config {
        uint64_t host_bytes;          /* the most host memory that it may take */
        const struct gr_path *folder; /* of files for what has no room there; NULL: that stays on the device */
        uint64_t turn_ns; /* how long others must wait before they end this process's work; 0: they must not */
        uint64_t wait_ns; /* how long a call at the gate waits for memory to be had again */
};

/* Allows sleep. */
void gr_sleep_init(const struct gr_sleep_config *config);

/* The process ends: no sleep begins after this, and one that has begun is stopped. */
void gr_sleep_end(void);

/*
 * A process is put to sleep for others when it has been idle for so long: no call has passed the gate, and the GPU has
 * no work left. To sleep and to wake takes about 3 s for 40 GiB (docs/measurements.md, sleep-copies): two processes
 * that put each other to sleep work for longer than their memory moves. And it is less than a process that wakes waits
 * for memory by default.
 */
#define GR_SLEEP_IDLE_NS UINT64_C(5000000000)

/*
 * From when on others may put the process to sleep: when it has been idle for long enough, or its turn is over. 0: it
 * may not sleep, it is not idle and has no turns, or all that can leave the device has left. GR_SLEEP_UNKNOWN: memory
 * of another device leaves just now. To be called now and then, as each call compares with the one before. No lock is
 * held.
 */
#define GR_SLEEP_UNKNOWN UINT64_MAX
uint64_t gr_sleep_offer(int device);

/*
 * Puts the memory of device to sleep, if the process has been idle for idle_ns or, with 0, if the GPU is idle within a
 * moment; what is cached there goes back first. Returns how many bytes have left; 0 also where a call or work of the
 * program goes on, or a stream captures. Then the idle time begins anew, or, if nothing could leave, when the program
 * has worked again. A call of the program that comes meanwhile stops it, and so does the end of a context. No lock is
 * held.
 */
uint64_t gr_sleep_begin(int device, uint64_t idle_ns);

/*
 * Puts the memory of all devices to sleep if the GPU is idle within a moment, and has the driver take the rest of the
 * process off them. 0, or why it did not (enum gr_deep_reason, or a step and what the driver answered); then what has
 * left is asleep. No lock is held.
 */
uint64_t gr_sleep_deeply(void);

/*
 * From now on the process does not sleep deeply, and if it does now, this wakes it: the program is about to get a
 * function that passes no gate. An error: it could not be had back. No lock is held.
 */
CUresult gr_sleep_never_deeply(enum gr_deep_reason reason);

/*
 * As gr_sleep_begin for the sake of another process: if this one has been idle for GR_SLEEP_IDLE_NS, or its turn is
 * over. In the latter case the calls of the program wait at the gate: first until those inside have returned and the
 * GPU's work is done, for a second at most, and then, if memory has left, for as long as a turn takes. If none has, a
 * new turn begins.
 */
uint64_t gr_sleep_yield(int device);

/*
 * Waits for ns. If the process has turns, this thread's call does not count as inside meanwhile. False: the memory went
 * to sleep and could not be had again.
 */
bool gr_sleep_pause(uint64_t ns);

/* Memory that the process has waited for is there, so a turn begins. So does the first one, when sleep is allowed. */
void gr_sleep_begin_turn(void);

/* Whether memory is asleep, or about to be. */
bool gr_sleep_is_asleep(void);

/* One call that has passed the gate. A thread that was told to end does so after the call, as its count would stay. */
struct gr_pass {
        _Atomic uint64_t *inside; /* where it is counted; NULL: nowhere */
        bool beside;              /* there are those that only a deep sleep keeps out */
        int cancel_state;         /* to be restored, where it is counted */
        CUresult result;          /* not CUDA_SUCCESS: the memory could not be had again, and the call must fail */
};

struct gr_pass gr_sleep_enter(void);
struct gr_pass gr_sleep_enter_deep(void); /* only a deep sleep keeps it out */
struct gr_pass gr_sleep_enter_own(void);  /* inside is NULL where the thread must not call the driver now */
void gr_sleep_leave(struct gr_pass *pass);

static inline struct gr_pass gr_pass_gate(void)
{
        return __builtin_expect(gr_sleep_is_on(), 0) ? gr_sleep_enter() : (struct gr_pass){.result = CUDA_SUCCESS};
}

static inline void gr_pass_end(struct gr_pass *pass)
{
        if (__builtin_expect(pass->inside != NULL, 0))
                gr_sleep_leave(pass);
}

static inline struct gr_pass gr_pass_deep(void)
{
        return __builtin_expect(gr_sleep_is_on(), 0) ? gr_sleep_enter_deep() : (struct gr_pass){.result = CUDA_SUCCESS};
}

#define GR_PASS(enter)                                                                                                 \
        __attribute__((cleanup(gr_pass_end))) struct gr_pass gr_pass = enter();                                        \
                                                                                                                       \
        if (__builtin_expect(gr_pass.result != CUDA_SUCCESS, 0))                                                       \
        return gr_pass.result

/* At the beginning of a hook: wakes the process if it sleeps, and keeps it awake until the hook returns. */
#define GR_PASS_GATE GR_PASS(gr_pass_gate)

/* The same for a call that needs no memory: only a deep sleep is ended, and kept off. */
#define GR_PASS_DEEP GR_PASS(gr_pass_deep)

/*
 * Before the library calls the driver on its own account. gr_own_calls: whether it may, until the end of the block; it
 * may not in a deep sleep, nor while something else has locked the process.
 */
#define GR_OWN_CALLS                                                                                                   \
        __attribute__((cleanup(gr_pass_end))) struct gr_pass gr_own_pass = gr_sleep_enter_own();                       \
        const bool gr_own_calls = gr_own_pass.inside != NULL

#endif
