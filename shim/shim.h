/*
 * The shim stands between a program and the CUDA driver. Its folders, from the bottom up:
 *
 *   system/   options (environment.c), workers and other threads (workers.c), other processes (platform.c) and messages
 *             to them (messages.c)
 *   driver/   the driver's own functions (real.c, from the list hooks.def), core/'s table of them (operations.c), NVML
 *             (nvml.c)
 *   device/   the limits of a device (device.c), the other processes on it (neighbour.c), driver overhead (overhead.c)
 *   hooks/    turns calls into requests to core/: memory.c, query.c, context.c (with green.c), stream.c (with
 *             captures.c), submit.c, sync.c; runtime.c for functions of the shared runtime; segment_export.c and
 *             segment_import.c for blocks that processes share; stream_ordered.c, vmm.c, ipc.c, managed.c, array.c,
 *             graph.c, graph_memory.c, module.c and pinned_host.c for memory that the pool of device memory does not
 *             serve; nvml_views.c for NVML's answers; note.c notes what they allocate and free, in
 *             the trace (trace.c) and by the stacks that did it (origins.c, with stack.c and python.c)
 *   process/  the public functions (api.c), and what sets all of it up: the background thread, fork and exit
 *             (process.c)
 *   lookup/   answers the program's look-ups of driver functions with hooks (lookup.c, dlsym.S)
 *
 * The order in meson.build says which file may call which.
 *
 * Every hook keeps errno, and returns what the driver would have returned. Before gr_shim_ready returns true, and after
 * fork, hooks only call the real function.
 */
#ifndef GR_SHIM_H
#define GR_SHIM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define __CUDA_API_VERSION_INTERNAL /* every version of each function under its exported name */
#include <cuda.h>

#include "alloc/pool.h"
#include "base/keep_errno.h"
#include "core.h"

#if CUDA_VERSION < 13000 /* newer than the oldest toolkit that can build this */
CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext ctx);
CUresult CUDAAPI cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type);
CUresult CUDAAPI cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type);
#endif

#define GR_EXPORT __attribute__((visibility("default")))

/* Declared in cudaGL.h and cudaVDPAU.h, which need headers of OpenGL and VDPAU. */
CUresult CUDAAPI cuGLCtxCreate(CUcontext *context, unsigned int flags, CUdevice dev);
CUresult CUDAAPI cuGLCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice dev);
CUresult CUDAAPI cuVDPAUCtxCreate(CUcontext *context, unsigned int flags, CUdevice dev, uint32_t vdp_device,
                                  void *vdp_get_proc_address);
CUresult CUDAAPI cuVDPAUCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice dev, uint32_t vdp_device,
                                     void *vdp_get_proc_address);

#endif
