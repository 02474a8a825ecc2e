# SPDX-License-Identifier: Apache-2.0
"""Java String.hashCode over UTF-16 units: one string, a list of str, an Arrow string buffer."""
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

import numpy as np

cdef extern from "prefetch.h" nogil:
    void rmq_prefetch(const void *p) noexcept

cdef extern from "hasheight.h" nogil:
    int64_t RMQ_EIGHT_SIZE
    bint rmq_hashes_eight() noexcept
    bint rmq_hash_eight(const uint8_t *p, const int32_t *sizes, uint32_t seed, int32_t *out) noexcept

cdef extern from "Python.h":            # borrowed: the items of a long list are read, and no count in them is written
    PyObject *PyList_GET_ITEM(PyObject *items, Py_ssize_t i) noexcept
    bint PyUnicode_Check(PyObject *item) noexcept
    int PyUnicode_KIND(PyObject *text) noexcept
    void *PyUnicode_DATA(PyObject *text) noexcept
    Py_ssize_t PyUnicode_GET_LENGTH(PyObject *text) noexcept

cdef enum:
    ITEMS_AHEAD = 16                    # so many items of a list are asked of memory before their turn
    BYTES_AHEAD = 4096                  # so far ahead the bytes of a column are asked of memory
cdef int32_t HASH_OF_SEPARATOR = 35     # '#', between topic and key in an index key


cdef inline int32_t _hash_of(PyObject *text, int32_t seed) noexcept:
    """Hash of the UTF-16 units of a str, in place; a lone surrogate is a unit like any other."""
    cdef int kind = PyUnicode_KIND(text)
    cdef void *data = PyUnicode_DATA(text)
    cdef Py_ssize_t length = PyUnicode_GET_LENGTH(text)
    if kind == 1:
        return <int32_t>rmq_hash_latin1(<const uint8_t *>data, length, <uint32_t>seed)
    if kind == 2:
        return <int32_t>rmq_hash_units(<const uint16_t *>data, length, <uint32_t>seed)
    return <int32_t>rmq_hash_code_points(<const uint32_t *>data, length, <uint32_t>seed)


cdef int32_t hash_of_str(object text, int32_t seed) except? -1:
    """Java hash of a str, continued from `seed`. TypeError for anything else."""
    if not isinstance(text, str):
        raise TypeError(f"expected str, got {type(text).__name__}")
    return _hash_of(<PyObject *>text, seed)


cdef object decode_utf8(const uint8_t *p, int64_t size):
    """str of the bytes as Java decodes them: malformed input reads as U+FFFD."""
    cdef int malformed = 0
    rmq_utf16_units(p, size, &malformed)
    if not malformed:
        return PyUnicode_DecodeUTF8(<const char *>p, size, NULL)
    cdef uint8_t *repaired = <uint8_t *>PyMem_Malloc(3 * size)
    if repaired == NULL:
        raise MemoryError()
    try:
        return PyUnicode_DecodeUTF8(<const char *>repaired, rmq_utf8_repair(p, size, repaired), NULL)
    finally:
        PyMem_Free(repaired)


def decode_text(const uint8_t[::1] data not None):
    """str of UTF-8 bytes, as Java's String(byte[], UTF_8): what is malformed reads as U+FFFD."""
    return decode_utf8(&data[0], data.shape[0]) if data.shape[0] else ""


cdef inline object _named(object text, str name):
    if not isinstance(text, str):
        raise TypeError(f"{name} must be str, got {type(text).__name__}")
    return text


def java_hash(text):
    """Java's String.hashCode: int32 over UTF-16 code units. Cost: one pass. Source: java.lang.String#hashCode."""
    return hash_of_str(_named(text, "text"), 0)


def index_key_hash(key):
    """Hash stored in an index entry for the whole index key: |java_hash|, 0 for -2^31.

    Source: RocketMQ IndexFile#indexKeyHashMethod.
    """
    return key_hash_of(hash_of_str(_named(key, "key"), 0))


cdef int32_t _seed_of(object topic) except? -1:
    """Hash of `topic#`, on which the hash of the key goes on; 0 for whole index keys."""
    if topic is None:
        return 0
    return <int32_t>(31 * <uint32_t>hash_of_str(topic, 0) + <uint32_t>HASH_OF_SEPARATOR)


def hash_str_keys(list keys not None, topic=None):
    """Index key hashes (int32 array) of a list of str; with `topic`, of `topic#key`.

    TypeError names the position of an item that is no str.
    """
    cdef int32_t seed = _seed_of(topic)
    cdef PyObject *items = <PyObject *>keys
    cdef PyObject *item
    cdef const char *ahead
    result = np.empty(len(keys), np.int32)
    cdef int32_t[::1] out = result
    cdef Py_ssize_t i, count = out.shape[0]
    if len(keys) != count:  # a finalizer that ran at an allocation; from here on none does
        raise RuntimeError("keys changed while they were hashed")
    for i in range(count):
        if i + ITEMS_AHEAD < count:
            ahead = <const char *>PyList_GET_ITEM(items, i + ITEMS_AHEAD)
            rmq_prefetch(ahead)
            rmq_prefetch(ahead + 64)
        item = PyList_GET_ITEM(items, i)
        if not PyUnicode_Check(item):
            raise TypeError(f"keys[{i}] must be str, got {type(keys[i]).__name__}")
        out[i] = key_hash_of(_hash_of(item, seed))
    return result


ctypedef fused Offset:
    int32_t
    int64_t


cdef inline int64_t _end_of_short(const Offset *ends, int64_t begin, int64_t size, int32_t *sizes) noexcept nogil:
    """Where the next eight end; -1: not in order inside the data, one is long, what is read before them is missing."""
    cdef int64_t start = begin, end
    cdef int k
    for k in range(8):
        end = ends[k]
        if <uint64_t>end - <uint64_t>start > <uint64_t>RMQ_EIGHT_SIZE:
            return -1
        sizes[k] = <int32_t>(end - start)
        start = end
    return end if begin + sizes[0] >= RMQ_EIGHT_SIZE and end <= size else -1


cdef Py_ssize_t _hash_column(const Offset *offsets, Py_ssize_t count, const uint8_t *data, int64_t size, int32_t seed,
                             int32_t *out) noexcept nogil:
    """Hashes of data[offsets[i]:offsets[i + 1]]; the number of the first offset outside the data, -1: none.

    Another thread may write the offsets meanwhile: none is read again once it was checked.
    """
    cdef Py_ssize_t i = 0, stop, k
    cdef int64_t begin = offsets[0], end
    cdef int32_t[8] sizes
    cdef bint by_eight = rmq_hashes_eight()
    if begin < 0 or begin > size:
        return 0
    while i < count:
        stop = min(count, i + 8)
        end = _end_of_short(offsets + i + 1, begin, size, sizes) if by_eight and stop == i + 8 else -1
        if end >= 0:
            k = begin + BYTES_AHEAD
            while k < min(size, end + BYTES_AHEAD):
                rmq_prefetch(data + k)
                k += 64
            if rmq_hash_eight(data + begin, sizes, <uint32_t>seed, out + i):
                i, begin = stop, end
                continue
        while i < stop:
            end = offsets[i + 1]
            if end < begin or end > size:
                return i + 1
            if begin + BYTES_AHEAD < size:
                rmq_prefetch(data + begin + BYTES_AHEAD)
            out[i] = key_hash_of(rmq_hash_utf8(data + begin, end - begin, seed))
            begin = end
            i += 1
    return -1


cdef bint _in_order(const Offset *offsets, Py_ssize_t count, int64_t size) noexcept nogil:
    cdef bint wrong = offsets[0] < 0 or offsets[count - 1] > size
    cdef Py_ssize_t i
    for i in range(1, count):       # all of them, so that it goes by vectors
        wrong |= offsets[i] < offsets[i - 1]
    return not wrong


def in_order(offsets not None, int64_t size):
    """Whether offsets, an int32 or int64 array, lie in order inside data of so many bytes, as hash_utf8_keys needs."""
    cdef const int32_t[::1] narrow
    cdef const int64_t[::1] wide
    cdef bint found
    if len(offsets) == 0:
        return False
    if offsets.dtype == np.int32:
        narrow = offsets
        with nogil:
            found = _in_order[int32_t](&narrow[0], narrow.shape[0], size)
    else:
        wide = offsets
        with nogil:
            found = _in_order[int64_t](&wide[0], wide.shape[0], size)
    return found


def hash_utf8_keys(offsets not None, const uint8_t[::1] data not None, topic=None):
    """Index key hashes (int32 array) of UTF-8 strings data[offsets[i]:offsets[i + 1]]; offsets: int32 or int64 array.

    ValueError when the offsets do not lie in order inside the data.
    """
    cdef const int32_t[::1] narrow
    cdef const int64_t[::1] wide
    cdef Py_ssize_t count = len(offsets) - 1, wrong
    cdef int32_t seed = _seed_of(topic)
    if count < 0:
        raise ValueError("offsets must hold at least one number")
    result = np.empty(max(count, 1), np.int32)
    cdef int32_t[::1] out = result
    cdef const uint8_t *base = &data[0] if data.shape[0] else NULL
    if offsets.dtype == np.int32:
        narrow = offsets
        with nogil:
            wrong = _hash_column[int32_t](&narrow[0], count, base, data.shape[0], seed, &out[0])
    else:
        wide = offsets
        with nogil:
            wrong = _hash_column[int64_t](&wide[0], count, base, data.shape[0], seed, &out[0])
    if wrong >= 0:
        raise ValueError(f"offsets[{wrong}] lies outside the data")
    return result[:count]
