# SPDX-License-Identifier: Apache-2.0
import mmap

_Buffer = bytes | bytearray | memoryview | mmap.mmap

def geometry_candidates(data: _Buffer, limit: int = 16, being_put: bool = False) -> list[tuple[int, int]]: ...
