"""Low-rank adapters of linear layers: what is added to the output of a layer whose weight stays as it is.

An adapter is a child of its layer and runs in a forward hook. So the layer's own names and keys do not
change, and `sharded_state_dict` declares the adapter under `<layer>.adapter.<name>`. `adapters` puts them
into a model.

    layer            A [rank, in]                        B [out, rank]
    column           cut over the rank, output gathered  cut as the layer's rows, with its components
    row              cut as the layer's columns          cut over the rows, output gathered
    nn.Linear        equal on all ranks                  equal on all ranks
    grouped column   equal on all ranks of etp           cut as the layer's rows, with its components
    grouped row      cut as the layer's columns          equal on all ranks of etp

Grouped layers have matrices for each expert, with the axis over the experts first.

Source: Hu et al. 2021, section 4.1; Liu et al. 2024, equations 5 and 11 (DoRA).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from megackpt.errors import DeclarationError
from megackpt.training.parallel.attributes import ParameterFlag, is_marked, mark
from megackpt.training.parallel.collectives import (
    all_reduce,
    collect_sequence,
    copy_to_neighbours,
    scatter_sequence,
)
from megackpt.training.parallel.experts import GroupedColumnLinear, GroupedReplicatedLinear, GroupedRowLinear
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.linear import ColumnParallelLinear, RowParallelLinear, divide_over_tp
from megackpt.training.parallel.mixin import ShardedModule
from megackpt.training.parallel.rng import ParallelDropout, ParallelRng, Stream
from megackpt.training.parallel.tp_sharding import TpSharding, as_sharding

# What an adapter is made of: rank, scale and target layers, as plain values and as JSON.

_LARGEST = 3e38  # of float32


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Choices of one adapter.

    Attributes:
        rank: extent between the two matrices of a layer's adapter.
        targets: ends of the names of layers, `"linear_proj"` or `"self_attention.linear_proj"`. Of a layer
            with named components, `"linear_qkv"` gives all of them one matrix A, and `"linear_qkv.q"` gives
            this component an A of its own, as Hugging Face models with separate projections have it.
        alpha: the adapter's output is multiplied by `alpha / rank`; None stands for `rank`.
        dropout: probability that an element of the adapter's input becomes 0.
        rank_stabilised: multiply by `alpha / sqrt(rank)` instead.
        dora: scale the rows of the adapted weight to lengths that are learned, too.

    Raises:
        DeclarationError: a value is out of range.

    Source: Hu et al. 2021, section 4.1; Kalajdzievski 2023 (rank_stabilised); Liu et al. 2024 (dora).
    """

    rank: int
    targets: tuple[str, ...]
    alpha: float | None = None
    dropout: float = 0.0
    rank_stabilised: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise DeclarationError(f"the rank of an adapter is {self.rank!r}. Give an integer of at least 1.")
        if isinstance(self.targets, str) or not all(isinstance(t, str) and t for t in self.targets):
            raise DeclarationError(f"targets is {self.targets!r}. Give a tuple of names, ('linear_qkv',).")
        if not self.targets:
            raise DeclarationError("an adapter has no targets. Name at least one layer, ('linear_qkv',).")
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise DeclarationError(f"dropout of an adapter is {self.dropout!r}. Give a number in [0, 1).")
        if self.alpha is not None and not _is_number(self.alpha):
            raise DeclarationError(
                f"alpha of an adapter is {self.alpha!r:.80}. Give a finite number, or None."
            )

    @property
    def scale(self) -> float:
        """What the adapter's output is multiplied by."""
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)

    def to_json(self) -> dict[str, Any]:
        """Return the choices as JSON values."""
        return {**asdict(self), "targets": list(self.targets)}

    @classmethod
    def from_json(cls, values: Any) -> LoRAConfig:
        """Return the choices that `to_json` returned.

        Raises:
            DeclarationError: entries are missing, unknown or out of range.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or not {"rank", "targets"} <= values.keys() <= names:
            raise DeclarationError(
                f"{values!r} is no stored LoRAConfig. Give a mapping of rank, targets and any of "
                f"{', '.join(sorted(names - {'rank', 'targets'}))}."
            )
        return cls(**{**values, "targets": tuple(values["targets"])})


def _is_number(value: object) -> bool:
    """Return whether a value is a number that a float32 can be multiplied by."""
    is_typed = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_typed and -_LARGEST < value < _LARGEST  # type: ignore[operator]  # NaN is not


AdaptedLayer: TypeAlias = (
    ColumnParallelLinear | RowParallelLinear | GroupedColumnLinear | GroupedRowLinear | nn.Linear
)
"""Layers that can have an adapter."""

WHOLE = "whole"
"""Name of the matrices for all rows of a layer."""


class LowRank(ShardedModule):
    """`B A x` for some rows of a layer. As collective as the layer.

    Takes what the layer takes; the output has the shape of the layer's output, with these rows only.

    Args:
        layer: the adapted layer.
        config: the choices of the adapter.
        components: names of the layer's components whose rows these are; empty for a layer without.
        groups: the ranks around this one, as the layer sees them.
        rng: random streams for dropout.

    Raises:
        DeclarationError: tp does not divide the rank.
    """

    def __init__(
        self,
        layer: AdaptedLayer,
        config: LoRAConfig,
        components: Sequence[str],
        groups: ParallelGroups,
        rng: ParallelRng | None,
    ) -> None:
        rows = _row_sharding(layer, components)
        super().__init__(groups, tp_sharding={"magnitude": rows} if config.dora and rows else None)
        self.linear_in, self.linear_out = _matrices(layer, config.rank, rows, groups)
        self.dropout = ParallelDropout(config.dropout, rng, _stream(layer))
        self.scatters_sequence = isinstance(layer, RowParallelLinear) and layer.sequence_parallel
        self.magnitude: nn.Parameter | None = None
        self.shared_rows: tuple[tuple[int, int, int], ...] = ()
        if config.dora:
            count = sum(rows.components.values()) if rows and rows.components else len(layer.weight)
            self.magnitude = nn.Parameter(layer.weight.new_ones(count))
            self.shared_rows = rows.shared_rows(count) if rows else ()
            if self.scatters_sequence or is_marked(layer.weight, "sequence_parallel"):
                mark(self.magnitude, "sequence_parallel")

    def forward(self, x: Tensor, *counts: Sequence[int]) -> Tensor:
        """Return what is added for input `x`, before it is scaled; `counts` are the rows of each expert."""
        y: Tensor = self.linear_out(self.linear_in(self.dropout(x), *counts), *counts)
        return scatter_sequence(y, self.groups.tp) if self.scatters_sequence else y

    def product(self) -> Tensor:
        """Return `B A`, shaped like its rows of this rank's weight: float32, no autograd. Collective."""
        with torch.no_grad():
            a, b = _whole_rows(self.linear_in, self.linear_in.weight), self.linear_out.weight
            if isinstance(self.linear_in, RowParallelLinear):  # this rank's weight has all rows
                b = _whole_rows(self.linear_out, b)
            return cast(Tensor, b.float() @ a.float())

    def row_factor(self, adapted: Tensor) -> Tensor:
        """Return what DoRA multiplies the rows of an adapted weight with, `[rows]`. Collective.

        Their lengths are constants for autograd, as in section 4.3 of the paper.
        """
        assert self.magnitude is not None
        squares = adapted.square().sum(-1)
        if isinstance(self.linear_in, RowParallelLinear):  # each rank has some columns
            squares = all_reduce(squares, self.groups.tp)
        magnitude = copy_to_neighbours(self.magnitude, self.groups.tp, self.shared_rows)
        return magnitude / squares.sqrt().to(magnitude.dtype)


class LoRA(nn.Module):
    """One adapter of one layer: a `LowRank` for the whole layer, or one for each of some components.

    Args:
        layer: the adapted layer.
        config: the choices of the adapter.
        components: components with matrices of their own; empty for matrices for the whole layer.
        groups: the ranks around this one, for a layer that does not know them (nn.Linear).
        rng: random streams for dropout; may be None where there is none.

    Attributes:
        is_active: whether it changes the output of its layer.

    Raises:
        DeclarationError: tp does not divide the rank; layers of experts with dropout or DoRA.
    """

    def __init__(
        self,
        layer: AdaptedLayer,
        config: LoRAConfig,
        components: Sequence[str],
        groups: ParallelGroups,
        rng: ParallelRng | None = None,
    ) -> None:
        super().__init__()
        groups = layer.groups if isinstance(layer, ShardedModule) else groups
        if (config.dropout or config.dora) and is_marked(layer.weight, "expert_parallel"):
            raise DeclarationError(
                f"{type(layer).__name__}: adapters of experts have neither dropout nor dora. Leave the "
                f"experts out of the targets, or give them an adapter of their own without these."
            )
        self.config = config
        self.is_active = True
        self.rows = _row_slices(layer, components)
        for name in self.rows:
            of_rows = (name,) if components else tuple(components_of(layer))
            self.add_module(name, LowRank(layer, config, of_rows, groups, rng))

    def forward(self, layer: AdaptedLayer, output: Tensor, *inputs: Any) -> Tensor:
        """Return the output of the layer with that of this adapter. As collective as the layer.

        Args:
            layer: the adapted layer.
            output: its output, which other adapters may have changed already.
            inputs: its arguments.
        """
        result = output.clone()
        for name, low_rank in self.parts():
            rows = self.rows[name]
            added = self.config.scale * low_rank(*inputs)
            if low_rank.magnitude is not None:
                factor = _whole_rows(layer, low_rank.row_factor(self._adapted(layer, name, low_rank)))
                plain = output[..., rows]
                if layer.bias is not None:  # is added after the rows are scaled
                    plain = plain - _whole_rows(layer, layer.bias)[rows]
                added = factor * added + (factor - 1) * plain
            result[..., rows] += added
        return result

    def merge_into(self, layer: AdaptedLayer) -> None:
        """Change the weight of the layer to that of layer and adapter, computed in float32. Collective."""
        with torch.no_grad():
            for name, low_rank in self.parts():
                adapted = self._adapted(layer, name, low_rank)
                if low_rank.magnitude is not None:
                    adapted *= low_rank.row_factor(adapted).float()[:, None]
                layer.weight[..., self.rows[name], :] = adapted.to(layer.weight.dtype)

    def reset_magnitudes(self, layer: AdaptedLayer) -> None:
        """Set the magnitudes of DoRA to the lengths of the rows as they are. Collective."""
        with torch.no_grad():
            for name, low_rank in self.parts():
                if low_rank.magnitude is not None:
                    low_rank.magnitude.fill_(1)
                    lengths = 1 / low_rank.row_factor(self._adapted(layer, name, low_rank))
                    low_rank.magnitude.copy_(lengths)

    def parts(self) -> list[tuple[str, LowRank]]:
        """Return the matrices by the names of their rows."""
        return [(name, cast(LowRank, module)) for name, module in self.named_children()]

    def _adapted(self, layer: AdaptedLayer, name: str, low_rank: LowRank) -> Tensor:
        """Return some rows of the weight with the adapter's product added, float32. Collective."""
        rows = layer.weight.detach()[..., self.rows[name], :]
        return rows.float() + self.config.scale * low_rank.product()


def components_of(layer: AdaptedLayer) -> dict[str, int]:
    """Return names and local extents of the components of a layer's rows; empty for one without."""
    return dict(getattr(layer, "local_components", None) or {})


def _row_slices(layer: AdaptedLayer, components: Sequence[str]) -> dict[str, slice]:
    """Return which local rows each of `components` has, in the order of the layer; WHOLE without any."""
    slices, start = {}, 0
    for name, size in components_of(layer).items():
        slices[name] = slice(start, start + size)
        start += size
    return {n: s for n, s in slices.items() if n in components} if components else {WHOLE: slice(None)}


def _row_sharding(layer: AdaptedLayer, components: Sequence[str]) -> TpSharding | None:
    """Return how tp cuts these components of the layer's rows; None if it does not cut its rows."""
    if not isinstance(layer, (ColumnParallelLinear, GroupedColumnLinear)):
        return None
    sharding = as_sharding(layer.tp_sharding["weight"])
    if sharding.components is None:
        return sharding
    sizes = {name: sharding.components[name] for name in components}
    return TpSharding(dim=0, components=sizes, copies={name: sharding.copies_of(name) for name in sizes})


def _matrices(
    layer: AdaptedLayer, rank: int, rows: TpSharding | None, groups: ParallelGroups
) -> tuple[Any, Any]:
    """Return the layers that multiply with A and with B."""
    if isinstance(layer, ColumnParallelLinear):
        assert rows is not None
        return _matrices_of_columns(layer, rank, rows, groups)
    if isinstance(layer, RowParallelLinear):
        return _matrices_of_rows(layer, rank, groups)
    if isinstance(layer, nn.Linear):
        return _matrices_of_whole(layer, rank)
    return _matrices_of_experts(layer, rank, rows, groups)


def _memory_of(layer: AdaptedLayer) -> dict[str, Any]:
    """Return the keyword arguments that give a new layer the dtype and the device of another."""
    return {"dtype": layer.weight.dtype, "device": layer.weight.device}


def _matrices_of_columns(
    layer: ColumnParallelLinear, rank: int, rows: TpSharding, groups: ParallelGroups
) -> tuple[Any, Any]:
    weight, tp = layer.weight, groups.tp.size
    divide_over_tp("the rank of an adapter,", rank, groups)
    sizes = {n: s * tp // rows.copies_of(n) for n, s in (rows.components or {}).items()}
    a = ColumnParallelLinear(
        weight.shape[1],
        rank,
        groups,
        bias=False,
        gather_output=True,
        sequence_parallel=layer.sequence_parallel,
        **_memory_of(layer),
    )
    b = ColumnParallelLinear(
        rank,
        sizes or len(weight) * tp,
        groups,
        bias=False,
        gather_output=layer.gather_output,
        copies={name: rows.copies_of(name) for name in sizes},
        **_memory_of(layer),
    )
    return a, b


def _matrices_of_rows(layer: RowParallelLinear, rank: int, groups: ParallelGroups) -> tuple[Any, Any]:
    weight, memory = layer.weight, _memory_of(layer)
    a = RowParallelLinear(
        weight.shape[1] * groups.tp.size,
        rank,
        groups,
        bias=False,
        input_is_parallel=layer.input_is_parallel,
        **memory,
    )
    b = ColumnParallelLinear(rank, len(weight), groups, bias=False, gather_output=True, **memory)
    return a, b


def _matrices_of_whole(layer: nn.Linear, rank: int) -> tuple[Any, Any]:
    weight, memory = layer.weight, _memory_of(layer)
    pair = nn.Linear(weight.shape[1], rank, False, **memory), nn.Linear(rank, len(weight), False, **memory)
    for linear in pair:
        mark(linear.weight, *(flag for flag in _COPIED_FLAGS if is_marked(weight, flag)))
    return pair


def _matrices_of_experts(
    layer: GroupedColumnLinear | GroupedRowLinear,
    rank: int,
    rows: TpSharding | None,
    groups: ParallelGroups,
) -> tuple[Any, Any]:
    weight, memory = layer.weight, _memory_of(layer)
    experts, etp = len(weight) * groups.ep.size, groups.etp.size
    if isinstance(layer, GroupedColumnLinear):
        assert rows is not None
        sizes = {name: size * etp for name, size in (rows.components or {}).items()}
        return (
            GroupedReplicatedLinear(experts, weight.shape[2], rank, groups, **memory),
            GroupedColumnLinear(experts, rank, sizes or weight.shape[1] * etp, groups, bias=False, **memory),
        )
    return (
        GroupedRowLinear(experts, weight.shape[2] * etp, rank, groups, bias=False, **memory),
        GroupedReplicatedLinear(experts, rank, weight.shape[1], groups, **memory),
    )


_COPIED_FLAGS: tuple[ParameterFlag, ...] = ("sequence_parallel", "expert_parallel")


def _stream(layer: AdaptedLayer) -> Stream:
    """Return the random stream for the inputs of a layer: `distinct` if those of the ranks of tp differ."""
    if isinstance(layer, RowParallelLinear):
        return "distinct" if layer.input_is_parallel else "replicated"
    if isinstance(layer, ColumnParallelLinear):
        return "distinct" if layer.sequence_parallel else "replicated"
    return "distinct" if is_marked(layer.weight, "sequence_parallel") else "replicated"


def _whole_rows(layer: Any, rows: Tensor) -> Tensor:
    """Return the rows of all ranks of tp if the layer joins its outputs, or else this rank's. Collective."""
    return collect_sequence(rows, layer.groups.tp) if getattr(layer, "gather_output", False) else rows
