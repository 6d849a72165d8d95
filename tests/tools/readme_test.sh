#!/bin/bash
# The README's table of options against the one list. Usage: readme_test.sh GPURECLAIM README.md
set -u
if ! grep -q '<!-- options:begin -->' "$2" 2>/dev/null || ! grep -q '<!-- options:end -->' "$2"; then
        echo "$2 has no options:begin and options:end markers"
        exit 77
fi
inside=$(sed -n '/<!-- options:begin -->/,/<!-- options:end -->/{/<!-- options:/d;/^$/d;p}' "$2")
if ! diff <(printf '%s\n' "$inside") <("$1" options --markdown); then
        echo "The table in $2 (<) is not what 'gpureclaim options --markdown' prints (>)."
        exit 1
fi
