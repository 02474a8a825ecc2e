"""One Spark session for all tests, and stores for it to read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq
from rmq.spark import opened
from spark.cluster import JVM, ROOT, Application
from spark.orders import TIME, orders

LOG4J = """\
rootLogger.level = off
"""


@pytest.fixture(autouse=True)
def _stores_are_let_go_of() -> Iterator[None]:
    """What a test read without Spark's workers stays open in the process of the tests, as it would in a worker."""
    yield
    for path, *_ in list(opened._stores):
        opened.forget(path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows what the processes of a cluster have printed."""
    report = yield
    if report.failed:
        report.sections += [("logs of the cluster", found.logs()) for found in getattr(item, "funcargs", {}).values()
                            if isinstance(found, Application)]  # fmt: skip
    return report


@pytest.fixture(scope="session")
def java() -> str:
    """Java's home. It is installed when missing and that can be done; else the tests fail: they hide no gap."""
    done = subprocess.run([ROOT / "tools" / "java.sh", "spark"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(done.stderr.splitlines()[-1], pytrace=False)
    return done.stdout.strip()


@pytest.fixture(scope="session")
def spark(java: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """local[2]."""
    from pyspark.sql import SparkSession

    place = tmp_path_factory.mktemp("spark")
    (place / "log4j2.properties").write_text(LOG4J)
    old = dict(os.environ)
    os.environ |= {"JAVA_HOME": java, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable,
                   "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}  # fmt: skip
    session = (
        SparkSession.builder.master("local[2,3]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.driver.memory", "1g")
        .config("spark.local.dir", str(place))
        .config("spark.sql.warehouse.dir", str(place / "warehouse"))
        .config("spark.python.worker.faulthandler.enabled", "true")
        .config("spark.sql.execution.pyspark.udf.faulthandler.enabled", "true")
        .config("spark.driver.extraJavaOptions", f"{JVM} -Dlog4j2.configurationFile={place}/log4j2.properties")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()
    os.environ.clear()
    os.environ.update(old)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,000 orders in four queues, a ms apart, then ten messages of another topic; segments of 64 KiB."""
    path = tmp_path_factory.mktemp("stores") / "a"
    config = rmq.StoreConfig(mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=20 * 1000,
                             max_hash_slot_num=1000, max_index_num=4000)  # fmt: skip
    clock = iter(range(TIME, 2**62))
    with rmq.open(path, "x", config=config, clock=lambda: next(clock)) as made:
        for message in orders():
            made.put(message)
        made.put_many([rmq.Message("other", b"x", queue_id=7)] * 10)
    return path


class Crash(BaseException): ...


@pytest.fixture
def crash(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes the nth call of a function the last one of this driver."""

    def at(owner: object, name: str, calls: int = 1) -> None:
        real, left = getattr(owner, name), [calls]

        def call(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                monkeypatch.setattr(owner, name, real)
                raise Crash
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    return at
