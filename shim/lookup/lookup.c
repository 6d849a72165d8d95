/*
 * The ways in which programs look up functions of the driver, each of which must lead to the hooks:
 * - symbols: the library exports the hooks (the version script of exports.sh);
 * - dlsym: dlsym.S and gr_lookup_dlsym;
 * - cuGetProcAddress: the driver is asked first, and its answer is then recognised by address. So versions, per-thread
 *   variants, flags and status are the driver's own.
 */
#include <assert.h>
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

#include "base/log.h"
#include "driver/dlsym.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "gpureclaim.h"
#include "hooks/nvml_gate.h"
#include "hooks/nvml_views.h"
#include "hooks/runtime.h"

__attribute__((visibility("hidden"))) void *gr_lookup_dlsym(void *handle, const char *name);

/* Not all of these are declared in cuda.h. */
#define GR_HOOK(symbol)
#define GR_CALL(symbol)
#define GR_NEED(symbol)
#define GR_DEEP(symbol) GR_EXPORT void gr_deep_##symbol(void) __asm__(#symbol);
#include "driver/hooks.def"
#undef GR_HOOK
#undef GR_CALL
#undef GR_NEED

/* The hooks, and where struct gr_real has the functions behind them. POSIX allows a function's address in a void *. */
static const struct {
        void *hook;
        size_t offset;
        bool gated; /* nothing but the sleep gate */
} hooks[] = {
#define GR_HOOK(symbol)       {(void *)symbol, offsetof(struct gr_real, symbol), false},
#define GR_HOOK_GATED(symbol) {(void *)symbol, offsetof(struct gr_real, symbol), true},
#define GR_CALL(symbol)
#define GR_NEED(symbol)
#define GR_DEEP(symbol) {(void *)gr_deep_##symbol, offsetof(struct gr_real, deep_##symbol), true},
#include "driver/hooks.def"
#undef GR_HOOK
#undef GR_CALL
#undef GR_NEED
};

#define HOOKS (sizeof(hooks) / sizeof(hooks[0]))

static void *real_of(size_t hook)
{
        return *(void **)((char *)&gr_real + hooks[hook].offset);
}

/*
 * The hook of one of the driver's functions, which may be that hook already; function itself where there is none. While
 * the process may not sleep, the driver's functions that have only the gate are not hooked.
 */
static void *swap_function(void *function)
{
        if (function)
                for (size_t i = 0; i < HOOKS; i++)
                        if (real_of(i) == function || hooks[i].hook == function)
                                return hooks[i].gated && !gr_sleep_is_on() ? real_of(i) : hooks[i].hook;
        return function;
}

static bool is_hook(const void *function)
{
        for (size_t i = 0; i < HOOKS; i++)
                if (hooks[i].hook == function)
                        return true;
        return false;
}

/*
 * The program has looked up a function of the driver that no hook is for. If it is none of those that the driver serves
 * at once, calls of it would wait in a deep sleep until something else ends that.
 */
static CUresult note_unhooked(const char *name)
{
        static const char *const passes[] = {
#define GR_HOOK(symbol)
#define GR_CALL(symbol)
#define GR_NEED(symbol)
#define GR_PASSES(name) #name,
#include "driver/hooks.def"
#undef GR_HOOK
#undef GR_CALL
#undef GR_NEED
        };

        for (size_t i = 0; i < sizeof(passes) / sizeof(passes[0]); i++) {
                size_t length = strlen(passes[i]);

                if (strncmp(name, passes[i], length) == 0 && (!name[length] || name[length] == '_'))
                        return CUDA_SUCCESS;
        }
        gr_log(GR_LOG_DEBUG, "looked up, and not known: %s", name);
        return gr_sleep_never_deeply(GR_DEEP_IS_UNKNOWN);
}

/* As swap_function, for a function that the driver has told. NULL, with an error: the program must not have it now. */
static CUresult swap_told(const char *name, void **function)
{
        CUresult result = CUDA_SUCCESS;

        *function = swap_function(*function);
        if (*function && gr_sleep_is_on() && !is_hook(*function))
                result = note_unhooked(name);
        if (result != CUDA_SUCCESS)
                *function = NULL;
        return result;
}

static bool is_of(const char *library, const void *function)
{
        Dl_info info;

        return dladdr(function, &info) && info.dli_fname && strstr(info.dli_fname, library);
}

/* Whether function, which was found by this name, is the driver's. */
static bool is_of_driver(const char *name, const void *function)
{
        return name[2] >= 'A' && name[2] <= 'Z' && is_of("/libcuda.", function);
}

/* Whether function is a hook without a function of the driver behind it: no driver, or one that lacks the function. */
static bool is_hollow(const void *function, bool ready)
{
        for (size_t i = 0; i < HOOKS; i++)
                if (hooks[i].hook == function)
                        return !ready || !real_of(i);
        return false;
}

#define AS_IF_ABSENT NULL
#define ANSWER_NULL  ((void *)1)

/* As gr_lookup_dlsym, for names that begin with 'n'. */
static void *nvml_symbol(void *handle, const char *name)
{
        void *seen = gr_real_symbol(handle, name), *found = seen, *swapped;

        if (!found)
                return AS_IF_ABSENT;
        if (found == gr_nvml_views_hook(name)) /* this library's own export, as in gr_lookup_dlsym */
                found = gr_real_symbol(RTLD_NEXT, name);
        if (!found)
                return ANSWER_NULL;
        swapped = gr_nvml_views_swap(found);
        if (swapped == found && is_of("/libnvidia-ml.", found)) /* other libraries have such names, too */
                swapped = gr_nvml_gate(name, found);
        return !swapped ? ANSWER_NULL : swapped != seen ? swapped : AS_IF_ABSENT;
}

/* Called by dlsym.S, which says what the answers mean. */
void *gr_lookup_dlsym(void *handle, const char *name)
{
        void *found, *hook;
        bool ready;

        assert(handle != RTLD_NEXT && (name[0] == 'n' || (name[0] == 'c' && name[1] == 'u'))); /* as dlsym.S asks */
        if (name[0] == 'n')
                return nvml_symbol(handle, name);
        if (name[2] == 'p') { /* a program that looks up these functions of CUPTI is about to observe calls */
                if (strncmp(name, "cuptiActivityEnable", 19) == 0 || strncmp(name, "cuptiEnable", 11) == 0)
                        gr_runtime_watched(name);
                return AS_IF_ABSENT;
        }
        found = gr_real_symbol(handle, name);
        if (!found)
                return AS_IF_ABSENT;
        ready = gr_shim_ready();
        /*
         * RTLD_DEFAULT and the program's handle find what this library exports, also where there is no driver. The
         * program must not take such an export for a function of a driver.
         */
        if (is_hollow(found, ready)) {
                found = gr_real_symbol(RTLD_NEXT, name);
                return found ? found : ANSWER_NULL;
        }
        if (!ready)
                return AS_IF_ABSENT;
        hook = found;
        if (!gr_sleep_is_on() || !is_of_driver(name, found))
                hook = swap_function(found);
        else if (swap_told(name, &hook) != CUDA_SUCCESS)
                return ANSWER_NULL;
        return hook != found ? hook : AS_IF_ABSENT;
}

GR_EXPORT CUresult CUDAAPI cuGetProcAddress_v2(const char *symbol, void **pfn, int cuda_version, cuuint64_t flags,
                                               CUdriverProcAddressQueryResult *symbol_status)
{
        CUresult result;

        if (!gr_shim_ready())
                return GR_REAL(cuGetProcAddress_v2, symbol, pfn, cuda_version, flags, symbol_status);
        result = GR_REAL(cuGetProcAddress_v2, symbol, pfn, cuda_version, flags, symbol_status);
        if (result == CUDA_SUCCESS && pfn)
                result = swap_told(symbol, pfn);
        return result;
}

GR_EXPORT CUresult CUDAAPI cuGetProcAddress(const char *symbol, void **pfn, int cuda_version, cuuint64_t flags)
{
        CUresult result;

        if (!gr_shim_ready())
                return GR_REAL(cuGetProcAddress, symbol, pfn, cuda_version, flags);
        result = GR_REAL(cuGetProcAddress, symbol, pfn, cuda_version, flags);
        if (result == CUDA_SUCCESS && pfn)
                result = swap_told(symbol, pfn);
        return result;
}

/* For `gpureclaim doctor`: the names of the hooks that every program gets, NULL-terminated. */
GR_EXPORT const char *const *gpureclaim_hooked_symbols(void);
GR_EXPORT const char *const *gpureclaim_hooked_symbols(void)
{
        static const char *const names[] = {
#define GR_HOOK(symbol) #symbol,
#define GR_HOOK_GATED(symbol)
#define GR_CALL(symbol)
#define GR_NEED(symbol)
#include "driver/hooks.def"
#undef GR_HOOK
#undef GR_CALL
#undef GR_NEED
                NULL};

        return names;
}

GR_EXPORT const char *gpureclaim_version(void)
{
        return GR_VERSION;
}
