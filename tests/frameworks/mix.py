#!/usr/bin/env python3
"""Work of many kinds and sizes in one process, with results that stay for very different times: what fragments memory.

Images of any size go through a few convolutions, lists are sorted, matrices factorised, sequences joined; some
results are kept, a random one of them is dropped now and then. Set PYTORCH_NO_CUDA_MEMORY_CACHING=1 to take PyTorch's
own cache out of the way.
"""

import argparse
import random
import time

from gpu_use import Gpu, find_torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--jobs", type=int, default=1500)
args = parser.parse_args()

gpu = Gpu()
torch = find_torch()
functional = torch.nn.functional

torch.manual_seed(2)
random.seed(2)
KEPT = 120  # results that stay at a time
filters = [torch.randn(shape, device="cuda") * 0.1 for shape in ((16, 3, 3, 3), (32, 16, 3, 3), (64, 32, 3, 3))]


def image(scale):
    height, width = (random.randint(32, 160 * scale) for _ in range(2))
    x = torch.rand(random.randint(1, 4), 3, height, width, device="cuda")
    for weight in filters:
        x = functional.max_pool2d(functional.relu(functional.conv2d(x, weight, padding=1)), 2)
    return x


def ordered(scale):
    values = torch.rand(int(2 ** random.uniform(8, 18 + scale)), device="cuda")
    unique, counts = torch.unique((values.sort().values * 1000).long(), return_counts=True)
    return counts.cumsum(0) if random.random() < 0.5 else values


def factors(scale):
    n = random.randint(16, 200 * scale)
    a = torch.rand(random.randint(1, 4), n, n, device="cuda")
    return torch.linalg.cholesky_ex(a @ a.transpose(1, 2) + n * torch.eye(n, device="cuda")).L


def joined(scale):
    grown = torch.rand(0, 256, device="cuda")
    for _ in range(random.randint(2, 8)):
        grown = torch.cat((grown, torch.rand(random.randint(1, 500 * scale), 256, device="cuda")))
    weights = torch.softmax(grown[:1024] @ grown[:1024].T, dim=-1)
    return grown if random.random() < 0.3 else weights


def work(jobs):
    kept = []
    for number in range(jobs):
        scale = 1 + number * 8 // jobs % 4  # phases of growing size, twice
        result = random.choice((image, ordered, factors, joined))(scale)
        if random.random() < 0.6:
            kept.append(result)
        while len(kept) > KEPT or (kept and random.random() < 0.3):
            # Mostly young ones go, so that the old lie scattered.
            kept.pop(max(random.randrange(len(kept)), random.randrange(len(kept))))
        if number % 10 == 9:
            gpu.used()
    torch.cuda.synchronize()


with torch.inference_mode():
    work(50)
    begin = time.perf_counter()
    work(args.jobs)
    seconds = time.perf_counter() - begin
    with gpu.watched():
        work(args.jobs // 4)

print(f"jobs {args.jobs}")
print(f"# seconds {seconds:.3f}")
print(f"# peak_mib {gpu.peak:.0f}")
print(f"# allocated_peak_mib {torch.cuda.max_memory_allocated() / 2**20:.0f}")
