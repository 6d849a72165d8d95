# shellcheck shell=bash disable=SC2034
# For the shell tests, which source it and end with `exit $failed`.
#
#   fail TEXT                  says that the test has failed, and how the files in the array `shown` end; it goes on
#   must TEXT COMMAND...       fails unless the command succeeds
failed=0 shown=()

fail() {
        local file
        printf 'FAILED: %s\n' "$*"
        for file in "${shown[@]}"; do
                [ ! -s "$file" ] || sed "s|^|    ${file##*/}: |" "$file" | tail -n 40 | cut -c1-300
        done
        failed=1
}

must() {
        "${@:2}" || fail "$1"
}
