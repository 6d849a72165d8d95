/* How a library that replaces dlsym finds the C library's dlsym. For this library, and for libraries of tests. */
#ifndef GR_DLSYM_H
#define GR_DLSYM_H

#include <dlfcn.h>

/* The symbol version of dlsym in the first glibc for the processor; newer ones still export it. */
#if defined(__x86_64__)
#define GR_DLSYM_VERSION "GLIBC_2.2.5"
#else
#define GR_DLSYM_VERSION "GLIBC_2.17"
#endif

typedef void *dlsym_function(void *handle, const char *name);

/*
 * The dlsym of the next library, in the order of loading, after the one that this is compiled into. Any thread. NULL,
 * and dlerror set, where it fails.
 */
static inline dlsym_function *gr_next_dlsym(void)
{
        return (dlsym_function *)dlvsym(RTLD_NEXT, "dlsym", GR_DLSYM_VERSION);
}

/*
 * dlsym as it would be without this library. Any thread. A program that uses nvml.c without the rest of the library
 * defines its own.
 */
void *gr_real_symbol(void *handle, const char *name);

#endif
