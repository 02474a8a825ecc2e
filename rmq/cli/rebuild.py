# SPDX-License-Identifier: Apache-2.0
"""`rmq rebuild`: what is derived is made again."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from rmq.cli import printable
from rmq.cli.arguments import NamedPath, short_form_option, store_argument
from rmq.cli.output import FORMS, Output, counted, note, people_size
from rmq.config import StoreConfig
from rmq.paths import store_root
from rmq.rebuilding import RebuiltFile, rebuild_sidecars
from rmq.rebuilding import rebuild as rebuild_store


@click.command()
@store_argument
@click.option("--output", metavar="DIR", type=NamedPath(file_okay=False, path_type=Path),
              help="Put the new files there, a new or empty directory, and only read STORE.")  # fmt: skip
@click.option("--processes", metavar="N", type=click.IntRange(1), help="Default: the number of cores.")
@click.option("--sidecar", is_flag=True, help="Make the sidecars of full index files, and nothing else.")
@short_form_option
def rebuild(store: Path, output: Path | None, processes: int | None, sidecar: bool, conf: StoreConfig | None,
            form: str | None) -> None:  # fmt: skip
    """Make queues and index of STORE again, from nothing but its log.

    The new files are whole and on disk before an old one is touched. Nobody may have STORE open for writing, unless
    --output is given. --sidecar: a file beside each full index file, nearly as large, with which queries by key take a
    third of the time; works beside readers, a writer or a broker; log, queues and index stay as they are.
    """
    if output is not None and str(output) in FORMS:
        raise click.UsageError(f"--output names a directory here: -o {output} is the form of what is printed; a "
                               f"directory of that name goes by its whole path")  # fmt: skip
    if sidecar and (output or processes):
        raise click.UsageError("--sidecar goes with neither --output nor --processes")
    try:
        if sidecar:
            _sidecars(store, conf, Output(form))
        else:
            _queues_and_index(store, output, conf, processes, Output(form))
    except ValueError as error:
        hint = "" if conf or str(error).startswith("output ") else "; --conf FILE can tell"
        raise click.UsageError(f"{error}{hint}") from error


def _queues_and_index(store: Path, target: Path | None, config: StoreConfig | None, processes: int | None,
                      output: Output) -> None:  # fmt: skip
    started = time.monotonic()
    made = rebuild_store(store, target, config=config, processes=processes)
    output.rows(made._fields, [made._asdict()], lambda row: {
        "directory": printable(row["path"]), "queues": f"{row['queue_count']:,}", "units": f"{row['unit_count']:,}",
        "index files": f"{row['index_file_count']:,}", "keys": f"{row['key_count']:,}"})  # fmt: skip
    note(f"{counted(made.unit_count, 'unit')} and {counted(made.key_count, 'key')} in "
         f"{time.monotonic() - started:.1f} s")  # fmt: skip


def _sidecars(store: Path, config: StoreConfig | None, output: Output) -> None:
    done = list(rebuild_sidecars(store, config))
    output.rows(RebuiltFile._fields, [file._asdict() for file in done], lambda row: {
        "size": people_size(row["size"]), "file": printable(os.path.relpath(row["path"], store_root(store).absolute())),
        "not made because": row["reason"]})  # fmt: skip
    made = [file for file in done if not file.reason]
    note(f"{counted(len(made), 'sidecar')}, {people_size(sum(file.size for file in made))}" if done else
         "no index file is full")  # fmt: skip
