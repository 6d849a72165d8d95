/*
 * The floor for any preloaded allocator, for scripts/bench: a hook for cuMemAlloc and cuMemFree that does nothing but
 * hand a block that was freed to the next request of its size. What a call costs beyond it is an allocator's own; what
 * it costs itself, the program's way to the driver.
 *
 * No allocator: it keeps a few blocks, knows no contexts, threads or fences, and ends with the process. A static CUDA
 * runtime finds it through dlsym, as it finds the driver: dlsym(h, "cuGetProcAddress_v2"), and the rest through that.
 */
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include <cuda.h>

#include "driver/dlsym.h"

#define EXPORT __attribute__((visibility("default")))

typedef CUresult CUDAAPI alloc_function(CUdeviceptr *ptr, size_t bytes);
typedef CUresult CUDAAPI free_function(CUdeviceptr ptr);
typedef CUresult CUDAAPI find_function(const char *symbol, void **pfn, int version, cuuint64_t flags,
                                       CUdriverProcAddressQueryResult *status);

static struct block {
        CUdeviceptr ptr; /* 0: none */
        size_t bytes;
        bool used; /* the program has it */
} kept[4];
enum { KEPT = sizeof(kept) / sizeof(*kept) };

static void *real(void *handle, const char *name)
{
        static dlsym_function *real_dlsym;

        if (!real_dlsym)
                real_dlsym = gr_next_dlsym();
        return real_dlsym(handle, name);
}

static void *of_driver(const char *name)
{
        void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);

        return driver ? real(driver, name) : NULL;
}

EXPORT CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *ptr, size_t bytes)
{
        static alloc_function *real_alloc;
        struct block *place = NULL;
        CUresult result;

        for (int i = 0; i < KEPT; i++)
                if (kept[i].bytes == bytes && !kept[i].used && kept[i].ptr) {
                        kept[i].used = true;
                        *ptr = kept[i].ptr;
                        return CUDA_SUCCESS;
                }
        if (!real_alloc)
                real_alloc = (alloc_function *)of_driver("cuMemAlloc_v2");
        result = real_alloc(ptr, bytes);
        for (int i = 0; i < KEPT; i++)
                if (!kept[i].used && (!place || (place->ptr && !kept[i].ptr)))
                        place = &kept[i];
        if (result == CUDA_SUCCESS && place) {
                CUdeviceptr before = place->ptr;

                *place = (struct block){*ptr, bytes, true};
                if (before)
                        cuMemFree_v2(before);
        }
        return result;
}

EXPORT CUresult CUDAAPI cuMemFree_v2(CUdeviceptr ptr)
{
        static free_function *real_free;

        for (int i = 0; i < KEPT && ptr; i++)
                if (kept[i].ptr == ptr) {
                        kept[i].used = false;
                        return CUDA_SUCCESS;
                }
        if (!real_free)
                real_free = (free_function *)of_driver("cuMemFree_v2");
        return real_free(ptr);
}

static CUresult CUDAAPI find(const char *symbol, void **pfn, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status);

/* Each is what the name without _v2 means from a version of CUDA on. */
static const struct hook {
        const char *exported;
        int since;
        void *function;
} hooks[] = {{"cuGetProcAddress_v2", 12000, (void *)find},
             {"cuMemAlloc_v2", 3020, (void *)cuMemAlloc_v2},
             {"cuMemFree_v2", 3020, (void *)cuMemFree_v2}};

static CUresult CUDAAPI find(const char *symbol, void **pfn, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status)
{
        find_function *real_find = (find_function *)of_driver("cuGetProcAddress_v2");
        CUresult result = real_find(symbol, pfn, version, flags, status);

        for (size_t i = 0; i < sizeof(hooks) / sizeof(*hooks) && result == CUDA_SUCCESS && *pfn; i++)
                if (!strncmp(hooks[i].exported, symbol, strlen(symbol)) &&
                    !strcmp(hooks[i].exported + strlen(symbol), "_v2") && version >= hooks[i].since)
                        *pfn = hooks[i].function;
        return result;
}

EXPORT void *dlsym(void *handle, const char *name)
{
        void *found = real(handle, name);

        for (size_t i = 0; i < sizeof(hooks) / sizeof(*hooks) && found && handle != RTLD_NEXT; i++)
                if (!strcmp(hooks[i].exported, name))
                        found = hooks[i].function;
        return found;
}
