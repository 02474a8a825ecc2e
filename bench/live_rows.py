# SPDX-License-Identifier: Apache-2.0
"""Row C6: put_many into a live store beside what its parts cost alone: the append, and making queue and index."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

from records import CONFIG, RECORD_SIZES, SEGMENT, TOPIC, Records, make_records
from rounds import Round, timed
from sample import START
from setting import Setting

import rmq
from rmq._core._putbatch import PutBatch
from rmq._core._queuetable import QueueTable
from rmq.chunks import put_chunks
from rmq.columns import put_rules
from rmq.commitlog import CommitLog
from rmq.dispatch import Dispatcher
from rmq.index import Index
from rmq.queueset import QueueSet

CLOCK = time.process_time_ns  # of all threads: what one prepares for another is not free


def live_rows(setting: Setting) -> None:
    """Files are new in each round, of both; two index keys a message."""
    if not setting.wants("C6"):
        return
    for part in RECORD_SIZES:
        records = make_records(part, setting.place, setting.seed)
        source = records.table()
        alone = {"append, then queue and index": partial(apart, setting.place / "apart", records, source)}
        setting.add("C6", live(setting.place / "live", records, source), alone, part)
        records.bodies_path.unlink()
        records.keys_path.unlink()


def live(place: Path, records: Records, source: Any) -> Round:
    def run(number: int) -> float:
        with rmq.open(place, "x", config=CONFIG, clock=lambda: START) as store:
            def put() -> None:
                store.put_many(source, topic=TOPIC, results=False)
                store._flusher.dispatch()

            taken = timed(len(records), lambda _: put, CLOCK)(number)
        shutil.rmtree(place)
        return taken

    return run


def apart(place: Path, records: Records, source: Any, number: int) -> float:
    """Both, one after the other, ns per message."""
    (place / "commitlog").mkdir(parents=True)
    log = CommitLog([place / "commitlog"], SEGMENT, writable=True)
    queues = QueueSet(place / "consumequeue", CONFIG.mapped_file_size_consume_queue, writable=True, is_exact=True)
    index = Index(place / "index", CONFIG, writable=True)
    dispatcher, batch, table = Dispatcher(log, queues, index, CONFIG), PutBatch(put_rules(CONFIG)), QueueTable()

    def append() -> None:
        for _, load in put_chunks(source, TOPIC, None, None):
            load(batch)
            log.append(batch, START, table)
            batch.release()

    taken = timed(len(records), lambda _: append, CLOCK)(number)
    taken += timed(len(records), lambda _: partial(dispatcher.advance, log.position), CLOCK)(number)
    for part in (index, queues, log):
        part.close()
    shutil.rmtree(place)
    return taken
