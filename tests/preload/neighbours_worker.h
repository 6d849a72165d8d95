/* Workers: processes under the library that share a simulated card. By one thread; what fails ends the program. */
#ifndef GR_TEST_NEIGHBOURS_WORKER_H
#define GR_TEST_NEIGHBOURS_WORKER_H

#include "region/region.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define CARD_MIB  1024
#define LIMIT_MIB 512u /* of the group, in the modes that have one */
#define CALL_MS   3000 /* longest that any call may take */
#define SKIPPED   77

struct worker {
        pid_t pid;
        int to, from;
};

/* From a worker to the starter. */
struct reply {
        int result;
        double ms;
};

extern char folder[64];              /* where the region and the card are */
extern _Atomic unsigned *longest_ms; /* of all calls of roaming workers; shared with them */

void fail(const char *what, long long found) __attribute__((noreturn));
double now_ms(void);
void pause_ms(unsigned ms);

/* One that waits for orders, or, with a seed, acts by itself for a while and ends. */
struct worker start(unsigned seed);
/*
 * The same in a container: with namespaces of its own for users, processes, IPC and mounts, as the same user outside.
 * It ends with SKIPPED where this machine lets nobody make these.
 */
struct worker start_in(unsigned seed, bool container);
/* An order goes to the worker; its answer comes back; both in turn. obey() says what the orders are. */
void tell(struct worker *worker, char order, unsigned argument);
struct reply hear(struct worker *worker);
struct reply ask(struct worker *worker, char order, unsigned argument);
void stop(struct worker *worker);
/* Kills it with that signal, or, with 0, tells it to end, which it must do well. */
void end(struct worker *worker, int with);

const char *region_path(void);
/* Whether the worker has shared memory of the region mapped. */
bool has_segment(struct worker *worker);
/* The region of the one card; false where there is none. */
bool open_region(struct gr_region *region);
/* How many are in it; with sweep, without those that have died. */
unsigned members(struct gr_region *region, bool sweep);
uint64_t card_used_bytes(void);
bool file_gone(void);
void empty_file(void);
/* Until so many are in the region, which is left open. */
void await_members(struct gr_region *region, unsigned count);
uint64_t given_mib(void);

/* Modes. */
void mode_apart(void);
void mode_group(void);
void mode_phases(void);
void mode_orders(void);
void mode_late_files(void);
void mode_charges(void);
void mode_created(void);
void mode_default_dir(void);
void mode_at_once(void);
void mode_asleep(void);
void mode_asleep_order(void);
void mode_asleep_group(void);
void mode_asleep_no(void);
void mode_asleep_purge(void);
void mode_asleep_devices(void);
void mode_asleep_other_device(void);
void mode_asleep_killed(void);
void mode_asleep_turn(void);
void mode_asleep_turn_parts(void);
void mode_asleep_turn_lasts(void);
void mode_asleep_turn_queue(void);
void mode_asleep_turn_devices(void);
void mode_asleep_turn_begins(void);

#endif
