#!/usr/bin/env bash
# The aarch64 half of shim/lookup/dlsym.S in an emulator; skipped (77) without a cross compiler or the emulator.
#
#   dlsym_aarch64_test.sh TOP FOLDER        the source tree, and where to put the program
set -eu

for tool in aarch64-linux-gnu-gcc qemu-aarch64; do
        command -v $tool >/dev/null || { echo "skipped: no $tool" && exit 77; }
done
[ -e /usr/aarch64-linux-gnu/include/string.h ] || { echo "skipped: no C library for aarch64" && exit 77; }
# With and without pointer authentication and branch targets, as distributions build.
for protection in none standard; do
        # As every other object is marked, or the library would not be.
        aarch64-linux-gnu-gcc -mbranch-protection=$protection -c -o "$2/dlsym-aarch64.o" "$1/shim/lookup/dlsym.S"
        aarch64-linux-gnu-readelf -n "$2/dlsym-aarch64.o" | grep -q BTI ||
                { echo "FAILED: dlsym.S is not marked"; exit 1; }
        aarch64-linux-gnu-gcc -std=gnu11 -O2 -Wall -Wextra -Werror -D_GNU_SOURCE -static \
                -mbranch-protection=$protection \
                -o "$2/dlsym_test-aarch64" -I "$1/tests/support" "$1/tests/preload/dlsym_test.c" \
                "$1/shim/lookup/dlsym.S"
        qemu-aarch64 "$2/dlsym_test-aarch64"
done
