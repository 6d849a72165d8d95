#!/usr/bin/env python3
"""A process that peaks and then pauses, four times over: natively, with PyTorch's cache, under the library, and under
the library with decay off. Notes the use of the GPU over time. Then the last two run in turns, so that drift hits
both, and without a look at the GPU, and their launch latencies are held against each other.

    idle.py --program BUILD/tests/gpu/idle --library BUILD/shim/libgpureclaim.so --out FOLDER [--peak-gib 60]

Writes idle.csv (run, seconds, mib) to the folder. Exit status 1 when memory did not come back, 77 without
a device. Latencies are told, not judged.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import threading
import time

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--program")
parser.add_argument("--library", dest="shim")
parser.add_argument("--out", default=".")
parser.add_argument("--peak-gib", type=float, default=60)
parser.add_argument("--seconds", type=float, default=13)
parser.add_argument("--repeat", type=int, default=3, help="runs for latencies, with decay on and off each")
parser.add_argument("--torch", metavar="CSV", help=argparse.SUPPRESS)  # the PyTorch run itself
args = parser.parse_args()

LOOK_S = 0.05


def torch_run():
    from gpu_use import Gpu, skip

    gpu = Gpu()
    try:
        import torch
    except ImportError:
        skip("no PyTorch")
    if gpu.used() is None or not torch.cuda.is_available():
        skip("no device, or it cannot be asked")
    torch.zeros(1, device="cuda")
    rows, done = [], threading.Event()
    begin = time.perf_counter()

    def watch():
        while not done.is_set():
            rows.append((time.perf_counter() - begin, gpu.used()))
            time.sleep(LOOK_S)

    watcher = threading.Thread(target=watch)
    watcher.start()
    time.sleep(0.3)
    blocks, held = [], 0
    while held < args.peak_gib * 2**30:
        blocks.append(torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda"))
        held += blocks[-1].numel()
    torch.cuda.synchronize()
    time.sleep(0.3)
    print(f"# peak_mib {gpu.used():.0f}")
    freed = time.perf_counter()
    blocks.clear()
    print(f"# freed_at_s {freed - begin:.3f}\n# free_all_ms {1e3 * (time.perf_counter() - freed):.2f}")
    time.sleep(args.seconds)
    done.set()
    watcher.join()
    print(f"# end_mib {gpu.used():.0f}")
    with open(args.torch, "w", newline="") as file:
        csv.writer(file).writerows([("seconds", "mib"), *rows])


if args.torch:
    torch_run()
    raise SystemExit


def run(name, command, **settings):
    """The figures of one run, and its samples by seconds since everything was freed; None where it was skipped."""
    path = os.path.join(args.out, f"idle-{name}.csv")
    result = subprocess.run(
        [part.replace("{csv}", path) for part in command],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    if result.returncode == 77:
        print(f"{name}: skipped: {result.stdout.strip()}")
        return None
    if result.returncode:
        sys.exit(f"{name}: exit status {result.returncode}")
    figures = dict(line[2:].split() for line in result.stdout.splitlines() if line.startswith("# "))
    figures = {key: float(value) for key, value in figures.items()}
    samples = []
    if os.path.exists(path):
        with open(path, newline="") as file:
            begin = figures["freed_at_s"]
            samples = [(float(row["seconds"]) - begin, float(row["mib"])) for row in csv.DictReader(file)]
        os.remove(path)
    return figures, samples


def one(key, results):
    return statistics.median(figures[key] for figures, _ in results)


os.makedirs(args.out, exist_ok=True)
PEAK = f"--peak={int(args.peak_gib * 1024)}MiB"
PROGRAM = [args.program, PEAK, f"--seconds={args.seconds}"]
WATCHED = [*PROGRAM, "--csv={csv}"]
PYTORCH = [sys.executable, __file__, "--torch={csv}", f"--peak-gib={args.peak_gib}", f"--seconds={args.seconds}"]
DECAY = {"LD_PRELOAD": args.shim}
KEPT = {**DECAY, "GPURECLAIM_DECAY": "0"}
runs = {"native": run("native", WATCHED), "PyTorch's cache": run("torch", PYTORCH)}
if not runs["native"]:
    raise SystemExit(77)
runs |= {"gpureclaim": run("decay", WATCHED, **DECAY), "gpureclaim, DECAY=0": run("kept", WATCHED, **KEPT)}
on, off = [], []
for i in range(args.repeat):
    for runs_now, settings in [(off, KEPT), (on, DECAY)][:: -1 if i % 2 else 1]:
        runs_now.append(run("latency", PROGRAM, **settings))
runs = {name: result for name, result in runs.items() if result}
with open(os.path.join(args.out, "idle.csv"), "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(("run", "seconds", "mib"))
    writer.writerows((name, f"{s:.3f}", f"{m:.1f}") for name, (_, samples) in runs.items() for s, m in samples)

for name, (figures, _) in runs.items():
    parts = (p for p in ("p50", "p99", "max") if f"round_us_{p}" in figures)
    rounds = ", ".join(f"{p} {figures[f'round_us_{p}']:.2f}" for p in parts)
    print(
        f"{name}: peak {figures['peak_mib']:.0f} MiB, {figures['end_mib']:.0f} MiB after {args.seconds:g} s, longest "
        f"free {figures.get('free_max_us', 0):.0f} us, freeing all {figures['free_all_ms']:.2f} ms; kernels beside, "
        f"us: {rounds or '-'}"
    )
print(f"launch latency, medians of {args.repeat} runs each, decay on / decay off = ratio:")
for what in ("launch_us", "round_us"):
    for part in ("p50", "p99", "p999", "max"):
        with_it, without = one(f"{what}_{part}", on), one(f"{what}_{part}", off)
        # By pairs of runs, one after the other: how sure the ratio is.
        pairs = [a[f"{what}_{part}"] / b[f"{what}_{part}"] for (a, _), (b, _) in zip(on, off)]
        error = statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else float("nan")
        on_runs, off_runs = (" ".join(f"{figures[f'{what}_{part}']:.1f}" for figures, _ in runs) for runs in (on, off))
        print(
            f"{what}_{part}: {with_it:.2f} / {without:.2f} = {with_it / without:.3f}; pairs "
            f"{statistics.mean(pairs):.3f} +- {error:.3f} (on: {on_runs}; off: {off_runs})"
        )
# All but the context and the little that the program still has must be back; with decay off it must not.
left = max(figures["end_mib"] - figures["context_mib"] for figures, _ in on)
kept = min(figures["end_mib"] - figures["context_mib"] for figures, _ in off)
print(f"left after {args.seconds:g} s: {left:.0f} MiB; with decay off {kept:.0f} MiB")
raise SystemExit(0 if left <= 64 and kept > 0.8 * on[0][0]["peak_mib"] else 1)
