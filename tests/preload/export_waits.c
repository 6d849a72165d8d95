/*
 * The library's socket for legacy IPC has a name that is not free yet, as the program has closed a socket of that name:
 * while one thread waits for it, another one comes to know a handle of this process.
 */
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cuda.h>

#include "check.h"

#define BYTES ((size_t)4 << 20)

static CUcontext primary;
static CUipcMemHandle handles[2];
static _Atomic int bound_fd;
static atomic_bool taken; /* the name */
static sem_t asked;

/* In place of the C library's, for the library as well. */
__attribute__((visibility("default"))) int bind(int fd, const struct sockaddr *address, socklen_t bytes)
{
        if (taken) {
                sem_post(&asked);
                errno = EADDRINUSE;
                return -1;
        }
        bound_fd = fd;
        return (int)syscall(SYS_bind, fd, address, bytes);
}

static void export_block(CUipcMemHandle *ret_handle)
{
        CUdeviceptr p;

        GR_MUST(cuMemAlloc(&p, BYTES));
        GR_MUST(cuIpcGetMemHandle(ret_handle, p));
}

static void *export_again(void *arg)
{
        GR_MUST(cuCtxSetCurrent(primary));
        export_block(&handles[1]);
        return arg;
}

int main(void)
{
        CUresult result;
        pthread_t thread;
        CUdeviceptr p;

        sem_init(&asked, 0, 0);
        GR_MUST(cuInit(0));
        GR_MUST(cuDevicePrimaryCtxRetain(&primary, 0));
        GR_MUST(cuCtxSetCurrent(primary));
        export_block(&handles[0]);
        GR_CHECK(bound_fd > 0); /* else the library has no socket */
        taken = true;
        close(bound_fd);
        GR_MUST(pthread_create(&thread, NULL, export_again, NULL));
        sem_wait(&asked);
        result = cuIpcOpenMemHandle(&p, handles[0], CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        GR_CHECK_EQ((int)result, (int)CUDA_ERROR_INVALID_CONTEXT); /* a handle of its own */
        taken = false;
        GR_MUST(pthread_join(thread, NULL));
        GR_CHECK(memcmp(&handles[0], &handles[1], 16) == 0); /* the same name */
        return GR_CHECK_RESULT();
}
