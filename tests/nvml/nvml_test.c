/*
 * What this project asks NVML, against a library that is told what to have and to answer: missing functions, cards by
 * all their names, lists of processes of every length. Each case is a process of its own, as NVML is looked for once.
 */
#include "driver/nvml.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "driver/dlsym.h"

#define INSUFFICIENT 7
#define UNKNOWN      999
#define NO_FIGURE    ~0ull
#define ROOM         64 /* for so many processes is asked first */
#define BY_INDEX     11 /* cards */
#define OWN_PID      4711
#define UNTOUCHED    0x1234
#define ALWAYS       ~0u /* beyond what the next question has room for */

struct process {
        unsigned pid;
        unsigned long long used;
        unsigned instances[2];
};

/* What the library is. */
static bool there = true, starts = true, refuses_memory, no_memory;
static const char *missing[2];
static const char *const cards[] = {
        "GPU-00000000-1111-2222-3333-444444444444",
        NULL, /* nobody can tell */
        "MIG-55555555-1111-2222-3333-666666666666",
        "GPU-short",
        "GPU-a",
        "GPU-b",
        "GPU-c",
        "GPU-d",
        "GPU-88888888-1111-2222-3333-99999999999", /* one character less than there are */
        "GPU-99999999-1111-2222-3333-999999999999",
        "GPU-aaaaaaaa-1111-2222-3333-aaaaaaaaaaaa",
        "MIG-bbbbbbbb-1111-2222-3333-bbbbbbbbbbbb", /* by this name alone */
};
static struct process *listed; /* NULL: as many as there are, of nobody in particular */
static unsigned listed_count, grows_by;
static int list_error;
static unsigned opened, asked; /* how often */
static unsigned list_version;

void *__wrap_dlopen(const char *name, int flags);
void *__wrap_calloc(size_t count, size_t bytes);
void *__real_calloc(size_t count, size_t bytes);

void *__wrap_dlopen(const char *name, int flags)
{
        GR_CHECK_STR(name, GR_NVML_LIBRARY);
        opened++;
        (void)flags;
        errno = EIO;
        return there ? &there : NULL;
}

void *__wrap_calloc(size_t count, size_t bytes)
{
        return no_memory ? NULL : __real_calloc(count, bytes);
}

static void *card(int index)
{
        return (void *)&cards[index];
}

static int init(void)
{
        return starts ? 0 : UNKNOWN;
}

/* Of the greatest number there is one, which no index stands for. */
static int by_index(unsigned index, void **ret)
{
        if (index >= BY_INDEX && index != UINT_MAX)
                return 2;
        *ret = (void *)&cards[index == UINT_MAX ? 0 : index];
        return 0;
}

static int by_uuid(const char *uuid, void **ret)
{
        for (size_t i = 0; i < sizeof(cards) / sizeof(cards[0]); i++)
                if (cards[i] && strcmp(cards[i], uuid) == 0) {
                        *ret = (void *)&cards[i];
                        return 0;
                }
        return 1;
}

static int uuid_of(void *device, char *ret, unsigned length)
{
        const char *uuid = *(const char *const *)device;

        if (!uuid || strlen(uuid) >= length)
                return UNKNOWN;
        strcpy(ret, uuid);
        return 0;
}

static int model_of(void *device, char *ret, unsigned length)
{
        (void)device;
        snprintf(ret, length, "a model");
        return refuses_memory ? UNKNOWN : 0;
}

static int memory_of(void *device, struct gr_nvml_memory *ret)
{
        (void)device;
        *ret = (struct gr_nvml_memory){3, 1, 2};
        return refuses_memory ? UNKNOWN : 0;
}

static int list(unsigned version, unsigned *count, struct process *ret)
{
        unsigned room = *count;

        asked++;
        list_version = version;
        *count = listed_count;
        if (list_error)
                return list_error;
        if (room < listed_count) {
                listed_count += grows_by == ALWAYS ? listed_count + 1 : grows_by;
                return INSUFFICIENT;
        }
        for (unsigned i = 0; i < listed_count; i++)
                ret[i] = listed ? listed[i] : (struct process){.pid = i + 1, .used = 100 * i};
        return 0;
}

static int list_v2(void *device, unsigned *count, struct process *ret)
{
        (void)device;
        return list(2, count, ret);
}

static int list_v3(void *device, unsigned *count, struct process *ret)
{
        (void)device;
        return list(3, count, ret);
}

static const struct {
        const char *name;
        void *function;
        bool needed;
} functions[] = {
        {"nvmlInit_v2", (void *)init, true},
        {"nvmlDeviceGetHandleByUUID", (void *)by_uuid, true},
        {"nvmlDeviceGetHandleByIndex_v2", (void *)by_index, true},
        {"nvmlDeviceGetUUID", (void *)uuid_of, true},
        {"nvmlDeviceGetMemoryInfo", (void *)memory_of, true},
        {"nvmlDeviceGetComputeRunningProcesses_v3", (void *)list_v3, false},
        {"nvmlDeviceGetComputeRunningProcesses_v2", (void *)list_v2, false},
        {"nvmlDeviceGetName", (void *)model_of, false},
};

#define FUNCTIONS (sizeof(functions) / sizeof(functions[0]))

void *gr_real_symbol(void *library, const char *name)
{
        GR_CHECK(library == &there);
        for (size_t i = 0; i < FUNCTIONS; i++)
                if (strcmp(functions[i].name, name) == 0 && missing[0] != functions[i].name &&
                    missing[1] != functions[i].name)
                        return functions[i].function;
        return dlsym(RTLD_DEFAULT, "nvmlNoSuchFunction"); /* which leaves an error */
}

static void *untouched(void)
{
        return (void *)UNTOUCHED;
}

/* Nothing is asked of a library that is not there or lacks what is needed. */
static void not_there(void)
{
        struct gr_nvml_memory memory = {7, 7, 7};
        struct gr_nvml_use *uses = untouched();
        void *device = untouched();
        uint64_t bytes = UNTOUCHED;
        size_t count = UNTOUCHED;
        char uuid[37] = "?";

        for (int i = 0; i < 2; i++) {
                errno = EXDEV;
                GR_CHECK(!gr_nvml_find());
                GR_CHECK_EQ(errno, EXDEV);
        }
        GR_CHECK(!dlerror());
        GR_CHECK_EQ(opened, 1);
        GR_CHECK_EQ(gr_nvml_device("00000000-1111-2222-3333-444444444444", &device), -ENOTSUP);
        GR_CHECK_EQ(gr_nvml_device_named("0", &device, uuid), -ENOTSUP);
        GR_CHECK_EQ(gr_nvml_memory(card(0), &memory), -ENOTSUP);
        GR_CHECK_EQ(gr_nvml_model(card(0), uuid, sizeof(uuid)), -ENOTSUP);
        GR_CHECK_EQ(gr_nvml_processes(card(0), &uses, &count), -ENOTSUP);
        GR_CHECK_EQ(gr_nvml_process(card(0), OWN_PID, &bytes), -ENOTSUP);
        GR_CHECK(device == untouched() && uses == untouched() && count == UNTOUCHED && bytes == UNTOUCHED &&
                 memory.total == 7 && uuid[0] == '?');
}

static void no_library(void)
{
        there = false;
        not_there();
}

static void does_not_start(void)
{
        starts = false;
        not_there();
}

/* A refused call changes nothing. */
static void cards_by_name(void)
{
        static const struct {
                const char *name;
                int card; /* -1: none */
        } names[] = {
                {"0", 0},
                {"2", 2},
                {"00", 0},
                {"4", -1},
                {"4294967295", -1},
                {"4294967296", -1},
                {"1", -1},
                {"3", -1},
                {"0x", -1},
                {"0 ", -1},
                {"", -1},
                {"-1", -1},
                {"GPU-", 0},
                {"MIG-5", 2},
                {"G", 0},
                {"MIG", 2},
                {"GPU-s", -1},
                {"gpu-", -1},
                {"9", 9},
                {"10", 10},
                {"11", -1},
                {"8", -1},
                {"GPU-8", -1},
                {"GPU-aa", 10},
                {"MIG-b", -1},
                {"MIG-bbbbbbbb-1111-2222-3333-bbbbbbbbbbbb", 11},
                {"GPU-00000001", -1},
                {"/", -1},
                {":", -1},
                {"0GPU", -1},
        };
        struct gr_nvml_memory memory;
        void *device = untouched();
        char uuid[37], model[5];

        errno = EXDEV;
        GR_CHECK(gr_nvml_find() && gr_nvml_find());
        GR_CHECK_EQ(opened, 1);
        GR_CHECK_EQ(errno, EXDEV);
        GR_CHECK_EQ(gr_nvml_device("00000000-1111-2222-3333-444444444445", &device), -ENODEV);
        GR_CHECK(device == untouched());
        GR_CHECK_EQ(gr_nvml_device("00000000-1111-2222-3333-444444444444", &device), 0);
        GR_CHECK(device == card(0));
        GR_CHECK_EQ(gr_nvml_device("55555555-1111-2222-3333-666666666666", &device), 0);
        GR_CHECK(device == card(2));
        for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
                int expected = names[i].card;
                int rc;

                device = untouched();
                strcpy(uuid, "?");
                rc = gr_nvml_device_named(names[i].name, &device, uuid);
                if (rc != (expected < 0 ? -ENODEV : 0) || device != (expected < 0 ? untouched() : card(expected))) {
                        fprintf(stderr, "card \"%s\": %d\n", names[i].name, rc);
                        gr_check_failures++;
                }
                GR_CHECK_STR(uuid, expected < 0 ? "?" : cards[expected] + 4);
        }
        GR_CHECK_EQ(gr_nvml_device_named(cards[2], &device, uuid), 0);
        GR_CHECK(device == card(2));
        GR_CHECK_EQ(gr_nvml_memory(device, &memory), 0);
        GR_CHECK(memory.total == 3 && memory.free == 1 && memory.used == 2);
        GR_CHECK_EQ(gr_nvml_model(device, model, sizeof(model)), 0);
        GR_CHECK_STR(model, "a mo");
        refuses_memory = true;
        memory.total = 7;
        GR_CHECK_EQ(gr_nvml_memory(device, &memory), -ENOTSUP);
        GR_CHECK_EQ(gr_nvml_model(device, model, sizeof(model)), -ENOTSUP);
        GR_CHECK_EQ(memory.total, 7);
}

/* count of them, of which none is lost or made up. */
static void list_of(unsigned count)
{
        struct gr_nvml_use *uses = untouched();
        uint64_t bytes = UNTOUCHED;
        size_t got = UNTOUCHED;

        listed_count = count;
        GR_CHECK_EQ(gr_nvml_processes(card(0), &uses, &got), 0);
        GR_CHECK_EQ(got, listed_count);
        GR_CHECK((got == 0) == (uses == NULL));
        for (size_t i = 0; i < got && got == listed_count; i++)
                GR_CHECK(uses[i].pid == i + 1 && uses[i].bytes == 100 * i);
        if (uses)
                free(uses);
        listed_count = count;
        GR_CHECK_EQ(gr_nvml_process(card(0), 0, &bytes), -ESRCH);
        GR_CHECK_EQ(bytes, UNTOUCHED);
        listed_count = count;
        GR_CHECK_EQ(gr_nvml_process(card(0), count, &bytes), count ? 0 : -ESRCH);
        GR_CHECK_EQ(bytes, count ? 100 * (count - 1) : UNTOUCHED);
}

static void lists(void)
{
        struct process ours[] = {
                {1, 5, {0}}, {OWN_PID, NO_FIGURE, {0}}, {OWN_PID, 0, {0}}, {OWN_PID, 80, {0}}, {2, NO_FIGURE, {0}}};
        struct gr_nvml_use *uses = untouched();
        uint64_t bytes = UNTOUCHED;
        size_t count = UNTOUCHED, before;

        for (unsigned i = 0; i <= ROOM + 2; i++)
                list_of(i);
        GR_CHECK_EQ(list_version, 3);
        list_of(1000);

        /* More of them at each question: it is asked a few times. */
        grows_by = 1;
        list_of(ROOM + 1);
        grows_by = 1000;
        listed_count = 1000;
        GR_CHECK_EQ(gr_nvml_processes(card(0), &uses, &count), 0);
        GR_CHECK_EQ(count, listed_count);
        free(uses);
        uses = untouched();
        count = UNTOUCHED;
        grows_by = ALWAYS;
        listed_count = 1000;
        asked = 0;
        GR_CHECK_EQ(gr_nvml_processes(card(0), &uses, &count), -ENOTSUP);
        GR_CHECK_EQ(asked, 5);
        listed_count = 1000;
        GR_CHECK_EQ(gr_nvml_process(card(0), 1, &bytes), -ENOTSUP);
        grows_by = 0;
        list_error = UNKNOWN;
        GR_CHECK_EQ(gr_nvml_processes(card(0), &uses, &count), -ENOTSUP);
        GR_CHECK_EQ(gr_nvml_process(card(0), 1, &bytes), -ENOTSUP);
        list_error = INSUFFICIENT; /* whatever it is given */
        GR_CHECK_EQ(gr_nvml_process(card(0), 1, &bytes), -ENOTSUP);
        list_error = 0;
        no_memory = true;
        listed_count = ROOM + 1;
        GR_CHECK_EQ(gr_nvml_processes(card(0), &uses, &count), -ENOMEM);
        GR_CHECK_EQ(gr_nvml_process(card(0), 1, &bytes), -ENOMEM);
        listed_count = 1;
        GR_CHECK_EQ(gr_nvml_processes(card(0), &uses, &count), -ENOMEM);
        GR_CHECK_EQ(gr_nvml_process(card(0), 1, &bytes), 0);
        GR_CHECK_EQ(bytes, 0);
        bytes = UNTOUCHED;
        no_memory = false;
        GR_CHECK(uses == untouched() && count == UNTOUCHED);

        /* The first entry with a figure is taken. */
        listed = ours;
        listed_count = 5;
        GR_CHECK_EQ(gr_nvml_process(card(0), OWN_PID, &bytes), 0);
        GR_CHECK_EQ(bytes, 0);
        bytes = UNTOUCHED;
        GR_CHECK_EQ(gr_nvml_process(card(0), 2, &bytes), -ESRCH);
        GR_CHECK_EQ(bytes, UNTOUCHED);
        GR_CHECK_EQ(gr_nvml_processes(card(0), &uses, &count), 0);
        GR_CHECK(count == 5 && uses[0].bytes == 5 && uses[1].bytes == UINT64_MAX && uses[3].bytes == 80);
        free(uses);
        listed = NULL;

        /* Nothing of it stays allocated. */
        before = mallinfo2().uordblks;
        for (int i = 0; i < 20; i++) {
                list_of(1000);
                grows_by = ALWAYS;
                listed_count = 1000;
                gr_nvml_process(card(0), 1, &bytes);
                grows_by = 0;
        }
        GR_CHECK(mallinfo2().uordblks < before + 8192);
}

static void second_version(void)
{
        missing[0] = functions[5].name;
        list_of(3);
        GR_CHECK_EQ(list_version, 2);
}

static void no_lists(void)
{
        struct gr_nvml_memory memory;
        struct gr_nvml_use *uses;
        uint64_t bytes;
        size_t count;

        missing[0] = functions[5].name;
        missing[1] = functions[6].name;
        GR_CHECK(gr_nvml_find());
        GR_CHECK(!dlerror());
        GR_CHECK_EQ(gr_nvml_processes(card(0), &uses, &count), -ENOTSUP);
        GR_CHECK_EQ(gr_nvml_process(card(0), 1, &bytes), -ENOTSUP);
        GR_CHECK_EQ(gr_nvml_memory(card(0), &memory), 0);
}

static void in_a_process(const char *name, void (*run)(void))
{
        int status = -1;
        pid_t pid = fork();

        if (pid == 0) {
                gr_check_failures = 0;
                run();
                fflush(stderr);
                _exit(GR_CHECK_RESULT());
        }
        if (pid > 0)
                waitpid(pid, &status, 0);
        if (status != 0) {
                fprintf(stderr, "%s: status %x\n", name, (unsigned)status);
                gr_check_failures++;
        }
}

int main(void)
{
        in_a_process("no library", no_library);
        in_a_process("a library that does not start", does_not_start);
        for (size_t i = 0; i < FUNCTIONS; i++) {
                missing[0] = functions[i].name;
                if (functions[i].needed)
                        in_a_process(functions[i].name, not_there);
        }
        missing[0] = NULL;
        in_a_process("cards", cards_by_name);
        in_a_process("lists", lists);
        in_a_process("lists as of old", second_version);
        in_a_process("no lists", no_lists);
        return GR_CHECK_RESULT();
}
