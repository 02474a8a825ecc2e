"""A Spark application that is told what to do: python application.py MASTER PLACE DESCRIPTOR SETTINGS.

Each line of stdin is a step, {"step": name, "arguments": {...}}; a line to the descriptor answers it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

import rmq.spark

JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
PATIENCE_S = 120.0
EXECUTOR = b"CoarseGrainedExecutorBackend"


def executor_pid() -> int:
    """The JVM whose Python worker this process is."""
    pid = os.getppid()
    while EXECUTOR not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


class Hold:
    """Rows as they are. The first task to see a body hands its batch on, writes the marker, and waits for its end; with
    races for another try of it, beside which it then goes on.

    The marker says which executor it is, and which partition and batch it reads.
    """

    def __init__(self, marker: str, body: str, races: bool = False) -> None:
        self.marker, self.body, self.races = marker, body.encode(), races

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            if pc.index(batch.column("body"), self.body).as_py() >= 0 and self._is_first():
                self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if self.races and len(list(Path(self.marker).parent.glob(f"{Path(self.marker).name}.*"))) > 1:
                return
            time.sleep(0.01)
        raise RuntimeError(f"nothing came within {PATIENCE_S:.0f} s")

    def _is_first(self) -> bool:
        context = TaskContext.get()
        assert context is not None
        own = Path(f"{self.marker}.{os.getpid()}")
        own.write_text(json.dumps({"pid": executor_pid(), "partition": context.partitionId(),
                                   "attempt": context.attemptNumber()}))  # fmt: skip
        with contextlib.suppress(FileExistsError):
            os.link(own, self.marker)
            return True
        return False


def held(frame: DataFrame, hold: dict[str, Any] | None) -> DataFrame:
    return frame if hold is None else frame.mapInArrow(Hold(**hold), frame.schema)


def load(spark: SparkSession, store: str, options: dict[str, str], hold: dict[str, Any] | None) -> DataFrame:
    return held(spark.read.format("rmq").options(**options).load(store), hold)


def rows_of(frame: DataFrame, *names: str) -> list[list[Any]]:
    return [[bytes(value).decode() if isinstance(value, bytearray | bytes) else value for value in row]
            for row in frame.select(*names).collect()]  # fmt: skip


def read(spark: SparkSession, store: str, options: dict[str, str], hold: dict[str, Any] | None = None) -> Any:
    return rows_of(load(spark, store, options, hold), "topic", "queue_id", "queue_offset", "body")


def write(spark: SparkSession, store: str, out: str, options: dict[str, str], to: dict[str, str],
          hold: dict[str, Any] | None = None) -> None:  # fmt: skip
    load(spark, store, options, hold).write.format("rmq").mode("append").options(**to).save(out)


def look_up(spark: SparkSession, store: str, topic: str, keys: list[str | None]) -> Any:
    frame = spark.createDataFrame([(key,) for key in keys], "key string").repartition(2)
    offsets = rmq.spark.offsets(store, topic, max_offsets=None)
    joined = rmq.spark.lookup_join(frame, store, topic, key="key", columns=["phy_offset", "body"])
    return {"offsets": rows_of(frame.select("key", offsets("key").alias("offsets")), "key", "offsets"),
            "joined": rows_of(joined, "key", "phy_offset", "body")}  # fmt: skip


def stream(spark: SparkSession, store: str, out: str, options: dict[str, str], hold: dict[str, Any] | None = None,
           sink: str = "parquet", to: dict[str, str] | None = None) -> int:  # fmt: skip
    """All there is now; returns the number of batches with rows."""
    frame = held(spark.readStream.format("rmq").options(**options).load(store), hold)
    query = (frame.writeStream.format(sink).options(**to or {}, checkpointLocation=f"{out}.checkpoint")
             .trigger(availableNow=True).start(out))  # fmt: skip
    query.awaitTermination()
    return sum(progress["numInputRows"] > 0 for progress in query.recentProgress)


def read_parquet(spark: SparkSession, out: str) -> Any:
    return rows_of(spark.read.parquet(out), "topic", "queue_id", "queue_offset", "body")


def executors(spark: SparkSession) -> Any:
    """All that the application has had, the driver left out."""
    known = spark.sparkContext._jsc.sc().statusStore().executorList(False)  # type: ignore[union-attr]
    items = (known.apply(number) for number in range(known.size()))
    return [{"id": item.id(), "is_active": item.isActive()} for item in items if item.id() != "driver"]


def where(spark: SparkSession) -> list[int]:
    """The executors on which four tasks of Python run."""

    def told(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(0.5)  # so that one executor does not take them all
            yield pa.record_batch({"id": pa.array([executor_pid()] * len(batch), pa.int64())})

    return [row.id for row in spark.range(4, numPartitions=4).mapInArrow(told, "id bigint").collect()]


STEPS = {step.__name__: step for step in (read, write, look_up, stream, read_parquet, executors, where)}


def session(master: str, place: str, settings: dict[str, str]) -> SparkSession:
    log4j = Path(place) / "log4j2.properties"
    log4j.write_text("rootLogger.level = warn\nrootLogger.appenderRef.out.ref = out\nappender.out.type = Console\n"
                     "appender.out.name = out\nappender.out.target = SYSTEM_ERR\n")  # fmt: skip
    java = f"{JVM} -Dlog4j2.configurationFile={log4j}"
    return (
        SparkSession.builder.master(master)
        .config(map={f"spark.{name}": value for name, value in settings.items()})
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "512m")
        .config("spark.driver.extraJavaOptions", java)
        .config("spark.executor.memory", "1g")
        .config("spark.executor.extraJavaOptions", java)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
        .config("spark.sql.warehouse.dir", f"{place}/warehouse")
        .getOrCreate()
    )


def main() -> None:
    master, place, descriptor, settings = sys.argv[1:]
    spark = session(master, place, json.loads(settings))
    with os.fdopen(int(descriptor), "w") as answers:
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                answer = {"answer": STEPS[asked["step"]](spark, **asked["arguments"])}
            except Exception:
                answer = {"error": traceback.format_exc()}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
