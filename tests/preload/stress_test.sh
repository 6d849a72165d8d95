#!/usr/bin/env bash
# Random traffic for $GR_TEST_SECONDS (5) from the seed $GR_TEST_SEED (a new one each time, printed).
#
#   stress_test.sh RUN-TEST SAFETY [NAME=VALUE...]
set -u

run_test=$1 safety=$2
shift 2
seed=${GR_TEST_SEED:-$RANDOM$RANDOM}
echo "GR_TEST_SEED=$seed"
exec "$run_test" shim GPURECLAIM_LOG=error "$@" "$safety" --seconds="${GR_TEST_SECONDS:-5}" \
        --threads=6 --streams=8 --seed="$seed"
