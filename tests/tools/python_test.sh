#!/bin/bash
# The figures that the Python module reads are those of the structure in gpureclaim.h, in its order.
# Usage: python_test.sh GPURECLAIM_H FOLDER_OF_GPURECLAIM_PY
set -u
command -v python3 >/dev/null || exit 77
in_header=$(sed -n '/^struct gpureclaim_status {/,/^};/s/^ *uint64_t \([a-z_]*\);.*/\1/p' "$1")
in_python=$(PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$2 python3 -c '
import gpureclaim
print(*(name for name, _ in gpureclaim._Status._fields_[1:]), sep="\n")') || exit 1
[ -n "$in_header" ] && diff <(echo "$in_header") <(echo "$in_python")
