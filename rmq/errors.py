# SPDX-License-Identifier: Apache-2.0
"""Errors that carry facts. Wrong arguments stay TypeError and ValueError, the disk's own errors OSError."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def is_handlers(error: OSError) -> bool:
    """Whether no system call failed: a signal handler raised it in the midst of one, as TimeoutError."""
    return error.errno is None


def escaped(text: str) -> str:
    """Text that has a UTF-8 form, as Arrow wants it: of a path's bytes that are none Python makes lone surrogates."""
    return text.encode(errors="backslashreplace").decode()


class RmqError(Exception):
    """Base of what a store tells: its bytes, its lock, its state, its messages."""

    def __str__(self) -> str:
        return escaped(super().__str__())


class CorruptFileError(RmqError):
    """Bytes on disk break the format. They were left as they are.

    path: the file; offset: byte in it (0 when the whole file is meant); reason: what is wrong.
    """

    def __init__(self, path: str | os.PathLike[str], offset: int, reason: str) -> None:
        super().__init__(os.fspath(path), offset, reason)
        self.path = os.fspath(path)
        self.offset = offset
        self.reason = reason

    def __str__(self) -> str:
        return escaped(f"{self.path}: byte {self.offset}: {self.reason}")


class StoreLockedError(RmqError):
    """Another process, or a Store of this one, has the store open for writing. pid: None when unknown."""

    def __init__(self, path: str | os.PathLike[str], pid: int | None) -> None:
        super().__init__(os.fspath(path), pid)
        self.path = os.fspath(path)
        self.pid = pid

    def __str__(self) -> str:
        holder = f"process {self.pid}" if self.pid is not None else "another process"
        return escaped(f"{self.path}: opened for writing by {holder}")


class StoreClosedError(RmqError):
    """The store was closed, or belongs to the parent of a forked process: open it again by its path."""


class StoreReadOnlyError(RmqError):
    """A change was asked of a store opened "r", of a broker's groups, or of a store that ended because a sync failed,
    its disk turned read only or its directory was moved: reopen it.
    """


class RowError(Exception):
    """About one of many messages. row and stored as in IllegalMessageError; the text begins with the row."""

    stored: int | None = None

    def __init__(self, *args: object, row: int | None = None) -> None:
        super().__init__(*args)
        self.row = row

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.row is None else f"row {self.row}: {text}"


class IllegalMessageError(RmqError, RowError, ValueError):
    """A message that RocketMQ would refuse or could not read back. Nothing of it was stored.

    row: its number in the call, stored: messages of the call stored before; None for a message on its own.
    """


class MessageTypeError(RowError, TypeError):
    """What stands among messages, or among tables of them, and is none."""


class MessageTooLargeError(IllegalMessageError):
    """A body or a batch over max_message_size, up to RocketMQ 4.9.3 a record, too; or one that fits no segment."""


class UnsupportedFormatError(RmqError):
    """The store needs a format that is not read or written here. what: the format; reads_it: what does."""

    def __init__(self, path: str | os.PathLike[str], what: str, reads_it: str) -> None:
        super().__init__(os.fspath(path), what, reads_it)
        self.path = os.fspath(path)
        self.what = what
        self.reads_it = reads_it

    def __str__(self) -> str:
        return escaped(f"{self.path}: {self.what}; {self.reads_it}")


def undamaged(items: Iterable[Item], damage: list[CorruptFileError]) -> Iterator[Item]:
    """The items before the first damage, which goes to a list: who raises it pops it, as in a local it would hold the
    frame that its traceback holds.
    """
    try:
        yield from items
    except CorruptFileError as error:
        damage.append(error)
