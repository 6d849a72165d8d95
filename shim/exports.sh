#!/bin/sh
# Prints the linker's version script for the hooks of $1: what the library exports, and nothing else.
echo '{ global: dlsym; gpureclaim_*;'
sed -n 's/^GR_\(HOOK\|HOOK_NEEDED\|NVML\)(\([A-Za-z0-9_]*\))$/  \2;/p' "$1"
echo 'local: *; };'
