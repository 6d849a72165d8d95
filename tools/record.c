/* gpureclaim record: run a program with a trace, and say where it is. */
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/options.h"
#include "base/origins_file.h"
#include "base/trace_file.h"
#include "command.h"

/* The kinds of file that the library writes. */
static const struct kind {
        const char *variable, *suffix, *magic, *command;
} trace = {"GPURECLAIM_TRACE", GR_TRACE_SUFFIX, GR_TRACE_MAGIC, "report"},
  origins = {"GPURECLAIM_BACKTRACE_FILE", GR_ORIGINS_SUFFIX, GR_ORIGINS_MAGIC, "leaks"};

_Static_assert(offsetof(struct gr_trace_header, began_ns) == offsetof(struct gr_origins_header, began_ns),
               "one reader");

static pid_t program;

/* Passes on to the program what a process has sent. The terminal sends its signals to the program as well. */
static void pass_on(int signal, siginfo_t *info, void *ignored)
{
        (void)ignored;
        if (info->si_code <= 0)
                kill(program, signal);
}

/* Runs the program. Returns what waitpid says of it, or -errno. */
static int run_program(const struct arguments *arguments)
{
        static const int passed[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM};
        struct sigaction ended = {.sa_handler = SIG_DFL}, ended_before;
        sigset_t all, before;
        int status;

        fflush(stdout);
        sigfillset(&all);
        sigprocmask(SIG_BLOCK, &all, &before);
        sigaction(SIGCHLD, &ended, &ended_before); /* where it is ignored, nobody learns the exit status */
        program = fork();
        if (program == 0) {
                sigaction(SIGCHLD, &ended_before, NULL);
                sigprocmask(SIG_SETMASK, &before, NULL);
                _exit(become("record", arguments->rest));
        }
        for (size_t i = 0; program > 0 && i < sizeof(passed) / sizeof(passed[0]); i++) {
                struct sigaction action = {.sa_sigaction = pass_on, .sa_flags = SA_SIGINFO | SA_RESTART}, old;

                if (sigaction(passed[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN)
                        sigaction(passed[i], &action, NULL);
        }
        status = program < 0 ? -errno : 0;
        sigprocmask(SIG_SETMASK, &before, NULL);
        while (program > 0 && waitpid(program, &status, 0) < 0 && errno == EINTR)
                ;
        return status;
}

const char *reader_of(const char *path)
{
        FILE *file = fopen(path, "re");
        char magic[8];
        bool whole = file && fread(magic, sizeof(magic), 1, file) == 1;

        if (file)
                fclose(file);
        return !whole                                         ? NULL
               : !memcmp(magic, trace.magic, sizeof(magic))   ? trace.command
               : !memcmp(magic, origins.magic, sizeof(magic)) ? origins.command
                                                              : NULL;
}

/* Whether the file is of this kind and began at this time or later. */
static bool began_since(const char *path, const struct kind *kind, uint64_t since_ns)
{
        char head[offsetof(struct gr_trace_header, began_ns) + sizeof(uint64_t)];
        FILE *file = fopen(path, "re");
        bool whole = file && fread(head, sizeof(head), 1, file) == 1;
        uint64_t began_ns;

        if (file)
                fclose(file);
        if (!whole || memcmp(head, kind->magic, 8) != 0)
                return false;
        memcpy(&began_ns, head + sizeof(head) - sizeof(began_ns), sizeof(began_ns));
        return began_ns >= since_ns;
}

/* Whether the name is the prefix, a dot, what %p stands for and the suffix, and not one of a longer prefix. */
static bool is_named(const char *name, const char *prefix, const char *suffix)
{
        size_t prefix_length = strlen(prefix), digits;

        if (strncmp(name, prefix, prefix_length) != 0 || name[prefix_length] != '.')
                return false;
        name += prefix_length + 1;
        digits = strspn(name, "0123456789");
        if (digits > 0 && name[digits] == '-')
                digits += 1 + strspn(name + digits + 1, "0123456789");
        return digits > 0 && strcmp(name + digits, suffix) == 0;
}

/* Prints the names of a kind's files that began at since_ns or later. Returns how many. */
static unsigned name_files(const char *prefix, const struct kind *kind, uint64_t since_ns)
{
        const char *slash = strrchr(prefix, '/'), *base = slash ? slash + 1 : prefix;
        char folder[GR_PATH_BYTES], path[GR_PATH_BYTES + NAME_MAX + 2];
        struct dirent *found;
        unsigned count = 0;
        DIR *opened;

        snprintf(folder, sizeof(folder), "%.*s", slash ? (int)(base - prefix) : 2, slash ? prefix : "./");
        opened = opendir(folder);
        while (opened && (found = readdir(opened))) {
                if (!is_named(found->d_name, base, kind->suffix))
                        continue;
                snprintf(path, sizeof(path), "%s%s", slash ? folder : "", found->d_name);
                if (began_since(path, kind, since_ns)) {
                        complain("recorded %s; to read it: gpureclaim %s %s", path, kind->command, shell_word(path));
                        count++;
                }
        }
        if (opened)
                closedir(opened);
        return count;
}

/* Sets the kind's variable to an absolute path, as the program may change its working directory. 0 or -errno. */
static int set_file(const char *prefix, const struct kind *kind)
{
        char folder[PATH_MAX] = "", pattern[GR_PATH_BYTES];
        const char *const parts[] = {folder, prefix};
        size_t used = 0;

        if (prefix[0] != '/') {
                if (!getcwd(folder, sizeof(folder) - 1))
                        return -errno;
                strcat(folder, "/");
        }
        for (int i = 0; i < 2; i++)
                for (const char *c = parts[i]; *c; c++) {
                        if (used + sizeof("%%.%p") + strlen(kind->suffix) > sizeof(pattern))
                                return -ENAMETOOLONG;
                        pattern[used++] = *c;
                        if (*c == '%')
                                pattern[used++] = *c;
                }
        strcpy(pattern + used, ".%p");
        strcat(pattern, kind->suffix);
        return can_be_written(pattern) && setenv(kind->variable, pattern, 1) == 0 ? 0 : -errno;
}

int command_record(const struct arguments *arguments)
{
        const char *prefix = flag_value(arguments, "output"), *backtrace = flag_value(arguments, "backtrace");
        struct timespec now;
        uint64_t since_ns;
        int status = EXIT_SUCCESS, rc;

        prefix = prefix ? prefix : "gpureclaim";
        if (!*prefix || prefix[strlen(prefix) - 1] == '/') {
                complain("record: --output '%s': no name for the files", prefix);
                return STATUS_USAGE;
        }
        if (backtrace)
                status = set_option("record", GR_OPTION_BACKTRACE, backtrace);
        if (status == EXIT_SUCCESS)
                status = set_preload(arguments);
        if (status != EXIT_SUCCESS)
                return status;
        rc = set_file(prefix, &trace);
        if (!rc)
                rc = set_file(prefix, &origins);
        if (rc) {
                complain("record: --output %s: %s", prefix, strerror(-rc));
                return STATUS_USAGE;
        }
        clock_gettime(CLOCK_REALTIME, &now);
        status = run_program(arguments);
        if (status < 0) {
                complain("record: %s: %s", arguments->rest[0], strerror(-status));
                return EXIT_FAILURE;
        }
        signal(SIGPIPE, SIG_IGN); /* or the exit status would not be the program's where nobody reads the messages */
        since_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
        name_files(prefix, &origins, since_ns);
        if (name_files(prefix, &trace, since_ns) == 0 &&
            !(WIFEXITED(status) && WEXITSTATUS(status) >= STATUS_NOT_EXECUTABLE))
                complain("record: no trace was written: did the program use CUDA?");
        if (WIFEXITED(status))
                return WEXITSTATUS(status);
        /* Ends by the same signal as the program, for whoever waits for this process; without a core of its own. */
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        signal(WTERMSIG(status), SIG_DFL);
        raise(WTERMSIG(status));
        return 128 + WTERMSIG(status);
}
