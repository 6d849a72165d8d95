#!/usr/bin/env python3
"""Runs a test file of another project with pytest and says of each test how it ended, for side_by_side.py.

project_tests.py SECONDS PATH [PYTEST_ARGUMENT...]

No test begins after SECONDS (times GR_TEST_LONGER), so that a run ends by itself; those that did run can still be
compared. Exit status 0 when the file could be run, whatever its tests said.
"""

import os
import re
import signal
import sys
import time

# No single test takes longer: what waits for ever would cost all that come after it.
TEST_S = 60


class Lines:
    """A plugin: one "@test WORD ID" line each, written at once, so that a crash leaves behind what was before it."""

    def __init__(self, seconds):
        # pytest takes over descriptor 1 while a test runs.
        self.out = os.dup(1)
        self.end = time.monotonic() + seconds
        self.word = None
        self.ran = 0

    def say(self, word, name):
        # pytest's own progress may stand on the line.
        os.write(self.out, f"\n@test {word} {name}\n".encode(errors="replace"))

    def pytest_runtest_logstart(self, nodeid):
        self.word = None
        self.say("began", nodeid)
        signal.signal(signal.SIGALRM, self.late)
        signal.alarm(TEST_S)

    @staticmethod
    def late(number, frame):
        raise TimeoutError(f"longer than {TEST_S} s")

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.word = ("failed" if report.when == "call" else "error") + "," + self.reason(report)
        elif not self.word or self.word == "passed":
            expected = hasattr(report, "wasxfail")
            if report.skipped:
                self.word = "xfailed" if expected else "skipped"
            elif report.when == "call":
                self.word = "xpassed" if expected else "passed"

    def pytest_runtest_logfinish(self, nodeid):
        signal.alarm(0)
        self.say(self.word or "passed", nodeid)
        self.ran += 1

    def pytest_collectreport(self, report):
        if report.failed:
            self.say("error,collecting", report.nodeid)

    def pytest_runtest_protocol(self, item):
        if time.monotonic() > self.end:
            item.session.shouldstop = "the time is up"
            self.say("stopped", item.nodeid)
            return True
        return None

    @staticmethod
    def reason(report):
        """The exception's name; its text has addresses and times in it."""
        crash = getattr(report.longrepr, "reprcrash", None)
        match = re.match(r"[\w.]+", crash.message if crash else "")
        name = match[0].rsplit(".", 1)[-1] if match else "unknown"
        return "AssertionError" if name == "assert" else name


def main():
    try:
        import pytest
    except ImportError:
        print("skipped: no pytest")
        return 77
    seconds, path, *more = sys.argv[1:]
    # Helpers that the project keeps beside its tests, for this process and for those that tests start.
    sys.path.insert(0, os.getcwd())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    arguments = ["-q", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    lines = Lines(float(seconds) * float(os.environ.get("GR_TEST_LONGER", 1)))
    status = pytest.main(arguments + more + [path], plugins=[lines])
    sys.stdout.flush()
    # Failed tests, and a session that the plugin stopped, are what the lines are for.
    return 0 if status in (0, 1, 2) and lines.ran else int(status) or 1


if __name__ == "__main__":
    sys.exit(main())
