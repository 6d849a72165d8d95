/* Names for addresses in programs and libraries. The tool has one thread; the names live until it ends. */
#ifndef GR_SYMBOLS_H
#define GR_SYMBOLS_H

#include <stddef.h>
#include <stdint.h>

/* NULL and 0: not known. */
struct place {
        const char *function, *file;
        unsigned line;
};

/* The places of one address: first the functions that were inlined there, last the function that contains it. */
struct places {
        struct place *list;
        size_t count; /* at least 1, unless memory is short */
};

/*
 * Names addresses of the ELF file at path, with addr2line or llvm-symbolizer where one is installed, else by the file's
 * table of symbols. Nothing is named if the file has a build ID, build_id_bytes is not 0, and the IDs differ. ret has
 * count entries.
 */
void symbols_name(const char *path, const uint8_t *build_id, size_t build_id_bytes, const uint64_t *addresses,
                  size_t count, struct places *ret);

#endif
