#!/usr/bin/env bash
# Drivers that lack something or fail: the program gets what it would get natively, or the driver's own error, and never
# corrupted memory.
#
#   driver_faults_test.sh PART PROCESS SAFETY OLD_DRIVER.PY PINNED FIRST TRANSPARENCY GRAPH_EDGES
#
# PART is one of those in the table at the end, the others are the programs of those names and what makes an older
# driver; GR_TEST_SHIM is the library, GR_TEST_SIM the folder of the simulated device.
set -u
. "$(dirname "$0")/../support/fail.sh"

wanted=$1 process=$2 safety=$3 old_driver=$4 pinned=$5 first=$6 transparency=$7 graph_edges=$8
folder=$(mktemp -d) || exit 2
trap 'rm -rf "$folder"' EXIT
shown=("$folder/out" "$folder/err")
rows=0

# command_of PROGRAM [ARGUMENT...]: in the array command what a row of the table runs.
command_of() {
        local arguments=("${@:2}")
        case $1 in
        process) command=(env "GRSIM_TRACE=$folder/trace" "$process" plain) ;;
        safety) command=("$safety" --sizes=4KiB,3MiB --spin-us=5000) ;;
        soak) command=("$safety" --seconds=2 --threads=4 --streams=4) ;;
        *) command=("${!1}") ;;
        esac
        command+=("${arguments[@]}")
}

# driver_of DRIVER: in the array driver the settings for a driver of the table.
driver_of() {
        local lacks=${1#-} old
        case $1 in
        whole) driver=() ;;
        -*)
                old=$folder/old-${lacks//,/-}
                driver=("LD_LIBRARY_PATH=$old" "GRSIM_MISSING=$lacks")
                [ -e "$old/libcuda.so.1" ] && return
                mkdir -p "$old"
                # shellcheck disable=SC2086
                python3 "$old_driver" "$GR_TEST_SIM/libcuda.so.1" "$old/libcuda.so.1" ${lacks//,/ } ||
                        fail "$title: no older driver"
                ;;
        GRSIM_*) driver=("$1") ;;
        *) driver=("GRSIM_FAULT=$1") ;;
        esac
}

# under STATUS NAME=VALUE...: runs the command; output in $folder/out and err, statistics in stats, calls in trace
under() {
        local want=$1 status
        shift
        rm -f "$folder/stats" "$folder/trace"
        timeout 60 env "LD_LIBRARY_PATH=$GR_TEST_SIM" "LD_PRELOAD=$GR_TEST_SHIM" \
                "GPURECLAIM_STATS_FILE=$folder/stats" "$@" "${command[@]}" >"$folder/out" 2>"$folder/err"
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

# one_line TEXT: that is all that was said.
one_line() {
        [ "$(wc -l <"$folder/err")" -eq 1 ] && grep -q "$1" "$folder/err" || fail "$title: expected one line: $1"
}

# What a row of the table says of its run.
is_quiet() { [ ! -s "$folder/err" ] || fail "$title: said something"; }
warns_of_fences() { one_line "warn: the driver's fences fail (CUDA error"; }
warns_of_graphs() { one_line "warn: the driver does not tell when a graph is gone (CUDA error 999)"; }
warns_of_uuid() { one_line "the driver does not tell the device's UUID"; }
warns_of_lack() { one_line "the driver lacks ${name#-}"; }
has_waited() { [ "$(stat syncs)" -gt 0 ] || fail "$title: nobody waited for the device"; }
has_tried() { ! grep -q ' 0 rows\|^0 rows' "$folder/out" || fail "$title: nothing was tried"; }
has_climbed() { [ "$(stat ladder.ready.tries)" -gt 0 ] || fail "$title: the ladder was not used"; }
has_not_climbed() { [ "$(stat ladder.ready.tries)" -eq 0 ] || fail "$title: the ladder was used"; }
hides_failures() { [ "$(stat failures)" -eq 0 ] || fail "$title: the program was told"; }
has_no_stats() { [ ! -e "$folder/stats" ] || fail "$title: statistics of nothing"; }
has_group_limit() { [ "$(stat devices.0.group_limit_bytes)" = 1073741824 ] || fail "$title: not the group's limit"; }
# What the driver does not tell is not told.
knows_no_free() { [ "$(stat devices.0.device_free_bytes)" = None ] || fail "$title: the free memory is told"; }
maps_memory() { has_called cuMemMap && ! has_called cuMemAlloc_v2 || fail "$title: no mapped memory"; }
maps_none() {
        has_called cuMemAlloc_v2 && ! has_called 'cuMem\(Create\|AddressReserve\)' || fail "$title: mapped memory"
}
frees_by_driver() { [ "$(grep -c '^cuMemFree_v2$' "$folder/trace")" -eq 40 ] || fail "$title: frees by another way"; }
is_refused_with_2() { is_refused_with cuMemAlloc 2; }
is_refused_with_700() { is_refused_with cuMemAlloc 700; }
has_no_device() { one_line '^[^[:space:]]*/process\.c:[0-9]*: cuInit(.*) returned 100$'; }
comes_back() { ! grep ': status ' "$folder/out" || fail "$title: a call that does not come back"; }

has_called() {
        grep -q "^$1\$" "$folder/trace"
}

# is_refused_with FUNCTION CODE: the driver's code ends the program.
is_refused_with() {
        grep -q ": $1(.*) returned $2\$" "$folder/err" || fail "$title: not the driver's code"
}

# A program may find the library's function where the driver has none.
is_not_found() {
        local lacks=${name#-} symbol
        for symbol in ${lacks//,/ }; do
                [ "$(grep -c "$symbol(.*): 500$" "$folder/out")" -ge 2 ] || fail "$title: $symbol: it is not NOT_FOUND"
        done
}

equals_native() {
        env "${driver[@]}" "${command[@]}" >"$folder/native"
        diff "$folder/native" "$folder/out" || fail "$title: another answer"
}

# PART | DRIVER... | SETTINGS... | PROGRAM [ARGUMENT...] | EXIT STATUS | CHECK...
#
# The program runs with each driver and each setting, and then each check. A driver is "whole", lacks functions
# whichever way they are looked up (-NAME,NAME), fails (FUNCTION:CALL=CODE, as in GRSIM_FAULT) or has a setting of the
# simulated device (GRSIM_NAME=VALUE). Settings in one word are joined by ";", and "none" are none.
table() {
        cat <<'END'
# Drivers before CUDA 12.5 have no fences for a whole context; memory must be safe all the same, and still be reused.
fences | -cuCtxRecordEvent,cuCtxWaitEvent | GPURECLAIM_REUSE=barrier | safety --expect-reuse | 0 | is_quiet has_waited
fences | -cuCtxRecordEvent,cuCtxWaitEvent | GPURECLAIM_REUSE=auto GPURECLAIM_REUSE=poll GPURECLAIM_REUSE=sync \
       | safety | 0 |
fences | -cuCtxRecordEvent,cuCtxWaitEvent | none | pinned --expect-reuse | 0 |
fences | -cuCtxRecordEvent,cuCtxWaitEvent | none | soak | 0 |
# Fences that are there but fail, once, always, or from some call on.
fences | cuCtxRecordEvent:1=999 cuCtxRecordEvent:*=700 cuCtxRecordEvent:*=2 cuCtxRecordEvent:*=900 \
         cuCtxWaitEvent:1=999 cuCtxWaitEvent:*=700 cuCtxWaitEvent:*=2 cuCtxWaitEvent:*=900 \
       | GPURECLAIM_REUSE=barrier | safety --only=HtoD | 0 | has_tried is_quiet
fences | cuCtxRecordEvent:5+=1 cuCtxWaitEvent:5+=1 | GPURECLAIM_REUSE=barrier | safety --only=HtoD \
       | 0 | has_tried warns_of_fences
# A fence that fails: pinned memory is no longer cached, and goes the driver's way.
fences | cuCtxRecordEvent:1=999 cuCtxRecordEvent:*=700 cuEventQuery:5+=999 cuEventCreate:*=2 | none | pinned \
       | 0 | is_quiet

# What the library calls for itself, with the cache kept, given back by the helper thread, and given back by the ladder.
calls | cuEventQuery:*=999 cuEventCreate:*=2 cuStreamCreate:*=2 cuMemFreeAsync:*=1 cuCtxSynchronize:*=700 \
        cuPointerGetAttribute:*=1 cuDevicePrimaryCtxGetState:*=999 cuCtxGetDevice:*=201 \
        cuThreadExchangeStreamCaptureMode:*=1 cuDeviceTotalMem_v2:*=999 \
      | GPURECLAIM_RELEASE_THRESHOLD=none GPURECLAIM_RELEASE_THRESHOLD=0 GPURECLAIM_HARD_LIMIT=8MiB | process \
      | 0 | is_quiet
calls | cuMemGetInfo_v2:*=999 \
      | GPURECLAIM_RELEASE_THRESHOLD=none GPURECLAIM_RELEASE_THRESHOLD=0 GPURECLAIM_HARD_LIMIT=8MiB | process \
      | 0 | is_quiet knows_no_free
# That a graph is gone is told by a user object: one that fails is made again.
calls | cuUserObjectCreate:1=999,cuGraphLaunch:1=999 | none | graph_edges --refused | 0 | is_quiet
calls | cuUserObjectCreate:*=999,cuGraphLaunch:1=999 cuGraphRetainUserObject:*=999,cuGraphLaunch:1=999 | none \
      | graph_edges --refused | 0 | warns_of_graphs

missing | -cuMemFreeAsync,cuMemFreeAsync_ptsz | GPURECLAIM_RELEASE_THRESHOLD=0 | process | 0 | is_quiet
# Nor does it need to be told of captures.
missing | -cuThreadExchangeStreamCaptureMode \
        | GPURECLAIM_RELEASE_THRESHOLD=none GPURECLAIM_RELEASE_THRESHOLD=0 GPURECLAIM_HARD_LIMIT=8MiB | process \
        | 0 | is_quiet
# Without one of the functions for pinned memory none takes the place of device memory.
missing | -cuMemHostAlloc -cuMemHostGetDevicePointer_v2 -cuMemFreeHost \
        | GPURECLAIM_HARD_LIMIT=4MiB;GPURECLAIM_SPILL=64MiB;GPURECLAIM_LOG=silent | process | 99 | is_refused_with_2
# The device's UUID names a group's region: it is found by either function, and without both the process works alone.
missing | -cuDeviceGetUuid_v2 | GPURECLAIM_GROUP_LIMIT=1GiB | process | 0 | is_quiet has_group_limit
missing | -cuDeviceGetUuid,cuDeviceGetUuid_v2 | GPURECLAIM_GROUP_LIMIT=1GiB | process | 0 | warns_of_uuid
# With all functions that map memory, all of it is mapped; without one of them, the driver allocates.
missing | whole | GPURECLAIM_POOL=split | process | 0 | maps_memory
missing | -cuMemCreate -cuMemRelease -cuMemMap -cuMemUnmap -cuMemSetAccess -cuMemAddressReserve -cuMemAddressFree \
          -cuMemGetAllocationGranularity -cuMemExportToShareableHandle -cuMemImportFromShareableHandle \
        | GPURECLAIM_POOL=split | process | 0 | maps_none
# Nor is any mapped where the driver does not tell that it can map memory and share it (102, 103).
missing | cuDeviceGetAttribute:*=1 cuMemGetAllocationGranularity:*=1 GRSIM_LACKS=102 GRSIM_LACKS=103 \
        | GPURECLAIM_POOL=split | process | 0 | maps_none
# A driver that is not ready to give access is asked again; one that never is has no memory.
missing | cuMemSetAccess:1=600 | GPURECLAIM_POOL=split GPURECLAIM_POOL=auto | process \
        | 0 | is_quiet maps_memory has_not_climbed
missing | cuMemSetAccess:*=600 | GPURECLAIM_POOL=split GPURECLAIM_POOL=auto | process \
        | 0 | is_quiet has_climbed hides_failures
missing | -cuMemAllocAsync,cuMemAllocAsync_ptsz,cuMemAllocFromPoolAsync,cuMemFreeAsync,cuMemFreeAsync_ptsz \
        | none | first | 0 | is_not_found
# The device is full for one call: the ladder is climbed and the program does not notice.
missing | cuMemAlloc_v2:1=2,cuMemCreate:1=2 | none | process | 0 | is_quiet has_climbed hides_failures
missing | cuMemAlloc_v2:*=2,cuMemCreate:*=2 | none | process | 99 | is_refused_with_2
missing | cuMemAlloc_v2:*=700,cuMemCreate:*=700 | none | process | 99 | is_refused_with_700

# Without a function that nothing can do without, every call goes to the driver, and that is said once ...
needed | -cuEventCreate -cuCtxGetCurrent -cuStreamSynchronize -cuCtxPushCurrent_v2 | none | process \
       | 0 | warns_of_lack frees_by_driver has_no_stats
needed | -cuEventCreate -cuCtxGetCurrent -cuStreamSynchronize -cuCtxPushCurrent_v2 | GPURECLAIM_LOG=silent \
       | process | 0 | is_quiet
# ... whatever it is that is called first, and whatever it is about, also what stands behind that function in the list.
needed | -cuStreamSynchronize | GPURECLAIM_LOG=silent | first | 0 | comes_back
needed | -cuCtxGetCurrent | GPURECLAIM_LOG=silent | transparency | 0 | equals_native
needed | -cuCtxPushCurrent_v2 | GPURECLAIM_LOG=silent | safety | 0 |
# No device, and no driver.
needed | GRSIM_DEVICES=0 | none | process | 99 | has_no_device
END
}

# No -r: a row that ends in a backslash goes on in the next line.
# shellcheck disable=SC2162
while IFS='|' read part drivers settings program status checks; do
        [ "${part// /}" = "$wanted" ] || continue
        rows=$((rows + 1))
        read -ra drivers <<<"$drivers"
        read -ra settings <<<"$settings"
        read -ra program <<<"$program"
        read -ra checks <<<"$checks"
        for name in "${drivers[@]}"; do
                for setting in "${settings[@]}"; do
                        title="$name, $setting, ${program[*]}"
                        driver_of "$name"
                        command_of "${program[@]}"
                        IFS=';' read -ra words <<<"${setting#none}"
                        under $status "${driver[@]}" "${words[@]}"
                        for check in "${checks[@]}"; do
                                $check || fail "$title: $check does not work"
                        done
                done
        done
done < <(table)
[ $rows -gt 0 ] || { echo "no such part: $wanted" && exit 2; }
exit $failed
