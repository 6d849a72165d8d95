/* A program that has its own malloc in front of the C library's, as memory checkers have, and no CUDA. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static volatile unsigned long calls; /* the compiler knows malloc, but not this one */
static void *(*real_malloc)(size_t);

__attribute__((visibility("default"))) void *malloc(size_t bytes)
{
        /* The look-up itself may allocate: what it gets then is never given back. */
        static char early[65536];
        static size_t used;
        static int looking;

        calls++;
        if (!real_malloc && !looking) {
                void *found;

                looking = 1;
                found = dlsym(RTLD_NEXT, "malloc");
                looking = 0;
                memcpy(&real_malloc, &found, sizeof(real_malloc));
        }
        if (!real_malloc) {
                void *block = early + used;

                used += (bytes + 15) / 16 * 16;
                return used <= sizeof(early) ? block : NULL;
        }
        return real_malloc(bytes);
}

int main(void)
{
        unsigned long before = calls;
        Dl_info info;
        char *text = malloc(100);
        void *found;

        if (!text || calls != before + 1)
                return EXIT_FAILURE;
        strcpy(text, "malloc of the C library");
        found = dlsym(RTLD_NEXT, "malloc");
        printf("%s: %s\n", text, dladdr(found, &info) && strstr(info.dli_fname, "libc.so") ? "found" : "missed");
        printf("not there: %d", dlsym(RTLD_NEXT, "no_such_thing") == NULL);
        printf(" %s\n", dlerror() ? "with an error" : "silently");
        printf("itself: %d\n", dlsym(RTLD_DEFAULT, "malloc") == (void *)malloc);
        free(text);
        return 3;
}
