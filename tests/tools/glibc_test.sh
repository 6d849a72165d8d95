#!/bin/bash
# Library, command and simulated device run with glibc 2.28 and later (tools/glibc). Usage: glibc_test.sh FILE...
set -u
command -v objdump >/dev/null || { echo "no objdump here" && exit 77; }
symbols=$(objdump -T "$@") || exit 1
[[ $symbols == *GLIBC_2.* ]] || { echo "no symbol has a version" && exit 1; }
new=$(grep -oE 'GLIBC_(ABI|[3-9]|2\.(29|[3-9][0-9]|[1-9][0-9]{2})).*' <<<"$symbols" | sort -u)
[ -z "$new" ] || { printf 'newer than glibc 2.28:\n%s\n' "$new" && exit 1; }
