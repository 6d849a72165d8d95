#include <errno.h>
#include <stdlib.h>

#include "base/options.h"
#include "check.h"

/* The environment of one test; every answer comes in the same buffer, as a careless getter might give it. */
static char *test_env[16];

static const char *get(const char *name)
{
        static char answer[2 * GR_PATH_BYTES];
        const size_t length = strlen(name);
        size_t i;

        for (i = 0; test_env[i]; i++) {
                if (strncmp(test_env[i], name, length) == 0 && test_env[i][length] == '=') {
                        snprintf(answer, sizeof(answer), "%s", test_env[i] + length + 1);
                        return answer;
                }
        }
        return NULL;
}

static char warnings[8][512];
static int warning_count;
static struct gr_options options;

static void warn(const char *message, void *arg)
{
        GR_CHECK(arg == &options);
        if (warning_count < 8)
                snprintf(warnings[warning_count], sizeof(warnings[0]), "%s", message);
        warning_count++;
}

#define HELP_MOST 110

#define LOAD(...)                                                                                                      \
        do {                                                                                                           \
                const char *const entries[] = {__VA_ARGS__, NULL};                                                     \
                                                                                                                       \
                memcpy(test_env, entries, sizeof(entries));                                                            \
                warning_count = 0;                                                                                     \
                GR_CHECK_EQ(gr_options_load(&options, get, test_env, NULL, warn, &options), 0);                        \
        } while (0)

static void check_values(void)
{

        GR_CHECK(gr_size_resolve(&options.hard_limit, 0, GIB, NULL) == GR_SIZE_NONE);
        GR_CHECK(gr_size_resolve(&options.soft_limit, 0, GIB, NULL) == GR_SIZE_NONE);
        GR_CHECK(gr_size_resolve(&options.release_threshold, 0, GIB, NULL) == GR_SIZE_NONE);
        GR_CHECK_EQ(options.reuse, GR_REUSE_AUTO);
        GR_CHECK_EQ(options.pool, GR_POOL_AUTO);
        GR_CHECK(!options.stats);
        GR_CHECK_STR(options.stats_file.text, "");
        GR_CHECK_EQ(options.log, GR_LOG_WARN);
        for (int id = 0; id < GR_OPTION_COUNT; id++)
                GR_CHECK_EQ(options.source[id], GR_FROM_DEFAULT);
}

static void check_defaults(void)
{
        check_values();
        for (int id = 0; id < GR_OPTION_COUNT; id++)
                GR_CHECK(!options.bad[id]);
}

static void test_defaults(void)
{
        /* Whatever a default fails to parse would stay what it was. */
        memset(&options, 0x5a, sizeof(options));
        LOAD("PATH=/bin", "GPURECLAIM_HARD_LIMIT=", "GPURECLAIM_LOG=");
        GR_CHECK_EQ(warning_count, 0);
        check_defaults();
        GR_CHECK_EQ(gr_options_load(NULL, get, NULL, NULL, NULL, NULL), -EINVAL);
        GR_CHECK_EQ(gr_options_load(&options, NULL, NULL, NULL, NULL, NULL), -EINVAL);
}

static void test_table(void)
{
        static union {
                struct gr_size_list sizes;
                struct gr_path path;
                int64_t number;
        } value;
        int id, other;

        for (id = 0; id < GR_OPTION_COUNT; id++) {
                const struct gr_option *option = &gr_option_table[id];

                GR_CHECK_EQ(gr_option_parse(option, option->default_text, &value), 0);
                GR_CHECK(strncmp(option->env, GR_OPTIONS_PREFIX, strlen(GR_OPTIONS_PREFIX)) == 0);
                GR_CHECK(!option->flag || strncmp(option->flag, "--", 2) == 0);
                /* One short sentence; docs/options.md has the rest. */
                GR_CHECK(strlen(option->help) > 1 && strlen(option->help) <= HELP_MOST);
                GR_CHECK(strchr(option->help, '.') == option->help + strlen(option->help) - 1);
                GR_CHECK(option->kind != GR_KIND_ENUM || option->words);
                GR_CHECK(!option->words || option->kind == GR_KIND_ENUM || option->kind == GR_KIND_DURATION);
                for (other = 0; other < id; other++) {
                        GR_CHECK(strcmp(option->env, gr_option_table[other].env) != 0);
                        GR_CHECK(!option->flag || !gr_option_table[other].flag ||
                                 strcmp(option->flag, gr_option_table[other].flag) != 0);
                }
        }
}

static void test_values(void)
{
        LOAD("GPURECLAIM_HARD_LIMIT=0=8GiB,1=25%", "GPURECLAIM_SOFT_LIMIT=6 GiB", "GPURECLAIM_RELEASE_THRESHOLD=0",
             "GPURECLAIM_REUSE=Barrier", "GPURECLAIM_POOL=none", "GPURECLAIM_STATS=1",
             "GPURECLAIM_STATS_FILE=/tmp/s.%p", "GPURECLAIM_LOG=debug", "GPURECLAIM_GROUP=g");
        GR_CHECK_EQ(warning_count, 0);
        GR_CHECK_EQ(gr_size_resolve(&options.hard_limit, 0, 80 * GIB, NULL), 8 * GIB);
        GR_CHECK_EQ(gr_size_resolve(&options.hard_limit, 1, 80 * GIB, NULL), 20 * GIB);
        GR_CHECK_EQ(gr_size_resolve(&options.soft_limit, 1, 80 * GIB, NULL), 6 * GIB);
        GR_CHECK_EQ(gr_size_resolve(&options.release_threshold, 1, 80 * GIB, NULL), 0);
        GR_CHECK_EQ(options.reuse, GR_REUSE_BARRIER);
        GR_CHECK_EQ(options.pool, GR_POOL_NONE);
        GR_CHECK(options.stats);
        GR_CHECK_STR(options.stats_file.text, "/tmp/s.%p");
        GR_CHECK_EQ(options.log, GR_LOG_DEBUG);
        GR_CHECK_STR(options.group.text, "g"); /* and nothing of the longer default */
        GR_CHECK(options.source[GR_OPTION_HARD_LIMIT] == GR_FROM_ENVIRONMENT);
        LOAD("GPURECLAIM_STATS=off");
        GR_CHECK(!options.stats && options.source[GR_OPTION_STATS] == GR_FROM_ENVIRONMENT);
}

/* Each bad value: one warning that names variable, value and what is used instead; the default stays. */
static void test_bad_values(void)
{
        static const char *const bad[] = {
                "GPURECLAIM_HARD_LIMIT=4XiB",
                "GPURECLAIM_HARD_LIMIT=-4GiB",
                "GPURECLAIM_HARD_LIMIT=0",
                "GPURECLAIM_HARD_LIMIT=0%",
                "GPURECLAIM_HARD_LIMIT=8",
                "GPURECLAIM_GROUP_LIMIT=2097151",
                "GPURECLAIM_HARD_LIMIT=4GiB,1=0",
                "GPURECLAIM_HARD_LIMIT=9223372036854775808",
                "GPURECLAIM_PINNED_CACHE=0=8GiB",
                "GPURECLAIM_PINNED_LIMIT=8GiB,1=4GiB",
                "GPURECLAIM_SOFT_LIMIT=99999999999999999999",
                "GPURECLAIM_RELEASE_THRESHOLD=lots",
                "GPURECLAIM_REUSE=barriers",
                "GPURECLAIM_REUSE=bar",
                "GPURECLAIM_POOL=split ",
                "GPURECLAIM_STATS=2",
                "GPURECLAIM_LOG=warning",
        };
        char copy[128], long_value[2 * GR_PATH_BYTES];
        size_t i;

        for (i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
                snprintf(copy, sizeof(copy), "%s", bad[i]);
                memset(&options, 0x5a, sizeof(options));
                LOAD(copy);
                GR_CHECK_EQ(warning_count, 1);
                GR_CHECK(strncmp(warnings[0], bad[i], strlen(bad[i])) == 0);
                GR_CHECK(strstr(warnings[0], "using the default, ") != NULL);
                check_values();
        }
        GR_CHECK_STR(warnings[0],
                     "GPURECLAIM_LOG=warning: not understood (expected silent|error|warn|info|debug); using "
                     "the default, warn");
        memset(long_value, 'p', sizeof(long_value));
        memcpy(long_value, "GPURECLAIM_STATS_FILE=", strlen("GPURECLAIM_STATS_FILE="));
        long_value[sizeof(long_value) - 1] = '\0';
        LOAD(long_value);
        GR_CHECK_EQ(warning_count, 1);
        GR_CHECK(strstr(warnings[0], "ppp...: too long") != NULL);
        check_values();
        memset(long_value, 'p', sizeof(long_value));
        memcpy(long_value, "GPURECLAIM_GROUP=", strlen("GPURECLAIM_GROUP="));
        long_value[strlen("GPURECLAIM_GROUP=") + sizeof(options.group.text) - 1] = '\0';
        LOAD(long_value);
        GR_CHECK_EQ(warning_count, 0);
        long_value[strlen("GPURECLAIM_GROUP=") + sizeof(options.group.text) - 1] = 'p';
        long_value[strlen("GPURECLAIM_GROUP=") + sizeof(options.group.text)] = '\0';
        LOAD(long_value);
        GR_CHECK_EQ(warning_count, 1);
        GR_CHECK(strstr(warnings[0], ": too long") != NULL);
        check_values();
        /* Without anyone to warn, quietly. */
        GR_CHECK_EQ(gr_options_load(&options, get, test_env, NULL, NULL, NULL), 0);
        check_values();
}

/* A value of every bad kind at once: the good ones still count, and the level is known when the first warning comes. */
static void test_mixed(void)
{
        LOAD("GPURECLAIM_HARD_LIMIT=4XiB", "GPURECLAIM_REUSE=poll", "GPURECLAIM_STATS=maybe", "GPURECLAIM_LOG=error");
        GR_CHECK_EQ(warning_count, 2);
        GR_CHECK_EQ(options.reuse, GR_REUSE_POLL);
        GR_CHECK_EQ(options.log, GR_LOG_ERROR);
}

static void test_unknown(void)
{
        LOAD("GPURECLAIM_HARDLIMIT=4GiB", "GPURECLAIM_LIMIT=4GiB", "GPURECLAIM_XYZZY=1", "GPURECLAIM_HARD_LIMIT_=1",
             "GPURECLAIM=1", "XGPURECLAIM_LOGG=1", "GPURECLAIM_REUSE");
        GR_CHECK_EQ(warning_count, 4);
        GR_CHECK_STR(warnings[0], "unknown variable GPURECLAIM_HARDLIMIT ignored; did you mean GPURECLAIM_HARD_LIMIT?");
        GR_CHECK(strstr(warnings[1], "_LIMIT?") != NULL);
        GR_CHECK_STR(warnings[2], "unknown variable GPURECLAIM_XYZZY ignored");
        GR_CHECK(strstr(warnings[3], "did you mean GPURECLAIM_HARD_LIMIT?") != NULL);
        check_defaults();
}

static struct gr_options_file file = {.path = "/f"};

#define LOAD_FILE(contents, ...)                                                                                       \
        do {                                                                                                           \
                const char *const entries[] = {__VA_ARGS__, NULL};                                                     \
                                                                                                                       \
                memcpy(test_env, entries, sizeof(entries));                                                            \
                warning_count = 0;                                                                                     \
                strcpy(file.text, contents);                                                                           \
                GR_CHECK_EQ(gr_options_load(&options, get, test_env, &file, warn, &options), 0);                       \
                GR_CHECK_STR(file.text, contents);                                                                     \
        } while (0)

static void test_file(void)
{
        LOAD_FILE("# first\n\n \tGPURECLAIM_HARD_LIMIT = 4GiB \r\nGPURECLAIM_POOL=bins\nGPURECLAIM_POOL=split\n"
                  "GPURECLAIM_STATS=\nGPURECLAIM_TRACE=a=b c",
                  "GPURECLAIM_HARD_LIMIT=2GiB", "GPURECLAIM_LOG=");
        GR_CHECK_EQ(warning_count, 0);
        GR_CHECK_EQ(gr_size_resolve(&options.hard_limit, 0, 80 * GIB, NULL), 2 * GIB);
        GR_CHECK_EQ(options.source[GR_OPTION_HARD_LIMIT], GR_FROM_ENVIRONMENT);
        GR_CHECK_EQ(options.pool, GR_POOL_SPLIT);
        GR_CHECK_EQ(options.source[GR_OPTION_POOL], GR_FROM_FILE);
        GR_CHECK_EQ(options.source[GR_OPTION_STATS], GR_FROM_DEFAULT);
        GR_CHECK_STR(options.trace.text, "a=b c");
        GR_CHECK_STR(options.config.text, "/f");
        /* What is wrong in the file, and in a variable that the file has as well. */
        LOAD_FILE("GPURECLAIM_HARD_LIMIT=4GiB\nGPURECLAIM_POOL=binz\nHARD_LIMIT=1\nGPURECLAIM_HARDLIMIT=1\nxyzzy\n"
                  "GPURECLAIM_CONFIG=/g\nGPURECLAIM_STATS=2\n",
                  "GPURECLAIM_HARD_LIMIT=4XiB", "GPURECLAIM_STATS=1");
        GR_CHECK_EQ(warning_count, 7);
        GR_CHECK(strstr(warnings[0], "GPURECLAIM_HARD_LIMIT=4XiB: not understood (") == warnings[0]);
        GR_CHECK(strstr(warnings[0], "; using 4.000 GiB, from the file") != NULL);
        GR_CHECK_STR(warnings[1],
                     "/f:2: GPURECLAIM_POOL=binz: not understood (expected bins|split|auto|none); using the default, "
                     "auto");
        GR_CHECK_STR(warnings[2], "/f:3: unknown option HARD_LIMIT ignored; did you mean GPURECLAIM_HARD_LIMIT?");
        GR_CHECK_STR(warnings[3],
                     "/f:4: unknown option GPURECLAIM_HARDLIMIT ignored; did you mean GPURECLAIM_HARD_LIMIT?");
        GR_CHECK_STR(warnings[4], "/f:5: not understood (expected NAME=VALUE)");
        GR_CHECK_STR(warnings[5], "/f:6: GPURECLAIM_CONFIG ignored: a file names no other");
        GR_CHECK_STR(warnings[6],
                     "/f:7: GPURECLAIM_STATS=2: not understood (expected 0|1); using 1, from the environment");
        GR_CHECK(options.bad[GR_OPTION_HARD_LIMIT] && options.bad[GR_OPTION_POOL] && !options.bad[GR_OPTION_STATS]);
        GR_CHECK_STR(options.config.text, "/f");
        LOAD_FILE("\xef\xbb\xbfGPURECLAIM_POOL=bins\r\nGPURECLAIM_HARD_LIMIT 4GiB\r\n", NULL);
        GR_CHECK_EQ(warning_count, 1);
        GR_CHECK_STR(warnings[0], "/f:2: not understood (expected NAME=VALUE)");
        GR_CHECK_EQ(options.pool, GR_POOL_BINS);
        GR_CHECK(options.bad[GR_OPTION_HARD_LIMIT]);
        file.error = -EACCES;
        LOAD_FILE("GPURECLAIM_POOL=bins", "GPURECLAIM_LOG=error");
        GR_CHECK_EQ(warning_count, 1);
        GR_CHECK_STR(warnings[0], "/f: no option is taken from this file: Permission denied");
        GR_CHECK_EQ(options.pool, GR_POOL_AUTO);
        file.error = 0;
}

static void test_resolve(void)
{
        LOAD("GPURECLAIM_HARD_LIMIT=200GiB,1=300GiB,2=10%", "GPURECLAIM_SOFT_LIMIT=150GiB");
        GR_CHECK_EQ(gr_options_resolve(&options, GR_OPTION_HARD_LIMIT, 0, 141 * GIB, warn, &options), 141 * GIB);
        GR_CHECK_EQ(warning_count, 1);
        GR_CHECK_STR(warnings[0],
                     "GPURECLAIM_HARD_LIMIT: 200.000 GiB is more than device 0 has; using its whole 141.000 GiB");
        GR_CHECK_EQ(gr_options_resolve(&options, GR_OPTION_HARD_LIMIT, 0, 141 * GIB, warn, &options), 141 * GIB);
        GR_CHECK_EQ(warning_count, 1);
        GR_CHECK_EQ(gr_options_resolve(&options, GR_OPTION_HARD_LIMIT, 1, 141 * GIB, warn, &options), 141 * GIB);
        GR_CHECK_EQ(gr_options_resolve(&options, GR_OPTION_SOFT_LIMIT, 0, 141 * GIB, warn, &options), 141 * GIB);
        GR_CHECK_EQ(warning_count, 3);
        GR_CHECK(strstr(warnings[1], "300.000 GiB is more than device 1 has") != NULL);
        GR_CHECK(strstr(warnings[2], "GPURECLAIM_SOFT_LIMIT: 150.000 GiB") == warnings[2]);
        GR_CHECK_EQ(gr_options_resolve(&options, GR_OPTION_HARD_LIMIT, 2, 100 * GIB, warn, &options), 10 * GIB);
        GR_CHECK(gr_options_resolve(&options, GR_OPTION_RELEASE_THRESHOLD, 0, GIB, warn, &options) == GR_SIZE_NONE);
        GR_CHECK_EQ(warning_count, 3);
}

/* Kinds that no option has yet, held to the same contract. */
static void test_numbers(void)
{
        const struct gr_option number = {.kind = GR_KIND_INT, .min = -5, .max = 100};
        const struct gr_option wide = {.kind = GR_KIND_INT, .min = INT64_MIN, .max = INT64_MAX};
        const struct gr_option time = {.kind = GR_KIND_DURATION, .min = 1000, .max = 2000000000};
        int64_t value = 7;
        uint64_t ns = 9;

        GR_CHECK_EQ(gr_option_parse(&number, "101", &value), -ERANGE);
        GR_CHECK_EQ(gr_option_parse(&number, "-6", &value), -ERANGE);
        GR_CHECK_EQ(gr_option_parse(&number, "1x", &value), -EINVAL);
        GR_CHECK_EQ(gr_option_parse(&number, "", &value), -EINVAL);
        GR_CHECK_EQ(gr_option_parse(&number, "-", &value), -EINVAL);
        GR_CHECK_EQ(value, 7);
        GR_CHECK_EQ(gr_option_parse(&number, "-5", &value), 0);
        GR_CHECK_EQ(value, -5);
        GR_CHECK_EQ(gr_option_parse(&wide, "9223372036854775807", &value), 0);
        GR_CHECK(value == INT64_MAX);
        GR_CHECK_EQ(gr_option_parse(&wide, "9223372036854775808", &value), -ERANGE);
        GR_CHECK_EQ(gr_option_parse(&wide, "-9223372036854775808", &value), 0);
        GR_CHECK(value == INT64_MIN);
        GR_CHECK_EQ(gr_option_parse(&wide, "-9223372036854775809", &value), -ERANGE);
        GR_CHECK_EQ(gr_option_parse(&wide, "99999999999999999999", &value), -ERANGE);
        GR_CHECK_EQ(gr_option_parse(&time, "500ns", &ns), -ERANGE);
        GR_CHECK_EQ(gr_option_parse(&time, "3s", &ns), -ERANGE);
        GR_CHECK_EQ(gr_option_parse(&time, "3", &ns), -EINVAL);
        GR_CHECK_EQ(ns, 9);
        GR_CHECK_EQ(gr_option_parse(&time, "2s", &ns), 0);
        GR_CHECK_EQ(ns, 2000000000);
        GR_CHECK_EQ(gr_option_parse(&time, "off", &ns), -EINVAL);
        GR_CHECK(!gr_option_word(&time, 0));
}

/* A word or a time. */
static void test_word_or_time(void)
{
        const struct gr_option *option = &gr_option_table[GR_OPTION_SLEEP];
        char text[128];

        LOAD("GPURECLAIM_SLEEP=demand");
        GR_CHECK_EQ(options.sleep, GR_SLEEP_DEMAND);
        GR_CHECK_STR(gr_option_format(&options, GR_OPTION_SLEEP, text, sizeof(text)), "demand");
        LOAD("GPURECLAIM_SLEEP=10min");
        GR_CHECK_EQ(options.sleep, UINT64_C(600000000000));
        GR_CHECK_STR(gr_option_format(&options, GR_OPTION_SLEEP, text, sizeof(text)), "10min");
        GR_CHECK_EQ(warning_count, 0);
        LOAD("GPURECLAIM_SLEEP=999ms");
        GR_CHECK_EQ(options.sleep, GR_SLEEP_OFF);
        GR_CHECK_EQ(warning_count, 1);
        GR_CHECK_STR(warnings[0],
                     "GPURECLAIM_SLEEP=999ms: out of range (expected time such as 90s or 10min, from 1s, or "
                     "off or demand); using the default, off");
        LOAD("GPURECLAIM_SLEEP=soon");
        GR_CHECK_EQ(warning_count, 1);
        GR_CHECK_STR(gr_option_word(option, 1), "demand");
        GR_CHECK(!gr_option_word(option, 1000000000));
}

static void test_bytes(void)
{
        static const struct {
                const char *text;
                int rc, value;
        } cases[] = {{"0xAA", 0, 0xaa},  {"0XfF", 0, 255},     {"0", 0, 0},        {"255", 0, 255},
                     {"None", 0, -1},    {"256", -ERANGE, 7},  {"0x", -EINVAL, 7}, {"AA", -EINVAL, 7},
                     {"-1", -EINVAL, 7}, {"0x100", -ERANGE, 7}};
        const struct gr_option byte = {.kind = GR_KIND_BYTE};
        char text[64];

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
                int64_t value = 7;

                GR_CHECK_EQ(gr_option_parse(&byte, cases[i].text, &value), cases[i].rc);
                GR_CHECK_EQ(value, cases[i].value);
        }
        LOAD("GPURECLAIM_FILL=0xA", "GPURECLAIM_QUARANTINE=64");
        GR_CHECK_STR(gr_option_format(&options, GR_OPTION_FILL, text, sizeof(text)), "0x0a");
        GR_CHECK_EQ(warning_count, 1);
        GR_CHECK(strstr(warnings[0], "GPURECLAIM_QUARANTINE=64: out of range") == warnings[0]);
}

static char dumped[4096];

static void keep_line(const char *text, void *arg)
{
        GR_CHECK(arg == dumped);
        strcat(dumped, text);
        strcat(dumped, "\n");
}

static void test_dump(void)
{
        char text[64];

        LOAD("GPURECLAIM_HARD_LIMIT=4GiB,1=25%", "GPURECLAIM_LOG=loud");
        gr_options_dump(&options, keep_line, dumped);
        GR_CHECK(strstr(dumped, "GPURECLAIM_HARD_LIMIT          4.000 GiB,1=25% (environment)\n") != NULL);
        GR_CHECK(strstr(dumped, "GPURECLAIM_STATS_FILE          none         (default)\n") != NULL);
        GR_CHECK(strstr(dumped, "GPURECLAIM_LOG                 warn         (default)\n") != NULL);
        GR_CHECK(strstr(dumped, "GPURECLAIM_DECAY               10s          (default)\n") != NULL);
        GR_CHECK_STR(gr_option_values(&gr_option_table[GR_OPTION_NEIGHBOUR_WAIT], text, sizeof(text)),
                     "time such as 10ms or 2s, 0 to 10s");
        /* Cut off where there is no room, never beyond. */
        GR_CHECK_STR(gr_option_values(&gr_option_table[GR_OPTION_REUSE], text, 8), "auto|ba");
        GR_CHECK_STR(gr_option_values(&gr_option_table[GR_OPTION_REUSE], text, sizeof(text)), "auto|barrier|poll|sync");
}

static void test_path(void)
{
        char buf[32] = "before", pattern[2 * GR_PATH_BYTES];

        GR_CHECK_EQ(gr_options_expand_path("/tmp/s.%p.%%p.%d.%", 1234, 1, buf, sizeof(buf)), 0);
        GR_CHECK_STR(buf, "/tmp/s.1234.%p.%d.%");
        GR_CHECK_EQ(gr_options_expand_path("%p", 12, 2, buf, sizeof(buf)), 0);
        GR_CHECK_STR(buf, "12-2");
        GR_CHECK_EQ(gr_options_expand_path("0123456789012345678901234567890", 1, 1, buf, sizeof(buf)), 0);
        GR_CHECK_EQ(gr_options_expand_path("x%p", 1, 1, buf, 3), 0);
        GR_CHECK_EQ(gr_options_expand_path("x%p", 12, 1, buf, 3), -ENAMETOOLONG);
        GR_CHECK_STR(buf, "x1");
        memset(pattern, 'p', sizeof(pattern));
        pattern[sizeof(pattern) - 1] = '\0';
        GR_CHECK_EQ(gr_options_expand_path(pattern, 12, 1, buf, sizeof(buf)), -ENAMETOOLONG);
        GR_CHECK_STR(buf, "x1");
}

static void test_nearest(void)
{
        static const char *const words[] = {"run", NULL, "options", "doctor", "help", "hard-limit"};
        char long_text[200];

        GR_CHECK_STR(gr_options_nearest("optoins", words, 6), "options");
        GR_CHECK_STR(gr_options_nearest("rnu", words, 6), "run");
        GR_CHECK_STR(gr_options_nearest("Doctr", words, 6), "doctor");
        GR_CHECK_STR(gr_options_nearest("limit", words, 6), "hard-limit");
        GR_CHECK(gr_options_nearest("xyzzy", words, 6) == NULL);
        GR_CHECK(gr_options_nearest("", words, 6) == NULL);
        memset(long_text, 'r', sizeof(long_text));
        long_text[sizeof(long_text) - 1] = '\0';
        GR_CHECK(gr_options_nearest(long_text, words, 6) == NULL);
}

int main(void)
{
        test_table();
        test_defaults();
        test_values();
        test_bad_values();
        test_mixed();
        test_unknown();
        test_file();
        test_resolve();
        test_numbers();
        test_word_or_time();
        test_bytes();
        test_dump();
        test_path();
        test_nearest();
        return GR_CHECK_RESULT();
}
