#!/bin/bash
# A build of a copy of the sources, elsewhere and with the same options, gives the same library and command.
# Usage: reproducible_test.sh BUILD_FOLDER SOURCE_FOLDER CC
set -u
build=$1 source=$2
for tool in meson ninja python3 tar; do
        command -v $tool >/dev/null || { echo "no $tool here" && exit 77; }
done
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder/copy/of sources"
tar -C "$source" --exclude='./build*' --exclude="./${build#"$source/"}" --exclude=./.git --exclude=./shared -c . |
        tar -C "$folder/copy/of sources" -x || exit 1
cd "$folder/copy/of sources" || exit 1

mapfile -t options < <(meson introspect --buildoptions "$build" | python3 -c '
import json, sys
for option in json.load(sys.stdin):
    if option["name"] not in ("buildtype", "install_umask") and not option["name"].startswith("python."):
        print("-D{name}={value}".format(**option))')
[ ${#options[@]} -gt 0 ] || exit 1
files=(shim/libgpureclaim.so tools/gpureclaim)
export CCACHE_DISABLE=1
{ CC=$3 meson setup "${options[@]}" deep/down/build && nice ninja -C deep/down/build "${files[@]}"; } \
        >"$folder/out" 2>&1 ||
        { tail -n 30 "$folder/out" && exit 1; }
failed=0
for file in "${files[@]}"; do
        cmp "$build/$file" "deep/down/build/$file" || failed=1
done
exit $failed
