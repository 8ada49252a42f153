"""Carrying out a pipeline plan: running one stage, and exchanging with the neighbouring stages.

Owns the point-to-point exchange and the life of activations between a forward and its backward; which comes
when is decided in `schedule`.
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
    """What a model has to offer to be run as a stage."""

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
        DeclarationError: no micro-batch is given.
    """
    plan = plan_1f1b(groups.pp.size, groups.pp.rank, _counted(micro_batches))
    return _StageRun(model, micro_batches, groups, grad=loss_scale / len(micro_batches)).carry_out(plan)


def forward_only(model: PipelineStage, micro_batches: Sequence[MicroBatch], groups: ParallelGroups) -> Tensor:
    """Return the losses as `forward_backward` does, without gradients. Collective over pp (and tp).

    Raises:
        DeclarationError: no micro-batch is given.
    """
    plan = plan_forward(groups.pp.size, groups.pp.rank, _counted(micro_batches))
    with torch.no_grad():
        return _StageRun(model, micro_batches, groups, grad=0.0).carry_out(plan)


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
    """Send to and receive from the rank at index `peer` of the axis, at once; return what was received.

    Blocks until both are done; the peer has to make the matching call. `receive` is the buffer that is
    filled.
    """
    wanted = [(dist.isend, send), (dist.irecv, receive)]
    ops = [
        dist.P2POp(op, tensor.detach().contiguous(), axis.ranks[peer], axis.group)
        for op, tensor in wanted
        if tensor is not None
    ]
    # One batch: NCCL would deadlock on two stages that each wait for their own send first.
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
    return receive


@dataclass(slots=True)
class _StageRun:
    """The state of one pass over the micro-batches: what has arrived and what waits for its backward."""

    model: PipelineStage
    micro_batches: Sequence[MicroBatch]
    groups: ParallelGroups
    grad: float  # gradient of the step's objective by the loss of one micro-batch
    inputs: dict[int, Tensor] = field(default_factory=dict)  # received activations, then their .grad
    outputs: dict[int, Tensor] = field(default_factory=dict)
    grads: dict[int, Tensor] = field(default_factory=dict)  # received gradients of outputs
    losses: list[Tensor] = field(default_factory=list)

    def carry_out(self, plan: Sequence[Action]) -> Tensor:
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
            self.inputs.pop(k, None)  # no backward will ask for it

    def _backward(self, k: int) -> None:
        output = self.outputs.pop(k)
        grad = torch.full_like(output, self.grad) if self.groups.pp.is_last else self.grads.pop(k)
        torch.autograd.backward(output, grad)

    def _exchange_with_previous(self, what: Transfer) -> None:
        send = receive = None
        if what.send is not None:
            send = self.inputs.pop(
                what.send
            ).grad  # of an activation that was received: never None after backward
        if what.receive is not None:
            receive = self.model.activation_buffer(self.micro_batches[what.receive].tokens)
        pp = self.groups.pp
        exchange(pp, pp.rank - 1, send=send, receive=receive)
        if what.receive is not None and receive is not None:
            self.inputs[what.receive] = receive.requires_grad_(torch.is_grad_enabled())

    def _exchange_with_next(self, what: Transfer) -> None:
        send = None if what.send is None else self.outputs[what.send]
        receive = None if what.receive is None else torch.empty_like(self.outputs[what.receive])
        pp = self.groups.pp
        exchange(pp, pp.rank + 1, send=send, receive=receive)
        if what.send is not None and not torch.is_grad_enabled():
            del self.outputs[what.send]
        if what.receive is not None and receive is not None:
            self.grads[what.receive] = receive


def _counted(micro_batches: Sequence[MicroBatch]) -> int:
    if not micro_batches:
        raise DeclarationError(
            "there is no micro-batch to run. Give at least one, the same number on every rank."
        )
    return len(micro_batches)
