# SPDX-License-Identifier: Apache-2.0
"""`rmq export`: messages as partitioned Parquet files."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import click

from rmq.cli import DAMAGE, NOT_FOUND, Fault, printable
from rmq.cli.arguments import TIME, NamedPath, check_names, form_option, no_topic, open_store, store_argument
from rmq.cli.output import Output, counted, note, people_size
from rmq.cli.progress import byte_bar
from rmq.config import StoreConfig
from rmq.errors import RmqError
from rmq.exporting import COMPRESSIONS, PARTITIONS, Compression, ExportedFile
from rmq.exporting import export as export_store


@click.command()
@store_argument
@click.argument("directory", metavar="DIR", type=NamedPath(path_type=Path))
@click.option("--topic", "topics", multiple=True, help="Only messages of this topic. May be given several times.")
@click.option("--begin", type=TIME, help="Only messages stored at or after this time.")
@click.option("--end", type=TIME, help="Only messages stored at or before this time.")
@click.option("--columns", metavar="NAME,...", help="Default: all but raw_body and raw_properties.")
@click.option("--partition-by", metavar="NAME,...", default="topic,date", show_default=True,
              help=f"Of {', '.join(PARTITIONS)}; or none.")  # fmt: skip
@click.option("--compression", type=click.Choice(COMPRESSIONS), default="zstd", show_default=True)
@click.option("--skip-damage", is_flag=True, help="Leave out what is damaged or missing, and export the rest.")
@click.option("--processes", metavar="N", type=click.IntRange(1),
              help="Default: the number of cores, fewer for a small log.")  # fmt: skip
@form_option
def export(store: Path, directory: Path, topics: tuple[str, ...], begin: int | None, end: int | None,
           columns: str | None, partition_by: str, compression: Compression, skip_damage: bool, processes: int | None,
           conf: StoreConfig | None, form: str | None) -> None:  # fmt: skip
    """Write messages of STORE as Parquet files into DIR.

    DIR is made, or is empty; it fills at once, when all is on disk. Files lie as Hive, Spark and pyarrow read them:
    DIR/topic=orders/date=2026-11-21/part-00000-0.parquet, with dates and hours of the store timestamp in UTC. Damage
    ends the export with exit code 3 and no file; --skip-damage writes what is whole, with that code too.

    TIME is ms since 1970, ISO 8601 (UTC when it names no zone), or a span before now such as -2h.
    """
    output = Output(form)
    try:
        if topics:
            topics = _possible(store, conf, topics)
        with byte_bar() as show:
            started = time.monotonic()
            done = export_store(
                store, directory, partition_by=() if partition_by == "none" else _names("--partition-by", partition_by),
                topics=topics or None, begin=begin, end=end,
                columns=None if columns is None else _names("--columns", columns),
                compression=compression, on_damage="skip" if skip_damage else "raise", processes=processes,
                config=conf, progress=show)  # fmt: skip
            seconds = time.monotonic() - started
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    output.rows([field.name for field in fields(ExportedFile)], map(vars, done.files), lambda row: {
        "messages": f"{row['row_count']:,}", "size": people_size(row["size"]),
        "file": printable(row["path"])})  # fmt: skip
    note(f"{directory}: {counted(done.row_count, 'message')} in {counted(len(done.files), 'file')}, "
         f"{people_size(done.size)} in {seconds:.1f} s")  # fmt: skip
    if done.lost:
        lost = sum(item.end_phy_offset - item.begin_phy_offset for item in done.lost)
        ranges = counted(len(done.lost), "range")
        raise Fault(f"{store}: {people_size(lost)} of the log were left out, {ranges} without a whole message", DAMAGE)
    if not done.row_count:
        raise click.exceptions.Exit(NOT_FOUND)


def _names(option: str, text: str) -> list[str]:
    names = text.split(",")
    check_names(option, names)
    return names


def _possible(store: Path, conf: StoreConfig | None, topics: tuple[str, ...]) -> tuple[str, ...]:
    """Those that a message may have. Tells of those without a queue; the log may hold messages of them, in none."""
    possible = tuple(topic for topic in topics if topic == topic.encode("utf-8", "replace").decode())
    reasons: dict[str, str] = {}
    with suppress(RmqError), open_store(store, conf) as opened:
        reasons = {topic: no_topic(opened, topic) for topic in topics if topic not in opened.topics()}
    if not possible:
        raise Fault(reasons.get(topics[0], f"{store}: no topic {topics[0]!r}"), NOT_FOUND)
    for reason in reasons.values():
        note(reason)
    return possible
