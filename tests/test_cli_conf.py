# SPDX-License-Identifier: Apache-2.0
"""`--conf FILE`: what is taken of a broker's own file, and what is said of a file that is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import call, good

import rmq

VERBS = (["info"], ["topics"], ["query", "T", "k"], ["get", "0"], ["cat", "T"], ["verify"], ["clean", "--dry-run"],
         ["rebuild", "--sidecar"], ["export", "out", "--topic", "T"],
         ["ingest", "x.csv", "--topic", "T"])  # fmt: skip
FOREIGN = {"passwd": "root:x:0:0:root:/root:/bin/bash\n", "setup.py": "import os\n\nprint(os.name)\n", "empty": ""}


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("x.csv").write_text("k\n1\n")
    with rmq.open("s", "x") as opened:
        opened.put(rmq.Message("T", b"1", keys="k"))
    return tmp_path / "s"


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_a_file_that_says_nothing_of_a_store_is_told_once(verb: list[str]) -> None:
    Path("passwd").write_text(FOREIGN["passwd"])
    Path("broker.conf").write_text("brokerId=0\nfileReservedTime=48\n")
    for conf, count in (("passwd", 1), ("broker.conf", 0)):
        done = call(verb[0], "s", *verb[1:], "--conf", conf)
        assert done.code == 0 or (verb[0], done.code) == ("export", 4), done.err
        told = [note for note in done.notes if "no line is a property" in note]
        assert told == [f"rmq: {conf}: no line is a property that is read of a broker.conf, such as "
                        "storePathCommitLog"] * count  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_broker_conf_is_told_and_changes_nothing(name: str) -> None:
    Path(name).write_text(FOREIGN[name])
    done = good("info", "s", "--conf", name)
    assert (done.rows, len(done.notes)) == (good("info", "s").rows, 1)


def test_ingest_stamps_the_host_of_the_broker(store: Path) -> None:
    Path("broker.conf").write_text("brokerIP1=10.1.2.3\nlistenPort=10921\n")
    assert good("ingest", "s", "x.csv", "--topic", "new", "--conf", "broker.conf").err == ""
    assert good("cat", "s", "new", "-f", "{store_host} {offset_msg_id:.16}").out == "10.1.2.3:10921 0A01020300002AA9\n"
