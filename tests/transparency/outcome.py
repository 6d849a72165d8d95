"""What a run of a program came to, and whether two runs came to the same.

A run's outcome is its exit status, the lines it printed and the files it left behind. Lines are compared after the
rules below have taken out what changes from run to run of any program. What changes from run to run of one program
only is found by running it natively again: a line whose numbers differ between native runs is compared without them.

A program that runs a project's tests says how each ended (transparency/project_tests.py); then these are compared, one
by one, and nothing else of what it printed.
"""

import hashlib
import os
import re
from collections import Counter
from dataclasses import dataclass, field, replace

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"

SIZE = r"(?:[KMGT]i?B|bytes|[KMGT]bytes)"
TIME = r"ns|nsec|us|usec|µs|ms|msecs?|milliseconds?|microseconds?|s|secs?|seconds?"
RATE = r"[KMGT]?i?B/s(?:ec)?|[KMGT]?bytes/s(?:ec)?|[KMGT]?flops?(?:/s(?:ec)?)?|[KMGT]?ops(?:/s)?|[KMGT]\w*/s(?:ec)?|fps"

# (what is taken out, pattern, what stands for it); the table lists the first column.
RULES = [
    ("times", rf"(?<![\w.]){NUMBER} ?\(?(?:{TIME})\b\)?", "<time>"),
    ("times", rf"(?i)\b((?:time|latency)(?: \([^)]*\))?(?: spent[ \w]*)?\s*[:=]\s*){NUMBER}", r"\1<time>"),
    ("rates", rf"(?i)(?<![\w.]){NUMBER}\s*(?:{RATE})(?!\w)", "<rate>"),
    (
        "rates",
        rf"(?i)\b((?:throughput|bandwidth|performance|speed-?up|elements?/s|options per second)[^\d\n]{{0,30}}[:=]\s*)"
        rf"{NUMBER}",
        r"\1<rate>",
    ),
    ("addresses", r"\b0x[0-9a-fA-F]{6,16}\b", "<address>"),
    (
        "free memory",
        rf"(?i)((?<!\w)free(?: (?:device|gpu|global))?(?: memory| mem)?[^\d\n]{{0,20}}){NUMBER}(?= ?{SIZE})",
        r"\1<free>",
    ),
    ("process ids", r"(?i)\b(pid|process id|process-id)([ =:]*)\d+", r"\1\2<pid>"),
    ("dates", r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?\b", "<date>"),
]
COMPILED = [(re.compile(pattern), put) for _, pattern, put in RULES]


def rules():
    """What is not compared, in the order of the list and each once."""
    return list(dict.fromkeys(name for name, _, _ in RULES))


def filtered(text, folders=()):
    """The lines of text that are compared. folders are the places a run had for itself."""
    for folder in folders:
        text = text.replace(folder, "<folder>")
    lines = []
    # A progress display overwrites its line; only what stays on the screen counts.
    for line in text.splitlines():
        line = line.rsplit("\r", 1)[-1].rstrip()
        for pattern, put in COMPILED:
            line = pattern.sub(put, line)
        if line:
            lines.append(line)
    return lines


@dataclass
class Outcome:
    """status is None for a run that was stopped at its time limit."""

    status: int | None
    lines: list = field(default_factory=list)
    files: dict = field(default_factory=dict)
    text: str = ""
    # How each test ended, by its name; None for a program that runs none.
    tests: dict | None = None
    # Where a run of tests was when it ended before its time, and whether it stopped by itself.
    at: str = ""
    stopped: bool = False

    def whole(self):
        """Whether all tests were run."""
        return self.status == 0 and not self.stopped

    def counts(self):
        """Such as "ok: 10 passed, 2 failed"; the plain word for a program that runs no tests."""
        if not self.tests:
            return self.word()
        counts = Counter(word.split(",")[0] for word in self.tests.values())
        return f"{self.word()}: " + ", ".join(f"{count} {word}" for word, count in counts.most_common())

    def word(self):
        if self.status is None:
            return "timed out"
        if self.status < 0:
            return f"signal {-self.status}"
        if self.status == 0:
            return "ok"
        if self.status == 77:
            return "skipped"
        waived = self.status == 2 and re.search(r"(?i)waiv|not support|requires|skipp", self.text)
        return f"exit {self.status}" + (", waived" if waived else "")


def digests(folder):
    """A digest of every file under folder, by its path there."""
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    found[os.path.relpath(path, folder)] = hashlib.sha256(file.read()).hexdigest()
    return found


def read_tests(outcome):
    """Fills in what the "@test" lines say."""
    outcome.tests = {}
    for line in outcome.text.splitlines():
        match = re.match(r"@test (\S+) (.+)", line)
        if not match:
            continue
        if match[1] == "began":
            outcome.at = match[2]
        elif match[1] == "stopped":
            outcome.stopped = True
        else:
            outcome.tests[match[2]] = match[1]
            outcome.at = ""


def changed_tests(native, shim):
    """The names of tests that two runs saw end differently, in order."""
    both_whole = native.whole() and shim.whole()
    changed = []
    for name in sorted(native.tests.keys() | shim.tests.keys()):
        words = {run.tests.get(name) for run in (native, shim)}
        # A run that ended early says nothing about the tests that it did not reach.
        if len(words) > 1 and (None not in words or both_whole):
            changed.append(name)
    return changed


def open_ends(behind, ahead):
    """Tests that ended badly in one of two runs, and that the other did not come to."""
    good = {"passed", "skipped", "xfailed"}
    return [name for name, word in ahead.tests.items() if name not in behind.tests and word not in good]


def test_differences(native, shim):
    """As differences(): of two runs of the same tests."""
    found = []
    if native.status != shim.status:
        for sign, run in (("-", native), ("+", shim)):
            found.append(f"{sign} {run.word()}" + (f" during {run.at}" if run.at else ""))
    for name in changed_tests(native, shim):
        found += [f"{sign} {run.tests.get(name, 'not run')} {name}" for sign, run in (("-", native), ("+", shim))]
    return found


def template(line):
    return re.sub(NUMBER, "#", line)


def kinds(found, tests):
    """Differences without their numbers, to be held against those of another run; of tests each by its name."""
    return set(found) if tests else {re.sub(rf"(?i){NUMBER}|\b(?:nan|inf)\b", "#", line) for line in found}


def _subtract(a, b):
    """Entries of a that b lacks, in a's order."""
    left = Counter(b)
    result = []
    for entry in a:
        if left[entry]:
            left[entry] -= 1
        else:
            result.append(entry)
    return result


def differences(native, shim, unordered=False):
    """'-' and '+' lines for what only one of two outcomes has; nothing when they are equal."""
    if native.tests is not None and shim.tests is not None:
        return test_differences(native, shim)
    found = []
    if native.status != shim.status:
        found += [f"- {native.word()}", f"+ {shim.word()}"]
    if native.lines != shim.lines:
        only_native, only_shim = _subtract(native.lines, shim.lines), _subtract(shim.lines, native.lines)
        found += [f"- {line}" for line in only_native] + [f"+ {line}" for line in only_shim]
        if not only_native and not only_shim and not unordered:
            found.append("+ the same lines in another order")
    for name in sorted(native.files.keys() | shim.files.keys()):
        if native.files.get(name) != shim.files.get(name):
            both = name in native.files and name in shim.files
            found.append(f"+ file {name} {'has other contents' if both else 'is there in one run only'}")
    return found


@dataclass
class Varying:
    """What differs among native runs of one program."""

    templates: set = field(default_factory=set)
    # Of the templates, those that every native run has.
    always: set = field(default_factory=set)
    files: set = field(default_factory=set)
    order: bool = False
    tests: set = field(default_factory=set)


def varying(natives):
    found = Varying()
    if natives[0].tests is not None:
        for other in natives[1:]:
            found.tests |= set(changed_tests(natives[0], other))
        return found
    everywhere = set.intersection(*({template(line) for line in run.lines} for run in natives))
    for other in natives[1:]:
        only_a, only_b = _subtract(natives[0].lines, other.lines), _subtract(other.lines, natives[0].lines)
        found.templates |= {template(line) for line in only_a + only_b}
        found.order = found.order or (natives[0].lines != other.lines and not only_a and not only_b)
        found.files |= {
            name
            for name in natives[0].files.keys() | other.files.keys()
            if natives[0].files.get(name) != other.files.get(name)
        }
    found.always = found.templates & everywhere
    return found


def without(outcome, vary):
    """The outcome without what varies: of a varying line that every native run has, its template stays, once."""
    if outcome.tests is not None:
        return replace(outcome, tests={name: word for name, word in outcome.tests.items() if name not in vary.tests})
    lines = [line for line in outcome.lines if template(line) not in vary.templates]
    lines += sorted({template(line) for line in outcome.lines} & vary.always)
    files = {name: digest for name, digest in outcome.files.items() if name not in vary.files}
    return Outcome(outcome.status, lines, files, outcome.text)
