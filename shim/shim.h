/*
 * The shim stands between a program and the CUDA driver. Its folders, from the bottom up:
 *
 *   system/   the operating system: environment, threads, other processes, files that are mapped
 *   driver/   the driver's own functions, from the list hooks.def; core/'s table of them; NVML
 *   device/   the limits of a device, the other processes on it, driver overhead
 *   notes/    what is noted of allocations and frees: the trace, their origins, the debug aids
 *   hooks/    what the program calls, one file for each family of calls, and the tables that these need
 *   process/  start, exit and fork; the background thread; the public functions
 *   lookup/   answers the program's look-ups of driver functions with hooks
 *
 * meson.build lists the files in order: each may call those before it.
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
#include "newer.h"

#define GR_EXPORT __attribute__((visibility("default")))

/* Declared in cudaGL.h and cudaVDPAU.h, which need headers of OpenGL and VDPAU. */
CUresult CUDAAPI cuGLCtxCreate(CUcontext *context, unsigned int flags, CUdevice dev);
CUresult CUDAAPI cuGLCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice dev);
CUresult CUDAAPI cuVDPAUCtxCreate(CUcontext *context, unsigned int flags, CUdevice dev, uint32_t vdp_device,
                                  void *vdp_get_proc_address);
CUresult CUDAAPI cuVDPAUCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice dev, uint32_t vdp_device,
                                     void *vdp_get_proc_address);

#endif
