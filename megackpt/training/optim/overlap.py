"""Exchanges of a distributed optimizer that run while the model computes.

`GradientReductions` starts the reduction of a bucket in the backward pass, `ParameterGathers` gathers
parameters during the next forward pass. The elements of a bucket are exchanged, and added in the same order,
as without overlap. So results are equal bit for bit where the buckets are the same; `DistributedOptimizer`
names the exception.

Ranks need not get their gradients in the same order, and one may get none for some bucket. Collectives over a
group must nevertheless be started in one order on all of its ranks. So all buckets, of dense parameters and
of experts, have one order, which follows from the parameters alone. A bucket waits for those before it, and
what a rank could not start in the backward pass it starts in the step. The process groups are the optimizer's
own, as the model may exchange tokens over the same ranks.

Source: Megatron-Core `DistributedDataParallelConfig.overlap_grad_reduce`, `overlap_param_gather`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from megackpt.errors import OptimizerError
from megackpt.training.optim.buffers import ParamGradBuffer
from megackpt.training.optim.collectives import BucketGather, BucketReduction, start_gather, start_reduction
from megackpt.training.optim.grad_sync import is_summed_over_model_ranks
from megackpt.training.parallel.groups import ParallelGroups


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """One bucket of a buffer.

    Attributes:
        buffer: the buffer.
        index: of the bucket in it.
        params: indices of its parameters in the buffer.
        first: position among all parameters of the optimizer of the first one that the bucket has.
    """

    buffer: ParamGradBuffer
    index: int
    params: tuple[int, ...]
    first: int

    @property
    def grad(self) -> Tensor:
        """The gradients, a view into the buffer."""
        return self.buffer.grad[self.buffer.layout.buckets[self.index].as_slice()]

    @property
    def data(self) -> Tensor:
        """The parameters, a view into the buffer."""
        return self.buffer.data[self.buffer.layout.buckets[self.index].as_slice()]


def buckets_in_order(buffers: Sequence[ParamGradBuffer], params: Sequence[Parameter]) -> list[Bucket]:
    """Return all buckets in the order that a forward pass is expected to use them. Local.

    That is the order of the first parameter of each; params are all parameters of the optimizer, in order.
    A backward pass is expected to complete them in the reverse order.
    """
    position = {id(param): position for position, param in enumerate(params)}
    buckets = []
    for buffer in buffers:
        members: list[list[int]] = [[] for _ in buffer.layout.buckets]
        for index, bucket in enumerate(buffer.layout.bucket_of_param):
            members[bucket].append(index)
        for bucket, indices in enumerate(members):
            first = min(position[id(buffer.params[index])] for index in indices)
            buckets.append(Bucket(buffer, bucket, tuple(indices), first))
    return sorted(buckets, key=lambda bucket: bucket.first)


class GradientReductions:
    """Reductions of the gradients of all buckets, in one order.

    A bucket whose gradients are complete is reduced in the backward pass. Its gradients are complete when
    each parameter got one in `micro_batches` backward passes. Buckets with gradients that are first summed
    over other ranks (tp, the ends of the pipeline) wait for the step: the model itself communicates over
    those ranks in the backward pass, and the two must not meet in another order on another rank.

    Args:
        buckets: see `buckets_in_order`.
        groups: the ranks around this one.
        divisor: of the sums.

    Attributes:
        micro_batches: number of backward passes over which gradients are summed before a step.
    """

    def __init__(self, buckets: Sequence[Bucket], groups: ParallelGroups, *, divisor: int) -> None:
        self.micro_batches = 1
        self._divisor = divisor
        self._running: list[BucketReduction] = []
        completed = list(reversed(buckets))
        late = {
            id(bucket)
            for bucket in buckets
            if any(is_summed_over_model_ranks(bucket.buffer.params[i], groups) for i in bucket.params)
        }
        self._early = [bucket for bucket in completed if id(bucket) not in late]
        self._late = [bucket for bucket in completed if id(bucket) in late]
        self._number = {(id(b.buffer), i): n for n, b in enumerate(self._early) for i in b.params}
        self.reset()
        for buffer in {id(bucket.buffer): bucket.buffer for bucket in buckets}.values():
            buffer.on_grad = partial(self._count, id(buffer))

    def finish(self) -> None:
        """Start the reductions that were not started in the backward pass, and wait for all. Collective."""
        for bucket in [*self._early[len(self._running) :], *self._late]:
            self._start(bucket)
        for reduction in self._running:
            reduction.finish()
        self._running = []
        self._is_finished = True

    def reset(self) -> None:
        """Expect the first of the backward passes before a step. Local.

        Raises:
            OptimizerError: reductions are under way.
        """
        if self._running:
            raise OptimizerError(
                f"optimizer.zero_grad() was called while {len(self._running)} buckets of gradients are "
                f"reduced, which the backward pass has started. Call optimizer.step() before it or, to skip "
                f"the step, optimizer.skip_step() on all ranks."
            )
        self._gradients = dict.fromkeys(self._number, 0)
        self._missing = [len(bucket.params) for bucket in self._early]
        self._is_finished = False

    def _count(self, buffer: int, index: int) -> None:
        """Count a gradient that was added, and start the reductions of buckets that are complete."""
        number = self._number.get((buffer, index))
        if number is None or self._is_finished:
            return
        self._gradients[buffer, index] += 1
        self._missing[number] -= self._gradients[buffer, index] == self.micro_batches
        while len(self._running) < len(self._early) and not self._missing[len(self._running)]:
            self._start(self._early[len(self._running)])

    def _start(self, bucket: Bucket) -> None:
        bucket.buffer.close(bucket.index)
        axis = bucket.buffer.groups.dp_cp
        self._running.append(start_reduction(bucket.grad, axis, divisor=self._divisor))


class ParameterGathers:
    """Gathers the parameters of all buckets after a step; each module waits for those that it uses.

    Args:
        buckets: see `buckets_in_order`.
        modules: each waits, before its forward pass, for the buckets with its parameters, and for those with
            parameters that none of the modules has.
    """

    def __init__(self, buckets: Sequence[Bucket], modules: Iterable[nn.Module]) -> None:
        self._buckets = tuple(buckets)
        self._running: dict[int, BucketGather] = {}
        number = {id(b.buffer.params[i]): n for n, b in enumerate(buckets) for i in b.params}
        used = [(m, {number[id(p)] for p in m.parameters() if id(p) in number}) for m in modules]
        covered = {id(p) for module, _ in used for p in module.parameters()}
        others = {n for param, n in number.items() if param not in covered}
        for module, numbers in used:
            module.register_forward_pre_hook(_ForwardHook(self, sorted(numbers | others)))

    def start(self) -> None:
        """Start to gather all buckets. Collective."""
        for number, bucket in enumerate(self._buckets):
            self._running[number] = start_gather(bucket.data, bucket.buffer.groups.dp_cp)

    def finish(self) -> None:
        """Wait for all buckets. Local."""
        self.wait_for(sorted(self._running))

    def wait_for(self, numbers: Iterable[int]) -> None:
        """Wait for those of some buckets, by number, that are under way. Local."""
        for number in numbers:
            gather = self._running.pop(number, None)
            if gather is not None:
                gather.finish()


class _ForwardHook:
    """Waits for the buckets of a module; a copy or pickle of the module has one that waits for nothing."""

    def __init__(self, gathers: ParameterGathers | None = None, numbers: Sequence[int] = ()) -> None:
        self._gathers = gathers
        self._numbers = numbers

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._gathers is not None:
            self._gathers.wait_for(self._numbers)

    def __reduce__(self) -> tuple[type[_ForwardHook], tuple[()]]:
        return _ForwardHook, ()
