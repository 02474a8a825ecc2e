"""export: partitioned Parquet that readers take as it was, all of it or nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from commandline import assert_error, call, good, on_terminal
from hostile import TOPICS, make_hostile

import rmq
from rmq import exporting

DAY = 86_400_000
TIME = 1_700_000_000_000 // DAY * DAY
COUNT = 3000
ROOT = Path(__file__).resolve().parent.parent


def made(path: Path, messages: list[rmq.Message], step: int) -> Path:
    clock = iter(range(TIME, 2**62, step))
    config = rmq.StoreConfig(mapped_file_size_commit_log=65536, max_hash_slot_num=100, max_index_num=8000)
    with rmq.open(path, "x", config=config, clock=lambda: next(clock)) as store:
        for message in messages:
            store.put(message)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 messages of two topics in three queues, two minutes apart, in segments of 64 KiB."""
    return made(tmp_path_factory.mktemp("exporting") / "store",
                [rmq.Message("ab"[n % 2], b"%d" % n, keys=f"k{n}", tags="t", queue_id=n % 3, properties={"n": str(n)})
                 for n in range(COUNT)], 120_000)  # fmt: skip


def read(target: Path, **fields: pa.DataType) -> list[dict[str, Any]]:
    kinds = pa.schema(list(fields.items()))
    found = ds.dataset(target, partitioning=ds.partitioning(kinds, flavor="hive"))
    return sorted(found.to_table().to_pylist(), key=lambda row: row["phy_offset"])


def scanned(path: Path, **options: Any) -> list[dict[str, Any]]:
    with rmq.open(path) as store:
        return list(store.scan(**options).read_all().to_pylist())


def same(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Whether they are, but for what a partition adds."""
    return [{name: row[name] for name in other} for row, other in zip(rows, others, strict=True)] == others


# ---- what is written -----------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("split_bytes", [40_000, 2**40])
def test_an_export_is_the_scan(path: Path, tmp_path: Path, processes: int, split_bytes: int) -> None:
    told: list[tuple[int, int]] = []
    done = rmq.export(path, tmp_path / "lake", processes=processes, split_bytes=split_bytes,
                      progress=lambda *sizes: told.append(sizes))  # fmt: skip
    rows, expected = read(tmp_path / "lake", topic=pa.string(), date=pa.string()), scanned(path)
    assert same(rows, expected)
    assert all(row["date"] == str(row["store_timestamp"].date()) for row in rows)
    assert len({row["date"] for row in rows}) == 5
    assert done.path == str(tmp_path / "lake")
    assert done.row_count == sum(file.row_count for file in done.files) == COUNT
    sizes = {str(file.relative_to(done.path)): file.stat().st_size for file in Path(done.path).rglob("*.parquet")}
    assert sizes == {file.path: file.size for file in done.files}
    assert done.size == sum(sizes.values())
    assert [file.path for file in done.files] == sorted(sizes)
    assert os.listdir(tmp_path) == ["lake"]
    assert told[-1][0] == told[-1][1] > 0
    assert told == sorted(told)


def test_rows_of_a_file_are_in_log_order_with_the_types_of_scan(path: Path, tmp_path: Path) -> None:
    done = rmq.export(path, tmp_path / "lake", processes=1)
    with rmq.open(path) as store:
        schema = store.scan().schema
    for file in done.files:
        table = pq.read_table(os.path.join(done.path, file.path), partitioning=None)
        offsets = table["phy_offset"].to_pylist()
        assert offsets == sorted(offsets)
        kept = [name for name in schema.names if name != "topic"]
        assert table.schema.remove_metadata() == pa.schema([schema.field(name) for name in kept])
    with rmq.open(tmp_path / "again", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=65536)) as store:
        assert store.put_many(table, topic="b", results=False) == len(table)


@pytest.mark.slow
def test_partitions_by_hour_and_queue(path: Path, tmp_path: Path) -> None:
    rmq.export(path, tmp_path / "lake", processes=1, partition_by=["queue_id", "date", "hour"])
    rows = read(tmp_path / "lake", queue_id=pa.int32(), date=pa.date32(), hour=pa.int32())
    assert same(rows, scanned(path))
    assert all((row["date"], row["hour"]) == (row["store_timestamp"].date(), row["store_timestamp"].hour)
               for row in rows)  # fmt: skip
    assert (tmp_path / "lake/queue_id=2/date=2023-11-14/hour=07").is_dir()


def test_without_partitions_files_lie_in_the_target(path: Path, tmp_path: Path) -> None:
    done = rmq.export(path, tmp_path / "lake", processes=1, partition_by=iter(()), split_bytes=2**40)
    assert [file.path for file in done.files] == ["part-00000-0.parquet"]
    assert read(tmp_path / "lake") == scanned(path)


def test_topics_times_and_columns_choose(path: Path, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"topics": ["b"], "begin": TIME + 120_000, "end": TIME + 600_000,
                              "columns": ["body", "phy_offset", "topic"]}  # fmt: skip
    rmq.export(path, tmp_path / "lake", processes=1, **chosen)
    rows = read(tmp_path / "lake", topic=pa.string(), date=pa.string())
    assert same(rows, scanned(path, **chosen))
    assert list(rows[0]) == ["body", "phy_offset", "topic", "date"]


@pytest.mark.parametrize("compression", ["snappy", "gzip", "none"])
def test_compressions(path: Path, tmp_path: Path, compression: str) -> None:
    done = rmq.export(path, tmp_path / "lake", processes=1, compression=compression)
    column = pq.read_metadata(os.path.join(done.path, done.files[0].path)).row_group(0).column(0)
    assert column.compression == {"none": "UNCOMPRESSED"}.get(compression, compression.upper())
    assert read(tmp_path / "lake", topic=pa.string(), date=pa.string())[-1]["body"] == b"%d" % (COUNT - 1)


def test_rounds_and_row_groups_bound_what_a_task_holds(path: Path, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(exporting, "BATCH_ROWS", 100)
    monkeypatch.setattr(exporting, "ROUND_BYTES", 100_000)
    monkeypatch.setattr(exporting, "ROW_GROUP_BYTES", 20_000)
    done = rmq.export(path, tmp_path / "lake", processes=1, partition_by=[], split_bytes=2**40)
    assert [file.path for file in done.files[:2]] == ["part-00000-0.parquet", "part-00000-1.parquet"]
    groups = [pq.read_metadata(os.path.join(done.path, file.path)).num_row_groups for file in done.files]
    assert len(groups) > 4
    assert set(groups[:-1]) <= {5, 6, 7}
    assert read(tmp_path / "lake") == scanned(path)


def test_an_empty_store_makes_an_empty_directory(tmp_path: Path) -> None:
    rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=65536)).close()
    done = rmq.export(tmp_path / "s", tmp_path / "lake")
    assert (done.files, done.row_count, done.size) == ((), 0, 0)
    assert list((tmp_path / "lake").iterdir()) == []
    assert rmq.export(tmp_path / "s", tmp_path / "lake").row_count == 0  # into the empty one


# ---- hostile values ------------------------------------------------------------------------------


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    return make_hostile(tmp_path / "hostile")


def test_topics_read_back_whatever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for topic in [*TOPICS, exporting.NULL]:
        name = exporting.escaped(topic)
        assert not {"/", "=", ".", "\0", "\n"} & set(name)
        place = tmp_path / "lake" / f"topic={name}"
        place.mkdir(parents=True)
        pq.write_table(pa.table({"body": [topic.encode()]}), place / "part.parquet")
    kinds = pa.schema([("topic", pa.string())])
    partitioning = ds.HivePartitioning(kinds, null_fallback="no topic's name")
    rows = ds.dataset(tmp_path / "lake", partitioning=partitioning).to_table().to_pylist()
    assert len(rows) == len(TOPICS) + 1
    assert all(row["topic"].encode() == row["body"] for row in rows)


def test_a_store_of_hostile_topics_is_exported(hostile: Path, tmp_path: Path) -> None:
    rmq.export(hostile, tmp_path / "lake", processes=1)
    rows = read(tmp_path / "lake", topic=pa.string(), date=pa.string())
    assert [row["topic"] for row in rows] == TOPICS
    assert all(row["topic"].encode() == row["body"] for row in rows)


def test_no_topic_is_null() -> None:
    assert exporting.escaped("") == exporting.NULL


def test_a_topic_that_is_too_long_for_a_name_is_told(tmp_path: Path) -> None:
    assert len(exporting.escaped("x" * 249)) == 249
    with pytest.raises(OSError, match="more than 255 bytes"):
        exporting.escaped("x" * 250)
    store = made(tmp_path / "s", [rmq.Message("%" * 100, b"")], 1)
    with pytest.raises(OSError, match=r"'%%%.* partition_by without topic"):
        rmq.export(store, tmp_path / "lake", processes=1)
    assert os.listdir(tmp_path) == ["s"]
    rmq.export(store, tmp_path / "lake", processes=1, partition_by=["date"])
    assert read(tmp_path / "lake", date=pa.string())[0]["topic"] == "%" * 100


@pytest.mark.parametrize(("day", "text"), [
    (0, "1970-01-01"), (-719_162, "0001-01-01"), (-719_163, exporting.NULL), (2_932_896, "9999-12-31"),
    (2_932_897, exporting.NULL), (-1, "1969-12-31"), (2**63 // DAY, exporting.NULL)])  # fmt: skip
def test_days_without_a_date_are_null(day: int, text: str) -> None:
    assert exporting.date_of(day) == text


@pytest.mark.parametrize("time", [-(2**63), -1, 0, 3_599_999, 3_600_000, 2**63 - 1])
def test_any_store_timestamp_has_a_date_and_an_hour(time: int) -> None:
    batch = pa.record_batch({"store_timestamp": pa.array([time], pa.timestamp("ms", "UTC"))})
    [(directory, rows)] = exporting.partitions_of(batch, ("date", "hour"))
    day, hour = time // DAY, time % DAY // 3_600_000
    date = exporting.date_of(day)
    assert directory == f"date={date}/hour={exporting.NULL if date == exporting.NULL else f'{hour:02d}'}"
    assert rows.equals(batch)


def test_a_batch_is_taken_apart_by_all_values() -> None:
    batch = pa.record_batch({"topic": ["a", "b", "a", "b", "a"], "queue_id": pa.array([0, 0, 1, 0, 0], pa.int32())})
    found = exporting.partitions_of(batch, ("topic", "queue_id"))
    assert sorted((directory, rows.num_rows) for directory, rows in found) == [
        ("topic=a/queue_id=0", 2), ("topic=a/queue_id=1", 1), ("topic=b/queue_id=0", 2)]  # fmt: skip
    assert exporting.partitions_of(batch.slice(0, 0), ("topic",)) == []
    assert exporting.partitions_of(batch.slice(1, 1), ("topic",)) == [("topic=b", batch.slice(1, 1))]


# ---- all or nothing ------------------------------------------------------------------------------


def spoil(path: Path) -> None:
    segments = sorted((path / "commitlog").iterdir())
    with open(segments[-2], "r+b") as segment:
        segment.seek(1000)
        segment.write(b"\xff" * 50)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_damage_leaves_nothing(tmp_path: Path, processes: int) -> None:
    copy = made(tmp_path / "s", [rmq.Message("a", b"%d" % n * 50) for n in range(1500)], 1)
    spoil(copy)
    with pytest.raises(rmq.CorruptFileError):
        rmq.export(copy, tmp_path / "lake", processes=processes, split_bytes=30_000)
    assert os.listdir(tmp_path) == ["s"]


@pytest.mark.slow
def test_a_killed_export_leaves_its_own_directory_and_nothing_else(path: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(f"""
        import rmq, time

        def wait(done, total):
            print(done, flush=True)
            time.sleep(60)

        if __name__ == "__main__":
            rmq.export({str(path)!r}, {str(tmp_path / "lake")!r}, processes=2, split_bytes=40_000, progress=wait)
        """))
    job = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert job.stdout is not None
    job.stdout.readline()
    job.send_signal(signal.SIGKILL)
    job.wait(20)
    job.stdout.read()  # the end of the pipe: no process is left
    job.stdout.close()
    left = [name for name in os.listdir(tmp_path) if name != "job.py"]
    assert len(left) == 1
    assert left[0].startswith(exporting.TEMPORARY)
    assert rmq.export(path, tmp_path / "lake", processes=1).row_count == COUNT


def test_ctrl_c_leaves_nothing(path: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rmq.export(path, tmp_path / "lake", processes=1, progress=interrupt)
    assert os.listdir(tmp_path) == []


def test_the_target_must_be_new_or_empty(path: Path, tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake" / "x").touch()
    with pytest.raises(FileExistsError, match="lake"):
        rmq.export(path, tmp_path / "lake")
    with pytest.raises(FileExistsError, match="x"):
        rmq.export(path, tmp_path / "lake" / "x")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        rmq.export(path, tmp_path / "nowhere" / "lake")
    with pytest.raises(FileNotFoundError, match="no such store"):
        rmq.export(tmp_path / "none", tmp_path / "new")
    for place in (path, path / "lake"):
        with pytest.raises(ValueError, match="lies in the store"):
            rmq.export(path, place)
    elsewhere = rmq.StoreConfig(store_path_commit_log=str(tmp_path))
    with pytest.raises(ValueError, match="lies in the store"):
        rmq.export(path, tmp_path / "lake", config=elsewhere)
    with pytest.raises(ValueError, match="target s3://b/lake is no directory of this machine"):
        rmq.export(path, "s3://b/lake")
    assert os.listdir(tmp_path) == ["lake"]


def test_a_link_to_an_empty_directory_is_that_directory(path: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    rmq.export(path, tmp_path / "link", processes=1)
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path / "real")) == ["topic=a", "topic=b"]


def test_a_target_that_cannot_be_replaced_is_told_before_anything_is_read(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> None:
        raise OSError(16, "Device or resource busy")

    (tmp_path / "lake").mkdir()
    monkeypatch.setattr(os, "rename", busy)
    with pytest.raises(OSError, match="name a directory in it") as caught:
        rmq.export(path, tmp_path / "lake", processes=1, progress=lambda *_: pytest.fail("was read"))
    assert caught.value.filename == str(tmp_path / "lake")
    assert os.listdir(tmp_path) == ["lake"]


def test_a_second_try_of_a_task_is_another_place(path: Path, tmp_path: Path) -> None:
    """As Spark runs one again, or twice at once."""

    def twice(task: Callable[[Any], Any], items: Any) -> Iterator[Any]:
        for item in items:
            task(item)
            yield task(item)

    done = exporting.run_export(twice, path, tmp_path / "lake", partition_by=["topic"], compression="zstd",
                                columns=None, split_bytes=60_000)  # fmt: skip
    assert done.row_count == COUNT
    assert same(read(tmp_path / "lake", topic=pa.string()), scanned(path))


def test_what_is_cleaned_away_before_it_is_read_is_damage(path: Path, tmp_path: Path) -> None:
    store = shutil.copytree(path, tmp_path / "s")
    first = store / "commitlog" / f"{0:020d}"

    def late(task: Callable[[Any], Any], items: Any) -> Iterator[Any]:
        first.unlink(missing_ok=True)
        return map(task, items)

    options: dict[str, Any] = {"partition_by": ["topic"], "compression": "zstd", "columns": None}
    with pytest.raises(rmq.CorruptFileError, match="the log begins at byte 65536"):
        exporting.run_export(late, store, tmp_path / "lake", **options)
    assert os.listdir(tmp_path) == ["s"]
    shutil.copyfile(path / "commitlog" / first.name, first)
    done = exporting.run_export(late, store, tmp_path / "lake", on_damage="skip", **options)
    assert [(item.path, item.begin_phy_offset, item.end_phy_offset) for item in done.lost] == [(str(first), 0, 65536)]
    assert same(read(tmp_path / "lake", topic=pa.string()), scanned(store))


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "error", "text"), [
    ({"partition_by": "topic"}, TypeError, "partition_by"), ({"partition_by": ["day"]}, ValueError, "'day'.*queue_id"),
    ({"partition_by": ["date", "date"]}, ValueError, "repeats"), ({"compression": "lz4"}, ValueError, "zstd"),
    ({"columns": ["topic"]}, ValueError, "columns"), ({"columns": ["nope"]}, ValueError, "nope"),
    ({"topics": "a"}, TypeError, "topics"), ({"begin": "x"}, TypeError, "begin"),
    ({"processes": 0}, ValueError, "processes"), ({"partition_by": None}, TypeError, "partition_by"),
    ({"split_bytes": 0}, ValueError, "split_bytes")])  # fmt: skip
def test_strange_arguments_are_errors(path: Path, tmp_path: Path, options: dict[str, Any], error: type[Exception],
                                      text: str) -> None:  # fmt: skip
    with pytest.raises(error, match=text):
        rmq.export(path, tmp_path / "lake", **options)
    assert os.listdir(tmp_path) == []


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_lists_files_and_counts_on_stderr(path: Path, tmp_path: Path) -> None:
    done = good("export", path, tmp_path / "lake", "--topic", "b", "--processes", 1, "--partition-by", "topic")
    assert [row["path"] for row in done.rows] == ["topic=b/part-00000-0.parquet"]
    assert done.rows[0]["row_count"] == COUNT // 2
    assert done.notes[0].startswith(f"rmq: {tmp_path}/lake: 1,500 messages in 1 file, ")
    table = good("export", path, tmp_path / "all", "--partition-by", "none", "--processes", 1, "--columns",
                 "phy_offset,body", "-o", "table")  # fmt: skip
    assert "part-00000-0.parquet" in table.out
    assert pq.read_table(tmp_path / "all").column_names == ["phy_offset", "body"]


def test_the_command_ends_with_codes(path: Path, tmp_path: Path) -> None:
    empty = call("export", path, tmp_path / "none", "--topic", "zzz", "--processes", 1)
    assert (empty.code, empty.out) == (1, "")
    assert "0 messages in 0 files" in empty.err
    assert_error(call("export", path, tmp_path / "lake", "--columns", "nope"), 2, "nope", "export --help")
    assert_error(call("export", path, tmp_path / "lake", "--partition-by", "day"), 2, "day")
    assert_error(call("export", path, path / "lake"), 2, "lies in the store")
    (tmp_path / "full" / "x").mkdir(parents=True)
    assert_error(call("export", path, tmp_path / "full"), 4, f"{tmp_path}/full: an export makes a new directory")
    copy = made(tmp_path / "s", [rmq.Message("a", b"%d" % n * 50) for n in range(1500)], 1)
    spoil(copy)
    assert_error(call("export", copy, tmp_path / "lake", "--processes", 1), 3, "commitlog")


@pytest.mark.slow
def test_the_command_uses_processes_and_shows_a_bar_on_a_terminal_only(path: Path, tmp_path: Path) -> None:
    shown = on_terminal("export", path, tmp_path / "lake", "--processes", 2)
    assert shown.code == 0
    assert "%" in shown.out
    assert "%" not in good("export", path, tmp_path / "other", "--processes", 1).err
    assert same(read(tmp_path / "lake", topic=pa.string(), date=pa.string()), scanned(path))


@pytest.mark.parametrize("mode", [0o700, 0o2770, 0o755, 0o500])
def test_an_empty_directory_keeps_its_mode_and_its_group(path: Path, tmp_path: Path, mode: int) -> None:
    target = tmp_path / "out"
    target.mkdir()
    if os.getuid() == 0:
        os.chown(target, 1000, 1001)
    target.chmod(mode)
    before = target.stat()
    rmq.export(path, target, processes=1)
    after = target.stat()
    assert after.st_ino != before.st_ino
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


def test_who_may_not_give_a_directory_away_exports_there_all_the_same(path: Path, tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    target.mkdir()
    os.chown(target, 65534, -1) if os.getuid() == 0 else None
    target.chmod(0o777)

    def chown(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "chown", chown)
    assert rmq.export(path, target, processes=1).row_count
    assert (target.stat().st_uid, target.stat().st_mode & 0o777) == (os.getuid(), 0o777)


def test_a_try_that_works_on_after_the_export_has_ended_makes_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of Spark's speculation."""
    with rmq.open(tmp_path / "s", "x") as store:
        store.put(rmq.Message("T", b"x"))
    flush = exporting.PartWriter.flush

    def late(writer: exporting.PartWriter) -> None:
        shutil.rmtree(writer._root.parent)
        flush(writer)

    monkeypatch.setattr(exporting.PartWriter, "flush", late)
    with pytest.raises(FileNotFoundError):
        rmq.export(tmp_path / "s", tmp_path / "out", processes=1)
    assert os.listdir(tmp_path) == ["s"]
