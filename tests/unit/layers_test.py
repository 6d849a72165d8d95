#!/usr/bin/env python3
"""Whether each file of a static library calls and includes only files that its build lists before it, and whether the
files of each folder stand together there, so that folders have one order, too.

    layers_test.py calls NM ARCHIVE FILE...
    layers_test.py includes FOLDER FILE...

The files are in the order of their list, from the bottom up. The symbols of their objects tell who calls whom. A header
has the place of the source of its name, or one of its own; headers of other folders do not count. Each call or include
upwards is printed, and each folder that comes again after another one. Exit status 1 when there was one, or when a file
is not in the list.
"""

import pathlib
import re
import subprocess
import sys
from collections import defaultdict


def symbols(nm, archive):
    """The object's name -> (what it defines, what it uses)."""
    text = subprocess.run([nm, "-A", "-P", archive], check=True, capture_output=True, text=True).stdout
    defined, used = defaultdict(set), defaultdict(set)
    for line in text.splitlines():
        match = re.match(r".*\[(?:.*/)?([^\]/]+)\.[cS]\.o\]: (\S+) (\w)", line)
        if match:
            name, symbol, kind = match.groups()
            (used if kind == "U" else defined if kind.isupper() else defaultdict(set))[name].add(symbol)
    return defined, used


def calls(files, nm, archive):
    """Who calls whom, and by what."""
    names = {name[:-2].replace("/", "_"): name for name in files}
    defined, used = symbols(nm, archive)
    home = {symbol: name for name, all_of in defined.items() for symbol in all_of}
    for name in sorted(set(defined) | set(used)):
        for symbol in sorted(used[name]):
            yield names.get(name, name), names.get(home.get(symbol, name)), f"calls {symbol} of"


def includes(folder):
    """Who includes whom, likewise."""
    for file in sorted(pathlib.Path(folder).glob("**/*.[ch]")):
        for included in re.findall(r'^#include "(.*\.h)"', file.read_text(), re.MULTILINE):
            if (pathlib.Path(folder) / included).exists():
                yield file.relative_to(folder).as_posix(), included, "includes"


def returning(files):
    """The folders that come again after another one."""
    folders = [file.rpartition("/")[0] or "." for file in files]
    begun = [folder for at, folder in enumerate(folders) if at == 0 or folders[at - 1] != folder]
    return sorted({folder for folder in begun if begun.count(folder) > 1})


def main():
    what, where, *files = sys.argv[1:]
    pairs = list(includes(where) if what == "includes" else calls(files, where, files.pop(0)))
    place = {file[:-1] + "h": at for at, file in enumerate(files)}
    place |= {file: at for at, file in enumerate(files)}
    wrong, others = [f"the files of {folder}/ do not stand together" for folder in returning(files)], 0
    for name, to, how in pairs:
        others += to != name
        if name not in place or to not in place:
            wrong.append(f"{name} {how} {to}: not both are in the list")
        elif place[to] > place[name]:
            wrong.append(f"{name} {how} {to}, which comes after it")
    for line in wrong:
        print(line)
    print(f"{len(files)} files, {others} {what} of other files, {len(wrong)} wrong")
    return 1 if wrong or others == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
