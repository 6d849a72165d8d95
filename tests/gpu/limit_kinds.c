/*
 * The hard limit against every way to get memory: each is tried until it is refused, and what the card really gave is
 * held against the limit.
 *
 *   GPURECLAIM_HARD_LIMIT=1GiB GPURECLAIM_PINNED_LIMIT=256MiB LD_PRELOAD=... \
 *       limit_kinds --limit=1GiB --pinned-limit=256MiB
 *
 * Without --pinned-limit the host's memory is left alone. --card says that the limit is the card itself: the library
 * has none, and the driver has to do the refusing. One line per check; exit status 1 when one failed.
 */
#include "limit_kinds_memory.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 4096, OTHERS = 2 * 4096, BYPASS_US = 300000 }; /* after a failure the shim caches nothing for so long */

/* What the driver takes beyond the memory itself, besides the context that was there before. */
static const size_t slack_bytes = 64 * MIB;

static size_t limit, pinned_limit;
static bool card;
static uint64_t held[MOST];
static size_t count;

/* False when it was refused; ends the program when it was for another reason than memory. */
static bool add(const struct memory_kind *kind, size_t bytes)
{
        CUresult result = kind->get(bytes, &held[count]);

        if (result == CUDA_ERROR_OUT_OF_MEMORY)
                return false;
        gr_check_must(result, kind->name, __FILE__, __LINE__);
        if (++count == MOST)
                gt_die("%s: no end of memory: is the limit in force?", kind->name);
        return true;
}

static void drop_all(const struct memory_kind *kind, size_t bytes)
{
        while (count)
                gr_check_must(kind->put(bytes, held[--count]), kind->name, __FILE__, __LINE__);
        GR_MUST(cuCtxSynchronize());
}

static void check_footprint(const char *name)
{
        size_t bytes;

        GR_MUST(cuCtxSynchronize());
        if (!gt_footprint(&gt, &bytes))
                printf("-      %s: the card cannot be asked\n", name);
        else
                gt_check(bytes <= limit + gt.context_bytes + slack_bytes, name, "%.1f MiB held (%s)", gt_mib(bytes),
                         gt_footprint_source(&gt));
}

static struct figures origin; /* before anything was allocated */
static bool origin_known;

/*
 * What was taken since the start. The two were equal to the byte on an H200 (driver 580, 21 Nov 2026), context aside,
 * so little is allowed for: page tables, and what an allocation makes the driver take by itself. What is given only
 * where it is touched is accounted in full, and the card's figure has to stay below. Without an entry of our own in
 * NVML's list the figure is the whole card's, where others may be at work: then it is only told.
 */
static void compare_gain(const char *name, bool on_demand)
{
        const double tolerance = 16 * (double)MIB;
        struct figures now;
        double gained, accounted;

        if (!origin_known || !look(&now))
                return;
        gained = now.on_card - origin.on_card;
        accounted = now.accounted - origin.accounted;
        printf("# %s: %+.1f MiB on the card (%s), %+.1f MiB accounted\n", name, gained / MIB, gt_footprint_source(&gt),
               accounted / MIB);
        if (own_figure())
                gt_check(gained <= accounted + tolerance && (on_demand || gained + tolerance >= accounted), name,
                         "the card's figure is ours");
}

/* Until it is refused; then nothing else gets anything either, and after the frees all is there again. */
static void fill(const struct memory_kind *kind)
{
        size_t most = kind->host ? pinned_limit : limit, step = most / 32 / GT_PAGE * GT_PAGE, got, before;
        uint64_t extra;

        before = available();
        while (add(kind, step))
                ;
        if (!kind->host)
                compare_gain(kind->name, kind->on_demand);
        got = count * step;
        /* A mipmapped array cannot be cut to a size, and a pool grows in steps of its own. */
        gt_check(got <= most && got + most / 8 + 32 * MIB >= most, kind->name,
                 "refused after %.1f MiB in %zu pieces, limit %.1f MiB", gt_mib(got), count, gt_mib(most));
        if (!kind->host) {
                gt_check(available() + got <= most + slack_bytes, kind->name, "%.1f MiB free then",
                         gt_mib(available()));
                check_footprint(kind->name);
                gt_check(get_device(most / 4, &extra) == CUDA_ERROR_OUT_OF_MEMORY, kind->name,
                         "nor does cuMemAlloc get more");
        }
        drop_all(kind, step);
        if (!kind->host)
                gt_check(available() + slack_bytes >= before, kind->name, "%.1f MiB free after the frees, %.1f before",
                         gt_mib(available()), gt_mib(before));
}

/* What the driver refuses as it is asked gets the driver's error, also where it would pass the limit. */
static void wrong_at_the_limit(void)
{
        CUDA_ARRAY3D_DESCRIPTOR shape = {.Width = 64, .Height = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
        CUmemAllocationProp wrong = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device}}, prop = wrong;
        CUmemGenericAllocationHandle handle;
        CUmipmappedArray array;
        CUdeviceptr p;

        prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        gt_check(cuMemCreate(&handle, 2 * limit, &prop, 1) == CUDA_ERROR_INVALID_VALUE &&
                         cuMemCreate(&handle, 2 * limit + 1, &prop, 0) == CUDA_ERROR_INVALID_VALUE &&
                         cuMemCreate(&handle, 2 * limit, &wrong, 0) == CUDA_ERROR_INVALID_VALUE &&
                         cuMemCreate(NULL, 2 * limit, &prop, 0) == CUDA_ERROR_INVALID_VALUE,
                 "created memory with flags, of no whole pages, of no kind, without a place", "refused by the driver");
        gt_check(cuMemAllocManaged(&p, 2 * limit, 0) == CUDA_ERROR_INVALID_VALUE, "managed memory without flags",
                 "refused by the driver");
        GR_MUST(cuCtxSetCurrent(NULL));
        gt_check(cuMipmappedArrayCreate(&array, &shape, 2) == CUDA_ERROR_INVALID_CONTEXT,
                 "a mipmapped array without a context", "refused by the driver");
        GR_MUST(cuCtxSetCurrent(gt.ctx));
}

/* What our cache and the driver's pools hold for nobody makes room for any other kind. */
static void make_room(const struct memory_kind *first, const struct memory_kind *second)
{
        size_t bytes = limit / 8 / GT_PAGE * GT_PAGE, got = 0;
        char name[128];

        snprintf(name, sizeof name, "%s after %s", second->name, first->name);
        for (int i = 0; i < 6; i++)
                if (!add(first, bytes))
                        gt_check(false, name, "no room for piece %d of the first", i);
        drop_all(first, bytes);
        for (int i = 0; i < 6; i++)
                got += add(second, bytes);
        gt_check(got == 6, name, "%zu of 6 pieces of %.1f MiB", got, gt_mib(bytes));
        drop_all(second, bytes);
}

/* Freed behind a kernel: the host has to wait for it before the memory can serve others. */
static void make_room_while_busy(void)
{
        size_t bytes = limit / 4 * 3 / GT_PAGE * GT_PAGE;
        uint64_t p, q;

        GR_MUST(get_async(bytes, &p));
        GR_MUST(gt_spin(&gt, stream, 20000));
        GR_MUST(put_async(bytes, p));
        gt_check(get_device(bytes, &q) == CUDA_SUCCESS, "cuMemAlloc after cuMemFreeAsync behind a kernel", "%.1f MiB",
                 gt_mib(bytes));
        if (q)
                GR_MUST(cuMemFree(q));
        GR_MUST(cuCtxSynchronize());
}

/*
 * Freed in stream order and in pieces too small for what is asked for next, behind work that still runs: the pool says
 * that it has room, and grows all the same. Neither what is given out nor what is held may pass the limit by that.
 */
static void scattered(void)
{
        size_t piece = limit / 256 / GT_PAGE * GT_PAGE, large = 3 * piece, before = available(), live = 0, now;
        bool told;
        uint64_t pieces[256], blocks[256];
        size_t n = 0, got = 0;

        while (n < 256 && get_async(piece, &pieces[n]) == CUDA_SUCCESS)
                n++;
        GR_MUST(gt_spin(&gt, stream, 200000));
        for (size_t i = 0; i < n; i += 2)
                GR_MUST(put_async(piece, pieces[i]));
        for (int tries = 0; tries < 64; tries++) {
                uint64_t p;

                if (get_async(large, &p) != CUDA_SUCCESS)
                        continue;
                blocks[got++] = p;
        }
        live = n / 2 * piece + got * large;
        told = gt_footprint(&gt, &now);
        gt_check(live <= limit, "asked for again in larger pieces", "%.1f MiB given out", gt_mib(live));
        gt_check(!told || now <= gt.context_bytes + limit + large + slack_bytes, "asked for again in larger pieces",
                 "%.1f MiB held (%s)", gt_mib(now), gt_footprint_source(&gt));
        for (size_t i = 1; i < n; i += 2)
                GR_MUST(put_async(piece, pieces[i]));
        for (size_t i = 0; i < got; i++)
                GR_MUST(put_async(large, blocks[i]));
        GR_MUST(cuCtxSynchronize());
        gt_check(available() + slack_bytes >= before, "and all freed", "%.1f MiB free", gt_mib(available()));
        gt_sleep_us(BYPASS_US);
}

/* Two mappings side by side, a large and a small one, of the second of which there is a handle again. */
static void side_by_side(size_t before)
{
        size_t small = limit / 8 / GT_PAGE * GT_PAGE, large = 4 * small, counted;
        CUmemGenericAllocationHandle again;
        uint64_t handles[2];
        CUdeviceptr p;

        GR_MUST(get_created(large, &handles[0]));
        GR_MUST(get_created(small, &handles[1]));
        GR_MUST(cuMemAddressReserve(&p, large + small, 0, 0, 0));
        GR_MUST(cuMemMap(p, large, 0, handles[0], 0));
        GR_MUST(cuMemMap(p + large, small, 0, handles[1], 0));
        GR_MUST(cuMemRelease(handles[0]));
        GR_MUST(cuMemRelease(handles[1]));
        GR_MUST(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(p + large)));
        GR_MUST(cuMemUnmap(p, large + small));
        counted = before - available();
        gt_check(counted <= small + slack_bytes, "the handle of the second one alone", "%.1f MiB counted of %.1f",
                 gt_mib(counted), gt_mib(small));
        GR_MUST(cuMemRelease(again));
        GR_MUST(cuMemAddressFree(p, large + small));
}

/* A mapping, a second handle and the first one: as long as one of them is there the memory counts. */
static void references(void)
{
        size_t bytes = limit / 4 * 3 / GT_PAGE * GT_PAGE, before = available(), least;
        CUmemGenericAllocationHandle again;
        uint64_t p;

        GR_MUST(get_mapped(bytes, &p));
        least = before - available();
        gt_check(least + slack_bytes >= bytes, "mapped, its handle released", "%.1f MiB counted", gt_mib(least));
        GR_MUST(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)p));
        GR_MUST(put_mapped(bytes, p));
        least = before - available();
        gt_check(least + slack_bytes >= bytes, "unmapped, a handle retained", "%.1f MiB counted", gt_mib(least));
        GR_MUST(cuMemRelease(again));
        gt_check(available() + slack_bytes >= before, "all released", "%.1f MiB free", gt_mib(available()));
        side_by_side(before);
}

/*
 * A destroyed pool's memory counts until it is freed. Comes last: with driver 580 a process that destroys pools before
 * their memory is freed may end in a fault inside later calls of the driver, natively too (H200, November 2026).
 */
static void destroyed_pool(void)
{
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device}};
        size_t bytes = limit / 4 * 3 / GT_PAGE * GT_PAGE, before = available();
        struct figures origin_now = {0}, now = {0};
        bool told = look(&origin_now);
        CUmemoryPool pool;
        CUdeviceptr p, q;

        GR_MUST(cuMemPoolCreate(&pool, &props));
        GR_MUST(cuMemAllocFromPoolAsync(&p, bytes, pool, stream));
        GR_MUST(cuMemAllocFromPoolAsync(&q, 4 * GT_PAGE, pool, stream));
        GR_MUST(cuMemFreeAsync(q, stream)); /* the pool still has it */
        GR_MUST(cuMemPoolDestroy(pool));
        gt_check(before - available() + slack_bytes >= bytes, "memory of a destroyed pool", "%.1f MiB counted",
                 gt_mib(before - available()));
        if (told && gt.simulated) { /* a real driver takes memory of its own meanwhile */
                look(&now);
                gt_check(now.accounted - origin_now.accounted == (double)bytes, "memory of a destroyed pool",
                         "%+.1f MiB accounted of %.1f", (now.accounted - origin_now.accounted) / MIB, gt_mib(bytes));
                /* What is freed into a pool that is there has nothing to do with it. */
                for (int i = 0; i < OTHERS; i++) {
                        CUdeviceptr other;

                        GR_MUST(cuMemAllocAsync(&other, 512, stream));
                        GR_MUST(cuMemFreeAsync(other, stream));
                }
                GR_MUST(cuCtxSynchronize());
                look(&now);
                gt_check(now.accounted - origin_now.accounted == (double)bytes, "memory of a destroyed pool",
                         "%+.1f MiB after %d frees into another", (now.accounted - origin_now.accounted) / MIB, OTHERS);
        }
        GR_MUST(cuMemFreeAsync(p, stream));
        GR_MUST(cuCtxSynchronize());
        gt_check(available() + slack_bytes >= before, "and freed", "%.1f MiB free", gt_mib(available()));
}

/* How much of the kind another context gets; held then. */
static size_t fill_in(const struct memory_kind *kind, CUcontext ctx, size_t step)
{
        CUcontext popped;

        GR_MUST(cuCtxPushCurrent(ctx));
        while (add(kind, step))
                ;
        GR_MUST(cuCtxPopCurrent(&popped));
        return count * step;
}

/*
 * In another context of the device, its_stream being one of it: refused at the same limit, which both share, and freed
 * from the first one.
 */
static void elsewhere(const char *where, CUcontext ctx, CUstream its_stream)
{
        static const struct memory_kind ways[] = {
                {"cuMemAlloc", get_device, put_device, false, false},
                {"cuMemAllocAsync", get_async, put_async, false, false},
                {"cuMemCreate", get_created, put_created, false, false},
        };
        size_t step = limit / 32 / GT_PAGE * GT_PAGE, half = limit / 2 / GT_PAGE * GT_PAGE;
        CUstream first = stream;
        CUcontext popped;

        for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
                size_t before = available(), began = 0, now = 0, got;
                bool told = gt_footprint(&gt, &began);
                char name[128];
                uint64_t p;

                snprintf(name, sizeof name, "%s, %s", ways[i].name, where);
                stream = its_stream;
                got = fill_in(&ways[i], ctx, step);
                told = told && gt_footprint(&gt, &now);
                gt_check(got <= limit && got + limit / 8 + 32 * MIB >= limit, name,
                         "refused after %.1f MiB, limit %.1f MiB", gt_mib(got), gt_mib(limit));
                gt_check(!told || now <= began + limit + slack_bytes, name, "%.1f MiB more held (%s)",
                         gt_mib(now) - gt_mib(began), gt_footprint_source(&gt));
                gt_check(get_device(limit / 4, &p) == CUDA_ERROR_OUT_OF_MEMORY, name, "nor is there more in the first");
                GR_MUST(cuCtxPushCurrent(ctx));
                GR_MUST(cuCtxSynchronize());
                GR_MUST(cuCtxPopCurrent(&popped));
                stream = first;
                drop_all(&ways[i], step);
                gt_check(available() + slack_bytes >= before, name, "%.1f MiB free after the frees, %.1f before",
                         gt_mib(available()), gt_mib(before));
                gt_sleep_us(BYPASS_US);
                GR_MUST(get_device(half, &p));
                stream = its_stream;
                got = fill_in(&ways[i], ctx, step);
                stream = first;
                gt_check(got <= limit - half && got + limit / 8 + 32 * MIB >= limit - half, name,
                         "%.1f MiB beside %.1f MiB in the first", gt_mib(got), gt_mib(half));
                GR_MUST(cuCtxPushCurrent(ctx));
                GR_MUST(cuMemFree(p)); /* the first one's, from here */
                GR_MUST(cuCtxPopCurrent(&popped));
                drop_all(&ways[i], step);
                gt_sleep_us(BYPASS_US);
        }
}

static void green_contexts(void)
{
        struct gt_green green;
        size_t before = available(), after;
        CUcontext popped;
        uint64_t p;

        if (!gt_green_open(gt.device, &green)) {
                printf("-      green contexts: this driver or device has none\n");
                return;
        }
        elsewhere("green context", green.ctx, green.stream);
        /* Its memory is the primary context's, and stays when it goes. */
        GR_MUST(cuCtxPushCurrent(green.ctx));
        GR_MUST(get_device(limit / 2, &p));
        GR_MUST(cuCtxPopCurrent(&popped));
        gt_green_close(&green);
        after = available();
        gt_check(after <= before - limit / 2 + slack_bytes, "green context destroyed", "%.1f MiB of its memory counted",
                 gt_mib(before) - gt_mib(after));
        GR_MUST(cuMemsetD8(p + limit / 2 - 4096, 1, 4096));
        GR_MUST(cuCtxSynchronize()); /* what comes next waits for the GPU for a second only */
        GR_MUST(cuMemFree(p));
}

static void several_contexts(void)
{
        __typeof__(&cuCtxCreate) create = GT_OPTIONAL(cuCtxCreate);
        size_t before = available();
        CUcontext ctx = NULL, popped;
        CUresult result = create ? create(&ctx, NULL, 0, gt.device) : CUDA_ERROR_NOT_FOUND;
        CUstream its_stream;
        uint64_t p;

        if (result != CUDA_SUCCESS) {
                printf("-      several contexts: no second one (%s)\n", gt_result_name(result));
                return;
        }
        its_stream = gt_stream();
        GR_MUST(cuCtxPopCurrent(&popped));
        elsewhere("second context", ctx, its_stream);
        GR_MUST(cuCtxPushCurrent(ctx));
        GR_MUST(get_device(limit / 2, &p));
        GR_MUST(cuCtxDestroy(ctx));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        gt_check(available() + slack_bytes >= before, "second context destroyed", "%.1f MiB free, %.1f before",
                 gt_mib(available()), gt_mib(before));
}

enum { THREADS = 4, STEPS = 400, EACH = 16 };

/* Takes and frees through all memory_kinds at once, some of it more than fits. */
static void *use_all_kinds(void *arg)
{
        uint64_t seed = 17 + (uint64_t)(uintptr_t)arg, handles[EACH] = {0};
        const struct memory_kind *from[EACH] = {0};
        size_t sizes[EACH];

        gt_attach(&gt);
        for (int step = 0; step < STEPS + EACH; step++) {
                size_t i = step < STEPS ? gt_random(&seed) % EACH : (size_t)(step - STEPS);
                const struct memory_kind *kind = &memory_kinds[gt_random(&seed) % (uint64_t)kind_count];
                CUresult result;

                if (from[i]) {
                        gr_check_must(from[i]->put(sizes[i], handles[i]), from[i]->name, __FILE__, __LINE__);
                        from[i] = NULL;
                        continue;
                }
                if (step >= STEPS || kind->host || (card && kind->on_demand))
                        continue;
                sizes[i] = (1 + gt_random(&seed) % 16) * (limit / 256 / GT_PAGE * GT_PAGE);
                result = kind->get(sizes[i], &handles[i]);
                if (result == CUDA_SUCCESS)
                        from[i] = kind;
                else if (result != CUDA_ERROR_OUT_OF_MEMORY)
                        gr_check_must(result, kind->name, __FILE__, __LINE__);
        }
        return NULL;
}

static void several_threads(void)
{
        size_t before = available();
        pthread_t threads[THREADS];

        for (int i = 0; i < THREADS; i++)
                if (pthread_create(&threads[i], NULL, use_all_kinds, (void *)(uintptr_t)i))
                        gt_die("limit_kinds: no thread");
        for (int i = 0; i < 50; i++) {
                size_t bytes;

                /* A pool in pieces may be one request over for as long as the ladder takes, as in scattered. */
                if (gt_footprint(&gt, &bytes) && bytes > limit + limit / 16 + gt.context_bytes + slack_bytes)
                        gt_check(false, "several threads", "%.1f MiB held", gt_mib(bytes));
                gt_sleep_us(2000);
        }
        for (int i = 0; i < THREADS; i++)
                pthread_join(threads[i], NULL);
        GR_MUST(cuCtxSynchronize());
        gt_check(available() + slack_bytes >= before, "several threads", "%.1f MiB free afterwards, %.1f before",
                 gt_mib(available()), gt_mib(before));
}

/*
 * What a pool of host memory keeps makes room for larger pieces, and for all else that is page-locked; and the other
 * way round.
 */
static void kept_by_host_pool(void)
{
        size_t bytes = pinned_limit / 8 / GT_PAGE * GT_PAGE;
        cuuint64_t keep_all = UINT64_MAX;
        uint64_t p;

        /* Where the driver refuses, the pool keeps nothing, and the rest holds all the more. */
        cuMemPoolSetAttribute(newer_pools[2], CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep_all);
        for (int i = 0; i < 6; i++)
                GR_MUST(get_host_pool(bytes, &held[i]));
        for (int i = 0; i < 6; i++)
                GR_MUST(put_async(bytes, held[i]));
        GR_MUST(cuCtxSynchronize());
        for (int i = 0; i < 2; i++) {
                bool got = get_host_pool(6 * bytes, &p) == CUDA_SUCCESS;

                gt_check(got, "host memory of a pool, after others", "%.1f MiB", gt_mib(6 * bytes));
                if (got)
                        GR_MUST(put_async(bytes, p));
                GR_MUST(cuCtxSynchronize());
                got = get_host(6 * bytes, &p) == CUDA_SUCCESS;
                gt_check(got, "cuMemAllocHost, after a pool", "%.1f MiB", gt_mib(6 * bytes));
                if (got)
                        GR_MUST(put_host(bytes, p));
        }
}

/* Pinned memory is counted in pages of 4 KiB: exactly as much as the limit fits, and not a page more. */
static void pinned_to_the_page(void)
{
        void *memory = NULL;
        CUresult fits, beside = CUDA_SUCCESS, more;

        if (posix_memalign(&memory, 4096, pinned_limit + 4096) != 0)
                gt_die("no memory");
        fits = cuMemHostRegister(memory, pinned_limit, 0);
        if (fits == CUDA_SUCCESS) {
                beside = cuMemHostRegister((char *)memory + pinned_limit, 1, 0);
                GR_MUST(cuMemHostUnregister(memory));
        }
        more = cuMemHostRegister(memory, pinned_limit + 1, 0);
        if (more == CUDA_SUCCESS)
                GR_MUST(cuMemHostUnregister(memory));
        gt_check(fits == CUDA_SUCCESS && beside == CUDA_ERROR_OUT_OF_MEMORY && more == CUDA_ERROR_OUT_OF_MEMORY,
                 "pinned memory, to the page", "all of the limit: %d, a byte beside it: %d, a byte more: %d", (int)fits,
                 (int)beside, (int)more);
        free(memory);
}

int main(int argc, char **argv)
{
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
        cuuint64_t keep_all = UINT64_MAX;

        GT_OPTIONS(argc, argv, "--limit=SIZE [--pinned-limit=SIZE] [--card]", GT_OPTION("limit", limit),
                   GT_OPTION("pinned-limit", pinned_limit), GT_OPTION("card", card));
        if (!limit)
                gt_die("limit_kinds needs --limit=SIZE");
        gt_open(&gt);
        stream = gt_stream();
        props.location.id = gt.device;
        GR_MUST(cuMemPoolCreate(&explicit_pool, &props));
        /* As frameworks do: nothing goes back by itself. */
        GR_MUST(cuMemPoolSetAttribute(explicit_pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep_all));
        if (!find_newer_pools()) {
                printf("-      pools of managed and of host memory: this driver has none\n");
                kind_count -= MEMORY_KINDS_NEWER;
        }
        origin_known = look(&origin);
        if (pinned_limit)
                pinned_to_the_page();
        for (int i = 0; i < kind_count; i++)
                if (memory_kinds[i].host ? pinned_limit != 0 : !(card && memory_kinds[i].on_demand))
                        fill(&memory_kinds[i]);
        if (pinned_limit && kind_count == MEMORY_KINDS)
                kept_by_host_pool();
        gt_sleep_us(BYPASS_US);
        for (int i = 0; i < kind_count; i++)
                for (int k = 0; k < kind_count; k++)
                        if (i != k && !memory_kinds[i].host && !memory_kinds[k].host)
                                make_room(&memory_kinds[i], &memory_kinds[k]);
        if (!card)
                odd_arrays();
        even_arrays();
        managed_sizes();
        trimmed_pool();
        wrong_at_the_limit();
        make_room_while_busy();
        scattered();
        references();
        several_threads();
        green_contexts();
        several_contexts();
        destroyed_pool();
        GR_MUST(cuMemPoolDestroy(explicit_pool));
        GR_MUST(cuStreamDestroy(stream));
        gt_close(&gt);
        return GR_CHECK_RESULT();
}
