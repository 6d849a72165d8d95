/* The writer of JSON: what it writes, to the byte. */
#include "base/json.h"

#include <string.h>

#include "check.h"

static char text[4096];
static size_t length, longest;

static void keep(const char *piece, size_t piece_bytes, void *arg)
{
        GR_CHECK(arg == text);
        GR_CHECK(length + piece_bytes < sizeof(text));
        memcpy(text + length, piece, piece_bytes);
        length += piece_bytes;
        text[length] = '\0';
        longest = piece_bytes > longest ? piece_bytes : longest;
}

static const char *write_sample(unsigned lines)
{
        struct gr_json json;

        length = 0;
        gr_json_begin(&json, keep, text, lines);
        gr_json_object(&json, NULL);
        gr_json_number(&json, "n", "%d", -7);
        gr_json_array(&json, "list");
        gr_json_string(&json, NULL, "a");
        gr_json_object(&json, NULL);
        gr_json_close(&json);
        gr_json_array(&json, NULL);
        gr_json_bool(&json, NULL, true);
        gr_json_bool(&json, NULL, false);
        gr_json_close(&json);
        gr_json_close(&json);
        gr_json_bytes(&json, "most", UINT64_MAX - 1);
        gr_json_bytes(&json, "none", UINT64_MAX);
        gr_json_null(&json, "null");
        gr_json_close(&json);
        gr_json_end(&json);
        return text;
}

static void test_places(void)
{
        GR_CHECK_STR(write_sample(0), "{\"n\":-7,\"list\":[\"a\",{},[true,false]],\"most\":18446744073709551614,"
                                      "\"none\":null,\"null\":null}\n");
        GR_CHECK_STR(write_sample(1), "{\n  \"n\": -7,\n  \"list\": [\"a\", {}, [true, false]],\n"
                                      "  \"most\": 18446744073709551614,\n  \"none\": null,\n  \"null\": null\n}\n");
        GR_CHECK_STR(write_sample(2), "{\n  \"n\": -7,\n  \"list\": [\n    \"a\",\n    {},\n    [true, false]\n  ],\n"
                                      "  \"most\": 18446744073709551614,\n  \"none\": null,\n  \"null\": null\n}\n");
}

static void test_strings(void)
{
        struct gr_json json;

        length = 0;
        gr_json_begin(&json, keep, text, 0);
        gr_json_object(&json, NULL);
        gr_json_string(&json, "a\"\\\n", "\x01\x1f \x7f\"\\\xc3\xa4");
        gr_json_string(&json, "not UTF-8", "a\xff\xc3\xa4\xed\xa0\x80\xe2\x82");
        gr_json_close(&json);
        gr_json_end(&json);
        GR_CHECK_STR(text, "{\"a\\\"\\\\\\u000a\":\"\\u0001\\u001f \x7f\\\"\\\\\xc3\xa4\","
                           "\"not UTF-8\":\"a\\ufffd\xc3\xa4\\ufffd\\ufffd\\ufffd\\ufffd\\ufffd\"}\n");
}

/* Longer than what waits at most: nothing is cut. */
static void test_long(void)
{
        char value[1024], wanted[1100];
        struct gr_json json;

        memset(value, 'v', sizeof(value) - 1);
        value[sizeof(value) - 1] = '\0';
        snprintf(wanted, sizeof(wanted), "\"%s\"\n", value);
        length = longest = 0;
        gr_json_begin(&json, keep, text, 0);
        gr_json_string(&json, NULL, value);
        gr_json_end(&json);
        GR_CHECK_STR(text, wanted);
        GR_CHECK_EQ(longest, sizeof(json.text));
}

int main(void)
{
        test_places();
        test_strings();
        test_long();
        return GR_CHECK_RESULT();
}
