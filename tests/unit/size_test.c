#include <errno.h>
#include <locale.h>

#include "base/size.h"
#include "check.h"

#define TIB (1024 * GIB)

struct good {
        const char *text;
        uint64_t bytes;
};

static const struct good good_sizes[] = {
        {"0", 0},
        {"1024", 1024},
        {"1024B", 1024},
        {"4GiB", 4 * GIB},
        {"512MB", 512000000},
        {"64 MiB", 64 * MIB},
        {"  64 MiB\t", 64 * MIB},
        {"1.5GiB", GIB + GIB / 2},
        {"1.000001GiB", GIB + 1073},
        {"0.25KiB", 256},
        {"3kB", 3000},
        {"3KB", 3000},
        {"3kb", 3000},
        {"3k", 3 * KIB},
        {"3KIB", 3 * KIB},
        {"7m", 7 * MIB},
        {"7gb", 7000000000},
        {"7G", 7 * GIB},
        {"2tb", 2000000000000},
        {"2T", 2 * TIB},
        {"2TiB", 2 * TIB},
        {"16777215TiB", 16777215 * TIB},
        {"18446744073709551614", UINT64_MAX - 1},
        {"none", GR_SIZE_NONE},
        {" NONE ", GR_SIZE_NONE},
};

struct bad {
        const char *text;
        int error;
};

static const struct bad bad_sizes[] = {
        {"", -EINVAL},
        {" ", -EINVAL},
        {"GiB", -EINVAL},
        {"4XiB", -EINVAL},
        {"4GiBs", -EINVAL},
        {"4 Gi B", -EINVAL},
        {"4GiB 5", -EINVAL},
        {"4Gi", -EINVAL},
        {"+4", -EINVAL},
        {"-", -EINVAL},
        {"--4", -EINVAL},
        {"-4GiB", -ERANGE},
        {"-0.5GiB", -ERANGE},
        {"-1%", -ERANGE},
        {"1.5", -EINVAL},
        {"1.5B", -EINVAL},
        {"1.GiB", -EINVAL},
        {".5GiB", -EINVAL},
        {"1,5GiB", -EINVAL},
        {"0x10", -EINVAL},
        {"1e9", -EINVAL},
        {"nan", -EINVAL},
        {"inf", -EINVAL},
        {"nonesuch", -EINVAL},
        {"4\nGiB", -EINVAL},
        {"18446744073709551615", -ERANGE},
        {"18446744073709551616", -ERANGE},
        {"99999999999999999999999999", -ERANGE},
        {"16777216TiB", -ERANGE},
        {"101%", -ERANGE},
        {"100.1%", -ERANGE},
        {"50%%", -EINVAL},
        {"%", -EINVAL},
};

static void test_parse(void)
{
        struct gr_size size;
        size_t i;

        for (i = 0; i < sizeof(good_sizes) / sizeof(good_sizes[0]); i++) {
                memset(&size, 0x5a, sizeof(size));
                GR_CHECK_EQ(gr_size_parse(good_sizes[i].text, &size), 0);
                if (size.bytes != good_sizes[i].bytes || size.is_percent) {
                        fprintf(stderr, "\"%s\" gave %llu bytes\n", good_sizes[i].text, (unsigned long long)size.bytes);
                        gr_check_failures++;
                }
        }
        for (i = 0; i < sizeof(bad_sizes) / sizeof(bad_sizes[0]); i++) {
                int rc;

                size = (struct gr_size){.bytes = 77, .percent = 7, .is_percent = true};
                rc = gr_size_parse(bad_sizes[i].text, &size);
                if (rc != bad_sizes[i].error) {
                        fprintf(stderr, "\"%s\" gave %d, not %d\n", bad_sizes[i].text, rc, bad_sizes[i].error);
                        gr_check_failures++;
                }
                GR_CHECK(size.bytes == 77 && size.percent > 6.9 && size.is_percent);
        }
}

static void test_percent(void)
{
        struct gr_size_list list;
        bool above = true;

        GR_CHECK_EQ(gr_size_list_parse("50%", &list), 0);
        GR_CHECK(list.all.is_percent);
        GR_CHECK_EQ(gr_size_resolve(&list, 0, 141 * GIB, &above), 141 * GIB / 2);
        GR_CHECK(!above);
        GR_CHECK_EQ(gr_size_resolve(&list, 0, 3, NULL), 1);
        GR_CHECK_EQ(gr_size_resolve(&list, 0, 0, NULL), 0);
        GR_CHECK_EQ(gr_size_resolve(&list, 0, UINT64_MAX - 1, NULL) == UINT64_MAX / 2, 1);
        GR_CHECK_EQ(gr_size_list_parse("12.5 %", &list), 0);
        GR_CHECK_EQ(gr_size_resolve(&list, 3, 80 * GIB, NULL), 10 * GIB);
        GR_CHECK_EQ(gr_size_list_parse("33.3%", &list), 0);
        GR_CHECK_EQ(gr_size_resolve(&list, 0, 1000, NULL), 333);
        GR_CHECK_EQ(gr_size_list_parse("100%", &list), 0);
        GR_CHECK_EQ(gr_size_resolve(&list, 0, 141 * GIB + 17, &above), 141 * GIB + 17);
        GR_CHECK(!above);
        GR_CHECK_EQ(gr_size_list_parse("0%", &list), 0);
        GR_CHECK_EQ(gr_size_resolve(&list, 0, 141 * GIB, NULL), 0);
}

static void test_list(void)
{
        static const struct bad bad_lists[] = {
                {"", -EINVAL},        {",", -EINVAL},         {"4GiB,", -EINVAL},
                {",4GiB", -EINVAL},   {"4GiB,5GiB", -EINVAL}, {"0=1GiB,0=2GiB", -EINVAL},
                {"0=", -EINVAL},      {"=4GiB", -EINVAL},     {"0==4GiB", -EINVAL},
                {"a=4GiB", -EINVAL},  {"0.0=4GiB", -EINVAL},  {"0;1=4GiB", -EINVAL},
                {"-1=4GiB", -ERANGE}, {"64=4GiB", -ERANGE},   {"0=4GiB,1=-1", -ERANGE},
        };
        struct gr_size_list list, before;
        bool above;
        char text[128];
        size_t i;

        GR_CHECK_EQ(gr_size_list_parse("0=8GiB, 1 = 25% ,63=none", &list), 0);
        GR_CHECK_EQ(gr_size_resolve(&list, 0, 80 * GIB, NULL), 8 * GIB);
        GR_CHECK_EQ(gr_size_resolve(&list, 1, 80 * GIB, NULL), 20 * GIB);
        GR_CHECK(gr_size_resolve(&list, 2, 80 * GIB, &above) == GR_SIZE_NONE);
        GR_CHECK(!above);
        GR_CHECK(gr_size_resolve(&list, 63, 80 * GIB, NULL) == GR_SIZE_NONE);
        GR_CHECK_EQ(gr_size_list_format(&list, text, sizeof(text)), (int)strlen(text));
        GR_CHECK_STR(text, "none,0=8.000 GiB,1=25%,63=none");

        GR_CHECK_EQ(gr_size_list_parse("4GiB,1=2GiB", &list), 0);
        GR_CHECK_EQ(gr_size_resolve(&list, 0, 80 * GIB, NULL), 4 * GIB);
        GR_CHECK_EQ(gr_size_resolve(&list, 1, 80 * GIB, NULL), 2 * GIB);
        GR_CHECK_EQ(gr_size_resolve(&list, -1, 80 * GIB, NULL), 4 * GIB);
        GR_CHECK_EQ(gr_size_resolve(&list, 1000, 80 * GIB, NULL), 4 * GIB);
        GR_CHECK_EQ(gr_size_resolve(&list, 0, 3 * GIB, &above), 3 * GIB);
        GR_CHECK(above);
        GR_CHECK_EQ(gr_size_resolve(&list, 0, 4 * GIB, &above), 4 * GIB);
        GR_CHECK(!above);
        /* Cut off, and still told how long it would be. */
        memset(text, 'x', sizeof(text));
        GR_CHECK_EQ(gr_size_list_format(&list, text, 12), 21);
        GR_CHECK_STR(text, "4.000 GiB,1");
        GR_CHECK_EQ(gr_size_list_format(&list, text, 4), 21);
        GR_CHECK_STR(text, "4.0");

        before = list;
        for (i = 0; i < sizeof(bad_lists) / sizeof(bad_lists[0]); i++) {
                int rc = gr_size_list_parse(bad_lists[i].text, &list);

                if (rc != bad_lists[i].error) {
                        fprintf(stderr, "\"%s\" gave %d, not %d\n", bad_lists[i].text, rc, bad_lists[i].error);
                        gr_check_failures++;
                }
                GR_CHECK(memcmp(&list, &before, sizeof(list)) == 0);
        }
}

static void test_duration(void)
{
        static const char *const written[] = {"0", "1ns", "1500us", "999ms", "10s", "61s", "1min", "25h"};
        char text[GR_SIZE_TEXT_BYTES];
        uint64_t parsed;
        uint64_t ns = 5;

        GR_CHECK_EQ(gr_duration_parse("0", &ns), 0);
        GR_CHECK_EQ(ns, 0);
        GR_CHECK_EQ(gr_duration_parse("10ms", &ns), 0);
        GR_CHECK_EQ(ns, 10000000);
        GR_CHECK_EQ(gr_duration_parse("1.5 S", &ns), 0);
        GR_CHECK_EQ(ns, 1500000000);
        GR_CHECK_EQ(gr_duration_parse("2h", &ns), 0);
        GR_CHECK_EQ(ns, 7200000000000);
        GR_CHECK_EQ(gr_duration_parse("10", &ns), -EINVAL);
        GR_CHECK_EQ(gr_duration_parse("10MiB", &ns), -EINVAL);
        GR_CHECK_EQ(gr_duration_parse("-10ms", &ns), -ERANGE);
        GR_CHECK_EQ(gr_duration_parse("6000000h", &ns), -ERANGE);
        for (size_t i = 0; i < sizeof(written) / sizeof(written[0]); i++) {
                GR_CHECK_EQ(gr_duration_parse(written[i], &parsed), 0);
                GR_CHECK_STR(gr_duration_format(parsed, text, sizeof(text)), written[i]);
        }
        GR_CHECK_STR(gr_duration_format(1500, text, 3), "15");
        GR_CHECK_EQ(ns, 7200000000000);
}

static void test_format(void)
{
        static const struct good texts[] = {
                {"0 B", 0},
                {"1023 B", 1023},
                {"1.000 KiB", 1024},
                {"1.500 MiB", MIB + MIB / 2},
                {"1.301 GiB", 1396938113},
                {"1.000 GiB", GIB - 1},
                {"2.000 MiB", 2 * MIB - 1},
                {"1023.999 MiB", GIB - KIB},
                {"139.809 GiB", 150118768640},
                {"2.000 TiB", 2 * TIB},
                {"16777216.000 TiB", UINT64_MAX - 1},
                {"none", GR_SIZE_NONE},
        };
        struct gr_size size;
        char text[GR_SIZE_TEXT_BYTES];
        size_t i;

        for (i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
                GR_CHECK_STR(gr_size_format(texts[i].bytes, text, sizeof(text)), texts[i].text);
        GR_CHECK_STR(gr_size_format(1024, text, 4), "1.0");
        GR_CHECK_EQ(gr_size_parse("12.5%", &size), 0);
        GR_CHECK_STR(gr_size_format_entry(&size, text, sizeof(text)), "12.5%");
        GR_CHECK_EQ(gr_size_parse("0.000001%", &size), 0);
        GR_CHECK_STR(gr_size_format_entry(&size, text, sizeof(text)), "0.000001%");
        GR_CHECK_EQ(gr_size_parse("100%", &size), 0);
        GR_CHECK_STR(gr_size_format_entry(&size, text, sizeof(text)), "100%");
}

int main(void)
{
        /* Where such a locale is installed, a decimal comma must change nothing. */
        setlocale(LC_ALL, "de_DE.UTF-8");
        test_parse();
        test_percent();
        test_list();
        test_duration();
        test_format();
        return GR_CHECK_RESULT();
}
