#!/usr/bin/env python3
"""gpureclaim report: --html, its sentences that say what to do, --pytorch, --perfetto and --csv: of files made here.
The page is also tried in a browser. Perfetto and RMM's benchmark are not here: what their readers ask of a file, by
their sources (json_trace_parser_impl.cc, log_parser.hpp and replay.cpp), is checked instead.

Usage: html_test.py GPURECLAIM
Without chromium the page is not tried in a browser; a line says so.
"""

import collections
import csv
import json
import math
import os
import pickle
import pickletools
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time

COMMAND = sys.argv[1]
MIB, GIB, SECOND = 2**20, 2**30, 10**9
HIT, MISS, FREE, REFUSED, COUNTER, RUNG, RESERVED, KIND, LIMIT = range(1, 10)
CAPTURE_BEGIN, CAPTURE_END, STACK, QUARANTINE = range(10, 14)
DECAYED_BYTES, LIMIT_HITS, SYNC, TRIM, DRIVER = 11, 17, 5, 3, 5
NOWHERE = 255
# Would end the data, the attribute or the script, or be an element, where a page took it for more than text.
HOSTILE = "</script><script>broken=1</script>\"'<img src=x onerror=broken=1><!--<script>"
failed = 0
# The command keeps what it has read of origins until it ends.
os.environ["ASAN_OPTIONS"] = ":".join(filter(None, [os.environ.get("ASAN_OPTIONS"), "detect_leaks=0"]))


def check(good, what):
    global failed
    if not good:
        print("FAILED:", what, flush=True)
        failed = 1


def write_trace(path, entries, command="app"):
    """entries: (time in ns, kind, device, detail, address, bytes)."""
    batches = -(-len(entries) // 64)
    with open(path, "wb") as file:
        file.write(struct.pack("<8sIIIIQQQQ", b"GRTRACE", 5, 4096, 32, 64, 7, 10**18, batches, batches + 1))
        file.write(struct.pack("<64s", b"A GPU") + bytes(15 * 64))
        file.write(struct.pack("<1024s1992x", command.encode()))
        for at, what, device, detail, address, size in entries:
            file.write(struct.pack("<QQQQ", at, address, size, 1 | what << 32 | device << 40 | detail << 48))


def write_origins(path, stacks):
    """stacks: (bytes of a block or None, names of Python's functions, innermost first). Returns their numbers."""
    records, blocks, numbers, stack_numbers = b"", b"", {}, []

    def add(kind, content):
        nonlocal records
        number = (4096 + len(records)) // 8
        content += bytes(-len(content) % 8)
        records += struct.pack("<II", kind, 8 + len(content)) + content
        return number

    for size, names in stacks:
        for name in names:
            if name not in numbers:
                numbers[name] = add(2, struct.pack("<I", 31) + name.encode(errors="surrogateescape") + b"\0a file.py\0")
        stack = add(3, bytes(16) + b"".join(struct.pack("<Q", 1 << 63 | numbers[name]) for name in names))
        stack_numbers.append(stack)
        if size is not None:
            blocks += struct.pack("<QQQIIQ", 0x1000 + len(blocks), size, SECOND, 1, stack, 0)
    with open(path, "wb") as file:
        file.write(struct.pack("<8sIIQQQQQQQQQ1024s2984x", b"GRORIGN", 2, 4096, 4096 + len(records), 7, 10**18, 0, 0,
                               4096 + len(records), len(blocks) // 40, 0, 0, b"app"))
        file.write(records + blocks)
    return stack_numbers


def report(*arguments, text=True):
    done = subprocess.run([COMMAND, "report", *arguments], capture_output=True, text=text, timeout=60)
    check(done.returncode == 0 and not done.stderr, f"report {arguments}: {done.returncode}, {done.stderr}")
    return done.stdout


def data_of(page):
    """What stands between the tags, up to the first that could end it."""
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script', page, re.S)[1])


def sentences(folder, entries, wanted):
    """The text and the page say what is wanted and no more."""
    path = os.path.join(folder, "some.trace")
    write_trace(path, entries)
    said = re.findall(r"^    (?!\d)(.*\.)$|^    (\d.*\.)$", report(path).partition("what to do:")[2], re.M)
    said = [a or b for a, b in said]
    check(len(said) == len(wanted) and all(map(re.search, wanted, said)), f"{said} instead of {wanted}")
    check(data_of(report("--html", path))["advice"] == said, f"{said}: not so in the page")


def blocks(sizes, start=0, kind=HIT):
    return [(start + i, kind, 0, 0, 0x100000 * (i + 1), size) for i, size in enumerate(sizes)]


def frees(count, start):
    return [(start + i, FREE, NOWHERE, 0, 0x100000 * (i + 1), 0) for i in range(count)]


def test_sentences(folder):
    even = [2 * MIB, 3 * MIB, 4 * MIB]
    sentences(folder, blocks(even) + frees(3, SECOND), [])
    sentences(folder, blocks([MIB] * 3) + frees(3, SECOND), [r"^100 % of the peak of 3.000 MiB was 3 blocks of 1.000"])
    sentences(folder, blocks(even) + frees(2, SECOND), [r"^4.000 MiB was never freed: gpureclaim record --backtrace"])
    sentences(folder, blocks(even) + [(SECOND, REFUSED, 0, 0, 0, GIB)] + frees(3, SECOND),
              ["^1 request failed: the GPU was full"])
    sentences(folder, blocks(even) + [(9, COUNTER, NOWHERE, LIMIT_HITS, 0, 1), (9, REFUSED, 0, 0, 0, 1),
                                      (9, REFUSED, 0, 0, 0, 1)] + frees(3, SECOND),
              ["^2 requests failed: raise GPURECLAIM_HARD_LIMIT"])
    sentences(folder, blocks(even) + [(9, RUNG, 0, SYNC, SECOND // 50, MIB)] + frees(3, SECOND),
              [r"^In a run of 1.000 s allocations of all threads waited 0.020 s for memory"])
    sentences(folder, blocks(even) + [(9, RUNG, 0, SYNC, SECOND // 200, MIB)] + frees(3, SECOND), [])
    many = blocks([(1 + i) * 4096 for i in range(100)], kind=MISS) + frees(100, SECOND)
    sentences(folder, many, ["^The driver was asked for 100 of 100 allocations: .*GPURECLAIM_RELEASE_THRESHOLD"])
    sentences(folder, many + [(9, COUNTER, NOWHERE, DECAYED_BYTES, 0, MIB)], ["1.000 MiB .*a longer GPURECLAIM_DECAY"])
    cached = [(0, RESERVED, 0, 0, 0, 11 * MIB)] + blocks(even, 1) + frees(3, 9 * SECOND)
    sentences(folder, cached, [])
    sentences(folder, [(0, RESERVED, 0, 0, 0, 11 * MIB)] + blocks(even, 1) + frees(3, SECOND) +
              [(5 * SECOND, RESERVED, 0, 0, 0, 0)], [])  # not for long
    sentences(folder, cached + [(20 * SECOND, RESERVED, 0, 0, 0, 0)],
              ["^On GPU 0 6.* MiB of at most 11.000 MiB was only cached, on average over 20.000 s"])
    scattered = [(0, RESERVED, 0, 0, 0, 100 * MIB)] + blocks([40 * MIB, 41 * MIB, 10 * MIB, 9 * MIB], 1, MISS) + [
        (10, FREE, NOWHERE, 0, 0x100000, 0), (11, FREE, NOWHERE, 0, 0x200000, 0), (12, QUARANTINE, 0, 0, 0, 0)]
    for reserved, wanted in ((320, ["^On GPU 0 81.000 MiB was fragmented at 0.000 s, of at most 320.000 MiB: first"]),
                             (328, [])):
        more = (reserved - 100) * MIB
        sentences(folder, scattered + [(13, RESERVED, 0, 0, 0, reserved * MIB), (14, MISS, 0, 0, 0x500000, more),
                                       (15, FREE, NOWHERE, 0, 0x500000, 0)], wanted + ["peak of .* was 1 block"])
    sentences(folder, [], [])


def test_bounds(folder):
    """A long trace: few points, but the peak is one of them, and the sum is what is reserved."""
    path = os.path.join(folder, "long.trace")
    write_trace(path, blocks([2 * MIB, 3 * MIB, 4 * MIB]) + [(3, FREE, NOWHERE, 0, 0x300000, 0)] + frees(2, SECOND))
    first = [point[:2] for point in data_of(report("--html", path))["gpus"][0]["points"]]
    check(first[:3] == [[0, 2 * MIB], [2, 9 * MIB], [3, 5 * MIB]], f"what lasts after a short time: {first}")
    entries = [(0, RESERVED, 0, 0, 0, 900 * MIB), (0, KIND, 0, DRIVER, 0, 100 * MIB)]
    for i in range(50000):
        entries += [(i * 1000 + 1, HIT, i % 2, 0, 0x1000, MIB), (i * 1000 + 2, FREE, NOWHERE, 0, 0x1000, 0),
                    (i * 1000 + 3, RUNG, 0, TRIM, 1, 10)]
    entries += [(20000500, HIT, 0, 0, 0x2000, 700 * MIB), (20000501, FREE, NOWHERE, 0, 0x2000, 0)]
    write_trace(path, entries)
    page = report("--html", path)
    data = data_of(page)
    check(len(page) < MIB, f"a long trace: {len(page)} bytes")
    check([gpu["number"] for gpu in data["gpus"]] == [0, 1], "a long trace: GPUs")
    check(all(1000 < len(gpu["points"]) <= 2000 for gpu in data["gpus"]), "a long trace: points")
    first = data["gpus"][0]["points"]
    check([20000499, 700 * MIB, 0, 100 * MIB, 100 * MIB, 0] in first, "a long trace: the peak is not a point")
    check(first == sorted(first, key=lambda point: point[0]), "a long trace: points are not in order")
    check(all(sum(point[1:]) == 900 * MIB for point in first), "a long trace: the sum is not what is reserved")
    check(len(data["marks"]) <= 200 and sum(mark[2] for mark in data["marks"]) == 50000, "a long trace: marks")
    check(data["hits"] == 50001 and data["gpus"][0]["name"] == "A GPU", "a long trace: hits or name")


def test_quarantine(folder):
    """Grows with each free, until an epoch is usable; never more than is cached."""
    path = os.path.join(folder, "quarantine.trace")
    write_trace(path, [(0, RESERVED, 0, 0, 0, 12 * MIB)] + blocks([4 * MIB, 5 * MIB], 1) + frees(1, 10) +
                [(20, QUARANTINE, 0, 0, 0, MIB)] + [(30, FREE, NOWHERE, 0, 0x200000, 0), (40, QUARANTINE, 0, 0, 0, 0),
                                                    (50, QUARANTINE, 0, 0, 0, 99 * MIB)])
    points = {point[0] + 1: point[1:] for point in data_of(report("--html", path))["gpus"][0]["points"]}
    wanted = {10: [5, 3, 0, 4, 0], 20: [5, 6, 0, 1, 0], 30: [0, 6, 0, 6, 0], 40: [0, 12, 0, 0, 0], 50: [0, 0, 0, 12, 0]}
    for at, mib in wanted.items():
        check(points.get(at) == [MIB * value for value in mib], f"quarantine at {at}: {points.get(at)}")


def test_fragmented(folder):
    """What is cached, waits for nothing, and is there when the process takes more from the GPU or is refused."""
    path = os.path.join(folder, "fragmented.trace")
    write_trace(path, [(0, RESERVED, 0, 0, 0, 100 * MIB), (0, MISS, 0, 0, 0x1000, 60 * MIB)] +  # all of it is new
                [(2, MISS, 0, 0, 0x2000, 40 * MIB), (10, FREE, NOWHERE, 0, 0x1000, 0),
                 (20, QUARANTINE, 0, 0, 0, 10 * MIB), (21, RESERVED, 0, 0, 0, 130 * MIB),
                 (22, RESERVED, 0, 0, 0, 150 * MIB), (23, MISS, 0, 0, 0x3000, 70 * MIB),  # of it 20 MiB were cached
                 (24, QUARANTINE, 0, 0, 0, 0), (25, RESERVED, 0, 0, 0, 160 * MIB), (25, RESERVED, 0, 0, 0, 190 * MIB),
                 (26, MISS, 0, 0, 0x4000, 10 * MIB),  # 30 MiB more than it needed
                 (30, REFUSED, 0, 0, 0, GIB), (31, RESERVED, 0, 0, 0, 130 * MIB),
                 (40, RESERVED, 0, 0, 0, 170 * MIB), (41, HIT, 0, 0, 0x5000, MIB),  # not for a request
                 (42, MISS, 0, 0, 0x6000, MIB)])
    gpu = data_of(report("--html", path))["gpus"][0]
    fragmented = {point[0]: [bytes // MIB for bytes in (point[2], point[5])] for point in gpu["points"]}
    wanted = {0: [40, 0], 2: [0, 0], 20: [50, 0], 23: [0, 30], 24: [10, 30], 26: [30, 40], 30: [0, 70],
              31: [0, 10], 40: [0, 50], 42: [0, 48]}
    for at, mib in wanted.items():
        check(fragmented.get(at) == mib, f"fragmented at {at}: {fragmented.get(at)}")
    check((gpu["fragmented"], gpu["fragmented_at"]) == (70 * MIB, 30), f"fragmented: {gpu['fragmented_at']}")
    check(json.loads(report("--json", path))["fragmented"] == [{"bytes": 70 * MIB, "at_ns": 30}], "fragmented: JSON")
    check("\n  fragmented on GPU 0: at most 70.000 MiB, at 0.000 s: cached, but" in report(path), "fragmented: text")
    # A small request takes another page whatever is cached.
    write_trace(path, [(0, RESERVED, 0, 0, 0, 60 * MIB), (0, MISS, 0, 0, 0x1000, 60 * MIB),
                       (1, FREE, NOWHERE, 0, 0x1000, 0), (2, QUARANTINE, 0, 0, 0, 0),
                       (3, RESERVED, 0, 0, 0, 62 * MIB), (4, MISS, 0, 0, 0x2000, MIB)])
    check("fragmented on" not in report(path), "fragmented: small")


def replay(entries):
    """Goes through the entries of one GPU as the viewer does. Returns what is left, and the most bytes and blocks."""
    pages, opened, live, most = set(), {}, {}, (0, 0)
    for number, entry in enumerate(entries):
        action, address, size = entry["action"], entry.get("addr", 0), entry["size"]
        of_entry = set(range(address >> 21, (address + size - 1 >> 21) + 1)) if address else set()
        if action == "segment_alloc":
            opened[address] = size
        elif action == "segment_free":
            check(opened.pop(address, 0) == size, f"pytorch: a segment that was not allocated: {entry}")
        elif action in ("segment_map", "segment_unmap") and entry["stream"] == 0:
            check(of_entry.isdisjoint(pages) if action == "segment_map" else of_entry <= pages, f"pytorch: {entry}")
            pages ^= of_entry
        elif action == "alloc":
            check(of_entry <= pages, f"pytorch: outside of the segments: {entry}")
            live[address] = entry
        elif action == "free_completed":
            check(entries[number - 1] == dict(entry, action="free_requested") and
                  entry["frames"] == live.pop(address)["frames"], f"pytorch: {entry}")
        most = max(most, (sum(one["size"] for one in live.values()), len(live)))
    return pages, opened, live, most


def test_pytorch(folder):
    """The snapshot tells what --json tells, and the viewer can draw it."""
    path = os.path.join(folder, "pytorch.trace")
    load, keep, *others = write_origins(
        os.path.join(folder, "pytorch.origins"),
        [(None, [HOSTILE, "main"]), (MIB, ["bad\udcffbyte", "main"])] + [(None, [f"f{i}"]) for i in range(300)])
    low, high = 0x200000, 0x7f0000000000
    entries = [(8000, STACK, NOWHERE, 0, high, load)]
    entries += [(9000 + at, MISS, 0, 0, high + at * MIB, mib * MIB)
                for at, mib in ((0, 5), (5, 4), (9, 1), (12, 2), (20, 2), (22, 1), (30, 2))]
    entries += [(9500, REFUSED, 0, 0, 0, 2**64 - 1), (9600, RESERVED, 0, 0, 0, 30 * MIB)]
    entries += [(10000 + i, FREE, NOWHERE, 0, high + at * MIB, 0) for i, at in enumerate((0, 20, 12, 30))]
    entries += [(12000, RESERVED, 0, 0, 0, 15 * MIB), (13000, MISS, 1, 0, low + 4 * MIB, 2 * MIB),
                (14000, FREE, NOWHERE, 0, low + 4 * MIB, 0), (14000, STACK, NOWHERE, 0, low, keep),
                (15000, MISS, 1, 0, low, MIB), (16000, RESERVED, 1, 0, 0, 2 * MIB),
                (17000, MISS, 0, 0, low + MIB, MIB), (18000, FREE, NOWHERE, 0, high + 22 * MIB, 0),
                (19000, RESERVED, 0, 0, 0, 2 * MIB)]
    for i, stack in enumerate(others):
        at, address = 20000 + 2 * i, high + MIB + i * 512
        entries += [(at, STACK, NOWHERE, 0, address, stack), (at + 1, HIT, 0, 0, address, 512)]
    write_trace(path, entries + [(30000, FREE, NOWHERE, 0, address, 0)])
    raw = report("--pytorch", path, text=False)
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(raw)}
    check(opcodes == {"PROTO", "EMPTY_DICT", "EMPTY_LIST", "APPEND", "SETITEM", "MEMOIZE", "BINGET", "LONG_BINGET",
                      "BINUNICODE", "LONG1", "STOP"}, f"pytorch: the viewer may not know one of {opcodes}")
    snapshot, whole, ends = pickle.loads(raw), json.loads(report("--json", path)), []
    for device, entries in enumerate(snapshot["device_traces"]):
        pages, opened, live, most = replay(entries)
        if device == 0:
            check(most == (whole["peak"]["bytes"], whole["peak"]["blocks"]), f"pytorch: {most}")
        segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
        check(sum(opened.values()) == len(pages) * 2 * MIB == sum(one["total_size"] for one in segments) and
              all(one["address"] in opened for one in segments), f"pytorch: segments of GPU {device}: {opened}")
        for segment in segments:
            at, used = segment["address"], [one for one in segment["blocks"] if one["requested_size"] > 0]
            check(segment["allocated_size"] == sum(one["requested_size"] for one in used), "pytorch: a segment's sum")
            for block in segment["blocks"]:
                state = "active_allocated" if block in used else "inactive"
                check(block["address"] == at and block["state"] == state, f"pytorch: {block}")
                at += block["size"]
            check(at == segment["address"] + segment["total_size"], f"pytorch: the end of {segment}")
            for block in used:
                entry = live.pop(block["address"])
                check(entry["size"] == block["requested_size"] == block["size"] and entry["frames"] == block["frames"],
                      f"pytorch: {block}")
            ends += used
        check(not live, f"pytorch: in no segment: {live}")
    sizes = {size["block_bytes"]: size["blocks"] for size in whole["end"]["sizes"]}
    check(sizes == collections.Counter(block["size"] for block in ends), f"pytorch: {sizes} at the end")
    entries = snapshot["device_traces"][0]
    told = [(one["addr"] - high >> 20, one["size"] >> 20) for one in entries if one["action"] == "segment_alloc"]
    check(told == [(0, 6), (6, 4), (12, 2), (20, 2), (22, 2), (30, 2), (low - high >> 20, 2)], f"pytorch: {told}")
    told = [[(one["addr"], one["time_us"] - 10**15) for one in trace if one["action"] == "segment_free"]
            for trace in snapshot["device_traces"][:2]]
    check(told == [[(high + 20 * MIB, 12), (high + 12 * MIB, 12), (high + 30 * MIB, 17), (high + 22 * MIB, 19)],
                   [(low + 4 * MIB, 16)]], f"pytorch: given back: {told}")
    check(entries[3] == {"action": "alloc", "addr": high, "size": 5 * MIB, "stream": 0, "time_us": 10**15 + 9,
                         "frames": [{"name": name, "filename": "a file.py", "line": 31} for name in (HOSTILE, "main")]},
          f"pytorch: {entries[3]}")
    check("bad byte" in [one["frames"][0]["name"] for one in snapshot["device_traces"][1] if one["frames"]],
          "pytorch: a name that is no text")
    check([one["frames"][0]["name"] for one in entries[-302:-2]] == [f"f{i}" for i in range(300)], "pytorch: frames")
    refused = [(one["size"], one["device_free"], one["time_us"]) for one in entries if one["action"] == "oom"]
    check(refused == [(2**63 - 1, 0, 10**15 + 9)], f"pytorch: {refused}")
    path = os.path.join(folder, "pytorch.csv")  # with blocks in each other and past the last address, as they never are
    with open(path, "w", encoding="utf-8") as file:
        file.write("Thread,Time,Action,Pointer,Size\n1,5000,allocate,0xffffffffffff0000,65535\n"
                   "1,5000,allocate,0x200000,8192\n1,9000,allocate,0x201000,512\n")
    snapshot = pickle.loads(report("--pytorch", path, text=False))
    check([block["size"] for block in snapshot["segments"][0]["blocks"]] == [8192, 2 * MIB - 8192] and
          [(one["size"], one["time_us"]) for one in snapshot["device_traces"][0]][-2:] == [(8192, 0), (512, 4)],
          f"pytorch: of CSV: {snapshot}")


def read_perfetto(text):
    """What Perfetto's importer of JSON makes of it, where it takes all: (counters, slices by thread, others)."""
    counters, slices, others, began = {}, {}, [], {}
    for event in json.loads(text)["traceEvents"]:
        name, phase, at = event["name"], event["ph"], event["ts"] * 1000
        good = isinstance(name, str) and name and 0 < event["pid"] < 2**32 and at >= 0
        if phase == "C":
            for word, value in event["args"].items():
                good &= type(value) in (int, float)
                counters.setdefault(f"{name} {word}", []).append((at, value))
        elif phase == "X":
            good &= 0 < event["tid"] < 2**32 and event["dur"] >= 0
            slices.setdefault(event["tid"], []).append((at, at + event["dur"] * 1000, name, event["args"]))
        elif phase in ("b", "e"):
            key = event["cat"], str(event["id"]), name
            good &= phase == "b" and key not in began or phase == "e" and began.pop(key, at + 1) <= at
            if phase == "b":
                began[key] = at
            others.append((phase, name, round(at)))
        elif phase == "i":
            good &= event["s"] == "t" and 0 < event["tid"] < 2**32
            others.append((phase, name, round(at)))
        else:
            good &= phase == "M" and name == "process_name" and isinstance(event["args"]["name"], str)
            others.append((phase, event["args"]["name"], 0))
        check(good, f"perfetto: {event}")
    for thread in slices.values():  # one that begins in another and ends after it would be dropped
        open_until = []
        for begin, end, name, _ in sorted(thread, key=lambda one: (one[0], -one[1])):
            while open_until and open_until[-1] <= begin + 0.5:
                open_until.pop()
            check(not open_until or end <= open_until[-1] + 0.5, f"perfetto: {name} overlaps another")
            open_until.append(end)
    return counters, slices, others


def test_perfetto(folder):
    path = os.path.join(folder, "perfetto.trace")
    write_trace(path, [(1000, RESERVED, 0, 0, 0, 6 * MIB), (1001, MISS, 0, 0, 0x1000, 4 * MIB),
                       (2001, HIT, 1, 0, 0x2000, MIB), (3000, KIND, 0, DRIVER, 0, 7 * MIB),
                       (3001, KIND, NOWHERE, 0, 0, 9), (3001, RESERVED, NOWHERE, 0, 0, 9),
                       (5000, RUNG, 0, TRIM, 1500, 3 * MIB), (6000, RUNG, 0, SYNC, 1000, 0),
                       (6100, REFUSED, 0, 0, 0, GIB), (6200, LIMIT, 0, 0, 0, GIB), (6300, LIMIT, 0, 1, 0, GIB),
                       (7000, CAPTURE_BEGIN, NOWHERE, 0, 1, 0), (7500, CAPTURE_BEGIN, NOWHERE, 0, 2, 0),
                       (8000, CAPTURE_END, NOWHERE, 0, 1, 0), (8500, CAPTURE_END, NOWHERE, 0, 2, 0),
                       (9001, FREE, NOWHERE, 0, 0x1000, 0), (9500, RESERVED, 0, 0, 0, 2 * MIB)], HOSTILE)
    counters, slices, others = read_perfetto(report("--perfetto", path))
    whole = json.loads(report("--json", path))
    live = [value for _, value in counters["live bytes"]]
    check(max(live) == whole["peak"]["bytes"] == 5 * MIB and live[-1] == whole["end"]["bytes"], f"perfetto: {live}")
    check([value for _, value in counters["reserved, GPU 0 bytes"]] == [6 * MIB, 2 * MIB] and
          len(counters) == 4, f"perfetto: {counters}")
    check([[round(begin), round(end), name, args] for begin, end, name, args in slices[1]] ==
          [[2499, 3999, "ladder: trim", {"gave_bytes": 3 * MIB}], [3999, 4999, "ladder: sync", {"gave_bytes": 0}]],
          f"perfetto: {slices}")
    check(others == [("M", HOSTILE, 0), ("i", "refused", 5099), ("i", "hard limit", 5199),
                     ("i", "release threshold", 5299), ("b", "capture", 5999), ("b", "capture", 6499),
                     ("e", "capture", 6999), ("e", "capture", 7499)], f"perfetto: {others}")


def test_rmm(folder):
    """Each line is one that RMM reads, and its replay finds the block of each free."""
    path = os.path.join(folder, "rmm.trace")
    write_trace(path, blocks([4 * MIB, MIB, 512]) + frees(2, SECOND) + [(SECOND + 5, REFUSED, 0, 0, 0, GIB)] +
                blocks([MIB], 2 * SECOND) + frees(1, 3 * SECOND))
    lines = list(csv.DictReader(report("--format", "rmm-csv", path).splitlines()))
    check(report("--csv", path) == report("--format", "rmm-csv", path), "rmm: --csv")
    live, whole = {}, json.loads(report("--json", path))
    for line in lines:
        pointer, size = int(line["Pointer"], 16), int(line["Size"])
        good = int(line["Thread"]) > 0 and pointer in (0x100000, 0x200000, 0x300000)
        good &= int(line["Stream"].partition("x")[0]) == 0  # as stoul reads it
        if line["Action"] == "allocate":
            good &= pointer not in live
            live[pointer] = size
        else:
            good &= line["Action"] == "free" and live.pop(pointer, None) == size
        check(good, f"rmm: {line}")
    check(len(lines) == whole["operations"] == 7, f"rmm: {len(lines)} lines")
    check((len(live), sum(live.values())) == (whole["end"]["blocks"], whole["end"]["bytes"]), f"rmm: {live} is left")


class Browser:
    """Chromium, spoken to through two pipes."""

    def __init__(self, program, folder):
        to_read, self._to = os.pipe()
        self._from, from_write = os.pipe()
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                     "--disable-background-networking", "--remote-debugging-pipe", "--user-data-dir=" + folder]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{from_write}', "bash", program, *arguments, "about:blank"],
            pass_fds=(to_read, from_write), stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(from_write)
        self._number, self._buffer, self._session, self.errors, self.events = 0, b"", None, [], []
        target = next(info for info in self.call("Target.getTargets")["targetInfos"] if info["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")

    def end(self):
        self._process.kill()
        self._process.wait()

    def _read(self):
        while b"\0" not in self._buffer:
            got = os.read(self._from, 1 << 16)
            if not got:
                raise RuntimeError("the browser has ended")
            self._buffer += got
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        method, values = message.get("method", ""), message.get("params", {})
        self.events.append(method)
        if method in ("Runtime.exceptionThrown", "Log.entryAdded") or \
           (method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning")) or \
           (method == "Network.requestWillBeSent" and not values["request"]["url"].startswith(("file:", "data:"))):
            self.errors.append(values)
        return message

    def call(self, method, **values):
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, path):
        """Returns for how many seconds that took."""
        self.events.clear()
        begin = time.monotonic()
        self.call("Page.navigate", url="file://" + path)
        while "Page.loadEventFired" not in self.events:
            self._read()
        return time.monotonic() - begin

    def value(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def click(self, selector):
        self.value(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.value(f"(b => [b.x + b.width / 2, b.y + b.height / 2])(document.querySelector("
                         f"{json.dumps(selector)}).getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)


def test_names(folder):
    """Names that programs chose stay text. Returns the page's path."""
    path = os.path.join(folder, "named.trace")
    write_trace(path, [(0, RESERVED, 0, 0, 0, 10 * MIB), (1, QUARANTINE, 0, 0, 0, 2 * MIB)] +
                blocks([4 * MIB, 2 * MIB, MIB], SECOND) +
                [(SECOND + 9, REFUSED, 0, 0, 0, 9 * MIB), (2 * SECOND, RUNG, 0, TRIM, 100, MIB),
                 (3 * SECOND, FREE, NOWHERE, 0, 0x300000, 0)], HOSTILE)
    write_origins(os.path.join(folder, "named.origins"),
                  [(4 * MIB, [HOSTILE, "outer"]), (2 * MIB, ["inner", "middle", "outer"])])
    page = report("--html", path)
    data = data_of(page)
    check(data["program"] == HOSTILE, f"names: {data['program']}")
    check(data["origins"]["snapshots"] == [[data["last"], 6 * MIB, 2, 0, 4 * MIB, 1, 2 * MIB]],
          f"names: {data['origins']['snapshots']}")
    check(data["origins"]["stacks"][0] == [HOSTILE + " (a file.py:31)", "outer (a file.py:31)"], "names: frames")
    check(data["advice"][-1].startswith("6.000 MiB was never freed, 4.000 MiB of it allocated by </script>"),
          f"names: {data['advice']}")
    check("<img" not in page, "names: an element")
    with open(os.path.join(folder, "named.html"), "w", encoding="utf-8") as file:
        file.write(page)
    return file.name


def test_snapshots(folder):
    """Origins over time, of a trace that has stacks. Returns the page's path."""
    path = os.path.join(folder, "snapshots.trace")
    load, keep, late = write_origins(os.path.join(folder, "snapshots.origins"),
                                     [(None, ["load", "main"]), (2 * MIB, ["keep", "main"]), (MIB, ["late", "main"])])
    write_trace(path, [
        (0, STACK, NOWHERE, 0, 0x1000, keep), (1, HIT, 0, 0, 0x1000, 2 * MIB),
        (2, STACK, NOWHERE, 0, 0x2000, load), (3, MISS, 0, 0, 0x2000, 8 * MIB),
        (SECOND // 2, FREE, NOWHERE, 0, 0x2000, 0),
        (2 * SECOND, STACK, NOWHERE, 0, 0x3000, late), (2 * SECOND, HIT, 0, 0, 0x3000, MIB),
        (2 * SECOND + 1, HIT, 0, 0, 0x4000, MIB // 2)])  # without a stack, as where only a sample is noted
    page = report("--html", path)
    data = data_of(page)
    origins = data["origins"]
    check(origins["snapshots"] == [[2, 10 * MIB, 2, 0, 8 * MIB, 1, 2 * MIB],
                                  [SECOND // 2 - 1, 2 * MIB, 1, 1, 2 * MIB],
                                  [2 * SECOND, 3 * MIB, 2, 1, 2 * MIB, 2, MIB]], f"snapshots: {origins['snapshots']}")
    check([stack[0] for stack in origins["stacks"]] == [f"{name} (a file.py:31)" for name in ("load", "keep", "late")],
          "snapshots: stacks")
    check(origins["peak"] == 0, "snapshots: the peak")
    check(data["advice"][0] == "80 % of the peak of 10.000 MiB was allocated by load (a file.py:31), called from main "
          "(a file.py:31). Without that the peak would be 3.500 MiB.", f"snapshots: {data['advice']}")
    check("live at the peak, by origin: 10.000 MiB in 2 blocks of 2 origins" in report(path), "snapshots: the text")
    by_origin = json.loads(report("--json", path))["peak_by_origin"]
    check([origin["bytes"] for origin in by_origin["origins"]] == [8 * MIB, 2 * MIB], f"snapshots: {by_origin}")

    # A sample: a block of the sampling size or more stands for itself, a smaller one for more; an unknown stack is one.
    write_trace(path, [(0, STACK, NOWHERE, 22, 0x1000, keep), (1, HIT, 0, 0, 0x1000, 4 * MIB),
                       (2, STACK, NOWHERE, 22, 0x2000, 1), (3, HIT, 0, 0, 0x2000, MIB)])
    snapshot = data_of(report("--html", path))["origins"]["snapshots"][-1]
    check(snapshot[2] == 2 and snapshot[6] == 4 * MIB and abs(snapshot[4] / (MIB / (1 - math.exp(-1 / 4))) - 1) < 0.001,
          f"snapshots: a sample: {snapshot}")
    with open(os.path.join(folder, "snapshots.html"), "w", encoding="utf-8") as file:
        file.write(page)
    return file.name


def test_snapshots_in_browser(browser, path):
    def shown():
        return browser.value("[document.querySelector('#snapshot').textContent, "
                             "...[...document.querySelectorAll('#flame button')].map(b => b.textContent)]")

    browser.open(path)
    check(shown() == ["At 0.000 s: 10.00 MiB of 2 origins.", "all 10.00 MiB", "main (a file.py:31) 10.00 MiB",
                      "load (a file.py:31) 8.00 MiB", "keep (a file.py:31) 2.00 MiB"], f"at first: {shown()}")
    browser.click("svg.time")  # in the middle of it, at a second
    check(shown()[0] == "At 0.500 s: 2.00 MiB of 1 origin.", f"clicked: {shown()}")
    browser.click("#snapshot + p button:last-child")
    check(shown()[0] == "At 2.000 s: 3.00 MiB of 2 origins." and "late" in shown()[-1], f"the end: {shown()}")
    browser.click("#snapshot + p button:first-child")
    check(shown()[0].startswith("At 0.000 s"), f"snapshots: the peak: {shown()}")
    check(not browser.errors, f"snapshots: {browser.errors}")


def test_in_browser(browser, path):
    seconds = browser.open(path)
    text = browser.value("document.body.innerText") or ""
    for words in ("What to do", "6.00 MiB in 2 blocks", "Memory of GPU 0: A GPU", "100.0 % without the driver",
                  "at most 1.00 MiB, at 0.000 s: cached, but",
                  "Live at the peak", HOSTILE):
        check(words in text, f"in the browser: not shown: {words}")
    check(browser.value("typeof broken") == "undefined", "in the browser: a name was run")
    check(browser.value("document.querySelectorAll('img').length") == 0, "in the browser: a name became an element")
    browser.click("svg.time")
    said = browser.value("document.querySelector('.moment').textContent")
    check("7.00 MiB live, 2.00 MiB waiting for the GPU, 1.00 MiB fragmented, 0 B cached" in said and
          "ladder: trim (1 times, 1.00 MiB)" in said, f"in the browser: a moment: {said}")
    said = browser.value("document.querySelector('#frame').textContent")
    check(said == "all: 6.00 MiB, 100.0 %", f"in the browser: all frames: {said}")
    browser.click("#flame button[title^=middle]")
    said = browser.value("document.querySelector('#frame').textContent")
    check(said == "middle (a file.py:31): 2.00 MiB, 33.3 %", f"in the browser: a frame: {said}")
    check(browser.value("document.querySelectorAll('#flame button').length") == 4, "in the browser: frames when zoomed")
    browser.click("#flame button[title^=all]")
    check(browser.value("document.querySelectorAll('#flame button').length") == 5, "in the browser: not zoomed out")
    colors = set()
    for scheme in ("light", "dark"):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        colors.add(browser.value("getComputedStyle(document.body).backgroundColor"))
    check(len(colors) == 2, f"in the browser: {colors} for light and dark")
    browser.call("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=True)
    width = browser.value("document.documentElement.scrollWidth")
    check(width <= 400, f"in the browser: {width} pixels instead of 400")
    check(not browser.errors, f"in the browser: {browser.errors}")
    print(f"loaded in {seconds:.2f} s")


def main():
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with tempfile.TemporaryDirectory(prefix="gr-page-", ignore_cleanup_errors=True) as folder:
        test_sentences(folder)
        test_bounds(folder)
        test_quarantine(folder)
        test_fragmented(folder)
        test_pytorch(folder)
        test_perfetto(folder)
        test_rmm(folder)
        path = test_names(folder)
        snapshots = test_snapshots(folder)
        if not program:
            print("no chromium: the page was not tried in a browser")
            return failed
        browser = Browser(program, os.path.join(folder, "profile"))
        try:
            test_snapshots_in_browser(browser, snapshots)
            test_in_browser(browser, path)
        finally:
            browser.end()
    return failed


sys.exit(main())
