/* A library of a name like cuBLAS's, whose streams the shim takes for streams without work. */
#include <cuda.h>
#include <stdbool.h>

__attribute__((visibility("default"))) CUresult cublas_makes_stream(CUstream *stream, bool priority);

CUresult cublas_makes_stream(CUstream *stream, bool priority)
{
        /* Not the last thing it does, so that the call comes from here. */
        CUresult result = priority ? cuStreamCreateWithPriority(stream, CU_STREAM_NON_BLOCKING, 0)
                                   : cuStreamCreate(stream, CU_STREAM_NON_BLOCKING);

        return *stream ? result : CUDA_ERROR_UNKNOWN;
}
