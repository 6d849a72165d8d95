/*
 * A program that asks for CUDA where there is none: it must find nothing, natively and under the library. With "later"
 * it then loads the driver by itself, and from that moment finds what a program finds.
 */
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum {
        CUDA_NOT_INITIALIZED = 3, /* cudaErrorInitializationError */
        SKIPPED = 77
};

static void visit(const char *file)
{
        void *plugin = dlopen(file, RTLD_NOW | RTLD_LOCAL), *found;
        int (*work)(void);

        if (!plugin && !dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL))
                exit(SKIPPED); /* asked only now: a plugin is to be what brings the driver in */
        GR_CHECK(plugin != NULL);
        found = plugin ? dlsym(plugin, "plugin_work") : NULL;
        GR_CHECK(found != NULL);
        if (!found)
                return;
        memcpy(&work, &found, sizeof(work));
        printf("the plugin's work: %d\n", work());
        printf("closed: %d\n", dlclose(plugin));
        printf("still there: %d\n", dlopen(file, RTLD_NOW | RTLD_NOLOAD) != NULL);
}

int main(int argc, char **argv)
{
        static const char *const names[] = {
                "cuInit",
                "cuNoSuchFunction",
#define GR_HOOK(symbol) #symbol,
#define GR_CALL(symbol)
#define GR_NEED(symbol)
#include "driver/hooks.def"
        };
        void *self = dlopen(NULL, RTLD_NOW), *driver, *found, *(*real_malloc)(size_t);
        const char *error;
        int (*give_back)(void *);
        bool named;

        if (argc > 2 && strcmp(argv[1], "plugin") == 0) {
                for (int i = 0; i < 5; i++)
                        visit(argv[2]);
                return GR_CHECK_RESULT();
        }
        for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
                dlerror();
                found = dlsym(RTLD_DEFAULT, names[i]);
                error = dlerror();
                named = error && strstr(error, names[i]);
                printf("%s everywhere: %d, named in the error %d, again %d\n", names[i], found != NULL, named,
                       dlerror() != NULL);
                found = dlsym(self, names[i]);
                printf("%s through the program: %d, error %d\n", names[i], found != NULL, dlerror() != NULL);
                /* What comes after the caller is us, whatever there is behind us. */
                printf("~%s next: %d\n", names[i], dlsym(RTLD_NEXT, names[i]) != NULL);
        }
        *(void **)&real_malloc = dlsym(RTLD_NEXT, "malloc");
        printf("malloc: %d %d\n", real_malloc != NULL, dlsym(self, "malloc") == *(void **)&real_malloc);
        *(void **)&give_back = dlvsym(RTLD_DEFAULT, "cudaFree", "libcudart.so.12");
        dlerror();
        printf("a runtime that frees: %d\n", give_back && give_back(&named) != CUDA_NOT_INITIALIZED);
        printf("the driver: %d, error %d\n", dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD) != NULL, dlerror() != NULL);
        if (argc > 1 && strcmp(argv[1], "later") == 0) {
                driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
                GR_CHECK(driver != NULL);
                for (size_t i = 0; driver && i < sizeof(names) / sizeof(names[0]); i++)
                        printf("%s later: %d %d\n", names[i], dlsym(driver, names[i]) != NULL,
                               dlsym(RTLD_DEFAULT, names[i]) != NULL);
        }
        return GR_CHECK_RESULT();
}
