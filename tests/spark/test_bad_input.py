"""What users and disks hand in: keys that are no text, stores that are empty or gone, large bodies. The rest of it:
test_options.py, test_read.py, test_write.py, test_queues.py."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

import rmq
import rmq.spark
from rmq.spark import functions, source
from rmq.spark.opened import ExecutorError
from rmq.spark.options import ReadOptions
from rmq.spark.selection import DataLossError
from spark.orders import COUNT, orders

pytestmark = pytest.mark.spark
ROOT = Path(__file__).resolve().parent.parent.parent
SURROGATE = b"\xed\xa0\x80"
LARGE = 4 * 1024**2


@pytest.fixture(autouse=True)
def _session(spark: Any) -> None:
    """Spark parses schemas in its JVM."""


def raw_text(*items: bytes) -> pa.Array:
    """Strings of any bytes, as Spark hands them over."""
    return pa.array(items, pa.binary()).cast(pa.string(), safe=False)


def functions_of(path: Path) -> dict[str, Any]:
    """Functions of keys, as an executor calls them: on Arrow arrays."""
    return {"exact": rmq.spark.offsets(str(path), "orders").func,
            "raw": rmq.spark.offsets(str(path), "orders", exact=False).func,
            "messages": rmq.spark.messages(str(path), "orders", columns=["phy_offset"]).func,
            "hash": functions.key_hash_function().func, "slot": functions.slot_function(1000).func}  # fmt: skip


KEYS = ["o-1", None, "", "nix", "c-7", "o-1"]
CODED = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 3, 4, 0], pa.int8()), ["o-1", None, "", "nix", "c-7"])
SHAPES = {
    "string": pa.array(KEYS), "large": pa.array(KEYS, pa.large_string()), "view": pa.array(KEYS, pa.string_view()),
    "binary": pa.array([None if key is None else key.encode() for key in KEYS]), "dictionary": CODED,
    "null codes": pa.array(KEYS).dictionary_encode(), "sliced": pa.array(["x", None, *KEYS, "x"])[2:-1],
    "sliced dictionary": pa.concat_arrays([CODED, CODED])[6:],
}  # fmt: skip


@pytest.mark.parametrize("name", ["exact", "raw", "messages", "hash", "slot"])
@pytest.mark.parametrize("shape", SHAPES)
def test_keys_may_come_in_any_shape(store: Path, name: str, shape: str) -> None:
    call = functions_of(store)[name]
    found = call(SHAPES[shape])
    assert found.to_pylist() == call(pa.array(KEYS)).to_pylist()
    assert [item is None for item in found.to_pylist()] == [key is None for key in KEYS]
    assert call(SHAPES[shape][:0]).to_pylist() == []
    assert call(SHAPES[shape][1:2]).to_pylist() == [None]
    found.validate(full=True)


@pytest.mark.parametrize("name", ["exact", "raw", "messages"])
@pytest.mark.parametrize("bad", [SURROGATE, b"o-1\xff", b"\xff", b"\xf0\x9f\x98", b"\xc0\x80"])
def test_bytes_that_are_no_utf_8_carry_no_message(store: Path, name: str, bad: bytes) -> None:
    call = functions_of(store)[name]
    good = call(pa.array(["o-1"])).to_pylist()[0]
    assert good
    assert call(raw_text(b"o-1", bad, b"o-1")).to_pylist() == [good, [], good]
    assert call(pa.array([bad, None, b"o-1"])).to_pylist() == [[], None, good]


def test_hashes_of_what_is_no_utf_8_are_java_s(store: Path) -> None:
    """new String(bytes, UTF_8) has U+FFFD there."""
    call = functions_of(store)["hash"]
    replaced = [rmq.index_key_hash(text) for text in ("t#\ufffd", "t#\ufffd", "t#")]
    assert call(raw_text(b"t#\xff", b"t#" + SURROGATE, b"t#")).to_pylist() == replaced


def test_ids_that_are_none_are_null() -> None:
    good = "7F00000100002A9F00000000000000FF"
    call = functions.parse_id_function().func
    found = call(raw_text(good.encode(), b"", SURROGATE, b"\xff" * 32, b"0" * 31, b"Z" * 32)).to_pylist()
    assert found == [{"store_host": "127.0.0.1:10911", "phy_offset": 255}, *[None] * 5]
    assert call(pa.array([good, None]).dictionary_encode()).to_pylist() == [found[0], None]
    assert call(pa.nulls(2)).to_pylist() == [None, None]


def test_a_store_that_is_named_twice_is_an_error(spark: Any, store: Path, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Its messages would come twice."""
    (tmp_path / "link").symlink_to(store)
    monkeypatch.chdir(store.parent)
    columns, other = StructType([StructField("topic", StringType())]), shutil.copytree(store, tmp_path / "other")
    for first, again in ((store.name, f"./{store.name}"), (f"{store}/", store), (store, store.as_uri()),
                         (store, tmp_path / "link")):  # fmt: skip
        made = source.RmqDataSource({"paths": json.dumps([str(first), str(other), str(again)])})
        for call in (made.schema, lambda made=made: made.reader(columns), made.streamReader(columns).initialOffset):
            with pytest.raises(ValueError, match=f"option paths: .* is the same store as {first}; name it once"):
                call()
    with pytest.raises(Exception, match=f"ValueError: option paths: {store}/ is the same store as {store}; name"):
        spark.read.format("rmq").load([str(store), f"{store}/"])
    assert spark.read.format("rmq").load([str(store), str(other)]).count() == 2 * (COUNT + 10)


@pytest.mark.parametrize("second", ["s3a://b/a/", "s3://b/a?region=x", "s3://b/%61"])
def test_an_object_store_s_store_that_is_named_twice_is_an_error(second: str) -> None:
    asked = ReadOptions.parse({"paths": json.dumps(["s3://b/a", "s3://b/c", second])})
    with pytest.raises(ValueError, match="is the same store as s3://b/a; name it once"):
        source.check_once(asked)
    source.check_once(ReadOptions.parse({"paths": '["s3://b/a", "s3://b/a?endpoint=http://elsewhere:1"]'}))


def test_a_lone_surrogate_in_python_and_in_sql(spark: Any, store: Path) -> None:
    offsets = rmq.spark.offsets(str(store), "orders")
    with rmq.open(store) as opened:
        place = opened.query("orders", "o-1")[0].phy_offset
    frame = spark.sql("SELECT cast(X'EDA080' AS STRING) key UNION ALL SELECT 'o-1' UNION ALL SELECT NULL")
    assert sorted(map(str, (row[0] for row in frame.select(offsets("key")).collect()))) == ["None", f"[{place}]", "[]"]
    assert rmq.spark.lookup_join(frame, str(store), "orders", key="key", columns=["phy_offset"]).count() == 1
    with pytest.raises(ValueError, match="topic holds a lone surrogate"):
        rmq.spark.offsets(str(store), "\ud800")


@pytest.mark.parametrize("name", ["keys", "subscribe"])
def test_a_lone_surrogate_in_an_option_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"option {name} holds a lone surrogate"):
        ReadOptions.parse({"path": "/s", "subscribe": "t", name: '["a", "\\ud800"]'})


def test_keys_of_a_join_may_be_numbers_or_bytes(spark: Any, tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x") as made:
        made.put_many([rmq.Message("t", b"%d" % number, keys=str(number)) for number in range(5)])
    for kind in ("bigint", "binary"):
        frame = spark.sql(f"SELECT cast(cast(id AS STRING) AS {kind}) key FROM range(3, 8)")
        joined = rmq.spark.lookup_join(frame, str(tmp_path / "s"), "t", key="key", columns=["body"])
        assert sorted(bytes(row.body) for row in joined.collect()) == [b"3", b"4"]


def test_text_that_is_not_utf_8_comes_out_as_u_fffd(spark: Any, tmp_path: Path) -> None:
    """By every way out of the store; raw_properties keeps the bytes."""
    raw = b"KEYS\x01k \xff\x02TAGS\x01" + SURROGATE + b"\x02p\xfe\x01\xfd\x02"
    with rmq.open(tmp_path / "s", "x") as made:
        made.put(rmq.Message("t", b"\xff", raw_properties=raw))
        expected = made.scan().read_all().to_pylist()[0]
    path = str(tmp_path / "s")
    names = ["keys", "tags", "properties", "raw_properties"]
    row = spark.read.format("rmq").option("columns", ",".join(names)).load(path).first().asDict()
    assert (row["keys"], row["tags"], row["properties"]) == \
        (expected["keys"], expected["tags"], dict(expected["properties"]))  # fmt: skip
    assert bytes(row["raw_properties"]) == raw
    found = spark.sql("SELECT 'k' key").select(rmq.spark.messages(path, "t", columns=names)("key").alias("m")).first()
    assert found.m[0].asDict() == row
    kafka = spark.read.format("rmq").options(schemaMode="kafka", includeHeaders="true").load(path).first()
    assert [item.key for item in kafka.headers] == ["KEYS", "TAGS", "p\ufffd"]


MOST_MS = (2**63 - 1) // 1000  # what 64 bits of microseconds hold


def test_times_that_spark_cannot_hold_are_null(spark: Any, tmp_path: Path) -> None:
    """By every way out of the store. Producers set born_timestamp to what they like."""
    born, times = [5, 2**62, -(2**63), MOST_MS, MOST_MS + 1], iter([7, 8, 9, 10, 2**62])
    with rmq.open(tmp_path / "s", "x", clock=lambda: next(times, 2**62)) as made:
        for number, time in enumerate(born):
            made.put(rmq.Message("t", b"x", keys="k", queue_id=number, born_timestamp=time))
    path, names = str(tmp_path / "s"), ["queue_id", "born_timestamp", "store_timestamp"]
    micros = "SELECT queue_id, unix_micros(born_timestamp) born, unix_micros(store_timestamp) stored FROM {frame}"
    expected = {(0, 5000, 7000), (1, None, 8000), (2, None, 9000), (3, MOST_MS * 1000, 10_000), (4, None, None)}
    found = spark.sql("SELECT 'k' key").selectExpr("key", "1 one")
    for frame in (spark.read.format("rmq").option("columns", ",".join(names)).load(path),
                  found.select(F.inline(rmq.spark.messages(path, "t", columns=names)("key"))),
                  rmq.spark.lookup_join(found, path, "t", key="key", columns=names)):  # fmt: skip
        assert {tuple(row) for row in spark.sql(micros, frame=frame).collect()} == expected
    kafka = spark.read.format("rmq").option("schemaMode", "kafka").load(path)
    assert kafka.where("timestamp IS NULL").select("partition").collect() == [(4,)]


# ---- stores that are empty, gone, elsewhere ----


def test_an_empty_store_answers_nothing(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "s"
    rmq.open(path, "x").close()
    for name, call in functions_of(path).items():
        if name in ("exact", "raw", "messages"):
            assert call(pa.array(["a", None, ""])).to_pylist() == [[], None, []]
    frame = spark.createDataFrame([("a",), (None,)], "key string")
    assert rmq.spark.lookup_join(frame, str(path), "orders", key="key").collect() == []
    for options in ({"subscribe": "t", "scanMode": "queue"}, {"subscribe": "t", "keys": "a"}, {"assign": '{"t": [0]}'},
                    {"subscribePattern": ".*", "startingTimestamp": "5"}, {"schemaMode": "kafka"}):  # fmt: skip
        assert spark.read.format("rmq").options(**options).load(str(path)).collect() == [], options


def test_empty_partitions_and_empty_batches_join_nothing(spark: Any, store: Path) -> None:
    frame = spark.createDataFrame([("o-1",)], "key string").repartition(12)
    joined = rmq.spark.lookup_join(frame, str(store), "orders", key="key", columns=["body"])
    assert [bytes(row.body) for row in joined.collect()] == [b"body 1"]
    assert rmq.spark.lookup_join(frame.where("key = 'x'"), str(store), "orders", key="key").count() == 0


def reader_of(path: Path, **options: str) -> Any:
    from pyspark.sql.types import StructType

    asked = ReadOptions.parse({"path": str(path)} | options)
    return source.MessageReader(asked, StructType.fromDDL("topic string, body binary"))  # type: ignore[arg-type]


def read(reader: Any, plan: list[Any]) -> int:
    return sum(len(batch) for part in plan for batch in reader.read(pickle.loads(pickle.dumps(part))))


WAYS = [{}, {"subscribe": "orders"}, {"subscribe": "orders", "scanMode": "queue"},
        {"subscribe": "orders", "keys": "c-7"}, {"assign": '{"orders": [0, 1, 2, 3]}'}]  # fmt: skip


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_store_that_is_gone_since_the_plan_is_named(store: Path, tmp_path: Path, options: dict[str, str]) -> None:
    """So is one at a path that only the driver sees."""
    path = tmp_path / "s"
    shutil.copytree(store, path)
    reader = reader_of(path, **options)
    plan = reader.partitions()
    path.rename(tmp_path / "elsewhere")
    pattern = rf"host .*: {re.escape(str(path))}: no store is to be read here: .*need it at this path"
    with pytest.raises(ExecutorError, match=pattern):
        read(reader, plan)
    for call in (functions_of(path)[name] for name in ("exact", "raw", "messages")):
        with pytest.raises(ExecutorError, match=pattern):
            call(pa.array(["o-1"]))


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_what_expired_since_the_plan_is_data_loss(tmp_path: Path, options: dict[str, str]) -> None:
    config = rmq.StoreConfig(mapped_file_size_commit_log=16384, mapped_file_size_consume_queue=20 * 100)
    with rmq.open(tmp_path / "s", "x", config=config) as made:
        made.put_many(orders(1000))
        count = len(made.query("orders", "c-7", limit=None)) if "keys" in options else 1000
    readers = [reader_of(tmp_path / "s", failOnDataLoss=fail, **options) for fail in ("true", "false")]
    plans = [reader.partitions() for reader in readers]
    assert [read(reader, plan) for reader, plan in zip(readers, plans, strict=True)] == [count] * 2
    for number in range(3):
        (tmp_path / "s" / "commitlog" / f"{number * 16384:020d}").unlink()
    with pytest.raises(DataLossError, match="failOnDataLoss=false reads what is left"):
        read(readers[0], plans[0])
    assert 0 < read(readers[1], plans[1]) < count
    anew = reader_of(tmp_path / "s", **options)
    assert read(anew, anew.partitions()) == read(readers[1], plans[1])


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_store_that_was_made_anew_since_the_plan_is_data_loss(tmp_path: Path, options: dict[str, str]) -> None:
    """Though it has outgrown the one that was planned for; also when the read has begun."""
    path, config = tmp_path / "s", rmq.StoreConfig(mapped_file_size_commit_log=16384)

    def make() -> None:
        with rmq.open(path, "x", config=config) as made:
            made.put_many(orders(1000))

    make()
    readers = [reader_of(path, failOnDataLoss=fail, **options) for fail in ("true", "false")]
    plans = [reader.partitions() for reader in readers]
    count = read(readers[0], plans[0])
    shutil.rmtree(path)
    make()
    with pytest.raises(DataLossError, match="was made anew since the read was planned"):
        read(readers[0], plans[0])
    assert read(readers[1], plans[1]) == count
    plans = [reader.partitions() for reader in readers]
    begun = [reader.read(plan[0]) for reader, plan in zip(readers, plans, strict=True)]
    for rows in begun:
        next(rows)
    shutil.rmtree(path)
    make()
    with pytest.raises(DataLossError, match="was made anew since the read was planned"):
        list(begun[0])
    assert sum(map(len, begun[1])) <= count


def test_the_store_behind_these_tests_has_what_they_ask_for(store: Path) -> None:
    reader = reader_of(store)
    assert read(reader, reader.partitions()) == COUNT + 10


# ---- large bodies ----


@pytest.mark.parametrize("mode", ["shards", "single"])
def test_bodies_of_4_mib_go_through(spark: Any, tmp_path: Path, mode: str) -> None:
    """RocketMQ's limit on a message is 4 MiB for all of it; one byte more than fits is an error."""
    size = LARGE - 200
    frame = spark.sql(f"SELECT 't' topic, cast(repeat(cast(id AS STRING), {size}) AS BINARY) body, "
                      "cast(id AS STRING) keys FROM range(0, 3, 1, 1)")  # fmt: skip
    frame.write.format("rmq").mode("append").options(mode=mode, segmentBytes="16777216").save(str(tmp_path / "out"))
    rows = spark.read.format("rmq").load(str(tmp_path / "out")).collect()
    assert sorted(bytes(row.body[:2]) for row in rows) == [b"00", b"11", b"22"]
    assert {len(row.body) for row in rows} == {size}
    path = next((tmp_path / "out").glob("part-*"), tmp_path / "out")
    joined = rmq.spark.lookup_join(spark.sql("SELECT '1' key"), str(path), "t", key="key", columns=["body"])
    assert [bytes(row.body) for row in joined.collect()] == [b"1" * size]
    with pytest.raises(Exception, match="MessageTooLargeError"):
        (spark.sql(f"SELECT 't' topic, cast(repeat('x', {LARGE + 1}) AS BINARY) body")
         .write.format("rmq").mode("append").options(mode=mode).save(str(tmp_path / "more")))  # fmt: skip


def test_more_bodies_than_an_arrow_list_holds_are_an_error(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow parts a table whose bodies have 2 GiB and more: here a small one that is in parts already."""
    call = functions_of(store)["messages"]
    real = functions.Probe.found

    class Parted:
        def __init__(self, table: pa.Table) -> None:
            self._table = table

        def combine_chunks(self) -> pa.Table:
            return pa.concat_tables([self._table[:1], self._table[1:]])

    monkeypatch.setattr(functions.Probe, "found", lambda *given: Parted(real(*given)))
    with pytest.raises(ValueError, match=r"messages of 1 keys have more than 2 GiB; .*arrow\.maxRecordsPerBatch"):
        call(pa.array(["c-7"]))


# ---- a PySpark that is too old, or none ----


def told(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(("state", "reason"), [
    ("sys.modules['pyspark'] = None", "pyspark"),
    ("import pyspark.sql.functions as module; del module.arrow_udf", "cannot import name 'arrow_udf'")])  # fmt: skip
def test_the_wrong_pyspark_is_one_clear_line(state: str, reason: str) -> None:
    text = told(f"import sys\n{state}\nimport rmq.spark\nrmq.spark.offsets")
    assert text.startswith("ImportError: rmq.spark needs PySpark 4.1 or newer, pip install 'rmq[spark]': ")
    assert reason in text


def test_a_pyspark_without_arrow_streams_is_told_of_when_the_source_is_asked_for() -> None:
    text = told("import pyspark.sql.datasource as module\ndel module.DataSourceStreamArrowWriter\n"
                "import pyspark_rmq\nassert pyspark_rmq.DefaultSource.name() == 'rmq'\n"
                "pyspark_rmq.DefaultSource({})")  # fmt: skip
    assert text.startswith("ImportError: rmq.spark needs PySpark 4.1 or newer, pip install 'rmq[spark]': cannot import")
