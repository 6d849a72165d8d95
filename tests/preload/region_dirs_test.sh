#!/bin/bash
# Places where no region can be: the program must work alone; and where it lies when no folder is named, whatever others
# have put there. Usage: region_dirs_test.sh PROGRAM, environment as for
# run-test. Exit status 77 where this machine lets nobody mount.
set -u
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
unshare -rm true 2>/dev/null || { echo "skipped: unshare -rm is not allowed here"; exit 77; }

# within SCRIPT: in a mount namespace of its own, with $place a folder to mount on.
within() {
        local place=$folder/place
        mkdir -p "$place"
        place=$place program=$1 shim=$GR_TEST_SHIM LD_LIBRARY_PATH=${GR_TEST_SIM:-${LD_LIBRARY_PATH:-}} \
                unshare -rm bash -c "$2
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
# Mapped memory of the simulated device lies in a file.
within "$1" 'export GPURECLAIM_POOL=bins; ulimit -f 100; mount -t tmpfs tmpfs "$place"' ||
        { echo "FAILED: a limit on file sizes"; failed=1; }
within "$1" 'mount -t tmpfs tmpfs "$place" && chmod 0500 "$place"' ||
        { echo "FAILED: a folder without rights"; failed=1; }

# shared SCRIPT: with a /dev/shm of its own, in which SCRIPT has put something, two processes must have one limit. That
# the folder is not ours alone stands for another user's.
shared() {
        program=$1 shim=$GR_TEST_SHIM LD_LIBRARY_PATH=${GR_TEST_SIM:-${LD_LIBRARY_PATH:-}} unshare -rm bash -c "
                mount -t tmpfs -o mode=1777 tmpfs /dev/shm && (cd /dev/shm && $2) &&
                for i in 1 2; do
                        LD_PRELOAD=\$shim GPURECLAIM_GROUP_LIMIT=512MiB GPURECLAIM_LOG=error \$program default-dir ||
                                exit 1
                done
                [ \"\$(find /dev/shm -mindepth 1 -type d -perm 700 | wc -l)\" -eq 1 ] || { find /dev/shm; exit 1; }"
}
shared "$1" true || { echo "FAILED: an empty /dev/shm"; failed=1; }
shared "$1" 'mkdir -m 0777 gpureclaim-0' || { echo "FAILED: a folder of the name in /dev/shm"; failed=1; }
shared "$1" ': >gpureclaim-0' || { echo "FAILED: a file of the name in /dev/shm"; failed=1; }
shared "$1" 'ln -s elsewhere gpureclaim-0' || { echo "FAILED: a link of the name in /dev/shm"; failed=1; }
shared "$1" 'mkdir -m 0700 gpureclaim-0-x1' || { echo "FAILED: an own folder of another name in /dev/shm"; failed=1; }
exit $failed
