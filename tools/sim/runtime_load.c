/* Reaching the driver, and the thread's device, context and last error. */
#include "runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

struct rt_driver rt_driver;

static pthread_once_t load_once = PTHREAD_ONCE_INIT;
static cudaError_t load_rc;
static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
static CUcontext contexts[64]; /* retained primary ones, by device. Guarded by contexts_lock */
static atomic_uint resets;     /* number of resets: a context that a thread noted before the last one is stale */

static _Thread_local struct {
        cudaError_t last;
        int device;
        unsigned resets;
        int has_context;
} thread;

static const struct {
        const char *name;
        int version;
        size_t offset;
} wanted[] = {
#define RT_DRIVER(name, version) {#name, version, offsetof(struct rt_driver, name)},
#include "runtime_driver.def"
#undef RT_DRIVER
};

static void load_driver(void)
{
        PFN_cuGetProcAddress_v12000 look_up = NULL, first;
        PFN_cuInit_v2000 init = NULL;
        CUdriverProcAddressQueryResult status;
        void *handle = dlopen("libcuda.so.1", RTLD_NOW);
        CUresult rc;

        load_rc = cudaErrorInsufficientDriver;
        if (!handle)
                return;
        *(void **)&first = dlsym(handle, "cuGetProcAddress_v2");
        /* As the real runtime: the second cuGetProcAddress comes from the first, so a hook can replace it here. */
        if (!first || first("cuInit", (void **)&init, 2000, CU_GET_PROC_ADDRESS_DEFAULT, &status) || !init ||
            first("cuGetProcAddress", (void **)&look_up, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &status) || !look_up)
                return;
        for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
                void *function = NULL;

                if (look_up(wanted[i].name, &function, wanted[i].version, CU_GET_PROC_ADDRESS_DEFAULT, &status) ||
                    !function)
                        return;
                memcpy((char *)&rt_driver + wanted[i].offset, &function, sizeof function);
        }
        rc = init(0);
        load_rc = (cudaError_t)rc;
}

cudaError_t rt_failed(cudaError_t rc)
{
        if (rc != cudaSuccess)
                thread.last = rc;
        return rc;
}

cudaError_t rt_result(CUresult rc)
{
        /* The codes of the two interfaces are the same numbers, with few exceptions. */
        if (rc == CUDA_ERROR_INVALID_CONTEXT)
                return rt_failed(cudaErrorDeviceUninitialized);
        return rt_failed((cudaError_t)rc);
}

cudaError_t rt_load(void)
{
        pthread_once(&load_once, load_driver);
        return rt_failed(load_rc);
}

static CUresult make_current(int device)
{
        CUresult rc = CUDA_SUCCESS;
        unsigned seen = atomic_load(&resets);

        pthread_mutex_lock(&contexts_lock);
        if (!contexts[device])
                rc = rt_driver.cuDevicePrimaryCtxRetain(&contexts[device], device);
        if (rc == CUDA_SUCCESS)
                rc = rt_driver.cuCtxSetCurrent(contexts[device]);
        pthread_mutex_unlock(&contexts_lock);
        if (rc == CUDA_SUCCESS) {
                thread.has_context = 1;
                thread.resets = seen;
        }
        return rc;
}

cudaError_t rt_enter(void)
{
        CUcontext current = NULL;

        if (rt_load() != cudaSuccess)
                return load_rc;
        /* A current context is used, unless it ended with a reset. */
        if ((!thread.has_context || thread.resets == atomic_load(&resets)) &&
            rt_driver.cuCtxGetCurrent(&current) == CUDA_SUCCESS && current) {
                thread.has_context = 1;
                thread.resets = atomic_load(&resets);
                return cudaSuccess;
        }
        return rt_result(make_current(thread.device));
}

cudaError_t cudaGetLastError(void)
{
        cudaError_t rc = thread.last;

        thread.last = cudaSuccess;
        return rc;
}

cudaError_t cudaPeekAtLastError(void)
{
        return thread.last;
}

cudaError_t cudaSetDevice(int device)
{
        int count;

        if (rt_load() != cudaSuccess)
                return load_rc;
        if (rt_driver.cuDeviceGetCount(&count) != CUDA_SUCCESS || device < 0 || device >= count)
                return rt_failed(cudaErrorInvalidDevice);
        thread.device = device;
        return rt_result(make_current(device));
}

cudaError_t cudaGetDevice(int *device)
{
        CUdevice current;

        if (!device)
                return rt_failed(cudaErrorInvalidValue);
        if (rt_load() != cudaSuccess)
                return load_rc;
        *device = rt_driver.cuCtxGetDevice(&current) == CUDA_SUCCESS ? current : thread.device;
        return cudaSuccess;
}

cudaError_t cudaInitDevice(int device, unsigned device_flags, unsigned flags)
{
        CUcontext before = NULL;
        cudaError_t rc;

        (void)device_flags, (void)flags;
        if (rt_load() != cudaSuccess)
                return load_rc;
        rt_driver.cuCtxGetCurrent(&before);
        rc = rt_result(make_current(device));
        if (rc == cudaSuccess && before)
                rt_driver.cuCtxSetCurrent(before);
        return rc;
}

cudaError_t cudaDeviceSynchronize(void)
{
        CUcontext ctx = NULL;
        cudaError_t rc = rt_enter();

        if (rc != cudaSuccess)
                return rc;
        rt_driver.cuCtxGetCurrent(&ctx);
        return rt_result(rt_driver.cuCtxSynchronize(ctx));
}

cudaError_t cudaDeviceReset(void)
{
        CUcontext ctx = NULL;
        unsigned version;
        CUdevice device = thread.device;
        CUresult rc;

        if (rt_load() != cudaSuccess)
                return load_rc;
        if (rt_driver.cuCtxGetCurrent(&ctx) == CUDA_SUCCESS && ctx) {
                rt_driver.cuCtxGetApiVersion(ctx, &version);
                rt_driver.cuCtxGetDevice(&device);
        }
        pthread_mutex_lock(&contexts_lock);
        rc = rt_driver.cuDevicePrimaryCtxReset(device);
        contexts[device] = NULL;
        pthread_mutex_unlock(&contexts_lock);
        atomic_fetch_add(&resets, 1);
        rt_forget_libraries();
        return rt_result(rc);
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
        if (!version)
                return rt_failed(cudaErrorInvalidValue);
        *version = CUDART_VERSION;
        return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
        RT_EARLY(cuDriverGetVersion(version));
}

static cudaError_t entry_point(const char *name, void **function, unsigned version, unsigned long long flags,
                               enum cudaDriverEntryPointQueryResult *status)
{
        CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
        cudaError_t rc = rt_load();

        if (rc == cudaSuccess)
                rc = rt_result(rt_driver.cuGetProcAddress(name, function, (int)version, flags, &found));
        if (rc == cudaSuccess && status)
                *status = (enum cudaDriverEntryPointQueryResult)found;
        return rc;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *status)
{
        return entry_point(name, function, version, flags, status);
}
