#!/usr/bin/env bash
# The sources have the form that CONTRIBUTING.md asks for: clang-format 14, and lines of at most 120 columns.
# Usage: format_test.sh SOURCES
cd "$1" || exit 1
status=0 skipped=

# Other releases of clang-format lay a few things out differently.
if clang-format --version 2>/dev/null | grep -q 'version 14\.'; then
        wrong=$(find core shim tools tests -name '*.[ch]' -print0 | xargs -0 clang-format --dry-run --Werror 2>&1 |
                sed -n 's/^\([^ :]*:[0-9]*\):[0-9]*: error.*/\1/p' | sort -u)
        [ -z "$wrong" ] || { printf 'not as clang-format -i leaves it:\n%s\n' "$wrong" && status=1; }
else
        skipped="clang-format 14 is not here"
fi

# clang-format leaves comments as they are, and the other languages have no formatter here. Pages have long tables.
if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
        long=$(git grep -InE --untracked '^.{121,}' -- ':!*.md' ':!*.csv' ':!*.json' ':!*.svg' ':!*.html' ':!*.txt')
        [ -z "$long" ] || { printf 'lines of more than 120 columns:\n%s\n' "$long" | cut -c 1-160 && status=1; }
else
        skipped+="${skipped:+; }this is no git repository"
fi

[ $status -ne 0 ] || [ -z "$skipped" ] || { echo "skipped: $skipped" && exit 77; }
exit $status
