/*
 * The ways in which programs look up functions of the driver, each of which must lead to the hooks:
 * - symbols: the library exports the hooks (the version script of exports.sh);
 * - dlsym: dlsym.S and gr_dlsym_hook;
 * - cuGetProcAddress: the driver is asked first, and its answer is then recognised by address. So versions, per-thread
 *   variants, flags and status are the driver's own.
 */
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>

#include "base/log.h"
#include "driver/nvml.h"
#include "gpureclaim.h"
#include "lookup/dlsym.h"
#include "process/platform.h"
#include "shim.h"

#define DRIVER_LIBRARY "libcuda.so.1"

struct symbol {
        const char *name;
        size_t offset; /* of its pointer in struct gr_real */
        void *hook;    /* NULL: there is none, the library only calls the function */
        bool needed;
};

__attribute__((visibility("hidden"))) void *gr_dlsym_hook(void *handle, const char *name);

static struct gr_lock resolve_lock = GR_LOCK_INIT(GR_RANK_RESOLVE); /* held while UNRESOLVED or ENDING changes */

/* POSIX allows the address of a function in a void *. */
static const struct symbol symbols[] = {
#define GR_HOOK(symbol)        {#symbol, offsetof(struct gr_real, symbol), (void *)symbol, false},
#define GR_HOOK_NEEDED(symbol) {#symbol, offsetof(struct gr_real, symbol), (void *)symbol, true},
#define GR_CALL(symbol)        {#symbol, offsetof(struct gr_real, symbol), NULL, false},
#define GR_NEED(symbol)        {#symbol, offsetof(struct gr_real, symbol), NULL, true},
#include "lookup/hooks.def"
#undef GR_HOOK
#undef GR_CALL
#undef GR_NEED
};

#define SYMBOLS (sizeof(symbols) / sizeof(symbols[0]))

static void **real_slot(const struct symbol *symbol)
{
        return (void **)((char *)&gr_real + symbol->offset);
}

/* The driver's handle; NULL where the program has not loaded it. The handle keeps it loaded. */
static void *driver_handle(void)
{
        return dlopen(DRIVER_LIBRARY, RTLD_LAZY | RTLD_NOLOAD);
}

/*
 * Must be called without a lock of this library. The look-ups take the loader's lock. Another thread may hold that
 * while it runs the constructors of a library, which may call hooks and wait for a lock of this library. Threads that
 * come here at the same time find the same symbols.
 */
static bool find_symbols(void *ret[SYMBOLS])
{
        void *driver = driver_handle();

        for (size_t i = 0; driver && i < SYMBOLS; i++)
                ret[i] = gr_real_symbol(driver, symbols[i].name);
        dlerror(); /* clears it: a missing symbol is not an error of the program */
        return driver != NULL;
}

/* resolve_lock held. */
GR_HELD(resolve_lock) static enum gr_shim_state set_up_locked(void *const found[SYMBOLS])
{
        gr_assert_locked(&resolve_lock);
        gr_process_options();
        gr_nvml_dlsym = gr_real_symbol;
        for (size_t i = 0; i < SYMBOLS; i++)
                *real_slot(&symbols[i]) = found[i];
        for (size_t i = 0; i < SYMBOLS; i++)
                if (!found[i] && symbols[i].needed) {
                        gr_log(GR_LOG_WARN, "the driver lacks %s: every call passes through unchanged",
                               symbols[i].name);
                        return GR_SHIM_OFF;
                }
        gr_process_init();
        return GR_SHIM_READY;
}

bool gr_shim_resolve(void)
{
        uint64_t begin_ns = gr_system_now_ns(), begin_thread_ns = gr_system_thread_ns();
        GR_KEEP_ERRNO;
        int state = atomic_load(&gr_shim_state);
        void *found[SYMBOLS];
        CUcontext context;

        if (state == GR_SHIM_UNRESOLVED && !find_symbols(found)) {
                return false;
        }
        gr_lock(&resolve_lock);
        if (state == GR_SHIM_UNRESOLVED && atomic_load(&gr_shim_state) == GR_SHIM_UNRESOLVED) {
                state = set_up_locked(found);
                gr_log(GR_LOG_DEBUG, "set up in %" PRIu64 " us, %" PRIu64 " us of the processor",
                       (gr_system_now_ns() - begin_ns) / 1000, (gr_system_thread_ns() - begin_thread_ns) / 1000);
                atomic_store_explicit(&gr_shim_state, state, memory_order_release);
        }
        state = atomic_load(&gr_shim_state);
        if (state == GR_SHIM_ENDING && gr_real.cuCtxGetCurrent(&context) == CUDA_ERROR_DEINITIALIZED) {
                /* The driver would refuse the program what the cache could still serve, so the cache must stop. */
                state = GR_SHIM_OFF;
                atomic_store(&gr_shim_state, state);
        }
        gr_unlock(&resolve_lock);
        return state == GR_SHIM_READY || state == GR_SHIM_ENDING;
}

/* The hook of one of the driver's functions; function itself where there is none. */
static void *swap(void *function)
{
        if (function)
                for (size_t i = 0; i < SYMBOLS; i++)
                        if (symbols[i].hook && *real_slot(&symbols[i]) == function)
                                return symbols[i].hook;
        return function;
}

/* Whether function is a hook without a function of the driver behind it: no driver, or one that lacks the function. */
static bool is_hollow(const void *function, bool ready)
{
        for (size_t i = 0; i < SYMBOLS; i++)
                if (symbols[i].hook == function)
                        return !ready || !*real_slot(&symbols[i]);
        return false;
}

#define AS_IF_ABSENT NULL
#define ANSWER_NULL  ((void *)1)

/* As gr_dlsym_hook, for names that begin with 'n'. */
static void *nvml_symbol(void *handle, const char *name)
{
        void *hook = gr_nvml_hook(name), *found = hook ? gr_real_symbol(handle, name) : NULL, *swapped;

        if (!found)
                return AS_IF_ABSENT;
        if (found == hook) { /* this library's own export, as in gr_dlsym_hook */
                found = gr_real_symbol(RTLD_NEXT, name);
                return found ? gr_nvml_swap(found) : ANSWER_NULL;
        }
        swapped = gr_nvml_swap(found);
        return swapped != found ? swapped : AS_IF_ABSENT;
}

/* Called by dlsym.S, which says what the answers mean. */
void *gr_dlsym_hook(void *handle, const char *name)
{
        void *found, *hook;
        bool ready;

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
        /* RTLD_DEFAULT and the program's handle find the exports of this library: these must not stand for a driver. */
        if (is_hollow(found, ready)) {
                found = gr_real_symbol(RTLD_NEXT, name);
                return found ? found : ANSWER_NULL;
        }
        if (!ready)
                return AS_IF_ABSENT;
        hook = swap(found);
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
                *pfn = swap(*pfn);
        return result;
}

GR_EXPORT CUresult CUDAAPI cuGetProcAddress(const char *symbol, void **pfn, int cuda_version, cuuint64_t flags)
{
        CUresult result;

        if (!gr_shim_ready())
                return GR_REAL(cuGetProcAddress, symbol, pfn, cuda_version, flags);
        result = GR_REAL(cuGetProcAddress, symbol, pfn, cuda_version, flags);
        if (result == CUDA_SUCCESS && pfn)
                *pfn = swap(*pfn);
        return result;
}

/* For `gpureclaim doctor`: the names of all hooks, NULL-terminated. */
GR_EXPORT const char *const *gpureclaim_hooked_symbols(void);
GR_EXPORT const char *const *gpureclaim_hooked_symbols(void)
{
        static const char *const names[] = {
#define GR_HOOK(symbol) #symbol,
#define GR_CALL(symbol)
#define GR_NEED(symbol)
#include "lookup/hooks.def"
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
