# SPDX-License-Identifier: Apache-2.0
"""Apache RocketMQ's own store classes in a JVM beside the tests: built from tests/java, driven by job files."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import rmq

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "tests" / "java"
BUILD = ROOT / "build" / "java"
RELEASES = ("5.3.3", "4.9.8")
PATIENCE_S = 120  # for one job
# 4.9.8 unmaps files by calling into the JDK.
OPEN_PACKAGES = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in ("java.nio", "jdk.internal.ref")]

Put = rmq.Message | list[rmq.Message]  # a list is a batch


@cache
def _look() -> tuple[bool, str]:
    """Whether Java and Maven are here, and the Java home or what is missing."""
    done = subprocess.run([shutil.which("bash") or "/bin/bash", ROOT / "tools" / "java.sh", "check"],
                          stdout=subprocess.PIPE, text=True, check=False)  # fmt: skip
    return done.returncode == 0, done.stdout.strip()


def missing() -> str:
    """Why RocketMQ cannot be run here; "" when it can."""
    is_here, text = _look()
    return "" if is_here else text or "tools/java.sh failed"


def environment() -> dict[str, str]:
    # The locale decides how Java spells file names that are not ASCII.
    return {**os.environ, "JAVA_HOME": _look()[1], "LC_ALL": "C.UTF-8"}


def class_path(release: str, harness: Path = SOURCES, name: str = "") -> str:
    """Build a harness for a release unless that is done already, in build/java/`name`; its class path."""
    place = BUILD / (name or release)
    sources = [harness / "pom.xml", *sorted((harness / "src").rglob("*.java"))]
    state = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()
    place.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp, libraries = place / "stamp", place / "classpath"
        if not (stamp.exists() and stamp.read_text() == state and _all_exist(libraries)):
            shutil.rmtree(place)
            command = ["mvn", "-q", "-B", "-f", str(harness / "pom.xml"), f"-Drocketmq.version={release}", "compile"]
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
            stamp.write_text(state)
        return f"{place / 'classes'}:{libraries.read_text()}"


def _all_exist(libraries: Path) -> bool:
    return libraries.exists() and all(map(os.path.exists, libraries.read_text().split(":")))


class Visit(NamedTuple):
    """What RocketMQ did in a store: results of its puts, and what it said of the store afterwards."""

    put: list[dict[str, Any]]
    answers: dict[str, Any]


class RocketMQ:
    """The store classes of one release; the JVM is started with the first store."""

    def __init__(self, release: str, directory: Path) -> None:
        self.release = release
        self._directory = directory
        self._java: subprocess.Popen[str] | None = None
        self._jobs = 0
        directory.mkdir(parents=True, exist_ok=True)

    def open(self, store: Path, config: rmq.StoreConfig, questions: dict[str, Any], *, put: Sequence[Put] = (),
             leave_open: bool = False) -> Visit:  # fmt: skip
        """Load and start a store, put, answer the questions, shut down. A load that fails is an AssertionError.

        leave_open: no shutdown; the next call for that store goes on with it, unless `kill` came between.
        """
        job = {"options": self._options(store, config), "put": [self._json(item) for item in put],
               "questions": questions, "leave_open": leave_open}  # fmt: skip
        self._jobs += 1
        file = self._directory / f"job-{self._jobs}.json"
        file.write_text(json.dumps(job))
        answer = json.loads(self._do(file).read_text())
        assert "error" not in answer, f"{answer['error']}\n{self._log()}"
        assert answer["loaded"], f"RocketMQ does not load {store}\n{self._log()}"
        return Visit(answer["put"], answer["answers"])

    def kill(self) -> None:
        """SIGKILL; the next store gets a new JVM."""
        if self._java is not None:
            self._java.kill()
            self._java.communicate()
            self._java = None

    def close(self) -> None:
        if self._java is not None:
            self._java.communicate()  # the end of its input ends it
            self._java = None

    def _do(self, job: Path) -> Path:
        if self._java is None:
            options = [*OPEN_PACKAGES, "-Dfile.encoding=UTF-8", f"-Duser.home={self._directory}"]
            command = [f"{_look()[1]}/bin/java", *options, "-cp", class_path(self.release), "rmq.interop.Main"]
            with open(self._directory / "java.log", "a") as log:
                self._java = subprocess.Popen(command, env=environment(), text=True, stdin=subprocess.PIPE,
                                              stdout=subprocess.PIPE, stderr=log)  # fmt: skip
        assert self._java.stdin is not None
        assert self._java.stdout is not None
        alarm = threading.Timer(PATIENCE_S, self._java.kill)
        alarm.start()
        try:
            self._java.stdin.write(f"{job}\n")
            self._java.stdin.flush()
            reply = self._java.stdout.readline().strip()
        except BrokenPipeError:
            reply = ""
        finally:
            alarm.cancel()
        if not reply:
            self.kill()
            raise AssertionError(f"Java ended, or gave no answer in {PATIENCE_S} s\n{self._log()}")
        return Path(reply)

    def _log(self) -> str:
        return (self._directory / "java.log").read_text()[-4000:]

    def _options(self, store: Path, config: rmq.StoreConfig) -> dict[str, Any]:
        """Properties of MessageStoreConfig; what is not named keeps its default."""
        options = {
            "storePathRootDir": str(store),
            "storePathCommitLog": str(store / "commitlog"),
            "mappedFileSizeCommitLog": config.mapped_file_size_commit_log,
            "mappedFileSizeConsumeQueue": config.mapped_file_size_consume_queue,
            "maxHashSlotNum": config.max_hash_slot_num,
            "maxIndexNum": config.max_index_num,
            "haListenPort": 0,
            "diskMaxUsedSpaceRatio": 95,
            "cleanFileForciblyEnable": False,
        }
        if config.enabled_append_prop_crc:
            options |= {"enabledAppendPropCRC": True, "forceVerifyPropCRC": True}
        return options

    def _json(self, item: Put) -> dict[str, Any]:
        if isinstance(item, list):
            return {**self._common(item[0]), "batch": [self._own(message) for message in item]}
        return {**self._common(item), **self._own(item),
                "prepared_transaction_offset": item.prepared_transaction_offset}  # fmt: skip

    @staticmethod
    def _common(message: rmq.Message) -> dict[str, Any]:
        names = ("topic", "queue_id", "sys_flag", "born_timestamp", "born_host", "store_host", "reconsume_times")
        return {name: getattr(message, name) for name in names}

    @staticmethod
    def _own(message: rmq.Message) -> dict[str, Any]:
        properties = {"KEYS": " ".join(message.keys) or None, "UNIQ_KEY": message.uniq_key, "TAGS": message.tags}
        kept = {name: value for name, value in properties.items() if value is not None}
        return {"body": base64.b64encode(message.body).decode(), "flag": message.flag,
                "properties": kept | message.properties}  # fmt: skip
