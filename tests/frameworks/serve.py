#!/usr/bin/env python3
"""Generates text with a transformer of random weights, as a server would, and prints what it cost.

Requests of random prompt and answer length arrive in groups; a few groups are answered in turn, one token each. The
keys and values of a group grow with every token, and shrink when one of its answers is complete. Set
PYTORCH_NO_CUDA_MEMORY_CACHING=1 to take PyTorch's own cache out of the way.
"""

import argparse
import random
import time

from gpu_use import Gpu, find_torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--groups", type=int, default=6, help="how many groups of requests arrive")
args = parser.parse_args()

gpu = Gpu()
torch = find_torch()
functional = torch.nn.functional

LAYERS, WIDTH, HEADS, WORDS, TOGETHER = 8, 1024, 16, 32000, 3
torch.manual_seed(1)
random.seed(1)


def weights(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.float16) * 0.02


embedding = weights(WORDS, WIDTH)
layers = [
    (weights(3 * WIDTH, WIDTH), weights(WIDTH, WIDTH), weights(4 * WIDTH, WIDTH), weights(WIDTH, 4 * WIDTH))
    for _ in range(LAYERS)
]


class Group:
    """Requests that are answered together: one row each."""

    def __init__(self, requests):
        self.left = [answer for _, answer in requests]
        longest = max(prompt for prompt, _ in requests)
        self.words = torch.randint(WORDS, (len(requests), longest), device="cuda")
        self.cache = [None] * LAYERS
        self.answered = 0

    def attention(self, number, x, qkv):
        rows, length, _ = x.shape
        q, k, v = (part.view(rows, length, HEADS, -1).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        if self.cache[number]:
            k, v = (torch.cat((old, new), dim=2) for old, new in zip(self.cache[number], (k, v)))
        self.cache[number] = k, v
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        return out.transpose(1, 2).reshape(rows, length, WIDTH)

    def advance(self):
        """One more token for each; false when all answers are complete."""
        x = functional.embedding(self.words, embedding)
        for number, (qkv, out, up, down) in enumerate(layers):
            normal = functional.layer_norm(x, (WIDTH,))
            x = x + functional.linear(self.attention(number, x, functional.linear(normal, qkv)), out)
            normal = functional.layer_norm(x, (WIDTH,))
            x = x + functional.linear(functional.gelu(functional.linear(normal, up)), down)
        logits = functional.linear(x[:, -1], embedding).float()
        best, at = torch.topk(logits, 50)
        pick = torch.multinomial(torch.softmax(best / 0.8, dim=-1), 1)
        self.words = torch.gather(at, 1, pick)
        self.answered += len(self.left)
        self.left = [left - 1 for left in self.left]
        if min(self.left) > 0:
            return True
        stay = [row for row, left in enumerate(self.left) if left > 0]
        self.left = [self.left[row] for row in stay]
        if not stay:
            return False
        rows = torch.tensor(stay, device="cuda")
        self.words = self.words.index_select(0, rows)
        self.cache = [tuple(part.index_select(0, rows) for part in pair) for pair in self.cache]
        return True


def serve(groups):
    running, arrived, answered = [], 0, 0
    while arrived < groups or running:
        while arrived < groups and len(running) < TOGETHER:
            size = random.randint(1, 16)
            running.append(Group([(random.randint(16, 512), random.randint(4, 24)) for _ in range(size)]))
            arrived += 1
        still = []
        for group in running:
            if group.advance():
                still.append(group)
            else:
                answered += group.answered
        running = still
        gpu.used()
    torch.cuda.synchronize()
    return answered


with torch.inference_mode():
    serve(2)
    begin = time.perf_counter()
    tokens = serve(args.groups)
    seconds = time.perf_counter() - begin
    with gpu.watched():
        serve(2)

print(f"tokens {tokens}")
print(f"# seconds {seconds:.3f}")
print(f"# peak_mib {gpu.peak:.0f}")
print(f"# allocated_peak_mib {torch.cuda.max_memory_allocated() / 2**20:.0f}")
