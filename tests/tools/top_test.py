#!/usr/bin/env python3
"""gpureclaim top, in a terminal of this program's own.

Usage: top_test.py GPURECLAIM_TOP SIM_FOLDER SHIM FAKE_NVML
"""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

from scene import Scene, until

command, sim, shim, fake_nvml = sys.argv[1:]
SEQUENCE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z@])|\x1b[()][A-Z0-9]|\x1b[A-Za-z=>78]")
TOKEN = re.compile(SEQUENCE.pattern + r"|[^\x1b]")


class Screen:
    """As much of a VT100 as ncurses uses."""

    def __init__(self, lines, columns):
        self.resize(lines, columns)
        self._rest = ""

    def resize(self, lines, columns):
        self.cells = [[" "] * columns for _ in range(lines)]
        self.y = self.x = 0
        self.region = 0, lines - 1

    def _scroll(self, begin, end):
        """The line at begin goes, and a blank one comes at end."""
        del self.cells[begin]
        self.cells.insert(end, [" "] * len(self.cells[0]))

    def _control(self, arguments, letter):
        numbers = [int(n) for n in arguments.split(";") if n.isdigit()]
        first = numbers[0] if numbers else 0
        if letter in "Hf":
            self.y, self.x = (first or 1) - 1, (numbers[1] if len(numbers) > 1 else 1) - 1
        elif letter == "r":
            self.region = (first or 1) - 1, (numbers[1] if len(numbers) > 1 else len(self.cells)) - 1
            self.y = self.x = 0
        elif letter in "ABCD":
            self.y += {"A": -1, "B": 1}.get(letter, 0) * (first or 1)
            self.x += {"C": 1, "D": -1}.get(letter, 0) * (first or 1)
        elif letter == "K":
            begin, end = {0: (self.x, None), 1: (0, self.x + 1), 2: (0, None)}[first]
            row = self.cells[self.y]
            row[begin:end] = [" "] * len(row[begin:end])
        elif letter == "J" and first == 2:
            self.cells = [[" "] * len(row) for row in self.cells]
        elif letter == "J":
            self._control("", "K")
            for row in self.cells[self.y + 1 :]:
                row[:] = [" "] * len(row)
        self.y = min(max(self.y, 0), len(self.cells) - 1)
        self.x = min(max(self.x, 0), len(self.cells[0]) - 1)

    def feed(self, text):
        text = self._rest + text
        # A sequence that is not whole yet waits for its rest.
        cut = text.rfind("\x1b")
        if cut >= 0 and not SEQUENCE.match(text, cut):
            text, self._rest = text[:cut], text[cut:]
        else:
            self._rest = ""
        for token in TOKEN.finditer(text):
            word = token.group(0)
            if token.group(2):
                self._control(token.group(1), token.group(2))
            elif word == "\r":
                self.x = 0
            elif word == "\n" and self.y == self.region[1]:
                self._scroll(*self.region)
            elif word == "\x1bM" and self.y == self.region[0]:
                self._scroll(*reversed(self.region))
            elif word in ("\n", "\x1bM"):
                self.y = min(max(self.y + (1 if word == "\n" else -1), 0), len(self.cells) - 1)
            elif word == "\t":
                self.x = min((self.x // 8 + 1) * 8, len(self.cells[0]) - 1)
            elif word == "\b":
                self.x = max(self.x - 1, 0)
            elif word >= " ":
                if self.x < len(self.cells[0]):
                    self.cells[self.y][self.x] = word
                self.x += 1

    def text(self):
        return "\n".join("".join(row).rstrip() for row in self.cells)


class Terminal:
    def __init__(self, environment, lines=24, columns=110, kind="vt100", flags=()):
        self._master, slave = pty.openpty()
        self.screen = Screen(lines, columns)
        self.coloured = False
        self._size(lines, columns)
        self._process = subprocess.Popen(
            [command, "top", *flags],
            env={**environment, "TERM": kind},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)

    def _size(self, lines, columns):
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, lines, columns):
        self.read()
        self.screen.resize(lines, columns)
        self._size(lines, columns)
        self._process.send_signal(signal.SIGWINCH)

    def read(self):
        while select.select([self._master], [], [], 0)[0]:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # it has ended
                return
            self.coloured |= re.search(rb"\x1b\[[0-9;]*3[46]m", data) is not None
            self.screen.feed(data.decode("ascii", "replace"))

    def type(self, keys):
        os.write(self._master, keys.encode())

    def shows(self, *patterns):
        """Whether the screen comes to show all of them, in this order."""
        wanted = re.compile(".*".join(patterns), re.DOTALL)

        def look():
            self.read()
            return wanted.search(self.screen.text()) is not None

        return until(look)

    def ended(self):
        until(lambda: self.read() or self._process.poll() is not None)
        return self._process.poll()

    def interrupt(self):
        self._process.send_signal(signal.SIGINT)

    def hang_up(self):
        """As when its window is closed; no signal tells it, as it has no controlling terminal."""
        os.close(self._master)
        until(lambda: self._process.poll() is not None)
        return self._process.poll()

    def kill(self):
        self._process.kill()


def watch(scene):
    cached, live = scene.start(GPURECLAIM_DECAY="0"), scene.start(GPURECLAIM_SLEEP="demand")
    for mib in (100, 50):
        cached.ask("alloc", 0, mib)
    cached.ask("free")
    cached.ask("alloc", 0, 50)
    live.ask("alloc", 0, 300)
    first, second = rf"\b{live.pid} ", rf"\b{cached.pid} "
    terminal = Terminal(scene.environment)

    def check(good, what):
        scene.check(good, what)
        if not good:
            print(terminal.screen.text(), flush=True)

    check(terminal.shows("A: GPU ", "450.000 MiB of 1.000 GiB", "PID +GPU +NAME", "sort .reserved."),
          "GPUs, a head and the keys")
    terminal.type("?")
    check(terminal.shows("bars: # live"), "help")
    # 450 MiB of 1 GiB are the fourth of eight levels.
    check(terminal.shows(r"\n +use over time -{3,}\n"), "what was used before")
    terminal.type(f"/{live.pid}\n")
    check(terminal.shows(first, rf"/ filter .{live.pid}.") and not re.search(second, terminal.screen.text()),
          "only those that match")
    terminal.type("/x\x1b/no such\n")
    check(terminal.shows("No process matches", "/ filter .no such."), "none that matches")
    terminal.type("/\x1bs")
    check(terminal.shows("No process matches", r"sort .cached.  / filter .no such."), "ESC leaves the filter")
    terminal.type("sss/\n")
    check(terminal.shows(first + ".*300.000 MiB", second + ".*50.000 MiB +100.000 MiB"), "most reserved first")
    terminal.type("s")
    check(terminal.shows(second, first, "sort .cached."), "most cached first")
    # The first process is selected, and stays so where another comes first.
    terminal.type("t")
    check(terminal.shows(f"Trim the cache of {live.pid}"), "the selected process, not its line")
    terminal.type("n\x1bOAt")
    check(terminal.shows(f"Trim the cache of {cached.pid}"), "it asks before it trims")
    terminal.type("n")
    check(terminal.shows("nothing changed"), "no is no")
    check(terminal.shows(second + ".*50.000 MiB +100.000 MiB"), "nothing was trimmed")
    terminal.type("ty")
    check(terminal.shows(f"{cached.pid}: done, 100.000 MiB came back"), "yes is yes")
    terminal.type("l")
    check(terminal.shows(f"Hard limit of {cached.pid}"), "it asks for a limit")
    terminal.type("plenty\n")
    check(terminal.shows("plenty: not a size"), "what is no size")
    terminal.type("l8\n")
    check(terminal.shows("8: not a size"), "a limit that nobody can mean")
    terminal.type("l1GiB\x1b")
    check(terminal.shows("nothing changed"), "ESC leaves the question")
    terminal.type("l25%\n")
    check(terminal.shows(f"Set the hard limit of {cached.pid} to 256.000 MiB"), "a part of the GPU")
    terminal.type("nl5x\x7f12MiB\n")
    check(terminal.shows(f"Set the hard limit of {cached.pid} to 512.000 MiB"), "it asks again before it sets one")
    terminal.type("n")
    check(terminal.shows("nothing changed") and cached.ask("total", 0) == 1024, "the limit stays")
    terminal.type("l512MiB\ny")
    check(terminal.shows(f"{cached.pid}: done") and cached.ask("total", 0) == 512, "the limit is set")
    check(terminal.shows(second + ".*512.000 MiB"), "and shown")
    # Down, and past the end: the last one stays selected.
    terminal.type("sss\x1bOB\x1bOB\x1bOBt")
    check(terminal.shows("sort .reserved.") and terminal.shows(f"Trim the cache of {cached.pid}"),
          "selecting with keys")
    terminal.type("n")
    terminal.resize(12, 70)
    check(terminal.shows("PID", first, second, "q quit"), "a smaller terminal")
    terminal.resize(12, 60)
    rows = first + r" *A +python3 +300.000 MiB +0 B\s*\n" + second.replace(r"\b", " *") + r"[^\n]*\n *\n *\n"
    check(terminal.shows(rows), "a narrow one: a line for each process, cut off")
    # Room for one process only: it is the one that is selected.
    terminal.resize(6, 110)
    check(terminal.shows("PID", second, "q quit"), "the selected process is on the screen")
    terminal.resize(3, 20)
    time.sleep(0.3)
    terminal.resize(24, 110)
    check(terminal.shows("GPU ", "PID", first, second, "q quit"), "a large one after a tiny one")
    check(scene.run("sleep", str(live.pid))[0] == 0 and terminal.shows(first + r".*300.000 MiB.* asleep\b"),
          "one that sleeps")
    live.kill()
    check(until(lambda: terminal.read() or not re.search(first, terminal.screen.text())), "a killed one goes")
    cached.end()
    check(terminal.shows("No process of yours"), "nobody is left")
    terminal.type("t")
    terminal.type("q")
    scene.check(terminal.ended() == 0, "q ends it")
    terminal.kill()
    terminal = Terminal(scene.environment)
    check(terminal.shows("No process of yours"), "another one")
    scene.check(terminal.hang_up() == 0, "it ends with its terminal")
    terminal.kill()
    terminal = Terminal(scene.environment)
    check(terminal.shows("No process of yours"), "a third one")
    terminal.interrupt()
    scene.check(terminal.ended() == 0, "Ctrl-C ends it as q does")
    terminal.kill()
    terminal = Terminal(scene.environment, kind="dumb")
    scene.check(terminal.ended() == 1, "a terminal that cannot show it")
    terminal.kill()


def crowded(scene):
    """More GPUs, or groups of one, than the screen has lines: the selected process and its group are still there."""
    processes = [scene.start(GPURECLAIM_GROUP=f"group{i}") for i in range(8)]
    for i, process in enumerate(processes):
        process.ask("alloc", 0, 10 * (8 - i))
    terminal = Terminal(scene.environment, lines=10)
    for i in 0, 7:
        shown = terminal.shows(f"group group{i}:", r"\n5 more\b", "PID", rf"\b{processes[i].pid} ", "q quit")
        scene.check(shown, f"process {i} of many groups:\n" + terminal.screen.text())
        terminal.type("\x1bOB" * 7)
    terminal.kill()
    for process in processes:
        process.end()


def named(scene):
    """Where the management library is there, a GPU has its number in nvidia-smi and its model."""
    process = scene.start()
    process.ask("alloc", 0, 100)
    (region,) = os.listdir(scene.environment["GPURECLAIM_REGION_DIR"])
    uuid = region.removeprefix("default-").partition(".")[0]
    os.symlink(os.path.abspath(fake_nvml), os.path.join(scene.folder, "libnvidia-ml.so.1"))
    listing = os.path.join(scene.folder, "nvml")
    with open(listing, "w", encoding="ascii") as file:
        file.write(f"GPU-{'0' * 36} 1024 0\nGPU-{uuid} 2048 400\n")
    terminal = Terminal({**scene.environment, "FAKE_NVML": listing, "LD_LIBRARY_PATH": scene.folder})
    shown = terminal.shows(f"1: Model 1 {uuid[:8]}, group default: 400.000 MiB of 2.000 GiB", "PID GPU",
                           rf"\b{process.pid} +1 ")
    scene.check(shown, "number and model of a GPU:\n" + terminal.screen.text())
    terminal.type("q")
    scene.check(terminal.ended() == 0, "the end")
    process.end()


def stop(scene, pid):
    """Stops the process, and waits until all its threads have stopped."""
    def has_stopped(thread):
        with open(f"/proc/{pid}/task/{thread}/stat") as file:
            return file.read().rsplit(") ", 1)[1].startswith("T")

    os.kill(pid, signal.SIGSTOP)
    scene.check(until(lambda: all(map(has_stopped, os.listdir(f"/proc/{pid}/task")))), "it stops")


def once(scene):
    """What it shows, as text, with the command of each; how often it looks; and colours where there are some."""
    for _ in range(10):  # a process may have told the GPU's memory before it has stopped
        process = scene.start()
        process.ask("alloc", 0, 100)
        stop(scene, process.pid)
        status, said, _ = scene.run("top", "--once")
        if ": memory unknown\n" in said:
            break
        process.kill()
    scene.check(status == 0 and ": memory unknown\n" in said, f"once, nobody knows the GPU's memory: {said}")
    os.kill(process.pid, signal.SIGCONT)
    status, said, _ = scene.run("top", "--once")
    scene.check(status == 0 and re.search(rf"100.000 MiB of 1.000 GiB.*\n *PID .*\n *{process.pid} .* python3? .*\.py",
                                          said), f"once: {said}")
    for wrong in ("5", "1ms", "2h"):
        status, _, said = scene.run("top", "--interval", wrong)
        scene.check(status == 2 and f"--interval {wrong}: not understood" in said, f"interval: {said}")
    for kind, plain, coloured in ("xterm-256color", "", True), ("xterm-256color", "1", False), ("vt100", "", False):
        terminal = Terminal({**scene.environment, "NO_COLOR": plain}, kind=kind, flags=("--interval", "100ms"))
        scene.check(terminal.shows("use over time [^ ]{5}", rf"\b{process.pid} "), "it looks often")
        scene.check(terminal.coloured == coloured, f"{kind}, NO_COLOR={plain}: colours {terminal.coloured}")
        terminal.kill()
    process.end()
    status, said, _ = scene.run("top", "--once")
    scene.check(status == 0 and "No process of yours" in said, f"once, of nobody: {said}")


def unanswered(scene):
    """What it says of an order that is not answered, and where it cannot read the shared memory."""
    process = scene.start(GPURECLAIM_DECAY="0", GRSIM_LATENCY="cuMemUnmap=60000ms")
    process.ask("alloc", 0, 100)
    process.ask("free")
    terminal = Terminal(scene.environment)
    scene.check(terminal.shows(rf"\b{process.pid} .*100.000 MiB"), "a process with a cache")
    stop(scene, process.pid)
    terminal.type("ty")
    scene.check(terminal.shows(rf"\n{process.pid}: it does not answer .stopped or hung.: nothing is changed"),
                f"an order to one that is stopped:\n{terminal.screen.text()}")
    os.kill(process.pid, signal.SIGCONT)
    terminal.type("ty")
    scene.check(terminal.shows(rf"\n{process.pid}: it has begun to obey, but does not answer"),
                f"an order that takes long:\n{terminal.screen.text()}")
    terminal.kill()
    process.kill()
    file = os.path.join(scene.folder, "file")
    open(file, "wb").close()
    terminal = Terminal({**scene.environment, "GPURECLAIM_REGION_DIR": file})
    scene.check(terminal.ended() == 1 and terminal.shows(f"top: the shared memory in {file} cannot be read: Not a dir"),
                f"no folder:\n{terminal.screen.text()}")
    terminal.kill()


def no_terminal(scene):
    done = subprocess.run([command, "top"], env=scene.environment, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True)
    scene.check(done.returncode == 2 and "needs a terminal" in done.stderr, f"without a terminal: {done}")


with Scene(command, sim, shim) as scene:
    watch(scene)
    once(scene)
    unanswered(scene)
    no_terminal(scene)
    crowded(scene)
    named(scene)
raise SystemExit(1 if scene.failed else 0)
