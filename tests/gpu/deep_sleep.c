/*
 * Deep sleep (GPURECLAIM_SLEEP=demand, GR_TEST_COMMAND):
 *
 *   deep_sleep [--rounds=20] [--size=256MiB]   it leaves the GPU and comes back, with all that it has there
 *   deep_sleep full                            another process takes the GPU meanwhile: calls fail, and later do not
 *   deep_sleep room                            the same, and a call waits until that one ends
 *   deep_sleep nvml                            the process asks NVML in it, which would not return
 *   deep_sleep killed                          processes are killed in it, and while they leave and come back
 *
 * What the process holds is what another process sees. "# NAME VALUE" lines tell the times: out_s from the command's
 * start to its end, in_s of the first call. Ends with status 1 where anything is not as it was.
 */
#include "gputest.h"
#include "peer_process.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BLOCKS = 16 };

static struct gt gt;
static CUcontext second; /* beside the primary one */
static CUstream stream, second_stream;
static CUdeviceptr blocks[BLOCKS], unpooled, in_second, count;
static size_t block_bytes;
static CUgraphExec executable; /* fills the first block with 77 */
static CUevent event;
static uint32_t *pinned;
static char uuid[37];

static void find_uuid(void)
{
        CUuuid bytes;
        size_t at = 0;

        GR_MUST(cuDeviceGetUuid(&bytes, gt.device));
        for (size_t i = 0; i < sizeof(bytes.bytes); i++)
                at += (size_t)snprintf(uuid + at, sizeof(uuid) - at, "%s%02x",
                                       i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                                       (unsigned)(unsigned char)bytes.bytes[i]);
}

/* The command with these arguments; what it prints, and its exit status. */
static int run(const char *arguments, char *said, size_t bytes)
{
        char line[256];
        FILE *file;
        int status;

        snprintf(line, sizeof(line), "env -u LD_PRELOAD \"$GR_TEST_COMMAND\" %s 2>&1", arguments);
        file = popen(line, "r");
        if (!file)
                gt_die("no shell");
        said[fread(said, 1, bytes - 1, file)] = '\0';
        status = pclose(file);
        return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* As another process sees it: this one may not ask in its sleep. */
static size_t free_on_device(void)
{
        char arguments[128], said[256];

        snprintf(arguments, sizeof(arguments), "status --room %d,%s", (int)getpid(), uuid);
        if (run(arguments, said, sizeof(said)) != 0) {
                printf("skipped: NVML does not tell of the device\n");
                exit(GT_SKIPPED);
        }
        return strtoull(said, NULL, 10);
}

static double sleep_deeply(void)
{
        char arguments[64], said[512];
        double begin_us = gt_now_us();

        snprintf(arguments, sizeof(arguments), "sleep --deep %d", (int)getpid());
        if (run(arguments, said, sizeof(said)) != 0 || !strstr(said, "deeply: "))
                gt_die("it does not sleep deeply: %s", said);
        return (gt_now_us() - begin_us) / 1e6;
}

static void set_up(size_t size)
{
        CUgraph graph;

        gt_open(&gt);
        find_uuid();
        free_on_device(); /* or it is skipped */
        block_bytes = size / BLOCKS;
        stream = gt_stream();
        GR_MUST(cuEventCreate(&event, 0));
        for (unsigned i = 0; i < BLOCKS; i++) {
                GR_MUST(cuMemAlloc(&blocks[i], block_bytes));
                GR_MUST(gt_fill(&gt, stream, blocks[i], i + 1, block_bytes / 4));
        }
        GR_MUST(cuMemAlloc(&count, 4));
        GR_MUST(cuMemAllocHost((void **)&pinned, MIB));
        pinned[0] = 5;
        GR_MUST(cuMemAllocAsync(&unpooled, 4 * MIB, stream));
        GR_MUST(gt_fill(&gt, stream, unpooled, 99, MIB));
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(gt_fill(&gt, stream, blocks[0], 77, block_bytes / 4));
        GR_MUST(cuStreamEndCapture(stream, &graph));
        executable = gt_executable(graph);
        GR_MUST(cuEventRecord(event, stream));
        GR_MUST(cuStreamSynchronize(stream));
        GR_MUST(cuCtxCreate(&second, NULL, 0, gt.device));
        GR_MUST(cuMemAlloc(&in_second, 4 * MIB));
        GR_MUST(cuMemsetD32(in_second, 1234, MIB));
        second_stream = gt_stream();
        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuCtxSetCurrent(gt.ctx));
}

/* One of the calls that wake it. */
static CUresult wake(unsigned n)
{
        uint32_t word;

        switch (n % 5) {
        case 0:
                return cuMemcpyDtoH(&word, blocks[1], 4);
        case 1:
                return cuEventQuery(event);
        case 2:
                return cuGraphLaunch(executable, stream);
        case 3:
                return cuCtxSynchronize();
        default:
                return gt_fill(&gt, stream, blocks[0], 1, block_bytes / 4);
        }
}

/* How many words are not what they were. */
static unsigned wrong_words(void)
{
        uint32_t wrong = 0, more;

        GR_MUST(cuMemsetD32(count, 0, 1));
        for (unsigned i = 1; i < BLOCKS; i++)
                GR_MUST(gt_count_diff(&gt, stream, blocks[i], i + 1, block_bytes / 4, count));
        GR_MUST(gt_count_diff(&gt, stream, unpooled, 99, MIB, count));
        GR_MUST(cuGraphLaunch(executable, stream));
        GR_MUST(gt_count_diff(&gt, stream, blocks[0], 77, block_bytes / 4, count));
        GR_MUST(cuStreamSynchronize(stream));
        GR_MUST(cuMemcpyDtoH(&wrong, count, 4));
        GR_MUST(cuCtxSetCurrent(second));
        GR_MUST(cuStreamSynchronize(second_stream));
        more = gt_wrong_words(in_second, 4 * MIB, 1234);
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        pinned[0]++;
        return wrong + more;
}

static void cycles(int rounds)
{
        double out = 0, in = 0;
        unsigned wrong = 0;

        for (volatile int i = 0; i < rounds; i++) {
                size_t before = free_on_device(), meanwhile, after;
                double out_now = sleep_deeply(), in_now = gt_now_us();
                CUresult result;

                meanwhile = free_on_device();
                in_now = gt_now_us();
                result = wake((unsigned)i);
                in_now = (gt_now_us() - in_now) / 1e6;
                wrong += wrong_words();
                after = free_on_device();
                out = i == 0 || out_now < out ? out_now : out;
                in = i == 0 || in_now < in ? in_now : in;
                gt_check(result == CUDA_SUCCESS && wrong == 0 && meanwhile >= before + block_bytes * BLOCKS, "round",
                         "%d: %s, free %.0f MiB, asleep %.0f, after %.0f; out %.3f s, in %.3f s, %u words wrong", i,
                         gt_result_name(result), gt_mib(before), gt_mib(meanwhile), gt_mib(after), out_now, in_now,
                         wrong);
        }
        GR_CHECK_EQ(pinned[0], 5 + rounds);
        printf("# out_s %.3f\n# in_s %.3f\n", out, in);
}

/* "deep_sleep taker SOCKET": takes the GPU until the other end is closed. */
static int take(int socket)
{
        size_t size = 1 * GIB;
        CUdeviceptr ptr;
        char byte = 0;
        int none;

        gt_open(&gt);
        while (size >= GT_PAGE)
                if (cuMemAlloc(&ptr, size) != CUDA_SUCCESS)
                        size /= 2;
        peer_send(socket, &byte, 1, -1);
        peer_receive(socket, &byte, 1, &none);
        return EXIT_SUCCESS;
}

/* Another process takes the GPU. waits: and ends while a call waits. */
static void fill_device(char *program, bool waits)
{
        char taker[] = "taker", byte;
        double begin_us;
        CUresult result;
        int socket, none;
        pid_t other, ender = -1;

        sleep_deeply();
        other = peer_start(program, taker, true, &socket);
        GR_CHECK(peer_receive(socket, &byte, 1, &none));
        if (waits) {
                ender = fork();
                if (ender == 0) {
                        sleep(3);
                        kill(other, SIGKILL);
                        _exit(EXIT_SUCCESS);
                }
        }
        for (unsigned n = 0; n < (waits ? 1 : 3); n++) {
                begin_us = gt_now_us();
                result = wake(n);
                gt_check(result == (waits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY), "on a full device",
                         "%s after %.1f s", gt_result_name(result), (gt_now_us() - begin_us) / 1e6);
        }
        close(socket);
        waitpid(other, NULL, 0);
        if (waits)
                waitpid(ender, NULL, 0);
        gt_check(wrong_words() == 0, "after", "all is as it was");
}

static void ask_nvml(void)
{
        void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW), *device = NULL, *found = NULL;
        unsigned long long memory[3] = {0};
        int (*call)(void *, void *) = NULL;

        if (!library)
                gt_die("no NVML");
        for (int i = 0; i < 3; i++) {
                double begin_us;
                int result;

                found = dlsym(library, i == 0   ? "nvmlInit_v2"
                                       : i == 1 ? "nvmlDeviceGetHandleByIndex_v2"
                                                : "nvmlDeviceGetMemoryInfo");
                memcpy(&call, &found, sizeof(call));
                sleep_deeply();
                begin_us = gt_now_us();
                result = call(i == 2 ? device : NULL, i == 1 ? (void *)&device : (void *)memory);
                gt_check(result == 0, "NVML", "%d after %.2f s", result, (gt_now_us() - begin_us) / 1e6);
        }
        gt_check(memory[0] > 0 && wrong_words() == 0, "after", "all is as it was");
}

/* "deep_sleep worker": sleeps and wakes until it is killed. */
static void work(void)
{
        for (unsigned n = 0;; n++) {
                printf("at work\n");
                fflush(stdout);
                sleep_deeply();
                GR_MUST(wake(n));
        }
}

static void kill_workers(char *program)
{
        size_t before = free_on_device(), after = 0;

        for (volatile int i = 0; i < 6; i++) {
                int ends[2], status;
                char line[64];
                FILE *from;
                pid_t child;

                GR_CHECK_EQ(pipe(ends), 0);
                child = fork();
                if (child == 0) {
                        dup2(ends[1], STDOUT_FILENO);
                        execl(program, program, "worker", NULL);
                        _exit(127);
                }
                close(ends[1]);
                from = fdopen(ends[0], "r");
                while (fgets(line, sizeof(line), from) && strcmp(line, "at work\n") != 0)
                        ;
                gt_sleep_us(150000 + 170000 * i);
                kill(child, SIGKILL);
                gt_check(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "worker", "is killed");
                fclose(from);
        }
        for (int i = 0; i < 50 && after + 16 * MIB < before; i++) { /* the driver takes a moment */
                gt_sleep_us(100000);
                after = free_on_device();
        }
        gt_check(after + 16 * MIB >= before, "device", "%.0f MiB free, before %.0f", gt_mib(after), gt_mib(before));
}

int main(int argc, char **argv)
{
        size_t size = 256 * MIB;
        int rounds = 20, first;
        const char *mode;

        first = GT_OPTIONS(argc, argv, "[--rounds=N] [--size=SIZE] [full|room|nvml|killed]",
                           GT_OPTION("rounds", rounds), GT_OPTION("size", size));
        mode = first < argc ? argv[first] : "";
        if (strcmp(mode, "taker") == 0)
                return take(atoi(argv[first + 1]));
        set_up(size);
        if (strcmp(mode, "worker") == 0)
                work();
        else if (strcmp(mode, "killed") == 0)
                kill_workers(argv[0]);
        else if (strcmp(mode, "nvml") == 0)
                ask_nvml();
        else if (mode[0])
                fill_device(argv[0], strcmp(mode, "room") == 0);
        else
                cycles(rounds);
        return GR_CHECK_RESULT();
}
