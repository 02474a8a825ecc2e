# SPDX-License-Identifier: Apache-2.0
"""Where compiled code goes by memory that nobody set, as Valgrind sees it: tools/memcheck.py tests/test_putbatch.py.

Runs pytest on the copy in build/valgrind. What is read beyond a block is left to ASan, which sees it better.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "valgrind"
CORE = COPY / "rmq" / "_core"
LOG = COPY / "valgrind.log"
# A handler of SIGBUS goes on in the middle of a function, which needs its registers.
VALGRIND = ("valgrind", "--quiet", "--error-limit=no", "--num-callers=12", f"--log-file={LOG}",
            "--vex-iropt-register-updates=allregs-at-mem-access")  # fmt: skip
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
SOURCE = re.compile(r"\((\w+\.[ch]):\d+\)")


def reports(log: str) -> list[str]:
    """Those of memory that nobody set, in one of our sources. Python itself goes by some, harmlessly."""
    ours = {f"{path.stem}.c" for path in CORE.glob("*.pyx")} | {path.name for path in CORE.glob("*.h")}
    found = []
    for report in re.split(r"^==\d+== *$", log, flags=re.MULTILINE):
        lines = [line.partition("== ")[2] for line in report.strip().splitlines()]
        place = SOURCE.search(lines[1]) if len(lines) > 1 else None
        if place is not None and "uninitialised" in lines[0] and place[1] in ours:
            found.append("\n".join(lines))
    return found


def main(arguments: list[str]) -> None:
    if shutil.which(VALGRIND[0]) is None:
        sys.exit("memcheck: there is no valgrind (Debian: apt-get install valgrind)")
    environment = os.environ | {"PYTHONMALLOC": "malloc", "PYTHONPATH": str(COPY), "PYTHONSAFEPATH": "1"}
    tests = subprocess.run([*VALGRIND, sys.executable, *PYTEST, *arguments], cwd=ROOT, env=environment, check=False)
    found = reports(LOG.read_text(errors="replace"))
    for report in found:
        print(report, end="\n\n")
    print(f"memcheck: {len(found)} places go by memory that nobody set; all that Valgrind said: {LOG}")
    sys.exit(1 if found else tests.returncode)


if __name__ == "__main__":
    main(sys.argv[1:])
