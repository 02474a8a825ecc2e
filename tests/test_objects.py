# SPDX-License-Identifier: Apache-2.0
"""Object stores: where a store lies and how it is reached; S3 itself, by moto's server."""

from __future__ import annotations

import errno
import io
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import s3server
from click.testing import CliRunner
from objectstore import COUNT, Bucket, make_store

import rmq
from rmq.cli import main
from rmq.mirror import MirroredStore
from rmq.objects import Location, ObjectChangedError, Objects, ObjectStoreError
from rmq.paths import is_elsewhere, local_path
from rmq.rebuilding import rebuild_sidecars
from rmq.snapshot import Snapshot

SEGMENT = 65536


@pytest.mark.parametrize(("path", "elsewhere"), [("/a/b", False), ("a", False), ("file:///a", False),
                                                 ("FILE:///a", False), ("file:/a", False),
                                                 ("file://localhost/a", False), ("file://host/a", True),
                                                 ("file:a", False), ("hdfs:/a", True), ("s3://b/a", True),
                                                 ("file:////a", False), ("s3a://b/a", True),
                                                 ("abfs://a@b/c", True),
                                                 ("C://x", False), ("a:b", False), ("", False)])  # fmt: skip
def test_a_uri_of_another_scheme_is_elsewhere(path: str, elsewhere: bool) -> None:
    assert is_elsewhere(path) is elsewhere


def test_a_file_uri_is_a_path() -> None:
    for scheme in ("file://", "file:", "File:", "file://localhost"):
        assert local_path(f"{scheme}/a%20b/c#1?d\n") == "/a b/c#1?d\n"
    assert local_path("/a%20b") == "/a%20b"
    assert local_path("file:a") == "file:a"


def of_open(path: Any) -> Any:
    with rmq.open(path) as store:
        return store.max_phy_offset


def count_rows(batches: Iterator[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batch in batches)


EVERY_WAY_IN: dict[str, Callable[[Any, Path], Any]] = {
    "open": lambda path, target: of_open(path),
    "verify": lambda path, target: rmq.verify(path).record_count,
    "rebuild": lambda path, target: rmq.rebuild(path, target, processes=1).unit_count,
    "sidecars": lambda path, target: [file.size for file in rebuild_sidecars(path)],
    "export": lambda path, target: rmq.export(path, target, processes=1).row_count,
    "scan_map": lambda path, target: sum(rmq.scan_map(path, count_rows, processes=1)),
    "info": lambda path, target: CliRunner().invoke(main, ["topics", str(path)]).output,
}


@pytest.mark.parametrize("way", EVERY_WAY_IN)
def test_every_way_in_takes_file_uris_and_no_others(way: str, tmp_path: Path) -> None:
    look, place = EVERY_WAY_IN[way], tmp_path / "a store#1?"
    with rmq.open(place, "x", config=rmq.StoreConfig(mapped_file_size_commit_log=SEGMENT)) as store:
        store.put(rmq.Message("T", b"x"))
    wanted = look(place, tmp_path / "0")
    for number, uri in enumerate((f"file:{place}", f"file://{place}", f"file:{tmp_path}/a%20store%231%3F"), 1):
        assert look(uri, tmp_path / str(number)) == wanted
        assert look(Path(uri), tmp_path / f"{number}-path") == wanted
    if way != "info":
        with pytest.raises(FileNotFoundError, match=r"no directory of this machine.*hdfs:/a"):
            look("hdfs:/a", tmp_path / "elsewhere")


def test_a_fetch_that_fails_writes_nothing_more_once_it_has_told(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor may be another file's by then."""
    class Source:
        def get_stream(self, at: int, size: int) -> io.BytesIO:
            if at == 0:
                begun.wait()
                raise OSError("HTTP 503")
            begun.set()
            time.sleep(0.05)
            return io.BytesIO(b"X" * size)

    written, begun = [], threading.Event()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "checkpoint").write_bytes(bytes(4096))
    bucket = Bucket(tmp_path / "store", tmp_path / "cache")
    monkeypatch.setattr(Location, "connect", lambda location: bucket.connect(location))
    monkeypatch.setattr(rmq.objects, "REQUEST_BYTES", 256)
    monkeypatch.setattr(rmq.objects, "write_fully", lambda *place: written.append(place))
    objects = Objects(bucket.location)
    [listed] = objects.listing()
    objects._sources[listed.name] = Source()
    with pytest.raises(ObjectStoreError, match="503"):
        objects.fetch(listed, [(0, 4096)], -1)
    count = len(written)
    time.sleep(0.2)
    assert len(written) == count < 16


@pytest.mark.parametrize("mode", ["r", "a", "x"])
def test_a_uri_is_no_directory_to_open_or_to_make(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for uri in ("s3://KEY:PW1@b/a", "s3://b/a?secret_key=PW1"):
        for refused in (lambda uri=uri: rmq.open(uri), lambda uri=uri: rmq.export(tmp_path, uri)):
            with pytest.raises((FileNotFoundError, ValueError), match="no directory of this machine") as caught:
                refused()
            assert "PW1" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match="no directory of this machine; Spark reads") as caught:
        rmq.open("s3://bucket/store", mode)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, "s3://bucket/store")
    assert list(tmp_path.iterdir()) == []


def test_settings_stand_behind_the_path_or_beside_it() -> None:
    found = Location.parse("s3a://bucket/a/b/?region=eu-west-1&anonymous=true",
                           {"cacheBytes": "5", "endpoint": "http://h:1"})  # fmt: skip
    assert found == Location("s3://bucket/a/b", "http://h:1", "eu-west-1", True, "", 5)
    assert pickle.loads(pickle.dumps(found)) == found
    assert Location.parse("gs://bucket") == Location("gs://bucket")
    assert Location.parse("abfs://part@account/a").uri == "abfs://part@account/a"


@pytest.mark.parametrize(("text", "message"), [
    ("s3://AKIA:secret@bucket/a", "credentials are not taken from paths"),
    ("abfs://:secret@account/a", "credentials are not taken from paths"),
    ("s3://bucket/a?access_key=x", "credentials are not taken from paths"),
    ("s3://bucket/a?secretKey=x", "credentials are not taken from paths"),
    ("s3://bucket/a?X-Amz-Signature=secret@", "credentials are not taken from paths"),
    ("s3://bucket/a?regoin=secret@", "no setting regoin"),
    ("s3://bucket/a?regoin=x", "no setting regoin; there are endpoint, region"),
    ("s3://bucket/a#b", "no setting #"),
    ("s3:/bucket/a", "s3:/bucket/a names no bucket"),
    ("s3://bucket/a?anonymous=yes", "fs.anonymous: 'yes' is none of"),
    ("s3://bucket/a?cacheBytes=1e9", "fs.cacheBytes: '1e9' is no number"),
    ("gs://bucket/a?region=x", "fs.region is for s3:// only"),
], ids=str)  # fmt: skip
def test_a_wrong_setting_is_an_error_that_names_it(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Location.parse(text)
    assert "secret@" not in str(caught.value)


def test_a_scheme_that_nobody_knows_is_an_error_that_names_the_host() -> None:
    with pytest.raises(ObjectStoreError, match=r"host \S+: nix://a/b: "):
        Snapshot.take(Location.parse("nix://a/b"))


@pytest.fixture(scope="module")
def s3() -> Iterator[s3server.S3]:
    with s3server.running() as server:
        yield server


@pytest.fixture
def original(tmp_path: Path) -> Path:
    return make_store(tmp_path / "original")


@pytest.fixture
def server(s3: s3server.S3) -> Iterator[s3server.S3]:
    """One whose `before` is taken back."""
    before = s3.before
    yield s3
    s3.before = before


def location(s3: s3server.S3, uri: str, tmp_path: Path, **settings: str) -> Location:
    return Location.parse(uri, {"endpoint": s3.endpoint, "cacheDirectory": str(tmp_path / "cache")} | settings)


@pytest.mark.slow
def test_a_store_on_s3_answers_as_its_original(s3: s3server.S3, original: Path, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """With credentials of the environment for private objects, without any for public ones."""
    for acl, anonymous in (("private", "false"), ("public-read", "true")):
        uri = s3.upload(original, f"a-{acl}", acl)
        if anonymous == "false":
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        snapshot = Snapshot.take(location(s3, uri, tmp_path, anonymous=anonymous, region="us-east-1"))
        with rmq.open(original) as here, MirroredStore(snapshot.of("queues", "index")) as there:
            assert there.scan().read_all().equals(here.scan().read_all())
            assert there.query("orders", "o-600") == here.query("orders", "o-600")
            assert there.topics() == here.topics()
        monkeypatch.undo()


@pytest.mark.slow
def test_what_s3_refuses_is_one_error(s3: s3server.S3, original: Path, tmp_path: Path) -> None:
    private = s3.upload(original, "private", "private")
    cases = [
        (location(s3, "s3://no-such-bucket/a", tmp_path, anonymous="true"), "bucket"),
        (location(s3, private, tmp_path, anonymous="true"), "ACCESS_DENIED"),
        (Location.parse("s3://stores/a?endpoint=http://127.0.0.1:1&anonymous=true"), "connect"),
    ]
    for place, reason in cases:
        with pytest.raises(ObjectStoreError, match=rf"host \S+: {place.uri}.*{reason}"):
            Snapshot.take(place)
    with pytest.raises(ObjectStoreError, match="no message store"):
        Snapshot.take(location(s3, "s3://stores/nothing", tmp_path, anonymous="true")).require_store()


@pytest.mark.slow
def test_an_object_that_is_replaced_or_removed_meanwhile_is_an_error(s3: s3server.S3, original: Path,
                                                                     tmp_path: Path) -> None:  # fmt: skip
    snapshot = Snapshot.take(location(s3, s3.upload(original, "changing"), tmp_path, anonymous="true")).of()
    key = "changing/commitlog/00000000000000065536"
    for change in (lambda: s3.client.put_object(Bucket="stores", Key=key, Body=b"x", ACL="public-read"),
                   lambda: s3.client.delete_object(Bucket="stores", Key=key)):  # fmt: skip
        with MirroredStore(snapshot) as store:
            change()
            with pytest.raises(ObjectChangedError, match=key):
                store.scan().read_all()
    shutil.rmtree(original)


@pytest.mark.slow
def test_half_an_answer_is_an_error_and_does_not_stay(server: s3server.S3, original: Path, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A 206 of fewer bytes than were asked for, right in itself."""
    def halve(key: str, headers: dict[str, Any]) -> None:
        begin, end = map(int, headers["HTTP_RANGE"].removeprefix("bytes=").split("-"))
        if "/index/" in key and begin:
            headers["HTTP_RANGE"] = f"bytes={begin}-{(begin + end) // 2}"

    monkeypatch.setattr(rmq.objects, "REQUEST_BYTES", 1000)
    snapshot = Snapshot.take(location(server, server.upload(original, "short"), tmp_path, anonymous="true"))
    intact, server.before = server.before, halve
    with pytest.raises(ObjectStoreError, match=r"short/index/\d{17}: bytes \d+ to \d+ were asked for, fewer came"):
        MirroredStore(snapshot.of("index"))
    assert list((tmp_path / "cache" / "objects").iterdir()) == []
    server.before = intact
    with rmq.open(original) as here, MirroredStore(snapshot.of("index")) as there:
        keys = [f"o-{number}" for number in range(COUNT)]
        assert there.query_many("orders", keys).table.equals(here.query_many("orders", keys).table)


@pytest.mark.slow
def test_an_object_whose_bytes_are_the_marks_is_read(server: s3server.S3, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    for mark in rmq.objects.MARKS:
        (tmp_path / "store" / f"{mark}").write_bytes(bytes([mark]) * 100)
    objects = Objects(location(server, server.upload(tmp_path / "store", "marks"), tmp_path, anonymous="true"))
    assert sorted(objects.read_all(objects.listing())) == sorted(bytes([mark]) * 100 for mark in rmq.objects.MARKS)
    objects.close()


@pytest.mark.slow
def test_an_object_that_is_removed_between_two_reads_is_as_one_that_was_removed_before(
        server: s3server.S3, original: Path, tmp_path: Path) -> None:  # fmt: skip
    """S3 answers a read of an open object with an error of its own."""
    name = f"{SEGMENT:020d}"

    def remove(key: str, headers: dict[str, Any]) -> None:
        if key.endswith(name):
            server.client.delete_object(Bucket="stores", Key=key)

    snapshot = Snapshot.take(location(server, server.upload(original, "removed"), tmp_path, anonymous="true"))
    server.before = remove
    with MirroredStore(snapshot.of()) as store:
        with pytest.raises(ObjectChangedError, match=f"{name}: is not there"):
            store.scan().read_all()
        lost: list[rmq.LostRange] = []
        assert 0 < len(store.scan(on_damage="skip", lost=lost).read_all()) < COUNT
        assert [(item.begin_phy_offset, item.end_phy_offset) for item in lost] == [(SEGMENT, 2 * SEGMENT)]
