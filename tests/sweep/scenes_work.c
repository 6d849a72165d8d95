/* Scenes of work: streams, captures and graphs, several contexts, and a part of the device. */
#include "scenes.h"

#include <dlfcn.h>

/* ---- streams and events ---- */

void streams(void)
{
        CUstream stream[3];
        CUevent event[2];
        CUdeviceptr p, q;

        open_device();
        load_kernels();
        for (int i = 0; i < 3; i++)
                TRY(cuStreamCreate(&stream[i], i ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT));
        for (int i = 0; i < 2; i++)
                TRY(cuEventCreate(&event[i], CU_EVENT_DISABLE_TIMING));
        for (uint32_t round = 0; round < 4; round++) {
                p = take(LARGE);
                q = take(SMALL);
                spin(stream[0], 300);
                fill(stream[0], p, round);
                TRY(cuEventRecord(event[0], stream[0]));
                TRY(cuStreamWaitEvent(stream[1], event[0], 0));
                TRY(cuMemsetD32Async(q, 50 + round, SMALL / 4, stream[1]));
                TRY(cuEventRecord(event[1], stream[1]));
                TRY(cuStreamWaitEvent(stream[2], event[1], 0));
                if (round % 2) { /* freed while in use */
                        give(p);
                        give(q);
                        continue;
                }
                TRY(cuStreamSynchronize(stream[2]));
                TRY(cuEventSynchronize(event[1]));
                check(p, LARGE, round);
                check(q, SMALL, 50 + round);
                give(p);
                give(q);
        }
        for (int i = 0; i < 2; i++)
                TRY(cuEventDestroy(event[i]));
        for (int i = 0; i < 3; i++)
                TRY(cuStreamDestroy(stream[i]));
}

/* ---- captures, with blocks freed before and meanwhile ---- */

/* Runs the graph once, and destroys it. */
static void run_once(CUgraph graph, CUstream stream)
{
        CUgraphExec exec;

        TRY(cuGraphInstantiate(&exec, graph, 0));
        TRY(cuGraphDestroy(graph));
        TRY(cuGraphLaunch(exec, stream));
        TRY(cuStreamSynchronize(stream));
        TRY(cuGraphExecDestroy(exec));
}

void capture(void)
{
        CUdeviceptr kept, before, during;
        CUstream stream;
        CUgraph graph;

        open_device();
        load_kernels();
        TRY(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        kept = take(LARGE);
        for (uint32_t round = 0; round < 2; round++) {
                before = take(LARGE);
                during = take(SMALL);
                give(before);
                TRY(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
                fill(stream, kept, 70 + round);
                give(during);
                during = take(LARGE);
                TRY(cuStreamEndCapture(stream, &graph));
                run_once(graph, stream);
                check(kept, LARGE, 70 + round);
                use(during, LARGE, 5);
                give(during);
        }
        give(kept);
        TRY(cuStreamDestroy(stream));
}

/* ---- memory of captures, freed in them; natively they could not have any ---- */

void graph_memory(void)
{
        CUdeviceptr inside, others[4];
        CUstream stream;
        CUgraph graph;

        open_device();
        load_kernels();
        TRY(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        for (uint32_t round = 0; dlsym(RTLD_DEFAULT, "gpureclaim_status") && round < 2; round++) {
                TRY(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
                for (int i = 0; i < 2; i++) {
                        inside = take(LARGE);
                        fill(stream, inside, 7);
                        give(inside);
                }
                TRY(cuStreamEndCapture(stream, &graph));
                for (uint32_t i = 0; i < 4; i++) {
                        others[i] = take(LARGE);
                        use(others[i], LARGE, 80 + i);
                }
                run_once(graph, stream);
                for (uint32_t i = 0; i < 4; i++) {
                        check(others[i], LARGE, 80 + i);
                        give(others[i]);
                }
        }
        TRY(cuStreamDestroy(stream));
}

/* ---- several contexts; one ends with live and cached memory, the primary one is reset ---- */

void contexts(void)
{
        CUcontext own, left;
        CUdeviceptr here, there;

        open_device();
        here = take(LARGE);
        for (uint32_t round = 0; round < 2; round++) {
                TRY(cuCtxCreate(&own, NULL, 0, device));
                there = take(LARGE);
                use(there, LARGE, 1 + round);
                give(take(5 * MIB));
                give(take(SMALL));
                TRY(cuCtxPopCurrent(&left));
                give(there); /* from another context */
                TRY(cuCtxPushCurrent(own));
                there = take(LARGE);
                TRY(cuCtxDestroy(own));
                attach();
                use(here, LARGE, 3 + round);
        }
        give(here);
        here = take(LARGE);
        TRY(cuDevicePrimaryCtxReset(device));
        TRY(cuDevicePrimaryCtxRetain(&primary, device));
        attach();
        here = take(LARGE);
        use(here, LARGE, 9);
        give(here);
        TRY(cuDevicePrimaryCtxRelease(device)); /* a reset keeps how often it is retained: now it ends with the scene */
}

/* ---- two devices that reach each other's memory ---- */

void peers(void)
{
        CUcontext other;
        CUdeviceptr here, there;
        CUdevice second;

        open_device();
        TRY(cuDeviceGet(&second, 1));
        TRY(cuDevicePrimaryCtxRetain(&other, second));
        TRY(cuCtxEnablePeerAccess(other, 0));
        TRY(cuCtxSetCurrent(other));
        TRY(cuCtxEnablePeerAccess(primary, 0));
        for (uint32_t round = 0; round < 3; round++) {
                TRY(cuCtxSetCurrent(other));
                there = take(LARGE);
                use(there, LARGE, round);
                attach();
                here = take(LARGE);
                TRY(cuMemcpyDtoDAsync(here, there, LARGE, 0));
                TRY(cuCtxSynchronize());
                check(here, LARGE, round);
                give(here);
                give(there);
        }
        TRY(cuDevicePrimaryCtxRelease(second));
        attach();
}

/* ---- graphs that allocate ---- */

void graphs(void)
{
        CUdeviceptr p, kept, block;
        CUstream stream;
        CUgraphExec exec;
        CUgraph graph;

        open_device();
        load_kernels();
        TRY(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        kept = take(LARGE);
        for (uint32_t round = 0; round < 2; round++) {
                CUDA_MEM_ALLOC_NODE_PARAMS params = {
                        .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}},
                        .bytesize = LARGE};
                CUgraphNode alloc, release;

                if (round == 0) {
                        TRY(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
                        TRY(cuMemAllocAsync(&p, LARGE, stream));
                        fill(stream, p, 80);
                        TRY(cuMemcpyDtoDAsync(kept, p, LARGE, stream));
                        TRY(cuMemFreeAsync(p, stream));
                        TRY(cuStreamEndCapture(stream, &graph));
                } else {
                        TRY(cuGraphCreate(&graph, 0));
                        TRY(cuGraphAddMemAllocNode(&alloc, graph, NULL, 0, &params));
                        TRY(cuGraphAddMemFreeNode(&release, graph, &alloc, 1, params.dptr));
                }
                TRY(cuGraphInstantiate(&exec, graph, 0));
                TRY(cuGraphUpload(exec, stream));
                for (int i = 0; i < 2; i++)
                        TRY(cuGraphLaunch(exec, stream));
                block = take(LARGE);
                TRY(cuStreamSynchronize(stream));
                check(kept, LARGE, 80);
                give(block);
                TRY(cuGraphExecDestroy(exec));
                TRY(cuGraphDestroy(graph));
                TRY(cuDeviceGraphMemTrim(device));
        }
        give(kept);
        TRY(cuStreamDestroy(stream));
}

/* ---- streams that wait for the host ---- */

static void host_function(void *arg)
{
        ++*(unsigned *)arg;
}

void hosts(void)
{
        unsigned count = 0;
        CUdeviceptr word, p;
        CUstream stream;

        open_device();
        TRY(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        word = take(SMALL);
        TRY(cuMemsetD32(word, 0, SMALL / 4));
        for (uint32_t round = 1; round <= 3; round++) {
                p = take(LARGE);
                TRY(cuStreamWaitValue32(stream, word, round, CU_STREAM_WAIT_VALUE_GEQ));
                TRY(cuMemsetD32Async(p + LARGE - SMALL, round, SMALL / 4, stream));
                TRY(cuLaunchHostFunc(stream, host_function, &count));
                TRY(cuMemsetD32(word, round, 1));
                TRY(cuStreamSynchronize(stream));
                check(p, LARGE, round);
                give(p);
                if (count != round)
                        sweep_wrong("%u functions of the host ran, not %u", count, round);
        }
        give(word);
        TRY(cuStreamDestroy(stream));
}

/* ---- a context with a part of the device ---- */

void green(void)
{
        CUdevResourceDesc description;
        CUdevResource all, part;
        unsigned groups = 1;
        CUgreenCtx handle;
        CUcontext context;
        CUstream stream;
        CUdeviceptr p, q;

        open_device();
        p = take(LARGE);
        TRY(cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM));
        TRY(cuDevSmResourceSplitByCount(&part, &groups, &all, NULL, 0, 16));
        TRY(cuDevResourceGenerateDesc(&description, &part, 1));
        TRY(cuGreenCtxCreate(&handle, description, device, CU_GREEN_CTX_DEFAULT_STREAM));
        TRY(cuCtxFromGreenCtx(&context, handle));
        TRY(cuGreenCtxStreamCreate(&stream, handle, CU_STREAM_NON_BLOCKING, 0));
        TRY(cuCtxSetCurrent(context));
        for (uint32_t round = 0; round < 2; round++) {
                q = take(LARGE);
                TRY(cuMemsetD32Async(q + LARGE - SMALL, 90 + round, SMALL / 4, stream));
                TRY(cuStreamSynchronize(stream));
                check(q, LARGE, 90 + round);
                give(q);
        }
        give(p);
        TRY(cuStreamDestroy(stream));
        attach();
        TRY(cuGreenCtxDestroy(handle));
}
