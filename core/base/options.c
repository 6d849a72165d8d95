#include "base/options.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define WORD(id, word) word,
const char *const gr_options_reuse_words[] = {GR_REUSE_MODES(WORD) NULL};
const char *const gr_options_pool_words[] = {GR_POOL_KINDS(WORD) NULL};
const char *const gr_options_graph_arena_words[] = {GR_GRAPH_ARENAS(WORD) NULL};
const char *const gr_options_sleep_words[] = {GR_SLEEP_MODES(WORD) NULL};
const char *const gr_options_turn_words[] = {"off", NULL};
const char *const gr_options_backtrace_words[] = {GR_BACKTRACE_MODES(WORD) NULL};
const char *const gr_options_limit_includes_words[] = {GR_LIMIT_INCLUDES(WORD) NULL};
const char *const gr_options_source_words[] = {GR_OPTION_SOURCES(WORD) NULL};
#undef WORD

/* Enums are stored through an int of their size. */
_Static_assert(sizeof(enum gr_reuse) == sizeof(int), "enum options must have the size of int");

const struct gr_option gr_option_table[GR_OPTION_COUNT] = {
#define GR_OPTION(id, field_, ctype, ...)                                                                              \
        [GR_OPTION_##id] = {                                                                                           \
                .name = #field_,                                                                                       \
                .env = GR_OPTIONS_PREFIX #id,                                                                          \
                .offset = offsetof(struct gr_options, field_),                                                         \
                __VA_ARGS__,                                                                                           \
        },
#include "base/options.def"
#undef GR_OPTION
};

#define WARNING_BYTES    512
#define VALUE_SHOWN      64
#define PATH_SHOWN       200
#define NEAREST_MAX      63 /* for longer texts no suggestion is sought */
#define NEAREST_MIN_PART 4  /* a part of a word that both have counts from so many characters on */

static bool same_word(const char *a, const char *b)
{
        for (; *a && gr_lower(*a) == gr_lower(*b); a++, b++)
                ;
        return *a == *b;
}

static int enum_parse(const char *const *words, const char *text, int *ret)
{
        int i;

        for (i = 0; words[i]; i++) {
                if (same_word(words[i], text)) {
                        *ret = i;
                        return 0;
                }
        }
        return -EINVAL;
}

static int bool_parse(const char *text, bool *ret)
{
        static const char *const words[] = {"0", "1", "false", "true", "no", "yes", "off", "on", NULL};
        int i, rc;

        rc = enum_parse(words, text, &i);
        if (rc == 0)
                *ret = i % 2 != 0;
        return rc;
}

static int path_parse(const char *text, struct gr_path *ret)
{
        const size_t length = strlen(text);

        if (length >= sizeof(ret->text))
                return -ENAMETOOLONG;
        memcpy(ret->text, text, length + 1);
        return 0;
}

static int name_parse(const char *text, struct gr_name *ret)
{
        const size_t length = strlen(text);

        if (length == 0 || text[0] == '.' ||
            strspn(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-") != length)
                return -EINVAL;
        if (length >= sizeof(ret->text))
                return -ENAMETOOLONG;
        memcpy(ret->text, text, length + 1);
        return 0;
}

static int int_parse(const struct gr_option *option, const char *text, int64_t *ret)
{
        const bool negative = *text == '-';
        int64_t value = 0;

        text += negative;
        if (*text == '\0')
                return -EINVAL;
        for (; *text; text++) {
                if (*text < '0' || *text > '9')
                        return -EINVAL;
                /* The value is built as a negative number: INT64_MIN has no positive counterpart. */
                if (value < (INT64_MIN + (*text - '0')) / 10)
                        return -ERANGE;
                value = value * 10 - (*text - '0');
        }
        if (!negative && value == INT64_MIN)
                return -ERANGE;
        value = negative ? value : -value;
        if (value < option->min || value > option->max)
                return -ERANGE;
        *ret = value;
        return 0;
}

/* A byte as a decimal number, or after 0x as a hexadecimal one. */
static int byte_parse(const char *text, int64_t *ret)
{
        static const char digits[] = "0123456789abcdef";
        const bool hexadecimal = text[0] == '0' && gr_lower(text[1]) == 'x';
        const int base = hexadecimal ? 16 : 10;
        int64_t value = 0;

        if (enum_parse((const char *const[]){"none", NULL}, text, &(int){0}) == 0) {
                *ret = GR_BYTE_NONE;
                return 0;
        }
        text += hexadecimal ? 2 : 0;
        if (*text == '\0')
                return -EINVAL;
        for (; *text; text++) {
                const char *digit = strchr(digits, gr_lower(*text));

                if (!digit || digit - digits >= base)
                        return -EINVAL;
                value = value * base + (digit - digits);
                if (value > UINT8_MAX)
                        return -ERANGE;
        }
        *ret = value;
        return 0;
}

static int duration_parse(const struct gr_option *option, const char *text, uint64_t *ret)
{
        uint64_t ns;
        int rc, word;

        if (option->words && enum_parse(option->words, text, &word) == 0) {
                *ret = (uint64_t)word;
                return 0;
        }
        rc = gr_duration_parse(text, &ns);
        if (rc < 0)
                return rc;
        if (ns < (uint64_t)option->min || ns > (uint64_t)option->max)
                return -ERANGE;
        *ret = ns;
        return 0;
}

static bool size_in_range(const struct gr_option *option, const struct gr_size *size)
{
        if (size->is_percent)
                return size->percent > 0 || option->min <= 0;
        return size->bytes == GR_SIZE_NONE ||
               (size->bytes >= (uint64_t)option->min && size->bytes <= (uint64_t)option->max);
}

static int sizes_parse(const struct gr_option *option, const char *text, struct gr_size_list *ret)
{
        struct gr_size_list list;
        int device, rc;

        rc = gr_size_list_parse(text, &list);
        if (rc < 0)
                return rc;
        if (option->kind == GR_KIND_SIZE && list.device_mask)
                return -EINVAL;
        if (!size_in_range(option, &list.all))
                return -ERANGE;
        for (device = 0; device < GR_SIZE_DEVICES_MAX; device++)
                if (!size_in_range(option, gr_size_list_get(&list, device)))
                        return -ERANGE;
        *ret = list;
        return 0;
}

int gr_option_parse(const struct gr_option *option, const char *text, void *ret_value)
{
        switch (option->kind) {
        case GR_KIND_SIZES:
        case GR_KIND_SIZE:
                return sizes_parse(option, text, ret_value);
        case GR_KIND_ENUM:
                return enum_parse(option->words, text, ret_value);
        case GR_KIND_BOOL:
                return bool_parse(text, ret_value);
        case GR_KIND_PATH:
                return path_parse(text, ret_value);
        case GR_KIND_NAME:
                return name_parse(text, ret_value);
        case GR_KIND_INT:
                return int_parse(option, text, ret_value);
        case GR_KIND_BYTE:
                return byte_parse(text, ret_value);
        case GR_KIND_DURATION:
                return duration_parse(option, text, ret_value);
        }
        return -EINVAL;
}

const char *gr_option_word(const struct gr_option *option, uint64_t value)
{
        return option->words && value < (uint64_t)option->min ? option->words[value] : NULL;
}

static void *value_of(struct gr_options *options, enum gr_option_id id)
{
        return (char *)options + gr_option_table[id].offset;
}

const void *gr_option_value(const struct gr_options *options, enum gr_option_id id)
{
        return (const char *)options + gr_option_table[id].offset;
}

const char *gr_option_values(const struct gr_option *option, char *buf, size_t buf_bytes)
{
        char least[GR_SIZE_TEXT_BYTES], most[GR_SIZE_TEXT_BYTES];
        size_t used = 0, i;

        switch (option->kind) {
        case GR_KIND_SIZES:
        case GR_KIND_SIZE:
                snprintf(least, sizeof(least), "%s", option->min > 0 ? " above 0" : "");
                if (option->min > 1)
                        snprintf(least, sizeof(least), " from %lldMiB", (long long)option->min >> 20);
                snprintf(buf, buf_bytes, "size%s such as 4GiB, 512MB or 50%%%s or none", least,
                         option->kind == GR_KIND_SIZES ? "; per device 0=8GiB,1=25%;" : ",");
                break;
        case GR_KIND_ENUM:
                snprintf(buf, buf_bytes, "%s", "");
                for (i = 0; option->words[i] && used < buf_bytes; i++)
                        used += (size_t)snprintf(buf + used, buf_bytes - used, "%s%s", i > 0 ? "|" : "",
                                                 option->words[i]);
                break;
        case GR_KIND_BOOL:
                snprintf(buf, buf_bytes, "0|1");
                break;
        case GR_KIND_PATH:
                snprintf(buf, buf_bytes, "path");
                break;
        case GR_KIND_NAME:
                snprintf(buf, buf_bytes, "name of letters, digits, _, - and .");
                break;
        case GR_KIND_INT:
                snprintf(buf, buf_bytes, "%lld to %lld", (long long)option->min, (long long)option->max);
                break;
        case GR_KIND_BYTE:
                snprintf(buf, buf_bytes, "0 to 255, 0x00 to 0xff, or none");
                break;
        case GR_KIND_DURATION:
                if (option->min <= 0 && option->max == INT64_MAX)
                        snprintf(buf, buf_bytes, "time such as 10ms or 2s, or 0");
                else if (option->words)
                        snprintf(buf, buf_bytes, "time such as 90s or 10min, from %s, or %s%s%s",
                                 gr_duration_format((uint64_t)option->min, least, sizeof(least)), option->words[0],
                                 option->words[1] ? " or " : "", option->words[1] ? option->words[1] : "");
                else
                        snprintf(buf, buf_bytes, "time such as 10ms or 2s, %s to %s",
                                 gr_duration_format((uint64_t)option->min, least, sizeof(least)),
                                 gr_duration_format((uint64_t)option->max, most, sizeof(most)));
                break;
        }
        return buf;
}

const char *gr_option_format(const struct gr_options *options, enum gr_option_id id, char *buf, size_t buf_bytes)
{
        const struct gr_option *option = &gr_option_table[id];
        const void *value = gr_option_value(options, id);

        switch (option->kind) {
        case GR_KIND_SIZES:
        case GR_KIND_SIZE:
                gr_size_list_format(value, buf, buf_bytes);
                break;
        case GR_KIND_ENUM:
                snprintf(buf, buf_bytes, "%s", option->words[*(const int *)value]);
                break;
        case GR_KIND_BOOL:
                snprintf(buf, buf_bytes, "%d", *(const bool *)value);
                break;
        case GR_KIND_PATH:
        case GR_KIND_NAME:
                snprintf(buf, buf_bytes, "%s", *(const char *)value ? (const char *)value : "none");
                break;
        case GR_KIND_INT:
                snprintf(buf, buf_bytes, "%lld", (long long)*(const int64_t *)value);
                break;
        case GR_KIND_BYTE:
                if (*(const int64_t *)value == GR_BYTE_NONE)
                        snprintf(buf, buf_bytes, "none");
                else
                        snprintf(buf, buf_bytes, "0x%02x", (unsigned)*(const int64_t *)value);
                break;
        case GR_KIND_DURATION:
                if (gr_option_word(option, *(const uint64_t *)value))
                        snprintf(buf, buf_bytes, "%s", gr_option_word(option, *(const uint64_t *)value));
                else
                        gr_duration_format(*(const uint64_t *)value, buf, buf_bytes);
                break;
        }
        return buf;
}

const char *gr_option_reason(int rc)
{
        switch (rc) {
        case -ERANGE:
                return "out of range";
        case -ENAMETOOLONG:
                return "too long";
        default:
                return "not understood";
        }
}

/* Calls warn with where the text stands, "" for the environment. */
static void warn_value(const struct gr_options *options, enum gr_option_id id, const char *where, const char *text,
                       int rc, gr_options_warn *warn, void *warn_arg)
{
        const struct gr_option *option = &gr_option_table[id];
        char message[WARNING_BYTES], values[128], value[VALUE_SHOWN + 1], used[VALUE_SHOWN + 32];

        if (options->source[id] == GR_FROM_DEFAULT)
                snprintf(used, sizeof(used), "the default, %s",
                         option->default_text[0] ? option->default_text : "none");
        else
                snprintf(used, sizeof(used), "%s, from the %s", gr_option_format(options, id, value, sizeof(value)),
                         gr_options_source_words[options->source[id]]);
        snprintf(message, sizeof(message), "%s%s=%.*s%s: %s (expected %s); using %s", where, option->env, VALUE_SHOWN,
                 text, strlen(text) > VALUE_SHOWN ? "..." : "", gr_option_reason(rc),
                 gr_option_values(option, values, sizeof(values)), used);
        warn(message, warn_arg);
}

/* The option with this variable; GR_OPTION_COUNT: none. */
static enum gr_option_id find_option(const char *variable, size_t length)
{
        enum gr_option_id id;

        for (id = 0; id < GR_OPTION_COUNT; id++)
                if (strlen(gr_option_table[id].env) == length && memcmp(gr_option_table[id].env, variable, length) == 0)
                        break;
        return id;
}

/* kind: what the name is, "variable" or "option". */
static void warn_unknown(const char *where, const char *kind, const char *variable, size_t length,
                         gr_options_warn *warn, void *warn_arg)
{
        const size_t prefix = strlen(GR_OPTIONS_PREFIX);
        const char *known[GR_OPTION_COUNT], *nearest;
        char name[NEAREST_MAX + 1], message[WARNING_BYTES];
        const bool prefixed = length >= prefix && memcmp(variable, GR_OPTIONS_PREFIX, prefix) == 0;

        for (size_t i = 0; i < GR_OPTION_COUNT; i++)
                known[i] = gr_option_table[i].env + prefix;
        variable += prefixed ? prefix : 0;
        length -= prefixed ? prefix : 0;
        snprintf(name, sizeof(name), "%.*s", (int)(length < NEAREST_MAX ? length : NEAREST_MAX), variable);
        nearest = gr_options_nearest(name, known, GR_OPTION_COUNT);
        snprintf(message, sizeof(message), "%sunknown %s %s%s ignored%s%s%s", where, kind,
                 prefixed ? GR_OPTIONS_PREFIX : "", name, nearest ? "; did you mean " GR_OPTIONS_PREFIX : "",
                 nearest ? nearest : "", nearest ? "?" : "");
        warn(message, warn_arg);
}

static void warn_variables(char **env, gr_options_warn *warn, void *warn_arg)
{
        for (; *env; env++) {
                const size_t length = strcspn(*env, "=");

                if (strncmp(*env, GR_OPTIONS_PREFIX, strlen(GR_OPTIONS_PREFIX)) == 0 &&
                    find_option(*env, length) == GR_OPTION_COUNT)
                        warn_unknown("", "variable", *env, length, warn, warn_arg);
        }
}

/* What a text of an option that cannot be used was. */
struct bad_value {
        const char *text;
        int rc;
};

/* One line of the file, between blanks. Without warn its value is taken; with it, what was wrong is said. */
static void read_line(struct gr_options *ret, char *line, const char *where, struct bad_value bad[GR_OPTION_COUNT],
                      gr_options_warn *warn, void *warn_arg)
{
        const size_t length = strcspn(line, " \t=");
        char *value = line + length + strspn(line + length, " \t"), message[WARNING_BYTES];
        const bool has_value = *value == '=';
        enum gr_option_id id = find_option(line, length);

        if (*line == '#' || *line == '\0')
                return;
        if (has_value)
                value += 1 + strspn(value + 1, " \t");
        if (!warn) {
                if (id == GR_OPTION_COUNT || id == GR_OPTION_CONFIG || (has_value && !*value))
                        return;
                bad[id].rc = has_value ? gr_option_parse(&gr_option_table[id], value, value_of(ret, id)) : -EINVAL;
                bad[id].text = bad[id].rc < 0 ? value : NULL;
                if (bad[id].rc == 0)
                        ret->source[id] = GR_FROM_FILE;
        } else if (!has_value) {
                snprintf(message, sizeof(message), "%snot understood (expected NAME=VALUE)", where);
                warn(message, warn_arg);
        } else if (id == GR_OPTION_CONFIG) {
                snprintf(message, sizeof(message), "%s%s ignored: a file names no other", where,
                         gr_option_table[id].env);
                warn(message, warn_arg);
        } else if (id == GR_OPTION_COUNT) {
                warn_unknown(where, "option", line, length, warn, warn_arg);
        } else if (bad[id].text == value) {
                warn_value(ret, id, where, value, bad[id].rc, warn, warn_arg);
        }
}

static void read_lines(struct gr_options *ret, struct gr_options_file *file, struct bad_value bad[GR_OPTION_COUNT],
                       gr_options_warn *warn, void *warn_arg)
{
        char where[PATH_SHOWN + 32], *next = file->text;

        if (strncmp(next, "\xef\xbb\xbf", 3) == 0) /* how editors of Windows begin a file */
                next += 3;
        for (unsigned number = 1; *next; number++) {
                char *line = next + strspn(next, " \t"), *end = line + strcspn(line, "\n"), kept;

                next = end + (*end != '\0');
                while (end > line && (end[-1] == ' ' || end[-1] == '\t' || end[-1] == '\r'))
                        end--;
                kept = *end;
                *end = '\0';
                snprintf(where, sizeof(where), "%.*s:%u: ", PATH_SHOWN, file->path, number);
                read_line(ret, line, where, bad, warn, warn_arg);
                *end = kept;
        }
}

static const char *file_reason(int error)
{
        switch (error) {
        case -EPERM:
                return "it belongs to another user, or all may write to it";
        case -ESPIPE:
                return "it is a pipe, which only one process could read";
        case -EILSEQ:
                return "it is not text";
        default:
                return strerror(-error);
        }
}

static void warn_file(struct gr_options *ret, struct gr_options_file *file, struct bad_value bad[GR_OPTION_COUNT],
                      gr_options_warn *warn, void *warn_arg)
{
        char message[WARNING_BYTES];

        if (file->error == 0) {
                read_lines(ret, file, bad, warn, warn_arg);
                return;
        }
        snprintf(message, sizeof(message), "%.*s: no option is taken from this file: %s", PATH_SHOWN, file->path,
                 file_reason(file->error));
        warn(message, warn_arg);
}

int gr_options_load(struct gr_options *ret, const char *(*get)(const char *name), char **environ_or_null,
                    struct gr_options_file *file_or_null, gr_options_warn *warn, void *warn_arg)
{
        struct bad_value in_file[GR_OPTION_COUNT] = {{0}};
        int bad[GR_OPTION_COUNT] = {0};
        enum gr_option_id id;
        const char *text;

        if (!ret || !get)
                return -EINVAL;
        memset(ret, 0, sizeof(*ret));
        for (id = 0; id < GR_OPTION_COUNT; id++)
                gr_option_parse(&gr_option_table[id], gr_option_table[id].default_text, value_of(ret, id));
        if (file_or_null && file_or_null->error == 0)
                read_lines(ret, file_or_null, in_file, NULL, NULL);
        if (file_or_null)
                memcpy(ret->config.text, file_or_null->path, sizeof(ret->config.text));
        for (id = 0; id < GR_OPTION_COUNT; id++) {
                text = get(gr_option_table[id].env);
                if (text && *text) {
                        bad[id] = gr_option_parse(&gr_option_table[id], text, value_of(ret, id));
                        if (bad[id] == 0)
                                ret->source[id] = GR_FROM_ENVIRONMENT;
                }
                ret->bad[id] = bad[id] < 0 || (in_file[id].rc < 0 && ret->source[id] != GR_FROM_ENVIRONMENT);
        }
        if (!warn)
                return 0;
        for (id = 0; id < GR_OPTION_COUNT; id++) {
                /* get is called again, as it may return the same buffer for all variables. */
                text = bad[id] < 0 ? get(gr_option_table[id].env) : NULL;
                if (text)
                        warn_value(ret, id, "", text, bad[id], warn, warn_arg);
        }
        if (file_or_null)
                warn_file(ret, file_or_null, in_file, warn, warn_arg);
        if (environ_or_null)
                warn_variables(environ_or_null, warn, warn_arg);
        return 0;
}

uint64_t gr_options_resolve(struct gr_options *options, enum gr_option_id id, int device, uint64_t total_bytes,
                            gr_options_warn *warn, void *warn_arg)
{
        const struct gr_size_list *list = gr_option_value(options, id);
        char message[WARNING_BYTES], wanted[GR_SIZE_TEXT_BYTES], used[GR_SIZE_TEXT_BYTES];
        const uint64_t bit = device >= 0 && device < GR_SIZE_DEVICES_MAX ? 1ull << device : 1ull;
        uint64_t bytes;
        bool above;

        bytes = gr_size_resolve(list, device, total_bytes, &above);
        if (!above || !warn)
                return bytes;
        if (atomic_fetch_or_explicit(&options->above_device[id], bit, memory_order_relaxed) & bit)
                return bytes;
        snprintf(message, sizeof(message), "%s: %s is more than device %d has; using its whole %s",
                 gr_option_table[id].env, gr_size_format_entry(gr_size_list_get(list, device), wanted, sizeof(wanted)),
                 device, gr_size_format(bytes, used, sizeof(used)));
        warn(message, warn_arg);
        return bytes;
}

void gr_options_dump(const struct gr_options *options, void (*line)(const char *text, void *arg), void *arg)
{
        char text[GR_OPTION_TEXT_BYTES + 64], value[GR_OPTION_TEXT_BYTES];
        enum gr_option_id id;

        for (id = 0; id < GR_OPTION_COUNT; id++) {
                snprintf(text, sizeof(text), "%-30s %-12s (%s)", gr_option_table[id].env,
                         gr_option_format(options, id, value, sizeof(value)),
                         gr_options_source_words[options->source[id]]);
                line(text, arg);
        }
}

int gr_options_expand_path(const char *pattern, pid_t pid, unsigned image, char *buf, size_t buf_bytes)
{
        char out[GR_PATH_BYTES], digits[40];
        size_t used = 0, piece_bytes;
        const char *piece;

        snprintf(digits, sizeof(digits), image > 1 ? "%ld-%u" : "%ld", (long)pid, image);
        while (*pattern) {
                piece = pattern;
                piece_bytes = 1;
                if (pattern[0] == '%' && pattern[1] == 'p') {
                        piece = digits;
                        piece_bytes = strlen(digits);
                        pattern++;
                } else if (pattern[0] == '%' && pattern[1] == '%') {
                        pattern++;
                }
                pattern++;
                if (piece_bytes >= sizeof(out) - used)
                        return -ENAMETOOLONG;
                memcpy(out + used, piece, piece_bytes);
                used += piece_bytes;
        }
        if (used >= buf_bytes)
                return -ENAMETOOLONG;
        memcpy(buf, out, used);
        buf[used] = '\0';
        return 0;
}

static unsigned least_of_three(unsigned a, unsigned b, unsigned c)
{
        unsigned least = a < b ? a : b;

        return least < c ? least : c;
}

/* Insertions, deletions, substitutions and swaps of neighbours between a and b, both at most NEAREST_MAX long. */
static unsigned edit_distance(const char *a, const char *b)
{
        unsigned rows[3][NEAREST_MAX + 1];
        unsigned *before = rows[0], *above = rows[1], *row = rows[2], *rotate;
        const size_t b_length = strlen(b);
        size_t i, j;

        for (j = 0; j <= b_length; j++)
                row[j] = (unsigned)j;
        for (i = 1; a[i - 1]; i++) {
                rotate = before;
                before = above;
                above = row;
                row = rotate;
                row[0] = (unsigned)i;
                for (j = 1; j <= b_length; j++) {
                        const bool same = gr_lower(a[i - 1]) == gr_lower(b[j - 1]);

                        row[j] = least_of_three(above[j] + 1, row[j - 1] + 1, above[j - 1] + !same);
                        if (i > 1 && j > 1 && gr_lower(a[i - 1]) == gr_lower(b[j - 2]) &&
                            gr_lower(a[i - 2]) == gr_lower(b[j - 1]) && before[j - 2] + 1 < row[j])
                                row[j] = before[j - 2] + 1;
                }
        }
        return row[b_length];
}

static bool contains_part(const char *text, const char *part)
{
        size_t i;

        if (strlen(part) < NEAREST_MIN_PART)
                return false;
        for (; *text; text++) {
                for (i = 0; part[i] && gr_lower(text[i]) == gr_lower(part[i]); i++)
                        ;
                if (!part[i])
                        return true;
        }
        return false;
}

const char *gr_options_nearest(const char *text, const char *const *candidates, size_t count)
{
        const size_t length = strlen(text);
        unsigned best = length < 3 ? 1 : (unsigned)(length / 3), distance;
        const char *nearest = NULL;
        size_t i;

        if (length == 0 || length > NEAREST_MAX)
                return NULL;
        for (i = 0; i < count; i++) {
                if (!candidates[i] || strlen(candidates[i]) > NEAREST_MAX)
                        continue;
                distance = edit_distance(text, candidates[i]);
                if (distance < best || (distance == best && !nearest)) {
                        best = distance;
                        nearest = candidates[i];
                }
        }
        for (i = 0; i < count && !nearest; i++)
                if (candidates[i] && (contains_part(candidates[i], text) || contains_part(text, candidates[i])))
                        nearest = candidates[i];
        return nearest;
}
