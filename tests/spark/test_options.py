"""Options of the data source: every name, every wrong value, without Spark."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from rmq.spark.options import OPTIONS, ReadOptions, WriteOptions


def parse(**options: str) -> ReadOptions:
    return ReadOptions.parse({"path": "/s"} | options)


def test_names_are_taken_in_any_case() -> None:
    assert parse(STARTINGOFFSETS="latest", splitbytes="65536")["startingOffsets"] == "latest"


def test_defaults_are_those_of_the_table() -> None:
    assert parse().values == {option.name: option.default for option in OPTIONS} | {"path": "/s"}


def test_an_unknown_option_is_an_error_that_lists_the_names() -> None:
    with pytest.raises(ValueError, match="no option 'subscribes'") as caught:
        parse(subscribes="a")
    assert all(option.name in str(caught.value) for option in OPTIONS)


def test_what_spark_adds_by_itself_is_no_unknown_option() -> None:
    assert parse(checkpointLocation="/c").given == {"path"}


@pytest.mark.parametrize("name", ["location", "option.subscribe", "Option.path"])
def test_a_table_without_columns_is_told_the_forms_that_work(name: str) -> None:
    """Spark hands over the properties of a new table in place of its options."""
    with pytest.raises(ValueError, match=r"needs its columns, as CREATE TABLE t \(.*WITH .path=.*TEMPORARY VIEW"):
        parse(**{name: "x"})


def test_without_a_path_the_error_names_the_forms_that_keep_options() -> None:
    with pytest.raises(ValueError, match=r"WITH .path=.*CREATE TEMPORARY VIEW"):
        ReadOptions.parse({})


@pytest.mark.parametrize(("options", "message"), [
    ({"table": "nix"}, "option table: 'nix' is none of messages"),
    ({"startingOffsets": "{"}, "option startingOffsets: no JSON"),
    ({"startingOffsets": "[" * 200_000}, "option startingOffsets: no JSON"),
    ({"startingOffsets": '{"a":{"0":' + "9" * 5000 + "}}"}, "option startingOffsets: no JSON"),
    ({"subscribePattern": "a{99999999999999999999}"}, "is no regular expression"),
    ({"subscribePattern": "(" * 50_000}, "is no regular expression"),
    ({"startingOffsets": '{"a": 3}'}, "is not of the form"),
    ({"startingOffsets": '{"a": {"x": 3}}'}, "is not of the form"),
    ({"startingOffsets": '{"a": {"0": -3}}'}, "is not of the form"),
    ({"startingOffsets": '{"a": {"0": true}}'}, "is not of the form"),
    ({"startingOffsets": '[1]'}, "is not of the form"),
    ({"assign": '{"a": 0}'}, "is not of the form"),
    ({"assign": '{"a": [-1]}'}, "is not of the form"),
    ({"subscribePattern": "("}, "is no regular expression"),
    ({"splitBytes": "10"}, "option splitBytes: '10' is no number from 65536"),
    ({"splitBytes": "1e9"}, "option splitBytes"),
    ({"batchRows": "0"}, "option batchRows"),
    ({"batchRows": "9" * 30}, "option batchRows"),
    ({"verifyCrc": "yes"}, "option verifyCrc: 'yes' is none of true, false"),
    ({"columns": "body,nix"}, "no column 'nix'"),
    ({"columns": '["body"'}, "option columns: no JSON"),
    ({"columns": "[1]"}, "no JSON list of texts"),
    ({"subscribe": "a", "assign": '{"a": [0]}'}, "only one of subscribe"),
    ({"startingTimestamp": "1", "startingOffsets": "latest"}, "only one of them"),
    ({"endingTimestamp": "1", "endingOffsetsByTimestamp": "{}"}, "only one of them"),
    ({"keys": "k"}, "subscribe must say"),
    ({"io": "nix"}, "option io: 'nix' is none of auto, mmap, pread"),
    ({"io": "pread", "subscribe": "a", "keys": "k"}, "options keys and io=pread: the index is mapped; scanMode=log"),
    ({"io": "pread", "failOnDataLoss": "false"}, "options failOnDataLoss=false and io=pread: damage is passed over"),
    ({"io": "pread", "table": "topics"}, "table=topics: options io are not for it"),
    ({"scanMode": "nix"}, "option scanMode: 'nix' is none of auto, log, queue, index"),
    ({"scanMode": "index"}, "option scanMode=index: keys must say which messages, and subscribe of which topics"),
    ({"scanMode": "index", "subscribe": "a"}, "option scanMode=index: keys must say"),
    ({"scanMode": "index", "keys": "k"}, "option keys: subscribe must say"),
    ({"scanMode": "index", "table": "index"}, "table=index: options scanMode are not for it"),
    ({"scanMode": "queue"}, "option scanMode=queue: one of subscribe, subscribePattern, assign must say"),
    ({"maxRecordsPerPartition": "5"}, "option maxRecordsPerPartition: one of subscribe"),
    ({"maxRecordsPerPartition": "0", "subscribe": "a"}, "'0' is no number from 1"),
    ({"maxRecordsPerPartition": "5", "subscribe": "a", "scanMode": "log"}, "scanMode=log: only queues tell"),
    ({"scanMode": "queue", "subscribe": "a", "keys": "k"}, "options keys and scanMode=queue: only one of them can be "
     "given; keys are found by the index or with scanMode=log"),
    ({"startingOffsets": "earliest", "startingOffsetsByTimestamp": '{"t": {"0": 1}}'},
     "options startingOffsets and startingOffsetsByTimestamp: only one"),
    ({"endingOffsets": "latest", "endingTimestamp": "1"}, "options endingTimestamp and endingOffsets: only one"),
    ({"includeHeaders": "true"}, "option includeHeaders: for schemaMode=kafka"),
    ({"paths": "/a,/b"}, "options path and paths: only one"),
    ({"subscribe": ""}, "option subscribe: names no topic"),
    ({"subscribe": " , "}, "option subscribe: names no topic"),
    ({"subscribe": "[]", "table": "topics"}, "option subscribe: names no topic"),
    ({"subscribe": "a,%LMQ%b"}, "option subscribe: %LMQ%b is a light queue of messages of other topics"),
    ({"assign": '{"%LMQ%b": [0]}'}, "option assign: %LMQ%b is a light queue"),
    ({"schemaMode": "kafka", "columns": "body"}, "the schema of schemaMode=kafka is fixed"),
    ({"table": "queues", "tags": "A"}, "table=queues: options tags are not for it"),
    ({"table": "index", "subscribe": "a"}, "table=index: options subscribe are not for it"),
], ids=str)  # fmt: skip
def test_a_wrong_value_is_an_error_that_names_the_option(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(**options)


@pytest.mark.parametrize("options", [{"endingOffsets": "latest"}, {"endingTimestamp": "5"}, {"table": "topics"}],
                         ids=str)  # fmt: skip
def test_a_stream_has_no_end(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="not for streams"):
        parse(**options).check_stream()


@pytest.mark.parametrize(("text", "value"), [("a,b", ("a", "b")), (" a , ,b", ("a", "b")), ('["a,b"]', ("a,b",)),
                                             ('[""]', ("",))])  # fmt: skip
def test_lists_are_names_with_commas_between_or_json(text: str, value: Any) -> None:
    assert parse(subscribe="t", keys=text)["keys"] == value


@pytest.mark.parametrize(("name", "value"), [("keys", ""), ("keys", " , "), ("keys", "[]"), ("columns", ""),
                                             ("columns", "[]"), ("assign", "{}")])  # fmt: skip
def test_an_empty_choice_is_an_error_that_names_it(name: str, value: str) -> None:
    given = {"subscribe": "t"} if name == "keys" else {}
    with pytest.raises(ValueError, match=f"option {name}: .* names none"):
        parse(**given, **{name: value})


def test_broker_conf_is_read_by_the_driver_alone(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_text("mappedFileSizeCommitLog=1048576\n")
    asked = pickle.loads(pickle.dumps(parse(brokerConf=str(file))))
    file.unlink()
    config = asked["brokerConf"]
    assert config.mapped_file_size_commit_log == 1048576
    assert config.is_explicit("mapped_file_size_commit_log")
    assert not config.is_explicit("max_index_num")
    with pytest.raises(FileNotFoundError, match=r"option brokerConf: .*broker\.conf"):
        parse(brokerConf=str(file))
    file.write_text("mappedFileSizeCommitLog=much\n")
    with pytest.raises(ValueError, match=r"option brokerConf: .*broker\.conf"):
        parse(brokerConf=str(file))


@pytest.mark.parametrize("make", [ReadOptions, WriteOptions])
def test_a_relative_path_in_a_session_of_spark_connect_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    """Its workers begin in a directory that goes with the session, and what is written there with it."""
    directory = tmp_path / "userFiles-0" / "session"
    directory.mkdir(parents=True)
    monkeypatch.chdir(directory)

    def paths(path: str) -> Any:
        options = make.parse({"path": path})
        return options.path if make is WriteOptions else options.paths

    for relative in ("store", "file:store", "./a/store"):
        with pytest.raises(ValueError, match="absolute path"):
            paths(relative)
    assert paths(str(tmp_path)) in (str(tmp_path), (str(tmp_path),))
    monkeypatch.chdir(tmp_path)
    assert paths("store") in ("store", ("store",))


def test_a_column_of_raw_bodies_that_is_taken_for_body_stands_in_nobody_s_place() -> None:
    asked = WriteOptions.parse({"path": "/s", "topic": "t", "columns": '{"body": "raw_body"}'})
    assert asked.columns_of(["raw_body", "tags"]) == {"body": "raw_body", "tags": "tags"}
    asked = WriteOptions.parse({"path": "/s", "topic": "t", "columns": '{"body": "text"}'})
    with pytest.raises(ValueError, match="the frame has raw_body, which would be stored in its place"):
        asked.columns_of(["raw_body", "text"])
