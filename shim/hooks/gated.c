/*
 * Calls that only have to pass the sleep gate (driver/sleep.h): those that submit work or touch device memory, and that
 * have no other hook. Those on the thread's own default stream also tell that streams overlap (submit.c). Arguments are
 * passed on as words; a call has six at most, which the calling conventions of x86-64 and AArch64 keep in registers.
 */
#include <stdint.h>

#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/submit.h"

#define WORDS uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t

#define GR_HOOK(symbol)
#define GR_CALL(symbol)
#define GR_NEED(symbol)
#define GR_HOOK_GATED(symbol) GR_PASS_ON(symbol, (void)0)
#define GR_HOOK_PER_THREAD(symbol)                                                                                     \
        GR_PASS_ON(symbol, if (gr_submit_is_first(NULL, GR_NULL_PER_THREAD) && gr_shim_ready())                        \
                                   gr_core_note_overlap(&gr_core))
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
#include "driver/hooks.def"
