/*
 * Calls that only have to pass the sleep gate (driver/sleep.h): those that submit work or touch device memory, and that
 * have no other hook; and, in a deep sleep, all others that have none. Those on the thread's own default stream also
 * tell that streams overlap (submit.c), and those that give a graph work by hand tell that it may be of any device: a
 * kernel is of the device of its function, which the driver does not tell. Arguments are passed on as words; most calls
 * have six at most, which the calling conventions of x86-64 and AArch64 keep in registers. Floats are in registers of
 * their own. Where there are more, those on the stack are copied, with what lies behind them.
 */
#include <stdint.h>

#include "driver/deep_sleep.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/submit.h"

#define WORDS    uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t
#define FLOATS   double, double /* a float is the lower half of the register */
#define ON_STACK WORDS, uintptr_t, uintptr_t, uintptr_t, uintptr_t

#define GR_HOOK(symbol)
#define GR_CALL(symbol)
#define GR_NEED(symbol)
#define GR_HOOK_GATED(symbol) GR_PASS_ON(symbol, (void)0)
#define GR_HOOK_PER_THREAD(symbol)                                                                                     \
        GR_PASS_ON(symbol, if (gr_submit_is_first(NULL, GR_NULL_PER_THREAD) && gr_shim_ready())                        \
                                   gr_core_note_overlap(&gr_core))
#define GR_HOOK_NODE(symbol) GR_PASS_ON(symbol, gr_core_note_graph(&gr_core, GR_ALL_DEVICES))
#define GR_PASS_ON(symbol, first)                                                                                      \
        GR_EXPORT CUresult CUDAAPI gr_gated_##symbol(WORDS) __asm__(#symbol);                                          \
        CUresult CUDAAPI gr_gated_##symbol(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e,            \
                                           uintptr_t f)                                                                \
        {                                                                                                              \
                GR_PASS_GATE;                                                                                          \
                first;                                                                                                 \
                if (!gr_shim_ready() && !gr_real.symbol)                                                               \
                        return CUDA_ERROR_NOT_FOUND;                                                                   \
                return gr_real.symbol ? ((CUresult(CUDAAPI *)(WORDS))(void *)gr_real.symbol)(a, b, c, d, e, f)         \
                                      : CUDA_ERROR_NOT_FOUND;                                                          \
        }

/* What follows GR_PASS_DEEP in the hook of a function of this type. */
#define GR_DEEP_CALL(symbol, types, ...)                                                                               \
        GR_PASS_DEEP;                                                                                                  \
        if (!gr_shim_ready() && !gr_real.deep_##symbol)                                                                \
                return CUDA_ERROR_NOT_FOUND;                                                                           \
        return gr_real.deep_##symbol ? ((CUresult(CUDAAPI *) types)gr_real.deep_##symbol)(__VA_ARGS__)                 \
                                     : CUDA_ERROR_NOT_FOUND
#define GR_DEEP(symbol)                                                                                                \
        GR_EXPORT CUresult CUDAAPI gr_deep_##symbol(WORDS, FLOATS) __asm__(#symbol);                                   \
        CUresult CUDAAPI gr_deep_##symbol(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e,             \
                                          uintptr_t f, double x, double y)                                             \
        {                                                                                                              \
                GR_DEEP_CALL(symbol, (WORDS, FLOATS), a, b, c, d, e, f, x, y);                                         \
        }
#define GR_DEEP_MANY(symbol, first)                                                                                    \
        GR_EXPORT CUresult CUDAAPI gr_deep_##symbol(WORDS, ON_STACK) __asm__(#symbol);                                 \
        CUresult CUDAAPI gr_deep_##symbol(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e,             \
                                          uintptr_t f, uintptr_t g, uintptr_t h, uintptr_t i, uintptr_t j,             \
                                          uintptr_t k, uintptr_t l, uintptr_t m, uintptr_t n, uintptr_t o,             \
                                          uintptr_t p)                                                                 \
        {                                                                                                              \
                first;                                                                                                 \
                GR_DEEP_CALL(symbol, (WORDS, ON_STACK), a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p);               \
        }
#define GR_DEEP_LONG(symbol)   GR_DEEP_MANY(symbol, (void)0)
#define GR_DEEP_SHARED(symbol) GR_DEEP_MANY(symbol, gr_deep_never(GR_DEEP_IS_SHARED))
#include "driver/hooks.def"
