"""Folders of transformers are the start of a run at any layout: weights, masters, logits, bytes read, errors.

The tolerance of logits is that of `test_huggingface_logits`. Everything else is compared bit for bit with
arrays that these tests make from the transformers model itself, without a map.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import megackpt
from megackpt import DeclarationError, LoadOptions, ShardedTensor
from megackpt.maps import weights_of
from megackpt.maps.weights import parameter_key
from megackpt.optim import DistributedOptimizer
from megackpt.parallel import ParallelGroups, ParallelLayout
from megackpt.testing.ranks import RankPool
from models import GPTConfig, build_gpt
from models.huggingface import gpt_config
from tests.huggingface_models import (
    FAMILIES,
    SEQUENCE,
    arrays_in_our_names,
    assert_close,
    logits_of,
    random_config,
    random_model,
    token_ids,
)
from tests.optim_world import tensors_of

pytest.importorskip("transformers", reason="the extra huggingface is not installed")

SEEDS = 5
MAPPED = [family for family in FAMILIES if family != "phi3"]  # which no map is for
Arrays = Mapping[str, npt.NDArray[Any]]


class Folder(NamedTuple):
    """A folder that transformers has written."""

    path: Path
    config: GPTConfig
    arrays: Arrays  # its weights in our names
    logits: Tensor


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that writes a folder of a random model once, by family and seed."""
    root = tmp_path_factory.mktemp("folders")

    @functools.cache
    def folder(family: str, seed: int) -> Folder:
        path = root / f"{family}-{seed}"
        model: Any = random_model(random_config(family, seed), seed)
        model.save_pretrained(path, max_shard_size="40KB")
        config = gpt_config(json.loads((path / "config.json").read_text()))
        # Rows of the vocabulary are padded, and a scaling for longer sequences is used.
        config = replace(config, make_vocab_divisible=8, seq_length=max(config.seq_length, SEQUENCE))
        arrays = {key: array.detach().numpy() for key, array in arrays_in_our_names(model).items()}
        with torch.no_grad():
            return Folder(path, config, arrays, model(token_ids(config.vocab_size)).logits)

    return folder


def _state(
    config: GPTConfig, groups: ParallelGroups, *, sequence_parallel: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Return a model whose parameters are all NaN, and its whole state with an optimizer."""
    model = build_gpt(config, groups, sequence_parallel=sequence_parallel)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(torch.nan)
    named = [{"params": list(model.parameters()), "name": "all"}]
    optimizer = DistributedOptimizer(named, _adam, groups)
    declared = model.sharded_state_dict()
    return model, {"model": declared, "optimizer": optimizer.sharded_state_dict(declared)}


def _adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-3)


def _expected(tensor: ShardedTensor, arrays: Arrays) -> npt.NDArray[Any]:
    """Return the elements of a tensor, of a box or a flat range; 0 for padding of the vocabulary."""
    array = arrays[parameter_key(tensor.key)]
    at = tensor.global_coordinates()
    is_stored = at[0] < array.shape[0]
    values: npt.NDArray[Any] = np.zeros(at[0].shape, np.float32)
    values[is_stored] = array[tuple(axis[is_stored] for axis in at)]
    return values


def _check_weights(state: dict[str, Any], arrays: Arrays) -> set[str]:
    """Check parameters and masters bit for bit; return the keys of those with elements."""
    keys = set()
    for tensor in tensors_of(state):
        assert tensor.data is not None
        expected = torch.from_numpy(_expected(tensor, arrays)).to(tensor.dtype)
        assert torch.equal(tensor.data.detach().flatten(), expected), tensor.key
        keys.add(tensor.key)
    return keys


def _import(
    path: Path | str, config: GPTConfig, arrays: Arrays, layout: ParallelLayout, **options: Any
) -> tuple[Any, set[str]]:
    """Import at a layout with bfloat16 and with float32 parameters; return logits of the latter."""
    groups = ParallelGroups.create(layout)
    keys: set[str] = set()
    for dtype in (torch.bfloat16, torch.float32):
        model, state = _state(replace(config, params_dtype=dtype), groups, sequence_parallel=layout.tp > 1)
        weights = weights_of(state)
        _, report = megackpt.load_with_report(weights, path, maps="auto", options=LoadOptions(**options))
        params = {tensor.key for tensor in tensors_of(weights["model"])}
        assert {array.key for array in report.cast} == (params if dtype == torch.bfloat16 else set())
        keys |= _check_weights(weights, arrays)
    return logits_of(model, config, groups), keys


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("family", MAPPED)
def test_a_folder_is_imported_on_one_rank(folders: Any, family: str, seed: int) -> None:
    folder = folders(family, seed)
    logits, keys = _import(folder.path, folder.config, folder.arrays, ParallelLayout())
    assert_close(logits, folder.logits)
    assert {key for key in keys if key == parameter_key(key)} == set(folder.arrays)
    assert {parameter_key(key) for key in keys if key != parameter_key(key)} == set(folder.arrays)


def _import_all(cases: list[tuple[Any, ...]]) -> list[tuple[Any, set[str]]]:
    return [_import(*case) for case in cases]


def _layout_of(config: GPTConfig) -> ParallelLayout:
    """Return a layout of 4 ranks with as many kinds of cuts as a config allows."""
    if config.moe is not None:
        layouts = [ParallelLayout(tp=2, pp=2, ep=2, etp=1), ParallelLayout(pp=2, cp=2, ep=2)]
    else:
        layouts = [ParallelLayout(tp=2, pp=2)]
    for layout in layouts:
        try:
            config.check_layout(layout)
        except DeclarationError:
            continue
        return layout
    return ParallelLayout(pp=2, cp=2)


@pytest.mark.multiprocess
@pytest.mark.parametrize("family", MAPPED)
def test_a_folder_is_imported_on_several_ranks(rank_pool: RankPool, folders: Any, family: str) -> None:
    written = [folders(family, seed) for seed in range(SEEDS)]
    cases = [(f.path, f.config, f.arrays, _layout_of(f.config)) for f in written]
    assert cases[0][-1].tp == 2
    assert cases[0][-1].ep == (1 if written[0].config.moe is None else 2)
    for results in zip(*rank_pool.run(_import_all, 4, cases), strict=True):
        folder = written.pop(0)
        assert {parameter_key(key) for _, keys in results for key in keys} == set(folder.arrays)
        assert any(key != parameter_key(key) for _, keys in results for key in keys)
        for logits, _ in results:
            if logits is not None:
                assert_close(logits, folder.logits)
