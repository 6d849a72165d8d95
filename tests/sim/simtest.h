/* What the tests of the simulated device share: checks, timing, kernels, and a fresh primary context. Linked with the
 * stand-in libcuda. */
#ifndef SIMTEST_H
#define SIMTEST_H

#include "check.h"

#include <cuda.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

double now_ms(void);
CUcontext start(void); /* cuInit, device 0's primary context current; exits where that fails */
CUfunction kernel(const char *name);
/* Each launches on stream and returns the driver's code. */
CUresult spin(CUstream stream, unsigned ms);
CUresult fill(CUstream stream, CUdeviceptr p, uint32_t value, uint64_t n);
CUresult late_fill(CUstream stream, CUdeviceptr p, uint32_t value, uint64_t n, unsigned ms);
uint32_t word(CUdeviceptr p); /* after all work of the context */
unsigned long misuses(void);

#endif
