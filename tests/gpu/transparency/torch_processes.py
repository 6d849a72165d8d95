#!/usr/bin/env python3
"""torch.multiprocessing with CUDA tensors: both ways, written in place, many small ones, freed while still open."""

from common import bits, check, torch_with_gpu


def worker(given, back, done):
    torch = torch_with_gpu()
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


def main():
    torch = torch_with_gpu()
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    given, back, done = context.Queue(), context.Queue(), context.Event()
    process = context.Process(target=worker, args=(given, back, done))
    process.start()
    results = []
    for n in (1, 1000, 300_000, 5_000_000):
        a = torch.randint(0, 50, (n,), dtype=torch.int32, device="cuda")
        given.put(("sum", a))
        name, got = back.get()
        check(f"{name} of {n}", torch.equal(got, a.long().cumsum(0).int()))
        results.append(got.clone())
        del got
        before = a.clone()
        given.put(("in place", a))
        name, _ = back.get()
        check(f"{name} {n}", torch.equal(a, before * 3))
        del a, before
        # Freed and allocated again while the other process may still have the old one open.
        torch.full((n,), -1, dtype=torch.int32, device="cuda")
    many = [torch.full((100 + i,), i, dtype=torch.int32, device="cuda") for i in range(40)]
    for tensor in many:
        given.put(("sum", tensor))
    for i in range(40):
        _, got = back.get()
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
