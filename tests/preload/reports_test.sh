#!/usr/bin/env bash
# What the library writes about a program, wherever that goes, neither ends nor stops the program.
#
#   reports_test.sh PROCESS COMMAND SECURE FAILING_KERNEL
#
# PROCESS is the program `process`, COMMAND is gpureclaim, SECURE is PROCESS linked with the library, for a run with
# another user's rights; GR_TEST_SHIM is the library, GR_TEST_SIM the simulated device.
set -u
. "$(dirname "$0")/../support/fail.sh"

program=$1 command=$2 secure=$3 failing=$4
folder=$(mktemp -d) || exit 2
trap 'rm -rf "$folder"' EXIT
shown=("$folder/err")
export LD_LIBRARY_PATH=$GR_TEST_SIM

# run MODE [NAME=VALUE...]: as a program that leaves all signals alone; output in $folder/out, status in $status.
status=0
run() {
        local mode=$1
        shift
        timeout 20 env --default-signal "$@" "LD_PRELOAD=$GR_TEST_SHIM" "$program" "$mode" >"$folder/out"
        status=$?
}

# worked WHAT: the program ended well and said so.
worked() {
        [ $status -eq 0 ] || fail "$1: exit status $status"
        [ "$(cat "$folder/out")" = worked ] || fail "$1: printed $(head -c 100 "$folder/out")"
}

# count ACTION TRACE: how many operations of the trace are of that kind.
count() {
        env -u LD_LIBRARY_PATH "$command" report --csv "$2" | grep -c ",$1,"
}

# Standard error: a pipe whose reader has gone, and a full one whose reader takes nothing.
mkfifo "$folder/fifo"
exec 3<>"$folder/fifo"
exec 4>"$folder/fifo"
exec 3<&-
run plain GPURECLAIM_STATS=1 GPURECLAIM_LOG=debug 2>&4
: >"$folder/err"
worked "nobody left to read the summary"
exec 4>&- 3<>"$folder/fifo"
dd if=/dev/zero bs=4096 count=16 status=none >&3
run plain GPURECLAIM_STATS=1 GPURECLAIM_LOG=debug 2>&3
worked "the summary's reader takes nothing"
exec 3<&-

# A folder named from where the program began, which goes elsewhere: the others look for it there.
mkdir -p "$folder/begin/elsewhere"
program=$(realpath "$program") command=$(realpath "$command")
cd "$folder/begin" || exit 2
run moved GPURECLAIM_REGION_DIR=region 2>"$folder/err"
cd - >/dev/null || exit 2
worked "a program that goes elsewhere"
[ -d "$folder/begin/region" ] && [ ! -e "$folder/begin/elsewhere/region" ] || fail "its region's folder went with it"

# The shortest names that files can have.
cd "$folder/begin" || exit 2
run plain GPURECLAIM_TRACE=t GPURECLAIM_STATS_FILE=s 2>"$folder/err"
cd - >/dev/null || exit 2
worked "files of one letter"
[ "$(count allocate "$folder/begin/t")" -eq 40 ] && [ -s "$folder/begin/s" ] ||
        fail "files of one letter: not both are there"

# The same where the whole path is a byte longer than paths can be: then it is as it was named.
(
        cd "$folder" || exit 2
        for _ in $(seq 50); do
                part=$(head -c $((4089 - ${#PWD} > 251 ? 250 : 4088 - ${#PWD})) /dev/zero | tr '\0' d)
                mkdir "$part" && cd "$part" || exit 2
                [ ${#PWD} -lt 4089 ] || break
        done
        timeout 20 env GPURECLAIM_REGION_DIR=region "LD_PRELOAD=$GR_TEST_SHIM" "$program" plain \
                >"$folder/out" 2>"$folder/err"
        status=$?
        [ ${#PWD} -eq 4089 ] && [ $status -eq 0 ] && [ "$(cat "$folder/out")" = worked ] && [ -d region ]
) || fail "a program far down"

# A program without standard input: the first file that is opened gets its number.
run plain GPURECLAIM_GROUP_LIMIT=1GiB "GPURECLAIM_STATS_FILE=$folder/stats" 2>"$folder/err" <&-
worked "no standard input"
[ ! -s "$folder/err" ] && grep -q '"group_limit_bytes":1073741824' "$folder/stats" ||
        fail "no standard input: $(cat "$folder/stats")"

# The summary tells how each card is in the end.
run two-cards GRSIM_DEVICES=2 "GPURECLAIM_STATS_FILE=$folder/stats" 2>"$folder/err"
worked "two cards"
python3 - "$folder/stats" <<'PY' || fail "two cards: $(cat "$folder/stats")"
import json, sys

devices = json.load(open(sys.argv[1]))["devices"]
rest = [d["device_total_bytes"] - d["device_free_bytes"] - d["reserved_bytes"] for d in devices]
sys.exit(rest != [0, 0])
PY

# Also after a pool has given memory back without a call.
run ordered GPURECLAIM_HARD_LIMIT=64MiB GPURECLAIM_LOG=silent "GPURECLAIM_STATS_FILE=$folder/stats" 2>"$folder/err"
worked "a pool that gives memory back"
python3 - "$folder/stats" <<'PY' || fail "a pool that gives memory back: $(cat "$folder/stats")"
import json, sys

device = json.load(open(sys.argv[1]))["devices"][0]
sys.exit(device["device_free_bytes"] + device["reserved_bytes"] != device["device_total_bytes"])
PY

# However a process ends, the figures of its last second but one are in the file, all of them.
for signal in KILL TERM INT; do
        rm -f "$folder"/killed*
        env --default-signal "GPURECLAIM_STATS_FILE=$folder/killed" "LD_PRELOAD=$GR_TEST_SHIM" "$program" waits \
                >"$folder/out" 2>"$folder/err" &
        for ((i = 0; i < 1000; i++)); do
                grep -q '"frees":40,.*"pinned_allocs":1,' "$folder/killed" 2>/dev/null && break
                sleep 0.01
        done
        kill -$signal $!
        wait $! 2>/dev/null
        status=$?
        [ $((status - 128)) -eq "$(kill -l $signal)" ] || fail "ended by $signal: exit status $status"
        [ "$(ls "$folder"/killed*)" = "$folder/killed" ] &&
                python3 -c 'import json, sys; sys.exit(json.load(open(sys.argv[1]))["frees"] != 40)' "$folder/killed" ||
                fail "ended by $signal: $(ls "$folder"/killed*) $(cat "$folder/killed")"
done

# One who reads the file while the program works has a whole one, and the next one later; its rights stay.
(umask 077 && echo old >"$folder/works")
env "GPURECLAIM_STATS_FILE=$folder/works" "LD_PRELOAD=$GR_TEST_SHIM" "$program" works >"$folder/out" 2>"$folder/err" &
python3 - "$folder/works" <<'PY' || fail "a file that is read: $(ls -l "$folder"/works*)"
import json, os, sys, time

frees, until = [], time.monotonic() + 30
while len(set(frees)) < 3 and time.monotonic() < until:
    with open(sys.argv[1]) as file:
        while os.stat(sys.argv[1]).st_ino == os.fstat(file.fileno()).st_ino and time.monotonic() < until:
            time.sleep(0.01)
        text = file.read()
    frees += [json.loads(text)["frees"]] if text != "old\n" else []
sys.exit(len(set(frees)) < 3 or frees != sorted(frees) or os.stat(sys.argv[1]).st_mode & 0o777 != 0o600)
PY
kill $! && wait $! 2>/dev/null

# A file that has another name besides, and the one to which a link leads, stay where they are.
echo old >"$folder/file" && ln -sf "$folder/file" "$folder/link" && ln -f "$folder/file" "$folder/twin"
for name in link twin; do
        run plain "GPURECLAIM_STATS_FILE=$folder/$name" 2>"$folder/err"
        worked "statistics through a $name"
        [ -L "$folder/link" ] && grep -q '"frees":' "$folder/file" && echo old >"$folder/file" ||
                fail "statistics through a $name: $(ls -l "$folder")"
done

# The file is in the folder where the program began to use CUDA, wherever it goes later.
cd "$folder/begin" || exit 2
run moved GPURECLAIM_STATS_FILE=stats 2>"$folder/err"
cd - >/dev/null || exit 2
worked "statistics of a program that goes elsewhere"
[ -s "$folder/begin/elsewhere/stats" ] && [ ! -e "$folder/begin/stats" ] || fail "the statistics went with the program"

# How much pinned memory is kept, of one block that is freed twenty times, and how often the driver was asked for one
# that could have been.
while read -r setting cached allocs; do
        run plain "$setting" "GPURECLAIM_STATS_FILE=$folder/stats" 2>"$folder/err"
        worked "pinned memory, $setting"
        grep -q "\"host_cached_bytes\":$cached,.*\"pinned_allocs\":$allocs," "$folder/stats" ||
                fail "pinned memory, $setting: $(cat "$folder/stats")"
done <<'END'
GPURECLAIM_PINNED_CACHE=none 3145728 1
GPURECLAIM_PINNED_CACHE=3MiB 3145728 1
GPURECLAIM_PINNED_CACHE=2MiB 0 20
GPURECLAIM_PINNED_CACHE=0 0 0
GPURECLAIM_POOL=none 0 0
END
run plain GPURECLAIM_PINNED_LIMIT=2MiB GPURECLAIM_LOG=silent 2>"$folder/err"
[ $status -eq 99 ] && grep -q 'cuMemHostAlloc(.*) returned 2$' "$folder/err" ||
        fail "more pinned memory than the limit: exit status $status"

# A kernel that fails: told once, by the first call that says so, which answers as without the library. Other errors of
# calls are the program's own affair.
# Nobody asked for it without these options.
timeout 20 env GRSIM_FAULT=cuCtxSynchronize:2+=700 "LD_PRELOAD=$GR_TEST_SHIM" "$failing" wait >/dev/null 2>"$folder/err"
[ -s "$folder/err" ] && fail "failing kernel, unasked: $(<"$folder/err")"
line='failing_kernel\+0x[0-9a-f]+' ago='blocks?, [0-9.]+ s ago'
while read -r first fault pool told; do
        env "GRSIM_FAULT=$fault" "$failing" "$first" >"$folder/native"
        timeout 20 env "GRSIM_FAULT=$fault" GPURECLAIM_POOL="$pool" GPURECLAIM_BACKTRACE=full \
                "LD_PRELOAD=$GR_TEST_SHIM" "$failing" "$first" >"$folder/out" 2>"$folder/err"
        status=$?
        [ $status -eq 0 ] && cmp -s "$folder/native" "$folder/out" || fail "failing kernel, $fault: $(<"$folder/out")"
        if [ "$told" = nothing ]; then
                grep -q "a kernel failed" "$folder/err" && fail "failing kernel, $fault: told"
                continue
        fi
        told="${told/ by / (CUDA error ${fault##*=}), first told by }"
        [ "$(wc -l <"$folder/err")" -le 8 ] && [ "$(grep -c "a kernel failed" "$folder/err")" -eq 1 ] &&
                grep -qF "warn: device 0: a kernel failed: $told; no more work" "$folder/err" &&
                grep -q "  this process: 8.000 MiB in use" "$folder/err" &&
                grep -q "  allocated by: failing_kernel+0x.*: 8.000 MiB in 1 block" "$folder/err" &&
                grep -qE "freed last, by what allocated it: $line: 4.000 MiB in 1 $ago; $line: 63.000 MiB in 63 $ago$" \
                        "$folder/err" ||
                fail "failing kernel, $fault"
done <<'END'
wait cuCtxSynchronize:2+=700 auto illegal address by cuCtxSynchronize
wait cuCtxSynchronize:2+=714 none hardware stack error by cuCtxSynchronize
launch cuLaunchKernel:3+=715 bins illegal instruction by cuLaunchKernel
fill cuMemsetD8Async:*=716,cuCtxSynchronize:2+=716 auto misaligned address by cuMemsetD8Async
stream cuStreamSynchronize:*=717 split invalid address space by cuStreamSynchronize
event cuEventSynchronize:*=718 auto invalid program counter by cuEventSynchronize
wait cuCtxSynchronize:2+=719 auto launch failed by cuCtxSynchronize
wait cuCtxSynchronize:2+=710 auto nothing
wait cuCtxSynchronize:2+=713 auto nothing
launch cuLaunchKernel:3+=720 auto nothing
END

# A FIFO that nobody has open.
for option in TRACE STATS_FILE; do
        run plain "GPURECLAIM_$option=$folder/fifo" 2>"$folder/err"
        worked "$option into a FIFO"
        grep -qE "GPURECLAIM_$option: cannot write $folder/fifo: (it is no regular file|no process reads)" \
                "$folder/err" || fail "$option: no warning"
        # Mapped memory of the simulated device lies in a file, too.
        (ulimit -f 1 && run plain GPURECLAIM_POOL=bins "GPURECLAIM_$option=$folder/file" 2> >(cat >"$folder/err") &&
                exit $status)
        status=$?
        worked "$option beyond the largest file"
done

# A summary that cannot be written, for which there is no room.
run plain GPURECLAIM_STATS_FILE=/dev/full 2>"$folder/err"
worked "no room for the summary"
grep -q 'GPURECLAIM_STATS_FILE: writing /dev/full failed: No space left on device$' "$folder/err" ||
        fail "no room for the summary: no warning"

# No report takes the number of a standard stream that the program does not have.
run plain "GPURECLAIM_TRACE=$folder/in.trace" "GPURECLAIM_STATS_FILE=$folder/in.json" <&- 2>"$folder/err"
worked "no standard input"
[ "$(count free "$folder/in.trace")" -gt 0 ] && [ -s "$folder/in.json" ] || fail "no standard input: no report"

# A report is whole, and each process writes its own.
rm -f "$folder"/*.trace
run looked-up "GPURECLAIM_TRACE=$folder/%p.trace" 2>"$folder/err"
[ $status -eq 0 ] || fail "two children: exit status $status"
files=("$folder"/*.trace)
[ ${#files[@]} -eq 2 ] || fail "two children: the files ${files[*]}"
for file in "${files[@]}"; do
        env -u LD_LIBRARY_PATH "$command" report --csv "$file" >"$folder/csv" || fail "two children: no trace"
        [ "$(count allocate "$file")" -eq 40 ] || fail "two children: $(count allocate "$file") allocations"
        ! grep -qavE '^(Thread,Time,Action,Pointer,Size,Stream|[0-9]+,[0-9]+,(allocate|free),0x[0-9a-f]+,[0-9]+,0x0)$' \
                "$folder/csv" ||
                fail "two children: lines of another form in $file"
        grep -q "^$(basename "$file" .trace),.*,free," "$folder/csv" ||
                fail "two children: none of its own process in $file"
done

# Memory whose rows have a pitch is in it as a whole.
run errno "GPURECLAIM_TRACE=$folder/trace" 2>"$folder/err"
[ $status -eq 0 ] && [ "$(count 'allocate,.*,102400' "$folder/trace")" -eq 2 ] ||
        fail "memory with a pitch: status $status"

# What is refused is no free.
run freed-twice "GPURECLAIM_TRACE=$folder/trace" 2>"$folder/err"
[ $status -eq 0 ] && [ "$(count free "$folder/trace")" -eq "$(count allocate "$folder/trace")" ] &&
        ! env -u LD_LIBRARY_PATH "$command" report "$folder/trace" | grep -q 'not counted' ||
        fail "memory freed twice: status $status"

# Where a trace is written, threads that are told to end find the library's calls no worse than the driver's.
run cancel "GPURECLAIM_TRACE=$folder/trace" 2>"$folder/err"
[ $status -eq 0 ] && grep -qx 'ended inside a call: 0' "$folder/out" ||
        fail "a thread with a trace: status $status, $(cat "$folder/out")"
[ "$(count free "$folder/trace")" -eq 4040 ] || fail "a thread with a trace: $(count free "$folder/trace") frees"

# So they do where they are the first to use CUDA and open the trace, which is complete at the end.
run cancel-first "GPURECLAIM_TRACE=$folder/trace" 2>"$folder/err"
[ $status -eq 0 ] && grep -qx 'ended inside a call: 0' "$folder/out" ||
        fail "a first thread with a trace: status $status, $(cat "$folder/out")"
[ "$(count free "$folder/trace")" -eq 80 ] || fail "a first thread with a trace: $(count free "$folder/trace") frees"

# A thread that could not be made once is made later.
run no-thread GPURECLAIM_DECAY=0 GPURECLAIM_RELEASE_THRESHOLD=16MiB \
        "GPURECLAIM_STATS_FILE=$folder/stats" 2>"$folder/err"
worked "no thread for a moment"
python3 - "$folder/stats" <<'PY' || fail "no thread for a moment: the threshold is not kept"
import json, sys

cached = json.load(open(sys.argv[1]))["devices"][0]["cached_bytes"]
sys.exit("%d MiB are cached" % (cached >> 20) if cached > 16 << 20 else 0)
PY

# The environment of a caller with fewer rights than the program's is not obeyed.
if [ -z "$secure" ] || [ "$(id -u)" -ne 0 ] || ! command -v setpriv >/dev/null; then
        echo "not root, or no setpriv: a set-uid program was not tried"
else
        chmod 755 "$folder"
        cp "$secure" "$folder/secure" && chmod 4755 "$folder/secure"
        mkdir -m 777 "$folder/open"
        for id in 65534 0; do
                setpriv --reuid=$id --regid=$id --clear-groups \
                        env GPURECLAIM_TRACE="$folder/open/$id" GPURECLAIM_NONE=1 \
                        "$folder/secure" plain >"$folder/out" 2>"$folder/err"
                status=$?
                worked "set-uid, as user $id"
        done
        if [ ! -e "$folder/open/0" ]; then
                fail "set-uid: its own user is not obeyed"
        elif [ -e "$folder/open/65534" ]; then
                fail "set-uid: another user is obeyed"
        fi
fi
exit $failed
