#!/usr/bin/env python3
"""The manual pages and the completion of gpureclaim, from the lists that the command itself is made from.
Also the page of gpureclaim report --html, as text for C.

Usage: generate.py OUTPUT SOURCE_FOLDER VERSION HAVE_TOP
OUTPUT: gpureclaim.1, libgpureclaim.7, gpureclaim.bash, _gpureclaim (zsh), gpureclaim.fish or report_page.h.
HAVE_TOP: 1 or 0.

Commands and flags are those of tools/commands.def; options those of docs/options.md, which the test "documents"
compares with core/base/options.def. The examples are those of README.md.
"""
import re
import sys
from types import SimpleNamespace as Record


def read_commands(text):
    """The rows of commands.def: commands with name, rest, usage, summary, help, and flags with name, value, help."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    commands = {}
    for kind, row in re.findall(r"^(COMMAND|FLAG)\((.*?)\)$", text, re.M | re.S):
        cells = [""]
        for string, comma, word in re.findall(r'"((?:[^"\\]|\\.)*)"|(,)|([^\s",]+)', row):
            if comma:
                cells.append("")
            else:
                cells[-1] += string.replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\") or word
        if kind == "COMMAND":
            name, rest, usage, summary, help_text = cells
            commands[name] = Record(name=name, rest=rest, usage=usage, summary=summary, help=help_text, flags=[])
            continue
        name, flag, value, help_text = cells[0], cells[1], *("" if cell == "NULL" else cell for cell in cells[2:])
        if help_text:
            commands[name].flags.append(Record(name="--" + flag, value=value, help=help_text, optional=False,
                                               words=words_of(commands[name], value, help_text)))
    for command in commands.values():
        command.flags.append(Record(name="--help", value="", help="print this text", optional=False, words=[]))
    return list(commands.values())


def words_of(command, value, help_text):
    """What a value may be, where the flag's help begins with "WORD, WORD or WORD:", or the command's help lists that
    below a sentence "VALUE is ...:"."""
    begin = re.match(r"((?:\w+, )*\w+) or (\w+):", help_text) if value else None
    if begin:
        return begin[1].split(", ") + [begin[2]]
    listed = re.search(rf"\b{value} is .*:\n((?:  .*\n)+)", command.help) if value else None
    return re.findall(r"\w+", " ".join(re.findall(r"^  (\w.*?)  ", listed[1], re.M))) if listed else []


def read_options(text):
    """What stands before the first section of docs/options.md, and its sections: name, text, options."""
    meanings = {row[0]: row[2] for row in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", text, re.M)}
    parts = re.split(r"^## (.*)\n", text.split("\n", 1)[1], flags=re.M)
    sections = []
    for title, body in zip(parts[1::2], parts[2::2]):
        body, *options = re.split(r"^### `(\w+)`\n", body, flags=re.M)
        section = Record(name=title, text=body, options=[])
        for variable, rest in zip(options[0::2], options[1::2]):
            head, more = rest.strip().split("\n\n", 1)
            flag, values = re.fullmatch(r"(?:Flag `(.*?)`; )?[vV]alues: (.*); default: .*", head).groups()
            section.options.append(Record(variable=variable, meaning=meanings[variable], head=head, text=more,
                                          flag=flag, values=values.replace("\\|", "|")))
        sections.append(section)
    return parts[0], sections


def flag_of(option):
    """The flag of gpureclaim run that sets an option."""
    words = option.values.split("|") if "|" in option.values else []
    is_switch = words == ["0", "1"]
    value = "[=0|1]" if is_switch else "|".join(words) or option.values.split()[0].upper().replace("PATH", "FILE")
    if re.match(r"\d", value):
        value = "NUMBER"
    return Record(name=option.flag, value=value, help=option.meaning, optional=is_switch, words=words)


def negated(flag):
    """The flag that takes a switch back, as tools/arguments.c reads it."""
    text = f"{flag.name}=0" if flag.optional else f"without {flag.name}"
    return Record(name="--no-" + flag.name[2:], value="", help=text, optional=False, words=[])


# Manual pages

def roff(text):
    """Text of Markdown as that of a manual page."""
    text = text.replace("\\|", "|").replace("\\", "\\e")
    text = re.sub(r"`([^`]*)`", lambda code: "\\fB" + code[1].replace("-", "\\-") + "\\fP", text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"\\fB\1\\fP", text)
    text = re.sub(r"(?<!\w)\*([^*]+)\*", r"\\fI\1\\fP", text)
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.M)


def literal(lines):
    return [".nf"] + [roff(line).replace("-", "\\-") if line else "" for line in lines] + [".fi"]


def blocks(text):
    """Paragraphs, lists and tables of two columns."""
    lines = []
    for block in text.strip().split("\n\n"):
        if block.startswith("- "):
            for item in re.split(r"^- ", block, flags=re.M)[1:]:
                lines += [".IP \\(bu 2", roff(re.sub(r"\n *", "\n", item.strip()))]
        elif block.startswith("| "):
            for row in block.split("\n")[2:]:
                left, right = re.split(r" (?<!\\)\| ", row.strip("| "))
                lines += [".TP", roff(left), roff(right)]
        else:
            lines += [".PP", roff(block)]
    return lines


def page(title, number, version, lines):
    return "\n".join([f'.TH {title} {number} "" "gpureclaim {version}"'] + lines) + "\n"


def flag_lines(flag):
    gap = "" if flag.optional or not flag.value else " "
    return [".TP", roff(f"`{flag.name}`{gap}") + (f"\\fI{roff(flag.value)}\\fP" if flag.value else ""), roff(flag.help)]


def exit_statuses(commands):
    """The lines of a list of all exit statuses, from what the help of each command says of its own."""
    found = {}
    for command in commands:
        listed = re.search(r"^Exit status: (.*)\.$", command.help, re.M | re.S)[1].replace("\n", " ")
        for part in listed.split("; "):
            status, meaning = re.fullmatch(r"(?:(\d+)(?:: )?)?(.*)", part).groups()
            found.setdefault(status or "any other", {}).setdefault(meaning or "success", []).append(command.name)
    lines = []
    for status in sorted(found, key=lambda status: int(status) if status.isdigit() else 256):
        meanings = (f"{meaning} ({', '.join(names)})" for meaning, names in found[status].items())
        lines += [".TP", roff(f"`{status}`"), roff("; ".join(meanings) + ".")]
    return lines


def command_page(version, commands, sections, readme):
    example = re.search(r"^## The command\n\n((?:    .*\n)+)", readme, re.M)[1]
    lines = [".SH NAME", "gpureclaim \\- run, watch and steer CUDA programs with a cache for device memory",
             ".SH SYNOPSIS"]
    for command in commands:
        lines += [".br"] * (command is not commands[0]) + [roff(f"`gpureclaim {command.name}` {command.usage}".strip())]
    lines += [".SH DESCRIPTION", roff(readme.split("\n\n")[1]), ".SH COMMANDS"]
    for command in commands:
        lines += [roff(f'.SS "{command.name} {command.usage}').replace("\\&", "").strip() + '"',
                  roff(command.summary[0].upper() + command.summary[1:] + ".")]
        for text in re.findall(r"(?:^  .*\n)+|(?:^(?!  ).*\n)+?(?=^  |Exit status|\Z)", command.help, re.M):
            lines += literal(text.rstrip("\n").split("\n")) if text.startswith("  ") else [".PP", roff(text.rstrip())]
        for flag in command.flags:
            lines += flag_lines(flag)
        if command.name == "run":
            lines += [".PP", "These flags set an option of the library, see libgpureclaim(7):"]
            for option in (option for section in sections for option in section.options if option.flag):
                lines += flag_lines(flag_of(option))
    lines += [".SH EXIT STATUS"] + exit_statuses(commands)
    lines += [".SH EXAMPLES"] + literal(line[4:] for line in example.rstrip("\n").split("\n"))
    return page("GPURECLAIM", 1, version, lines + [".SH SEE ALSO", "libgpureclaim(7)"])


def library_page(version, intro, sections, readme):
    lines = [".SH NAME", "libgpureclaim \\- a cache for the device memory of unmodified CUDA programs",
             ".SH SYNOPSIS", "\\fBLD_PRELOAD=libgpureclaim.so\\fP [\\fBGPURECLAIM_\\fIOPTION\\fB=\\fIVALUE\\fR...] "
             "\\fIprogram\\fP", ".SH DESCRIPTION", roff(readme.split("\n\n")[1])] + blocks(intro)
    for section in sections:
        if section.options:
            lines.append(f".SH {section.name.upper()}")
        elif "options:begin" not in section.text:
            lines += [f".SH {section.name.upper()}"] + blocks(section.text)[1:]
        for option in section.options:
            lines += [f".SS {option.variable}", roff(option.meaning)] + blocks(option.head + "\n\n" + option.text)
    return page("LIBGPURECLAIM", 7, version, lines + [
        ".SH SEE ALSO", "gpureclaim(1)", ".PP",
        "The pages that are named \\fBdocs/\\fP are in share/doc/gpureclaim of the installation. "
        "docs/api.md has what a program can call."])


# Completion: the templates in tools/completion, with lines for each command and flag.

def argument_of(command):
    """What follows the flags, by the usage: PROGRAM, COMMAND, PID, FILE, PID|FILE; "": none of these."""
    return (re.findall(r"\b(PROGRAM|COMMAND|PID\|FILE|PID|FILE)\b", command.usage) or [""])[0]


def letter_of(flag):
    """The letter that stands for a flag as well, which only its help tells."""
    return "".join(re.findall(r"^also -(\w);", flag.help))


def quoted(text):
    return "'" + text.replace("'", "'\\''") + "'"


def bash_lines(command):
    names = " ".join(flag.name for flag in command.flags)
    return [f"    {quoted(command.name)}) flags={quoted(names)} argument={quoted(argument_of(command))} ;;"]


def bash_value_lines(command):
    return [f"    {quoted(command.name + ' ' + name)}) value={quoted(' '.join(flag.words) or flag.value)}"
            f" optional={'yes' if flag.optional else quoted('')} ;;" for flag in command.flags if flag.value
            for name in [flag.name] + ["-" + letter for letter in letter_of(flag)]]


def zsh_lines(command):
    after = {"PROGRAM": ["'(-)1:program:_command_names -e'", "'*::argument:_normal'"],
             "PID": ["'1:process:_gpureclaim_pids'"], "COMMAND": ["'1:command:_gpureclaim_commands'"],
             "FILE": ["'*:file:_files'"], "PID|FILE": ["'*:process or file:_gpureclaim_pids_and_files'"], "": []}
    lines = []
    for flag in command.flags:
        text = re.sub(r"([\[\]\\])", r"\\\1", flag.help)
        value = f"({' '.join(flag.words)})" if flag.words else "_files" if flag.value in ("FILE", "PREFIX") else " "
        sign = "=-" if flag.optional else "=" if flag.value else ""
        colons = "::" if flag.optional else ":"
        for name in [flag.name + sign] + [f"-{letter}+" for letter in letter_of(flag)]:
            lines.append(quoted(f"{name}[{text}]" + (f"{colons}value:{value}" if flag.value else "")))
    lines = ["_arguments -S"] + lines + after[argument_of(command)]
    return [f"    {command.name})", "        " + " \\\n            ".join(lines), "        ;;"]


def fish_lines(command):
    start = f"complete -c gpureclaim -n '__gpureclaim_is {command.name}'"
    after = {"PROGRAM": ["-xa '(__fish_complete_subcommand --fcs-skip=2)'"], "PID": ["-xa '(__gpureclaim_pids)'"],
             "COMMAND": ["-xa '(__gpureclaim_commands)'"], "FILE": ["-F"],
             "PID|FILE": ["-F", "-a '(__gpureclaim_pids)'"], "": []}
    lines = [f"{start} {text}" for text in after[argument_of(command)]]
    for flag in command.flags:
        value = f" -xa {quoted(' '.join(flag.words))}" if flag.words else \
            " -rF" if flag.value in ("FILE", "PREFIX") else " -x"
        letter = "".join(f" -s {letter}" for letter in letter_of(flag))
        lines.append(f"{start} -l {flag.name[2:]}{letter}{value if flag.value and not flag.optional else ''}"
                     f" -d {quoted(flag.help)}")
    return lines


# What stands for a line of a template.
LINES = {
    "@BASH@": bash_lines,
    "@BASH_VALUES@": bash_value_lines,
    "@ZSH_COMMANDS@": lambda command: [f"        {quoted(command.name + ':' + command.summary)}"],
    "@ZSH@": zsh_lines,
    "@FISH_COMMANDS@": lambda command: [f"    printf '%s\\t%s\\n' {command.name} {quoted(command.summary)}"],
    "@FISH@": fish_lines,
}


def completion(template, commands):
    lines = []
    for line in template.splitlines():
        make = LINES.get(line.strip())
        lines += [made for command in commands for made in make(command)] if make else [line]
    return "\n".join(lines).replace("@NAMES@", " ".join(command.name for command in commands)) + "\n"


# The page of gpureclaim report --html

def c_text(name, text):
    lines = ['        "' + line.replace("\\", "\\\\").replace('"', '\\"') + '\\n"' for line in text.splitlines()]
    return f"static const char {name}[] =\n" + "\n".join(lines) + ";\n"


def main():
    output, folder, version = sys.argv[1:]

    def read(name):
        with open(f"{folder}/{name}", encoding="utf-8") as file:
            return file.read()

    commands = read_commands(read("tools/commands.def"))
    intro, sections = read_options(read("docs/options.md"))
    if output == "gpureclaim.1":
        text = command_page(version, commands, sections, read("README.md"))
    elif output == "report_page.h":
        before, after = read("tools/report.html").split("@DATA@\n")
        text = c_text("page_before", before) + c_text("page_after", after)
    elif output == "libgpureclaim.7":
        text = library_page(version, intro, sections, read("README.md"))
    else:
        run = next(command for command in commands if command.name == "run")
        run.flags += [flag_of(option) for section in sections for option in section.options if option.flag]
        for command in commands:
            switches = [flag for flag in command.flags if flag.name != "--help" and (flag.optional or not flag.value)]
            command.flags += map(negated, switches)
        text = completion(read(f"tools/completion/{output}.in"), commands)
    sys.stdout.buffer.write(text.encode())


main()
