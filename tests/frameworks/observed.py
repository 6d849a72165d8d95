#!/usr/bin/env python3
"""What gpureclaim tells of a program with a planted leak, and what telling costs.

observed.py check runs observed.py train, a small transformer that keeps one tensor of each step, in several processes
of which one at a time does ten steps: some recorded, some not. Of a recorded one the command must name the leak's line,
while the program runs and afterwards. Prints what held ("ok"), and how much longer the steps of recorded processes took
("#"). Exit status 1 when something did not hold.
"""

import argparse
import contextlib
import csv
import ctypes
import glob
import io
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import threading

from gpu_use import find_torch, skip
from turns import Turns

LENGTHS = (64, 96, 128, 160, 200, 256)  # of sequences
TURNS, NOT_TIMED = 20, 4                # of ten steps; the first are for the caches
PROCESSES = 3                           # of a kind that is compared: those of one kind differ, too
PROCESSORS = 4                          # for all of them, as only one works at a time
SECONDS = 100

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("mode", choices=["train", "check"])
parser.add_argument("--sim", action="store_true", help="on the simulated device: allocate as training does")
parser.add_argument("--command", metavar="GPURECLAIM")
parser.add_argument("--folder", help="where recordings and reports go")
parser.add_argument("--program", help="check tests/preload/origins in place of the training")
args = parser.parse_args()

history = []


def keep_in_history(hidden):
    history.append(hidden.detach().clone())  # the leak


def torch_step():
    """A function that trains for one step."""
    torch = find_torch()
    torch.manual_seed(1234)
    width, batch = 512, 16
    layer = torch.nn.TransformerEncoderLayer(width, nhead=8, dim_feedforward=4 * width, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, num_layers=6).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step():
        x = torch.randn(batch, random.choice(LENGTHS), width, device="cuda")
        hidden = model(x)
        optimizer.zero_grad()
        (hidden - x).square().mean().backward()
        optimizer.step()
        keep_in_history(hidden)

    return step, torch.cuda.synchronize


def simulated_step():
    """Allocates as a step does, where no kernel runs."""
    cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    if cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) or cuda.cuCtxSetCurrent(context):
        skip("no CUDA device")

    class Tensor:
        def __init__(self, size):
            self.size, self.pointer = size, ctypes.c_uint64()
            if cuda.cuMemAlloc_v2(ctypes.byref(self.pointer), ctypes.c_size_t(size)):
                sys.exit("an allocation failed")

        def __del__(self):
            cuda.cuMemFree_v2(self.pointer)

        def detach(self):
            return self

        def clone(self):
            return Tensor(self.size)

    weights = [Tensor(1 << 20) for _ in range(12)]

    def step():
        layers = [Tensor(random.choice(LENGTHS) << 15) for _ in weights]
        keep_in_history(layers[-1])

    return step, cuda.cuCtxSynchronize


def train():
    random.seed(1234)
    step, synchronize = simulated_step() if args.sim else torch_step()
    Turns(synchronize).take(step, 10 * TURNS)
    sys.stdout.flush()
    os._exit(0)  # as where a program is killed: nothing is freed


def check(good, what):
    global failed
    print("ok    " if good else "FAILED", what, flush=True)
    failed |= not good


def line_of(file, text):
    with open(file, encoding="utf-8") as lines:
        return next(number for number, line in enumerate(lines, 1) if text in line)


def run_command(*words):
    done = subprocess.run([args.command, *words], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        check(False, f"gpureclaim {' '.join(words)}: exit status {done.returncode}")
    return done.stdout


class Leak:
    """Where the program leaks: that line must be in the largest origin."""

    def __init__(self, function, file, mark):
        self.function, self.file, self.line = function, os.path.basename(file), line_of(file, mark)
        # Lines of C are named by these.
        self.has_line = file.endswith(".py") or shutil.which("addr2line") or shutil.which("llvm-symbolizer")
        if not self.has_line:
            print("# no addr2line and no llvm-symbolizer: lines are not checked")

    def words(self):
        return f"{self.function} ({self.file}:{self.line})" if self.has_line else self.function

    def is_at(self, frame):
        return frame.get("function") == self.function and (not self.has_line or (
            os.path.basename(frame.get("file", "")) == self.file and frame["line"] == self.line))

    def check(self, origins, when):
        largest = origins[0] if origins else {"frames": [], "bytes": 0}
        check(any(map(self.is_at, largest["frames"])), f"{when} {self.words()} has most, {largest['bytes'] >> 20} MiB")
        return largest

    def check_text(self, text, what):
        at = rf"{self.function} \(\S*{self.file}:{self.line}\)" if self.has_line else self.function
        check(re.search(at, text), f"{what}: {self.words()}")


def check_recording(trace, leak):
    """All that gpureclaim report makes of it."""
    leak.check_text(run_command("leaks", trace.replace(".trace", ".origins")), "leaks of the recording")
    leak.check_text(run_command("report", trace), "the report's text")
    report = json.loads(run_command("report", "--json", trace))
    for when in "peak", "end":
        leak.check(report.get(when + "_by_origin", {}).get("origins"), f"at the {when}")
    rows = list(csv.DictReader(io.StringIO(run_command("report", "--csv", trace))))
    counts = [sum(row["Action"] == word for row in rows) for word in ("allocate", "free")]
    check(counts[0] == report["allocations"] and counts[0] - counts[1] == report["end"]["blocks"],
          f"as CSV: {counts[0]} allocations, {counts[1]} frees")
    events = json.loads(run_command("report", "--perfetto", trace))["traceEvents"]
    check(len(events) > counts[0], f"for Perfetto: {len(events)} events")
    page = run_command("report", "--html", trace)
    with open(trace.replace(".trace", ".html"), "w", encoding="utf-8") as file:
        file.write(page)
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script', page, re.S)[1])
    check(data["gpus"] and data["gpus"][0]["points"], f"a page of {len(page) >> 10} KiB")
    leak.check_text("\n".join(sum(data["origins"]["stacks"], [])), "the page")


class Process:
    """Works when told to. Its origins are in a file that has its number."""

    def __init__(self, name, verb, flags, program):
        self.prefix = os.path.join(args.folder, name)
        for old in glob.glob(glob.escape(self.prefix) + ".*"):
            os.remove(old)
        flags = [*flags, *["--sim"] * args.sim, *[f"--output={self.prefix}"] * (verb == "record")]
        processors = sorted(os.sched_getaffinity(0))[:PROCESSORS]
        self.process = subprocess.Popen([args.command, verb, *flags, "--", *program], text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE,
                                        preexec_fn=lambda: os.sched_setaffinity(0, processors))
        self.seconds = []

    def line(self):
        return self.process.stdout.readline().strip()

    def turn(self):
        """Ten steps. Returns whether it goes on."""
        with contextlib.suppress(BrokenPipeError):  # where it has ended
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        said = self.line().split()
        if said[:1] == ["turn"]:
            self.seconds.append(float(said[1]))
        return self.line() == "ready"

    def end(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait()

    def file(self, suffix):
        return max(glob.glob(glob.escape(self.prefix) + ".*." + suffix), key=os.path.getsize, default="")

    def origins(self):
        number = self.file("origins").split(".")[-2:-1]
        return json.loads(run_command("leaks", "--json", *number) if number else "{}").get("origins", [])


def check_program():
    """A program in C, which keeps ten blocks before it says so, and then one for each byte of input."""
    leak = Leak("first", os.path.join(os.path.dirname(__file__), "..", "preload", "origins.c"), "/* first's line */")
    process = Process("program", "record", ["--backtrace=full"], [args.program, "until"])
    check(process.line() == "begun", "the program runs")
    leak.check(process.origins(), "while it runs")
    check(process.end() == 0, "its exit status")
    check_recording(process.file("trace"), leak)


def check_training():
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        skip("the stack of this version of Python cannot be read")
    leak = Leak("keep_in_history", __file__, "# the leak")
    own = "" if args.sim or os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") else "own-cache-"
    os.environ["GPURECLAIM_DECAY"] = "0"  # to wait for others is not to be idle
    program = [sys.executable, __file__, "train"] + ["--sim"] * args.sim
    count = 1 if args.sim else PROCESSES
    kinds = {"not": ("run", [], count), "record": ("record", [], count),
             "sample": ("record", ["--backtrace=sample"], 1), "full": ("record", ["--backtrace=full"], 1)}
    processes = {kind: [Process(f"{own}{kind}{i}", verb, flags, program) for i in range(count)]
                 for kind, (verb, flags, count) in kinds.items()}
    everyone = sum(processes.values(), [])
    watchdog = threading.Timer(SECONDS, lambda: [process.process.kill() for process in everyone])
    watchdog.daemon = True
    watchdog.start()
    lines = [process.line() for process in everyone]
    if all(line.startswith("skipped") for line in lines):
        skip(lines[0].partition(": ")[2])
    going = lines == ["ready"] * len(everyone)
    for turn in range(TURNS):
        # The order changes, as each leaves the GPU in some state to the next.
        going = going and all([process.turn() for process in (everyone, everyone[::-1])[turn % 2]])
        if not going and turn < TURNS - 1:
            check(False, f"all processes go on after {turn} turns")
            break
        if not own and turn in (TURNS // 2 - 1, TURNS - 2):
            largest = leak.check(processes["full"][0].origins(), f"after {10 * turn + 10} steps")
            if turn == TURNS - 2:
                check(largest["bytes"] > largest.get("last_look_bytes", largest["bytes"]), "it has grown since")
                sampled = processes["sample"][0].origins()
                print("# sample_has_it", "yes" if any(leak.is_at(f) for o in sampled for f in o["frames"]) else "no")
    check([process.end() for process in everyone] == [0] * len(everyone), "exit status of all")
    watchdog.cancel()
    if failed:
        return
    timed = {kind: [process.seconds[NOT_TIMED:] for process in of] for kind, of in processes.items()}
    usual = [statistics.mean(turn) for turn in zip(*timed["not"])]

    def ratio(*of):
        return statistics.median(statistics.mean(turn) / mean for turn, mean in zip(zip(*of), usual))

    alone = [ratio(seconds) for seconds in timed["not"]]
    print(f"# ten_steps_ms {1000 * statistics.median(usual):.1f}")
    print(f"# not_recorded {min(alone):.3f} to {max(alone):.3f}")
    for kind in list(kinds)[1:]:
        print(f"# {kind} {ratio(*timed[kind]):.3f}")
    if not own:
        check_recording(processes["full"][0].file("trace"), leak)


failed = False
if args.mode == "train":
    train()
os.makedirs(args.folder, exist_ok=True)
check_program() if args.program else check_training()
sys.exit(failed)
