# SPDX-License-Identifier: Apache-2.0
"""A store on an object store as it was listed: which files it has, and what the small ones hold."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rmq.geometry import KEPT
from rmq.marks import FORMAT
from rmq.objects import Listed, Location, Objects, ObjectStoreError
from rmq.paths import SEGMENT_NAME
from rmq.store import Store

Part = Literal["log", "queues", "index"]
FILES: dict[Part, re.Pattern[str]] = {
    "log": re.compile(r"commitlog/[^/]+"),
    "queues": re.compile(r"(batch)?consumequeue/[^/]+/\d{1,10}/\d{20}", re.ASCII),
    "index": re.compile(r"index/\d{17}", re.ASCII),
}
SMALL = re.compile(r"checkpoint|epochFileCheckpoint|abort(\.bak)?|"
                   r"config/topics\.json(\.bak)?|"
                   r"rmq/(owner|meta\.json|marks|manifest\.json|spark/commits/[^/]+\.(json|intent))")
# Files whose names tell of other formats.
SIGN = re.compile(r"(consumequeue|index|dledger-|tiered)[^/]*/[^/]+|dledger-[^/]+/data/[^/]+|timerwheel|"
                  r"rocksdbstore/[^/]+")
META, MANIFEST = "rmq/meta.json", "rmq/manifest.json"


@dataclass(frozen=True)
class Snapshot:
    """A store elsewhere as it was listed. Picklable: whoever opens it sees the same one, or ObjectChangedError.

    parts: what of it is there. small: contents of its small files. end: of its log, when somebody has looked.
    """

    location: Location
    files: tuple[Listed, ...]
    small: tuple[tuple[str, bytes], ...]
    signs: tuple[str, ...] = ()
    parts: frozenset[Part] = frozenset(FILES)
    end: int | None = None

    @classmethod
    def take(cls, location: Location) -> Snapshot:
        """List a store. Raises ObjectStoreError. Cost: a request for 1,000 objects, two for each small one."""
        objects = Objects(location)
        try:
            listed = [item for item in objects.listing() if _is_plain(item.name)]
            files = tuple(item for item in listed if any(form.fullmatch(item.name) for form in FILES.values()))
            few = [item for item in listed if SMALL.fullmatch(item.name)]
            small = tuple(zip((item.name for item in few), objects.read_all(few), strict=True))
            shown = {item.name for item in files}
            signs = tuple(item.name for item in listed if item.name not in shown and SIGN.fullmatch(item.name))
            return cls(location, files, small, signs)
        finally:
            objects.close()

    @property
    def is_store(self) -> bool:
        return any(FILES["log"].fullmatch(item.name) for item in self.files)

    def require_store(self) -> Snapshot:
        """Itself; ObjectStoreError when no store was listed. Of a range of a known log all segments may be gone."""
        if not self.is_store and not self.signs and self.end is None:
            raise ObjectStoreError(self.location.uri, "no message store: there is no object below commitlog/")
        return self

    def of(self, *parts: Part, end: int | None = None) -> Snapshot:
        """The log and these parts of it."""
        kept = frozenset({"log", *parts})
        return dataclasses.replace(self, files=self._files(kept), parts=kept, end=end)

    def _files(self, parts: Iterable[Part]) -> tuple[Listed, ...]:
        return tuple(item for item in self.files if any(FILES[part].fullmatch(item.name) for part in parts))

    def range(self, begin: int, end: int, store: Store) -> Snapshot:
        """The segments that hold a range of the log of a store that was opened from it, and nothing else.

        The one behind them too, by which a reader knows that a blank record in front of it closes its segment.
        """
        size = store.config.mapped_file_size_commit_log
        named = ((item, Path(item.name).name) for item in self._files(["log"]))
        inside = tuple(item for item, name in named
                       if SEGMENT_NAME.fullmatch(name) and begin - size < int(name) <= end)  # fmt: skip
        small = dict(self.small)
        kept = {name: getattr(store.config, name) for name in KEPT}
        meta = small.get(META) or json.dumps({"format": FORMAT, "origin": "rocketmq", **kept}).encode()
        return Snapshot(self.location, inside, ((META, meta),), (), frozenset({"log"}), store.max_phy_offset)


def _is_plain(name: str) -> bool:
    """Whether a name stays below the root."""
    return "\0" not in name and all(part not in ("", ".", "..") and len(os.fsencode(part)) < 256
                                    for part in name.split("/"))  # fmt: skip
