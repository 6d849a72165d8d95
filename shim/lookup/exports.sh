#!/bin/sh
# Prints the linker's version script for the hooks of $1. What the code marks as exported has no version, so that it
# stands in for functions of any; the runtime's and CUPTI's functions have theirs. The first version is nobody's:
# programs that ask for none would be given one of that.
echo 'gpureclaim { local: gr_*; };'
for number in 12 13; do
        for part in 'RUNTIME cudart' 'CUPTI cupti'; do
                echo "lib${part#* }.so.$number { global:"
                sed -n "s/^GR_${part% *}(\([A-Za-z0-9_]*\))$/  \1;/p" "$1"
                echo '};'
        done
done
