# SPDX-License-Identifier: Apache-2.0
"""The verbs `topics query get cat`: what they find, how it is shown, and what they say of wrong arguments."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from commandline import assert_error, assert_shows, call, good, ms_of
from conftest import Golden

import rmq
from rmq.cli import VERBS, main

NOW = 1_700_000_000_000
CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=2000, max_hash_slot_num=100,
                         max_index_num=500)  # fmt: skip
ODD_BODIES = (b"", b"\xff\xfe", "é😀日本".encode(), b'a,"b"\nc', b"a\r\nb", b"\x00\x1b[31m", " \u2028 ".encode(), b" ")


def order(i: int) -> rmq.Message:
    keys = [f"order-{i}", f"many-{i % 4}"]
    return rmq.Message("Orders", b'{"n": %d}' % i, keys=keys, tags="AB"[i % 2], queue_id=i % 3, uniq_key=f"U{i}")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 orders in three queues, one every second since NOW; topics with odd names and bodies."""
    path, ticks = tmp_path_factory.mktemp("shop") / "s", iter(range(NOW, NOW + 10**9, 1000))
    with rmq.open(path, "a", config=CONFIG, clock=lambda: next(ticks)) as store:
        for i in range(300):
            store.put(order(i))
        for number, body in enumerate(ODD_BODIES):
            store.put(rmq.Message("odd", body, keys=[f"k{number}", "ключ"], tags="支払い", properties={"p": "a,b\rc"}))
        store.put(rmq.Message("Payments", b"x"))
        store.put(rmq.Message("%RETRY%group", b"x", keys="a/b:c"))
    return path


@pytest.fixture
def opened(shop: Path) -> Iterator[rmq.Store]:
    with rmq.open(shop) as store:
        yield store


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [json.loads(row["body"])["n"] for row in rows]


# ---- topics ----------------------------------------------------------------------------------------------


def test_topics_are_those_of_the_store_with_their_first_and_last_times(small_golden: Golden) -> None:
    rows = good("topics", small_golden.directory / "store").rows
    with rmq.open(small_golden.directory / "store") as store:
        assert [(row["topic"], row["queue_id"], row["min_queue_offset"], row["max_queue_offset"]) for row in rows] == [
            (topic, queue_id, low, high) for topic, queues in store.topics().items()
            for queue_id, (low, high) in queues.items()]  # fmt: skip
        for row in rows[::5]:
            ends = (row["min_queue_offset"], row["max_queue_offset"] - 1)
            times = [store.pull(row["topic"], row["queue_id"], at, 1).messages[0].store_timestamp for at in ends]
            assert [ms_of(row["first_timestamp"]), ms_of(row["last_timestamp"])] == times


def test_topics_of_one_topic_in_every_form(shop: Path) -> None:
    rows = good("topics", shop, "Orders").rows
    assert [(row["queue_id"], row["max_queue_offset"]) for row in rows] == [(0, 100), (1, 100), (2, 100)]
    assert good("topics", shop, "Orders", "-o", "csv").table == [{k: str(v) for k, v in row.items()} for row in rows]
    shown = good("topics", shop, "Orders", "-o", "table").out.split("\n")
    assert shown[0].split("  ")[0] == "topic"
    assert re.split(" {2,}", shown[1]) == ["Orders", "0", "0", "100", "2023-11-14 22:13:20", "2023-11-14 22:18:17"]


# ---- query -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_query_finds_what_the_store_finds(golden: Golden) -> None:
    asked = sorted({(question["topic"], question["key"]) for question in golden.answers["query_offset"]})
    with rmq.open(golden.directory / "store") as store:
        for topic, key in random.Random(1).sample(asked, 20):
            found = store.query(topic, key)
            done = call("query", golden.directory / "store", topic, "--", key)
            assert done.code == (0 if found else 1), (topic, key, done.err)
            assert len(done.rows) == len(found)
            for row, message in zip(done.rows, found, strict=True):
                assert_shows(row, message)


def test_query_is_newest_first_and_its_limit_says_so(shop: Path) -> None:
    every = numbers(good("query", shop, "Orders", "many-1", "--limit", "all").rows)
    assert every == list(range(1, 300, 4))[::-1]
    cut = good("query", shop, "Orders", "many-1")
    assert numbers(cut.rows) == every[:32]
    assert cut.notes == ["rmq: only the newest 32 are shown; --limit all shows the rest"]
    for limit in (len(every), len(every) + 1, 2**31, "all"):
        assert good("query", shop, "Orders", "many-1", "--limit", limit).err == ""


def test_query_by_unique_key_and_of_a_key_beside_others(shop: Path) -> None:
    assert numbers(good("query", shop, "Orders", "U7").rows) == [7]
    assert len(good("query", shop, "odd", "ключ").rows) == len(ODD_BODIES)
    assert len(good("query", shop, "%RETRY%group", "a/b:c").rows) == 1


def test_both_ends_of_times_count_to_the_millisecond(shop: Path) -> None:
    for begin, end, found in ((40, 80, range(40, 81)), (0, 0, range(1)), (299, 299, range(299, 300))):
        span = ["--begin", NOW + begin * 1000, "--end", NOW + end * 1000]
        rows = good("cat", shop, "Orders", "--from", span[1], "--until", span[3]).rows
        assert numbers(rows) == list(found)
        wanted = [i for i in found if i % 4 == begin % 4][::-1]
        assert numbers(good("query", shop, "Orders", f"many-{begin % 4}", *span, "--limit", "all").rows) == wanted
    assert numbers(good("cat", shop, "Orders", "--from", NOW + 298_001).rows) == [299]
    assert numbers(good("cat", shop, "Orders", "--until", NOW + 999).rows) == [0]


@pytest.mark.parametrize("form", [
    "1700000040000", "2023-11-14T22:14", "2023-11-14 22:14:00.000", "2023-11-15T06:14:00+08:00", "20231114T221400Z",
    "2023-11-14T17:14:00,000-05:00", " 2023-11-14T22:14:00Z ", "2023-W46-2T22:14",
])  # fmt: skip
def test_a_time_in_any_form_is_utc_when_it_names_no_zone(shop: Path, form: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert numbers(good("cat", shop, "Orders", "--from", form, "--limit", 1).rows) == [40]
        assert numbers(good("query", shop, "Orders", "many-0", "--begin", form, "--limit", "all").rows)[-1] == 40
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(("ago", "seconds"), [("-2h", 7200), ("-1h29m60s", 5400), ("-1d", 86400), ("-1w", 604800),
                                              ("-5400000ms", 5400)])  # fmt: skip
def test_a_span_is_before_now(tmp_path: Path, ago: str, seconds: int) -> None:
    times = iter([time.time() - seconds - 60, time.time() - seconds + 60])
    with rmq.open(tmp_path / "s", "a", config=CONFIG, clock=lambda: int(next(times) * 1000)) as store:
        for body in (b"before", b"after"):
            store.put(rmq.Message("T", body, keys="k"))
    assert [row["body"] for row in good("cat", tmp_path / "s", "T", "--from", ago).rows] == ["after"]
    assert [row["body"] for row in good("cat", tmp_path / "s", "T", "--until", ago).rows] == ["before"]
    assert [row["body"] for row in good("query", tmp_path / "s", "T", "k", "--end", ago).rows] == ["before"]
    assert len(good("cat", tmp_path / "s", "T", "--until", "now").rows) == 2


@pytest.mark.parametrize("text", [
    "yesterday", "2026-13-01", "", " ", "2h", "-2y", "-h", "12:00", "-5", "1e3", "--", "9223372036854775808",
    "2026-11-21T25:00", "-2h-3m", "2026-11-21T05:00 MEZ", "\udcff", "1" * 40, "1" * 5000, "-" + "9" * 5000 + "h",
])  # fmt: skip
def test_a_time_that_nobody_can_parse(shop: Path, text: str) -> None:
    for verb, option in (("query", "--begin"), ("query", "--end"), ("cat", "--from"), ("cat", "--until")):
        key = ["k"] if verb == "query" else []
        assert_error(call(verb, shop, "Orders", *key, option, text), 2, option, "is no time", "ISO 8601", "-2h")


def test_a_key_that_exists_outside_the_times_is_not_said_to_be_missing(shop: Path) -> None:
    done = call("query", shop, "Orders", "order-7", "--begin", NOW + 8000)
    assert_error(done, 1, "order-7")
    assert not done.err.endswith("no message of 'Orders' has the key 'order-7'\n"), "it has, before that time"


def test_a_range_that_was_scanned_is_told(small_golden: Golden) -> None:
    crash = small_golden.directory / "crash"
    last = max(small_golden.stored, key=lambda message: message["phy_offset"])
    with rmq.open(crash) as store:
        message = store.lookup(last["phy_offset"])
    done = good("query", crash, "--limit", "all", "--", message.topic, message.uniq_key or message.keys[0])
    assert message.phy_offset in [row["phy_offset"] for row in done.rows]
    (note,) = done.notes
    assert re.fullmatch(r"rmq: [\d.]+ kB of the log are in no index file and were scanned", note)
    told = [call("get", crash, id).err.splitlines()[0] for id in (message.uniq_key or "none", "no such id")]
    assert told == ["rmq: a part of the log is in no index file and was scanned"] * 2


# ---- get -------------------------------------------------------------------------------------------------


def test_get_by_every_form_of_an_id(small_golden: Golden) -> None:
    path = small_golden.directory / "store"
    with rmq.open(path) as store:
        for line in random.Random(2).sample(small_golden.stored, 3):
            wanted = store.lookup(line["phy_offset"])
            ids = [str(wanted.phy_offset), wanted.offset_msg_id, wanted.offset_msg_id.lower()]
            if store.pull(wanted.topic, wanted.queue_id, wanted.queue_offset, 1).messages[:1] == [wanted]:
                ids.append(f"{wanted.topic}/{wanted.queue_id}/{wanted.queue_offset}")
            for id in ids:
                (row,) = good("get", path, "--", id).rows
                assert_shows(row, wanted)


def test_get_by_unique_key(shop: Path) -> None:
    for options in ([], ["--topic", "Orders"]):
        assert numbers(good("get", shop, "U123", *options).rows) == [123]
    assert_error(call("get", shop, "U123", "--topic", "odd"), 1, "'U123'")
    assert_error(call("get", shop, "U123", "--topic", "orders"), 1, "no topic 'orders'", "did you mean 'Orders'?")


@pytest.mark.parametrize("length", [31, 33, 40, 55, 57])
def test_get_tells_of_an_id_of_the_wrong_length(shop: Path, opened: rmq.Store, length: int) -> None:
    id = (opened.lookup(0).offset_msg_id * 2)[:length]
    assert_error(call("get", shop, id), 1, id, f"an offset message id has 32 or 56 digits, this has {length}")


@pytest.mark.parametrize("id", [
    "", "1", "nothing", "0" * 32, "F" * 56, "9" * 19, "9" * 40, "a b", "T/0/0", "Orders/9/0", "Orders/0/100",
    "Orders/0", "Orders/9999999999/0", "Orders/0/9999999999999999999", "//", "\x1b[31m\n\u202e", "\udcff",
])  # fmt: skip
def test_get_without_a_find(shop: Path, id: str) -> None:
    assert_error(call("get", shop, "--", id), 1, "no message has the id")


# ---- cat -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cat_gives_every_message_of_every_queue_in_log_order(golden: Golden) -> None:
    path = golden.directory / "store"
    with rmq.open(path) as store:
        for topic, queues in store.topics().items():
            pulled = [message for queue_id in queues for message in store.pull(topic, queue_id, 0, 10**6).messages]
            rows = good("cat", path, topic).rows
            wanted = sorted(pulled, key=lambda message: message.phy_offset)
            assert [(r["phy_offset"], r["queue_id"], r["queue_offset"]) for r in rows] == \
                [(m.phy_offset, m.queue_id, m.queue_offset) for m in wanted]  # fmt: skip
            for row, message in list(zip(rows, wanted, strict=True))[::17]:
                assert_shows(row, message)


def test_cat_of_one_queue_of_tags_and_up_to_a_limit(shop: Path) -> None:
    assert numbers(good("cat", shop, "Orders", "-q", 1).rows) == list(range(1, 300, 3))
    assert numbers(good("cat", shop, "Orders", "--tags", "B").rows) == list(range(1, 300, 2))
    assert numbers(good("cat", shop, "Orders", "--tags", "A || B", "-q", 2).rows) == list(range(2, 300, 3))
    assert good("cat", shop, "Orders", "--tags", "C").out == ""
    cut = good("cat", shop, "Orders", "--limit", 10)
    assert numbers(cut.rows) == list(range(10))
    assert cut.notes == ["rmq: --limit 10 reached; more messages follow"]
    for limit in (300, 301, "all"):
        assert good("cat", shop, "Orders", "--limit", limit).err == ""


def test_cat_pages_through_queues_of_many_pages(shop: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("rmq.cli.cat.PAGE", 7)
    assert numbers(good("cat", shop, "Orders").rows) == list(range(300))
    assert numbers(good("cat", shop, "Orders", "--from", NOW + 50_000, "--until", NOW + 250_000).rows) == \
        list(range(50, 251))  # fmt: skip
    assert numbers(good("cat", shop, "Orders", "--tags", "A", "--limit", 99).rows) == list(range(0, 198, 2))


def test_cat_prints_a_format_of_ones_own(shop: Path) -> None:
    done = good("cat", shop, "Orders", "--limit", 2, "-f", r"{queue_id}/{queue_offset}\t{keys}\t{body}{tags:>3}\n")
    assert done.out == '0/0\torder-0 many-0\t{"n": 0}  A\n1/0\torder-1 many-1\t{"n": 1}  B\n'
    done = good("cat", shop, "Orders", "--limit", 1, "-f", "{{}} {store_timestamp}")
    assert done.out == "{} 2023-11-14T22:13:20.000Z\n"
    assert good("cat", shop, "Payments", "-f", "[{tags}|{uniq_key}|{keys}]").out == "[||]\n"
    assert good("query", shop, "Orders", "order-5", "-f", "{body}").out == '{"n": 5}\n'
    assert good("get", shop, "U5", "-f", "{body}").out == '{"n": 5}\n'


@pytest.mark.parametrize("template", ["{", "}", "{}", "{0}", "{nope}", "{Body}", "{body:d}", "{body!x}", "{body.x}",
                                      "{body:{nope}}", "{keys[x]}", "{store_timestamp:d}"])  # fmt: skip
def test_a_format_that_is_none(shop: Path, template: str) -> None:
    assert_error(call("cat", shop, "Orders", "-f", template), 2, "-f")


def test_a_format_and_a_form_exclude_each_other(shop: Path) -> None:
    for arguments in (["cat", shop, "Orders"], ["query", shop, "Orders", "k"], ["get", shop, "0"]):
        assert_error(call(*arguments, "-f", "{body}", "-o", "csv"), 2, "-f", "-o")


def test_cat_of_a_queue_that_is_not_there(shop: Path) -> None:
    assert_error(call("cat", shop, "Orders", "-q", 3), 1, "'Orders'", "no queue 3", "0, 1, 2")


# ---- forms -----------------------------------------------------------------------------------------------


def test_jsonl_and_csv_are_exact(shop: Path, opened: rmq.Store) -> None:
    messages = opened.pull("odd", 0, 0, 100).messages
    assert [message.body for message in messages] == list(ODD_BODIES)
    for row, message in zip(good("cat", shop, "odd").rows, messages, strict=True):
        assert_shows(row, message)
    table = good("cat", shop, "odd", "-o", "csv").table
    assert len(table) == len(messages)
    for row, message in zip(table, messages, strict=True):
        assert (row["body"].encode() if row["body_encoding"] == "utf-8" else bytes.fromhex(row["body"])) == message.body
        assert (row["keys"].split(), json.loads(row["properties"])) == (list(message.keys), message.properties)
        assert (int(row["phy_offset"]), row["tags"], row["uniq_key"]) == (message.phy_offset, message.tags, "")
        assert ms_of(row["store_timestamp"]) == message.store_timestamp


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\n\r"])
def test_a_body_with_line_ends_is_one_row_of_csv(tmp_path: Path, end: str) -> None:
    with rmq.open(tmp_path / "s", "a", config=CONFIG) as store:
        store.put(rmq.Message("T", f"a{end}b{end}".encode(), keys="k"))
    (row,) = good("cat", tmp_path / "s", "T", "-o", "csv").table
    assert row["body"] == f"a{end}b{end}"
    rows = list(csv.reader(io.StringIO(good("get", tmp_path / "s", "0", "-o", "csv").out, newline="")))
    assert dict(rows[1:])["body"] == f"a{end}b{end}"
    assert good("cat", tmp_path / "s", "T").out.count("\n") == 1


@pytest.mark.parametrize(("ms", "text"), [
    (0, "1970-01-01T00:00:00.000Z"), (-1, "1969-12-31T23:59:59.999Z"), (1_700_000_000_123, "2023-11-14T22:13:20.123Z"),
    (253_402_300_799_999, "9999-12-31T23:59:59.999Z"), (253_402_300_800_000, 253_402_300_800_000),
    (-62_135_596_800_000, "0001-01-01T00:00:00.000Z"), (-40_000_000_000_000, "0702-06-15T00:53:20.000Z"),
    (2**62, 2**62), (-(2**62), -(2**62)),
])  # fmt: skip
def test_every_time_is_shown_in_utc(tmp_path: Path, ms: int, text: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    with rmq.open(tmp_path / "s", "a", config=CONFIG, clock=lambda: NOW) as store:
        store.put(rmq.Message("T", b"x", born_timestamp=ms))
    (row,) = good("cat", tmp_path / "s", "T").rows
    (fact,) = [line for line in good("get", tmp_path / "s", "0", "-o", "table").out.split("\n") if "born_t" in line]
    monkeypatch.undo()
    time.tzset()
    assert row["born_timestamp"] == text
    assert fact.removeprefix("born_timestamp").strip() == f"{str(text).replace('T', ' ').removesuffix('Z')} UTC"


@pytest.mark.parametrize(("size", "text"), [
    (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9994, "9.99 kB"), (9995, "10.0 kB"), (99_949, "99.9 kB"),
    (99_950, "100 kB"), (999_499, "999 kB"), (999_500, "1.00 MB"), (2**40, "1.10 TB"), (2**63 - 1, "9.22 EB"),
])  # fmt: skip
def test_sizes_for_people_have_three_figures(size: int, text: str) -> None:
    assert import_module("rmq.cli.output").people_size(size) == text


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_no_line_of_a_table_is_wider_than_the_terminal(shop: Path, columns: int, monkeypatch: Any) -> None:
    from rich.cells import cell_len

    monkeypatch.setenv("COLUMNS", str(columns))
    for arguments in (["topics", shop], ["cat", shop, "odd"], ["cat", shop, "Orders"], ["query", shop, "odd", "ключ"],
                      *([["get", shop, "U1"], ["info", shop]] if columns >= 40 else [])):  # fmt: skip
        out = good(*arguments, "-o", "table").out
        assert out.strip()
        assert max(cell_len(line) for line in out.split("\n")) <= columns, arguments
        assert "\x1b" not in out


def test_a_table_shows_text_as_it_is(tmp_path: Path, monkeypatch: Any) -> None:
    texts = ("[bold]x[/bold]", ":smile: :key:", "http://h/ 12 'x' True", "a\\b", "[red", "{x}", "%s", "👍🏽 é 日本")
    with rmq.open(tmp_path / "s", "a", config=CONFIG) as store:
        for text in texts:
            store.put(rmq.Message("T", text.encode(), tags=text))
    monkeypatch.setenv("COLUMNS", "200")
    for line, text in zip(good("cat", tmp_path / "s", "T", "-o", "table").out.split("\n")[1:], texts, strict=False):
        assert line.endswith(f"  {text}")
        assert line.count(text) == 2
    for number, text in enumerate(texts):
        facts = good("get", tmp_path / "s", f"T/0/{number}", "-o", "table").out
        assert re.search(rf"^body +{re.escape(text)}$", facts, re.M), facts


# ---- wrong arguments -------------------------------------------------------------------------------------


def test_no_arguments_show_the_help() -> None:
    done = call()
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("Usage: rmq ")
    assert all(f"\n  {verb} " in done.err for verb in VERBS)


@pytest.mark.parametrize("verb", [*VERBS])
def test_every_verb_tells_what_it_takes(verb: str) -> None:
    done = good(verb, "--help")
    assert done.out.startswith(f"Usage: rmq {verb} [OPTIONS] ")
    assert good(verb, "-h").out == done.out
    assert max(map(len, done.out.split("\n"))) <= 80
    assert_error(call(verb), 2, "Missing", f"(see rmq {verb} --help)")
    assert_error(call(verb, "--nope"), 2, "--nope")


def test_version() -> None:
    assert good("--version").out == f"rmq {rmq.__version__}\n"


@pytest.mark.parametrize(("arguments", "parts"), [
    (["inof", "."], ["no verb 'inof'", "did you mean 'info'?"]), (["Info"], ["did you mean 'info'?"]),
    (["nope", "."], ["no verb 'nope'"]), (["info", ".", "x"], ["extra argument"]), (["info", ".", "-o", "x"], ["'x'"]),
    (["cat", ".", "T", "--limit", "0"], ["'0' is no limit", "all"]), (["cat", ".", "T", "--limit", "-1"], ["--limit"]),
    (["query", ".", "T", "k", "--limit", "1.5"], ["--limit"]), (["cat", ".", "T", "-q", "-1"], ["--queue"]),
    (["cat", ".", "T", "-q", "2147483648"], ["--queue"]), (["query", ".", "T"], ["KEY"]), (["completion"], ["bash"]),
    (["cat", ".", "T", "--from"], ["--from"]), (["\x1b[31m"], ["no verb ", "\\x1b[31m'"]),
])  # fmt: skip
def test_wrong_usage_is_one_line(arguments: list[str], parts: list[str]) -> None:
    assert_error(call(*arguments), 2, *parts, "--help)")


@pytest.mark.parametrize(
    "verb", [["info"], ["verify"], ["topics"], ["cat", "T"], ["query", "T", "k"], ["get", "0"]], ids=" ".join
)
def test_what_is_no_store_is_said_to_be_none(tmp_path: Path, verb: list[str]) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    reasons = {"nowhere": "no such store directory", "file": "not a directory", "empty": "no message store"}
    for name, reason in {**reasons, "file/x": "", "a\nb\x1b[2J": "", "\udcff": ""}.items():
        assert_error(call(verb[0], tmp_path / name, *verb[1:]), 4, str(tmp_path), reason)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "empty"}
    assert not list((tmp_path / "empty").iterdir())


@pytest.mark.parametrize(("wrong", "near"), [
    ("Order", "Orders"), ("orders", "Orders"), ("ORDERS", "Orders"), ("Ordres", "Orders"), ("payment", "Payments"),
    ("Paymnts", "Payments"), ("Orders ", "Orders"), ("RETRY%group", "%RETRY%group"),
])  # fmt: skip
def test_near_names_of_a_wrong_topic_are_suggested(shop: Path, wrong: str, near: str) -> None:
    for done in (call("topics", shop, wrong), call("cat", shop, wrong), call("query", shop, wrong, "k")):
        assert_error(done, 1, f"no topic {wrong!r}", f"did you mean {near!r}?")


def test_a_topic_near_to_none_gets_no_suggestion(shop: Path) -> None:
    for wrong in ("xyzzy", "", "\udcff", "😀"):
        assert_error(call("topics", shop, "--", wrong), 1, "no topic")
        assert "did you mean" not in call("topics", shop, "--", wrong).err


@pytest.mark.parametrize("key", ["", " ", "a b", "order-300", "ORDER-1", "\x01", "\udcff", "k" * 100_000, "-1"])
def test_a_key_that_no_message_has(shop: Path, key: str) -> None:
    assert_error(call("query", shop, "Orders", "--", key), 1, "no message of 'Orders' has the key")


def test_a_broker_conf_that_is_none(shop: Path, tmp_path: Path) -> None:
    (tmp_path / "broker.conf").write_text("mappedFileSizeCommitLog=many\n")
    assert_error(call("info", shop, "--conf", tmp_path / "broker.conf"), 2, "mappedFileSizeCommitLog")
    (tmp_path / "broker.conf").write_text("mappedFileSizeCommitLog=1024\n")
    assert_error(call("info", shop, "--conf", tmp_path / "broker.conf"), 2, "mapped_file_size_commit_log")
    assert_error(call("info", shop, "--conf", tmp_path / "nowhere"), 4, "nowhere: No such file")
    (tmp_path / "broker.conf").write_text("mappedFileSizeCommitLog=65536\nbrokerName=a\n")
    assert good("info", shop, "--conf", tmp_path / "broker.conf").rows == good("info", shop).rows


def test_damage_is_told_with_code_3(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "a", config=CONFIG) as store:
        places = [store.put(rmq.Message("T", b"body%d" % i, keys="k")) for i in range(3)]
    log = tmp_path / "s/commitlog" / f"{0:020d}"
    with open(log, "r+b") as file:
        file.seek(places[1].phy_offset)
        file.write(bytes(8))  # size and magic
    for verb, *arguments in (["query", "T", "k"], ["get", "T/0/1"]):
        assert_error(call(verb, tmp_path / "s", *arguments), 3, f"{log}: byte {places[1].phy_offset}")
    assert len(good("topics", tmp_path / "s").rows) == 1, "the first and the last message are whole"


# ---- completion ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_call_rmq(shell: str) -> None:
    script = good("completion", shell).out
    assert f"_RMQ_COMPLETE={shell}_complete" in script
    assert "rmq" in script


def completed(*words: object) -> list[tuple[str, str]]:
    """(kind, word) of what bash would offer for the last word."""
    line = " ".join(["rmq", *map(str, words)])
    variables = {"_RMQ_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    result = CliRunner().invoke(main, [], prog_name="rmq", env=variables, catch_exceptions=False)
    assert result.stderr == ""
    return [(kind, word) for kind, _, word in (text.partition(",") for text in result.stdout.split())]


def test_verbs_options_and_topics_are_completed(shop: Path) -> None:
    assert completed("q") == [("plain", "query")]
    assert ("plain", "--tags-column") in completed("ingest", shop, "--ta")
    assert completed("info", shop, "-o", "j") == [("plain", "jsonl")]
    for verb in ("topics", "cat", "query"):
        assert completed(verb, shop, "Or") == [("plain", "Orders")]
    assert {word for _, word in completed("cat", shop, "")} == {"Orders", "odd", "Payments", "%RETRY%group"}
    assert completed("cat", "nowhere", "Or") == []


def test_files_are_completed() -> None:
    assert [kind for kind, _ in completed("info", "st")] in (["file"], ["dir"])
    assert [kind for kind, _ in completed("ingest", "st", "fi")] == ["file"]
    assert [kind for kind, _ in completed("info", "st", "--conf", "br")] == ["file"]


@pytest.mark.parametrize("words", [
    ("ingest", "{store}", "{file}", "--topic", "T", "--delimiter", "\udcff"),
    ("ingest", "{store}", "{file}", "--topic", "T", "--key-column", "\udcff"),
    ("ingest", "{store}", "{file}", "--topic", "T", "--body-column", "\udcff"),
    ("cat", "{store}", "Orders", "-f", "{{body_crc:c}}"), ("export", "{store}", "{file}-x", "--columns", ""),
], ids=lambda words: words[-2])  # fmt: skip
def test_an_option_that_nothing_can_be_made_of_is_one_line(shop: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "x.csv").write_text("id,b\n1,2\n")
    asked = [word.format(store=shop, file=tmp_path / "x.csv") for word in words]
    assert_error(call(*asked), 2, words[-2].removeprefix("--key-").removeprefix("--body-").removeprefix("--"))
