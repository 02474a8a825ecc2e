#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compile a second copy of the package, with checks: tools/flavour.sh debug|asan|valgrind
# It goes to build/debug (or asan, valgrind), and is used with PYTHONPATH=build/debug and `python -P`.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
debug) export RMQ_DEBUG=1 ;;
asan) export RMQ_SANITIZE=1 ;;
valgrind) export RMQ_VALGRIND=1 ;;
*)
    echo "flavour: say debug, asan or valgrind" >&2
    exit 1
    ;;
esac

place=build/$1
mkdir -p "$place"
# A .pxd or setup.py that is newer than the C code means that all of it is old (see tools/setup.sh).
if [ -e "$place/.built" ] && [ -n "$(find setup.py rmq/_core/*.pxd -newer "$place/.built")" ]; then
    rm -rf "$place/build"
fi
rm -rf "$place/rmq"
cp -Rp setup.py pyproject.toml README.md LICENSE rmq "$place/"
find "$place/rmq" -name '*.so' -delete
python=$PWD/.venv/bin/python
(cd "$place" && "$python" setup.py --quiet build_ext --inplace --parallel "$(nproc 2>/dev/null || echo 2)")
touch "$place/.built"
