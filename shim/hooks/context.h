/* Which context a thread has, and which ones there are. */
#ifndef GR_HOOKS_CONTEXT_H
#define GR_HOOKS_CONTEXT_H

#include "base/no_cancel.h"
#include "base/thread.h"
#include "shim.h"

/* As gr_context_current, but always asks the driver which context is current. */
struct gr_context *gr_context_ask(void);

/*
 * Grows when a context ends or is no longer the only one: after that, no thread trusts the context that it remembers.
 * Never 0.
 */
extern _Atomic uint64_t gr_contexts_version GR_HIDDEN;

/* The calling thread's current context; NULL where there is none or it cannot be managed. */
static inline struct gr_context *gr_context_current(void)
{
        return __builtin_expect(
                       gr_thread.current_version == atomic_load_explicit(&gr_contexts_version, memory_order_acquire), 1)
                       ? gr_thread.context
                       : gr_context_ask();
}

/*
 * After the driver had no memory for a call that takes an amount which nobody can know: returns to it what is cached on
 * the device, -1 for that of the current context. At first that is idle memory, then what takes a wait for the GPU, and
 * at last what other processes cache. *tries: 0 before the first call. Whether anything came back, so that the driver's
 * call is worth another try.
 */
bool gr_context_make_room(int device, unsigned *tries);

/*
 * A call of the program has this result, which is no success. Where it is the error of a kernel, that is reported, once
 * in the process. Returns false.
 */
bool gr_context_note_failure(CUresult result, const char *call) __attribute__((cold));

/*
 * The result of call, an expression. While lacks(result) says that it failed for lack of memory, and
 * gr_context_make_room gets some back, it is tried again. To be used in a hook, as its function's name is told.
 */
#define GR_WITH_ROOM_WHERE(lacks, device, call)                                                                        \
        ({                                                                                                             \
                unsigned tries_ = 0;                                                                                   \
                CUresult result_;                                                                                      \
                                                                                                                       \
                do                                                                                                     \
                        result_ = (call);                                                                              \
                while (__builtin_expect(result_ != CUDA_SUCCESS, 0) &&                                                 \
                       (lacks(result_) ? gr_context_make_room(device, &tries_)                                         \
                                       : gr_context_note_failure(result_, __func__)));                                 \
                result_;                                                                                               \
        })
#define GR_IS_OUT_OF_MEMORY(result)    ((result) == CUDA_ERROR_OUT_OF_MEMORY)
#define GR_WITH_ROOM_NOW(device, call) GR_WITH_ROOM_WHERE(GR_IS_OUT_OF_MEMORY, device, call)

struct gr_room_wait {
        struct gr_device *device; /* NULL: it has not begun */
        uint64_t begin_ns;
        int cancel_state; /* as it was before */
};

/*
 * As an allocation that would fail (GPURECLAIM_WAIT), a call of the driver waits for room on the device, as above.
 * Waits a little, after which the call should be tried again: less and less often, as the driver makes one context at a
 * time for all processes. False: the time is over, or other processes have nothing. Once it has begun,
 * gr_context_end_wait must follow. No lock is held.
 */
bool gr_context_wait_for_room(int device, struct gr_room_wait *wait);
void gr_context_end_wait(const struct gr_room_wait *wait, bool success);

/*
 * The result of call, which asks for room itself (GR_WITH_ROOM_NOW). It is repeated while the program may wait. A
 * thread that is told to end does so afterwards, or others would see the process wait for good.
 */
#define GR_WAIT_FOR_ROOM(ordinal, call)                                                                                \
        ({                                                                                                             \
                struct gr_room_wait wait_ = {.cancel_state = gr_cancel_disable()};                                     \
                CUresult waited_;                                                                                      \
                                                                                                                       \
                do                                                                                                     \
                        waited_ = (call);                                                                              \
                while (GR_IS_OUT_OF_MEMORY(waited_) && gr_context_wait_for_room(ordinal, &wait_));                     \
                if (wait_.device)                                                                                      \
                        gr_context_end_wait(&wait_, waited_ == CUDA_SUCCESS);                                          \
                gr_cancel_restore(&wait_.cancel_state);                                                                \
                waited_;                                                                                               \
        })
/* Where no lock is held. */
#define GR_WITH_ROOM(device, call) GR_WAIT_FOR_ROOM(device, GR_WITH_ROOM_NOW(device, call))

/* The context of a handle, which need not be current; NULL where the library does not know it yet. */
struct gr_context *gr_context_known(CUcontext handle);

/* As gr_context_known, but an unknown context is made current for a moment and added. NULL: the driver refuses that. */
struct gr_context *gr_context_visit(CUcontext handle);

/*
 * As gr_context_current, if the runtime has served the thread since the context became current, and no device was
 * chosen since; else NULL. runtime: the bit in gr_thread.runtimes of one shared CUDA runtime.
 */
static inline struct gr_context *gr_context_of_runtime(unsigned runtime)
{
        struct gr_context *context = gr_context_current();

        return __builtin_expect(gr_thread.runtimes & runtime, runtime) ? context : NULL;
}

/*
 * Notes that the runtime has served the thread (its bit, as above). gr_context_runtime_unsure: the thread has chosen a
 * device, so what was noted for it no longer counts.
 */
void gr_context_runtime_used(unsigned runtime);
void gr_context_runtime_unsure(void);

/*
 * What follows is for green contexts (green.c), each of which retains the primary context of its device.
 *
 * A primary lock is held by a thread that retains or releases the device's primary context. A context that is retained
 * while another thread ends it has the same handle, and could not be told from the one that has ended. Held until a new
 * context has been added to the core: otherwise another thread could reset it in between, and it would be added after
 * its end. Recursive, as the driver may call the runtime, and so the hooks, while it ends a context.
 */
extern struct gr_lock gr_primary_locks[GR_DEVICES_MAX] GR_HIDDEN;

/* A primary context that is about to be released or reset. */
struct gr_release {
        CUcontext primary; /* NULL: not seen */
        bool reset;
        bool ends; /* unless the driver refuses, or has counted more retains than the hooks have seen */
};

/* Called before the driver releases or resets a primary context, and after that, with the lock held all the time. */
struct gr_release gr_context_before_release(CUdevice dev, bool reset) GR_HELD(gr_primary_locks[dev]);
void gr_context_after_release(CUdevice dev, const struct gr_release *release, CUresult result)
        GR_HELD(gr_primary_locks[dev]);

/* The driver has made a green context, so there is a primary one. counted: its release will be seen. */
void gr_context_green_made(CUdevice dev, bool counted) GR_HELD(gr_primary_locks[dev]);

/*
 * Forgets which contexts own the memory of green contexts that no hook saw being made: the driver may give their
 * handles to others.
 */
void gr_context_distrust_aliases(void);

/* Cleans up after each primary context that the driver has ended meanwhile. */
void gr_context_end_inactive(void);

#endif
