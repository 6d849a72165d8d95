/*
 * What RTLD_NEXT means when two libraries stand in for the driver: the one after the caller, in the order of loading.
 *
 *   rtld_next FIRST SECOND   the file names (their beginnings) of the libraries that must be asked one after the other
 */
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

static const char *owner(void *function)
{
        Dl_info info;
        const char *slash;

        if (!function || !dladdr(function, &info))
                return "nobody";
        slash = strrchr(info.dli_fname, '/');
        return slash ? slash + 1 : info.dli_fname;
}

static void expect_owner(const char *question, void *function, const char *name)
{
        printf("%s: %s\n", question, owner(function));
        if (strncmp(owner(function), name, strlen(name)) != 0) {
                fprintf(stderr, "%s: expected %s, not %s\n", question, name, owner(function));
                gr_check_failures++;
        }
}

int main(int argc, char **argv)
{
        int *allocs = dlsym(RTLD_DEFAULT, "interposer_allocs"), *lookups = dlsym(RTLD_DEFAULT, "interposer_lookups");
        void **next = dlsym(RTLD_DEFAULT, "interposer_next");
        CUresult (*second)(CUdeviceptr *, size_t) = NULL;
        CUdeviceptr block, other;
        CUcontext context;

        if (argc != 3 || !allocs || !lookups || !next) {
                fprintf(stderr, "rtld_next: needs two names and the interposer\n");
                return EXIT_FAILURE;
        }
        GR_CHECK_EQ(cuInit(0), 0);
        GR_CHECK_EQ(cuDevicePrimaryCtxRetain(&context, 0), 0);
        GR_CHECK_EQ(cuCtxSetCurrent(context), 0);
        expect_owner("the linked symbol", (void *)cuMemAlloc, argv[1]);
        /* Asked through an interposer's dlsym, "next" may mean next to the interposer. */
        if (strncmp(argv[1], "libinterposer", 13) != 0)
                expect_owner("the next of the program", dlsym(RTLD_NEXT, "cuMemAlloc_v2"), argv[1]);

        GR_CHECK_EQ(cuMemAlloc(&block, 4096), 0);
        if (strncmp(argv[1], "libinterposer", 13) == 0) {
                GR_CHECK_EQ(*allocs, 1);
                GR_CHECK(*lookups > 0); /* its dlsym comes first, too */
        } else {
                GR_CHECK_EQ(*allocs, 0);
                /* Ours asks the driver itself; the other is reached by those who ask for what comes after us. */
                *(void **)&second = dlsym(dlopen(argv[2], RTLD_NOW | RTLD_NOLOAD), "cuMemAlloc_v2");
                GR_CHECK(second != NULL);
                if (second) {
                        GR_CHECK_EQ(second(&other, 4096), 0);
                        GR_CHECK_EQ(cuMemFree(other), 0); /* not from our pool: the driver's answer */
                }
                GR_CHECK_EQ(*allocs, 1);
        }
        expect_owner("the next of the interposer", *next,
                     strncmp(argv[1], "libinterposer", 13) == 0 ? argv[2] : "libcuda");
        GR_CHECK_EQ(cuMemFree(block), 0);
        return GR_CHECK_RESULT();
}
