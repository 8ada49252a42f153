"""Folders of transformers begin a run at any layout, and are written again from checkpoints of any.

Weights are compared bit for bit with arrays that these tests make from the transformers model itself, without
a map, or with its folders; `test_huggingface_logits` says what models compute with them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import megackpt
from megackpt import CheckpointError, KeyRule, LoadOptions, Policy, ShardedTensor
from megackpt.maps import weights_of
from megackpt.maps.requests import parameter_key
from megackpt.storage import ObjectStore
from megackpt.testing.ranks import RankPool
from megackpt.training.optim import DistributedOptimizer
from megackpt.training.parallel import ParallelGroups, ParallelLayout
from models import GPTConfig, build_gpt
from models.huggingface import gpt_config
from tests.support.counting import CountingStore
from tests.support.effort import few, sampled
from tests.support.huggingface_configs import RECURRENT
from tests.support.huggingface_folders import assert_same_tensors, folder_tensors
from tests.support.huggingface_models import (
    FAMILIES,
    SEQUENCE,
    arrays_in_our_names,
    layout_of,
    random_config,
    random_model,
    stays_in_float32,
)
from tests.support.optimizers import tensors_of
from tests.support.s3_server import BUCKET, S3Server, options_for

transformers = pytest.importorskip("transformers", reason="the extra huggingface is not installed")

SEEDS = few(2, of=5)
SHARDS = 40_000  # bytes
Arrays = Mapping[str, npt.NDArray[Any]]


class Folder(NamedTuple):
    """A folder that transformers has written."""

    path: Path
    config: GPTConfig
    arrays: Arrays  # its weights in our names


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that writes a folder of a random model once, by family and seed."""
    root = tmp_path_factory.mktemp("folders")

    @functools.cache
    def folder(family: str, seed: int) -> Folder:
        path = root / f"{family}-{seed}"
        model: Any = random_model(random_config(family, seed), seed)
        model.save_pretrained(path, max_shard_size=f"{SHARDS // 1000}KB")
        config = gpt_config(json.loads((path / "config.json").read_text()))
        # Rows of the vocabulary are padded, and a scaling for longer sequences is used.
        config = replace(config, make_vocab_divisible=8, seq_length=max(config.seq_length, SEQUENCE))
        arrays = {key: array.detach().numpy() for key, array in arrays_in_our_names(model).items()}
        return Folder(path, config, arrays)

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
) -> set[str]:
    """Import at a layout with bfloat16 and with float32 parameters; return the keys that were compared."""
    groups = ParallelGroups.create(layout)
    keys: set[str] = set()
    for dtype in (torch.bfloat16, torch.float32):
        model, state = _state(replace(config, params_dtype=dtype), groups, sequence_parallel=layout.tp > 1)
        weights = weights_of(state)
        _, report = megackpt.load_with_report(weights, path, maps="auto", options=LoadOptions(**options))
        params = {tensor.key for tensor in tensors_of(weights["model"]) if not stays_in_float32(tensor.key)}
        assert {array.key for array in report.cast} == (params if dtype == torch.bfloat16 else set())
        keys |= _check_weights(weights, arrays)
        _check_weights({"model": model.sharded_state_dict()}, arrays)  # it computes with what was loaded
    return keys


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT])
def test_a_folder_is_imported_on_one_rank(folders: Any, family: str, seed: int) -> None:
    folder = folders(family, seed)
    keys = _import(folder.path, folder.config, folder.arrays, ParallelLayout())
    assert {key for key in keys if key == parameter_key(key)} == set(folder.arrays)
    masters = {parameter_key(key) for key in keys if key != parameter_key(key)}
    assert masters == {key for key in folder.arrays if not stays_in_float32(key)}


def _import_all(cases: list[tuple[Any, ...]], **options: Any) -> list[set[str]]:
    return [_import(*case, **options) for case in cases]


@sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_imported_on_several_ranks(rank_pool: RankPool, folders: Any, family: str) -> None:
    written = [folders(family, seed) for seed in range(SEEDS)]
    cases = [(f.path, f.config, f.arrays, layout_of(f.config)) for f in written]
    assert cases[0][-1].tp == 2
    assert cases[0][-1].ep == (1 if written[0].config.moe is None else 2)
    ranks = rank_pool.run(_import_all, 4, cases)
    for folder, *keys_of_ranks in zip(written, *ranks, strict=True):
        keys = set().union(*keys_of_ranks)
        assert {parameter_key(key) for key in keys} == set(folder.arrays)
        assert any(key != parameter_key(key) for key in keys)


def _bytes_read(path: Path, layout: ParallelLayout, exchange: Any, left_out: Sequence[str] = ()) -> float:
    """Return how many times the bytes that this rank needs it reads, headers included."""
    config = gpt_config(json.loads((path / "config.json").read_text()))
    model = build_gpt(config, ParallelGroups.create(layout))
    store = CountingStore(path)
    _, report = megackpt.load_with_report(
        {"model": model.sharded_state_dict()},
        store,
        maps="auto",
        options=LoadOptions(
            exchange=exchange, exclude=left_out, rules=(KeyRule(keys="*", missing=Policy.IGNORE),)
        ),
    )
    read = sum(nbytes for name, _, nbytes in store.reads if name.endswith(".safetensors"))
    return read / sum(array.nbytes - array.padded_nbytes for array in report.arrays)


# Each rank has some columns of the weights that are cut over tp along their inputs. Columns are less than
# FAR_BYTES apart from row to row, so a rank that reads for itself reads these weights whole: 1.7 times what
# it needs of the model. So by default ranks read for each other.
CUT_ALONG_INPUTS = ("*.linear_proj.weight", "*.linear_fc2.weight")
BYTES = {
    "tp4": ("llama", ParallelLayout(tp=4), "auto", ()),
    "tp4, less what is cut along inputs": ("llama", ParallelLayout(tp=4), "direct", CUT_ALONG_INPUTS),
    "ep2": ("mixtral", ParallelLayout(dp=4, ep=2), "auto", ()),
}


@pytest.mark.parametrize("name", BYTES)
def test_ranks_read_what_they_need(rank_pool: RankPool, tmp_path: Path, name: str) -> None:
    family, layout, exchange, left_out = BYTES[name]
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=1000,
        hidden_size=512,  # parts of ranks are farther apart than 64 KiB
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        **({"num_local_experts": 4} if layout.ep > 1 else {}),
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ratios = rank_pool.run(_bytes_read, 4, tmp_path, layout, exchange, left_out)
    assert max(ratios) <= 1.05, ratios


@pytest.mark.parametrize("exchange", ["direct", "all_to_all"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_every_way_to_exchange_loads_the_same(
    rank_pool: RankPool, folders: Any, family: str, exchange: str
) -> None:
    folder = folders(family, 0)
    case = folder.path, folder.config, folder.arrays, layout_of(folder.config)
    load_all = functools.partial(_import_all, exchange=exchange, complete=True)
    results = rank_pool.run(load_all, 4, [case])
    assert {parameter_key(key) for (keys,) in results for key in keys} == set(folder.arrays)


def _error_of(path: Path, config: GPTConfig, layout: ParallelLayout, is_edited: bool) -> str:
    """Return the error of a load, in which ranks may give different configs."""
    options: dict[str, Any] = {}
    if is_edited:
        edited = json.loads((path / "config.json").read_text())
        edited["num_hidden_layers"] -= dist.get_rank()
        options = {"config": edited, "strict": "ignore_all"}
    state = build_gpt(config, ParallelGroups.create(layout)).sharded_state_dict()
    with pytest.raises(CheckpointError) as caught:
        megackpt.load({"model": state}, path, maps="auto", **options)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_all_ranks_get_the_same_error(rank_pool: RankPool, folders: Any, tmp_path: Path) -> None:
    folder = folders("llama", 0)
    first, second = rank_pool.run(_error_of, 2, folder.path, folder.config, ParallelLayout(dp=2), True)
    assert first == second
    assert first.startswith("MismatchError: ")

    broken = shutil.copytree(folder.path, tmp_path / "broken")
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    file = broken / index["weight_map"]["model.norm.weight"]
    tensors = {key: t for key, t in load_file(file).items() if key != "model.norm.weight"}
    save_file(tensors, file)
    del index["weight_map"]["model.norm.weight"]
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    first, second = rank_pool.run(_error_of, 2, broken, folder.config, ParallelLayout(pp=2), False)
    assert first == second
    assert re.search(
        r"(?s)^MissingKeyError.*'model.norm.weight' \(ours: 'decoder.final_layernorm.weight'\)", first
    )


def test_a_folder_is_imported_from_an_object_store(folders: Any, s3_server: S3Server) -> None:
    folder = folders("qwen3", 0)
    options = options_for(s3_server.port)
    with contextlib.closing(ObjectStore(f"s3://{BUCKET}/hugging-face", options=options)) as store:
        for file in folder.path.iterdir():
            store.write(file.name, file.read_bytes())
        _import(store, folder.config, folder.arrays, ParallelLayout())


def _load_dtensors(path: Path, arrays: Arrays) -> list[str]:
    """Return the keys of DTensors, cut over 2 ranks, that do not have their part of the arrays."""
    mesh = init_device_mesh("cpu", (2,))
    state = {
        key: distribute_tensor(torch.zeros(array.shape), mesh, [Shard(array.ndim - 1)])
        for key, array in arrays.items()
    }
    loaded = megackpt.load(dict(state), path, maps="auto", options=LoadOptions(complete=True))
    assert all(loaded[key] is state[key] for key in state)
    return [key for key, array in arrays.items() if not np.array_equal(state[key].full_tensor(), array)]


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss"])
def test_dtensors_are_filled(rank_pool: RankPool, folders: Any, family: str) -> None:
    folder = folders(family, 0)
    assert rank_pool.run(_load_dtensors, 2, folder.path, folder.arrays) == [[], []]


def _assert_loads(folder: Path, original: Path) -> None:
    """Check that transformers loads a folder completely, to the same weights as the original."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, notes = load(folder, output_loading_info=True)
    assert not any(notes.values()), notes
    reference = load(original)
    assert type(model) is type(reference)
    assert_same_tensors(dict(model.state_dict()), dict(reference.state_dict()))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT])
def test_a_folder_comes_back_from_a_checkpoint(folders: Any, family: str, seed: int, tmp_path: Path) -> None:
    original = folders(family, seed).path
    megackpt.import_huggingface(original, tmp_path / "saved")
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "folder", max_file_bytes=SHARDS)
    assert_same_tensors(folder_tensors(tmp_path / "folder"), folder_tensors(original))
    _assert_loads(tmp_path / "folder", original)


def _save(folder: Path, target: Path, config: GPTConfig) -> None:
    """Load a folder into a model in bfloat16 and its distributed optimizer, and save both."""
    layout = layout_of(config)
    config = replace(config, params_dtype=torch.bfloat16)
    _, state = _state(config, ParallelGroups.create(layout), sequence_parallel=layout.tp > 1)
    megackpt.load(weights_of(state), folder, maps="auto")
    metadata = {"huggingface_config": json.loads((folder / "config.json").read_text())}
    megackpt.save(state, target, content_metadata=metadata)


def _save_all(cases: list[tuple[Any, ...]]) -> None:
    for case in cases:
        _save(*case)


@sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_masters_of_any_layout_are_exported(
    rank_pool: RankPool, folders: Any, family: str, tmp_path: Path
) -> None:
    written = [folders(family, seed) for seed in range(SEEDS)]
    assert layout_of(written[0].config).tp == 2
    saved = [tmp_path / f"saved{seed}" for seed in range(SEEDS)]
    rank_pool.run(_save_all, 4, [(f.path, s, f.config) for f, s in zip(written, saved, strict=True)])
    for folder, source in zip(written, saved, strict=True):
        expected = folder_tensors(folder.path)
        masters, model = source.with_suffix(".masters"), source.with_suffix(".model")
        megackpt.export_huggingface(source, masters, weights="masters", buffer_bytes=9000)
        assert_same_tensors(folder_tensors(masters), expected)
        _assert_loads(masters, folder.path)
        megackpt.export_huggingface(source, model, max_file_bytes=SHARDS)
        assert_same_tensors(
            folder_tensors(model),
            {key: array if stays_in_float32(key) else array.bfloat16() for key, array in expected.items()},
        )
