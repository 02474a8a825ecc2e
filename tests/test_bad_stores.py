"""Stores that say nonsense: meta, marks or config against the files, hostile records, no stores at all."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import oracle
import pytest
from conftest import SIZES, digests
from forks import fork
from test_bad_files import CONFIG, COUNT, TYPED, Base, assert_goes_on, build, judge, message, scanned

import rmq
from rmq import geometry
from rmq._core._layout import MARKS_SIZE


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return build(tmp_path_factory.mktemp("clean") / "store", closed=True)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return build(tmp_path_factory.mktemp("killed") / "store", closed=False)


# ---- marks, meta, config ---------------------------------------------------------------------------------

METAS: list[Any] = [
    [],
    5,
    None,
    "x",
    {},
    {"format": "1"},
    {"format": 1},
    {"format": 1, "mapped_file_size_commit_log": "4096"},
    {"format": 1, "mapped_file_size_commit_log": 0},
    {"format": 1, "mapped_file_size_commit_log": 8192},
    {"format": 1, "mapped_file_size_consume_queue": 201},
    {"format": 1, "max_index_num": -5},
    {"format": 1, "max_index_num": 10**30},
    {"format": 1, "max_hash_slot_num": None},
    {"format": 1, "rocketmq_version": "99"},
    {"format": 1, "rocketmq_version": 5},
    {"format": 2},
    {"format": 1e400},
]


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("meta", METAS, ids=str)
def test_a_meta_file_that_says_nonsense_is_an_error_or_does_not_show(
    clean: Base, tmp_path: Path, meta: Any, mode: str
) -> None:
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


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_without_its_directory_a_store_with_a_broken_meta_file_opens(clean: Base, tmp_path: Path, mode: str) -> None:
    shutil.copytree(clean.path, tmp_path / "s")
    with rmq.open(tmp_path / "s") as store:
        whole = store.scan().read_all()
    (tmp_path / "s/rmq/meta.json").write_text("{")
    with pytest.raises(rmq.CorruptFileError, match="without the directory rmq/ the store opens as a broker's"):
        rmq.open(tmp_path / "s", mode)
    shutil.move(tmp_path / "s/rmq", tmp_path / "aside")
    with rmq.open(tmp_path / "s", mode, config=CONFIG) as store:
        assert store.scan().read_all() == whole


@pytest.mark.parametrize("mode", ["r", "r+", "a"])
@pytest.mark.parametrize(
    "fields",
    [
        {"mapped_file_size_commit_log": 8192},
        {"mapped_file_size_consume_queue": 400},
        {"max_hash_slot_num": 20},
        {"max_index_num": 40},
    ],
)
@pytest.mark.parametrize("own", [True, False])
def test_a_config_that_contradicts_the_files_is_refused(
    clean: Base, tmp_path: Path, fields: dict[str, int], mode: str, own: bool
) -> None:
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


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("size", [1, 600, MARKS_SIZE - 1, MARKS_SIZE + 1])
def test_marks_of_a_wrong_length_stop_each_open_until_a_repair_sets_them_aside(
        clean: Base, killed: Base, tmp_path: Path, size: int, closed: bool) -> None:  # fmt: skip
    path = tmp_path / "s"
    shutil.copytree((clean if closed else killed).path, path)
    os.truncate(path / "rmq/marks", size)
    before = (path / "rmq/marks").read_bytes()
    for mode in ("r", "r+", "a"):
        with pytest.raises(rmq.CorruptFileError, match=f"{size} bytes, expected 4096; `repair=True` sets"):
            rmq.open(path, mode)
    assert any(finding.path.endswith("rmq/marks") and "repair=True" in finding.reason
               for finding in rmq.verify(path))  # fmt: skip
    rmq.open(path, "r+", repair=True).close()
    (kept,) = (path / "rmq/cut").glob("*-marks.bin")
    assert kept.read_bytes() == before
    assert rmq.verify(path).is_sound
    assert_goes_on(path, list(range(COUNT)))


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
@pytest.mark.parametrize(
    "fields",
    [
        *({"topic": topic} for topic in ("../x", "/x", "..", "", "a/b", "x" * 120 + "\0")),
        *({"queue_id": number} for number in (-1, -(2**31), 2**31 - 1)),
        *({"queue_offset": number} for number in (-1, 1, 7, 2**31, 2**58, 2**62, 2**63 - 1, -(2**63))),
        {"sys_flag": 64, "body": b"\xff" * 40},
        {"sys_flag": 128, "body": b"\0" * 40},
        {"sys_flag": 1, "body": b"no zlib"},
        {"sys_flag": 0x701, "body": b"?"},
        {"raw_properties": b"KEYS\1k\1\2\2\1"},
        {"raw_properties": b"\xff\1\xff\2"},
        {"raw_properties": b"INNER_NUM\x01" + b"9" * 30 + b"\2"},
        {"raw_properties": b"DELAY\x01" + b"9" * 400 + b"\2"},
        {"topic": "SCHEDULE_TOPIC_XXXX", "raw_properties": b"DELAY\x01-99999999999999999999\2"},
    ],
    ids=lambda fields: ascii(fields)[:60],
)
def test_a_hostile_record_is_an_error_or_one_more_message(tmp_path: Path, fields: dict[str, Any], mode: str) -> None:
    path = crafted(tmp_path / "outer" / "store", fields)
    sizes = rmq.StoreConfig(**SIZES)
    asks: list[Callable[[rmq.Store], Any]] = [
        lambda s: s.topics(),
        lambda s: s.scan().read_all(),
        lambda s: s.query("T", "k"),
        lambda s: s.query_many("T", ["k"]),
        lambda s: s.pull("T", 0, 0, 99),
        lambda s: s.pull("T", 0, fields.get("queue_offset", 0), 2),
        lambda s: s.lookup("k"),
        lambda s: s.search_offset("T", 0, 1_700_000_000_000),
        lambda s: [m.body for m in s.pull("T").messages],
        lambda s: s.lookup(("T", 0, 0)),
        lambda s: repr(s.lookup(0)),
    ]
    for _ in range(2):
        with suppress(rmq.RmqError), rmq.open(path, mode, config=sizes) as store:
            for ask in asks:
                with suppress(rmq.RmqError, KeyError):
                    ask(store)
    assert [entry.name for entry in tmp_path.iterdir()] == ["outer"]
    assert [entry.name for entry in (tmp_path / "outer").iterdir()] == ["store"]
    assert (path / "commitlog" / f"{0:020d}").read_bytes() == crafted(tmp_path / "again", fields).joinpath(
        "commitlog", f"{0:020d}"
    ).read_bytes()
    with rmq.open(path, "r", config=sizes) as store:
        assert store.lookup(0).body == b"first"


@pytest.mark.parametrize("seed", range(24))
def test_random_faults_in_a_segment_never_pass_as_messages(clean: Base, tmp_path: Path, seed: int) -> None:
    shutil.copytree(clean.path, tmp_path / "s")
    number = seed % 2
    file = tmp_path / "s" / clean.files("commitlog")[number]
    file.write_bytes(oracle.damage(file.read_bytes(), seed).ljust(4096, b"\0")[:4096])
    with suppress(*TYPED), rmq.open(tmp_path / "s") as store:
        rows, _ = scanned(store)
        assert set(rows) <= set(range(COUNT))
        assert (
            rows[: sum(phy < number * 4096 for phy in clean.phy_offsets)]
            == list(range(COUNT))[: sum(phy < number * 4096 for phy in clean.phy_offsets)]
        )
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


@pytest.mark.parametrize("mode", ["a", "x"])
def test_the_root_of_a_new_file_system_is_an_empty_directory(tmp_path: Path, mode: str) -> None:
    (tmp_path / "lost+found").mkdir()
    with rmq.open(tmp_path, mode, config=CONFIG) as store:
        store.put(rmq.Message("T", b"x"))
    with rmq.open(tmp_path) as store:
        assert store.topics() == {"T": {0: (0, 1)}}


def test_x_refuses_a_store_that_is_there(clean: Base, tmp_path: Path) -> None:
    shutil.copytree(clean.path, tmp_path / "s")
    with pytest.raises(FileExistsError):
        rmq.open(tmp_path / "s", "x")
    assert_goes_on(tmp_path / "s", list(range(COUNT)))


def test_directories_of_a_log_that_a_broker_only_reads_are_its_log_s_too(tmp_path: Path) -> None:
    """Where storePathCommitLog names several: alone, RocketMQ does not look at them."""
    conf = tmp_path / "broker.conf"
    for paths, read in (("/a,/b", "/a,/b,/c,/d"), ("/a", "/a"), (None, None)):
        named = "" if paths is None else f"storePathCommitLog={paths}\n"
        for text in (f"{named}readOnlyCommitLogStorePaths=/c,/d\n", f"readOnlyCommitLogStorePaths=/c,/d\n{named}"):
            conf.write_text(text)
            assert rmq.StoreConfig.from_broker_conf(conf).store_path_commit_log == read


def test_a_store_without_the_log_directories_that_were_named_is_no_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put(rmq.Message("T", b"body"))
    config = rmq.StoreConfig(store_path_commit_log=f"{tmp_path}/x,{tmp_path}/y")
    before = digests(path, ".")
    calls: list[Callable[[], Any]] = [
        lambda: rmq.open(path, config=config), lambda: rmq.rebuild(path, config=config),
        lambda: rmq.verify(path, config=config), lambda: rmq.export(path, tmp_path / "new", config=config),
        lambda: list(rmq.scan_map(path, list, config=config))]  # fmt: skip
    for refused in calls:
        with pytest.raises(FileNotFoundError, match="no such commit-log directory") as caught:
            refused()
        assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, f"{tmp_path}/x, {tmp_path}/y")
    assert digests(path, ".") == before


def test_a_log_that_is_said_to_lie_where_it_does_not_is_a_contradiction_and_makes_nothing(tmp_path: Path) -> None:
    path, named = tmp_path / "store", tmp_path / "log"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put(rmq.Message("T", b"body"))
    config, before = rmq.StoreConfig(store_path_commit_log=str(named)), digests(path, ".")
    for mode in ("r+", "a"):
        with pytest.raises(ValueError, match=f"{named}, where no segment lies; the store's lie in {path}/commitlog"):
            rmq.open(path, mode, config=config)
        assert not named.exists()
    named.mkdir()
    calls: list[Callable[[], Any]] = [lambda: rmq.open(path, config=config), lambda: rmq.verify(path, config=config),
                                      lambda: rmq.rebuild(path, config=config)]  # fmt: skip
    for refused in calls:
        with pytest.raises(ValueError, match="store_path_commit_log names"):
            refused()
    assert (digests(path, "."), list(named.iterdir())) == (before, [])


def test_a_store_whose_log_lies_elsewhere_is_refused_without_it_from_its_first_put_on(tmp_path: Path) -> None:
    """Nothing is flushed: no queue file, no mark tells yet. Edges: a reader from before, the writer alive, killed."""
    path = tmp_path / "store"
    config = dataclasses.replace(CONFIG, store_path_commit_log=str(tmp_path / "log"), flush_interval_commit_log=10**8)
    asked: list[Callable[[], Any]] = [
        lambda: rmq.open(path), lambda: rmq.open(path, "r+"), lambda: rmq.open(path, "a", repair=True)]  # fmt: skip

    def put() -> None:
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(rmq.open(path, "x", config=config))
            reader = stack.enter_context(rmq.open(path))
            assert reader.topics() == {}
            store.put(rmq.Message("T", b"body", keys="k"))
            for refused in (asked[0], reader.topics, reader.info):
                with pytest.raises(rmq.CorruptFileError, match="elsewhere: store_path_commit_log"):
                    refused()
            os._exit(7)

    assert os.waitstatus_to_exitcode(os.waitpid(fork(put), 0)[1]) == 7
    before = digests(path, ".")
    for refused in asked:
        with pytest.raises(rmq.CorruptFileError, match="elsewhere: store_path_commit_log"):
            refused()
    assert digests(path, ".") == before
    with rmq.open(path, "r+", config=config) as store:
        assert [message.body for message in store.query("T", "k")] == [b"body"]


@pytest.mark.parametrize(("mode", "name", "error", "number"), [
    ("r", "none", FileNotFoundError, errno.ENOENT), ("r+", "none", FileNotFoundError, errno.ENOENT),
    ("r", "file/store", FileNotFoundError, errno.ENOENT), ("r+", "empty", FileNotFoundError, errno.ENOENT),
    ("r", "file", NotADirectoryError, errno.ENOTDIR), ("a", "file", NotADirectoryError, errno.ENOTDIR),
    ("x", "full", FileExistsError, errno.EEXIST),
])  # fmt: skip
def test_what_is_no_directory_to_open_is_told_with_its_number_and_name(
        tmp_path: Path, mode: str, name: str, error: type[OSError], number: int) -> None:  # fmt: skip
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    for file in ("file", "full/file"):
        (tmp_path / file).write_bytes(b"x")
    with pytest.raises(error) as raised:
        rmq.open(tmp_path / name, mode)
    assert (raised.value.errno, raised.value.filename) == (number, str(tmp_path / name))


@pytest.mark.parametrize("state", ["closed", "not closed"])
@pytest.mark.parametrize("maker", ["rmq", "a broker"])
def test_an_open_that_is_refused_leaves_every_file_as_it_was(tmp_path: Path, state: str, maker: str) -> None:
    path = tmp_path / "store"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many([rmq.Message("T", bytes(SIZES["mapped_file_size_commit_log"] // 2)) for _ in range(4)])
    if maker == "a broker":
        shutil.rmtree(path / "rmq")
    if state == "not closed":
        (path / "abort").write_bytes(b"4711")
        (path / "abort.bak").write_bytes(b"4710")
        if maker == "rmq":
            (path / "rmq/owner").write_bytes(b'{"pid": 4711}\n')
    sorted((path / "commitlog").iterdir())[1].unlink()
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for _ in range(2):
        with pytest.raises(rmq.CorruptFileError, match="segment is missing"):
            rmq.open(path, "r+", config=CONFIG)
        after = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
        assert {file: after.pop(file) for file in before} == before
        assert maker == "a broker" or not after


def test_an_open_whose_undoing_is_interrupted_lets_go_of_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many([rmq.Message("T", bytes(SIZES["mapped_file_size_commit_log"] // 2)) for _ in range(4)])
    middle = sorted((path / "commitlog").iterdir())[1]
    middle.rename(tmp_path / "segment")

    def interrupted(_: Path) -> Callable[[], None]:
        def undo() -> None:
            raise KeyboardInterrupt

        return undo

    with monkeypatch.context() as patches:
        patches.setattr("rmq.store.restorer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rmq.open(path, "r+", config=CONFIG)
    (tmp_path / "segment").rename(middle)
    with rmq.open(path, "r+", config=CONFIG) as store:
        assert sum(batch.num_rows for batch in store.scan()) == 4


@pytest.mark.parametrize("path", [None, 5, b"s", ["s"]])
@pytest.mark.parametrize("call", [rmq.open, rmq.IndexFile, rmq.verify, rmq.rebuild, lambda path: rmq.export(path, "t"),
                                  lambda path: rmq.scan_map(path, list)])  # fmt: skip
def test_what_is_no_path_is_told_by_the_argument_s_name(call: Callable[[Any], object], path: Any) -> None:
    with pytest.raises(TypeError, match=r"^path must be "):
        call(path)


def test_what_is_no_text_has_no_hash() -> None:
    with pytest.raises(TypeError, match=r"^text must be str, got NoneType$"):
        rmq.java_hash(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^key must be str, got bytes$"):
        rmq.index_key_hash(b"k")  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [CONFIG, rmq.StoreConfig()], ids=["sizes passed", "no sizes passed"])
def test_an_index_file_cleaned_away_while_it_is_looked_at_leaves_the_rest_readable(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: rmq.StoreConfig) -> None:  # fmt: skip
    with rmq.open(tmp_path / "store", "x", config=CONFIG) as store:
        store.put(rmq.Message("T", b"body", keys="k"))
    shutil.rmtree(tmp_path / "store/rmq")
    looked: list[Path] = []

    def clean_away(path: Path, *_: object) -> None:
        path.unlink()
        looked.append(path)

    monkeypatch.setattr(geometry, "_fitting", clean_away)
    with rmq.open(tmp_path / "store", config=config) as store:
        assert store.lookup(0).body == b"body"
    assert len(looked) == 1
