/*
 * uthash, configured so that running out of memory does not end the program: an entry that could not be added has
 * hh.tbl == NULL.
 */
#ifndef GR_HASH_H
#define GR_HASH_H

#define HASH_NONFATAL_OOM 1
#define HASH_FUNCTION     HASH_FNV /* the default one falls through switch cases, which clang warns of */
#include <uthash.h>

#endif
