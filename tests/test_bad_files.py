"""Damaged stores: every file cut, emptied, zeroed, replaced, lost or renamed, opened "r", "r+" and with repair.

What must hold: either a typed error and the store as good as before once the file is put back, or right answers.
A wrong answer, a message left out in silence, a queue offset given twice or an untyped exception is a fault.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle
import pytest
from conftest import digests

import rmq

SIZES = {"mapped_file_size_commit_log": 4096, "mapped_file_size_consume_queue": 200,
         "max_hash_slot_num": 10, "max_index_num": 30}  # fmt: skip
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
    reader = store.scan(columns=["body"], batch_rows=1)
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


def judge(base: Base, path: Path, mode: str, *, repair: bool = False, kept: int = COUNT,
          names: tuple[str, ...] = ()) -> str:  # fmt: skip
    """Open the damaged store; returns what happened. kept: messages that repair may not lose."""
    before = digests(path, ".")
    rows = list(range(COUNT))
    try:
        store = rmq.open(path, mode, repair=repair)
    except TYPED as error:
        assert str(error)
        if mode == "r":
            assert digests(path, ".") == before
        for part in ("commitlog", "consumequeue", "index", "config", "checkpoint", "rmq/meta.json", "rmq/marks"):
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


DAMAGES = {function.__name__: function for function in (truncated, shortened, longer, emptied, zeroed, foreign, lost,
                                                        folder, sibling)}  # fmt: skip
PLACES: dict[str, tuple[str, int, int]] = {  # part, which file of it, which sibling
    "first segment": ("commitlog", 0, 1), "middle segment": ("commitlog", 1, 0), "last segment": ("commitlog", -1, 0),
    "first queue file": ("consumequeue/T/0", 0, 1), "last queue file": ("consumequeue/T/0", -1, 0),
    "first index file": ("index", 0, 1), "middle index file": ("index", 1, 0), "last index file": ("index", -1, 0),
}  # fmt: skip
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


# The content of an index file carries no checksum: of these a query may miss entries until `verify` is run.
SILENT = {(place, damage) for place in PLACES if "index" in place for damage in ("foreign", "sibling")}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("place", PLACES)
def test_a_damaged_file_is_an_error_or_does_not_show(clean: Base, tmp_path: Path, place: str, damage: str, mode: str) -> None:
    kept = hurt(clean, tmp_path / "s", place, DAMAGES[damage])
    if (place, damage) in SILENT:
        with rmq.open(tmp_path / "s") as store:
            assert scanned(store) == (list(range(COUNT)), True)
            for i in range(COUNT):
                assert numbers(found.body for found in store.query(message(i).topic, f"key{i}")) in ([i], [])
        return
    judge(clean, tmp_path / "s", MODES[mode][0], repair=MODES[mode][1], kept=kept)


@pytest.mark.parametrize("damage", ["truncated", "emptied", "zeroed", "foreign", "lost"])
@pytest.mark.parametrize("place", [place for place in PLACES if place != "last segment"])
def test_a_damaged_file_of_a_killed_writer_is_an_error_or_does_not_show(
    killed: Base, tmp_path: Path, place: str, damage: str
) -> None:
    kept = hurt(killed, tmp_path / "s", place, DAMAGES[damage])
    judge(killed, tmp_path / "s", "r+", kept=kept)


SINGLES = ["checkpoint", "lock", "abort.bak", "rmq/meta.json", "rmq/marks", "config/topics.json"]


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "sibling"])
@pytest.mark.parametrize("name", SINGLES)
def test_a_damaged_small_file_is_an_error_or_does_not_show(clean: Base, tmp_path: Path, name: str, damage: str,
                                                           mode: str) -> None:  # fmt: skip
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", ["consumequeue", "consumequeue/T", "consumequeue/T/1", "index", "rmq", "config"])
def test_a_lost_directory_is_derived_again_or_an_error(clean: Base, tmp_path: Path, part: str, mode: str) -> None:
    shutil.copytree(clean.path, tmp_path / "s")
    shutil.rmtree(tmp_path / "s" / part)
    judge(clean, tmp_path / "s", MODES[mode][0], repair=MODES[mode][1])


@pytest.mark.parametrize("mode", MODES)
def test_a_lost_commit_log_is_an_error(clean: Base, tmp_path: Path, mode: str) -> None:
    shutil.copytree(clean.path, tmp_path / "s")
    shutil.rmtree(tmp_path / "s" / "commitlog")
    with pytest.raises(rmq.RmqError):  # noqa: SIM117
        with rmq.open(tmp_path / "s", MODES[mode][0], repair=MODES[mode][1]) as store:
            assert numbers(store.scan(columns=["body"]).read_all()["body"].to_pylist()) == list(range(COUNT))


NAMES = ["x", "0000000000000000000", "000000000000000000000", "00000000000000004097", "99999999999999999999",
         "\u0660" * 20, "00000000000000000000.bak", "-0000000000000004096", "00000000000000000000\n", "\u00b2"]  # fmt: skip


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("part", ["commitlog", "consumequeue", "consumequeue/T", "consumequeue/T/0", "index"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_strange_names_are_errors_or_skipped(clean: Base, tmp_path: Path, part: str, kind: str, mode: str) -> None:
    for number, name in enumerate(NAMES):
        path = tmp_path / str(number)
        shutil.copytree(clean.path, path)
        strange = path / part / name
        if kind == "folder":
            strange.mkdir()
        else:
            strange.write_bytes(b"foreign" * 100)
        judge(clean, path, mode)


# ---- marks, meta, config ---------------------------------------------------------------------------------

METAS: list[Any] = [
    [], 5, None, "x", {}, {"format": "1"}, {"format": 1}, {"format": 1, "mapped_file_size_commit_log": "4096"},
    {"format": 1, "mapped_file_size_commit_log": 0}, {"format": 1, "mapped_file_size_commit_log": 8192},
    {"format": 1, "mapped_file_size_consume_queue": 201}, {"format": 1, "max_index_num": -5},
    {"format": 1, "max_index_num": 10**30}, {"format": 1, "max_hash_slot_num": None},
    {"format": 1, "rocketmq_version": "99"}, {"format": 1, "rocketmq_version": 5}, {"format": 2}, {"format": 1e400},
]  # fmt: skip


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("meta", METAS, ids=str)
def test_a_meta_file_that_says_nonsense_is_an_error_or_does_not_show(clean: Base, tmp_path: Path, meta: Any, mode: str) -> None:
    shutil.copytree(clean.path, tmp_path / "s")
    whole = json.loads((tmp_path / "s/rmq/meta.json").read_text())
    (tmp_path / "s/rmq/meta.json").write_text(json.dumps(whole | meta if isinstance(meta, dict) and meta else meta))
    judge(clean, tmp_path / "s", mode)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": 1' + "0" * 5000 + "}", '{"format": NaN}'])
def test_a_meta_file_made_to_break_the_parser_is_an_error(clean: Base, tmp_path: Path, text: str) -> None:
    shutil.copytree(clean.path, tmp_path / "s")
    (tmp_path / "s/rmq/meta.json").write_text(text)
    for mode in ("r", "r+"):
        with pytest.raises(rmq.RmqError):
            rmq.open(tmp_path / "s", mode)


@pytest.mark.parametrize("mode", ["r", "r+", "a"])
@pytest.mark.parametrize("fields", [{"mapped_file_size_commit_log": 8192}, {"mapped_file_size_consume_queue": 400},
                                    {"max_hash_slot_num": 20}, {"max_index_num": 40}])  # fmt: skip
@pytest.mark.parametrize("own", [True, False])
def test_a_config_that_contradicts_the_files_is_refused(clean: Base, tmp_path: Path, fields: dict[str, int], mode: str,
                                                        own: bool) -> None:  # fmt: skip
    shutil.copytree(clean.path, tmp_path / "s")
    if not own:
        shutil.rmtree(tmp_path / "s/rmq")
    with pytest.raises(ValueError, match=next(iter(fields))):
        rmq.open(tmp_path / "s", mode, config=rmq.StoreConfig(**fields))
    assert_goes_on(tmp_path / "s", list(range(COUNT)))


def test_marks_of_an_older_day_lose_nothing(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put(message(0))
        store.flush()
        shutil.copy(tmp_path / "s/rmq/marks", tmp_path / "old")
        store.put_many([message(i) for i in range(1, 50)])
    shutil.copy(tmp_path / "old", tmp_path / "s/rmq/marks")
    assert_goes_on(tmp_path / "s", list(range(50)))


def test_marks_of_another_store_never_let_a_put_overwrite(tmp_path: Path) -> None:
    """The end they name lies among the zeros of a body here."""
    with rmq.open(tmp_path / "other", "x", config=CONFIG) as store:
        store.put(rmq.Message("T", b"other"))
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put(rmq.Message("T", bytes(1000), keys=["zeros"]))
        store.put(rmq.Message("T", b"second", keys=["second"]))
    shutil.copy(tmp_path / "other/rmq/marks", tmp_path / "s/rmq/marks")
    with suppress(rmq.RmqError), rmq.open(tmp_path / "s", "r+") as store:
        store.put(rmq.Message("T", b"third"))
    bodies = [record.body for record in oracle.read_records(tmp_path / "s")]
    assert bodies[:2] == [bytes(1000), b"second"]


# ---- hostile records and no stores -----------------------------------------------------------------------


def crafted(path: Path, *records: dict[str, Any]) -> Path:
    """A broker's store whose log holds a good record, these, and a good one."""
    log = bytearray()
    for fields in ({}, *records, {"body": b"last"}):
        whole = {"topic": "T", "queue_id": 0, "queue_offset": 0, "body": b"first"} | fields
        log += oracle.encode_record(phy_offset=len(log), store_timestamp=1_700_000_000_000, **whole)
    (path / "commitlog").mkdir(parents=True)
    (path / "commitlog" / f"{0:020d}").write_bytes(bytes(log).ljust(4096, b"\0"))
    return path


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("fields", [
    *({"topic": topic} for topic in ("../x", "/x", "..", "", "a/b", "x" * 120 + "\0")),
    *({"queue_id": number} for number in (-1, -(2**31), 2**31 - 1)),
    *({"queue_offset": number} for number in (-1, 1, 7, 2**31, 2**58, 2**62, 2**63 - 1, -(2**63))),
    {"sys_flag": 64, "body": b"\xff" * 40}, {"sys_flag": 128, "body": b"\0" * 40}, {"sys_flag": 1, "body": b"no zlib"},
    {"sys_flag": 0x701, "body": b"?"}, {"raw_properties": b"KEYS\1k\1\2\2\1"}, {"raw_properties": b"\xff\1\xff\2"},
    {"raw_properties": b"INNER_NUM\x01" + b"9" * 30 + b"\2"}, {"raw_properties": b"DELAY\x01" + b"9" * 400 + b"\2"},
    {"topic": "SCHEDULE_TOPIC_XXXX", "raw_properties": b"DELAY\x01-99999999999999999999\2"},
], ids=lambda fields: ascii(fields)[:60])  # fmt: skip
def test_a_hostile_record_is_an_error_or_one_more_message(tmp_path: Path, fields: dict[str, Any], mode: str) -> None:
    path = crafted(tmp_path / "outer" / "store", fields)
    sizes = rmq.StoreConfig(**SIZES)
    asks: list[Callable[[rmq.Store], Any]] = [
        lambda s: s.topics(), lambda s: s.scan().read_all(), lambda s: s.query("T", "k"), lambda s: s.query_many("T", ["k"]),
        lambda s: s.pull("T", 0, 0, 99), lambda s: s.pull("T", 0, fields.get("queue_offset", 0), 2), lambda s: s.lookup("k"),
        lambda s: s.search_offset("T", 0, 1_700_000_000_000), lambda s: [m.body for m in s.pull("T").messages],
        lambda s: s.lookup(("T", 0, 0)), lambda s: repr(s.lookup(0)),
    ]  # fmt: skip
    for _ in range(2):
        with suppress(rmq.RmqError), rmq.open(path, mode, config=sizes) as store:
            for ask in asks:
                with suppress(rmq.RmqError, KeyError):
                    ask(store)
    assert [entry.name for entry in tmp_path.iterdir()] == ["outer"]
    assert [entry.name for entry in (tmp_path / "outer").iterdir()] == ["store"]
    assert (path / "commitlog" / f"{0:020d}").read_bytes() == crafted(tmp_path / "again", fields).joinpath(
        "commitlog", f"{0:020d}").read_bytes()  # fmt: skip
    with rmq.open(path, "r", config=sizes) as store:
        assert store.lookup(0).body == b"first"


@pytest.mark.parametrize("seed", range(40))
def test_random_faults_in_a_segment_never_pass_as_messages(clean: Base, tmp_path: Path, seed: int) -> None:
    shutil.copytree(clean.path, tmp_path / "s")
    number = seed % 2
    file = tmp_path / "s" / clean.files("commitlog")[number]
    file.write_bytes(oracle.damage(file.read_bytes(), seed).ljust(4096, b"\0")[:4096])
    with suppress(*TYPED), rmq.open(tmp_path / "s") as store:
        rows, _ = scanned(store)
        assert set(rows) <= set(range(COUNT))
        assert rows[: sum(phy < number * 4096 for phy in clean.phy_offsets)] == list(range(COUNT))[
            : sum(phy < number * 4096 for phy in clean.phy_offsets)]  # fmt: skip
        with suppress(rmq.CorruptFileError):
            store.query("T", "all", limit=None)
        with suppress(rmq.CorruptFileError):
            store.pull("T", 0, 0, 1000)


def no_stores(root: Path) -> Iterator[Path]:
    yield root / "missing"
    (root / "file").write_text("text")
    yield root / "file"
    (root / "empty").mkdir()
    yield root / "empty"
    (root / "other").mkdir()
    (root / "other" / "README").write_text("text")
    yield root / "other"
    (root / "loop").symlink_to("loop")
    yield root / "loop"


@pytest.mark.parametrize("mode", ["r", "r+", "a", "x"])
def test_what_is_no_store_is_refused_and_left_alone(tmp_path: Path, mode: str) -> None:
    for path in no_stores(tmp_path):
        if mode in "ax" and path.name in ("missing", "empty"):
            continue
        before = sorted(tmp_path.rglob("*")), digests(tmp_path, "other")
        with pytest.raises(TYPED):
            rmq.open(path, mode)
        assert (sorted(tmp_path.rglob("*")), digests(tmp_path, "other")) == before


def test_x_refuses_a_store_that_is_there(clean: Base, tmp_path: Path) -> None:
    shutil.copytree(clean.path, tmp_path / "s")
    with pytest.raises(FileExistsError):
        rmq.open(tmp_path / "s", "x")
    assert_goes_on(tmp_path / "s", list(range(COUNT)))
