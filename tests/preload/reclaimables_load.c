/*
 * Reclaimables under load, in a whole program: eight threads that allocate more than the limit has room for, while
 * hooks free, allocate, fail, hang and unregister themselves. Nothing may be lost or used by two, and the ones that
 * fail or hang are named in the log.
 *
 *   reclaimables_load [--limit=256MiB] [--seconds=3]     under GPURECLAIM_HARD_LIMIT of that size, GPURECLAIM_LOG=warn
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "gpureclaim.h"
#include "gputest.h"

enum { THREADS = 8, BLOCKS = 6, HOARD_MOST = 256, WORDS = 256, HANG_US = 400000 };

static gpureclaim_register_function *enlist;
static gpureclaim_unregister_function *unlist;
static struct gt gt;
static size_t limit = 256 * MIB;
static double end_us;
static _Atomic unsigned served, refused, wrong, gave, allocated, failed, hung, left;
static _Atomic uint64_t leaver_id;

/* What the threads put aside and only a hook frees: without hooks the program would come to a stop. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static CUdeviceptr hoard[HOARD_MOST];
static unsigned hoarded;

static int give(void *arg, int device, uint64_t want_bytes)
{
        int rc = 0;

        (void)arg;
        (void)device;
        (void)want_bytes;
        pthread_mutex_lock(&lock);
        while (hoarded > 0 && rc == 0)
                rc = (int)cuMemFree(hoard[--hoarded]);
        pthread_mutex_unlock(&lock);
        atomic_fetch_add(&gave, 1);
        return rc;
}

/* Needs memory itself, and frees it in another order. */
static int allocating(void *arg, int device, uint64_t want_bytes)
{
        CUdeviceptr a, b;

        (void)device;
        (void)want_bytes;
        if (cuCtxSetCurrent(arg) != CUDA_SUCCESS)
                return 1;
        if (cuMemAlloc(&a, 4096) == CUDA_SUCCESS) {
                if (cuMemAlloc(&b, 64 * KIB) == CUDA_SUCCESS)
                        GR_MUST(cuMemFree(b));
                GR_MUST(cuMemFree(a));
                atomic_fetch_add(&allocated, 1);
        }
        return 0;
}

static int failing(void *arg, int device, uint64_t want_bytes)
{
        (void)arg;
        (void)device;
        (void)want_bytes;
        atomic_fetch_add(&failed, 1);
        return 5;
}

static int hanging(void *arg, int device, uint64_t want_bytes)
{
        (void)arg;
        (void)device;
        (void)want_bytes;
        atomic_fetch_add(&hung, 1);
        gt_sleep_us(HANG_US);
        return 0;
}

static int leaving(void *arg, int device, uint64_t want_bytes)
{
        uint64_t id = atomic_exchange(&leaver_id, 0);

        (void)arg;
        (void)device;
        (void)want_bytes;
        if (id && unlist(id) == 0)
                atomic_fetch_add(&left, 1);
        return 0;
}

static uint64_t add(const char *name, gpureclaim_hook *purge, void *arg, uint32_t limit_ms)
{
        struct gpureclaim_reclaimable hook = {
                .struct_bytes = sizeof(hook), .name = name, .purge = purge, .arg = arg, .limit_ms = limit_ms};
        uint64_t id = 0;

        GR_CHECK_EQ(enlist(&hook, &id), 0);
        return id;
}

/* Comes and goes while its kind is being called. */
static void *come_and_go(void *arg)
{
        (void)arg;
        while (gt_now_us() < end_us) {
                uint64_t id = add("coming and going", allocating, gt.ctx, 100);

                if (atomic_load(&leaver_id) == 0)
                        atomic_store(&leaver_id, add("leaving", leaving, NULL, 100));
                gt_sleep_us(2000);
                GR_CHECK_EQ(unlist(id), 0);
        }
        return NULL;
}

struct owned {
        CUdeviceptr at;
        uint32_t value;
};

static void put_aside(struct owned *block)
{
        bool taken = false;

        pthread_mutex_lock(&lock);
        if (hoarded < HOARD_MOST) {
                hoard[hoarded++] = block->at;
                taken = true;
        }
        pthread_mutex_unlock(&lock);
        if (!taken)
                GR_MUST(cuMemFree(block->at));
        block->at = 0;
}

static void *load(void *arg)
{
        unsigned thread = (unsigned)(uintptr_t)arg;
        struct owned blocks[BLOCKS] = {{0}};
        uint64_t seed = thread + 1;
        CUdeviceptr counter;
        uint32_t bad;
        CUstream stream;

        gt_attach(&gt);
        stream = gt_stream();
        while (cuMemAlloc(&counter, sizeof(bad)) != CUDA_SUCCESS)
                gt_sleep_us(1000);
        GR_MUST(cuMemsetD8Async(counter, 0, sizeof(bad), stream));
        for (uint32_t i = 0; gt_now_us() < end_us; i++) {
                struct owned *block = &blocks[gt_random(&seed) % BLOCKS];
                size_t bytes = 4096 + gt_random(&seed) % (limit / 24);

                if (block->at) {
                        GR_MUST(gt_count_diff(&gt, stream, block->at, block->value, WORDS, counter));
                        if (gt_random(&seed) % 4 == 0) {
                                GR_MUST(cuMemFree(block->at));
                                block->at = 0;
                        } else {
                                put_aside(block);
                        }
                }
                if (cuMemAlloc(&block->at, bytes) != CUDA_SUCCESS) {
                        atomic_fetch_add(&refused, 1);
                        block->at = 0;
                        continue;
                }
                atomic_fetch_add(&served, 1);
                block->value = thread << 24 | (i & 0xffffff);
                GR_MUST(gt_fill(&gt, stream, block->at, block->value, WORDS));
        }
        for (int i = 0; i < BLOCKS; i++)
                if (blocks[i].at) {
                        GR_MUST(gt_count_diff(&gt, stream, blocks[i].at, blocks[i].value, WORDS, counter));
                        GR_MUST(cuMemFree(blocks[i].at));
                }
        GR_MUST(cuStreamSynchronize(stream));
        GR_MUST(cuMemcpyDtoH(&bad, counter, sizeof(bad)));
        atomic_fetch_add(&wrong, bad);
        GR_MUST(cuMemFree(counter));
        GR_MUST(cuStreamDestroy(stream));
        return NULL;
}

static char said[1 << 16];

/* Whether the log has a line with both. */
static bool line_with(const char *a, const char *b)
{
        for (const char *line = said, *next; *line; line = next) {
                const char *found_a = strstr(line, a), *found_b = strstr(line, b);

                next = strchr(line, '\n');
                next = next ? next + 1 : line + strlen(line);
                if (found_a && found_b && found_a < next && found_b < next)
                        return true;
        }
        return false;
}

int main(int argc, char **argv)
{
        struct gpureclaim_status status = {.struct_bytes = sizeof(status)};
        pthread_t threads[THREADS], guest;
        double seconds = 3;
        FILE *log = tmpfile();
        int terminal = dup(STDERR_FILENO);
        size_t bytes;

        GT_OPTIONS(argc, argv, "[--limit=SIZE] [--seconds=N]", GT_OPTION("limit", limit),
                   GT_OPTION("seconds", seconds));
        enlist = (gpureclaim_register_function *)dlsym(RTLD_DEFAULT, "gpureclaim_register");
        unlist = (gpureclaim_unregister_function *)dlsym(RTLD_DEFAULT, "gpureclaim_unregister");
        if (!enlist || !unlist)
                gt_die("the library is not there");
        if (!log || terminal < 0)
                gt_die("no temporary file");
        gt_open(&gt);
        fflush(stderr);
        dup2(fileno(log), STDERR_FILENO);
        add("giving", give, NULL, 30000);
        add("failing", failing, NULL, 0);
        add("hanging", hanging, NULL, 20);
        add("allocating", allocating, gt.ctx, 30000);
        end_us = gt_now_us() + seconds * 1e6;
        pthread_create(&guest, NULL, come_and_go, NULL);
        for (unsigned i = 0; i < THREADS; i++)
                pthread_create(&threads[i], NULL, load, (void *)(uintptr_t)i);
        for (unsigned i = 0; i < THREADS; i++)
                pthread_join(threads[i], NULL);
        pthread_join(guest, NULL);
        give(NULL, gt.device, 0);
        gt_sleep_us(2 * HANG_US); /* a hook may still be on its way out */
        dup2(terminal, STDERR_FILENO);

        rewind(log);
        bytes = fread(said, 1, sizeof(said) - 1, log);
        said[bytes] = '\0';
        printf("served %u, refused %u; hooks: gave %u, allocated %u, failed %u, hung %u, left %u; %u words wrong\n",
               served, refused, gave, allocated, failed, hung, left, wrong);
        GR_CHECK_EQ(wrong, 0);
        GR_CHECK(served > 0 && gave > 1 && allocated > 0 && failed > 0 && hung > 0 && left > 0);
        GR_CHECK(line_with("reclaimable failing:", "failed"));
        GR_CHECK(line_with("reclaimable failing:", "left out"));
        GR_CHECK(line_with("reclaimable hanging:", "did not return in time"));
        GR_CHECK(!line_with("reclaimable giving:", ""));
        GR_CHECK_EQ(((gpureclaim_status_function *)dlsym(RTLD_DEFAULT, "gpureclaim_status"))(gt.device, &status), 0);
        GR_CHECK_EQ(status.live_bytes, 0);
        GR_CHECK(status.peak_reserved_bytes <= limit);
        return GR_CHECK_RESULT();
}
