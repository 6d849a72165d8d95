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

/* The places of one address: what was inlined there first, and last the function it is in. */
struct places {
        struct place *list;
        size_t count; /* at least 1, unless memory is short */
};

/*
 * Names the addresses, as the ELF file has them, in the file at path: with addr2line or llvm-symbolizer where one is
 * there, else from the file's table of symbols. build_id: what the file's must be, where the two have one; else nothing
 * is named. ret has count entries.
 */
void symbols_name(const char *path, const uint8_t *build_id, size_t build_id_bytes, const uint64_t *addresses,
                  size_t count, struct places *ret);

#endif
