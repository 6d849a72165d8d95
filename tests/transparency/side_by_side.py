#!/usr/bin/env python3
"""Runs programs natively and under the shim and writes a table of what came out; called by scripts/transparency.

A list says what to run, one program a line: NAME | SECONDS | OPTIONS | COMMAND. COMMAND may begin with NAME=VALUE
settings, and @ in it stands for the folder of the list. It runs in a fresh copy of the folder NAME beside the list, or
in an empty one. OPTIONS are words: quick (part of the short run), alone (nothing beside it on its card), unordered
(several threads or processes print), gpus=N (skipped with fewer cards), all (sees every card; others see one).

Each row is kept in the folder of the logs as soon as it is known; --resume goes on with the rest of an earlier run of
the same library, as where time on a card is short.

With --tests, a list runs test files of another project, in a fresh copy of that project's folder; COMMAND is
project_tests.py, and what is compared is how each test ended.

With --warm the library is one whose pool is full of used blocks from the start (warm.c), so that each program's
requests come from the cache. What differs then is looked at once more, with fresh memory of the driver's that is merely
not zero: a program that differs in the same way there has itself to thank for it.
"""

import argparse
import fnmatch
import glob
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import outcome
from outcome import Outcome

# Native runs that show what varies by itself, once a difference was seen.
REPEATS = 3

# So much longer, once more, for tests that failed in one run and that the other did not come to.
LONGER = 3

# Of a warm start: what lies unused from the start is to be there to the end.
WARM = {"GPURECLAIM_DECAY": "600s"}

# Nothing is cached, and what the driver hands out is written to first (warm.c).
CONTROL = {"GPURECLAIM_POOL": "none", "GR_TEST_WARM": "dirty"}

# Settings for where packages keep compiled kernels.
CACHES = ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH"]


@dataclass
class Program:
    name: str
    seconds: int
    options: list
    command: list
    folder: str
    settings: dict
    # Where another project's tests are that the program runs.
    project: str = ""
    origin: str = ""

    def gpus(self):
        return max([int(word[5:]) for word in self.options if word.startswith("gpus=")], default=1)

    def sees_all(self):
        return self.gpus() > 1 or "all" in self.options


@dataclass
class Row:
    program: Program
    native: str
    shim: str = "-"
    served: str = ""
    verdict: str = "same"
    note: str = ""
    found: tuple = ()

    def succeeds(self):
        return self.native.split(":")[0] == "ok"

    def section(self, scripts_folder):
        if self.program.project:
            return "Tests of " + os.path.basename(self.program.origin).removesuffix("-tests.txt")
        return "Scripts" if self.program.folder == scripts_folder else "Compiled programs"


def read_list(path, project=""):
    folder = os.path.dirname(os.path.abspath(path))
    programs = []
    with open(path) as lines:
        for number, line in enumerate(lines, 1):
            line = line.split("#", 1)[0].strip()
            if not line:
                continue
            parts = [part.strip() for part in line.split("|")]
            if len(parts) != 4 or not parts[1].isdigit():
                raise SystemExit(f"{path}:{number}: not NAME | SECONDS | OPTIONS | COMMAND")
            words = [re.sub(r"^@(?=/)", folder, word) for word in shlex.split(parts[3])]
            settings = {}
            while words and re.match(r"[A-Za-z_]\w*=", words[0]):
                name, _, value = words.pop(0).partition("=")
                settings[name] = value
            if not words:
                raise SystemExit(f"{path}:{number}: no command")
            programs.append(Program(parts[0], int(parts[1]), parts[2].split(), words, folder, settings, project, path))
    return programs


def read_notes(path):
    """[(name pattern, regular expression for one difference, explanation)]"""
    notes = []
    if not os.path.exists(path):
        return notes
    with open(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            match = re.match(r"(\S+)\s+(.*?)\s+->\s+(.*\S)", line)
            if not match:
                raise SystemExit(f"{path}:{number}: not NAME EXPRESSION -> EXPLANATION")
            notes.append((match[1], re.compile(match[2]), match[3]))
    return notes


def explained(notes, name, found):
    """The explanations that together cover every difference, or None."""
    texts = []
    for line in found:
        for pattern, expression, text in notes:
            if fnmatch.fnmatchcase(name, pattern) and expression.search(line):
                texts.append(text)
                break
        else:
            return None
    return " ".join(dict.fromkeys(texts))


class Cards:
    """Hands out the cards of the machine: one that has few programs, or one that has none and gets no other."""

    def __init__(self, count):
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = [name for name in shown.split(",") if name] or [str(index) for index in range(count)]
        self.users = dict.fromkeys(names[:count], 0)
        self.changed = threading.Condition()

    def take(self, alone):
        with self.changed:
            self.changed.wait_for(lambda: not alone or 0 in self.users.values())
            card = min(self.users, key=self.users.get)
            self.users[card] += 1
            return card

    def give(self, card):
        with self.changed:
            self.users[card] -= 1
            self.changed.notify()


class Runner:
    def __init__(self, arguments):
        self.cards = Cards(arguments.gpus) if arguments.gpus > 1 else None
        self.shim = arguments.shim
        self.warm = arguments.warm
        self.libraries = arguments.libraries
        self.simulated = arguments.simulated
        self.card = arguments.card
        self.scripts_folder = arguments.scripts_folder
        self.logs = arguments.logs
        self.extra = dict(item.split("=", 1) for item in arguments.set)
        self.scratch = tempfile.mkdtemp(prefix="side-by-side-")
        self.lock = threading.Lock()
        self.begin = time.monotonic()

    def say(self, text):
        with self.lock:
            print(f"{time.monotonic() - self.begin:6.1f} s  {text}", file=sys.stderr, flush=True)

    def environment(self, program, card, place, how):
        """how: native, shim, or control, which is as native but for memory that is not zero."""
        ours = ("GPURECLAIM_", "GR_TEST_")
        kept = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD" and not k.startswith(ours)}
        kept |= program.settings
        if card is not None:
            kept["CUDA_VISIBLE_DEVICES"] = card
        # Python's packages find their own libraries, and mind those of another version.
        libraries = self.libraries if self.simulated or program.folder != self.scripts_folder else ""
        paths = [path for path in [libraries, kept.get("LD_LIBRARY_PATH")] if path]
        if paths:
            kept["LD_LIBRARY_PATH"] = ":".join(paths)
        # Compiled kernels of one run are no help to the next: both do the same work.
        # A project's tests compile hundreds of them, though, and are about something else.
        for name in CACHES:
            kept[name] = os.path.join(self.scratch if program.project else place, "cache", name.split("_")[0].lower())
        kept["PYTHONDONTWRITEBYTECODE"] = "1"
        if how != "native":
            # What the program preloads itself stays behind the shim.
            kept["LD_PRELOAD"] = ":".join([self.shim] + [p for p in [program.settings.get("LD_PRELOAD")] if p])
            # What others that run meanwhile have cached is not this program's affair.
            kept["GPURECLAIM_GROUP"] = program.name
            kept["GPURECLAIM_STATS_FILE"] = os.path.join(place, "stats.%p")
            kept |= (WARM if self.warm else {}) | self.extra | (CONTROL if how == "control" else {})
        return kept

    def run(self, program, card, how, turn=0, longer=1):
        """One run in a place of its own: its Outcome, and what served() says of it. longer: times its seconds."""
        place = tempfile.mkdtemp(prefix="run-", dir=self.scratch)
        work = os.path.join(place, "work")
        beside = program.project or os.path.join(program.folder, program.name)
        if os.path.isdir(beside):
            shutil.copytree(beside, work)
        else:
            os.mkdir(work)
        before = {} if program.project else outcome.digests(work)
        log = os.path.join(self.logs, f"{program.name}.{how}{turn or ''}")
        with open(log, "wb") as out, open(log + ".err", "wb") as err:
            try:
                process = subprocess.Popen(
                    program.command,
                    cwd=work,
                    env=self.environment(program, card, place, how) | {"GR_TEST_LONGER": str(longer)},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
                status = process.wait(program.seconds * longer)
            except subprocess.TimeoutExpired:
                status = None
            except OSError as error:
                err.write(str(error).encode())
                process, status = None, 127
        if process:
            # Children that outlived the program would disturb the next run.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        folders = [place, program.folder]
        lines, text = [], ""
        for name in [log, log + ".err"]:
            with open(name, errors="replace") as file:
                part = file.read()
            text += part
            lines += outcome.filtered(part, folders)
        result = Outcome(status, lines, text=text)
        if program.project:
            outcome.read_tests(result)
        else:
            after = outcome.digests(work)
            result.files = {name: digest for name, digest in after.items() if before.get(name) != digest}
        served = self.served(place)
        shutil.rmtree(place, ignore_errors=True)
        return result, served

    def served(self, place):
        """(allocations from the cache, from the driver, processes) of a run under the shim, or None."""
        totals = [0, 0, 0]
        for name in glob.glob(os.path.join(place, "stats.*")):
            try:
                with open(name) as file:
                    stats = json.load(file)
                totals = [totals[0] + stats["hits"], totals[1] + stats["fresh_allocs"], totals[2] + 1]
            except (OSError, ValueError, KeyError):
                pass
        return tuple(totals) if totals[2] else None

    def compare(self, program, card):
        native, _ = self.run(program, card, "native")
        if native.status == 77:
            reason = native.text.strip().splitlines()[-1:] or ["no reason given"]
            return Row(program, "skipped", "-", "", "skipped", reason[0].removeprefix("skipped:").strip())
        if native.status == 127:
            reason = native.text.strip().splitlines()[-1:] or ["not found"]
            return Row(program, "-", "-", "", "skipped", f"cannot be started: {reason[0]}")
        shim, served = self.run(program, card, "shim")
        row = Row(program, native.counts(), shim.counts())
        if native.status:
            # That both fail shows little; say how, so that it is not overlooked.
            row.note = "fails natively: " + (native.text.strip().splitlines() or ["without a word"])[-1].strip()[:120]
        if served:
            row.served = f"{served[0]} of {served[0] + served[1]}"
        late = [how for how, run in (("natively", native), ("under the shim", shim)) if run.stopped]
        open_ends = self.catch_up(program, card, native, shim) if program.project else []
        row.native, row.shim = native.counts(), shim.counts()
        compared = ""
        if program.project:
            compared = f", {len(native.tests.keys() & shim.tests.keys())} tests compared"
            passed = len(native.tests.keys() ^ shim.tests.keys()) - len(open_ends)
            compared += f", {passed} that passed in one run not" if passed else ""
        if late:
            row.note = f"out of time {' and '.join(late)}{compared}"
        unordered = "unordered" in program.options
        if native.status is not None or shim.status is not None:
            found = outcome.differences(native, shim, unordered)
        else:
            row.verdict = "no verdict"
            row.note = f"timed out both ways, after {program.seconds} s{compared}"
            # What both had come to by then can still differ.
            found = outcome.differences(native, shim) if program.project else []
        if open_ends:
            row.verdict = "no verdict"
            row.note = f"{row.note}; failed in one run, and the other did not come to it: {', '.join(open_ends[:3])}"
        return self.look_again(program, card, row, native, shim, unordered) if found else row

    def catch_up(self, program, card, native, shim):
        """Has runs that ended early come to the tests that failed in the other; those that stay open in the end."""
        for how, behind, ahead in (("native", native, shim), ("shim", shim, native)):
            missing = outcome.open_ends(behind, ahead)
            if missing and not behind.whole():
                self.say(f"{program.name}: {missing[0]} ended badly, and {how} did not come to it; again, longer")
                more, _ = self.run(program, card, how, "-longer", LONGER)
                behind.tests |= {name: more.tests[name] for name in missing if name in more.tests}
        return outcome.open_ends(native, shim) + outcome.open_ends(shim, native)

    def look_again(self, program, card, row, native, shim, unordered):
        """A difference counts when native runs do not differ in the same way."""
        self.say(f"{program.name}: a difference; {REPEATS - 1} more native runs to compare with")
        natives = [native] + [self.run(program, card, "native", turn)[0] for turn in range(1, REPEATS)]
        if any(other.status != native.status for other in natives):
            row.verdict = "no verdict"
            row.note = "natively " + ", ".join(other.word() for other in natives)
            return row
        vary = outcome.varying(natives)
        row.found = tuple(
            outcome.differences(
                outcome.without(native, vary),
                outcome.without(shim, vary),
                unordered or vary.order or bool(vary.templates),
            )
        )
        if row.found:
            row.verdict = "differs"
            if self.warm and self.leans_on_zeros(program, card, row, natives, vary, unordered):
                row.verdict = "unset memory"
                row.note = "differs alike without a cache where the driver's memory is not zero"
            return row
        reasons = []
        if vary.tests:
            reasons.append(f"{len(vary.tests)} test{'s' * (len(vary.tests) > 1)}: " + ", ".join(sorted(vary.tests)[:3]))
        if vary.templates:
            reasons.append(f"{len(vary.templates)} kind{'s' * (len(vary.templates) > 1)} of line")
        if vary.files:
            reasons.append(", ".join(sorted(vary.files)[:3]))
        if vary.order:
            reasons.append("order of lines")
        row.note = "; ".join(filter(None, [row.note, "varies natively too, not compared: " + ", ".join(reasons)]))
        return row

    def leans_on_zeros(self, program, card, row, natives, vary, unordered):
        """Whether fresh memory that is not zero makes the same difference without a cache."""
        self.say(f"{program.name}: a control, with fresh memory that is not zero")
        control, _ = self.run(program, card, "control")
        found = outcome.differences(
            outcome.without(natives[0], vary),
            outcome.without(control, vary),
            unordered or vary.order or bool(vary.templates),
        )
        tests = natives[0].tests is not None
        return outcome.kinds(row.found, tests) <= outcome.kinds(found, tests)

    def work(self, program, finished):
        card = None
        if self.cards and not program.sees_all():
            card = self.cards.take("alone" in program.options)
        try:
            row = self.compare(program, card)
        except Exception as error:  # one broken entry must not hide the others
            row = Row(program, "-", "-", "", "no verdict", f"could not be run: {error!r}")
        finally:
            if card is not None:
                self.cards.give(card)
        self.say(f"{program.name}: {row.verdict} ({row.native}, {row.shim})")
        finished.add(row, self.card, time.monotonic() - self.begin)
        return row


class Finished:
    """The rows of a table, kept in the folder of the logs as they come: a run that is cut short can be gone on with."""

    FIELDS = ("native", "shim", "served", "verdict", "note", "found")

    def __init__(self, arguments, programs):
        self.path = os.path.join(arguments.logs, "rows.jsonl")
        self.lock = threading.Lock()
        self.took = 0.0
        self.rows = {}
        self.head = {"library": self.digest(arguments.shim), "settings": arguments.set, "warm": arguments.warm}
        self.cards = []
        if arguments.resume:
            self.read({program.name: program for program in programs})
        else:
            open(self.path, "w").close()
        if arguments.card not in self.cards:
            self.cards.append(arguments.card)

    @staticmethod
    def digest(path):
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()

    def read(self, programs):
        try:
            with open(self.path) as file:
                lines = [json.loads(line) for line in file]
        except FileNotFoundError:
            return
        for line in lines:
            if {name: line[name] for name in self.head} != self.head:
                raise SystemExit(f"side_by_side: {self.path} is of another library or other settings")
            self.took = max(self.took, line["took"])
            if line["card"] not in self.cards:
                self.cards.append(line["card"])
            program = programs.get(line["name"])
            if program:
                self.rows[program.name] = Row(program, **{name: line[name] for name in self.FIELDS})

    def add(self, row, card, took):
        line = {name: getattr(row, name) for name in self.FIELDS}
        line |= self.head | {"name": row.program.name, "card": card, "took": self.took + took}
        with self.lock, open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
            self.rows[row.program.name] = row


def cell(text):
    return text.replace("|", "\\|").replace("\n", " ")


def table(rows, arguments, finished, took):
    ran = [row for row in rows if row.verdict in ("same", "differs", "unset memory")]
    asked = [row for row in rows if row.served and not row.served.endswith(" of 0")]
    served = [row for row in asked if not row.served.startswith("0 ")]
    same = [row for row in ran if row.verdict == "same"]
    well = [row for row in same if row.succeeds()]
    lines = [
        "# Programs not written here, natively and under the shim",
        "",
        "Written by `scripts/transparency`; not to be edited. Each program ran natively and with `libgpureclaim.so`",
        "preloaded on the same card. *Same* means: equal exit status, equal output, equal files left behind.",
        f"Not compared: {', '.join(outcome.rules())}.",
        "Where native runs differ among themselves, the note says in what, and the shim's run differs in nothing else.",
        "Of a project's own tests, file by file, each test must end alike: passed, failed (with the same exception), "
        "skipped.",
        "",
    ]
    if any(finished.cards):
        lines += [f"Card: {', then '.join(filter(None, finished.cards))}.", ""]
    if arguments.set:
        lines += ["Settings of the shim: " + ", ".join(f"`{item}`" for item in arguments.set) + ".", ""]
    if arguments.warm:
        lines += [
            "Each run of the shim began with a pool full of used blocks (`tests/transparency/warm.c`), none of whose "
            "bytes is zero",
            "unless the program made it so. *Unset memory*: the program reads what it has not written, for it differs "
            "in",
            "the same way, without a cache, where only the driver's fresh memory is not zero.",
            "",
        ]
    verdicts = [row.verdict for row in rows]
    lines += [
        f"**{len(same)} of {len(ran)} the same** ({len(well)} of them succeed, the others end otherwise natively too), "
        f"{verdicts.count('differs')} differ, {verdicts.count('no verdict')} without verdict, "
        f"{verdicts.count('skipped')} skipped, {verdicts.count('unset memory')} read unset memory. {took:.0f} s.",
        f"Of {len(asked)} that asked the shim's pool for memory {len(served)} had some of it from the cache.",
        "",
    ]
    title = None
    for row in rows:
        if row.section(arguments.scripts_folder) != title:
            title = row.section(arguments.scripts_folder)
            lines += [
                "" if lines[-1] else None,
                f"## {title}",
                "",
                "| program | native | shim | same? | from the cache | note |",
                "| --- | --- | --- | --- | --- | --- |",
            ]
        verdict = {"same": "yes", "differs": "NO"}.get(row.verdict, row.verdict)
        cells = [row.program.name, row.native, row.shim, verdict, row.served, row.note]
        lines.append("| " + " | ".join(cell(text) for text in cells) + " |")
    lines += [
        "",
        "*From the cache*: allocations that the shim served without the driver, of all that its pool was asked for;",
        "empty where no process of the program came to its end with the shim's figures.",
    ]
    return "\n".join(line for line in lines if line is not None) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shim", required=True)
    parser.add_argument("--libraries", default="")
    parser.add_argument("--logs", required=True)
    parser.add_argument("--notes", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--card", default="")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--only", default="*")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--scripts-folder", default="")
    parser.add_argument("--tests", nargs=2, action="append", default=[], metavar=("LIST", "PROJECT"))
    parser.add_argument("lists", nargs="*")
    arguments = parser.parse_args()

    notes = read_notes(arguments.notes)
    programs = [program for path in arguments.lists for program in read_list(path)]
    programs += [program for path, project in arguments.tests for program in read_list(path, project)]
    programs = [
        program
        for program in programs
        if fnmatch.fnmatchcase(program.name, arguments.only) and (not arguments.quick or "quick" in program.options)
    ]
    if not programs:
        raise SystemExit("side_by_side: nothing to run")
    names = [program.name for program in programs]
    if len(set(names)) != len(names):
        raise SystemExit("side_by_side: a name stands twice in the lists")

    runner = Runner(arguments)
    finished = Finished(arguments, programs)
    rows = dict(finished.rows)
    try:
        for program in programs:
            if program.gpus() > arguments.gpus and program.name not in rows:
                rows[program.name] = Row(program, "-", "-", "", "skipped", f"needs {program.gpus()} cards")
        left = [program for program in programs if program.name not in rows]
        alone = [program for program in left if "alone" in program.options]
        every = [program for program in alone if program.sees_all()]
        # The longest first, so that the last ones to end are short; then those that want a card to themselves, and last
        # those that want all.
        for programs_now, threads in [
            ([program for program in left if program not in alone], arguments.jobs * arguments.gpus),
            ([program for program in alone if program not in every], arguments.gpus),
            (every, 1),
        ]:
            with ThreadPoolExecutor(threads) as pool:
                for row in pool.map(
                    lambda program: runner.work(program, finished),
                    sorted(programs_now, key=lambda program: -program.seconds),
                ):
                    rows[row.program.name] = row
    finally:
        shutil.rmtree(runner.scratch, ignore_errors=True)

    unexplained = []
    for row in rows.values():
        if row.verdict != "differs":
            continue
        text = explained(notes, row.program.name, row.found)
        if text is None:
            unexplained.append(row)
            row.note = "**unexplained**: " + "; ".join(f"`{line[:80]}`" for line in row.found[:3])
        else:
            row.note = text
    ordered = [rows[name] for name in names]
    text = table(ordered, arguments, finished, finished.took + time.monotonic() - runner.begin)
    with open(arguments.out, "w") as file:
        file.write(text)
    for row in unexplained:
        print(f"\n{row.program.name}: {row.native} natively, {row.shim} under the shim")
        print("\n".join("    " + line[:200] for line in row.found[:20]))
    for row in ordered:
        if row.verdict == "unset memory":
            print(f"{row.program.name}: {row.note}; " + "; ".join(line[:80] for line in row.found[:3]))
        if row.verdict == "same" and not row.succeeds():
            print(f"{row.program.name}: {row.note} ({row.native})")
    verdicts = [row.verdict for row in ordered]
    print(
        f"{verdicts.count('same')} the same, {verdicts.count('differs')} differ ({len(unexplained)} unexplained), "
        f"{verdicts.count('no verdict')} without verdict, {verdicts.count('skipped')} skipped, "
        f"{verdicts.count('unset memory')} read unset memory; "
        f"table in {arguments.out}"
    )
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
