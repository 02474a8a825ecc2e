# SPDX-License-Identifier: Apache-2.0
from rmq._core._columns import GrowingBuffer
from rmq._core._recordbatch import RecordBatch

def body_views(batch: RecordBatch, views: GrowingBuffer) -> memoryview | bytes: ...
