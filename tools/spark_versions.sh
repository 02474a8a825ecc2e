#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# tests/spark/test_smoke.py on other releases of PySpark than that of .venv, each in build/spark-VERSION:
#   tools/spark_versions.sh [VERSION...]     the oldest that is supported and one of each release since, when none is named
# The oldest gets the oldest pandas and pyarrow that rmq and it allow, the others the newest. 500 MB each; PYTHON chooses
# the interpreter that has the compiled modules of this checkout. PYTEST_ARGS is what pytest gets besides.
set -euo pipefail
cd "$(dirname "$0")/.."

OLDEST=4.1.4
PYTHON=${PYTHON:-.venv/bin/python}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=("$OLDEST" 4.2.1)
failed=()
for version in "${versions[@]}"; do
    place=build/spark-$version
    if [ ! -e "$place/.ready" ]; then
        echo "spark: making $place"
        rm -rf "$place"
        "$PYTHON" -m venv "$place"
        others=('pandas>=2.2.2,<3' 'pyarrow>=19')
        if [ "$version" = "$OLDEST" ]; then others=('pandas==2.2.*' 'pyarrow==19.*'); fi
        "$place/bin/python" -m pip install --quiet "pyspark==$version" "${others[@]}" 'numpy>=2' 'click>=8.2' 'rich>=13' \
            'pytest>=8'
        touch "$place/.ready"
    fi
    echo "spark: $("$place/bin/python" -c 'import pyarrow, pyspark, pandas
print("PySpark", pyspark.__version__, "pyarrow", pyarrow.__version__, "pandas", pandas.__version__)')"
    # shellcheck disable=SC2086  # several arguments
    PYTHONPATH=$PWD "$place/bin/python" -m pytest -q -p no:cacheprovider -o addopts= tests/spark/test_smoke.py \
        ${PYTEST_ARGS:-} || failed+=("$version")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "spark: failed on PySpark ${failed[*]}" >&2
    exit 1
fi
