/*
 * A program with planted leaks (origins_test.sh). `origins MODE [LIBRARY LIBRARY|LIBRARY HOW]`: the table of modes is
 * at the end, and the function of a mode says what it does. All but `until` kill themselves.
 */
#include <cuda.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "check.h"

#define THREADS 4
#define ROUNDS  20000

static char **given; /* the arguments behind MODE */
static CUcontext context;
static _Atomic CUdeviceptr passed[THREADS];
static pthread_barrier_t turn;
static ucontext_t outside, inside;
static bool waits_while_loading;
static enum { ALWAYS_FAST, FIRST_SLOW, ALWAYS_SLOW } stacks;

/*
 * Instead of the C library's: the thread's time goes on by 100 ms between the two readings beside a stack that is to be
 * slow.
 */
__attribute__((visibility("default"))) int clock_gettime(clockid_t clock, struct timespec *now)
{
        static _Atomic unsigned readings, added;
        int result = (int)syscall(SYS_clock_gettime, clock, now);

        if (stacks != ALWAYS_FAST && clock == CLOCK_THREAD_CPUTIME_ID && result == 0) {
                unsigned reading = readings++;

                if (reading % 2 == 1 && (stacks == ALWAYS_SLOW || reading < 24 || reading % 16 == 1))
                        added++;
                now->tv_sec += added / 10;
                now->tv_nsec += added % 10 * 100000000L;
                now->tv_sec += now->tv_nsec / 1000000000L;
                now->tv_nsec %= 1000000000L;
        }
        return result;
}

/* In place of the C library's: the environment says of which size a mapping fails. */
__attribute__((visibility("default"))) void *mmap(void *at, size_t bytes, int protection, int flags, int fd,
                                                  off_t offset)
{
        const char *none = getenv("ORIGINS_NOT_MAPPED");

        if (none && bytes == strtoull(none, NULL, 10)) {
                errno = ENOMEM;
                return MAP_FAILED;
        }
        return (void *)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset); // NOLINT: an address
}

static __attribute__((noinline)) void first(void)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemAlloc(&ptr, MIB)); /* first's line */
}

static __attribute__((noinline)) void second(void)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemAlloc(&ptr, 3000)); /* second's line */
}

static void first_and_leave(void)
{
        first();
        swapcontext(&inside, &outside);
}

/* Eight bytes before a page that cannot be read, of nine by which the unwinder knows where a signal handler returns. */
static uint64_t edge(void)
{
        size_t page = (size_t)sysconf(_SC_PAGESIZE);
        char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        GR_MUST(pages == MAP_FAILED || mprotect(pages + page, page, PROT_NONE));
        memcpy(pages + page - 8, "\x48\xc7\xc0\x0f\x00\x00\x00\x0f", 8);
        return (uintptr_t)pages + page - 8;
}

/* first() keeps ten blocks of 1 MiB, second() three of 3000 bytes. */
static void plant(void)
{
        CUdeviceptr ptr;

        for (int i = 0; i < 100; i++) {
                GR_MUST(cuMemAlloc(&ptr, 1000));
                GR_MUST(cuMemFree(ptr));
        }
        for (volatile int i = 0; i < 10; i++) /* volatile, so that the compiler leaves one call of each */
                first();
        for (volatile int i = 0; i < 3; i++)
                second();
}

/* Calls second() by a way that the bits of `way` tell. */
static __attribute__((noinline)) void go(unsigned way, unsigned steps) // NOLINT(misc-no-recursion)
{
        if (steps == 0) {
                second();
        } else if (way & 1) {
                go(way >> 1, steps - 1);
                __asm__ volatile("nop"); /* else the two would be one place */
        } else {
                go(way >> 1, steps - 1);
                __asm__ volatile("");
        }
}

/* Keeps a block of 3000 bytes from each of 2048 stacks. */
static void many_stacks(void)
{
        for (unsigned way = 0; way < 2048; way++)
                go(way, 11);
}

/*
 * Twice allocates 20000 blocks and frees them, first every other one, but keeps each tenth at the end: so many that
 * there are lists of three and more in the library's table by address.
 */
static void many(void)
{
        static CUdeviceptr ptrs[20000];
        uint32_t random = 1;

        for (int round = 0; round < 2; round++) {
                for (int i = 0; i < 20000; i++) {
                        random = random * 1664525 + 1013904223;
                        GR_MUST(cuMemAlloc(&ptrs[i], ((random >> 23) + 1) * 512));
                }
                for (int begin = 1; begin >= 0; begin--)
                        for (int i = begin; i < 20000; i += 2)
                                if (round == 0 || i % 10 > 0)
                                        GR_MUST(cuMemFree(ptrs[i]));
        }
}

static __attribute__((noinline)) CUdeviceptr kept_by_thread(void)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemAlloc(&ptr, 4096));
        return ptr;
}

/* Two places on one line. */
#define EITHER(condition, place)                                                                                       \
        if (condition) {                                                                                               \
                place;                                                                                                 \
                __asm__ volatile("nop");                                                                               \
        } else {                                                                                                       \
                place;                                                                                                 \
                __asm__ volatile("");                                                                                  \
        }

static __attribute__((noinline)) void moved(void)
{
        static CUdeviceptr last;
        static bool is_other;
        CUdeviceptr old = last;

        is_other = !is_other;
        EITHER(is_other, last = kept_by_thread());
        if (old)
                GR_MUST(cuMemFree(old));
}

static void *in_thread(void *number)
{
        size_t own = (size_t)number;
        CUdeviceptr ptrs[8] = {0};

        GR_MUST(cuCtxSetCurrent(context));
        pthread_barrier_wait(&turn);
        for (int i = 0; i < ROUNDS; i++) {
                if (ptrs[i % 8])
                        GR_MUST(cuMemFree(ptrs[i % 8]));
                GR_MUST(cuMemAlloc(&ptrs[i % 8], 4096));
        }
        for (int i = 0; i < 8; i++)
                GR_MUST(cuMemFree(ptrs[i]));
        for (int i = 0; i < 5; i++)
                kept_by_thread();
        for (int i = 0; i < 4; i++) {
                passed[own] = kept_by_thread();
                pthread_barrier_wait(&turn);
                GR_MUST(cuMemFree(passed[(own + 1) % THREADS]));
                pthread_barrier_wait(&turn);
        }
        return NULL;
}

/*
 * Four threads allocate and free at once, and each keeps five blocks of 4 KiB from kept_by_thread(), and four that
 * another thread frees.
 */
static void run_threads(void)
{
        pthread_t threads[THREADS];

        pthread_barrier_init(&turn, NULL, THREADS);
        for (size_t i = 0; i < THREADS; i++)
                GR_MUST(pthread_create(&threads[i], NULL, in_thread, (void *)i)); // NOLINT
        for (size_t i = 0; i < THREADS; i++)
                GR_MUST(pthread_join(threads[i], NULL));
}

/*
 * Keeps a block from plant() of the first library and closes that, then the same with the second one; says whether they
 * were at the same address. Both from one place: nothing but the library is another one.
 */
static void use_libraries(void)
{
        void *bases[2];
        Dl_info info;

        for (int i = 0; i < 2; i++) {
                void *library = dlopen(given[i], RTLD_NOW | RTLD_LOCAL);
                int (*work)(void);

                GR_MUST(!library);
                work = (int (*)(void))dlsym(library, "work");
                GR_MUST(!work || !dladdr((void *)work, &info) || work());
                bases[i] = info.dli_fbase;
                GR_MUST(dlclose(library));
        }
        printf("%s address\n", bases[0] == bases[1] ? "the same" : "another");
        fflush(stdout);
}

static void *first_in_thread(void *arg)
{
        GR_MUST(cuCtxSetCurrent(context));
        first();
        return arg;
}

void origins_loading(void); /* of origins_plugin.c */

__attribute__((visibility("default"))) void origins_loading(void)
{
        struct timespec until;
        pthread_t thread;

        if (!waits_while_loading)
                return;
        GR_MUST(pthread_create(&thread, NULL, first_in_thread, NULL));
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += 20;
        GR_MUST(pthread_timedjoin_np(thread, NULL, &until));
}

/* first() in another thread, for which the constructor of the first library waits. */
static void while_loading(void)
{
        second();
        waits_while_loading = true;
        GR_MUST(!dlopen(given[0], RTLD_NOW | RTLD_LOCAL));
}

static __attribute__((noinline)) void small(void)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemAlloc(&ptr, MIB));
}

static __attribute__((noinline)) void deep(int calls)
{
        if (calls > 0)
                deep(calls - 1);
        else
                small();
        __asm__ volatile(""); /* no tail call */
}

static __attribute__((noinline)) void medium(void)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemAlloc(&ptr, 3 * MIB));
}

static __attribute__((noinline)) void large(void)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemAlloc(&ptr, 64 * MIB));
}

static void be_refused(void)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemAlloc(&ptr, 16 * GIB) != CUDA_ERROR_OUT_OF_MEMORY);
}

/*
 * Plants; then first() keeps one more for each x on standard input, and for each m moved() another one instead of its
 * last, until that ends.
 */
static void until_input_ends(void)
{
        char byte;

        plant();
        printf("begun\n");
        fflush(stdout);
        while (read(STDIN_FILENO, &byte, 1) > 0) {
                byte == 'm' ? moved() : first();
                printf("more\n");
                fflush(stdout);
        }
        exit(0);
}

/* A child exits after the blocks were planted. */
static void beside_a_child(void)
{
        pid_t child;

        plant();
        child = fork();
        if (child == 0)
                exit(0);
        GR_MUST(waitpid(child, NULL, 0) != child);
}

/*
 * Keeps ten blocks of 64 MiB from large(), 5120 of 1 MiB from small() and 1024 of 3 MiB from medium(); then it asks for
 * 16 GiB in vain.
 */
static void sampled(void)
{
        for (int i = 0; i < 10; i++) {
                usleep(20000); /* much longer than 64 stacks take, so all are noted */
                large();
        }
        for (int i = 0; i < 5120; i++) { /* 64 MiB are a multiple of the period */
                usleep(50);              /* or hardly any would be noted */
                small();
                if (i % 5 == 0)
                        medium();
        }
        be_refused();
}

/* Keeps 32 blocks of 64 MiB from large(); the first stacks and every eighth take 100 ms of the time. */
static void cold(void)
{
        stacks = FIRST_SLOW;
        for (int i = 0; i < 32; i++) {
                usleep(20000);
                large();
        }
}

/* Keeps 24 blocks of 64 MiB from large(), each among eight others that are freed at once, with a pause after each. */
static void bursts(void)
{
        for (int i = 0; i < 24; i++) {
                for (int k = 0; k < 8; k++) {
                        CUdeviceptr p;

                        GR_MUST(cuMemAlloc(&p, 80 * MIB));
                        GR_MUST(cuMemFree(p));
                        if (k == 4)
                                large();
                }
                usleep(50000);
        }
}

/* Keeps 5120 blocks of 1 MiB from small(), 100 calls deep; each stack takes 100 ms of the thread's time. */
static void deep_stacks(void)
{
        stacks = ALWAYS_SLOW;
        for (int i = 0; i < 5120; i++)
                deep(100);
}

/* Calls work on a stack of its own, without an end that an unwinder knows. returns_to: 0, or where it would return. */
static void on_own_stack(void (*work)(void), uint64_t returns_to)
{
        static char stack[65536] __attribute__((aligned(16)));

        GR_MUST(getcontext(&inside));
        inside.uc_stack = (stack_t){.ss_sp = stack, .ss_size = sizeof(stack)};
        inside.uc_link = &outside;
        makecontext(&inside, work, 0);
        if (returns_to)
#if defined(__x86_64__)
                *(uint64_t *)inside.uc_mcontext.gregs[REG_RSP] = returns_to; // NOLINT: an address
#elif defined(__aarch64__)
                inside.uc_mcontext.regs[30] = returns_to;
#endif
        GR_MUST(swapcontext(&outside, &inside));
}

static void in_coroutine(void)
{
        on_own_stack(first, 0);
}

/* The outermost function would return to an address that is none. */
static void from_nowhere(void)
{
        on_own_stack(first_and_leave, UINT64_C(0xdeaddeaddeaddeac));
}

#ifdef __x86_64__
/* Calls its argument. No symbol covers it: that of another function is the nearest before it. */
__asm__(".section .text.unnamed, \"ax\", @progbits\n"
        ".Lunnamed: .cfi_startproc\n"
        "push %rbp\n"
        ".cfi_def_cfa_offset 16\n"
        ".cfi_offset rbp, -16\n"
        "call *%rdi\n"
        "pop %rbp\n"
        ".cfi_def_cfa_offset 8\n"
        "ret\n"
        ".cfi_endproc\n"
        ".text");

/* first() is called by code without a name. */
static void by_unnamed(void)
{
        void (*unnamed)(void (*function)(void));

        __asm__("lea .Lunnamed(%%rip), %0" : "=r"(unnamed));
        unnamed(first);
}
#else
#define by_unnamed first
#endif

/* It would return to the last bytes before a page that cannot be read. */
static void from_the_edge(void)
{
        on_own_stack(first_and_leave, edge());
}

/* second(), then the library, origins_interpreter.c, calls first() below its frames, which are as HOW says. */
static void below_frames(void)
{
        void (*work)(const char *, void (*)(void));
        void *library;

        second();
        library = dlopen(given[0], RTLD_NOW | RTLD_LOCAL);
        GR_MUST(!library);
        work = (void (*)(const char *, void (*)(void)))dlsym(library, "work_in_frames");
        GR_MUST(!work);
        work(given[1], first);
}

/*
 * second(), kept_by_thread() and medium() keep a block before what is planted, and first() one of a second device; then
 * both are asked for 16 GiB in vain.
 */
static void refused(void)
{
        CUcontext other;

        second();
        kept_by_thread();
        medium();
        plant();
        GR_MUST(cuDevicePrimaryCtxRetain(&other, 1));
        GR_MUST(cuCtxSetCurrent(other));
        first();
        be_refused();
        GR_MUST(cuCtxSetCurrent(context));
        be_refused();
}

/* Gets two blocks from kept_by_thread(), writes behind one of them and frees it. */
static void overrun(void)
{
        CUdeviceptr ptr = 0;

        for (volatile int i = 0; i < 2; i++) /* one call in the optimized program, too */
                ptr = kept_by_thread();
        GR_MUST(cuMemsetD8(ptr + 4096, 7, 4));
        GR_MUST(cuMemFree(ptr));
}

/* Keeps ten blocks of 1 MiB in a context that it destroys, and one from second() in another. */
static void of_contexts(void)
{
        CUcontext other;

        GR_MUST(cuCtxCreate(&other, NULL, 0, 0));
        for (int i = 0; i < 10; i++)
                first();
        GR_MUST(cuCtxDestroy(other));
        GR_MUST(cuCtxSetCurrent(context));
        second();
}

int main(int argc, char **argv)
{
        static const struct {
                const char *name;
                void (*run)(void);
                int arguments; /* behind MODE */
        } modes[] = {
                {"killed", plant, 0},           {"until", until_input_ends, 0},
                {"threads", run_threads, 0},    {"fork", beside_a_child, 0},
                {"unload", use_libraries, 2},   {"loading", while_loading, 2},
                {"stacks", many_stacks, 0},     {"many", many, 0},
                {"sample", sampled, 0},         {"cold", cold, 0},
                {"bursts", bursts, 0},          {"deep", deep_stacks, 0},
                {"coroutine", in_coroutine, 0}, {"nowhere", from_nowhere, 0},
                {"edge", from_the_edge, 0},     {"frames", below_frames, 2},
                {"refused", refused, 0},        {"overrun", overrun, 0},
                {"contexts", of_contexts, 0},   {"unnamed", by_unnamed, 0},
        };

        given = argv + 2;
        for (size_t i = 0; argc > 1 && i < sizeof(modes) / sizeof(modes[0]); i++) {
                if (strcmp(argv[1], modes[i].name) != 0 || argc != 2 + modes[i].arguments)
                        continue;
                GR_MUST(cuInit(0));
                GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
                GR_MUST(cuCtxSetCurrent(context));
                modes[i].run();
                raise(SIGKILL);
        }
        fprintf(stderr, "usage: origins MODE [LIBRARY LIBRARY|LIBRARY HOW]\n");
        return 2;
}
