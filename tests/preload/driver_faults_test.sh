#!/usr/bin/env bash
# Drivers that lack something or fail: the program gets what it would get natively, or the driver's own error, and never
# corrupted memory.
#
#   driver_faults_test.sh PART PROCESS SAFETY OLD_DRIVER.PY PINNED FIRST TRANSPARENCY
#
# PART is one of the functions below, the others are the programs of those names and what makes an older driver;
# GR_TEST_SHIM is the library, GR_TEST_SIM the folder of the simulated device.
set -u
. "$(dirname "$0")/../support/fail.sh"

part=$1 process=$2 safety=$3 old_driver=$4 pinned=$5 first=$6 transparency=$7
folder=$(mktemp -d) || exit 2
trap 'rm -rf "$folder"' EXIT
shown=("$folder/out" "$folder/err")
small=("--sizes=4KiB,3MiB" --spin-us=5000)

# under STATUS TITLE [NAME=VALUE...] PROGRAM...: under the library; output in $folder/out and err, statistics in stats
under() {
        local want=$1 title=$2 status
        shift 2
        rm -f "$folder/stats"
        timeout 60 env LD_LIBRARY_PATH="$GR_TEST_SIM" "LD_PRELOAD=$GR_TEST_SHIM" \
                "GPURECLAIM_STATS_FILE=$folder/stats" "$@" >"$folder/out" 2>"$folder/err"
        status=$?
        [ $status -eq "$want" ] || fail "$title: exit status $status, expected $want"
        printf '%s: exit status %d%s\n' "$title" $status \
                "$(sed -n 's/^\([0-9]* rows\): \([0-9]* ok\), \([0-9]* corrupted\).*/, \1, \3/p' "$folder/out")"
}

# stat NAME: a figure of the last run
stat() {
        python3 -c 'import json, sys
stats = json.load(open(sys.argv[1]))
for part in sys.argv[2].split("."):
    stats = stats[int(part) if part.isdigit() else part]
print(stats)' "$folder/stats" "$1"
}

# old NAME...: a folder with a driver that lacks the names
old() {
        mkdir -p "$folder/old-$1"
        [ -e "$folder/old-$1/libcuda.so.1" ] ||
                python3 "$old_driver" "$GR_TEST_SIM/libcuda.so.1" "$folder/old-$1/libcuda.so.1" "$@" ||
                        fail "no older driver without $*"
        echo "LD_LIBRARY_PATH=$folder/old-$1"
}

quiet() {
        [ ! -s "$folder/err" ] || fail "$1: said something"
}

# warned TITLE: nothing but that fences fail, once, which the program does not see by itself.
warned() {
        [ "$(wc -l <"$folder/err")" -eq 1 ] && grep -q "warn: the driver's fences fail (CUDA error" "$folder/err" ||
                fail "$1: expected one warning"
}

fences() {
        # Drivers before CUDA 12.5 have no fences for a whole context; memory must be safe all the same, and still be
        # reused.
        fences=$(old cuCtxRecordEvent cuCtxWaitEvent)
        missing=GRSIM_MISSING=cuCtxRecordEvent,cuCtxWaitEvent
        under 0 "no fences in the driver" "$fences" $missing GPURECLAIM_REUSE=barrier \
                "$safety" "${small[@]}" --expect-reuse
        quiet "no fences in the driver"
        [ "$(stat syncs)" -gt 0 ] || fail "no fences in the driver: and nobody waited for the device"
        for reuse in auto poll sync; do
                under 0 "no fences in the driver, $reuse" "$fences" $missing GPURECLAIM_REUSE=$reuse \
                        "$safety" "${small[@]}"
        done
        under 0 "no fences in the driver, pinned" "$fences" $missing "$pinned" --expect-reuse
        under 0 "no fences in the driver, soak" "$fences" $missing "$safety" --seconds=2 --threads=4 --streams=4

        # Fences that are there but fail, once, always, or from some call on.
        for symbol in cuCtxRecordEvent cuCtxWaitEvent; do
                for fault in '1=999' '*=700' '*=2' '*=900' '5+=1'; do
                        under 0 "$symbol:$fault" "GRSIM_FAULT=$symbol:$fault" GPURECLAIM_REUSE=barrier \
                                "$safety" "${small[@]}" --only=HtoD
                        grep -q ' 0 rows\|^0 rows' "$folder/out" && fail "$symbol:$fault: nothing was tried"
                        if [ $fault = 5+=1 ]; then warned "$symbol:$fault"; else quiet "$symbol:$fault"; fi
                done
        done
        # A fence that fails: pinned memory is no longer cached, and goes the driver's way.
        for fault in cuCtxRecordEvent:1=999 cuCtxRecordEvent:\*=700 cuEventQuery:5+=999 cuEventCreate:\*=2; do
                under 0 "$fault, pinned" "GRSIM_FAULT=$fault" "$pinned"
                quiet "$fault, pinned"
        done
}

calls() {
        # What the library calls for itself, with the cache kept, given back by the background thread, and given back by
        # the ladder.
        for fault in cuEventQuery:\*=999 cuEventCreate:\*=2 cuStreamCreate:\*=2 cuMemFreeAsync:\*=1 \
                cuCtxSynchronize:\*=700 cuMemGetInfo_v2:\*=999 cuPointerGetAttribute:\*=1 \
                cuDevicePrimaryCtxGetState:\*=999 cuCtxGetDevice:\*=201 cuThreadExchangeStreamCaptureMode:\*=1 \
                cuDeviceTotalMem_v2:\*=999; do
                for settings in GPURECLAIM_RELEASE_THRESHOLD=none GPURECLAIM_RELEASE_THRESHOLD=0 \
                        GPURECLAIM_HARD_LIMIT=8MiB; do
                        under 0 "$fault, $settings" "GRSIM_FAULT=$fault" $settings "$process" plain
                        quiet "$fault, $settings"
                        # What the driver does not tell is not told.
                        [ $fault != cuMemGetInfo_v2:\*=999 ] || [ "$(stat devices.0.device_free_bytes)" = None ] ||
                                fail "$fault, $settings: $(stat devices.0.device_free_bytes) bytes free"
                done
        done
}

missing() {
        under 0 "no cuMemFreeAsync" "$(old cuMemFreeAsync cuMemFreeAsync_ptsz)" GRSIM_MISSING=cuMemFreeAsync \
                GPURECLAIM_RELEASE_THRESHOLD=0 "$process" plain
        quiet "no cuMemFreeAsync"

        # Nor does it need to be told of captures.
        for settings in GPURECLAIM_RELEASE_THRESHOLD=none GPURECLAIM_RELEASE_THRESHOLD=0 GPURECLAIM_HARD_LIMIT=8MiB; do
                under 0 "no modes of captures, $settings" "$(old cuThreadExchangeStreamCaptureMode)" $settings \
                        "$process" plain
                quiet "no modes of captures, $settings"
        done

        # Without one of the functions for pinned memory none takes the place of device memory.
        for symbol in cuMemHostAlloc cuMemHostGetDevicePointer_v2 cuMemFreeHost; do
                under 99 "no $symbol" "$(old $symbol)" GPURECLAIM_HARD_LIMIT=4MiB GPURECLAIM_SPILL=64MiB \
                        GPURECLAIM_LOG=silent "$process" plain
                grep -q ': cuMemAlloc(.*) returned 2$' "$folder/err" || fail "no $symbol: memory of another kind"
        done

        # The device's UUID names a group's region: it is found by either function, and without both the process works
        # alone.
        under 0 "no cuDeviceGetUuid_v2" "$(old cuDeviceGetUuid_v2)" GPURECLAIM_GROUP_LIMIT=1GiB "$process" plain
        quiet "no cuDeviceGetUuid_v2"
        [ "$(stat devices.0.group_limit_bytes)" = 1073741824 ] || fail "no cuDeviceGetUuid_v2: not the group's limit"
        under 0 "no UUID" "$(old cuDeviceGetUuid cuDeviceGetUuid_v2)" GPURECLAIM_GROUP_LIMIT=1GiB "$process" plain
        [ "$(wc -l <"$folder/err")" -eq 1 ] && grep -q "the driver does not tell the device's UUID" "$folder/err" ||
                fail "no UUID: expected one warning"

        # With all functions that map memory, all of it is mapped; without one of them, the driver allocates.
        under 0 "all functions" GPURECLAIM_POOL=split GRSIM_TRACE="$folder/trace" "$process" plain
        grep -q '^cuMemMap$' "$folder/trace" && ! grep '^cuMemAlloc_v2$' "$folder/trace" ||
                fail "all functions: no mapped memory"
        rm -f "$folder/trace"
        for symbol in cuMemCreate cuMemRelease cuMemMap cuMemUnmap cuMemSetAccess cuMemAddressReserve cuMemAddressFree \
                cuMemGetAllocationGranularity cuMemExportToShareableHandle cuMemImportFromShareableHandle; do
                under 0 "no $symbol" "$(old $symbol)" GPURECLAIM_POOL=split GRSIM_TRACE="$folder/trace" "$process" plain
                grep -q '^cuMemAlloc_v2$' "$folder/trace" || fail "no $symbol: no memory of another kind"
                ! grep -E '^cuMem(Create|AddressReserve)$' "$folder/trace" ||
                        fail "no $symbol: memory to be mapped all the same"
                rm -f "$folder/trace"
        done

        # A program may find the library's function where the driver has none.
        ordered="cuMemAllocAsync cuMemAllocAsync_ptsz cuMemAllocFromPoolAsync cuMemFreeAsync cuMemFreeAsync_ptsz"
        under 0 "no stream-ordered memory" "$(old $ordered)" "$first"
        for symbol in $ordered; do
                [ "$(grep -c "$symbol(.*): 500$" "$folder/out")" -ge 2 ] || fail "no $symbol: it is not NOT_FOUND"
        done

        # Where the driver does not tell that it can map memory and share it (102, 103), none is made to be mapped.
        for lack in "FAULT=cuDeviceGetAttribute:*=1" "FAULT=cuMemGetAllocationGranularity:*=1" LACKS=102 LACKS=103; do
                rm -f "$folder/trace"
                under 0 "$lack" "GRSIM_$lack" GPURECLAIM_POOL=split GRSIM_TRACE="$folder/trace" "$process" plain
                grep -q '^cuMemAlloc_v2$' "$folder/trace" || fail "$lack: no memory of another kind"
                ! grep '^cuMemCreate$' "$folder/trace" || fail "$lack: memory to be mapped all the same"
        done
        rm -f "$folder/trace"

        # The card is full for one call: the ladder is climbed and the program does not notice.
        under 0 "cuMemAlloc fails once" GRSIM_FAULT=cuMemAlloc_v2:1=2,cuMemCreate:1=2 "$process" plain
        quiet "cuMemAlloc fails once"
        [ "$(stat ladder.ready.tries)" -gt 0 ] || fail "cuMemAlloc fails once: the ladder was not used"
        [ "$(stat failures)" -eq 0 ] || fail "cuMemAlloc fails once: the program was told"
        under 99 "cuMemAlloc always fails" 'GRSIM_FAULT=cuMemAlloc_v2:*=2,cuMemCreate:*=2' "$process" plain
        grep -q ': cuMemAlloc(.*) returned 2$' "$folder/err" || fail "cuMemAlloc always fails: not the driver's code"
        under 99 "cuMemAlloc dies" 'GRSIM_FAULT=cuMemAlloc_v2:*=700,cuMemCreate:*=700' "$process" plain
        grep -q ': cuMemAlloc(.*) returned 700$' "$folder/err" || fail "cuMemAlloc dies: not the driver's code"
}

needed() {
        # Without a function that nothing can do without, every call goes to the driver, and that is said once.
        for symbol in cuEventCreate cuCtxGetCurrent cuStreamSynchronize cuCtxPushCurrent_v2; do
                # Whoever links the function does not even start without it.
                under 0 "no $symbol" "$(old $symbol)" GRSIM_TRACE="$folder/trace" "$process" plain
                [ "$(grep -c "the driver lacks $symbol" "$folder/err")" -eq 1 ] &&
                        [ "$(wc -l <"$folder/err")" -eq 1 ] ||
                        fail "no $symbol: expected one warning"
                [ "$(grep -c '^cuMemFree_v2$' "$folder/trace")" -eq 40 ] ||
                        fail "no $symbol: frees did not go to the driver"
                [ ! -e "$folder/stats" ] || fail "no $symbol: statistics of nothing"
                under 0 "no $symbol, silent" "$(old $symbol)" GPURECLAIM_LOG=silent "$process" plain
                quiet "no $symbol, silent"
                rm -f "$folder/trace"
        done
        # And whatever it is that is called first.
        under 0 "no cuStreamSynchronize, any call" "$(old cuStreamSynchronize)" GPURECLAIM_LOG=silent "$first"
        ! grep ': status ' "$folder/out" || fail "no cuStreamSynchronize: a call that does not come back"
        # And whatever it is about.
        env "$(old cuCtxGetCurrent)" "$transparency" >"$folder/native"
        under 0 "no cuCtxGetCurrent, all calls" "$(old cuCtxGetCurrent)" GPURECLAIM_LOG=silent "$transparency"
        diff "$folder/native" "$folder/out" || fail "no cuCtxGetCurrent, all calls: another answer"
        # Also to what stands behind that function in the list.
        under 0 "no cuCtxPushCurrent_v2, streams" "$(old cuCtxPushCurrent_v2)" GPURECLAIM_LOG=silent \
                "$safety" "${small[@]}"

        # No device, and no driver.
        under 99 "no device" GRSIM_DEVICES=0 "$process" plain
        [[ $(cat "$folder/err") =~ ^[^[:space:]]*/process\.c:[0-9]+:\ cuInit\(.*\)\ returned\ 100$ ]] ||
                fail "no device: said something else"
}

"$part"
exit $failed
