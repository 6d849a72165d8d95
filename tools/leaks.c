/* gpureclaim leaks: the blocks that a program has not freed, by the stack that allocated them. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/json.h"
#include "base/log.h"
#include "base/origins_file.h"
#include "base/size.h"
#include "command.h"
#include "symbols.h"
#include "trace.h"

#define SHOWN 10 /* origins, unless all are asked for */

struct frame {
        uint64_t word;                          /* as the file has it */
        struct place python;                    /* where it is one of Python */
        const struct gr_origins_module *module; /* NULL: not known */
        struct places places;
};

struct origin {
        const struct gr_origins_stack *stack; /* NULL: those whose stack is not known */
        uint64_t blocks, bytes;               /* that are in the file */
        double all_blocks, all_bytes;         /* that there are, by these: more where only a sample is noted */
        double variance;                      /* of all_bytes, estimated from the sample */
        double looked_blocks, looked_bytes;   /* that there were at the last look */
        uint64_t oldest_ns, newest_ns;
        uint32_t oldest_thread;
        bool several_threads;
        struct frame *frames;
        size_t frame_count;
};

struct leaks {
        int fd;
        bool writable;
        char root[32]; /* in front of the paths of modules: "", or the process's root */
        struct gr_origins_header header;
        char *records; /* with the header before them, so that a record's number is its place */
        size_t records_bytes, record_count;
        uint32_t *numbers; /* of the records, rising */
        struct gr_origins_block *blocks;
        size_t block_count;
        struct origin *origins, whole;
        uint64_t most_sample_bytes; /* of all blocks */
        size_t origin_count;
        uint64_t now_ns; /* since the file began; 0: the program is not running */
};

static uint64_t clock_ns(clockid_t clock)
{
        struct timespec now;

        clock_gettime(clock, &now);
        return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Reads so many bytes from there; what is behind the file's end is zero. */
static void *read_part(int fd, uint64_t at, size_t bytes)
{
        char *read_bytes = calloc(1, bytes + 8);
        size_t got = 0;

        while (read_bytes && got < bytes) {
                ssize_t n = pread(fd, read_bytes + got, bytes - got, (off_t)(at + got));

                if (n < 0) {
                        free(read_bytes);
                        return NULL;
                }
                if (n == 0)
                        break;
                got += (size_t)n;
        }
        return read_bytes;
}

static int by_number(const void *a, const void *b)
{
        uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

        return (x > y) - (x < y);
}

/* The place of a record's number among them; NULL: there is none. */
static const uint32_t *find(const struct leaks *leaks, uint32_t number)
{
        return bsearch(&number, leaks->numbers, leaks->record_count, sizeof(number), by_number);
}

static uint32_t number_of(const struct leaks *leaks, const struct gr_origins_stack *stack)
{
        return (uint32_t)(((const char *)stack - leaks->records) / 8);
}

/* The record of this number and kind; NULL: there is none. */
static const struct gr_origins_record *record(const struct leaks *leaks, uint32_t number, enum gr_origins_kind kind)
{
        const struct gr_origins_record *found;

        if (!find(leaks, number))
                return NULL;
        found = (const void *)(leaks->records + (size_t)number * 8);
        return found->kind == (uint32_t)kind ? found : NULL;
}

/* Finds where the records begin. 0 or -errno. */
static int read_records(struct leaks *leaks)
{
        size_t at = sizeof(leaks->header);

        leaks->numbers = malloc((leaks->records_bytes / 8 + 1) * sizeof(*leaks->numbers));
        if (!leaks->numbers)
                return -ENOMEM;
        while (leaks->records_bytes - at >= sizeof(struct gr_origins_record)) {
                const struct gr_origins_record *found = (const void *)(leaks->records + at);
                size_t least = found->kind == GR_ORIGINS_MODULE   ? sizeof(struct gr_origins_module) + 1
                               : found->kind == GR_ORIGINS_PYTHON ? sizeof(struct gr_origins_python)
                                                                  : sizeof(struct gr_origins_stack);

                if (found->bytes % 8 || found->bytes < least || found->bytes > leaks->records_bytes - at)
                        return -EINVAL;
                leaks->numbers[leaks->record_count++] = (uint32_t)(at / 8);
                at += found->bytes;
        }
        return 0;
}

/* 0 or -errno; -EINVAL: not such a file; -EPROTONOSUPPORT: of another version. */
static int read_file(struct leaks *leaks)
{
        struct stat about;
        uint64_t blocks, most;

        if (fstat(leaks->fd, &about) != 0)
                return -errno;
        if (pread(leaks->fd, &leaks->header, sizeof(leaks->header), 0) != (ssize_t)sizeof(leaks->header) ||
            memcmp(leaks->header.magic, GR_ORIGINS_MAGIC, sizeof(leaks->header.magic)) != 0)
                return -EINVAL;
        if (leaks->header.version != GR_ORIGINS_VERSION || leaks->header.header_bytes != sizeof(leaks->header))
                return -EPROTONOSUPPORT;
        gr_trace_make_text(leaks->header.command, sizeof(leaks->header.command));
        /* The blocks first: each names a stack that is among the records by then */
        most = leaks->header.blocks_at < (uint64_t)about.st_size
                       ? ((uint64_t)about.st_size - leaks->header.blocks_at) / sizeof(*leaks->blocks)
                       : 0;
        blocks = leaks->header.blocks < most ? leaks->header.blocks : most;
        leaks->blocks = read_part(leaks->fd, leaks->header.blocks_at, blocks * sizeof(*leaks->blocks));
        leaks->block_count = blocks;
        if (pread(leaks->fd, &leaks->header.records_bytes, sizeof(uint64_t),
                  offsetof(struct gr_origins_header, records_bytes)) != (ssize_t)sizeof(uint64_t))
                return -EIO;
        leaks->records_bytes = leaks->header.records_bytes < (uint64_t)about.st_size ? leaks->header.records_bytes
                                                                                     : (uint64_t)about.st_size;
        if (leaks->records_bytes < sizeof(leaks->header))
                return -EINVAL;
        leaks->records = read_part(leaks->fd, 0, leaks->records_bytes);
        return leaks->blocks && leaks->records ? read_records(leaks) : -ENOMEM;
}

static void count_block(struct origin *origin, const struct gr_origins_block *block)
{
        double bytes = (double)block->bytes, sample = (double)block->sample_bytes;
        /* By the chance that a block of its size is noted (Horvitz and Thompson) */
        double each = bytes > 0 && bytes < sample ? 1 / -expm1(-bytes / sample) : 1;

        if (origin->blocks == 0 || block->time_ns < origin->oldest_ns)
                origin->oldest_ns = block->time_ns;
        if (origin->blocks == 0)
                origin->oldest_thread = block->thread;
        origin->several_threads |= origin->oldest_thread != block->thread;
        if (block->time_ns > origin->newest_ns)
                origin->newest_ns = block->time_ns;
        origin->blocks++;
        origin->bytes += block->bytes;
        origin->all_blocks += each;
        origin->all_bytes += each * bytes;
        origin->variance += each * (each - 1) * bytes * bytes;
}

static int by_stack(const void *a, const void *b)
{
        const struct gr_origins_block *x = a, *y = b;

        return (x->stack > y->stack) - (x->stack < y->stack);
}

static int by_bytes(const void *a, const void *b)
{
        const struct origin *x = a, *y = b;

        return (x->all_bytes < y->all_bytes) - (x->all_bytes > y->all_bytes);
}

static void begin_origin(struct origin *origin, const struct gr_origins_stack *stack)
{
        origin->stack = stack;
        if (stack) {
                origin->looked_bytes = (double)stack->looked_bytes;
                origin->looked_blocks = (double)stack->looked_blocks;
        }
}

/* 0 or -ENOMEM. */
static int group(struct leaks *leaks)
{
        size_t with_blocks, at = 0;

        leaks->origins = calloc(leaks->block_count + leaks->record_count + 1, sizeof(*leaks->origins));
        if (!leaks->origins)
                return -ENOMEM;
        qsort(leaks->blocks, leaks->block_count, sizeof(*leaks->blocks), by_stack);
        for (size_t i = 0; i < leaks->block_count; i++) {
                const struct gr_origins_block *block = &leaks->blocks[i];
                const struct gr_origins_stack *stack = (const void *)record(leaks, block->stack, GR_ORIGINS_STACK);

                if (!block->address)
                        continue;
                if (leaks->origin_count == 0 || leaks->origins[leaks->origin_count - 1].stack != stack)
                        begin_origin(&leaks->origins[leaks->origin_count++], stack);
                count_block(&leaks->origins[leaks->origin_count - 1], block);
                count_block(&leaks->whole, block);
                if (block->sample_bytes > leaks->most_sample_bytes)
                        leaks->most_sample_bytes = block->sample_bytes;
        }
        /* And stacks that had some at the last look: the same lines may have others now, by another stack */
        with_blocks = leaks->origin_count;
        for (size_t i = 0; i < leaks->record_count; i++) {
                const struct gr_origins_stack *stack = (const void *)record(leaks, leaks->numbers[i], GR_ORIGINS_STACK);

                if (!stack)
                        continue;
                while (at < with_blocks && leaks->origins[at].stack < stack)
                        at++;
                if (stack->looked_blocks && (at == with_blocks || leaks->origins[at].stack != stack))
                        begin_origin(&leaks->origins[leaks->origin_count++], stack);
        }
        return 0;
}

static void read_frames(const struct leaks *leaks, struct origin *origin)
{
        size_t count = origin->stack ? (origin->stack->head.bytes - sizeof(*origin->stack)) / 8 : 0;

        origin->frames = calloc(count + 1, sizeof(*origin->frames));
        for (size_t i = 0; origin->frames && i < count; i++) {
                struct frame *frame = &origin->frames[origin->frame_count++];

                frame->word = origin->stack->frames[i];
                if (frame->word & GR_ORIGINS_IS_PYTHON) {
                        const struct gr_origins_python *python =
                                (const void *)record(leaks, (uint32_t)frame->word, GR_ORIGINS_PYTHON);
                        const char *end = python ? (const char *)python + python->head.bytes : NULL, *file;

                        if (!python)
                                continue;
                        file = memchr(python->name_and_file, '\0', (size_t)(end - python->name_and_file));
                        if (file && ++file < end && memchr(file, '\0', (size_t)(end - file)))
                                frame->python = (struct place){python->name_and_file, file, python->line};
                        continue;
                }
                frame->module = (const void *)record(leaks, (uint32_t)(frame->word >> GR_ORIGINS_MODULE_SHIFT),
                                                     GR_ORIGINS_MODULE);
                if (frame->module &&
                    (frame->module->id_bytes > sizeof(frame->module->id) ||
                     !memchr(frame->module->path, '\0', frame->module->head.bytes - sizeof(*frame->module))))
                        frame->module = NULL;
        }
}

static int by_address(const void *a, const void *b)
{
        const struct frame *x = *(struct frame *const *)a, *y = *(struct frame *const *)b;

        if (x->module != y->module)
                return x->module < y->module ? -1 : 1;
        return (x->word > y->word) - (x->word < y->word);
}

/* Names all frames: those of a module in one go, and each address once. */
static void name_frames(struct leaks *leaks)
{
        size_t count = 0, used = 0;
        struct frame **frames;
        uint64_t *addresses;
        struct places *places;

        for (size_t i = 0; i < leaks->origin_count; i++) {
                read_frames(leaks, &leaks->origins[i]);
                count += leaks->origins[i].frame_count;
        }
        frames = calloc(count + 1, sizeof(*frames));
        addresses = calloc(count + 1, sizeof(*addresses));
        places = calloc(count + 1, sizeof(*places));
        for (size_t i = 0; frames && i < leaks->origin_count; i++)
                for (size_t f = 0; f < leaks->origins[i].frame_count; f++)
                        if (leaks->origins[i].frames[f].module)
                                frames[used++] = &leaks->origins[i].frames[f];
        if (frames)
                qsort(frames, used, sizeof(*frames), by_address);
        for (size_t begin = 0, end; addresses && places && begin < used; begin = end) {
                const struct gr_origins_module *module = frames[begin]->module;
                char path[PATH_MAX + sizeof(leaks->root)];
                size_t distinct = 0;

                for (end = begin; end < used && frames[end]->module == module; end++) {
                        uint64_t address = (frames[end]->word & GR_ORIGINS_ADDRESS_MASK) - 1; /* the call */

                        if (distinct == 0 || addresses[distinct - 1] != address)
                                addresses[distinct++] = address;
                }
                snprintf(path, sizeof(path), "%s%s", leaks->root, module->path);
                symbols_name(path, module->id, module->id_bytes, addresses, distinct, places);
                for (size_t i = begin, n = 0; i < end; i++) {
                        n += i > begin && frames[i]->word != frames[i - 1]->word;
                        frames[i]->places = places[n];
                }
        }
        free(frames);
        free(addresses);
        free(places);
}

/* The places of a frame: at least one. */
static const struct place *places_of(const struct frame *frame, size_t *ret_count)
{
        *ret_count = frame->places.count > 0 ? frame->places.count : 1;
        return frame->places.count > 0 ? frame->places.list : &frame->python;
}

static int compare_texts(const char *a, const char *b)
{
        return strcmp(a ? a : "", b ? b : "");
}

/* Frames of one line are the same, wherever the compiler has put its code; without lines, those of one address. */
static int compare_frames(const struct frame *x, const struct frame *y)
{
        size_t x_count, y_count;
        const struct place *x_places = places_of(x, &x_count), *y_places = places_of(y, &y_count);
        int order = !x_places->file - !y_places->file;

        if (x->word == y->word || order)
                return order;
        if (!x_places->file || x_count != y_count)
                return (x_places->file ? x_count < y_count : x->word < y->word) ? -1 : 1;
        for (size_t i = 0; !order && i < x_count; i++) {
                order = compare_texts(x_places[i].file, y_places[i].file);
                if (!order)
                        order = (x_places[i].line > y_places[i].line) - (x_places[i].line < y_places[i].line);
                if (!order)
                        order = compare_texts(x_places[i].function, y_places[i].function);
        }
        return order;
}

static int by_frames(const void *a, const void *b)
{
        const struct origin *x = a, *y = b;
        int order = (x->frame_count > y->frame_count) - (x->frame_count < y->frame_count);

        for (size_t i = 0; !order && i < x->frame_count; i++)
                order = compare_frames(&x->frames[i], &y->frames[i]);
        return order;
}

/* Makes one of those whose frames have the same names, and puts the largest first. */
static void merge(struct leaks *leaks)
{
        size_t count = 0;

        qsort(leaks->origins, leaks->origin_count, sizeof(*leaks->origins), by_frames);
        for (size_t i = 0; i < leaks->origin_count; i++) {
                const struct origin *origin = &leaks->origins[i];
                struct origin *to = count > 0 ? &leaks->origins[count - 1] : NULL;

                if (!to || by_frames(to, origin) != 0) {
                        leaks->origins[count++] = *origin;
                        continue;
                }
                if (to->blocks == 0) {
                        to->several_threads = origin->several_threads;
                        to->oldest_thread = origin->oldest_thread;
                        to->oldest_ns = origin->oldest_ns;
                        to->newest_ns = origin->newest_ns;
                } else if (origin->blocks > 0) {
                        to->several_threads |= origin->several_threads || origin->oldest_thread != to->oldest_thread;
                        to->oldest_ns = origin->oldest_ns < to->oldest_ns ? origin->oldest_ns : to->oldest_ns;
                        to->newest_ns = origin->newest_ns > to->newest_ns ? origin->newest_ns : to->newest_ns;
                }
                to->blocks += origin->blocks;
                to->bytes += origin->bytes;
                to->all_blocks += origin->all_blocks;
                to->all_bytes += origin->all_bytes;
                to->variance += origin->variance;
                to->looked_blocks += origin->looked_blocks;
                to->looked_bytes += origin->looked_bytes;
        }
        leaks->origin_count = 0;
        for (size_t i = 0; i < count; i++)
                if (leaks->origins[i].blocks > 0)
                        leaks->origins[leaks->origin_count++] = leaks->origins[i];
        qsort(leaks->origins, leaks->origin_count, sizeof(*leaks->origins), by_bytes);
}

static const char *blocks(double count)
{
        return count >= 0.5 && count < 1.5 ? "block" : "blocks";
}

/* "1.000 GiB in 16 blocks", estimated where it is by a sample. */
static void print_amount(const struct leaks *leaks, double bytes, double count)
{
        char a[GR_SIZE_TEXT_BYTES];

        printf("%s%s in %.0f %s", leaks->header.sample_bytes ? "about " : "",
               gr_size_format((uint64_t)(bytes + 0.5), a, sizeof(a)), count, blocks(count));
}

static void print_text(const char *text)
{
        char clean[1024];

        snprintf(clean, sizeof(clean), "%s", text);
        gr_log_clean(clean, strlen(clean));
        fputs(clean, stdout);
}

static void print_place(const struct place *place, const struct frame *frame)
{
        printf("      ");
        if (place->function)
                print_text(place->function);
        else if (!frame->module)
                printf("0x%" PRIx64, frame->word & GR_ORIGINS_ADDRESS_MASK);
        if (place->file) {
                printf(" (");
                print_text(place->file);
                printf(":%u)", place->line);
        } else if (frame->module) {
                const char *slash = strrchr(frame->module->path, '/');

                printf("%s", place->function ? " (" : "");
                print_text(slash ? slash + 1 : frame->module->path);
                printf("+0x%" PRIx64 "%s", (frame->word & GR_ORIGINS_ADDRESS_MASK) - 1, place->function ? ")" : "");
        }
        printf("\n");
}

static void print_frames(const struct origin *origin)
{
        if (!origin->stack)
                printf("      from stacks for which there was no more room\n");
        for (size_t i = 0; i < origin->frame_count; i++) {
                size_t count;
                const struct place *places = places_of(&origin->frames[i], &count);

                for (size_t p = 0; p < count; p++)
                        print_place(&places[p], &origin->frames[i]);
                if (places[count - 1].function && !strcmp(places[count - 1].function, "main"))
                        break; /* what called it is the C library */
        }
}

static void print_origin(const struct leaks *leaks, const struct origin *origin)
{
        double bytes = origin->all_bytes, count = origin->all_blocks;
        char a[GR_SIZE_TEXT_BYTES];

        printf("\n  ");
        print_amount(leaks, bytes, count);
        if (leaks->header.looked_ns) {
                bytes -= origin->looked_bytes;
                count -= origin->looked_blocks;
                printf("; since the last look, %.0f s ago: %s%s",
                       (double)(clock_ns(CLOCK_REALTIME) - leaks->header.looked_ns) / 1e9, bytes < 0 ? "-" : "+",
                       gr_size_format((uint64_t)fabs(bytes), a, sizeof(a)));
                printf(" and %+.0f %s", count, blocks(fabs(count)));
        }
        printf("\n    the oldest allocated at %.3f s", (double)origin->oldest_ns / 1e9);
        if (leaks->now_ns > 0)
                printf(" (%.0f s ago)", (double)(leaks->now_ns - origin->oldest_ns) / 1e9);
        if (origin->several_threads)
                printf(", by several threads\n");
        else
                printf(", by thread %u\n", origin->oldest_thread);
        print_frames(origin);
}

static void print_leaks(const struct leaks *leaks, size_t shown)
{
        double rest_bytes = leaks->whole.all_bytes, rest_blocks = leaks->whole.all_blocks;
        char a[GR_SIZE_TEXT_BYTES];

        printf("process %" PRIu64 ", %s\n  live: ", leaks->header.pid, leaks->header.command);
        print_amount(leaks, leaks->whole.all_bytes, leaks->whole.all_blocks);
        printf(" of %zu origin%s\n", leaks->origin_count, leaks->origin_count == 1 ? "" : "s");
        if (leaks->header.sample_bytes) {
                printf("  from a sample: one block in %s", gr_size_format(leaks->header.sample_bytes, a, sizeof(a)));
                if (leaks->most_sample_bytes > leaks->header.sample_bytes)
                        printf(" to %s", gr_size_format(leaks->most_sample_bytes, a, sizeof(a)));
                printf("; off by about %.0f %%\n",
                       leaks->whole.all_bytes > 0 ? 100 * sqrt(leaks->whole.variance) / leaks->whole.all_bytes : 0);
        }
        if (leaks->header.lost_blocks > 0)
                printf("  not here: %" PRIu64 " blocks, for which the file had no room\n", leaks->header.lost_blocks);
        for (size_t i = 0; i < shown; i++) {
                const struct origin *origin = &leaks->origins[i];

                print_origin(leaks, origin);
                rest_bytes -= origin->all_bytes;
                rest_blocks -= origin->all_blocks;
        }
        if (shown < leaks->origin_count) {
                printf("\n  ");
                print_amount(leaks, rest_bytes, rest_blocks);
                printf(" of %zu other origins (--all)\n", leaks->origin_count - shown);
        }
}

static void write_origin(struct gr_json *json, const struct leaks *leaks, const struct origin *origin)
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
        if (leaks->header.looked_ns) {
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

static void write_leaks(const struct leaks *leaks)
{
        struct gr_json json;

        gr_json_begin(&json, gr_sink_file, stdout, 3);
        gr_json_object(&json, NULL);
        gr_json_count(&json, "pid", leaks->header.pid);
        gr_json_string(&json, "program", leaks->header.command);
        gr_json_count(&json, "sample_bytes", leaks->header.sample_bytes);
        gr_json_number(&json, "bytes", "%.0f", leaks->whole.all_bytes);
        gr_json_number(&json, "blocks", "%.0f", leaks->whole.all_blocks);
        gr_json_number(&json, "error_bytes", "%.0f", sqrt(leaks->whole.variance));
        gr_json_count(&json, "lost_blocks", leaks->header.lost_blocks);
        gr_json_array(&json, "origins");
        for (size_t i = 0; i < leaks->origin_count; i++)
                write_origin(&json, leaks, &leaks->origins[i]);
        gr_json_close(&json);
        gr_json_close(&json);
        gr_json_end(&json);
}

/* Notes in the file what there is, for the next look. Where it cannot be written, the next look tells no growth. */
static void note_look(const struct leaks *leaks)
{
        struct amounts {
                uint64_t bytes, blocks;
        } *amounts = calloc(leaks->record_count + 1, sizeof(*amounts));
        uint64_t looked_ns;
        bool noted = leaks->writable && amounts;

        for (size_t i = 0; noted && i < leaks->origin_count; i++) {
                const struct origin *origin = &leaks->origins[i];
                struct amounts all = {(uint64_t)(origin->all_bytes + 0.5), (uint64_t)(origin->all_blocks + 0.5)};

                if (origin->stack)
                        amounts[find(leaks, number_of(leaks, origin->stack)) - leaks->numbers] = all;
        }
        for (size_t i = 0; noted && i < leaks->record_count; i++) {
                off_t at = (off_t)leaks->numbers[i] * 8 + (off_t)offsetof(struct gr_origins_stack, looked_bytes);
                const struct gr_origins_stack *stack = (const void *)record(leaks, leaks->numbers[i], GR_ORIGINS_STACK);

                if (stack && memcmp(&amounts[i], &stack->looked_bytes, sizeof(amounts[i])) != 0)
                        noted = pwrite(leaks->fd, &amounts[i], sizeof(amounts[i]), at) > 0;
        }
        free(amounts);
        looked_ns = clock_ns(CLOCK_REALTIME);
        if (noted &&
            pwrite(leaks->fd, &looked_ns, sizeof(looked_ns), offsetof(struct gr_origins_header, looked_ns)) < 0)
                complain("leaks: the next look will tell no growth: %s", strerror(errno));
}

/* Opens a file; RW where that is allowed. Returns whether it is one of origins. */
static bool try_open(struct leaks *leaks, const char *path)
{
        char magic[sizeof(leaks->header.magic)];
        struct stat about;

        leaks->fd = -1;
        if (stat(path, &about) != 0)
                return false;
        if (!S_ISREG(about.st_mode)) { /* a process has devices mapped, too, and to open one may do something */
                errno = EINVAL;
                return false;
        }
        leaks->fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
        leaks->writable = leaks->fd >= 0;
        if (leaks->fd < 0)
                leaks->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
        if (leaks->fd < 0)
                return false;
        if (pread(leaks->fd, magic, sizeof(magic), 0) == (ssize_t)sizeof(magic) &&
            memcmp(magic, GR_ORIGINS_MAGIC, sizeof(magic)) == 0)
                return true;
        close(leaks->fd);
        leaks->fd = -1;
        errno = EINVAL;
        return false;
}

/* Opens the file that the process has mapped. */
static bool open_of_process(struct leaks *leaks, unsigned long pid)
{
        char name[64], path[PATH_MAX + sizeof(leaks->root)];
        char *line = NULL, *slash;
        size_t room = 0;
        FILE *maps;
        bool found = false;

        snprintf(name, sizeof(name), "/proc/%lu/maps", pid);
        maps = fopen(name, "re");
        if (maps)
                snprintf(leaks->root, sizeof(leaks->root), "/proc/%lu/root", pid);
        while (maps && !found && getline(&line, &room, maps) > 0) {
                slash = strchr(line, '/');
                if (!slash || !strstr(line, " rw-s "))
                        continue;
                slash[strcspn(slash, "\n")] = '\0';
                snprintf(path, sizeof(path), "%s%s", leaks->root, slash);
                found = try_open(leaks, path);
        }
        free(line);
        if (maps)
                fclose(maps);
        return found;
}

/* Opens what a process that was killed has left. Not what another user has put there: anybody can guess the name. */
static bool open_left(struct leaks *leaks, unsigned long pid)
{
        const char *const folders[] = GR_ORIGINS_FOLDERS;
        char pattern[PATH_MAX], path[PATH_MAX];
        struct stat about;

        leaks->root[0] = '\0';
        for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++) {
                if (!folders[i])
                        continue;
                snprintf(pattern, sizeof(pattern), GR_ORIGINS_NAME, folders[i]);
                if (gr_options_expand_path(pattern, (pid_t)pid, path, sizeof(path)) != 0 || !try_open(leaks, path))
                        continue;
                if (fstat(leaks->fd, &about) == 0 && about.st_uid == geteuid())
                        return true;
                complain("leaks: %s is another user's; to read it all the same: gpureclaim leaks %s", path, path);
                close(leaks->fd);
                errno = EPERM;
                return false;
        }
        errno = ENOENT;
        return false;
}

static bool open_file(struct leaks *leaks, const char *what)
{
        char *end;
        unsigned long pid = strtoul(what, &end, 10);

        leaks->fd = -1;
        if (end == what || *end) {
                if (try_open(leaks, what))
                        return true;
                complain("%s: %s", what, errno == EINVAL ? "not a file of GPURECLAIM_BACKTRACE" : strerror(errno));
                return false;
        }
        if (open_of_process(leaks, pid)) {
                leaks->now_ns = clock_ns(CLOCK_MONOTONIC);
                return true;
        }
        if (open_left(leaks, pid))
                return true;
        if (errno != EPERM)
                complain("leaks: process %lu does not note where it allocates; start it with "
                         "GPURECLAIM_BACKTRACE=sample or full",
                         pid);
        return false;
}

int command_leaks(const struct arguments *arguments)
{
        struct leaks leaks = {0};
        bool json = flag_value(arguments, "json");
        size_t shown;
        int rc;

        if (arguments->count != 1) {
                complain("leaks takes one PID or FILE; see gpureclaim help leaks");
                return STATUS_USAGE;
        }
        if (!open_file(&leaks, arguments->rest[0]))
                return EXIT_FAILURE;
        rc = read_file(&leaks);
        if (!rc)
                rc = group(&leaks);
        if (rc) {
                complain("%s: %s", arguments->rest[0],
                         rc == -EPROTONOSUPPORT ? "a file of another version of gpureclaim" : strerror(-rc));
        } else {
                leaks.now_ns = leaks.now_ns > leaks.header.began_monotonic_ns
                                       ? leaks.now_ns - leaks.header.began_monotonic_ns
                                       : 0;
                note_look(&leaks);
                name_frames(&leaks);
                merge(&leaks);
                shown = flag_value(arguments, "all") || leaks.origin_count < SHOWN ? leaks.origin_count : SHOWN;
                if (json)
                        write_leaks(&leaks);
                else
                        print_leaks(&leaks, shown);
        }
        close(leaks.fd);
        return rc ? EXIT_FAILURE : EXIT_SUCCESS;
}
