# SPDX-License-Identifier: Apache-2.0
"""What closes the parts of something, whatever befalls one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rmq.errors import RmqError, is_handlers


def close_all(closers: Iterable[Callable[[], None]]) -> None:
    """Call each, even when one before it fails; the first OSError is raised at the end."""
    failure = None
    for close in closers:
        try:
            close()
        except OSError as error:
            failure = failure or error
    if failure is not None:
        raise failure


class Closers:
    """What closes the parts of something, last first. One that is interrupted, by whatever a signal handler raises, is
    called again, once; what an interrupt between two has left, is called by the next `close`.
    """

    def __init__(self) -> None:
        self._closers: list[Callable[[], object]] = []
        self._again: Callable[[], object] | None = None

    def callback(self, close: Callable[[], object]) -> None:
        self._closers.append(close)

    def close(self) -> None:
        """Raises the first error, when all have been called."""
        failure: BaseException | None = None
        while self._closers:
            close = self._closers[-1]
            try:
                close()
            except BaseException as error:
                failure = failure or error
                is_its_own = isinstance(error, RmqError) or (isinstance(error, OSError) and not is_handlers(error))
                if not is_its_own and self._again is not close:
                    self._again = close
                    continue
            self._closers.pop()
        if failure is not None:
            raise failure

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self.close()
