/* What a file of GPURECLAIM_BACKTRACE tells: live blocks by origin. It is in memory until the tool ends. */
#ifndef GR_TOOL_ORIGINS_H
#define GR_TOOL_ORIGINS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/origins_file.h"
#include "symbols.h"

struct frame {
        uint64_t word;                          /* the frame as the file has it */
        struct place python;                    /* the place, for a frame of Python */
        const struct gr_origins_module *module; /* NULL: not known */
        struct places places;
};

struct origin {
        const struct gr_origins_stack *stack; /* NULL: the blocks whose stack is not known */
        uint64_t blocks, bytes;               /* noted in the file */
        double all_blocks, all_bytes;         /* live, as estimated from those noted: more where these are a sample */
        double variance;                      /* of all_bytes, estimated from the sample */
        double looked_blocks, looked_bytes;   /* live at the last look */
        uint64_t oldest_ns, newest_ns;
        uint32_t oldest_thread;
        bool several_threads;
        struct frame *frames;
        size_t frame_count;
        uint32_t number; /* the same for the same frames, whichever blocks are counted */
        bool wanted;     /* origins_read was told of its stack */
};

struct origins {
        int fd;
        bool writable;
        char root[32]; /* in front of the paths of modules: "", or the process's root */
        struct gr_origins_header header;
        char *records; /* the file up to their end, header included, so that record n is at byte 8 * n */
        size_t records_bytes, record_count;
        uint32_t *numbers; /* of all records, in ascending order */
        struct gr_origins_block *blocks;
        size_t block_count;
        uint64_t cut_blocks;        /* slots that the file should have and has not */
        struct origin *list, whole; /* the largest first */
        size_t count;               /* those that have blocks */
        size_t named_count;         /* with those after them that have no blocks but are wanted */
        size_t number_count;        /* all numbers of origins are below */
        uint32_t *origin_numbers; /* of each record's origin, in the order of numbers; the last: of the unknown stack */
        uint64_t most_sample_bytes; /* of all blocks */
        uint64_t now_ns;            /* since the file began; 0: the program is not running */
        uint64_t since_look_ns;     /* 0: growth is not asked for, or there was no look before now */
};

/* Opens the file of a process by its number, or a file by its name. False: it could not, and has printed why. */
bool origins_open(struct origins *origins, const char *what);

/* Opens a file. False: it is no file of origins, or cannot be read; errno says why. */
bool origins_try(struct origins *origins, const char *path);

/* Stacks that are to be named, whether they have blocks or not. */
struct origin_stacks {
        const uint32_t *list;
        size_t count;
};

/*
 * Reads an opened file and closes it. wanted: may be NULL. look: also finds the growth since the last look, and notes
 * in the file what is live, for the next look. 0 or -errno; -EINVAL: no file of origins; -EPROTONOSUPPORT: one of
 * another version.
 */
int origins_read(struct origins *origins, bool look, const struct origin_stacks *wanted);

/* The number of the origin with this stack, of which origins_read was told. */
uint32_t origins_number(const struct origins *origins, uint32_t stack);

/*
 * The origins of other blocks than those of the file, such as those of another time, with stacks that origins_read was
 * told of. Blocks without an address are none. All but ret->list is shared. 0 or -ENOMEM.
 */
int origins_of_blocks(const struct origins *origins, const struct gr_origins_block *blocks, size_t count,
                      struct origins *ret);

static inline bool is_python(const struct frame *frame)
{
        return frame->word & GR_ORIGINS_IS_PYTHON;
}

/* The places of a frame: at least one. */
static inline const struct place *places_of(const struct frame *frame, size_t *ret_count)
{
        *ret_count = frame->places.count > 0 ? frame->places.count : 1;
        return frame->places.count > 0 ? frame->places.list : &frame->python;
}

#endif
