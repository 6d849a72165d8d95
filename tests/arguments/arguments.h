/* What the generated table of functions and the program that walks through it share. */
#ifndef GR_TEST_ARGUMENTS_H
#define GR_TEST_ARGUMENTS_H

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

#include "newer.h"

#ifndef GR_LINKED
#define GR_LINKED 0 /* 1: in a program made with the library's own objects */
#endif

#if GR_LINKED
#include "driver/real.h"
#define LINKED(function)        (void *)function, (void **)&gr_real.function
#define LINKED_NEEDED(function) (void *)function, NULL
#else
#define LINKED(function)        NULL, NULL
#define LINKED_NEEDED(function) NULL, NULL
#endif

enum { PARAMETERS_MAX = 8 };

/* Kinds of parameters; each has its own values to be tried with. */
enum kind {
        KIND_POINTER,
        KIND_TEXT,
        KIND_ADDRESS,
        KIND_SIZE,
        KIND_NUMBER,
        KIND_GENERIC,
        KIND_ENUM,
        KIND_RECORD,
        KIND_HANDLE
};

union value {
        void *pointer;
        const char *text;
        CUdeviceptr address;
        unsigned long long size;
        int number;
        CUmemGenericAllocationHandle generic;
        int enumeration;
        uintptr_t handle;
};

struct function {
        const char *name;
        CUresult (*call)(void *function, const union value *values);
        /* With the library's own objects: its hook, and where it has the driver's, if it can do without. */
        void *hook, **real;
        unsigned parameters;
        enum kind kinds[PARAMETERS_MAX];
};

extern const struct function functions[];
extern const unsigned function_count;

#endif
