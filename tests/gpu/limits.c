/*
 * The hard limit as a program meets it. Run under the shim with GPURECLAIM_HARD_LIMIT set to the --limit given here:
 *
 *   GPURECLAIM_HARD_LIMIT=1GiB LD_PRELOAD=... limits --limit=1GiB
 *   GPURECLAIM_HARD_LIMIT=2GiB GPURECLAIM_LIMIT_INCLUDES=process LD_PRELOAD=... limits --limit=2GiB --process
 *
 * --process: the limit is that of the whole process, contexts and code counted; what the card gave stays below it,
 * and reaches it. Skipped where neither NVML nor the simulated device tells what the process holds. One line per check;
 * exit status 1 when one failed.
 */
#include "gputest.h"

#include "gpureclaim.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BLOCKS = 65536, SMALL = 512 * 1024, SLOW_US = 20000 };

/* What the driver takes beyond the blocks once they are used, besides the context that was there before. */
static const size_t slack_bytes = 64 * MIB;

CUresult CUDAAPI cuMemAllocAsync_ptsz(CUdeviceptr *p, size_t bytes, CUstream stream);

static struct gt gt;
static size_t limit;
static bool packed; /* the pool kind is one of segments, where blocks share pages */
static CUstream stream;

static CUdeviceptr blocks[MOST_BLOCKS];
static size_t sizes[MOST_BLOCKS];
static size_t count;

static size_t available(void)
{
        size_t bytes, total;

        GR_MUST(cuMemGetInfo(&bytes, &total));
        if (total != limit || bytes > total)
                gt_check(false, "cuMemGetInfo", "%.1f MiB free of %.1f MiB", gt_mib(bytes), gt_mib(total));
        return bytes;
}

/* One more block; false when it was refused for want of memory. */
static bool add(size_t size)
{
        CUresult result = cuMemAlloc(&blocks[count], size);

        if (result == CUDA_ERROR_OUT_OF_MEMORY)
                return false;
        GR_MUST(result);
        GR_MUST(gt_fill(&gt, stream, blocks[count], 1, 256));
        sizes[count] = size;
        if (++count == MOST_BLOCKS)
                gt_die("more blocks than this program can hold: is the limit in force?");
        return true;
}

static void drop(size_t i)
{
        GR_MUST(cuMemFree(blocks[i]));
        blocks[i] = blocks[--count];
        sizes[i] = sizes[count];
}

static void drop_all(void)
{
        while (count)
                drop(count - 1);
}

/* Pages that the blocks would take natively; right for blocks above 1 MiB only. */
static size_t pages(void)
{
        size_t bytes = 0;

        for (size_t i = 0; i < count; i++)
                bytes += gt_pages(sizes[i]);
        return bytes;
}

/* What the blocks take at least: these pages with pool kind bins, else what was asked for, as they share pages. */
static size_t taken(void)
{
        size_t bytes = 0;

        for (size_t i = 0; i < count && packed; i++)
                bytes += sizes[i];
        return packed ? bytes : pages();
}

static void check_footprint(const char *name)
{
        size_t bytes;

        GR_MUST(cuCtxSynchronize());
        if (!gt_footprint(&gt, &bytes))
                printf("-      %s: the card cannot be asked\n", name);
        else
                gt_check(bytes <= limit + gt.context_bytes + slack_bytes, name,
                         "%.1f MiB on the card, limit %.1f MiB, context %.1f MiB (%s)", gt_mib(bytes), gt_mib(limit),
                         gt_mib(gt.context_bytes), gt_footprint_source(&gt));
}

/* What cuMemGetInfo calls free can be had in one piece. */
static bool free_can_be_had(void)
{
        size_t bytes = available() / GT_PAGE * GT_PAGE;
        CUdeviceptr p;
        CUresult result;

        if (bytes == 0)
                return true;
        result = cuMemAlloc(&p, bytes);
        if (result != CUDA_SUCCESS)
                return false;
        GR_MUST(cuMemFree(p));
        return true;
}

/* They share pages, which are all there again once the blocks are freed. */
static void small_blocks(void)
{
        static const size_t steps[] = {MIB, 300 * KIB, 512, 100 * KIB};
        size_t before = available(), n = 0;

        for (size_t i = 0; i < 12; i++)
                if (add(steps[i % 4]))
                        n++;
        drop_all();
        gt_check(available() == before, "all is free again after small blocks", "%zu blocks, %.3f of %.3f MiB", n,
                 gt_mib(available()), gt_mib(before));
}

static void totals(void)
{
        size_t total;

        GR_MUST(cuDeviceTotalMem(&total, gt.device));
        gt_check(total == limit, "cuDeviceTotalMem is the limit", "%.1f MiB", gt_mib(total));
        small_blocks();
        gt_check(free_can_be_had(), "all that is free can be had at once", "%.1f MiB", gt_mib(available()));
}

/* Refused at the limit, and not before the driver would refuse where the limit is the card's size. */
static void exact(void)
{
        static const size_t cycle[] = {64 * MIB, 20 * MIB, 3 * MIB, 5 * MIB + 1, 2 * MIB, MIB + 1};
        enum { CYCLE = sizeof cycle / sizeof cycle[0] };
        size_t refused = 0, held, largest = 0;

        /* A size that was refused cannot succeed later in a fill-up, so the largest drop out first. */
        for (size_t i = 0; refused < CYCLE; i++)
                refused = add(cycle[i % CYCLE]) ? 0 : refused + 1;
        held = taken();
        gt_check(held <= limit && pages() >= limit, "refused at the limit, and not before natively",
                 "%.1f MiB in %zu blocks, in %.1f MiB of pages natively, limit %.1f MiB", gt_mib(held), count,
                 gt_mib(pages()), gt_mib(limit));
        gt_check(packed || available() < GT_PAGE, "nothing is free then", "%.1f MiB", gt_mib(available()));
        check_footprint("the card at the limit");
        for (size_t i = 0; i < count; i++)
                if (sizes[i] > sizes[largest])
                        largest = i;
        held = sizes[largest];
        drop(largest);
        gt_check(add(held), "goes on after a free", "%.1f MiB", gt_mib(held));
        gt_check(!add(held), "and is refused again", "%.1f MiB", gt_mib(held));
        drop_all();
}

/* Random blocks come and go; the figures must stay true at every step. */
static void random_walk(void)
{
        uint64_t seed = 42;
        size_t steps = 400, worst = 0, untrue = 0, unreachable = 0;

        for (size_t i = 0; i < steps; i++) {
                size_t live, bytes;

                if (count && gt_random(&seed) % 5 < 2)
                        drop(gt_random(&seed) % count);
                else if (!add(MIB + 1 + gt_random(&seed) % (limit / 16)) && count)
                        drop(gt_random(&seed) % count);
                bytes = available();
                live = taken();
                if (bytes + live > limit)
                        untrue++;
                else if (limit - live - bytes > worst)
                        worst = limit - live - bytes;
                if (i % 20 == 19 && !free_can_be_had())
                        unreachable++;
        }
        drop_all();
        gt_check(untrue == 0, "free and live never exceed the limit", "%zu of %zu steps did", untrue, steps);
        gt_check(unreachable == 0, "what is free can be had, at any time",
                 "%zu of %zu times not; least said: %.1f MiB less", unreachable, steps / 20, gt_mib(worst));
}

/* Everything cached in sizes that do not fit: the large request must still succeed. */
static void fragmented(void)
{
        size_t large = limit / 8 * 7 / GT_PAGE * GT_PAGE, n, bytes;
        bool got;

        while (add(SMALL))
                ;
        n = count;
        gt_check(n * SMALL <= limit && n * SMALL >= limit / 10 * 9, "512 KiB blocks fill the limit",
                 "%zu blocks, %.1f MiB", n, gt_mib(n * SMALL));
        check_footprint("the card full of small blocks");
        drop_all();
        got = add(large);
        gt_check(got, "one large block after all the small ones", "%.1f MiB", gt_mib(large));
        drop_all();

        while (add(3 * MIB))
                ;
        for (size_t i = count; i-- > 0;)
                if (i % 2)
                        drop(i);
        bytes = available() / GT_PAGE * GT_PAGE;
        got = add(bytes);
        gt_check(got && bytes >= limit / 4, "one large block beside every second small one", "%.1f MiB", gt_mib(bytes));
        drop_all();
        check_footprint("the card after that");
}

/* The memory that has to make room is still being written to. */
static void busy(void)
{
        enum { PARTS = 16 };
        CUdeviceptr counter, p;
        CUstream other = gt_stream();
        size_t large = limit / 4 * 3 / GT_PAGE * GT_PAGE;
        uint32_t changed = 0;
        uint64_t words = (gt.simulated ? MIB : large) / 4;

        GR_MUST(cuMemAlloc(&counter, 4));
        GR_MUST(cuMemsetD32(counter, 0, 1));
        GR_MUST(cuCtxSynchronize());
        for (int i = 0; i < PARTS; i++)
                if (!add(limit / (PARTS + 1) / GT_PAGE * GT_PAGE))
                        gt_die("limits: no room for the blocks of the busy check");
        for (size_t i = 0; i < count; i++)
                GR_MUST(gt_late_fill(&gt, stream, blocks[i], 1, 1024, SLOW_US / PARTS));
        drop_all();
        if (cuMemAlloc(&p, large) != CUDA_SUCCESS) {
                gt_check(false, "large block while the freed ones are at work", "%.1f MiB refused", gt_mib(large));
                GR_MUST(cuMemFree(counter));
                return;
        }
        GR_MUST(gt_fill(&gt, other, p, 2, words));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(gt_count_diff(&gt, other, p, 2, words, counter));
        GR_MUST(cuStreamSynchronize(other));
        GR_MUST(cuMemcpyDtoH(&changed, counter, 4));
        gt_check(changed == 0, "large block while the freed ones are at work", "%.1f MiB, %u words changed",
                 gt_mib(large), (unsigned)changed);
        GR_MUST(cuMemFree(p));
        GR_MUST(cuMemFree(counter));
}

/* The legacy stream cannot be asked whether it is captured then; the thread's own, also called 0, is not. */
static void beside_a_capture(void)
{
        CUstream blocking;
        CUdeviceptr p = 0;
        CUgraph graph;
        CUresult result;

        GR_MUST(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
        GR_MUST(cuStreamBeginCapture(blocking, CU_STREAM_CAPTURE_MODE_RELAXED));
        result = cuMemAllocAsync_ptsz(&p, limit + GT_PAGE, NULL);
        gt_check(result == CUDA_ERROR_OUT_OF_MEMORY,
                 "more than the limit for the thread's own stream, beside a capture", "%s", gt_result_name(result));
        GR_MUST(cuStreamEndCapture(blocking, &graph));
        GR_MUST(cuGraphDestroy(graph));
        GR_MUST(cuStreamDestroy(blocking));
}

/* Blocks until one is refused, of a limit that contexts and code count against. */
static void whole_process(void)
{
        /* NVML counts in steps of its own, and the figure is up to 100 ms old. */
        static const size_t process_slack_bytes = 16 * MIB, step_bytes = 16 * MIB;
        struct gpureclaim_status status = {.struct_bytes = sizeof status};
        void *found = dlsym(RTLD_DEFAULT, "gpureclaim_status");
        gpureclaim_status_function *get;
        size_t bytes, free_bytes, total_bytes;
        double begin;

        if (!found)
                gt_die("limits --process needs the library");
        memcpy(&get, &found, sizeof get);
        GR_MUST(cuMemAlloc(&blocks[count++], step_bytes));
        begin = gt_now_us();
        if (get(gt.device, &status) != 0 || status.driver_bytes == UINT64_MAX || !gt_footprint(&gt, &bytes)) {
                printf("skipped: nobody tells what this process holds\n");
                exit(GT_SKIPPED);
        }
        printf("# gpureclaim_status: %.1f us\n", gt_now_us() - begin);
        gt_check(bytes <= status.driver_bytes + step_bytes + process_slack_bytes &&
                         status.driver_bytes + step_bytes <= bytes + process_slack_bytes,
                 "what the driver took", "%.1f MiB of %.1f MiB held (%s)", gt_mib(status.driver_bytes), gt_mib(bytes),
                 gt_footprint_source(&gt));
        GR_MUST(cuMemGetInfo(&free_bytes, &total_bytes));
        gt_check(total_bytes == limit && free_bytes + bytes <= limit + process_slack_bytes, "cuMemGetInfo",
                 "%.1f MiB free of %.1f MiB", gt_mib(free_bytes), gt_mib(total_bytes));
        while (count < MOST_BLOCKS && cuMemAlloc(&blocks[count], step_bytes) == CUDA_SUCCESS)
                count++;
        if (!gt_footprint(&gt, &bytes))
                bytes = 0;
        gt_check(bytes <= limit + process_slack_bytes && bytes + step_bytes + process_slack_bytes >= limit,
                 "refused at the limit", "%.1f MiB held, %.1f MiB of it allocated, limit %.1f MiB (%s)", gt_mib(bytes),
                 gt_mib(count * step_bytes), gt_mib(limit), gt_footprint_source(&gt));
        while (count)
                GR_MUST(cuMemFree(blocks[--count]));
}

int main(int argc, char **argv)
{
        const char *pool = getenv("GPURECLAIM_POOL");
        bool process = false;

        GT_OPTIONS(argc, argv, "--limit=SIZE [--process]", GT_OPTION("limit", limit), GT_OPTION("process", process));
        if (!limit)
                gt_die("limits needs --limit=SIZE");
        packed = !pool || strcmp(pool, "bins") != 0;
        gt_open(&gt);
        if (process) {
                whole_process();
                gt_close(&gt);
                return GR_CHECK_RESULT();
        }
        stream = gt_stream();
        totals();
        exact();
        random_walk();
        fragmented();
        busy();
        beside_a_capture();
        GR_MUST(cuStreamDestroy(stream));
        gt_close(&gt);
        return GR_CHECK_RESULT();
}
