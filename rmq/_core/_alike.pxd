# SPDX-License-Identifier: Apache-2.0
"""Records whose header is that of another one but for queue id, offsets, CRC and body size: the rest is made once."""
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memcpy

cimport rmq._core._layout as L
from rmq._core._bytes cimport publish_i32, store_i32, store_i64, store_u16
from rmq._core._record cimport PLAIN_HEADER_SIZE, PutRow, append_record_crc, rmq_texts

cdef extern from "append.h" nogil:
    void rmq_copy(uint8_t *dest, const uint8_t *p, size_t n) noexcept
    void rmq_prefetch_room(const uint8_t *p, int64_t n) noexcept

cdef extern from "asking.h" nogil:
    ctypedef struct rmq_asking:
        int write_most
        int write_ahead
    const rmq_asking *rmq_asks

cdef extern from "crc32.h" nogil:
    bint rmq_crc_asks(size_t n, bint copies) noexcept
    int32_t rmq_crc32_copied(uint8_t *dest, const uint8_t *p, size_t n) noexcept

cdef extern from "texts.h" nogil:
    void rmq_texts_copy(uint8_t *dest, const rmq_texts *texts, int64_t i, int64_t size) noexcept

cdef enum:
    FRAME_LIMIT = L.RECORD_TOPIC_SIZE_V1_SIZE + L.TOPIC_UNITS_V1_LIMIT + L.RECORD_PROPERTIES_SIZE_SIZE


cdef struct Alike:
    uint8_t header[PLAIN_HEADER_SIZE]   # total size 0
    uint8_t frame[FRAME_LIMIT]          # from a body to its properties, whose size is to be filled in
    int32_t frame_size
    int32_t crc_size                    # of the CRC property that ends each, or 0


cdef inline bint can_be_alike(const PutRow *row) noexcept nogil:
    """Whether the record of a row can be the pattern of others."""
    return row.born_host_size == L.HOST_IPV4_SIZE and row.store_host_size == L.HOST_IPV4_SIZE and \
        not row.is_v2 and not row.separate_crc


cdef inline void take_alike(Alike *alike, const PutRow *row, const uint8_t *record) noexcept nogil:
    """Be like that record. REQUIRES: can_be_alike(row)."""
    memcpy(alike.header, record, PLAIN_HEADER_SIZE)
    store_i32(alike.header, 0)
    alike.crc_size = L.PROPERTY_CRC_SIZE if row.append_crc else 0
    alike.frame_size = L.RECORD_TOPIC_SIZE_V1_SIZE + row.topic_size + L.RECORD_PROPERTIES_SIZE_SIZE
    rmq_copy(alike.frame, record + PLAIN_HEADER_SIZE + row.body_size, <size_t>alike.frame_size)


cdef inline void encode_alike(const Alike *alike, uint8_t *dest, int32_t size, int32_t queue_id,
                              int64_t queue_offset, int64_t phy_offset, const uint8_t *body, int32_t body_size,
                              const uint8_t *properties, int32_t properties_size, const rmq_texts *texts,
                              int64_t number) noexcept nogil:
    """encode_record for a row like the one that `alike` took. properties NULL: made of texts, as row `number`."""
    cdef uint8_t *p = dest + PLAIN_HEADER_SIZE
    cdef uint8_t *later = dest + rmq_asks.write_ahead
    if rmq_crc_asks(<size_t>body_size, True):
        rmq_prefetch_room(later, PLAIN_HEADER_SIZE)
        rmq_prefetch_room(later + PLAIN_HEADER_SIZE + body_size, size - PLAIN_HEADER_SIZE - body_size)
    elif size <= rmq_asks.write_most:
        rmq_prefetch_room(later, size)
    memcpy(dest, alike.header, PLAIN_HEADER_SIZE)
    store_i32(dest + L.RECORD_QUEUE_ID_OFFSET, queue_id)
    store_i64(dest + L.RECORD_QUEUE_OFFSET_OFFSET, queue_offset)
    store_i64(dest + L.RECORD_PHY_OFFSET_OFFSET, phy_offset)
    store_i32(dest + L.RECORD_BODY_SIZE_OFFSET, body_size)
    store_i32(dest + L.RECORD_BODY_CRC_OFFSET, rmq_crc32_copied(p, body, <size_t>body_size))
    p += body_size
    rmq_copy(p, alike.frame, <size_t>alike.frame_size)
    p += alike.frame_size
    store_u16(p - L.RECORD_PROPERTIES_SIZE_SIZE, <unsigned short>properties_size)
    properties_size -= alike.crc_size
    if properties == NULL:
        rmq_texts_copy(p, texts, number, properties_size)
    else:
        rmq_copy(p, properties, <size_t>properties_size)
    if alike.crc_size:
        append_record_crc(dest, size)
    publish_i32(dest, size)
