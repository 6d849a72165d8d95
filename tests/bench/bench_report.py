#!/usr/bin/env python3
"""What scripts/bench measured, kept as CSV and shown as tables.

    tests/bench/bench_report.py            # writes the figures of results.csv into README.md and docs/benchmarks.md,
                                           # draws docs/footprint.svg, and writes into docs/compatibility.md what was
                                           # tested where and when, as the logs say
    tests/bench/bench_report.py --check    # exit status 1 where they differ, as the test "documents" asks
    tests/bench/bench_report.py --tables   # prints all of results.csv as tables
"""

import argparse
import csv
import datetime
import re
import statistics
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
RESULTS = TOP / "tests" / "bench" / "results"
DRAWING = TOP / "docs" / "footprint.svg"

FIELDS = ["group", "table", "row", "column", "unit", "median", "least", "most", "samples"]

# Allocators that are not ours, as columns.
OTHERS = ["native", "cudaMallocAsync", "its own pool", "PyTorch", "PyTorch, expandable"]

DOORS = {"pair_static": "static runtime", "pair_shared": "shared runtime", "pair_driver": "driver API"}

TRACED = ("pair 64 KiB", "pair 1 MiB", "16 threads")  # of the cost of a trace, what is told in short
OWN_PART = "the library's own part, seen on a simulated device"  # of the first calls

TABLES = {
    "pair_static": "Static CUDA runtime",
    "pair_shared": "Shared CUDA runtime",
    "pair_driver": "Driver API",
    "threads": "Threads, each with pairs of its own size: time of a pair in each",
    "handed": "The same, where each thread frees what another one allocated",
    "streams": "malloc, short kernel, free over streams in turn, and the kernels alone",
    "live": "One block freed and another allocated among many live ones (512 B to 4 KiB)",
    "policies": "How freed memory becomes safe to reuse (`GPURECLAIM_REUSE`)",
    "trace": "A trace (`GPURECLAIM_TRACE`), off and on",
    "first call": "The start of a process",
    "pinned": "Pinned host memory, allocated and freed",
    "packages": "Pools of Python packages; Python's own part is in each figure",
    "traces": "Recorded allocations, played again",
    "programs": "Whole PyTorch programs",
    "graphs": "One CUDA graph for each batch size, 1 to 128; \"largest\" is the graph of 128 alone",
    "instructions": "Instructions of a pair of 1 MiB, by function (driver API, simulated device)",
}


DEFAULT_POOL = "auto"

# The figures of the documents: what it says there, table and row of results.csv, and of a figure in the text row and
# column. README.md has those with a text of its own.
FIGURES = [
    ("`cudaMalloc` + `cudaFree`, 1 MiB, static runtime", "pair_static", "pair 1 MiB", None,
     "`cudaMalloc` and `cudaFree` of 1 MiB"),
    ("the same, shared runtime", "pair_shared", "pair 1 MiB", None, None),
    ("the same, 3 MiB, static runtime", "pair_static", "pair 3 MiB", None, None),
    ("the same, 1 GiB", "pair_static", "pair 1 GiB", None, "the same, 1 GiB"),
    ("256 live blocks of 4 KiB to 1 MiB", "pair_static", "256 live, 4 KiB to 1 MiB", None, None),
    ("malloc, empty kernel, free (the kernel alone: {})", "pair_static", "malloc + kernel + free",
     ("kernel alone", DEFAULT_POOL), None),
    ("malloc, 10 us kernel, free (the kernel alone: {})", "pair_static", "malloc + 10 us kernel + free",
     ("10 us kernel alone", DEFAULT_POOL), "malloc, a kernel of {}, free"),
    ("malloc, 100 us kernel, free, on 8 streams in turn (kernels alone: {} each)", "pair_static",
     "8 streams, 100 us kernels, fresh", ("8 streams, 100 us kernels alone", DEFAULT_POOL), None),
    ("pinned host memory, 64 MiB, allocated and freed", "pinned", "pinned 64 MiB", None,
     "pinned host memory: 64 MiB, allocated and freed"),
    ("PyTorch, 100 training steps, `PYTORCH_NO_CUDA_MEMORY_CACHING=1` (its own cache: {})", "programs",
     "training: time, the first 100 steps", ("training: time, the first 100 steps", "PyTorch"),
     "PyTorch, 100 training steps without its own cache"),
]


class Results:
    """Samples by (group, table, row, column); one sample is one process, itself a median where it repeats."""

    def __init__(self):
        self.group = ""
        self.samples = {}
        self.units = {}
        self.where = {}  # hardware and day of each group

    def add(self, table, row, column, unit, value):
        # Rounded here, so that figures do not change when they are read again.
        self.samples.setdefault((self.group, table, row, column), []).append(float(f"{value:.5g}"))
        self.units[self.group, table, row] = unit

    def load(self, path):
        """What an earlier run left."""
        if not path.exists():
            return
        with open(path, newline="") as file:
            text = file.read().splitlines()
        for line in text:
            if line.startswith("# "):
                group, _, where = line[2:].partition(": ")
                self.where[group] = where
        for row in csv.DictReader(line for line in text if not line.startswith("#")):
            key = row["group"], row["table"], row["row"], row["column"]
            self.samples[key] = [float(value) for value in row["samples"].split()]
            self.units[key[:3]] = row["unit"]

    def add_curve(self, column, points):
        """(seconds, MiB) over time; kept as two rows of samples, for which no median means anything."""
        for row, values in zip(("seconds", "MiB"), zip(*points)):
            self.samples[self.group, "footprint", row, column] = [float(f"{value:.5g}") for value in values]
            self.units[self.group, "footprint", row] = row

    def start(self, group, where):
        """Forgets the group's figures; what is added from here on is the group's."""
        self.group = group
        self.where[group] = where
        self.samples = {key: values for key, values in self.samples.items() if key[0] != group}

    def save(self, path):
        with open(path, "w", newline="") as file:
            for group, where in self.where.items():
                file.write(f"# {group}: {where}\n")
            out = csv.writer(file, lineterminator="\n")
            out.writerow(FIELDS)
            for key, values in self.samples.items():
                figures = [f"{value:.5g}" for value in (statistics.median(values), min(values), max(values))]
                out.writerow([*key, self.units[key[:3]], *figures, " ".join(f"{value:.5g}" for value in values)])

    def tables(self):
        """{table: {row: {column: samples}}} in the order they were measured."""
        found = {}
        for (_, table, row, column), values in self.samples.items():
            found.setdefault(table, {}).setdefault(row, {})[column] = values
        return found

    def unit(self, table, row):
        return next(unit for (_, t, r), unit in self.units.items() if (t, r) == (table, row))


def number(value):
    if value == 0:
        return "0"
    digits = 3 if abs(value) < 1000 else 4
    text = f"{value:.{digits}g}"
    return f"{float(text):.0f}" if "e" in text else text


def cell(values):
    if not values:
        return ""
    text = number(statistics.median(values))
    if len(values) > 1:
        text += f" ({number(min(values))} .. {number(max(values))})"
    return text


def ratio(of, to):
    """Median of the ratios turn by turn, so that a slow moment counts on both sides."""
    if not of or not to:
        return None
    if len(of) == len(to):
        return statistics.median(a / b for a, b in zip(of, to))
    return statistics.median(of) / statistics.median(to)


def headlines(tables, pool):
    """[(what, {column: value}, unit)]: what the tables below say in few lines."""
    lines = []

    def plain(what, table, row, unit):
        columns = tables.get(table, {}).get(row)
        if columns:
            lines.append((what, {name: statistics.median(values) for name, values in columns.items()}, unit))

    def over(what, table, row, base):
        rows = tables.get(table, {})
        both = {name: ratio(values, rows.get(base, {}).get(name)) for name, values in rows.get(row, {}).items()}
        if any(both.values()):
            lines.append((what, {name: value for name, value in both.items() if value}, "x"))

    def over_hook(what, table, row):
        rows = tables.get(table, {})
        floor = rows.get("pair 1 MiB", {}).get("empty hook")
        if floor:
            over_floor = {column: ratio(values, floor) for column, values in rows.get(row, {}).items()}
            lines.append((f"{what}, {DOORS[table]}", over_floor, "x"))

    for table, name in DOORS.items():
        plain(f"malloc + free, 1 MiB, {name}", table, "pair 1 MiB", "us")
        over_hook("the same / a hook that does nothing", table, "pair 1 MiB")
        plain(f"256 live blocks, {name}", table, "256 live, 4 KiB to 1 MiB", "us")
        over_hook("the same / a pair of a hook that does nothing", table, "256 live, 4 KiB to 1 MiB")
        over(f"malloc, short kernel, free / the kernel alone, {name}", table, "malloc + kernel + free", "kernel alone")
        over(f"the same with 10 us kernels, {name}", table, "malloc + 10 us kernel + free", "10 us kernel alone")
        over(f"the same beside a busy stream, {name}", table, "beside 100 us kernels, fresh",
             "beside 100 us kernels, kernel alone")
        over(f"the same on 8 streams, 100 us kernels, {name}", table, "8 streams, 100 us kernels, fresh",
             "8 streams, 100 us kernels alone")
    over("a pair in each of 16 threads / in one thread", "threads", "16 threads", "1 thread")
    over("a pair in each of 16 processes / in one thread", "threads", "1 thread in each of 16 processes", "1 thread")
    over("a pair among 100,000 live blocks / among 10", "live", "100000 live blocks", "10 live blocks")
    plain("pinned memory, 64 MiB, allocated + freed", "pinned", "pinned 64 MiB", "us")
    for name in tables.get("traces", {}):
        if name.endswith("most live"):
            plain(name, "traces", name, "x")
    programs = tables.get("programs", {})
    for row, columns in programs.items():
        compared = {name: ratio(values, columns.get("PyTorch")) for name, values in columns.items()}
        compared = {name: value for name, value in compared.items() if value}
        lines.append((f"{row} / PyTorch's with its own cache", compared, "x"))
    for row, columns in tables.get("trace", {}).items():
        turns = list(zip(columns.get("off", ()), columns.get("on", ())))
        if turns and row in TRACED:
            entry_ns = statistics.median((on - off) * 1000 / 2 for off, on in turns)  # a pair has two
            lines.append((f"{row}: an entry of a trace", {"on": entry_ns}, "ns"))
            lines.append((f"{row}: with a trace / without", {"on": ratio(columns["on"], columns["off"])}, "x"))
    plain("first calls: the library's own part", "first call", OWN_PART, "us")
    rows = tables.get("first call", {})
    for row in ("all of these", "a program without CUDA, start to end"):
        columns = rows.get(row, {})
        if "native" in columns and pool in columns:
            difference = statistics.median(a - b for a, b in zip(columns[pool], columns["native"]))
            lines.append((f"{row.replace('all of these', 'first calls')}: preloaded - plain", {pool: difference}, "us"))
    return lines


def behind(tables, pool):
    """Lines for the rows where the default pool lies more than 5 % above another allocator, and no turn contradicts."""
    lines = []
    for table in TABLES:
        for row, columns in tables.get(table, {}).items():
            ours = columns.get(pool)
            others = {name: columns[name] for name in OTHERS if ours and name in columns}
            others = {name: ratio(ours, values) for name, values in others.items() if min(ours) > max(values)}
            worse = [f"{number(value)} x {name}" for name, value in others.items() if value > 1.05]
            if worse:
                lines.append(f"- {table}, {row}: " + ", ".join(worse))
    return lines


def markdown(rows, first, order):
    """ROWS: [(name, {column: text})]; columns in the given order, those that no row has left out."""
    columns = [name for name in order if any(name in cells for _, cells in rows)]
    lines = [f"| {first} | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    lines += [f"| {name} | " + " | ".join(cells.get(column, "") for column in columns) + " |" for name, cells in rows]
    return lines


def report(results, pool):
    tables = results.tables()
    columns = (column for rows in tables.values() for cells in rows.values() for column in cells)
    order = list(dict.fromkeys([*OTHERS, "PyTorch, preloaded", *columns]))
    lines = ["# What allocating costs", "",
             "Measured by `scripts/bench`. Medians over processes that ran in turns (least .. most of",
             f"them). *bins*, *split* and others are pool kinds of gpureclaim; the default is *{pool}*. *bins, no",
             "fences* hands out what may still be in use: not for use, but the least that any allocator could take",
             "there; *empty hook* hands a freed block to the next request of its size, and does nothing else: the",
             "least that a call which comes down to the driver's functions can take.", ""]
    for where in dict.fromkeys(results.where.values()):
        groups = [group for group, there in results.where.items() if there == where]
        lines.append(f"{where} ({', '.join(groups)}).")
    lines += ["", "## In short", ""]
    short = [(f"{what}, {unit}", {name: number(value) for name, value in values.items()})
             for what, values, unit in headlines(tables, pool)]
    lines += markdown(short, "", order)
    slower = behind(tables, pool)
    lines += ["", f"## Where *{pool}* is slower or holds more", "", *(slower or ["Nowhere among the rows below."])]
    for table, title in TABLES.items():
        if table not in tables:
            continue
        rows = []
        for row, columns in tables[table].items():
            unit = results.unit(table, row)
            rows.append((f"{row}, {unit}" if unit else row, {name: cell(values) for name, values in columns.items()}))
        lines += ["", f"## {title}", "", *markdown(rows, "", order)]
    return "\n".join(lines) + "\n"


def figure(results, table, row, column):
    """The median with its unit, as a document shows them, and as a number; KeyError where it was not measured."""
    value = statistics.median(results.tables()[table][row][column])
    unit = results.unit(table, row)
    shown, unit = (value / 1000, "ms") if unit == "us" and value >= 10000 else (value, unit)
    text = number(shown)
    return f"{int(text):,} {unit}" if text.isdigit() else f"{text} {unit}", value


def figures(results, in_readme):
    """The table of a document, as lines."""
    places, rows = {}, []
    for text, table, row, beside, readme in FIGURES:
        if in_readme and not readme:
            continue
        try:
            native, native_value = figure(results, table, row, "native")
            ours, ours_value = figure(results, table, row, DEFAULT_POOL)
            text = (readme if in_readme else text).format(figure(results, table, *beside)[0] if beside else "")
        except KeyError:
            continue
        factor = float(f"{native_value / ours_value:.2g}")
        rows.append(f"| {text} | {native} | {ours} | {f'{factor:,.0f}' if factor >= 10 else factor} |")
        group = next(group for group, t, r, _ in results.samples if (t, r) == (table, row))
        card, *_, day = results.where[group].split("; ")
        places.setdefault(f"one {card}", set()).add(datetime.date.fromisoformat(day))
    where = [f"{card}, " + " and ".join(map(shown, sorted(days))) for card, days in places.items()]
    return [f"| {'; '.join(where)} | native | gpureclaim | factor |", "| --- | ---: | ---: | ---: |", *rows]


def thinned(points, most=150):
    """At most so many (seconds, value): of equal spans of time, the highest value of each."""
    if not points:
        return []
    span, highest = points[-1][0] / most or 1, {}
    for at, value in points:
        number = min(int(at / span), most - 1)
        highest[number] = max(highest.get(number, (0, 0)), (value, at))
    return [(number * span, value) for number, (value, _) in sorted(highest.items())]


def drawing(results):
    """The curves of "footprint" as an SVG, or None without any."""
    rows = results.tables().get("footprint")
    if not rows:
        return None
    curves = {name: list(zip(rows["seconds"][name], rows["MiB"][name])) for name in rows["MiB"]}
    width, height, left, bottom = 720, 340, 60, 40
    last = max(points[-1][0] for points in curves.values())
    most = max(value for points in curves.values() for _, value in points) * 1.1

    def x(seconds):
        return left + seconds / last * (width - left - 20)

    def y(mib):
        return height - bottom - mib / most * (height - bottom - 20)

    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
             'font-size="12">', f'<rect width="{width}" height="{height}" fill="white"/>']
    for mib in range(0, int(most), 500):
        lines.append(f'<path d="M{left} {y(mib):.1f}H{width - 20}" stroke="#ddd"/>'
                     f'<text x="{left - 6}" y="{y(mib) + 4:.1f}" text-anchor="end">{mib}</text>')
    for second in range(int(last) + 1):
        lines.append(f'<text x="{x(second):.1f}" y="{height - bottom + 16}" text-anchor="middle">{second}</text>')
    lines.append(f'<text x="{width / 2}" y="{height - 6}" text-anchor="middle">seconds since the first step</text>'
                 f'<text x="{left}" y="14">MiB on the GPU</text>')
    for number, (name, points) in enumerate(curves.items()):
        colour = ("#888", "#2a7", "#c60", "#15c")[number % 4]
        path = "L".join(f"{x(at):.1f} {y(mib):.1f}" for at, mib in points)
        title, place = "gpureclaim" if name == DEFAULT_POOL else name, height - bottom - 14 * (len(curves) - number)
        lines.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
                     f'<text x="{width - 24}" y="{place}" text-anchor="end" fill="{colour}">{title}</text>')
    return "\n".join([*lines, "</svg>", ""])


ALLOCATORS = {
    "auto": "`auto`, the default", "bins": "`bins`", "split": "`split`", "PyTorch": "PyTorch's own cache",
    "PyTorch, preloaded": "the same, with the library loaded", "PyTorch, expandable": "PyTorch's expandable segments",
    "cudaMallocAsync": "`cudaMallocAsync`", "native": "`cudaMalloc` of the driver",
    "bins, no fences": "`bins` without fences, which no program may use",
}


def allocators(first, cells):
    """A table with a line for each allocator; CELLS: {title: (table, row, the column to divide by or None)}."""
    def lines(tables):
        rows = []
        for column, name in ALLOCATORS.items():
            shown = {}
            for title, (table, row, base) in cells.items():
                found = tables.get(table, {}).get(row, {})
                value = ratio(found.get(column), found.get(base)) if base else found.get(column)
                if value:
                    shown[title] = f"{value:.2f}" if base else number(statistics.median(value))
            if shown:
                rows.append((name, shown))
        return markdown(rows, first, list(cells))
    return lines


def changing(tables):
    """Programs whose sizes change: a line for each, as shares of what PyTorch's own cache takes."""
    rows, columns = [], {DEFAULT_POOL: "gpureclaim", "PyTorch, expandable": "expandable segments"}
    titles = {"time, ten steps later on": "later steps",
              "time if only the allocator differed, ten steps later on": "later steps, if only the allocator differed",
              "time, the first 100 steps": "first 100 steps", "most memory held": "peak memory"}
    for row, found in tables.get("programs", {}).items():
        name, _, what = row.partition(": ")
        if what not in titles or "PyTorch" not in found or name == "training":
            continue
        shown = next((shown for known, shown in rows if known == name), None)
        if shown is None:
            rows.append((name, shown := {}))
        for column, title in columns.items():
            if column in found:
                shown[f"{title}: {titles[what]}"] = f"{ratio(found[column], found['PyTorch']):.2f}"
    return markdown(rows, "", [f"{title}: {what}" for title in columns.values() for what in titles.values()])


def loops(tables):
    """malloc, kernel and free, as shares of the kernel alone, through each door."""
    columns = {DEFAULT_POOL: "the library", "cudaMallocAsync": "`cudaMallocAsync`",
               "empty hook": "a hook that does nothing"}
    rows = []
    for table, name in DOORS.items():
        found = tables.get(table, {})
        over, alone = found.get("malloc + kernel + free", {}), found.get("kernel alone", {})
        shares = {title: ratio(over.get(column), alone.get(column)) for column, title in columns.items()}
        rows.append((name, {title: f"{value:.2f}" for title, value in shares.items() if value}))
    return markdown(rows, "calls through", list(columns.values()))


GRAPHS = {
    "PyTorch, private": "PyTorch's own cache, a pool for each graph",
    "PyTorch, expandable, private": "PyTorch's expandable segments, a pool for each graph",
    "PyTorch, shared": "PyTorch's own cache, one pool for all",
    "PyTorch, expandable, shared": "PyTorch's expandable segments, one pool for all",
    f"{DEFAULT_POOL}, private": "gpureclaim, `GPURECLAIM_GRAPH_ARENA=private`",
    f"{DEFAULT_POOL}, shared": "gpureclaim, `GPURECLAIM_GRAPH_ARENA=shared`",
    f"{DEFAULT_POOL}, shared, one pool": "the same, and one pool of PyTorch's for all",
    "PyTorch, preloaded, shared": "PyTorch's own cache, one pool for all, with the library loaded",
}
GRAPH_MODELS = ("toy", "transformer")
GRAPH_ORDERS = ("ascending", "descending", "shuffled")


def graph_memory(tables):
    """What graphs of all batch sizes hold, beside that of the largest alone; by order of capture."""
    found, rows = tables.get("graphs", {}), []
    for column, name in GRAPHS.items():
        shown = {}
        for model in GRAPH_MODELS:
            alone = found.get(f"{model}, largest: memory held", {}).get(column)
            for order in GRAPH_ORDERS:
                together = found.get(f"{model}, {order}: memory held", {}).get(column)
                if together:
                    multiple = f" ({ratio(together, alone):.2f})" if alone and min(alone) > 0 else ""
                    shown[f"{model}, {order}"] = number(statistics.median(together)) + multiple
        if shown:
            rows.append((name, shown))
    return markdown(rows, "MiB", [f"{model}, {order}" for model in GRAPH_MODELS for order in GRAPH_ORDERS])


def graph_times(tables):
    """How long captures take, and replays, as a share of the same work without graphs on PyTorch's own cache."""
    found, rows = tables.get("graphs", {}), []
    for column, name in GRAPHS.items():
        shown = {}
        for model in GRAPH_MODELS:
            capture = found.get(f"{model}, ascending: time to capture", {}).get(column)
            replay = found.get(f"{model}, ascending: time of a replay", {}).get(column)
            eager = found.get(f"{model}, ascending: time without graphs", {}).get("PyTorch, private")
            if capture:
                shown[f"{model}: s to capture"] = number(statistics.median(capture))
            if replay and eager:
                shown[f"{model}: replay"] = f"{ratio(replay, eager):.2f}"
        if shown:
            rows.append((name, shown))
    return markdown(rows, "", [f"{model}: {what}" for model in GRAPH_MODELS for what in ("s to capture", "replay")])


TRAINING = {"steps": "training: time, ten steps later on", "first 100 steps": "training: time, the first 100 steps"}
INSIDE = {"ms of ten steps": "training: time in PyTorch's allocator, ten steps later on",
          "ms of the first 100": "training: time in PyTorch's allocator, the first 100 steps"}

COMPILED = {"MiB held": "memory held", "us of a call": "time of a replay", "us without graphs": "time without graphs"}

# Tables of the documents besides FIGURES, each between two comments with its name.
GRIDS = {
    "loops": loops,
    "held": allocators("most held / most live", {name: ("traces", f"{name}: most memory held / most live", None)
                                       for name in ("train", "mix", "serve")}),
    "operation": allocators("us", {name: ("traces", f"{name}: time of an operation", None)
                                   for name in ("train", "mix", "serve")}),
    "training": allocators("", {title: ("programs", row, "PyTorch") for title, row in TRAINING.items()} |
                           {"memory": ("programs", "training: most memory held", "PyTorch")}),
    "inside": allocators("", {title: ("programs", row, None) for title, row in INSIDE.items()} |
                         {"ten steps, if only that differed": (
                             "programs", "training: time if only the allocator differed, ten steps later on",
                             "PyTorch")}),
    "changing": changing,
    "graphs": graph_memory,
    "graph-times": graph_times,
    "compiled": allocators("", {title: ("graphs", f"compiled: {row}", None) for title, row in COMPILED.items()}),
    "threads": allocators("us", {title: ("threads", title, None)
                                 for title in ("1 thread", "2 threads", "4 threads", "8 threads", "16 threads")}),
    "live": allocators("us", {f"among {count:,}": ("live", f"{count} live blocks", None)
                              for count in (10, 10000, 1000000)}),
}


def shown(day):
    return f"{day.day} {day:%B %Y}"


def read_lines(path):
    return path.read_text().splitlines() if path.exists() else []


def tested(results, tests=TOP / "tests"):
    """Where what was tested ran: of each log that is kept, a line for each place (tests/support/environment.py)."""
    found = []  # (what, place)
    log = read_lines(tests / "gpu" / "gpu-check.txt")  # of several runs, one below the other
    found += [(f"`scripts/gpu-check`: {line}", place) for place, line in zip(log, log[1:])
              if re.match(r"\d+ passed\b", line)]
    log = read_lines(tests / "transparency" / "TRANSPARENCY.md")
    same = next((line.split("**")[1] for line in log if line.startswith("**")), "")
    what = f"[programs not written here](../tests/transparency/TRANSPARENCY.md): {same}"
    found += [(what, place) for line in log if line.startswith("Card: ")
              for place in line.removeprefix("Card: ").removesuffix(".").split(", then ")]
    log = read_lines(tests / "gpu" / "facts" / "facts.txt")
    count = sum(not line.startswith("#") for line in log)
    found += [(f"`tests/gpu/facts`: {count} answers of the driver", log[0].removeprefix("# "))] if log else []
    found += [("[benchmarks](benchmarks.md)", place) for place in results.where.values()]
    rows = {}
    for what, place in found:
        cells, days = {"what": what}, set()
        for part in place.split("; "):
            card, driver, version = part.partition(", driver ")
            if driver:
                cells |= {"GPU": card.removeprefix("1 x "), "driver": version}
            elif part.startswith("CUDA "):
                cells["CUDA"] = part.removeprefix("CUDA ")
            elif re.fullmatch(r"\d{4}-\d\d-\d\d", part):
                days.add(datetime.date.fromisoformat(part))
            elif " cores of " not in part:
                cells["packages"] = ", ".join(filter(None, [cells.get("packages"), part]))
        if "GPU" in cells:
            rows.setdefault(tuple(cells.items()), set()).update(days)
    lines = []
    for cells, days in rows.items():
        cells = dict(cells)
        if days:
            cells["when"] = " to ".join(map(shown, dict.fromkeys((min(days), max(days)))))
        lines.append((cells.pop("what"), cells))
    return markdown(lines, "", ["GPU", "driver", "CUDA", "packages", "when"])


def documents(results):
    """{path: (its text, what its text ought to be)}"""
    found = {}
    drawn = drawing(results)
    if drawn:
        found[DRAWING] = DRAWING.read_text() if DRAWING.exists() else "", drawn
    for path in (TOP / "README.md", TOP / "docs" / "benchmarks.md", TOP / "docs" / "compatibility.md"):
        text = wanted = path.read_text()
        for name in ("figures", "tested", *GRIDS):
            if name in GRIDS:
                lines = GRIDS[name](results.tables())
            else:
                lines = tested(results) if name == "tested" else figures(results, path.name == "README.md")
            before, begin, rest = wanted.partition(f"<!-- {name}:begin -->\n")
            _, end, after = rest.partition(f"<!-- {name}:end -->")
            if begin and end:
                wanted = before + begin + "\n".join(lines) + "\n" + end + after
        found[path] = text, wanted
    return found


def write_documents(results):
    for path, (_, text) in documents(results).items():
        path.write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--tables", action="store_true", help="print all figures")
    arguments = parser.parse_args()
    results = Results()
    results.load(RESULTS / "results.csv")
    if arguments.tables:
        print(report(results, DEFAULT_POOL), end="")
    elif arguments.check:
        differing = [path for path, (text, wanted) in documents(results).items() if text != wanted]
        for path in differing:
            print(f"The figures in {path.relative_to(TOP)} are not those of the logs: run bench_report.py.")
        sys.exit(1 if differing else 0)
    else:
        write_documents(results)


if __name__ == "__main__":
    main()
