"""A mapped file that somebody truncates under a live store: an error in every path, no SIGBUS, no wrong answer."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import copy_store

import rmq
import rmq.dispatch
import rmq.query
from rmq._core._recordbatch import RecordBatch
from rmq.logsegment import Segment
from rmq.mappedfile import GuardedMap, MappedFile
from rmq.scan import BatchMaker
from rmq.wholerecords import WholeRecords

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=20_000,
                         max_hash_slot_num=500, max_index_num=1000, flush_interval_commit_log=2**31 - 1)  # fmt: skip
COUNT = 500
DELAYED = "SCHEDULE_TOPIC_XXXX"
BODY = bytes(range(200))


def message(number: int) -> rmq.Message:
    return rmq.Message("T", b"%06d" % number + BODY, keys=f"k{number}", tags="t", uniq_key=f"u{number}")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "s"
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many([message(number) for number in range(COUNT)])
    return path


@pytest.fixture
def path(tmp_path: Path, original: Path) -> Path:
    return copy_store(original, tmp_path / "s")


def log_files(path: Path) -> list[Path]:
    return sorted((path / "commitlog").iterdir())


def index_file(path: Path) -> Path:
    return min((path / "index").iterdir())


READS: dict[str, Callable[[rmq.Store], Any]] = {
    "scan": lambda store: store.scan().read_all(),
    "scan of headers": lambda store: store.scan(columns=["queue_offset"], check_crc=False).read_all(),
    "query": lambda store: store.query("T", f"k{COUNT - 1}"),
    "query of no key": lambda store: store.query("T", "none"),
    "query_many": lambda store: store.query_many("T", [f"k{number}" for number in range(COUNT)]),
    "select_phy_offset_many": lambda store: store.select_phy_offset_many("T", [f"k{n}" for n in range(COUNT)]),
    "lookup by phy offset": lambda store: store.lookup(store.max_phy_offset - 360),
    "lookup by uniq key": lambda store: store.lookup(f"u{COUNT - 1}"),
    "lookup_many": lambda store: store.lookup_many(store.units("T", 0, 0, COUNT)[0]),
    "lookup of none": lambda store: store.lookup("nobody"),
    "pull": lambda store: store.pull("T", 0, COUNT - 10, 10),
    "search_offset": lambda store: store.search_offset("T", 0, 2**62),
    "topics": lambda store: store.topics(),
    "info": lambda store: store.info(),
}


def outcome(read: Callable[[rmq.Store], Any], store: rmq.Store) -> Any:
    """What a read answers, comparable, or the error it ends with."""
    try:
        answer = read(store)
    except (rmq.RmqError, KeyError, OSError) as error:
        return error
    if isinstance(answer, pa.Table | pa.Array):
        return answer.to_pylist()
    if isinstance(answer, rmq.QueryManyResult):
        return answer.table.to_pylist()
    return answer.messages if isinstance(answer, rmq.PullResult) else answer


@pytest.mark.parametrize("cut", [0, 4096])
@pytest.mark.parametrize("target", ["first segment", "last segment", "index"])
@pytest.mark.parametrize("name", READS)
def test_a_read_beside_a_truncation_is_right_or_a_typed_error(path: Path, name: str, target: str, cut: int) -> None:
    log = log_files(path)
    victim = {"first segment": log[0], "last segment": log[-1], "index": index_file(path)}[target]
    with rmq.open(path) as store:
        for other in ("scan of headers", "select_phy_offset_many"):
            outcome(READS[other], store)  # every file is mapped by now
        right = outcome(READS[name], store)
        os.truncate(victim, cut)
        found = outcome(READS[name], store)
        if isinstance(found, rmq.CorruptFileError):
            assert Path(found.path).name == victim.name
            assert found.offset >= cut
        elif isinstance(found, Exception):
            assert type(found) is type(right)
        elif name != "info":  # which tells sizes
            assert found == right


def test_each_path_that_needs_the_lost_pages_fails(path: Path) -> None:
    """The test above would pass if nothing ever touched them."""
    with rmq.open(path) as store:
        for read in READS.values():
            outcome(read, store)
        os.truncate(log_files(path)[-1], 0)
        for name in ("scan", "scan of headers", "query", "query_many", "lookup by uniq key", "pull"):
            assert isinstance(outcome(READS[name], store), rmq.CorruptFileError), name
    with rmq.open(path) as store, pytest.raises(rmq.CorruptFileError):
        store.scan().read_all()


def test_an_index_that_lost_pages_is_not_asked(path: Path) -> None:
    with rmq.open(path) as store:
        store.select_phy_offset_many("T", ["k1"])
        os.truncate(index_file(path), 100)
        with pytest.raises(rmq.CorruptFileError):
            store.select_phy_offset_many("T", [f"k{number}" for number in range(COUNT)])
        with pytest.raises(rmq.CorruptFileError):
            store.query("T", "k7")


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize(("place", "read"), [
    ((rmq.query, "_stored"), lambda store: [found.body for found in store.query("T", "k20")]),
    ((BatchMaker, "append"), lambda store: store.scan(columns=["body"], batch_rows=50).read_next_batch()),
], ids=["query", "scan"])  # fmt: skip
def test_pages_that_another_thread_was_told_of_are_gone_for_who_has_read_them(
        path: Path, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str],
        read: Callable[[rmq.Store], Any], is_back: bool) -> None:  # fmt: skip
    """What it has copied may be zeros, though the file is mapped anew, or whole again."""
    victim, told = log_files(path)[0], []
    data = victim.read_bytes()

    def look() -> None:
        with pytest.raises(rmq.CorruptFileError, match="page is gone"):
            store.lookup(0) if is_back else store.scan().read_all()
        told.append(True)

    def hooked(*arguments: Any) -> Any:
        monkeypatch.undo()
        os.truncate(victim, 4096)
        found = real(*arguments)
        if is_back:
            victim.write_bytes(data)
        other = threading.Thread(target=look)
        other.start()
        other.join()
        return found

    real = getattr(*place)
    with rmq.open(path) as store:
        monkeypatch.setattr(*place, hooked)
        with pytest.raises(rmq.CorruptFileError, match="page is gone"):
            read(store)
        assert told == [True]


def test_no_unit_is_kept_of_pages_that_another_thread_was_told_of(path: Path, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    with rmq.open(path, "r+", config=CONFIG) as writer:
        writer.put_many([rmq.Message(DELAYED, b"", queue_id=2, properties={"DELAY": "3"})] * 20)
        tags_codes = writer.units(DELAYED, 2, 0, 20)[2].tolist()  # times, by what is read where units are packed
        copy = copy_store(path, tmp_path / "copy")
    real, victim = rmq.dispatch.pack_units, log_files(copy)[-1]
    data, told = victim.read_bytes(), []

    def look() -> None:
        with pytest.raises(rmq.CorruptFileError):
            store._log.check()
        told.append(True)

    def pack_units(*arguments: Any) -> Any:
        monkeypatch.undo()
        os.truncate(victim, 0)
        found = real(*arguments)
        other = threading.Thread(target=look)
        other.start()
        other.join()
        return found

    with rmq.open(copy) as store:
        monkeypatch.setattr(rmq.dispatch, "pack_units", pack_units)
        with pytest.raises(rmq.CorruptFileError):
            store.units(DELAYED, 2, 0, 20)
        victim.write_bytes(data)
        assert store.units(DELAYED, 2, 0, 20)[2].tolist() == tags_codes
        assert told == [True]


def test_a_stream_under_way_ends_with_an_error(path: Path) -> None:
    with rmq.open(path) as store:
        reader = store.scan(batch_rows=10)
        head = reader.read_next_batch()
        assert head.num_rows == 10
        os.truncate(log_files(path)[0], 0)
        seen: list[bytes] = []
        with pytest.raises(rmq.CorruptFileError):
            seen.extend(body for batch in reader for body in batch["body"].to_pylist())
        assert seen == [b"%06d" % number + BODY for number in range(10, 10 + len(seen))]
        assert len(seen) < COUNT - 10
        assert [row["body"][:6] for row in head.to_pylist()] == [b"%06d" % number for number in range(10)]


@pytest.mark.parametrize("check_crc", [True, False])
@pytest.mark.parametrize("moment", ["before a batch is judged", "before its rows are copied"])
def test_a_scan_that_skips_damage_gives_no_zeros_for_pages_that_go(
        path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, check_crc: bool) -> None:  # fmt: skip
    """Rows that were found whole and cannot be copied any more are an error; what is not found whole is told."""
    is_copied = moment == "before its rows are copied"
    victim, cut = log_files(path)[0], 3 * 4096

    def keep(wanted: rmq.query.Wanted, batch: RecordBatch) -> None:
        real_keep(wanted, batch)
        os.truncate(victim, cut)

    def scan(whole: WholeRecords, file: MappedFile, *place: Any) -> int:
        if file.path == victim:
            os.truncate(victim, cut)
        return real_scan(whole, file, *place)

    real_keep, real_scan = rmq.query.Wanted.keep, WholeRecords._scan
    monkeypatch.setattr(*(rmq.query.Wanted, "keep", keep) if is_copied else (WholeRecords, "_scan", scan))
    lost: list[rmq.LostRange] = []
    bodies: list[bytes] = []

    def read() -> None:
        with rmq.open(path) as store:
            for batch in store.scan(topics=["T"], columns=["body"], on_damage="skip", lost=lost, check_crc=check_crc):
                bodies.extend(batch["body"].to_pylist())

    if is_copied:
        with pytest.raises(rmq.CorruptFileError) as caught:
            read()
        assert (caught.value.path, caught.value.offset) == (str(victim), cut)
    else:
        read()
        assert lost[0].begin_phy_offset < cut < lost[0].end_phy_offset
        assert int(bodies[-1][:6]) == COUNT - 1
    assert set(bodies) <= {b"%06d" % number + BODY for number in range(COUNT)}


def test_a_reader_goes_on_when_the_file_is_back(path: Path) -> None:
    data = log_files(path)[0].read_bytes()
    with rmq.open(path) as store:
        before = store.scan().read_all()
        os.truncate(log_files(path)[0], 0)
        with pytest.raises(rmq.CorruptFileError):
            store.scan().read_all()
        log_files(path)[0].write_bytes(data)
        assert store.scan().read_all() == before


def test_a_put_into_pages_that_are_gone_is_refused(path: Path) -> None:
    store = rmq.open(path, "r+")
    store.put(message(COUNT))
    os.truncate(log_files(path)[-1], 0)
    for _ in range(2):
        with pytest.raises(rmq.CorruptFileError, match="page is gone"):
            store.put_many([message(number) for number in range(COUNT)])
    with pytest.raises(rmq.CorruptFileError):
        store.close()


def test_a_put_is_kept_when_the_index_is_gone_and_the_next_is_refused(path: Path) -> None:
    victim = max((path / "index").iterdir())
    store = rmq.open(path, "r+")
    store.query("T", "k1")
    os.truncate(victim, 0)
    assert store.put_many([message(number) for number in range(2000)], results=False) == 2000
    with pytest.raises(rmq.CorruptFileError):
        store.put(message(0))
    with pytest.raises(rmq.CorruptFileError):
        store.query("T", "k1")
    with pytest.raises(rmq.CorruptFileError):
        store.close()
    victim.unlink()
    with rmq.open(path, "r+") as store:
        assert store.scan(columns=["queue_offset"]).read_all().num_rows == COUNT + 2000
        assert [found.queue_offset for found in store.query("T", "k1999")] == [COUNT + 1999]


def test_an_index_file_alone_is_guarded(tmp_path: Path) -> None:
    place = tmp_path / "i"
    with rmq.IndexFile(place, "x", max_hash_slot_num=5000, max_index_num=50_000) as file:
        keys = [f"T#{number}" for number in range(40_000)]
        file.put_keys(keys, np.arange(40_000), np.full(40_000, 10**12))
        os.truncate(place, 8192)
        for call in (lambda: file.select_phy_offset(keys[-1]), lambda: file.select_phy_offset_many(keys),
                     lambda: file.put_keys(keys[:1], [1], [1]), lambda: file.flush()):  # fmt: skip
            with pytest.raises(rmq.CorruptFileError, match="page is gone"):
                call()


def test_no_answer_of_an_index_file_that_ends_within_a_page_is_short(tmp_path: Path) -> None:
    """No page is gone then; behind the end zeros are read, wherever it is."""
    place, sizes = tmp_path / "i", {"max_hash_slot_num": 10, "max_index_num": 40}
    keys = [f"T#{number % 20}" for number in range(33)]
    with rmq.IndexFile(place, "x", **sizes) as file:
        file.put_keys(keys, np.arange(100, 133), np.arange(33) * 1000 + 10**12)
        used = 40 + 10 * 4 + file.index_count * 20
        right = file.select_phy_offset_many(keys).to_pylist()
    data, short = place.read_bytes(), 0
    for cut in range(1, used):
        place.write_bytes(data)
        with rmq.IndexFile(place, **sizes) as file:
            os.truncate(place, cut)
            for key, answer in zip(keys, right, strict=True):
                try:
                    assert file.select_phy_offset(key) == answer
                except rmq.CorruptFileError:
                    short += 1
            with pytest.raises(rmq.CorruptFileError, match="was truncated"):
                file.select_phy_offset_many(keys[:1])
    assert short >= (used - 20) * len(keys)


def test_nothing_is_put_into_an_index_file_that_was_truncated_and_its_length_stays(tmp_path: Path) -> None:
    """Within a page: no page is gone, and room for entries would make the file long again."""
    place, sizes = tmp_path / "i", {"max_hash_slot_num": 10, "max_index_num": 40}
    rmq.IndexFile(place, "x", **sizes).close()
    with rmq.IndexFile(place, "r+", **sizes) as file:
        os.truncate(place, 500)
        with pytest.raises(rmq.CorruptFileError, match=r"byte 500: .*was truncated"):
            file.put_key("T#k", 0, 10**12)
        with pytest.raises(rmq.CorruptFileError, match=r"byte 500: .*was truncated"):
            file.put_keys(["T#k"], [0], [10**12])
    assert place.stat().st_size == 500


def test_marks_that_are_gone_are_an_error(path: Path) -> None:
    with rmq.open(path) as store:
        os.truncate(path / "rmq" / "marks", 0)
        with pytest.raises(rmq.CorruptFileError):
            store.scan()


@pytest.fixture
def cut_map(tmp_path: Path) -> GuardedMap:
    """A guarded map of 64 MiB of a file that was truncated."""
    with (tmp_path / "cut").open("w+b") as file:
        file.truncate(1 << 26)
        made = GuardedMap.of(file.fileno(), 1 << 26, mmap.ACCESS_READ)
        file.truncate(0)
    return made


def test_a_close_beside_a_walk_forgets_no_lost_page(cut_map: GuardedMap) -> None:
    with memoryview(cut_map) as view:
        assert view[mmap.PAGESIZE] == 0
        with pytest.raises(BufferError):
            cut_map.close()
        assert cut_map.lost == mmap.PAGESIZE
        assert view[0] == 0
    cut_map.close()
    assert cut_map.lost == 0


def map_count() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_lost_pages_touched_at_random_cost_few_maps(cut_map: GuardedMap) -> None:
    before = map_count()
    places = random.Random(1).sample(range(0, len(cut_map), mmap.PAGESIZE), 2000)
    assert not any(cut_map[place] for place in places)
    assert map_count() < before + 60


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_segments_are_asked_once_for_a_page_that_another_lost(path: Path, cut_map: GuardedMap, mode: str,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    asked: list[Segment] = []
    check = Segment.check

    def counted(segment: Segment) -> None:
        asked.append(segment)
        check(segment)

    monkeypatch.setattr(Segment, "check", counted)
    with rmq.open(path, mode, config=CONFIG) as store:
        for lost in range(3):
            assert cut_map[lost << 24] == 0  # far apart: a run of pages is lost at a time
            for _ in range(3):
                store.query("T", "k1")
                store.lookup(0)
            assert asked == store._log.segments
            asked.clear()


def run(program: str, *arguments: object, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *options, "-c", textwrap.dedent(program), *map(str, arguments)],
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip


TRUNCATE_AND_SCAN = """
    import os, sys, rmq
    with rmq.open(sys.argv[1]) as store:
        store.scan().read_all()
        os.truncate(sys.argv[2], 0)
        try:
            store.scan().read_all()
        except rmq.CorruptFileError:
            print("told")
"""


@pytest.mark.parametrize("options", [(), ("-X", "faulthandler")])
def test_a_process_of_its_own_lives(path: Path, options: tuple[str, ...]) -> None:
    done = run(TRUNCATE_AND_SCAN, path, log_files(path)[0], options=options)
    assert (done.stdout, done.stderr, done.returncode) == ("told\n", "", 0)


def test_bus_errors_of_others_kill_as_before(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(bytes(8192))
    program = """
        import mmap, os, sys, rmq
        with rmq.open(sys.argv[1]) as store:
            store.scan().read_all()
            with open(sys.argv[2], "r+b") as file:
                other = mmap.mmap(file.fileno(), 8192)
                os.truncate(sys.argv[2], 0)
                other[0]
    """
    assert run(program, path, tmp_path / "other").returncode == -signal.SIGBUS
    sent = "import os, signal, sys, rmq\nrmq.open(sys.argv[1]).scan()\nos.kill(os.getpid(), signal.SIGBUS)"
    assert run(sent, path).returncode == -signal.SIGBUS


def test_a_faulthandler_enabled_between_two_opens_ends_the_process(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(bytes(8192))
    program = """
        import faulthandler, mmap, os, sys, rmq
        with rmq.open(sys.argv[1]) as store:
            store.scan().read_all()
        faulthandler.enable()
        with rmq.open(sys.argv[1]) as store:
            store.scan().read_all()
        other = mmap.mmap(os.open(sys.argv[2], os.O_RDWR), 8192)
        os.truncate(sys.argv[2], 0)
        other[0]
    """
    done = run(program, path, tmp_path / "other")
    assert done.returncode == -signal.SIGBUS
    assert done.stderr.count("Fatal Python error: Bus error") == 1


@pytest.mark.slow
def test_a_process_with_all_the_maps_that_it_may_have_lives(path: Path) -> None:
    program = """
        import ctypes, mmap, os, sys, rmq
        with rmq.open(sys.argv[1]) as store:
            store.scan(columns=["queue_offset"]).read_all()
            limit = int(open("/proc/sys/vm/max_map_count").read())
            libc, page = ctypes.CDLL(None), mmap.PAGESIZE
            begin = ctypes.addressof(many := ctypes.c_char.from_buffer(mmap.mmap(-1, limit * page)))
            at = 0
            while at < limit and libc.mprotect(ctypes.c_void_p(begin + at * page), page, mmap.PROT_READ) == 0:
                at += 2
            assert 0 < at < limit
            os.truncate(sys.argv[2], page)
            try:
                store.scan(columns=["queue_offset"]).read_all()
            except rmq.CorruptFileError:
                print("told")
    """
    done = run(program, path, log_files(path)[0])
    assert (done.stdout, done.stderr, done.returncode) == ("told\n", "", 0)


def test_an_only_index_file_that_was_cut_within_its_first_page_has_no_answer(tmp_path: Path) -> None:
    """That page is there, and the header reads as zeros. In a process that never lost a page, and looks for none."""
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        store.put(message(1))
    program = """
        import os, sys, rmq
        with rmq.open(sys.argv[1]) as store:
            print(store.select_phy_offset_many("T", ["k1"]).to_pylist())
            os.truncate(sys.argv[2], 1)
            try:
                print(store.select_phy_offset_many("T", ["k1"]).to_pylist())
            except rmq.CorruptFileError:
                print("told")
    """
    done = run(program, tmp_path / "s", index_file(tmp_path / "s"))
    assert (done.stdout, done.stderr) == ("[[0]]\ntold\n", "")
