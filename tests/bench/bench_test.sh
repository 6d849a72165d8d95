#!/usr/bin/env bash
# bench_test.sh TOP BUILD_FOLDER: scripts/bench must write every figure it says it measures, keep those of other groups,
# and say what it could not measure; packed traces must replay as the recorded ones do.
set -u
. "$(dirname "$0")/../support/fail.sh"

top=$1
build=$2
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT

# bench ARGUMENT...: sets status; what it prints goes to the file "said".
bench() {
        "$top/scripts/bench" --quick --simulated --out "$folder/out" "$@" >"$folder/said" 2>&1
        status=$?
}

# rows TEXT: how many lines of the results have it.
rows() {
        grep -c -- "$1" "$folder/out/results.csv"
}

bench --only first,pinned "$build"
[ $status -eq 0 ] || fail "exit status $status: $(tail -n 3 "$folder/said")"
for row in cuInit 'a program without CUDA' 'pinned 64 MiB'; do
        [ "$(rows "$row")" -eq 2 ] || fail "not one figure natively and one of ours: $row"
        grep -q "^| $row" "$folder/said" || fail "not in the tables: $row"
done

[ "$(rows "^first,first call,.the library's own part.*,auto,us,")" -eq 1 ] ||
        fail "not one figure of the library's own part"
grep -q "^| first calls: the library's own part, us |.* [0-9.]* |" "$folder/said" || fail "the own part is not in short"

# Another group: the figures of the first ones stay.
grep '^first,' "$folder/out/results.csv" >"$folder/before"
bench --only policies "$build"
[ $status -eq 0 ] || fail "exit status $status: $(tail -n 3 "$folder/said")"
grep '^first,' "$folder/out/results.csv" | diff "$folder/before" - >/dev/null || fail "figures of another group changed"
for policy in native auto barrier poll; do
        [ "$(rows "^policies,policies,kernel alone,$policy,us,[0-9.]*,[0-9.]*,[0-9.]*,[0-9.]* [0-9.]*$")" -eq 1 ] ||
                fail "no two samples of $policy"
done

# A pair with the trace off and on.
bench --only tracing "$build"
[ $status -eq 0 ] || fail "exit status $status: $(tail -n 3 "$folder/said")"
for column in off on; do
        [ "$(rows "^tracing,trace,pair 64 KiB,$column,us,")" -eq 1 ] || fail "not one figure with the trace $column"
done

for row in 'pair 64 KiB' 'pair 1 MiB' '16 threads'; do
        grep -qE "^\| $row: an entry of a trace, ns \|.* -?[0-9.]+ \|$" "$folder/said" &&
                grep -qE "^\| $row: with a trace / without, x \|.* [0-9.]+ \|$" "$folder/said" ||
                fail "not in short: an entry of the trace, $row"
done

# A program that fails is named, and the others are still measured.
mkdir -p "$folder/broken/tests/bench"
ln -s "$build/shim" "$build/tools" "$folder/broken/"
printf '#!/bin/sh\necho oops >&2\nexit 3\n' >"$folder/broken/tests/bench/pair_driver"
chmod +x "$folder/broken/tests/bench/pair_driver"
bench --only first "$folder/broken"
[ $status -eq 1 ] || fail "a program that fails, and exit status $status"
grep -q 'could not be measured: .*oops' "$folder/said" || fail "what failed is not named"
[ "$(rows 'cuInit')" -eq 0 ] || fail "a figure of a program that failed"
[ "$(rows "the library's own part")" -eq 0 ] || fail "an own part of a program that failed"
[ "$(rows 'a program without CUDA')" -eq 2 ] || fail "one failure took the other figures with it"

# The hook that does nothing asks the driver once for all pairs of one size, through each door, and between kernels.
for program in call_loop pair_driver pair_shared; do
        [ -x "$build/tests/bench/$program" ] || continue
        arguments='--quick --group=pairs --group=loops'
        [ $program = call_loop ] && arguments=1000
        GRSIM_TRACE=$folder/$program.calls LD_LIBRARY_PATH=$build/tools/sim \
                LD_PRELOAD=$build/tests/bench/libempty_hook.so \
                "$build/tests/bench/$program" $arguments >"$folder/said" 2>&1 ||
                fail "$program under the empty hook: $(tail -n 1 "$folder/said")"
        calls=$(grep -cE 'cuMem(Alloc|Free)' "$folder/$program.calls")
        [ "$calls" -ge 1 ] && [ "$calls" -le 50 ] || fail "$program under the empty hook: $calls calls of the driver"
done

# A recorded trace has each allocation, whichever way it went, and each free of it before the next.
GPURECLAIM_TRACE=$folder/recorded.trace LD_LIBRARY_PATH=$build/tools/sim LD_PRELOAD=$build/shim/libgpureclaim.so \
        "$build/tests/bench/call_loop" 300 >"$folder/said" 2>&1 ||
                fail "pairs with a trace: $(tail -n 1 "$folder/said")"
"$build/tools/gpureclaim" report --csv "$folder/recorded.trace" >"$folder/recorded.csv" || fail "no trace of 300 pairs"
awk -F, 'NR > 1 && ($3 != (NR % 2 ? "free" : "allocate") || (NR % 2 && $4 != ptr)) { wrong++ }
        { ptr = $4 }
        END { exit wrong > 0 || NR != 601 }' "$folder/recorded.csv" || fail "a trace of 300 pairs"

# Programs in turns: one at a time works, all on the same processors, ten steps are a sample, and one that fails is
# named.
cat >"$folder/turns.py" <<'PY'
import os
import sys
import time

if os.environ.get("GPURECLAIM_POOL") == "split":
    sys.exit("oops")
if os.sched_getaffinity(0) != {int(os.environ["PROCESSOR"])}:
    sys.exit("on other processors")
for _ in range(int(sys.argv[2].partition("=")[2]) // 10):
    print("ready", flush=True)
    sys.stdin.readline()
    os.mkdir("working")  # fails where another one is at it
    time.sleep(0.002)
    os.rmdir("working")
    inside = 0 if len(sys.argv) == 3 else 0.1 if "LD_PRELOAD" in os.environ else 0.2
    print("turn 0.5", inside, flush=True)
PY
python3 - "$top" "$build" "$folder" <<'PY' || fail "turns"
import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path

top, build, folder = sys.argv[1:]
sys.dont_write_bytecode = True
loader = importlib.machinery.SourceFileLoader("bench", f"{top}/scripts/bench")
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("bench", loader))
loader.exec_module(module)
module.SCRIPTS = Path(folder)
os.chdir(folder)
module.TURN_PROCESSORS = 1
os.environ["PROCESSOR"] = str(min(os.sched_getaffinity(0)))
bench = module.Bench(types.SimpleNamespace(build_folder=build, quick=False, simulated=True), folder)
bench.turns("training", "turns.py", 3)
samples = {(row, column): values for (_, _, row, column), values in bench.results.samples.items()}
for column in ("PyTorch", "PyTorch, preloaded", "PyTorch, expandable", "bins", "auto", "bins, no fences"):
    assert samples["training: time, the first 100 steps", column] == [5.0], samples
    assert samples["training: time, ten steps later on", column] == [0.5] * 20, samples
assert samples["training: time, the first 100 steps", "native"] == [5.0] and len(samples) == 13, samples
assert len(bench.complaints) == 1 and "split: exit status 1: oops" in bench.complaints[0], bench.complaints

# The same by the time in PyTorch's allocator: its steps, with another's time in place of its own.
bench.results.samples.clear()
bench.turns("training", "turns.py", 3, leave_out=["native"], times=True)
samples = {(row, column): values for (_, _, row, column), values in bench.results.samples.items()}
for column, inside, step in ("PyTorch", 0.2, 0.5), ("PyTorch, expandable", 0.2, 0.5), ("bins", 0.1, 0.4):
    tens = samples["training: time in PyTorch's allocator, ten steps later on", column]
    assert len(tens) == 20 and all(abs(ten - 1000 * inside) < 1e-6 for ten in tens), samples
    (whole,) = samples["training: time if only the allocator differed, ten steps later on", column]
    assert abs(whole - step) < 1e-9, samples
assert len(samples) == 30, samples

# Each column has all its groups, and the hook that does nothing is measured beside the default pool.
asked = []
bench.cost = lambda what, column, program, groups, **settings: asked.append((program, column, groups, settings))
bench.costs()
del bench.cost
floor = [entry for entry in asked if entry[1] == "empty hook" and entry[0] == "pair_driver"]
pairs = [entry for entry in asked
         if entry[1] == bench.default_pool and "pairs" in entry[2] and entry[0] == "pair_driver"]
assert floor and len(floor) == len(pairs), asked
assert all(entry[2] == ["pairs", "loops"] and "empty_hook" in entry[3]["LD_PRELOAD"] for entry in floor), floor
for column in ("native", "cudaMallocAsync", *bench.pools):
    groups = {group for entry in asked if entry[:2] == ("pair_driver", column) for group in entry[2]}
    assert groups == {"pairs", "mixed", "loops", "overlap"}, (column, groups)

# Pools of packages in turns; where theirs is out of the way is said to each in its own words.
asked, quick, bench.quick = [], bench.quick, False
bench.python = lambda what, column, script, *words, **settings: asked.append((column, words, settings))
bench.packages()
del bench.python
bench.quick = quick
for package, word, setting in ("torch", (), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}), ("cupy", ("--no-cache",), {}):
    of = [entry for entry in asked if entry[1][0] == package]
    assert [entry[0] for entry in of[:4]] == ["native", "its own pool", bench.default_pool, "empty hook"], of
    assert [entry[0] for entry in of[4:]] == [entry[0] for entry in of[1:4]] * 2, of
    for column, words, settings in of:
        floor = settings.pop("LD_PRELOAD", "")
        assert ("empty_hook" in floor) == (column == "empty hook"), of
        assert (words[1:], settings) == (((), {}) if column == "its own pool" else (word, setting)), of

# Processes side by side: none begins before all are there, and what fails is named.
bench.complaints.clear()
(Path(folder) / "pair_driver").write_text("""#!/bin/sh
mkdir "$0.first" 2>/dev/null || sleep 0.3
echo x >>"$0.begun"
echo ready
read go
echo '{"results": {"one thread": {"median": '$(wc -l <"$0.begun")'}}}'
""")
(Path(folder) / "pair_driver").chmod(0o755)
bench.programs = Path(folder)
bench.processes(3)
samples = {row: values for (_, _, row, _), values in bench.results.samples.items()}
assert samples["1 thread in each of 3 processes"] == [3.0], samples
assert not bench.complaints, bench.complaints
(Path(folder) / "pair_driver").write_text("#!/bin/sh\necho oops >&2\nexit 3\n")
bench.processes(2)
assert len(bench.complaints) == 1 and "2 failed, one with: oops" in bench.complaints[0], bench.complaints

# Graphs of all sizes: each column has a process that imports PyTorch once; what fails is named, and the rest goes on.
(Path(folder) / "graph_shapes.py").write_text("""
import json
import os
import sys

assert sys.argv[1:] == ["--serve"]
expandable = "PYTORCH_CUDA_ALLOC_CONF" in os.environ
preloaded = "LD_PRELOAD" in os.environ and "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ
if expandable:
    sys.exit("oops")
print("ready", flush=True)
for line in sys.stdin:
    words = line.split()
    assert ("--check" in words) != ("--repeat=0" in words), words
    print("# sizes that differ: [3]")
    if "--order=shuffled" in words:
        os._exit(9)
    held = 2**20 if "--only-largest" in words else 3 * 2**20
    print(json.dumps({"held_bytes": held, "capture_s": 0.5, "replay_us": 4.0, "differ": int(preloaded)}))
    print(f"done {int(preloaded)}", flush=True)
    print("ready", flush=True)
""")
bench.results.samples.clear()
bench.complaints.clear()
bench.graphs()
samples = {(row, column): values for (_, _, row, column), values in bench.results.samples.items()}
for column in ("PyTorch, private", f"{bench.default_pool}, private"):
    for model in "toy", "transformer":
        assert samples[f"{model}, largest: memory held", column] == [1.0], samples
        assert samples[f"{model}, ascending: memory held", column] == [3.0], samples
        assert samples[f"{model}, ascending: time to capture", column] == [0.5] * 7, samples
        assert (f"{model}, descending: memory held", column) not in samples, samples
assert samples["toy, descending: time to capture", "PyTorch, shared"] == [0.5], samples
assert not any(row.startswith("transformer") for row, column in samples if column == "PyTorch, shared"), samples
assert not any("preloaded" in column or "expandable" in column for _, column in samples), samples
for wanted in ("expandable, shared: exit status 1: oops", "toy, shuffled, PyTorch, shared: it ended, or was killed",
               "toy, largest, PyTorch, preloaded, shared: exit status 1: # sizes that differ: [3]"):
    assert any(wanted in complaint for complaint in bench.complaints), (wanted, bench.complaints)
PY

# Tables from figures that are known.
python3 - "$top/tests/bench" "$folder" <<'PY' || fail "tables"
import sys
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
import bench_report

out = Path(sys.argv[2]) / "known"
out.mkdir()
results = bench_report.Results()
results.start("costs", "a card, a day")
for size, native in (("4 KiB", 2.0), ("1 MiB", 4.0), ("1 GiB", 400.0)):
    for turn in (1, 2, 3):
        results.add("pair_static", f"pair {size}", "native", "us", native * turn)
        results.add("pair_static", f"pair {size}", "ours", "us", (8.0 if size == "1 GiB" else 0.5) * turn)
        results.add("pair_static", f"pair {size}", "empty hook", "us", 0.25 * (4 - turn))
results.add("pair_static", "256 live, 4 KiB to 1 MiB", "ours", "us", 1.25)
results.add("pair_static", "malloc + kernel + free", "ours", "us", 6.0)
results.add("pair_static", "kernel alone", "ours", "us", 4.0)
results.add("pair_static", "kernel alone", "native", "us", 2.0)
results.start("traces", "a card, a day")
results.add("traces", "train: most memory held / most live", "PyTorch", "", 1.25)
results.add("traces", "train: most memory held / most live", "ours", "", 1.5)
results.start("graphs", "a card, a day")
for order, column, held in (("largest", "PyTorch, private", 4), ("ascending", "PyTorch, private", 256),
                            ("largest", "auto, private", 2), ("ascending", "auto, private", 5)):
    results.add("graphs", f"toy, {order}: memory held", column, "MiB", held)
    results.add("graphs", f"toy, {order}: time to capture", column, "s", 0.25)
    results.add("graphs", f"toy, {order}: time of a replay", column, "us", held)
    results.add("graphs", f"toy, {order}: time without graphs", column, "us", 2 * held)
results.save(out / "results.csv")
text = bench_report.report(results, "ours")
for expected in (
    "| malloc + free, 1 MiB, static runtime, us | 8 |  | 1 | 0.5 |",
    "| the same / a hook that does nothing, static runtime, x | 16 |  | 2 | 1 |",
    "| the same / a pair of a hook that does nothing, static runtime, x |  |  | 2.5 |  |",
    "| malloc, short kernel, free / the kernel alone, static runtime, x |  |  | 1.5 |  |",
    "| pair 1 GiB, us | 800 (400 .. 1200) | 16 (8 .. 24) | 0.5 (0.25 .. 0.75) |",
    "- pair_static, kernel alone: 2 x native",
    "- traces, train: most memory held / most live: 1.2 x PyTorch",
    "a card, a day (costs, traces, graphs).",
):
    assert expected in text, expected + "\n\n" + text
tables = results.tables()
assert bench_report.graph_memory(tables) == [
    "| MiB | toy, ascending |", "| --- | --- |", "| PyTorch's own cache, a pool for each graph | 256 (64.00) |",
    "| gpureclaim, `GPURECLAIM_GRAPH_ARENA=private` | 5 (2.50) |"], bench_report.graph_memory(tables)
assert bench_report.graph_times(tables)[2:] == [
    "| PyTorch's own cache, a pool for each graph | 0.25 | 0.50 |",
    "| gpureclaim, `GPURECLAIM_GRAPH_ARENA=private` | 0.25 | 0.01 |"], bench_report.graph_times(tables)
again = bench_report.Results()
again.load(out / "results.csv")
assert again.samples == results.samples and again.units == results.units and again.where == results.where

# What was tested where: from all logs that are kept, and no more than they say.
for log, text in {
    "gpu/gpu-check.txt": "a row\n2 x card A, driver 5; CUDA 13.0; jax 0.8; numba 1; 2026-11-29\n9 passed\n\n"
                         "another\ncard F, driver 5; 2026-11-28\n1 passed, 0 failed\n",
    "gpu/facts/facts.txt": "# card B, driver 6; CUDA 12.5; 2026-11-02\none: yes\ntwo: no\n",
    "transparency/TRANSPARENCY.md": "Card: 1 x card C, driver 7, then card D, driver 8; torch 2; 2026-11-03.\n\n"
                                    "**3 of 4 the same** (2 of them succeed)\n"}.items():
    (out / log).parent.mkdir(parents=True, exist_ok=True)
    (out / log).write_text(text)
results.where = {
    "a": "card E, driver 9; 16 cores of a kind; torch 2; 2026-11-04", "b": "no card: the simulated device; 2026-11-05",
    "c": "card E, driver 9; 2 cores of another; torch 2; 2026-11-01", "d": "card E, driver 9; torch 2; 2026-11-02"}
sections = "[programs not written here](../tests/transparency/TRANSPARENCY.md): 3 of 4 the same"
assert bench_report.tested(results, out)[2:] == [
    "| `scripts/gpu-check`: 9 passed | 2 x card A | 5 | 13.0 | jax 0.8, numba 1 | 29 November 2026 |",
    "| `scripts/gpu-check`: 1 passed, 0 failed | card F | 5 |  |  | 28 November 2026 |",
    f"| {sections} | card C | 7 |  |  |  |",
    f"| {sections} | card D | 8 |  | torch 2 | 3 November 2026 |",
    "| `tests/gpu/facts`: 2 answers of the driver | card B | 6 | 12.5 |  | 2 November 2026 |",
    "| [benchmarks](benchmarks.md) | card E | 9 |  | torch 2 | 1 November 2026 to 4 November 2026 |",
], bench_report.tested(results, out)
PY

# Traces: packing loses nothing that a replay goes by. A free of the unknown and a second thread are in it.
cat >"$folder/small.csv" <<'CSV'
Thread,Time,Action,Pointer,Size,Stream
7,1000,allocate,0x100,4096,0x0
7,2000,allocate,0x200,5,0x0
9,3000,free,0x100,4096,0x0
9,3500,free,0x999,4096,0x0
9,4000,allocate,0x100,8192,0x0
7,65000,free,0x100,8192,0x0
CSV
"$top/tests/traces/traces.py" pack "$folder/small.csv" "$folder/small.trace.xz" "a note" >/dev/null || fail "packing"
"$top/tests/traces/traces.py" unpack "$folder/small.trace.xz" "$folder/again.csv" || fail "unpacking"
cut -d, -f1,3-5 "$folder/again.csv" | diff - <(
        cat <<'CSV'
Thread,Action,Pointer,Size
0,allocate,0x200,4096
0,allocate,0x400,5
1,free,0x200,4096
1,allocate,0x600,8192
0,free,0x600,8192
CSV
) || fail "a trace is another one after packing"
tail -n 1 "$folder/again.csv" | grep -q '^0,64000,' || fail "the last time is lost"
"$top/tests/traces/traces.py" show "$folder/small.trace.xz" | grep -q 'a note' || fail "a note is lost"
python3 -B "$top/tests/traces/make_traces.py" "$folder/made" || fail "make_traces"
for name in training inference fragments; do
        "$top/tests/traces/traces.py" pack "$folder/made/$name.csv" "$folder/$name.trace.xz" >/dev/null
        "$top/tests/traces/traces.py" unpack "$folder/$name.trace.xz" "$folder/$name.csv"
        for which in "made/$name" "$name"; do
                "$build/tools/replay/policies" "$folder/$which.csv" >"$folder/$which.txt" ||
                        fail "$which does not replay"
                # All but the last column, the time that the core's own work took.
                sed -i '1d;s/ *[0-9-]*$//' "$folder/$which.txt"
        done
        diff "$folder/made/$name.txt" "$folder/$name.txt" || fail "$name replays differently after packing"
done
for packed in "$top"/tests/traces/*.trace.xz; do
        "$top/tests/traces/traces.py" show "$packed" || fail "$packed"
        [ "$(stat -c %s "$packed")" -le 153600 ] || fail "$packed is too large for a repository"
done
exit $failed
