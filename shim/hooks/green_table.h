/* The green contexts of the program that hooks saw being made. errno may change. */
#ifndef GR_GREEN_TABLE_H
#define GR_GREEN_TABLE_H

#include "shim.h"

/* Adds one; false: out of memory. */
bool gr_green_add(CUgreenCtx handle, CUdevice dev);

/* Notes the context that the program has got for a green context from cuCtxFromGreenCtx. */
void gr_green_name(CUgreenCtx handle, CUcontext context);

/* The device of a green context, and of the green context behind a context that was noted; -1: not known. */
CUdevice gr_green_device(CUgreenCtx handle);
CUdevice gr_green_device_of(CUcontext context);

void gr_green_remove(CUgreenCtx handle);

#endif
