#!/usr/bin/env python3
"""PyTorch programs that do not fit on the GPU together.

    together.py turns|server [--share PERCENT] [--job-share PERCENT] [--seconds N] [--pause N]

turns: two programs that never pause each work on all of their memory, for so many seconds; it is so much of the GPU's,
or of what a limit shows of it, that they do not fit together.
server: one holds memory, answers two requests and pauses; then a job needs more than is free, and then come two more
requests. What each program finds in its memory must be what it wrote.

Prints "# NAME VALUE" lines. Exit status 1 when memory has changed or a program fails, 77 where nothing can be shown.
"""

import argparse
import os
import subprocess
import sys
import time


class Memory:
    """Blocks, each a percent of the GPU's, all of which are written in each pass."""

    def __init__(self, share, value):
        import torch

        self._torch, self._value = torch, value
        words = torch.cuda.get_device_properties(0).total_memory // 100 // 4
        self._blocks = [torch.full((words,), value, dtype=torch.int32, device="cuda") for _ in range(share)]
        torch.cuda.synchronize()

    def write(self):
        """All of it; returns how long that took, in s."""
        begin = time.monotonic()
        for block in self._blocks:
            block.add_(1)
        self._torch.cuda.synchronize()
        self._value += 1
        return time.monotonic() - begin

    def wrong(self):
        """How many words are not what was written."""
        return sum(int((block != self._value).sum()) for block in self._blocks)


def say(*words):
    print(*words, flush=True)


def work(share, value, seconds):
    memory = Memory(share, value)
    begin, times = time.monotonic(), []
    while time.monotonic() - begin < seconds:
        times.append(memory.write())
    times.sort()
    say(len(times), f"{times[len(times) // 2]:.4f}", f"{times[-1]:.2f}", memory.wrong())


def serve(share):
    """A pass for each line of input; the answer is its time and the words that are wrong."""
    memory = Memory(share, 7)
    say("ready")
    for _ in sys.stdin:
        say(f"{memory.write():.4f}", memory.wrong())


def begin(*words):
    return subprocess.Popen([sys.executable, __file__, *map(str, words)], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True)


def answer(process):
    words = process.stdout.readline().split()
    if not words:
        raise SystemExit(f"a program ended with status {process.wait()}")
    return words


def turns(options):
    start = time.monotonic()
    programs = [begin("work", "--share", options.share, "--value", 100 * i, "--seconds", options.seconds)
                for i in (1, 2)]
    failed = wrong = 0
    for number, program in enumerate(programs, 1):
        words = program.stdout.readline().split()
        failed += program.wait() != 0 or not words
        if words:
            say(f"# passes_{number}", words[0])
            say(f"# pass_s_{number}", words[1])
            say(f"# longest_s_{number}", words[2])
            wrong += int(words[3])
    say("# seconds", f"{time.monotonic() - start:.1f}")
    say("# failed", failed)
    say("# changed", wrong)
    return failed or wrong


def server(options):
    holder = begin("serve", "--share", options.share)
    answer(holder)
    wrong = 0

    def request(when):
        nonlocal wrong
        holder.stdin.write("\n")
        holder.stdin.flush()
        seconds, changed = answer(holder)
        wrong += int(changed)
        say(f"# answer_{when}_s", seconds)

    request("first")
    request("before")
    time.sleep(options.pause)
    start = time.monotonic()
    job = begin("work", "--share", options.job_share, "--value", 1, "--seconds", 3)
    words = job.stdout.readline().split()
    failed = job.wait() != 0 or not words
    say("# job_s", f"{time.monotonic() - start:.1f}")
    if words:
        wrong += int(words[3])
    request("after")
    request("then")
    holder.stdin.close()
    failed += holder.wait() != 0
    say("# failed", int(failed))
    say("# changed", wrong)
    return failed or wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["turns", "server", "work", "serve"])
    parser.add_argument("--share", type=int, default=30)
    parser.add_argument("--job-share", type=int, default=78)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--pause", type=float, default=7)
    parser.add_argument("--value", type=int, default=0)
    options = parser.parse_args()
    if options.mode == "turns" and options.share <= 50:
        parser.error("two of that share fit on the GPU together")
    try:
        import torch
    except ImportError:
        say("skipped: no PyTorch")
        return 77
    if not torch.cuda.is_available():
        say("skipped: PyTorch sees no CUDA device")
        return 77
    if options.mode == "work":
        work(options.share, options.value, options.seconds)
        return 0
    if options.mode == "serve":
        serve(options.share)
        return 0
    return 1 if (turns if options.mode == "turns" else server)(options) else 0


if __name__ == "__main__":
    sys.exit(main())
