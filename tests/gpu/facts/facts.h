/*
 * What the driver does, asked of the driver: one "group: fact: answer" line each.
 *
 * An answer never depends on addresses, times or the size of the card, so the lines of one driver are the same on every
 * card, and those of the simulated device have to be the same as a real one's. A line that begins with "~" is one that
 * the library changes on purpose; the others are the same under it.
 */
#ifndef GR_TEST_FACTS_H
#define GR_TEST_FACTS_H

#include "gputest.h"

extern struct gt gt;

/* One line. fact_code says the result's name; fact_yes "yes" or "no". */
void fact(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));
void fact_code(const char *name, CUresult result);
void fact_yes(const char *name, bool answer);
/* How the capture of a stream ends; a graph is dropped. */
void fact_end(const char *name, CUstream stream);
/* Marks the lines that follow as changed by the library on purpose, or no longer. */
void fact_changed(bool changed);
/* A result's name without its prefix. The string is static. */
const char *code(CUresult result);

/*
 * A kernel that keeps a stream at work until release() or HOLD_US. By one thread, one at a time.
 */
enum { HOLD_US = 400000 };
void hold(CUstream stream);
void release(void);
/* A fact: does this call, made while another stream is at work, wait for it? */
#define FACT_WAITS(name, busy, call)                                                                                   \
        do {                                                                                                           \
                hold(busy);                                                                                            \
                fact_waited(name, busy, (call));                                                                       \
        } while (0)
void fact_waited(const char *name, CUstream busy, CUresult result);
/* Does work on one stream that was submitted second wait for the first one's? */
bool follows(CUstream first, CUstream second);

CUdeviceptr block(size_t bytes);
CUstream stream_of(unsigned flags);
/* Pages of 2 MiB that are in use on the card; what they are counted by is cuMemGetInfo. */
size_t pages_used(void);
/* The function as exported, whatever cuda.h makes of its name; NULL where the driver has none. */
#define EXPORTED(type, name) ((type *)exported(name))
void (*exported(const char *name))(void);

void facts_memory(void);
void facts_host(void);
void facts_waits(void);
void facts_order(void);
void facts_captures(void);
void facts_capture_ends(void);
void facts_pools(void);
void facts_mapped(void);
void facts_graphs(void);
void facts_contexts(void);
void facts_ended(void);
void facts_ended_captures(void);
void facts_reset(void);
void facts_ended_elsewhere(void);
void facts_shared(void);
/* In the second process of facts_shared: what the handle that comes through fd gives there. */
void facts_open(int fd);

#endif
