/* UTF-8 in texts that others chose, and that may be any bytes. */
#ifndef GR_UTF8_H
#define GR_UTF8_H

#include <stddef.h>

/* Bytes of the character that text begins with, of which left bytes are there; 0: no UTF-8. */
static inline size_t gr_utf8_bytes(const char *text, size_t left)
{
        const unsigned char *byte = (const unsigned char *)text;
        size_t length = byte[0] < 0x80 ? 1 : byte[0] < 0xc2 ? 0 : byte[0] < 0xe0 ? 2 : byte[0] < 0xf0 ? 3 : 4;

        if (length == 0 || length > left || byte[0] > 0xf4)
                return 0;
        for (size_t i = 1; i < length; i++)
                if ((byte[i] & 0xc0) != 0x80)
                        return 0;
        switch (byte[0]) {
        case 0xe0:
                return byte[1] < 0xa0 ? 0 : length; /* here and at 0xf0: overlong encodings are no UTF-8 */
        case 0xed:
                return byte[1] < 0xa0 ? length : 0; /* surrogates are no characters */
        case 0xf0:
                return byte[1] < 0x90 ? 0 : length;
        case 0xf4:
                return byte[1] < 0x90 ? length : 0; /* beyond the last character */
        default:
                return length;
        }
}

#endif
