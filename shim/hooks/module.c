/*
 * Modules and libraries of kernels. What memory one takes cannot be known before it is loaded, and with lazy loading
 * (the default since CUDA 12.2) most of it is taken at the first use of each kernel. So nothing is charged in advance.
 * Where the limit counts the whole process and a load exceeds it, the ladder is climbed. If that does not help, the
 * load is undone, and fails as on a full card. What a launch takes later is counted, and never
 * refused: the next allocation meets the limit.
 */
#include "shim.h"

/* Returns the result of a load. A load that does not fit is undone, and reported as out of memory. */
#define KEEP_IF_IT_FITS(result, unload, handle)                                                                        \
        do {                                                                                                           \
                if (result == CUDA_SUCCESS && !gr_overhead_fits() && GR_REAL(unload, *handle) == CUDA_SUCCESS)         \
                        result = CUDA_ERROR_OUT_OF_MEMORY;                                                             \
                return result;                                                                                         \
        } while (0)

GR_EXPORT CUresult CUDAAPI cuModuleLoad(CUmodule *module, const char *name)
{
        CUresult result = GR_REAL(cuModuleLoad, module, name);

        KEEP_IF_IT_FITS(result, cuModuleUnload, module);
}

GR_EXPORT CUresult CUDAAPI cuModuleLoadData(CUmodule *module, const void *image)
{
        CUresult result = GR_REAL(cuModuleLoadData, module, image);

        KEEP_IF_IT_FITS(result, cuModuleUnload, module);
}

GR_EXPORT CUresult CUDAAPI cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count,
                                              CUjit_option *options, void **values)
{
        CUresult result = GR_REAL(cuModuleLoadDataEx, module, image, count, options, values);

        KEEP_IF_IT_FITS(result, cuModuleUnload, module);
}

GR_EXPORT CUresult CUDAAPI cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
        CUresult result = GR_REAL(cuModuleLoadFatBinary, module, image);

        KEEP_IF_IT_FITS(result, cuModuleUnload, module);
}

GR_EXPORT CUresult CUDAAPI cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit, void **jit_values,
                                             unsigned int jit_count, CUlibraryOption *options, void **values,
                                             unsigned int count)
{
        CUresult result = GR_REAL(cuLibraryLoadData, library, code, jit, jit_values, jit_count, options, values, count);

        KEEP_IF_IT_FITS(result, cuLibraryUnload, library);
}

GR_EXPORT CUresult CUDAAPI cuLibraryLoadFromFile(CUlibrary *library, const char *file, CUjit_option *jit,
                                                 void **jit_values, unsigned int jit_count, CUlibraryOption *options,
                                                 void **values, unsigned int count)
{
        CUresult result =
                GR_REAL(cuLibraryLoadFromFile, library, file, jit, jit_values, jit_count, options, values, count);

        KEEP_IF_IT_FITS(result, cuLibraryUnload, library);
}
