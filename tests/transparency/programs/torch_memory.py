#!/usr/bin/env python3
"""PyTorch's allocator under the settings of the environment: streams, threads, late frees, sizes from bytes to a
gigabyte, out of memory, and its figures. Integers only; the mode that was asked for is shown to be in use.
"""

import os
import threading

from common import bits, check, torch_with_gpu

torch = torch_with_gpu()
torch.empty(1, device="cuda")
settings = os.environ.get("PYTORCH_ALLOC_CONF", "")
print("backend", torch.cuda.get_allocator_backend())
if "cudaMallocAsync" in settings:
    check("the backend asked for", torch.cuda.get_allocator_backend() == "cudaMallocAsync")
if "expandable_segments:True" in settings:
    torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    check("expandable segments", any(s.get("is_expandable") for s in torch.cuda.memory_snapshot()))


def work(seed, streams, rounds):
    """Exact integer work that frees what streams may still read; the sum of all results."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.int64)
    pending = []
    for i in range(rounds):
        n = int(torch.randint(1, 2_000_000, (1,), generator=generator))
        host = torch.randint(0, 1000, (n,), generator=generator, dtype=torch.int32).pin_memory()
        with torch.cuda.stream(streams[i % len(streams)]):
            a = host.to("cuda", non_blocking=True)
            b = a * 2 + 1
            order = torch.sort(b, descending=bool(i % 2)).values
            c = torch.cumsum(order.long(), 0)
            pending.append((host, c[-1] + (c[:: max(1, n // 7)] % 1000).sum()))
            del a, b, order, c
        if len(pending) > 8:
            _, value = pending.pop(0)
            torch.cuda.synchronize()
            total += value.cpu()
    torch.cuda.synchronize()
    for _, value in pending:
        total += value.cpu()
    return int(total)


print("one stream", work(1, [torch.cuda.current_stream()], 40))
print("four streams", work(2, [torch.cuda.Stream() for _ in range(4)], 40))
answers = {}


def thread_main(k):
    answers[k] = work(10 + k, [torch.cuda.Stream(), torch.cuda.Stream()], 15)


threads = [threading.Thread(target=thread_main, args=(k,)) for k in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("threads", [answers[k] for k in sorted(answers)])

side = torch.cuda.Stream()
for i in range(50):
    a = torch.full((1 << 20,), i, dtype=torch.int32, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        b = a * 3
    # The allocator may only reuse a once the side stream is done with it.
    a.record_stream(side)
    del a
    torch.full((1 << 20,), -1, dtype=torch.int32, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    if not bool((b == 3 * i).all()):
        check(f"record_stream, round {i}", False)
print("record_stream ok")

sizes = [1, 511, 512, 513, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (2 << 20) + 1, 21 << 20, 1 << 30]
blocks = [torch.full((size,), i % 251, dtype=torch.uint8, device="cuda") for i, size in enumerate(sizes)]
check("sizes", all(bool((block == i % 251).all()) for i, block in enumerate(blocks)))
print("ends", bits(torch.stack([block[-1] for block in blocks])))
del blocks

free, total = torch.cuda.mem_get_info()
print("total", total, "free within it", 0 < free <= total)
try:
    torch.empty(total * 4, dtype=torch.uint8, device="cuda")
    check("too much is refused", False)
except torch.OutOfMemoryError:
    check("too much is refused", True)
check("works afterwards", int(torch.ones(1 << 20, dtype=torch.int32, device="cuda").sum()) == 1 << 20)
torch.cuda.empty_cache()
print("allocated at the end", torch.cuda.memory_allocated() < 64 << 20)
