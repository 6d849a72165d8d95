/* The C library's dlsym, for who stands in its place: this library and those of tests. */
#ifndef GR_DLSYM_H
#define GR_DLSYM_H

#include <dlfcn.h>

/* What it was first exported under, and still is. */
#if defined(__x86_64__)
#define GR_DLSYM_VERSION "GLIBC_2.2.5"
#else
#define GR_DLSYM_VERSION "GLIBC_2.17"
#endif

typedef void *dlsym_function(void *handle, const char *name);

/* The next one in the order of loading after whatever this is compiled into. Any thread; sets dlerror where it fails.
 */
static inline dlsym_function *gr_next_dlsym(void)
{
        return (dlsym_function *)dlvsym(RTLD_NEXT, "dlsym", GR_DLSYM_VERSION);
}

#endif
