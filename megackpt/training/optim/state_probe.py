"""Finds the structure of optimizer state before the first step, and creates placeholders of that structure.

torch optimizers create the state of a parameter in its first step. A checkpoint needs the structure earlier:
to save a model that has not trained yet, and to load into an optimizer that was just built. A harmless step
on the real parameters would create the structure but not the right values: SGD's first step with dampening,
for one, differs from all later ones. So the structure is taken from a *probe*, a few elements on which a
second optimizer from the same factory takes steps, and real parameters get zeros of that structure as
placeholders. Before the first real update of a parameter its placeholder is dropped, and the inner optimizer
starts exactly as if it had just been built.

State that has not the shape of the parameter (factored moments, matrix factors, scales of blocks) has a
structure that depends on the parameter's shape. Where a probe shows such state, each whole parameter gets a
probe of its own shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from megackpt.errors import OptimizerError

OptimizerBuilder: TypeAlias = Callable[
    [Sequence[Sequence[Tensor]]], Optimizer
]  # tensors of each group -> inner optimizer

_EXTENT = 8  # of a small probe along its last dim
_LARGE = 8192  # elements of a large probe: 8-bit optimizers keep the state of small parameters in float32
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
    """The structure of one parameter's state. Names are those of `entries`.

    Attributes:
        optimizer: class of the optimizer, for errors.
        elementwise: dtype of each state that has the shape of the parameter, by name.
        scalars: an example of each state that is one number, equal on all ranks, by name: a tensor of one
            element, or a number.
        arrays: names of tensors of another shape, and of numbers that depend on the parameter's values.
        has_lists: whether some states are in lists.
        placeholder_state: zeros of this structure for one parameter; None if they follow from the other
            fields.
    """

    optimizer: str
    elementwise: Mapping[str, torch.dtype]
    scalars: Mapping[str, Tensor | float]
    arrays: frozenset[str]
    has_lists: bool
    placeholder_state: dict[str, Any] | None = field(default=None, repr=False)

    def placeholder(self, param: Tensor) -> dict[str, Any]:
        """Return zeros of this structure for `param`."""
        if self.placeholder_state is not None:
            return self.placeholder_state
        state: dict[str, Any] = {
            name: torch.zeros_like(param, dtype=dtype) for name, dtype in self.elementwise.items()
        }
        return state | {name: _zeros_like(value) for name, value in self.scalars.items()}

    def follows_from_kind(self, other: StateSpec) -> bool:
        """Return whether the structure is that of `other`, of a probe of another size, and has no arrays."""
        same = dict(self.elementwise) == dict(other.elementwise) and set(self.scalars) == set(other.scalars)
        return same and not (self.arrays or other.arrays or self.has_lists or other.has_lists)

    def check_no_arrays(self) -> None:
        """Raise unless every state is elementwise or one number, as those of shards have to be."""
        if self.arrays or self.has_lists:
            raise OptimizerError(
                f"{self.optimizer} keeps state that is neither of the parameter's shape nor one number that "
                f"all ranks have: {', '.join(map(repr, sorted(self.arrays))) or 'lists'}. A "
                f"DistributedOptimizer cuts parameters between ranks at any element, so such state would be "
                f"that of a range and not of the parameter. Use MixedPrecisionOptimizer or "
                f"WholeMatrixOptimizer, which keep parameters whole, or an elementwise optimizer such as "
                f"AdamW."
            )


def entries(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of everything in a parameter's state that can be stored.

    The members of a list have names such as `GG.0`; None and empty lists are left out.
    """
    for name, value in state.items():
        if isinstance(value, (list, tuple)):
            yield from ((f"{name}.{i}", member) for i, member in enumerate(value) if not _is_nothing(member))
        elif value is not None:
            yield name, value


def kinds_of_masters(groups: Iterable[Iterable[Tensor]], *, flat: bool) -> list[list[ProbeKind]]:
    """Return the kinds of the masters of parameters, by group; flat ranges have one dim. Local.

    Of all parameters, also those of which this rank owns nothing: then all ranks reject an optimizer.
    """
    return [
        list(
            dict.fromkeys(
                # As `cut_slices` makes them: two-byte parameters have float32 masters.
                ProbeKind(
                    p.dtype if p.dtype.itemsize >= 4 else torch.float32,
                    p.device,
                    1 if flat else max(p.ndim, 1),
                )
                for p in group
            )
        )
        for group in groups
    ]


def probe_shards(
    build: OptimizerBuilder, kinds: Sequence[Sequence[ProbeKind]], masters: Sequence[Sequence[Tensor]]
) -> list[list[StateSpec]]:
    """Return the structure of the state of each master, by group; masters are flat ranges. Local.

    Args:
        build: creates the optimizer.
        kinds: of the masters of each group on all ranks.
        masters: of each group on this rank.

    Raises:
        OptimizerError: the optimizer cannot step on plain dense tensors, or keeps a state that is neither of
            the parameter's shape nor a number.
    """
    small, large = (_probe_kinds(build, kinds, numel) for numel in (0, _LARGE))
    for specs in (*small, *large):
        for spec in specs.values():
            spec.check_no_arrays()
    return _of_masters(small, masters)


def probe_whole(
    build: OptimizerBuilder, kinds: Sequence[Sequence[ProbeKind]], masters: Sequence[Sequence[Tensor]]
) -> list[list[StateSpec]]:
    """Return the structure of the state of each master, by group; masters are whole parameters. Local.

    The arguments are those of `probe_shards`. If state has other shapes than the parameters, it needs memory
    for one parameter more, with its gradient and its state.

    Raises:
        OptimizerError: the optimizer cannot step on plain dense tensors, or keeps a state of another type.
    """
    small, large = (_probe_kinds(build, kinds, numel) for numel in (0, _LARGE))
    specs = _of_masters(large, masters)
    pairs = [
        (of_small[kind], spec)
        for of_small, of_large in zip(small, large, strict=True)
        for kind, spec in of_large.items()
    ]
    if all(spec.follows_from_kind(other) for spec, other in pairs):
        return specs
    return [
        [
            _exact_spec(build, len(masters), number, master, spec)
            for master, spec in zip(group, of_group, strict=True)
        ]
        for number, (group, of_group) in enumerate(zip(masters, specs, strict=True))
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
    _check_takes_ranges(build, whole)
    optimizer = _after_steps(build, whole)
    _after_steps(build, cut)
    if not all(_are_close(members, sides) for members, sides in zip(whole, cut, strict=True)):
        raise OptimizerError(
            f"{type(optimizer).__name__} is not elementwise: it updates a parameter that is cut in two "
            f"differently from the whole one (layer-wise norms, factored moments). A DistributedOptimizer "
            f"cuts parameters between ranks, so the result would depend on their number. Use "
            f"MixedPrecisionOptimizer, which keeps parameters whole, or an elementwise optimizer such as "
            f"AdamW."
        )


def _check_takes_ranges(build: OptimizerBuilder, ranges: Sequence[Sequence[Tensor]]) -> None:
    try:
        build(ranges)
    except ValueError as error:
        raise OptimizerError(
            f"The optimizer cannot be made of flat ranges of parameters: {error} A DistributedOptimizer cuts "
            f"parameters between ranks at any element. Use WholeMatrixOptimizer or MixedPrecisionOptimizer, "
            f"which keep parameters whole, or an elementwise optimizer such as AdamW."
        ) from error


def _are_close(whole: Sequence[Tensor], sides: Sequence[Tensor]) -> bool:
    """Whether the two sides of each parameter, which follow each other, are the whole one."""
    joined = [torch.cat([a, b]) for a, b in zip(sides[::2], sides[1::2], strict=True)]
    # Not bit for bit: vectorised kernels may round the tail of a tensor differently from its middle.
    return all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(whole, joined, strict=True))


def _values(kind: ProbeKind, numel: int = 0) -> Tensor:
    """Return a small probe, or one of at least `numel` elements; no two of its dims have the same extent.

    So no state has the shape of the probe by chance.
    """
    extent = max(_EXTENT, math.ceil(numel ** (1 / kind.ndim)))
    shape = tuple(range(extent + kind.ndim - 1, extent - 1, -1))
    values = torch.linspace(0.5, 2.5, math.prod(shape), dtype=kind.dtype, device=kind.device)
    return values.view(shape)


def _probe_kinds(
    build: OptimizerBuilder, kinds: Sequence[Sequence[ProbeKind]], numel: int
) -> list[dict[ProbeKind, StateSpec]]:
    """Return the structure of the state of each kind of master, by group."""
    # Of each kind two probes with other values, by which numbers that depend on values are found.
    probes = [[_values(kind, numel) * factor for kind in group for factor in (1.0, 0.75)] for group in kinds]
    optimizer = _after_steps(build, probes)
    return [
        {
            kind: _spec(optimizer, *pair)
            for kind, pair in zip(group, zip(members[::2], members[1::2], strict=True), strict=True)
        }
        for group, members in zip(kinds, probes, strict=True)
    ]


def _of_masters(
    specs: Sequence[Mapping[ProbeKind, StateSpec]], masters: Sequence[Sequence[Tensor]]
) -> list[list[StateSpec]]:
    """Return the structure that was found for the kind of each master."""
    return [[of_kind[ProbeKind.of(m)] for m in group] for of_kind, group in zip(specs, masters, strict=True)]


def _exact_spec(
    build: OptimizerBuilder, num_groups: int, number: int, master: Tensor, spec: StateSpec
) -> StateSpec:
    """Return the structure of the state of one master of group `number`, from a probe of its shape.

    Args:
        build: creates the optimizer.
        num_groups: of the optimizer.
        number: of the master's group.
        master: whole.
        spec: of a probe whose dims have different extents, which says by name what is elementwise. The
            master may be square, and a factor of it then has its shape.
    """
    probe = torch.linspace(0.5, 2.5, master.numel(), dtype=master.dtype, device=master.device).view(
        master.shape
    )
    optimizer = _after_steps(build, [[probe] if group == number else [] for group in range(num_groups)])
    exact = _spec(optimizer, probe, probe)
    arrays = exact.arrays | (spec.arrays & {*exact.elementwise, *exact.scalars})
    return StateSpec(
        optimizer=spec.optimizer,
        has_lists=exact.has_lists,
        elementwise={name: dtype for name, dtype in exact.elementwise.items() if name not in arrays},
        scalars={name: value for name, value in exact.scalars.items() if name not in arrays},
        arrays=arrays,
        placeholder_state={
            name: _zeros_like(value) for name, value in optimizer.state.get(probe, {}).items()
        },
    )


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


def _spec(optimizer: Optimizer, probe: Tensor, other: Tensor) -> StateSpec:
    """Return the structure of the state of a probe; `other` is one of the same kind with other values."""
    elementwise: dict[str, torch.dtype] = {}
    scalars: dict[str, Tensor | float] = {}
    arrays: set[str] = set()
    of_other = dict(entries(optimizer.state.get(other, {})))
    state = optimizer.state.get(probe, {})
    for name, value in entries(state):
        if isinstance(value, Tensor) and value.shape == probe.shape:
            elementwise[name] = value.dtype
        elif isinstance(value, Tensor) and value.numel() != 1:
            arrays.add(name)
        elif isinstance(value, (int, float, Tensor)):
            if name in of_other and bool(value == of_other[name]):
                scalars[name] = value
            else:  # it depends on the values of the parameter, as a norm does
                arrays.add(name)
        else:
            raise _unsupported_state(optimizer, probe, name, value)
    return StateSpec(
        optimizer=type(optimizer).__name__,
        elementwise=elementwise,
        scalars=scalars,
        arrays=frozenset(arrays),
        has_lists=any(isinstance(value, (list, tuple)) for value in state.values()),
    )


def _unsupported_state(optimizer: Optimizer, probe: Tensor, name: str, value: object) -> OptimizerError:
    return OptimizerError(
        f"{type(optimizer).__name__} keeps a state {name!r} of type {type(value).__name__} for a parameter "
        f"of shape {tuple(probe.shape)}. Only tensors, lists of tensors and numbers can be stored. Use an "
        f"optimizer without such state, such as AdamW."
    )


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and not value)


def _zeros_like(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_zeros_like(member) for member in value)
    return None if value is None else type(value)(0)
