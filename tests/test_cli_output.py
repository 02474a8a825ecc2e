# SPDX-License-Identifier: Apache-2.0
"""What the command writes of odd values, to whom, and when there is nothing to write."""

from __future__ import annotations

import json
import resource
import subprocess
from pathlib import Path

import pytest
from commandline import COMMAND, assert_error, call, environment, good, on_terminal, run

import rmq
from rmq.cli.output import FIELDS


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("output") / "s"
    with rmq.open(path, "x") as opened:
        opened.put(rmq.Message("T", ("a" + "\u00e9" * 300).encode(), keys="k1", tags="t\x1b[31m"))
        opened.put(rmq.Message("T", b"\xff" * 300, keys="k2"))
    return path


def test_text_that_is_cut_within_a_character_is_text(store: Path) -> None:
    _, first, second = good("cat", store, "T", "-o", "table").out.splitlines()
    assert "a\u00e9" in first
    assert "hex" not in first
    assert "hex ffff" in second


@pytest.mark.slow
def test_a_template_s_own_tabs_and_escapes_are_the_user_s_on_a_terminal_too(store: Path) -> None:
    done = on_terminal("query", store, "T", "k1", "-f", r"\x{keys}\t{tags}|{properties}".replace(r"\x", "\x1b[1m"))
    line = done.out.splitlines()[0]
    assert line.startswith("\x1b[1mk1\tt\\x1b[31m|")
    assert line.count("\x1b") == 1


def test_an_empty_csv_has_its_header(store: Path) -> None:
    assert good("cat", store, "T", "--tags", "none", "-o", "csv").out == ",".join(FIELDS) + "\n"
    assert good("cat", store, "T", "--tags", "none", "-o", "jsonl").out == ""


def test_what_finds_nothing_is_a_csv_with_its_header(tmp_path: Path) -> None:
    store, table = tmp_path / "s", ("-o", "csv")
    rmq.open(store, "x").close()
    assert good("topics", store, *table).out == \
        "topic,queue_id,min_queue_offset,max_queue_offset,first_timestamp,last_timestamp\n"  # fmt: skip
    assert good("verify", store, *table).out == "path,offset,kind,severity,reason\n"
    assert good("clean", store, "--dry-run", *table).out == "path,size,reason\n"
    assert good("rebuild", store, "--sidecar", *table).out == "path,size,reason\n"
    assert call("export", store, tmp_path / "out", *table).out == "path,row_count,size\n"
    for verb in ("topics", "verify"):
        assert good(verb, store, "-o", "jsonl").out == good(verb, store, "-o", "table").out == ""


def test_lists_in_csv_are_json_but_for_keys(tmp_path: Path) -> None:
    with rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(message_index_enable=False)) as opened:
        end = opened.put(rmq.Message("T", b"", keys=["k", "l"])).size
    facts = dict(list(row.values()) for row in good("info", tmp_path / "s", "-o", "csv").table)
    (exact,) = good("info", tmp_path / "s", "-o", "jsonl").rows
    lists = {name: value for name, value in exact.items() if isinstance(value, list)}
    assert {name: json.loads(facts[name]) for name in lists} == lists
    assert (lists["unindexed"], len(lists["signs"]) > 1) == ([[0, end]], True)
    for words in (("cat", "T"), ("get", "T/0/0")):
        assert "k l" in good(words[0], tmp_path / "s", *words[1:], "-o", "csv").out


@pytest.mark.parametrize("limit", ["all", "ALL", "All"])
def test_all_is_a_limit_however_it_is_written(store: Path, limit: str) -> None:
    assert len(good("cat", store, "T", "--limit", limit, "-o", "jsonl").rows) == 2


def test_a_template_that_asks_for_more_than_memory_is_a_wrong_argument(store: Path) -> None:
    assert_error(call("cat", store, "T", "-f", "{body:>99999999999999}"), 2,
                 "-f: a width is too large: memory has no room for the line (see ")  # fmt: skip


@pytest.mark.slow
def test_an_error_that_nobody_can_read_keeps_its_exit_code(store: Path) -> None:
    with Path("/dev/full").open("wb") as sink:
        done = subprocess.run([*COMMAND, "info", str(store / "none")], stderr=sink, check=False, env=environment())
    assert done.returncode == 4


@pytest.mark.parametrize("form", ["table", "jsonl", "csv"])
def test_a_rebuild_takes_no_form_for_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    with rmq.open(tmp_path / "s", "x") as store:
        store.put(rmq.Message("T", b"x"))
    monkeypatch.chdir(tmp_path)
    assert_error(call("rebuild", "s", "--output", form), 2, f"-o {form} is the form of what is printed")
    assert not (tmp_path / form).exists()
    good("rebuild", "s", "--output", tmp_path / form)
    assert (tmp_path / form / "consumequeue/T/0").is_dir()


@pytest.mark.parametrize("verb", ["info", "rebuild", "verify", "clean"])
def test_a_broker_conf_that_does_not_fit_is_a_wrong_argument(store: Path, tmp_path: Path, verb: str) -> None:
    (tmp_path / "broker.conf").write_text("mappedFileSizeCommitLog=abc\n")
    assert_error(call(verb, store, "--conf", tmp_path / "broker.conf"), 2, "broker.conf, line 1")


def test_an_export_tells_of_topics_that_are_not_there(store: Path, tmp_path: Path) -> None:
    some = good("export", store, tmp_path / "some", "--topic", "T", "--topic", "t", "--processes", 1)
    assert some.notes[0] == f"rmq: {store}: no topic 't'; did you mean 'T'?"
    assert some.rows[0]["row_count"] == 2
    none = call("export", store, tmp_path / "none", "--topic", "zzz", "--processes", 1)
    assert (none.code, none.notes[0]) == (1, f"rmq: {store}: no topic 'zzz'")


def test_a_time_between_two_milliseconds_bounds_what_lies_inside(tmp_path: Path) -> None:
    begin = 1_700_000_000_000
    times = iter(range(begin, begin + 10))
    with rmq.open(tmp_path / "s", "x", clock=lambda: next(times)) as store:
        for number in range(5):
            store.put(rmq.Message("T", b"%d" % number, keys="k"))
    low, high = (f"2023-11-14T22:13:20.{digits}Z" for digits in ("0014999", "0035"))
    for verb, bounds in ((("cat",), ("--from", "--until")), (("query",), ("--begin", "--end"))):
        asked = (*verb, tmp_path / "s", "T", *(["k"] if verb == ("query",) else []), bounds[0], low, bounds[1], high)
        assert sorted(row["body"] for row in good(*asked, "-o", "jsonl").rows) == ["2", "3"]
    done = call("cat", tmp_path / "s", "T", "--from", "\uff11\uff12\uff13")
    assert_error(done, 2, "is no time")


def test_an_output_in_the_store_is_refused_without_other_advice(tmp_path: Path) -> None:
    rmq.open(tmp_path / "s", "x").close()
    assert "lies in the store (see " in call("rebuild", tmp_path / "s", "--output", tmp_path / "s" / "new").err


def test_a_property_that_a_message_lacks_is_empty_in_a_template(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with rmq.open(path, "x") as store:
        store.put_many([rmq.Message("T", b"1", properties={"TRACE": "a"}), rmq.Message("T", b"2")])
    assert good("cat", path, "T", "-f", "{properties[TRACE]}|{body}").out == "a|1\n|2\n"
    assert_error(call("cat", path, "T", "-f", "{properties.TRACE}"), 2, "-f: no {properties.TRACE}: ",
                 "{properties[NAME]}")  # fmt: skip


@pytest.mark.parametrize("words", [["info", ""], ["clean", ""], ["cat", "", "T"], ["topics", ".", "--conf", ""],
                                   ["export", ".", ""], ["rebuild", ".", "--output", ""]], ids=" ".join)  # fmt: skip
def test_an_empty_path_is_not_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    words: list[str]) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert_error(call(*words), 2, "the path is empty")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_full_disk_below_stdout_is_not_the_store_s(store: Path, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("k\n1\n2\n")
    for words, more in ((("cat", store, "T"), ""), (("info", store), ""), (("info", store, "-o", "table"), ""),
                        (("cat", store, "T", "-o", "table"), ""), (("completion", "bash"), ""),
                        (("ingest", tmp_path / "s", tmp_path / "x.csv", "--topic", "T"),
                         "; stored: 2 messages")):  # fmt: skip
        with Path("/dev/full").open("wb") as sink:
            done = subprocess.run([*COMMAND, *map(str, words)], stdout=sink, stderr=subprocess.PIPE, check=False,
                                  env=environment())  # fmt: skip
        assert (done.returncode, done.stderr.decode()) == (4, f"rmq: stdout: No space left on device{more}\n")


@pytest.mark.slow
@pytest.mark.parametrize("full", ["stderr", "stdout and stderr"])
def test_a_full_disk_below_stderr_leaves_the_code(store: Path, full: str) -> None:
    for topic, code in (("NONE", 1), ("T", 4 if "stdout" in full else 0)):
        with Path("/dev/full").open("wb") as sink:
            done = subprocess.run([*COMMAND, "cat", str(store), topic], stderr=sink, check=False, env=environment(),
                                  stdout=sink if "stdout" in full else subprocess.DEVNULL)  # fmt: skip
        assert done.returncode == code


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "limit"), [("ingest", 8192), ("export", 100)])
def test_a_file_that_may_not_grow_is_named(store: Path, tmp_path: Path, verb: str, limit: int) -> None:
    (tmp_path / "x.csv").write_text("k\n1\n")
    words = ["ingest", tmp_path / "s", tmp_path / "x.csv", "--topic", "T"] if verb == "ingest" else \
        ["export", store, tmp_path / "out", "--processes", 1]  # fmt: skip
    # CPython keeps a .pyc that the limit cuts short.
    done = subprocess.run([*COMMAND, *map(str, words)], capture_output=True, check=False, text=True,
                          env=environment({"PYTHONDONTWRITEBYTECODE": "1"}),
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))  # fmt: skip
    name = "commitlog/00000000000000000000" if verb == "ingest" else "part-00000-0.parquet"
    assert (done.returncode, done.stdout) == (4, ""), done.stderr
    assert f"{name}: File too large" in done.stderr


def test_a_width_may_be_a_field(store: Path) -> None:
    assert good("query", store, "T", "k1", "-f", "{keys:>{queue_offset}}|{keys:*>{size}}").out.endswith("*k1\n")
    assert_error(call("query", store, "T", "k1", "-f", "{tags:>{nothing}}"), 2, "-f names no field 'nothing'")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A message with two keys and odd properties, and one with neither."""
    path = tmp_path_factory.mktemp("odd") / "s"
    with rmq.open(path, "x") as opened:
        opened.put(rmq.Message("T", b"1", keys=["k1", "k2"], properties={"a.b": 'é"', "7": "\x1b[31m\u202e"}))
        opened.put(rmq.Message("T", b"2"))
    return path


def test_properties_in_a_template_are_the_json_of_csv(odd: Path) -> None:
    in_csv = [row["properties"] for row in good("cat", odd, "T", "-o", "csv").table]
    assert good("cat", odd, "T", "-f", "{properties}").out.splitlines() == in_csv
    assert json.loads(in_csv[0]) == {"a.b": 'é"', "7": "\x1b[31m\u202e", "KEYS": "k1 k2"}
    assert good("cat", odd, "T", "-f", "{properties:>5}|{properties!s}|{properties!r}").out.splitlines()[1] == \
        "   {}|{}|{}"  # fmt: skip


@pytest.mark.slow
def test_properties_in_a_template_are_json_on_a_terminal_too(odd: Path) -> None:
    line, _ = on_terminal("cat", odd, "T", "-f", "{properties}").out.splitlines()
    assert "\x1b" not in line
    assert json.loads(line)["7"] == "\x1b[31m\u202e"


def test_a_key_and_a_property_in_a_template_stand_in_brackets(odd: Path) -> None:
    done = good("cat", odd, "T", "-f", "{keys[0]}|{keys[1]:>3}|{keys[2]}|{keys}|{properties[a.b]}|{body}")
    assert done.out == 'k1| k2||k1 k2|é"|1\n|   ||||2\n'


@pytest.mark.parametrize("field", ["body.__class__", "keys.count", "properties.a", "body[0]", "keys[-1]", "keys[x]",
                                   "keys[0][0]", "keys[0].x", "properties[a]x", "topic!r.x"])  # fmt: skip
def test_a_template_reaches_into_no_field_but_keys_and_properties(odd: Path, field: str) -> None:
    for template in (f"{{{field}}}", f"{{tags:>{{{field}}}}}"):
        done = call("cat", odd, "T", "-f", template)
        assert_error(done, 2, "-f", "" if "!" in field or field.endswith("]x") else f"no {{{field}}}: parts of a field")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16"])
def test_stdout_and_stderr_are_utf8_whatever_the_locale(tmp_path: Path, encoding: str) -> None:
    with rmq.open(tmp_path / "s", "x") as opened:
        opened.put_many([rmq.Message("ключ", "é€".encode())] * 2)
    extra = {"PYTHONIOENCODING": encoding}
    done = run("cat", tmp_path / "s", "ключ", "--limit", 1, "-f", "{topic} {body}", extra=extra)
    assert (done.out, done.notes) == ("ключ é€\n", ["rmq: --limit 1 reached; more messages follow"])
    assert_error(run("cat", tmp_path / "s", "ключи", extra=extra), 1, "no topic 'ключи'; did you mean 'ключ'?")


def test_an_export_of_a_topic_that_no_message_can_have_is_one_line(store: Path, tmp_path: Path) -> None:
    assert_error(call("export", store, tmp_path / "none", "--topic", "\udcff"), 1, f"{store}: no topic '\\udcff'")
    assert not (tmp_path / "none").exists()
    some = good("export", store, tmp_path / "some", "--topic", "\udcff", "--topic", "T", "--processes", 1)
    assert (some.notes[0], some.rows[0]["row_count"]) == (f"rmq: {store}: no topic '\\udcff'", 2)


@pytest.mark.parametrize("option", ["--columns", "--partition-by"])
def test_a_name_that_an_option_repeats_is_told(store: Path, tmp_path: Path, option: str) -> None:
    done = call("export", store, tmp_path / "out", option, "topic,queue_id,topic")
    assert_error(done, 2, f"{option} repeats 'topic'")


def test_a_key_column_that_is_named_twice_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("k\n1\n")
    done = call("ingest", tmp_path / "s", tmp_path / "x.csv", "--topic", "T", "--key-column", "k", "--key-column", "k")
    assert_error(done, 2, "--key-column repeats 'k'")
    assert not (tmp_path / "s").exists()
