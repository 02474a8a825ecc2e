"""The last record of a broker's log may be half there: its writer is at it, or was killed at it. The checks of a whole
record let through one that lacks the end of its properties. So may the last unit of a queue: that of its tags code."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

import rmq
import rmq.visible
from rmq._core._layout import UNIT_SIZE
from rmq.lock import Holder

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=8192, max_hash_slot_num=100, max_index_num=400)
PROPERTY = "x" * 1200  # two sectors and more
WHOLE = [b"0", b"1", b"2"]


def begun(path: Path, last: rmq.Message) -> tuple[Path, bytes, int]:
    """A broker's store of three messages and a last one, not closed: its segment, the bytes of it, its end."""
    with rmq.open(path, "x", config=CONFIG) as store:
        for body in WHOLE:
            store.put(rmq.Message("T", body, keys=["whole"]))
        placed = store.put(last)
    shutil.rmtree(path / "rmq")
    shutil.rmtree(path / "consumequeue")
    shutil.rmtree(path / "index")
    (path / "abort").touch()
    (path / "checkpoint").unlink()
    segment = path / "commitlog" / f"{0:020d}"
    return segment, segment.read_bytes(), placed.phy_offset + placed.size


def cut(segment: Path, data: bytes, end: int) -> None:
    segment.write_bytes(data[:end].ljust(len(data), b"\0"))


def bodies(store: rmq.Store) -> list[bytes]:
    return [message.body for message in store.pull("T").messages]


@pytest.mark.parametrize("lacks", [1, 2, 5, 511, 700, 1210])
def test_a_record_that_lacks_the_end_of_its_properties_is_cut_and_kept_after_a_kill(tmp_path: Path, lacks: int) -> None:
    segment, data, end = begun(tmp_path / "s", rmq.Message("T", b"last", keys=["k"], properties={"p": PROPERTY}))
    cut(segment, data, end - lacks)
    with rmq.open(tmp_path / "s", config=CONFIG) as store:
        assert bodies(store) == WHOLE
        assert not list(store.query("T", "k"))
    with rmq.open(tmp_path / "s", "r+", config=CONFIG) as store:
        assert bodies(store) == WHOLE
        assert store.put(rmq.Message("T", b"next")).queue_offset == 3
        assert bodies(store) == [*WHOLE, b"next"]
    assert any(b"last" in file.read_bytes() for file in (tmp_path / "s/rmq/cut").iterdir())


def test_a_reader_beside_a_broker_waits_for_a_record_s_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment, data, end = begun(tmp_path / "s", rmq.Message("T", b"last", keys=["k"], properties={"p": PROPERTY}))
    monkeypatch.setattr(rmq.visible, "lock_holder", lambda _: Holder.OTHER)
    cut(segment, data, end - 1000)
    with rmq.open(tmp_path / "s", config=CONFIG) as store:
        for lacks in (700, 300, 1):
            with segment.open("r+b") as file:
                file.write(data[: end - lacks])
            assert bodies(store) == WHOLE
            assert store.max_phy_offset < end
            assert not list(store.query("T", "k"))
        with segment.open("r+b") as file:
            file.write(data)
        assert bodies(store) == [*WHOLE, b"last"]
        assert next(iter(store.query("T", "k"))).properties["p"] == PROPERTY


@pytest.mark.parametrize("last", [rmq.Message("T", b"last"), rmq.Message("T", b"\0" * 2000),
                                  rmq.Message("T", b"last", properties={"p": "a\0b"})])  # fmt: skip
def test_a_whole_record_is_whole_whatever_zeros_are_in_it(tmp_path: Path, last: rmq.Message) -> None:
    begun(tmp_path / "s", last)
    for mode in ("r", "r+"):
        with rmq.open(tmp_path / "s", mode, config=CONFIG) as store:
            assert bodies(store) == [*WHOLE, last.body]


def test_a_record_with_another_behind_it_is_whole_also_with_a_nul_at_its_end(tmp_path: Path) -> None:
    segment, data, end = begun(tmp_path / "s", rmq.Message("T", b"last", properties={"p": "x"}))
    first_end = data.index(b"whole") + len(b"whole")
    assert first_end < end
    segment.write_bytes(data.replace(b"whole", b"whol\0", 1))
    for mode in ("r", "r+"):
        with rmq.open(tmp_path / "s", mode, config=CONFIG) as store:
            assert bodies(store) == [*WHOLE, b"last"]


@pytest.mark.parametrize("tags", ["TagA", "polygenelubricants"], ids=["a positive hash", "a negative hash"])
@pytest.mark.parametrize("written", range(12, 20))
@pytest.mark.parametrize("behind", [0, 2])
def test_tags_are_those_of_the_record_where_a_broker_is_at_the_newest_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tags: str, written: int, behind: int
) -> None:
    """behind: so many records follow whose units are in no file yet."""
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put_many([rmq.Message("T", b"%d" % number, tags=tags) for number in range(3 + behind)])
    shutil.rmtree(tmp_path / "s/rmq")
    [file] = (tmp_path / "s/consumequeue/T/0").iterdir()
    units = file.read_bytes()
    file.write_bytes(units[: 2 * UNIT_SIZE + written].ljust(len(units), b"\0"))
    monkeypatch.setattr(rmq.visible, "lock_holder", lambda _: Holder.OTHER)
    with rmq.open(tmp_path / "s", config=CONFIG) as store:
        pulled = store.pull("T", tags=tags)
        assert [message.body for message in pulled.messages] == [b"%d" % number for number in range(3 + behind)]
        assert pulled.next_queue_offset == 3 + behind
        assert not store.pull("T", tags="other").messages
        assert [message.body for message in store.pull("T", 0, 2, 1, tags=tags).messages] == [b"2"]
        file.write_bytes(units)
        assert store.pull("T", tags=tags).messages == pulled.messages


def with_its_own_crc(path: Path, *, is_closed: bool, behind: int = 0) -> None:
    """A broker's store of a message whose last property looks like the CRC of a record, before `behind` others."""
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put(rmq.Message("T", b"0"))
        placed = store.put(rmq.Message("T", b"own", raw_properties=b"KEYS\x01k\x02__CRC32_\x011234567890\x02"))
        store.put_many([rmq.Message("T", b"behind")] * behind)
    segment = path / "commitlog" / f"{0:020d}"
    data = bytearray(segment.read_bytes())
    data[placed.phy_offset + placed.size - 13] = ord("#")
    segment.write_bytes(data)
    shutil.rmtree(path / "rmq")
    if not is_closed:
        (path / "abort").touch()


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_producer_s_own_crc_property_cuts_no_message_off(tmp_path: Path, is_closed: bool, behind: int) -> None:
    """A broker whose enabledAppendPropCRC is off stores it as any other: it speaks of another record, or of none."""
    with_its_own_crc(tmp_path / "s", is_closed=is_closed, behind=behind)
    for mode in ("r", "r+", "r"):
        with rmq.open(tmp_path / "s", mode, config=CONFIG) as store:
            assert store.topics() == {"T": {0: (0, 2 + behind)}}
            assert store.scan(columns=["body"], check_crc=False).read_all()["body"].to_pylist()[1] == b"own"
            with pytest.raises(rmq.CorruptFileError, match="whole-record CRC differs"):
                store.pull("T")


def test_where_the_config_says_that_records_have_a_crc_one_that_differs_is_no_whole_record(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, enabled_append_prop_crc=True)
    with_its_own_crc(tmp_path / "closed", is_closed=True, behind=1)
    for call in (lambda: rmq.open(tmp_path / "closed", "r+", config=config),
                 lambda: rmq.rebuild(tmp_path / "closed", tmp_path / "rebuilt", config=config)):  # fmt: skip
        with pytest.raises(rmq.CorruptFileError, match="whole-record CRC differs"):
            call()
    with_its_own_crc(tmp_path / "killed", is_closed=False)
    for mode in ("r", "r+"):
        with rmq.open(tmp_path / "killed", mode, config=config) as store:
            assert bodies(store) == [b"0"]
    assert any(b"own" in file.read_bytes() for file in (tmp_path / "killed/rmq/cut").iterdir())
