# SPDX-License-Identifier: Apache-2.0
"""tools/java.sh on machines without Java, with a stand-in for apt-get."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "tools" / "java.sh"
NEEDED = ("bash", "dirname", "head", "id", "ln", "readlink", "sed")
MISSING = "Spark needs Java 17 or newer (Debian: apt-get install default-jre-headless; or JAVA_HOME=...)\n"
NEW, OLD = 'openjdk version "21.0.2" 2024-01-16', 'java version "1.8.0_402"'

Run = Callable[..., subprocess.CompletedProcess[str]]


def program(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/usr/bin/env bash", *lines, ""]))
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A PATH of its own with what the script needs, and no Java."""
    for name in NEEDED:
        found = shutil.which(name)
        assert found is not None
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).symlink_to(found)
    (tmp_path / "bin" / "env").symlink_to(shutil.which("env") or "/usr/bin/env")
    return tmp_path


@pytest.fixture
def run(machine: Path) -> Run:
    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", SCRIPT, *arguments], env={"PATH": str(machine / "bin")} | environment,
                              capture_output=True, text=True, check=False)  # fmt: skip

    return run


def java_of(machine: Path, says: str) -> Path:
    return program(machine / "jdk" / "bin" / "java", f"echo '{says}' >&2")


def test_without_java_and_apt_get_spark_s_line_says_what_is_missing(run: Run) -> None:
    done = run("spark")
    assert (done.returncode, done.stdout, done.stderr) == (3, "", f"java: no java; {MISSING}")


def test_a_java_that_is_too_old_is_named(run: Run, machine: Path) -> None:
    done = run("spark", JAVA_HOME=str(java_of(machine, OLD).parent.parent))
    assert done.returncode == 3
    assert done.stderr == f"java: {machine}/jdk/bin/java is of Java 1, 17 or newer is needed; {MISSING}"


def test_what_java_says_before_its_version_is_no_version(run: Run, machine: Path) -> None:
    """As it does when JAVA_TOOL_OPTIONS is set."""
    home = java_of(machine, f"Picked up JAVA_TOOL_OPTIONS: -Xmx2g\n{NEW}").parent.parent
    assert run("spark", JAVA_HOME=str(home)).stdout == f"{home}\n"
    java_of(machine, f"Picked up JAVA_TOOL_OPTIONS: -Xmx512m\n{OLD}")
    assert "is of Java 1, 17 or newer" in run("spark", JAVA_HOME=str(home)).stderr


def test_a_java_that_is_there_is_taken(run: Run, machine: Path) -> None:
    home = java_of(machine, NEW).parent.parent
    assert run("spark", JAVA_HOME=str(home)).stdout == f"{home}\n"
    (machine / "bin" / "java").symlink_to(home / "bin" / "java")
    done = run("spark")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{home}\n", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root installs")
def test_root_installs_a_java_and_nothing_else_for_spark(run: Run, machine: Path) -> None:
    java = java_of(machine, NEW)
    program(machine / "bin" / "apt-get", f'echo "$@" >>{machine}/asked',
            f'if [ "$1" = install ]; then ln -sf {java} {machine}/bin/java; fi')  # fmt: skip
    done = run("spark")
    assert (done.returncode, done.stdout) == (0, f"{machine}/jdk\n")
    assert (machine / "asked").read_text().splitlines() == [
        "update -qq", "install -y -qq --no-install-recommends openjdk-17-jre-headless"]  # fmt: skip
    assert run("spark").returncode == 0
    assert len((machine / "asked").read_text().splitlines()) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root installs")
def test_an_apt_get_that_fails_is_told(run: Run, machine: Path) -> None:
    program(machine / "bin" / "apt-get", "exit 100")
    done = run("spark")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.endswith(f"java: apt-get failed\njava: no java; {MISSING}")
    done = run()
    assert (done.returncode, done.stdout) == (3, "no javac\n")


def test_nothing_is_installed_beside_a_java_home_that_is_wrong(run: Run, machine: Path) -> None:
    program(machine / "bin" / "apt-get", f"touch {machine}/asked")
    done = run("spark", JAVA_HOME="/nix")
    assert (done.returncode, done.stderr) == (3, f"java: no java in JAVA_HOME=/nix; {MISSING}")
    assert run(JAVA_HOME="/nix").stdout == "no javac in JAVA_HOME=/nix\n"
    assert not (machine / "asked").exists()
