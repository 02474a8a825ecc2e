# SPDX-License-Identifier: Apache-2.0
"""Write what `--help` of every verb prints into docs/cli.md, below the line that says so.

Run `python tools/cli_page.py` after a change to the command line; tests/test_docs.py compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from click.testing import CliRunner

from rmq.cli import main

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
MARK = "<!-- From here on written by tools/cli_page.py. -->\n"
COLUMNS = 100


def verbs(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The command itself, its verbs, and verbs of those, in the order of their help."""
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            verb = command.get_command(context, name)
            assert verb is not None
            yield from verbs(verb, (*path, name))


def help_of(path: tuple[str, ...]) -> str:
    """What `rmq VERB --help` prints on a terminal of COLUMNS columns."""
    margin = 2  # that click leaves free
    result = CliRunner().invoke(main, [*path, "--help"], prog_name="rmq", terminal_width=COLUMNS - margin)
    assert result.exit_code == 0, result.output
    return result.stdout.rstrip()


def rendered(page: str) -> str:
    """The page with today's help."""
    introduction, mark, _ = page.partition(MARK)
    assert mark, f"{PAGE.name} has no line {MARK.strip()}"
    sections = [f"### {' '.join(('rmq', *path))}\n\n```text\n{help_of(path)}\n```\n" for path in verbs(main)]
    return introduction + mark + "\n" + "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
