#!/bin/bash
# The options in the documents against the one list. Usage: documents_test.sh GPURECLAIM README.md options.md
#
# README.md shows some rows of the table, options.md all, and below it a section for each.
set -u
failed=0
rows=$("$1" options --markdown)
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

same "$2" "$(inside "$2")" "$(grep -Fxf <(inside "$2") <<<"$table")"
same "$3" "$(inside "$3")" "$table"
# The head of a section: a line for the variable, and one for flag, values and default.
same "$3" "$(grep -A 2 '^### ' "$3" | grep -v '^-*$')" "$(awk -F ' [|] ' 'NR > 2 {
        print "### " substr($1, 3)
        print ($2 == "" ? "V" : "Flag " $2 "; v") "alues: " $3 "; default: " $4
}' <<<"$rows")"
exit $failed
