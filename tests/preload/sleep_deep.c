/* The modes of sleep.c about deep sleep, and about a process that something else checkpoints. */
#include "gpureclaim.h"
#include "grsim.h"
#include "peer_process.h"
#include "sleep.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RUNNING, LOCKED, CHECKPOINTED }; /* CUprocessState, which older toolkits lack */

/* A function of the simulated driver itself; the library has no hook for checkpoints. */
static int checkpoint_call(const char *name, void *args)
{
        void *found = dlsym(RTLD_DEFAULT, name);
        int (*call)(int, void *);

        memcpy(&call, &found, sizeof(call));
        return call(getpid(), args);
}

static int state(void)
{
        int now = -1;

        checkpoint_call("cuCheckpointProcessGetState", &now);
        return now;
}

static void sleep_deeply(const char *when)
{
        char said[512];
        int status = command("sleep --deep", said, sizeof(said));

        gt_check(status == 0 && strstr(said, "deeply"), when, "%s", said);
        gt_check(state() == CHECKPOINTED && on_device() == 0, when, "state %d, %.0f MiB on the device", state(),
                 gt_mib(on_device()));
}

/* The command must refuse, with these words; the memory of the pool may be asleep. */
static void not_deeply(const char *words, const char *when)
{
        char said[512];
        int status = command("sleep --deep --timeout 1s", said, sizeof(said));

        gt_check(status == 1 && strstr(said, words), when, "%s", said);
        gt_check(state() == RUNNING, when, "state %d", state());
}

/* What the library does on its own account, or is asked for, leaves the driver alone in a deep sleep. */
static void ask_library(void)
{
        struct gpureclaim_status status = {.struct_bytes = sizeof(status)};
        __typeof__(gpureclaim_status) *ask;
        __typeof__(gpureclaim_reclaim) *reclaim;
        void *found = dlsym(RTLD_DEFAULT, "gpureclaim_status");
        char said[8192];

        memcpy(&ask, &found, sizeof(ask));
        found = dlsym(RTLD_DEFAULT, "gpureclaim_reclaim");
        memcpy(&reclaim, &found, sizeof(reclaim));
        alarm(20);
        GR_CHECK_EQ(ask(gt.device, &status), 0);
        GR_CHECK(status.live_bytes > 0);
        GR_CHECK_EQ(reclaim(gt.device, "drop", 0), 0);
        alarm(0);
        command("reclaim --rung drop", said, sizeof(said));
        command("limit $PPID 2TiB;:", said, sizeof(said));
        command("status --json;:", said, sizeof(said));
        gt_check(strstr(said, "\"asleep_deep_bytes\": ") && !strstr(said, "\"asleep_deep_bytes\": 0,"), "status",
                 "told");
}

/* In any kind of pool all of the process leaves the device, and comes back as it was. */
void mode_deep(void)
{
        size_t before;
        CUstream stream;
        CUevent event;

        take_blocks();
        stream = gt_stream();
        GR_MUST(cuEventCreate(&event, 0));
        before = on_device();
        for (volatile int i = 0; i < 3; i++) {
                sleep_deeply("asked");
                sleep_deeply("asked again while it sleeps");
                gt_check(fall_asleep("sleep"), "sleep", "it does already");
                ask_library();
                gt_sleep_us(i == 0 ? 1200000 : 1000); /* the library's own threads look around meanwhile */
                gt_check(state() == CHECKPOINTED, "own threads", "state %d", state());
                look_at_blocks("after");
                gt_check(state() == RUNNING && on_device() == before, "back", "%.0f MiB before, %.0f MiB after",
                         gt_mib(before), gt_mib(on_device()));
                gt_check(fall_asleep("sleep") || getenv("GPURECLAIM_POOL"), "sleep", "not deeply");
                sleep_deeply("asked while it sleeps less deeply");
                GR_CHECK(cuEventQuery(event) == CUDA_SUCCESS);
                gt_check(state() == RUNNING && (on_device() < before || getenv("GPURECLAIM_POOL")), "cuEventQuery",
                         "leaves the memory of the pool asleep: %.0f MiB of %.0f", gt_mib(on_device()), gt_mib(before));
                look_at_blocks("after that");
        }
        GR_MUST(gt_fill(&gt, stream, blocks[0], 7, 16)); /* code and streams are as before, too */
        GR_MUST(cuStreamSynchronize(stream));
        free_blocks();
}

/* Functions that the driver serves at once also in a deep sleep, so that they do not end it. */
static bool passes(const char *name)
{
        static const char *const names[] = {
                "cuCtxSetCurrent",
                "cuCtxPushCurrent",
                "cuCtxPopCurrent",
                "cuGetProcAddress",
#define GR_HOOK(symbol)
#define GR_CALL(symbol)
#define GR_NEED(symbol)
#define GR_PASSES(name) #name,
#include "driver/hooks.def"
        };

        for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
                if (strncmp(name, names[i], strlen(names[i])) == 0 && strchr("_", name[strlen(names[i])]))
                        return true;
        return false;
}

static const struct {
        const char *symbol, *name;
        int version;
        bool per_thread;
} functions[] = {
#define SIM_EXPORT(name, version, symbol) {#symbol, #name, version, false},
#define SIM_EXPORT_PT(name, version, pt_version, symbol, suffix)                                                       \
        {#symbol, #name, version, false}, {#symbol #suffix, #name, pt_version, true},
#include "exports.def"
};

/*
 * Each function of the driver, found in either way, ends a deep sleep or returns at once. arguments[2]: of ten tenths,
 * which one.
 */
void mode_deep_calls(void)
{
        CUdeviceptr block;
        uint32_t word = 0;
        CUgraph graph;
        size_t count = sizeof(functions) / sizeof(functions[0]), part = (size_t)atoi(arguments[2]);

        GR_MUST(cuMemAlloc(&block, 4 * MIB));
        GR_MUST(cuMemsetD32(block, 7, MIB));
        for (volatile size_t i = count * part / 10; i < count * (part + 1) / 10; i++) {
                const char *symbol = functions[i].symbol;
                CUresult (*call)(long, long, long, long, long, long, long, long, long, long, long, long);
                void *found;
                cuuint64_t flags = functions[i].per_thread ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : 0;
                CUresult result;

                if (strncmp(symbol, "cuCheckpoint", 12) == 0 || strcmp(symbol, "cuSimNewest") == 0 ||
                    strstr(symbol, "GLCtx") || strstr(symbol, "PrimaryCtxRe"))
                        continue; /* mode_deep_not has the second, mode_deep_ends the last ones */
                found = dlsym(RTLD_DEFAULT, symbol);
                if (i % 2)
                        GR_MUST(cuGetProcAddress(functions[i].name, &found, functions[i].version, flags, NULL));
                memcpy(&call, &found, sizeof(call));
                sleep_deeply(symbol);
                alarm(20);
                result = call(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
                alarm(0);
                gt_check(state() == (passes(symbol) ? CHECKPOINTED : RUNNING), symbol, "%s, state %d",
                         gt_result_name(result), state());
                gt_attach(&gt);
                if (strstr(symbol, "BeginCapture"))
                        cuStreamEndCapture(CU_STREAM_PER_THREAD, &graph);
                GR_CHECK(cuCtxSynchronize() == CUDA_SUCCESS);
        }
        GR_MUST(cuMemcpyDtoH(&word, block + 4 * MIB - 4, 4));
        gt_check(word == 7, "after", "%u", word);
}

/* GRSIM_FAULT, GPURECLAIM_LOG=warn. Each call tries to have the process back, and only the first says why it fails. */
void mode_deep_lost(void)
{
        take_blocks();
        sleep_deeply("asked");
        begin_to_listen();
        GR_CHECK(read_a_block() != CUDA_SUCCESS);
        GR_CHECK(read_a_block() != CUDA_SUCCESS);
        GR_CHECK_EQ(heard("the driver could not restore the process"), 1);
        gt_check(grSimCallCount("cuCheckpointProcessRestore") == 2, "restore", "tried each time");
}

/*
 * GRSIM_FAULT. arguments[2]: what the command says of a sleep that fails, or "wakes" where the first call that wakes it
 * fails, or "goes on" where nobody notices. All is as before in each case.
 */
void mode_deep_fails(void)
{
        CUresult result;

        take_blocks();
        if (strcmp(arguments[2], "wakes") != 0 && strcmp(arguments[2], "goes on") != 0) {
                not_deeply(arguments[2], "a step that fails");
        } else {
                sleep_deeply("asked");
                result = read_a_block();
                gt_check((result == CUDA_SUCCESS) == (arguments[2][0] == 'g'), "the first call", "%s",
                         gt_result_name(result));
        }
        look_at_blocks("after");
        sleep_deeply("asked again");
        look_at_blocks("after that");
}

/* GPURECLAIM_WAIT=0. No restore is tried while another process is at it, nor on a full device. */
void mode_deep_full(void)
{
        int folder = open(getenv("GPURECLAIM_REGION_DIR"), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        CUresult result;
        void *found;

        take_blocks();
        sleep_deeply("asked");
        GR_CHECK_EQ(flock(folder, LOCK_EX), 0);
        result = read_a_block();
        gt_check(result == CUDA_ERROR_OUT_OF_MEMORY && grSimCallCount("cuCheckpointProcessRestore") == 0,
                 "beside another restore", "%s", gt_result_name(result));
        GR_CHECK_EQ(flock(folder, LOCK_UN), 0);
        look_at_blocks("after");
        GR_CHECK_EQ(flock(folder, LOCK_EX), 0);
        GR_CHECK_EQ(flock(folder, LOCK_UN), 0);
        sleep_deeply("asked again");
        grSimTake(gt.device, ((size_t)4 << 30) - 300 * MIB); /* less is free than a restore might take */
        result = read_a_block();
        gt_check(result == CUDA_ERROR_OUT_OF_MEMORY, "a copy", "%s", gt_result_name(result));
        result = cuEventQuery(NULL);
        gt_check(result == CUDA_ERROR_OUT_OF_MEMORY, "a query", "%s", gt_result_name(result));
        /* Functions that would not return. */
        result = cuGetProcAddress("cuSimNewest", &found, 13000, 0, NULL);
        gt_check(result == CUDA_ERROR_OUT_OF_MEMORY && !found, "a look-up", "%s", gt_result_name(result));
        gt_check(!dlsym(RTLD_DEFAULT, "cuSimNewest"), "a look-up by dlsym", "finds nothing");
        gt_check(grSimCallCount("cuCheckpointProcessRestore") == 1 && state() == CHECKPOINTED, "restore", "not tried");
}

#pragma weak cuIpcGetEventHandle /* the simulated driver lacks it: it is the hook's */

/* arguments[2]: a socket. Takes most of the device until the other end is closed. */
void mode_deep_taker(void)
{
        int socket = atoi(arguments[2]), none;
        char byte = 0;

        grSimTake(gt.device, ((size_t)4 << 30) - 300 * MIB);
        peer_send(socket, &byte, 1, -1);
        peer_receive(socket, &byte, 1, &none);
}

static void *end_taker(void *socket)
{
        gt_sleep_us(500000);
        gt_check(state() == CHECKPOINTED && grSimCallCount("cuCheckpointProcessRestore") == 0, "meanwhile",
                 "a call waits for room");
        gt_check(fcntl(STDIN_FILENO, F_GETFD) < 0, "meanwhile", "nothing has the number of a stream that is closed");
        close(*(int *)socket);
        return NULL;
}

/* Another process has taken the device meanwhile, and ends: a call waits for that. */
void mode_deep_room(void)
{
        char mode[] = "deep-taker", byte;
        pthread_t thread;
        int socket, none;
        pid_t taker;

        take_blocks();
        sleep_deeply("asked");
        taker = peer_start(arguments[0], mode, true, &socket);
        GR_CHECK(peer_receive(socket, &byte, 1, &none));
        close(STDIN_FILENO);
        pthread_create(&thread, NULL, end_taker, &socket);
        look_at_blocks("after");
        pthread_join(thread, NULL);
        waitpid(taker, NULL, 0);
        gt_check(grSimCallCount("cuCheckpointProcessRestore") == 1, "restore", "once");
}

/* Calls what was looked up in NVML last, of which there is a gate for so many. The call wakes the process. */
static void look_up_many(void)
{
        void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW), *found = NULL;
        char name[32];
        int (*call)(void);

        for (unsigned i = 0; i < 512; i++) {
                snprintf(name, sizeof(name), "nvmlMany_%03o", i);
                found = dlsym(library, name);
        }
        memcpy(&call, &found, sizeof(call));
        sleep_deeply("asked");
        alarm(20);
        call();
        alarm(0);
        gt_check(state() == RUNNING, name, "state %d", state());
        sleep_deeply("asked again");
        alarm(20);
        found = dlsym(library, "nvmlShutdown");
        memcpy(&call, &found, sizeof(call));
        call();
        alarm(0);
}

/* What keeps a process from sleeping deeply; arguments[2]: which of them. */
void mode_deep_not(void)
{
        const char *what = arguments[2];
        CUipcMemHandle handle;
        CUipcEventHandle event_handle;
        CUevent event;
        CUmemGenericAllocationHandle made, imported;
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device}};
        CUdeviceptr managed;
        void *found;
        int fd;

        take_blocks();
        if (strcmp(what, "exported") == 0) {
                GR_MUST(cuIpcGetMemHandle(&handle, blocks[0]));
                not_deeply("it shares", what);
        } else if (strcmp(what, "imported") == 0) {
                GR_MUST(cuMemCreate(&made, 2 * MIB, &prop, 0));
                GR_MUST(cuMemExportToShareableHandle(&fd, made, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
                GR_MUST(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd,
                                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
                not_deeply("it shares", what);
        } else if (strcmp(what, "event") == 0) {
                GR_MUST(cuEventCreate(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
                GR_MUST(cuIpcGetEventHandle(&event_handle, event));
                not_deeply("it shares", what);
        } else if (strcmp(what, "managed") == 0) {
                GR_MUST(cuMemAllocManaged(&managed, 2 * MIB, CU_MEM_ATTACH_GLOBAL));
                not_deeply("cuCheckpointProcessCheckpoint answered 801", what);
        } else if (strncmp(what, "unknown", 7) == 0) {
                sleep_deeply("asked before");
                alarm(20);
                if (what[7])
                        GR_CHECK(dlsym(RTLD_DEFAULT, "cuSimNewest"));
                else
                        GR_MUST(cuGetProcAddress("cuSimNewest", &found, 13000, 0, NULL));
                alarm(0);
                not_deeply("does not know", what);
        } else if (strcmp(what, "many of NVML") == 0) {
                look_up_many();
                not_deeply("very many of NVML", what);
        } else { /* the environment sees to it */
                not_deeply(what, what);
        }
        look_at_blocks("after");
}

static void *leave_thread(void *arg)
{
        gt_attach(&gt);
        return arg;
}

/* The process, or its context, ends in a deep sleep; arguments[2]: how. */
void mode_deep_ends(void)
{
        const char *how = arguments[2];
        pthread_t thread;
        CUdeviceptr ptr;
        pid_t child;
        int status;

        take_blocks();
        pthread_create(&thread, NULL, leave_thread, NULL);
        sleep_deeply("asked");
        pthread_join(thread, NULL);
        child = fork();
        if (child == 0)
                _exit(cuMemAlloc(&ptr, MIB) == CUDA_SUCCESS || cuEventQuery(NULL) == CUDA_SUCCESS);
        waitpid(child, &status, 0);
        gt_check(status == 0 && state() == CHECKPOINTED, "child", "status %d", status);
        if (strcmp(how, "reset") == 0) {
                GR_MUST(cuDevicePrimaryCtxReset(gt.device));
                gt_check(state() == RUNNING, "reset", "it is awake");
        } else if (strcmp(how, "release") == 0) {
                GR_MUST(cuDevicePrimaryCtxRelease(gt.device));
                gt_check(state() == RUNNING, "release", "it is awake");
        } else if (strcmp(how, "wakes") == 0) {
                look_at_blocks("after");
        }
}

static _Atomic int in_call; /* 1: a thread is in a call; 2: it may return */

static void stay(void *arg)
{
        (void)arg;
        in_call = 1;
        while (in_call == 1)
                gt_sleep_us(1000);
}

static void *call_long(void *arg)
{
        CUuserObject object;

        gt_attach(&gt);
        GR_MUST(cuUserObjectCreate(&object, arg, stay, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
        GR_MUST(cuUserObjectRelease(object, 1));
        return arg;
}

/* A thread is in a call that needs no memory: the memory sleeps, and the process does not yet. */
void mode_deep_beside(void)
{
        char said[512];
        pthread_t thread;
        int status;

        take_blocks();
        pthread_create(&thread, NULL, call_long, NULL);
        while (in_call == 0)
                gt_sleep_us(1000);
        status = command("sleep --deep --timeout 300ms", said, sizeof(said));
        gt_check(status == 1 && strstr(said, "sleeps, but not deeply: it was busy"), "sleep", "%s", said);
        in_call = 2;
        pthread_join(thread, NULL);
        sleep_deeply("when the call has ended");
        look_at_blocks("after");
}

/* Something else checkpoints the process, while memory is cached that the library's own threads would give back. */
void mode_foreign(void)
{
        uint64_t args[8] = {2000};
        char said[8192];

        take_blocks();
        for (volatile int i = 0; i < 3; i++) {
                free_blocks();
                take_blocks();
                for (int j = 0; j < MANY; j += 2) {
                        GR_MUST(cuMemFree(blocks[j]));
                        GR_MUST(cuMemAlloc(&blocks[j], sizes[j]));
                        GR_MUST(cuMemsetD32(blocks[j], 0x10000u + (unsigned)j, sizes[j] / 4));
                }
                GR_MUST(cuCtxSynchronize());
                GR_CHECK(checkpoint_call("cuCheckpointProcessLock", args) == 0);
                gt_sleep_us(300000);
                args[0] = 0;
                GR_CHECK(checkpoint_call("cuCheckpointProcessCheckpoint", args) == 0);
                gt_check(on_device() == 0, "checkpoint", "all is off the device");
                command("reclaim --rung drop", said, sizeof(said));
                gt_check(command("sleep --deep --timeout 0", said, sizeof(said)) == 1, "sleep", "%s", said);
                gt_check(command("sleep --timeout 0", said, sizeof(said)) == 1, "sleep", "%s", said);
                command("limit $PPID 2TiB;:", said, sizeof(said));
                gt_sleep_us(700000);
                gt_check(state() == CHECKPOINTED, "meanwhile", "state %d", state());
                GR_CHECK(checkpoint_call("cuCheckpointProcessRestore", args) == 0);
                GR_CHECK(checkpoint_call("cuCheckpointProcessUnlock", args) == 0);
                look_at_blocks("after");
                sleep_deeply("asked");
                GR_CHECK(checkpoint_call("cuCheckpointProcessRestore", args) ==
                         0); /* as cuda-checkpoint --toggle does */
                if (i > 0)
                        GR_CHECK(checkpoint_call("cuCheckpointProcessUnlock", args) == 0);
                look_at_blocks("after it was woken by something else");
                args[0] = 2000;
        }
}

static _Atomic unsigned child_signals;

static void count_signal(int signal)
{
        (void)signal;
        child_signals++;
}

static size_t open_files(void)
{
        size_t count = 0;

        for (int fd = 0; fd < 1024; fd++)
                count += fcntl(fd, F_GETFD) >= 0;
        return count;
}

/*
 * The process that looks for room is not seen by the program, which is told of no child but its own, also as the
 * foster parent of all below it; arguments[2]: "handled", or "ignored" where it lets children go unseen.
 */
void mode_deep_unseen(void)
{
        struct sigaction action = {.sa_handler = arguments[2][0] == 'i' ? SIG_IGN : count_signal};
        sigset_t before = {{0}}, after = {{0}};
        CUevent event;
        int orders[2], answers[2], status;
        size_t files;
        char word[] = "s";
        pid_t child;

        take_blocks();
        GR_MUST(cuEventCreate(&event, 0));
        GR_CHECK(pipe(orders) == 0 && pipe(answers) == 0);
        child = fork();
        if (child == 0) { /* gives the orders, so that the shells are its children */
                char line[256];

                close(orders[1]);
                snprintf(line, sizeof(line), "env -u LD_PRELOAD \"$GR_TEST_COMMAND\" sleep --deep %d >&2",
                         (int)getppid());
                while (read(orders[0], word, 1) == 1) {
                        word[0] = system(line) == 0 ? 'y' : 'n';
                        if (write(answers[1], word, 1) != 1)
                                break;
                }
                _exit(EXIT_SUCCESS);
        }
        GR_CHECK_EQ(sigaction(SIGCHLD, &action, NULL), 0);
        GR_CHECK_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
        sigprocmask(SIG_SETMASK, NULL, &before);
        files = open_files();
        for (volatile int i = 0; i < 5; i++) {
                GR_CHECK(write(orders[1], word, 1) == 1 && read(answers[0], word, 1) == 1);
                gt_check(word[0] == 'y' && state() == CHECKPOINTED, "asked", "state %d", state());
                errno = EDOM;
                GR_CHECK(cuEventQuery(event) == CUDA_SUCCESS);
                GR_CHECK_EQ(errno, EDOM);
                gt_check(waitpid(-1, &status, WNOHANG) == 0, "wait", "no child has ended");
        }
        sigprocmask(SIG_SETMASK, NULL, &after);
        gt_check(child_signals == 0 && memcmp(&before, &after, sizeof(before)) == 0, "signals", "%u of children",
                 child_signals);
        GR_CHECK_EQ(open_files(), files);
        look_at_blocks("after");
        close(orders[1]);
        while (waitpid(child, &status, 0) < 0 && errno == EINTR)
                ;
        gt_check(arguments[2][0] == 'i' || child_signals == 1, "its own child", "seen");
}

/* GPURECLAIM_WAIT=300ms. The other process does not answer while the file arguments[2] says so. */
void mode_deep_blind(void)
{
        FILE *answer;

        take_blocks();
        sleep_deeply("asked");
        answer = fopen(arguments[2], "w");
        GR_CHECK(answer && fputs("exit 1\n", answer) >= 0 && fclose(answer) == 0);
        for (volatile int i = 0; i < 2; i++)
                GR_CHECK(read_a_block() == CUDA_ERROR_OUT_OF_MEMORY);
        gt_check(state() == CHECKPOINTED && grSimCallCount("cuCheckpointProcessRestore") == 0, "restore", "not tried");
        GR_CHECK_EQ(truncate(arguments[2], 0), 0);
        look_at_blocks("after");
}

/*
 * The command that looks for room, the file arguments[2], may not be run any more in one sleep, is removed in the next,
 * and then replaced.
 */
void mode_deep_replaced(void)
{
        FILE *other;

        take_blocks();
        sleep_deeply("asked");
        GR_CHECK_EQ(chmod(arguments[2], 0644), 0);
        look_at_blocks("after it was forbidden");
        sleep_deeply("asked again");
        GR_CHECK_EQ(unlink(arguments[2]), 0);
        look_at_blocks("after it was removed");
        sleep_deeply("asked again");
        other = fopen(arguments[2], "wx");
        GR_CHECK(other && fputs("#!/bin/false\n", other) >= 0 && fclose(other) == 0 && chmod(arguments[2], 0755) == 0);
        look_at_blocks("after it was replaced");
        sleep_deeply("asked after that");
        look_at_blocks("after that");
}

/* None of NVML's, in spite of its name. */
__attribute__((visibility("default"))) int nvmlOwn(void *a, void *b, unsigned c);
int nvmlOwn(void *a, void *b, unsigned c)
{
        return a == b && c > 0;
}

/* The program asks NVML, which would not return in a deep sleep: that wakes it, in any way to find a function. */
void mode_deep_nvml(void)
{
        void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW), *found = dlsym(RTLD_DEFAULT, "nvmlOwn"), *device = NULL;
        static const char *const names[] = {"nvmlInit_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetMemoryInfo",
                                            "nvmlDeviceGetUUID", "nvmlShutdown"};
        unsigned long long memory[3];
        int (*call)(void *, void *, unsigned);
        char text[96];

        memcpy(&call, &found, sizeof(call));
        gt_check(call == nvmlOwn, "a function of the program", "has no gate");
        take_blocks();
        for (volatile size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
                found = dlsym(library, names[i]);
                memcpy(&call, &found, sizeof(call));
                sleep_deeply(names[i]);
                alarm(20);
                GR_CHECK_EQ(call(i == 1 ? NULL : device,
                                 i == 1   ? (void *)&device
                                 : i == 2 ? (void *)memory
                                          : text,
                                 sizeof(text)),
                            0);
                alarm(0);
                gt_check(state() == RUNNING, names[i], "state %d", state());
        }
        gt_check(strncmp(text, "GPU-", 4) == 0 && memory[0] > 0, "answers", "%s", text);
        look_at_blocks("after");
}

/* Sleeps deeply and wakes, until it is killed. */
void mode_deep_worker(void)
{
        take_blocks();
        for (;;) {
                fall_asleep("sleep --deep");
                GR_MUST(read_a_block());
        }
}

/* Another process is killed at any moment: the device has all of its memory again. */
void mode_deep_killed(void)
{
        int status;
        pid_t child;

        for (volatile int i = 0; i < 15; i++) {
                child = fork();
                if (child == 0) {
                        execl(arguments[0], arguments[0], "deep-worker", NULL);
                        _exit(127);
                }
                gt_sleep_us(300000 + 17000 * i);
                kill(child, SIGKILL);
                gt_check(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "the other process", "is killed");
        }
        gt_check(on_device() == gt.context_bytes, "device", "%.0f MiB in use", gt_mib(on_device()));
}
