/* What the parts of api.c share. */
#ifndef GR_TEST_API_H
#define GR_TEST_API_H

#include "check.h"
#include "gpureclaim.h"
#include "gputest.h"

extern struct gt gt; /* each test opens it */

/* Of the device; it must be in use. */
struct gpureclaim_status status(void);
CUdeviceptr allocate(size_t bytes);

/* From now on the library frees `held` when it wants memory back, and counts how often it asks. */
void enlist_purge(void);
extern _Atomic unsigned purges;
extern _Atomic CUdeviceptr held;
extern gpureclaim_reclaim_function *reclaim;

/* How often functions of the driver were called; to be found first. */
extern unsigned long (*call_count)(const char *symbol);
void find_call_count(void);

/* Modes: api_questions.c. */
void test_questions(void);
void test_widths(void);
void test_flags(void);
void test_range(void);
void test_range_error(void);
/* Modes: api_by_itself.c. */
void test_decay(void);
void test_no_decay(void);
void test_graph_memory(void);
void test_moves(void);
void test_threshold(void);
void test_soft_limit(void);
void test_pinned_stays(void);
void test_spill(void);
void test_wait(void);
void test_proactive(void);
void test_no_proactive(void);

#endif
