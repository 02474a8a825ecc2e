"""A whole Spark application that reads a store as a stream into Parquet, to be killed: python streamer.py STORE OUT."""

from __future__ import annotations

import os
import sys

os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}

from pyspark.sql import SparkSession

store, out = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.ui.showConsoleProgress", "false")
    .config("spark.driver.memory", "512m")
    .config("spark.local.dir", os.environ["TMPDIR"])
    .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    .config("spark.sql.shuffle.partitions", "1")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("OFF")
stream = spark.readStream.format("rmq").option("subscribe", "orders").option("maxOffsetsPerTrigger", "100").load(store)
query = (stream.writeStream.format("parquet").option("path", f"{out}/data")
         .option("checkpointLocation", f"{out}/checkpoint").trigger(availableNow=True).start())  # fmt: skip
query.awaitTermination()
