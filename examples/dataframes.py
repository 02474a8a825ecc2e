# SPDX-License-Identifier: Apache-2.0
"""From a store to pandas, Polars and DuckDB, cell by cell: each reads the log as an Arrow stream.

What one learns: a Store has __arrow_c_stream__, so what reads Arrow takes the store itself as a table, with a column
for each field of a message; store.scan(columns=..., topics=..., begin=...) is the same for a part of it. Columns go
over, not messages one by one. The three answer one question; exit code 1 when the answers differ.
Run `python examples/dataframes.py`, or open it in an editor that knows `# %%` cells. Needs pandas, polars, duckdb.
"""

# %% A store: 1,000 orders in four queues, one a minute, the body as JSON
import itertools
import json
import sys
import tempfile
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa

import rmq

directory = tempfile.TemporaryDirectory()
path = Path(directory.name) / "store"
with rmq.open(path, "x", clock=itertools.count(1_700_000_000_000, 60_000).__next__) as writer:
    for number in range(1000):
        body = json.dumps({"order": number, "cents": number * 7 % 1000}).encode()
        tags = "open" if number % 3 == 0 else "paid"
        writer.put(rmq.Message("orders", body, keys=f"o-{number}", tags=tags, queue_id=number % 4))

# %% Open it to read, as one opens a broker's: nothing is locked or changed
store = rmq.open(path)
table = pa.table(store)
print(f"{table.num_rows} messages with the columns {', '.join(table.column_names)}")

# %% pandas: by way of pyarrow, as pandas 2 itself takes no Arrow stream
frame = pa.table(store.scan(columns=["tags", "store_timestamp", "body"])).to_pandas()
frame["cents"] = [json.loads(body)["cents"] for body in frame.pop("body")]
by_pandas = frame.groupby("tags").agg(orders=("cents", "size"), cents=("cents", "sum"))
print("\npandas", by_pandas, sep="\n")

# %% Timestamps arrive as pandas' own, in UTC
by_time = frame.resample("4h", on="store_timestamp")["cents"].sum()
print("\npandas, every four hours", by_time.to_string(), sep="\n")

# %% Polars: takes a stream as it is; here it also reads the JSON
fields = pl.Struct({"order": pl.Int64, "cents": pl.Int64})
bodies = pl.DataFrame(store.scan(columns=["tags", "body"])).with_columns(
    pl.col("body").cast(pl.String).str.json_decode(fields)
)
by_polars = bodies.unnest("body").group_by("tags").agg(pl.len().alias("orders"), pl.sum("cents")).sort("tags")
print("\nPolars", by_polars, sep="\n")

# %% DuckDB: finds the variable `store`; fetched once, as DuckDB 1 asks it for one stream only
by_duckdb = duckdb.sql("""
    SELECT tags, count(*) AS orders, sum((decode(body) ->> 'cents')::BIGINT)::BIGINT AS cents
    FROM store GROUP BY tags ORDER BY tags
""").fetchall()
print("\nDuckDB", *by_duckdb, sep="\n")

# %% One question, one answer
if not by_duckdb == by_polars.rows() == list(by_pandas.itertuples(name=None)):
    sys.exit("the answers differ")
print("The three answers are the same.")
store.close()
directory.cleanup()
