/*
 * The fault sweep: every call of the driver that a scene leads to, and every call of the C library that the library
 * makes by itself, fails once, with each of the codes it can give.
 *
 *   sweep [native] [all [SCENE]|memory|first|list|one SCENE[/POOL] FAULT|just SCENE[/POOL] FAULT]
 *
 * Without an argument a sample, random by GR_TEST_SEED, as long as GR_TEST_SECONDS says (45). `all` takes all scenes,
 * or those whose names begin with SCENE, and all calls; but of a function that a scene calls more than 32 times ever
 * fewer from there on (GR_TEST_PART=2/4: the second quarter of it). `memory` takes all places where the library is
 * refused memory of its own; `first` each function of the driver, where it is called first in the first scene that
 * calls it. `one` runs a scene with a fault as failures print it: cuMemAlloc_v2:3=2 is the third call of the driver's
 * function, malloc:3=12 of the C library's, with an errno; "none" is none. `just` does it in this process, for
 * debuggers, and judges nothing. `native` says that the library is not there: then the sweep shows that the scenes and
 * the rule below are sound.
 *
 * The rule. With one fault
 * - the program ends by itself, in time, and nothing that it wrote is lost;
 * - one of its calls may return the fault's code, once, if the fault was in that very function of the driver: natively
 *   it would have. No other call fails. The same call, tried again, succeeds;
 * - of the C library, only memory that is refused may show: as CUDA_ERROR_OUT_OF_MEMORY, from one call, once;
 * - what the driver refuses to take back from the library is lost, up to a block, and so is the memory of a graph whose
 *   end it will not tell, or for which there are no structures; memory that only spilling could have
 *   given is not had where the host gives none; without its neighbour's help a process has what there is; a call whose
 *   context the driver does not tell goes to the driver as it is, and so does one that comes before its library can be
 *   opened; in split and auto two blocks may not find the place that they found without the fault: where blocks lie
 *   across pages, or where the fault leaves no mapped memory and each segment keeps what its blocks leave;
 * - in the end, with everything freed, the program is told of as much free memory as without the fault, and can have as
 *   many blocks; nothing is left by the library's own figures; once its context has gone the card is as empty as then;
 *   and traces and statistics are whole where they can be written at all;
 * - after a code that kills a context (700, 719) any call may return it, and of memory nothing is asked. But the
 * program still ends by itself.
 */
#include "sweep.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/trace_file.h"

#define RUN_SECONDS 30 /* longer is for ever, on a busy machine too */
#define GAVE_UP     3  /* exit status of a scene after a call that failed twice */
#define CODES_MOST  8
#define CASES_MOST  128
#define POOLS       3
#define EACH_UNTIL  32 /* calls of one function in a scene; of those beyond, ever fewer */

static const char *const pool_names[POOLS] = {"bins", "split", "auto"};

static const char *const driver_symbols[] = {
#define SIM_EXPORT(name, version, symbol)                        #symbol,
#define SIM_EXPORT_PT(name, version, pt_version, symbol, suffix) #symbol, #symbol #suffix,
#include "../../tools/sim/exports.def"
#undef SIM_EXPORT
#undef SIM_EXPORT_PT
};
static const char *const function_names[] = {
#define FUNCTION(name) #name,
        SWEEP_FUNCTIONS(FUNCTION)
#undef FUNCTION
};

/* What the driver's functions can answer, by the beginning of the name; the first that fits. */
static const struct {
        const char *begin;
        int codes[CODES_MOST];
} driver_codes[] = {
        {"cuGetProcAddress", {0}}, /* part of how the program was built, not of its run */
        {"cuGetExportTable", {0}},
        {"cuDriverGetVersion", {1}},
        {"cuInit", {3, 100, 999}},
        {"cuDeviceGetUuid", {1, 101}},
        {"cuDeviceGetMemPool", {1, 801}},
        {"cuDeviceGetDefaultMemPool", {1, 801}},
        {"cuDevicePrimaryCtxRetain", {2, 101, 999}},
        {"cuCtxCreate", {2, 101, 999}},
        {"cuCtxRecordEvent", {2, 400, 700, 900, 999}},
        {"cuCtxWaitEvent", {2, 400, 700, 900, 999}},
        {"cuCtxSynchronize", {2, 700, 719, 900, 999}},
        {"cuCtx", {1, 201, 999}},
        {"cuEventQuery", {400, 600, 700, 900, 999}},
        {"cuEventSynchronize", {400, 700, 999}},
        {"cuEventCreate", {2, 201, 999}},
        {"cuStreamQuery", {400, 600, 700, 900, 999}},
        {"cuStreamSynchronize", {2, 400, 700, 900, 999}},
        {"cuStreamCreate", {2, 201, 999}},
        {"cuStreamEndCapture", {1, 2, 999}},
        {"cuStream", {1, 400, 900, 999}},
        {"cuLaunch", {2, 701, 700, 719}},
        {"cuMemSetAccess", {1, 2, 600, 999}},
        {"cuMemAddressReserve", {1, 2, 999}},
        {"cuMemCreate", {1, 2, 801, 999}},
        {"cuMemMap", {1, 2, 999}},
        {"cuMemAlloc", {1, 2, 201, 700, 900, 999}},
        {"cuMemHostAlloc", {1, 2, 201, 999}},
        {"cuMemFreeAsync", {1, 2, 400, 700, 801, 900, 999}},
        {"cuMemFree", {1, 201, 700, 900, 999}},
        {"cuGraphInstantiate", {1, 2, 999}},
        {"cuGraphLaunch", {1, 2, 700, 999}},
        {"", {1, 2, 999}},
};

static const struct {
        const char *name;
        int errors[CODES_MOST];
} function_errors[] = {
        {"malloc", {ENOMEM}},
        {"calloc", {ENOMEM}},
        {"realloc", {ENOMEM}},
        {"aligned_alloc", {ENOMEM}},
        {"pthread_create", {EAGAIN}},
        {"open", {EMFILE, EACCES, EINTR, ENOSPC}},
        {"openat", {EMFILE, EACCES, EINTR, ENOSPC}},
        {"mkdir", {EACCES, ENOSPC, EROFS}},
        {"stat", {EACCES, ENOMEM}},
        {"lstat", {EACCES, ENOMEM}},
        {"fstat", {EIO}},
        {"flock", {EWOULDBLOCK, EINTR, ENOLCK}},
        {"fcntl", {EINVAL, EPERM}},
        {"ftruncate", {EIO}},
        {"read", {EINTR, EIO, SWEEP_SHORT}},
        {"pread", {EINTR, EIO}},
        {"write", {EINTR, ENOSPC, EPIPE, SWEEP_SHORT}},
        {"pwrite", {EINTR, ENOSPC, EIO, SWEEP_SHORT}},
        {"unlinkat", {EACCES, ENOENT}},
        {"kill", {EPERM, ESRCH}},
        {"madvise", {EINVAL}},
        {"shmget", {ENOSPC, ENOMEM, EACCES}},
        {"shmat", {EMFILE, ENOMEM, EACCES}},
        {"shmctl", {EACCES, EIDRM}},
        {"syscall", {EINTR, EAGAIN}},
        {"dlopen", {ENOENT}},
        {"getrandom", {EINTR, ENOSYS}},
        {"socket", {EMFILE, EACCES}},
        {"bind", {EADDRINUSE, EACCES}},
        {"listen", {EADDRINUSE}},
        {"accept4", {EMFILE, EINTR, ECONNABORTED}},
        {"connect", {EINTR, EAGAIN}},
        {"getsockopt", {EINVAL}},
        {"setsockopt", {EINVAL}},
        {"poll", {EINTR, ENOMEM}},
        {"sendmsg", {EINTR, EAGAIN, EPIPE}},
        {"recvmsg", {EINTR, EAGAIN, ENOMEM}},
};

/* A scene under one kind of pool; -1: under the default only, which is not in the title. */
struct sweep_case {
        const struct sweep_scene *scene;
        int pool;
        struct sweep_report plain; /* without a fault */
};

struct fault {
        struct sweep_case *in;
        bool driver;
        unsigned which; /* symbol or function */
        unsigned long nth;
        int code; /* 0: no fault at all */
};

/* Were against the rule once. Each of them is in every sample. */
static const struct {
        const char *scene, *fault;
} found_before[] = {
        {"full-ladder/bins", "cuCtxRecordEvent:1=999"},
        {"pools/split", "malloc:1=12"},
        {"full-ladder/bins", "cuEventQuery:3=900"},
        {"full-limit/bins", "cuDeviceTotalMem_v2:1=1"},
        {"graphs/split", "realloc:2=12"},
        {"green/split", "cuDevicePrimaryCtxRelease_v2:1=2"},
        {"group", "lstat:2=13"},
        {"group", "pread:5=5"},
        {"managed/auto", "cuMemFree_v2:1=201"},
        {"managed/bins", "calloc:5=12"},
        {"mapped/auto", "calloc:8=12"},
        {"mapped-limit", "calloc:7=12"},
        {"peers", "cuStreamSynchronize:1=900"},
        {"pinned", "cuMemHostUnregister:2=1"},
        {"plain/auto", "cuPointerGetAttribute:3=1"},
        {"plain/split", "cuMemCreate:1=999"},
        {"plain/split", "cuMemMap:2=1"},
        {"plain/split", "cuMemSetAccess:2=1"},
        {"changing/auto", "cuCtxRecordEvent:10=999"},
        {"changing/auto", "cuMemGetAllocationGranularity:1=1"},
        {"streams-old", "cuCtxPushCurrent_v2:19=1"},
        {"streams-poll", "malloc:1=12"},
        {"streams/split", "cuDevicePrimaryCtxGetState:1=999"},
};

#define FOUND_BEFORE (sizeof(found_before) / sizeof(*found_before))

static struct sweep_case cases[CASES_MOST];
static unsigned case_count;
static bool native;
static char folder[128], said[160];

static void die(const char *what)
{
        fprintf(stderr, "sweep: %s: %s\n", what, strerror(errno));
        exit(2);
}

void sweep_error(const char *call, CUresult result, bool twice)
{
        unsigned i = atomic_fetch_add(&sweep_report->error_count, 1);
        int length = (int)strcspn(call, "(");

        if (i < SWEEP_ERRORS) {
                snprintf(sweep_report->errors[i].call, sizeof(sweep_report->errors[i].call), "%.*s", length, call);
                sweep_report->errors[i].code = (int)result;
                sweep_report->errors[i].twice = twice;
        }
        if (twice)
                exit(GAVE_UP);
}

void sweep_wrong(const char *format, ...)
{
        va_list args;

        if (sweep_report->wrong[0])
                return;
        va_start(args, format);
        vsnprintf(sweep_report->wrong, sizeof(sweep_report->wrong), format, args);
        va_end(args);
}

static void case_title(const struct sweep_case *sweep_case, char *buffer, size_t bytes)
{
        snprintf(buffer, bytes, "%s%s%s", sweep_case->scene->name, sweep_case->pool < 0 ? "" : "/",
                 sweep_case->pool < 0 ? "" : pool_names[sweep_case->pool]);
}

static void fault_title(const struct fault *fault, char *buffer, size_t bytes)
{
        if (fault->code)
                snprintf(buffer, bytes, "%s:%lu=%d",
                         fault->driver ? driver_symbols[fault->which] : function_names[fault->which], fault->nth,
                         fault->code);
        else
                snprintf(buffer, bytes, "none");
}

/* ---- one run ---- */

static void set(const char *setting)
{
        char name[256], *value, *mark;

        snprintf(name, sizeof(name), "%s", setting);
        value = strchr(name, '=');
        *value++ = '\0';
        mark = strstr(value, "FOLDER");
        if (mark) {
                char path[512];

                snprintf(path, sizeof(path), "%.*s%s%s", (int)(mark - value), value, folder, mark + 6);
                setenv(name, path, 1);
        } else {
                setenv(name, value, 1);
        }
}

/* In the child. */
static void run_scene(const struct fault *fault)
{
        const struct sweep_case *sweep_case = fault->in;
        unsigned long (*count)(const char *);
        char plan[96];

        for (unsigned i = 0; sweep_case->scene->settings[i]; i++)
                set(sweep_case->scene->settings[i]);
        set("GPURECLAIM_REGION_DIR=FOLDER/region");
        if (sweep_case->pool >= 0)
                setenv("GPURECLAIM_POOL", pool_names[sweep_case->pool], 1);
        else
                unsetenv("GPURECLAIM_POOL");
        fault_title(fault, plan, sizeof(plan));
        if (fault->code && fault->driver)
                setenv("GRSIM_FAULT", plan, 1);
        else if (fault->code)
                sweep_plan = (struct sweep_plan){fault->which, fault->nth, fault->code};
        sweep_case->scene->run();
        sweep_finish();
        *(void **)&count = dlsym(RTLD_DEFAULT, "grSimCallCount");
        for (unsigned i = 0; count && i < SWEEP_SYMBOLS; i++)
                sweep_report->symbols[i] = count(driver_symbols[i]);
        sweep_report->over = true;
        exit(0);
}

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *place)
{
        (void)status;
        (void)kind;
        if (place->level > 0)
                remove(path);
        return 0;
}

static FILE *open_written(const char *name)
{
        char path[192];

        snprintf(path, sizeof(path), "%s/%s", folder, name);
        return fopen(path, "r");
}

/* Allocations and frees. */
static unsigned entries_of_trace(void)
{
        static struct gr_trace_header header;
        struct gr_trace_entry entry;
        unsigned count = 0;
        FILE *file = open_written("trace");

        if (file && fread(&header, sizeof(header), 1, file) == 1)
                while (fread(&entry, sizeof(entry), 1, file) == 1) {
                        unsigned what = entry.head >> 32 & 0xff;

                        count += what == GR_ENTRY_HIT || what == GR_ENTRY_MISS || what == GR_ENTRY_FREE;
                }
        if (file)
                fclose(file);
        return count;
}

static unsigned lines_of(const char *name)
{
        FILE *file = open_written(name);
        unsigned count = 0;
        int c;

        while (file && (c = getc(file)) != EOF)
                count += c == '\n';
        if (file)
                fclose(file);
        return count;
}

/* Runs a scene in a process of its own. Returns what waitpid says of it, or -1: it did not end. */
static int run(const struct fault *fault, bool quiet)
{
        struct timespec most = {.tv_sec = RUN_SECONDS};
        sigset_t child_ended, before;
        int status = -1;
        pid_t child;

        memset(sweep_report, 0, sizeof(*sweep_report));
        sigemptyset(&child_ended);
        sigaddset(&child_ended, SIGCHLD);
        sigprocmask(SIG_BLOCK, &child_ended, &before);
        child = fork();
        if (child < 0)
                die("fork");
        if (child == 0) {
                int out = open(said, O_WRONLY | O_CREAT | O_TRUNC, 0600);

                sigprocmask(SIG_SETMASK, &before, NULL);
                setpgid(0, 0);
                if (quiet && (out < 0 || dup2(out, 1) < 0 || dup2(out, 2) < 0))
                        abort();
                close(out);
                run_scene(fault);
        }
        while (waitpid(child, &status, WNOHANG) == 0)
                if (sigtimedwait(&child_ended, NULL, &most) < 0 && errno == EAGAIN) {
                        if (waitpid(child, &status, WNOHANG) == child)
                                break;
                        kill(-child, SIGKILL);
                        waitpid(child, NULL, 0);
                        status = -1;
                        break;
                }
        sigprocmask(SIG_SETMASK, &before, NULL);
        sweep_report->lines = entries_of_trace() + lines_of("stats");
        nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
        return status;
}

/* ---- judging ---- */

static bool kills_contexts(const struct fault *fault)
{
        return fault->driver && (fault->code == CUDA_ERROR_ILLEGAL_ADDRESS || fault->code == CUDA_ERROR_LAUNCH_FAILED);
}

static bool refuses_memory(unsigned function)
{
        return function == SWEEP_CALL_malloc || function == SWEEP_CALL_calloc || function == SWEEP_CALL_realloc ||
               function == SWEEP_CALL_aligned_alloc;
}

static bool in_list(const char *name, const char *const *list)
{
        while (*list && strcmp(*list, name) != 0)
                list++;
        return *list;
}

/* Memory is left with the driver, which refused to take it back, and nobody knows for how long. */
static const char *const give_back[] = {"cuMemFree_v2", "cuMemFreeAsync", "cuMemUnmap", "cuMemRelease", NULL};

/* Nobody tells when a graph has gone, so the memory of its capture is kept for good. */
static const char *const tell_of_graphs[] = {"cuUserObjectCreate", "cuGraphRetainUserObject", NULL};

/* Whether a block may be lost by the fault. Without memory for structures, a block of a graph is kept for good. */
static bool may_lose(const struct fault *fault)
{
        if (!fault->driver)
                return fault->in->scene->keeps && refuses_memory(fault->which);
        return in_list(driver_symbols[fault->which], give_back) ||
               in_list(driver_symbols[fault->which], tell_of_graphs);
}

/* Whose failure may mean that there is no memory: for spilling; and without a context there is no ladder. */
static const char *const needed_for_memory[] = {"cuMemHostAlloc", "cuMemHostGetDevicePointer_v2", "cuCtxGetCurrent",
                                                "cuCtxGetDevice", NULL};

/* Who is interrupted, or can write only a part, goes on. */
static bool hinders_writing(const struct fault *fault)
{
        return !fault->driver && fault->which == SWEEP_CALL_write &&
               (fault->code == EINTR || fault->code == SWEEP_SHORT);
}

/* The largest block that a scene has on its card. */
static size_t most_lost(const struct sweep_report *plain)
{
        return plain->total_bytes > 64 * MIB ? plain->total_bytes / 8 : 8 * MIB;
}

/* Small blocks share a page, of which what is cached is only a part. */
static size_t pages(size_t bytes)
{
        return (bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
}

/* Whether the fault may show as this error. */
static bool may_show(const struct fault *fault, const char *call, int code, bool twice)
{
        if (kills_contexts(fault))
                return code == fault->code;
        if (twice || !fault->code)
                return false;
        if (fault->driver && code == CUDA_ERROR_OUT_OF_MEMORY &&
            in_list(driver_symbols[fault->which], needed_for_memory))
                return true;
        if (fault->in->scene->helped && code == CUDA_ERROR_OUT_OF_MEMORY && strcmp(call, "cuMemAlloc_v2") == 0)
                return true;
        if (!fault->driver && fault->which == SWEEP_CALL_dlopen)
                return code == CUDA_ERROR_NOT_FOUND;
        if (fault->driver)
                return code == fault->code && (strcmp(call, driver_symbols[fault->which]) == 0 ||
                                               (strcmp(call, "cuMemAllocPitch_v2") == 0 &&
                                                strcmp(driver_symbols[fault->which], "cuMemAlloc_v2") == 0));
        return refuses_memory(fault->which) && code == CUDA_ERROR_OUT_OF_MEMORY;
}

/* Where the driver does not tell the context, a call goes to it unchanged, and in a capture it refuses the call. */
static bool breaks_capture(const struct fault *fault)
{
        return fault->driver && strcmp(driver_symbols[fault->which], "cuCtxGetCurrent") == 0 &&
               sweep_report->error_count > 0 && sweep_report->errors[0].code == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

/* Whether it came to the fault at all. */
static bool happened(const struct fault *fault, int status)
{
        if (!fault->driver)
                return atomic_load(&sweep_report->refused);
        return status != 0 || sweep_report->error_count > 0 || sweep_report->symbols[fault->which] >= fault->nth;
}

static bool has_bins(const struct sweep_case *sweep_case)
{
        return sweep_case->pool >= 0 && strcmp(pool_names[sweep_case->pool], "bins") == 0;
}

/* What is against the rule, in words, or false. */
static bool against_rule(const struct fault *fault, int status, char *why, size_t bytes)
{
        const struct sweep_report *report = sweep_report, *plain = &fault->in->plain;
        bool broken = breaks_capture(fault), dead = kills_contexts(fault) || broken;
        size_t lost = may_lose(fault) ? most_lost(plain) : 0;
        unsigned fewer = !(native || has_bins(fault->in)) ? 2 : lost > 0 ? 1 : 0;
        unsigned errors = report->error_count;

        for (unsigned i = 0; i < errors && i < SWEEP_ERRORS && !broken; i++)
                if (!may_show(fault, report->errors[i].call, report->errors[i].code, report->errors[i].twice) ||
                    (i > 0 && !dead)) {
                        snprintf(why, bytes, "%s returned %d%s", report->errors[i].call, report->errors[i].code,
                                 report->errors[i].twice ? " once more" : "");
                        return true;
                }
        if (status < 0)
                snprintf(why, bytes, "it did not end");
        else if (WIFSIGNALED(status))
                snprintf(why, bytes, "signal %d", WTERMSIG(status));
        else if (WEXITSTATUS(status) != 0 && !(dead && WEXITSTATUS(status) == GAVE_UP))
                snprintf(why, bytes, "exit status %d", WEXITSTATUS(status));
        else if (dead)
                return false;
        else if (report->wrong[0])
                snprintf(why, bytes, "%s", report->wrong);
        else if (!report->over)
                snprintf(why, bytes, "it ended too early");
        else if (report->unhelped && !fault->code)
                snprintf(why, bytes, "the other process did not help");
        else if (!fault->code)
                return false;
        else if (pages(report->free_bytes) + lost < pages(plain->free_bytes) ||
                 report->total_bytes != plain->total_bytes)
                snprintf(why, bytes, "told of %zu bytes free of %zu in the end, not %zu of %zu", report->free_bytes,
                         report->total_bytes, plain->free_bytes, plain->total_bytes);
        else if (report->blocks + fewer < plain->blocks)
                snprintf(why, bytes, "%u blocks can be had in the end, not %u", report->blocks, plain->blocks);
        else if (report->live_bytes > plain->live_bytes + lost)
                snprintf(why, bytes, "%llu bytes live in the end", (unsigned long long)report->live_bytes);
        else if (report->used_bytes > plain->used_bytes + lost)
                snprintf(why, bytes, "%zu bytes in use when the context has gone, not %zu", report->used_bytes,
                         plain->used_bytes);
        else if (report->lines != plain->lines && hinders_writing(fault))
                snprintf(why, bytes, "%u lines and entries in the library's files, not %u", report->lines,
                         plain->lines);
        else
                return false;
        return true;
}

static void show_said(void)
{
        char line[200];
        FILE *file = fopen(said, "r");

        for (int i = 0; file && i < 6 && fgets(line, sizeof(line), file); i++)
                printf("    %s%s", line, strchr(line, '\n') ? "" : "\n");
        if (file)
                fclose(file);
}

/* ---- the faults there are ---- */

static struct fault *faults;
static size_t fault_count, fault_room;

static void add(struct fault fault)
{
        if (fault_count == fault_room) {
                fault_room = fault_room ? 2 * fault_room : 4096;
                faults = realloc(faults, fault_room * sizeof(*faults));
                if (!faults)
                        die("realloc");
        }
        faults[fault_count++] = fault;
}

static const int *codes_of(const char *symbol)
{
        unsigned i = 0;

        while (strncmp(driver_codes[i].begin, symbol, strlen(driver_codes[i].begin)) != 0)
                i++;
        return driver_codes[i].codes;
}

static const int *errors_of(const char *function)
{
        unsigned i = 0;

        while (strcmp(function_errors[i].name, function) != 0)
                i++;
        return function_errors[i].errors;
}

static void add_all(struct sweep_case *in, bool driver, unsigned which, unsigned long calls)
{
        const int *codes = driver ? codes_of(driver_symbols[which]) : errors_of(function_names[which]);

        for (unsigned long nth = 1; nth <= calls; nth += 1 + nth / EACH_UNTIL * 4)
                for (unsigned i = 0; i < CODES_MOST && codes[i]; i++)
                        add((struct fault){in, driver, which, nth, codes[i]});
}

/* A scene without a fault; twice, as those with threads are not the same each time. */
static bool learn(struct sweep_case *sweep_case)
{
        struct fault none = {.in = sweep_case};
        char title[64], why[256];

        case_title(sweep_case, title, sizeof(title));
        for (int i = 0; i < 2; i++) {
                int status = run(&none, true);

                if (against_rule(&none, status, why, sizeof(why))) {
                        printf("FAILED: %s none: %s\n", title, why);
                        show_said();
                        return false;
                }
                for (unsigned j = 0; i && j < SWEEP_SYMBOLS; j++)
                        if (sweep_report->symbols[j] < sweep_case->plain.symbols[j])
                                sweep_report->symbols[j] = sweep_case->plain.symbols[j];
                for (unsigned j = 0; i && j < SWEEP_CALLS; j++)
                        if (sweep_report->calls[j] < sweep_case->plain.calls[j])
                                sweep_report->calls[j] = sweep_case->plain.calls[j];
                memcpy(&sweep_case->plain, sweep_report, sizeof(*sweep_report));
        }
        for (unsigned j = 0; j < SWEEP_SYMBOLS; j++)
                add_all(sweep_case, true, j, sweep_case->plain.symbols[j]);
        for (unsigned j = 0; j < SWEEP_CALLS && !native; j++)
                add_all(sweep_case, false, j, sweep_case->plain.calls[j]);
        return true;
}

/* Of all scenes, or of those whose names begin so. */
static void list_cases(const char *begin)
{
        for (size_t i = 0; i < sweep_scene_count; i++) {
                bool any_pool = sweep_scenes[i].any_pool && !native;

                if (strncmp(sweep_scenes[i].name, begin, strlen(begin)) != 0)
                        continue;

                for (int pool = 0; pool < (any_pool ? POOLS : 1); pool++) {
                        cases[case_count].scene = &sweep_scenes[i];
                        cases[case_count++].pool = any_pool ? pool : -1;
                }
        }
}

static uint64_t random_of(uint64_t *state)
{
        *state ^= *state << 13;
        *state ^= *state >> 7;
        return *state ^= *state << 17;
}

static void shuffle(uint64_t seed)
{
        for (size_t i = fault_count; i > 1; i--) {
                size_t j = random_of(&seed) % i;
                struct fault other = faults[j];

                faults[j] = faults[i - 1];
                faults[i - 1] = other;
        }
}

static bool parse_fault(const char *text, struct fault *ret)
{
        size_t length = strcspn(text, ":");

        if (strcmp(text, "none") == 0)
                return true;
        if (sscanf(text + length, ":%lu=%d", &ret->nth, &ret->code) != 2)
                return false;
        for (ret->which = 0; ret->which < SWEEP_SYMBOLS; ret->which++)
                if (strlen(driver_symbols[ret->which]) == length &&
                    strncmp(driver_symbols[ret->which], text, length) == 0) {
                        ret->driver = true;
                        return true;
                }
        for (ret->which = 0; ret->which < SWEEP_CALLS; ret->which++)
                if (strlen(function_names[ret->which]) == length &&
                    strncmp(function_names[ret->which], text, length) == 0)
                        return true;
        return false;
}

static struct sweep_case *case_named(const char *which)
{
        char title[64];

        for (unsigned i = 0; i < case_count; i++) {
                case_title(&cases[i], title, sizeof(title));
                if (strcmp(title, which) == 0)
                        return &cases[i];
        }
        return NULL;
}

static double seconds(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static double number_from(const char *variable, double otherwise)
{
        const char *value = getenv(variable);

        return value && *value ? strtod(value, NULL) : otherwise;
}

/* Of those that were found before the nth, in the nth place. */
static void put_first(size_t nth)
{
        struct fault other = faults[nth], found = {.in = case_named(found_before[nth].scene)};

        if (!found.in || !parse_fault(found_before[nth].fault, &found)) {
                fprintf(stderr, "sweep: no scene %s, or no fault %s\n", found_before[nth].scene,
                        found_before[nth].fault);
                exit(2);
        }
        add(other);
        faults[nth] = found;
}

/* Leaves only those where the library is refused memory of its own, in the first pool of each scene. */
static void keep_memory(void)
{
        size_t kept = 0;

        for (size_t i = 0; i < fault_count; i++)
                if (!faults[i].driver && faults[i].which <= SWEEP_CALL_aligned_alloc && faults[i].in->pool <= 0)
                        faults[kept++] = faults[i];
        fault_count = kept;
}

/* Leaves only the first call of each function of the driver, in the first scene that calls it. */
static void keep_first(void)
{
        const struct sweep_case *callers[SWEEP_SYMBOLS] = {0};
        size_t kept = 0;

        for (size_t i = 0; i < fault_count; i++) {
                const struct fault *fault = &faults[i];

                if (!fault->driver || fault->nth != 1)
                        continue;
                if (!callers[fault->which])
                        callers[fault->which] = fault->in;
                if (callers[fault->which] == fault->in)
                        faults[kept++] = *fault;
        }
        fault_count = kept;
}

/* keep: leaves only some of the faults; NULL: all are left. */
static int sweep(bool all, void (*keep)(void), const char *scenes)
{
        double begin = seconds(), most = number_from("GR_TEST_SECONDS", 45);
        uint64_t seed = (uint64_t)number_from("GR_TEST_SEED", (double)(time(NULL) % 1000000 + 1));
        const char *part_text = getenv("GR_TEST_PART");
        unsigned long done = 0, failed = 0, missed = 0;
        unsigned part = 1, parts = 1;

        if (part_text && (sscanf(part_text, "%u/%u", &part, &parts) != 2 || part < 1 || part > parts)) {
                fprintf(stderr, "sweep: GR_TEST_PART is not like 2/4\n");
                return 2;
        }
        list_cases(scenes);
        for (unsigned i = 0; i < case_count; i++)
                failed += !learn(&cases[i]);
        if (keep)
                keep();
        if (!all) {
                printf("seed %llu\n", (unsigned long long)seed);
                shuffle(seed ? seed : 1);
                for (size_t i = 0; i < FOUND_BEFORE && !native; i++)
                        put_first(i);
        }
        for (size_t i = 0; i < fault_count && (all || i < FOUND_BEFORE || seconds() - begin < most); i++) {
                char title[64], plan[96], why[256];
                int status;

                if (all && i % parts != part - 1)
                        continue;
                status = run(&faults[i], true);
                if (!happened(&faults[i], status)) {
                        missed++;
                        continue;
                }
                done++;
                if (!against_rule(&faults[i], status, why, sizeof(why)))
                        continue;
                failed++;
                case_title(faults[i].in, title, sizeof(title));
                fault_title(&faults[i], plan, sizeof(plan));
                printf("FAILED: %s %s: %s\n", title, plan, why);
                show_said();
                fflush(stdout);
        }
        printf("%lu faults injected of %zu there are, in %u scenes, %lu that did not come up; %lu failures\n", done,
               fault_count, case_count, missed, failed);
        return failed > 0;
}

/* ---- one ---- */

static int one(const char *which, const char *text, bool judged)
{
        struct fault fault = {0};
        char why[256];
        int status;

        list_cases("");
        fault.in = case_named(which);
        if (!fault.in || !parse_fault(text, &fault)) {
                fprintf(stderr, "sweep: no such scene or fault\n");
                return 2;
        }
        if (!judged)
                run_scene(&fault);
        if (!learn(fault.in))
                return 1;
        status = run(&fault, false);
        printf("injected: %s\n", happened(&fault, status) ? "yes" : "no");
        for (unsigned i = 0; i < sweep_report->error_count && i < SWEEP_ERRORS; i++)
                printf("%s returned %d%s\n", sweep_report->errors[i].call, sweep_report->errors[i].code,
                       sweep_report->errors[i].twice ? " once more" : "");
        printf("free %zu of %zu, %u blocks, %llu live, then %zu in use\n", sweep_report->free_bytes,
               sweep_report->total_bytes, sweep_report->blocks, (unsigned long long)sweep_report->live_bytes,
               sweep_report->used_bytes);
        if (against_rule(&fault, status, why, sizeof(why))) {
                printf("FAILED: %s\n", why);
                return 1;
        }
        return 0;
}

static int list(void)
{
        size_t before = 0;
        int failed = 0;

        list_cases("");
        for (unsigned i = 0; i < case_count; i++) {
                char title[64];
                double begin = seconds();

                case_title(&cases[i], title, sizeof(title));
                failed += !learn(&cases[i]);
                printf("%s: %zu faults, %.1f ms\n", title, fault_count - before, (seconds() - begin) * 500);
                before = fault_count;
        }
        printf("%zu faults\n", fault_count);
        return failed > 0;
}

int main(int argc, char **argv)
{
        struct rlimit no_core = {0, 0};
        int i = 1, rc;

        native = argc > i && strcmp(argv[i], "native") == 0;
        i += native;
        sweep_report = mmap(NULL, sizeof(*sweep_report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (sweep_report == MAP_FAILED)
                die("mmap");
        sweep_find_library();
        if (sweep_has_library() == native) {
                fprintf(stderr, "sweep: the library is %s\n", native ? "loaded" : "not loaded");
                return 2;
        }
        snprintf(folder, sizeof(folder), "%s/sweep-XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
        if (!mkdtemp(folder))
                die("mkdtemp");
        snprintf(said, sizeof(said), "%s.txt", folder);
        setrlimit(RLIMIT_CORE, &no_core);
        setvbuf(stdout, NULL, _IOLBF, 0);
        if (argc == i)
                rc = sweep(false, NULL, "");
        else if (strcmp(argv[i], "all") == 0)
                rc = sweep(true, NULL, argc > i + 1 ? argv[i + 1] : "");
        else if (strcmp(argv[i], "memory") == 0)
                rc = sweep(true, keep_memory, "");
        else if (strcmp(argv[i], "first") == 0)
                rc = sweep(true, keep_first, "");
        else if (strcmp(argv[i], "list") == 0)
                rc = list();
        else if (argc == i + 3 && (strcmp(argv[i], "one") == 0 || strcmp(argv[i], "just") == 0))
                rc = one(argv[i + 1], argv[i + 2], argv[i][0] == 'o');
        else
                rc = 2;
        rmdir(folder);
        unlink(said);
        return rc;
}
