# SPDX-License-Identifier: Apache-2.0
"""Makes spark.read.format("rmq") work: Spark imports every module named pyspark_* and looks for DefaultSource.

An exception here would break every other Python data source of the session, so nothing may be raised.
"""

import contextlib

try:
    from rmq.spark.source import RmqDataSource as DefaultSource
except Exception as error:
    _reason = str(error)
    with contextlib.suppress(Exception):  # a PySpark that is too old, or none
        from pyspark.sql.datasource import DataSource

        from rmq.spark import NEEDS

        class DefaultSource(DataSource):  # type: ignore[no-redef]
            """Says why there is no data source `rmq` when one is asked for."""

            @classmethod
            def name(cls) -> str:
                return "rmq"

            def __init__(self, options: dict[str, str]) -> None:
                raise ImportError(f"{NEEDS}: {_reason}")
else:
    __all__ = ["DefaultSource"]
