#!/bin/bash
# What the documents say of the sources. Usage: documents_test.sh GPURECLAIM SOURCE_FOLDER
#
# The options against the one list: README.md shows some rows of the table, docs/options.md all, and below it a section
# for each. The figures of README.md and docs/benchmarks.md against the measured ones. Each file and each function that
# is named is there, each link leads somewhere, and docs/troubleshooting.md has each message of the level warn or error.
set -u
failed=0
rows=$("$1" options --markdown)
cd "$2" || exit 1
table=$(awk -F ' [|] ' '{print $1 " | " $4 " | " $5}' <<<"$rows")

inside() {
        sed -n '/<!-- options:begin -->/,/<!-- options:end -->/{/<!-- options:/d;/^$/d;p}' "$1"
}

# same FILE GOT WANT
same() {
        [ -n "$2" ] && diff <(printf '%s\n' "$2") <(printf '%s\n' "$3") && return
        echo "The options in $1 (<) are not those of 'gpureclaim options --markdown' (>)."
        failed=1
}

same README.md "$(inside README.md)" "$(grep -Fxf <(inside README.md) <<<"$table")"
same docs/options.md "$(inside docs/options.md)" "$table"
# The head of a section: a line for the variable, and one for flag, values and default.
same docs/options.md "$(grep -A 2 '^### ' docs/options.md | grep -v '^-*$')" "$(awk -F ' [|] ' 'NR > 2 {
        print "### " substr($1, 3)
        print ($2 == "" ? "V" : "Flag " $2 "; v") "alues: " $3 "; default: " $4
}' <<<"$rows")"

tests/bench/bench_report.py --check || failed=1
tests/tools/documents.py || failed=1

# shellcheck disable=SC2016
names=$(grep -ohE '`(\.ci|core|shim|tests|tools|scripts|docs)/[^` ]*' ./*.md docs/*.md | tr -d '`' | sort -u)
[ -n "$names" ] || failed=1
for name in $names; do
        [ -e "$name" ] && continue
        grep -F "\`$name" ./*.md docs/*.md
        echo "There is no $name."
        failed=1
done

# Functions and other names of the code; in three pages such words are also metrics, examples, and calls of the system.
# shellcheck disable=SC2016
names=$(grep -ohE --exclude={api,measurements,metrics}.md '`[a-z][a-z0-9]*(_[a-z0-9]+)+`' ./*.md docs/*.md |
        tr -d '`' | sort -u)
[ -n "$names" ] || failed=1
code=$(grep -rIohE '[a-z][a-z0-9]*(_[a-z0-9]+)+' core shim tools tests | sort -u)
for name in $(comm -23 <(echo "$names") <(echo "$code")); do
        grep -Fw "$name" ./*.md docs/*.md
        echo "The code has no $name."
        failed=1
done
exit $failed
