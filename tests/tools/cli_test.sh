#!/bin/bash
# The command line of gpureclaim, against stand-ins for the library and the driver, so that it runs on any machine.
# Usage: cli_test.sh GPURECLAIM FAKE_SHIM FAKE_DRIVER LIBDIR
set -u
. "$(dirname "$0")/../support/fail.sh"
tree=$(mktemp -d) || exit 1
trap 'rm -rf "$tree"' EXIT
mkdir -p "$tree/bin" "$tree/lib/gpureclaim/sim" "$tree/a/lone" "$tree/with blank/bin" "$tree/with blank/lib"
cp "$1" "$tree/bin/gpureclaim"
cp "$1" "$tree/a/lone/gpureclaim"
cp "$1" "$tree/with blank/bin/gpureclaim"
cp "$2" "$tree/lib/libgpureclaim.so"
cp "$2" "$tree/with blank/lib/libgpureclaim.so"
cp "$3" "$tree/lib/gpureclaim/sim/libcuda.so.1"
tree=$(realpath "$tree")
tool=$tree/bin/gpureclaim
shim=$tree/lib/libgpureclaim.so
sim=$tree/lib/gpureclaim/sim
unset LD_PRELOAD LD_LIBRARY_PATH CUDA_VISIBLE_DEVICES FAKE_DRIVER
# The command is instrumented in a sanitizer build, the stand-in before it is not.
export ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}verify_asan_link_order=0
for name in $(compgen -e GPURECLAIM_); do unset "$name"; done
export XDG_CONFIG_HOME=$tree/config

# want STATUS COMMAND...: runs it into $out and $err.
want() {
        local wanted=$1 status
        shift
        out=$("$@" 2>"$tree/err")
        status=$?
        err=$(cat "$tree/err")
        what="$*"
        [ "$status" -eq "$wanted" ] || fail "$what: status $status, not $wanted"$'\n'"$out"$'\n'"$err"
}
# has TEXT PATTERN: a glob, anywhere in the text.
has() {
        # shellcheck disable=SC2053
        [[ $1 == *$2* ]] || fail "$what: no \"$2\" in:"$'\n'"$1"
}
is() {
        [ "$1" = "$2" ] || fail "$what: is \"$1\", not \"$2\""
}
# One clear line on standard error, nothing else.
mistake() {
        want "$1" "${@:3}"
        is "$out" ""
        is "$(wc -l <"$tree/err")" 1
        has "$err" "gpureclaim: "
        has "$err" "$2"
}

# Help and version
want 0 "$tool" help
has "$out" "run a program under gpureclaim"
is "$err" ""
all_help=$out
want 0 "$tool" --help
is "$out" "$all_help"
want 0 "$tool" --version
has "$out" "gpureclaim [0-9]*.[0-9]"
read -ra commands < <(sed -n 's/^  \([a-z]*\)  .*/\1/p' <<<"$all_help" | tr '\n' ' ')
last="limit threshold reclaim sleep wait report leaks options doctor help"
[[ " ${commands[*]} " == *" run record status "*" $last " ]] || is "${commands[*]}" all
for command in "${commands[@]}"; do
        want 0 "$tool" help "$command"
        has "$out" "Usage: gpureclaim $command"
        has "$out" "Exit status: "
        is "$(awk 'length > 120' <<<"$out")" ""
        # Hidden flags are not shown.
        [[ $out == *probe* ]] && is "$out" "no hidden flag"
        text=$out
        want 0 "$tool" "$command" --help
        is "$out" "$text"
        want 0 "$tool" "$command" -h
        is "$out" "$text"
        # Each flag that is shown is one; each that is not is named.
        while read -r flag value; do
                [ -n "$value" ] && mistake 2 "$command: $flag needs a value" "$tool" "$command" "$flag"
                [ -n "$value" ] || mistake 2 "$command: $flag=x: takes no value" "$tool" "$command" "$flag=x"
        done < <(sed -n 's/^  \(--[a-z]*\)\( [A-Z]*\)\{0,1\}  .*/\1\2/p' <<<"$text" | grep -v '(')
        mistake 2 "$command: unknown flag --xyzzy; see gpureclaim help $command" "$tool" "$command" --xyzzy
        mistake 2 "$command: unknown flag --xyzzy; see gpureclaim help $command" "$tool" "$command" --xyzzy=1
        mistake 2 "$command: unknown flag -z" "$tool" "$command" -z
done
want 0 "$tool" help run
for flag in --limit --soft-limit --threshold --reuse --pool --stats --stats-file --log --sim; do
        has "$out" "  $flag"
done
has "$out" "GPURECLAIM_HARD_LIMIT"

want 0 "$tool" help status
has "$out" "Reserved is what a process has from the driver"

# Mistakes
mistake 2 "no command given" "$tool"
mistake 2 "did you mean run?" "$tool" rnu -- true
mistake 2 "did you mean doctor?" "$tool" help doktor
mistake 2 "unknown command xyzzy; see gpureclaim help" "$tool" xyzzy
mistake 2 "unknown flag --limit" "$tool" --limit 4GiB
mistake 2 "did you mean --limit?" "$tool" run --limt 4GiB -- true
mistake 2 "did you mean --limit?" "$tool" run --hard-limit=4GiB -- true
mistake 2 "unknown flag --xyzzy" "$tool" run --xyzzy -- true
mistake 2 "--limit needs a value" "$tool" run --limit
mistake 2 "--limit needs a value" "$tool" run --limit -- true
mistake 2 "--limit 4XiB: not understood (expected size" "$tool" run --limit 4XiB -- true
mistake 2 "--limit -4GiB: out of range" "$tool" run --limit -4GiB -- true
mistake 2 "--limit 0: out of range" "$tool" run --limit=0 -- true
mistake 2 "--limit 8: out of range (expected size from 2MiB" "$tool" run --limit=8 -- true
mistake 2 "unknown flag --lim; it could be one of --limit, --limit-includes" "$tool" run --lim 1GiB -- true
mistake 2 "--no-stats=1: takes no value" "$tool" run --no-stats=1 -- true
mistake 2 "unknown flag --no-limit" "$tool" run --no-limit -- true
mistake 2 "--stats-file $tree/none/x: No such file" "$tool" run --stats-file "$tree/none/x" -- true
for flag in --stats-file --trace; do
        mistake 2 "$flag $tree: Is a directory" "$tool" run $flag "$tree" -- true
done
mkdir "$tree/77%p"
want 0 "$tool" run --trace "$tree/77%%p/x" --sleep-dir "$tree" -- true
mistake 2 "--sleep-dir $tree/none: No such file" "$tool" run --sleep-dir "$tree/none" -- true
mistake 2 "--limit : not understood" "$tool" run --limit= -- true
mistake 2 "--reuse fast: not understood (expected auto|barrier|poll|sync)" "$tool" run --reuse fast -- true
mistake 2 "--stats 2: not understood" "$tool" run --stats=2 -- true
mistake 2 "no program given" "$tool" run
mistake 2 "no program given" "$tool" run --stats --
mistake 2 "did you mean --json?" "$tool" status --jsn
mistake 2 "status: now: takes flags only" "$tool" status --json now
mistake 2 "limit: needs a process id and a size" "$tool" limit
mistake 2 "limit: 5: takes one process id and one size" "$tool" limit 1 4GiB 5
mistake 2 "limit: python3: not a process id" "$tool" limit python3 4GiB
mistake 2 "limit: 0: not a process id" "$tool" limit 0 4GiB
mistake 2 "limit: 4194305: not a process id" "$tool" limit 4194305 4GiB
mistake 2 "limit: 4XiB: not understood" "$tool" limit 1 4XiB
mistake 2 "threshold: : not understood" "$tool" threshold 1 ""
mistake 2 "reclaim: needs a process id or --all" "$tool" reclaim
mistake 2 "reclaim: 2: takes one process id" "$tool" reclaim 1 2
mistake 2 "reclaim: needs a process id or --all" "$tool" reclaim --all 1
mistake 2 "sleep: needs a process id" "$tool" sleep
mistake 2 "sleep: x: takes one process id" "$tool" sleep 1 x
mistake 2 "sleep: x: not a process id" "$tool" sleep x
mistake 2 "reclaim: x: not a process id" "$tool" reclaim x --rung sync
mistake 2 "reclaim: --rung fast: not understood" "$tool" reclaim --rung fast 1
mistake 2 "reclaim: --rung needs a value" "$tool" reclaim 1 --rung
mistake 2 "wait: no program given" "$tool" wait --free 1GiB
mistake 2 "wait: needs --free SIZE" "$tool" wait -- true
mistake 2 "wait: --free 50%: not understood" "$tool" wait --free 50% -- true
mistake 2 "wait: --free none: not understood" "$tool" wait --free=none true
mistake 2 "wait: --free 0: not understood" "$tool" wait --free 0 true
mistake 2 "wait: --gpu first: not understood" "$tool" wait --free 1GiB --gpu first true
mistake 2 "wait: --timeout 90: not understood" "$tool" wait --free 1GiB --timeout 90 true
mkdir "$tree/none"
export GPURECLAIM_REGION_DIR=$tree/none
mistake 1 "limit: process 4194303 does not run under gpureclaim" "$tool" limit 4194303 4GiB
mistake 1 "limit: process 4194303 does not run under gpureclaim" "$tool" limit -- 4194303 4GiB
mistake 1 "reclaim: process 4194303 does not run under gpureclaim" "$tool" reclaim 4194303 --rung=sync
want 0 "$tool" status
is "$out" "No process of yours runs under gpureclaim on a GPU here."
want 0 env GPURECLAIM_REGION_DIR="$tree/gone" "$tool" status
has "$out" "No process of yours runs under gpureclaim on a GPU here."
has "$out" "GPURECLAIM_REGION_DIR=$tree/gone: No such file"
want 0 "$tool" options
has "$out" "What each means, and its flag: gpureclaim help run"
want 0 "$tool" status --json
is "$(tr -d ' \n' <<<"$out")" '{"schema":1,"other_files":0,"gpus":[]}'
: >"$tree/no-folder"
export GPURECLAIM_REGION_DIR=$tree/no-folder
for call in status metrics "limit 1 4GiB" "reclaim --all"; do
        # shellcheck disable=SC2086
        mistake 1 "${call%% *}: the shared memory in $tree/no-folder cannot be read: Not a directory" "$tool" $call
done
unset GPURECLAIM_REGION_DIR
if [ -d "/dev/shm/gpureclaim-$(id -u)" ]; then
        want 0 "$tool" options
        has "$out" "GPURECLAIM_REGION_DIR          /dev/shm/gpureclaim-$(id -u)"
fi
mistake 2 "did you mean --json?" "$tool" options --jsn
mistake 2 "takes flags only" "$tool" options json
mistake 2 "exclude each other" "$tool" options --json --markdown
mistake 2 "exclude each other" "$tool" options --json --config
mistake 2 "did you mean --symbols?" "$tool" doctor --smybols
mistake 2 "takes one command only" "$tool" help run run
mistake 127 "/nonexistent/app: No such file" "$tool" run -- /nonexistent/app
mistake 127 "no-such-program-anywhere: " "$tool" run no-such-program-anywhere
mistake 126 "/etc/passwd: Permission denied" "$tool" run -- /etc/passwd
want 3 "$tool" record -o "$tree/%p" -- sh -c 'echo "$LD_PRELOAD $GPURECLAIM_TRACE"; exit 3'
is "$out" "$shim $tree/%%p.%p.trace"
has "$err" "record: no trace was written"
want 143 "$tool" record sh -c 'kill $$'
mistake 2 "record: --output needs a value" "$tool" record -o
mistake 2 "record: --output '': no name for the files" "$tool" record -o '' echo started
mistake 2 "record: --output '$tree/': no name" "$tool" record -o "$tree/" echo started
mistake 2 "record: --output $tree/gone/p: No such file" "$tool" record -o "$tree/gone/p" echo started
mistake 2 "record: --backtrace foo: not understood (expected off" "$tool" record --backtrace foo echo started
mistake 127 "record: no-such-program-anywhere: " "$tool" record no-such-program-anywhere
mistake 126 "record: /etc/passwd: Permission denied" "$tool" record /etc/passwd
[ -e "$4/libgpureclaim.so" ] ||
        mistake 125 "record: libgpureclaim.so is neither beside this program nor in $4" \
                "$tree/a/lone/gpureclaim" record true
mistake 2 "unknown command rnu  [31m;" "$tool" $'rnu\n\e[31m'
[ -e "$4/libgpureclaim.so" ] ||
        mistake 125 "libgpureclaim.so is neither beside this program nor in $4" "$tree/a/lone/gpureclaim" run -- true
mistake 125 "has a blank or colon in it" "$tree/with blank/bin/gpureclaim" run -- true

# Running: environment, arguments, status
want 0 "$tool" run --limit 4GiB --soft-limit=3GiB --threshold 64MiB --reuse=poll --pool none --stats \
        --stats-file /tmp/s.%p.json --log debug -- env
for line in HARD_LIMIT=4GiB SOFT_LIMIT=3GiB RELEASE_THRESHOLD=64MiB REUSE=poll POOL=none STATS=1 \
        STATS_FILE=/tmp/s.%p.json LOG=debug; do
        has "$out" "GPURECLAIM_$line"
done
has "$out" "LD_PRELOAD=$shim"
[[ $out == *LD_LIBRARY_PATH* ]] && is "LD_LIBRARY_PATH set" "not set"
want 0 "$tool" run -- env
[[ $out == *GPURECLAIM_* ]] && is "$out" "no variable that no flag asked for"
want 0 env GPURECLAIM_HARD_LIMIT=2GiB GPURECLAIM_LOG=info "$tool" run --limit 4GiB -- env
has "$out" "GPURECLAIM_HARD_LIMIT=4GiB"
has "$out" "GPURECLAIM_LOG=info"
want 0 "$tool" run --stats=0 -- env
has "$out" "GPURECLAIM_STATS=0"
want 0 "$tool" run --stats --no-stats --no-proactive -- env
has "$out" "GPURECLAIM_STATS=0"
has "$out" "GPURECLAIM_PROACTIVE=0"
want 0 "$tool" run --sim --no-sim -- env
[[ $out == *LD_LIBRARY_PATH* ]] && is "--sim --no-sim" "no simulated device"
want 0 "$tool" run --limit 4GiB --verbose -- printenv GPURECLAIM_LOG
is "$out" info
has "$err" "gpureclaim: run: LD_PRELOAD=$shim"
has "$err" "gpureclaim: run: GPURECLAIM_HARD_LIMIT=4.000 GiB (environment)"
want 0 "$tool" run --verbose --log debug -- printenv GPURECLAIM_LOG
is "$out" debug

# A limit for a GPU that is not there; the driver is the stand-in, which has two.
mistake 2 "GPURECLAIM_HARD_LIMIT: there is no GPU 7, as the program would see 2; not started" \
        "$tool" run --sim --limit 4GiB,7=1GiB -- echo started
mistake 2 "GPURECLAIM_GROUP_LIMIT: there is no GPU 2," \
        env GPURECLAIM_GROUP_LIMIT=2=1GiB "$tool" record --sim echo started
want 0 "$tool" run --sim --limit 1=1GiB -- echo started
for driver in crash no-device; do
        want 0 env FAKE_DRIVER=$driver "$tool" run --sim --limit 7=1GiB -- echo started # not known
        is "$out" started
done

# A limit that cannot be read, in a variable or in the file: nothing is started.
for command in run record; do
        for limit in HARD_LIMIT GROUP_LIMIT PINNED_LIMIT; do
                want 2 env GPURECLAIM_$limit=4XB "$tool" $command -- echo started
                is "$out" ""
                has "$err" "GPURECLAIM_$limit=4XB: not understood"
                has "$err" "gpureclaim: $command: not started, as a limit would not hold"
        done
done
want 0 env GPURECLAIM_SOFT_LIMIT=4XB "$tool" run -- echo started
mkdir -p "$tree/config/gpureclaim"
config=$tree/config/gpureclaim/config
echo GPURECLAIM_HARD_LIMIT=4XB >"$config"
want 2 "$tool" run -- echo started
has "$err" "$config:1: GPURECLAIM_HARD_LIMIT=4XB: not understood"
want 0 "$tool" run --limit 4GiB -- echo started
want 0 env GPURECLAIM_CONFIG=/dev/null "$tool" run -- echo started
want 2 env GPURECLAIM_CONFIG="$tree/nothing" "$tool" run -- echo started
has "$err" "$tree/nothing: no option is taken from this file: No such file"
has "$err" "; with GPURECLAIM_CONFIG=/dev/null no file is read"
echo GPURECLAIM_HARD_LIMIT 4GiB >"$config"
want 2 "$tool" run -- echo started
has "$err" "$config:1: not understood (expected NAME=VALUE)"
want 2 "$tool" run --config <(echo GPURECLAIM_HARD_LIMIT=4GiB) -- echo started
has "$err" "it is a pipe, which only one process could read"
# A folder that cannot be searched holds no file of the user's.
as_other=(setpriv --reuid=65534 --regid=65534 --clear-groups env -u XDG_CONFIG_HOME HOME="$tree/closed")
mkdir "$tree/closed"
if [ "$(id -u)" -eq 0 ] && chmod 0755 "$tree" && "${as_other[@]}" test -x "$tool" 2>/dev/null; then
        chmod 0700 "$tree/closed"
        want 0 "${as_other[@]}" "$tool" run -- echo started
        is "$err" ""
        mkdir -m 0755 -p "$tree/closed/.config/gpureclaim"
        install -m 0600 "$config" "$tree/closed/.config/gpureclaim/config"
        chmod 0755 "$tree/closed" "$tree/closed/.config"
        want 2 "${as_other[@]}" "$tool" run -- echo started
        has "$err" "no option is taken from this file: Permission denied"
fi
echo GPURECLAIM_HARD_LIMIT=3GiB >"$config"
want 0 "$tool" run -- env
[[ $out == *GPURECLAIM_* ]] && is "$out" "no variable of the file: the library reads it"
want 0 "$tool" options
has "$out" "GPURECLAIM_HARD_LIMIT * 3.000 GiB * (file)"
has "$out" "GPURECLAIM_CONFIG * $config (default)"
want 0 "$tool" options --json
has "$out" '"variable": "GPURECLAIM_HARD_LIMIT", "source": "file"'
# The program may be in another folder when it reads the file.
cd "$tree/config" || exit 1
want 0 "$tool" run --config gpureclaim/config -- printenv GPURECLAIM_CONFIG
is "$out" "$config"
want 0 env GPURECLAIM_CONFIG=gpureclaim/config "$tool" run -- printenv GPURECLAIM_CONFIG
is "$out" "$config"
cd "$OLDPWD" || exit 1
# What it prints as a file is one, with each value the default.
"$tool" options --config | sed 's/^#GPU/GPU/' >"$config"
want 0 "$tool" options
is "$err" ""
is "$(grep -c '(file)' <<<"$out")" "$(grep -c '^GPU.*=.' "$config")"
is "$(grep -c ^GPU "$config")" "$(($(wc -l <<<"$out") - 2))"
# With more rights than the caller: neither the environment nor the file.
setuid() {
        cp "$1" "$2" && chown 65534 "$2" && chmod 4755 "$2"
}
if [ "$(id -u)" -eq 0 ] && setuid "$(command -v id)" "$tree/id" && [ "$("$tree/id" -u)" -eq 65534 ]; then
        chmod 0755 "$tree" && setuid "$tool" "$tree/bin/privileged"
        out=$(GPURECLAIM_POOL=bins "$tree/bin/privileged" options 2>&1)
        # AddressSanitizer's search for leaks traces its own process, which such a one does not allow.
        [[ $? -eq 0 || $out == *"LeakSanitizer does not work"* ]] || is "$out" "exit status 0"
        [[ $out == *"(file)"* || $out == *"(environment)"* ]] && is "$out" "defaults only"
fi
rm -r "$tree/config"

# Programs that the library cannot be loaded into, by what the head of the file says.
elf() { # FILE LOADER CLASS: a program of this processor with this loader, or none
        head -c 64 /bin/true >"$1"
        python3 - "$1" "$2" "$3" <<'PY'
import struct, sys
name, loader, bits = sys.argv[1:]
data = bytearray(open(name, "rb").read())
data[4] = int(bits)
data[32:40] = struct.pack("<Q", 64)
data[54:58] = struct.pack("<HH", 56, 1)
part = struct.pack("<IIQQQQQQ", 3 if loader else 1, 4, 120, 0, 0, len(loader) + 1, len(loader) + 1, 1)
open(name, "wb").write(data + part + loader.encode() + b"\0")
PY
        chmod +x "$1"
}
# warns_of PROGRAM TEXT: the warning, before the attempt to run it
warns_of() {
        "$tool" run -- "$1" >"$tree/out" 2>"$tree/err"
        err=$(cat "$tree/err") what="run $1"
        has "$err" "gpureclaim: run: warning: gpureclaim has no effect in $2"
}
if command -v python3 >/dev/null; then
        elf "$tree/static" "" 2
        elf "$tree/musl" /lib/ld-musl-x86_64.so.1 2
        elf "$tree/other" /lib/ld-linux.so.2 1
        warns_of "$tree/static" "$tree/static itself: it is linked statically"
        warns_of "$tree/musl" "$tree/musl itself: it uses the C library musl"
        warns_of "$tree/other" "$tree/other itself: it is for another kind of processor"
        printf '#!/usr/bin/env -S A=b %s\n' "$tree/static" >"$tree/script" && chmod +x "$tree/script"
        warns_of "$tree/script" "$tree/static itself: it is linked statically"
        (cd "$tree" && PATH=:$PATH && warns_of static "static itself: it is linked statically") || failed=1
fi
if [ "$(id -u)" -eq 0 ] && setuid /bin/true "$tree/setuid"; then
        warns_of "$tree/setuid" "$tree/setuid itself: it has more rights than its caller"
fi
mkfifo -m 0755 "$tree/fifo"
want 126 timeout 10 "$tool" run -- "$tree/fifo"
want 0 "$tool" run -- true
is "$err" ""

# Colours: only for a terminal that knows them.
if command -v script >/dev/null; then
        bold=$'\e[1m'
        # coloured WANTED [NAME=VALUE...]: whether what a terminal gets is coloured
        coloured() {
                local got=no
                [[ $(env "${@:2}" script -qec "$tool help run; $tool rnu; $tool doctor" /dev/null </dev/null) == \
                        *"$bold"Usage*"${bold%1m}1;31m"gpureclaim:*"${bold%1m}32m"ok* ]] && got=yes
                is "colours with ${*:2}: $got" "colours with ${*:2}: $1"
        }
        coloured yes TERM=xterm NO_COLOR=
        coloured no TERM=xterm NO_COLOR=1
        [[ $(TERM=xterm "$tool" help run; "$tool" rnu 2>&1) != *$'\e'* ]] || fail "colours without a terminal"
        plain=$(TERM=xterm NO_COLOR=1 script -qec "$tool help; $tool rnu; $tool doctor" /dev/null </dev/null)
        [[ $plain != *$'\e'* ]] ||
                fail "colours in spite of NO_COLOR"
        coloured no TERM=dumb NO_COLOR=
        coloured no -u TERM NO_COLOR=
fi
want 0 env LD_PRELOAD="$tree/lib/libgpureclaim.so" "$tool" run -- printenv LD_PRELOAD
is "$out" "$shim"
cp "$shim" "$tree/lib/other.so"
want 0 env LD_PRELOAD="$tree/lib/other.so" "$tool" run -- printenv LD_PRELOAD
is "$out" "$shim:$tree/lib/other.so"
want 0 "$tool" run --sim -- printenv LD_LIBRARY_PATH
is "$out" "$sim"
want 1 env CUDA_VISIBLE_DEVICES=3 "$tool" run --sim -- printenv CUDA_VISIBLE_DEVICES # one GPU, whatever is real
want 0 env CUDA_VISIBLE_DEVICES=1 GRSIM_DEVICES=2 "$tool" run --sim -- printenv CUDA_VISIBLE_DEVICES
want 0 env LD_LIBRARY_PATH=/opt/x "$tool" run --sim -- printenv LD_LIBRARY_PATH
is "$out" "$sim:/opt/x"
want 0 "$tool" run printf '<%s>' --limit -- 'a b' ''
is "$out" "<--limit><--><a b><>"
want 42 "$tool" run -- sh -c 'exit 42'
want 143 "$tool" run -- bash -c 'kill -TERM $$'
ln -s "$tool" "$tree/a/lone/link"
want 0 "$tree/a/lone/link" run -- printenv LD_PRELOAD
is "$out" "$shim"

# Options
want 0 "$tool" options
has "$out" "GPURECLAIM_HARD_LIMIT * none * (default)"
is "$err" ""
want 0 env GPURECLAIM_HARD_LIMIT=4GiB,1=25% GPURECLAIM_LOG=loud GPURECLAIM_LIMT=1 "$tool" options
has "$out" "GPURECLAIM_HARD_LIMIT * 4.000 GiB,1=25% (environment)"
has "$out" "GPURECLAIM_LOG * warn * (default)"
has "$err" "GPURECLAIM_LOG=loud: not understood"
has "$err" "unknown variable GPURECLAIM_LIMT ignored"
want 0 env GPURECLAIM_HARD_LIMIT=4GiB,1=12.5% GPURECLAIM_STATS_FILE='a"\b.json' "$tool" options --json
has "$out" '"hard_limit": {"variable": "GPURECLAIM_HARD_LIMIT", "source": "environment"'
has "$out" '{"all": {"bytes": 4294967296}, "devices": {"1": {"percent": 12.5}}}'
has "$out" '"value": "a\\"\\\\b.json"'
if command -v python3 >/dev/null; then
        printf '%s' "$out" | python3 -c 'import json, sys; assert json.load(sys.stdin)["schema"] == 1' || failed=1
fi
want 0 "$tool" options --markdown
# shellcheck disable=SC2016
has "$out" '| `GPURECLAIM_REUSE` | `--reuse` | auto\\|barrier\\|poll\\|sync | auto |'
is "$(printf '%s\n' "$out" | wc -l)" "$(($("$tool" options | wc -l) + 1))"
if [ -w /dev/full ]; then
        "$tool" help >/dev/full 2>"$tree/err" && is "status 0 on a full disk" "1"
        has "$(cat "$tree/err")" "cannot write"
        "$tool" doctor --sim >/dev/full 2>"$tree/err" && is "status 0 of the doctor on a full disk" "1"
        is "$(cat "$tree/err")" "gpureclaim: cannot write to standard output"
fi

# The doctor. The stand-in library hooks nothing, and the doctor must notice.
want 1 "$tool" doctor --sim
has "$out" "driver    ok    $sim/libcuda.so.1, CUDA 12.4"
has "$out" "GPU 0     ok    Fake device A, 1.000 GiB"
has "$out" "GPU 1     ok    Fake device B, 2.000 GiB"
has "$out" "fences    note  no cuCtxRecordEvent"
has "$out" "library   ok    $shim, version fake"
has "$out" "hooks     note  3 not in this driver:
                cuNotInThisDriver cuOld_v2_ptsz cuOld_v3_ptsz"
has "$out" "hooks     note  2 newer than this library, neither served nor counted:
                cuInit_v3 cuOld_v5_ptsz"
has "$out" "hooks     fail  1 not taken over:
                cuInit"
has "$out" "would not work here: the library does not take over"
want 1 env FAKE_DRIVER=no-device "$tool" doctor --sim
has "$out" "driver    fail  cuInit: CUDA_ERROR_NO_DEVICE (100): no GPU is visible"
has "$out" "would not work here: there is no usable CUDA driver"
want 1 env FAKE_DRIVER=crash "$tool" doctor --sim
has "$out" "driver    fail  crashed: Aborted"
has "$out" "would not work here: there is no usable CUDA driver"
want 1 env CUDA_VISIBLE_DEVICES= LD_PRELOAD="$tree/lib/other.so" GPURECLAIM_REUSE=fast "$tool" doctor --sim
has "$out" 'visible   note  CUDA_VISIBLE_DEVICES="" hides all GPUs'
has "$out" "preload   note  LD_PRELOAD has other libraries, which come after gpureclaim: $tree/lib/other.so"
has "$out" "options   note  GPURECLAIM_REUSE=fast: not understood"
echo 'not a library' >"$shim"
want 1 "$tool" doctor --sim
has "$out" "library   fail  $shim: "
cp "$2" "$shim"
rm "$sim/libcuda.so.1"
if ! [ -e "$4/libgpureclaim.so" ]; then
        mistake 125 "the simulated device is neither" "$tool" run --sim -- true
        want 1 "$tool" doctor --sim
        has "$out" "would not work here: the simulated device is missing"
        rm "$shim"
        want 1 "$tool" doctor
        has "$out" "would not work here: "
        has "$out" "library   fail  libgpureclaim.so is neither"
fi

# report: of a trace made by hand. The last line is cut off, as where the program was killed.
trace=$tree/trace.csv
cat >"$trace" <<'CSV'
# a note
Thread,Time,Action,Pointer,Size,Stream
1,1000000000,allocate,0x1000,1048576,0
1,1001000000,allocate,0x200000,2097152,0
2,1002000000,allocate,0x400000,2097152,0
1,1003000000,free,0x1000,1048576,0
1,1003000000,free,0x9999,1,0
1,1011000000,free,0x200000,2097152,0
1,1500000000,allocate,0x600000,4096,0
1,1600000000,allocate,0x7000
CSV
truncate -s -1 "$trace"
want 0 "$tool" report "$trace"
has "$out" "$trace: 6 operations by 2 threads in 0.500 s"
has "$out" "allocated: 5.004 MiB in 4 blocks, 1.0 times the peak"
has "$out" "half of the freed blocks lived for at most 10.000 ms, a tenth for at least 10.000 ms"
has "$out" "peak of live memory: 5.000 MiB in 3 blocks, at 0.002 s
    4.000 MiB in 2 blocks of 2.000 MiB, the oldest allocated at 0.001 s
    1.000 MiB in 1 block of 1.000 MiB, the oldest allocated at 0.000 s
  live at the end: 2.004 MiB in 2 blocks
    2.000 MiB in 1 block of 2.000 MiB, the oldest allocated at 0.002 s
    4.000 KiB in 1 block of 4.000 KiB, the oldest allocated at 0.500 s"
has "$out" "not counted: 2 lines"
want 0 "$tool" report --csv "$trace"
is "$out" "Thread,Time,Action,Pointer,Size,Stream
1,0,allocate,0x1000,1048576,0x0
1,1000000,allocate,0x200000,2097152,0x0
2,2000000,allocate,0x400000,2097152,0x0
1,3000000,free,0x1000,1048576,0x0
1,11000000,free,0x200000,2097152,0x0
1,500000000,allocate,0x600000,4096,0x0"
mistake 2 "report: --csv and --json exclude each other" "$tool" report --csv --json "$trace"
want 0 "$tool" report --json "$trace"
has "$out" '"lifetime_median_ns": 10000000,'
has "$out" '"bytes": 5242880,'
has "$out" '{"block_bytes": 4096, "blocks": 1, "oldest_ns": 500000000}'
[ -z "$(command -v python3)" ] || python3 -m json.tool <<<"$out" >"$tree/json" || fail "$what: no JSON"
mistake 2 "report: --html and --json exclude each other" "$tool" report --html --json "$trace"
mistake 2 "report: --json and --pytorch exclude each other" "$tool" report --pytorch --json "$trace"
mistake 2 "report: --json and --perfetto exclude each other" "$tool" report --perfetto --json "$trace"
want 0 "$tool" report --perfetto "$trace"
has "$out" '{"name": "live", "ph": "C", "ts": 1000.000, "pid": 1, "args": {"bytes": 3145728}},'
[ -z "$(command -v python3)" ] || python3 -m json.tool <<<"$out" >"$tree/json" || fail "$what: no JSON"
echo "Thread,Time,Action,Pointer,Size,Stream" >"$trace"
want 0 "$tool" report "$trace"
has "$out" "$trace: 0 operations by 0 threads"
has "$out" "peak of live memory: 0 B in 0 blocks"
mistake 1 "$tree/none: " "$tool" report "$tree/none"
echo "allocate" >>"$trace"
mistake 1 "$trace: line 2: not a trace of allocations" "$tool" report "$trace"
: > "$trace"
mistake 1 "$trace: not a trace of allocations" "$tool" report "$trace"
mistake 2 "report takes one FILE or more" "$tool" report
mistake 2 "report --html takes one FILE" "$tool" report --html "$trace" "$trace"
mistake 2 "leaks takes one PID or FILE or more" "$tool" leaks
mistake 2 "leaks --json takes one PID or FILE;" "$tool" leaks --json 1 2
mistake 1 "leaks: 0: not a process id" "$tool" leaks 0
mistake 1 "leaks: 99999999999: not a process id" "$tool" leaks 99999999999
(exec true) & gone=$!
wait $gone
mistake 1 "leaks: process $gone: there is none" "$tool" leaks $gone
mistake 1 "leaks: process $$ does not note where it allocates" "$tool" leaks $$
printf 'GRTRACE\0' >"$tree/x.trace"
printf 'GRORIGN\0' >"$tree/x.origins"
mistake 1 "$tree/x.trace: a trace; to read it: gpureclaim report $tree/x.trace" "$tool" leaks "$tree/x.trace"
mistake 1 "$tree/x.origins: a file of GPURECLAIM_BACKTRACE; to read it: gpureclaim leaks" \
        "$tool" report "$tree/x.origins"
# The format by its flag, by its name or by the file's ending; a file that cannot be read leaves what was there.
printf '%s\n' Thread,Time,Action,Pointer,Size 1,1,allocate,0x1000,7 >"$tree/one.trace"
for format in csv html json perfetto; do
        want 0 "$tool" report --$format "$tree/one.trace"
        shown=$out
        want 0 "$tool" report --format $format "$tree/one.trace"
        is "$out" "$shown"
        want 0 "$tool" report -o "$tree/page.$format" "$tree/one.trace"
        is "$out$(<"$tree/page.$format")" "$shown"
done
"$tool" report --pytorch "$tree/one.trace" >"$tree/page.pickle"
"$tool" report --format pytorch -o - "$tree/one.trace" | cmp - "$tree/page.pickle" || fail "--format pytorch"
want 0 "$tool" report "$tree/one.trace"
shown=$out
want 0 "$tool" report --format summary -o "$tree/page.html" "$tree/one.trace"
is "$(<"$tree/page.html")" "$shown"
mistake 1 "$tree/none/x: " "$tool" report -o "$tree/page.html" "$tree/none/x"
is "$(<"$tree/page.html")" "$shown"
mistake 1 "report: --output $tree: Is a directory" "$tool" report -o "$tree" "$tree/one.trace"
# What cannot be written whole leaves what was there, too, and no recording is written over.
(trap '' XFSZ; ulimit -f 1; "$tool" report --html -o "$tree/page.html" "$tree/one.trace" >"$tree/out" 2>&1) &&
        fail "half a page"
is "$(<"$tree/out")" "gpureclaim: report: --output $tree/page.html: File too large"
is "$(<"$tree/page.html")" "$shown"
is "$(compgen -G "$tree/page.html?*")" ""
ln -s one.trace "$tree/link"
one=$(<"$tree/one.trace")
for lost in one.trace link x.trace x.origins; do
        mistake 1 "report: --output $tree/$lost: a recording, which would be lost" \
                "$tool" report -o "$tree/$lost" "$tree/none" "$tree/one.trace"
done
is "$(<"$tree/one.trace")" "$one"
ln -sf page.new "$tree/link"
want 0 "$tool" report --format summary -o "$tree/link" "$tree/one.trace"
is "$(<"$tree/page.new")" "$shown"
mistake 2 "report: --format pdf: not understood" "$tool" report --format pdf "$tree/one.trace"
mistake 2 "report: --csv and --json exclude each other" "$tool" report --format csv --json "$tree/one.trace"
# Several: a report of each. One that cannot be read keeps none from being told.
for n in 1 2; do
        printf '%s\n' Thread,Time,Action,Pointer,Size,Stream "1,1,allocate,0x1000,$n,0" >"$tree/several.$n"
done
want 0 "$tool" report "$tree"/several.*
first=$("$tool" report "$tree/several.1")
is "$out" "$first"$'\n\n'"$("$tool" report "$tree/several.2")"
has "$out" "peak of live memory: 2 B"
want 1 "$tool" report "$tree/several.1" "$tree/none"
has "$out" "$first"
has "$err" "$tree/none: "
want 1 "$tool" report "$tree/none" "$tree/several.1"
is "$out" "$first"

exit $failed
