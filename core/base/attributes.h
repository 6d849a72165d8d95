/* How functions and data are laid out. */
#ifndef GR_ATTRIBUTES_H
#define GR_ATTRIBUTES_H

#define GR_LINE_BYTES 64 /* of a cache line */

/*
 * Functions of the fast path, and those that the slow path calls first. They lie side by side in the text section, so
 * that they take few pages and cache lines. In each of them the code of a hit comes first, in one piece: the program's
 * own work between two calls evicts most of it from the processor's first cache (docs/measurements.md, hot-code).
 */
#define GR_HOT_CODE __attribute__((hot, aligned(GR_LINE_BYTES)))

/* Data that each call reads: together in one cache line. */
#define GR_HOT_DATA __attribute__((section("gr_hot")))

/* For data that these functions read: it is reached directly, without the library's global offset table. */
#define GR_HIDDEN __attribute__((visibility("hidden")))

#endif
