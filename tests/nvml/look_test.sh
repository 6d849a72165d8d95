#!/usr/bin/env bash
# Deep sleep where the command that looks for room is not there, or does not answer. Before the sleep that refuses it.
# In the sleep calls fail, and the process is as it was once there is an answer. What the command was before the sleep
# answers, whatever becomes of its file.
#
#   look_test.sh SLEEP
#
# SLEEP is tests/preload/sleep; GR_TEST_SHIM is the library, GR_TEST_SIM the simulated device with its NVML,
# GR_TEST_COMMAND the command.
set -u
. "$(dirname "$0")/../support/fail.sh"

sleep=$(realpath "$1")
folder=$(mktemp -d "$PWD/look.XXXXXX") || exit 2 # not in /tmp, as programs may not run from there
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/lib" "$folder/tools"
cp "$GR_TEST_SHIM" "$folder/lib/libgpureclaim.so" || exit 2

# try WHAT MODE ARGUMENT
try() {
        LD_LIBRARY_PATH=$GR_TEST_SIM GRSIM_SHARED=$folder/card GRSIM_CONTEXT=100MiB GPURECLAIM_SLEEP=demand \
                GPURECLAIM_WAIT=300ms GPURECLAIM_REGION_DIR=$folder/region \
                LD_PRELOAD=$folder/lib/libgpureclaim.so timeout 60 "$sleep" "$2" "$3" >"$folder/out" 2>&1 ||
                fail "$1: $(grep -v '^ok' "$folder/out")"
}

try "no command" deep-not 'does not lie beside the library'
cat >"$folder/tools/gpureclaim" <<EOF
#!/bin/sh
. "$folder/answer"
exec "$GR_TEST_COMMAND" "\$@"
EOF
chmod +x "$folder/tools/gpureclaim"
for answer in 'exit 0' 'echo; exit' 'echo nonsense; exit' 'echo 12; exit' 'printf "12 12"; exit' 'kill -9 $$'; do
        echo "$answer" >"$folder/answer"
        try "$answer" deep-not 'status --room gave no answer'
done
echo 'exec sleep 60' >"$folder/answer"
try "hangs" deep-not 'it has begun, and is not done in time'
: >"$folder/answer"
try "no answer in the sleep" deep-blind "$folder/answer"
[ "$(grep -c 'warn: deep sleep: cannot wake: gpureclaim status --room gives no answer' "$folder/out")" -eq 1 ] ||
        fail "said: $(cat "$folder/out")"
# An upgrade of the package comes in the sleep.
cp --remove-destination "$GR_TEST_COMMAND" "$folder/tools/gpureclaim" || exit 2
try "replaced" deep-replaced "$folder/tools/gpureclaim"
exit $failed
