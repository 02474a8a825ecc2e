# SPDX-License-Identifier: Apache-2.0
"""Row C1 in a process of its own, whose instructions RMQ_CPU chooses: narrow_job.py PLACE SEED QUICK. Times as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from anchor import RocketMQ
from compiled import MODULES, compiled
from log_rows import beside_memcpy, filled
from records import RECORD_SIZES
from setting import Setting


def main(directory: str, seed: str, quick: str) -> None:
    place = Path(directory)
    with RocketMQ(place, wanted=False) as rocketmq:
        setting = Setting(("C1",), place, place, int(seed), quick == "True", rocketmq, compiled("floors", MODULES))
        found = {}
        for part in RECORD_SIZES:
            with filled(setting, part) as (records, log, source):
                found[part] = beside_memcpy(setting, records, log, source)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
