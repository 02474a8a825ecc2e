# SPDX-License-Identifier: Apache-2.0
"""Consume-queue units in batches. Layout: docs/format/consumequeue.md. Source: RocketMQ ConsumeQueue."""
from libc.stdint cimport int32_t, int64_t, uint8_t

cimport rmq._core._layout as L
from rmq._core._bytes cimport load_i32, load_i64, load_u16, store_i32, store_i64
from rmq._core._javahash cimport rmq_hash_utf8
from rmq._core._record cimport RecordRow
from rmq._core._recordbatch cimport RecordBatch

cdef extern from "schedule.h" nogil:
    bint rmq_is_schedule_topic(const uint8_t *topic, int64_t size) noexcept
    bint rmq_parse_int(const uint8_t *p, int64_t n, int64_t *value) noexcept

import numpy as np

cdef int64_t UNKNOWN_DELAY_MS = 1000


cdef int64_t _delay_ms(const RecordRow *row, const int64_t[::1] delay_levels) noexcept nogil:
    """Delay of a scheduled message in ms, -1 when it has no valid DELAY. Source: ScheduleMessageService."""
    cdef int64_t level
    if not rmq_parse_int(row.base + row.delay_position, row.delay_size, &level) or level <= 0:
        return -1
    level = min(level, delay_levels.shape[0])
    return delay_levels[level - 1] if level > 0 else UNKNOWN_DELAY_MS


cdef bint is_scheduled(const RecordRow *row) noexcept nogil:
    """Whether a row with parsed properties waits for its delay: its tags code is a time."""
    return row.delay_size > 0 and rmq_is_schedule_topic(row.base + row.topic_position, row.topic_size)


cdef int64_t tags_code_of(const RecordRow *row, const int64_t[::1] delay_levels) noexcept nogil:
    """Source: MessageExtBrokerInner#tagsString2tagsCode, CommitLog#checkMessageAndReturnSize."""
    cdef int64_t delay
    if is_scheduled(row):
        delay = _delay_ms(row, delay_levels)
        if delay >= 0:
            return <int64_t>(<unsigned long long>row.store_timestamp + <unsigned long long>delay)
    if row.tags_size <= 0:
        return 0
    return rmq_hash_utf8(row.base + row.tags_position, row.tags_size, 0)


def pack_units(RecordBatch batch not None, const int64_t[::1] delay_levels not None, int64_t begin=0):
    """Units of a scanned batch, grouped: (units, runs).

    units: uint8 array of 20-byte units. runs: int64 array [r, 4] of (queue number, first queue offset, first unit,
    count); a run is one queue's units with consecutive queue offsets, in log order. Only messages of transaction type
    NONE and COMMIT get a unit; inner batches and records below `begin` get none. Rows must have queue numbers and
    parsed properties.
    Source: CommitLogDispatcherBuildConsumeQueue.
    """
    cdef int32_t i, count = 0, r = 0
    cdef RecordRow *row
    cdef int64_t last = -1, all_bits = 0
    cdef bint is_grouped = True
    units = np.empty((batch.count, L.UNIT_SIZE), np.uint8)
    queues = np.empty(batch.count, np.int64)
    offsets = np.empty(batch.count, np.int64)
    cdef uint8_t[:, ::1] out = units
    cdef int64_t[::1] queue_of = queues, offset_of = offsets
    cdef uint8_t *p
    with nogil:
        for i in range(batch.count):
            row = &batch.rows[i]
            if row.phy_offset < begin or not has_unit(row):
                continue
            if row.queue < 0:
                with gil:
                    raise ValueError("rows have no queue numbers")
            p = &out[count, 0]
            store_i64(p + L.UNIT_PHY_OFFSET_OFFSET, row.phy_offset)
            store_i32(p + L.UNIT_SIZE_OFFSET, row.size)
            store_i64(p + L.UNIT_TAGS_CODE_OFFSET, batch.hashes[i].tags if batch.has_hashes and row.delay_size <= 0
                      else tags_code_of(row, delay_levels))
            queue_of[count] = row.queue
            offset_of[count] = row.queue_offset
            is_grouped = is_grouped and row.queue >= last
            last = row.queue
            all_bits |= last
            count += 1
    if not is_grouped:
        # NumPy sorts 16 bits by radix, and takes rows without looking at each.
        order = np.argsort(queues[:count].astype(np.uint16 if all_bits < 0x10000 else np.int64), kind="stable")
        units, queue_of, offset_of = units.take(order, 0), queues[order], offsets[order]
    runs = np.empty((count, 4), np.int64)
    cdef int64_t[:, ::1] run = runs
    with nogil:
        for i in range(count):
            if i == 0 or queue_of[i] != queue_of[i - 1] or \
                    offset_of[i] != <int64_t>(<unsigned long long>offset_of[i - 1] + 1):  # wraps: offsets are hostile
                run[r, 0] = queue_of[i]
                run[r, 1] = offset_of[i]
                run[r, 2] = i
                run[r, 3] = 0
                r += 1
            run[r - 1, 3] += 1
    return units[:count].reshape(-1), runs[:r]


def unpack_units(const uint8_t[::1] data not None):
    """(phy_offset int64, size int32, tags_code int64) arrays of 20-byte units; a partial last one is ignored."""
    cdef Py_ssize_t i, count = data.shape[0] // L.UNIT_SIZE
    phy_offset = np.empty(count, np.int64)
    size = np.empty(count, np.int32)
    tags_code = np.empty(count, np.int64)
    cdef int64_t[::1] phy = phy_offset, tags = tags_code
    cdef int32_t[::1] sizes = size
    cdef const uint8_t *p
    with nogil:
        for i in range(count):
            p = &data[i * L.UNIT_SIZE]
            phy[i] = load_i64(p + L.UNIT_PHY_OFFSET_OFFSET)
            sizes[i] = load_i32(p + L.UNIT_SIZE_OFFSET)
            tags[i] = load_i64(p + L.UNIT_TAGS_CODE_OFFSET)
    return phy_offset, size, tags_code


def valid_units(const uint8_t[::1] data not None):
    """How many of the leading units are valid: phy offset >= 0 and size > 0. Source: ConsumeQueue#recover."""
    cdef Py_ssize_t i, count = data.shape[0] // L.UNIT_SIZE
    cdef const uint8_t *p
    with nogil:
        for i in range(count):
            p = &data[i * L.UNIT_SIZE]
            if load_i64(p + L.UNIT_PHY_OFFSET_OFFSET) < 0 or load_i32(p + L.UNIT_SIZE_OFFSET) <= 0:
                count = i
                break
    return count


def pre_blank_units(int64_t count):
    """Bytes of `count` units that stand for removed messages (RocketMQ: ConsumeQueue#fillPreBlank)."""
    unit = np.zeros(L.UNIT_SIZE, np.uint8)
    cdef uint8_t[::1] p = unit
    store_i32(&p[L.UNIT_SIZE_OFFSET], L.UNIT_PRE_BLANK_SIZE)
    return np.tile(unit, count).tobytes()


def unpack_batch_units(const uint8_t[::1] data not None):
    """Leading valid 46-byte units as an int64 array [n, 6]:
    phy_offset, size, tags_code, store_timestamp, base offset, count. Source: BatchConsumeQueue.
    """
    cdef Py_ssize_t i, count = data.shape[0] // L.BATCH_UNIT_SIZE
    result = np.empty((count, 6), np.int64)
    cdef int64_t[:, ::1] out = result
    cdef const uint8_t *p
    for i in range(count):
        p = &data[i * L.BATCH_UNIT_SIZE]
        out[i, 0] = load_i64(p + L.BATCH_UNIT_PHY_OFFSET_OFFSET)
        out[i, 1] = load_i32(p + L.BATCH_UNIT_SIZE_OFFSET)
        out[i, 2] = load_i64(p + L.BATCH_UNIT_TAGS_CODE_OFFSET)
        out[i, 3] = load_i64(p + L.BATCH_UNIT_STORE_TIMESTAMP_OFFSET)
        out[i, 4] = load_i64(p + L.BATCH_UNIT_BASE_OFFSET_OFFSET)
        out[i, 5] = load_u16(p + L.BATCH_UNIT_COUNT_OFFSET)
        if out[i, 0] < 0 or out[i, 1] <= 0 or out[i, 4] < 0 or not 0 < out[i, 5] <= L.INNER_COUNT_LIMIT:
            return result[:i]
    return result
