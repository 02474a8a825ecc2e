# SPDX-License-Identifier: Apache-2.0
"""Bodies where they lie, as Arrow's views."""
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t
from libc.string cimport memcpy

from rmq._core._columns cimport GrowingBuffer
from rmq._core._record cimport RecordRow
from rmq._core._recordbatch cimport RecordBatch

cdef enum:
    VIEW_SIZE = 16                  # bytes of an Arrow view
    VIEW_INLINE = 12                # ... and of the longest body that lies in it


def body_views(RecordBatch batch not None, GrowingBuffer views not None):
    """Add Arrow's views of the bodies as stored, 16 bytes a row, into the bytes that the rows borrow; returns those.

    A view: size, then the body itself up to 12 bytes, else its first 4, the number of its buffer (0) and its position.
    ValueError for bytes past 2 GiB. Source: Arrow's columnar format.
    """
    cdef const uint8_t[::1] source = batch._source if batch.count else b""
    cdef int32_t i
    cdef int32_t[4] view
    cdef const uint8_t *body
    cdef RecordRow *row
    cdef uint8_t *out
    if source.shape[0] > INT32_MAX:
        raise ValueError("views reach 2 GiB")
    out = views.take(VIEW_SIZE * <int64_t>batch.count)
    with nogil:
        for i in range(batch.count):
            row = &batch.rows[i]
            body = row.base + row.body_position
            view[0], view[1], view[2], view[3] = row.body_size, 0, 0, 0
            if row.body_size <= VIEW_INLINE:
                memcpy(&view[1], body, <size_t>row.body_size)
            else:
                memcpy(&view[1], body, 4)
                view[3] = <int32_t>(body - &source[0])
            memcpy(out + VIEW_SIZE * <int64_t>i, view, VIEW_SIZE)
    return batch._source if batch.count else b""
