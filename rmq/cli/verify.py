# SPDX-License-Identifier: Apache-2.0
"""`rmq verify`: every broken rule of a store."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, fields
from pathlib import Path

import click

from rmq.cli import DAMAGE
from rmq.cli.arguments import form_option, store_argument
from rmq.cli.output import Output, counted, note, people_size
from rmq.cli.progress import byte_bar
from rmq.config import StoreConfig
from rmq.paths import store_root
from rmq.verification.findings import LIMIT, Finding, VerifyResult
from rmq.verification.verify import verify as verify_store


@click.command()
@store_argument
@click.option("--jobs", metavar="N", type=click.IntRange(1), help="Threads. Default: the number of cores.")
@click.option("--limit", metavar="N", type=click.IntRange(1), default=LIMIT, show_default=True,
              help="Findings that are shown; the others are counted.")  # fmt: skip
@form_option
def verify(store: Path, conf: StoreConfig | None, jobs: int | None, limit: int, form: str | None) -> None:
    """Look for every broken rule of STORE, and change nothing.

    Reads all of it: log records, queues and index against the log in both directions, checkpoint, names and sizes.
    Beside a running broker it reads what is visible. A finding is damage (messages are lost or doubtful), derived
    (queues, index and checkpoint can be derived from the log again) or a note (harmless). Exit code 3 when there is
    damage or what must be derived again.
    """
    output = Output(form)
    try:
        with byte_bar() as show:
            started = time.monotonic()
            found = verify_store(store, config=conf, progress=show, jobs=jobs, limit=limit)
            seconds = time.monotonic() - started
    except ValueError as error:
        raise click.UsageError(f"{error}{'' if conf else '; --conf FILE can tell'}") from error
    if output.form == "table":
        for finding in found:
            place = os.path.relpath(finding.path, store_root(store))
            output.facts({}, {finding.severity.ljust(7): f"{finding.kind}: {place}, byte {finding.offset:,}: "
                                                         f"{finding.reason}"})  # fmt: skip
    else:
        output.rows([field.name for field in fields(Finding)], map(asdict, found), lambda row: {})
    _conclude(store, found, seconds)
    if not found.is_sound:
        raise click.exceptions.Exit(DAMAGE)


def _conclude(store: Path, found: VerifyResult, seconds: float) -> None:
    """What was looked at and what came of it, on stderr."""
    if found.omitted:
        note(f"{counted(found.omitted, 'finding')} more are not shown; --limit shows more")
    note(f"{store}: {'sound' if found.is_sound else 'not sound'}, {found.state}; {found.damage_count:,} damage, "
         f"{found.derived_count:,} derived, {counted(found.note_count, 'note')}; "
         f"{counted(found.record_count, 'record')}, {counted(found.unit_count, 'unit')}, "
         f"{counted(found.entry_count, 'entry')}, {people_size(found.size_read)} in {seconds:.1f} s")  # fmt: skip
