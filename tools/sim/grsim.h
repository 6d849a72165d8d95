/*
 * The simulated device, from outside.
 *
 * Environment, read at the first call into the driver; a value that cannot be used is named on stderr and ignored:
 *   GRSIM_DEVICES=2              0 to 8, every one a peer of the others; default 1
 *   CUDA_VISIBLE_DEVICES=1,0     which of them, in which order, by number
 *   GRSIM_MEMORY=8GiB            of each device; default 4GiB
 *   GRSIM_CONTEXT=512MiB         what a context takes of its device, and a module (GRSIM_MODULE=8MiB); default 0
 *   GRSIM_EXECUTABLE=2MiB        what an executable graph takes; kept for the next ones until a context ends; default 0
 *   GRSIM_PITCH=1KiB             rows of pitched memory take a multiple of this; default 512
 *   GRSIM_RDMA=1                 the devices are capable of GPUDirect RDMA; default 0
 *   GRSIM_LACKS=102,103          attributes of the devices, by number, that are 0; default none
 *   GRSIM_SHARED=/path           all processes that name this file share the GPUs; else each has GPUs of its own
 *   GRSIM_FAULT=cuMemAlloc_v2:3=2,cuCtxRecordEvent:*=700,cuMemFree_v2:2+=999
 *                                the 3rd call, every call, every call from the 2nd on returns that code and does
 *                                nothing
 *   GRSIM_MISSING=cuCtxRecordEvent,cuCtxWaitEvent
 *                                as on an older driver: cuGetProcAddress does not know the names, calls return 500
 *   GRSIM_LATENCY=cuMemAlloc=30us,cuMemFree=28us
 *                                time that a call takes besides its work; by name, or by exported symbol
 *   GRSIM_TRACE=/path            appends the exported symbol of each call, one per line
 *
 * The library exports these besides the driver's own entry points. Find them with dlsym: a real driver has none of
 * them. All may be called from any thread at any time.
 */
#ifndef GRSIM_H
#define GRSIM_H

#include <stdbool.h>
#include <stddef.h>

extern const char grSimVersion[];                 /* its presence tells the simulated device from a real driver */
unsigned long grSimMisuseCount(void);             /* accesses to memory that the program did not have */
unsigned long grSimCallCount(const char *symbol); /* calls of an exported symbol, "cuMemAlloc_v2"; 0 if unknown */
size_t grSimUsedBytes(int device); /* bytes of whole pages in use, by all who share the GPU; 0 for an unknown device */
/* A process that shares the GPU, and what it uses; *ret_pid 0: none has this number. False: there are no more. */
bool grSimProcess(int device, unsigned i, unsigned *ret_pid, size_t *ret_bytes);
void grSimTake(int device, size_t bytes); /* so much is taken for good without any call, as by lazily loaded code */
unsigned long grSimRuntimeCount(void);    /* calls of the stand-in runtime's cudaMalloc and cudaFree */
void grSimUuid(int gpu, unsigned char ret[16]); /* of a GPU by its number without CUDA_VISIBLE_DEVICES */
void grSimHostFlags(unsigned flags); /* from now on all pinned memory is told to have been asked for with these */

#endif
