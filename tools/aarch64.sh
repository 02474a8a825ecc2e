#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests on aarch64 under emulation, on a Debian machine of another kind, as root:
#   tools/aarch64.sh [ARGUMENT OF PYTEST...]
# A Debian of that kind, its compiled modules (built here, by a cross compiler) and packages go to build/aarch64.
set -euo pipefail
cd "$(dirname "$0")/.."

WORK=$PWD/build/aarch64
ROOT=$WORK/root
SITE=$ROOT/opt/site
PY=.venv/bin/python
QEMU=/usr/bin/qemu-aarch64-static
BINFMT=/proc/sys/fs/binfmt_misc

[ "$(id -u)" = 0 ] || {
    echo "aarch64: root only: it makes a root directory of another machine and changes into it" >&2
    exit 1
}

if ! { command -v debootstrap && command -v aarch64-linux-gnu-gcc && command -v "$QEMU"; } >/dev/null; then
    apt-get install -y --no-install-recommends debootstrap qemu-user-static gcc-aarch64-linux-gnu libc6-dev-arm64-cross
fi
mountpoint -q "$BINFMT" || mount -t binfmt_misc binfmt_misc "$BINFMT"
if [ ! -e "$BINFMT/qemu-aarch64" ]; then # by magic and machine of an ELF file; F: opened now, for roots without it
    echo ":qemu-aarch64:M::\\x7fELF\\x02\\x01\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x02\\x00\\xb7\\x00:\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\x00\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xfe\\xff\\xff\\xff:$QEMU:F" >"$BINFMT/register"
fi

if [ ! -e "$WORK/root.done" ]; then
    rm -rf "$ROOT" "$WORK/site.done"
    debootstrap --arch=arm64 --variant=minbase --include=python3,libpython3-dev bookworm "$ROOT" http://deb.debian.org/debian
    printf '/srv/rmq\n/opt/site\n' >"$ROOT/usr/lib/python3/dist-packages/rmq.pth"
    touch "$WORK/root.done"
fi
if [ ! -e "$WORK/site.done" ]; then # for Debian 12's Python, by the names of the wheels
    rm -rf "$SITE"
    "$PY" -m pip install -q --target "$SITE" --only-binary=:all: --python-version 3.11 --platform manylinux_2_28_aarch64 \
        --platform manylinux_2_17_aarch64 "numpy>=2" "pyarrow>=19" "click>=8.2" "rich>=13" "pytest>=9" \
        pytest-benchmark pytest-xdist hypothesis "pandas<3" zstandard lz4
    touch "$WORK/site.done"
fi

# The tree as it is, its modules compiled as setup.py does for machines that are no x86-64.
rm -rf "$WORK/rmq"
mkdir -p "$WORK/rmq"
git ls-files -z | tar --null -T - -c | tar -x -C "$WORK/rmq"
(cd "$WORK/rmq" && "$OLDPWD/$PY" setup.py -q --version >/dev/null)
compile() {
    aarch64-linux-gnu-gcc -w -shared -fPIC -std=c11 -O3 -g0 -fno-strict-aliasing -DNDEBUG \
        -DNPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION -Irmq/_core -I"$ROOT/usr/include/python3.11" \
        -I"$SITE/numpy/_core/include" -idirafter "$ROOT/usr/include" -Wl,-s \
        -o "rmq/_core/$(basename "$1" .c).cpython-311-aarch64-linux-gnu.so" "$1"
}
export -f compile
export ROOT SITE
(cd "$WORK/rmq" && find . -name '*.c' -path '*_core*' -print0 | xargs -0 -P "$(nproc)" -I{} bash -ec 'compile {}')

# Left out: Spark, lint, and what the emulator does not show or cannot bear (flags of maps, a limit of address space).
exec unshare --mount bash -ec '
    mount -t proc proc "$0/proc"
    mount --rbind /dev "$0/dev"
    mkdir -p "$0/srv/rmq"
    mount --bind "$1" "$0/srv/rmq"
    exec chroot "$0" env -i -C /srv/rmq PATH=/usr/bin:/bin HOME=/root LANG=C.UTF-8 \
        ${RMQ_CPU:+RMQ_CPU="$RMQ_CPU"} python3 -m pytest -q -p no:cacheprovider --ignore=tests/spark \
        --ignore=tests/test_tidy.py --ignore=tests/test_reading_on.py \
        --deselect tests/test_system_errors.py::test_a_file_that_finds_no_room_to_be_mapped_is_named "${@:2}"' "$ROOT" "$WORK/rmq" "$@"
