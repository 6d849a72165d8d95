/*
 * The stand-in runtime: what its files share. It reaches the driver as the real one does (dlopen of libcuda.so.1, then
 * cuGetProcAddress), and each of its calls becomes the driver call the real one makes. It has no locks of its own but
 * those in runtime_load.c and runtime_launch.c.
 */
#ifndef GR_SIM_RUNTIME_H
#define GR_SIM_RUNTIME_H

/* What the header declares is what the library exports, under the version name of the real one. */
#pragma GCC visibility push(default)
#include <cuda_runtime_api.h>
#pragma GCC visibility pop
#include <cuda.h>
#include <cudaTypedefs.h>

/* The runtime resets devices through the first version, whose type the header no longer has. */
typedef PFN_cuDevicePrimaryCtxReset_v11000 PFN_cuDevicePrimaryCtxReset_v7000;

struct rt_driver {
#define RT_DRIVER(name, version) PFN_##name##_v##version name;
#include "runtime_driver.def"
#undef RT_DRIVER
};

/* Filled by rt_load(), constant afterwards. */
extern struct rt_driver rt_driver;

/* All of these record a failure as the thread's last error and return it. */
cudaError_t rt_result(CUresult rc);
cudaError_t rt_failed(cudaError_t rc);
cudaError_t rt_load(void);  /* loads and initialises the driver */
cudaError_t rt_enter(void); /* the same, and makes the device's primary context current if the thread has none */

/* A call that needs a context; one that only needs the driver. */
#define RT(call)                                                                                                       \
        do {                                                                                                           \
                cudaError_t rc_ = rt_enter();                                                                          \
                return rc_ != cudaSuccess ? rc_ : rt_result(rt_driver.call);                                           \
        } while (0)
#define RT_EARLY(call)                                                                                                 \
        do {                                                                                                           \
                cudaError_t rc_ = rt_load();                                                                           \
                return rc_ != cudaSuccess ? rc_ : rt_result(rt_driver.call);                                           \
        } while (0)

/* A call with a parameter `stream`, and its per-thread twin, which takes 0 for the thread's own stream. Followed by the
 * common body. */
#define RT_EXPORT __attribute__((visibility("default")))
#define RT_PTSZ(name, params, args)                                                                                    \
        static cudaError_t name##_on params;                                                                           \
        RT_EXPORT cudaError_t name##_ptsz params;                                                                      \
        cudaError_t name params                                                                                        \
        {                                                                                                              \
                return name##_on args;                                                                                 \
        }                                                                                                              \
        cudaError_t name##_ptsz params                                                                                 \
        {                                                                                                              \
                if (!stream)                                                                                           \
                        stream = cudaStreamPerThread;                                                                  \
                return name##_on args;                                                                                 \
        }                                                                                                              \
        static cudaError_t name##_on params

#define RT_DPTR(p) ((CUdeviceptr)(uintptr_t)(p))

void rt_forget_libraries(void); /* runtime_launch.c: after a reset of the device */

#endif
