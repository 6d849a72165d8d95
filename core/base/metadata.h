/*
 * Where the pool's own structures lie, in the host's memory: side by side, in pages of 2 MiB where the system has them
 * for who asks (transparent huge pages). A hit reads about fourteen cache lines in as many places, and in between a
 * program touches so much else that each small page of them is a miss of the TLB, which a virtual machine pays for
 * twice. In PyTorch training the time inside its allocator, per step: auto 539 -> 506 us, 517 without the huge pages;
 * bins 441 -> 411 (an H200, driver 580, November 2026, three processes each; by a build that had the core and the
 * heaps' tables there, too).
 */
#ifndef GR_METADATA_H
#define GR_METADATA_H

#include <stddef.h>

/* The sanitizer for addresses knows what the C library hands out, and nothing of its parts. */
#if defined(__SANITIZE_ADDRESS__)
#define GR_METADATA_IN_CHUNKS 0
#elif defined(__has_feature)
#define GR_METADATA_IN_CHUNKS (!__has_feature(address_sanitizer))
#else
#define GR_METADATA_IN_CHUNKS 1
#endif

/*
 * Zero bytes from a cache line on, which share none with others; NULL: out of memory. What is freed serves later
 * requests of the same size; none of it goes back before the process ends, except what is larger than 128 KiB. bytes:
 * as it was asked for; ptr may be NULL. Locks: rank GR_RANK_METADATA.
 */
void *gr_metadata_alloc(size_t bytes);
void gr_metadata_free(void *ptr, size_t bytes);

#endif
