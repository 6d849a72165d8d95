#!/usr/bin/env bash
# The trace of GPURECLAIM_TRACE: what is in it when a program is killed, and that it ends no program.
#
#   trace_test.sh TRACED PROCESS COMMAND
#
# TRACED and PROCESS are the programs of those names, COMMAND is gpureclaim; GR_TEST_SHIM is the library, GR_TEST_SIM
# the simulated device.
set -u
. "$(dirname "$0")/../support/fail.sh"

traced=$(realpath "$1") process=$(realpath "$2") command=$(realpath "$3")
folder=$(mktemp -d) || exit 2
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 2
shown=(err)

# run PROGRAM [ARGUMENT...]: with a trace in the file "trace", output in "out", status in $status.
under=(timeout 30 env --default-signal GPURECLAIM_TRACE=trace "LD_LIBRARY_PATH=$GR_TEST_SIM"
        "LD_PRELOAD=$GR_TEST_SHIM")
status=0
run() {
        "${under[@]}" "$@" >out 2>err
        status=$?
}

# count ACTION [TEXT]: how many operations of the trace are of that kind, and have the text.
count() {
        "$command" report --csv trace | grep ",$1," | grep -c -- "${2:-}"
}

# is WHAT WANTED FOUND
is() {
        [ "$2" = "$3" ] || fail "$1: $3 instead of $2"
}

# All that was written before a kill is there, of both threads.
run "$traced" killed
is "killed: exit status" 137 $status
is "killed: allocations" 2001 "$(count allocate)"
is "killed: frees" 2000 "$(count free)"
is "killed: threads" 2 "$("$command" report --csv trace | tail -n +2 | cut -d, -f1 | sort -u | wc -l)"
"$command" report trace >said || fail "killed: no report"
for text in "4001 operations by 2 threads" "program: $traced killed (process " "GPU 0: Simulated device" \
        "allocations; 0 were refused" "reserved on GPU 0: at most " "live at the end: 12.056 KiB in 1 block"; do
        grep -qF "$text" said || fail "killed: not in the report: $text"
done
"$command" report --perfetto trace | grep -q '"name": "reserved, GPU 0", "ph": "C", .*{"bytes": [1-9]' ||
        fail "killed: not what was reserved"
hits=$("$command" report --json trace | sed -n 's/^  "\(hits\|misses\)": \([0-9]*\),/\1=\2/p' | tr '\n' ' ')
[[ $hits =~ ^hits=([0-9]+)\ misses=([0-9]+)\ $ ]] && ((BASH_REMATCH[1] + BASH_REMATCH[2] == 2001)) &&
        ((BASH_REMATCH[2] > 0 && BASH_REMATCH[2] < 100)) || fail "killed: $hits"

# Likewise by another process, in the middle: a free follows each allocation, but perhaps the last one.
mkfifo fifo
"${under[@]}" "$traced" wraps 100000000 &
sleep 1
kill -9 "$(pgrep -P $!)"
wait $! 2>/dev/null
allocations=$(count allocate) frees=$(count free)
[ "$allocations" -gt 1000 ] && [ $((allocations - frees)) -le 1 ] && [ "$frees" -le "$allocations" ] ||
        fail "killed in the middle: $allocations allocations, $frees frees"

# What is refused is told, and which rungs were climbed for it.
run env GPURECLAIM_HARD_LIMIT=0.0001% GPURECLAIM_LOG=silent "$traced" killed
is "refused: exit status" 99 $status
"$command" report trace >said
grep -q 'of 0 allocations; 1 were refused' said && grep -q 'ladder, trim: 1 times' said || fail "refused: $(cat said)"

# Memory that the pool does not serve, captures, and limits that another process changed.
run "$traced" others
is "others: exit status" 0 $status
"$command" report trace >said
grep -q '^  pinned host memory: at most 1.000 MiB, at the end 1.000 MiB$' said ||
        fail "others: no pinned memory: $(cat said)"
grep -q '^  captures: 1$' said || fail "others: no capture: $(cat said)"
"${under[@]}" "GPURECLAIM_REGION_DIR=$folder/region" "$traced" until <fifo >first 2>err &
exec 3>fifo
until grep -q begun first; do sleep 0.05; done
GPURECLAIM_REGION_DIR=$folder/region "$command" limit "$(pgrep -P $!)" 1GiB >said 2>&1 || fail "limit: $(cat said)"
exec 3>&-
wait $!
"$command" report trace | grep -q '^  limits changed: 1 times$' || fail "limit: not in the report"

# Fragmentation: blocks that are too small for a request, but not those that wait for the GPU.
run env GPURECLAIM_POOL=bins "$traced" pieces
is "pieces: exit status" 0 $status
"$command" report trace >said
grep -q '^  fragmented on GPU 0: at most 32.000 MiB, at ' said || fail "pieces: $(cat said)"
run env GPURECLAIM_POOL=bins "$traced" pieces 1
is "pieces that wait: exit status" 0 $status
"$command" report trace >said
grep -q '^  reserved on GPU 0: at most 84.000 MiB' said && ! grep -q fragmented said ||
        fail "pieces that wait: $(cat said)"

# Blocks that a context had when it ended are freed.
for pool in none bins split auto; do
        run env "GPURECLAIM_POOL=$pool" "$traced" gone
        is "a context that ends, $pool: exit status" 0 $status
        is "a context that ends, $pool: allocations" 30 "$(count allocate)"
        is "a context that ends, $pool: frees" 30 "$(count free)"
        "$command" report trace | grep -qF 'live at the end: 0 B in 0 blocks' || fail "a context that ends, $pool: live"
done

# A thread that is told to end does not end while the file grows, with the file's lock.
run "$traced" ended
is "a thread that ends: exit status" 0 $status
is "a thread that ends: allocations" 40000 "$(count allocate)"

# A file that cannot grow: its oldest part is used again, without a signal for the program.
run bash -c "ulimit -f 2000 && exec env GPURECLAIM_POOL=bins $traced wraps 100000"
is "the largest file: exit status" 0 $status
grep -q 'cannot grow beyond 1 MiB, its oldest part is lost: File too large' err || fail "the largest file: no warning"
[ "$(wc -l <err)" -eq 1 ] || fail "the largest file: more than one warning"
allocations=$(count allocate)
[ "$allocations" -gt 10000 ] && [ "$allocations" -lt 20000 ] || fail "the largest file: $allocations allocations"
is "the largest file: the last block" 1 "$(count allocate ,12345,)"
"$command" report trace | grep -q 'the beginning is missing' || fail "the largest file: the report does not say so"
"$command" report --json trace | grep -q '"begin_is_missing": true' || fail "the largest file: nor as JSON"

# A thread that wrote long ago does not write to what is used again next.
run bash -c "ulimit -f 2000 && exec env GPURECLAIM_POOL=bins $traced behind"
is "a slow thread: exit status" 0 $status
is "a slow thread: its block" 1 "$(count allocate ,12345,)"

# What a thread leaves of its part, others use, but not what is used again next.
run "$traced" short 3000
is "short threads: exit status" 0 $status
is "short threads: allocations" 3000 "$(count allocate)"
is "short threads: frees" 3000 "$(count free)"
is "short threads: MiB" 1 $(($(stat -c %s trace) >> 20))
run "$traced" forks
is "a fork as the file grows: exit status" 0 $status
run bash -c "ulimit -f 2000 && exec env GPURECLAIM_POOL=bins $traced left"
is "a thread that left: exit status" 0 $status
is "a thread that left: a block of the first and one of the next" 2 "$(count allocate ,12345,)"

# A free that is lost, of a block whose allocation is not: it is not told as live.
run bash -c "ulimit -f 2000 && exec env GPURECLAIM_POOL=bins $traced lent"
is "a lost free: exit status" 0 $status
is "a lost free: its block" 0 "$(count allocate ,12345,)"
"$command" report trace >said
grep -qF 'not counted: 12.056 KiB in 1 block that may' said && grep -qF 'live at the end: 0 B in 0 blocks' said ||
        fail "a lost free: $(cat said)"

# Nor is one that cannot have its first part.
run bash -c "ulimit -f 8 && exec env GPURECLAIM_POOL=bins $traced wraps 100"
is "no room: exit status" 0 $status
grep -q 'GPURECLAIM_TRACE: .*: File too large' err || fail "no room: no warning"
[ ! -e trace ] || fail "no room: the file is still there"

# A disk that is full: a page without room would end the program.
mkdir disk
if mount -t tmpfs -o size=2m none disk 2>/dev/null; then
        trap 'umount "$folder/disk"; rm -rf "$folder"' EXIT
        run env "GPURECLAIM_TRACE=$folder/disk/trace" "$traced" wraps 100000
        is "a full disk: exit status" 0 $status
        grep -q 'its oldest part is lost: No space left' err || fail "a full disk: no warning"
        "$command" report disk/trace | grep -q 'the beginning is missing' || fail "a full disk: not in the report"
else
        echo "no file system can be mounted: a full disk was not tried"
fi

# Another process takes the name: the first one goes on with the file that it has.
"${under[@]}" "$traced" until <fifo >first 2>first.err &
exec 3>fifo
until grep -q begun first; do sleep 0.05; done
run "$traced" wraps 10
exec 3>&-
wait $!
is "a name that another process takes: exit status" 0 $?
grep -q worked first || fail "a name that another process takes: $(cat first)"
grep -q 'cannot grow beyond 1 MiB, its oldest part is lost: another file has its name' first.err ||
        fail "a name that another process takes: no warning"
is "a name that another process takes: allocations" 11 "$(count allocate)"

# Likewise without a file of that name. What the last one said must not be taken for what this one says.
: >first
"${under[@]}" "$traced" until <fifo >first 2>first.err &
exec 3>fifo
until grep -q begun first; do sleep 0.05; done
rm trace
exec 3>&-
wait $!
is "no file any more: exit status" 0 $?
grep -q 'its oldest part is lost: No such file' first.err || fail "no file any more: no warning"

# A program that closes all descriptors has its own files, and the trace goes on, also where it grows later.
run "$process" closes-all
is "closes all: exit status" 0 $status
is "closes all: its file" "4 bytes in its file" "$(sort -u out)"
is "closes all: frees" 20040 "$(count free)"
[ ! -s err ] || fail "closes all: a warning"

# What the program prints to streams that it has closed does not land in the trace.
run "$traced" closed
is "closed streams: exit status" 0 $status
is "closed streams: frees" 20000 "$(count free)"

# A child after fork writes nothing into its parent's trace.
run "$process" fork
is "fork: exit status" 0 $status
is "fork: allocations" 81 "$(count allocate)"
is "fork: frees" 81 "$(count free)"

# Each image of a process that executes another program has a file of its own, and so has what GPURECLAIM_BACKTRACE
# keeps; a file of an earlier process with that id is replaced.
mkdir images
run env GPURECLAIM_BACKTRACE=full "GPURECLAIM_BACKTRACE_FILE=images/%p.origins" "GPURECLAIM_TRACE=images/%p.trace" \
        bash -c "echo >images/\$\$.trace && touch -d yesterday images/\$\$.trace && exec $traced execs 2"
is "exec: exit status" 0 $status
files=(images/*.trace)
is "exec: names" "-2.origins -2.trace -3.origins -3.trace .origins .trace" \
        "$(printf '%s\n' images/* | sed 's/[^0-9]*[0-9]*//' | LC_ALL=C sort | xargs)"
for file in "${files[@]}"; do
        "$command" report "$file" | grep -qF "$file: 20 operations" || fail "exec: $("$command" report "$file" 2>&1)"
done

# Not where the name has no %p, nor in the place of GPURECLAIM_BACKTRACE's own file, which goes at the exit.
mkdir runtime
run env XDG_RUNTIME_DIR=runtime GPURECLAIM_BACKTRACE=full "$traced" execs 1
is "exec, one name: exit status" 0 $status
is "exec, one name: allocations" 10 "$(count allocate)"
is "exec, one name: what is left" "" "$(ls runtime)"

# The file is no other than a new one.
ln -s elsewhere link
run env GPURECLAIM_TRACE=link "$traced" wraps 10
is "a link: exit status" 0 $status
grep -q 'GPURECLAIM_TRACE: cannot write .*/link: it is no regular file' err || fail "a link: no warning"
run env GPURECLAIM_TRACE=none/trace "$traced" wraps 10
is "no folder: exit status" 0 $status
grep -q 'GPURECLAIM_TRACE: cannot write .*/none/trace: No such file' err || fail "no folder: no warning"

run "$traced" unseen
is "an unseen file: exit status" 0 $status
grep -q 'GPURECLAIM_TRACE: cannot write .*/trace: Input/output error' err || fail "an unseen file: no warning"
[ ! -e trace ] || fail "an unseen file: it is still there"

# Of a command that is too long the end is missing, and the last byte is a NUL.
run "$traced" wraps 10 "$(printf '%02000d' 7)"
is "a long command: its end" 0 "$(od -An -tu1 -j 2103 -N 1 trace | tr -d ' ')"

# Files that are not whole, or another version's.
run "$traced" wraps 10
head -c 4100 trace >short && "$command" report short >said || fail "cut off after the header"
grep -q 'short: 0 operations' said || fail "cut off after the header: $(cat said)"
head -c 4095 trace >short && "$command" report short >/dev/null 2>said && fail "cut off in the header"
{ head -c 8 trace && printf '\377' && tail -c +10 trace; } >newer
"$command" report newer >/dev/null 2>said && fail "another version"
grep -q 'newer: a trace of another version of gpureclaim' said || fail "another version: $(cat said)"

# record: a trace for each process, named at the end; the exit status is the program's.
mkdir recorded
"$command" record --sim -o recorded/it -- "$traced" wraps 10 >out 2>err
is "record: exit status" 0 $?
is "record: output" worked "$(cat out)"
files=(recorded/it.*.trace)
is "record: files" 1 ${#files[@]}
is "record: said" "gpureclaim: recorded ${files[0]}; to read it: gpureclaim report ${files[0]}" "$(cat err)"
"$command" report "${files[0]}" | grep -q '21 operations' || fail "record: the trace"
rm -f recorded/*
"$command" record --sim -o recorded/it sh -c "$traced wraps 1; cd /; $traced wraps 1; exit 7" >out 2>err
is "record, two processes: exit status" 7 $?
is "record, two processes: said" 2 "$(grep -c 'recorded recorded/it' err)"
# The command that it names can be given to a shell, whatever the name.
for prefix in - 'a b' "it's" '~'; do
        "$command" record --sim -o "$prefix" "$traced" wraps 1 >out 2>err
        eval "\"\$command\" $(sed -n 's/.*; to read it: gpureclaim //p' err)" >said 2>&1 ||
                fail "record, $prefix: not read: $(cat said)"
        rm -f ./"$prefix".*
done
"$command" record --sim -o recorded/execs "$traced" execs 1 >out 2>err
is "record, exec: said" 2 "$(grep -c 'recorded recorded/execs' err)"
(
        "$command" record --sim -o recorded/killed "$traced" killed 2>err
        exit $?
) 2>/dev/null
is "record, killed: exit status" 137 $?
grep -q 'recorded recorded/killed' err || fail "record, killed: not named"
"$command" record --sim -o recorded/told "$traced" until <fifo >out 2>err &
exec 3>fifo
until grep -q begun out; do sleep 0.05; done
kill $!
wait $! 2>/dev/null
is "record, told to end: exit status" 143 $?
exec 3>&-
grep -q 'recorded recorded/told' err || fail "record, told to end: not named"
"$command" record --sim -o recorded/none true 2>err
is "record, no CUDA: exit status" 0 $?
grep -q 'no trace was written' err || fail "record, no CUDA: nothing is said"
env --ignore-signal=CHLD "$command" record --sim -o recorded/none sh -c 'exit 7' 2>err
is "record, SIGCHLD ignored: exit status" 7 $?
env --ignore-signal=CHLD "$command" record --sim -o recorded/none grep SigIgn /proc/self/status >out 2>err
env --ignore-signal=CHLD grep SigIgn /proc/self/status >said
is "record: signals that the program ignores" "$(cat said)" "$(cat out)"
"$command" record --sim -o recorded/one sh -c "GPURECLAIM_TRACE=recorded/one.more.1.trace $traced wraps 1" >out 2>err
is "record, a longer prefix: said" 0 "$(grep -c 'recorded recorded' err)"
# Nobody reads what record says.
{
        env --default-signal=PIPE "$command" record --sim -o recorded/none sh -c 'sleep 0.5; exit 7' >out
        echo $? >said
} 2>&1 | true
is "record, standard error closed at its other end: exit status" 7 "$(cat said)"

exit $failed
