#!/bin/sh
# Holds the symbols that the library exports against the list of hooks, and its needs against "libc only"; and what each
# call reads against a cache line.
# Usage: symbols_test.sh LIBRARY HOOKS_DEF [CHECK...]    CHECK: what it calls where an array is overrun
set -eu
export LC_ALL=C
library=$1
hooks=$2
shift 2
checks=$*
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failed=0

for tool in nm readelf; do
        command -v "$tool" >/dev/null || { echo "skipped: no $tool"; exit 77; }
done

# Names only: versions and the linker's own absolute symbols do not count.
nm -D --defined-only --extern-only "$library" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' |
        sort -u >"$dir/exported"
{
        echo dlsym
        sed -n 's/^GR_\(\(HOOK\|DEEP\)[A-Z_]*\|NVML\|RUNTIME\|CUPTI\)(\([A-Za-z0-9_]*\)).*/\3/p' "$hooks"
} | sort -u >"$dir/wanted"
grep -v '^gpureclaim_' "$dir/exported" >"$dir/foreign" || true

count=$(wc -l <"$dir/wanted")
if [ "$count" -lt 10 ]; then
        echo "only $count hooks found in $hooks: is its form another one now?"
        failed=1
fi
comm -23 "$dir/wanted" "$dir/foreign" >"$dir/missing"
comm -13 "$dir/wanted" "$dir/foreign" >"$dir/extra"
if [ -s "$dir/missing" ]; then
        echo "in the list, but not exported:"
        cat "$dir/missing"
        failed=1
fi
if [ -s "$dir/extra" ]; then
        echo "exported, but not in the list:"
        cat "$dir/extra"
        failed=1
fi

# Programs that ask for a symbol without a version are given one of the first version, hidden or not.
first=$(readelf -VW "$library" | sed -n 's/.*Index: 2 .*Name: //p')
if [ "$first" != gpureclaim ]; then
        echo "the first version is $first"
        failed=1
fi

readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' >"$dir/needed"
if grep -Ev '^(libc\.so\.6|libdl\.so\.2|libpthread\.so\.0|ld-linux.*)$' "$dir/needed"; then
        echo "needed, but not of the C library (above)"
        failed=1
fi
# What overruns an array ends the program. Optional: some builds cannot have it.
for check in $checks; do
        nm -D --undefined-only "$library" | grep -q " $check\(@.*\)\?\$" ||
                { echo "not built with what calls $check"; failed=1; }
done

# What each call reads is one cache line (GR_HOT_DATA): its size in hexadecimal, with two digits, and its alignment.
hot=$(readelf -SW "$library" | sed -n 's/.* gr_hot  *[A-Z]*  *[0-9a-f]* [0-9a-f]* \([0-9a-f]*\) .* \([0-9]*\)$/\1 \2/p')
case $hot in
'0000'[0-3][0-9a-f]' 64' | '000040 64') ;;
*)
        echo "what each call reads is no cache line: size and alignment are ${hot:-unknown}"
        failed=1
        ;;
esac
[ "$failed" = 0 ] && echo "$count symbols, as in the list"
exit "$failed"
