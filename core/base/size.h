/*
 * Sizes as people write them: "4GiB", "512MB", "50%", and per device "0=8GiB,1=25%". Durations too: "10ms".
 *
 * Plain C without locale, allocation, locks or global state; every function may be called from any thread.
 * Functions that can fail return 0 or -errno and touch their ret_ outputs only on success.
 */
#ifndef GR_SIZE_H
#define GR_SIZE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Devices that a list can name: 0 to GR_SIZE_DEVICES_MAX - 1 (one bit of a mask each). */
#define GR_SIZE_DEVICES_MAX 64

/* The size that stands for "none": no limit, no threshold. No number in a text is parsed to it. */
#define GR_SIZE_NONE UINT64_MAX

/* Room for any text of gr_size_format, with its terminating NUL. */
#define GR_SIZE_TEXT_BYTES 32

struct gr_size {
        uint64_t bytes; /* GR_SIZE_NONE for "none"; 0 where is_percent */
        double percent; /* 0 to 100, of the device's total; 0 where not is_percent */
        bool is_percent;
};

/* One size for all devices, and exceptions. All zero bytes do not mean "none". */
struct gr_size_list {
        struct gr_size all;   /* for every device not in device_mask */
        uint64_t device_mask; /* bit d: devices[d] is set */
        struct gr_size devices[GR_SIZE_DEVICES_MAX];
};

/*
 * Parses one size: digits, optionally a decimal point and digits, optionally blanks, then a unit in any case:
 * none or B (bytes), kB MB GB TB (powers of 1000), KiB MiB GiB TiB or K M G T (powers of 1024), or %.
 * The word "none" gives GR_SIZE_NONE. Parts of a byte are dropped; digits after the sixth decimal are ignored.
 * -EINVAL: not a size. -ERANGE: negative, above 64 bits, or above 100 %.
 */
int gr_size_parse(const char *text, struct gr_size *ret_size);

/*
 * Parses a duration: a number as in gr_size_parse and a unit in any case: ns, us, ms, s, min or h; only 0 needs none.
 * Errors as gr_size_parse.
 */
int gr_duration_parse(const char *text, uint64_t *ret_ns);

/*
 * Parses a size for all devices, sizes per device, or both, separated by commas: "4GiB", "0=8GiB,1=25%", "4GiB,1=2GiB".
 * Devices that nothing names get "none". -EINVAL also when a device or the size for all is given twice,
 * -ERANGE also for a device above GR_SIZE_DEVICES_MAX - 1.
 */
int gr_size_list_parse(const char *text, struct gr_size_list *ret_list);

/* c in lower case, whatever the locale. */
static inline char gr_lower(char c)
{
        return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

/* The entry that applies to device; owned by list. A negative or too large device gets the one for all. */
const struct gr_size *gr_size_list_get(const struct gr_size_list *list, int device);

/*
 * Bytes that list means for device, whose memory is total_bytes: percentages rounded down, values above the device
 * replaced by total_bytes with *ret_above set. GR_SIZE_NONE where the list says none; total_bytes does not matter then.
 * ret_above may be NULL; otherwise it is always written.
 */
uint64_t gr_size_resolve(const struct gr_size_list *list, int device, uint64_t total_bytes, bool *ret_above);

/*
 * Writes bytes for people: "512 B", "4.000 KiB", "1.301 GiB", "2.000 TiB", rounded to the nearest digit; "none" for
 * GR_SIZE_NONE. Cuts off at buf_bytes, always terminated where buf_bytes > 0. Returns buf.
 */
const char *gr_size_format(uint64_t bytes, char *buf, size_t buf_bytes);

/*
 * Writes a duration in the largest unit of which it is a multiple: "10s", "1500ms"; "0". gr_duration_parse understands
 * it. Cuts off as gr_size_format does. Returns buf.
 */
const char *gr_duration_format(uint64_t ns, char *buf, size_t buf_bytes);

/* As gr_size_format, for one size of a list: "25%", "12.5%" or bytes. */
const char *gr_size_format_entry(const struct gr_size *size, char *buf, size_t buf_bytes);

/*
 * Writes a list: "4.000 GiB,1=25%". Returns the length that the whole text has, as snprintf does; cut off at buf_bytes,
 * always terminated where buf_bytes > 0.
 */
int gr_size_list_format(const struct gr_size_list *list, char *buf, size_t buf_bytes);

#endif
