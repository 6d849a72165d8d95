/* What the tests of the simulated device share: checks, timing, kernels, and a fresh primary context. Linked with the
 * stand-in libcuda. */
#ifndef SIMTEST_H
#define SIMTEST_H

#include <cuda.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define MIB ((size_t)1 << 20)

extern int failures;

/* Says what was expected and found, counts it, and goes on. */
#define EXPECT(want, got)                                                                                              \
        do {                                                                                                           \
                long long want_ = (long long)(want), got_ = (long long)(got);                                          \
                if (want_ != got_) {                                                                                   \
                        fprintf(stderr, "%s:%d: %s is %lld, expected %lld\n", __FILE__, __LINE__, #got, got_, want_);  \
                        failures++;                                                                                    \
                }                                                                                                      \
        } while (0)
#define CHECK(condition)                                                                                               \
        do {                                                                                                           \
                if (!(condition)) {                                                                                    \
                        fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                        \
                        failures++;                                                                                    \
                }                                                                                                      \
        } while (0)
#define OK(call) EXPECT(CUDA_SUCCESS, call)

double now_ms(void);
CUcontext start(void); /* cuInit, device 0's primary context current; exits where that fails */
CUfunction kernel(const char *name);
/* Each launches on stream and returns the driver's code. */
CUresult spin(CUstream stream, unsigned ms);
CUresult fill(CUstream stream, CUdeviceptr p, uint32_t value, uint64_t n);
CUresult late_fill(CUstream stream, CUdeviceptr p, uint32_t value, uint64_t n, unsigned ms);
uint32_t word(CUdeviceptr p); /* after all work of the context */
unsigned long misuses(void);
int done(const char *name); /* the program's exit status */

#endif
