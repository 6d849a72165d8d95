/* What a file of GPURECLAIM_BACKTRACE tells (origins.h). */
#include "origins.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/arith.h"
#include "command.h"
#include "trace.h"

static uint64_t clock_ns(clockid_t clock)
{
        struct timespec now;

        clock_gettime(clock, &now);
        return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Reads this many bytes at this offset; those behind the end of the file are zero. NULL: failed. */
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

/* Where a record's number stands in the list of numbers; NULL: there is no such record. */
static const uint32_t *find_number(const struct origins *origins, uint32_t number)
{
        return bsearch(&number, origins->numbers, origins->record_count, sizeof(number), by_number);
}

static uint32_t record_number(const struct origins *origins, const struct gr_origins_stack *stack)
{
        return (uint32_t)(((const char *)stack - origins->records) / 8);
}

/* The record of this number and kind; NULL: there is none. */
static const struct gr_origins_record *find_record(const struct origins *origins, uint32_t number,
                                                   enum gr_origins_kind kind)
{
        const struct gr_origins_record *found;

        if (!find_number(origins, number))
                return NULL;
        found = (const void *)(origins->records + (size_t)number * 8);
        return found->kind == (uint32_t)kind ? found : NULL;
}

/* Finds where the records begin. 0 or -errno. */
static int read_records(struct origins *origins)
{
        size_t at = sizeof(origins->header);

        origins->numbers = malloc((origins->records_bytes / 8 + 1) * sizeof(*origins->numbers));
        if (!origins->numbers)
                return -ENOMEM;
        while (origins->records_bytes - at >= sizeof(struct gr_origins_record)) {
                const struct gr_origins_record *found = (const void *)(origins->records + at);
                size_t least = found->kind == GR_ORIGINS_MODULE   ? sizeof(struct gr_origins_module) + 1
                               : found->kind == GR_ORIGINS_PYTHON ? sizeof(struct gr_origins_python)
                                                                  : sizeof(struct gr_origins_stack);

                if (found->bytes % 8 || found->bytes < least || found->bytes > origins->records_bytes - at)
                        return -EINVAL;
                origins->numbers[origins->record_count++] = (uint32_t)(at / 8);
                at += found->bytes;
        }
        return 0;
}

/* 0 or -errno; -EINVAL: not such a file; -EPROTONOSUPPORT: of another version. */
static int read_file(struct origins *origins)
{
        struct stat about;
        uint64_t blocks, most;

        if (pread(origins->fd, &origins->header, sizeof(origins->header), 0) != (ssize_t)sizeof(origins->header) ||
            memcmp(origins->header.magic, GR_ORIGINS_MAGIC, sizeof(origins->header.magic)) != 0)
                return -EINVAL;
        if (origins->header.version != GR_ORIGINS_VERSION || origins->header.header_bytes != sizeof(origins->header))
                return -EPROTONOSUPPORT;
        if (fstat(origins->fd, &about) != 0) /* after the header was read: the process lets the file grow first */
                return -errno;
        gr_trace_make_text(origins->header.command, sizeof(origins->header.command));
        /* The blocks are read first, so that the stack of each is among the records that are read afterwards. */
        most = origins->header.blocks_at < (uint64_t)about.st_size
                       ? ((uint64_t)about.st_size - origins->header.blocks_at) / sizeof(*origins->blocks)
                       : 0;
        blocks = origins->header.blocks < most ? origins->header.blocks : most;
        origins->blocks = read_part(origins->fd, origins->header.blocks_at, blocks * sizeof(*origins->blocks));
        origins->block_count = blocks;
        origins->cut_blocks = origins->header.blocks - blocks;
        if (pread(origins->fd, &origins->header.records_bytes, sizeof(uint64_t),
                  offsetof(struct gr_origins_header, records_bytes)) != (ssize_t)sizeof(uint64_t))
                return -EIO;
        origins->records_bytes = origins->header.records_bytes < (uint64_t)about.st_size ? origins->header.records_bytes
                                                                                         : (uint64_t)about.st_size;
        if (origins->records_bytes < sizeof(origins->header))
                return -EINVAL;
        origins->records = read_part(origins->fd, 0, origins->records_bytes);
        return origins->blocks && origins->records ? read_records(origins) : -ENOMEM;
}

static void count_block(struct origin *origin, const struct gr_origins_block *block)
{
        double bytes = (double)block->bytes, each = gr_origins_weight(block->bytes, block->sample_bytes);

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

/* The index of a stack's record in numbers; that of the unknown stack comes last. */
static size_t index_of(const struct origins *origins, const struct gr_origins_stack *stack)
{
        return stack ? (size_t)(find_number(origins, record_number(origins, stack)) - origins->numbers)
                     : origins->record_count;
}

/* Makes an origin of each stack that has blocks or had some at the last look, or is wanted. 0 or -ENOMEM. */
static int group_blocks(struct origins *origins, const struct origin_stacks *wanted)
{
        size_t places = origins->record_count + 1;
        bool *is_wanted = calloc(places, sizeof(*is_wanted)), *has_blocks = calloc(places, sizeof(*has_blocks));
        int rc = -ENOMEM;

        origins->list = calloc(origins->block_count + places, sizeof(*origins->list));
        origins->origin_numbers = calloc(places, sizeof(*origins->origin_numbers));
        if (!is_wanted || !has_blocks || !origins->list || !origins->origin_numbers)
                goto out;
        qsort(origins->blocks, origins->block_count, sizeof(*origins->blocks), by_stack);
        for (size_t i = 0; i < origins->block_count; i++) {
                const struct gr_origins_block *block = &origins->blocks[i];
                const struct gr_origins_stack *stack =
                        (const void *)find_record(origins, block->stack, GR_ORIGINS_STACK);

                if (!block->address)
                        continue;
                if (origins->count == 0 || origins->list[origins->count - 1].stack != stack)
                        begin_origin(&origins->list[origins->count++], stack);
                has_blocks[index_of(origins, stack)] = true;
                count_block(&origins->list[origins->count - 1], block);
                count_block(&origins->whole, block);
                if (block->sample_bytes > origins->most_sample_bytes)
                        origins->most_sample_bytes = block->sample_bytes;
        }
        for (size_t i = 0; wanted && i < wanted->count; i++)
                is_wanted[index_of(origins, (const void *)find_record(origins, wanted->list[i], GR_ORIGINS_STACK))] =
                        true;
        /* Also stacks that had blocks only at the last look: merge_origins may add them to one of the same lines. */
        for (size_t i = 0; i < places; i++) {
                const struct gr_origins_stack *stack =
                        i < origins->record_count
                                ? (const void *)find_record(origins, origins->numbers[i], GR_ORIGINS_STACK)
                                : NULL;

                if (!has_blocks[i] && (is_wanted[i] || (stack && stack->looked_blocks)))
                        begin_origin(&origins->list[origins->count++], stack);
        }
        for (size_t i = 0; i < origins->count; i++)
                origins->list[i].wanted = is_wanted[index_of(origins, origins->list[i].stack)];
        rc = 0;
out:
        free(is_wanted);
        free(has_blocks);
        return rc;
}

static void read_frames(const struct origins *origins, struct origin *origin)
{
        size_t count = origin->stack ? (origin->stack->head.bytes - sizeof(*origin->stack)) / 8 : 0;

        origin->frames = calloc(count + 1, sizeof(*origin->frames));
        for (size_t i = 0; origin->frames && i < count; i++) {
                struct frame *frame = &origin->frames[origin->frame_count++];

                frame->word = origin->stack->frames[i];
                if (frame->word & GR_ORIGINS_IS_PYTHON) {
                        const struct gr_origins_python *python =
                                (const void *)find_record(origins, (uint32_t)frame->word, GR_ORIGINS_PYTHON);
                        const char *end = python ? (const char *)python + python->head.bytes : NULL, *file;

                        if (!python)
                                continue;
                        file = memchr(python->name_and_file, '\0', (size_t)(end - python->name_and_file));
                        if (file && ++file < end && memchr(file, '\0', (size_t)(end - file)))
                                frame->python = (struct place){python->name_and_file, file, python->line};
                        continue;
                }
                frame->module = (const void *)find_record(origins, (uint32_t)(frame->word >> GR_ORIGINS_MODULE_SHIFT),
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
static void name_frames(struct origins *origins)
{
        size_t count = 0, used = 0;
        struct frame **frames;
        uint64_t *addresses;
        struct places *places;

        for (size_t i = 0; i < origins->count; i++) {
                read_frames(origins, &origins->list[i]);
                count += origins->list[i].frame_count;
        }
        frames = calloc(count + 1, sizeof(*frames));
        addresses = calloc(count + 1, sizeof(*addresses));
        places = calloc(count + 1, sizeof(*places));
        for (size_t i = 0; frames && i < origins->count; i++)
                for (size_t f = 0; f < origins->list[i].frame_count; f++)
                        if (origins->list[i].frames[f].module)
                                frames[used++] = &origins->list[i].frames[f];
        if (frames)
                qsort(frames, used, sizeof(*frames), by_address);
        for (size_t begin = 0, end; addresses && places && begin < used; begin = end) {
                const struct gr_origins_module *module = frames[begin]->module;
                char path[PATH_MAX + sizeof(origins->root)];
                size_t distinct = 0;

                for (end = begin; end < used && frames[end]->module == module; end++) {
                        uint64_t address = (frames[end]->word & GR_ORIGINS_ADDRESS_MASK) - 1; /* the call */

                        if (distinct == 0 || addresses[distinct - 1] != address)
                                addresses[distinct++] = address;
                }
                snprintf(path, sizeof(path), "%s%s", origins->root, module->path);
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

static int compare_texts(const char *a, const char *b)
{
        return strcmp(a ? a : "", b ? b : "");
}

/* Frames of one line are equal, wherever the compiler has put its code; without lines, frames of one address are. */
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

/* Adds what an origin of the same frames has. */
static void add_figures(struct origin *to, const struct origin *origin)
{
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
        to->wanted |= origin->wanted;
}

/* Merges the origins whose frames are equal, and puts the largest first. */
static void merge_origins(struct origins *origins)
{
        size_t count = 0;

        qsort(origins->list, origins->count, sizeof(*origins->list), by_frames);
        for (size_t i = 0; i < origins->count; i++) {
                const struct origin *origin = &origins->list[i];

                if (count > 0 && by_frames(&origins->list[count - 1], origin) == 0)
                        add_figures(&origins->list[count - 1], origin);
                else
                        origins->list[count++] = *origin;
                origins->origin_numbers[index_of(origins, origin->stack)] = (uint32_t)count - 1;
        }
        origins->number_count = count;
        origins->count = origins->named_count = 0;
        for (size_t i = 0; i < count; i++) {
                origins->list[i].number = (uint32_t)i;
                origins->count += origins->list[i].blocks > 0;
                if (origins->list[i].blocks > 0 || origins->list[i].wanted)
                        origins->list[origins->named_count++] = origins->list[i];
        }
        qsort(origins->list, origins->named_count, sizeof(*origins->list), by_bytes);
}

uint32_t origins_number(const struct origins *origins, uint32_t stack)
{
        return origins->origin_numbers[index_of(origins, (const void *)find_record(origins, stack, GR_ORIGINS_STACK))];
}

int origins_of_blocks(const struct origins *origins, const struct gr_origins_block *blocks, size_t count,
                      struct origins *ret)
{
        struct origin *list = calloc(origins->number_count + 1, sizeof(*list)); /* by number at first */

        if (!list)
                return -ENOMEM;
        *ret = *origins;
        ret->list = list;
        ret->whole = (struct origin){0};
        ret->count = ret->most_sample_bytes = ret->since_look_ns = 0;
        for (size_t i = 0; i < origins->named_count; i++) {
                const struct origin *origin = &origins->list[i];

                list[origin->number] = (struct origin){.stack = origin->stack,
                                                       .frames = origin->frames,
                                                       .frame_count = origin->frame_count,
                                                       .number = origin->number};
        }
        for (size_t i = 0; i < count; i++) {
                if (!blocks[i].address)
                        continue;
                count_block(&list[origins_number(origins, blocks[i].stack)], &blocks[i]);
                count_block(&ret->whole, &blocks[i]);
                ret->most_sample_bytes = gr_max(ret->most_sample_bytes, blocks[i].sample_bytes);
        }
        for (size_t i = 0; i < origins->number_count; i++)
                if (list[i].blocks > 0)
                        list[ret->count++] = list[i];
        ret->named_count = ret->count;
        qsort(list, ret->count, sizeof(*list), by_bytes);
        return 0;
}

/* Notes in the file what is live, for the next look. Where it cannot be written, the next look shows no growth. */
static void note_look(const struct origins *origins, uint64_t looked_ns)
{
        struct amounts {
                uint64_t bytes, blocks;
        } *amounts = calloc(origins->record_count + 1, sizeof(*amounts));
        bool noted = origins->writable && amounts;

        for (size_t i = 0; noted && i < origins->count; i++) {
                const struct origin *origin = &origins->list[i];
                struct amounts all = {(uint64_t)(origin->all_bytes + 0.5), (uint64_t)(origin->all_blocks + 0.5)};

                if (origin->stack)
                        amounts[find_number(origins, record_number(origins, origin->stack)) - origins->numbers] = all;
        }
        for (size_t i = 0; noted && i < origins->record_count; i++) {
                off_t at = (off_t)origins->numbers[i] * 8 + (off_t)offsetof(struct gr_origins_stack, looked_bytes);
                const struct gr_origins_stack *stack =
                        (const void *)find_record(origins, origins->numbers[i], GR_ORIGINS_STACK);

                if (stack && memcmp(&amounts[i], &stack->looked_bytes, sizeof(amounts[i])) != 0)
                        noted = pwrite(origins->fd, &amounts[i], sizeof(amounts[i]), at) > 0;
        }
        free(amounts);
        if (noted &&
            pwrite(origins->fd, &looked_ns, sizeof(looked_ns), offsetof(struct gr_origins_header, looked_ns)) < 0)
                complain("leaks: the next look will tell no growth: %s", strerror(errno));
}

/* Opens the file also for writing, where that is allowed. */
bool origins_try(struct origins *origins, const char *path)
{
        char magic[sizeof(origins->header.magic)];
        struct stat about;

        origins->fd = -1;
        if (stat(path, &about) != 0)
                return false;
        if (!S_ISREG(about.st_mode)) { /* a process may have devices mapped, and opening one may have effects */
                errno = EINVAL;
                return false;
        }
        origins->fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
        origins->writable = origins->fd >= 0;
        if (origins->fd < 0)
                origins->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
        if (origins->fd < 0)
                return false;
        if (pread(origins->fd, magic, sizeof(magic), 0) == (ssize_t)sizeof(magic) &&
            memcmp(magic, GR_ORIGINS_MAGIC, sizeof(magic)) == 0)
                return true;
        close(origins->fd);
        origins->fd = -1;
        errno = EINVAL;
        return false;
}

/* Opens the file that the process has mapped. */
static bool open_of_process(struct origins *origins, unsigned pid)
{
        char name[64], path[PATH_MAX + sizeof(origins->root)];
        char *line = NULL, *slash;
        size_t room = 0;
        FILE *maps;
        bool found = false;

        snprintf(name, sizeof(name), "/proc/%u/maps", pid);
        maps = fopen(name, "re");
        if (maps)
                snprintf(origins->root, sizeof(origins->root), "/proc/%u/root", pid);
        while (maps && !found && getline(&line, &room, maps) > 0) {
                slash = strchr(line, '/');
                if (!slash || !strstr(line, " rw-s "))
                        continue;
                slash[strcspn(slash, "\n")] = '\0';
                snprintf(path, sizeof(path), "%s%s", origins->root, slash);
                found = origins_try(origins, path);
        }
        free(line);
        if (maps)
                fclose(maps);
        return found;
}

/* Opens the file that a killed process has left; not one of another user, as anybody can guess the name. */
static bool open_left(struct origins *origins, unsigned pid)
{
        const char *const folders[] = GR_ORIGINS_FOLDERS;
        char pattern[PATH_MAX], path[PATH_MAX];
        struct stat about;

        origins->root[0] = '\0';
        for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++) {
                if (!folders[i])
                        continue;
                snprintf(pattern, sizeof(pattern), GR_ORIGINS_NAME, folders[i]);
                if (gr_options_expand_path(pattern, (pid_t)pid, 1, path, sizeof(path)) != 0 ||
                    !origins_try(origins, path))
                        continue;
                if (fstat(origins->fd, &about) == 0 && about.st_uid == geteuid())
                        return true;
                complain("leaks: %s is another user's; to read it all the same: gpureclaim leaks %s", path,
                         shell_word(path));
                close(origins->fd);
                errno = EPERM;
                return false;
        }
        errno = ENOENT;
        return false;
}

bool origins_open(struct origins *origins, const char *what)
{
        unsigned pid = parse_pid(what);
        const char *reader;

        origins->fd = -1;
        if (!*what || what[strspn(what, "0123456789")]) {
                if (origins_try(origins, what))
                        return true;
                reader = errno == EINVAL ? reader_of(what) : NULL;
                if (reader)
                        complain("%s: a trace; to read it: gpureclaim %s %s", what, reader, shell_word(what));
                else
                        complain("%s: %s", what,
                                 errno == EINVAL ? "not a file of GPURECLAIM_BACKTRACE" : strerror(errno));
                return false;
        }
        if (!pid) {
                complain("leaks: %s: not a process id", what);
                return false;
        }
        if (open_of_process(origins, pid)) {
                origins->now_ns = clock_ns(CLOCK_MONOTONIC);
                return true;
        }
        if (open_left(origins, pid))
                return true;
        if (errno == EPERM)
                return false;
        if (kill((pid_t)pid, 0) == 0)
                complain("leaks: process %u does not note where it allocates; start it with "
                         "GPURECLAIM_BACKTRACE=sample or full",
                         pid);
        else
                complain("leaks: process %u: %s", pid,
                         errno == EPERM ? "it is not yours"
                                        : "there is none, and none of this number has left origins");
        return false;
}

int origins_read(struct origins *origins, bool look, const struct origin_stacks *wanted)
{
        uint64_t looked_ns = clock_ns(CLOCK_REALTIME), began_ns;
        int rc = read_file(origins);

        if (!rc)
                rc = group_blocks(origins, wanted);
        if (!rc) {
                began_ns = origins->header.began_monotonic_ns;
                origins->now_ns = origins->now_ns > began_ns ? origins->now_ns - began_ns : 0;
                if (look && origins->header.looked_ns && origins->header.looked_ns < looked_ns)
                        origins->since_look_ns = looked_ns - origins->header.looked_ns;
                if (look)
                        note_look(origins, looked_ns);
                name_frames(origins);
                merge_origins(origins);
        }
        close(origins->fd);
        return rc;
}
