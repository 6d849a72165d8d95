#!/bin/bash
# A package of scripts/package: built twice, the same; installed, used, upgraded and removed without a trace. Packages
# for Debian are checked by lintian, and installed on top of this machine's system, which does not see it; there the
# commands of README.md and the guides are run as well.
# Usage: package_test.sh SOURCE_FOLDER CUDA_INCLUDE deb|wheel|tarball|rpm
set -u
. "$(dirname "$0")/../support/fail.sh"
source=$1 kind=$3
unset LD_PRELOAD LD_LIBRARY_PATH CUDA_VISIBLE_DEVICES DESTDIR CFLAGS LDFLAGS PYTHONPATH
for name in $(compgen -e GPURECLAIM_); do unset "$name"; done
# Programs of the package run from here; it may not be in memory that allows none (/tmp with noexec).
tree=$(realpath "$(mktemp -d -p "${GR_TEST_FOLDER:-$PWD}")") || exit 1
trap 'rm -rf "$tree"' EXIT
export GPURECLAIM_REGION_DIR=$tree/region CUDA_HOME=${2%/include} PYTHONDONTWRITEBYTECODE=1
# With ccache, which Meson takes by itself, the second try compiles nothing. Debian's tools change the home folder. That
# compiling gives the same twice is what reproducible_test.sh is for.
! command -v ccache >/dev/null || export CCACHE_DIR=${CCACHE_DIR:-$(ccache --get-config cache_dir)}

for try in 1 2; do
        nice "$source/scripts/package" "$kind" "$tree/$try" >"$tree/out" 2>&1
        status=$?
        [ $status -eq 0 ] || { cat "$tree/out" && exit $status; }
done
for file in "$tree"/1/*; do
        other=$tree/2/${file##*/}
        case $file in
        *.changes | *.buildinfo) ;; # tell of one build
        # A package of rpm notes the folder that it was built in; what it has inside is the same.
        *.rpm) cmp <(rpm -qp --dump "$file" 2>&1) <(rpm -qp --dump "$other" 2>&1) || failed=1 ;;
        *) cmp "$file" "$other" || failed=1 ;;
        esac
done
version=$("$source/scripts/package" --version)

# works COMMAND PYTHON: in the folder that has been installed to.
works() {
        local out
        out=$("$1" doctor --sim 2>&1) || fail "doctor: $out"
        [[ $out == *"libgpureclaim.so, version $version"* ]] || fail "doctor names another library: $out"
        out=$("$1" run --sim -- "$2" -c 'import gpureclaim; print(gpureclaim.version())' 2>&1)
        [ "$out" = "$version" ] || fail "the module under the command says $out"
}

# nothing_left FIND-ARGUMENT...
nothing_left() {
        local left
        left=$(find "$@" ! -type d 2>/dev/null)
        [ -z "$left" ] || fail "left behind: $left"
}

case $kind in
tarball)
        mkdir "$tree/one" "$tree/another[2]"
        tar -xzf "$tree/1"/*.tar.gz -C "$tree/one" && mv "$tree/one"/* "$tree/another[2]"
        cd "$tree/another[2]"/* || exit 1
        PYTHONPATH=$PWD/lib/python works "$PWD/bin/gpureclaim" python3
        nothing_left "$tree/region" "$tree/one"
        ;;
wheel)
        /usr/bin/python3 -m venv "$tree/venv" >"$tree/out" 2>&1 || { cat "$tree/out" && exit 77; }
        find "$tree/venv" | sort >"$tree/before"
        pip=("$tree/venv/bin/python3" -m pip -q --disable-pip-version-check)
        "${pip[@]}" install --no-index "$tree"/1/*manylinux_2_28*.whl || fail "pip install"
        works "$tree/venv/bin/gpureclaim" "$tree/venv/bin/python3"
        commands=$(cd "$tree/venv/bin" && echo gpureclaim*)
        [ "$commands" = gpureclaim ] || fail "commands that need libraries which a wheel cannot count on: $commands"
        "${pip[@]}" install --no-index --force-reinstall "$tree"/2/*.whl || fail "pip install, again"
        works "$tree/venv/bin/gpureclaim" "$tree/venv/bin/python3"
        "${pip[@]}" uninstall -y gpureclaim || fail "pip uninstall"
        diff <(find "$tree/venv" -type f | grep -i gpureclaim) /dev/null || fail "left behind"
        ;;
rpm)
        rpm=(rpm --root "$tree/root" --dbpath /db --nodeps)
        "${rpm[@]}" -U "$tree"/1/*."$(uname -m)".rpm || fail "rpm -U"
        PYTHONPATH=$(dirname "$(dirname "$(find "$tree/root" -name py.typed)")") \
                works "$tree/root/usr/bin/gpureclaim" python3
        "${rpm[@]}" -U --force "$tree"/2/*."$(uname -m)".rpm || fail "rpm -U, again"
        "${rpm[@]}" -e gpureclaim || fail "rpm -e"
        nothing_left "$tree/root" -not -path "$tree/root/db/*"
        ;;
deb)
        if command -v lintian >/dev/null; then
                lintian --allow-root --fail-on error,warning "$tree"/1/*.changes >"$tree/out" 2>&1 ||
                        fail "lintian: $(cat "$tree/out")"
        else
                echo "no lintian here: its checks are left out"
        fi
        # An older version, with a file that the newer one has no more.
        for package in gpureclaim python3-gpureclaim; do
                dpkg-deb -R "$tree"/1/${package}_*.deb "$tree/old" &&
                        sed -i 's/^Version: .*/Version: 0.0.1/' "$tree/old/DEBIAN/control" &&
                        mkdir -p "$tree/old/usr/share/gpureclaim" &&
                        echo >"$tree/old/usr/share/gpureclaim/$package.gone" &&
                        dpkg-deb --root-owner-group -b "$tree/old" "$tree/old-$package.deb" >"$tree/out" ||
                        fail "dpkg-deb"
                rm -rf "$tree/old"
        done
        mkdir "$tree/mounted"
        export -f works fail
        export tree version failed source
        # shellcheck disable=SC2016
        unshare -m bash -c '
                mount -t tmpfs tmpfs "$tree/mounted" && cd "$tree/mounted" && mkdir new work root &&
                        mount -t overlay -o "lowerdir=/,upperdir=new,workdir=work" overlay root &&
                        mount --rbind /dev root/dev && mount -t proc proc root/proc && mkdir root/packages &&
                        cp "$tree"/1/*.deb "$tree"/old-*.deb root/packages || exit 77
                chroot root bash -c "
                        cd /packages && rm *dbgsym*
                        unset PYTHONDONTWRITEBYTECODE
                        dpkg -i old-*.deb && dpkg -i gpureclaim_* python3-* || fail \"dpkg -i\"
                        [ ! -e /usr/share/gpureclaim/gpureclaim.gone ] || fail \"a file of the older version is left\"
                        works gpureclaim /usr/bin/python3
                        LD_PRELOAD=libgpureclaim.so true 2>&1 | grep . && fail \"the library is not found by its name\"
                        sim=\$(dirname \"\$(dpkg -L gpureclaim | grep sim/libcuda.so.1)\")
                        python3 -B $source/tests/tools/guides_test.py /usr/bin/gpureclaim \$sim \
                                \$sim/../../libgpureclaim.so $source || fail \"the commands of the guides\"
                        dpkg -P gpureclaim python3-gpureclaim || fail \"dpkg -P\"
                        rm -r /packages
                        exit \$failed" || failed=1
                # What the system keeps for itself.
                left=$(find new ! -type d -printf "/%P\n" |
                        grep -v "^/var/\(log\|lib/dpkg\|cache\)/\|^/etc/ld.so.cache$\|^$tree/")
                [ -z "$left" ] || fail "left behind: $left"
                exit $failed' >"$tree/out" 2>&1
        status=$?
        [ $status -ne 77 ] || echo "no file systems can be mounted here"
        [ $status -eq 0 ] || { cat "$tree/out" && exit $status; }
        ;;
esac
exit $failed
