# SPDX-License-Identifier: Apache-2.0
"""Allocations that fail one at a time: nothing breaks, and what was stored is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rmq

pytest.importorskip("_testcapi")


@pytest.mark.parametrize("call", [
    "store._putter.put_few(messages, True)",
    'store._index.files[0].view.select_one("T#k", 2000, 0, 2**62)',
], ids=["put_few", "a long select_one"])  # fmt: skip
def test_a_lack_of_memory_for_an_answer_breaks_nothing(call: str) -> None:
    """Whatever allocation fails: what was let go of twice would be given out twice."""
    code = f"""
import _testcapi, tempfile
import rmq
config = rmq.StoreConfig(max_hash_slot_num=500, max_index_num=50_000)
with tempfile.TemporaryDirectory() as path, rmq.open(path + "/s", "x", config=config) as store:
    store.put_many([rmq.Message("T", b"body", keys="k")] * 2000)
    store.flush()
    messages = [rmq.Message("T", b"body", queue_id=queue_id) for queue_id in range(5)]
    for start in [*range(40)] * 4:
        _testcapi.set_nomemory(start, start + 1)
        try:
            {call}
        except MemoryError:
            pass
        finally:
            _testcapi.remove_mem_hooks()
        kept = [str(number) * 3 for number in range(300)]
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=100)


@pytest.mark.parametrize("way", ["list", "iter"])
def test_a_lack_of_memory_for_an_answer_tells_what_was_stored(way: str) -> None:
    code = """
import _testcapi, builtins, sys, tempfile
import rmq
made = getattr(builtins, sys.argv[1])
with tempfile.TemporaryDirectory() as path, rmq.open(path + "/s", "x") as store:
    store.put(rmq.Message("T", b"first"))
    messages = [rmq.Message("T", b"body", queue_id=queue_id) for queue_id in range(5)]
    found = set()
    for start in range(80):
        end, error = store._log.position, None
        _testcapi.set_nomemory(start, start + 1)
        try:
            store.put_many(made(messages))
        except MemoryError as raised:
            error = raised
        finally:
            _testcapi.remove_mem_hooks()
        if error is not None:
            stored = getattr(error, "stored", 0)  # none where it came before anything began
            found.add(stored)
            assert stored == (5 if store._log.position > end else 0), (start, stored)
    assert found == {0, 5}
"""
    subprocess.run([sys.executable, "-c", code, way], check=True, capture_output=True, timeout=100)


@pytest.mark.parametrize("stored", [0, 300])
def test_a_lack_of_memory_right_before_or_behind_the_append_tells_what_was_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: int
) -> None:
    with rmq.open(tmp_path / "s", "x") as store:
        append = store._log.append

        def short_of_memory(*arguments: Any, **more: Any) -> int:
            if stored:
                append(*arguments, **more)
            raise MemoryError

        monkeypatch.setattr(store._log, "append", short_of_memory)
        with pytest.raises(MemoryError) as caught:
            store.put_many(iter([rmq.Message("T", b"body")] * 300))
        assert caught.value.stored == stored  # type: ignore[attr-defined]
        monkeypatch.undo()
        assert store.put(rmq.Message("T", b"body")).queue_offset == stored
