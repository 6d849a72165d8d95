#include "alloc/oom_report.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "account/budget.h"
#include "account/memory_kind.h"
#include "base/log.h"
#include "base/size.h"
#include "base/size_class.h"
#include "cache/ledger.h"
#include "context/context.h"
#include "fence/fence.h"
#include "reclaim/rung.h"

#define HOLDERS 3 /* classes of blocks that are named */

static const char *const kind_words[] = {
#define KIND_WORDS(id, name, words) words,
        GR_MEMORY_KINDS(KIND_WORDS)
#undef KIND_WORDS
};

static const char *const got_words[] = {
#define GOT_WORDS(id, word, got) got,
        GR_RUNGS(GOT_WORDS)
#undef GOT_WORDS
};

struct line {
        char text[512];
        size_t used;
};

/* Appends; what finds no room is cut off. */
__attribute__((format(printf, 2, 3))) static void add(struct line *line, const char *format, ...)
{
        va_list arguments;
        int length;

        va_start(arguments, format);
        length = vsnprintf(line->text + line->used, sizeof(line->text) - line->used, format, arguments);
        va_end(arguments);
        if (length > 0)
                line->used = gr_min(line->used + (size_t)length, sizeof(line->text) - 1);
}

/* "begin SIZE end" */
static void add_size(struct line *line, const char *begin, uint64_t bytes, const char *end)
{
        char text[GR_SIZE_TEXT_BYTES];

        add(line, "%s%s%s", begin, gr_size_format(bytes, text, sizeof(text)), end);
}

/* The classes of which the program has the most bytes, the largest sum first; then what is no block of the pool. */
static void add_live(struct line *line, struct gr_core *core, struct gr_device *device)
{
        uint64_t counts[GR_CLASS_COUNT] = {0}, bytes[GR_CLASS_COUNT] = {0}, other;
        const char *before = "";

        gr_ledger_count_live(core->ledger, device->ordinal, counts, bytes);
        for (int n = 0; n < HOLDERS; n++, before = ", ") {
                unsigned top = 0;

                for (unsigned class = 1; class < GR_CLASS_COUNT; class ++)
                        if (bytes[class] > bytes[top])
                                top = class;
                if (bytes[top] == 0)
                        break;
                assert(counts[top] > 0);
                add_size(line, before, bytes[top], "");
                add(line, " in %" PRIu64 " block%s of about ", counts[top], counts[top] == 1 ? "" : "s");
                add_size(line, "", bytes[top] / counts[top], "");
                bytes[top] = 0;
        }
        for (enum gr_memory_kind kind = 0; kind < GR_MEMORY_HOST; kind++) {
                other = atomic_load(&device->kind_bytes[kind]);
                if (other == 0 || !gr_memory_kind_is_charged(kind))
                        continue;
                add_size(line, before, other, " of ");
                add(line, "%s", kind_words[kind]);
                before = ", ";
        }
        if (!*before)
                add(line, "nothing");
}

static void add_got(struct line *line, const struct gr_oom_report *report)
{
        const char *before = "";
        uint64_t ns = 0;

        for (int rung = 0; rung < GR_RUNG_FAIL; rung++) {
                if (report->given_bytes[rung] == 0)
                        continue;
                add_size(line, before, report->given_bytes[rung], " ");
                add(line, "%s", got_words[rung]);
                before = ", ";
        }
        add(line, "%s; tried", *before ? "" : "nothing");
        for (int rung = 0; rung < GR_RUNG_FAIL; rung++) {
                ns += report->ns[rung];
                if (report->tries[rung] > 0)
                        add(line, " %s", gr_rung_words[rung]);
        }
        add(line, ", in %.3f ms", (double)ns / 1e6);
}

static void add_wait(struct line *line, const struct gr_oom_report *report)
{
        if (report->tries[GR_RUNG_WAIT] == 0)
                add(line, " (GPURECLAIM_WAIT=30s waits for that)");
}

static void add_advice_limit(struct line *line, const struct gr_oom_report *report, uint64_t card_free)
{
        struct gr_device *device = report->context->device;
        uint64_t cached = gr_budget_cached(device), least = gr_budget_not_cached(device) + report->need_bytes;

        if (least <= atomic_load(&device->hard_bytes)) {
                add_size(line, "once the ", cached, " cached are not in use any more by work of the GPU or a capture");
                return;
        }
        add_size(line, "with a limit of ", least, "");
        add(line, " (gpureclaim limit %d %" PRIu64 "MiB)", (int)getpid(), (least + (1 << 20) - 1) >> 20);
        if (report->need_bytes > card_free + cached)
                add_size(line, ", and ", report->need_bytes - card_free - cached, " more free on the card");
}

static void add_advice_group(struct line *line, const struct gr_oom_report *report, const struct gr_group *group)
{
        uint64_t room = group->room(group->arg);
        uint64_t lack = report->need_bytes > room ? report->need_bytes - room : 0;

        add_size(line, "with a group limit of ", group->limit_bytes + lack, "");
        add_size(line, ", or once processes of the group free ", lack, "");
        add_wait(line, report);
}

static void add_advice_card(struct line *line, const struct gr_oom_report *report, uint64_t free, uint64_t total)
{
        struct gr_device *device = report->context->device;
        uint64_t need = report->need_bytes, lack = need > free ? need - free : 0;
        uint64_t cached = gr_budget_cached(device), ours = free + atomic_load(&device->reserved_bytes);
        uint64_t others = total > ours ? total - ours : 0;

        if (need > total)
                add(line, "never: it is larger than the card");
        else if (lack == 0 && report->context->core->config.pool < GR_POOL_SPLIT)
                add(line, "with GPURECLAIM_POOL=auto: the card has as much free, but not in one piece");
        else if (lack == 0)
                add(line, "perhaps now: the card has as much free");
        else if (cached >= lack)
                add_size(line, "once the ", cached, " cached are not in use any more by work of the GPU or a capture");
        else if (others >= lack) {
                add_size(line, "once ", lack, " more are free on the card; ");
                add_size(line, "", others, " of it are with other processes and the driver");
                add_wait(line, report);
        } else
                add_size(line, "with ", lack, " less live in this process");
        if (lack > 0 && report->tries[GR_RUNG_SPILL] == 0)
                add(line, "; or with host memory, slower (GPURECLAIM_SPILL)");
}

void gr_oom_report(const struct gr_oom_report *report)
{
        static struct gr_ratelimit limit = GR_RATELIMIT_INIT(3, UINT64_C(10000000000));
        struct gr_core *core = report->context->core;
        struct gr_device *device = report->context->device;
        const struct gr_group *group = atomic_load(&device->group);
        bool of_group = report->limited && group && !gr_budget_own_limit(device, report->need_bytes);
        enum gr_log_level level = report->limited ? GR_LOG_WARN : GR_LOG_INFO;
        struct line first = {.used = 0}, process = first, live = first, got = first, advice = first;
        uint64_t free = 0, total = 0, waiting, more;

        if (!gr_log_enabled(level) || !gr_log_ratelimit(&limit, core->driver->now_ns()))
                return;
        more = gr_log_ratelimit_take(&limit);
        core->driver->mem_info(report->context->handle, &free, &total);

        add_size(&first, "no room for ", report->bytes, ": ");
        if (report->limited)
                add_size(&first, of_group ? "the group limit is " : "the hard limit is ",
                         of_group ? group->limit_bytes : atomic_load(&device->hard_bytes), "; ");
        add_size(&first, "the card has ", free, " free of ");
        add_size(&first, "", total, "");
        gr_log(level, "device %d: %s", device->ordinal, first.text);

        waiting = gr_fence_quarantine_bytes(report->context->fence);
        add_size(&process, "", gr_budget_live(device), " live, ");
        add_size(&process, "", gr_budget_cached(device), " cached");
        if (waiting > 0)
                add_size(&process, ", ", waiting, " of it waiting for the GPU");
        gr_log(level, "  this process: %s", process.text);
        add_live(&live, core, device);
        gr_log(level, "  live: %s", live.text);
        add_got(&got, report);
        gr_log(level, "  got back: %s", got.text);

        if (of_group)
                add_advice_group(&advice, report, group);
        else if (report->limited)
                add_advice_limit(&advice, report, free);
        else
                add_advice_card(&advice, report, free, total);
        gr_log(level, "  would fit: %s", advice.text);
        gr_log(level, "  see also: gpureclaim status; or run with GPURECLAIM_TRACE=FILE, then gpureclaim report FILE");
        if (more > 0)
                gr_log(level, "  (%" PRIu64 " more failures went unreported)", more);
}
