/* The driver's own functions, and whether hooks may do their work. */
#ifndef GR_REAL_H
#define GR_REAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "shim.h"

/* The driver's own functions; those that are not needed may be NULL. Written once, before the state is READY. */
struct gr_real {
#define GR_HOOK(symbol) __typeof__(symbol) *symbol;
#define GR_CALL(symbol) __typeof__(symbol) *symbol;
#define GR_NEED(symbol) __typeof__(symbol) *symbol;
#define GR_DEEP(symbol) void *deep_##symbol; /* called with words */
#include "driver/hooks.def"
#undef GR_HOOK
#undef GR_CALL
#undef GR_NEED
};

extern struct gr_real gr_real GR_HIDDEN;

enum gr_shim_state {
        GR_SHIM_UNRESOLVED, /* no driver found yet */
        GR_SHIM_READY,
        GR_SHIM_ENDING, /* ready, but the process exits: the driver may shut down at any moment */
        GR_SHIM_OFF,    /* hooks only call the real function: a needed symbol is missing, the driver has shut down, or
                           this is a child after fork */
};

extern _Atomic int gr_shim_state GR_HIDDEN;
extern struct gr_core gr_core GR_HIDDEN;

/*
 * The functions that set up the rest of the library. set_up is called once, by the first call of any hook, when gr_real
 * is filled, under the lock of gr_real_resolve; in_child in a child after fork, also where nothing was set up. Both lie
 * above all hooks in the order of files, so hooks do not know their names: GR_SET_UP_BY, in the file that has them,
 * puts their addresses into a section of its own. The linker does so, not a constructor, because hooks may be called
 * before any constructor.
 */
struct gr_set_up {
        void (*set_up)(void), (*in_child)(void);
};

extern const struct gr_set_up __start_gr_set_up GR_HIDDEN;
#define GR_SET_UP_BY(set_up, in_child)                                                                                 \
        static const struct gr_set_up gr_set_up_by __attribute__((used, section("gr_set_up"))) = {set_up, in_child}

/*
 * In the state UNRESOLVED: looks for the driver in this process and, once it is loaded, for its functions. In the state
 * ENDING: checks whether the driver still answers. Returns whether hooks may do their work. Any thread; keeps errno.
 */
bool gr_real_resolve(void);

/*
 * Called with the result of a driver's function that gives the program memory at *dptr: tells the pool (gr_pool_given)
 * where it is CUDA_SUCCESS. Returns result.
 */
CUresult gr_real_given(CUresult result, const CUdeviceptr *dptr);

/* The device's UUID, in bytes and as text without a prefix; either may be NULL. False: the driver does not tell it. */
#define GR_UUID_TEXT_BYTES 37
bool gr_real_uuid(CUdevice device, CUuuid *ret, char *ret_text);

/* Whether hooks may do their work. */
static inline bool gr_shim_ready(void)
{
        int state = atomic_load_explicit(&gr_shim_state, memory_order_acquire);

        return __builtin_expect(state == GR_SHIM_READY, 1) || (state != GR_SHIM_OFF && gr_real_resolve());
}

/*
 * Calls the driver's own function. The first call of the process looks for the driver. CUDA_ERROR_NOT_FOUND where the
 * function does not exist: there is no driver, or it is too old.
 */
#define GR_REAL(symbol, ...) (gr_shim_ready(), gr_real.symbol ? gr_real.symbol(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND)

#endif
