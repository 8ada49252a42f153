"""`megackpt convert`: equal in every format, all or nothing, and small; to and from Hugging Face folders."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.cli import main
from megackpt.cli.entry import BAD_INPUT, UNREADABLE
from megackpt.comm import SingleProcess
from megackpt.engine.checkpoint.manifest import is_committed
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.engine.data.tensor_bytes import as_bits
from megackpt.entities import ShardedStateDict
from megackpt.errors import CheckpointError, IntegrityError, StorageError, UnserializableError
from megackpt.formats.native import NativeSaveStrategy
from megackpt.formats.registry import save_strategies, save_strategy
from megackpt.formats.strategy import ChunkParts, SaveStrategy
from megackpt.maps import family_of
from megackpt.maps.megatron import megatron_map
from megackpt.plans.planning import SavePlan
from megackpt.storage import LocalStore, MemoryStore, Store, open_store
from megackpt.testing.faulty_store import FaultyStore
from megackpt.testing.identical import difference
from megackpt.testing.world import SimulatedWorld
from tests.support import checkpoints
from tests.support.checkpoints import files_below, flip
from tests.support.command_line import CommandLine
from tests.support.effort import sampled
from tests.support.huggingface_folders import assert_same_tensors, folder_tensors, random_config, saved_model
from tests.support.states import random_arrays
from tests.support.worlds import saving
from tests.support.zarr_v1 import copy_as_zarr_v1

FORMATS = sorted(f"{strategy.backend}:{strategy.version}" for strategy in save_strategies())
ZARR_1 = "zarr:1"  # which is only read
NATIVE = "megackpt:1"
RANKS = 2
MIB = 1 << 20
COMMON = {"step": 7, "lr": 3e-4, "betas": [0.9, 0.95], "rng": torch.arange(4), "empty": {}}
CONTENT = {"layout": {"tp": 2}}


def state_of(rank: int) -> ShardedStateDict:
    """Blocks, uneven blocks, flat ranges, replicas, odd dtypes, nothing at all; objects per rank."""
    uneven = ((0, 2), (2, 5))[rank]
    nan = torch.tensor([0x7FC01234, 0x80000000 - 2**32, rank], dtype=torch.int32).view(torch.float32)
    kinds = checkpoints.state_of(rank)
    return {
        **{key: kinds[key] for key in ("block", "flat", "half", "object")},
        "uneven": ShardedTensor(
            "uneven", torch.arange(*uneven), torch.int64, (uneven[1] - uneven[0],), (5,), (uneven[0],)
        ),
        "bits": ShardedTensor.from_rank_offsets("bits", nan, (0, rank, 2)),
        "wide": ShardedTensor.from_rank_offsets(
            "wide", torch.tensor([complex(1, float("nan")), 2j], dtype=torch.complex128), replica_id=rank
        ),
        "scalar": ShardedTensor.from_rank_offsets("scalar", torch.tensor(2.5), replica_id=rank),
        **COMMON,
    }


def saved(directory: Path, backend: str | None = None) -> Path:
    SimulatedWorld(RANKS).run(saving(state_of, directory, backend, content_metadata=CONTENT))
    return directory


def everything_in(directory: Any) -> dict[str, Any]:
    common = megackpt.load_common_state_dict(directory)
    # Which tensors of common state are stored as arrays is up to the format.
    arrays = megackpt.load_plain_tensors(directory)
    tensors = {key: tensor for key, tensor in arrays.items() if key not in common}
    asked = {str(i): ShardedObject("object", None, (RANKS,), (i,)) for i in range(RANKS)}
    loaded = megackpt.load(dict(asked), directory)
    return {
        "tensors": {key: as_bits(tensor) for key, tensor in sorted(tensors.items())},
        "dtypes": {key: str(tensor.dtype) for key, tensor in sorted(tensors.items())},
        "objects": {key: loaded[key] for key in asked},
        "common": common,
        "content": megackpt.load_content_metadata(directory),
    }


def convert(source: Store, target: Store, strategy: SaveStrategy | None = None, **options: Any) -> None:
    megackpt.convert(source, target, strategy or NativeSaveStrategy(), group=SingleProcess(), **options)


def copy_of(store: Store, *, without: str) -> Store:
    copy = MemoryStore()
    for name in store.names():
        if name != without:
            copy.write(name, store.read(name, max_bytes=MIB))
    return copy


def files_in(directory: Path) -> list[str]:
    return [str(file.relative_to(directory)) for file in files_below(directory, "*")]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native checkpoint, which no test changes."""
    return saved(tmp_path_factory.mktemp("source") / "c")


@pytest.fixture(scope="module")
def everything(source: Path) -> dict[str, Any]:
    return everything_in(source)


@pytest.fixture(scope="module", params=[*FORMATS, ZARR_1])
def in_first_format(request: pytest.FixtureRequest, source: Path, everything: dict[str, Any]) -> Path:
    """The source as it was converted to a format."""
    directory = source.with_name(request.param)
    if request.param == ZARR_1:
        copy_as_zarr_v1(source, directory)
    else:
        assert main(["convert", str(source), str(directory), "--to", request.param]) == 0
    assert difference(everything, everything_in(directory)) is None
    return directory


@pytest.mark.parametrize("second", FORMATS)
def test_converting_from_format_to_format_and_back_changes_no_bit(
    tmp_path: Path, in_first_format: Path, second: str, everything: dict[str, Any], cli: CommandLine
) -> None:
    steps = [in_first_format, tmp_path / "second", tmp_path / "back"]
    for (before, after), name in zip(itertools.pairwise(steps), (second, NATIVE), strict=True):
        cli.run("convert", before, after, "--to", name)
        assert difference(everything, everything_in(after)) is None


def test_chunks_are_not_resharded(tmp_path: Path, source: Path, cli: CommandLine) -> None:
    cli.run("convert", source, tmp_path / "target", "--to", NATIVE)
    tables = [
        (contents := open_checkpoint(open_store(d))).chunks(contents.arrays).table
        for d in (source, tmp_path / "target")
    ]
    rows = [[table.describe(row) for row in range(len(table))] for table in tables]
    assert rows[0] == rows[1]
    assert "[0:6, 0:8] flat 0:21" in rows[0]


def test_a_damaged_source_fails_the_check_and_leaves_nothing(tmp_path: Path, cli: CommandLine) -> None:
    source, target = saved(tmp_path / "source"), tmp_path / "target"
    file = sorted((source / "data").iterdir())[0]
    flip(file, -1)
    out, err = cli.run("convert", source, target, "--to", NATIVE, code=1)
    assert (out, err.count("\n")) == ("", 1)
    assert "differs" in err
    assert file.name in err
    assert files_in(target) == []


@sampled(2)
@pytest.mark.parametrize("name", FORMATS)
def test_a_target_that_fails_on_any_operation_is_left_without_a_checkpoint(source: Path, name: str) -> None:
    backend, version = name.split(":")
    failed = []
    for nth in itertools.count():
        faulty = FaultyStore(MemoryStore(), fail_at=nth)
        try:
            convert(open_store(source), faulty, save_strategy((backend, int(version))))
        except StorageError:
            assert not is_committed(faulty)
            assert faulty.names() == []
            failed.append(faulty.operations[nth].kind)
        if nth >= len(faulty.operations):
            break
    assert {"create", "sync", "replace"} < set(failed)  # the commit too


@pytest.mark.parametrize("name", [*FORMATS, ZARR_1])
def test_a_source_that_lacks_a_file_gives_what_a_load_of_it_sees_or_nothing(
    tmp_path: Path, source: Path, name: str
) -> None:
    whole = MemoryStore()
    if name == ZARR_1:
        copy_as_zarr_v1(source, whole)
    else:
        backend, version = name.split(":")
        convert(open_store(source), whole, save_strategy((backend, int(version))))
    failed = 0
    for lost in whole.names():
        source, target = copy_of(whole, without=lost), MemoryStore()
        try:
            convert(source, target)
        except CheckpointError:
            assert target.names() == [], lost
            failed += 1
        else:  # a file may say again what another one says, or be all that an array is known by
            assert difference(everything_in(source), everything_in(target)) is None, lost
    assert failed == len(whole.names()) if name == NATIVE else failed


class FlippedParts(ChunkParts):
    """Parts of which the array `flat` has another last bit."""

    def __init__(self, parts: ChunkParts, plan: SavePlan) -> None:
        self.parts, self.plan = parts, plan

    def __call__(self, row: int) -> Iterator[memoryview]:
        for part in self.parts(row):
            copy = bytearray(part)
            if self.plan.table.arrays[int(self.plan.table.array[row])].key == "flat":
                copy[-1] ^= 1
            yield memoryview(copy)


class Flipping(NativeSaveStrategy):
    """A strategy that writes another bit than it is given, and digests of what it writes."""

    def write_chunks(
        self, store: Store, *, attempt: str, rank: int, plan: SavePlan, rows: Any, parts: ChunkParts
    ) -> bytes:
        parts = FlippedParts(parts, plan)
        return super().write_chunks(store, attempt=attempt, rank=rank, plan=plan, rows=rows, parts=parts)


def test_a_target_that_differs_when_it_is_read_is_removed(tmp_path: Path, source: Path) -> None:
    store, target = open_store(source), tmp_path / "target"
    message = r"'flat' \[0:6, 0:8\] flat 0:21: .*target has other bytes than were written"
    with pytest.raises(IntegrityError, match=message):
        convert(store, LocalStore(str(target)), Flipping())
    assert files_in(target) == []
    convert(store, LocalStore(str(target)), Flipping(), verify=False)  # the comparison is what noticed
    assert "metadata.json" in files_in(target)


class WithoutObjects(NativeSaveStrategy):
    """A format that cannot hold objects."""

    def encode_object(self, value: Any, *, path: str) -> bytes:
        raise UnserializableError(f"{path}: no objects here.", key=path)


def test_an_object_that_the_format_cannot_hold_is_an_error_before_anything_is_written(
    tmp_path: Path, source: Path
) -> None:
    target = MemoryStore()
    with pytest.raises(UnserializableError, match="object: no objects here"):
        convert(open_store(source), target, WithoutObjects())
    assert target.names() == []


class Longer(NativeSaveStrategy):
    """A format in which the objects of each rank are longer than in the native one."""

    def encode_object(self, value: Any, *, path: str) -> bytes:
        return super().encode_object(value, path=path) + b" " * (1 + value["rank"])


def test_objects_may_have_other_lengths_in_the_new_format(tmp_path: Path, source: Path) -> None:
    store, target = open_store(source), MemoryStore()
    SimulatedWorld(RANKS).run(lambda group: megackpt.convert(store, target, Longer(), group=group))
    lengths = [open_checkpoint(s).chunks(["object"]).table.nbytes for s in (store, target)]
    assert (lengths[1] - lengths[0]).tolist() == [1, 2]


def test_a_checkpoint_at_the_target_is_replaced_only_if_that_is_asked_for(
    tmp_path: Path, source: Path, cli: CommandLine
) -> None:
    target = tmp_path / "target"
    megackpt.save({"old": 1}, target)
    arguments = ["convert", source, target, "--to", NATIVE]
    assert "has a checkpoint already" in cli.err(*arguments, code=2)
    assert megackpt.load_common_state_dict(target) == {"old": 1}
    cli.run(*arguments, "--overwrite")
    assert difference(everything_in(source), everything_in(target)) is None


@pytest.mark.parametrize("name", [name for name in FORMATS if name != NATIVE])
def test_a_checkpoint_of_another_format_is_never_replaced(
    tmp_path: Path, source: Path, name: str, cli: CommandLine
) -> None:
    target = tmp_path / "target"
    cli.run("convert", source, target, "--to", name)
    err = cli.err("convert", source, target, "--to", NATIVE, "--overwrite", code=2)
    assert "another format cannot replace in one step" in err
    assert difference(everything_in(source), everything_in(target)) is None


def test_a_checkpoint_is_not_converted_into_itself(tmp_path: Path, source: Path, cli: CommandLine) -> None:
    before = files_in(source)
    (tmp_path / "link").symlink_to(source)
    for target in (source, tmp_path / "link"):
        assert "into itself" in cli.err("convert", source, target, "--to", NATIVE, "--overwrite", code=2)
    assert files_in(source) == before


def test_a_source_with_a_gap_fails_the_check(tmp_path: Path, cli: CommandLine) -> None:
    half = ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, 0, 2))
    megackpt.save({"w": half}, tmp_path / "source", validate_access_integrity=False)
    assert "'w'" in cli.err("convert", tmp_path / "source", tmp_path / "target", "--to", NATIVE, code=1)
    assert not (tmp_path / "target").exists()


def test_json_has_the_result_or_the_error(tmp_path: Path, source: Path, cli: CommandLine) -> None:
    arguments = ["convert", source, tmp_path / "target", "--to", NATIVE]
    result = cli.json(*arguments)
    assert {k: result[k] for k in ("arrays", "objects", "backend", "version", "is_verified")} == {
        "arrays": 8, "objects": 2, "backend": "megackpt", "version": 1, "is_verified": True,
    }  # fmt: skip
    error = cli.json(*arguments, code=2)["error"]
    assert (error["kind"], error["path"]) == ("DeclarationError", str(tmp_path / "target"))


def test_ranks_share_the_chunks_evenly_and_each_is_written_once(tmp_path: Path) -> None:
    parts = [
        ShardedTensor.from_rank_offsets("w", torch.arange(i * 8, i * 8 + 8), (0, i, 64)) for i in range(64)
    ]
    megackpt.save({"w": parts}, tmp_path)
    target = MemoryStore()
    SimulatedWorld(4).run(lambda g: megackpt.convert(tmp_path, target, NativeSaveStrategy(), group=g))
    contents = open_checkpoint(target)
    chunks: Any = contents.chunks(["w"])
    assert np.bincount(chunks.stored.file).tolist() == [16, 16, 16, 16]
    assert torch.equal(megackpt.load_plain_tensors(target)["w"], torch.arange(512))  # type: ignore[arg-type]


LLAMA = random_config("llama", 0)


def test_a_checkpoint_becomes_a_folder_and_a_checkpoint_again(tmp_path: Path, cli: CommandLine) -> None:
    expected = saved_model(tmp_path / "saved", LLAMA, 1)
    export = ("--to", "huggingface", "--map", "llama", "--max-file-size", "6kB")
    report = cli.json("convert", tmp_path / "saved", tmp_path / "folder", *export)
    assert (report["map"], report["is_verified"], report["tensors"]) == ("llama", True, len(expected))
    assert report["files"] == len(list((tmp_path / "folder").glob("*.safetensors"))) > 2
    assert_same_tensors(folder_tensors(tmp_path / "folder"), expected)

    into = ("--from", "huggingface", "--to", "megackpt", "--prefix", "model.")
    report = cli.json("convert", tmp_path / "folder", tmp_path / "again", *into)
    assert (report["backend"], report["nbytes"]) == ("megackpt", sum(t.nbytes for t in expected.values()))

    export = ("--to", "huggingface", "--prefix", "model.", "--dtype", "bfloat16", "--no-verify")
    report = cli.json("convert", tmp_path / "again", tmp_path / "narrow", *export)
    assert not report["is_verified"]
    narrow = {key: tensor.to(torch.bfloat16) for key, tensor in expected.items()}
    assert_same_tensors(folder_tensors(tmp_path / "narrow"), narrow)


def test_a_naming_option_gives_a_folder_the_names_of_megackpt(tmp_path: Path, cli: CommandLine) -> None:
    saved_model(tmp_path / "saved", LLAMA, 4)
    cli.run("convert", tmp_path / "saved", tmp_path / "folder", "--to", "huggingface")
    cli.run("convert", tmp_path / "folder", tmp_path / "named", "--map", "auto")
    cli.run("convert", tmp_path / "folder", tmp_path / "checked", "--from", "huggingface")
    cli.run("convert", tmp_path / "folder", tmp_path / "kept", "--to", "megackpt")
    stored = {name: set(megackpt.load_plain_tensors(tmp_path / name)) for name in ("folder", "named", "kept")}
    assert stored["kept"] == stored["folder"] != stored["named"]
    assert megackpt.diff(tmp_path / "named", tmp_path / "checked").is_equal


def test_help_lists_options_by_what_they_concern(cli: CommandLine) -> None:
    out = cli.out("convert", "--help")
    assert out.index("The source:") < out.index("--from") < out.index("The new checkpoint:")
    assert out.index("A Hugging Face folder as DST:") < out.index("--max-file-size") < out.index("--json")


def test_masters_and_a_config_of_a_folder(tmp_path: Path, cli: CommandLine) -> None:
    expected = saved_model(tmp_path / "saved", LLAMA, 2, masters=True)
    (tmp_path / "original").mkdir()
    (tmp_path / "original/config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "original/tokenizer.json").write_text("{}")
    export = ("--to", "huggingface", "--weights", "masters", "--config", tmp_path / "original")
    cli.json("convert", tmp_path / "saved", tmp_path / "folder", *export)
    assert_same_tensors(folder_tensors(tmp_path / "folder"), expected)
    assert (tmp_path / "folder/tokenizer.json").exists()


def test_zero_centred_norms_of_megatron_core_are_added_to(tmp_path: Path, cli: CommandLine) -> None:
    config = random_config("qwen3", 1)
    family = family_of(config)
    stored = megatron_map(family.region_map(config).left, family.rules(config, ()).sizes)
    arrays = random_arrays(stored, 1)
    state = {key: ShardedTensor.from_rank_offsets(key, array) for key, array in arrays.items()}
    megackpt.save(state, tmp_path / "saved", content_metadata={"huggingface_config": config})
    folders = []
    for added in ("0", "1"):
        folder = tmp_path / added
        cli.json("convert", tmp_path / "saved", folder, "--to", "huggingface", "--norm-added", added)
        folders.append(folder_tensors(folder))
    plain, expected = folders[0], {}
    for key, tensor in plain.items():
        expected[key] = tensor + 1 if "norm" in key else tensor
    assert sum("norm" in key for key in plain) == 1 + 4 * config["num_hidden_layers"]
    assert_same_tensors(folders[1], expected)


def test_the_report_is_one_line(tmp_path: Path, cli: CommandLine) -> None:
    expected = saved_model(tmp_path / "saved", LLAMA, 3)
    folder = str(tmp_path / "folder")
    line = cli.out("convert", tmp_path / "saved", folder, "--to", "huggingface")
    assert line.startswith(f"{folder}: {len(expected)} tensors, ")
    assert line.endswith("in 1 files, as float32, by the map llama; read again and equal.\n")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--to", "zarr", "--map", "llama"), "--map cannot be used with"),
        (("--to", ZARR_1), "format ('zarr', 1) (it is only read)"),
        (("--to", "huggingface", "--from", "huggingface"), "not both"),
        (("--to", "megackpt", "--from", "huggingface", "--weights", "masters"), "--weights cannot be used"),
        (("--from", "huggingface", "--norm-added", "1"), "--norm-added cannot be used"),
        (("--to", "huggingface", "--array-digests"), "--array-digests cannot be used"),
        (("--to", "huggingface", "--max-file-size", "many"), "'many' is not a size"),
        (("--to", "huggingface", "--map", "unknown"), "No map is called 'unknown'"),
    ],
)
def test_options_that_do_not_fit_are_an_error(
    options: tuple[str, ...], text: str, tmp_path: Path, cli: CommandLine
) -> None:
    saved_model(tmp_path / "saved", LLAMA, 4)
    assert text in cli.err("convert", tmp_path / "saved", tmp_path / "new", *options, code=BAD_INPUT)
    assert not (tmp_path / "new").exists()


def test_no_folder_is_an_error(tmp_path: Path, cli: CommandLine) -> None:
    options = ["--from", "huggingface"]  # into the native format, unless --to names another
    assert "convert" not in cli.out("convert", tmp_path, tmp_path / "new", *options, code=UNREADABLE)
