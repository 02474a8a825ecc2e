# SPDX-License-Identifier: Apache-2.0
"""`rmq clean`: what has expired goes."""

from __future__ import annotations

import os
from pathlib import Path

import click

from rmq.cli import printable
from rmq.cli.arguments import LIMIT, form_option, open_store, store_argument
from rmq.cli.output import Output, Row, counted, note, people_size
from rmq.config import StoreConfig
from rmq.retention import CleanResult, RemovedFile
from rmq.store import Store


@click.command()
@store_argument
@click.option("--dry-run", is_flag=True, help="Tell what would go; also beside a writer.")
@click.option("--reserved-time", type=click.IntRange(0, 2**31 - 1), metavar="HOURS",
              help="Segments go that were last changed so long ago.  [default: fileReservedTime, 72]")  # fmt: skip
@click.option("--max-used-percent", type=click.IntRange(0, 100), metavar="P",
              help="While the disk is fuller, the oldest segments go that have not expired; 100: never.  "
                   "[default: diskSpaceCleanForciblyRatio, 30 to 85, or diskSpaceWarningLevelRatio, 35 to 90, "
                   "whichever is less]")  # fmt: skip
@click.option("--limit", type=LIMIT, default=10, show_default=True, help="Segments to remove at most, or all.")
@click.option("--expired-queues", is_flag=True,
              help="Queues whose messages are all gone go too, but those of RocketMQ's own topics; their offsets "
                   "begin at 0 again.")  # fmt: skip
@form_option
def clean(store: Path, dry_run: bool, reserved_time: int | None, max_used_percent: int | None, limit: int | None,
          expired_queues: bool, conf: StoreConfig | None, form: str | None) -> None:  # fmt: skip
    """Remove from STORE what has expired.

    Segments of the log, oldest first, by the time of their last change; then the files of queues and index that speak
    of removed messages only. Never the last segment. Nobody else may write the store meanwhile; readers are not
    disturbed. A dry run changes nothing.
    """
    output = Output(form)
    with open_store(store, conf, "r" if dry_run else "r+") as opened:
        done = opened.clean(dry_run=dry_run, file_reserved_time=reserved_time, max_used_percent=max_used_percent,
                            limit=limit, expired_queues=expired_queues)  # fmt: skip
        output.rows(RemovedFile._fields, [file._asdict() for file in done.removed], lambda row: _cells(opened, row))
        _tell(opened, done, limit)


def _cells(store: Store, row: Row) -> dict[str, str]:
    path = os.path.relpath(row["path"], store.path.absolute())
    return {"size": people_size(row["size"]), "reason": row["reason"], "file": printable(path)}


def _tell(store: Store, done: CleanResult, limit: int | None) -> None:
    if done.removed:
        note(f"{counted(len(done.removed), 'file')}, {people_size(done.freed_bytes)} "
             f"{'would go' if done.dry_run else 'removed'}; the log begins at phy offset {done.min_phy_offset:,}"
             f"{' then' if done.dry_run else ''}")  # fmt: skip
    else:
        note("nothing has expired")
    if done.truncated:
        note(f"--limit {limit:,} reached; more segments can go")
    ratio = store.config.disk_max_used_space_ratio
    if done.disk_used_percent > ratio:
        note(f"the disk is {done.disk_used_percent} % full, over diskMaxUsedSpaceRatio {ratio}")
