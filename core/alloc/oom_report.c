#include "alloc/oom_report.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "account/budget.h"
#include "account/memory_kind.h"
#include "base/counters.h"
#include "base/log.h"
#include "base/size.h"
#include "base/size_class.h"
#include "cache/ledger.h"
#include "context/context.h"
#include "fence/fence.h"

#define HOLDERS 3 /* classes of blocks that are named */

static const char *const kind_words[] = {
#define KIND_WORDS(id, name, words) words,
        GR_MEMORY_KINDS(KIND_WORDS)
#undef KIND_WORDS
};

/* What each rung tries. */
static const char *const rung_tries[GR_RUNG_FAIL] = {
        [GR_RUNG_READY] = "a larger cached block",
        [GR_RUNG_FENCE] = "freed memory that the GPU has done with",
        [GR_RUNG_PURGE] = "what the program's functions do not need",
        [GR_RUNG_TRIM] = "the cache",
        [GR_RUNG_DRIVER] = "the driver's pools",
        [GR_RUNG_SYNC] = "a wait for the GPU",
        [GR_RUNG_DROP] = "what the program's functions can build again",
        [GR_RUNG_NEIGHBOUR] = "other processes",
        [GR_RUNG_WAIT] = "waiting for others",
        [GR_RUNG_SPILL] = "host memory",
};

gr_oom_find_origins *_Atomic gr_oom_origins;
gr_oom_find_origins *_Atomic gr_oom_freed;

struct line {
        char text[768];
        size_t used;
};

/* Appends; what finds no room is cut off. */
__attribute__((format(printf, 2, 3))) static void add_text(struct line *line, const char *format, ...)
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

        add_text(line, "%s%s%s", begin, gr_size_format(bytes, text, sizeof(text)), end);
}

/* The classes of which the program has the most bytes, the largest sum first; then what is no block of the pool. */
static void add_largest(struct line *line, struct gr_core *core, struct gr_device *device)
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
                add_text(line, " in %" PRIu64 " block%s of about ", counts[top], counts[top] == 1 ? "" : "s");
                add_size(line, "", bytes[top] / counts[top], "");
                bytes[top] = 0;
        }
        for (enum gr_memory_kind kind = 0; kind < GR_MEMORY_HOST; kind++) {
                other = atomic_load(&device->kind_bytes[kind]);
                if (other == 0 || !gr_memory_kind_is_charged(kind))
                        continue;
                add_size(line, before, other, " of ");
                add_text(line, "%s", kind_words[kind]);
                before = ", ";
        }
        if (!*before)
                add_text(line, "nothing");
}

/* Adds where the memory that `find` finds was allocated. False: that is not known. */
static bool add_origins(struct line *line, gr_oom_find_origins *find, int device)
{
        struct gr_oom_origin origins[GR_OOM_ORIGINS];
        bool estimated = false;
        unsigned count = find ? find(device, origins, &estimated) : 0;

        for (unsigned i = 0; i < count; i++) {
                add_text(line, "%s%s: ", i > 0 ? "; " : "", origins[i].where);
                add_size(line, estimated ? "about " : "", (uint64_t)(origins[i].bytes + 0.5), "");
                add_text(line, " in %.0f block%s", origins[i].blocks, origins[i].blocks < 1.5 ? "" : "s");
                if (origins[i].freed_s > 0)
                        add_text(line, ", %.3f s ago", origins[i].freed_s);
        }
        return count > 0;
}

static void add_tried(struct line *line, const struct gr_oom_report *report)
{
        const char *before = " ";

        for (int rung = 0; rung < GR_RUNG_FAIL; rung++)
                if (report->tries[rung] > 0) {
                        add_text(line, "%s%s (%s)", before, rung_tries[rung], gr_rung_words[rung]);
                        before = ", ";
                }
        before = "; came back: ";
        for (int rung = 0; rung < GR_RUNG_FAIL; rung++) {
                if (report->given_bytes[rung] == 0)
                        continue;
                add_size(line, before, report->given_bytes[rung], " by ");
                add_text(line, "%s", gr_rung_words[rung]);
                before = ", ";
        }
        if (*before == ';')
                add_text(line, "; nothing came back");
}

/* What the device has; known is false where the driver does not say. */
struct device_memory {
        bool known;
        uint64_t free_bytes, total_bytes;
};

static void add_host(struct line *line, const struct gr_oom_report *report)
{
        if (report->block && report->tries[GR_RUNG_SPILL] == 0)
                add_text(line, "; or host memory, slower (GPURECLAIM_SPILL)");
}

/* graph_bytes: what is kept for CUDA graphs. With shared memory they might have left enough. */
static void add_graphs(struct line *line, const struct gr_oom_report *report, uint64_t graph_bytes)
{
        const struct gr_config *config = &report->context->core->config;

        if (graph_bytes >= report->need_bytes && config->graph_arena == GR_GRAPH_PRIVATE &&
            (config->pool == GR_POOL_SPLIT || config->pool == GR_POOL_AUTO))
                add_text(line, "; or GPURECLAIM_GRAPH_ARENA=shared, if no two CUDA graphs run at once");
}

/* Freed memory that the GPU may still use: the only cached memory that would have come back otherwise. */
static uint64_t quarantined_bytes(struct gr_context *context)
{
        return gr_min(gr_fence_quarantine_bytes(context->fence), gr_budget_cached(context->device));
}

/* What this process has on the context's device. */
static void log_process(enum gr_log_level level, struct gr_context *context)
{
        struct gr_device *device = context->device;
        gr_oom_find_origins *find_origins = atomic_load(&gr_oom_origins);
        struct line process = {.used = 0}, largest = process, origins = process;
        uint64_t waiting = quarantined_bytes(context), graphs = gr_budget_live(device) - gr_budget_live_unfreed(device);

        add_size(&process, "", gr_budget_live_unfreed(device), " in use, ");
        if (graphs > 0)
                add_size(&process, "", graphs, " kept for CUDA graphs, ");
        add_size(&process, "", gr_budget_cached(device), " in the cache");
        if (waiting > 0)
                add_size(&process, ", of it ", waiting, " that the GPU may still use");
        gr_log(level, "  this process: %s", process.text);
        add_largest(&largest, context->core, device);
        gr_log(level, "  largest: %s", largest.text);
        if (add_origins(&origins, find_origins, device->ordinal))
                gr_log(level, "  allocated by: %s", origins.text);
}

/* Adds which other processes have most. */
static void add_others(struct line *line, const struct gr_device *device)
{
        const struct gr_group *group = atomic_load(&device->group);
        char text[256] = "";

        if (group && group->others)
                group->others(group->arg, text, sizeof(text));
        if (text[0])
                add_text(line, " (%s)", text);
}

static void add_room_on_device(struct line *line, const struct gr_oom_report *report,
                               const struct device_memory *memory)
{
        uint64_t have = memory->free_bytes + gr_budget_returnable(report->context->device);

        if (memory->known && report->need_bytes > have)
                add_size(line, ", and ", report->need_bytes - have, " more free on the device");
}

static void add_help_own_limit(struct line *line, const struct gr_oom_report *report,
                               const struct device_memory *memory)
{
        struct gr_device *device = report->context->device;
        const struct gr_group *group = atomic_load(&device->group);
        uint64_t least = atomic_load(&device->reserved_bytes) + report->need_bytes,
                 waiting = quarantined_bytes(report->context);
        uint64_t room = group ? group->room(group->arg) : GR_UNLIMITED;

        if (least <= atomic_load(&device->hard_bytes)) {
                add_text(line, "perhaps to try again: the limit has room now");
                return;
        }
        if (least - gr_min(waiting, least) <= atomic_load(&device->hard_bytes)) {
                add_size(line, "to try again when the GPU does not use the ", waiting, " any more");
                return;
        }
        add_size(line, "a limit of ", least, " (GPURECLAIM_HARD_LIMIT, or gpureclaim limit ");
        add_text(line, "%d %" PRIu64 "MiB)", (int)getpid(), (least + (1 << 20) - 1) >> 20);
        if (report->need_bytes > room)
                add_size(line, ", and ", report->need_bytes - room, " more room in the group limit");
        add_room_on_device(line, report, memory);
}

static void add_help_group(struct line *line, const struct gr_oom_report *report, const struct gr_group *group,
                           const struct device_memory *memory)
{
        uint64_t room = group->room(group->arg), excess = group->excess(group->arg);
        uint64_t lack = report->need_bytes + excess - gr_min(room, report->need_bytes + excess);
        uint64_t all = group->limit_bytes + excess - gr_min(room, group->limit_bytes);
        uint64_t own = gr_min(all, atomic_load(&report->context->device->reserved_bytes));

        add_size(line, "a group limit of ", group->limit_bytes + lack, " (GPURECLAIM_GROUP_LIMIT)");
        if (all - own >= lack) {
                add_size(line, "; or other processes of the group free ", lack, "");
                add_others(line, report->context->device);
                if (report->tries[GR_RUNG_WAIT] == 0)
                        add_text(line, " (GPURECLAIM_WAIT=30s waits for that)");
        }
        add_room_on_device(line, report, memory);
}

static void add_help_device(struct line *line, const struct gr_oom_report *report, const struct device_memory *memory)
{
        uint64_t lack = report->need_bytes - gr_min(memory->free_bytes, report->need_bytes),
                 waiting = quarantined_bytes(report->context);
        uint64_t own = atomic_load(&report->context->device->reserved_bytes),
                 used = memory->total_bytes - memory->free_bytes;

        if (!memory->known) {
                add_text(line, "more free memory on the device");
        } else if (lack == 0) {
                if (report->block && report->context->core->config.pool < GR_POOL_SPLIT)
                        add_text(line, "GPURECLAIM_POOL=auto: enough is free, but perhaps not in one piece");
                else
                        add_text(line, "perhaps to try again: the device has that much free now");
        } else if (waiting >= lack) {
                add_size(line, "to try again when the GPU does not use the ", waiting, " any more");
        } else {
                add_size(line, "", lack, " more free on the device, of which this process has ");
                add_size(line, "", own, "");
                add_size(line, ", others and the driver ", used - gr_min(own, used), "");
                add_others(line, report->context->device);
        }
        add_host(line, report);
}

void gr_oom_report(const struct gr_oom_report *report)
{
        static struct gr_ratelimit limit = GR_RATELIMIT_INIT(3, UINT64_C(10000000000));
        struct gr_core *core = report->context->core;
        struct gr_device *device = report->context->device;
        const struct gr_group *group = atomic_load(&device->group);
        bool of_group = report->limited && group && !gr_budget_own_limit(device, report->need_bytes);
        enum gr_log_level level = report->limited ? GR_LOG_WARN : GR_LOG_INFO;
        struct line first = {.used = 0}, tried = first, help = first;
        uint64_t now_ns = core->driver->now_ns(), graphs = gr_budget_live(device) - gr_budget_live_unfreed(device),
                 more;
        struct device_memory memory = {0};

        if (!gr_log_enabled(level) || !gr_log_ratelimit(&limit, now_ns))
                return;
        more = gr_log_ratelimit_take(&limit);
        memory.known = core->driver->mem_info(report->context->handle, &memory.free_bytes, &memory.total_bytes) == 0;

        add_size(&first, "an allocation of ", report->bytes, " failed");
        if (report->limited)
                add_size(&first, of_group ? ": the group limit is " : ": the hard limit is ",
                         of_group ? group->limit_bytes : atomic_load(&device->hard_bytes), "");
        if (memory.known) {
                add_size(&first, report->limited ? "; the device has " : ": the device has ", memory.free_bytes,
                         " free of ");
                add_size(&first, "", memory.total_bytes, "");
        }
        gr_log(level, "device %d: %s", device->ordinal, first.text);

        log_process(level, report->context);
        add_tried(&tried, report);
        gr_log(level, "  tried for %.3f ms:%s", (double)(now_ns - report->begin_ns) / 1e6, tried.text);

        if (memory.known && report->need_bytes > memory.total_bytes) {
                add_text(&help, "nothing: that is more than the device has");
                add_host(&help, report);
        } else if (of_group) {
                add_help_group(&help, report, group, &memory);
        } else if (report->limited) {
                add_help_own_limit(&help, report, &memory);
        } else {
                add_help_device(&help, report, &memory);
        }
        add_graphs(&help, report, graphs);
        gr_log(level, "  what would help: %s", help.text);
        if (atomic_load(&gr_oom_origins))
                gr_log(level, "  see also: gpureclaim leaks %d while it runs; gpureclaim status", (int)getpid());
        else
                gr_log(level, "  see also: gpureclaim status; or run with GPURECLAIM_BACKTRACE=sample to see here what "
                              "allocated the memory, or with GPURECLAIM_TRACE=FILE, then gpureclaim report FILE");
        if (more > 0)
                gr_log(level, "  (%" PRIu64 " more failures went unreported)", more);
}

void gr_kernel_report(struct gr_context *context, int error, const char *call)
{
        static const char *const words[] = {"hardware stack error",  "illegal instruction",     "misaligned address",
                                            "invalid address space", "invalid program counter", "launch failed"};
        enum gr_log_level level = atomic_load(&gr_oom_origins) ? GR_LOG_WARN : GR_LOG_INFO;
        struct line freed = {0};

        assert(gr_error_is_of_kernel(error));
        gr_log(level, "device %d: a kernel failed: %s (CUDA error %d), first told by %s; no more work is done",
               context->device->ordinal,
               error == GR_ERROR_ILLEGAL_ADDRESS ? "illegal address" : words[error - GR_ERROR_HARDWARE_STACK], error,
               call);
        gr_log(level, "  the driver tells neither kernel nor address; the kernel was launched before that call");
        log_process(level, context);
        if (add_origins(&freed, atomic_load(&gr_oom_freed), context->device->ordinal))
                gr_log(level, "  freed last, by what allocated it: %s", freed.text);
        gr_log(level, "  to find the kernel: compute-sanitizer, with GPURECLAIM_POOL=none so that it knows each "
                      "block; or CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1, then cuda-gdb");
        gr_log(level, "  to find writes behind a block: GPURECLAIM_GUARD=1; to a freed one: "
                      "GPURECLAIM_QUARANTINE=1GiB; reads of what was never written: GPURECLAIM_FILL=0xff");
}
