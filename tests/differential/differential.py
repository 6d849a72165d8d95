#!/usr/bin/env python3
"""Random programs of driver calls, run natively and preloaded on the simulated device: both must get the same.

    differential.py BUILD [--seconds N] [--seed N] [--keep FOLDER]     new programs, until the time is over
    differential.py BUILD --replay FILE...                             those of a corpus

A program is a list of lines that tests/differential/program.c runs; its first says how, as "# NAME=VALUE... [--race]".
What may differ stands in RULES. A program that shows a difference is cut down to the lines that it needs, printed, and
with --keep stored. The seed is printed first; the same seed gives the same programs. Exit status 1 after a difference.
"""

import argparse
import collections
import os
import random
import re
import subprocess
import sys
import tempfile
import time

KIB, MIB = 1 << 10, 1 << 20
TIME_LIMIT = 60
RACE_BYTES = 192 * MIB

SETTINGS = [
    "GPURECLAIM_POOL=bins",
    "GPURECLAIM_POOL=auto",
    "GPURECLAIM_POOL=split",
    "GPURECLAIM_POOL=none",
    "GPURECLAIM_POOL=bins GPURECLAIM_REUSE=barrier",
    "GPURECLAIM_POOL=bins GPURECLAIM_REUSE=poll",
    "GPURECLAIM_POOL=bins GPURECLAIM_REUSE=sync",
    "GPURECLAIM_POOL=auto GPURECLAIM_REUSE=barrier",
    "GPURECLAIM_POOL=auto GPURECLAIM_REUSE=poll",
    "GPURECLAIM_POOL=split GPURECLAIM_REUSE=barrier",
    "GPURECLAIM_POOL=split GPURECLAIM_REUSE=poll",
    "GPURECLAIM_POOL=split GPURECLAIM_REUSE=sync",
]
CARDS = ["GRSIM_MEMORY=1GiB", "GRSIM_MEMORY=1GiB", "GRSIM_MEMORY=512MiB", "GRSIM_MEMORY=512MiB GRSIM_DEVICES=2"]


# ---- what may differ ----

# Under a hard limit the program gets what it would get on a card of that size, so natively the card is that small.
# There managed memory counts, too, and contexts and what graphs hold for themselves do not.
LIMITS = ["GPURECLAIM_HARD_LIMIT=256MiB", "GPURECLAIM_HARD_LIMIT=400MiB"]
OTHERS = ["GPURECLAIM_RELEASE_THRESHOLD=0", "GPURECLAIM_RELEASE_THRESHOLD=48MiB", "GPURECLAIM_SOFT_LIMIT=64MiB",
          "GPURECLAIM_DECAY=5ms", "GPURECLAIM_PINNED_CACHE=0", "GPURECLAIM_PROACTIVE=0", "GPURECLAIM_MALLOC_TRIM=1"]

SAME, ALLOWED, END = "same", "allowed", "end"


def numbers(text):
    return [int(n) for n in re.findall(r"-?\d+", text)]


def wide(settings):
    """Whether memory is taken in larger pieces than are asked for."""
    return "POOL=auto" in settings or "POOL=split" in settings


def limit(settings):
    found = re.search(r"HARD_LIMIT=(\w+)", settings)
    return found and found[1]


def either_ready(native, shim, _settings):
    return native in ("0", "600") and shim in ("0", "600")


def code(text):
    found = re.match(r"\d+", text)
    return int(found[0]) if found else None


def larger(live, small, settings):
    """What live blocks may hold beside what was asked for, in KiB."""
    return 4 * 2048 + (32 * 1024 + live if wide(settings) else live // 8) + small


def near(native, shim, settings):
    a, b = numbers(native), numbers(shim)
    if len(a) != 9 or len(b) != 9 or a[0] != b[0] or a[2:6] != b[2:6] or a[7:] != b[7:]:
        return False
    if a[0] != 0:
        return a[1] == b[1]  # only what pools keep differs
    _, free, total, live, small, asked, _pools, managed, late = a
    return free - larger(live, small, settings) - b[6] - managed - late <= b[1] <= total - asked - managed


def near_left(native, shim, settings):
    a, b = numbers(native), numbers(shim)
    return native.startswith("free ") and len(a) == len(b) == 2 and a[1] == b[1] and a[0] - 4 * 2048 <= b[0] <= a[1]


def refused_share(native, shim, settings):
    return code(shim) == 1 and ("POOL=split" in settings or "POOL=auto" in settings)


def refused_beside(native, shim, _settings):
    return code(native) == 0 and code(shim) == 900


def freed_beside_dead(native, shim, _settings):
    return code(native) == 709 and code(shim) == 0


def more_room(native, shim, _settings):
    return code(native) == 2 and code(shim) == 0


def less_room(native, shim, settings):
    found = re.search(r", asked (\d+) live (\d+) small (\d+) others (\d+) of (\d+)", native)
    # Beyond a limit the driver, which may forbid it, is not asked.
    if not found or code(native) not in (0, 900) or code(shim) != 2:
        return False
    asked, live, small, others, total = map(int, found.groups())
    return asked + live + others + small + larger(live, small, settings) > total


# (verbs, what is allowed, what follows, why)
RULES = [
    (("event-query", "stream-query"), either_ready, ALLOWED, "whether work has ended yet is a matter of time"),
    (("info",), near, ALLOWED,
     "small blocks share pages in another way, and may be twice as large as was asked for, others an eighth larger; "
     "what is freed in stream order, and what pools keep, is free at once, or when the stream comes to it; but they "
     "keep it until the program waits, which a free is not; of a larger piece that is partly live the rest is nobody's "
     "to have whole"),
    (("left",), near_left, ALLOWED, "as info, with nothing live"),
    (("share", "lend"), refused_share, ALLOWED,
     "a part of a larger mapping has no legacy handle of its own: the documentation says so"),
    (("free", "free-async"), refused_beside, END,
     "beside a capture a free that the library does not take is the driver's, and refused as without it"),
    (("free",), freed_beside_dead, END, "a block's context says where it goes, whatever ended context is current"),
    (("alloc", "pitch", "host", "async", "managed", "map", "most", "left"), more_room, END,
     "the library may find room where the driver finds none; what follows is another program"),
    (("alloc", "pitch", "async", "map", "managed"), less_room, END,
     "with what blocks may hold beside what was asked for (as info) the card is full"),
]


def verdict(native, shim, settings):
    """Of two lines "N verb: text"."""
    if native == shim:
        return SAME
    head, _, text = native.partition(": ")
    other_head, _, other_text = shim.partition(": ")
    if head != other_head:
        return None
    verb = head.split()[1]
    for verbs, allows, follows, _why in RULES:
        if verb in verbs and allows(text, other_text, settings):
            return follows
    return None


# ---- running ----


class Runner:
    def __init__(self, build):
        self.program = os.path.join(build, "tests", "differential", "program")
        self.sim = os.path.join(build, "tools", "sim")
        self.shim = os.path.join(build, "shim", "libgpureclaim.so")
        self.folder = tempfile.TemporaryDirectory(prefix="differential-")
        self.runs = 0
        self.counts = collections.defaultdict(lambda: [0, 0, 0])  # natively, of each verb: lines, skipped, refused

    def run(self, path, how, preloaded):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("GPURECLAIM_", "GRSIM_")) and k != "LD_PRELOAD"}
        env["LD_LIBRARY_PATH"] = self.sim
        arguments = [self.program, path]
        for word in how.split():
            if word.startswith("--"):
                arguments.append(word)
            elif word.startswith("GRSIM_") or preloaded:
                env.setdefault(*word.split("=", 1))
        if preloaded:
            env["LD_PRELOAD"] = self.shim
            env["GPURECLAIM_REGION_DIR"] = os.path.join(self.folder.name, "region")
        elif "POOL=none" not in how:
            arguments.append("--own-frees")
        if wide(how):
            arguments.append("--wide")
        if limit(how):
            arguments.append("--limited")
            if not preloaded:
                env["GRSIM_MEMORY"] = limit(how)
        self.runs += 1
        try:
            done = subprocess.run(arguments, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, timeout=TIME_LIMIT, text=True, errors="replace")
            status, out, err = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as late:
            out, err = ((text or b"").decode(errors="replace") for text in (late.stdout, late.stderr))
            status = "no end"
        lines = out.splitlines()
        lines.sort(key=lambda line: int(line.split()[0]) if line[:1].isdigit() else 1 << 30)
        return status, lines, err

    def difference(self, lines, how):
        """What is wrong with the program in these settings, or None."""
        path = os.path.join(self.folder.name, "program.txt")
        with open(path, "w") as out:
            out.write("\n".join(lines) + "\n")
        status, native, err = self.run(path, how, False)
        if status != 0 or "sim: misuse" in err or any("WRONG" in line for line in native):
            last = "\n".join(line for line in native[-5:] if line)
            return "native: the program itself is wrong (%s)\n%s" % (status, err[-600:] + last)
        for verb, text in [re.match(r"\d+ ([\w-]+): (.*)", line).groups() for line in native]:
            count = self.counts[verb]
            count[0] += 1
            count[1] += text == "skip"
            count[2] += bool(re.match(r"[1-9]", text)) and verb not in ("left", "event-query", "stream-query")
        status, shim, err = self.run(path, how, True)
        for a, b in zip(native, shim):
            found = verdict(a, b, how)
            if found == END:
                break
            if found is None:
                return "native:    %s\npreloaded: %s" % (a, b)
            if "WRONG" in b or re.search(r"[1-9]\d* different", b):
                return "contents: %s" % b
        else:
            if status == 0 and len(native) != len(shim):
                return "preloaded: it ends after %d lines of %d" % (len(shim), len(native))
        if status != 0:
            return "preloaded: status %s after %s\n%s" % (status, shim[-1] if shim else "nothing", err[-600:])
        if "sim: misuse" in err:
            return "preloaded: %s" % re.search(r"sim: misuse.*", err)[0]
        return None


def kind(difference):
    """So that a shorter program shows the same: which line differs, how, without its number."""
    lines = difference.splitlines()[:2]
    lines = (re.sub(r": *\d+ (?=[a-z])", ": ", line) for line in lines)
    text = " ".join(re.sub(r"0x\w+|\b[mc]?\d{2,}|\bm\d", "#", line) for line in lines)
    return text if text.startswith("native:  ") else text[:60]


def shrink(runner, lines, how, difference, seconds=120):
    """Lines that cannot be left out, one by one or by the half."""
    want, until, part = kind(difference), time.monotonic() + seconds, max(1, len(lines) // 2)
    times = 4 if "--race" in how else 1
    while part and time.monotonic() < until:
        at, shorter = 0, False
        while at < len(lines) and time.monotonic() < until:
            rest = lines[:at] + lines[at + part:]
            found = next(filter(None, (runner.difference(rest, how) for _ in range(times))), None)
            if found and kind(found) == want:
                lines, difference, shorter = rest, found, True
            else:
                at += part
        part = part if shorter and part == 1 else part // 2
    return lines, difference


# ---- making programs ----


class Writer:
    """Knows what is probably there, so that most lines find their objects."""

    def __init__(self, seed, race, devices):
        self.random = random.Random(seed)
        self.race = race
        self.devices = devices
        self.lines = []
        self.memory = {}  # slot: (kind, home)
        self.streams, self.contexts = {}, {0}
        self.events, self.pools, self.graphs, self.execs = set(), set(), set(), set()
        self.captures = {}  # stream: whether it began the capture
        self.bytes, self.freed = {}, 0  # of what is live, and of what another thread may still have to free
        self.doors = self.random.choice((5, 5, 7))
        self.kinds = self.random.sample(["device"] * 5 + ["managed", "host", "async", "map", "pitch"], 6)

    def pick(self, some):
        some = sorted(some)
        return self.random.choice(some) if some else None

    def put(self, text, thread=None):
        self.lines.append("%d %s" % (self.random.choice((0, 0, 0, 1, 1, 2, 3)) if thread is None else thread, text))

    def free_slot(self, used, first=1, most=40):
        free = [i for i in range(first, most) if i not in used]
        return self.random.choice(free) if free else None

    def size(self):
        r = self.random
        return r.choice((
            r.choice((1, 3, 100, 512, 513, 1000, 4096)),
            r.randrange(1, 64 * KIB),
            r.choice((64 * KIB, 300 * KIB, MIB - 1, MIB)),
            r.choice((MIB + 1, 2 * MIB, 2 * MIB + 1, 3 * MIB + 5, 4 * MIB)),
            r.randrange(MIB, 32 * MIB),
            r.choice((20 * MIB, 33 * MIB, 64 * MIB)),
        ))

    def stream(self, captured=False):
        """A home or another use: mostly one that is made, and not captured."""
        some = [s for s in self.streams if captured or s not in self.captures]
        if some and self.random.random() < .75:
            return self.pick(some)
        return self.random.choice((0, 0, 1))

    def allocate(self):
        m = self.free_slot(self.memory)
        if m is None:
            return self.release()
        kind, home, size = self.random.choice(self.kinds), self.stream(), self.size()
        if self.race and not self.room(m, size):
            return self.release()
        door = self.random.randrange(self.doors)
        if kind == "async" and self.captures and self.random.random() < .3:
            home = self.pick(self.captures)
        self.memory[m] = (kind, home)
        thread = self.random.randrange(4) if home == 1 else None
        self.put({
            "device": "alloc m%d %d s%d %d" % (m, size, home, door),
            "pitch": "pitch m%d %d %d s%d" % (m, size % 5000 + 1, size % 37 + 1, home),
            "managed": "managed m%d %d s%d" % (m, min(size, 8 * MIB), home),
            "host": "host m%d %d s%d %d %d" % (m, min(size, 8 * MIB), home, self.random.randrange(2), door),
            "async": "async m%d %d s%d %d p%d" % (m, size, home, door, self.pick(self.pools | {0})),
            "map": "map m%d %d s%d %d" % (m, 1 + size % 7, home, self.random.randrange(2)),
        }[kind], thread)
        self.put("fill m%d %d" % (m, self.random.choice((-1, -1, 0, 0, 0, 300, 2000, 6000))),
                 int(self.lines[-1][0]) if home == 1 else None)

    def room(self, m, size):
        """Where lines run in any order, which of them fails on a full card is chance: it must not get full."""
        live = sum(self.bytes.values()) + size
        if live > RACE_BYTES:
            return False
        if live + self.freed > RACE_BYTES:
            self.put("sync")
            self.freed = 0
        self.bytes[m] = size
        return True

    def release(self):
        m = self.pick(self.memory)
        if m is None:
            return self.allocate()
        kind, home = self.memory.pop(m)
        self.freed += self.bytes.pop(m, 0)
        door = self.random.randrange(self.doors)
        how = self.random.choice((0, 0, 0, 0, 0, 0, 1, 2)) if not self.race else 0
        if kind == "async" and self.random.random() < .8 or kind == "device" and self.random.random() < .1:
            stays = self.random.random() < .7 or home in self.captures
            self.put("free-async m%d s%d %d %d" % (m, home if stays else self.stream(), door, how))
        else:
            self.put("free m%d %d %d" % (m, door, how))

    def use(self):
        m = self.pick(self.memory)
        if m is None:
            return
        other = self.pick(self.memory)
        self.put(self.random.choice((
            "fill m%d %d" % (m, self.random.choice((-1, 0, 500, 3000))),
            "fill m%d %d" % (m, self.random.choice((-1, 0, 500, 3000))),
            "check m%d" % m,
            "copy m%d m%d" % (m, other),
            "range m%d %d" % (m, self.random.randrange(MIB)),
            "lend m%d" % m,
            "share m%d" % m if self.memory[m][0] != "host" else "check m%d" % m,
        )))

    def make_stream(self):
        s = self.free_slot(self.streams, 2, 14)
        if s is not None:
            self.streams[s] = True
            self.put("stream s%d %d" % (s, self.random.randrange(2)))

    def streams_and_events(self):
        s, e = self.stream(), self.pick(self.events)
        new = self.free_slot(self.events, 0, 8)
        what = self.random.choice(("make", "spin", "spin", "sync", "query", "destroy", "event", "event", "capturing",
                                   "close"))
        if what == "make":
            self.make_stream()
        elif what == "spin":
            self.put("spin s%d %d" % (s, self.random.choice((100, 1000, 5000, 20000))))
        elif what == "sync":
            self.put(self.random.choice(("stream-sync s%d" % s, "sync")))
        elif what == "query":
            self.put("stream-query s%d" % s)
        elif what == "capturing":
            self.put("capturing s%d" % s)
        elif what == "destroy" and len(self.streams) > 3:
            s = self.pick(self.streams)
            self.streams.pop(s)
            self.captures.pop(s, None)
            self.put("stream-destroy s%d" % s)
        elif what == "close" and e is not None:
            self.events.discard(e)
            self.put("event-destroy e%d" % e)
        elif e is None or (new is not None and self.random.random() < .1):
            self.events.add(new)
            self.put("event e%d" % new)
        else:
            self.put(self.random.choice(("record e%d s%d" % (e, s), "wait s%d e%d" % (s, e), "event-sync e%d" % e,
                                         "event-query e%d" % e)))

    def capture(self):
        r = self.random
        if self.captures and r.random() < .7:
            s = self.pick(self.captures)
            what = r.choice(("end", "end", "fork", "fill", "fill", "spin", "leave"))
            if what == "end":
                g = r.randrange(6)
                self.captures.pop(s)
                self.graphs.add(g)
                thread = self.owner if r.random() < .9 else None
                self.put("end s%d g%d" % (s, g), thread)
                x = r.randrange(6)
                self.execs.add(x)
                self.put("instantiate x%d g%d %d" % (x, g, r.choice((0, 0, 0, 1))))
                self.put("launch x%d" % x)
            elif what == "fork" and self.events and self.streams:
                e, other = self.pick(self.events), self.pick(self.streams)
                self.put("record e%d s%d" % (e, s))
                self.put("wait s%d e%d" % (other, e))
                self.put("spin s%d 10" % other)
                if r.random() < .8:
                    self.put("record e%d s%d" % (e, other))
                    self.put("wait s%d e%d" % (s, e))
            elif what == "fill":
                homes = [m for m, (_, home) in self.memory.items() if home == s]
                if homes:
                    self.put("fill m%d 0" % self.pick(homes))
            elif what == "spin":
                self.put("spin s%d 100" % s)
            elif r.random() < .2:
                self.captures.pop(s)
                self.streams.pop(s, None)
                self.put("stream-destroy s%d" % s)
        elif self.streams:
            s = self.pick(self.streams)
            self.captures[s] = True
            self.owner = r.randrange(4)
            self.put("begin s%d %d" % (s, 2 if self.race else r.randrange(3)), self.owner)

    def graph(self):
        g, x = self.pick(self.graphs), self.pick(self.execs)
        what = self.random.choice(("launch", "launch", "launch", "graph", "exec", "trim"))
        if what == "launch" and x is not None:
            self.put("launch x%d" % x)
        elif what == "graph" and g is not None:
            self.graphs.discard(g)
            self.put("graph-destroy g%d" % g)
        elif what == "exec" and x is not None:
            self.execs.discard(x)
            self.put("exec-destroy x%d" % x)
        elif what == "trim":
            self.put("graph-trim")

    def pool(self):
        p, new = self.pick(self.pools), self.free_slot(self.pools, 1, 5)
        if p is None or self.random.random() < .2 and new is not None:
            self.pools.add(new)
            self.put("pool p%d %d" % (new, 0 if self.race else self.random.choice((0, 0, 64 * MIB))))
            return
        what = self.random.choice(("trim", "keep", "used", "used", "current", "destroy"))
        self.put({"trim": "pool-trim p%d 0" % p,
                  "keep": "pool-keep p%d %d" % (p, self.random.choice((0, 32 * MIB, 1 << 40))),
                  "used": "pool-used p%d" % p, "current": "pool-current p%d" % self.random.choice((0, p)),
                  "destroy": "pool-destroy p%d" % p}[what])
        if what == "destroy":
            self.pools.discard(p)

    def plug_in(self):
        self.put("plug-in")

    def context(self):
        r = self.random
        what = r.choice(("new", "new", "use", "use", "use", "use", "destroy", "attach", "detach", "reset", "retain",
                         "release", "exit"))
        c, new = self.pick(self.contexts), self.free_slot(self.contexts, 1, 5)
        if what in ("destroy", "attach", "detach") and r.random() < .9:
            c = self.pick(self.contexts - {0})
        if what == "new" and new is not None and len(self.contexts) < 4:
            self.contexts.add(new)
            self.put("context c%d %d" % (new, r.randrange(self.devices)))
        elif what == "use" and c is not None:
            self.put("use c%d" % c)
        elif what == "destroy" and c:
            self.contexts.discard(c)
            self.put("destroy c%d %d" % (c, r.randrange(2)))
        elif what in ("attach", "detach") and c is not None:
            self.put("%s c%d" % (what, c))
        elif what == "reset" and r.random() < .4:
            self.put("reset")
            self.forget()
        elif what == "release" and r.random() < .4:
            self.put("release")
            if r.random() < .8:
                self.put("retain")
        elif what == "retain" and r.random() < .5:
            self.put("retain")
        elif what == "exit":
            self.put("exit", r.randrange(1, 4))

    def forget(self):
        if self.random.random() < .9:
            self.put("retain")
            for t in range(4):
                self.put("use c0", t)

    def program(self):
        r = self.random
        weights = {
            self.allocate: 30, self.release: 24, self.use: 14, self.streams_and_events: 14,
            self.capture: r.choice((0, 4, 12)), self.graph: 2, self.pool: r.choice((0, 0, 3)),
            self.context: r.choice((0, 0, 2, 6)) if self.devices == 1 else 6,
        }
        if self.race:
            weights[self.capture] = weights[self.context] = 0
        if self.doors > 5:
            weights[self.plug_in] = 2
        steps, choices = list(weights), list(weights.values())
        for _ in range(r.randrange(1, 5)):
            self.make_stream()
        for _ in range(r.choice((20, 60, 150, 300))):
            r.choices(steps, choices)[0]()
            if r.random() < .03:
                self.put(r.choice(("info", "info", "most 90")))
        return self.lines


# ---- main ----


def split_file(path):
    with open(path) as file:
        lines = file.read().splitlines()
    how = lines[0][2:] if lines and lines[0].startswith("# ") else SETTINGS[0]
    return [line for line in lines if line and not line.startswith("#")], how


def replay(runner, paths):
    failed = 0
    for folder in [path for path in paths if os.path.isdir(path)]:
        paths += sorted(os.path.join(folder, name) for name in os.listdir(folder))
    for path in [path for path in paths if not os.path.isdir(path)]:
        lines, how = split_file(path)
        found = runner.difference(lines, how)
        print("%-6s %s" % ("FAILED" if found else "ok", os.path.basename(path)))
        if found:
            failed += 1
            print(found)
    return failed


def search(runner, seed, seconds, keep, only=None):
    until, programs, lines_run, failed = time.monotonic() + seconds, only or 0, 0, 0
    while time.monotonic() < until and (only is None or programs == only):
        race = programs % 4 == 3
        choose = random.Random("%d %d settings" % (seed, programs))
        how = "%s %s%s" % (choose.choice(SETTINGS), choose.choice(CARDS), " --race" if race else "")
        more = choose.choice([None, None, LIMITS, OTHERS])
        if more and not (race and more is LIMITS):
            how = "%s %s" % (choose.choice(more), how)
        lines = Writer("%d %d" % (seed, programs), race, 2 if "DEVICES=2" in how else 1).program()
        programs += 1
        lines_run += len(lines)
        found = runner.difference(lines, how)
        if not found:
            continue
        failed += 1
        print("seed %d, program %d, %d lines, %s\n%s" % (seed, programs - 1, len(lines), how, found), flush=True)
        lines, found = shrink(runner, lines, how, found)
        print("cut down to %d lines:\n# %s\n%s\n%s\n" % (len(lines), how, "\n".join(lines), found), flush=True)
        if keep:
            os.makedirs(keep, exist_ok=True)
            with open(os.path.join(keep, "%d-%d.txt" % (seed, programs - 1)), "w") as out:
                out.write("# %s\n%s\n" % (how, "\n".join(lines)))
    print("%d programs of %d lines, %d differences" % (programs, lines_run, failed))
    return failed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build")
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("GR_TEST_SECONDS", 20)))
    parser.add_argument("--only", type=int, help="one program of the seed, by its number")
    parser.add_argument("--seed", type=int,
                        default=int(os.environ.get("GR_TEST_SEED", 0)) or random.randrange(1, 1 << 30))
    parser.add_argument("--keep")
    parser.add_argument("--verbose", action="store_true", help="at the end, how many lines of each kind were run")
    parser.add_argument("--replay", nargs="+")
    arguments = parser.parse_args()
    runner = Runner(os.path.abspath(arguments.build))
    if arguments.replay:
        sys.exit(1 if replay(runner, arguments.replay) else 0)
    print("GR_TEST_SEED=%d" % arguments.seed, flush=True)
    failed = search(runner, arguments.seed, arguments.seconds, arguments.keep, arguments.only)
    if arguments.verbose:
        for verb, (count, skipped, refused) in sorted(runner.counts.items()):
            print("%-16s %7d, %6d of them without their objects, %6d refused" % (verb, count, skipped, refused))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
