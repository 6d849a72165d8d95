#!/usr/bin/env python3
"""Allocation traces in few bytes: what gpureclaim report --csv writes of them, without what a replay does not need.

    traces.py pack TRACE.csv FILE.trace.xz [NOTE...]
    traces.py unpack FILE.trace.xz TRACE.csv
    traces.py show FILE...                              what is in them, packed or not

Inside the xz is text: a first line "gpureclaim trace 1", notes behind "#", then one word a line:
    +BYTES   an allocation            -N   a free of the allocation N before the newest (0: the newest)
    tN       the thread from here on  @US  microseconds since the last such line; those between are spread evenly
Kept are order, sizes and threads; of the times one in 64; of the pointers which is which.
"""

import lzma
import sys

HEADER = "gpureclaim trace 1"
COLUMNS = "Thread,Time,Action,Pointer,Size,Stream"
EVERY = 64  # operations from one kept time to the next


def read_csv(path):
    """[(thread, ns, is_free, number of the allocation, bytes)], without frees of what the trace never allocated."""
    operations, live, threads, made = [], {}, {}, 0
    with open(path) as lines:
        names = None
        for line in lines:
            if line.startswith("#") or not line.strip():
                continue
            fields = line.strip().split(",")
            if names is None:
                names = fields
                if not {"Action", "Pointer", "Size"} <= set(names):
                    raise SystemExit(f"{path}: no trace")
                continue
            row = dict(zip(names, fields))
            thread = threads.setdefault(row.get("Thread", "0"), len(threads))
            time = row.get("Time", "0")
            ns = int(time) if time.isdigit() else 0
            pointer, size = row["Pointer"], int(row["Size"])
            if row["Action"] == "allocate" and pointer not in live and size > 0:
                live[pointer] = made, size
                operations.append((thread, ns, False, made, size))
                made += 1
            elif row["Action"] == "free" and pointer in live:
                number, size = live.pop(pointer)
                operations.append((thread, ns, True, number, size))
    return operations


def pack(path, out, notes):
    words, made, thread, last_us = [HEADER, *(f"# {note}" for note in notes)], 0, 0, 0
    operations = read_csv(path)
    begin = operations[0][1] if operations else 0
    for i, (by, ns, is_free, number, size) in enumerate(operations):
        if by != thread:
            words.append(f"t{by}")
            thread = by
        words.append(f"-{made - 1 - number}" if is_free else f"+{size}")
        made += not is_free
        if i % EVERY == EVERY - 1 or i == len(operations) - 1:
            us = max(last_us, (ns - begin) // 1000)
            words.append(f"@{us - last_us}")
            last_us = us
    data = lzma.compress(("\n".join(words) + "\n").encode(), preset=9 | lzma.PRESET_EXTREME)
    with open(out, "wb") as file:
        file.write(data)
    return len(operations), len(data)


def read_packed(path):
    """As read_csv, with the notes: (operations, notes)."""
    with lzma.open(path, "rt") as file:
        lines = file.read().split("\n")
    if lines[0] != HEADER:
        raise SystemExit(f"{path}: no packed trace")
    operations, notes, waiting = [], [], []
    thread, ns, sizes = 0, 0, []
    for line in lines[1:]:
        kind, value = line[:1], line[1:]
        if kind == "#":
            notes.append(value.strip())
        elif kind == "t":
            thread = int(value)
        elif kind == "+":
            waiting.append((thread, False, len(sizes), int(value)))
            sizes.append(int(value))
        elif kind == "-":
            number = len(sizes) - 1 - int(value)
            waiting.append((thread, True, number, sizes[number]))
        elif kind == "@":
            step = int(value) * 1000
            for i, (by, is_free, number, size) in enumerate(waiting, 1):
                operations.append((by, ns + step * i // len(waiting), is_free, number, size))
            ns += step
            waiting = []
    return operations, notes


def read(path):
    return read_packed(path)[0] if path.endswith(".xz") else read_csv(path)


def write_csv(operations, path):
    with open(path, "w") as file:
        file.write(COLUMNS + "\n")
        for thread, ns, is_free, number, size in operations:
            # A name for the pointer, no address: no two allocations share one.
            file.write(f"{thread},{ns},{'free' if is_free else 'allocate'},{(number + 1) * 512:#x},{size},0x0\n")


def peak_live(operations):
    live = peak = 0
    for _, _, is_free, _, size in operations:
        live += -size if is_free else size
        peak = max(peak, live)
    return peak


def show(path):
    operations = read(path)
    sizes = {size for _, _, is_free, _, size in operations if not is_free}
    made = sum(1 for operation in operations if not operation[2])
    seconds = (operations[-1][1] - operations[0][1]) / 1e9 if operations else 0
    print(f"{path}: {made} allocations of {len(sizes)} sizes, {len(operations) - made} frees, "
          f"peak of live memory {peak_live(operations) / 2**20:.1f} MiB, {seconds:.2f} s")
    if path.endswith(".xz"):
        for note in read_packed(path)[1]:
            print(f"    {note}")


def main():
    command, *arguments = sys.argv[1:] or [""]
    if command == "pack" and len(arguments) >= 2:
        count, size = pack(arguments[0], arguments[1], arguments[2:])
        print(f"{arguments[1]}: {count} operations in {size} bytes")
    elif command == "unpack" and len(arguments) == 2:
        write_csv(read(arguments[0]), arguments[1])
    elif command == "show" and arguments:
        for path in arguments:
            show(path)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
