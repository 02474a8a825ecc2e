# SPDX-License-Identifier: Apache-2.0
"""Whether bytes are an index file of a geometry, by its links and slots: the file itself does not tell the geometry.

Source of the order in which a put that has not ended has stored: RocketMQ IndexFile#putKey.
"""
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t

cimport rmq._core._layout as L
from rmq._core._bytes cimport load_i32, load_i64, read_published_i32, read_published_i64
from rmq._core._indexwalk cimport IndexBytes, count_of


cdef inline const uint8_t *_entry(const IndexBytes *file, int32_t number) noexcept nogil:
    return file.entries + <int64_t>number * L.ENTRY_SIZE


cdef inline bint _is_unused(const IndexBytes *file, int32_t number) noexcept nogil:
    """By the hash and the upper half of the phy offset: what a put has stored first."""
    return load_i64(_entry(file, number)) == 0


cdef int32_t first_unlinked(const IndexBytes *file, int32_t count, int32_t *newest) noexcept nogil:
    """First entry below `count` that does not link to the newest entry of its slot before it; 0: there is none.

    newest: zeros, one for each slot; they become the numbers of the newest entries.
    """
    cdef int32_t i, key_hash, slot
    for i in range(1, count):
        key_hash = load_i32(_entry(file, i) + L.ENTRY_KEY_HASH_OFFSET)
        slot = key_hash % file.hash_slot_num
        if key_hash < 0 or load_i32(_entry(file, i) + L.ENTRY_PREVIOUS_OFFSET) != newest[slot]:
            return i
        newest[slot] = i
    return 0


cdef bint _is_ahead(const IndexBytes *file, int32_t slot, int32_t number, int32_t count, int32_t newest) noexcept nogil:
    """Whether a slot's number is of entries put since the count was read, or of the one that is being put."""
    cdef bint is_of_slot = number <= min(count_of(file), file.index_num - 1)
    cdef int32_t key_hash, previous
    while is_of_slot and number >= count:
        key_hash = load_i32(_entry(file, number) + L.ENTRY_KEY_HASH_OFFSET)
        previous = load_i32(_entry(file, number) + L.ENTRY_PREVIOUS_OFFSET)
        is_of_slot = key_hash >= 0 and key_hash % file.hash_slot_num == slot and previous < number
        number = previous
    return is_of_slot and number == newest


cdef bint _ends(const IndexBytes *file, bint being_put) noexcept nogil:
    """Whether nothing follows the counted entries but one that is being put, in part or whole."""
    cdef int32_t count = count_of(file)
    if count == file.index_num or _is_unused(file, count):
        return True
    return being_put and ((load_i32(_entry(file, count) + L.ENTRY_KEY_HASH_OFFSET) >= 0 and (
        count + 1 == file.index_num or _is_unused(file, count + 1))) or count_of(file) != count)


cdef bint fits(const IndexBytes *file, int32_t *newest, bint being_put) noexcept nogil:
    """As IndexFileView.fits. newest: zeros, one for each slot."""
    cdef int32_t count = count_of(file), i, number
    cdef const uint8_t *unused = _entry(file, 0)
    for i in range(L.ENTRY_SIZE):
        if unused[i] != 0:
            return False
    if first_unlinked(file, count, newest):
        return False
    for i in range(file.hash_slot_num):
        number = read_published_i32(file.slots + <int64_t>i * L.INDEX_SLOT_SIZE)
        if number != newest[i] and not (being_put and _is_ahead(file, i, number, count, newest[i])):
            return False
    return _ends(file, being_put)


cdef int64_t _index_num_below(const uint8_t *data, int64_t size, int32_t count, int64_t end_phy_offset, int64_t num,
                              bint being_put) noexcept nogil:
    """Below `num`, the next number of entries that the file's length and its newest entry allow; -1: none."""
    cdef int64_t quarter = (size - L.INDEX_HEADER_SIZE) // 4, slots, phy_offset
    cdef int32_t key_hash, slot
    cdef const uint8_t *entry
    for num in range(num - 1, count - 1, -1):
        slots = quarter - 5 * num
        if slots > INT32_MAX:
            break
        entry = data + size - (num - count + 1) * L.ENTRY_SIZE
        key_hash = load_i32(entry + L.ENTRY_KEY_HASH_OFFSET)
        phy_offset = load_i64(entry + L.ENTRY_PHY_OFFSET_OFFSET)
        # The header's offset is older than its count where puts have ended since, or one is about to store it.
        if key_hash < 0 or not (phy_offset >= end_phy_offset if being_put else phy_offset == end_phy_offset):
            continue
        slot = read_published_i32(data + L.INDEX_HEADER_SIZE + (key_hash % slots) * L.INDEX_SLOT_SIZE)
        if slot == count - 1 or (being_put and count <= slot <= read_published_i32(data + L.INDEX_COUNT_OFFSET)):
            return num
    return -1


def geometry_candidates(const uint8_t[::1] data not None, int limit=16, bint being_put=False):
    """(hash_slot_num, index_num) pairs that the file's length and its newest entry allow, at most `limit`, the fewest
    slots first: entries put since the count was read are taken for the newest by pairs of more.

    Empty when the header's count is none of a used file. being_put: as for fits. Cost: a probe per pair of the length.
    """
    cdef int64_t size = data.shape[0], end_phy_offset, num
    cdef int32_t count
    cdef list found = []
    if size < L.INDEX_HEADER_SIZE + L.INDEX_SLOT_SIZE + 2 * L.ENTRY_SIZE or (size - L.INDEX_HEADER_SIZE) % 4:
        return found
    end_phy_offset = read_published_i64(&data[L.INDEX_END_PHY_OFFSET_OFFSET])     # first: a writer stores it last
    count = read_published_i32(&data[L.INDEX_COUNT_OFFSET])
    if count < 2:
        return found
    num = min(((size - L.INDEX_HEADER_SIZE) // 4 - 1) // 5, <int64_t>INT32_MAX) + 1
    while len(found) < limit:
        with nogil:
            num = _index_num_below(&data[0], size, count, end_phy_offset, num, being_put)
        if num < 0:
            break
        found.append((int((size - L.INDEX_HEADER_SIZE) // 4 - 5 * num), int(num)))
    return found
