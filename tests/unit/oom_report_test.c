/* What the out-of-memory message says: why, what was tried, what would help, and when it is not said. */
#include "alloc/oom_report.h"

#include <errno.h>
#include <stdatomic.h>

#include "base/log.h"
#include "ladder_gpu.h"

#define WITHIN GR_LOG_INFO /* where reports of a full card are to be seen */

static unsigned reports;
static char all_lines[16384];

static void take_line(const char *line, size_t line_bytes, void *arg)
{
        size_t used = strlen(all_lines);

        GR_CHECK(arg == &reports);
        if (used + line_bytes < sizeof(all_lines))
                memcpy(all_lines + used, line, line_bytes);
        if (memmem(line, line_bytes, "an allocation of ", 17))
                reports++;
}

static void test_report(void)
{
        uint64_t ptr;

        start();
        gr_log_set_sink(take_line, &reports);
        gr_log_set_level(WITHIN);
        cache(3, 4 * MIB, 0);
        GR_CHECK_EQ(sg_alloc(context, 65 * MIB, &ptr), -ENOMEM);
        GR_CHECK_EQ(reports, 1);
        GR_CHECK(strstr(all_lines, "an allocation of 65.000 MiB failed: the device has ") != NULL);
        GR_CHECK(strstr(all_lines,
                        " a larger cached block (ready), freed memory that the GPU has done with (fence), what "
                        "the program's functions do not need (purge), the cache (trim)") != NULL);
        GR_CHECK(strstr(all_lines, "; came back: 12.000 MiB by trim\n") != NULL);
        GR_CHECK(strstr(all_lines, "neighbour") == NULL); /* that was not tried */
        GR_CHECK(strstr(all_lines, "largest: nothing") != NULL);
        GR_CHECK(strstr(all_lines, "help: nothing: that is more than the device has; or host memory") != NULL);
        for (int i = 0; i < 20; i++)
                GR_CHECK_EQ(sg_alloc(context, 65 * MIB, &ptr), -ENOMEM);
        GR_CHECK(reports < 15);
        reports = 0;
        memset(all_lines, 0, sizeof(all_lines));
        sg_advance(3600 * 1000 * SG_MS);
        GR_CHECK_EQ(sg_alloc(context, 65 * MIB, &ptr), -ENOMEM);
        GR_CHECK_EQ(reports, 1);
        GR_CHECK(strstr(all_lines, " more failures went unreported)\n") != NULL);

        /* By default a full card is the program's own affair; a limit is ours to explain. */
        gr_log_set_level(GR_LOG_WARN);
        sg_advance(3600 * 1000 * SG_MS);
        GR_CHECK_EQ(sg_alloc(context, 65 * MIB, &ptr), -ENOMEM);
        GR_CHECK_EQ(reports, 1);
        gr_budget_set_limit(device, GR_LIMIT_HARD, 8 * MIB);
        GR_CHECK_EQ(sg_alloc(context, 10 * MIB, &ptr), -EDQUOT);
        GR_CHECK_EQ(reports, 2);
        GR_CHECK(strstr(all_lines, "the hard limit is 8.000 MiB") != NULL);
        GR_CHECK(strstr(all_lines,
                        "what would help: a limit of 10.000 MiB (GPURECLAIM_HARD_LIMIT, or gpureclaim limit ") != NULL);
        for (int i = 0; i < 3; i++)
                GR_CHECK_EQ(sg_alloc(context, 10 * MIB, &ptr), -EDQUOT);
        GR_CHECK_EQ(reports, 4); /* three in so short a time */
        memset(all_lines, 0, sizeof(all_lines));
        sg_advance(3600 * 1000 * SG_MS);
        GR_CHECK_EQ(sg_alloc(context, 10 * MIB, &ptr), -EDQUOT);
        GR_CHECK(strstr(all_lines, "(1 more failures went unreported)\n") != NULL);
        gr_log_set_level(GR_LOG_SILENT);
        gr_log_set_sink(NULL, NULL);
        finish();
}

static int no_info(void *handle, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes)
{
        (void)handle, (void)ret_free_bytes, (void)ret_total_bytes;
        return -EIO;
}

/* Has the report in all_lines. */
static void report_to_lines(struct gr_oom_report *report)
{
        static uint64_t hours = 9;

        gr_log_set_sink(take_line, &reports);
        gr_log_set_level(GR_LOG_INFO);
        memset(all_lines, 0, sizeof(all_lines));
        sg_advance(++hours * 3600 * 1000 * SG_MS); /* past the limit of the reports before */
        report->begin_ns = sg_driver.now_ns() - 5 * SG_MS;
        gr_oom_report(report);
        gr_log_set_level(GR_LOG_SILENT);
        gr_log_set_sink(NULL, NULL);
}

static void check_line(size_t row, const char *wanted, bool there)
{
        if (!strstr(all_lines, wanted) == there) {
                fprintf(stderr, "row %zu, %s:\n%s", row, wanted, all_lines);
                GR_CHECK(false);
        }
}

/* What would have helped; of the card's 64 MiB the process has 40, or others. */
static void test_advice(void)
{
        enum { OUTSIDE = 1, SPILLED = 2, WAITED = 4, SPLIT = 8, UNKNOWN = 16 };
        static const struct {
                uint64_t others_bytes, live_bytes, cached_bytes, hard_bytes;
                const struct gr_group *group;
                const char *advice;
                unsigned how;
                uint64_t need_bytes; /* 0: 30 MiB */
        } rows[] = {
                {0, 40 * MIB, 0, GR_UNLIMITED, NULL,
                 "6.000 MiB more free on the device, of which this process has 40.000 MiB, others and the driver 0 B; "
                 "or "
                 "host",
                 0, 0},
                {40 * MIB, 0, 0, GR_UNLIMITED, NULL, "this process has 0 B, others and the driver 40.000 MiB; or host",
                 0, 0},
                {0, 0, 40 * MIB, GR_UNLIMITED, NULL, "to try again when the GPU does not use the 40.000 MiB any more",
                 0, 0},
                {0, 0, 40 * MIB, GR_UNLIMITED, NULL, "to try again when the GPU does not use the 40.000 MiB any more",
                 0, 64 * MIB},
                {50 * MIB, 0, 10 * MIB, GR_UNLIMITED, NULL,
                 "help: 26.000 MiB more free on the device, of which this process has 10.000 MiB, others and the "
                 "driver "
                 "50.000 MiB; or host",
                 0, 0},
                {0, 40 * MIB, 0, GR_UNLIMITED, NULL, "others and the driver 0 B\n", SPILLED, 0},
                {0, 0, 0, GR_UNLIMITED, NULL,
                 "help: GPURECLAIM_POOL=auto: enough is free, but perhaps not in one piece; or host", 0, 64 * MIB},
                {0, 0, 0, GR_UNLIMITED, NULL, "help: perhaps to try again: the device has that much free now\n",
                 OUTSIDE, 0},
                {0, 0, 0, GR_UNLIMITED, NULL, "help: perhaps to try again: the device has that much free now; or host",
                 SPLIT, 0},
                {0, 0, 0, GR_UNLIMITED, NULL, "help: more free memory on the device; or host", UNKNOWN, 65 * MIB},
                {0, 0, 0, GR_UNLIMITED, NULL, "30.000 MiB failed\n", UNKNOWN, 0},
                {0, 0, 0, GR_UNLIMITED, NULL, "help: nothing: that is more than the device has\n", OUTSIDE,
                 64 * MIB + 1},
                {0, 40 * MIB, 0, 48 * MIB, NULL, "a limit of 70.000 MiB (GPURECLAIM_HARD_LIMIT, or gpureclaim limit ",
                 0, 0},
                {0, 40 * MIB, 0, 48 * MIB, NULL, " 70MiB), and 6.000 MiB more free on the device\n", 0, 0},
                {0, 40 * MIB, 0, 48 * MIB, NULL, " 70MiB)\n", UNKNOWN, 30 * MIB - 1},
                {0, 40 * MIB, 0, 48 * MIB, NULL, " 71MiB)\n", UNKNOWN, 30 * MIB + 1},
                {0, 40 * MIB, 0, 48 * MIB, &full_group, " 70MiB), and 30.000 MiB more room in the group limit\n",
                 UNKNOWN, 0},
                {0, 40 * MIB, 0, 48 * MIB, &roomy_group, " 60MiB)\n", UNKNOWN, 20 * MIB},
                {40 * MIB, 0, 0, 24 * MIB, NULL, "MiB), and 6.000 MiB more free on the device\n", 0, 0},
                {40 * MIB, 0, 10 * MIB, 24 * MIB, NULL, " 40MiB), and 6.000 MiB more free on the device\n", 0, 0},
                {34 * MIB, 0, 10 * MIB, 24 * MIB, NULL, " 40MiB)\n", 0, 0},
                {0, 0, 40 * MIB, 48 * MIB, NULL, "to try again when the GPU does not use the 40.000 MiB any more", 0,
                 0},
                {0, 0, 40 * MIB, 30 * MIB, NULL, "to try again when the GPU does not use the 40.000 MiB any more", 0,
                 0},
                {0, 0, 0, 30 * MIB, NULL, "help: perhaps to try again: the limit has room now\n", 0, 0},
                {0, 0, 0, GR_UNLIMITED, &full_group, "a group limit of 31.000 MiB (GPURECLAIM_GROUP_LIMIT)\n", 0, 0},
                {0, 0, 0, GR_UNLIMITED, &passed_group, "a group limit of 36.000 MiB (GPURECLAIM_GROUP_LIMIT)\n", 0, 0},
                {0, 30 * MIB, 0, GR_UNLIMITED, &roomy_group,
                 "a group limit of 70.000 MiB (GPURECLAIM_GROUP_LIMIT); or other processes of the group free 10.000 "
                 "MiB (train 4711 has 10.000 MiB) "
                 "(GPURECLAIM_WAIT=30s waits for that)\n",
                 0, 0},
                {0, 30 * MIB, 0, GR_UNLIMITED, &roomy_group,
                 "of the group free 10.000 MiB (train 4711 has 10.000 MiB)\n", WAITED, 0},
                {0, 32 * MIB, 0, GR_UNLIMITED, &roomy_group, "a group limit of 70.000 MiB (GPURECLAIM_GROUP_LIMIT)\n",
                 0, 0},
                {50 * MIB, 0, 0, GR_UNLIMITED, &full_group, "LIMIT), and 16.000 MiB more free on the device\n", 0, 0},
        };
        static const uint64_t given[GR_RUNG_COUNT];

        for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
                unsigned tries[GR_RUNG_COUNT] = {
                        [GR_RUNG_SPILL] = rows[i].how & SPILLED, [GR_RUNG_WAIT] = rows[i].how & WAITED};
                struct gr_driver blind = sg_driver;
                uint64_t live = 0, need = rows[i].need_bytes ? rows[i].need_bytes : 30 * MIB;
                unsigned lines = 0;

                start();
                blind.mem_info = no_info;
                sg_hold(0, rows[i].others_bytes, 0);
                if (rows[i].live_bytes > 0)
                        live = alloc(rows[i].live_bytes);
                if (rows[i].cached_bytes > 0)
                        cache(1, rows[i].cached_bytes, UINT64_C(36000000000) * SG_MS);
                gr_budget_set_limit(device, GR_LIMIT_HARD, rows[i].hard_bytes);
                atomic_store(&device->group, rows[i].group);
                if (rows[i].how & UNKNOWN)
                        core.driver = &blind;
                if (rows[i].how & SPLIT)
                        core.config.pool = GR_POOL_SPLIT;
                report_to_lines(&(struct gr_oom_report){.context = context,
                                                        .bytes = need,
                                                        .need_bytes = need,
                                                        .block = !(rows[i].how & OUTSIDE),
                                                        .limited = rows[i].group || rows[i].hard_bytes != GR_UNLIMITED,
                                                        .given_bytes = given,
                                                        .tries = tries});
                core.driver = &sg_driver;
                core.config.pool = GR_POOL_BINS;
                check_line(i, rows[i].advice, true);
                check_line(i, "kept for CUDA graphs", false);
                check_line(i, "more failures went unreported", false);
                check_line(i, "that the GPU may still use", rows[i].cached_bytes > 0);
                for (const char *c = all_lines; *c; c++)
                        lines += *c == '\n';
                GR_CHECK(lines >= 6 && lines <= 8);
                atomic_store(&device->group, NULL);
                if (live)
                        GR_CHECK_EQ(sg_free(&core, live), 0);
                finish();
        }
}

/* What the process has, and what was tried, with what came back. */
static void test_report_of_process(void)
{
        static const uint64_t given[GR_RUNG_COUNT] = {[GR_RUNG_READY] = 2 * MIB, [GR_RUNG_TRIM] = 3 * MIB};
        static const unsigned tries[GR_RUNG_COUNT] = {
                [GR_RUNG_READY] = 1, [GR_RUNG_FENCE] = 2, [GR_RUNG_TRIM] = 1, [GR_RUNG_FAIL] = 1};
        unsigned all_rungs[GR_RUNG_COUNT] = {0};
        static const size_t sizes[] = {2 * MIB, 2 * MIB, 2 * MIB, 4 * MIB, 4 * MIB, 20 * MIB, 512};
        struct gr_oom_report report = {
                .context = NULL, .bytes = 30 * MIB, .need_bytes = 30 * MIB, .given_bytes = given, .tries = tries};
        uint64_t ptrs[sizeof(sizes) / sizeof(sizes[0])];

        start();
        report.context = context;
        ptrs[6] = alloc(512);
        report_to_lines(&report);
        check_line(0, "failed: the device has 62.000 MiB free of 64.000 MiB\n", true);
        check_line(0, "largest: 512 B in 1 block of about 512 B\n", true);
        for (int i = 0; i < 6; i++)
                ptrs[i] = alloc(sizes[i]);
        GR_CHECK_EQ(gr_budget_charge(device, GR_MEMORY_STREAM_ORDERED, 3 * MIB), 0);
        GR_CHECK_EQ(gr_budget_charge(device, GR_MEMORY_ARRAY, MIB), 0);
        atomic_store(&device->kind_bytes[GR_MEMORY_IMPORTED], 5 * MIB);
        atomic_store(&device->graph_bytes, MIB);
        report_to_lines(&report);
        atomic_store(&device->graph_bytes, 0);
        atomic_store(&device->kind_bytes[GR_MEMORY_IMPORTED], 0);
        check_line(1,
                   "largest: 20.000 MiB in 1 block of about 20.000 MiB, 8.000 MiB in 2 blocks of about 4.000 MiB, "
                   "6.000 MiB in 3 blocks of about 2.000 MiB, 3.000 MiB of stream-ordered pools, 1.000 MiB of "
                   "arrays\n",
                   true);
        check_line(1, " in use, 1.000 MiB kept for CUDA graphs, 0 B in the cache\n", true);
        check_line(1,
                   "tried for 5.000 ms: a larger cached block (ready), freed memory that the GPU has done with "
                   "(fence), the cache (trim); came back: 2.000 MiB by ready, 3.000 MiB by trim\n",
                   true);
        check_line(1, "GPURECLAIM_GRAPH_ARENA", false);
        atomic_store(&device->graph_bytes, 32 * MIB);
        core.config.pool = GR_POOL_AUTO;
        report_to_lines(&report);
        check_line(1, "; or GPURECLAIM_GRAPH_ARENA=shared, if no two CUDA graphs run at once\n", true);
        core.config.graph_arena = GR_GRAPH_SHARED;
        report_to_lines(&report);
        check_line(1, "GPURECLAIM_GRAPH_ARENA", false);
        core.config.graph_arena = GR_GRAPH_PRIVATE;
        core.config.pool = GR_POOL_BINS;
        atomic_store(&device->graph_bytes, 0);
        report.given_bytes = (const uint64_t[GR_RUNG_COUNT]){0};
        report_to_lines(&report);
        check_line(2, "(ready), freed memory that the GPU has done with (fence), the cache (trim); nothing came back\n",
                   true);
        report.tries = all_rungs;
        for (int rung = 0; rung < GR_RUNG_FAIL; rung++)
                all_rungs[rung] = 1;
        report_to_lines(&report);
        check_line(3, "(null)", false);
        check_line(3, "host memory (spill); nothing came back\n", true);
        gr_budget_uncharge(device, GR_MEMORY_STREAM_ORDERED, 3 * MIB);
        gr_budget_uncharge(device, GR_MEMORY_ARRAY, MIB);
        for (int i = 0; i < 7; i++)
                GR_CHECK_EQ(sg_free(&core, ptrs[i]), 0);
        finish();
}

static unsigned find_origins(int ordinal, struct gr_oom_origin ret[GR_OOM_ORIGINS], bool *ret_estimated)
{
        static const struct gr_oom_origin found[GR_OOM_ORIGINS] = {
                {3 * MIB, 2.4, "a (b.py:1)"}, {2 * MIB, 1.4, "c.so+0x1"}, {MIB, 1, "d"}};

        GR_CHECK_EQ(ordinal, device->ordinal);
        memcpy(ret, found, sizeof(found));
        *ret_estimated = true;
        return GR_OOM_ORIGINS;
}

static unsigned find_no_origins(int ordinal, struct gr_oom_origin ret[GR_OOM_ORIGINS], bool *ret_estimated)
{
        (void)ordinal, (void)ret, (void)ret_estimated;
        return 0;
}

/* Where memory was allocated, and the command that tells more. */
static void test_report_of_origins(void)
{
        static const struct {
                gr_oom_find_origins *find;
                const char *origins, *see;
        } rows[] = {
                {NULL, NULL, "see also: gpureclaim status; or run with GPURECLAIM_BACKTRACE=sample to see here"},
                {find_no_origins, NULL, "see also: gpureclaim leaks "},
                {find_origins,
                 "allocated by: a (b.py:1): about 3.000 MiB in 2 blocks; c.so+0x1: about 2.000 MiB in 1 block; d: "
                 "about 1.000 MiB in 1 block\n",
                 "see also: gpureclaim leaks "},
        };
        static const uint64_t given[GR_RUNG_COUNT];
        static const unsigned tries[GR_RUNG_COUNT];
        struct gr_oom_report report = {
                .context = NULL, .bytes = MIB, .need_bytes = MIB, .given_bytes = given, .tries = tries};

        start();
        report.context = context;
        for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
                unsigned lines = 0;

                atomic_store(&gr_oom_origins, rows[i].find);
                report_to_lines(&report);
                check_line(i, rows[i].origins ? rows[i].origins : "allocated by", rows[i].origins != NULL);
                check_line(i, rows[i].see, true);
                for (const char *c = all_lines; *c; c++)
                        lines += *c == '\n';
                GR_CHECK_EQ(lines, rows[i].origins ? 7 : 6);
        }
        atomic_store(&gr_oom_origins, NULL);
        finish();
}

int main(void)
{
        test_report();
        test_advice();
        test_report_of_process();
        test_report_of_origins();
        return GR_CHECK_RESULT();
}
