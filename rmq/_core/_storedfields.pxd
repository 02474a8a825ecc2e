# SPDX-License-Identifier: Apache-2.0
"""The fields of a stored message, copied out of its record."""
from libc.stdint cimport int32_t, int64_t


cdef class StoredFields:
    cdef:
        readonly str topic
        readonly bytes raw_body
        readonly bytes raw_properties
        readonly bytes _born_host           # as on disk: address, port
        readonly bytes _store_host
        public object _body                 # decompressed; None: not asked for, or never compressed
        public object _properties           # as a dict; None: not asked for
        public object _segment              # (path, phy offset) of the file, for errors; or None
        readonly int64_t queue_offset
        readonly int64_t phy_offset
        readonly int64_t born_timestamp
        readonly int64_t store_timestamp
        readonly int64_t prepared_transaction_offset
        readonly int64_t size
        readonly int32_t queue_id
        readonly int32_t flag
        readonly int32_t sys_flag
        readonly int32_t reconsume_times
        readonly int32_t body_crc
    cdef str _value_of(self, const char *name, Py_ssize_t name_size)
