/* What the parts of sleep.c share. */
#ifndef GR_TEST_SLEEP_H
#define GR_TEST_SLEEP_H

#include "gputest.h"

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>

enum { MANY = 40 };

extern struct gt gt;     /* each mode finds it open */
extern char **arguments; /* of the program */
extern CUdeviceptr blocks[MANY];
extern size_t sizes[MANY];

/* With this variable, which the simulated device reads when it starts; returns where the program has it. */
void run_anew(const char *variable, const char *value);
size_t on_device(void);
/*
 * What the command says of this process; its exit status. With GR_TEST_DEEP its sleep is a deep one.
 */
int command(const char *words, char *said, size_t bytes);
/* The command with these arguments; whether the process is asleep then. */
bool fall_asleep(const char *words);
/* It must fall asleep; when: what is printed of this. */
void sleep_now(const char *when);
/* Fills the blocks: sizes of all kinds, from a few KiB to many pages. */
void take_blocks(void);
void take_blocks_and_sleep(void);
void free_blocks(void);
/* Reads the blocks, which wakes the process; they must be what take_blocks made them. */
void look_at_blocks(const char *when);
/* Reads one of them, which wakes it as well. */
CUresult read_a_block(void);

/* How often the library says these words, from begin_to_listen on. */
void begin_to_listen(void);
unsigned heard(const char *words);

/* Modes. */
typedef void mode_function(void);
mode_function mode_idle, mode_inside, mode_turned, mode_ended, mode_leaving, mode_cancelled, mode_random, mode_exit,
        mode_reset, mode_stays, mode_stays_busy, mode_ending, mode_first, mode_joins, mode_devices, mode_full,
        mode_take, mode_deep, mode_deep_calls, mode_deep_fails, mode_deep_full, mode_deep_not, mode_deep_ends,
        mode_deep_beside, mode_foreign, mode_deep_killed, mode_deep_worker, mode_deep_taker, mode_deep_room,
        mode_deep_unseen, mode_deep_nvml, mode_deep_blind, mode_deep_lost, mode_deep_replaced;

#endif
