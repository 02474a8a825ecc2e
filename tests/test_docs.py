# SPDX-License-Identifier: Apache-2.0
"""README.md and docs/: every code block runs, every command prints what the page says, every link leads somewhere.

Blocks of one page run in order in one fresh directory.

* `python` blocks share one namespace.
* `console` blocks: bash runs what follows `$ ` (and `> ` below it); the lines after it are what it prints, stdout and
  stderr. `...` stands for anything: in a line for a part of it, alone on a line for any lines. Of a command that fails
  a line `rmq: ...` tells, or the command `echo $?` below it.
* `sh` blocks are commands for the reader's machine, not run; SETUP lists them.
* `text` blocks hold no code.
"""

from __future__ import annotations

import itertools
import os
import re
import runpy
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import rmq
from rmq._core._columns import KINDS
from rmq.scan import schema_of

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SETUP = {"pip install .", "pip install '.[spark]'", "make demo", "make test"}
RUN = {"python", "console"}
SHOWN = {"text"}
TIMEOUT_SECONDS = 60

FENCE = re.compile(r"^( *)(`{3,}|~{3,}) *([^\s`]*)[^\n]*\n(.*?)^ *\2 *$", re.M | re.S)
INDENTED = re.compile(r"(?:\A|\n)(?! *(?:[*+-]|\d+\.) )[^\n]*\n\n+ {4,}(?=\S)")
LINK = re.compile(r"\[[^\]\n]*\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\)")
HEADING = re.compile(r"^#+ +(.*?) *$", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block; line: of the page, where its text begins, from 1."""

    language: str
    text: str
    line: int


@dataclass(frozen=True)
class Step:
    """A command of a console block and the lines it should print."""

    command: str
    expected: list[str]
    line: int


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(match[3], re.sub(rf"^{match[1]}", "", match[4], flags=re.M), text.count("\n", 0, match.start(4)) + 1)
            for match in FENCE.finditer(text)]  # fmt: skip


def pages_that_run() -> list[Path]:
    """But docs/spark.md: tests/spark/test_pages.py."""
    return [page for page in pages() if page.name != "spark.md" and any(block.language in RUN
                                                                        for block in blocks_of(page))]  # fmt: skip


def prose_of(page: Path) -> str:
    """The page without code."""
    return re.sub(r"`[^`\n]+`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


def report(faults: list[str]) -> None:
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)


# ---- blocks that run -----------------------------------------------------------------------------


def steps_of(block: Block) -> Iterator[Step]:
    lines = block.text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    assert starts[:1] == [0], f"line {block.line}: a console block begins with a command"
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        at = start + 1
        while at < end and (lines[at].startswith("> ") or lines[at] == ">"):
            at += 1
        command = "\n".join([lines[start][2:], *(line[2:] for line in lines[start + 1 : at])])
        yield Step(command, lines[at:end], block.line + start)


def is_as_expected(expected: list[str], printed: str) -> bool:
    pattern = ""
    for line in "\n".join(expected).rstrip().splitlines():
        parts = [re.escape(part) for part in line.rstrip().split("...")]
        pattern += r"(?:[^\n]*\n)*?" if line.strip() == "..." else "[^\\n]*".join(parts) + r"\n"
    actual = "".join(f"{line.rstrip()}\n" for line in printed.rstrip().splitlines())
    return re.fullmatch(pattern, actual) is not None


@pytest.mark.parametrize(("page", "printed", "is_same"), [
    ("a\nb", "a\nb\n", True),
    ("a\nb", "a\nc\n", False),
    ("a\nb", "a\nb\nc\n", False),
    ("", "a\n", False),
    ("size ... bytes", "size 12 bytes\n", True),
    ("size ... bytes", "size 12\n34 bytes\n", False),
    ("a\n...\nd", "a\nb\nc\nd\n", True),
    ("a\n...\nd", "a\nd\n", True),
    ("a\n...\nd", "a\nb\nc\n", False),
])  # fmt: skip
def test_dots_stand_for_anything(page: str, printed: str, is_same: bool) -> None:
    assert is_as_expected(page.splitlines(), printed) is is_same


def shell_environment(directory: Path) -> dict[str, str]:
    """Commands `rmq` and `python` are those under test; what a page shows depends on no setting of this machine."""
    programs = directory / "bin"
    programs.mkdir()
    for name, arguments in (("rmq", "-m rmq "), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        (programs / name).chmod(0o755)
    home = directory / "home"
    home.mkdir()
    return {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "HOME": str(home),
            "PYTHONPATH": str(Path(rmq.__file__).parents[1]), "PYTHONUNBUFFERED": "1", "COLUMNS": "100",
            "LC_ALL": "C.UTF-8", "TZ": "UTC", "NO_COLOR": "1"}  # fmt: skip


def run_console(page: Path, block: Block, environment: dict[str, str]) -> None:
    steps = list(steps_of(block))
    mark = secrets.token_hex(8)
    script = [f"mark() {{ local code=$?; printf '\\n{mark} %s\\n' $code; return $code; }}"]
    script += [f"{step.command}\nmark" for step in steps]
    done = subprocess.run(["bash", "-c", "\n".join(script)], env=environment, stdin=subprocess.DEVNULL, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_SECONDS,
                          check=False)  # fmt: skip
    pieces = re.split(rf"\n{mark} (\d+)\n", done.stdout)
    faults = []
    for number, step in enumerate(steps):
        where = f"{relative(page)}:{step.line}: $ {step.command}"
        if 2 * number + 1 >= len(pieces):
            faults.append(f"{where}\n--- did not end; bash says\n{pieces[-1]}")
            break
        printed, code = pieces[2 * number], int(pieces[2 * number + 1])
        if not is_as_expected(step.expected, printed):
            shown = "\n".join(step.expected)
            faults.append(f"{where}\n--- the page says\n{shown}\n--- it prints\n{printed.rstrip()}\n")
        is_told = any(line.startswith("rmq: ") for line in step.expected) or \
            [later.command for later in steps[number + 1 : number + 2]] == ["echo $?"]  # fmt: skip
        if code and not is_told:
            faults.append(f"{where}\n--- exit code {code}: the page does not tell; add `$ echo $?`")
    report(faults)


def run_python(page: Path, block: Block, namespace: dict[str, Any]) -> None:
    """In this process, with the page's own line numbers in a traceback."""
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
    exec(code, namespace)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_that_run(), ids=relative)
def test_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "page"
    directory.mkdir()
    monkeypatch.chdir(directory)
    environment = shell_environment(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.language == "python":
            run_python(page, block, namespace)
        elif block.language == "console":
            run_console(page, block, environment)


# ---- blocks that do not run ----------------------------------------------------------------------


def faults_of(block: Block) -> Iterator[str]:
    if block.language == "sh":
        commands = [re.sub(r" +#.*", "", line) for line in block.text.splitlines() if line.strip()]
        yield from (f"`{command}` is not in SETUP" for command in commands if command not in SETUP)
    elif block.language in SHOWN:
        if re.search(r"^(\$|>>>) ", block.text, re.M):
            yield "a text block with a command: it would not run"
    elif block.language == "console":
        for step in steps_of(block):
            is_bare = re.search(r"^rmq (?!.*(\||>| -o| -f| --output| --format=))", step.command, re.M)
            if is_bare and any(line.startswith("{") for line in step.expected):
                yield f"`{step.command}` prints a table on a terminal; say -o jsonl"
    elif block.language not in RUN:
        yield f"language {block.language!r} is none of {', '.join(sorted(RUN | SHOWN))}, sh"


def test_no_code_hides_from_the_tests() -> None:
    faults = [f"{relative(page)}:{block.line}: {fault}"
              for page in pages() for block in blocks_of(page) for fault in faults_of(block)]  # fmt: skip
    for page in pages():
        if re.search(r"^ *(```|~~~)", FENCE.sub("", page.read_text(encoding="utf-8")), re.M):
            faults.append(f"{relative(page)}: a fence has no partner")
        if page.parent.name != "format" and page.name != "architecture.md" and INDENTED.search(prose_of(page)):
            faults.append(f"{relative(page)}: an indented code block does not run; fence it")
    report(faults)


def test_set_up_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", makefile, re.M))
    assert {command.split()[1] for command in SETUP if command.startswith("make ")} <= targets
    used = {re.sub(r" +#.*", "", line) for page in pages() for block in blocks_of(page) if block.language == "sh"
            for line in block.text.splitlines()}  # fmt: skip
    assert used >= SETUP


# ---- the command line ----------------------------------------------------------------------------


def test_cli_page_has_todays_help() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "cli_page.py"))
    page = tool["PAGE"].read_text(encoding="utf-8")
    assert page == tool["rendered"](page), "docs/cli.md is old; write it anew with: python tools/cli_page.py"


def test_cli_page_lists_the_exit_codes() -> None:
    from rmq import cli

    codes = {cli.NOT_FOUND, cli.USAGE, cli.DAMAGE, cli.FAILED, cli.INTERRUPTED, cli.PIPE_CLOSED, cli.TERMINATED}
    rows = re.findall(r"^\| (\d+) \|", (DOCS / "cli.md").read_text(encoding="utf-8"), re.M)
    assert {int(code) for code in rows} == {0, *codes}


# ---- links ---------------------------------------------------------------------------------------


def anchors_of(page: Path) -> set[str]:
    titles = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def link_faults(page: Path) -> Iterator[str]:
    for target in LINK.findall(prose_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            yield f"{relative(page)}: {target} leads nowhere"
        elif not path.is_relative_to(ROOT):
            yield f"{relative(page)}: {target} leads out of the repository"
        elif anchor and path.suffix == ".md" and anchor not in anchors_of(path):
            yield f"{relative(page)}: {name or 'the page'} has no heading #{anchor}"


def test_links_lead_somewhere() -> None:
    others = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "bench").glob("*.md"),
              *(ROOT / "tests").rglob("*.md")]  # fmt: skip
    report([fault for page in [*pages(), *others] for fault in link_faults(page)])


# ---- durability ------------------------------------------------------------------------------------------


def test_each_test_that_the_durability_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "durability.md").read_text(encoding="utf-8")))
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 20
    assert named - set(re.findall(r"^def (test_\w+)\(", sources, re.M)) == set()


# ---- tables that say what the code has -----------------------------------------------------------------------------


def rows_of(page: str, first: str) -> list[list[str]]:
    """The rows of a page's table whose first column has that name, without backticks."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |")) + 2
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[begin:])
    return [[cell.strip().replace("`", "") for cell in line.split("|")[1:-1]] for line in table]


def test_the_reference_has_each_column_with_its_type_and_each_status(tmp_path: Path) -> None:
    rows = rows_of("reference/reading.md", "name")
    types = {field.name: str(field.type).replace("item: ", "") for field in schema_of(tuple(KINDS))}
    assert [(name, column) for name, _, column, _ in rows] == list(types.items())
    with rmq.open(tmp_path / "s", "x") as store:
        store.put(rmq.Message("T", b"b", keys="k", tags="t", uniq_key="u"))
        message = store.lookup(0)
    for name, kind, *_ in rows:
        assert type(getattr(message, name)).__name__ == re.match(r"\w+", kind)[0], name  # type: ignore[index]
    statuses = rows_of("reference/reading.md", "status")
    assert sorted(status for status, *_ in statuses) == sorted(rmq.PullStatus.__members__)
