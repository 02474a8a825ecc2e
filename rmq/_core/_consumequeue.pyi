# SPDX-License-Identifier: Apache-2.0
import mmap

import numpy as np
import numpy.typing as npt

from rmq._core._recordbatch import RecordBatch

_Buffer = bytes | bytearray | memoryview | mmap.mmap | npt.NDArray[np.uint8]

def pack_units(
    batch: RecordBatch, delay_levels: npt.NDArray[np.int64], begin: int = 0
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]: ...
def unpack_units(
    data: _Buffer,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int64]]: ...
def valid_units(data: _Buffer) -> int: ...
def pre_blank_units(count: int) -> bytes: ...
def unpack_batch_units(data: _Buffer) -> npt.NDArray[np.int64]: ...
