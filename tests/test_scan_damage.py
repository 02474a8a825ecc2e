"""scan(on_damage="skip"): every whole record comes, every byte that is left out is told, in one file each."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import random
import shutil
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import oracle
import pytest
from test_foreign_formats import Builder

import rmq
from rmq.logsegment import Segment
from rmq.wholerecords import WholeRecords

SEGMENT = 4096
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT, mapped_file_size_consume_queue=200, max_hash_slot_num=10,
                         max_index_num=99)  # fmt: skip
BLANK_MAGIC = struct.pack(">I", 0xCBD43194)


@dataclass(frozen=True)
class Log:
    """A closed store of three segments, and where its records lie."""

    path: Path
    records: list[tuple[int, int]]  # phy offset, size

    def number_at(self, phy_offset: int) -> int:
        return next(i for i, (begin, size) in enumerate(self.records) if begin <= phy_offset < begin + size)

    def file(self, number: int) -> Path:
        return self.path / "commitlog" / f"{number * SEGMENT:020d}"

    def last_of(self, segment: int) -> int:
        return max(i for i, (begin, _) in enumerate(self.records) if begin // SEGMENT == segment)

    def end_of(self, number: int) -> int:
        return sum(self.records[number])

    def write(self, phy_offset: int, data: bytes) -> None:
        with self.file(phy_offset // SEGMENT).open("r+b") as file:
            os.pwrite(file.fileno(), data, phy_offset % SEGMENT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Log:
    path = tmp_path_factory.mktemp("whole") / "store"
    with rmq.open(path, "x", config=CONFIG) as store:
        put = store.put_many([rmq.Message("T", b"body %03d" % i * 20, keys=f"key{i}") for i in range(40)])
    return Log(path, list(zip(put.phy_offset.tolist(), put.size.tolist(), strict=True)))


@pytest.fixture
def log(whole: Log, tmp_path: Path) -> Log:
    shutil.copytree(whole.path, tmp_path / "s")
    return Log(tmp_path / "s", whole.records)


def skipped(log: Log, mode: str = "r", **options: Any) -> tuple[list[int], list[rmq.LostRange]]:
    """(numbers of the messages that a scan gives, ranges that it left out)."""
    lost: list[rmq.LostRange] = []
    with rmq.open(log.path, mode) as store:
        table = store.scan(columns=["body"], on_damage="skip", lost=lost, **options).read_all()
    table.validate(full=True)
    return [int(body[5:8]) for body in table["body"].to_pylist()], lost


def assert_lost(log: Log, numbers: set[int], *ranges: tuple[int, int], mode: str = "r") -> list[rmq.LostRange]:
    """All messages but these come, and these ranges are told; the scan that raises gives what lies before."""
    found, lost = skipped(log, mode)
    assert found == [i for i in range(40) if i not in numbers]
    assert [(item.begin_phy_offset, item.end_phy_offset) for item in lost] == list(ranges)
    for item in lost:
        assert item.path == str(log.file(item.begin_phy_offset // SEGMENT))
        assert item.begin_phy_offset // SEGMENT == (item.end_phy_offset - 1) // SEGMENT, "a range lies in one file"
        assert item.reason
    with rmq.open(log.path, mode) as store, pytest.raises(rmq.CorruptFileError) as raised:
        store.scan().read_all()
    assert raised.value.path == lost[0].path
    return lost


def test_a_whole_log_loses_nothing(log: Log) -> None:
    assert skipped(log) == (list(range(40)), [])


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("number", [0, 7, 20])
def test_a_body_whose_crc_differs_costs_that_record_alone(log: Log, number: int, mode: str) -> None:
    begin, size = log.records[number]
    log.write(begin + 100, b"X")
    (lost,) = assert_lost(log, {number}, (begin, begin + size), mode=mode)
    assert lost.reason == "body CRC differs"
    with rmq.open(log.path, mode) as store:
        assert store.scan(check_crc=False).read_all().num_rows == 40, "not asked for"


HEADERS = [(0, b"\x7f"), (0, bytes(8)), (4, b"\0"), (28, b"\1"), (87, b"\xff"), (0, bytes(91))]


@pytest.mark.parametrize(("at", "data"), HEADERS)
def test_damage_in_a_header_costs_that_record_alone(log: Log, at: int, data: bytes) -> None:
    begin, size = log.records[5]
    log.write(begin + at, data)
    assert_lost(log, {5}, (begin, begin + size))


def test_the_start_of_a_segment_may_be_gone(log: Log) -> None:
    first = log.last_of(0) + 1
    log.write(SEGMENT, bytes(300))
    last = log.number_at(SEGMENT + 299)
    # The blank record before it closes its segment as ever.
    assert_lost(log, set(range(first, last + 1)), (SEGMENT, log.end_of(last)))


def test_the_end_of_a_segment_may_be_gone_with_its_blank_record(log: Log) -> None:
    last = log.last_of(0)
    log.write(log.records[last][0] + 10, b"\xff" * (SEGMENT - log.records[last][0] - 10))
    assert_lost(log, {last}, (log.records[last][0], SEGMENT))


@pytest.mark.parametrize("data", [bytes(8), b"\xff" * 8, struct.pack(">i", 5) + BLANK_MAGIC])
def test_a_damaged_blank_record_loses_no_message(log: Log, data: bytes) -> None:
    blank = log.end_of(log.last_of(0))
    log.write(blank, data)
    assert_lost(log, set(), (blank, SEGMENT))


def test_damage_over_a_segment_border_is_told_file_by_file(log: Log) -> None:
    last = log.last_of(0)
    begin = log.records[last][0]
    log.write(begin, b"\xab" * (SEGMENT - begin))
    log.write(SEGMENT, b"\xab" * 10)
    assert_lost(log, {last, last + 1}, (begin, SEGMENT), (SEGMENT, log.end_of(last + 1)))


def test_a_missing_segment_is_one_range(log: Log) -> None:
    log.file(1).unlink()
    numbers = {i for i, (begin, _) in enumerate(log.records) if begin // SEGMENT == 1}
    (lost,) = assert_lost(log, numbers, (SEGMENT, 2 * SEGMENT))
    assert lost.reason == "segment is missing"


@pytest.mark.parametrize("segment", [1, 2])
def test_a_truncated_segment_is_read_up_to_its_last_whole_record(log: Log, segment: int) -> None:
    middle = log.last_of(segment) - 2
    begin, size = log.records[middle]
    os.truncate(log.file(segment), begin % SEGMENT + size // 2)
    numbers = {i for i, (start, _) in enumerate(log.records) if start >= begin and start // SEGMENT == segment}
    found, lost = skipped(log)
    assert found == [i for i in range(40) if i not in numbers]
    assert lost[0].begin_phy_offset == begin
    assert lost[-1].reason == f"file has {begin % SEGMENT + size // 2} bytes, expected {SEGMENT}"
    assert all(one.end_phy_offset == two.begin_phy_offset for one, two in pairwise(lost))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/null")])
def test_what_is_no_file_in_place_of_a_segment_costs_that_segment(log: Log, make: Callable[[Path], object]) -> None:
    log.file(1).unlink()
    make(log.file(1))
    found, lost = skipped(log)
    assert found == [i for i, (begin, _) in enumerate(log.records) if begin // SEGMENT != 1]
    assert [(item.begin_phy_offset, item.end_phy_offset) for item in lost] == [(SEGMENT, 2 * SEGMENT)]


def test_a_segment_that_is_a_link_to_itself_is_an_error_of_the_system(log: Log) -> None:
    log.file(1).unlink()
    log.file(1).symlink_to(log.file(1).name)
    with pytest.raises(OSError, match="symbolic links"):
        rmq.open(log.path)


def test_a_record_inside_a_damaged_body_is_not_taken_for_one(tmp_path: Path) -> None:
    """It states its own place and has a right CRC: only the length of the record around it tells."""
    inner = oracle.encode_record("EVIL", 0, 0, 90, b"forged")
    first = oracle.encode_record("T", 0, 0, 0, bytes(2) + inner, store_timestamp=5)
    assert first.index(inner) == 90
    second = oracle.encode_record("T", 0, 1, len(first), b"second", store_timestamp=6)
    (tmp_path / "s" / "commitlog").mkdir(parents=True)
    data = bytearray((first + second).ljust(SEGMENT, b"\0"))
    data[88] ^= 1
    (tmp_path / "s" / "commitlog" / f"{0:020d}").write_bytes(data)
    with rmq.open(tmp_path / "s", config=CONFIG) as store:
        assert store.scan(on_damage="skip").read_all()["body"].to_pylist() == [b"second"]


def test_a_record_that_ends_with_zeros_is_found_behind_damage(tmp_path: Path) -> None:
    """It has no properties. Taken for the zeros behind a torn record it would be cut off."""
    first = oracle.encode_record("T", 0, 0, 0, b"first", store_timestamp=5)
    second = oracle.encode_record("T", 0, 1, len(first), b"second", store_timestamp=6)
    assert second.endswith(b"\0\0")
    (tmp_path / "s" / "commitlog").mkdir(parents=True)
    data = bytearray((first + second).ljust(SEGMENT, b"\0"))
    data[88] ^= 1
    (tmp_path / "s" / "commitlog" / f"{0:020d}").write_bytes(data)
    with pytest.raises(rmq.CorruptFileError, match="CRC"):
        rmq.open(tmp_path / "s", "r+", config=CONFIG)
    with rmq.open(tmp_path / "s", config=CONFIG) as store:
        assert store.scan(on_damage="skip").read_all()["body"].to_pylist() == [b"second"]


def test_a_body_that_does_not_decompress_costs_its_message(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        for body in (b"first", b"no zlib", b"last"):
            store.put(rmq.Message("T", body, sys_flag=int(body == b"no zlib")))
        lost: list[rmq.LostRange] = []
        assert store.scan(on_damage="skip", lost=lost).read_all()["body"].to_pylist() == [b"first", b"last"]
        assert [item.reason[:30] for item in lost] == ["body does not decompress as zl"]
        assert store.scan(columns=["raw_body"], on_damage="skip").read_all().num_rows == 3
        places = store.scan(columns=["phy_offset"]).read_all()["phy_offset"].to_pylist()
        for ask in (lambda: store.scan().read_all(), lambda: store.lookup(places[1]).body,
                    lambda: store.lookup_many(places, columns=["body"]), lambda: store.pull("T", 0, 1).messages[0].body,
                    lambda: pickle.loads(pickle.dumps(store.lookup(places[1]))).body):  # fmt: skip
            with pytest.raises(rmq.CorruptFileError, match="does not decompress") as error:
                ask()
            assert (error.value.path, error.value.offset) == (str(tmp_path / f"s/commitlog/{0:020d}"), places[1])


def test_damage_of_a_body_names_the_segment_and_the_byte_in_it(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        place = next(put.phy_offset for put in iter(lambda: store.put(rmq.Message("T", b"no zlib", sys_flag=1)), None)
                     if put.phy_offset > 2 * SEGMENT)  # fmt: skip
        with pytest.raises(rmq.CorruptFileError, match="does not decompress") as error:
            assert store.lookup(place).body
        start = place - place % SEGMENT
        assert (Path(error.value.path).name, error.value.offset) == (f"{start:020d}", place - start)


@pytest.mark.parametrize("damage", [
    {"body": b"\0" * 30}, {"body": b"", "raw_properties": b"INNER_BASE\1x\2"}, {"topic": "\u0800" * 10_000},
])  # fmt: skip
def test_an_inner_batch_that_breaks_the_format_costs_its_record(tmp_path: Path, damage: dict[str, Any]) -> None:
    fields = {"topic": "T", "queue_id": 0, "queue_offset": 0, "phy_offset": 0, "body": b"x", "sys_flag": 0xC0} | damage
    first = oracle.encode_record(**fields)
    if "topic" in damage:  # 30,000 bytes that are no UTF-8 read as 90,000
        first = first.replace("\u0800".encode(), b"\xff\xfe\xfd")
    second = oracle.encode_record("T", 0, 1, len(first), b"second", store_timestamp=6)
    (tmp_path / "s" / "commitlog").mkdir(parents=True)
    (tmp_path / "s" / "commitlog" / f"{0:020d}").write_bytes((first + second).ljust(2**16, b"\0"))
    config = rmq.StoreConfig(mapped_file_size_commit_log=2**16)
    with rmq.open(tmp_path / "s", config=config) as store:
        table = store.scan(on_damage="skip").read_all()
        assert table["body"].to_pylist()[-1] == b"second"
        if table.num_rows == 1:
            with pytest.raises(rmq.CorruptFileError):
                store.scan().read_all()


@pytest.mark.slow
@pytest.mark.parametrize("on_damage", ["raise", "skip"])
def test_an_inner_batch_whose_topic_is_long_is_unpacked_in_parts(tmp_path: Path, on_damage: str) -> None:
    """Each message has the topic of its record: 33 KB of log say 240 MB."""
    packed = (struct.pack(">iiiii", 22, 0, 0, 0, 0) + bytes(2)) * 8000
    record = oracle.encode_record("T" * 30_000, 0, 0, 0, zlib.compress(packed), sys_flag=0xC1)
    (tmp_path / "s" / "commitlog").mkdir(parents=True)
    (tmp_path / "s" / "commitlog" / f"{0:020d}").write_bytes(record.ljust(2**16, b"\0"))
    with rmq.open(tmp_path / "s", config=rmq.StoreConfig(mapped_file_size_commit_log=2**16)) as store:
        tracemalloc.start()
        try:
            rows = [batch.num_rows for batch in store.scan(on_damage=on_damage, batch_bytes=2**21)]
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (sum(rows), max(rows) * 30_000 < 2**22, peak < 2**25) == (8000, True, True)


def test_a_range_of_the_log_may_begin_and_end_in_damage(log: Log) -> None:
    begin, size = log.records[4]
    log.write(begin, b"\xff" * size)
    for at in (begin, begin + 1, begin + size):
        assert skipped(log, begin_phy_offset=at)[0] == list(range(5, 40)) or at == begin
        assert skipped(log, end_phy_offset=at)[0] == list(range(4))
    with rmq.open(log.path) as store:
        assert len(store.scan(begin_phy_offset=begin + size).read_all()) == 35  # a unit tells where that record begins
        with pytest.raises(rmq.CorruptFileError):
            store.scan(begin_phy_offset=begin + 1)


def test_each_range_is_a_warning_of_the_logger(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    begin, size = log.records[9]
    log.write(begin + 100, b"X")
    with caplog.at_level(logging.WARNING, "rmq"):
        skipped(log)
    (text,) = [record.getMessage() for record in caplog.records if "no whole record" in record.getMessage()]
    assert text == f"{log.file(0)}: no whole record in the log's bytes {begin} to {begin + size - 1}: body CRC differs"


def test_ranges_are_told_without_a_list_too_and_batches_stay_small(log: Log) -> None:
    log.write(log.records[9][0] + 100, b"X")
    with rmq.open(log.path) as store:
        batches = list(store.scan(columns=["phy_offset"], on_damage="skip", batch_rows=5))
    assert [batch.num_rows for batch in batches] == [5] * 7 + [4]


@pytest.mark.parametrize(
    ("options", "error"),
    [({"on_damage": "ignore"}, ValueError), ({"on_damage": None}, ValueError),
     ({"on_damage": "skip", "lost": ()}, TypeError)],
)  # fmt: skip
def test_other_words_are_refused_at_once(log: Log, options: dict[str, Any], error: type[Exception]) -> None:
    with rmq.open(log.path) as store, pytest.raises(error, match=next(reversed(options))):
        store.scan(**options)


def test_random_damage_gives_no_message_that_was_not_put_and_tells_all_that_is_gone(whole: Log, tmp_path: Path) -> None:
    for seed in range(30):
        log = Log(tmp_path / f"s{seed}", whole.records)
        shutil.copytree(whole.path, log.path)
        file = log.file(seed % 3)
        file.write_bytes(oracle.damage(oracle.damage(file.read_bytes(), seed), seed + 1))
        found, lost = skipped(log)
        assert found == sorted(set(found))
        for number in set(range(40)) - set(found):
            begin, size = log.records[number]
            assert any(item.begin_phy_offset < begin + size and begin < item.end_phy_offset for item in lost), seed


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EIO])
def test_what_this_process_lacks_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put(rmq.Message("t", b"x"))
    with rmq.open(tmp_path / "s") as store:

        def fail(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(rmq.logsegment, "MappedFile", fail)
        lost: list[rmq.LostRange] = []
        if number in (errno.EACCES, errno.EIO):
            assert store.scan(on_damage="skip", lost=lost).read_all().num_rows == 0
            assert [one.reason for one in lost] == [os.strerror(number)]
        else:
            with pytest.raises(OSError, match=os.strerror(number)):
                store.scan(on_damage="skip", lost=lost).read_all()
            assert not lost


@pytest.mark.parametrize("segment", [0, 1, 2])
def test_a_segment_that_is_cut_short_costs_pulls_of_its_own_messages_alone(log: Log, segment: int) -> None:
    os.truncate(log.file(segment), 1000)
    numbers = [i for i, (begin, _) in enumerate(log.records) if begin // SEGMENT == segment]
    with rmq.open(log.path) as store:
        assert store.topics() == {"T": {0: (0, 40)}}
        for number in {*range(40)} - {*numbers}:
            assert store.pull("T", 0, number, 1).messages[0].body[5:8] == b"%03d" % number
        with pytest.raises(rmq.CorruptFileError, match="file has 1000 bytes"):
            store.pull("T", 0, numbers[0], 1)


@pytest.mark.parametrize("segment", [0, 1])
def test_a_segment_before_the_last_that_is_cut_short_costs_queries_for_its_own_messages_alone(
        log: Log, segment: int) -> None:  # fmt: skip
    os.truncate(log.file(segment), 1000)
    with rmq.open(log.path) as store:
        assert store.max_phy_offset == log.end_of(39)
        for number, (begin, _) in enumerate(log.records):
            if begin // SEGMENT != segment:
                assert [message.phy_offset for message in store.query("T", f"key{number}")] == [begin]
            else:
                with pytest.raises(rmq.CorruptFileError, match="file has 1000 bytes") as caught:
                    store.query("T", f"key{number}")
                assert caught.value.path == str(log.file(segment))
        assert not store.query("T", "nothing")


def test_queues_are_derived_past_any_number_of_damaged_places(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=2**20)) as store:
        places = [result.phy_offset for result in store.put_many([rmq.Message("t", b"")] * 2400)]
    shutil.rmtree(tmp_path / "s/consumequeue")
    with (tmp_path / f"s/commitlog/{0:020d}").open("r+b") as file:
        for place in places[1::2]:
            file.seek(place + 4)
            file.write(bytes(4))
    with rmq.open(tmp_path / "s") as store:
        assert store.topics() == {"t": {0: (0, 1200)}}


# ---- times -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_search_by_time_goes_by_what_can_be_read(tmp_path: Path, seed: int) -> None:
    """Edges: runs of lost records, single ones, lost segments; a time before, at and behind each message's."""
    chance, times = random.Random(seed), [1000 + number * 10 for number in range(200)]
    clock = iter(times)
    with rmq.open(tmp_path / "s", "x", config=CONFIG, clock=lambda: next(clock)) as store:
        places = [store.put(rmq.Message("T", b"x" * chance.randrange(200))).phy_offset for _ in times]
    lost = {number for number in range(200) if chance.random() < (seed % 3) / 8}
    for first in chance.choices(range(200), k=seed % 4):
        lost.update(range(first, min(200, first + chance.randrange(60))))
    log = Log(tmp_path / "s", [])
    for number in lost:
        log.write(places[number], bytes(40))
    for gone in [log.file(number) for number in {place // SEGMENT for place in places} if chance.random() < 0.1][:1]:
        segment = int(gone.name)
        lost.update(number for number, place in enumerate(places) if segment <= place < segment + SEGMENT)
        os.truncate(gone, 10) if seed % 2 else gone.unlink()
    left = [number for number in range(200) if number not in lost]
    with rmq.open(tmp_path / "s") as reader:
        for time in (time + more for time in times for more in (-1, 0, 1)):
            lower = next((number for number in left if times[number] >= time), 200)
            upper = next((number for number in left if times[number] > time), 200) - 1
            assert reader.search_offset("T", 0, time, on_damage="skip") == lower
            assert reader.search_offset("T", 0, time, "UPPER", on_damage="skip") == max(upper, 0)


# ---- bounds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_scan_within_bounds_gives_what_lies_before_damage_and_behind_it(log: Log, mode: str) -> None:
    """A bound amid records is found from the segment's start, or from a unit behind the damage."""
    places = [begin for begin, _ in log.records]
    log.write(places[6] + 4, bytes(4))
    with rmq.open(log.path, mode) as store:

        def scanned(begin: int | None, end: int | None) -> tuple[int, int | None]:
            """How many messages came, and the place of the damage behind them."""
            count = 0
            try:
                for batch in store.scan(begin_phy_offset=begin, end_phy_offset=end):
                    count += len(batch)
            except rmq.CorruptFileError as error:
                return count, error.offset
            return count, None

        assert scanned(None, places[6]) == (6, None)
        assert scanned(places[2] + 1, places[6]) == (3, None)
        assert scanned(None, places[6] + 1) == scanned(None, places[8]) == (6, places[6])
        assert scanned(places[6], places[8]) == (0, places[6])
        assert scanned(places[7], None) == (33, None)
        assert scanned(places[7] + 1, places[9] + 1) == (2, None)


@pytest.mark.parametrize(("sys_flag", "reason"), [(0xC0, "inner batch is damaged"), (1, "does not decompress")])
@pytest.mark.parametrize("batch_bytes", [1, 8 * 1024 * 1024])
def test_a_scan_gives_what_lies_before_a_body_that_breaks_its_format(
    tmp_path: Path, sys_flag: int, reason: str, batch_bytes: int
) -> None:
    builder = Builder(tmp_path / "store")
    for number in range(5):
        builder.record("T", zlib.compress(b"body%d" % number), sys_flag=1)
    place, _ = builder.record("T", b"\0\0\0\x09 no format", sys_flag=sys_flag)
    builder.record("T", b"behind")
    bodies: list[bytes] = []
    with rmq.open(builder.finish()) as store:
        batches = iter(store.scan(columns=["body"], batch_bytes=batch_bytes))
        with pytest.raises(rmq.CorruptFileError, match=reason) as error:
            bodies.extend(body for batch in batches for body in batch["body"].to_pylist())
    assert (bodies, error.value.offset) == ([b"body%d" % number for number in range(5)], place)


def test_damage_in_many_places_does_not_have_the_end_of_the_segment_looked_at_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = Builder(tmp_path / "store")
    places = [builder.record("T", b"x" * 20)[0] for _ in range(30)]
    for place in places[1::2]:
        builder.log = builder.log[: place + 4] + b"\xff" + builder.log[place + 5 :]
    looks: list[int] = []
    used_end = Segment.used_end
    monkeypatch.setattr(Segment, "used_end", lambda segment, begin: looks.append(begin) or used_end(segment, begin))
    with rmq.open(builder.finish()) as store:
        assert sum(len(batch) for batch in store.scan(on_damage="skip")) == 15
    assert len(looks) < 5


def test_a_scan_that_skips_damage_reads_nothing_before_it_is_asked_for_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=1 << 16)) as store:
        store.put_many([rmq.Message("T", b"x")] * 100)
    with rmq.open(tmp_path / "s") as store:
        monkeypatch.setattr(WholeRecords, "__iter__", lambda _: pytest.fail("reads"))
        stream = store.scan(on_damage="skip")
        monkeypatch.undo()
        assert stream.read_all().num_rows == 100
