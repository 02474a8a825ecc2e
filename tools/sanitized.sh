#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run Python on the copy in build/asan: tools/sanitized.sh -m pytest -q tests/test_record.py
set -euo pipefail
cd "$(dirname "$0")/.."

read -ra cc <<<"${CC:-$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_config_var("CC") or "cc")')}"
runtime=$("${cc[@]}" -print-file-name=libasan.so)
if [ ! -e "$runtime" ]; then
    echo "sanitize: ${cc[0]} has no libasan.so (Debian: apt-get install libasan8 for gcc 12; gcc, not clang, is expected)" >&2
    exit 1
fi
# The interpreter itself leaks on purpose; with PYTHONMALLOC=malloc an overrun of a bytes object is seen too.
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc
export PYTHONPATH=$PWD/build/asan PYTHONSAFEPATH=1
LD_PRELOAD=$runtime exec .venv/bin/python "$@"
