# SPDX-License-Identifier: Apache-2.0
"""Makes spark.read.format("rmq") work: Spark imports every module named pyspark_* and looks for DefaultSource.

An exception here would break every other Python data source of the session, so nothing may be raised.
"""

try:
    from rmq.spark.source import RmqDataSource as DefaultSource
except Exception:
    pass
else:
    __all__ = ["DefaultSource"]
