"""FSDP2, HSDP and FSDP over TP: saved at one mesh, loaded at any other, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import megackpt
from megackpt import Checkpointer, LoadOptions, SaveOptions
from megackpt.engine.checkpoint.views import rename_keys
from megackpt.testing.ranks import RankPool
from megackpt.training.parallel import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelGroups,
    ParallelLayout,
    RowParallelLinear,
    VocabParallelEmbedding,
    sharded_state_dict,
)
from tests.contrib.torch.worlds import (
    COMPUTES,
    HIDDEN,
    LAYERS,
    RANKS,
    VOCAB,
    WIDE,
    Transformer,
    data_nbytes,
    full,
    make,
    same,
    set_state,
    state_of,
    train_step,
)
from tests.support.docs import ROOT, blocks_of
from tests.support.effort import sampled

Saved = dict[str, tuple[str, dict[str, Any], dict[str, Any]]]
"""By mesh: where the checkpoint is, the state then, and the state after one more step."""


def _train_and_save(mesh: str, path: str, flat: bool = False) -> tuple[dict[str, Any], dict[str, Any]] | None:
    model, optimizer = make(mesh, seed=0)
    train_step(model, optimizer, seed=1)
    state = state_of(model, optimizer, flat=flat)
    megackpt.save(state, path)
    then = full(state)
    then = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in then.items()}
    train_step(model, optimizer, seed=2)
    later = full(state_of(model, optimizer, flat=flat))
    return (then, later) if dist.get_rank() == 0 else None


def _load(
    mesh: str, path: str, expected: dict[str, Any], later: dict[str, Any] | None, flat: bool = False
) -> list[str]:
    """Load into a model with other weights; return what differs then, and after one more step."""
    model, optimizer = make(mesh, seed=3)
    state = state_of(model, optimizer, flat=flat)
    assert same(full(state), expected)  # the seed is another one, so there is something to load
    loaded = megackpt.load(state, path)
    for name, weight in state["model"].items():
        assert isinstance(weight, DTensor)
        assert loaded["model"][name] is weight
    differing = same(full(loaded), expected)
    set_state(model, optimizer, loaded, flat=flat)
    differing += same(full(state_of(model, optimizer, flat=flat)), expected)
    if later is not None:
        train_step(model, optimizer, seed=2)
        differing += same(full(state_of(model, optimizer, flat=flat)), later)
    return differing


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """One trained state at each mesh."""
    root = tmp_path_factory.mktemp("meshes")
    return {
        mesh: (str(root / mesh), *rank_pool.run(_train_and_save, ranks, mesh, str(root / mesh))[0])
        for mesh, ranks in RANKS.items()
    }


@sampled(9)
@pytest.mark.parametrize("target", RANKS)
@pytest.mark.parametrize("source", RANKS)
def test_state_saved_at_one_mesh_is_equal_at_any_other(
    source: str, target: str, saved: Saved, rank_pool: RankPool
) -> None:
    path, then, later = saved[source]
    resumed = later if source == target else None  # at another mesh sums round otherwise
    for differing in rank_pool.run(_load, RANKS[target], target, path, then, resumed):
        assert not differing


@pytest.mark.parametrize("source", ["fsdp2xtp2", "hsdp2x2"])
def test_copies_are_stored_once(source: str, saved: Saved) -> None:
    """HSDP holds everything twice; FSDP over TP what TP leaves alone, which no placement tells."""
    path, then, _ = saved[source]
    arrays = {k: v for k, v in then.items() if isinstance(v, torch.Tensor) and not k.endswith("/step")}
    assert data_nbytes(Path(path)) == sum(tensor.nbytes for tensor in arrays.values())


@pytest.mark.parametrize(("source", "target"), [("fsdp2xtp2", "fsdp2"), ("fsdp2", "hsdp2x2")])
def test_a_flattened_optimizer_state_dict_moves_between_meshes(
    source: str, target: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "step")
    then, _ = rank_pool.run(_train_and_save, RANKS[source], source, path, True)[0]
    assert any(k == "/optimizer/state.layers.0.up.weight.exp_avg" for k in then)
    assert not any(rank_pool.run(_load, RANKS[target], target, path, then, None, True))
    # A DTensor's key is its path, so both forms of an optimizer's state have the same keys.
    assert "optimizer.state.layers.0.up.weight.exp_avg" in megackpt.load_tensors_metadata(path)


def test_a_model_without_dtensors_loads_what_was_saved_from_them(saved: Saved) -> None:
    """One process, plain tensors: they are filled from the arrays of their paths."""
    path, then, _ = saved["fsdp2xtp2"]
    model = Transformer()
    loaded = megackpt.load({"model": model.state_dict(), "epoch": 3}, path)
    assert not same(full(model.state_dict(), "/model"), {k: v for k, v in then.items() if "/model" in k})
    assert loaded["model"].keys() == model.state_dict().keys()


# ---- to and from Megatron-style layers --------------------------------------------------------------------

NAMES = {
    "model.embed.weight": "embedding.weight",
    "model.layers.*.norm1.*": "layers.*.input_norm.*",
    "model.layers.*.norm2.*": "layers.*.mlp_norm.*",
    "model.layers.*.up.*": "layers.*.fc1.*",
    "model.layers.*.down.*": "layers.*.fc2.*",
}
"""Names of the transformer's weights, and those of the Megatron-style layers for the same."""


class _MegatronStyle(nn.Module):
    """The parts of the transformer that have a Megatron-style twin here, cut over tp."""

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(VOCAB, HIDDEN, groups, make_divisible=1)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "input_norm": LayerNorm(HIDDEN, groups),
                    "mlp_norm": LayerNorm(HIDDEN, groups),
                    "fc1": ColumnParallelLinear(HIDDEN, WIDE, groups),
                    "fc2": RowParallelLinear(WIDE, HIDDEN, groups),
                }
            )
            for _ in range(LAYERS)
        )


def _megatron_style(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    groups = ParallelGroups.create(ParallelLayout(tp=dist.get_world_size()))
    return sharded_state_dict(_MegatronStyle(groups), groups)


def _load_into_megatron_style(path: str, expected: dict[str, Any]) -> int:
    declared = _megatron_style(4)
    megackpt.load(declared, path, options=megackpt.LoadOptions(rename=NAMES))
    for entity in declared.values():
        whole = expected[entity.key][entity.global_slice()]
        assert torch.equal(entity.data[: len(whole)], whole), entity.key
        assert not entity.data[len(whole) :].any(), entity.key  # padding of the vocabulary
    return len(declared)


@pytest.mark.parametrize("source", ["fsdp4", "fsdp2xtp2"])
def test_weights_of_fsdp_load_into_megatron_style_tensor_parallel_layers(
    source: str, saved: Saved, rank_pool: RankPool
) -> None:
    path, then, _ = saved[source]
    weights = {k.removeprefix("/").replace("/", "."): v for k, v in then.items() if k.startswith("/model/")}
    expected = {new: weights[old] for old, new in rename_keys(weights, NAMES).items()}
    assert rank_pool.run(_load_into_megatron_style, 2, path, expected) == [1 + 8 * LAYERS] * 2


def _save_megatron_style(path: str) -> None:
    megackpt.save(_megatron_style(5), path)


def _load_into_fsdp(path: str) -> dict[str, Any]:
    back = {new: old for old, new in NAMES.items()}
    model, _ = make("fsdp2xtp2", seed=6)
    weights = {k: v for k, v in model.state_dict().items() if "qkv" not in k and "proj" not in k}
    weights = {k: v for k, v in weights.items() if not k.startswith("out")}
    padded = megackpt.KeyRule(keys="model.embed.weight", cut=megackpt.Policy.IGNORE)
    megackpt.load({"model": weights}, path, options=megackpt.LoadOptions(rename=back, rules=(padded,)))
    return full(weights)


def test_weights_of_megatron_style_layers_load_into_fsdp_over_tp(rank_pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    rank_pool.run(_save_megatron_style, 2, path)
    stored = megackpt.load_plain_tensors(path)
    names = rename_keys(stored, {new: old for old, new in NAMES.items()})
    for result in rank_pool.run(_load_into_fsdp, 4, path):
        assert len(result) == len(stored) == 1 + 8 * LAYERS
        for key, whole in stored.items():
            weight = result["/" + names[key].removeprefix("model.")]
            assert torch.equal(weight, whole[: len(weight)]), key


PAGE = ROOT / "docs" / "torch.md"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
}


def shown_functions() -> dict[str, Any]:
    """Run the block of the page that saves and resumes, and return what it defines."""
    (code,) = (block.code for block in blocks_of(PAGE.read_text()) if "def resume_training" in block.code)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return namespace


def build(mesh: str, name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = make(mesh, seed=seed)
    return model, OPTIMIZERS[name](model.parameters())


def _gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return full({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})


def _save_and_go_on(mesh: str, root: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in OPTIMIZERS:
        model, optimizer = build(mesh, name, 1)
        for seed in range(2):
            train_step(model, optimizer, seed=seed)
        shown_functions()["save_training"](model, optimizer, f"{root}/{name}")
        # Copied, as counters are no DTensors: the next step changes them.
        saved = copy.deepcopy(_gathered(model, optimizer))
        train_step(model, optimizer, seed=2)
        results[name] = saved, _gathered(model, optimizer)
    return results


def _resume(mesh: str, root: str, expected: dict[str, Any]) -> list[str]:
    differing = []
    for name, (saved, trained) in expected.items():
        model, optimizer = build(mesh, name, 2)
        shown_functions()["resume_training"](model, optimizer, f"{root}/{name}")
        differing += [f"{name} {path} loaded" for path in same(_gathered(model, optimizer), saved)]
        train_step(model, optimizer, seed=2)
        if mesh == "fsdp2":  # elsewhere sums are made in another order
            differing += [f"{name} {path} trained" for path in same(_gathered(model, optimizer), trained)]
    return differing


def _forget(mesh: str, root: str) -> str:
    model, optimizer = build(mesh, "sgd", 2)
    try:
        megackpt.load({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{root}/sgd")
    except megackpt.MissingKeyError as error:
        return str(error)
    return "loaded"


@pytest.mark.skipif(not COMPUTES, reason="this torch does not run fully_shard on the CPU")
def test_training_goes_on_bit_for_bit_and_at_another_mesh_with_the_same_state(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    expected = rank_pool.run(_save_and_go_on, 2, "fsdp2", str(tmp_path))[0]
    assert all(any("momentum" in p or "exp_avg" in p for p in saved) for saved, _ in expected.values())
    for mesh, ranks in (("fsdp2", 2), ("fsdp4", 4)):
        assert rank_pool.run(_resume, ranks, mesh, str(tmp_path), expected) == [[]] * ranks
    for message in rank_pool.run(_forget, 2, "fsdp2", str(tmp_path)):
        assert "'optimizer.state': " in message
        assert "initialise_state" in message


RANK_0S = SaveOptions(rank0_values=("model.*running_*",))


def build_ddp(seed: int) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Linear(512, 64))
    )
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train_ddp(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed * 100 + dist.get_rank())  # each rank its own batch
    model(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of_ddp(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}


def bits(model: DistributedDataParallel) -> bytes:
    state = model.module.state_dict()
    return b"".join(t.numpy().tobytes() for name, t in state.items() if "running" not in name)


def _save_ddp_and_go_on(root: str) -> bytes:
    model, optimizer = build_ddp(1)
    for seed in range(2):
        train_ddp(model, optimizer, seed)
    megackpt.save(state_of_ddp(model, optimizer), f"{root}/plain")  # rank 0's statistics, with a warning
    megackpt.save(state_of_ddp(model, optimizer), f"{root}/sync", options=RANK_0S)
    with Checkpointer(f"{root}/async", async_save=True, save_options=RANK_0S) as checkpointer:
        for step in (1, 2):  # the second takes the plan of the first
            checkpointer.save(step, state_of_ddp(model, optimizer))
            checkpointer.wait()
    train_ddp(model, optimizer, 2)
    return bits(model)


def _resume_ddp(location: str, exchange: Any) -> bytes:
    model, optimizer = build_ddp(2)
    options = LoadOptions(exchange=exchange)
    loaded = megackpt.load(state_of_ddp(model, optimizer), location, options=options)
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    train_ddp(model, optimizer, 2)
    return bits(model)


def test_ddp_goes_on_bit_for_bit(rank_pool: RankPool, tmp_path: Path) -> None:
    results = rank_pool.run(_save_ddp_and_go_on, 2, str(tmp_path))
    trained = results[0]
    locations = (("plain", "direct"), ("sync", "direct"), ("async/iter_0000002", "all_to_all"))
    for location, exchange in locations:
        data = sorted(file.stat().st_size for file in (tmp_path / location / "data").iterdir())
        assert len(data) == 2
        assert data[1] < 2 * data[0]  # both wrote
        assert rank_pool.run(_resume_ddp, 2, str(tmp_path / location), exchange) == [trained, trained]
