#!/usr/bin/env python3
"""Writes a C program that calls every hooked function with bad arguments.

    generate.py HOOKS_DEF CC [CC_ARGUMENT...]

The list is shim/driver/hooks.def, but for what is passed on as it is; the signatures are those of cuda.h and
shim/newer.h, after the preprocessor. What each kind of parameter is tried with stands in arguments.h.
"""
import re
import subprocess
import sys

hooks = {name: needed for needed, name in re.findall(r"^GR_HOOK(_NEEDED)?\((\w+)\)$", open(sys.argv[1]).read(), re.M)}
preprocess = ["-E", "-P", "-D__CUDA_API_VERSION_INTERNAL", "-include", "newer.h", "-xc", "/dev/null"]
header = subprocess.run(sys.argv[2:] + preprocess,
                        check=True, capture_output=True, text=True).stdout
prototypes = dict(re.findall(r"CUresult\s+(cu\w+)\s*\(([^()]*)\)\s*;", header))


records = set(re.findall(r"typedef\s+struct\s+\w*\s*\{[^}]*\}\s*(\w+)\s*;", header))
enumerations = set(re.findall(r"typedef\s+enum\s+\w*\s*\{[^}]*\}\s*(\w+)\s*;", header))


def kind(parameter):
    words = parameter.replace("const", " ").split()
    if "*" in parameter:
        return "TEXT" if "char" in words else "POINTER"
    first = " ".join(words[:-1]) if len(words) > 1 else words[0]
    if first.startswith("CUdeviceptr"):
        return "ADDRESS"
    if first in ("size_t", "unsigned int", "unsigned long long", "cuuint64_t"):
        return "SIZE"
    if first in ("int", "CUdevice", "CUdevice_v1"):
        return "NUMBER"
    if first in records or first + "_v1" in records:
        return "RECORD"  # by value: all zero
    if first.startswith("CUmemGenericAllocationHandle"):
        return "GENERIC"
    return "ENUM" if first in enumerations else "HANDLE"  # for handles only NULL is safe natively


FIELDS = {"ENUM": "enumeration"}

print('#include "arguments.h"\n')
rows = []


def argument(i, parameter, kind):
    """The C expression for parameter i, cast to its type."""
    if kind == "RECORD":
        return f"*({parameter.split()[0]} *)v[{i}].pointer"
    cast = "void *" if "*" in parameter else re.sub(r"[A-Za-z_0-9]+$", "", parameter)
    return f"({cast})v[{i}].{FIELDS.get(kind, kind.lower())}"


for name in hooks:
    if re.match("cu(GL|VDPAU)Ctx", name):  # of cudaGL.h and cudaVDPAU.h, which need headers of others
        continue
    if name not in prototypes:
        sys.exit(f"generate.py: no prototype of {name} in cuda.h or newer.h")
    listed = prototypes[name].strip()
    parameters = [p.strip() for p in listed.split(",")] if listed not in ("", "void") else []
    kinds = [kind(p) for p in parameters]
    print(f"static CUresult call_{name}(void *function, const union value *v)\n{{")
    arguments = ", ".join(argument(i, p, k) for i, (p, k) in enumerate(zip(parameters, kinds)))
    if not kinds:
        print("        (void)v;")
    print(f"        return ((__typeof__(&{name}))function)({arguments});\n}}\n")
    named = ", ".join("KIND_" + k for k in kinds) or "0"
    rows.append(f'        {{"{name}", call_{name}, LINKED{hooks[name]}({name}), {len(kinds)}, {{{named}}}}},')
print("const struct function functions[] = {")
print("\n".join(rows))
print("};\n\nconst unsigned function_count = sizeof functions / sizeof functions[0];")
