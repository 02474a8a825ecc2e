# ruff: noqa: F401, F811
"""`rmq verify`: what it prints, where, and its exit codes."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from commandline import SGR, Terminal, assert_error, call, good, on_terminal
from test_verify_damage import Victim, base

import rmq
from rmq.verification.findings import KINDS


@pytest.fixture
def damaged(base: Path, tmp_path: Path) -> Path:
    shutil.copytree(base, tmp_path / "s")
    victim = Victim(tmp_path / "s")
    victim.poke(*victim.in_log(5, 90), b"\x00")
    victim.poke(*victim.unit_of(9), b"\xff")
    (tmp_path / "s/README").touch()
    return tmp_path / "s"




def test_a_sound_store_prints_nothing_but_a_line_on_stderr(base: Path) -> None:
    done = good("verify", base)
    assert done.out == ""
    assert re.fullmatch(rf"rmq: {base}: sound, closed; 0 damage, 0 derived, 0 notes; 70 records, 70 units, "
                        r"140 entries, [\d.]+ kB in [\d.]+ s\n", done.err)  # fmt: skip


def test_findings_are_rows_the_severest_first_and_end_with_3(damaged: Path) -> None:
    done = call("verify", damaged)
    assert done.code == 3
    found = rmq.verify(damaged)
    assert done.rows == [vars(item) for item in found]
    assert [item.severity for item in found] == ["damage", "derived", "note"]
    assert list(done.rows[0]) == ["path", "offset", "kind", "severity", "reason"]
    assert "not sound, closed; 1 damage, 1 derived, 1 note;" in done.err
    csv = call("verify", damaged, "-o", "csv")
    assert csv.table == [{name: str(value) for name, value in row.items()} for row in done.rows]
    shown = call("verify", damaged, "-o", "table").out
    assert [line.split(" ")[0] for line in shown.split("\n") if line[:1].strip()] == ["damage", "derived", "note"]
    assert " crc: commitlog/0" in shown
    assert call("verify", f"file://{damaged}", "-o", "table").out == shown


def test_notes_alone_end_with_0(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "s")
    (tmp_path / "s/README").touch()
    assert [row["kind"] for row in good("verify", tmp_path / "s").rows] == ["name"]


def test_a_limit_that_leaves_findings_out_says_so(damaged: Path) -> None:
    done = call("verify", damaged, "--limit", 1)
    assert done.code == 3
    assert [row["severity"] for row in done.rows] == ["damage"]
    assert done.notes[0] == "rmq: 2 findings more are not shown; --limit shows more"
    found = rmq.verify(damaged, limit=1)
    assert (len(found), found.omitted, found.damage_count, found.derived_count, found.note_count) == (1, 2, 1, 1, 1)


def test_what_cannot_be_verified_is_one_line(tmp_path: Path) -> None:
    assert_error(call("verify", tmp_path / "none"), 4, "no such store directory")
    assert_error(call("verify", tmp_path), 4, "no message store")
    assert_error(call("verify", tmp_path, "--jobs", "0"), 2, "--jobs")
    assert_error(call("verify", tmp_path, "--limit", "x"), 2, "--limit")


def test_the_conf_tells_what_the_files_do_not(damaged: Path, tmp_path: Path) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text("mappedFileSizeCommitLog=8192\n")
    assert_error(call("verify", damaged, "--conf", conf), 2, "mapped_file_size_commit_log=8192 contradicts")
    conf.write_text("mappedFileSizeCommitLog=4096\n")
    assert len(call("verify", damaged, "--conf", conf).rows) == 3


@pytest.mark.parametrize(("arguments", "error"), [
    ({"jobs": 0}, ValueError), ({"limit": 0}, ValueError), ({"jobs": "2"}, TypeError), ({"limit": True}, TypeError),
    ({"limit": None}, TypeError),
    ({"config": {}}, TypeError), ({"progress": 5}, TypeError),
])  # fmt: skip
def test_wrong_arguments_are_named(base: Path, arguments: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        rmq.verify(base, **arguments)  # type: ignore[arg-type]


def test_what_is_no_directory_is_an_oserror(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        rmq.verify(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        rmq.verify(tmp_path / "none")


def test_progress_only_grows_and_comes_from_the_caller_s_thread(base: Path) -> None:
    told: list[tuple[int, int]] = []
    rmq.verify(base, progress=lambda done, total: told.append((done, total)), jobs=1)
    assert told
    assert told == sorted(told)
    assert all(0 <= done <= total for done, total in told)


def test_a_progress_that_raises_ends_the_verification(base: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rmq.verify(base, progress=stop)
    assert rmq.verify(base) == []


def test_nothing_is_left_open(base: Path) -> None:
    rmq.verify(base)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        rmq.verify(base)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
def test_a_bar_is_shown_on_a_terminal_only_and_on_stderr(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(max_hash_slot_num=100, max_index_num=5000)) as store:
        store.put_many([rmq.Message("T", b"x" * 1000, keys="k") for _ in range(2000)])
    done = on_terminal("verify", tmp_path / "s")
    assert done.code == 0
    assert "%" in SGR.sub("", done.out)
    assert "%" not in call("verify", tmp_path / "s").err
    assert "sound" in Terminal("verify", tmp_path / "s", columns=40).finish().out


def test_the_reference_names_every_kind() -> None:
    page = (Path(__file__).parents[1] / "docs/reference/verify.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", page, re.M))
    assert rows.pop("kind") == "Means"
    assert rows == KINDS
