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
#include "base/trace_file.h"
#include "command.h"

#define SUFFIX ".trace"

static pid_t program;

/* The terminal sends its signals to the program as well; the others came here instead of there. */
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

/* Whether the file is a trace that began at this time or later. */
static bool began_since(const char *path, uint64_t since_ns)
{
        static struct gr_trace_header header;
        FILE *file = fopen(path, "re");
        bool whole = file && fread(&header, sizeof(header), 1, file) == 1;

        if (file)
                fclose(file);
        return whole && memcmp(header.magic, GR_TRACE_MAGIC, sizeof(header.magic)) == 0 && header.began_ns >= since_ns;
}

/* Whether a file is PREFIX.NUMBER.trace: one of another, longer prefix is not this record's. */
static bool is_named(const char *name, const char *prefix)
{
        size_t prefix_length = strlen(prefix), digits;

        if (strncmp(name, prefix, prefix_length) != 0 || name[prefix_length] != '.')
                return false;
        name += prefix_length + 1;
        digits = strspn(name, "0123456789");
        return digits > 0 && strcmp(name + digits, SUFFIX) == 0;
}

/* Names the traces that began since then. Returns how many. */
static unsigned name_traces(const char *prefix, uint64_t since_ns)
{
        const char *slash = strrchr(prefix, '/'), *base = slash ? slash + 1 : prefix;
        char folder[GR_PATH_BYTES], path[GR_PATH_BYTES + NAME_MAX + 2];
        struct dirent *found;
        unsigned count = 0;
        DIR *opened;

        snprintf(folder, sizeof(folder), "%.*s", slash ? (int)(base - prefix) : 2, slash ? prefix : "./");
        opened = opendir(folder);
        while (opened && (found = readdir(opened))) {
                if (!is_named(found->d_name, base))
                        continue;
                snprintf(path, sizeof(path), "%s%s", slash ? folder : "", found->d_name);
                if (began_since(path, since_ns)) {
                        complain("recorded %s; to read it: gpureclaim report %s", path, path);
                        count++;
                }
        }
        if (opened)
                closedir(opened);
        return count;
}

/* GPURECLAIM_TRACE for this prefix, absolute, as the program may go elsewhere. 0 or -errno. */
static int set_trace(const char *prefix)
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
                        if (used + sizeof("%%.%p" SUFFIX) > sizeof(pattern))
                                return -ENAMETOOLONG;
                        pattern[used++] = *c;
                        if (*c == '%')
                                pattern[used++] = *c;
                }
        strcpy(pattern + used, ".%p" SUFFIX);
        return setenv("GPURECLAIM_TRACE", pattern, 1) == 0 ? 0 : -errno;
}

int command_record(const struct arguments *arguments)
{
        const char *prefix = flag_value(arguments, "output");
        struct timespec now;
        int status = set_preload(arguments), rc;

        if (status != EXIT_SUCCESS)
                return status;
        prefix = prefix ? prefix : "gpureclaim";
        rc = set_trace(prefix);
        if (rc) {
                complain("record: %s: %s", prefix, strerror(-rc));
                return STATUS_USAGE;
        }
        clock_gettime(CLOCK_REALTIME, &now);
        status = run_program(arguments);
        if (status < 0) {
                complain("record: %s: %s", arguments->rest[0], strerror(-status));
                return EXIT_FAILURE;
        }
        signal(SIGPIPE, SIG_IGN); /* the exit status is the program's, also where nobody reads what is said here */
        if (name_traces(prefix, (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec) == 0 &&
            !(WIFEXITED(status) && WEXITSTATUS(status) >= STATUS_NOT_EXECUTABLE))
                complain("record: no trace was written: did the program use CUDA?");
        if (WIFEXITED(status))
                return WEXITSTATUS(status);
        /* Ends in the same way, for whoever waits for this process; the core is the program's. */
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        signal(WTERMSIG(status), SIG_DFL);
        raise(WTERMSIG(status));
        return 128 + WTERMSIG(status);
}
