# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md from the figures of runs: python bench/report.py GOALS.json... Rules: README.md.

GOALS: runs of bench/run.py --json; the medians of their ratios are told, beside other machines' (earlier.json).
build/growth.json and build/latency.json are taken when they are there. The text around the figures is
bench/performance.md, pictures go to docs/performance/.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from goals import GOALS, Goal, ratio_text
from machine import ROOT

TEXT = ROOT / "bench" / "performance.md"
PAGE = ROOT / "docs" / "performance.md"
PICTURES = ROOT / "docs" / "performance"
EARLIER = json.loads((ROOT / "bench" / "earlier.json").read_text(encoding="utf-8"))
SLOT = re.compile(r"^<!-- (\w+) -->$", re.M)  # where figures go
SLOWEST = 3  # puts of each mode that are named
Run = dict[str, Any]


def machines(runs: list[Run]) -> str:
    """What every run of the table has in common, and what not."""
    names = dict.fromkeys(name for run in runs for name in run["about"])
    told = {name: dict.fromkeys(str(run["about"].get(name, "not told")) for run in runs) for name in names}
    return "Measured: " + ", ".join(f"{name} {' / '.join(texts)}" for name, texts in told.items()) + "."


def goals(runs: list[Run]) -> Iterator[str]:
    """One line for each goal: the ratios of all runs, their median and what it meets, and other machines' medians."""
    others = " | ".join(f"On {other['machine']}" for other in EARLIER)
    yield f"| Row | Ours / anchor | Ratio, median of {len(runs)} | Runs | R | M | Meets | {others} |"
    yield "|---|---|---|---|---|---|---|" + "---|" * len(EARLIER)
    for goal in GOALS:
        lines = [line for run in runs for line in run["rows"]
                 if (line["goal"]["row"], line["goal"]["part"]) == (goal.row, goal.part)]  # fmt: skip
        ratios = [line["ratio"] for line in lines if not line["why_not"]]
        name = f"{goal.row} {goal.part}".strip()
        limits = f"{goal.realistic:g} | {goal.moonshot:g}"
        elsewhere = [other["ratios"][name] for other in EARLIER]
        earlier = " | ".join(f"{ratio_text(ratio)}, {met(goal, ratio)}" for ratio in elsewhere)
        if not ratios:
            why = lines[0]["why_not"] if lines else "no run has it"
            yield f"| {name} | {goal.what} | | | {limits} | not run: {why} | {earlier} |"
            continue
        median = statistics.median(ratios)
        yield (f"| {name} | {goal.what} | **{ratio_text(median)}** | {', '.join(map(ratio_text, ratios))} | {limits} "
               f"| {met(goal, median)} | {earlier} |")  # fmt: skip


def met(goal: Goal, ratio: float) -> str:
    return "M" if ratio >= goal.moonshot else "R" if ratio >= goal.realistic else "**below R**"


def growth(run: Run) -> Iterator[str]:
    titles = {"batches": ("Messages of a `put_many`", "ns a message"), "keys": ("Keys of the index file", "ns a key"),
              "segments": ("Segments of 16 MiB", "ns a call, of `scan` a message")}  # fmt: skip
    for kind, (title, unit) in titles.items():
        names = list(next(iter(run[kind].values())))
        yield f"| {title} | {' | '.join(f'{name}, {unit}' for name in names)} |"
        yield "|---:|" + "---:|" * len(names)
        for size, row in run[kind].items():
            yield f"| {int(size):,} | {' | '.join(f'{row[name]:,.0f}' for name in names)} |"
        yield ""


def latency(run: Run) -> Iterator[str]:
    names = [f"{name}_us" for name in ("p50", "p99", "p99_9", "worst")]
    yield "| Mode | Puts | p50, us | p99, us | p99.9, us | worst, us |"
    yield "|---|---:|---:|---:|---:|---:|"
    for mode in run["modes"]:
        yield f"| {mode['name']} | {mode['puts']:,} | {' | '.join(f'{mode[name]:,.1f}' for name in names)} |"
    yield ""
    for mode in run["modes"]:
        yield from (f"* {mode['name']}, put {one['put']:,}: {one['us']:,.0f} us ({one['during']})"
                    for one in mode["worst"][:SLOWEST])  # fmt: skip


def draw(name: str, xs: list[float], lines: dict[str, list[float]], x_label: str, y_label: str,
         is_log: bool = False) -> str:  # fmt: skip
    """A picture of docs/performance, and the line that shows it. The same figures give the same bytes."""
    import matplotlib as mpl
    from matplotlib import pyplot

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "rmq", "svg.fonttype": "none", "axes.spines.top": False,
                         "axes.spines.right": False})  # fmt: skip
    figure, axes = pyplot.subplots(figsize=(6.4, 3.2))
    for label, ys in lines.items():
        axes.plot(xs, ys, marker="o", label=label)
    axes.set(xlabel=x_label, ylabel=y_label, xscale="log", yscale="log" if is_log else "linear")
    if not is_log:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None}, transparent=False)
    pyplot.close(figure)
    return f"![{y_label} by {x_label}](performance/{name}.svg)"


def growth_pictures(run: Run) -> Iterator[str]:
    for kind, x_label, names, y_label, scale in (
            ("batches", "messages of a put_many", ("put_many",), "thousand messages a second", 1e6),
            ("keys", "keys of the index file", ("present", "absent"), "ns a key", 0),
            ("segments", "segments of the store", ("open", "query"), "us a call", 0)):  # fmt: skip
        rows = run[kind]
        lines = {name: [scale / row[name] if scale else row[name] / (1000 if kind == "segments" else 1)
                        for row in rows.values()] for name in names}  # fmt: skip
        yield draw(kind, [float(size) for size in rows], lines, x_label, y_label)
        yield ""


def latency_picture(run: Run) -> Iterator[str]:
    """One put of so many takes longer than the line says."""
    of = {"p50_us": 2.0, "p99_us": 100.0, "p99_9_us": 1000.0}
    lines = {mode["name"]: [mode[name] for name in of] for mode in run["modes"]}
    yield draw("latency", list(of.values()), lines, "one put of so many takes longer", "us", is_log=True)


def page(runs: list[Run], grown: Run | None, late: Run | None) -> str:
    missing = "Not measured yet: `make {}`, then `make performance-page`."
    slots = {
        "machines": [machines(runs)] if runs else [missing.format("bench")],
        "goals": list(goals(runs)) if runs else [],
        "growth": [*growth(grown), *growth_pictures(grown)] if grown else [missing.format("bench-growth")],
        "latency": [*latency(late), "", *latency_picture(late)] if late else [missing.format("bench-latency")],
    }
    return SLOT.sub(lambda slot: "\n".join(slots[slot[1]]).strip(), TEXT.read_text(encoding="utf-8"))


def read(path: Path) -> Run | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/performance.md.")
    parser.add_argument("goals", type=Path, nargs="*", help="runs of bench/run.py --json")
    parser.add_argument("--growth", type=Path, default=ROOT / "build" / "growth.json")
    parser.add_argument("--latency", type=Path, default=ROOT / "build" / "latency.json")
    options = parser.parse_args()
    runs = [run for path in options.goals if (run := read(path))]
    PAGE.write_text(page(runs, read(options.growth), read(options.latency)), encoding="utf-8")


if __name__ == "__main__":
    main()
