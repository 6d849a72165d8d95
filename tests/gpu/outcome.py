"""What a run of a program came to, and whether two runs came to the same.

A run's outcome is its exit status, the lines it printed and the files it left behind. Lines are compared after the
rules below have taken out what changes from run to run of any program. What changes from run to run of one program
only is found by running it natively again: a line whose numbers differ between native runs is compared without them.
"""

import hashlib
import os
import re
from collections import Counter
from dataclasses import dataclass, field

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


def template(line):
    return re.sub(NUMBER, "#", line)


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


def varying(natives):
    found = Varying()
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
    lines = [line for line in outcome.lines if template(line) not in vary.templates]
    lines += sorted({template(line) for line in outcome.lines} & vary.always)
    files = {name: digest for name, digest in outcome.files.items() if name not in vary.files}
    return Outcome(outcome.status, lines, files, outcome.text)
