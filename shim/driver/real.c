/* The driver's own functions, and what every part of the shim shares. */
#include <errno.h>
#include <stdio.h>

#include "lookup/dlsym.h"
#include "shim.h"

struct gr_real gr_real;
/* Linked first of what is hot, so that all of it lies in one line. */
GR_HOT_DATA _Atomic int gr_shim_state __attribute__((aligned(GR_LINE_BYTES))) = GR_SHIM_UNRESOLVED;
struct gr_core gr_core;

/* Used by dlsym.S. Every writer writes the same value. */
GR_HIDDEN dlsym_function *gr_real_dlsym;
GR_HIDDEN dlsym_function *gr_find_real_dlsym(void);

dlsym_function *gr_find_real_dlsym(void)
{
        dlsym_function *real = __atomic_load_n(&gr_real_dlsym, __ATOMIC_RELAXED);

        if (!real) {
                real = gr_next_dlsym();
                __atomic_store_n(&gr_real_dlsym, real, __ATOMIC_RELAXED);
        }
        return real;
}

void *gr_real_symbol(void *handle, const char *name)
{
        return gr_find_real_dlsym()(handle, name);
}

bool gr_device_uuid(CUdevice dev, CUuuid *ret, char *ret_text)
{
        CUuuid uuid;
        size_t at = 0;

        /* _v2 tells MIG instances of one card apart. */
        if ((!gr_real.cuDeviceGetUuid_v2 || gr_real.cuDeviceGetUuid_v2(&uuid, dev) != CUDA_SUCCESS) &&
            (!gr_real.cuDeviceGetUuid || gr_real.cuDeviceGetUuid(&uuid, dev) != CUDA_SUCCESS))
                return false;
        if (ret)
                *ret = uuid;
        for (size_t i = 0; ret_text && i < sizeof(uuid.bytes); i++)
                at += (size_t)snprintf(ret_text + at, GR_UUID_TEXT_BYTES - at, "%s%02x",
                                       i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", (unsigned char)uuid.bytes[i]);
        return true;
}
CUresult gr_given(CUresult result, const CUdeviceptr *dptr)
{
        GR_KEEP_ERRNO;

        if (result == CUDA_SUCCESS && gr_shim_ready())
                gr_pool_given(&gr_core, *dptr);
        return result;
}
