# SPDX-License-Identifier: Apache-2.0
"""The benchmark's table says what was measured, and never that something passed which did not run."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import keyfiles
from goals import CHECKED, GOALS, MARGIN, MEMORY_SHARE, ROWS, Table
from rounds import Round, interleaved


def test_the_fastest_anchor_counts() -> None:
    line = Table().add("I1", "", [10, 12, 11], {"slow": [400, 400, 400], "fast": [220, 200, 240]})
    assert (line.anchor, line.ours, line.theirs, line.ratio, line.rounds) == ("fast", 11, 220, 20, 3)
    assert (line.worst, line.best) == (200 / 12, 22)


@pytest.mark.parametrize(("theirs", "verdict"), [(14.9, "BELOW"), (15, "R"), (22.9, "R"), (23, "M")])
def test_a_line_says_which_goal_is_met(theirs: float, verdict: str) -> None:
    assert Table().add("I1", "", [1.0], {"anchor": [theirs]}).verdict == verdict


def test_what_did_not_run_is_never_passed() -> None:
    table = Table()
    table.add("I11", "lmdb get", [1.0], {"lmdb get": [50.0]})
    for row in ROWS:
        table.skip(row, "no anchor")
    lines = list(table.text(ROWS))[2:]
    assert len(lines) == len(GOALS)
    assert [line.split("|")[1].strip() for line in lines if "not run: no anchor" not in line] == ["I11 lmdb get"]
    assert [line["pass"] for line in table.as_json(["I1"])] == ["not run: no anchor"]


def test_a_check_fails_below_the_margin_only() -> None:
    table = Table()
    table.add("I1", "", [1.0], {"anchor": [MARGIN * 15]})
    table.add("I1b", "", [1.0], {"anchor": [MARGIN * 9 - 0.01]})
    table.skip("I2", "no anchor")
    assert [line.name for line in table.short()] == ["I1b"]


def test_a_check_fails_when_medians_and_fastest_rounds_are_below() -> None:
    """Of the first most rounds of ours were slowed down; of the second the anchor had one quick round."""
    table = Table()
    slowed = table.add("I1", "", [1.0, 9.0, 9.0], {"anchor": [MARGIN * 15, 90.0, 15.0]})
    grown = table.add("I1b", "", [1.0, 1.0, 1.0], {"anchor": [0.1, 9.0, 9.0]})
    assert (slowed.verdict, grown.verdict, table.short()) == ("BELOW", "R", [])
    slower = table.add("I2", "", [1.1, 1.2, 9.0], {"anchor": [MARGIN * 6, MARGIN * 6, 9.0]})
    assert table.short() == [slower]


def test_no_row_is_asked_for_more_than_half_of_the_speed_of_memory() -> None:
    """C4 4 KiB, lmdb: 14 times as fast as lmdb, which memcpy of as many bytes may not be where memory is slow."""
    slowest, told = 51 / (MEMORY_SHARE * MARGIN), "BELOW, memory alone takes 51 ns"
    for ours, memory, verdict, is_short in ((99.0, 49.0, "R", False), (119.0, 49.0, "BELOW", True),
                                            (99.0, 51.0, "R", False), (slowest - 1, 51.0, told, False),
                                            (slowest + 1, 51.0, told, True)):  # fmt: skip
        table = Table()
        line = table.add("C4", "4 KiB, lmdb", [ours], {"lmdb": [1400.0]}, [500.0, memory, 1.0])
        assert (line.verdict, bool(table.short())) == (verdict, is_short)


def test_a_share_of_memory_is_asked_for_by_medians_or_by_the_fastest_rounds() -> None:
    """Of the first most rounds of ours were slowed down; of the second memory had one quick round."""
    for ours, memory in (([100.0, 900.0, 900.0], [50.0, 101.0, 101.0]), ([200.0, 200.0, 200.0], [1.0, 101.0, 101.0])):
        table = Table()
        table.add("C4", "4 KiB, lmdb", ours, {"lmdb": [1400.0] * 3}, memory)
        assert table.short() == []


def test_of_two_runs_the_faster_counts_of_ours_and_of_the_anchor() -> None:
    """A second run whose anchor was slowed down proves nothing."""
    first, again = Table(), Table()
    for table, ours, theirs in ((first, 2.0, 1.0), (again, 1.0, 5.0)):
        table.add("C1", "100 B", [ours], {"memcpy": [theirs]})
        table.add("I1", "", [1.0], {"anchor": [theirs]})
        table.skip("C1", "not again")
    first.take_faster(again)
    found = [(line.name, line.ours, line.theirs, line.ratio) for line in first.chosen(["C1", "I1"])]
    assert found == [("I1", 1, 1, 1), ("C1 100 B", 1, 1, 1), ("C1 1 KiB", 0, 0, 0), ("C1 4 KiB", 0, 0, 0)]
    assert [line.fastest for line in first.chosen(["C1", "I1"])[:2]] == [1, 1]


def test_what_is_checked_needs_no_jvm() -> None:
    assert set(CHECKED) <= set(ROWS)
    assert [goal.row for goal in GOALS if goal.row in CHECKED and "selectPhyOffset" in goal.what] == []


def test_rounds_are_taken_in_turn_and_the_first_do_not_count() -> None:
    order: list[tuple[str, int]] = []

    def contender(name: str) -> Round:
        return lambda number: order.append((name, number)) or float(number)

    taken = interleaved({"a": contender("a"), "b": contender("b")}, rounds=2, warm=1)
    assert taken == {"a": [1, 2], "b": [1, 2]}
    assert order == [(name, number) for number in range(3) for name in "ab"]


def test_key_files_give_back_what_was_written(tmp_path: Path) -> None:
    mixed = keyfiles.write(tmp_path / "mixed", keyfiles.mixed_lines(1501, 1))
    lines = (tmp_path / "mixed").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(mixed) == len(lines) == len(set(lines)) == 1501
    assert mixed.text(0, 1501) == lines
    assert mixed.arrow(499, 3).to_pylist() == lines[499:502]
    assert not lines[1000].isascii()
    assert sorted({len(line) for line in lines[1:500]}) == [18, 32]


def test_sampled_keys_are_those_of_the_file(tmp_path: Path) -> None:
    keys = keyfiles.write(tmp_path / "random", keyfiles.random_lines(100, 1))
    chosen = keyfiles.sample(keys, tmp_path / "sample", 50, 2)
    assert set(chosen.text(0, 50)) < set(keys.text(0, 100))
    assert np.all([len(key) == keyfiles.WIDTH for key in chosen.text(0, 50)])
