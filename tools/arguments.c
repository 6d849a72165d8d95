/* The arguments of a subcommand: read by getopt_long from the one table of flags, which the help shows as well. */
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "base/options.h"
#include "command.h"

#define LINE_WIDTH 96

static const struct flag {
        const char *command, *name, *value, *help;
} flags[] = {
#define COMMAND(...)
#define FLAG(command, name, value, help) {#command, name, value, help},
#include "commands.def"
#undef FLAG
#undef COMMAND
};

#define FLAGS (sizeof(flags) / sizeof(flags[0]))

_Static_assert(FLAGS + GR_OPTION_COUNT <= GR_FLAGS_MOST, "struct arguments has room for all flags");

/*
 * What getopt_long returns for --help, for flag i of the table or of the options, and for its --no-: above all
 * characters.
 */
#define HELP       256
#define PLACE(i)   (HELP + 1 + (int)(i))
#define NEGATED(i) (PLACE(GR_FLAGS_MOST) + (int)(i))
#define MOST_KNOWN (2 * GR_FLAGS_MOST + 2) /* --help, each flag and its --no-, and the end */

/* Adds flag i, and --no-NAME where it is a switch. Returns how many were added. */
static size_t add_flag(struct option *ret, const char *name, int takes, size_t i)
{
        static char negated[GR_FLAGS_MOST][40];

        ret[0] = (struct option){name, takes, NULL, PLACE(i)};
        if (takes == required_argument)
                return 1;
        snprintf(negated[i], sizeof(negated[i]), "no-%s", name);
        ret[1] = (struct option){negated[i], no_argument, NULL, NEGATED(i)};
        return 2;
}

/* Fills ret, ended by zeroes, with what a command takes. Returns how many. */
static size_t list_flags(const char *command, bool hidden, struct option ret[MOST_KNOWN])
{
        size_t count = 0;

        ret[count++] = (struct option){"help", no_argument, NULL, HELP};
        for (size_t i = 0; i < FLAGS; i++)
                if (strcmp(flags[i].command, command) == 0 && (hidden || flags[i].help))
                        count += add_flag(ret + count, flags[i].name, flags[i].value ? required_argument : no_argument,
                                          i);
        for (size_t i = 0; strcmp(command, "run") == 0 && i < GR_OPTION_COUNT; i++) {
                const struct gr_option *option = &gr_option_table[i];

                if (option->flag)
                        count += add_flag(ret + count, option->flag + 2,
                                          option->kind == GR_KIND_BOOL ? optional_argument : required_argument,
                                          FLAGS + i);
        }
        ret[count] = (struct option){0};
        return count;
}

static int unknown_flag(const char *command, const char *flag)
{
        struct option known[MOST_KNOWN];
        const char *names[MOST_KNOWN], *nearest;
        size_t count = list_flags(command, false, known), length;
        char name[64], possible[256] = "";

        for (size_t i = 0; i < count; i++)
                names[i] = known[i].name;
        snprintf(name, sizeof(name), "%.*s", (int)strcspn(flag, "="), flag);
        length = strlen(name);
        for (size_t i = 0; length > 2 && i < count; i++)
                if (strncmp(name + 2, known[i].name, length - 2) == 0)
                        snprintf(possible + strlen(possible), sizeof(possible) - strlen(possible), "%s--%s",
                                 *possible ? ", " : "", known[i].name);
        nearest = gr_options_nearest(name + strspn(name, "-"), names, count);
        if (*possible)
                complain("%s: unknown flag %s; it could be one of %s", command, name, possible);
        else if (nearest)
                complain("%s: unknown flag %s; did you mean --%s?", command, name, nearest);
        else
                complain("%s: unknown flag %s; see gpureclaim help %s", command, name, command);
        return STATUS_USAGE;
}

static int missing_value(const char *command, const struct option *known, int place)
{
        while (known->val != place)
                known++;
        complain("%s: --%s needs a value", command, known->name);
        return STATUS_USAGE;
}

/* The place of the flag that -o stands for; 0: the command has none. */
static int place_of_o(const char *command)
{
        for (size_t i = 0; i < FLAGS; i++)
                if (strcmp(flags[i].command, command) == 0 && strcmp(flags[i].name, "output") == 0)
                        return PLACE(i);
        return 0;
}

int read_arguments(const char *command, enum rest rest, int argc, char **argv, struct arguments *ret)
{
        struct option known[MOST_KNOWN];
        int place, o = place_of_o(command);
        /* Where a program follows the flags, all words from the first one that is no flag are the program's ("+"). */
        const char *letters = (o ? "+:ho:" : "+:h") + (rest != REST_PROGRAM);

        *ret = (struct arguments){.command = command};
        list_flags(command, true, known);
        opterr = 0;
        while ((place = getopt_long(argc, argv, letters, known, NULL)) != -1) {
                if (place == 'h' || place == HELP)
                        return HELP_WANTED;
                if (place == ':')
                        return missing_value(command, known, optopt == 'o' ? o : optopt);
                if (place == 'o')
                        place = o;
                if (place == '?' && optopt >= HELP) {
                        complain("%s: %s: takes no value", command, argv[optind - 1]);
                        return STATUS_USAGE;
                }
                if (place == '?' && optopt) {
                        const char letter[] = {'-', (char)optopt, '\0'};

                        return unknown_flag(command, letter);
                }
                if (place == '?')
                        return unknown_flag(command, argv[optind - 1]);
                /* A negative number is a bad value rather than a missing one. */
                if (optarg && strncmp(optarg, "--", 2) == 0 && optarg == argv[optind - 1])
                        return missing_value(command, known, place);
                if (place >= NEGATED(0)) /* an option of the library is set to 0, a flag of the command is not given */
                        ret->values[place - NEGATED(0)] = place - NEGATED(0) >= (int)FLAGS ? "0" : NULL;
                else
                        ret->values[place - PLACE(0)] = optarg ? optarg : "1";
        }
        ret->rest = argv + optind;
        ret->count = argc - optind;
        if (rest == REST_NOTHING && ret->count > 0) {
                complain("%s: %s: takes flags only", command, ret->rest[0]);
                return STATUS_USAGE;
        }
        if (rest == REST_PROGRAM && ret->count == 0) {
                complain("%s: no program given; see gpureclaim help %s", command, command);
                return STATUS_USAGE;
        }
        return EXIT_SUCCESS;
}

const char *flag_value(const struct arguments *arguments, const char *name)
{
        for (size_t i = 0; i < FLAGS; i++)
                if (strcmp(flags[i].command, arguments->command) == 0 && strcmp(flags[i].name, name) == 0)
                        return arguments->values[i];
        return NULL;
}

const char *option_value(const struct arguments *arguments, enum gr_option_id id)
{
        return arguments->values[FLAGS + id];
}

void print_wrapped(int indent, const char *text)
{
        size_t column = 0, word;

        while (*text) {
                word = strcspn(text, " ");
                if (column == 0 || column + 1 + word > LINE_WIDTH) {
                        printf("%s%*s", column > 0 ? "\n" : "", indent, "");
                        column = (size_t)indent;
                } else {
                        putchar(' ');
                        column++;
                }
                printf("%.*s", (int)word, text);
                column += word;
                text += word + strspn(text + word, " ");
        }
        putchar('\n');
}

static void print_flag(const char *name, const char *value, const char *help)
{
        char flag[64];

        snprintf(flag, sizeof(flag), "--%s%s%s", name, value ? " " : "", value ? value : "");
        printf("  %-16s  %s\n", flag, help);
}

static const char *value_name(const struct gr_option *option, char *buf, size_t buf_bytes)
{
        switch (option->kind) {
        case GR_KIND_SIZES:
        case GR_KIND_SIZE:
                return " SIZE";
        case GR_KIND_ENUM:
                buf[0] = ' ';
                gr_option_values(option, buf + 1, buf_bytes - 1);
                return buf;
        case GR_KIND_BOOL:
                return "[=0|1]";
        case GR_KIND_PATH:
                return " FILE";
        case GR_KIND_NAME:
                return " NAME";
        case GR_KIND_INT:
                return " NUMBER";
        case GR_KIND_BYTE:
                return " BYTE";
        case GR_KIND_DURATION:
                return " TIME";
        }
        return "";
}

static void print_group(const char *group)
{
        char title[32];

        snprintf(title, sizeof(title), "%c%s:", group[0] - 'a' + 'A', group + 1);
        printf("\n%s\n", heading(title));
}

static void print_options(void)
{
        const char *group = "";
        char values[128];

        printf("\n%s\n", heading("Flags that set an option, with its variable; --no-NAME is --NAME=0:"));
        for (size_t i = 0; i < GR_OPTION_COUNT; i++) {
                const struct gr_option *option = &gr_option_table[i];

                if (!option->flag)
                        continue;
                if (strcmp(group, option->group) != 0)
                        print_group(option->group);
                group = option->group;
                printf("  %s%s  (%s)\n", option->flag, value_name(option, values, sizeof(values)), option->env);
                print_wrapped(6, option->help);
                if (option->kind == GR_KIND_SIZES || option->kind == GR_KIND_SIZE || option->kind == GR_KIND_INT ||
                    option->kind == GR_KIND_BYTE || option->kind == GR_KIND_DURATION)
                        printf("      Value: %s.\n", gr_option_values(option, values, sizeof(values)));
                printf("      Default: %s.\n", option->default_text[0] ? option->default_text : "none");
        }
}

void print_flags(const char *command)
{
        printf("\n%s\n", heading("Flags:"));
        for (size_t i = 0; i < FLAGS; i++)
                if (strcmp(flags[i].command, command) == 0 && flags[i].help)
                        print_flag(flags[i].name, flags[i].value, flags[i].help);
        print_flag("help", NULL, "print this text");
        if (strcmp(command, "run") == 0)
                print_options();
}
