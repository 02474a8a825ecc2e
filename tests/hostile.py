"""Topics that are no names of files, and a store that has them: no put takes them, a log may hold them."""

from __future__ import annotations

from pathlib import Path

import rmq

TOPICS = ["a/b", "/", "a=b", "%RETRY%group", "%2F", "..", ".", "üñ漢😀", "x" * 127, "a+b c", " ",
          "a._COPYING_", "_x", "%5F_HIVE", "007", "2026-11-21", "1.5", "null", "\x7f\x01", "a\nb", "~tilde~",
          "?*:{}[]^\"'#\\|<>&;$`"]  # fmt: skip


def make_hostile(path: Path) -> Path:
    """A message for each of TOPICS, whose UTF-8 is its body too."""
    config = rmq.StoreConfig(mapped_file_size_commit_log=65536, max_hash_slot_num=100, max_index_num=8000)
    names = [topic.encode() for topic in TOPICS]
    with rmq.open(path, "x", config=config, clock=lambda: 1_700_000_000_000) as store:
        placed = [store.put(rmq.Message("Q" * len(name), name)) for name in names]
    with open(path / "commitlog" / f"{0:020d}", "r+b") as segment:
        data = segment.read()
        for name, put in zip(names, placed, strict=True):  # the topic is the last of a record without properties
            segment.seek(data.rindex(b"Q" * len(name), put.phy_offset, put.phy_offset + put.size))
            segment.write(name)
    return path
