/*
 * What the subcommands of gpureclaim share. The tool has one thread; its strings live until it ends. A subcommand has a
 * file of its name, but for help (main.c) and for limit, threshold, reclaim and sleep (change.c). The other files are
 * their parts:
 *
 *   all                                 main.c, arguments.c, paths.c
 *   run, record                         loadable.c, probe.c
 *   status, top, metrics, wait, and
 *   limit, threshold, reclaim, sleep    gpus.c
 *   leaks, report                       origins.c, symbols.c
 *   report                              timeline.c, snapshots.c, advice.c, html.c, perfetto.c, pytorch.c,
 *                                       replay/trace.c
 *   doctor                              probe.c
 */
#ifndef GR_COMMAND_H
#define GR_COMMAND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "base/options.h"

#define GR_FLAGS_MOST 96

/* Exit statuses beside EXIT_SUCCESS and EXIT_FAILURE; the last three are those of env(1) as well. */
enum {
        STATUS_USAGE = 2,
        STATUS_TIME_IS_UP = 124, /* that of timeout(1) */
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

/* Whether what goes to this stream may have colours: a terminal that knows them, and no NO_COLOR (no-color.org). */
bool has_colour(FILE *stream);

/* The text, bold where standard output has colours; valid until the next call. */
const char *heading(const char *text);

/* Prints the words of the text as lines of a usual width, each behind so many blanks. */
void print_wrapped(int indent, const char *text);

/* Prints "gpureclaim: <message>" as one line on standard error. */
void complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Warns if the library cannot be loaded into the program, or into what runs it where it is a script. */
void say_if_not_loadable(const char *command, const char *program);

/* A gr_options_warn that complains. */
void complain_of_option(const char *message, void *ignored);

/*
 * Sets LD_PRELOAD for the program to be started, and with the flag sim the path of the simulated device; and what makes
 * Python offer the caches of its frameworks. Fails where a limit is set that cannot be read, as the library would run
 * the program without it. EXIT_SUCCESS, or the exit status for the error, which it has printed.
 */
int set_preload(const struct arguments *arguments);

/* Whether a program could write the file that an option names, as far as can be told now. False: errno says why not. */
bool can_be_written(const char *pattern);

/*
 * Sets the variable of an option for the program to be started. EXIT_SUCCESS, or the exit status for the error, which
 * it has printed: the value is none, or a file that could not be written.
 */
int set_option(const char *command, enum gr_option_id id, const char *value);

/* The command that reads a file that the library has written; NULL: it is no such file. */
const char *reader_of(const char *path);

/*
 * A file that takes the place of the one at path when it is whole: readers see the old one or the new one. begin_file:
 * its descriptor, and its name for end_file; or -errno; -EINVAL: at path is no regular file. end_file, where error, an
 * errno, is set, leaves the old one as it was. 0 or -errno, which is -error where that is set.
 */
int begin_file(const char *path, char **ret_name);
int end_file(const char *path, char *name, int error);

/* The path as a word for a shell, and for a command no flag; valid until the next call. */
const char *shell_word(const char *path);

/* The number of a process; 0: the text is none. */
unsigned parse_pid(const char *text);

/* Becomes the program argv[0]. Returns only on failure: prints the error and returns the exit status for it. */
int become(const char *command, char **argv);

#endif
