/* gpureclaim doctor: would the library work on this machine? */
#include <errno.h>
#include <glob.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/options.h"
#include "command.h"
#include "doctor.h"
#include "paths.h"
#include "system/options_file.h"

/* Longest wait for a probe. Initialising eight GPUs without persistence mode takes several seconds. */
#define PROBE_SECONDS 60

void doctor_say(const char *topic, const char *state, const char *format, ...)
{
        char text[8192];
        va_list args;
        char *c;

        va_start(args, format);
        vsnprintf(text, sizeof(text), format, args);
        va_end(args);
        for (c = text; *c; c++)
                if ((unsigned char)*c < ' ' || *c == 0x7f)
                        *c = ' ';
        printf("%-9s %s%-4s%s  %s\n", topic,
               !has_colour(stdout) ? ""
               : *state == 'o'     ? "\033[32m"
               : *state == 'n'     ? "\033[33m"
                                   : "\033[31m",
               state, has_colour(stdout) ? "\033[m" : "", text);
        /* At once, as a probe may crash afterwards. */
        fflush(stdout);
}

static void say_option(const char *message, void *arg)
{
        (void)arg;
        doctor_say("options", "note", "%s", message);
}

static void check_environment(void)
{
        const char *preload = getenv("LD_PRELOAD"), *visible = getenv("CUDA_VISIBLE_DEVICES");
        static struct gr_options options;

        if (!preload || !*preload)
                doctor_say("preload", "ok", "LD_PRELOAD is empty");
        else if (strstr(preload, "libgpureclaim.so"))
                doctor_say("preload", "note", "LD_PRELOAD has gpureclaim already: %s", preload);
        else
                doctor_say("preload", "note", "LD_PRELOAD has other libraries, which come after gpureclaim: %s",
                           preload);
        if (!visible)
                doctor_say("visible", "ok", "CUDA_VISIBLE_DEVICES is not set: all GPUs");
        else if (!*visible || strcmp(visible, "-1") == 0)
                doctor_say("visible", "note", "CUDA_VISIBLE_DEVICES=\"%s\" hides all GPUs", visible);
        else
                doctor_say("visible", "ok", "CUDA_VISIBLE_DEVICES=%s", visible);
        gr_options_read(&options, say_option, NULL);
        if (options.config.text[0])
                doctor_say("options", "ok", "from the environment, and from %s", options.config.text);
}

/* Checks the nodes of the GPUs, and the two that every CUDA program opens. Other nodes are for administrators. */
static void check_nodes(void)
{
        size_t usable = 0, i;
        glob_t found;

        if (glob("/dev/nvidia[0-9]*", 0, NULL, &found) != 0 && access("/dev/nvidiactl", F_OK) != 0) {
                doctor_say("nodes", "note",
                           "no /dev/nvidia*: the NVIDIA kernel module is not loaded, or this is a "
                           "container without its devices");
                return;
        }
        glob("/dev/nvidiactl", GLOB_APPEND, NULL, &found);
        glob("/dev/nvidia-uvm", GLOB_APPEND, NULL, &found);
        for (i = 0; i < found.gl_pathc; i++) {
                if (access(found.gl_pathv[i], R_OK | W_OK) == 0)
                        usable++;
                else
                        doctor_say("nodes", "note", "%s: %s", found.gl_pathv[i], strerror(errno));
        }
        if (usable == found.gl_pathc)
                doctor_say("nodes", "ok", "%zu device nodes in /dev, all readable and writable", usable);
        globfree(&found);
}

static void check_kernel_module(void)
{
        FILE *file = fopen("/sys/module/nvidia/version", "re");
        char version[64];

        if (!file)
                return;
        if (fgets(version, sizeof(version), file)) {
                version[strcspn(version, "\n")] = '\0';
                doctor_say("module", "ok", "NVIDIA kernel module %s", version);
        }
        fclose(file);
}

static double seconds_now(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static int wait_probe(pid_t pid, const char *topic)
{
        const double deadline = seconds_now() + PROBE_SECONDS;
        const struct timespec pause = {.tv_nsec = 5000000};
        int status;
        pid_t got;

        while ((got = waitpid(pid, &status, WNOHANG)) == 0 && seconds_now() < deadline)
                nanosleep(&pause, NULL);
        if (got == 0) {
                kill(pid, SIGKILL);
                waitpid(pid, &status, 0);
                doctor_say(topic, "fail", "no answer within %d s", PROBE_SECONDS);
                return EXIT_FAILURE;
        }
        if (got < 0) {
                doctor_say(topic, "fail", "waiting for the probe: %s", strerror(errno));
                return EXIT_FAILURE;
        }
        if (WIFSIGNALED(status)) {
                doctor_say(topic, "fail", "crashed: %s", strsignal(WTERMSIG(status)));
                return EXIT_FAILURE;
        }
        return WEXITSTATUS(status);
}

/*
 * Runs this program once more, as a probe of the library `preload`; NULL: of the driver. It takes a new process because
 * the loader reads LD_PRELOAD and LD_LIBRARY_PATH only when a program starts.
 */
static int run_probe(const char *topic, const char *preload, bool name_symbols, const char *sim_dir)
{
        const char *argv[] = {
                "gpureclaim", "doctor", preload ? "--probe-library" : "--probe-driver", preload, NULL, NULL,
        };
        pid_t pid;
        size_t i;

        if (fflush(stdout) != 0 || ferror(stdout)) /* nobody would read what it says, and main complains */
                return EXIT_FAILURE;
        pid = fork();
        if (pid < 0) {
                doctor_say(topic, "fail", "fork: %s", strerror(errno));
                return EXIT_FAILURE;
        }
        if (pid > 0)
                return wait_probe(pid, topic);
        /* The library must neither warn a second time nor write this process's statistics anywhere. */
        for (i = 0; i < GR_OPTION_COUNT; i++)
                unsetenv(gr_option_table[i].env);
        setenv(gr_option_table[GR_OPTION_CONFIG].env, "/dev/null", 1);
        if ((preload && prepend_environment("LD_PRELOAD", preload) < 0) ||
            (sim_dir && prepend_environment("LD_LIBRARY_PATH", sim_dir) < 0)) {
                doctor_say(topic, "fail", "%s: a path with a blank or colon cannot be preloaded",
                           preload ? preload : sim_dir);
                _exit(EXIT_FAILURE);
        }
        if (preload && name_symbols)
                argv[4] = "--symbols";
        execv("/proc/self/exe", (char **)argv);
        doctor_say(topic, "fail", "cannot run this program again: %s", strerror(errno));
        _exit(EXIT_FAILURE);
}

/* advice: a line, or "". */
static int print_conclusion(const char *reason, const char *advice)
{
        if (!reason) {
                printf("gpureclaim would work here.\n");
                return EXIT_SUCCESS;
        }
        printf("gpureclaim would not work here: %s.\n%s", reason, advice);
        return EXIT_FAILURE;
}

static int examine_machine(bool sim, bool name_symbols)
{
        char library[PATH_MAX], sim_dir[PATH_MAX];
        const char *reason = NULL;

        check_environment();
        if (sim && find_sim_dir(sim_dir, sizeof(sim_dir)) < 0) {
                doctor_say("driver", "fail",
                           "the simulated device is neither beside this program nor in %s/gpureclaim/sim", GR_LIBDIR);
                return print_conclusion("the simulated device is missing", "");
        }
        if (!sim) {
                check_nodes();
                check_kernel_module();
        }
        if (run_probe("driver", NULL, false, sim ? sim_dir : NULL) != EXIT_SUCCESS)
                reason = "there is no usable CUDA driver";
        if (find_library(library, sizeof(library)) < 0) {
                doctor_say("library", "fail", "libgpureclaim.so is neither beside this program nor in %s", GR_LIBDIR);
                return print_conclusion(reason ? reason : "libgpureclaim.so is missing", "");
        }
        if (run_probe("library", library, name_symbols, sim ? sim_dir : NULL) != EXIT_SUCCESS && !reason)
                reason = "the library does not take over the driver's symbols";
        return print_conclusion(
                reason,
                sim ? "" : "To try it without a GPU: gpureclaim run --sim; to check that: gpureclaim doctor --sim\n");
}

int command_doctor(const struct arguments *arguments)
{
        const char *library = flag_value(arguments, "probe-library");
        bool name_symbols = flag_value(arguments, "symbols");

        if (flag_value(arguments, "probe-driver"))
                return probe_driver();
        if (library)
                return probe_library(library, name_symbols);
        return examine_machine(flag_value(arguments, "sim"), name_symbols);
}
