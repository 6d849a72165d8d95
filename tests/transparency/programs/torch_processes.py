#!/usr/bin/env python3
"""torch.multiprocessing with CUDA tensors: both ways, written in place, many small ones, freed while still open.

torch_processes.py [child|parent]: which of the two is to run without what is preloaded, as native programs do beside
preloaded ones.
"""

import os
import sys

from common import bits, check, torch_with_gpu

KEPT = "TORCH_PROCESSES_PRELOAD"


def preloaded():
    """Whether the library is in this process, whatever the environment says."""
    with open("/proc/self/maps") as maps:
        return "libgpureclaim" in maps.read()


def worker(given, back, done, expected):
    torch = torch_with_gpu()
    if preloaded() != expected:
        raise SystemExit(9)
    while True:
        item = given.get()
        if item is None:
            break
        name, tensor = item
        if name == "in place":
            # The parent sees this write: the memory is shared, not copied.
            tensor.mul_(3)
            torch.cuda.synchronize()
            back.put((name, None))
        else:
            back.put((name, tensor.long().cumsum(0).int()))
        del tensor, item
    # Memory of results is this process's own: it lives until the parent has read everything.
    done.wait()


def without():
    """The environment, as it is read at exec, for one process with what is preloaded and one without."""
    plain = sys.argv[1] if len(sys.argv) > 1 else ""
    if plain == "parent" and "LD_PRELOAD" in os.environ:
        os.environ[KEPT] = os.environ.pop("LD_PRELOAD")
        os.execv(sys.executable, [sys.executable] + sys.argv)
    for_child = os.environ.pop(KEPT, os.environ.get("LD_PRELOAD", ""))
    expected = "libgpureclaim" in for_child and plain != "child"
    if plain == "parent" and preloaded():
        raise SystemExit("still preloaded")
    return for_child if plain != "child" else "", expected


def main():
    for_child, expected = without()
    torch = torch_with_gpu()
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    given, back, done = context.Queue(), context.Queue(), context.Event()
    process = context.Process(target=worker, args=(given, back, done, expected))
    os.environ["LD_PRELOAD"] = for_child
    process.start()
    results = []
    for n in (1, 1000, 300_000, 5_000_000):
        a = torch.randint(0, 50, (n,), dtype=torch.int32, device="cuda")
        given.put(("sum", a))
        name, got = back.get(timeout=60)
        check(f"{name} of {n}", torch.equal(got, a.long().cumsum(0).int()))
        results.append(got.clone())
        del got
        before = a.clone()
        given.put(("in place", a))
        name, _ = back.get(timeout=60)
        check(f"{name} {n}", torch.equal(a, before * 3))
        del a, before
        # Freed and allocated again while the other process may still have the old one open.
        torch.full((n,), -1, dtype=torch.int32, device="cuda")
    many = [torch.full((100 + i,), i, dtype=torch.int32, device="cuda") for i in range(40)]
    for tensor in many:
        given.put(("sum", tensor))
    for i in range(40):
        _, got = back.get(timeout=60)
        if not torch.equal(got, many[i].long().cumsum(0).int()):
            check(f"small tensor {i}", False)
        results.append(got.clone())
        del got
    check("40 small tensors", True)
    print("bits", bits(*results))
    given.put(None)
    done.set()
    process.join(60)
    print("the other process ended with", process.exitcode)


if __name__ == "__main__":
    main()
