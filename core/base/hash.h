/* uthash, made to report that memory ran out (an added entry has no hh.tbl then) where it would end the program. */
#ifndef GR_HASH_H
#define GR_HASH_H

#define HASH_NONFATAL_OOM 1
#define HASH_FUNCTION     HASH_FNV /* the default one falls through switch cases, which clang warns of */
#include <uthash.h>

#endif
