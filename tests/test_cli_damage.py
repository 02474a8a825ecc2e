"""`rmq cat`, `get` and `query` on damaged messages: what is whole is shown, the rest is one line and exit code 3."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
from commandline import assert_error, call, good

import rmq
from rmq.cli.cat import PAGE, QueueReader

pytestmark = pytest.mark.slow

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=2**20, mapped_file_size_consume_queue=2**20, max_hash_slot_num=10,
                         max_index_num=2000)  # fmt: skip
COUNT = PAGE + 100


def message(i: int) -> rmq.Message:
    return rmq.Message("T", b"body %d" % i, keys=f"k{i}", tags="three" if i % 3 == 0 else None)


class Damaged:
    """A store of one queue of more than a page; each third message has the tag "three"."""

    def __init__(self, path: Path) -> None:
        self.path = path
        times = iter(range(1_700_000_000_000, 2_000_000_000_000, 1000))
        with rmq.open(path, "x", config=CONFIG, clock=lambda: next(times)) as store:
            self.places = [store.put(message(i)) for i in range(COUNT)]
        self.file = path / "commitlog" / f"{0:020d}"

    def write(self, number: int, at: int, data: bytes) -> None:
        with self.file.open("r+b") as file:
            os.pwrite(file.fileno(), data, self.places[number].phy_offset + at)

    def shown(self, *arguments: object) -> list[int]:
        done = call("cat", self.path, "T", "-f", "{queue_offset}", *arguments)
        assert done.code == 3, done.err
        assert done.err.count("\n") == 1
        self.err = done.err
        return [int(line) for line in done.out.splitlines()]


@pytest.fixture
def store(tmp_path: Path) -> Damaged:
    return Damaged(tmp_path / "s")


DAMAGES = {"body": (88, b"X"), "zeroed header": (0, bytes(60)), "magic": (4, b"\0"), "lengths": (84, b"\0\1\0\0")}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("number", [0, 5, PAGE - 1, PAGE, COUNT - 2])
def test_cat_shows_all_messages_but_the_damaged_one(store: Damaged, damage: str, number: int) -> None:
    store.write(number, *DAMAGES[damage])
    assert store.shown() == [i for i in range(COUNT) if i != number]
    assert f"{store.file}: byte {store.places[number].phy_offset}: " in store.err


def test_cat_counts_the_messages_that_it_leaves_out_in_one_line(store: Damaged) -> None:
    for number in (3, 4, PAGE + 7):
        store.write(number, 88, b"X")
    assert store.shown() == [i for i in range(COUNT) if i not in (3, 4, PAGE + 7)]
    assert store.err.endswith("body CRC differs; 3 messages cannot be read\n")


def test_a_page_that_is_read_again_has_its_damage_counted_once(store: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(3, 0, bytes(60))
    with rmq.open(store.path) as opened:
        reader = QueueReader(opened, "T", None, None, None, None)
        with monkeypatch.context() as before:
            before.setattr(type(opened), "max_phy_offset", store.places[10].phy_offset)
            shown = [message.queue_offset for message in reader.stored()]
        shown += [message.queue_offset for message in reader.stored()]
    assert shown == [i for i in range(COUNT) if i != 3]
    assert reader.damaged == 1


def test_cat_looks_for_tags_and_times_on_a_damaged_page_too(store: Damaged) -> None:
    store.write(6, 88, b"X")
    store.write(7, 0, bytes(8))
    assert store.shown("--tags", "three") == [i for i in range(0, COUNT, 3) if i != 6]
    begin, end = (store.places[number].store_timestamp for number in (4, 10))
    assert store.shown("--from", begin, "--until", end) == [4, 5, 8, 9, 10]


def test_cat_ends_before_the_damage_when_the_limit_does(store: Damaged) -> None:
    store.write(20, 88, b"X")
    done = call("cat", store.path, "T", "-f", "{queue_offset}", "--limit", 9)
    assert (done.code, done.out.splitlines()) == (0, [str(i) for i in range(9)]), "nothing that was asked for is lost"


def test_from_finds_its_place_over_a_damaged_message(store: Damaged) -> None:
    store.write(COUNT // 2, 0, bytes(8))  # the first one that a binary search looks at
    begin = store.places[COUNT // 2 - 1].store_timestamp
    assert store.shown("--from", begin) == [i for i in range(COUNT // 2 - 1, COUNT) if i != COUNT // 2]


def test_cat_leaves_out_a_body_that_does_not_decompress(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        for body in (zlib.compress(b"first"), b"no zlib", zlib.compress(b"last")):
            store.put(rmq.Message("T", body, sys_flag=1))
    done = call("cat", tmp_path / "s", "T", "-f", "{body}")
    assert (done.code, done.out.splitlines()) == (3, ["first", "last"])
    assert "does not decompress" in done.err


@pytest.mark.parametrize("place", ["T/0/5", "phy", "id"])
def test_get_of_a_body_whose_crc_differs_is_an_error(store: Damaged, place: str) -> None:
    store.write(5, 88, b"X")
    name = {"phy": str(store.places[5].phy_offset), "id": store.places[5].offset_msg_id}.get(place, place)
    assert_error(call("get", store.path, name), 3, f"{store.file}: byte {store.places[5].phy_offset}: body CRC differs")
    good("get", store.path, "T/0/6")


def test_query_of_a_body_whose_crc_differs_is_an_error(store: Damaged) -> None:
    store.write(5, 88, b"X")
    assert_error(call("query", store.path, "T", "k5"), 3, "body CRC differs")
    good("query", store.path, "T", "k6")
