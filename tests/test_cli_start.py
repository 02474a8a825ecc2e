# SPDX-License-Identifier: Apache-2.0
"""How the command begins: what it loads before it answers, and when its first line is out."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commandline import environment, good

import rmq
from rmq.cli.cat import FIRST_PAGE, PAGE
from rmq.cli.output import Output

COUNT = 2000
HEAVY = {"pyarrow", "pandas", "rich", "difflib", "rmq.verification", "rmq.cli.ingest"}
LOADED = """\
import sys
from rmq.cli import main
code = main(sys.argv[1:], standalone_mode=False)
print(*sys.modules, file=sys.stderr)
sys.exit(code or 0)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("start") / "s"
    config = rmq.StoreConfig(mapped_file_size_commit_log=1 << 20, max_hash_slot_num=100, max_index_num=5000)
    with rmq.open(path, "x", config=config) as made:
        made.put_many([rmq.Message("T", b"%d" % i, keys=f"k{i}") for i in range(COUNT)])
    return path


@pytest.mark.parametrize("words", [("query", "T", "k5"), ("get", "T/0/5"), ("cat", "T", "--limit", "5"), ("topics",),
                                   ("info",)], ids=lambda words: words[0])  # fmt: skip
def test_reading_verbs_load_nothing_heavy(store: Path, words: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", LOADED, words[0], str(store), *words[1:]]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.startswith("{")
    assert HEAVY & set(done.stderr.split()) == set()


@pytest.mark.parametrize("template", [None, "{body}"])
def test_a_pipe_has_the_first_line_before_the_second_is_looked_for(store: Path, monkeypatch: Any,
                                                                   template: str | None) -> None:  # fmt: skip
    begin, end = os.pipe()
    os.set_blocking(begin, False)
    with rmq.open(store) as opened, open(begin, "rb", 0) as reader, io.TextIOWrapper(open(end, "wb")) as writer:
        monkeypatch.setattr(sys, "stdout", writer)
        first, second = opened.pull("T", 0, 0, 2).messages
        seen: list[bytes | None] = []

        def found() -> Iterator[rmq.StoredMessage]:
            yield first
            seen.append(reader.read(1 << 16))
            yield second

        assert Output(None if template else "jsonl", template).messages(found()) == 2
        monkeypatch.undo()
    (line,) = seen
    assert line == b"0\n" if template else json.loads(line or b"")["body"] == "0"


def test_cat_pulls_few_messages_first_and_then_more(store: Path, monkeypatch: Any) -> None:
    pulled: list[int] = []
    pull = rmq.Store.pull

    def noted(opened: rmq.Store, topic: str, queue_id: int, queue_offset: int, count: int, **options: Any) -> Any:
        pulled.append(count)
        return pull(opened, topic, queue_id, queue_offset, count, **options)

    monkeypatch.setattr(rmq.Store, "pull", noted)
    assert [int(row["body"]) for row in good("cat", store, "T").rows] == list(range(COUNT))
    assert pulled == [16, 32, 64, 128, 256, 512, 512, 512]
    assert (pulled[0], max(pulled)) == (FIRST_PAGE, PAGE)
    pulled.clear()
    good("cat", store, "T", "--limit", 3)
    assert pulled == [FIRST_PAGE]


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--key-column", "a"), ("--key-column", "a", "--key-column", "b", "--queues", "2"),
                                     ("--tags-column", "b", "--body-column", "a")], ids=len)  # fmt: skip
@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_ingest_loads_one_reader_and_no_pandas(tmp_path: Path, form: str, options: tuple[str, ...]) -> None:
    """pyarrow imports pandas when it is asked for NumPy arrays, or is given Python's own values."""
    path = tmp_path / f"x.{form}"
    if form == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"a": ["1", ""], "b": ["x", None]}), path)
    else:
        path.write_text({"csv": "a,b\n1,x\n,\n", "jsonl": '{"a":"1","b":"x"}\n{"a":"","b":null}\n'}[form])
    command = [sys.executable, "-c", LOADED, "ingest", str(tmp_path / "s"), str(path), "--topic", "T", *options]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["stored"] == 2
    loaded = set(done.stderr.split())
    assert "pandas" not in loaded
    readers = {"pyarrow.csv": "csv", "pyarrow.json": "jsonl", "pyarrow.parquet": "parquet"}
    assert {readers[name] for name in readers.keys() & loaded} == {form}
