#!/usr/bin/env python3
"""PyTorch processes that hold idle memory, and one more that needs what is not free.

    neighbours.py [--holders N] [--busy] [--own-cache 0|1]

Each holder trains a little, then frees its share of most of the GPU into its cache. The needy one then asks the driver
for more than is free. Natively it is refused where PyTorch keeps a cache of its own; under gpureclaim, whose hooks the
holders register where it is there, it should be served. Meanwhile holders idle, or with --busy they train on.
Afterwards each trains the same steps from the same state again: the losses must be equal.

Prints "# NAME VALUE" lines. Exit status 1 when a loss differs or a process fails; 77 where nothing can be shown.
Whether the needy one was served is for the caller to judge: "# served 1".
"""

import argparse
import ctypes
import os
import subprocess
import sys
import time

from gpu_use import Gpu, skip

MIB, GIB = 2**20, 2**30
STEPS = 20
HERE = os.path.dirname(os.path.abspath(__file__))


def say(*words):
    print(*words, flush=True)


def hold(gib, busy):
    """A holder: obeys words on standard input, answers each with one line."""
    if busy:
        import select
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        import torch
    except ImportError:
        say("skipped: no PyTorch")
        return
    if not torch.cuda.is_available():
        say("skipped: PyTorch sees no CUDA device")
        return
    sys.path.insert(0, os.path.join(HERE, "..", "..", "tools", "python"))
    import gpureclaim

    if gpureclaim.available():
        gpureclaim.torch()
    torch.use_deterministic_algorithms(True)
    for choose in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):
        getattr(torch.backends.cuda, choose)(False)
    torch.manual_seed(1234)
    layer = torch.nn.TransformerEncoderLayer(512, nhead=8, dim_feedforward=2048, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, num_layers=6).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(16, 256, 512, device="cuda")
    state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}

    def step():
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def steps():
        """The same steps each time: time of the first one and of the others on average, in ms, and their losses."""
        model.load_state_dict(state)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        losses = [step()]
        torch.cuda.synchronize()
        first = time.perf_counter()
        losses += [step() for _ in range(STEPS - 1)]
        torch.cuda.synchronize()
        last = time.perf_counter()
        text = ",".join(float.hex(loss.item()) for loss in losses)
        return f"{1e3 * (first - begin):.2f} {1e3 * (last - first) / (STEPS - 1):.3f} {text}"

    for _ in range(5):
        step()
    steps()
    say("warm")
    for line in sys.stdin:
        word = line.strip()
        if word == "steps":
            say(steps())
        elif word == "fill":
            blocks = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(gib)]
            for block in blocks:
                block.fill_(1)
            torch.cuda.synchronize()
            del blocks, block
            say("filled", torch.cuda.memory_reserved() // MIB)
        elif word == "train":
            # Until the next word. The longest step shows what being asked costs.
            durations = []
            while not select.select([sys.stdin], [], [], 0)[0]:
                begin = time.perf_counter()
                step()
                torch.cuda.synchronize()
                durations.append(1e3 * (time.perf_counter() - begin))
            sys.stdin.readline()
            say(f"{len(durations)} {sorted(durations)[len(durations) // 2]:.3f} {max(durations):.2f}")
        else:
            break


def need(mib):
    """The needy one: one block through the driver. Prints the result and the time, keeps it until told to end."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
    if driver.cuInit(0) or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0):
        say("failed")
        return
    driver.cuCtxSetCurrent(context)
    size = ctypes.c_size_t(mib * MIB)
    say("open")
    sys.stdin.readline()
    begin = time.perf_counter()
    result = driver.cuMemAlloc_v2(ctypes.byref(pointer), size)
    elapsed = time.perf_counter() - begin
    if result == 0 and (driver.cuMemsetD8_v2(pointer, 1, size) or driver.cuCtxSynchronize()):
        result = -1
    say(result, f"{1e3 * elapsed:.1f}")
    sys.stdin.readline()


class Process:
    def __init__(self, *arguments):
        self._process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, word):
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def hear(self):
        line = self._process.stdout.readline().strip()
        if line.startswith("skipped"):
            self._process.kill()
            skip(line)
        if not line:
            raise SystemExit("a process ended unasked, status %s" % self._process.wait())
        return line.split()

    def ask(self, word):
        self.tell(word)
        return self.hear()

    def end(self):
        try:
            self.tell("end")
            self._process.stdin.close()
            return self._process.wait(30)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            return -1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--holders", type=int, default=1)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--own-cache", type=int, choices=(0, 1), default=1, help="whether PyTorch keeps its cache")
    parser.add_argument("--hold-gib", type=int, default=0, help="of all holders together; 0: most of the GPU")
    parser.add_argument("--role", choices=("hold", "need"), help=argparse.SUPPRESS)
    parser.add_argument("--amount", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "hold":
        return hold(args.amount, args.busy)
    if args.role == "need":
        return need(args.amount)

    gpu = Gpu()
    free = gpu.settled_free()
    if free is None:
        skip("the GPU cannot be asked")
    if args.own_cache == 0:
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    each = (args.hold_gib or int(free * 0.72 / 1024)) // args.holders
    busy = ["--busy"] if args.busy else []
    holders = [Process("--role", "hold", "--amount", each, *busy) for _ in range(args.holders)]
    for holder in holders:
        holder.hear()
    alone = [holder.ask("steps") for holder in holders]  # one after the other: nobody beside it
    for holder in holders:
        holder.ask("fill")
    if args.busy:
        for holder in holders:
            holder.tell("train")
    time.sleep(1)

    # A first process that needs little finds out what is free beside its own context.
    probe = Process("--role", "need", "--amount", 1)
    probe.hear()
    probe.ask("go")
    free = gpu.free()
    probe.end()
    time.sleep(0.3)
    want = int(free + each * args.holders * 1024 * 0.45)
    needy = Process("--role", "need", "--amount", want)
    needy.hear()
    result, ms = needy.ask("go")
    time.sleep(0.5)

    trained = [holder.ask("stop") for holder in holders] if args.busy else []
    beside = [holder.ask("steps") for holder in holders]
    needy_status = needy.end()
    after = [holder.ask("steps") for holder in holders]
    failed = [holder.end() for holder in holders] + [needy_status]

    different = sum(a[2] != b[2] or a[2] != c[2] for a, b, c in zip(alone, beside, after))
    say("# holders", args.holders)
    say("# held_gib", each * args.holders)
    say("# free_gib", f"{free / 1024:.1f}")
    say("# wanted_gib", f"{want / 1024:.1f}")
    say("# served", int(result == "0"))
    say("# result", result)
    say("# call_ms", ms)

    def slowest(runs, at):
        return f"{max(float(run[at]) for run in runs):.2f}"

    say("# first_step_alone_ms", slowest(alone, 0))
    say("# step_alone_ms", slowest(alone, 1))
    say("# first_step_beside_ms", slowest(beside, 0))
    say("# step_beside_ms", slowest(beside, 1))
    say("# step_after_ms", slowest(after, 1))
    if trained:
        say("# training_step_ms", slowest(trained, 1))
        say("# longest_training_step_ms", slowest(trained, 2))
    say("# different", different)
    say("# failed", sum(status != 0 for status in failed))
    raise SystemExit(1 if different or any(failed) else 0)


main()
