# SPDX-License-Identifier: Apache-2.0
"""The checkpoint: how far RocketMQ says the files are flushed. Layout: docs/format/checkpoint.md.

Source: RocketMQ StoreCheckpoint.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

from rmq._core._layout import CHECKPOINT_SIZE
from rmq.segment import SMALL_FILE, open_regular, read_file, sync_directory, sync_file, write_fully

_FIELDS = struct.Struct(">6q")


class Checkpoint:
    """Six longs: physic_msg_timestamp, logics_msg_timestamp, index_msg_timestamp (ms), and three offsets.

    Fields that the written version does not know keep what the file held; logics_phy_offset is only ever taken back.
    """

    def __init__(self, path: Path, longs: int = 5) -> None:
        """Read the file when there is one; what it lacks is 0, as RocketMQ maps it. CorruptFileError: it is no file."""
        self.path = path
        self._longs = longs
        data = b""
        with contextlib.suppress(FileNotFoundError):
            data = read_file(path, SMALL_FILE)
        self.exists = bool(data)  # one of no bytes is what a killed process may leave
        values = _FIELDS.unpack_from(data.ljust(_FIELDS.size, b"\0"))
        self.physic_msg_timestamp, self.logics_msg_timestamp, self.index_msg_timestamp = values[:3]
        self.master_flushed_offset, self.confirm_phy_offset, self.logics_phy_offset = values[3:]
        if self.logics_phy_offset:
            self._longs = 6  # a broker goes by it, whatever version is written
        self.is_behind = len(data) != CHECKPOINT_SIZE  # the file says less than the fields
        self.is_withdrawn = False  # an open that fails then leaves a crash behind

    def withdraw(self) -> None:
        """Durably, before queues and index are derived again: until `flush` the file vouches for none of them. The
        fields stay.
        """
        if self.exists:
            kept = self.logics_msg_timestamp, self.index_msg_timestamp, self.logics_phy_offset
            self.logics_msg_timestamp = self.index_msg_timestamp = self.logics_phy_offset = 0
            try:
                self.flush()
            finally:
                self.logics_msg_timestamp, self.index_msg_timestamp, self.logics_phy_offset = kept
                self.is_behind = True
        self.is_withdrawn = True

    def lower(self, newest: int) -> None:
        """The log's last record was stored at that time: after a crash a checkpoint that was copied later than the log
        may say more.
        """
        if 0 < newest < max(self.physic_msg_timestamp, self.logics_msg_timestamp, self.index_msg_timestamp):
            self.physic_msg_timestamp = min(self.physic_msg_timestamp, newest)
            self.logics_msg_timestamp = min(self.logics_msg_timestamp, newest)
            self.index_msg_timestamp = min(self.index_msg_timestamp, newest)
            self.is_behind = True

    def take_back(self, end: int, last_phy_offset: int, newest: int) -> None:
        """Of what was cut off the log nothing is said: it ends at `end`, its last record begins before (-1: not known)
        and was stored at `newest` ms (0: not known, or later ones have entries).
        """
        if 0 < newest < self.index_msg_timestamp:
            self.index_msg_timestamp, self.is_behind = newest, True
        if self.confirm_phy_offset > end:
            self.confirm_phy_offset, self.is_behind = max(0, last_phy_offset), True
        if self.logics_phy_offset > (last_phy_offset if last_phy_offset >= 0 else end):
            self.logics_phy_offset, self.is_behind = max(0, last_phy_offset), True

    def flush(self) -> None:
        """Write and sync. What the fields say must be on disk before."""
        own = (self.physic_msg_timestamp, self.logics_msg_timestamp, self.index_msg_timestamp,
               self.master_flushed_offset, self.confirm_phy_offset, self.logics_phy_offset)  # fmt: skip
        descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT)
        try:
            if os.fstat(descriptor).st_size != CHECKPOINT_SIZE:
                os.ftruncate(descriptor, CHECKPOINT_SIZE)
            write_fully(descriptor, struct.pack(f">{self._longs}q", *own[: self._longs]), 0)
            sync_file(descriptor)
            self.is_withdrawn = False
        finally:
            os.close(descriptor)
        if not self.exists:
            sync_directory(self.path.parent)
        self.exists, self.is_behind = True, False
