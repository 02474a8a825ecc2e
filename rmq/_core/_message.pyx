# SPDX-License-Identifier: Apache-2.0
"""Messages to be put: checked when made, packed once.

Source: RocketMQ MessageExtEncoder#encode, MessageDecoder#messageProperties2String, HookUtils#checkBeforePutMessage.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyObject
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uintptr_t
from libc.string cimport memcmp, memcpy, strlen

cimport rmq._core._layout as L
from rmq._core._javahash cimport rmq_utf16_units
from rmq._core._record cimport Property, next_property

cdef extern from "property.h" nogil:
    bint rmq_ends_with_crc(const uint8_t *p, int64_t n) noexcept

cdef extern from "schedule.h" nogil:
    bint rmq_is_schedule_topic(const uint8_t *topic, int64_t size) noexcept
    bint rmq_parse_int(const uint8_t *p, int64_t n, int64_t *value) noexcept

import socket
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone

from rmq._core._record import parse_properties
from rmq.errors import IllegalMessageError

cdef object EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc), MILLISECOND = timedelta(milliseconds=1)
cdef int TOPIC_SIZE_WITHOUT_RETRY = 127, TOPICS_KEPT = 1024
cdef int BODY_SHOWN = 64                                # bytes, by repr()
cdef str ADDRESS_FAMILY_HINT = 'expected "1.2.3.4:10911" or "[2001:db8::1]:10911"'
cdef int32_t REFUSED_FLAGS = L.SYS_FLAG_NEED_UNWRAP | L.SYS_FLAG_INNER_BATCH


cdef object _index(object value, str name, str wanted):
    """An exact int of what stands for one, a bool apart; TypeError with the argument's name."""
    if not isinstance(value, bool):
        try:
            return PyNumber_Index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be {wanted}, got {type(value).__name__}")


def to_ms(value, str name not None, bint up=False):
    """int milliseconds since 1970 of an int or an aware datetime, down or `up` to a whole one. `name` is the
    argument's, for the error.

    TypeError for other types, ValueError for a naive datetime or a number outside int64.
    """
    cdef int overflow = 0
    if type(value) is int:
        PyLong_AsLongLongAndOverflow(value, &overflow)
        if not overflow:
            return value
    if isinstance(value, datetime):
        if value.tzinfo is None or value.utcoffset() is None:
            raise ValueError(f"{name} must be an aware datetime: a naive one says no point in time")
        return -((EPOCH - value) // MILLISECOND) if up else -(EPOCH - value) // MILLISECOND
    value = _index(value, name, "int milliseconds or an aware datetime")
    if not -2**63 <= value < 2**63:
        raise ValueError(f"{name} is outside 64 bits")
    return value


def parse_host(text, str name not None):
    """Address and int port as on disk (8 or 20 bytes) of "1.2.3.4:10911" or "[2001:db8::1]:10911"."""
    if not isinstance(text, str):
        raise TypeError(f"{name} must be str, got {type(text).__name__}")
    address, colon, port = text.rpartition(":")
    try:
        if not (colon and port.isascii() and port.isdigit() and int(port) <= 65535):
            raise ValueError
        if address.startswith("[") and address.endswith("]"):
            packed = socket.inet_pton(socket.AF_INET6, address.removeprefix("[").removesuffix("]"))
        else:
            packed = socket.inet_pton(socket.AF_INET, address)
    except (ValueError, OSError):
        raise ValueError(f"{name} {text!r} is no host: {ADDRESS_FAMILY_HINT}") from None
    return packed + int(port).to_bytes(4, "big")


def format_host(bytes host not None):
    """Text of a host as on disk; IPv6 in RFC 5952 form. ValueError unless 8 or 20 bytes."""
    if len(host) not in (L.HOST_IPV4_SIZE, L.HOST_IPV6_SIZE):
        raise ValueError("a host has 8 or 20 bytes")
    cdef Py_ssize_t address_size = len(host) - L.HOST_PORT_SIZE
    port = int.from_bytes(host[address_size:], "big", signed=True)
    if len(host) == L.HOST_IPV4_SIZE:
        return f"{socket.inet_ntop(socket.AF_INET, host[:address_size])}:{port}"
    return f"[{socket.inet_ntop(socket.AF_INET6, host[:address_size])}]:{port}"


cdef bytes _utf8(object text, str name):
    if not isinstance(text, str):
        raise TypeError(f"{name} must be str, got {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise IllegalMessageError(f"{name} holds a lone surrogate: it has no UTF-8 form") from None


def check_directory(topic):
    """UTF-8 of a topic of which messages are stored; IllegalMessageError unless it names a directory of queues."""
    cdef bytes name = _utf8(topic, "topic")
    if not name:
        raise IllegalMessageError("topic is empty")
    if name in (b".", b"..") or b"/" in name or b"\0" in name or b"\1" in name or b"\2" in name:
        raise IllegalMessageError(f"topic {topic!r} is no name for a directory")
    if len(name) > L.TOPIC_SIZE_LIMIT:
        raise IllegalMessageError(f"topic has {len(name)} UTF-8 bytes, more than {L.TOPIC_SIZE_LIMIT}")
    return name


def check_topic(topic):
    """check_directory of a topic to put; IllegalMessageError too for one that a broker takes no messages of.

    Source: RocketMQ HookUtils#checkBeforePutMessage.
    """
    cdef bytes name = check_directory(topic)
    if len(name) > TOPIC_SIZE_WITHOUT_RETRY and not name.startswith(b"%RETRY%"):
        raise IllegalMessageError(f"topic has {len(name)} UTF-8 bytes, more than {TOPIC_SIZE_WITHOUT_RETRY} "
                                  "outside %RETRY%")
    if name.startswith(b"%LMQ%"):
        raise IllegalMessageError(f"topic {topic!r} is a light message queue's (LMQ), which only a broker writes")
    return name


cdef dict _topics = {}      # what _checked_topic answered, by topic


cdef tuple _checked_topic(topic):
    """(topic, UTF-8, UTF-16 units) of a topic that check_topic takes: mostly the same objects for the same name."""
    cdef tuple known = _topics.get(topic) if type(topic) is str else None
    cdef int malformed = 0
    cdef bytes name
    if known is None:
        name = check_topic(topic)
        if type(topic) is not str:      # of a subclass, such as NumPy's
            topic = name.decode()
        if len(_topics) >= TOPICS_KEPT:
            _topics.clear()
        known = topic, name, rmq_utf16_units(<const uint8_t *><const char *>name, len(name), &malformed)
        _topics[topic] = known
    return known


cdef int64_t _header_of(Message message):
    """Message._header: a number that tells topic and WAIT of a message whose other fields are those of most."""
    if not message._is_plain or message._born_host or message._store_host or message.flag or message.sys_flag or \
            message.reconsume_times or message.prepared_transaction_offset:
        return 0
    # No other object is there while a message keeps this one, and no object has an odd address.
    return <int64_t><uintptr_t><PyObject *>message._topic | (1 if message._wait else 0)


def without_property(bytes properties not None, bytes name not None):
    """The property string without the items of that name. Source: MessageUtils#deleteProperty."""
    if name not in properties:
        return properties
    kept = [item for item in properties.split(b"\2") if not item.startswith(name + b"\1")]
    return b"\2".join(kept)


cdef const char *_piece(object text, str name, Py_ssize_t *size, object item=None, bint is_key=False) except NULL:
    """UTF-8 of a property name or value that does not break the property string; the text keeps it. `item`: whose value
    among the properties it is, for the error."""
    cdef const char *data
    cdef Py_ssize_t i
    cdef uint8_t byte, ends = 0, spaces = 0     # in a byte each, which a compiler does for many at once
    try:
        data = PyUnicode_AsUTF8AndSize(text, size)
    except (TypeError, UnicodeEncodeError):
        _utf8(text, _named(name, item))     # raises
        raise
    for i in range(size[0]):
        byte = <uint8_t>data[i]
        ends |= <uint8_t>(byte - 1) < 2
        spaces |= byte == 32
    if ends:
        raise IllegalMessageError(f"{_named(name, item)} {text!r} holds 0x01 or 0x02, which end names and values")
    if is_key and (size[0] == 0 or spaces):
        raise IllegalMessageError(f"{name} {text!r} is empty or holds a space, which separates keys")
    return data


cdef str _named(str name, object item):
    return f"properties[{item!r}]" if name == "properties" else name


cdef inline char *_put(char *at, const char *data, Py_ssize_t size) noexcept:
    memcpy(at, data, size)
    return at + size


cdef inline char *_put_item(char *at, const char *name, Py_ssize_t name_size, object value) except NULL:
    """REQUIRES: a text that _piece has looked at."""
    cdef Py_ssize_t size
    cdef const char *data = PyUnicode_AsUTF8AndSize(value, &size)
    return _put(_put(_put(_put(at, name, name_size), "\1", 1), data, size), "\2", 1)


cdef inline bint _is_text(object text, const char *other, Py_ssize_t other_size) except -1:
    cdef Py_ssize_t size
    cdef const char *data = PyUnicode_AsUTF8AndSize(text, &size)
    return size == other_size and memcmp(data, other, <size_t>size) == 0


cdef bint _are_equal(object text, object other) except -1:
    """Whether two texts have the same UTF-8, whatever their classes say."""
    cdef Py_ssize_t size
    cdef const char *data = PyUnicode_AsUTF8AndSize(other, &size)
    return _is_text(text, data, size)


cdef bint _are_keys(object text, tuple keys) except -1:
    """Whether a text holds these keys, with spaces around them."""
    cdef Py_ssize_t size, key_size
    cdef const char *at = PyUnicode_AsUTF8AndSize(text, &size)
    cdef const char *end = at + size
    cdef const char *key_data
    for key in keys:
        key_data = PyUnicode_AsUTF8AndSize(key, &key_size)
        while at < end and at[0] == 32:
            at += 1
        if end - at < key_size or memcmp(at, key_data, <size_t>key_size) != 0:
            return False
        at += key_size
        if at < end and at[0] != 32:
            return False
    while at < end and at[0] == 32:
        at += 1
    return at == end


cdef bytes _items_of(tuple keys, object uniq_key, object tags):
    """KEYS, UNIQ_KEY and TAGS, those that are given, of a property string."""
    cdef Py_ssize_t part, size = 0
    cdef const char *data
    cdef char *at
    cdef bytes items
    for key in keys:
        _piece(key, "keys", &part, None, True)
        size += part + 1                    # the space or the 0x02 behind it
    if keys:
        size += strlen("KEYS") + 1
    if uniq_key is not None:
        _piece(uniq_key, "uniq_key", &part)
        size += strlen("UNIQ_KEY") + 1 + part + 1
    if tags is not None:
        _piece(tags, "tags", &part)
        size += strlen("TAGS") + 1 + part + 1
    items = PyBytes_FromStringAndSize(NULL, size)
    at = PyBytes_AS_STRING(items)
    if keys:
        at = _put(at, "KEYS\1", strlen("KEYS") + 1)
        for key in keys:
            data = PyUnicode_AsUTF8AndSize(key, &part)
            at = _put(_put(at, data, part), " ", 1)
        at = _put(at - 1, "\2", 1)
    if uniq_key is not None:
        at = _put_item(at, "UNIQ_KEY", strlen("UNIQ_KEY"), uniq_key)
    if tags is not None:
        at = _put_item(at, "TAGS", strlen("TAGS"), tags)
    return items


cdef bytes _bytes_of(object value, str name):
    if type(value) is bytes:
        return value
    try:
        view = memoryview(value)
        # numpy lends the memory of its scalars, and of arrays of references (O), text (w) and structs (}), too; the
        # bytes of some scalars have a dimension, the scalars have none.
        if isinstance(value, bytes) or (min(view.ndim, getattr(value, "ndim", 1)) and view.format[-1:] not in "Ow}"):
            return bytes(view)
    except TypeError:
        pass
    except ValueError as error:     # released or closed, or of a kind that NumPy lends nobody
        raise ValueError(f"{name}: {error}") from None
    raise TypeError(f"{name} must be bytes-like, got {type(value).__name__}")


cdef int64_t _int(object value, str name, int64_t low, int64_t high) except? -1:
    cdef int overflow = 0
    cdef int64_t plain
    if type(value) is int:
        plain = PyLong_AsLongLongAndOverflow(value, &overflow)
        if not overflow and low <= plain <= high:
            return plain
    number = _index(value, name, "int")
    if not low <= number <= high:
        raise ValueError(f"{name} must lie in [{low}, {high}], got {number}")
    return number


cdef bint waits(const uint8_t *properties, int64_t size) noexcept nogil:
    """Property WAIT: missing or true, in any case, means wait for the flush."""
    cdef const uint8_t *cursor = properties
    cdef Property item
    cdef bint wait = True
    while next_property(&cursor, properties + size, False, &item):
        if item.name_size == 4 and memcmp(item.name, "WAIT", 4) == 0:
            wait = item.value_size == 4 and (item.value[0] | 0x20) == 116 and (item.value[1] | 0x20) == 114 and \
                (item.value[2] | 0x20) == 117 and (item.value[3] | 0x20) == 101
    return wait


cdef const char *refusal(const uint8_t *topic, int64_t topic_size, const uint8_t *properties,
                         int64_t size) noexcept nogil:
    """Why RocketMQ could not read a record with these properties back, NULL when it can.

    Source: CommitLog#checkMessageAndReturnSize, whose exceptions end a recovery's log.
    """
    cdef bint is_scheduled = rmq_is_schedule_topic(topic, topic_size), has_delay = True
    cdef const uint8_t *cursor = properties
    cdef Property item
    cdef int64_t level
    while next_property(&cursor, properties + size, False, &item):
        if item.name_size == 9 and memcmp(item.name, "INNER_NUM", 9) == 0:
            return "property INNER_NUM marks inner batches, which are not written"
        if is_scheduled and item.name_size == 5 and memcmp(item.name, "DELAY", 5) == 0:   # the last one counts
            has_delay = rmq_parse_int(item.value, item.value_size, &level)
    if has_delay:
        return NULL
    return "property DELAY of a scheduled message is no int32"


@cython.final
@cython.no_gc
cdef class Message:
    """Message(topic, body, *, keys=(), tags=None, properties=None, queue_id=0, flag=0, sys_flag=0, uniq_key=None, \
born_timestamp=None, born_host=None, store_host=None, reconsume_times=0, prepared_transaction_offset=0, \
raw_properties=None)\n--\n\n\
    A message to put. Immutable, compared by value; everything is checked here but what a store's config decides.

    topic: str. body: bytes-like. keys: one str or an iterable of str, none empty or with a space. tags: str.
    properties: mapping of str to str, in that order. queue_id >= 0; flag, sys_flag, reconsume_times: int32 (the
    address-family bits of sys_flag come from the hosts, bits 6 and 7 are refused). born_timestamp: ms since 1970 or
    an aware datetime, None: the store timestamp. born_host, store_host: "1.2.3.4:10911" or "[2001:db8::1]:10911",
    None: the store's own. raw_properties: the property string as it shall stand on disk, but for a whole record's CRC
    at its end; it excludes keys, tags, uniq_key and properties.

    Raises IllegalMessageError for what RocketMQ would refuse or could not read back, TypeError and ValueError with
    the argument's name. Source: RocketMQ MessageExtBrokerInner, HookUtils#checkBeforePutMessage.
    """

    def __init__(self, topic, body, *, keys=(), tags=None, properties=None, queue_id=0, flag=0, sys_flag=0,
                 uniq_key=None, born_timestamp=None, born_host=None, store_host=None, reconsume_times=0,
                 prepared_transaction_offset=0, raw_properties=None):
        cdef const char *why
        if self._is_begun:      # also by code that this very call runs: a put may borrow what the fields hold
            raise TypeError("a Message is immutable")
        self._is_begun = True
        topic, self._topic, self._topic_units = _checked_topic(topic)
        self.body = _bytes_of(body, "body")
        self.queue_id = _int(queue_id, "queue_id", 0, 0x7FFFFFFF)
        self.flag = _int(flag, "flag", -0x80000000, 0x7FFFFFFF)
        self.sys_flag = _int(sys_flag, "sys_flag", -0x80000000, 0x7FFFFFFF)
        if self.sys_flag & REFUSED_FLAGS:
            raise IllegalMessageError("sys_flag bits 6 and 7 mark inner batches, which are not written")
        self.reconsume_times = _int(reconsume_times, "reconsume_times", -0x80000000, 0x7FFFFFFF)
        self.prepared_transaction_offset = _int(prepared_transaction_offset, "prepared_transaction_offset",
                                                -2**63, 2**63 - 1)
        self.born_timestamp = None if born_timestamp is None else to_ms(born_timestamp, "born_timestamp")
        self._born_host = b"" if born_host is None else parse_host(born_host, "born_host")
        self._store_host = b"" if store_host is None else parse_host(store_host, "store_host")
        self.born_host = born_host
        self.store_host = store_host
        # What an ABC says of other types takes longer than all the rest.
        if not isinstance(keys, (str, tuple, list)) and (not isinstance(keys, Iterable) or isinstance(keys, bytes)):
            raise TypeError(f"keys must be str or an iterable of str, got {type(keys).__name__}")
        self.keys = (keys,) if isinstance(keys, str) else tuple(keys)
        self.tags = tags
        self.uniq_key = uniq_key
        if properties is not None and not isinstance(properties, (dict, Mapping)):
            raise TypeError(f"properties must be a mapping, got {type(properties).__name__}")
        self._properties = (dict(properties) or None) if properties is not None else None
        if raw_properties is not None:
            if self.keys or tags is not None or uniq_key is not None or self._properties:
                raise ValueError("raw_properties excludes keys, tags, uniq_key and properties")
            self.raw_properties = _bytes_of(raw_properties, "raw_properties")
            self._encoded = self.raw_properties
        else:
            self._encoded = self._encode_properties()
        if len(self._encoded) > L.PROPERTIES_SIZE_LIMIT:
            raise IllegalMessageError(f"properties have {len(self._encoded)} bytes, more than "
                                      f"{L.PROPERTIES_SIZE_LIMIT}")
        self._wait = True
        if raw_properties is not None or self._properties is not None:  # keys, uniq_key and tags tell neither
            why = refusal(<const uint8_t *><const char *>self._topic, len(self._topic),
                          <const uint8_t *><const char *>self._encoded, len(self._encoded))
            if why != NULL:
                raise IllegalMessageError((<bytes>why).decode())
            self._wait = waits(<const uint8_t *><const char *>self._encoded, len(self._encoded))
        self._is_plain = self.born_timestamp is None and self.raw_properties is None and not (
            rmq_ends_with_crc(<const uint8_t *><const char *>self._encoded, len(self._encoded)) or
            rmq_ends_with_crc(<const uint8_t *><const char *>self._encoded, len(self._encoded) - 1))
        self._header = _header_of(self)
        self.topic = topic

    cdef bytes _encode_properties(self):
        """The property string. From the first look at a text to its last byte no code of a text's own class runs, which
        might change them."""
        cdef bytes items = _items_of(self.keys, self.uniq_key, self.tags), encoded
        cdef Py_ssize_t part, name_size, size = len(items)
        cdef const char *data
        cdef char *at
        if self._properties is None:
            return items
        for name, value in self._properties.items():
            _piece(value, "properties", &part, name)
            _piece(name, "properties name", &name_size)
            if name_size == 0:
                raise IllegalMessageError("properties hold an empty name")
            if not self._has_said(name, value):
                size += name_size + 1 + part + 1
        encoded = PyBytes_FromStringAndSize(NULL, size)
        at = _put(PyBytes_AS_STRING(encoded), PyBytes_AS_STRING(items), len(items))
        for name, value in self._properties.items():
            if not self._has_said(name, value):
                data = PyUnicode_AsUTF8AndSize(name, &name_size)
                at = _put_item(at, data, name_size, value)
        return encoded

    cdef bint _has_said(self, object name, object value) except -1:
        """Whether a property is that of keys, uniq_key or tags; IllegalMessageError with another value."""
        cdef bint is_same
        if self.keys and _is_text(name, "KEYS", strlen("KEYS")):
            is_same = _are_keys(value, self.keys)
        elif self.uniq_key is not None and _is_text(name, "UNIQ_KEY", strlen("UNIQ_KEY")):
            is_same = _are_equal(value, self.uniq_key)
        elif self.tags is not None and _is_text(name, "TAGS", strlen("TAGS")):
            is_same = _are_equal(value, self.tags)
        else:
            return False
        if not is_same:
            raise IllegalMessageError(f"properties[{name!r}] contradicts the argument of that name")
        return True

    @property
    def properties(self):
        """The properties as given, a copy."""
        return dict(self._properties) if self._properties is not None else {}

    @property
    def is_delayed(self):
        """Whether property DELAY asks for a delay level above 0."""
        has_own = self._properties is not None or self.raw_properties is not None   # keys, uniq_key and tags tell none
        cdef bytes delay = parse_properties(self._encoded).get("DELAY", "").encode() if has_own else b""
        cdef int64_t level
        return rmq_parse_int(<const uint8_t *><const char *>delay, len(delay), &level) and level > 0

    def _values(self):
        return (self.topic, self.body, self.keys, self.tags, self._properties, self.queue_id, self.flag,
                self.sys_flag, self.uniq_key, self.born_timestamp, self.born_host, self.store_host,
                self.reconsume_times, self.prepared_transaction_offset, self.raw_properties)

    def __eq__(self, other):
        if not isinstance(other, Message):
            return NotImplemented
        # Of two dicts the order of items would not count; in the stored bytes, and in the hash, it does.
        return self._encoded == (<Message>other)._encoded and self._values() == (<Message>other)._values()

    def __hash__(self):
        return hash((self.topic, self.body, self._encoded, self.queue_id, self.flag, self.sys_flag))

    def __repr__(self):
        more = f"... {len(self.body)} bytes" if len(self.body) > BODY_SHOWN else ""
        return f"Message({self.topic!r}, {self.body[:BODY_SHOWN]!r}{more}, keys={self.keys!r}, tags={self.tags!r}, " \
               f"queue_id={self.queue_id})"

    def __reduce__(self):
        return _make_message, self._values()


def _make_message(topic, body, keys, tags, properties, queue_id, flag, sys_flag, uniq_key, born_timestamp, born_host,
                  store_host, reconsume_times, prepared_transaction_offset, raw_properties):
    return Message(topic, body, keys=keys, tags=tags, properties=properties, queue_id=queue_id, flag=flag,
                   sys_flag=sys_flag, uniq_key=uniq_key, born_timestamp=born_timestamp, born_host=born_host,
                   store_host=store_host, reconsume_times=reconsume_times,
                   prepared_transaction_offset=prepared_transaction_offset, raw_properties=raw_properties)


def next_messages(source, Py_ssize_t count, int64_t size):
    """(items, whether that was the end) of an iterator: up to `count`, fewer when bodies of messages come to `size`."""
    cdef list items = []
    cdef int64_t taken = 0
    for item in source:
        items.append(item)
        if type(item) is Message and (<Message>item).body is not None:  # another is an error, told by its row
            taken += len((<Message>item).body)
        if len(items) >= count or taken >= size:
            return items, False
    return items, True
