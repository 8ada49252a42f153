"""Executes a pipeline plan: runs the model chunks of one stage, and exchanges activations and gradients.

`schedule` decides the order of the actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megackpt.errors import DeclarationError
from megackpt.training.parallel.groups import Axis, ParallelGroups
from megackpt.training.parallel.router import set_auxiliary_loss_scale
from megackpt.training.parallel.schedule import (
    Action,
    Backward,
    Forward,
    Transfer,
    plan_1f1b,
    plan_forward,
    plan_interleaved,
)
from megackpt.training.parallel.stack import ModuleSequence

# The model chunks of one pipeline stage, as one module with one state dict.
#
# With virtual pipeline parallelism a stage has several chunks, which are not neighbours in the model.


class ModelChunks(ModuleSequence):
    """The chunks of this stage, one for each virtual stage, in the order that a micro-batch visits them.

    `forward_backward` and `forward_only` run them; the container has no forward of its own. Names in the
    state dict begin with the number of the chunk (`0.decoder...`). Keys in the checkpoint are those of the
    chunks themselves, so that a checkpoint does not depend on which chunk has a layer.

    Args:
        chunks: modules that declare global keys: see `StageTable` for the layers of each.
        groups: the ranks around this one.
    """

    def __init__(self, chunks: Sequence[nn.Module], groups: ParallelGroups) -> None:
        super().__init__(chunks, groups)


class MicroBatch(NamedTuple):
    """Input and target of one forward: token ids and labels, both `[batch, sequence]`, on every stage.

    With context parallelism they are this rank's share of the sequences, as `context_share` cuts it.
    """

    tokens: Tensor
    labels: Tensor


class PipelineStage(Protocol):
    """A model, or a chunk of one, that can be run as a stage."""

    def __call__(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Run it on tokens (first of the model) or activations (others); the last returns the mean loss."""

    def activation_buffer(self, tokens: Tensor) -> Tensor:
        """Return an empty tensor such as the previous stage sends for a micro-batch with `tokens`. Local."""


def forward_backward(
    model: PipelineStage | ModelChunks,
    micro_batches: Sequence[MicroBatch],
    groups: ParallelGroups,
    *,
    loss_scale: float = 1.0,
) -> Tensor:
    """Run all micro-batches forward and backward. Collective over pp, and over tp in the layers.

    A stage with one model runs 1F1B, one with several model chunks the interleaved schedule.

    Gradients accumulate in the parameters: `loss_scale` times those of the mean over this rank's
    micro-batches, and those of the auxiliary losses of routers by the same factor. Sums over dp, tp
    (sequence_parallel) and the tied embedding are left to the caller.

    Args:
        model: this rank's stage, or its model chunks; as many on every stage.
        micro_batches: the same number on every rank; equal over tp and pp. With several model chunks their
            number is a multiple of pp.
        groups: the ranks around this one.
        loss_scale: factor on the gradients, against underflow in half precision.

    Returns:
        The losses, float32 `[micro_batches]`, unscaled, on the last stage; an empty tensor elsewhere (see
        `share_losses`).

    Raises:
        DeclarationError: there is no micro-batch, or their number does not fit the interleaved schedule.
    """
    pp, count, chunks = groups.pp, _count(micro_batches), _chunks_of(model)
    if len(chunks) == 1:
        plan = plan_1f1b(pp.size, pp.rank, count)
    else:
        plan = plan_interleaved(pp.size, pp.rank, len(chunks), count)
    set_auxiliary_loss_scale(model, loss_scale / count)
    return _PlanExecution(chunks, micro_batches, pp, grad=loss_scale / count).execute(plan)


def forward_only(
    model: PipelineStage | ModelChunks, micro_batches: Sequence[MicroBatch], groups: ParallelGroups
) -> Tensor:
    """Return the losses as `forward_backward` does, without gradients. Collective over pp (and tp).

    Raises:
        DeclarationError: as in `forward_backward`.
    """
    pp, chunks = groups.pp, _chunks_of(model)
    plan = plan_forward(pp.size, pp.rank, _count(micro_batches), chunks=len(chunks))
    with torch.no_grad():
        return _PlanExecution(chunks, micro_batches, pp, grad=0.0).execute(plan)


def share_losses(losses: Tensor, micro_batches: int, groups: ParallelGroups) -> Tensor:
    """Return the last stage's losses on every stage, float32 `[micro_batches]`. Collective over pp."""
    if groups.pp.size == 1:
        return losses
    shared = losses.clone() if groups.pp.is_last else losses.new_empty(micro_batches)
    dist.broadcast(shared, src=groups.pp.ranks[-1], group=groups.pp.group)
    return shared


def exchange(axis: Axis, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
    """Send tensors to ranks along an axis and receive others into buffers, in one batch.

    Point to point: only the ranks that send or receive call it. Blocks until all are done. Each peer must
    make the matching call; between two ranks, what is sent first is received first.

    Args:
        axis: the ranks.
        sends: index of the receiving rank along the axis, and the tensor.
        receives: index of the sending rank along the axis, and the contiguous buffer to fill.
    """
    ops = [
        dist.P2POp(dist.isend, tensor.detach().contiguous(), axis.ranks[peer], axis.group)
        for peer, tensor in sends
    ]
    ops += [dist.P2POp(dist.irecv, buffer, axis.ranks[peer], axis.group) for peer, buffer in receives]
    # One batch: NCCL would deadlock on two stages that each wait for their own send first.
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()


@dataclass(slots=True)
class _PlanExecution:
    """One execution of a plan: received tensors, and outputs that wait for their backward.

    Tensors are found by the forward, (micro-batch, chunk), to which they belong.
    """

    chunks: Sequence[PipelineStage]
    micro_batches: Sequence[MicroBatch]
    pp: Axis
    grad: float  # gradient of the step's objective by the loss of one micro-batch
    inputs: dict[Forward, Tensor] = field(default_factory=dict)  # received activations, then their .grad
    outputs: dict[Forward, Tensor] = field(default_factory=dict)
    grads: dict[Forward, Tensor] = field(default_factory=dict)  # received gradients of outputs
    losses: list[Tensor] = field(default_factory=list)

    def execute(self, plan: Sequence[Action]) -> Tensor:
        for action in plan:
            match action:
                case Forward():
                    self._forward(action)
                case Backward():
                    self._backward(_forward_of(action))
                case Transfer():
                    self._transfer(action)
        if self.losses:
            return torch.stack(self.losses).float()
        return torch.empty(0, device=self.micro_batches[0].tokens.device)

    def _is_last(self, forward: Forward) -> bool:
        return self.pp.is_last and forward.chunk == len(self.chunks) - 1

    def _forward(self, forward: Forward) -> None:
        batch = self.micro_batches[forward.micro_batch]
        is_first, is_last = self.pp.is_first and forward.chunk == 0, self._is_last(forward)
        inputs = batch.tokens if is_first else self.inputs[forward]
        output = self.chunks[forward.chunk](inputs, batch.labels if is_last else None)
        if is_last:
            self.losses.append(output.detach())
        if not is_last or torch.is_grad_enabled():
            self.outputs[forward] = output
        if not torch.is_grad_enabled():
            self.inputs.pop(forward, None)  # there is no backward that needs it

    def _backward(self, forward: Forward) -> None:
        output = self.outputs.pop(forward)
        grad = torch.full_like(output, self.grad) if self._is_last(forward) else self.grads.pop(forward)
        if output.requires_grad or self._is_last(forward):  # all of the first chunk may be frozen
            torch.autograd.backward(output, grad)

    def _transfer(self, transfer: Transfer) -> None:
        previous, following = (self.pp.rank - 1) % self.pp.size, (self.pp.rank + 1) % self.pp.size
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        # With two stages both neighbours are one rank. Activations come first on both ends.
        if transfer.send_activation is not None:
            sends.append((following, self._sent_activation(transfer.send_activation)))
        if transfer.send_gradient is not None:
            sends.append((previous, self._sent_gradient(_forward_of(transfer.send_gradient))))
        if transfer.receive_activation is not None:
            forward = transfer.receive_activation
            tokens = self.micro_batches[forward.micro_batch].tokens
            self.inputs[forward] = self.chunks[forward.chunk].activation_buffer(tokens)
            receives.append((previous, self.inputs[forward]))
        if transfer.receive_gradient is not None:
            forward = _forward_of(transfer.receive_gradient)
            output = self.outputs[forward]
            self.grads[forward] = torch.empty_like(output, memory_format=torch.contiguous_format)
            receives.append((following, self.grads[forward]))
        exchange(self.pp, sends, receives)
        if transfer.receive_activation is not None:
            self.inputs[transfer.receive_activation].requires_grad_(torch.is_grad_enabled())

    def _sent_activation(self, forward: Forward) -> Tensor:
        # The backward needs the output, if there is one.
        return self.outputs[forward] if torch.is_grad_enabled() else self.outputs.pop(forward)

    def _sent_gradient(self, forward: Forward) -> Tensor:
        grad = self.inputs.pop(forward).grad
        assert grad is not None, "a received activation has a gradient after its backward"
        return grad


def _forward_of(backward: Backward) -> Forward:
    return Forward(backward.micro_batch, backward.chunk)


def _chunks_of(model: PipelineStage | ModelChunks) -> Sequence[PipelineStage]:
    return cast(Sequence[PipelineStage], list(model)) if isinstance(model, ModelChunks) else [model]


def _count(micro_batches: Sequence[MicroBatch]) -> int:
    if not micro_batches:
        raise DeclarationError(
            "there is no micro-batch to run. Give at least one, the same number on every rank."
        )
    return len(micro_batches)
