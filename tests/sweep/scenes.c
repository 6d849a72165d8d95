/*
 * The scenes of the fault sweep: short programs, each of which frees all that it took. Every call that fails is tried
 * once more (TRY), so that a scene with a fault comes to the same end as one without.
 */
#include "scenes.h"

#include "gpureclaim.h"

#include <dlfcn.h>
#include <unistd.h>

#define PAGE (2 * MIB)

CUdevice device;
CUcontext primary;
static CUmodule module;
static CUfunction fill_kernel, spin_kernel;

void attach(void)
{
        TRY(cuCtxSetCurrent(primary));
}

void open_device(void)
{
        TRY(cuInit(0));
        TRY(cuDeviceGet(&device, 0));
        TRY(cuDevicePrimaryCtxRetain(&primary, device));
        attach();
}

void load_kernels(void)
{
        TRY(cuModuleLoadData(&module, "kernels"));
        TRY(cuModuleGetFunction(&fill_kernel, module, "gr_fill"));
        TRY(cuModuleGetFunction(&spin_kernel, module, "gr_spin"));
}

void spin(CUstream stream, uint64_t us)
{
        uint64_t ns = us * 1000;
        void *args[] = {&ns};

        TRY(cuLaunchKernel(spin_kernel, 1, 1, 1, 1, 1, 1, 0, stream, args, NULL));
}

void fill(CUstream stream, CUdeviceptr p, uint32_t value)
{
        uint64_t words = SMALL / 4;

        void *args[] = {&p, &value, &words};

        p += LARGE - SMALL;
        TRY(cuLaunchKernel(fill_kernel, 1, 1, 1, 1, 1, 1, 0, stream, args, NULL));
}

CUdeviceptr take(size_t bytes)
{
        CUdeviceptr p = 0;

        TRY(cuMemAlloc(&p, bytes));
        return p;
}

void give(CUdeviceptr p)
{
        TRY(cuMemFree(p));
}

void check(CUdeviceptr p, size_t bytes, uint32_t value)
{
        uint32_t found = 0;

        TRY(cuMemcpyDtoH(&found, p + bytes - 4, 4));
        if (found != value)
                sweep_wrong("memory holds %u, not %u", found, value);
}

void use(CUdeviceptr p, size_t bytes, uint32_t value)
{
        size_t at_end = bytes < SMALL ? bytes : SMALL;

        TRY(cuMemsetD32(p + bytes - at_end, value, at_end / 4));
        check(p, bytes, value);
}

unsigned take_all(CUdeviceptr *blocks)
{
        CUresult before = CUDA_SUCCESS;
        unsigned count = 0;

        while (count < PROBES_MOST) {
                CUresult result = cuMemAlloc(&blocks[count], PROBE_BYTES);
                bool short_of = result == CUDA_ERROR_OUT_OF_MEMORY;

                if (short_of && before == CUDA_ERROR_OUT_OF_MEMORY)
                        break;
                if (result == CUDA_SUCCESS) {
                        count++;
                        if (before == CUDA_ERROR_OUT_OF_MEMORY)
                                sweep_error("cuMemAlloc_v2", before, false);
                } else if (!short_of) {
                        sweep_error("cuMemAlloc_v2", result, before != CUDA_SUCCESS && before == result);
                }
                before = result;
        }
        return count;
}

static uint64_t live_bytes(void)
{
        struct gpureclaim_status status = {.struct_bytes = sizeof(status)};
        gpureclaim_status_function *ask;

        *(void **)&ask = dlsym(RTLD_DEFAULT, "gpureclaim_status");
        return ask && ask(0, &status) == 0 ? status.live_bytes : 0;
}

void sweep_finish(void)
{
        size_t (*used)(int);
        unsigned long (*misuses)(void);
        CUdeviceptr blocks[PROBES_MOST], p;
        size_t free_bytes;

        TRY(cuCtxSynchronize());
        /*
         * What could not be asked for is told as it was before, and what goes back just now as neither free nor cached.
         */
        for (int i = 0; i < 10; i++) {
                TRY(cuMemGetInfo(&free_bytes, &sweep_report->total_bytes));
                if (sweep_report->free_bytes < free_bytes)
                        sweep_report->free_bytes = free_bytes;
                if (i > 0 && sweep_report->total_bytes - sweep_report->free_bytes < PAGE)
                        break;
                if (i > 0)
                        usleep(2000);
        }
        /* What goes back just now counts as live for a moment. */
        for (int i = 0; i < 10 && (sweep_report->live_bytes = live_bytes()) > 0; i++)
                usleep(2000);
        sweep_report->blocks = take_all(blocks);
        for (unsigned i = 0; i < sweep_report->blocks; i++)
                TRY(cuMemsetD8(blocks[i] + PROBE_BYTES - 1, 1, 1));
        for (unsigned i = 0; i < sweep_report->blocks; i++)
                give(blocks[i]);
        p = take(SMALL);
        use(p, SMALL, 7);
        give(p);
        TRY(cuDevicePrimaryCtxRelease(device));
        *(void **)&used = dlsym(RTLD_DEFAULT, "grSimUsedBytes");
        *(void **)&misuses = dlsym(RTLD_DEFAULT, "grSimMisuseCount");
        sweep_report->used_bytes = used ? used(0) : 0;
        if (misuses && misuses() > 0)
                sweep_wrong("%lu touches of memory that was not the program's", misuses());
}

#define CARD "GRSIM_MEMORY=64MiB"

const struct sweep_scene sweep_scenes[] = {
        {"plain", plain, {CARD}, true},
        {"streams", streams, {CARD}, true},
        {"streams-barrier", streams, {CARD, "GPURECLAIM_REUSE=barrier"}, true},
        {"streams-poll", streams, {CARD, "GPURECLAIM_REUSE=poll"}, false},
        {"streams-sync", streams, {CARD, "GPURECLAIM_REUSE=sync"}, true},
        {"streams-old", streams, {CARD, "GRSIM_MISSING=cuCtxRecordEvent,cuCtxWaitEvent"}, false},
        {"capture", capture, {CARD}, true},
        {"graph-memory", graph_memory, {CARD}, true, .keeps = true},
        {"graph-memory-shared", graph_memory, {CARD, "GPURECLAIM_GRAPH_ARENA=shared"}, true, .keeps = true},
        {"contexts", contexts, {CARD}, true},
        {"peers", peers, {CARD, "GRSIM_DEVICES=2"}, false},
        {"pools", pools, {CARD}, true},
        {"pools-limit", pools, {CARD, "GPURECLAIM_HARD_LIMIT=32MiB"}, false},
        {"mapped", mapped, {CARD}, true},
        {"mapped-limit", mapped, {CARD, "GPURECLAIM_HARD_LIMIT=32MiB"}, false},
        {"pinned", pinned, {CARD, "GPURECLAIM_PINNED_LIMIT=64MiB"}, false},
        {"managed", managed, {CARD}, true},
        {"managed-limit", managed, {CARD, "GPURECLAIM_HARD_LIMIT=32MiB"}, false},
        {"graphs", graphs, {CARD}, true},
        {"graphs-limit", graphs, {CARD, "GPURECLAIM_HARD_LIMIT=32MiB"}, false},
        {"decay", decay, {CARD, "GPURECLAIM_DECAY=20ms"}, true},
        {"threshold", decay, {CARD, "GPURECLAIM_RELEASE_THRESHOLD=0"}, true},
        {"full", fullness, {CARD}, true},
        {"full-limit", fullness, {CARD, "GPURECLAIM_HARD_LIMIT=40MiB"}, true},
        {"full-ladder",
         fullness,
         {CARD, "GPURECLAIM_HARD_LIMIT=40MiB", "GPURECLAIM_SOFT_LIMIT=20MiB", "GPURECLAIM_WAIT=3ms",
          "GPURECLAIM_SPILL=16MiB", "GPURECLAIM_MALLOC_TRIM=1"},
         true},
        {"changing", changing, {"GRSIM_MEMORY=320MiB"}, true},
        {"threads", threads, {CARD}, true},
        {"trace",
         plain,
         {CARD, "GPURECLAIM_TRACE=FOLDER/trace", "GPURECLAIM_STATS_FILE=FOLDER/stats", "GPURECLAIM_STATS=1"},
         false},
        {"group", plain, {CARD, "GPURECLAIM_GROUP_LIMIT=48MiB"}, false},
        {"asking", asking, {CARD, "GRSIM_SHARED=FOLDER/card", "GPURECLAIM_NEIGHBOUR_WAIT=2s"}, true, true},
        {"shared", shared, {CARD}, true},
        {"hosts", hosts, {CARD}, true},
        {"green", green, {CARD}, true},
        {"giving", giving, {CARD, "GRSIM_SHARED=FOLDER/card", "GPURECLAIM_NEIGHBOUR_WAIT=2s"}, true, true},
};
const size_t sweep_scene_count = sizeof(sweep_scenes) / sizeof(*sweep_scenes);
