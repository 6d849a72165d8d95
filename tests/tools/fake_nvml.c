/*
 * A management library for the command to ask. FAKE_NVML names a file, read anew for each answer, with a line
 * "UUID TOTAL_MIB USED_MIB" per GPU. FAKE_NVML_PROCESSES names one with a line "PID USED_MIB" per process, on all
 * GPUs; a negative figure is one that the driver does not tell.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GPUS 8

struct memory {
        unsigned long long total, free, used;
};

struct gpu {
        char uuid[64];
        unsigned long long total, used;
};

int nvmlInit_v2(void);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **ret);
int nvmlDeviceGetHandleByUUID(const char *uuid, void **ret);
int nvmlDeviceGetUUID(void *device, char *ret, unsigned length);
int nvmlDeviceGetName(void *device, char *ret, unsigned length);
int nvmlDeviceGetMemoryInfo(void *device, struct memory *ret);

/* As the third form of the call has it. */
struct process {
        unsigned pid;
        unsigned long long used;
        unsigned instances[2];
};

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *ret);

static int handles[GPUS];

static unsigned read_gpus(struct gpu *gpus)
{
        FILE *file = fopen(getenv("FAKE_NVML"), "r");
        unsigned count = 0;

        while (file && count < GPUS &&
               fscanf(file, "%63s %llu %llu", gpus[count].uuid, &gpus[count].total, &gpus[count].used) == 3)
                count++;
        if (file)
                fclose(file);
        return count;
}

int nvmlInit_v2(void)
{
        return getenv("FAKE_NVML") ? 0 : 9;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **ret)
{
        struct gpu gpus[GPUS];

        if (index >= read_gpus(gpus))
                return 2;
        *ret = &handles[index];
        return 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **ret)
{
        struct gpu gpus[GPUS];
        unsigned count = read_gpus(gpus);

        for (unsigned i = 0; i < count; i++)
                if (strcmp(gpus[i].uuid, uuid) == 0) {
                        *ret = &handles[i];
                        return 0;
                }
        return 2;
}

int nvmlDeviceGetUUID(void *device, char *ret, unsigned length)
{
        struct gpu gpus[GPUS];
        long index = (int *)device - handles;

        if (index < 0 || index >= (long)read_gpus(gpus) || length <= strlen(gpus[index].uuid))
                return 2;
        strcpy(ret, gpus[index].uuid);
        return 0;
}

int nvmlDeviceGetName(void *device, char *ret, unsigned length)
{
        return snprintf(ret, length, "Model %ld", (long)((int *)device - handles)) < (int)length ? 0 : 7;
}

int nvmlDeviceGetMemoryInfo(void *device, struct memory *ret)
{
        struct gpu gpus[GPUS];
        long index = (int *)device - handles;

        if (index < 0 || index >= (long)read_gpus(gpus))
                return 2;
        ret->total = gpus[index].total << 20;
        ret->used = gpus[index].used << 20;
        ret->free = ret->total - ret->used;
        return 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *ret)
{
        const char *path = getenv("FAKE_NVML_PROCESSES");
        FILE *file = path ? fopen(path, "r") : NULL;
        unsigned room = *count, pid, found = 0;
        long long used;

        (void)device;
        while (file && fscanf(file, "%u %lld", &pid, &used) == 2) {
                if (found < room)
                        ret[found] = (struct process){pid, used < 0 ? ~0ull : (unsigned long long)used << 20, {0}};
                found++;
        }
        if (file)
                fclose(file);
        *count = found;
        return found > room ? 7 : 0;
}
