/*
 * shim/lookup/dlsym.S by itself, with stand-ins for what it calls: which names are asked about, which answers count,
 * and that a look-up which is none of ours reaches the C library's dlsym exactly as its caller made it. Runs natively,
 * and built for aarch64 in an emulator (dlsym_aarch64_test.sh).
 */
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../shim/driver/dlsym.h"
#include "check.h"

dlsym_function *gr_real_dlsym;
dlsym_function *gr_real_find_dlsym(void);
void *gr_lookup_dlsym(void *handle, const char *name);

static char handle, answer, real_answer;
static struct {
        int hooks, finds, reals;
        void *handle;
        const char *name;
        uintptr_t back; /* where the real one will return to */
} seen;
static void *hook_says;

__attribute__((noinline)) static void *real(void *asked_handle, const char *name)
{
        seen.reals++;
        seen.handle = asked_handle;
        seen.name = name;
        seen.back = (uintptr_t)__builtin_extract_return_addr(__builtin_return_address(0));
        return &real_answer;
}

/* What a C function may destroy: all registers that the caller does not expect back. */
static void spoil(void)
{
#if defined(__x86_64__)
        __asm__ volatile(
                "xor %%eax, %%eax; mov $-7, %%rcx; mov $-7, %%rdx; mov $-7, %%rsi; mov $-7, %%rdi; mov $-7, %%r8;"
                "mov $-7, %%r9; mov $-7, %%r10; mov $-7, %%r11" ::
                        : "rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11");
#elif defined(__aarch64__)
        __asm__ volatile("mov x0, #-7; mov x1, #-7; mov x2, #-7; mov x3, #-7; mov x8, #-7; mov x9, #-7; mov x10, #-7;"
                         "mov x16, #-7; mov x17, #-7" ::
                                 : "x0", "x1", "x2", "x3", "x8", "x9", "x10", "x16", "x17");
#endif
}

dlsym_function *gr_real_find_dlsym(void)
{
        seen.finds++;
        spoil();
        gr_real_dlsym = real;
        return real;
}

void *gr_lookup_dlsym(void *asked_handle, const char *name)
{
        /* The stack must be aligned for what a compiler makes of this. */
        GR_CHECK_EQ((uintptr_t)__builtin_frame_address(0) % 16, 0);
        seen.hooks++;
        GR_CHECK(asked_handle == &handle);
        GR_CHECK(strncmp(name, "cu", 2) == 0 || strncmp(name, "nvml", 4) == 0);
        spoil();
        return hook_says;
}

/* The return address that the real one saw must be in here: RTLD_NEXT goes by that. */
__attribute__((noinline)) static void *ask(void *asked_handle, const char *name)
{
        void *found;

        memset(&seen, 0, sizeof(seen));
        found = dlsym(asked_handle, name);
        __asm__ volatile("" ::: "memory"); /* so that this is a call and no jump */
        return found;
}

static bool from_ask(void)
{
        return seen.back > (uintptr_t)ask && seen.back < (uintptr_t)ask + 256;
}

static void expect_real(void *asked_handle, const char *name, int finds, int hooks)
{
        GR_CHECK(ask(asked_handle, name) == &real_answer);
        GR_CHECK_EQ(seen.reals, 1);
        GR_CHECK_EQ(seen.finds, finds);
        GR_CHECK_EQ(seen.hooks, hooks);
        GR_CHECK(seen.handle == asked_handle);
        GR_CHECK(seen.name == name);
        GR_CHECK(from_ask());
}

/* No name is read beyond its end, where nothing may be. */
static void at_the_end_of_memory(void)
{
        static const char *const names[] = {"", "c", "cu", "n", "nv", "nvm", "nvml", "cuA"};
        enum { ASKED = 6 }; /* the first that is asked about */
        size_t page = (size_t)sysconf(_SC_PAGESIZE);
        char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        GR_CHECK(pages != MAP_FAILED && mprotect(pages + page, page, PROT_NONE) == 0);
        for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
                size_t bytes = strlen(names[i]) + 1;

                expect_real(&handle, memcpy(pages + page - bytes, names[i], bytes), 0, i >= ASKED);
        }
        munmap(pages, 2 * page);
}

int main(void)
{
        static const char *const not_ours[] = {
                "",    "c",   "cu",     "cud",  "cudaMalloc",   "cu_",        "cu@",    "cu[",
                "cua", "cuz", "malloc", "Cu",   "xuMemAlloc",   "cUMemAlloc", "cu\x7f", "cu\xc1",
                "n",   "nv",  "nvm",    "nvmm", "nvrtcVersion", "nvm_l",      "nVml",   "mvml"};

        /* The first look-up of all finds the real one on the way. */
        expect_real(&handle, "malloc", 1, 0);
        gr_real_dlsym = NULL;
        hook_says = NULL;
        expect_real(&handle, "cuMemAlloc", 1, 1);
        for (size_t i = 0; i < sizeof(not_ours) / sizeof(not_ours[0]); i++)
                expect_real(&handle, not_ours[i], 0, 0);
        expect_real(&handle, NULL, 0, 0);
        expect_real(NULL, NULL, 0, 0);
        expect_real(RTLD_NEXT, "cuMemAlloc", 0, 0);
        expect_real(RTLD_NEXT, "malloc", 0, 0);
        /* Asked, and no opinion. */
        expect_real(&handle, "cuMemAlloc", 0, 1);
        expect_real(&handle, "cuA", 0, 1);
        expect_real(&handle, "cuZ", 0, 1);
        expect_real(&handle, "cuptiEnableDomain", 0, 1);
        expect_real(&handle, "nvml", 0, 1);
        expect_real(&handle, "nvmlInit_v2", 0, 1);
        expect_real(RTLD_NEXT, "nvmlInit_v2", 0, 0);
        at_the_end_of_memory();

        hook_says = &answer;
        GR_CHECK(ask(&handle, "cuMemAlloc") == &answer);
        GR_CHECK_EQ(seen.hooks, 1);
        GR_CHECK_EQ(seen.reals, 0);
        hook_says = (void *)1;
        GR_CHECK(ask(&handle, "cuMemAlloc") == NULL);
        GR_CHECK_EQ(seen.hooks, 1);
        GR_CHECK_EQ(seen.reals, 0);
        if (!GR_CHECK_RESULT())
                printf("dlsym.S does what it should\n");
        return GR_CHECK_RESULT();
}
