# SPDX-License-Identifier: Apache-2.0
"""Records into the log and nothing else, pages warm: the entry behind put_many, beside databases that get them made.

Ours loads and checks the messages, makes the records with CRC, and appends them. The peers store the same bytes.
"""

from __future__ import annotations

from pathlib import Path

import peers
import pytest
from databases import OFFSET, Lmdb, Rocks, Sqlite
from ratios import CPU, WARM_PAGES, Call, Goal, Measure, Peer
from sample import CONFIG, SEGMENT, SIZES, START, TOPIC, Fresh, messages, random_keys, table

from rmq._core._putbatch import PutBatch
from rmq._core._putrow import PutRules
from rmq._core._queuetable import QueueTable
from rmq.chunks import put_chunks
from rmq.commitlog import CommitLog

COUNTS = {100: 20_000, 1024: 20_000, 4096: 10_000}
RULES = PutRules(max_message_size=CONFIG.max_message_size, max_record_size=CONFIG.max_record_size,
                 allow_v2=CONFIG.allows_v2_records, allow_ipv6=CONFIG.allows_ipv6_hosts,
                 append_crc=CONFIG.enabled_append_prop_crc, drop_last_separator=CONFIG.drops_last_separator,
                 store_host=CONFIG.store_host)  # fmt: skip
WARM = 3  # lmdb fills pages that it knows from the third time on


class Appender:
    """A commit log that starts again at its first byte for every round."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(exist_ok=True)
        self._log = CommitLog([path], SEGMENT, writable=True)
        self._batch = PutBatch(RULES)

    def append(self, source: object) -> Call:
        def run() -> None:
            queues = QueueTable()
            self._log.position = 0
            for _, load in put_chunks(source, None if isinstance(source, list) else TOPIC, None, None):
                load(self._batch)
                self._log.append(self._batch, START, queues)
                self._batch.release()

        return run

    @property
    def records(self) -> list[bytes]:
        return list(peers.split(self.path / f"{0:020d}", 0, self._log.position))

    def close(self) -> None:
        self._log.close()


@pytest.fixture(params=SIZES)
def size(request: pytest.FixtureRequest) -> int:
    return request.param


@CPU
@pytest.mark.parametrize("form", ["arrow", "list"])
def test_append(measure: Measure, fresh: Fresh, size: int, form: str) -> None:
    keys = random_keys(COUNTS[size])
    source = table(keys, size) if form == "arrow" else messages(keys, size)
    appender = fresh.make("commitlog", Appender)
    appender.append(messages(keys, size))()
    records = appender.records
    appender.append(source)()
    assert appender.records == records
    numbered = list(enumerate(records))
    pairs = [(OFFSET.pack(number), record) for number, record in numbered]
    sqlite = fresh.make("sqlite", lambda path: Sqlite(path, of_records=True))

    def emptied(database: Lmdb) -> Call:
        database.clear()
        return lambda: database.put_many(pairs, append=True)

    def emptied_table() -> Call:
        sqlite.clear()
        return lambda: sqlite.put_many(numbered)

    by_lmdb = Peer("lmdb putmulti", lambda: emptied(lmdb), needs="lmdb")
    by_new_lmdb = Peer("lmdb putmulti, new file", lambda: emptied(fresh.make("lmdb-new", Lmdb)), (Goal("C4", 14),),
                       "lmdb")  # fmt: skip
    by_rocks = Peer("rocksdict WriteBatch", lambda: lambda: rocks.put_many(pairs), needs="rocksdict")
    by_sqlite = Peer("sqlite executemany", emptied_table, (Goal("C4", 45),))
    if not by_lmdb.is_missing:
        lmdb = fresh.make("lmdb", Lmdb)
    if not by_rocks.is_missing:
        rocks = fresh.make("rocks", Rocks)
    measure(len(keys), WARM_PAGES, lambda: appender.append(source), by_lmdb, by_new_lmdb, by_rocks, by_sqlite,
            warm=WARM)  # fmt: skip
    assert sqlite.get(range(len(keys))) == records
    if not by_lmdb.is_missing:
        assert lmdb.get(key for key, _ in pairs) == records
    if not by_rocks.is_missing:
        assert rocks.get(key for key, _ in pairs) == records
