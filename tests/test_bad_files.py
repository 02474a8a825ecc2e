"""Damaged stores: every file cut, emptied, zeroed, replaced, lost or renamed, opened "r", "r+" and with repair.

What must hold: either a typed error and the store as good as before once the file is put back, or right answers.
A wrong answer, a message left out in silence, a queue offset given twice or an untyped exception is a fault.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle
import pytest
from conftest import SIZES, digests

import rmq

pytestmark = pytest.mark.slow

CONFIG = rmq.StoreConfig(**SIZES)
COUNT = 62
TYPED = (rmq.RmqError, OSError)
QUEUES = [("T", 0), ("T", 1), ("U", 0), ("U", 1)]


def message(i: int) -> rmq.Message:
    return rmq.Message("TU"[i % 3 == 2], b"body %03d" % i * 8, keys=[f"key{i}", "all"], tags="tag", queue_id=i % 2)


@dataclass(frozen=True)
class Base:
    """A store with messages 0 to COUNT - 1 on disk, closed or as a killed process leaves it."""

    path: Path
    phy_offsets: list[int]

    def files(self, part: str) -> list[Path]:
        return sorted(path.relative_to(self.path) for path in (self.path / part).rglob("*") if path.is_file())


def build(path: Path, *, closed: bool) -> Base:
    times = iter(range(1_700_000_000_000, 1_800_000_000_000, 1000))
    live = path.with_name("live")
    with rmq.open(live, "x", config=CONFIG, clock=lambda: next(times)) as store:
        results = [store.put(message(i)) for i in range(COUNT - 12)]
        store.flush()
        results += [store.put(message(i)) for i in range(COUNT - 12, COUNT)]
        if not closed:
            shutil.copytree(live, path)
    if closed:
        shutil.copytree(live, path)
    return Base(path, [result.phy_offset for result in results])


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return build(tmp_path_factory.mktemp("clean") / "store", closed=True)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return build(tmp_path_factory.mktemp("killed") / "store", closed=False)


# ---- judging ---------------------------------------------------------------------------------------------


def numbers(found: Any) -> list[int]:
    return [int(body[5:8]) for body in found]


def scanned(store: rmq.Store) -> tuple[list[int], bool]:
    """Messages in log order, and whether the scan came to the end without an error."""
    rows: list[int] = []
    reader = store.scan(columns=["body"], batch_rows=16)
    try:
        for batch in reader:
            rows += numbers(batch["body"].to_pylist())
    except rmq.CorruptFileError:
        return rows, False
    return rows, True


def expected_queues(rows: list[int]) -> dict[tuple[str, int], list[int]]:
    queues: dict[tuple[str, int], list[int]] = {queue: [] for queue in QUEUES}
    for i in rows:
        queues[message(i).topic, message(i).queue_id].append(i)
    return queues


def assert_answers(store: rmq.Store, rows: list[int]) -> None:
    """Every way of asking gives these messages; damage on the way may only be a CorruptFileError."""
    got, whole = scanned(store)
    assert not set(got) - set(rows)
    assert not whole or got == rows, "scan left messages out in silence"
    queues = expected_queues(rows)
    with suppress(rmq.CorruptFileError):
        found = {(topic, number): high for topic, ids in store.topics().items() for number, (_, high) in ids.items()}
        assert found == {queue: len(held) for queue, held in queues.items() if held}, "topics"
    for (topic, queue_id), held in queues.items():
        with suppress(rmq.CorruptFileError):
            pulled = store.pull(topic, queue_id, 0, 1000).messages
            assert numbers(found.body for found in pulled) == held, f"pull {topic}/{queue_id}"
    for topic in "TU":
        with suppress(rmq.CorruptFileError):
            wanted = [i for i in reversed(rows) if message(i).topic == topic]
            got = numbers(found.body for found in store.query(topic, "all", limit=None))
            assert got == wanted, f"query {topic} all"
    for i in (0, 1, 2, 20, 40, COUNT - 1):
        with suppress(rmq.CorruptFileError):
            got = numbers(found.body for found in store.query(message(i).topic, f"key{i}"))
            assert got == ([i] if i in rows else []), f"query key{i}"


def assert_goes_on(path: Path, rows: list[int]) -> None:
    """Opened for writing, the store answers, takes messages with fresh queue offsets, and agrees with itself."""
    queues = expected_queues(rows)
    with rmq.open(path, "r+") as store:
        assert_answers(store, rows)
        put = [store.put(message(i)) for i in range(900, 906)]
        for result in put:
            assert result.queue_offset == len(queues[result.topic, result.queue_id]), "queue offset given twice"
            queues[result.topic, result.queue_id].append(0)
    assert oracle.check_store(path, 10, 30) == []
    assert numbers(record.body for record in oracle.read_records(path)) == rows + list(range(900, 906))


def judge(
    base: Base, path: Path, mode: str, *, repair: bool = False, kept: int = COUNT, names: tuple[str, ...] = ()
) -> str:
    """Open the damaged store; returns what happened. kept: messages that repair may not lose."""
    before = digests(path, ".")
    rows = list(range(COUNT))
    try:
        store = rmq.open(path, mode, repair=repair)
    except TYPED as error:
        if mode == "r":
            assert digests(path, ".") == before
        for part in (
            "commitlog",
            "consumequeue",
            "index",
            "config",
            "checkpoint",
            "rmq/meta.json",
            "rmq/marks",
        ):
            if (path / part).is_file() or (path / part).is_symlink():
                (path / part).unlink()
            elif (path / part).exists():
                shutil.rmtree(path / part)
            if (base.path / part).is_dir():
                shutil.copytree(base.path / part, path / part)
            elif (base.path / part).exists():
                shutil.copy(base.path / part, path / part)
        for name in ("lock", "abort", "abort.bak", "rmq/owner"):
            if (path / name).is_dir():
                (path / name).rmdir()
        assert_goes_on(path, rows)
        return type(error).__name__
    with store:
        if repair:
            got, whole = scanned(store)
            assert whole
            assert got == rows[: len(got)]
            assert len(got) >= kept, "repair lost more than the damage"
            rows = got
        assert_answers(store, rows)
        if mode == "r":
            store.close()
            assert digests(path, ".") == before
            return "read"
    assert_goes_on(path, rows)
    return "opened"


# ---- one file at a time ----------------------------------------------------------------------------------


def truncated(path: Path, spare: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def shortened(path: Path, spare: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def longer(path: Path, spare: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(20))


def emptied(path: Path, spare: Path) -> None:
    path.write_bytes(b"")


def zeroed(path: Path, spare: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def foreign(path: Path, spare: Path) -> None:
    path.write_bytes(random.Random(path.name).randbytes(path.stat().st_size))


def lost(path: Path, spare: Path) -> None:
    path.unlink()


def folder(path: Path, spare: Path) -> None:
    path.unlink()
    path.mkdir()


def sibling(path: Path, spare: Path) -> None:
    """Another file of the kind under this name: what a careless restore does."""
    shutil.copy(spare, path)


DAMAGES = {
    function.__name__: function
    for function in (truncated, shortened, longer, emptied, zeroed, foreign, lost, folder, sibling)
}
PLACES: dict[str, tuple[str, int, int]] = {  # part, which file of it, which sibling
    "first segment": ("commitlog", 0, 1),
    "middle segment": ("commitlog", 1, 0),
    "last segment": ("commitlog", -1, 0),
    "first queue file": ("consumequeue/T/0", 0, 1),
    "last queue file": ("consumequeue/T/0", -1, 0),
    "first index file": ("index", 0, 1),
    "middle index file": ("index", 1, 0),
    "last index file": ("index", -1, 0),
}
MODES = {"r": ("r", False), "r+": ("r+", False), "repair": ("r+", True)}


def hurt(base: Base, path: Path, place: str, damage: Callable[[Path, Path], None]) -> int:
    """Copy the store with one file damaged; returns how many messages lie before the damage."""
    shutil.copytree(base.path, path)
    part, number, other = PLACES[place]
    files = base.files(part)
    damage(path / files[number], base.path / files[other])
    if part != "commitlog":
        return COUNT
    return sum(phy_offset < int(files[number].name) for phy_offset in base.phy_offsets)


SIZE_FAULTS = ["truncated", "shortened", "longer", "emptied", "lost", "folder"]
CONTENT_FAULTS = ["zeroed", "foreign", "sibling"]
LOG = [place for place in PLACES if "segment" in place]
GONE = [("first segment", "lost"), ("first segment", "folder")]  # what cleaning leaves too
LOG_FAULTS = [(place, damage) for place in LOG for damage in DAMAGES if (place, damage) not in GONE]
DERIVED_FAULTS = [
    (place, damage)
    for place in PLACES
    if place not in LOG
    for damage in DAMAGES
    if damage not in ("shortened", "longer") and ("index" not in place or damage not in ("foreign", "sibling"))
]


@pytest.mark.parametrize(("place", "damage"), LOG_FAULTS)
def test_a_reader_of_a_damaged_log_gets_right_answers_or_an_error(
    clean: Base, tmp_path: Path, place: str, damage: str
) -> None:
    hurt(clean, tmp_path / "s", place, DAMAGES[damage])
    judge(clean, tmp_path / "s", "r")


@pytest.mark.parametrize(("place", "damage"), [case for case in LOG_FAULTS if case[1] in SIZE_FAULTS])
def test_a_log_with_a_file_of_another_size_or_lost_is_not_written_on(
    clean: Base, tmp_path: Path, place: str, damage: str
) -> None:
    hurt(clean, tmp_path / "s", place, DAMAGES[damage])
    assert judge(clean, tmp_path / "s", "r+") == "CorruptFileError"


@pytest.mark.parametrize(("place", "damage"), [case for case in LOG_FAULTS if case[1] in CONTENT_FAULTS])
def test_a_writer_of_a_log_damaged_inside_gives_right_answers_or_an_error(
    clean: Base, tmp_path: Path, place: str, damage: str
) -> None:
    hurt(clean, tmp_path / "s", place, DAMAGES[damage])
    with suppress(rmq.CorruptFileError), rmq.open(tmp_path / "s", "r+") as store:
        assert_answers(store, list(range(COUNT)))


@pytest.mark.parametrize("base", ["clean", "killed"])
@pytest.mark.parametrize(("place", "damage"), LOG_FAULTS)
def test_repair_keeps_everything_before_the_damage(
    request: pytest.FixtureRequest, tmp_path: Path, place: str, damage: str, base: str
) -> None:
    source = request.getfixturevalue(base)
    kept = hurt(source, tmp_path / "s", place, DAMAGES[damage])
    judge(source, tmp_path / "s", "r+", repair=True, kept=kept)


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize(("place", "damage"), DERIVED_FAULTS)
def test_a_damaged_queue_or_index_file_is_an_error_or_does_not_show(
    clean: Base, tmp_path: Path, place: str, damage: str, mode: str
) -> None:
    hurt(clean, tmp_path / "s", place, DAMAGES[damage])
    judge(clean, tmp_path / "s", mode)


@pytest.mark.parametrize("damage", ["foreign", "sibling"])
@pytest.mark.parametrize("place", [place for place in PLACES if "index" in place])
def test_wrong_bytes_in_an_index_file_never_give_a_wrong_message(
    clean: Base,
    tmp_path: Path,
    place: str,
    damage: str,
) -> None:
    """The entries carry no checksum: a query may miss some until `verify` is run, and no more than that."""
    hurt(clean, tmp_path / "s", place, DAMAGES[damage])
    with rmq.open(tmp_path / "s") as store:
        assert scanned(store) == (list(range(COUNT)), True)
        for i in range(COUNT):
            assert numbers(found.body for found in store.query(message(i).topic, f"key{i}")) in ([i], [])


@pytest.mark.parametrize(("place", "damage"), [case for case in DERIVED_FAULTS if case[1] != "sibling"])
def test_a_damaged_queue_or_index_file_of_a_killed_writer_is_an_error_or_does_not_show(
    killed: Base, tmp_path: Path, place: str, damage: str
) -> None:
    hurt(killed, tmp_path / "s", place, DAMAGES[damage])
    judge(killed, tmp_path / "s", "r+")


SINGLES = ["checkpoint", "lock", "abort.bak", "rmq/meta.json", "rmq/marks", "config/topics.json"]


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "sibling"])
@pytest.mark.parametrize("name", SINGLES)
def test_a_damaged_small_file_is_an_error_or_does_not_show(
    clean: Base, tmp_path: Path, name: str, damage: str, mode: str
) -> None:
    shutil.copytree(clean.path, tmp_path / "s")
    DAMAGES[damage](tmp_path / "s" / name, Path())
    judge(clean, tmp_path / "s", mode)


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("damage", ["truncated", "emptied", "foreign", "lost", "folder"])
@pytest.mark.parametrize("name", ["abort", "rmq/owner", "rmq/marks", "checkpoint"])
def test_a_damaged_small_file_of_a_killed_writer_is_an_error_or_does_not_show(
    killed: Base, tmp_path: Path, name: str, damage: str, mode: str
) -> None:
    shutil.copytree(killed.path, tmp_path / "s")
    DAMAGES[damage](tmp_path / "s" / name, Path())
    judge(killed, tmp_path / "s", mode)


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("part", ["consumequeue", "consumequeue/T", "consumequeue/T/1", "index", "rmq", "config"])
def test_a_lost_directory_is_derived_again_or_an_error(clean: Base, tmp_path: Path, part: str, mode: str) -> None:
    shutil.copytree(clean.path, tmp_path / "s")
    shutil.rmtree(tmp_path / "s" / part)
    judge(clean, tmp_path / "s", mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_lost_commit_log_is_an_error(clean: Base, tmp_path: Path, mode: str) -> None:
    shutil.copytree(clean.path, tmp_path / "s")
    shutil.rmtree(tmp_path / "s" / "commitlog")
    with pytest.raises(rmq.RmqError):  # noqa: SIM117
        with rmq.open(tmp_path / "s", MODES[mode][0], repair=MODES[mode][1]) as store:
            assert numbers(store.scan(columns=["body"]).read_all()["body"].to_pylist()) == list(range(COUNT))


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_log_that_lies_elsewhere_is_no_store_without_messages(clean: Base, tmp_path: Path, mode: str) -> None:
    """Of a broker with storePathCommitLog, of which the option was not passed."""
    shutil.copytree(clean.path, tmp_path / "s")
    shutil.rmtree(tmp_path / "s" / "rmq")
    (tmp_path / "s" / "commitlog").rename(tmp_path / "log")
    with pytest.raises(rmq.CorruptFileError, match=r"no segments.*store_path_commit_log"):
        rmq.open(tmp_path / "s", mode)
    with rmq.open(tmp_path / "s", mode, config=rmq.StoreConfig(store_path_commit_log=str(tmp_path / "log"))) as store:
        assert store.scan().read_all().num_rows == COUNT


NAMES = ["x", "0000000000000000000", "00000000000000004097", "99999999999999999999", "\u0660" * 20, "\u00b2"]


@pytest.mark.parametrize("part", ["commitlog", "consumequeue/T", "consumequeue/T/0", "index"])
@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_strange_names_are_errors_or_skipped(clean: Base, tmp_path: Path, part: str, kind: str, name: str) -> None:
    shutil.copytree(clean.path, tmp_path / "s")
    strange = tmp_path / "s" / part / name
    if kind == "folder":
        strange.mkdir()
    else:
        strange.write_bytes(b"foreign" * 100)
    for mode in ("r", "r+"):
        with suppress(rmq.CorruptFileError), rmq.open(tmp_path / "s", mode) as store:
            assert_answers(store, list(range(COUNT)))
    assert strange.is_dir() or strange.read_bytes() == b"foreign" * 100
    strange.rmdir() if kind == "folder" else strange.unlink()
    assert_goes_on(tmp_path / "s", list(range(COUNT)))


def test_a_segment_that_ends_behind_every_offset_is_named(tmp_path: Path) -> None:
    """Its begin alone would fit."""
    path = build(tmp_path / "s", closed=True).path
    file = path / "commitlog" / f"{2**63 - SIZES['mapped_file_size_commit_log']:020d}"
    file.write_bytes(bytes(SIZES["mapped_file_size_commit_log"]))
    with pytest.raises(rmq.CorruptFileError, match="no commit-log segment's") as caught, rmq.open(path) as store:
        store.scan().read_all()
    assert caught.value.path == str(file)
