# SPDX-License-Identifier: Apache-2.0
"""Messages to be put, checked and packed when made."""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t


@cython.final
cdef class Message:
    cdef:
        readonly str topic
        readonly bytes body
        readonly tuple keys
        readonly object tags                # str or None
        readonly object uniq_key            # str or None
        readonly int32_t queue_id
        readonly int32_t flag
        readonly int32_t sys_flag
        readonly int32_t reconsume_times
        readonly int64_t prepared_transaction_offset
        readonly object born_timestamp      # int ms or None
        readonly object born_host           # str or None
        readonly object store_host          # str or None
        readonly object raw_properties      # bytes or None
        dict _properties
        bytes _topic                        # UTF-8
        bytes _encoded                      # property string, every item ended by 0x02
        bytes _born_host                    # 8 or 20 bytes, empty: the store's default
        bytes _store_host
        int32_t _topic_units                # UTF-16 units
        bint _wait                          # property WAIT, by which SYNC_FLUSH waits


cdef bint waits(const uint8_t *properties, int64_t size) noexcept nogil
cdef bint has_property(const uint8_t *properties, int64_t size, const char *name, int64_t name_size) noexcept nogil
