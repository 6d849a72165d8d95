/*
 * Memory for the pool's own structures, on the host: side by side, in transparent huge pages (2 MiB) where the system
 * offers them. A hit reads about fourteen cache lines in as many places. Between two hits the program touches so much
 * other memory that each small page among them would be a TLB miss (docs/measurements.md, metadata-pages).
 */
#ifndef GR_METADATA_H
#define GR_METADATA_H

#include <stddef.h>

/*
 * AddressSanitizer checks whole allocations, not pieces of one. So under it each structure is an allocation of its own.
 */
#if defined(__SANITIZE_ADDRESS__)
#define GR_METADATA_IN_CHUNKS 0
#elif defined(__has_feature)
#define GR_METADATA_IN_CHUNKS (!__has_feature(address_sanitizer))
#else
#define GR_METADATA_IN_CHUNKS 1
#endif

/*
 * Allocates zeroed bytes that begin at a cache line and share none with other structures; NULL: out of memory. Freed
 * pieces serve later requests of the same size, and stay with the process until it ends, except those above 512 KiB.
 * gr_metadata_free: bytes as they were asked for; ptr may be NULL. Locks: rank GR_RANK_METADATA.
 */
void *gr_metadata_alloc(size_t bytes);
void gr_metadata_free(void *ptr, size_t bytes);

#endif
