# SPDX-License-Identifier: Apache-2.0
"""Stores on Spark: a table, a stream, and functions. Needs the extra `rmq[spark]`. docs/spark.md."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rmq.spark.bulk import bulk_load
    from rmq.spark.functions import messages, offsets, register
    from rmq.spark.jobs import export, rebuild, scan_map, verify
    from rmq.spark.joining import lookup_join
    from rmq.spark.staging import clean_staging

__all__ = ["bulk_load", "clean_staging", "export", "lookup_join", "messages", "offsets", "rebuild", "register",
           "scan_map", "verify"]  # fmt: skip
_HOMES = {"bulk_load": "bulk", "clean_staging": "staging", "export": "jobs", "lookup_join": "joining",
          "rebuild": "jobs", "scan_map": "jobs", "verify": "jobs"}  # the others: functions  # fmt: skip

NEEDS = "rmq.spark needs PySpark 4.1 or newer, pip install 'rmq[spark]'"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rmq.spark' has no attribute {name!r}")
    try:
        return getattr(import_module(f"rmq.spark.{_HOMES.get(name, 'functions')}"), name)
    except ImportError as error:
        raise ImportError(f"{NEEDS}: {error}") from error
