#!/usr/bin/env bash
# Settings that cannot be used: each is named once on stderr, with what is used instead, and the program runs as if it
# had not been set.
#
#   options_test.sh PROCESS        the program `process`; GR_TEST_SHIM is the library, GR_TEST_SIM the simulated device
set -u
. "$(dirname "$0")/../support/fail.sh"

program=$1
program_folder=$(dirname "$1")
folder=$(mktemp -d) || exit 2
trap 'rm -rf "$folder"' EXIT
shown=("$folder/err")
export LD_LIBRARY_PATH=$GR_TEST_SIM HOME=$folder
unset XDG_CONFIG_HOME

# run [NAME=VALUE...]: the program must work; its stderr is in $folder/err.
run() {
        timeout 20 env "$@" "LD_PRELOAD=$GR_TEST_SHIM" "$program" plain >"$folder/out" 2>"$folder/err" ||
                fail "$*: exit status $?"
        [ "$(cat "$folder/out")" = worked ] || fail "$*: printed $(head -c 100 "$folder/out")"
}

# warns NAME=VALUE TEXT...: exactly one line, with the name, the value, and each text; none under GPURECLAIM_LOG=silent.
warns() {
        local setting=$1 text
        shift
        run "GPURECLAIM_$setting"
        [ "$(wc -l <"$folder/err")" -eq 1 ] || fail "$setting: $(wc -l <"$folder/err") lines, expected one"
        for text in "GPURECLAIM_${setting%%=*}" "$@"; do
                grep -qF -e "$text" "$folder/err" || fail "$setting: no \"$text\" in"
        done
        [[ $setting == LOG=* ]] && return
        run "GPURECLAIM_$setting" GPURECLAIM_LOG=silent
        [ ! -s "$folder/err" ] || fail "$setting: not silent"
        run "GPURECLAIM_$setting" GPURECLAIM_LOG=error
        [ ! -s "$folder/err" ] || fail "$setting: a warning at level error"
}

# quiet NAME=VALUE...: nothing to say
quiet() {
        run "$@"
        [ ! -s "$folder/err" ] || fail "$*: there is nothing to say"
}

long=$(printf '%05000d' 7)
for value in abc -1GiB -1 99999999999999GiB 99999999999999999999999 0 '120%' 4XB '0=1GiB,0=x' '0=,' '=' \
        ',' '1 2' 1.5.2GiB 0x10 '50%%' 999=1GiB; do
        for name in HARD_LIMIT SOFT_LIMIT RELEASE_THRESHOLD; do
                # Nothing is a limit for what may be kept, but not for what may be used.
                [ "$name=$value" = SOFT_LIMIT=0 ] || [ "$name=$value" = RELEASE_THRESHOLD=0 ] ||
                        warns "$name=$value" "$value" "using the default"
        done
done
warns REUSE=maybe maybe "using the default, auto" "auto|barrier|poll|sync"
warns "REUSE=$long" "0000..." "using the default, auto"
warns POOL=binz binz "using the default, auto"
for kind in bins none; do
        GPURECLAIM_POOL=$kind warns GRAPH_ARENA=shared "needs GPURECLAIM_POOL=auto or split" "private instead"
done
warns SLEEP=soon soon "using the default, off" "time such as 90s or 10min, from 1s, or off or demand"
warns SLEEP=10ms 10ms "out of range"
for value in demand 10min; do
        GPURECLAIM_NEIGHBOUR=0 warns SLEEP=$value "not with GPURECLAIM_NEIGHBOUR=0"
        quiet GPURECLAIM_SLEEP=$value
        GPURECLAIM_SLEEP=$value warns SLEEP_DIR=/dev/shm "/dev/shm: its files are in memory; not used"
        GPURECLAIM_SLEEP=$value warns SLEEP_DIR=/no/folder "/no/folder: No such file or directory; not used"
        GPURECLAIM_SLEEP=$value warns SLEEP_DIR="$program" "$program: Not a directory; not used"
        quiet GPURECLAIM_SLEEP=$value GPURECLAIM_SLEEP_DIR="$program_folder"
done
warns STATS=2 2 "using the default, 0"
warns LOG=loud loud "using the default, warn"
warns "STATS_FILE=$long" "too long"
warns STATS_FILE=/nonexistent/file "/nonexistent/file"
for name in HARD_LIMIT SOFT_LIMIT RELEASE_THRESHOLD; do
        warns "$name=64GiB" "device 0" "4.000 GiB"
        warns "$name=0=64GiB" "device 0" "4.000 GiB"
done
warns HARD_LIMTI=4GiB "did you mean GPURECLAIM_HARD_LIMIT?"
warns NOTHING_LIKE_IT=1 ignored
run GPURECLAIM_REGION_DIR=/proc/none
grep -q 'warn: device 0: other processes cannot be seen (GPURECLAIM_REGION_DIR=/proc/none: No ' "$folder/err" ||
        fail "a folder that is not there"

# A limit for a device that is not there limits nothing.
warns HARD_LIMIT=7=1GiB "there is no device 7, as the process sees 1"

# The file: named, in XDG_CONFIG_HOME and in HOME; a variable comes first, and a file of all is none.
mkdir -p "$folder/xdg/gpureclaim" "$folder/home/.config/gpureclaim"
config=$folder/xdg/gpureclaim/config
echo GPURECLAIM_POOL=x1 >"$config"
echo GPURECLAIM_POOL=x2 >"$folder/home/.config/gpureclaim/config"
echo GPURECLAIM_POOL=x3 >"$folder/named"
# finds FILE VALUE [NAME=VALUE...]
finds() {
        run "${@:3}"
        [ "$(wc -l <"$folder/err")" -eq 1 ] &&
                grep -qF "warn: $1:1: GPURECLAIM_POOL=$2: not understood" "$folder/err" ||
                fail "${*:3}: $1 is not read"
}
finds "$config" x1 XDG_CONFIG_HOME="$folder/xdg" HOME="$folder/home"
finds "$folder/home/.config/gpureclaim/config" x2 -u XDG_CONFIG_HOME HOME="$folder/home"
finds "$folder/home/.config/gpureclaim/config" x2 XDG_CONFIG_HOME=xdg HOME="$folder/home"
finds "$folder/named" x3 XDG_CONFIG_HOME="$folder/xdg" GPURECLAIM_CONFIG="$folder/named"
quiet XDG_CONFIG_HOME="$folder/xdg" GPURECLAIM_CONFIG=/dev/null
quiet XDG_CONFIG_HOME="$folder" HOME="$folder"
quiet -u HOME -u XDG_CONFIG_HOME
# cannot_read FILE REASON
cannot_read() {
        run GPURECLAIM_CONFIG="$1"
        grep -qF "warn: $1: no option is taken from this file: $2" "$folder/err" || fail "$1: not \"$2\""
}
cannot_read "$folder/none" "No such file or directory"
head -c 20000 /dev/zero | tr '\0' '#' >"$folder/long"
cannot_read "$folder/long" "File too large"
cannot_read "$folder" "Is a directory"
mkfifo "$folder/fifo"
cannot_read "$folder/fifo" "it is a pipe"
printf '\0\nGPURECLAIM_HARD_LIMIT=4MiB\n' >"$folder/zeros"
cannot_read "$folder/zeros" "it is not text"
chmod o+w "$config"
run XDG_CONFIG_HOME="$folder/xdg"
grep -qF "$config: no option is taken from this file: it belongs to another user, or all may write" "$folder/err" ||
        fail "a file that all may write to"
run GPURECLAIM_POOL=x GPURECLAIM_CONFIG="$config"
[ "$(wc -l <"$folder/err")" -eq 2 ] || fail "a bad variable and a bad file: $(wc -l <"$folder/err") lines"
echo GPURECLAIM_HARD_LIMIT=4MiB >"$config"
timeout 20 env GPURECLAIM_CONFIG="$config" "LD_PRELOAD=$GR_TEST_SHIM" "$program" plain >"$folder/out" 2>"$folder/err"
[ $? -eq 99 ] && grep -q 'the hard limit is 4.000 MiB' "$folder/err" || fail "the limit of the file does not hold"
quiet GPURECLAIM_CONFIG="$config" GPURECLAIM_HARD_LIMIT=none

# Two of them are two lines.
run GPURECLAIM_POOL=x GPURECLAIM_STATS=y
[ "$(wc -l <"$folder/err")" -eq 2 ] || fail "two bad values: $(wc -l <"$folder/err") lines"

for value in 1GiB 1024MiB 1e0GiB 1gib '1 GiB' '50%' '0=1GiB,1=25%' none NONE ' 1GiB'; do
        run "GPURECLAIM_HARD_LIMIT=$value"
        [ ! -s "$folder/err" ] || printf 'not a size here: "%s"\n' "$value"
done
quiet GRSIM_DEVICES=2 GPURECLAIM_HARD_LIMIT=1GiB GPURECLAIM_SOFT_LIMIT='50%' GPURECLAIM_RELEASE_THRESHOLD=0=64MiB,1=1GiB
quiet GPURECLAIM_HARD_LIMIT= GPURECLAIM_SOFT_LIMIT= GPURECLAIM_RELEASE_THRESHOLD= GPURECLAIM_REUSE= GPURECLAIM_POOL= \
        GPURECLAIM_STATS= GPURECLAIM_STATS_FILE= GPURECLAIM_LOG=
for mode in auto barrier poll sync BARRIER; do
        quiet GPURECLAIM_REUSE=$mode
done
quiet GPURECLAIM_POOL=none
for kind in auto split; do
        quiet GPURECLAIM_POOL=$kind GPURECLAIM_GRAPH_ARENA=shared
done

# A limit below the program's need: the driver's own code for a full card, and a report that names the limit.
timeout 20 env GPURECLAIM_HARD_LIMIT=4MiB "LD_PRELOAD=$GR_TEST_SHIM" "$program" plain >"$folder/out" 2>"$folder/err"
status=$?
[ $status -eq 99 ] && grep -q ': cuMemAlloc(.*) returned 2$' "$folder/err" || fail "over the limit: exit status $status"
grep -q 'the hard limit is 4.000 MiB' "$folder/err" || fail "over the limit: no report"
for setting in "REGION_DIR=$folder/region" REGION_DIR=/proc/none NEIGHBOUR=0; do
        timeout 20 env GPURECLAIM_GROUP_LIMIT=4MiB "GPURECLAIM_$setting" "LD_PRELOAD=$GR_TEST_SHIM" "$program" plain \
                >"$folder/out" 2>"$folder/err"
        status=$?
        [ $status -eq 99 ] && grep -q ': cuMemAlloc(.*) returned 2$' "$folder/err" ||
                fail "over the group's limit: exit status $status"
        grep -q 'the group limit is 4.000 MiB' "$folder/err" || fail "over the group's limit: no report"
        [ "$setting" != REGION_DIR=/proc/none ] ||
                grep -q 'seen (GPURECLAIM_REGION_DIR=/proc/none: No such file or directory); the' "$folder/err" ||
                fail "over the group's limit: not told why it is alone"
        case $setting in
        NEIGHBOUR=0)
                ! grep -q 'tried for .*(neighbour)' "$folder/err" || fail "over the group's limit: $setting, and asked"
                ;;
        *)
                grep -q 'tried for .* other processes (neighbour); nothing came back' "$folder/err" ||
                        fail "over the group's limit: nobody gives anything"
                ;;
        esac
done
timeout 20 env GPURECLAIM_LOG=silent GPURECLAIM_HARD_LIMIT=4MiB "LD_PRELOAD=$GR_TEST_SHIM" "$program" plain \
        >"$folder/out" 2>"$folder/err"
[[ $(cat "$folder/err") =~ ^[^[:space:]]*/process\.c:[0-9]+:\ cuMemAlloc\(.*\)\ returned\ 2$ ]] ||
        fail "over the limit: not silent"

# Without a stderr, and with one that nobody reads, the program goes on as well.
for redirect in '2>&-' '2>/dev/full' '2> >(exec true)'; do
        for stats in 0 1; do
                out=$(GPURECLAIM_STATS=$stats GPURECLAIM_LOG=debug GPURECLAIM_POOL=x LD_PRELOAD=$GR_TEST_SHIM \
                        bash -c "trap '' PIPE; exec \"\$0\" plain $redirect" "$program")
                status=$?
                [ $status -eq 0 ] && [ "$out" = worked ] || fail "stderr $redirect: exit status $status, \"$out\""
        done
done
exit $failed
