"""A store comes back from every disk that power loss may leave; and the machine that says so can fail."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rmq
from crashes.judge import Geometry
from crashes.recorder import Recorder
from crashes.run import judged, scratch
from crashes.states import Weather, everything, left, only_synced
from crashes.workloads import FIRST, WORKLOADS, Run, record
from rmq import commitlog, flushing, logend, mappedfile, owed, queueset, recovery, segment

RUN = Path(__file__).parent / "run.py"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: thousands of syncs of a real disk take many minutes, and prove nothing more."""
    with scratch() as path:
        yield path


def output(*arguments: str) -> str:
    """What run.py prints; its output is the failure."""
    done = subprocess.run([sys.executable, RUN, *arguments], capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    if done.returncode:
        pytest.fail(f"run.py {' '.join(arguments)}\n{done.stdout}{done.stderr}", pytrace=False)
    return done.stdout


@pytest.mark.slow
def test_stores_come_back_from_some_crashes() -> None:
    """The same ones each time; `make crash` draws others."""
    assert "36 states" in output("--states", "36", "--jobs", "2", "--seed", "1")


@pytest.mark.crash
def test_stores_come_back_from_thousands_of_crashes() -> None:
    assert f"{os.environ.get('RMQ_CRASH_STATES', '3000')} states" in output(
        "--states", os.environ.get("RMQ_CRASH_STATES", "3000"))  # fmt: skip


# ---- the recorder and the disks --------------------------------------------------------------------------


def test_bytes_are_on_disk_by_a_sync_of_the_file_names_by_one_of_the_directory(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        descriptor = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
        os.pwrite(descriptor, b"x" * 600, 0)
        os.fsync(descriptor)
        at_sync = len(recorder.events)
        segment.sync_directory(tmp_path)
        os.pwrite(descriptor, b"y" * 600, 0)
        os.close(descriptor)
    assert only_synced(recorder.events[:at_sync]).files == {}
    assert only_synced(recorder.events).files == {"a": b"x" * 600}
    seen = {left(recorder.events, Weather(random.Random(seed))).files["a"] for seed in range(300)}
    assert seen >= {b"x" * 600, b"y" * 600, b"y" * 512 + b"x" * 88, b"x" * 512 + b"y" * 88}
    assert {len(content or b"") for content in seen} == {600}


def test_a_size_may_reach_the_disk_before_the_bytes_or_after_them(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        descriptor = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
        segment.sync_directory(tmp_path)
        os.write(descriptor, b"x" * 5000)
        os.close(descriptor)
    seen = {left(recorder.events, Weather(random.Random(seed))).files["a"] for seed in range(300)}
    assert {len(content or b"") for content in seen} == {0, 4096, 5000}
    assert seen >= {b"", b"x" * 5000, bytes(5000), b"x" * 4096}


def test_a_file_that_shrinks_and_grows_holds_zeros(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 2000)
    with Recorder(tmp_path) as recorder:
        os.truncate(tmp_path / "a", 700)
        os.truncate(tmp_path / "a", 2000)
        descriptor = os.open(tmp_path / "a", os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)
    assert only_synced(recorder.events).files == {"a": b"x" * 700 + bytes(1300)}


def test_a_rename_happens_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with Recorder(tmp_path) as recorder:
        segment.write_atomically(tmp_path / "a", b"new")
        segment.write_atomically(tmp_path / "a", b"newer")
    for moment in range(recorder.begin, len(recorder.events) + 1):
        for seed in range(20):
            files = left(recorder.events[:moment], Weather(random.Random(seed))).files
            assert files["a"] in (b"old", b"new", b"newer")
    assert only_synced(recorder.events).files == {"a": b"newer"}


def test_stores_through_a_map_are_seen(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        file = mappedfile.MappedFile(tmp_path / "a", size=4096, writable=True, create=True)
        file.sync_all()
        file.map[1000:1030] = b"m" * 30
        recorder.look()
        file.map[1000:1030] = b"n" * 30
        file.close()
    seen = {(left(recorder.events, Weather(random.Random(seed))).files["a"] or b"")[1000:1030] for seed in range(200)}
    assert seen >= {bytes(30), b"m" * 24 + bytes(6), b"m" * 30, b"n" * 30}


def test_abort_has_its_text_from_its_first_moment_on(tmp_path: Path) -> None:
    """An empty one would tell of a broker before 5.0, and its crash is judged by other rules."""
    with Recorder(tmp_path) as recorder:
        for mode in ("x", "r+"):
            store = rmq.open(tmp_path / "s", mode, config=Geometry.drawn(random.Random(1)).config())
            store.put(rmq.Message("T", b"m"))
            recorder.look()
            (tmp_path / "s/abort").replace(tmp_path / "s/abort.kept")
            store.close()
            (tmp_path / "s/abort.kept").replace(tmp_path / "s/abort")
    seen = {left(recorder.events[:moment], Weather(random.Random(moment))).files.get("s/abort")
            for moment in range(recorder.begin, len(recorder.events) + 1)}  # fmt: skip
    assert seen == {None, b"%d" % os.getpid()}


@pytest.mark.parametrize("name", FIRST)
def test_nothing_that_a_workload_does_is_missed(tmp_path: Path, name: str) -> None:
    rng = random.Random(5)
    with Recorder(tmp_path) as recorder:
        run = Run(recorder, rng, Geometry.drawn(rng))
        WORKLOADS[name](run)
        recorder.look()
        moment = len(recorder.events)
        files = {str(path.relative_to(tmp_path)): path.read_bytes() if path.is_file() else None
                 for path in tmp_path.rglob("*")}  # fmt: skip
        run.close()
    assert any(name.startswith("s/commitlog/") for name in files)
    assert everything(recorder.events[:moment]).files == files


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_a_seed_draws_the_same_disks_each_time(tmp_path: Path, name: str) -> None:
    kinds = []
    for turn in ("1", "2"):
        (tmp_path / turn).mkdir()
        recording = record(name, 11, tmp_path / turn)
        kinds.append([(event.kind, event.place) for event in recording.recorder.events])
    assert kinds[0] == kinds[1]


# ---- the machine can fail --------------------------------------------------------------------------------


def failures(tmp_path: Path, name: str, seeds: range, states: int, **options: Any) -> list[str]:
    """What is wrong with some states of some recordings, up to the first recording with a violation."""
    wrong = []
    for seed in seeds:
        folder = tmp_path / f"{name}{seed}"
        (folder / "live").mkdir(parents=True)
        try:
            recording = record(name, seed, folder / "live", **options)
        except rmq.CorruptFileError as error:
            return [f"recording: {error}"]
        wrong += [text for text in (judged(recording, name, seed, state, folder)[0] for state in range(states)) if text]
        if wrong:
            break
    return wrong


LOST = {
    "of segments": ("waits", lambda call, path: "/commitlog/" in path),
    "of the directory of segments": ("waits", lambda call, path: path.endswith("/commitlog")),
    "of the directory that segments were removed from": ("cleaned", lambda call, path: path.endswith("/commitlog")),
    "of queue files": ("puts", lambda call, path: "/consumequeue/" in path and os.path.isfile(path)),
    "of the directories of queues": ("puts", lambda call, path: "/consumequeue" in path and os.path.isdir(path)),
    "of index files": ("puts", lambda call, path: "/index/" in path),
    "of the store's directory": ("sessions", lambda call, path: path.endswith("/s")),
    "of meta.json": ("sessions", lambda call, path: "meta.json" in path),
}


@pytest.mark.crash
@pytest.mark.parametrize("lost", LOST)
def test_a_sync_that_does_nothing_is_found(tmp_path: Path, lost: str) -> None:
    name, ignores = LOST[lost]
    assert failures(tmp_path, name, range(12), 30, ignores=ignores)


def without_zeroing(log: commitlog.CommitLog, phy_offset: int) -> None:
    for part in [part for part in log.segments if part.start >= phy_offset and part.start]:
        part.close()
        part.path.unlink()
        segment.sync_directory(part.path.parent)
        log.segments.remove(part)
    log.hold(list(log.segments))


RARELY_MISSED = "queue files behind a missing one stay"  # in one recording of some twenty
SWITCHED_OFF: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "the torn tail is not zeroed": ("again", commitlog.CommitLog, "truncate", without_zeroing),
    "SYNC_FLUSH does not wait": ("waits", flushing.Flusher, "sync_log", lambda *_: None),
    "queues are not cut to the mark": ("puts", recovery, "cut_queues", lambda *_: None),
    "the index is not taken back to the mark": (
        "puts", recovery, "restore_index", lambda index, mark: (mark.indexed_phy_offset, 0)),
    "bodies and records are not checked": ("puts", logend, "CHECK_CRC", 0),
    "lost sectors and CRCs are not looked for": (
        "puts", recovery, "find_end", lambda log, begin, limit, **_: logend.find_end(log, begin, limit)),
    "segments of the log are used before they are on disk": (
        "waits", mappedfile.MappedFile, "sync_all", lambda *_: None),
    "recovery does not sync what a killed process wrote": (
        "killed", commitlog.CommitLog, "distrust", lambda *_: None),
    "queues that timed flushes left behind are not synced": (
        "behind", owed.Owed, "sync_queues", lambda self: self.queue_files.clear()),
    RARELY_MISSED: ("cleaned", queueset.QueueSet, "end_at_gaps", lambda *_, **__: None),
}  # fmt: skip


@pytest.mark.crash
@pytest.mark.parametrize("protection", SWITCHED_OFF)
def test_a_protection_that_is_switched_off_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protection: str
) -> None:
    name, owner, function, replacement = SWITCHED_OFF[protection]
    monkeypatch.setattr(owner, function, replacement)
    first = 400 if protection == RARELY_MISSED else 0
    assert failures(tmp_path, name, range(first, first + 150), 30)


@pytest.mark.crash
@pytest.mark.parametrize("name", ["puts", "waits", "killed", "again"])
def test_with_every_protection_nothing_is_found(tmp_path: Path, name: str) -> None:
    assert failures(tmp_path, name, range(6), 30) == []
