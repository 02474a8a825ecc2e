# SPDX-License-Identifier: Apache-2.0
"""A method that does nothing: what a call into a compiled module costs."""
from libc.stdint cimport int64_t


cdef class Empty:
    def call(self, str key, int64_t phy_offset, int64_t store_timestamp):
        pass
