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

/* What getopt_long returns for --help, and for flag i of the table or of the options: above all characters. */
#define HELP     256
#define PLACE(i) (HELP + 1 + (int)(i))

/* Fills ret, ended by zeroes, with what a command takes. Returns how many. */
static size_t list_flags(const char *command, bool hidden, struct option ret[GR_FLAGS_MOST + 2])
{
        size_t count = 0;

        ret[count++] = (struct option){"help", no_argument, NULL, HELP};
        for (size_t i = 0; i < FLAGS; i++)
                if (strcmp(flags[i].command, command) == 0 && (hidden || flags[i].help))
                        ret[count++] = (struct option){flags[i].name, flags[i].value ? required_argument : no_argument,
                                                       NULL, PLACE(i)};
        for (size_t i = 0; strcmp(command, "run") == 0 && i < GR_OPTION_COUNT; i++) {
                const struct gr_option *option = &gr_option_table[i];

                if (option->flag)
                        ret[count++] = (struct option){
                                option->flag + 2, option->kind == GR_KIND_BOOL ? optional_argument : required_argument,
                                NULL, PLACE(FLAGS + i)};
        }
        ret[count] = (struct option){0};
        return count;
}

static int unknown_flag(const char *command, const char *flag)
{
        struct option known[GR_FLAGS_MOST + 2];
        const char *names[GR_FLAGS_MOST + 2], *nearest;
        size_t count = list_flags(command, false, known);
        char name[64];

        for (size_t i = 0; i < count; i++)
                names[i] = known[i].name;
        snprintf(name, sizeof(name), "%.*s", (int)strcspn(flag, "="), flag);
        nearest = gr_options_nearest(name + strspn(name, "-"), names, count);
        if (nearest)
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
        struct option known[GR_FLAGS_MOST + 2];
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

static void print_wrapped(const char *text)
{
        size_t column = 0, word;

        while (*text) {
                word = strcspn(text, " ");
                if (column == 0 || column + 1 + word > LINE_WIDTH) {
                        printf("%s      ", column > 0 ? "\n" : "");
                        column = 6;
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

static void print_options(void)
{
        const char *group = "";
        char values[128];

        printf("\nFlags that set an option, with its variable of the environment:\n");
        for (size_t i = 0; i < GR_OPTION_COUNT; i++) {
                const struct gr_option *option = &gr_option_table[i];

                if (!option->flag)
                        continue;
                if (strcmp(group, option->group) != 0)
                        printf("\n%c%s:\n", option->group[0] - 'a' + 'A', option->group + 1);
                group = option->group;
                printf("  %s%s  (%s)\n", option->flag, value_name(option, values, sizeof(values)), option->env);
                print_wrapped(option->help);
                if (option->kind == GR_KIND_SIZES || option->kind == GR_KIND_SIZE || option->kind == GR_KIND_INT ||
                    option->kind == GR_KIND_BYTE || option->kind == GR_KIND_DURATION)
                        printf("      Value: %s.\n", gr_option_values(option, values, sizeof(values)));
                printf("      Default: %s.\n", option->default_text[0] ? option->default_text : "none");
        }
}

void print_flags(const char *command)
{
        printf("\nFlags:\n");
        for (size_t i = 0; i < FLAGS; i++)
                if (strcmp(flags[i].command, command) == 0 && flags[i].help)
                        print_flag(flags[i].name, flags[i].value, flags[i].help);
        print_flag("help", NULL, "print this text");
        if (strcmp(command, "run") == 0)
                print_options();
}
