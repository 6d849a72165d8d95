#!/usr/bin/env bash
# Programs that have nothing to do with CUDA must run as if the library were not there: same output, same exit status,
# same open files and threads, and no system call more than loading a library takes.
#
#   programs_test.sh NEXT_MALLOC      a program that looks up the next malloc; GR_TEST_SHIM is the library
set -u
. "$(dirname "$0")/../support/fail.sh"

next_malloc=$1
folder=$(mktemp -d) || exit 2
trap 'rm -rf "$folder"' EXIT
unset LD_LIBRARY_PATH # no CUDA anywhere

# same TITLE COMMAND...: with statistics and log at their loudest, which must not matter
same() {
        local title=$1 native shim
        shift
        timeout 20 "$@" >"$folder/native" 2>"$folder/native.err" </dev/null
        native=$?
        timeout 20 env GPURECLAIM_STATS=1 GPURECLAIM_LOG=debug GPURECLAIM_HARD_LIMIT=nonsense \
                "GPURECLAIM_STATS_FILE=$folder/stats" "LD_PRELOAD=$GR_TEST_SHIM" "$@" \
                >"$folder/shim" 2>"$folder/shim.err" </dev/null
        shim=$?
        [ $native -eq $shim ] || fail "$title: exit status $shim, natively $native"
        cmp -s "$folder/native" "$folder/shim" || fail "$title: $(diff "$folder/native" "$folder/shim" | head -n 5)"
        cmp -s "$folder/native.err" "$folder/shim.err" ||
                fail "$title, stderr: $(diff "$folder/native.err" "$folder/shim.err" | head -n 5)"
        [ ! -e "$folder/stats" ] || fail "$title: wrote statistics"
}

same "ls" ls -l /usr/bin
same "ls of nothing" ls /nonexistent
same "bash" bash -c 'for i in 1 2 3; do echo $i; done | sort -r; (exit 4); echo $?; exit 5'
same "bash, open files" bash -c 'cd /proc/self/fd && echo *'
same "sort, threads" bash -c 'seq 100000 | sort --parallel=2 -n | tail -n 1'
same "python3" python3 -c 'print(6 * 7); raise SystemExit(7)'
same "python3, files and threads" python3 -c '
import os
print(sorted(os.listdir("/proc/self/fd"))[:20], len(os.listdir("/proc/self/task")))'
same "python3, look-ups" python3 -c '
import ctypes
everything = ctypes.CDLL(None)
print(everything.getpid() > 0)
for name in ("cuMemAlloc", "cu", "cudaMalloc", "cuInit", "cublasCreate_v2"):
    print(name, hasattr(everything, name))'
same "python3, fork" python3 -c '
import os
child = os.fork()
if child == 0:
    os._exit(9)
print(os.waitpid(child, 0)[1])'
same "a program with its own malloc" "$next_malloc"
same "a program that is killed" bash -c 'kill -TERM $$'
[ "$("$next_malloc")" = "$(printf 'malloc of the C library: found\nnot there: 1 with an error\nitself: 1')" ] ||
        fail "the look-ups do not work natively either: $("$next_malloc")"
# env shows the variable, of course, and nothing else that is new.
env | grep -v '^_=' | sort >"$folder/native"
LD_PRELOAD=$GR_TEST_SHIM env | grep -v '^_=\|^LD_PRELOAD=' | sort >"$folder/shim"
diff "$folder/native" "$folder/shim" || fail "env differs"

# Loading a library: it is opened, read and mapped. What comes after main has begun must be equal.
if command -v strace >/dev/null && strace -o "$folder/trace" true 2>/dev/null; then
        strace -f -o "$folder/native.trace" /bin/true
        strace -f -E "LD_PRELOAD=$GR_TEST_SHIM" -o "$folder/shim.trace" /bin/true
        for run in native shim; do
                # From the end of loading on; addresses differ from run to run.
                sed -n '/munmap/,$p' "$folder/$run.trace" |
                        sed 's/^[0-9]* *//; s/0x[0-9a-f]*/ADDRESS/g; s/, [0-9]*) = 0$/) = 0/' >"$folder/$run.calls"
                grep -c . "$folder/$run.calls" >/dev/null || fail "strace shows nothing of the $run run"
                grep -qE '^[0-9]+ +v?(fork|clone3?)\(' "$folder/$run.trace" &&
                        fail "a thread or process in the $run run"
        done
        diff "$folder/native.calls" "$folder/shim.calls" >"$folder/calls.diff" ||
                { cat "$folder/calls.diff"; fail "system calls after loading differ"; }
        printf 'system calls of true: %s natively, %s under the library\n' \
                "$(wc -l <"$folder/native.trace")" "$(wc -l <"$folder/shim.trace")"
else
        echo "no strace: system calls not compared"
fi

# Nothing of ours runs at load or at the end: one constructor and one destructor, those of the tool chain.
python3 - "$GR_TEST_SHIM" <<'PY' || fail "the library has work to do when it is loaded"
import struct, sys

data = open(sys.argv[1], "rb").read()
assert data[:6] == b"\x7fELF\x02\x01"
offset, = struct.unpack_from("<Q", data, 32)
size, count = struct.unpack_from("<HH", data, 54)
for i in range(count):
    kind, _, begin, _, _, length = struct.unpack_from("<IIQQQQ", data, offset + i * size)
    if kind == 2:
        entries = dict(struct.unpack_from("<qQ", data, begin + k) for k in range(0, length, 16))
array = {"DT_INIT_ARRAY": entries.get(27, 0), "DT_FINI_ARRAY": entries.get(28, 0)}
print(array)
assert max(array.values()) <= 8
PY
# For the reader only: what loading costs.
for run in 1 2 3; do
        LD_DEBUG=statistics LD_PRELOAD=$GR_TEST_SHIM /bin/true 2>&1 |
                sed -n 's/.*total startup time/startup under the library/p; '
done
LD_DEBUG=statistics /bin/true 2>&1 | sed -n 's/.*total startup time/startup natively/p'
exit $failed
