# SPDX-License-Identifier: Apache-2.0
"""2 million random keys: put, and looked up again, beside databases, numpy, a dict and pure Python."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import peers
import pyarrow as pa
import pytest
from contenders import ENTRIES, KEYS, ROUND, SLOTS, Contenders, Keys, Taker
from databases import OFFSET, Lmdb
from ratios import CPU, NEW_FILES, READS, Call, Goal, Measure, Peer
from sample import START, TOPIC
from vectorised import VectorIndex

import rmq
from rmq._core import _layout as L
from rmq._core._entrycheck import check_links
from rmq._core._indexfile import IndexFileView
from rmq.keys import list_array

LOOK_UPS = 200_000
SINGLE = 20_000  # keys put or looked up one by one
ROUNDS = KEYS // ROUND
ENTRY = np.dtype([("key_hash", ">i4"), ("phy_offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("index")
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def keys() -> Keys:
    return Keys()


@pytest.fixture(scope="module")
def contenders(place: Path, keys: Keys) -> Iterator[Contenders]:
    """Empty, or what test_put_keys_list left in them."""
    made = Contenders(place, keys)
    yield made
    made.close()


class Wanted:
    """Keys to look up, all of which are there: new objects, in each form that somebody takes."""

    def __init__(self, keys: Keys) -> None:
        self.numbers = random.Random(2).sample(range(KEYS), LOOK_UPS)
        self.encoded = [bytes(bytearray(keys.encoded[number])) for number in self.numbers]
        self.text = [key.decode() for key in self.encoded]
        self.arrow = pa.array(self.text)
        self.array = np.array(self.encoded, "S32")


@pytest.fixture(scope="module")
def wanted(keys: Keys) -> Wanted:
    return Wanted(keys)


def check_answers(answers: pa.ListArray, walker: peers.Index, keys: list[str], numbers: list[int]) -> None:
    """Those of RocketMQ's walk, other keys of the same hash included; the key's own is among them."""
    assert answers.to_pylist() == [walker.select(key) for key in keys]
    assert all(number in answer for number, answer in zip(numbers, answers.to_pylist(), strict=True))


@pytest.fixture(scope="module")
def full(contenders: Contenders, wanted: Wanted, place: Path) -> Iterator[tuple[Contenders, peers.Index]]:
    """2 million keys in each, and every answer compared."""
    contenders.fill()
    walker = peers.Index(place / "python", SLOTS)
    numbers = wanted.numbers
    check_answers(contenders.file.select_phy_offset_many(wanted.text), walker, wanted.text, numbers)
    assert contenders.file.select_phy_offset_many(wanted.arrow) == contenders.file.select_phy_offset_many(wanted.text)
    counts, found = contenders.vector.select(wanted.array)
    assert list_array(counts, found) == contenders.file.select_phy_offset_many(wanted.text)
    assert [contenders.dict[key] for key in wanted.text] == numbers
    assert contenders.sqlite.get(wanted.text) == contenders.sqlite.join(wanted.text) == numbers
    packed = [OFFSET.pack(number) for number in numbers]
    for name in ("lmdb", "rocks"):
        database = getattr(contenders, name, None)
        if database is not None:
            assert database.get(wanted.encoded) == database.get_many(wanted.encoded) == packed
    yield contenders, walker
    walker.close()


# ---- put -------------------------------------------------------------------------------------------------


@CPU
def test_put_keys_list(measure: Measure, contenders: Contenders) -> None:
    """20 rounds of 100,000 keys: the median is that of a file of a million."""
    goals = {"lmdb put": Goal("I12", 60), "sqlite executemany": Goal("I12", 180)}
    needs = {"lmdb put": "lmdb", "lmdb putmulti": "lmdb", "rocksdict WriteBatch": "rocksdict"}
    names = ["lmdb put", "lmdb putmulti", "rocksdict WriteBatch", "sqlite executemany", "numpy expert",
             "pure Python", "dict"]  # fmt: skip
    named = [Peer(name, lambda name=name: contenders.takers[name].round(),
                  (goals[name],) if name in goals else (), needs.get(name, "")) for name in names]  # fmt: skip
    measure(ROUND, NEW_FILES, contenders.takers["rmq"].round, *named, rounds=ROUNDS, warm=0)
    contenders.fill()


@CPU
def test_put_keys_arrow(measure: Measure, keys: Keys, place: Path) -> None:
    """The same from an Arrow array, into files of its own."""
    arrow = pa.array(keys.text)
    file, vector = rmq.IndexFile(place / "arrow", "x"), VectorIndex(place / "vector-again", SLOTS, ENTRIES)

    def ours(first: int, last: int) -> Call:
        return lambda: file.put_keys(arrow[first:last], keys.offsets[first:last], keys.times[first:last])

    def numpy(first: int, last: int) -> Call:
        return lambda: vector.put(keys.array[first:last], keys.offsets[first:last], keys.times[first:last])

    def lmdb(first: int, last: int) -> Call:
        items = list(zip(keys.encoded[first:last], keys.packed[first:last], strict=True))
        return lambda: database.put_many(items)

    peers_ = [Peer("numpy expert", Taker(numpy, lambda: None).round)]
    by_lmdb = Peer("lmdb putmulti", Taker(lmdb, lambda: None).round, (Goal("first", 5),), "lmdb")
    database = None if by_lmdb.is_missing else Lmdb(place / "lmdb-again")
    measure(ROUND, NEW_FILES, Taker(ours, file.close).round, by_lmdb, *peers_, rounds=ROUNDS, warm=0)
    assert file.index_count == KEYS + 1
    assert np.array_equal(np.memmap(place / "arrow", np.uint8, "r"), np.memmap(place / "vector-again", np.uint8, "r"))
    file.close()
    if database is not None:
        assert database.get(keys.encoded[:1000]) == keys.packed[:1000]
        database.close()


@CPU
def test_put_key(measure: Measure, keys: Keys, place: Path) -> None:
    """One call for each key."""
    file = rmq.IndexFile(place / "single", "x")
    rows = list(zip(keys.text[:SINGLE], range(SINGLE), strict=True))
    pairs = list(zip(keys.encoded[:SINGLE], keys.packed[:SINGLE], strict=True))
    by_lmdb = Peer("lmdb put", lambda: lambda: database.put(pairs), needs="lmdb")
    database = None if by_lmdb.is_missing else Lmdb(place / "lmdb-single")
    index = peers.IndexWriter(place / "python-single", SLOTS, ENTRIES)
    items = [(key, number, START) for key, number in rows]

    def ours() -> None:
        put = file.put_key
        for key, number in rows:
            put(key, number, START)

    measure(SINGLE, NEW_FILES, lambda: ours, by_lmdb, Peer("pure Python", lambda: lambda: index.put_many(items)))
    file.close()
    index.close()
    if database is not None:
        database.close()


# ---- look up ---------------------------------------------------------------------------------------------


@CPU
def test_select_list(measure: Measure, full: tuple[Contenders, peers.Index], wanted: Wanted) -> None:
    contenders, walker = full
    file, table, text, encoded = contenders.file, contenders.dict, wanted.text, wanted.encoded

    def by_dict() -> list[int | None]:
        get = table.get
        return [get(key) for key in text]

    measure(
        LOOK_UPS, READS, lambda: lambda: file.select_phy_offset_many(text),
        Peer("lmdb get", lambda: lambda: contenders.lmdb.get(encoded), (Goal("first", 10), Goal("I11", 25)), "lmdb"),
        Peer("lmdb getmulti", lambda: lambda: contenders.lmdb.get_many(encoded), needs="lmdb"),
        Peer("rocksdict multi_get", lambda: lambda: contenders.rocks.get_many(encoded), needs="rocksdict"),
        Peer("sqlite select", lambda: lambda: contenders.sqlite.get(text)),
        Peer("sqlite join", lambda: lambda: contenders.sqlite.join(text)),
        Peer("numpy expert", lambda: lambda: contenders.vector.select(wanted.array), (Goal("I11", 4),)),
        Peer("dict get", lambda: by_dict, (Goal("I11", 12),)),
        Peer("pure Python", lambda: lambda: [walker.select(key) for key in text]),
    )  # fmt: skip


@CPU
def test_select_arrow(measure: Measure, full: tuple[Contenders, peers.Index], wanted: Wanted) -> None:
    contenders, _ = full
    measure(
        LOOK_UPS, READS, lambda: lambda: contenders.file.select_phy_offset_many(wanted.arrow),
        Peer("lmdb get", lambda: lambda: contenders.lmdb.get(wanted.encoded), (Goal("first", 10),), "lmdb"),
        Peer("rocksdict multi_get", lambda: lambda: contenders.rocks.get_many(wanted.encoded), needs="rocksdict"),
        Peer("numpy expert", lambda: lambda: contenders.vector.select(wanted.array)),
    )  # fmt: skip


@CPU
def test_select_one_by_one(measure: Measure, full: tuple[Contenders, peers.Index], wanted: Wanted) -> None:
    """One call for each key."""
    contenders, walker = full
    text, encoded = wanted.text[:SINGLE], wanted.encoded[:SINGLE]
    select = contenders.file.select_phy_offset
    measure(
        SINGLE, READS, lambda: lambda: [select(key) for key in text],
        Peer("lmdb get", lambda: lambda: contenders.lmdb.get(encoded), needs="lmdb"),
        Peer("sqlite select", lambda: lambda: contenders.sqlite.get(text)),
        Peer("pure Python", lambda: lambda: [walker.select(key) for key in text]),
    )  # fmt: skip


@pytest.fixture(scope="module")
def store(place: Path, keys: Keys, wanted: Wanted) -> Iterator[tuple[rmq.Store, peers.Index, list[str]]]:
    """2 million messages with these keys and short bodies; the peer's look at the index, and the keys it asks for."""
    offsets = []
    with rmq.open(place / "store", "x", clock=lambda: START) as filling:
        for first in range(0, KEYS, ROUND):
            part = pa.array(keys.text[first : first + ROUND])
            put = filling.put_many(pa.table({"body": part, "keys": part}), topic=TOPIC)
            offsets.append(put.phy_offset)
    (path,) = (place / "store" / "index").iterdir()
    walker, asked = peers.Index(path, SLOTS), [f"{TOPIC}#{key}" for key in wanted.text]
    with rmq.open(place / "store") as opened:
        answers = opened.select_phy_offset_many(TOPIC, wanted.text)
        check_answers(answers, walker, asked, np.concatenate(offsets)[wanted.numbers].tolist())
        assert opened.select_phy_offset_many(TOPIC, wanted.arrow) == answers
        yield opened, walker, asked
    walker.close()


@CPU
@pytest.mark.parametrize("form", ["arrow", "list"])
def test_store_select(measure: Measure, store: tuple[rmq.Store, peers.Index, list[str]],
                      full: tuple[Contenders, peers.Index], wanted: Wanted, form: str) -> None:  # fmt: skip
    """Of a store of 2 million messages."""
    opened, walker, whole = store
    contenders, _ = full
    asked = wanted.arrow if form == "arrow" else wanted.text
    measure(
        LOOK_UPS, READS, lambda: lambda: opened.select_phy_offset_many(TOPIC, asked),
        Peer("lmdb get", lambda: lambda: contenders.lmdb.get(wanted.encoded), (Goal("first", 10),), "lmdb"),
        Peer("pure Python", lambda: lambda: [walker.select(key) for key in whole]),
    )  # fmt: skip


# ---- verify ----------------------------------------------------------------------------------------------


@CPU
def test_check_links(measure: Measure, full: tuple[Contenders, peers.Index]) -> None:
    """What `rmq.verify` asks of an index file by itself. numpy sorts the entries by slot."""
    data = np.memmap(full[0].file.path, np.uint8, "r")
    entries = data[-ENTRIES * L.ENTRY_SIZE :].view(ENTRY)
    view = IndexFileView(data, hash_slot_num=SLOTS, index_num=ENTRIES)
    count, nowhere = view.index_count, np.empty(0, np.int64)

    def ours() -> None:
        faults, _, _, used = check_links(view, 0, count, nowhere, most=1)
        assert len(faults) == 0 < used

    def by_numpy() -> None:
        own = entries[1:count]
        slots = own["key_hash"].astype(np.int32) % SLOTS
        order = np.argsort(slots, kind="stable")
        has_one_before = slots[order[1:]] == slots[order[:-1]]
        assert (own["previous"][order[1:]] == np.where(has_one_before, order[:-1] + 1, 0)).all()
        assert (np.diff(own["phy_offset"].astype(np.int64)) >= 0).all()

    measure(count - 1, READS, lambda: ours, Peer("numpy expert", lambda: by_numpy))
    view.release()
