/*
 * A stand-in for NVIDIA's management library over the simulated device of the same process, or over the one that it
 * loads for itself where GRSIM_SHARED names a file. In a checkpointed process it does not return. GRNVML says what it
 * hides: "hidden" lists no process, as in another pid namespace; "stranger" lists a small one of another with our
 * number; "more" lists us with what a module takes besides; "nameless" tells no card's UUID; "short" tells too short a
 * one; "far" numbers the cards from 64 on; "slow" takes 20 ms to list processes, and "hidden,slow" to list none. Built
 * as GRNVML_OLD it is as it was before the second form of the figures of memory, and before indices. nvmlMany_000 to
 * nvmlMany_777, in octal, stand for the many functions of NVML.
 */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TOTAL_BYTES     ((unsigned long long)4 << 30)
#define RESERVED_BYTES  ((unsigned long long)64 << 20)
#define MORE_BYTES      ((unsigned long long)32 << 20)
#define UNINITIALIZED   1
#define INVALID         2
#define NOT_FOUND       6
#define INSUFFICIENT    7
#define NO_DRIVER       9
#define OTHER_VERSION   25
#define EXPORT          __attribute__((visibility("default")))
#define UUID_CHARACTERS 40 /* with "GPU-" */
#define CARDS_MOST      8
#define CHECKPOINTED    2 /* of CUprocessState */

struct memory {
        unsigned long long total, free, used;
};

struct memory_v2 {
        unsigned version;
        unsigned long long total, reserved, free, used;
};

struct process {
        unsigned pid;
        unsigned long long used;
        unsigned gpu_instance, compute_instance;
};

EXPORT int nvmlInit_v2(void);
EXPORT int nvmlShutdown(void);
#ifndef GRNVML_OLD
EXPORT int nvmlDeviceGetIndex(void *device, unsigned *ret);
#endif
EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **ret);
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **ret);
EXPORT int nvmlDeviceGetUUID(void *device, char *ret, unsigned length);
EXPORT int nvmlDeviceGetMemoryInfo(void *device, struct memory *ret);
#ifndef GRNVML_OLD
EXPORT int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *ret);
#endif
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *ret);
EXPORT unsigned grNvmlListed(void); /* how often the processes were asked for */

static _Atomic unsigned times_listed;

unsigned grNvmlListed(void)
{
        return times_listed;
}

static const char *mode(void)
{
        const char *value = getenv("GRNVML");

        return value ? value : "";
}

static atomic_int started; /* how often, less how often ended */
static atomic_int starter; /* the process that did: a child of a fork has to start it anew, as with the real one */

static void *driver_call(const char *name)
{
        return dlsym(RTLD_DEFAULT, name);
}

/* As the real one, whose files the driver has closed. */
static void wait_while_checkpointed(void)
{
        void *found = driver_call("cuCheckpointProcessGetState");
        int (*get)(int, int *), state = CHECKPOINTED;

        memcpy(&get, &found, sizeof get);
        while (get && get(getpid(), &state) == 0 && state == CHECKPOINTED)
                usleep(1000);
}

static bool is_started(void)
{
        wait_while_checkpointed();
        return atomic_load(&started) > 0 && atomic_load(&starter) == getpid();
}

/* Handles are numbers of cards and one. */
static int card(void *device)
{
        return (int)(uintptr_t)device - 1;
}

static bool exists(int number)
{
        const char *devices = getenv("GRSIM_DEVICES");

        return number >= 0 && number < CARDS_MOST && number < (devices ? atoi(devices) : 1);
}

static bool get_uuid(int number, unsigned char ret[16])
{
        void *found = driver_call("grSimUuid");
        void (*uuid)(int, unsigned char *);

        memcpy(&uuid, &found, sizeof uuid);
        if (uuid)
                uuid(number, ret);
        return uuid != NULL;
}

/* The driver's number of the device of that UUID, which CUDA_VISIBLE_DEVICES may have given another number. */
static int ordinal_of(void *device)
{
        void *found = driver_call("cuDeviceGetUuid_v2");
        int (*uuid)(unsigned char *, int);
        unsigned char wanted[16], its[16];

        memcpy(&uuid, &found, sizeof uuid);
        if (!uuid || !get_uuid(card(device), wanted))
                return -1;
        for (int i = 0; uuid(its, i) == 0; i++)
                if (memcmp(its, wanted, sizeof its) == 0)
                        return i;
        return -1;
}

static unsigned long long used(void *device)
{
        void *found = driver_call("grSimUsedBytes");
        size_t (*bytes)(int);
        int ordinal = ordinal_of(device);

        memcpy(&bytes, &found, sizeof bytes);
        return bytes && ordinal >= 0 ? bytes(ordinal) : 0;
}

int nvmlInit_v2(void)
{
        void *found;
        int (*init)(unsigned);

        wait_while_checkpointed();
        if (!driver_call("grSimVersion") && getenv("GRSIM_SHARED")) {
                dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
                found = driver_call("cuInit");
                memcpy(&init, &found, sizeof init);
                if (init)
                        init(0);
        }
        if (!driver_call("grSimVersion"))
                return NO_DRIVER;
        if (atomic_exchange(&starter, getpid()) != getpid())
                atomic_store(&started, 0);
        atomic_fetch_add(&started, 1);
        return 0;
}

int nvmlShutdown(void)
{
        return is_started() && atomic_fetch_sub(&started, 1) > 0 ? 0 : UNINITIALIZED;
}

#ifndef GRNVML_OLD
int nvmlDeviceGetIndex(void *device, unsigned *ret)
{
        if (!is_started())
                return UNINITIALIZED;
        if (!exists(card(device)) || !ret)
                return INVALID;
        *ret = (unsigned)card(device) + (strcmp(mode(), "far") == 0 ? 64 : 0);
        return 0;
}
#endif

static int get_text(void *device, char *ret, unsigned length)
{
        static const char digits[] = "0123456789abcdef";
        unsigned char bytes[16];
        size_t at = 4;

        if (!is_started())
                return UNINITIALIZED;
        if (length <= UUID_CHARACTERS || !exists(card(device)) || !get_uuid(card(device), bytes))
                return NOT_FOUND;
        memcpy(ret, "GPU-", 4);
        for (size_t i = 0; i < sizeof bytes; i++) {
                if (i == 4 || i == 6 || i == 8 || i == 10)
                        ret[at++] = '-';
                ret[at++] = digits[bytes[i] >> 4];
                ret[at++] = digits[bytes[i] & 15];
        }
        ret[at] = '\0';
        return 0;
}

int nvmlDeviceGetUUID(void *device, char *ret, unsigned length)
{
        int rc = strcmp(mode(), "nameless") == 0 ? NOT_FOUND : get_text(device, ret, length);

        if (rc == 0 && strcmp(mode(), "short") == 0)
                ret[UUID_CHARACTERS - 1] = '\0';
        return rc;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **ret)
{
        char text[64];

        *ret = (void *)(uintptr_t)(index + 1);
        return get_text(*ret, text, sizeof text);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **ret)
{
        char text[64];
        void *device;

        for (unsigned i = 0; nvmlDeviceGetHandleByIndex_v2(i, &device) == 0; i++)
                if (get_text(device, text, sizeof text) == 0 && strcmp(text, uuid) == 0) {
                        *ret = device;
                        return 0;
                }
        return NOT_FOUND;
}

int nvmlDeviceGetMemoryInfo(void *device, struct memory *ret)
{
        unsigned long long taken;

        if (!is_started())
                return UNINITIALIZED;
        if (!exists(card(device)) || !ret)
                return INVALID;
        taken = RESERVED_BYTES + used(device);
        *ret = (struct memory){TOTAL_BYTES + RESERVED_BYTES, TOTAL_BYTES + RESERVED_BYTES - taken, taken};
        return 0;
}

#ifndef GRNVML_OLD
int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *ret)
{
        if (!is_started())
                return UNINITIALIZED;
        if (!exists(card(device)) || !ret)
                return INVALID;
        if (ret->version != (sizeof *ret | 2 << 24))
                return OTHER_VERSION;
        *ret = (struct memory_v2){ret->version, TOTAL_BYTES + RESERVED_BYTES, RESERVED_BYTES,
                                  TOTAL_BYTES - used(device), used(device)};
        return 0;
}
#endif

/* A hundred others first, so that the list does not fit at once. */
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *ret)
{
        enum { OTHERS = 100, OURS = 16 };
        struct process ours[OURS];
        unsigned room = *count, listed = 0;
        int ordinal = ordinal_of(device);
        void *found = driver_call("grSimProcess");
        bool (*process)(int, unsigned, unsigned *, size_t *);
        size_t bytes;

        if (!is_started())
                return UNINITIALIZED;
        memcpy(&process, &found, sizeof process);
        times_listed++;
        if (strstr(mode(), "slow"))
                usleep(20000);
        for (unsigned i = 0; process && ordinal >= 0 && listed < OURS; i++) {
                if (!process(ordinal, i, &ours[listed].pid, &bytes))
                        break;
                if (bytes > 0) /* it has a context */
                        ours[listed++].used = strcmp(mode(), "stranger") == 0 ? 4096
                                              : strcmp(mode(), "more") == 0   ? bytes + MORE_BYTES
                                                                              : bytes;
        }
        *count = strncmp(mode(), "hidden", 6) == 0 ? 0 : OTHERS + listed;
        if (room < *count)
                return INSUFFICIENT;
        for (unsigned i = 0; i < *count; i++)
                ret[i] = i < OTHERS ? (struct process){.pid = 5000000 + i, .used = 12345678}
                                    : (struct process){.pid = ours[i - OTHERS].pid, .used = ours[i - OTHERS].used};
        return 0;
}

#define MANY(i)                                                                                                        \
        EXPORT int nvmlMany_##i(void);                                                                                 \
        int nvmlMany_##i(void)                                                                                         \
        {                                                                                                              \
                return is_started() ? 0 : UNINITIALIZED;                                                               \
        }
#define EIGHT(X, i) X(i##0) X(i##1) X(i##2) X(i##3) X(i##4) X(i##5) X(i##6) X(i##7)
#define SIXTY_FOUR(i)                                                                                                  \
        EIGHT(MANY, i##0)                                                                                              \
        EIGHT(MANY, i##1)                                                                                              \
        EIGHT(MANY, i##2)                                                                                              \
        EIGHT(MANY, i##3)                                                                                              \
        EIGHT(MANY, i##4)                                                                                              \
        EIGHT(MANY, i##5)                                                                                              \
        EIGHT(MANY, i##6)                                                                                              \
        EIGHT(MANY, i##7)
SIXTY_FOUR(0)
SIXTY_FOUR(1)
SIXTY_FOUR(2)
SIXTY_FOUR(3)
SIXTY_FOUR(4)
SIXTY_FOUR(5)
SIXTY_FOUR(6)
SIXTY_FOUR(7)
