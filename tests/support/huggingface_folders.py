"""Small checkpoints in our names and the folders that they stand for, made of a map and random numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import megackpt
from megackpt import ShardedTensor
from megackpt.comm import Group
from megackpt.entities import ShardedStateDict
from megackpt.maps import RegionMap, bound_to, family_of
from megackpt.testing.world import SimulatedWorld
from tests.support.huggingface_configs import random_fields
from tests.support.states import assembled, random_arrays

MASTER = "optimizer.state.fp32_param."
PADDING = 3  # rows of the vocabulary


def random_config(model_type: str, seed: int) -> dict[str, Any]:
    return {"model_type": model_type, **random_fields(model_type, seed)}


def stacked_map(config: Mapping[str, Any], keys: Sequence[str] = ()) -> RegionMap:
    """Return the map of a config; layers of a stack are stacked where all have the same arrays."""
    made = family_of(config).region_map(config, keys)
    layers: dict[str, dict[str, set[int]]] = {}
    for key in made.left:
        match = re.fullmatch(r"(.*layers)\.(\d+)\.(.*)", key)
        if match is not None:
            layers.setdefault(match[1], {}).setdefault(f"{match[1]}.{match[3]}", set()).add(int(match[2]))
    equal = [arrays for arrays in layers.values() if len(set(map(frozenset, arrays.values()))) == 1]
    return bound_to(made, [key for arrays in equal for key in arrays])


def padded(made: RegionMap, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return arrays with rows of padding where the map allows them."""
    return {
        key: torch.cat([array, torch.full((PADDING, *array.shape[1:]), 7.0)])
        if made.left[key].is_padded
        else array
        for key, array in arrays.items()
    }


def declared(arrays: Mapping[str, Tensor], rank: int, ranks: int, *, prefix: str = "") -> ShardedStateDict:
    """Return one rank's share of arrays: rows, as even as can be."""
    state = {}
    for key, array in arrays.items():
        size = len(array)
        start, stop = size * rank // ranks, size * (rank + 1) // ranks
        if stop > start:
            part, offset = array[start:stop].contiguous(), (start, *(0,) * (array.ndim - 1))
            shape = tuple(array.shape)
            state[key] = ShardedTensor(prefix + key, part, array.dtype, part.shape, shape, offset)
    return state


def flat_ranges(arrays: Mapping[str, Tensor], rank: int, ranks: int) -> ShardedStateDict:
    """Return one rank's share of master weights: a flat range of each."""
    state = {}
    for key, array in arrays.items():
        start, stop = array.numel() * rank // ranks, array.numel() * (rank + 1) // ranks
        shape = tuple(array.shape)
        state[f"master {key}"] = ShardedTensor(
            MASTER + key, array.flatten()[start:stop].clone(), array.dtype, shape, shape, (0,) * len(shape),
            flattened_range=slice(start, stop),
        )  # fmt: skip
    return state


def saved_model(
    directory: Path,
    config: Mapping[str, Any],
    seed: int,
    *,
    ranks: int = 2,
    prefix: str = "",
    masters: bool = False,
    format: Any = "megackpt",
) -> dict[str, Tensor]:
    """Save a model of random numbers and return the tensors of its folder.

    With masters, the model is saved in bfloat16 and its flat master weights in float32, which are those of
    the folder.
    """
    made = stacked_map(config)
    theirs = random_arrays(made, seed)
    arrays = padded(made, assembled(made, theirs))
    directory.mkdir(parents=True)

    def save_rank(group: Group) -> None:
        weights = {key: array.bfloat16() for key, array in arrays.items()} if masters else arrays
        state = {"model": declared(weights, group.rank, group.size, prefix=prefix)}
        if masters:
            state["optimizer"] = flat_ranges(arrays, group.rank, group.size)
        metadata = {"huggingface_config": config}
        megackpt.save(state, directory, format, content_metadata=metadata, group=group)

    SimulatedWorld(ranks).run(save_rank)
    return theirs


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, files: int = 1
) -> None:
    """Write a folder with the safetensors library."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    parts = [names[number::files] for number in range(files)]
    where = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{files:05d}.safetensors" if files > 1 else "model.safetensors"
        save_file({key: tensors[key].contiguous() for key in part}, folder / name)
        where |= dict.fromkeys(part, name)
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def write_random_folder(
    folder: Path, config: Mapping[str, Any], *, dtype: torch.dtype = torch.float32, **changes: Any
) -> dict[str, Tensor]:
    """Write a folder of random tensors. Changes are tensors by name, or None for one that is left out."""
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Any] = {
        key: torch.randn(array.stored, generator=generator).to(dtype)
        for key, array in family_of(config).region_map(config).right.items()
    }
    tensors = {key: value for key, value in (tensors | changes).items() if value is not None}
    write_folder(folder, config, tensors)
    return tensors


def loaded_arrays(directory: Path) -> dict[str, Tensor]:
    """Return all arrays of a checkpoint."""
    shapes = megackpt.load_tensors_metadata(directory)
    request = {
        key: ShardedTensor.from_rank_offsets(key, torch.empty(spec.global_shape, dtype=spec.dtype))
        for key, spec in shapes.items()
    }
    return dict(megackpt.load(request, directory))


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder, read by the safetensors library."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same_tensors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert actual[key].dtype == tensor.dtype, key
        assert torch.equal(actual[key], tensor), key
