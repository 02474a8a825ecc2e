# SPDX-License-Identifier: Apache-2.0
"""Stores on Spark: a table, a stream, and functions. Needs the extra `rmq[spark]`. docs/spark.md."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rmq.spark.functions import lookup_join, messages, offsets, register
    from rmq.spark.staging import clean_staging

__all__ = ["clean_staging", "lookup_join", "messages", "offsets", "register"]

NEEDS = "rmq.spark needs PySpark 4.1 or newer, pip install 'rmq[spark]'"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rmq.spark' has no attribute {name!r}")
    home = "staging" if name == "clean_staging" else "functions"
    try:
        return getattr(import_module(f"rmq.spark.{home}"), name)
    except ImportError as error:
        raise ImportError(f"{NEEDS}: {error}") from error
