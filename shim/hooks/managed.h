/* cuMemFree of memory that is no block of the pool: managed, imported or stream-ordered. */
#ifndef GR_MANAGED_H
#define GR_MANAGED_H

#include "shim.h"

CUresult gr_managed_free_accounted(CUdeviceptr ptr);

#endif
