#include "base/json.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"

static void flush_text(struct gr_json *json)
{
        if (json->length > 0)
                json->sink(json->text, json->length, json->arg);
        json->length = 0;
}

static void put_char(struct gr_json *json, char c)
{
        if (json->length == sizeof(json->text))
                flush_text(json);
        json->text[json->length++] = c;
}

static void put_text(struct gr_json *json, const char *text)
{
        while (*text)
                put_char(json, *text++);
}

static void put_quoted(struct gr_json *json, const char *text)
{
        size_t bytes;
        char code[8];

        put_char(json, '"');
        for (; *text; text += bytes) {
                bytes = gr_utf8_bytes(text, strnlen(text, 4));
                if (bytes == 0) { /* readers refuse all of a text that is no UTF-8 */
                        put_text(json, "\\ufffd");
                        bytes = 1;
                        continue;
                }
                if ((unsigned char)*text < ' ') {
                        snprintf(code, sizeof(code), "\\u%04x", (unsigned char)*text);
                        put_text(json, code);
                        continue;
                }
                if (*text == '"' || *text == '\\')
                        put_char(json, '\\');
                for (size_t i = 0; i < bytes; i++)
                        put_char(json, text[i]);
        }
        put_char(json, '"');
}

static void put_new_line(struct gr_json *json)
{
        put_char(json, '\n');
        for (unsigned i = 0; i < json->depth; i++)
                put_text(json, "  ");
}

/* Writes what comes before a value: comma, line break and name. */
static void begin_entry(struct gr_json *json, const char *name)
{
        if (json->filled)
                put_char(json, ',');
        if (json->depth > 0 && json->depth <= json->lines)
                put_new_line(json);
        else if (json->filled && json->lines)
                put_char(json, ' ');
        if (name) {
                put_quoted(json, name);
                put_text(json, json->lines ? ": " : ":");
        }
        json->filled = true;
}

void gr_json_begin(struct gr_json *json, gr_sink *sink, void *arg, unsigned lines)
{
        *json = (struct gr_json){.sink = sink, .arg = arg, .lines = lines};
}

void gr_json_end(struct gr_json *json)
{
        assert(json->depth == 0);
        put_char(json, '\n');
        flush_text(json);
}

static void begin_nested(struct gr_json *json, const char *name, char opening, char closing)
{
        assert(json->depth < GR_JSON_DEPTH);
        begin_entry(json, name);
        put_char(json, opening);
        json->closing[json->depth++] = closing;
        json->filled = false;
}

void gr_json_object(struct gr_json *json, const char *name)
{
        begin_nested(json, name, '{', '}');
}

void gr_json_array(struct gr_json *json, const char *name)
{
        begin_nested(json, name, '[', ']');
}

void gr_json_close(struct gr_json *json)
{
        assert(json->depth > 0);
        json->depth--;
        if (json->filled && json->depth < json->lines)
                put_new_line(json);
        put_char(json, json->closing[json->depth]);
        json->filled = true;
}

void gr_json_string(struct gr_json *json, const char *name, const char *text)
{
        begin_entry(json, name);
        put_quoted(json, text);
}

void gr_json_bool(struct gr_json *json, const char *name, bool value)
{
        begin_entry(json, name);
        put_text(json, value ? "true" : "false");
}

void gr_json_null(struct gr_json *json, const char *name)
{
        begin_entry(json, name);
        put_text(json, "null");
}

void gr_json_count(struct gr_json *json, const char *name, uint64_t count)
{
        gr_json_number(json, name, "%" PRIu64, count);
}

void gr_json_bytes(struct gr_json *json, const char *name, uint64_t bytes)
{
        if (bytes == UINT64_MAX)
                gr_json_null(json, name);
        else
                gr_json_count(json, name, bytes);
}

void gr_json_number(struct gr_json *json, const char *name, const char *format, ...)
{
        char number[64];
        va_list args;

        va_start(args, format);
        vsnprintf(number, sizeof(number), format, args);
        va_end(args);
        begin_entry(json, name);
        put_text(json, number);
}
