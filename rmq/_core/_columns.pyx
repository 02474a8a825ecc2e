# SPDX-License-Identifier: Apache-2.0
"""Rows of scans to the buffers of Arrow columns: fixed numbers, binary, UTF-8, list<string>, map<string, string>."""
cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_FillInfo
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy

cimport rmq._core._layout as L
from rmq._core._javahash cimport decode_utf8, rmq_utf16_units, rmq_utf8_repair
from rmq._core._record cimport Property, RecordRow, born_host_of, next_key, next_property, store_host_of
from rmq._core._recordbatch cimport RecordBatch

from rmq._core._message import format_host

cdef extern from "append.h" nogil:
    void rmq_copy(uint8_t *dest, const uint8_t *p, size_t n) noexcept

cdef extern from "numbers.h" nogil:
    void rmq_hex(uint8_t *text, const uint8_t *p, int size) noexcept

cdef extern from "property.h" nogil:
    int RMQ_HAS_HIGH
    int rmq_copy_text(uint8_t *dest, const uint8_t *p, int64_t n) noexcept

cdef extern from "streamcopy.h" nogil:
    void rmq_stream_copy(uint8_t *dest, const uint8_t *p, size_t n) noexcept
    void rmq_stream_end() noexcept

cdef const char *NOTHING = ""      # what a buffer without memory points to
cdef int64_t COPY_ROOM = 15         # bytes that rmq_copy_text may write behind a text
cdef int64_t CACHED = 1 << 20       # bytes of a column that the cache may hold until its batch is read

# How a column is built: number of its buffers is len of the tuple, in Arrow's order.
KINDS = {
    "topic": "text", "queue_id": "int32", "queue_offset": "int64", "phy_offset": "int64", "size": "int32",
    "flag": "int32", "sys_flag": "int32", "born_timestamp": "timestamp", "born_host": "text",
    "store_timestamp": "timestamp", "store_host": "text", "reconsume_times": "int32",
    "prepared_transaction_offset": "int64", "body_crc": "int32", "body": "binary", "properties": "map",
    "keys": "list", "tags": "nullable text", "uniq_key": "nullable text", "offset_msg_id": "text",
    "raw_body": "binary", "raw_properties": "binary",
}
cdef dict BUFFERS = {"int32": 1, "int64": 1, "timestamp": 1, "binary": 2, "text": 2, "nullable text": 3, "list": 3,
                     "map": 5}
cdef dict HOST_TEXT = {}
cdef int HOST_TEXT_LIMIT = 65536
cdef int MAP_LIMIT = 64             # names of one record that are compared one by one


cdef RecordRow MODEL


cdef tuple _place(const void *field, int size):
    """Where a field of MODEL lies in a row, and its bytes."""
    return <const uint8_t *>field - <const uint8_t *>&MODEL, size


cdef dict NUMBERS = {
    "queue_id": _place(&MODEL.queue_id, 4), "queue_offset": _place(&MODEL.queue_offset, 8),
    "phy_offset": _place(&MODEL.phy_offset, 8), "size": _place(&MODEL.size, 4), "flag": _place(&MODEL.flag, 4),
    "sys_flag": _place(&MODEL.sys_flag, 4), "born_timestamp": _place(&MODEL.born_timestamp, 8),
    "store_timestamp": _place(&MODEL.store_timestamp, 8), "reconsume_times": _place(&MODEL.reconsume_times, 4),
    "prepared_transaction_offset": _place(&MODEL.prepared_transaction_offset, 8),
    "body_crc": _place(&MODEL.body_crc, 4),
}


# Large blocks that readers have let go of, for the next batch: new ones would cost a page fault for each 4 KiB.
# Guarded by the GIL.
cdef enum:
    SPARE_COUNT = 16
cdef Block[SPARE_COUNT] SPARES
cdef int64_t SPARE_LEAST = 1 << 16  # bytes of a block worth keeping
cdef int64_t SPARE_MUCH = 1 << 20
cdef int64_t SPARE_TOTAL = 1 << 25  # bytes kept at most
cdef int64_t spare_total = 0


cdef bint _keep(uint8_t *data, int64_t room) noexcept:
    """Keep a block; False when it is too small or there is no room for it."""
    global spare_total
    cdef int i
    if room < SPARE_LEAST or spare_total + room > SPARE_TOTAL:
        return False
    for i in range(SPARE_COUNT):
        if SPARES[i].data == NULL:
            SPARES[i].data = data
            SPARES[i].room = room
            spare_total += room
            return True
    return False


cdef Block _spare(int64_t room) noexcept:
    """A kept block of at least `room` bytes; data NULL when there is none. The smallest, for much the largest: a column
    of so many bytes goes on growing, and each time all of it would be copied.
    """
    global spare_total
    cdef Block found
    cdef int i, best = -1
    for i in range(SPARE_COUNT):
        if SPARES[i].data != NULL and SPARES[i].room >= room and (
                best < 0 or (SPARES[i].room > SPARES[best].room) == (room >= SPARE_MUCH)):
            best = i
    if best < 0:
        found.data, found.room = NULL, 0
        return found
    found = SPARES[best]
    SPARES[best].data = NULL
    spare_total -= found.room
    return found


cdef inline int _check_offset(int64_t value) except -1 nogil:
    """OverflowError past what Arrow's 32-bit offsets hold: the batch must end before."""
    if value > INT32_MAX:
        with gil:
            raise OverflowError("a column batch holds at most 2 GiB")
    return 0


@cython.final
cdef class GrowingBuffer:
    def __dealloc__(self):
        if not _keep(self.data, self.room):
            free(self.data)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.data if self.data != NULL else <void *>NOTHING, self.size, 1,
                          flags & ~PyBUF_WRITABLE)

    def __len__(self):
        return self.size

    cdef uint8_t *take(self, int64_t size) except NULL nogil:
        """Room for `size` more bytes, counted as written."""
        if self.size + size > self.room or self.data == NULL:
            self._grow(self.size + size)
        self.size += size
        return self.data + self.size - size

    cdef int _grow(self, int64_t room) except -1 nogil:
        cdef Block block
        cdef int64_t doubled = 256
        while doubled < room:       # sizes that come again: a spare block fits
            doubled *= 2
        room = doubled
        block.data, block.room = NULL, room
        if room >= SPARE_LEAST:
            with gil:
                block = _spare(room)
        if block.data != NULL:
            if self.size:
                memcpy(block.data, self.data, <size_t>self.size)
            with gil:
                if not _keep(self.data, self.room):
                    free(self.data)
        else:
            block.room = room
            block.data = <uint8_t *>realloc(self.data, <size_t>room)
            if block.data == NULL:
                with gil:
                    raise MemoryError()
        self.data, self.room = block.data, block.room
        return 0

    cdef int add(self, const uint8_t *data, int64_t size) except -1 nogil:
        cdef uint8_t *p = self.take(size)
        if size:
            memcpy(p, data, <size_t>size)
        return 0

    cdef int add_i32(self, int64_t value) except -1 nogil:
        """Native byte order, as Arrow has it."""
        cdef int32_t item = <int32_t>value
        _check_offset(value)
        memcpy(self.take(4), &item, 4)
        return 0


cdef object _host_text(const uint8_t *host, int size):
    """Text of a host as UTF-8; hosts are few and repeat, so the last ones are kept."""
    cdef bytes key = (<const char *>host)[:size]
    text = HOST_TEXT.get(key)
    if text is None:
        text = format_host(key).encode()
        if len(HOST_TEXT) >= HOST_TEXT_LIMIT:
            HOST_TEXT.clear()
        HOST_TEXT[key] = text
    return text


@cython.final
cdef class ColumnBuilder:
    """names: columns of KINDS, without repeats; ValueError names one that is none."""

    def __cinit__(self, names):
        self.names = tuple(names)
        self._kinds = []
        for name in self.names:
            if name not in KINDS:
                raise ValueError(f"no column {name!r}; there are: {', '.join(KINDS)}")
            self._kinds.append(KINDS[name])
        if len(set(self.names)) != len(self.names):
            raise ValueError("columns repeat")
        self._reset()

    def _reset(self):
        cdef list buffers
        self._buffers = []
        for kind in self._kinds:    # no comprehensions: see _indexfile._listed
            buffers = []
            for _ in range(BUFFERS[kind]):
                buffers.append(GrowingBuffer())
            self._buffers.append(buffers)
        self.count = 0
        self.compressed = 0
        self.data_size = 0
        cdef GrowingBuffer offsets
        for kind, buffers in zip(self._kinds, self._buffers):
            for position in {"binary": (0,), "text": (0,), "nullable text": (1,), "list": (0, 1),
                             "map": (0, 1, 3)}.get(kind, ()):
                offsets = buffers[position]
                offsets.add_i32(0)

    cdef int _text(self, GrowingBuffer data, const uint8_t *p, int64_t size) except -1 nogil:
        """Append UTF-8; what is malformed reads as U+FFFD, as in Java."""
        cdef int malformed = 0
        cdef int64_t written
        cdef uint8_t *out = data.take(size + COPY_ROOM)
        data.size -= COPY_ROOM
        if not rmq_copy_text(out, p, size) & RMQ_HAS_HIGH:
            return 0
        data.size -= size
        rmq_utf16_units(p, size, &malformed)
        if not malformed:
            data.add(p, size)
            return 0
        data.take(3 * size)
        written = rmq_utf8_repair(p, size, data.data + data.size - 3 * size)
        data.size -= 3 * size - written
        return 0

    def append(self, RecordBatch batch not None, int32_t first=0, last=None):
        """Add rows [first, last) of a scanned batch; keys, tags, uniq_key need parsed properties."""
        cdef Py_ssize_t column
        cdef int32_t i, stop = batch.count if last is None else last
        if first < 0 or stop > batch.count:
            raise IndexError("rows out of range")
        stop = max(first, stop)
        for i in range(first, stop):
            if batch.rows[i].sys_flag & L.SYS_FLAG_COMPRESSED:
                self.compressed += 1
        for column in range(len(self.names)):
            self._append_column(self.names[column], self._buffers[column], batch, first, stop)
        self.count += stop - first

    def _append_column(self, str name, list buffers, RecordBatch batch, int32_t first, int32_t stop):
        cdef GrowingBuffer one = buffers[0]
        cdef GrowingBuffer two = buffers[1] if len(buffers) > 1 else one
        cdef GrowingBuffer three = buffers[2] if len(buffers) > 2 else two
        cdef GrowingBuffer four = buffers[3] if len(buffers) > 3 else three
        cdef GrowingBuffer five = buffers[4] if len(buffers) > 4 else four
        cdef Py_ssize_t position, size
        cdef bint is_first_of_two = name in ("tags", "born_host")
        if name in NUMBERS:
            position, size = NUMBERS[name]
            with nogil:
                self._numbers(position, size, one, batch, first, stop)
        elif name in ("born_host", "store_host"):
            self._hosts(is_first_of_two, one, two, batch, first, stop)
        elif name == "topic":
            with nogil:
                self._topics(one, two, batch, first, stop)
        elif name == "keys":
            with nogil:
                self._keys(one, two, three, batch, first, stop)
        elif name == "raw_properties":
            with nogil:
                self._copies(one, two, batch, False, first, stop)
        elif name in ("body", "raw_body"):      # as stored; the caller decompresses
            with nogil:
                self._copies(one, two, batch, True, first, stop)
        elif name in ("tags", "uniq_key"):
            with nogil:
                self._nullable(is_first_of_two, one, two, three, batch, first, stop)
        elif name == "offset_msg_id":
            with nogil:
                self._ids(one, two, batch, first, stop)
        else:
            with nogil:
                self._maps(one, two, three, four, five, batch, first, stop)
        if len(buffers) > 1:
            self.data_size = max(self.data_size, two.size, three.size, five.size)

    cdef int _numbers(self, Py_ssize_t position, Py_ssize_t size, GrowingBuffer out, RecordBatch batch, int32_t first,
                      int32_t stop) except -1 nogil:
        """One field of each row, native byte order."""
        cdef const uint8_t *field = <const uint8_t *>&batch.rows[first] + position
        cdef uint8_t *dest = out.take(size * (stop - first))
        cdef int32_t i
        if size == 8:
            for i in range(stop - first):
                memcpy(dest + 8 * <int64_t>i, field + i * <int64_t>sizeof(RecordRow), 8)
        else:
            for i in range(stop - first):
                memcpy(dest + 4 * <int64_t>i, field + i * <int64_t>sizeof(RecordRow), 4)
        return 0

    cdef int _copies(self, GrowingBuffer ends, GrowingBuffer data, RecordBatch batch, bint is_body, int32_t first,
                     int32_t stop) except -1 nogil:
        """Body or properties of each row as stored: room for all is taken once."""
        cdef int64_t total = 0, size, end = data.size
        cdef int32_t i, end32
        cdef RecordRow *row
        cdef uint8_t *dest
        cdef uint8_t *out
        cdef const uint8_t *source
        cdef bint streams
        for i in range(first, stop):
            total += batch.rows[i].body_size if is_body else batch.rows[i].properties_size
        _check_offset(end + total)
        dest = data.take(total)
        out = ends.take(4 * <int64_t>(stop - first))
        streams = data.room > CACHED
        for i in range(first, stop):
            row = &batch.rows[i]
            size = row.body_size if is_body else row.properties_size
            source = row.base + (row.body_position if is_body else row.properties_position)
            if streams:
                rmq_stream_copy(dest, source, <size_t>size)
            else:
                memcpy(dest, source, <size_t>size)
            dest += size
            end += size
            end32 = <int32_t>end
            memcpy(out, &end32, 4)
            out += 4
        if streams:
            rmq_stream_end()
        return 0

    cdef int _topics(self, GrowingBuffer ends, GrowingBuffer data, RecordBatch batch, int32_t first,
                     int32_t stop) except -1 nogil:
        """Topics repeat: one that is that of the row before is not looked at again."""
        cdef int32_t i, end32
        cdef int64_t begin = 0, size = -1
        cdef RecordRow *row
        cdef RecordRow *last = NULL
        cdef uint8_t *copy
        cdef uint8_t *out = ends.take(4 * <int64_t>(stop - first))
        for i in range(first, stop):
            row = &batch.rows[i]
            if last != NULL and row.topic_size == last.topic_size and memcmp(
                    row.base + row.topic_position, last.base + last.topic_position, <size_t>row.topic_size) == 0:
                copy = data.take(size)
                rmq_copy(copy, data.data + begin, <size_t>size)
            else:
                begin = data.size
                self._text(data, row.base + row.topic_position, row.topic_size)
                size = data.size - begin
                last = row
            _check_offset(data.size)
            end32 = <int32_t>data.size
            memcpy(out, &end32, 4)
            out += 4
        return 0

    cdef int _keys(self, GrowingBuffer list_ends, GrowingBuffer ends, GrowingBuffer data, RecordBatch batch,
                   int32_t first, int32_t stop) except -1 nogil:
        """The keys of each row as a list; their number fits where their bytes do."""
        cdef int32_t i, end32
        cdef int64_t size
        cdef RecordRow *row
        cdef const uint8_t *cursor
        cdef const uint8_t *end
        cdef const uint8_t *piece
        cdef uint8_t *out = list_ends.take(4 * <int64_t>(stop - first))
        for i in range(first, stop):
            row = &batch.rows[i]
            if row.keys_size > 0:
                cursor = row.base + row.keys_position
                end = cursor + row.keys_size
                while next_key(&cursor, end, &piece, &size):
                    self._text(data, piece, size)
                    ends.add_i32(data.size)
            end32 = <int32_t>(ends.size // 4 - 1)
            memcpy(out, &end32, 4)
            out += 4
        return 0

    cdef int _nullable(self, bint is_tags, GrowingBuffer valid, GrowingBuffer ends, GrowingBuffer data,
                       RecordBatch batch, int32_t first, int32_t stop) except -1 nogil:
        """Tags or uniq_key: one validity byte per row, packed at the end."""
        cdef int32_t i
        cdef int64_t size
        cdef RecordRow *row
        for i in range(first, stop):
            row = &batch.rows[i]
            size = row.tags_size if is_tags else row.uniq_key_size
            valid.take(1)[0] = size >= 0
            if size > 0:
                self._text(data, row.base + (row.tags_position if is_tags else row.uniq_key_position), size)
            ends.add_i32(data.size)
        return 0

    cdef int _ids(self, GrowingBuffer ends, GrowingBuffer data, RecordBatch batch, int32_t first,
                  int32_t stop) except -1 nogil:
        """Hex of store host and phy offset, as the record has them."""
        cdef int32_t i
        cdef int host_size
        cdef RecordRow *row
        cdef uint8_t *out
        for i in range(first, stop):
            row = &batch.rows[i]
            host_size = L.HOST_IPV6_SIZE if row.sys_flag & L.SYS_FLAG_STORE_HOST_IPV6 else L.HOST_IPV4_SIZE
            out = data.take(2 * host_size + 16)
            rmq_hex(out, store_host_of(row), host_size)
            rmq_hex(out + 2 * host_size, row.base + L.RECORD_PHY_OFFSET_OFFSET, 8)
            ends.add_i32(data.size)
        return 0

    cdef int _maps(self, GrowingBuffer map_ends, GrowingBuffer name_ends, GrowingBuffer names,
                   GrowingBuffer value_ends, GrowingBuffer values, RecordBatch batch, int32_t first,
                   int32_t stop) except -1 nogil:
        cdef int32_t i
        for i in range(first, stop):
            self._map(name_ends, names, value_ends, values, &batch.rows[i])
            map_ends.add_i32(name_ends.size // 4 - 1)
        return 0

    def _hosts(self, bint born, GrowingBuffer offsets, GrowingBuffer data, RecordBatch batch, int32_t first,
               int32_t stop):
        cdef int32_t i, flag = L.SYS_FLAG_BORN_HOST_IPV6 if born else L.SYS_FLAG_STORE_HOST_IPV6
        cdef int size, last_size = -1
        cdef RecordRow *row
        cdef const uint8_t *host
        cdef const uint8_t *last = NULL
        cdef bytes text = b""
        for i in range(first, stop):
            row = &batch.rows[i]
            host = born_host_of(row) if born else store_host_of(row)
            size = L.HOST_IPV6_SIZE if row.sys_flag & flag else L.HOST_IPV4_SIZE
            if size != last_size or memcmp(host, last, <size_t>size) != 0:
                text = _host_text(host, size)
                last, last_size = host, size
            data.add(<const uint8_t *><const char *>text, len(text))
            offsets.add_i32(data.size)

    cdef int _map(self, GrowingBuffer name_ends, GrowingBuffer names, GrowingBuffer value_ends, GrowingBuffer values,
                  RecordRow *row) except -1 nogil:
        """Items of one row; a name that comes again replaces the value of its first place, as in a Java map."""
        cdef const uint8_t *cursor = row.base + row.properties_position
        cdef const uint8_t *end = cursor + row.properties_size
        cdef Property items[64]
        cdef Property item
        cdef int count = 0, i, malformed = 0
        rmq_utf16_units(cursor, end - cursor, &malformed)   # names that differ may read alike then
        while next_property(&cursor, end, False, &item):
            i = 0
            while i < count and (items[i].name_size != item.name_size
                                 or memcmp(items[i].name, item.name, <size_t>item.name_size) != 0):
                i += 1
            if i == MAP_LIMIT or malformed:
                return self._long_map(name_ends, names, value_ends, values, row)
            items[i] = item
            count = max(count, i + 1)
        for i in range(count):
            self._text(names, items[i].name, items[i].name_size)
            name_ends.add_i32(names.size)
            self._text(values, items[i].value, items[i].value_size)
            value_ends.add_i32(values.size)
        return 0

    cdef int _long_map(self, GrowingBuffer name_ends, GrowingBuffer names, GrowingBuffer value_ends,
                       GrowingBuffer values, RecordRow *row) except -1 with gil:
        """_map for more names than are looked through one by one, and by what they read as."""
        cdef const uint8_t *cursor = row.base + row.properties_position
        cdef const uint8_t *end = cursor + row.properties_size
        cdef Property item
        cdef dict items = {}
        cdef bytes name, value
        while next_property(&cursor, end, False, &item):
            name = decode_utf8(item.name, item.name_size).encode()
            items[name] = (<const char *>item.value)[:item.value_size]
        for name, value in items.items():
            self._text(names, <const uint8_t *><const char *>name, len(name))
            name_ends.add_i32(names.size)
            self._text(values, <const uint8_t *><const char *>value, len(value))
            value_ends.add_i32(values.size)
        return 0

    def finish(self):
        """(count, {name: tuple of buffers}) and start anew. Offsets are native int32; validity is one byte per row."""
        result = self.count, {name: tuple(buffers) for name, buffers in zip(self.names, self._buffers)}
        self._reset()
        return result
