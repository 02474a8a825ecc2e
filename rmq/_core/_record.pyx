# SPDX-License-Identifier: Apache-2.0
"""Commit-log records under a borrowed pointer. Layout: docs/format/commitlog.md.

Source: RocketMQ MessageExtEncoder#encode, CommitLog#checkMessageAndReturnSize, MessageDecoder.
"""
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memchr, memcmp, memcpy

import os

cimport rmq._core._layout as L
from rmq._core._bytes cimport (
    load_i32, load_i64, load_u16, publish_i32, publish_i64, read_published_i64, store_i32, store_i64, store_u16,
)
from rmq._core._javahash cimport decode_utf8, rmq_utf8_reads_as

cdef extern from "property.h" nogil:
    const uint8_t *rmq_item_end(const uint8_t *p, const uint8_t *end, const uint8_t **mark) noexcept
    bint rmq_ends_with_crc(const uint8_t *p, int64_t n) noexcept

cdef extern from "append.h" nogil:
    void rmq_copy(uint8_t *dest, const uint8_t *p, size_t n) noexcept
cdef extern from "texts.h" nogil:
    void rmq_texts_copy(uint8_t *dest, const rmq_texts *texts, int64_t i, int64_t size) noexcept
cdef extern from "items.h" nogil:
    int RMQ_PLACES
    ctypedef struct rmq_place:
        int32_t position
        int32_t size
    void rmq_place_item(const uint8_t *record, const uint8_t *item, int64_t n, rmq_place *places) noexcept
    void rmq_find_places(const uint8_t *record, int64_t position, int64_t n, rmq_place *places) noexcept

cdef extern from "cpu.h" nogil:
    int RMQ_CPU_LEVELS
    int rmq_cpu_level
    const char **rmq_cpu_names

cdef extern from "crc32.h" nogil:
    int32_t rmq_crc32(const uint8_t *p, size_t n) noexcept
    int32_t rmq_crc32_on(const uint8_t *p, size_t n) noexcept
    int32_t rmq_crc32_copied(uint8_t *dest, const uint8_t *p, size_t n) noexcept
    int32_t rmq_crc32_headed(const uint8_t *head, const uint8_t *p, size_t n) noexcept

cdef extern from *:
    """
    #define rmq_acquire_fence() __atomic_thread_fence(__ATOMIC_ACQUIRE)
    """
    void rmq_acquire_fence() noexcept nogil

CPU_LEVELS = tuple([rmq_cpu_names[level].decode() for level in range(RMQ_CPU_LEVELS)])
CPU_LEVEL = CPU_LEVELS[rmq_cpu_level]
_most = os.environ.get("RMQ_CPU", CPU_LEVEL)
if _most not in CPU_LEVELS:
    raise ImportError(f"RMQ_CPU must be one of {', '.join(CPU_LEVELS)}, got {_most!r}")

cdef uint8_t[64] ZEROS                                  # as C makes them

SCAN_REASONS = {
    SCAN_ZERO: "no record: zeros",
    SCAN_TRUNCATED: "record reaches beyond the end of the data",
    SCAN_BAD_SIZE: "record size is out of range",
    SCAN_BAD_MAGIC: "magic is none of a record",
    SCAN_BAD_PHY_OFFSET: "record's own physical offset differs from its place",
    SCAN_BAD_LENGTHS: "body, topic and properties do not add up to the record size",
    SCAN_BAD_BODY_CRC: "body CRC differs",
    SCAN_BAD_RECORD_CRC: "whole-record CRC differs",
    SCAN_LOST_SECTOR: "a 512-byte sector of the topic or properties is zero, in part or whole",
    SCAN_NUL_END: "the properties end with NUL: half of them may be lost",
}


cdef int32_t crc_of(const uint8_t *p, int64_t size) noexcept nogil:
    """CRC-32 as RocketMQ stores it: 31 bits, 0 for no bytes. Source: UtilAll#crc32."""
    return rmq_crc32(p, <size_t>size) if size > 0 else 0


# ---- properties ----------------------------------------------------------------------------------------------

cdef bint next_property(const uint8_t **cursor, const uint8_t *end, bint legacy, Property *item) noexcept nogil:
    """Next well-formed item `name 0x01 value 0x02` at *cursor; False at the end. Moves *cursor at least one byte.

    Source: MessageDecoder#string2messageProperties; legacy: the split-based parser of <= 4.9.0.
    """
    cdef const uint8_t *start
    cdef const uint8_t *stop
    cdef const uint8_t *mark
    while cursor[0] < end:
        start = cursor[0]
        stop = rmq_item_end(start, end, &mark)
        cursor[0] = stop + 1
        if mark == NULL or mark == start:
            continue
        item.name = start
        item.name_size = mark - start
        item.value = mark + 1
        if legacy:
            while stop > mark + 1 and (stop - 1)[0] == L.PROPERTY_NAME_END:
                stop -= 1
            if memchr(mark + 1, L.PROPERTY_NAME_END, stop - mark - 1) != NULL:
                continue
        item.value_size = stop - mark - 1
        if item.value_size > 0:
            return True
    return False


cdef bint next_key(const uint8_t **cursor, const uint8_t *end, const uint8_t **key, int64_t *size) noexcept nogil:
    """Next non-empty piece of KEYS, split on single spaces; False at the end."""
    cdef const uint8_t *stop
    while cursor[0] < end:
        key[0] = cursor[0]
        stop = <const uint8_t *>memchr(cursor[0], 0x20, end - cursor[0])
        if stop == NULL:
            stop = end
        size[0] = stop - cursor[0]
        cursor[0] = stop + 1
        if size[0] > 0:
            return True
    return False


cdef void _find_legacy(const RecordRow *row, rmq_place *places) noexcept nogil:
    """rmq_find_places by the rules of RocketMQ <= 4.9.0."""
    cdef const uint8_t *cursor = row.base + row.properties_position
    cdef const uint8_t *end = cursor + row.properties_size
    cdef Property item
    cdef int number
    for number in range(RMQ_PLACES):
        places[number].position, places[number].size = 0, -1
    while next_property(&cursor, end, True, &item):
        rmq_place_item(row.base, item.name, item.value + item.value_size - item.name, places)


cdef void find_properties(RecordRow *row, bint legacy) noexcept nogil:
    """Place KEYS, UNIQ_KEY, TAGS and DELAY; of repeated names the last wins, of a missing one the size is -1."""
    cdef rmq_place *places = <rmq_place *>&row.keys_position
    if legacy:
        _find_legacy(row, places)
    else:
        rmq_find_places(row.base, row.properties_position, row.properties_size, places)


cdef bint row_has_key(const RecordRow *row, const uint8_t *key, int64_t size) noexcept nogil:
    """Whether a row with parsed properties carries the key, UTF-8: an item of KEYS or UNIQ_KEY, as it reads."""
    cdef const uint8_t *cursor
    cdef const uint8_t *end
    cdef const uint8_t *piece
    cdef int64_t piece_size
    if row.uniq_key_size == size and memcmp(row.base + row.uniq_key_position, key, size) == 0:
        return True
    if row.keys_size >= size:
        cursor = row.base + row.keys_position
        end = cursor + row.keys_size
        while next_key(&cursor, end, &piece, &piece_size):
            if piece_size == size and memcmp(piece, key, size) == 0:
                return True
    # Only a key with U+FFFD, or one of its bytes, is how other bytes read.
    return memchr(key, 0xEF, size) != NULL and _reads_as_key(row, key, size)


cdef bint _reads_as_key(const RecordRow *row, const uint8_t *key, int64_t size) noexcept nogil:
    """row_has_key with malformed bytes read as U+FFFD, as Java decodes properties before it indexes them."""
    cdef const uint8_t *cursor = row.base + row.keys_position
    cdef const uint8_t *end = cursor + row.keys_size
    cdef const uint8_t *piece
    cdef int64_t piece_size
    if rmq_utf8_reads_as(row.base + row.uniq_key_position, row.uniq_key_size, key, size):
        return True
    while next_key(&cursor, end, &piece, &piece_size):
        if rmq_utf8_reads_as(piece, piece_size, key, size):
            return True
    return False


# ---- validate ------------------------------------------------------------------------------------------------

cdef bint _has_record_crc(const RecordRow *row) noexcept nogil:
    """Whether the CRC property ends the properties."""
    return rmq_ends_with_crc(row.base + row.properties_position, row.properties_size)


cdef bint _record_crc_differs(const RecordRow *row) noexcept nogil:
    """Whether the CRC property, when it ends the properties, speaks of other bytes. Digits run backwards."""
    cdef const uint8_t *tail = row.base + row.size - L.PROPERTY_CRC_SIZE
    cdef int i
    cdef int64_t stored = 0
    if not _has_record_crc(row):
        return False
    for i in range(L.PROPERTY_CRC_DIGITS - 1, -1, -1):
        stored = stored * 10 + (tail[CRC_NAME_SIZE + 1 + i] - 48)
    return stored != crc_of(row.base, row.size - L.PROPERTY_CRC_SIZE)


cdef bint _has_lost_sector(const RecordRow *row) noexcept nogil:
    """Whether topic or properties touch a disk sector whose part inside this record is all zero, or was half stored.

    put takes no topic with a NUL.
    """
    cdef int64_t begin = row.phy_offset + row.topic_position
    cdef int64_t end = row.phy_offset + row.size
    cdef int64_t sector = begin - begin % SECTOR_SIZE
    cdef int64_t low, high, i
    if memchr(row.base + row.topic_position, 0, row.topic_size) != NULL:
        return True
    while sector < end:
        low = max(sector, row.phy_offset)
        high = min(sector + SECTOR_SIZE, end)
        # One or two zero bytes may be an empty properties field.
        if high - low > 2 and row.base[high - 1 - row.phy_offset] == 0 and row.base[low - row.phy_offset] == 0:
            i = low
            while i < high and row.base[i - row.phy_offset] == 0:
                i += 1
            if i == high:
                return True
        sector += SECTOR_SIZE
    return False


cdef bint holds_lost_sector(const uint8_t *p, int64_t size) noexcept nogil:
    """Whether as many NULs as a sector has follow each other."""
    cdef int64_t i, run = 0
    if memchr(p, 0, size) == NULL:
        return False
    for i in range(size):
        run = run + 1 if p[i] == 0 else 0
        if run == SECTOR_SIZE:
            return True
    return False


cdef int parse_record(const uint8_t *base, int64_t room, int64_t segment_room, int64_t phy_offset, int checks,
                      RecordRow *row) noexcept nogil:
    """Validate the record at base and fill *row. Returns SCAN_FULL for a whole record, else why there is none.

    SCAN_TRUNCATED: nothing is wrong with what is there of it.
    REQUIRES: room bytes readable at base; segment_room = bytes from base to the end of the segment.
    Source: CommitLog#checkMessageAndReturnSize, and stricter: own offset, lengths, sectors.
    """
    cdef int32_t size, magic, fixed, topic_field
    cdef int64_t at
    cdef bint is_cut
    if room < L.BLANK_HEADER_SIZE:
        return SCAN_TRUNCATED
    size = load_i32(base)
    magic = load_i32(base + L.RECORD_MAGIC_OFFSET)
    if magic == L.BLANK_MAGIC:
        return SCAN_BLANK if size == segment_room else SCAN_BAD_SIZE
    if size == 0 and magic == 0:
        return SCAN_ZERO
    if magic != L.RECORD_MAGIC_V1 and magic != L.RECORD_MAGIC_V2:
        return SCAN_BAD_MAGIC
    if size < L.RECORD_FIXED_SIZE or size > segment_room:
        return SCAN_BAD_SIZE
    is_cut = size > room
    if is_cut and room < L.RECORD_FIXED_SIZE:
        return SCAN_TRUNCATED
    rmq_acquire_fence()
    row.base = base
    row.size = size
    row.phy_offset = load_i64(base + L.RECORD_PHY_OFFSET_OFFSET)
    if row.phy_offset != phy_offset:
        return SCAN_BAD_PHY_OFFSET
    row.body_crc = load_i32(base + L.RECORD_BODY_CRC_OFFSET)
    row.queue_id = load_i32(base + L.RECORD_QUEUE_ID_OFFSET)
    row.flag = load_i32(base + L.RECORD_FLAG_OFFSET)
    row.queue_offset = load_i64(base + L.RECORD_QUEUE_OFFSET_OFFSET)
    row.sys_flag = load_i32(base + L.RECORD_SYS_FLAG_OFFSET)
    row.born_timestamp = load_i64(base + L.RECORD_BORN_TIMESTAMP_OFFSET)
    fixed = L.HOST_IPV6_EXTRA if row.sys_flag & L.SYS_FLAG_BORN_HOST_IPV6 else 0
    row.store_timestamp = load_i64(base + L.RECORD_STORE_TIMESTAMP_OFFSET + fixed)
    fixed += L.HOST_IPV6_EXTRA if row.sys_flag & L.SYS_FLAG_STORE_HOST_IPV6 else 0
    topic_field = L.RECORD_TOPIC_SIZE_V2_SIZE if magic == L.RECORD_MAGIC_V2 else L.RECORD_TOPIC_SIZE_V1_SIZE
    if size < L.RECORD_FIXED_SIZE + fixed + topic_field - L.RECORD_TOPIC_SIZE_V1_SIZE:
        return SCAN_BAD_LENGTHS
    if is_cut and room < L.RECORD_FIXED_SIZE + fixed:
        return SCAN_TRUNCATED
    row.reconsume_times = load_i32(base + L.RECORD_RECONSUME_TIMES_OFFSET + fixed)
    row.prepared_transaction_offset = load_i64(base + L.RECORD_PREPARED_TRANSACTION_OFFSET_OFFSET + fixed)
    row.body_size = load_i32(base + L.RECORD_BODY_SIZE_OFFSET + fixed)
    row.body_position = L.RECORD_BODY_OFFSET + fixed
    at = <int64_t>row.body_position + row.body_size
    if row.body_size < 0 or at + topic_field + L.RECORD_PROPERTIES_SIZE_SIZE > size:
        return SCAN_BAD_LENGTHS
    if is_cut and at + topic_field > room:
        return SCAN_TRUNCATED
    row.topic_size = <int32_t>load_u16(base + at) if topic_field == L.RECORD_TOPIC_SIZE_V2_SIZE else base[at]
    at += topic_field
    row.topic_position = <int32_t>at
    at += row.topic_size
    if at + L.RECORD_PROPERTIES_SIZE_SIZE > size:
        return SCAN_BAD_LENGTHS
    if is_cut and at + L.RECORD_PROPERTIES_SIZE_SIZE > room:
        return SCAN_TRUNCATED
    row.properties_size = load_u16(base + at)
    row.properties_position = <int32_t>at + L.RECORD_PROPERTIES_SIZE_SIZE
    if <int64_t>row.properties_position + row.properties_size != size or row.properties_size > L.PROPERTIES_SIZE_LIMIT:
        return SCAN_BAD_LENGTHS
    if is_cut:
        return SCAN_TRUNCATED
    if checks & CHECK_BODY_CRC and row.body_size > 0:
        if (rmq_crc32_on if checks & READS_ON else rmq_crc32)(base + row.body_position, row.body_size) != row.body_crc:
            return SCAN_BAD_BODY_CRC
    if checks & CHECK_RECORD_CRC and _record_crc_differs(row):
        return SCAN_BAD_RECORD_CRC
    if checks & CHECK_SECTORS and _has_lost_sector(row):
        return SCAN_LOST_SECTOR
    if checks & CHECK_SECTORS and row.properties_size > 0 and base[size - 1] == 0:  # put takes none of these
        return SCAN_NUL_END
    if checks & CHECK_HAS_CRC and not _has_record_crc(row) and \
            memchr(base + row.properties_position, 0, row.properties_size) != NULL:
        return SCAN_LOST_SECTOR
    row.queue = -1
    if checks & PARSE_PROPERTIES:
        find_properties(row, checks & LEGACY_PROPERTIES)
    else:
        row.keys_size = row.uniq_key_size = row.tags_size = row.delay_size = -1
        row.keys_position = row.uniq_key_position = row.tags_position = row.delay_position = 0
    return SCAN_FULL


# ---- encode --------------------------------------------------------------------------------------------------

cdef void encode_record(const PutRow *row, uint8_t *dest, int64_t phy_offset, int64_t store_timestamp,
                        const rmq_texts *texts, int64_t number) noexcept nogil:
    """Write one record at dest; its total size last, so that a reader never takes half a record for a whole one.

    number: of the row in `texts`. REQUIRES: row.size writable bytes at dest. Source: MessageExtEncoder#encode.
    """
    cdef uint8_t *late = dest + row.born_host_size - L.HOST_IPV4_SIZE     # what lies behind the born host, from here
    cdef uint8_t *p
    cdef int32_t properties_written
    store_i32(dest + L.RECORD_SIZE_OFFSET, 0)
    store_i32(dest + L.RECORD_MAGIC_OFFSET, L.RECORD_MAGIC_V2 if row.is_v2 else L.RECORD_MAGIC_V1)
    store_i32(dest + L.RECORD_QUEUE_ID_OFFSET, row.queue_id)
    store_i32(dest + L.RECORD_FLAG_OFFSET, row.flag)
    store_i64(dest + L.RECORD_QUEUE_OFFSET_OFFSET, row.queue_offset)
    store_i64(dest + L.RECORD_PHY_OFFSET_OFFSET, phy_offset)
    store_i32(dest + L.RECORD_SYS_FLAG_OFFSET, row.sys_flag)
    store_i64(dest + L.RECORD_BORN_TIMESTAMP_OFFSET, store_timestamp if row.is_born_now else row.born_timestamp)
    rmq_copy(dest + L.RECORD_BORN_HOST_OFFSET, row.born_host, <size_t>row.born_host_size)
    store_i64(late + L.RECORD_STORE_TIMESTAMP_OFFSET, store_timestamp)
    rmq_copy(late + L.RECORD_STORE_HOST_OFFSET, row.store_host, <size_t>row.store_host_size)
    late += row.store_host_size - L.HOST_IPV4_SIZE
    store_i32(late + L.RECORD_RECONSUME_TIMES_OFFSET, row.reconsume_times)
    store_i64(late + L.RECORD_PREPARED_TRANSACTION_OFFSET_OFFSET, row.prepared_transaction_offset)
    store_i32(late + L.RECORD_BODY_SIZE_OFFSET, row.body_size)
    p = late + L.RECORD_BODY_OFFSET
    store_i32(dest + L.RECORD_BODY_CRC_OFFSET, rmq_crc32_copied(p, row.body, <size_t>row.body_size))
    p += row.body_size
    if row.is_v2:
        store_u16(p, <unsigned short>row.topic_size)
        p += L.RECORD_TOPIC_SIZE_V2_SIZE
    else:
        p[0] = <uint8_t>row.topic_size
        p += L.RECORD_TOPIC_SIZE_V1_SIZE
    rmq_copy(p, row.topic, <size_t>row.topic_size)
    p += row.topic_size
    store_u16(p, <unsigned short>row.properties_size)
    p += L.RECORD_PROPERTIES_SIZE_SIZE
    properties_written = row.properties_size
    if row.append_crc:
        properties_written -= L.PROPERTY_CRC_SIZE + (1 if row.separate_crc else 0)
    if row.properties == NULL:
        rmq_texts_copy(p, texts, number, properties_written)
    else:
        rmq_copy(p, row.properties, <size_t>properties_written)
    if row.append_crc:
        if row.separate_crc:
            p[properties_written] = L.PROPERTY_END
        append_record_crc(dest, row.size)
    publish_i32(dest, row.size)


cdef void append_record_crc(uint8_t *dest, int32_t size) noexcept nogil:
    """End a record of `size` bytes with the CRC property of what lies before it. Its total size is not stored yet."""
    cdef uint8_t total_size[4]
    cdef uint8_t *p = dest + size - L.PROPERTY_CRC_SIZE
    cdef int32_t crc
    cdef int i
    store_i32(total_size, size)
    crc = rmq_crc32_headed(total_size, dest, <size_t>(size - L.PROPERTY_CRC_SIZE))
    memcpy(p, CRC_NAME, CRC_NAME_SIZE)
    p += CRC_NAME_SIZE
    p[0] = L.PROPERTY_NAME_END
    for i in range(L.PROPERTY_CRC_DIGITS):
        p[1 + i] = <uint8_t>(48 + crc % 10)
        crc //= 10
    p[1 + L.PROPERTY_CRC_DIGITS] = L.PROPERTY_END


def encode_blank(uint8_t[::1] segment not None, int64_t position):
    """Close a segment: the blank record that fills it from position to its end (8 bytes are written)."""
    cdef int64_t room = segment.shape[0] - position
    if position < 0 or room < L.BLANK_HEADER_SIZE or room > 0x7FFFFFFF:
        raise ValueError(f"position {position} leaves no room for a blank record")
    store_i32(&segment[position] + L.RECORD_MAGIC_OFFSET, L.BLANK_MAGIC)
    publish_i32(&segment[position], <int32_t>room)


cdef void show_end(uint8_t *marks, int64_t phy_offset) noexcept nogil:
    """Publish the end of the log to readers: stored with release order behind every byte below it."""
    publish_i64(marks + L.MARKS_VISIBLE_PHY_OFFSET_OFFSET, phy_offset)


def store_visible(marks, int64_t phy_offset):
    """show_end in the marks' bytes."""
    cdef Py_buffer buffer   # a typed memoryview takes ten times as long to make, for each put
    PyObject_GetBuffer(marks, &buffer, PyBUF_WRITABLE)
    try:
        if buffer.len < L.MARKS_SIZE:
            raise ValueError("marks are shorter than MARKS_SIZE")
        show_end(<uint8_t *>buffer.buf, phy_offset)
    finally:
        PyBuffer_Release(&buffer)


def load_visible(const uint8_t[::1] marks not None):
    """What store_visible stored, in any process; what is read afterwards is as it was then, or later."""
    if marks.shape[0] < L.MARKS_SIZE:
        raise ValueError("marks are shorter than MARKS_SIZE")
    return read_published_i64(&marks[L.MARKS_VISIBLE_PHY_OFFSET_OFFSET])


def ends_with_crc(bytes properties not None):
    """Whether properties end with the CRC of a whole record, or with what its name makes one."""
    return rmq_ends_with_crc(<const uint8_t *><const char *>properties, len(properties)) != 0


def body_crc(const uint8_t[::1] body not None):
    """CRC-32 of a body as RocketMQ stores it: 31 bits, 0 when empty. Source: UtilAll#crc32."""
    return crc_of(&body[0], body.shape[0]) if body.shape[0] else 0


# ---- bytes that may hold no record ----------------------------------------------------------------------------

def resync(const uint8_t[::1] segment not None, int64_t segment_phy_offset, int64_t begin, int64_t end):
    """Phy offset of the first whole record (magic, own offset, lengths, CRC) at or behind `begin`, -1 when none.

    Looks at every byte below `end`; both lie in the segment, else ValueError. Headers in one another's bodies end it
    when NESTED_LIMIT times the range were read of these.
    """
    cdef int64_t size = segment.shape[0], found = -1, position, limit, left
    cdef const uint8_t *base, *mark
    cdef RecordRow row
    cdef int stop
    if begin < segment_phy_offset or end < begin or end - segment_phy_offset > size:
        raise ValueError(f"range [{begin}, {end}) lies outside the segment at {segment_phy_offset}")
    if size == 0:
        return -1
    position, limit, left = begin - segment_phy_offset, end - segment_phy_offset, NESTED_LIMIT * (end - begin)
    base = &segment[0]
    with nogil:
        while left >= 0 and position + L.RECORD_FIXED_SIZE <= limit:
            # Both magics begin with 0xDA.
            mark = <const uint8_t *>memchr(base + position + L.RECORD_MAGIC_OFFSET, 0xDA,
                                           limit - position - L.RECORD_MAGIC_OFFSET)
            if mark == NULL:
                break
            position = mark - base - L.RECORD_MAGIC_OFFSET
            stop = parse_record(base + position, limit - position, size - position, segment_phy_offset + position,
                                CHECK_BODY_CRC | CHECK_RECORD_CRC, &row)
            if stop == SCAN_FULL:
                found = segment_phy_offset + position
                break
            left -= load_i32(base + position) if stop == SCAN_BAD_BODY_CRC or stop == SCAN_BAD_RECORD_CRC else 0
            position += 1
    return found


def used_size(const uint8_t[::1] data not None, int64_t begin):
    """Position behind the last byte at or behind `begin` that is not zero; `begin` when there is none."""
    cdef int64_t end = data.shape[0]
    cdef const uint8_t *base
    if begin < 0 or begin >= end:
        return begin
    base = &data[0]
    with nogil:
        while end - begin >= 64 and memcmp(base + end - 64, ZEROS, 64) == 0:
            end -= 64
        while end > begin and base[end - 1] == 0:
            end -= 1
    return end


def parse_properties(const uint8_t[::1] data not None):
    """Properties of a record as a dict of str, in stored order; of repeated names the last value wins.

    Malformed items are ignored, text is decoded as Java does. Source: MessageDecoder#string2messageProperties.
    """
    cdef dict result = {}
    cdef const uint8_t *cursor, *end
    cdef Property item
    if data.shape[0] == 0:
        return result
    cursor = &data[0]
    end = cursor + data.shape[0]
    while next_property(&cursor, end, False, &item):
        result[decode_utf8(item.name, item.name_size)] = decode_utf8(item.value, item.value_size)
    return result
