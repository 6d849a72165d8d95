/*
 * A program whose trace is looked at (trace_test.sh). `traced MODE [COUNT]`: what it allocates is known to the byte.
 *
 *   killed   a thread allocates and frees ROUNDS blocks, then the first thread; one block stays; then it kills itself
 *   until    goes on until its standard input ends
 *   wraps    COUNT rounds, then one block stays
 *   execs    10 rounds; then executes itself, COUNT times
 *   others   pins 1 MiB of host memory and captures a stream
 *   gone     three times allocates 10 blocks and resets the context, which frees them
 *   closed   closes its standard streams; then the rounds. The exit status is 3 if the library writes to one, and 4 if
 *            the file does not grow in large pieces
 *   unseen   a round, where nothing says what an open file is
 *   ended    a second thread is told to end, and does so after 20 * ROUNDS; then the first thread makes as many
 *   behind   a second thread allocates, waits for a while, and allocates a block of its own size, which stays; 28000
 *            entries later 10000 more follow
 *   pieces   frees every second of 16 blocks of 4 MiB, and then asks for 20 MiB; with a COUNT the GPU is busy meanwhile
 *   short    COUNT threads, one after another, of a round each
 *   forks    a thread that has allocated forks while the file grows; its child ends that thread, and must end by that
 *   left     as behind, but the second thread ends, and a third allocates that block
 *   lent     a second thread, which has written little, frees a block of the first, between 10000 entries and 27000
 */
#include <cuda.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

#define ROUNDS 1000
#define BLOCK  65536
#define KEPT   12345

static CUcontext context;
static pthread_barrier_t turn;
static bool closed, wrong, grown, unseen;
static atomic_bool at_end, forking, grows, forked;

/* In place of the C library's, which the library calls where the file grows. */
__attribute__((visibility("default"))) ssize_t pwrite64(int fd, const void *bytes, size_t length, off64_t at)
{
        wrong |= closed && fd <= STDERR_FILENO;
        grown = length >= 256 << 10;
        for (grows = true; forking && !forked;)
                usleep(1000);
        return syscall(SYS_pwrite64, fd, bytes, length, at);
}

/* Likewise; the library calls this one for fstat (tools/glibc/stat.c). */
int __fxstat64(int version, int fd, struct stat *ret);

__attribute__((visibility("default"))) int __fxstat64(int version, int fd, struct stat *ret)
{
        (void)version;
        if (!unseen)
                return fstatat(fd, "", ret, AT_EMPTY_PATH);
        errno = EIO;
        return -1;
}

static void rounds(int count)
{
        CUdeviceptr ptr;

        for (int i = 0; i < count; i++) {
                GR_MUST(cuMemAlloc(&ptr, BLOCK));
                GR_MUST(cuMemFree(ptr));
        }
}

static CUdeviceptr keep(void)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemAlloc(&ptr, KEPT));
        return ptr;
}

static void *in_thread(void *slow)
{
        GR_MUST(cuCtxSetCurrent(context));
        if (!slow) {
                rounds(ROUNDS);
                return NULL;
        }
        rounds(1);
        pthread_barrier_wait(&turn);
        pthread_barrier_wait(&turn);
        keep();
        return NULL;
}

static void *free_lent(void *lent)
{
        GR_MUST(cuCtxSetCurrent(context));
        rounds(1);
        pthread_barrier_wait(&turn);
        pthread_barrier_wait(&turn);
        GR_MUST(cuMemFree(*(CUdeviceptr *)lent));
        return NULL;
}

static void *one_round(void *keeps)
{
        GR_MUST(cuCtxSetCurrent(context));
        if (keeps)
                keep();
        else
                rounds(1);
        return NULL;
}

static void run_thread(void *keeps)
{
        pthread_t thread;

        GR_MUST(pthread_create(&thread, NULL, one_round, keeps));
        GR_MUST(pthread_join(thread, NULL));
}

static void *fork_as_file_grows(void *arg)
{
        pid_t child;
        int status;

        GR_MUST(cuCtxSetCurrent(context));
        rounds(1);
        grows = false;
        forking = true;
        while (!grows)
                usleep(1000);
        child = fork();
        if (child == 0) {
                alarm(10);
                return arg; /* the last thread of the child */
        }
        forked = true;
        wrong |= waitpid(child, &status, 0) != child || status != 0;
        return arg;
}

static void *told_to_end(void *arg)
{
        GR_MUST(cuCtxSetCurrent(context));
        pthread_cancel(pthread_self());
        rounds(20 * ROUNDS);
        pthread_testcancel();
        return arg;
}

static void await_end(void *end)
{
        while (!atomic_load((atomic_bool *)end))
                usleep(1000);
}

int main(int argc, char **argv)
{
        const char *mode = argc > 1 ? argv[1] : "";
        pthread_t thread;
        char byte;

        if (strcmp(mode, "closed") == 0) {
                closed = true;
                close(STDIN_FILENO);
                close(STDOUT_FILENO);
                close(STDERR_FILENO);
        }
        unseen = strcmp(mode, "unseen") == 0;
        GR_MUST(cuInit(0));
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
        if (unseen) {
                rounds(1);
        } else if (strcmp(mode, "killed") == 0) {
                GR_MUST(pthread_create(&thread, NULL, in_thread, NULL));
                GR_MUST(pthread_join(thread, NULL));
                rounds(ROUNDS);
                keep();
                raise(SIGKILL);
        } else if (strcmp(mode, "until") == 0) {
                rounds(ROUNDS);
                printf("begun\n");
                fflush(stdout);
                while (read(STDIN_FILENO, &byte, 1) > 0)
                        ;
                rounds(20 * ROUNDS);
        } else if (strcmp(mode, "wraps") == 0 && argc > 2) {
                rounds(atoi(argv[2]));
                keep();
        } else if (strcmp(mode, "execs") == 0 && argc > 2) {
                char left[16];

                rounds(10);
                snprintf(left, sizeof(left), "%d", atoi(argv[2]) - 1);
                if (atoi(argv[2]) > 0)
                        execv(argv[0], (char *[]){argv[0], argv[1], left, NULL});
        } else if (strcmp(mode, "others") == 0) {
                CUstream stream;
                CUgraph graph;
                void *pinned;

                GR_MUST(cuMemHostAlloc(&pinned, MIB, 0));
                GR_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
                GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
                GR_MUST(cuStreamEndCapture(stream, &graph));
        } else if (strcmp(mode, "gone") == 0) {
                for (int i = 0; i < 3; i++) {
                        for (int block = 0; block < 5; block++) {
                                CUdeviceptr ptr;

                                keep();
                                GR_MUST(cuMemAlloc(&ptr, MIB)); /* a range of a segment, with some pool kinds */
                        }
                        GR_MUST(cuDevicePrimaryCtxReset(0));
                        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
                        GR_MUST(cuCtxSetCurrent(context));
                }
        } else if (strcmp(mode, "closed") == 0) {
                rounds(20 * ROUNDS);
                return wrong ? 3 : grown ? 0 : 4;
        } else if (strcmp(mode, "ended") == 0) {
                GR_MUST(pthread_create(&thread, NULL, told_to_end, NULL));
                GR_MUST(pthread_join(thread, NULL));
                rounds(20 * ROUNDS);
        } else if (strcmp(mode, "behind") == 0) {
                pthread_barrier_init(&turn, NULL, 2);
                GR_MUST(pthread_create(&thread, NULL, in_thread, &turn));
                pthread_barrier_wait(&turn);
                rounds(14000);
                pthread_barrier_wait(&turn);
                GR_MUST(pthread_join(thread, NULL));
                rounds(5000);
        } else if (strcmp(mode, "short") == 0 && argc > 2) {
                for (int i = 0; i < atoi(argv[2]); i++)
                        run_thread(NULL);
        } else if (strcmp(mode, "forks") == 0) {
                GR_MUST(pthread_create(&thread, NULL, fork_as_file_grows, NULL));
                while (!forking)
                        usleep(1000);
                rounds(20 * ROUNDS);
                GR_MUST(pthread_join(thread, NULL));
                return wrong;
        } else if (strcmp(mode, "left") == 0) {
                rounds(1); /* else this thread begins with what the other one leaves */
                run_thread(NULL);
                rounds(14000);
                GR_MUST(cuMemFree(keep())); /* so that the thread writes one entry only */
                run_thread(&turn);
                rounds(5000);
        } else if (strcmp(mode, "lent") == 0) {
                CUdeviceptr lent;

                pthread_barrier_init(&turn, NULL, 2);
                GR_MUST(pthread_create(&thread, NULL, free_lent, &lent));
                pthread_barrier_wait(&turn);
                rounds(5000);
                lent = keep();
                pthread_barrier_wait(&turn);
                GR_MUST(pthread_join(thread, NULL));
                rounds(13500);
        } else if (strcmp(mode, "pieces") == 0) {
                CUdeviceptr pieces[16], ptr;

                for (int i = 0; i < 16; i++)
                        GR_MUST(cuMemAlloc(&pieces[i], 4 * MIB));
                if (argc > 2)
                        GR_MUST(cuLaunchHostFunc(NULL, await_end, &at_end));
                for (int i = 0; i < 16; i += 2)
                        GR_MUST(cuMemFree(pieces[i]));
                GR_MUST(cuMemAlloc(&ptr, 20 * MIB));
                atomic_store(&at_end, true);
        } else {
                fprintf(stderr, "usage: traced MODE [COUNT]\n");
                return 2;
        }
        printf("worked\n");
        return 0;
}
