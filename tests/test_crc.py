# SPDX-License-Identifier: Apache-2.0
"""The CRC of bodies, by each set of instructions that RMQ_CPU chooses, beside zlib's."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rmq._core._record import CPU_LEVEL
from rmq._core._record import CPU_LEVELS as LEVELS

ALONE = """
    import ctypes, mmap, random, zlib
    from rmq._core._record import body_crc

    # Two pages between two that nobody may touch: a kernel that reads past the bytes dies.
    PAGE = mmap.PAGESIZE
    pages = mmap.mmap(-1, 4 * PAGE)
    view = memoryview(pages)
    view[PAGE : 3 * PAGE] = random.Random(5).randbytes(2 * PAGE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    assert protect(first, PAGE, 0) == 0 and protect(first + 3 * PAGE, PAGE, 0) == 0

    sizes = [*range(301), *range(440, 520), 575, 576, 577, 1023, 1024, 1025, 4095, 4096, 4097, 2 * PAGE]
    for size in sizes:
        for begin in {PAGE, 3 * PAGE - size, *(range(PAGE + 1, PAGE + 18) if size < 2 * PAGE - 18 else ())}:
            body = view[begin : begin + size]
            assert body_crc(body) == zlib.crc32(body) & 0x7FFFFFFF, (size, begin)
"""

COPIED = """
    import random, struct, zlib
    import numpy as np
    from rmq._core._putbatch import PutBatch
    from rmq._core._putrow import PutRules
    from rmq._core._queuetable import QueueTable
    from rmq._core._textcolumn import TextColumn

    BODY_CRC, BODY_SIZE, BODY, GUARD = 8, 84, 88, 64
    sizes = [*range(301), *range(440, 520), 1023, 1024, 1025, 4096, 9999]   # end to end: at all alignments
    data = random.Random(6).randbytes(sum(sizes))
    starts = np.cumsum([0, *sizes])
    nothing = np.zeros(0, np.uint8)
    topics = TextColumn(np.arange(len(sizes) + 1), b"T" * len(sizes), nothing)
    for append_crc in (False, True):
        rules = PutRules(max_message_size=10_000, max_record_size=20_000, allow_v2=True, allow_ipv6=True,
                         append_crc=append_crc,
                         drop_last_separator=False, store_host="1.2.3.4:5")
        batch = PutBatch(rules)
        batch.load_columns(len(sizes), topic=topics, body=TextColumn(starts, data, nothing), keys=None, key_lists=None,
                           tags=None, uniq_key=None, names=None, values=None, maps=None, raw_properties=None,
                           numbers={}, hosts={})
        position = GUARD
        for row, size in enumerate(sizes):
            segment = bytearray(b"\\xaa" * (GUARD + batch.records_size))
            end = batch.encode(segment, 0, position := position % GUARD + 1, row, row + 1, 7, QueueTable())
            assert set(segment[:position]) | set(segment[end:]) <= {0xAA}, size
            body = data[starts[row] : starts[row + 1]]
            crc, found = (struct.unpack_from(">i", segment, position + at)[0] for at in (BODY_CRC, BODY_SIZE))
            assert (crc, found) == (zlib.crc32(body) & 0x7FFFFFFF, size)
            assert segment[position + BODY : position + BODY + size] == body
            if append_crc:
                digits = bytes(segment[end - 11 : end - 1])[::-1]
                assert int(digits) == zlib.crc32(segment[position : end - 20]) & 0x7FFFFFFF, size
"""

SAID = "from rmq._core._record import CPU_LEVEL; print(CPU_LEVEL)"


def run(program: str, level: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env={**os.environ, "RMQ_CPU": level},
                          capture_output=True, text=True, check=False)  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("program", [ALONE, pytest.param(COPIED, marks=pytest.mark.slow)], ids=["alone", "copied"])
def test_a_crc_is_zlib_s_and_touches_no_byte_around(program: str, level: str) -> None:
    if "RMQ_CPU" not in os.environ and LEVELS.index(level) > LEVELS.index(CPU_LEVEL):
        pytest.skip(f"this CPU goes up to {CPU_LEVEL}")
    done = run(f"{SAID}\n{textwrap.dedent(program)}", level)
    assert (done.returncode, done.stdout.strip()) == (0, level), done.stderr


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_that_the_cpu_lacks_is_not_used(level: str) -> None:
    """The most that may be used is named, not what is: a CPU that has less does what it can."""
    done = run(SAID, level)
    assert done.returncode == 0, done.stderr
    assert LEVELS.index(done.stdout.strip()) <= LEVELS.index(level)


def test_an_unknown_level_is_told() -> None:
    names = "plain, crc" if platform.machine() == "aarch64" else "plain, v2, avx2, vpclmul256, vpclmul512"
    done = run(SAID, "fast")
    assert done.returncode == 1
    assert f"RMQ_CPU must be one of {names}, got 'fast'" in done.stderr


CHANGED = """if True:
    import sys, threading
    import numpy as np, pyarrow as pa, rmq
    size, rounds = map(int, sys.argv[2:])
    count = max(200, 200_000 // size)
    data = np.zeros(count * size, np.uint8)
    offsets = np.arange(count + 1, dtype=np.int64) * size
    bodies = pa.Array.from_buffers(pa.large_binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    ends = threading.Event()

    def change():
        while not ends.is_set():
            data.fill(np.random.randint(256))

    thread = threading.Thread(target=change)
    config = rmq.StoreConfig(mapped_file_size_commit_log=1 << 24, message_index_enable=False)
    with rmq.open(sys.argv[1], "x", config=config) as store:
        thread.start()
        for _ in range(rounds):
            store.put_many(pa.RecordBatch.from_arrays([bodies], ["body"]), topic="T", results=False)
        ends.set()
        thread.join()
        assert store.scan(columns=["phy_offset"]).read_all().num_rows == rounds * count
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", [*LEVELS[: LEVELS.index(CPU_LEVEL) + 1]])
@pytest.mark.parametrize(("size", "rounds"), [(5000, 10), (64, 100), (136, 100)])
def test_a_body_that_changes_meanwhile_is_stored_with_the_crc_of_what_was_stored(
    tmp_path: Path, level: str, size: int, rounds: int
) -> None:
    subprocess.run([sys.executable, "-c", CHANGED, tmp_path / "s", str(size), str(rounds)], check=True,
                   env={**os.environ, "RMQ_CPU": level})  # fmt: skip
