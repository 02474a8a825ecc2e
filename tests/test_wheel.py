# SPDX-License-Identifier: Apache-2.0
"""What users install: the sdist, the wheel that is built from it, and that wheel in an empty environment.

`tools/wheel.sh` makes both from a copy of the tree, so nothing is written into the tree itself. What is installed is
downloaded from PyPI, as wheels only.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from email import message_from_bytes
from email.message import Message
from pathlib import Path, PurePosixPath

import pytest
from conftest import SAFELY

import rmq

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = SETTINGS["project"]
CIBUILDWHEEL = SETTINGS["tool"]["cibuildwheel"]

SHARED = "rmq/_core/_cyutility"  # of no source of ours: setup.py

# Measured with gcc 12: 1.0 MB, unpacked 2.4 MB; with -g it would be 4.7 MB. The sdist: 4.6 MB, mostly golden files.
WHEEL_LIMIT = 1_500_000
UNPACKED_LIMIT = 3_500_000
SDIST_LIMIT = 6_000_000
NEWEST_GLIBC = (2, 28)  # that of pyarrow's own wheels

BUILT = ("build", "dist", "site", "demo-store", "rmq.egg-info")  # in the root only
COMPILERS = ("cc", "gcc", "clang", "c++", "g++")
WHERE = """
import sys, rmq
for name in rmq.__all__:
    getattr(rmq, name)
print(*(module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "rmq"), sep="\\n")
"""


def clean_environment(**more: str) -> dict[str, str]:
    """Without what would lead back to the tree, or change what the build makes."""
    removed = ("PYTHON", "PYTEST", "RMQ_", "CIBW_")
    return {name: value for name, value in os.environ.items() if not name.startswith(removed)} | more


def run(command: Sequence[str | Path] | str, directory: Path, environment: Mapping[str, str]) -> str:
    """What a command printed; when it fails, that is the message. A text is for the shell."""
    done = subprocess.run(command, cwd=directory, env=environment, shell=isinstance(command, str), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)  # fmt: skip
    if done.returncode:
        pytest.fail(f"{command}\n{done.stdout}", pytrace=False)
    return done.stdout


def left_behind(folder: str, names: list[str]) -> set[str]:
    """What a copy of the tree goes without."""
    return {name for name in names if name.startswith(".") or (name in BUILT and Path(folder) == ROOT)}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist and the wheel. Compiled modules and caches that lie in the tree are in the copy too."""
    directory = tmp_path_factory.mktemp("wheel")
    tree = directory / "tree"
    shutil.copytree(ROOT, tree, ignore=left_behind)
    run([tree / "tools" / "wheel.sh", directory / "dist"], directory, clean_environment(PYTHON=sys.executable))
    shutil.rmtree(tree)
    return directory / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Path:
    (path,) = dist.glob("*.tar.gz")
    return path


class Environment:
    """A virtual environment without even pip, and no compiler on its PATH."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "venv"
        self.away = directory / "away"  # the working directory: no source tree
        self.away.mkdir()
        run([sys.executable, "-m", "venv", "--without-pip", self.directory], self.away, clean_environment())
        self.path = self.directory / "bin"
        self.variables = clean_environment(PATH=str(self.path), CC="/nonexistent")

    def python(self, *arguments: str) -> str:
        return run([self.path / "python", *arguments], self.away, self.variables)

    def pip(self, *arguments: str | Path) -> str:
        command = [sys.executable, "-m", "pip", "--python", self.path / "python", *arguments]
        return run(command, self.away, self.variables)

    def install(self, *packages: str | Path) -> None:
        self.pip("install", "--quiet", "--only-binary=:all:", *packages)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    environment = Environment(tmp_path_factory.mktemp("installed"))
    environment.install(wheel)
    yield environment
    shutil.rmtree(environment.directory)


# ---- contents ------------------------------------------------------------------------------------


def source_files(folder: str) -> set[str]:
    """Relative paths below a folder of the tree, without what compilers, interpreters and editors leave."""
    paths = (path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.as_posix() for path in paths
            if path.suffix not in (".so", ".pyc", ".class") and not any(part.startswith(".") for part in path.parts)
           }  # fmt: skip


def metadata(contents: Mapping[str, bytes]) -> Message:
    return message_from_bytes(contents[f"rmq-{rmq.__version__}.dist-info/METADATA"])


def test_wheel_is_the_package_and_its_compiled_modules(contents: dict[str, bytes]) -> None:
    sources = source_files("rmq") | source_files("pyspark_rmq")
    compiled = {path.removesuffix(".pyx") for path in sources if path.endswith(".pyx")}
    wanted = {path for path in sources if path.endswith((".py", ".pyi", "/py.typed"))}
    wanted |= {module + sysconfig.get_config_var("EXT_SUFFIX") for module in (*compiled, SHARED)}
    assert "rmq/py.typed" in wanted
    assert compiled
    assert {module + ".pyi" for module in compiled} <= wanted
    assert {name for name in contents if ".dist-info/" not in name} == wanted


def test_wheel_names_its_licence_and_its_needs(contents: dict[str, bytes]) -> None:
    about = metadata(contents)
    licence = contents[f"rmq-{rmq.__version__}.dist-info/licenses/LICENSE"]
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert about["License-Expression"] == PROJECT["license"] == "Apache-2.0"
    assert about["Requires-Python"] == PROJECT["requires-python"]
    needs = [need for need in about.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert needs == PROJECT["dependencies"]


def test_wheel_is_small(wheel: Path, contents: dict[str, bytes]) -> None:
    assert wheel.stat().st_size < WHEEL_LIMIT
    assert sum(map(len, contents.values())) < UNPACKED_LIMIT
    assert [name for name, data in contents.items() if name.endswith(".so") and b".debug_info" in data] == []


def test_sdist_is_enough_to_build_and_to_test(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = [PurePosixPath(member.name) for member in archive if member.isfile()]
    names = {path.relative_to(f"rmq-{rmq.__version__}").as_posix() for path in members}
    for folder in ("rmq", "pyspark_rmq", "tests", "examples", "docs", "bench", "tools"):
        assert {name for name in names if name.startswith(f"{folder}/")} == source_files(folder)
    top = {"CHANGELOG.md", "CMakeLists.txt", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md",
           "mkdocs.yml", "pyproject.toml", "setup.py"}  # fmt: skip
    assert {name for name in names if "/" not in name} == top | {"PKG-INFO", "setup.cfg"}
    assert sdist.stat().st_size < SDIST_LIMIT


def test_tree_without_its_cython_sources_is_refused(tmp_path: Path) -> None:
    shutil.copy(ROOT / "setup.py", tmp_path)
    done = subprocess.run([sys.executable, "setup.py", "--version"], cwd=tmp_path, env=clean_environment(), text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 1
    assert "no rmq/_core/*.pyx here" in done.stderr


# ---- platforms -----------------------------------------------------------------------------------


def test_auditwheel_accepts_the_wheel(wheel: Path) -> None:
    shown = run([sys.executable, "-m", "auditwheel", "show", wheel], wheel.parent, clean_environment())
    tag = re.search(r'following\s+platform\s+tag:\s+"manylinux_(\d+)_(\d+)_\w+"', shown)
    assert tag is not None, shown
    assert (int(tag[1]), int(tag[2])) <= NEWEST_GLIBC
    assert f"manylinux_{tag[1]}_{tag[2]}_" in wheel.name


def test_cibuildwheel_knows_what_to_build() -> None:
    command = [sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--print-build-identifiers"]
    identifiers = run(command, ROOT, clean_environment()).split()
    pythons, machines = ("cp311", "cp312", "cp313", "cp314"), ("x86_64", "aarch64")
    assert sorted(identifiers) == sorted(f"{python}-manylinux_{machine}" for python in pythons for machine in machines)


# ---- installed -----------------------------------------------------------------------------------


def test_wheel_installs_where_there_is_no_compiler(installed: Environment) -> None:
    assert [name for name in COMPILERS if shutil.which(name, path=str(installed.path))] == []
    assert "No broken requirements" in installed.pip("check")
    modules = installed.python("-c", WHERE).splitlines()
    assert [module for module in modules if not Path(module).is_relative_to(installed.directory)] == []
    assert any(module.endswith(sysconfig.get_config_var("EXT_SUFFIX")) for module in modules)


def test_installed_commands_start(installed: Environment) -> None:
    for name in PROJECT["scripts"]:
        run([installed.path / name, "--help"], installed.away, installed.variables)
    assert installed.python("-m", "rmq", "--help").startswith("Usage")


def test_public_face_of_the_installed_wheel(installed: Environment, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        for folder in CIBUILDWHEEL["test-sources"]:
            prefix = f"rmq-{rmq.__version__}/"
            members = [member for member in archive if member.name.startswith(prefix + folder)]
            archive.extractall(installed.away, members, **SAFELY)
    for entry in (installed.away / prefix).iterdir():
        entry.rename(installed.away / entry.name)
    installed.install(*CIBUILDWHEEL["test-requires"])
    variables = {**installed.variables, "PYTEST_DEBUG_TEMPROOT": str(installed.away)}
    summary = run(CIBUILDWHEEL["test-command"], installed.away, variables).splitlines()[-1]
    assert re.search(r"\d+ passed", summary)
    assert "skipped" not in summary  # without golden files, pytest would skip what reads them
    assert not any(installed.away.glob("pytest-of-*/*/*")), "stores of 90 MB each are removed with their tests"
