# SPDX-License-Identifier: Apache-2.0
"""Messages as lines of JSON or CSV: what the json or the csv module makes of the row of fields."""

from __future__ import annotations

import csv
import io
import json
import random
from datetime import UTC, datetime, timedelta

import oracle
import pytest

import rmq
from rmq._core._messagelines import MessageLines
from rmq._core._record import PARSE_PROPERTIES
from rmq._core._recordbatch import RecordBatch
from rmq._core._storedfields import stored
from rmq.cli.fields import FIELDS, iso_time, message_row

TEXTS = ("", "a", '"', "\\", "\n\r\t\b\f", "\0", "\x7f\x80\u2028", "é", "\N{PILE OF POO}", "a b  c", "{}", "</script>")


def of(**fields: object) -> rmq.StoredMessage:
    place = {"topic": "T", "queue_id": 1, "queue_offset": 7, "body": b"b", "phy_offset": 0} | fields
    data = oracle.encode_record(**place)
    batch = RecordBatch(1)
    batch.scan(data, 0, 0, len(data), checks=PARSE_PROPERTIES)
    (message,) = stored(batch, rmq.StoredMessage)
    return message


def line_of(message: rmq.StoredMessage, form: str) -> str:
    row = message_row(message)
    if form == "jsonl":
        return json.dumps(row, ensure_ascii=False) + "\n"
    text = io.StringIO()
    row |= {"keys": " ".join(row["keys"]), "properties": json.dumps(row["properties"], ensure_ascii=False)}
    csv.writer(text).writerow(row.values())
    return text.getvalue().removesuffix("\r\n") + "\n"


FORMS = pytest.mark.parametrize("form", ["jsonl", "csv"])


@FORMS
def test_a_line_is_what_the_modules_json_and_csv_write(form: str) -> None:
    """1,000 messages of texts that JSON escapes, hosts, times of every size, bodies that are not UTF-8."""
    rng, lines, expected = random.Random(5), MessageLines(form), ""
    for _ in range(1000):
        names = [*rng.sample(TEXTS, 2), *rng.sample(["KEYS", "TAGS", "UNIQ_KEY"], rng.randrange(4))]
        raw = b"".join(f"{name}\1{rng.choice(TEXTS)}\2".encode() for name in names if name)
        message = of(
            topic=rng.choice([text for text in TEXTS if text]), raw_properties=raw,
            body=rng.choice([rng.choice(TEXTS).encode(), rng.randbytes(9)]), flag=rng.randrange(-9, 9),
            born_host=rng.choice(["1.2.3.4:5", "[::1]:9"]), store_timestamp=rng.choice([0, -1, 2**63 - 1, -(2**63)]),
            born_timestamp=rng.randrange(-(10**14), 4 * 10**14))  # fmt: skip
        assert tuple(message_row(message)) == FIELDS
        lines.add(message)
        expected += line_of(message, form)
    assert lines.size == len(expected.encode())
    assert lines.take() == expected
    assert (lines.size, lines.take()) == (0, "")


PROPERTIES = {
    "none": b"",
    "one twice": b"a\x011\x02b\x012\x02a\x013\x02",
    "tags, keys and a unique key twice":
        b"TAGS\x01a\x02KEYS\x01k\x02UNIQ_KEY\x01u\x02TAGS\x01b\x02KEYS\x01l m\x02UNIQ_KEY\x01v\x02",
    "two names that read alike": b"\xff\x011\x02\xfe\x012\x02",
    "a value that is not UTF-8": b"KEYS\x01k\xc3 \xed\xa0\x80\x02TAGS\x01\xf8\x02UNIQ_KEY\x01\xc0\x80\x02",
    "nothing but bytes that are not UTF-8": b"\xff",
    "no end": b"a\x011",
    "malformed": b"a\x02\x011\x02b\x01\x02c\x011\x012\x02\x02",
    "spaces": b"KEYS\x01  k   l \x02a b\x01 \x02",
    "32": b"".join(b"n%d\x01v\x02" % number for number in range(32)),
    "33": b"".join(b"n%d\x01v\x02" % number for number in range(33)),
    "5,000 of two names": b"a\x011\x02b\x012\x02" * 2500,
}


@FORMS
@pytest.mark.parametrize("name", PROPERTIES)
def test_properties_of_every_kind_are_what_the_parser_makes_of_them(name: str, form: str) -> None:
    lines, message = MessageLines(form), of(raw_properties=PROPERTIES[name])
    lines.add(message)
    assert lines.take() == line_of(message, form)


@FORMS
@pytest.mark.parametrize("body", [
    b"", b",", b"\r", b"a\n", b'"",""', b"\x00", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", "\U0010ffff".encode(),
    b"a" * 15 + b"\xff", bytes(range(128)) * 99, random.Random(1).randbytes(100_000), b'"' * 100_000,
], ids=lambda body: repr(body[:8]))  # fmt: skip
def test_bodies_are_text_or_hex(body: bytes, form: str) -> None:
    lines, message = MessageLines(form), of(body=body)
    lines.add(message)
    assert lines.take() == line_of(message, form)


@FORMS
def test_a_message_whose_body_does_not_decompress_adds_nothing(form: str) -> None:
    lines, whole, broken = MessageLines(form), of(), of(body=b"no zlib", sys_flag=1)
    lines.add(whole)
    with pytest.raises(rmq.CorruptFileError, match="decompress"):
        lines.add(broken)
    lines.add(whole)
    assert lines.take() == 2 * line_of(whole, form)
    with pytest.raises(TypeError):
        lines.add(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [(), ("body",), ("keys", "topic")])
def test_a_row_has_the_fields_that_are_asked_for(names: tuple[str, ...]) -> None:
    message = of()
    assert message_row(message, names) == {name: message_row(message)[name] for name in names}


def test_times_are_the_calendar_s_and_those_of_no_year_stay_numbers() -> None:
    epoch, edges = datetime(1970, 1, 1, tzinfo=UTC), (datetime.min, datetime.max)
    bounds = [(moment.replace(tzinfo=UTC) - epoch) // timedelta(milliseconds=1) for moment in edges]
    rng = random.Random(6)
    for ms in [*bounds, 0, -1, 999, 1000, *(rng.randrange(*bounds) for _ in range(1000))]:
        exact = (epoch + timedelta(milliseconds=ms)).isoformat(timespec="milliseconds")
        assert iso_time(ms) == exact.replace("+00:00", "Z")
    for ms in (bounds[0] - 1, bounds[1] + 1, 2**63 - 1, -(2**63)):
        assert iso_time(ms) == ms
    assert iso_time(None) is None
