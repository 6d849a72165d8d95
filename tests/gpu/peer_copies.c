/*
 * Two devices in one process: nine kinds of copy, from each context, of memory of both; kernels and fills with access
 * to their peer's. One context has memory before the other one begins. Every line must be the same natively and under
 * the library. Ends with status 77 where there is one device only.
 */
#include "gputest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIDES = 2, ROW = 512 };

static struct gt gt[SIDES];
static CUstream streams[SIDES];
static const char letter[SIDES] = {'A', 'B'};
static uint32_t words[4096];

struct copy {
        CUdeviceptr to, from;
        size_t bytes;
        int to_side, from_side, current;
};

static CUresult unified(const struct copy *c)
{
        return cuMemcpy(c->to, c->from, c->bytes);
}

static CUresult device_to_device(const struct copy *c)
{
        return cuMemcpyDtoD(c->to, c->from, c->bytes);
}

static CUresult unified_async(const struct copy *c)
{
        return cuMemcpyAsync(c->to, c->from, c->bytes, streams[c->current]);
}

static CUresult device_to_device_async(const struct copy *c)
{
        return cuMemcpyDtoDAsync(c->to, c->from, c->bytes, streams[c->current]);
}

static CUresult peer(const struct copy *c)
{
        return cuMemcpyPeer(c->to, gt[c->to_side].ctx, c->from, gt[c->from_side].ctx, c->bytes);
}

static CUresult peer_async(const struct copy *c)
{
        return cuMemcpyPeerAsync(c->to, gt[c->to_side].ctx, c->from, gt[c->from_side].ctx, c->bytes,
                                 streams[c->current]);
}

static CUresult rows(const struct copy *c)
{
        CUDA_MEMCPY2D shape = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                               .srcDevice = c->from,
                               .srcPitch = ROW,
                               .dstMemoryType = CU_MEMORYTYPE_UNIFIED,
                               .dstDevice = c->to,
                               .dstPitch = ROW,
                               .WidthInBytes = ROW,
                               .Height = c->bytes / ROW};

        return cuMemcpy2D(&shape);
}

static CUresult box(const struct copy *c)
{
        CUDA_MEMCPY3D shape = {.srcMemoryType = CU_MEMORYTYPE_UNIFIED,
                               .srcDevice = c->from,
                               .srcPitch = ROW,
                               .srcHeight = 1,
                               .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                               .dstDevice = c->to,
                               .dstPitch = ROW,
                               .dstHeight = 1,
                               .WidthInBytes = ROW,
                               .Height = 1,
                               .Depth = c->bytes / ROW};

        return cuMemcpy3DAsync(&shape, streams[c->current]);
}

/* Through the host. */
static CUresult by_host(const struct copy *c)
{
        size_t part = c->bytes < sizeof words ? c->bytes : sizeof words;
        CUresult result = CUDA_SUCCESS;

        for (size_t at = 0; at < c->bytes && result == CUDA_SUCCESS; at += part) {
                part = c->bytes - at < part ? c->bytes - at : part;
                result = cuMemcpyDtoH(words, c->from + at, part);
                if (result == CUDA_SUCCESS)
                        result = cuMemcpyHtoD(c->to + at, words, part);
        }
        return result;
}

static const struct {
        const char *name;
        CUresult (*copy)(const struct copy *c);
} ways[] = {{"cuMemcpy", unified},
            {"cuMemcpyDtoD", device_to_device},
            {"cuMemcpyAsync", unified_async},
            {"cuMemcpyDtoDAsync", device_to_device_async},
            {"cuMemcpyPeer", peer},
            {"cuMemcpyPeerAsync", peer_async},
            {"cuMemcpy2D", rows},
            {"cuMemcpy3DAsync", box},
            {"cuMemcpyDtoH and HtoD", by_host}};

static void enter(int side)
{
        GR_MUST(cuCtxSetCurrent(gt[side].ctx));
}

static void settle(void)
{
        for (int i = 0; i < SIDES; i++) {
                enter(i);
                GR_MUST(cuCtxSynchronize());
        }
}

static void fill(int side, CUdeviceptr p, size_t bytes, uint32_t value)
{
        enter(side);
        GR_MUST(cuMemsetD32(p, value, bytes / 4));
        GR_MUST(cuCtxSynchronize());
}

/* How many of the first, middle and last word are not value. */
static unsigned wrong(int side, CUdeviceptr p, size_t bytes, uint32_t value)
{
        const size_t at[] = {0, bytes / 8 * 4, bytes - 4};
        unsigned count = 0;
        uint32_t word;

        enter(side);
        for (int i = 0; i < 3; i++) {
                GR_MUST(cuMemcpyDtoH(&word, p + at[i], 4));
                count += word != value;
        }
        return count;
}

/* All ways, with the memory of either side as the source, from each context. */
static void copies(size_t bytes, const CUdeviceptr blocks[SIDES])
{
        static uint32_t value;

        for (size_t w = 0; w < sizeof ways / sizeof *ways; w++)
                for (int way = 0; way < 2 * SIDES; way++) {
                        struct copy c = {.bytes = bytes, .current = way / 2, .from_side = way % 2};
                        CUresult result;

                        c.to_side = !c.from_side;
                        c.from = blocks[c.from_side];
                        c.to = blocks[c.to_side];
                        fill(c.from_side, c.from, bytes, ++value);
                        fill(c.to_side, c.to, bytes, 0);
                        enter(c.current);
                        result = ways[w].copy(&c);
                        settle();
                        printf("%s of %zu B in %c, from %c to %c: %d, %u words wrong\n", ways[w].name, bytes,
                               letter[c.current], letter[c.from_side], letter[c.to_side], (int)result,
                               wrong(c.to_side, c.to, bytes, value));
                }
}

/*
 * Kernels and fills in one context that use the other one's memory, which natively they may after
 * cuCtxEnablePeerAccess.
 */
static void kernels(size_t bytes, const CUdeviceptr blocks[SIDES])
{
        for (int i = 0; i < SIDES; i++) {
                CUresult result;

                fill(!i, blocks[!i], bytes, 77 + (uint32_t)i);
                fill(i, blocks[i], bytes, 0);
                enter(i);
                result = gt_copy(&gt[i], streams[i], blocks[i], blocks[!i], bytes / 4);
                settle();
                printf("kernel in %c reads %c: %d, %u words wrong\n", letter[i], letter[!i], (int)result,
                       wrong(i, blocks[i], bytes, 77 + (uint32_t)i));
        }
        for (int current = 0; current < SIDES; current++) {
                CUresult result;

                enter(current);
                result = cuMemsetD32(blocks[!current], (uint32_t)(88 + current), bytes / 4);
                settle();
                printf("filled in %c, of %c: %d, %u words wrong\n", letter[current], letter[!current], (int)result,
                       wrong(!current, blocks[!current], bytes, (uint32_t)(88 + current)));
        }
}

static CUdeviceptr take(int side, size_t bytes)
{
        CUdeviceptr p;

        enter(side);
        GR_MUST(cuMemAlloc(&p, bytes));
        return p;
}

int main(void)
{
        static const size_t sizes[] = {4096, 300 * 1024, 3 * MIB, 9 * MIB};
        enum { SIZES = sizeof sizes / sizeof *sizes };
        CUdeviceptr early[SIZES], blocks[SIDES], other;
        int count, there = 0, back = 0;

        setvbuf(stdout, NULL, _IOLBF, 0);
        GR_MUST(cuInit(0));
        GR_MUST(cuDeviceGetCount(&count));
        if (count < SIDES)
                return GT_SKIPPED;
        gt_open(&gt[0]);
        streams[0] = gt_stream();
        for (int i = 0; i < SIZES; i++)
                early[i] = take(0, sizes[i]);
        gt[1] = gt[0];
        gt[1].device = 1;
        GR_MUST(cuDevicePrimaryCtxRetain(&gt[1].ctx, 1));
        enter(1);
        gt_load_kernels(&gt[1].module);
        GR_MUST(cuModuleGetFunction(&gt[1].copy, gt[1].module, "gr_copy"));
        streams[1] = gt_stream();
        for (int round = 0; round < 2; round++) {
                for (int i = 0; i < SIZES; i++) {
                        blocks[0] = early[i];
                        blocks[1] = take(1, sizes[i]);
                        copies(sizes[i], blocks);
                        other = take(1, 2 * sizes[i]);
                        GR_MUST(cuMemFree(blocks[1]));
                        GR_MUST(cuMemFree(other));
                        GR_MUST(cuMemFree(early[i]));
                }
                for (int i = 0; i < SIZES; i++) /* new memory, and some that was used before */
                        early[i] = take(0, sizes[i]);
        }
        GR_MUST(cuDeviceCanAccessPeer(&there, 0, 1));
        GR_MUST(cuDeviceCanAccessPeer(&back, 1, 0));
        for (int i = 0; i < SIDES && there && back; i++) {
                enter(i);
                printf("peer access from %c: %d", letter[i], (int)cuCtxEnablePeerAccess(gt[!i].ctx, 0));
                printf(", again %d\n", (int)cuCtxEnablePeerAccess(gt[!i].ctx, 0));
        }
        for (int i = 0; i < SIZES && there && back; i++) {
                blocks[0] = early[i];
                blocks[1] = take(1, sizes[i]);
                kernels(sizes[i], blocks);
                copies(sizes[i], blocks);
                GR_MUST(cuMemFree(blocks[1]));
        }
        for (int i = 0; i < SIZES; i++)
                GR_MUST(cuMemFree(early[i]));
        return GR_CHECK_RESULT();
}
