"""What else may lie in a foreign store: links, loops, strange names, files without end; what a result keeps of it."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import SIZES

import rmq
from rmq.marks import keep_cut
from rmq.paths import StorePaths

pytestmark = pytest.mark.slow

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200, max_hash_slot_num=10,
                         max_index_num=30)  # fmt: skip
LOG, QUEUE = f"commitlog/{0:020d}", f"consumequeue/T/0/{0:020d}"
TYPED = (rmq.RmqError, OSError, KeyError)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as opened:
        opened.put_many([rmq.Message("T", b"body %d" % i, keys=[f"k{i}", "all"]) for i in range(8)])
    return tmp_path / "s"


def ask_all(path: Path, mode: str = "r") -> None:
    """Answers are right or typed errors."""
    with suppress(*TYPED, ValueError), rmq.open(path, mode, config=CONFIG) as opened:
        for ask in (
            lambda s: s.scan(columns=["body"]).read_all()["body"].to_pylist() == [b"body %d" % i for i in range(8)],
            lambda s: len(s.query("T", "all", limit=None)) <= 8,
            lambda s: len(s.pull("T", 0, 0, 100).messages) == 8,
            lambda s: s.lookup(0).body == b"body 0",
            lambda s: s.topics().get("T") in (None, {0: (0, 8)}),
            lambda s: s.info().message_count >= 0,
        ):  # fmt: skip
            with suppress(*TYPED):
                assert ask(opened)


# ---- what a result holds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "unlink", "truncate", "overwrite"])
def test_a_table_holds_copies_of_the_bytes(store: Path, end: str) -> None:
    opened = rmq.open(store)
    table = opened.scan(columns=["raw_body", "keys", "properties", "raw_properties", "store_host"]).read_all()
    found = opened.query_many("T", ["k1", "all"], columns=["raw_body"]).table
    messages = opened.pull("T", 0, 0, 100).messages
    before = [table.to_pylist(), found.to_pylist(), [message.raw_body for message in messages]]
    opened.close()
    match end:
        case "unlink":
            shutil.rmtree(store)
        case "truncate":
            os.truncate(store / LOG, 0)
        case "overwrite":
            (store / LOG).write_bytes(b"\xff" * 4096)
    assert [table.to_pylist(), found.to_pylist(), [message.raw_body for message in messages]] == before
    table.validate(full=True)


# ---- bombs and large numbers ---------------------------------------------------------------------------------


def test_a_bomb_takes_no_more_memory_than_its_limit(store: Path) -> None:
    """A GiB of zeros in a MiB: the process may grow by some times the limit of 64 MiB."""
    packer = zlib.compressobj(9)
    bomb = b"".join(packer.compress(bytes(2**20)) for _ in range(1024)) + packer.flush()
    config = rmq.StoreConfig(mapped_file_size_commit_log=2**22)
    with rmq.open(store.with_name("bomb"), "x", config=config) as opened:
        opened.put(rmq.Message("T", bomb, sys_flag=1))
    code = """
import resource, sys, rmq
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with rmq.open(sys.argv[1]) as store:
    for ask in (lambda: store.scan().read_all(), lambda: store.pull("T").messages[0].body):
        try: ask(); print("read")
        except rmq.CorruptFileError as error: print(error.reason)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    command = [sys.executable, "-c", code, str(store.with_name("bomb"))]
    *reasons, grown = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert reasons == ["body decompresses to over 67108864 bytes"] * 2
    assert int(grown) < 450 * 1024


@pytest.mark.parametrize("unit", [(-1, 100, 0), (2**63 - 1, 2**31 - 2, 0), (0, -1, 0), (0, 2**31 - 2, 0), (5, 100, 0),
                                  (4096, 100, 0), (-(2**63), -(2**31), -(2**63))])  # fmt: skip
def test_a_queue_whose_units_point_anywhere_gives_no_message_that_is_not_its_own(
    store: Path, unit: tuple[int, int, int]
) -> None:
    shutil.rmtree(store / "rmq")
    (store / QUEUE).write_bytes((struct.pack(">qiq", *unit) * 10).ljust(200, b"\0"))
    with suppress(*TYPED), rmq.open(store, config=CONFIG) as opened:
        for at in range(-1, 12):
            with suppress(*TYPED):
                for message in opened.pull("T", 0, at).messages:
                    assert message.body == b"body %d" % message.queue_offset


def test_index_links_in_a_circle_and_forward_end_every_walk(store: Path) -> None:
    (index,) = (store / "index").iterdir()
    data = bytearray(index.read_bytes())
    entries = 40 + 4 * CONFIG.max_hash_slot_num
    for number in range(30):
        data[entries + 20 * number + 16 : entries + 20 * number + 20] = struct.pack(">i", (number * 7 + 5) % 30)
    for number in range(10):
        data[40 + 4 * number : 44 + 4 * number] = struct.pack(">i", 29 - number)
    index.write_bytes(data)
    with rmq.open(store, config=CONFIG) as opened:
        opened.select_phy_offset_many("T", [f"k{i}" for i in range(50)])
        assert [message.body for message in opened.query("T", "k3")] in ([], [b"body 3"])


@pytest.mark.parametrize("name", ["rmq/meta.json", "checkpoint", "rmq/manifest.json", "rmq/owner", "abort", "lock",
                                  "config/topics.json", f"batchconsumequeue/T/0/{0:020d}"])  # fmt: skip
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_file_of_a_tebibyte_of_nothing_is_not_read_into_memory(store: Path, name: str, mode: str) -> None:
    (store / name).parent.mkdir(parents=True, exist_ok=True)
    with (store / name).open("wb") as file:
        try:
            os.truncate(file.fileno(), 46 * 2**34)
        except OSError:  # what this file system can hold
            os.truncate(file.fileno(), 46 * 2**30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ask_all(store, mode)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 * 1024


@pytest.mark.parametrize("name", ["abort", "lock", "checkpoint", "rmq/marks", "rmq/manifest.json", "rmq/owner"])
@pytest.mark.parametrize("is_pipe", [True, False])
def test_verify_waits_for_no_pipe_and_reads_no_file_without_end(store: Path, name: str, is_pipe: bool) -> None:
    (store / name).unlink(missing_ok=True)
    if is_pipe:
        os.mkfifo(store / name)
    else:
        with (store / name).open("wb") as file:
            file.truncate(2**30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.alarm(20)  # kills; who waits for a pipe, waits for ever
    try:
        assert list(rmq.verify(store, config=CONFIG)) or name in ("abort", "rmq/owner")
    finally:
        signal.alarm(0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 * 1024


# ---- links ---------------------------------------------------------------------------------------------------

FILES = [LOG, QUEUE, "index", "checkpoint", "rmq/marks", "rmq/meta.json", "rmq/manifest.json", "rmq/owner", "abort",
         "abort.bak", "lock", "config/topics.json"]  # fmt: skip


def resolved(store: Path, name: str) -> Path:
    return next((store / "index").iterdir()) if name == "index" else store / name


@pytest.mark.parametrize("name", FILES)
def test_what_a_link_in_a_store_points_to_is_never_written(store: Path, tmp_path: Path, name: str) -> None:
    place, outside = resolved(store, name), tmp_path / "outside"
    if place.exists():
        shutil.move(place, outside)
    else:
        outside.write_bytes(b"something of somebody else")
    place.symlink_to(outside)
    before = outside.read_bytes()
    for mode in ("r", "r+"):
        with suppress(*TYPED, ValueError), rmq.open(store, mode, config=CONFIG) as opened:
            if mode == "r+":
                opened.put(rmq.Message("Fresh", b"fresh", keys="fresh"))
        assert outside.read_bytes() == before


@pytest.mark.parametrize("target", ["self", "/dev/zero", "/dev/null", "..", "missing", "log"])
@pytest.mark.parametrize("name", FILES)
def test_a_link_to_anything_is_an_error_or_does_not_show(store: Path, name: str, target: str) -> None:
    place = resolved(store, name)
    place.unlink(missing_ok=True)
    place.symlink_to({"self": place.name, "log": str(store / LOG)}.get(target, target))
    for mode in ("r", "r+"):
        ask_all(store, mode)


def linked_to_nothing(path: Path, start: int) -> None:
    """A store of 100 messages, one of whose segments is where nothing is mounted."""
    with rmq.open(path, "x", config=rmq.StoreConfig(**SIZES)) as opened:
        opened.put_many([rmq.Message("T", b"x" * 100) for _ in range(100)])
    segment = path / "commitlog" / f"{start:020d}"
    segment.unlink()
    segment.symlink_to(path.parent / "not mounted")


@pytest.mark.parametrize("mode", ["r", "r+", "a"])
def test_a_first_segment_that_is_a_link_to_nothing_was_not_cleaned_away(tmp_path: Path, mode: str) -> None:
    linked_to_nothing(tmp_path / "s", 0)
    with pytest.raises(rmq.CorruptFileError, match="a symbolic link to nothing"):
        rmq.open(tmp_path / "s", mode)


def test_a_later_segment_that_is_a_link_to_nothing_costs_a_reader_that_segment(tmp_path: Path) -> None:
    path, lost = tmp_path / "s", list[rmq.LostRange]()
    linked_to_nothing(path, 4096)
    with rmq.open(path) as reader:
        assert 0 < len(reader.scan(on_damage="skip", lost=lost).read_all()) < 100
    assert [(item.begin_phy_offset, item.end_phy_offset) for item in lost] == [(4096, 8192)]
    with pytest.raises(rmq.CorruptFileError):
        rmq.open(path, "r+")


@pytest.mark.parametrize("place", ["consumequeue/loop", "consumequeue/T/1", "index/loop", "rmq/loop", "config/loop",
                                   "consumequeue_ext", "batchconsumequeue"])  # fmt: skip
def test_directories_in_a_circle_are_not_followed(store: Path, place: str) -> None:
    (store / place).symlink_to("..")
    for mode in ("r", "r+"):
        ask_all(store, mode)


@pytest.mark.parametrize("name", ["rmq", "index", "consumequeue", "config"])
def test_a_file_where_a_directory_belongs_is_a_finding(store: Path, name: str) -> None:
    shutil.rmtree(store / name)
    (store / name).write_bytes(b"")
    found = rmq.verify(store, config=CONFIG)
    assert (str(store / name), "name", "derived") in [(one.path, one.kind, one.severity) for one in found]
    with pytest.raises(OSError, match=r"exists|directory"):
        rmq.open(store, "r+", config=CONFIG)


@pytest.mark.parametrize("name", ["rebuild", "replaced"])
@pytest.mark.parametrize("is_link", [False, True])
def test_what_stands_at_a_rebuild_s_names_is_removed_and_never_what_it_points_to(
        store: Path, tmp_path: Path, name: str, is_link: bool) -> None:  # fmt: skip
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    place = store / "rmq" / name
    for act in (lambda: rmq.rebuild(store, config=CONFIG), lambda: rmq.open(store, "r+", config=CONFIG).close()):
        place.symlink_to(tmp_path / "elsewhere") if is_link else place.write_bytes(b"")
        act()
        assert not os.path.lexists(place)
    ask_all(store)
    assert (tmp_path / "elsewhere" / "kept").exists()
    assert rmq.verify(store, config=CONFIG).is_sound


def test_directories_of_a_store_may_be_links(store: Path, tmp_path: Path) -> None:
    for name in ("commitlog", "consumequeue", "index"):
        shutil.move(store / name, tmp_path / name)
        (store / name).symlink_to(tmp_path / name)
    with rmq.open(store, "r+") as opened:
        opened.put(rmq.Message("T", b"body 8"))
        assert len(opened.pull("T", 0, 0, 100).messages) == 9


# ---- names ---------------------------------------------------------------------------------------------------

NAMES: list[bytes] = [b"\xff\xfe", b"new\nline", b"a" * 255, b"..x", b".hidden", b" ", b"\x1b[31m", b"%LMQ%a", b"CON",
                      "\u0660".encode() * 20, b"T\x01", b"caf\xc3\xa9"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("parent", ["consumequeue", "consumequeue/T", "commitlog", "index", "rmq", "config", "."])
def test_a_strange_name_is_an_error_or_does_not_show(store: Path, parent: str, name: bytes) -> None:
    strange = os.path.join(os.fsencode(store / parent), name)
    os.mkdir(strange)
    os.mkdir(os.path.join(strange, b"0"))
    for mode in ("r", "r+"):
        ask_all(store, mode)
    os.rmdir(os.path.join(strange, b"0"))
    os.rmdir(strange)
    with open(strange, "wb") as file:
        file.write(b"text")
    for mode in ("r", "r+"):
        ask_all(store, mode)
    with open(strange, "rb") as file:
        assert file.read() == b"text"


@pytest.mark.parametrize(("parent", "count"), [
    ("commitlog", 100_000), ("consumequeue/T/0", 100_000), *((parent, 20_000) for parent in (
        "consumequeue", "consumequeue/T", "index", "rmq", "rmq/cut", "config", "."))])  # fmt: skip
def test_many_stray_files_take_bounded_time(store: Path, parent: str, count: int) -> None:
    (store / parent).mkdir(exist_ok=True)
    directory = os.open(store / parent, os.O_RDONLY)
    for number in range(count):
        os.close(os.open(f"stray{number}", os.O_WRONLY | os.O_CREAT, dir_fd=directory))
    os.close(directory)
    start = time.process_time()
    for mode in ("r", "r+"):
        ask_all(store, mode)
    assert time.process_time() - start < 120 * count / 100_000


def test_asking_makes_no_file_elsewhere(store: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    ask_all(store)
    assert sorted(tmp_path.rglob("*")) == before


# ---- names of topics -----------------------------------------------------------------------------------------


def test_a_directory_whose_name_is_not_utf8_is_no_topic(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    strange = Path(os.fsdecode(os.fsencode(store) + b"/consumequeue/T\xff"))
    shutil.copytree(store / "consumequeue" / "T", strange)
    for mode in ("r", "r+", "r"):
        with rmq.open(store, mode, config=CONFIG) as opened:
            assert opened.topics() == {"T": {0: (0, 8)}}
            assert opened.table("topics").read_all()["topic"].to_pylist() == ["T"]
        assert "its name is not UTF-8; skipped" in caplog.text
        caplog.clear()
    report = rmq.verify(store)
    assert report.is_sound
    assert [(finding.path, finding.severity) for finding in report] == [(str(strange), "note")]
    rmq.rebuild(store)
    assert len(list(store.glob("consumequeue/T/0/*"))) == 1


def test_topics_name_their_directories_in_utf8_whatever_the_locale_says(store: Path) -> None:
    code = ("import rmq, sys; assert sys.getfilesystemencoding() == 'ascii'\n"
            "with rmq.open(sys.argv[1], 'r+') as store:\n"
            "    store.put(rmq.Message('caf\\xe9', b'2'))\n"
            "    assert [m.body for m in store.pull('caf\\xe9').messages] == [b'1', b'2']\n"
            "assert rmq.rebuild(sys.argv[1]).queue_count == 2 and rmq.verify(sys.argv[1]).is_sound\n")  # fmt: skip
    with rmq.open(store, "r+") as opened:
        opened.put(rmq.Message("café", b"1"))
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code, store], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(os.listdir(os.fsencode(store / "consumequeue"))) == [b"T", "café".encode()]


@pytest.mark.parametrize("size", [128, 255])
def test_queues_of_topics_that_only_a_hook_of_a_broker_refuses_are_queues(tmp_path: Path, size: int) -> None:
    """128 bytes or more outside %RETRY%: RocketMQ's store takes and recovers them."""
    path, topic = tmp_path / "s", "%RETRY%".ljust(size, "x")
    with rmq.open(path, "x", config=CONFIG) as store:
        store.put_many([rmq.Message(topic, b"%d" % i, keys="k") for i in range(5)])
    shutil.rmtree(path / "rmq")
    name = topic.replace("%", "_")
    (path / "consumequeue" / topic).rename(path / "consumequeue" / name)
    for file in (path / "commitlog").iterdir():
        file.write_bytes(file.read_bytes().replace(topic.encode(), name.encode()))
    shutil.rmtree(path / "index")  # whose keys begin with the topic
    for lost in (False, True):
        if lost:
            shutil.rmtree(path / "consumequeue")
        for mode in ("r", "r+"):
            with rmq.open(path, mode, config=CONFIG) as store:
                assert store.topics() == {name: {0: (0, 5)}}
                assert [message.body for message in store.pull(name).messages] == [b"%d" % i for i in range(5)]
        assert rmq.verify(path, config=CONFIG).is_sound
    rmq.rebuild(path, config=CONFIG)
    assert len(list((path / "consumequeue" / name / "0").iterdir())) == 1
    assert rmq.verify(path, config=CONFIG).unit_count == 5
    with rmq.open(path, "r+", config=CONFIG) as store, pytest.raises(rmq.IllegalMessageError, match="outside %RETRY%"):
        store.put(rmq.Message(name, b""))


def test_bytes_kept_of_a_store_whose_path_is_not_utf8_have_their_line(tmp_path: Path) -> None:
    paths = StorePaths(tmp_path / os.fsdecode(b"s\xff"))
    keep_cut(paths, paths.root / LOG, 5, [b"abc"], "why")
    (line,) = (path.read_bytes() for path in paths.cut.glob("*.txt"))
    assert line == b"3 bytes from byte 5 of %s: why\n" % os.fsencode(paths.root / LOG)


@pytest.mark.parametrize("place", ["consumequeue/T", "consumequeue/T/0", "consumequeue", "index"])
@pytest.mark.parametrize("kind", ["file", "broken link"])
def test_a_file_in_the_place_of_a_derived_directory_hides_no_message(store: Path, place: str, kind: str) -> None:
    shutil.rmtree(store / place)
    if kind == "file":
        (store / place).write_text("notes")
    else:
        (store / place).symlink_to("nowhere")
    with rmq.open(store) as reader:
        assert reader.scan().read_all().num_rows == len(reader.query("T", "all")) == 8
        assert len(reader.pull("T").messages) == 8
        assert reader.topics() == {"T": {0: (0, 8)}}
    for repair in (False, True):
        with pytest.raises(NotADirectoryError, match="stands where a directory belongs") as caught:
            rmq.open(store, "r+", repair=repair)
        assert caught.value.filename == str(store / place)


@pytest.mark.parametrize("size", [1, 12, 39])
@pytest.mark.parametrize("is_own", [True, False])
def test_a_checkpoint_that_is_cut_short_stops_no_open(store: Path, size: int, is_own: bool) -> None:
    if not is_own:
        shutil.rmtree(store / "rmq")
    os.truncate(store / "checkpoint", size)
    assert [(finding.kind, finding.severity) for finding in rmq.verify(store)] == [("size", "derived")]
    for mode in ("r", "r+", "r"):
        with rmq.open(store, mode) as opened:
            assert len(opened.query("T", "all")) == len(opened.pull("T").messages) == 8
    assert (store / "checkpoint").stat().st_size == 4096
    assert rmq.verify(store) == []


def test_a_file_in_the_place_of_a_brokers_queue_is_an_error_to_what_needs_it(store: Path) -> None:
    """A put would begin at offset 0 again."""
    shutil.rmtree(store / "rmq")
    shutil.rmtree(store / "consumequeue/T/0")
    (store / "consumequeue/T/0").write_text("notes")
    with rmq.open(store) as reader:
        assert reader.scan().read_all().num_rows == len(reader.query("T", "all")) == 8
        with pytest.raises(rmq.CorruptFileError, match="stands where a directory belongs"):
            reader.pull("T")
    with pytest.raises(rmq.CorruptFileError, match=r"stands where a directory belongs.*rebuild"):
        rmq.open(store, "r+")
    rmq.rebuild(store, processes=1)
    with rmq.open(store, "r+") as opened:
        assert opened.put(rmq.Message("T", b"next")).queue_offset == 8


@pytest.mark.parametrize("left", ["index", "batchconsumequeue/T/0", "consumequeue/CURRENT"])
def test_whatever_is_left_of_a_store_tells_that_its_log_is_elsewhere(store: Path, left: str) -> None:
    for name in ("rmq", "commitlog", "consumequeue"):
        shutil.rmtree(store / name)
    if left != "index":
        shutil.rmtree(store / "index")
        (store / left).parent.mkdir(parents=True)
    if left == "consumequeue/CURRENT":
        (store / left).touch()
        (store / "consumequeue/MANIFEST-1").touch()
    elif left != "index":
        (store / left).mkdir()
        (store / left / f"{0:020d}").write_bytes(bytes(46))
    with pytest.raises(rmq.CorruptFileError, match="the commit log has no segments"):
        rmq.open(store)
    with pytest.raises((rmq.CorruptFileError, rmq.UnsupportedFormatError)):
        rmq.open(store, "a")


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null")], ids=["pipe", "device"])
def test_what_is_no_index_file_says_nothing_of_sizes(tmp_path: Path, make: Callable[[Path], None], mode: Any) -> None:
    make(tmp_path / "f")
    with pytest.raises((rmq.CorruptFileError, OSError)) as raised:
        rmq.IndexFile(tmp_path / "f", mode, max_hash_slot_num=10, max_index_num=20)
    assert "max_index_num" not in str(raised.value)


def test_damage_below_a_name_that_is_no_utf8_is_told_as_damage(store: Path) -> None:
    path = store.rename(store.with_name(os.fsdecode(b"caf\xe9")))
    with rmq.open(path) as opened:
        place = opened.pull("T").messages[-1].phy_offset
        stream = opened.scan()
    with pytest.raises(rmq.StoreClosedError):
        stream.read_all()
    with open(path / LOG, "r+b") as file:
        file.seek(place + 8)
        file.write(b"\xff")
    with rmq.open(path) as opened:
        assert opened.table("segments").read_all()["path"].to_pylist() == [f"{path.parent}/caf\\udce9/{LOG}"]
        with pytest.raises(rmq.CorruptFileError, match=r"caf\\udce9/commitlog/.*body CRC differs") as caught:
            opened.scan().read_all()
    assert caught.value.path == str(path / LOG)
    with pytest.raises(rmq.CorruptFileError):
        rmq.export(path, path.with_name("out"), processes=1)


@pytest.mark.parametrize("mode", ["r", "r+", "a"])
def test_a_number_that_is_no_int_of_java_s_names_no_queue(store: Path, mode: Any) -> None:
    with rmq.open(store) as reader:
        topics = reader.topics()
    for topic in [*topics, "other"]:
        for number in (2**31, 9_999_999_999):
            (store / "consumequeue" / topic / str(number)).mkdir(parents=True)
    with rmq.open(store, mode) as opened:
        assert opened.topics() == topics
