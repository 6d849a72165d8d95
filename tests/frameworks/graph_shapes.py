#!/usr/bin/env python3
"""Captures a CUDA graph for each batch size, 1 to 128, and tells what that cost.

  toy          a few operations between pinned buffers
  transformer  two layers in half precision; plain attention, so that there are large temporaries

All graphs read the same static input and write the same static output, each the first rows of them. With --check they
are then replayed in random order while other tensors come and go, and their results are compared, bit for bit, with
those without graphs. --compile does the same by torch.compile with "reduce-overhead" for eight sizes, and compares
within a tolerance. The last line of output is JSON; exit status 1 when something failed, 77 without a device.

Memory is the difference from before the first capture to after the last one, each time with the caches emptied:
held_bytes is what the allocator took from the driver, card_bytes what NVML shows, with the driver's own part.

What allocates is chosen by the environment: PYTORCH_CUDA_ALLOC_CONF, or LD_PRELOAD, GPURECLAIM_GRAPH_ARENA and
PYTORCH_NO_CUDA_MEMORY_CACHING=1.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import random
import statistics
import sys
import time
import traceback
from pathlib import Path

from gpu_use import Gpu, find_torch, skip

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools" / "python"))
import gpureclaim  # noqa: E402

LENGTH, WIDTH = 128, 1024
OTHERS = 12  # other tensors that live at a time while graphs are replayed


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("toy", "transformer"), default="toy")
    parser.add_argument("--order", choices=("ascending", "descending", "shuffled"), default="ascending")
    parser.add_argument("--sizes", type=int, default=128, help="the largest batch")
    parser.add_argument("--only-largest", action="store_true", help="one graph, for the largest batch")
    parser.add_argument("--pool", choices=("private", "shared"), default="private", help="the graphs' pool of PyTorch")
    parser.add_argument("--mode", choices=("global", "thread_local", "relaxed"), default="global",
                        help="of the captures")
    parser.add_argument("--check", action="store_true", help="compare the results")
    parser.add_argument("--rounds", type=int, default=2, help="how often all are replayed for that")
    parser.add_argument("--repeat", type=int, default=7, help="timed replays of each size; 0: none")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--serve", action="store_true",
                        help="a child for each line of input, with that line as its arguments: PyTorch is imported "
                             "once, and each child has a CUDA context of its own")
    return parser.parse_args(words)


def serve():
    """Returns, in a child, the words of a line of input; ends the program with the input."""
    try:
        import torch  # noqa: F401
    except ImportError:
        skip("no PyTorch")
    while True:
        print("ready", flush=True)
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            return line.split()
        _, status = os.waitpid(child, 0)
        print(f"done {os.waitstatus_to_exitcode(status)}", flush=True)


class Toy:
    """The results go to the host, which reads and writes their buffer only while no graph runs."""

    def __init__(self, rows):
        self.a, self.b = (torch.randn(rows, WIDTH).pin_memory() for _ in range(2))
        self.out = torch.zeros(rows, WIDTH).pin_memory()

    def run(self, n):
        a = self.a[:n].to("cuda", non_blocking=True)
        b = self.b[:n].to("cuda", non_blocking=True)
        o = a**2 + b * 2
        self.out[:n].copy_(o, non_blocking=True)


def layers():
    torch.backends.mha.set_fastpath_enabled(False)
    for choose in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):
        with contextlib.suppress(AttributeError):
            getattr(torch.backends.cuda, choose)(False)
    both = [torch.nn.TransformerEncoderLayer(WIDTH, nhead=16, dim_feedforward=4 * WIDTH, batch_first=True)
            for _ in range(2)]
    return torch.nn.Sequential(*both).to("cuda", torch.half).eval()


class Transformer:
    def __init__(self, rows):
        self.model = layers()
        self.x = torch.randn(rows, LENGTH, WIDTH, device="cuda", dtype=torch.half)
        self.out = torch.zeros_like(self.x)

    def run(self, n):
        self.out[:n].copy_(self.model(self.x[:n]))


def same(a, b):
    """Bit for bit."""
    whole = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.view(whole), b.view(whole))


def held():
    """What is held now, with the caches emptied."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    if gpureclaim.available():
        gpureclaim.reclaim(rung="sync")
    free, total = torch.cuda.mem_get_info()
    figures = {"torch_bytes": torch.cuda.memory_reserved(), "device_bytes": total - free}
    used = gpu.used()
    if used is not None:
        figures["card_bytes"] = int(used * 2**20)
    if gpureclaim.available():
        status = gpureclaim.status()
        for name in ("reserved", "live", "cached", "graph"):
            figures[f"library_{name}_bytes"] = status[f"{name}_bytes"]
    figures["held_bytes"] = figures.get("library_reserved_bytes", figures["torch_bytes"])
    return figures


def taken(before, after):
    for name in after:
        print(f"# {name[:-6]}: {before[name] / 2**20:.2f} MiB before, {after[name] / 2**20:.2f} after")
    return {name: after[name] - before[name] for name in after if name in before}


def microseconds(call, sizes, repeat, stream):
    """The mean over sizes of the median of each size."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    medians = []
    with torch.cuda.stream(stream):
        for n in sizes:
            times = []
            for _ in range(repeat):
                torch.cuda.synchronize()
                begin.record(stream)
                call(n)
                end.record(stream)
                end.synchronize()
                times.append(1000 * begin.elapsed_time(end))
            medians.append(statistics.median(times))
    return statistics.mean(medians)


def microseconds_in_a_row(call, sizes, rounds, stream):
    """The mean time of a call, where none is waited for: what the GPU takes."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        torch.cuda.synchronize()
        begin.record(stream)
        for _ in range(rounds):
            for n in sizes:
                call(n)
        end.record(stream)
        end.synchronize()
    return 1000 * begin.elapsed_time(end) / (rounds * len(sizes))


class Others:
    """Tensors of random sizes, filled with random numbers, which come and go and must stay as they are."""

    def __init__(self):
        self.random = random.Random(7)
        self.tensors = []
        self.spoiled = 0

    def come(self):
        elements = int(2 ** self.random.uniform(9, 26)) // 8  # up to 64 MiB
        tensor = torch.empty(elements, dtype=torch.int64, device="cuda").random_()
        self.tensors.append((tensor, tensor.sum()))

    def go(self, left):
        while len(self.tensors) > left:
            tensor, before = self.tensors.pop(self.random.randrange(len(self.tensors)))
            self.spoiled += int((tensor.sum() != before).item())


def capture(model, n, pool, stream):
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(**({"pool": pool} if pool else {}), capture_error_mode=args.mode)
        try:
            model.run(n)
        except BaseException:
            with contextlib.suppress(Exception):
                graph.capture_end()
            raise
        graph.capture_end()
    return graph


def check(model, graphs, wanted, stream):
    """How many sizes ever gave another result, and how many other tensors were not what was written to them."""
    others, differ = Others(), set()
    for _ in range(args.rounds):
        sizes = list(graphs)
        others.random.shuffle(sizes)
        for n in sizes:
            others.come()
            with torch.cuda.stream(stream):
                model.out[:n].fill_(math.nan)  # the toy's by the host: no graph is running
                graphs[n].replay()
            # Beside the replay.
            others.come()
            others.go(OTHERS)
            torch.cuda.synchronize()
            if not same(model.out[:n], wanted[n]):
                differ.add(n)
    others.go(0)
    if differ:
        print(f"# sizes that differ: {sorted(differ)}")
    return len(differ), others.spoiled


def graphs_of_sizes(result):
    sizes = [args.sizes] if args.only_largest else list(range(1, args.sizes + 1))
    model = {"toy": Toy, "transformer": Transformer}[args.model](args.sizes)
    stream, wanted, graphs = torch.cuda.Stream(), {}, {}
    torch.cuda.synchronize()
    # Warm on the stream that is captured later: kernels are loaded, and cuBLAS has its workspace there.
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.run(args.sizes)
        for n in sizes:
            model.run(n)
            torch.cuda.synchronize()
            if args.check:
                wanted[n] = model.out[:n].clone()
    if args.repeat:
        result["eager_us"] = microseconds(model.run, sizes, args.repeat, stream)
    if args.order == "shuffled":
        random.Random(11).shuffle(sizes)
    elif args.order == "descending":
        sizes.reverse()

    pool = torch.cuda.graph_pool_handle() if args.pool == "shared" else None
    before = held()
    gc.disable()  # a capture is no time to destroy events
    begin = time.perf_counter()
    try:
        for n in sizes:
            graphs[n] = capture(model, n, pool, stream)
        torch.cuda.synchronize()
        result["capture_s"] = time.perf_counter() - begin
    finally:
        gc.enable()
        result["captured"] = len(graphs)
        if len(graphs) < len(sizes):
            print(f"# the capture of batch size {sizes[len(graphs)]} failed, after {len(graphs)} others")
    result |= taken(before, held())
    if args.check:
        result["differ"], result["spoiled"] = check(model, graphs, wanted, stream)
        print(f"# sizes that differ: {result['differ']} of {len(sizes)}; other tensors spoiled: {result['spoiled']}")
    if args.repeat:
        result["replay_us"] = microseconds(lambda n: graphs[n].replay(), sizes, args.repeat, stream)
        result["replay_in_a_row_us"] = microseconds_in_a_row(lambda n: graphs[n].replay(), sizes, args.repeat, stream)


def compiled(result):
    """Eight sizes; PyTorch captures by itself, in the second or third call of each."""
    sizes = [max(1, args.sizes * part // 8) for part in range(1, 9)]
    model = layers()
    x = torch.randn(args.sizes, LENGTH, WIDTH, device="cuda", dtype=torch.half)
    wanted = {n: model(x[:n]) for n in sizes}
    stream = torch.cuda.current_stream()
    if args.repeat:
        result["eager_us"] = microseconds(lambda n: model(x[:n]), sizes, args.repeat, stream)
    before = held()
    begin = time.perf_counter()
    fast = torch.compile(model, mode="reduce-overhead")
    inputs = {n: x[:n] for n in sizes}
    for given in inputs.values():
        try:
            torch._dynamo.maybe_mark_dynamic(given, 0)  # one compilation for all sizes, not two
        except Exception as error:
            print(f"# maybe_mark_dynamic: {error!r}")

    def call(n):
        torch.compiler.cudagraph_mark_step_begin()
        return fast(inputs[n])

    for n in sizes:
        for _ in range(4):
            call(n)
        torch.cuda.synchronize()
    result["capture_s"], result["captured"] = time.perf_counter() - begin, len(sizes)
    result |= taken(before, held())
    if args.check:
        others, worst, differ = Others(), 0.0, set()
        for _ in range(args.rounds):
            for n in others.random.sample(sizes, len(sizes)):
                others.come()
                out = call(n)
                others.come()
                others.go(OTHERS)
                error = (out.float() - wanted[n].float()).abs().max().item()
                worst = max(worst, error) if error == error else math.inf
                if not error < 0.05:
                    differ.add(n)
        others.go(0)
        result["differ"], result["spoiled"] = len(differ), others.spoiled
        print(f"# sizes that differ: {sorted(differ)}, by {worst:.4f} at most; other tensors spoiled: {others.spoiled}")
    if args.repeat:
        result["replay_us"] = microseconds(call, sizes, args.repeat, stream)


args = parse(None)
if args.serve:
    args = parse(serve())
gpu = Gpu()
torch = find_torch()
torch.manual_seed(5)
outcome = {"model": args.model, "order": "largest" if args.only_largest else args.order, "pool": args.pool}
try:
    with torch.no_grad():
        (compiled if args.compile else graphs_of_sizes)(outcome)
except Exception as why:
    traceback.print_exc()
    outcome["failed"] = f"{type(why).__name__}: {why}".splitlines()[0][:300]
print(json.dumps(outcome), flush=True)
raise SystemExit(1 if "failed" in outcome or outcome.get("differ") or outcome.get("spoiled") else 0)
