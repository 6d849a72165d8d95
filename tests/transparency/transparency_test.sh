#!/usr/bin/env bash
# transparency_test.sh SCRIPT BUILD_FOLDER: scripts/transparency must call alike what is alike and notice what is not.
# Shell stand-ins look for the shim among what is preloaded; real programs run on the simulated device.
set -u
. "$(dirname "$0")/../support/fail.sh"
unset CUDA_VISIBLE_DEVICES

script=$1
build=$2
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/programs" "$folder/programs/files"
echo given >"$folder/programs/files/input"

# stand_in NAME OPTIONS TEXT: a shell program; $shim is 1 in it under the shim, $dirty where its memory is to be dirty,
# which is so under the shim and in the control, and $turn counts its runs.
stand_in() {
        printf '#!/bin/bash\nshim=0; [[ ${LD_PRELOAD:-} == *libgpureclaim* ]] && shim=1; dirty=$shim\n' \
                >"$folder/programs/$1.sh"
        printf '[ "${GR_TEST_WARM:-}" != dirty ] || shim=0\n' >>"$folder/programs/$1.sh"
        printf 'exec 9>>%q; flock 9; echo >&9; turn=$(wc -l <%q)\n%s\n' "$folder/$1.turns" "$folder/$1.turns" "$3" \
                >>"$folder/programs/$1.sh"
        printf '%s | %s | %s | bash @/%s.sh\n' "$1" 5 "$2" "$1" >>"$folder/programs/list.txt"
}
stand_in equal quick 'echo hello; echo oops >&2'
stand_in times "" 'echo "took $RANDOM.5 ms at 0x7f00000$RANDOM, $RANDOM GB/s"'
stand_in files "" 'cat input; echo result >output'
stand_in line "" 'echo "a line of $shim"'
stand_in status "" 'exit $((3 * shim))'
stand_in crash "" '[ $shim = 0 ] || kill -SEGV $$'
stand_in error "" 'echo "text $shim" >&2'
stand_in output "" 'echo $shim >output'
stand_in order "" '[ $shim = 1 ] && echo "one
two" || echo "two
one"'
stand_in threads unordered '[ $shim = 1 ] && echo "one
two" || echo "two
one"'
stand_in varies "" 'echo "sum $RANDOM$RANDOM"; echo steady'
stand_in hides "" 'echo "sum $RANDOM$RANDOM"; [ $shim = 1 ] && echo wrong || echo right'
stand_in loses "" '[ $shim = 1 ] || echo "sum $RANDOM$RANDOM"; echo steady'
stand_in unsteady "" '[ $shim = 1 ] && exit 4; exit $((turn % 2))'
stand_in fails "" 'echo "cannot"; exit 3'
stand_in waived "" 'echo "waived: no such card"; exit 2'
stand_in absent "" 'echo "skipped: no such package"; exit 77'
stand_in slow "" 'sleep 30'
stand_in hangs "" '[ $shim = 0 ] || sleep 30'
stand_in cards gpus=64 'echo never'
stand_in unset "" 'echo "sum $((dirty * (RANDOM + 1)))"; exit $((3 * dirty))'
stand_in unsetmore "" 'echo "sum $((dirty * (RANDOM + 1)))"; echo "line $shim"'
stand_in unsetcrash "" 'echo "sum $((dirty * (RANDOM + 1)))"; [ $shim = 0 ] || kill -SEGV $$'
stand_in group "" '[ $shim = 0 ] || [ "$GPURECLAIM_GROUP" = group ] || echo "in ${GPURECLAIM_GROUP-none}"'
stand_in noted "" 'echo "size $((1 + shim))"'
stand_in halfnoted "" 'echo "size $((1 + shim))"; echo "other $shim"'

# A project's tests: what a program says of each.
mkdir "$folder/project"
echo given >"$folder/project/here"
# tests NAME TEXT: as stand_in, in another list.
tests() {
        stand_in "$1" "" "[ -e here ] || exit 9; echo noise of \$RANDOM; $2"
        tail -n 1 "$folder/programs/list.txt" >>"$folder/programs/some-tests.txt"
        sed -i '$d' "$folder/programs/list.txt"
}
tests each 'echo "@test began a[1]
@test passed a[1]
@test began b
@test failed,TypeError b
@test skipped c"'
tests other 'echo "@test passed a
@test $([ $shim = 1 ] && echo failed,MemoryError || echo passed) b 1
@test passed b 2"'
tests reason 'echo "@test $([ $shim = 1 ] && echo failed,MemoryError || echo failed,TypeError) b"'
tests flaky 'echo "@test $([ $((turn % 2)) = 1 ] && echo failed,TypeError || echo passed) b
@test passed c"'
tests sticky 'echo "@test $([ $((turn % 2)) = 1 ] && echo failed,TypeError || echo passed) b 1
@test $([ $shim = 1 ] && echo failed,TypeError || echo passed) b 2"'
tests lost 'echo "@test passed a"; [ $shim = 1 ] || echo "@test passed b"'
tests early 'echo "@test passed a"; [ $shim = 1 ] && echo "@test stopped b" || echo "@test passed b"'
tests earlywrong 'echo "@test $([ $shim = 1 ] && echo failed,TypeError || echo passed) a"; echo "@test stopped b"'
# What one run alone came to, before it ran out of time, and what becomes of it with more time.
tests unreached '[ $shim = 0 ] && { echo "@test stopped b"; exit; }; echo "@test failed,TypeError b"'
tests behind '[ $shim = 0 ] && [ "$GR_TEST_LONGER" = 1 ] && { echo "@test stopped b"; exit; }
echo "@test failed,TypeError b"'
tests broken '[ $shim = 0 ] && [ "$GR_TEST_LONGER" = 1 ] && { echo "@test stopped b"; exit; }
[ $shim = 0 ] && echo "@test passed b" || echo "@test failed,TypeError b"'
tests ahead '[ $shim = 1 ] && [ "$GR_TEST_LONGER" = 1 ] && { echo "@test stopped b"; exit; }
echo "@test failed,TypeError b"'
tests further '[ $shim = 0 ] && { echo "@test passed a"; echo "@test stopped b"; exit; }; echo "@test passed a
@test passed b"'
tests unsettest 'echo "@test $([ $dirty = 1 ] && echo failed,AssertionError || echo passed) a
@test passed b"'
tests unsetother 'echo "@test $([ $dirty = 1 ] && echo failed,AssertionError || echo passed) a
@test $([ $shim = 1 ] && echo failed,AssertionError || echo passed) b"'
tests dies 'echo "@test passed a"; echo "@test began b"; [ $shim = 0 ] || kill -SEGV $$; echo "@test passed b"'
tests endless 'echo "@test passed a"; sleep 30'
tests endlesswrong 'echo "@test $([ $shim = 1 ] && echo failed,TypeError || echo passed) a"; sleep 30'
tests nothing 'echo "@test error,collecting file"; exit 1'
# card NAME OPTIONS: notes which card it sees, and how many others see it at the moment.
card() {
        stand_in "$1" "$2" 'at='"$folder"'/card.${CUDA_VISIBLE_DEVICES:-all}; echo >>"$at"; mkdir "$at.$$"
sleep 0.2; others=$(ls -d "$at".* | wc -l); rmdir "$at.$$"; echo "$others" >>'"$folder/$1.others"
        tail -n 1 "$folder/programs/list.txt" >>"$folder/programs/cards.txt"
        sed -i '$d' "$folder/programs/list.txt"
}
for name in one two three four; do
        card $name alone
done
for name in five six; do
        card $name ""
done
card seven "alone all"
printf 'behaviour | 60 | quick | %q\n' "$build/tests/gpu/transparency" >>"$folder/programs/list.txt"
printf 'unwritten | 60 | quick | %q\n' "$build/tests/transparency/unwritten" >>"$folder/programs/list.txt"
printf 'pitched | 60 | | %q pitched\n' "$build/tests/transparency/unwritten" >>"$folder/programs/list.txt"
printf 'missing | 5 | | /nonexistent/program\n' >>"$folder/programs/list.txt"
printf '%s\n' '# comment' '*noted ^[-+] size [12]$ -> known to be so' >"$folder/notes"

run() {
        "$script" --simulated --programs "$folder/programs" --scripts none --notes "$folder/notes" \
                --logs "$folder/logs" --out "$folder/table.md" "$@" "$build" >"$folder/said" 2>"$folder/progress"
}

# expect NAME VERDICT [TEXT]: the row of NAME in the table.
expect() {
        local row
        row=$(grep "^| $1 |" "$folder/table.md")
        [[ $row == *"| $2 |"* && $row == *"${3:-}"* ]] || fail "$1 should be \"$2\" with \"${3:-}\": $row"
}

# served NAME PERCENT: at least so much of what it asked for came from the cache.
served() {
        local row
        row=$(grep "^| $1 |" "$folder/table.md")
        [[ $row =~ \ ([0-9]+)\ of\ ([0-9]+)\ \| ]] && [ "${BASH_REMATCH[2]}" -gt 0 ] &&
                [ $((100 * BASH_REMATCH[1])) -ge $(($2 * BASH_REMATCH[2])) ]
}

# The first column of the table, its heading included.
names() {
        sed -n '/^## Tests/q;s/^| \([a-z]*\) | .*/\1/p' "$folder/table.md" | paste -sd ' '
}

run
must "exit status 1 with unexplained differences" [ $? -eq 1 ]
for name in equal times files threads; do
        expect $name yes
done
for name in line status error output order hides loses unsetmore unsetcrash; do
        expect $name NO "**unexplained**"
done
expect crash NO "signal 11"
expect hangs NO "timed out"
expect varies yes "varies natively"
expect unsteady "no verdict" "natively"
expect fails yes "fails natively: cannot"
expect waived yes "exit 2, waived"
expect absent skipped "no such package"
expect slow "no verdict" "timed out both ways"
expect group yes
expect cards skipped "needs 64 cards"
expect noted NO "known to be so"
expect halfnoted NO "**unexplained**"
expect missing skipped "No such file"
expect behaviour yes
expect unset "unset memory" "differs alike without a cache"
expect unwritten "unset memory" "differs alike without a cache"
expect pitched "unset memory" "differs alike without a cache"
must "nearly all from the cache" served behaviour 90
must "all from the cache, from the first on" served unwritten 100
must "how many were served" grep -q '^Of 3 that asked .* memory 3 had some of it from the cache' "$folder/table.md"
must "a row for each program" [ "$(names | wc -w)" -eq $(($(wc -l <"$folder/programs/list.txt") + 1)) ]
must "the list's order" [ "$(names | cut -d ' ' -f 2-4)" = "equal times files" ]
must "nothing left in the programs' folder" [ "$(ls "$folder/programs/files")" = input ]

run --programs none --tests "$folder/programs/some-tests.txt" "$folder/project"
for name in each early behind ahead further; do
        expect $name yes
done
expect unreached "no verdict" "failed in one run, and the other did not come to it: b"
expect behind yes "ok: 1 failed | ok: 1 failed"
expect broken NO "\`- passed b\`; \`+ failed,TypeError b\`"
expect further yes "1 tests compared, 1 that passed in one run not"
expect unsettest "unset memory"
expect unsetother NO "b"
expect each yes "ok: 1 passed, 1 failed, 1 skipped"
expect early yes "1 tests compared"
expect other NO "\`- passed b 1\`; \`+ failed,MemoryError b 1\`"
expect reason NO "TypeError b"
expect flaky yes "varies natively too, not compared: 1 test: b"
expect sticky NO "\`- passed b 2\`; \`+ failed,TypeError b 2\`"
expect lost NO "not run b"
expect earlywrong NO "TypeError a"
expect dies NO "signal 11 during b"
expect endless "no verdict" "timed out both ways, after 5 s, 1 tests compared"
expect endlesswrong NO "TypeError a"
expect nothing yes "fails natively"
must "a part of its own in the table" grep -q '^## Tests of some$' "$folder/table.md"
must "the project's folder as it was" [ "$(ls "$folder/project")" = here ]
tar -cf "$folder/project.tar" -C "$folder/project" here
run --programs none --tests "$folder/programs/some-tests.txt" "$folder/project.tar" --only each
expect each yes

# Two cards: each program sees one, and who wants to be alone is; who wants all sees all.
mkdir "$folder/cards"
mv "$folder/programs/cards.txt" "$folder/cards/list.txt"
sed -i "s|@/|$folder/programs/|" "$folder/cards/list.txt"
GRSIM_DEVICES=2 run --programs "$folder/cards" --jobs 1
must "exit status 0 on two cards" [ $? -eq 0 ]
must "both cards are used" [ -e "$folder/card.0" -a -e "$folder/card.1" ]
must "where it ran" grep -qE '^Card: no card: the simulated device; CUDA 1[0-9.]+; .*[0-9-]{10}\.$' "$folder/table.md"
must "who wants all cards sees all, others do not" [ "$(wc -l <"$folder/card.all")" -eq 2 ]
for name in one two three four; do
        must "$name is alone on its card" [ "$(paste -sd ' ' "$folder/$name.others")" = "1 1" ]
done

run --quick
must "exit status 0 when all is the same" [ $? -eq 0 ]
must "the short run has the quick ones only" [ "$(names)" = "program equal behaviour unwritten" ]
turns=$(wc -l <"$folder/equal.turns")
run --only "[el]*" --resume
must "what was done is not done again" [ "$(wc -l <"$folder/equal.turns")" -eq "$turns" ]
must "the rest is, and both are in the table" [ "$(names)" = "program equal line error loses" ]
run --only "equal" --set GPURECLAIM_POOL=none --resume
must "not where the settings are others" grep -q "other settings" "$folder/progress"
run --only "noted"
must "exit status 0 when all is explained" [ $? -eq 0 ]
run --only "behaviour" --set GPURECLAIM_POOL=none
must "settings reach the shim" grep -q 'GPURECLAIM_POOL=none' "$folder/table.md"
must "without a pool nothing comes from the cache" grep -qE '^\| behaviour .*\| 0 of [0-9]+ \|' "$folder/table.md"
run --only "unwritten" --cold
must "not from the cache in a cold start" grep -qE '^\| unwritten .*\| yes \| 0 of [1-9]' "$folder/table.md"
for pool in split auto; do
        run --only "unwritten" --set GPURECLAIM_POOL=$pool
        expect unwritten "unset memory"
        must "from the cache of $pool, too" served unwritten 100
done
[ $failed -eq 0 ] || cat "$folder/said" "$folder/table.md"
exit $failed
