#!/bin/sh
# Prints the linker's version script for the hooks of $1 (hooks.def). Symbols that the code exports (GR_EXPORT) have no
# version, so that they replace functions of any version. Hooks of the runtime and of CUPTI have the versions of these
# libraries. The first version must have no symbols: a program that asks for no version would get those. Some linkers
# export the beginning of a section (GR_SET_UP_BY) unless told.
echo 'gpureclaim { local: gr_*; __start_gr_*; };'
for number in 12 13; do
        for part in 'RUNTIME cudart' 'CUPTI cupti'; do
                echo "lib${part#* }.so.$number { global:"
                sed -n "s/^GR_${part% *}(\([A-Za-z0-9_]*\))$/  \1;/p" "$1"
                echo '};'
        done
done
