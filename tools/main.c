#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/options.h"
#include "command.h"

#define ITEMS(array) (sizeof(array) / sizeof((array)[0]))

static const struct command commands[] = {
#define COMMAND(name_, arguments_, summary_, help_, print_more_)                                                       \
        {#name_, arguments_, summary_, help_, print_more_, command_##name_},
#include "commands.def"
#undef COMMAND
};

void complain(const char *format, ...)
{
        char message[2048];
        va_list args;

        va_start(args, format);
        vsnprintf(message, sizeof(message), format, args);
        va_end(args);
        /* Arguments of the user stand in it: one line, and nothing that drives a terminal. */
        gr_log_clean(message, strlen(message));
        fflush(stdout);
        fprintf(stderr, "gpureclaim: %s\n", message);
}

void print_piece(const char *text, size_t length, void *arg)
{
        (void)arg;
        fwrite(text, 1, length, stdout);
}

int unknown_flag(const char *command, const char *flag, const char *const *known, size_t count)
{
        const char *names[64], *nearest;
        char name[64];
        size_t i;

        snprintf(name, sizeof(name), "%.*s", (int)strcspn(flag, "="), flag);
        for (i = 0; i < count && i < ITEMS(names); i++)
                names[i] = known[i] ? known[i] + strspn(known[i], "-") : NULL;
        nearest = gr_nearest(name + strspn(name, "-"), names, i);
        if (nearest)
                complain("%s: unknown flag %s; did you mean --%s?", command, name, nearest);
        else
                complain("%s: unknown flag %s; see gpureclaim help %s", command, name, command);
        return STATUS_USAGE;
}

static const struct command *find_command(const char *name)
{
        size_t i;

        for (i = 0; i < ITEMS(commands); i++)
                if (strcmp(commands[i].name, name) == 0)
                        return &commands[i];
        return NULL;
}

static int unknown_command(const char *name)
{
        const char *names[ITEMS(commands)], *nearest;
        size_t i;

        for (i = 0; i < ITEMS(commands); i++)
                names[i] = commands[i].name;
        nearest = gr_nearest(name, names, ITEMS(commands));
        if (nearest)
                complain("unknown command %s; did you mean %s?", name, nearest);
        else
                complain("unknown command %s; see gpureclaim help", name);
        return STATUS_USAGE;
}

static void print_command(const struct command *command)
{
        printf("Usage: gpureclaim %s %s\n%c%s.\n\n%s", command->name, command->arguments,
               command->summary[0] - 'a' + 'A', command->summary + 1, command->help);
        if (command->print_more)
                command->print_more(stdout);
}

static void print_commands(FILE *out)
{
        size_t i;

        fprintf(out, "Usage: gpureclaim COMMAND [ARGUMENT...]\n"
                     "Serve the device memory of unmodified CUDA programs from a caching pool, within limits.\n\n");
        for (i = 0; i < ITEMS(commands); i++)
                fprintf(out, "  %-9s  %s\n", commands[i].name, commands[i].summary);
        fprintf(out, "\n  gpureclaim help COMMAND tells more; gpureclaim --version tells the version.\n");
}

bool help_wanted(const char *command, const char *argument)
{
        if (strcmp(argument, "-h") != 0 && strcmp(argument, "--help") != 0)
                return false;
        print_command(find_command(command));
        return true;
}

int command_help(int argc, char **argv)
{
        const struct command *command;

        if (argc > 2) {
                complain("help: one command at a time, please");
                return STATUS_USAGE;
        }
        if (argc < 2) {
                print_commands(stdout);
                return EXIT_SUCCESS;
        }
        if (help_wanted("help", argv[1]))
                return EXIT_SUCCESS;
        command = find_command(argv[1]);
        if (!command)
                return unknown_command(argv[1]);
        print_command(command);
        return EXIT_SUCCESS;
}

#if defined(GR_HAVE_TOP) && !defined(GR_IS_TOP)
/* Only top needs a terminal library, so it is a program of its own beside this one: this very program, and top.c. */
int command_top(int argc, char **argv)
{
        char path[PATH_MAX + sizeof("/gpureclaim-top")];
        char **arguments = calloc((size_t)argc + 2, sizeof(*arguments));

        if (!arguments || find_self_dir(path, PATH_MAX) != 0) {
                complain("top: cannot find gpureclaim-top");
                free(arguments);
                return EXIT_FAILURE;
        }
        strcat(path, "/gpureclaim-top");
        arguments[0] = path;
        memcpy(arguments + 1, argv, (size_t)argc * sizeof(*argv));
        execv(path, arguments);
        complain("top: %s: %s", path, strerror(errno));
        free(arguments);
        return EXIT_FAILURE;
}
#endif

static int dispatch(int argc, char **argv)
{
        const struct command *command;

        if (argc < 2) {
                complain("no command given; see gpureclaim help");
                return STATUS_USAGE;
        }
        if (strcmp(argv[1], "--version") == 0) {
                printf("gpureclaim %s\n", GR_VERSION);
                return EXIT_SUCCESS;
        }
        if (strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "--help") == 0) {
                print_commands(stdout);
                return EXIT_SUCCESS;
        }
        if (argv[1][0] == '-') {
                complain("unknown flag %s before the command; see gpureclaim help", argv[1]);
                return STATUS_USAGE;
        }
        command = find_command(argv[1]);
        return command ? command->run(argc - 1, argv + 1) : unknown_command(argv[1]);
}

int main(int argc, char **argv)
{
        int status = dispatch(argc, argv);

        if (fflush(stdout) != 0 || ferror(stdout)) {
                complain("cannot write to standard output");
                if (status == EXIT_SUCCESS)
                        status = EXIT_FAILURE;
        }
        return status;
}
