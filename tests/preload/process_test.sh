#!/usr/bin/env bash
# Runs one mode of the program `process` natively and under the library with statistics on, and holds the second against
# the first: output, exit status, and on stderr as many summaries as there should be and nothing else of ours.
#
#   process_test.sh PROGRAM MODE SUMMARIES [NAME=VALUE...]     the settings apply to the run under the library
#
# With GPURECLAIM_STATS_FILE= among them there are no files of statistics, for which a thread of the library stays.
# GR_TEST_SHIM is the library, GR_TEST_SIM the folder of the simulated device; without it a real one is needed (else
# 77).
set -u
. "$(dirname "$0")/../support/fail.sh"

program=$1 mode=$2 summaries=$3 hits=0
shift 3
[ "$mode" != ordered ] || hits=2 # requests that meet the limit, each once however often it is tried
[ -x "$program" ] || { echo "no such program: $program" && exit 2; }
folder=$(mktemp -d) || exit 2
trap 'rm -rf "$folder"' EXIT
if [ -n "${GR_TEST_SIM:-}" ]; then
        export LD_LIBRARY_PATH=$GR_TEST_SIM
elif LC_ALL=C ldd "$program" | grep -q 'libcuda\.so\.1 => not found'; then
        echo "skipped: no CUDA driver" && exit 77
fi
ulimit -c 0

timeout 45 "$program" "$mode" >"$folder/native" 2>"$folder/native.err"
native=$?
timeout 45 env GPURECLAIM_STATS=1 "GPURECLAIM_STATS_FILE=$folder/stats.%p" "$@" "LD_PRELOAD=$GR_TEST_SHIM" \
        "$program" "$mode" >"$folder/shim" 2>"$folder/shim.err"
status=$?

[ $native -ne 124 ] || fail "the native run took too long"
[ $status -eq $native ] || fail "exit status $status, natively $native"
# What the driver does to errno natively, the library may spare the program.
awk 'NR == FNR { native[FNR] = $0; next }
     { spared = $0; sub(/errno kept$/, "errno changed", spared); print native[FNR] == spared ? spared : $0 }' \
        "$folder/native" "$folder/shim" >"$folder/compared"
diff -u --label native --label shim "$folder/native" "$folder/compared" || fail "the output differs"
found=$(grep -c '^gpureclaim: summary of process' "$folder/shim.err")
[ "$found" -eq "$summaries" ] || fail "$found summaries on stderr, expected $summaries"
# A summary's lines are indented. No other line of ours, and those of others unchanged.
diff -u --label native --label shim "$folder/native.err" \
        <(grep -v '^gpureclaim: summary of process\|^  ' "$folder/shim.err") || fail "other lines on stderr"

# A process that did not come to exit may have left statistics, too, and also what it was just writing (*.new).
files=()
for file in "$folder"/stats.*; do
        ! grep -q "summary of process ${file##*.}\$" "$folder/shim.err" || files+=("$file")
done
[[ " $* " = *" GPURECLAIM_STATS_FILE= "* || ${#files[@]} -eq $summaries ]] ||
        fail "${#files[@]} statistics files, expected $summaries"
for file in "${files[@]}"; do
        python3 - "$file" "$hits" "$mode" <<'PY' || fail "the statistics are not as they should be: $(cat "$file")"
import json, sys

stats = json.load(open(sys.argv[1]))
assert stats["schema"] == 1, "schema"
assert stats["limit_hits"] == int(sys.argv[2]), "limit hits"
assert stats["hits"] > 0 and stats["driver_allocs"] > 0, "counts"
for device in stats["devices"]:
    assert 0 < device["device_free_bytes"] <= device["device_total_bytes"], "card"
    assert min(device[name + "_bytes"] for name in ("peak_reserved", "reserved", "live", "cached")) >= 0, "negative"
    if not sys.argv[3].endswith("-busy"):  # there a thread changes the figures while they are read one by one
        assert device["peak_reserved_bytes"] >= device["reserved_bytes"] >= device["live_bytes"], "footprint"
        assert device["reserved_bytes"] >= device["cached_bytes"], "cached"
assert len(stats["devices"]) == 1, "devices"
PY
done
exit $failed
