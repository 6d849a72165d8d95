/*
 * How programs find the driver's functions, and how they find ours instead: exported symbols (the version script),
 * dlsym (dlsym.S and gr_dlsym_hook), and cuGetProcAddress, which is asked first and whose answer is then recognised by
 * address, so that versions, per-thread variants, flags and status are right by construction.
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
        void *hook;    /* NULL: only called */
        bool needed;
};

struct gr_real gr_real;
GR_HOT_DATA _Atomic int gr_shim_state = GR_SHIM_UNRESOLVED;

/* Used by dlsym.S. Every writer writes the same value. */
__attribute__((visibility("hidden"))) dlsym_function *gr_real_dlsym;
__attribute__((visibility("hidden"))) dlsym_function *gr_find_real_dlsym(void);
__attribute__((visibility("hidden"))) void *gr_dlsym_hook(void *handle, const char *name);

static pthread_mutex_t resolve_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the way from UNRESOLVED to another state */

/* POSIX lets a function's address travel through void *. */
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

dlsym_function *gr_find_real_dlsym(void)
{
        dlsym_function *real = __atomic_load_n(&gr_real_dlsym, __ATOMIC_RELAXED);

        if (!real) {
                real = gr_next_dlsym();
                __atomic_store_n(&gr_real_dlsym, real, __ATOMIC_RELAXED);
        }
        return real;
}

void *gr_real_symbol(void *handle, const char *name)
{
        return gr_find_real_dlsym()(handle, name);
}

/* The driver's handle where it is loaded; loading it is the program's affair. Keeps it loaded from then on. */
static void *driver_handle(void)
{
        return dlopen(DRIVER_LIBRARY, RTLD_LAZY | RTLD_NOLOAD);
}

/*
 * No lock of ours held: these take the loader's, which a thread holds while the constructors of what it loads run, and
 * these may call us. Whoever comes at the same time finds the same.
 */
static bool find_symbols(void *ret[SYMBOLS])
{
        void *driver = driver_handle();

        for (size_t i = 0; driver && i < SYMBOLS; i++)
                ret[i] = gr_real_symbol(driver, symbols[i].name);
        dlerror(); /* what is missing is no error of the program's */
        return driver != NULL;
}

/* Resolve lock held. */
static enum gr_shim_state set_up_locked(void *const found[SYMBOLS])
{
        gr_process_options();
        gr_nvml_dlsym = gr_find_real_dlsym();
        for (size_t i = 0; i < SYMBOLS; i++)
                *real_slot(&symbols[i]) = found[i];
        for (size_t i = 0; i < SYMBOLS; i++)
                if (!found[i] && symbols[i].needed) {
                        gr_log(GR_LOG_WARN, "the driver lacks %s: every call passes through unchanged",
                               symbols[i].name);
                        return GR_SHIM_OFF;
                }
        gr_driver_init();
        gr_process_init();
        return GR_SHIM_READY;
}

bool gr_shim_resolve(void)
{
        uint64_t begin_ns = gr_system_now_ns(), begin_thread_ns = gr_system_thread_ns();
        int saved_errno = errno, state = atomic_load(&gr_shim_state);
        void *found[SYMBOLS];
        CUcontext context;

        if (state == GR_SHIM_UNRESOLVED && !find_symbols(found)) {
                errno = saved_errno;
                return false;
        }
        pthread_mutex_lock(&resolve_lock);
        if (state == GR_SHIM_UNRESOLVED && atomic_load(&gr_shim_state) == GR_SHIM_UNRESOLVED) {
                state = set_up_locked(found);
                gr_log(GR_LOG_DEBUG, "set up in %" PRIu64 " us, %" PRIu64 " us of the processor",
                       (gr_system_now_ns() - begin_ns) / 1000, (gr_system_thread_ns() - begin_thread_ns) / 1000);
                atomic_store_explicit(&gr_shim_state, state, memory_order_release);
        }
        state = atomic_load(&gr_shim_state);
        if (state == GR_SHIM_ENDING && gr_real.cuCtxGetCurrent(&context) == CUDA_ERROR_DEINITIALIZED) {
                /* What the cache would still serve, the program is natively refused. */
                state = GR_SHIM_OFF;
                atomic_store(&gr_shim_state, state);
        }
        pthread_mutex_unlock(&resolve_lock);
        errno = saved_errno;
        return state == GR_SHIM_READY || state == GR_SHIM_ENDING;
}

/* Our hook for one of the driver's functions, or the function itself. */
static void *swap(void *function)
{
        if (function)
                for (size_t i = 0; i < SYMBOLS; i++)
                        if (symbols[i].hook && *real_slot(&symbols[i]) == function)
                                return symbols[i].hook;
        return function;
}

/* Whether this is a hook of ours for something that the driver does not have, or that has no driver behind it. */
static bool is_hollow(const void *function, bool ready)
{
        for (size_t i = 0; i < SYMBOLS; i++)
                if (symbols[i].hook == function)
                        return !ready || !*real_slot(&symbols[i]);
        return false;
}

#define AS_IF_ABSENT NULL
#define ANSWER_NULL  ((void *)1)

static void *nvml_symbol(void *handle, const char *name)
{
        void *hook = gr_nvml_hook(name), *found = hook ? gr_real_symbol(handle, name) : NULL, *swapped;

        if (!found)
                return AS_IF_ABSENT;
        if (found == hook) { /* our own export, as below */
                found = gr_real_symbol(RTLD_NEXT, name);
                return found ? gr_nvml_swap(found) : ANSWER_NULL;
        }
        swapped = gr_nvml_swap(found);
        return swapped != found ? swapped : AS_IF_ABSENT;
}

void *gr_dlsym_hook(void *handle, const char *name)
{
        void *found, *hook;
        bool ready;

        if (name[0] == 'n')
                return nvml_symbol(handle, name);
        if (name[2] == 'p') { /* who looks up how to ask CUPTI for calls will do so */
                if (strncmp(name, "cuptiActivityEnable", 19) == 0 || strncmp(name, "cuptiEnable", 11) == 0)
                        gr_runtime_watched(name);
                return AS_IF_ABSENT;
        }
        found = gr_find_real_dlsym()(handle, name);
        if (!found)
                return AS_IF_ABSENT;
        ready = gr_shim_ready();
        /* Our own exports, which RTLD_DEFAULT and the program's handle find, must not pretend to be a driver's. */
        if (is_hollow(found, ready)) {
                found = gr_find_real_dlsym()(RTLD_NEXT, name);
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

/* For `gpureclaim doctor`: what would be hooked, NULL-terminated. */
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
