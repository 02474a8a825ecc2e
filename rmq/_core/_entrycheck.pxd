# SPDX-License-Identifier: Apache-2.0
"""Index entries beside the records of a pass over the log; what an index file says of itself."""
cimport cython
from libc.stdint cimport int32_t, int64_t

from rmq._core._indexfile cimport IndexFileView
from rmq._core._record cimport RecordRow

# What is wrong with an index file or with the entries of a record.
cpdef enum:
    FAULT_HASH_RANGE = 1        # entry: the hash is negative
    FAULT_LINK = 2              # entry: (stored link, number of the newest entry before it in its slot)
    FAULT_ORDER = 3             # entry: its phy offset breaks the ascending order of the file
    FAULT_SLOT = 4              # slot: (stored number, number of its newest entry)
    FAULT_NO_RECORD = 5         # entry: no record begins at its phy offset
    FAULT_NO_KEY = 6            # entry: the record that it points to has no key of its hash
    FAULT_TIME = 7              # entry: (stored seconds, right seconds)
    FAULT_MISSING = 8           # keys of records in a row have no entry: (last record, keys); entry: where they belong


cdef struct Fault:
    int64_t kind
    int64_t file                # number that the caller gave the file
    int64_t number              # of the entry or slot
    int64_t phy_offset
    int64_t a
    int64_t b


cdef struct FaultList:
    Fault *items
    int64_t count
    int64_t room
    int64_t most                    # so many are kept, 0: all
    int64_t omitted                 # beyond


cdef bint add_fault(FaultList *list_, int64_t kind, int64_t file, int64_t number, int64_t phy_offset, int64_t a,
                    int64_t b) noexcept nogil
cdef object take_all(FaultList *list_)


cdef struct KeyHash:
    int32_t key_hash
    bint is_found               # an entry has it


cdef struct FoundEntry:
    int32_t key_hash
    int32_t number
    int64_t file
    bint is_right               # its hash is that of a key of the row


@cython.final
cdef class EntryCheck:
    """Entries of index files, compared with the keys of the rows of a scan in log order."""
    cdef:
        KeyHash *hashes             # of the keys of the row at hand
        int64_t key_count
        int64_t key_room
        FoundEntry *found           # entries of the row at hand, across files
        int64_t found_count
        int64_t found_room
        bint is_under_way           # the row at hand goes on in the next file
        IndexFileView view          # None until a file is open
        int64_t file                # number that the caller gave it
        int32_t entry               # the next one of it
        int32_t limit
        bint is_last                # no file follows
        int64_t begin_timestamp
        int64_t first_begin_timestamp
        int64_t least               # phy offset; entries of records below it are others' to judge, or nobody's
        int64_t required_end        # a record at or past it may lack entries
        bint is_lenient
        bint index_tags
        bint has_run
        Fault run                   # open FAULT_MISSING
        FaultList faults
        readonly int64_t right      # entries that are of a key of their record
        readonly int64_t behind     # keys at or past the required end without an entry
    cdef bint _add_hash(self, int32_t key_hash) noexcept nogil
    cdef bint _hash_keys(self, const RecordRow *row, bint tags) noexcept nogil
    cdef bint _find(self, int32_t key_hash) noexcept nogil
    cdef int64_t _match(self) noexcept nogil
    cdef bint _judge(self, const RecordRow *row) noexcept nogil
    cdef bint _add(self, int64_t kind, int64_t phy_offset, int64_t a, int64_t b) noexcept nogil
    cdef bint _end_run(self) noexcept nogil
    cdef int check_file(self) except -1
    cdef int32_t compare(self, const RecordRow *rows, int32_t row, int32_t count) noexcept nogil
