#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/options.h"
#include "command.h"

static const char *get(const char *name)
{
        return getenv(name);
}

static void warn(const char *message, void *arg)
{
        (void)arg;
        complain("%s", message);
}

static void print_line(const char *text, void *arg)
{
        (void)arg;
        puts(text);
}

/* A bar would end the cell, in code too. */
static void print_cell(const char *text)
{
        for (; *text; text++)
                printf(*text == '|' ? "\\|" : "%c", *text);
}

static void print_markdown(void)
{
        char values[128];
        size_t i;

        printf("| Variable | Flag of `gpureclaim run` | Values | Default | Meaning |\n"
               "| --- | --- | --- | --- | --- |\n");
        for (i = 0; i < GR_OPTION_COUNT; i++) {
                const struct gr_option *option = &gr_option_table[i];

                printf("| `%s` | ", option->env);
                if (option->flag)
                        printf("`%s`", option->flag);
                printf(" | ");
                print_cell(gr_option_values(option, values, sizeof(values)));
                printf(" | %s | ", option->default_text[0] ? option->default_text : "none");
                print_cell(option->help);
                printf(" |\n");
        }
}

void print_json_string(const char *text)
{
        putchar('"');
        for (; *text; text++) {
                if (*text == '"' || *text == '\\')
                        printf("\\%c", *text);
                else if ((unsigned char)*text < ' ')
                        printf("\\u%04x", (unsigned char)*text);
                else
                        putchar(*text);
        }
        putchar('"');
}

static void print_json_size(const struct gr_size *size)
{
        char text[GR_SIZE_TEXT_BYTES];

        if (size->is_percent) {
                gr_size_format_entry(size, text, sizeof(text));
                text[strcspn(text, "%")] = '\0';
                printf("{\"percent\": %s}", text);
        } else if (size->bytes == GR_SIZE_NONE) {
                printf("null");
        } else {
                printf("{\"bytes\": %llu}", (unsigned long long)size->bytes);
        }
}

static void print_json_sizes(const struct gr_size_list *list)
{
        const char *separator = "";
        int device;

        printf("{\"all\": ");
        print_json_size(&list->all);
        printf(", \"devices\": {");
        for (device = 0; device < GR_SIZE_DEVICES_MAX; device++) {
                if (!(list->device_mask & (1ull << device)))
                        continue;
                printf("%s\"%d\": ", separator, device);
                print_json_size(&list->devices[device]);
                separator = ", ";
        }
        printf("}}");
}

static void print_json_value(enum gr_option_id id, const void *value)
{
        const struct gr_option *option = &gr_option_table[id];

        switch (option->kind) {
        case GR_KIND_SIZES:
                print_json_sizes(value);
                break;
        case GR_KIND_ENUM:
                print_json_string(option->words[*(const int *)value]);
                break;
        case GR_KIND_BOOL:
                printf("%s", *(const bool *)value ? "true" : "false");
                break;
        case GR_KIND_PATH:
        case GR_KIND_NAME:
                if (*(const char *)value)
                        print_json_string(value);
                else
                        printf("null");
                break;
        case GR_KIND_INT:
                printf("%lld", (long long)*(const int64_t *)value);
                break;
        case GR_KIND_DURATION:
                printf("{\"ns\": %llu}", (unsigned long long)*(const uint64_t *)value);
                break;
        }
}

static void print_json(const struct gr_options *options)
{
        enum gr_option_id id;

        printf("{\n  \"schema\": 1,\n  \"options\": {");
        for (id = 0; id < GR_OPTION_COUNT; id++) {
                printf("%s\n    \"%s\": {\"variable\": \"%s\", \"source\": \"%s\", \"value\": ", id > 0 ? "," : "",
                       gr_option_table[id].name, gr_option_table[id].env,
                       options->from_env[id] ? "environment" : "default");
                print_json_value(id, gr_option_value(options, id));
                putchar('}');
        }
        printf("\n  }\n}\n");
}

int command_options(int argc, char **argv)
{
        static const char *const known[] = {"--markdown", "--json", "--help"};
        static struct gr_options options;
        bool markdown = false, json = false;
        int i;

        for (i = 1; i < argc; i++) {
                if (help_wanted("options", argv[i]))
                        return EXIT_SUCCESS;
                if (strcmp(argv[i], "--markdown") == 0) {
                        markdown = true;
                } else if (strcmp(argv[i], "--json") == 0) {
                        json = true;
                } else if (argv[i][0] == '-') {
                        return unknown_flag("options", argv[i], known, sizeof(known) / sizeof(known[0]));
                } else {
                        complain("options: %s: takes flags only", argv[i]);
                        return STATUS_USAGE;
                }
        }
        if (markdown && json) {
                complain("options: --markdown and --json exclude each other");
                return STATUS_USAGE;
        }
        if (markdown) {
                print_markdown();
                return EXIT_SUCCESS;
        }
        gr_options_load(&options, get, environ, warn, NULL);
        if (json)
                print_json(&options);
        else
                gr_options_dump(&options, print_line, NULL);
        return EXIT_SUCCESS;
}
