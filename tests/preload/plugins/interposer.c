/*
 * Another library to preload, as profilers and memory tracers are: it stands in for cuMemAlloc_v2, the runtime's
 * cudaMalloc and for dlsym itself, and reaches the next one in the order of loading with RTLD_NEXT. It counts what
 * passes through it. ONLY: the one function of the runtime, with one argument, that it stands in for instead.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

#ifdef ONLY
#define NAME_OF(function) #function
#define NAME(function)    NAME_OF(function)

EXPORT int ONLY(uintptr_t word);

int ONLY(uintptr_t word)
{
        int (*next)(uintptr_t) = NULL;
        void *found = dlsym(RTLD_NEXT, NAME(ONLY));

        memcpy(&next, &found, sizeof(next));
        return next ? next(word) : 3;
}
#else
#include "driver/dlsym.h"

typedef int alloc_function(uint64_t *, size_t);

EXPORT int interposer_allocs, interposer_lookups;
EXPORT void *interposer_next; /* the cuMemAlloc_v2 after this one */
EXPORT int cuMemAlloc_v2(uint64_t *dptr, size_t bytesize);

int cuMemAlloc_v2(uint64_t *dptr, size_t bytesize)
{
        alloc_function *next = NULL;

        interposer_next = dlsym(RTLD_NEXT, "cuMemAlloc_v2");
        interposer_allocs++;
        memcpy(&next, &interposer_next, sizeof(next));
        return next ? next(dptr, bytesize) : 3;
}

EXPORT int cudaMalloc(void **ptr, size_t bytes);

int cudaMalloc(void **ptr, size_t bytes)
{
        int (*next)(void **, size_t) = NULL;
        void *found = dlsym(RTLD_NEXT, "cudaMalloc");

        memcpy(&next, &found, sizeof(next));
        return next ? next(ptr, bytes) : 3;
}

/* The program's question about anything but our own function goes on to the C library's dlsym. */
EXPORT void *dlsym(void *restrict handle, const char *restrict name)
{
        static dlsym_function *next;

        interposer_lookups++;
        if (handle != RTLD_NEXT && strcmp(name, "cuMemAlloc_v2") == 0)
                return (void *)cuMemAlloc_v2;
        if (!next)
                next = gr_next_dlsym();
        return next(handle, name);
}
#endif
