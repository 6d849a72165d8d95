/*
 * Memory of one process in another one (legacy IPC), several rounds: the child reads what the parent wrote, writes, and
 * closes; then the parent frees. Every line must be the same natively and under the library.
 *
 *   shared_memory [child|parent]     which of the two is to run without what is preloaded
 */
#include "gputest.h"

#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define KEPT "SHARE_PRELOAD" /* what the parent does without and the child is given */
extern char **environ;

struct order {
        CUipcMemHandle handle;
        size_t bytes;
        uint32_t now, then; /* the words that are there, and those that the child is to write */
};

struct answer {
        uint32_t result, wrong, close_result;
};

static bool preloaded(void)
{
        return dlsym(RTLD_DEFAULT, "gpureclaim_version") != NULL;
}

static void open_device(void)
{
        CUcontext context;

        GR_MUST(cuInit(0));
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
}

static int child(int from, int to)
{
        struct order order;

        open_device();
        while (read(from, &order, sizeof(order)) == (ssize_t)sizeof(order)) {
                struct answer answer = {0};
                CUdeviceptr ptr, own;

                /* Traffic of its own between the other's blocks. */
                GR_MUST(cuMemAlloc(&own, order.bytes));
                answer.result = cuIpcOpenMemHandle(&ptr, order.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
                if (answer.result == CUDA_SUCCESS) {
                        answer.wrong = gt_wrong_words(ptr, order.bytes, order.now);
                        GR_MUST(cuMemsetD32(own, 77, order.bytes / 4));
                        GR_MUST(cuMemsetD32(ptr, order.then, order.bytes / 4));
                        GR_MUST(cuCtxSynchronize());
                        answer.close_result = cuIpcCloseMemHandle(ptr);
                }
                GR_MUST(cuMemFree(own));
                if (write(to, &answer, sizeof(answer)) != (ssize_t)sizeof(answer))
                        return 98;
        }
        return 0;
}

static size_t used(void)
{
        void *found = dlsym(RTLD_DEFAULT, "grSimUsedBytes");
        size_t (*bytes)(int);

        if (!found)
                return 0;
        memcpy(&bytes, &found, sizeof(bytes));
        return bytes(0);
}

/* A block that others know: its free is the driver's, so that nobody gets it from the cache. */
static void give_back(const char *what, CUdeviceptr ptr, size_t bytes)
{
        size_t before = used();
        int result = (int)cuMemFree(ptr);

        printf("%s freed: %d", what, result);
        if (before)
                printf(", the device has it back: %d", used() + bytes <= before);
        printf("\n");
}

static void rounds(int to, int from)
{
        static const size_t sizes[] = {2 * MIB, 3 * MIB, 20 * MIB, 3 * MIB, 3 * MIB, 64 * MIB, 2 * MIB};
        const unsigned int yes = 1;
        CUdeviceptr ptr, other;

        for (uint32_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
                struct order order = {.bytes = sizes[i], .now = 1000 + i, .then = 2000 + i};
                struct answer answer;

                GR_MUST(cuMemAlloc(&ptr, order.bytes));
                GR_MUST(cuMemsetD32(ptr, order.now, order.bytes / 4));
                GR_MUST(cuCtxSynchronize());
                GR_MUST(cuIpcGetMemHandle(&order.handle, ptr));
                if (write(to, &order, sizeof(order)) != (ssize_t)sizeof(order) ||
                    read(from, &answer, sizeof(answer)) != (ssize_t)sizeof(answer)) {
                        printf("no answer from the child\n");
                        return;
                }
                printf("%zu MiB: opened %u, %u words wrong there, closed %u, %u words wrong here\n", order.bytes / MIB,
                       answer.result, answer.wrong, answer.close_result,
                       gt_wrong_words(ptr, order.bytes, answer.result ? order.now : order.then));
                /* Blocks of that size come and go meanwhile. */
                for (int k = 0; k < 10; k++) {
                        GR_MUST(cuMemAlloc(&other, order.bytes));
                        GR_MUST(cuMemsetD32(other, 55, order.bytes / 4));
                        GR_MUST(cuMemFree(other));
                }
                printf("beside others: %u words wrong\n",
                       gt_wrong_words(ptr, order.bytes, answer.result ? order.now : order.then));
                give_back("exported memory", ptr, order.bytes);
        }
        GR_MUST(cuMemAlloc(&ptr, 4 * MIB));
        printf("SYNC_MEMOPS: %d\n", (int)cuPointerSetAttribute(&yes, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, ptr));
        give_back("memory with SYNC_MEMOPS", ptr, 4 * MIB);
}

int main(int argc, char **argv)
{
        const char *plain = argc > 1 ? argv[1] : "", *preload = getenv("LD_PRELOAD"), *kept = getenv(KEPT);
        char mode[] = "as-child", from[12], to[12], expected[2] = "0",
             *arguments[] = {argv[0], mode, from, to, expected, NULL};
        int down[2], up[2], status = 0;
        pid_t pid;

        if (argc == 5 && strcmp(plain, mode) == 0) {
                if (preloaded() != (argv[4][0] == '1'))
                        return 97;
                return child(atoi(argv[2]), atoi(argv[3]));
        }
        setvbuf(stdout, NULL, _IOLBF, 0);
        if (strcmp(plain, "parent") == 0 && preload && preloaded()) {
                setenv(KEPT, preload, 1);
                unsetenv("LD_PRELOAD");
                execv(argv[0], argv);
                return 96;
        }
        expected[0] = (char)('0' + (strcmp(plain, "child") != 0 && (preloaded() || kept)));
        open_device();
        if (pipe(down) != 0 || pipe(up) != 0 || fcntl(down[1], F_SETFD, FD_CLOEXEC) != 0 ||
            fcntl(up[0], F_SETFD, FD_CLOEXEC) != 0)
                return 95;
        if (kept)
                setenv("LD_PRELOAD", kept, 1);
        if (strcmp(plain, "child") == 0)
                unsetenv("LD_PRELOAD");
        snprintf(from, sizeof(from), "%d", down[0]);
        snprintf(to, sizeof(to), "%d", up[1]);
        if (posix_spawn(&pid, argv[0], NULL, NULL, arguments, environ) != 0)
                return 94;
        close(down[0]);
        close(up[1]);
        signal(SIGPIPE, SIG_IGN);
        rounds(down[1], up[0]);
        close(down[1]);
        waitpid(pid, &status, 0);
        printf("child: exit %d, signal %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1,
               WIFSIGNALED(status) ? WTERMSIG(status) : 0);
        return 0;
}
