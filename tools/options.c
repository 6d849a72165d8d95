/* gpureclaim options: the configuration that the environment gives, and the table of all options. */
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/options.h"
#include "command.h"
#include "gpus.h"
#include "system/options_file.h"

static void print_line(const char *text, void *arg)
{
        (void)arg;
        puts(text);
}

/* Escapes '|', which would end the cell of the table, even inside of code. */
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

static void print_config(void)
{
        char values[128];

        printf("# Options of gpureclaim, for GPURECLAIM_CONFIG or ~/.config/gpureclaim/config. A variable of the same\n"
               "# name comes first. Take away the # in front of what you set.\n");
        for (enum gr_option_id id = 0; id < GR_OPTION_COUNT; id++) {
                const struct gr_option *option = &gr_option_table[id];

                if (id != GR_OPTION_CONFIG)
                        printf("\n# %s\n# Values: %s.\n#%s=%s\n", option->help,
                               gr_option_values(option, values, sizeof(values)), option->env, option->default_text);
        }
}

static void write_size(struct gr_json *json, const char *name, const struct gr_size *size)
{
        char text[GR_SIZE_TEXT_BYTES];

        if (!size->is_percent && size->bytes == GR_SIZE_NONE) {
                gr_json_null(json, name);
                return;
        }
        gr_json_object(json, name);
        if (size->is_percent) {
                gr_size_format_entry(size, text, sizeof(text));
                gr_json_number(json, "percent", "%.*s", (int)strcspn(text, "%"), text);
        } else {
                gr_json_bytes(json, "bytes", size->bytes);
        }
        gr_json_close(json);
}

static void write_sizes(struct gr_json *json, const struct gr_size_list *list)
{
        char number[16];

        gr_json_object(json, "value");
        write_size(json, "all", &list->all);
        gr_json_object(json, "devices");
        for (int device = 0; device < GR_SIZE_DEVICES_MAX; device++) {
                if (!(list->device_mask & (1ull << device)))
                        continue;
                snprintf(number, sizeof(number), "%d", device);
                write_size(json, number, &list->devices[device]);
        }
        gr_json_close(json);
        gr_json_close(json);
}

static void write_value(struct gr_json *json, const struct gr_option *option, const void *value)
{
        switch (option->kind) {
        case GR_KIND_SIZES:
        case GR_KIND_SIZE:
                write_sizes(json, value);
                break;
        case GR_KIND_ENUM:
                gr_json_string(json, "value", option->words[*(const int *)value]);
                break;
        case GR_KIND_BOOL:
                gr_json_bool(json, "value", *(const bool *)value);
                break;
        case GR_KIND_PATH:
        case GR_KIND_NAME:
                if (*(const char *)value)
                        gr_json_string(json, "value", value);
                else
                        gr_json_null(json, "value");
                break;
        case GR_KIND_BYTE:
                if (*(const int64_t *)value == GR_BYTE_NONE)
                        gr_json_null(json, "value");
                else
                        gr_json_number(json, "value", "%lld", (long long)*(const int64_t *)value);
                break;
        case GR_KIND_INT:
                gr_json_number(json, "value", "%lld", (long long)*(const int64_t *)value);
                break;
        case GR_KIND_DURATION:
                if (gr_option_word(option, *(const uint64_t *)value)) {
                        gr_json_string(json, "value", gr_option_word(option, *(const uint64_t *)value));
                        break;
                }
                gr_json_object(json, "value");
                gr_json_count(json, "ns", *(const uint64_t *)value);
                gr_json_close(json);
                break;
        }
}

static void print_json(const struct gr_options *options)
{
        struct gr_json json;

        gr_json_begin(&json, gr_sink_file, stdout, 2);
        gr_json_object(&json, NULL);
        gr_json_number(&json, "schema", "1");
        gr_json_object(&json, "options");
        for (enum gr_option_id id = 0; id < GR_OPTION_COUNT; id++) {
                gr_json_object(&json, gr_option_table[id].name);
                gr_json_string(&json, "variable", gr_option_table[id].env);
                gr_json_string(&json, "source", gr_options_source_words[options->source[id]]);
                write_value(&json, &gr_option_table[id], gr_option_value(options, id));
                gr_json_close(&json);
        }
        gr_json_close(&json);
        gr_json_close(&json);
        gr_json_end(&json);
}

int command_options(const struct arguments *arguments)
{
        static struct gr_options options;

        if (!!flag_value(arguments, "markdown") + !!flag_value(arguments, "json") + !!flag_value(arguments, "config") >
            1) {
                complain("options: --config, --json and --markdown exclude each other");
                return STATUS_USAGE;
        }
        if (flag_value(arguments, "config")) {
                print_config();
                return EXIT_SUCCESS;
        }
        if (flag_value(arguments, "markdown")) {
                print_markdown();
                return EXIT_SUCCESS;
        }
        gr_options_read(&options, complain_of_option, NULL);
        if (flag_value(arguments, "json"))
                print_json(&options);
        else {
                gpus_folder(options.region_dir.text,
                            &(bool){0}); /* unless set, where it is by default, if it is there */
                gr_options_dump(&options, print_line, NULL);
                printf("What each means, and its flag: gpureclaim help run\n");
        }
        return EXIT_SUCCESS;
}
