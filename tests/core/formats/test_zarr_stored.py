"""What zarr checkpoints look like on disk, and that stock readers of zarr read them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch

from megackpt import (
    ShardedObject,
    ShardedTensor,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    remove_sharded_tensors,
    save,
)
from megackpt.errors import DeclarationError, MissingExtraError, UnserializableError
from megackpt.formats.zarr.grids import GridRules
from megackpt.formats.zarr.version_1 import ZarrV2SaveStrategy
from megackpt.formats.zarr.version_3 import ZarrV3SaveStrategy
from megackpt.metadata import DTYPES
from tests.support.states import bits

zarr = pytest.importorskip("zarr", minversion="3", reason="zarr 3 needs Python 3.11")

ONE, THREE = ("zarr", 1), ("zarr", 3)


def tensor(key: str, data: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data)


def random_bits(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    wanted: torch.dtype = getattr(torch, dtype)
    if wanted is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    nbytes = int(np.prod(shape)) * wanted.itemsize
    raw_bytes = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
    return raw_bytes.view(wanted).reshape(shape)


def raw_bytes(array: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def group_of(directory: Path) -> Path:
    return directory / str(json.loads((directory / "metadata.json").read_text())["arrays"])


def test_version_1_has_the_files_and_fields_of_megatron_core(tmp_path: Path) -> None:
    state = {
        "w": tensor("decoder.weight", torch.arange(6.0).reshape(2, 3).bfloat16()),
        "o": ShardedObject("rng_state", [1, "two"], (2, 1), (1, 0)),
        "o2": ShardedObject("rng_state", [3], (2, 1), (0, 0)),
        "iteration": 7,
    }
    save(state, tmp_path, sharded_strategy=ONE, content_metadata={"kind": "test"})
    seen = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    (marker,) = {name for name in seen if name.startswith(".megackpt-")}
    assert seen - {marker} == {
        "metadata.json", "common.pt", "decoder.weight/.zarray", "decoder.weight/0.0",
        "rng_state/shard_0.0_2.1.pt", "rng_state/shard_1.0_2.1.pt",
    }  # fmt: skip
    assert json.loads((tmp_path / "metadata.json").read_text()) == {
        "sharded_backend": "zarr",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    assert json.loads((tmp_path / "decoder.weight/.zarray").read_text()) == {
        "chunks": [2, 3], "compressor": None, "dtype": "bfloat16", "fill_value": None, "filters": None,
        "order": "C", "shape": [2, 3], "zarr_format": 2,
    }  # fmt: skip
    assert (tmp_path / "decoder.weight/0.0").read_bytes() == bits(state["w"].data)  # type: ignore[union-attr]
    common = torch.load(tmp_path / "common.pt", weights_only=True)
    assert common == {"iteration": 7, "content_metadata": {"kind": "test"}}
    assert torch.load(tmp_path / "rng_state/shard_1.0_2.1.pt", weights_only=True) == [1, "two"]
    assert load_content_metadata(tmp_path) == {"kind": "test"}
    assert load_common_state_dict(tmp_path) == {"iteration": 7}


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (0, 3), (2, 3, 5)])
def test_all_dtypes_and_shapes_are_read_by_stock_zarr_and_tensorstore(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    data = random_bits(dtype, shape)
    for strategy in (
        ZarrV2SaveStrategy(GridRules(file_bytes=32)),
        ZarrV3SaveStrategy(GridRules(file_bytes=32, inner_bytes=16)),
    ):
        directory = tmp_path / str(strategy.version)
        save({"a": tensor("a", data)}, directory, sharded_strategy=strategy)
        loaded = load_plain_tensors(directory)["a"]
        assert loaded.dtype == data.dtype
        assert loaded.shape == data.shape
        assert bits(loaded) == bits(data)
        if strategy.version == 1:
            driver, path = "zarr", directory / "a"
        else:
            driver, path = "zarr3", group_of(directory) / "a"
        opened = ts.open({"driver": driver, "kvstore": {"driver": "file", "path": f"{path}/"}}).result()
        assert raw_bytes(opened.read().result()) == bits(data)
        if strategy.version == 1 and (dtype == "bfloat16" or dtype.startswith("float8")):
            continue  # the names that Megatron-Core and tensorstore use in zarr v2 are unknown to stock zarr
        array = zarr.open_array(path, mode="r")
        assert array.shape == shape
        assert raw_bytes(np.asarray(array[...])) == bits(data)


def test_stock_zarr_lists_version_3_as_a_group_with_shards_and_true_dtypes(tmp_path: Path) -> None:
    data = torch.randn(64, 32).bfloat16()
    rules = GridRules(file_bytes=2048, inner_bytes=256)
    save(
        {"a": tensor("layer.0/weight", data), "b": tensor("b", torch.ones(2))},
        tmp_path,
        sharded_strategy=ZarrV3SaveStrategy(rules),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(group_of(tmp_path), mode="r")
        arrays = dict(group.arrays())
    assert sorted(arrays) == ["b", "layer.0%2Fweight"]
    array = arrays["layer.0%2Fweight"]
    assert array.attrs["megackpt"] == {"key": "layer.0/weight", "dtype": "bfloat16"}
    assert (array.shards, array.chunks) == ((32, 32), (4, 32))
    assert torch.equal(torch.from_numpy(array[...]).view(torch.bfloat16), data)


def test_keys_that_are_no_paths_are_errors_in_version_1_and_encoded_by_version_3(tmp_path: Path) -> None:
    keys = [
        "../up", "/abs", "a//b", "a/../b", "metadata.json", "common.pt", "x/.zarray", ".megackpt-x",
        "w/0", "w", "nul\0", "back\\slash", "..", "zarr.json", "__reserved", "50%", "ünï",
    ]  # fmt: skip
    state = {key: tensor(key, torch.tensor([float(i)])) for i, key in enumerate(keys)}
    save(state, tmp_path / "3", sharded_strategy=THREE)
    loaded = load_plain_tensors(tmp_path / "3")
    assert {key: value.item() for key, value in loaded.items()} == {key: i for i, key in enumerate(keys)}
    outside = {p for p in tmp_path.iterdir()}
    assert outside == {tmp_path / "3"}
    for key in keys[:8]:
        with pytest.raises(DeclarationError, match=r"every key in the directory of its name") as rejected:
            save({"t": tensor(key, torch.ones(1))}, tmp_path / "1", sharded_strategy=ONE)
        assert rejected.value.key == key
        assert repr(key) in str(rejected.value)
    with pytest.raises(DeclarationError, match=r"'w/0' lies in the directory of 'w'"):
        save({key: tensor(key, torch.ones(1)) for key in ("w/0", "w")}, tmp_path / "1", sharded_strategy=ONE)
    with pytest.raises(DeclarationError, match=r"longer than 255 bytes"):
        save({"t": tensor("k" * 256, torch.ones(1))}, tmp_path / "3", sharded_strategy=THREE)


def test_a_save_without_validation_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="validate_access_integrity"):
        save(
            {"a": tensor("a", torch.ones(1))}, tmp_path, sharded_strategy=ONE, validate_access_integrity=False
        )


@pytest.mark.parametrize("strategy", [ONE, THREE])
def test_removed_arrays_are_gone_and_others_stay(tmp_path: Path, strategy: tuple[str, int]) -> None:
    state = {key: tensor(key, torch.ones(3)) for key in ("model.a", "optim.a", "optim.b")}
    state["o"] = ShardedObject("optim.state", 1, (1,), (0,))  # type: ignore[assignment]
    save(state, tmp_path, sharded_strategy=strategy)
    remove_sharded_tensors(tmp_path, "optim.")
    assert list(load_plain_tensors(tmp_path)) == ["model.a"]
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and "optim" in str(p)]


def test_objects_that_would_not_be_loaded_are_errors_in_version_1(tmp_path: Path) -> None:
    value = ShardedObject("o", {"f": Path}, (1,), (0,))
    with pytest.raises(UnserializableError):
        save({"o": value}, tmp_path, sharded_strategy=ONE)


@pytest.mark.parametrize("strategy", [ONE, THREE])
def test_without_tensorstore_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: tuple[str, int]
) -> None:
    save({"a": tensor("a", torch.ones(1))}, tmp_path / "there", sharded_strategy=strategy)
    monkeypatch.setitem(__import__("sys").modules, "tensorstore", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'megackpt\[zarr\]'"):
        save({"a": tensor("a", torch.ones(1))}, tmp_path / "new", sharded_strategy=strategy)
    with pytest.raises(MissingExtraError, match=r"pip install 'megackpt\[zarr\]'"):
        load({"a": tensor("a", torch.ones(1))}, tmp_path / "there")
    save({"a": tensor("a", torch.ones(1))}, tmp_path / "native")
    load({"a": tensor("a", torch.ones(1))}, tmp_path / "native")
