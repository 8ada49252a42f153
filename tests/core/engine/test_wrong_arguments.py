"""Wrong arguments of save, load and public constructors, wrong options, and what a caller can do."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parameter import UninitializedParameter

import megackpt
from megackpt import (
    AsyncOptions,
    Checkpointer,
    DeclarationError,
    FormatError,
    IntegrityError,
    KeepBest,
    KeyRule,
    LoadOptions,
    LocalTier,
    MemoryTier,
    MismatchError,
    MissingKeyError,
    NotACheckpointError,
    PerRankValue,
    ReplicatedValue,
    Retention,
    SaveOptions,
    SaveSchedule,
    ShardedLayout,
    ShardedObject,
    ShardedTensor,
    StorageError,
    Tiers,
    convert,
    diff,
    load,
    load_common_state_dict,
    repair,
    save,
    verify,
)
from megackpt import inspect as inspect_checkpoint
from megackpt.contrib.megatron.config import CheckpointConfig
from megackpt.engine.background.prepared_save import sendable
from megackpt.engine.background.staging_memory import StagingMemory
from megackpt.formats.native import NativeSaveStrategy
from megackpt.ground.arguments import checked_step
from megackpt.options import VerifyOptions
from megackpt.plans.metadata import DIGEST_BLOCK_BYTES
from megackpt.run.checkpointer import Groups
from megackpt.storage import FileOptions, ObjectOptions
from megackpt.testing.world import SimulatedWorld
from megackpt.training.parallel import ParallelGroups, ParallelLayout, TpSharding
from tests.support.checkpoints import flip
from tests.support.states import sharded
from tests.support.worlds import error_of_all, saving
from tests.support.writers import FullDiskStrategy

REQUIRED: dict[type, dict[str, Any]] = {
    AsyncOptions: {},
    CheckpointConfig: {},
    FileOptions: {},
    Groups: {},
    KeepBest: {"metric": "loss"},
    KeyRule: {"keys": "*"},
    LoadOptions: {},
    LocalTier: {"path": "/tmp/tier"},
    MemoryTier: {"path": "/dev/shm/tier"},
    ObjectOptions: {},
    Retention: {},
    SaveOptions: {},
    SaveSchedule: {},
    Tiers: {},
    VerifyOptions: {},
}
"""Every class of options, and what it cannot be made without."""

ALL = [(kind, field.name) for kind in REQUIRED for field in fields(kind) if field.init]
ARGUMENTS = [name for name in inspect.signature(Checkpointer).parameters if name != "root"]


@pytest.mark.parametrize(("kind", "name"), ALL, ids=[f"{kind.__name__}.{name}" for kind, name in ALL])
def test_an_option_of_a_wrong_kind_raises_an_error_with_its_name(kind: type, name: str) -> None:
    for value in (object(), math.nan, b"bytes"):
        with pytest.raises(DeclarationError, match=re.escape(name.removeprefix("dist_ckpt_"))):
            kind(**{**REQUIRED[kind], name: value})


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_a_checkpointer_of_a_wrong_kind_raises_an_error_with_its_name(
    tmp_path: Path, name: str
) -> None:
    for value in (object(), math.nan, b"bytes"):
        with pytest.raises(DeclarationError, match=re.escape(name)):
            Checkpointer(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (SaveOptions, {"timeout_s": "60"}, "timeout_s is '60'; give a finite number above 0"),
        (SaveOptions, {"timeout_s": True}, "timeout_s is True"),
        (SaveOptions, {"timeout_s": math.inf}, "timeout_s is inf"),
        (SaveOptions, {"timeout_s": 1e30}, r"timeout_s is 1e\+30; give a number above 0 and up to 1e\+09"),
        (SaveOptions, {"part_bytes": 1.5}, "part_bytes is 1.5; give an int of at least 1"),
        (SaveOptions, {"part_bytes": 1 << 70}, "give an int from 1 to 4611686018427387904"),
        (SaveOptions, {"assume_constant_structure": "no"}, "is 'no'; give True or False"),
        (SaveOptions, {"parity": 0}, "parity is 0; .* how many data files share a parity file; or None"),
        (SaveOptions, {"compare_replicas": "error"}, "give Policy.ERROR, WARN or IGNORE"),
        (SaveOptions, {"parity": -1}, "how many data files share a parity file"),
        (SaveOptions, {"parity": 1.5}, "how many data files share a parity file"),
        (SaveOptions, {"parity": True}, "how many data files share a parity file"),
        (AsyncOptions, {"coordinator_host": ""}, "coordinator_host is ''; give text"),
        (AsyncOptions, {"when_busy": "drop"}, "when_busy='drop' is not known. Give one of wait, queue, skip"),
        (AsyncOptions, {"staging_bytes": 0}, "staging_bytes is 0"),
        (AsyncOptions, {"nice": 20}, "nice is 20; give a number from 0 to 19"),
        (AsyncOptions, {"ionice": "realtime"}, "Give one of idle, low"),
        (AsyncOptions, {"start_timeout_s": -1}, "start_timeout_s is -1"),
        (AsyncOptions, {"nice": True}, "nice is True; give a number from 0 to 19"),
        (LoadOptions, {"exclude": "optimizer.*"}, r"exclude is 'optimizer.\*'; give a tuple of texts"),
        (LoadOptions, {"rules": [KeyRule(keys="*")]}, "give a tuple of rules"),
        (LoadOptions, {"rename": {"a": 3}}, "give stored keys by other names"),
        (
            LoadOptions,
            {"exchange": "pigeons"},
            "exchange='pigeons' is not known. Give one of auto, direct, all_to_all",
        ),
        (LoadOptions, {"exchange_bytes": 0}, "exchange_bytes is 0"),
        (LoadOptions, {"cpu_transfer": False}, "cpu_transfer=False has no meaning with exchange='auto'"),
        (LoadOptions, {"cpu_transfer": False, "exchange": "all_to_all"}, "only 'two_stage' moves data"),
        (LoadOptions, {"on_corrupt": "ignore"}, "on_corrupt='ignore' is not known"),
        (LoadOptions, {"copies": ("a",)}, "set on_corrupt='fallback' as well"),
        (LoadOptions, {"on_corrupt": "fallback", "copies": ["a"]}, "give a tuple of locations"),
        (LoadOptions, {"on_corrupt": "fallback", "verify": False}, "needs verify=True"),
        (KeyRule, {"keys": "*", "cast": "warn"}, "KeyRule.cast is 'warn'; give Policy.ERROR"),
        (
            ObjectOptions,
            {"config": {"secret": 5}},
            "config is a dict; it must be a mapping whose names and values are all text",
        ),
        (ObjectOptions, {"max_retries": -1}, "max_retries is -1; give an int of at least 0, 0 for none"),
        (MemoryTier, {"path": ""}, "MemoryTier: path is ''; give a directory"),
        (MemoryTier, {"path": "/t", "every": 1.5}, "MemoryTier: every is 1.5"),
        (SaveSchedule, {"agree_s": None}, "SaveSchedule.agree_s is None"),
    ],
)
def test_the_error_states_what_to_give(kind: type, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        kind(**arguments)


@pytest.mark.parametrize("step", ["2", 2.0, math.nan, None, True, -1, 1 << 70, torch.zeros(2)])
def test_a_step_that_is_no_whole_number_raises_an_error_wherever_it_is_given(
    tmp_path: Path, step: Any
) -> None:
    checkpointer = Checkpointer(tmp_path)
    asked = [checkpointer.should_save, checkpointer.pin, checkpointer.metrics, checkpointer.directory]
    for ask in (*asked, lambda step: checkpointer.save(step, {})):
        with pytest.raises(DeclarationError, match=r"step is .*; steps are counted from 0, in whole numbers"):
            ask(step)
    assert list(tmp_path.iterdir()) == []


def test_a_step_may_be_an_integer_of_another_library() -> None:
    assert checked_step(torch.tensor(3)) == 3


@pytest.mark.parametrize("location", [None, b"run", 3, "", "http://host/run", Path("s3:/bucket/run")])
def test_what_is_no_location_is_an_error_of_every_function_that_takes_one(location: Any) -> None:
    for use in (
        Checkpointer,
        lambda location: save({}, location),
        lambda location: load({}, location),
        inspect_checkpoint,
        verify,
        lambda location: diff(location, location),
        lambda location: convert(location, location, "megackpt"),
        repair,
    ):
        message = r"not a location|empty path|no store|two slashes"
        with pytest.raises((DeclarationError, StorageError), match=message):
            use(location)


def test_wrong_arguments_of_functions_raise_an_error_with_their_names(tmp_path: Path) -> None:
    for arguments in ({"options": LoadOptions()}, {"plans": 3}, {"group": "world"}):
        with pytest.raises(DeclarationError, match=f"{next(iter(arguments))} is "):
            save({}, tmp_path, **arguments)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match=r"consistancy_check is 3; give a function"):
        save({}, tmp_path, preprocess_common_before_consistancy_check=3)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match=r"3.5 is not a save strategy: .* Give the name of a format"):
        save({}, tmp_path, 3.5)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match=r"Options are given by name: options=SaveOptions"):
        save({}, tmp_path, SaveOptions())  # type: ignore[arg-type]
    save({"a": 1}, tmp_path / "saved")
    with pytest.raises(DeclarationError, match=r"Options are given by name: options=LoadOptions"):
        load({}, tmp_path / "saved", LoadOptions())  # type: ignore[call-overload]
    for swapped in (save, load):
        with pytest.raises(DeclarationError, match=r"a dict is not a location .* The state comes first"):
            swapped(str(tmp_path), {"a": torch.ones(2)})  # type: ignore[arg-type,call-overload]
    with pytest.raises(DeclarationError, match=r"options is SaveOptions.*; give LoadOptions"):
        load({}, tmp_path, options=SaveOptions())  # type: ignore[call-overload]
    with pytest.raises(DeclarationError, match=r"metrics is 0.5; give numbers by name"):
        Checkpointer(tmp_path).save(1, {}, metrics=0.5)  # type: ignore[arg-type]
    assert list(tmp_path.glob("iter*")) == []


@pytest.mark.parametrize("function", [inspect_checkpoint, verify, diff, convert, repair])
def test_arguments_of_maintenance_functions_are_checked_before_anything_is_opened(
    tmp_path: Path, function: Any
) -> None:
    locations = {
        diff: [tmp_path / "a", tmp_path / "b"],
        convert: [tmp_path / "a", tmp_path / "b", "megackpt"],
    }
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY or name == "copies":
            for value in (object(), math.nan, b"bytes"):
                with pytest.raises(DeclarationError, match=re.escape(name)):
                    function(*locations.get(function, [tmp_path / "a"]), **{name: value})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_key_is_named_with_the_most_similar_one(tmp_path: Path) -> None:
    save({"w": sharded("decoder.weight", torch.zeros(2))}, tmp_path / "c")
    with pytest.raises(
        MissingKeyError, match=r"'decoder.wieght' \(the checkpoint has 'decoder.weight'\)"
    ) as caught:
        load({"w": sharded("decoder.wieght", torch.zeros(2))}, tmp_path / "c")
    assert caught.value.key == "decoder.wieght"
    assert isinstance(caught.value, KeyError)
    assert "load_sharded_metadata" in str(caught.value)


def test_common_state_that_differs_is_named_by_path_and_rank(tmp_path: Path) -> None:
    def state_of(rank: int) -> dict[str, Any]:
        return {"args": {"lr": 1.0, "rank": rank}}

    def rate(common: Any) -> dict[str, float]:
        return {"lr": common["args"]["lr"]}

    error = error_of_all(3, saving(state_of, tmp_path), MismatchError)
    assert "'args.rank' on rank(s) 1, 2" in str(error)
    assert "args.lr" not in str(error)
    assert "ShardedObject" in str(error)
    SimulatedWorld(3).run(saving(state_of, tmp_path, preprocess_common_before_consistancy_check=rate))
    assert load_common_state_dict(tmp_path)["args"]["rank"] == 0


def test_an_entity_without_data_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="'w' has no data to save"):
        save({"w": sharded("w", torch.zeros(1)).without_data()}, tmp_path / "c")


def test_an_empty_or_half_written_directory_is_not_a_checkpoint(tmp_path: Path) -> None:
    message = r"is not a checkpoint: it has no metadata.json.*did not finish"
    with pytest.raises(NotACheckpointError, match=message):
        load({}, tmp_path)
    save({"w": sharded("w", torch.zeros(2))}, tmp_path / "c")
    (tmp_path / "c" / "metadata.json").unlink()
    with pytest.raises(NotACheckpointError):
        load({}, tmp_path / "c")


def test_a_flipped_bit_is_found_and_named_by_key_file_and_range(tmp_path: Path) -> None:
    save({"a": sharded("a", torch.zeros(70_000)), "b": sharded("b", torch.ones(70_000))}, tmp_path / "c")
    (file,) = (tmp_path / "c" / "data").iterdir()
    flip(file, -5)
    nbytes = file.stat().st_size
    load({"a": sharded("a", torch.zeros(70_000))}, tmp_path / "c")
    with pytest.raises(IntegrityError) as caught:
        load({"b": sharded("b", torch.zeros(70_000))}, tmp_path / "c")
    assert caught.value.key == "b"
    low = nbytes - 70_000 * 4 + DIGEST_BLOCK_BYTES
    assert f"the bytes {low}:{nbytes} of {file}" in str(caught.value)
    load({"b": sharded("b", torch.zeros(70_000))}, tmp_path / "c", options=megackpt.LoadOptions(verify=False))


@pytest.mark.parametrize(("key", "block"), [("a", 0), ("b", 3), ("b", 4), ("c", 0)])
def test_damage_is_named_where_several_chunks_are_read_at_once(tmp_path: Path, key: str, block: int) -> None:
    nbytes = {"a": 4000, "b": 600 * 512 * 4, "c": 8000}  # b has 5 blocks
    arrays = {"a": torch.zeros(1000), "b": torch.zeros(600, 512), "c": torch.zeros(2000)}
    save({k: sharded(k, t) for k, t in arrays.items()}, tmp_path / "c")
    (file,) = (tmp_path / "c" / "data").iterdir()
    start = file.stat().st_size - sum(n for k, n in nbytes.items() if k >= key)
    low, high = start + block * DIGEST_BLOCK_BYTES, start + min((block + 1) * DIGEST_BLOCK_BYTES, nbytes[key])
    flip(file, low)
    half = sharded("b", torch.zeros(600, 256), (1, 0, 2))  # rows lie apart in b
    with pytest.raises(IntegrityError, match=f"'{key}'.* the bytes {low}:{high} of"):
        load({"b": half, **{k: sharded(k, torch.zeros_like(arrays[k])) for k in "ac"}}, tmp_path / "c")


@pytest.mark.parametrize("kind", ["index", "common"])
def test_damage_to_small_files_is_found(tmp_path: Path, kind: str) -> None:
    save({"w": sharded("w", torch.zeros(2)), "lr": 0.25}, tmp_path / "c")
    (file,) = (tmp_path / "c").glob(f"{kind}-*")
    flip(file, -1)
    with pytest.raises(IntegrityError, match=f"{kind}.*differs from what was saved"):
        load({"w": sharded("w", torch.zeros(2))}, tmp_path / "c")


def test_a_missing_or_truncated_data_file_is_named(tmp_path: Path) -> None:
    save({"w": sharded("w", torch.zeros(2000))}, tmp_path / "c")
    (file,) = (tmp_path / "c" / "data").iterdir()
    os.truncate(file, file.stat().st_size - 4)
    with pytest.raises(FormatError, match=file.name):
        load({"w": sharded("w", torch.zeros(2000))}, tmp_path / "c")
    file.unlink()
    with pytest.raises(StorageError, match=file.name):
        load({"w": sharded("w", torch.zeros(2000))}, tmp_path / "c")


def test_an_unknown_format_or_version_raises_an_error_that_lists_the_known_ones(tmp_path: Path) -> None:
    save({}, tmp_path / "c")
    manifest = tmp_path / "c" / "metadata.json"
    version = '"sharded_backend_version": '
    manifest.write_text(manifest.read_text().replace(f"{version}1", f"{version}99"))
    with pytest.raises(FormatError, match=r"version 99 cannot be read here. Known are megackpt version 1"):
        load({}, tmp_path / "c")
    message = r"No strategy saves format 'parquet'. Known are megackpt version 1"
    with pytest.raises(DeclarationError, match=message):
        save({}, tmp_path / "d", "parquet")


def test_a_directory_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        save({}, tmp_path / "file" / "c")


class Unsendable(NativeSaveStrategy):
    def __init__(self) -> None:
        self.made = (n for n in range(3))


def test_a_strategy_that_cannot_be_sent_to_the_writer_raises_an_error() -> None:
    class Local(NativeSaveStrategy):
        pass

    with pytest.raises(DeclarationError, match=r"Local is defined in .* a function.* Define it in a module"):
        sendable(Local())
    with pytest.raises(DeclarationError, match=r"Unsendable cannot be sent .* cannot pickle 'generator'"):
        sendable(Unsendable())
    strategy = FullDiskStrategy()
    assert sendable(strategy) is strategy


def test_memory_that_cannot_be_allocated_is_an_error_with_what_to_do() -> None:
    arena = StagingMemory()
    message = r"cannot be allocated .* AsyncOptions.staging_bytes a smaller number"
    with pytest.raises(StorageError, match=message):
        arena.resize(1 << 62)
    arena.resize(10)
    assert arena.nbytes == 4096
    arena.close()


T: Any = torch.zeros(4, 2)
WHOLE = slice(0, 8)
WHOLE = ("w", T, T.dtype, (4, 2), (4, 2), (0, 0))
# Without their types, which would find these errors.
cut: Any = ShardedTensor.from_rank_offsets
flat: Any = ShardedTensor.from_rank_offsets_flat
split: Any = ShardedLayout.split
tensor: Any = ShardedTensor
value: Any = ShardedObject
own: Any = PerRankValue
shared: Any = ReplicatedValue
layout: Any = ParallelLayout
offline: Any = ParallelGroups.offline
sharding: Any = TpSharding

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "two numbers": (lambda: cut("w", T, (0, 0)), r"\(0, 0\) is not \(axis, index, fragments\)"),
    "numbers": (lambda: cut("w", T, 0, 1, 2), "offset 0 is not"),
    "text": (lambda: cut("w", T, ("0", 0, 2)), "Give three ints"),
    "fraction": (lambda: cut("w", T, (0, 0.5, 2)), "Give three ints"),
    "a list of offsets": (lambda: cut("w", T, [(0, 0, 2)]), "Give three ints"),
    "a list as data": (lambda: cut("w", [1, 2]), "data is a list, not a tensor"),
    "a nested tensor": (lambda: cut("w", torch.nested.nested_tensor([T, T[:1]])), "the tensor is nested"),
    "a tensor of a lazy module": (lambda: cut("w", UninitializedParameter()), "lazy module that has not run"),
    "no data": (lambda: cut("w", None), "data is a NoneType, not a tensor"),
    "an array of numpy": (lambda: cut("w", T.numpy()), "data is a ndarray, not a tensor"),
    "a number as key": (lambda: cut(3, T), "must be a non-empty string"),
    "key and data exchanged": (lambda: cut(T, "w"), "Give the key, then the tensor"),
    "prepended text": (lambda: cut("w", T, prepend_axis_num="1"), "must be an int >= 0"),
    "prepended fraction": (lambda: cut("w", T, prepend_axis_num=1.0), "must be an int >= 0"),
    "replica text": (lambda: cut("w", T, replica_id="0"), "replica_id '0' must be an int"),
    "a number as shape": (lambda: flat("w", T[0], 8, flattened_range=WHOLE), "must be a sequence of ints"),
    "flat": (lambda: flat("w", T.view(-1), (4, 2), (0, 0), flattened_range=WHOLE), r"\(0, 0\) is not"),
    "two numbers as range": (lambda: flat("w", T.view(-1), (4, 2), flattened_range=(0, 8)), "slice"),
    "if_missing": (lambda: tensor(*WHOLE, if_missing="drop"), "if_missing"),
    "an object with a number as shape": (lambda: value("o", 1, 1, 0), "sequence of ints"),
    "a dim as text": (lambda: split("w", T, "0", {"a": 2, "b": 2}), "not an int and ints by name"),
    "sizes without names": (lambda: split("w", T, 0, [2, 2]), "not an int and ints by name"),
    "sizes as fractions": (lambda: split("w", T, 0, {"a": 2.0, "b": 2.0}), "not an int and ints by name"),
    "a layout of two numbers": (lambda: split("w", T, 0, {"a": 4}, (0, 0)), r"\(0, 0\) is not"),
    "a layout of a list": (lambda: split("w", [1], 0, {"a": 1}), "data is a list, not a tensor"),
    "a value without a name": (lambda: own(3, 1), "non-empty string"),
    "elsewhere": (lambda: own("a", 1, elsewhere="drop"), "elsewhere"),
    "a replicated value": (lambda: shared(3, 1), "non-empty string"),
    "tp as text": (lambda: layout(tp="2"), "tp='2'"),
    "tp as fraction": (lambda: layout(tp=2.0), r"tp=2\.0"),
    "a rank as text": (lambda: offline(ParallelLayout(tp=2), "0"), "rank '0' does not exist"),
    "ranks as layout": (lambda: offline(2, 0), "give ParallelLayout"),
    "a sharding along text": (lambda: sharding(dim="0"), r"TpSharding\.dim is '0'"),
    "a sharding from the end": (lambda: sharding(dim=-1), r"TpSharding\.dim is -1"),
    "components in a list": (lambda: sharding(dim=0, components=[2, 2]), r"TpSharding\.components"),
    "tokens without padding": (lambda: sharding(dim=0, unpadded_extent=5), "without allow_shape_mismatch"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_an_error_that_shows_it(name: str) -> None:
    make, text = WRONG[name]
    with pytest.raises(DeclarationError, match=text):
        make()
