/* The stacks that allocated something: each is a record of the file of base/origins_file.h. */
#ifndef GR_STACK_H
#define GR_STACK_H

#include <stdint.h>

#include "base/origins_file.h"

/* Loads what unwinds stacks, while no lock is held. 0 or -errno. */
int gr_stack_init(void);

/*
 * Finds the record of the calling thread's stack, or adds one by append and commit. 0: there was no more room. append
 * returns room for so many bytes, of zeroes, or NULL; its caller fills it and then calls commit. Only one thread is
 * between the two at a time.
 */
struct gr_stack_file {
        struct gr_origins_record *(*append)(size_t bytes);
        uint32_t (*commit)(struct gr_origins_record *record);
};
uint32_t gr_stack_here(const struct gr_stack_file *file);

#endif
