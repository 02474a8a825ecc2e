# SPDX-License-Identifier: Apache-2.0
"""`rmq rebuild`: what is derived is made again."""

from __future__ import annotations

import os
from pathlib import Path

import click

from rmq.cli import printable
from rmq.cli.arguments import form_option, store_argument
from rmq.cli.output import Output, counted, note, people_size
from rmq.config import StoreConfig
from rmq.rebuilding import rebuild_sidecars


@click.command()
@store_argument
@click.option("--sidecar", is_flag=True, help="The sidecars of full index files.")
@form_option
def rebuild(store: Path, sidecar: bool, conf: Path | None, form: str | None) -> None:
    """Make again what is derived from other files of STORE.

    --sidecar: a file beside each full index file, nearly as large, with which queries by key take a third of the time.
    Works beside readers, a writer or a broker; log, queues and index stay as they are.
    """
    if not sidecar:
        raise click.UsageError("what to rebuild? --sidecar is all there is")
    output = Output(form)
    try:
        done = list(rebuild_sidecars(store, StoreConfig.from_broker_conf(conf) if conf else None))
    except ValueError as error:
        raise click.UsageError(f"{error}{'' if conf else '; --conf FILE can tell'}") from error
    output.rows([file._asdict() for file in done], lambda row: {
        "size": people_size(row["size"]), "file": printable(os.path.relpath(row["path"], store.absolute())),
        "not made because": row["reason"]})  # fmt: skip
    made = [file for file in done if not file.reason]
    note(f"{counted(len(made), 'sidecar')}, {people_size(sum(file.size for file in made))}" if done else
         "no index file is full")  # fmt: skip
