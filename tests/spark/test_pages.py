"""docs/spark.md: its code runs, its tables are the options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import rmq.spark
from rmq.spark.options import OPTIONS, WRITE_OPTIONS, Option

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "spark.md"


def row(option: Option) -> str:
    default = "" if option.default in (None, ()) else str(option.default)
    default = default.lower() if isinstance(option.default, bool) else default
    about = option.about.replace("|", r"\|")
    return f"| `{option.name}` | {default} | {about} |"


def test_the_tables_are_the_options() -> None:
    rows = re.findall(r"^\| `.*", PAGE.read_text(encoding="utf-8"), re.M)
    assert rows == [row(option) for option in (*OPTIONS, *WRITE_OPTIONS)]


def test_the_reference_has_every_function() -> None:
    page = PAGE.with_name("reference") / "spark.md"
    assert sorted(re.findall(r"^::: rmq\.spark\.(\w+)", page.read_text(encoding="utf-8"), re.M)) == rmq.spark.__all__


@pytest.mark.spark
def test_code_of_the_page_runs(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of the page become absolute: this JVM's directory is not the page's."""
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    names = "store|ids|found|derived|shards|one|loaded|incident|archive|lake|checkpoint"
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        code = re.sub(rf"""(["'])({names})\1""", rf"\1{tmp_path}/\2\1", block)
        exec(compile(code, str(PAGE), "exec", dont_inherit=True), NAMESPACE)


NAMESPACE: dict[str, Any] = {"__name__": "__main__"}
