"""What ranks of an optimizer send each other: states to the first one, gradients, flags. No processes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from megackpt.entities import ShardedStateDict, ShardedTensor
from megackpt.errors import DeclarationError, OptimizerError
from megackpt.training.optim import (
    DistributedOptimizer,
    MixedPrecisionOptimizer,
    distributed,
    grad_sync,
    mixed_precision,
    overlap,
)
from megackpt.training.optim.collectives import start_reduction
from megackpt.training.optim.distributed import StateRange, gather_states, join_states
from megackpt.training.optim.grad_sync import touched_on_any_rank
from megackpt.training.optim.ranges import FlatRange
from megackpt.training.parallel import Axis, ParallelGroups, ParallelLayout
from megackpt.training.parallel.attributes import mark
from tests.support.optimizers import gather, tensors_of

OWN = [StateRange(0, "exp_avg", FlatRange(0, 3), torch.arange(3.0))]


def test_a_rank_that_shares_with_no_other_keeps_its_own_ranges() -> None:
    assert gather_states(OWN, Axis.of([5], 5)) == OWN


def test_groups_that_cannot_communicate_are_an_error() -> None:
    with pytest.raises(DeclarationError, match="needs groups that communicate"):
        gather_states(OWN, Axis.of([4, 5], 5))


class Messages:
    """Stands in for torch.distributed where ranks run one after the other, the first one last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = 0
        self._objects: dict[int, Any] = {}
        self._tensors: dict[int, list[Tensor]] = {}
        for function in (self.gather_object, self.send, self.recv):
            monkeypatch.setattr(dist, function.__name__, function)

    def gather_object(self, sent: Any, received: list[Any] | None, *, dst: int, group: Any) -> None:
        """Keep what other ranks send; give all of it to the first rank."""
        assert dst == RANKS[0]
        self._objects[self.rank] = sent
        if received is not None:
            received[:] = [self._objects[rank] for rank in RANKS]

    def send(self, tensor: Tensor, dst: int, *, group: Any) -> None:
        """Keep a message to the first rank."""
        assert dst == RANKS[0]
        assert tensor.is_contiguous()
        self._tensors.setdefault(self.rank, []).append(tensor)

    def recv(self, out: Tensor, source: int, *, group: Any) -> None:
        """Take the next message of a rank."""
        sent = self._tensors[source].pop(0)
        assert (sent.shape, sent.dtype) == (out.shape, out.dtype)
        out.copy_(sent)


RANKS = [3, 5, 8]


def test_the_first_rank_gets_the_ranges_of_all_and_the_others_none(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = Messages(monkeypatch)
    own = {
        3: [StateRange(0, "exp_avg", FlatRange(0, 2), torch.tensor([1.0, 2.0]))],
        5: [
            StateRange(0, "exp_avg", FlatRange(2, 3), torch.tensor([3.0])),
            StateRange(1, "step", FlatRange(0, 2), torch.arange(4)[::2]),
        ],
        8: [],
    }
    group: Any = "a group"
    gathered = {}
    for rank in reversed(RANKS):
        messages.rank = rank
        gathered[rank] = gather_states(own[rank], Axis.of(RANKS, rank, group))
    assert gathered[5] == gathered[8] == []
    assert [(r.position, r.state, r.flat_range, r.data.tolist()) for r in gathered[3]] == [
        (0, "exp_avg", FlatRange(0, 2), [1, 2]),
        (0, "exp_avg", FlatRange(2, 3), [3]),
        (1, "step", FlatRange(0, 2), [0, 2]),
    ]


def test_ranges_of_all_ranks_are_joined_by_parameter_and_state() -> None:
    ranges = [
        StateRange(1, "exp_avg", FlatRange(2, 5), torch.tensor([2.0, 3.0, 4.0])),
        StateRange(0, "step", FlatRange(0, 1), torch.tensor([7])),
        StateRange(1, "exp_avg", FlatRange(0, 2), torch.tensor([0.0, 1.0])),
    ]
    whole = join_states(ranges, [1, 5])
    assert {named: state.tolist() for named, state in whole.items()} == {
        (1, "exp_avg"): [0, 1, 2, 3, 4],
        (0, "step"): [7],
    }
    assert whole[0, "step"].dtype == torch.int64


DP = 2


def declared(rank: int, *, gathered: bool) -> ShardedStateDict:
    """Return what a rank of dp declares of an optimizer with two parameters."""
    groups = ParallelGroups.offline(ParallelLayout(dp=DP), rank)
    params = [Parameter(torch.arange(21.0).view(3, 7)), Parameter(torch.arange(5.0))]
    optimizer = DistributedOptimizer(params, torch.optim.AdamW, groups)
    model = {
        name: ShardedTensor.from_rank_offsets(name, param, replica_id=(0, 0, rank))
        for name, param in zip("ab", params, strict=True)
    }
    return optimizer.sharded_state_dict(model, gathered=gathered)


def test_the_first_rank_declares_whole_states_and_the_others_none(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[StateRange] = []

    def gather_states(own: Sequence[StateRange], axis: Axis) -> list[StateRange]:
        assert axis.size == DP
        if axis.is_first:
            return [*own, *sent]
        sent.extend(own)
        return []

    monkeypatch.setattr(distributed, "gather_states", gather_states)
    other = declared(1, gathered=True)
    first = declared(0, gathered=True)
    cut = gather([declared(rank, gathered=False) for rank in range(DP)])
    whole = gather([first, other])
    assert {key: tensor.tolist() for key, tensor in whole.items()} == {
        key: tensor.tolist() for key, tensor in cut.items()
    }
    assert [t for t in tensors_of(other) if t.local_shape] == []
    assert all(t.flattened_range is None and t.local_shape == t.global_shape for t in tensors_of(first))


class Arriving:
    """Work whose result is there when somebody has waited for it."""

    def __init__(self, into: Tensor, result: Tensor) -> None:
        self._into, self._result = into, result

    def wait(self) -> None:
        """Let the result arrive."""
        self._into.copy_(self._result)


def test_a_rank_gets_the_mean_of_its_slice_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    # In bf16, 256 + 1 is 256: a sum that is rounded after each rank would be 256.
    buckets = [torch.tensor([r, 256 if r == 0 else 1], dtype=torch.bfloat16) for r in range(3)]
    buckets = [
        bucket.repeat_interleave(2)[:3] for bucket in buckets
    ]  # [r, r, 256 or 1], a slice for each rank

    def all_to_all(received: Tensor, sent: Tensor, *, group: Any, async_op: bool) -> Arriving:
        assert torch.equal(sent, buckets[2])
        return Arriving(received.fill_(7), torch.stack([bucket[2] for bucket in buckets]))

    group: Any = "a group"
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    bucket = buckets[2].clone()
    start_reduction(bucket, Axis.of([0, 1, 2], 2, group), divisor=2).finish()
    assert bucket[2].item() == 129


@pytest.mark.parametrize(("divisor", "expected"), [(1, [2.0, 6.0]), (4, [0.5, 1.5])])
def test_a_rank_alone_only_divides(divisor: int, expected: list[float]) -> None:
    bucket = torch.tensor([2.0, 6.0])
    start_reduction(bucket, Axis.of([0], 0), divisor=divisor).finish()
    assert bucket.tolist() == expected


@pytest.mark.parametrize(
    ("own", "of_the_other", "expected"),
    [
        ((True, False, False), (False, True, False), (True, True, False)),
        ((False, False, True), (False, False, False), (False, False, True)),
        ((True, True, True), (False, False, False), (True, True, True)),
    ],
)
def test_what_another_rank_touched_is_updated_here_too(
    own: tuple[bool, ...],
    of_the_other: tuple[bool, ...],
    expected: tuple[bool, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def summed(flags: Tensor, axis: Axis) -> Tensor:
        assert axis.size == 2
        return flags + torch.tensor(of_the_other, dtype=flags.dtype)

    monkeypatch.setattr(grad_sync, "all_reduce", summed)
    groups = ParallelGroups.offline(ParallelLayout(dp=2), 0)
    params = [Parameter(torch.zeros(2)) for _ in own]
    assert touched_on_any_rank(params, own, groups) == expected


class Events:
    """Stands in for the exchanges of buckets: notes which one begins and ends, by its rows of 256."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, int]] = []
        monkeypatch.setattr(overlap, "start_reduction", self._start("reduce"))
        monkeypatch.setattr(overlap, "start_gather", self._start("gather"))

    def _start(self, kind: str) -> Any:
        def start(bucket: Tensor, axis: Axis, **_: Any) -> Any:
            assert axis.size == 2
            rows = len(bucket) // 256
            self.seen.append((kind, rows))
            return SimpleNamespace(finish=lambda: self.seen.append((f"{kind} ends", rows)))

        return start

    def take(self) -> list[tuple[str, int]]:
        """Return what was noted since the last call."""
        seen, self.seen = self.seen, []
        return seen


def three_layers(events: Events, *, micro_batches: int) -> tuple[nn.Sequential, DistributedOptimizer]:
    """Return layers with a bucket of 1, 2 and 3 rows; tp sums the gradient of the one in the middle."""
    model = nn.Sequential(*(nn.Linear(256, rows, bias=False) for rows in (1, 2, 3)))
    mark(model.get_parameter("1.weight"), "sequence_parallel")
    optimizer = DistributedOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        ParallelGroups.offline(ParallelLayout(tp=2, dp=2), 0),
        bucket_size=1,
        overlap_grad_reduce=True,
        overlap_param_gather=[model[0], model[2]],
    )
    optimizer.micro_batches = micro_batches
    assert events.take() == []
    return model, optimizer


def backward_of(layer: nn.Module) -> None:
    layer(torch.ones(1, 256)).sum().backward()


def test_a_bucket_is_reduced_when_its_gradients_and_those_of_later_ones_are_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = Events(monkeypatch)
    model, optimizer = three_layers(events, micro_batches=2)
    reductions: Any = optimizer._reductions
    for layer in (model[0], model[0], model[1], model[1], model[2]):
        backward_of(layer)
    assert events.take() == []  # that of the last layer goes first, and misses a gradient
    backward_of(model[2])
    assert events.take() == [("reduce", 3), ("reduce", 1)]
    with pytest.raises(OptimizerError, match=r"zero_grad\(\) was called while 2 buckets"):
        reductions.reset()
    reductions.finish()
    assert events.take() == [("reduce", 2), ("reduce ends", 3), ("reduce ends", 1), ("reduce ends", 2)]
    reductions.reset()
    reductions.finish()  # without any gradient
    assert [rows for kind, rows in events.take() if kind == "reduce"] == [3, 1, 2]


def test_a_module_waits_for_its_own_buckets_and_for_those_of_no_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = Events(monkeypatch)
    model, optimizer = three_layers(events, micro_batches=1)
    gathers: Any = optimizer._gathers
    gathers.start()
    assert events.take() == [("gather", 1), ("gather", 2), ("gather", 3)]
    model[2](torch.ones(256))
    assert events.take() == [("gather ends", 2), ("gather ends", 3)]
    model[2](torch.ones(256))
    assert events.take() == []
    gathers.finish()
    assert events.take() == [("gather ends", 1)]


def test_masters_that_are_written_into_the_model_are_sent_to_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared: list[Tensor] = []
    monkeypatch.setattr(distributed, "all_gather_slices", lambda bucket, axis: shared.append(bucket.clone()))
    groups = ParallelGroups.offline(ParallelLayout(dp=DP), 0)
    param = Parameter(torch.arange(8.0))
    optimizer = DistributedOptimizer([param], torch.optim.AdamW, groups)
    (master,) = optimizer.param_groups[0]["params"]
    master.data.fill_(9.0)
    optimizer.sync_params()
    (bucket,) = shared
    assert bucket[: master.numel()].tolist() == [9.0] * master.numel()
    assert torch.equal(bucket[:8], param)


def test_gradients_of_whole_parameters_are_reduced_and_shared_bucket_by_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    monkeypatch.setattr(
        mixed_precision,
        "reduce_scatter_grads",
        lambda bucket, axis, divisor: called.append(f"reduced by {divisor}"),
    )
    monkeypatch.setattr(mixed_precision, "all_gather_slices", lambda bucket, axis: called.append("gathered"))
    groups = ParallelGroups.offline(ParallelLayout(dp=DP), 0)
    optimizer = MixedPrecisionOptimizer([Parameter(torch.arange(8.0))], torch.optim.AdamW, groups)
    optimizer._average_grads()
    assert called == [f"reduced by {DP}", "gathered"]
