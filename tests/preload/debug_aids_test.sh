#!/usr/bin/env bash
# The debug aids find planted errors, and report nothing else.
#
#   debug_aids_test.sh DEBUG_AIDS POOL
#
# DEBUG_AIDS is the program of that name, POOL a value of GPURECLAIM_POOL; GR_TEST_SHIM is the library, GR_TEST_SIM the
# simulated device.
set -u
. "$(dirname "$0")/../support/fail.sh"

program=$(realpath "$1") pool=$2
folder=$(mktemp -d) || exit 2
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 2
export TMPDIR=$folder LD_LIBRARY_PATH=$GR_TEST_SIM
unset XDG_RUNTIME_DIR
shown=(out err)

# run MODE SETTING...: under the library, with the settings.
run() {
        timeout 60 env "${@:2}" "GPURECLAIM_POOL=$pool" GPURECLAIM_STATS_FILE=stats \
                "LD_PRELOAD=$GR_TEST_SHIM" "$program" "$1" >out 2>err
        status=$?
        [ $status -eq 0 ] || fail "$pool, $*: exit status $status"
}

# reported WHAT PATTERN: one report, which matches, and which is counted.
reported() {
        [ "$(grep -c ' warn: ' err)" -eq 1 ] || fail "$pool, $1: not one report"
        grep -qE -- "$2" err || fail "$pool, $1: not reported"
        grep -q '"debug_reports": *1\b' stats || fail "$pool, $1: not counted"
        grep -q misuse err && fail "$pool, $1: memory is used that is gone"
}

quiet() {
        [ ! -s err ] || fail "$pool, $1: something is reported"
}

guard=GPURECLAIM_GUARD=1 keep=GPURECLAIM_QUARANTINE=16MiB fill=GPURECLAIM_FILL=0xAA
timeout 60 "$program" clean >native || fail "natively"
address='at 0x[0-9a-f]+, the first at'
behind="GPURECLAIM_GUARD: 4 bytes were written behind a block of 1000 bytes $address \+1000; found"
at='allocated [0-9.]+ s ago by thread [0-9]+'
for also in A=B $fill $keep; do
        run overrun $guard $also
        reported "overrun, $also" "$behind when it was freed; $at\$"
done
run overrun $guard GPURECLAIM_BACKTRACE=full
reported "overrun, origin" "$behind when it was freed; $at: debug_aids\+0x[0-9a-f]+ < debug_aids\+0x[0-9a-f]+"
run in-kernel $guard GRSIM_LATENCY=cuMemsetD8Async=20ms
reported in-kernel "$behind when it was freed; $at\$"
run in-order $guard
reported in-order "$behind when it was freed in stream order; $at\$"
run far $guard
reported far "1 bytes were written behind a block of 3145728 bytes at 0x[0-9a-f]+, the first at \+3146239;"
run at-exit $guard
reported at-exit "$behind as the process ended; $at\$"
run at-end $guard
reported at-end "$behind as its context ended; $at\$"
# Either the free or the end of the process reports it, and the other one does not.
slow=GRSIM_LATENCY=cuMemcpyDtoHAsync=300ms
run beside-exit $guard $slow
[ "$(grep -cE "$behind" err)" -eq 1 ] || fail "$pool, beside-exit: not one report"
# What is looked at stays, also where the pool keeps nothing. (After a read that fails the block goes at once.)
once=GRSIM_FAULT=cuMemcpyDtoHAsync_v2:2=999
run beside-capture $guard $slow
reported beside-capture "$behind as the process ended; $at\$"
run beside-kept GPURECLAIM_QUARANTINE=1MiB $slow $once
reported beside-kept "^gpureclaim: .* to a freed block of 524288 bytes $address \+100; found as the process ended"
# A context ends only when its block has been looked at.
run beside-destroy $guard $slow
reported beside-destroy "$behind when it was freed; $at\$"

freed="GPURECLAIM_QUARANTINE: 8 bytes were written to a freed block of 4000 bytes $address \+100; found"
for also in A=B $fill $guard; do
        run after $keep $also
        reported "after, $also" "$freed when it left the quarantine; $at, freed [0-9.]+ s ago\$"
done
run after $keep GPURECLAIM_BACKTRACE=full
reported "after, origin" "$freed when it left the quarantine; $at, freed [0-9.]+ s ago: debug_aids\+0x"
run after-exit $keep
reported after-exit "$freed as the process ended; $at, freed"
run after-end $keep
reported after-end "$freed as its context ended; $at, freed"

run unwritten $fill
quiet unwritten
grep -v ': aa aa .. aa aa$' out | grep -q . && fail "$pool, unwritten: not filled"

for settings in "$fill" "$guard" "$keep" "$fill $guard $keep"; do
        # shellcheck disable=SC2086
        run clean $settings
        quiet "clean, $settings"
        cmp -s native out || { diff native out >err; fail "$pool, clean, $settings: not as natively"; }
        # shellcheck disable=SC2086
        run full GRSIM_MEMORY=96MiB GPURECLAIM_LOG=silent $settings
        grep -q "about as often again" out || fail "$pool, full, $settings"
done
run full GRSIM_MEMORY=96MiB GPURECLAIM_LOG=info GPURECLAIM_WAIT=1ms $guard
for what in 'an allocation of .* failed' 'waiting up to'; do
        [ "$(grep -c "$what" err)" -eq 2 ] || fail "$pool, full: not two of '$what'"
done
grep -q '"failures": *2\b' stats || fail "$pool, full: not two failures"
# What is kept out of use is there for another process, and for memory that the pool does not serve.
run neighbour GRSIM_MEMORY=96MiB GRSIM_SHARED="$folder/card" GRSIM_LATENCY=cuMemcpyDtoHAsync=200us ${keep/16/96} \
        GPURECLAIM_LOG=silent GPURECLAIM_NEIGHBOUR_WAIT=10s
run managed GRSIM_MEMORY=96MiB ${keep/16/96} GPURECLAIM_LOG=silent
# (The simulated device ends a program that writes to memory that the driver has.)
[ "$pool" = none ] || for mode in overrun far at-exit after after-end; do
        run $mode A=B
        quiet "$mode without the aids"
done
run clean GPURECLAIM_QUARANTINE=64
grep -q 'GPURECLAIM_QUARANTINE=64: out of range (expected size from 1MiB' err ||
        fail "a quarantine of 64 bytes: not said"
exit $failed
