# SPDX-License-Identifier: Apache-2.0
"""Which lines of the log are asked of memory before their turn. No .pyx behind it."""
from libc.stdint cimport int32_t, int64_t, uint8_t

from rmq._core._bytes cimport load_i32
from rmq._core._record cimport RecordRow

cdef extern from "prefetch.h" nogil:
    void rmq_prefetch(const void *p) noexcept
    void rmq_prefetch_far(const void *p) noexcept

cdef extern from "asking.h" nogil:
    int RMQ_READ_AHEAD
    ctypedef struct rmq_asking:
        int read_step
    const rmq_asking *rmq_asks

cdef extern from "crc32.h" nogil:
    bint rmq_crc_asks(size_t n, bint copies) noexcept

cdef enum:
    LINE = 64                   # bytes of a cache line
    RECORDS_TOGETHER = 8        # of a scan that passes over the bodies: asked for as many before their turn
    NEAR = 512                  # bytes of a record: of smaller ones every line is read
    FRONT = 92                  # bytes of a record that are read of most, up to its body's size
    FRONT_LINES = 128           # bytes from a record's start up to its body and a bit more
    FRONTS_AHEAD = 32           # of a look-up: records whose front is asked for
    TAILS_AHEAD = 16
    TAIL_LINES = 256            # bytes of topic and properties that are asked for


cdef inline void prefetch_lines(const uint8_t *base, int64_t begin, int64_t end, int64_t size) noexcept nogil:
    """Ask for the cache lines of bytes [begin, end), those among the first `size`."""
    end = min(end, size)
    while begin < end:
        rmq_prefetch(base + begin)
        begin += LINE


cdef inline void _prefetch_far(const uint8_t *base, int64_t begin, int64_t end) noexcept nogil:
    """prefetch_lines far ahead; base is aligned to a line."""
    begin -= begin % LINE
    while begin < end:
        rmq_prefetch_far(base + begin)
        begin += LINE


cdef inline void prefetch_ahead(const uint8_t *base, int64_t following, int64_t size, const RecordRow *last,
                                int32_t count) noexcept nogil:
    """Ask for front, topic and properties of later records, as if all were like the last one: `following` is its end,
    count the records so far. Many at once: each is of another page, and beside other work few pages are looked up.

    Only for scans that pass over the bodies of such as are longer than NEAR.
    """
    cdef int64_t at, stop, tail = last.topic_position
    if count % RECORDS_TOGETHER and count != 1:
        return
    at = following if count == 1 else following + RECORDS_TOGETHER * <int64_t>last.size
    stop = min(size, following + 2 * RECORDS_TOGETHER * <int64_t>last.size) - last.size
    while at <= stop:
        _prefetch_far(base, at, at + FRONT)
        _prefetch_far(base, at + tail, at + min(<int64_t>last.size, tail + TAIL_LINES))
        at += last.size


cdef inline void _prefetch_later(const uint8_t *base, int64_t begin, int64_t end, int64_t size) noexcept nogil:
    """Ask for what lies RMQ_READ_AHEAD behind bytes [begin, end), in the first `size`."""
    cdef int64_t step = rmq_asks.read_step      # a power of two
    cdef int64_t stop = min(size, end + RMQ_READ_AHEAD), at = (begin + RMQ_READ_AHEAD) & -step
    while at < stop:
        rmq_prefetch_far(base + at)
        at += step


cdef inline void prefetch_bytes(const uint8_t *base, int64_t following, int64_t size, const RecordRow *last,
                                bint checks_body) noexcept nogil:
    """Ask for as many bytes as the last record had, two pages behind its end, `following`: a scan asks for all of them.
    Where CRC-32 has asked for those two pages behind its body, for what lies so far behind the rest of it.

    The processor asks by itself, but not across pages; in memory that nobody read for a second that was half the time.
    """
    cdef int64_t begin = following - last.size
    if checks_body and rmq_crc_asks(<size_t>last.body_size, False):
        _prefetch_later(base, begin, begin + last.body_position, size)
        _prefetch_later(base, begin + last.body_position + last.body_size, following, size)
    else:
        _prefetch_later(base, following, following + min(<int64_t>RMQ_READ_AHEAD, <int64_t>last.size), size)


cdef inline int64_t position_in(int64_t phy_offset, int64_t segment_phy_offset, int64_t limit) noexcept nogil:
    """Where a phy offset lies in a segment, -1: not in its first `limit` bytes."""
    # Compared first: the difference of hostile offsets may not overflow.
    if limit <= 0 or phy_offset < segment_phy_offset or phy_offset > segment_phy_offset + (limit - 1):
        return -1
    return phy_offset - segment_phy_offset


cdef inline void prefetch_front(const uint8_t *base, int64_t position, int64_t size) noexcept nogil:
    if position >= 0:
        prefetch_lines(base, position, position + FRONT_LINES, size)


cdef inline void prefetch_tail(const uint8_t *base, int64_t position, int64_t size) noexcept nogil:
    """Ask for the end of a record whose front was asked for before; there lie its topic and properties."""
    cdef int64_t length
    if position < 0 or size - position < 4:
        return
    length = load_i32(base + position)
    if FRONT_LINES < length <= size - position:
        prefetch_lines(base, position + max(<int64_t>FRONT_LINES, length - TAIL_LINES), position + length, size)
