#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/options.h"
#include "command.h"

#define LINE_WIDTH 96

static const char *argument_name(const struct gr_option *option, char *buf, size_t buf_bytes)
{
        switch (option->kind) {
        case GR_KIND_SIZES:
                return "SIZE";
        case GR_KIND_ENUM:
                return gr_option_values(option, buf, buf_bytes);
        case GR_KIND_BOOL:
                return NULL;
        case GR_KIND_PATH:
                return "FILE";
        case GR_KIND_NAME:
                return "NAME";
        case GR_KIND_INT:
                return "NUMBER";
        case GR_KIND_DURATION:
                return "TIME";
        }
        return NULL;
}

static void print_wrapped(FILE *out, const char *text)
{
        size_t column = 0, word;

        while (*text) {
                word = strcspn(text, " ");
                if (column == 0 || column + 1 + word > LINE_WIDTH) {
                        fprintf(out, "%s      ", column > 0 ? "\n" : "");
                        column = 6;
                } else {
                        fputc(' ', out);
                        column++;
                }
                fprintf(out, "%.*s", (int)word, text);
                column += word;
                text += word + strspn(text + word, " ");
        }
        fputc('\n', out);
}

void run_print_flags(FILE *out)
{
        const char *argument, *group = "";
        char words[128], values[128];
        size_t i;

        fprintf(out, "\nFlags, each for one variable of the environment\n");
        for (i = 0; i < GR_OPTION_COUNT; i++) {
                const struct gr_option *option = &gr_option_table[i];

                if (!option->flag)
                        continue;
                if (strcmp(group, option->group) != 0)
                        fprintf(out, "\n%c%s:\n", option->group[0] - 'a' + 'A', option->group + 1);
                group = option->group;
                argument = argument_name(option, words, sizeof(words));
                fprintf(out, "  %s%s%s  (%s)\n", option->flag, argument ? " " : "", argument ? argument : "",
                        option->env);
                print_wrapped(out, option->help);
                if (option->kind == GR_KIND_SIZES || option->kind == GR_KIND_INT || option->kind == GR_KIND_DURATION)
                        fprintf(out, "      Value: %s.\n", gr_option_values(option, values, sizeof(values)));
        }
        fprintf(out, "\nDevice:\n  --sim\n");
        print_wrapped(out, "Run on the simulated device, without a GPU.");
}

static int unknown_run_flag(const char *flag)
{
        const char *known[GR_OPTION_COUNT + 2] = {"--sim", "--help"};
        size_t i;

        for (i = 0; i < GR_OPTION_COUNT; i++)
                known[i + 2] = gr_option_table[i].flag;
        return unknown_flag("run", flag, known, GR_OPTION_COUNT + 2);
}

static const struct gr_option *find_flag(const char *argument)
{
        const size_t length = strcspn(argument, "=");
        size_t i;

        for (i = 0; i < GR_OPTION_COUNT; i++) {
                const char *flag = gr_option_table[i].flag;

                if (flag && strlen(flag) == length && memcmp(flag, argument, length) == 0)
                        return &gr_option_table[i];
        }
        return NULL;
}

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

/* Sets the variable of the flag at argv[*index], which ends up at the last argument used. */
static int take_flag(char **argv, int *index)
{
        const struct gr_option *option = find_flag(argv[*index]);
        const char *value;
        int status;

        if (!option)
                return unknown_run_flag(argv[*index]);
        value = strchr(argv[*index], '=');
        if (value) {
                value++;
        } else if (option->kind == GR_KIND_BOOL) {
                value = "1";
        } else {
                value = argv[*index + 1];
                /* A negative number is a bad value rather than a missing one. */
                if (!value || strncmp(value, "--", 2) == 0) {
                        complain("run: %s needs a value", option->flag);
                        return STATUS_USAGE;
                }
                ++*index;
        }
        status = check_value(option, value);
        if (status == EXIT_SUCCESS && setenv(option->env, value, 1) != 0) {
                complain("run: %s: %s", option->env, strerror(errno));
                status = EXIT_FAILURE;
        }
        return status;
}

static int prepare(const char *variable, const char *path)
{
        int rc = prepend_environment(variable, path);

        if (rc == 0)
                return EXIT_SUCCESS;
        if (rc == -EINVAL)
                complain("run: %s has a blank or colon in it, which %s cannot express", path, variable);
        else
                complain("run: %s: %s", variable, strerror(-rc));
        return STATUS_NO_LIBRARY;
}

static int become(char **argv)
{
        int error;

        execvp(argv[0], argv);
        error = errno;
        complain("run: %s: %s", argv[0], strerror(error));
        return error == ENOENT ? STATUS_NOT_FOUND : STATUS_NOT_EXECUTABLE;
}

int command_run(int argc, char **argv)
{
        char library[PATH_MAX], sim_dir[PATH_MAX];
        bool sim = false;
        int i, status;

        for (i = 1; i < argc && argv[i][0] == '-'; i++) {
                if (strcmp(argv[i], "--") == 0) {
                        i++;
                        break;
                }
                if (help_wanted("run", argv[i]))
                        return EXIT_SUCCESS;
                if (strcmp(argv[i], "--sim") == 0) {
                        sim = true;
                        continue;
                }
                status = take_flag(argv, &i);
                if (status != EXIT_SUCCESS)
                        return status;
        }
        if (i >= argc) {
                complain("run: no program given; gpureclaim run [flags] -- PROGRAM [ARGUMENT...]");
                return STATUS_USAGE;
        }
        if (find_library(library, sizeof(library)) < 0) {
                complain("run: libgpureclaim.so is neither beside this program nor in %s", GR_LIBDIR);
                return STATUS_NO_LIBRARY;
        }
        status = prepare("LD_PRELOAD", library);
        if (status == EXIT_SUCCESS && sim) {
                if (find_sim_dir(sim_dir, sizeof(sim_dir)) < 0) {
                        complain("run: the simulated device is neither beside this program nor in %s/gpureclaim/sim",
                                 GR_LIBDIR);
                        return STATUS_NO_LIBRARY;
                }
                status = prepare("LD_LIBRARY_PATH", sim_dir);
        }
        return status == EXIT_SUCCESS ? become(argv + i) : status;
}
