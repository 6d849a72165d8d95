#include "base/size.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define ITEMS(array) (sizeof(array) / sizeof((array)[0]))

/* Percentages are computed in millionths of one percent, so that the result is exact and the same everywhere. */
#define MICROS_PER_PERCENT 1000000u
#define FRACTION_DIGITS    6

/* A part of the caller's text; nothing is copied. */
struct span {
        const char *start;
        size_t length;
};

struct unit {
        const char *name;
        uint64_t factor;
};

static const struct unit size_units[] = {
        {"", 1},
        {"b", 1},
        {"kb", 1000},
        {"mb", 1000000},
        {"gb", 1000000000},
        {"tb", 1000000000000},
        {"k", 1ull << 10},
        {"m", 1ull << 20},
        {"g", 1ull << 30},
        {"t", 1ull << 40},
        {"kib", 1ull << 10},
        {"mib", 1ull << 20},
        {"gib", 1ull << 30},
        {"tib", 1ull << 40},
};

static const struct unit duration_units[] = {
        {"ns", 1}, {"us", 1000}, {"ms", 1000000}, {"s", 1000000000}, {"min", 60000000000}, {"h", 3600000000000},
};

/* Not the functions of <ctype.h>, which obey the locale of the host program. */
static bool is_digit(char c)
{
        return c >= '0' && c <= '9';
}

static bool is_blank(char c)
{
        return c == ' ' || c == '\t';
}

static struct span span_trim(struct span text)
{
        while (text.length > 0 && is_blank(text.start[0])) {
                text.start++;
                text.length--;
        }
        while (text.length > 0 && is_blank(text.start[text.length - 1]))
                text.length--;
        return text;
}

static bool span_is(struct span text, const char *word)
{
        size_t i;

        for (i = 0; i < text.length; i++)
                if (word[i] == '\0' || gr_lower(text.start[i]) != word[i])
                        return false;
        return word[i] == '\0';
}

/* A written number: whole + fraction / 10^FRACTION_DIGITS, and the unit after it. */
struct number {
        uint64_t whole;
        uint64_t fraction;
        bool has_point;
        struct span unit;
};

static int number_parse(struct span text, struct number *ret)
{
        struct number number = {0};
        size_t i = 0, digits;

        text = span_trim(text);
        if (text.length > 1 && text.start[0] == '-' && is_digit(text.start[1]))
                return -ERANGE;
        if (text.length == 0 || !is_digit(text.start[0]))
                return -EINVAL;
        for (; i < text.length && is_digit(text.start[i]); i++) {
                unsigned digit = (unsigned)(text.start[i] - '0');

                if (number.whole > (UINT64_MAX - digit) / 10)
                        return -ERANGE;
                number.whole = number.whole * 10 + digit;
        }
        if (i < text.length && text.start[i] == '.') {
                number.has_point = true;
                i++;
                for (digits = 0; i < text.length && is_digit(text.start[i]); i++, digits++)
                        if (digits < FRACTION_DIGITS)
                                number.fraction = number.fraction * 10 + (unsigned)(text.start[i] - '0');
                if (digits == 0)
                        return -EINVAL;
                for (; digits < FRACTION_DIGITS; digits++)
                        number.fraction *= 10;
        }
        number.unit = span_trim((struct span){text.start + i, text.length - i});
        *ret = number;
        return 0;
}

/* number times its unit, rounded down. -ERANGE also for the largest value, which is GR_SIZE_NONE. */
static int number_scale(const struct number *number, const struct unit *units, size_t count, uint64_t *ret)
{
        uint64_t below;
        size_t i;

        for (i = 0; i < count && !span_is(number->unit, units[i].name); i++)
                ;
        if (i == count || (number->has_point && units[i].factor == 1))
                return -EINVAL;
        /* The largest factor, one hour in nanoseconds, times a million stays below 64 bits. */
        below = units[i].factor * number->fraction / MICROS_PER_PERCENT;
        if (number->whole > (UINT64_MAX - 1 - below) / units[i].factor)
                return -ERANGE;
        *ret = number->whole * units[i].factor + below;
        return 0;
}

static int size_parse(struct span text, struct gr_size *ret)
{
        struct gr_size size = {0};
        struct number number;
        int rc;

        if (span_is(span_trim(text), "none")) {
                *ret = (struct gr_size){.bytes = GR_SIZE_NONE};
                return 0;
        }
        rc = number_parse(text, &number);
        if (rc < 0)
                return rc;
        if (span_is(number.unit, "%")) {
                if (number.whole > 100 || (number.whole == 100 && number.fraction > 0))
                        return -ERANGE;
                size.is_percent = true;
                size.percent = (double)(number.whole * MICROS_PER_PERCENT + number.fraction) / MICROS_PER_PERCENT;
        } else {
                rc = number_scale(&number, size_units, ITEMS(size_units), &size.bytes);
                if (rc < 0)
                        return rc;
        }
        *ret = size;
        return 0;
}

int gr_size_parse(const char *text, struct gr_size *ret_size)
{
        return size_parse((struct span){text, strlen(text)}, ret_size);
}

int gr_duration_parse(const char *text, uint64_t *ret_ns)
{
        struct number number;
        int rc;

        rc = number_parse((struct span){text, strlen(text)}, &number);
        if (rc < 0)
                return rc;
        if (number.unit.length == 0 && number.whole == 0 && number.fraction == 0) {
                *ret_ns = 0;
                return 0;
        }
        return number_scale(&number, duration_units, ITEMS(duration_units), ret_ns);
}

const char *gr_duration_format(uint64_t ns, char *buf, size_t buf_bytes)
{
        size_t i = ITEMS(duration_units) - 1;

        while (ns % duration_units[i].factor != 0)
                i--;
        if (ns == 0)
                snprintf(buf, buf_bytes, "0");
        else
                snprintf(buf, buf_bytes, "%" PRIu64 "%s", ns / duration_units[i].factor, duration_units[i].name);
        return buf;
}

/* The digits before '=': -EINVAL where something else stands there. */
static int device_parse(struct span text, int *ret)
{
        struct number number;
        int rc;

        rc = number_parse(text, &number);
        if (rc < 0)
                return rc;
        if (number.has_point || number.unit.length > 0)
                return -EINVAL;
        if (number.whole >= GR_SIZE_DEVICES_MAX)
                return -ERANGE;
        *ret = (int)number.whole;
        return 0;
}

int gr_size_list_parse(const char *text, struct gr_size_list *ret_list)
{
        struct gr_size_list list = {.all.bytes = GR_SIZE_NONE};
        bool have_all = false;
        const char *end;

        for (;; text = end + 1) {
                const char *equals;
                struct span item;
                int device, rc;

                end = text + strcspn(text, ",");
                item = (struct span){text, (size_t)(end - text)};
                equals = memchr(item.start, '=', item.length);
                if (!equals) {
                        if (have_all)
                                return -EINVAL;
                        have_all = true;
                        rc = size_parse(item, &list.all);
                        if (rc < 0)
                                return rc;
                } else {
                        rc = device_parse((struct span){item.start, (size_t)(equals - item.start)}, &device);
                        if (rc < 0)
                                return rc;
                        if (list.device_mask & (1ull << device))
                                return -EINVAL;
                        rc = size_parse((struct span){equals + 1, (size_t)(end - equals - 1)}, &list.devices[device]);
                        if (rc < 0)
                                return rc;
                        list.device_mask |= 1ull << device;
                }
                if (*end == '\0')
                        break;
        }
        *ret_list = list;
        return 0;
}

const struct gr_size *gr_size_list_get(const struct gr_size_list *list, int device)
{
        if (device >= 0 && device < GR_SIZE_DEVICES_MAX && (list->device_mask & (1ull << device)))
                return &list->devices[device];
        return &list->all;
}

static uint64_t percent_micros(const struct gr_size *size)
{
        return (uint64_t)(size->percent * MICROS_PER_PERCENT + 0.5);
}

uint64_t gr_size_resolve(const struct gr_size_list *list, int device, uint64_t total_bytes, bool *ret_above)
{
        const uint64_t whole = 100ull * MICROS_PER_PERCENT;
        const struct gr_size *size = gr_size_list_get(list, device);
        bool above = false;
        uint64_t bytes = size->bytes;

        if (size->is_percent) {
                /* In two parts, as the whole product may need more than 64 bits. */
                bytes = total_bytes / whole * percent_micros(size) + total_bytes % whole * percent_micros(size) / whole;
        } else if (bytes != GR_SIZE_NONE && bytes > total_bytes) {
                bytes = total_bytes;
                above = true;
        }
        if (ret_above)
                *ret_above = above;
        return bytes;
}

const char *gr_size_format(uint64_t bytes, char *buf, size_t buf_bytes)
{
        static const char *const names[] = {"KiB", "MiB", "GiB", "TiB"};
        uint64_t factor = 1024, whole, milli;
        size_t i = 0;

        if (bytes == GR_SIZE_NONE) {
                snprintf(buf, buf_bytes, "none");
                return buf;
        }
        if (bytes < 1024) {
                snprintf(buf, buf_bytes, "%u B", (unsigned)bytes);
                return buf;
        }
        while (i + 1 < ITEMS(names) && bytes / factor >= 1024) {
                factor *= 1024;
                i++;
        }
        whole = bytes / factor;
        milli = (bytes % factor * 1000 + factor / 2) / factor;
        if (milli == 1000) {
                whole++;
                milli = 0;
                /* 1023.9999 MiB reads as 1.000 GiB. */
                if (whole == 1024 && i + 1 < ITEMS(names)) {
                        whole = 1;
                        i++;
                }
        }
        snprintf(buf, buf_bytes, "%llu.%03u %s", (unsigned long long)whole, (unsigned)milli, names[i]);
        return buf;
}

const char *gr_size_format_entry(const struct gr_size *size, char *buf, size_t buf_bytes)
{
        char digits[FRACTION_DIGITS + 1];
        uint64_t micros;
        int length;

        if (!size->is_percent)
                return gr_size_format(size->bytes, buf, buf_bytes);
        micros = percent_micros(size);
        length = snprintf(digits, sizeof(digits), "%06u", (unsigned)(micros % MICROS_PER_PERCENT));
        while (length > 0 && digits[length - 1] == '0')
                digits[--length] = '\0';
        snprintf(buf, buf_bytes, "%u%s%s%%", (unsigned)(micros / MICROS_PER_PERCENT), length > 0 ? "." : "", digits);
        return buf;
}

int gr_size_list_format(const struct gr_size_list *list, char *buf, size_t buf_bytes)
{
        char text[GR_SIZE_TEXT_BYTES];
        size_t used;
        int device;

        used = (size_t)snprintf(buf, buf_bytes, "%s", gr_size_format_entry(&list->all, text, sizeof(text)));
        for (device = 0; device < GR_SIZE_DEVICES_MAX; device++) {
                if (!(list->device_mask & (1ull << device)))
                        continue;
                gr_size_format_entry(&list->devices[device], text, sizeof(text));
                used += (size_t)snprintf(used < buf_bytes ? buf + used : NULL, used < buf_bytes ? buf_bytes - used : 0,
                                         ",%d=%s", device, text);
        }
        return (int)used;
}
