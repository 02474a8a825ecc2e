# SPDX-License-Identifier: Apache-2.0
"""The databases that one would use instead, each as fast as its manual says how. None of them syncs here.

Items are pairs: a key's bytes and 8 bytes of phy offset, or a number and a record's bytes.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

OFFSET = struct.Struct(">q")
Pair = tuple[bytes, bytes]
MAP_SIZE = 16 * 1024**3


class Lmdb:
    """nosync, writemap; one transaction per call."""

    def __init__(self, path: Path) -> None:
        import lmdb

        self._env = lmdb.open(str(path), map_size=MAP_SIZE, sync=False, metasync=False, writemap=True, max_dbs=2)
        self._main, self._keys = self._env.open_db(b"main"), self._env.open_db(b"keys")

    def put(self, items: Iterable[Pair]) -> None:
        with self._env.begin(self._main, write=True) as transaction:
            put = transaction.put
            for key, value in items:
                put(key, value)

    def put_many(self, items: Sequence[Pair], *, append: bool = False) -> None:
        with self._env.begin(self._main, write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti(items, append=append)

    def put_messages(self, records: Sequence[Pair], keys: Sequence[Pair]) -> None:
        """Records by number, in order, and the number of each key."""
        with self._env.begin(write=True) as transaction:
            with transaction.cursor(self._main) as cursor:
                cursor.putmulti(records, append=True)
            with transaction.cursor(self._keys) as cursor:
                cursor.putmulti(keys)

    def get(self, keys: Iterable[bytes]) -> list[bytes | None]:
        with self._env.begin(self._main) as transaction:
            get = transaction.get
            return [get(key) for key in keys]

    def get_many(self, keys: Sequence[bytes]) -> list[bytes]:
        with self._env.begin(self._main) as transaction, transaction.cursor() as cursor:
            return [value for _, value in cursor.getmulti(keys)]

    def clear(self) -> None:
        with self._env.begin(write=True) as transaction:
            transaction.drop(self._main, delete=False)
            transaction.drop(self._keys, delete=False)

    def close(self) -> None:
        self._env.close()


class Rocks:
    """Bloom filter, 1 GiB cache, the log on and not synced; a WriteBatch per call, look-ups by the thousand."""

    def __init__(self, path: Path) -> None:
        import rocksdict

        self._rocksdict = rocksdict
        table = rocksdict.BlockBasedOptions()
        table.set_bloom_filter(10, False)
        table.set_block_cache(rocksdict.Cache(1024**3))
        options = rocksdict.Options(raw_mode=True)
        options.set_block_based_table_factory(table)
        options.increase_parallelism(2)
        self._database = rocksdict.Rdict(str(path), options)

    def put_many(self, items: Iterable[Pair]) -> None:
        batch = self._rocksdict.WriteBatch(raw_mode=True)
        put = batch.put
        for key, value in items:
            put(key, value)
        self._database.write(batch)

    def get(self, keys: Iterable[bytes]) -> list[bytes]:
        database = self._database
        return [database[key] for key in keys]

    def get_many(self, keys: list[bytes]) -> list[bytes]:
        get = self._database.get
        return [value for at in range(0, len(keys), 1000) for value in get(keys[at : at + 1000])]

    def close(self) -> None:
        self._database.close()


class Sqlite:
    """WAL, synchronous NORMAL, one transaction per call. Keys to phy offsets, or numbers to records."""

    def __init__(self, path: Path, *, of_records: bool = False) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        for pragma in ("journal_mode=wal", "synchronous=normal", "temp_store=memory", "cache_size=-1000000",
                       f"mmap_size={MAP_SIZE}"):  # fmt: skip
            self._database.execute(f"pragma {pragma}")
        if of_records:
            self._database.execute("create table item (key integer primary key, value blob)")
        else:  # the primary key covers the query: no second look-up
            self._database.execute("create table item (key text, value integer, primary key (key, value)) "
                                   "without rowid")  # fmt: skip

    def put_many(self, items: Iterable[tuple[str | int, bytes | int]]) -> None:
        self._database.execute("begin")
        self._database.executemany("insert into item values (?, ?)", items)
        self._database.execute("commit")

    def get(self, keys: Iterable[str]) -> list[int]:
        execute = self._database.execute
        return [execute("select value from item where key = ?", (key,)).fetchone()[0] for key in keys]

    def join(self, keys: Iterable[str]) -> list[int]:
        """One query: the keys in a temporary table, joined."""
        execute = self._database.execute
        execute("begin")
        execute("create temp table wanted (number integer primary key, key text)")
        self._database.executemany("insert into wanted values (?, ?)", enumerate(keys))
        found = execute("select item.value from wanted cross join item on item.key = wanted.key "
                        "order by wanted.number").fetchall()  # fmt: skip
        execute("drop table wanted")
        execute("commit")
        return [value for (value,) in found]

    def clear(self) -> None:
        self._database.execute("delete from item")

    def close(self) -> None:
        self._database.close()
