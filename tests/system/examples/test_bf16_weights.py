"""At whatever layout a bfloat16 run goes on, its weights are the rounded float32 masters, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from training.arguments import Arguments

from megackpt import Checkpointer, load_plain_tensors
from megackpt.testing.ranks import RankPool
from tests.support.effort import sampled
from tests.system.examples.training_runs import (
    LAYOUTS,
    MOE,
    arguments_for,
    deterministic,
    make_trainer,
    train,
    write_text,
)

MASTER = "optimizer.state.fp32_param."
STEPS = 2
VOCABULARY = 257  # rows beyond are padding, whose number depends on tp


@pytest.fixture(scope="module")
def checkpoints(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Return where step 2 of a bfloat16 run at TP2xPP2 is, by whether it has experts."""
    runs = {}
    for has_experts in (False, True):
        root = tmp_path_factory.mktemp("bf16")
        runs[has_experts] = root / "ckpt"
        flags = [f"--data={write_text(root / 'text')}", f"--steps={STEPS}", "--bf16"]
        train(rank_pool, "TP2xPP2", runs[has_experts], *flags, *(MOE if has_experts else ()))
    return runs


def resume_and_save(arguments: Arguments, directory: Path) -> tuple[int, int]:
    """Resume in a worker rank and save at its layout, then train a step and save that.

    Returns how many of the rank's own weights were compared with its own masters, and how many differed.
    """
    with deterministic():
        trainer = make_trainer(arguments)
        trainer.resume()
        states = trainer.optimizer.sharded_state_dict(trainer.model.sharded_state_dict())["state"]
        params = [p for group in trainer._param_groups() for p in group["params"]]
        compared = differing = 0
        for position, state in states.items():
            master = state["fp32_param"]
            weight = params[position].detach().flatten()[master.flattened_range]
            compared += weight.numel()
            differing += int((master.data.flatten().to(weight.dtype) != weight).sum())
        checkpointer = Checkpointer(directory)
        checkpointer.save(trainer.step, trainer.state())
        trainer.train_step()
        checkpointer.save(trainer.step, trainer.state())
    return compared, differing


def real_rows(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: a[:VOCABULARY] if "word_embeddings" in k and a.ndim else a for k, a in arrays.items()}


def assert_weights_are_rounded_masters(arrays: dict[str, Tensor]) -> None:
    masters = {key.removeprefix(MASTER): array for key, array in arrays.items() if key.startswith(MASTER)}
    weights = {
        key: array
        for key, array in arrays.items()
        if not key.startswith("optimizer.") and not key.endswith(".expert_bias")  # a float32 buffer
    }
    assert masters.keys() == weights.keys()
    assert masters
    for key, weight in weights.items():
        assert weight.dtype == torch.bfloat16
        assert masters[key].dtype == torch.float32
        assert torch.equal(masters[key].to(torch.bfloat16), weight), key
        assert not torch.equal(masters[key], weight.float()), f"{key}: the master has no digits of its own"


@sampled(6)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_the_rounded_masters(
    rank_pool: RankPool, checkpoints: dict[bool, Path], tmp_path: Path, layout: str
) -> None:
    has_experts = LAYOUTS[layout].ep > 1
    source = checkpoints[has_experts]
    flags = [f"--ckpt={source}", f"--data={source.parent / 'text'}", f"--steps={STEPS}", "--bf16"]
    flags += MOE if has_experts else ()
    ranks = LAYOUTS[layout].world_size
    per_rank = rank_pool.run(resume_and_save, ranks, arguments_for(LAYOUTS[layout], flags), tmp_path)
    assert all(compared and not differing for compared, differing in per_rank)

    stored = real_rows(load_plain_tensors(source / "iter_0000002"))
    resaved = real_rows(load_plain_tensors(tmp_path / "iter_0000002"))
    assert resaved.keys() == stored.keys()
    assert all(torch.equal(resaved[key], stored[key]) for key in stored)
    assert_weights_are_rounded_masters(resaved)
    trained = real_rows(load_plain_tensors(tmp_path / "iter_0000003"))
    assert_weights_are_rounded_masters(trained)
    assert not torch.equal(
        trained[MASTER + "decoder.layers.self_attention.linear_proj.weight"],
        resaved[MASTER + "decoder.layers.self_attention.linear_proj.weight"],
    )
