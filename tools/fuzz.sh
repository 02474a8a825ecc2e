#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build build/fuzz (CMake, ASan, UBSan, coverage) and fuzz on it: tools/fuzz.sh --seconds 60
# The arguments are those of tests/fuzz/run.py. PYTHON= chooses the interpreter, default .venv's.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$PWD/.venv/bin/python}
read -ra cc <<<"${CC:-cc}"
runtime=$("${cc[@]}" -print-file-name=libasan.so)
if [ ! -e "$runtime" ]; then
    echo "fuzz: ${cc[0]} has no libasan.so (Debian: apt-get install libasan8 for gcc 12; gcc, not clang, is expected)" >&2
    exit 1
fi
export PATH="$(dirname "$python"):$PATH" # where pip puts cmake
mkdir -p build/fuzz
log=build/fuzz/build.log
if ! { cmake -S . -B build/fuzz -DRMQ_SANITIZE=ON -DRMQ_COVERAGE=ON -DPython_EXECUTABLE="$python" &&
    cmake --build build/fuzz --parallel "$(nproc 2>/dev/null || echo 2)"; } >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    exit 1
fi
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096:quarantine_size_mb=16
export UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc PYTHONPATH=$PWD/build/fuzz PYTHONSAFEPATH=1
LD_PRELOAD=$runtime exec "$python" tests/fuzz/run.py "$@"
