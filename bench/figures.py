# SPDX-License-Identifier: Apache-2.0
"""The figures of README.md from a run's JSON: python bench/figures.py build/bench.json"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def short(nanos: float) -> str:
    """Three digits of ns, us or ms."""
    for unit, size in (("ms", 1e6), ("us", 1e3), ("ns", 1.0)):
        if nanos >= size:
            return f"{nanos / size:.3g} {unit}"
    return f"{nanos:.2g} ns"


def peer_text(name: str, peer: dict[str, Any]) -> str:
    if "not_measured" in peer:
        return f"{name}: not measured, {peer['not_measured']}"
    return f"{name} {short(peer['ns_per_item']['median'])} **{peer['ratio']:.3g}x**"


def lines(run: dict[str, Any]) -> Iterator[str]:
    yield ", ".join(f"{name} {text}" for name, text in run["machine_info"]["rmq"].items())
    yield ""
    yield "| Benchmark | Mode | Ours | Peers, and how many times ours is faster |"
    yield "|---|---|---|---|"
    for benchmark in sorted(run["benchmarks"], key=lambda one: (one["extra_info"]["durability"], one["name"])):
        info, name = benchmark["extra_info"], benchmark["name"].removeprefix("test_")
        if "peak_mb" in info:
            yield (f"| {name} | | {info['peak_mb']} MB on a store of {info['store_mb']} MB | "
                   f"{info['peak_mb_of_10x']} MB on one of {info['store_mb_of_10x']} MB |")  # fmt: skip
            continue
        peers = "; ".join(peer_text(*item) for item in info["peers"].items())
        yield f"| {name} | {info['durability']} | {short(info['ns_per_item']['median'])} | {peers or 'no peer'} |"


if __name__ == "__main__":
    print("\n".join(lines(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
