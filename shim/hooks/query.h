/* What the program asks about pointers. */
#ifndef GR_QUERY_H
#define GR_QUERY_H

#include "shim.h"

/*
 * A pointer that is no allocation: the driver answers for it as for one that was freed (docs/measurements.md,
 * no-pointer).
 */
#define GR_NO_POINTER ((CUdeviceptr)0x1000)

/* Describes the block of the pool that ptr lies in; *ret_base is its first byte. 0; -ENOENT: there is none. */
int gr_query_block_at(CUdeviceptr ptr, CUdeviceptr *ret_base, struct gr_block_info *ret_info);

/* The pointer to ask the driver about: GR_NO_POINTER where ptr lies in cached memory, else ptr. */
CUdeviceptr gr_query_unless_cached(CUdeviceptr ptr);

#endif
