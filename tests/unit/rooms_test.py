#!/usr/bin/env python3
"""Whether each file of a static library calls only files that its build lists before it.

    rooms_test.py NM ARCHIVE SOURCE...

The sources are in the order of their list, from the bottom up; the symbols of their objects tell who calls whom. Each
call upwards is printed. Exit status 1 when there was one, or when an object is not among the sources.
"""

import re
import subprocess
import sys
from collections import defaultdict


def symbols(nm, archive):
    """The object's name -> (what it defines, what it uses)."""
    text = subprocess.run([nm, "-A", "-P", archive], check=True, capture_output=True, text=True).stdout
    defined, used = defaultdict(set), defaultdict(set)
    for line in text.splitlines():
        match = re.match(r".*\[(?:.*/)?([^\]/]+)\.c\.o\]: (\S+) (\w)", line)
        if match:
            name, symbol, kind = match.groups()
            (used if kind == "U" else defined if kind.isupper() else defaultdict(set))[name].add(symbol)
    return defined, used


def main():
    nm, archive, *sources = sys.argv[1:]
    place = {source[: -len(".c")].replace("/", "_"): at for at, source in enumerate(sources)}
    defined, used = symbols(nm, archive)
    home = {symbol: name for name, all_of in defined.items() for symbol in all_of}
    wrong = [f"{name}.c is not in the list" for name in sorted(set(defined) | set(used)) if name not in place]
    calls = 0
    for name in sorted(used, key=lambda name: place.get(name, 0)):
        for symbol in sorted(used[name]):
            to = home.get(symbol, name)
            calls += to != name
            if name in place and to in place and place[to] > place[name]:
                wrong.append(f"{sources[place[name]]} calls {symbol} of {sources[place[to]]}, which comes after it")
    for line in wrong:
        print(line)
    print(f"{len(sources)} files, {calls} calls of other files, {len(wrong)} wrong")
    return 1 if wrong or calls == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
