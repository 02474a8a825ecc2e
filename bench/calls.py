# SPDX-License-Identifier: Apache-2.0
"""A million calls that do nothing: of a compiled method, and of a function of Python."""

from __future__ import annotations

from itertools import repeat
from typing import Any

CALLS = 1_000_000
KEY = "order-1"


def call_of_python(key: str, phy_offset: int, store_timestamp: int) -> None:
    pass


def by_compiled(empty: Any) -> None:
    """empty: of empty.pyx. Four calls a turn, so that the loop counts little."""
    key = KEY
    for _ in repeat(None, CALLS // 4):
        empty.call(key, 1, 2)
        empty.call(key, 1, 2)
        empty.call(key, 1, 2)
        empty.call(key, 1, 2)


def by_python() -> None:
    call, key = call_of_python, KEY
    for _ in repeat(None, CALLS // 4):
        call(key, 1, 2)
        call(key, 1, 2)
        call(key, 1, 2)
        call(key, 1, 2)
