/* gpureclaim leaks: the blocks that a program has not freed, by the stack that allocated them. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/json.h"
#include "base/log.h"
#include "base/size.h"
#include "command.h"
#include "leaks.h"
#include "origins.h"

#define SHOWN 10 /* origins, unless all are asked for */

static const char *block_word(double count)
{
        return count >= 0.5 && count < 1.5 ? "block" : "blocks";
}

/* Prints "1.000 GiB in 16 blocks", with "about" before it where it is estimated from a sample. */
static void print_amount(const struct origins *origins, double bytes, double count)
{
        char a[GR_SIZE_TEXT_BYTES];

        printf("%s%s in %.0f %s", origins->header.sample_bytes ? "about " : "",
               gr_size_format((uint64_t)(bytes + 0.5), a, sizeof(a)), count, block_word(count));
}

static void print_text(const char *text)
{
        char clean[1024];

        snprintf(clean, sizeof(clean), "%s", text);
        gr_log_clean(clean, strlen(clean));
        fputs(clean, stdout);
}

void format_frame(const struct frame *frame, const struct place *place, char *text, size_t bytes)
{
        const char *slash = frame->module ? strrchr(frame->module->path, '/') : NULL;
        const char *name = slash ? slash + 1 : frame->module ? frame->module->path : NULL;
        const char *function = place->function ? place->function : "";
        uint64_t address = frame->word & GR_ORIGINS_ADDRESS_MASK;

        if (place->file)
                snprintf(text, bytes, "%s (%s:%u)", function, place->file, place->line);
        else if (name)
                snprintf(text, bytes, *function ? "%s (%s+0x%" PRIx64 ")" : "%s%s+0x%" PRIx64, function, name,
                         address - 1);
        else if (*function)
                snprintf(text, bytes, "%s", function);
        else
                snprintf(text, bytes, "0x%" PRIx64, address);
        gr_log_clean(text, strlen(text));
}

static void print_place(const struct place *place, const struct frame *frame)
{
        char text[2048];

        format_frame(frame, place, text, sizeof(text));
        printf("      %s\n", text);
}

/* Prints one line for the functions from frame `at` up to the next frame of Python. Returns the place of that frame. */
static size_t print_skipped(const struct origin *origin, size_t at)
{
        const char *names[3] = {NULL};
        size_t functions = 0, name_count = 0, count;

        for (; at < origin->frame_count && !is_python(&origin->frames[at]); at++) {
                const struct gr_origins_module *module = origin->frames[at].module;
                const char *slash = module ? strrchr(module->path, '/') : NULL, *name = slash ? slash + 1 : "?";
                size_t seen = 0;

                places_of(&origin->frames[at], &count);
                functions += count;
                while (seen < name_count && seen < 3 && strcmp(names[seen], name) != 0)
                        seen++;
                if (seen == name_count && name_count++ < 3)
                        names[seen] = name;
        }
        if (at == origin->frame_count)
                return at; /* only what started the interpreter is left: not printed */
        printf("      %zu function%s of ", functions, functions == 1 ? "" : "s");
        for (size_t i = 0; i < 3 && i < name_count; i++) {
                printf("%s", i > 0 ? ", " : "");
                print_text(names[i]);
        }
        printf("%s\n", name_count > 3 ? " and others" : "");
        return at;
}

/* native: also prints the functions between those of Python. */
static void print_frames(const struct origin *origin, bool native)
{
        size_t i = 0, count;
        bool any_python = false;

        if (!origin->stack)
                printf("      from stacks for which there was no more room\n");
        while (i < origin->frame_count && !any_python)
                any_python = is_python(&origin->frames[i++]);
        for (i = 0; i < origin->frame_count; i++) {
                const struct place *places = places_of(&origin->frames[i], &count);

                if (any_python && !native && !is_python(&origin->frames[i])) {
                        i = print_skipped(origin, i) - 1;
                        continue;
                }
                for (size_t p = 0; p < count; p++)
                        print_place(&places[p], &origin->frames[i]);
                if (places[count - 1].function && !strcmp(places[count - 1].function, "main"))
                        break; /* only the C library called main */
        }
}

void each_shown_place(const struct origin *origin,
                      void (*take)(void *arg, const struct frame *frame, const struct place *place), void *arg)
{
        bool any_python = false;
        size_t count;

        for (size_t i = 0; i < origin->frame_count; i++)
                any_python |= is_python(&origin->frames[i]);
        for (size_t i = 0; i < origin->frame_count; i++) {
                const struct frame *frame = &origin->frames[i];
                const struct place *places = places_of(frame, &count);

                if (any_python && !is_python(frame))
                        continue;
                for (size_t p = 0; p < count; p++)
                        take(arg, frame, &places[p]);
                if (places[count - 1].function && !strcmp(places[count - 1].function, "main"))
                        break;
        }
}

static void print_origin(const struct origins *origins, const struct origin *origin, bool native)
{
        double bytes = origin->all_bytes, count = origin->all_blocks;
        char a[GR_SIZE_TEXT_BYTES];

        printf("\n  ");
        print_amount(origins, bytes, count);
        if (origins->since_look_ns) {
                bytes -= origin->looked_bytes;
                count -= origin->looked_blocks;
                printf("; since the last look, %.0f s ago: %s%s", (double)origins->since_look_ns / 1e9,
                       bytes < 0 ? "-" : "+", gr_size_format((uint64_t)fabs(bytes), a, sizeof(a)));
                printf(" and %+.0f %s", count, block_word(fabs(count)));
        }
        printf("\n    the oldest allocated at %.3f s", (double)origin->oldest_ns / 1e9);
        if (origins->now_ns > 0) /* the blocks were read a little later */
                printf(" (%.0f s ago)", (double)(origins->now_ns - gr_min(origin->oldest_ns, origins->now_ns)) / 1e9);
        if (origin->several_threads)
                printf(", by several threads\n");
        else
                printf(", by thread %u\n", origin->oldest_thread);
        print_frames(origin, native);
}

void print_origins(const struct origins *origins, size_t shown, bool native, const char *head, const char *more)
{
        double rest_bytes = origins->whole.all_bytes, rest_blocks = origins->whole.all_blocks;
        char a[GR_SIZE_TEXT_BYTES];

        printf("  %s: ", head);
        print_amount(origins, origins->whole.all_bytes, origins->whole.all_blocks);
        printf(" of %zu origin%s\n", origins->count, origins->count == 1 ? "" : "s");
        if (origins->header.sample_bytes) {
                printf("  from a sample: one block in %s", gr_size_format(origins->header.sample_bytes, a, sizeof(a)));
                if (origins->most_sample_bytes > origins->header.sample_bytes)
                        printf(" to %s", gr_size_format(origins->most_sample_bytes, a, sizeof(a)));
                printf("; off by about %.0f %%\n",
                       origins->whole.all_bytes > 0 ? 100 * sqrt(origins->whole.variance) / origins->whole.all_bytes
                                                    : 0);
        }
        if (origins->header.lost_blocks > 0)
                printf("  not here: %" PRIu64 " blocks, for which the file had no room\n", origins->header.lost_blocks);
        if (origins->cut_blocks > 0)
                printf("  not here: up to %" PRIu64 " %s, as the end of the file is missing\n", origins->cut_blocks,
                       block_word((double)origins->cut_blocks));
        for (size_t i = 0; i < shown && i < origins->count; i++) {
                const struct origin *origin = &origins->list[i];

                print_origin(origins, origin, native);
                rest_bytes -= origin->all_bytes;
                rest_blocks -= origin->all_blocks;
        }
        if (shown < origins->count) {
                printf("\n  ");
                print_amount(origins, rest_bytes, rest_blocks);
                printf(" of %zu other origin%s (%s)\n", origins->count - shown, origins->count - shown == 1 ? "" : "s",
                       more);
        }
}

static void write_origin(struct gr_json *json, const struct origins *origins, const struct origin *origin)
{
        gr_json_object(json, NULL);
        gr_json_number(json, "bytes", "%.0f", origin->all_bytes);
        gr_json_number(json, "blocks", "%.0f", origin->all_blocks);
        gr_json_number(json, "error_bytes", "%.0f", sqrt(origin->variance));
        gr_json_count(json, "noted_bytes", origin->bytes);
        gr_json_count(json, "noted_blocks", origin->blocks);
        gr_json_count(json, "oldest_ns", origin->oldest_ns);
        gr_json_count(json, "newest_ns", origin->newest_ns);
        if (origin->several_threads)
                gr_json_null(json, "thread");
        else
                gr_json_count(json, "thread", origin->oldest_thread);
        if (origins->since_look_ns) {
                gr_json_number(json, "last_look_bytes", "%.0f", origin->looked_bytes);
                gr_json_number(json, "last_look_blocks", "%.0f", origin->looked_blocks);
        }
        gr_json_array(json, "frames");
        for (size_t i = 0; i < origin->frame_count; i++) {
                const struct frame *frame = &origin->frames[i];
                size_t count;
                const struct place *places = places_of(frame, &count);

                for (size_t p = 0; p < count; p++) {
                        gr_json_object(json, NULL);
                        if (places[p].function)
                                gr_json_string(json, "function", places[p].function);
                        if (places[p].file) {
                                gr_json_string(json, "file", places[p].file);
                                gr_json_count(json, "line", places[p].line);
                        }
                        if (frame->module)
                                gr_json_string(json, "module", frame->module->path);
                        if (!(frame->word & GR_ORIGINS_IS_PYTHON))
                                gr_json_count(json, "return_address", frame->word & GR_ORIGINS_ADDRESS_MASK);
                        gr_json_close(json);
                }
        }
        gr_json_close(json);
        gr_json_close(json);
}

void write_origins(struct gr_json *json, const struct origins *origins)
{
        gr_json_count(json, "sample_bytes", origins->header.sample_bytes);
        gr_json_number(json, "bytes", "%.0f", origins->whole.all_bytes);
        gr_json_number(json, "blocks", "%.0f", origins->whole.all_blocks);
        gr_json_number(json, "error_bytes", "%.0f", sqrt(origins->whole.variance));
        gr_json_count(json, "lost_blocks", origins->header.lost_blocks);
        gr_json_count(json, "cut_blocks", origins->cut_blocks);
        gr_json_array(json, "origins");
        for (size_t i = 0; i < origins->count; i++)
                write_origin(json, origins, &origins->list[i]);
        gr_json_close(json);
}

static void write_leaks(const struct origins *origins)
{
        struct gr_json json;

        gr_json_begin(&json, gr_sink_file, stdout, 3);
        gr_json_object(&json, NULL);
        gr_json_count(&json, "pid", origins->header.pid);
        gr_json_string(&json, "program", origins->header.command);
        write_origins(&json, origins);
        gr_json_close(&json);
        gr_json_end(&json);
}

/* EXIT_SUCCESS or EXIT_FAILURE. */
static int leaks_of(const char *what, const struct arguments *arguments)
{
        struct origins origins = {0};
        int rc;

        if (!origins_open(&origins, what))
                return EXIT_FAILURE;
        rc = origins_read(&origins, true, NULL);
        if (rc) {
                complain("%s: %s", what,
                         rc == -EPROTONOSUPPORT ? "a file of another version of gpureclaim"
                         : rc == -EINVAL        ? "damaged, or its end is missing"
                                                : strerror(-rc));
        } else if (flag_value(arguments, "json")) {
                write_leaks(&origins);
        } else {
                printf("process %" PRIu64 ", %s\n", origins.header.pid, origins.header.command);
                print_origins(&origins, flag_value(arguments, "all") ? origins.count : SHOWN,
                              flag_value(arguments, "native"), "live", "--all");
        }
        return rc ? EXIT_FAILURE : EXIT_SUCCESS;
}

int command_leaks(const struct arguments *arguments)
{
        bool json = flag_value(arguments, "json");
        int status = EXIT_SUCCESS;

        if (arguments->count < 1 || (json && arguments->count > 1)) {
                complain("leaks%s takes one PID or FILE%s; see gpureclaim help leaks", json ? " --json" : "",
                         json ? "" : " or more");
                return STATUS_USAGE;
        }
        for (int i = 0; i < arguments->count; i++) {
                bool told = leaks_of(arguments->rest[i], arguments) == EXIT_SUCCESS;

                if (!told)
                        status = EXIT_FAILURE;
                else if (i + 1 < arguments->count)
                        printf("\n");
        }
        return status;
}
