/*
 * Modules and libraries of kernels. What memory one takes cannot be known before it is loaded, and with lazy loading
 * (the default since CUDA 12.2) most of it is taken at the first use of each kernel. So nothing is charged in advance.
 * Where the driver lacks memory, it gets what is cached.
 * Where the limit counts the whole process and a load exceeds it, the ladder is climbed. If that does not help, the
 * load is undone, and fails as on a full device. What a launch takes later is counted, and never refused: the next
 * allocation meets the limit.
 */
#include <errno.h>
#include <string.h>

#include "alloc/ladder.h"
#include "device/overhead.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/context.h"

#define OPTIONS_MOST 64u /* of the compiler; there are about 35 */

static int within_limit(void *arg)
{
        struct gr_device *device = arg;

        gr_overhead_look(device, 0);
        return gr_budget_over(device) > 0 ? -EDQUOT : 0;
}

/*
 * Called when the driver has just taken memory for the current context. Returns whether the limit holds, if need be
 * after a climb of the ladder.
 */
static bool limit_holds(void)
{
        struct gr_context *context;
        GR_KEEP_ERRNO;
        int rc;
        uint64_t over;

        gr_overhead_took_else();
        if (!gr_overhead_counted() || !gr_shim_ready())
                return true;
        context = gr_context_current();
        if (!context)
                return true;
        rc = within_limit(context->device);
        if (rc) {
                over = gr_budget_over(context->device); /* 0 where another thread has just freed memory */
                over = gr_min(gr_max(over, 1), GR_BLOCK_MAX_BYTES);
                rc = gr_ladder_climb_for(context, over, within_limit, context->device, rc);
        }
        return rc == 0;
}

/* Returns the result of a load. A load that does not fit is undone, and reported as out of memory. */
#define KEEP_IF_IT_FITS(result, unload, handle)                                                                        \
        do {                                                                                                           \
                if (result == CUDA_SUCCESS && !limit_holds() && GR_REAL(unload, *handle) == CUDA_SUCCESS)              \
                        result = CUDA_ERROR_OUT_OF_MEMORY;                                                             \
                return result;                                                                                         \
        } while (0)

/*
 * As GR_WITH_ROOM, for a call with options of the compiler. Some of their values are results as well, such as the size
 * of a log; another try gets what the program asked. Nothing is written where nothing has changed.
 */
#define WITH_ROOM_AND_OPTIONS(count, values, call)                                                                     \
        ({                                                                                                             \
                void *asked_[OPTIONS_MOST];                                                                            \
                size_t bytes_ = (values) ? gr_min(count, OPTIONS_MOST) * sizeof(asked_[0]) : 0;                        \
                                                                                                                       \
                if (bytes_ > 0)                                                                                        \
                        memcpy(asked_, values, bytes_);                                                                \
                GR_WITH_ROOM(-1, ({                                                                                    \
                        if (bytes_ > 0 && memcmp(values, asked_, bytes_) != 0)                                         \
                                memcpy(values, asked_, bytes_);                                                        \
                        call;                                                                                          \
                }));                                                                                                   \
        })

GR_EXPORT CUresult CUDAAPI cuModuleLoad(CUmodule *module, const char *name)
{
        GR_PASS_DEEP;
        CUresult result = GR_WITH_ROOM(-1, GR_REAL(cuModuleLoad, module, name));

        KEEP_IF_IT_FITS(result, cuModuleUnload, module);
}

GR_EXPORT CUresult CUDAAPI cuModuleLoadData(CUmodule *module, const void *image)
{
        GR_PASS_DEEP;
        CUresult result = GR_WITH_ROOM(-1, GR_REAL(cuModuleLoadData, module, image));

        KEEP_IF_IT_FITS(result, cuModuleUnload, module);
}

GR_EXPORT CUresult CUDAAPI cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count,
                                              CUjit_option *options, void **values)
{
        GR_PASS_DEEP;
        CUresult result = WITH_ROOM_AND_OPTIONS(count, values,
                                                GR_REAL(cuModuleLoadDataEx, module, image, count, options, values));

        KEEP_IF_IT_FITS(result, cuModuleUnload, module);
}

GR_EXPORT CUresult CUDAAPI cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
        GR_PASS_DEEP;
        CUresult result = GR_WITH_ROOM(-1, GR_REAL(cuModuleLoadFatBinary, module, image));

        KEEP_IF_IT_FITS(result, cuModuleUnload, module);
}

GR_EXPORT CUresult CUDAAPI cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit, void **jit_values,
                                             unsigned int jit_count, CUlibraryOption *options, void **values,
                                             unsigned int count)
{
        GR_PASS_DEEP;
        CUresult result = WITH_ROOM_AND_OPTIONS(
                jit_count, jit_values,
                GR_REAL(cuLibraryLoadData, library, code, jit, jit_values, jit_count, options, values, count));

        KEEP_IF_IT_FITS(result, cuLibraryUnload, library);
}

GR_EXPORT CUresult CUDAAPI cuLibraryLoadFromFile(CUlibrary *library, const char *file, CUjit_option *jit,
                                                 void **jit_values, unsigned int jit_count, CUlibraryOption *options,
                                                 void **values, unsigned int count)
{
        GR_PASS_DEEP;
        CUresult result = WITH_ROOM_AND_OPTIONS(
                jit_count, jit_values,
                GR_REAL(cuLibraryLoadFromFile, library, file, jit, jit_values, jit_count, options, values, count));

        KEEP_IF_IT_FITS(result, cuLibraryUnload, library);
}
