/* The command: its table of subcommands, its help, what runs another program, and what replaces a file. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "command.h"
#include "paths.h"

#define ITEMS(array) (sizeof(array) / sizeof((array)[0]))

static const struct command {
        const char *name, *usage, *summary, *help;
        enum rest rest;
        int (*run)(const struct arguments *arguments);
} commands[] = {
#define COMMAND(name, rest, usage, summary, help) {#name, usage, summary, help, REST_##rest, command_##name},
#define FLAG(...)
#include "commands.def"
#undef FLAG
#undef COMMAND
};

bool has_colour(FILE *stream)
{
        const char *off = getenv("NO_COLOR"), *terminal = getenv("TERM");

        return !(off && *off) && terminal && *terminal && strcmp(terminal, "dumb") != 0 && isatty(fileno(stream));
}

void complain_of_option(const char *message, void *ignored)
{
        (void)ignored;
        complain("%s", message);
}

void complain(const char *format, ...)
{
        char message[2048];
        va_list args;

        va_start(args, format);
        vsnprintf(message, sizeof(message), format, args);
        va_end(args);
        /* It may contain arguments of the user: makes it one line, without control characters for the terminal. */
        gr_log_clean(message, strlen(message));
        fflush(stdout);
        fprintf(stderr, has_colour(stderr) ? "\033[1;31mgpureclaim:\033[m %s\n" : "gpureclaim: %s\n", message);
}

static const struct command *find_command(const char *name)
{
        for (size_t i = 0; i < ITEMS(commands); i++)
                if (strcmp(commands[i].name, name) == 0)
                        return &commands[i];
        return NULL;
}

static int unknown_command(const char *name)
{
        const char *names[ITEMS(commands)], *nearest;

        for (size_t i = 0; i < ITEMS(commands); i++)
                names[i] = commands[i].name;
        nearest = gr_options_nearest(name, names, ITEMS(commands));
        if (nearest)
                complain("unknown command %s; did you mean %s?", name, nearest);
        else
                complain("unknown command %s; see gpureclaim help", name);
        return STATUS_USAGE;
}

const char *heading(const char *text)
{
        static char bold[160];

        snprintf(bold, sizeof(bold), "\033[1m%s\033[m", text);
        return has_colour(stdout) ? bold : text;
}

static void print_command(const struct command *command)
{
        printf("%s gpureclaim %s%s%s\n%c%s.\n\n%s", heading("Usage:"), command->name, *command->usage ? " " : "",
               command->usage, command->summary[0] - 'a' + 'A', command->summary + 1, command->help);
        print_flags(command->name);
}

static void print_commands(void)
{
        printf("%s gpureclaim COMMAND [ARGUMENT...]\n"
               "Serve the device memory of unmodified CUDA programs from a cache, within limits.\n\n",
               heading("Usage:"));
        for (size_t i = 0; i < ITEMS(commands); i++)
                printf("  %-9s  %s\n", commands[i].name, commands[i].summary);
        printf("\n  gpureclaim help COMMAND tells more; gpureclaim --version prints the version.\n");
}

int command_help(const struct arguments *arguments)
{
        const struct command *command;

        if (arguments->count > 1) {
                complain("help: %s: takes one command only", arguments->rest[1]);
                return STATUS_USAGE;
        }
        if (arguments->count == 0) {
                print_commands();
                return EXIT_SUCCESS;
        }
        command = find_command(arguments->rest[0]);
        if (!command)
                return unknown_command(arguments->rest[0]);
        print_command(command);
        return EXIT_SUCCESS;
}

const char *shell_word(const char *path)
{
        static const char plain[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ/._-+%=@:,";
        static char word[4 * PATH_MAX + 8];
        const char *quote = path[strspn(path, plain)] ? "'" : "";
        size_t used = (size_t)sprintf(word, "%s%s", quote, *path == '-' ? "./" : "");

        for (; *path && used < sizeof(word) - 8; path++)
                used += (size_t)sprintf(word + used, *path == '\'' ? "'\\''" : "%c", *path);
        strcpy(word + used, quote);
        return word;
}

int become(const char *command, char **argv)
{
        int error;

        execvp(argv[0], argv);
        error = errno;
        complain("%s: %s: %s", command, argv[0], strerror(error));
        return error == ENOENT ? STATUS_NOT_FOUND : STATUS_NOT_EXECUTABLE;
}

int begin_file(const char *path, char **ret_name)
{
        static const char end[] = ".XXXXXX";
        size_t name_bytes = strlen(path) + sizeof(end);
        mode_t mask = umask(0);
        struct stat old = {.st_mode = S_IFREG | (0666 & ~mask)};
        char *name;
        int fd;

        umask(mask);
        /* A device or a link is not to be replaced by a file. */
        if (lstat(path, &old) == 0 && !S_ISREG(old.st_mode))
                return -EINVAL;
        if (access(path, F_OK) == 0 && access(path, W_OK) != 0) /* nor one that may not be written to */
                return -errno;
        name = malloc(name_bytes);
        if (!name)
                return -ENOMEM;
        snprintf(name, name_bytes, "%s%s", path, end);
        fd = mkostemp(name, O_CLOEXEC);
        if (fd < 0) {
                fd = -errno;
                free(name);
                return fd;
        }
        fchmod(fd, old.st_mode & 0777);
        *ret_name = name;
        return fd;
}

int end_file(const char *path, char *name, int error)
{
        if (!error && rename(name, path) != 0)
                error = errno;
        if (error)
                unlink(name);
        free(name);
        return -error;
}

/*
 * Only top needs a terminal library and only serve one for HTTP, so each is a program of its own beside this one: this
 * very program, and one more file.
 */
__attribute__((unused)) static int become_other(const struct arguments *arguments, const char *const *words)
{
        char path[PATH_MAX + 32], *argv[8] = {path, (char *)arguments->command};
        int rc = find_self_dir(path, PATH_MAX);

        if (rc) {
                complain("%s: cannot find gpureclaim-%s", arguments->command, arguments->command);
                return EXIT_FAILURE;
        }
        strcat(strcat(path, "/gpureclaim-"), arguments->command);
        for (size_t n = 2; *words; words++)
                argv[n++] = (char *)*words;
        return become(arguments->command, argv);
}

/* EXIT_FAILURE: this one was not built, as the library that it needs was missing. */
__attribute__((unused)) static int say_not_built(const struct arguments *arguments, const char *library)
{
        complain("%s: built without %s: install it (Debian, Ubuntu: %s-dev) and build again", arguments->command,
                 library, library);
        return EXIT_FAILURE;
}

#ifndef GR_IS_TOP
int command_top(const struct arguments *arguments)
{
#ifdef GR_HAVE_TOP
        const char *words[4] = {NULL}, *interval = flag_value(arguments, "interval");
        size_t n = 0;

        if (flag_value(arguments, "once"))
                words[n++] = "--once";
        if (interval) {
                words[n++] = "--interval";
                words[n] = interval;
        }
        return become_other(arguments, words);
#else
        return say_not_built(arguments, "libncurses");
#endif
}
#endif

#ifndef GR_IS_SERVE
int command_serve(const struct arguments *arguments)
{
#ifdef GR_HAVE_SERVE
        const char *address = flag_value(arguments, "listen"), *words[] = {address ? "--listen" : NULL, address, NULL};

        return become_other(arguments, words);
#else
        return say_not_built(arguments, "libmicrohttpd");
#endif
}
#endif

static int dispatch_command(int argc, char **argv)
{
        const struct command *command;
        struct arguments arguments;
        int status;

        if (argc < 2) {
                complain("no command given; see gpureclaim help");
                return STATUS_USAGE;
        }
        if (strcmp(argv[1], "--version") == 0) {
                printf("gpureclaim %s\n", GR_VERSION);
                return EXIT_SUCCESS;
        }
        if (strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "--help") == 0) {
                print_commands();
                return EXIT_SUCCESS;
        }
        if (argv[1][0] == '-') {
                complain("unknown flag %s before the command; see gpureclaim help", argv[1]);
                return STATUS_USAGE;
        }
        command = find_command(argv[1]);
        if (!command)
                return unknown_command(argv[1]);
        status = read_arguments(command->name, command->rest, argc - 1, argv + 1, &arguments);
        if (status == HELP_WANTED) {
                print_command(command);
                return EXIT_SUCCESS;
        }
        return status == EXIT_SUCCESS ? command->run(&arguments) : status;
}

int main(int argc, char **argv)
{
        int status = dispatch_command(argc, argv);

        if (fflush(stdout) != 0 || ferror(stdout)) {
                complain("cannot write to standard output");
                if (status == EXIT_SUCCESS)
                        status = EXIT_FAILURE;
        }
        return status;
}
