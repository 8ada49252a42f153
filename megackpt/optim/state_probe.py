"""Finds the structure of optimizer state before the first step, and creates placeholders of that structure.

torch optimizers create the state of a parameter in its first step. A checkpoint needs the structure earlier:
to save a model that has not trained yet, and to load into an optimizer that was just built. A harmless step
on the real parameters would create the structure but not the right values: SGD's first step with dampening,
for one, differs from all later ones. So the structure is taken from a *probe*, a few elements on which a
second optimizer from the same factory takes steps, and real parameters get zeros of that structure as
placeholders. Before the first real update of a parameter its placeholder is dropped, and the inner optimizer
starts exactly as if it had just been built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from megackpt.errors import OptimizerError

OptimizerBuilder: TypeAlias = Callable[
    [Sequence[Sequence[Tensor]]], Optimizer
]  # tensors of each group -> inner optimizer

_EXTENT = 8  # of a probe, along each dim
_CUT = 3  # not in the middle: an optimizer that uses a whole tensor cannot treat both sides equally by chance
_STEPS = 2


@dataclass(frozen=True, slots=True)
class ProbeKind:
    """What can decide the structure of a parameter's state, besides its group."""

    dtype: torch.dtype
    device: torch.device
    ndim: int

    @classmethod
    def of(cls, tensor: Tensor) -> ProbeKind:
        """Return the kind of probe that stands for `tensor`."""
        return cls(tensor.dtype, tensor.device, max(tensor.ndim, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """The structure of one parameter's state.

    Attributes:
        elementwise: dtype of each state that has the shape of the parameter, by name.
        scalars: an example of each state that is one number, by name: a tensor of one element, or a number.
    """

    elementwise: Mapping[str, torch.dtype]
    scalars: Mapping[str, Tensor | float]

    def placeholder(self, param: Tensor) -> dict[str, Any]:
        """Return zeros of this structure for `param`."""
        state: dict[str, Any] = {
            name: torch.zeros_like(param, dtype=dtype) for name, dtype in self.elementwise.items()
        }
        for name, example in self.scalars.items():
            state[name] = torch.zeros_like(example) if isinstance(example, Tensor) else type(example)(0)
        return state


def probe_state(
    build: OptimizerBuilder, kinds: Sequence[Sequence[ProbeKind]]
) -> list[dict[ProbeKind, StateSpec]]:
    """Return, for each group, the structure of the state of each kind of parameter in it. Local.

    Raises:
        OptimizerError: the optimizer cannot step on plain dense tensors, or keeps a state that is neither of
            the parameter's shape nor a number.
    """
    probes = [[_values(kind) for kind in group] for group in kinds]
    optimizer = _after_steps(build, probes)
    return [
        {kind: _spec(optimizer, probe) for kind, probe in zip(group, members, strict=True)}
        for group, members in zip(kinds, probes, strict=True)
    ]


def check_elementwise(build: OptimizerBuilder, kinds: Sequence[Sequence[ProbeKind]]) -> None:
    """Check that an optimizer updates a parameter that is cut in two like the whole one. Local.

    Args:
        build: creates the optimizer.
        kinds: of each group, of one dim, as flat shards are.

    Raises:
        OptimizerError: it does not.
    """
    whole = [[_values(kind) for kind in group] for group in kinds]
    cut = [[side.clone() for p in group for side in (p[:_CUT], p[_CUT:])] for group in whole]
    optimizer = _after_steps(build, whole)
    _after_steps(build, cut)
    for members, sides in zip(whole, cut, strict=True):
        joined = [torch.cat([a, b]) for a, b in zip(sides[::2], sides[1::2], strict=True)]
        # Not bit for bit: vectorised kernels may round the tail of a tensor differently from its middle.
        if not all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(members, joined, strict=True)):
            raise OptimizerError(
                f"{type(optimizer).__name__} is not elementwise: it updates a parameter that is cut in two "
                f"differently from the whole one (layer-wise norms, factored moments). A "
                "DistributedOptimizer cuts parameters between ranks, so the result would depend on their "
                "number. Use MixedPrecisionOptimizer, which keeps parameters whole, or an elementwise "
                "optimizer such as AdamW."
            )


def _values(kind: ProbeKind) -> Tensor:
    numel = _EXTENT**kind.ndim
    values = torch.linspace(0.5, 2.5, numel, dtype=kind.dtype, device=kind.device)
    return values.view((_EXTENT,) * kind.ndim)


def _after_steps(build: OptimizerBuilder, probes: Sequence[Sequence[Tensor]]) -> Optimizer:
    """Return a fresh optimizer that has taken a few steps on `probes`, with a gradient for each element."""
    optimizer = build(probes)
    for group in optimizer.param_groups:
        if "lr" in group:  # it may be 0 during warmup, and such steps would show nothing
            group["lr"] = torch.full_like(group["lr"], 0.01) if isinstance(group["lr"], Tensor) else 0.01
    try:
        for _ in range(_STEPS):
            for members in probes:
                for probe in members:
                    # A function of the value, so that a cut probe gets the same gradients as the whole one.
                    probe.grad = 0.3 * probe * probe - 1.0
            optimizer.step()
    except Exception as error:
        raise OptimizerError(
            f"{type(optimizer).__name__} cannot be used here: step() on small dense tensors failed with "
            f"{type(error).__name__}: {error}. Use an optimizer that steps without a closure, on dense "
            f"gradients."
        ) from error
    return optimizer


def _spec(optimizer: Optimizer, probe: Tensor) -> StateSpec:
    elementwise: dict[str, torch.dtype] = {}
    scalars: dict[str, Tensor | float] = {}
    for name, value in optimizer.state.get(probe, {}).items():
        if isinstance(value, Tensor) and value.shape == probe.shape:
            elementwise[name] = value.dtype
        elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            scalars[name] = value
        elif value is not None:
            shape = (
                f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
            )
            raise OptimizerError(
                f"{type(optimizer).__name__} keeps a state {name!r} of {shape} for a parameter of shape "
                f"{tuple(probe.shape)}. Only a tensor of the parameter's shape or a single number can be "
                f"declared like the parameter. Use an optimizer without such state, such as AdamW."
            )
    return StateSpec(elementwise=elementwise, scalars=scalars)
