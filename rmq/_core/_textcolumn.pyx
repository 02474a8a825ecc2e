# SPDX-License-Identifier: Apache-2.0
"""Strings of one Arrow column, borrowed and checked once."""
cimport cython
from libc.stdint cimport int64_t, uint8_t

cdef uint8_t NOTHING = 0


@cython.final
cdef class TextColumn:
    def __cinit__(self, const int64_t[::1] offsets not None, const uint8_t[::1] data not None,
                  const uint8_t[::1] missing not None):
        cdef Py_ssize_t i
        for i in range(offsets.shape[0]):
            if offsets[i] < 0 or offsets[i] > data.shape[0] or (i and offsets[i] < offsets[i - 1]):
                raise ValueError(f"offsets[{i}] lies outside the data")
        if missing.shape[0] and missing.shape[0] != offsets.shape[0] - 1:
            raise ValueError("missing must have one byte per string")
        self.offsets = offsets
        self.data = data
        self.missing = missing
        self._first = &data[0] if data.shape[0] else &NOTHING

    def __len__(self):
        return self.offsets.shape[0] - 1
