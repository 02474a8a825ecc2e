"""A store in use: readers in other processes beside the writer, many threads, and how it ends."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import oracle
import pytest

import rmq
from rmq.consumequeue import ConsumeQueue

pytestmark = pytest.mark.slow

# ---- another process reads while this one writes ---------------------------------------------------------

READER = """
import json, sys, time
from pathlib import Path
import rmq

path, stop, goes = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])

def body(i):
    return b"%06d" % i + bytes((i * 7 + k) % 251 for k in range(i % 97))

def check(store, seen, places):
    before = store.max_phy_offset
    table = store.scan(columns=["body", "phy_offset", "queue_id", "queue_offset"], begin_phy_offset=seen[1]).read_all()
    rows = table["body"].to_pylist()
    assert rows == [body(i) for i in range(seen[0], seen[0] + len(rows))], "torn, foreign, missing or repeated"
    assert not rows or table["phy_offset"][0].as_py() >= seen[1]
    total = seen[0] + len(rows)
    if rows:
        last = total - 1
        place = table["phy_offset"][-1].as_py()
        assert [m.phy_offset for m in store.query("T", f"key{last}")] == [place], "query lags behind scan"
        assert store.lookup(place).body == body(last)
        assert store.lookup(f"uniq{last}").phy_offset == place
        seen[1] = place + store.lookup(place).size
    found = [int(m.body[:6]) for m in store.query("T", "all", limit=50)]
    newest = max(found, default=-1)
    assert newest >= total - 1, f"query saw {newest} after scan had seen {total}"
    assert found == list(range(newest, newest - len(found), -1)), found
    for queue_id in (0, 1, 2):
        answer = store.pull("T", queue_id, places[queue_id], 10**6)
        first = places[queue_id] * 3 + queue_id
        assert [m.body for m in answer.messages] == [body(first + 3 * k) for k in range(len(answer.messages))]
        after = places[queue_id] + len(answer.messages)
        assert [m.queue_offset for m in answer.messages] == list(range(places[queue_id], after))
        places[queue_id] = after
        assert after * 3 + queue_id >= total, f"pull saw {after} of queue {queue_id} after {total}"
    topics = store.topics().get("T", {})
    assert all(topics.get(q, (0, 0))[0] == 0 and topics.get(q, (0, 0))[1] >= places[q] for q in places), topics
    assert store.max_phy_offset >= before
    seen[0] = total

rounds = opened = 0
seen, places = [0, 0], dict.fromkeys(range(3), 0)
with rmq.open(path) as store:
    is_last = False
    while not is_last:
        is_last = stop.exists()
        check(store, seen, places)
        rounds += 1
        if rounds % 5 == 0:
            with rmq.open(path) as fresh:
                fresh_seen, fresh_places = [0, 0], dict.fromkeys(range(3), 0)
                check(fresh, fresh_seen, fresh_places)
                assert fresh_seen[0] >= seen[0], "a fresh reader sees less"
                opened += 1
            if opened == 2:
                goes.touch()
print(json.dumps({"opened": opened, "seen": seen[0], "places": list(places.values())}))
"""


def live_body(i: int) -> bytes:
    return b"%06d" % i + bytes((i * 7 + k) % 251 for k in range(i % 97))


def live_message(i: int) -> rmq.Message:
    return rmq.Message("T", live_body(i), keys=[f"key{i}", "all"], uniq_key=f"uniq{i}", queue_id=i % 3)


@pytest.mark.parametrize("kind", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_readers_in_another_process_see_a_growing_whole_store(tmp_path: Path, kind: str) -> None:
    config = rmq.StoreConfig(mapped_file_size_commit_log=16384, mapped_file_size_consume_queue=2000,
                             max_hash_slot_num=500, max_index_num=1000, flush_interval_commit_log=30,
                             flush_disk_type=kind)  # fmt: skip
    chance = random.Random(kind)
    with rmq.open(tmp_path / "s", "a", config=config) as store:
        reader = subprocess.Popen([sys.executable, "-c", READER, str(tmp_path / "s"), str(tmp_path / "stop"),
                                   str(tmp_path / "goes")],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
        total, begun = 0, time.monotonic()
        while (time.monotonic() < begun + 1.7 or (not (tmp_path / "goes").exists() and time.monotonic() < begun + 60)) \
                and reader.poll() is None:
            if chance.random() < 0.8:
                store.put(live_message(total))
                total += 1
            else:
                number = chance.randrange(1, 12)
                store.put_many([live_message(i) for i in range(total, total + number)])
                total += number
            if chance.random() < 0.3:
                time.sleep(0.002)
        (tmp_path / "stop").touch()
        out, err = reader.communicate(timeout=60)
        assert reader.returncode == 0, f"of {total}: {err}"
        told = json.loads(out)
        assert told["seen"] == total
        assert told["places"] == [len(range(queue_id, total, 3)) for queue_id in range(3)]
        assert told["opened"] > 1
        assert err == ""
    for folder in ("commitlog", "consumequeue/T/0", "index"):
        assert len(list((tmp_path / "s" / folder).iterdir())) > 2
    assert oracle.check_store(tmp_path / "s", 500, 1000) == []


# ---- threads ---------------------------------------------------------------------------------------------


def test_threads_that_put_and_read_agree_with_a_model(tmp_path: Path) -> None:
    config = rmq.StoreConfig(mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=2000,
                             max_hash_slot_num=1000, max_index_num=3000, flush_interval_commit_log=20)  # fmt: skip
    done: dict[int, list[tuple[int, rmq.PutResult]]] = {number: [] for number in range(4)}
    faults: list[str] = []
    stop = threading.Event()

    def put(number: int) -> None:
        following = 0
        while not stop.is_set():
            size = 1 if following % 3 else 5
            items = [rmq.Message(f"T{number % 2}", b"%d:%d" % (number, i), keys=[f"k{number}:{i}"], queue_id=i % 2)
                     for i in range(following, following + size)]  # fmt: skip
            results = [store.put(items[0])] if size == 1 else list(store.put_many(items))
            done[number] += zip(range(following, following + size), results, strict=True)
            following += size
            time.sleep(0.001)

    def read(number: int) -> None:
        chance, seen = random.Random(number), 0
        while not stop.is_set():
            writer = chance.randrange(4)
            if not done[writer]:
                continue
            i, result = chance.choice(done[writer])
            body = b"%d:%d" % (writer, i)
            found = store.query(result.topic, f"k{writer}:{i}")
            assert [(m.body, m.phy_offset) for m in found] == [(body, result.phy_offset)]
            place = result.topic, result.queue_id, result.queue_offset
            assert store.lookup(place).body == store.lookup(result.phy_offset).body == body
            assert store.pull(*place, 5).messages[0].body == body
            rows = store.scan(columns=["phy_offset"]).read_all().num_rows
            assert rows >= seen
            seen = rows

    def guarded(function: Any, number: int) -> None:
        try:
            function(number)
        except BaseException as error:
            faults.append(f"{function.__name__} {number}: {type(error).__name__}: {error}")
            stop.set()

    with rmq.open(tmp_path / "s", "a", config=config) as store:
        threads = [threading.Thread(target=guarded, args=(function, number)) for function in (put, read)
                   for number in range(4)]  # fmt: skip
        for thread in threads:
            thread.start()
        stop.wait(1.2)
        stop.set()
        for thread in threads:
            thread.join()
        assert faults == []
        model = {result.phy_offset: (b"%d:%d" % (number, i), result) for number, rows in done.items()
                 for i, result in rows}  # fmt: skip
        assert len(model) == sum(len(rows) for rows in done.values()) > 500
        table = store.scan(columns=["phy_offset", "body"]).read_all()
        assert table["phy_offset"].to_pylist() == sorted(model)
        assert table["body"].to_pylist() == [model[place][0] for place in sorted(model)]
        for topic in ("T0", "T1"):
            for queue_id in (0, 1):
                wanted = [(body, result.queue_offset) for _, (body, result) in sorted(model.items())
                          if (result.topic, result.queue_id) == (topic, queue_id)]  # fmt: skip
                assert [queue_offset for _, queue_offset in wanted] == list(range(len(wanted)))
                assert [(m.body, m.queue_offset) for m in store.pull(topic, queue_id, 0, 10**6).messages] == wanted
    for rows in done.values():
        places = [result.phy_offset for _, result in rows]
        assert places == sorted(places)
    assert oracle.check_store(tmp_path / "s", 1000, 3000) == []


# ---- ends ------------------------------------------------------------------------------------------------

SMALL = rmq.StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200, max_hash_slot_num=10,
                        max_index_num=30, flush_interval_commit_log=20)  # fmt: skip


def test_threads_stop_on_close(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        store = rmq.open(tmp_path / "s", "a", config=SMALL)
        store.put(live_message(0))
        assert set(threading.enumerate()) > before
        store.close()
        assert set(threading.enumerate()) == before
    with rmq.open(tmp_path / "s"):
        assert set(threading.enumerate()) == before


def test_a_failed_open_leaves_no_thread_and_no_lock(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    rmq.open(tmp_path / "s", "a", config=SMALL).close()
    with pytest.raises(ValueError, match="max_index_num"):
        rmq.open(tmp_path / "s", "r+", config=rmq.StoreConfig(max_index_num=77))
    assert set(threading.enumerate()) == before
    rmq.open(tmp_path / "s", "r+").close()


def let_go(stores: list[rmq.Store]) -> None:
    stores.clear()
    gc.collect()


@pytest.mark.parametrize("interval", [20, 2**31 - 1], ids=["flushed", "not flushed"])
def test_a_store_that_nobody_closed_warns_and_is_recovered(tmp_path: Path, interval: int) -> None:
    before = set(threading.enumerate())
    config = rmq.StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200,
                             max_hash_slot_num=10, max_index_num=30, flush_interval_commit_log=interval)  # fmt: skip
    stores = [rmq.open(tmp_path / "s", "a", config=config)]
    for i in range(40):
        stores[0].put(live_message(i))
    with pytest.warns(ResourceWarning, match="was not closed"):
        let_go(stores)
    assert (tmp_path / "s/abort").exists()
    with rmq.open(tmp_path / "s", "r+") as again:
        assert [m.body for m in again.query("T", "all", limit=None)] == [live_body(i) for i in range(40)][::-1]
        assert {q: again.topics()["T"][q] for q in range(3)} == {0: (0, 14), 1: (0, 13), 2: (0, 13)}
    assert oracle.check_store(tmp_path / "s", 10, 30) == []
    deadline = time.monotonic() + 2
    while set(threading.enumerate()) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) == before


def test_one_message_in_a_store_of_default_size_costs_less_than_120_mb(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "a") as store:
        store.put(rmq.Message("T", b"x", keys="k", tags="t"))
        store.flush()
        files = [path for path in (tmp_path / "s").rglob("*") if path.is_file()]
        assert sum(path.stat().st_blocks * 512 for path in files) < 120_000_000
        assert sum(path.stat().st_size for path in files) > 2**30


def test_after_one_more_message_a_reader_looks_at_its_queue_alone(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    real, looked_at = ConsumeQueue.correct_min_offset, []

    def correct_min_offset(queue: ConsumeQueue, min_phy_offset: int) -> None:
        looked_at.append(queue.queue_id)
        real(queue, min_phy_offset)

    with rmq.open(tmp_path / "s", "x") as writer, rmq.open(tmp_path / "s") as reader:
        writer.put_many([rmq.Message("T", b"", queue_id=n) for n in range(50)])
        assert len(reader.pull("T", 7, 0, 10).messages) == 1
        monkeypatch.setattr(ConsumeQueue, "correct_min_offset", correct_min_offset)
        writer.put(rmq.Message("T", b"", queue_id=7))
        assert len(reader.pull("T", 7, 0, 10).messages) == 2
        assert looked_at == [7]
        writer.put(rmq.Message("T", b"", queue_id=50))
        assert reader.topics()["T"] == {n: (0, 2 if n == 7 else 1) for n in range(51)}
        assert looked_at == [7, 50]
