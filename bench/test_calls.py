# SPDX-License-Identifier: Apache-2.0
"""What a call costs before it does anything: into a compiled method, and into a function of Python."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from calls import CALLS, KEY, by_compiled, by_python, call_of_python
from compiled import compiled
from ratios import CPU, MEMORY, Goal, Measure, Peer


@CPU
def test_empty_call(measure: Measure, tmp_path: Path) -> None:
    """The goal, at most 0.8 of the time, is 1.25 times faster."""
    if find_spec("Cython") is None:
        pytest.skip("Cython is missing: pip install -e '.[bench]'")
    empty = compiled("empty", tmp_path).Empty()
    assert empty.call(KEY, 1, 2) is call_of_python(KEY, 1, 2) is None
    measure(CALLS, MEMORY, lambda: lambda: by_compiled(empty),
            Peer("Python function", lambda: by_python, (Goal("P1", 1.25),)))  # fmt: skip
