#!/usr/bin/env python3
"""PyTorch programs whose tensors have other sizes in every step, and what they cost.

  decode   text is generated; caches of keys and values grow by a token at a time
  unet     a convolutional network with skip connections is trained under autocast on images of many sizes
  graph    a network is trained on graphs of any number of nodes and edges
  streams  work of any size on four streams, each result used on another stream
  beam     a beam search: caches are reordered and grow with every token
  experts  a mixture of experts is trained; each expert gets another number of tokens in every step

Set PYTORCH_NO_CUDA_MEMORY_CACHING=1 to take PyTorch's own cache out of the way.
"""

import argparse
import random
import time

from gpu_use import Gpu, find_torch
from turns import Turns, add_options

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("program", choices=("decode", "unet", "graph", "streams", "beam", "experts"))
parser.add_argument("--steps", type=int, default=200)
add_options(parser)
args = parser.parse_args()

gpu = Gpu()
torch = find_torch()
nn, functional = torch.nn, torch.nn.functional

torch.manual_seed(3)
random.seed(3)
torch.backends.cuda.enable_cudnn_sdp(False)  # it compiles for every size anew, which would be all that is measured
LAYERS, WIDTH, HEADS, WORDS = 6, 1024, 16, 32000


class Decoder:
    """A transformer of random weights with a cache per layer, which grows by concatenation."""

    def __init__(self):
        def weights(*shape):
            return torch.randn(*shape, device="cuda", dtype=torch.float16) * 0.02

        self.embedding = weights(WORDS, WIDTH)
        self.layers = [(weights(3 * WIDTH, WIDTH), weights(WIDTH, WIDTH), weights(4 * WIDTH, WIDTH),
                        weights(WIDTH, 4 * WIDTH)) for _ in range(LAYERS)]

    def logits(self, words, cache):
        """Of the next word of each row; CACHE, a list of (keys, values) or None, then knows WORDS, too."""
        x = functional.embedding(words, self.embedding)
        rows, length = words.shape
        for number, (qkv, out, up, down) in enumerate(self.layers):
            parts = functional.linear(functional.layer_norm(x, (WIDTH,)), qkv).chunk(3, dim=-1)
            q, k, v = (part.view(rows, length, HEADS, -1).transpose(1, 2) for part in parts)
            if cache[number]:
                k, v = (torch.cat((old, new), dim=2) for old, new in zip(cache[number], (k, v)))
            cache[number] = k, v
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
            x = x + functional.linear(seen.transpose(1, 2).reshape(rows, length, WIDTH), out)
            x = x + functional.linear(functional.gelu(functional.linear(functional.layer_norm(x, (WIDTH,)), up)), down)
        return functional.linear(x[:, -1], self.embedding).float()


@torch.inference_mode()
def decode():
    """Three groups of requests; each step is a token for each of them. A group that is done makes place for another."""
    model, groups = Decoder(), []
    while True:
        while len(groups) < 3:
            rows, prompt, answer = random.randint(2, 16), random.randint(32, 768), random.randint(10, 60)
            words = torch.randint(WORDS, (rows, prompt), device="cuda")
            groups.append([words, [None] * LAYERS, answer])
        for group in groups:
            logits = model.logits(group[0], group[1])
            group[0] = torch.multinomial(torch.softmax(logits / 0.8, dim=-1), 1)
            group[2] -= 1
        groups = [group for group in groups if group[2] > 0]
        yield logits.mean()


@torch.inference_mode()
def beam():
    """One request at a time, of four beams for each of some prompts; each step is a token."""
    model, width = Decoder(), 4
    while True:
        rows = random.randint(1, 6)
        words = torch.randint(WORDS, (rows * width, random.randint(32, 512)), device="cuda")
        cache, score = [None] * LAYERS, torch.zeros(rows, width, device="cuda")
        first = torch.arange(rows, device="cuda").unsqueeze(1) * width
        for _ in range(random.randint(10, 80)):
            chances = torch.log_softmax(model.logits(words, cache), dim=-1).view(rows, width, WORDS)
            score, at = (chances + score.unsqueeze(2)).view(rows, width * WORDS).topk(width)
            beams = (first + at // WORDS).view(-1)
            words = (at % WORDS).view(-1, 1)
            cache = [tuple(part.index_select(0, beams) for part in pair) for pair in cache]
            yield score.mean()


def trained(model, loss_of):
    """Steps of training; LOSS_OF makes a batch of its own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    while True:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        yield loss.detach()


class Unet(nn.Module):
    CHANNELS = 32, 64, 128, 256

    def __init__(self):
        super().__init__()
        before = (3, *self.CHANNELS)
        self.down = nn.ModuleList(self.block(a, b) for a, b in zip(before, self.CHANNELS))
        self.up = nn.ModuleList(self.block(a + b, b) for a, b in zip(self.CHANNELS[1:], self.CHANNELS))
        self.last = nn.Conv2d(self.CHANNELS[0], 3, 1)

    @staticmethod
    def block(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(),
                             nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())

    def forward(self, x):
        skipped = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else functional.max_pool2d(x, 2))
            skipped.append(x)
        skipped.pop()
        for block in reversed(self.up):
            skip = skipped.pop()
            x = block(torch.cat((functional.interpolate(x, size=skip.shape[2:]), skip), dim=1))
        return self.last(x)


def unet():
    def loss(model):
        height, width = (64 * random.randint(1, 5) for _ in range(2))
        x = torch.rand(random.choice((4, 8)), 3, height, width, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return (model(x) - x).square().mean()

    return trained(Unet().cuda(), loss)


class GraphNetwork(nn.Module):
    def __init__(self, width=256, layers=4):
        super().__init__()
        self.message = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.change = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))

    def forward(self, x, begin, end):
        for message, change in zip(self.message, self.change):
            sent = functional.relu(message(torch.cat((x[begin], x[end]), dim=1)))
            heard = torch.zeros_like(x).index_add(0, end, sent)
            x = x + functional.relu(change(torch.cat((x, heard), dim=1)))
        return x


def graph():
    def loss(model):
        nodes = random.randint(1000, 20000)
        begin, end = torch.randint(nodes, (2, nodes * random.randint(2, 8)), device="cuda")
        x = torch.randn(nodes, 256, device="cuda")
        return (model(x, begin, end) - x).square().mean()

    return trained(GraphNetwork().cuda(), loss)


@torch.inference_mode()
def streams():
    """Each step: a chain of products on each stream, and each result used on the next stream."""
    lanes = [torch.cuda.Stream() for _ in range(4)]
    weights = torch.randn(1024, 1024, device="cuda") * 0.03
    results = [None] * len(lanes)
    torch.cuda.synchronize()
    while True:
        for number, lane in enumerate(lanes):
            with torch.cuda.stream(lane):
                x = torch.randn(random.randint(64, 4096), 1024, device="cuda")
                for _ in range(random.randint(2, 6)):
                    x = functional.gelu(x @ weights)
                before = results[number - 1]
                if before is not None:
                    lane.wait_stream(lanes[number - 1])
                    before.record_stream(lane)
                    x = torch.cat((x, before[: random.randint(1, len(before))].relu()))
                results[number] = x[: random.randint(1, len(x))].clone()
                mean = x.mean()
        yield mean


class Experts(nn.Module):
    def __init__(self, width=512, experts=8, layers=3):
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(layers))
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                          for _ in range(experts)) for _ in range(layers))

    def forward(self, x):
        for gate, experts in zip(self.gates, self.experts):
            weight, chosen = torch.softmax(gate(x), dim=-1).topk(2)
            mixed = torch.zeros_like(x)
            for number, expert in enumerate(experts):
                tokens, place = (chosen == number).nonzero(as_tuple=True)
                if len(tokens):
                    mixed = mixed.index_add(0, tokens, expert(x[tokens]) * weight[tokens, place].unsqueeze(1))
            x = x + mixed
        return x


def experts():
    def loss(model):
        x = torch.randn(random.randint(512, 8192), 512, device="cuda")
        return (model(x) - x.roll(1, 0)).square().mean()

    return trained(Experts().cuda(), loss)


steps = globals()[args.program]()
next(steps)  # kernels are loaded
torch.cuda.synchronize()
gpu.used()

if args.turns:
    Turns(torch.cuda.synchronize, args.times).take(lambda: next(steps), args.steps)
    raise SystemExit

begin = time.perf_counter()
for number in range(args.steps):
    result = next(steps)
torch.cuda.synchronize()
seconds = time.perf_counter() - begin
with gpu.watched():
    for number in range(args.steps // 4):
        next(steps)
    torch.cuda.synchronize()

print(f"result {result.item():.4f}")
print(f"# seconds {seconds:.3f}")
print(f"# peak_mib {gpu.peak:.0f}")
print(f"# allocated_peak_mib {torch.cuda.max_memory_allocated() / 2**20:.0f}")
