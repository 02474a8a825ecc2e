# SPDX-License-Identifier: Apache-2.0
"""`rmq info`, `rmq topics` and `rmq groups`: what a store is and holds, and who has consumed how much of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from rmq.cli import DAMAGE, NOT_FOUND, Fault, did_you_mean, printable
from rmq.cli.arguments import form_option, no_topic, open_store, store_argument, topic_argument
from rmq.cli.fields import iso_time
from rmq.cli.output import Output, Row, counted, note, people_size, people_time
from rmq.config import StoreConfig
from rmq.consumeroffsets import Offsets
from rmq.errors import CorruptFileError, UnsupportedFormatError
from rmq.geometry import GEOMETRY
from rmq.info import StoreInfo
from rmq.store import Store

_STATES = {
    "closed": "closed cleanly",
    "open": "open: a process is writing it",
    "not closed": "not closed: its writer was killed, or this is a copy of an open store",
}
_COLUMNS = ("topic", "queue_id", "min_queue_offset", "max_queue_offset", "first_timestamp", "last_timestamp")
_GROUP_COLUMNS = ("group", "topic", "queue_id", "queue_offset", "min_queue_offset", "max_queue_offset", "lag",
                  "consumed_timestamp")  # fmt: skip


@click.command()
@store_argument
@form_option
def info(store: Path, conf: StoreConfig | None, form: str | None) -> None:
    """What STORE is and how it was left.

    Who wrote it, its bounds and times, what of the log its queues and its index cover.
    """
    output = Output(form)
    with open_store(store, conf) as opened:
        found = opened.info()
    output.facts(_exact(found), _shown(found))


def _exact(found: StoreInfo) -> dict[str, Any]:
    row: dict[str, Any] = {name: value for name, value in vars(found).items() if name != "config"}
    row["begin_timestamp"], row["end_timestamp"] = iso_time(found.begin_timestamp), iso_time(found.end_timestamp)
    row["unindexed_size"] = found.unindexed_size
    return {**row, **{name: getattr(found.config, name) for name in GEOMETRY}}


def _shown(found: StoreInfo) -> dict[str, str]:
    size, config = found.max_phy_offset - found.min_phy_offset, found.config
    shown = {
        "store": found.path,
        "written by": f"{found.written_by}, {found.generation}" if found.written_by != "RocketMQ" else found.generation,
        "signs": "; ".join(found.signs) or "none",
        "state": _STATES[found.state],
        "messages": f"{found.message_count:,} in {counted(found.queue_count, 'queue')} of "
                    f"{counted(found.topic_count, 'topic')}",
        "log": f"{size:,} bytes ({people_size(size)}) in {counted(found.segment_count, 'segment')}, phy offsets "
               f"{found.min_phy_offset:,} to {found.max_phy_offset:,}",
        "times (UTC)": f"{people_time(found.begin_timestamp)} to {people_time(found.end_timestamp)}"
                       if found.begin_timestamp is not None else "no messages",
        "queues": f"{counted(found.units_behind, 'message')} not in the files of the queues, derived from the log"
                  if found.units_behind else "cover the whole log",
        "index": _index_line(found, size),
        "geometry": f"segments of {config.mapped_file_size_commit_log:,} bytes, queue segments of "
                    f"{config.mapped_file_size_consume_queue:,}; index files of {config.max_hash_slot_num:,} slots and "
                    f"{config.max_index_num:,} entries",
    }  # fmt: skip
    if found.cut_files:
        shown["kept"] = f"{counted(len(found.cut_files), 'piece')} that recovery cut off, in rmq/cut/"
    if found.others:
        shown["not read"] = ", ".join(found.others)
    return shown


def _index_line(found: StoreInfo, size: int) -> str:
    files = f"{counted(found.index_entry_count, 'entry')} in {counted(found.index_file_count, 'file')}"
    if not found.unindexed_size:
        return f"{files}, covers the whole log"
    part = found.unindexed_size / size
    return (f"{files}; no file covers {found.unindexed_size:,} bytes ({people_size(found.unindexed_size)}, {part:.1%} "
            f"of the log): queries scan them")  # fmt: skip


@click.command()
@store_argument
@topic_argument(required=False)
@form_option
def topics(store: Path, topic: str | None, conf: StoreConfig | None, form: str | None) -> None:
    """The queues of STORE, or of one TOPIC.

    For each its offsets [min, max) and the times of its first and its last message.
    """
    output = Output(form)
    damage: list[CorruptFileError] = []
    with open_store(store, conf) as opened:
        rows = list(_queues(opened, topic, damage))
        if topic is not None and not rows:
            raise Fault(no_topic(opened, topic), NOT_FOUND)
    output.rows(_COLUMNS, rows, _queue_cells)
    if damage:
        raise Fault(str(damage[0]), DAMAGE)


def _queues(store: Store, topic: str | None, damage: list[CorruptFileError]) -> Iterator[dict[str, Any]]:
    for name, queues in store.topics().items():
        if topic not in (None, name):
            continue
        for queue_id, (low, high) in queues.items():
            ends = (low, high - 1) if low < high else ()
            first, last = [_time_at(store, name, queue_id, place, damage) for place in ends] or (None, None)
            yield dict(zip(_COLUMNS, (name, queue_id, low, high, first, last), strict=True))


def _queue_cells(row: Row) -> dict[str, str]:
    topic, queue_id, low, high, first, last = row.values()
    return {"topic": printable(topic), "queue": str(queue_id), "min": f"{low:,}", "max": f"{high:,}",
            "first (UTC)": _second(first), "last (UTC)": _second(last)}  # fmt: skip


@click.command()
@store_argument
@click.argument("group", required=False)
@form_option
def groups(store: Path, group: str | None, conf: StoreConfig | None, form: str | None) -> None:
    """How far consumer groups of STORE have come, or one GROUP.

    For each queue: the queue offset that the group consumes next, the queue's offsets [min, max), how many messages the
    group still has before it (lag), and the time of the last one that it consumed.
    """
    output = Output(form)
    damage: list[CorruptFileError] = []
    with open_store(store, conf) as opened:
        known = opened.groups()
        if group is not None and group not in known:
            raise Fault(f"{store}: no group {group!r} has consumed anything{did_you_mean(group, known)}", NOT_FOUND)
        chosen = known if group is None else {group: known[group]}
        rows = list(_consumed(opened, chosen, damage))
    output.rows(_GROUP_COLUMNS, rows, _group_cells)
    if damage:
        raise Fault(str(damage[0]), DAMAGE)


def _consumed(store: Store, groups: Offsets, damage: list[CorruptFileError]) -> Iterator[dict[str, Any]]:
    try:
        bounds = store.topics() if groups else {}
    except UnsupportedFormatError as error:
        bounds = {}
        note(str(error))
    for group, topics in groups.items():
        for topic, queues in topics.items():
            for queue_id, place in queues.items():
                row: list[Any] = [None] * 4
                if queue_id in (there := bounds.get(topic, {})):
                    low, high = there[queue_id]
                    last = _time_at(store, topic, queue_id, place - 1, damage) if low < place <= high else None
                    row = [low, high, high - min(max(place, low), high), last]
                yield dict(zip(_GROUP_COLUMNS, (group, topic, queue_id, place, *row), strict=True))


def _group_cells(row: Row) -> dict[str, str]:
    group, topic, queue_id, place, low, high, lag, last = row.values()
    cells = {"group": printable(group), "topic": printable(topic), "queue": str(queue_id), "next": f"{place:,}"}
    numbers = {"min": low, "max": high, "lag": lag}
    return {**cells, **{name: "" if number is None else f"{number:,}" for name, number in numbers.items()},
            "last consumed (UTC)": _second(last)}  # fmt: skip


def _second(time: str | int | None) -> str:
    return "" if time is None else str(time).replace("T", " ").partition(".")[0]


def _time_at(store: Store, topic: str, queue_id: int, queue_offset: int,
             damage: list[CorruptFileError]) -> str | int | None:  # fmt: skip
    try:
        messages = store.pull(topic, queue_id, queue_offset, 1).messages
    except CorruptFileError as error:
        damage.append(error)
        return None
    return iso_time(messages[0].store_timestamp) if messages else None
