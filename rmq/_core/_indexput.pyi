# SPDX-License-Identifier: Apache-2.0
from rmq._core._recordbatch import RecordBatch

def key_count(batch: RecordBatch, index_tags: bool = False) -> int: ...
