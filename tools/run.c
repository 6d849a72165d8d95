/* gpureclaim run: start a program with the library preloaded. */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/options.h"
#include "command.h"
#include "paths.h"

/* Any field of struct gr_options: values are only checked here, the library parses them for itself. */
static int check_value(const struct gr_option *option, const char *text)
{
        static struct gr_options scratch;
        char values[128];
        int rc;

        rc = gr_option_parse(option, text, (char *)&scratch + option->offset);
        if (rc == 0)
                return EXIT_SUCCESS;
        complain("run: %s %s: %s (expected %s)", option->flag, text, gr_option_reason(rc),
                 gr_option_values(option, values, sizeof(values)));
        return STATUS_USAGE;
}

/* Sets the variables of the options that are given as flags. */
static int set_variables(const struct arguments *arguments)
{
        for (enum gr_option_id id = 0; id < GR_OPTION_COUNT; id++) {
                const char *value = option_value(arguments, id);
                int status;

                if (!value)
                        continue;
                status = check_value(&gr_option_table[id], value);
                if (status != EXIT_SUCCESS)
                        return status;
                if (setenv(gr_option_table[id].env, value, 1) != 0) {
                        complain("run: %s: %s", gr_option_table[id].env, strerror(errno));
                        return EXIT_FAILURE;
                }
        }
        return EXIT_SUCCESS;
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

int set_preload(const struct arguments *arguments)
{
        const char *command = arguments->command;
        char library[PATH_MAX], sim_dir[PATH_MAX];
        int status;

        if (find_library(library, sizeof(library)) < 0) {
                complain("%s: libgpureclaim.so is neither beside this program nor in %s", command, GR_LIBDIR);
                return STATUS_NO_LIBRARY;
        }
        status = prepare_variable(command, "LD_PRELOAD", library);
        if (status != EXIT_SUCCESS || !flag_value(arguments, "sim"))
                return status;
        if (find_sim_dir(sim_dir, sizeof(sim_dir)) < 0) {
                complain("%s: the simulated device is neither beside this program nor in %s/gpureclaim/sim", command,
                         GR_LIBDIR);
                return STATUS_NO_LIBRARY;
        }
        return prepare_variable(command, "LD_LIBRARY_PATH", sim_dir);
}

int command_run(const struct arguments *arguments)
{
        int status = set_variables(arguments);

        if (status == EXIT_SUCCESS)
                status = set_preload(arguments);
        return status == EXIT_SUCCESS ? become("run", arguments->rest) : status;
}
