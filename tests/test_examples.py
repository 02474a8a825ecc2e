# SPDX-License-Identifier: Apache-2.0
"""The teaching programs of examples/: what they print is what the files and the arithmetic say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import oracle
import pytest

import rmq

EXAMPLES = Path(__file__).parents[1] / "examples"
CLASSIC = "8d8eb486-d94c-4da1-bdfe-f0587161ea05"
TWIN = "9E8eb486-d94c-4da1-bdfe-f0587161ea05"  # of the same hash
SLOTS, ENTRIES = 5_000_000, 20_000_000
HEADER_SIZE, SLOT_SIZE, ENTRY_SIZE, UNIT_SIZE = 40, 4, 20, 20


def run_example(name: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """An example in a directory, with the rmq under test; a sitecustomize.py there is loaded first."""
    path = os.pathsep.join([str(directory), str(Path(rmq.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUTF8": "1"}
    return subprocess.run([sys.executable, EXAMPLES / name, *arguments], cwd=directory, env=environment,
                          encoding="utf-8", capture_output=True, check=False)  # fmt: skip


def output_of(name: str, directory: Path, *arguments: str) -> str:
    done = run_example(name, directory, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def blocks_of(output: str) -> dict[str, dict[str, str]]:
    """Title -> name -> figures of each block: a title, then lines of two spaces, a name, two spaces, figures."""
    blocks = {}
    for block in output.strip().split("\n\n"):
        title, *lines = block.splitlines()
        blocks[title] = dict(re.fullmatch(r"  (\S+(?: \S+)*)  +(.*)", line).groups() for line in lines)
    return blocks


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def written(directory: Path) -> str:
    """What write_messages.py printed; the store is directory / "store" from then on."""
    return output_of("write_messages.py", directory, "store")


@pytest.fixture(scope="module")
def store(directory: Path, written: str) -> Path:
    return directory / "store"


@pytest.fixture(scope="module")
def records(store: Path) -> list[oracle.Record]:
    return oracle.read_records(store)


@pytest.fixture(scope="module")
def index(store: Path) -> oracle.IndexFile:
    (file,) = oracle.open_index_files(store, SLOTS, ENTRIES)
    return file


def hash_figures(key: str) -> dict[str, str]:
    hash_code = oracle.java_hash(key)
    slot = abs(hash_code) % SLOTS
    return {
        "hash code": f"{hash_code}",
        "absolute hash": f"{abs(hash_code)}",
        "slot number": f"{abs(hash_code)} % 5000000 = {slot}",
        "slot position": f"40 + 4 * {slot} = {HEADER_SIZE + SLOT_SIZE * slot}",
    }


def hex_of(number: int, size: int) -> str:
    return number.to_bytes(size, "big").hex()


def unit_bytes(record: oracle.Record) -> str:
    digits = hex_of(record.phy_offset, 8) + hex_of(record.size, 4) + hex_of(record.tags_code, 8)
    return " ".join(re.findall("." * 8, digits))


def index_key(record: oracle.Record) -> str:
    return f"{record.topic}#{record.uniq_key}"


# ---- write_messages.py -------------------------------------------------------------------------------


def test_ten_messages_are_written(store: Path, records: list[oracle.Record]) -> None:
    assert len(records) == len({record.uniq_key for record in records}) == 10
    assert oracle.check_store(store, SLOTS, ENTRIES) == []


def test_figures_of_each_message(written: str, records: list[oracle.Record], index: oracle.IndexFile) -> None:
    _, *blocks, _ = blocks_of(written).items()  # the files first, the classic figures last
    phy_offset = 0
    for number, (record, block) in enumerate(zip(records, blocks, strict=True)):
        size = 91 + len(record.body) + len(record.topic) + len(record.raw_properties)
        key = index_key(record)
        newest = index.slot(abs(oracle.java_hash(key)) % SLOTS)
        figures = {
            "commit-log offset": f"{phy_offset}: {size} bytes, magic 0xDAA320A7",
            "queue unit": f"{number}, at {number} * 20 = {number * UNIT_SIZE}",
            "its bytes": unit_bytes(record),
            "its fields": f"phy offset {phy_offset}, size {size}, tags code {oracle.java_hash(record.tags or '')}",
            "index key": key,
            **hash_figures(key),
            "in the slot": f"{hex_of(newest, 4)}: entry {newest}, the newest of its chain",
        }
        assert block == (f"message {record.uniq_key}, {record.body.decode()}", figures)
        phy_offset += size


def test_files_that_are_named_are_there(written: str, store: Path) -> None:
    files = re.findall(r"^  (?:commit log|consume queue|index file) +(\S+)  (\d+) bytes$", written, re.M)
    assert [int(size) for _, size in files] == [2**30, 6_000_000, 420_000_040]
    assert [(store / path).stat().st_size for path, _ in files] == [int(size) for _, size in files]


def test_classic_figures(written: str) -> None:
    title, figures = list(blocks_of(written).items())[-1]
    assert CLASSIC in title
    assert figures == {
        "hash code": "-358470777",
        "absolute hash": "358470777",
        "slot number": "358470777 % 5000000 = 3470777",
        "slot position": "40 + 4 * 3470777 = 13883148",
    }


def test_classic_slot_position_is_where_a_file_has_it(tmp_path: Path) -> None:
    with rmq.IndexFile(tmp_path / "index", "x") as file:
        file.put_key(CLASSIC, 0, 1)
    with (tmp_path / "index").open("rb") as data:
        data.seek(13883148)
        assert data.read(4) == b"\0\0\0\1"


def test_store_that_exists_is_left_alone(directory: Path, store: Path) -> None:
    before = oracle.read_records(store)
    done = run_example("write_messages.py", directory, "store")
    assert done.returncode == 1
    assert "exists and is not empty" in done.stderr
    assert oracle.read_records(store) == before


# ---- read_queue.py -----------------------------------------------------------------------------------


def test_units_one_by_one(directory: Path, store: Path, records: list[oracle.Record]) -> None:
    (heading, _), *blocks = blocks_of(output_of("read_queue.py", directory, "store")).items()
    assert heading == "consumequeue/TopicTest/0/00000000000000000000: 10 units of 300000"
    (units,) = oracle.read_queues(store).values()
    for unit, record, block in zip(units, records, blocks, strict=True):
        number, phy_offset, size, tags_code = unit
        figures = {
            "its bytes": unit_bytes(record),
            "its fields": f"phy offset {phy_offset}, size {size}, tags code {tags_code}",
            "the record": f"size {record.size}, queue 0, queue offset {number}, phy offset {record.phy_offset}",
            "stored at": f"{1_700_000_000_000 + 1000 * number}",
            "body": record.body.decode(),
        }
        assert block == (f"unit {number}, at {number} * 20 = {UNIT_SIZE * number}", figures)


# ---- find_by_id.py -----------------------------------------------------------------------------------


def chain_of(index: oracle.IndexFile, key: str) -> list[int]:
    numbers, number = [], index.slot(abs(oracle.java_hash(key)) % SLOTS)
    while number:
        numbers.append(number)
        number = index.entry(number).previous
    return numbers


def verdict_figures(record: oracle.Record, uniq_key: str) -> dict[str, str]:
    if oracle.java_hash(index_key(record)) != oracle.java_hash(f"TopicTest#{uniq_key}"):
        return {"verdict": "another hash: passed over"}
    is_own = record.uniq_key == uniq_key
    return {"the record": f"has the id {record.uniq_key}",
            "verdict": "found" if is_own else "the same hash, another id: passed over"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), (TWIN,)])
def test_chain_and_record_of_an_id(
    directory: Path, records: list[oracle.Record], index: oracle.IndexFile, arguments: tuple[str, ...]
) -> None:
    uniq_key = arguments[0] if arguments else CLASSIC
    header, slot, *entries, record = blocks_of(output_of("find_by_id.py", directory, "store", *arguments)).items()
    assert header[1] == {
        "stored at": "1700000000000 to 1700000009000",
        "phy offsets": f"0 to {records[-1].phy_offset}",
        "slots in use": "8, next entry 11",
    }
    numbers = chain_of(index, f"TopicTest#{uniq_key}")
    assert len(numbers) == 3
    figures = hash_figures(f"TopicTest#{uniq_key}")
    figures["hash code"] += f", absolute {figures.pop('absolute hash')}"
    assert slot == (f"key TopicTest#{uniq_key}", {**figures, "in the slot": f"{numbers[0]:08x}: entry {numbers[0]}"})
    for number, (title, entry) in zip(numbers, entries, strict=True):
        position = HEADER_SIZE + SLOT_SIZE * SLOTS + ENTRY_SIZE * number
        key_hash, phy_offset, seconds, previous = index.entry(number)
        own = records[number - 1]
        assert title == f"entry {number}, at 40 + 4 * 5000000 + 20 * {number} = {position}"
        assert entry == {
            "its bytes": index.data[position : position + ENTRY_SIZE].hex(" ", 4),
            "key hash": f"{key_hash}",
            "phy offset": f"{phy_offset}",
            "time": f"{seconds} s after 1700000000000",
            "previous": f"{previous}",
            **verdict_figures(own, uniq_key),
        }
        assert (phy_offset, seconds) == (own.phy_offset, number - 1)
    (own,) = (record for record in records if record.uniq_key == uniq_key)
    expected = {name: getattr(own, name) for name in oracle.Record.__dataclass_fields__ if name != "body"}
    expected |= {"raw_body": own.body, "body_size": len(own.body), "magic": "0xDAA320A7"}
    assert record == ("the record", {name: str(value) for name, value in expected.items()})


def test_chain_holds_a_stranger_and_a_twin(records: list[oracle.Record], index: oracle.IndexFile) -> None:
    chain = [records[number - 1] for number in chain_of(index, f"TopicTest#{CLASSIC}")]
    hashes = [oracle.java_hash(index_key(record)) for record in chain]
    assert [record.uniq_key for record in chain][1:] == [TWIN, CLASSIC]
    assert hashes[0] != hashes[1] == hashes[2]


def test_unknown_id_is_not_found(directory: Path, store: Path) -> None:
    done = run_example("find_by_id.py", directory, str(store), "no such id")
    assert (done.returncode, done.stderr) == (1, "no message has the id no such id\n")


@pytest.mark.parametrize(("name", "line"), [
    ("write_messages.py", "rmq.index_key_hash = lambda key: 1"),
    ("read_queue.py", "rmq.java_hash = lambda text: 1"),
    ("find_by_id.py", "rmq.IndexFile.select_phy_offset = lambda self, key: [0]"),
])  # fmt: skip
@pytest.mark.slow
def test_wrong_answer_ends_the_program(tmp_path: Path, store: Path, name: str, line: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import rmq\n{line}\n")
    done = run_example(name, tmp_path, "new" if name == "write_messages.py" else str(store))
    assert done.returncode == 1
    assert re.fullmatch(r".+: the file says .+, rmq says .+\n", done.stderr)


# ---- ingest.py ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ingest_puts_what_its_generator_makes(tmp_path: Path) -> None:
    rows = 20_000
    lines = output_of("ingest.py", tmp_path, "store", "--rows", str(rows)).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("generator alone: 20,000 messages, ")
    assert lines[1].startswith("put_many: 20,000 messages, ")
    assert all(int(re.search(r"([\d,]+) messages/s", line)[1].replace(",", "")) > 0 for line in lines)
    records = oracle.read_records(tmp_path / "store")
    assert [(record.body, record.keys, record.queue_id) for record in records] == [
        (b'{"order": %d, "amount": 1250, "currency": "EUR"}' % number, [str(number)], number % 4)
        for number in range(rows)
    ]


# ---- dataframes.py -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_dataframes_agree_with_arithmetic(tmp_path: Path) -> None:
    output = output_of("dataframes.py", tmp_path)
    title, pandas, by_time, polars, duckdb = output.split("\n\n")
    names = [name for name in dir(rmq.StoredMessage) if name in title]
    assert title.startswith("1000 messages with the columns topic, queue_id, ")
    assert {"phy_offset", "body", "keys", "properties"} <= set(names)
    counts, sums = Counter[str](), Counter[str]()
    hours = Counter[datetime]()
    start = datetime.fromtimestamp(1_700_000_000, UTC)
    for number in range(1000):
        tags, cents, time = "paid" if number % 3 else "open", number * 7 % 1000, start + timedelta(minutes=number)
        counts[tags] += 1
        sums[tags] += cents
        hours[time.replace(hour=time.hour // 4 * 4, minute=0, second=0)] += cents
    for answer in (pandas, polars, duckdb):
        found = re.findall(r"\b(open|paid)\b\W+(\d+)\W+(\d+)", answer)
        assert found == [(tags, str(counts[tags]), str(sums[tags])) for tags in ("open", "paid")]
    found = re.findall(r"^(\S+ \S+\+00:00) +(\d+)$", by_time, re.M)
    assert found == [(str(time), str(cents)) for time, cents in sorted(hours.items())]
    assert output.endswith("The three answers are the same.\n")
