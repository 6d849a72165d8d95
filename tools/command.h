/* What the subcommands of gpureclaim share. The tool has one thread; its strings live until it ends. */
#ifndef GR_COMMAND_H
#define GR_COMMAND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/* Beside EXIT_SUCCESS and EXIT_FAILURE; the last three as env(1) has them. */
enum {
        STATUS_USAGE = 2,
        STATUS_NO_LIBRARY = 125,
        STATUS_NOT_EXECUTABLE = 126,
        STATUS_NOT_FOUND = 127,
};

struct command {
        const char *name;
        const char *arguments;
        const char *summary;
        const char *help;
        void (*print_more)(FILE *out); /* NULL where help says it all */
        int (*run)(int argc, char **argv);
};

#define COMMAND(name, arguments, summary, help, print_more) int command_##name(int argc, char **argv);
#include "commands.def"
#undef COMMAND

/* The generated part of the help of run: its flags. */
void run_print_flags(FILE *out);

/* Prints "gpureclaim: <message>" as one line on standard error. */
void complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

/*
 * Complains of an unknown flag of command, naming the one of known (count of them, NULLs skipped) that was probably
 * meant. Returns STATUS_USAGE.
 */
int unknown_flag(const char *command, const char *flag, const char *const *known, size_t count);

/* Writes to standard output; a gr_sink. */
void print_piece(const char *text, size_t length, void *arg);

/* True for -h and --help, after printing the help of command. */
bool help_wanted(const char *command, const char *argument);

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

/* One line of the doctor: what it is about, "ok", "note" or "fail", and the finding. */
void doctor_say(const char *topic, const char *state, const char *format, ...) __attribute__((format(printf, 3, 4)));

/*
 * The doctor's looks into the driver and into the shim, for a process of their own because either may crash it. They
 * print what they find; EXIT_SUCCESS where it is good enough for the shim.
 */
int probe_driver(void);
int probe_shim(const char *library, bool name_symbols);

#endif
