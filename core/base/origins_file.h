/*
 * The file of GPURECLAIM_BACKTRACE: the blocks that the program has, and where it allocated each of them.
 *
 * The process maps it, so that what is written stays when the process is killed. It is a header; records, one after the
 * other, of which none changes once it is counted in records_bytes; and from blocks_at on the blocks. A block whose
 * address is 0 is not in use. Between the records and the blocks the file has a hole. Little endian.
 */
#ifndef GR_ORIGINS_FILE_H
#define GR_ORIGINS_FILE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define GR_ORIGINS_MAGIC       "GRORIGN" /* with its NUL */
#define GR_ORIGINS_VERSION     2
#define GR_ORIGINS_SUFFIX      ".origins"
#define GR_ORIGINS_RECORDS_MAX ((size_t)64 << 20) /* bytes */
#define GR_ORIGINS_BLOCKS_MAX  ((size_t)4 << 20)

/* Where the file is, unless the user names it: in the first folder that is set and can be written to, else the last. */
#define GR_ORIGINS_NAME "%s/gpureclaim.%%p" GR_ORIGINS_SUFFIX /* for gr_options_expand_path, with the folder */
#define GR_ORIGINS_FOLDERS                                                                                             \
        {                                                                                                              \
                getenv("XDG_RUNTIME_DIR"), getenv("TMPDIR"), "/tmp"                                                    \
        }

/* Each record begins with this and is padded to 8 bytes. Its number is its offset in the file / 8. */
struct gr_origins_record {
        uint32_t kind, bytes; /* bytes: of the whole record, padding included */
};

enum gr_origins_kind { GR_ORIGINS_MODULE = 1, GR_ORIGINS_PYTHON, GR_ORIGINS_STACK };

/* A program or library: its frames are by their address in its ELF file, so that they can be named later. */
struct gr_origins_module {
        struct gr_origins_record head;
        uint64_t base; /* where it was loaded: an address of the process less that of the file */
        uint8_t id_bytes, id[31];
        char path[]; /* with its NUL */
};

struct gr_origins_python {
        struct gr_origins_record head;
        uint32_t line;
        char name_and_file[]; /* each with its NUL */
};

/* The native frames, innermost first, down to the interpreter; then those of Python. */
struct gr_origins_stack {
        struct gr_origins_record head;
        /* Written by the reader (`gpureclaim leaks`): what the stack had when it was last read. */
        uint64_t looked_bytes, looked_blocks;
        uint64_t frames[];
};

/* A frame: GR_ORIGINS_IS_PYTHON | record; or module record << 40 | return address in it; or an address and no module */
#define GR_ORIGINS_IS_PYTHON    (UINT64_C(1) << 63)
#define GR_ORIGINS_MODULE_SHIFT 40
#define GR_ORIGINS_ADDRESS_MASK ((UINT64_C(1) << GR_ORIGINS_MODULE_SHIFT) - 1)

/*
 * No streams: an allocation names none, and which blocks a kernel uses cannot be told from its arguments. Streams of
 * copies and of frees alone would leave out most of the uses.
 */
struct gr_origins_block {
        _Atomic uint64_t address; /* written last */
        uint64_t bytes;
        uint64_t time_ns; /* since the file began */
        uint32_t thread;
        uint32_t stack; /* record; 0: not known, as there was no more room */
        /* The sampling size then: all blocks of so many bytes or more were noted, smaller ones by chance; 0: all. */
        uint64_t sample_bytes;
};

/*
 * For how many blocks one that was noted stands: 1 / (1 - exp(-x)), by the chance that a block of its size is noted
 * (Horvitz and Thompson), for x below 1. The series is off by less than 0.01 %.
 */
static inline double gr_origins_weight(uint64_t bytes, uint64_t sample_bytes)
{
        double x;

        if (bytes == 0 || bytes >= sample_bytes)
                return 1;
        x = (double)bytes / (double)sample_bytes;
        return 1 / x + 0.5 + x / 12 - x * x * x / 720;
}

struct gr_origins_header {
        char magic[8];
        uint32_t version, header_bytes;
        uint64_t blocks_at, pid, began_ns; /* by the clock of the day, since 1970 */
        uint64_t began_monotonic_ns;
        uint64_t sample_bytes;          /* the least of all blocks' */
        _Atomic uint64_t records_bytes; /* with the header */
        _Atomic uint64_t blocks;        /* slots for blocks */
        _Atomic uint64_t lost_blocks;   /* not noted, as there was no free slot */
        uint64_t looked_ns; /* written by the reader: when it last read, by the clock of the day; 0: never */
        char command[1024]; /* words, each with its NUL */
        char rest[2984];
};

_Static_assert(sizeof(struct gr_origins_header) == 4096 && sizeof(struct gr_origins_block) == 40 &&
                       sizeof(struct gr_origins_module) == 48,
               "as files have it");

#endif
