# SPDX-License-Identifier: Apache-2.0
"""Messages to be put, checked and packed when made."""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t


@cython.final
@cython.no_gc       # what it holds leads back to it only where somebody hangs it on a str of his own class
cdef class Message:
    cdef:
        # What a put reads of each message that has the header of the one before comes first, in one cache line.
        readonly bytes body
        bytes _encoded                      # property string, every item ended by 0x02
        int64_t _header                     # the same number: the same header, and _is_plain; 0: look at the fields
        readonly int32_t queue_id
        int32_t _topic_units                # UTF-16 units
        readonly str topic
        bytes _topic                        # UTF-8, mostly one object for one topic
        bytes _born_host                    # 8 or 20 bytes, empty: the store's default
        bytes _store_host
        readonly object raw_properties      # bytes or None
        readonly object born_timestamp      # int ms or None
        bint _wait                          # property WAIT, by which SYNC_FLUSH waits
        bint _is_begun                      # __init__ was called, which is done once
        bint _is_plain                      # born when stored, its properties not raw and without a record's CRC
        readonly int32_t flag
        readonly int32_t sys_flag
        readonly int32_t reconsume_times
        readonly int64_t prepared_transaction_offset
        readonly tuple keys
        readonly object tags                # str or None
        readonly object uniq_key            # str or None
        readonly object born_host           # str or None
        readonly object store_host          # str or None
        dict _properties                    # None: none
    cdef bytes _encode_properties(self)
    cdef bint _has_said(self, object name, object value) except -1


cdef bint waits(const uint8_t *properties, int64_t size) noexcept nogil
cdef const char *refusal(const uint8_t *topic, int64_t topic_size, const uint8_t *properties,
                         int64_t size) noexcept nogil


cdef inline bint shares_header(Message message, Message before) noexcept:
    """Whether both have one header but for the queue id, and properties that nobody wrote by hand: those end with 0x02,
    no CRC before it."""
    if message._header and before._header:
        return message._header == before._header
    return message._topic is before._topic and message.flag == before.flag and \
        message.sys_flag == before.sys_flag and \
        message.reconsume_times == before.reconsume_times and message._wait == before._wait and \
        message.prepared_transaction_offset == before.prepared_transaction_offset and \
        message._is_plain and before.born_timestamp is None and \
        message._born_host is before._born_host and message._store_host is before._store_host
