#!/bin/bash
# The installation: made and removed by the commands of README.md, whole, and of use wherever it is moved to. A folder
# of the test (DESTDIR) stands for the root of the system. Usage: install_test.sh BUILD_FOLDER SOURCE_FOLDER PREFIX CC
set -u
. "$(dirname "$0")/../support/fail.sh"
build=$1 source=$2 prefix=$3
for tool in meson ninja python3; do
        command -v $tool >/dev/null || { echo "no $tool here" && exit 77; }
done
unset LD_PRELOAD LD_LIBRARY_PATH CUDA_VISIBLE_DEVICES DESTDIR XDG_DATA_DIRS
for name in $(compgen -e GPURECLAIM_); do unset "$name"; done
tree=$(realpath "$(mktemp -d)") || exit 1
log=$build/meson-logs/install-log.txt

# What uninstall goes by is that of the user's own installation again.
[ ! -e "$log" ] || cp "$log" "$tree/log"
# shellcheck disable=SC2317
clean() {
        [ -z "$pid" ] || kill "$pid" 2>/dev/null
        rm -f "$log"
        [ ! -e "$tree/log" ] || cp "$tree/log" "$log"
        rm -rf "$tree"
}
pid=
trap clean EXIT

# is WHAT GOT WANT
is() {
        [ "$2" = "$3" ] || fail "$1: is \"$2\", not \"$3\""
}
here() {
        command -v "$1" >/dev/null || { echo "no $1 here: what needs it is left out" && return 1; }
}

# README.md, Install. The build folder is named build there.
mkdir "$tree/source" && ln -s "$build" "$tree/source/build" && cd "$tree/source" || exit 1
mapfile -t commands < <(sed -n '/^## Install/,/^## /{s/^    //p}' "$source/README.md")
is "commands under Install in README.md" "${#commands[@]}" 2
DESTDIR=$tree/root bash -c "${commands[0]}" >"$tree/out" 2>&1 || { cat "$tree/out" && exit 1; }

# Moved, to a folder whose name could be a pattern.
mv "$tree/root$prefix" "$tree/moved[1]" && cd "$tree/moved[1]" || exit 1
export PATH=$PWD/bin:$PATH GPURECLAIM_REGION_DIR=$tree/region
version=$(gpureclaim --version) version=${version#gpureclaim }
out=$(gpureclaim doctor --sim 2>&1) || fail "doctor: $out"
[[ $out == *"$PWD/"*"libgpureclaim.so, version $version"* ]] || fail "doctor does not name the library here: $out"
is "top without a terminal, or built without" "$(gpureclaim top 2>&1 </dev/null | cut -d ' ' -f 1-2)" "gpureclaim: top:"
for file in run/sitecustomize.py run/_gpureclaim_run.py alerts.yml grafana.json; do
        [ -e share/gpureclaim/$file ] || fail "no $file"
done

# The module is where Meson's Python looks for one, if it looks below the prefix.
module=$(dirname "$(find "$PWD" -name py.typed)")
# shellcheck disable=SC2046
$(sed -n '1s/^#! *//p' "$(command -v meson)") - "$prefix" "${module#"$PWD"}" <<'PY' || fail "$module is not found"
import os, site, sys
folders = [folder for folder in site.getsitepackages() if folder.startswith(sys.argv[1] + "/lib")]
sys.exit(bool(folders) and os.path.dirname(sys.argv[1] + sys.argv[2]) not in folders)
PY

# A program in C, by pkg-config.
export PKG_CONFIG_PATH
PKG_CONFIG_PATH=$(dirname "$(find "$PWD" -name gpureclaim.pc)")
if here pkg-config; then
        is "version of gpureclaim.pc" "$(pkg-config --modversion gpureclaim)" "$version"
        [ -e "$(pkg-config --variable=library gpureclaim)" ] || fail "gpureclaim.pc does not name the library"
        cat >"$tree/program.c" <<'C'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <gpureclaim.h>
#include <stdio.h>

int main(void)
{
        gpureclaim_version_function *version = (gpureclaim_version_function *)dlsym(RTLD_DEFAULT, "gpureclaim_version");

        puts(version ? version() : "none");
        return 0;
}
C
        # It quotes what the shell would not take as it stands.
        eval "$4 -o '$tree/program' '$tree/program.c' $(pkg-config --cflags --libs gpureclaim)" ||
                fail "pkg-config --cflags --libs: a program cannot be built"
        is "a program by itself" "$("$tree/program")" none
        is "a program with the library" "$(gpureclaim run --sim -- "$tree/program")" "$version"
fi

# Manual pages: each option and command is in them, and nothing in them is wrong.
for page in share/man/man1/gpureclaim.1 share/man/man7/libgpureclaim.7; do
        [ -s $page ] || fail "no $page"
        if here man; then
                is "$page" "$(MANROFFSEQ='' MANWIDTH=80 man --warnings -E UTF-8 -l -Tutf8 -Z $page 2>&1 >/dev/null)" ""
        elif here mandoc; then
                is "$page" "$(mandoc -T lint -W warning $page | grep -v 'missing date')" ""
        fi
done
commands_listed=$(gpureclaim help | sed -n 's/^  \([a-z]*\)  .*/\1/p')
[ -n "$commands_listed" ] || fail "help lists no commands"
for command in $commands_listed; do
        grep -q "^\.SS \"$command" share/man/man1/gpureclaim.1 || fail "gpureclaim.1 has no $command"
        for flag in $(gpureclaim help "$command" | sed -n 's/^  \(--[a-z-]*\).*/\1/p'); do
                grep -qF "${flag//-/\\-}" share/man/man1/gpureclaim.1 || fail "gpureclaim.1 has no $flag"
        done
done
# What the help of a command says of an exit status is in the list of all.
statuses=$(sed -n '/^\.SH EXIT STATUS$/,/^\.SH EXAMPLES$/p' share/man/man1/gpureclaim.1)
for command in $commands_listed; do
        while IFS=: read -r status meaning; do
                grep -xF -A 1 "\fB$status\fP" <<<"$statuses" | grep -qE "(^|; )$meaning \\([^)]*\b$command\b" ||
                        fail "EXIT STATUS of gpureclaim.1 does not say of $command: $status:$meaning"
        done < <(gpureclaim help "$command" | sed -n '/^Exit status: /,/^$/p' | tr '\n' ' ' |
                grep -oE '[0-9]+: [^;.]+|that of the program' | sed 's/^that/any other: &/; s/: /:/')
done
for option in $(gpureclaim options | grep -o '^GPURECLAIM_[A-Z_]*'); do
        grep -qx "\.SS $option" share/man/man7/libgpureclaim.7 || fail "libgpureclaim.7 has no $option"
done

# Completion, with a process under the library.
coproc program { exec gpureclaim run --sim --sleep demand -- python3 "$source/tests/tools/scene.py"; }
pid=$!
echo alloc 0 64 >&"${program[1]}"
read -r -t 30 answer <&"${program[0]}"
is "a program that allocates" "$answer" 0
# The library finds the command. There is no NVML for the simulated device here, so that one has no answer.
out=$(gpureclaim sleep --deep "$pid" 2>&1)
[[ $out == *"status --room gave no answer"* ]] || fail "sleep --deep: $out"

# completes WORD...: what bash offers for the last word.
completes() (
        # shellcheck source=/dev/null
        source share/bash-completion/completions/gpureclaim.bash
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
        _gpureclaim
        printf '%s\n' "${COMPREPLY[@]}" | sort | tr '\n' ' '
)
echo >"$tree/a file"
mkdir "$tree/path" && ln -s /bin/true "$tree/path/xyzzy-tool" && PATH=$PATH:$tree/path
# shellcheck disable=SC2086
is "commands" "$(completes gpureclaim '')" "$(printf '%s\n' $commands_listed --help --version | sort | tr '\n' ' ')"
is "a command" "$(completes gpureclaim sta)" "status "
for command in $commands_listed; do
        # Each flag of the help, and --no- for each switch: these take no value, or [=0|1].
        flags=$(gpureclaim help "$command" | sed -nE 's/^  (--[a-z-]+).*/\1/p')
        negated=$(gpureclaim help "$command" | sed -nE '/^  --help/d;s/^  --([a-z-]+)(\[=0\|1\])?  .*/--no-\1/p')
        # shellcheck disable=SC2086
        is "flags of $command" "$(completes gpureclaim "$command" --)" \
                "$(printf '%s\n' $flags $negated | sort | tr '\n' ' ')"
        for flag in $negated; do
                gpureclaim "$command" "$flag" --help >/dev/null || fail "$command does not know $flag"
        done
done
is "a flag" "$(completes gpureclaim run --sim --soft)" "--soft-limit "
is "a switch taken back" "$(completes gpureclaim run --stats --no-stats --no-stat)" "--no-stats "
is "a program after a switch taken back" "$(completes gpureclaim run --no-stats xyzzy-t)" "xyzzy-tool "
is "words" "$(completes gpureclaim run --reuse '')" "auto barrier poll sync "
is "words after =" "$(completes gpureclaim run --reuse = '')" "auto barrier poll sync "
is "words after =, the word not begun" "$(completes gpureclaim run --reuse =)" "auto barrier poll sync "
is "a switch's value" "$(completes gpureclaim run --stats = '')" "0 1 "
is "a size" "$(completes gpureclaim run --limit '')" " "
is "a program" "$(completes gpureclaim run --stats --limit 1GiB xyzzy-t)" "xyzzy-tool "
is "a program after a letter" "$(completes gpureclaim record -o "$tree/a" xyzzy-t)" "xyzzy-tool "
is "where traces go" "$(completes gpureclaim record --output = "$tree/a f")" "$tree/a file "
is "a program after --" "$(completes gpureclaim run -- xyzzy-t)" "xyzzy-tool "
is "a program's own words" "$(completes gpureclaim wait --free = 1GiB ls --json "$tree/a f")" "$tree/a file "
is "a file" "$(completes gpureclaim report --json "$tree/a f")" "$tree/a file "
is "a rung" "$(completes gpureclaim reclaim --rung dr)" "driver drop "
is "formats" "$(completes gpureclaim report --format '')" "csv html json perfetto pytorch summary "
for word in $(completes gpureclaim report --format ''); do
        out=$(gpureclaim report --format "$word" "$tree/no file" 2>&1)
        [[ $out == *"/no file"* ]] || fail "report does not know the format $word: $out"
done
is "how much is recorded" "$(completes gpureclaim record --backtrace '')" "full sample "
is "a process" "$(completes gpureclaim limit '')" "$pid "
is "a process after a flag" "$(completes gpureclaim reclaim --rung sync '')" "$pid "
is "a process that is looked at" "$(completes gpureclaim leaks "$pid")" "$pid "
is "a file that is looked at" "$(completes gpureclaim leaks "$tree/a f")" "$tree/a file "
is "a command to explain" "$(completes gpureclaim help thr)" "threshold "
is "no such command" "$(completes gpureclaim xyzzy '')" " "

if here zsh; then
        zsh -n share/zsh/site-functions/_gpureclaim || fail "completion for zsh: the syntax"
        grep -qxF '    threshold)' share/zsh/site-functions/_gpureclaim || fail "completion for zsh: no threshold"
        grep -qF "'--no-stats[" share/zsh/site-functions/_gpureclaim || fail "completion for zsh: no --no-stats"
        grep -qF "pids:process:_gpureclaim_pids files:file:_files" share/zsh/site-functions/_gpureclaim ||
                fail "completion for zsh: leaks takes no file"
        grep -qF ":value:(sample full)" share/zsh/site-functions/_gpureclaim || fail "completion for zsh: no words"
fi
# offers LINE WORD...: what fish offers for the end of the line.
offers() {
        is "fish: $1" "$(HOME=$tree fish --no-config -c "source share/fish/vendor_completions.d/gpureclaim.fish
                complete -C '$1'" | cut -f 1 | sort | tr '\n' ' ')" "${*:2} "
}
if here fish; then
        fish -n share/fish/vendor_completions.d/gpureclaim.fish || fail "completion for fish: the syntax"
        offers "gpureclaim sta" status
        offers "gpureclaim run --soft" --soft-limit
        offers "gpureclaim run --no-stats" --no-stats
        offers "gpureclaim run --pool sp" split
        offers "gpureclaim threshold " "$pid"
        offers "gpureclaim leaks $pid" "$pid"
        offers "gpureclaim leaks $tree/a" "$tree/a file"
        offers "gpureclaim record --backtrace " full sample
        offers "gpureclaim help thr" threshold
fi
kill "$pid"
wait "$pid"
pid=

# Removed without a trace.
cd "$tree/source" && mv "$tree/moved[1]" "$tree/root$prefix" || exit 1
bash -c "${commands[1]}" >"$tree/out" 2>&1 || fail "uninstall: $(cat "$tree/out")"
[ ! -e "$tree/root" ] || fail "not removed: $(find "$tree/root")"
exit $failed
