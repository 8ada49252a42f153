"""Stale stage tables on real ranks: each error is on every rank, before anything is written or loaded.

Two pipeline stages with two data-parallel ranks each. What a stage has is wrong in one way in each case.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megackpt
from megackpt import LoadOptions, load_common_state_dict
from megackpt.errors import CheckpointError
from megackpt.parallel import LayerStack, ModelChunks, ParallelGroups, ParallelLayout, StageTable
from megackpt.testing.ranks import RankPool
from models import GPTConfig, build_gpt, init_weights

LAYOUT = ParallelLayout(pp=2, dp=2)
COMPLETE = LoadOptions(complete=True)
LAYERS = 4
CONFIG = GPTConfig(
    vocab_size=11,
    hidden_size=8,
    num_layers=LAYERS,
    num_heads=2,
    ffn_hidden_size=8,
    seq_length=4,
    make_vocab_divisible=1,
)

Owned = tuple[tuple[int, ...], tuple[int, ...]]
GOOD: Owned = ((0, 1), (2, 3))
ABSENT_LAYER: Owned = ((0,), (2, 3))
SHARED_LAYER: Owned = ((0, 1), (1, 2, 3))


def layer(_: int) -> nn.Module:
    return nn.Linear(3, 2, bias=False)


def own_stack(owned: Owned, groups: ParallelGroups, *, total: int, homogeneous: bool) -> nn.Module:
    """Return a stack of a user who computes the layers of each stage without a table."""
    stack = LayerStack(layer, owned[groups.pp.rank], total, groups, homogeneous=homogeneous)
    for param in stack.parameters():
        nn.init.constant_(param, -1.0)
    return stack


def save_stack(owned: Owned, homogeneous: bool, directory: Path) -> tuple[str, str]:
    groups = ParallelGroups.create(LAYOUT)
    state = own_stack(owned, groups, total=LAYERS, homogeneous=homogeneous).sharded_state_dict("layers.")
    return outcome_of(lambda: megackpt.save(state, directory))


def load_stack(owned: Owned, homogeneous: bool, total: int, directory: Path) -> tuple[str, str]:
    groups = ParallelGroups.create(LAYOUT)
    stack = own_stack(owned, groups, total=total, homogeneous=homogeneous)
    outcome = outcome_of(
        lambda: megackpt.load(stack.sharded_state_dict("layers."), directory, options=COMPLETE)
    )
    # The checkpoint has random weights.
    assert all(bool((p == -1).all()) == (outcome[0] != "") for p in stack.parameters())
    return outcome


def outcome_of(function: Any) -> tuple[str, str]:
    """Return the class and the text of the error that a function raises, or empty texts."""
    try:
        function()
    except CheckpointError as error:
        return type(error).__name__, str(error)
    return "", ""


def error_of(outcomes: list[tuple[str, str]]) -> tuple[str, str]:
    """Return the error, which is the same on all ranks."""
    assert len(set(outcomes)) == 1, outcomes
    return outcomes[0]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Checkpoints of four layers with random weights: as a stack, and with keys of their own."""
    groups = ParallelGroups.create(ParallelLayout())
    directories = {}
    for homogeneous in (True, False):
        directories[homogeneous] = tmp_path_factory.mktemp("stored") / str(homogeneous)
        whole = LayerStack(layer, range(LAYERS), LAYERS, groups, homogeneous=homogeneous)
        megackpt.save(whole.sharded_state_dict("layers."), directories[homogeneous])
    return directories


@pytest.mark.parametrize(
    ("owned", "error"),
    [
        (ABSENT_LAYER, "'layers.weight': elements [1:2, 0:2, 0:3] are {} by no rank"),
        (SHARED_LAYER, "'layers.weight': elements [1:2, 0:2, 0:3] are {} by more than one main replica"),
    ],
)
def test_a_layer_on_no_stage_or_on_two_is_named_in_saves_and_loads(
    rank_pool: RankPool, tmp_path: Path, stored: dict[bool, Path], owned: Owned, error: str
) -> None:
    kind, text = error_of(rank_pool.run(save_stack, 4, owned, True, tmp_path / "new"))
    assert kind == "CoverageError"
    assert error.format("saved") in text
    assert not list((tmp_path / "new").glob("**/*.safetensors"))
    kind, text = error_of(rank_pool.run(load_stack, 4, owned, True, LAYERS, stored[True]))
    assert kind == "CoverageError"
    assert error.format("requested") in text


def test_a_layer_with_keys_of_its_own_that_no_stage_has_is_named(
    rank_pool: RankPool, stored: dict[bool, Path]
) -> None:
    kind, text = error_of(rank_pool.run(load_stack, 4, ABSENT_LAYER, False, LAYERS, stored[False]))
    assert kind == "MissingKeyError"
    assert "'layers.1.weight'" in text


@pytest.mark.parametrize("homogeneous", [True, False])
@pytest.mark.parametrize(
    ("owned", "layer_of_one_side"), [(((0, 1), (2,)), 3), (((0, 1), (2, 3, 4)), 4)], ids=["fewer", "more"]
)
def test_another_number_of_layers_than_stored_is_an_error(
    rank_pool: RankPool, stored: dict[bool, Path], owned: Owned, layer_of_one_side: int, homogeneous: bool
) -> None:
    total = sum(map(len, owned))
    kind, text = error_of(rank_pool.run(load_stack, 4, owned, homogeneous, total, stored[homogeneous]))
    if homogeneous:
        assert kind == "MismatchError"
        assert f"'layers.weight': stored as float32 (4, 2, 3), asked for as float32 ({total}, 2, 3)" in text
    else:
        assert kind == "MissingKeyError"
        assert f"'layers.{layer_of_one_side}.weight'" in text


def test_layers_that_are_all_there_are_loaded(rank_pool: RankPool, stored: dict[bool, Path]) -> None:
    for homogeneous in (True, False):
        assert error_of(rank_pool.run(load_stack, 4, GOOD, homogeneous, LAYERS, stored[homogeneous])) == (
            "",
            "",
        )


def gpt_state(tables: tuple[str, str], *, with_table: bool) -> tuple[ModelChunks, dict[str, Any]]:
    """Return a GPT on two stages; data-parallel rank 1 has the second table."""
    groups = ParallelGroups.create(LAYOUT)
    table = StageTable.from_string(tables[groups.dp.rank], pp=2)
    model = build_gpt(CONFIG, groups, stages=table)
    init_weights(model, seed=1)
    state: dict[str, Any] = {"model": model.sharded_state_dict()}
    return model, state | ({"stages": table.to_json()} if with_table else {})


def save_gpt(tables: tuple[str, str], with_table: bool, directory: Path) -> tuple[str, str]:
    _, state = gpt_state(tables, with_table=with_table)
    return outcome_of(lambda: megackpt.save(state, directory))


def load_gpt(tables: tuple[str, str], directory: Path) -> tuple[str, str]:
    model, state = gpt_state(tables, with_table=True)
    before = [param.detach().clone() for param in model.parameters()]
    outcome = outcome_of(lambda: megackpt.load(state, directory, options=COMPLETE))
    if outcome[0]:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return outcome


def test_ranks_with_different_tables_are_named(rank_pool: RankPool, tmp_path: Path) -> None:
    tables = ("Ett|ttL", "Ettt|tL")
    kind, text = error_of(rank_pool.run(save_gpt, 4, tables, True, tmp_path / "new"))
    assert kind == "CommonStateError"
    assert "'stages.layout' on rank(s) 1, 3" in text
    assert not list((tmp_path / "new").glob("**/*.safetensors"))

    same = ("Ett|ttL", "Ett|ttL")
    assert error_of(rank_pool.run(save_gpt, 4, same, True, tmp_path / "good")) == ("", "")
    assert load_common_state_dict(tmp_path / "good")["stages"] == {"layout": "Ett|ttL", "pp": 2}
    kind, text = error_of(rank_pool.run(load_gpt, 4, tables, tmp_path / "good"))
    assert kind == "CommonStateError"
    assert "'stages.layout' on rank(s) 1, 3" in text
    assert error_of(rank_pool.run(load_gpt, 4, ("E|ttttL",) * 2, tmp_path / "good")) == ("", "")
