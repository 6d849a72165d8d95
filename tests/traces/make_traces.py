#!/usr/bin/env python3
"""Writes allocation traces in RMM's replay format: Thread,Time,Action,Pointer,Size,Stream.

    make_traces.py FOLDER

Three synthetic programs, the same ones on every run:
  training.csv   a transformer trained on batches of changing length: tensors' sizes follow from the layers' shapes
  inference.csv  a server with requests of random length, each with a cache of keys and values that lives while it runs
  fragments.csv  random sizes from 512 B to 90 MiB with lives of very different length, in phases of changing size
Pointers are only names here: a replayer gives each allocation an address of its own.
"""

import random
import sys
from heapq import heappop, heappush
from pathlib import Path


class Trace:
    def __init__(self, pace_ns):
        self.pace_ns = pace_ns  # the time between two operations
        self.rows = ["Thread,Time,Action,Pointer,Size,Stream"]
        self.time = 0
        self.next = 0x1000
        self.live = {}

    def row(self, action, pointer, size):
        self.time += self.pace_ns
        self.rows.append(f"1,{self.time},{action},{pointer:#x},{size},0x0")

    def alloc(self, size):
        pointer = self.next
        self.next += 512
        self.live[pointer] = max(1, int(size))
        self.row("allocate", pointer, self.live[pointer])
        return pointer

    def free(self, *pointers):
        for pointer in pointers:
            self.row("free", pointer, self.live.pop(pointer))

    def write(self, path):
        path.write_text("\n".join(self.rows) + "\n")


def training(steps=60, layers=6, width=512, batch=16, heads=8, lengths=(64, 96, 128, 160, 200, 256)):
    """Forward keeps what backward needs; backward frees it, newest first, and makes the weights' gradients."""
    trace, rng = Trace(17000), random.Random(1)
    shapes = [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,),
              (width, 4 * width), (width,), (width,), (width,), (width,), (width,)] * layers

    def floats(shape):
        size = 4
        for n in shape:
            size *= n
        return size

    for shape in shapes:
        trace.alloc(floats(shape))
    trace.alloc(32 << 20)  # the matrix library's workspace
    moments = False
    gradients = []
    for step in range(steps):
        length = 128 if step < 10 else rng.choice(lengths)
        tokens = batch * length
        row = 4 * tokens * width

        x = trace.alloc(row)
        saved = []
        hidden = x
        for _ in range(layers):
            keep = []
            qkv = trace.alloc(3 * row)
            biased = trace.alloc(3 * row)
            trace.free(qkv)
            attention, logsumexp = trace.alloc(row), trace.alloc(4 * batch * heads * length)
            seeds = [trace.alloc(8), trace.alloc(8)]
            projected = trace.alloc(row)
            dropped, mask = trace.alloc(row), trace.alloc(tokens * width)
            trace.free(projected)
            added = trace.alloc(row)
            trace.free(dropped)
            normal = trace.alloc(row)
            moments1 = [trace.alloc(4 * tokens), trace.alloc(4 * tokens)]
            keep += [biased, attention, logsumexp, *seeds, mask, added, normal, *moments1]
            wide = trace.alloc(4 * row)
            active = trace.alloc(4 * row)
            trace.free(wide)
            dropped_wide, mask_wide = trace.alloc(4 * row), trace.alloc(4 * tokens * width)
            keep += [active, dropped_wide, mask_wide]
            narrow = trace.alloc(row)
            dropped, mask = trace.alloc(row), trace.alloc(tokens * width)
            trace.free(narrow)
            added = trace.alloc(row)
            trace.free(dropped)
            hidden = trace.alloc(row)
            moments2 = [trace.alloc(4 * tokens), trace.alloc(4 * tokens)]
            keep += [mask, added, hidden, *moments2]
            saved.append(keep)
        difference, squares = trace.alloc(row), trace.alloc(row)
        loss = trace.alloc(4)
        trace.free(squares)
        trace.free(*gradients)
        gradients = []

        gradient = trace.alloc(row)
        trace.free(difference)
        for keep in reversed(saved):
            (biased, attention, logsumexp, seed1, seed2, mask1, added1, normal1, mean1, rstd1,
             active, dropped_wide, mask_wide, mask2, added2, hidden, mean2, rstd2) = keep
            back = trace.alloc(row)
            gradients += [trace.alloc(4 * width), trace.alloc(4 * width)]
            trace.free(gradient, added2, hidden, mean2, rstd2)
            narrow = trace.alloc(row)
            trace.free(mask2)
            gradients.append(trace.alloc(16 * width * width))
            gradients.append(trace.alloc(4 * width))
            wide = trace.alloc(4 * row)
            trace.free(narrow, dropped_wide)
            masked = trace.alloc(4 * row)
            trace.free(wide, mask_wide)
            relu = trace.alloc(4 * row)
            trace.free(masked, active)
            gradients.append(trace.alloc(16 * width * width))
            gradients.append(trace.alloc(16 * width))
            narrow = trace.alloc(row)
            trace.free(relu)
            total = trace.alloc(row)
            trace.free(narrow, back, normal1)
            back = trace.alloc(row)
            gradients += [trace.alloc(4 * width), trace.alloc(4 * width)]
            trace.free(total, added1, mean1, rstd1)
            narrow = trace.alloc(row)
            trace.free(mask1)
            gradients.append(trace.alloc(4 * width * width))
            gradients.append(trace.alloc(4 * width))
            inner = trace.alloc(row)
            trace.free(narrow)
            wide = trace.alloc(3 * row)
            scratch = trace.alloc(4 * batch * heads * length)
            trace.free(inner, attention, logsumexp, seed1, seed2, biased, scratch)
            gradients.append(trace.alloc(12 * width * width))
            gradients.append(trace.alloc(12 * width))
            narrow = trace.alloc(row)
            trace.free(wide)
            gradient = trace.alloc(row)
            trace.free(narrow, back)
        trace.free(gradient, x, loss)

        if not moments:
            for shape in shapes:
                trace.alloc(floats(shape))
                trace.alloc(floats(shape))
            moments = True
        roots = [trace.alloc(floats(shape)) for shape in shapes]
        trace.free(*roots)
    return trace


def inference(requests=500, layers=24, width=2048, heads=16):
    """Continuous batching without paging: each request's cache grows by doubling; activations come and go."""
    trace, rng = Trace(500000), random.Random(2)
    for _ in range(layers):
        for columns in (3 * width, width, 4 * width, 4 * width):
            trace.alloc(2 * width * columns)
    running, arrived = [], 0
    while arrived < requests or running:
        while arrived < requests and len(running) < 12 and rng.random() < 0.6:
            prompt, answer = int(min(2000, rng.lognormvariate(5.5, 0.8))) + 1, int(rng.expovariate(1 / 120)) + 1
            room = prompt
            cache = trace.alloc(4 * layers * width * room)
            pair = [trace.alloc(2 * prompt * 4 * width), trace.alloc(2 * prompt * width)]
            scores = trace.alloc(2 * heads * min(prompt, 512) ** 2)
            trace.free(*pair, scores)
            running.append([cache, prompt, room, answer])
            arrived += 1
        activations = []
        for _ in range(4):
            activations.append(trace.alloc(2 * max(1, len(running)) * width * rng.choice((1, 3, 4))))
        logits = trace.alloc(4 * max(1, len(running)) * 50304)
        trace.free(*reversed(activations))
        for request in list(running):
            request[1] += 8
            request[3] -= 8
            if request[1] > request[2]:
                room = request[2] + max(64, request[2] // 2)
                grown = trace.alloc(4 * layers * width * room)
                trace.free(request[0])
                request[0], request[2] = grown, room
            if request[3] <= 0:
                trace.free(request[0])
                running.remove(request)
        trace.free(logits)
    return trace


def fragments(operations=16000):
    """Sizes uniform in their logarithm; most blocks die young, a few stay long; each phase has its own sizes."""
    trace, rng = Trace(10000), random.Random(3)
    alive = []
    for i in range(operations):
        while alive and (alive[0][0] <= i or len(alive) > 900):
            trace.free(heappop(alive)[1])
        phase = i * 8 // operations
        size = 2 ** rng.uniform(9, 22 + 1.5 * (phase % 4))
        life = rng.expovariate(1 / 400 if rng.random() < 0.1 else 1 / 30)
        heappush(alive, (i + 1 + int(life), trace.alloc(size)))
    trace.free(*(pointer for _, pointer in sorted(alive)))
    return trace


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for make in (training, inference, fragments):
        make().write(folder / f"{make.__name__}.csv")


main()
