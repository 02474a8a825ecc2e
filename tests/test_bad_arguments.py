"""Wrong arguments of reads, of opening and of index files; closed stores: a typed error, nothing changed."""

from __future__ import annotations

import copy
import datetime as dt
import mmap
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pyarrow as pa
import pytest
from conftest import SIZES
from test_bad_input import CONFIG, assert_holds, message

import rmq

NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
NAIVE = NOON.replace(tzinfo=None)
HUGE = 10**30


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rmq.Store]:
    """Holds messages 0 to 4; for calls that change nothing."""
    path = tmp_path_factory.mktemp("shared") / "store"
    with rmq.open(path, "a", config=CONFIG) as opened:
        opened.put_many([message(i) for i in range(5)])
        yield opened
        assert_holds(opened, [b"body %d" % i for i in range(5)])
    assert oracle.check_store(path, 10, 30) == []


# ---- reading ---------------------------------------------------------------------------------------------

READS: list[tuple[Callable[[rmq.Store], Any], Any, str]] = [
    *((lambda s, v=v: s.query(v, "all"), TypeError, "topic") for v in (None, 5, b"T", ["T"])),
    *((lambda s, v=v: s.query("T", v), TypeError, "key") for v in (None, 5, b"T", ["all"])),
    (lambda s: s.query("\ud800", "all"), ValueError, "topic"),
    (lambda s: s.query("T", "\ud800"), ValueError, "key"),
    *((lambda s, v=v: s.query("T", "all", limit=v), ValueError, "limit") for v in (0, -1, -HUGE)),
    *((lambda s, v=v: s.query("T", "all", limit=v), TypeError, "limit") for v in ("1", 1.0, True, [1])),
    *((lambda s, n=n: s.query("T", "all", **{n: NAIVE}), ValueError, n) for n in ("begin", "end")),
    *((lambda s, n=n: s.query("T", "all", **{n: HUGE}), ValueError, n) for n in ("begin", "end")),
    *(
        (lambda s, n=n, v=v: s.query("T", "all", **{n: v}), TypeError, n)
        for n in ("begin", "end")
        for v in ("2026", 1.5, True, NOON.date())
    ),
    *(
        (lambda s, v=v: s.query_many("T", v), TypeError, "keys")
        for v in (
            None,
            5,
            "all",
            b"all",
            *(["all", item] for item in (5, b"x", None)),
            [["a"]],
            np.array([1]),
            np.array([["a"]]),
            np.array(["a", None], object),
            np.array("all"),
            np.array(5),
            pa.array([1]),
            pa.array([b"a"]),
        )
    ),
    *(
        (lambda s, v=v: s.query_many("T", v), ValueError, "key")
        for v in (pa.array(["a", None]), np.array([b"\xff"]), ["\ud800"])
    ),
    *((lambda s, v=v: s.query_many("T", ["all"], begin=v), ValueError, "begin")
      for v in (np.array([1, 2]), np.array([[1]]), np.array([2**63], np.uint64))),
    *((lambda s, v=v: s.lookup_many(v), TypeError, "phy_offsets") for v in ([1.5], ["1"], [None], 5, None, {1})),
    *((lambda s, v=v: s.lookup_many(v), ValueError, "phy_offsets") for v in ([[1]], [2**64])),
    (lambda s: s.lookup_many([0], columns=["Body"]), ValueError, "columns"),
    *((lambda s, v=v: s.query_many("T", ["all"], end=v), TypeError, "end") for v in (np.array([1.5]), [1], "1")),
    *((lambda s, v=v: s.query_many("T", ["all"], columns=v), TypeError, "columns") for v in ("body", 5, [5], [["a"]])),
    *((lambda s, v=v: s.query_many("T", ["all"], columns=v), ValueError, "columns") for v in (["Body"], ["body"] * 2)),
    *(
        (lambda s, v=v: s.select_phy_offset_many("T", v), TypeError, "keys")
        for v in (None, 5, "all", b"all", ["all", 5], np.array([1]), np.array([["a"]]), np.array("all"), np.array(5),
                  pa.array([1]), [None])
    ),
    *(
        (lambda s, v=v: s.select_phy_offset_many("T", v), ValueError, "keys")
        for v in (pa.array(["a", None]), np.array([b"\xff"]))
    ),
    *((lambda s, v=v: s.select_phy_offset_many("T", ["a"], max_num=v), TypeError, "max_num") for v in ("1", 1.0, None)),
    (lambda s: s.select_phy_offset_many("T", ["a"], max_num=-1), ValueError, "max_num"),
    (lambda s: s.select_phy_offset_many(5, ["a"]), TypeError, "topic"),
    (lambda s: s.select_phy_offset_many("T", ["a"], begin=NAIVE), ValueError, "begin"),
    *((lambda s, v=v: s.pull(v), TypeError, "topic") for v in (None, 5, b"T")),
    *((lambda s, v=v: s.pull("T", v), TypeError, "queue_id") for v in (None, "0", 1.0, True)),
    *((lambda s, v=v: s.pull("T", 0, v), TypeError, "queue_offset") for v in (None, "0", 1.0, True)),
    *((lambda s, v=v: s.pull("T", 0, v), ValueError, "queue_offset") for v in (HUGE, -HUGE)),
    *((lambda s, v=v: s.pull("T", 0, 0, v), TypeError, "limit") for v in (None, "0", 1.0, True)),
    (lambda s: s.pull("T", 0, 0, -1), ValueError, "limit"),
    *((lambda s, v=v: s.units("T", 0, 0, v), TypeError, "limit") for v in (None, "0", 1.0, True)),
    (lambda s: s.units("T", 0, 0, -1), ValueError, "limit"),
    *((lambda s, v=v: s.pull("T", tags=v), TypeError, "tags") for v in (5, b"a", ["tag"])),
    *((lambda s, v=v: s.clean(dry_run=v), TypeError, "dry_run") for v in (None, 0, "", "no")),
    *((lambda s, v=v: s.clean(dry_run=True, expired_queues=v), TypeError, "expired_queues") for v in (None, 1)),
    (lambda s: s.clean(dry_run=True, disk_usage=5), TypeError, "disk_usage"),
    *((lambda s, v=v: s.query("T", "k", complete=v), TypeError, "complete") for v in (None, 0, "no")),
    *((lambda s, v=v: s.query_many("T", ["k"], complete=v), TypeError, "complete") for v in (None, 0, "no")),
    *((lambda s, v=v: s.scan(check_crc=v), TypeError, "check_crc") for v in (None, 0, "no")),
    (lambda s: s.scan(skip_removed=None), TypeError, "skip_removed"),
    (lambda s: s.lookup_many([0], check_crc="no"), TypeError, "check_crc"),
    *((lambda s, v=v: s.table(v), ValueError, "name") for v in (None, [], {}, "queue")),
    *((lambda s, v=v: s.lookup(v), TypeError, "id") for v in (None, 1.5, True, b"a", {})),
    *(
        (lambda s, v=v: s.lookup(v), TypeError, "topic|queue_id|queue_offset")
        for v in ((1, 0, 0), ("T", "0", 0), ("T", 0, "0"))
    ),
    *((lambda s, v=v: s.lookup(v), (TypeError, ValueError), "id") for v in (("T", 0), (), ("T", 0, 0, 0))),
    (lambda s: s.lookup("\ud800"), ValueError, "id"),
    *((lambda s, v=v: s.lookup(v, topic=5), TypeError, "topic") for v in ("all", 0, "0" * 32, ("T", 0, 0))),
    *(
        (lambda s, v=v: s.lookup(v), KeyError, ".")
        for v in (
            1,
            -1,
            2**63,
            HUGE,
            -HUGE,
            "",
            "x",
            "0" * 32,
            "F" * 56,
            ("T", 0, 99),
            ("T", -1, 0),
            ("T", 2**40, 0),
            ("../x", 0, 0),
            ("T", 0, -1),
        )
    ),
    *((lambda s, v=v: s.search_offset("T", 0, v), TypeError, "timestamp") for v in (None, "1", 1.5, True)),
    *((lambda s, v=v: s.search_offset("T", 0, v), ValueError, "timestamp") for v in (NAIVE, HUGE)),
    *((lambda s, v=v: s.search_offset("T", 0, 0, v), (TypeError, ValueError), "boundary") for v in (None, "lower", 5)),
    (lambda s: s.search_offset("T", 0, 0, on_damage="no"), ValueError, "on_damage"),
    *((lambda s, v=v: s.scan(topics=v), TypeError, "topics") for v in ("T", 5, [5], [b"T"], [None])),
    (lambda s: s.scan(topics=["\ud800"]), ValueError, "topics"),
    *((lambda s, v=v: s.scan(columns=v), TypeError, "columns") for v in ("body", 5, [5], [["a"]])),
    *((lambda s, v=v: s.scan(columns=v), ValueError, "columns") for v in (["nothing"], ["body", "body"])),
    *(
        (lambda s, n=n, v=v: s.scan(**{n: v}), ValueError, n)
        for n in ("batch_rows", "batch_bytes")
        for v in (0, -1, HUGE)
    ),
    *(
        (lambda s, n=n, v=v: s.scan(**{n: v}), TypeError, n)
        for n in ("batch_rows", "batch_bytes")
        for v in ("1", None, 1.5)
    ),
    *(
        (lambda s, n=n, v=v: s.scan(**{n: v}), TypeError, n)
        for n in ("begin_phy_offset", "end_phy_offset")
        for v in ("1", 1.5, True, NOON)
    ),
    *(
        (lambda s, n=n: s.scan(**{n: HUGE}), ValueError, n)
        for n in ("begin_phy_offset", "end_phy_offset", "begin", "end")
    ),
]


@pytest.mark.parametrize(("read", "error", "named"), READS, ids=[f"{i}-{case[2]}" for i, case in enumerate(READS)])
def test_a_wrong_argument_of_a_read_is_named(
    shared: rmq.Store, read: Callable[[rmq.Store], Any], error: Any, named: str
) -> None:
    with pytest.raises(error, match=named):
        read(shared)


def test_topics_may_come_from_arrow(shared: rmq.Store) -> None:
    found = [shared.scan(topics=topics).read_all().num_rows for topics in (["T"], pa.array(["T"]), pa.array([], "str"))]
    assert found == [shared.scan(topics=("T",)).read_all().num_rows, found[0], 0]
    assert found[0]


@pytest.mark.parametrize("limit", [5, 6, 2**31, 2**63 - 1, 2**63, HUGE])
def test_a_huge_limit_means_everything(shared: rmq.Store, limit: int) -> None:
    assert len(shared.query("T", "all", limit=limit)) == 5
    assert shared.query_many("T", ["all", "key1"], limit=limit).table.num_rows == 6
    assert len(shared.pull("T", 0, 0, limit).messages) == 3
    assert [len(row) for row in shared.select_phy_offset_many("T", ["all"], max_num=limit).to_pylist()] == [5]


def test_an_empty_list_of_keys_has_an_empty_answer(shared: rmq.Store) -> None:
    for keys in (
        [],
        (),
        iter([]),
        np.array([], "S1"),
        np.array([], "U1"),
        np.array([], object),
        pa.array([], pa.string()),
    ):
        assert shared.query_many("T", keys).table.num_rows == 0
    assert len(shared.select_phy_offset_many("T", [])) == 0
    assert shared.query_many("T", ["", "all"]).table["key_index"].to_pylist() == [1] * 5


def test_names_that_point_outside_read_nothing(shared: rmq.Store) -> None:
    (shared.path.parent / "T").mkdir(exist_ok=True)
    for topic in ("../x", "/etc", ".", "..", "T/0", "a\0b", "", "x" * 5000):
        assert shared.query(topic, "all") == []
        assert shared.pull(topic).messages == []
        assert shared.search_offset(topic, 0, 0) == 0
        assert shared.scan(topics=[topic]).read_all().num_rows == 0
    for queue_id in (-1, 2, 2**31, HUGE, -HUGE):
        assert shared.pull("T", queue_id).messages == []


# ---- opening ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["", "w", "rw", "R", "r ", "rb", None, 5, b"r", ["r"]])
def test_an_unknown_mode_opens_nothing(tmp_path: Path, mode: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="mode"):
        rmq.open(tmp_path / "s", mode)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "extra",
    [{"config": {}}, {"config": "x"}, {"clock": 5}, {"clock": "x"}, {"repair": "no"}, {"repair": None}],
)
def test_wrong_types_of_open_are_named_and_make_nothing(tmp_path: Path, extra: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(extra))):
        rmq.open(tmp_path / "s", "a", **extra)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [None, 5, 1.5, ["s"], b"\xff", "a\0b", "\ud800", "", b""])
@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_path_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any, mode: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TypeError, ValueError, FileNotFoundError, NotADirectoryError)):
        rmq.open(path, mode)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "fields",
    [
        *({name: value} for name in SIZES for value in (0, -1, 2**31, HUGE)),
        {"max_index_num": 1},
        {"mapped_file_size_commit_log": 100},
        {"flush_disk_type": "NOW"},
        {"rocketmq_version": "3.2.6"},
        {"rocketmq_version": "new"},
        {"message_delay_level": ""},
        {"message_delay_level": "1x"},
        *({"message_delay_level": level} for level in ("\u00b2s", "9" * 5000 + "s", "106751991168d")),
        {"store_host": "nowhere"},
        {"max_message_size": 0},
        {"max_hash_slot_num": 2**30},
        {"enabled_append_prop_crc": True, "rocketmq_version": "5.1.0"},
    ],
)
def test_a_config_that_makes_no_store_is_refused_and_makes_none(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        rmq.open(tmp_path / "s", "a", config=rmq.StoreConfig(**fields))
    assert list(tmp_path.iterdir()) == []


def test_the_longest_delay_is_taken() -> None:
    assert rmq.StoreConfig(message_delay_level="106751991167d").delay_levels_ms == (106751991167 * 86_400_000,)


@pytest.mark.parametrize(
    "fields",
    [
        *({name: "5"} for name in SIZES),
        {"max_index_num": 5.0},
        {"max_index_num": True},
        {"store_host": 5},
        {"store_path_commit_log": 5},
        {"no_such_field": 5},
        {"message_index_enable": 1},
        {"rocketmq_version": None},
    ],
)
def test_a_config_field_of_another_type_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(fields))):
        rmq.StoreConfig(**fields)


@pytest.mark.parametrize(
    "text",
    [
        b"mapedFileSizeCommitLog=x\nmappedFileSizeCommitLog=x\n",
        b"maxIndexNum=\n",
        b"# ok\nmaxIndexNum=\xff\n",
        b"messageIndexEnable=maybe\n",
        b"maxIndexNum=20\nfileReservedTime=-1\n",
    ],
)
def test_a_broker_conf_that_does_not_fit_names_file_and_line(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "broker.conf").write_bytes(text)
    with pytest.raises(ValueError, match=r"broker\.conf, line"):
        rmq.StoreConfig.from_broker_conf(tmp_path / "broker.conf")


def test_values_of_a_broker_conf_that_do_not_fit_together_name_one(tmp_path: Path) -> None:
    (tmp_path / "broker.conf").write_text("maxIndexNum=100000000\nmaxHashSlotNum=100000000\n")
    with pytest.raises(ValueError, match=r"broker\.conf, line 2: max_hash_slot_num and max_index_num"):
        rmq.StoreConfig.from_broker_conf(tmp_path / "broker.conf")


@pytest.mark.parametrize(("now", "error"), [
    (dt.datetime(2026, 1, 1), ValueError), (1_700_000_000_000, TypeError), ("2026-01-01", TypeError),
    (dt.datetime(1, 1, 1, 12, tzinfo=dt.UTC), ValueError),
])  # fmt: skip
def test_a_present_before_which_no_id_can_be_put_is_an_error(now: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        rmq.parse_uniq_key("7F00000100002A9A8B3C" + "FFFFFFFF" + "0001", now)


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where clocks went back an hour on 25 October 2026, on 29 March forward."""
    with monkeypatch.context() as zone:
        zone.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(("born", "now"), [
    ("2026-10-20T12:00+02:00", "2026-10-21T00:00+02:00"), ("2026-10-20T12:00+02:00", "2026-10-28T00:00+01:00"),
    ("2026-10-28T12:00+01:00", "2026-10-30T00:00+01:00"), ("2026-10-20T12:00+02:00", "2026-11-05T00:00+01:00"),
    ("2026-03-30T12:00+02:00", "2026-03-31T00:00+02:00"), ("2026-03-30T12:00+02:00", "2026-04-02T00:00+02:00"),
])  # fmt: skip
def test_a_unique_key_s_month_began_by_the_clocks_of_its_first_day(born: str, now: str) -> None:
    made = dt.datetime.fromisoformat(born)
    begin = dt.datetime(made.year, made.month, 1).astimezone()
    span = (made - begin) // dt.timedelta(milliseconds=1)
    key = rmq.parse_uniq_key(f"7F00000100002A9A8B3C{span:08X}0001", dt.datetime.fromisoformat(now))
    assert key.born_timestamp == made.timestamp() * 1000


@pytest.mark.parametrize("data", [bytes(4096), b"brokerName=a\n\0", b"#" * (2**20 + 1)], ids=["zeros", "nul", "large"])
def test_a_file_that_is_no_broker_conf_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "00000000000000000000").write_bytes(data)
    with pytest.raises(ValueError, match="no properties file"):
        rmq.StoreConfig.from_broker_conf(tmp_path / "00000000000000000000")


def test_a_broker_conf_is_no_descriptor(tmp_path: Path) -> None:
    with (tmp_path / "broker.conf").open("wb") as opened:
        with pytest.raises(TypeError, match=r"^file must be str or os\.PathLike, got int$"):
            rmq.StoreConfig.from_broker_conf(opened.fileno())  # type: ignore[arg-type]
        assert opened.write(b"still open") == 10


# ---- closed, pickled, single files -----------------------------------------------------------------------

CALLS: dict[str, Callable[[rmq.Store], Any]] = {
    "put": lambda s: s.put(message(0)),
    "put_many": lambda s: s.put_many([message(0)]),
    "put_batch": lambda s: s.put_batch([message(0)]),
    "flush": lambda s: s.flush(),
    "query": lambda s: s.query("T", "all"),
    "query_many": lambda s: s.query_many("T", ["all"]),
    "select": lambda s: s.select_phy_offset_many("T", ["all"]),
    "pull": lambda s: s.pull("T"),
    "lookup": lambda s: s.lookup(0),
    "lookup_many": lambda s: s.lookup_many([0]),
    "lookup text": lambda s: s.lookup("x"),
    "search_offset": lambda s: s.search_offset("T", 0, 0),
    "scan": lambda s: s.scan(),
    "topics": lambda s: s.topics(),
    "min_phy_offset": lambda s: s.min_phy_offset,
    "max_phy_offset": lambda s: s.max_phy_offset,
    "arrow": lambda s: s.__arrow_c_stream__(),
    "with": lambda s: s.__enter__(),
    "pa.table": lambda s: pa.table(s),
}


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_closed_store_says_so_whatever_it_is_asked(tmp_path: Path, mode: str) -> None:
    with rmq.open(tmp_path / "s", "a", config=CONFIG) as store:
        store.put(message(0))
    store = rmq.open(tmp_path / "s", mode)
    found, begun = store.query("T", "all"), store.scan(batch_rows=1)
    store.close()
    store.close()
    for name, call in CALLS.items():
        with pytest.raises(rmq.StoreClosedError, match=r".") as caught:
            call(store)
        assert caught.type is rmq.StoreClosedError, name
    with pytest.raises(rmq.StoreClosedError):
        begun.read_all()
    assert (store.closed, found[0].body, found[0].keys) == (True, b"body 0", ("key0", "all"))


def test_a_store_open_for_reading_takes_nothing(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "a", config=CONFIG) as store:
        store.put(message(0))
    with rmq.open(tmp_path / "s") as store:
        for name in ("put", "put_many", "put_batch", "flush"):
            with pytest.raises(rmq.StoreReadOnlyError):
                CALLS[name](store)
        assert_holds(store, [b"body 0"])


@pytest.mark.parametrize("copier", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_store_is_not_copied(shared: rmq.Store, copier: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="path"):
        copier(shared)


FILE_CALLS: list[tuple[Callable[[rmq.IndexFile], Any], Any, str]] = [
    *((lambda f, v=v: f.put_key(v, 0, 0), TypeError, "key") for v in (None, 5, b"T#k", ["T#k"])),
    *(
        (lambda f, v=v: f.put_key("T#k", v, 0), (TypeError, ValueError), "^phy_offset ")
        for v in (None, "x", HUGE, [1, 2], 1.5)
    ),
    *(
        (lambda f, v=v: f.put_key("T#k", 0, v), (TypeError, ValueError), "^store_timestamp ")
        for v in (None, "x", HUGE, NAIVE, 1.5)
    ),
    (lambda f: f.put_keys(["a", "b"], [1], [1, 2]), ValueError, "length"),
    (lambda f: f.put_keys(["a", 5], [1, 2], [1, 2]), TypeError, "keys"),
    (lambda f: f.put_keys("ab", [1, 2], [1, 2]), TypeError, "keys"),
    (lambda f: f.put_keys(["a"], [[1]], [1]), ValueError, "phy_offset"),
    *((lambda f, v=v: f.select_phy_offset("T#k", v), TypeError, "max_num") for v in (None, "1", 1.5)),
    *((lambda f, v=v: f.select_phy_offset("T#k", v), ValueError, "max_num") for v in (-1, -HUGE)),
    (lambda f: f.select_phy_offset(5), TypeError, "^key "),
    (lambda f: f.put_key(b"T#k", 0, 0), TypeError, "^key "),
    (lambda f: f.put_key("T#k", None, 0), TypeError, "^phy_offset must be integers, got NoneType$"),
    (lambda f: f.select_phy_offset("T#k", 1, NAIVE), ValueError, "begin"),
    (lambda f: f.select_phy_offset("T#k", 1, 0, HUGE), ValueError, "end"),
    (lambda f: f.select_phy_offset_many("T#k"), TypeError, "keys"),
    (lambda f: pickle.dumps(f), TypeError, "pickle"),
]


@pytest.mark.parametrize("number", range(len(FILE_CALLS)))
def test_a_wrong_argument_of_an_index_file_puts_no_entry(tmp_path: Path, number: int) -> None:
    call, error, named = FILE_CALLS[number]
    with rmq.IndexFile(tmp_path / "f", "x", max_hash_slot_num=10, max_index_num=30) as file:
        assert file.put_key("T#k", 77, 1000)
        with pytest.raises(error, match=named):
            call(file)
        assert (file.index_count, file.select_phy_offset("T#k", 2**40)) == (2, [77])
    with pytest.raises(rmq.StoreClosedError):
        file.select_phy_offset("T#k")
    with pytest.raises(rmq.StoreClosedError):
        file.put_key("T#k", 1, 1)
    with pytest.raises(rmq.StoreClosedError), file:
        pass


@pytest.mark.parametrize("text", [",", ",,"])
def test_a_list_of_no_log_directory_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="store_path_commit_log names no directory"):
        rmq.StoreConfig(store_path_commit_log=text)


@pytest.mark.parametrize("value", [
    "text", 5, None, [1], np.str_("text"), np.float64(1.5), np.int64(1), np.bool_(True), np.datetime64("2026-01-01"),
    np.array(5), np.array(["a", "b"]), np.array(["a", "b"], object), np.zeros(2, [("a", "O"), ("b", "i4")]),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_bodies_are_bytes_and_no_memory_of_other_things(value: Any) -> None:
    for name in ("body", "raw_properties"):
        if value is not None or name == "body":
            with pytest.raises(TypeError, match=f"^{name} must be bytes-like"):
                rmq.Message(**{"topic": "T", "body": b"", name: value})


@pytest.mark.parametrize("value", [bytearray(b"ab"), memoryview(b"a-b")[::2], np.bytes_(b"ab"), pa.py_buffer(b"ab"),
                                   np.frombuffer(b"ab", np.uint8), np.array([0x6261], "<i2")],
                         ids=lambda value: type(value).__name__)  # fmt: skip
def test_bodies_may_be_whatever_lends_bytes(value: Any) -> None:
    assert rmq.Message("T", value).body == b"ab"


def test_memory_that_nobody_lends_is_an_error_with_the_argument_s_name() -> None:
    released, closed = memoryview(b"ab"), mmap.mmap(-1, 4096)
    released.release()
    closed.close()
    for value in (released, closed, np.array(["2026"], "M8[s]")):
        for name in ("body", "raw_properties"):
            with pytest.raises(ValueError, match=f"^{name}: "):
                rmq.Message(**{"topic": "T", "body": b"", name: value})
