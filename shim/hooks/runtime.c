/*
 * The shared CUDA runtime, libcudart.so.12 and .13. Its cudaMalloc and cudaFree each make one call of the driver, which
 * is hooked. What the runtime does around that call costs more than the hook (docs/measurements.md, runtime-cost). So
 * the linker binds these functions to the ones below, by the runtime's version of the symbol, and requests that the
 * pool serves bypass the runtime. (dlsym, and programs that ask for no version, do not find them: there the hooks of
 * the driver's functions do the work, as with the static runtime.)
 *
 * This shortcut is taken only where the runtime would do nothing else and no other part could notice:
 * - the runtime has served the calling thread in the current context, and the thread has not chosen a device since: so
 *   there is nothing that the runtime would set up first;
 * - the pool serves the request: a failure must pass through the runtime, which remembers the error;
 * - no profiler has asked CUPTI for the calls of the runtime or the driver, and none was injected;
 * - no other library replaces these functions behind this one;
 * - the process does not end: from then on the driver may refuse calls;
 * - the process does not sleep (driver/sleep.h): a call that fails because of that must pass through the runtime, too.
 */
#include "hooks/runtime.h"

#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "base/log.h"
#include "driver/dlsym.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/context.h"
#include "hooks/memory.h"

#define CUPTI_UNKNOWN 999 /* CUPTI_ERROR_UNKNOWN */

enum shortcut { SHORTCUT_UNKNOWN, SHORTCUT_OPEN, SHORTCUT_SHUT };

struct runtime {
        const char *soname;                     /* also the name of the version of its symbols */
        __typeof__(cudaMalloc) *_Atomic malloc; /* NULL: none is known yet; set last */
        __typeof__(cudaFree) *_Atomic free;
        __typeof__(cudaSetDevice) *_Atomic set_device;
};

static struct runtime runtimes[] = {{.soname = "libcudart.so.12"}, {.soname = "libcudart.so.13"}};

/* Whether requests may bypass the runtime. Once shut, it stays shut. */
static GR_HOT_DATA _Atomic int shortcut = SHORTCUT_UNKNOWN;

/* For gr_context_of_runtime. */
static inline unsigned bit_of(const struct runtime *runtime)
{
        return 1u << (runtime - runtimes);
}

void gr_runtime_watched(const char *by)
{
        GR_KEEP_ERRNO;

        if (atomic_exchange(&shortcut, SHORTCUT_SHUT) != SHORTCUT_SHUT)
                gr_log(GR_LOG_DEBUG, "%s: from now on the runtime sees each cudaMalloc and cudaFree", by);
}

/* Whether the function is in some version of this library. */
static bool is_in(const void *function, const char *library)
{
        char name[32] = "/";
        Dl_info info;

        strncat(name, library, strcspn(library, "0123456789"));
        return dladdr(function, &info) && info.dli_fname && strstr(info.dli_fname, name);
}

/*
 * The function to which the linker would bind the symbol in this version without this library; NULL: none.
 * *ret_stand_in: it is another library's function in place of the runtime's own.
 */
static void *next_symbol(const char *name, const char *library, bool *ret_stand_in)
{
        void *any = gr_real_symbol(RTLD_NEXT, name), *found = dlvsym(RTLD_NEXT, name, library), *own = NULL, *handle;

        /* A runtime that a plug-in has loaded is found by its handle only. The handle keeps it loaded from then on. */
        handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
        if (handle)
                own = dlvsym(handle, name, library);
        dlerror(); /* what is missing is no error of the program's */
        if (any && any != found && any != own && !is_in(any, library))
                found = any; /* a replacement without a version, which serves every version */
        *ret_stand_in = found && found != own;
        return found ? found : own;
}

/* Finds the runtime's functions. Threads that come at the same time find the same. */
static bool find_functions(struct runtime *runtime)
{
        GR_KEEP_ERRNO;
        bool stand_ins[3];
        void *functions[3] = {next_symbol("cudaMalloc", runtime->soname, &stand_ins[0]),
                              next_symbol("cudaFree", runtime->soname, &stand_ins[1]),
                              next_symbol("cudaSetDevice", runtime->soname, &stand_ins[2])};

        if (!functions[0] || !functions[1] || !functions[2])
                return false;
        if (stand_ins[0] || stand_ins[1] || stand_ins[2])
                gr_runtime_watched("another library stands in for the runtime");
        runtime->free = (__typeof__(cudaFree) *)functions[1];
        runtime->set_device = (__typeof__(cudaSetDevice) *)functions[2];
        runtime->malloc = (__typeof__(cudaMalloc) *)functions[0];
        return true;
}

/* Whether there is such a runtime, and its functions are known. */
static inline bool is_found(struct runtime *runtime)
{
        return runtime->malloc || find_functions(runtime);
}

/* The current context, if the shortcut is open and the runtime has nothing left to set up for the thread; else NULL. */
static inline struct gr_context *context_of(const struct runtime *runtime)
{
        return __builtin_expect(!gr_sleep_is_on() &&
                                        atomic_load_explicit(&shortcut, memory_order_relaxed) == SHORTCUT_OPEN &&
                                        atomic_load_explicit(&gr_shim_state, memory_order_acquire) == GR_SHIM_READY,
                                1)
                       ? gr_context_of_runtime(bit_of(runtime))
                       : NULL;
}

/* Called after the runtime has served the thread. */
static void note_used(const struct runtime *runtime)
{
        int unknown = SHORTCUT_UNKNOWN;

        if (atomic_load(&gr_shim_state) != GR_SHIM_READY)
                return;
        if (atomic_load(&shortcut) == SHORTCUT_UNKNOWN) {
                if (getenv("CUDA_INJECTION64_PATH") || getenv("NVTX_INJECTION64_PATH"))
                        gr_runtime_watched("something was injected");
                else
                        atomic_compare_exchange_strong(&shortcut, &unknown, SHORTCUT_OPEN);
        }
        gr_context_runtime_used(bit_of(runtime));
}

/* Allocates through the runtime. refused: the pool's error, which the driver's hook then returns to it; 0: none. */
static __attribute__((noinline)) cudaError_t alloc_by_runtime(struct runtime *runtime, void **ptr, size_t bytes,
                                                              int refused)
{
        cudaError_t result;

        assert(refused <= 0);
        if (!is_found(runtime))
                return cudaErrorInitializationError;
        gr_memory_runtime_refused = refused;
        result = runtime->malloc(ptr, bytes);
        gr_memory_runtime_refused = 0;
        if (result == cudaSuccess && bytes > 0)
                note_used(runtime);
        return result;
}

static __attribute__((noinline)) cudaError_t free_by_runtime(struct runtime *runtime, void *ptr, int refused)
{
        cudaError_t result;

        assert(refused <= 0);
        if (!is_found(runtime))
                return cudaErrorInitializationError;
        gr_memory_runtime_refused = refused;
        result = runtime->free(ptr);
        gr_memory_runtime_refused = 0;
        if (result == cudaSuccess && ptr)
                note_used(runtime);
        return result;
}

static inline cudaError_t serve_alloc(struct runtime *runtime, void **ptr, size_t bytes)
{
        struct gr_context *context = context_of(runtime);
        CUdeviceptr dptr;
        int rc = 0;

        if (__builtin_expect(context && ptr && bytes > 0 && bytes <= GR_BLOCK_MAX_BYTES, 1)) {
                rc = gr_memory_alloc(context, bytes, &dptr);
                if (__builtin_expect(rc == 0, 1)) {
                        *ptr = (void *)(uintptr_t)dptr;
                        return cudaSuccess;
                }
        }
        return alloc_by_runtime(runtime, ptr, bytes, rc);
}

static inline cudaError_t serve_free(struct runtime *runtime, void *ptr)
{
        int rc = 0;

        if (__builtin_expect(ptr && context_of(runtime), 1)) {
                rc = gr_memory_free((CUdeviceptr)(uintptr_t)ptr);
                if (__builtin_expect(rc == 0, 1))
                        return cudaSuccess;
        }
        return free_by_runtime(runtime, ptr, rc);
}

/* Chooses a device: its context becomes current at once, or at the next call. */
static cudaError_t set_device(struct runtime *runtime, int device)
{
        gr_context_runtime_unsure();
        return is_found(runtime) ? runtime->set_device(device) : cudaErrorInitializationError;
}

/* .symver gives these functions the runtime's names and versions. The versions are hidden: no program links to them. */
#define GR_VERSION_OF(number, index)                                                                                   \
        GR_EXPORT cudaError_t gr_malloc_##number(void **ptr, size_t bytes);                                            \
        GR_HOT_CODE GR_EXPORT cudaError_t gr_malloc_##number(void **ptr, size_t bytes)                                 \
        {                                                                                                              \
                return serve_alloc(&runtimes[index], ptr, bytes);                                                      \
        }                                                                                                              \
        GR_EXPORT cudaError_t gr_free_##number(void *ptr);                                                             \
        GR_HOT_CODE GR_EXPORT cudaError_t gr_free_##number(void *ptr)                                                  \
        {                                                                                                              \
                return serve_free(&runtimes[index], ptr);                                                              \
        }                                                                                                              \
        GR_EXPORT cudaError_t gr_set_device_##number(int device);                                                      \
        GR_EXPORT cudaError_t gr_set_device_##number(int device)                                                       \
        {                                                                                                              \
                return set_device(&runtimes[index], device);                                                           \
        }                                                                                                              \
        __asm__(".symver gr_malloc_" #number ", cudaMalloc@libcudart.so." #number);                                    \
        __asm__(".symver gr_free_" #number ", cudaFree@libcudart.so." #number);                                        \
        __asm__(".symver gr_set_device_" #number ", cudaSetDevice@libcudart.so." #number)

GR_VERSION_OF(12, 0);
GR_VERSION_OF(13, 1);

/*
 * The functions of CUPTI by which a profiler asks to see calls. One that looks them up is noticed by dlsym (lookup.c);
 * one with CUPTI built in, by the environment variable that makes the driver load it. Their arguments are passed on as
 * words.
 */
typedef uintptr_t watch_function(uintptr_t, uintptr_t, uintptr_t, uintptr_t);

static uintptr_t call_watched(const char *name, const char *library, const uintptr_t words[4])
{
        GR_KEEP_ERRNO;
        bool stand_in;
        watch_function *function = (watch_function *)next_symbol(name, library, &stand_in);

        gr_runtime_watched(name);
        return function ? function(words[0], words[1], words[2], words[3]) : CUPTI_UNKNOWN;
}

#define GR_WATCH(symbol, number)                                                                                       \
        GR_EXPORT uintptr_t gr_##symbol##_##number(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d);                \
        GR_EXPORT uintptr_t gr_##symbol##_##number(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d)                 \
        {                                                                                                              \
                return call_watched(#symbol, "libcupti.so." #number, (const uintptr_t[4]){a, b, c, d});                \
        }                                                                                                              \
        __asm__(".symver gr_" #symbol "_" #number ", " #symbol "@libcupti.so." #number);

#define GR_HOOK(symbol)
#define GR_CALL(symbol)
#define GR_NEED(symbol)
#define GR_CUPTI(symbol) GR_WATCH(symbol, 12) GR_WATCH(symbol, 13)
#include "driver/hooks.def"
