/*
 * What pools would reserve for a recorded trace: the library's own core on a driver that only counts, beside a model of
 * PyTorch's allocator. No GPU and no time: what the driver's calls would cost is modelled from an H200's figures.
 *
 *   policies [--lag=DURATION] [--streams] [--verbose] TRACE.csv...
 *
 * --lag: how far the GPU is behind the host. --streams: the program has streams of its own, whose overlap a barrier
 * would cost.
 */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "alloc/pool.h"
#include "base/log.h"
#include "base/size.h"
#include "core.h"
#include "torch_model.h"
#include "trace.h"

#define ALLOC_US      35 /* cuMemAlloc */
#define ALLOC_SLAB_US 2  /* the same where it cuts a small block from a slab that it has */
#define RELEASE_US    50 /* cuMemFreeAsync and its part of a synchronisation */
#define MAP_US        55 /* an extent, beside kernels: cuMemCreate, cuMemMap, cuMemSetAccess */
#define UNMAP_US      50 /* cuMemUnmap, cuMemRelease */
#define REMAP_US      38 /* of an extent that there is: cuMemMap, cuMemSetAccess */
#define UNMAP_ONLY_US 28
#define ADDRESSES     (UINT64_C(1) << 46) /* where reserved addresses begin */

static struct {
        uint64_t now_ns, lag_ns; /* lag_ns: how far the GPU is behind the host */
        bool streams;            /* the program gives work to more than the default stream */
        uint64_t barriers;
        uint64_t next_small, next_large, next_address;
        uint64_t allocs, releases;
        uint64_t cost_us;
} counting;

static void add_cost(uint64_t us)
{
        counting.cost_us += us;
        counting.now_ns += us * 1000;
}

static int count_alloc(void *context, size_t bytes, uint64_t *ret_ptr)
{
        (void)context;
        counting.allocs++;
        if (bytes <= GR_SMALL_MAX_BYTES) {
                uint64_t size = (bytes + 511) & ~UINT64_C(511), taken = counting.next_small % GR_PAGE_BYTES;

                if (taken + size > GR_PAGE_BYTES)
                        counting.next_small += GR_PAGE_BYTES - taken;
                add_cost(taken > 0 && taken + size <= GR_PAGE_BYTES ? ALLOC_SLAB_US : ALLOC_US);
                *ret_ptr = counting.next_small;
                counting.next_small += size;
        } else {
                add_cost(ALLOC_US);
                *ret_ptr = counting.next_large;
                counting.next_large += gr_footprint_bytes(bytes);
        }
        return 0;
}

static int count_free(uint64_t ptr)
{
        (void)ptr;
        counting.releases++;
        return 0;
}

static int count_release(void *context, const uint64_t *ptrs, size_t count, size_t *ret_done)
{
        (void)context, (void)ptrs;
        counting.releases += count;
        add_cost(count * RELEASE_US);
        *ret_done = count;
        return 0;
}

static int count_reserve(void *context, size_t bytes, uint64_t *ret_ptr)
{
        (void)context;
        *ret_ptr = counting.next_address;
        counting.next_address += bytes;
        return 0;
}

static void count_unreserve(uint64_t ptr, size_t bytes)
{
        (void)ptr, (void)bytes;
}

static int count_map(void *context, int device, uint64_t ptr, size_t bytes, uint64_t *handle)
{
        (void)context, (void)device, (void)ptr, (void)bytes;
        counting.allocs++;
        add_cost(*handle ? REMAP_US : MAP_US);
        *handle = 1;
        return 0;
}

static int count_unmap(void *context, uint64_t ptr, size_t bytes, uint64_t handle)
{
        (void)context, (void)ptr, (void)bytes;
        counting.releases++;
        add_cost(handle ? UNMAP_US : UNMAP_ONLY_US);
        return 0;
}

static int count_info(void *context, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes)
{
        (void)context;
        *ret_free_bytes = *ret_total_bytes = UINT64_C(1) << 37;
        return 0;
}

static int event_create(void *context, void **ret_event)
{
        (void)context;
        *ret_event = calloc(1, sizeof(uint64_t));
        return *ret_event ? 0 : -ENOMEM;
}

static void event_destroy(void *context, void *event)
{
        (void)context;
        free(event);
}

static int event_query(void *event)
{
        return *(uint64_t *)event + counting.lag_ns <= counting.now_ns ? 0 : -EAGAIN;
}

static int context_record(void *context, void *event)
{
        (void)context;
        *(uint64_t *)event = counting.now_ns;
        return 0;
}

static int context_wait(void *context, void *event)
{
        (void)context, (void)event;
        counting.barriers++;
        return 0;
}

static int context_sync(void *context)
{
        (void)context;
        return 0;
}

static void trim_pools(void *context, int device)
{
        (void)context, (void)device;
}

static uint64_t now_ns(void)
{
        return counting.now_ns;
}

static void sleep_ns(uint64_t ns)
{
        counting.now_ns += ns;
}

#define COMMON_OPERATIONS                                                                                              \
        .mem_alloc = count_alloc, .mem_free = count_free, .mem_release = count_release, .mem_info = count_info,        \
        .event_create = event_create, .event_destroy = event_destroy, .event_query = event_query,                      \
        .context_record = context_record, .context_wait = context_wait, .context_sync = context_sync,                  \
        .trim_pools = trim_pools, .now_ns = now_ns, .sleep_ns = sleep_ns

static const struct gr_driver driver = {COMMON_OPERATIONS, .mem_reserve = count_reserve,
                                        .mem_unreserve = count_unreserve, .mem_map = count_map,
                                        .mem_unmap = count_unmap};
static const struct gr_driver plain_driver = {COMMON_OPERATIONS};

static double real_seconds(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void print_row(const struct gr_trace *trace, const char *name, uint64_t reserved, uint64_t allocs,
                      uint64_t releases, uint64_t cost_us)
{
        char text[GR_SIZE_TEXT_BYTES];

        printf("  %-30s %12s %7.3f %9" PRIu64 " %9" PRIu64 " %9.2f", name, gr_size_format(reserved, text, sizeof(text)),
               (double)reserved / (double)trace->peak_live_bytes, allocs, releases,
               (double)cost_us / (double)trace->count);
}

static int play_trace(const struct gr_trace *trace, const char *name, const struct gr_config *config, bool mapped)
{
        static struct gr_core core;
        static struct gr_parts parts;
        uint64_t *ptrs = calloc(trace->slot_count, sizeof(*ptrs));
        struct gr_context *context;
        double begin;
        int rc = 0;

        if (!ptrs)
                return -ENOMEM;
        counting.now_ns = 1;
        counting.next_small = UINT64_C(1) << 44;
        counting.next_large = UINT64_C(1) << 45;
        counting.next_address = ADDRESSES;
        counting.allocs = counting.releases = counting.cost_us = counting.barriers = 0;
        gr_core_init(&core, &parts, mapped ? &driver : &plain_driver, config);
        context = gr_core_context_add(&core, &core, 0);
        atomic_store(&core.streams_overlap, counting.streams);
        begin = real_seconds();
        for (size_t i = 0; context && i < trace->count && !rc; i++) {
                const struct gr_trace_op *op = &trace->ops[i];

                if (counting.now_ns < op->time_ns)
                        counting.now_ns = op->time_ns;
                if (op->is_free)
                        rc = gr_pool_free(&core, ptrs[op->slot]);
                else
                        rc = gr_pool_alloc(context, op->bytes, &ptrs[op->slot]);
        }
        if (context && !rc) {
                print_row(trace, name, atomic_load(&core.devices[0].peak_reserved_bytes), counting.allocs,
                          counting.releases, counting.cost_us);
                printf(" %9" PRIu64 " %9.0f\n", counting.barriers,
                       (real_seconds() - begin) * 1e9 / (double)trace->count);
        }
        gr_core_destroy(&core);
        free(ptrs);
        return context ? rc : -ENOMEM;
}

static int evaluate_trace(const char *path)
{
        static const struct {
                const char *name;
                struct gr_config config;
                bool mapped;
        } policies[] = {
                {"bins", {.in_order = true, .pool = GR_POOL_BINS}, true},
                {"split", {.in_order = true, .pool = GR_POOL_SPLIT}, true},
                {"split, no mapped memory", {.in_order = true, .pool = GR_POOL_SPLIT}, false},
                {"auto", {.in_order = true, .pool = GR_POOL_AUTO}, true},
        };
        struct gr_trace trace;
        uint64_t segments, reserved;
        char text[GR_SIZE_TEXT_BYTES];
        size_t line;
        int rc = gr_trace_read(path, &trace, &line);

        if (rc) {
                fprintf(stderr, "%s, line %zu: %s\n", path, line, strerror(-rc));
                return rc;
        }
        printf("%s: %zu operations, peak of live memory %s\n", path, trace.count,
               gr_size_format(trace.peak_live_bytes, text, sizeof(text)));
        printf("  %-30s %12s %7s %9s %9s %9s %9s %9s\n", "", "reserved", "ratio", "allocs", "releases", "us per op",
               "barriers", "ns of ours");
        for (size_t i = 0; i < sizeof(policies) / sizeof(policies[0]) && !rc; i++)
                rc = play_trace(&trace, policies[i].name, &policies[i].config, policies[i].mapped);
        for (int expandable = 0; expandable < 2 && !rc; expandable++) {
                reserved = gr_torch_model(&trace, expandable, &segments);
                print_row(&trace, expandable ? "PyTorch's rules, expandable" : "PyTorch's rules", reserved, segments, 0,
                          segments * ALLOC_US);
                printf(" %9s %9s\n", "-", "-");
        }
        if (rc)
                fprintf(stderr, "%s: %s\n", path, strerror(-rc));
        gr_trace_free(&trace);
        return rc;
}

int main(int argc, char **argv)
{
        static const struct option flags[] = {
                {"lag", required_argument, NULL, 'l'},
                {"streams", no_argument, NULL, 's'},
                {"verbose", no_argument, NULL, 'v'},
                {NULL, 0, NULL, 0},
        };
        bool understood = true;
        int flag, rc = 0;

        while ((flag = getopt_long(argc, argv, "", flags, NULL)) != -1)
                if (flag == 's')
                        counting.streams = true;
                else if (flag == 'v')
                        gr_log_set_level(GR_LOG_DEBUG);
                else
                        understood &= flag == 'l' && gr_duration_parse(optarg, &counting.lag_ns) == 0;
        if (!understood || optind == argc) {
                fprintf(stderr, "usage: policies [--lag=DURATION] [--streams] [--verbose] TRACE.csv...\n");
                return 2;
        }
        for (int i = optind; i < argc; i++)
                if (evaluate_trace(argv[i]) != 0)
                        rc = 1;
        return rc;
}
