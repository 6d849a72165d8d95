/*
 * What NVML answers about the card's memory inside the process, through every door: dlopen and dlsym, the symbol of a
 * program that links it, RTLD_DEFAULT.
 *
 *   nvml_views errors                              one line per question, the same natively and under the library
 *   GPURECLAIM_NVML=1 ... nvml_views share --limit=1GiB    the share, as cuMemGetInfo tells it
 *   nvml_views true --limit=1GiB                   without that option: the card, whatever the limit
 *   GPURECLAIM_NVML=1 ... nvml_views old --limit=1GiB      of an NVML that lacks the second form of the call
 *
 * --device=N takes another of CUDA's devices, --card=N NVML's card of that number, whichever CUDA shows, --no-cuda
 * looks only before CUDA is there, where --taken=SIZE of the share is in use by the group. --context=SIZE counts
 * against the share with a context. --beside asks from a second process, without CUDA, as well. Skipped where there is
 * no NVML. Exit status 1 when a check failed.
 */
#include "gputest.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* NVML's own layouts; its header is not part of every toolkit. */
struct memory {
        unsigned long long total, free, used;
};
struct memory_v2 {
        unsigned version;
        unsigned long long total, reserved, free, used;
};
enum { VERSION_2 = sizeof(struct memory_v2) | 2 << 24, UUID_BYTES = 96, WHOLE_CARD = 100 };

/* As a program that is linked with NVML has them; NULL in one that is not, unless somebody preloaded exports them. */
int nvmlDeviceGetMemoryInfo(void *, struct memory *) __attribute__((weak));
int nvmlDeviceGetMemoryInfo_v2(void *, struct memory_v2 *) __attribute__((weak));

typedef int memory_function(void *, struct memory *);
typedef int memory_v2_function(void *, struct memory_v2 *);

static void *library;
static void *card; /* NVML's handle */
static size_t limit, taken, context_bytes;
static const char *beside;           /* this program, to be run in a second process; NULL: not */
static int device, wanted_card = -1; /* wanted_card: -1: that of CUDA's device */

static void look_up(void *where, const char *name, void *ret_function)
{
        void *found = dlsym(where, name);

        memcpy(ret_function, &found, sizeof found);
}

static int start(void)
{
        int (*init)(void);

        look_up(library, "nvmlInit_v2", &init);
        return init ? init() : -1;
}

static int stop(void)
{
        int (*shutdown)(void);

        look_up(library, "nvmlShutdown", &shutdown);
        return shutdown ? shutdown() : -1;
}

/* The first that CUDA will show, which is why one is to be made visible where there are several. */
static void find_card_early(void)
{
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        int (*by_index)(unsigned, void **);
        int (*by_uuid)(const char *, void **);

        look_up(library, "nvmlDeviceGetHandleByIndex_v2", &by_index);
        look_up(library, "nvmlDeviceGetHandleByUUID", &by_uuid);
        if (wanted_card >= 0) {
                if (by_index((unsigned)wanted_card, &card) != 0)
                        gt_die("nvml_views: NVML has no card %d", wanted_card);
                return;
        }
        if (visible && (*visible < '0' || *visible > '9') ? by_uuid(visible, &card) != 0
                                                          : by_index(visible ? (unsigned)atoi(visible) : 0, &card) != 0)
                gt_die("nvml_views: NVML has no card");
}

/*
 * NVML's result in a child of a fork, which has no CUDA of its own and is told no share, so WHOLE_CARD where that is
 * more; -1 where it did not live to tell. The child has to start NVML anew.
 */
static int ask_in_child(void)
{
        struct memory first = {0};
        memory_function *get;
        int status = 0;
        pid_t pid;

        look_up(library, "nvmlDeviceGetMemoryInfo", &get);
        fflush(stdout);
        pid = fork();
        if (pid == 0) {
                status = start();
                if (status == 0) {
                        find_card_early();
                        status = get(card, &first);
                }
                _exit(status == 0 && limit && first.total > limit ? WHOLE_CARD : status);
        }
        return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void say_error(void)
{
        char *error = dlerror();

        printf(", error %s\n", !error ? "none" : strstr(error, "nvml") ? "that names it" : "of another kind");
}

static void errors(void)
{
        int (*by_index)(unsigned, void **);
        struct memory_v2 second = {.version = VERSION_2};
        memory_v2_function *get_v2;
        struct memory first;
        memory_function *get;

        look_up(library, "nvmlDeviceGetMemoryInfo", &get);
        look_up(library, "nvmlDeviceGetMemoryInfo_v2", &get_v2);
        look_up(library, "nvmlDeviceGetHandleByIndex_v2", &by_index);
        printf("found: %d %d %d", get != NULL, get_v2 != NULL, by_index != NULL);
        say_error();
        printf("not in a library that is not NVML: %d", dlsym(dlopen("libc.so.6", RTLD_NOW), "nvmlInit_v2") != NULL);
        say_error();
        printf("not there at all: %d", dlsym(library, "nvmlNoSuchFunction") != NULL);
        say_error();
        printf("everywhere: %d", dlsym(RTLD_DEFAULT, "nvmlDeviceGetMemoryInfo") != NULL);
        say_error();
        /* What a preloaded library exports is there for all who go on to the next. */
        printf("~ next: %d", dlsym(RTLD_NEXT, "nvmlDeviceGetMemoryInfo") != NULL);
        say_error();
        for (const char *name = "nvmlD"; *name; name++)
                printf("%s %d", name, dlsym(library, name) != NULL), say_error();
        printf("n %d nv %d nvm %d nvml %d nvmm %d", dlsym(library, "n") != NULL, dlsym(library, "nv") != NULL,
               dlsym(library, "nvm") != NULL, dlsym(library, "nvml") != NULL, dlsym(library, "nvmm") != NULL);
        dlerror();
        printf("\nbefore it is initialised: %d %d\n", get(NULL, &first), get_v2(NULL, &second));
        printf("initialised: %d, a card %d\n", start(), by_index(0, &card));
        printf("figures: %d %d\n", get(card, &first), get_v2(card, &second));
        printf("in a child: %d\n", ask_in_child());
        printf("nowhere to put them: %d %d\n", get(card, NULL), get_v2(card, NULL));
        printf("no card: %d %d\n", get(NULL, &first), get_v2(NULL, &second));
        for (unsigned version = 0; version < 4; version++) {
                second = (struct memory_v2){.version = version << 24 | (version ? sizeof second : 0)};
                printf("version %u: %d", version, get_v2(card, &second));
                printf(", %x\n", second.version);
        }
        printf("ended: %d", stop());
        printf(", then %d %d\n", get(card, &first), get_v2(card, &second));
}

/* The handle of the device, by its UUID. */
static void find_card(void)
{
        int (*by_uuid)(const char *, void **);
        char text[UUID_BYTES] = "GPU-";
        size_t at = 4;
        CUuuid uuid;

        if (wanted_card >= 0)
                return;
        GR_MUST(cuDeviceGetUuid(&uuid, device));
        for (size_t i = 0; i < sizeof uuid.bytes; i++)
                at += (size_t)snprintf(text + at, sizeof text - at, "%s%02x",
                                       i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", (unsigned char)uuid.bytes[i]);
        look_up(library, "nvmlDeviceGetHandleByUUID", &by_uuid);
        if (!by_uuid || by_uuid(text, &card) != 0)
                gt_die("nvml_views: NVML does not know %s", text);
}

struct doors {
        const char *name;
        memory_function *first;
        memory_v2_function *second;
};

/* One check for each door that is there; all are to say the same. */
static void check(const char *when, bool shared, size_t want_free, size_t slack_bytes)
{
        bool simulated = dlsym(RTLD_DEFAULT, "grSimVersion") != NULL; /* what NVML does on a card is its own affair */
        struct doors doors[3] = {{"dlsym", NULL, NULL},
                                 {"linked", nvmlDeviceGetMemoryInfo, nvmlDeviceGetMemoryInfo_v2},
                                 {"everywhere", NULL, NULL}};

        look_up(library, "nvmlDeviceGetMemoryInfo", &doors[0].first);
        look_up(library, "nvmlDeviceGetMemoryInfo_v2", &doors[0].second);
        look_up(RTLD_DEFAULT, "nvmlDeviceGetMemoryInfo", &doors[2].first);
        look_up(RTLD_DEFAULT, "nvmlDeviceGetMemoryInfo_v2", &doors[2].second);
        for (int i = 0; i < 3; i++) {
                struct memory_v2 second = {.version = VERSION_2};
                struct memory first = {0};
                char name[128];

                if (!doors[i].first || !doors[i].second)
                        continue;
                snprintf(name, sizeof name, "%s, %s", when, doors[i].name);
                errno = EXDEV;
                if (doors[i].first(card, &first) != 0 || doors[i].second(card, &second) != 0)
                        gt_die("nvml_views: %s: NVML refuses", name);
                gt_check(!simulated || errno == EXDEV, name, "errno as before");
                gt_check(first.total == second.total && second.version == VERSION_2 &&
                                 first.free + first.used == first.total &&
                                 second.free + second.used + second.reserved == second.total,
                         name, "%.1f MiB free, %.1f used, %.1f reserved of %.1f", gt_mib(second.free),
                         gt_mib(second.used), gt_mib(second.reserved), gt_mib(second.total));
                if (!shared) {
                        gt_check(first.total > limit && second.reserved <= first.used &&
                                         (second.reserved > 0 || !simulated),
                                 name, "the card's");
                        continue;
                }
                gt_check(first.total == limit && second.reserved == 0 && first.free == second.free, name, "the share");
                gt_check(first.free <= want_free + slack_bytes && first.free + slack_bytes >= want_free, name,
                         "%.1f MiB free, expected %.1f", gt_mib(first.free), gt_mib(want_free));
        }
}

/* As CUDA has it now; they are to agree to the byte where the limit bounds them, as it does on a card with room. */
static void check_as_cuda(const char *when, bool shared)
{
        size_t free_bytes, total_bytes;

        if (!shared) {
                check(when, false, 0, 0);
                return;
        }
        GR_MUST(cuMemGetInfo(&free_bytes, &total_bytes));
        gt_check(total_bytes == limit, when, "cuMemGetInfo: %.1f MiB free", gt_mib(free_bytes));
        check(when, shared, free_bytes, 0);
}

/* What is not there nobody finds, and whoever has it from elsewhere is told so. */
static void without_second_form(void)
{
        enum { FUNCTION_NOT_FOUND = 13 };
        struct memory_v2 second = {.version = VERSION_2};
        struct memory first = {0};
        memory_v2_function *found;
        memory_function *get;

        look_up(library, "nvmlDeviceGetMemoryInfo", &get);
        look_up(library, "nvmlDeviceGetMemoryInfo_v2", &found);
        gt_check(get && !found, "an old library", "has one form of the call");
        find_card_early();
        if (!get || get(card, &first) != 0)
                gt_die("nvml_views: NVML refuses");
        gt_check(first.total > limit, "an old library", "before CUDA it does not say which card it is");
        GR_MUST(cuInit(0));
        if (get(card, &first) != 0)
                gt_die("nvml_views: NVML refuses");
        gt_check(first.total == limit && first.free + first.used == limit, "an old library", "the share");
        gt_check(nvmlDeviceGetMemoryInfo_v2 && nvmlDeviceGetMemoryInfo_v2(card, &second) == FUNCTION_NOT_FOUND &&
                         second.version == VERSION_2 && second.total == 0,
                 "an old library", "the other form says that it is not there");
}

/* Before NVML is there at all, for a program that has our functions from us. */
static void before_library(void)
{
        struct memory_v2 second = {.version = VERSION_2};
        struct memory first = {0};

        if (nvmlDeviceGetMemoryInfo && nvmlDeviceGetMemoryInfo_v2)
                gt_check(nvmlDeviceGetMemoryInfo(NULL, &first) != 0 && nvmlDeviceGetMemoryInfo_v2(NULL, &second) != 0,
                         "before NVML is loaded", "each form refuses");
}

/* Another process of the group, which has no CUDA: how much of the share bytes of ours leave. */
/* It sees what this one has taken, unless it shares no memory with others. */
static void check_beside(size_t bytes, const char *neighbour)
{
        char limit_text[64], taken_text[64];
        int status = -1;
        pid_t pid;

        snprintf(limit_text, sizeof limit_text, "--limit=%zu", limit);
        snprintf(taken_text, sizeof taken_text, "--taken=%zu", bytes);
        fflush(stdout);
        pid = fork();
        if (pid == 0) {
                setenv("GPURECLAIM_NEIGHBOUR", neighbour, 1);
                execl(beside, beside, "share", limit_text, taken_text, "--no-cuda", (char *)NULL);
                _exit(127);
        }
        if (pid > 0)
                waitpid(pid, &status, 0);
        gt_check(status == 0, "a process beside", "neighbours %s: status %d", neighbour, status);
}

static void with_cuda(bool shared)
{
        CUcontext context, popped;
        CUdeviceptr p, piece;
        int in_child;

        GR_MUST(cuInit(0));
        find_card();
        check("CUDA initialised", shared, limit, 0);
        GR_MUST(cuDevicePrimaryCtxRetain(&context, device));
        GR_MUST(cuCtxPushCurrent(context));
        check_as_cuda("a context", shared);
        GR_MUST(cuMemAlloc(&p, limit / 4));
        check_as_cuda("a quarter taken", shared);
        check("a quarter taken", shared, limit / 4 * 3 - context_bytes, 4 * MIB);
        if (beside) {
                check_beside(limit / 4, "1");
                check_beside(0, "0");
        }
        GR_MUST(cuMemAlloc(&piece, 2 * MIB)); /* cached then, which a process beside would see */
        GR_MUST(cuMemFree(piece));
        check("a piece taken and freed", shared, limit / 4 * 3 - context_bytes,
              4 * MIB); /* CUDA was not asked before */
        GR_MUST(cuMemFree(p));
        check_as_cuda("freed", shared);
        GR_MUST(cuMemAllocAsync(&p, limit / 2, NULL));
        check_as_cuda("half taken in stream order", shared);
        check("half taken in stream order", shared, limit / 2 - context_bytes, 64 * MIB);
        GR_MUST(cuMemFreeAsync(p, NULL));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuCtxPopCurrent(&popped));
        check("no context is current", shared, limit - context_bytes, 64 * MIB);
        in_child = ask_in_child();
        gt_check(in_child == WHOLE_CARD, "a child of a fork", "is told of the whole card: %d", in_child);
        GR_MUST(cuDevicePrimaryCtxRelease(device));
}

int main(int argc, char **argv)
{
        bool no_cuda = false, is_beside = false, shared, only_errors, old;
        const char *which;
        int mode;

        mode = GT_OPTIONS(argc, argv,
                          "errors | share|true|old --limit=SIZE [--device=N] [--card=N] [--no-cuda] [--taken=SIZE] "
                          "[--context=SIZE] [--beside]",
                          GT_OPTION("limit", limit), GT_OPTION("device", device), GT_OPTION("card", wanted_card),
                          GT_OPTION("taken", taken), GT_OPTION("context", context_bytes), GT_OPTION("no-cuda", no_cuda),
                          GT_OPTION("beside", is_beside));
        which = mode < argc ? argv[mode] : "";
        beside = is_beside ? argv[0] : NULL;
        shared = !strcmp(which, "share");
        only_errors = !strcmp(which, "errors");
        old = !strcmp(which, "old");
        if (!only_errors && (!limit || (!shared && !old && strcmp(which, "true") != 0)))
                gt_die("which mode, and which limit?");
        if (shared)
                before_library();
        library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
        if (!library) {
                printf("skipped: no NVML\n");
                return GT_SKIPPED;
        }
        dlerror();
        if (only_errors) {
                errors();
                return EXIT_SUCCESS;
        }
        if (start() != 0) {
                printf("skipped: NVML does not start\n");
                return GT_SKIPPED;
        }
        if (old) {
                without_second_form();
                return GR_CHECK_RESULT();
        }
        if (device == 0 || wanted_card >= 0) {
                find_card_early();
                check("before CUDA", shared, limit - taken, 0);
        }
        if (!no_cuda)
                with_cuda(shared);
        return GR_CHECK_RESULT();
}
