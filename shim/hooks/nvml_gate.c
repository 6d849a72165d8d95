#include "hooks/nvml_gate.h"

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "driver/deep_sleep.h"
#include "driver/sleep.h"
#include "system/environment.h"

#define GATES 256

/* The arguments of all functions of NVML are words, and at most six. */
#define WORDS uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t

typedef uintptr_t function_of_nvml(WORDS);

static void *_Atomic behind[GATES]; /* the functions behind the gates, in the order in which they were looked up */

static uintptr_t pass(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e, uintptr_t f, unsigned i)
{
        __attribute__((cleanup(gr_pass_end))) struct gr_pass gate = gr_pass_deep();

        return gate.result == CUDA_SUCCESS ? ((function_of_nvml *)atomic_load(&behind[i]))(a, b, c, d, e, f)
                                           : GR_NVML_UNKNOWN;
}

/* A function for each gate. */
#define GATE(i)                                                                                                        \
        static uintptr_t gate_##i(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e, uintptr_t f)        \
        {                                                                                                              \
                return pass(a, b, c, d, e, f, 0x##i);                                                                  \
        }
#define NAME(i)       gate_##i,
#define EIGHT(X, i)   X(i##0) X(i##1) X(i##2) X(i##3) X(i##4) X(i##5) X(i##6) X(i##7)
#define SIXTEEN(X, i) EIGHT(X, i) X(i##8) X(i##9) X(i##A) X(i##B) X(i##C) X(i##D) X(i##E) X(i##F)
#define ALL(X)                                                                                                         \
        SIXTEEN(X, 0)                                                                                                  \
        SIXTEEN(X, 1)                                                                                                  \
        SIXTEEN(X, 2)                                                                                                  \
        SIXTEEN(X, 3)                                                                                                  \
        SIXTEEN(X, 4)                                                                                                  \
        SIXTEEN(X, 5)                                                                                                  \
        SIXTEEN(X, 6)                                                                                                  \
        SIXTEEN(X, 7)                                                                                                  \
        SIXTEEN(X, 8)                                                                                                  \
        SIXTEEN(X, 9)                                                                                                  \
        SIXTEEN(X, A)                                                                                                  \
        SIXTEEN(X, B)                                                                                                  \
        SIXTEEN(X, C)                                                                                                  \
        SIXTEEN(X, D)                                                                                                  \
        SIXTEEN(X, E)                                                                                                  \
        SIXTEEN(X, F)
ALL(GATE)
static function_of_nvml *const gates[GATES] = {ALL(NAME)};

void *gr_nvml_gate(const char *name, void *function)
{
        gr_environment_read();
        /* The turns let a process sleep, too. nvmlErrorString answers a text at once. */
        if ((gr_options.sleep == GR_SLEEP_OFF && gr_options.source[GR_OPTION_TURN] == GR_FROM_DEFAULT) ||
            strcmp(name, "nvmlErrorString") == 0)
                return function;
        for (unsigned i = 0; i < GATES; i++) {
                void *none = NULL;

                if (atomic_compare_exchange_strong(&behind[i], &none, function) || none == function)
                        return (void *)gates[i];
        }
        gr_deep_never(GR_DEEP_IS_UNKNOWN);
        return function;
}
