# SPDX-License-Identifier: Apache-2.0
"""Bytes of an input file or of stdin, for readers that must also stop when Ctrl-C or SIGTERM says so."""

from __future__ import annotations

import codecs
import contextlib
import errno
import gzip
import io
import os
import re
import select
import signal
import stat
import sys
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from rmq.cli import Terminated, terminate


class Interrupt:
    """SIGINT or SIGTERM is noted, not raised, so that it never falls between a put and its count; a second is raised.

    A pipe that is read meanwhile ends at once: `wake` can be read from then on.
    """

    def __init__(self) -> None:
        self.noted: signal.Signals | None = None
        self.wake, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def end_reading(self) -> None:
        """Pipes that are read end, as after Ctrl-C."""
        os.write(self._write, b"\0")

    @property
    def is_noted(self) -> bool:
        return self.noted is not None

    def _handle(self, number: int, frame: Any) -> None:
        if self.is_noted:
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
        self.noted = signal.Signals(number)

    @contextmanager
    def installed(self) -> Iterator[Interrupt]:
        with contextlib.ExitStack() as after:
            after.callback(os.close, self.wake)
            after.callback(os.close, self._write)
            if threading.current_thread() is threading.main_thread():  # elsewhere no signal arrives
                for number, known in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, terminate)):
                    if signal.getsignal(number) is known:  # else somebody else sees to it, or it is ignored
                        after.callback(signal.signal, number, signal.signal(number, self._handle))
                # Written to at once, also while the main thread waits in compiled code for the next block.
                waker = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
                after.callback(signal.set_wakeup_fd, waker)
            yield self


class _Raw(io.RawIOBase):
    """A file that ends when `wake` can be read; one on disk is just read."""

    _descriptor = -1

    def __init__(self, path: str, wake: int) -> None:
        if path == "-":
            self._descriptor = os.dup(sys.stdin.fileno())
        else:  # a FIFO would wait here for its writer, deaf to Ctrl-C
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            os.set_blocking(self._descriptor, True)
        status = os.fstat(self._descriptor)
        if stat.S_ISDIR(status.st_mode):
            self.close()
            raise IsADirectoryError(f"{path}: Is a directory")
        self.is_there = stat.S_ISREG(status.st_mode) and path != "-"
        self.size = status.st_size if stat.S_ISREG(status.st_mode) else 0
        self._wake = -1 if self.size else wake
        self._stop = -1 if self.size else os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._stop >= 0:
            poll, enders = select.poll(), [descriptor for descriptor in (self._wake, self._stop) if descriptor >= 0]
            for descriptor in (self._descriptor, *enders):
                poll.register(descriptor, select.POLLIN)
            if dict(poll.poll()).keys() & enders:
                return 0
        return os.readv(self._descriptor, [buffer])

    def tell(self) -> int:
        return os.lseek(self._descriptor, 0, os.SEEK_CUR) if self.size else 0

    def stop(self) -> None:
        """A read that waits in another thread ends, and those to come."""
        if self._stop >= 0:
            os.eventfd_write(self._stop, 1)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        stop, self._stop = getattr(self, "_stop", -1), -1
        for each in (descriptor, stop):
            if each >= 0:
                os.close(each)
        super().close()


class Input:
    """The bytes, unpacked when the name ends in .gz. size: bytes of the file, 0 when nobody knows. is_there: it can be
    opened again."""

    def __init__(self, path: str, wake: int, *, packed: bool) -> None:
        if path == "-" and sys.stdin is None:
            raise OSError(errno.EBADF, "stdin is closed")
        try:
            raw = _Raw(path, wake)
        except io.UnsupportedOperation:  # a stdin that is no file of the system
            raw, buffered = None, sys.stdin.buffer
        else:
            buffered = io.BufferedReader(raw, 1 << 20)
        self.size = raw.size if raw is not None else 0
        self.is_there = raw is not None and raw.is_there
        self._raw = raw
        self.stream: BinaryIO = gzip.GzipFile(fileobj=buffered) if packed else buffered  # type: ignore[assignment]
        self.is_live = not self.size
        self._is_packed = packed
        self._broken: Exception | None = None  # of a packed file, when the next bytes are asked for
        self._is_over = False
        self._closes = buffered

    def tell(self) -> int:
        """How far the file has been read."""
        return 0 if self._raw is None or self._raw.closed else self._raw.tell()

    def read(self, size: int) -> bytes:
        """Up to `size` bytes: of a pipe what has come, so that rows do not wait for more; b"" at the end."""
        data = (self.stream.read1(size) if self.is_live else  # type: ignore[attr-defined]
                self._unpacked(size) if self._is_packed else self.stream.read(size))  # fmt: skip
        self._is_over = self._broken is None and (not data if self.is_live else len(data) < size)
        return bytes(data)

    def _unpacked(self, size: int) -> bytes:
        """What stands before a place where no more can be unpacked comes before the error."""
        if self._broken is not None:
            raise self._broken
        data = bytearray()
        try:
            while len(data) < size and (part := self.stream.read1(size - len(data))):  # type: ignore[attr-defined]
                data += part
        except (EOFError, OSError, zlib.error) as error:
            if not data:
                raise
            self._broken = error
        return bytes(data)

    def first(self, size: int) -> bytes:
        """read, without a byte order mark that begins it."""
        data = self.read(size)
        while data and codecs.BOM_UTF8.startswith(data) and (more := self.read(size)):  # a pipe may give it in parts
            data += more
        return data.removeprefix(codecs.BOM_UTF8)

    def stop(self) -> None:
        if self._raw is not None and not self._raw.closed:
            self._raw.stop()

    def is_at_end(self) -> bool:
        """Whether nothing follows what was read, as far as that is known without waiting or unpacking."""
        if self._is_over or self.is_live or self._is_packed:
            return self._is_over
        return not self.stream.peek(1)  # type: ignore[attr-defined]

    def close(self) -> None:
        self.stream.close()
        self._closes.close()


def _unheard_of() -> str:
    """Text that no file holds, made anew by each process: of characters that are no delimiter."""
    return "\uffff" + "".join(chr(0x2800 + byte) for byte in os.urandom(8))


MASK = _unheard_of()  # before each byte that is not UTF-8
END = _unheard_of()
# Such a byte is half a surrogate to surrogateescape, U+DC80 to U+DCFF: here its last six bits as U+0080 to U+00BF.
_MASKS = [(b"\xed\xb2", f"{MASK}\u2801".encode() + b"\xc2"), (b"\xed\xb3", f"{MASK}\u2802".encode() + b"\xc2")]


def unmasked(value: bytes) -> bytes:
    """A value with the bytes that Blocks put MASK in place of."""
    for prefix, mask in _MASKS:
        value = value.replace(mask, prefix)
    return value.decode("utf-8", "surrogatepass").encode("utf-8", "surrogateescape")


def _masked(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    for prefix, mask in _MASKS:
        data = data.replace(prefix, mask)
    return data


class Blocks:
    """What pyarrow reads a CSV from: `head`, then the rest of the input, then END as a line of its own.

    Where END comes out as part of a row, a quoted field has swallowed the rest of the input. Bytes that are not UTF-8
    come as MASK says: pyarrow would stop at a row of the wrong width that holds one.
    """

    closed = False

    def __init__(self, head: bytes, source: Input, limit: int, delimiter: str) -> None:
        """limit: bytes that a block may have."""
        self._delimiter = delimiter.encode()
        # A quoted field; group 1 is empty where it has no end. The quote comes first, as that is found quickly;
        # possessive, so that no turn of a loop is kept.
        self._quoted = re.compile(rb'"(?<![^\r\n%s]")[^"]*+(?:""[^"]*+)*+("|\Z)' % re.escape(self._delimiter))
        self.has_masked = False
        self._head = head
        self._input = source
        self._limit = limit
        self._before = b""  # what of the blocks before tells whether a field goes on
        self._places: list[int] = []
        self._taken = 0
        self._is_ended = False
        self._reading = threading.Lock()
        self._has_told = threading.Event()  # that nothing more comes

    def end(self, stream: Iterable[object]) -> None:
        """Nothing more comes. What reads ahead of a stream in a thread of Arrow's is at its end when this returns."""
        self._is_ended = True
        self._input.stop()
        with contextlib.suppress(ValueError, OSError, EOFError, zlib.error):  # told already, or of stop
            for _ in stream:
                pass
        with self._reading:
            pass
        self._has_told.wait(1)  # after an error of Arrow's it may read on, or not; amid it the interpreter must not end

    def read(self, size: int) -> bytes:
        with self._reading:
            return self._read(size)

    def _read(self, size: int) -> bytes:
        if self._is_ended:
            self._has_told.set()
            return b""
        data, self._head = self._head[:size], self._head[size:]
        if len(data) < size:
            data += self._input.read(size - len(data))
        while data and len(data) < self._limit and self._needs_more(data, size):
            more = self._input.read(size)
            if not more:
                break
            data += more
        carried = data
        is_last = not self._head and (not data or self._input.is_at_end())
        # pyarrow drops a \n that begins a block when the one before ended with \r, also between quotes.
        if data.endswith(b"\r") and len(data) > 1 and not is_last:
            carried = data = data[:-1]
            self._head = b"\r" + self._head
        if is_last:  # with the last row in one block, which may lack a line end: pyarrow asks that of other blocks
            data += b"\n" + END.encode()
            self._is_ended = True
        if self._input.is_live:
            self._keep(carried)
        data = self._masked(data)
        self._places.append(self._input.tell())
        return data

    def _needs_more(self, data: bytes, size: int) -> bool:
        """A row that is larger than a block must end in the next one: that one is then read up to a line end.

        So is what a pipe gives: only when it ends it is known whether a row goes on.
        """
        if self._input.is_live and len(data) < size:
            # Of \r and \n by themselves pyarrow makes an empty block, which it takes for the end.
            return data == b"\r" or not data.endswith((b"\n", b"\r")) or self._ends_in_quotes(data)
        return b"\n" not in data and b"\r" not in data

    def _last_quoted(self, text: bytes) -> re.Match[bytes] | None:
        last = deque(self._quoted.finditer(text), maxlen=1)
        return last[0] if last else None

    def _ends_in_quotes(self, data: bytes) -> bool:
        """Whether a row goes on behind the line's end."""
        last = self._last_quoted(self._before + data)
        return last is not None and not last[1]

    def _keep(self, data: bytes) -> None:
        """The next block begins behind this one: in a quoted field, behind the quote that may end one, where a field
        begins, or amid a plain one.
        """
        text = self._before + data
        last = self._last_quoted(text)
        if last is not None and not last[1]:
            self._before = b'"'
        elif last is not None and last.end() == len(text):
            self._before = b'""'
        elif text:
            self._before = b"" if text[-1:] in (b"\r", b"\n", self._delimiter) else b"x"

    def _masked(self, data: bytes) -> bytes:
        try:
            data.decode()
        except UnicodeDecodeError:
            decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
            text, rest = decoder.decode(data), decoder.getstate()[0]
            if rest == data:  # half a character, and nothing behind it
                text = data.decode("utf-8", "surrogateescape")
            else:
                self._head = rest + self._head
            masked = _masked(text)
            self.has_masked = self.has_masked or MASK.encode() in masked
            return masked
        return data

    def position(self) -> int:
        """How far the input had been read when the block was, of which pyarrow now gave the rows."""
        self._taken += 1
        return self._places[min(self._taken, len(self._places)) - 1]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        pass
