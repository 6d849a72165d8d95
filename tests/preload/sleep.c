/*
 * Sleep (GPURECLAIM_SLEEP), in a program that knows nothing of it: `sleep MODE`. The command gpureclaim
 * (GR_TEST_COMMAND) tells the process itself to sleep, or it does so by itself. What is on the device is asked of the
 * simulated device, past the library.
 */
#include "sleep.h"

#include "grsim.h"
#include "newer.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SMALL = 24 };

struct gt gt;
char **arguments;
CUdeviceptr blocks[MANY];
size_t sizes[MANY];
static long processors; /* so many are online; 0: as many as there are */

/* Stands before the C library's. */
__attribute__((visibility("default"))) long sysconf(int name)
{
        void *found = dlsym(RTLD_NEXT, "sysconf");
        long (*real)(int);

        memcpy(&real, &found, sizeof(real));
        return processors && name == _SC_NPROCESSORS_ONLN ? processors : real(name);
}

/* What the host says of its memory instead of what it does, until a path is NULL; NULL: it speaks for itself. */
static const struct host_file {
        const char *path, *text;
        const char *later; /* what it says from the second look on; NULL: the same */
} * host_files;
static _Atomic unsigned host_looks;
static bool nameless_fails; /* the file system of any folder knows no files without a name */

/* Stands before the C library's. */
__attribute__((visibility("default"))) int open64(const char *path, int flags, ...)
{
        void *found = dlsym(RTLD_NEXT, "open64");
        int (*real)(const char *, int, ...);
        va_list arguments_after;
        const char *text;
        mode_t mode;
        int fd;

        va_start(arguments_after, flags);
        mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments_after, mode_t) : 0;
        va_end(arguments_after);
        memcpy(&real, &found, sizeof(real));
        if (nameless_fails && (flags & O_TMPFILE) == O_TMPFILE) {
                errno = EOPNOTSUPP;
                return -1;
        }
        if (!host_files || (strcmp(path, "/proc/meminfo") != 0 && strcmp(path, "/proc/self/cgroup") != 0 &&
                            strncmp(path, "/sys/fs/cgroup", 14) != 0))
                return real(path, flags, mode);
        for (const struct host_file *file = host_files; file->path; file++) {
                if (strcmp(path, file->path) != 0)
                        continue;
                text = file->later && host_looks++ > 0 ? file->later : file->text;
                fd = memfd_create("host", MFD_CLOEXEC);
                if (write(fd, text, strlen(text)) < 0 || lseek(fd, 0, SEEK_SET) != 0)
                        gt_die("no file in place of %s", path);
                return fd;
        }
        errno = ENOENT;
        return -1;
}

/* Stands before the C library's. */
__attribute__((visibility("default"))) FILE *fopen64(const char *path, const char *mode)
{
        void *found = dlsym(RTLD_NEXT, "fopen64");
        FILE *(*real)(const char *, const char *);
        int fd;

        memcpy(&real, &found, sizeof(real));
        if (!host_files || strcmp(path, "/proc/self/cgroup") != 0)
                return real(path, mode);
        fd = open64(path, O_RDONLY | O_CLOEXEC);
        return fd < 0 ? NULL : fdopen(fd, "r");
}

static int usual_log, listened_log;

void begin_to_listen(void)
{
        usual_log = dup(STDERR_FILENO);
        listened_log = memfd_create("log", MFD_CLOEXEC);
        dup2(listened_log, STDERR_FILENO);
}

unsigned heard(const char *words)
{
        char text[16384];
        ssize_t length = pread(listened_log, text, sizeof(text) - 1, 0);
        unsigned count = 0;

        dup2(usual_log, STDERR_FILENO);
        close(usual_log);
        close(listened_log);
        text[length > 0 ? length : 0] = '\0';
        for (const char *at = text; (at = strstr(at, words)); at++)
                count++;
        return count;
}

void run_anew(const char *variable, const char *value)
{
        if (getenv(variable))
                return;
        setenv(variable, value, 1);
        execv(arguments[0], arguments);
        gt_die("the program does not run anew");
}

size_t on_device(void)
{
        size_t bytes = 0;

        if (!gt_footprint(&gt, &bytes))
                gt_die("the footprint cannot be asked");
        return bytes;
}

int command(const char *words, char *said, size_t bytes)
{
        const char *deep = "";
        char line[512];
        FILE *file;
        size_t length;
        int status;

        if (getenv("GR_TEST_DEEP") && strncmp(words, "sleep", 5) == 0)
                deep = " --deep";
        snprintf(line, sizeof(line), "env -u LD_PRELOAD \"$GR_TEST_COMMAND\" %.*s%s%s %d 2>&1", deep[0] ? 5 : 0, words,
                 deep, words + (deep[0] ? 5 : 0), (int)getpid());
        file = popen(line, "r");
        if (!file)
                gt_die("no shell");
        length = fread(said, 1, bytes - 1, file);
        said[length] = '\0';
        status = pclose(file);
        return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

bool fall_asleep(const char *words)
{
        char said[512];

        return command(words, said, sizeof(said)) == 0 && strstr(said, " asleep");
}

void sleep_now(const char *when)
{
        gt_check(fall_asleep("sleep"), "sleep", "%s", when);
}

void take_blocks(void)
{
        for (int i = 0; i < MANY; i++) {
                sizes[i] = i < SMALL ? (size_t)(i + 1) * 12 * KIB : (size_t)(i - SMALL + 1) * 3 * MIB / 2;
                GR_MUST(cuMemAlloc(&blocks[i], sizes[i]));
                GR_MUST(cuMemsetD32(blocks[i], 0x10000u + (unsigned)i, sizes[i] / 4));
        }
        GR_MUST(cuCtxSynchronize());
}

void take_blocks_and_sleep(void)
{
        take_blocks();
        sleep_now("asked");
}

void look_at_blocks(const char *when)
{
        size_t words = 0, wrong = 0;

        for (int i = 0; i < MANY; i++) {
                uint32_t *copy = malloc(sizes[i]);

                GR_MUST(cuMemcpyDtoH(copy, blocks[i], sizes[i]));
                for (size_t j = 0; j < sizes[i] / 4; j++)
                        wrong += copy[j] != 0x10000u + (unsigned)i;
                words += sizes[i] / 4;
                free(copy);
        }
        gt_check(wrong == 0, when, "%zu of %zu words are wrong", wrong, words);
}

CUresult read_a_block(void)
{
        uint32_t word;

        return cuMemcpyDtoH(&word, blocks[MANY - 1], 4);
}

void free_blocks(void)
{
        for (int i = 0; i < MANY; i++)
                GR_MUST(cuMemFree(blocks[i]));
}

/*
 * Whether the command says this of the last sleep, or wake, in all its forms: how long it took, or nothing at all. With
 * NVML it does not ask the process, which publishes a wake a moment later.
 */
static void told(const char *what, bool known)
{
        const char *const words[] = {"status;:", "status --json;:", "metrics;:"};
        char said[16384], texts[3][64];

        snprintf(texts[0], sizeof(texts[0]), "last %s took ", what);
        snprintf(texts[1], sizeof(texts[1]), "\"last_%s_ns\": null", what);
        snprintf(texts[2], sizeof(texts[2]), "gpureclaim_process_last_%s_seconds{", what);
        for (volatile int i = 0; i < 3; i++) {
                for (int tries = 0; tries < 200; tries++) {
                        command(words[i], said, sizeof(said));
                        if ((strstr(said, texts[i]) != NULL) == (known != (i == 1)))
                                break;
                        gt_sleep_us(20000);
                }
                gt_check((strstr(said, texts[i]) != NULL) == (known != (i == 1)), words[i], "the last %s", what);
        }
}

/* The same content before and after, several times; the device has the room meanwhile. */
static void mode_contents(void)
{
        size_t before;

        take_blocks();
        for (volatile int i = 0; i < 3; i++) {
                char said[4096];

                look_at_blocks("before");
                before = on_device();
                told("sleep", i > 0);
                told("wake", i > 0);
                sleep_now("asked");
                told("sleep", true);
                gt_check(on_device() + 190 * MIB < before, "room", "%.0f MiB before, %.0f MiB asleep", gt_mib(before),
                         gt_mib(on_device()));
                command("status --json;:", said, sizeof(said));
                gt_check(strstr(said, "\"asleep_bytes\": ") && !strstr(said, "\"asleep_bytes\": 0,"), "status", "told");
                sleep_now("asked again while it sleeps");
                look_at_blocks("after");
                gt_check(on_device() == before, "back", "%.0f MiB before, %.0f MiB after", gt_mib(before),
                         gt_mib(on_device()));
        }
        free_blocks();
}

/* Sleeps, and makes the call, which must find the process awake. */
#define WAKES(call)                                                                                                    \
        do {                                                                                                           \
                size_t awake = on_device();                                                                            \
                CUresult result;                                                                                       \
                if (!fall_asleep("sleep"))                                                                             \
                        gt_die("it does not sleep before %s", #call);                                                  \
                result = call;                                                                                         \
                gt_check(result == CUDA_SUCCESS && on_device() + 190 * MIB > awake, #call, "%s, %.0f MiB of %.0f",     \
                         gt_result_name(result), gt_mib(on_device()), gt_mib(awake));                                  \
        } while (0)

static void mode_calls(void)
{
        CUdeviceptr block, other, extra, base;
        CUgraphExec executable, another;
        size_t bytes, total;
        unsigned long long access;
        CUmemLocation here = {.type = CU_MEM_LOCATION_TYPE_DEVICE};
        CUgraph graph, empty;
        unsigned word = 0, type;
        CUstream stream;
        CUevent event;
        CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
        CUDA_MEMCPY3D_BATCH_OP box = {.src.type = CU_MEMCPY_OPERAND_TYPE_POINTER,
                                      .dst.type = CU_MEMCPY_OPERAND_TYPE_POINTER,
                                      .extent = {4 * KIB, 1, 1}};

        take_blocks();
        block = box.dst.op.ptr.ptr = blocks[MANY - 1];
        other = box.src.op.ptr.ptr = blocks[MANY - 2];
        stream = gt_stream();
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        GR_MUST(cuMemsetD32Async(block, 1, 4, stream));
        GR_MUST(cuStreamEndCapture(stream, &graph));
        GR_MUST(cuGraphInstantiate(&executable, graph, 0));
        GR_MUST(cuEventCreate(&event, 0));
        GR_MUST(cuEventRecord(event, stream));
        WAKES(cuMemAlloc(&extra, 4 * MIB));
        WAKES(cuMemFree(extra));
        WAKES(gt_fill(&gt, stream, block, 7, 16));
        WAKES(cuMemcpyHtoD(block, &word, 4));
        WAKES(cuMemcpyDtoH(&word, block, 4));
        WAKES(cuMemcpyDtoDAsync(block, other, 4 * KIB, stream));
        WAKES(cuMemcpyWithAttributesAsync(block, other, 4 * KIB, &attributes, stream));
        WAKES(cuMemcpy3DWithAttributesAsync(&box, 0, stream));
        WAKES(cuMemcpy2D(&(CUDA_MEMCPY2D){.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                                          .srcDevice = block,
                                          .srcPitch = 4,
                                          .dstMemoryType = CU_MEMORYTYPE_HOST,
                                          .dstHost = &word,
                                          .dstPitch = 4,
                                          .WidthInBytes = 4,
                                          .Height = 1}));
        WAKES(cuMemsetD8(block, 1, 4));
        WAKES(cuMemsetD32Async(block, 1, 4, stream));
        WAKES(cuStreamWaitValue32(stream, block, 0, CU_STREAM_WAIT_VALUE_GEQ));
        WAKES(cuStreamWriteValue32(stream, block, 0, 0));
        WAKES(cuStreamSynchronize(stream));
        WAKES(cuEventSynchronize(event));
        WAKES(cuMemGetInfo(&bytes, &total));
        WAKES(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, block));
        WAKES(cuMemGetAddressRange(&base, &bytes, block + 1));
        WAKES(cuMemGetAccess(&access, &here, block));
        WAKES(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        GR_MUST(cuStreamEndCapture(stream, &empty));
        GR_MUST(cuGraphDestroy(empty));
        WAKES(cuGraphInstantiate(&another, graph, 0));
        GR_MUST(cuGraphExecDestroy(another));
        WAKES(cuGraphLaunch(executable, stream));
        WAKES(cuGraphUpload(executable, stream));
        WAKES(cuCtxSynchronize());
}

/* While the GPU works nothing leaves; afterwards it does. */
static void mode_busy(void)
{
        char line[512];
        CUstream stream;
        size_t before;

        take_blocks();
        before = on_device();
        stream = gt_stream();
        GR_MUST(gt_spin(&gt, stream, 1500000));
        gt_check(!fall_asleep("sleep --timeout 200ms"), "sleep", "refused beside a kernel");
        gt_check(on_device() == before, "memory", "all of it is there");
        snprintf(line, sizeof(line), "timeout -s KILL 0.1 env -u LD_PRELOAD \"$GR_TEST_COMMAND\" sleep %d",
                 (int)getpid());
        gt_check(system(line) != 0, "the command", "killed while it asks");
        gt_check(fall_asleep("sleep --timeout 30s"), "sleep", "when the kernel has ended");
        look_at_blocks("after");
}

/* It takes seconds to fall asleep (GRSIM_LATENCY): the one request for it is answered. */
static void mode_slowly(void)
{
        char said[512];

        take_blocks();
        if (!arguments[2])
                gt_check(fall_asleep("sleep --timeout 0"), "sleep", "asked once");
        else /* so slowly that the command does not wait for it */
                gt_check(command("sleep --timeout 6s", said, sizeof(said)) == 1 && strstr(said, "asleep so far") &&
                                 !strstr(said, " 0 B asleep"),
                         "sleep", "%s", said);
        look_at_blocks("after");
}

/* More processors come online after the first sleep. */
static void mode_processors(void)
{
        processors = 1;
        take_blocks_and_sleep();
        look_at_blocks("after");
        processors = 64;
        sleep_now("asked with more processors");
        look_at_blocks("after that");
}

/* What another process could open stays. */
static void mode_exported(void)
{
        CUipcMemHandle handle;
        size_t before;

        take_blocks();
        GR_MUST(cuIpcGetMemHandle(&handle, blocks[MANY - 1]));
        before = on_device();
        sleep_now("asked");
        gt_check(on_device() >= sizes[MANY - 1] + gt.context_bytes && on_device() < before, "exported",
                 "%.0f MiB stay of %.0f", gt_mib(on_device()), gt_mib(before));
        look_at_blocks("after");
}

/*
 * A call fails once, while memory leaves or comes back. In a first run the program counts the calls before that, and
 * then runs anew.
 */
static void mode_failing(void)
{
        const char *symbol = arguments[2];
        bool leaves = strcmp(symbol, "cuMemUnmap") == 0 || strcmp(symbol, "cuMemcpyDtoHAsync_v2") == 0;
        CUresult result;
        char fault[96];

        take_blocks();
        if (!getenv("GRSIM_FAULT")) {
                GR_CHECK(leaves || fall_asleep("sleep"));
                snprintf(fault, sizeof(fault), "%s:%lu=1", symbol, grSimCallCount(symbol) + 3);
                run_anew("GRSIM_FAULT", fault);
        }
        sleep_now("asked");
        result = read_a_block();
        gt_check(result == CUDA_SUCCESS, "the first call", "%s", gt_result_name(result));
        look_at_blocks("after");
        sleep_now("asked again");
        look_at_blocks("after that");
}

#define LONG_NAME  "/kubepods-besteffort-pod0123456789abcdef0123456789abcdef.slice"
#define LONG_PATH  LONG_NAME LONG_NAME LONG_NAME LONG_NAME LONG_NAME
#define LONG_LINES "12:cpu:" LONG_PATH "\n13:pids:" LONG_PATH "\n14:freezer:" LONG_PATH "\n15:cpuset:" LONG_PATH "\n"

/* No more leaves than the host has room for, with an eighth of it to spare. */
static void mode_host(void)
{
        static const struct {
                const char *what;
                struct host_file files[8];
                size_t room;
        } hosts[] = {
                {"nothing is available at first", {{"/proc/meminfo", "MemAvailable: 0 kB\n"}}, 0},
                {"160 MiB are, and two buffers for each of two threads must be pinned",
                 {{"/proc/meminfo", "MemAvailable: 163840 kB\n"}},
                 140 * MIB - 2 * 16 * MIB},
                {"nothing is known", {{NULL, NULL}}, SIZE_MAX},
                {"80 MiB are available", {{"/proc/meminfo", "MemFree: 1 kB\nMemAvailable:   81920 kB\n"}}, 70 * MIB},
                {"nothing is available", {{"/proc/meminfo", "MemAvailable: 0 kB\n"}}, 0},
                {"a group has 60 MiB left, and 20 of files",
                 {{"/proc/meminfo", "MemAvailable: 8192000 kB\n"},
                  {"/proc/self/cgroup", "0::/a/b\n"},
                  {"/sys/fs/cgroup/a/b/memory.max", "104857600\n"},
                  {"/sys/fs/cgroup/a/b/memory.current", "41943040\n"},
                  {"/sys/fs/cgroup/a/b/memory.stat", "anon 20971520\ninactive_file 20971520\n"},
                  {"/sys/fs/cgroup/a/memory.max", "max\n"}},
                 70 * MIB},
                {"the group above has less",
                 {{"/proc/self/cgroup", "0::/a/b\n"},
                  {"/sys/fs/cgroup/a/b/memory.max", "max\n"},
                  {"/sys/fs/cgroup/a/memory.max", "104857600\n"},
                  {"/sys/fs/cgroup/a/memory.current", "20971520\n"}},
                 70 * MIB},
                {"an old group in a container, which sees the host's path",
                 {{"/proc/self/cgroup", "5:cpu:/x\n4:memory:/x/y\n0::/\n"},
                  {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "104857600\n"},
                  {"/sys/fs/cgroup/memory/memory.usage_in_bytes", "41943040\n"},
                  {"/sys/fs/cgroup/memory/memory.stat", "inactive_file 0\ntotal_inactive_file 20971520\n"}},
                 70 * MIB},
                {"the groups of nested containers have long paths, and the controller shares its folder",
                 {{"/proc/self/cgroup", LONG_LINES LONG_LINES LONG_LINES "11:hugetlb,memory:" LONG_PATH "\n0::/\n"},
                  {"/sys/fs/cgroup/memory" LONG_PATH "/memory.limit_in_bytes", "104857600\n"},
                  {"/sys/fs/cgroup/memory" LONG_PATH "/memory.usage_in_bytes", "20971520\n"}},
                 70 * MIB},
                {"a line without an end, and others that say nothing",
                 {{"/proc/self/cgroup", "\n7\n8:\n9:memory\n10:memory:\n0::/a"},
                  {"/sys/fs/cgroup/a/memory.max", "104857600"},
                  {"/sys/fs/cgroup/a/memory.current", "20971520"}},
                 70 * MIB},
                {"the group is slowed down after 80 MiB more",
                 {{"/proc/self/cgroup", "0::/a\n"},
                  {"/sys/fs/cgroup/a/memory.max", "1048576000\n"},
                  {"/sys/fs/cgroup/a/memory.high", "104857600\n"},
                  {"/sys/fs/cgroup/a/memory.current", "20971520\n"}},
                 70 * MIB},
                {"others take what was available",
                 {{"/proc/meminfo", "MemAvailable: 819200 kB\n", "MemAvailable: 102399 kB\n"}},
                 100 * MIB},
                {"others take some of it",
                 {{"/proc/meminfo", "MemAvailable: 819200 kB\n", "MemAvailable: 102401 kB\n"}},
                 SIZE_MAX},
                {"the group is full",
                 {{"/proc/self/cgroup", "0::/\n"},
                  {"/sys/fs/cgroup/memory.max", "104857600\n"},
                  {"/sys/fs/cgroup/memory.current", "104857601\n"}},
                 0},
        };

        processors = 2;
        take_blocks();
        for (size_t i = 0; i < sizeof(hosts) / sizeof(hosts[0]); i++) {
                size_t before = on_device(), left;
                bool slept;

                host_looks = 0;
                host_files = hosts[i].files;
                slept = fall_asleep(hosts[i].room > 0 ? "sleep" : "sleep --timeout 0");
                left = before - on_device();
                host_files = NULL;
                gt_check(slept == (hosts[i].room > 0) && left <= hosts[i].room &&
                                 left >= (hosts[i].room == SIZE_MAX ? 200 * MIB : hosts[i].room / 2),
                         hosts[i].what, "%zu MiB left", left / MIB);
                gt_check(grSimCallCount("cuMemHostAlloc") == (i > 0 ? 2 : 0), hosts[i].what, "%lu buffers pinned",
                         grSimCallCount("cuMemHostAlloc"));
                look_at_blocks(hosts[i].what);
        }
}

static int lowest_free_descriptor(void)
{
        int fd = dup(STDIN_FILENO);

        close(fd);
        return fd;
}

/* How many files that were removed the process has mapped. */
static int removed_files(void)
{
        FILE *maps = fopen("/proc/self/maps", "re");
        char line[4096];
        int count = 0;

        while (maps && fgets(line, sizeof(line), maps))
                count += strstr(line, getenv("GPURECLAIM_SLEEP_DIR")) && strstr(line, "(deleted)");
        if (maps)
                fclose(maps);
        return count;
}

/* With GPURECLAIM_SLEEP_DIR: what has no room in host memory goes to files, as far as these may be so large. */
static void mode_files(void)
{
        static const struct {
                const char *what;
                const char *available;
                size_t file_most; /* a file may have; 0: any */
                bool nameless_fails;
        } hosts[] = {
                {"all in files", "MemAvailable: 0 kB\n", 0, false},
                {"the file system knows no files without a name", "MemAvailable: 0 kB\n", 0, true},
                {"some in files", "MemAvailable: 81920 kB\n", 0, false},
                {"files may not be large", "MemAvailable: 81920 kB\n", 64 * KIB, false},
        };
        const struct host_file none[] = {{NULL, NULL, NULL}};

        processors = 2;
        take_blocks();
        for (size_t i = 0; i < sizeof(hosts) / sizeof(hosts[0]); i++) {
                const struct host_file files[] = {{"/proc/meminfo", hosts[i].available, NULL}, none[0]};
                struct rlimit usual, most;
                size_t before = on_device(), left;
                int free_descriptor = lowest_free_descriptor(), mapped;
                char said[16384];

                getrlimit(RLIMIT_FSIZE, &usual);
                most = usual;
                most.rlim_cur = hosts[i].file_most ? hosts[i].file_most : usual.rlim_cur;
                setrlimit(RLIMIT_FSIZE, &most);
                nameless_fails = hosts[i].nameless_fails;
                host_files = files;
                begin_to_listen();
                sleep_now(hosts[i].what);
                GR_CHECK_EQ(heard("MiB stay on the device"), hosts[i].file_most ? 1 : 0);
                host_files = NULL;
                setrlimit(RLIMIT_FSIZE, &usual);
                left = before - on_device();
                mapped = removed_files();
                gt_check(hosts[i].file_most ? mapped == 0 && left <= 70 * MIB : mapped > 0 && left >= 200 * MIB,
                         hosts[i].what, "%zu MiB left, %d files", left / MIB, mapped);
                command("status;:", said, sizeof(said));
                gt_check(strstr(said, " asleep") && !strstr(said, "host memory"), hosts[i].what, "%s", said);
                gt_check(lowest_free_descriptor() == free_descriptor, hosts[i].what, "no descriptor is left open");
                look_at_blocks(hosts[i].what);
                gt_check(removed_files() == 0, hosts[i].what, "no file is left, awake");
        }
        host_files = (const struct host_file[]){{"/proc/meminfo", "MemAvailable: 0 kB\n", NULL}, none[0]};
        sleep_now("to be freed");
        host_files = NULL;
        free_blocks();
        gt_check(removed_files() == 0, "freed", "no file is left");
}

int main(int argc, char **argv)
{
        static const struct {
                const char *name;
                mode_function *run;
        } modes[] = {
                {"contents", mode_contents},
                {"calls", mode_calls},
                {"busy", mode_busy},
                {"exported", mode_exported},
                {"slowly", mode_slowly},
                {"reset", mode_reset},
                {"processors", mode_processors},
                {"inside", mode_inside},
                {"turned", mode_turned},
                {"ended", mode_ended},
                {"cancelled", mode_cancelled},
                {"random", mode_random},
                {"exit", mode_exit},
                {"leaving", mode_leaving},
                {"full", mode_full},
                {"take", mode_take},
                {"stays-busy", mode_stays_busy},
                {"stays", mode_stays},
                {"ending", mode_ending},
                {"devices", mode_devices},
                {"first", mode_first},
                {"joins", mode_joins},
                {"failing", mode_failing},
                {"idle", mode_idle},
                {"host", mode_host},
                {"files", mode_files},
                {"deep", mode_deep},
                {"deep-calls", mode_deep_calls},
                {"deep-fails", mode_deep_fails},
                {"deep-full", mode_deep_full},
                {"deep-not", mode_deep_not},
                {"deep-ends", mode_deep_ends},
                {"deep-beside", mode_deep_beside},
                {"foreign", mode_foreign},
                {"deep-killed", mode_deep_killed},
                {"deep-taker", mode_deep_taker},
                {"deep-room", mode_deep_room},
                {"deep-worker", mode_deep_worker},
                {"deep-unseen", mode_deep_unseen},
                {"deep-nvml", mode_deep_nvml},
                {"deep-blind", mode_deep_blind},
                {"deep-lost", mode_deep_lost},
                {"deep-replaced", mode_deep_replaced},
        };

        arguments = argv;
        gt_open(&gt);
        for (size_t i = 0; argc > 1 && i < sizeof(modes) / sizeof(modes[0]); i++)
                if (strcmp(argv[1], modes[i].name) == 0) {
                        modes[i].run();
                        gt_check(grSimMisuseCount() == 0, "misuse", "%lu accesses to memory that was not there",
                                 grSimMisuseCount());
                        return GR_CHECK_RESULT();
                }
        return 2;
}
