"""Vocabularies that differ between a checkpoint and a model: padding, new tokens, fewer tokens.

The reference is a comparison of whole arrays, row by row, with what was saved and with the model before the
load.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megackpt import (
    DeclarationError,
    FormatError,
    KeyRule,
    LoadOptions,
    MismatchError,
    Policy,
    ShardedTensor,
    convert,
    load,
    load_plain_tensors,
    load_with_report,
    save,
)
from megackpt.comm import Group
from megackpt.entities.tree import iter_leaves
from megackpt.testing.world import SimulatedWorld
from megackpt.training.optim import (
    DistributedOptimizer,
    MixedPrecisionOptimizer,
    get_param_id_to_sharded_param_map,
    initialise_state,
    optim_state_to_sharding_state,
)
from megackpt.training.parallel import ParallelGroups, ParallelLayout, ShardedModule
from megackpt.training.parallel.embedding import VocabParallelEmbedding, VocabParallelOutput
from megackpt.training.parallel.rng import stable_seed
from tests.support.effort import few
from tests.support.pasted import pasted
from tests.support.states import sharded

HIDDEN = 3
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Side:
    """A model with a vocabulary, on the ranks of a layout."""

    tokens: int
    tp: int = 1
    dp: int = 1
    divisor: int = 1
    optimizer: str = "distributed"

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(tp=self.tp, dp=self.dp)


class Vocabulary(ShardedModule):
    """An embedding and an output layer of bfloat16, so that optimizers have masters."""

    def __init__(self, side: Side, groups: ParallelGroups, *, tied: bool) -> None:
        super().__init__(groups)
        sizes: dict[str, Any] = {"make_divisible": side.divisor, "dtype": torch.bfloat16}
        self.embedding = VocabParallelEmbedding(side.tokens, HIDDEN, groups, **sizes)
        self.output = VocabParallelOutput(side.tokens, HIDDEN, groups, tied=tied, bias=True, **sizes)


def build(side: Side, rank: int, *, tied: bool) -> tuple[nn.Module, Callable[[], Any]]:
    """Return the model of a rank, and what declares its state with that of its optimizer."""
    groups = ParallelGroups.offline(side.layout, rank)
    model = Vocabulary(side, groups, tied=tied)
    if side.optimizer == "plain":
        plain = torch.optim.AdamW(model.parameters(), lr=0.1)
        initialise_state(plain)

        def declared_plainly() -> Any:
            declared, state = model.sharded_state_dict(), plain.state_dict()
            entities = get_param_id_to_sharded_param_map(declared, model.parameters())
            optim_state_to_sharding_state(state, entities)
            return {"model": declared, "optimizer": state}

        return model, declared_plainly
    kind = {"distributed": DistributedOptimizer, "masters": MixedPrecisionOptimizer}[side.optimizer]
    optimizer = kind(model.parameters(), lambda p: torch.optim.AdamW(p, lr=0.1), groups)

    def declare() -> Any:
        declared = model.sharded_state_dict()
        return {"model": declared, "optimizer": optimizer.sharded_state_dict(declared)}

    return model, declare


def tensors_in(state: Any) -> Iterable[ShardedTensor]:
    return (leaf for _, leaf in iter_leaves(state) if isinstance(leaf, ShardedTensor))


def fill(state: Any, tokens: int, seed: int, *, only: tuple[str, ...] = ()) -> None:
    """Give every tensor of the state its part of an array that depends on its key and the seed alone."""
    for tensor in tensors_in(state):
        if not tensor.allow_shape_mismatch or (only and not tensor.key.startswith(only)):
            continue
        assert tensor.data is not None
        whole = torch.zeros(tensor.global_shape)
        generator = torch.Generator().manual_seed(stable_seed(seed, tensor.key))
        whole[:tokens] = torch.rand(whole[:tokens].shape, generator=generator) + 0.5
        at = tuple(map(torch.from_numpy, tensor.global_coordinates()))
        tensor.data.detach().copy_(whole[at].reshape(tensor.data.shape))


def saved(side: Side, where: Path, *, tied: bool, seed: int, fmt: str | None = None) -> dict[str, Tensor]:
    def on_rank(group: Group) -> None:
        _, declare = build(side, group.rank, tied=tied)
        state = declare()
        fill(state, side.tokens, seed)
        save(state, where, fmt, group=group)

    SimulatedWorld(side.layout.world_size).run(on_rank)
    return load_plain_tensors(where)


def resumed(
    side: Side, source: Path, where: Path, *, tied: bool, options: LoadOptions | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Load a checkpoint into a new model; return all arrays of the model before and after it."""
    before, after = where / "before", where / "after"

    def on_rank(group: Group) -> None:
        _, declare = build(side, group.rank, tied=tied)
        state = declare()
        fill(state, side.tokens, 7, only=("embedding", "output", "optimizer.state.fp32_param"))
        save(state, before, group=group)
        load(declare(), source, group=group, options=options)
        save(declare(), after, group=group)

    SimulatedWorld(side.layout.world_size).run(on_rank)
    return load_plain_tensors(before), load_plain_tensors(after)


Arrays = dict[str, Tensor]


def check(stored: Arrays, before: Arrays, after: Arrays, a: int, b: int) -> None:
    """Compare row by row; a tokens were saved, and the model has b."""
    both = min(a, b)
    names = [key for key in after if "embedding" in key or "output" in key]
    assert len([key for key in names if "step" not in key]) >= 6
    for key in names:
        if "step" in key:
            continue
        assert torch.equal(after[key][:both], stored[key][:both]), key
        fresh = before[key][both:b]
        assert torch.equal(after[key][both:b], fresh), key
        assert not fresh.any() if any(name in key for name in MOMENTS) else fresh.all(), key
        assert not after[key][b:].any(), key


SIDES = st.builds(
    Side,
    tokens=st.integers(1, 12),
    tp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2]),
    divisor=st.sampled_from([1, 2, 5]),
)


@settings(
    deadline=None,
    max_examples=few(12, of=300),
    phases=[Phase.explicit, Phase.generate],  # an example takes a second, so they are not shrunk
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    source=SIDES,
    target=SIDES,
    optimizer=st.sampled_from(["distributed", "masters", "plain"]),
    fmt=st.sampled_from([None, "torch_dist"]),
    tied=st.booleans(),
)
def test_tokens_are_loaded_new_ones_keep_their_values_and_padding_is_zero(
    tmp_path_factory: pytest.TempPathFactory,
    source: Side,
    target: Side,
    optimizer: str,
    fmt: str | None,
    tied: bool,
) -> None:
    where = tmp_path_factory.mktemp("vocabulary")
    source, target = replace(source, optimizer=optimizer), replace(target, optimizer=optimizer)
    stored = saved(source, where / "source", tied=tied, seed=1, fmt=fmt)
    options = None
    if target.tokens < source.tokens:
        with pytest.raises(MismatchError, match=r"without padding \(\d+(, 3|,)\) is stored") as caught:
            resumed(target, where / "source", where / "rejected", tied=tied)
        options = pasted(str(caught.value))
    before, after = resumed(target, where / "source", where, tied=tied, options=options)
    check(stored, before, after, source.tokens, target.tokens)


@pytest.mark.parametrize("fmt", [None, "torch_dist", ("zarr", 3)])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Side(50, divisor=16), Side(58, divisor=2)),  # new tokens in the place of stored padding
        (Side(50, divisor=16), Side(60, divisor=16)),  # of equal padded sizes
        (Side(50, divisor=16), Side(90, divisor=2)),  # beyond the stored padding
        (Side(50, divisor=16), Side(50, tp=4, divisor=32)),  # padding only
        (Side(50, tp=4, dp=2, divisor=16), Side(51, tp=2, divisor=1)),
    ],
)
def test_each_way_to_grow_keeps_new_rows_in_each_format(
    tmp_path: Path, source: Side, target: Side, fmt: Any, caplog: pytest.LogCaptureFixture
) -> None:
    if fmt is not None and fmt[0] == "zarr":
        pytest.importorskip("tensorstore")
    stored = saved(source, tmp_path / "source", tied=False, seed=1, fmt=fmt)
    with caplog.at_level(logging.WARNING):
        before, after = resumed(target, tmp_path / "source", tmp_path, tied=False)
    check(stored, before, after, source.tokens, target.tokens)
    grows = target.tokens > source.tokens
    assert ("its new rows keep the values that they have" in caplog.text) == grows
    assert len(caplog.records) == grows


def test_fewer_tokens_of_an_equal_padded_size_leave_no_trained_rows_in_the_padding(tmp_path: Path) -> None:
    source, target = Side(50, divisor=16), Side(30, divisor=64)
    stored = saved(source, tmp_path / "source", tied=False, seed=1)
    rule = LoadOptions(rules=(KeyRule(keys="*", cut=Policy.WARN),))
    before, after = resumed(target, tmp_path / "source", tmp_path, tied=False, options=rule)
    assert after["embedding.weight"].shape == stored["embedding.weight"].shape
    check(stored, before, after, 50, 30)


def vocabulary(rows: int, tokens: int | None, *, key: str = "e", value: float = 1.0) -> ShardedTensor:
    """Return a tensor with rows of padding after those of tokens; it may leave the number of tokens out."""
    tensor = sharded(key, torch.full((rows, 2), value), allow_shape_mismatch=True)
    return tensor if tokens is None else replace(tensor, unpadded_shape=(tokens, 2))


def test_a_notice_names_what_was_cut_or_zeroed_of_an_array_without_vocabulary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = tmp_path / "old"
    save({"e": vocabulary(8, None)}, where)

    def asked(rows: int, tokens: int) -> Tensor:
        caplog.clear()
        loaded: Tensor = load({"e": vocabulary(rows, tokens, value=9.0)}, where)["e"]
        return loaded

    with caplog.at_level(logging.WARNING):
        assert asked(10, 9).tolist() == [[1, 1]] * 8 + [[0, 0]] * 2
        assert "does not say which of its rows are padding" in caplog.text
        assert asked(6, 5).tolist() == [[1, 1]] * 6
        assert "rows that the model lacks are left out" in caplog.text
        assert asked(10, 8).tolist() == [[1, 1]] * 8 + [[0, 0]] * 2
        assert not caplog.records  # what became 0 is padding
        assert asked(8, 7).tolist() == [[1, 1]] * 8
        assert not caplog.records


def test_a_request_that_names_no_vocabulary_may_have_any_padding_but_not_too_few_rows(tmp_path: Path) -> None:
    """Such as a model of Megatron-Core, which reads our checkpoints."""
    save({"e": vocabulary(8, 5)}, tmp_path / "c")
    for rows in (5, 6, 8, 10):
        loaded = load({"e": vocabulary(rows, None, value=9.0)}, tmp_path / "c")["e"]
        assert loaded.tolist() == [[1, 1]] * min(rows, 8) + [[0, 0]] * max(0, rows - 8)
    with pytest.raises(MismatchError, match=r"KeyRule\(keys='\*e', cut=Policy\.WARN\)"):
        load({"e": vocabulary(4, None)}, tmp_path / "c")


def test_converted_and_renamed_checkpoints_keep_the_vocabulary_and_memory_of_the_load_is_zero(
    tmp_path: Path,
) -> None:
    save({"e": vocabulary(8, 5)}, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", to="torch_dist")
    convert(tmp_path / "b", tmp_path / "c", to="megackpt")
    asked = vocabulary(7, 7, key="new.e", value=9.0)
    options = LoadOptions(rename={"e": "new.e"})
    loaded, report = load_with_report({"e": asked}, tmp_path / "c", options=options)
    assert loaded["e"].tolist() == [[1, 1]] * 5 + [[9, 9]] * 2
    (array,) = report.padded
    assert (array.padded_nbytes, array.kept_nbytes) == (0, 2 * 2 * 4)
    assert "16 bytes kept" in str(report)
    without = replace(asked, data=None)
    assert load({"e": without}, tmp_path / "c", options=options)["e"].tolist() == [[1, 1]] * 5 + [[0, 0]] * 2


def test_new_rows_stay_in_exchanges_and_in_tied_memory(tmp_path: Path) -> None:
    save({"e": vocabulary(8, 5)}, tmp_path / "c")

    def on_rank(group: Group) -> list[float]:
        asked = vocabulary(6, 6, value=9.0)
        # Twice in the same memory, so that each is read into memory of its own first.
        options = LoadOptions(exchange="all_to_all")
        load({"e": asked, "again": replace(asked)}, tmp_path / "c", group=group, options=options)
        assert asked.data is not None
        return asked.data[:, 0].tolist()

    assert SimulatedWorld(2).run(on_rank) == [[1, 1, 1, 1, 1, 9]] * 2


def test_ranks_that_declare_other_vocabularies_are_an_error_before_the_commit(tmp_path: Path) -> None:
    def on_rank(group: Group) -> None:
        part = sharded("e", torch.ones(4, 2), (0, group.rank, 2), allow_shape_mismatch=True)
        save({"e": replace(part, unpadded_shape=(5 + group.rank, 2))}, tmp_path / "c", group=group)

    with pytest.raises(MismatchError, match=r"'e': rank 1 declares unpadded_shape \(6, 2\)"):
        SimulatedWorld(2).run(on_rank)
    assert not (tmp_path / "c" / "metadata.json").exists()


@pytest.mark.parametrize("entry", [{"e": [9, 2]}, {"e": [5]}, {"e": "5"}, {"e": [True, 2]}, [], 5])
def test_a_damaged_entry_is_an_error(tmp_path: Path, entry: object) -> None:
    tensor = vocabulary(8, 5)
    save({"e": tensor}, tmp_path / "c")
    manifest = tmp_path / "c" / "metadata.json"
    document = json.loads(manifest.read_text())
    assert document["unpadded"] == {"e": [5, 2]}
    manifest.write_text(json.dumps(document | {"unpadded": entry}))
    with pytest.raises(FormatError, match="entry 'unpadded' is malformed"):
        load({"e": tensor}, tmp_path / "c")


def test_a_wrong_unpadded_shape_is_an_error() -> None:
    tensor = vocabulary(8, None)
    for shape in [(9, 2), (5,)]:
        with pytest.raises(DeclarationError, match="is no part of global_shape"):
            replace(tensor, unpadded_shape=shape)
    with pytest.raises(DeclarationError, match="needs allow_shape_mismatch=True"):
        replace(tensor, unpadded_shape=(5, 2), allow_shape_mismatch=False)
    assert [part.unpadded_shape for part in replace(tensor, unpadded_shape=(5, 2)).narrow(0, 0, 2)] == [None]
