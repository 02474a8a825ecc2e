# SPDX-License-Identifier: Apache-2.0
"""Columns of numbers and times as text, one pass over each."""
from libc.stdint cimport int64_t, uint8_t

cdef extern from "numbers.h":
    int RMQ_NUMBER_ROOM
    uint8_t *rmq_write_integer(uint8_t *dest, int64_t value) noexcept nogil
    uint8_t *rmq_write_double(uint8_t *dest, double value) noexcept nogil
    uint8_t *rmq_write_time(uint8_t *dest, int64_t value, int64_t per_second, int digits) noexcept nogil

NUMBER_ROOM = RMQ_NUMBER_ROOM

cdef dict FORMS = {"int64": INTEGER, "double": DOUBLE, "s": 0, "ms": 3, "us": 6, "ns": 9}


def number_texts(const int64_t[::1] values not None, const uint8_t[::1] missing not None, str form not None,
                 bint is_utc, int64_t[::1] offsets not None, uint8_t[::1] into not None):
    """The texts one behind the other into `into`, of at least NUMBER_ROOM bytes each; offsets[i]: where text i begins,
    and at [len(values)] where the last ends, which is returned. -1: there is a value among them that has another text.

    form: "int64", "double" (values: their bits), or a time's unit. missing: one byte per value, or none; the text of a
    missing value is empty. is_utc: times end in a Z.
    """
    cdef Py_ssize_t count = values.shape[0]
    cdef int64_t end
    cdef int which = FORMS[form]
    if missing.shape[0] and missing.shape[0] != count:
        raise ValueError("missing must have one byte per value")
    if offsets.shape[0] <= count or into.shape[0] < count * RMQ_NUMBER_ROOM:
        raise ValueError(f"{count} values need {count + 1} offsets and {count * RMQ_NUMBER_ROOM} bytes")
    offsets[0] = 0
    if not count:
        return 0
    with nogil:
        end = write_numbers(&values[0], count, &missing[0] if missing.shape[0] else NULL, which, is_utc, &offsets[0],
                            &into[0])
    return end


cdef int64_t write_numbers(const int64_t *values, Py_ssize_t count, const uint8_t *missing, int form, bint is_utc,
                           int64_t *offsets, uint8_t *begin) noexcept nogil:
    cdef uint8_t *dest = begin
    cdef const double *doubles = <const double *>values
    cdef int64_t per_second = 1
    cdef Py_ssize_t i
    for i in range(form):
        per_second *= 10
    for i in range(count):
        offsets[i] = dest - begin
        if missing != NULL and missing[i]:
            continue
        if form == INTEGER:
            dest = rmq_write_integer(dest, values[i])
        elif form == DOUBLE:
            dest = rmq_write_double(dest, doubles[i])
        else:
            dest = rmq_write_time(dest, values[i], per_second, form)
        if dest == NULL:
            return -1
        if is_utc:
            dest[0] = c"Z"
            dest += 1
    offsets[count] = dest - begin
    return dest - begin
