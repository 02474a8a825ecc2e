# SPDX-License-Identifier: Apache-2.0
"""Arrow data that is put: its values without pyarrow's own conversions, which would import pandas; kinds of arrays and
tables; errors between two tables."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rmq
from rmq.arrays import flags, integers, text_scalar

CONFIG = rmq.StoreConfig(mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20_000,
                         max_hash_slot_num=100, max_index_num=1000)  # fmt: skip
COUNTS = (0, 1, 7, 8, 9, 63, 64, 65)


@pytest.mark.parametrize("begin", [0, 1, 7, 8, 9])
@pytest.mark.parametrize("count", COUNTS)
def test_flags_of_any_slice(begin: int, count: int) -> None:
    values = [number % 3 == 0 for number in range(begin + count + 5)]
    got = flags(pa.array(values).slice(begin, count))
    assert got.tolist() == values[begin : begin + count]
    assert got.dtype == bool


@pytest.mark.parametrize("kind", [pa.int8(), pa.int16(), pa.int32(), pa.int64()])
@pytest.mark.parametrize("count", COUNTS)
def test_integers_of_any_slice(kind: pa.DataType, count: int) -> None:
    values = list(range(-3, count + 2))
    got = integers(pa.array(values, kind).slice(3, count))
    assert got.tolist() == values[3 : 3 + count]
    assert got.itemsize * 8 == kind.bit_width


def test_arrays_without_values() -> None:
    assert flags(pa.array([], pa.bool_())).tolist() == []
    assert integers(pa.array([], pa.int32())).tolist() == []


@pytest.mark.parametrize("text", ["", "a", "é😀" * 20, "\x00"])
def test_a_scalar_is_its_text(text: str) -> None:
    assert text_scalar(text).equals(pa.scalar(text, pa.large_string()))


# ---- what is put -----------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[rmq.Store]:
    with rmq.open(tmp_path / "store", "x", config=CONFIG) as store:
        yield store


@pytest.mark.parametrize("lists", [
    [["a"], ["b"], ["c"]], [["a"], [], ["b", "c"]], [["a"], None, ["c"]], [["a", "b"], ["c"], []], [[], [], []],
])  # fmt: skip
@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.large_list(pa.large_string())])
def test_keys_in_lists_of_any_length_are_the_keys(
        store: rmq.Store, lists: list[list[str] | None], kind: pa.DataType) -> None:  # fmt: skip
    for keys in (pa.array(lists, kind), pa.array([["z"], *lists, ["z"]], kind).slice(1, 3)):
        (first, *_) = store.put_many(pa.table({"body": [b"x"] * 3, "keys": keys}), topic="T").queue_offset
        messages = store.pull("T", 0, int(first)).messages
        assert [list(message.keys) for message in messages] == [row or [] for row in lists]


@pytest.mark.parametrize(("lists", "why"), [
    ([["a"], [None]], "row 1: keys hold a null"), ([["a"], [""]], "row 1: a key is empty"),
    ([["a b"], ["c"]], "row 0: a key is empty or holds a space"), ([["a"], ["\1"]], "row 1: a key holds 0x01"),
    ([["a", None], ["b"]], "row 0: keys hold a null"),
])  # fmt: skip
def test_keys_in_lists_are_checked(store: rmq.Store, lists: list[list[str | None]], why: str) -> None:
    with pytest.raises(rmq.IllegalMessageError, match=why):
        store.put_many(pa.table({"body": [b"x"] * 2, "keys": pa.array(lists, pa.list_(pa.string()))}), topic="T")
    assert store.max_phy_offset == 0


def column(store: rmq.Store, name: str) -> list[Any]:
    return store.scan(columns=[name]).read_all()[name].to_pylist()


def of_views(values: pa.Array, indices: list[int | None]) -> pa.DictionaryArray:
    """As Polars has its categories."""
    views = values.cast(pa.string_view() if pa.types.is_string(values.type) else pa.binary_view())
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.uint32()), views)


@pytest.mark.parametrize("begin", [0, 1])
def test_dictionaries_of_views_are_text_and_bodies(store: rmq.Store, begin: int) -> None:
    texts = of_views(pa.array(["a", None, "T"]), [2, 0, None, 1])
    bodies = of_views(pa.array([b"x", b"y"]), [0, 1, 1, 0])
    table = pa.table({"body": bodies, "tags": texts, "keys": texts, "topic": of_views(pa.array(["T"]), [0] * 4)})
    assert store.put_many(table.slice(begin), results=False) == 4 - begin
    assert column(store, "body") == [b"x", b"y", b"y", b"x"][begin:]
    assert column(store, "tags") == ["T", "a", None, None][begin:]
    assert column(store, "keys") == [["T"], ["a"], [], []][begin:]


@pytest.mark.parametrize("is_own_first", [True, False])
def test_each_table_s_own_metadata_says_whether_its_bodies_are_plain(store: rmq.Store, is_own_first: bool) -> None:
    packed = zlib.compress(b"plain")
    store.put(rmq.Message("T", packed, sys_flag=1))
    scanned = store.scan(columns=["topic", "sys_flag", "body"]).read_all()
    own = scanned.set_column(2, "body", [[packed]]).replace_schema_metadata(None)
    assert own.schema == scanned.schema
    store.put_many([own, scanned] if is_own_first else [scanned, own])
    assert column(store, "body") == [b"plain"] * 3


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_time_before_1970_is_the_ms_that_had_begun(store: rmq.Store, unit: str) -> None:
    per_s = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    times = [-per_s - 1, -per_s, -1, 0, 1]
    born = pa.array(times, pa.timestamp(unit, "UTC"))
    store.put_many(pa.table({"body": [b""] * 5, "born_timestamp": born}), topic="T")
    stored = store.scan(columns=["born_timestamp"]).read_all()["born_timestamp"].cast(pa.int64()).to_pylist()
    assert stored == [time * 1000 // per_s for time in times]


def test_the_index_of_a_filtered_pandas_frame_is_no_column(store: rmq.Store) -> None:
    frame = pytest.importorskip("pandas").DataFrame({"body": [b"a", b"b", b"c"]})
    filtered = frame[frame.body != b"b"]
    assert "__index_level_0__" in pa.table(filtered).column_names
    assert store.put_many(filtered, topic="T", results=False) == 2
    assert column(store, "body") == [b"a", b"c"]
    with pytest.raises(ValueError, match="'number' is no message field"):
        store.put_many(filtered.rename_axis("number"), topic="T")


def test_what_scan_gave_is_put_again_by_way_of_pandas(store: rmq.Store) -> None:
    """pandas makes lists of pairs of maps."""
    store.put_many([rmq.Message("T", b"1", keys="k", properties={"a": "1", "b": "2"}), rmq.Message("T", b"2"),
                    rmq.Message("T", b"3", properties={"z": "9"})])  # fmt: skip
    frame = store.scan().read_all().to_pandas().drop(columns="sys_flag")
    assert pa.table(frame).schema.field("properties").type == pa.list_(pa.list_(pa.string()))
    assert store.put_many(frame, results=False) + store.put_many(frame[1:], results=False) == 5
    first, *others = column(store, "raw_properties")
    assert others == [b"", b"z\0019\2", first, b"", b"z\0019\2", b"", b"z\0019\2"]


@pytest.mark.parametrize("pairs", [[[["a"]]], [[["a", "b", "c"]]], [[["a", "b"], None]], [[[1, 2]]]])
def test_properties_that_are_no_pairs_of_text_are_refused(store: rmq.Store, pairs: Any) -> None:
    with pytest.raises(TypeError, match="column 'properties' must be "):
        store.put_many(pa.table({"topic": ["T"], "body": ["1"], "properties": pairs}))
    assert column(store, "body") == []


def test_properties_of_no_type_are_none(store: rmq.Store) -> None:
    store.put_many(pa.table({"topic": ["T"], "body": ["1"], "properties": pa.nulls(1)}))
    store.put_many(pa.table({"topic": ["T", "T"], "body": ["1", "2"], "properties": [None, []]}))
    assert column(store, "raw_properties") == [b""] * 3
    with pytest.raises(TypeError, match="column 'properties'"):
        store.put_many(pa.table({"topic": ["T"], "body": ["1"], "properties": [[None]]}))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_words_of_a_dictionary_may_be_views(store: rmq.Store, kind: pa.DataType) -> None:
    topics = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1]), pa.array(["T", "U"], kind))
    store.put_many(pa.table({"topic": topics, "body": ["1", "2", "3"]}))
    assert column(store, "topic") == ["U", "T", "U"]


def test_a_null_among_the_words_of_a_dictionary_of_raw_properties_is_one(store: rmq.Store) -> None:
    raw = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array([b"x\1y\2", None], pa.binary()))
    with pytest.raises(rmq.IllegalMessageError, match="raw_properties is null and tags is not"):
        store.put_many(pa.table({"body": ["1", "2"], "raw_properties": raw, "tags": ["t", "lost"]}), topic="T")


@pytest.mark.parametrize(("field", "values"), [
    ("keys", ["k1", "k2"]), ("keys", [[], ["k2"]]), ("tags", ["t", ""]), ("uniq_key", [None, "u"]),
    ("tags", pa.array([None, "t"], pa.string_view())), ("properties", [None, [["a", "b"]]]),
    ("properties", pa.array([[], [("a", "b")]], pa.map_(pa.string(), pa.string()))),
])  # fmt: skip
def test_a_row_without_raw_properties_loses_nothing_that_stands_beside_it(store: rmq.Store, field: str,
                                                                          values: Any) -> None:  # fmt: skip
    raw = pa.array([b"x\1y\2", None], pa.binary())
    table = pa.table({"topic": ["T", "T"], "body": ["1", "2"], "raw_properties": raw, field: values})
    with pytest.raises(rmq.IllegalMessageError, match=f"raw_properties is null and {field} is not") as caught:
        store.put_many(table)
    assert (caught.value.row, column(store, "body")) == (1, [])
    store.put_many(table[:1])
    store.put_many(table.drop_columns(field))
    assert column(store, "raw_properties") == [b"x\1y\2", b"x\1y\2", b""]


STRUCTS = pa.StructArray.from_arrays([pa.array([b"a", b"b", b"c"]), pa.array(["x", "y", "z"])], ["body", "keys"])


@pytest.mark.parametrize("structs", [STRUCTS[1:], pa.chunked_array([STRUCTS[1:2], STRUCTS[2:]])])
def test_slices_of_structs_are_tables(store: rmq.Store, structs: Any) -> None:
    assert store.put_many(structs, topic="T", results=False) == 2
    assert store.put_many([structs, structs], topic="T", results=False) == 4
    assert column(store, "body") == [b"b", b"c"] * 3
    assert column(store, "keys") == [["y"], ["z"]] * 3


def test_a_struct_that_is_null_is_a_row_without_a_body(store: rmq.Store) -> None:
    fields = [STRUCTS.field(0), STRUCTS.field(1)]
    masked = pa.StructArray.from_arrays(fields, ["body", "keys"], mask=pa.array([False, False, True]))
    with pytest.raises(rmq.IllegalMessageError, match="row 1: body is null"):
        store.put_many(masked[1:], topic="T")


# ---- items that no row shows ---------------------------------------------------------------------------------------

KEY_LISTS = pa.array([["a"], ["b", "c"], ["d"]])
KEYS_AS = {"list": KEY_LISTS, "large list": KEY_LISTS.cast(pa.large_list(pa.large_string())),
           "list of views": KEY_LISTS.cast(pa.list_(pa.string_view())),  # as of Polars, after a join
           "large list of views": KEY_LISTS.cast(pa.large_list(pa.string_view()))}  # fmt: skip


def hidden(column: pa.Array, row: int) -> pa.Array:
    """The column with that row null, its items still there."""
    valid = pa.array([number != row for number in range(len(column))])
    buffers = column.buffers()
    children = [column.values if not pa.types.is_map(column.type) else
                pa.StructArray.from_arrays([column.keys, column.items], fields=[column.type.key_field,
                                                                                column.type.item_field])]  # fmt: skip
    return pa.Array.from_buffers(column.type, len(column), [valid.buffers()[1], buffers[1]], children=children)


@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("kind", KEYS_AS)
def test_a_null_list_with_items_beneath_it_has_no_keys(store: rmq.Store, kind: str, row: int, begin: int) -> None:
    keys = hidden(KEYS_AS[kind], row)
    wanted = [["a"], ["b", "c"], ["d"]]
    wanted[row] = []
    store.put_many(pa.table({"body": [b""] * 3, "keys": keys}).slice(begin), topic="T")
    assert column(store, "keys") == wanted[begin:]


@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("text", [pa.string(), pa.string_view()], ids=str)
def test_a_null_map_with_items_beneath_it_has_no_properties(store: rmq.Store, text: pa.DataType, row: int,
                                                            begin: int) -> None:  # fmt: skip
    wanted = [[("p", "1")], [("q", "2"), ("r", "3")], [("s", "4")]]
    maps = hidden(pa.array(wanted, pa.map_(pa.string(), pa.string())).cast(pa.map_(text, text)), row)
    wanted[row] = []
    store.put_many(pa.table({"body": [b""] * 3, "properties": maps}).slice(begin), topic="T")
    assert column(store, "properties") == wanted[begin:]


@pytest.mark.parametrize("begin", [0, 1, 4])
@pytest.mark.parametrize("null", [None, 0, 1, 2])
def test_entries_of_a_map_may_be_a_slice(store: rmq.Store, null: int | None, begin: int) -> None:
    wanted = [[("p", "1")], [("q", "2"), ("r", "3")], [], [("s", "4")]]
    maps = pa.array([[("a", "5"), ("b", "6")], *wanted], pa.map_(pa.string(), pa.string()))
    valid = pa.array([number != null for number in range(4)]).buffers()[1]
    starts = pa.array([0, 1, 3, 3, 4], pa.int32()).buffers()[1]
    maps = pa.Array.from_buffers(maps.type, 4, [valid, starts], children=[maps.values.slice(2)])
    store.put_many(pa.table({"body": [b""] * 4, "properties": maps}).slice(begin), topic="T")
    assert column(store, "properties") == [[] if row == null else wanted[row] for row in range(begin, 4)]


def test_keys_of_a_null_struct_are_no_other_row_s(store: rmq.Store) -> None:
    structs = pa.StructArray.from_arrays([KEY_LISTS, pa.array(["x", "y", "z"])], ["keys", "tags"],
                                         mask=pa.array([True, False, False]))  # fmt: skip
    keys, tags = structs.flatten()
    store.put_many(pa.table({"body": [b""] * 3, "keys": keys, "tags": tags}), topic="T")
    assert column(store, "keys") == [[], ["b", "c"], ["d"]]
    assert column(store, "tags") == [None, "y", "z"]


def test_lists_of_views_beside_raw_properties_that_are_null_are_looked_at(store: rmq.Store) -> None:
    keys = hidden(KEYS_AS["list of views"], 1)
    table = pa.table({"body": [b""] * 3, "keys": keys, "raw_properties": [b"", None, b""]})
    assert store.put_many(table, topic="T", results=False) == 3
    with pytest.raises(rmq.IllegalMessageError, match="row 0: raw_properties is null and keys is not"):
        store.put_many(table.set_column(2, "raw_properties", pa.array([None, None, b""])), topic="T")


class Patched:
    """A batch as another library hands it over, one of its arrays changed."""

    def __init__(self, batch: pa.RecordBatch, change: Callable[[Any], None]) -> None:
        self._batch, self._change = batch, change

    def __arrow_c_array__(self, requested_schema: object = None) -> Any:
        schema, array = self._batch.__arrow_c_array__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        children = (ctypes.c_int64 * 7).from_address(pointer(array, b"arrow_array"))[6]
        self._change(ctypes.cast(children, ctypes.POINTER(ctypes.POINTER(ctypes.c_int64))))
        return schema, array


@pytest.mark.parametrize("kind", [pa.timestamp("ms", "UTC"), pa.timestamp("s", "UTC"), pa.timestamp("ns", "UTC"),
                                  pa.int64(), pa.uint32(), pa.null()])  # fmt: skip
@pytest.mark.parametrize("constant", ["T", None])
def test_a_null_born_timestamp_is_the_time_of_the_put(store: rmq.Store, kind: pa.DataType,
                                                      constant: str | None) -> None:  # fmt: skip
    """As born_timestamp=None of a Message; also of a sliced column, and of one whose values are all null."""
    born = [None, 3000, None, 5000] if kind != pa.null() else [None] * 4
    ticks = {pa.timestamp("s", "UTC"): 1000, pa.timestamp("ns", "UTC"): 1 / 10**6}.get(kind, 1)
    column = pa.array([None if ms is None else int(ms / ticks) for ms in [7000, *born]], pa.int64()).cast(kind) \
        if kind != pa.null() else pa.nulls(5)  # fmt: skip
    table = pa.table({"body": list("xabcd"), "born_timestamp": column})
    if constant is None:
        table = table.append_column("topic", pa.array(["T"] * 5))
    store.put_many(table.slice(1), topic=constant)
    found = store.pull("T").messages
    assert [message.born_timestamp for message in found] == [
        message.store_timestamp if ms is None else ms for ms, message in zip(born, found, strict=True)]  # fmt: skip
    assert found[0].store_timestamp > 5000


@pytest.mark.parametrize("length", [0, 1, 4])
@pytest.mark.parametrize("name", ["topic", "body", "keys", "born_host", "flag"])
def test_a_column_that_is_shorter_than_its_table_is_refused(store: rmq.Store, name: str, length: int) -> None:
    columns = {"topic": ["a", "b", "c", "d", "e"], "body": [b"0"] * 5, "keys": [["k"]] * 5,
               "born_host": ["1.2.3.4:5"] * 5, "flag": [1] * 5}  # fmt: skip
    place = [*columns].index(name)

    def shorten(children: Any) -> None:
        children[place][0] = length

    with pytest.raises(ValueError, match=f"column '{name}' has {length} rows, the table 5"):
        store.put_many(Patched(pa.RecordBatch.from_pydict(columns), shorten))
    assert store.max_phy_offset == 0


@pytest.mark.parametrize("has_null", [False, True])
@pytest.mark.parametrize(("name", "begin", "length"), [
    *[(name, 0, length) for name in ("properties", "keys") for length in (0, 1, 4)],
    *[("properties", 9, length) for length in (6, 9, 13)]])  # fmt: skip
def test_lists_of_fewer_items_than_their_offsets_tell_are_refused(store: rmq.Store, name: str, begin: int,
                                                                  length: int, has_null: bool) -> None:  # fmt: skip
    """Of a map its values; also where a null row has items, which Arrow itself would copy unseen."""
    kinds = {"keys": pa.list_(pa.string()), "properties": pa.map_(pa.string(), pa.string())}
    column = pa.array([["a"] if name == "keys" else [("a", "1")]] * (begin + 5), kinds[name])
    column = hidden(column, 0) if has_null else column
    column = pa.Array.from_buffers(column.type, 5, column.buffers()[:2], children=[column.values.slice(begin)])

    def shorten(children: Any) -> None:
        below = ctypes.POINTER(ctypes.POINTER(ctypes.c_int64))
        items = ctypes.cast(children[1][6], below)[0]
        (items if name == "keys" else ctypes.cast(items[6], below)[1])[0] = length

    table = pa.RecordBatch.from_pydict({"body": [b"0"] * 5, name: column})
    with pytest.raises(ValueError, match="list offsets lie outside the items"):
        store.put_many(Patched(table, shorten), topic="T")
    assert store.max_phy_offset == 0


def test_lists_of_one_size_are_keys(store: rmq.Store) -> None:
    keys = pa.array([["a", "b"], None, ["c", "d"]], pa.list_(pa.string(), 2))
    store.put_many([pa.table({"body": [b""] * 3, "keys": keys}).slice(begin) for begin in (0, 1)], topic="T")
    assert column(store, "keys") == [["a", "b"], [], ["c", "d"], [], ["c", "d"]]


# ---- errors between two tables ---------------------------------------------------------------------------------------


class Sealed(Exception):
    stored = property()


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("error", [KeyError(), RuntimeError(), pa.ArrowNotImplementedError(), rmq.StoreClosedError()])
def test_an_error_of_the_caller_s_tells_what_was_stored(store: rmq.Store, before: int, error: Exception) -> None:
    def tables() -> Iterator[pa.Table]:
        yield from [pa.table({"body": ["a", "b"]})] * before
        raise error

    with pytest.raises(type(error)) as caught:
        store.put_many(tables(), topic="T")
    assert caught.value is error
    assert error.stored == 2 * before  # type: ignore[attr-defined]


def test_an_error_that_takes_no_attribute_is_raised_as_it_is(store: rmq.Store) -> None:
    def tables() -> Iterator[pa.Table]:
        yield pa.table({"body": ["a"]})
        raise Sealed("the caller's own")

    with pytest.raises(Sealed, match="the caller's own"):
        store.put_many(tables(), topic="T")


def test_a_store_that_is_closed_half_way_tells_what_was_stored(store: rmq.Store) -> None:
    def tables() -> Iterator[pa.Table]:
        yield pa.table({"body": ["a", "b"]})
        store.close()
        yield pa.table({"body": ["c"]})

    for stored in (2, 0):
        with pytest.raises(rmq.StoreClosedError) as caught:
            store.put_many(tables(), topic="T")
        assert caught.value.stored == stored  # type: ignore[attr-defined]


def test_a_message_that_the_caller_could_not_make_is_of_no_row(store: rmq.Store) -> None:
    with pytest.raises(rmq.IllegalMessageError) as caught:
        store.put_many(rmq.Message(topic, b"") for topic in ["T"] * 8193 + ["a/b"])
    assert (caught.value.row, caught.value.stored) == (None, 8192)
    assert not str(caught.value).startswith("row")


def test_a_column_that_cannot_be_taken_says_why(tmp_path: Path) -> None:
    views = pa.array([["a"]], pa.list_view(pa.string()))
    with rmq.open(tmp_path / "s", "x") as store:
        with pytest.raises(TypeError, match="'keys' must be string or list of string, got list_view"):
            store.put_many(pa.table({"body": ["b"], "keys": views}), topic="T")
        with pytest.raises(ValueError, match="'keys' stands beside the one that columns= names"):
            store.put_many(pa.table({"body": ["b"], "keys": ["k"], "id": ["k"]}), topic="T", columns={"keys": "id"})


# ---- properties and their own columns ------------------------------------------------------------------------


def with_properties(**columns: Any) -> pa.Table:
    fields = {name: pa.array([value]) for name, value in columns.items() if name != "properties"}
    properties = pa.array([list(columns["properties"].items())], pa.map_(pa.string(), pa.string()))
    return pa.table({"body": [b"x"], **fields, "properties": properties})


@pytest.mark.parametrize(("field", "value", "properties"), [
    ("tags", "a", {"TAGS": "b"}), ("tags", "", {"TAGS": "b"}), ("tags", "a", {"x": "1", "TAGS": ""}),
    ("uniq_key", "u", {"UNIQ_KEY": "v"}), ("keys", "a", {"KEYS": "a b"}), ("keys", ["a", "b"], {"KEYS": "a"}),
    ("keys", ["a", "b"], {"KEYS": "b a"}),
])  # fmt: skip
def test_a_property_that_contradicts_its_column_is_refused(
    tmp_path: Path, field: str, value: Any, properties: dict[str, str]
) -> None:
    with rmq.open(tmp_path / "s", "x") as store:
        with pytest.raises(rmq.IllegalMessageError, match="contradicts") as refused:
            store.put_many(with_properties(**{field: value}, properties=properties), topic="T")
        assert refused.value.row == 0
        with pytest.raises(rmq.IllegalMessageError, match="contradicts"):
            rmq.Message("T", b"x", **{field: value}, properties=properties)


@pytest.mark.parametrize(("field", "value", "properties"), [
    ("tags", "a", {"TAGS": "a", "x": "1"}), ("uniq_key", "u", {"UNIQ_KEY": "u"}), ("keys", "a", {"KEYS": " a "}),
    ("keys", ["a", "b"], {"KEYS": "a  b", "TAGS": "t"}),
])  # fmt: skip
def test_a_property_that_says_what_its_column_says_is_stored_once(
    tmp_path: Path, field: str, value: Any, properties: dict[str, str]
) -> None:
    with rmq.open(tmp_path / "s", "x") as store:
        store.put_many(with_properties(**{field: value}, properties=properties), topic="T")
        store.put(rmq.Message("T", b"x", **{field: value}, properties=properties))
        first, second = (message.raw_properties for message in store.pull("T").messages)
    assert first == second
    assert first.count(b"\2") == len(properties)


def test_values_with_0x01_pass_only_in_what_a_scan_gave(tmp_path: Path) -> None:
    table = with_properties(keys="k\1", tags="\1", uniq_key="u\1u", properties={"x": "a\1b"})
    stored = table.replace_schema_metadata({"rmq.body": "plain"})
    with rmq.open(tmp_path / "s", "x") as store:
        for columns in (["keys"], ["tags"], ["uniq_key"], ["properties"]):
            with pytest.raises(rmq.IllegalMessageError, match="0x01"):
                store.put_many(table.select(["body", *columns]), topic="T")
        store.put_many(stored, topic="T")
        (message,) = store.query("T", "k\1")
        assert (message.keys, message.tags, message.uniq_key) == (("k\1",), "\1", "u\1u")
        assert message.properties["x"] == "a\1b"
        for name, value in (("x\1", "a"), ("x", "a\2")):
            broken = with_properties(properties={name: value}).replace_schema_metadata({"rmq.body": "plain"})
            with pytest.raises(rmq.IllegalMessageError, match="0x01 or 0x02"):
                store.put_many(broken, topic="T")
        for field in ("keys", "tags", "uniq_key"):
            broken = with_properties(**{field: "a\2"}, properties={}).replace_schema_metadata({"rmq.body": "plain"})
            with pytest.raises(rmq.IllegalMessageError, match="0x01 or 0x02"):
                store.put_many(broken, topic="T")


@pytest.mark.parametrize("body", ["body", "raw_body"])
def test_what_a_scan_gave_with_either_body_is_put_again(tmp_path: Path, body: str) -> None:
    with rmq.open(tmp_path / "s", "x") as store:
        store.put(rmq.Message("T", b"x", raw_properties=b"p\1v\1w\2"))
        for rows in (store.scan(columns=["topic", "properties", body]), store.scan(columns=["topic", "keys", body])):
            store.put_many(rows, results=False)
        assert [message.properties.get("p") for message in store.pull("T").messages] == ["v\1w", "v\1w", None]


@pytest.mark.parametrize("count", [3, 4000])
def test_a_dictionary_of_numbers_that_no_put_takes_is_passed_over(tmp_path: Path, count: int) -> None:
    """However large, as scans and Parquet files give such columns back."""
    numbers = pa.array(range(count)).dictionary_encode()
    tags = pa.array(["t"] * count).dictionary_encode()
    table = pa.table({"body": [b"x"] * count, "queue_offset": numbers, "tags": tags})
    with rmq.open(tmp_path / "s", "x", config=CONFIG) as store:
        assert len(store.put_many(table, topic="T")) == count
