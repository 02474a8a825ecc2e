# SPDX-License-Identifier: Apache-2.0
import mmap
from typing import Final

import numpy as np
import numpy.typing as npt

_Writable = bytearray | memoryview | mmap.mmap | npt.NDArray[np.uint8]
_Buffer = bytes | _Writable

SCAN_FULL: Final[int]
SCAN_LIMIT: Final[int]
SCAN_BLANK: Final[int]
SCAN_ZERO: Final[int]
SCAN_TRUNCATED: Final[int]
SCAN_BAD_SIZE: Final[int]
SCAN_BAD_MAGIC: Final[int]
SCAN_BAD_PHY_OFFSET: Final[int]
SCAN_BAD_LENGTHS: Final[int]
SCAN_BAD_BODY_CRC: Final[int]
SCAN_BAD_RECORD_CRC: Final[int]
SCAN_LOST_SECTOR: Final[int]
SCAN_NUL_END: Final[int]
SCAN_REASONS: Final[dict[int, str]]
CPU_LEVEL: Final[str]
CPU_LEVELS: Final[tuple[str, ...]]

CHECK_BODY_CRC: Final[int]
CHECK_RECORD_CRC: Final[int]
CHECK_SECTORS: Final[int]
CHECK_HAS_CRC: Final[int]
NESTED_LIMIT: Final[int]
PARSE_PROPERTIES: Final[int]
LEGACY_PROPERTIES: Final[int]
HASH_KEYS: Final[int]

def encode_blank(segment: _Writable, position: int) -> None: ...
def store_visible(marks: _Writable, phy_offset: int) -> None: ...
def load_visible(marks: _Buffer) -> int: ...
def ends_with_crc(properties: bytes) -> bool: ...
def body_crc(body: _Buffer) -> int: ...
def resync(segment: _Buffer, segment_phy_offset: int, begin: int, end: int) -> int: ...
def used_size(data: _Buffer, begin: int) -> int: ...
def parse_properties(data: _Buffer) -> dict[str, str]: ...
