# SPDX-License-Identifier: Apache-2.0
"""Apache RocketMQ's classes in JVMs beside the benchmark: bench/java, one for each collector, one round a question."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from rounds import Round

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from rocketmq import OPEN_PACKAGES, class_path, environment, missing  # noqa: E402

RELEASE = "5.3.3"
HEAP = ("-Xms1g", "-Xmx1g")
COLLECTORS = {"G1": ("-XX:+UseG1GC",),
              "ParallelGC": ("-XX:+UseParallelGC", "-XX:+AlwaysPreTouch", "-XX:+UseTransparentHugePages")}  # fmt: skip


class Jvm:
    """One JVM; it ends with its input."""

    def __init__(self, collector: str, home: Path) -> None:
        java = f"{environment()['JAVA_HOME']}/bin/java"
        options = [*HEAP, *COLLECTORS[collector], *OPEN_PACKAGES, "-Dfile.encoding=UTF-8", f"-Duser.home={home}"]
        command = [java, *options, "-cp", class_path(RELEASE, ROOT / "bench" / "java", "bench"), "rmq.bench.Main"]
        self._log = home / f"java-{collector}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, env=environment(), text=True, stdin=subprocess.PIPE,
                                             stdout=subprocess.PIPE, stderr=log)  # fmt: skip

    def ask(self, do: str, **job: Any) -> dict[str, Any]:
        """What it answers; RuntimeError when that is an error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **job}, default=str) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "Java ended"}
        if "error" in answer:
            raise RuntimeError(f"{do}: {answer['error']}\n{self._log.read_text()[-4000:]}")
        return answer

    def close(self) -> None:
        self._process.communicate()


class RocketMQ:
    """All collectors. `why_not`: why RocketMQ cannot run here, "" when it does."""

    def __init__(self, home: Path, *, wanted: bool) -> None:
        self.why_not = missing() if wanted else "--quick starts no JVM"
        self.jvms = {} if self.why_not else {name: Jvm(name, home) for name in COLLECTORS}

    def ask(self, do: str, **job: Any) -> list[dict[str, Any]]:
        """The answers of all to the same question."""
        return [jvm.ask(do, **job) for jvm in self.jvms.values()]

    def rounds(self, items: int, do: str, **job: Any) -> dict[str, Round]:
        """A round of each JVM. In a job a callable takes the number of the round, {name} in a text is the collector."""
        return {f"RocketMQ, {name}": Asked(jvm, name, items, do, job) for name, jvm in self.jvms.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for jvm in self.jvms.values():
            jvm.close()


class Asked:
    """A round of one JVM; `answer`: the last one."""

    def __init__(self, jvm: Jvm, name: str, items: int, do: str, job: dict[str, Any]) -> None:
        self._jvm = jvm
        self._name = name
        self._items = items
        self._do = do
        self._job = job
        self.answer: dict[str, Any] = {}

    def __call__(self, number: int) -> float:
        job = {name: value(number) if callable(value) else value for name, value in self._job.items()}
        job = {name: value.format(name=self._name) if isinstance(value, str) else value for name, value in job.items()}
        self.answer = self._jvm.ask(self._do, **job)
        return self.answer["nanos"] / self._items
