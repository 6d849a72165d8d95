// A program as nvcc makes it with -cudart shared, for the stand-in runtime: registration, <<<>>>, and one call of each
// family.
#include "check.h"

#include <cuda_runtime.h>
#include <stdio.h>
#include <string.h>

#define GRID_STRIDE(i, n)                                                                                              \
        for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < n;                  \
             i += gridDim.x * (unsigned long long)blockDim.x)

extern "C" __global__ void gr_fill(unsigned *p, unsigned value, unsigned long long n)
{
        GRID_STRIDE(i, n) p[i] = value;
}
extern "C" __global__ void gr_copy(unsigned *dst, const unsigned *src, unsigned long long n)
{
        GRID_STRIDE(i, n) dst[i] = src[i];
}
__global__ void unknown_to_the_simulator(void)
{
}

int main()
{
        unsigned *p, *q, *none, host[64] = {0};
        size_t pitch, before, after, total;
        cudaStream_t s;
        cudaEvent_t e;
        cudaGraph_t g;
        cudaGraphExec_t x;
        cudaDeviceProp prop;
        cudaPointerAttributes attributes;
        int device = -1, version = 0;

        GR_MUST(cudaRuntimeGetVersion(&version));
        GR_CHECK_EQ(version, CUDART_VERSION);
        GR_MUST(cudaGetDeviceProperties(&prop, 0));
        GR_CHECK_EQ(prop.major, 9);
        GR_MUST(cudaGetDevice(&device));
        GR_CHECK_EQ(device, 0);
        GR_CHECK_EQ(cudaSetDevice(9), cudaErrorInvalidDevice);
        GR_CHECK_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
        GR_MUST(cudaGetLastError());

        GR_MUST(cudaMemGetInfo(&before, &total));
        GR_MUST(cudaMalloc(&p, 4096));
        GR_MUST(cudaMalloc(&q, 3 << 20));
        GR_MUST(cudaMemGetInfo(&after, &total));
        GR_CHECK_EQ(before - after, 6 << 20);
        GR_MUST(cudaPointerGetAttributes(&attributes, p));
        GR_CHECK_EQ(attributes.type, cudaMemoryTypeDevice);
        GR_CHECK_EQ(cudaMalloc(&none, total + 1), cudaErrorMemoryAllocation);
        GR_CHECK_EQ(none == nullptr, 1);
        GR_CHECK_EQ(cudaPeekAtLastError(), cudaErrorMemoryAllocation);
        GR_CHECK_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
        GR_MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
        gr_fill<<<4, 32, 0, s>>>(p, 42, 1024);
        gr_copy<<<4, 32, 0, s>>>(q, p, 1024);
        GR_MUST(cudaGetLastError());
        GR_MUST(cudaMemcpyAsync(host, q, sizeof host, cudaMemcpyDeviceToHost, s));
        GR_MUST(cudaStreamSynchronize(s));
        GR_CHECK_EQ(host[63], 42);
        gr_fill<<<1, 32, 0, cudaStreamPerThread>>>(p, 43, 1024);
        GR_MUST(cudaStreamSynchronize(cudaStreamPerThread));
        GR_MUST(cudaMemcpy(host, p, sizeof host, cudaMemcpyDefault));
        GR_CHECK_EQ(host[0], 43);
        unknown_to_the_simulator<<<1, 1>>>();
        GR_CHECK_EQ(cudaGetLastError(), cudaErrorInvalidDeviceFunction);

        GR_MUST(cudaEventCreate(&e));
        GR_MUST(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        gr_fill<<<1, 32, 0, s>>>(p, 44, 1024);
        GR_MUST(cudaStreamEndCapture(s, &g));
        GR_MUST(cudaGraphInstantiate(&x, g, 0));
        GR_MUST(cudaGraphLaunch(x, s));
        GR_MUST(cudaEventRecord(e, s));
        GR_MUST(cudaEventSynchronize(e));
        GR_MUST(cudaMemcpy2D(host, 8, p, 8, 8, 8, cudaMemcpyDeviceToHost));
        GR_CHECK_EQ(host[15], 44);
        GR_MUST(cudaGraphExecDestroy(x));
        GR_MUST(cudaGraphDestroy(g));

        GR_MUST(cudaMemset(p, 1, 4096));
        GR_MUST(cudaMemcpy(host, p, 4, cudaMemcpyDeviceToHost));
        GR_CHECK_EQ(host[0], 0x01010101);
        GR_MUST(cudaFree(p));
        GR_CHECK_EQ(cudaFree(p), cudaErrorInvalidValue);
        GR_MUST(cudaFree(NULL));
        GR_MUST(cudaMallocPitch((void **)&p, &pitch, 1000, 10));
        GR_CHECK_EQ(pitch, 1024);
        GR_MUST(cudaFree(p));
        GR_MUST(cudaMallocAsync(&p, 4096, s));
        GR_MUST(cudaFreeAsync(p, s));
        GR_MUST(cudaMallocManaged(&p, 4096));
        gr_fill<<<1, 32>>>(p, 45, 1024);
        GR_MUST(cudaDeviceSynchronize());
        GR_CHECK_EQ(p[1023], 45);
        GR_MUST(cudaFree(p));
        GR_MUST(cudaMallocHost(&p, 4096));
        GR_MUST(cudaFreeHost(p));
        GR_CHECK_EQ(strcmp("out of memory", cudaGetErrorString(cudaErrorMemoryAllocation)), 0);

        GR_MUST(cudaDeviceReset());
        GR_MUST(cudaMemGetInfo(&after, &total));
        GR_CHECK_EQ(after, total);
        GR_MUST(cudaMalloc(&p, 4096));
        gr_fill<<<1, 32>>>(p, 46, 1024);
        GR_MUST(cudaMemcpy(host, p, 4, cudaMemcpyDeviceToHost));
        GR_CHECK_EQ(host[0], 46);
        GR_MUST(cudaFree(p));
        return GR_CHECK_RESULT();
}
