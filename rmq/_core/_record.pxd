# SPDX-License-Identifier: Apache-2.0
"""Commit-log records, one at a time: properties, validate, encode."""
from libc.stdint cimport int32_t, int64_t, uint8_t

cimport rmq._core._layout as L

cdef extern from "property.h" nogil:
    const char *CRC_NAME "RMQ_CRC_NAME"     # of the property that holds the CRC of a whole record
    int CRC_NAME_SIZE "RMQ_CRC_NAME_SIZE"

# Why a scan ended, or what is wrong with the bytes at its end.
cpdef enum:
    SCAN_FULL = 0               # the batch is full; more may follow
    SCAN_LIMIT = 1              # the given end was reached exactly
    SCAN_BLANK = 2              # end-of-segment record: go on in the next segment
    SCAN_ZERO = 3               # no record: size and magic are zero
    SCAN_TRUNCATED = 4          # the record would reach beyond the given end
    SCAN_BAD_SIZE = 5
    SCAN_BAD_MAGIC = 6
    SCAN_BAD_PHY_OFFSET = 7     # the record's own offset is not where it lies
    SCAN_BAD_LENGTHS = 8        # body, topic and properties do not add up to the size
    SCAN_BAD_BODY_CRC = 9
    SCAN_BAD_RECORD_CRC = 10
    SCAN_LOST_SECTOR = 11       # topic or properties hold a zeroed 512-byte sector
    SCAN_NUL_END = 12           # and nothing but the end of the properties tells of it

# What a scan checks beyond sizes, magic and own offset.
cpdef enum:
    CHECK_BODY_CRC = 1
    CHECK_RECORD_CRC = 2        # only where the property is present
    CHECK_SECTORS = 4           # SCAN_LOST_SECTOR, SCAN_NUL_END
    PARSE_PROPERTIES = 8        # fill the keys, uniq_key, tags and delay fields of the rows
    CHECK_HAS_CRC = 32          # properties with a NUL end with the CRC property: lost bytes may have been its name
    LEGACY_PROPERTIES = 16      # parse as RocketMQ <= 4.9.0: items with more than one 0x01 are ignored
    HASH_KEYS = 64              # with parsed properties and queues: hashes of tags and keys, for queues and index

cpdef enum:
    NESTED_LIMIT = 16           # times a range that bodies are read when records are looked for in it


cdef enum:
    READS_ON = 128              # beside them: what follows the record is read next
    SECTOR_SIZE = 512           # bytes that a disk loses together
    PLAIN_HEADER_SIZE = L.RECORD_BODY_OFFSET    # of a record with IPv4 hosts, up to its body


cdef extern from "texts.h" nogil:
    ctypedef struct rmq_texts:
        int count
        int64_t frame_size


cdef struct RecordRow:
    const uint8_t *base         # first byte of the record; borrowed
    int64_t phy_offset
    int64_t queue_offset
    int64_t born_timestamp
    int64_t store_timestamp
    int64_t prepared_transaction_offset
    int32_t size
    int32_t queue_id
    int32_t flag
    int32_t sys_flag
    int32_t reconsume_times
    int32_t body_crc
    int32_t body_position       # positions: bytes from base
    int32_t body_size
    int32_t topic_position
    int32_t topic_size
    int32_t properties_position
    int32_t properties_size
    int32_t keys_position       # from here to delay_size the places of items.h; sizes are -1 of what is missing
    int32_t keys_size
    int32_t uniq_key_position
    int32_t uniq_key_size
    int32_t tags_position
    int32_t tags_size
    int32_t delay_position
    int32_t delay_size
    int32_t queue               # number in a QueueTable, -1: not looked up


cdef struct PutRow:
    const uint8_t *body         # borrowed from the caller's batch
    const uint8_t *properties   # NULL: made of a batch's texts
    int64_t queue_offset        # filled by encoding
    int64_t phy_offset          # filled by encoding
    int32_t body_size
    int32_t properties_size
    int32_t size                # whole record
    int32_t queue_id
    int32_t queue               # number in a QueueTable
    uint8_t is_alike            # what follows is not filled: it is that of the row before
    uint8_t is_v2
    uint8_t append_crc          # properties_size counts the 20 bytes of the CRC property
    uint8_t separate_crc        # ... and one 0x02 before it
    int32_t topic_size
    const uint8_t *topic
    const uint8_t *born_host
    const uint8_t *store_host
    int64_t born_timestamp
    int64_t prepared_transaction_offset
    int32_t flag
    int32_t sys_flag            # address-family bits set
    int32_t reconsume_times
    uint8_t born_host_size      # 8 or 20
    uint8_t store_host_size
    uint8_t is_born_now         # born_timestamp is the store timestamp


cdef struct Property:
    const uint8_t *name
    const uint8_t *value
    int64_t name_size
    int64_t value_size


cdef bint holds_lost_sector(const uint8_t *p, int64_t size) noexcept nogil
cdef int32_t crc_of(const uint8_t *p, int64_t size) noexcept nogil
cdef bint next_property(const uint8_t **cursor, const uint8_t *end, bint legacy, Property *item) noexcept nogil
cdef bint next_key(const uint8_t **cursor, const uint8_t *end, const uint8_t **key, int64_t *size) noexcept nogil
cdef int parse_record(const uint8_t *base, int64_t room, int64_t segment_room, int64_t phy_offset, int checks,
                      RecordRow *row) noexcept nogil
cdef void encode_record(const PutRow *row, uint8_t *dest, int64_t phy_offset, int64_t store_timestamp,
                        const rmq_texts *texts, int64_t number) noexcept nogil
cdef void append_record_crc(uint8_t *dest, int32_t size) noexcept nogil
cdef void show_end(uint8_t *marks, int64_t phy_offset) noexcept nogil
cdef void find_properties(RecordRow *row, bint legacy) noexcept nogil
cdef bint row_has_key(const RecordRow *row, const uint8_t *key, int64_t size) noexcept nogil


cdef inline bint looks_lost(const uint8_t *p, int64_t size) noexcept nogil:
    """Whether a scan may take properties like these for a loss: a NUL at the end, or a sector of them in a row."""
    return size > 0 and (p[size - 1] == 0 or (size >= SECTOR_SIZE and holds_lost_sector(p, size)))


cdef inline const uint8_t *born_host_of(const RecordRow *row) noexcept nogil:
    return row.base + L.RECORD_BORN_HOST_OFFSET


cdef inline const uint8_t *store_host_of(const RecordRow *row) noexcept nogil:
    return row.base + L.RECORD_STORE_HOST_OFFSET + (
        L.HOST_IPV6_EXTRA if row.sys_flag & L.SYS_FLAG_BORN_HOST_IPV6 else 0)
