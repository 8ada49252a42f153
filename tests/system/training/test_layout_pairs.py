"""Models and their optimizers, saved at each layout, loaded at each other and saved again: bit-equal arrays.

CI takes a sample of the pairs; all of them:
`pytest tests/system/training/test_layout_pairs.py --all`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import LoadOptions
from megackpt.engine.data.tensor_bytes import as_bits
from megackpt.testing.ranks import RankPool
from megackpt.training.optim.master_optimizer import MasterOptimizer
from megackpt.training.parallel import (
    MicroBatch,
    ModelChunks,
    ParallelGroups,
    ParallelLayout,
    forward_backward,
    update_expert_bias,
)
from models import BertConfig, LearnedPositions, MLPConfig, T5Config, build_bert, build_gpt, build_t5
from tests.support.effort import sampled, tries_all
from tests.support.gpt import (
    ALL_MOE,
    CONFIG,
    DELTA_NET,
    HYBRID,
    LATENT,
    LAYOUTS,
    MAMBA,
    Case,
    arrays_of,
    assert_equal_checkpoints,
    build,
    resume,
    state_of,
)
from tests.support.huggingface_models import context_share_of

VOCAB_SIZE = CONFIG.vocab_size  # not a multiple of 2 or 4: padded differently at each tp
STATES = ("exp_avg", "exp_avg_sq", "fp32_param", "step")
UNEVEN = "tp2-pp2-vpp2-dp2-ep4-etp1-uneven"

DENSE_LAYOUTS = {
    "one": Case(ParallelLayout()),
    "tp4": Case(ParallelLayout(tp=4)),
    "pp4": Case(ParallelLayout(pp=4)),
    "dp4": Case(ParallelLayout(dp=4)),
    "tp2-pp2": Case(ParallelLayout(tp=2, pp=2)),
    "tp2-dp2": Case(ParallelLayout(tp=2, dp=2)),
    "pp2-dp2": Case(ParallelLayout(pp=2, dp=2)),
    "pp2-vpp2": Case(ParallelLayout(pp=2, vpp=2)),
    "pp2-vpp2-dp2-uneven": Case(ParallelLayout(pp=2, vpp=2, dp=2), stages="E|ttt||tL"),
    "pp3-uneven": Case(ParallelLayout(pp=3), stages="Et|ttt|L"),
}
# Of 6 layers; those of a T5 are 2 of the encoder and 4 of the decoder.
ENCODER_LAYOUTS = {
    "one": Case(ParallelLayout()),
    "dp4": Case(ParallelLayout(dp=4)),
    "tp2-dp2-sequence": Case(ParallelLayout(tp=2, dp=2), True),
    "tp2-pp2-split": Case(ParallelLayout(tp=2, pp=2), True, "Ett|ttttL"),
    "tp2-cp2-sequence": Case(ParallelLayout(tp=2, cp=2), True),
    "pp4-uneven": Case(ParallelLayout(pp=4), stages="E|ttt|tt|tL"),
    "pp2-vpp2-dp2": Case(ParallelLayout(pp=2, vpp=2, dp=2)),
}
OTHER_LAYOUTS = ["dp8-ep8", "tp4-dp2-ep4-etp1", "tp2-cp2-dp2-ep2-etp4", "cp4-dp2-ep2", "pp4-dp2-ep2", UNEVEN]
MAMBA_LAYOUTS = ["tp8-ep8-etp1", *OTHER_LAYOUTS[1:]]  # more ranks in tp than groups


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is trained."""

    config: Any  # its config, for float32
    layouts: Mapping[str, Case]  # where it is saved and loaded
    build: Callable[..., ModelChunks] = build_gpt  # returns its chunks


def _some(names: list[str]) -> dict[str, Case]:
    return {name: LAYOUTS[name] for name in names}


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_layers": 6,
    "num_heads": 4,
    "ffn_hidden_size": 24,
    "make_vocab_divisible": 1,
}
MODELS = {
    "dense": Model(replace(CONFIG, moe=None), DENSE_LAYOUTS),
    "dense-untied": Model(replace(CONFIG, moe=None, tied_embeddings=False), DENSE_LAYOUTS),
    "experts": Model(ALL_MOE, LAYOUTS),
    "mixed": Model(CONFIG, _some(["cp2-dp4-ep8", "tp2-cp2-dp2-ep2-etp4", "tp2-pp2-dp2-ep2-etp1", UNEVEN])),
    "latent": Model(LATENT, _some(OTHER_LAYOUTS)),
    "delta_net": Model(DELTA_NET, _some(OTHER_LAYOUTS)),
    "mamba": Model(MAMBA, _some(MAMBA_LAYOUTS)),
    "hybrid": Model(HYBRID, _some(MAMBA_LAYOUTS)),
    "t5": Model(
        T5Config(
            **_SIZES,
            num_encoder_layers=2,
            seq_length=12,
            encoder_length=8,
            relative_buckets=8,
            max_distance=6,
            mlp=MLPConfig(activation="gelu_tanh"),
        ),
        ENCODER_LAYOUTS,
        build_t5,
    ),
    "bert": Model(
        BertConfig(**_SIZES, seq_length=8, positions=LearnedPositions(count=9)), ENCODER_LAYOUTS, build_bert
    ),
}
# Model and target: sources. From all experts on a rank to one on a rank and back, and changes of all axes.
SAMPLE = {
    ("dense", "tp2-dp2"): ["pp2-vpp2-dp2-uneven", "one"],
    ("dense", "pp3-uneven"): ["tp4"],
    ("dense", "one"): ["pp3-uneven", "tp2-pp2"],
    ("dense-untied", "pp2-vpp2"): ["tp2-dp2", "dp4"],
    ("dense-untied", "tp4"): ["pp2-dp2"],
    ("dense-untied", "pp2-vpp2-dp2-uneven"): ["pp4", "tp4"],
    ("experts", "dp8-ep8"): ["dp8", UNEVEN],
    ("experts", UNEVEN): ["dp8-ep8"],
    ("mixed", "cp2-dp4-ep8"): [UNEVEN],
    ("mixed", "tp2-cp2-dp2-ep2-etp4"): ["tp2-pp2-dp2-ep2-etp1"],
    ("latent", "dp8-ep8"): [UNEVEN],
    ("delta_net", "tp4-dp2-ep4-etp1"): [UNEVEN],
    ("mamba", "cp4-dp2-ep2"): ["tp8-ep8-etp1"],
    ("hybrid", "tp8-ep8-etp1"): [UNEVEN],
    ("t5", "tp2-pp2-split"): ["pp2-vpp2-dp2"],
    ("bert", "tp2-pp2-split"): ["pp2-vpp2-dp2"],
}
TARGETS = [(model, target) for model in MODELS for target in MODELS[model].layouts]


def build_rank(
    model_name: str, case: Case, *, seed: int
) -> tuple[ModelChunks, MasterOptimizer, ParallelGroups]:
    made, groups = MODELS[model_name], ParallelGroups.create(case.layout)
    config = replace(made.config, params_dtype=torch.bfloat16)
    model = build(case, config, groups, seed=seed, make=made.build)
    optimizer = case.optimizer(
        [
            {"name": "matrices", "params": [p for p in model.parameters() if p.ndim > 1]},
            {"name": "others", "params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lambda params: torch.optim.AdamW(params, lr=0.003),
        groups,
        bucket_size=1001,  # shards begin and end at odd places of parameters
    )
    return model, optimizer, groups


def batches_of(config: Any, groups: ParallelGroups, *, count: int) -> list[MicroBatch]:
    """Return this rank's micro-batches."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randint, 0, VOCAB_SIZE, generator=generator)
    labels = config.seq_length - getattr(config, "encoder_length", 0)
    batches = [MicroBatch(draw((2, config.seq_length)), draw((2, labels))) for _ in range(count)]
    return [context_share_of(config, b, groups.cp) for b in batches[groups.dp.rank :: groups.dp.size]]


def train_and_save(model_name: str, name: str, directory: Path) -> None:
    """One step makes moments, numbers of steps and biases of experts that no new model has."""
    made = MODELS[model_name]
    seed = list(made.layouts).index(name)
    model, optimizer, groups = build_rank(model_name, made.layouts[name], seed=seed)
    forward_backward(model, batches_of(made.config, groups, count=8), groups)
    optimizer.step()
    update_expert_bias(model, groups)
    for group in optimizer.param_groups:
        group["lr"] = 0.0123
    megackpt.save(state_of(model, optimizer), directory)


def load_and_save(
    model_name: str, name: str, sources: dict[str, Path], directory: Path, gathered: bool = False
) -> None:
    """Load each checkpoint into one model of another seed and its optimizer, and save again."""
    layouts = MODELS[model_name].layouts
    model, optimizer, _ = build_rank(model_name, layouts[name], seed=len(layouts))
    how = {"gathered": True} if gathered else {}  # which not all optimizers know
    for source, path in sources.items():
        resume(model, optimizer, path)
        megackpt.save(state_of(model, optimizer, **how), directory / source)


class Sources:
    """The checkpoint of each model at each layout, made when a test first asks for it."""

    def __init__(self, pool: RankPool, directory: Path) -> None:
        self._pool, self._directory = pool, directory

    def path(self, model_name: str, name: str) -> Path:
        path = self._directory / model_name / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            ranks = MODELS[model_name].layouts[name].layout.world_size
            self._pool.run(train_and_save, ranks, model_name, name, path)
        return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> Sources:
    return Sources(rank_pool, tmp_path_factory.mktemp("sources"))


@pytest.mark.parametrize(("model_name", "target"), TARGETS if tries_all() else SAMPLE)
def test_what_one_layout_saved_another_loads_and_saves_bit_equal(
    model_name: str, target: str, sources: Sources, rank_pool: RankPool, tmp_path: Path
) -> None:
    layouts = MODELS[model_name].layouts
    names = [name for name in layouts if name != target] if tries_all() else SAMPLE[model_name, target]
    paths = {name: sources.path(model_name, name) for name in names}
    ranks = layouts[target].layout.world_size
    rank_pool.run(load_and_save, ranks, model_name, target, paths, tmp_path)
    for name, path in paths.items():
        assert_equal_checkpoints(path, tmp_path / name)


def test_gathered_state_of_experts_is_the_same_arrays(
    rank_pool: RankPool, sources: Sources, tmp_path: Path
) -> None:
    source = sources.path("experts", "dp8-ep8")
    rank_pool.run(load_and_save, 8, "experts", "dp8-ep2-etp2", {"gathered": source}, tmp_path, True)
    assert_equal_checkpoints(source, tmp_path / "gathered")


@pytest.mark.parametrize(
    ("model_name", "names"),
    [
        ("dense", list(DENSE_LAYOUTS)),
        ("dense-untied", list(DENSE_LAYOUTS)),
        ("experts", ["dp8-ep8"]),
        ("t5", ["pp2-vpp2-dp2"]),
        ("bert", ["pp2-vpp2-dp2"]),
    ],
)
def test_the_checkpoints_hold_weights_that_are_rounded_masters_and_moments_and_steps(
    model_name: str, names: list[str], sources: Sources
) -> None:
    for name in names:
        arrays = arrays_of(sources.path(model_name, name), VOCAB_SIZE)
        trained = {k for k in arrays if not k.startswith("optimizer.") and not k.endswith("expert_bias")}
        assert any("layers." in key for key in trained), name
        assert ("output_layer.weight" in trained) == (model_name == "dense-untied")
        for state in STATES:
            prefix = f"optimizer.state.{state}."
            kept = {
                key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)
            }
            if state == "step":  # one number a parameter, whatever parts it is stored in
                assert kept
                assert all(bool((steps == 1).all()) for steps in kept.values()), name
            else:
                assert kept.keys() == trained, (name, state)
                assert all(bool(array.any()) for array in kept.values()), (name, state)
        for key in trained:
            master = arrays[f"optimizer.state.fp32_param.{key}"]
            assert arrays[key].dtype == torch.bfloat16
            assert torch.equal(as_bits(arrays[key]), as_bits(master.to(torch.bfloat16))), key


PARTS = {"vision": "bert", "language": "t5"}  # models that need not be of one layout


def save_parts(layouts: dict[str, str], source: Path | None, target: Path) -> None:
    """Save two models, each at a layout of its own: after a step, or as they are loaded."""
    optimizers, state = {}, {}
    for part, name in layouts.items():
        made, seed = MODELS[PARTS[part]], 0 if source is None else 1
        model, optimizers[part], groups = build_rank(PARTS[part], made.layouts[name], seed=seed)
        if source is None:
            forward_backward(model, batches_of(made.config, groups, count=4), groups)
            optimizers[part].step()
        declared = model.sharded_state_dict(prefix=f"{part}.")
        state[part] = {"model": declared, "optimizer": optimizers[part].sharded_state_dict(declared)}
    if source is not None:
        loaded = megackpt.load(state, source, options=LoadOptions(complete=True))
        for part, optimizer in optimizers.items():
            optimizer.load_sharded_state_dict(loaded[part]["optimizer"])
    megackpt.save(state, target)


@sampled(2)
@pytest.mark.parametrize("vision", ["dp4", "tp2-dp2-sequence"])
def test_two_models_of_different_layouts_are_one_checkpoint(
    vision: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    first, second = {"vision": vision, "language": "pp4-uneven"}, {"vision": "one", "language": "one"}
    rank_pool.run(save_parts, 4, first, None, tmp_path / "first")
    rank_pool.run(save_parts, 1, second, tmp_path / "first", tmp_path / "second")
    assert {key.split(".")[0] for key in arrays_of(tmp_path / "first", VOCAB_SIZE)} == {"optimizer", *PARTS}
    assert_equal_checkpoints(tmp_path / "first", tmp_path / "second")
