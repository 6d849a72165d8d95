/*
 * The public functions and what goes on by itself, in a whole program under the library: `api MODE`. `api_modes` in
 * meson.build has the settings of each mode. Here are those of hooks; api_questions.c and api_by_itself.c have the
 * others. Exit status 1 when a check failed.
 */
#include "api.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static gpureclaim_register_function *enlist;
static gpureclaim_unregister_function *unlist;
gpureclaim_reclaim_function *reclaim;
static gpureclaim_status_function *status_of;

struct gt gt;
_Atomic unsigned purges;
_Atomic CUdeviceptr held;
static pthread_t main_thread;

struct gpureclaim_status status(void)
{
        struct gpureclaim_status status = {.struct_bytes = sizeof(status)};

        GR_CHECK_EQ(status_of(gt.device, &status), 0);
        return status;
}

CUdeviceptr allocate(size_t bytes)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemAlloc(&ptr, bytes));
        return ptr;
}

static int purge(void *arg, int device, uint64_t want_bytes)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        CUdeviceptr ptr = atomic_exchange(&held, 0);

        (void)want_bytes;
        atomic_fetch_add(&purges, 1);
        /* Whatever a hook calls, it disturbs no capture. */
        GR_MUST(cuThreadExchangeStreamCaptureMode(&mode));
        GR_CHECK_EQ(mode, CU_STREAM_CAPTURE_MODE_RELAXED);
        if (arg != &purges || device != gt.device || pthread_equal(main_thread, pthread_self()))
                return EINVAL;
        return ptr ? (int)cuMemFree(ptr) : 0;
}

static uint64_t id;

void enlist_purge(void)
{
        struct gpureclaim_reclaimable reclaimable = {
                .struct_bytes = sizeof(reclaimable), .name = "test", .purge = purge, .arg = &purges};

        GR_CHECK_EQ(enlist(&reclaimable, &id), 0);
}

/* Takes longer than a hook may by default. */
static int purge_slowly(void *arg, int device, uint64_t want_bytes)
{
        gt_sleep_us(1300000);
        return purge(arg, device, want_bytes);
}

#define DEVICES_MOST 64
#define LIST_MOST    32 /* reclaimables at a time */

/* As many as there may be, again and again: each that is taken off the list makes room. */
static void fill_list(void)
{
        struct gpureclaim_reclaimable reclaimable = {.struct_bytes = sizeof(reclaimable), .purge = purge};
        uint64_t ids[LIST_MOST], more = 4711;

        for (int round = 0; round < 2; round++) {
                for (int i = 0; i < LIST_MOST; i++)
                        GR_CHECK_EQ(enlist(&reclaimable, &ids[i]), 0);
                GR_CHECK_EQ(enlist(&reclaimable, &more), -ENOSPC);
                GR_CHECK_EQ(more, 4711);
                for (int i = 0; i < LIST_MOST; i++)
                        GR_CHECK_EQ(unlist(ids[i]), 0);
        }
}

/* What a hook gives up counts once it is with the driver, and each rung does all that comes before it. */
static void test_rungs(void)
{
        struct gpureclaim_reclaimable drops = {
                .struct_bytes = sizeof(drops), .name = "drops", .drop = purge, .arg = &purges};
        struct gpureclaim_reclaimable slow = {
                .struct_bytes = sizeof(slow), .name = "slow", .purge = purge_slowly, .arg = &purges, .limit_ms = 20000};
        CUdeviceptr ptr;

        GR_MUST(cuMemFree(allocate(16 * MIB)));
        GR_MUST(cuCtxSynchronize());
        GR_CHECK_EQ(reclaim(gt.device, "trim", 0), 16 * MIB);
        GR_MUST(cuMemFree(allocate(16 * MIB)));
        GR_MUST(cuMemFree(allocate(32 * MIB)));
        GR_MUST(cuCtxSynchronize());
        GR_CHECK_EQ(reclaim(gt.device, "trim", 16 * MIB), 16 * MIB); /* no more than that */
        GR_CHECK_EQ(reclaim(gt.device, "trim", 0), 32 * MIB);
        GR_CHECK_EQ(enlist(&drops, &id), 0);
        atomic_store(&held, allocate(100 * MIB));
        GR_CHECK_EQ(reclaim(gt.device, "sync", 0), 0);
        GR_CHECK_EQ(reclaim(gt.device, "drop", 0), 100 * MIB);
        GR_CHECK_EQ(held, 0);
        GR_CHECK_EQ(unlist(id), 0);

        GR_CHECK_EQ(enlist(&slow, &id), 0);
        atomic_store(&held, allocate(200 * MIB));
        ptr = allocate(200 * MIB); /* has the time that it asked for */
        GR_MUST(cuMemFree(ptr));
        GR_CHECK_EQ(unlist(id), 0);
}

/* GPURECLAIM_HARD_LIMIT=256MiB */
static void test_hooks(void)
{
        struct gpureclaim_reclaimable bad = {.struct_bytes = 8, .purge = purge};
        struct gpureclaim_reclaimable good = {.struct_bytes = sizeof(good), .purge = purge};
        struct gpureclaim_status small = {.struct_bytes = 4 * sizeof(uint64_t), .peak_live_bytes = 12345};
        struct {
                struct gpureclaim_status status;
                uint64_t more;
        } newer = {{.struct_bytes = sizeof(newer)}, 12345};
        CUdeviceptr ptr;
        CUresult result;

        GR_CHECK_EQ(enlist(&bad, &id), -EINVAL);
        GR_CHECK_EQ(enlist(&good, NULL), -EINVAL);
        GR_CHECK_EQ(unlist(4711), -ENOENT);
        GR_CHECK_EQ(reclaim(0, "trim", 0), -ENODEV);
        GR_CHECK_EQ(status_of(0, &small), -ENODEV);
        enlist_purge(); /* before the driver is there */
        gt_open(&gt);
        GR_CHECK_EQ(reclaim(-1, "trim", 0), -ENODEV);
        GR_CHECK_EQ(reclaim(DEVICES_MOST, "trim", 0), -ENODEV);
        GR_CHECK_EQ(reclaim(gt.device, NULL, 0), -EINVAL);
        GR_CHECK_EQ(reclaim(gt.device, "neighbour", 0), -EINVAL); /* no rung of this function */
        atomic_store(&held, allocate(200 * MIB));
        GR_CHECK_EQ(status().live_bytes, 200 * MIB);
        GR_CHECK_EQ(status().hard_limit_bytes, 256 * MIB);
        GR_CHECK(status().device_free_bytes > 0 && status().device_free_bytes < status().device_total_bytes);
        GR_CHECK_EQ(status_of(gt.device, &small), 0);
        GR_CHECK_EQ(status_of(-1, &small), -EINVAL);
        GR_CHECK_EQ(status_of(gt.device, NULL), -EINVAL);
        GR_CHECK_EQ(status_of(DEVICES_MOST, &small), -EINVAL);
        GR_CHECK_EQ(status_of(DEVICES_MOST - 1, &small), -ENODEV);
        GR_CHECK_EQ(small.live_bytes, 200 * MIB);
        GR_CHECK_EQ(small.peak_live_bytes, 12345); /* beyond what the caller knows */
        GR_CHECK_EQ(status_of(gt.device, &newer.status), 0);
        GR_CHECK_EQ(newer.status.struct_bytes, sizeof(newer.status));
        GR_CHECK_EQ(newer.more, 12345); /* beyond what the library knows */
        small.struct_bytes--;
        GR_CHECK_EQ(status_of(gt.device, &small), -EINVAL);

        ptr = allocate(200 * MIB); /* fails without the hook */
        GR_CHECK_EQ(purges, 1);
        GR_CHECK_EQ(held, 0);
        GR_MUST(cuMemFree(ptr));
        GR_CHECK_EQ(reclaim(gt.device, "no such thing", 0), -EINVAL);
        GR_CHECK_EQ(reclaim(gt.device, "sync", 0), 200 * MIB);
        GR_CHECK_EQ(status().cached_bytes, 0);

        GR_CHECK_EQ(unlist(id), 0);
        GR_CHECK_EQ(unlist(id), -ENOENT);
        purges = 0;
        result = cuMemAlloc(&ptr, 300 * MIB);
        GR_CHECK_EQ(result, CUDA_ERROR_OUT_OF_MEMORY);
        GR_CHECK_EQ(purges, 0);
        fill_list();
        gt_sleep_us(300000); /* frees bypass the cache after a failure */
        test_rungs();
}

static _Atomic bool hook_inside, hook_may_end;

static int purge_without_end(void *arg, int device, uint64_t want_bytes)
{
        (void)arg, (void)device, (void)want_bytes;
        atomic_store(&hook_inside, true);
        while (!atomic_load(&hook_may_end))
                gt_sleep_us(1000);
        return 0;
}

/*
 * GPURECLAIM_HARD_LIMIT=256MiB. Who takes a hook that does not come back off the list is told that it still runs. The
 * process ends even where the hook does not.
 */
static void busy(bool ends)
{
        struct gpureclaim_reclaimable endless = {
                .struct_bytes = sizeof(endless), .name = "endless", .purge = purge_without_end, .limit_ms = 1};
        CUdeviceptr ptr;
        int status = -1;
        pid_t child;

        gt_open(&gt);
        GR_CHECK_EQ(enlist(&endless, &id), 0);
        GR_CHECK_EQ(cuMemAlloc(&ptr, 300 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
        while (!atomic_load(&hook_inside))
                gt_sleep_us(1000);
        child = fork();
        if (child == 0)
                _exit(unlist(id) == 0 ? EXIT_SUCCESS : EXIT_FAILURE); /* the hook does not run there */
        GR_CHECK(child > 0 && waitpid(child, &status, 0) == child);
        GR_CHECK_EQ(status, 0);
        GR_CHECK_EQ(unlist(id), -EBUSY);
        GR_CHECK_EQ(unlist(id), -ENOENT);
        GR_CHECK_EQ(unlist(UINT64_MAX), -ENOENT); /* no number frees its place */
        for (int i = 1; i < LIST_MOST; i++)       /* its place is not given to others: it still runs */
                GR_CHECK_EQ(enlist(&endless, &id), 0);
        GR_CHECK_EQ(enlist(&endless, &id), -ENOSPC);
        atomic_store(&hook_may_end, ends);
        for (int i = 0; ends && i < 100; i++) { /* nor after it has come back */
                GR_CHECK_EQ(enlist(&endless, &id), -ENOSPC);
                gt_sleep_us(1000);
        }
}

static void test_busy(void)
{
        busy(true);
}

static void test_endless(void)
{
        busy(false);
}

/* GPURECLAIM_HARD_LIMIT=256MiB. A hook for which no thread can be made does not run; it runs the next time. */
static void test_no_worker(void)
{
        struct rlimit before, none;
        CUdeviceptr ptr;
        CUresult result;

        gt_open(&gt);
        enlist_purge();
        atomic_store(&held, allocate(200 * MIB));
        GR_CHECK_EQ(getrlimit(RLIMIT_AS, &before), 0);
        none = before;
        none.rlim_cur = 0;
        GR_CHECK_EQ(setrlimit(RLIMIT_AS, &none), 0);
        result = cuMemAlloc(&ptr, 200 * MIB);
        GR_CHECK_EQ(setrlimit(RLIMIT_AS, &before), 0);
        GR_CHECK_EQ(result, CUDA_ERROR_OUT_OF_MEMORY);
        GR_CHECK_EQ(purges, 0);
        ptr = allocate(200 * MIB);
        GR_CHECK_EQ(purges, 1);
        GR_MUST(cuMemFree(ptr));
}

/* How often the library says what while act is called. */
static unsigned said(void (*act)(void), const char *what)
{
        char text[4096];
        int ends[2], shown = dup(STDERR_FILENO);
        unsigned count = 0;
        ssize_t bytes;

        GR_CHECK_EQ(pipe(ends), 0);
        dup2(ends[1], STDERR_FILENO);
        act();
        if (write(ends[1], ".", 1) != 1)
                gt_die("the pipe takes nothing");
        dup2(shown, STDERR_FILENO);
        bytes = read(ends[0], text, sizeof(text) - 1);
        text[bytes > 0 ? bytes : 0] = '\0';
        for (const char *at = strstr(text, what); at; at = strstr(at + 1, what))
                count++;
        return count;
}

static int purge_and_fail(void *arg, int device, uint64_t want_bytes)
{
        (void)device, (void)want_bytes;
        return *(int *)arg;
}

static void purge_all(void)
{
        GR_CHECK_EQ(reclaim(gt.device, "purge", MIB), 0);
}

/* Hooks fail by the number of an error or by its negative, which is told alike. */
static void test_failing_hooks(void)
{
        static int errors[] = {EPERM, -EPERM};
        uint64_t ids[2];

        gt_open(&gt);
        for (int i = 0; i < 2; i++) {
                struct gpureclaim_reclaimable failing = {
                        .struct_bytes = sizeof(failing), .purge = purge_and_fail, .arg = &errors[i]};

                GR_CHECK_EQ(enlist(&failing, &ids[i]), 0);
        }
        GR_CHECK_EQ(said(purge_all, strerror(EPERM)), 2);
        for (int i = 0; i < 2; i++)
                GR_CHECK_EQ(unlist(ids[i]), 0);
}

/* It counts what pools took while there was none. */
static void test_late_limit(void)
{
        gpureclaim_set_limit_function *set_limit;
        void *found = dlsym(RTLD_DEFAULT, "gpureclaim_set_limit");
        CUdeviceptr ptr;

        memcpy(&set_limit, &found, sizeof(set_limit));
        gt_open(&gt);
        GR_MUST(cuMemAllocAsync(&ptr, 200 * MIB, NULL));
        GR_CHECK_EQ(set_limit(gt.device, 300 * MIB), 0);
        GR_CHECK_EQ(cuMemAlloc(&ptr, 200 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
}

/* Memory of destroyed pools counts with the pages that it is alone in, until it is freed. */
static void test_orphans(void)
{
        enum { POOLS = 41 };
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
        uint64_t before;
        CUdeviceptr ptrs[POOLS];
        CUmemoryPool pool;

        gt_open(&gt);
        GR_MUST(cuMemFree(allocate(4 * MIB))); /* there is a status from now on */
        before = status().reserved_bytes;
        for (int i = 0; i < POOLS; i++) {
                GR_MUST(cuMemPoolCreate(&pool, &props));
                GR_MUST(cuMemAllocFromPoolAsync(&ptrs[i], MIB + 512, pool, NULL));
                GR_MUST(cuMemPoolDestroy(pool));
        }
        for (size_t left = POOLS; left > 0; left--) {
                GR_CHECK_EQ(status().reserved_bytes, before + left * 2 * MIB);
                GR_MUST(cuMemFreeAsync(ptrs[left - 1], NULL));
        }
        GR_CHECK_EQ(status().reserved_bytes, before);
}

/* What this process exported and imports again is in its account already, under each name that descriptors have. */
static void test_own_import(void)
{
        static const int types[] = {CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, 9 /* a dma-buf, of newer toolkits */};
        CUexternalMemory memory;
        CUdeviceptr ptr;

        gt_open(&gt);
        for (int i = 0; i < 2; i++) {
                CUDA_EXTERNAL_MEMORY_HANDLE_DESC descriptor = {.type = (CUexternalMemoryHandleType)types[i],
                                                               .size = 4 * MIB};

                ptr = allocate(4 * MIB);
                GR_MUST(cuMemGetHandleForAddressRange(&descriptor.handle.fd, ptr, 4 * MIB,
                                                      CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
                GR_MUST(cuImportExternalMemory(&memory, &descriptor));
                GR_CHECK_EQ(status().imported_bytes, 0);
                GR_MUST(cuDestroyExternalMemory(memory));
                GR_MUST(cuMemFree(ptr));
                GR_CHECK_EQ(status().cached_bytes, 0); /* somebody may have it still */
        }
}

static CUresult export_range(CUdeviceptr begin, CUdeviceptr end)
{
        int fd = -1;
        CUresult result =
                cuMemGetHandleForAddressRange(&fd, begin, end - begin, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);

        if (fd >= 0)
                close(fd);
        return result;
}

/*
 * A large block begins with a page of the host, as natively. The pages around one that does not begin or end with a
 * page can be exported, as UCX does, and no page more. It is that block which serves nobody else then, not the one
 * before it in the first page.
 */
static void test_export_pages(void)
{
        enum { BYTES = 512 * KIB + 5, HOST_PAGE = 4096 };
        CUdeviceptr before, ptr, begin, end;
        uint64_t cached_bytes;

        gt_open(&gt);
        allocate(3 * MIB + 5);
        ptr = allocate(3 * MIB);
        GR_CHECK_EQ(export_range(ptr, ptr + 3 * MIB), CUDA_SUCCESS);
        before = allocate(BYTES);
        ptr = allocate(BYTES);
        begin = ptr / HOST_PAGE * HOST_PAGE;
        end = (ptr + BYTES + HOST_PAGE - 1) / HOST_PAGE * HOST_PAGE;
        GR_CHECK(before < begin && begin < ptr && begin < before + BYTES + 512);
        GR_CHECK_EQ(export_range(begin - HOST_PAGE, end), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(export_range(begin, end + HOST_PAGE), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(export_range(begin, end), CUDA_SUCCESS);
        cached_bytes = status().cached_bytes;
        GR_MUST(cuMemFree(before));
        GR_CHECK(status().cached_bytes >= cached_bytes + BYTES);
        cached_bytes = status().cached_bytes;
        GR_MUST(cuMemFree(ptr));
        GR_CHECK(status().cached_bytes <= cached_bytes);
        GR_CHECK_EQ(export_range(begin, end), CUDA_ERROR_INVALID_VALUE);
}

static _Atomic bool hook_started, hook_ended, late_hook_ended;

static int purge_while_exiting(void *arg, int device, uint64_t want_bytes)
{
        (void)arg;
        (void)device;
        (void)want_bytes;
        atomic_store(&hook_started, true);
        while (!atomic_load(&late_hook_ended))
                gt_sleep_us(1000);
        gt_sleep_us(30000);
        GR_CHECK_EQ(cuMemFree(atomic_exchange(&held, 0)), CUDA_SUCCESS);
        atomic_store(&hook_ended, true);
        return 0;
}

/* Nobody waits for it any more when the other one begins, and it is back before that one. */
static int purge_too_late(void *arg, int device, uint64_t want_bytes)
{
        (void)arg, (void)device, (void)want_bytes;
        while (!atomic_load(&hook_started))
                gt_sleep_us(1000);
        gt_sleep_us(30000);
        atomic_store(&late_hook_ended, true);
        return 0;
}

static void *need_more(void *arg)
{
        CUdeviceptr ptr;

        gt_attach(&gt);
        cuMemAlloc(&ptr, 200 * MIB);
        return arg;
}

/* Runs after the library's own: registered before it. */
static void look_at_exit(void)
{
        if (hook_ended && !GR_CHECK_RESULT())
                return;
        fprintf(stderr, "a hook that has begun is not waited for\n");
        _exit(1);
}

/* GPURECLAIM_HARD_LIMIT=256MiB. The program ends while two hooks are at work, one of which calls the driver. */
static void test_exit(void)
{
        struct gpureclaim_reclaimable late = {
                .struct_bytes = sizeof(late), .name = "late", .purge = purge_too_late, .limit_ms = 1};
        struct gpureclaim_reclaimable reclaimable = {
                .struct_bytes = sizeof(reclaimable), .name = "test", .purge = purge_while_exiting};
        pthread_t thread;

        atexit(look_at_exit);
        gt_open(&gt);
        GR_CHECK_EQ(enlist(&late, &id), 0);
        GR_CHECK_EQ(enlist(&reclaimable, &id), 0);
        atomic_store(&held, allocate(200 * MIB));
        pthread_create(&thread, NULL, need_more, NULL);
        while (!atomic_load(&hook_started))
                gt_sleep_us(100);
}

int main(int argc, char **argv)
{
        static const struct {
                const char *name;
                void (*run)(void);
        } modes[] = {
                {"hooks", test_hooks},
                {"busy", test_busy},
                {"endless", test_endless},
                {"no-worker", test_no_worker},
                {"failing", test_failing_hooks},
                {"late-limit", test_late_limit},
                {"orphans", test_orphans},
                {"own-import", test_own_import},
                {"export-pages", test_export_pages},
                {"exit", test_exit},
                {"questions", test_questions},
                {"widths", test_widths},
                {"flags", test_flags},
                {"range", test_range},
                {"range-error", test_range_error},
                {"decay", test_decay},
                {"no-decay", test_no_decay},
                {"graph-memory", test_graph_memory},
                {"moves", test_moves},
                {"threshold", test_threshold},
                {"soft-limit", test_soft_limit},
                {"pinned-stays", test_pinned_stays},
                {"spill", test_spill},
                {"wait", test_wait},
                {"proactive", test_proactive},
                {"no-proactive", test_no_proactive},
        };
        const char *mode = argc > 1 ? argv[1] : "";

        main_thread = pthread_self();
        enlist = (gpureclaim_register_function *)dlsym(RTLD_DEFAULT, "gpureclaim_register");
        unlist = (gpureclaim_unregister_function *)dlsym(RTLD_DEFAULT, "gpureclaim_unregister");
        reclaim = (gpureclaim_reclaim_function *)dlsym(RTLD_DEFAULT, "gpureclaim_reclaim");
        status_of = (gpureclaim_status_function *)dlsym(RTLD_DEFAULT, "gpureclaim_status");
        if (!enlist || !unlist || !reclaim || !status_of) {
                fprintf(stderr, "the library is not there\n");
                return 1;
        }
        for (size_t i = 0; i < sizeof(modes) / sizeof(modes[0]); i++)
                if (strcmp(mode, modes[i].name) == 0) {
                        modes[i].run();
                        return GR_CHECK_RESULT();
                }
        return 2;
}
