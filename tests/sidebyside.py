"""Long runs in processes of their own, several at once: their tests only wait, which the cores need not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest

Answer = TypeVar("Answer")


@contextmanager
def side_by_side(
    request: pytest.FixtureRequest, name: str, run: Callable[[str], Answer]
) -> Iterator[dict[str, Future[Answer]]]:
    """run(value) of each value that a parameter has among this module's selected tests, as many at once as cores."""
    calls = [item.callspec for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    values = [call.params[name] for call in calls if name in call.params]
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield {value: pool.submit(run, value) for value in values}
    finally:
        pool.shutdown(cancel_futures=True)
