# SPDX-License-Identifier: Apache-2.0
"""The rules that a machine can check: layers, format pages, file sizes, types, stubs, golden files."""

import ast
import hashlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from rmq._core import _layout

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rmq"
CORE = PACKAGE / "_core"
FORMAT = ROOT / "docs" / "format"
GOLDEN = ROOT / "tests" / "golden"
ALLOWLIST = "tests/stubtest-allowlist.txt"

# A module imports only from rows above it in this list. The picture: docs/architecture.md.
LAYERS = (
    {"errors", "config", "paths", "version", "pool", "sleeper"},
    {"_core"},
    {"arrays", "groupcommit", "closers"},
    {"segment", "message", "columns", "keys"},
    {"mappedfile", "checkpoint", "lock", "fastjson", "objects", "objectcache", "chunks",
     "filecache", "directorywatch"},
    {"sidecar", "queuefiles", "topics", "consumeroffsets"},
    {"logsegment", "queueunits", "batchconsumequeue", "indexfile", "marks"},
    {"logfiles", "consumequeue", "index"},
    {"logscan", "queueset"},
    {"commitlog"},
    {"wholerecords"},
    {"brokerunits", "dispatch", "query", "scan", "splits", "geometry", "storeroot", "logend", "logcuts", "preparing",
     "signs", "owed"},
    {"queueends", "coverage", "legacy", "overflow"},
    {"pull", "info", "recovery", "retention", "tables", "verification", "deriving", "logpart", "views",
     "lookup"},
    {"flushing", "visible", "openstore"},
    {"keyreading", "queuereading"},
    {"reading"},
    {"putting"},
    {"store"},
    {"snapshot"},
    {"parallel", "rebuilding", "mirror", "windows"},
    {"exporting"},
    {"cli", "spark", "groups", "console"},
    {"__init__"},
    {"__main__"},
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

LINE_LIMIT = 120
FILE_LIMITS = {".py": 400, ".pyx": 500, ".pxd": 150, ".pyi": 150}
TEST_FILE_LIMIT = 500
LARGER = {
    "rmq/_core/_layout.pxd": 160,  # one noun: all that is on disk
    "tests/oracle.py": 600,  # the whole second opinion in one file that imports nothing of the project
    "tests/test_oracle.py": 800,  # its vectors
}

HEAVY = {"pyarrow", "pandas", "rich", "click", "pyspark"}

BYTE_ROW = re.compile(r"^\| (\d+) \| (\d+) \| `([A-Z0-9_]+)` \|", re.M)
VALUE_ROW = re.compile(r"^\| (-?\d+|0x[0-9A-F]+) \| `([A-Z0-9_]+)` \|", re.M)
CORE_IMPORT = re.compile(r"^[ \t]*from[ \t]+(\S+)[ \t]+c?import[ \t]+(\([^)]*\)|[^\n]*)", re.M)
CORE_PLAIN_IMPORT = re.compile(r"^[ \t]*c?import[ \t]+(?:[^\n#]*,[ \t]*)?(rmq\b[^\n]*)", re.M)
GOLDEN_ROW = re.compile(r"^\| `([^`]+)` \| [\d.]+ \| ([\d,]+) \| `([0-9a-f]{64})` \|", re.M)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def noun_of(path: Path) -> str:
    """The name under which LAYERS knows a file: its module, or the folder right below rmq/."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def core_names() -> list[str]:
    return sorted(path.stem for path in CORE.glob("*.pyx"))


def report(faults: Iterable[str]) -> None:
    """Fail with one line for each fault."""
    lines = sorted(faults)
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def run(*arguments: str) -> str:
    """Run Python from the root and return what it printed; when it fails, that is the message."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(arguments)}\n{done.stdout}{done.stderr}", pytrace=False)
    return done.stdout


# ---- layers --------------------------------------------------------------------------------------


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, imported module) of every import of this package, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), relative(path))):
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if node.level or module.split(".")[0] == "rmq":
                yield node.lineno, module
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "rmq":
                    yield node.lineno, f"import {alias.name}"


def import_faults(path: Path) -> Iterator[str]:
    noun = noun_of(path)
    if noun not in RANK:
        yield f"{relative(path)}: {noun} stands in no layer"
        return
    for line, module in imports_of(path):
        where = f"{relative(path)}:{line}"
        if not module.startswith("rmq."):
            yield f"{where}: `{module}`: only `from rmq.x import y` is used"
            continue
        target = module.split(".")[1]
        if target == noun and path.parent != PACKAGE:
            continue  # files of one folder are one noun
        if target not in RANK:
            yield f"{where}: {target} stands in no layer"
        elif RANK[target] >= RANK[noun]:
            yield f"{where}: {noun} must not import {target}"


@pytest.mark.parametrize("path", python_files(), ids=relative)
def test_imports_point_down(path: Path) -> None:
    report(import_faults(path))


def core_imports(path: Path) -> Iterator[tuple[str, set[str]]]:
    """(module, names) of each `from ... import` or cimport of this package, relative ones too."""
    for module, names in CORE_IMPORT.findall(path.read_text(encoding="utf-8")):
        if module.startswith(".") or module.split(".")[0] == "rmq":
            listed = re.sub(r"#[^\n]*", "", names).strip("() \t\n").split(",")
            yield module, {name.split()[0] for name in listed if name.strip()}


def test_core_imports_only_core_and_errors() -> None:
    faults = []
    for path in sorted([*CORE.glob("*.pyx"), *CORE.glob("*.pxd")]):
        modules = [module for module, _ in core_imports(path)]
        wrong = [module for module in modules if not re.fullmatch(r"rmq\.(_core(\.\w+)?|errors)", module)]
        # A whole-name cimport is how Cython learns that a module depends on _layout.pxd.
        wrong += [name for name in CORE_PLAIN_IMPORT.findall(path.read_text(encoding="utf-8"))
                  if name != "rmq._core._layout as L"]  # fmt: skip
        faults += [f"{relative(path)}: must not import {module}" for module in wrong]
    report(faults)


def test_core_modules_form_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for path in [*CORE.glob("*.pyx"), *CORE.glob("*.pxd")]:
        edges = graph.setdefault(path.stem, set())
        for module, names in core_imports(path):
            if module == "rmq._core":
                edges |= names
            elif module.startswith("rmq._core."):
                edges.add(module.split(".")[2])
        edges.discard(path.stem)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("name", core_names())
def test_compiled_module_is_a_triplet(name: str) -> None:
    files = [CORE / (name + suffix) for suffix in (".pxd", ".pyi")]
    report(f"{relative(path)} is missing" for path in files if not path.is_file())


def test_import_loads_nothing_heavy() -> None:
    program = "import sys, rmq; assert rmq.__file__; print(*sorted(set(sys.argv[1:]) & sys.modules.keys()))"
    assert run("-c", program, *HEAVY).split() == []


# ---- format pages --------------------------------------------------------------------------------


def pages() -> list[Path]:
    return sorted(FORMAT.glob("*.md"))


def layout_names() -> set[str]:
    return {name for name in dir(_layout) if re.fullmatch(r"[A-Z][A-Z0-9_]*", name)}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_byte_tables_match_the_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for offset, _, name in BYTE_ROW.findall(text):
        assert getattr(_layout, name, None) == int(offset), name
    for value, name in VALUE_ROW.findall(text):
        assert getattr(_layout, name, None) == int(value, 0), name


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_fields_of_a_byte_table_do_not_overlap(page: Path) -> None:
    for table in page.read_text(encoding="utf-8").split("\n\n"):
        end = 0
        for offset, size, name in BYTE_ROW.findall(table):
            assert int(offset) >= end, f"{name} starts inside the field before it"
            end = int(offset) + int(size)


def test_every_constant_stands_in_exactly_one_table() -> None:
    texts = [page.read_text(encoding="utf-8") for page in pages()]
    offsets = Counter(name for text in texts for *_, name in BYTE_ROW.findall(text))
    values = Counter(name for text in texts for _, name in VALUE_ROW.findall(text))
    names = layout_names()
    fields = {name for name in names if name.endswith("_OFFSET")}
    faults = [f"{name}: in no byte table" for name in fields - offsets.keys()]
    faults += [f"{name}: in no value table" for name in names - fields - values.keys()]
    faults += [f"{name}: in {count} tables" for name, count in (offsets + values).items() if count > 1]
    report(faults)


# ---- sizes ---------------------------------------------------------------------------------------


def sized_files() -> list[Path]:
    found = [ROOT / "setup.py"]
    for folder in ("rmq", "tests", "examples", "bench"):
        found += [path for path in (ROOT / folder).rglob("*") if path.suffix in FILE_LIMITS]
    return sorted(found)


def test_files_stay_small() -> None:
    offenders = []
    for path in sized_files():
        name = relative(path)
        limit = LARGER.get(name, TEST_FILE_LIMIT if name.startswith("tests/") else FILE_LIMITS[path.suffix])
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > limit:
            offenders.append(f"{name}: {len(lines)} lines, at most {limit}")
        offenders += [
            f"{name}:{number}: {len(line)} characters, at most {LINE_LIMIT}"
            for number, line in enumerate(lines, 1)
            if len(line) > LINE_LIMIT
        ]
    report(offenders)


# ---- tools ---------------------------------------------------------------------------------------


def test_ruff_finds_nothing() -> None:
    run("-m", "ruff", "check", "--no-cache", ".")


@pytest.mark.slow
def test_types_are_strict() -> None:
    run("-m", "mypy")


@pytest.mark.slow
def test_stubs_match_the_compiled_modules() -> None:
    # stubtest is silent about a private module that has no stub at all.
    assert [name for name in core_names() if not (CORE / f"{name}.pyi").is_file()] == []
    modules = [f"rmq._core.{name}" for name in core_names()]
    options = ("--mypy-config-file", "pyproject.toml", "--allowlist", ALLOWLIST, "--ignore-unused-allowlist")
    run("-m", "mypy.stubtest", *modules, *options)


# ---- golden files --------------------------------------------------------------------------------


def golden_files() -> list[tuple[str, int, str]]:
    rows = GOLDEN_ROW.findall((GOLDEN / "README.md").read_text(encoding="utf-8"))
    return [(name, int(size.replace(",", "")), digest) for name, size, digest in rows]


def test_golden_files_are_listed() -> None:
    listed = {name for name, _, _ in golden_files()}
    found = {path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*") if path.is_file()}
    assert listed
    assert found - listed == {"README.md"}


@pytest.mark.parametrize("row", golden_files(), ids=lambda row: row[0])
def test_golden_file_is_what_it_was(row: tuple[str, int, str]) -> None:
    name, size, digest = row
    data = (GOLDEN / name).read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (size, digest)
