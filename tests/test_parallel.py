"""scan_map: parts of a store on several processes; together they are one scan."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rmq
import rmq.parallel
from rmq.parallel import plan_scan
from rmq.pool import in_processes
from rmq.splits import time_ranges

TIME = 1_700_000_000_000
COUNT = 3000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 messages two minutes apart, in segments of 64 KiB."""
    made = tmp_path_factory.mktemp("parallel") / "store"
    clock = iter(range(TIME, 2**62, 120_000))
    config = rmq.StoreConfig(mapped_file_size_commit_log=65536, max_hash_slot_num=100, max_index_num=8000)
    with rmq.open(made, "x", config=config, clock=lambda: next(clock)) as store:
        for number in range(COUNT):
            store.put(rmq.Message("ab"[number % 2], b"%d" % number, keys=f"k{number}"))
    return made


def bodies(batches: Iterator[pa.RecordBatch]) -> list[bytes]:
    return [body for batch in batches for body in batch.column("body").to_pylist()]


def process_of(batches: Iterator[pa.RecordBatch]) -> int:
    return os.getpid()


def raises(batches: Iterator[pa.RecordBatch]) -> None:
    raise rmq.CorruptFileError("a", 7, "reason")


class Refused(Exception):
    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"{reason} {number}")


def refuses(batches: Iterator[pa.RecordBatch]) -> None:
    raise Refused(7, "refused")


def holds_a_file(batches: Iterator[pa.RecordBatch]) -> None:
    with open(os.devnull) as file:
        raise ValueError("held", file)


def dies(batches: Iterator[pa.RecordBatch]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def double(number: int) -> int:
    return 2 * number


@pytest.mark.parametrize("processes", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("split_bytes", [3001, 65536, 2**40])
def test_parts_together_are_one_scan_in_its_order(path: Path, processes: int, split_bytes: int) -> None:
    parts = list(rmq.scan_map(path, bodies, processes=processes, split_bytes=split_bytes))
    assert [body for part in parts for body in part] == [b"%d" % number for number in range(COUNT)]
    assert len(parts) >= (100 if split_bytes == 3001 else processes)


def test_options_are_those_of_scan(path: Path) -> None:
    found = rmq.scan_map(path, bodies, processes=1, topics=iter(["b"]), begin=TIME + 120_000, end=TIME + 600_000,
                         columns=iter(["body"]), split_bytes=5000)  # fmt: skip
    assert [body for part in found for body in part] == [b"1", b"3", b"5"]
    with pytest.raises(ValueError, match="nope"):
        rmq.scan_map(path, bodies, columns=["nope"])
    with pytest.raises(TypeError, match="colums"):
        rmq.scan_map(path, bodies, colums=["body"])
    with pytest.raises(TypeError, match="lost"):
        rmq.scan_map(path, bodies, on_damage="skip", lost=[])  # of another process: it would stay empty
    with pytest.raises(TypeError, match="function"):
        rmq.scan_map(path, "bodies")  # type: ignore[arg-type]


def test_segments_outside_of_the_time_range_are_not_planned(path: Path) -> None:
    with rmq.open(path) as store:
        rows = store.table("segments").read_all().to_pylist()
        begins = [row["begin_phy_offset"] for row in rows]
        middle = int(rows[2]["first_store_timestamp"].timestamp() * 1000)
        [(first, last)] = time_ranges(store, middle, middle)
        assert begins.index(first) == 1  # a clock may have gone back for up to an hour
        assert begins.index(last) == 3
        assert time_ranges(store, None, None) == [(0, store.max_phy_offset)]
        assert time_ranges(store, None, TIME - 10**9) == []
        assert time_ranges(store, middle, None, begins[2] + 5, begins[4]) == [(begins[2] + 5, begins[4])]


@pytest.mark.slow
def test_the_parts_run_in_processes_of_their_own(path: Path) -> None:
    found = set(rmq.scan_map(path, process_of, processes=2, split_bytes=3000))
    assert os.getpid() not in found
    assert 1 <= len(found) <= 2
    assert set(rmq.scan_map(path, process_of, processes=1)) == {os.getpid()}


def processes_of(path: Path) -> set[int]:
    """0: this one."""
    return {number - os.getpid() for number in rmq.scan_map(path, process_of, processes=2, split_bytes=3000)}


@pytest.mark.slow
def test_a_worker_of_a_pool_does_every_part_itself(path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(processes_of, (path,)) == {0}


@pytest.mark.slow
def test_a_small_log_is_one_part_in_this_process_unless_processes_are_asked_for(path: Path) -> None:
    assert list(rmq.scan_map(path, process_of)) == [os.getpid()]
    assert len(list(rmq.scan_map(path, process_of, processes=3))) == 3


def test_each_core_gets_a_part_that_is_worth_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rmq.parallel, "cores", lambda: 64)
    with rmq.open(tmp_path / "s", "x") as store:
        store.put_many([rmq.Message("T", bytes(10_000))] * 700)
        size = store.max_phy_offset
    tasks = plan_scan(tmp_path / "s", min_partitions=None)
    assert len(tasks) == size // 2**20 == 6
    assert sum(task.split.size for task in tasks) == size


@pytest.mark.slow
def test_errors_of_a_part_come_as_they_are_and_a_killed_process_is_told(path: Path) -> None:
    with pytest.raises(rmq.CorruptFileError, match="a: byte 7: reason"):
        list(rmq.scan_map(path, raises, processes=2))
    with pytest.raises(RuntimeError, match="Refused: refused 7"):
        list(rmq.scan_map(path, refuses, processes=2))
    with pytest.raises(RuntimeError, match=r"ValueError: .*held"):
        list(rmq.scan_map(path, holds_a_file, processes=2))
    with pytest.raises(ChildProcessError, match="killed"):
        list(rmq.scan_map(path, dies, processes=2))


def test_an_empty_store_has_no_parts(tmp_path: Path) -> None:
    rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=65536)).close()
    assert list(rmq.scan_map(tmp_path / "s", bodies)) == []


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), ("2", TypeError)])
def test_a_strange_number_of_processes_is_an_error(count: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="processes"):
        in_processes(count)  # type: ignore[arg-type]


def test_one_process_needs_no_pickling() -> None:
    assert list(in_processes(1)(lambda number: number + 1, [1, 2])) == [2, 3]
    assert list(in_processes(4)(double, [])) == []


@pytest.mark.parametrize(("task", "item"), [(lambda number: number, 2), (double, threading.Lock())])
def test_what_cannot_be_pickled_is_an_error_at_once(task: Callable[[Any], int], item: object) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError), match="pickle"):
        list(in_processes(2)(task, [1, item, 3]))


class Forgetful:
    """Is pickled, and not unpickled."""

    def __init__(self, *, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[object, ...]:
        return Forgetful, (self.number,)


def forgetful(number: int) -> Forgetful:
    return Forgetful(number=number)


def test_an_answer_that_cannot_be_unpickled_is_no_dead_process() -> None:
    with pytest.raises(RuntimeError, match="cannot be unpickled") as caught:
        list(in_processes(2)(forgetful, [1, 2]))
    assert "takes 1 positional argument" in str(caught.value.__cause__)


def first_row(batches: Iterator[pa.RecordBatch]) -> int:
    return int(next(batches).num_rows)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_part_without_messages_does_not_end_the_answers(path: Path, processes: int) -> None:
    """next() of no batches is a StopIteration, which would have passed for the end of all parts."""
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(rmq.scan_map(path, first_row, processes=processes, split_bytes=40_000, topics=["none"]))


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), ("2", TypeError),
                                             (None, TypeError), (1.5, TypeError)])  # fmt: skip
def test_a_strange_size_of_parts_is_an_error(path: Path, size: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="split_bytes"):
        rmq.scan_map(path, bodies, processes=1, split_bytes=size)  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_interrupt_with_an_answer_under_way_ends_in_silence(tmp_path: Path) -> None:
    """Edge: the answer arrives before the asker lets go."""
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent("""
        import multiprocessing, signal, time
        from rmq.pool import in_processes

        def task(number):
            time.sleep(0.2)
            return number

        def interrupt(*_):
            time.sleep(1)
            raise KeyboardInterrupt

        if __name__ == "__main__":
            signal.signal(signal.SIGALRM, interrupt)
            answers = in_processes(2)(task, range(60))
            next(answers)
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            try:
                list(answers)
            except KeyboardInterrupt:
                print("interrupted", len(multiprocessing.active_children()))
    """))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=60,
                          env=os.environ | {"PYTHONPATH": str(Path(rmq.__file__).parent.parent)})  # fmt: skip
    assert (done.stdout, done.stderr) == ("interrupted 0\n", "")


@pytest.mark.slow
def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent("""
        import os, time
        from rmq.pool import in_processes

        def task(number):
            print(os.getpid(), flush=True)
            time.sleep(60)

        if __name__ == "__main__":
            list(in_processes(2)(task, [1, 2]))
        """))
    root = Path(__file__).resolve().parent.parent
    job = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True,
                           env=os.environ | {"PYTHONPATH": str(root)})  # fmt: skip
    assert job.stdout is not None
    assert len({int(job.stdout.readline()) for _ in range(2)}) == 2
    job.kill()
    job.wait(20)
    assert job.stdout.read() == ""  # the end of the pipe: no process holds it any more
    job.stdout.close()


# ---- a log that is another one when its parts are read -------------------------------------------


def cleaned(path: Path) -> tuple[int, int]:
    """Removes all segments but the last; the bounds of what is gone."""
    with rmq.open(path, "r+") as store:
        low = store.min_phy_offset
        for file in (path / "commitlog").iterdir():
            os.utime(file, (1, 1))
        store.clean(limit=None, max_used_percent=100)
        return low, store.min_phy_offset


def shorter(path: Path) -> tuple[int, int]:
    """Puts an older copy in its place; the bounds of what is gone."""
    with rmq.open(path) as store:
        end, bodies = store.max_phy_offset, store.scan(columns=["topic", "body"]).read_all().slice(0, COUNT // 2)
    shutil.rmtree(path)
    with rmq.open(path, "x", config=rmq.StoreConfig(mapped_file_size_commit_log=65536)) as store:
        store.put_many(bodies)
        return store.max_phy_offset, end


Loss = Callable[[Path], tuple[int, int]]
LOSSES = [pytest.param(cleaned, "the log begins at byte {1}$", id="cleaned"),
          pytest.param(shorter, "the log ends at byte {0}$", id="shorter")]  # fmt: skip


@pytest.mark.parametrize(("lose", "text"), LOSSES)
def test_what_the_log_has_lost_since_the_plan_is_damage(path: Path, tmp_path: Path, lose: Loss, text: str) -> None:
    store = shutil.copytree(path, tmp_path / "s")
    answers = rmq.scan_map(store, bodies, processes=1, split_bytes=50_000)
    begin, end = lose(store)
    with pytest.raises(rmq.CorruptFileError, match=text.format(begin, end)) as error:
        list(answers)
    file = f"{begin - begin % 65536:020d}"
    assert (error.value.path, error.value.offset) == (str(store / "commitlog" / file), begin % 65536)


@pytest.mark.parametrize(("lose", "text"), LOSSES)
def test_what_is_lost_is_passed_over_and_listed(path: Path, tmp_path: Path, lose: Loss, text: str,
                                                caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    store, lost = shutil.copytree(path, tmp_path / "s"), []
    tasks = plan_scan(store, split_bytes=50_000, on_damage="skip")
    begin, end = lose(store)
    with rmq.open(store) as left:
        found = [body for task in tasks for body in bodies(task.batches(left, lost=lost))]
        assert found == left.scan().read_all()["body"].to_pylist()
    assert [lost[0].begin_phy_offset, *(item.end_phy_offset for item in lost)] == \
        [*(item.begin_phy_offset for item in lost), end]  # without a gap  # fmt: skip
    assert lost[0].begin_phy_offset == begin
    assert all(re.search(text.format(begin, end), item.reason) for item in lost)
    assert all(int(Path(item.path).name) == item.begin_phy_offset // 65536 * 65536 for item in lost)
    assert len(caplog.records) == len(lost)


def under_way(path: Path, on_damage: str) -> tuple[rmq.Store, Iterator[pa.RecordBatch], list[rmq.LostRange],
                                                  list[bytes]]:  # fmt: skip
    """The whole store as one part: an open store, what follows its first batch, what is lost, that batch's bodies."""
    (task,) = plan_scan(path, split_bytes=2**40, on_damage=on_damage, batch_rows=5)
    store, lost = rmq.open(path), []
    batches = task.batches(store, lost=lost)
    return store, batches, lost, bodies([next(batches)])


def test_what_is_cleaned_away_before_a_part_comes_to_it_is_damage(path: Path, tmp_path: Path) -> None:
    made = shutil.copytree(path, tmp_path / "s")
    store, batches, *_ = under_way(made, "raise")
    with store:
        cleaned(made)
        with pytest.raises(rmq.CorruptFileError, match="segment is missing") as error:
            bodies(batches)
    assert (Path(error.value.path).name, error.value.offset) == (f"{65536:020d}", 0)


def test_what_is_cleaned_away_before_a_part_comes_to_it_is_listed(path: Path, tmp_path: Path) -> None:
    made = shutil.copytree(path, tmp_path / "s")
    store, batches, lost, first = under_way(made, "skip")
    with store:
        _, low = cleaned(made)
        found = bodies(batches)
        left = store.scan().read_all()["body"].to_pylist()
    assert (first + found)[-len(left) :] == left
    assert {item.reason for item in lost} == {"segment is missing"}
    assert [(item.begin_phy_offset, item.end_phy_offset) for item in lost] == \
        [(begin, begin + 65536) for begin in range(65536, low, 65536)]  # fmt: skip
