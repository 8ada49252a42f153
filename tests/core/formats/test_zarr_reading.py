"""Zarr checkpoints that others wrote, damaged ones, and ones that have lost a file."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch

from megackpt import (
    LoadOptions,
    ShardedObject,
    ShardedTensor,
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_sharded_metadata,
    save,
)
from megackpt.errors import CheckpointError, FormatError, IntegrityError, NotACheckpointError
from megackpt.formats.zarr import expansion_limits
from megackpt.formats.zarr.rounds import GridRules
from megackpt.formats.zarr.version_3 import ZarrV3SaveStrategy
from megackpt.run import check_is_distributed_checkpoint, remove_sharded_tensors
from megackpt.storage import MemoryStore
from tests.support.states import PickledCall, sharded
from tests.support.zarr_v1 import save_zarr_v1

SMALL = ZarrV3SaveStrategy(GridRules(file_bytes=64, inner_bytes=16))
DATA = torch.arange(60, dtype=torch.int32).reshape(6, 10)


def save_as(version: int, state: Any, target: Path | MemoryStore) -> None:
    if version == 1:
        save_zarr_v1(state, target)
    else:
        save(state, target, SMALL)


def saved(directory: Path, version: int) -> Path:
    """Save DATA as 'a', and return the directory of the array."""
    save_as(version, {"a": sharded("a", DATA)}, directory)
    group = "" if version == 1 else json.loads((directory / "metadata.json").read_text())["arrays"]
    return directory / str(group) / "a"


def chunk_files(array: Path) -> list[Path]:
    return sorted(
        p for p in array.rglob("*") if p.is_file() and not p.name.startswith(".") and p.suffix != ".json"
    )


def loaded(directory: Path) -> torch.Tensor:
    got = load({"a": sharded("a", torch.full_like(DATA, -1))}, directory)["a"]
    assert isinstance(got, torch.Tensor)
    return got


def assert_equal(actual: torch.Tensor, values: np.ndarray[Any, Any]) -> None:
    assert actual.numpy().tobytes() == values.tobytes()
    assert tuple(actual.shape) == values.shape


@pytest.fixture
def stock_zarr() -> Any:
    """The zarr package, which reads what we write and writes what we read."""
    return pytest.importorskip("zarr", minversion="3", reason="zarr 3 needs Python 3.11")


VALUES = {
    "plain": np.arange(35, dtype=np.float32).reshape(5, 7),
    "complex": (np.arange(6) * (1 + 2j)).astype(np.complex64).reshape(2, 3),
    "flags": np.array([True, False, True]),
    "scalar": np.array(4.5),
}


@pytest.mark.parametrize("form", [2, 3])
def test_what_stock_zarr_wrote_without_a_metadata_json_is_loaded(
    tmp_path: Path, stock_zarr: Any, form: int
) -> None:
    group = stock_zarr.open_group(tmp_path, mode="w", zarr_format=form)
    for name, values in VALUES.items():
        sizes = {"shape": values.shape, "chunks": tuple(min(3, n) for n in values.shape)}
        config = {"write_empty_chunks": True}
        group.create_array(name, **sizes, dtype=values.dtype, config=config)[...] = values
    nested = group.create_array("layer/weight", shape=(4,), chunks=(2,), dtype="i2")
    nested[...] = np.arange(1, 5)
    assert check_is_distributed_checkpoint(tmp_path)
    result = load_plain_tensors(tmp_path)
    assert set(result) == {*VALUES, "layer/weight"}
    for name, values in VALUES.items():
        assert_equal(result[name], values)
    assert result["layer/weight"].tolist() == [1, 2, 3, 4]
    assert load_common_state_dict(tmp_path) == {}


@pytest.mark.parametrize("form", [2, 3])
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_run_of_zarr_steps_is_no_checkpoint_itself(
    tmp_path: Path, stock_zarr: Any, form: int, is_ours: bool
) -> None:
    for step in ("iter_0000001", "iter_0000002"):
        if is_ours:
            saved(tmp_path / step, {2: 1, 3: 3}[form])
        else:
            group = stock_zarr.open_group(tmp_path / step, mode="w", zarr_format=form)
            group.create_array("a", shape=(2,), chunks=(2,), dtype="i2")[...] = [1, 2]
        assert check_is_distributed_checkpoint(tmp_path / step)
    assert not check_is_distributed_checkpoint(tmp_path)
    with pytest.raises(NotACheckpointError, match="is not a checkpoint"):
        load({"a": sharded("a", DATA)}, tmp_path)


def test_zarr_v3_arrays_without_a_group_are_a_checkpoint_also_if_one_is_damaged(
    tmp_path: Path, stock_zarr: Any
) -> None:
    array = stock_zarr.create_array(tmp_path / "a", shape=(2,), chunks=(2,), dtype="i2", zarr_format=3)
    array[...] = [1, 2]
    assert check_is_distributed_checkpoint(tmp_path)
    (tmp_path / "a" / "zarr.json").write_text("{")
    with pytest.raises(FormatError, match=r"zarr\.json"):
        load_plain_tensors(tmp_path)


@pytest.mark.parametrize("kind", ["F order", "big endian", "slashes", "gzip", "no compressor"])
def test_any_way_to_store_zarr_v2_is_read(tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {
        "F order": {"order": "F"},
        "big endian": {"dtype": ">f4"},
        "slashes": {"dimension_separator": "/"},
        "gzip": {"compressor": {"id": "gzip", "level": 1}},
        "no compressor": {},
    }[kind]
    metadata = {"shape": [5, 7], "chunks": [2, 3], "dtype": "<f4", "compressor": None, "fill_value": None}
    path = {"driver": "file", "path": f"{tmp_path}/a/"}
    opened = ts.open(
        {"driver": "zarr", "kvstore": path, "metadata": metadata | options, "create": True}
    ).result()
    opened.write(VALUES["plain"]).result()
    assert_equal(load_plain_tensors(tmp_path)["a"], VALUES["plain"])
    part = sharded("a", torch.zeros(5, 1), (1, 4, 7))
    assert load({"a": part}, tmp_path)["a"].tolist() == VALUES["plain"][:, 4:5].tolist()


def test_what_tensorstore_wrote_in_shards_and_in_dtypes_that_zarr_lacks_is_read(tmp_path: Path) -> None:
    data = torch.randn(5, 7).bfloat16()
    codecs = {"codec": {"driver": "zarr3", "codecs": [{"name": "blosc"}]}}
    schema = {"dtype": "bfloat16", "domain": {"shape": [5, 7]}, **codecs}
    schema["chunk_layout"] = {"write_chunk": {"shape": [4, 4]}, "read_chunk": {"shape": [2, 2]}}
    path = {"driver": "file", "path": f"{tmp_path}/a/"}
    opened = ts.open({"driver": "zarr3", "kvstore": path, "schema": schema, "create": True}).result()
    opened.write(data.view(torch.int16).numpy().view(opened.dtype.numpy_dtype)).result()
    result = load_plain_tensors(tmp_path)["a"]
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, data)


@pytest.mark.parametrize("version", [1, 3])
def test_every_missing_file_is_an_error_that_names_key_and_chunk(tmp_path: Path, version: int) -> None:
    array = saved(tmp_path, version)
    files = chunk_files(array)
    assert len(files) > 3
    for file in files:
        hidden = file.rename(tmp_path / "hidden")
        chunk = str(file.relative_to(array))
        with pytest.raises(FormatError, match=rf"'a': chunk '{chunk}' of .* is missing") as rejected:
            loaded(tmp_path)
        assert rejected.value.key == "a"
        hidden.rename(file)
    assert torch.equal(loaded(tmp_path), DATA)


@pytest.mark.parametrize("version", [1, 3])
def test_every_cut_file_is_an_error(tmp_path: Path, version: int) -> None:
    for file in chunk_files(saved(tmp_path, version)):
        whole = file.read_bytes()
        for kept in (0, 1, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:kept])
            with pytest.raises((FormatError, IntegrityError), match=r"cut short|cannot be read"):
                loaded(tmp_path)
        file.write_bytes(whole)
    assert torch.equal(loaded(tmp_path), DATA)


def test_every_flipped_bit_of_version_3_is_found(tmp_path: Path) -> None:
    file = chunk_files(saved(tmp_path, 3))[0]
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises((FormatError, IntegrityError)) as rejected:
            loaded(tmp_path)
        assert rejected.value.key == "a"
        assert file.name in str(rejected.value.path)


def test_a_chunk_that_is_missing_in_a_shard_is_an_error_and_not_the_fill_value(tmp_path: Path) -> None:
    array = saved(tmp_path, 3)
    files = chunk_files(array)
    path = {"driver": "file", "path": f"{array}/"}
    # tensorstore leaves chunks out that are all fill value; one element in each shard keeps the file.
    values = np.zeros((6, 10), np.int32)
    values[:, ::2] = 1
    values[0, :] = 0
    values[0, 0] = 1
    rewritten = ts.open(
        {"driver": "zarr3", "kvstore": path, "store_data_equal_to_fill_value": False}
    ).result()
    rewritten.write(values).result()
    assert chunk_files(array) == files
    with pytest.raises(FormatError, match=r"'a': chunk 'c/0/0' .* stored at shard entry .* is missing"):
        loaded(tmp_path)


def test_a_pickle_that_names_a_class_raises_an_error_unless_it_is_trusted(tmp_path: Path) -> None:
    save_zarr_v1({"o": ShardedObject("o", 1, (1,), (0,)), "x": 1}, tmp_path)
    torch.save(PickledCall(os.getpid), tmp_path / "o/shard_0_1.pt")
    with pytest.raises(FormatError, match=r"names posix\.getpid"):
        load({"o": ShardedObject("o", None, (1,), (0,))}, tmp_path)
    options = LoadOptions(allow_unsafe_pickle=True)
    got = load({"o": ShardedObject("o", None, (1,), (0,))}, tmp_path, options=options)["o"]
    assert got == os.getpid()
    torch.save({"x": PickledCall(os.getpid)}, tmp_path / "common.pt")
    with pytest.raises(FormatError, match=r"allow_unsafe_pickle=True"):
        load_common_state_dict(tmp_path)
    assert load_common_state_dict(tmp_path, allow_unsafe_pickle=True) == {"x": os.getpid()}


def test_objects_of_version_3_have_digests(tmp_path: Path) -> None:
    save({"o": ShardedObject("o", [1, 2], (1,), (0,))}, tmp_path, sharded_strategy=("zarr", 3))
    (file,) = tmp_path.glob("objects-*/o/shard_0_1.bin")
    whole = file.read_bytes()
    for at in (0, 40, len(whole) - 1):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(IntegrityError, match="digest"):
            load({"o": ShardedObject("o", None, (1,), (0,))}, tmp_path)


def test_objects_whose_file_names_lack_the_last_number_are_found(tmp_path: Path) -> None:
    # So Megatron-Core named them until 0.5: the suffix replaced what stands behind the last dot.
    state = {f"o{i}": ShardedObject("o", i, (1, 2), (0, i)) for i in range(2)}
    save_zarr_v1(state, tmp_path, is_ours=False)
    for i in range(2):
        (tmp_path / f"o/shard_0.{i}_1.2.pt").rename(tmp_path / f"o/shard_0.{i}_1.pt")
    wanted = {f"o{i}": ShardedObject("o", None, (1, 2), (0, i)) for i in range(2)}
    assert load(wanted, tmp_path) == {"o0": 0, "o1": 1}


@pytest.mark.parametrize("version", [1, 3])
def test_a_symbolic_link_is_not_followed(tmp_path: Path, version: int) -> None:
    file = chunk_files(saved(tmp_path / "c", version))[0]
    outside = shutil.copy(file, tmp_path / "outside")
    file.unlink()
    file.symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"missing, or is no regular file"):
        loaded(tmp_path / "c")


ATTACKS: dict[str, Any] = {
    "shape": [[2**61], [2**40, 2**40], [-1], "6", [6.0, 10], None, [2**63]],
    "chunks": [[0, 1], [1], [2**63, 1], None, [True, 1]],
    "dtype": ["|O", "<U8", [["x", "<f4"]], None, "float4", "<f16"],
    "dimension_separator": ["..", "", 1],
}


def check_lies(directory: Path, document: Path, attacks: dict[str, Any]) -> None:
    """Put each value into the document of the array, and find that a load rejects it."""
    right = json.loads(document.read_text())
    for field, values in attacks.items():
        for value in values:
            document.write_text(json.dumps(right | {field: value}))
            with pytest.raises(CheckpointError) as rejected:
                loaded(directory)
            assert isinstance(rejected.value, FormatError), (field, value, rejected.value)


def test_documents_that_lie_raise_an_error(tmp_path: Path) -> None:
    document = saved(tmp_path, 1) / ".zarray"
    check_lies(tmp_path, document, ATTACKS)
    for text in ("", "[]", "[" * 100_000, "\xff"):
        document.write_text(text)
        with pytest.raises(FormatError):
            loaded(tmp_path)


def test_documents_of_version_3_that_lie_raise_an_error(tmp_path: Path) -> None:
    document = saved(tmp_path, 3) / "zarr.json"
    right = json.loads(document.read_text())
    sharding = right["codecs"][0]["configuration"]
    grids = [{"name": "regular", "configuration": {"chunk_shape": c}} for c in ([0, 1], [1], None, [7, 3])]
    shards = [
        [{"name": "sharding_indexed", "configuration": sharding | {"chunk_shape": c}}]
        for c in ([0, 1], [7, 7], 3)
    ]
    dots = {"name": "default", "configuration": {"separator": ".."}}
    attacks: dict[str, Any] = {
        "shape": ATTACKS["shape"],
        "data_type": ["string", None, {"name": "x"}, "float16"],
        "chunk_grid": [*grids, None, {"name": "rectangular"}],
        "codecs": [*shards],
        "chunk_key_encoding": [None, {"name": "other"}, dots],
        "attributes": [{"megackpt": {"dtype": "float64"}}, {"megackpt": {"key": 3}}],
    }
    check_lies(tmp_path, document, attacks)


@pytest.mark.parametrize(
    ("extent", "text"), [(2**25, "more than the 4,194,304"), (2**10, "too short to hold")]
)
def test_a_tiny_shard_cannot_claim_billions_of_chunks(tmp_path: Path, extent: int, text: str) -> None:
    array = saved(tmp_path, 3)
    document = array / "zarr.json"
    right = json.loads(document.read_text())
    right["shape"] = [extent, extent]
    right["chunk_grid"]["configuration"]["chunk_shape"] = [extent, extent]
    right["codecs"][0]["configuration"]["chunk_shape"] = [1, 1]
    document.write_text(json.dumps(right))
    data = torch.zeros(1, 1, dtype=torch.int32)
    part = ShardedTensor("a", data, torch.int32, (1, 1), (extent, extent), (0, 0))
    with pytest.raises(FormatError, match=text):
        load({"a": part}, tmp_path)


def test_a_save_of_megatron_core_that_did_not_finish_is_no_checkpoint(tmp_path: Path) -> None:
    save_zarr_v1({"a": sharded("a", DATA)}, tmp_path, is_ours=False)
    (tmp_path / "metadata.json").unlink()  # common.pt and arrays stay, as of a save that died
    with pytest.raises(NotACheckpointError):
        loaded(tmp_path)


def test_lock_files_of_megatron_core_are_no_arrays(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    (tmp_path / "a.sync").mkdir()
    for name in (".zarray", "0.0"):
        (tmp_path / "a.sync" / name).touch()
    assert set(load_plain_tensors(tmp_path)) == {"a"}


def test_nan_payloads_and_signed_zeros_survive(tmp_path: Path) -> None:
    values = np.frombuffer(struct.pack("<4I", 0x7FC12345, 0xFF800001, 0x80000000, 0x00000001), np.float32)
    for version in (1, 3):
        state = {"a": sharded("a", torch.from_numpy(values.copy()))}
        save_as(version, state, tmp_path / str(version))
        assert_equal(load_plain_tensors(tmp_path / str(version))["a"], values)


LOST = {
    1: {
        "model/a%/.zarray": "model/a%",
        "empty/.zarray": "empty",
        "rng/state/shard_1_2.pt": "rng/state",
    },
    3: {
        "zarr-*/model%2Fa%25/zarr.json": "model/a%",
        "zarr-*/empty/zarr.json": "empty",
        "objects-*/rng%2Fstate/shard_1_2.bin": "rng/state",
    },
}


def saved_state(directory: Path, version: int) -> Path:
    state = {
        "a": sharded("model/a%", torch.ones(3)),
        "none": sharded("empty", torch.zeros(0)),
        "b": sharded("opt.b", torch.ones(3)),
        "o": [ShardedObject("rng/state", i, (2,), (i,)) for i in range(2)],
    }
    save_as(version, state, directory)
    return directory


@pytest.mark.parametrize("version", LOST)
def test_a_lost_document_or_object_is_an_error_that_names_key_and_file(tmp_path: Path, version: int) -> None:
    for number, (name, key) in enumerate(LOST[version].items()):
        directory = saved_state(tmp_path / str(number), version)
        (lost,) = directory.glob(name)
        lost.unlink()
        with pytest.raises(FormatError, match=re.escape(f"{key!r}: {lost} is missing")) as caught:
            load_sharded_metadata(directory)
        assert caught.value.key == key
        assert caught.value.path == str(lost)


def take_out_of_version_1(directory: Path, prefix: str) -> None:
    """Remove what is below a prefix as earlier versions of megackpt did, which left it in the other list."""
    (marker,) = directory.glob(".megackpt-*.json")
    lists = json.loads(marker.read_text())
    removed = [name for name in lists["checkpoint"] if name.startswith(prefix)]
    lists["checkpoint"] = [name for name in lists["checkpoint"] if name not in removed]
    marker.write_text(json.dumps(lists))
    for name in removed:
        (directory / name).unlink()


@pytest.mark.parametrize("version", [1, 3])
def test_what_was_taken_out_is_not_missed_and_what_is_left_is(tmp_path: Path, version: int) -> None:
    directory = saved_state(tmp_path / "c", version)
    objects = {key: (2,) for key in ("rng/state/shard_0_2", "rng/state/shard_1_2")}
    metadata = load_sharded_metadata(directory)
    assert {key: value.global_shape for key, value in metadata.items() if key.startswith("rng")} == objects
    for prefix in ("opt.", "rng/"):
        (take_out_of_version_1 if version == 1 else remove_sharded_tensors)(directory, prefix)
    metadata = load_sharded_metadata(directory)
    assert {key: value.global_shape for key, value in metadata.items()} == {"model/a%": (3,), "empty": (0,)}
    assert not [p for p in directory.rglob("*") if p.is_file() and re.search(r"opt\.b|rng", str(p))]
    (document,) = [p for p in directory.rglob("*") if p.parent.name == "empty" and p.is_file()]
    document.unlink()
    with pytest.raises(FormatError, match=r"'empty': .* is missing"):
        load_sharded_metadata(directory)


def test_a_list_of_files_that_is_damaged_is_an_error(tmp_path: Path) -> None:
    (listing,) = saved_state(tmp_path / "3", 3).glob("files-*.json")
    listing.write_text("{}")
    with pytest.raises(IntegrityError, match="digest does not match"):
        load_sharded_metadata(tmp_path / "3")
    (marker,) = saved_state(tmp_path / "1", 1).glob(".megackpt-*.json")
    marker.write_text('{"files": []}')
    with pytest.raises(FormatError, match="'checkpoint' is no list of files"):
        load_sharded_metadata(tmp_path / "1")


def test_without_a_marker_as_megatron_core_leaves_it_nothing_is_missed(tmp_path: Path) -> None:
    (marker,) = saved_state(tmp_path, 1).glob(".megackpt-*.json")
    marker.unlink()
    assert {"model/a%", "empty", "opt.b"} < set(load_sharded_metadata(tmp_path))


numcodecs = pytest.importorskip("numcodecs")

PART = expansion_limits._PART_BYTES
NOISE = np.random.default_rng(0).integers(0, 256, PART + 7, np.uint8).tobytes()
EXPANDED = {
    "nothing": b"",
    "a byte": b"x",
    "zeros": bytes(3 * PART + 5),
    "noise": NOISE,
    "both": NOISE + bytes(PART),
}

# Compressor of zarr, how its bytes are made, and whether the size is known exactly.
COMPRESSORS: dict[str, tuple[str, Callable[[bytes], bytes], bool]] = {
    "gzip": ("gzip", gzip.compress, True),
    "zlib": ("zlib", zlib.compress, True),
    "bz2": ("bz2", bz2.compress, True),
    "two files of gzip": ("gzip", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:]), True),
    "two files of bz2": ("bz2", lambda data: bz2.compress(data[:9]) + bz2.compress(data[9:]), True),
    "zstd": ("zstd", lambda data: bytes(numcodecs.Zstd(3).encode(data)), False),
    "two frames of zstd": (
        "zstd",
        lambda data: bytes(numcodecs.Zstd().encode(data[:9])) + bytes(numcodecs.Zstd().encode(data[9:])),
        False,
    ),
    "zstd with a checksum": ("zstd", lambda data: bytes(numcodecs.Zstd(checksum=True).encode(data)), False),
}


def sizes(compressor: str, compressed: bytes) -> list[int]:
    return list(expansion_limits._EXPANDED_SIZES[compressor](compressed))


@pytest.mark.parametrize("data", EXPANDED.values(), ids=EXPANDED)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_the_size_is_known_before_all_is_expanded(name: str, data: bytes) -> None:
    compressor, compress, is_exact = COMPRESSORS[name]
    totals = sizes(compressor, compress(data))
    assert totals == sorted(totals)
    total = totals[-1] if totals else 0
    assert total >= len(data)
    if is_exact:
        assert total == len(data)
        assert all(later - earlier <= PART for earlier, later in zip([0, *totals], totals, strict=False))
    else:  # a block of zstd is at most 128 KiB
        assert total <= len(data) + 2 * 2**17


@pytest.mark.parametrize("compressor", ["gzip", "zlib", "bz2", "zstd"])
def test_bytes_that_are_cut_or_malformed_have_no_more_than_what_can_be_expanded(compressor: str) -> None:
    compressed = COMPRESSORS[compressor][1](EXPANDED["both"])
    for length in (0, 1, 5, len(compressed) // 2, len(compressed) - 1):
        assert (sizes(compressor, compressed[:length]) or [0])[-1] <= len(EXPANDED["both"]) + 2 * 2**17
    assert sizes(compressor, b"no such format at all") == []
    assert sizes(compressor, compressed + b"?")[-1] >= len(EXPANDED["both"])
