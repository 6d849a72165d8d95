/* What the subcommands of gpureclaim share. The tool has one thread; its strings live until it ends. */
#ifndef GR_COMMAND_H
#define GR_COMMAND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "base/options.h"

#define GR_FLAGS_MOST 64

/* Exit statuses beside EXIT_SUCCESS and EXIT_FAILURE; the last three are those of env(1). */
enum {
        STATUS_USAGE = 2,
        STATUS_NO_LIBRARY = 125,
        STATUS_NOT_EXECUTABLE = 126,
        STATUS_NOT_FOUND = 127,
};

/* What may follow the flags of a command. */
enum rest { REST_NOTHING, REST_WORDS, REST_PROGRAM };

struct arguments {
        const char *command;
        const char *values[GR_FLAGS_MOST]; /* of the flags, for flag_value and option_value */
        char **rest;                       /* count words and a NULL: what follows the flags */
        int count;
};

#define COMMAND(name, ...) int command_##name(const struct arguments *arguments);
#define FLAG(...)
#include "commands.def"
#undef FLAG
#undef COMMAND

/*
 * Reads the arguments of command, argv[0] being its name. EXIT_SUCCESS; HELP_WANTED: --help or -h is among them;
 * STATUS_USAGE: a mistake, which it has printed.
 */
#define HELP_WANTED (-1)
int read_arguments(const char *command, enum rest rest, int argc, char **argv, struct arguments *ret);

/* The value of a flag of the command, "1" for one that takes none. NULL: not given. */
const char *flag_value(const struct arguments *arguments, const char *name);

/* The same for the flag that sets an option; only the command run has such flags. */
const char *option_value(const struct arguments *arguments, enum gr_option_id id);

/* The flags of command, for its help. */
void print_flags(const char *command);

/* Prints "gpureclaim: <message>" as one line on standard error. */
void complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

/*
 * Sets LD_PRELOAD for the program to be started, and with the flag sim the path of the simulated device. EXIT_SUCCESS,
 * or the exit status for the error, which it has printed.
 */
int set_preload(const struct arguments *arguments);

/* Becomes the program argv[0]. Returns only on failure: prints the error and returns the exit status for it. */
int become(const char *command, char **argv);

/*
 * The folder of this program, absolute and without a slash at its end, from /proc/self/exe. 0 or -errno, buf untouched
 * on failure.
 */
int find_self_dir(char *buf, size_t buf_bytes);

/*
 * The absolute path of libgpureclaim.so: beside this program in a build folder or an installation (moved or not). 0, or
 * -ENOENT with buf untouched.
 */
int find_library(char *buf, size_t buf_bytes);

/* The folder that holds the simulated device's libcuda.so.1; as find_library. */
int find_sim_dir(char *buf, size_t buf_bytes);

/*
 * Puts entry in front of the variable's list, separated by ':', unless it stands in it already. 0, -errno of setenv, or
 * -EINVAL where entry holds a blank or colon, which such a list cannot express.
 */
int prepend_environment(const char *variable, const char *entry);

/*
 * The page of gpureclaim metrics, in OpenMetrics text or Prometheus' older format. Returns NULL, or what went wrong;
 * *ret_page is for free.
 */
const char *make_metrics(bool open_metrics, char **ret_page, size_t *ret_length);

/* Prints the trace as gpureclaim report --perfetto does. */
struct gr_trace;
void write_perfetto(const struct gr_trace *trace);

/*
 * Prints the largest origins as gpureclaim leaks does. native: also the functions between those of Python, else a line
 * says how many these are. head: begins the first line; more: the command or flag that shows the other origins.
 */
struct origins;
void print_origins(const struct origins *origins, size_t shown, bool native, const char *head, const char *more);

/* A frame and the place in it in one line without unprintable characters: "function (file:line)", or what is known. */
struct frame;
struct place;
void format_frame(const struct frame *frame, const struct place *place, char *text, size_t bytes);

/* Writes all origins as members of the open JSON object. */
struct gr_json;
void write_origins(struct gr_json *json, const struct origins *origins);

/* One line of the doctor: what it is about, "ok", "note" or "fail", and the finding. */
void doctor_say(const char *topic, const char *state, const char *format, ...) __attribute__((format(printf, 3, 4)));

/*
 * The doctor's looks at the driver and at the preloaded library, for a process of their own because either may crash
 * it. They print what they find; EXIT_SUCCESS where it is good enough.
 */
int probe_driver(void);
int probe_library(const char *library, bool name_symbols);

#endif
