// A program as nvcc makes it with -cudart shared, for the stand-in runtime: registration, <<<>>>, and one call of each
// family.
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

static int failures;
#define EXPECT(want, got)                                                                                              \
        do {                                                                                                           \
                long long w_ = (long long)(want), g_ = (long long)(got);                                               \
                if (w_ != g_) {                                                                                        \
                        fprintf(stderr, "line %d: %s is %lld, expected %lld\n", __LINE__, #got, g_, w_);               \
                        failures++;                                                                                    \
                }                                                                                                      \
        } while (0)
#define OK(call) EXPECT(cudaSuccess, call)

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

        OK(cudaRuntimeGetVersion(&version));
        EXPECT(CUDART_VERSION, version);
        OK(cudaGetDeviceProperties(&prop, 0));
        EXPECT(9, prop.major);
        OK(cudaGetDevice(&device));
        EXPECT(0, device);
        EXPECT(cudaErrorInvalidDevice, cudaSetDevice(9));
        EXPECT(cudaErrorInvalidDevice, cudaGetLastError());
        OK(cudaGetLastError());

        OK(cudaMemGetInfo(&before, &total));
        OK(cudaMalloc(&p, 4096));
        OK(cudaMalloc(&q, 3 << 20));
        OK(cudaMemGetInfo(&after, &total));
        EXPECT(6 << 20, before - after);
        OK(cudaPointerGetAttributes(&attributes, p));
        EXPECT(cudaMemoryTypeDevice, attributes.type);
        EXPECT(cudaErrorMemoryAllocation, cudaMalloc(&none, total + 1));
        EXPECT(1, none == nullptr);
        EXPECT(cudaErrorMemoryAllocation, cudaPeekAtLastError());
        EXPECT(cudaErrorMemoryAllocation, cudaGetLastError());
        OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
        gr_fill<<<4, 32, 0, s>>>(p, 42, 1024);
        gr_copy<<<4, 32, 0, s>>>(q, p, 1024);
        OK(cudaGetLastError());
        OK(cudaMemcpyAsync(host, q, sizeof host, cudaMemcpyDeviceToHost, s));
        OK(cudaStreamSynchronize(s));
        EXPECT(42, host[63]);
        gr_fill<<<1, 32, 0, cudaStreamPerThread>>>(p, 43, 1024);
        OK(cudaStreamSynchronize(cudaStreamPerThread));
        OK(cudaMemcpy(host, p, sizeof host, cudaMemcpyDefault));
        EXPECT(43, host[0]);
        unknown_to_the_simulator<<<1, 1>>>();
        EXPECT(cudaErrorInvalidDeviceFunction, cudaGetLastError());

        OK(cudaEventCreate(&e));
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        gr_fill<<<1, 32, 0, s>>>(p, 44, 1024);
        OK(cudaStreamEndCapture(s, &g));
        OK(cudaGraphInstantiate(&x, g, 0));
        OK(cudaGraphLaunch(x, s));
        OK(cudaEventRecord(e, s));
        OK(cudaEventSynchronize(e));
        OK(cudaMemcpy2D(host, 8, p, 8, 8, 8, cudaMemcpyDeviceToHost));
        EXPECT(44, host[15]);
        OK(cudaGraphExecDestroy(x));
        OK(cudaGraphDestroy(g));

        OK(cudaMemset(p, 1, 4096));
        OK(cudaMemcpy(host, p, 4, cudaMemcpyDeviceToHost));
        EXPECT(0x01010101, host[0]);
        OK(cudaFree(p));
        EXPECT(cudaErrorInvalidValue, cudaFree(p));
        OK(cudaFree(NULL));
        OK(cudaMallocPitch((void **)&p, &pitch, 1000, 10));
        EXPECT(1024, pitch);
        OK(cudaFree(p));
        OK(cudaMallocAsync(&p, 4096, s));
        OK(cudaFreeAsync(p, s));
        OK(cudaMallocManaged(&p, 4096));
        gr_fill<<<1, 32>>>(p, 45, 1024);
        OK(cudaDeviceSynchronize());
        EXPECT(45, p[1023]);
        OK(cudaFree(p));
        OK(cudaMallocHost(&p, 4096));
        OK(cudaFreeHost(p));
        EXPECT(0, strcmp("out of memory", cudaGetErrorString(cudaErrorMemoryAllocation)));

        OK(cudaDeviceReset());
        OK(cudaMemGetInfo(&after, &total));
        EXPECT(total, after);
        OK(cudaMalloc(&p, 4096));
        gr_fill<<<1, 32>>>(p, 46, 1024);
        OK(cudaMemcpy(host, p, 4, cudaMemcpyDeviceToHost));
        EXPECT(46, host[0]);
        OK(cudaFree(p));
        printf("runtime: %s\n", failures ? "FAILED" : "ok");
        return failures != 0;
}
