"""A GPT with experts and its optimizer, saved at each layout, loaded at each other, saved again: bit-equal.

CI takes a sample of the 182 pairs, and of 30 for each model with layers of other kinds. All:
`pytest tests/system/training/test_moe_layout_pairs.py --all`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import LoadOptions, load_common_state_dict, load_plain_tensors
from megackpt.engine.data.tensor_bytes import as_bits
from megackpt.optim.master_optimizer import MasterOptimizer
from megackpt.parallel import ModelChunks, ParallelGroups, forward_backward, update_expert_bias
from megackpt.testing.ranks import RankPool
from tests.support.effort import tries_all
from tests.support.gpt import (
    ALL_MOE,
    DELTA_NET,
    HYBRID,
    LATENT,
    LAYOUTS,
    MAMBA,
    build,
    micro_batches,
    state_of,
)

CONFIG = replace(ALL_MOE, params_dtype=torch.bfloat16)
CONFIGS = {
    "experts": CONFIG,
    "latent": replace(LATENT, params_dtype=torch.bfloat16),
    "delta_net": replace(DELTA_NET, params_dtype=torch.bfloat16),
    "mamba": replace(MAMBA, params_dtype=torch.bfloat16),
    "hybrid": replace(HYBRID, params_dtype=torch.bfloat16),
}
NAMES = list(LAYOUTS)
# Target: sources. From all experts on a rank to one on a rank and back, and changes of all axes at once.
SAMPLE = {
    "dp8-ep8": ["dp8", "tp2-pp2-vpp2-dp2-ep4-etp1-uneven"],
    "tp2-pp2-vpp2-dp2-ep4-etp1-uneven": ["dp8-ep8"],
}
NAMES_OF_OTHERS = [
    "dp8-ep8",
    "tp4-dp2-ep4-etp1",
    "tp2-cp2-dp2-ep2-etp4",
    "cp4-dp2-ep2",
    "pp4-dp2-ep2",
    "tp2-pp2-vpp2-dp2-ep4-etp1-uneven",
]
MAMBA_NAMES = ["tp8-ep8-etp1", *NAMES_OF_OTHERS[1:]]  # more ranks in tp than groups
OTHERS = [
    *itertools.product(("latent", "delta_net"), NAMES_OF_OTHERS),
    *itertools.product(("mamba", "hybrid"), MAMBA_NAMES),
]
SAMPLE_OF_OTHERS = {
    ("latent", "dp8-ep8"): ["tp2-pp2-vpp2-dp2-ep4-etp1-uneven"],
    ("delta_net", "tp4-dp2-ep4-etp1"): ["tp2-pp2-vpp2-dp2-ep4-etp1-uneven"],
    ("mamba", "cp4-dp2-ep2"): ["tp8-ep8-etp1"],
    ("hybrid", "tp8-ep8-etp1"): ["tp2-pp2-vpp2-dp2-ep4-etp1-uneven"],
}
STATES = ("exp_avg", "exp_avg_sq", "fp32_param", "step")


def build_rank(
    model_name: str, name: str, *, seed: int
) -> tuple[ModelChunks, MasterOptimizer, ParallelGroups]:
    groups = ParallelGroups.create(LAYOUTS[name].layout)
    model = build(LAYOUTS[name], CONFIGS[model_name], groups, seed=seed)
    optimizer = LAYOUTS[name].optimizer(
        [
            {"name": "matrices", "params": [p for p in model.parameters() if p.ndim > 1]},
            {"name": "others", "params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lambda params: torch.optim.AdamW(params, lr=0.01, betas=(0.8, 0.9)),
        groups,
        bucket_size=1001,  # shards begin and end at odd places of parameters
    )
    return model, optimizer, groups


def train_and_save(model_name: str, name: str, directory: Path) -> None:
    """One step makes moments, numbers of steps and biases of experts that no new model has."""
    model, optimizer, groups = build_rank(model_name, name, seed=NAMES.index(name))
    forward_backward(model, micro_batches(groups), groups)
    optimizer.step()
    update_expert_bias(model, groups)
    megackpt.save(state_of(model, optimizer), directory)


def load_and_save(model_name: str, name: str, sources: dict[str, Path], directory: Path) -> None:
    """Load each checkpoint into one model of another seed and its optimizer, and save again.

    Every source was made of another seed, so what stays of the load before is seen.
    """
    model, optimizer, _ = build_rank(model_name, name, seed=len(NAMES))
    for source, path in sources.items():
        state = state_of(model, optimizer)
        loaded = megackpt.load(state, path, options=LoadOptions(complete=True))
        optimizer.load_sharded_state_dict(loaded["optimizer"])
        megackpt.save(state_of(model, optimizer), directory / source)


def arrays_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all arrays; those of the vocabulary without padding, whose size depends on the layout."""
    arrays = load_plain_tensors(checkpoint)
    padded = {key for key, array in arrays.items() if array.ndim and "word_embeddings" in key}
    return {k: a[: CONFIG.vocab_size] if k in padded else a for k, a in arrays.items()}


def assert_equal(first: Path, second: Path) -> None:
    a, b = arrays_of(first), arrays_of(second)
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].shape == b[key].shape, key
        assert torch.equal(as_bits(a[key]), as_bits(b[key])), key
    assert load_common_state_dict(first) == load_common_state_dict(second)


class Sources:
    """The checkpoint of a model at each layout, made when a test first asks for it."""

    def __init__(self, pool: RankPool, model_name: str, directory: Path) -> None:
        self.model_name = model_name
        self._pool = pool
        self._directory = directory
        self._saved: set[str] = set()

    def path(self, name: str) -> Path:
        """Return the checkpoint of a layout."""
        path = self._directory / name
        if name not in self._saved:
            self._pool.run(train_and_save, LAYOUTS[name].layout.world_size, self.model_name, name, path)
            self._saved.add(name)
        return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> Sources:
    return Sources(rank_pool, "experts", tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def sources_of_others(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> dict[str, Sources]:
    names = {model_name for model_name, _ in OTHERS}
    return {name: Sources(rank_pool, name, tmp_path_factory.mktemp(name)) for name in names}


@pytest.mark.parametrize("target", NAMES if tries_all() else SAMPLE)
def test_what_any_layout_saved_a_layout_loads_and_saves_bit_equal(
    target: str, sources: Sources, rank_pool: RankPool, tmp_path: Path
) -> None:
    names = [n for n in NAMES if n != target] if tries_all() else SAMPLE[target]
    check_pairs(target, names, sources, rank_pool, tmp_path)


@pytest.mark.parametrize(("model_name", "target"), OTHERS if tries_all() else SAMPLE_OF_OTHERS)
def test_layers_of_other_kinds_are_loaded_at_any_layout(
    model_name: str,
    target: str,
    sources_of_others: dict[str, Sources],
    rank_pool: RankPool,
    tmp_path: Path,
) -> None:
    every = [name for model, name in OTHERS if model == model_name and name != target]
    names = every if tries_all() else SAMPLE_OF_OTHERS[model_name, target]
    check_pairs(target, names, sources_of_others[model_name], rank_pool, tmp_path)


def check_pairs(target: str, names: list[str], sources: Sources, pool: RankPool, directory: Path) -> None:
    """Load what some layouts saved at the target, save it again, and compare."""
    paths = {name: sources.path(name) for name in names}
    pool.run(load_and_save, LAYOUTS[target].layout.world_size, sources.model_name, target, paths, directory)
    for name, path in paths.items():
        assert_equal(path, directory / name)


def test_the_checkpoints_hold_experts_biases_masters_moments_and_steps(sources: Sources) -> None:
    arrays = arrays_of(sources.path("dp8-ep8"))
    model = {key for key in arrays if not key.startswith("optimizer.")}
    assert arrays["decoder.layers.mlp.experts.linear_fc1.weight.gate"].shape == (4, 8, 16, 32)
    bias = "decoder.layers.mlp.router.expert_bias"
    assert arrays[bias].dtype == torch.float32
    assert bool(arrays[bias].any())
    trained = model - {bias}
    for state in STATES:
        prefix = f"optimizer.state.{state}."
        kept = {key.removeprefix(prefix) for key in arrays if key.startswith(prefix)}
        if state == "step":  # one number a parameter, whatever parts it is stored in
            assert kept
            assert all(bool((arrays[prefix + key] == 1).all()) for key in kept)
        else:
            assert kept == trained, state


def test_the_checkpoints_hold_layers_for_further_tokens_and_one_embedding(
    sources_of_others: dict[str, Sources],
) -> None:
    arrays = arrays_of(sources_of_others["latent"].path("tp2-pp2-vpp2-dp2-ep4-etp1-uneven"))
    for layer in ("decoder.layers.3", "mtp.layers.1.transformer_layer"):
        for state in ("", "optimizer.state.exp_avg.", "optimizer.state.fp32_param."):
            assert arrays[f"{state}{layer}.self_attention.linear_kv_down_proj.weight"].shape == (14, 32)
    assert [key for key in arrays if "embedding" in key and not key.startswith("optimizer.")] == [
        "embedding.word_embeddings.weight"
    ]


@pytest.mark.parametrize(
    ("model_name", "block", "names"),
    [
        ("delta_net", "decoder.layers.3.self_attention", ("A_log", "dt_bias")),
        ("hybrid", "decoder.layers.0.mixer", ("A_log", "D", "dt_bias")),
    ],
)
def test_the_checkpoints_hold_parameters_in_float32_without_masters(
    sources_of_others: dict[str, Sources], model_name: str, block: str, names: tuple[str, ...]
) -> None:
    arrays = arrays_of(sources_of_others[model_name].path("tp2-pp2-vpp2-dp2-ep4-etp1-uneven"))
    for name in names:
        key = f"{block}.{name}"
        assert arrays[key].shape == (8,)
        assert arrays[key].dtype == torch.float32
        assert bool(arrays[f"optimizer.state.exp_avg.{key}"].any())
        assert f"optimizer.state.fp32_param.{key}" not in arrays
    assert f"optimizer.state.fp32_param.{block}.out_proj.weight" in arrays
