/* What nvcc's code calls: registration of images and kernels, the configuration of a launch, and the launch itself. */
#include "runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Called by compiled code only; no header declares them for C. */
RT_EXPORT void **__cudaRegisterFatBinary(void *image);
RT_EXPORT void __cudaRegisterFatBinaryEnd(void **handle);
RT_EXPORT void __cudaUnregisterFatBinary(void **handle);
RT_EXPORT char __cudaInitModule(void **handle);
RT_EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit,
                                      void *tid, void *bid, void *block, void *grid, int *warp);
RT_EXPORT void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int ext, size_t bytes,
                                 int constant, int global);
RT_EXPORT void __cudaRegisterManagedVar(void **handle, void **host, char *address, const char *name, int ext,
                                        size_t bytes, int constant, int global);
RT_EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream);
RT_EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream);
RT_EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host);
RT_EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared,
                                         cudaStream_t stream);
RT_EXPORT cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared,
                                              cudaStream_t stream);

struct image {
        const void *data;
        CUlibrary library; /* NULL until a kernel of it is used */
        struct image *next;
};

/* nvcc's launch code keeps the address of this as its kernel handle, so it lives as long as the process. */
struct function {
        const void *host;
        const char *name;
        struct image *image;
        CUkernel kernel; /* NULL until used */
        struct function *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Guarded by lock. */
static struct image *images;
static struct function *functions;

#define CONFIGURATIONS 8
static _Thread_local struct {
        dim3 grid, block;
        size_t shared;
        cudaStream_t stream;
} configurations[CONFIGURATIONS];
static _Thread_local unsigned n_configurations;

void **__cudaRegisterFatBinary(void *data)
{
        struct image *image = calloc(1, sizeof *image);

        if (!image)
                return NULL;
        image->data = data;
        pthread_mutex_lock(&lock);
        image->next = images;
        images = image;
        pthread_mutex_unlock(&lock);
        return (void **)image;
}

void __cudaRegisterFatBinaryEnd(void **handle)
{
        (void)handle;
}

void __cudaUnregisterFatBinary(void **handle)
{
        struct image **at = &images;

        pthread_mutex_lock(&lock);
        while (*at && (void **)*at != handle)
                at = &(*at)->next;
        if (*at) {
                struct image *image = *at;
                struct function **f = &functions;

                *at = image->next;
                while (*f) {
                        struct function *gone = *f;

                        if (gone->image != image) {
                                f = &gone->next;
                        } else {
                                *f = gone->next;
                                free(gone);
                        }
                }
                free(image);
        }
        pthread_mutex_unlock(&lock);
}

char __cudaInitModule(void **handle)
{
        (void)handle;
        return 1;
}

void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *tid,
                            void *bid, void *block, void *grid, int *warp)
{
        struct function *f = calloc(1, sizeof *f);

        (void)device, (void)limit, (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
        if (!f)
                return;
        f->host = host;
        f->name = name;
        f->image = (struct image *)handle;
        pthread_mutex_lock(&lock);
        f->next = functions;
        functions = f;
        pthread_mutex_unlock(&lock);
}

void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int ext, size_t bytes, int constant,
                       int global)
{
        (void)handle, (void)host, (void)address, (void)name, (void)ext, (void)bytes, (void)constant, (void)global;
}

void __cudaRegisterManagedVar(void **handle, void **host, char *address, const char *name, int ext, size_t bytes,
                              int constant, int global)
{
        (void)handle, (void)host, (void)address, (void)name, (void)ext, (void)bytes, (void)constant, (void)global;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream)
{
        if (n_configurations == CONFIGURATIONS)
                return 1;
        configurations[n_configurations].grid = grid;
        configurations[n_configurations].block = block;
        configurations[n_configurations].shared = shared;
        configurations[n_configurations].stream = stream;
        n_configurations++;
        return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
        if (n_configurations == 0)
                return rt_failed(cudaErrorMissingConfiguration);
        n_configurations--;
        *grid = configurations[n_configurations].grid;
        *block = configurations[n_configurations].block;
        *shared = configurations[n_configurations].shared;
        *(cudaStream_t *)stream = configurations[n_configurations].stream;
        return cudaSuccess;
}

/* The function behind a host address or behind a handle given out for it; NULL if it is neither. Lock held. */
static struct function *find_function(const void *host)
{
        struct function *f = functions;

        while (f && f->host != host && f != host)
                f = f->next;
        return f;
}

/* The driver's kernel, loading its image at the first use. */
static cudaError_t resolve_kernel(const void *host, CUkernel *ret_kernel)
{
        struct function *f;
        cudaError_t rc = rt_enter();
        CUresult driver_rc = CUDA_SUCCESS;

        if (rc != cudaSuccess)
                return rc;
        pthread_mutex_lock(&lock);
        f = find_function(host);
        if (f && !f->image->library)
                driver_rc =
                        rt_driver.cuLibraryLoadData(&f->image->library, f->image->data, NULL, NULL, 0, NULL, NULL, 0);
        if (f && driver_rc == CUDA_SUCCESS && !f->kernel)
                driver_rc = rt_driver.cuLibraryGetKernel(&f->kernel, f->image->library, f->name);
        if (f && driver_rc == CUDA_SUCCESS)
                *ret_kernel = f->kernel;
        pthread_mutex_unlock(&lock);
        if (!f || driver_rc == CUDA_ERROR_NOT_FOUND)
                return rt_failed(cudaErrorInvalidDeviceFunction);
        return rt_result(driver_rc);
}

void rt_forget_libraries(void)
{
        pthread_mutex_lock(&lock);
        for (struct function *f = functions; f; f = f->next)
                f->kernel = NULL;
        for (struct image *image = images; image; image = image->next) {
                if (image->library)
                        rt_driver.cuLibraryUnload(image->library);
                image->library = NULL;
        }
        pthread_mutex_unlock(&lock);
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host)
{
        struct function *f;

        pthread_mutex_lock(&lock);
        f = find_function(host);
        pthread_mutex_unlock(&lock);
        if (!f || !kernel)
                return rt_failed(cudaErrorInvalidDeviceFunction);
        *kernel = (cudaKernel_t)(void *)f;
        return cudaSuccess;
}

RT_PTSZ(cudaLaunchKernel, (const void *host, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream),
        (host, grid, block, args, shared, stream))
{
        CUkernel kernel;
        cudaError_t rc = resolve_kernel(host, &kernel);

        if (rc != cudaSuccess)
                return rc;
        return rt_result(rt_driver.cuLaunchKernel((CUfunction)(void *)kernel, grid.x, grid.y, grid.z, block.x, block.y,
                                                  block.z, (unsigned)shared, stream, args, NULL));
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared,
                               cudaStream_t stream)
{
        return cudaLaunchKernel_on(kernel, grid, block, args, shared, stream);
}

cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared,
                                    cudaStream_t stream)
{
        return cudaLaunchKernel_on(kernel, grid, block, args, shared, stream ? stream : cudaStreamPerThread);
}

RT_PTSZ(cudaLaunchCooperativeKernel,
        (const void *host, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream),
        (host, grid, block, args, shared, stream))
{
        CUkernel kernel;
        cudaError_t rc = resolve_kernel(host, &kernel);

        if (rc != cudaSuccess)
                return rc;
        return rt_result(rt_driver.cuLaunchCooperativeKernel((CUfunction)(void *)kernel, grid.x, grid.y, grid.z,
                                                             block.x, block.y, block.z, (unsigned)shared, stream,
                                                             args));
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *host)
{
        CUkernel kernel;
        cudaError_t rc = resolve_kernel(host, &kernel);

        if (rc != cudaSuccess)
                return rc;
        memset(out, 0, sizeof *out);
        return rt_result(rt_driver.cuFuncGetAttribute(&out->maxThreadsPerBlock, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
                                                      (CUfunction)(void *)kernel));
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *host, int threads,
                                                                   size_t shared, unsigned flags)
{
        CUkernel kernel;
        cudaError_t rc = resolve_kernel(host, &kernel);

        if (rc != cudaSuccess)
                return rc;
        return rt_result(rt_driver.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
                blocks, (CUfunction)(void *)kernel, threads, shared, flags));
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *host, int threads, size_t shared)
{
        return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, host, threads, shared, 0);
}
