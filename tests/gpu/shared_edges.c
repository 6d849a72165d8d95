/*
 * Legacy IPC at its edges: memory of another process that is opened and closed by threads, contexts and captures that
 * meet, and whose exporter frees it or is killed. Every line must be the same natively and under the
 * library. The other process exports; this one opens.
 *
 *   shared_edges [refused SYMBOL]    refused: on the simulated device, where the calls of SYMBOL fail in this process
 */
#include "gputest.h"
#include "peer_process.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES   (12 * MIB)
#define MANY    24
#define ANSWERS 64 /* at the same time */
#define SILENT  (ANSWERS + 16)
enum order { TAKE, FREE, COUNT, NO_SOCKETS, SECOND };

static char mode[] = "as-exporter";
static struct gt gt;
static int other;
static pid_t exporter;

/* The least of several looks: some are open for a moment only. */
static int descriptors(void)
{
        int least = INT_MAX;

        for (int look = 0; look < 20; look++) {
                DIR *entries = opendir("/proc/self/fd");
                int count = 0;

                while (entries && readdir(entries))
                        count++;
                if (entries)
                        closedir(entries);
                least = count < least ? count : least;
                usleep(1000);
        }
        return least;
}

/* The other process. TAKE: a block, filled with its number; answered by its handle. SECOND: from a second context. */
static int export_for_others(void)
{
        CUcontext second;
        CUdeviceptr blocks[MANY];
        CUipcMemHandle handle;
        uint32_t order, count = 0, answer;
        struct stat status;
        int none;

        while (peer_receive(other, &order, sizeof order, &none))
                switch (order) {
                case TAKE:
                        GR_MUST(cuMemAlloc(&blocks[count], BYTES));
                        GR_MUST(cuMemsetD32(blocks[count], 100 + count, BYTES / 4));
                        GR_MUST(cuCtxSynchronize());
                        GR_MUST(cuIpcGetMemHandle(&handle, blocks[count++]));
                        peer_send(other, &handle, sizeof handle, -1);
                        break;
                case FREE:
                        answer = (uint32_t)cuMemFree(blocks[--count]);
                        peer_send(other, &answer, sizeof answer, -1);
                        break;
                case SECOND:
                        answer = (uint32_t)cuCtxCreate(&second, NULL, 0, gt.device);
                        peer_send(other, &answer, sizeof answer, -1);
                        break;
                case NO_SOCKETS:
                        for (int fd = STDERR_FILENO + 1; fd < 200; fd++)
                                if (fd != other && fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode))
                                        close(fd);
                        answer = 0;
                        peer_send(other, &answer, sizeof answer, -1);
                        break;
                default:
                        answer = (uint32_t)descriptors();
                        peer_send(other, &answer, sizeof answer, -1);
                }
        return EXIT_SUCCESS;
}

static void ask(uint32_t order, void *ret, size_t bytes)
{
        int none;

        peer_send(other, &order, sizeof order, -1);
        if (!peer_receive(other, ret, bytes, &none))
                gt_die("shared_edges: no answer from the exporter");
}

static CUipcMemHandle take(void)
{
        CUipcMemHandle handle;

        ask(TAKE, &handle, sizeof handle);
        return handle;
}

static uint32_t answer_to(uint32_t order)
{
        uint32_t answer;

        ask(order, &answer, sizeof answer);
        return answer;
}

static CUresult open_it(CUdeviceptr *ret, CUipcMemHandle handle)
{
        return cuIpcOpenMemHandle(ret, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
}

/* How many of the first, middle and last word are not value. */
static unsigned wrong(CUdeviceptr p, uint32_t value)
{
        const size_t at[] = {0, BYTES / 8 * 4, BYTES - 4};
        unsigned count = 0;
        uint32_t word;

        for (int i = 0; i < 3; i++)
                count += cuMemcpyDtoH(&word, p + at[i], 4) != CUDA_SUCCESS || word != value;
        return count;
}

/* A capture that is open in the context when memory is opened and closed goes on. */
static void captures(CUipcMemHandle handle)
{
        static const CUstreamCaptureMode modes[] = {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                                                    CU_STREAM_CAPTURE_MODE_RELAXED};
        CUstream stream = gt_stream();
        CUdeviceptr p, own;
        CUgraph graph;

        GR_MUST(cuMemAlloc(&own, 4096));
        for (int i = 0; i < 3; i++)
                for (int close = 0; close < 2; close++) {
                        CUresult results[3];

                        if (close)
                                GR_MUST(open_it(&p, handle));
                        GR_MUST(cuStreamBeginCapture(stream, modes[i]));
                        results[0] = close ? cuIpcCloseMemHandle(p) : open_it(&p, handle);
                        results[1] = cuMemsetD32Async(own, 1, 16, stream);
                        results[2] = cuStreamEndCapture(stream, &graph);
                        printf("%s in a capture, mode %d: %d, then work %d, its end %d\n", close ? "closed" : "opened",
                               i, (int)results[0], (int)results[1], (int)results[2]);
                        if (results[2] == CUDA_SUCCESS)
                                GR_MUST(cuGraphDestroy(graph));
                        if (!close && results[0] == CUDA_SUCCESS)
                                GR_MUST(cuIpcCloseMemHandle(p));
                }
        GR_MUST(cuMemFree(own));
}

static CUipcMemHandle beside;
static _Atomic bool go_on;

static void CUDA_CB wait_for_host(void *arg)
{
        (void)arg;
        while (!atomic_load(&go_on))
                usleep(1000);
}

/* Opens other memory while a close waits for the GPU, which waits for that. */
static void *open_beside(void *arg)
{
        CUdeviceptr p;

        (void)arg;
        gt_attach(&gt);
        usleep(200000);
        GR_MUST(open_it(&p, beside));
        atomic_store(&go_on, true);
        GR_MUST(cuIpcCloseMemHandle(p));
        return NULL;
}

static void close_that_waits(CUipcMemHandle handle)
{
        CUstream stream = gt_stream();
        pthread_t thread;
        CUdeviceptr p;

        beside = take();
        GR_MUST(open_it(&p, handle));
        GR_MUST(cuLaunchHostFunc(stream, wait_for_host, NULL));
        pthread_create(&thread, NULL, open_beside, NULL);
        printf("closed while the GPU waits for another one to be opened: %d\n", (int)cuIpcCloseMemHandle(p));
        pthread_join(thread, NULL);
        GR_MUST(cuCtxSynchronize());
        printf("freed: %u\n", answer_to(FREE));
}

static void *open_and_close(void *arg)
{
        CUipcMemHandle *handle = arg;
        uintptr_t bad = 0;
        CUdeviceptr p;

        gt_attach(&gt);
        for (int i = 0; i < 200; i++) {
                if (open_it(&p, *handle) != CUDA_SUCCESS) {
                        bad++;
                        continue;
                }
                bad += wrong(p, 100);
                bad += cuIpcCloseMemHandle(p) != CUDA_SUCCESS;
        }
        return (void *)bad;
}

/* Threads that have the same memory open at the same time. */
static void threads(CUipcMemHandle handle)
{
        pthread_t list[4];
        uintptr_t bad = 0;
        CUdeviceptr p;
        void *one;

        for (int i = 0; i < 4; i++)
                pthread_create(&list[i], NULL, open_and_close, &handle);
        for (int i = 0; i < 4; i++) {
                pthread_join(list[i], &one);
                bad += (uintptr_t)one;
        }
        GR_MUST(open_it(&p, handle));
        printf("four threads: %zu bad, closed then %d", (size_t)bad, (int)cuIpcCloseMemHandle(p));
        printf(", once more %d\n", (int)cuIpcCloseMemHandle(p));
}

/* One context at a time may have it; one ends with memory open in it. */
static void contexts(CUipcMemHandle handle)
{
        CUcontext second;
        CUdeviceptr here, there;

        GR_MUST(open_it(&here, handle));
        GR_MUST(cuCtxCreate(&second, NULL, 0, gt.device));
        printf("in a second context: opened %d\n", (int)open_it(&there, handle));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        GR_MUST(cuIpcCloseMemHandle(here));
        GR_MUST(cuCtxSetCurrent(second));
        GR_MUST(open_it(&there, handle));
        printf("there alone: %u words wrong\n", wrong(there, 100));
        GR_MUST(cuCtxDestroy(second));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        GR_MUST(open_it(&here, handle));
        printf("that one has ended: %u words wrong here", wrong(here, 100));
        printf(", closed %d\n", (int)cuIpcCloseMemHandle(here));
}

/* Blocks that end in the middle of pages, whose neighbours are others. */
static void many(void)
{
        CUipcMemHandle handles[MANY - 1];
        CUdeviceptr blocks[MANY - 1];
        unsigned bad = 0;

        for (int i = 0; i < MANY - 1; i++)
                handles[i] = take();
        for (int i = 0; i < MANY - 1; i++)
                bad += open_it(&blocks[i], handles[i]) != CUDA_SUCCESS || wrong(blocks[i], 101 + (uint32_t)i);
        for (int i = 0; i < MANY - 1; i++)
                bad += cuIpcCloseMemHandle(blocks[i]) != CUDA_SUCCESS;
        for (int i = 0; i < MANY - 1; i++)
                bad += answer_to(FREE) != 0;
        printf("many: %u bad\n", bad);
}

/* Blocks of a context that came after the first export. */
static void of_second_context(void)
{
        CUdeviceptr p;

        GR_MUST(answer_to(SECOND));
        GR_MUST(open_it(&p, take()));
        printf("of the exporter's second context: %u words wrong", wrong(p, 101));
        printf(", closed %d\n", (int)cuIpcCloseMemHandle(p));
        GR_MUST(answer_to(FREE));
}

/* Whether the exporter has closed its end. */
static bool is_dropped(int silent)
{
        return recv(silent, &(char){0}, 1, MSG_DONTWAIT) == 0;
}

/* Whether the exporter has the socket that a line of /proc/net/unix tells of: not another run's of this program. */
static bool is_of_exporter(const char *line)
{
        unsigned long inode;
        char path[64], link[64], wanted[64];
        bool found = false;

        if (sscanf(line, "%*s %*s %*s %*s %*s %*s %lu", &inode) != 1)
                return false;
        snprintf(wanted, sizeof wanted, "socket:[%lu]", inode);
        for (int fd = 0; fd < 1024 && !found; fd++) {
                ssize_t length;

                snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)exporter, fd);
                length = readlink(path, link, sizeof link - 1);
                link[length > 0 ? length : 0] = '\0';
                found = strcmp(link, wanted) == 0;
        }
        return found;
}

/* Messages that no importer sends: nothing of them stays with the exporter, and others are answered. */
static void strange_messages(CUipcMemHandle handle)
{
        char line[512], *name;
        FILE *sockets = fopen("/proc/net/unix", "r");
        const struct timeval patience = {.tv_sec = 10};
        uint32_t before = answer_to(COUNT);
        CUdeviceptr p;
        int silent[2 * SILENT], silent_count = 0, answers = 0;

        while (sockets && fgets(line, sizeof line, sockets)) {
                struct sockaddr_un address = {.sun_family = AF_UNIX};
                socklen_t bytes;

                name = strstr(line, "@gpureclaim-");
                if (!name || !strchr(name, '\n') || !is_of_exporter(line))
                        continue;
                *strchr(name, '\n') = '\0';
                memcpy(&address.sun_path[1], name + 1, strlen(name + 1));
                bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(name));
                for (int i = 0; i < 20; i++) {
                        int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0), two[2] = {0, 0};
                        struct iovec part = {.iov_base = &handle, .iov_len = i % 2 ? sizeof handle : 5};
                        union {
                                struct cmsghdr header;
                                char room[CMSG_SPACE(sizeof two)];
                        } control = {.header = {.cmsg_len = CMSG_LEN(sizeof two),
                                                .cmsg_level = SOL_SOCKET,
                                                .cmsg_type = SCM_RIGHTS}};
                        struct msghdr message = {.msg_iov = &part,
                                                 .msg_iovlen = 1,
                                                 .msg_control = control.room,
                                                 .msg_controllen = sizeof control.room};

                        memcpy(CMSG_DATA(&control.header), two, sizeof two);
                        if (i == 0) { /* nothing is wrong but its length */
                                message.msg_controllen = 0;
                                setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
                        }
                        if (connect(fd, (struct sockaddr *)&address, bytes) == 0)
                                (void)!sendmsg(fd, &message, MSG_NOSIGNAL);
                        if (i == 0)
                                answers += recv(fd, line, sizeof line, 0) > 0;
                        close(fd);
                }
                for (int i = 0; i < SILENT && silent_count < 2 * SILENT; i++) {
                        silent[silent_count] = socket(AF_UNIX, SOCK_SEQPACKET, 0);
                        (void)!connect(silent[silent_count++], (struct sockaddr *)&address, bytes);
                }
        }
        if (sockets)
                fclose(sockets);
        GR_CHECK_EQ(answers, 0);
        GR_MUST(open_it(&p, handle));
        /* Who asks does not wait until the time of one of them is up, which is the same for all of them. */
        if (silent_count > 0)
                GR_CHECK_EQ(is_dropped(silent[ANSWERS]), is_dropped(silent[SILENT - 1]));
        printf("opened beside strange ones: %u words wrong", wrong(p, 100));
        printf(", closed %d\n", (int)cuIpcCloseMemHandle(p));
        while (silent_count > 0)
                close(silent[--silent_count]);
        for (int i = 0; i < 100 && answer_to(COUNT) > before; i++)
                ;
        printf("descriptors: %d more\n", (int)(answer_to(COUNT) - before));
}

/* A program that closes what it does not know: memory can be shared again afterwards. */
static void closed_sockets(void)
{
        CUipcMemHandle handle;
        CUdeviceptr p;
        CUresult result;

        answer_to(NO_SOCKETS);
        handle = take();
        result = open_it(&p, handle);
        printf("after all sockets were closed: opened %d\n", (int)result);
        if (result == CUDA_SUCCESS) {
                printf("%u words wrong", wrong(p, 101));
                printf(", closed %d\n", (int)cuIpcCloseMemHandle(p));
        }
        printf("freed: %u\n", answer_to(FREE));
}

static long calls(const char *symbol)
{
        unsigned long (*count)(const char *symbol);

        *(void **)&count = dlsym(RTLD_DEFAULT, "grSimCallCount");
        return count ? (long)count(symbol) : 0;
}

/* Files of the program, with numbers that descriptors of the library had, are open in a child, too. */
static void files_in_child(void)
{
        int files[8], status;
        pid_t child;

        for (int i = 0; i < 8; i++)
                files[i] = open("/dev/null", O_RDONLY);
        child = fork();
        if (child == 0) {
                for (int i = 0; i < 8; i++)
                        if (fcntl(files[i], F_GETFD) < 0)
                                _exit(1);
                _exit(0);
        }
        GR_CHECK_EQ(waitpid(child, &status, 0), child);
        GR_CHECK_EQ(status, 0);
        for (int i = 0; i < 8; i++)
                close(files[i]);
}

/* Calls of symbol, by which memory of the other process comes, are refused in this process: nothing is left of it. */
static void refused(const char *symbol)
{
        bool reserved = strcmp(symbol, "cuMemAddressReserve") != 0, mapped = strcmp(symbol, "cuMemSetAccess") == 0;
        long reserves, frees, unmaps;
        CUipcMemHandle handle;
        char fault[64];
        CUdeviceptr p;

        snprintf(fault, sizeof(fault), "%s:*=2", symbol);
        setenv("GRSIM_FAULT", fault, 1);
        gt_open(&gt);
        handle = take();
        reserves = calls("cuMemAddressReserve");
        frees = calls("cuMemAddressFree");
        unmaps = calls("cuMemUnmap");
        GR_CHECK_EQ(open_it(&p, handle), CUDA_ERROR_OUT_OF_MEMORY);
        reserves = calls("cuMemAddressReserve") - reserves;
        GR_CHECK(reserves > 0);
        GR_CHECK_EQ(calls("cuMemAddressFree") - frees, reserved ? reserves : 0);
        GR_CHECK_EQ(calls("cuMemUnmap") - unmaps, mapped ? reserves : 0);
        files_in_child();
        gt_close(&gt);
}

int main(int argc, char **argv)
{
        CUipcMemHandle handle, freed;
        CUdeviceptr p, q;

        setvbuf(stdout, NULL, _IOLBF, 0);
        signal(SIGPIPE, SIG_IGN);
        if (argc == 3 && strcmp(argv[1], mode) == 0) {
                other = atoi(argv[2]);
                gt_open(&gt);
                return export_for_others();
        }
        exporter = peer_start(argv[0], mode, false, &other);
        if (argc == 3) {
                refused(argv[2]);
                return GR_CHECK_RESULT();
        }
        gt_open(&gt);
        handle = take();
        captures(handle);
        close_that_waits(handle);
        threads(handle);
        contexts(handle);
        many();
        strange_messages(handle);
        freed = take();
        answer_to(FREE);
        printf("freed before it was opened: %d\n", (int)open_it(&p, freed));
        of_second_context();
        closed_sockets();
        GR_MUST(open_it(&p, handle));
        kill(exporter, SIGKILL);
        waitpid(exporter, NULL, 0);
        printf("the exporter is gone: opened again %d", (int)open_it(&q, handle));
        printf(", closed %d\n", (int)cuIpcCloseMemHandle(p));
        gt_close(&gt);
        return GR_CHECK_RESULT();
}
