"""The messages that the tests of Spark read."""

from __future__ import annotations

import rmq

TIME = 1_700_000_000_000
COUNT = 4000


def orders(count: int = COUNT, first: int = 0) -> list[rmq.Message]:
    return [rmq.Message("orders", b"body %d" % number, keys=[f"o-{number}", f"c-{number % 100}"], queue_id=number % 4,
                        tags="AB"[number % 2], uniq_key=f"{number:032X}", properties={"n": str(number)})
            for number in range(first, first + count)]  # fmt: skip
