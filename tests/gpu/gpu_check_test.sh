#!/usr/bin/env bash
# gpu_check_test.sh SCRIPT BUILD_FOLDER: scripts/gpu-check on several simulated cards must run groups beside each other,
# each on a card of its own, and tell of them in the table's order; what needs two devices must see them.
set -u
. "$(dirname "$0")/../support/fail.sh"

script=$1
build=$2
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
unset CUDA_VISIBLE_DEVICES LD_PRELOAD

run() {
        GRSIM_DEVICES=2 "$script" --simulated --quick --cards --logs "$folder/logs" "$@" "$build" \
                >"$folder/table" 2>"$folder/progress"
}

run --only processes_ends,others
must "exit status 0 when none failed" [ $? -eq 0 ]
must "two cards at work" [ "$(sed -n 's/^== .* s, card //p' "$folder/progress" | sort -n | paste -sd ' ')" = "0 1" ]
must "the table's order" [ "$(sed -n 's/ *|.*//p' "$folder/table" | sed -n '2p;$p' | paste -sd ' ')" = \
        "process: plain JAX, platform allocator" ]
must "rows and verdicts agree" [ "$(grep -c '| pass$' "$folder/table")" = \
        "$(sed -n 's/ passed, 0 failed, [0-9]* skipped$//p' "$folder/table")" ]
must "where it ran, before the last line" grep -qE '^no card: the simulated device; CUDA 1[0-9.]+; .*[0-9-]{10}$' \
        <(tail -n 2 "$folder/table" | head -n 1)
run --only devices,facts
must "both devices where both are needed" grep -q '^safety, two devices .*| pass$' "$folder/table"
must "two groups" [ "$(sed -n 's/^== \([a-z]*\):.*/\1/p' "$folder/progress" | sort | paste -sd ' ')" = "devices facts" ]
run --only observed
must "each debug aid finds its error" [ "$(grep -c ', GPURECLAIM_.*| pass$' "$folder/table")" -eq 3 ]
run --only "devices,no such group"
must "a group that is not there" [ $? -eq 2 ]
[ $failed -eq 0 ] || cat "$folder/table" "$folder/progress"
exit $failed
