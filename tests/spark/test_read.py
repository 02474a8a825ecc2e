"""spark.read.format("rmq"): what crosses to Spark, by column, shape, table and error."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path
from typing import Any

import pytest

import rmq
from spark.orders import COUNT, TIME

pytestmark = pytest.mark.spark


def load(spark: Any, path: Path | list[Path], schema: str = "", **options: str) -> Any:
    reader = spark.read.format("rmq").options(**options)
    if schema:
        reader = reader.schema(schema)
    return reader.load(str(path) if isinstance(path, Path) else [str(item) for item in path])


def failure(frame: Any) -> str:
    with pytest.raises(Exception, match=r"\w") as caught:
        frame().collect()
    return str(caught.value)


def test_every_column_of_every_row_is_the_store_s(spark: Any, store: Path) -> None:
    names = [*rmq.scan.COLUMNS, "raw_body", "raw_properties"]
    rows = load(spark, store, columns=",".join(names), splitBytes="65536").collect()
    with rmq.open(store) as opened:
        expected = opened.scan(columns=names).read_all().to_pylist()
    assert len(rows) == COUNT + 10
    for row, message in zip(sorted(rows, key=lambda row: row.phy_offset), expected, strict=True):
        found = row.asDict()
        for name in ("born_timestamp", "store_timestamp"):
            found[name] = found[name].replace(tzinfo=datetime.UTC)
        assert found == message | {"properties": dict(message["properties"]), "body": bytearray(message["body"]),
                                   "raw_body": bytearray(message["raw_body"]),
                                   "raw_properties": bytearray(message["raw_properties"])}  # fmt: skip


def test_every_type_is_exactly_what_spark_wants(spark: Any, store: Path) -> None:
    """Spark 4.2 and later refuse a batch whose schema differs in a unit, a width, or a name of a child."""
    from rmq.spark.schema import native_ddl

    for name, kind in native_ddl([*rmq.scan.COLUMNS, "raw_body", "raw_properties"]).items():
        frame = load(spark, store, f"{name} {kind}", subscribe="other")
        assert frame.count() == len(frame.collect()) == 10, name


def test_messages_that_carry_keys_come_once(spark: Any, store: Path) -> None:
    frame = load(spark, store, subscribe="orders", keys="c-7,o-107,o-5,nix", batchRows="3")
    bodies = sorted(bytes(row.body) for row in frame.collect())
    assert bodies == sorted(b"body %d" % number for number in {5, 107, *range(7, COUNT, 100)})
    chosen = load(spark, store, subscribe="orders", keys="c-7,c-8", tags="A", startingTimestamp=str(TIME + 1000),
                  endingOffsets='{"orders": {"0": 600}}')  # fmt: skip
    assert sorted(bytes(row.body) for row in chosen.collect()) == \
        sorted(b"body %d" % number for number in range(1008, 2400, 100))  # fmt: skip
    assert load(spark, store, subscribe="nix", keys="o-5").count() == 0


def test_a_user_s_schema_chooses_columns_and_their_order(spark: Any, store: Path) -> None:
    row = load(spark, store, "keys array<string>, phy_offset bigint").orderBy("phy_offset").first()
    assert row.asDict() == {"keys": ["o-0", "c-0"], "phy_offset": 0}


@pytest.mark.parametrize(("schema", "message"), [
    ("nix bigint", "no column 'nix'; there are topic, queue_id"),
    ("phy_offset int", "column 'phy_offset' is bigint, not int")])  # fmt: skip
def test_a_schema_that_there_is_not_is_an_error(spark: Any, store: Path, schema: str, message: str) -> None:
    assert message in failure(lambda: load(spark, store, schema))


def test_a_schema_without_columns_is_an_error_and_no_count_of_0(spark: Any, store: Path) -> None:
    from pyspark.sql.types import StructType

    with pytest.raises(Exception, match="schema: has no columns"):
        spark.read.format("rmq").schema(StructType([])).load(str(store)).count()


def test_the_shape_of_sparks_kafka_source(spark: Any, store: Path) -> None:
    frame = load(spark, store, schemaMode="kafka", includeHeaders="true").orderBy("topic", "partition", "offset")
    assert frame.dtypes == [("key", "binary"), ("value", "binary"), ("topic", "string"), ("partition", "int"),
                            ("offset", "bigint"), ("timestamp", "timestamp"), ("timestampType", "int"),
                            ("headers", "array<struct<key:string,value:binary>>")]  # fmt: skip
    rows = frame.collect()
    first, last = rows[0].asDict(recursive=True), rows[-1].asDict(recursive=True)
    assert first == {"key": b"o-0 c-0", "value": b"body 0", "topic": "orders", "partition": 0, "offset": 0,
                     "timestamp": datetime.datetime.fromtimestamp(TIME / 1000, datetime.UTC).replace(tzinfo=None),
                     "timestampType": 1,
                     "headers": [{"key": "KEYS", "value": b"o-0 c-0"}, {"key": "UNIQ_KEY", "value": b"0" * 32},
                                 {"key": "TAGS", "value": b"A"}, {"key": "n", "value": b"0"}]}  # fmt: skip
    assert last["key"] is None
    assert last["headers"] == []


def test_tables_of_structures(spark: Any, store: Path) -> None:
    with rmq.open(store) as opened:
        for name in ("queues", "index", "topics", "segments"):
            rows = [row.asDict() for row in load(spark, store, table=name).collect()]
            expected = opened.table(name).read_all().to_pylist()
            for row in expected:
                row |= {key: value.replace(tzinfo=None) for key, value in row.items()
                        if isinstance(value, datetime.datetime)}  # fmt: skip
            assert sorted(map(repr, rows)) == sorted(map(repr, expected))
        units = load(spark, store, table="queues").where("topic = 'orders'")
        assert units.count() == COUNT
        hashes = load(spark, store, table="index").where(f"key_hash = {rmq.index_key_hash('orders#o-77')}").collect()
        assert [row.phy_offset for row in hashes] == [opened.query("orders", "o-77")[0].phy_offset]


def test_several_stores_have_a_column_that_says_which(spark: Any, store: Path, tmp_path: Path) -> None:
    with rmq.open(tmp_path / "b", "x") as other:
        other.put_many([rmq.Message("t", b"x")] * 3)
    rows = load(spark, [store, tmp_path / "b"]).groupBy("store").count().collect()
    counts = {row.store: row["count"] for row in rows}
    assert counts == {str(store): COUNT + 10, str(tmp_path / "b"): 3}


def test_sql_views_keep_options(spark: Any, store: Path) -> None:
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW v (keys ARRAY<STRING>, queue_id INT) USING rmq "
              f"OPTIONS (path '{store}', subscribe 'orders')")  # fmt: skip
    assert spark.sql("SELECT count(*) n FROM v WHERE queue_id = 1").first().n == COUNT // 4
    assert "path is missing" in failure(lambda: spark.read.format("rmq").load())


def test_the_source_may_be_registered_too(spark: Any, store: Path) -> None:
    from rmq.spark.source import RmqDataSource

    session = spark.newSession()
    session.dataSource.register(RmqDataSource)
    assert load(session, store, subscribe="other").count() == 10


def test_a_table_of_the_catalog_says_how_to_give_options(spark: Any, store: Path) -> None:
    """Spark drops those of CREATE TABLE."""
    options = f"USING rmq OPTIONS (path '{store}', subscribe 'orders')"
    assert "needs its columns" in failure(lambda: spark.sql(f"CREATE TABLE orders_at {options}"))
    spark.sql("CREATE TABLE orders_at (body BINARY) USING rmq OPTIONS (subscribe 'orders')")
    try:
        assert "SELECT * FROM t WITH (path=" in failure(lambda: spark.sql("SELECT * FROM orders_at"))
        given = f"WITH (path='{store}', subscribe='orders')"
        assert spark.sql(f"SELECT count(*) n FROM orders_at {given}").first().n == COUNT
        assert spark.read.option("path", str(store)).option("subscribe", "other").table("orders_at").count() == 10
    finally:
        spark.sql("DROP TABLE orders_at")


def test_spark_reads_a_table_that_is_named_twice_by_the_options_of_the_first(spark: Any, store: Path) -> None:
    """As docs/spark.md warns. Fails when a release of Spark tells them apart: then the page need not."""
    spark.sql("CREATE TABLE named_twice (body BINARY) USING rmq")
    try:
        both = " UNION ALL ".join(f"SELECT body FROM named_twice WITH (path='{store}', subscribe='{topic}')"
                                  for topic in ("orders", "other"))  # fmt: skip
        assert spark.sql(both).count() == COUNT + COUNT  # not COUNT + 10
    finally:
        spark.sql("DROP TABLE named_twice")
    for topic in ("orders", "other"):
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {topic}_alone USING rmq "
                  f"OPTIONS (path '{store}', subscribe '{topic}')")  # fmt: skip
    assert spark.sql("SELECT * FROM orders_alone UNION ALL SELECT * FROM other_alone").count() == COUNT + 10


def test_a_loaded_frame_is_a_snapshot(spark: Any, tmp_path: Path) -> None:
    """Of a store that is written meanwhile: what was there at the first action."""
    with rmq.open(tmp_path / "s", "x") as live:
        live.put_many([rmq.Message("t", b"x")] * 5)
        frame = load(spark, tmp_path / "s")
        assert frame.count() == 5
        live.put_many([rmq.Message("t", b"x")] * 5)
        assert frame.count() == 5
        assert load(spark, tmp_path / "s").count() == 10


def test_a_store_that_is_remade_at_its_path_is_read_anew(spark: Any, tmp_path: Path) -> None:
    for count in (3, 4):
        shutil.rmtree(tmp_path / "s", ignore_errors=True)
        with rmq.open(tmp_path / "s", "x") as made:
            made.put_many([rmq.Message("t", b"x")] * count)
        assert load(spark, tmp_path / "s").count() == count


def test_no_store_there_is_an_error_that_names_host_and_path(spark: Any, tmp_path: Path) -> None:
    message = failure(lambda: load(spark, tmp_path / "nix"))
    assert f"{tmp_path}/nix: no store is to be read here" in message
    assert "ExecutorError: host " in message


def test_an_empty_store_has_no_rows(spark: Any, tmp_path: Path) -> None:
    rmq.open(tmp_path / "s", "x").close()
    assert load(spark, tmp_path / "s").collect() == []
    for name in ("queues", "index", "topics", "segments"):
        assert load(spark, tmp_path / "s", table=name).collect() == []


def damaged(source: Path, target: Path) -> Path:
    """A copy with a byte changed in the body of message 100."""
    shutil.copytree(source, target)
    with rmq.open(target) as opened:
        message = opened.query("orders", "o-100")[0]
        place = message.phy_offset + opened.lookup(message.phy_offset).size // 3
    segment = target / "commitlog" / f"{place // 65536 * 65536:020d}"
    data = bytearray(segment.read_bytes())
    at = data.index(b"body 100", message.phy_offset % 65536)
    data[at + 5] ^= 1
    segment.write_bytes(data)
    return target


def test_damage_is_an_error_unless_data_loss_is_allowed(spark: Any, store: Path, tmp_path: Path) -> None:
    path = damaged(store, tmp_path / "s")
    assert "CorruptFileError" in failure(lambda: load(spark, path))
    assert load(spark, path, failOnDataLoss="false").count() == COUNT + 9
    assert load(spark, path, verifyCrc="false").count() == COUNT + 10


def test_a_body_of_4_mib_and_a_batch_of_few_bytes(spark: Any, tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x") as made:
        made.put_many([rmq.Message("t", bytes(4 * 1024**2 - 1000)), rmq.Message("t", b""), rmq.Message("t", b"\xff")])
    rows = load(spark, tmp_path / "s", batchBytes="1").orderBy("phy_offset").collect()
    assert [len(row.body) for row in rows] == [4 * 1024**2 - 1000, 0, 1]


def test_text_that_is_not_utf_8_reads_as_everywhere(spark: Any, tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x") as made:
        made.put(rmq.Message("t", b"", raw_properties=b"KEYS\x01a\xff\x02"))
        expected = made.scan().read_all().to_pylist()[0]
    row = load(spark, tmp_path / "s").first()
    assert (row["keys"], row["properties"]) == (expected["keys"], dict(expected["properties"]))
    assert row["keys"] == ["a\ufffd"]


def test_a_plan_of_another_version_is_refused(store: Path) -> None:
    from rmq.spark.opened import ExecutorError, check_version

    with pytest.raises(ExecutorError, match=r"host .*: /s: rmq .* is installed here, the driver has 0\.0\.0"):
        check_version("0.0.0", "/s")


@pytest.mark.xfail(strict=True, reason="Spark keeps a pushed reader for later queries; passes: pushFilters may come")
def test_spark_leaks_no_pushed_filters(spark: Any) -> None:
    from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo, InputPartition

    class Reader(DataSourceReader):
        wanted = None

        def pushFilters(self, filters: list[Any]) -> Any:
            self.wanted = next((item.value for item in filters if isinstance(item, EqualTo)), None)
            yield from filters

        def partitions(self) -> list[InputPartition]:
            return [InputPartition(self.wanted)]

        def read(self, partition: InputPartition) -> Any:
            yield from ((text,) for text in "AAB" if partition.value in (None, text))

    class Canary(DataSource):
        @classmethod
        def name(cls) -> str:
            return "canary"

        def schema(self) -> str:
            return "topic string"

        def reader(self, schema: Any) -> DataSourceReader:
            return Reader()

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        spark.dataSource.register(Canary)
        frame = spark.read.format("canary").load()
        assert frame.where("topic = 'A'").count() == 2
        assert frame.count() == 3
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_times_are_points_in_time_whatever_the_session_calls_a_timestamp(spark: Any, store: Path) -> None:
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        for options in ({}, {"schemaMode": "kafka"}, {"table": "index"}, {"table": "segments"}):
            frame = spark.read.format("rmq").options(**options).load(str(store))
            assert "timestamp" in {kind for _, kind in frame.dtypes}
            assert frame.count() > 0
    finally:
        spark.conf.unset("spark.sql.timestampType")
