# SPDX-License-Identifier: Apache-2.0
import numpy as np
import numpy.typing as npt

NUMBER_ROOM: int

def number_texts(
    values: npt.NDArray[np.int64],
    missing: npt.NDArray[np.uint8],
    form: str,
    is_utc: bool,
    offsets: npt.NDArray[np.int64],
    into: npt.NDArray[np.uint8],
) -> int: ...
