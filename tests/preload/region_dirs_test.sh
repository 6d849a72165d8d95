#!/bin/bash
# Places where no region can be: the program must work alone. Usage: region_dirs_test.sh PROGRAM, environment as for
# run-test. Exit status 77 where this machine lets nobody mount.
set -u
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
unshare -rm true 2>/dev/null || { echo "skipped: unshare -rm is not allowed here"; exit 77; }

# within SCRIPT: in a mount namespace of its own, with $place a folder to mount on.
within() {
        local place=$folder/place
        mkdir -p "$place"
        place=$place program=$1 shim=$GR_TEST_SHIM LD_LIBRARY_PATH=${GR_TEST_SIM:-${LD_LIBRARY_PATH:-}} unshare -rm bash -c "$2
                LD_PRELOAD=\$shim GPURECLAIM_REGION_DIR=\$place/region \$program alone"
}
failed=0
within "$1" 'mount -t tmpfs -o size=64k tmpfs "$place" && mkdir -m 0700 "$place/region" &&
        { cat /dev/zero >"$place/filler" 2>/dev/null || true; }' || { echo "FAILED: a full file system"; failed=1; }
within "$1" 'mount -t tmpfs -o size=1m tmpfs "$place" && mount -o remount,ro "$place"' ||
        { echo "FAILED: a read-only file system"; failed=1; }
within "$1" 'mount -t tmpfs tmpfs "$place" && mkdir -m 0777 "$place/region"' ||
        { echo "FAILED: a folder that others can write to"; failed=1; }
within "$1" 'mount -t tmpfs tmpfs "$place" && mkdir -m 0700 "$place/region" && : >"$place/elsewhere" &&
        for i in default; do ln -s ../elsewhere "$place/region/$i"; done' || { echo "FAILED: links"; failed=1; }
within "$1" 'mount -t tmpfs tmpfs "$place" && : >"$place/region"' || { echo "FAILED: a file for a folder"; failed=1; }
within "$1" 'ulimit -f 100; mount -t tmpfs tmpfs "$place"' || { echo "FAILED: a limit on file sizes"; failed=1; }
within "$1" 'mount -t tmpfs tmpfs "$place" && chmod 0500 "$place"' || { echo "FAILED: a folder without rights"; failed=1; }
exit $failed
