# SPDX-License-Identifier: Apache-2.0
"""`rmq get --topic`: a message of that topic only, and a unique key before what it looks like."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import assert_error, call, good

import rmq


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Messages of T, whose unique keys look like other ids: 0 and A/0/0 are places of the first of A."""
    path = tmp_path_factory.mktemp("get") / "s"
    with rmq.open(path, "x") as opened:
        opened.put(rmq.Message("A", b"first"))
        for uniq_key in ("0", "A/0/0", "A/9/9"):
            opened.put(rmq.Message("T", f"key {uniq_key}".encode(), uniq_key=uniq_key))
    return path


def body(store: Path, *words: str) -> str:
    return good("get", store, *words, "-f", "{body}").out.rstrip("\n")


@pytest.mark.parametrize("id", ["0", "A/0/0"])
def test_with_a_topic_a_unique_key_comes_before_what_it_looks_like(store: Path, id: str) -> None:
    assert body(store, id) == body(store, id, "--topic", "A") == "first"
    assert body(store, id, "--topic", "T") == f"key {id}"


def test_what_looks_like_a_place_of_nothing_is_a_unique_key_without_a_topic_too(store: Path) -> None:
    assert body(store, "A/9/9") == body(store, "A/9/9", "--topic", "T") == "key A/9/9"
    assert_error(call("get", store, "A/0/\u0660"), 1, f"{store}: no message has the id 'A/0/\u0660'")


def test_with_a_topic_no_message_of_another_one_is_shown(store: Path) -> None:
    with rmq.open(store) as opened:
        second = opened.pull("T", 0, 0, 1).messages[0]
    for id in (str(second.phy_offset), "T/0/0", second.offset_msg_id):
        assert body(store, id) == body(store, id, "--topic", "T") == "key 0"
        assert_error(call("get", store, id, "--topic", "A"), 1, f"{store}: no message of 'A' has the id {id!r}")
