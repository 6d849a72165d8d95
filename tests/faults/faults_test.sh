#!/usr/bin/env bash
# faults_test.sh TREE: scripts/plant-faults finds the places of a sample, and each fault compiles; what it draws depends
# on the seed alone; each has a name of its own; and each that is named as one without effect is there.
set -u
. "$(dirname "$0")/../support/fail.sh"
export LC_ALL=C

tree=$1
here=$tree/tests/faults
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT

"$tree/scripts/plant-faults" --compile "$here/sample.c" >"$folder/sample"
must "each fault of the sample compiles" [ $? -eq 0 ]
must "the faults of the sample" diff "$here/sample.txt" "$folder/sample"
list() {
        "$tree/scripts/plant-faults" --list --modules fence,shim/vmm --seed "$1"
}
list 1 >"$folder/list.1"
list 1 >"$folder/list.2"
list 2 >"$folder/list.3"
must "a draw" [ -s "$folder/list.1" ]
must "the same seed draws the same" cmp -s "$folder/list.1" "$folder/list.2"
must "another seed draws otherwise" eval '! cmp -s "$folder/list.1" "$folder/list.3"'
must "the same places all the same" cmp -s <(sort "$folder/list.1") <(sort "$folder/list.3")
"$tree/scripts/plant-faults" --list | sed 's/^[^ ]* [a-z-]*: //' | sort >"$folder/all"
must "each name is one place's" [ -z "$(uniq -d "$folder/all" | tee /dev/stderr)" ]
without=$tree/tests/planted-faults-equivalent.txt
must "nothing but names and reasons" [ -z "$(grep -vE '^(core/|shim/|#|$)' "$without" | tee /dev/stderr)" ]
must "those without effect are there" [ -z "$(grep -E '^(core|shim)/' "$without" | sort |
        comm -23 - "$folder/all" | tee /dev/stderr)" ]
exit $failed
