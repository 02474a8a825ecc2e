# SPDX-License-Identifier: Apache-2.0
"""A message's fields for programs: the line of JSON is what the json module makes of the row."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta

import oracle
import pytest

import rmq
from rmq._core._record import PARSE_PROPERTIES
from rmq._core._recordbatch import RecordBatch
from rmq._core._storedfields import stored
from rmq.cli.fields import FIELDS, iso_time, json_line, message_row

TEXTS = ("", "a", '"', "\\", "\n\r\t\b\f", "\0", "\x7f\x80\u2028", "é", "\N{PILE OF POO}", "a b  c", "{}", "</script>")


def of(**fields: object) -> rmq.StoredMessage:
    place = {"topic": "T", "queue_id": 1, "queue_offset": 7, "body": b"b", "phy_offset": 0} | fields
    data = oracle.encode_record(**place)
    batch = RecordBatch(1)
    batch.scan(data, 0, 0, len(data), checks=PARSE_PROPERTIES)
    (message,) = stored(batch, rmq.StoredMessage)
    return message


def test_a_line_is_what_the_json_module_writes() -> None:
    """1,000 messages of texts that JSON escapes, hosts, times of every size, bodies that are not UTF-8."""
    rng = random.Random(5)
    for _ in range(1000):
        names = [*rng.sample(TEXTS, 2), *rng.sample(["KEYS", "TAGS", "UNIQ_KEY"], rng.randrange(4))]
        raw = b"".join(f"{name}\1{rng.choice(TEXTS)}\2".encode() for name in names if name)
        message = of(
            topic=rng.choice([text for text in TEXTS if text]), raw_properties=raw,
            body=rng.choice([rng.choice(TEXTS).encode(), rng.randbytes(9)]), flag=rng.randrange(-9, 9),
            born_host=rng.choice(["1.2.3.4:5", "[::1]:9"]), store_timestamp=rng.choice([0, -1, 2**63 - 1, -(2**63)]),
            born_timestamp=rng.randrange(-(10**14), 4 * 10**14))  # fmt: skip
        row = message_row(message)
        assert tuple(row) == FIELDS
        assert json_line(message) == json.dumps(row, ensure_ascii=False)


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
