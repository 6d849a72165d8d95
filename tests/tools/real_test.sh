#!/bin/bash
# The command with the library and the simulated device of this build. Usage: real_test.sh GPURECLAIM
set -u
. "$(dirname "$0")/../support/fail.sh"
unset LD_PRELOAD LD_LIBRARY_PATH CUDA_VISIBLE_DEVICES
for name in $(compgen -e GPURECLAIM_); do unset "$name"; done

out=$("$1" doctor --sim 2>&1) || fail "doctor --sim found that gpureclaim would not work"
for line in "the simulated device" "GPU 0     ok" "fences    ok" "library   ok" "hooks     ok" \
        "gpureclaim would work here."; do
        [[ $out == *"$line"* ]] || fail "doctor --sim: no \"$line\""
done
[[ $out != *newer* ]] || fail "doctor --sim: the simulated device has what the library does not know"
printf '%s\n' "$out"
[[ $out == *", version $("$1" --version | cut -d ' ' -f 2)"* ]] || fail "library and command say different versions"
out=$("$1" doctor --sim --symbols)
[[ $out == *" cuMemAlloc_v2"* ]] || fail "doctor --symbols does not name cuMemAlloc_v2"
# A path may be longer, a list of names is not.
[ -z "$(awk 'length > 96 && !/[/]/' <<<"$out")" ] || fail "doctor --symbols has long lines: $out"
# shellcheck disable=SC2016
[ "$("$1" run --sim --limit 1GiB -- sh -c 'echo "$GPURECLAIM_HARD_LIMIT"' 2>&1)" = 1GiB ] ||
        fail "a program without CUDA shows more than its own output"
exit $failed
