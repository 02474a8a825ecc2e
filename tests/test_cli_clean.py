"""The verb `clean`: what it tells, what it removes, and how it ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from cleaning import CONFIG, HOUR, ROOMY, SEGMENT, date, make
from commandline import SGR, Done, assert_error, call, good, on_terminal, run
from conftest import digests

import rmq

ROOM = ("--max-used-percent", 100)  # however full the disk of the tests is


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Four segments have expired an hour ago, the others have just been written."""
    make(tmp_path / "s")
    date(tmp_path / "s", *[73 * HOUR] * 4, now=time.time_ns() // 1_000_000)
    return tmp_path / "s"


def names(done: Done) -> list[str]:
    return [row["path"] for row in done.rows]


def test_what_has_expired_is_listed_and_gone(shop: Path) -> None:
    done = good("clean", shop, *ROOM)
    assert names(done)[:4] == [f"{shop}/commitlog/{number * SEGMENT:020d}" for number in range(4)]
    assert {Path(name).relative_to(shop).parts[0] for name in names(done)} == {"commitlog", "consumequeue", "index"}
    assert not any(map(os.path.exists, names(done)))
    assert "removed; the log begins at phy offset 16,384" in done.notes[0]
    assert f"{len(done.rows)} files" in done.notes[0]
    with rmq.open(shop) as store:
        assert store.min_phy_offset == 4 * SEGMENT
    assert good("clean", shop, *ROOM).notes[0] == "rmq: nothing has expired"


def test_a_dry_run_lists_the_same_and_changes_nothing(shop: Path) -> None:
    before, entries = digests(shop, "."), sorted(shop.rglob("*"))
    told = good("clean", shop, "--dry-run", *ROOM)
    assert (digests(shop, "."), sorted(shop.rglob("*"))) == (before, entries)
    assert "would go; the log begins at phy offset 16,384 then" in told.notes[0]
    assert told.rows == good("clean", shop, *ROOM).rows


def test_a_table_shows_paths_below_the_store_and_says_why(shop: Path) -> None:
    lines = SGR.sub("", on_terminal("clean", shop, "--dry-run", *ROOM, columns=120).out).split("\n")
    assert [line.split() for line in lines[:2]] == [
        ["size", "reason", "file"],
        ["4.10", "kB", "last", "changed", "72", "h", "ago", "or", "earlier", "commitlog/00000000000000000000"],
    ]
    rows = good("clean", shop, "--dry-run", "-o", "csv", *ROOM).table
    assert (rows[0]["path"], rows[0]["size"]) == (f"{shop}/commitlog/{0:020d}", "4096")


def test_options_say_how_much_goes(shop: Path) -> None:
    def low(*options: object) -> int:
        return sum("/commitlog/" in name for name in names(good("clean", shop, "--dry-run", *options)))

    assert [low(*ROOM), low(*ROOM, "--reserved-time", 73), low(*ROOM, "--reserved-time", 74)] == [4, 4, 0]
    assert [low(*ROOM, "--limit", 2), low(*ROOM, "--limit", "all")] == [2, 4]
    assert low(*ROOM, "--reserved-time", 0, "--limit", "all") > 4
    assert low("--max-used-percent", 0, "--limit", 6) == 6
    assert low(*ROOM, "--reserved-time", 0, "--limit", 4) == 4
    assert "rmq: --limit 4 reached; more segments can go" in good(
        "clean", shop, "--dry-run", *ROOM, "--reserved-time", 0, "--limit", 4).notes  # fmt: skip


def test_broker_conf_tells_the_time_and_the_level(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rmq.Store.clean.__kwdefaults__ is not None
    monkeypatch.setitem(rmq.Store.clean.__kwdefaults__, "disk_usage", ROOMY)
    conf = tmp_path / "broker.conf"
    conf.write_text("fileReservedTime=74\ncleanFileForciblyEnable=false\ndiskMaxUsedSpaceRatio=1\n")
    done = good("clean", shop, "--conf", conf)
    assert done.rows == []
    assert "over diskMaxUsedSpaceRatio 1" in done.notes[1]
    conf.write_text("fileReservedTime=73\ncleanFileForciblyEnable=false\n")
    assert "16,384" in good("clean", shop, "--conf", conf).notes[0]


def test_queues_without_messages_go_when_asked(shop: Path) -> None:
    good("clean", shop, *ROOM)
    (row,) = good("clean", shop, *ROOM, "--expired-queues").rows
    assert (row["path"], row["reason"]) == (f"{shop}/consumequeue/old/0/{0:020d}", "queue without messages")


def test_a_store_that_is_open_for_writing_is_not_cleaned_but_looked_at(shop: Path) -> None:
    with rmq.open(shop, "r+", config=CONFIG):
        before = digests(shop, "commitlog", "consumequeue", "index")
        done = run("clean", shop, *ROOM)
        assert_error(done, 4, f"opened for writing by process {os.getpid()}")
        assert digests(shop, "commitlog", "consumequeue", "index") == before
        assert "16,384 then" in good("clean", shop, "--dry-run", *ROOM).notes[0]


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["--max-used-percent", "101"], 2, "--max-used-percent"),
        (["--reserved-time", "-1"], 2, "--reserved-time"),
        (["--limit", "0"], 2, "--limit"),
    ],
)
def test_wrong_options_are_named(shop: Path, arguments: list[str], code: int, part: str) -> None:
    before = digests(shop, ".")
    assert_error(call("clean", shop, *arguments), code, part)
    assert digests(shop, ".") == before


def test_what_is_no_store_or_damaged_is_told(tmp_path: Path, shop: Path) -> None:
    assert_error(call("clean", tmp_path / "nowhere"), 4, "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (shop / "commitlog" / f"{2 * SEGMENT:020d}").unlink()
    before = digests(shop, "commitlog", "consumequeue", "index")
    assert_error(call("clean", shop, *ROOM), 3, "segment is missing")
    assert digests(shop, "commitlog", "consumequeue", "index") == before
