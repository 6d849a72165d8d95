/* gpureclaim run: start a program with the library preloaded. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/options.h"
#include "command.h"
#include "doctor.h"
#include "paths.h"
#include "system/options_file.h"

#define SIM_FD 100 /* and above */

bool can_be_written(const char *pattern)
{
        char path[PATH_MAX], folder[PATH_MAX];
        const char *slash;
        struct stat about;
        int rc = gr_options_expand_path(pattern, getpid(), 0, path, sizeof(path));

        if (!rc && stat(path, &about) == 0 && S_ISDIR(about.st_mode))
                rc = -EISDIR;
        if (rc) {
                errno = -rc;
                return false;
        }
        if (access(path, W_OK) == 0)
                return true;
        if (errno != ENOENT)
                return false;
        slash = strrchr(path, '/');
        snprintf(folder, sizeof(folder), "%.*s", slash ? (int)(slash - path + 1) : 1, slash ? path : ".");
        return access(folder, W_OK | X_OK) == 0;
}

/* Any field of struct gr_options: values are only checked here, the library parses them for itself. */
int set_option(const char *command, enum gr_option_id id, const char *value)
{
        const struct gr_option *option = &gr_option_table[id];
        static struct gr_options scratch;
        char values[128];
        int rc = gr_option_parse(option, value, (char *)&scratch + option->offset);

        if (rc)
                complain("%s: %s %s: %s (expected %s)", command, option->flag, value, gr_option_reason(rc),
                         gr_option_values(option, values, sizeof(values)));
        else if (id == GR_OPTION_SLEEP_DIR
                         ? access(value, W_OK | X_OK) != 0
                         : option->kind == GR_KIND_PATH && id != GR_OPTION_CONFIG && !can_be_written(value))
                complain("%s: %s %s: %s", command, option->flag, value, strerror(errno));
        else if (setenv(option->env, value, 1) == 0)
                return EXIT_SUCCESS;
        else
                complain("%s: %s: %s", command, option->env, strerror(errno));
        return STATUS_USAGE;
}

/* Sets the variables of the options that are given as flags. */
static int set_variables(const struct arguments *arguments)
{
        int status = EXIT_SUCCESS;

        for (enum gr_option_id id = 0; id < GR_OPTION_COUNT && status == EXIT_SUCCESS; id++)
                if (option_value(arguments, id))
                        status = set_option("run", id, option_value(arguments, id));
        return status;
}

static int prepare_variable(const char *command, const char *variable, const char *path)
{
        int rc = prepend_environment(variable, path);

        if (rc == 0)
                return EXIT_SUCCESS;
        if (rc == -EINVAL)
                complain("%s: %s has a blank or colon in it, which %s cannot express", command, path, variable);
        else
                complain("%s: %s: %s", command, variable, strerror(-rc));
        return STATUS_NO_LIBRARY;
}

/* The library must let a program run whatever is set wrong. This command need not, and so a limit holds or it fails. */
static int check_limits(const char *command, struct gr_options *options)
{
        int rc = gr_options_read(options, NULL, NULL);

        if (rc == 0 && !options->bad[GR_OPTION_HARD_LIMIT] && !options->bad[GR_OPTION_GROUP_LIMIT] &&
            !options->bad[GR_OPTION_PINNED_LIMIT])
                return EXIT_SUCCESS;
        gr_options_read(options, complain_of_option, NULL);
        complain("%s: not started, as a limit would not hold%s", command,
                 rc ? "; with GPURECLAIM_CONFIG=/dev/null no file is read" : "");
        return STATUS_USAGE;
}

/* The same of a limit for a GPU that is not there; where nobody knows, the library warns. sim_dir: NULL: the driver. */
static int check_gpus(const char *command, const struct gr_options *options, const char *sim_dir)
{
        static const enum gr_option_id limits[] = {GR_OPTION_HARD_LIMIT, GR_OPTION_GROUP_LIMIT};

        for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
                const struct gr_size_list *list = gr_option_value(options, limits[i]);
                int count = list->device_mask ? count_gpus(sim_dir) : 0;

                for (int gpu = count; count > 0 && gpu < GR_SIZE_DEVICES_MAX; gpu++)
                        if (list->device_mask >> gpu & 1) {
                                complain("%s: %s: there is no GPU %d, as the program would see %d; not started, as a "
                                         "limit would not hold",
                                         command, gr_option_table[limits[i]].env, gpu, count);
                                return STATUS_USAGE;
                        }
        }
        return EXIT_SUCCESS;
}

/*
 * All processes of the program share one simulated device. Its file has no name, and lasts as long as this process,
 * which becomes the program. A high number, as shells let their scripts use the low ones.
 */
static void share_sim(void)
{
        char path[64];
        int fd = getenv("GRSIM_SHARED") ? -1 : memfd_create("gpureclaim-sim", MFD_CLOEXEC), high;

        if (fd < 0)
                return;
        high = fcntl(fd, F_DUPFD, SIM_FD);
        close(fd);
        snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)getpid(), high);
        if (high >= 0)
                setenv("GRSIM_SHARED", path, 1);
}

int set_preload(const struct arguments *arguments)
{
        const char *command = arguments->command;
        char library[PATH_MAX], sim_dir[PATH_MAX], python_dir[PATH_MAX];
        static struct gr_options options;
        const char *config_variable = gr_option_table[GR_OPTION_CONFIG].env, *config = getenv(config_variable);
        char config_path[PATH_MAX];
        int status = check_limits(command, &options);

        if (status != EXIT_SUCCESS)
                return status;
        /* The program may change its working directory before it reads the file. */
        if (config && *config && realpath(config, config_path))
                setenv(config_variable, config_path, 1);
        if (find_library(library, sizeof(library)) < 0) {
                complain("%s: libgpureclaim.so is neither beside this program nor in %s", command, GR_LIBDIR);
                return STATUS_NO_LIBRARY;
        }
        status = prepare_variable(command, "LD_PRELOAD", library);
        if (status != EXIT_SUCCESS)
                return status;
        if (options.python && find_python_dir(python_dir, sizeof(python_dir)) == 0)
                prepend_environment("PYTHONPATH", python_dir); /* or, with a blank in it, Python has its caches alone */
        say_if_not_loadable(command, arguments->rest[0]);
        if (!flag_value(arguments, "sim"))
                return check_gpus(command, &options, NULL);
        if (find_sim_dir(sim_dir, sizeof(sim_dir)) < 0) {
                complain("%s: the simulated device is neither beside this program nor in %s/gpureclaim/sim", command,
                         GR_LIBDIR);
                return STATUS_NO_LIBRARY;
        }
        if (!getenv("GRSIM_DEVICES")) /* one GPU, whichever of the real ones the program may see */
                unsetenv("CUDA_VISIBLE_DEVICES");
        status = check_gpus(command, &options, sim_dir);
        if (status != EXIT_SUCCESS)
                return status;
        share_sim();
        return prepare_variable(command, "LD_LIBRARY_PATH", sim_dir);
}

/* What the program is started with. The library adds that it is active, at the first use of CUDA. */
static void say_settings(void)
{
        static struct gr_options options;
        static const char *const variables[] = {"LD_PRELOAD", "PYTHONPATH", "LD_LIBRARY_PATH"};
        char text[GR_OPTION_TEXT_BYTES];

        gr_options_read(&options, NULL, NULL);
        for (size_t i = 0; i < sizeof(variables) / sizeof(variables[0]); i++)
                if (getenv(variables[i]))
                        complain("run: %s=%s", variables[i], getenv(variables[i]));
        for (enum gr_option_id id = 0; id < GR_OPTION_COUNT; id++)
                if (options.source[id] != GR_FROM_DEFAULT)
                        complain("run: %s=%s (%s)", gr_option_table[id].env,
                                 gr_option_format(&options, id, text, sizeof(text)),
                                 gr_options_source_words[options.source[id]]);
        if (options.log < GR_LOG_INFO)
                setenv(gr_option_table[GR_OPTION_LOG].env, "info", 1);
}

int command_run(const struct arguments *arguments)
{
        int status = set_variables(arguments);

        if (status == EXIT_SUCCESS)
                status = set_preload(arguments);
        if (status == EXIT_SUCCESS && flag_value(arguments, "verbose"))
                say_settings();
        return status == EXIT_SUCCESS ? become("run", arguments->rest) : status;
}
