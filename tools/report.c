/* gpureclaim report: what a trace of allocations (GPURECLAIM_TRACE) says about a program. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio_ext.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/json.h"
#include "base/size.h"
#include "command.h"
#include "leaks.h"
#include "report.h"

#define SIZES_SHOWN   8
#define ORIGINS_SHOWN 3

static int by_size(const void *a, const void *b)
{
        const struct group *x = a, *y = b;

        return x->bytes != y->bytes ? (x->bytes < y->bytes ? -1 : 1)
                                    : (x->oldest_ns > y->oldest_ns) - (x->oldest_ns < y->oldest_ns);
}

static int by_sum(const void *a, const void *b)
{
        const struct group *x = a, *y = b;
        uint64_t sum_x = x->bytes * x->count, sum_y = y->bytes * y->count;

        return sum_x != sum_y ? (sum_x > sum_y ? -1 : 1) : (x->bytes < y->bytes) - (x->bytes > y->bytes);
}

static int by_number(const void *a, const void *b)
{
        uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

        return (x > y) - (x < y);
}

/* What is live after the first count operations. 0 or -ENOMEM. */
static int look_at(const struct gr_trace *trace, size_t count, struct moment *ret)
{
        struct group *groups = calloc(trace->slot_count + 1, sizeof(*groups)); /* by slot; count 0: none is live */
        size_t used = 0;

        if (!groups)
                return -ENOMEM;
        for (size_t i = 0; i < count; i++) {
                const struct gr_trace_op *op = &trace->ops[i];

                groups[op->slot] = (struct group){.bytes = op->bytes, .count = !op->is_free, .oldest_ns = op->time_ns};
        }
        for (uint32_t slot = 0; slot < trace->slot_count; slot++)
                if (groups[slot].count > 0)
                        groups[used++] = groups[slot];
        qsort(groups, used, sizeof(*groups), by_size);
        *ret = (struct moment){.operations = count,
                               .at_ns = count > 0 ? trace->ops[count - 1].time_ns : 0,
                               .count = used,
                               .groups = groups};
        for (size_t i = 0; i < used; i++) {
                struct group *last = ret->group_count > 0 ? &groups[ret->group_count - 1] : NULL;

                ret->bytes += groups[i].bytes;
                if (last && last->bytes == groups[i].bytes)
                        last->count++;
                else
                        groups[ret->group_count++] = groups[i];
        }
        qsort(groups, ret->group_count, sizeof(*groups), by_sum);
        return 0;
}

/* 0 or -ENOMEM. */
static int examine_trace(struct report *report)
{
        const struct gr_trace *trace = &report->trace;
        uint64_t *born = calloc(trace->slot_count + 1, sizeof(*born)),
                 *lives = calloc(trace->count + 1, sizeof(*lives));
        uint64_t live = 0, most = 0;
        size_t peak = 0, freed = 0;
        int rc = born && lives ? 0 : -ENOMEM;

        for (size_t i = 0; !rc && i < trace->count; i++) {
                const struct gr_trace_op *op = &trace->ops[i];

                report->end_ns = op->time_ns > report->end_ns ? op->time_ns : report->end_ns;
                if (op->is_free) {
                        live -= op->bytes;
                        lives[freed++] = op->time_ns > born[op->slot] ? op->time_ns - born[op->slot] : 0;
                        continue;
                }
                born[op->slot] = op->time_ns;
                live += op->bytes;
                report->allocations++;
                report->sizes[63 - __builtin_clzll(op->bytes)].blocks++;
                report->sizes[63 - __builtin_clzll(op->bytes)].bytes += op->bytes;
                report->allocated_bytes += op->bytes;
                if (live > most) {
                        most = live;
                        peak = i + 1;
                }
        }
        report->timed = report->end_ns > 0;
        if (!rc && freed > 0) {
                qsort(lives, freed, sizeof(*lives), by_number);
                report->half_ns = lives[freed / 2];
                report->tenth_ns = lives[freed - 1 - freed / 10];
        }
        free(born);
        free(lives);
        if (!rc)
                rc = look_at(trace, peak, &report->peak);
        if (!rc)
                rc = look_at(trace, trace->count, &report->end);
        return rc ? rc : draw_timelines(report);
}

/* Adds later_ns, modulo 2^64. As it comes from two clocks, the sum may seem to be a little below 0; then it is 0. */
static void put_later(uint64_t *time_ns, uint64_t later_ns)
{
        *time_ns += later_ns;
        if ((int64_t)*time_ns < 0)
                *time_ns = 0;
}

/* Reads the origins that gpureclaim record --backtrace has put beside the trace, if they are there. 0 or -ENOMEM. */
static int read_origins(const char *path, struct report *report)
{
        const struct gr_trace_header *header = report->trace.header;
        size_t length = strlen(path), suffix = strlen(GR_TRACE_SUFFIX);
        struct origins *origins = &report->origins;
        struct origin_stacks wanted = {0};
        uint32_t *stacks;
        uint64_t later_ns;
        int rc;

        if (!header || length < suffix || strcmp(path + length - suffix, GR_TRACE_SUFFIX) != 0 ||
            length + sizeof(GR_ORIGINS_SUFFIX) > sizeof(report->origins_path))
                return 0;
        sprintf(report->origins_path, "%.*s" GR_ORIGINS_SUFFIX, (int)(length - suffix), path);
        wanted.list = stacks = calloc(report->trace.count + 1, sizeof(*stacks));
        if (!stacks)
                return -ENOMEM;
        for (size_t i = 0; i < report->trace.count; i++)
                if (report->trace.ops[i].stack != GR_TRACE_NO_STACK)
                        stacks[wanted.count++] = report->trace.ops[i].stack;
        rc = origins_try(origins, report->origins_path) ? origins_read(origins, false, &wanted) : -ENOENT;
        free(stacks);
        /* A process begins its trace before its origins. Older origins are those of an earlier process of this pid. */
        report->has_origins = !rc && origins->header.pid == header->pid && origins->header.began_ns >= header->began_ns;
        if (!report->has_origins)
                return 0;
        later_ns = origins->header.began_ns - header->began_ns - report->trace.first_ns;
        for (size_t i = 0; i < origins->count; i++) {
                put_later(&origins->list[i].oldest_ns, later_ns);
                put_later(&origins->list[i].newest_ns, later_ns);
        }
        return wanted.count > 0 ? take_snapshots(report) : 0;
}

static const char *block_word(uint64_t count)
{
        return count == 1 ? "block" : "blocks";
}

static void print_moment(const struct report *report, const struct moment *moment)
{
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES];
        struct group rest = {0};

        for (size_t i = 0; i < moment->group_count; i++) {
                const struct group *group = &moment->groups[i];

                if (i >= SIZES_SHOWN) {
                        rest.bytes += group->bytes * group->count;
                        rest.count += group->count;
                        continue;
                }
                printf("    %s in %" PRIu64 " %s of %s", gr_size_format(group->bytes * group->count, a, sizeof(a)),
                       group->count, block_word(group->count), gr_size_format(group->bytes, b, sizeof(b)));
                if (report->timed)
                        printf(", the oldest allocated at %.3f s", (double)group->oldest_ns / 1e9);
                printf("\n");
        }
        if (rest.count > 0)
                printf("    %s in %" PRIu64 " %s of %zu other sizes\n", gr_size_format(rest.bytes, a, sizeof(a)),
                       rest.count, block_word(rest.count), moment->group_count - SIZES_SHOWN);
}

/* Prints one kind of memory that the pool does not serve. */
static void print_kind(int device, int kind, const struct gr_trace_kind *of)
{
        static const char *const words[] = {
#define WORDS(id, name, words) words,
                GR_MEMORY_KINDS(WORDS)
#undef WORDS
        };
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES];

        printf("  %s", words[kind]);
        if (device < GR_TRACE_DEVICES)
                printf(" of GPU %d", device);
        printf(": at most %s, at the end %s\n", gr_size_format(of->peak_bytes, a, sizeof(a)),
               gr_size_format(of->end_bytes, b, sizeof(b)));
}

/* Prints what only a trace that the library has written tells. */
static void print_run(const struct report *report)
{
        const struct gr_trace *trace = &report->trace;
        const struct gr_trace_header *header = trace->header;
        char a[GR_SIZE_TEXT_BYTES];

        if (!header)
                return;
        printf("  program: %s (process %" PRIu64 ")", header->command, header->pid);
        for (int i = 0; i < GR_TRACE_DEVICES && header->devices[i][0]; i++)
                printf(", GPU %d: %s", i, header->devices[i]);
        printf("\n");
        if (trace->begin_is_missing)
                printf("  the beginning is missing: the file could not grow, and its oldest part was used again\n");
        if (trace->doubtful_count > 0)
                printf("  not counted: %s in %zu %s that may have been freed in the missing part\n",
                       gr_size_format(trace->doubtful_bytes, a, sizeof(a)), trace->doubtful_count,
                       block_word(trace->doubtful_count));
        printf("  the driver was asked for %zu of %zu allocations; %zu were refused\n", trace->counts[GR_ENTRY_MISS],
               trace->counts[GR_ENTRY_MISS] + trace->counts[GR_ENTRY_HIT], trace->counts[GR_ENTRY_REFUSED]);
        for (int i = 0; i < GR_TRACE_DEVICES; i++) {
                const struct point *worst = &report->timelines[i].worst;

                if (trace->peak_reserved_bytes[i] > 0)
                        printf("  reserved on GPU %d: at most %s\n", i,
                               gr_size_format(trace->peak_reserved_bytes[i], a, sizeof(a)));
                if (worst->fragmented_bytes > 0)
                        printf("  fragmented on GPU %d: at most %s, at %.3f s: cached, but not usable for a request\n",
                               i, gr_size_format(worst->fragmented_bytes, a, sizeof(a)), (double)worst->at / 1e9);
        }
        for (int i = 0; i <= GR_TRACE_DEVICES; i++)
                for (int kind = 0; kind < GR_MEMORY_KIND_COUNT; kind++)
                        if (trace->kinds[i][kind].peak_bytes > 0)
                                print_kind(i, kind, &trace->kinds[i][kind]);
        if (trace->counts[GR_ENTRY_LIMIT] > 0)
                printf("  limits changed: %zu times\n", trace->counts[GR_ENTRY_LIMIT]);
        if (trace->counts[GR_ENTRY_CAPTURE_BEGIN] > 0)
                printf("  captures: %zu\n", trace->counts[GR_ENTRY_CAPTURE_BEGIN]);
        gr_counters_text(&trace->counters, gr_sink_file, stdout);
}

static void print_report(const char *path, const struct report *report)
{
        char a[GR_SIZE_TEXT_BYTES], more[PATH_MAX + 32], advice[ADVICE_MOST][ADVICE_BYTES];
        size_t count = advise(report, advice);

        printf("%s: %zu operations by %u thread%s", path, report->trace.count, report->trace.thread_count,
               report->trace.thread_count == 1 ? "" : "s");
        if (report->timed)
                printf(" in %.3f s", (double)report->end_ns / 1e9);
        printf("\n");
        print_run(report);
        printf("  allocated: %s in %" PRIu64 " %s", gr_size_format(report->allocated_bytes, a, sizeof(a)),
               report->allocations, block_word(report->allocations));
        if (report->peak.bytes > 0)
                printf(", %.1f times the peak", (double)report->allocated_bytes / (double)report->peak.bytes);
        printf("\n");
        if (report->timed && report->allocations > report->end.count)
                printf("  lifetime: half of the freed blocks lived for at most %.3f ms, a tenth for at least %.3f ms\n",
                       (double)report->half_ns / 1e6, (double)report->tenth_ns / 1e6);
        printf("  peak of live memory: %s in %" PRIu64 " %s", gr_size_format(report->peak.bytes, a, sizeof(a)),
               report->peak.count, block_word(report->peak.count));
        if (report->timed)
                printf(", at %.3f s", (double)report->peak.at_ns / 1e9);
        printf("\n");
        print_moment(report, &report->peak);
        if (report->peak_snapshot) {
                snprintf(more, sizeof(more), "gpureclaim report --html %s", path);
                print_origins(&report->peak_snapshot->origins, ORIGINS_SHOWN, false, "live at the peak, by origin",
                              more);
        }
        printf("  live at the end: %s in %" PRIu64 " %s\n", gr_size_format(report->end.bytes, a, sizeof(a)),
               report->end.count, block_word(report->end.count));
        print_moment(report, &report->end);
        if (report->trace.skipped > 0)
                printf("  not counted: %zu lines, such as frees of memory that the trace did not see allocated\n",
                       report->trace.skipped);
        if (report->has_origins) {
                snprintf(more, sizeof(more), "gpureclaim leaks %s", report->origins_path);
                print_origins(&report->origins, ORIGINS_SHOWN, false, "live at the end, by origin", more);
        }
        for (size_t i = 0; i < count; i++)
                printf("%s    %s\n", i == 0 ? "  what to do:\n" : "", advice[i]);
}

static void write_moment(struct gr_json *json, const char *name, const struct report *report,
                         const struct moment *moment)
{
        gr_json_object(json, name);
        if (report->timed)
                gr_json_count(json, "at_ns", moment->at_ns);
        else
                gr_json_null(json, "at_ns");
        gr_json_count(json, "bytes", moment->bytes);
        gr_json_count(json, "blocks", moment->count);
        gr_json_array(json, "sizes");
        for (size_t i = 0; i < moment->group_count; i++) {
                gr_json_object(json, NULL);
                gr_json_count(json, "block_bytes", moment->groups[i].bytes);
                gr_json_count(json, "blocks", moment->groups[i].count);
                if (report->timed)
                        gr_json_count(json, "oldest_ns", moment->groups[i].oldest_ns);
                else
                        gr_json_null(json, "oldest_ns");
                gr_json_close(json);
        }
        gr_json_close(json);
        gr_json_close(json);
}

/* How many devices are listed: all up to the last one that has reserved memory. */
static int count_devices(const struct gr_trace *trace)
{
        int count = GR_TRACE_DEVICES;

        while (count > 0 && trace->peak_reserved_bytes[count - 1] == 0)
                count--;
        return count;
}

static void write_report(const struct report *report)
{
        struct gr_json json;

        gr_json_begin(&json, gr_sink_file, stdout, 2);
        gr_json_object(&json, NULL);
        gr_json_count(&json, "operations", report->trace.count);
        gr_json_count(&json, "threads", report->trace.thread_count);
        gr_json_count(&json, "skipped_lines", report->trace.skipped);
        gr_json_count(&json, "allocations", report->allocations);
        gr_json_count(&json, "allocated_bytes", report->allocated_bytes);
        if (report->timed) {
                gr_json_count(&json, "lifetime_median_ns", report->half_ns);
                gr_json_count(&json, "lifetime_longest_tenth_ns", report->tenth_ns);
        } else {
                gr_json_null(&json, "lifetime_median_ns");
                gr_json_null(&json, "lifetime_longest_tenth_ns");
        }
        if (report->trace.header) {
                gr_json_string(&json, "program", report->trace.header->command);
                gr_json_bool(&json, "begin_is_missing", report->trace.begin_is_missing);
                gr_json_count(&json, "doubtful_blocks", report->trace.doubtful_count);
                gr_json_count(&json, "doubtful_bytes", report->trace.doubtful_bytes);
                gr_json_count(&json, "hits", report->trace.counts[GR_ENTRY_HIT]);
                gr_json_count(&json, "misses", report->trace.counts[GR_ENTRY_MISS]);
                gr_json_count(&json, "refused", report->trace.counts[GR_ENTRY_REFUSED]);
                gr_json_array(&json, "peak_reserved_bytes");
                for (int i = 0; i < count_devices(&report->trace); i++)
                        gr_json_count(&json, NULL, report->trace.peak_reserved_bytes[i]);
                gr_json_close(&json);
                gr_json_array(&json, "fragmented");
                for (int i = 0; i < count_devices(&report->trace); i++) {
                        gr_json_object(&json, NULL);
                        gr_json_count(&json, "bytes", report->timelines[i].worst.fragmented_bytes);
                        gr_json_count(&json, "at_ns", report->timelines[i].worst.at);
                        gr_json_close(&json);
                }
                gr_json_close(&json);
                gr_counters_json(&report->trace.counters, &json);
        }
        write_moment(&json, "peak", report, &report->peak);
        if (report->peak_snapshot) {
                gr_json_object(&json, "peak_by_origin");
                write_origins(&json, &report->peak_snapshot->origins);
                gr_json_close(&json);
        }
        write_moment(&json, "end", report, &report->end);
        if (report->has_origins) {
                gr_json_object(&json, "end_by_origin");
                write_origins(&json, &report->origins);
                gr_json_close(&json);
        }
        gr_json_close(&json);
        gr_json_end(&json);
}

static void write_csv(const struct gr_trace *trace)
{
        printf("Thread,Time,Action,Pointer,Size,Stream\n");
        for (size_t i = 0; i < trace->count; i++) {
                const struct gr_trace_op *op = &trace->ops[i];

                printf("%" PRIu64 ",%" PRIu64 ",%s,0x%" PRIx64 ",%" PRIu64 ",0x0\n", trace->thread_ids[op->thread],
                       op->time_ns, op->is_free ? "free" : "allocate", op->ptr, op->bytes);
        }
}

/* What --output names: standard output, from begin_output on. */
static struct {
        bool begun;
        char *name; /* as in begin_file; NULL: the file is written as it is */
} to;

/* From the first call on, standard output is the file; NULL: it stays what it is. 0 or -errno. */
static int begin_output(const char *path)
{
        int fd;

        if (!path || to.begun)
                return 0;
        fd = begin_file(path, &to.name);
        if (fd < 0) /* a device or a link, or no file can be made beside it */
                fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        to.begun = fd >= 0 && dup2(fd, STDOUT_FILENO) >= 0;
        return to.begun ? 0 : -errno;
}

/* 0 or -errno. */
static int end_output(const char *path)
{
        int error = 0;

        if (fflush(stdout) != 0)
                error = errno;
        else if (ferror(stdout)) /* asks once more why an earlier write failed */
                error = write(STDOUT_FILENO, "", 1) < 0 ? errno : EIO;
        __fpurge(stdout); /* it is not told once more when the command ends */
        clearerr(stdout);
        return to.name ? end_file(path, to.name, error) : -error;
}

/* Whether the output would take the place of what is to be read, or of another file that the library has written. */
static bool is_recording(const char *output, const struct arguments *arguments)
{
        struct stat there, input;

        if (stat(output, &there) != 0 || !S_ISREG(there.st_mode))
                return false;
        for (int i = 0; i < arguments->count; i++)
                if (stat(arguments->rest[i], &input) == 0 && input.st_dev == there.st_dev &&
                    input.st_ino == there.st_ino)
                        return true;
        return reader_of(output) != NULL;
}

/* format: NULL for people. EXIT_SUCCESS or EXIT_FAILURE. */
static int report_file(const char *path, const char *format, const char *output)
{
        bool examined = !format || (strcmp(format, "csv") && strcmp(format, "perfetto"));
        struct report report = {0};
        const char *reader;
        size_t line = 0;
        int rc = gr_trace_read(path, &report.trace, &line);

        if (!rc && examined)
                rc = examine_trace(&report);
        if (!rc && examined)
                rc = read_origins(path, &report);
        if (rc == -EINVAL && (reader = reader_of(path)) && !strcmp(reader, "leaks"))
                complain("%s: a file of GPURECLAIM_BACKTRACE; to read it: gpureclaim %s %s", path, reader,
                         shell_word(path));
        else if (rc == -EINVAL && line > 0)
                complain("%s: line %zu: not a trace of allocations", path, line);
        else if (rc == -EINVAL)
                complain("%s: not a trace of allocations", path);
        else if (rc == -EPROTONOSUPPORT)
                complain("%s: a trace of another version of gpureclaim; this one reads version %d", path,
                         GR_TRACE_VERSION);
        else if (rc)
                complain("%s: %s", path, strerror(-rc));
        else if ((rc = begin_output(output)))
                complain("report: --output %s: %s", output, strerror(-rc));
        else if (!format)
                print_report(path, &report);
        else if (!strcmp(format, "csv"))
                write_csv(&report.trace);
        else if (!strcmp(format, "json"))
                write_report(&report);
        else if (!strcmp(format, "html"))
                write_page(path, &report);
        else if (!strcmp(format, "pytorch"))
                write_pytorch(&report);
        else
                write_perfetto(&report.trace);
        free(report.peak.groups);
        free(report.end.groups);
        for (size_t i = 0; i < report.snapshot_count; i++)
                free(report.snapshots[i].origins.list);
        free(report.snapshots);
        free(report.timelines);
        gr_trace_free(&report.trace);
        return rc ? EXIT_FAILURE : EXIT_SUCCESS;
}

int command_report(const struct arguments *arguments)
{
        static const char *const formats[] = {"csv", "html", "json", "perfetto", "pytorch"};
        const char *word = flag_value(arguments, "format"), *output = flag_value(arguments, "output"), *format = NULL;
        const char *ending = output && !word ? strrchr(output, '.') : NULL;
        bool understood = !word || strcmp(word, "summary") == 0;
        int status = EXIT_SUCCESS, rc;

        if (output && strcmp(output, "-") == 0)
                output = NULL;
        if (word && strcmp(word, "rmm-csv") == 0)
                word = "csv";
        for (size_t i = 0; i < sizeof(formats) / sizeof(formats[0]); i++) {
                bool named = word && strcmp(word, formats[i]) == 0;

                understood |= named;
                if (!named && !flag_value(arguments, formats[i]))
                        continue;
                if (format) {
                        complain("report: --%s and --%s exclude each other", format, formats[i]);
                        return STATUS_USAGE;
                }
                format = formats[i];
        }
        if (!understood) {
                complain("report: --format %s: not understood; see gpureclaim help report", word);
                return STATUS_USAGE;
        }
        for (size_t i = 0; ending && !format && i < sizeof(formats) / sizeof(formats[0]); i++)
                if (strcmp(ending + 1, formats[i]) == 0)
                        format = formats[i];
        if (arguments->count < 1 || (format && arguments->count > 1)) {
                complain("report%s%s takes one FILE%s; see gpureclaim help report", format ? " --" : "",
                         format ? format : "", format ? "" : " or more");
                return STATUS_USAGE;
        }
        if (output && is_recording(output, arguments)) {
                complain("report: --output %s: a recording, which would be lost", output);
                return EXIT_FAILURE;
        }
        for (int i = 0; i < arguments->count; i++) {
                bool told = report_file(arguments->rest[i], format, output) == EXIT_SUCCESS;

                if (!told)
                        status = EXIT_FAILURE;
                else if (i + 1 < arguments->count)
                        printf("\n");
        }
        if (to.begun && (rc = end_output(output))) {
                complain("report: --output %s: %s", output, strerror(-rc));
                status = EXIT_FAILURE;
        }
        return status;
}
