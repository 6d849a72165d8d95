#!/usr/bin/env python3
"""Makes an older driver of the simulated one: a copy in which nobody finds some names.

old_driver.py LIBRARY COPY NAME...
"""
import struct
import sys

source, target, names = sys.argv[1], sys.argv[2], sys.argv[3:]
data = bytearray(open(source, "rb").read())
assert data[:6] == b"\x7fELF\x02\x01", "a 64-bit little-endian ELF file"
sections, = struct.unpack_from("<Q", data, 40)
size, count = struct.unpack_from("<HH", data, 58)
for i in range(count):
    kind, = struct.unpack_from("<I", data, sections + i * size + 4)
    if kind == 11:  # SHT_DYNSYM
        begin, length = struct.unpack_from("<QQ", data, sections + i * size + 24)
        strings, = struct.unpack_from("<I", data, sections + i * size + 40)
names_at, = struct.unpack_from("<Q", data, sections + strings * size + 24)
hidden = set()
for at in range(begin, begin + length, 24):
    offset = names_at + struct.unpack_from("<I", data, at)[0]
    name = data[offset:data.index(b"\0", offset)].decode()
    if name in names:
        data[at + 5] = 2  # STV_HIDDEN: the library itself still finds it
        hidden.add(name)
assert hidden == set(names), "%s has no %s" % (source, set(names) - hidden)
open(target, "wb").write(data)
