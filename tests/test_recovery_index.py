"""Index files of a store without marks: which are taken over, which are made anew, and none without need."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import copy_store

import rmq
from rmq import recovery
from rmq.marks import set_aside
from rmq.paths import StorePaths

SMALL = {"mapped_file_size_commit_log": 65536, "mapped_file_size_consume_queue": 2000, "max_hash_slot_num": 10,
         "max_index_num": 40}  # fmt: skip
CONFIG = rmq.StoreConfig(**SMALL)
START = 1_700_000_000_000
ENTRIES = 39  # of a full file: the first is never used


def message(number: int, keys: int) -> rmq.Message:
    return rmq.Message("a", b"%d" % number, keys=[f"{letter}{number}" for letter in "abc"[:keys]])


def fill(store: rmq.Store, first: int, count: int, keys: int = 3) -> None:
    for number in range(first, first + count):
        store.put(message(number, keys))


def index_bytes(store: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((store / "index").iterdir())]


@pytest.mark.parametrize("keys", [1, 3])
@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("has_marks", [False, True])
def test_opening_begins_no_file_behind_one_that_is_exactly_full(
        tmp_path: Path, keys: int, is_killed: bool, has_marks: bool) -> None:  # fmt: skip
    """The next message begins it, as RocketMQ's IndexService does: one with a key, or without any."""
    count = 2 * ENTRIES // keys
    for following in (keys, 0):
        never, path = tmp_path / f"never{following}", tmp_path / f"s{following}"
        with rmq.open(never, "x", config=CONFIG, clock=lambda: START) as store:
            fill(store, 0, count, keys)
            store.flush()
            copy_store(never, path)
            before = index_bytes(path)
            fill(store, count, 1, following)
        if not is_killed:
            (path / "abort").unlink()
        if not has_marks:
            shutil.rmtree(path / "rmq")
        rmq.open(path, "r+", config=CONFIG).close()
        assert len(before) == 2
        assert index_bytes(path) == before
        with rmq.open(path, "r+", config=CONFIG, clock=lambda: START) as store:
            fill(store, count, 1, following)
        assert index_bytes(path) == index_bytes(never)
        assert len(index_bytes(path)) == 3


# ---- a broker's store with damaged index files ---------------------------------------------------------------------

COUNT, KEYS = 90, 2  # 180 entries: five files, and records whose two keys lie in two of them
SLOTS_AT, ENTRIES_AT = 40, 40 + 4 * SMALL["max_hash_slot_num"]
DAMAGES = {"slot": (SLOTS_AT, 4 * SMALL["max_hash_slot_num"]), "link": (ENTRIES_AT + 2 * 20 + 16, 4),
           "key hash": (ENTRIES_AT + 3 * 20, 4), "every entry": (ENTRIES_AT + 20, 10 * 20)}  # fmt: skip


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("closed") / "store"
    with rmq.open(path, "x", config=CONFIG) as store:
        fill(store, 0, COUNT, KEYS)
    shutil.rmtree(path / "rmq")
    assert len(index_bytes(path)) == 5
    return path


def damage(store: Path, number: int, name: str) -> bytes:
    """The bytes of an index file, which are damaged now."""
    path = sorted((store / "index").iterdir())[number]
    data = bytearray(path.read_bytes())
    at, size = DAMAGES[name]
    data[at : at + size] = bytes(byte ^ 0x15 for byte in data[at : at + size])
    path.write_bytes(data)
    return bytes(data)


def check_answers(store: rmq.Store) -> None:
    """Every message is found by each of its keys, and nothing else is."""
    keys = [f"{letter}{number}" for number in range(COUNT + 1) for letter in "ab"]
    found = store.query_many("a", keys, columns=["body"])
    wanted = [(place, key[1:].encode()) for place, key in enumerate(keys[: COUNT * KEYS])]
    assert list(zip(*found.table.to_pydict().values(), strict=True)) == wanted
    assert found.complete


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("number", [0, 2, 4])
def test_a_reader_warns_and_scans_what_a_damaged_index_file_covered(
        tmp_path: Path, closed: Path, number: int, name: str, caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    path = copy_store(closed, tmp_path / "s")
    damage(path, number, name)
    before = index_bytes(path)
    with rmq.open(path) as store:
        assert str(sorted((path / "index").iterdir())[number]) in caplog.text
        check_answers(store)
        assert 0 < store.query("a", "a0").scanned_size < store.max_phy_offset // 2
        assert not store.query("a", "a0", complete=False).complete
    assert index_bytes(path) == before
    assert not (path / "rmq").exists()


@pytest.mark.parametrize(("number", "name", "repair"), [
    *((number, name, False) for number in (0, 2, 4) for name in DAMAGES), (1, "slot", True), (4, "link", True)])
def test_opening_for_writing_sets_a_damaged_index_file_aside_and_makes_it_anew(
        tmp_path: Path, closed: Path, number: int, name: str, repair: bool) -> None:  # fmt: skip
    path = copy_store(closed, tmp_path / "s")
    damaged = damage(path, number, name)
    with rmq.open(path, "r+", repair=repair) as store:
        check_answers(store)
        assert store.query("a", "a0").scanned_size == 0
    assert index_bytes(path) == index_bytes(closed)
    assert damaged in [kept.read_bytes() for kept in (path / "rmq" / "cut").glob("*.bin")]


@pytest.mark.parametrize("done", range(4))
def test_a_crash_between_two_files_set_aside_loses_no_key(
        tmp_path: Path, closed: Path, done: int, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Files 1 to 4 are to go, and 1 is the damaged one."""
    path = copy_store(closed, tmp_path / "s")
    damage(path, 1, "link")
    moved: list[Path] = []

    def crash(paths: StorePaths, source: Path, reason: str) -> None:
        if len(moved) == done:
            raise InterruptedError("crashed")
        moved.append(source)
        set_aside(paths, source, reason)

    with monkeypatch.context() as patch:
        patch.setattr(recovery, "set_aside", crash)
        with pytest.raises(InterruptedError):
            rmq.open(path, "r+")
    with rmq.open(path) as store:
        check_answers(store)
    with rmq.open(path, "r+") as store:
        check_answers(store)
    assert index_bytes(path) == index_bytes(closed)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_several_damaged_index_files_leave_the_geometry_to_the_sound_ones(
        tmp_path: Path, closed: Path, mode: str) -> None:  # fmt: skip
    path = copy_store(closed, tmp_path / "s")
    for number in (0, 1, 3, 4):
        damage(path, number, "slot")
    with rmq.open(path, mode) as store:
        check_answers(store)
        assert (store.config.max_hash_slot_num, store.config.max_index_num) == (10, 40)
    if mode == "r+":
        assert index_bytes(path) == index_bytes(closed)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_with_no_sound_index_file_the_geometry_that_is_passed_holds(tmp_path: Path, closed: Path, mode: str) -> None:
    path = copy_store(closed, tmp_path / "s")
    for number in range(5):
        damage(path, number, "slot")
    with pytest.raises(rmq.CorruptFileError, match="max_hash_slot_num and max_index_num can be passed") as error:
        rmq.open(path, mode)
    assert error.value.path == str(sorted((path / "index").iterdir())[0])
    with pytest.raises(rmq.CorruptFileError):
        rmq.open(path, mode, config=rmq.StoreConfig(max_hash_slot_num=10, max_index_num=41))
    with rmq.open(path, mode, config=rmq.StoreConfig(max_hash_slot_num=10, max_index_num=40)) as store:
        check_answers(store)
    if mode == "r+":
        assert index_bytes(path) == index_bytes(closed)


@pytest.mark.slow  # a file of 420 MB, nearly all of it a hole
def test_a_lone_damaged_index_file_of_default_length_has_the_default_geometry(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq.open(path, "x") as store:
        fill(store, 0, COUNT, KEYS)
    shutil.rmtree(path / "rmq")
    (index,) = (path / "index").iterdir()
    with open(index, "r+b") as file:
        file.seek(40 + 4 * 5_000_000 + 2 * 20 + 16)
        file.write(b"\0\0\0\7")
    for mode in ("r", "r+"):
        with rmq.open(path, mode) as store:
            check_answers(store)
            assert (store.query("a", "a0").scanned_size == 0) == (mode == "r+")


def test_sound_index_files_of_two_geometries_are_refused(tmp_path: Path, closed: Path) -> None:
    """One of them would be read wrongly; nobody can say which."""
    path = copy_store(closed, tmp_path / "s")
    last = sorted((path / "index").iterdir())[-1]
    with rmq.IndexFile(last.with_name("99991231235959999"), "x", max_hash_slot_num=5, max_index_num=41) as file:
        file.put_keys(["a#a1", "a#a2", "a#b7", "a#b9"], [1, 2, 3, 4], [1, 1, 1, 1])
    with pytest.raises(rmq.CorruptFileError, match="geometry"):
        rmq.open(path)


def test_the_error_for_index_files_of_two_geometries_names_both(tmp_path: Path, closed: Path) -> None:
    path = copy_store(closed, tmp_path / "s")
    for file in (path / "index").iterdir():
        file.unlink()
    for name, slots in (("20260101000000000", 100), ("20260101000000001", 200)):
        with rmq.IndexFile(path / "index" / name, "x", max_hash_slot_num=slots, max_index_num=400) as file:
            file.put_keys([f"a#a{n}" for n in range(300)], list(range(300)), [1000] * 300)
    with pytest.raises(rmq.CorruptFileError, match="geometry") as raised:
        rmq.open(path)
    assert "(100, 400)" in raised.value.reason
    assert "(200, 400)" in raised.value.reason


@pytest.mark.parametrize(("before", "now"), [("5.3.3", "5.4.0"), ("5.4.0", None), ("5.4.0", "5.4.0")])
@pytest.mark.parametrize("count", [1, 5, 8])
def test_entries_of_tags_that_an_older_broker_did_not_make_are_not_missed(
    tmp_path: Path, before: str, now: str | None, count: int
) -> None:
    """No broker makes them later, and no query by key asks for them."""
    sizes = {"mapped_file_size_commit_log": 1 << 14, "max_hash_slot_num": 10, "max_index_num": 8}
    path, config = tmp_path / "s", rmq.StoreConfig(**sizes, **({} if now is None else {"rocketmq_version": now}))
    messages = [rmq.Message("T", b"%d" % n, keys=f"k{n}", tags="A", uniq_key=f"u{n}") for n in range(count)]
    with rmq.open(path, "x", config=rmq.StoreConfig(**sizes, rocketmq_version=before)) as store:
        for message in messages:
            store.put(message)
    shutil.rmtree(path / "rmq")
    for mode in ("r", "r+"):
        with rmq.open(path, mode, config=config) as store:
            assert store.info().unindexed_size == 0
            assert [[found.body for found in store.query("T", f"k{n}")] for n in range(count)] == \
                [[message.body] for message in messages]  # fmt: skip
    assert not (path / "rmq/cut").exists()
