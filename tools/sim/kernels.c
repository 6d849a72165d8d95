/* Modules and kernels: any image loads, and the kernels are known by name and run in C. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

struct sim_kernel {
        const char *name;
        unsigned char sizes[SIM_KERNEL_ARGS + 1]; /* of the parameters in bytes, 0 ends */
        void (*run)(const struct sim_access *access, const uint64_t *arg);
};

/* Sleeps rather than spins: a busy device must not use the host's processors. */
static void keep_busy(uint64_t ns)
{
        uint64_t until = sim_now_ns() + ns, now;

        while ((now = sim_now_ns()) < until) {
                struct timespec rest = {(time_t)((until - now) / 1000000000u), (long)((until - now) % 1000000000u)};

                nanosleep(&rest, NULL);
        }
}

static void run_fill(const struct sim_access *access, const uint64_t *arg)
{
        sim_touch_fill(access, arg[0], arg[2], sizeof(uint32_t), (uint32_t)arg[1]);
}

static void run_spin(const struct sim_access *access, const uint64_t *arg)
{
        (void)access;
        keep_busy(arg[0]);
}

static void run_late_fill(const struct sim_access *access, const uint64_t *arg)
{
        keep_busy(arg[3]);
        run_fill(access, arg);
}

static void run_copy(const struct sim_access *access, const uint64_t *arg)
{
        sim_touch_copy(access, arg[0], arg[1], arg[2] * sizeof(uint32_t));
}

static void run_count_diff(const struct sim_access *access, const uint64_t *arg)
{
        uint64_t differing;

        if (sim_touch_count_diff(access, arg[0], (uint32_t)arg[1], arg[2], &differing))
                sim_touch_add(access, arg[3], (uint32_t)differing);
}

static void run_await(const struct sim_access *access, const uint64_t *arg)
{
        uint64_t until = sim_now_ns() + arg[2], word;

        while (sim_touch_load(access, arg[0], sizeof(uint32_t), &word) && word < arg[1] && sim_now_ns() < until)
                keep_busy(100000);
}

static const struct sim_kernel kernels[] = {
        {"gr_fill", {8, 4, 8}, run_fill},
        {"gr_spin", {8}, run_spin},
        {"gr_late_fill", {8, 4, 8, 8}, run_late_fill},
        {"gr_copy", {8, 8, 8}, run_copy},
        {"gr_count_diff", {8, 4, 8, 8}, run_count_diff},
        {"gr_await", {8, 4, 8}, run_await},
};
#define N_KERNELS (sizeof kernels / sizeof *kernels)

#define MAGIC_MODULE   0x6d6f6473u
#define MAGIC_FUNCTION 0x66756e73u

struct CUmod_st {
        uint32_t magic;
};
struct CUfunc_st {
        uint32_t magic;
        const struct sim_kernel *kernel;
};

/* All modules know the same kernels, so one function per kernel serves them all; a CUkernel is the same thing. */
static struct CUfunc_st functions[N_KERNELS];
static struct CUmod_st the_module = {MAGIC_MODULE};

const char *sim_kernel_name(const struct sim_kernel *kernel)
{
        return kernel->name;
}

void sim_kernel_run(const struct sim_op *op)
{
        struct sim_access access = {op, false};

        op->u.launch.kernel->run(&access, op->u.launch.arg);
}

static CUresult load_module(void **ret_module, const void *image)
{
        CUcontext ctx;
        CUresult rc;

        if (!ret_module || !image)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_current(&ctx);
        if (rc == CUDA_SUCCESS && !sim_heap_charge(ctx->device, sim_config()->module_bytes))
                rc = CUDA_ERROR_OUT_OF_MEMORY;
        sim_unlock();
        if (rc == CUDA_SUCCESS)
                *ret_module = &the_module;
        return rc;
}

/* The size of a log is where the caller finds how much was written, none here, also after a failure. */
static CUresult take_jit_options(unsigned n, const CUjit_option *options, void **values)
{
        for (unsigned i = 0; i < n; i++) {
                if (options[i] != CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES && options[i] != CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
                        continue;
                if (!values[i])
                        return CUDA_ERROR_INVALID_VALUE;
                values[i] = NULL;
        }
        return CUDA_SUCCESS;
}

static CUresult find_function(const void *module, const char *name, CUfunction *ret_function)
{
        if (!ret_function || !name)
                return CUDA_ERROR_INVALID_VALUE;
        if (module != &the_module)
                return CUDA_ERROR_INVALID_HANDLE;
        for (size_t i = 0; i < N_KERNELS; i++) {
                if (strcmp(kernels[i].name, name) == 0) {
                        sim_lock();
                        functions[i] = (struct CUfunc_st){MAGIC_FUNCTION, &kernels[i]};
                        sim_unlock();
                        *ret_function = &functions[i];
                        return CUDA_SUCCESS;
                }
        }
        return CUDA_ERROR_NOT_FOUND;
}

static const struct sim_kernel *kernel_of(const void *function)
{
        for (size_t i = 0; i < N_KERNELS; i++) {
                if (function == &functions[i])
                        return &kernels[i];
        }
        return NULL;
}

SIM_API cuModuleLoad(CUmodule *module, const char *path)
{
        SIM_ENTER(cuModuleLoad);
        return load_module((void **)module, path);
}

SIM_API cuModuleLoadData(CUmodule *module, const void *image)
{
        SIM_ENTER(cuModuleLoadData);
        return load_module((void **)module, image);
}

SIM_API cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n, CUjit_option *options, void **values)
{
        CUresult rc;

        SIM_ENTER(cuModuleLoadDataEx);
        rc = take_jit_options(n, options, values);
        return rc == CUDA_SUCCESS ? load_module((void **)module, image) : rc;
}

SIM_API cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
        SIM_ENTER(cuModuleLoadFatBinary);
        return load_module((void **)module, image);
}

SIM_API cuModuleUnload(CUmodule module)
{
        CUcontext ctx;

        SIM_ENTER(cuModuleUnload);
        if (module != &the_module)
                return CUDA_ERROR_INVALID_HANDLE;
        sim_lock();
        if (sim_current(&ctx) == CUDA_SUCCESS)
                sim_heap_uncharge(ctx->device, sim_config()->module_bytes);
        sim_unlock();
        return CUDA_SUCCESS;
}

SIM_API cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
        SIM_ENTER(cuModuleGetFunction);
        return find_function(module, name, function);
}

SIM_API cuModuleGetGlobal_v2(CUdeviceptr *dptr, size_t *bytes, CUmodule module, const char *name)
{
        SIM_ENTER(cuModuleGetGlobal_v2);
        (void)dptr, (void)bytes, (void)module, (void)name;
        return CUDA_ERROR_NOT_FOUND;
}

SIM_API cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
        SIM_ENTER(cuModuleGetLoadingMode);
        if (!mode)
                return CUDA_ERROR_INVALID_VALUE;
        *mode = CU_MODULE_LAZY_LOADING;
        return CUDA_SUCCESS;
}

static int charged_libraries; /* guarded by sim_lock() */

/* If a context is current, the code is loaded into it at once. */
static CUresult load_library(CUlibrary *library, const void *code)
{
        CUresult rc = load_module((void **)library, code);

        if (rc == CUDA_ERROR_INVALID_CONTEXT) {
                *library = (CUlibrary)(void *)&the_module;
                return CUDA_SUCCESS;
        }
        if (rc == CUDA_SUCCESS) {
                sim_lock();
                charged_libraries++;
                sim_unlock();
        }
        return rc;
}

SIM_API cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit, void **jit_values, unsigned n_jit,
                          CUlibraryOption *options, void **values, unsigned n_options)
{
        CUresult rc;

        SIM_ENTER(cuLibraryLoadData);
        (void)options, (void)values, (void)n_options;
        rc = take_jit_options(n_jit, jit, jit_values);
        return rc == CUDA_SUCCESS ? load_library(library, code) : rc;
}

SIM_API cuLibraryLoadFromFile(CUlibrary *library, const char *file, CUjit_option *jit, void **jit_values,
                              unsigned n_jit, CUlibraryOption *options, void **values, unsigned n_options)
{
        CUresult rc;

        SIM_ENTER(cuLibraryLoadFromFile);
        (void)options, (void)values, (void)n_options;
        rc = take_jit_options(n_jit, jit, jit_values);
        return rc == CUDA_SUCCESS ? load_library(library, file) : rc;
}

SIM_API cuLibraryUnload(CUlibrary library)
{
        CUcontext ctx;

        SIM_ENTER(cuLibraryUnload);
        if ((void *)library != &the_module)
                return CUDA_ERROR_INVALID_HANDLE;
        sim_lock();
        if (charged_libraries > 0 && sim_current(&ctx) == CUDA_SUCCESS) {
                charged_libraries--;
                sim_heap_uncharge(ctx->device, sim_config()->module_bytes);
        }
        sim_unlock();
        return CUDA_SUCCESS;
}

SIM_API cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
        SIM_ENTER(cuLibraryGetKernel);
        return find_function(library, name, (CUfunction *)kernel);
}

SIM_API cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
        SIM_ENTER(cuLibraryGetModule);
        if (!module || (void *)library != &the_module)
                return CUDA_ERROR_INVALID_VALUE;
        *module = &the_module;
        return CUDA_SUCCESS;
}

SIM_API cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name)
{
        SIM_ENTER(cuLibraryGetGlobal);
        (void)dptr, (void)bytes, (void)library, (void)name;
        return CUDA_ERROR_NOT_FOUND;
}

SIM_API cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
        SIM_ENTER(cuKernelGetFunction);
        if (!function || !kernel_of(kernel))
                return CUDA_ERROR_INVALID_VALUE;
        *function = (CUfunction)(void *)kernel;
        return CUDA_SUCCESS;
}

SIM_API cuFuncGetName(const char **name, CUfunction function)
{
        SIM_ENTER(cuFuncGetName);
        if (!name || !kernel_of(function))
                return CUDA_ERROR_INVALID_VALUE;
        *name = kernel_of(function)->name;
        return CUDA_SUCCESS;
}

SIM_API cuFuncGetModule(CUmodule *module, CUfunction function)
{
        SIM_ENTER(cuFuncGetModule);
        if (!module || !kernel_of(function))
                return CUDA_ERROR_INVALID_VALUE;
        *module = &the_module;
        return CUDA_SUCCESS;
}

SIM_API cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
        SIM_ENTER(cuFuncGetAttribute);
        if (!value || attribute < 0 || attribute >= CU_FUNC_ATTRIBUTE_MAX)
                return CUDA_ERROR_INVALID_VALUE;
        if (!kernel_of(function))
                return CUDA_ERROR_INVALID_HANDLE;
        *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
                 : attribute == CU_FUNC_ATTRIBUTE_PTX_VERSION         ? 70
                 : attribute == CU_FUNC_ATTRIBUTE_BINARY_VERSION      ? 90
                                                                      : 0;
        return CUDA_SUCCESS;
}

SIM_API cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
        SIM_ENTER(cuFuncSetAttribute);
        (void)attribute, (void)value;
        return kernel_of(function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

SIM_API cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config)
{
        SIM_ENTER(cuFuncSetCacheConfig);
        (void)config;
        return kernel_of(function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

SIM_API cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared)
{
        SIM_ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessor);
        (void)shared;
        if (!blocks || threads <= 0)
                return CUDA_ERROR_INVALID_VALUE;
        if (!kernel_of(function))
                return CUDA_ERROR_INVALID_HANDLE;
        *blocks = threads > SIM_RESIDENT_THREADS ? 0 : SIM_RESIDENT_THREADS / threads;
        return CUDA_SUCCESS;
}

SIM_API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int threads,
                                                             size_t shared, unsigned flags)
{
        SIM_ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags);
        (void)shared, (void)flags;
        if (!blocks || threads <= 0)
                return CUDA_ERROR_INVALID_VALUE;
        if (!kernel_of(function))
                return CUDA_ERROR_INVALID_HANDLE;
        *blocks = threads > SIM_RESIDENT_THREADS ? 0 : SIM_RESIDENT_THREADS / threads;
        return CUDA_SUCCESS;
}

/* Parameters come as an array of pointers, or packed in one buffer with natural alignment. */
static CUresult read_arguments(const struct sim_kernel *kernel, void **params, void **extra, uint64_t *arg)
{
        const unsigned char *buffer = NULL;
        size_t size = 0, offset = 0;

        if (!params && extra) {
                for (size_t i = 0; extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
                        if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER)
                                buffer = extra[i + 1];
                        else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE)
                                size = *(const size_t *)extra[i + 1];
                        else
                                return CUDA_ERROR_INVALID_VALUE;
                }
        }
        if (!params && !buffer)
                return CUDA_ERROR_INVALID_VALUE;
        for (size_t i = 0; i < SIM_KERNEL_ARGS && kernel->sizes[i]; i++) {
                size_t bytes = kernel->sizes[i];

                offset = (offset + bytes - 1) / bytes * bytes;
                if (!params && offset + bytes > size)
                        return CUDA_ERROR_INVALID_VALUE;
                arg[i] = 0;
                memcpy(&arg[i], params ? params[i] : buffer + offset, bytes);
                offset += bytes;
        }
        return CUDA_SUCCESS;
}

static CUresult launch_kernel(CUfunction function, unsigned blocks, unsigned threads, bool programmatic,
                              CUstream stream, void **params, void **extra)
{
        struct sim_op op = {.kind = SIM_OP_KERNEL,
                            .u.launch = {.kernel = kernel_of(function), .programmatic = programmatic}};
        CUresult rc;

        if (!op.u.launch.kernel)
                return CUDA_ERROR_INVALID_HANDLE;
        if (blocks == 0 || threads == 0 || threads > 1024)
                return CUDA_ERROR_INVALID_VALUE;
        rc = read_arguments(op.u.launch.kernel, params, extra, op.u.launch.arg);
        return rc == CUDA_SUCCESS ? sim_submit(stream, &op, false) : rc;
}

static unsigned product_of_three(unsigned a, unsigned b, unsigned c)
{
        uint64_t n = (uint64_t)a * b;

        n = n > UINT32_MAX ? UINT32_MAX : n;
        n *= c;
        return n > UINT32_MAX ? UINT32_MAX : (unsigned)n;
}

SIM_PTSZ(cuLaunchKernel,
         (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
          CUstream stream, void **params, void **extra),
         (f, gx, gy, gz, bx, by, bz, shared, stream, params, extra))
{
        (void)shared;
        return launch_kernel(f, product_of_three(gx, gy, gz), product_of_three(bx, by, bz), false, stream, params,
                             extra);
}

SIM_PTSZ(cuLaunchCooperativeKernel,
         (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
          CUstream stream, void **params),
         (f, gx, gy, gz, bx, by, bz, shared, stream, params))
{
        (void)shared;
        return launch_kernel(f, product_of_three(gx, gy, gz), product_of_three(bx, by, bz), false, stream, params,
                             NULL);
}

/* The stream is in the configuration, so the twins cannot share SIM_PTSZ. */
static CUresult launch_config(const CUlaunchConfig *config, CUfunction f, void **params, void **extra,
                              CUstream fallback)
{
        bool programmatic = false;

        if (!config)
                return CUDA_ERROR_INVALID_VALUE;
        for (unsigned i = 0; config->attrs && i < config->numAttrs; i++) {
                const CUlaunchAttribute *attribute = &config->attrs[i];

                programmatic |= attribute->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
                                attribute->value.programmaticStreamSerializationAllowed;
                if (attribute->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION &&
                    (!attribute->value.clusterDim.x || config->gridDimX % attribute->value.clusterDim.x))
                        return CUDA_ERROR_INVALID_CLUSTER_SIZE;
        }
        return launch_kernel(f, product_of_three(config->gridDimX, config->gridDimY, config->gridDimZ),
                             product_of_three(config->blockDimX, config->blockDimY, config->blockDimZ), programmatic,
                             config->hStream ? config->hStream : fallback, params, extra);
}

SIM_API cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra)
{
        SIM_ENTER(cuLaunchKernelEx);
        return launch_config(config, f, params, extra, CU_STREAM_LEGACY);
}

SIM_API cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction f, void **params, void **extra)
{
        SIM_ENTER(cuLaunchKernelEx_ptsz);
        return launch_config(config, f, params, extra, CU_STREAM_PER_THREAD);
}
