#!/bin/bash
# The image of tools/packaging/Containerfile: built, and the command used in it. It needs buildah, and what the file
# names from the network: where the base images cannot be had, it is skipped. Usage: container_test.sh SOURCE_FOLDER
set -u
. "$(dirname "$0")/../support/fail.sh"
source=$1 file=$1/tools/packaging/Containerfile image=localhost/gpureclaim-test
command -v buildah >/dev/null || { echo "no buildah here" && exit 77; }
out=$(mktemp) container=
# shellcheck disable=SC2317
clean() {
        [ -z "$container" ] || buildah rm "$container" >/dev/null
        buildah rmi "$image" >/dev/null 2>&1
        rm -f "$out"
}
trap clean EXIT

while read -r base; do
        buildah pull -q --policy missing "$base" >/dev/null 2>&1 || { echo "no $base here" && exit 77; }
done < <(sed -nE 's/^FROM ([^ ]*).*/\1/p' "$file")
buildah bud -f "$file" -t "$image" "$source" >"$out" 2>&1 || { cat "$out" && exit 1; }
container=$(buildah from --pull-never "$image") || exit 1

# says WORDS COMMAND...
says() {
        local words=$1
        shift
        buildah run "$container" -- "$@" >"$out" 2>&1
        grep -qF -- "$words" "$out" || fail "$* does not say \"$words\": $(cat "$out")"
}
says "gpureclaim $("$source/scripts/package" --version)" gpureclaim --version
says "gpureclaim would work here." gpureclaim doctor --sim
says 'GPURECLAIM_HARD_LIMIT          1.000 GiB' gpureclaim run --sim --limit 1GiB -- gpureclaim options
# These two load a library of their own.
says "not understood (expected HOST:PORT" gpureclaim serve --listen nowhere
says "not understood (expected a time" gpureclaim top --interval 0
exit $failed
