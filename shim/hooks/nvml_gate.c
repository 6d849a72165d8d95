#include "hooks/nvml_gate.h"

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "driver/sleep.h"
#include "system/environment.h"

#define GATES 512 /* more than NVML has functions now */

/* The arguments of all functions of NVML are words, and at most six. */
#define WORDS uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t

typedef uintptr_t function_of_nvml(WORDS);

static void *_Atomic behind[GATES]; /* the functions behind the gates, in the order in which they were looked up */

__attribute__((noinline)) static uintptr_t pass(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e,
                                                uintptr_t f, unsigned i)
{
        __attribute__((cleanup(gr_pass_end))) struct gr_pass gate = gr_pass_deep();

        return gate.result == CUDA_SUCCESS ? ((function_of_nvml *)atomic_load(&behind[i]))(a, b, c, d, e, f)
                                           : GR_NVML_UNKNOWN;
}

/* A function for each gate; their numbers are octal. */
#define GATE(i)                                                                                                        \
        static uintptr_t gate_##i(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e, uintptr_t f)        \
        {                                                                                                              \
                return pass(a, b, c, d, e, f, 0##i);                                                                   \
        }
#define NAME(i)     gate_##i,
#define EIGHT(X, i) X(i##0) X(i##1) X(i##2) X(i##3) X(i##4) X(i##5) X(i##6) X(i##7)
#define SIXTY_FOUR(X, i)                                                                                               \
        EIGHT(X, i##0)                                                                                                 \
        EIGHT(X, i##1)                                                                                                 \
        EIGHT(X, i##2)                                                                                                 \
        EIGHT(X, i##3)                                                                                                 \
        EIGHT(X, i##4)                                                                                                 \
        EIGHT(X, i##5)                                                                                                 \
        EIGHT(X, i##6)                                                                                                 \
        EIGHT(X, i##7)
#define ALL(X)                                                                                                         \
        SIXTY_FOUR(X, 0)                                                                                               \
        SIXTY_FOUR(X, 1)                                                                                               \
        SIXTY_FOUR(X, 2)                                                                                               \
        SIXTY_FOUR(X, 3)                                                                                               \
        SIXTY_FOUR(X, 4)                                                                                               \
        SIXTY_FOUR(X, 5)                                                                                               \
        SIXTY_FOUR(X, 6)                                                                                               \
        SIXTY_FOUR(X, 7)
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
        return gr_sleep_never_deeply(GR_DEEP_IS_UNKNOWN) == CUDA_SUCCESS ? function : NULL;
}
