"""Spark on several processes of this machine: a standalone cluster, and an application that does as it is told.

What is started gets a session of its own (setsid), and all of that session is killed in the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE_S = 180  # for one step, on a machine that does other things besides
TAIL = 6000  # characters of a log that a failure shows
JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
URL = re.compile(r"spark://127\.0\.0\.1:\d+")


def spark_home(place: Path) -> Path:
    """PySpark's own directory as links: Spark writes logs and jars of executors to <home>/work."""
    import pyspark

    home = place / "home"
    home.mkdir()
    for item in Path(pyspark.__file__).parent.iterdir():
        if item.name != "work":
            (home / item.name).symlink_to(item)
    return home


def environment(place: Path, java: str) -> dict[str, str]:
    """Of every process of a cluster; of the tests' own it has what Java and Python need, and nothing of Spark's."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "PATH") if name in os.environ}
    return kept | {"JAVA_HOME": java, "SPARK_HOME": str(place / "home"), "PYTHONPATH": str(ROOT), "TMPDIR": str(place),
                   "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable,
                   "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_DIRS": str(place), "SPARK_DAEMON_MEMORY": "256m",
                   "SPARK_DAEMON_JAVA_OPTS": JVM, "SPARK_WORKER_DIR": str(place / "work")}  # fmt: skip


def session_of(pid: int) -> set[int]:
    """Processes of the session that a process leads; those that have ended and wait for their parent are left out."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(session) == pid and state != "Z":
                found.add(int(stat.parent.name))
    return found


def until(is_done: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """What is_done() returns, once it is true; AssertionError after patience_s."""
    end = time.monotonic() + patience_s
    while not (found := is_done()):
        assert time.monotonic() < end, f"{what}: not within {patience_s:.0f} s"
        time.sleep(0.02)
    return found


class Process:
    """One that we start, with all that it starts; its output goes to a file."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str], **options: Any) -> None:
        self.log = log
        self._is_killed = False
        with log.open("wb") as file:
            self.own = subprocess.Popen(command, env=env, cwd=log.parent, stdout=file, stderr=subprocess.STDOUT,
                                        start_new_session=True, **options)  # fmt: skip

    def printed(self, pattern: re.Pattern[str], what: str) -> str:
        """The first text in its output that a pattern matches."""
        def look() -> re.Match[str] | None:
            found = pattern.search(self.log.read_text(errors="replace"))
            assert found or self.own.poll() is None, f"{what}: it ended, {self.tail()}"
            return found

        return str(until(look, what)[0])

    def tail(self) -> str:
        return f"{self.log.name}:\n{self.log.read_text(errors='replace')[-TAIL:]}"

    def kill(self) -> None:
        if self._is_killed:  # its number may be that of another process now
            return
        self._is_killed = True
        while left := session_of(self.own.pid):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.own.poll()
            time.sleep(0.02)
        self.own.wait()


class Standalone:
    """A master and two workers of one core each on loopback, two hosts to Spark, at ports that were free."""

    def __init__(self, place: Path, java: str) -> None:
        self.processes: list[Process] = []
        env, start = environment(place, java), [str(place / "home" / "bin" / "spark-class")]
        deploy, ports = "org.apache.spark.deploy", ["--port", "0", "--webui-port", "0"]
        try:
            master = [*start, f"{deploy}.master.Master", "--host", "127.0.0.1", *ports]
            self.processes.append(Process(master, place / "master.log", env))
            self.url = self.processes[0].printed(URL, "master")
            for number in (1, 2):
                command = [*start, f"{deploy}.worker.Worker", "--host", f"127.0.0.{number}", *ports,
                           "--cores", "1", "--memory", "1g", self.url]  # fmt: skip
                self.processes.append(Process(command, place / f"worker-{number}.log", env))
            for worker in self.processes[1:]:
                worker.printed(re.compile("Successfully registered with master"), "worker")
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


class Application:
    """application.py: a driver with its JVM, which executes steps one after another."""

    def __init__(self, master: str, place: Path, java: str, settings: dict[str, str]) -> None:
        self.place = place
        answers, told = os.pipe()
        command = [sys.executable, str(Path(__file__).with_name("application.py")), master, str(place), str(told),
                   json.dumps(settings)]  # fmt: skip
        self._process = Process(command, place / "application.log", environment(place, java), stdin=subprocess.PIPE,
                                pass_fds=[told])  # fmt: skip
        os.close(told)
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._rest = b""
        self.is_asked = False

    def tell(self, step: str, **arguments: Any) -> None:
        """Let it begin a step."""
        assert not self.is_asked
        assert self._process.own.stdin is not None
        self._process.own.stdin.write(json.dumps({"step": step, "arguments": arguments}, default=str).encode() + b"\n")
        self._process.own.stdin.flush()
        self.is_asked = True

    def answer(self, patience_s: float = PATIENCE_S) -> Any:
        """What the step that it was told returned; AssertionError with its traceback when it raised."""
        end = time.monotonic() + patience_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                assert selector.select(max(0.0, end - time.monotonic())), f"no answer within {patience_s:.0f} s"
                read = os.read(self._answers.fileno(), 1 << 20)
                assert read, "the application has ended"
                self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        self.is_asked = False
        found = json.loads(line)
        assert "error" not in found, found["error"]
        return found["answer"]

    def ask(self, step: str, **arguments: Any) -> Any:
        self.tell(step, **arguments)
        return self.answer()

    def kill(self) -> None:
        """The driver with its JVM. What runs on executors of a cluster ends when they notice."""
        self._process.kill()
        self._answers.close()
        if self._process.own.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.own.stdin.close()

    def logs(self) -> str:
        """The ends of all that processes of the cluster have printed."""
        found = [self._process.log, *sorted(self.place.glob("*er*.log")), *sorted(self.place.rglob("work/*/*/stderr"))]
        return "\n".join(f"---- {log.relative_to(self.place)}\n{log.read_text(errors='replace')[-TAIL:]}"
                         for log in dict.fromkeys(found))  # fmt: skip


@contextlib.contextmanager
def application(master: str | None, place: Path, java: str, **settings: str) -> Iterator[Application]:
    """An application on a master; None: on a standalone cluster of its own. settings: of Spark, without `spark.`."""
    spark_home(place)
    with contextlib.ExitStack() as stack:
        if master is None:
            cluster = Standalone(place, java)
            stack.callback(cluster.kill)
            master = cluster.url
        made = Application(master, place, java, settings)
        stack.callback(made.kill)
        yield made
