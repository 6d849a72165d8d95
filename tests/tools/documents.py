#!/usr/bin/env python3
"""Each link of the documents leads somewhere, and docs/troubleshooting.md has each message of the level warn or error.

Usage: documents.py, in the source folder. documents_test.sh runs it.
"""

import re
import sys
from pathlib import Path

LITERALS = r'((?:"(?:[^"\\]|\\.)*"|PRI[a-z]\d*|\s)+)'
LOGGED = r'gr_log\(\s*([^",]*),\s*' + LITERALS
FORMATTED = r"snprintf\((message), sizeof\(message\),\s*" + LITERALS  # where it is logged as a warning
CONVERSION = r"%(?:PRI|[-.*\d]*(?:ll|z)?[a-zA-Z])"
failed = False


def complain(text):
    global failed
    print(text)
    failed = True


def check_links():
    for page in [*Path(".").glob("*.md"), *Path("docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            file, _, part = link.partition("#")
            target = page.parent / file if file else page
            if "://" in link:
                continue
            if not target.exists():
                complain(f"{page}: the link {link} leads nowhere.")
            elif part:
                headings = re.findall(r"^#+ (.*)", target.read_text(), re.M)
                if part not in (re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings):
                    complain(f"{page}: the link {link} leads to no heading.")


def find_messages():
    """The formats of all messages that may be warnings or errors; the level of an explanation is in a variable."""
    for file in [*Path("core").rglob("*.c"), *Path("shim").rglob("*.c")]:
        source = file.read_text()
        for level, literals in re.findall(LOGGED, source) + re.findall(FORMATTED, source):
            parts = re.findall(r'"((?:[^"\\]|\\.)*)"|(PRI)', literals)
            message = "".join(map("".join, parts)).strip()
            warns = "warn(message" in source if level == "message" else re.search("WARN|ERROR|level", level)
            if warns and message != "%s":
                yield message


def check_messages():
    text = Path("docs/troubleshooting.md").read_text()
    told = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^gpureclaim: \[\d+\] warn: +(.*)", text, re.M)
    messages = list(find_messages())
    for message in messages:
        pattern = ".*".join(map(re.escape, re.split(CONVERSION, message)))
        if not any(re.fullmatch(pattern, line) for line in told):
            complain(f"docs/troubleshooting.md does not have: {message}")
    if len(messages) < 25:
        complain(f"Only {len(messages)} messages were found in the sources.")


check_links()
check_messages()
sys.exit(failed)
