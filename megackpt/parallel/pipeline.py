"""Executes a pipeline plan: runs one stage, and exchanges activations and gradients with its neighbours.

`schedule` decides the order of the actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.errors import DeclarationError
from megackpt.parallel.groups import Axis, ParallelGroups
from megackpt.parallel.schedule import Action, Backward, Forward, Transfer, plan_1f1b, plan_forward


class MicroBatch(NamedTuple):
    """Input and target of one forward: token ids and labels, both `[batch, sequence]`, on every stage."""

    tokens: Tensor
    labels: Tensor


class PipelineStage(Protocol):
    """A model that can be run as a stage."""

    def __call__(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Run the stage on tokens (first) or activations (others); the last returns the mean loss."""

    def activation_buffer(self, tokens: Tensor) -> Tensor:
        """Return an empty tensor such as the previous stage sends for a micro-batch with `tokens`."""


def forward_backward(
    model: PipelineStage,
    micro_batches: Sequence[MicroBatch],
    groups: ParallelGroups,
    *,
    loss_scale: float = 1.0,
) -> Tensor:
    """Run all micro-batches forward and backward (1F1B). Collective over pp, and over tp in the layers.

    Gradients accumulate in the parameters: `loss_scale` times those of the mean over this rank's
    micro-batches. Sums over dp, tp (sequence_parallel) and the tied embedding are left to the caller.

    Args:
        model: this rank's stage.
        micro_batches: the same number on every rank; equal over tp and pp.
        groups: the ranks around this one.
        loss_scale: factor on the gradients, against underflow in half precision.

    Returns:
        The losses, float32 `[micro_batches]`, unscaled, on the last stage; an empty tensor elsewhere (see
        `share_losses`).

    Raises:
        DeclarationError: there is no micro-batch.
    """
    plan = plan_1f1b(groups.pp.size, groups.pp.rank, _count(micro_batches))
    return _PlanExecution(model, micro_batches, groups, grad=loss_scale / len(micro_batches)).execute(plan)


def forward_only(model: PipelineStage, micro_batches: Sequence[MicroBatch], groups: ParallelGroups) -> Tensor:
    """Return the losses as `forward_backward` does, without gradients. Collective over pp (and tp).

    Raises:
        DeclarationError: there is no micro-batch.
    """
    plan = plan_forward(groups.pp.size, groups.pp.rank, _count(micro_batches))
    with torch.no_grad():
        return _PlanExecution(model, micro_batches, groups, grad=0.0).execute(plan)


def share_losses(losses: Tensor, micro_batches: int, groups: ParallelGroups) -> Tensor:
    """Return the last stage's losses on every stage, float32 `[micro_batches]`. Collective over pp."""
    if groups.pp.size == 1:
        return losses
    shared = losses.clone() if groups.pp.is_last else losses.new_empty(micro_batches)
    dist.broadcast(shared, src=groups.pp.ranks[-1], group=groups.pp.group)
    return shared


def exchange(
    axis: Axis, peer: int, *, send: Tensor | None = None, receive: Tensor | None = None
) -> Tensor | None:
    """Send to and receive from the rank at index `peer` of the axis, in one batch; return what was received.

    Blocks until both are done; the peer must make the matching call. `receive` is the buffer to fill.
    """
    operations = [(dist.isend, send), (dist.irecv, receive)]
    ops = [
        dist.P2POp(op, tensor.detach().contiguous(), axis.ranks[peer], axis.group)
        for op, tensor in operations
        if tensor is not None
    ]
    # One batch: NCCL would deadlock on two stages that each wait for their own send first.
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
    return receive


@dataclass(slots=True)
class _PlanExecution:
    """One execution of a plan: received tensors, and outputs that wait for their backward."""

    model: PipelineStage
    micro_batches: Sequence[MicroBatch]
    groups: ParallelGroups
    grad: float  # gradient of the step's objective by the loss of one micro-batch
    inputs: dict[int, Tensor] = field(default_factory=dict)  # received activations, then their .grad
    outputs: dict[int, Tensor] = field(default_factory=dict)
    grads: dict[int, Tensor] = field(default_factory=dict)  # received gradients of outputs
    losses: list[Tensor] = field(default_factory=list)

    def execute(self, plan: Sequence[Action]) -> Tensor:
        for action in plan:
            match action:
                case Forward(k):
                    self._forward(k)
                case Backward(k):
                    self._backward(k)
                case Transfer(peer="previous"):
                    self._exchange_with_previous(action)
                case Transfer():
                    self._exchange_with_next(action)
        if self.losses:
            return torch.stack(self.losses).float()
        return torch.empty(0, device=self.micro_batches[0].tokens.device)

    def _forward(self, k: int) -> None:
        pp, batch = self.groups.pp, self.micro_batches[k]
        inputs = batch.tokens if pp.is_first else self.inputs[k]
        output = self.model(inputs, batch.labels if pp.is_last else None)
        if pp.is_last:
            self.losses.append(output.detach())
        if not pp.is_last or torch.is_grad_enabled():
            self.outputs[k] = output
        if not torch.is_grad_enabled():
            self.inputs.pop(k, None)  # there is no backward that needs it

    def _backward(self, k: int) -> None:
        output = self.outputs.pop(k)
        grad = torch.full_like(output, self.grad) if self.groups.pp.is_last else self.grads.pop(k)
        torch.autograd.backward(output, grad)

    def _exchange_with_previous(self, transfer: Transfer) -> None:
        send = receive = None
        if transfer.send is not None:
            send = self.inputs.pop(
                transfer.send
            ).grad  # of an activation that was received: never None after backward
        if transfer.receive is not None:
            receive = self.model.activation_buffer(self.micro_batches[transfer.receive].tokens)
        pp = self.groups.pp
        exchange(pp, pp.rank - 1, send=send, receive=receive)
        if transfer.receive is not None and receive is not None:
            self.inputs[transfer.receive] = receive.requires_grad_(torch.is_grad_enabled())

    def _exchange_with_next(self, transfer: Transfer) -> None:
        send = None if transfer.send is None else self.outputs[transfer.send]
        receive = None if transfer.receive is None else torch.empty_like(self.outputs[transfer.receive])
        pp = self.groups.pp
        exchange(pp, pp.rank + 1, send=send, receive=receive)
        if transfer.send is not None and not torch.is_grad_enabled():
            del self.outputs[transfer.send]
        if transfer.receive is not None and receive is not None:
            self.grads[transfer.receive] = receive


def _count(micro_batches: Sequence[MicroBatch]) -> int:
    if not micro_batches:
        raise DeclarationError(
            "there is no micro-batch to run. Give at least one, the same number on every rank."
        )
    return len(micro_batches)
