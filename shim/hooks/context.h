/* Which context a thread has, and which ones there are. */
#ifndef GR_HOOKS_CONTEXT_H
#define GR_HOOKS_CONTEXT_H

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

/* The context of a handle, which need not be current; NULL where the library does not know it yet. */
struct gr_context *gr_context_known(CUcontext handle);

/* As gr_context_known, but an unknown context is made current for a moment and added. NULL: the driver refuses that. */
struct gr_context *gr_context_visit(CUcontext handle);

/*
 * As gr_context_current, where the runtime of this bit has served the thread since the context became current and no
 * device was chosen; else NULL.
 */
static inline struct gr_context *gr_context_of_runtime(unsigned runtime)
{
        struct gr_context *context = gr_context_current();

        return __builtin_expect(gr_thread.runtimes & runtime, runtime) ? context : NULL;
}

/*
 * Notes that the runtime of this bit has served the thread. gr_context_runtime_unsure: the thread has chosen a device,
 * so what was noted for it no longer counts.
 */
void gr_context_runtime_used(unsigned runtime);
void gr_context_runtime_unsure(void);

#endif
