"""Queues and index made from the log alone: the files of one dispatch, whoever makes them; the old ones until then."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import assert_error, good
from commandline import call as called
from conftest import Golden, copy_store, digests

import rmq
from rmq import deriving, rebuilding
from rmq._core import _layout as L

TIME = 1_700_000_000_000
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=64 * 1024, mapped_file_size_consume_queue=20 * 100,
                         max_hash_slot_num=50, max_index_num=300)  # fmt: skip
PARTS = ("consumequeue", "index")
CALLS = ((rebuilding, "exchange"), (os, "rename"), (os, "replace"), (os, "unlink"), (os, "fsync"), (shutil, "rmtree"))


def message(number: int) -> rmq.Message:
    """Every third has three keys, so that index files end within a record; every fifth goes to a topic of its own."""
    keys = [f"k{number}", "shared", "Aa"][: 3 if number % 3 == 0 else 1]
    return rmq.Message("rare" if number % 5 == 0 else "orders", b"x" * (number % 300), keys=keys, tags="AB"[number % 2],
                       queue_id=number % 3, uniq_key=f"{number:032X}" if number % 2 else None)  # fmt: skip


def fill(path: Path, count: int = 1500, config: rmq.StoreConfig = CONFIG) -> Path:
    clock = iter(range(TIME, 2**62, 7))
    with rmq.open(path, "a", config=config, clock=lambda: next(clock)) as store:
        for number in range(count):
            store.put(message(number))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,500 messages in some five segments, six queues of several files, a dozen index files."""
    path = fill(tmp_path_factory.mktemp("rebuilding") / "store")
    assert len(list((path / "commitlog").iterdir())) >= 4
    assert len(list((path / "index").iterdir())) >= 8
    return path


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return copy_store(made, tmp_path / "store")


def derived_files(path: Path) -> tuple[dict[str, str], list[str]]:
    """Queue files by name; index files in their order, whatever their names."""
    return digests(path, "consumequeue"), list(digests(path, "index").values())


def dispatched(path: Path, target: Path, config: rmq.StoreConfig | None = None) -> Path:
    """A copy whose queues and index one dispatch of the whole log has made."""
    copy_store(path, target)
    for part in (*PARTS, "rmq"):
        shutil.rmtree(target / part, ignore_errors=True)
    rmq.open(target, "r+", config=config).close()
    return target


def assert_answers(path: Path, count: int = 1500) -> None:
    with rmq.open(path) as store:
        assert sum(high - low for queues in store.topics().values() for low, high in queues.values()) == count
        assert [found.body for found in store.query("orders", "k7")] == [b"x" * 7]
        assert len(store.query("orders", "shared", limit=None)) == len(
            [number for number in range(count) if number % 3 == 0 and number % 5])  # fmt: skip
        assert store.pull("rare", 0, 0, 1).messages[0].keys == ("k0", "shared", "Aa")


# ---- the same files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_files_are_those_that_puts_made(made: Path, tmp_path: Path, processes: int) -> None:
    result = rmq.rebuild(made, tmp_path / "new", processes=processes)
    assert derived_files(tmp_path / "new") == derived_files(made)
    names = sorted(path.name for path in (tmp_path / "new" / "index").iterdir())
    assert names[0].startswith("20231114")  # the time of the first message
    keys = sum(3 if number % 3 == 0 else 1 for number in range(1500)) + 750
    assert result == (str(tmp_path / "new"), 6, 1500, len(names), keys)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == list(PARTS)


def test_the_files_are_those_that_rocketmq_made(golden: Golden, tmp_path: Path) -> None:
    source = golden.directory / "store"
    rmq.rebuild(source, tmp_path / "new", config=golden.store_config, processes=1)
    assert derived_files(tmp_path / "new") == derived_files(source)


def test_a_record_whose_keys_end_a_file_goes_on_in_the_next(tmp_path: Path) -> None:
    for entries in range(8, 14):
        config = rmq.StoreConfig(mapped_file_size_commit_log=64 * 1024, max_hash_slot_num=3, max_index_num=entries)
        path = fill(tmp_path / f"s{entries}", 40, config)
        rmq.rebuild(path, tmp_path / f"new{entries}", config=config, processes=1)
        assert derived_files(tmp_path / f"new{entries}") == derived_files(path), entries


def test_more_keys_in_a_record_than_a_task_takes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deriving, "SCRATCH_ENTRIES", 5)
    monkeypatch.setattr(deriving, "PUT_AT_ONCE", 7)
    path = fill(tmp_path / "s", 50)
    with rmq.open(path, "r+") as store:
        store.put(rmq.Message("orders", b"", keys=[f"many{number}" for number in range(90)]))
    rmq.rebuild(path, tmp_path / "new", processes=1)
    assert derived_files(tmp_path / "new") == derived_files(path)


def test_an_empty_store_has_empty_queues_and_index(tmp_path: Path) -> None:
    rmq.open(tmp_path / "s", "x", config=CONFIG).close()
    assert rmq.rebuild(tmp_path / "s", tmp_path / "new", processes=1)[1:] == (0, 0, 0, 0)
    assert rmq.rebuild(tmp_path / "s", processes=np.int64(1))[1:] == (0, 0, 0, 0)
    with rmq.open(tmp_path / "s", "r+") as store:
        store.put(rmq.Message("a", b"b"))


def test_transactions_have_keys_but_no_units(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put_many(rmq.Message("a", b"", keys=f"k{n}", sys_flag=(n % 4) << 2) for n in range(200))
    rmq.rebuild(tmp_path / "s", tmp_path / "new", processes=1)
    assert derived_files(tmp_path / "new") == derived_files(tmp_path / "s")


# ---- in the store --------------------------------------------------------------------------------------------


def test_in_place_it_opens_as_it_was_closed_and_goes_on(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = derived_files(store)
    log = digests(store, "commitlog")
    result = rmq.rebuild(store, processes=1)
    assert result.path == str(store)
    assert derived_files(store) == before
    assert digests(store, "commitlog") == log
    assert rmq.verify(store).is_sound
    names = sorted(path.name for path in (store / "index").iterdir())
    caplog.clear()
    with rmq.open(store, "r+") as opened:
        opened.put(message(1500))
    assert not caplog.records  # nothing was derived
    assert sorted(path.name for path in (store / "index").iterdir())[: len(names)] == names
    assert_answers(store, 1501)
    assert not [name for name in os.listdir(store / "rmq") if name in ("rebuild", "replaced")]


def damage_queue_length(path: Path) -> None:
    victim = sorted((path / "consumequeue" / "orders" / "1").iterdir())[0]
    victim.write_bytes(victim.read_bytes()[:-7])


def damage_queue_name(path: Path) -> None:
    (path / "consumequeue" / "orders" / "1" / "00000000000000000007").write_bytes(b"x")


def damage_units(path: Path) -> None:
    victim = sorted((path / "consumequeue" / "orders" / "1").iterdir())[1]
    victim.write_bytes(os.urandom(victim.stat().st_size))


def lose_queues(path: Path) -> None:
    shutil.rmtree(path / "consumequeue")


def lose_index(path: Path) -> None:
    shutil.rmtree(path / "index")


def damage_index(path: Path) -> None:
    victim = sorted((path / "index").iterdir())[2]
    victim.write_bytes(b"\xff" * victim.stat().st_size)


def shorten_index(path: Path) -> None:
    victim = sorted((path / "index").iterdir())[2]
    victim.write_bytes(victim.read_bytes()[:-20])


def wipe_own(path: Path) -> None:
    shutil.rmtree(path / "rmq")


@pytest.mark.parametrize("damage", [damage_queue_length, damage_queue_name, damage_units, lose_queues, lose_index,
                                    damage_index, shorten_index, wipe_own])  # fmt: skip
def test_damage_to_what_is_derived_heals(made: Path, store: Path, damage: Callable[[Path], None]) -> None:
    damage(store)
    rmq.rebuild(store, processes=1)
    assert derived_files(store) == derived_files(made)
    assert rmq.verify(store).is_sound
    with rmq.open(store, "r+") as opened:
        opened.put(message(1500))
    assert_answers(store, 1501)


def test_a_store_that_was_not_closed_is_recovered_first(made: Path, store: Path, tmp_path: Path) -> None:
    (store / "abort").write_bytes(b"")
    rmq.rebuild(store, tmp_path / "new", processes=1)
    assert derived_files(tmp_path / "new") == derived_files(made)
    assert (store / "abort").exists()
    rmq.rebuild(store, processes=1)
    assert not (store / "abort").exists()
    assert derived_files(store) == derived_files(made)
    assert rmq.verify(store).is_sound


def test_a_torn_tail_gets_no_units(made: Path, store: Path, tmp_path: Path) -> None:
    """Half a record behind the last whole one of a store that was not closed."""
    (store / "abort").write_bytes(b"")
    with rmq.open(made) as opened:
        end = opened.max_phy_offset
    last = store / "commitlog" / f"{end - end % 65536:020d}"
    with last.open("r+b") as file:
        file.seek(end % 65536)
        file.write((400).to_bytes(4, "big") + L.RECORD_MAGIC_V1.to_bytes(4, "big", signed=True) + b"torn")
    rmq.rebuild(store, tmp_path / "new", processes=1)
    assert derived_files(tmp_path / "new") == derived_files(made)


@pytest.mark.parametrize("segment", [0, 2, -1])
def test_a_damaged_log_changes_nothing(store: Path, tmp_path: Path, segment: int) -> None:
    victim = sorted((store / "commitlog").iterdir())[segment]
    with victim.open("r+b") as file:
        file.seek(L.RECORD_MAGIC_OFFSET)
        file.write(b"\0\0\0\1")
    before = digests(store, *PARTS, "rmq")
    for output in (None, tmp_path / "new"):
        with pytest.raises(rmq.CorruptFileError, match=victim.name):
            rmq.rebuild(store, output, processes=1)
    assert digests(store, *PARTS, "rmq") == before
    assert not list((tmp_path / "new").iterdir())


def test_a_log_that_lost_its_end_or_a_segment_is_damaged(made: Path, store: Path) -> None:
    segments = sorted((store / "commitlog").iterdir())
    segments[-1].rename(store / "kept")
    with pytest.raises(rmq.CorruptFileError):
        rmq.rebuild(store, processes=1)
    (store / "kept").rename(segments[-1])
    segments[1].unlink()
    with pytest.raises(rmq.CorruptFileError, match=segments[1].name):
        rmq.rebuild(store, processes=1)
    assert derived_files(store) == derived_files(made)


# ---- a cleaned log -------------------------------------------------------------------------------------------


def cleaned(path: Path) -> Path:
    """Queues begin within a file, and one has no message left at all."""
    clock = iter(range(TIME, 2**62, 7))
    with rmq.open(path, "x", config=CONFIG, clock=lambda: next(clock)) as store:
        store.put_many([rmq.Message("over", b"")] * 130)
        for number in range(1500):
            store.put(message(number))
    for victim in sorted((path / "commitlog").iterdir())[:2]:
        victim.unlink()
    return path


def test_queue_offsets_go_on_behind_a_cleaned_log(tmp_path: Path) -> None:
    path = cleaned(tmp_path / "s")
    with rmq.open(path, "r+") as store:
        topics = store.topics()
    assert topics["over"] == {0: (130, 130)}
    rmq.rebuild(path, tmp_path / "new", processes=1)
    assert not (tmp_path / "new" / "consumequeue" / "orders" / "0" / f"{0:020d}").exists()
    rmq.rebuild(path, processes=1)
    assert digests(path, *PARTS) == digests(tmp_path / "new", *PARTS)
    assert rmq.verify(path).is_sound
    for mode in ("r", "r+"):
        with rmq.open(path, mode) as store:
            assert store.topics() == topics
    with rmq.open(path, "r+") as store:
        assert store.put(rmq.Message("over", b"")).queue_offset == 130
    expected = dispatched(path, tmp_path / "expected", CONFIG)
    rmq.rebuild(path, tmp_path / "again", processes=1)
    ours, theirs = digests(tmp_path / "again", "consumequeue"), digests(expected, "consumequeue")
    assert {name: ours[name] for name in ours if "over" not in name} == \
        {name: theirs[name] for name in theirs if "over" not in name}  # fmt: skip


# ---- what may go wrong ---------------------------------------------------------------------------------------


class Stopped(BaseException):
    """The process is gone."""


class Countdown:
    """The process is gone from the call of that number on: nothing is changed or cleaned up any more."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def before(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise Stopped
            return real(*arguments, **options)

        return call


@pytest.mark.slow
def test_a_crash_between_any_two_steps_leaves_a_store_that_opens(made: Path, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Before each rename, removal and sync behind the moment at which the new files are whole."""
    derive = rebuilding.derive
    finished, step = False, 0
    while not finished:
        path, countdown = copy_store(made, tmp_path / f"s{step}"), Countdown(step)

        def counted(*arguments: Any, is_exact: bool, countdown: Countdown = countdown) -> deriving.Derived:
            found = derive(*arguments, is_exact=is_exact)
            for owner, name in CALLS:
                monkeypatch.setattr(owner, name, countdown.before(getattr(owner, name)))
            return found

        monkeypatch.setattr(rebuilding, "derive", counted)
        with contextlib.suppress(Stopped):
            rmq.rebuild(path, processes=1)
        finished = countdown.left >= 0
        monkeypatch.undo()
        for mode in ("r", "r+", "r"):
            rmq.open(path, mode).close()
            assert_answers(path)
        assert rmq.verify(path).is_sound, step
        rmq.rebuild(path, processes=1)
        assert derived_files(path) == derived_files(made)
        assert not (path / "rmq" / "replaced").exists()
        shutil.rmtree(path)
        step += 1
    assert step > 12


def test_a_failing_task_leaves_the_store_as_it_was(store: Path, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = digests(store, *PARTS, "rmq")
    monkeypatch.setattr(rmq.IndexFile, "put_hashes", full)
    for output in (None, tmp_path / "new"):
        with pytest.raises(OSError, match="No space"):
            rmq.rebuild(store, output, processes=1)
    assert digests(store, *PARTS, "rmq") == before
    assert not list((tmp_path / "new").iterdir())


def test_who_writes_the_store_is_not_disturbed(store: Path, tmp_path: Path) -> None:
    with rmq.open(store, "r+") as opened:
        with pytest.raises(rmq.StoreLockedError):
            rmq.rebuild(store, processes=1)
        opened.put(message(1500))
        opened.flush()
        rmq.rebuild(store, tmp_path / "new", processes=1)
    assert derived_files(tmp_path / "new")[0] == derived_files(store)[0]


def test_the_output_is_never_written_over(store: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine").write_bytes(b"")
    with pytest.raises(FileExistsError, match=r"exists and is not empty: .*new"):
        rmq.rebuild(store, tmp_path / "new")
    with pytest.raises(FileNotFoundError):
        rmq.rebuild(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(rmq.UnsupportedFormatError, match="no message store"):
        rmq.rebuild(tmp_path / "empty")
    with pytest.raises(rmq.UnsupportedFormatError, match="no message store"):
        list(rebuilding.rebuild_sidecars(tmp_path / "empty"))
    assert not list((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("part", ["consumequeue/%LMQ%a", "batchconsumequeue/t", "consumequeue_ext/t"])
def test_queues_that_are_not_made_here_stop_it(store: Path, tmp_path: Path, part: str) -> None:
    (store / part / "0").mkdir(parents=True)
    before = digests(store, *PARTS)
    for output in (None, tmp_path / "new"):
        with pytest.raises(rmq.UnsupportedFormatError):
            rmq.rebuild(store, output)
    assert digests(store, *PARTS) == before


def test_a_store_without_index_keeps_what_lies_there(store: Path) -> None:
    before = digests(store, "index")
    rmq.rebuild(store, config=rmq.StoreConfig(message_index_enable=False), processes=1)
    assert digests(store, "index") == before
    assert_answers(store)


@pytest.mark.slow
def test_readers_beside_it_miss_nothing(store: Path) -> None:
    """One that was open before, one that opens at every moment."""
    stop = threading.Event()
    faults: list[BaseException] = []

    def read() -> None:
        try:
            with rmq.open(store) as open_before:
                while not stop.is_set():
                    assert len(open_before.query("orders", "k7")) == 1
                    assert len(open_before.pull("orders", 1, 20, 10).messages) == 10
                    assert_answers(store)
        except BaseException as error:
            faults.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(5):
            rmq.rebuild(store, processes=1)
    finally:
        stop.set()
        reader.join()
    assert not faults


@pytest.mark.slow
@pytest.mark.parametrize("following", [
    lambda store: rmq.rebuild(store, processes=1), lambda store: rmq.open(store, "r+").close()])  # fmt: skip
def test_what_a_killed_rebuild_leaves_goes_with_the_next(store: Path, following: Callable[[Path], object]) -> None:
    script = "import sys, os, rmq; from rmq import deriving; " \
        "deriving.build_index_file = lambda task: os.kill(os.getpid(), 9); rmq.rebuild(sys.argv[1], processes=1)"
    done = subprocess.run([sys.executable, "-c", script, store], check=False)
    assert done.returncode == -9
    assert (store / "rmq" / "rebuild" / "keys").is_dir()
    assert_answers(store)
    assert "leftover" in [item.kind for item in rmq.verify(store)]
    following(store)
    assert not (store / "rmq" / "rebuild").exists()
    assert rmq.verify(store).is_sound


@pytest.mark.parametrize("time", [2**62, -62_000_000_000_000, -40_000_000_000_000])  # the second is of the year 5
def test_a_time_that_is_none_names_an_index_file_all_the_same(tmp_path: Path, time: int) -> None:
    times = iter([time] * 400)
    with rmq.open(tmp_path / "s", "x", config=CONFIG, clock=lambda: next(times)) as store:
        for number in range(350):
            store.put(rmq.Message("a", b"", keys=f"k{number}"))
    rmq.rebuild(tmp_path / "s", tmp_path / "new", processes=1)
    assert derived_files(tmp_path / "new") == derived_files(tmp_path / "s")
    assert all(len(path.name) == 17 for path in (tmp_path / "new" / "index").iterdir())


def test_a_task_may_run_twice(made: Path, tmp_path: Path) -> None:
    """As Spark's may: an executor is lost, or another runs the same task at the same time."""
    def twice(task: Callable[[Any], Any], items: Any) -> Iterator[Any]:
        for item in items:
            task(item)
            yield task(item)

    rebuilding.rebuild_by(twice, made, tmp_path / "new")
    assert derived_files(tmp_path / "new") == derived_files(made)


def test_a_try_that_was_killed_amid_an_index_file_leaves_nothing_there(made: Path, tmp_path: Path) -> None:
    def run(task: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:  # as Spark, whose worker was killed
        for item in items:
            if task is deriving.build_index_file:
                child = os.fork()
                if not child:
                    deriving.IndexFile.flush = lambda file: os.kill(os.getpid(), signal.SIGKILL)
                    task(item)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
            yield task(item)

    rebuilding.rebuild_by(run, made, tmp_path / "new")
    assert derived_files(tmp_path / "new") == derived_files(made)


# ---- the command ---------------------------------------------------------------------------------------------


def test_the_command_rebuilds_in_place_and_elsewhere(made: Path, store: Path, tmp_path: Path) -> None:
    lose_index(store)
    done = good("rebuild", store, "--processes", 1, "-o", "jsonl")
    assert '"queue_count": 6' in done.out
    assert "1,500 units" in done.err
    assert derived_files(store) == derived_files(made)
    assert "3,250" in good("rebuild", store, "--output", tmp_path / "new", "--processes", 1, "-o", "table").out
    assert_error(called("rebuild", store, "--output", tmp_path / "new"), 4, "exists and is not empty")
    assert_error(called("rebuild", store, "--sidecar", "--processes", 2), 2, "--sidecar")
    assert_error(called("rebuild", tmp_path / "none"), 4, "no such store")

