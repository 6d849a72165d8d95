/* The driver's own functions, and what every part of the shim shares. */
#include "driver/real.h"

#include <assert.h>
#include <dlfcn.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>

#include "base/log.h"
#include "base/no_cancel.h"
#include "driver/dlsym.h"
#include "system/environment.h"
#include "system/platform.h"

#define DRIVER_LIBRARY "libcuda.so.1"

struct gr_real gr_real;
/* First of the hot data that is linked, so that all of it lies in one cache line. */
GR_HOT_DATA _Atomic int gr_shim_state __attribute__((aligned(GR_LINE_BYTES))) = GR_SHIM_UNRESOLVED;
struct gr_core gr_core;

/* Used by dlsym.S. Every writer writes the same value. */
GR_HIDDEN dlsym_function *gr_real_dlsym;
GR_HIDDEN dlsym_function *gr_real_find_dlsym(void);

dlsym_function *gr_real_find_dlsym(void)
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
        return gr_real_find_dlsym()(handle, name);
}

static const struct symbol {
        const char *name;
        size_t offset; /* of its pointer in gr_real */
        bool needed;
} symbols[] = {
#define GR_HOOK(symbol)        {#symbol, offsetof(struct gr_real, symbol), false},
#define GR_HOOK_NEEDED(symbol) {#symbol, offsetof(struct gr_real, symbol), true},
#define GR_CALL(symbol)        {#symbol, offsetof(struct gr_real, symbol), false},
#define GR_NEED(symbol)        {#symbol, offsetof(struct gr_real, symbol), true},
#define GR_DEEP(symbol)        {#symbol, offsetof(struct gr_real, deep_##symbol), false},
#include "driver/hooks.def"
#undef GR_HOOK
#undef GR_CALL
#undef GR_NEED
};

#define SYMBOLS (sizeof(symbols) / sizeof(symbols[0]))

/*
 * Must be called without a lock of this library. The look-ups take the loader's lock. Another thread may hold that
 * while it runs the constructors of a library, which may call hooks and wait for a lock of this library. Threads that
 * come here at the same time find the same symbols. False: the program has not loaded the driver. Once found, it stays
 * loaded.
 */
static bool find_symbols(void *ret[SYMBOLS])
{
        void *driver = dlopen(DRIVER_LIBRARY, RTLD_LAZY | RTLD_NOLOAD);

        for (size_t i = 0; driver && i < SYMBOLS; i++)
                ret[i] = gr_real_symbol(driver, symbols[i].name);
        dlerror(); /* clears it: a missing symbol is not an error of the program */
        return driver != NULL;
}

/* Held when gr_shim_state leaves UNRESOLVED or ENDING, except in a child after fork. */
static struct gr_lock resolve_lock = GR_LOCK_INIT(GR_RANK_RESOLVE);

GR_HELD(resolve_lock) static enum gr_shim_state set_up_locked(void *const found[SYMBOLS])
{
        gr_assert_locked(&resolve_lock);
        assert(atomic_load(&gr_shim_state) == GR_SHIM_UNRESOLVED); /* else the core would be set up twice */
        gr_environment_read();
        for (size_t i = 0; i < SYMBOLS; i++)
                *(void **)((char *)&gr_real + symbols[i].offset) = found[i];
        for (size_t i = 0; i < SYMBOLS; i++)
                if (!found[i] && symbols[i].needed) {
                        gr_log(GR_LOG_WARN, "the driver lacks %s: every call passes through unchanged",
                               symbols[i].name);
                        return GR_SHIM_OFF;
                }
        __start_gr_set_up.set_up();
        return GR_SHIM_READY;
}

static _Thread_local bool locked_to_fork;

/*
 * A child of fork has only the thread that forked, so a set-up that another thread is in would never end there.
 * Therefore fork waits for it: the program may not have used the driver yet, and then the child may. After the set-up
 * the lock is not taken, because the driver itself forks, to load its kernel module, and may be called under any lock.
 */
GR_NOT_CHECKED static void before_fork(void)
{
        if (locked_to_fork || atomic_load(&gr_shim_state) != GR_SHIM_UNRESOLVED)
                return;
        gr_lock(&resolve_lock);
        locked_to_fork = true;
}

GR_NOT_CHECKED static void after_fork(void)
{
        if (!locked_to_fork)
                return;
        locked_to_fork = false;
        gr_unlock(&resolve_lock);
}

static void after_fork_in_child(void)
{
        after_fork();
        __start_gr_set_up.in_child();
}

static void watch_forks(void)
{
        pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

bool gr_real_resolve(void)
{
        uint64_t begin_ns = gr_platform_now_ns(), begin_thread_ns = gr_platform_thread_ns();
        GR_KEEP_ERRNO;
        static pthread_once_t once = PTHREAD_ONCE_INIT;
        int state = atomic_load(&gr_shim_state);
        void *found[SYMBOLS];
        CUcontext context;
        sigset_t all, before;
        GR_NO_CANCEL;

        if (state == GR_SHIM_UNRESOLVED && !find_symbols(found))
                return false;
        /* A signal handler that forks would wait for the lock that this thread holds. */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        /* Outside the lock: pthread_atfork waits for a fork that is going on, which may wait for the lock. */
        pthread_once(&once, watch_forks);
        gr_lock(&resolve_lock);
        if (state == GR_SHIM_UNRESOLVED && atomic_load(&gr_shim_state) == GR_SHIM_UNRESOLVED) {
                state = set_up_locked(found);
                gr_log(GR_LOG_DEBUG, "set up in %" PRIu64 " us, %" PRIu64 " us of the processor",
                       (gr_platform_now_ns() - begin_ns) / 1000, (gr_platform_thread_ns() - begin_thread_ns) / 1000);
                atomic_store_explicit(&gr_shim_state, state, memory_order_release);
        }
        state = atomic_load(&gr_shim_state);
        if (state == GR_SHIM_ENDING && gr_real.cuCtxGetCurrent(&context) == CUDA_ERROR_DEINITIALIZED) {
                /* The driver has shut down and refuses every request, so the pool must not serve any from its cache. */
                state = GR_SHIM_OFF;
                atomic_store(&gr_shim_state, state);
        }
        gr_unlock(&resolve_lock);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        return state == GR_SHIM_READY || state == GR_SHIM_ENDING;
}

bool gr_real_uuid(CUdevice dev, CUuuid *ret, char *ret_text)
{
        CUuuid uuid;
        size_t at = 0;

        assert(ret || ret_text);
        /* _v2 tells MIG instances of one GPU apart. */
        if ((!gr_real.cuDeviceGetUuid_v2 || gr_real.cuDeviceGetUuid_v2(&uuid, dev) != CUDA_SUCCESS) &&
            (!gr_real.cuDeviceGetUuid || gr_real.cuDeviceGetUuid(&uuid, dev) != CUDA_SUCCESS))
                return false;
        if (ret)
                *ret = uuid;
        for (size_t i = 0; ret_text && i < sizeof(uuid.bytes); i++)
                at += (size_t)snprintf(ret_text + at, GR_UUID_TEXT_BYTES - at, "%s%02x",
                                       i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", (unsigned char)uuid.bytes[i]);
        return true;
}

CUresult gr_real_given(CUresult result, const CUdeviceptr *dptr)
{
        GR_KEEP_ERRNO;

        if (result == CUDA_SUCCESS && gr_shim_ready())
                gr_pool_given(&gr_core, *dptr);
        return result;
}
