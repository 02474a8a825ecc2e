"""Look-ups as functions of Spark: what they answer is what the store's own calls answer."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from conftest import copy_store

import rmq
import rmq.spark
from rmq.spark import functions, joining, lookup_join, messages, offsets, register
from rmq.spark.functions import MESSAGE_COLUMNS
from rmq.spark.opened import check_session
from spark.orders import COUNT, TIME

pytestmark = pytest.mark.spark
KEYS = [*(f"o-{number}" for number in range(0, COUNT, 37)), "c-7", "nix", "", "o-1#", "emoji-\U0001f600", None]


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    return spark.createDataFrame([(key,) for key in KEYS], "key string")


def answers(frame: Any, function: Any) -> dict[str | None, Any]:
    return {row[0]: row[1] for row in frame.select("key", function("key")).collect()}


@pytest.mark.parametrize("limit", [1, 32, None])
def test_exact_offsets_are_those_of_query(store: Path, frame: Any, limit: int | None) -> None:
    found = answers(frame, rmq.spark.offsets(str(store), "orders", max_offsets=limit))
    with rmq.open(store) as opened:
        expected = {key: [message.phy_offset for message in opened.query("orders", key, limit=limit)]
                    for key in KEYS if key is not None} | {None: None}  # fmt: skip
    assert found == expected
    assert len(found["c-7"]) == min(limit or COUNT, COUNT // 100)


def test_raw_offsets_are_those_of_the_index(store: Path, frame: Any) -> None:
    found = answers(frame, rmq.spark.offsets(str(store), "orders", exact=False))
    asked = [key for key in KEYS if key is not None]
    with rmq.open(store) as opened:
        expected = opened.select_phy_offset_many("orders", asked).to_pylist()
    assert found == dict(zip(asked, expected, strict=True)) | {None: None}


def test_a_time_range_bounds_the_answers(store: Path, frame: Any) -> None:
    function = rmq.spark.offsets(str(store), "orders", begin=TIME + 1000, end=TIME + 2999, max_offsets=None)
    found = answers(frame, function)
    assert len(found["c-7"]) == 20
    assert found["o-0"] == []


def test_messages_are_rows_for_inline(spark: Any, store: Path, frame: Any) -> None:
    from pyspark.sql import functions as F

    function = rmq.spark.messages(str(store), "orders", columns=["phy_offset", "body", "keys", "store_timestamp"])
    rows = frame.select("key", F.inline(function("key"))).where("key in ('o-37', 'c-7')").collect()
    with rmq.open(store) as opened:
        expected = {(key, message.phy_offset, message.body, message.keys) for key in ("o-37", "c-7")
                    for message in opened.query("orders", key, limit=32)}  # fmt: skip
    assert {(row.key, row.phy_offset, bytes(row.body), tuple(row["keys"])) for row in rows} == expected
    assert frame.where("key = 'nix'").select(F.inline(function("key"))).collect() == []


def test_sql_functions(spark: Any, store: Path) -> None:
    rmq.spark.register(spark, str(store), "orders")
    row = spark.sql("SELECT rmq_offsets('o-1') a, rmq_key_hash('orders#o-1') b, rmq_slot('orders#o-1') c, "
                    "rmq_slot(NULL) d, rmq_parse_id('7F00000100002A9F00000000000000FF') e, rmq_parse_id('x') f, "
                    "size(rmq_messages('c-1')) g").first()  # fmt: skip
    hashed = rmq.index_key_hash("orders#o-1")
    assert (row.b, row.c, row.d, row.f, row.g) == (hashed, hashed % 1000, None, None, 32)
    assert row.e.asDict() == {"store_host": "127.0.0.1:10911", "phy_offset": 255}
    assert len(row.a) == 1
    spark.sql("CREATE OR REPLACE TEMPORARY FUNCTION orders_at(k STRING) RETURNS TABLE(phy_offset BIGINT, body BINARY) "
              "RETURN SELECT phy_offset, body FROM (SELECT inline(rmq_messages(k)))")  # fmt: skip
    rows = spark.sql("SELECT k.id, m.body FROM VALUES ('o-1'), ('o-2') k(id), LATERAL orders_at(k.id) m").collect()
    assert {(row.id, bytes(row.body)) for row in rows} == {("o-1", b"body 1"), ("o-2", b"body 2")}


def test_bytes_that_are_no_utf_8_have_no_answers(spark: Any, store: Path) -> None:
    function = rmq.spark.offsets(str(store), "orders")
    rows = spark.sql("SELECT cast(X'6FFF' AS STRING) key UNION ALL SELECT 'o-5'").select(function("key")).collect()
    assert sorted(len(row[0]) for row in rows) == [0, 1]


def test_rmq_messages_gives_the_columns_that_were_registered(spark: Any, store: Path) -> None:
    for names in (["body", "n", "queue_offset"], ["body", "body"]):
        with pytest.raises(ValueError, match="column"):
            rmq.spark.register(spark, str(store), "orders", prefix="never_", columns=names)
    rmq.spark.register(spark, str(store), "orders", prefix="some_", columns=["tags", "phy_offset"], max_offsets=2)
    rmq.spark.register(spark, str(store), "orders", prefix="usual_")
    assert not [one.name for one in spark.catalog.listFunctions() if one.name.startswith("never_")]
    found = spark.sql("SELECT inline(some_messages('c-7'))")
    assert found.dtypes == [("tags", "string"), ("phy_offset", "bigint")]
    assert spark.sql("SELECT inline(usual_messages('c-7'))").columns == list(MESSAGE_COLUMNS)
    with rmq.open(store) as opened:
        assert [tuple(row) for row in found.collect()] == \
            [(message.tags, message.phy_offset) for message in opened.query("orders", "c-7", limit=2)]  # fmt: skip


def test_lookup_join_has_a_row_for_each_pair(spark: Any, store: Path, frame: Any) -> None:
    joined = rmq.spark.lookup_join(frame.selectExpr("1 AS one", "key"), str(store), "orders", key="key",
                                   columns=["body", "uniq_key"])  # fmt: skip
    assert joined.columns == ["one", "key", "body", "uniq_key"]
    with rmq.open(store) as opened:
        expected = sorted((key, message.body) for key in KEYS if key is not None
                          for message in opened.query("orders", key, limit=None))  # fmt: skip
    assert sorted((row.key, bytes(row.body)) for row in joined.collect()) == expected


def test_a_join_of_large_bodies_crosses_in_pieces(spark: Any, tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x") as made:
        made.put_many([rmq.Message("t", bytes([number]) * 1_000_000, keys=f"k{number}") for number in range(20)])
    frame = spark.createDataFrame([(f"k{number}",) for number in range(20)], "key string").coalesce(1)
    joined = rmq.spark.lookup_join(frame, str(tmp_path / "s"), "t", key="key", columns=["body"])
    assert {row.key[1:]: bytes(row.body) for row in joined.collect()} == \
        {str(number): bytes([number]) * 1_000_000 for number in range(20)}  # fmt: skip


@pytest.mark.parametrize("columns", [["phy_offset"], ["phy_offset", "body"], []], ids=str)
def test_a_join_of_large_rows_crosses_in_pieces(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                columns: list[str]) -> None:  # fmt: skip
    """Edge: few messages' columns beside rows of any width, with nested ones; a row for each message of a hot key."""
    with rmq.open(tmp_path / "s", "x") as made:
        made.put_many([rmq.Message("t", b"x" * 50, keys=["hot", f"k{number}"]) for number in range(500)])
    frame = spark.createDataFrame([], "key string, wide string, many array<string>, one int")
    joins: list[Any] = []
    monkeypatch.setattr(type(frame), "mapInArrow", lambda frame, join, schema: joins.append(join))
    rmq.spark.lookup_join(frame, str(tmp_path / "s"), "t", key="key", columns=columns)
    for module in (functions, joining):
        monkeypatch.setattr(module, "PIECE_BYTES", 100_000)
    rows = [{"key": "hot", "wide": "w" * 3000, "many": None, "one": 1},
            {"key": "k7", "wide": None, "many": [], "one": 2},
            {"key": "hot", "wide": "", "many": ["m" * 500] * 9, "one": None}, {"key": "k8", "wide": "w" * 10**6},
            {"key": "none", "wide": "w" * 10**6}]  # fmt: skip
    kinds = {"key": pa.string(), "wide": pa.string(), "many": pa.list_(pa.string()), "one": pa.int32(),
             "amount": pa.decimal128(9, 2), "nothing": pa.null()}  # fmt: skip
    batches = list(joins[0](iter([pa.RecordBatch.from_pylist(rows, pa.schema(kinds))])))
    assert all(batch.nbytes < 2 * 100_000 or len(batch) == 1 for batch in batches)
    found = pa.Table.from_batches(batches)
    assert sorted(found["key"].to_pylist()) == ["hot"] * 1000 + ["k7", "k8"]
    assert [found["one"].to_pylist().count(one) for one in (1, 2, None)] == [500, 1, 501]
    if columns:
        assert len(set(found.filter(pc.equal(found["one"], 1))["phy_offset"].to_pylist())) == 500


def test_a_join_asks_once_for_a_key_of_many_rows_and_makes_its_pairs_a_few_at_a_time(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rmq.open(tmp_path / "s", "x") as made:
        made.put_many([rmq.Message("t", b"%d" % number, keys=["hot", f"k{number}"]) for number in range(300)])
    frame = spark.createDataFrame([], "key string, one int")
    joins: list[Any] = []
    asked: list[int] = []
    real = functions.Probe.matches
    monkeypatch.setattr(type(frame), "mapInArrow", lambda frame, join, schema: joins.append(join))
    monkeypatch.setattr(functions.Probe, "matches", lambda probe, keys, columns: asked.append(len(keys)) or
                        real(probe, keys, columns))  # fmt: skip
    monkeypatch.setattr(joining, "PAIRS", 1000)
    rmq.spark.lookup_join(frame, str(tmp_path / "s"), "t", key="key", columns=["phy_offset", "body"])
    keys = ["hot", "k5", None, "hot", "none", "k299"] + ["hot"] * 50
    batches = list(joins[0](iter([pa.RecordBatch.from_pydict({"key": keys, "one": [*range(len(keys))]})])))
    assert asked == [4], "hot, k5, none, k299"
    assert max(map(len, batches)) <= 1000
    rows = pa.Table.from_batches(batches).to_pylist()
    assert sorted((row["one"], int(row["body"])) for row in rows) == sorted(
        (one, number) for one, key in enumerate(keys) for number in range(300)
        if key in ("hot", f"k{number}"))  # fmt: skip
    assert all(row["key"] == keys[row["one"]] for row in rows)


@pytest.mark.parametrize(("options", "message"), [({"key": "nix"}, "df has no column 'nix'"),
    ({"key": "key", "columns": ["nix"]}, "no column 'nix'")], ids=str)  # fmt: skip
def test_a_join_on_what_there_is_not_is_an_error(store: Path, frame: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rmq.spark.lookup_join(frame, str(store), "orders", **options)


def test_a_join_names_columns_that_both_sides_have(store: Path, frame: Any) -> None:
    with pytest.raises(ValueError, match="df has body too"):
        rmq.spark.lookup_join(frame.selectExpr("key", "key AS body"), str(store), "orders", key="key", columns=["body"])


def test_wrong_arguments_are_errors_at_once(spark: Any, store: Path, frame: Any) -> None:
    calls: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, "max_offsets must be at least 1, got 0", lambda: offsets(store, "orders", max_offsets=0)),
        (TypeError, "max_offsets must be int, got str", lambda: offsets(store, "orders", max_offsets="5")),
        (ValueError, "limit must be at least 1, got 0", lambda: messages(store, "orders", limit=0)),
        (TypeError, "limit must be int, got str", lambda: lookup_join(frame, store, "orders", key="key", limit="5")),
        (ValueError, "max_offsets must be", lambda: register(spark, store, "orders", prefix="no_", max_offsets=-1)),
        (ValueError, "exact=False", lambda: offsets(store, "orders", max_offsets=None, exact=False)),
        (TypeError, "path must be str or os.PathLike, got int", lambda: offsets(5, "orders")),
        (TypeError, "path must be str or os.PathLike, got bytes", lambda: messages(b"s", "orders")),
    ]
    for kind, text, call in calls:
        with pytest.raises(kind, match=text):
            call()


def test_an_empty_path_is_an_error_as_of_open(spark: Any, frame: Any) -> None:
    for call in (lambda: offsets("", "orders"), lambda: messages("", "orders"), lambda: register(spark, "", "orders"),
                 lambda: lookup_join(frame, "", "orders", key="key")):  # fmt: skip
        with pytest.raises(FileNotFoundError, match="the path of the store is empty"):
            call()


def test_a_path_may_be_a_path(spark: Any, store: Path, frame: Any) -> None:
    assert answers(frame, offsets(store, "orders")) == answers(frame, offsets(str(store), "orders"))
    assert answers(frame, messages(store, "orders", columns=["phy_offset"]))["o-37"]
    joined = [lookup_join(frame, path, "orders", key="key", columns=["phy_offset"]) for path in (store, str(store))]
    assert sorted(joined[0].collect(), key=str) == sorted(joined[1].collect(), key=str)
    register(spark, store, "orders", prefix="of_a_path_")
    assert spark.sql("SELECT size(of_a_path_offsets('o-1'))").first()[0] == 1


@pytest.mark.parametrize("wrong", [None, "local[2]", 5], ids=str)
def test_what_is_no_session_or_frame_is_a_type_error(store: Path, tmp_path: Path, wrong: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: register(wrong, store, "orders"), lambda: rmq.spark.verify(wrong, store),
        lambda: rmq.spark.rebuild(wrong, store, tmp_path / "n"), lambda: rmq.spark.export(wrong, store, tmp_path / "e"),
        lambda: rmq.spark.scan_map(wrong, store, iter, "a int"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError, match=rf"spark must be a SparkSession, got {type(wrong).__name__}"):
            call()
    for call in (lambda: lookup_join(wrong, store, "orders", key="key"), lambda: rmq.spark.bulk_load(wrong, tmp_path)):
        with pytest.raises(TypeError, match=rf"df must be a DataFrame, got {type(wrong).__name__}"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_session_of_spark_connect_is_one(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("pyspark.sql.connect.session")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.SparkSession = type("SparkSession", (), {})  # type: ignore[attr-defined]
    check_session(module.SparkSession())
    check_session(spark)
    with pytest.raises(TypeError, match="spark must be a SparkSession, got NoneType"):
        check_session(None)


@pytest.mark.parametrize("is_broker_s", [False, True])
def test_rmq_slot_is_that_of_the_store_s_own_index_files(spark: Any, store: Path, tmp_path: Path,
                                                         is_broker_s: bool) -> None:  # fmt: skip
    copy = copy_store(store, tmp_path / "s")
    if is_broker_s:
        shutil.rmtree(copy / "rmq")  # the files alone tell
    register(spark, copy, "orders", prefix="small_")
    small = rmq.StoreConfig(max_hash_slot_num=7, max_index_num=40)
    with rmq.open(tmp_path / "empty", "x", config=small):
        register(spark, tmp_path / "empty", "orders", prefix="seven_")
    row = spark.sql("SELECT small_slot('orders#o-1') a, seven_slot('orders#o-1') b").first()
    assert tuple(row) == (rmq.index_key_hash("orders#o-1") % 1000, rmq.index_key_hash("orders#o-1") % 7)
    with pytest.raises(FileNotFoundError, match="no such store directory"):
        register(spark, tmp_path / "nix", "orders", prefix="never_")
    assert not [one.name for one in spark.catalog.listFunctions() if one.name.startswith("never_")]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_sliced_arrays_and_nulls_keep_their_places(store: Path, kind: pa.DataType) -> None:
    from rmq.spark.functions import Probe, answered

    probe = Probe(str(store), "orders", None, None, 32, None)
    keys = pa.array(["skipped", "o-1", None, "o-2", None], kind)[1:]
    found = answered(keys, probe.raw_offsets)
    with rmq.open(store) as opened:
        one, two = opened.select_phy_offset_many("orders", ["o-1", "o-2"]).to_pylist()
    assert found.to_pylist() == [one, None, two, None]
    assert answered(pa.array([], kind), probe.raw_offsets).to_pylist() == []
    assert answered(pa.array([None], kind), probe.raw_offsets).to_pylist() == [None]


def test_a_join_for_no_columns_has_a_row_for_each_pair(store: Path, frame: Any) -> None:
    with_one = rmq.spark.lookup_join(frame, str(store), "orders", key="key", columns=["phy_offset"])
    none = rmq.spark.lookup_join(frame, str(store), "orders", key="key", columns=[])
    assert none.columns == ["key"]
    assert sorted(none.collect()) == sorted(with_one.select("key").collect())
    with pytest.raises(ValueError, match="columns: a struct of no columns"):
        rmq.spark.messages(str(store), "orders", columns=[])


def test_keys_whose_text_spark_makes_in_another_way_are_a_type_error(spark: Any, store: Path) -> None:
    offsets = rmq.spark.offsets(str(store), "orders")
    for kind in ("7.0D", "cast(7 AS decimal(5,2))", "date'2020-01-01'", "true", "current_timestamp()"):
        frame = spark.sql(f"SELECT {kind} key")
        with pytest.raises(TypeError, match=r"column 'key' must be string, binary or integer, not .*: cast it"):
            rmq.spark.lookup_join(frame, str(store), "orders", key="key")
        with pytest.raises(Exception, match=r"TypeError: keys must be texts, binary or integers, got .*: cast them"):
            frame.select(offsets("key")).collect()
    for kind in ("7", "7L", "cast(7 AS tinyint)", "'7'", "X'37'", "cast('7' AS varchar(5))", "NULL"):
        frame = spark.sql(f"SELECT {kind} key")
        assert frame.select(offsets("key")).count() == 1
        assert rmq.spark.lookup_join(frame, str(store), "orders", key="key").count() == 0


def test_a_join_refuses_a_column_twice_as_spark_tells_names_apart(spark: Any, store: Path, frame: Any) -> None:
    named = frame.selectExpr("key", "1 AS Body")
    with pytest.raises(ValueError, match="df has Body too"):
        rmq.spark.lookup_join(named, str(store), "orders", key="key", columns=["body"])
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        joined = rmq.spark.lookup_join(named, str(store), "orders", key="key", columns=["body"])
        assert joined.columns == ["key", "Body", "body"]
        with pytest.raises(ValueError, match="df has body too"):
            rmq.spark.lookup_join(joined, str(store), "orders", key="key", columns=["body"])
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_a_relative_path_is_the_driver_s(store: Path, frame: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store.parent)
    found = answers(frame, rmq.spark.offsets(store.name, "orders"))
    assert found == answers(frame, rmq.spark.offsets(str(store), "orders"))
