"""Keys hash as Java's String.hashCode, whatever holds them: vectors of Java 17, the oracle, malformed UTF-8."""

from __future__ import annotations

import ctypes
import gc
import mmap
import random
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import oracle
import pyarrow as pa
import pytest
from forks import in_child
from hypothesis import given
from hypothesis import strategies as st
from test_arrow_values import of_views

import rmq
from rmq._core._javahash import decode_text, hash_str_keys, hash_utf8_keys, index_key_hash, java_hash
from rmq.keys import hash_keys

SLOTS = 5_000_000

# key, hashCode, keyHash, slot of 5,000,000, position of that slot in the file; written by Java 17.
VECTORS = [
    ("", 0, 0, 0, 40),
    ("a", 97, 97, 97, 428),
    ("Aa", 2112, 2112, 2112, 8488),
    ("BB", 2112, 2112, 2112, 8488),
    ("AaAa", 2031744, 2031744, 2031744, 8127016),
    ("AaBB", 2031744, 2031744, 2031744, 8127016),
    ("1234567890", -2054162789, 2054162789, 4162789, 16651196),
    ("T#x", 81929, 81929, 81929, 327756),
    ("TopicTest#1234567890", -1718538723, 1718538723, 3538723, 14154932),
    ("TopicTest#order 1", -1829193827, 1829193827, 4193827, 16775348),
    ("TopicTest#C0A80107D6F173D16E930B1A2C3D0001", 665746754, 665746754, 746754, 2987056),
    ("8d8eb486-d94c-4da1-bdfe-f0587161ea05", -358470777, 358470777, 3470777, 13883148),
    ("polygenelubricants", -2147483648, 0, 0, 40),
    ("TopicTest#" + 100 * "k", 1814031810, 1814031810, 4031810, 16127280),
    ("%RETRY%g#k", -1196730099, 1196730099, 1730099, 6920436),
    ("\u00e9", 233, 233, 233, 972),
    ("e\u0301", 3900, 3900, 3900, 15640),
    ("\u8ba2\u5355", 1129459, 1129459, 1129459, 4517876),
    ("TopicTest#\u8ba2\u5355-1", -573861415, 573861415, 3861415, 15445700),
    ("\U0001f600", 1772899, 1772899, 1772899, 7091636),
    ("TopicTest#\U0001f600-1", 44484425, 44484425, 4484425, 17937740),
    ("\ud83d", 55357, 55357, 55357, 221468),
]
TAGS = [("TagA", 2598919), ("TagB", 2598920), ("\u6807\u7b7e", 857175), ("A || B", 1894261793), ("*", 42),
        ("\U0001f600", 1772899), ("polygenelubricants", -2147483648), ("", 0)]  # fmt: skip

# bytes, what Java 17's new String(bytes, UTF_8) makes of them, hashCode of that.
MALFORMED = [
    ("80", "\ufffd", 65533),
    ("c0", "\ufffd", 65533),
    ("c2", "\ufffd", 65533),
    ("c241", "\ufffdA", 2031588),
    ("c2c2a9", "\ufffd\u00a9", 2031692),
    ("e0", "\ufffd", 65533),
    ("e080", "\ufffd\ufffd", 2097056),
    ("e08080", "\ufffd\ufffd\ufffd", 65074269),
    ("e0a0", "\ufffd", 65533),
    ("e0a080", "\u0800", 2048),
    ("e0a041", "\ufffdA", 2031588),
    ("e6a8", "\ufffd", 65533),
    ("e6a841", "\ufffdA", 2031588),
    ("e6e6a887", "\ufffd\u6a07", 2058666),
    ("eda080", "\ufffd", 65533),
    ("edb080", "\ufffd", 65533),
    ("eda080edb080", "\ufffd\ufffd", 2097056),
    ("eda041", "\ufffdA", 2031588),
    ("efbfbd", "\ufffd", 65533),
    ("f0", "\ufffd", 65533),
    ("f08080", "\ufffd\ufffd\ufffd", 65074269),
    ("f0808080", "\ufffd\ufffd\ufffd\ufffd", 2017367872),
    ("f09080", "\ufffd", 65533),
    ("f0908080", "\U00010000", 1770496),
    ("f09f98", "\ufffd", 65533),
    ("f09f9841", "\ufffdA", 2031588),
    ("f09f", "\ufffd", 65533),
    ("f09f41", "\ufffdA", 2031588),
    ("f09ff09f9880", "\ufffd\U0001f600", 64750112),
    ("f48fbfbf", "\U0010ffff", 1803232),
    ("f4908080", "\ufffd\ufffd\ufffd\ufffd", 2017367872),
    ("f5808080", "\ufffd\ufffd\ufffd\ufffd", 2017367872),
    ("ff", "\ufffd", 65533),
    ("fffe41", "\ufffd\ufffdA", 65008801),
    ("41ff42", "A\ufffdB", 2094054),
    ("6b80bf6b", "k\ufffd\ufffdk", 68196480),
    ("e8aea2e58d", "\u8ba2\ufffd", 1173659),
    ("e8aee58d95", "\ufffd\u5355", 2052856),
    ("c3a9c3", "\u00e9\ufffd", 72756),
    ("f09f9880f09f98", "\U0001f600\ufffd", 55025402),
    ("548023c3284b", "T\ufffd#\ufffd(K", -1434537850),
    ("f1808041", "\ufffdA", 2031588),
    ("f1c080", "\ufffd\ufffd\ufffd", 65074269),
    ("23e0c3a9f0", "#\ufffd\u00e9\ufffd", 64092654),
    ("ed41f5f0f4e6a887a0", "\ufffdA\ufffd\ufffd\ufffd\u6a07\ufffd", -1694730609),
    ("6bc2f5f09f9880f5a0e6a887", "k\ufffd\ufffd\U0001f600\ufffd\ufffd\u6a07", 724023225),
    ("ed8dfff5e6a8878d", "\ufffd\ufffd\ufffd\u6a07\ufffd", -1887229965),
    ("bfeff09f9880f4", "\ufffd\ufffd\U0001f600\ufffd", -1896088742),
    ("ffef6bbff5c3a98d", "\ufffd\ufffdk\ufffd\ufffd\u00e9\ufffd", -300791009),]

KEYS = [key for key, *_ in VECTORS if key != "\ud83d"]
HASHES = [key_hash for key, _, key_hash, *_ in VECTORS if key != "\ud83d"]
any_text = st.text(st.characters(exclude_categories=()))


def utf8_keys(*keys: bytes, topic: str | None = None) -> list[int]:
    offsets = np.cumsum([0, *map(len, keys)], dtype=np.int64)
    return hash_utf8_keys(offsets, b"".join(keys), topic).tolist()


@pytest.mark.parametrize(("key", "code", "key_hash", "slot", "position"), VECTORS)
def test_a_key_has_java_s_hash_and_its_slot(key: str, code: int, key_hash: int, slot: int, position: int) -> None:
    assert java_hash(key) == rmq.java_hash(key) == code
    assert index_key_hash(key) == rmq.index_key_hash(key) == key_hash
    assert hash_str_keys([key]).tolist() == [key_hash]
    assert key_hash % SLOTS == slot
    assert 40 + 4 * slot == position
    if key != "\ud83d":
        assert utf8_keys(key.encode()) == [key_hash]


@pytest.mark.parametrize(("tags", "code"), TAGS)
def test_a_tags_code_is_the_hash_of_the_whole_tags(tags: str, code: int) -> None:
    assert java_hash(tags) == code


def test_a_surrogate_pair_hashes_like_its_character_and_a_lone_one_like_a_unit() -> None:
    assert java_hash("\ud83d\ude00") == java_hash("\U0001f600")
    assert java_hash("\ude00") == 0xDE00
    assert hash_str_keys(["\ud83d", "\ude00\ud83d"]).tolist() == [0xD83D, 31 * 0xDE00 + 0xD83D]


@given(any_text)
def test_any_text_hashes_like_the_oracle(text: str) -> None:
    assert java_hash(text) == oracle.java_hash(text)
    assert index_key_hash(text) == oracle.index_key_hash(text)


@given(st.lists(any_text, max_size=20), st.one_of(st.none(), any_text))
def test_a_list_of_keys_hashes_like_its_items_with_the_topic_in_front(keys: list[str], topic: str | None) -> None:
    front = "" if topic is None else f"{topic}#"
    found = hash_str_keys(keys, topic)
    assert found.dtype == np.int32
    assert found.tolist() == [oracle.index_key_hash(front + key) for key in keys]


@given(st.lists(st.text(), max_size=20), st.one_of(st.none(), any_text))
def test_utf8_keys_hash_like_str_keys(keys: list[str], topic: str | None) -> None:
    expected = hash_str_keys(keys, topic).tolist()
    assert utf8_keys(*(key.encode() for key in keys), topic=topic) == expected
    assert hash_keys(pa.array(keys, pa.string()), topic).tolist() == expected


@pytest.mark.parametrize("other", ["", "\0", "\x7f", "ÿ", "é", "漢", "😀", "\ud83d"])
def test_every_length_and_every_place_of_another_character_hashes_right(other: str) -> None:
    """Sixteen characters are hashed at a time: no length, and nothing that ends such a run, may matter."""
    plain = 3 * "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    places = [(length, place) for length in range(50) for place in range(length + 1)]
    places += [(length, place) for length in range(50, 131) for place in (0, 1, length // 2, length - 1, length)]
    keys = [plain[:place] + other + plain[place:length] for length, place in places]
    expected = [oracle.index_key_hash(f"T#{key}") for key in keys]
    assert hash_str_keys(keys, "T").tolist() == expected
    assert [java_hash(key) for key in keys] == [oracle.java_hash(key) for key in keys]
    if other != "\ud83d":
        assert hash_keys(pa.array(keys), "T").tolist() == expected
        assert hash_keys(pa.array(keys, pa.large_string()), "T").tolist() == expected


def test_a_str_of_another_class_hashes_like_its_characters() -> None:
    class Name(str):
        __slots__ = ()

    keys = [Name(character * length) for character in "kÿ漢😀" for length in range(40)]
    assert hash_str_keys(keys).tolist() == [oracle.index_key_hash(str(key)) for key in keys]


def test_hashing_reads_no_byte_before_or_behind_the_data() -> None:
    """The page behind and the page before may not be touched."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    view = (ctypes.c_char * len(memory)).from_buffer(memory)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    memory[page : 2 * page] = b"k" * page
    for closed in (0, 2 * page):
        assert protect(ctypes.addressof(view) + closed, page, 0) == 0
    data = np.frombuffer(memory, np.uint8)[page : 2 * page]
    for size in range(70):
        expected = [oracle.index_key_hash("k" * size)]
        assert hash_utf8_keys(np.array([0, size], np.int32), data[:size]).tolist() == expected
        assert hash_utf8_keys(np.array([0, size], np.int32), data[page - size :]).tolist() == expected
        assert hash_utf8_keys(np.array([page - size, page]), data).tolist() == expected
    for size in (1, 7, 8, 31, 32, 33):
        many = np.arange(page % size, page + 1, size, np.int32)
        assert set(hash_utf8_keys(many, data).tolist()) == {oracle.index_key_hash("k" * size)}
        assert set(hash_utf8_keys(many[:-1] - page % size, data).tolist()) == {oracle.index_key_hash("k" * size)}


@pytest.mark.parametrize("width", [np.int32, np.int64])
@pytest.mark.parametrize("topic", [None, "TopicTest", "é"])
@pytest.mark.parametrize("count", [7, 8, 9, 15, 16, 17, 40])
def test_short_keys_of_a_column_hash_like_each_alone(count: int, topic: str | None,
                                                     width: type[np.integer[Any]]) -> None:  # fmt: skip
    """Eight together, whatever their lengths, behind whatever bytes, with one of another kind at each place."""
    rng = random.Random(count)
    for other in ("", "k" * 32, "k" * 33, "é", "\x7f" * 32, "polygenelubricants", "x" * 31 + "ÿ"):
        for place in range(count):
            keys = ["".join(rng.choices("aZ09-_~", k=rng.choice((0, 1, 8, 15, 16, 17, 31, 32)))) for _ in range(count)]
            keys[place] = other
            for before in (b"", b"\xff" * 5, b"z" * 40):
                encoded = [key.encode() for key in keys]
                offsets = np.cumsum([len(before), *map(len, encoded)]).astype(width)
                found = hash_utf8_keys(offsets, before + b"".join(encoded), topic)
                assert found.tolist() == hash_str_keys(keys, topic).tolist()


def test_a_short_key_whose_hash_has_no_absolute_value_is_0_among_others_too() -> None:
    keys = ["polygenelubricants", "a"] * 8 + ["b" * 32] * 8
    offsets = np.cumsum([40, *map(len, keys)]).astype(np.int32)
    found = hash_utf8_keys(offsets, b"." * 40 + "".join(keys).encode())
    assert found.tolist() == [index_key_hash(key) for key in keys]
    assert found[0] == 0


@pytest.mark.parametrize("wrong", range(1, 9))
@pytest.mark.parametrize("value", [-1, 10**6, 39, 2**31 - 1, -(2**31)])
def test_of_eight_short_keys_the_first_offset_outside_the_data_is_named(wrong: int, value: int) -> None:
    offsets = np.arange(40, 40 + 9 * 4, 4, dtype=np.int32)
    offsets[wrong] = value
    named = wrong if value < 40 or value > 76 else wrong + 1
    with pytest.raises(ValueError, match=rf"offsets\[{named}\]"):
        hash_utf8_keys(offsets, bytes(76))


@pytest.mark.parametrize(("data", "text", "code"), MALFORMED)
def test_malformed_utf8_reads_and_hashes_as_in_java(data: str, text: str, code: int) -> None:
    raw = bytes.fromhex(data)
    assert decode_text(raw) == text
    assert oracle.java_hash(text) == code
    assert utf8_keys(raw) == [abs(code)]
    assert utf8_keys(b"a", raw, b"b", topic="T") == [oracle.index_key_hash(f"T#{key}") for key in ("a", text, "b")]


@given(st.text())
def test_utf8_text_is_read_as_it_is(text: str) -> None:
    assert decode_text(text.encode()) == text


@given(st.binary(max_size=40))
def test_any_bytes_read_as_text_that_has_an_utf8_form(data: bytes) -> None:
    text = decode_text(data)
    assert decode_text(text.encode()) == text
    assert utf8_keys(data) == [oracle.index_key_hash(text)]


def holders() -> dict[str, Any]:
    """The same keys in everything that is taken."""
    text = pa.array(KEYS)
    padded = pa.array(["before", None, *KEYS, "behind"])
    return {
        "list": KEYS,
        "tuple": tuple(KEYS),
        "generator": iter(KEYS),
        "numpy U": np.array(KEYS),
        "numpy S": np.array([key.encode() for key in KEYS]),
        "numpy object": np.array(KEYS, dtype=object),
        "numpy StringDType": np.array(KEYS, np.dtypes.StringDType()),
        "numpy object of bytes": np.array([key.encode() for key in KEYS], dtype=object),
        "string": text,
        "large_string": text.cast(pa.large_string()),
        "string_view": text.cast(pa.string_view()),
        "dictionary": text.dictionary_encode(),
        "dictionary of large_string": text.cast(pa.large_string()).dictionary_encode(),
        "slice": padded.slice(2, len(KEYS)),
        "slice of large_string": padded.cast(pa.large_string()).slice(2, len(KEYS)),
        "slice of string_view": padded.cast(pa.string_view()).slice(2, len(KEYS)),
        "slice of dictionary": padded.dictionary_encode().slice(2, len(KEYS)),
        "slice of dictionary of string_view": of_views(padded, [*range(len(padded))]).slice(2, len(KEYS)),
        "chunked": pa.chunked_array([KEYS[:3], [], KEYS[3:]], pa.string()),
        "chunked dictionary": pa.chunked_array([text[:5].dictionary_encode(), text[5:].dictionary_encode()]),
        "slice of chunked": pa.chunked_array([["before", *KEYS[:4]], KEYS[4:]]).slice(1),
    }


@pytest.mark.parametrize("kind", holders())
def test_keys_hash_the_same_in_every_holder(kind: str) -> None:
    found = hash_keys(holders()[kind])
    assert (found.dtype, found.tolist()) == (np.dtype(np.int32), HASHES)


@pytest.mark.parametrize("kind", holders())
def test_keys_of_every_holder_take_a_topic(kind: str) -> None:
    expected = [oracle.index_key_hash(f"\u4e3b\u9898#{key}") for key in KEYS]
    assert hash_keys(holders()[kind], "\u4e3b\u9898").tolist() == expected


EMPTY = [[], np.array([], dtype="U1"), pa.array([], pa.string()), pa.array([], pa.string_view()),
         pa.array(["x"]).slice(1), pa.chunked_array([], pa.string()),
         pa.array([], pa.string()).dictionary_encode()]  # fmt: skip


@pytest.mark.parametrize("keys", EMPTY, ids=lambda keys: type(keys).__name__)
def test_no_keys_have_no_hashes(keys: Any) -> None:
    assert hash_keys(keys).tolist() == []


NULLS = {
    "string": pa.array(["a", None]),
    "large_string": pa.array(["a", None], pa.large_string()),
    "string_view": pa.array(["a", None], pa.string_view()),
    "chunked": pa.chunked_array([["a"], [None]], pa.string()),
    "null index of a dictionary": pa.array(["a", None]).dictionary_encode(),
    "null value of a dictionary": pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None])),
    "null index of a dictionary of string_view": of_views(pa.array(["a"]), [0, None]),
    "null value of a dictionary of string_view": of_views(pa.array(["a", None]), [0, 1]),
}


@pytest.mark.parametrize("kind", NULLS)
def test_a_null_is_no_key(kind: str) -> None:
    with pytest.raises(ValueError, match="null"):
        hash_keys(NULLS[kind])


@pytest.mark.parametrize("wrong", [None, b"b", 5, 1.5, ["x"]])
@pytest.mark.parametrize("position", [0, 2])
def test_an_item_that_is_no_str_is_named_by_its_position(wrong: Any, position: int) -> None:
    keys = ["a", "b", "c"]
    keys[position] = wrong
    for holder in (keys, tuple(keys)):
        with pytest.raises(TypeError, match=rf"keys\[{position}\]"):
            hash_keys(holder)


def test_an_object_array_names_the_position_too() -> None:
    with pytest.raises(TypeError, match=r"keys\[1\]"):
        hash_keys(np.array(["a", 5, "c"], dtype=object))


WRONG_HOLDERS = ["one str", np.array([1, 2]), np.array([["a"], ["b"]]), pa.array([1, 2]), pa.array([b"a"]),
                 pa.table({"k": ["a"]}), pa.record_batch({"k": ["a"]}),
                 pa.array([1, 1]).dictionary_encode()]  # fmt: skip


@pytest.mark.parametrize("keys", WRONG_HOLDERS, ids=lambda keys: type(keys).__name__)
def test_what_holds_no_text_is_refused(keys: Any) -> None:
    with pytest.raises(TypeError, match="keys"):
        hash_keys(keys)


def test_numpy_bytes_that_are_no_utf8_are_refused() -> None:
    with pytest.raises(ValueError, match="is not UTF-8"):
        hash_keys(np.array([b"a", b"\xff"]))


@pytest.mark.parametrize("width", [np.int32, np.int64])
@pytest.mark.parametrize("offsets", [[], [-1, 1], [0, 4], [2, 1], [0, 3, 2], [4, 4], [-1], [4]])
def test_offsets_outside_the_data_are_refused(offsets: list[int], width: type[np.integer[Any]]) -> None:
    with pytest.raises(ValueError, match="offsets"):
        hash_utf8_keys(np.array(offsets, width), b"abc")


@pytest.mark.slow
@pytest.mark.parametrize("width", [np.int32, np.int64])
def test_offsets_that_another_thread_changes_lead_nowhere_else(width: type[np.integer[Any]]) -> None:
    good = np.arange(1001, dtype=width) * 4
    bad, offsets, data = good.copy(), good.copy(), bytes(4000)
    bad[8::8] = np.iinfo(width).min // 2

    def work() -> None:
        end = time.monotonic() + 0.3

        def change() -> None:
            while time.monotonic() < end:
                offsets[:] = bad
                offsets[:] = good

        thread = threading.Thread(target=change)
        thread.start()
        while thread.is_alive():
            with suppress(ValueError):
                hash_utf8_keys(offsets, data)

    in_child(work)


def test_offsets_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="mismatch"):
        hash_utf8_keys(np.array([0, 1], np.int16), b"abc")  # type: ignore[arg-type]


def test_only_str_is_hashed() -> None:
    for wrong in (None, b"a", 5):
        for function in (java_hash, index_key_hash):
            with pytest.raises(TypeError, match="str"):
                function(wrong)


def test_a_list_that_is_emptied_while_memory_is_had_for_its_hashes_is_an_error() -> None:
    """By a finalizer, which Python's collector runs then."""

    def work() -> None:
        class Emptying:
            def __init__(self) -> None:
                self.me = self

            def __del__(self) -> None:
                keys.clear()

        keys = [f"key {number}" for number in range(100_000)]
        gc.disable()
        gc.collect()
        Emptying()
        gc.set_threshold(1)
        gc.enable()
        with suppress(RuntimeError):
            assert len(hash_str_keys(keys)) == 0  # it ran sooner

    in_child(work)
