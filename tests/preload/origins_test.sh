#!/usr/bin/env bash
# GPURECLAIM_BACKTRACE and gpureclaim leaks: what programs with planted leaks have, and which lines are named for it.
#
#   origins_test.sh ORIGINS COMMAND PLUGIN PLUGIN INTERPRETER PYTHON_PROGRAM
#
# ORIGINS is the program of that name, COMMAND is gpureclaim, the plugins are those of origins_plugin.c, INTERPRETER is
# origins_interpreter.c; GR_TEST_SHIM is the library, GR_TEST_SIM the simulated device.
set -u
. "$(dirname "$0")/../support/fail.sh"

origins=$(realpath "$1") command=$(realpath "$2") plugin=$(realpath "$3") other=$(realpath "$4")
interpreter=$(realpath "$5") program=$(realpath "$6")
source=${program%.py}.c source_name=${source##*/}
folder=$(mktemp -d) || exit 2
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 2
export TMPDIR=$folder
unset XDG_RUNTIME_DIR
shown=(said err)

# run SETTING PROGRAM [ARGUMENT...]: with the setting, "NAME=value"; output in "out", errors in "err", its id in $pid.
pid=0
run() {
        LD_LIBRARY_PATH=$GR_TEST_SIM timeout 60 env --default-signal GRSIM_MEMORY=32GiB "$1" \
                "LD_PRELOAD=$GR_TEST_SHIM" sh -c 'echo $$ >pid; exec "$@"' sh "${@:2}" >out 2>err
        status=$?
        pid=$(cat pid)
        "$command" leaks --native "$pid" >said 2>>err
}

# has WHAT TEXT...: the texts are in the report, each on a line below the one before.
has() {
        local text what=$1 at=0 found
        shift
        for text; do
                found=$(tail -n +$((at + 1)) said | grep -nF -m 1 -- "$text") || {
                        fail "$what: not in the report: $text"
                        return
                }
                at=$((at + ${found%%:*}))
        done
}

line() {
        grep -n "$1" "$source" | head -n 1 | cut -d: -f1
}

# By function and line, after kill -9.
run GPURECLAIM_BACKTRACE=full "$origins" killed
[ $status -eq 137 ] || fail "killed: exit status $status"
has killed "live: 10.009 MiB in 13 blocks of 2 origins" \
        "10.000 MiB in 10 blocks" "the oldest allocated at 0." "first (" "plant (" "main (" "8.789 KiB in 3 blocks" \
        "second ("
grep -q "first (.*/$source_name:$(line "first's line"))" said &&
        grep -q "second (.*/$source_name:$(line "second's line"))" said || fail "killed: not by their lines"
grep -q libgpureclaim said && fail "killed: the library's own functions are named"
[ "$(stat -c %a "gpureclaim.$pid.origins")" = 600 ] || fail "killed: others may read the file"
# The same by its file; as JSON; and without a tool that names lines.
"$command" leaks "gpureclaim.$pid.origins" >said || fail "killed: by the file"
has "killed, again" ": +0 B and +0 blocks"
PATH=/nowhere "$command" leaks "$pid" >said
has "killed, no tools" "first (origins+0x" "second (origins+0x"
# Several: each by itself. One that is not there keeps none from being shown.
"$command" leaks "gpureclaim.$pid.origins" nothing "$pid" >said 2>err && fail "several: one is not there"
has several "process $pid, " "first (" "second (" "process $pid, " "first (" "second ("
grep -q "nothing: No such file" err || fail "several: not said which one is not there"
"$command" leaks --json "$pid" | python3 -c '
import json, sys
about = json.load(sys.stdin)
assert about["bytes"] == 10 * 2**20 + 9000 and about["blocks"] == 13 and about["sample_bytes"] == 0, about
assert about["program"].endswith("origins killed"), about["program"]
first, second = about["origins"]
assert first["frames"][0]["function"] == "first" and first["bytes"] == 10 * 2**20, first
assert second["last_look_blocks"] == 3 and second["frames"][0]["line"] == int(sys.argv[1]), second
' "$(line "second's line")" || fail "killed: as JSON"

# What another user has put there is read only by its name.
if [ "$(id -u)" -eq 0 ]; then
        chown 65534 "gpureclaim.$pid.origins"
        "$command" leaks "$pid" >said 2>err && fail "another user's: read by the process"
        grep -q "is another user's" err && [ "$(wc -l <err)" -eq 1 ] || fail "another user's: not said"
        "$command" leaks "gpureclaim.$pid.origins" >said || fail "another user's: not read by its name"
        chown 0 "gpureclaim.$pid.origins"
fi

# Files of which any byte may be wrong, or the end missing: an error, or nonsense, but no crash.
python3 -c '
import random, subprocess, sys
command, name = sys.argv[1:]
random.seed(1)
with open(name, "rb") as file:
    head = file.read(16384)
    file.seek(int.from_bytes(head[16:24], "little"))
    blocks = file.read(4096)
for i in range(300):
    one, two = bytearray(head), bytearray(blocks)
    for _ in range(20):
        one[random.choice((random.randrange(100), random.randrange(4096, 6000)))] = random.choice((0, 1, 127, 255))
        two[random.randrange(500)] = random.randrange(256)
    if i % 3:
        one[:24] = head[:24]
    with open("wrong", "wb") as file:
        file.write(one[:random.randrange(len(one))] if i % 10 == 0 else one)
        if i % 10:
            file.seek(int.from_bytes(head[16:24], "little"))
            file.write(two)
    done = subprocess.run([command, "leaks", "wrong"], env={"PATH": "/nowhere"}, capture_output=True)
    assert done.returncode in (0, 1), (i, done)
' "$command" "gpureclaim.$pid.origins" || fail "files that are wrong"

# A file without its end: what is missing is said; the exit status is that of report.
blocks_at=$(od -An -tu8 -j16 -N8 "gpureclaim.$pid.origins")
head -c $((blocks_at + 100)) "gpureclaim.$pid.origins" >wrong
"$command" leaks wrong >said || fail "cut: exit status"
grep -q "not here: up to 1[0-9] blocks, as the end of the file is missing" said || fail "cut: not said"
head -c 4112 "gpureclaim.$pid.origins" >wrong # 16 bytes of its first record
"$command" leaks wrong 2>err && fail "cut in the records: exit status 0"
grep -q "wrong: damaged, or its end is missing" err || fail "cut in the records: not said"

# A library whose name is a list of arguments for the tools that name lines: they are not given it.
mkdir tools
printf '#!/bin/sh\necho "$*" >>%s/arguments\n' "$folder" >tools/addr2line
chmod +x tools/addr2line
cp "$origins" @list
python3 -c '
import sys
with open(sys.argv[1], "rb") as file:
    head = file.read(16384)
    file.seek(int.from_bytes(head[16:24], "little"))
    blocks = file.read(4096)
with open("list", "wb") as file:
    file.write(head.replace(sys.argv[2].encode() + bytes(1), b"@list" + bytes(len(sys.argv[2]) - 4)))
    file.seek(int.from_bytes(head[16:24], "little"))
    file.write(blocks)
' "gpureclaim.$pid.origins" "$origins"
PATH=$folder/tools:$PATH "$command" leaks list >said
has "list" "first (@list+0x"
grep -qs " @list" arguments && fail "list: given to the tool"

# While it runs, with what was added between two looks. The file goes when the process exits.
mkfifo fifo
LD_LIBRARY_PATH=$GR_TEST_SIM GPURECLAIM_BACKTRACE=full LD_PRELOAD=$GR_TEST_SHIM "$origins" until <fifo >out 2>err &
pid=$!
exec 3>fifo
until grep -q begun out; do sleep 0.05; done
"$command" leaks "$pid" >said
has until "10.000 MiB in 10 blocks" "the oldest allocated at 0." "first (" "second ("
grep -q "s ago), by thread $pid\$" said || fail "until: nothing about its age"
grep -q "last look" said && fail "until: there was no look before"
printf xx >&3
until [ "$(grep -c more out)" -eq 2 ]; do sleep 0.05; done
"$command" leaks "$pid" >said
has "until, later" "10.000 MiB in 10 blocks" "2.000 MiB in 2 blocks" "first (" "main (" "second ("
has "until, later" ": +0 B and +0 blocks" "ago: +2.000 MiB and +2 blocks"
# Where the same line has its blocks by another of its addresses now.
for i in 3 4; do
        printf m >&3
        until [ "$(grep -c more out)" -eq $i ]; do sleep 0.05; done
        "$command" leaks "$pid" >said
done
has "until, moved" "4.000 KiB in 1 block" "kept_by_thread (" "moved ("
grep -q "4.000 KiB in 1 block; .*: +0 B and +0 blocks" said || fail "until, moved: it has not grown"
# Blocks that are younger than the look, and a last look after it, as the clock of the day was set back.
python3 -c '
import os, sys
file = os.open(sys.argv[1], os.O_RDWR)
at = int.from_bytes(os.pread(file, 8, 16), "little")
for slot in range(64):
    os.pwrite(file, (10**17).to_bytes(8, "little"), at + slot * 40 + 16)
os.pwrite(file, (2**62).to_bytes(8, "little"), 80)
' "$(find . -name "*.$pid.origins")"
"$command" leaks "$pid" >said
has "until, young" "the oldest allocated at 100000000.000 s (0 s ago), by"
grep -q "last look" said && fail "until, young: growth since a look that is still to come"
"$command" leaks "$pid" >said
has "until, young, again" " s ago: +0 B and +0 blocks"
exec 3>&-
wait $pid
[ -z "$(find . -name "*.origins" -name "*.$pid.*")" ] || fail "until: the file is still there"

# Kept where the user named it; and as record names it.
run "GPURECLAIM_BACKTRACE_FILE=$folder/kept.%p" env GPURECLAIM_BACKTRACE=full "$origins" until </dev/null
"$command" leaks "kept.$pid" >said || fail "kept: no file"
has kept "in 13 blocks"
"$command" record --sim --backtrace full -o it "$origins" until </dev/null >out 2>err
file=$(sed -n 's/^gpureclaim: recorded \(it.*origins\); to read it: gpureclaim leaks it.*/\1/p' err)
trace=${file%.origins}.trace
"$command" report "$trace" >said || fail "record: no report"
has report "live at the end: 10.009 MiB in 13 blocks" "live at the end, by origin: 10.009 MiB in 13 blocks of 2" \
        "10.000 MiB in 10 blocks" "the oldest allocated at 0." "first (" "plant (" "8.789 KiB in 3 blocks" "second ("
"$command" leaks "$file" >said || fail "record: no file is named"
has record "in 13 blocks" "first ("
grep -q "last look" said && fail "report: it counts as a look"
"$command" report "$trace" >said
grep -q "last look" said && fail "report: it tells growth"
"$command" report --csv "$trace" | grep -q origin && fail "report: origins in CSV"
# Those that the trace's own process has written; with times as the trace has them: at 24 the
# file has the process, at 32 when it began.
python3 -c '
import json, pickle, shutil, subprocess, sys
command, trace, origins = sys.argv[1:]
def report(at, change):
    with open(origins, "rb") as file:
        file.seek(at)
        word = int.from_bytes(file.read(8), "little") + change
    shutil.copy(trace, "changed.trace")
    shutil.copy(origins, "changed.origins")
    with open("changed.origins", "r+b") as file:
        file.seek(at)
        file.write(word.to_bytes(8, "little"))
    return json.loads(subprocess.check_output([command, "report", "--json", "changed.trace"]))
whole = report(32, 100 * 10**9)
by_origin = whole["end_by_origin"]
assert [by_origin["bytes"], by_origin["blocks"], len(by_origin["origins"])] == [10 * 2**20 + 9000, 13, 2], by_origin
assert by_origin["origins"][0]["frames"][0]["function"] == "first", by_origin
for name in "oldest_ns", "newest_ns":
    at = by_origin["origins"][0][name] - 100 * 10**9
    assert abs(at) < whole["end"]["at_ns"] + 10**10, (name, whole)
at_peak = whole["peak_by_origin"]
assert [at_peak["bytes"], at_peak["blocks"]] == [whole["peak"]["bytes"], whole["peak"]["blocks"]], whole
assert at_peak["origins"][0]["frames"][0]["function"] == "first", at_peak
snapshot = pickle.loads(subprocess.check_output([command, "report", "--pytorch", "changed.trace"]))
live = [block for segment in snapshot["segments"] for block in segment["blocks"] if block["requested_size"] > 0]
assert [sum(block["size"] for block in live), len(live)] == [whole["end"]["bytes"], whole["end"]["blocks"]], live
frame = max(live, key=lambda block: block["size"])["frames"][0]
assert frame["name"].split()[0] == "first" and "origins" in frame["filename"], frame
assert (frame["name"] == "first") == (frame["line"] > 0), frame
assert "end_by_origin" not in report(32, -10**12)
assert "end_by_origin" not in report(24, 1)
' "$command" "$trace" "$file" || fail "report: by origin"
cp "$trace" "$folder/alone"
"$command" report "$folder/alone" >said || fail "report: another name"
grep -q "by origin" said && fail "report: origins of another file"

# In the first folder that can be written to.
mkdir "$folder/run"
for folders in "$folder/run /nowhere $folder/run" "/nowhere $folder/run $folder/run" "/nowhere /nowhere /tmp"; do
        read -r XDG_RUNTIME_DIR TMPDIR found <<<"$folders"
        export XDG_RUNTIME_DIR
        run GPURECLAIM_BACKTRACE=full "$origins" killed
        rm "$found/gpureclaim.$pid.origins" || fail "folders: not in $found"
        has "folders, $found" "in 13 blocks of 2 origins"
done
unset XDG_RUNTIME_DIR
TMPDIR=$folder

# Threads, a child, and a stack that is not the thread's.
for pool in auto bins none; do
        run GPURECLAIM_BACKTRACE=full env GPURECLAIM_POOL=$pool "$origins" threads
        has "threads, $pool" "live: 80.000 KiB in 20 blocks of 1 origin" "by several threads" "kept_by_thread (" \
                "in_thread ("
done
run GPURECLAIM_BACKTRACE=full "$origins" fork
has fork "in 13 blocks of 2 origins" "first (" "second ("
run GPURECLAIM_BACKTRACE=full "$origins" coroutine
has coroutine "in 1 block of 1 origin" "first ("
# An address that no function covers is not given the name of the nearest one.
if [ "$(uname -m)" = x86_64 ]; then
        run GPURECLAIM_BACKTRACE=full "$origins" unnamed
        has unnamed "first (" "      origins+0x" "main ("
fi
run GPURECLAIM_BACKTRACE=full "$origins" nowhere
[ $status -eq 137 ] || fail "nowhere: exit status $status"
has nowhere "in 1 block of 1 origin" "first (" "first_and_leave ("
run GPURECLAIM_BACKTRACE=full "$origins" edge
[ $status -eq 137 ] || fail "edge: exit status $status"
has edge "in 1 block of 1 origin" "first (" "first_and_leave ("
run GPURECLAIM_BACKTRACE=full "$origins" contexts
has contexts "live: 2.930 KiB in 1 block of 1 origin" "second ("
run GPURECLAIM_BACKTRACE=full "$origins" many
has many "in 2000 blocks of 1 origin" "many ("
[ "$(od -A n -t u8 -j 64 -N 8 "gpureclaim.$pid.origins")" -lt 25000 ] || fail "many: places are not used again"

# A library where another one was: each is named as it was.
run GPURECLAIM_BACKTRACE=full "$origins" unload "$plugin" "$other"
has unload "in 2 blocks of 2 origins" "planted_" "work (" "planted_" "work ("
grep -q "planted_in_a" said && grep -q "planted_in_b" said || fail "unload: not both are named"
grep -q "the same address" out || echo "the libraries had different addresses: that they are told apart was not tried"

run GPURECLAIM_BACKTRACE=full "$origins" loading "$plugin" "$other"
[ $status -eq 137 ] || fail "loading: exit status $status"
has loading "in 2 blocks of 2 origins" "first (" "first_in_thread (" "second ("

# Libraries that say of a note that it is where nothing is, or longer than there is room for it.
python3 -c '
import struct, sys
with open(sys.argv[1], "rb") as file:
    library = bytearray(file.read())
(at,), (size, count) = struct.unpack_from("<Q", library, 32), struct.unpack_from("<HH", library, 54)
elsewhere, longer = bytearray(library), bytearray(library)
for part in range(at, at + size * count, size):
    if struct.unpack_from("<I", library, part)[0] == 4:
        struct.pack_into("<Q", elsewhere, part + 16, 0x7000000000)
        (note,) = struct.unpack_from("<Q", library, part + 8)
        if struct.unpack_from("<II4s", library, note + 4)[1:] == (3, b"GNU\0"):
            struct.pack_into("<I", longer, note + 4, 0x7ffffff0)
for name, changed in ("elsewhere.so", elsewhere), ("longer.so", longer):
    with open(name, "wb") as file:
        file.write(changed)
' "$plugin"
for library in elsewhere longer; do
        run GPURECLAIM_BACKTRACE=full "$origins" unload "$folder/$library.so" "$other"
        [ $status -eq 137 ] || fail "note, $library: exit status $status"
        has "note, $library" "in 2 blocks of 2 origins" "work ("
done

# A sample: exact for large blocks; else within five times the error that is told. That is tested with what is noted:
# amounts without the weights by the chance of a block are a tenth.
run GPURECLAIM_BACKTRACE=sample env GPURECLAIM_HARD_LIMIT=16GiB "$origins" sample
"$command" leaks --json "$pid" | python3 -c '
import json, sys
about = json.load(sys.stdin)
of = {}
for origin in about["origins"]:
    name = origin["frames"][0]["function"]
    of[name] = origin
assert of["large"]["bytes"] == 640 * 2**20 and of["large"]["blocks"] == 10 and of["large"]["error_bytes"] == 0, of
for name, count, size in ("small", 5120, 2**20), ("medium", 1024, 3 * 2**20):
    error = of[name]["error_bytes"]
    assert abs(of[name]["bytes"] - count * size) < 5 * error < 4.5 * count * size, of[name]
    assert abs(of[name]["blocks"] - count) < 5 * error / size, of[name]
    assert of[name]["noted_blocks"] < count / 10, of[name]
whole = 5120 * 2**20 + 1024 * 3 * 2**20 + 640 * 2**20
assert abs(about["bytes"] - whole) < 5 * about["error_bytes"], about["bytes"] / whole
' || fail "sample: not within the bound"
has sample "from a sample: one block in 64.000 MiB" "about "
grep -q "from a sample.*; off by about" said || fail "sample: no error is told"

# The message about a request that fails estimates as leaks does.
[ "$(grep -c 'allocated by:' err)" -eq 1 ] || fail "sample: no origins in the message"
sed -n 's/.*allocated by: //p' err | sed 's/; /\n/g' | while read -r _ amount; do
        grep -qxF "  $amount" said || fail "sample, in the message: $amount"
done >not_the_same
[ ! -s not_the_same ] || fail "$(cat not_the_same)"

# Where stacks would take much of the time, fewer are taken: else about 80.
run GPURECLAIM_BACKTRACE=sample "$origins" deep
"$command" leaks --json "$pid" | python3 -c '
import json, sys
noted = sum(origin["noted_blocks"] for origin in json.load(sys.stdin)["origins"])
assert 0 < noted < 45, noted
' || fail "deep: a stack of each"
has deep "from a sample: one block in 64.000 MiB to "

# Not where a stack takes long once.
run GPURECLAIM_BACKTRACE=sample "$origins" cold
has cold "from a sample: one block in 64.000 MiB;" "2.000 GiB in 32 blocks"

# Nor where some come at once, and then none for long.
run GPURECLAIM_BACKTRACE=sample "$origins" bursts
has bursts "from a sample: one block in 64.000 MiB;" "1.500 GiB in 24 blocks"

# What a request that fails says of the memory of its device: where it was allocated, and what tells more.
refused=(env GRSIM_DEVICES=2 GPURECLAIM_HARD_LIMIT=2GiB "$origins" refused)
for pool in auto bins none; do
        run GPURECLAIM_BACKTRACE=full env GPURECLAIM_POOL=$pool "${refused[@]}"
        [ $status -eq 137 ] || fail "refused, $pool: exit status $status"
        PATH=/nowhere "$command" leaks "$pid" >said
        for name in first medium second; do
                declare "at_$name=$(sed -n "s/^ *$name (\(.*\))\$/\1/p" said | head -n 1)"
        done
        mv err said
        has "refused, $pool" "device 1: an allocation of" "  allocated by: $at_first: 1.000 MiB in 1 block" \
                "device 0: an allocation of" \
                "  allocated by: $at_first: 10.000 MiB in 10 blocks; $at_medium: 3.000 MiB in 1 block; $at_second: 8" \
                "  tried for" "  see also: gpureclaim leaks $pid while it runs"
        [ "$(wc -l <said)" -eq 14 ] || fail "refused, $pool: more than these lines"
done
run GPURECLAIM_BACKTRACE=off "${refused[@]}"
grep -q "allocated by" err && fail "refused, off: something is named"
[ "$(grep -c "run with GPURECLAIM_BACKTRACE=sample to see here" err)" -eq 2 ] || fail "refused, off: no hint"
# Not host memory, which serves where the limit has no room.
run GPURECLAIM_BACKTRACE=full env GPURECLAIM_SPILL=64MiB "${refused[@]/2GiB/8MiB}"
[ "$(grep -c "allocated by:" err)" -eq 2 ] || fail "refused, spill: no origins"
grep -q "10.000 MiB in 10 blocks" err && fail "refused, spill: all of first()"

# What the debug aids find has the same places, with those that called them.
run GPURECLAIM_BACKTRACE=full env GPURECLAIM_GUARD=1 "$origins" overrun
PATH=/nowhere "$command" leaks "$pid" >said
places=$(sed -n 's/^ *[a-z_]* (\(origins+.*\))$/\1/p' said | head -n 2)
grep -qF ": ${places/$'\n'/ < }" err || fail "overrun: not ${places/$'\n'/ < }"

# Where the file cannot grow, or cannot be made, the program goes on.
run GPURECLAIM_BACKTRACE=full sh -c "ulimit -f 70000; exec $origins threads"
grep -q "cannot grow, later origins are lost: File too large" err && [ "$status" -eq 137 ] || fail "no room: $status"
has "no room" "live: 0 B in 0 blocks of 0 origins" "not here: 80036 blocks"
# Nor is there memory for the table of blocks, or of stacks.
for bytes in $((16 << 20)) $((4 << 20)); do
        run GPURECLAIM_BACKTRACE=full env "ORIGINS_NOT_MAPPED=$bytes" "$origins" killed
        grep -q "GPURECLAIM_BACKTRACE: cannot write" err && [ $status -eq 137 ] || fail "not mapped, $bytes: $status"
done
# A file system that cannot take room ahead, where the user may have one.
cat >on_ramfs <<'EOF'
mount -t ramfs none . || exit 3
cd . && TMPDIR=$PWD GPURECLAIM_BACKTRACE=full LD_LIBRARY_PATH=$GR_TEST_SIM LD_PRELOAD=$GR_TEST_SHIM "$1" stacks
PATH=/nowhere "$2" leaks gpureclaim.*.origins
EOF
if unshare -rm sh -c 'mount -t ramfs none .' 2>err; then
        unshare -rm bash on_ramfs "$origins" "$command" >said 2>err
        has ramfs "live: 5.859 MiB in 2048 blocks of 2048 origins"
        grep -q "cannot grow" err && fail "ramfs: it does not grow"
fi
run GPURECLAIM_BACKTRACE=full env GPURECLAIM_BACKTRACE_FILE=/nowhere/at/all "$origins" killed
grep -q "GPURECLAIM_BACKTRACE: cannot write /nowhere/at/all: No such file" err || fail "no folder: no warning"
if [ "$(id -u)" -eq 0 ]; then
        setpriv --reuid 65534 --clear-groups "$command" leaks $$ 2>err && fail "another user's process: exit status 0"
        grep -q "process $$: it is not yours" err || fail "another user's process: not said"
fi
"$command" leaks "$0" 2>err && fail "another file: exit status 0"

# Frames of Python of an interpreter that is loaded late, some of them wrong, and how many lines the stack has then.
while read -r how lines; do
        run GPURECLAIM_BACKTRACE=full "$origins" frames "$interpreter" "$how"
        [ $status -eq 137 ] || fail "frames, $how: exit status $status"
        has "frames, $how" "in 2 blocks of 2 origins" "first (" "plain (some.py:7)" "aß漢𐍈 (some.py:8)" "second ("
        [ "$(sed -n '/ first (/,/^$/p' said | grep -c .)" -eq "$lines" ] || fail "frames, $how: another stack"
        grep -q "wrong (" said && fail "frames, $how: a name that is no text"
done <<'EOF'
whole 3
lost 3
no-code 3
nowhere 3
no-name 5
circle 3
deep 33
EOF

# Python, of each version that is here and whose frames are known. GR_TEST_PYTHONS: which to try.
tried=0
for python in ${GR_TEST_PYTHONS:-python3.10 python3.11 python3.12 python3.13}; do
        python=$($python -c 'import sys; print(sys.executable)' 2>/dev/null) || continue
        tried=$((tried + 1))
        run GPURECLAIM_BACKTRACE=full "$python" "$program" leaks
        [ $status -eq 137 ] || fail "$python: exit status $status"
        has "$python" "in 13 blocks of 3 origins" "10.000 MiB in 10 blocks" "step ($program:$(
                grep -n "the line of step" "$program" | cut -d: -f1))" "leaks ($program:" "<module> ($program:" \
                "größe ($program:" "generator ($program:"
        grep -q _PyEval said && fail "$python: the interpreter's loop is named"
        grep -q "^      .*libffi.*+0x" said || fail "$python: functions of libraries are not named"
        "$command" leaks "$pid" >said
        grep -q "^      [0-9]* functions of .*libffi" said || fail "$python: functions of libraries are not counted"
        grep -q "^      .*libffi.*+0x" said && fail "$python: functions of libraries are named"
        run GPURECLAIM_BACKTRACE=full env GPURECLAIM_HARD_LIMIT=2GiB "$python" "$program" refused
        grep "allocated by:" err | sed 's/:[0-9]*)/)/g' >said
        p=${program##*/} f="called from"
        has "$python, refused" " by: allocate ($p) $f Model.step ($p): 10.000 MiB in 10 blocks; allocate ($p) $f größe \
($p): 4.000 MiB in 2 blocks; allocate ($p) $f generator ($p): 2.930 KiB in 1 block"
        run GPURECLAIM_BACKTRACE=full env GPURECLAIM_GUARD=1 "$python" "$program" overrun
        sed 's/:[0-9]*)/)/g' err >said
        has "$python, overrun" ": allocate ($p) < Model.step ($p) < xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx (long.py) \
< yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy (long.py) < overrun ($p) < <module> ($p)"
        run GPURECLAIM_BACKTRACE=full "$python" "$program" made
        "$command" leaks --all "$pid" >said
        [ "$(grep -c '^      leak\([0-9]*\) (leak\1.py:2)$' said)" -eq 40 ] || fail "$python, made"
        run GPURECLAIM_BACKTRACE=full "$python" "$program" threads "$plugin"
        has "$python, threads" "1.000 MiB in 1 block" "planted_in_a (" "16.000 KiB in 4 blocks" "keep ($program:"
        sed -n '/planted_in_a/,/^$/p' said | grep -q "$program" && fail "$python: frames of another thread"
        for _ in 1 2 3 4 5; do
                run GPURECLAIM_BACKTRACE=full "$python" "$program" ends
                [ $status -eq 0 ] && [ "$(wc -l <err)" -eq 1 ] || fail "$python, ends: exit status $status"
        done
done
[ $tried -gt 0 ] || echo "no version of Python whose frames can be read is here: not tried"

exit $failed
