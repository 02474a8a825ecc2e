# SPDX-License-Identifier: Apache-2.0
"""Java String.hashCode over UTF-16 units: one string, a list of str, an Arrow string buffer."""
cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.unicode cimport PyUnicode_DecodeUTF8, PyUnicode_DATA, PyUnicode_GET_LENGTH, PyUnicode_KIND, PyUnicode_READ
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

import numpy as np

cdef int32_t HASH_OF_SEPARATOR = 35     # '#', between topic and key in an index key


cdef int32_t hash_of_str(object text, int32_t seed) except? -1:
    """Hash of the str's UTF-16 units in place; a lone surrogate is a unit like any other."""
    if not isinstance(text, str):
        raise TypeError(f"expected str, got {type(text).__name__}")
    cdef int kind = PyUnicode_KIND(text)
    cdef void *data = PyUnicode_DATA(text)
    cdef Py_ssize_t i, length = PyUnicode_GET_LENGTH(text)
    cdef uint32_t h = <uint32_t>seed, c
    if kind == 1:
        return <int32_t>rmq_hash_latin1(<const uint8_t *>data, length, h)
    for i in range(length):
        c = PyUnicode_READ(kind, data, i)
        if c >= 0x10000:
            c -= 0x10000
            h = 31 * h + (<uint32_t>0xD800 + (c >> 10))
            h = 31 * h + (<uint32_t>0xDC00 + (c & <uint32_t>0x3FF))
        else:
            h = 31 * h + c
    return <int32_t>h


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


def java_hash(str text not None):
    """Java's String.hashCode: int32 over UTF-16 code units. Cost: one pass. Source: java.lang.String#hashCode."""
    return hash_of_str(text, 0)


def index_key_hash(str key not None):
    """Hash stored in an index entry for the whole index key: |java_hash|, 0 for -2^31.

    Source: RocketMQ IndexFile#indexKeyHashMethod.
    """
    return key_hash_of(hash_of_str(key, 0))


def hash_slot(int32_t key_hash, int32_t hash_slot_num):
    """Slot of a key hash. Both must not be negative, hash_slot_num not 0: ValueError."""
    if key_hash < 0 or hash_slot_num <= 0:
        raise ValueError("key_hash must be >= 0 and hash_slot_num > 0")
    return key_hash % hash_slot_num


cdef int32_t _seed_of(object topic) except? -1:
    """Hash of `topic#`, on which the hash of the key goes on; 0 for whole index keys."""
    if topic is None:
        return 0
    return <int32_t>(31 * <uint32_t>hash_of_str(topic, 0) + <uint32_t>HASH_OF_SEPARATOR)


def hash_str_keys(list keys not None, topic=None):
    """Index key hashes (int32 array) of a list of str; with `topic`, of `topic#key`.

    TypeError names the position of an item that is no str.
    """
    cdef Py_ssize_t i, count = len(keys)
    cdef int32_t seed = _seed_of(topic)
    result = np.empty(count, np.int32)
    cdef int32_t[::1] out = result
    for i in range(count):
        if not isinstance(keys[i], str):
            raise TypeError(f"keys[{i}] must be str, got {type(keys[i]).__name__}")
        out[i] = key_hash_of(hash_of_str(keys[i], seed))
    return result


def hash_utf8_keys(const int64_t[::1] offsets not None, const uint8_t[::1] data not None, topic=None):
    """Index key hashes (int32 array) of UTF-8 strings data[offsets[i]:offsets[i + 1]].

    ValueError when the offsets do not lie in order inside the data.
    """
    cdef Py_ssize_t i, count = offsets.shape[0] - 1
    cdef int32_t seed = _seed_of(topic)
    if count < 0:
        raise ValueError("offsets must hold at least one number")
    for i in range(count + 1):
        if offsets[i] < 0 or offsets[i] > data.shape[0] or (i > 0 and offsets[i] < offsets[i - 1]):
            raise ValueError(f"offsets[{i}] lies outside the data")
    result = np.empty(count, np.int32)
    cdef int32_t[::1] out = result
    cdef const uint8_t *base = &data[0] if data.shape[0] else NULL
    with nogil:
        for i in range(count):
            out[i] = key_hash_of(rmq_hash_utf8(base + offsets[i], offsets[i + 1] - offsets[i], seed))
    return result
