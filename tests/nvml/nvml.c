/*
 * A stand-in for NVIDIA's management library over the simulated device of the same process. GRNVML says what it hides:
 * "hidden" lists no process, as in another pid namespace; "stranger" lists a small one of another with our number.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TOTAL_BYTES     ((unsigned long long)4 << 30)
#define NOT_FOUND       6
#define INSUFFICIENT    7
#define EXPORT          __attribute__((visibility("default")))
#define UUID_CHARACTERS 40 /* with "GPU-" */

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
EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **ret);
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **ret);
EXPORT int nvmlDeviceGetUUID(void *device, char *ret, unsigned length);
EXPORT int nvmlDeviceGetMemoryInfo(void *device, struct memory *ret);
EXPORT int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *ret);
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *ret);

static const char *mode(void)
{
        const char *value = getenv("GRNVML");

        return value ? value : "";
}

/* Handles are ordinals and one. */
static int ordinal(void *device)
{
        return (int)(uintptr_t)device - 1;
}

static unsigned long long used(void *device)
{
        void *found = dlsym(RTLD_DEFAULT, "grSimUsedBytes");
        size_t (*bytes)(int);

        memcpy(&bytes, &found, sizeof bytes);
        return bytes ? bytes(ordinal(device)) : 0;
}

static void *driver_call(const char *name)
{
        return dlsym(RTLD_DEFAULT, name);
}

int nvmlInit_v2(void)
{
        return driver_call("grSimVersion") ? 0 : 9; /* NVML_ERROR_DRIVER_NOT_LOADED */
}

int nvmlDeviceGetUUID(void *device, char *ret, unsigned length)
{
        static const char digits[] = "0123456789abcdef";
        int (*get)(unsigned char *, int);
        void *found = driver_call("cuDeviceGetUuid_v2");
        unsigned char bytes[16];
        size_t at = 4;

        memcpy(&get, &found, sizeof get);
        if (length <= UUID_CHARACTERS || !get || get(bytes, ordinal(device)) != 0)
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

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **ret)
{
        char text[64];

        *ret = (void *)(uintptr_t)(index + 1);
        return nvmlDeviceGetUUID(*ret, text, sizeof text);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **ret)
{
        char text[64];
        void *device;

        for (unsigned i = 0; nvmlDeviceGetHandleByIndex_v2(i, &device) == 0; i++)
                if (nvmlDeviceGetUUID(device, text, sizeof text) == 0 && strcmp(text, uuid) == 0) {
                        *ret = device;
                        return 0;
                }
        return NOT_FOUND;
}

int nvmlDeviceGetMemoryInfo(void *device, struct memory *ret)
{
        *ret = (struct memory){TOTAL_BYTES, TOTAL_BYTES - used(device), used(device)};
        return 0;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *ret)
{
        *ret = (struct memory_v2){ret->version, TOTAL_BYTES, 0, TOTAL_BYTES - used(device), used(device)};
        return 0;
}

/* A hundred others first, so that the list does not fit at once. */
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *ret)
{
        enum { OTHERS = 100 };
        unsigned room = *count, listed = strcmp(mode(), "hidden") == 0 ? 0 : OTHERS + 1;

        *count = listed;
        if (room < listed)
                return INSUFFICIENT;
        for (unsigned i = 0; i < listed; i++)
                ret[i] = (struct process){.pid = 5000000 + i, .used = 12345678};
        if (listed)
                ret[listed - 1] = (struct process){.pid = (unsigned)getpid(),
                                                   .used = strcmp(mode(), "stranger") == 0 ? 4096 : used(device)};
        return 0;
}
