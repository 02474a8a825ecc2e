"""What a configuration may say: a broker's own file, defaults, and what the files of a store say already."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SIZES
from test_store import CONFIG, message, numbers, put_to

import rmq
from rmq.mirror import MirroredStore
from rmq.objects import Location
from rmq.rebuilding import rebuild_sidecars
from rmq.snapshot import Snapshot
from rmq.windows import WindowedStore

BROKER_CONF = """\
# Licensed to the Apache Software Foundation (ASF) under one or more
brokerClusterName = DefaultCluster
brokerName = broker-a
brokerId = 0
namesrvAddr=10.0.0.1:9876;10.0.0.2:9876
listenPort=10911
! a remark
deleteWhen = 04
fileReservedTime = 48
brokerRole = ASYNC_MASTER
flushDiskType = SYNC_FLUSH
storePathRootDir=/data/rocketmq/store
storePathCommitLog=/data/rocketmq/store/commitlog
mappedFileSizeCommitLog=8192
mapedFileSizeConsumeQueue=100
mappedFileSizeConsumeQueue = 410
  maxHashSlotNum=50
maxIndexNum=300
maxMessageSize=65536
messageIndexEnable=FALSE
enabledAppendPropCRC=true
diskMaxUsedSpaceRatio=88
messageDelayLevel=1s 5s 10s

autoCreateTopicEnable=true
"""


def test_a_broker_conf_is_read(tmp_path: Path) -> None:
    (tmp_path / "broker.conf").write_bytes(BROKER_CONF.replace("\n", "\r\n").encode())
    given = {
        "file_reserved_time": 48, "flush_disk_type": "SYNC_FLUSH", "mapped_file_size_commit_log": 8192,
        "store_path_commit_log": "/data/rocketmq/store/commitlog", "mapped_file_size_consume_queue": 420,
        "max_hash_slot_num": 50, "max_index_num": 300, "max_message_size": 65536, "message_index_enable": False,
        "enabled_append_prop_crc": True, "disk_max_used_space_ratio": 88,
        "message_delay_level": "1s 5s 10s"}  # fmt: skip
    config = rmq.StoreConfig.from_broker_conf(tmp_path / "broker.conf")
    assert dataclasses.asdict(config) == dataclasses.asdict(rmq.StoreConfig()) | given


def test_a_broker_may_keep_files_for_no_time_and_any_ratio(tmp_path: Path) -> None:
    names = ("fileReservedTime", "diskMaxUsedSpaceRatio", "diskSpaceWarningLevelRatio", "diskSpaceCleanForciblyRatio")
    (tmp_path / "broker.conf").write_text("".join(f"{name}=0\n" for name in names))
    config = rmq.StoreConfig.from_broker_conf(tmp_path / "broker.conf")
    assert (config.file_reserved_time, config.disk_max_used_space_ratio, config.disk_space_warning_level_ratio,
            config.disk_space_clean_forcibly_ratio) == (0, 0, 0, 0)  # fmt: skip
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        store.put(message(0))
        assert not store.clean().removed


def test_help_names_the_fields_of_a_configuration() -> None:
    told = inspect.signature(rmq.StoreConfig).parameters.values()
    assert [(parameter.name, parameter.default, parameter.kind) for parameter in told] == [
        (field.name, field.default, inspect.Parameter.KEYWORD_ONLY) for field in dataclasses.fields(rmq.StoreConfig)]


@pytest.mark.parametrize(("lines", "host"), [
    ("brokerIP1=10.1.2.3\nlistenPort=10921", "10.1.2.3:10921"), ("listenPort = 30911\nbrokerIP1 = ::1", "[::1]:30911"),
    ("brokerIP1=10.1.2.3", "10.1.2.3:10911"), ("brokerIP1=10.1.2.3\nlistenPort=010922", "10.1.2.3:10922"),
    ("storeHost=1.2.3.4:5\nbrokerIP1=10.1.2.3", "1.2.3.4:5"),
    ("brokerIP1=10.1.2.3\nstoreHost=1.2.3.4:5", "1.2.3.4:5"), ("listenPort=10921", None), ("brokerIP1=broker-a", None),
    ("brokerIP1=10.1.2", None), ("brokerIP1=", None), ("brokerIP2=10.1.2.3", None),
])  # fmt: skip
def test_the_host_of_a_broker_conf_is_what_the_broker_stamps(tmp_path: Path, lines: str, host: str | None) -> None:
    (tmp_path / "broker.conf").write_text(f"brokerId=0\n{lines}\n")
    config = rmq.StoreConfig.from_broker_conf(tmp_path / "broker.conf")
    assert (config.store_host, config.is_explicit("store_host")) == (host or "127.0.0.1:10911", host is not None)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        store.put(message(0))
        assert store.lookup(0).store_host == config.store_host


@pytest.mark.parametrize("port", ["0", "65536", "-1", "x", "", "1_0", "10000000000000000000080", "1" * 5000])
def test_a_port_that_is_none_is_named_with_its_line(tmp_path: Path, port: str) -> None:
    (tmp_path / "broker.conf").write_text(f"brokerId=0\nlistenPort={port}\n")
    with pytest.raises(ValueError, match=f"broker.conf, line 2: listenPort has no value '{port}'"):
        rmq.StoreConfig.from_broker_conf(tmp_path / "broker.conf")


@pytest.mark.parametrize("line", ["maxIndexNum:300", "maxIndexNum : 300", "maxIndexNum 300", "maxIndexNum\t=\t300",
                                  "maxIndexNum=\\\n  300", "max\\u0049ndexNum=300"])  # fmt: skip
def test_a_broker_conf_is_a_java_properties_file(tmp_path: Path, line: str) -> None:
    (tmp_path / "broker.conf").write_text(f"brokerId=0\n{line}\nmaxHashSlotNum=50\n")
    config = rmq.StoreConfig.from_broker_conf(tmp_path / "broker.conf")
    assert (config.max_index_num, config.max_hash_slot_num) == (300, 50)


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_lines_of_a_broker_conf_end_as_in_java(tmp_path: Path, end: str) -> None:
    (tmp_path / "broker.conf").write_bytes(f"# first{end}maxIndexNum=300{end}{end}maxHashSlotNum=x".encode())
    with pytest.raises(ValueError, match=r"broker\.conf, line 4: maxHashSlotNum has no value 'x'"):
        rmq.StoreConfig.from_broker_conf(tmp_path / "broker.conf")


@pytest.mark.parametrize("number", ["5_00", "0x10", "5.0", "+ 5", "--5"])
def test_a_number_that_java_does_not_read_is_none(tmp_path: Path, number: str) -> None:
    (tmp_path / "broker.conf").write_text(f"maxIndexNum={number}\n")
    with pytest.raises(ValueError, match=r"broker\.conf, line 1: maxIndexNum has no value"):
        rmq.StoreConfig.from_broker_conf(tmp_path / "broker.conf")


def test_a_number_that_java_reads_counts(tmp_path: Path) -> None:
    (tmp_path / "broker.conf").write_text("maxIndexNum=+0300\n")
    assert rmq.StoreConfig.from_broker_conf(tmp_path / "broker.conf").max_index_num == 300


@pytest.mark.parametrize("end", ["\\", "\\\n", "\\\n\n"])
def test_a_last_line_that_ends_in_a_backslash_counts(tmp_path: Path, end: str) -> None:
    (tmp_path / "broker.conf").write_text(f"brokerId=0\nflushDiskType=SYNC_FLUSH{end}")
    assert rmq.StoreConfig.from_broker_conf(tmp_path / "broker.conf").flush_disk_type == "SYNC_FLUSH"


def test_a_queue_file_of_whole_units_has_a_size_that_java_knows() -> None:
    most = 2**31 - 1 - (2**31 - 1) % 20
    assert rmq.StoreConfig(mapped_file_size_consume_queue=most - 1).mapped_file_size_consume_queue == most
    with pytest.raises(ValueError, match="mapped_file_size_consume_queue"):
        rmq.StoreConfig(mapped_file_size_consume_queue=most + 1)


def test_defaults_are_those_of_rocketmq() -> None:
    config = rmq.StoreConfig()
    assert (config.mapped_file_size_commit_log, config.mapped_file_size_consume_queue) == (1024**3, 6_000_000)
    assert (config.max_hash_slot_num, config.max_index_num) == (5_000_000, 20_000_000)
    assert (config.flush_disk_type, config.flush_interval_commit_log) == ("ASYNC_FLUSH", 500)
    assert (config.max_message_size, config.message_index_enable) == (4 * 1024**2, True)
    assert (config.file_reserved_time, config.disk_max_used_space_ratio) == (72, 75)
    assert (config.enabled_append_prop_crc, config.store_path_commit_log) == (False, None)
    assert (config.store_host, config.rocketmq_version) == ("127.0.0.1:10911", "5.3.3")


def test_a_config_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.max_index_num = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        rmq.StoreConfig(4096)  # type: ignore[misc]
    assert rmq.StoreConfig(**SIZES) == rmq.StoreConfig(**SIZES)


@pytest.mark.parametrize("own", [True, False], ids=["own", "foreign"])
def test_what_was_passed_must_not_contradict_the_files_and_defaults_never_do(tmp_path: Path, own: bool) -> None:
    put_to(tmp_path / "s", *(("T", i) for i in range(3)))
    with rmq.open(tmp_path / "s", "r+") as store:
        store.put(message(0))
    if not own:
        (tmp_path / "s/rmq/meta.json").unlink()
    for mode in ("r", "r+", "a"):
        for name, size in SIZES.items():
            with pytest.raises(ValueError, match=name if own else "max|mapped|index"):
                rmq.open(tmp_path / "s", mode, config=rmq.StoreConfig(**{name: size + 20}))
        for config in (None, rmq.StoreConfig(), rmq.StoreConfig(flush_disk_type="SYNC_FLUSH"), CONFIG):
            if own or config is CONFIG:
                with rmq.open(tmp_path / "s", mode, config=config) as store:
                    assert {name: getattr(store.config, name) for name in SIZES} == SIZES
                    assert len(numbers(store)) == 4


def test_the_version_of_an_own_store_stays_that_of_a_broker_s_may_be_told(tmp_path: Path) -> None:
    """Its index would hold entries by two rules, which verify calls damaged."""
    put_to(tmp_path / "s", ("T", 0))
    other = rmq.StoreConfig(rocketmq_version="4.7.0")
    for mode in ("r", "r+", "a"):
        with pytest.raises(ValueError, match=r"rocketmq_version=4\.7\.0 contradicts the store, which has 5\.3\.3"):
            rmq.open(tmp_path / "s", mode, config=other)
    shutil.rmtree(tmp_path / "s/rmq")
    with rmq.open(tmp_path / "s", "r+", config=CONFIG) as store:
        assert store.config.rocketmq_version == "5.3.3"
    with rmq.open(tmp_path / "s", "r+", config=other) as store:
        assert store.config.rocketmq_version == "4.7.0"


def test_numbers_of_numpy_are_ints(tmp_path: Path) -> None:
    config = rmq.StoreConfig(max_hash_slot_num=np.int64(10), max_index_num=np.uint16(20))
    assert (type(config.max_hash_slot_num), config.max_hash_slot_num, config.max_index_num) == (int, 10, 20)
    with rmq.IndexFile(tmp_path / "i", "x", max_hash_slot_num=np.int64(10), max_index_num=np.int64(20)) as file:
        assert file.put_keys(["T#k"], [7], [1]) == 1
    for wrong in (np.bool_(True), True, 10.0, np.float64(10)):
        with pytest.raises(TypeError, match="max_hash_slot_num must be int"):
            rmq.StoreConfig(max_hash_slot_num=wrong)


@pytest.mark.parametrize("host", ["born_host", "store_host"])
def test_a_version_without_ipv6_hosts_takes_none(tmp_path: Path, host: str) -> None:
    """Its brokers read such a record as broken, and drop the log from there on."""
    message = rmq.Message("T", b"0", **{host: "[::1]:5"})
    config = rmq.StoreConfig(rocketmq_version="4.5.2", mapped_file_size_commit_log=1 << 16)
    with rmq.open(tmp_path / "s", "x", config=config) as store:
        for put in (store.put, lambda one: store.put_many([one]), lambda one: store.put_batch([one])):
            with pytest.raises(rmq.IllegalMessageError, match="IPv6"):
                put(message)
        assert store.max_phy_offset == 0
    with pytest.raises(ValueError, match="store_host"):
        rmq.open(tmp_path / "t", "x", config=rmq.StoreConfig(rocketmq_version="4.5.2", store_host="[::1]:5"))
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("config", [{}, {"max_index_num": 9}, "conf", 0])
def test_what_is_no_config_is_refused_wherever_one_is_taken(tmp_path: Path, config: Any) -> None:
    rmq.open(tmp_path / "s", "x", config=rmq.StoreConfig(mapped_file_size_commit_log=65536)).close()
    for use in (rmq.open, rmq.verify, rmq.rebuild, lambda path, config: rmq.export(path, tmp_path / "t", config=config),
                lambda path, config: list(rebuild_sidecars(path, config)),
                partial(WindowedStore, maps_first=False, has_index=True),
                lambda path, config: MirroredStore(Snapshot.take(Location(f"file://{path}")), config)):  # fmt: skip
        with pytest.raises(TypeError, match="config must be StoreConfig"):
            use(tmp_path / "s", config=config)


@pytest.mark.parametrize("path", ["a\0b", "\ud800"])
def test_what_can_be_no_file_s_name_is_told_with_the_argument_s(tmp_path: Path, path: str) -> None:
    rmq.open(tmp_path / "s", "x").close()
    for name, use in (("path", rmq.open), ("path", rmq.verify), ("path", rmq.rebuild), ("path", rmq.IndexFile),
                      ("target", lambda target: rmq.export(tmp_path / "s", target)),
                      ("output", lambda output: rmq.rebuild(tmp_path / "s", output))):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name} holds"):
            use(path)


def test_a_config_takes_the_place_of_its_log_to_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text, taken in (("log", f"{tmp_path}/log"), ("a,,/b", f"{tmp_path}/a,/b"), (None, None), ("", "")):
        config = pickle.loads(pickle.dumps(rmq.StoreConfig(store_path_commit_log=text)))
        assert config.store_path_commit_log == taken
        assert config.is_explicit("store_path_commit_log")
        assert not config.is_explicit("max_hash_slot_num")
