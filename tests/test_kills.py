"""A writer killed with SIGKILL at random moments, readers beside it all the time: nothing that put returned is lost.

RMQ_KILLS sets how many in the long form, RMQ_SEED the moments; the seed is printed and stands in a failure.
"""

from __future__ import annotations

import os
import random
import select
import signal
import time
from pathlib import Path

import pytest
import workload

import rmq

KILLS = int(os.environ.get("RMQ_KILLS", "200"))
SEED = int(os.environ.get("RMQ_SEED", str(time.time_ns() % 10**6)))
KILLS_OF_A_STORE = 20
KINDS = ["ASYNC_FLUSH", "SYNC_FLUSH", workload.WRITTEN]


class Killing:
    """One store, its readers, and writers one after the other that are killed."""

    def __init__(self, root: Path, seed: int, readers: int) -> None:
        root.mkdir()
        workload.warm_up(root / "warm")
        self.path, self.acked, self.stop, self.faults = (root / name for name in ("s", "acked", "stop", "faults"))
        self.answers = [root / f"seen{number}" for number in range(readers)]
        self._chance = random.Random(seed)
        self._lives = 0
        self._readers = {workload.start(workload.read, self.path, self.acked, self.stop, answer, seed,
                                        faults=self.faults) for answer in self.answers}  # fmt: skip

    def kill_one(self, kind: str) -> None:
        """Start a writer and kill it while it opens, puts or closes; it must not have ended before."""
        sign, longest = self._chance.choice([("", 0.015), ("o", 0.003), ("o", 0.15), ("o", 0.15), ("c", 0.005)])
        self._lives += 1
        reading, writing = os.pipe()
        first = self._lives * workload.ROUND
        pid = workload.start(workload.write, self.path, self.acked, first, kind, writing, sign == "c",
                             faults=self.faults)  # fmt: skip
        os.close(writing)
        told = b""
        while sign.encode() not in told and select.select([reading], [], [], 20)[0]:
            got = os.read(reading, 10)
            told += got
            if not got:
                break
        time.sleep(self._chance.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        os.close(reading)
        assert os.WIFSIGNALED(status), self.told()
        assert sign.encode() in told, f"the writer never said {sign!r}"
        for reader in list(self._readers):
            if os.waitpid(reader, os.WNOHANG) != (0, 0):
                self._readers.remove(reader)
                pytest.fail(f"a reader ended: {self.told()}")

    def told(self) -> str:
        return self.faults.read_text() if self.faults.exists() else "no fault was told"

    def finish(self) -> None:
        """A new writer goes on without help; the readers see it all and end well; everything agrees."""
        last = (self._lives + 1) * workload.ROUND
        with rmq.open(self.path, "a", config=workload.config()) as store:
            store.put_many(workload.message(n) for n in range(last, last + 50))
            with self.acked.open("a") as file:
                file.write(f"{last} {last + 50}\n")
            self.stop.touch()
            while self._readers:
                assert os.waitpid(self._readers.pop(), 0)[1] == 0, self.told()
        workload.assert_whole(self.path, self.acked, self.answers)

    def give_up(self) -> None:
        for reader in self._readers:
            os.kill(reader, signal.SIGKILL)
            os.waitpid(reader, 0)


def kill_some(root: Path, count: int, seed: int, kinds: list[str], readers: int) -> None:
    killing = Killing(root, seed, readers)
    try:
        for number in range(count):
            killing.kill_one(kinds[number % len(kinds)])
        killing.finish()
    except BaseException as error:
        error.add_note(f"RMQ_SEED={SEED}, store of seed {seed}; {killing.told()}")
        raise
    finally:
        killing.give_up()


@pytest.mark.slow
def test_six_killed_writers_lose_nothing_that_put_returned(tmp_path: Path) -> None:
    kill_some(tmp_path / "k", 6, SEED, KINDS, readers=1)


@pytest.mark.kill
@pytest.mark.parametrize("number", range(-(-KILLS // KILLS_OF_A_STORE)))
def test_killed_writers_lose_nothing_that_put_returned(tmp_path: Path, number: int) -> None:
    kinds = [KINDS[number % 4]] if number % 4 < len(KINDS) else KINDS
    print(f"RMQ_SEED={SEED}")
    kill_some(tmp_path / "k", min(KILLS_OF_A_STORE, KILLS - number * KILLS_OF_A_STORE), SEED + number, kinds, readers=2)
