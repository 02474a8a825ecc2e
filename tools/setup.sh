#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make .venv and what is in it. The Makefile calls this:
#   tools/setup.sh build    .venv, the package (editable), its modules compiled
#   tools/setup.sh demo     and what examples/ needs
#   tools/setup.sh dev      and what the tests need
#   tools/setup.sh bench    and what the benchmarks need
# PYTHON=... chooses the interpreter; CC=... the compiler. Run again it does only what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
PY=$VENV/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

missing() {
    echo "setup: $*" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_new_enough "$PYTHON" || missing "PYTHON=$PYTHON is not a Python 3.11 or newer (Debian: apt-get install python3)"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    missing "Python 3.11 or newer is missing (Debian: apt-get install python3; or PYTHON=/path/to/python)"
}

check_tools() {
    local version include scratch
    local -a cc
    version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    include=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    read -ra cc <<<"${CC:-$("$1" -c 'import sysconfig; print(sysconfig.get_config_var("CC") or "cc")')}"
    command -v "${cc[0]}" >/dev/null ||
        missing "a C compiler (${cc[0]}) is missing (Debian: apt-get install build-essential; or CC=...)"
    scratch=$(mktemp -d)
    # shellcheck disable=SC2064  # the path is known now
    trap "rm -rf '$scratch'" EXIT
    printf '#include <stdio.h>\nint main(void) { return 0; }\n' >"$scratch/try.c"
    "${cc[@]}" "$scratch/try.c" -o "$scratch/try" >/dev/null 2>&1 ||
        missing "the C compiler (${cc[*]}) makes no program, libc headers may be missing (Debian: apt-get install build-essential)"
    printf '#include <Python.h>\n' >"$scratch/try.c"
    "${cc[@]}" -I"$include" -c "$scratch/try.c" -o "$scratch/try.o" >/dev/null 2>&1 ||
        missing "Python.h of Python $version is missing (Debian: apt-get install python$version-dev)"
    "$1" -c 'import venv, ensurepip; ensurepip.version()' >/dev/null 2>&1 ||
        missing "the venv module of Python $version is missing (Debian: apt-get install python$version-venv)"
}

interpreter_of() {
    "$1" -c 'import os, sys; print(sys.version_info[:3], os.path.realpath(sys.base_prefix))' 2>/dev/null || echo none
}

make_venv() {
    local python
    python=$(find_python)
    check_tools "$python"
    if [ -x "$PY" ] && "$PY" -m pip --version >/dev/null 2>&1 && is_new_enough "$PY"; then
        [ -n "${PYTHON:-}" ] && [ "$(interpreter_of "$PY")" != "$(interpreter_of "$python")" ] || return 0
    fi
    echo "setup: making $VENV with $("$python" -V)"
    rm -rf "$VENV"
    "$python" -m venv "$VENV"
}

requirements() { # of pyproject.toml: a Python expression over `project`
    "$PY" -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb')); print(*$1, sep='\n')"
}

install() {
    "$PY" -m pip install --quiet "$@"
}

build() {
    local stamp=$VENV/.built
    local -a sources=(rmq/_core/*.pyx rmq/_core/*.pxd rmq/_core/*.h)
    if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ setup.py -nt "$stamp" ]; then
        echo "setup: installing rmq and what it needs, compiling its modules (about a minute)"
        mapfile -t needed < <(requirements "project['build-system']['requires']")
        install "${needed[@]}"
        rm -rf build/cython
        install --no-build-isolation --editable .
    elif [ -n "$(find "${sources[@]}" -newer "$stamp")" ]; then
        echo "setup: compiling what changed"
        # Cython does not see every use of a .pxd (`from rmq._core cimport _layout`): start over when one changed.
        if [ -n "$(find rmq/_core/*.pxd -newer "$stamp")" ]; then rm -rf build/cython; fi
        "$PY" setup.py --quiet build_ext --inplace --parallel "$(nproc 2>/dev/null || echo 2)"
    fi
    touch "$stamp"
}

case "${1:-}" in
build)
    make_venv
    build
    ;;
demo)
    [ -e "$VENV/.built" ] || "$0" build
    mapfile -t needed < <(requirements "project['project']['optional-dependencies']['demo']")
    echo "setup: installing what the demo needs, PySpark among it (500 MB, half a minute)"
    install "${needed[@]}"
    tools/java.sh spark >/dev/null || echo "setup: the demo leaves its step on Spark out" >&2
    touch "$VENV/.demo"
    ;;
dev)
    [ -e "$VENV/.built" ] || "$0" build
    extras="project['project']['optional-dependencies']"
    mapfile -t needed < <(requirements "$extras['dev'] + $extras['spark'] + $extras['docs']")
    install "${needed[@]}"
    touch "$VENV/.dev"
    ;;
bench)
    [ -e "$VENV/.dev" ] || "$0" dev
    mapfile -t needed < <(requirements "project['project']['optional-dependencies']['bench']")
    install "${needed[@]}"
    touch "$VENV/.bench"
    ;;
*)
    missing "say build, demo, dev or bench"
    ;;
esac
