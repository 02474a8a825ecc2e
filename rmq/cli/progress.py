# SPDX-License-Identifier: Apache-2.0
"""A bar on a terminal's stderr that shows how much of a store was read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rmq.cli.output import make_console


@contextmanager
def byte_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A function (bytes read, bytes to read) that moves a bar on a terminal's stderr; None where there is none."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    console = make_console(stderr=True)
    columns = [TaskProgressColumn(), DownloadColumn(), TimeRemainingColumn()]
    if console.width >= 60:
        columns.insert(0, BarColumn(None))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
